"""Advisory locks on open files, which keep editors and readers of an archive apart.

They are `flock`, and on Windows a lock of one byte far beyond the end of the file. The system
releases them when the process ends, however it ends. A lock belongs to the open file, so forks and
copies of a descriptor share it. Processes on several machines see each other's locks if the file
system carries them: NFS and CIFS do unless mounted with `nolock` or `nobrl`, others may not.
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
LOCKED_BYTE = 1 << 62  # beyond every file; Windows locks it all the same
POSITION_LOCK = threading.Lock()  # Windows reads, writes and locks at a descriptor's one position
# Device and inode of each file with an exclusive lock of this process, and the thread that has it.
_held: set[tuple[int, int, int, int]] = set()


@contextlib.contextmanager
def shared(descriptor: int, timeout: float | None = None) -> Iterator[None]:
    """Holds a lock that readers share and that keeps editors out.

    A file system without locks gives none.

    Args:
        descriptor: The open file.
        timeout: Seconds to wait at most; None waits without limit, 0 not at all.

    Raises:
        LockedError: The file stayed locked.
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
    """Holds a lock that keeps out readers and other editors.

    Args:
        descriptor: The open file. NFS gives this lock only to a file that is open for writing.
        timeout: As in `shared`.

    Raises:
        LockedError: The file stayed locked, or this thread itself holds its lock.
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
    """Unlocks a file when the block ends; an interrupt may end it as soon as the lock is held."""
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() == process:  # a fork shares the lock of its parent
            unlock(descriptor)


def keep_exclusive(descriptor: int) -> None:
    """Takes the exclusive lock until `unlock` or the end of the process; waits for it.

    A file system without locks gives none.
    """
    with contextlib.suppress(OSError):
        _lock(descriptor, is_shared=False, timeout=None)


def try_exclusive(descriptor: int) -> bool:
    """Takes the exclusive lock for as long as the file is open, if it is free.

    Returns:
        Whether it did; False on a file system without locks.
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
    """Releases the lock of an open file, also for forks and copies of its descriptor."""
    with contextlib.suppress(OSError):  # a file that was closed is unlocked
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        else:
            _at_locked_byte(descriptor, lambda: msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1))


def require_timeout(timeout: float | None) -> None:
    """Refuses a timeout that is negative or not a number.

    Raises:
        ValueError: It is.
    """
    if timeout is not None and not timeout >= 0:
        raise ValueError(f"expected a timeout of 0 seconds or more, found {timeout}")


def _lock(descriptor: int, *, is_shared: bool, timeout: float | None) -> None:
    require_timeout(timeout)
    if _held and _this_thread_with(descriptor) in _held:
        if _is_locked_now(descriptor, is_shared):  # an interrupt has ended the edit
            return
        raise LockedError(
            "expected a file that this thread does not edit, found it locked by this thread; "
            "finish the edit first"
        )
    if fcntl is not None and timeout is None:
        fcntl.flock(descriptor, fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX)
        return
    deadline = None if timeout is None else time.monotonic() + timeout
    while not _is_locked_now(descriptor, is_shared):
        if deadline is not None and time.monotonic() >= deadline:
            raise LockedError(
                "expected nobody else at work on the file, found it locked by a process that "
                "edits or opens it; try again, or give a longer timeout"
            )
        time.sleep(_PAUSE)


def _this_thread_with(descriptor: int) -> tuple[int, int, int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino, os.getpid(), threading.get_ident()


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


def _at_locked_byte(descriptor: int, act: Callable[[], None]) -> None:
    """Windows locks from the descriptor's position on; it is put back."""
    with POSITION_LOCK:
        position = os.lseek(descriptor, 0, os.SEEK_CUR)
        os.lseek(descriptor, LOCKED_BYTE, os.SEEK_SET)
        try:
            act()
        finally:
            os.lseek(descriptor, position, os.SEEK_SET)
