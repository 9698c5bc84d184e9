"""Places of a model's data files: the model's directory, or a zip.

A place finds the file of a location, refuses a location outside the place, and gives ranges of the
file's bytes. A compressed file that is read as a whole is inflated piece by piece. The first read
of a part inflates all parts that were requested so far, in one pass, to a temporary file.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from threading import Lock
from typing import Protocol

from onnxarchive.buffers.data import Data, Stored, pieces
from onnxarchive.buffers.file_names import PLAIN_PATH, is_plain_path
from onnxarchive.errors import ArchiveFormatError, shown
from onnxarchive.model.keys import MODEL_PROTO, RESERVED_PREFIX
from onnxarchive.sources.other_files import is_hidden
from onnxarchive.storage.beneath import OutsideError, Root
from onnxarchive.storage.file_data import FileData
from onnxarchive.storage.spooling import spool
from onnxarchive.zipformat.foreign import MAX_PATH_SIZE, ForeignEntry
from onnxarchive.zipformat.inflate import inflate
from onnxarchive.zipformat.records import METHOD_STORED

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
    path = "/".join(it for it in location.split("/") if it != os.curdir)
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
        found, folders, reserved = [], [], []
        for entry in self._root.scan(""):
            if _leads_to(entry.is_file):
                found.append(entry.name)
            elif entry.name == _ASSETS and _leads_to(entry.is_dir):
                folders.append(_ASSETS)
            elif entry.name.startswith(RESERVED_PREFIX):
                reserved.append(f"{entry.name}/")
        if MODEL_PROTO in found:
            found += reserved
        while folders:
            folder = folders.pop()
            for entry in self._root.scan(folder):
                name = f"{folder}/{entry.name}"
                if not _leads_to(entry.is_dir):
                    found.append(name)
                elif not entry.is_symlink():
                    folders.append(name)
        return sorted(found)

    @property
    def all_names(self) -> list[str]:
        """As `Place.all_names`; hidden folders and links to folders are not read."""
        found, folders = [], [""]
        while folders:
            folder = folders.pop()
            for entry in self._root.scan(folder):
                name = f"{folder}/{entry.name}" if folder else entry.name
                if not _leads_to(entry.is_dir):
                    found.append(name)
                elif entry.is_symlink() or is_hidden(f"{name}/"):
                    found.append(f"{name}/")
                else:
                    folders.append(name)
        return sorted(found)

    def find(self, location: str) -> DataFile | None:
        """As `Place.find`; symbolic links are followed if the directory's `Root` allows it."""
        if location not in self._files:
            self._files[location] = self._open(location)
        return self._files[location]

    def _open(self, location: str) -> DataFile | None:
        path = plain(location)
        try:
            found = FileData.of(path, self._root)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OutsideError:
            raise
        except ArchiveFormatError as error:
            raise ArchiveFormatError(f"{error.message} at {location!r}") from None
        except OSError as error:
            raise ArchiveFormatError(f"cannot read {location!r}: {error.strerror}") from None
        self.paths.append(os.path.join(self._root.path, path))
        return found


def _leads_to(is_kind: Callable[[], bool]) -> bool:
    """The result of `is_file` or `is_dir` of a directory entry; False if the call fails."""
    try:
        return is_kind()
    except OSError:  # such as a loop of links; opening the entry reports this
        return False


class ZipPlace:
    """Entries of a zip."""

    def __init__(
        self,
        view: memoryview,
        entries: Iterable[ForeignEntry],
        temporary: str | None,
    ) -> None:
        """Looks for files among `entries` of the zip mapped as `view`.

        Temporary files are written to the directory `temporary`; None for the system's.
        """
        self._files = {entry.name: _ZippedFile(view, entry, temporary) for entry in entries}

    @property
    def names(self) -> list[str]:
        """As `Place.names`."""
        return sorted(self._files)

    all_names = names

    def find(self, location: str) -> DataFile | None:
        """As `Place.find`."""
        return self._files.get(plain(location))


