"""Where the data files of a model lie: in its directory, or in the zip that it came in.

A place finds a file by the location that a tensor names, refuses a location that leads out of it,
and gives ranges of the file's bytes. What is compressed is inflated as it is gone through; only a
compressed file of which a tensor is a part is inflated to a temporary file first.
"""

from __future__ import annotations

import hashlib
import ntpath
import os
import re
from collections.abc import Iterable, Iterator
from typing import Protocol

from onnxarchive.errors import ArchiveFormatError
from onnxarchive.files import is_below, spool
from onnxarchive.save import FileData
from onnxarchive.zipformat.foreign import ForeignEntry
from onnxarchive.zipformat.inflate import inflate
from onnxarchive.zipformat.records import METHOD_STORED
from onnxarchive.zipformat.writer import Data, Stored

_ASSETS = "assets"
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class DataFile(Protocol):
    """A file that holds the bytes of tensors, or a model."""

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""

    def part(self, offset: int, nbytes: int) -> Data:
        """Some of its bytes, which lie inside the file."""

    @property
    def view(self) -> memoryview:
        """All of its bytes."""


class Place(Protocol):
    """Where data files lie."""

    @property
    def names(self) -> list[str]:
        """The locations of its files, in order."""

    def find(self, location: str) -> DataFile | None:
        """The file of a location, or None where there is none.

        Raises:
            ArchiveFormatError: The location leads out of the place.
        """


def plain(location: str) -> str:
    """A location in the one way to write it.

    Raises:
        ArchiveFormatError: It is absolute, climbs by `..`, or is no plain path at all.
    """
    components = location.split("/")
    faults = {
        "a path with no empty component, relative": "" in components,
        "a path without '..'": os.pardir in components,
        "a path with slashes and no backslash": "\\" in location,
        "a path without control characters": _CONTROL.search(location) is not None,
        "a path without a drive": bool(ntpath.splitdrive(location)[0]),
    }
    for expected, is_broken in faults.items():
        if is_broken:
            raise ArchiveFormatError(f"expected {expected}, found {location!r}")
    return "/".join(component for component in components if component != os.curdir)


def sha1(data: Data) -> str:
    """SHA-1 of bytes in hexadecimal digits, as the external data's `checksum` has it."""
    digest = hashlib.sha1(usedforsecurity=False)
    for piece in data:
        digest.update(piece)
    return digest.hexdigest()


class DirectoryPlace:
    """A directory and what is below it.

    Attributes:
        paths: The paths of the files that were found so far.
    """

    def __init__(self, directory: str) -> None:
        """Looks for files in `directory`."""
        self._directory = os.path.realpath(directory)
        self._files: dict[str, DataFile | None] = {}
        self.paths: list[str] = []

    @property
    def names(self) -> list[str]:
        """As `Place.names`: the files in the directory itself, and those below `assets`."""
        found = [entry.name for entry in os.scandir(self._directory) if entry.is_file()]
        top = os.path.join(self._directory, _ASSETS)
        for directory, _, names in os.walk(top):
            folder = os.path.relpath(directory, self._directory).replace(os.sep, "/")
            found += [f"{folder}/{name}" for name in names]
        return sorted(found)

    def find(self, location: str) -> DataFile | None:
        """As `Place.find`; symbolic links are followed as long as they stay in the directory."""
        if location not in self._files:
            self._files[location] = self._open(location)
        return self._files[location]

    def _open(self, location: str) -> DataFile | None:
        path = os.path.realpath(os.path.join(self._directory, *plain(location).split("/")))
        if not is_below(path, self._directory):
            raise ArchiveFormatError(
                f"expected a file inside {self._directory}, found {location!r} to be a link to "
                f"{path}; copy the file there in its place"
            )
        try:
            found = FileData.of(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ArchiveFormatError as error:
            raise ArchiveFormatError(f"{error.message} at {location!r}") from None
        except OSError as error:
            raise ArchiveFormatError(
                f"expected to read {location!r}, found: {error.strerror}"
            ) from None
        self.paths.append(path)
        return found


class ZipPlace:
    """Entries of a zip."""

    def __init__(
        self,
        view: memoryview,
        entries: Iterable[ForeignEntry],
        temporary: str | None,
    ) -> None:
        """Looks for files among `entries` of the zip mapped as `view`.

        What has to be inflated as a whole is so to a file in the directory `temporary`, or in that
        of the system where it is None.
        """
        self._files = {entry.name: _ZippedFile(view, entry, temporary) for entry in entries}

    @property
    def names(self) -> list[str]:
        """As `Place.names`."""
        return sorted(self._files)

    def find(self, location: str) -> DataFile | None:
        """As `Place.find`."""
        return self._files.get(plain(location))


class _ZippedFile:
    """An entry of a zip as a file."""

    def __init__(self, view: memoryview, entry: ForeignEntry, temporary: str | None) -> None:
        self._view = view
        self._entry = entry
        self._temporary = temporary
        self._spooled: memoryview | None = None

    @property
    def nbytes(self) -> int:
        return self._entry.nbytes

    def part(self, offset: int, nbytes: int) -> Data:
        if (offset, nbytes) == (0, self.nbytes):
            return _Inflated(self._view, self._entry)
        return Stored(self.view[offset : offset + nbytes])

    @property
    def view(self) -> memoryview:
        """As `DataFile.view`; of a temporary file where the entry is compressed."""
        if self._spooled is None:
            if self._entry.method == METHOD_STORED:
                for _ in inflate(self._view, self._entry):
                    pass  # until its end, where the CRC-32 is compared
                start = self._entry.data_offset
                self._spooled = self._view[start : start + self.nbytes]
            else:
                self._spooled = spool(inflate(self._view, self._entry), self._temporary)
        return self._spooled


class _Inflated:
    """All bytes of a zip entry, inflated as they are gone through."""

    def __init__(self, view: memoryview, entry: ForeignEntry) -> None:
        self._view = view
        self._entry = entry
        self.nbytes = entry.nbytes
        self.crc32 = entry.crc32

    def __iter__(self) -> Iterator[memoryview]:
        return inflate(self._view, self._entry)
