"""The recipe that pushes an archive to a registry, against Debian's `docker-registry`."""

from __future__ import annotations

import base64
import datetime
import json
import os
import shutil
import socket
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import pytest
from commands import output_of
from models import text_model
from mounts import mounted
from onnx import numpy_helper
from pages import needs_smaps
from processes import completed, mapped, started, wait_until
from web_server import WebServer

import onnxarchive

pytestmark = pytest.mark.tool

pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
RECIPE = Path(__file__).resolve().parents[3] / "tools" / "recipes" / "registry.py"
SIDE = 1024  # rows and columns of the weight
WEIGHT = np.random.default_rng(1).standard_normal((SIDE, SIDE), np.float32)
NAME = "team/model"


def save_model(path: Path) -> None:
    text = f"linear (float[n, {SIDE}] x) => (float[n, {SIDE}] y) {{ y = MatMul(x, w) }}"
    onnxarchive.save(text_model(text, numpy_helper.from_array(WEIGHT, "w")), path)


class TokenService:
    """Signs tokens for a registry that trusts its certificate."""

    def __init__(self, certificate: Path) -> None:
        x509 = pytest.importorskip("cryptography.x509", reason="cryptography is not installed")
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import Encoding

        self._key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tokens")])
        years = datetime.datetime(2020, 1, 1), datetime.datetime(2100, 1, 1)
        builder = x509.CertificateBuilder(name, name, self._key.public_key(), 1, *years, [])
        signed = builder.sign(self._key, hashes.SHA256())
        certificate.write_bytes(signed.public_bytes(Encoding.PEM))
        self._certificate = base64.b64encode(signed.public_bytes(Encoding.DER)).decode()

    def token(self, *actions: str) -> str:
        """A token (JWT) for these actions in one repository, for an hour."""
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec, utils

        now = int(time.time())
        head = {"typ": "JWT", "alg": "ES256", "x5c": [self._certificate]}
        access = [{"type": "repository", "name": NAME, "actions": actions}]
        claims = {"iss": "tokens", "aud": "registry", "access": access, "exp": now + 3600}
        text = ".".join(_base64(json.dumps(part).encode()) for part in (head, claims))
        signature = self._key.sign(text.encode(), ec.ECDSA(hashes.SHA256()))
        numbers = [it.to_bytes(32, "big") for it in utils.decode_dss_signature(signature)]
        return f"{text}.{_base64(b''.join(numbers))}"


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


@contextmanager
def registry(folder: Path, **storage: Any) -> Iterator[str]:
    """Runs a registry that demands a token and keeps its files in a folder; yields its host."""
    program = shutil.which("docker-registry")
    if program is None:
        pytest.skip("docker-registry is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{free.getsockname()[1]}"
    token = {"realm": "http://127.0.0.1:1/", "service": "registry", "issuer": "tokens"}
    token["rootcertbundle"] = str(folder / "certificate.pem")
    configuration = {
        "version": "0.1",
        "log": {"level": "error", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(folder / "files")}},
        "http": {"addr": host, "secret": "for uploads"},
        "auth": {"token": token},
        **storage,
    }
    path = folder / "configuration.yml"
    path.write_text(json.dumps(configuration))  # JSON is YAML
    with started([program, "serve", path]) as process:

        def is_listening() -> bool:
            with socket.socket() as client:
                return client.connect_ex(("127.0.0.1", int(host.rpartition(":")[2]))) == 0

        wait_until(is_listening, process)
        yield host


def options(token: str) -> dict[str, Any]:
    return {"default_headers": {"authorization": f"Bearer {token}"}}


