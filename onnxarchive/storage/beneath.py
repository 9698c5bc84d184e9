"""Opens only files beneath a directory, even if names are changed at the same time; only own files.

After a path was checked, and before it is opened, anyone with write permission can replace a name
in it by a symbolic link to another place. So each component is opened without following links:
the first component relative to the open directory, each other component relative to the component
before. A path with a link is first resolved, refused if it leads outside, and then opened in the
same way. Linux does most of this in one call (openat2). Links may also lead into a second
directory, if the caller allows it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
import sys
from collections.abc import Callable, Iterator
from functools import cache

from onnxarchive.errors import ArchiveFormatError, naming
from onnxarchive.storage.files import kind_of
from onnxarchive.storage.paths import is_below, leads_out

# The flags of `MappedFile`.
_FILE = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_LISTED = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
# With O_PATH, the directories of a path need not be readable.
_PASSED = getattr(os, "O_PATH", os.O_RDONLY) | getattr(os, "O_DIRECTORY", 0)
_NOT_FOLLOWED = getattr(os, "O_NOFOLLOW", 0)
# Errors when O_NOFOLLOW meets a symbolic link; ENOTDIR if O_DIRECTORY is also set.
_MET_A_LINK = (errno.ELOOP, errno.ENOTDIR, errno.EMLINK)
HAS_DIR_FD = os.open in os.supports_dir_fd
_RESOLVED = 3  # limit of resolutions of a path; a second resolution is needed only if links change
_OPENAT2 = 437  # number of the system call on the machines below
_OPENAT2_MACHINES = ("x86_64", "aarch64", "riscv64", "ppc64le", "s390x")
_BENEATH = 0x08 | 0x02  # RESOLVE_BENEATH, RESOLVE_NO_MAGICLINKS


class OutsideError(ArchiveFormatError):
    """A symbolic link leads outside the directory."""


class Root:
    """A directory beneath which files are opened.

    Windows cannot open a file relative to an open directory. So a file is opened by its path on
    Windows, and refused if the path of the opened file is outside. Windows also lists a directory
    by its path: a list may contain names from outside, but no file outside is opened.

    Attributes:
        path: The path of the directory at the time of opening, without symbolic links.
    """

    def __init__(self, path: str, *, above: tuple[Root, int] | None = None) -> None:
        """Opens the directory.

        Args:
            path: The directory. Links in this path are followed.
            above: An open directory below `path`, and the number of levels up to `path`. `path` is
                then opened as `..` of the open directory, or `../..` and so on, since names may
                have changed. None opens `path` by name.

        Raises:
            OSError: The directory cannot be opened.
        """
        self.path = os.path.realpath(path)
        self._descriptor = -1
        self._linked: Root | None = None
        if HAS_DIR_FD and above is not None:
            root, levels = above
            parents = "/".join([os.pardir] * levels)
            self._descriptor = os.open(parents, _PASSED, dir_fd=root._descriptor)
        elif HAS_DIR_FD:
            self._descriptor = os.open(path, _PASSED)

    def allow_links_below(self, root: Root) -> None:
        """Allows links into the directory `root`, too; `close` then also closes `root`."""
        self._linked = root

    def open(self, path: str) -> int:
        """Opens a file for reading.

        Args:
            path: Path of the file, relative to the directory, with slashes and without `..`.

        Returns:
            A new descriptor.

        Raises:
            OutsideError: A symbolic link leads out of the directory.
            ValueError: `path` is absolute or contains `..`.
            OSError: The file cannot be opened.
        """
        return self._open(path, _FILE)

    def scan(self, path: str) -> Iterator[os.DirEntry[str]]:
        """Lists a directory; each entry is valid until the next entry is yielded.

        Args:
            path: Path of the directory, as for `open`; `""` for this directory.

        Raises:
            OutsideError: A symbolic link leads out of the directory.
            ValueError: `path` is absolute or contains `..`.
            OSError: The directory cannot be opened.
        """
        if not HAS_DIR_FD:
            with os.scandir(self._resolved(path)) as entries:
                yield from entries
            return
        descriptor = self._open(path, _LISTED)
        try:
            with naming(self._joined(path)), os.scandir(descriptor) as entries:
                yield from entries
        finally:
            _close(descriptor)

    def leads_to(self, name: str, identity: tuple[int, int]) -> bool:
        """True if a name in the directory leads to a given file; links to any place are followed.

        Args:
            name: The name.
            identity: The identity of the file; see `MappedFile`.
        """
        try:
            if not HAS_DIR_FD:
                status = os.stat(os.path.join(self.path, name))
            else:
                status = os.stat(name, dir_fd=self._descriptor)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == identity

    def close(self) -> None:
        """Closes the directory; except on Windows, no file can be opened beneath it afterwards."""
        if self._descriptor >= 0:
            _close(self._descriptor)
            self._descriptor = -1
        if self._linked is not None:
            self._linked.close()

    def _open(self, path: str, flags: int) -> int:
        whole = self._joined(path)
        try:
            if not HAS_DIR_FD:
                return self._judged(path, flags)
            open_beneath = openat2()
            opened = -1
            if open_beneath is not None:
                opened = open_beneath(self._descriptor, path, flags)
            return opened if opened >= 0 else self._walked(path, flags)
        except OSError as error:
            error.filename = whole  # instead of the component
            raise

    def _walked(self, path: str, flags: int) -> int:
        """Opens a path without openat2; the path may contain links."""
        root, below = self, path
        for _ in range(_RESOLVED):
            try:
                return root._descend(below, flags)
            except OSError as error:
                if error.errno not in _MET_A_LINK:
                    raise
            with contextlib.suppress(OSError):  # the link was removed meanwhile
                resolved = os.path.realpath(root._joined(below))
                root = self._root_of(resolved, path)
                below = os.path.relpath(resolved, root.path)
        return root._descend(below, flags)

    def _descend(self, path: str, flags: int) -> int:
        """Opens a path component by component, without following links."""
        *folders, name = (path or os.curdir).split("/")
        opened = os.dup(self._descriptor)
        for component, kind in [*((folder, _PASSED) for folder in folders), (name, flags)]:
            try:
                below = os.open(component, kind | _NOT_FOLLOWED, dir_fd=opened)
            finally:
                _close(opened)
            opened = below
        return opened

    def _judged(self, path: str, flags: int) -> int:
        """Opens a path on Windows, then refuses a file outside the directory."""
        descriptor = os.open(self._joined(path), flags)
        try:
            self._root_of(_final_path(descriptor), path)
        except BaseException:
            _close(descriptor)
            raise
        return descriptor

    def _resolved(self, path: str) -> str:
        """The absolute path without symbolic links."""
        resolved = os.path.realpath(self._joined(path))
        self._root_of(resolved, path)
        return resolved

    def _joined(self, path: str) -> str:
        if leads_out(path):
            raise ValueError(f"expected a relative path without '..', found {path!r}")
        return os.path.join(self.path, path)

    def _root_of(self, found: str, path: str) -> Root:
        """The allowed directory that contains `found`, the resolved `path`."""
        roots = [self] if self._linked is None else [self, self._linked]
        for root in roots:
            if is_below(_unprefixed(found), _unprefixed(root.path)):
                return root
        places = " or ".join(root.path for root in roots)
        raise OutsideError(
            f"expected a path inside {places}, found {path!r}, a link to {found}; replace the link "
            "by a copy of its target"
        )


def open_own(path: str, mode: int) -> int:
    """Opens a file for reading and writing, or creates it; never follows a link to another file.

    For names that others can guess: they may put a link there, so that its target is overwritten.

    Args:
        path: The file. Links in the path of its directory are followed.
        mode: Permission bits of a new file before the umask.

    Returns:
        A new descriptor.

    Raises:
        FileExistsError: `path` is not a regular file with one name, or belongs neither to this user
            nor to the owner of the directory, who can replace each file there. In a sticky
            directory, the owner's file is refused, too, except to root: this user could not rename
            or remove it.
        OSError: The file cannot be opened or created.
    """
    name, folder, directory = path, None, os.path.dirname(path) or os.curdir
    flags = _FILE | os.O_RDWR
    try:
        if HAS_DIR_FD:
            name, folder = os.path.basename(path), os.open(directory, _PASSED)
        while True:
            try:
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                _require_own(status, os.stat(directory if folder is None else folder), path)
                descriptor = os.open(name, flags | _NOT_FOLLOWED, dir_fd=folder)
            except FileNotFoundError:
                with contextlib.suppress(FileExistsError):  # made meanwhile
                    return os.open(name, flags | os.O_CREAT | os.O_EXCL, mode, dir_fd=folder)
                continue
            if os.path.samestat(os.fstat(descriptor), status):
                return descriptor
            _close(descriptor)  # another file has the name now
    except OSError as error:
        error.filename = path
        raise
    finally:
        if folder is not None:
            _close(folder)


def _require_own(status: os.stat_result, directory: os.stat_result, path: str) -> None:
    user = os.geteuid() if hasattr(os, "geteuid") else status.st_uid
    users = {user} if user and directory.st_mode & stat.S_ISVTX else {user, directory.st_uid}
    problem = None
    if not stat.S_ISREG(status.st_mode):
        problem = kind_of(status.st_mode)
    elif status.st_uid not in users:
        problem = f"a file of user {status.st_uid}"
    elif status.st_nlink > 1:
        problem = f"a file with {status.st_nlink} names"
    if problem is not None:
        raise FileExistsError(
            errno.EEXIST,
            f"expected a regular file of this user with one name, found {problem}; remove it, or "
            "choose another directory",
            path,
        )


@cache
def openat2() -> Callable[[int, str, int], int] | None:
    """Linux's openat2, which opens a path and follows links beneath a directory; None if missing.

    The returned function takes a third of the time of `Root._walked`. It returns -1 on failure: for
    an absolute link, for example, or in a container that forbids openat2.
    """
    if not sys.platform.startswith("linux") or os.uname().machine not in _OPENAT2_MACHINES:
        return None
    if hasattr(sys, "getandroidapilevel"):  # Android ends the process for an unknown call
        return None
    try:
        import ctypes

        call = ctypes.CDLL(None).syscall
    except (ImportError, OSError):  # Python was built without ctypes, or linked statically
        return None
    text, size = ctypes.c_char_p, ctypes.c_size_t
    call.argtypes = (ctypes.c_long, ctypes.c_int, text, text, size)
    call.restype = ctypes.c_long

    def open_beneath(directory: int, path: str, flags: int) -> int:
        if "\0" in path:  # C would end the path there
            return -1
        how = struct.pack("=QQQ", flags | os.O_CLOEXEC, 0, _BENEATH)  # struct open_how
        return int(call(_OPENAT2, directory, os.fsencode(path), how, len(how)))

    return open_beneath


def _final_path(descriptor: int) -> str:
    """The path of an open file on Windows, without links."""
    import ctypes
    import msvcrt

    path = ctypes.create_unicode_buffer(1 << 15)  # maximum length of a path
    handle = ctypes.c_void_p(msvcrt.get_osfhandle(descriptor))  # type: ignore[attr-defined]
    system = ctypes.windll.kernel32  # type: ignore[attr-defined]
    if not system.GetFinalPathNameByHandleW(handle, path, len(path), 0):
        raise ctypes.WinError()  # type: ignore[attr-defined]
    return path.value


def _unprefixed(path: str) -> str:
    """A Windows path without the prefix for long paths."""
    if path.startswith("\\\\?\\UNC\\"):
        return "\\\\" + path[len("\\\\?\\UNC\\") :]
    return path.removeprefix("\\\\?\\")


def _close(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # nothing was written
        os.close(descriptor)
