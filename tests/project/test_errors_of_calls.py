"""Errors of the public functions: each names a file, leaves nothing, and is freed once handled.

Each system call of each function fails once. `faults` tries more ways to fail on the calls that
change an archive; here only one call returns EIO, but it is any call of any function. An error and
the files in its frames are freed as soon as it was handled.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import mmap
import os
import re
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import commands
import edits
import onnx
import pytest
from interruptions import interrupt
from models import entry_of, flip_byte, runnable_model, weight_model
from obstore.store import MemoryStore
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
        is_temporary = re.search(r"\.onnxarchive-[0-9-]+\.", error.filename or "")
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
    tmp_path: Path,
    template: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[[Path], object],
    is_every: bool,
) -> None:
    """Without `sweep`, only the last call of each kind fails."""
    monkeypatch.setattr(locking, "_PAUSE", 0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where failing removals leave files
    folder = tmp_path / "folder"

    def run(fault: FailingCall) -> str | None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(template, folder)
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


def _external(path: Path) -> None:
    options: Any = {"save_as_external_data": True, "location": "w.bin", "size_threshold": 0}
    onnx.save(weight_model(0), path, format="protobuf", **options)
    os.unlink(path.with_name("w.bin"))


def _flipped(path: Path) -> None:
    onnxarchive.save(runnable_model(), path, size_threshold=0)
    flip_byte(path, entry_of(path, "layer_0_weight").data_offset)


def _unfinished(path: Path) -> None:
    onnxarchive.save(weight_model(0), path)
    edit = partial(edits.document, text="changed " * 100)
    path.write_bytes(interrupt(path, edit).states["log complete"])


FILES: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "directory": Path.mkdir,
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("text"),
    "zip": lambda path: path.write_bytes(b"PK\3\4" + bytes(100)),
    "model": lambda path: onnx.save(runnable_model(), path, format="protobuf"),
    "model without its data": _external,
    "damaged": _flipped,
    "unfinished": _unfinished,
}
# Calls that also take an object of a store.
READING: dict[str, Callable[..., object]] = {
    "open": lambda path, _, **access: onnxarchive.open(path, **access).close(),
    "load": lambda path, _, **access: onnxarchive.load(path, **access),
    "check": lambda path, _, **access: onnxarchive.check(path, full=True, **access),
    "convert": lambda path, target, **access: onnxarchive.convert(
        path, os.fspath(target), **access
    ),
    "convert_many": lambda path, target, **access: onnxarchive.convert_many(
        [path], target, **access
    ),
    "diff": lambda path, _, **access: onnxarchive.diff(path, path, full=True, **access),
    "export": onnxarchive.export,
    "extract": onnxarchive.extract,
    "session": lambda path, _, **access: onnxarchive.session(path, **access),
}
LOCAL: dict[str, Callable[[Path], object]] = {
    **{name: call for name, call in CALLS.items() if name not in ("download", "open with a cache")},
    "convert_many a file": lambda it: onnxarchive.convert_many([it / "m.onnxa"], it / "many"),
    "check_link of it": lambda it: onnxarchive.check_link(it / "m.onnxa"),
    "edit of a model": lambda it: edits.replace_model(it / "m.onnxa", weight_model(1)),
    "the command check": lambda it: commands.run("check", it / "m.onnxa"),
    "the command run": lambda it: commands.run("run", it / "m.onnxa"),
}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of `make_files`, of which tests make copies."""
    folder = tmp_path_factory.mktemp("template") / "folder"
    make_files(folder)
    return folder


@pytest.fixture(scope="module")
def few_objects() -> None:
    """Exempts what is there from garbage collection: `kept` looks at all other objects."""
    gc.collect()
    gc.freeze()


def kept(call: Callable[..., object], *arguments: object, **access: object) -> list[str]:
    """The errors that are still there after a call raised one or caught all of them."""
    # The thread of remote requests may not be done with its OSErrors yet.
    kinds = (ArchiveError,) if access else (ArchiveError, OSError)

    def errors() -> dict[int, str]:
        return {id(it): repr(it) for it in gc.get_objects() if isinstance(it, kinds)}

    gc.collect()
    gc.disable()
    before = errors()
    try:
        call(*arguments, **access)
    except Exception:  # a context manager that catches it would be what is tested here
        pass
    finally:
        gc.enable()
    return [text for key, text in errors().items() if key not in before]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize("call", LOCAL.values(), ids=LOCAL.keys())
@pytest.mark.parametrize("write", FILES.values(), ids=FILES.keys())
def test_an_error_of_a_local_file_is_freed_at_once(
    tmp_path: Path,
    template: Path,
    write: Callable[[Path], object],
    call: Callable[[Path], object],
) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(template, folder)
    (folder / "m.onnxa").unlink()
    write(folder / "m.onnxa")
    assert kept(call, folder) == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize("call", READING.values(), ids=READING.keys())
@pytest.mark.parametrize("write", FILES.values(), ids=FILES.keys())
def test_an_error_of_a_remote_object_is_freed_at_once(
    tmp_path: Path, write: Callable[[Path], object], call: Callable[..., object]
) -> None:
    path = tmp_path / "m.onnx"
    write(path)
    store = MemoryStore()
    if path.is_file():
        store.put("m.onnx", path.read_bytes())
    assert kept(call, "m.onnx", tmp_path / "target", store=store) == []