def test_an_archive_is_a_layer_of_a_registry_and_is_used_from_there(
    path: Path, tmp_path: Path, web: WebServer, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("oras", reason="oras is not installed")
    save_model(path)
    tokens = TokenService(tmp_path / "certificate.pem")
    with registry(tmp_path) as host:
        environment = {"REGISTRY_TOKEN": tokens.token("pull", "push"), "HOME": str(tmp_path)}
        environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")
        command = [sys.executable, RECIPE, path, f"{host}/{NAME}:1.0"]
        url, *lines = completed(
            command, status=0, env={**os.environ, **environment}
        ).stdout.splitlines()
        assert lines[-1] == "outputs: y"

        access = options(tokens.token("pull"))
        for wrong in (None, options(tokens.token("push"))):
            with pytest.raises(PermissionError, match="HTTP status 401"):
                onnxarchive.open(url, storage_options=wrong)
        with onnxarchive.open(url, storage_options=access) as archive:
            part = archive.get_slice("w")
            assert part.shape == WEIGHT.shape
            assert np.array_equal(part[5:9, ::2], WEIGHT[5:9, ::2])
        headers = f"default_headers={json.dumps(access['default_headers'])}"
        outputs = {
            command: output_of(capsys, *command.split(), url, "--storage-option", headers)
            for command in ("ls", "info", "run", "check --full")
        }
        assert f"[{SIDE}, {SIDE}]" in outputs["ls"]
        assert f"{WEIGHT.nbytes:,} bytes" in outputs["info"]
        assert "CPUExecutionProvider" in outputs["run"]
        assert ": valid (" in outputs["check --full"]
        x = np.ones((1, SIDE), np.float32)
        session = onnxarchive.session(url, cache=tmp_path / "own", storage_options=access)
        np.testing.assert_allclose(session.run(None, {"x": x})[0], x @ WEIGHT, atol=1e-3)

    # A hosted registry: it redirects to a store, which serves the same files.
    web.folder = tmp_path / "files"
    store = {"name": "redirect", "options": {"baseurl": web.url("/")}}
    with registry(tmp_path, middleware={"storage": [store]}) as host:
        url = f"http://{host}/v2/{url.partition('/v2/')[2]}"
        with pytest.raises(OSError, match=f"redirects to '{web.url('')}'.*allow_redirects"):
            onnxarchive.open(url, storage_options=access)
        assert not web.requests
        access["default_headers"]["x-other"] = "goes along"
        with onnxarchive.open(url, storage_options={**access, "allow_redirects": True}) as archive:
            assert np.array_equal(archive.get_slice("w")[5:9], WEIGHT[5:9])
        assert all("authorization" not in request.headers for request in web.requests)
        assert {request.headers["x-other"] for request in web.requests} == {"goes along"}
        assert {request.headers["referer"] for request in web.requests} == {url}


RUN = """
import sys, onnxarchive
session = onnxarchive.session(sys.argv[1], prepack=False)
session.run(None, {"x": [[1.0] * int(sys.argv[2])]})
print("has run", flush=True)
sys.stdin.read()
"""


@needs_smaps
def test_processes_share_the_file_of_an_image_that_is_mounted(tmp_path: Path) -> None:
    for name in ("layer", "below", "volume"):
        (tmp_path / name).mkdir()
    save_model(tmp_path / "model.onnxa")
    with tarfile.open(tmp_path / "layer.tar", "w") as layer:
        layer.add(tmp_path / "model.onnxa", "model.onnxa")
    with tarfile.open(tmp_path / "layer.tar") as layer:
        layer.extractall(tmp_path / "layer", filter="data")
    # What runs containers mounts unpacked layers like this.
    below = f"ro,lowerdir={tmp_path / 'layer'}:{tmp_path / 'below'}"
    with mounted("overlay", tmp_path / "volume", below, "-t", "overlay"):
        path = tmp_path / "volume" / "model.onnxa"
        command = [sys.executable, "-c", RUN, path, SIDE]
        with started(command, stdin=PIPE) as first, started(command, stdin=PIPE) as second:
            for process in (first, second):
                assert process.stdout is not None
                assert process.stdout.readline() == "has run\n"
            for process in (first, second):
                sums = mapped(process.pid, path)
                assert sums["Anonymous"] == 0
                assert sums["Rss"] > 0.9 * WEIGHT.nbytes
                assert 0.4 < sums["Pss"] / sums["Rss"] < 0.6
