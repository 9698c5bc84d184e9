"""A small HTTP server in a thread: answers ranges, counts requests, can send wrong answers."""

from __future__ import annotations

import email.utils
import hashlib
import http.server
import mimetypes
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODIFIED = 1_700_000_000


@dataclass
class Request:
    """A received request; the path includes the query."""

    method: str
    path: str
    headers: dict[str, str]

    @property
    def range(self) -> str:
        return self.headers.get("range", "")


@dataclass
class Answer:
    """An answer of the server. Headers of None are not sent."""

    status: int
    headers: dict[str, str | None] = field(default_factory=dict)
    body: Iterable[bytes] = ()


class WebServer:
    """Serves files; `change` may replace each answer.

    Attributes:
        files: Bytes of the files, by path.
        folder: A directory whose files are served beside these, or None.
        requests: All requests so far.
        nbytes: Number of sent bytes, without headers.
        most: Maximum number of simultaneous requests.
        change: Returns the answer to send, given the request and the correct answer.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.folder: Path | None = None
        self.requests: list[Request] = []
        self.nbytes = 0
        self.most = self.running = 0
        self.change: Callable[[Request, Answer], Answer] = lambda _, answer: answer
        self.lock = threading.Lock()
        self._etags: dict[str, tuple[bytes, str]] = {}
        server = self

        class Handler(_Handler):
            web_server = server

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self.port = self._server.server_port

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def ranges(self) -> list[str]:
        return [it.range for it in self.requests]

    def answer(self, request: Request) -> Answer:
        """The correct answer."""
        path = request.path.partition("?")[0]
        content = self.files.get(path)
        if self.folder is not None and (self.folder / path[1:]).is_file():
            content = (self.folder / path[1:]).read_bytes()
        if content is None:
            return Answer(404, body=[b"missing"])
        etag = self._etag(path, content)
        headers: dict[str, str | None] = {
            "ETag": etag,
            "Last-Modified": email.utils.formatdate(MODIFIED, usegmt=True),
            "Content-Type": mimetypes.guess_type(path)[0],
        }
        if request.headers.get("if-match", etag) != etag:
            return Answer(412)
        if request.headers.get("if-none-match") == etag:
            return Answer(304, headers)
        if not request.range:
            return Answer(200, headers, [content])
        first, _, last = request.range.removeprefix("bytes=").partition("-")
        start = int(first) if first else max(0, len(content) - int(last))
        end = min(int(last) + 1, len(content)) if first and last else len(content)
        if start >= end:
            return Answer(416)
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
        return Answer(206, headers, [content[start:end]])

    def _etag(self, path: str, content: bytes) -> str:
        """The ETag, computed once for all requests of the same bytes: hashing took most time."""
        known, etag = self._etags.get(path, (None, ""))
        if known is not content:
            etag = f'"{hashlib.md5(content).hexdigest()}"'
            self._etags[path] = content, etag
        return etag


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    web_server: WebServer

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        server = self.web_server
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.command, self.path, headers)
        with server.lock:
            server.requests.append(request)
            server.running += 1
            server.most = max(server.most, server.running)
        try:
            self._send(server.change(request, server.answer(request)))
        finally:
            with server.lock:
                server.running -= 1

    do_HEAD = do_GET  # noqa: N815

    def _send(self, answer: Answer) -> None:
        if isinstance(answer.body, list):
            answer.headers.setdefault("Content-Length", str(sum(map(len, answer.body))))
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        sent = 0
        for piece in answer.body:
            self.wfile.write(piece)
            sent += len(piece)
            with self.web_server.lock:
                self.web_server.nbytes += len(piece)
        # A body of the wrong length ends the connection.
        self.close_connection |= answer.headers.get("Content-Length") != str(sent)


@contextmanager
def serving(files: dict[str, bytes]) -> Iterator[WebServer]:
    """A server that runs until the block ends."""
    server = WebServer(files)
    thread = threading.Thread(target=server._server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server._server.shutdown()
        thread.join()
        server._server.server_close()
