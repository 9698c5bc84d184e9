"""Writes files so that the target is whole or untouched: beside it, and then in its place."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
import stat
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

from onnxarchive.errors import ArchiveError, ArchiveFormatError, with_path
from onnxarchive.storage import attributes, locking
from onnxarchive.storage.files import (
    MappedFile,
    PositionalWriter,
    make_file,
    opened,
    require_process,
    sync,
    sync_directory,
)
from onnxarchive.storage.filesystem import NO_SPACE

_TEMPORARY = re.compile(r"[0-9]+-[0-9]+\.tmp")

# Takes the file that is about to be replaced, locked; None if it cannot be opened and locked.
Require: TypeAlias = Callable[[MappedFile | None], None]
_Made = TypeVar("_Made")

_serial_numbers = itertools.count()

_temporaries: weakref.WeakSet[_Temporary[Any]] = weakref.WeakSet()


def remove_temporaries() -> None:
    """Removes what this process has not completed, when it is about to end without unwinding."""
    for temporary in list(_temporaries):
        temporary.remove()


class _Temporary(Generic[_Made]):
    """A new file or directory beside a target, removed unless it is kept.

    It is known before it is made, and removed with this object at the latest: an interrupt at
    whatever moment leaves nothing behind.

    Attributes:
        path: Its path.
        made: What `make` gave.
    """

    def __init__(
        self, target: str, make: Callable[[str], _Made], remove: Callable[[str], None]
    ) -> None:
        while True:
            number = f"{os.getpid()}-{next(_serial_numbers)}"
            self.path = f"{_temporary_prefix(target)}{number}.tmp"
            self._finalizer = weakref.finalize(
                self, _remove_in_process, os.getpid(), remove, self.path
            )
            _temporaries.add(self)
            try:
                self.made = make(self.path)
                return
            except FileExistsError:  # another machine's, in a shared directory
                self._finalizer.detach()
            except OSError:
                self._finalizer.detach()  # nothing was made
                raise

    def keep(self) -> None:
        """Leaves it where it is."""
        self._finalizer.detach()

    def remove(self) -> None:
        """Removes it, unless it was removed or kept before."""
        found = self._finalizer.peek()
        try:
            self._finalizer()
        except BaseException:
            if found is not None:  # an interrupt may have come before anything was done
                _, remove, arguments, _ = found
                remove(*arguments)
            raise


def _temporary_prefix(target: str) -> str:
    directory, name = os.path.split(target)
    return os.path.join(directory, f".{name[:50]}.")  # 200 bytes at most, of 255


def remove_abandoned(
    path: str | os.PathLike[str], is_leftover: Callable[[MappedFile], bool]
) -> list[str]:
    """Removes the temporary files of processes that were killed while they wrote `path`.

    Those that are being written are locked, and stay; so does what is not a regular file, and what
    lies in a directory that may not be listed.

    Args:
        path: The file that was to be written.
        is_leftover: Whether a file's content is that of such a temporary file.

    Returns:
        The paths of what was removed.
    """
    above, own = os.path.split(os.path.abspath(path))
    # A symbolic link may itself have been about to be replaced.
    targets = {os.path.realpath(path), os.path.join(os.path.realpath(above), own)}
    removed = []
    for target in sorted(targets):
        directory, prefix = os.path.split(_temporary_prefix(target))
        names: list[str] = []
        with contextlib.suppress(PermissionError):  # listing needs one that writing does not
            names = sorted(os.listdir(directory))
        for name in names:
            if not (name.startswith(prefix) and _TEMPORARY.fullmatch(name, len(prefix))):
                continue
            found = os.path.join(directory, name)
            with contextlib.suppress(OSError, ArchiveFormatError):  # of somebody else, or gone
                if stat.S_ISREG(os.lstat(found).st_mode) and _removes_abandoned(found, is_leftover):
                    removed.append(found)
    return removed


def _removes_abandoned(path: str, is_leftover: Callable[[MappedFile], bool]) -> bool:
    """Removes a file unless it is locked; whoever waits for the lock sees that it is gone."""
    with MappedFile(path, is_writable=None) as file:
        is_free = locking.try_exclusive(file.fileno()) and file.is_at(path)
        if not (is_free and is_leftover(file)):
            return False
        if os.name != "nt":  # which removes no open file
            os.unlink(path)
    if os.name == "nt":
        os.unlink(path)
    return True


def _remove_in_process(process: int, remove: Callable[[str], None], path: str) -> None:
    if os.getpid() == process:  # a fork has its parent's finalizers
        remove(path)


class Replacement:
    """A new file that takes the place of another when it is complete, and only then.

    It is written beside the target under a temporary name. `commit` syncs it, renames it over the
    target and syncs the directory: at any moment the target is what it was or is complete. A
    target that is a symbolic link keeps being one: the file that it leads to is replaced. Owner,
    permissions and extended attributes of the target are kept (see `attributes.keep`). The file is
    locked while it is written, which tells it from one that was abandoned.

    Attributes:
        file: Where to write.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        follow_links: bool = True,
        is_locked: bool = False,
    ) -> None:
        """Makes the temporary file.

        Args:
            path: The target.
            follow_links: Whether to replace the file that a symbolic link leads to, and not the
                link.
            is_locked: Whether the caller holds the lock of the target.

        Raises:
            OSError: The file cannot be made, or the target is there and is no regular file.
        """
        self._path = os.fspath(path)
        self._is_locked = is_locked
        self._process = os.getpid()
        directory, name = os.path.split(self._path)
        self._target = os.path.join(os.path.realpath(directory), name)
        if follow_links:
            self._target = os.path.realpath(path)
        if os.path.isdir(self._target):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if os.path.exists(self._target) and not os.path.isfile(self._target):
            raise FileExistsError(errno.EEXIST, "is not a regular file", os.fspath(path))
        make = partial(make_file, mode=attributes.first_mode(self._old_status()))
        while True:
            try:
                self._temporary = _Temporary(self._target, make, _unlink)
            except OSError as error:
                error.filename = self._path  # not that of the temporary file
                raise
            self._written = self._temporary.made
            self._written.set_path(self._path)
            self.file = PositionalWriter(self._written)
            locking.keep_exclusive(self._written.fileno())
            if os.path.lexists(self._temporary.path):
                break
            self.discard()  # before it was locked, somebody took it for an abandoned one

    def _old_status(self) -> os.stat_result | None:
        try:
            return os.stat(self._target)
        except FileNotFoundError:
            return None

    def fileno(self) -> int:
        """The descriptor of the new file."""
        return self._written.fileno()

    def commit(self, require: Require | None = None) -> None:
        """Puts the file in the target's place; on failure it is discarded instead.

        Args:
            require: Called before the rename; an error discards the file.

        Raises:
            ArchiveError: The file is not as long as what was written to it.
            OSError: The file cannot be synced or renamed.
        """
        with self.commit_open(require) as file:
            locking.unlock(file.fileno())  # which a fork would keep

    def commit_open(self, require: Require | None = None) -> MappedFile:
        """As `commit`, and gives the new file, which is still locked."""
        try:
            require_process(self._process)
            sync(self.fileno())
            with contextlib.ExitStack() as lock:
                target = None
                if not self._is_locked:
                    # No one edits the file meanwhile; there may be none, or no locks.
                    with with_path(self._path), contextlib.suppress(OSError, ArchiveFormatError):
                        target = lock.enter_context(
                            opened(self._target, is_exclusive=True, is_writable=None)
                        )
                        lock.callback(target.close)
                if require is not None:
                    require(target)
                old = self._old_status()
                if old is not None:
                    attributes.keep(self.fileno(), self._temporary.path, self._target, old)
                self._require_written()
                if os.name == "nt":  # which renames no open file, and replaces none
                    self._written.close()
                    lock.close()
                self._rename()
                self._temporary.keep()
                self._written.size = self.file.offset
        except BaseException as error:
            if isinstance(error, OSError) and error.filename is None:
                error.filename = self._path
            self.discard(error)
            raise
        with contextlib.suppress(OSError):  # the file is complete in any case
            sync_directory(os.path.dirname(self._target))
        return MappedFile(self._path, is_writable=None) if os.name == "nt" else self._written

    def _require_written(self) -> None:
        """Refuses to rename anything but what was written."""
        size = os.fstat(self.fileno()).st_size
        is_same = self._written.is_at(self._temporary.path)
        if not is_same or size != self.file.offset:
            raise ArchiveError(
                f"{self._path}: expected the {self.file.offset} bytes that were written to "
                f"{self._temporary.path}, found {size if is_same else 'another file or none'}; "
                "another process has changed it"
            )

    def _rename(self) -> None:
        try:
            os.replace(self._temporary.path, self._target)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise OSError(error.errno, error.strerror, self._path) from error
            raise OSError(
                errno.EBUSY,
                "is a mount point and cannot be replaced; give another path",
                self._path,
            ) from error

    def discard(self, error: BaseException | None = None) -> None:
        """Removes the file; the target is untouched.

        Args:
            error: Why, or None. Where it tells of a full disk, it is made to name the target.
        """
        if isinstance(error, OSError) and error.errno in NO_SPACE and error.filename is None:
            error.filename = self._path
        self._written.close()
        self._temporary.remove()


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.unlink(path)


