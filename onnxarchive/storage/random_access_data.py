"""Bytes of a `RandomAccessFile` as data of an entry."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from onnxarchive.errors import ArchiveFormatError, with_path
from onnxarchive.storage.random_access import RandomAccessFile


@dataclass(frozen=True, slots=True)
class RandomAccessData:
    """A range of bytes of a file, read in pieces each time they are iterated over.

    Attributes:
        file: The file.
        offset: Offset of the bytes in the file.
        nbytes: Number of the bytes.
        crc32: Their CRC-32; None: unknown.
    """

    file: RandomAccessFile
    offset: int
    nbytes: int
    crc32: int | None = None

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
