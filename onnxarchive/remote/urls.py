"""Recognises URLs, removes their secrets, and resolves relative paths."""

from __future__ import annotations

import re
from typing import TypeGuard
from urllib.parse import quote, urlsplit

WEB = ("http", "https")
# RFC 3986, section 3.1. A single letter is a drive of Windows. fsspec chains URLs by `::`.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+)(?:::[A-Za-z][A-Za-z0-9+.\-]+)*://")

# Patterns that most processes do not use: `re` compiles each on first use.
_USER_INFO = r"(?<=://)[^/?#]*@"
_CHAINED = r"::(?=[A-Za-z][A-Za-z0-9+.\-]*(?:://|::))"
# Schemes of stores whose keys may have `?` and `#`.
_KEYED = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
# Parameters of signed URLs: of AWS, CloudFront, Google and Azure.
_SIGNED = r"(?:x-(?:amz|goog)-)?(?:signature|sig)"
_OF_SIGNATURE = (
    r"(?i)x-(?:amz|goog)-.*|awsaccesskeyid|googleaccessid|signature|expires|policy|key-pair-id"
    r"|sig|s[eprtv]|sip|spr|ske|skoid|sks|skt|sktid|skv"
)


def is_url(source: object) -> TypeGuard[str]:
    """True for a string that begins with a scheme and `://`; False for a Windows path."""
    return isinstance(source, str) and _SCHEME.match(source) is not None


def scheme_of(url: str) -> str:
    """The scheme of a URL, in lower case; empty if there is none."""
    match = _SCHEME.match(url)
    return "" if match is None else match[1].lower()


def shown_url(url: str) -> str:
    """A URL for messages: without user, password, query and fragment, which may be secret.

    A path is returned unchanged, and so is the key in S3, Google Cloud Storage or Azure, unless it
    looks like the query of a signed URL. A password may have `/`, `?`, `#` and `@`, and `:` may
    begin a password or a port: after a `:`, everything up to the last `@` is removed, even if this
    removes a part of the path.
    """
    if "://" not in url:
        return url
    return "::".join(map(_shown, re.split(_CHAINED, url)))


def _shown(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    host = re.split(r"[/?#]", rest, maxsplit=1)[0]
    has_colon = ":" in re.sub(r"^\[[^]@]*\]", "", host)  # other than those of an IPv6 address
    rest = rest[rest.rfind("@", 0, len(rest if has_colon else host)) + 1 :]
    if scheme.lower() in _KEYED and not re.search(rf"(?i)[?&#]{_SIGNED}=", rest):
        return scheme + separator + rest
    return scheme + separator + re.split(r"[?#]", rest, maxsplit=1)[0]


def without_user(url: str) -> str:
    """A URL without user and password, for requests (RFC 3986, section 3.2.1)."""
    return re.sub(_USER_INFO, "", url)


def unsigned_url(url: str) -> str:
    """A web address without user, fragment and the parameters of a signature.

    Other parameters are kept, because they may select the object. The result is only for hashing.
    """
    parameters = [pair for pair in urlsplit(url).query.split("&") if pair]
    names = [pair.partition("=")[0] for pair in parameters]
    if any(re.fullmatch(_SIGNED, name, re.IGNORECASE) for name in names):
        parameters = [
            pair
            for pair, name in zip(parameters, names, strict=True)
            if not re.fullmatch(_OF_SIGNATURE, name)
        ]
    return "?".join((without_user(re.split(r"[?#]", url, maxsplit=1)[0]), *parameters))


def beside(url: str, location: str) -> str:
    """The URL or key of an object, given its path relative to the folder of `url`.

    Only web addresses have escapes and a query; other URLs contain the unescaped key or path.
    """
    if scheme_of(url) not in WEB:
        return url[: url.rfind("/") + 1] + location
    path = re.split(r"[?#]", url, maxsplit=1)[0]
    return path[: path.rfind("/") + 1] + quote(location) + url[len(path) :]
