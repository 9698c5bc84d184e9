"""Requests the bytes of an object by obstore or fsspec, depending on the URL."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from operator import attrgetter
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar
from urllib.parse import SplitResult, urlsplit

from onnxarchive.errors import UnsupportedFeatureError, needing, shown
from onnxarchive.remote.background import run
from onnxarchive.remote.failures import (
    NO_SIZE,
    StalledError,
    asked,
    changed,
    failure,
    refuses_suffix,
    without_values,
)
from onnxarchive.remote.redirects import authorization, keep_secrets, refusing_redirects
from onnxarchive.remote.urls import WEB, scheme_of, shown_url, unsigned_url, without_user

if TYPE_CHECKING:
    from obstore import GetResult
    from obstore.store import ObjectStore

_Made = TypeVar("_Made")
Store: TypeAlias = "ObjectStore"
Options: TypeAlias = Mapping[str, Any]
Stream: TypeAlias = AsyncGenerator[bytes, None]  # of the pieces of a range, in order

# {scheme of a URL: class of obstore}. obstore also reads web addresses, fsspec all other URLs.
_STORES = {"az": "AzureStore", "gs": "GCSStore", "s3": "S3Store"}

# Options of obstore's HTTP client and retries; all other options belong to the store.
_CLIENT_OPTIONS = (
    "allow_http allow_invalid_certificates connect_timeout default_content_type default_headers "
    "http1_only http2_keep_alive_interval http2_keep_alive_timeout http2_keep_alive_while_idle "
    "http2_only pool_idle_timeout pool_max_idle_per_host proxy_ca_certificate proxy_excludes "
    "proxy_url randomize_addresses read_timeout root_certificate timeout user_agent"
)
# By scheme: the beginnings of the environment variables that obstore reads, and the domains of the
# servers and of the credentials. The last one has the addresses of machines in a cloud.
_VARIABLES = {
    "az": ("AZURE_", "IDENTITY_", "MSI_"),
    "gs": ("GOOGLE_", "SERVICE_ACCOUNT"),
    "s3": ("AWS_",),
}
_DOMAINS = {
    "az": ("windows.net", "microsoft.com", "microsoftonline.com", "169.254.0.0/16"),
    "gs": ("googleapis.com", "google.internal", "169.254.0.0/16"),
    "s3": ("amazonaws.com", "amazonaws.com.cn", "169.254.0.0/16"),
}
# Names of options and variables that select no object, and that may change each hour.
_CREDENTIALS = (
    r"(?i)access_key|account_key|master_key|customer_key|encryption_key|secret|bearer|sas_"
    r"|(?:^|_)token$|credential_provider|expiration"
)
# Those that are sent in the URL or in a header which the next server of a redirect gets, too.
_TOKENS = r"(?i)customer_key|encryption_key|sas_|(?:^|_)token$"
_ALLOW, _STALL = "allow_redirects", "stall_timeout"  # options of this package
STALL = 30.0  # seconds without a byte after which a transfer ends
# The times that one request of obstore may take, unless options say otherwise: any, while its bytes
# arrive; those of an upload are not seen to arrive.
_READ_TIME, _WRITE_TIME = timedelta(days=1), timedelta(hours=1)
_ANSWER_TIME = 5.0  # seconds in which obstore answers without a server, if it has its threads
_process_with_threads = 0  # the id of this process, if obstore has answered
_RETRY_OPTIONS = ("backoff", "max_retries", "retry_timeout")
_BACKOFF_OPTIONS = ("base", "init_backoff", "max_backoff")
_NUMBERS = {"max_retries": int, "base": float}
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}  # of the units of a duration

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


@dataclass(frozen=True, slots=True)
class Version:
    """Attributes of an object that change with the object's content.

    Attributes:
        size: The size in bytes.
        etag: The ETag as the server sends it, another id of the content (`_ETAG_KEYS`), or None.
        version: The version id in a store with versions, or None.
        last_modified: The time of the last change, or None.
    """

    size: int
    etag: str | None = None
    version: str | None = None
    last_modified: str | None = None

    @property
    def strong_etag(self) -> str | None:
        """The ETag, if equal ETags mean equal bytes (RFC 9110, section 8.8.1); else None."""
        return None if self.etag is None or self.etag.startswith("W/") else self.etag


class Origin(Protocol):
    """The address of an object; makes the requests for the object's bytes.

    Attributes:
        name: The object's name for messages.
        place: A hash of all that selects the object: equal only if another `Origin` of this process
            reads the same object. Random if unknown.
        is_known: True if `place` has the same meaning in all processes.
    """

    name: str
    place: str
    is_known: bool

    async def version(self) -> Version:
        """Requests the present version of the object."""

    async def end(self, size: int, known: Version | None) -> tuple[Version, bytes] | None:
        """The version and the last `size` bytes, by one request; None if unsupported.

        If the object still has the strong ETag of `known`, `known` is returned, and no bytes.
        """

    def stream(self, offset: int, size: int, expected: Version, least: int) -> Stream:
        """Reads a range; yields pieces of at least `least` bytes as they arrive.

        Raises:
            ObjectChangedError: The version of the object is not `expected`.
            StalledError: No piece has arrived for some time.
        """


@dataclass(repr=False)
class StoreOrigin:
    """An object in a store of obstore."""

    store: Store
    key: str
    name: str
    place: str
    is_known: bool
    stall: float = STALL

    async def version(self) -> Version:
        """Requests the version, by `HEAD`."""
        import obstore

        return _version(await asked(self.name, lambda: obstore.head_async(self.store, self.key)))

    async def stream(self, offset: int, size: int, expected: Version, least: int) -> Stream:
        """Reads a range; see `Origin.stream`."""
        result = await asked(self.name, lambda: self._get((offset, offset + size), expected))
        if self._version(result) != expected:
            raise changed(self.name)
        async with aclosing(self._pieces(result, offset, size, least)) as pieces:
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
        found = "more" if nbytes > size else str(nbytes)
        raise OSError(
            errno.EIO,
            f"expected {size} bytes from offset {offset}, found {found} bytes from offset {begin}",
            self.name,
        )

    async def _next(self, chunks: AsyncIterator[Any]) -> bytes:
        import asyncio

        with suppress(TimeoutError):
            async with asyncio.timeout(self.stall):
                return await asked(self.name, lambda: anext(chunks, b""))
        raise StalledError(
            errno.EIO,
            f"no byte has arrived for {self.stall:g} seconds (stall_timeout in storage_options)",
            self.name,
        )

    async def end(self, size: int, known: Version | None) -> tuple[Version, bytes] | None:
        """The version and the last bytes, by a range without a start."""
        try:
            result = await self._get({"suffix": size}, known=known)
        except Exception as error:
            if known is not None and type(error).__name__ == "NotModifiedError":
                return known, b""
            # obstore's AzureStore refuses this range. For an empty object, servers answer 416.
            if refuses_suffix(error):
                return None
            problems = [failure(error, self.name)]
        else:
            size = min(size, result.meta["size"])
            pieces = self._pieces(result, result.meta["size"] - size, size, max(size, 1))
            return self._version(result), b"".join([bytes(it) async for it in pieces])
        raise problems.pop()  # as in `attempt`

    async def _get(
        self, range: Any, expected: Version | None = None, known: Version | None = None
    ) -> GetResult:
        import obstore

        options: Any = {"range": range}
        if expected is not None and expected.strong_etag is not None:
            options["if_match"] = expected.etag
        if known is not None and known.strong_etag is not None:
            options["if_none_match"] = known.etag
        return await obstore.get_async(self.store, self.key, options=options)

    def _version(self, result: GetResult) -> Version:
        """The version of the object that is sent; refuses an encoding of its bytes."""
        encoding = str(result.attributes.get("Content-Encoding", "identity"))
        # S3 may state aws-chunked, although it has removed this encoding from the bytes.
        if encoding not in ("identity", "aws-chunked"):
            raise OSError(
                errno.EIO,
                f"expected the bytes of the file, found Content-Encoding {shown(encoding)}; ask "
                "the server's administrator to send archives without it",
                self.name,
            )
        return _version(result.meta)


def _version(meta: Any) -> Version:
    modified = meta["last_modified"]
    # Without a time, obstore gives the start of 1970.
    time = modified.isoformat() if modified.timestamp() else None
    found = Version(meta["size"], meta["e_tag"], meta["version"], time)
    # Servers of one store may state different times for one object; the ETag is enough.
    return found if found.strong_etag is None else replace(found, last_modified=None)


@dataclass(repr=False)
class FileSystemOrigin:
    """A file in a file system of fsspec."""

    system: Any
    path: str
    name: str
    place: str
    is_known: bool

    def __post_init__(self) -> None:
        self._lock = Lock()
        self._questions = 0
        self._answer: Version | None = None  # to the last question; None if it failed

    async def version(self) -> Version:
        """Asks for the file's attributes."""
        version = await asked(self.name, lambda: _in_thread(self._version))
        require_size(version.size, self.name)
        return version

    async def end(self, size: int, known: Version | None) -> tuple[Version, bytes] | None:
        """Returns None: fsspec gives bytes and version by separate requests."""
        return None

    async def stream(self, offset: int, size: int, expected: Version, least: int) -> Stream:
        """Reads a range as one piece; refuses another version."""
        version, body = await asked(self.name, lambda: _in_thread(self._read, offset, size))
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
        """The present version. Calls that wait for a question to end share the next one's answer.

        A question may take several requests, and many ranges are read at once.
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
            next((str(info[it]) for it in keys if info.get(it)), None)
            for keys in (_ETAG_KEYS, _TIME_KEYS)
        )
        return Version(info.get("size"), etag, info.get("VersionId"), time)


def require_size(size: object, name: str) -> int:
    """The size of a file of fsspec.

    Raises:
        OSError: The server states no size.
    """
    if not isinstance(size, int) or size < 0:
        raise OSError(errno.EIO, NO_SIZE, name)
    return size


async def _in_thread(function: Callable[..., _Made], *arguments: object) -> _Made:
    import asyncio

    return await asyncio.to_thread(function, *arguments)


def origin_of(url: str, store: Store | None, options: Options | None) -> Origin:
    """The origin of an object. Only `keep_secrets` makes a request, for a web address.

    Args:
        url: The URL, or the key in `store`.
        store: A store of obstore, or None.
        options: Options of obstore or fsspec; see `open_store` and `open_file_system`.

    Raises:
        ImportError: The library for the URL is missing.
        OSError: Redirects may send a secret to another server.
        ValueError: Both options and a store are given, or an option has a wrong name or value.
    """
    name = shown_url(url) if store is None else url
    require_key(url, store)
    if is_of_store(url, store):
        found, key = open_store(url, store, options)
        stall = _own_options(options)[1]
        return StoreOrigin(found, key, name, *_place_of_object(url, store, options), stall)
    system, path = open_file_system(url, options)
    return FileSystemOrigin(system, path, name, *_place_of_file(url, options, system))


def _place_of_object(url: str, store: Store | None, options: Options | None) -> tuple[str, bool]:
    """`Origin.place` and `Origin.is_known` of an object that obstore reads.

    A store of the caller does not tell which server it asks: this may depend on environment
    variables of the time when the store was made.
    """
    kind = type(store).__name__
    if kind == "LocalStore":
        return _place(kind, str(getattr(store, "prefix", "")), url)
    if store is not None and kind != "HTTPStore":
        return _place(kind, id(store), url)[0], False
    groups = _grouped(_own_options(options)[2])
    client = getattr(store, "client_options", groups.get("client_options")) or {}
    headers = {name.lower(): it for name, it in client.get("default_headers", {}).items()}
    for name in ("authorization", "cookie"):
        headers.pop(name, None)
    proxies = [client.get("proxy_url"), client.get("proxy_excludes"), _proxies()]
    if is_web(url, store):
        address, key = (url, "") if store is None else (getattr(store, "url", ""), url)
        return _place(unsigned_url(address), key, headers, proxies)
    settings = [groups.get("config", {}), _environment(scheme_of(url))]
    settings = [
        {name: it for name, it in each.items() if not re.search(_CREDENTIALS, name)}
        for each in settings
    ]
    # In Google's cloud, the file of an account may name the server.
    paths = [it for each in settings for it in each.values() if isinstance(it, str)]
    files = [_content(it) for it in paths if scheme_of(url) == "gs" and os.path.isfile(it)]
    return _place(url, headers, proxies, settings, files)


def _content(path: str) -> str | None:
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read(1 << 20)).hexdigest()
    except OSError:
        return None


def _place_of_file(url: str, options: Options | None, system: Any) -> tuple[str, bool]:
    """`Origin.place` and `Origin.is_known` of a file that fsspec reads.

    Variables, files of settings and defaults may select the server, so `system` is asked for it.
    """
    from fsspec.config import conf

    try:
        server = attrgetter(_SERVERS[_package(system)])(system)
    except Exception:  # another file system, or one that cannot connect: reading it is an error
        return os.urandom(32).hex(), False
    return _place(url, dict(options or {}), conf, server, _proxies())


def _package(system: Any) -> str:
    return type(system).__module__.partition(".")[0]


def _proxies() -> dict[str, str]:
    """The environment variables that name proxies: a proxy may answer in place of a server."""
    return {name: it for name, it in os.environ.items() if name.lower().endswith("_proxy")}


def _environment(scheme: str) -> dict[str, str]:
    """The environment variables that obstore reads for a store."""
    return {
        name: it for name, it in os.environ.items() if name.startswith(_VARIABLES.get(scheme, ()))
    }


def _place(*parts: object) -> tuple[str, bool]:
    """A hash of values, and whether it has the same meaning in all processes."""
    unknown: list[object] = []

    def shown_other(value: object) -> str:
        if not isinstance(value, bytes | timedelta):
            unknown.append(value)
        return repr(value)

    try:
        text = json.dumps(parts, default=shown_other, sort_keys=True)
    except (TypeError, ValueError):  # keys that are no strings, or a cycle
        text = repr(parts)
        unknown.append(parts)
    return hashlib.sha256(text.encode()).hexdigest(), not unknown


def is_of_store(url: str, store: Store | None) -> bool:
    """True if obstore reads and writes the object, False if fsspec does."""
    return store is not None or scheme_of(url) in (*_STORES, *WEB)


def require_key(url: str, store: Store | None) -> None:
    """Refuses a URL or key that the libraries would take for that of another object.

    obstore drops a slash at the beginning and at the end of a key, fsspec those at the end.

    Raises:
        UnsupportedFeatureError: There is such a slash, or obstore does not take the key.
    """
    path = url if store is not None else url.partition("://")[2].partition("/")[2]
    if is_web(url, store):
        is_right = store is not None or not path.startswith("/")
    elif is_of_store(url, store):
        is_right = not re.search(r"[\0-\x1f\x7f]", path)
        is_right &= not {"", ".", ".."} & {*path.split("/")}
    else:
        is_right = not url.partition("::")[0].endswith("/")
    if not is_right:
        name = shown(url if store is not None else shown_url(url))
        raise UnsupportedFeatureError(
            "expected a key without a slash at its beginning or end, empty components, '.', '..' "
            f"and control characters, found {name}; rename the object"
        )


def is_web(url: str, store: Store | None) -> bool:
    """True for a web address, which obstore can only read."""
    return scheme_of(url) in WEB if store is None else type(store).__name__ == "HTTPStore"


def open_store(
    url: str,
    store: Store | None,
    options: Options | None,
    *,
    is_read: bool = True,
) -> tuple[Store, str]:
    """The store of obstore for a URL, and the key of the object in it.

    Args:
        url: A URL of the web, S3, Google Cloud Storage or Azure (`az://container/key`), or the key
            in `store`.
        store: A store, or None.
        options: Options of the store, its HTTP client and its retries (`timeout`, `max_retries`),
            with obstore's keys in upper or lower case. Durations are seconds, or texts such as
            `"500ms"`; groups such as `default_headers` may be JSON. `allow_redirects` allows
            redirects that may send secrets to other servers. This option and `stall_timeout` may
            also be given with a store.
        is_read: False for a store to write to. A request that reads ends after `stall_timeout`
            without a byte.

    Raises:
        ImportError: obstore is missing.
        OSError: Redirects may send a secret to another server; see `keep_secrets`.
        ValueError: An option has a wrong name or value.
    """
    allows_redirects, stall, options = _own_options(options)
    with needing("obstore", "read and write objects in stores"):
        import obstore.store
    scheme, name = scheme_of(url), url if store is not None else shown_url(url)
    _require_threads(name)
    if store is not None:
        if options:
            raise ValueError("expected store or storage_options, found both")
        return store if allows_redirects else keep_secrets(url, store, url), url
    try:
        groups = _grouped(options)
        client, retries = groups.setdefault("client_options", {}), groups.get("retry_config", {})
        client.setdefault("timeout", _READ_TIME if is_read else _WRITE_TIME)
        if is_read:  # sending counts as waiting for an answer
            client.setdefault("read_timeout", timedelta(seconds=stall))
            groups["retry_config"] = {"retry_timeout": timedelta(seconds=stall), **retries}
        if scheme in WEB:
            _prepare_client(urlsplit(url), client)
            # A key cannot have a query, so the store gets the complete URL, and the key is empty.
            key, has_token = "", False
            make = partial(obstore.store.HTTPStore, without_user(url), **groups)
        else:
            bucket, _, key = url.partition("://")[2].partition("/")
            settings = {**groups.get("config", {}), **_environment(scheme)}
            has_token = any(re.search(_TOKENS, it) for it in settings)
            allow_http = settings.get(f"{_VARIABLES[scheme][0]}ALLOW_HTTP")
            if allow_http:  # obstore ignores the variable if there are options of the client
                client.setdefault("allow_http", allow_http)
            make = partial(getattr(obstore.store, _STORES[scheme]), bucket, **groups)
        found = make()
    except Exception as error:
        secrets = [url, without_user(url), *urlsplit(url).netloc.split("@")]
        secrets += [*_texts(options), *_texts(_environment(scheme))]
        fault = without_values(error, secrets)
    else:
        if allows_redirects:
            return found, key
        hosts = [] if scheme in WEB else _hosts(scheme, options)
        found = keep_secrets(
            name,
            found,
            key,
            lambda own: make(client_options=client | own),
            hosts,
            has_token=has_token,
        )
        return found, key
    keys = ", ".join(sorted(_names(options))) or "none"
    raise ValueError(
        f"{name}: expected a URL and storage_options that obstore takes, found options {keys} "
        f"({fault})"
    )


def _require_threads(name: str) -> None:
    """Refuses a fork of a process that has used obstore, whose threads are missing in the fork.

    Raises:
        OSError: obstore does not answer.
    """
    global _process_with_threads
    if os.getpid() == _process_with_threads:
        return

    async def ask() -> bool:
        import asyncio

        import obstore

        with suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_TIME):
                await obstore.list_with_delimiter_async(obstore.store.MemoryStore())
                return True
        return False

    if not run(name, ask):
        raise OSError(
            errno.ENOTSUP,
            "obstore does not answer; this process may be a fork of one that has used obstore: "
            "start processes with multiprocessing's method 'spawn'",
            name,
        )
    _process_with_threads = os.getpid()


def _own_options(options: Options | None) -> tuple[bool, float, Options]:
    """The values of `allow_redirects` and `stall_timeout`, and the options for the libraries."""
    own: dict[str, str] = {}
    others: dict[str, Any] = {}
    for key, value in (options or {}).items():
        name = str(key).lower()
        if name in (_ALLOW, _STALL):
            own[name] = str(value).lower()
        else:
            others[key] = value
    allows = own.get(_ALLOW, "false")
    if allows not in ("true", "false"):
        raise ValueError(f"expected {_ALLOW} to be true or false, found another value")
    try:
        stall = float(own.get(_STALL, STALL))
    except ValueError:
        stall = 0
    if not stall > 0:
        raise ValueError(f"expected {_STALL} to be a number of seconds, found another value")
    return allows == "true", stall, others


def _hosts(scheme: str, options: Options) -> list[str]:
    """The hosts that a store and its credentials come from."""
    text = " ".join(map(str, (*options.values(), *_environment(scheme).values())))
    hosts = re.findall(r"://(?:[^/?#\s]*@)?(?:\[([\da-fA-F:]+)\]|([\w.-]+))", text)
    return [*_DOMAINS[scheme], *map("".join, hosts)]


def _grouped(options: Options) -> dict[str, Any]:
    """Groups options into the arguments of obstore's stores."""
    groups: dict[str, Any] = {}
    for key, value in options.items():
        key = key.lower()
        if key == "credential_provider":
            groups[key] = value
        elif key in ("client_options", "retry_config"):
            group = _group(value).items()
            groups.setdefault(key, {}).update({name.lower(): it for name, it in group})
        elif key in _CLIENT_OPTIONS.split():
            groups.setdefault("client_options", {})[key] = value
        elif key in _RETRY_OPTIONS:
            groups.setdefault("retry_config", {})[key] = value
        else:
            groups.setdefault("config", {})[key] = value
    client, retries = groups.get("client_options", {}), groups.get("retry_config", {})
    if "default_headers" in client:
        client["default_headers"] = _group(client["default_headers"])
    if "backoff" in retries:
        retries["backoff"] = _group(retries["backoff"])
    backoff = retries.get("backoff", {})
    # obstore refuses unknown names in the other groups, and ignores them here.
    for name in (*(retries.keys() - {*_RETRY_OPTIONS}), *(backoff.keys() - {*_BACKOFF_OPTIONS})):
        raise ValueError(f"unknown option {shown(name)}")
    for group in (client, retries, backoff):
        for name, value in group.items():
            if name in _NUMBERS:
                if not re.fullmatch(r"\d+(\.\d+)?", str(value)):
                    raise ValueError(f"{name} is not a number")
                group[name] = _NUMBERS[name](value)
            elif re.search(r"timeout|interval|_backoff", name):
                group[name] = _duration(value)
    return groups


