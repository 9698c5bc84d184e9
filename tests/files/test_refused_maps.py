"""Files that cannot be mapped (FUSE with direct I/O, limits, 32 bits): they are read instead."""

from __future__ import annotations

import contextlib
import errno
import io
import mmap
import os
from pathlib import Path
from typing import Any

import onnx
import pytest
from public_calls import CALLS, make_files
from written import contents

import onnxarchive
from onnxarchive.cli import main
from onnxarchive.files import local_file

KINDS = {
    errno.EFBIG: "use a 64-bit Python",
    errno.ENODEV: "copy it to another file system",
    errno.ENOMEM: r"ulimit -v",
    errno.EMFILE: r"ulimit -n",
}


def refuse_maps(monkeypatch: pytest.MonkeyPatch, code: int = errno.ENODEV) -> None:
    """Lets every map fail, for EFBIG as one of 2 GiB on a 32-bit system."""

    class Refused(mmap.mmap):
        def __new__(cls, *_: Any, **__: Any) -> Refused:
            if code == errno.EFBIG:
                raise OverflowError("Python int too large to convert to C ssize_t")
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(mmap, "mmap", Refused)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_files(tmp_path / "folder")
    return tmp_path / "folder"


def cat(folder: Path) -> bytes:
    data = io.BytesIO()
    output = io.TextIOWrapper(data, write_through=True)
    with contextlib.redirect_stdout(output):
        assert main(["cat", str(folder / "m.onnxa"), "layer.0/weight"]) == 0
    return data.getvalue()


# Without a call that has to map a file, and one that keeps paths.
READING = {name: CALLS[name] for name in CALLS.keys() - {"open and prefetch", "open with a cache"}}
READING |= {
    "cat": cat,
    "diff": lambda it: onnxarchive.diff(it / "m.onnxa", it / "m.onnxa", full=True).is_same,
    "advise": lambda it: onnxarchive.open(it / "m.onnxa", prefetch="willneed").verify(),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("code", [errno.ENODEV, errno.EFBIG])
@pytest.mark.parametrize("name", sorted(READING))
def test_a_file_that_cannot_be_mapped_is_read_with_the_same_result(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    other = folder.with_name("other")
    make_files(other)
    expected = READING[name](other)
    refuse_maps(monkeypatch, code)
    found = READING[name](folder)
    assert contents(folder) == contents(other)
    if isinstance(found, bool | bytes | tuple | onnx.ModelProto):
        assert found == expected


@pytest.mark.parametrize(("code", "remedy"), KINDS.items())
def test_a_refused_map_that_nothing_can_replace_is_an_error_with_file_and_remedy(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: int, remedy: str
) -> None:
    refuse_maps(monkeypatch, code)
    monkeypatch.setattr(local_file, "_MAX_COPIED", 100)  # for more than 2 GiB of a zip
    for name, call in {
        "m.onnxa": "open and prefetch",
        "stored.zip": "convert a stored zip",
    }.items():
        with pytest.raises(OSError, match=remedy) as caught:
            CALLS[call](folder)
        assert (caught.value.errno, caught.value.filename) == (code, str(folder / name))
        assert "the file cannot be mapped" in str(caught.value)


def test_a_copy_of_a_truncated_file_is_refused(
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
