"""Object and web servers for tests: moto's S3, Azurite and nginx, each in its own process."""

from __future__ import annotations

import base64
import email.utils
import hashlib
import hmac
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from processes import wait_until

_S3 = """
import time
from moto.server import ThreadedMotoServer

server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
time.sleep(3600)
"""
_NGINX = """
daemon off;
master_process off;
pid {place}/pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path {place}; proxy_temp_path {place}; fastcgi_temp_path {place};
    uwsgi_temp_path {place}; scgi_temp_path {place};
    server {{
        listen 127.0.0.1:{port};
        root {root};
        location /whole/ {{ alias {root}/; max_ranges 0; }}
    }}
}}
"""


_AZURITE = Path(__file__).resolve().parents[2] / "tools" / "azurite" / "node_modules"
_ACCOUNT = "devstoreaccount1"  # account and key are in Azurite's documentation
_ACCOUNT_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


@dataclass(frozen=True)
class S3Server:
    """An S3 server with an empty bucket, `bucket`."""

    endpoint: str

    @property
    def options(self) -> dict[str, Any]:
        """The options of obstore for this server."""
        return {
            "endpoint": self.endpoint,
            "access_key_id": "key",
            "secret_access_key": "SECRET",
            "region": "us-east-1",
            "allow_http": True,
        }

    def request(self, method: str, path: str) -> str:
        request = urllib.request.Request(self.endpoint + path, method=method)
        with urllib.request.urlopen(request) as answer:
            return str(answer.read(), "utf-8")

    def uploads(self) -> int:
        """The number of unfinished multipart uploads."""
        return self.request("GET", "/bucket?uploads").count("<Upload>")

    def empty(self) -> None:
        """Empties the bucket."""
        self.request("POST", "/moto-api/reset")
        self.request("PUT", "/bucket")


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Runs an S3 server while the block runs."""
    command = [sys.executable, "-c", _S3]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            server = S3Server(f"http://127.0.0.1:{int(process.stdout.readline())}")
            server.empty()
            yield server
        finally:
            process.kill()


@contextmanager
def azurite() -> Iterator[dict[str, Any]]:
    """Runs an Azure Blob server with an empty container, `bucket`; yields obstore's options."""
    program = _AZURITE / ".bin" / "azurite-blob"
    if not program.exists():
        pytest.skip("Azurite is not installed: npm install --prefix tools/azurite")
    port = 10_000 + os.getpid() % 10_000
    command = [str(program), "--silent", "--inMemoryPersistence", "--skipApiVersionCheck"]
    command += ["--blobHost", "127.0.0.1", "--blobPort", str(port)]
    endpoint = f"http://127.0.0.1:{port}/{_ACCOUNT}"
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            wait_until(lambda: _answers(endpoint), process)
            _make_container(endpoint)
            yield {
                "account_name": _ACCOUNT,
                "account_key": _ACCOUNT_KEY,
                "azure_storage_endpoint": endpoint,
                "allow_http": "true",
            }
        finally:
            process.terminate()


def _make_container(endpoint: str) -> None:
    """Makes the container with a signed request; obstore cannot make containers."""
    headers = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    lines = [f"{name}:{value}" for name, value in headers.items()]
    resource = f"/{_ACCOUNT}/{_ACCOUNT}/bucket\nrestype:container"
    text = "\n".join(["PUT", *[""] * 11, *lines, resource])
    digest = hmac.digest(base64.b64decode(_ACCOUNT_KEY), text.encode(), hashlib.sha256)
    signature = base64.b64encode(digest).decode()
    headers |= {"Authorization": f"SharedKey {_ACCOUNT}:{signature}", "Content-Length": "0"}
    url = f"{endpoint}/bucket?restype=container"
    urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers)).close()


@contextmanager
def nginx(root: Path, place: Path) -> Iterator[str]:
    """Serves a directory with ranges, and below `/whole/` without; yields the URL.

    Args:
        root: The served directory.
        place: A directory for nginx's own files.
    """
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        pytest.skip("nginx is not installed")
    port = 20_000 + os.getpid() % 10_000
    (place / "nginx.conf").write_text(_NGINX.format(root=root, place=place, port=port))
    command = [program, "-c", str(place / "nginx.conf"), "-e", "stderr"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until(lambda: _answers(url), process)
            yield url
        finally:
            process.terminate()


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url).close()
    except urllib.error.HTTPError as error:
        error.close()
    except OSError:
        return False
    return True
