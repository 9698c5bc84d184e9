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
from processes import wait_until
from remote_files import CONTENT, open_object
from web_server import Answer, Request, WebServer, serving

import onnxarchive
from onnxarchive.remote import redirects
from onnxarchive.remote.location import Location
from onnxarchive.remote.objects import RemoteFile
from onnxarchive.remote.proxies import proxy_of

SIZE = len(CONTENT)
ONCE = {"max_retries": 0, "timeout": "5s"}
HEADER = {"default_headers": {"private-token": "SECRET"}}
SECRETS: dict[str, tuple[str, dict[str, Any]]] = {
    "a signature": ("http://{}/m.onnxa?X-Amz-Signature=SECRET", {}),
    "any query": ("http://{}/m.onnxa?download=SECRET", {}),
    "a query without names": ("http://{}/m.onnxa?SECRET", {}),
    "a password": ("http://me:SECRET@{}/m.onnxa", {}),
    "a header": ("http://{}/m.onnxa", HEADER),
    "a header of credentials": (
        "http://{}/m.onnxa",
        {"default_headers": {"Authorization": "SECRET"}},
    ),
    "a header in a group": ("http://{}/m.onnxa", {"client_options": HEADER}),
}


@pytest.fixture
def server() -> Iterator[WebServer]:
    with serving({"/m.onnxa": CONTENT, "/moved": CONTENT}) as server:
        yield server


@pytest.fixture
def reached() -> Iterator[WebServer]:
    """Another server, to which redirects lead."""
    with serving({"/moved": CONTENT}) as server:
        yield server


@pytest.fixture
def other(reached: WebServer) -> Iterator[WebServer]:
    """Another server, which gets no request."""
    yield reached
    assert not reached.requests


@pytest.fixture
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return monkeypatch


def host_of(server: WebServer) -> str:
    return f"127.0.0.1:{server.port}"


def elsewhere(server: WebServer) -> str:
    """The URL of the moved object at another host."""
    return f"http://localhost:{server.port}/moved"


def opened(url: str, **options: Any) -> RemoteFile:
    """Opens an object, without retries."""
    return open_object(url, storage_options={**ONCE, **options})


def redirecting(location: str, status: int = 302) -> Any:
    def change(request: Request, answer: Answer) -> Answer:
        if request.path.startswith("/m.onnxa") or "/bucket/" in request.path:
            return Answer(status, {"Location": location}, [b"SECRET"])
        return answer

    return change


def refused(text: str, call: Any, *arguments: Any, **options: Any) -> None:
    """Requires a refusal that offers to allow redirects."""
    assert "allow_redirects" in refusal(text, call, *arguments, **options)


def unanswered(text: str, call: Any, *arguments: Any, **options: Any) -> None:
    """Requires a refusal for which allowing redirects is no remedy."""
    assert "allow_redirects" not in refusal(text, call, *arguments, **options)


