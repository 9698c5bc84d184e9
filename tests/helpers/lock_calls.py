"""The calls to the system that lock files: made by hand, watched, and taken away."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias

import pytest

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

Kind: TypeAlias = Literal["shared", "exclusive", "unlock"]

_REQUEST = struct.Struct("@hhqqi0q")  # as byte_locks.py has it


def has_open_file_locks() -> bool:
    """True if the system has locks of bytes that belong to an open file."""
    return hasattr(fcntl, "F_OFD_SETLK")


def lock(descriptor: int, kind: Kind) -> None:
    """Locks a whole file as another program does; raises `OSError` if another has locked it."""
    if not has_open_file_locks():
        flocks = {"shared": fcntl.LOCK_SH, "exclusive": fcntl.LOCK_EX, "unlock": fcntl.LOCK_UN}
        fcntl.flock(descriptor, flocks[kind] | fcntl.LOCK_NB)
        return
    types = {"shared": fcntl.F_RDLCK, "exclusive": fcntl.F_WRLCK, "unlock": fcntl.F_UNLCK}
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _REQUEST.pack(types[kind], os.SEEK_SET, 0, 0, 0))


@contextlib.contextmanager
def locked(path: os.PathLike[str], kind: Kind) -> Iterator[None]:
    """Keeps a file locked during a block, as another program does."""
    with open(path, "r+b") as file:
        lock(file.fileno(), kind)
        yield


def is_free(path: os.PathLike[str]) -> bool:
    """True if no other open file has locked a file."""
    try:
        with locked(path, "exclusive"):
            return True
    except BlockingIOError:
        return False


def watch(
    patches: pytest.MonkeyPatch, call: Callable[[int, Kind, Callable[[], object]], object]
) -> None:
    """Lets a function make the calls that lock and unlock files.

    Args:
        patches: Patches `fcntl`.
        call: Called with the descriptor, the kind of the lock, and a function that makes the call.
    """
    control, flock = fcntl.fcntl, fcntl.flock
    types: dict[int, Kind]
    types = {fcntl.F_RDLCK: "shared", fcntl.F_WRLCK: "exclusive", fcntl.F_UNLCK: "unlock"}
    flocks: dict[int, Kind]
    flocks = {fcntl.LOCK_SH: "shared", fcntl.LOCK_EX: "exclusive", fcntl.LOCK_UN: "unlock"}

    def watched_control(descriptor: int, command: int, argument: Any = 0) -> Any:
        if command != getattr(fcntl, "F_OFD_SETLK", None):
            return control(descriptor, command, argument)
        kind = types[_REQUEST.unpack(argument)[0]]
        return call(descriptor, kind, lambda: control(descriptor, command, argument))

    def watched_flock(descriptor: int, operation: int) -> None:
        kind = flocks[operation & ~fcntl.LOCK_NB]
        if kind == "unlock" and has_open_file_locks():  # that has been called, too
            flock(descriptor, operation)
        else:
            call(descriptor, kind, lambda: flock(descriptor, operation))

    patches.setattr(fcntl, "fcntl", watched_control)
    patches.setattr(fcntl, "flock", watched_flock)


def refuse(patches: pytest.MonkeyPatch, code: int) -> None:
    """Lets every call that locks or unlocks a file fail with an error."""

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    watch(patches, fail)
    if has_open_file_locks():
        patches.setattr(fcntl, "flock", fail)
