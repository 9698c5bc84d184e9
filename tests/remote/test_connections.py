"""Each reason for which there is no connection has its own sentence, which names what to check."""

from __future__ import annotations

import contextlib
import datetime
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from remote_files import open_object
from web_server import WebServer

from onnxarchive.cli import main

ONCE = {"max_retries": 0}


@pytest.fixture
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "ssl_cert_file"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return monkeypatch


class Certified:
    """A key and its certificate.

    Attributes:
        certificate: A file with the certificate.
        both: A file with the key and the certificate, as servers take it.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        signer: Certified | None = None,
        is_authority: bool = False,
        is_valid: bool = True,
    ) -> None:
        """Makes a key, and a certificate for a host that `signer` signs, or else the key itself."""
        x509 = pytest.importorskip("cryptography.x509")
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        day = datetime.timedelta(days=1)
        begin = datetime.datetime.now(datetime.UTC) - 9 * day
        end = begin + (20 * day if is_valid else 5 * day)
        self.name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self.key: Any = ec.generate_private_key(ec.SECP256R1())
        signer = signer or self
        builder = x509.CertificateBuilder(
            signer.name, self.name, self.key.public_key(), 1, begin, end
        )
        for extension in (
            x509.BasicConstraints(ca=is_authority, path_length=None),
            x509.SubjectAlternativeName([x509.DNSName(name)]),
        ):
            builder = builder.add_extension(extension, critical=False)
        signed = builder.sign(signer.key, hashes.SHA256())
        certificate = signed.public_bytes(serialization.Encoding.PEM)
        key = self.key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        self.certificate, self.both = folder / f"{name}.pem", folder / f"{name}.both.pem"
        self.certificate.write_bytes(certificate)
        self.both.write_bytes(key + certificate)


@pytest.fixture
def authority(tmp_path: Path) -> Certified:
    return Certified(tmp_path, "authority", is_authority=True)


@contextlib.contextmanager
def speaking_tls(certified: Certified) -> Iterator[str]:
    """A server with TLS that has no file; yields the URL of an archive there."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certified.both)
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                plain, _ = listening.accept()
                with contextlib.suppress(OSError), context.wrap_socket(plain, True) as connection:
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"https://localhost:{listening.getsockname()[1]}/m.onnxa"
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    thread.join()


def refusal(url: str, **options: Any) -> str:
    """The text of the error that opening an object raises."""
    with pytest.raises(OSError, match="Errno") as caught:
        open_object(url, storage_options={**ONCE, **options})
    return str(caught.value)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.usefixtures("no_proxy")
def test_an_unknown_authority_is_named_with_the_setting_that_makes_it_known(
    tmp_path: Path, authority: Certified, monkeypatch: pytest.MonkeyPatch
) -> None:
    with speaking_tls(Certified(tmp_path, "localhost", signer=authority)) as url:
        text = refusal(url)
        assert "no known authority has signed its certificate; SSL_CERT_FILE" in text
        # What the message advises helps: the server's answer arrives.
        known = authority.certificate
        for value in (str(known), known.read_text(), known.read_bytes()):
            assert "No such object" in refusal(url, root_certificate=value)
        monkeypatch.setenv("SSL_CERT_FILE", str(known))
        assert "No such object" in refusal(url)


@pytest.mark.usefixtures("no_proxy")
def test_a_certificate_of_another_host_or_time_is_named(
    tmp_path: Path, authority: Certified
) -> None:
    options = {"root_certificate": str(authority.certificate)}
    with speaking_tls(Certified(tmp_path, "other.example", signer=authority)) as url:
        text = refusal(url, **options)
        assert "there is no connection to the server: its certificate is for another host" in text
    with speaking_tls(Certified(tmp_path, "localhost", signer=authority, is_valid=False)) as url:
        text = refusal(url, **options)
        assert "its certificate has expired, or is not valid yet; check the clock" in text


