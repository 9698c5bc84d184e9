"""Features that only some file systems have: shared blocks, and blocks that are set aside."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable
from functools import cache

from onnxarchive.storage.files import MappedFile

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# Errors of a disk without room.
NO_SPACE = (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))
_CLONE = 0x40049409  # FICLONE of Linux: _IOW(0x94, 9, int)

_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE of Linux

# File systems that write to the blocks that were set aside as fast as to others, or faster. Btrfs
# would not compress what is written there, and ZFS refuses what would fit when it is compressed.
RESERVING = ("ext4", "xfs", "tmpfs")


def clone(source: MappedFile, target: int) -> bool:
    """Lets a new file share the blocks of another one, where the file system can (reflinks).

    Args:
        source: The other file.
        target: Descriptor of the new file.

    Returns:
        Whether it did; if not, the new file is as it was.
    """
    if fcntl is None or not hasattr(fcntl, "ioctl"):
        return False
    try:
        fcntl.ioctl(target, _CLONE, source.fileno())
    except OSError:  # systems say in many ways that they cannot
        return False
    return True


def reserve(descriptor: int, offset: int, nbytes: int) -> None:
    """Has blocks set aside for bytes that are about to be written, where that is of use.

    A disk without room then says so at once, and writing goes faster. The file's size stays; what
    is set aside beyond it is freed with the next `os.ftruncate`.

    Args:
        descriptor: The file.
        offset: Where they will be written, in bytes from the start of the file.
        nbytes: How many bytes.

    Raises:
        OSError: The disk has no room for them.
    """
    allocate = fallocate()
    if allocate is None or not nbytes or file_system(descriptor) not in RESERVING:
        return
    error = allocate(descriptor, offset, nbytes)
    if error in NO_SPACE:
        raise OSError(error, os.strerror(error))


@cache
def fallocate() -> Callable[[int, int, int], int] | None:
    """Linux's fallocate, which takes a descriptor, offset and number of bytes; gives the error.

    Python has posix_fallocate alone, which writes into every block itself where the file system
    cannot set them aside.
    """
    if not sys.platform.startswith("linux"):
        return None
    try:
        import ctypes

        library = ctypes.CDLL(None, use_errno=True)
    except (ImportError, OSError):  # Python was built without it, or is linked statically
        return None
    # That of 64 bits, where there are two.
    function = getattr(library, "fallocate64", None) or getattr(library, "fallocate", None)
    if function is None:
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

    def allocate(descriptor: int, offset: int, nbytes: int) -> int:
        failed = function(descriptor, _KEEP_SIZE, offset, nbytes)
        return ctypes.get_errno() if failed else 0

    return allocate


def file_system(descriptor: int) -> str | None:
    """The kind of the file system that a file is on, as Linux tells it in proc(5)."""
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
