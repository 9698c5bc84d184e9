"""Shows an archive in Netron in the browser; nothing is copied, unpacked or written.

Netron's page requests the model, and external data by location. Locations in an archive's model are
names of entries, so the server sends the unchanged model and the bytes of entries.
"""

from __future__ import annotations

import html
import http.server
import importlib.util
import mimetypes
import os
import secrets
import threading
import urllib.parse
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Unpack

from onnxarchive.errors import ArchiveError, UnsupportedFeatureError, requires_library
from onnxarchive.model.keys import model_entry
from onnxarchive.reading.archive import contents_of, open
from onnxarchive.remote.location import Access
from onnxarchive.zipformat.directory import Entry

_INDEX: Final = "index.html"
_SUFFIXES: Final = frozenset({".css", ".html", ".ico", ".js", ".json", ".png"})
_VERSION: Final = b'<meta name="version"'
# A released Netron reports its use to Google and expires half a year after its date. A development
# version (0.0.0, without a date) does neither, and _POLICY blocks reports.
_TAGS: Final = (
    b'<meta name="version" content="0.0.0"><meta name="type" content="Python">'
    b'<meta name="file" content="/data/model.onnx"><meta name="identifier" content="model.onnx">'
)
_POLICY: Final = (
    "default-src 'self'; connect-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:"
    " blob:; frame-src 'none'; frame-ancestors 'none'; form-action 'none'; base-uri 'none'"
)
TOO_LARGE: Final = 1 << 31  # bytes; Chromium passes only smaller responses to a page


class Server(http.server.ThreadingHTTPServer):
    """Serves an archive in Netron, to this machine only, until the end of a `with` block.

    The page requests the bytes of a weight when a user opens the weight. A damaged weight is not
    sent, and a warning is raised. Browsers do not accept weights of 2 GiB or more. The port 0 is
    any free one.

    Attributes:
        url: Address of the page, with a secret that other users and other pages do not know.
    """

    allow_reuse_address = os.name == "posix"  # on Windows it allows two servers on one port
    allow_reuse_port = False

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        model: str | None = None,
        port: int = 0,
        **access: Unpack[Access],
    ) -> None:
        if not 0 <= port < 1 << 16:
            raise ValueError(f"expected a port from 0 to 65535, found {port}")
        self._served: dict[str, Path | Entry] = {**_netron_files()}
        self._archive = open(path, model=model, **access)
        entries = self._archive.entries
        self._served |= {f"data/{key}": entries[key] for key in self._archive.tensors.refs}
        self._served["data/model.onnx"] = entries[model_entry(self._archive.model_id)]
        self.prefix = f"/{secrets.token_urlsafe(16)}/"
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            self._archive.close()
            error.filename = f"127.0.0.1:{port}"
            raise
        self.url = f"http://127.0.0.1:{self.server_address[1]}{self.prefix}"
        threading.Thread(target=self.serve_forever, args=[0.1], daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()
        self._archive.close()

    def server_bind(self) -> None:
        """Binds without looking up the host name, which can take seconds."""
        super(http.server.HTTPServer, self).server_bind()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores errors such as connections closed by the browser."""

    def find(self, path: str) -> tuple[str, int, Iterable[bytes | memoryview]] | None:
        """Media type, size and data for a path, or None. A damaged entry raises ArchiveError."""
        is_known = secrets.compare_digest(path[: len(self.prefix)].encode(), self.prefix.encode())
        name = urllib.parse.unquote(path[len(self.prefix) :]) or _INDEX
        served = self._served.get(name) if is_known else None
        if isinstance(served, Path):
            data = served.read_bytes() if name != _INDEX else self._set_up(served.read_bytes())
            return mimetypes.MimeTypes().guess_type(name)[0] or "", len(data), [data]
        if served is None or served.nbytes >= TOO_LARGE:
            return None
        for _ in contents_of(self._archive).pieces(served.name):
            pass  # compares local header and CRC-32
        pieces = contents_of(self._archive).file.pieces(served.data_offset, served.nbytes)
        return "application/octet-stream", served.nbytes, pieces

    def _set_up(self, page: bytes) -> bytes:
        """Makes Netron's page show the model, and hides the page's own version and date."""
        name = os.path.basename(self._archive.path)
        if self._archive.model_id:
            name += f" ({self._archive.model_id})"
        title = html.escape(name).encode("utf-8", "replace")
        tags = b'%b<meta name="name" content="%b"><meta name="netron"' % (_TAGS, title)
        return page.replace(_VERSION, tags, 1).replace(b'name="date"', b'name="netron-date"', 1)


def _netron_files() -> dict[str, Path]:
    """The files of Netron's page by name, found without importing Netron."""
    with requires_library("netron", "view a model"):
        package = importlib.util.find_spec("netron")
        if package is None or package.origin is None:
            raise ModuleNotFoundError("No module named 'netron'", name="netron")
    directory = Path(package.origin).parent
    files = {file.name: file for file in directory.iterdir() if file.suffix in _SUFFIXES}
    if _INDEX not in files or _VERSION not in files[_INDEX].read_bytes():
        raise UnsupportedFeatureError(
            f"Netron's page {directory / _INDEX} is missing or lacks the tag {_VERSION.decode()} "
            "...>; pip install --upgrade netron"
        )
    return files


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Server
    timeout = 60

    def do_GET(self) -> None:
        try:
            answer = self.server.find(urllib.parse.urlsplit(self.path).path)
        except ArchiveError as error:
            warnings.warn(f"a weight is not shown: {error}", stacklevel=2)
            self.send_error(500)
            return
        if answer is None:
            self.send_error(404)
            return
        media_type, nbytes, pieces = answer
        self.send_response(200)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(nbytes))
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        # With this cookie, Netron's page does not ask for consent. Other pages get no cookie.
        self.send_header("Set-Cookie", f"consent=0; Path={self.server.prefix}; SameSite=Strict")
        self.end_headers()
        self.wfile.writelines(pieces)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Logs no requests."""
