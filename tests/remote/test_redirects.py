from __future__ import annotations

import datetime
import io
import ipaddress
import socket
import ssl
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from remote_files import open_object
from web_server import Answer, Request, WebServer, serving

import onnxarchive
from onnxarchive.remote import redirects
from onnxarchive.remote.location import Location

CONTENT = bytes(range(251)) * 4000
SIZE = len(CONTENT)
ONCE = {"max_retries": 0, "timeout": "5s"}
HEADER = {"default_headers": {"private-token": "SECRET"}}
SECRETS: dict[str, tuple[str, dict[str, Any]]] = {
    "a signature": ("/m.onnxa?X-Amz-Signature=SECRET", {}),
    "any query": ("/m.onnxa?download=SECRET", {}),
    "a query without names": ("/m.onnxa?SECRET", {}),
    "a header": ("/m.onnxa", HEADER),
    "a header of credentials": ("/m.onnxa", {"default_headers": {"Authorization": "SECRET"}}),
    "a header in a group": ("/m.onnxa", {"client_options": HEADER}),
}


@pytest.fixture
def server() -> Iterator[WebServer]:
    with serving({"/m.onnxa": CONTENT, "/moved": CONTENT}) as server:
        yield server


@pytest.fixture
def other() -> Iterator[WebServer]:
    with serving({"/moved": CONTENT}) as server:
        yield server


def redirecting(location: str, status: int = 302) -> Any:
    def change(request: Request, answer: Answer) -> Answer:
        if request.path.startswith("/m.onnxa") or "/bucket/" in request.path:
            return Answer(status, {"Location": location}, [b"SECRET"])
        return answer

    return change


def refused(call: Any, text: str) -> None:
    with pytest.raises(OSError, match=text) as caught:
        call()
    assert "allow_redirects" in str(caught.value)
    assert "m.onnxa" in str(caught.value.filename)
    assert "SECRET" not in f"{caught.value}{caught.value!r}"


@pytest.mark.parametrize("status", [301, 307])
@pytest.mark.parametrize("secret", SECRETS)
def test_a_redirect_to_another_server_is_refused(
    server: WebServer, other: WebServer, secret: str, status: int
) -> None:
    path, options = SECRETS[secret]
    for target in (other.url("/moved"), other.url("/moved").replace("127.0.0.1", "localhost")):
        server.change = redirecting(target, status)
        for call in (
            open_object,
            lambda *it, **more: Location.of(*it, **more).exists(),
            onnxarchive.check,
        ):
            refused(
                lambda call=call: call(server.url(path), storage_options=options | ONCE),
                f"the server redirects to '{target[: -len('/moved')]}'",
            )
    assert not other.requests


def test_a_password_is_not_sent_to_another_server(server: WebServer, other: WebServer) -> None:
    server.change = redirecting(other.url("/moved"))
    url = server.url("/m.onnxa").replace("//", "//me:SECRET@")
    refused(lambda: open_object(url), "the server redirects to")
    assert not other.requests


def test_what_has_no_secret_is_redirected(server: WebServer, other: WebServer) -> None:
    server.change = redirecting(other.url("/moved"))
    assert open_object(server.url("/m.onnxa"), storage_options=ONCE).size == SIZE
    assert not [it for it in server.requests if it.range == "bytes=0-0"]


@pytest.mark.parametrize("value", [True, "true", "True"])
def test_redirects_that_are_allowed_are_followed_without_credentials(
    server: WebServer, other: WebServer, value: object
) -> None:
    target = other.url("/moved").replace("127.0.0.1", "localhost")
    server.change = redirecting(target)
    url = server.url("/m.onnxa?id=1").replace("//", "//me:SECRET@")
    options = {"default_headers": {"Cookie": "SECRET"}, "Allow_Redirects": value}
    with open_object(url, storage_options=options) as file:
        assert file.read(0, 10) == CONTENT[:10]
    assert server.requests[0].headers["authorization"]
    assert server.requests[0].headers["cookie"]
    assert len(other.requests) == 2
    assert "SECRET" not in str(other.requests)


