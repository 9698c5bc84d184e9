"""Advisory locks on open files, which separate editors and readers of an archive.

On Linux, a lock is one of an open file description (`F_OFD_SETLK`) on one byte far beyond the end
of the file; on Windows, a lock of the same byte; elsewhere, `flock`. The system releases a lock
when the process ends, even if it is killed. A lock belongs to the open file, so forks and copies of
a descriptor share it.

What one process can do to another:

- A lock that excludes readers needs a file that is open for writing. So a user who may only read a
  file cannot stop its readers. With `flock` such a user can, and on all systems a user who may
  write can; so readers wait for a limited time, and then read without the lock (see `shared`).
- A reader's lock makes editors wait; if it outlasts their timeout, they fail.
- An editor that may not write to the file replaces the file by a new one. It takes the lock of a
  reader, which excludes editors in place, and `flock`, which excludes others of its kind.

Locks of `lockf` and `fcntl` on the whole file exclude these locks and are excluded by them; locks
of `flock` alone do neither on Linux's local file systems.

NFS and CIFS share locks between machines unless mounted with `nolock` or `nobrl`; other network
file systems may not. CIFS makes locks mandatory, but nobody reads or writes the byte. A FUSE server
with locks of its own may keep a lock that is not released before the file is closed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final
from weakref import WeakSet

from onnxarchive.errors import ArchiveError, LockedError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]
    import msvcrt

TIMEOUT: Final = 30.0  # seconds to wait for a lock, unless a caller says otherwise
SHORT_TIMEOUT = 1.0  # seconds; `remove_abandoned` locks a new file for much less
_PAUSE = 0.01  # seconds between two tries
_HELD = (errno.EAGAIN, errno.EACCES, errno.EDEADLK)
# Errors of a file system without locks. 524 is ENOTSUPP, which Linux has for its own use, but which
# some file systems return.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, 524)
LOCKED_BYTE = 1 << 62  # offset of the byte to lock, beyond the end of every file
# Linux's `struct flock`: type, whence, start, length, process id (0 for these locks).
_REQUEST = struct.Struct("@hhqqi0q")
POSITION_LOCK = threading.Lock()  # Windows reads, writes and locks at the position of a descriptor
_begun: Final[WeakSet[OfOneProcess]] = WeakSet()
# Locks taken by `exclusive`, by device and inode of the file and id of the thread.
_held: dict[tuple[int, int, int], OfOneProcess] = {}


class OfOneProcess:
    """Something that this process has begun: a locked file, a new file, a run of threads.

    Attributes:
        is_own: False in a fork of the process that began it.
    """

    is_own = True

    def __init__(self) -> None:
        _begun.add(self)

    def refuse_fork(self) -> None:
        """Refuses a fork of the process that began the work.

        Raises:
            ArchiveError: This process is such a fork.
        """
        if not self.is_own:
            raise ArchiveError(
                f"process {os.getpid()} is a fork of the process that opened the file or began to "
                "write it; open or write the file in the fork itself"
            )


def _disown() -> None:
    for work in _begun:
        work.is_own = False
    _begun.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_disown)


@contextlib.contextmanager
def shared(
    descriptor: int, timeout: float | None = TIMEOUT
) -> Iterator[LockedError | OSError | None]:
    """Holds a lock that is shared by readers and excludes editors; or runs the block without it.

    If the file stays locked, or if the system cannot lock it for any reason, a reader continues
    without the lock: it is only advice, and nobody may stop readers with it. So the caller has to
    find out whether the file was edited during the block.

    On Windows, the lock also excludes other readers.

    Args:
        descriptor: The open file.
        timeout: Maximum seconds to wait; None waits without limit.

    Yields:
        None if the file is locked; else the reason why not.

    Raises:
        LockedError: This thread holds the exclusive lock.
        OSError: The file is closed.
    """
    with _unlocked_in_the_end(descriptor):
        failure: LockedError | OSError | None = None
        try:
            if not _lock(descriptor, is_shared=True, timeout=timeout):
                failure = _held_by_others()
        except OSError as error:
            if error.errno == errno.EBADF:
                raise
            failure = error.with_traceback(None)  # which would keep frames alive
        yield failure


@contextlib.contextmanager
def exclusive(descriptor: int, timeout: float | None = TIMEOUT) -> Iterator[None]:
    """Holds a lock that excludes readers and other editors.

    If the file is open only for reading, readers are not excluded, and NFS refuses the lock.

    Raises:
        LockedError: The file remained locked for `timeout` seconds, or is locked by this thread.
        OSError: The file system has no locks, or the disk failed.
    """
    holder = (*_identity(descriptor), threading.get_ident())
    with _unlocked_in_the_end(descriptor) as work:
        if not _lock(descriptor, is_shared=False, timeout=timeout):
            raise _held_by_others()
        try:
            _held[holder] = work
            yield
        finally:
            _held.pop(holder, None)


@contextlib.contextmanager
def _unlocked_in_the_end(descriptor: int) -> Iterator[OfOneProcess]:
    """Unlocks a file when the block ends, even if an interrupt comes just after locking."""
    work = OfOneProcess()
    try:
        yield work
    finally:
        if work.is_own:  # a fork shares the lock of its parent
            unlock(descriptor)


def keep_exclusive(descriptor: int, timeout: float) -> bool:
    """Takes the exclusive lock until `unlock` or until the file is closed.

    The file is usually new or private, and locked by others only briefly.

    Returns:
        True if the lock was taken, False on a file system without locks.

    Raises:
        LockedError: The file remained locked for `timeout` seconds.
    """
    try:
        if _lock(descriptor, is_shared=False, timeout=timeout):
            return True
    except OSError:
        return False
    raise _held_by_others()


def is_held(identity: tuple[int, int]) -> bool:
    """True if this thread has locked the file of this device and inode for an edit.

    On CIFS without locks of open files, the file is then read only through the locked descriptor.
    """
    work = _held.get((*identity, threading.get_ident()))
    return work is not None and work.is_own


def is_locked(descriptor: int) -> bool:
    """True if others have locked an open file; False if this thread has locked it for an edit."""
    if is_held(_identity(descriptor)):
        return False
    try:
        is_free = _try_lock(descriptor, is_shared=False)
    except OSError:  # a file system without locks
        return False
    if is_free:
        unlock(descriptor)
    return not is_free


def unlock(descriptor: int) -> None:
    """Releases the lock of an open file, also for forks and copied descriptors."""
    with contextlib.suppress(OSError):  # a closed file is unlocked
        if fcntl is None:
            _at_locked_byte(descriptor, lambda: msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1))
        else:
            _set_byte(descriptor, fcntl.F_UNLCK)
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def require_timeout(timeout: float | None) -> None:
    """Refuses a timeout that is no number (TypeError), or negative or NaN (ValueError)."""
    try:
        is_valid = timeout is None or timeout >= 0
    except TypeError:
        raise TypeError(
            f"timeout: expected a number of seconds or None, found {timeout!r}"
        ) from None
    if not is_valid:
        raise ValueError(f"expected a timeout of 0 seconds or more, found {timeout}")


def _lock(descriptor: int, *, is_shared: bool, timeout: float | None) -> bool:
    """Locks a file; returns False if another process or thread kept it locked."""
    require_timeout(timeout)
    if _held and is_held(_identity(descriptor)):
        if _try_lock(descriptor, is_shared):  # unlocked, but still in `_held` after an interrupt
            return True
        raise LockedError("this thread has locked the file for an edit; finish the edit first")
    deadline = None if timeout is None else time.monotonic() + timeout
    while not _try_lock(descriptor, is_shared):
        if deadline is not None and time.monotonic() >= deadline:
            return False
        time.sleep(_PAUSE)
    return True


def _held_by_others() -> LockedError:
    return LockedError(
        "the file is locked by a process that edits or opens it; try again, or with a longer "
        "timeout"
    )


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _try_lock(descriptor: int, is_shared: bool) -> bool:
    try:
        if fcntl is None:
            _at_locked_byte(descriptor, lambda: msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1))
        else:
            _lock_now(descriptor, is_shared)
    except OSError as error:
        if error.errno in _HELD:
            return False
        raise
    return True


def _lock_now(descriptor: int, is_shared: bool) -> None:
    access = os.O_RDONLY if is_shared else fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
    kind = fcntl.F_RDLCK if access == os.O_RDONLY else fcntl.F_WRLCK
    if _set_byte(descriptor, kind) and (is_shared or kind == fcntl.F_WRLCK):
        return
    try:  # the system's only lock, or that of an editor that may not write to the file
        fcntl.flock(descriptor, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        _set_byte(descriptor, fcntl.F_UNLCK)
        raise


def _set_byte(descriptor: int, kind: int) -> bool:
    """Locks or unlocks the byte; returns False if the system has no locks of open files."""
    if not (sys.platform.startswith("linux") and hasattr(fcntl, "F_OFD_SETLK")):
        return False
    request = _REQUEST.pack(kind, os.SEEK_SET, LOCKED_BYTE, 1, 0)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, request)
    except OSError as error:
        if error.errno != errno.EINVAL:  # Linux before 3.15, and its imitations
            raise
        return False
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
