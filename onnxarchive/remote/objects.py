"""Reads objects at URLs and in stores by range, with few requests, several at once."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator
from contextlib import aclosing, closing, suppress
from functools import partial
from itertools import chain, islice
from math import inf
from threading import Lock
from time import monotonic
from typing import ClassVar
from weakref import ref

from onnxarchive.files.data import File
from onnxarchive.remote.background import IN_FLIGHT, SECONDS_AHEAD, in_order, run, run_streams
from onnxarchive.remote.failures import NoRangesError, StalledError
from onnxarchive.remote.origins import Origin, Version

END_SIZE = 128 << 10  # opening reads this many bytes at the end of an object
MAX_KEPT_NBYTES = 32 << 20  # limit for the bytes of an object's end that stay in memory
_LEAD = 4 << 10  # bytes before those that are read at the end: there may be a local header
_FIRST_AHEAD = 1 << 20  # least size of a stream's first request
_MAX_SKIPPED = 1 << 20  # bytes; a gap up to this size is read and dropped
PART_SIZE = 8 << 20  # longer ranges are read in several requests
# Ranges are read together if the gap between them is at most this many bytes.
GAP_SIZE = 256 << 10
# Bytes of the pieces in which a part arrives: those of a fraction of a second, within limits.
_LEAST_PIECE, _MOST_PIECE, _PIECE_SECONDS = 16 << 10, 2 << 20, 0.2
_SLOW = 128 << 10  # bytes a second
_MEASURED = 0.5  # seconds after which the rate of a transfer is known
_PAUSE = 0.2  # seconds after an error before the rest of a part is asked for

Range = tuple[int, int]


class RemoteFile(File):
    """An object, read by range. The end of the object is read first and stays in memory.

    `pieces` of successive ranges come from one stream of requests, which reads ahead: at first 1
    MiB, and each time twice as much, at most 12 parts at once.

    ETag, size and version in every answer are compared with those in the first answer; so is the
    modification time, unless obstore reads an object with a strong ETag. If the ETag is strong,
    obstore's requests carry the ETag (`If-Match`). If a server sends no ETag, no version and no
    time, only a change of the size is noticed. For files of fsspec, the attributes are requested
    again after each part.

    Attributes:
        version: The version of the object that is read.
    """

    is_remote = True
    _streaming: ClassVar[list[ref[RemoteFile]]] = []  # the files that began to read ahead last

    def __init__(
        self, origin: Origin, known: Version | None = None, *, keeps_end: bool = True
    ) -> None:
        """Opens an object and reads its last 128 KiB, in one request.

        Some servers, such as Azure's, refuse requests for an object's last bytes: then one request
        gets the size, and another one the bytes. fsspec always makes these two, and a third one to
        detect changes. What `refuse_redirects` asks is one more request.

        Reading takes bounded memory, with one exception: obstore reads the complete text of an
        answer with an error status, so a hostile server can exhaust the memory.

        Args:
            origin: The object.
            known: A version. If the object still has its strong ETag, the server sends no bytes.
            keeps_end: False to keep in memory only an object of at most 128 KiB.

        Raises:
            OSError: A request failed, or the server does not give ranges of bytes.
        """
        begin = monotonic()
        version, end = run(origin.name, partial(origin.open, END_SIZE, known))
        # A small rate is that of the line; a larger one is mostly the line's latency.
        rate = len(end) / max(monotonic() - begin, 1e-6)
        self._rate = rate if rate < _SLOW else inf
        self.path = origin.name
        self.size = version.size
        self.version = version
        self.identity = (origin.identity, version)
        self._origin = origin
        self._most_kept = MAX_KEPT_NBYTES if keeps_end else 0
        is_kept = keeps_end or len(end) == version.size
        self._end = (version.size - len(end), end) if is_kept else (version.size, b"")
        self._is_closed = False
        self._piece_size = _LEAST_PIECE
        self._in_use = Lock()  # of the stream
        self._stream: Generator[bytes] | None = None
        self._rest = memoryview(b"")  # the bytes from `_position` that have arrived
        self._position = version.size

    @property
    def is_closed(self) -> bool:
        """See `File.is_closed`."""
        return self._is_closed

    def close(self) -> None:
        """Releases the bytes in memory. Connections belong to the store and stay open."""
        self._is_closed = True
        self._end = self.size, b""
        self._stop()

    def cache_key(self) -> str | None:
        """SHA-256 of identity, validator and size.

        None without a validator, or if it is unknown which server gives the object.
        """
        return _cache_key(self._origin, self.version)

    def read(self, offset: int, size: int) -> bytes:
        """Reads `size` bytes from `offset`, fewer at the end of the object.

        If the bytes are kept in memory, no request is made. Up to 8 MiB are read by one request,
        more by several requests. Bytes that lead to those in memory stay there, too.

        Raises:
            ObjectChangedError: The object has changed since it was opened.
            OSError: A request failed.
        """
        size = self._clipped(offset, size)
        if 0 <= offset - self._position <= _MAX_SKIPPED and not self._in_use.locked():
            return b"".join(self.pieces(offset, size))
        begin, end = self._end
        if size and offset < begin <= offset + size + GAP_SIZE:
            first = max(0, min(offset - _LEAD, begin - len(end)))
            if self.size - first <= self._most_kept:
                missing = run(self.path, partial(self._part, first, begin - first))
                self._end = first, missing + end
        return b"".join(self._read_parts(offset, size))

    def pieces(self, offset: int, size: int) -> Iterator[bytes | memoryview]:
        """Yields `size` bytes from `offset` in order, fewer at the end; see the class."""
        size = self._clipped(offset, size)
        # A second iteration during the first, as to compare two ranges, does not read ahead.
        if offset < self._end[0] and self._in_use.acquire(blocking=False):
            try:
                yield from self._read_stream(offset, size)
            except BaseException:  # also if the iterator is closed before its end
                self._stop()
                raise
            finally:
                self._in_use.release()
        else:
            yield from self._read_parts(offset, size)

    def _read_stream(self, offset: int, size: int) -> Iterator[memoryview]:
        """Yields pieces of the present stream or of a new one."""
        if not 0 <= offset - self._position <= _MAX_SKIPPED:
            self._stop()
            self._begin(offset, size)
        skipped = offset - self._position
        while skipped and (piece := self._next(skipped)):
            skipped -= len(piece)
        while size and (piece := self._next(size)):
            size -= len(piece)
            if self._position == self.size:
                self._stop()
            yield piece

    def _begin(self, offset: int, size: int) -> None:
        """Begins a stream; keeps the last one of another file, and any in use, and stops others."""
        others = [file for file in RemoteFile._streaming if file() not in (None, self)]
        for reference in others[:-1]:
            if (file := reference()) is not None:
                file.stop_reading_ahead()
        RemoteFile._streaming = [*others[-1:], ref(self)]
        self._stream, self._position = self._read_ahead(offset, max(size, _FIRST_AHEAD)), offset

    def stop_reading_ahead(self) -> None:
        """Ends the stream, unless a thread reads from it."""
        if self._in_use.acquire(blocking=False):
            self._stop()
            self._in_use.release()

    def _read_ahead(self, offset: int, size: int) -> Generator[bytes]:
        """Yields all bytes from `offset`: first `size` bytes, then twice as many each time."""
        while offset < self.size:
            yield from self._in_order(_parts(offset, min(size, self.size - offset)))
            offset += size
            size *= 2

    def _next(self, size: int) -> memoryview:
        """The stream's next piece, of at most `size` bytes; empty at the end of the stream."""
        if not self._rest and self._stream is not None:
            self._rest = memoryview(next(self._stream, b""))
        piece, self._rest = self._rest[:size], self._rest[size:]
        self._position += len(piece)
        return piece

    def _stop(self) -> None:
        """Ends the stream, and frees its requests and memory."""
        stream, self._stream, self._rest = self._stream, None, memoryview(b"")
        self._position = self.size
        if stream is not None:
            with suppress(ValueError):  # another thread closes the file during a read
                stream.close()

    def read_ranges(self, ranges: Iterable[Range]) -> Iterator[memoryview]:
        """Reads several ranges, 12 parts at once; one request reads ranges close to each other.

        Yields:
            The bytes of each range, in the order of `ranges`.
        """
        groups = list(_groups((offset, self._clipped(offset, size)) for offset, size in ranges))
        parts = [list(_parts(offset, size)) for offset, size, _ in groups]
        with closing(self._in_order(chain.from_iterable(parts))) as arriving:
            for (start, _, members), group_parts in zip(groups, parts, strict=True):
                body = memoryview(b"".join(islice(arriving, len(group_parts))))
                for offset, size in members:
                    yield body[offset - start : offset - start + size]

    def stream_ranges(self, ranges: Iterable[Range]) -> Generator[tuple[int, bytes]]:
        """Reads ranges in parts of at most 8 MiB, 2 to 12 at once, by the rate that is seen.

        Yields:
            Offset and bytes of each piece as soon as it arrives, in any order.
        """
        parts = [
            part for offset, size in ranges for part in _parts(offset, self._clipped(offset, size))
        ]
        begin, nbytes = monotonic(), 0

        def most() -> int:
            if (elapsed := monotonic() - begin) > _MEASURED:
                self._rate = nbytes / elapsed
            return int(max(2, min(self._rate * SECONDS_AHEAD / PART_SIZE, IN_FLIGHT)))

        streams = (partial(self._stream_part, *part) for part in parts)
        with closing(run_streams(self.path, streams, most)) as pieces:
            for offset, piece in pieces:
                nbytes += len(piece)
                yield offset, piece

    async def _stream_part(self, offset: int, size: int) -> AsyncGenerator[tuple[int, bytes], None]:
        """Yields the pieces of a part; after an error, asks again for what has not arrived."""
        end = offset + size
        missing_end = min(end, self._end[0])  # the other bytes are in memory
        while offset < missing_end:
            start, begin, least = offset, monotonic(), self._piece_size
            stream = self._origin.stream(offset, missing_end - offset, self.version, least)
            try:
                async with aclosing(stream):
                    async for piece in stream:
                        yield offset, piece
                        offset += len(piece)
            except OSError as error:
                may_be_slow = isinstance(error, StalledError) and least > _LEAST_PIECE
                if offset == start and not may_be_slow:
                    raise
                await asyncio.sleep(_PAUSE)
            rate = (offset - start) / max(monotonic() - begin, 1e-6)
            self._piece_size = min(max(int(rate * _PIECE_SECONDS), _LEAST_PIECE), _MOST_PIECE)
        if offset < end:
            yield offset, self._from_end(offset, end - offset)

    def _read_parts(self, offset: int, size: int) -> Iterable[bytes]:
        """The bytes of a range, without reading ahead: in memory, or in parts."""
        if offset >= self._end[0]:
            return [self._from_end(offset, size)]
        return self._in_order(_parts(offset, size))

    def _in_order(self, parts: Iterable[Range]) -> Generator[bytes]:
        """Yields the bytes of parts in order; reads 12 at once."""
        return in_order(self.path, (partial(self._part, *part) for part in parts))

    async def _part(self, offset: int, size: int) -> bytes:
        return b"".join([piece async for _, piece in self._stream_part(offset, size)])

    def _from_end(self, offset: int, size: int) -> bytes:
        begin, end = self._end
        start = max(0, offset - begin)
        return end[start : start + size]

    def _clipped(self, offset: int, size: int) -> int:
        """`size`, limited to the bytes after `offset` in the object; refuses a closed file."""
        if self._is_closed:
            raise ValueError(f"{self.path}: the file is closed")
        return max(0, min(size, self.size - offset))


