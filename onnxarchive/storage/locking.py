"""Advisory locks on open files, which separate editors and readers of an archive.

The locks are `flock`; on Windows, a lock of one byte far beyond the end of the file. The system
releases the locks when the process ends, even if it is killed. A lock belongs to the open file, so
forks and copies of a descriptor share it. NFS and CIFS share locks between machines unless mounted
with `nolock` or `nobrl`; other network file systems may not.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
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
# Errors of a file system without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
LOCKED_BYTE = 1 << 62  # offset of the byte locked on Windows, beyond the end of every file
POSITION_LOCK = threading.Lock()  # Windows reads, writes and locks at the position of a descriptor
# Locks taken by `exclusive`: device and inode of the file, ids of process and thread.
_held: set[tuple[int, int, int, int]] = set()


@contextlib.contextmanager
def shared(descriptor: int, timeout: float | None = None) -> Iterator[None]:
    """Holds a lock that is shared by readers and excludes editors.

    On Windows, it also excludes other readers. On a file system without locks, the block runs
    without a lock.

    Args:
        descriptor: The open file.
        timeout: Maximum seconds to wait; None waits without limit.

    Raises:
        LockedError: The file remained locked, or this thread holds the exclusive lock.
    """
    with _unlocked_in_the_end(descriptor):
        try:
            _lock(descriptor, is_shared=True, timeout=timeout)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield


@contextlib.contextmanager
def exclusive(descriptor: int, timeout: float | None = None) -> Iterator[None]:
    """Holds a lock that excludes readers and other editors.

    Args:
        descriptor: The open file. NFS locks only a file that is open for writing.
        timeout: Maximum seconds to wait; None waits without limit.

    Raises:
        LockedError: The file remained locked, or is locked by this thread.
        OSError: The file system has no locks, or the disk failed.
    """
    holder = _this_thread_with(descriptor)
    with _unlocked_in_the_end(descriptor):
        _lock(descriptor, is_shared=False, timeout=timeout)
        try:
            _held.add(holder)
            yield
        finally:
            _held.discard(holder)


@contextlib.contextmanager
def _unlocked_in_the_end(descriptor: int) -> Iterator[None]:
    """Unlocks a file when the block ends, even if an interrupt comes just after locking."""
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() == process:  # a fork shares the lock of its parent
            unlock(descriptor)


def keep_exclusive(descriptor: int, timeout: float | None = None) -> bool:
    """Takes the exclusive lock until `unlock` or until the file is closed.

    Args:
        descriptor: The open file.
        timeout: Maximum seconds to wait; None waits without limit.

    Returns:
        True if the lock was taken, False on a file system without locks.

    Raises:
        LockedError: The file remained locked.
    """
    try:
        _lock(descriptor, is_shared=False, timeout=timeout)
    except OSError:
        return False
    return True


def try_exclusive(descriptor: int) -> bool:
    """Takes the exclusive lock until the file is closed, unless the file is locked.

    Returns:
        True if the lock was taken; False if the file is locked, or its file system has no locks.
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


def unlock(descriptor: int) -> None:
    """Releases the lock of an open file, also for forks and copied descriptors."""
    with contextlib.suppress(OSError):  # a closed file is unlocked
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        else:
            _at_locked_byte(descriptor, lambda: msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1))


def require_timeout(timeout: float | None) -> None:
    """Refuses an invalid timeout.

    Raises:
        ValueError: The timeout is negative or not a number.
    """
    if timeout is not None and not timeout >= 0:
        raise ValueError(f"expected a timeout of 0 seconds or more, found {timeout}")


def _lock(descriptor: int, *, is_shared: bool, timeout: float | None) -> None:
    require_timeout(timeout)
    if _held and _this_thread_with(descriptor) in _held:
        if _try_lock(descriptor, is_shared):  # unlocked, but still in `_held` after an interrupt
            return
        raise LockedError("this thread has locked the file for an edit; finish the edit first")
    if fcntl is not None and timeout is None:
        fcntl.flock(descriptor, fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX)
        return
    deadline = None if timeout is None else time.monotonic() + timeout
    while not _try_lock(descriptor, is_shared):
        if deadline is not None and time.monotonic() >= deadline:
            raise LockedError(
                "the file is locked by a process that edits or opens it; try again, or with a "
                "longer timeout"
            )
        time.sleep(_PAUSE)


def _this_thread_with(descriptor: int) -> tuple[int, int, int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino, os.getpid(), threading.get_ident()


def _try_lock(descriptor: int, is_shared: bool) -> bool:
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


def _at_locked_byte(descriptor: int, act: Callable[[], None]) -> None:
    """Calls a function with the descriptor at the locked byte, then restores the position."""
    with POSITION_LOCK:
        position = os.lseek(descriptor, 0, os.SEEK_CUR)
        os.lseek(descriptor, LOCKED_BYTE, os.SEEK_SET)
        try:
            act()
        finally:
            os.lseek(descriptor, position, os.SEEK_SET)
