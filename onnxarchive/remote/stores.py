"""Selects the library for a URL, obstore or fsspec, gives it the options, and lists objects."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from onnxarchive.errors import quoted, requires_library
from onnxarchive.files.locking import OfOneProcess
from onnxarchive.remote.background import SPAWN, run
from onnxarchive.remote.failures import call_library, failure, without_values
from onnxarchive.remote.probe import authorization
from onnxarchive.remote.redirects import refuse_redirects, refusing_redirects
from onnxarchive.remote.urls import STORES, WEB, Address, Store, scheme_of, without_user

Options: TypeAlias = Mapping[str, Any]

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
# Those that are sent in the URL or in a header which the next server of a redirect gets, too.
_TOKENS = r"(?i)customer_key|encryption_key|sas_|(?:^|_)token$"
_ALLOW, _STALL = "allow_redirects", "stall_timeout"  # options of this package
STALL = 30.0  # seconds without a byte after which a transfer ends
# The time that one request of obstore may take, unless options say otherwise: transfers end when
# bytes stop.
_LONGEST = timedelta(days=1)
_ANSWER_TIME = 5.0  # seconds in which obstore answers without a server, if it has its threads
_answered: OfOneProcess | None = None  # begun when obstore answered this process, or its parent
_RETRY_OPTIONS = ("backoff", "max_retries", "retry_timeout")
_BACKOFF_OPTIONS = ("base", "init_backoff", "max_backoff")
# By option: the argument of obstore's stores that takes it, if it is not `config`.
_GROUPS = dict.fromkeys(_CLIENT_OPTIONS.split(), "client_options")
_GROUPS |= dict.fromkeys(_RETRY_OPTIONS, "retry_config")
_CERTIFICATES = {"root_certificate", "proxy_ca_certificate"}
_PEM = "-----BEGIN CERTIFICATE-----"
_NO_ACCOUNT = "Account must be specified"  # in the words of obstore
_NUMBERS = {"max_retries": int, "base": float}
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}  # of the units of a duration


def open_store(address: Address, *, is_read: bool = True) -> tuple[Store, str]:
    """The store of obstore for a URL, and the key of the object in it.

    The options are those of the store, its HTTP client and its retries (`timeout`, `max_retries`),
    with obstore's keys in upper or lower case. Durations are seconds, or texts such as `"500ms"`;
    groups such as `default_headers` may be JSON. `root_certificate` and `proxy_ca_certificate` are
    the text of certificates (PEM), or the path of a file of them. `allow_redirects` allows
    redirects that may send secrets to other servers. This option and `stall_timeout` may also be
    given with a store.

    Args:
        address: A URL of the web, S3, Google Cloud Storage or Azure (`az://container/key`), or the
            key in a store of the caller.
        is_read: False to write. A request that reads ends after `stall_timeout` without a byte.

    Raises:
        ImportError: obstore is missing.
        OSError: Redirects may send a secret to another server; see `refuse_redirects`.
        ValueError: An option has a wrong name or value.
    """
    allows_redirects, stall, options = split_options(address)
    with requires_library("obstore", "read and write objects in stores"):
        import obstore.store
    url, name, store = address.url, address.name, address.store
    scheme = scheme_of(url)
    _require_threads(name)
    if store is not None:
        if options:
            raise ValueError("give store or storage_options, not both")
        if not allows_redirects:
            refuse_redirects(name, store, url)
        return store, url
    try:
        groups = grouped(options)
        client = groups["client_options"]
        client.setdefault("timeout", _LONGEST)
        if is_read:  # sending counts as waiting for an answer
            client.setdefault("read_timeout", timedelta(seconds=stall))
            groups["retry_config"].setdefault("retry_timeout", timedelta(seconds=stall))
        given = {name: group for name, group in groups.items() if group}
        if scheme in WEB:
            parts = urlsplit(url)
            client["allow_http"] = scheme == "http" and client.get("allow_http", True)
            if parts.username is not None:
                client["default_headers"] = authorization(parts) | client.get("default_headers", {})
            # A key cannot have a query, so the store gets the complete URL, and the key is empty.
            key, has_token = "", False
            make = partial(obstore.store.HTTPStore, without_user(url), **given)
        else:
            bucket, _, key = url.partition("://")[2].partition("/")
            settings = {**groups["config"], **environment(scheme)}
            has_token = any(re.search(_TOKENS, setting) for setting in settings)
            allow_http = settings.get(f"{_VARIABLES[scheme][0]}ALLOW_HTTP")
            if allow_http:  # obstore ignores the variable if there are options of the client
                client.setdefault("allow_http", allow_http)
            make = partial(getattr(obstore.store, STORES[scheme]), bucket, **given)
        made = make()
    except Exception as error:
        secrets = [url, without_user(url), *re.split("[/?#@]", url), *dict(_flat(options)).values()]
        fault = without_values(error, [*secrets, *environment(scheme).values()])
    else:
        if allows_redirects:
            return made, key
        # obstore may spell the host of a web address in another way.
        hosts = [urlsplit(made.url).hostname or ""] if scheme in WEB else _hosts(scheme, options)
        limits = refuse_redirects(name, made, key, hosts, has_token=has_token)
        return make(client_options=client | limits) if limits else made, key
    if _NO_ACCOUNT in fault:
        raise ValueError(
            f"{name}: the URL names a container, but not its storage account; set account_name in "
            f"storage_options, or AZURE_STORAGE_ACCOUNT_NAME ({fault})"
        )
    keys = ", ".join(sorted(dict(_flat(options))))
    raise ValueError(
        f"{name}: obstore does not take this URL with "
        f"{f'the options {keys}' if keys else 'no options'} ({fault})"
    )


def _require_threads(name: str) -> None:
    """Refuses a fork of a process that has used obstore, whose threads are missing in the fork."""
    global _answered
    if _answered is not None and _answered.is_own:
        return

    async def ask() -> None:
        import obstore

        async with asyncio.timeout(_ANSWER_TIME):
            await obstore.list_with_delimiter_async(obstore.store.MemoryStore())

    try:
        run(name, ask)
    except TimeoutError:
        raise OSError(
            errno.ENOTSUP,
            "obstore does not answer; this process may be a fork of one that has used obstore: "
            f"{SPAWN}",
            name,
        ) from None
    _answered = OfOneProcess()


def split_options(address: Address) -> tuple[bool, float, Options]:
    """The values of `allow_redirects` and `stall_timeout`, and the options for the libraries."""
    own = {_ALLOW: "false", _STALL: str(STALL)}
    others = {}
    for key, value in (address.options or {}).items():
        if (name := str(key).lower()) in own:
            own[name] = str(value).lower()
        else:
            others[key] = value
    allows = own[_ALLOW]
    if allows not in ("true", "false"):
        raise ValueError(f"{_ALLOW} must be true or false")
    try:
        stall = _duration(own[_STALL])
    except OverflowError:  # more than a `timedelta` takes
        stall = None
    if not (isinstance(stall, timedelta) and stall):
        raise ValueError(f"{_STALL} must be a number of seconds")
    return allows == "true", stall.total_seconds(), others


def environment(scheme: str) -> dict[str, str]:
    """The environment variables that obstore reads for a store."""
    names = [name for name in os.environ if name.startswith(_VARIABLES.get(scheme, ()))]
    return {name: os.environ[name] for name in names}


def _hosts(scheme: str, options: Options) -> list[str]:
    """The hosts that a store and its credentials come from."""
    text = " ".join(map(str, (*options.values(), *environment(scheme).values())))
    hosts = re.findall(r"://(?:[^/?#\s]*@)?(?:\[([\da-fA-F:]+)\]|([\w.-]+))", text)
    return [*_DOMAINS[scheme], *map("".join, hosts)]


def grouped(options: Options) -> dict[str, Any]:
    """Groups options into the arguments of obstore's stores."""
    client: dict[str, Any] = {}
    retries: dict[str, Any] = {}
    groups: dict[str, Any] = {"config": {}, "client_options": client, "retry_config": retries}
    for key, value in options.items():
        key = key.lower()
        if key == "credential_provider":
            groups[key] = value
        elif key in groups:
            groups[key].update({name.lower(): option for name, option in _group(value).items()})
        else:
            groups[_GROUPS.get(key, "config")][key] = value
    for name in _CERTIFICATES & client.keys():
        client[name] = _certificate(name, client[name])
    for group, name in ((client, "default_headers"), (retries, "backoff")):
        if name in group:
            group[name] = _group(group[name])
    backoff = retries.get("backoff", {})
    # obstore refuses unknown names in the other groups, and ignores them here.
    unknown = (retries.keys() - {*_RETRY_OPTIONS}) | (backoff.keys() - {*_BACKOFF_OPTIONS})
    if unknown:
        raise ValueError(f"unknown option {quoted(min(unknown))}")
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


