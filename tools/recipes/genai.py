"""Generates text with ONNX Runtime GenAI; the weights are mapped from an archive.

    onnxarchive convert llm llm.onnxa --assets
    python tools/recipes/genai.py llm.onnxa "Once upon a time" --max-length 50

GenAI reads its settings and the tokenizer from a directory. So the archive's assets are written to
a temporary directory. GenAI gets the model in memory, and maps the weights from the archive.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

import onnxruntime_genai as og

import onnxarchive

# ONNX Runtime's session option for the directory of external data.
DATA_DIRECTORY = "session.model_external_initializers_file_folder_path"


def open_model(path: str) -> tuple[og.Model, og.Tokenizer]:
    """Opens the model and the tokenizer of an archive with the asset `genai_config.json`."""
    serialized, _ = onnxarchive.session_options(path)
    with tempfile.TemporaryDirectory() as directory, onnxarchive.open(path) as archive:
        for name, data in archive.assets.items():
            file = Path(directory, name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        settings = json.loads(archive.assets["genai_config.json"])
        config = og.Config(directory)
        config.add_model_data(settings["model"]["decoder"]["filename"], serialized)
        # GenAI joins this path to the directory of the settings.
        place = os.path.relpath(
            os.path.dirname(os.path.realpath(path)), os.path.realpath(directory)
        )
        options = {"session_options": {DATA_DIRECTORY: place}}
        config.overlay(json.dumps({"model": {"decoder": options}}))
        model = og.Model(config)
        return model, og.Tokenizer(model)


def main() -> None:
    """Prints the prompt and the generated text."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("archive")
    parser.add_argument("prompt")
    parser.add_argument(
        "--max-length", type=int, default=100, help="in tokens, including the prompt"
    )
    arguments = parser.parse_args()
    model, tokenizer = open_model(arguments.archive)
    parameters = og.GeneratorParams(model)
    parameters.set_search_options(max_length=arguments.max_length, do_sample=False)
    generator = og.Generator(model, parameters)
    generator.append_tokens(tokenizer.encode(arguments.prompt))
    while not generator.is_done():
        generator.generate_next_token()
    print(tokenizer.decode(generator.get_sequence(0)))


if __name__ == "__main__":
    main()
