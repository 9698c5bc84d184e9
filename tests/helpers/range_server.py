"""A file server that answers ranges, for tests with a browser."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

# The ranges of all requests: path, offset and end.
ranges: list[tuple[str, int, int]] = []


@contextlib.contextmanager
def serving(directory: Path) -> Iterator[str]:
    """Serves the files of a directory; yields the URL."""
    ranges.clear()
    handler = partial(_Handler, directory=str(directory))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class _Handler(SimpleHTTPRequestHandler):
    extensions_map = {  # noqa: RUF012
        ".mjs": "text/javascript",
        ".html": "text/html",
        ".wasm": "application/wasm",
        "": "application/zip",
    }

    def do_GET(self) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is None:
            super().do_GET()
            return
        file = Path(self.translate_path(self.path))
        data = file.read_bytes()
        first, last = int(asked[1]), min(int(asked[2]), len(data) - 1)
        ranges.append((self.path, first, last + 1))
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self.send_header("Content-Length", str(last + 1 - first))
        self.send_header("Last-Modified", self.date_time_string(int(file.stat().st_mtime)))
        self.end_headers()
        self.wfile.write(data[first : last + 1])

    def log_message(self, *_: object) -> None:
        pass
