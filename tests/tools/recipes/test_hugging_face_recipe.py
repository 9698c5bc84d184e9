"""The recipe of a repository for the Hugging Face Hub, whose data file is an archive."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from models import run_python, text_model
from onnx import numpy_helper
from processes import completed

import onnxarchive

pytestmark = pytest.mark.tool

ROOT = Path(__file__).resolve().parents[3]
RECIPE = ROOT / "tools" / "recipes" / "hugging_face"
WORDS = ["[PAD]", "[UNK]", "the", "cat", "sat"]
CLASSIFIER = """
classifier (int64[n, l] input_ids, int64[n, l] attention_mask, int64[n, l] token_type_ids)
    => (float[n, 2] logits) {
  vectors = Gather(table, input_ids)
  mean = ReduceMean<axes = [1], keepdims = 0>(vectors)
  logits = MatMul(mean, head)
}
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A directory with a classifier of random weights, its tokenizer and its configuration."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path / "source"
    folder.mkdir()
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {"model_type": "bert", "num_labels": 2, "transformers.js_config": {"dtype": "fp32"}}
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(0)
    weights = {"table": (len(WORDS), 256), "head": (256, 2)}
    arrays = {name: random.standard_normal(shape, np.float32) for name, shape in weights.items()}
    tensors = (numpy_helper.from_array(array, name) for name, array in arrays.items())
    onnx.save(text_model(CLASSIFIER, *tensors, opset=17), folder / "model.onnx")
    return folder


@pytest.fixture
def repository(source: Path, tmp_path: Path) -> Path:
    path = tmp_path / "my repository"
    subprocess.run([sys.executable, RECIPE / "layout.py", source, path], check=True)
    return path


def logits_of(session: object) -> np.ndarray:
    ids = np.array([[WORDS.index(word) for word in ("the", "cat", "sat")]])
    inputs = {"input_ids": ids, "attention_mask": ids * 0 + 1, "token_type_ids": ids * 0}
    return np.asarray(session.run(["logits"], inputs)[0][0])  # type: ignore[attr-defined]


def test_the_data_file_is_an_archive_and_the_model_reads_it(source: Path, repository: Path) -> None:
    ort = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    archive, model = repository / "onnx" / "model.onnx_data", repository / "onnx" / "model.onnx"
    assert onnxarchive.check(archive, full=True) == []
    assert onnxarchive.check_link(model) == []
    onnx.checker.check_model(model)
    for tensor, given in zip(
        onnx.load(model).graph.initializer,
        onnx.load(source / "model.onnx").graph.initializer,
        strict=True,
    ):
        array = numpy_helper.to_array(tensor)
        np.testing.assert_array_equal(array, numpy_helper.to_array(given))
    expected = logits_of(ort.InferenceSession(source / "model.onnx"))
    np.testing.assert_array_equal(logits_of(ort.InferenceSession(model)), expected)
    np.testing.assert_array_equal(logits_of(onnxarchive.session(archive)), expected)
    config = json.loads((repository / "config.json").read_text())
    assert config["transformers.js_config"] == {"dtype": "fp32", "use_external_data_format": True}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (repository / name).read_bytes() == (source / name).read_bytes()


def test_transformers_js_gives_the_logits_of_onnx_runtime(source: Path, repository: Path) -> None:
    ort = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    if shutil.which("node") is None or not (RECIPE / "node_modules").exists():
        pytest.skip("npm install in the recipe's directory brings transformers.js")
    command = ["node", str(RECIPE / "run.mjs"), repository.name, "the cat sat"]
    done = completed(command, status=0, cwd=repository.parent)
    expected = logits_of(ort.InferenceSession(source / "model.onnx"))
    np.testing.assert_allclose(json.loads(done.stdout), expected, rtol=1e-5)


def test_optimum_gives_the_logits_of_onnx_runtime(source: Path, repository: Path) -> None:
    """Both from an archive's session and from the files of the layout."""
    ort = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    pytest.importorskip("torch", reason="PyTorch is not installed")
    optimum = ROOT / "build" / "optimum"
    if not optimum.exists():
        pytest.skip("pip install --target of .ci/run brings optimum")
    program = """
import json, sys
import torch
import onnxarchive
from optimum.onnxruntime import ORTModelForSequenceClassification as Classifier
from transformers import AutoConfig
repository, archive, copy = sys.argv[1:]
session = onnxarchive.session(archive)
of_session = Classifier(config=AutoConfig.from_pretrained(repository), session=session)
of_session.save_pretrained(copy)
ids = torch.tensor([[2, 3, 4]])
inputs = {"input_ids": ids, "attention_mask": ids * 0 + 1, "token_type_ids": ids * 0}
models = [of_session, Classifier.from_pretrained(repository, subfolder="onnx")]
print(json.dumps([model(**inputs).logits[0].tolist() for model in models]))
"""
    archive = repository.with_name("classifier.onnxa")
    onnxarchive.convert(source / "model.onnx", archive)
    path = os.pathsep.join([str(optimum), str(ROOT)])
    copy = repository.with_name("copy")
    output = run_python(program, repository, archive, copy, PYTHONPATH=path, HF_HUB_OFFLINE="1")
    expected = logits_of(ort.InferenceSession(source / "model.onnx"))
    np.testing.assert_allclose(json.loads(output), [expected, expected], rtol=1e-5)
    assert (copy / archive.name).read_bytes() == archive.read_bytes()


def test_a_change_of_the_archive_asks_for_a_new_link(repository: Path) -> None:
    archive, model = repository / "onnx" / "model.onnx_data", repository / "onnx" / "model.onnx"
    with onnxarchive.edit(archive, compact=True) as edit:
        edit.tensors["head"] = edit.tensors["head"] * 2
    assert "write a new link" in str(onnxarchive.check_link(model)[0])
    onnxarchive.link(archive, model)
    assert onnxarchive.check_link(model) == []
