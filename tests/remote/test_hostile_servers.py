from __future__ import annotations

import http.client
import itertools
import re
import socket
import ssl
import time
import traceback
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from remote_files import CONTENT, create_object, list_objects, open_object
from web_server import MODIFIED, Answer, Request, WebServer, serving

import onnxarchive
from onnxarchive import ObjectChangedError
from onnxarchive.remote.failures import NoRangesError, failure
from onnxarchive.remote.objects import END_SIZE, RemoteFile

SIZE = len(CONTENT)
S3, WEB = "s3://bucket/m.onnxa", "https://host/m.onnxa"
OPTIONS = {"timeout": "700ms", "max_retries": 1, "default_headers": {"X-Token": "SECRET"}}


def opened(server: WebServer) -> RemoteFile:
    url = server.url("/m.onnxa?X-Amz-Signature=SECRET").replace("//", "//me:SECRET@")
    return open_object(url, storage_options=OPTIONS)


def refused(
    kind: type[Exception], text: str, call: Callable[..., object], *arguments: Any, **options: Any
) -> None:
    """Asserts the error, and that nothing of it shows a secret: neither its text nor its causes."""
    with pytest.raises(kind, match=text) as caught:
        call(*arguments, **options)
    assert type(caught.value) is kind
    assert "/m.onnxa" in str(caught.value)
    error: BaseException | None = caught.value
    while error is not None:
        assert error.__cause__ is None
        shown = [str(error), repr(error), repr(vars(error)), *traceback.format_exception(error)]
        # Lines of this file, which has the word, are no part of a message.
        lines = [it for it in "".join(shown).splitlines() if __name__ not in it]
        assert not [it for it in lines if "SECRET" in it and "SECRET@" not in it]
        error = error.__context__


def with_headers(**headers: str | None) -> Callable[[Request, Answer], Answer]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda _, answer: Answer(answer.status, answer.headers | named, answer.body)


def with_body(change: Callable[[bytes], bytes]) -> Callable[[Request, Answer], Answer]:
    def changed(_: Request, answer: Answer) -> Answer:
        return Answer(answer.status, answer.headers, [change(b"".join(answer.body))])

    return changed


def with_status(status: int) -> Callable[[Request, Answer], Answer]:
    return lambda *_: Answer(status, {}, [b"SECRET of the server"])


def endless(_: Request, answer: Answer) -> Answer:
    """All bytes of 100 GB, where a range was asked for."""
    headers = answer.headers | {"Content-Length": "100000000000", "Content-Range": None}
    return Answer(200, headers, itertools.repeat(bytes(1 << 16)))


def endless_range(_: Request, answer: Answer) -> Answer:
    """100 GB in answer to a range of some bytes."""
    headers = answer.headers | {"Content-Length": "100000000000"}
    return Answer(206, headers, itertools.repeat(bytes(1 << 16)))


def slow(_: Request, answer: Answer) -> Answer:
    """One byte at a time."""

    def body() -> Iterator[bytes]:
        for byte in b"".join(answer.body):
            yield bytes([byte])
            time.sleep(0.3)

    return Answer(206, answer.headers | {"Content-Length": str(END_SIZE)}, body())


