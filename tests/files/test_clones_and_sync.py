"""Calls that depend on the file system: shared blocks, and free space."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest

from onnxarchive.files import clones_and_sync
from onnxarchive.files.clones_and_sync import (
    clone,
    has_clones,
    may_clone,
    require_space,
    shared_block_size,
)
from onnxarchive.files.local_file import MappedFile

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
    source: MappedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clones_and_sync, "fcntl", None)
    assert not may_clone(source)


def test_a_device_without_clones_is_tried_once(
    source: MappedFile, descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = Mock(side_effect=OSError(errno.EOPNOTSUPP, "no clones"))
    monkeypatch.setattr("onnxarchive.files.clones_and_sync.fcntl.ioctl", refuse)
    assert may_clone(source)
    assert not clone(source, descriptor)
    assert not may_clone(source)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (errno.EOPNOTSUPP, False),
        (errno.ENOTTY, False),  # macOS
        (errno.EINVAL, True),  # the ranges overlap, on XFS and btrfs
        (errno.EBADF, True),  # a file that is not open for writing tells nothing
    ],
)
def test_whether_a_file_system_has_clones_is_asked_without_a_new_file(
    source: MappedFile, monkeypatch: pytest.MonkeyPatch, code: int, expected: bool
) -> None:
    refuse = Mock(side_effect=OSError(code, "no clone over itself"))
    monkeypatch.setattr("onnxarchive.files.clones_and_sync.fcntl.ioctl", refuse)
    assert has_clones(source) is expected
    assert may_clone(source) is expected


def test_a_file_that_is_asked_whether_it_has_clones_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    with MappedFile(tmp_path / "file", is_writable=True) as file:
        has_clones(file)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_where_clones_get_new_names_no_ranges_are_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clones_and_sync, "CLONES_TO_NAMES", True)
    (tmp_path / "file").write_bytes(CONTENT)
    with MappedFile(tmp_path / "file", is_writable=True) as file:
        assert has_clones(file)
        assert shared_block_size(file) == 0


# Free space


def test_more_than_a_disk_has_free_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(
        OSError, match=rf"No space left on device: {1 << 62} bytes are needed, \d+ are"
    ) as raised:
        require_space(path, 1 << 62)
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(path))
    require_space(path, min(free, 1))


def test_the_free_space_is_that_of_the_target_of_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "file")
    usage = Mock(return_value=SimpleNamespace(total=10, free=5))
    monkeypatch.setattr(shutil, "disk_usage", usage)
    require_space(tmp_path / "link", 5)
    with pytest.raises(OSError, match="6 bytes are needed, 5 are free"):
        require_space("the temporary file", 6, "temporary")
    assert usage.mock_calls == [call(str(tmp_path / "elsewhere")), call("temporary")]


@pytest.mark.parametrize("usage", [SimpleNamespace(total=0, free=0), OSError(errno.ENOSYS, "none")])
def test_where_the_free_space_is_unknown_writing_goes_on(
    usage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", Mock(side_effect=[usage]))
    require_space(tmp_path / "file", 1 << 62)
