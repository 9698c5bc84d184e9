"""Bytes of a file as data of an entry, and bytes spooled to a temporary file and mapped."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from onnxarchive.errors import ArchiveFormatError, naming, with_path
from onnxarchive.files.data import Data, Stored
from onnxarchive.files.filesystem import require_space
from onnxarchive.files.local_file import MappedFile, PositionalWriter
from onnxarchive.files.random_access import RandomAccessFile


def spool(pieces: Iterable[memoryview], nbytes: int, directory: str | None) -> memoryview:
    """Copies bytes to an unnamed file and returns a view of its map.

    The file is removed when the last view is freed.

    Args:
        pieces: The bytes.
        nbytes: Number of the bytes that are expected, for which the disk must have space.
        directory: The directory of the file; None for the system's temporary directory.

    Raises:
        OSError: The file cannot be created or mapped, or the disk is full; the error names the
            directory.
    """
    with naming("the system's temporary directory"):
        directory = directory or tempfile.gettempdir()
    name = f"a temporary file in {directory}"
    require_space(name, nbytes, directory)
    with naming(name), tempfile.TemporaryFile(prefix=".onnxarchive-", dir=directory) as unnamed:
        file = MappedFile(name, descriptor=os.dup(unnamed.fileno()))
    with file:
        writer = PositionalWriter(file)
        for piece in pieces:
            writer.write(piece)
        file.size = writer.offset
        return file.view()


@dataclass(frozen=True, slots=True)
class RandomAccessData:
    """A range of bytes of a remote file; each iteration reads the bytes in pieces.

    Attributes:
        file: The file.
        offset: Offset of the bytes in the file.
        nbytes: Number of the bytes.
        crc32: CRC-32 of the bytes; None if unknown.
        temporary: Directory for a temporary copy; None for the system's temporary directory.
    """

    file: RandomAccessFile
    offset: int
    nbytes: int
    crc32: int | None = None
    temporary: str | None = None

    def local(self) -> Data:
        """The same bytes for repeated reading: a temporary copy."""
        return Stored(spool(self, self.nbytes, self.temporary))

    def part(self, offset: int, nbytes: int) -> RandomAccessData:
        """A range of these bytes, not yet read."""
        return replace(self, offset=self.offset + offset, nbytes=nbytes, crc32=None)

    def head(self, nbytes: int) -> bytes:
        """A copy of the first `nbytes` bytes, or of all if there are fewer."""
        return self.file.read(self.offset, min(nbytes, self.nbytes))

    @property
    def view(self) -> memoryview:
        """A copy of the bytes."""
        return memoryview(self.file.read(self.offset, self.nbytes))

    def __iter__(self) -> Iterator[memoryview]:
        found = 0
        for piece in self.file.pieces(self.offset, self.nbytes):
            found += len(piece)
            yield memoryview(piece)
        if found != self.nbytes:
            with with_path(self.file.path):
                raise ArchiveFormatError(
                    f"expected {self.nbytes} bytes at offset {self.offset}, found {found}"
                )