WRONG_ANSWERS: dict[str, tuple[Any, type[Exception], str]] = {
    "400": (with_status(400), OSError, "HTTP status 400"),
    "401": (with_status(401), PermissionError, r"refuses access \(HTTP status 401\)"),
    "403": (with_status(403), PermissionError, r"refuses access \(HTTP status 403\)"),
    "404": (with_status(404), FileNotFoundError, "No such object"),
    "410": (with_status(410), FileNotFoundError, "No such object"),
    "500": (with_status(500), OSError, "HTTP status 500"),
    "no date": (
        with_headers(Last_Modified="now"),
        OSError,
        "a Last-Modified that is no date; .*curl",
    ),
    "no ranges": (endless, NoRangesError, "does not answer requests for ranges"),
    "a longer body": (endless_range, OSError, "found more"),
    "one byte more": (with_body(lambda it: it + b"x"), OSError, "found more"),
    "one byte less": (with_body(lambda it: it[:-1]), OSError, f"expected {END_SIZE} bytes"),
    "no bytes": (with_body(lambda _: b""), OSError, f"expected {END_SIZE} bytes .*, found 0"),
    "gzip": (with_headers(Content_Encoding="gzip"), OSError, "found Content-Encoding 'gzip'"),
    "nonsense": (with_headers(Content_Range="SECRET"), OSError, "other bytes"),
    "another unit": (with_headers(Content_Range="rows 1-2/3"), OSError, "other bytes"),
    "no size": (with_headers(Content_Range="bytes 0-9/*"), OSError, "states no size in Content-R"),
    "no range": (with_headers(Content_Range=None), OSError, "states no Content-Range"),
    "405": (with_status(405), OSError, "HTTP status 405"),
    "no address": (with_status(301), OSError, "redirects to no address; .* set region"),
    "negative": (with_headers(Content_Range=f"bytes -9-5/{SIZE}"), OSError, "other bytes"),
    "a huge size": (
        with_headers(Content_Range=f"bytes 0-{END_SIZE - 1}/{1 << 63}"),
        OSError,
        "expected 131072 bytes|other bytes",
    ),
    "the beginning": (
        with_headers(Content_Range=f"bytes 0-{END_SIZE - 1}/{SIZE}"),
        OSError,
        "other bytes|expected 131072 bytes",
    ),
    "slow": (slow, OSError, "took too long"),
}


@pytest.mark.parametrize("answer", WRONG_ANSWERS)
def test_a_wrong_answer_to_opening_is_an_error(server: WebServer, answer: str) -> None:
    server.change, kind, text = WRONG_ANSWERS[answer]
    refused(kind, text, opened, server)
    assert server.nbytes < 64 << 20
    assert len(server.requests) <= 4


@pytest.mark.parametrize("answer", WRONG_ANSWERS)
def test_a_wrong_answer_to_reading_is_an_error(server: WebServer, answer: str) -> None:
    file = opened(server)
    server.change, kind, text = WRONG_ANSWERS[answer]
    if "bytes" in text:
        text = r"found more|other bytes|expected \d+ bytes|HTTP status 416"
    refused(kind, text, file.read, 0, 10)
    if answer != "slow":  # it takes seconds
        refused(kind, text, list, file.pieces(0, 10))
        refused(kind, text, list, file.stream_ranges([(0, 10)]))
    assert server.nbytes < 64 << 20


def test_a_read_over_a_broken_connection_continues_where_it_broke(server: WebServer) -> None:
    file = opened(server)

    def broken(_: Request, answer: Answer) -> Answer:
        server.change = lambda _, answer: answer
        body = b"".join(answer.body)
        return Answer(206, answer.headers | {"Content-Length": str(len(body))}, iter([body[:50]]))

    server.change = broken
    assert file.read(0, 100) == CONTENT[:100]
    assert server.ranges()[-2:] == ["bytes=0-99", "bytes=50-99"]


def test_an_unreachable_server_is_an_error() -> None:
    with serving({"/m.onnxa": CONTENT}) as server:
        pass
    refused(OSError, "there is no connection", opened, server)


def test_plain_http_has_to_be_allowed_to_a_store(server: WebServer) -> None:
    options = {"endpoint": server.url(""), "skip_signature": True, "max_retries": 0}
    refused(OSError, "allow_http", open_object, S3, storage_options=options)


def test_two_versions_of_an_object_are_never_mixed(server: WebServer) -> None:
    file = opened(server)
    server.files["/m.onnxa"] = CONTENT[::-1]  # the same size and time; only the ETag differs
    for read in (
        lambda: file.read(0, 10),
        lambda: list(file.pieces(0, 10)),
        lambda: list(file.stream_ranges([(0, 10)])),
        lambda: list(file.read_ranges([(0, 10)])),
    ):
        refused(ObjectChangedError, "has changed since", read)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({}, {"ETag": '"other"'}),  # of a server that ignores If-Match
        ({}, {"ETag": None}),
        ({"ETag": 'W/"1"'}, {"ETag": 'W/"2"'}),
        ({"ETag": None}, {"ETag": '"new"'}),
        ({"ETag": None}, {"ETag": None, "Last-Modified": "Tue, 14 Nov 2023 22:13:21 GMT"}),
        ({"ETag": None}, {"ETag": None, "Content-Range": f"bytes 0-9/{SIZE + 1}"}),
        ({}, {"Content-Range": f"bytes 0-9/{SIZE - 1}"}),
    ],
)
def test_each_answer_is_compared_with_the_first(
    server: WebServer, first: dict[str, str | None], then: dict[str, str | None]
) -> None:
    assert MODIFIED == 1_700_000_000  # one second before that time
    server.change = lambda _, it: Answer(it.status, it.headers | first, it.body)
    file = opened(server)
    assert file.read(0, 10) == CONTENT[:10]
    server.change = lambda _, it: Answer(it.status, it.headers | then, it.body)
    refused(ObjectChangedError, "has changed since", file.read, 0, 10)


