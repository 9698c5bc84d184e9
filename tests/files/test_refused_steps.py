"""File systems that cannot sync or rename, and names that are as long as a name may be."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import edits
import numpy as np
import onnx
import public_calls
import pytest
from models import model_of, raw_tensor
from remote_files import opened
from versions import object_store
from written import contents

import onnxarchive
from onnxarchive.cli import main

WRITES: dict[str, Callable[..., object]] = public_calls.WRITES | {
    "convert_many": lambda path, target: onnxarchive.convert_many(
        [path], target.parent, replace=True
    ),
}
EDITS: dict[str, Callable[..., object]] = {
    "replace_model": lambda path, **options: edits.replace_model(path, edited(path), **options),
    "replace_tensor": lambda path, **options: edits.replace_tensor(
        path, "u", np.ones(3000, np.float32), **options
    ),
    "add_asset": lambda path, **options: edits.add_asset(path, "a", b"new", **options),
}


def model(seed: int) -> onnx.ModelProto:
    return model_of(*(raw_tensor(name, dims=(3000,), seed=seed) for name in "uvw"))


def refuse(monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> None:
    monkeypatch.setattr(os, name, Mock(side_effect=OSError(code, os.strerror(code))))


def edited(path: Path) -> onnx.ModelProto:
    with onnxarchive.open(path) as archive:
        changed = archive.model
    changed.doc_string = "changed"
    return changed


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "m.onnxa"
    onnxarchive.save(model(1), path)
    return path


# Syncing

CODES = (errno.EINVAL, errno.EOPNOTSUPP)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("call", WRITES.values(), ids=WRITES.keys())
def test_a_file_is_written_to_a_file_system_that_cannot_sync(
    archive: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[[Path, Path], object],
    code: int,
) -> None:
    refuse(monkeypatch, "fsync", code)
    call(archive, tmp_path / "target")
    assert {"target", "m.onnxa"} & set(contents(tmp_path))


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
@pytest.mark.usefixtures("no_clones")
def test_an_edit_in_place_needs_syncs_and_a_copy_does_not(
    archive: Path, monkeypatch: pytest.MonkeyPatch, edit: Callable[..., object], code: int
) -> None:
    before = archive.read_bytes()
    refuse(monkeypatch, "fsync", code)
    try:
        edit(archive)
    except OSError as error:
        assert (error.errno, error.filename) == (code, str(archive))
        assert "cannot be synced to its device" in str(error)
        assert "copy=True (--copy)" in str(error)
        assert contents(archive.parent) == {"m.onnxa": before}
    edit(archive, copy=True)
    assert archive.read_bytes() != before
    onnxarchive.load(archive)


def test_a_cache_needs_syncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, "fsync", errno.EINVAL)
    with pytest.raises(OSError, match=r"cannot be synced .*; choose a cache on another file"):
        opened(tmp_path / "cache")


# Closing


def test_bytes_of_an_extracted_file_that_are_lost_after_writing_are_an_error(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = os.close
    errors = [OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))]

    def fail(descriptor: int) -> None:
        is_written = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_RDWR)
        close(descriptor)
        if is_written and errors:
            raise errors.pop()

    monkeypatch.setattr(os, "close", fail)
    with pytest.raises(OSError, match=os.strerror(errno.EDQUOT)) as caught:
        onnxarchive.extract(archive, tmp_path / "target")
    assert os.path.dirname(caught.value.filename) == str(tmp_path / "target")
    assert os.listdir(tmp_path) == ["m.onnxa"]


# Renaming


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("name", sorted(WRITES.keys() - {"export external data", "convert_many"}))
def test_a_file_that_cannot_be_renamed_is_an_error_that_names_the_step(
    archive: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    is_there: bool,
    code: int,
) -> None:
    target = tmp_path / "target"
    if is_there:
        target.write_bytes(b"old")
    before = contents(tmp_path)
    refuse(monkeypatch, "replace", code)
    with pytest.raises(OSError, match="cannot be renamed into place") as caught:
        WRITES[name](archive, target)
    assert (caught.value.errno, caught.value.filename) == (code, str(target))
    assert f"{os.strerror(code)}; it is unchanged; choose another path" in str(caught.value)
    left = contents(tmp_path)
    assert {key: left[key] for key in before} == before
    assert set(left) - set(before) <= {".target.download"}  # which a later call continues


def test_an_extracted_directory_that_cannot_be_renamed_names_the_step(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, "rename", errno.EPERM)
    with pytest.raises(OSError, match="cannot be renamed into place") as caught:
        onnxarchive.extract(archive, tmp_path / "target")
    assert caught.value.filename == str(tmp_path / "target")
    assert os.listdir(tmp_path) == ["m.onnxa"]


# Long names


def named(nbytes: int, text: str, end: str = "") -> str:
    """A name of so many bytes in UTF-8, as far as the characters of `text` allow."""
    rest = nbytes - len(end.encode())
    count, more = divmod(rest, len(text.encode()))
    return text * count + "x" * more + end


linux = pytest.mark.skipif(sys.platform != "linux", reason="names have up to 255 bytes")
texts = pytest.mark.parametrize("text", ["a", "\N{GRINNING FACE}"])


@linux
@texts
@pytest.mark.parametrize("nbytes", [246, 255])
@pytest.mark.parametrize("call", WRITES.values(), ids=WRITES.keys())
def test_the_name_of_a_written_file_may_have_255_bytes(
    archive: Path, tmp_path: Path, call: Callable[[Path, Path], object], nbytes: int, text: str
) -> None:
    target = tmp_path / named(nbytes, text)
    for _ in range(2):  # a new file, and one that is replaced
        call(archive, target)
    assert all(name[0] != "." for name in os.listdir(tmp_path))


@linux
@texts
@pytest.mark.parametrize("options", [{}, {"copy": True}])
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_the_name_of_an_edited_archive_may_have_255_bytes(
    archive: Path, tmp_path: Path, edit: Callable[..., object], options: dict[str, Any], text: str
) -> None:
    path = archive.rename(tmp_path / named(255, text, ".onnxa"))
    edit(path, **options)
    onnxarchive.recover(path)
    onnxarchive.load(path)
    assert os.listdir(tmp_path) == [path.name]


@linux
@texts
def test_names_of_255_bytes_are_read_extracted_and_cached(
    archive: Path, tmp_path: Path, text: str
) -> None:
    name = named(255, text, ".onnxa")
    path = archive.rename(tmp_path / name)
    folder = tmp_path / named(255, text)
    onnxarchive.extract(path, folder)
    onnxarchive.convert(folder, tmp_path / "again.onnxa")
    assert main(["convert", str(path), "--output-dir", str(tmp_path / "out")]) == 0
    assert os.listdir(tmp_path / "out") == [name]
    store = object_store("MemoryStore")
    store.put(name, path.read_bytes())
    with onnxarchive.open(name, store=store, cache=tmp_path / "cache") as cached:
        assert len(cached.tensors) == 3
    onnxarchive.convert(name, "remote.onnxa", store=store)
    link = tmp_path / named(255, text, ".onnx")
    onnxarchive.link(path, link)
    onnxarchive.check_link(link)
