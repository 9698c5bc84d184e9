"""Converts errors of obstore and fsspec to OSErrors and errors of this package.

The libraries' own texts may contain secrets. Of these texts, this module shows only the invalid key
of an object.
"""

from __future__ import annotations

import errno
import os
import re
import ssl
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from onnxarchive.errors import ObjectChangedError, quoted
from onnxarchive.remote.probe import (
    CHECK_PROXY,
    NO_CONNECTION,
    NO_PROXY,
    NO_TLS,
    NO_TRUST,
    NOT_RESOLVED,
    REFUSED,
)
from onnxarchive.remote.redirects import NOWHERE, REMEDY, RefusedRedirectError
from onnxarchive.remote.urls import WEB, scheme_of

_Result = TypeVar("_Result")
# The ends of the key in the text of an InvalidPathError. A pattern would take time that grows with
# the square of a key's length.
_KEY_ENDS = ('": Encountered', '" contained')
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z]{1,64})</Code>")  # in the answer of a store
_MOST_SHOWN = 2  # characters of a value that hides nothing
_MOST_TEXT = 8 << 10  # characters of an error's text; obstore adds the body of an answer
# The addresses from which machines in a cloud request credentials if none are configured.
_CREDENTIAL_SERVER = re.compile(r"//(169\.254\.169\.254|metadata\.google\.internal)/")
# The server in the text of an error of obstore.
_SERVER = re.compile(r"https?://(?:[^/?#\s]*@)?([\w.-]+(?::\d+)?)(?=[/?#\s,]|$)", re.ASCII)
_COPY = "; fetch the whole file with another tool, such as curl, and open the copy"
NO_SIZE = f"the server states no size{_COPY}"
_RUSTLS, _SSL = r"InvalidCertificate\(\s*", "CERTIFICATE_VERIFY_FAILED.*"
# {pattern of an error's text: reason to show}; the first pattern that matches counts.
_REASONS = {
    re.escape(NOWHERE): f"the server redirects{REMEDY}",
    r"^NotSupportedError": "the server does not answer requests for ranges of bytes; 'onnxarchive "
    "download' (onnxarchive.download) fetches a whole archive, and so does onnxarchive.open with "
    "cache=True; fetch other files with another tool, such as curl",
    r"\bTimedOut|\bTimeout": "the server took too long to answer; stall_timeout in "
    "storage_options allows more seconds without a byte",
    r'CONTENT_RANGE header: "bytes \d+-\d+/\*': "the server states no size in Content-Range, which "
    f"ends with '/*'{_COPY}",
    r"Content-Range header not present": "the server states no Content-Range in its answer to a "
    f"request for a range of bytes{_COPY}",
    r"Content-Length Header missing": "the server states no size: Content-Length is missing"
    f"{_COPY}",
    r"CONTENT_RANGE|UnexpectedRange": "the server sent other bytes than those asked for",
    r"(?s)following redirect.*BadScheme": "the server redirects from https to http or to another "
    "scheme; no option allows this",
    r"following redirect": "the server redirects in a circle or too many times",
    r"redirect without LOCATION": "the server redirects to no address; S3 does so if a bucket is "
    "in another region: set region in storage_options",
    r"InvalidLastModified": f"the server states a Last-Modified that is no date{_COPY}",
    # Certificates, in the words of rustls and of Python's ssl.
    rf"{_RUSTLS}UnknownIssuer|{_SSL}(issuer|self.signed)": NO_TRUST,
    rf"{_RUSTLS}Other\(\s*OtherError\(\s*CaUsedAsEndEntity": f"{NO_CONNECTION}: its "
    "certificate is that of an authority, signed by itself; the server needs one that an authority "
    "has signed",
    rf"{_RUSTLS}NotValidForName|{_SSL}mismatch": f"{NO_CONNECTION}: its certificate is for "
    "another host; use the host that the certificate names",
    rf"{_RUSTLS}(Expired|NotValidYet)|{_SSL}(expired|yet valid)": f"{NO_CONNECTION}: its "
    "certificate has expired, or is not valid yet; check the clock of this machine",
    r"InvalidCertificate|SSLCertVerificationError": f"{NO_CONNECTION}: its certificate "
    "is not valid",
    r"InvalidMessage\(\s*InvalidContentType|WRONG_VERSION_NUMBER|RECORD_LAYER_FAILURE": NO_TLS,
    # obstore asks a proxy for a connection to a server of https.
    r"\bTunnelUnsuccessful\b": f"the proxy opens no connection to the server; {CHECK_PROXY}",
    r"\bConnectFailed\(": NO_PROXY,
    r"dns error|^gaierror|ConnectorDNSError|Name or service not known|getaddrinfo": NOT_RESOLVED,
    r"\bConnectionRefused\b": REFUSED,
    r"\bConnect\b|ConnectError": NO_CONNECTION,
    r"ConnectionReset|IncompleteMessage": "the server closed the connection without an "
    "answer; check if it expects https:// or a proxy",
    r"builder error": "http:// is not allowed; allow_http in storage_options allows it",
}
# {code in the answer of a store: likely cause}
_CAUSES = {
    "AuthorizationHeaderMalformed": "set region in storage_options to the region of the bucket",
    "ExpiredToken": "the token has expired; get new credentials",
    "RequestTimeTooSkewed": "set the clock of this machine",
}
_S3FS_NO_BUCKET = "bucket does not exist"  # in the words of s3fs


