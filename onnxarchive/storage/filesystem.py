"""System calls that depend on the file system: sharing blocks, reserving blocks, syncing."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable
from functools import cache

from onnxarchive.errors import naming
from onnxarchive.storage.files import MappedFile

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# Errors of a full disk.
NO_SPACE = (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))
# Errors of systems that cannot sync directories.
_NO_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS)
_CLONE = 0x40049409  # FICLONE of Linux: _IOW(0x94, 9, int)

_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE of Linux

# File systems on which writing to reserved blocks is not slower than writing to other blocks. Btrfs
# is left out, since it does not compress data in reserved blocks. ZFS is left out, since it refuses
# to reserve more than its free space, though compressed data may need less.
RESERVING = ("ext4", "xfs", "tmpfs")


def clone(source: MappedFile, target: int) -> bool:
    """Clones a file into a new file that shares all blocks (reflinks), if the file system can.

    Args:
        source: The file.
        target: Descriptor of the new file.

    Returns:
        True if the file was cloned; else the new file is unchanged.
    """
    if fcntl is None or not hasattr(fcntl, "ioctl"):
        return False
    try:
        fcntl.ioctl(target, _CLONE, source.fileno())
    except OSError:  # the errors for "not supported" differ
        return False
    return True


def reserve(descriptor: int, offset: int, nbytes: int) -> None:
    """Reserves blocks for bytes to be written, on file systems that benefit.

    A full disk is then found at once, and writing is faster. The size of the file does not change;
    reserved blocks beyond it are freed by the next `os.ftruncate`.

    Args:
        descriptor: The file.
        offset: Offset of the bytes in the file.
        nbytes: Number of the bytes.

    Raises:
        OSError: The disk is full.
    """
    allocate = fallocate()
    if allocate is None or not nbytes or file_system(descriptor) not in RESERVING:
        return
    error = allocate(descriptor, offset, nbytes)
    if error in NO_SPACE:
        raise OSError(error, os.strerror(error))


@cache
def fallocate() -> Callable[[int, int, int], int] | None:
    """Linux's fallocate or None; called with descriptor, offset and size, it returns an errno or 0.

    Python has only posix_fallocate, which writes to each block if the file system cannot reserve.
    """
    if not sys.platform.startswith("linux"):
        return None
    try:
        import ctypes

        library = ctypes.CDLL(None, use_errno=True)
    except (ImportError, OSError):  # Python was built without ctypes, or linked statically
        return None
    # The 64-bit variant, if there are two.
    function = getattr(library, "fallocate64", None) or getattr(library, "fallocate", None)
    if function is None:
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

    def allocate(descriptor: int, offset: int, nbytes: int) -> int:
        failed = function(descriptor, _KEEP_SIZE, offset, nbytes)
        return ctypes.get_errno() if failed else 0

    return allocate


def file_system(descriptor: int) -> str | None:
    """Type of a file's file system, from Linux's /proc/self/mountinfo (proc(5)); or None."""
    device = os.fstat(descriptor).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with (
        contextlib.suppress(OSError),
        open("/proc/self/mountinfo", errors="surrogateescape") as mounts,
    ):
        for mount in mounts:
            fields, _, described = mount.partition(" - ")
            if fields.split()[2] == number:
                return described.split()[0]
    return None


def sync(file: MappedFile) -> None:
    """Syncs a file to its device, through the caches of the system and of the drive.

    Raises:
        OSError: The device failed, or the file system cannot sync; the error names the file.
    """
    full = getattr(fcntl, "F_FULLFSYNC", None)  # macOS, whose fsync stops at the drive's cache
    if full is not None:
        with contextlib.suppress(OSError):  # a file system without it
            fcntl.fcntl(file.fileno(), full)
            return
    with naming(file.path, "cannot be synced to its device"):
        os.fsync(file.fileno())


def sync_directory(directory: str) -> None:
    """Syncs the entries of a directory, if the system can.

    Raises:
        OSError: The disk failed.
    """
    if os.name == "nt":
        return
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except PermissionError:  # a directory may be writable without being readable
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(descriptor)