def test_redirects_in_a_circle_end(server: WebServer) -> None:
    server.change = lambda *_: Answer(302, {"Location": server.url("/m.onnxa")})
    refused(OSError, "redirects in a circle", open_object, server.url("/m.onnxa"))
    assert len(server.requests) < 30


def first_bytes(request: Request, answer: Answer) -> Answer:
    """The answer of a server that takes `-N` for `0-N`."""
    last = int(request.range.removeprefix("bytes=-"))
    headers = answer.headers | {"Content-Range": f"bytes 0-{last}/{SIZE}"}
    return Answer(206, headers, [CONTENT[: last + 1]])


def without_size(_: Request, answer: Answer) -> Answer:
    headers = answer.headers | {"Content-Range": f"bytes {SIZE - END_SIZE}-{SIZE - 1}/*"}
    return Answer(206, headers, answer.body)


SUFFIX_ANSWERS: dict[str, Callable[[Request, Answer], Answer]] = {
    "the first bytes": first_bytes,
    "no size": without_size,
    "no range": with_headers(Content_Range=None),
    "all": lambda _, answer: Answer(200, answer.headers | {"Content-Range": None}, [CONTENT]),
    "400": with_status(400),
    "405": with_status(405),
    "416": with_status(416),
    "416 and all": lambda *_: Answer(416, {}, [CONTENT]),
    "501": with_status(501),
}


@pytest.mark.parametrize("answer", SUFFIX_ANSWERS)
def test_a_server_without_suffix_ranges_is_asked_for_the_size_first(
    server: WebServer, answer: str
) -> None:
    change = SUFFIX_ANSWERS[answer]
    server.change = lambda request, it: change(request, it) if "=-" in request.range else it
    with open_object(server.url("/m.onnxa"), storage_options={"max_retries": 0}) as file:
        assert file.read(SIZE - 10, 10) == CONTENT[-10:]
        assert file.read(0, 10) == CONTENT[:10]
    assert [it.method for it in server.requests] == ["GET", "HEAD", "GET", "GET"]


def test_a_missing_size_is_named(server: WebServer) -> None:
    def change(request: Request, answer: Answer) -> Answer:
        return Answer(200, {"Content-Length": None}, iter([CONTENT]))

    server.change = change
    refused(OSError, "no size: Content-Length is miss", open_object, server.url("/m.onnxa"))


KEYS = {"access_key_id": "me", "secret_access_key": "SECRET", "max_retries": 0, "allow_http": True}


@pytest.mark.parametrize(
    ("status", "code", "kind", "text"),
    [
        (301, "PermanentRedirect", OSError, "another region: set region in storage_options"),
        (400, "AuthorizationHeaderMalformed", OSError, "400, Auth.*; set region in storage_opt"),
        (400, "ExpiredToken", OSError, "400, ExpiredToken; the token has expired"),
        (
            403,
            "AccessDenied",
            PermissionError,
            r"\(HTTP status 403, AccessDenied\); .* not expired",
        ),
        (404, "NoSuchBucket", FileNotFoundError, "No such bucket; create it"),
        (404, "ContainerNotFound", FileNotFoundError, "No such container; create it"),
        (403, "RequestTimeTooSkewed", PermissionError, "403, RequestTimeTooSkewed"),
        (503, "SlowDown", OSError, "503, SlowDown"),
    ],
)
def test_the_answer_of_a_store_names_the_likely_cause(
    server: WebServer, status: int, code: str, kind: type[Exception], text: str
) -> None:
    error = f"<Error><Code>{code}</Code><Message>SECRET</Message></Error>"
    server.change = lambda *_: Answer(status, {}, [error.encode()])
    options = {**KEYS, "endpoint": server.url("")}
    refused(kind, text, open_object, S3, storage_options=options)


