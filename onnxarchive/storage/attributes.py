"""Keeps owner, permissions and extended attributes when a file is replaced.

The new file never grants more permissions than the old one. Lost attributes are
reported as an `AttributesWarning`.
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

_ACLS = "system."  # prefix of the names of access control lists
_POSIX_ACLS = "system.posix_acl_"
_ACCESS = "system.posix_acl_access"
_ACL_HEADER_SIZE = 4
_ACL_ENTRY = struct.Struct("<HHI")  # tag, permissions, id
_ACL_OWNER = 0x01
# Attributes that the system computes from the content of a file.
_OF_CONTENT = ("security.evm", "security.ima")
_collection: ContextVar[list[str] | None] = ContextVar("collection", default=None)
# Errors of a file system without permission bits.
_NO_MODES = (errno.EPERM, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS)


def first_mode(old: os.stat_result | None) -> int:
    """Permission bits for creating a file; for a replacement, the owner's without execution.

    Args:
        old: Status of the file to replace, or None.
    """
    return 0o666 if old is None else old.st_mode & 0o600


def keep(descriptor: int, path: str, target: str, old: os.stat_result) -> None:
    """Copies owner, permissions and attributes of a file to its replacement.

    If the owner cannot be kept, the old mode is reduced to the bits of a newly created file
    (umask). If the group or the POSIX access control list cannot be kept, group and others get
    equal permissions: those that the old group, the old others and all entries of the old list have
    in common. The owner's entry does not count.

    Args:
        descriptor: Descriptor of the new file, which grants permissions only to its owner so far.
        path: Path of the new file.
        target: Path of the old file, for reading its attributes and for the warning.
        old: Status of the old file.

    Raises:
        OSError: The disk failed.
    """
    inherited = _listed(descriptor)
    for name in inherited:
        if name.startswith(_POSIX_ACLS):  # from the directory's default ACL
            os.removexattr(descriptor, name)
    lost = []
    if not keep_owner(descriptor, old):
        with contextlib.suppress(OSError):
            os.fchown(descriptor, -1, old.st_gid)
    new = os.fstat(descriptor)
    mode = stat.S_IMODE(old.st_mode)
    if new.st_uid != old.st_uid:
        lost.append(f"owner {old.st_uid} (becomes {new.st_uid})")
        mode &= 0o666 & ~_umask()
    if new.st_gid != old.st_gid:
        lost.append(f"group {old.st_gid} (becomes {new.st_gid})")
        mode = _of_all(mode & ~stat.S_ISGID)
    lost_attributes = _keep_extended(descriptor, target, has_owner=not lost)
    if _ACCESS in lost_attributes:
        mode = _of_all(mode, os.getxattr(target, _ACCESS))
    lost += lost_attributes
    set_mode(descriptor, path, mode)
    mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
    if mode != stat.S_IMODE(old.st_mode):
        lost.append(f"mode {stat.S_IMODE(old.st_mode):#o} (becomes {mode:#o})")
    if lost:
        _warn(f"these attributes of {target} cannot be kept when it is replaced: {', '.join(lost)}")


def set_mode(descriptor: int, path: str, mode: int) -> None:
    """Sets the permission bits of a file; does nothing on file systems without them.

    Args:
        descriptor: The file.
        path: Its path, for systems that set the bits only by it.
        mode: The bits.
    """
    try:
        os.chmod(descriptor if os.chmod in os.supports_fd else path, mode)
    except OSError as error:
        if error.errno not in _NO_MODES:
            raise


def keep_owner(descriptor: int, old: os.stat_result) -> bool:
    """Copies owner and group of a file to its replacement.

    Args:
        descriptor: The new file.
        old: Status of the old file.

    Returns:
        False if the system refuses; else True, also on Windows, where nothing is copied.
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
    """Collects the attribute warnings of this thread during a block, instead of issuing them."""
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
    """The mode, with group and others reduced to the permissions that both of them have.

    Permissions that an entry of `acl` lacks are removed, too, unless the entry is the owner's.

    Args:
        mode: The mode.
        acl: The access control list of the same file, in Linux's encoding.
    """
    entries = _ACL_ENTRY.iter_unpack(acl[_ACL_HEADER_SIZE:])
    granted = [permissions for tag, permissions, _ in entries if tag != _ACL_OWNER]
    common = functools.reduce(operator.and_, granted, mode & mode >> 3) & 0o7
    return mode & ~0o077 | common << 3 | common


def _keep_extended(descriptor: int, target: str, *, has_owner: bool) -> list[str]:
    """Copies extended attributes and access control lists; returns the names of those lost."""
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
    """The names of the extended attributes of a file; empty on a system without them."""
    if hasattr(os, "listxattr"):
        with contextlib.suppress(OSError):  # a file system without them
            return os.listxattr(file)
    return []


def _umask() -> int:
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    umask = os.umask(0o077)  # without /proc, the umask can only be read by setting it
    os.umask(umask)
    return umask