def test_allow_redirects_is_true_or_false(server: WebServer, other: WebServer) -> None:
    server.change = redirecting(other.url("/moved"))
    url = server.url("/m.onnxa?id=1")
    refused(lambda: open_object(url, storage_options={"allow_redirects": "false"}), "redirects to")
    for each in (url, "memory://m.onnxa"):
        with pytest.raises(ValueError, match="expected allow_redirects to be true or false"):
            open_object(each, storage_options={"allow_redirects": "yes"})


@pytest.mark.parametrize("location", ["/moved", "moved?a=1", "{}/moved", "?id=2", "{}/moved#x"])
def test_redirects_to_the_same_server_are_followed(server: WebServer, location: str) -> None:
    def change(request: Request, answer: Answer) -> Answer:
        if request.path == "/m.onnxa?id=1":
            return Answer(302, {"Location": location.format(server.url(""))})
        return answer

    server.change = change
    with open_object(server.url("/m.onnxa?id=1"), storage_options=HEADER) as file:
        assert file.read(0, 10) == CONTENT[:10]


@pytest.mark.parametrize(
    "location",
    [
        "//{host}/moved",
        "///{host}/moved",
        "/\\{host}/moved",
        "\\\\{host}/moved",
        "/\t/{host}/moved",
        "http:///{host}/moved",
        "http:/\\{host}/moved",
        "http:\\\\{host}/moved",
        "HTTP://{host}/moved",
        "http://{own}@{host}/moved",
        "http://{own}\\@{host}/moved",
        "https://{own}/moved",
        "ftp://{own}/moved",
        "{own}:x@{host}/moved",
        "http://{own}.example/moved",
        "",
    ],
)
def test_no_spelling_of_another_server_is_taken_for_the_same(
    server: WebServer, other: WebServer, location: str
) -> None:
    own, host = (it.url("").partition("//")[2] for it in (server, other))
    server.change = redirecting(location.format(own=own, host=host))
    refused(
        lambda: open_object(server.url("/m.onnxa?id=1"), storage_options=ONCE), "server redirects"
    )
    assert not other.requests


@pytest.mark.parametrize(
    "location",
    [
        "//{host}/moved",
        "///{host}/moved",
        "/\\{host}/moved",
        "\\\\{host}/moved",
        "/\t/{host}?moved",
        "http:{host}/moved",
        "http:\\\\{host}\\moved",
        "\r\n http://{host}/moved",
        "\r\n\t//{host}",
        "//me:SEC/RET@{host}/moved?SECRET",
    ],
)
def test_the_server_to_which_a_redirect_leads_is_named(location: str) -> None:
    head = f"HTTP/1.1 302 Found\r\nLocation: {location.format(host='other.invalid:81')}\r\n\r\n"
    with answering(head.encode()) as (port, _):
        url = f"http://127.0.0.1:{port}/m.onnxa?id=1"
        refused(lambda: open_object(url), "the server redirects to 'http://other.invalid:81'")


@pytest.mark.parametrize("location", ["/a b", "/\u00e9"])
def test_a_redirect_to_an_unsafe_path_shows_it(location: str) -> None:
    head = f"HTTP/1.1 302 Found\r\nLocation: {location}?SECRET\r\n\r\n"
    with answering(head.encode("latin-1")) as (port, _):
        url = f"http://127.0.0.1:{port}/m.onnxa?id=1"
        refused(lambda: open_object(url), f"the server redirects to '{location}'")


def test_a_redirect_on_the_same_server_that_leads_to_another_is_refused(
    server: WebServer, other: WebServer
) -> None:
    def change(request: Request, answer: Answer) -> Answer:
        target = "/next" if request.path.startswith("/m.onnxa") else other.url("/moved")
        return Answer(302, {"Location": target})

    server.change = change
    refused(lambda: open_object(server.url("/m.onnxa?id=1")), "the server redirects to")
    assert not other.requests


def test_redirects_on_the_same_server_end(server: WebServer) -> None:
    server.change = lambda *_: Answer(302, {"Location": "/m.onnxa?id=1"})
    refused(lambda: open_object(server.url("/m.onnxa?id=1")), "more than 10 redirects")
    assert len(server.requests) == 10


