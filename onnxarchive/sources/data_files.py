"""The files of a source by location: in a directory, a zip, or a model's folder in a store."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final, Protocol

from onnxarchive.errors import ArchiveFormatError, shown
from onnxarchive.files.beneath import OutsideError, Root
from onnxarchive.files.data import Data
from onnxarchive.files.file_data import FileData
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


class DataFiles:
    """The files of a source; each is opened once.

    Args:
        open_file: Opens the file at a plain path; None if there is none.

    Attributes:
        opened: The files that were found so far, by plain path.
    """

    def __init__(self, open_file: Callable[[str], DataFile | None]) -> None:
        self._open_file = open_file
        self._by_location: dict[str, DataFile | None] = {}
        self.opened: dict[str, DataFile] = {}

    def find(self, location: str) -> DataFile | None:
        """The file of a location, or None."""
        if location not in self._by_location:
            path = _plain(location)
            file = self.opened.get(path) or self._open_file(path)
            self._by_location[location] = file
            if file is not None:
                self.opened[path] = file
        return self._by_location[location]

    def listed(self, path: str) -> DataFile:
        """The file at a path that was listed."""
        file = self.find(path)
        if file is None:
            raise ArchiveFormatError(
                f"expected a file at {path!r}, found none: it is a broken link or was removed"
            )
        return file

    def whole(self, path: str) -> Data:
        """The bytes of the file at a path that was listed."""
        file = self.listed(path)
        return file.part(0, file.nbytes)


def _plain(location: str) -> str:
    """The location without `.` components, so that each file has a single path."""
    if len(location) > MAX_PATH_SIZE:
        raise ArchiveFormatError(
            f"expected a path of at most {MAX_PATH_SIZE} characters, found {shown(location)}"
        )
    path = "/".join(part for part in location.split("/") if part != os.curdir)
    if not is_plain_path(path):
        raise ArchiveFormatError(f"expected {PLAIN_PATH}, found {shown(location)}")
    return path


def open_beneath(root: Root, path: str) -> FileData | None:
    """Opens a file of a directory for `DataFiles`; links are followed if `root` allows it."""
    try:
        return FileData.of(path, root)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OutsideError:
        raise
    except ArchiveFormatError as error:
        raise ArchiveFormatError(f"{error.message} at {path!r}") from None
    except OSError as error:
        raise ArchiveFormatError(f"cannot read {path!r}: {error.strerror}") from None


def models_and_assets(root: Root) -> list[str]:
    """The paths of files that may be models or assets, sorted.

    They are the files in the directory itself and below `assets`; if `__MODEL_PROTO` exists, also
    folders with names reserved for later format versions.
    """
    files, reserved = [], []
    for entry in root.scan(""):
        if _leads_to(entry.is_file):
            files.append(entry.name)
        elif entry.name == _ASSETS and _leads_to(entry.is_dir):
            paths = paths_below(root, _ASSETS, is_read=lambda _: True)
            files += [path for path in paths if not path.endswith("/")]
        elif entry.name.startswith(RESERVED_PREFIX):
            reserved.append(f"{entry.name}/")
    return sorted(files + reserved if MODEL_PROTO in files else files)


def paths_below(
    root: Root,
    folder: str = "",
    *,
    is_read: Callable[[str], bool] = lambda path: not is_hidden(f"{path}/"),
    max_folders: int | None = None,
) -> Iterator[str]:
    """Yields the paths of files and, ending with a slash, of links to folders and folders not read.

    Args:
        root: The directory.
        folder: The folder to begin with.
        is_read: True for the path of a folder that is read; without it, hidden ones are not.
        max_folders: For a hint: at most this many folders are read, and those that cannot be read
            are left out.
    """
    folders = [folder]
    skipped = () if max_folders is None else (OSError,)
    for folder in islice(folders, max_folders):  # the loop appends to `folders`
        with contextlib.suppress(*skipped):
            for entry in root.scan(folder):
                path = f"{folder}/{entry.name}" if folder else entry.name
                if not _leads_to(entry.is_dir):
                    yield path
                elif entry.is_symlink() or not is_read(path):
                    yield f"{path}/"
                else:
                    folders.append(path)


def _leads_to(is_kind: Callable[[], bool]) -> bool:
    """The result of `is_file` or `is_dir` of a directory entry; False if the call fails."""
    try:
        return is_kind()
    except OSError:  # such as a loop of links; opening the entry reports this
        return False
