"""`RandomAccessFile`: what an archive is read from, whether a file, bytes or a remote object."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import ClassVar

from onnxarchive.errors import ArchiveFormatError
from onnxarchive.storage.closing import Closing

READ_SIZE = 1 << 19  # bytes of a piece in `RandomAccessFile.pieces`: it stays in a core's cache


class RandomAccessFile(Closing):
    """Bytes that are read by position. Several threads may read at once.

    Attributes:
        path: The name for messages: a path as given, or a URL without credentials.
        size: The size in bytes.
        identity: Equal for two objects of this class only if they read the same file.
        is_mapped: Whether `reaching` gives views; otherwise bytes are read as copies.
        is_complete: Whether all bytes of a map are there; otherwise `fetch` brings them.
    """

    path: str
    size: int
    identity: Hashable
    is_mapped: ClassVar[bool] = False
    is_complete: ClassVar[bool] = False

    @property
    def mapped_file(self) -> RandomAccessFile | None:
        """The file of this machine with the same bytes at the same offsets, or None."""
        return None

    def read(self, offset: int, size: int) -> bytes:
        """Reads `size` bytes from `offset`, fewer at the end of the file; returns a copy.

        Raises:
            OSError: The read failed; the error names the file.
        """
        raise NotImplementedError

    def read_ranges(self, ranges: Iterable[tuple[int, int]]) -> Iterator[memoryview]:
        """Reads several ranges, of which each is an offset and a size, many at once if that helps.

        Yields:
            The bytes of each range, in the order of `ranges`.
        """
        return (memoryview(self.read(offset, size)) for offset, size in ranges)

    def pieces(self, offset: int, size: int) -> Iterator[bytes | memoryview]:
        """Reads `size` bytes from `offset`; yields copies of a few MiB at most.

        If the file is truncated meanwhile, there are fewer bytes; a map would end the process.
        """
        while size > 0:
            piece = self.read(offset, min(size, READ_SIZE))
            if not piece:
                return
            yield piece
            offset += len(piece)
            size -= len(piece)

    def reaching(self, end: int) -> memoryview:
        """A read-only view of the file that has the bytes up to `end`, if `is_mapped`.

        Raises:
            ArchiveFormatError: The file has been truncated before `end` since it was opened.
        """
        raise NotImplementedError

    def hold(self, offset: int) -> None:
        """Holds the bytes from `offset` to the end in memory, after one request at most.

        It is for files whose reads are requests; others do nothing.
        """

    def release(self) -> None:
        """Holds nothing any longer."""

    def fetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Brings ranges that are not there yet, if the file is mapped but not complete."""

    def is_verified(self, number: int) -> bool:
        """Whether an earlier reader has compared the CRC-32 of an entry, by its number."""
        return False

    def set_verified(self, number: int) -> None:
        """Notes for later readers that the CRC-32 of an entry was compared."""

    def discard(self) -> None:
        """Removes a cached copy whose bytes failed a check."""


@contextmanager
def discarding_faults(file: RandomAccessFile) -> Iterator[None]:
    """Discards a cached copy if the block finds that its bytes break a rule."""
    try:
        yield
    except ArchiveFormatError:
        file.discard()
        raise
