"""`Address`: a URL, or a key in a store; URLs without their secrets, and relative paths."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard
from urllib.parse import quote, unquote_to_bytes, urlsplit

from onnxarchive.errors import UnsupportedFeatureError, quoted

if TYPE_CHECKING:
    from obstore.store import ObjectStore

Store: TypeAlias = "ObjectStore"

WEB = ("http", "https")
# {scheme of a URL: class of obstore}. obstore also reads web addresses, fsspec all other URLs.
STORES = {"az": "AzureStore", "gs": "GCSStore", "s3": "S3Store"}
# RFC 3986, section 3.1. A single letter is a drive of Windows. fsspec chains URLs by `::`.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+)(?:::[A-Za-z][A-Za-z0-9+.\-]+)*://")
_FILE_SCHEME = re.compile("(?i)file:/")  # file:///p, file://localhost/p or file:/p (RFC 8089)

# Patterns that most processes do not use: `re` compiles each on first use.
_CHAINED = r"::(?=[A-Za-z][A-Za-z0-9+.\-]*(?:://|::))"
# Schemes whose keys, or paths in a repository, may have `?` and `#`.
_KEYED = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hf")
# Schemes of local files, which have neither a user nor a port.
_LOCAL = ("file", "local", "memory", "zip", "tar")
# Schemes whose hosts may have a port, and no other text after a colon.
_PORTED = (*WEB, *_KEYED, "ftp", "sftp")
_SIX = r"\[[\da-fA-F:.]*\](?::\d*)?(?=[/?#]|$)"  # an IPv6 address, and perhaps a port
_NO_PORT = r"\A([^\w:]*[^/?#\\:]*):(?!\d*(?:[/?#\\]|$))[^/?#\\]*"
# Paths that are meant as URLs: a blank or a quote was pasted, too, or pathlib has removed a slash.
_MISSPELLED = (
    rf"(?is)[^\w/\\.]*(?:[a-z][\w+.-]*::)*({'|'.join(_PORTED)})"
    r"(?::\s*[/\\]|:(?=.*@)|//|/(?=[^/]*:[^/]*@))[/\\]*"
)
# Parameters of signed URLs: of AWS, CloudFront, Google and Azure.
_SIGNED = r"(?:x-(?:amz|goog)-)?(?:signature|sig)"
_OF_SIGNATURE = (
    r"(?i)x-(?:amz|goog)-.*|awsaccesskeyid|googleaccessid|signature|expires|policy|key-pair-id"
    r"|sig|s[eprtv]|sip|spr|ske|skoid|sks|skt|sktid|skv"
)


def is_url(source: object) -> TypeGuard[str]:
    """True for a string that begins with a scheme and `://`, unless it names a local file.

    So it is False for a file URL, which `local_path` decodes, and for a path on Windows.
    """
    return (
        isinstance(source, str)
        and _SCHEME.match(source) is not None
        and _FILE_SCHEME.match(source) is None
    )


def local_path(source: str | os.PathLike[str]) -> str:
    """The path of a local file: a file URL gives its path, and any other path is unchanged.

    The escapes of the URL are decoded once, to the bytes of the file system's name, as
    `pathlib.Path.as_uri` has encoded them. Only a string can be a URL.

    Raises:
        UnsupportedFeatureError: A file URL has a host other than `localhost`, a query or a
            fragment, or names no path.
    """
    if not isinstance(source, str) or _FILE_SCHEME.match(source) is None:
        return os.fspath(source)
    host, escaped = "", source.partition(":")[2]
    if escaped.startswith("//"):
        host, slash, rest = escaped[2:].partition("/")
        escaped = slash + rest
    path = os.fsdecode(unquote_to_bytes(os.fsencode(escaped)))
    is_local = host.lower() in ("", "localhost")
    if not (is_local and path) or re.search("[?#]", escaped) or "\0" in path:
        raise UnsupportedFeatureError(
            "expected a file of this machine, as file:///directory/model.onnxa; a file URL has no "
            "other host than localhost, and no query or fragment ('?' and '#' in a name are "
            "written %3F and %23)",
            path=url_without_secrets(source),
        )
    if os.name == "nt":
        path = re.sub("^/([A-Za-z])[:|]", r"\1:", path)
    return path


def scheme_of(url: str) -> str:
    """The scheme of a URL, in lower case; empty if there is none."""
    match = _SCHEME.match(url)
    return "" if match is None else match[1].lower()


def url_without_secrets(url: str) -> str:
    """A URL for messages: without user, password, query and fragment, which may be secret.

    A path is returned unchanged, and so is the key in S3, Google Cloud Storage or Azure and the
    path in a repository of Hugging Face, unless it looks like the query of a signed URL. A password
    may have `/`, `?`, `#` and `@`, and `:` may begin a password or a port: after a `:`, everything
    up to the last `@` is removed, even if this removes a part of the path. So it is if the host is
    missing, as in `http:///user@host`; and after a `:`, what is no port becomes `...`.
    """
    if "://" not in url:
        return url
    return "::".join(map(_shown, re.split(_CHAINED, url)))


def _shown(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    kind = scheme.lower()
    host = re.split(r"[/?#]", rest, maxsplit=1)[0]
    has_colon = ":" in re.sub(r"^\[[^]@]*\]", "", host)  # other than those of an IPv6 address
    end = len(host)
    if has_colon or (not host and kind not in _LOCAL):
        end = len(rest)
    rest = rest[rest.rfind("@", 0, end) + 1 :]
    if (not kind or kind in _PORTED) and not re.match(_SIX, rest):
        rest = re.sub(_NO_PORT, r"\1:...", rest, count=1)
    if kind in _KEYED and host and not re.search(rf"(?i)[?&#]{_SIGNED}=", rest):
        return scheme + separator + rest
    return scheme + separator + re.split(r"[?#]", rest, maxsplit=1)[0]


def misspelled_url(path: str) -> str | None:
    """The URL that a path seems to be, without secrets; None for other paths.

    A directory of this name, such as `http:`, makes it a path.
    """
    if not (":" in path or "//" in path) or path.startswith(("/", "\\")) or is_url(path):
        return None
    if match := re.match(_MISSPELLED, path):
        url = f"{match[1].lower()}://{path[match.end() :]}"
    elif re.search(rf"(?is)(?:://|\w{{2}}:[/\\]).*(?:@|[?&#]{_SIGNED}=)", path):
        url = re.sub(r":[/\\]+", "://", path, count=1)
    else:
        return None
    is_path = os.path.lexists(re.split(r"[/\\]", path, maxsplit=1)[0])
    return None if is_path else url_without_secrets(url)


def without_user(url: str) -> str:
    """A URL without user and password, for requests (RFC 3986, section 3.2.1)."""
    return re.sub(r"(?<=://)[^/?#]*@", "", url)


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


@dataclass(frozen=True, slots=True, repr=False)
class Address:
    """Where an object is: a URL, or a key in a store of the caller, and the options to reach it.

    Attributes:
        url: The URL or the key.
        store: The store of obstore; None for a URL.
        options: Options of obstore, of fsspec and of this package; see `stores`.
    """

    url: str
    store: Store | None = None
    options: Mapping[str, Any] | None = None

    def beside(self, location: str) -> Address:
        """The address of an object, given its path relative to the folder of this one.

        Only web addresses have escapes and a query; other URLs contain the unescaped key or path.
        """
        path, query = self.url, ""
        if scheme_of(self.url) in WEB:
            path = re.split(r"[?#]", self.url, maxsplit=1)[0]
            location, query = quote(location), self.url[len(path) :]
        return replace(self, url=path[: path.rfind("/") + 1] + location + query)

    @property
    def name(self) -> str:
        """The name for messages, without secrets."""
        return url_without_secrets(self.url) if self.store is None else self.url

    @property
    def is_of_store(self) -> bool:
        """True if obstore reads and writes the object, False if fsspec does."""
        return self.store is not None or scheme_of(self.url) in (*STORES, *WEB)

    @property
    def is_web(self) -> bool:
        """True for a web address, which obstore can only read."""
        if self.store is None:
            return scheme_of(self.url) in WEB
        return type(self.store).__name__ == "HTTPStore"

    def require_no_web(self, purpose: str) -> None:
        """Refuses a web address, whose objects can only be read."""
        if self.is_web:
            raise UnsupportedFeatureError(
                f"expected the URL of a store {purpose}, such as s3://, gs:// or az://, found a "
                "web address",
                path=self.name,
            )

    def require_key(self) -> None:
        """Refuses a URL or key that the libraries would take for that of another object.

        obstore drops a slash at the beginning and at the end of a key, fsspec those at the end.
        """
        has_store = self.store is not None
        path = self.url if has_store else self.url.partition("://")[2].partition("/")[2]
        if self.is_web:
            is_right = has_store or not path.startswith("/")
        elif self.is_of_store:
            is_right = not re.search(r"[\0-\x1f\x7f]", path)
            is_right &= not {"", ".", ".."} & {*path.split("/")}
        else:
            is_right = not self.url.partition("::")[0].endswith("/")
        if not is_right:
            raise UnsupportedFeatureError(
                "expected a key without a slash at its beginning or end, empty components, '.', "
                f"'..' and control characters, found {quoted(self.name)}; rename the object"
            )
