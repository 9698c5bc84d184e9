"""Owner, permissions and extended attributes of what takes the place of another file or directory.

The new one never grants more than the old one does, at any moment. What cannot be kept is reported
as an `AttributesWarning`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import operator
import os
import stat
import struct
import warnings
from collections.abc import Iterator
from contextvars import ContextVar

from onnxarchive.errors import AttributesWarning

_ACLS = "system."  # begins the names of access control lists
_POSIX_ACLS = "system.posix_acl_"
_ACCESS = "system.posix_acl_access"
_ACL_HEADER_SIZE = 4
_ACL_ENTRY = struct.Struct("<HHI")  # whom it is for, permissions, id
_ACL_OWNER = 0x01
# What the system derives from the content of a file.
_OF_CONTENT = ("security.evm", "security.ima")
_collection: ContextVar[list[str] | None] = ContextVar("collection", default=None)
# Errors of a file system without permission bits.
_NO_MODES = (errno.EPERM, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS)


def first_mode(old: os.stat_result | None, new: int = 0o666) -> int:
    """The permission bits with which something is made: its owner's alone if it replaces another.

    Args:
        old: Status of what it will replace, or None.
        new: The bits of what replaces nothing.
    """
    return new if old is None else old.st_mode & new & stat.S_IRWXU


def keep(descriptor: int, path: str, target: str, old: os.stat_result) -> None:
    """Gives a new file or directory owner, permissions and attributes of the one it replaces.

    Where the owner cannot be kept, permissions are those of a new file as far as the old one
    grants them, too. Where the group or an access control list cannot be kept, nobody but the owner
    gets more than all others had.

    Args:
        descriptor: The new file, open. So far it grants nothing to anybody but its owner.
        path: Its path.
        target: Path of the old file, which the warning names.
        old: Status of the old file.

    Raises:
        OSError: The disk failed.
    """
    inherited = _listed(descriptor)
    for name in inherited:
        if name.startswith(_POSIX_ACLS):  # the directory's default
            os.removexattr(descriptor, name)
    lost = []
    if not keep_owner(descriptor, old):
        with contextlib.suppress(OSError):
            os.fchown(descriptor, -1, old.st_gid)
    new = os.fstat(descriptor)
    mode = stat.S_IMODE(old.st_mode)
    if new.st_uid != old.st_uid:
        lost.append(f"owner {old.st_uid} (now {new.st_uid})")
        mode &= (0o777 if stat.S_ISDIR(old.st_mode) else 0o666) & ~_umask()
    if new.st_gid != old.st_gid:
        lost.append(f"group {old.st_gid} (now {new.st_gid})")
        mode = _of_all(mode & ~stat.S_ISGID)
    lost_attributes = _keep_extended(descriptor, target, has_owner=not lost)
    if _ACCESS in lost_attributes:
        mode = _of_all(mode, os.getxattr(target, _ACCESS))
    lost += lost_attributes
    try:
        os.chmod(descriptor if os.chmod in os.supports_fd else path, mode)
    except OSError as error:
        if error.errno not in _NO_MODES:
            raise
    mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
    if mode != stat.S_IMODE(old.st_mode):
        lost.append(f"mode {stat.S_IMODE(old.st_mode):#o} (now {mode:#o})")
    if lost:
        _warn(
            f"expected {target} to keep the attributes of the file that it replaces, found that "
            f"these could not be kept: {', '.join(lost)}"
        )


def keep_owner(descriptor: int, old: os.stat_result) -> bool:
    """Gives a new file owner and group of the one it replaces.

    Args:
        descriptor: The new file.
        old: Status of the old one.

    Returns:
        Whether the system permits that.
    """
    if not hasattr(os, "fchown"):  # Windows
        return True
    try:
        os.fchown(descriptor, old.st_uid, old.st_gid)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def collected() -> Iterator[list[str]]:
    """Collects the warnings of this thread while the block runs, and issues none."""
    collection: list[str] = []
    before = _collection.set(collection)
    try:
        yield collection
    finally:
        _collection.reset(before)


def _warn(message: str) -> None:
    collection = _collection.get()
    if collection is None:
        warnings.warn(message, AttributesWarning, stacklevel=3)
    else:
        collection.append(message)


def _of_all(mode: int, acl: bytes = b"") -> int:
    """A mode in which group and others have what all had but the owner.

    Args:
        mode: The mode.
        acl: The access control list that goes with it, as Linux encodes it.
    """
    entries = _ACL_ENTRY.iter_unpack(acl[_ACL_HEADER_SIZE:])
    granted = [permissions for whom, permissions, _ in entries if whom != _ACL_OWNER]
    common = functools.reduce(operator.and_, granted, mode & mode >> 3) & 0o7
    return mode & ~0o077 | common << 3 | common


def _keep_extended(descriptor: int, target: str, *, has_owner: bool) -> list[str]:
    """Copies extended attributes, access control lists among them; gives those that are lost."""
    lost = []
    found = _listed(descriptor)
    for name in _listed(target):
        if name in _OF_CONTENT:
            continue
        try:
            if name.startswith(_ACLS) and not has_owner:
                raise PermissionError
            value = os.getxattr(target, name)
            if name not in found or os.getxattr(descriptor, name) != value:
                os.setxattr(descriptor, name, value)
        except OSError:
            lost.append(name)
    return lost


def _listed(file: int | str) -> list[str]:
    """The names of the extended attributes of a file; none on a system without them."""
    if hasattr(os, "listxattr"):
        with contextlib.suppress(OSError):  # a file system without them
            return os.listxattr(file)
    return []


def _umask() -> int:
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    umask = os.umask(0o077)  # no system tells it without setting it
    os.umask(umask)
    return umask
