"""Each system call of each public function fails once: the error names a file, and nothing is left.

`faults` tries more ways to fail on the calls that change an archive. Here only one call returns
EIO, but it is any call of any function.
"""

from __future__ import annotations

import contextlib
import errno
import io
import mmap
import os
import re
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from models import runnable_model
from public_calls import CALLS, make_files

import onnxarchive
from onnxarchive.errors import ArchiveError
from onnxarchive.files import locking

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# Calls by name, in the module that has them.
NAMES = {
    os: (
        *("open", "close", "stat", "lstat", "fstat", "dup", "lseek", "read", "pread"),
        *("write", "pwrite", "ftruncate", "fsync", "replace", "rename", "unlink", "link"),
        *("mkdir", "rmdir"),
        *("listdir", "scandir", "readlink", "getcwd", "fchown", "chmod", "fchmod", "utime"),
        *("getxattr", "listxattr", "removexattr", "statvfs", "fstatvfs"),
    ),
    mmap: ("mmap",),
    fcntl: ("flock", "ioctl"),
}


class FailingCall:
    """Counts system calls, and lets one of them fail.

    Attributes:
        counts: The number of calls, by name.
        name: The name of the call that fails.
    """

    def __init__(self, name: str = "", at: int = -1) -> None:
        self.counts: Counter[str] = Counter()
        self.name = name
        self._at = at

    def _require(self, name: str, arguments: tuple[Any, ...]) -> None:
        number = self.counts[name]
        self.counts[name] += 1
        if (name, number) == (self.name, self._at):
            paths = [os.fspath(it) for it in arguments[:2] if isinstance(it, str | os.PathLike)]
            reason = "the system call failed"
            raise OSError(errno.EIO, reason, *paths[:1])

    def _replaced(self, module: Any, name: str) -> Any:
        original = getattr(module, name)
        if isinstance(original, type):  # a class, of which others ask `isinstance`

            class Map(original):  # type: ignore[misc, valid-type]
                def __new__(cls, *arguments: Any, **options: Any) -> Any:
                    self._require(name, arguments)
                    return original.__new__(original, *arguments, **options)

            return Map

        def call(*arguments: Any, **options: Any) -> Any:
            if name == "close":
                original(*arguments)
            self._require(name, arguments)
            # Nothing waits for the disk.
            return None if name in ("close", "fsync") else original(*arguments, **options)

        return call

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Catches the calls of this process while the block runs."""
        with contextlib.ExitStack() as patches:
            for module, names in NAMES.items():
                for name in names:
                    if hasattr(module, name):
                        patches.enter_context(
                            patch.object(module, name, self._replaced(module, name))
                        )
            yield


def failing(call: Callable[[Path], object], folder: Path, fault: FailingCall) -> str | None:
    """Calls a function with one failing system call; returns what is wrong with its error."""
    try:
        with fault.caught(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcome = call(folder)
    except ArchiveError as error:
        return None if error.path is not None else f"no path: {error!r}"
    except OSError as error:
        is_named = isinstance(error.filename, str) and error.filename
        is_temporary = re.search(r"\d+-\d+\.tmp", error.filename or "")
        if is_named and (not is_temporary or fault.name == "unlink"):
            return None
        return f"no file name: {error!r}, {error.filename!r}"
    except Exception as error:
        return f"another error: {error!r}"
    if isinstance(outcome, list):  # of `convert_many`, which returns messages
        texts = [it.error for it in outcome if getattr(it, "error", None)]
        return next((it for it in texts if str(folder) not in it), None)
    return None


@pytest.mark.skipif(fcntl is None, reason="POSIX's system calls")
@pytest.mark.parametrize("is_every", [False, pytest.param(True, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_an_error_of_any_system_call_names_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[Path], object], is_every: bool
) -> None:
    """Without `sweep`, only the last call of each kind fails."""
    monkeypatch.setattr(locking, "_PAUSE", 0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where failing removals leave files
    original, folder = tmp_path / "original", tmp_path / "folder"
    make_files(original)

    def run(fault: FailingCall) -> str | None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(original, folder)
        return failing(call, folder, fault)

    counted = FailingCall()
    assert run(counted) is None
    problems = []
    for name, count in counted.counts.items():
        for at in range(count) if is_every else [count - 1]:
            problem = run(FailingCall(name, at))
            # Removing a directory takes several calls.
            left = [it.name for it in folder.rglob(".*.tmp") if it.is_file() or name == "mkdir"]
            if left and name != "unlink":
                problem = problem or f"left {left}"
            if problem is not None:
                problems.append(f"{name} {at}: {problem}")
    assert problems == []


class FailingObject(io.BytesIO):
    """A file object whose reads or writes fail after its name and size were found."""

    def __init__(self, data: bytes, name: str | None) -> None:
        super().__init__(data)
        if name is not None:
            self.name = name
        self.is_failing = False

    def read(self, size: int | None = -1, /) -> bytes:
        self._fail()
        return super().read(size)

    def write(self, data: Any, /) -> int:
        self._fail()
        return super().write(data)

    def _fail(self) -> None:
        if self.is_failing:
            raise OSError(errno.EIO, "the cable was pulled")


@pytest.mark.parametrize("name", ["tape.onnxa", None])
def test_an_error_of_the_callers_file_object_names_the_object(name: str | None) -> None:
    target = FailingObject(b"", name)
    onnxarchive.save(runnable_model(), target)
    target.is_failing = True
    with pytest.raises(OSError, match="the cable was pulled") as written:
        onnxarchive.save(runnable_model(), target)
    source = FailingObject(target.getvalue(), name)
    archive = onnxarchive.open(source)
    source.is_failing = True
    with pytest.raises(OSError, match="the cable was pulled") as later:
        archive.verify()
    with pytest.raises(OSError, match="the cable was pulled") as opened:
        onnxarchive.open(source)
    for error in (written, later, opened):
        assert error.value.filename == (name or "file object FailingObject")
