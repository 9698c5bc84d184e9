"""Locks on open files, by which the processes that use an archive keep out of one another's way.

They are advisory: `flock`, and on Windows a lock of one byte far behind the end of the file. The
system lets go of them when the process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator

from onnxarchive.errors import LockedError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]
    import msvcrt

_PAUSE = 0.01  # seconds between two tries
_HELD = (errno.EAGAIN, errno.EACCES, errno.EDEADLK)
# What systems say of a file system that has no locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
_LOCKED_BYTE = 1 << 62  # no file reaches it, and Windows locks it all the same


@contextlib.contextmanager
def shared(descriptor: int) -> Iterator[None]:
    """A lock that readers share and that keeps writers out; it is waited for.

    Where the file system has no locks, there is none.

    Args:
        descriptor: The open file.
    """
    try:
        _lock(descriptor, is_shared=True, timeout=None)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        yield
        return
    try:
        yield
    finally:
        _unlock(descriptor)


@contextlib.contextmanager
def exclusive(descriptor: int, timeout: float | None = None) -> Iterator[None]:
    """A lock that keeps out readers and other writers.

    Args:
        descriptor: The open file.
        timeout: Seconds to wait for it at most; None waits as long as it takes, 0 not at all.

    Raises:
        LockedError: Somebody else had it all the time.
        OSError: The file system has no locks.
    """
    _lock(descriptor, is_shared=False, timeout=timeout)
    try:
        yield
    finally:
        _unlock(descriptor)


@contextlib.contextmanager
def exclusive_at(
    path: str | os.PathLike[str], flags: int, timeout: float | None = None
) -> Iterator[int]:
    """The file at a path, open and locked against all others; it stays at the path meanwhile.

    Those who put another file there are kept out as well, if they take the lock of the one before.

    Args:
        path: The file.
        flags: How to open it, as `os.open` takes them.
        timeout: As in `exclusive`.

    Raises:
        LockedError: Somebody else had the lock all the time.
        OSError: It cannot be opened, or the file system has no locks.
    """
    while True:
        descriptor = os.open(path, flags | getattr(os, "O_BINARY", 0))
        try:
            with exclusive(descriptor, timeout):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    yield descriptor
                    return
        finally:
            os.close(descriptor)
        # While the lock was waited for, another file has taken the path.


def keep_exclusive(descriptor: int) -> None:
    """Takes the lock for as long as the file is open; where there are no locks, it goes without.

    It is waited for.
    """
    with contextlib.suppress(OSError):
        _lock(descriptor, is_shared=False, timeout=None)


def try_exclusive(descriptor: int) -> bool:
    """Takes the lock for as long as the file is open, if that can be done at once.

    Returns:
        Whether it was done: not where somebody else has it, or the file system has no locks.
    """
    try:
        _lock(descriptor, is_shared=False, timeout=0)
    except LockedError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def _lock(descriptor: int, *, is_shared: bool, timeout: float | None) -> None:
    if fcntl is not None and timeout is None:
        fcntl.flock(descriptor, fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX)
        return
    if timeout is not None and not timeout >= 0:
        raise ValueError(f"expected a timeout of 0 seconds or more, found {timeout}")
    deadline = None if timeout is None else time.monotonic() + timeout
    while not _is_locked_now(descriptor, is_shared):
        if deadline is not None and time.monotonic() >= deadline:
            raise LockedError(
                "expected nobody else at work on the file, found it locked by a process that "
                "changes it or opens it; try again"
            )
        time.sleep(_PAUSE)


def _is_locked_now(descriptor: int, is_shared: bool) -> bool:
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        else:
            _at_locked_byte(descriptor, lambda: msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1))
    except OSError as error:
        if error.errno in _HELD:
            return False
        raise
    return True


def _unlock(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # a file that was closed is unlocked
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        else:
            _at_locked_byte(descriptor, lambda: msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1))


def _at_locked_byte(descriptor: int, act: Callable[[], None]) -> None:
    """Windows locks from the descriptor's position on; it is put back."""
    position = os.lseek(descriptor, 0, os.SEEK_CUR)
    os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
    try:
        act()
    finally:
        os.lseek(descriptor, position, os.SEEK_SET)
