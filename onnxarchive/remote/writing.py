"""Writes objects to URLs and stores. An object appears only when it is complete."""

from __future__ import annotations

from contextlib import suppress
from queue import Empty, Queue, SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any
from weakref import finalize

from onnxarchive.errors import UnsupportedFeatureError, with_path
from onnxarchive.files.data import Buffer, as_bytes, pieces
from onnxarchive.files.file import Closing
from onnxarchive.files.locking import Work
from onnxarchive.remote.background import SECONDS_AHEAD, start_thread
from onnxarchive.remote.failures import attempt, failure
from onnxarchive.remote.stores import (
    Options,
    Store,
    is_of_store,
    is_web,
    open_file_system,
    open_store,
    require_key,
)
from onnxarchive.remote.urls import shown_url

if TYPE_CHECKING:
    from collections.abc import Iterator

_MIB = 1 << 20
_LEAST_PART = 8 * _MIB
_PART_OF_UNKNOWN = 32 * _MIB  # for an object of unknown size: enough for 320 GB
_MOST_PARTS = 10_000  # of an object in S3 and in Google Cloud Storage
_WAIT = 1.5  # seconds that closing waits for the end of an upload
_IN_FLIGHT_SIZE = 96 * _MIB  # limit for the parts sent at once; two are sent in any case
_MOST_AT_ONCE = 16  # more parts than are sent at once


class ObjectWriter(Closing):
    """An object that is being written. Closing the writer before `commit` discards the object.

    A killed process may leave parts of an upload in the store. Listings do not show these parts; a
    bucket rule can remove them ("abort incomplete multipart uploads").

    Attributes:
        path: The object's name for messages: the URL without credentials, or the key.
    """

    path: str

    def write(self, data: Buffer) -> int:
        """Writes all of `data` and returns its size in bytes; `data` may be reused at once.

        Raises:
            ArchiveError: This process is a fork of the process that began to write; not checked
                with fsspec.
            OSError: A request failed; nothing will appear.
        """
        raise NotImplementedError

    def commit(self) -> None:
        """Makes the object appear; replaces an older object.

        Raises:
            ArchiveError: As for `write`.
            OSError: A request failed. Nothing has changed, unless the server's answer was lost.
        """
        raise NotImplementedError


def create_object(
    url_or_path: str,
    size: int | None = None,
    *,
    store: Store | None = None,
    storage_options: Options | None = None,
) -> ObjectWriter:
    """Begins to write an object of `size` bytes, or of an unknown size; see `open_object`.

    Raises:
        UnsupportedFeatureError: The URL is a web address, the URL or key would be that of another
            object, or the file system may show incomplete files.
    """
    require_key(url_or_path, store)
    if is_of_store(url_or_path, store):
        name = shown_url(url_or_path) if store is None else url_or_path
        if is_web(url_or_path, store):
            with with_path(name):
                raise UnsupportedFeatureError(
                    "expected the URL of a store to write to, such as s3://, gs:// or az://, found "
                    "a web address"
                )
        opened, key = open_store(url_or_path, store, storage_options, is_read=False)
        return _StoreWriter(opened, key, name, size)
    system, path = open_file_system(url_or_path, storage_options)
    return _FileSystemWriter(system, path, shown_url(url_or_path))


class _Part(bytearray):
    """Data of a part. obstore does not copy it, so a weak reference shows when it is sent."""


