"""Interface for reading an archive: from a file, from memory or from a remote object."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Self

READ_SIZE = 1 << 19  # bytes of a piece in `RandomAccessFile.pieces`: it stays in a core's cache


class Closing:
    """Base of classes that have `close`: the end of a `with` block closes the object."""

    def close(self) -> None:
        """Closes the object."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RandomAccessFile(Closing):
    """Bytes that are read by position. Several threads may read at once.

    Attributes:
        path: The name for messages: a path as given, or a URL without credentials.
        size: The size in bytes.
        identity: Equal for two objects of this class only if they read the same file.
        is_mapped: True if `reaching` gives views; else bytes are read as copies.
    """

    path: str
    size: int
    identity: Hashable

    @property
    def is_mapped(self) -> bool:
        """See the class."""
        return False

    def read(self, offset: int, size: int) -> bytes:
        """Reads `size` bytes from `offset`, fewer at the end of the file; returns a copy.

        Raises:
            OSError: The read failed; the error names the file.
        """
        raise NotImplementedError

    def read_ranges(self, ranges: Iterable[tuple[int, int]]) -> Iterator[memoryview]:
        """Reads ranges, each an offset and a size; a remote file reads several at a time.

        Yields:
            The bytes of each range, in the order of `ranges`.
        """
        return (memoryview(self.read(offset, size)) for offset, size in ranges)

    def pieces(self, offset: int, size: int) -> Iterator[bytes | memoryview]:
        """Reads `size` bytes from `offset`; yields copies of a few MiB at most.

        If the file is truncated meanwhile, fewer bytes are yielded. Access to a map would crash
        instead.
        """
        while size > 0:
            piece = self.read(offset, min(size, READ_SIZE))
            if not piece:
                return
            yield piece
            offset += len(piece)
            size -= len(piece)

    def reaching(self, end: int) -> memoryview:
        """A read-only view of a file that `is_mapped`, with at least the bytes up to `end`.

        Raises:
            ArchiveFormatError: The file was truncated to less than `end` bytes after opening.
        """
        raise NotImplementedError
