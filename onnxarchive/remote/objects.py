"""Reads objects at URLs and in stores by range, with few requests, several at once."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from functools import partial
from itertools import chain, islice, starmap

from onnxarchive.remote.background import as_completed, in_order, run
from onnxarchive.remote.failures import changed
from onnxarchive.remote.stores import Options, Origin, Store, Version, origin_of
from onnxarchive.storage.random_access import RandomAccessFile

END_SIZE = 128 << 10  # opening reads this many bytes at the end of an object
PART_SIZE = 8 << 20  # longer ranges are read in several requests, except by `hold`
# Ranges are read together if the gap between them is at most this many bytes.
GAP_SIZE = 256 << 10

Range = tuple[int, int]


def open_object(
    url_or_path: str, *, store: Store | None = None, storage_options: Options | None = None
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

    Raises:
        FileNotFoundError: There is no such object.
        ImportError: The library for the URL is missing.
        OSError: A request failed, or the server does not give ranges of bytes.
        PermissionError: The server refuses access.
        ValueError: An option is wrong.
    """
    origin = origin_of(url_or_path, store, storage_options)
    version, end = run(origin.name, partial(_open, origin))
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


async def _open(origin: Origin) -> tuple[Version, bytes]:
    found = await origin.end(END_SIZE)
    if found is not None:
        return found
    version = await origin.version()
    size = min(version.size, END_SIZE)
    if not size:
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
        validator: The object's strong ETag, or else its version; None if it has neither.
    """

    def __init__(self, origin: Origin, version: Version, end: bytes) -> None:
        """Represents `version` of the object at `origin`; `end` has the object's last bytes."""
        self.path = origin.name
        self.size = version.size
        self.validator = version.strong_etag or version.version
        self.identity = (origin.place, version)
        self._origin = origin
        self._version = version
        self._end = end
        self._end_offset = version.size - len(end)
        self._is_closed = False

    def close(self) -> None:
        """Releases the bytes in memory. Connections belong to the store and stay open."""
        self.release()
        self._is_closed = True

    def cache_key(self) -> str | None:
        """SHA-256 of place, validator and size.

        None without a validator, or if it is unknown which server gives the object.
        """
        if self.validator is None or not self._origin.is_known:
            return None
        text = "\n".join((self._origin.place, self.validator, str(self.size)))
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    def hold(self, offset: int) -> None:
        """Keeps the bytes from `offset` to the end in memory, read by one request at most."""
        if offset < self._end_offset:
            missing = run(self.path, partial(self._part, offset, self._end_offset - offset))[1]
            self._end, self._end_offset = missing + self._end, offset

    def release(self) -> None:
        """Drops the bytes kept in memory."""
        self._end, self._end_offset = b"", self.size

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

    def parts(self, ranges: Iterable[Range]) -> Iterator[tuple[int, memoryview]]:
        """Reads ranges in parts of at most 8 MiB, 12 at once.

        Yields:
            The offset and the bytes of each part, as soon as it is complete, in any order. Small
            gaps between ranges are included; no byte is yielded twice.
        """
        spans = _merged((offset, self._within(offset, size)) for offset, size in ranges)
        parts = chain.from_iterable(starmap(_parts, spans))
        requests = (partial(self._part, *it) for it in parts)
        with closing(as_completed(self.path, requests)) as arriving:
            for offset, body in arriving:
                yield offset, memoryview(body)

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
        return offset, await _read(self._origin, self._version, offset, size)

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


def _merged(ranges: Iterable[Range]) -> Iterator[Range]:
    """Merges ranges that overlap or are close to each other."""
    start = end = -1
    for offset, size in sorted(it for it in ranges if it[1]):
        if start >= 0 and offset <= end + GAP_SIZE:
            end = max(end, offset + size)
            continue
        if start >= 0:
            yield start, end - start
        start, end = offset, offset + size
    if start >= 0:
        yield start, end - start


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
