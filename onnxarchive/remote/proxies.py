"""Determines which proxy obstore uses for a web address.

The rules are those of reqwest, the HTTP client of obstore, on every system. They differ from those
of urllib: networks count, `*` matches all names but no IP address, and an entry with a port
excludes nothing. Names are not resolved. If these rules leave a case open, an error is raised
instead of a guess.
"""

from __future__ import annotations

import os
import re
import string
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Any
from urllib.parse import SplitResult, urlsplit

from onnxarchive.errors import quoted

_PROXY = re.compile(
    r"(?:https?://)?"
    r"(?:[\w.~%!$&'()*+,;=:-]*@)?"  # a user and a password
    r"(?:[\w.-]+|\[[\da-f:.]+\])(?::\d{1,5})?(?:[/?#]\S*)?",
    re.ASCII | re.IGNORECASE,
)
_NAME = re.compile(r"[\w.-]+", re.ASCII)
_LAST_IS_NUMBER = re.compile(r"(?:.*\.)?(?:\d+|0x[\da-f]*)\.?", re.IGNORECASE)
_NETWORK = re.compile(r"[\d.]+(?:/\d{1,2})?|[\da-f.]*:[\da-f:.]*(?:/\d{1,3})?", re.I | re.A)


class UnknownProxyError(Exception):
    """It is unknown which proxy obstore uses."""


def proxy_of(scheme: str, host: str, client: Mapping[str, Any]) -> SplitResult | None:
    """The proxy that obstore uses for a server; None if it connects to the server itself.

    Args:
        scheme: The scheme of the address, `http` or `https`.
        host: The host of the address as obstore's `HTTPStore.url` has it, without brackets.
        client: The options of obstore's HTTP client. `proxy_url` counts instead of the environment.

    Raises:
        UnknownProxyError: These rules do not cover the form of a setting or of the host.
    """
    setting, proxy, excluded = _settings(scheme, client)
    if not proxy or (excluded and _excludes(excluded, host)):
        return None
    with suppress(ValueError):
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        if _PROXY.fullmatch(proxy) and parts.port != 0:
            return parts
    raise UnknownProxyError(
        f"{setting} is not a URL such as http://host:port, with escapes in user and password"
    )


def _settings(scheme: str, client: Mapping[str, Any]) -> tuple[str, str, str]:
    """The name of the setting that names a proxy, its value, and the hosts that it excludes."""
    if "proxy_url" in client:
        return "proxy_url", str(client["proxy_url"]), str(client.get("proxy_excludes", ""))
    # A server's script (CGI) finds the header `Proxy` of a request in HTTP_PROXY.
    if "REQUEST_METHOD" not in os.environ:
        for name in (f"{scheme}_proxy", "all_proxy"):
            if proxy := _variable(name):
                return name.upper(), proxy, _variable("no_proxy")
    return "", "", ""


def _variable(name: str) -> str:
    """An environment variable in upper case, also if it is empty; or else in lower case."""
    return os.environ.get(name.upper(), os.environ.get(name, ""))


def _excludes(entries: str, host: str) -> bool:
    """True if a list as in NO_PROXY has a host."""
    if not entries.isascii():
        raise UnknownProxyError("NO_PROXY or proxy_excludes has characters that are not ASCII")
    _require_canonical(host)
    parts = [part.strip(string.whitespace) for part in entries.lower().split(",")]
    parts = [part for part in parts if part]
    if (address := _network(host)) is not None:
        networks = [network for network in map(_network, parts) if network is not None]
        return any(address[0] in network for network in networks)
    names = [part.removeprefix(".") for part in parts]
    return "*" in parts or any(f".{host.lower()}".endswith(f".{name}") for name in names)


def _require_canonical(host: str) -> None:
    """Refuses a host that obstore converts, such as `127.1` to 127.0.0.1, or an escape."""
    is_name = _NAME.fullmatch(host) and not _LAST_IS_NUMBER.fullmatch(host)
    if not is_name and ("/" in host or _network(host) is None):
        raise UnknownProxyError(
            "expected a host of ASCII letters, digits, '-' and '.', or an IP address in its usual "
            f"form, found {quoted(host)}"
        )


def _network(entry: str) -> IPv4Network | IPv6Network | None:
    """The network of an entry, or of an IP address; None for a name."""
    if _NETWORK.fullmatch(entry):
        with suppress(ValueError):
            return ip_network(entry, strict=False)
    return None
