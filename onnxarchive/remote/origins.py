"""Requests the bytes of an object by obstore or fsspec."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from operator import attrgetter
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeAlias

from onnxarchive.errors import quoted
from onnxarchive.remote.failures import (
    NO_SIZE,
    StalledError,
    await_request,
    changed,
    failure,
    refuses_suffix,
)
from onnxarchive.remote.stores import (
    environment,
    grouped,
    open_file_system,
    open_store,
    split_options,
)
from onnxarchive.remote.urls import Address, Store, scheme_of, unsigned_url

if TYPE_CHECKING:
    from obstore import GetResult

Stream: TypeAlias = AsyncGenerator[bytes, None]  # of the pieces of a range, in order

# Keys of fsspec's `info` with a value that identifies a file's content: `ETag` in S3, `etag` in
# Google and Azure, `e_tag` in obstore's file systems, `blob_id` in Hugging Face, `sha` in GitHub.
_ETAG_KEYS = ("ETag", "etag", "e_tag", "blob_id", "sha")
_TIME_KEYS = ("LastModified", "last_modified", "mtime", "updated", "created")
# {package of a file system of fsspec: attribute that names the server}. Others are not cached.
_SERVERS = {
    "adlfs": "service_client.primary_hostname",
    "gcsfs": "base",
    "huggingface_hub": "endpoint",
    "s3fs": "s3.meta.endpoint_url",
}


# Names of options and variables that select no object, and that may change each hour.
_CREDENTIALS = (
    r"(?i)access_key|account_key|master_key|customer_key|encryption_key|secret|bearer|sas_"
    r"|(?:^|_)token$|credential_provider|expiration"
)


@dataclass(frozen=True, slots=True)
class Version:
    """Attributes of an object that change with the object's content.

    Attributes:
        size: The size in bytes.
        etag: The ETag as the server sends it, or another id of the content (`_ETAG_KEYS`).
        version: The version id in a store with versions.
        last_modified: The time of the last change.
    """

    size: int
    etag: str | None = None
    version: str | None = None
    last_modified: str | None = None

    @property
    def strong_etag(self) -> str | None:
        """The ETag, if equal ETags mean equal bytes (RFC 9110, section 8.8.1); else None."""
        return None if self.etag is None or self.etag.startswith("W/") else self.etag

    @property
    def validator(self) -> str | None:
        """What identifies the bytes: the strong ETag, or else the version id."""
        return self.strong_etag or self.version


@dataclass(repr=False)
class Origin:
    """An object in a library, which makes the requests for its bytes.

    Attributes:
        name: The object's name for messages.
        identity: A hash of everything that selects the object: equal only if another `Origin` of
            this process reads the same object. Random if unknown.
        is_lasting: True if `identity` has the same meaning in all processes.
    """

    name: str
    identity: str
    is_lasting: bool

    async def version(self) -> Version:
        """Requests the present version of the object."""
        raise NotImplementedError

    async def open(self, size: int, known: Version | None) -> tuple[Version, bytes]:
        """The version and the last `size` bytes; no bytes if the version is `known`."""
        version = await self.version()
        size = min(size, version.size)
        if not size or version == known:
            return version, b""
        stream = self.stream(version.size - size, size, version, size)
        return version, b"".join([piece async for piece in stream])

    def stream(self, offset: int, size: int, expected: Version, least: int) -> Stream:
        """Reads a range; yields pieces of at least `least` bytes as they arrive.

        Raises:
            ObjectChangedError: The version of the object is not `expected`.
            StalledError: No piece has arrived for some time.
        """
        raise NotImplementedError

    def whole(self, expected: Version, least: int) -> Stream:
        """Reads all bytes as `stream` does, by a request without a range."""
        raise NotImplementedError


@dataclass(repr=False)
class StoreOrigin(Origin):
    """An object in a store of obstore."""

    store: Store
    key: str
    stall: float

    async def version(self) -> Version:
        """Requests the version by `HEAD`."""
        import obstore

        return _version(
            await await_request(self.name, lambda: obstore.head_async(self.store, self.key))
        )

    async def stream(self, offset: int, size: int, expected: Version, least: int) -> Stream:
        """Reads a range; see `Origin.stream`."""
        async for piece in self._stream((offset, offset + size), expected, least):
            yield piece

    async def whole(self, expected: Version, least: int) -> Stream:
        """Reads all bytes; see `Origin.whole`."""
        async for piece in self._stream(None, expected, least):
            yield piece

    async def _stream(self, span: tuple[int, int] | None, expected: Version, least: int) -> Stream:
        """Reads a range, or all bytes without asking for a range."""
        etag = expected.strong_etag
        result = await await_request(self.name, lambda: self._get(span, if_match=etag))
        if self._version(result) != expected:
            raise changed(self.name)
        begin, end = span or (0, expected.size)
        async with aclosing(self._pieces(result, begin, end - begin, least)) as pieces:
            async for piece in pieces:
                yield piece

    async def _pieces(self, result: GetResult, offset: int, size: int, least: int) -> Stream:
        """Yields the body of an answer; refuses other bytes than those asked for."""
        begin, end = result.range
        nbytes = end - begin
        if (begin, nbytes) == (offset, size):
            nbytes = 0
            chunks = aiter(result.stream(min_chunk_size=least))
            while nbytes <= size and (chunk := await self._next(chunks)):
                nbytes += len(chunk)
                if nbytes <= size:
                    yield chunk
            if nbytes == size:
                return
        count = "more" if nbytes > size else str(nbytes)
        raise OSError(
            errno.EIO,
            f"expected {size} bytes from offset {offset}, found {count} bytes from offset {begin}",
            self.name,
        )

    async def _next(self, chunks: AsyncIterator[Any]) -> bytes:
        with suppress(TimeoutError):
            async with asyncio.timeout(self.stall):
                return await await_request(self.name, lambda: anext(chunks, b""))
        raise StalledError(
            errno.EIO,
            f"no byte has arrived for {self.stall:g} seconds (stall_timeout in storage_options)",
            self.name,
        )

    async def open(self, size: int, known: Version | None) -> tuple[Version, bytes]:
        """As `Origin.open`, by one request for a range without a start, if the server takes it."""
        result, problems = None, []
        try:
            etag = None if known is None else known.strong_etag
            result = await self._get({"suffix": size}, if_none_match=etag)
        except Exception as error:
            if known is not None and type(error).__name__ == "NotModifiedError":
                return known, b""
            # obstore's AzureStore refuses this range. For an empty object, servers answer 416.
            if not refuses_suffix(error):
                problems.append(failure(error, self.name))
        if problems:
            raise problems.pop()  # as in `call_library`
        if result is None:
            return await super().open(size, known)
        size = min(size, result.meta["size"])
        pieces = self._pieces(result, result.meta["size"] - size, size, max(size, 1))
        return self._version(result), b"".join([piece async for piece in pieces])

    async def _get(self, range: Any, **etags: str | None) -> GetResult:
        import obstore

        options: Any = {name: etag for name, etag in etags.items() if etag is not None}
        if range is not None:
            options["range"] = range
        return await obstore.get_async(self.store, self.key, options=options)

    def _version(self, result: GetResult) -> Version:
        """The version of the object that is sent; refuses an encoding of its bytes."""
        encoding = str(result.attributes.get("Content-Encoding", "identity"))
        # S3 may state aws-chunked, although it has removed this encoding from the bytes.
        if encoding not in ("identity", "aws-chunked"):
            raise OSError(
                errno.EIO,
                f"expected the bytes of the file, found Content-Encoding {quoted(encoding)}; ask "
                "the server's administrator to send archives without it",
                self.name,
            )
        return _version(result.meta)


def _version(meta: Any) -> Version:
    modified = meta["last_modified"]
    # Without a time, obstore gives the start of 1970.
    time = modified.isoformat() if modified.timestamp() else None
    version = Version(meta["size"], meta["e_tag"], meta["version"], time)
    # Servers of one store may state different times for one object; the ETag is enough.
    return version if version.strong_etag is None else replace(version, last_modified=None)


@dataclass(repr=False)
class FileSystemOrigin(Origin):
    """A file in a file system of fsspec."""

    system: Any
    path: str
    _lock: Lock = field(default_factory=Lock)
    _questions: int = 0
    _answer: Version | None = None  # to the last question; None if it failed

    async def version(self) -> Version:
        """Asks for the file's attributes."""
        version = await await_request(self.name, lambda: asyncio.to_thread(self._version))
        if not isinstance(version.size, int) or version.size < 0:
            raise OSError(errno.EIO, NO_SIZE, self.name)
        return version

    async def stream(self, offset: int, size: int, expected: Version, least: int) -> Stream:
        """Reads a range as one piece; refuses another version."""
        version, body = await await_request(
            self.name, lambda: asyncio.to_thread(self._read, offset, size)
        )
        if version != expected:
            raise changed(self.name)
        yield body

    def _read(self, offset: int, size: int) -> tuple[Version, bytes]:
        """A range and the version after it was read; no version if the file is shorter."""
        # Files of huggingface_hub would read 5 MiB ahead.
        options = {"cache_type": "none"} if _package(self.system) == "huggingface_hub" else {}
        body = self.system.cat_file(self.path, start=offset, end=offset + size, **options)
        if len(body) != size:
            return Version(-1), b""
        return self._version(), body

    def _version(self) -> Version:
        """The present version. Calls that wait for a request share the answer to the next one.

        A version may take several requests, and many ranges are read at once.
        """
        before = self._questions
        with self._lock:
            if self._questions == before or self._answer is None:
                self._questions += 1
                self._answer = None
                self._answer = self._ask()
            return self._answer

    def _ask(self) -> Version:
        self.system.invalidate_cache()
        info = self.system.info(self.path)
        if info.get("type") == "directory":
            raise IsADirectoryError(errno.EISDIR, None)
        etag, time = (
            next((str(info[key]) for key in keys if info.get(key)), None)
            for keys in (_ETAG_KEYS, _TIME_KEYS)
        )
        return Version(info.get("size"), etag, info.get("VersionId"), time)


