"""Features that only some file systems have: shared blocks, and blocks that are set aside."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from onnxarchive.storage import filesystem
from onnxarchive.storage.files import MappedFile, write_at
from onnxarchive.storage.filesystem import clone, reserve

CONTENT = bytes(range(256)) * 64


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    """A new file, open for writing."""
    with open(tmp_path / "file", "xb") as file:
        yield file.fileno()


# Clones


@pytest.fixture
def source(tmp_path: Path) -> Iterator[MappedFile]:
    (tmp_path / "source").write_bytes(CONTENT)
    with MappedFile(tmp_path / "source") as file:
        yield file


def test_a_clone_has_all_bytes_or_there_is_none(
    source: MappedFile, descriptor: int, tmp_path: Path
) -> None:
    is_cloned = clone(source, descriptor)
    assert (tmp_path / "file").read_bytes() == (CONTENT if is_cloned else b"")


def test_there_is_no_clone_on_a_system_without_ioctl(
    source: MappedFile, descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filesystem, "fcntl", None)
    assert not clone(source, descriptor)


# Blocks that are set aside


@pytest.fixture
def allocating(descriptor: int, tmp_path: Path) -> int:
    """A new file on a file system that can set blocks aside."""
    if filesystem.fallocate() is None:
        pytest.skip("fallocate is Linux's")
    found = filesystem.file_system(descriptor)
    if found not in filesystem.RESERVING:
        pytest.skip(f"{found}, the file system of {tmp_path}, is not asked for room")
    return descriptor


@pytest.mark.parametrize("offset", [0, 100_000])
def test_blocks_are_set_aside_and_the_size_stays(allocating: int, offset: int) -> None:
    reserve(allocating, offset, 1 << 20)
    status = os.fstat(allocating)
    assert (status.st_size, status.st_blocks >= (1 << 20) // 512) == (0, True)
    write_at(allocating, offset, CONTENT)
    assert os.fstat(allocating).st_size == offset + len(CONTENT)


def test_blocks_that_were_set_aside_beyond_the_size_are_freed_when_it_is_set(
    allocating: int,
) -> None:
    os.ftruncate(allocating, 1000)
    before = os.fstat(allocating).st_blocks
    reserve(allocating, 1000, 1 << 20)
    assert os.fstat(allocating).st_blocks > before
    os.ftruncate(allocating, 1000)
    assert os.fstat(allocating).st_blocks <= before + 8  # one block of 4 KiB


def test_more_than_a_file_system_holds_is_refused(allocating: int) -> None:
    with pytest.raises(OSError, match=r"File too large|No space left"):
        reserve(allocating, 0, 1 << 62)


@pytest.fixture
def on_ext4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "file_system", lambda descriptor: "ext4")


@pytest.mark.usefixtures("on_ext4")
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_told_when_blocks_are_set_aside(
    descriptor: int, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    monkeypatch.setattr(filesystem, "fallocate", lambda: lambda *_: error)
    with pytest.raises(OSError, match=os.strerror(error)):
        reserve(descriptor, 5, 1)
    reserve(descriptor, 5, 0)


@pytest.mark.usefixtures("on_ext4")
@pytest.mark.parametrize(
    "fallocate", [None, lambda *_: errno.EOPNOTSUPP], ids=["none", "unsupported"]
)
def test_where_nothing_can_be_set_aside_writing_goes_on(
    descriptor: int,
    monkeypatch: pytest.MonkeyPatch,
    fallocate: Callable[[int, int, int], int] | None,
) -> None:
    monkeypatch.setattr(filesystem, "fallocate", lambda: fallocate)
    reserve(descriptor, 0, len(CONTENT))


@pytest.mark.parametrize("kind", ["btrfs", "zfs", "nfs4", "overlay", None])
def test_file_systems_that_compress_or_are_not_known_are_not_asked(
    descriptor: int, monkeypatch: pytest.MonkeyPatch, kind: str | None
) -> None:
    asked: list[tuple[int, int]] = []

    def allocate(_: int, offset: int, nbytes: int) -> int:
        asked.append((offset, nbytes))
        return 0

    monkeypatch.setattr(filesystem, "fallocate", lambda: allocate)
    monkeypatch.setattr(filesystem, "file_system", lambda descriptor: kind)
    reserve(descriptor, 3, 1)
    assert asked == []
    monkeypatch.setattr(filesystem, "file_system", lambda descriptor: "xfs")
    reserve(descriptor, 3, 2)
    assert asked == [(3, 2)]


def test_the_file_system_is_the_one_that_the_system_tells(descriptor: int, tmp_path: Path) -> None:
    program = shutil.which("findmnt")
    if program is None:
        pytest.skip("findmnt is not installed")
    told = subprocess.run(
        [program, "-n", "-o", "FSTYPE", "-T", tmp_path], capture_output=True, text=True, check=True
    )
    found = filesystem.file_system(descriptor)
    if found is None:
        pytest.skip(f"{told.stdout.strip()} gives its files another device than its mount has")
    assert found == told.stdout.strip()


def test_a_system_whose_devices_have_no_numbers_sets_nothing_aside(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filesystem, "fallocate", lambda: None)
    monkeypatch.delattr(os, "major")  # as Windows
    reserve(descriptor, 0, 1)


def test_a_python_without_ctypes_sets_nothing_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ctypes", None)
    assert filesystem.fallocate.__wrapped__() is None


def test_another_system_than_linux_sets_nothing_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert filesystem.fallocate.__wrapped__() is None
