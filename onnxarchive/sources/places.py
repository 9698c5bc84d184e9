"""Places of a model's data files: its directory, or its folder in a store.

A place finds the file of a location, refuses a location outside the place, and gives ranges of the
file's bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from onnxarchive.errors import ArchiveFormatError, shown
from onnxarchive.files.beneath import OutsideError, Root
from onnxarchive.files.data import Data
from onnxarchive.files.file import File
from onnxarchive.files.file_data import FileData, RandomAccessData
from onnxarchive.model.keys import MODEL_PROTO, PLAIN_PATH, RESERVED_PREFIX, is_plain_path
from onnxarchive.sources.other_files import is_hidden

MAX_PATH_SIZE: Final = 4096  # bytes; the longest path on Linux

_ASSETS = "assets"


class DataFile(Protocol):
    """A file that contains the bytes of tensors, or a model."""

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes."""

    def part(self, offset: int, nbytes: int) -> Data:
        """A range of the file; the caller has checked that the range is within the file."""

    def head(self, nbytes: int) -> bytes:
        """The first bytes of the file, or all bytes of a smaller file."""

    @property
    def view(self) -> memoryview:
        """All bytes of the file."""


class Place(Protocol):
    """A set of data files by location."""

    @property
    def names(self) -> list[str]:
        """The locations of the files that may be models or assets, sorted."""

    @property
    def all_names(self) -> list[str]:
        """The paths of all files and, ending with a slash, of folders that are not read; sorted.

        Only the module `other_files` needs these paths.
        """

    def find(self, location: str) -> DataFile | None:
        """The file of a location, or None.

        Raises:
            ArchiveFormatError: `plain` refuses the location, a link leads out of the place, or the
                file cannot be read.
        """


def plain(location: str) -> str:
    """The location without `.` components, so that each file has a single location.

    Raises:
        ArchiveFormatError: The location is too long or no plain relative path.
    """
    if len(location) > MAX_PATH_SIZE:
        raise ArchiveFormatError(
            f"expected a path of at most {MAX_PATH_SIZE} characters, found {shown(location)}"
        )
    path = "/".join(part for part in location.split("/") if part != os.curdir)
    if not is_plain_path(path):
        raise ArchiveFormatError(f"expected {PLAIN_PATH}, found {shown(location)}")
    return path


def sha1(data: Data) -> str:
    """The SHA-1 of data in the form of the external data's `checksum`: hexadecimal digits."""
    digest = hashlib.sha1(usedforsecurity=False)
    for piece in data:
        digest.update(piece)
    return digest.hexdigest()


class DirectoryPlace:
    """A directory and the directories below it.

    Attributes:
        paths: The paths of the files that `find` has opened so far.
    """

    def __init__(self, root: Root) -> None:
        """Looks for files beneath `root`."""
        self._root = root
        self._files: dict[str, DataFile | None] = {}
        self.paths: list[str] = []

    @property
    def names(self) -> list[str]:
        """As `Place.names`: the files in the directory itself and below `assets`.

        If `__MODEL_PROTO` exists, also folders with names reserved for later format versions.
        """
        files, reserved = [], []
        for entry in self._root.scan(""):
            if _leads_to(entry.is_file):
                files.append(entry.name)
            elif entry.name == _ASSETS and _leads_to(entry.is_dir):
                paths = self._paths_below(_ASSETS, lambda _: True)
                files += [path for path in paths if not path.endswith("/")]
            elif entry.name.startswith(RESERVED_PREFIX):
                reserved.append(f"{entry.name}/")
        return sorted(files + reserved if MODEL_PROTO in files else files)

    @property
    def all_names(self) -> list[str]:
        """As `Place.all_names`; hidden folders and links to folders are not read."""
        return sorted(self._paths_below("", lambda path: not is_hidden(f"{path}/")))

    def _paths_below(self, folder: str, is_read: Callable[[str], bool]) -> Iterator[str]:
        """The paths of files and, ending with a slash, of links to folders and of folders not read.

        Args:
            folder: The folder.
            is_read: True for the path of a folder that is read.
        """
        folders = [folder]
        while folders:
            folder = folders.pop()
            for entry in self._root.scan(folder):
                path = f"{folder}/{entry.name}" if folder else entry.name
                if not _leads_to(entry.is_dir):
                    yield path
                elif entry.is_symlink() or not is_read(path):
                    yield f"{path}/"
                else:
                    folders.append(path)

    def find(self, location: str) -> DataFile | None:
        """As `Place.find`; symbolic links are followed if the directory's `Root` allows it."""
        if location not in self._files:
            self._files[location] = self._open(location)
        return self._files[location]

    def _open(self, location: str) -> DataFile | None:
        path = plain(location)
        try:
            file = FileData.of(path, self._root)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OutsideError:
            raise
        except ArchiveFormatError as error:
            raise ArchiveFormatError(f"{error.message} at {location!r}") from None
        except OSError as error:
            raise ArchiveFormatError(f"cannot read {location!r}: {error.strerror}") from None
        self.paths.append(os.path.join(self._root.path, path))
        return file


def _leads_to(is_kind: Callable[[], bool]) -> bool:
    """The result of `is_file` or `is_dir` of a directory entry; False if the call fails."""
    try:
        return is_kind()
    except OSError:  # such as a loop of links; opening the entry reports this
        return False


class RemotePlace:
    """The objects in a remote model's folder and below it.

    Args:
        open_beside: Opens the object of a location.
        resources: Closes the objects.
        temporary: The directory for copies of tensors; None for the system's.
    """

    names: list[str] = []  # noqa: RUF012 a store is not searched
    all_names = names

    def __init__(
        self,
        open_beside: Callable[[str], File],
        resources: contextlib.ExitStack,
        temporary: str | None,
    ) -> None:
        self._open_beside = open_beside
        self._resources = resources
        self._temporary = temporary
        self._files: dict[str, RandomAccessData | None] = {}

    def find(self, location: str) -> RandomAccessData | None:
        """As `Place.find`."""
        path = plain(location)
        if path not in self._files:
            self._files[path] = None
            with contextlib.suppress(FileNotFoundError):
                file = self._resources.enter_context(self._open_beside(path))
                whole = RandomAccessData(file, 0, file.size, temporary=self._temporary)
                self._files[path] = whole
        return self._files[path]
