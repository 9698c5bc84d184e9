"""Files that the system refuses to map (FUSE with direct I/O, limits): they are read instead."""

from __future__ import annotations

import contextlib
import errno
import io
import mmap
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import edits
import numpy as np
import onnx
import pytest
from models import model_of, raw_tensor

import onnxarchive
from onnxarchive.cli import main
from onnxarchive.files import local_file

KINDS = {
    errno.ENODEV: "copy it to another file system",
    errno.ENOMEM: r"ulimit -v",
    errno.EMFILE: r"ulimit -n",
}


def refuse_maps(monkeypatch: pytest.MonkeyPatch, code: int = errno.ENODEV) -> None:
    """Lets every map fail."""

    class Refused(mmap.mmap):
        def __new__(cls, *_: Any, **__: Any) -> Refused:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(mmap, "mmap", Refused)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model, with its weights inside and as external data, and archives of it."""
    folder = tmp_path / "folder"
    folder.mkdir()
    model = model_of(
        *(raw_tensor(name, dims=(3000,), seed=seed) for seed, name in enumerate("uvw"))
    )
    onnx.save(model, folder / "m.onnx")
    path = folder / "m.onnxa"
    onnxarchive.save(model, path, assets={"labels": b"cat" * 1000})
    external = folder / "external"
    external.mkdir()
    onnx.save(
        onnx.load(folder / "m.onnx"),
        external / "m.onnx",
        save_as_external_data=True,
        location="w.bin",
        size_threshold=0,
    )
    with zipfile.ZipFile(folder / "m.zip", "w") as stored:
        for each in external.iterdir():
            stored.write(each, each.name)
    with zipfile.ZipFile(folder / "c.zip", "w", zipfile.ZIP_DEFLATED) as compressed:
        for each in external.iterdir():
            compressed.write(each, each.name)
    return folder


CALLS: dict[str, Callable[[Path], object]] = {
    "convert": lambda path: onnxarchive.convert(path / "m.onnx", path / "a"),
    "convert external data": lambda path: onnxarchive.convert(path / "external", path / "a"),
    "convert a zip": lambda path: onnxarchive.convert(path / "m.zip", path / "a"),
    "convert a compressed zip": lambda path: onnxarchive.convert(path / "c.zip", path / "a"),
    "convert an archive": lambda path: onnxarchive.convert(path / "m.onnxa", path / "a"),
    "convert_many": lambda path: onnxarchive.convert_many([path / "external"], path / "many"),
    "export": lambda path: onnxarchive.export(path / "m.onnxa", path / "e.onnx"),
    "export external data": lambda path: onnxarchive.export(
        path / "m.onnxa", path / "e.onnx", external_data="e.bin"
    ),
    "extract": lambda path: onnxarchive.extract(path / "m.onnxa", path / "extracted"),
    "link": lambda path: onnxarchive.link(path / "m.onnxa", path / "l.onnx"),
    "infer_shapes": lambda path: onnxarchive.infer_shapes(path / "m.onnxa", path / "a"),
    "load": lambda path: onnxarchive.load(path / "m.onnxa").SerializeToString(deterministic=True),
    "check": lambda path: onnxarchive.check(path / "m.onnxa", full=True),
    "diff": lambda path: onnxarchive.diff(path / "m.onnxa", path / "m.onnxa", full=True).is_same,
    "open": lambda path: read(path / "m.onnxa"),
    "open and prefetch": lambda path: read(path / "m.onnxa", prefetch="willneed"),
    "cat": lambda path: cat(path / "m.onnxa", "u"),
    "replace_model": lambda path: edits.replace_model(path / "m.onnxa", path / "m.onnx"),
    "compact": lambda path: edits.replace_model(path / "m.onnxa", path / "m.onnx", compact=True),
    "replace_tensor": lambda path: edits.replace_tensor(
        path / "m.onnxa", "u", np.ones(3000, np.float32)
    ),
    "add_asset": lambda path: edits.add_asset(path / "m.onnxa", "new", b"new"),
}


def cat(path: Path, name: str) -> bytes:
    data = io.BytesIO()
    output = io.TextIOWrapper(data, write_through=True)
    with contextlib.redirect_stdout(output):
        assert main(["cat", str(path), name]) == 0
    return data.getvalue()


def read(path: Path, **options: Any) -> object:
    with onnxarchive.open(path, **options) as archive:
        archive.verify()
        tensors = {name: array.tobytes() for name, array in archive.tensors.items()}
        entries = {name: bytes(archive.read(name)) for name in archive.entries}
        return tensors, entries, dict(archive.assets), archive.model.SerializeToString()


def contents(folder: Path) -> dict[str, bytes]:
    local_file = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in local_file}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_what_cannot_be_mapped_is_read_with_the_same_result(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[Path], object]
) -> None:
    other = folder.with_name("other")
    shutil.copytree(folder, other)
    expected = call(other)
    refuse_maps(monkeypatch)
    found = call(folder)
    assert contents(folder) == contents(other)
    if not isinstance(found, onnxarchive.Conversion | list):
        assert found == expected


@pytest.mark.parametrize(("code", "remedy"), KINDS.items())
def test_a_map_that_nothing_can_replace_is_an_error_with_file_and_remedy(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: int, remedy: str
) -> None:
    refuse_maps(monkeypatch, code)
    monkeypatch.setattr(local_file, "_MAX_COPIED", 100)  # for more than 2 GiB of a zip
    calls: dict[str, Callable[[], object]] = {
        "m.onnxa": lambda: onnxarchive.open(folder / "m.onnxa", prefetch="populate"),
        "m.zip": lambda: onnxarchive.convert(folder / "m.zip", folder / "a"),
    }
    for name, call in calls.items():
        with pytest.raises(OSError, match=remedy) as caught:
            call()
        assert (caught.value.errno, caught.value.filename) == (code, str(folder / name))
        assert "the file cannot be mapped" in str(caught.value)


def test_a_copy_of_what_was_truncated_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_maps(monkeypatch)
    path = folder / "external" / "w.bin"
    read_piece = local_file.MappedFile.read

    def truncate_first(file: local_file.MappedFile, offset: int, size: int) -> bytes:
        if file.path == str(path):
            os.truncate(path, 5000)
        return read_piece(file, offset, size)

    monkeypatch.setattr(local_file.MappedFile, "read", truncate_first)
    with pytest.raises(onnxarchive.ArchiveFormatError, match="truncated to 5000 bytes"):
        onnxarchive.convert(folder / "external" / "m.onnx", folder / "a")
    assert not (folder / "a").exists()
