"""Paths: which are refused, how models spell them, and files opened only beneath a directory.

After a path was checked, anyone with write permission can replace a name in it by a symbolic link
to another place. So a file is first opened (without waiting for a pipe or taking a terminal); then
the path of the opened file is checked, and a file outside the directory is closed unread. Links may
also lead into a second directory, if the caller allows it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator

from onnxarchive.errors import ArchiveFormatError, UnsupportedFeatureError, path_in_errors, quoted

# On Windows: names of devices, with any extension; names with other characters than it allows; and
# those that end with a dot or a space, which it cuts off.
_NOT_ON_WINDOWS = re.compile(
    r"(con|conin\$|conout\$|prn|aux|nul|(com|lpt)[0-9\u00b9\u00b2\u00b3]) *(\..*)?"
    r'|.*[<>:"|?*\\\x00-\x1f].*|.*[. ]',
    re.IGNORECASE | re.DOTALL,
)
# The flags of `MappedFile`, and one that takes no terminal.
_FILE = os.O_RDONLY | sum(getattr(os, f"O_{flag}", 0) for flag in ("NONBLOCK", "NOCTTY", "BINARY"))
_LISTED = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
# With O_PATH, the directory need not be readable.
_PASSED = getattr(os, "O_PATH", os.O_RDONLY) | getattr(os, "O_DIRECTORY", 0)
_NOT_FOLLOWED = getattr(os, "O_NOFOLLOW", 0)
HAS_DIR_FD = os.open in os.supports_dir_fd  # not on Windows
_MAX_PATH_NBYTES = 1024  # of macOS
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISLNK, "a symbolic link"),
)


class OutsideError(ArchiveFormatError):
    """A symbolic link leads outside the directory."""


class Root:
    """A directory beneath which files are opened, by paths as in a model (see `in_utf8`).

    Windows lists a directory by its path: a list may contain names from outside, but no file
    outside is opened.

    Attributes:
        path: The path of the directory, without symbolic links.
        linked: The path, without symbolic links, of a further directory into which links may lead.
        remedy: What else to do about a link that leads out, for the message.
    """

    linked: str | None = None
    remedy: str | None = None

    def __init__(self, path: str) -> None:
        """Resolves the links in the path of a directory, which must exist."""
        self.path = os.path.realpath(path)
        if HAS_DIR_FD:
            with path_in_errors(path):
                descriptor = os.open(path, _PASSED)
                try:
                    self.path = final_path(descriptor, path)
                finally:
                    os.close(descriptor)

    def open(self, path: str, flags: int = _FILE) -> int:
        """Opens a file by its path in the directory, with slashes; returns a new descriptor.

        Raises:
            OutsideError: A symbolic link leads out of the directory.
            ValueError: `path` is absolute or contains `..`.
            OSError: The file cannot be opened.
        """
        whole = self.joined(path)
        try:
            descriptor = os.open(whole, flags)
        except OSError:
            self.require_inside(os.path.realpath(whole), path)  # a better reason
            raise
        try:
            self.require_inside(final_path(descriptor, whole), path)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def scan(self, path: str) -> Iterator[os.DirEntry[str]]:
        """Lists a directory, `""` for this one, as `open`; an entry is valid until the next one."""
        if not HAS_DIR_FD:
            resolved = os.path.realpath(self.joined(path))
            self.require_inside(resolved, path)
            with os.scandir(resolved) as entries:
                yield from entries
            return
        descriptor = self.open(path, _LISTED)
        with path_in_errors(self.joined(path)):
            try:
                with os.scandir(descriptor) as entries:
                    yield from entries
            finally:
                os.close(descriptor)

    def joined(self, path: str) -> str:
        """The path of a file, by its path in the directory; refuses one that may lead out of it."""
        if leads_out(path):
            raise ValueError(f"expected a relative path without '..', found {path!r}")
        return os.path.join(self.path, from_utf8(path))

    def require_inside(self, target: str, path: str) -> None:
        """Refuses a target, to which `path` leads, outside the allowed directories.

        Args:
            target: An absolute path without links, such as that of an open file (`final_path`).
            path: The path in the directory, for the message.

        Raises:
            OutsideError: The target is outside.
        """
        allowed = [self.path] if self.linked is None else [self.path, self.linked]
        if not any(is_below(_unprefixed(target), _unprefixed(folder)) for folder in allowed):
            remedy = "" if self.remedy is None else f", or {self.remedy}"
            raise OutsideError(
                f"expected a path inside {' or '.join(allowed)}, found {path!r}, a link to "
                f"{target}; replace the link by a copy of its target{remedy}"
            )


def open_own(path: str, mode: int) -> int:
    """Opens a file for reading and writing, or creates it; never follows a link to another file.

    It is for names that others can guess: they may put a link there, so that its target is
    overwritten. Links in the path of the directory are followed. `mode` has the permission bits of
    a new file before the umask. Returns a new descriptor.

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
            os.close(descriptor)  # another file has the name now
    except OSError as error:
        error.filename = path
        raise
    finally:
        if folder is not None:
            os.close(folder)


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


def final_path(descriptor: int, path: str) -> str:
    """The path of an open file, without links.

    Linux without /proc, and other systems, resolve `path`, by which the file was opened; another
    process that exchanges names at the same time can make this path wrong.
    """
    if not HAS_DIR_FD:
        import ctypes
        import msvcrt

        buffer = ctypes.create_unicode_buffer(1 << 15)  # maximum length of a path
        handle = ctypes.c_void_p(msvcrt.get_osfhandle(descriptor))  # type: ignore[attr-defined]
        system = ctypes.windll.kernel32  # type: ignore[attr-defined]
        if not system.GetFinalPathNameByHandleW(handle, buffer, len(buffer), 0):
            raise ctypes.WinError()  # type: ignore[attr-defined]
        return buffer.value
    if sys.platform == "darwin":
        import fcntl

        final = fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(_MAX_PATH_NBYTES))
        return os.fsdecode(final.rstrip(b"\0"))
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{descriptor}")
    return os.path.realpath(path)


def _unprefixed(path: str) -> str:
    """A Windows path without the prefix for long paths."""
    if path.startswith("\\\\?\\UNC\\"):
        return "\\\\" + path[len("\\\\?\\UNC\\") :]
    return path.removeprefix("\\\\?\\")


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
                f"Windows cannot give the name {quoted(path)} to a file: it is a device, or has a "
                "character that Windows does not allow, or ends with a dot or a space; nothing was "
                "written: write it on another system, or give it another name"
            )


def require_no_input(target: str | os.PathLike[str], inputs: Iterable[str | None]) -> None:
    """Refuses a target that is one of the inputs, perhaps by another path, with a ValueError."""
    for path in filter(None, inputs):
        with contextlib.suppress(FileNotFoundError):
            if os.path.samefile(target, path):
                raise ValueError(
                    f"{target!s}: the target is also the input {path}; name another target"
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


def kind_of(mode: int) -> str:
    """The kind of a file that is not regular, by its `st_mode`, for messages."""
    return next((name for test, name in _KINDS if test(mode)), "another kind")