@pytest.mark.parametrize("secret", SECRETS)
def test_a_later_redirect_to_another_host_fails(
    server: WebServer, other: WebServer, secret: str
) -> None:
    path, options = SECRETS[secret]
    with open_object(server.url(path), storage_options=options | ONCE) as file:
        server.change = redirecting(other.url("/moved").replace("127.0.0.1", "localhost"))
        refused(lambda: file.read(0, 10), "the server redirects")
    assert not other.requests


@pytest.mark.parametrize("status", [407, 408, 429, 500, 503])
def test_an_answer_that_may_change_is_a_refusal(server: WebServer, status: int) -> None:
    server.change = lambda *_: Answer(status)
    refused(
        lambda: open_object(server.url("/m.onnxa?id=1"), storage_options=ONCE),
        f"HTTP status {status}, so it is unknown whether the server redirects",
    )
    assert {it.range for it in server.requests} == {"bytes=0-0"}


def test_an_answer_that_fails_once_is_asked_for_again(server: WebServer) -> None:
    def change(_request: Request, answer: Answer) -> Answer:
        return Answer(503) if len(server.requests) == 1 else answer

    server.change = change
    assert open_object(server.url("/m.onnxa?id=1"), storage_options=ONCE).size == SIZE


def test_an_answer_that_does_not_come_is_a_refusal(
    server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redirects, "TIMEOUT", 0.2)
    released = threading.Event()

    def change(_request: Request, answer: Answer) -> Answer:
        released.wait(60)
        return answer

    server.change = change
    try:
        refused(
            lambda: open_object(server.url("/m.onnxa?id=1")),
            "the server took too long to answer, so it is unknown",
        )
        assert len(server.requests) == 1
    finally:
        released.set()


@contextmanager
def answering(
    answer: bytes, context: ssl.SSLContext | None = None
) -> Iterator[tuple[int, list[bytes]]]:
    """A server that gives the same bytes to each connection; yields its port and the requests."""
    requests: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:  # closed
                    return
                try:
                    with connection:
                        if context is not None:
                            connection = context.wrap_socket(connection, server_side=True)
                        with connection:
                            requests.append(connection.recv(1 << 16))
                            connection.sendall(answer)
                except OSError:
                    pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1], requests
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 SECRET\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: SECRET\r\n" * 10_000,
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 1_000_000,
    ],
)
def test_an_answer_that_is_no_http_is_a_refusal(answer: bytes) -> None:
    with answering(answer) as (port, requests):
        url = f"http://127.0.0.1:{port}/m.onnxa?sig=SECRET"
        refused(lambda: onnxarchive.open(url, storage_options=ONCE), "unknown whether")
        assert len(requests) == 1


PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return monkeypatch


@pytest.mark.parametrize("is_option", [True, False])
def test_a_proxy_is_asked_and_a_redirect_through_it_is_refused(
    server: WebServer, other: WebServer, no_proxy: pytest.MonkeyPatch, is_option: bool
) -> None:
    options: dict[str, Any] = dict(ONCE)
    proxy = server.url("").replace("//", "//me:SECRET@")
    if is_option:
        options["proxy_url"] = proxy
    else:
        no_proxy.setenv("http_proxy", proxy)
    url = "http://nowhere.invalid/m.onnxa?id=SECRET"

    def found(_request: Request, _answer: Answer) -> Answer:
        return server.answer(Request("GET", "/m.onnxa", _request.headers))

    server.change = found
    assert open_object(url, storage_options=options).size == SIZE
    assert {it.path for it in server.requests} == {url}
    assert {it.headers["host"] for it in server.requests} == {"nowhere.invalid"}
    assert all("proxy-authorization" in it.headers for it in server.requests)
    server.change = lambda *_: Answer(302, {"Location": other.url("/moved")})
    refused(lambda: open_object(url, storage_options=options), "the server redirects to")
    assert not other.requests


