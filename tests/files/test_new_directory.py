"""New directories: complete or absent; what others put in their place is untouched."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from limits import limited, umask, user
from processes import completed
from written import contents

from onnxarchive.errors import ArchiveError
from onnxarchive.files import new_directory as module
from onnxarchive.files.new_directory import (
    NewDirectory,
    new_directory,
    remove_leftover,
    temporary_directory,
)

if sys.platform != "win32":
    import resource

posix = pytest.mark.skipif(os.name != "posix", reason="POSIX's links and permissions")
linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc leads to open directories")
root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root becomes other users"
)


@pytest.fixture(params=[True, False], ids=["by descriptor", "by path"])
def _ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Systems with descriptors of directories, and without, as Windows."""
    if not request.param:
        monkeypatch.setattr(module, "HAS_DIR_FD", False)


both_ways = pytest.mark.usefixtures("_ways")


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def make_file(directory: NewDirectory, path: str = "file") -> None:
    with directory.make_file(path) as file:
        file.write(0, b"new")


@both_ways
def test_a_new_directory_is_there_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with new_directory(target) as made:
        make_file(made)
        assert not target.exists()
    assert contents(tmp_path) == {"target/file": b"new"}


@both_ways
def test_an_empty_directory_is_filled_and_stays_the_same_directory(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    before = target.stat().st_ino
    with new_directory(target) as made:
        make_file(made)
        make_file(made, "folder/deep/file")
        assert names(tmp_path) == ["target"]
        assert names(target) == [Path(made.path).name]
    assert names(tmp_path) == ["target"]
    assert contents(target) == {"file": b"new", "folder/deep/file": b"new"}
    assert target.stat().st_ino == before


@both_ways
@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("error", [OSError(errno.EPERM, "No"), KeyboardInterrupt()])
def test_an_empty_directory_is_empty_again_if_a_file_cannot_be_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, error: BaseException
) -> None:
    rename = os.rename
    moved: list[str] = []

    def fail(source: str, target: str, **directories: Any) -> None:
        moved.append(target)
        if len(moved) == count + 1:
            raise error
        rename(source, target, **directories)

    with pytest.raises(type(error)) as caught, new_directory(tmp_path) as made:  # noqa: PT012
        for name in "abc":
            make_file(made, name)
        monkeypatch.setattr(os, "rename", fail)
    assert len(moved) == 2 * count + 1  # and those that were moved were moved back
    assert names(tmp_path) == []
    if isinstance(caught.value, OSError):
        assert caught.value.filename == str(tmp_path)
        assert "cannot be renamed into place: No; it is unchanged" in str(caught.value)


@both_ways
@pytest.mark.parametrize(
    ("is_there", "message"), [(False, "not empty"), (True, "the directory is no longer empty")]
)
def test_a_directory_that_another_process_fills_meanwhile_is_left_to_it(
    tmp_path: Path, is_there: bool, message: str
) -> None:
    target = tmp_path / "target"
    if is_there:
        target.mkdir()
    with pytest.raises(OSError, match=message), new_directory(target) as made:  # noqa: PT012
        make_file(made)
        target.mkdir(exist_ok=True)
        (target / "file").write_bytes(b"of another")
    assert contents(tmp_path) == {"target/file": b"of another"}


@posix
@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("free", range(8))
def test_without_descriptors_for_its_files_no_directory_is_left(
    tmp_path: Path, is_there: bool, free: int
) -> None:
    target = tmp_path / "target"
    if is_there:
        target.mkdir()
    with contextlib.ExitStack() as stack:
        stack.enter_context(limited(resource.RLIMIT_NOFILE, 256))
        spare = [stack.enter_context(open(os.devnull)) for _ in range(free)]
        with contextlib.suppress(OSError):
            while True:
                stack.enter_context(open(os.devnull))
        for file in spare:
            file.close()
        with pytest.raises(OSError, match=os.strerror(errno.EMFILE)) as caught:
            fill_without_end(target)
    assert str(caught.value.filename).startswith(str(target))
    assert names(tmp_path) == ["target"] * is_there
    assert not is_there or names(target) == []


def fill_without_end(target: Path) -> None:
    with contextlib.ExitStack() as stack, new_directory(target) as made:
        for number in range(300):
            stack.enter_context(made.make_file(f"folder/deep/{number}"))


@posix
def test_a_link_to_an_empty_directory_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    with new_directory(tmp_path / "link") as made:
        make_file(made)
    assert (tmp_path / "link").is_symlink()
    assert names(tmp_path / "there") == ["file"]