class _ZippedFile:
    """An entry of a zip as a file."""

    def __init__(self, view: memoryview, entry: ForeignEntry, temporary: str | None) -> None:
        self._view = view
        self._entry = entry
        self._temporary = temporary
        self._whole: memoryview | None = None
        self._parts: list[tuple[int, int]] = []
        self._kept: _Kept | None = None
        self._lock = Lock()

    @property
    def nbytes(self) -> int:
        return self._entry.nbytes

    def part(self, offset: int, nbytes: int) -> Data:
        """As `DataFile.part`; `_Part` describes the parts of a compressed entry."""
        if (offset, nbytes) == (0, self.nbytes):
            return _Inflated(self._view, self._entry)
        if self._entry.method == METHOD_STORED or self._whole is not None:
            return Stored(self.view[offset : offset + nbytes])
        with self._lock:
            self._parts.append((offset, offset + nbytes))
            self._kept = None
        return _Part(self, offset, nbytes)

    def head(self, nbytes: int) -> bytes:
        """As `DataFile.head`; `nbytes` is less than that of a piece."""
        return bytes(next(inflate(self._view, self._entry), b"")[:nbytes])

    @property
    def view(self) -> memoryview:
        """As `DataFile.view`; a compressed entry is inflated to a temporary file."""
        if self._whole is None:
            if self._entry.method == METHOD_STORED:
                for _ in inflate(self._view, self._entry):
                    pass  # the end of the iteration compares the CRC-32
                start = self._entry.data_offset
                self._whole = self._view[start : start + self.nbytes]
            else:
                self._whole = spool(inflate(self._view, self._entry), self.nbytes, self._temporary)
        return self._whole

    def read(self, offset: int, nbytes: int) -> memoryview:
        """The bytes of a part."""
        with self._lock:
            if self._kept is None:
                inflated = inflate(self._view, self._entry)
                self._kept = _Kept.spooled(inflated, self._parts, self._temporary)
            return self._kept.read(offset, nbytes)


@dataclass(frozen=True, slots=True)
class _Kept:
    """Copies of some ranges of a file.

    Attributes:
        begins: Offset of each range in the file, ascending.
        offsets: Offset of each range in `view`, then the size of `view`.
        view: The bytes of the ranges.
    """

    begins: list[int]
    offsets: list[int]
    view: memoryview

    @classmethod
    def spooled(
        cls, pieces: Iterable[memoryview], named: Iterable[tuple[int, int]], directory: str | None
    ) -> _Kept:
        """Copies ranges of a file to a temporary file, in one pass over the file.

        Args:
            pieces: Successive pieces of the file.
            named: Begin and end of each range, in any order; they may overlap.
            directory: The directory of the temporary file; None for the system's.
        """
        ranges: list[tuple[int, int]] = []
        for begin, end in sorted(named):
            if ranges and begin <= ranges[-1][1]:
                begin, before = ranges.pop()
                end = max(before, end)
            ranges.append((begin, end))
        sizes = (end - begin for begin, end in ranges)
        offsets = [0, *accumulate(sizes)]
        view = spool(_within(ranges, pieces), offsets[-1], directory)
        return cls([begin for begin, _ in ranges], offsets, view)

    def read(self, offset: int, nbytes: int) -> memoryview:
        """`nbytes` bytes of the file from `offset`, all within one range."""
        index = bisect_right(self.begins, offset) - 1
        start = self.offsets[index] + offset - self.begins[index]
        return self.view[start : start + nbytes]


def _within(
    ranges: Iterable[tuple[int, int]], pieces: Iterable[memoryview]
) -> Iterator[memoryview]:
    """Yields the bytes of ranges from the pieces of a file; ranges ascend and do not touch."""
    coming = deque(ranges)
    offset = 0
    for piece in pieces:
        stop = offset + len(piece)
        while coming and coming[0][0] < stop:
            begin, end = coming[0]
            yield piece[max(begin - offset, 0) : end - offset]
            if end > stop:
                break
            coming.popleft()
        offset = stop


class _Part:
    """A range of a compressed entry.

    After `_ZippedFile.part` has returned a range, the next read of any range inflates all ranges
    returned so far, in one pass.
    """

    def __init__(self, file: _ZippedFile, offset: int, nbytes: int) -> None:
        self._file = file
        self._offset = offset
        self.nbytes = nbytes
        self.crc32 = None

    def __iter__(self) -> Iterator[memoryview]:
        return pieces(self._file.read(self._offset, self.nbytes))


class _Inflated:
    """All bytes of a zip entry, inflated while they are read."""

    def __init__(self, view: memoryview, entry: ForeignEntry) -> None:
        self._view = view
        self._entry = entry
        self.nbytes = entry.nbytes
        self.crc32 = entry.crc32

    def __iter__(self) -> Iterator[memoryview]:
        return inflate(self._view, self._entry)