def _group(value: Any) -> dict[str, Any]:
    """A group of options; on the command line, it is an object of JSON."""
    return dict(json.loads(value) if isinstance(value, str) else value)


def _duration(value: Any) -> Any:
    """A number of seconds, or a number and a unit, as obstore's retries need it; or the value."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h)?\s*", str(value))
    if match is None:
        return value
    return float(match[1]) * timedelta(seconds=_SECONDS[match[2] or "s"])


def _texts(options: Options) -> Iterator[str]:
    """The values of options, also of those in groups."""
    for value in options.values():
        if isinstance(value, Mapping):
            yield from _texts(value)
        else:
            yield str(value)


def _names(options: Options, group: str = "") -> Iterator[str]:
    """The names of options, and of those in groups, such as `retry_config.backoff`."""
    for key, value in options.items():
        yield f"{group}{key}"
        if isinstance(value, Mapping):
            yield from _names(value, f"{group}{key}.")


def _prepare_client(url: SplitResult, client: dict[str, Any]) -> None:
    """Allows http:// if and only if the URL has it, and sends user and password as a header."""
    client["allow_http"] = url.scheme == "http" and client.get("allow_http", True)
    if url.username is not None:
        client["default_headers"] = authorization(url) | client.get("default_headers", {})


def open_file_system(url: str, options: Options | None) -> tuple[Any, str]:
    """A file system of fsspec for a URL, and the path of the file in it."""
    allows_redirects, _, options = _own_options(options)
    with needing("fsspec", f"open URLs of the scheme {shown(scheme_of(url))}"):
        from fsspec.core import url_to_fs
    try:
        if not allows_redirects:
            options = refusing_redirects(url, options)
        # Cached instances would share credentials and listings.
        system, path = url_to_fs(url, skip_instance_cache=True, **options)
    except ImportError as error:
        problems: list[Exception] = [ImportError(str(error), name=error.name)]
    except OSError as error:  # some file systems make requests at once
        problems = [failure(error, shown_url(url))]
    except Exception as error:
        fault = f"expected a URL and storage_options that fsspec takes ({type(error).__name__})"
        problems = [ValueError(f"{shown_url(url)}: {fault}")]
    else:
        return system, str(path)
    raise problems.pop()  # as in `attempt`
