"""Replaces a file in one step: the target is complete or unchanged."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from typing import TypeAlias

from onnxarchive.errors import ArchiveError, LockedError, path_in_errors, with_path
from onnxarchive.files import attributes, locking
from onnxarchive.files.clones_and_sync import sync, sync_directory
from onnxarchive.files.data import Closing
from onnxarchive.files.hidden_files import TEMPORARY, TemporaryFile, partial_path
from onnxarchive.files.local_file import (
    MappedFile,
    PositionalWriter,
    locked_file,
    make_file,
    replace_file,
    require_unused,
)
from onnxarchive.files.paths import open_own, require_no_tilde, require_parent

NOT_RENAMED = (
    "its new content is complete, but cannot be renamed into place",
    "; it is unchanged; choose another path, such as one on another file system",
)
_HELD = (
    "; another process, or a session of this one, may have the file open or mapped, and Windows "
    "does not replace such a file; close it there first"
)
# Errors of a target that is missing, may not be opened, or (EBADF, NFS) may not be written.
_NO_LOCK = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EBADF, *locking.NO_LOCKS)

# Checks the file to be replaced. The argument is this file, locked, or None if the file is missing
# or cannot be opened or locked.
Require: TypeAlias = Callable[[MappedFile | None], None]


class Replacement(Closing):
    """A new file that replaces its target when the new file is complete.

    Closing the replacement before `commit` discards the new file.

    The new file is written beside the target under a temporary name. `commit` syncs it, renames it
    over the target and syncs the directory: at any moment the target is the old file or the
    complete new one. If the target is a symbolic link, the link remains and the file that the link
    points to is replaced. Owner and permissions are kept (see `attributes.keep`). The new file is
    locked while it is written, unlike the leftover of a killed process.

    Attributes:
        file: The new file.
        writer: Writes the new file from its beginning to its end.
        is_resumable: True if `close` leaves the new file, unless it is empty, and a later
            replacement of the target continues it.
    """

    _temporary: TemporaryFile | None = None  # the new file, unless it may be resumed
    _new_mode: int | None = None  # of a resumable file, when it gets its name

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        locked: MappedFile | None = None,
        resumes: bool = False,
        timeout: float | None = locking.TIMEOUT,
        kind: str = TEMPORARY,
        make: Callable[[str, int], MappedFile] = make_file,
    ) -> None:
        """Creates the temporary file.

        Args:
            path: The target.
            locked: The target, if the caller has locked it; on Windows, `commit` closes it. Then a
                symbolic link itself is replaced.
            resumes: True to continue the file that an earlier replacement left, if there is one;
                not on file systems without locks.
            timeout: Maximum seconds for `commit` to wait for the lock of the target; None waits
                without limit.
            kind: End of the temporary name; see `hidden_files`.
            make: Creates a temporary file, of a path and a mode, and opens it to write.

        Raises:
            LockedError: Another replacement is continuing the file, or (on Windows) this process
                has `locked` open elsewhere.
            OSError: The file cannot be created, or the target exists and is no regular file, or on
                Windows is read-only.
        """
        require_no_tilde(path)
        self._path = os.fspath(path)
        if not self._path:  # perhaps a variable of the shell that is not set
            problem = "the path of the target is empty; give the path of a file"
            raise FileNotFoundError(errno.ENOENT, problem, self._path)
        self._locked = locked
        self._timeout = timeout
        directory, name = os.path.split(self._path)
        self._target = os.path.realpath(path)
        if locked is not None:
            self._target = os.path.join(os.path.realpath(directory), name)
        require_parent(path)
        if os.path.isdir(self._path) or not name:  # a path that ends with a slash has no name
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        # `_path` is tested, not `_target`: for a link to a pipe in /proc, `realpath` returns a path
        # that does not exist.
        old = _status(self._path)
        if old is not None and not stat.S_ISREG(old.st_mode):
            raise FileExistsError(errno.EEXIST, "is not a regular file", os.fspath(path))
        if old is not None:
            _require_writable(old, self._path)
        if locked is not None:  # the earlier, the less is written in vain
            with with_path(self._path):
                require_unused(locked)
        self._is_committed = False
        self.is_resumable = resumes
        try:
            with with_path(self._path):
                if resumes:
                    self._resume()
                if not self.is_resumable:  # until `commit`, with the owner's permissions alone
                    self._begin(0o666 if old is None else old.st_mode & 0o600, kind, make)
        except OSError as error:
            unfinished = partial_path(self._target)
            if error.filename != unfinished or not os.path.lexists(unfinished):
                error.filename = self._path  # instead of a file that is not there
            raise
        self.file.set_path(self._path)
        self.writer = PositionalWriter(self.file)

    def _begin(self, mode: int, kind: str, make: Callable[[str, int], MappedFile]) -> None:
        self._temporary = TemporaryFile(self._target, mode, kind, make)
        self.file, self._new_path = self._temporary.file, self._temporary.path

    def _resume(self) -> None:
        """Opens and locks the file of an interrupted replacement, or a new one, to be resumed.

        The file has no permissions for others, who could stop downloads by locking it. On a file
        system without locks, where downloads cannot take turns, it is not resumed.
        """
        # The permissions of a usual new file, as the umask and the directory give them.
        probe = TemporaryFile(self._target)
        self._new_mode = stat.S_IMODE(probe.file.status().st_mode)
        probe.remove()
        self._new_path = partial_path(self._target)
        while True:
            self.file = MappedFile(self._new_path, descriptor=open_own(self._new_path, 0o600))
            try:
                has_locks = self.file.keep_locked(timeout=0)
            except LockedError as error:
                self.file.close()
                problem = "another process or thread is downloading to this file; wait for it"
                raise LockedError(problem) from error
            if self.file.is_at(self._new_path):
                break
            self.file.close()  # another process has completed or removed it
        self.set_mode(0o600)
        if not has_locks:
            self.close()
            self.is_resumable = False

    @property
    def target(self) -> str:
        """The path of the file that is replaced, after links are resolved."""
        return self._target

    @property
    def new_path(self) -> str:
        """The path of the new file until it is renamed."""
        return self._new_path

    def set_mode(self, mode: int) -> None:
        """Sets the permission bits of the new file; see `attributes.set_mode`."""
        with path_in_errors(self._path):
            attributes.set_mode(self.file.fileno(), self._new_path, mode)

    def complete(self, size: int) -> None:
        """Cuts the new file off at its final size and syncs it; it can then not be resumed."""
        self.file.truncate(size)
        self.is_resumable = False
        sync(self.file)
        self.writer.offset = size

    def commit(
        self, require: Require | None = None, before_rename: Callable[[], object] | None = None
    ) -> None:
        """Replaces the target with the new file.

        Args:
            require: Called before the rename; if `require` raises, nothing is renamed.
            before_rename: Called when only the rename is left, while the target is locked (except
                on Windows); if it raises, nothing is renamed.

        Raises:
            LockedError: The target remained locked, or (on Windows) open in this process.
            ArchiveError: Another process has changed the new file, or this process is a fork.
            OSError: The new file cannot be synced or renamed, or the target not locked.
        """
        self.commit_open(require, before_rename).close()

    def commit_open(
        self, require: Require | None = None, before_rename: Callable[[], object] | None = None
    ) -> MappedFile:
        """Commits like `commit`; returns the new file, still locked except on Windows."""
        self.file.refuse_fork()
        sync(self.file)
        with contextlib.ExitStack() as lock:
            # Excludes editors during the rename (on Windows, only until the rename).
            target = self._lock_target(lock) if self._locked is None else self._locked
            if require is not None:
                require(target)
            with path_in_errors(self._path):
                old, descriptor = _status(self._target), self.file.fileno()
                if old is not None:
                    _require_writable(old, self._path)
                    attributes.keep(descriptor, self._new_path, self._target, old)
                elif self._new_mode is not None:
                    self.set_mode(self._new_mode)
                self._require_written()
            unlocked = None
            if os.name == "nt":  # Windows renames and replaces no open file
                self._close_all(target)
                unlocked = None if target is None else old
            if before_rename is not None:
                before_rename()
                unlocked = None  # the target has another name now
            self._rename(self._new_path, self._target, unlocked)
            self._is_committed = True
            if self._temporary is not None:
                self._temporary.is_to_be_removed = False
            self.file.size = self.writer.offset
        sync_directory(os.path.dirname(self._target))
        return MappedFile(self._path, is_writable=None) if os.name == "nt" else self.file

    def _lock_target(self, lock: contextlib.ExitStack) -> MappedFile | None:
        """Locks the target; None if it is missing, or cannot be locked and so is not edited."""
        try:
            target = lock.enter_context(
                locked_file(
                    self._target, is_exclusive=True, is_writable=None, timeout=self._timeout
                )
            )
        except ArchiveError as error:
            error.path = self._path  # as the caller wrote it
            raise
        except OSError as error:
            if error.errno in _NO_LOCK:
                return None
            error.filename = self._path
            raise
        lock.callback(target.close)
        return target

    def _require_written(self) -> None:
        """Refuses a file that another process has changed."""
        size = self.file.status().st_size
        is_same = self.file.is_at(self._new_path)
        if not is_same:
            raise ArchiveError(
                f"another process has replaced or removed {self._new_path}, to which "
                f"{self.writer.offset} bytes were written",
                path=self._path,
            )
        if size != self.writer.offset:
            raise ArchiveError(
                f"another process has changed {self._new_path}: expected the "
                f"{self.writer.offset} bytes that were written, found {size}",
                path=self._path,
            )

    def set_aside(self, path: str) -> None:
        """Renames the target, if it is there, to a path beside it; called by `before_rename`."""
        if os.path.lexists(self._target):
            self._rename(self._target, path)

    def _close_all(self, target: MappedFile | None) -> None:
        """Closes the new file and the locked target."""
        if target is not None:
            with with_path(self._path):
                require_unused(target)
            target.release()
        self.file.close()

    def _rename(self, source: str, target: str, unlocked: os.stat_result | None = None) -> None:
        """Renames a file; see `replace_file`."""
        try:
            with with_path(self._path):
                replace_file(source, target, unlocked)
        except OSError as error:
            failure, remedy = NOT_RENAMED
            if os.name == "nt" and isinstance(error, PermissionError):
                remedy = f"{_HELD}{remedy}"
            reason = f"{failure}: {error.strerror}{remedy}"
            if error.errno == errno.EBUSY:
                reason = "is a mount point and cannot be replaced; choose another path"
            self.close()
            if os.path.lexists(self._new_path):  # where names cannot be removed
                reason += f"; {self._new_path} could not be removed"
            raise OSError(error.errno, reason, self._path) from error

    def close(self) -> None:
        """Removes the new file, or leaves it if it can be resumed, unless it was committed."""
        if self._is_committed:
            return
        if self._temporary is not None:
            self._temporary.remove()
        elif self.file.is_own:  # a fork leaves the file to its parent
            if os.name == "nt":  # Windows removes no open file
                self.file.close()
            with contextlib.suppress(OSError):  # the next download takes it
                keeps = self.is_resumable and os.stat(self._new_path).st_size
                if self.file.is_at(self._new_path) and not keeps:
                    os.unlink(self._new_path)
        self.file.close()


def _status(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _require_writable(status: os.stat_result, path: str) -> None:
    """Refuses a target with the attribute "read-only" of Windows, which cannot be replaced."""
    if os.name == "nt" and not status.st_mode & stat.S_IWRITE:
        raise PermissionError(
            errno.EACCES,
            "is read-only, and Windows does not replace it; clear this attribute",
            path,
        )
