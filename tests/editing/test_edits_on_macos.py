"""Clones of macOS, which clones a file to a new name; simulated by a copy."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import edits
import numpy as np
import pytest

import onnxarchive
from onnxarchive.files import clones_and_sync

ARRAY = np.full(300, 7, np.float32)


@pytest.fixture
def archive(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An archive on a system that clones to new names."""
    onnxarchive.save(edits.weights(3), path)
    path.chmod(0o640)
    monkeypatch.setattr(clones_and_sync, "CLONES_TO_NAMES", True)
    monkeypatch.setattr(clones_and_sync, "devices_without_clones", set())
    return path


def copies(made: list[str]) -> Callable[[int, str], None]:
    def copy_to_name(source: int, path: str) -> None:
        made.append(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with open(os.open(path, flags, 0o644), "wb") as target:
            target.write(os.pread(source, os.fstat(source).st_size, 0))

    return copy_to_name


def replace(path: Path) -> None:
    with onnxarchive.edit(path) as edit:
        edit.tensors["w1"] = ARRAY


def require_replaced(path: Path) -> None:
    assert onnxarchive.check(path, full=True) == []
    with onnxarchive.open(path) as archive:
        assert np.array_equal(archive.tensors["w1"], ARRAY)
    assert os.listdir(path.parent) == [path.name]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_replaced_tensor_is_written_to_a_clone_that_is_renamed(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    monkeypatch.setattr(clones_and_sync, "_clone_to_name", copies(made))
    with onnxarchive.open(archive) as before:
        view = before.tensors["w1"]
        old = view.tobytes()
        replace(archive)
        assert view.tobytes() == old
    assert len(made) == 1
    require_replaced(archive)


def test_the_name_of_another_writer_is_not_cloned_to(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    copy_to_name = copies(made)

    def begin(source: int, path: str) -> None:
        if not made:
            made.append(path)
            raise FileExistsError(errno.EEXIST, "exists", path)
        copy_to_name(source, path)

    monkeypatch.setattr(clones_and_sync, "_clone_to_name", begin)
    replace(archive)
    assert len(made) == 2
    require_replaced(archive)


def test_a_file_system_that_refuses_a_clone_is_not_asked_again(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def refuse(source: int, path: str) -> None:
        asked.append(path)
        raise OSError(errno.ENOTSUP, "Operation not supported", path)

    monkeypatch.setattr(clones_and_sync, "_clone_to_name", refuse)
    replace(archive)
    require_replaced(archive)
    replace(archive)
    assert len(asked) == 1
