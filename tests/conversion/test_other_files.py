"""The other files of a model's directory, such as its tokenizer, become assets."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import onnx
import pytest
from models import model_of, raw_tensor
from written import saved, write_model

import onnxarchive
from onnxarchive.errors import ArchiveFormatError

FILES = {"config.json": b"{}", "tokenizer.json": b"[]", "speech/vocab.txt": b"a\nb", "merges": b""}
LITTER = {
    ".gitattributes": b"*.onnx filter=lfs",
    ".git/config": b"[core]",
    "speech/.cache/huggingface/x": b"",
    "__pycache__/modeling.cpython-311.pyc": b"",
    "speech/__pycache__/modeling.cpython-311.pyc": b"",
    "speech/__MACOSX/vocab.txt": b"",
    ".DS_Store": b"",
    "Thumbs.db": b"",
    "._config.json": b"",
}
WEIGHTS = {
    "model_fp16.onnx.data": b"\0" * 2000,
    "speech/encoder.onnx": b"",
    "old.onnxa": b"",
    "model.safetensors": b"\0" * 2000,
    "pytorch_model-00001-of-00002.bin": b"",
    "model.Q4.GGUF": b"",
}
LEFT_OUT = [
    ".DS_Store",
    "._config.json",
    ".git/",
    ".gitattributes",
    "Thumbs.db",
    "__pycache__/",
    "model.Q4.GGUF",
    "model.safetensors",
    "model_fp16.onnx.data",
    "old.onnxa",
    "pytorch_model-00001-of-00002.bin",
    "speech/.cache/",
    "speech/__MACOSX/",
    "speech/__pycache__/",
    "speech/encoder.onnx",
]


def model() -> onnx.ModelProto:
    return model_of(raw_tensor("w", dims=(300,)), raw_tensor("v", dims=(400,), seed=2))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with a model, its data, and all that lies beside such a model."""
    directory = tmp_path / "llm"
    directory.mkdir()
    onnx.save(model(), directory / "model.onnx", save_as_external_data=True, location="weights.bin")
    for name, data in {**FILES, **LITTER, **WEIGHTS}.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    return directory


def test_a_source_of_any_kind_gives_its_other_files_as_assets(
    directory: Path, tmp_path: Path
) -> None:
    target = tmp_path / "m.onnxa"
    shutil.make_archive(os.fspath(tmp_path / "packed"), "zip", tmp_path, "llm")
    for source in (directory, directory / "model.onnx", tmp_path / "packed.zip"):
        done = onnxarchive.convert(source, target, other_files=True)
        assert target.read_bytes() == saved(model(), assets=FILES)
        assert (done.assets, done.tensors, done.warnings) == (len(FILES), 2, ())
        assert done.added_files == tuple(sorted(FILES))
        assert done.left_out == tuple(LEFT_OUT) or source.suffix == ".zip"
        assert "old.onnxa" in done.left_out
    (directory / "assets").mkdir()
    (directory / "assets" / "labels.txt").write_bytes(b"cat")
    onnxarchive.convert(directory / "model.onnx", target, other_files=True)
    assert target.read_bytes() == saved(model(), assets={**FILES, "labels.txt": b"cat"})


def test_files_in_the_folder_assets_become_assets_once(directory: Path, tmp_path: Path) -> None:
    (directory / "assets").mkdir()
    (directory / "assets" / "labels.txt").write_bytes(b"cat")
    target = tmp_path / "m.onnxa"
    done = onnxarchive.convert(directory, target, other_files=True)
    assert target.read_bytes() == saved(model(), assets={**FILES, "labels.txt": b"cat"})
    assert done.added_files == tuple(sorted(FILES))
    (directory / "labels.txt").write_bytes(b"dog")
    with pytest.raises(ArchiveFormatError, match=r"'labels\.txt' and 'assets/labels\.txt'"):
        onnxarchive.convert(directory, target, other_files=True)


def test_other_files_are_left_out_with_a_warning_that_names_the_option(
    directory: Path, tmp_path: Path
) -> None:
    with pytest.warns(UserWarning, match=r"other_files=True \(--assets\).*tokenizer\.json"):
        onnxarchive.convert(directory, tmp_path / "m.onnxa")
    with onnxarchive.open(tmp_path / "m.onnxa") as archive:
        assert not archive.assets


