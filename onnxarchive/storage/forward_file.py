"""Reads a file from beginning to end, in one stream of requests."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator

from onnxarchive.storage.random_access import RandomAccessFile

_MAX_SKIPPED = 1 << 20  # bytes; a gap up to this size is read and dropped


class ForwardFile(RandomAccessFile):
    """Wraps a file for one thread that reads mostly by ascending offset.

    `pieces` and `read` take their bytes from one stream, which calls `pieces` of the wrapped file.
    After a step back or a large gap, `pieces` begins a new stream, and `read` reads from the
    wrapped file directly. `read_ranges` always reads directly. While an iteration over `pieces` is
    unfinished, all other calls read directly.
    """

    def __init__(self, file: RandomAccessFile, streams: Streams | None = None) -> None:
        """Wraps a file.

        Args:
            file: The file, closed together with this object.
            streams: Shared by files that are read alternately; None if this file is read alone.
        """
        self.path, self.size, self.identity = file.path, file.size, file.identity
        self._file = file
        self._streams = streams or Streams()
        self._stream: Iterator[bytes | memoryview] = iter(())
        self._rest = memoryview(b"")
        self._position = file.size
        self._is_yielding = False

    @property
    def mapped_file(self) -> RandomAccessFile | None:
        """The mapped file of the wrapped file."""
        return self._file.mapped_file

    def read(self, offset: int, size: int) -> bytes:
        """Reads `size` bytes from `offset`, fewer at the end of the file."""
        if 0 <= offset - self._position <= _MAX_SKIPPED and not self._is_yielding:
            return b"".join(self.pieces(offset, size))
        return self._file.read(offset, size)

    def pieces(self, offset: int, size: int) -> Iterator[memoryview]:
        """Yields `size` bytes from `offset` in pieces, fewer at the end of the file."""
        if self._is_yielding:  # a second iteration during the first, to compare two ranges
            for piece in self._file.pieces(offset, size):
                yield memoryview(piece)
            return
        self._is_yielding = True
        try:
            yield from self._continued(offset, size)
        finally:
            self._is_yielding = False

    def read_ranges(self, ranges: Iterable[tuple[int, int]]) -> Iterator[memoryview]:
        """Reads several ranges as the wrapped file does."""
        return self._file.read_ranges(ranges)

    def _continued(self, offset: int, size: int) -> Iterator[memoryview]:
        """Yields pieces of the present stream or of a new stream."""
        if not 0 <= offset - self._position <= _MAX_SKIPPED:
            self.stop()
            self._streams.begin(self)
            self._stream = self._stream_from(offset, max(size, self._file.first_size))
            self._position = offset
        skipped = offset - self._position
        while skipped and (piece := self._next(skipped)):
            skipped -= len(piece)
        while size and (piece := self._next(size)):
            size -= len(piece)
            if self._position == self.size:
                self.stop()
            yield piece

    def _stream_from(self, offset: int, size: int) -> Iterator[bytes | memoryview]:
        """Yields all bytes from `offset`. The first request has `size` bytes; sizes then double."""
        while offset < self.size:
            yield from self._file.pieces(offset, min(size, self.size - offset))
            offset += size
            size *= 2

    def _next(self, size: int) -> memoryview:
        """The stream's next piece, of at most `size` bytes; empty at the end of the stream."""
        if not self._rest:
            self._rest = memoryview(next(self._stream, b""))
        piece, self._rest = self._rest[:size], self._rest[size:]
        self._position += len(piece)
        return piece

    def hold(self, offset: int) -> None:
        """Keeps the end of the wrapped file in memory; see `RandomAccessFile.hold`."""
        self._file.hold(offset)

    def close(self) -> None:
        """Closes the wrapped file."""
        self.stop()
        self._file.close()

    def stop(self) -> None:
        """Ends the stream and frees its request and memory."""
        if isinstance(self._stream, Generator):
            self._stream.close()
        self._stream, self._rest = iter(()), memoryview(b"")
        self._position = self.size


class Streams:
    """The streams of files that are read alternately; few, since each holds many MiB."""

    _MOST = 2

    def __init__(self) -> None:
        self._files: list[ForwardFile] = []

    def begin(self, file: ForwardFile) -> None:
        """Adds a file's stream; keeps the newest two and any in use, and stops all others."""
        self._files = [*(it for it in self._files if it is not file), file]
        for other in self._files[: -self._MOST]:
            if not other._is_yielding:
                self._files.remove(other)
                other.stop()


def streamed(file: RandomAccessFile) -> RandomAccessFile:
    """The file itself if it is mapped, otherwise a `ForwardFile` around it."""
    return file if file.is_mapped else ForwardFile(file)
