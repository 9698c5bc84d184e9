"""Writes objects to URLs and stores. An object appears only when it is complete."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from time import monotonic, sleep
from typing import Any, TypeAlias
from weakref import ref

from onnxarchive.errors import UnsupportedFeatureError
from onnxarchive.files.data import Buffer, Closing, as_bytes, pieces
from onnxarchive.files.locking import OfOneProcess
from onnxarchive.remote.background import SECONDS_AHEAD, start_thread
from onnxarchive.remote.failures import call_library, failure
from onnxarchive.remote.stores import open_file_system, open_store, split_options
from onnxarchive.remote.urls import Address, Store

_MIB = 1 << 20
_LEAST_PART = 8 * _MIB
_MOST_PARTS = 10_000  # of an object in S3 and in Google Cloud Storage
_IN_FLIGHT_SIZE = 96 * _MIB  # limit for the parts sent at once, if two are not larger
_MOST_AT_ONCE = 16  # more parts than are sent at once
_SLOWER = 8  # a connection may become this many times slower
_SLOWEST = 16 << 10  # bytes a second of any connection, also before the first part has arrived
_COMPLETION = 600.0  # seconds in which a store makes the object of its parts
_PAUSE = 0.005  # seconds between two looks at the parts under way
_WAIT = 1.5  # seconds that closing waits for the end of an upload


def create_object(address: Address, size: int) -> ObjectWriter:
    """Begins to write an object of `size` bytes.

    `commit` makes it appear, and replaces an older object; closing the writer without `commit`
    discards it. A killed process may leave parts of an upload in the store. Listings do not show
    these parts; a bucket rule can remove them ("abort incomplete multipart uploads").

    Methods of the writer raise an OSError if a request failed, or the upload stalls. Then nothing
    has changed, unless the server's answer to `commit` was lost. In a fork of this process, they
    raise an ArchiveError, except with fsspec.

    Raises:
        UnsupportedFeatureError: The URL is a web address, the URL or key would be that of another
            object, or the file system may show incomplete files.
    """
    address.require_key()
    if not address.is_of_store:
        return _FileSystemWriter(*open_file_system(address), address.name)
    address.require_no_web("to write to")
    store, key = open_store(address, is_read=False)
    return _StoreWriter(store, key, address.name, size, split_options(address)[1])


class _Part(bytearray):
    """Data of a part. obstore does not copy it, so it is alive while it is being sent."""


class _StoreWriter(Closing):
    """Sends parts, all but the last of equal size, several at once, from a background thread.

    obstore aborts an upload only when it asks for the next part, and then at once. So it gets only
    as many parts as it sends at once, and `close` need not wait for the end of a part.
    """

    def __init__(self, store: Store, key: str, name: str, size: int, stall: float) -> None:
        self.path = name
        self._size, self._stall = size, stall
        self._part_size = max(_LEAST_PART, -(-size // _MOST_PARTS // _MIB) * _MIB)
        self._part = _Part()
        self._parts: SimpleQueue[_Part | None] = SimpleQueue()  # for obstore; None ends them
        self._begun, self._begin = 0, monotonic()  # bytes that obstore got, and since when
        self._under_way: list[ref[_Part]] = []
        self._keeps_parts = type(store).__name__ == "MemoryStore"
        self._is_complete = False
        self._problem: Exception | None = None
        self._work = OfOneProcess()
        self._thread = start_thread(name, self._send, store, key)

    def write(self, data: Buffer) -> int:
        """Collects data for the next part, and sends full parts; `data` may be reused at once."""
        self._work.refuse_fork()  # a fork has no sending thread
        view = as_bytes(data)
        start = 0
        while start < len(view):
            room = self._part_size - len(self._part)
            self._part += view[start : start + room]
            start += room
            if len(self._part) == self._part_size:
                self._pass_on()
        return len(view)

    def commit(self) -> None:
        """Sends the last part and waits until the store has created the object."""
        self._work.refuse_fork()
        if self._part:
            self._pass_on()
        # obstore sends a part that is not full when it knows that it is the last one.
        self._until(lambda: self._nbytes_under_way() <= self._part_size)
        self._is_complete = True
        self._parts.put(None)
        self._until(lambda: not self._thread.is_alive())

    def close(self) -> None:
        """Discards the object, unless it is complete.

        If the store does not answer soon, its parts may stay there.
        """
        if self._thread.is_alive():
            self._is_complete = False
            self._parts.put(None)
            self._thread.join(_WAIT)

    def _pass_on(self) -> None:
        """Gives the part to obstore when few enough are under way, by the rate so far."""
        self._until(self._has_room)
        part, self._part = self._part, _Part()
        if not self._keeps_parts:
            self._under_way = [it for it in self._under_way if it() is not None] + [ref(part)]
            self._begun += len(part)
        self._parts.put(part)

    def _has_room(self) -> bool:
        under_way = self._nbytes_under_way()
        most = max(_IN_FLIGHT_SIZE, 2 * self._part_size)
        ahead = min(self._rate(under_way) * SECONDS_AHEAD, most)
        return under_way <= max(0, ahead - self._part_size)

    def _until(self, is_done: Callable[[], bool]) -> None:
        """Waits for obstore.

        Raises:
            OSError: The upload has failed, or stalls: no part has arrived for too long.
        """
        sent, since = -1, monotonic()
        while self._problem is None and not is_done():
            under_way = self._nbytes_under_way()
            if self._begun - under_way != sent:
                sent, since = self._begun - under_way, monotonic()
            elif (seconds := monotonic() - since) > self._limit(under_way):
                self.close()
                raise OSError(
                    errno.ETIMEDOUT,
                    f"the upload stalls: {sent} of {self._size} bytes have arrived, and of "
                    f"{under_way} under way none has for {seconds:.0f} seconds; stall_timeout in "
                    "storage_options allows more",
                    self.path,
                )
            sleep(_PAUSE)
        if self._problem is not None:
            raise self._problem

    def _limit(self, under_way: int) -> float:
        """Seconds within which one of the parts that are under way has to arrive.

        The parts share the connection, so all of them may arrive only at the end of their common
        time.
        """
        if not under_way:
            return max(self._stall, _COMPLETION)
        return self._stall + under_way / max(self._rate(under_way) / _SLOWER, _SLOWEST)

    def _rate(self, under_way: int) -> float:
        """Bytes a second so far; 0 before the first part has arrived."""
        return (self._begun - under_way) / max(monotonic() - self._begin, 1e-6)

    def _nbytes_under_way(self) -> int:
        """Bytes of the parts that are being sent; 0 if the store keeps the parts."""
        parts = [part() for part in self._under_way]
        return sum(len(part) for part in parts if part is not None)

    def _send(self, store: Store, key: str) -> None:
        import obstore

        size, count = self._part_size, _MOST_AT_ONCE
        try:
            obstore.put(store, key, self._taken(), chunk_size=size, max_concurrency=count)
        except _GivenUpError:
            pass
        except BaseException as error:  # a panic of obstore is no Exception
            self._problem = failure(error, self.path)

    def _taken(self) -> Iterator[_Part]:
        """Yields parts; obstore aborts the upload if this raises."""
        while (part := self._parts.get()) is not None:
            yield part
            del part
        if not self._is_complete:
            raise _GivenUpError


class _GivenUpError(Exception):
    """The writer was closed before `commit`."""


class _FileSystemWriter(Closing):
    """Writes a file through fsspec; the file appears when it is committed."""

    def __init__(self, system: Any, path: str, name: str) -> None:
        from fsspec.spec import AbstractBufferedFile

        self.path = name

        def open_file() -> Any:
            # In a transaction, a file appears only after `commit`, if the file's class supports it.
            with suppress(NotImplementedError):
                system.start_transaction()
                return system.open(path, "wb")
            return None

        self._file = call_library(name, open_file)
        if getattr(type(self._file), "commit", None) in (None, AbstractBufferedFile.commit):
            if self._file is not None:
                # A file whose class has no `commit` of its own may appear when it is closed. The
                # garbage collector would close it, unless `closed` is set.
                self._file.closed = True
            command = " ('hf upload')" if name.startswith("hf://") else ""
            raise UnsupportedFeatureError(
                f"in a {type(system).__name__}, files may appear before they are complete; "
                f"write a local file, and upload it{command}",
                path=name,
            )

    def write(self, data: Buffer) -> int:
        call_library(self.path, lambda: self._file.writelines(pieces(data)))
        return len(as_bytes(data))

    def commit(self) -> None:
        """Closes the file and moves it to its final path."""
        file = self._file
        call_library(self.path, file.close)
        call_library(self.path, file.commit)
        self._file = None

    def close(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        try:
            call_library(self.path, file.close)
        finally:
            call_library(self.path, file.discard)


ObjectWriter: TypeAlias = _StoreWriter | _FileSystemWriter