class WholeObject:
    """An object of a server without ranges: its bytes come in one stream, in order.

    Attributes:
        path: The object's name for messages.
        size: The size in bytes.
        version: The version of the object that is read.
    """

    def __init__(self, origin: Origin) -> None:
        """Asks for the size and the version of an object, by one request.

        Raises:
            OSError: The request failed, or the server states no size.
        """
        self.path = origin.name
        self.version = run(origin.name, origin.version)
        self.size = self.version.size
        self._origin = origin

    def close(self) -> None:
        """Does nothing: connections belong to the store and stay open."""

    def cache_key(self) -> str | None:
        """As `RemoteFile.cache_key`."""
        return _cache_key(self._origin, self.version)

    def stream(self) -> Generator[bytes]:
        """Yields all bytes in order.

        Raises:
            ObjectChangedError: The object has changed since its size was asked for.
            OSError: The request failed.
        """
        whole = partial(self._origin.whole, self.version, _MOST_PIECE)
        return run_streams(self.path, [whole], lambda: 1)


def open_to_download(origin: Origin) -> RemoteFile | WholeObject:
    """Opens an object of which all bytes are wanted, also of a server without ranges."""
    with suppress(NoRangesError):
        return RemoteFile(origin)
    return WholeObject(origin)


def _cache_key(origin: Origin, version: Version) -> str | None:
    """SHA-256 of identity, validator and size; None if one of the first two is unknown."""
    validator = version.validator
    if validator is None or not origin.is_lasting:
        return None
    text = "\n".join((origin.identity, validator, str(version.size)))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _parts(offset: int, size: int) -> Iterator[Range]:
    """Cuts a range into parts of about the same size."""
    count = -(-size // PART_SIZE)
    for number in range(count):
        start, end = size * number // count, size * (number + 1) // count
        yield offset + start, end - start


def _groups(ranges: Iterable[Range]) -> Iterator[tuple[int, int, list[Range]]]:
    """Groups successive ranges that one request of `PART_SIZE` bytes can read together.

    Yields:
        For each group: the offset, the size, and the ranges in the group.
    """
    members: list[Range] = []
    start = end = 0
    for offset, size in ranges:
        is_near = start <= offset <= end + GAP_SIZE and offset + size <= start + PART_SIZE
        if members and not is_near:
            yield start, end - start, members
            members = []
        if not members:
            start = end = offset
        members.append((offset, size))
        end = max(end, offset + size)
    if members:
        yield start, end - start, members