def origin_of(address: Address) -> Origin:
    """The origin of an object; refuses an address that the library takes for another object's."""
    address.require_key()
    if address.is_of_store:
        store, key = open_store(address)
        stall = split_options(address)[1]
        return StoreOrigin(address.name, *_identity_in_store(address), store, key, stall)
    system, path = open_file_system(address)
    return FileSystemOrigin(address.name, *_identity_in_system(address, system), system, path)


def _identity_in_store(address: Address) -> tuple[str, bool]:
    """`Origin.identity` and `Origin.is_lasting` of an object that obstore reads.

    A store of the caller does not say which server it uses: this may depend on environment
    variables of the time when the store was made.
    """
    url, store = address.url, address.store
    kind = type(store).__name__
    if kind == "LocalStore":
        return _hash(kind, str(getattr(store, "prefix", "")), url)
    if store is not None and kind != "HTTPStore":
        return _hash(kind, id(store), url)[0], False
    groups = grouped(split_options(address)[2])
    client = getattr(store, "client_options", groups["client_options"]) or {}
    headers = {
        name.lower(): value
        for name, value in client.get("default_headers", {}).items()
        if name.lower() not in ("authorization", "cookie")
    }
    proxies = [client.get("proxy_url"), client.get("proxy_excludes"), _proxies()]
    if address.is_web:
        base = unsigned_url(getattr(store, "url", url))
        return _hash(base, store is not None and url, headers, proxies)
    scheme = scheme_of(url)
    settings = {
        name: value
        for name, value in [*groups["config"].items(), *environment(scheme).items()]
        if not re.search(_CREDENTIALS, name)
    }
    # In Google's cloud, the file of an account may name the server.
    paths = [value for value in map(str, settings.values()) if scheme == "gs"]
    contents = [_content(path) for path in paths if os.path.isfile(path)]
    return _hash(url, headers, proxies, settings, contents)


