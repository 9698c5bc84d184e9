"""Sharing blocks, free space and syncing, which depend on the file system; checks of paths."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import struct
from collections.abc import Iterable
from pathlib import Path

from onnxarchive.errors import UnsupportedFeatureError, naming, shown
from onnxarchive.files.local_file import MappedFile

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# Errors of file systems that cannot sync files or directories.
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
devices_without_clones: set[int] = set()  # devices on which a clone has failed in this process
# On Windows: names of devices, with any extension; names with other characters than it allows; and
# those that end with a dot or a space, which it cuts off.
_NOT_ON_WINDOWS = re.compile(
    r"(con|conin\$|conout\$|prn|aux|nul|(com|lpt)[0-9\u00b9\u00b2\u00b3]) *(\..*)?"
    r'|.*[<>:"|?*\\\x00-\x1f].*|.*[. ]',
    re.IGNORECASE | re.DOTALL,
)
_CLONE = 0x40049409  # FICLONE of Linux: _IOW(0x94, 9, int)
_CLONE_RANGE = 0x4020940D  # FICLONERANGE of Linux: _IOW(0x94, 13, struct file_clone_range)
_RANGE = struct.Struct("=qQQQ")  # source, offset and size in it, offset in the target
# Errors of file systems without clones.
_NO_CLONES = (errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOTTY, errno.ENOSYS)
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
    if not (may_clone(file) and has_clones(file)):
        return 0
    try:
        return os.fstatvfs(file.fileno()).f_bsize
    except OSError:  # then all is copied
        return 0


def may_clone(source: MappedFile) -> bool:
    """False if this system or the device of a file has no clones, as far as is known."""
    return hasattr(fcntl, "ioctl") and source.identity[0] not in devices_without_clones


def has_clones(source: MappedFile) -> bool:
    """False if the file system of a file that is open for writing has no clones.

    The file is cloned over itself, so no new file is needed. File systems with clones refuse that,
    with another error, since the ranges overlap.
    """
    try:
        fcntl.ioctl(source.fileno(), _CLONE, source.fileno())
    except OSError as error:
        if error.errno in _NO_CLONES:
            devices_without_clones.add(source.identity[0])
            return False
    return True


def keeps_names(directory: str) -> bool:
    """True if Linux says that a directory is append-only: names are made there, and never removed.

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
    """True if a file lies on a local file system, as far as Linux's table of mounts says so."""
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
    """Refuses to begin to write `nbytes` bytes if the system tells that fewer are free.

    The OSError names `path`: the file or directory to write, or its description. `directory` will
    contain the file; None for that of `path`.
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

    `remedy` says what to do, in the error for a file system that cannot sync. If it is None, that
    is no error: nothing can be done there to survive a power failure.
    """
    full = getattr(fcntl, "F_FULLFSYNC", None)  # macOS, whose fsync stops at the drive's cache
    if full is not None:
        with contextlib.suppress(OSError):  # a file system without it
            fcntl.fcntl(file.fileno(), full)
            return
    try:
        with naming(file.path, "cannot be synced to its device", f"; {remedy}" if remedy else ""):
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
    """Closes a descriptor through which nothing was written, so that no error can lose anything."""
    with contextlib.suppress(OSError):
        os.close(descriptor)


def is_below(path: str, directory: str) -> bool:
    """True if `path` is `directory` or inside it; both must be absolute, with links resolved."""
    try:
        return os.path.commonpath([path, directory]) == directory
    except ValueError:  # on another drive
        return False


def leads_out(path: str) -> bool:
    """True if a path, joined to a directory, may lead out of it even without a symbolic link."""
    return os.path.isabs(path) or os.pardir in path.split("/")


def require_file_names(paths: Iterable[str]) -> None:
    """On Windows, refuses relative paths, with slashes, that it cannot give to files.

    Raises:
        UnsupportedFeatureError: A path has the name of a device, or one that Windows changes.
    """
    for path in paths:
        names = path.split("/")
        if os.name == "nt" and any(_NOT_ON_WINDOWS.fullmatch(name) for name in names):
            raise UnsupportedFeatureError(
                f"expected names that Windows can give to files, found {shown(path)}: it is a "
                "device, or has a character that Windows does not allow, or ends with a dot or a "
                "space; nothing was written: write it on another system, or give it another name"
            )


def require_no_input(target: str | os.PathLike[str], inputs: Iterable[str | None]) -> None:
    """Refuses a target that is one of the inputs, perhaps by another path, with a ValueError."""
    for path in filter(None, inputs):
        with contextlib.suppress(FileNotFoundError):
            if os.path.samefile(target, path):
                raise ValueError(
                    f"{target!s}: expected another file than the input {path}; name another target"
                )


def in_utf8(path: str) -> str:
    """The text that names a file in a model or archive: its UTF-8 has the bytes of the path.

    It is the path itself, unless the locale has another encoding. Bytes that are not UTF-8 become
    surrogates (PEP 383).
    """
    return os.fsencode(path).decode("utf-8", "surrogateescape")


def from_utf8(text: str) -> str:
    """The path for a text that names a file in a model or archive; the inverse of `in_utf8`."""
    return os.fsdecode(text.encode("utf-8", "surrogateescape"))


def require_parent(target: str | os.PathLike[str]) -> None:
    """Refuses a target in a directory that does not exist.

    Raises:
        IsADirectoryError: The target ends with a slash, so that it names the directory itself.
        FileNotFoundError: The target is a file in the directory.
    """
    path = os.fspath(target)
    directory, name = os.path.split(path)
    if directory and not os.path.lexists(directory):
        problem = f"the directory {directory!r} does not exist; create it first"
        raise OSError(errno.ENOENT if name else errno.EISDIR, problem, path)


def require_no_tilde(target: str | os.PathLike[str]) -> None:
    """Refuses a target in the folder `~` or `~USER`, which shells would have expanded.

    A `~NAME` of no user is a plain name, as in shells.
    """
    path = os.fsdecode(target)
    is_own = path == "~" or path.startswith(("~/", f"~{os.sep}"))
    if is_own or os.path.expanduser(path) != path:
        raise ValueError(
            f"expected a path without '~', which functions do not expand, found {path!r}; pass "
            f"os.path.expanduser(path), or {os.path.join(os.curdir, path)!r} for a file or folder "
            "of this name"
        )


def directory_of(path: str | os.PathLike[str]) -> str:
    """The directory that contains the file at `path`, after links are resolved."""
    return os.path.dirname(os.path.realpath(path))