@contextlib.contextmanager
def replacing(
    path: str | os.PathLike[str], require: Require | None = None
) -> Iterator[Replacement]:
    """A `Replacement` that is committed when the block ends and discarded when it raises.

    Args:
        path: The target.
        require: As `Replacement.commit` takes it.
    """
    replacement = Replacement(path)
    try:
        yield replacement
    except BaseException as error:
        replacement.discard(error)
        raise
    replacement.commit(require)


@contextlib.contextmanager
def new_directory(path: str | os.PathLike[str]) -> Iterator[str]:
    """A directory to fill that gets its name when the block ends; removed when it raises.

    An empty directory that it replaces gives it owner, permissions and attributes.

    Raises:
        OSError: It cannot be made, or `path` exists and is not an empty directory.
    """
    target = os.path.realpath(path)
    process = os.getpid()
    old = os.stat(target) if os.path.exists(target) else None
    if old is not None and os.listdir(target):
        raise FileExistsError(errno.EEXIST, "the directory is not empty", os.fspath(path))
    make = partial(os.mkdir, mode=attributes.first_mode(old, 0o777))
    try:
        temporary = _Temporary(target, make, partial(shutil.rmtree, ignore_errors=True))
    except OSError as error:
        error.filename = os.fspath(path)
        raise
    try:
        if old is not None and os.name != "nt":  # which opens no directory
            descriptor = os.open(temporary.path, os.O_RDONLY)
            try:
                attributes.keep(descriptor, temporary.path, target, old)
            finally:
                os.close(descriptor)
        yield temporary.path
        require_process(process)
        if os.path.exists(target):
            os.rmdir(target)
        os.rename(temporary.path, target)
    except BaseException:
        temporary.remove()
        raise
    temporary.keep()