@pytest.mark.parametrize(
    "proxy", ["http://127.0.0.1:1", "socks5://127.0.0.1:1", "https://x.invalid"]
)
def test_a_proxy_that_cannot_be_asked_is_a_refusal(
    server: WebServer, no_proxy: pytest.MonkeyPatch, proxy: str
) -> None:
    for name in ("http_proxy", "all_proxy"):
        with no_proxy.context() as environment:
            environment.setenv(name, proxy)
            refused(lambda: open_object(server.url("/m.onnxa?id=1")), "unknown whether")
    no_proxy.setenv("http_proxy", proxy)
    no_proxy.setenv("no_proxy", "127.0.0.1")
    assert open_object(server.url("/m.onnxa?id=1"), storage_options=ONCE).size == SIZE
    assert not [it for it in server.requests if "proxy-authorization" in it.headers]


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        ({}, ["ftp_proxy"]),
        ({}, ["https_proxy"]),
        ({"proxy_excludes": "127.0.0.1,localhost"}, []),
    ],
)
@pytest.mark.parametrize("secret", ["any query", "a header"])
def test_proxies_that_are_not_used_let_no_later_redirect_pass(
    server: WebServer,
    other: WebServer,
    no_proxy: pytest.MonkeyPatch,
    secret: str,
    options: dict[str, str],
    variables: list[str],
) -> None:
    for name in variables:
        no_proxy.setenv(name, "http://127.0.0.1:1")
    if options:
        options = {**options, "proxy_url": "http://127.0.0.1:1"}
    path, secrets = SECRETS[secret]
    with open_object(server.url(path), storage_options={**secrets, **options, **ONCE}) as file:
        server.change = redirecting(other.url("/moved").replace("127.0.0.1", "localhost"))
        refused(lambda: file.read(0, 10), "the server redirects")
    assert not other.requests


def test_a_store_of_the_caller_is_asked_too(server: WebServer, other: WebServer) -> None:
    from obstore.store import HTTPStore, S3Store

    client: Any = {**HEADER, "allow_http": True}
    store = HTTPStore(server.url("/folder"), client_options=client)
    server.change = lambda *_: Answer(302, {"Location": other.url("/moved")})
    refused(lambda: open_object("a b/m.onnxa", store=store), "the server redirects to")
    assert [it.path for it in server.requests] == ["/folder/a%20b/m.onnxa"]
    s3 = S3Store("bucket", endpoint=server.url(""), skip_signature=True, client_options=client)
    refused(lambda: open_object("m.onnxa", store=s3), "unknown whether")
    for each in (store, s3):
        allowed = {"allow_redirects": True}
        assert open_object("m.onnxa", store=each, storage_options=allowed).size == SIZE
    with pytest.raises(ValueError, match="expected store or storage_options, found both"):
        open_object("m.onnxa", store=store, storage_options=ONCE)


@pytest.mark.parametrize("by_environment", [True, False])
def test_headers_for_a_store_do_not_leave_its_servers(
    server: WebServer, other: WebServer, no_proxy: pytest.MonkeyPatch, by_environment: bool
) -> None:
    options: dict[str, Any] = {"skip_signature": True, **HEADER, **ONCE}
    if by_environment:
        no_proxy.setenv("AWS_ENDPOINT_URL", server.url(""))
        no_proxy.setenv("AWS_ALLOW_HTTP", "true")
    else:
        options |= {"endpoint": server.url(""), "allow_http": True}
    server.files["/bucket/m.onnxa"] = CONTENT
    url = "s3://bucket/m.onnxa"
    with open_object(url, storage_options=options) as file:
        assert file.read(0, 10) == CONTENT[:10]
    server.change = redirecting(other.url("/moved").replace("127.0.0.1", "localhost"))
    refused(lambda: open_object(url, storage_options=options), "the server redirects")
    assert not other.requests
    assert open_object(url, storage_options={**options, "allow_redirects": True}).size == SIZE
    no_proxy.setenv("http_proxy", server.url(""))
    refused(lambda: open_object(url, storage_options=options), "unknown whether")


