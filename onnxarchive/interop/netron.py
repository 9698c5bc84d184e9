"""Netron in the browser, on an archive as it lies: nothing is copied, unpacked or written.

Netron is a page that asks a server of ours for the model and, when somebody looks at a weight, for
the weight's external data. An archive's own model names each tensor's entry as the location of its
external data. So the page is given that model as it is, and a request for a location is answered
with the bytes of that entry, a few MiB at a time. (Netron's own Python server reads whole files
into memory, and a link's external data is the whole archive, for each of its weights.)
"""

from __future__ import annotations

import html
import http.server
import importlib.metadata
import importlib.util
import ipaddress
import os
import re
import secrets
import socket
import socketserver
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, TypeAlias

from onnxarchive.archive.contents import summed
from onnxarchive.archive.opening import open
from onnxarchive.archive.reading import Archive
from onnxarchive.errors import ArchiveError, Report, UnsupportedFeatureError
from onnxarchive.interop.optional import needing
from onnxarchive.model.keys import MODEL_PROTO

_INDEX: Final = "index.html"
_DATA: Final = "data/"
# What the page asks for the model by. No key has a dot.
_MODEL: Final = "model.onnx"
_BYTES: Final = "application/octet-stream"
_TYPES: Final[Mapping[str, str]] = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".json": "application/json",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".svg": "image/svg+xml",
}
# The page of a packaged Netron reports its use, with the page's address, to Google, and shows
# nothing half a year after its date until it is updated. That of one under development, which has
# this version and no date, does neither. The policy has the browser see to it.
_NOT_PACKAGED: Final = "0.0.0"
_POLICY: Final = (
    "default-src 'self'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; frame-src 'none'; frame-ancestors 'none'; "
    "form-action 'none'; base-uri 'none'"
)
_META_VERSION: Final = re.compile(r'<meta name="version" content="[^"]*">')
_META_DATE: Final = re.compile(r'<meta name="date" content="[^"]*">')
_SECRET_NBYTES: Final = 16
# Chromium gives a page nothing of answers of this size, after it has read them.
TOO_LARGE: Final = 1 << 31

OnFault: TypeAlias = Callable[[ArchiveError], None]


class Server:
    """A server of Netron's page on one archive, for as long as it is open.

    Its address has a secret in it, so that other users of the machine, and other pages in the
    browser, cannot read the model.

    Attributes:
        url: The address of the page.
        path: The archive's path as it was given.
        version: Netron's version.
        shown: Set once somebody has asked for the page.
    """

    def __init__(self, archive: Archive, address: tuple[str, int], on_fault: OnFault) -> None:
        """Takes over `archive`, and begins to answer."""
        files = _files()
        self.path = archive.path
        self.version = importlib.metadata.version("netron")
        self._archive = archive
        secret = secrets.token_urlsafe(_SECRET_NBYTES)
        pages = _Pages(archive, files, f"/{secret}/")
        self.shown = pages.shown
        self._server = _HttpServer(address, pages, on_fault)
        host, port = self._server.socket.getsockname()[:2]
        self.url = f"http://{_bracketed(address[0] or host)}:{port}/{secret}/"
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.1], daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Waits until the server is closed, or an interrupt."""
        while self._thread.is_alive():
            self._thread.join(0.2)  # an interrupt is seen on every system

    def close(self) -> None:
        """Ends it, and closes the archive."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._archive.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(
    path: str | os.PathLike[str],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    on_fault: OnFault = lambda _: None,
) -> Server:
    """Shows an archive in Netron, at the address that the server has.

    The page gets a weight's bytes when somebody looks at it, and only if their CRC-32 is right.
    It cannot reach anything but this server: what Netron reports of its use elsewhere, and the
    consent that it asks for, are switched off. A browser takes no more than 1 to 2 GiB at a time:
    the values of a single tensor of 2 GiB or more are not shown; those of others are, in archives
    of every size.

    Args:
        path: The archive.
        host: The address to listen at. Whoever can reach it and knows the page's address can read
            the model.
        port: The port; 0 for any that is free.
        on_fault: Called, in any thread, with what is found wrong with a weight that somebody wanted
            to see; it is not shown then.

    Returns:
        The server. It answers, in a thread of its own, until it is closed.

    Raises:
        ArchiveFormatError: The file is not an archive or breaks a rule.
        UnsupportedFeatureError: The Netron that is installed is of another kind than this knows.
        ImportError: Netron is not installed.
        ValueError: `port` is none.
        OSError: The file cannot be read, or the address is in use or none of this machine.
    """
    if not 0 <= port < 1 << 16:
        raise ValueError(f"expected a port from 0 to 65535, found {port}")
    _files()
    archive = open(path)
    try:
        return Server(archive, (host, port), on_fault)
    except BaseException:
        archive.close()
        raise


