"""Keeps the secrets of requests from servers to which a redirect leads.

The HTTP client of obstore follows redirects, and no option prevents this. The next server gets all
headers except `Authorization` and cookies, and in `Referer` the URL with its query. Three steps
keep secrets from it:

1. `proxies` determines which proxy the client uses. If this is unknown, nothing is sent.
2. `probe` asks a web address, through the same proxy, whether it redirects. A redirect to another
   scheme, host or port is refused, and so is an address that gives no answer.
3. Without a proxy, the client gets one that does not exist for all other hosts, so that later
   redirects to them fail. Later redirects to a subdomain or to another port are followed, since
   a host is excluded from a proxy with both. If a proxy is needed, all later redirects are
followed.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from onnxarchive.errors import quoted
from onnxarchive.remote.background import start_thread
from onnxarchive.remote.probe import (
    PORTS,
    NoAnswerError,
    NoConnectionError,
    UnclearAnswerError,
    redirects_of,
)
from onnxarchive.remote.proxies import UnknownProxyError, proxy_of
from onnxarchive.remote.urls import url_without_secrets

TIMEOUT = 30.0  # seconds in which a server has to say whether it redirects
NOWHERE = "127.0.0.1:0"  # the proxy that does not exist: no server can have this port
REMEDY = (
    ", and another server would get the user, the query and the headers of requests; if none of "
    "them is secret, storage_options={'allow_redirects':True} "
    "(--storage-option allow_redirects=true) allows redirects"
)
_UNKNOWN = ", so it is unknown whether the server redirects"
_MOST_REDIRECTS = 10
# A path or a query that no parser of URLs takes for the address of another server. Some parsers
# take a backslash for a slash, skip tabs, and look for a host after three slashes.
_LOCAL = re.compile(r"(?:/(?!/)|\?|[\w.~%-]+(?=[/?]|$))[!-\[\]-~]*", re.ASCII)


def refuse_redirects(
    name: str, store: Any, key: str, hosts: Sequence[str] = (), *, has_token: bool = False
) -> dict[str, str]:
    """Makes sure that no redirect sends a user, a query or headers to another server.

    Any of them may be secret, so all count. `hosts` are those of the store and of its credentials;
    a store of the caller has none, since it cannot be made again with other options. `has_token`
    says that the store itself sends a secret; through a proxy, redirects may get it.

    Returns:
        Options with which the store's client has a proxy that does not exist for all other hosts;
        none if it sends no secret, or needs a proxy.

    Raises:
        OSError: The server redirects, or it is unknown whether it does.
    """
    client = getattr(store, "client_options", None) or {}
    url = _web_address(store, key)
    has_secret = bool(client.get("default_headers"))
    if url is not None and (url.query or "@" in url.netloc):
        has_secret = True
    if not (has_secret or has_token):
        return {}
    try:
        if url is None:
            proxy, problem = _proxy_of_store(hosts, client), None
            if has_secret and (proxy is not None or not hosts):
                problem = f"it is unknown whether the store's server redirects{REMEDY}"
        else:
            proxy = proxy_of(url.scheme, url.hostname or "", client)
            problem = _problem_in_time(name, url, client, proxy)
    except UnknownProxyError as error:
        proxy, problem = None, f"{error}; it is unknown which server would get the request"
    if problem is not None:
        raise OSError(errno.EIO, problem, name)
    if proxy is not None or not hosts:
        return {}
    return {"proxy_url": f"http://{NOWHERE}", "proxy_excludes": ",".join(hosts)}


def _web_address(store: Any, key: str) -> SplitResult | None:
    """The address of an object in a `HTTPStore`; None for other stores."""
    url = getattr(store, "url", None)
    if url is None:
        return None
    parts = urlsplit(str(url))
    return parts._replace(path=f"{parts.path.rstrip('/')}/{quote(key)}") if key else parts


def _proxy_of_store(hosts: Sequence[str], client: Mapping[str, Any]) -> SplitResult | None:
    """The proxy for a host of a store, which may be reached by http or https."""
    for host in hosts:
        for scheme in PORTS:
            is_network = "/" in host  # of a cloud's machines, which proxies do not reach
            proxy = None if is_network else proxy_of(scheme, host, client)
            if proxy is not None:
                return proxy
    return None


def _problem_in_time(
    name: str, url: SplitResult, client: Mapping[str, Any], proxy: SplitResult | None
) -> str | None:
    """Why requests may reach another server, and what helps; None if they do not."""
    problems: SimpleQueue[str | None] = SimpleQueue()
    start_thread(name, lambda: problems.put(_problem(url, client, proxy)))
    try:
        return problems.get(timeout=TIMEOUT)
    except Empty:
        return f"the server took too long to answer{_UNKNOWN}"


def _problem(url: SplitResult, client: Mapping[str, Any], proxy: SplitResult | None) -> str | None:
    """As `_problem_in_time`. If obstore would fail, too, allowing redirects does not help."""
    if proxy is not None and proxy.scheme != "http":
        return (
            f"expected a proxy of the scheme http, found {quoted(proxy.scheme)}{_UNKNOWN}{REMEDY}"
        )
    try:
        for _ in range(_MOST_REDIRECTS):
            locations = redirects_of(url, client, proxy, TIMEOUT)
            if not locations:
                return None
            for location in locations:
                if not _is_local(url, location):
                    return _redirect(url, location)
            url = urlsplit(urljoin(url.geturl(), locations[0]))
    except NoConnectionError as error:
        return str(error)
    except NoAnswerError as error:
        return f"{error}{_UNKNOWN}"
    except UnclearAnswerError as error:
        return f"{error}{_UNKNOWN}{REMEDY}"
    return f"the server redirects to itself more than {_MOST_REDIRECTS} times{_UNKNOWN} elsewhere"


def _redirect(url: SplitResult, location: str) -> str:
    """Says where a redirect leads, and what helps."""
    target = _target(url, location)
    text = f"the server redirects to {quoted(target)}"
    if url.scheme == "https" and target.lower().startswith("http:"):
        return f"{text}, which is not encrypted; no option allows this"
    return f"{text}{REMEDY}"


def _is_local(url: SplitResult, location: str) -> bool:
    """True if all parsers of URLs take a redirect for one to the same scheme, host and port."""
    if match := re.match(r"([A-Za-z]+)://([^/?#]*)(?=[/?]|$)", location):
        port = f":{PORTS[url.scheme]}"
        host = url.netloc.rpartition("@")[2].removesuffix(port)
        if (match[1].lower(), match[2].lower().removesuffix(port)) != (url.scheme, host):
            return False
        location = location[match.end() :] or "/"
    return _LOCAL.fullmatch(location) is not None


def _target(url: SplitResult, location: str) -> str:
    """The server to which a redirect leads, for messages; the path if it names no server."""
    location = re.sub(r"[\t\r\n]", "", location)  # as some parsers do
    match = re.match(r"(?:([A-Za-z][\w+.-]*):|(?=[/\\]{2}))[/\\]*(.*)", location)
    if match is None:
        return re.split(r"[?#]", location, maxsplit=1)[0]
    address = url_without_secrets(f"{match[1] or url.scheme}://{match[2]}")
    return re.split(r"(?<![:/])[/\\]", address, maxsplit=1)[0]


class RefusedRedirectError(OSError):
    """fsspec was redirected to another server; the text says where, and what helps."""


def refusing_redirects(
    url: str, options: Mapping[str, Any], *, allows_redirects: bool
) -> dict[str, Any]:
    """Options with which fsspec's file system of web addresses keeps secrets, too.

    Args:
        url: A URL of another scheme, which may be chained with a web address.
        options: The options of fsspec. Those with the key `http` or `https` are for such an
            address; so are `target_options` if `target_protocol` or `fo` says so.
        allows_redirects: True to refuse only redirects from https to http.
    """
    options = dict(options)
    inner = f"{options.get('target_protocol')}:// {options.get('fo')}"
    for scheme in PORTS:
        for key, text in ((scheme, url.partition("::")[2]), ("target_options", inner)):
            if match := re.search(rf"(?:^|::| ){scheme}://(\S*)", text):
                own = dict(options.get(key) or {})
                if own or re.search(r"[@?]", match[1]):
                    import aiohttp

                    trace = aiohttp.TraceConfig()
                    refuse = _refuse_unencrypted if allows_redirects else _refuse
                    trace.on_request_redirect.append(refuse)
                    client = dict(own.get("client_kwargs") or {})
                    client["trace_configs"] = [*client.get("trace_configs", ()), trace]
                    options[key] = own | {"client_kwargs": client}
    return options


async def _refuse(_session: Any, _context: Any, redirect: Any) -> None:
    url = urlsplit(str(redirect.url))
    location = redirect.response.headers.get("Location") or "//"
    if not _is_local(url, location):
        raise RefusedRedirectError(_redirect(url, location))


async def _refuse_unencrypted(_session: Any, _context: Any, redirect: Any) -> None:
    url = urlsplit(str(redirect.url))
    location = redirect.response.headers.get("Location") or "//"
    if url.scheme == "https" and urlsplit(urljoin(url.geturl(), location)).scheme != "https":
        raise RefusedRedirectError(_redirect(url, location))