NAMED = "obstore does not take this URL with .*"  # before the name of an option


@pytest.mark.parametrize(
    ("url", "options", "text"),
    [
        # In the words of the store.
        (S3, {"access_key_id": "SECRET"}, "Missing SecretAccessKey"),
        (S3, {"secret_access_key": "SECRET"}, "Missing AccessKeyId"),
        (S3, {"skip_signature": "SECRET"}, r'parse "\.\.\." as boolean'),
        (S3, {"timeout": 'a "SECRET'}, r'parse "\.\.\." as Duration'),
        (S3, {"backoff": '{"base": "SECRET"}'}, "base is not a number"),
        (S3, {"max_retries": "SECRET"}, "max_retries is not a number"),
        ("az://bucket/m.onnxa", {}, "set account_name in .*, or AZURE_STORAGE_ACCOUNT_NAME"),
        (
            "az://bucket/m.onnxa",
            {"account_name": "me", "account_key": "SECRET!"},
            "Invalid Access Key",
        ),
        ("gs://bucket/m.onnxa", {"service_account": "/SECRET"}, "open service account file from"),
        ("gs://bucket/m.onnxa", {"service_account_key": '{"type": "SECRET"}'}, "Unable to decode"),
        # By name.
        (f"{WEB}?sig=SECRET", {"secret_key": "SECRET"}, f"{NAMED}secret_key"),
        (f"{WEB}?sig=SECRET", {"timeout": "SECRET"}, f"{NAMED}timeout"),
        (f"{WEB}?sig=SECRET", {"timeout": [5]}, f"{NAMED}timeout"),
        (S3, {"max_retries": "SECRET"}, f"{NAMED}max_retries"),
        (S3, {"default_headers": "SECRET"}, f"{NAMED}default_headers"),
        ("https://me:SECRET@:x/m.onnxa", {}, f"{NAMED}no options"),
        (S3, {"key": "SECRET"}, f"{NAMED}key"),
        (S3, {"access_key_id": "SECRET", "client_options": "SECRET"}, f"{NAMED}access_key_id"),
        *(
            (url, options, NAMED + re.escape(name))
            for url in (WEB, S3)
            for options, name in (
                ({"retry_config": {"max_retris": 0}}, "retry_config.max_retris"),
                ({"client_options": {"timeuot": "1s"}}, "client_options.timeuot"),
                ({"backoff": {"bse": 2}}, "backoff.bse"),
                ({"timeuot": "1s"}, "timeuot"),
            )
        ),
    ],
)
def test_an_option_that_a_store_refuses_is_explained_without_its_value(
    url: str, options: dict[str, Any], text: str
) -> None:
    refused(ValueError, text, open_object, url, storage_options=options)