def refusal(text: str, call: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(OSError, match=text) as caught:
        call(*arguments, **options)
    assert "m.onnxa" in str(caught.value.filename)
    assert "SECRET" not in f"{caught.value}{caught.value!r}"
    return str(caught.value)


@pytest.mark.parametrize("status", [301, 307])
@pytest.mark.parametrize("secret", SECRETS)
def test_a_redirect_to_another_server_is_refused(
    server: WebServer, other: WebServer, secret: str, status: int
) -> None:
    url, options = SECRETS[secret]
    for target in (other.url("/moved"), elsewhere(other)):
        server.change = redirecting(target, status)
        for call in (
            open_object,
            lambda *it, **more: Location.of(*it, **more).exists(),
            onnxarchive.check,
        ):
            refused(
                f"the server redirects to '{target.removesuffix('/moved')}'",
                call,
                url.format(host_of(server)),
                storage_options=options | ONCE,
            )


def test_a_request_without_a_secret_may_be_redirected(
    server: WebServer, reached: WebServer
) -> None:
    server.change = redirecting(reached.url("/moved"))
    assert opened(server.url("/m.onnxa")).size == SIZE
    assert not [it for it in server.requests if it.range == "bytes=0-0"]


@pytest.mark.parametrize("value", [True, "true", "True"])
def test_redirects_that_are_allowed_are_followed_without_credentials(
    server: WebServer, reached: WebServer, value: object
) -> None:
    server.change = redirecting(elsewhere(reached))
    url = server.url("/m.onnxa?id=1").replace("//", "//me:SECRET@")
    options = {"default_headers": {"Cookie": "SECRET"}, "Allow_Redirects": value}
    with open_object(url, storage_options=options) as file:
        assert file.read(0, 10) == CONTENT[:10]
    assert server.requests[0].headers["authorization"]
    assert server.requests[0].headers["cookie"]
    assert len(reached.requests) == 2
    assert "SECRET" not in str(reached.requests)


def test_allow_redirects_is_true_or_false(server: WebServer, other: WebServer) -> None:
    server.change = redirecting(other.url("/moved"))
    url = server.url("/m.onnxa?id=1")
    refused("redirects to", opened, url, allow_redirects="false")
    for each in (url, "memory://m.onnxa"):
        with pytest.raises(ValueError, match="allow_redirects must be true or false"):
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


NAMED = [
    "//{host}/moved",
    "///{host}/moved",
    "/\\{host}/moved",
    "\\\\{host}/moved",
    "/\t/{host}/moved",
    "/\t/{host}?moved",
    "http:{host}/moved",
    "http:///{host}/moved",
    "http:/\\{host}/moved",
    "http:\\\\{host}/moved",
    "http:\\\\{host}\\moved",
    "HTTP://{host}/moved",
    "http://{own}@{host}/moved",
    "\r\n http://{host}/moved",
    "\r\n\t//{host}",
    "//me:SEC/RET@{host}/moved?SECRET",
]
UNNAMED = [
    "http://{own}\\@{host}/moved",
    "https://{own}/moved",
    "ftp://{own}/moved",
    "{own}:x@{host}/moved",
    "http://{own}.example/moved",
    "",
]


@pytest.mark.parametrize("location", NAMED + UNNAMED)
def test_no_spelling_of_another_server_is_taken_for_the_same(
    server: WebServer, other: WebServer, location: str
) -> None:
    host = host_of(other)
    server.change = redirecting(location.format(own=host_of(server), host=host))
    target = f" to '(?i:http)://{host}'" if location in NAMED else ""
    refused(f"the server redirects{target}", opened, server.url("/m.onnxa?id=1"))


@pytest.mark.parametrize(
    "target",
    [
        "http://127.0.0.1:{other}",
        "http://127.0.0.2:{own}",
        "http://localhost.:{own}",
        "http://a.localhost:{own}",
        "https://localhost:{own}",
    ],
)
def test_a_redirect_to_another_host_subdomain_port_or_scheme_is_refused(
    server: WebServer, other: WebServer, target: str
) -> None:
    target = target.format(own=server.port, other=other.port)
    server.change = redirecting(f"{target}/moved")
    url = f"http://localhost:{server.port}/m.onnxa?sig=SECRET"
    refused(f"the server redirects to '{target}'", opened, url)
    assert [it.path for it in server.requests] == ["/m.onnxa?sig=SECRET"]


@pytest.mark.parametrize("location", ["/a b", "/\u00e9"])
def test_a_redirect_to_an_unsafe_path_shows_it(location: str) -> None:
    head = f"HTTP/1.1 302 Found\r\nLocation: {location}?SECRET\r\n\r\n"
    with answering(head.encode("latin-1")) as (port, _):
        url = f"http://127.0.0.1:{port}/m.onnxa?id=1"
        refused(f"the server redirects to '{location}'", open_object, url)


def test_a_redirect_on_the_same_server_that_leads_to_another_is_refused(
    server: WebServer, other: WebServer
) -> None:
    def change(request: Request, answer: Answer) -> Answer:
        target = "/next" if request.path.startswith("/m.onnxa") else other.url("/moved")
        return Answer(302, {"Location": target})

    server.change = change
    refused("the server redirects to", opened, server.url("/m.onnxa?id=1"))


UNUSED = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("options", "variable"),
    [
        ({}, ""),
        ({}, "ftp_proxy"),
        ({}, "https_proxy"),
        ({"proxy_url": UNUSED, "proxy_excludes": "127.0.0.1,localhost"}, ""),
    ],
)
@pytest.mark.parametrize("secret", SECRETS)
def test_a_later_redirect_to_another_host_fails_with_or_without_proxies_of_others(
    server: WebServer,
    other: WebServer,
    no_proxy: pytest.MonkeyPatch,
    secret: str,
    options: dict[str, str],
    variable: str,
) -> None:
    if variable:
        no_proxy.setenv(variable, UNUSED)
    url, secrets = SECRETS[secret]
    with opened(url.format(host_of(server)), **secrets, **options) as file:
        server.change = redirecting(elsewhere(other))
        refused("the server redirects", file.read, 0, 10)


