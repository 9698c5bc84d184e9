"""Windows' locks of bytes, made of Linux's locks that belong to an open file."""

from __future__ import annotations

import errno
import os
import struct
from types import SimpleNamespace

import pytest

from onnxarchive.files import locking

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCKED_BYTE = 1 << 40  # all file systems of Linux can seek to it, as Windows' can to any


def lock_bytes_alone(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lets `locking` use `msvcrt`; gives a list of the bytes that are locked and unlocked."""
    if not hasattr(fcntl, "F_OFD_SETLK"):
        pytest.skip("this system has no locks of bytes that belong to an open file")
    locked = []

    def lock(descriptor: int, mode: int, nbytes: int) -> None:
        position = os.lseek(descriptor, 0, os.SEEK_CUR)
        locked.append(position)
        kind = fcntl.F_UNLCK
        if mode != 0:  # Linux locks what is open for reading against writers alone
            access = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
            kind = fcntl.F_RDLCK if access == os.O_RDONLY else fcntl.F_WRLCK
        request = struct.pack("hhqqi4x", kind, os.SEEK_SET, position, nbytes, 0)
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, request)
        except OSError:
            # What Windows says of a byte that is locked, or was not.
            raise OSError(errno.EACCES, os.strerror(errno.EACCES)) from None

    monkeypatch.setattr(locking, "fcntl", None)
    monkeypatch.setattr(locking, "LOCKED_BYTE", LOCKED_BYTE)
    module = SimpleNamespace(locking=lock, LK_UNLCK=0, LK_NBLCK=2)
    monkeypatch.setattr(locking, "msvcrt", module, raising=False)
    return locked