class StalledError(OSError):
    """No byte has arrived for some time."""


def status_of(error: BaseException) -> int | None:
    """The HTTP status in a library's error, or None if the error has no status."""
    status = getattr(error, "status", None)  # an attribute of aiohttp's errors
    if isinstance(status, int):
        return status
    match = _STATUS.search(_text(error))
    return None if match is None else int(match[1])


def refuses_suffix(error: BaseException) -> bool:
    """True if a server does not answer a request for the last bytes of an object.

    Such servers send the first bytes, the whole object, no size, or a status: 416 may come with the
    whole object, which obstore cannot decode as text.
    """
    text, status = _text(error), status_of(error)
    if status is not None:
        return status in (405, 416, 501) or (status == 400 and not _CODE.search(text))
    pattern = r"^NotSupportedError|CONTENT_RANGE|UnexpectedRange|Content-Range|invalid utf-8"
    return re.search(pattern, text) is not None


def without_values(error: BaseException, values: Iterable[str]) -> str:
    """The first line of an error's text, without these values and without quoted text."""
    text = str(error).partition("\n\n")[0]
    for value in sorted(values, key=len, reverse=True):
        if len(value) > _MOST_SHOWN:
            text = text.replace(value, "...")
    return re.sub('(?s)["`].*["`]', '"..."', text).splitlines()[0]


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_MOST_TEXT]


def changed(name: str) -> ObjectChangedError:
    """The error for an object that has changed since it was opened."""
    return ObjectChangedError(
        "the object has changed since it was opened; open it again", path=name
    )


class NoRangesError(OSError):
    """The server does not answer requests for ranges of bytes."""


def failure(error: BaseException, name: str) -> Exception:
    """The error to raise instead of an error of obstore, fsspec or their dependencies.

    Raise it after the `except` block, so that it has neither cause nor context.
    """
    if type(error).__name__ == "PreconditionError":
        return changed(name)
    kind = NoRangesError if type(error).__name__ == "NotSupportedError" else OSError
    return kind(*_reason(_Problem.of(error, name)), name)


@dataclass(frozen=True, slots=True)
class _Problem:
    """The known facts about a library's error.

    Attributes:
        error: The error.
        name: The object's name for messages.
        text: The error's type and text, which may contain secrets.
        status: The HTTP status of the answer, if there is one.
        code: The code in the answer of a store; empty if there is none.
    """

    error: BaseException
    name: str
    text: str
    status: int | None
    code: str

    @classmethod
    def of(cls, error: BaseException, name: str) -> _Problem:
        """Reads the text of an error."""
        text = _text(error)
        code = _CODE.search(text)
        return cls(error, name, text, status_of(error), "" if code is None else code[1])

    @property
    def answer(self) -> str:
        """Status and code of the answer, for messages; empty without a status."""
        if self.status is None:
            return ""
        return f"HTTP status {self.status}" + (f", {self.code}" if self.code else "")


# The number of the error to raise, and its text.
_Reason: TypeAlias = tuple[int, str]


def _reason(problem: _Problem) -> _Reason:
    """Tries each kind of error in turn."""
    for find in (_redirect, _missing, _no_access, _wrong_key, _known_text, _status, _number):
        if (reason := find(problem)) is not None:
            return reason
    return errno.EIO, f"the request failed ({type(problem.error).__name__})"