def test_options_of_the_client_are_given_as_text(
    server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files["/bucket/m.onnxa"] = CONTENT
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ENDPOINT", server.url(""))
    options = {
        "skip_signature": "true",
        "timeout": "5",
        "connect_timeout": "1m 30s",
        "retry_timeout": "0.5s",
        "stall_timeout": "1m",
        "max_retries": "2",
        "backoff": '{"init_backoff": "10ms", "max_backoff": "20 ms", "base": "2"}',
        "default_headers": '{"X-Token": "SECRET"}',
    }
    assert open_object(S3, storage_options=options).size == SIZE
    assert server.requests[-1].headers["x-token"] == "SECRET"
    server.requests.clear()
    server.change = with_status(503)
    refused(OSError, "HTTP status 503", open_object, S3, storage_options=options)
    assert len(server.requests) == 3


class Panic(BaseException):
    """Stands for obstore's panics, which are no `Exception`."""


Panic.__name__ = "PanicException"
FOREIGN: list[Any] = [
    RuntimeError("SECRET"),
    KeyError("SECRET"),
    Panic("SECRET"),
    UnicodeDecodeError("utf-8", b"SECRET", 0, 1, "SECRET"),
    TimeoutError("SECRET"),
    http.client.BadStatusLine("SECRET"),
    http.client.IncompleteRead(b"SECRET"),
    ssl.SSLError(1, "SECRET"),
    ssl.SSLCertVerificationError(1, "SECRET"),
    socket.gaierror(-2, "SECRET"),
    urllib.error.URLError("SECRET"),
]


class Failing(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """Each call fails; the query of a URL is not sent."""

    protocol = "failing"
    error: BaseException = RuntimeError()
    size: object = None

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path

    def fail(self, *_: Any, **__: Any) -> Any:
        raise self.error

    cat_file = find = start_transaction = _open = fail

    def info(self, path: str, **_: Any) -> Any:
        return self.fail() if self.size is None else {"size": self.size, "type": "file"}


fsspec.register_implementation("failing", Failing, clobber=True)
FAILING = "failing://me:SECRET@host/m.onnxa?token=SECRET"


@pytest.mark.parametrize("error", FOREIGN, ids=lambda it: type(it).__name__)
def test_errors_of_libraries_become_errors_with_the_name_of_the_file(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Failing, "error", error)
    for call in (
        lambda: onnxarchive.open(FAILING),
        lambda: onnxarchive.check(FAILING),
        lambda: onnxarchive.convert(FAILING, tmp_path / "m.onnxa"),
        lambda: onnxarchive.download(FAILING, tmp_path / "m.onnxa"),
        lambda: create_object(FAILING, 0),
        lambda: list_objects(FAILING),
    ):
        with pytest.raises(OSError, match=r"failing://host/m\.onnxa") as caught:
            call()
        assert type(caught.value) is OSError
        assert "SECRET" not in f"{caught.value}{caught.value!r}"
        assert (caught.value.__cause__, caught.value.__context__) == (None, None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", ["", "5", -1, 5.0])
def test_a_file_without_a_size_is_an_error(size: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Failing, "size", size)
    refused(OSError, "states no size", open_object, FAILING)


def test_numbers_of_errors_of_fsspec_are_shown_and_its_words_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Failing, "error", ConnectionRefusedError(111, "SECRET", "SECRET"))
    refused(ConnectionRefusedError, "Connection refused", create_object, FAILING, 0)
    monkeypatch.setattr(Failing, "error", RuntimeError("SECRET"))
    refused(OSError, r"the request failed \(RuntimeError\)", open_object, FAILING)
    options = {"nonsense": "SECRET", "skip_instance_cache": True}
    refused(ValueError, "storage_options", open_object, FAILING, storage_options=options)
    chained, options = "simplecache::http://host/m.onnxa", {"http": "SECRET"}
    refused(ValueError, "storage_options", open_object, chained, storage_options=options)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (FileNotFoundError("SECRET bucket does not exist"), FileNotFoundError, "No such bucket"),
        (
            ssl.SSLCertVerificationError(1, "[SSL: CERTIFICATE_VERIFY_FAILED] SECRET: self-signed"),
            OSError,
            "no known authority has signed its certificate; SSL_CERT_FILE",
        ),
        (
            ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] SECRET"),
            OSError,
            "does not answer with TLS",
        ),
        (socket.gaierror(-2, "SECRET"), OSError, "no host has this name"),
    ],
)
def test_errors_of_connections_of_fsspec_have_the_sentences_of_obstore(
    error: BaseException, kind: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Failing, "error", error)
    refused(kind, text, open_object, FAILING)


class InvalidPathError(Exception):
    """Stands for obstore's."""


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('Path "a//b" contained empty path segment', "'a//b'"),
        ('Path "a\x01" b": Encountered illegal character', "'a\\x01\" b'"),
        ("something else", "of an object"),
        ('Path "' * 100_000, "of an object"),  # takes linear time
    ],
)
def test_a_key_that_obstore_cannot_list_is_named(text: str, key: str) -> None:
    error = failure(InvalidPathError(text), "s3://bucket/folder")
    assert f"because of the key {key}: the key has control" in str(error)