def test_given_assets_replace_other_files_of_the_same_names(
    directory: Path, tmp_path: Path
) -> None:
    given = {"config.json": b"given", "new": b""}
    done = onnxarchive.convert(directory, tmp_path / "m.onnxa", assets=given, other_files=True)
    assert "config.json" not in done.added_files
    with onnxarchive.open(tmp_path / "m.onnxa") as archive:
        assert dict(archive.assets) == {**FILES, **given}


def test_data_of_further_models_is_no_asset(directory: Path, tmp_path: Path) -> None:
    def further() -> onnx.ModelProto:
        return model_of(raw_tensor("d", dims=(500,), seed=7))

    decoder = directory / "decoder.onnx"
    onnx.save(further(), decoder, save_as_external_data=True, location="decoder.weights")
    os.link(directory / "decoder.weights", directory / "another name")
    target = tmp_path / "m.onnxa"
    source, models = directory / "model.onnx", {"decoder": decoder}
    done = onnxarchive.convert(source, target, models=models, other_files=True)
    assert "decoder.onnx" not in done.left_out
    with pytest.raises(ValueError, match="input"):
        onnxarchive.convert(source, directory / "config.json", models=models, other_files=True)
    assert target.read_bytes() == saved(model(), models={"decoder": further()}, assets=FILES)


def test_an_extracted_archive_converts_back_with_its_assets(
    directory: Path, tmp_path: Path
) -> None:
    archive, again = tmp_path / "m.onnxa", tmp_path / "again.onnxa"
    onnxarchive.convert(directory, archive, other_files=True)
    onnxarchive.extract(archive, tmp_path / "out")
    done = onnxarchive.convert(tmp_path / "out", again, other_files=True)
    assert again.read_bytes() == archive.read_bytes()
    assert (done.added_files, done.left_out) == ((), ())


def test_convert_many_adds_the_other_files_of_each_directory(
    directory: Path, tmp_path: Path
) -> None:
    other = tmp_path / "tree" / "a"
    write_model(other / "model.onnx", model())
    (other / "config.json").write_bytes(b"a")
    directory.rename(tmp_path / "tree" / "llm")
    for name in ("speech/encoder.onnx", "old.onnxa"):  # neither is a model
        (tmp_path / "tree" / "llm" / name).unlink()
    with ThreadPoolExecutor(2) as executor:
        done = onnxarchive.convert_many(
            [tmp_path / "tree"], tmp_path / "out", executor, other_files=True
        )
    assert [it.error for it in done] == [None, None]
    assert [it.added_files for it in done] == [("config.json",), tuple(sorted(FILES))]


# Files that are refused or left out


def test_a_name_that_no_asset_may_have_is_refused(directory: Path, tmp_path: Path) -> None:
    (directory / "a:b").write_bytes(b"")
    with pytest.raises(ArchiveFormatError, match="found 'a:b'"):
        onnxarchive.convert(directory, tmp_path / "m.onnxa", other_files=True)
    assert not (tmp_path / "m.onnxa").exists()


@pytest.mark.skipif(os.name == "nt", reason="links need a right on Windows")
def test_links_are_followed_within_the_directory_alone(directory: Path, tmp_path: Path) -> None:
    target = tmp_path / "m.onnxa"
    (directory / "linked.json").symlink_to("config.json")
    (directory / "folder").symlink_to("speech")
    done = onnxarchive.convert(directory, target, other_files=True)
    assert target.read_bytes() == saved(model(), assets={**FILES, "linked.json": b"{}"})
    assert set(done.left_out) - set(LEFT_OUT) == {"folder/"}
    (tmp_path / "secret").write_bytes(b"secret")
    (directory / "outside.json").symlink_to(tmp_path / "secret")
    with pytest.raises(ArchiveFormatError, match=r"outside\.json"):
        onnxarchive.convert(directory, target, other_files=True)


@pytest.mark.skipif(os.name == "nt", reason="links need a right on Windows")
def test_a_broken_link_and_a_pipe_are_refused_by_name(directory: Path, tmp_path: Path) -> None:
    (directory / "broken").symlink_to("nothing")
    with pytest.raises(ArchiveFormatError, match="no file at 'broken': it is a broken link"):
        onnxarchive.convert(directory, tmp_path / "m.onnxa", other_files=True)
    (directory / "broken").unlink()
    os.mkfifo(directory / "pipe")
    with pytest.raises(ArchiveFormatError, match="'pipe'"):
        onnxarchive.convert(directory, tmp_path / "m.onnxa", other_files=True)
