"""Writes a directory for the Hugging Face Hub whose data file is an archive, and uploads it.

pip install 'onnxarchive[ort]' huggingface_hub
python layout.py MODEL DIRECTORY [REPOSITORY]

MODEL is a directory with a model, its `config.json` and the files of its tokenizer. DIRECTORY must
be new, and gets these files, and `onnx/model.onnx` with the data file `onnx/model.onnx_data`, as
transformers.js and optimum expect them. The data file is at the same time an archive with the
model: `onnxarchive info` describes it, and `onnxarchive.session` maps it. After a change of the
archive, `onnxarchive link` must write `model.onnx` again, and `onnxarchive check --link` says so.
transformers.js reads the data of `NAME.onnx` from `NAME.onnx_data` only, so the archive has one
model; with optimum, `onnxarchive link` to the directory links several models to one archive.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import onnxarchive


def write_layout(model: str, directory: str) -> None:
    """Writes the files of a repository."""
    onnx_folder = Path(directory, "onnx")
    onnx_folder.mkdir(parents=True)
    archive = onnx_folder / "model.onnx_data"
    onnxarchive.convert(model, archive, other_files=True)
    onnxarchive.link(archive, onnx_folder / "model.onnx")
    with onnxarchive.open(archive) as opened:
        for name, data in opened.assets.items():
            path = Path(directory, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    # transformers.js reads external data of models for which the configuration says so.
    path = Path(directory, "config.json")
    config = json.loads(path.read_text()) if path.exists() else {}
    config.setdefault("transformers.js_config", {})["use_external_data_format"] = True
    path.write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Writes the directory, and uploads it if a repository is given."""
    if len(sys.argv) not in (3, 4):
        raise SystemExit(__doc__)
    model, directory, *repository = sys.argv[1:]
    write_layout(model, directory)
    if repository:
        import huggingface_hub

        huggingface_hub.create_repo(repository[0], exist_ok=True)
        huggingface_hub.upload_folder(repo_id=repository[0], folder_path=directory)


if __name__ == "__main__":
    main()