@pytest.mark.usefixtures("no_proxy")
def test_a_self_signed_certificate_is_named(tmp_path: Path) -> None:
    signed = Certified(tmp_path, "localhost")
    with speaking_tls(signed) as url:
        assert "no known authority has signed its certificate" in refusal(url)
        assert "No such object" in refusal(url, root_certificate=str(signed.certificate))
    # As `openssl req -x509` makes it.
    signed = Certified(tmp_path, "localhost", is_authority=True)
    with speaking_tls(signed) as url:
        text = refusal(url, root_certificate=str(signed.certificate))
        assert "its certificate is that of an authority, signed by itself" in text


@pytest.mark.parametrize("content", [None, "no certificate", b"\xff\xfe"])
def test_a_root_certificate_that_is_neither_text_nor_a_file_is_refused(
    content: str | bytes | None, tmp_path: Path
) -> None:
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=r"root_certificate is neither the text .* nor a file"):
        open_object("https://localhost/m.onnxa", storage_options={"root_certificate": str(path)})


@pytest.mark.usefixtures("no_proxy")
@pytest.mark.parametrize("query", ["", "?id=1"])
def test_https_to_a_port_of_http_is_named(server: WebServer, query: str) -> None:
    url = server.url("/m.onnxa").replace("http:", "https:")
    assert "does not answer with TLS; if it has no TLS, use http://" in refusal(url + query)


@pytest.mark.usefixtures("no_proxy")
@pytest.mark.parametrize("query", ["", "?id=1"])
def test_a_name_that_no_host_has_is_named(query: str) -> None:
    text = refusal(f"https://no-such-host.invalid/m.onnxa{query}")
    assert "there is no connection to the server: no host has this name" in text
    assert text.endswith("'https://no-such-host.invalid/m.onnxa'")


@pytest.mark.usefixtures("no_proxy")
@pytest.mark.parametrize("query", ["", "?id=1"])
def test_a_port_that_refuses_is_named(query: str) -> None:
    url = f"http://127.0.0.1:{free_port()}/m.onnxa{query}"
    assert "there is no connection to the server: its port refuses it" in refusal(url)


@pytest.mark.usefixtures("no_proxy")
def test_the_host_of_a_store_is_named() -> None:
    server = f"127.0.0.1:{free_port()}"
    options = {"endpoint": f"http://{server}", "skip_signature": True, "allow_http": True}
    assert f"there is no connection to the server {server}: its" in refusal("s3://b/k", **options)


@pytest.mark.parametrize("query", ["", "?id=1"])
def test_a_dead_proxy_is_named(no_proxy: pytest.MonkeyPatch, query: str) -> None:
    no_proxy.setenv("HTTPS_PROXY", f"http://127.0.0.1:{free_port()}")
    text = refusal(f"https://no-such-host.invalid/m.onnxa{query}")
    assert "there is no connection to the proxy; check the proxy that HTTPS_PROXY" in text


def test_a_proxy_that_is_none_is_named(no_proxy: pytest.MonkeyPatch, server: WebServer) -> None:
    no_proxy.setenv("HTTPS_PROXY", server.url(""))
    text = refusal("https://no-such-host.invalid/m.onnxa")
    assert "the proxy opens no connection to the server; check the proxy" in text


@pytest.mark.usefixtures("no_proxy")
@pytest.mark.parametrize("key", ["what?.onnxa", "a#1.onnxa", "a ?b#c.onnxa"])
def test_the_message_of_a_command_has_the_whole_key(
    key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"endpoint": f"http://127.0.0.1:{free_port()}", "skip_signature": "true"}
    options |= {"allow_http": "true", "max_retries": "0"}
    arguments = [it for pair in options.items() for it in ("--storage-option", "=".join(pair))]
    assert main(["info", f"s3://bucket/{key}", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"onnxarchive: s3://bucket/{key}: there is no conn")