def test_a_later_redirect_to_another_port_is_followed(
    server: WebServer, reached: WebServer
) -> None:
    """SECURITY.md names this, and a subdomain, which obstore's proxy cannot tell apart."""
    with opened(server.url("/m.onnxa?id=1")) as file:
        server.change = redirecting(reached.url("/moved"))
        assert file.read(0, 10) == CONTENT[:10]
    assert (
        proxy_of("http", "a.localhost", {"proxy_url": UNUSED, "proxy_excludes": "localhost"})
        is None
    )


@pytest.mark.parametrize("status", [407, 408, 429, 500, 503])
def test_an_answer_that_may_be_temporary_is_refused(server: WebServer, status: int) -> None:
    server.change = lambda *_: Answer(status)
    text = f"HTTP status {status}, so it is unknown whether the server redirects"
    unanswered(text, opened, server.url("/m.onnxa?id=1"))
    assert {it.range for it in server.requests} == {"bytes=0-0"}


def test_an_answer_that_fails_once_is_asked_for_again(server: WebServer) -> None:
    def change(_request: Request, answer: Answer) -> Answer:
        return Answer(503) if len(server.requests) == 1 else answer

    server.change = change
    assert opened(server.url("/m.onnxa?id=1")).size == SIZE


def test_a_missing_answer_is_refused(server: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redirects, "TIMEOUT", 1)
    released = threading.Event()

    def change(_request: Request, answer: Answer) -> Answer:
        released.wait(60)
        return answer

    server.change = change
    try:
        text = "the server took too long to answer, so it is unknown"
        unanswered(text, opened, server.url("/m.onnxa?id=1"))
        wait_until(lambda: server.requests)
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
        b"HTTP/1.1 302 Found\r\nno header\r\nLocation: http://SECRET.invalid\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: /m\r\nno header\r\nLocation: http://x.invalid\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: SECRET\r\n" * 10_000,
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 1_000_000,
    ],
)
def test_an_answer_that_is_no_http_is_refused(answer: bytes) -> None:
    with answering(answer) as (port, requests):
        url = f"http://127.0.0.1:{port}/m.onnxa?sig=SECRET"
        text = refusal("unknown whether", onnxarchive.open, url, storage_options=ONCE)
        assert ("allow_redirects" in text) is ("not understood" in text)
        assert len(requests) == 1


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"])
def test_the_last_answer_counts_and_spaces_around_its_location_are_ignored(answer: bytes) -> None:
    answer += b"HTTP/1.1 302 Found\r\nLocation:\t/m.onnxa?id=1 \r\n\r\n"
    with answering(answer) as (port, requests):
        url = f"http://127.0.0.1:{port}/m.onnxa?id=1"
        unanswered("redirects to itself more than 10 times", open_object, url)
        assert len(requests) == 10


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
    refused("the server redirects to", open_object, url, storage_options=options)


UNKNOWN_PROXIES = [
    "socks5://127.0.0.1:1",
    "ftp://127.0.0.1:1",
    "http:127.0.0.1:1",
    "http://me:SEC^RET@127.0.0.1:1",
    "http://me@SECRET@127.0.0.1:1",
    "http://127.0.0.1:99999",
    " http://127.0.0.1:1",
    "//127.0.0.1:1",
]


