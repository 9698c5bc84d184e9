"""Asks a web address for one byte, to learn whether the server redirects.

The request goes through Python's own HTTP client, since that of obstore would follow a redirect.
"""

from __future__ import annotations

import base64
import re
import socket
import ssl
from collections.abc import Mapping
from contextlib import closing
from typing import Any
from urllib.parse import SplitResult, quote, unquote

PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)  # those that obstore follows
_TRANSIENT = (407, 408, 425, 429)  # with 500 and above: the next answer may differ
_TRIES = 3  # at an address with transient answers
# Why there is no connection, for these and all other requests.
_PROXY = "the proxy that HTTPS_PROXY, HTTP_PROXY, ALL_PROXY or proxy_url names"
CHECK_PROXY = f"check {_PROXY}"
NO_CONNECTION = "there is no connection to the server"
NO_PROXY = f"there is no connection to the proxy; {CHECK_PROXY}"
NO_TLS = f"{NO_CONNECTION}: it does not answer with TLS; if it has no TLS, use http://"
NO_TRUST = (
    f"{NO_CONNECTION}: no known authority has signed its certificate; SSL_CERT_FILE in the "
    "environment names a file of authorities (PEM), and so does root_certificate in storage_options"
)
NOT_RESOLVED = f"{NO_CONNECTION}: no host has this name; check the name, the network and {_PROXY}"
REFUSED = (
    f"{NO_CONNECTION}: its port refuses it; check that the server runs, the port, and {_PROXY}"
)


class NoAnswerError(Exception):
    """The server does not answer, now or at all; obstore would get no answer, either."""


class NoConnectionError(NoAnswerError):
    """There is no connection; the text says why, and what to check."""


class UnclearAnswerError(Exception):
    """The server's answer is not understood."""


def redirects_of(
    url: SplitResult, client: Mapping[str, Any], proxy: SplitResult | None, timeout: float
) -> list[str]:
    """The targets of the redirect with which a server answers; none if it does not redirect.

    Args:
        url: The web address.
        client: The options of obstore's HTTP client, for the headers and the certificates.
        proxy: The proxy to ask, of the scheme `http`; None to ask the server itself.
        timeout: The seconds that connecting may take, and each part of the answer.

    Raises:
        NoAnswerError: There is no connection, or no final answer after some tries.
        UnclearAnswerError: The answer is not understood.
    """
    problem = None
    try:
        for _ in range(_TRIES):
            status, locations = _ask(url, client, proxy, timeout)
            if status in _REDIRECTS:
                return locations
            if 200 <= status < 500 and status not in _TRANSIENT:
                return []
    except ssl.SSLCertVerificationError:
        reason = "Python cannot verify the server's certificate (SSL_CERT_FILE names authorities)"
    except TimeoutError:
        reason = "the server took too long to answer"
    except OSError as error:
        problem = _no_connection(error, proxy)
    except UnclearAnswerError:
        raise
    except Exception as error:  # such as ValueError or http.client.HTTPException
        kind = type(error).__name__
        raise UnclearAnswerError(f"the server's answer is not understood ({kind})") from None
    else:
        reason = f"the server answered with HTTP status {status}"
    if problem is not None:
        raise problem
    raise NoAnswerError(reason)


def _no_connection(error: OSError, proxy: SplitResult | None) -> NoAnswerError:
    """The error to raise instead of one of Python's HTTP client."""
    if match := re.match(r"Tunnel connection failed: (\d+)", str(error)):
        return NoAnswerError(f"the proxy answered with HTTP status {match[1]}")
    if isinstance(error, ssl.SSLError):
        return NoConnectionError(NO_TLS)
    if proxy is not None:
        return NoConnectionError(NO_PROXY)
    if isinstance(error, socket.gaierror):
        return NoConnectionError(NOT_RESOLVED)
    if isinstance(error, ConnectionRefusedError):
        return NoConnectionError(REFUSED)
    return NoAnswerError(NO_CONNECTION)


def _ask(
    url: SplitResult, client: Mapping[str, Any], proxy: SplitResult | None, timeout: float
) -> tuple[int, list[str]]:
    """The status of the answer to a request for one byte, and its headers `Location`."""
    from http.client import HTTPConnection, HTTPSConnection  # only secrets need it

    server = proxy or url
    headers: dict[str, str | bytes] = {
        "user-agent": client.get("user_agent", "object_store"),
        **authorization(url),
        **{name.lower(): value for name, value in client.get("default_headers", {}).items()},
        "range": "bytes=0-0",
    }
    path = url._replace(scheme="", netloc="", path=url.path or "/", fragment="").geturl()
    path = quote(path, safe="!\"#$%&'()*+,/:;<=>?@[\\]^_`{|}~")
    address = server.hostname or "", server.port or PORTS[server.scheme]
    connection = HTTPConnection(*address, timeout=timeout)
    if url.scheme == "https":
        connection = HTTPSConnection(*address, timeout=timeout, context=_context(client))
    if proxy is not None:
        to_proxy = authorization(proxy, "proxy-authorization")
        if url.scheme == "https":
            connection.set_tunnel(url.hostname or "", url.port or PORTS["https"], to_proxy)
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
            raise UnclearAnswerError("the server's answer is not understood (a line is no header)")
        locations = answer.headers.get_all("location", [])
        return answer.status, [location.strip(" \t\r\n") for location in locations]


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
