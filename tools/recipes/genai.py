"""Generates text with ONNX Runtime GenAI; the weights are mapped from an archive.

pip install 'onnxarchive[ort]' onnxruntime-genai
onnxarchive convert llm llm.onnxa --assets --all-models
python genai.py llm.onnxa "Once upon a time" --max-length 50

The archive has every model that `genai_config.json` names: the decoder, and an encoder, embedding,
vision or speech model. GenAI reads its settings and the tokenizer from a directory. So the
archive's assets are written to a temporary directory. GenAI gets the models in memory, and maps
the weights from the archive. The stages of a vision pipeline (for NPUs) it reads from files only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnxruntime_genai as og

import onnxarchive

# ONNX Runtime's session option for the directory of external data.
DATA_DIRECTORY = "session.model_external_initializers_file_folder_path"


@contextlib.contextmanager
def open_model(path: str) -> Iterator[og.Model]:
    """Opens the models of an archive with the asset `genai_config.json`.

    In the block, the tokenizer and the processor of images and audio can be read:
    `og.Tokenizer(model)`, `model.create_multimodal_processor()`.
    """
    with tempfile.TemporaryDirectory() as directory, onnxarchive.open(path) as archive:
        for name, data in archive.assets.items():
            asset = Path(directory, name)
            asset.parent.mkdir(parents=True, exist_ok=True)
            asset.write_bytes(data)
        settings = json.loads(archive.assets["genai_config.json"])
        # GenAI joins this path to the directory of the settings.
        folder = os.path.relpath(
            os.path.dirname(os.path.realpath(path)), os.path.realpath(directory)
        )
        settings["model"]["decoder"].setdefault("session_options", {})  # used for models without
        files = []
        for section in sections(settings["model"]):
            if "session_options" in section:
                section["session_options"][DATA_DIRECTORY] = folder
            names = [section[key] for key in section if key.endswith("filename")]
            files += [name for name in names if name.endswith(".onnx")]
        # GenAI does not parse the escapes of letters beyond ASCII, which a path may have.
        text = json.dumps(settings, ensure_ascii=False)
        Path(directory, "genai_config.json").write_text(text, encoding="utf-8")
        config = og.Config(directory)
        serialized = {
            file: onnxarchive.session_options(path, model=model)[0]
            for file, model in model_ids(files, archive).items()
        }
        for file, data in serialized.items():
            config.add_model_data(file, data)
        yield og.Model(config)


def sections(settings: Any) -> Iterator[dict[str, Any]]:
    """The JSON objects in `settings`, at any depth."""
    if isinstance(settings, dict):
        yield settings
        settings = list(settings.values())
    if isinstance(settings, list):
        for value in settings:
            yield from sections(value)


def model_ids(files: list[str], archive: onnxarchive.Archive) -> dict[str, str]:
    """The models of these files, with the ids that `convert --all-models` gives them."""
    ids = {file: re.sub("[^a-z0-9_]", "_", Path(file).stem.lower()) for file in files}
    without_id = [file for file, model in ids.items() if model not in archive.models]
    if len(without_id) > 1:
        raise SystemExit(
            f"{archive.path}: the archive has no ids for {', '.join(without_id)}, of which only "
            "one can be the default model; convert with --all-models"
        )
    return {**ids, **dict.fromkeys(without_id, "")}


def main() -> None:
    """Prints the prompt and the generated text."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("archive")
    parser.add_argument("prompt")
    parser.add_argument(
        "--max-length", type=int, default=100, help="in tokens, including the prompt"
    )
    arguments = parser.parse_args()
    with open_model(arguments.archive) as model:
        tokenizer = og.Tokenizer(model)
        parameters = og.GeneratorParams(model)
        parameters.set_search_options(max_length=arguments.max_length, do_sample=False)
        generator = og.Generator(model, parameters)
        generator.append_tokens(tokenizer.encode(arguments.prompt))
        while not generator.is_done():
            generator.generate_next_token()
        print(tokenizer.decode(generator.get_sequence(0)))


if __name__ == "__main__":
    main()