@pytest.mark.parametrize(
    ("proxy", "text"),
    [
        ("http://127.0.0.1:1", "there is no connection to the proxy; check the proxy that HTTP"),
        ("https://x.invalid", "expected a proxy of the scheme http, found 'https', so it is"),
        *((proxy, "is not a URL such as http://host:port") for proxy in UNKNOWN_PROXIES),
    ],
)
def test_a_proxy_that_cannot_be_reached_is_an_error(
    server: WebServer, no_proxy: pytest.MonkeyPatch, proxy: str, text: str
) -> None:
    for name in ("http_proxy", "all_proxy"):
        with no_proxy.context() as environment:
            environment.setenv(name, proxy)
            # obstore can ask a proxy by https, so its redirects can be allowed.
            require = refused if proxy.startswith("https:") else unanswered
            require(text, opened, server.url("/m.onnxa?id=1"))
            assert not server.requests
    no_proxy.setenv("http_proxy", proxy)
    no_proxy.setenv("no_proxy", "127.0.0.1")
    assert opened(server.url("/m.onnxa?id=1")).size == SIZE
    assert not [it for it in server.requests if "proxy-authorization" in it.headers]


def test_a_proxy_that_opens_no_tunnel_is_named() -> None:
    with answering(b"HTTP/1.1 407 SECRET\r\n\r\n") as (port, _):
        text = "the proxy answered with HTTP status 407, so it is unknown whether"
        url = "https://nowhere.invalid/m.onnxa?id=1"
        unanswered(text, opened, url, proxy_url=f"http://127.0.0.1:{port}")


def test_redirects_of_a_store_of_the_caller_are_refused(
    server: WebServer, reached: WebServer
) -> None:
    from obstore.store import HTTPStore, S3Store

    client: Any = {**HEADER, "allow_http": True}
    store = HTTPStore(server.url("/folder"), client_options=client)
    server.change = lambda *_: Answer(302, {"Location": reached.url("/moved")})
    refused("the server redirects to", open_object, "a b/m.onnxa", store=store)
    assert [it.path for it in server.requests] == ["/folder/a%20b/m.onnxa"]
    s3 = S3Store("bucket", endpoint=server.url(""), skip_signature=True, client_options=client)
    refused("unknown whether", open_object, "m.onnxa", store=s3)
    for each in (store, s3):
        allowed = {"allow_redirects": True}
        assert open_object("m.onnxa", store=each, storage_options=allowed).size == SIZE
    with pytest.raises(ValueError, match="give store or storage_options, not both"):
        open_object("m.onnxa", store=store, storage_options=ONCE)


