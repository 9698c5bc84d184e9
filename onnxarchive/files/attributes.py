"""Keeps owner and permissions when a file is replaced, and warns about lost attributes.

The new file never grants more permissions than the old one. Access control lists and extended
attributes are not copied. Every loss is reported as an `AttributesWarning`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import warnings
from collections.abc import Iterator
from contextvars import ContextVar

from onnxarchive.errors import AttributesWarning

_POSIX_ACL = "system.posix_acl_access"
_NFS_ACL = "system.nfs4_acl"
# NFSv4 lists an access control list for every file. This one says no more than the mode: its
# entries (RFC 7530, section 6.2.1: type, flags, mask, who) are for owner, group and everyone.
_NFS_ACL_OF_MODE = re.compile(
    rb".{4}(.{12}(\0{3}\x06(OWNER|GROUP)@\0\0|\0{3}\x09EVERYONE@\0{3}))*", re.DOTALL
)
# Attributes that the system computes from the content of a file.
_OF_CONTENT = ("security.evm", "security.ima")
_collection: ContextVar[list[str] | None] = ContextVar("collection", default=None)
# Errors of a file system without permission bits.
_NO_MODES = (errno.EPERM, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS)


def keep(descriptor: int, path: str, target: str, old: os.stat_result) -> None:
    """Copies owner and permissions of a file to its replacement; warns about lost attributes.

    If the owner changes, execution and special bits are not copied. If the group cannot be kept,
    group and others get the permissions that both of them had. If either file has an access control
    list, group and others get no permissions: the group's bits are then the list's mask, and the
    list may deny a user what others are allowed. Until now, the new file at `path` grants
    permissions only to its owner.
    """
    lost = keep_owner(descriptor, target, old)
    new = os.fstat(descriptor)
    mode = stat.S_IMODE(old.st_mode)
    if new.st_uid != old.st_uid:
        mode &= 0o666
    if new.st_gid != old.st_gid:
        # The file has another group: its group and others may do what both could do before.
        of_group, of_others = (mode >> 3) & 0o7, mode & 0o7
        common = of_group & of_others
        mode &= ~(stat.S_ISGID | 0o077)
        mode |= (common << 3) | common
    if _POSIX_ACL in lost or _NFS_ACL in lost:
        mode &= ~0o077
    set_mode(descriptor, path, mode)
    mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
    if mode != stat.S_IMODE(old.st_mode):
        lost.append(f"mode {stat.S_IMODE(old.st_mode):#o} (becomes {mode:#o})")
    if lost:
        _warn(f"these attributes of {target} are not kept when it is replaced: {', '.join(lost)}")


def set_mode(descriptor: int, path: str, mode: int) -> None:
    """Sets the permission bits of a file; does nothing on file systems without them.

    Systems that cannot set them by the descriptor take the path.
    """
    try:
        os.chmod(descriptor if os.chmod in os.supports_fd else path, mode)
    except OSError as error:
        if error.errno not in _NO_MODES:
            raise


def keep_owner(descriptor: int, target: int | str, old: os.stat_result) -> list[str]:
    """Copies owner and group of a file to its replacement.

    Removes the access control list that the replacement has from its directory's default list.

    Returns:
        Descriptions of the owner, group, access control list and extended attributes of `target`
        that are lost; none on Windows, where nothing is copied.
    """
    if hasattr(os, "fchown"):
        try:
            os.fchown(descriptor, old.st_uid, old.st_gid)
        except OSError:
            with contextlib.suppress(OSError):
                os.fchown(descriptor, -1, old.st_gid)
    if hasattr(os, "removexattr"):
        with contextlib.suppress(OSError):  # there is none, or `_extended` lists it
            os.removexattr(descriptor, _POSIX_ACL)
    lost = []
    new = os.fstat(descriptor)
    if new.st_uid != old.st_uid:
        lost.append(f"owner {old.st_uid} (becomes {new.st_uid})")
    if new.st_gid != old.st_gid:
        lost.append(f"group {old.st_gid} (becomes {new.st_gid})")
    names, new_names = _extended(target), _extended(descriptor)
    # An access control list is not kept as it was, whichever of the two files has one.
    lists = (names | new_names) & {_POSIX_ACL, _NFS_ACL}
    return lost + sorted((names - new_names) | lists)


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


def _extended(file: int | str) -> set[str]:
    """Names of the extended attributes of a file that neither its content nor its mode implies."""
    names: set[str] = set()
    if hasattr(os, "listxattr"):
        with contextlib.suppress(OSError):  # a file system without them
            names = set(os.listxattr(file)).difference(_OF_CONTENT)
            if _NFS_ACL in names and _NFS_ACL_OF_MODE.fullmatch(os.getxattr(file, _NFS_ACL)):
                names.remove(_NFS_ACL)
    return names