@pytest.mark.parametrize(
    ("url", "options", "variables"),
    [
        ("s3://bucket/m.onnxa", {"token": "SECRET"}, {}),
        ("s3://bucket/m.onnxa", {}, {"AWS_SESSION_TOKEN": "SECRET"}),
        ("az://bucket/m.onnxa", {"sas_key": "sv=1&sig=SECRET", "account_name": "me"}, {}),
    ],
)
def test_tokens_of_a_store_do_not_leave_its_servers(
    server: WebServer,
    other: WebServer,
    no_proxy: pytest.MonkeyPatch,
    url: str,
    options: dict[str, Any],
    variables: dict[str, str],
) -> None:
    if url.startswith("s3:"):
        variables = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "SECRET", **variables}
    for name, value in {"AWS_ALLOW_HTTP": "true", "AZURE_ALLOW_HTTP": "true", **variables}.items():
        no_proxy.setenv(name, value)
    options = {**options, "endpoint": server.url(""), **ONCE}
    server.files["/bucket/m.onnxa"] = CONTENT
    with open_object(url, storage_options=options) as file:
        assert file.read(0, 10) == CONTENT[:10]
    assert all("SECRET" in f"{it.headers}{it.path}" for it in server.requests)
    server.change = redirecting(other.url("/moved").replace("127.0.0.1", "localhost"))
    refused(lambda: open_object(url, storage_options=options), "the server redirects")
    assert not other.requests


@pytest.mark.parametrize("chain", ["simplecache::{}/m.onnxa", "zip://m.onnxa::{}/m.onnxa.zip"])
def test_a_chained_web_address_is_not_redirected_to_another_server(
    server: WebServer, other: WebServer, chain: str
) -> None:
    pytest.importorskip("aiohttp")
    with zipfile.ZipFile(content := io.BytesIO(), "w") as zip:
        zip.writestr("m.onnxa", CONTENT)
    for each, path in ((server, "/m.onnxa.zip"), (server, "/moved"), (other, "/moved")):
        each.files[path] = content.getvalue() if "zip" in chain else CONTENT
    headers = {"http": {"headers": {"private-token": "SECRET"}}}
    url = chain.format(server.url(""))
    with open_object(url, storage_options=headers) as file:
        assert file.read(0, 10) == CONTENT[:10]
    server.change = redirecting("/moved")
    assert open_object(url, storage_options=headers).size == SIZE
    server.change = redirecting(other.url("/moved"))
    refused(lambda: open_object(url, storage_options=headers), "the server redirects")
    refused(lambda: open_object(url + "?sig=SECRET"), "the server redirects")
    assert not other.requests
    assert open_object(url, storage_options={"allow_redirects": True, **headers}).size == SIZE
    assert open_object(url).size == SIZE


def test_https_is_never_redirected_to_http(other: WebServer, tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate = certify(tmp_path)
    context.load_cert_chain(certificate)
    answer = f"HTTP/1.1 302 Found\r\nLocation: {other.url('/moved')}\r\nContent-Length: 0\r\n\r\n"
    with answering(answer.encode(), context) as (port, requests):
        url = f"https://127.0.0.1:{port}/m.onnxa"
        trusted = {**ONCE, "root_certificate": Path(certificate).read_text()}
        for options in (trusted, {**ONCE, "allow_invalid_certificates": "true"}):
            refused(lambda: open_object(url + "?id=1", storage_options=options), "redirects to")  # noqa: B023
            for more in ({}, {"allow_redirects": True}, {"allow_http": True}):
                with pytest.raises(OSError, match=r"m\.onnxa"):
                    open_object(url, storage_options={**options, **more})
        assert len(requests) == 8
        refused(
            lambda: open_object(url + "?id=1", storage_options=ONCE), "cannot verify the server's"
        )
    assert not other.requests


def certify(folder: Path) -> str:
    """Makes a key and a certificate of this machine, in one file."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1)
        .not_valid_before(datetime.datetime(2020, 1, 1))
        .not_valid_after(datetime.datetime(2100, 1, 1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    text = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ) + certificate.public_bytes(pem)
    path = folder / "certificate.pem"
    path.write_bytes(text)
    return str(path)
