"""ONNX Runtime GenAI reads a language model from an archive."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from models import run_python, text_model
from onnx import numpy_helper
from processes import completed

import onnxarchive

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
og = pytest.importorskip("onnxruntime_genai", reason="ONNX Runtime GenAI is not installed")

pytestmark = pytest.mark.tool

RECIPE = Path(__file__).parents[2] / "tools" / "recipes" / "genai.py"
PROMPT = "the model"
LENGTH = 24  # of prompt and answer, in tokens
VOCABULARY, HEADS, HEAD_SIZE = 300, 2, 32
HIDDEN_SIZE = HEADS * HEAD_SIZE


def tiny_model(first: str = "input_ids") -> onnx.ModelProto:
    """A decoder of one layer, whose next token depends on all tokens before.

    It takes token ids, or their embeddings (`inputs_embeds`).
    """
    random = np.random.default_rng(0)
    shapes = {
        "embedding": (VOCABULARY, HIDDEN_SIZE),
        "key": (HIDDEN_SIZE, HIDDEN_SIZE),
        "value": (HIDDEN_SIZE, HIDDEN_SIZE),
        "head": (HIDDEN_SIZE, VOCABULARY),
    }
    arrays = {name: random.standard_normal(it).astype(np.float32) for name, it in shapes.items()}
    numbers = {"by_head": [0, 0, HEADS, HEAD_SIZE], "flat": [0, 0, HIDDEN_SIZE], "axes": [2]}
    arrays |= {name: np.array(it) for name, it in numbers.items()}
    embedded = first == "inputs_embeds"
    cache = f"batch, {HEADS}, {{}}, {HEAD_SIZE}"
    past, present = (f"float[{cache.format(length)}]" for length in ("before", "length"))
    return text_model(
        f"""tiny (
  {f"float[batch, new, {HIDDEN_SIZE}]" if embedded else "int64[batch, new]"} {first},
  int64[batch, length] attention_mask, {past} past_0_key, {past} past_0_value
) => (
  float[batch, new, {VOCABULARY}] logits, {present} present_0_key, {present} present_0_value
) {{
  x = {f"Identity({first})" if embedded else f"Gather(embedding, {first})"}
  key0 = MatMul(x, key)
  key1 = Reshape(key0, by_head)
  key2 = Transpose<perm = [0, 2, 1, 3]>(key1)
  present_0_key = Concat<axis = 2>(past_0_key, key2)
  value0 = MatMul(x, value)
  value1 = Reshape(value0, by_head)
  value2 = Transpose<perm = [0, 2, 1, 3]>(value1)
  present_0_value = Concat<axis = 2>(past_0_value, value2)
  mean = ReduceMean(present_0_value, axes)
  by_position = Transpose<perm = [0, 2, 1, 3]>(mean)
  context = Reshape(by_position, flat)
  y = Add(x, context)
  logits = MatMul(y, head)
}}""",
        *(numpy_helper.from_array(array, name) for name, array in arrays.items()),
        opset=18,
    )


SETTINGS = {
    "model": {
        "type": "llama",
        "vocab_size": VOCABULARY,
        "context_length": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder": {
            "session_options": {},
            "filename": "model.onnx",
            "head_size": HEAD_SIZE,
            "hidden_size": HIDDEN_SIZE,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "num_hidden_layers": 1,
            "inputs": {"past_key_names": "past_%d_key", "past_value_names": "past_%d_value"},
            "outputs": {
                "present_key_names": "present_%d_key",
                "present_value_names": "present_%d_value",
            },
        },
    },
    "search": {"past_present_share_buffer": False},
}


# Models whose outputs GenAI hands on: features of image and sound, then embeddings of a prompt.
COMPONENTS = {
    "Vision-model": """
vision (float[images, patches, 64] pixel_values) => (float[all, 64] image_features) {
  features = MatMul(pixel_values, projection)
  shape = Constant<value_ints = [-1, 64]>()
  image_features = Reshape(features, shape)
}
""",
    "speech": """
speech (float[clips, frames, 64] audio_embeds) => (float[clips, frames, 64] audio_features) {
  audio_features = MatMul(audio_embeds, projection)
}
""",
    "embedding": """
embedding (
  int64[batch, new] input_ids, float[all, 64] image_features, float[sounds, 64] audio_features
) => (float[batch, new, 64] inputs_embeds) {
  axes = Constant<value_ints = [0]>()
  image = ReduceSum<keepdims = 0>(image_features, axes)
  sound = ReduceSum<keepdims = 0>(audio_features, axes)
  features = Sub(image, sound)
  tokens = Gather(table, input_ids)
  inputs_embeds = Add(tokens, features)
}
""",
}


def component(text: str) -> onnx.ModelProto:
    """A model with random weights; `projection` is the same in all."""
    random = np.random.default_rng(1)
    weights = []
    for name, rows in {"projection": HIDDEN_SIZE, "table": VOCABULARY}.items():
        if name in text:
            weight = random.standard_normal((rows, HIDDEN_SIZE)).astype(np.float32)
            weights.append(numpy_helper.from_array(weight, name))
    return text_model(text, *weights, opset=18)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory as GenAI reads it: a model, its data, its settings, and a tokenizer."""
    directory = tmp_path / "llm"
    directory.mkdir()
    path = directory / "model.onnx"
    onnx.save(tiny_model(), path, save_as_external_data=True, location="model.onnx.data")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the archive has the model and its tokenizer"] * 9, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (directory / "genai_config.json").write_text(json.dumps(SETTINGS))
    return directory


