"""Starts the server of run.py: nginx on this machine, with the files of a directory."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import DEVNULL

from tools.bench.cases import program
from tools.bench.inputs import ADDRESS
from tools.bench.process import FailedError, started

_SETTINGS = """
daemon off;
master_process off;
pid nginx.pid;
error_log stderr;
events {{ }}
http {{
    access_log off;
    sendfile on;
    client_body_temp_path nginx;
    proxy_temp_path nginx;
    fastcgi_temp_path nginx;
    uwsgi_temp_path nginx;
    scgi_temp_path nginx;
    server {{ listen 127.0.0.1:{port}; root "{folder}"; }}
}}
"""


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[None]:
    """Runs nginx until the block ends, and writes its address into the directory.

    Raises:
        FailedError: nginx does not answer.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = folder / "nginx.conf"
    settings.write_text(_SETTINGS.format(folder=folder, port=port))
    command = [program("nginx") or "nginx", "-p", f"{folder}/", "-c", str(settings), "-e", "stderr"]
    with started(command, stdout=DEVNULL, stderr=DEVNULL):
        for _ in range(100):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
            except ConnectionRefusedError:
                time.sleep(0.05)
            else:
                (folder / ADDRESS).write_text(f"http://127.0.0.1:{port}")
                break
        else:
            raise FailedError(f"nginx does not answer at port {port}")
        yield
