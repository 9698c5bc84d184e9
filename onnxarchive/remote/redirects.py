"""Keeps the secrets of requests from servers to which a redirect leads.

The HTTP client of obstore follows redirects, and no option prevents this. The next server gets all
headers but `Authorization` and cookies, and in `Referer` the URL with its query. So a web address
with a user, a query or headers is asked first whether it redirects to another server, and the
client gets a proxy that does not exist for all other hosts: later redirects to them fail. Later
redirects to another port of the same host are followed, and so are all if a proxy is needed.
"""

from __future__ import annotations

import base64
import errno
import re
import ssl
from collections.abc import Mapping, Sequence
from contextlib import closing
from queue import Empty, SimpleQueue
from typing import Any
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit

from onnxarchive.errors import shown
from onnxarchive.remote.background import start_thread
from onnxarchive.remote.urls import shown_url

TIMEOUT = 30.0  # seconds in which a server has to say whether it redirects
NOWHERE = "127.0.0.1:0"  # the proxy that does not exist: no server can have this port
REMEDY = (
    ", and another server would get the user, the query and the headers of requests; if none of "
    "them is secret, storage_options={'allow_redirects':True} "
    "(--storage-option allow_redirects=true) allows redirects"
)
_UNKNOWN = ", so it is unknown whether the server redirects"
_PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)  # those that obstore follows
_MOST_REDIRECTS = 10
_TRANSIENT = (407, 408, 425, 429)  # with 500 and above: the next answer may differ
_TRIES = 3  # at an address with transient answers
# A path or a query that no parser of URLs takes for the address of another server. Some parsers
# take a backslash for a slash, skip tabs, and look for a host after three slashes.
_LOCAL = re.compile(r"(?:/(?!/)|\?|[\w.~%-]+(?=[/?]|$))[!-\[\]-~]*", re.ASCII)


def keep_secrets(
    name: str, store: Any, key: str, hosts: Sequence[str] = (), *, has_token: bool = False
) -> dict[str, str]:
    """Makes sure that no redirect sends a user, a query or headers to another server.

    Which of them are secret is unknown, so all count. The address of a `HTTPStore` is asked whether
    it redirects to another scheme, host or port. `hosts` are those of the store and of its
    credentials; a store of the caller has none, since it cannot be made again with other options.
    `has_token` says that the store itself sends a secret; through a proxy, redirects may get it.

    Returns:
        Options with which the store's client has a proxy that does not exist for all other hosts;
        none if it sends no secret, or needs a proxy.

    Raises:
        OSError: The server redirects, or it is unknown whether it does.
    """
    url, client = getattr(store, "url", None), getattr(store, "client_options", None) or {}
    parts = urlsplit(url or "")
    has_secret = bool(parts.query or "@" in parts.netloc or client.get("default_headers"))
    if not (has_secret or has_token):
        return {}
    schemes = _PORTS if url is None else [parts.scheme]
    has_proxy = any(_proxy(parts._replace(scheme=scheme), client) for scheme in schemes)
    problem = None
    if url is not None:
        path = f"{parts.path.rstrip('/')}/{quote(key)}" if key else parts.path
        problem = _problem_in_time(name, parts._replace(path=path).geturl(), client)
    elif has_secret and (has_proxy or not hosts):
        problem = "it is unknown whether the store's server redirects"
    if problem is not None:
        raise OSError(errno.EIO, f"{problem}{REMEDY}", name)
    if has_proxy or not hosts:
        return {}
    return {"proxy_url": f"http://{NOWHERE}", "proxy_excludes": ",".join(hosts)}


class RefusedRedirectError(OSError):
    """fsspec was redirected to another server."""