@pytest.fixture
def archive(directory: Path, tmp_path: Path) -> Path:
    path = tmp_path / "größe" / "llm.onnxa"
    path.parent.mkdir()
    done = onnxarchive.convert(directory, path, other_files=True)
    assert done.added_files == ("genai_config.json", "tokenizer.json", "tokenizer_config.json")
    return path


@pytest.fixture
def multimodal(directory: Path) -> Path:
    """A directory with models of images, of sound, of embeddings, and a decoder."""
    (directory / "model.onnx").unlink()
    (directory / "model.onnx.data").unlink()
    settings = json.loads((directory / "genai_config.json").read_text())
    settings["model"]["type"] = "phi4mm"
    settings["model"]["decoder"]["filename"] = "text.onnx"
    onnx.save(tiny_model("inputs_embeds"), directory / "text.onnx")
    for name, text in COMPONENTS.items():
        onnx.save(component(text), directory / f"{name}.onnx")
        kind = name.partition("-")[0].lower()
        settings["model"][kind] = {"filename": f"{name}.onnx"}
    settings["model"]["speech"]["session_options"] = {"intra_op_num_threads": 1}
    (directory / "genai_config.json").write_text(json.dumps(settings))
    return directory


def generated(model: Any, inputs: Mapping[str, np.ndarray] | None = None) -> str:
    """What GenAI generates for the prompt, and for other inputs if they are given."""
    tokenizer = og.Tokenizer(model)
    parameters = og.GeneratorParams(model)
    parameters.set_search_options(max_length=LENGTH, do_sample=False)
    generator = og.Generator(model, parameters)
    if inputs:
        tensors = og.NamedTensors()
        for name, array in inputs.items():
            tensors[name] = array
        generator.set_inputs(tensors)
    generator.append_tokens(tokenizer.encode(PROMPT))
    while not generator.is_done():
        generator.generate_next_token()
    text: str = tokenizer.decode(generator.get_sequence(0))
    return text


def run_recipe(
    archive: Path, *options: object, status: int = 0
) -> subprocess.CompletedProcess[str]:
    return completed([sys.executable, RECIPE, archive, PROMPT, *options], status=status)


def test_genai_generates_from_an_archive_what_it_does_from_the_directory(
    directory: Path, archive: Path
) -> None:
    expected = generated(og.Model(str(directory)))
    assert expected.startswith(PROMPT)
    assert len(expected) > len(PROMPT)
    shutil.rmtree(directory)
    assert run_recipe(archive, "--max-length", LENGTH).stdout.rstrip("\n") == expected


def test_all_models_of_the_settings_come_from_one_archive(multimodal: Path, tmp_path: Path) -> None:
    path = tmp_path / "all.onnxa"
    done = onnxarchive.convert(
        multimodal, path, models="all", default="text.onnx", other_files=True
    )
    assert done.shared_nbytes == HIDDEN_SIZE * HIDDEN_SIZE * 4  # `projection`
    random = np.random.default_rng(2)
    image, sound = random.standard_normal((2, 1, 3, HIDDEN_SIZE)).astype(np.float32)
    inputs = {
        "pixel_values": image,
        "num_image_tokens": np.array([3]),
        "audio_embeds": sound,
        "audio_sizes": np.array([3]),
    }
    cases = [None, inputs]
    expected = [generated(og.Model(str(multimodal)), case) for case in cases]
    assert expected[0] != expected[1]
    shutil.rmtree(multimodal)
    with runpy.run_path(str(RECIPE))["open_model"](str(path)) as model:
        assert [generated(model, case) for case in cases] == expected
    assert run_recipe(path, "--max-length", LENGTH).stdout.rstrip("\n") == expected[0]


def test_a_model_that_the_archive_lacks_is_named(multimodal: Path, tmp_path: Path) -> None:
    path = tmp_path / "some.onnxa"
    models = {"speech": multimodal / "speech.onnx"}
    onnxarchive.convert(multimodal / "text.onnx", path, models=models, other_files=True)
    done = run_recipe(path, status=1)
    assert "no ids for" in done.stderr
    assert "Vision-model.onnx" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="maps are read from /proc")
def test_genai_maps_the_weights_from_the_archive(archive: Path) -> None:
    code = """
import runpy, sys
open_model = runpy.run_path(sys.argv[1])["open_model"]
with open_model(sys.argv[2]) as model, open("/proc/self/maps") as maps:
    print(any(line.rstrip().endswith(sys.argv[2]) for line in maps))
"""
    assert run_python(code, RECIPE, os.path.realpath(archive)) == "True\n"