def _files() -> dict[str, Path]:
    """The files of Netron's page by name."""
    with needing("netron", "view a model with"):
        found = importlib.util.find_spec("netron")  # its page is served, its code is not run
        places = None if found is None else found.submodule_search_locations
        if not places:
            raise ModuleNotFoundError("No module named 'netron'", name="netron")
    directory = Path(next(iter(places)))
    files = {it.name: it for it in directory.iterdir() if it.suffix in _TYPES and it.is_file()}
    if _INDEX not in files or not _META_VERSION.search(_text(files[_INDEX])):
        raise UnsupportedFeatureError(
            f"expected Netron's page {_INDEX} in {directory}, with its version in it, found none; "
            "pip install --upgrade 'onnxarchive[view]'"
        )
    return files


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class _Pages:
    """What there is to be asked for, below one prefix."""

    def __init__(self, archive: Archive, files: Mapping[str, Path], prefix: str) -> None:
        self.path = archive.path
        self.prefix = prefix
        self.shown = threading.Event()
        self._archive = archive
        self._files = files
        self._index = self._make_index()

    def find(self, path: str) -> tuple[str, int, Iterator[bytes | memoryview]] | None:
        """Type, size and bytes of what lies at a path, or None.

        Raises:
            ArchiveFormatError: An entry's local header does not match the directory.
            UnsupportedFeatureError: It is too large for a browser.
        """
        if not secrets.compare_digest(path[: len(self.prefix)].encode(), self.prefix.encode()):
            return None
        name = urllib.parse.unquote(path[len(self.prefix) :]) or _INDEX
        if name == _INDEX:
            self.shown.set()
            return _TYPES[".html"], len(self._index), iter([self._index])
        if name.startswith(_DATA):
            return self._find_entry(name.removeprefix(_DATA))
        file = self._files.get(name)
        if file is None:
            return None
        data = file.read_bytes()
        return _TYPES[file.suffix], len(data), iter([data])

    def _find_entry(self, name: str) -> tuple[str, int, Iterator[bytes | memoryview]] | None:
        if name == _MODEL:
            name = MODEL_PROTO
        elif name not in self._archive._refs:
            return None
        self._archive.read(name)  # compares its local header; nothing is read through the map
        nbytes = self._archive.entries[name].nbytes
        if nbytes >= TOO_LARGE:
            raise UnsupportedFeatureError(
                f"entry {name!r}: expected less than {TOO_LARGE} bytes, the most that a browser "
                f"takes at once, found {nbytes}; in Python, archive.tensor_by_key({name!r}) gives "
                "it",
                entry=name,
            )
        return _BYTES, nbytes, self._checked(name)

    def _checked(self, name: str) -> Iterator[memoryview]:
        """An entry's bytes in pieces, of which the last comes when their CRC-32 is right.

        Raises:
            ChecksumError: It is not.
        """
        entry = self._archive.entries[name]
        held = None
        for piece in summed(self._archive._file, entry, Report()):
            if held is not None:
                yield held
            held = piece
        if held is not None:
            yield held

    def _make_index(self) -> bytes:
        """Netron's page, with the archive's model to show at first."""
        name = os.path.basename(self._archive.path)
        # The identifier tells Netron the format, the name is what people see.
        values = {
            "version": _NOT_PACKAGED,
            "type": "Python",
            "file": f"/{_DATA}{_MODEL}",
            "identifier": _MODEL,
            "name": name,
        }
        tags = "\n".join(
            f'<meta name="{key}" content="{html.escape(value)}">' for key, value in values.items()
        )
        page = _META_DATE.sub("", _text(self._files[_INDEX]))
        page = _META_VERSION.sub(lambda _: tags, page, count=1)
        return page.encode("utf-8", "replace")


class _HttpServer(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_port = False
    allow_reuse_address = os.name == "posix"  # elsewhere it lets two servers have one port

    def __init__(self, address: tuple[str, int], pages: _Pages, on_fault: OnFault) -> None:
        self.pages = pages
        self.on_fault = on_fault
        try:
            self.address_family = _family(*address)
            super().__init__(address, _Handler)
        except OSError as error:
            error.filename = f"{_bracketed(address[0])}:{address[1]}"
            raise

    def server_bind(self) -> None:
        # Without what HTTPServer adds: the host's name, which can take a resolver seconds.
        socketserver.TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away, or an archive that was closed meanwhile, is nobody's fault."""


def _family(host: str, port: int) -> socket.AddressFamily:
    try:
        return socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    except ValueError:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _HttpServer
    server_version = "onnxarchive"
    sys_version = ""
    timeout = 60

    def do_GET(self) -> None:
        """Answers one request."""
        pages = self.server.pages
        try:
            found = pages.find(urllib.parse.urlsplit(self.path).path)
        except ArchiveError as error:
            self._note(error)
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR)
            return
        if found is None:
            self.send_error(
                HTTPStatus.NOT_FOUND, explain="Open the whole address that onnxarchive printed."
            )
            return
        content_type, size, pieces = found
        self.send_response(HTTPStatus.OK)
        for key, value in {
            "Content-Type": content_type,
            "Content-Length": str(size),
            "Content-Security-Policy": _POLICY,
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-store",
            # For this page alone: it asks for consent to what it cannot do here.
            "Set-Cookie": f"consent=0; Path={pages.prefix}; SameSite=Strict",
        }.items():
            self.send_header(key, value)
        self.end_headers()
        try:
            for piece in pieces:
                self.wfile.write(piece)
        except ArchiveError as error:
            self._note(error)  # and the answer stays too short, which the page takes for an error
            self.close_connection = True

    def _note(self, error: ArchiveError) -> None:
        error.path = error.path or self.server.pages.path
        self.server.on_fault(error)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Requests are not logged."""
