"""Bytes of a `RandomAccessFile` as data of an entry."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from onnxarchive.buffers.data import Data, Stored
from onnxarchive.errors import ArchiveFormatError, with_path
from onnxarchive.storage.random_access import RandomAccessFile
from onnxarchive.storage.spooling import spool


@dataclass(frozen=True, slots=True)
class RandomAccessData:
    """A range of bytes of a file; each iteration reads the bytes in pieces.

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
        """The same bytes for repeated reading: a temporary copy unless `mapped_file` has them."""
        if self.file.mapped_file is not None:
            return self
        return Stored(spool(self, self.nbytes, self.temporary))

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
