"""Windows' rules for files, on Linux: what is open or mapped is not removed, renamed or cut off.

The modules of the package see an `os` that lacks the calls that Windows lacks and refuses what
Windows refuses; tests and other libraries see Linux. /proc shows which files are open. As on
Windows, where Python's maps hold a handle, a mapped file counts as open.

Not simulated: paths with backslashes and drives, and waiting for a handle to be closed.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import mmap
import os
import pkgutil
import stat
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import pytest

import onnxarchive
from onnxarchive.files import clones_and_sync, local_file, locking, new_directory, paths

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCKED_BYTE = 1 << 40  # all file systems of Linux can seek to it, as Windows' can to any
_IN_USE = "The process cannot access the file because it is being used by another process"
_MAPPED = "The requested operation cannot be performed on a file with a user-mapped section open"
_TEXT = "a file is opened as text: O_BINARY is missing"
_BINARY = 1 << 29
_MISSING = {
    *("O_DIRECTORY", "O_NOCTTY", "O_NOFOLLOW", "O_NONBLOCK", "O_PATH", "SEEK_DATA", "SEEK_HOLE"),
    *("fchmod", "fchown", "fork", "geteuid", "getuid", "getxattr", "listxattr", "mkfifo", "pread"),
    *("pwrite", "register_at_fork", "removexattr", "sched_getaffinity"),
}

Identity = tuple[int, int]  # device and inode


class Windows(types.ModuleType):
    """What the package sees as `os`.

    Attributes:
        others: Sizes of the maps by which other processes hold files, by identity; 0 for a file
            that is only open there.
    """

    name = "nt"
    altsep = "\\"  # beside "/": on Windows it is the other way round
    O_BINARY = _BINARY
    supports_dir_fd: frozenset[Any] = frozenset()
    supports_fd: frozenset[Any] = frozenset()

    def __init__(self, maps: WeakKeyDictionary[mmap.mmap, Identity]) -> None:
        super().__init__("os")
        self.others: dict[Identity, int] = {}
        self._maps = maps

    def __getattr__(self, name: str) -> Any:
        if name in _MISSING:
            raise AttributeError(name)
        return getattr(os, name)

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: None = None) -> int:
        assert flags & _BINARY, _TEXT
        if os.path.isdir(path):
            _deny(path)
        if flags & (os.O_WRONLY | os.O_RDWR) and _is_read_only(path):
            _deny(path)
        return os.open(path, flags & ~_BINARY, mode)

    def stat(self, path: Any, *, dir_fd: None = None, follow_symlinks: bool = True) -> Any:
        return os.stat(path, follow_symlinks=follow_symlinks)

    def unlink(self, path: Any) -> None:
        self._require_closed(path)
        if _is_read_only(path):
            _deny(path)
        os.unlink(path)

    remove = unlink

    def replace(self, source: Any, target: Any) -> None:
        self._require_closed(source)
        if os.path.lexists(target):
            if os.path.isdir(target) or _is_read_only(target):
                _deny(source, target)
            self._require_closed(target)
        os.replace(source, target)

    def rename(
        self, source: Any, target: Any, *, src_dir_fd: None = None, dst_dir_fd: None = None
    ) -> None:
        if os.path.lexists(target) and not os.path.samefile(source, target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), source, None, target)
        self._require_closed(source)
        os.rename(source, target)

    def ftruncate(self, descriptor: int, size: int) -> None:
        status = os.fstat(descriptor)
        identity = (status.st_dev, status.st_ino)
        sizes = [len(it) for it, mapped in [*self._maps.items()] if mapped == identity]
        if size < min(status.st_size, max([self.others.get(identity, 0), *sizes])):
            raise PermissionError(errno.EACCES, _MAPPED)
        os.ftruncate(descriptor, size)

    @contextlib.contextmanager
    def held_by_another_process(self, path: Path, *, is_mapped: bool = False) -> Iterator[None]:
        """Lets another process have a file open, or mapped, during a block."""
        status = os.stat(path)
        identity = (status.st_dev, status.st_ino)
        self.others[identity] = status.st_size if is_mapped else 0
        try:
            yield
        finally:
            del self.others[identity]

    def users(self, path: Any) -> list[str]:
        """Descriptors and maps of a file, or of the files in a directory."""
        status, place = os.stat(path), os.path.realpath(path)
        users = [f"another process: {it}" for it in self.others if it == _identity(status)]
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the descriptor of this list
                opened = os.stat(f"/proc/self/fd/{number}")
                below = os.readlink(f"/proc/self/fd/{number}").startswith(place + os.sep)
                if os.path.samestat(opened, status) or (below and stat.S_ISREG(opened.st_mode)):
                    users.append(f"descriptor {number}")
        for line in Path("/proc/self/maps").read_text().splitlines():
            mapped = line.split(maxsplit=5)[5:]
            if mapped and (mapped[0] == place or mapped[0].startswith(place + os.sep)):
                users.append(f"map {line}")
        return users

    def _require_closed(self, path: Any) -> None:
        if self.users(path):
            raise PermissionError(errno.EACCES, _IN_USE, path)


def _identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino


def _is_read_only(path: Any) -> bool:
    """True for a file with the attribute of DOS."""
    return os.path.isfile(path) and not os.stat(path).st_mode & stat.S_IWRITE


def _deny(*paths: Any) -> NoReturn:
    error = PermissionError(errno.EACCES, "Access is denied", paths[0])
    if len(paths) > 1:
        error.filename2 = paths[1]
    raise error


def _lock(descriptor: int, mode: int, nbytes: int) -> None:
    """`msvcrt.locking`: each lock excludes all others."""
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        assert (os.lseek(descriptor, 0, os.SEEK_CUR), nbytes) == (LOCKED_BYTE, 1)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB if mode else fcntl.LOCK_UN)
    except OSError:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES)) from None


def simulate(monkeypatch: pytest.MonkeyPatch) -> Windows:
    """Lets the package run as on Windows until the end of a test."""
    if sys.platform != "linux":
        pytest.skip("/proc tells which files are open")
    import ctypes

    for found in pkgutil.walk_packages(onnxarchive.__path__, "onnxarchive."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
    maps: WeakKeyDictionary[mmap.mmap, Identity] = WeakKeyDictionary()

    class Map(mmap.mmap):
        def __new__(cls, descriptor: int, *arguments: Any, **options: Any) -> Map:
            self = super().__new__(cls, descriptor, *arguments, **options)
            if descriptor != -1:
                maps[self] = _identity(os.fstat(descriptor))
            return self

    windows = Windows(maps)
    for name, module in [*sys.modules.items()]:
        if name.startswith("onnxarchive.") and getattr(module, "os", None) is os:
            monkeypatch.setattr(module, "os", windows)
    monkeypatch.setattr(mmap, "mmap", Map)
    monkeypatch.setattr(locking, "fcntl", None)
    msvcrt = SimpleNamespace(
        locking=_lock, LK_UNLCK=0, LK_NBLCK=2, get_osfhandle=lambda descriptor: descriptor
    )
    monkeypatch.setattr(locking, "msvcrt", msvcrt, raising=False)
    monkeypatch.setattr(locking, "LOCKED_BYTE", LOCKED_BYTE)
    monkeypatch.setattr(clones_and_sync, "fcntl", None)
    monkeypatch.setattr(local_file, "POPULATED", None)

    def get_final_path(handle: Any, path: Any, size: int, flags: int) -> int:
        path.value = "\\\\?\\" + os.readlink(f"/proc/self/fd/{handle.value}")
        return len(path.value)

    kernel32 = SimpleNamespace(GetFinalPathNameByHandleW=get_final_path)
    monkeypatch.setattr(ctypes, "windll", SimpleNamespace(kernel32=kernel32), raising=False)
    monkeypatch.setitem(sys.modules, "msvcrt", msvcrt)
    monkeypatch.setattr(paths, "HAS_DIR_FD", False)
    monkeypatch.setattr(paths, "_FILE", os.O_RDONLY | _BINARY)
    monkeypatch.setattr(paths.Root.open, "__defaults__", (os.O_RDONLY | _BINARY,))
    monkeypatch.setattr(paths, "_NOT_FOLLOWED", 0)
    monkeypatch.setattr(new_directory, "HAS_DIR_FD", False)
    new_file = os.O_RDWR | os.O_CREAT | os.O_EXCL | _BINARY
    monkeypatch.setattr(new_directory, "_NEW_FILE", new_file)
    monkeypatch.setattr(new_directory, "_OLD_FILE", os.O_RDWR | _BINARY)
    monkeypatch.setattr(local_file, "PATIENCE", 0)
    return windows
