"""Clones, free space and syncing, which depend on the file system."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import struct
import sys
from pathlib import Path

from onnxarchive.errors import path_in_errors
from onnxarchive.files.local_file import MappedFile

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# Errors of file systems that cannot sync files or directories.
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
devices_without_clones: set[int] = set()  # devices on which a clone has failed in this process
_CLONE = 0x40049409  # FICLONE of Linux: _IOW(0x94, 9, int)
_CLONE_RANGE = 0x4020940D  # FICLONERANGE of Linux: _IOW(0x94, 13, struct file_clone_range)
_RANGE = struct.Struct("=qQQQ")  # source, offset and size in it, offset in the target
# Errors of file systems without clones.
_NO_CLONES = (errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOTTY, errno.ENOSYS)
CLONES_TO_NAMES = sys.platform == "darwin"  # it clones no ranges, and into no open file
_AT_FDCWD, _NO_OWNER = -2, 2  # AT_FDCWD and CLONE_NOOWNERCOPY of macOS
_GET_FLAGS = 2 << 30 | struct.calcsize("l") << 16 | ord("f") << 8 | 1  # FS_IOC_GETFLAGS of Linux
_APPEND_ONLY = 0x20  # FS_APPEND_FL
# File systems of Linux whose files only this machine's kernel locks and changes.
_LOCAL_TYPES = frozenset(
    (
        *("bcachefs", "btrfs", "exfat", "ext2", "ext3", "ext4", "f2fs", "jfs", "nilfs2", "ntfs3"),
        *("overlay", "ramfs", "reiserfs", "tmpfs", "ubifs", "vfat", "xfs", "zfs"),
    )
)


def clone(source: MappedFile, target: int) -> bool:
    """Makes the new file `target` share all blocks of a file (reflinks).

    Returns False if the file system cannot; the new file is then unchanged.
    """
    try:
        fcntl.ioctl(target, _CLONE, source.fileno())
    except OSError:  # the errors for "not supported" differ
        devices_without_clones.add(source.identity[0])
        return False
    return True


def make_clone(source: MappedFile, path: str, mode: int) -> MappedFile:
    """Creates a file that shares all blocks of another, on macOS, and opens it to write.

    Raises:
        OSError: The path exists, or the file system cannot clone.
    """
    try:
        _clone_to_name(source.fileno(), path)
    except FileExistsError:
        raise
    except OSError:
        devices_without_clones.add(source.identity[0])
        raise
    flags = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0)
    file = MappedFile(path, descriptor=os.open(path, flags))
    os.chmod(file.fileno(), mode)
    return file


def _clone_to_name(source: int, path: str) -> None:
    import ctypes  # no other system needs it

    library = ctypes.CDLL(None, use_errno=True)
    if library.fclonefileat(source, _AT_FDCWD, os.fsencode(path), _NO_OWNER) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)


def clone_range(
    source: MappedFile, offset: int, nbytes: int, target: MappedFile, target_offset: int
) -> bool:
    """Makes a range of the file `target` share blocks with a range of another file.

    Offsets and size must be multiples of the block size. Returns False if the file system cannot;
    the range of the target is then unchanged.
    """
    arguments = _RANGE.pack(source.fileno(), offset, nbytes, target_offset)
    try:
        fcntl.ioctl(target.fileno(), _CLONE_RANGE, arguments)
    except OSError as error:
        if error.errno in _NO_CLONES:
            devices_without_clones.add(target.identity[0])
        return False
    return True


def shared_block_size(file: MappedFile) -> int:
    """The size in bytes of the blocks that a file open for writing may share; 0 if it cannot."""
    if CLONES_TO_NAMES or not (may_clone(file) and has_clones(file)):
        return 0
    try:
        return os.fstatvfs(file.fileno()).f_bsize
    except OSError:  # then all is copied
        return 0


def may_clone(source: MappedFile) -> bool:
    """False if this system or the device of a file is known to have no clones."""
    return hasattr(fcntl, "ioctl") and source.identity[0] not in devices_without_clones


def has_clones(source: MappedFile) -> bool:
    """False if the file system of a file that is open for writing has no clones.

    The file is cloned over itself, so no new file is needed. File systems with clones refuse that,
    with another error, since the ranges overlap. macOS says it only when a file is cloned.
    """
    if CLONES_TO_NAMES:
        return True
    try:
        fcntl.ioctl(source.fileno(), _CLONE, source.fileno())
    except OSError as error:
        if error.errno in _NO_CLONES:
            devices_without_clones.add(source.identity[0])
            return False
    return True


def keeps_names(directory: str) -> bool:
    """True if Linux says that a directory is append-only: names can be added, but never removed.

    Other directories that keep names, such as those of mounted buckets, do not say so.
    """
    flags = bytes(struct.calcsize("l"))
    with contextlib.suppress(OSError, AttributeError):  # not readable; Windows
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            flags = fcntl.ioctl(descriptor, _GET_FLAGS, flags)
        finally:
            os.close(descriptor)
    return bool(struct.unpack("l", flags)[0] & _APPEND_ONLY)


def is_local(file: MappedFile) -> bool:
    """True if a file is on a local file system according to Linux's table of mounts."""
    with contextlib.suppress(OSError):
        about = Path(f"/proc/self/fdinfo/{file.fileno()}").read_text().splitlines()
        mount = next((line.split()[1] for line in about if line.startswith("mnt_id:")), None)
        for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
            # "36 35 98:0 / /mnt rw,noatime master:1 - ext4 /dev/root rw", see proc(5)
            before, _, after = line.decode(errors="replace").partition(" - ")
            if before.split()[0] == mount:
                return after.split()[0] in _LOCAL_TYPES
    return False


def require_space(path: str | os.PathLike[str], nbytes: int, directory: str | None = None) -> None:
    """Refuses to begin to write `nbytes` bytes if the system says that fewer are free.

    The OSError names `path`: the file or directory to write, or its description. `directory` is the
    directory of the new file; None for that of `path`.
    """
    try:
        disk = shutil.disk_usage(directory or os.path.dirname(os.path.realpath(path)))
    except OSError:
        return
    if disk.total and disk.free < nbytes:  # a file system that counts no blocks has 0 in all
        raise OSError(
            errno.ENOSPC,
            f"{os.strerror(errno.ENOSPC)}: {nbytes} bytes are needed, {disk.free} are free",
            os.fspath(path),
        )


def sync(file: MappedFile, remedy: str | None = None) -> None:
    """Syncs a file to its device, through the caches of the system and of the drive.

    `remedy` is the advice in the error for a file system that cannot sync. If it is None, no error
    is raised: such a file system cannot protect from a power failure.
    """
    full = getattr(fcntl, "F_FULLFSYNC", None)  # macOS, whose fsync stops at the drive's cache
    if full is not None:
        with contextlib.suppress(OSError):  # a file system without it
            fcntl.fcntl(file.fileno(), full)
            return
    try:
        with path_in_errors(
            file.path, "cannot be synced to its device", f"; {remedy}" if remedy else ""
        ):
            os.fsync(file.fileno())
    except OSError as error:
        if remedy is not None or error.errno not in _NO_SYNC:
            raise


def sync_directory(directory: str) -> None:
    """Syncs the entries of a directory, if the system can."""
    if os.name == "nt":
        return
    with contextlib.suppress(OSError):  # it may be writable without being readable
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def close_unwritten(descriptor: int) -> None:
    """Closes a descriptor; ignores errors, since nothing was written through it."""
    with contextlib.suppress(OSError):
        os.close(descriptor)
