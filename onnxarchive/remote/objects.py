"""Reads objects at URLs and in stores by range, with few requests, several at once."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator
from contextlib import aclosing, closing
from functools import partial
from itertools import chain, islice, starmap
from time import monotonic

from onnxarchive.remote.background import as_arriving, in_order, run
from onnxarchive.remote.failures import changed
from onnxarchive.remote.stores import Options, Origin, Store, Version, origin_of
from onnxarchive.storage.random_access import RandomAccessFile

END_SIZE = 128 << 10  # opening reads this many bytes at the end of an object
KEPT_SIZE = 32 << 20  # limit for the bytes of an object's end that stay in memory
PART_SIZE = 8 << 20  # longer ranges are read in several requests, except by `hold`
# Ranges are read together if the gap between them is at most this many bytes.
GAP_SIZE = 256 << 10
# Bytes of the pieces in which a part arrives: those of a fraction of a second, within limits.
_LEAST_PIECE, _MOST_PIECE, _PIECE_SECONDS = 16 << 10, 2 << 20, 0.2
_PAUSE = 0.2  # seconds after an error before the rest of a part is asked for

Range = tuple[int, int]


def open_object(
    url_or_path: str,
    *,
    store: Store | None = None,
    storage_options: Options | None = None,
    keeps_end: bool = True,
) -> RemoteFile:
    """Opens an object and reads its last 128 KiB, in one request.

    Some servers, such as Azure's, refuse requests for an object's last bytes: then one request gets
    the size, and another request gets the bytes. fsspec always makes these two requests, and a
    third request to detect changes.

    obstore follows redirects, also to other hosts and to this machine. If a web address has a user
    or a query, or if the client's options have headers, redirects to another scheme, host or port
    are refused, since they may send a secret to another server; one more request detects them.
    `allow_redirects` allows them.

    Reading takes bounded memory, with one exception: obstore reads the complete text of an answer
    with an error status, so a hostile server can exhaust the memory.

    Args:
        url_or_path: A URL, or the object's key in `store`. obstore reads `https`, `http`, `s3`,
            `gs` and `az`, fsspec all other schemes.
        store: A store of obstore.
        storage_options: Options of obstore or fsspec, among them credentials. For obstore, one
            mapping has the options of the store, the HTTP client (`timeout`) and the retries
            (`max_retries`), and `allow_redirects`, which may also be given with `store`.
        keeps_end: False to keep in memory only an object of at most 128 KiB.

    Raises:
        FileNotFoundError: There is no such object.
        ImportError: The library for the URL is missing.
        OSError: A request failed, or the server does not give ranges of bytes.
        PermissionError: The server refuses access.
        ValueError: An option is wrong.
    """
    file = open_origin(origin_of(url_or_path, store, storage_options))
    if not keeps_end:
        file.drop_end()
    return file


def open_origin(origin: Origin, known: Version | None = None) -> RemoteFile:
    """Opens an object as `open_object` does.

    Args:
        origin: The address of the object.
        known: A version of the object whose bytes are here. If the object still has its strong
            ETag, the server sends no bytes.
    """
    version, end = run(origin.name, partial(_open, origin, known))
    return RemoteFile(origin, version, end)


def has_object(
    url_or_path: str, *, store: Store | None = None, storage_options: Options | None = None
) -> bool:
    """True if the object exists; requests only its attributes. See `open_object`."""
    origin = origin_of(url_or_path, store, storage_options)
    try:
        run(origin.name, origin.version)
    except FileNotFoundError:
        return False
    return True


async def _open(origin: Origin, known: Version | None) -> tuple[Version, bytes]:
    found = await origin.end(END_SIZE, known)
    if found is not None:
        return found
    version = await origin.version()
    size = min(version.size, END_SIZE)
    if not size or version == known:
        return version, b""
    return version, await _read(origin, version, version.size - size, size)


async def _read(origin: Origin, version: Version, offset: int, size: int) -> bytes:
    """Reads bytes of the object; refuses another version."""
    found, body = await origin.get(offset, size, version)
    if found != version:
        raise changed(origin.name)
    return body


class RemoteFile(RandomAccessFile):
    """An object, read by range. The object's last bytes are kept in memory.

    ETag, size and version in every answer are compared with those in the first answer; so is the
    modification time, unless obstore reads an object with a strong ETag. If the ETag is strong,
    obstore's requests carry the ETag (`If-Match`). If a server sends no ETag, no version and no
    time, only a change of the size is noticed. File systems of fsspec are asked for the attributes
    again after each part.

    Attributes:
        version: The version of the object that is read.
        validator: The object's strong ETag, or else its version; None if it has neither.
    """

    def __init__(self, origin: Origin, version: Version, end: bytes) -> None:
        """Represents `version` of the object at `origin`; `end` has the object's last bytes."""
        self.path = origin.name
        self.size = version.size
        self.validator = version.strong_etag or version.version
        self.identity = (origin.place, version)
        self._origin = origin
        self.version = version
        self._end = end
        self._end_offset = version.size - len(end)
        self._is_closed = False
        self._piece_size = _LEAST_PIECE

    def close(self) -> None:
        """Releases the bytes in memory. Connections belong to the store and stay open."""
        self._end, self._end_offset = b"", self.size
        self._is_closed = True

    def drop_end(self) -> None:
        """Keeps no bytes in memory, unless the object has at most 128 KiB."""
        if self.size > END_SIZE:
            self._end, self._end_offset = b"", self.size

    def cache_key(self) -> str | None:
        """SHA-256 of place, validator and size.

        None without a validator, or if it is unknown which server gives the object.
        """
        if self.validator is None or not self._origin.is_known:
            return None
        text = "\n".join((self._origin.place, self.validator, str(self.size)))
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    def hold(self, offset: int) -> None:
        """Keeps the bytes from `offset` to the end in memory, unless they are over 32 MiB."""
        if self.size - KEPT_SIZE <= offset < self._end_offset:
            missing = run(self.path, partial(self._part, offset, self._end_offset - offset))[1]
            self._end, self._end_offset = missing + self._end, offset

    def read(self, offset: int, size: int) -> bytes:
        """Reads `size` bytes from `offset`, fewer at the end of the object.

        If the bytes are kept in memory, no request is made. Up to 8 MiB are read by one request,
        more by several requests.

        Raises:
            ObjectChangedError: The object has changed since it was opened.
            OSError: A request failed.
        """
        size = self._within(offset, size)
        if not size or offset >= self._end_offset:
            return self._held(offset, size)
        if size <= PART_SIZE:
            return run(self.path, partial(self._part, offset, size))[1]
        return b"".join(self.stream(offset, size))

    def read_ranges(self, ranges: Iterable[Range]) -> Iterator[memoryview]:
        """Reads several ranges, 12 parts at once; one request reads ranges close to each other.

        Yields:
            The bytes of each range, in the order of `ranges`.
        """
        groups = list(_groups((offset, self._within(offset, size)) for offset, size in ranges))
        parts = [list(_parts(offset, size)) for offset, size, _ in groups]
        with closing(self._in_order(chain.from_iterable(parts))) as arriving:
            for (start, _, members), own in zip(groups, parts, strict=True):
                bodies = [body for _, body in islice(arriving, len(own))]
                body = memoryview(bodies[0] if len(bodies) == 1 else b"".join(bodies))
                for offset, size in members:
                    yield body[offset - start : offset - start + size]

    def arriving(self, ranges: Iterable[Range]) -> Generator[tuple[int, bytes]]:
        """Reads ranges in parts of at most 8 MiB, 12 at once.

        Yields:
            Offset and bytes of each piece as soon as it arrives, in any order.
        """
        ends = ((offset, self._within(offset, size)) for offset, size in ranges)
        parts = chain.from_iterable(starmap(_parts, chain.from_iterable(map(self._cut, ends))))
        return as_arriving(self.path, (partial(self._arriving, *it) for it in parts))

    def _cut(self, span: Range) -> Iterator[Range]:
        """Cuts a range in two where the bytes begin that are kept in memory."""
        offset, size = span
        ahead = max(0, min(size, self._end_offset - offset))
        yield offset, ahead
        yield offset + ahead, size - ahead

    async def _arriving(self, offset: int, size: int) -> AsyncGenerator[tuple[int, bytes], None]:
        """Yields the pieces of a part; after an error, asks again for what has not arrived."""
        import asyncio

        end = offset + size
        if offset >= self._end_offset:
            yield offset, self._held(offset, size)
            return
        while offset < end:
            start, begin = offset, monotonic()
            stream = self._origin.stream(offset, end - offset, self.version, self._piece_size)
            try:
                async with aclosing(stream):
                    async for piece in stream:
                        yield offset, piece
                        offset += len(piece)
            except OSError:
                if offset == start:
                    raise
                await asyncio.sleep(_PAUSE)
            rate = (offset - start) / max(monotonic() - begin, 1e-6)
            self._piece_size = min(max(int(rate * _PIECE_SECONDS), _LEAST_PIECE), _MOST_PIECE)

    def stream(self, offset: int, size: int) -> Iterator[memoryview]:
        """Yields `size` bytes from `offset` in order; reads 12 parts of up to 8 MiB at once."""
        parts = _parts(offset, self._within(offset, size))
        with closing(self._in_order(parts)) as arriving:
            for _, body in arriving:
                yield memoryview(body)

    pieces = stream

    def _in_order(self, parts: Iterable[Range]) -> Generator[tuple[int, bytes]]:
        return in_order(self.path, (partial(self._part, *it) for it in parts))

    async def _part(self, offset: int, size: int) -> tuple[int, bytes]:
        if offset >= self._end_offset:
            return offset, self._held(offset, size)
        return offset, await _read(self._origin, self.version, offset, size)

    def _held(self, offset: int, size: int) -> bytes:
        start = max(0, offset - self._end_offset)
        return self._end[start : start + size]

    def _within(self, offset: int, size: int) -> int:
        """`size`, limited to the bytes after `offset` in the object; refuses a closed file."""
        if self._is_closed:
            raise ValueError(f"{self.path}: the file is closed")
        return max(0, min(size, self.size - offset))


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
