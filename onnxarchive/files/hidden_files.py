"""Hidden files beside a target: their names, and files left by killed processes.

A temporary file of the target `NAME` has the name `.NAME.onnxarchive-N.tmp`, with the lowest free
number. Only the name shows that a file is this library's, since the first block of a file may not
have reached the disk. A process keeps its temporary files locked. An unlocked one was left by a
killed process:

- A writer removes one that has the name it needs, if the file belongs to the same user and is on a
  local file system. On other file systems, other machines may not see the lock of its process.
- `remove_abandoned` removes all temporary files of a target, wherever they can be locked.

A process may find a file that it has just made removed before it has locked it; then it makes
another.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import re
import stat
from collections.abc import Callable, Iterator
from hashlib import sha256
from weakref import WeakValueDictionary

from onnxarchive.errors import ArchiveFormatError, LockedError
from onnxarchive.files.clones_and_sync import is_local
from onnxarchive.files.local_file import MappedFile, make_file
from onnxarchive.files.locking import OfOneProcess

# Characters of the target's name in a hidden name. They take at most 200 bytes, and a file name may
# have 255 bytes.
_MAX_STEM_LENGTH = 50
_NUMBERED = re.compile(r"[0-9]+(-[0-9]+)?")

TEMPORARY = "tmp"  # end of a hidden name

_serial_numbers = itertools.count()

# By id(). Its references are listed in one step, while threads still make files.
_temporaries: WeakValueDictionary[int, TemporaryFile | TemporaryDirectory] = WeakValueDictionary()


@atexit.register
def remove_temporaries() -> None:
    """Removes the temporary files and directories of this process; needed before `os._exit`."""
    for reference in _temporaries.valuerefs():
        temporary = reference()
        if temporary is not None:
            temporary.remove()


def hidden_path(target: str, ending: str) -> str:
    """The path of a hidden file beside a target, such as `.NAME.download`."""
    directory, name = os.path.split(target)
    if len(name) > _MAX_STEM_LENGTH:
        name = f"{name[:_MAX_STEM_LENGTH]}.{sha256(os.fsencode(name)).hexdigest()[:16]}"
    return os.path.join(directory, f".{name}.{ending}")


def numbered_path(target: str, number: int | str, kind: str = TEMPORARY) -> str:
    """The path of a hidden file of this library, of a number and a kind."""
    return hidden_path(target, f"onnxarchive-{number}.{kind}")


def partial_path(target: str) -> str:
    """The hidden file beside a target that keeps the bytes of an interrupted download."""
    return hidden_path(target, "download")


def partial_downloads(path: str | os.PathLike[str]) -> list[str]:
    """The paths of partial downloads of a file, even one that is being continued."""
    return [it for it in map(partial_path, targets_of(path)) if os.path.isfile(it)]


class TemporaryFile(OfOneProcess):
    """A new file beside a target, locked, and removed with this object unless it was renamed.

    The path is registered for removal before creation, so no interrupt leaves a file there.

    Attributes:
        path: The path of the file.
        is_to_be_removed: True if the file may be at the path, and is to be removed.
    """

    is_to_be_removed = False
    _file: MappedFile | None = None

    def __init__(
        self,
        target: str,
        mode: int = 0o666,
        kind: str = TEMPORARY,
        make: Callable[[str, int], MappedFile] = make_file,
    ) -> None:
        """Creates a file by `make`; `mode` is that before the umask, `kind` the end of the name."""
        super().__init__()
        _temporaries[id(self)] = self
        number = 0
        while True:
            self.path = numbered_path(target, number, kind)
            self.is_to_be_removed = True
            try:
                self._file = make(self.path, mode)
            except FileExistsError:
                self.is_to_be_removed = False
                if not _remove_own(self.path):
                    number += 1
                continue
            except OSError:
                self.remove()  # what may have been created
                raise
            with contextlib.suppress(LockedError):  # a reader of the file must not stop its writer
                self._file.keep_locked()
            if self._file.is_at(self.path):
                return
            self._file.close()  # another process removed the file before it was locked
            self._file = None

    @property
    def file(self) -> MappedFile:
        """The file, open for reading and writing."""
        assert self._file is not None
        return self._file

    def remove(self) -> None:
        """Removes the file, if it is there, and closes it; a file that cannot be removed stays.

        It raises no error, so that the error that ended the work is reported.
        """
        if not (self.is_to_be_removed and self.is_own):
            return
        with contextlib.suppress(OSError):
            if self._file is None:  # interrupted while it was made; perhaps by another process
                remove_unlocked(self.path)
            elif self._has_name():  # while it is locked, nobody else removes it
                if os.name == "nt":  # Windows removes no open file
                    self._file.close()
                os.unlink(self.path)
        if self._file is not None:
            self._file.close()
        self.is_to_be_removed = False  # after an interrupt, `__del__` tries again

    def _has_name(self) -> bool:
        """False if nothing has the path, or another program gave it to another file."""
        try:
            status = os.lstat(self.path)
        except FileNotFoundError:
            return False
        except OSError:  # it cannot be learnt
            return True
        return (status.st_dev, status.st_ino) == self.file.identity

    def __del__(self) -> None:
        self.remove()


class TemporaryDirectory(OfOneProcess):
    """A new directory beside a target, removed with this object unless it was renamed.

    The path is registered for removal before creation, so no interrupt leaves a directory there. A
    writer does not remove directories that others have left, so no process uses a name twice.

    Attributes:
        path: Path of the new directory.
        is_to_be_removed: True if the directory may be at the path, and is to be removed.
    """

    is_to_be_removed = False

    def __init__(
        self, target: str, make: Callable[[str], object], remove: Callable[[], None]
    ) -> None:
        """Makes the directory; `make` takes its path, and `remove` removes it."""
        super().__init__()
        self._remove = remove
        _temporaries[id(self)] = self
        while True:
            self.path = numbered_path(target, f"{os.getpid()}-{next(_serial_numbers)}")
            self.is_to_be_removed = True
            try:
                make(self.path)
                return
            except FileExistsError:
                # A killed process, or a process on another machine, had the same id.
                self.is_to_be_removed = False
            except OSError:
                self.remove()  # what may have been created
                raise

    def remove(self) -> None:
        """Removes the directory, if it is there."""
        if self.is_to_be_removed and self.is_own:
            self._remove()
            self.is_to_be_removed = False  # after an interrupt, `__del__` tries again

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            self.remove()


def _remove_own(path: str) -> bool:
    return remove_regular(path, is_left_here)


def is_left_here(file: MappedFile) -> bool:
    """True if an unlocked temporary file was left by a process of this user on this machine."""
    is_of_user = hasattr(os, "geteuid") and file.status().st_uid == os.geteuid()
    return is_of_user and is_local(file)


def remove_regular(path: str, is_removable: Callable[[MappedFile], bool] | None = None) -> bool:
    """Removes an unlocked regular file; False for another file, or one that cannot be removed."""
    with contextlib.suppress(OSError, ArchiveFormatError):  # of another user, or removed
        return stat.S_ISREG(os.lstat(path).st_mode) and remove_unlocked(path, is_removable)
    return False


def remove_unlocked(path: str, is_removable: Callable[[MappedFile], bool] | None = None) -> bool:
    """Removes a file if it is not locked, and `is_removable`, if given, returns True for it.

    Returns:
        True if the file was removed.

    Raises:
        ArchiveFormatError: It is not a regular file.
        OSError: It cannot be opened or removed.
    """
    try:
        with MappedFile(path, is_writable=None) as file:
            if not (file.keep_locked(timeout=0) and file.is_at(path)):
                return False
            if is_removable is not None and not is_removable(file):
                return False
            if os.name != "nt":  # Windows removes no open file
                os.unlink(path)
    except LockedError:
        return False
    if os.name == "nt":
        os.unlink(path)
    return True


def targets_of(path: str | os.PathLike[str]) -> list[str]:
    """The paths that a writer of `path` replaces: without links, or the link itself."""
    above, own = os.path.split(os.path.abspath(path))
    return sorted({os.path.realpath(path), os.path.join(os.path.realpath(above), own)})


def hidden_names(target: str, kind: str) -> Iterator[str]:
    """Yields the paths of the hidden files beside a target that have a kind, and any number.

    A directory without read permission has none; a missing one raises a FileNotFoundError.
    """
    directory, name = os.path.split(numbered_path(target, "", kind))
    begin, end = name.removesuffix(f".{kind}"), f".{kind}"
    names: list[str] = []
    with contextlib.suppress(PermissionError):  # a writable directory may be unreadable
        names = sorted(os.listdir(directory))
    for found in names:
        number = found.removeprefix(begin).removesuffix(end)
        if found == f"{begin}{number}{end}" and _NUMBERED.fullmatch(number):
            yield os.path.join(directory, found)


def remove_abandoned(
    path: str | os.PathLike[str],
    kind: str = TEMPORARY,
    is_removable: Callable[[MappedFile], bool] | None = None,
) -> list[str]:
    """Removes the temporary files of processes that were killed while writing `path`.

    Locked files are in use and remain; so do directories, links, and all files of a directory
    without read permission, and those for which `is_removable`, if given, returns False. Returns
    the paths of the removed files.
    """
    found = [it for target in targets_of(path) for it in hidden_names(target, kind)]
    return [it for it in found if remove_regular(it, is_removable)]