def _certificate(name: str, value: Any) -> Any:
    """The text of a certificate, since obstore accepts no path."""
    if not isinstance(value, str | os.PathLike) or _PEM in str(value):
        return value
    try:
        with open(value, encoding="ascii") as file:
            text = file.read()
    except (OSError, ValueError):
        text = ""
    if _PEM not in text:
        raise ValueError(f"{name} is neither the text of certificates (PEM) nor a file of them")
    return text


def _duration(value: Any) -> Any:
    """A number of seconds, or a number and a unit, as obstore's retries need it; or the value."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h)?\s*", str(value))
    if match is None:
        return value
    return float(match[1]) * timedelta(seconds=_SECONDS[match[2] or "s"])


def _flat(options: Options, group: str = "") -> Iterator[tuple[str, str]]:
    """Names and values of options, also of those in groups, such as `retry_config.backoff`."""
    for key, value in options.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{group}{key}.")
        else:
            yield f"{group}{key}", str(value)


def open_file_system(address: Address) -> tuple[Any, str]:
    """A file system of fsspec for a URL, and the path of the file in it."""
    allows_redirects, _, options = split_options(address)
    url = address.url
    with requires_library("fsspec", f"open URLs of the scheme {quoted(scheme_of(url))}"):
        from fsspec.core import url_to_fs

    def connected() -> Any:
        given = refusing_redirects(url, options, allows_redirects=allows_redirects)
        # Cached instances would share credentials and listings.
        return url_to_fs(url, skip_instance_cache=True, **given)

    def refusal(error: BaseException, name: str) -> Exception:
        if isinstance(error, ImportError):
            return ImportError(str(error), name=error.name)
        if isinstance(error, OSError):  # some file systems make requests at once
            return failure(error, name)
        fault = f"fsspec does not take this URL and storage_options ({type(error).__name__})"
        if str(error).startswith("Protocol not known"):
            fault = f"fsspec has no file system for the scheme {quoted(scheme_of(url))}"
        return ValueError(f"{name}: {fault}")

    system, path = call_library(address.name, connected, refusal)
    return system, str(path)


def list_objects(address: Address) -> Iterator[tuple[str, str]]:
    """Lists all objects below a URL, or below a prefix in a store, in the order of the store.

    Yields:
        The object's path relative to the URL, as given by the store and unchecked; and the object's
        URL, or its key if a store was given.
    """
    name, base = address.name, address.url.removesuffix("/")
    folder = replace(address, url=base)
    if address.is_of_store:
        address.require_no_web("to list")
        opened, prefix = open_store(folder)
        if prefix:
            folder.require_key()
        keys = _keys(opened, prefix, name)
    else:
        system, prefix = open_file_system(folder)
        keys = call_library(name, lambda: iter(system.find(prefix)))
    prefix = prefix.strip("/")
    for key in keys:
        path = key.lstrip("/").removeprefix(prefix).lstrip("/")
        yield path, f"{base}/{path}".lstrip("/")


def _keys(store: Store, prefix: str, name: str) -> Iterator[str]:
    import obstore

    pages = call_library(name, lambda: iter(obstore.list(store, prefix or None)))
    while page := call_library(name, lambda: next(pages, None)):
        for meta in page:
            yield meta["path"]
