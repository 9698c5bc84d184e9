"""New directories in places where others may write: complete or absent, or temporary.

A user who may write beside a new directory can rename it, and put a link or another directory in
its place. So it is opened at once. From then on it is used by its descriptor, through which its
files are made, synced and removed. Until it is complete, only this user may write in it. Its name
is used only to rename and to remove it, and only while the name still leads to this directory.

Systems without descriptors of directories (Windows) use the path.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from os.path import samestat

from onnxarchive.errors import ArchiveError, LockedError, path_in_errors
from onnxarchive.files import locking
from onnxarchive.files.attributes import set_mode
from onnxarchive.files.clones_and_sync import close_unwritten, sync, sync_directory
from onnxarchive.files.hidden_files import TEMPORARY, TemporaryDirectory, hidden_names
from onnxarchive.files.local_file import MappedFile
from onnxarchive.files.locking import OfOneProcess
from onnxarchive.files.paths import HAS_DIR_FD, require_no_tilde, require_parent
from onnxarchive.files.replacement import NOT_RENAMED
from onnxarchive.files.threads import for_each

_NOT_FOLLOWED = getattr(os, "O_NOFOLLOW", 0)
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | _NOT_FOLLOWED
# With O_PATH, the directory need not be readable.
_PARENT = getattr(os, "O_PATH", os.O_RDONLY) | getattr(os, "O_DIRECTORY", 0)
_FILE = getattr(os, "O_BINARY", 0) | _NOT_FOLLOWED
_NEW_FILE = _FILE | os.O_RDWR | os.O_CREAT | os.O_EXCL
# Windows syncs only files that are open for writing.
_OLD_FILE = _FILE | (os.O_RDONLY if HAS_DIR_FD else os.O_RDWR)
# Errors of opening a name that has no directory: nothing, a file, a link (Linux and macOS, FreeBSD)
_NO_DIRECTORY = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EMLINK)
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OWN_MODE = 0o700
_FILE_MODE = 0o666  # files are not executable
_SPARE_DESCRIPTORS = 2  # that `_remove_content` needs
_SYNC_JOBS = 8
_SYNC_SIZE = 1 << 20  # bytes that a device writes in the time of a sync, about
_PROBE = ".probe"
CONTENT = "new"  # beside which the content of a directory that exists is written


class NewDirectory(OfOneProcess):
    """A directory that this process makes and fills, even if its name changes meanwhile.

    It is locked, unlike the leftover of a killed process.

    Attributes:
        path: The path at which it was made; another process may have renamed it since.
    """

    _parent: int | None = None
    _descriptor: int | None = None
    _status: os.stat_result | None = None  # None until it is made and opened
    _final_mode: int | None = None  # None if the present one is final

    def __init__(self, parent: str, shown: str | os.PathLike[str], mode: int = 0o777) -> None:
        """Opens the parent, and makes nothing yet.

        Args:
            parent: The directory in which `make` makes it.
            shown: The path of the directory in errors.
            mode: Its permissions, before the umask.
        """
        super().__init__()
        self._spares: list[int] = []
        self.path = parent
        self._shown = os.fspath(shown)
        self._mode = mode
        self._names: list[str] = []  # in the parent: the first, and then the final one
        self._files: list[str] = []  # relative paths, as they were made
        self._folders: dict[str, None] = {}  # relative paths, as they were made
        if HAS_DIR_FD:
            with contextlib.suppress(PermissionError):  # no O_PATH, and the parent is unreadable
                self._parent = os.open(parent, _PARENT)

    def make(self, path: str) -> None:
        """Makes the directory at a path in its parent.

        Raises:
            FileExistsError: Something has this name.
            ArchiveError: Another process has renamed or replaced the directory.
            OSError: The directory cannot be made.
        """
        self.path = path
        self._names = [self._name_of(path)]
        os.mkdir(self._names[0], self._mode, dir_fd=self._parent)
        if not HAS_DIR_FD:
            self._status = os.lstat(path)
            return
        try:
            descriptor = os.open(self._names[0], _FOLDER, dir_fd=self._parent)
        except OSError as error:
            if error.errno in _NO_DIRECTORY:
                self._names.clear()
                raise self._replaced() from error
            raise
        try:
            self._begin(descriptor)
        except BaseException:
            close_unwritten(descriptor)
            raise

    def _name_of(self, path: str) -> str:
        return path if self._parent is None else os.path.basename(path)

    def _begin(self, descriptor: int) -> None:
        """Refuses an opened directory that is not the new one; lets only this user write in it.

        If others could write in it, they could move a directory of this user there, to have it
        removed. If its permissions let others write, they may not enter it, either: the folders in
        it have the same permissions.
        """
        status = os.fstat(descriptor)
        is_new = not os.listdir(descriptor) and _is_of_this_user(descriptor, status)
        mode = stat.S_IMODE(status.st_mode)
        if is_new and mode & _OTHERS_WRITE:
            self._final_mode = mode
            set_mode(descriptor, self.path, mode & ~_OTHERS)
            is_new = not os.listdir(descriptor)
        if not is_new:
            self._names.clear()
            raise self._replaced()
        with contextlib.suppress(LockedError):  # who may read it can lock it
            locking.keep_exclusive(descriptor, timeout=0)
        for _ in range(_SPARE_DESCRIPTORS):
            self._spares.append(os.dup(descriptor))
        self._status, self._descriptor = status, descriptor

    def make_file(self, path: str) -> MappedFile:
        """Makes a file, and the folders above it; `path` is relative, with slashes.

        Raises:
            FileExistsError: The file exists.
            OSError: The file or a folder cannot be made.
        """
        file = self._open(path, _NEW_FILE)
        self._files.append(path)
        return file

    def _open(self, path: str, flags: int) -> MappedFile:
        folder, _, name = path.rpartition("/")
        shown = os.path.join(self._shown, *path.split("/"))
        with path_in_errors(shown):
            if self._descriptor is None:
                whole = os.path.join(self.path, *path.split("/"))
                os.makedirs(os.path.dirname(whole), exist_ok=True)
                return MappedFile(shown, descriptor=os.open(whole, flags, self._mode & _FILE_MODE))
            with self._opened_folder(self._descriptor, folder) as above:
                descriptor = os.open(name, flags, self._mode & _FILE_MODE, dir_fd=above)
                return MappedFile(shown, descriptor=descriptor)

    @contextlib.contextmanager
    def _opened_folder(self, descriptor: int, path: str) -> Iterator[int]:
        """Opens a folder during the block, one name after another; makes what is missing."""
        folder, above = os.dup(descriptor), ""
        try:
            for name in filter(None, path.split("/")):
                above = f"{above}/{name}" if above else name
                if above not in self._folders:
                    # It may exist: some file systems ignore the case of names.
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, dir_fd=folder)
                    self._folders[above] = None
                inner = os.open(name, _FOLDER, dir_fd=folder)
                close_unwritten(folder)
                folder = inner
            yield folder
        finally:
            close_unwritten(folder)

    def sync(self) -> None:
        """Syncs all files, then the folders, inner ones first, and then the directory.

        Syncing many files together is faster, so it is done after all are written, in threads.

        Raises:
            OSError: A file cannot be written to its device.
        """
        sizes = [_SYNC_SIZE] * len(self._files)
        for_each(self._files, sizes, self._sync_file, _SYNC_JOBS)
        if self._descriptor is not None:
            for path in [*reversed(self._folders), ""]:
                with (
                    path_in_errors(self._shown),
                    self._opened_folder(self._descriptor, path) as folder,
                    contextlib.suppress(OSError),  # a file system that cannot sync directories
                ):
                    os.fsync(folder)

    def _sync_file(self, path: str) -> None:
        with self._open(path, _OLD_FILE) as file:
            sync(file)

    def rename(self, target: str) -> None:
        """Gives the directory its final name, in the same parent, and then its permissions.

        Raises:
            ArchiveError: Another process has renamed or replaced the directory.
            OSError: The directory cannot be renamed.
        """
        name, final_name = self._names[0], self._name_of(target)
        self._require_at(name)
        self._names.append(final_name)
        os.rename(name, final_name, src_dir_fd=self._parent, dst_dir_fd=self._parent)
        self._require_at(final_name)
        if self._final_mode is not None and self._descriptor is not None:
            set_mode(self._descriptor, target, self._final_mode)

    def move_content(self, target: str) -> None:
        """Moves the content of the directory to its parent; an error moves all of it back.

        Args:
            target: The path of the parent, which must hold nothing else.

        Raises:
            ArchiveError: Another process has renamed or replaced the directory or its parent.
            OSError: Something else is in the parent, or something cannot be moved.
        """
        self._require_at(self._names[0])
        if os.listdir(target) != [os.path.basename(self.path)]:
            raise FileExistsError(errno.EEXIST, "the directory is no longer empty")
        if self._parent is not None and not samestat(os.stat(target), os.fstat(self._parent)):
            raise self._replaced()
        moved: dict[str, os.stat_result] = {}
        try:
            for name in os.listdir(self.path if self._descriptor is None else self._descriptor):
                moved[name] = os.lstat(self._inside(name), dir_fd=self._descriptor)
                os.rename(
                    self._inside(name),
                    self._name_of(os.path.join(target, name)),
                    src_dir_fd=self._descriptor,
                    dst_dir_fd=self._parent,
                )
        except BaseException:
            for name, status in moved.items():
                outside = self._name_of(os.path.join(target, name))
                if _is_at(outside, self._parent, status):
                    os.rename(
                        outside,
                        self._inside(name),
                        src_dir_fd=self._parent,
                        dst_dir_fd=self._descriptor,
                    )
            raise

    def _inside(self, name: str) -> str:
        return name if self._descriptor is not None else os.path.join(self.path, name)

    def _require_at(self, name: str) -> None:
        if self._status is None or not _is_at(name, self._parent, self._status):
            raise self._replaced()

    def _replaced(self) -> ArchiveError:
        return ArchiveError(
            f"another process has renamed or replaced the new directory {self.path}; choose a "
            "directory where only you may write",
            path=self._shown,
        )

    def lasting_path(self) -> str:
        """A path for functions of this process; on Linux with /proc it survives a renaming."""
        path = None if self._descriptor is None else path_in_process(self._descriptor)
        return self.path if path is None else path

    def remove(self) -> None:
        """Removes the directory and its content, if a name still leads to it; else the content."""
        self._close_spares()
        if self._descriptor is not None:
            _remove_content(self._descriptor)
        for name in self._names:
            if self._status is not None and not _is_at(name, self._parent, self._status):
                continue
            if HAS_DIR_FD or self._status is None:
                with contextlib.suppress(OSError):
                    os.rmdir(name, dir_fd=self._parent)
            else:
                shutil.rmtree(name, ignore_errors=True)

    def _close_spares(self) -> None:
        while self._spares:
            close_unwritten(self._spares.pop())

    def close(self) -> None:
        """Closes the descriptors, and so releases the lock."""
        if self._descriptor is not None and self.is_own:
            locking.unlock(self._descriptor)  # closing alone would leave the lock to forks
        self._close_spares()
        descriptors = (self._descriptor, self._parent)
        self._descriptor = self._parent = None
        for descriptor in descriptors:
            if descriptor is not None:
                close_unwritten(descriptor)

    def __del__(self) -> None:
        self.close()


@contextlib.contextmanager
def new_directory(path: str | os.PathLike[str]) -> Iterator[NewDirectory]:
    """Creates a directory, or fills an empty one, when the block ends; an error leaves nothing.

    The block fills a temporary directory. A new directory appears with all its files at once, which
    are synced before. An empty directory that exists may be a mount point or the working directory;
    so it stays, and gets the files one by one.

    Yields:
        The temporary directory.

    Raises:
        ArchiveError: Another process has renamed or replaced the temporary directory.
        OSError: A directory cannot be created or filled, or `path` exists and is not an empty
            directory.
    """
    require_no_tilde(path)
    name = os.fspath(path)
    require_parent(name.rstrip(os.sep) or name)
    with path_in_errors(path):
        target = os.path.realpath(path)
        is_there = os.path.exists(target)
        beside = os.path.join(target, CONTENT) if is_there else target
        if is_there and os.listdir(target):
            raise FileExistsError(errno.EEXIST, f"the directory is not empty{_reason_of(beside)}")
        made = NewDirectory(os.path.dirname(beside), path)
        temporary = TemporaryDirectory(beside, made.make, made.remove)
    try:
        yield made
        temporary.refuse_fork()
        made.sync()
        with path_in_errors(path, *NOT_RENAMED):
            if is_there:
                made.move_content(target)
            else:
                made.rename(target)
                temporary.is_to_be_removed = False
    finally:
        temporary.remove()
        made.close()
    sync_directory(os.path.dirname(beside))


def _reason_of(beside: str) -> str:
    """Why a directory that seems to be empty is not empty."""
    unfinished = ", ".join(map(os.path.basename, hidden_names(beside, TEMPORARY)))
    if not unfinished:
        return ""
    return (
        f": another process fills it, or was killed when it did, and left {unfinished}; if it was "
        "killed, 'onnxarchive recover', with the name of the directory, removes this"
    )


@contextlib.contextmanager
def temporary_directory(beside: str) -> Iterator[NewDirectory]:
    """Makes a directory that only this user may enter, and removes it after the block.

    It is for libraries that write files by path: its `lasting_path` is safe from other users. If
    this path cannot last, and other users could rename the directory in the directory of `beside`,
    it is made in the user's temporary directory.

    Args:
        beside: A path. The directory is made beside it, with a similar name.

    Raises:
        ArchiveError: Another process has renamed or replaced the directory.
        OSError: The directory cannot be made, or is not safe from other users in either place.
    """
    parent, name = os.path.split(os.path.abspath(beside))
    with path_in_errors(parent):
        parent = _safe_parent(parent)
        made = NewDirectory(parent, parent, _OWN_MODE)
        temporary = TemporaryDirectory(os.path.join(parent, name), made.make, made.remove)
    path = made.lasting_path()
    try:
        yield made
    except OSError as error:
        if isinstance(error.filename, str) and error.filename.startswith(path):
            error.filename = made.path + error.filename.removeprefix(path)
        raise
    finally:
        temporary.remove()
        made.close()


def remove_leftover(path: str) -> bool:
    """Removes a directory that a killed process left; returns True if it was removed.

    It stays if it is in use, if it is a link or a file, if it belongs to another user, if others
    may write in it, if it cannot be locked, and on systems without descriptors of directories.

    Raises:
        OSError: The directory cannot be opened or removed.
    """
    if not HAS_DIR_FD:
        return False
    name = os.path.basename(path)
    with path_in_errors(path), contextlib.ExitStack() as opened:
        parent = os.open(os.path.dirname(path) or os.curdir, _PARENT)
        opened.callback(close_unwritten, parent)
        try:
            descriptor = os.open(name, _FOLDER, dir_fd=parent)
        except OSError as error:
            if error.errno in _NO_DIRECTORY:
                return False
            raise
        opened.callback(close_unwritten, descriptor)
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or status.st_mode & _OTHERS_WRITE:
            return False
        try:
            if not locking.keep_exclusive(descriptor, timeout=0):
                return False
        except LockedError:
            return False
        opened.callback(locking.unlock, descriptor)
        _remove_content(descriptor)
        if not _is_at(name, parent, status):
            return False
        os.rmdir(name, dir_fd=parent)
    return True


def _remove_content(root: int) -> None:
    """Removes everything removable in a directory; links are not followed.

    Folders are moved to `root` before they are removed, so that two more descriptors are enough,
    and each name is looked up in an open directory.
    """
    folders = _remove_files(root)
    taken = set(folders)  # a process that was killed here has left such names
    names = (f".removed-{number}" for number in itertools.count())
    free_names = (name for name in names if name not in taken)
    while folders:
        name = folders.pop()
        with contextlib.suppress(OSError):
            folder = os.open(name, _FOLDER, dir_fd=root)
            try:
                for inner in _remove_files(folder):
                    moved = next(free_names)
                    os.rename(inner, moved, src_dir_fd=folder, dst_dir_fd=root)
                    folders.append(moved)
            finally:
                close_unwritten(folder)
            os.rmdir(name, dir_fd=root)


def _remove_files(folder: int) -> list[str]:
    """Removes the files of a directory; returns the names of its folders."""
    folders = []
    with contextlib.suppress(OSError), os.scandir(folder) as scanned:
        for entry in list(scanned):
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.name)
            else:
                with contextlib.suppress(OSError):
                    os.unlink(entry.name, dir_fd=folder)
    return folders


def _is_at(name: str, parent: int | None, status: os.stat_result) -> bool:
    """True if a name leads to the file or directory of this status, without a link."""
    try:
        return samestat(os.lstat(name, dir_fd=parent), status)
    except OSError:
        return False


def _is_of_this_user(descriptor: int, status: os.stat_result) -> bool:
    """True if a directory belongs to this user, or to the owner of what this user makes in it.

    The owners differ on file servers that replace users, such as root.
    """
    if status.st_uid == os.geteuid():
        return True
    try:
        probe = os.open(_PROBE, _NEW_FILE, 0o600, dir_fd=descriptor)
    except OSError:
        return False
    try:
        return os.fstat(probe).st_uid == status.st_uid
    finally:
        close_unwritten(probe)
        os.unlink(_PROBE, dir_fd=descriptor)


def path_in_process(descriptor: int) -> str | None:
    """A path that leads to an open file in this process alone; None on systems without /proc."""
    path = f"/proc/self/fd/{descriptor}"
    try:
        return path if samestat(os.stat(path), os.fstat(descriptor)) else None
    except OSError:
        return None


def _safe_parent(parent: str) -> str:
    """Where to make a directory that libraries use by path: `parent`, or the temporary directory.

    On Windows, it is always `parent`.
    """
    if not HAS_DIR_FD:
        return parent
    with open(os.devnull, "rb") as file:
        if path_in_process(file.fileno()) is not None:
            return parent
    temporary = tempfile.gettempdir()
    for place in (parent, temporary):
        if _is_safe_from_others(os.path.realpath(place)):
            return place
    raise PermissionError(
        errno.EACCES,
        f"other users may rename a new directory here and in {temporary}; let TMPDIR name a "
        "directory where only you may write",
    )


def _is_safe_from_others(path: str) -> bool:
    """True if only this user and root can rename a directory of this user in `path`, or `path`."""
    own = (os.geteuid(), 0)
    is_own_inside = True
    while True:
        status = os.stat(path)
        is_sticky = bool(status.st_mode & stat.S_ISVTX)  # others rename only what is theirs
        may_others_write = status.st_mode & _OTHERS_WRITE and not (is_sticky and is_own_inside)
        if status.st_uid not in own or may_others_write:
            return False
        above = os.path.dirname(path)
        if above == path:
            return True
        path, is_own_inside = above, status.st_uid in own