def _content(path: str) -> str | None:
    with suppress(OSError), open(path, "rb") as file:
        return hashlib.sha256(file.read(1 << 20)).hexdigest()
    return None


def _identity_in_system(address: Address, system: Any) -> tuple[str, bool]:
    """`Origin.identity` and `Origin.is_lasting` of a file that fsspec reads.

    Variables, files of settings and defaults may select the server, so `system` is asked for it.
    """
    from fsspec.config import conf

    try:
        server = attrgetter(_SERVERS[_package(system)])(system)
    except Exception:  # another file system, or one that cannot connect: reading it is an error
        return os.urandom(32).hex(), False
    return _hash(address.url, dict(address.options or {}), conf, server, _proxies())


def _package(system: Any) -> str:
    return type(system).__module__.partition(".")[0]


def _proxies() -> dict[str, str]:
    """The environment variables that name proxies: a proxy may answer instead of a server."""
    return {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}


def _hash(*parts: object) -> tuple[str, bool]:
    """A hash of values, and whether it has the same meaning in all processes."""
    try:
        text, is_lasting = json.dumps(parts, default=_shown, sort_keys=True), True
    except (TypeError, ValueError):  # other objects, keys that are no strings, or a cycle
        text, is_lasting = repr(parts), False
    return hashlib.sha256(text.encode()).hexdigest(), is_lasting


def _shown(value: object) -> str:
    if isinstance(value, bytes | timedelta):
        return repr(value)
    raise TypeError