class _StoreWriter(ObjectWriter):
    """Sends parts, all but the last of equal size, several at once, from a background thread.

    obstore aborts an upload only when it asks for a part, and then at once. So it is given no more
    parts than it sends at once, and close() need not wait for the end of a part.
    """

    def __init__(self, store: Store, key: str, name: str, size: int | None) -> None:
        self.path = name
        least = _PART_OF_UNKNOWN if size is None else -(-size // _MOST_PARTS)
        self._part_size = max(_LEAST_PART, -(-least // _MIB) * _MIB)
        self._part = _Part()
        self._parts: Queue[_Part | None] = Queue(1)
        self._sent: SimpleQueue[int] = SimpleQueue()  # sizes of parts, and 0 by `close`
        self._is_complete = self._is_ended = False
        self._problem: Exception | None = None
        self._work = Work()
        self._thread = start_thread(name, self._send, store, key)

    def write(self, data: Buffer) -> int:
        """Collects data for the next part, and sends full parts."""
        self._work.require_own()  # a fork has no sending thread
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
        self._work.require_own()
        if self._part:
            self._pass_on()
        self._is_complete = True
        self._parts.put(None)
        self._thread.join()
        if self._problem is not None:
            raise self._problem

    def close(self) -> None:
        """Discards the object, unless it is complete.

        If the store does not answer soon, its parts may stay there.
        """
        if self._thread.is_alive():
            self._is_complete = False
            self._sent.put(0)
            with suppress(Empty):  # the part that is next
                self._parts.get_nowait()
            self._parts.put(None)
            self._thread.join(_WAIT)

    def _pass_on(self) -> None:
        if self._problem is not None:
            raise self._problem
        part, self._part = self._part, _Part()
        self._parts.put(part)

    def _send(self, store: Store, key: str) -> None:
        import obstore

        try:
            # obstore aborts the upload if the iterator raises.
            parts = self._taken(type(store).__name__ != "MemoryStore")  # which keeps the parts
            obstore.put(
                store, key, parts, chunk_size=self._part_size, max_concurrency=_MOST_AT_ONCE
            )
        except _AbandonedError:
            pass
        except BaseException as error:  # a panic of obstore is no Exception
            self._problem = failure(error, self.path)
            while not self._is_ended:  # `_pass_on` and `close` wait if the queue is full
                self._take()

    def _taken(self, sends: bool) -> Iterator[_Part]:
        """Yields parts, each when few enough are under way, unless the store is in memory."""
        begin, sent, begun = monotonic(), 0, 0
        while (part := self._take()) is not None:
            if sends:
                finalize(part, self._sent.put, len(part))
                begun += len(part)
            yield part
            del part
            while begun - sent > self._most_under_way(sent / max(monotonic() - begin, 1e-6)):
                sent += self._next_sent()
        while begun - sent > self._part_size:  # obstore sends the last one after this
            sent += self._next_sent()
        if not self._is_complete:
            raise _AbandonedError

    def _most_under_way(self, rate: float) -> float:
        """Bytes that may be under way when the next part is asked for, by the rate so far."""
        return max(self._part_size, min(rate * SECONDS_AHEAD, _IN_FLIGHT_SIZE - self._part_size))

    def _next_sent(self) -> int:
        if not (nbytes := self._sent.get()):
            raise _AbandonedError
        return nbytes

    def _take(self) -> _Part | None:
        part = self._parts.get()
        self._is_ended = part is None
        return part


class _AbandonedError(Exception):
    """The writer was closed before `commit`."""


class _FileSystemWriter(ObjectWriter):
    """Writes a file through fsspec; the file appears when it is committed."""

    def __init__(self, system: Any, path: str, name: str) -> None:
        from fsspec.spec import AbstractBufferedFile

        self.path = name

        def opened() -> Any:
            # In a transaction, a file appears only after `commit`, if the file's class supports it.
            with suppress(NotImplementedError):
                system.start_transaction()
                return system.open(path, "wb")
            return None

        self._file = attempt(name, opened)
        if self._file is None:
            command = " ('hf upload')" * name.startswith("hf://")
            raise UnsupportedFeatureError(
                f"{name}: expected a file system that writes one complete file, found "
                f"{type(system).__name__}; write a local file, and upload it{command}"
            )
        kind = type(self._file)
        if getattr(kind, "commit", None) in (None, AbstractBufferedFile.commit):
            # A file whose class has no `commit` of its own may appear when the file is closed. The
            # garbage collector would close the file, unless `closed` is set.
            self._file.closed = True
            raise UnsupportedFeatureError(
                f"{name}: expected a file system in which only complete files appear, found "
                f"{type(system).__name__}"
            )

    def write(self, data: Buffer) -> int:
        for piece in pieces(data):
            attempt(self.path, lambda piece=piece: self._file.write(piece))  # type: ignore[misc]
        return len(as_bytes(data))

    def commit(self) -> None:
        """Closes the file and moves it to its final path."""
        file = self._file
        attempt(self.path, file.close)
        attempt(self.path, file.commit)
        self._file = None

    def close(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        try:
            attempt(self.path, file.close)
        finally:
            attempt(self.path, file.discard)