def refusing_redirects(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with which fsspec's file system of web addresses keeps secrets, too.

    Args:
        url: A URL of another scheme, which may be chained with a web address.
        options: The options of fsspec. Those with the key `http` or `https` are for such an
            address; so are `target_options` if `target_protocol` or `fo` says so.
    """
    options = dict(options)
    inner = f"{options.get('target_protocol')}:// {options.get('fo')}"
    for scheme in _PORTS:
        for key, text in ((scheme, url.partition("::")[2]), ("target_options", inner)):
            if match := re.search(rf"(?:^|::| ){scheme}://(\S*)", text):
                own = dict(options.get(key) or {})
                if own or re.search(r"[@?]", match[1]):
                    import aiohttp

                    trace = aiohttp.TraceConfig()
                    trace.on_request_redirect.append(_refuse)
                    client = dict(own.get("client_kwargs") or {})
                    client["trace_configs"] = [*client.get("trace_configs", ()), trace]
                    options[key] = own | {"client_kwargs": client}
    return options


async def _refuse(_session: Any, _context: Any, redirect: Any) -> None:
    location = redirect.response.headers.get("Location") or "//"
    if not _is_local(urlsplit(str(redirect.url)), location):
        raise RefusedRedirectError


def _problem_in_time(name: str, url: str, client: Mapping[str, Any]) -> str | None:
    """Why requests may reach another server; None if they do not."""
    problems: SimpleQueue[str | None] = SimpleQueue()
    start_thread(name, lambda: problems.put(_problem(url, client)))
    try:
        return problems.get(timeout=TIMEOUT)
    except Empty:
        return f"the server took too long to answer{_UNKNOWN}"


def _problem(url: str, client: Mapping[str, Any]) -> str | None:
    try:
        for _ in range(_MOST_REDIRECTS):
            locations = _locations(urlsplit(url), client)
            if not locations:
                return None
            for location in locations:
                if not _is_local(urlsplit(url), location):
                    return f"the server redirects to {shown(_target(url, location))}"
            url = urljoin(url, locations[0])
        reason = f"found more than {_MOST_REDIRECTS} redirects"
    except _UnknownError as error:
        reason = str(error)
    except ssl.SSLCertVerificationError:
        reason = "Python cannot verify the server's certificate (SSL_CERT_FILE names authorities)"
    except TimeoutError:
        reason = "the server took too long to answer"
    except OSError as error:
        reason = "there is no connection to the server"
        if match := re.match(r"Tunnel connection failed: (\d+)", str(error)):
            reason = f"the proxy answered with HTTP status {match[1]}"
    except Exception as error:  # such as ValueError or http.client.HTTPException
        reason = f"the server's answer is not understood ({type(error).__name__})"
    return f"{reason}{_UNKNOWN}"


class _UnknownError(Exception):
    """It is unknown whether a server redirects."""


def _is_local(url: SplitResult, location: str) -> bool:
    """True if all parsers of URLs take a redirect for one to the same scheme, host and port."""
    if match := re.match(r"([A-Za-z]+)://([^/?#]*)(?=[/?]|$)", location):
        port = f":{_PORTS[url.scheme]}"
        host = url.netloc.rpartition("@")[2].removesuffix(port)
        if (match[1].lower(), match[2].lower().removesuffix(port)) != (url.scheme, host):
            return False
        location = location[match.end() :] or "/"
    return _LOCAL.fullmatch(location) is not None


def _target(url: str, location: str) -> str:
    """The server to which a redirect leads, for messages; the path if it names no server."""
    location = re.sub(r"[\t\r\n]", "", location)  # as some parsers do
    match = re.match(r"(?:([A-Za-z][\w+.-]*):|(?=[/\\]{2}))[/\\]*(.*)", location)
    if match is None:
        return re.split(r"[?#]", location, maxsplit=1)[0]
    address = shown_url(f"{match[1] or urlsplit(url).scheme}://{match[2]}")
    return re.split(r"(?<![:/])[/\\]", address, maxsplit=1)[0]


def _locations(url: SplitResult, client: Mapping[str, Any]) -> list[str]:
    """Asks for one byte of a web address; returns the targets of a redirect."""
    for _ in range(_TRIES):
        status, locations = _ask(url, client)
        if status in _REDIRECTS:
            return locations
        if 200 <= status < 500 and status not in _TRANSIENT:
            return []
    raise _UnknownError(f"the server answered with HTTP status {status}")


def _ask(url: SplitResult, client: Mapping[str, Any]) -> tuple[int, list[str]]:
    """The status of the answer to a request for one byte, and its headers `Location`."""
    from http.client import HTTPConnection, HTTPSConnection  # only secrets need it

    proxy = _proxy(url, client)
    if proxy is not None and (proxy.scheme != "http" or not proxy.hostname):
        raise _UnknownError(f"expected a proxy of the scheme http, found {shown(proxy.scheme)}")
    server = proxy or url
    headers: dict[str, str | bytes] = {
        "user-agent": client.get("user_agent", "object_store"),
        **authorization(url),
        **{name.lower(): value for name, value in client.get("default_headers", {}).items()},
        "range": "bytes=0-0",
    }
    path = url._replace(scheme="", netloc="", path=url.path or "/", fragment="").geturl()
    path = quote(path, safe="!\"#$%&'()*+,/:;<=>?@[\\]^_`{|}~")
    address = server.hostname or "", server.port or _PORTS[server.scheme]
    connection = HTTPConnection(*address, timeout=TIMEOUT)
    if url.scheme == "https":
        connection = HTTPSConnection(*address, timeout=TIMEOUT, context=_context(client))
    if proxy is not None:
        to_proxy = authorization(proxy, "proxy-authorization")
        if url.scheme == "https":
            connection.set_tunnel(url.hostname or "", url.port or _PORTS["https"], to_proxy)
        else:
            headers |= to_proxy
            path = f"http://{url.netloc.rpartition('@')[2]}{path}"
    with closing(connection):
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        while answer.status < 200:  # http.client skips only 100
            answer.headers = None  # type: ignore[assignment]
            answer.begin()
        # A line that is no header ends the headers: it and the lines after it are the payload.
        if answer.status in _REDIRECTS and answer.headers.get_payload():
            raise _UnknownError("the server's answer is not understood (a line is no header)")
        locations = answer.headers.get_all("location", [])
        return answer.status, [location.strip(" \t\r\n") for location in locations]


def _proxy(url: SplitResult, client: Mapping[str, Any]) -> SplitResult | None:
    """The proxy for a web address, by the client's options or the environment."""
    from urllib import request

    if "proxy_url" in client:
        proxy = client["proxy_url"]
        no_proxy = {"no": client.get("proxy_excludes", "")}
        is_bypassed = request.proxy_bypass_environment(url.netloc, no_proxy)  # type: ignore
    else:
        proxies = request.getproxies()
        proxy = proxies.get(url.scheme) or proxies.get("all")
        is_bypassed = request.proxy_bypass(url.netloc)
    if not proxy or is_bypassed:
        return None
    return urlsplit(proxy if "://" in proxy else f"http://{proxy}")


def authorization(url: SplitResult, name: str = "authorization") -> dict[str, str]:
    """The header for the user and the password of a URL, if it has them."""
    if url.username is None:
        return {}
    user = f"{unquote(url.username)}:{unquote(url.password or '')}"
    return {name: "Basic " + base64.b64encode(user.encode()).decode()}


def _context(client: Mapping[str, Any]) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if certificate := client.get("root_certificate"):
        text = certificate.decode() if isinstance(certificate, bytes) else certificate
        context.load_verify_locations(cadata=text)
    if str(client.get("allow_invalid_certificates")).lower() == "true":
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