@pytest.mark.parametrize("by_environment", [True, False])
def test_headers_for_a_store_do_not_leave_its_servers(
    server: WebServer, reached: WebServer, no_proxy: pytest.MonkeyPatch, by_environment: bool
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
    server.change = redirecting(elsewhere(reached))
    refused("the server redirects", open_object, url, storage_options=options)
    assert not reached.requests
    assert open_object(url, storage_options={**options, "allow_redirects": True}).size == SIZE
    no_proxy.setenv("http_proxy", server.url(""))
    refused("unknown whether", open_object, url, storage_options=options)


@pytest.mark.parametrize(
    ("excluded", "text"),
    [
        ("127.0.0.0/8,.amazonaws.com,amazonaws.com.cn", "the server redirects"),
        ("127.0.0.0/8,amazonaws.com", "unknown whether the store's server redirects"),
        ("*", "unknown whether the store's server redirects"),
        ("127.0.0.1,*", "the server redirects"),
    ],
)
def test_headers_for_a_store_need_all_of_its_hosts_to_be_excluded_from_a_proxy(
    server: WebServer, other: WebServer, no_proxy: pytest.MonkeyPatch, excluded: str, text: str
) -> None:
    options = {"skip_signature": True, "endpoint": server.url(""), "allow_http": True}
    server.files["/bucket/m.onnxa"] = CONTENT
    server.change = redirecting(elsewhere(other))
    no_proxy.setenv("http_proxy", other.url(""))
    no_proxy.setenv("https_proxy", other.url(""))
    no_proxy.setenv("no_proxy", excluded)
    secrets = {**options, **HEADER, **ONCE}
    refused(text, open_object, "s3://bucket/m.onnxa", storage_options=secrets)
    assert bool(server.requests) is text.startswith("the")


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
    server.change = redirecting(elsewhere(other))
    refused("the server redirects", open_object, url, storage_options=options)


@pytest.mark.parametrize("chain", ["simplecache::{}/m.onnxa", "zip://m.onnxa::{}/m.onnxa.zip"])
def test_a_chained_web_address_is_not_redirected_to_another_server(
    server: WebServer, reached: WebServer, chain: str
) -> None:
    pytest.importorskip("aiohttp")
    with zipfile.ZipFile(content := io.BytesIO(), "w") as zip:
        zip.writestr("m.onnxa", CONTENT)
    for each, path in ((server, "/m.onnxa.zip"), (server, "/moved"), (reached, "/moved")):
        each.files[path] = content.getvalue() if "zip" in chain else CONTENT
    headers = {"http": {"headers": {"private-token": "SECRET"}}}
    url = chain.format(server.url(""))
    with open_object(url, storage_options=headers) as file:
        assert file.read(0, 10) == CONTENT[:10]
    server.change = redirecting("/moved")
    assert open_object(url, storage_options=headers).size == SIZE
    server.change = redirecting(reached.url("/moved"))
    refused("the server redirects", open_object, url, storage_options=headers)
    refused("the server redirects", open_object, url + "?sig=SECRET")
    assert not reached.requests
    assert open_object(url, storage_options={"allow_redirects": True, **headers}).size == SIZE
    assert open_object(url).size == SIZE


@pytest.mark.parametrize("allow_redirects", [False, True])
def test_a_chained_address_of_https_is_never_redirected_to_http(
    other: WebServer, tmp_path: Path, allow_redirects: bool
) -> None:
    pytest.importorskip("aiohttp")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certify(tmp_path))
    answer = f"HTTP/1.1 302 Found\r\nLocation: {other.url('/moved')}\r\nContent-Length: 0\r\n\r\n"
    with answering(answer.encode(), context) as (port, requests):
        options = {"https": {"headers": {"private-token": "SECRET"}, "ssl": False}}
        url = f"simplecache::https://127.0.0.1:{port}/m.onnxa"
        text = "redirects to 'http://.*', which is not encrypted; no option allows this"
        allowed = {"allow_redirects": allow_redirects}
        unanswered(text, open_object, url, storage_options={**options, **allowed})
        assert requests


def test_https_is_never_redirected_to_http(other: WebServer, tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate = certify(tmp_path)
    context.load_cert_chain(certificate)
    answer = f"HTTP/1.1 302 Found\r\nLocation: {other.url('/moved')}\r\nContent-Length: 0\r\n\r\n"
    with answering(answer.encode(), context) as (port, requests):
        url = f"https://127.0.0.1:{port}/m.onnxa"
        trusted = {**ONCE, "root_certificate": Path(certificate).read_text()}
        for options in (trusted, {**ONCE, "allow_invalid_certificates": "true"}):
            text = "redirects to 'http://.*', which is not encrypted; no option allows this"
            unanswered(text, open_object, url + "?id=1", storage_options=options)
            for more in ({}, {"allow_redirects": True}, {"allow_http": True}):
                text = "the server redirects from https to http .*; no option allows this"
                unanswered(text, open_object, url, storage_options={**options, **more})
        assert len(requests) == 8
        unanswered("cannot verify the server's", opened, url + "?id=1")


def certify(folder: Path) -> str:
    """Makes a key and a certificate of this machine, in one file."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    years = datetime.datetime(2020, 1, 1), datetime.datetime(2100, 1, 1)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, *years, [])
    certificate = builder.add_extension(address, critical=False).sign(key, hashes.SHA256())
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    path = folder / "certificate.pem"
    text = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    path.write_bytes(text + certificate.public_bytes(pem))
    return str(path)