def _redirect(problem: _Problem) -> _Reason | None:
    chain = [problem.error]  # fsspec may report any error as a missing file
    while len(chain) < 9 and (cause := chain[-1].__cause__ or chain[-1].__context__):
        chain.append(cause)
    for each in chain:
        if isinstance(each, RefusedRedirectError):
            return errno.EIO, str(each)
    return None


def _missing(problem: _Problem) -> _Reason | None:
    """A missing object or bucket. For obstore, the status 405 also means a missing file."""
    status, error = problem.status, problem.error
    is_file_error = status is None and isinstance(error, FileNotFoundError)
    if status not in (404, 410) and not is_file_error:
        return None
    if problem.code == "NoSuchBucket" or (is_file_error and _S3FS_NO_BUCKET in problem.text):
        return errno.ENOENT, "No such bucket; create it, or check its name"
    if problem.code == "ContainerNotFound":
        return errno.ENOENT, "No such container; create it, or check its name and the account"
    return errno.ENOENT, "No such object"


def _no_access(problem: _Problem) -> _Reason | None:
    if _CREDENTIAL_SERVER.search(problem.text):
        return errno.EACCES, (
            "there are no credentials in the environment or in storage_options; set "
            "skip_signature in storage_options for a public bucket"
        )
    if not isinstance(problem.error, PermissionError) and problem.status not in (401, 403):
        return None
    answer = problem.answer
    return errno.EACCES, (
        f"the server refuses access{answer and f' ({answer})'}; give credentials that allow it "
        "and have not expired, in the environment, in storage_options, or in the signature of the "
        "URL"
    )


def _wrong_key(problem: _Problem) -> _Reason | None:
    if type(problem.error).__name__ != "InvalidPathError":
        return None
    rest = str(problem.error).partition('Path "')[2]
    end = max(map(rest.rfind, _KEY_ENDS))
    key = "of an object" if end < 0 else quoted(rest[:end])
    return errno.EIO, (
        f"obstore cannot list a folder because of the key {key}: the key has control "
        "characters, or a component that is empty, '.' or '..'; rename the object"
    )


def _known_text(problem: _Problem) -> _Reason | None:
    """The reason by a pattern of the error's text.

    A timeout becomes a plain OSError: asyncio would replace a TimeoutError by an error that lacks
    the object's name.
    """
    for pattern, reason in _REASONS.items():
        if re.search(pattern, problem.text):
            return errno.EIO, reason.replace("to the server", f"to {_server(problem)}", 1)
    return None


def _server(problem: _Problem) -> str:
    """The server for messages. A web address has its name already."""
    match = None if scheme_of(problem.name) in WEB else _SERVER.search(problem.text)
    return "the server" if match is None else f"the server {match[1]}"


def _status(problem: _Problem) -> _Reason | None:
    if problem.status is None:
        return None
    remedy = _CAUSES.get(problem.code, "")
    return errno.EIO, f"the server answered with {problem.answer}{remedy and f'; {remedy}'}"


def _number(problem: _Problem) -> _Reason | None:
    """The system's number. Errors of TLS and of names of hosts have numbers of their own."""
    number: Any = getattr(problem.error, "errno", None)
    if number in errno.errorcode and not isinstance(problem.error, ssl.SSLError):
        return number, os.strerror(number)
    return None


def _converted(
    error: BaseException, name: str, convert: Callable[[BaseException, str], Exception] = failure
) -> BaseException:
    """The error to raise instead of a library's error or panic.

    A MemoryError is unchanged, and so are Ctrl-C and the like.
    """
    if isinstance(error, MemoryError):
        return error
    is_of_library = isinstance(error, Exception) or type(error).__name__ == "PanicException"
    return convert(error, name) if is_of_library else error


def call_library(
    name: str,
    call: Callable[[], _Result],
    convert: Callable[[BaseException, str], Exception] = failure,
) -> _Result:
    """Calls a library; converts its errors, and drops them with the secrets in their texts."""
    try:
        return call()
    except BaseException as error:
        problems = [_converted(error, name, convert)]
    # After `pop`, no variable refers to the error. A variable would complete a reference cycle
    # (error, traceback, frame), and the cycle would keep the frames' files open.
    raise problems.pop()


async def await_request(name: str, call: Callable[[], Awaitable[_Result]]) -> _Result:
    """Awaits a call of a library; `failure` converts its errors."""
    try:
        return await call()
    except BaseException as error:
        problems = [_converted(error, name)]
    raise problems.pop()  # as in `call_library`
