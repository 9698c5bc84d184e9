"""The recipe that serves a model with four workers."""

from __future__ import annotations

import json
import os
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from subprocess import Popen
from typing import Any

import numpy as np
import pytest
from models import text_model
from onnx import numpy_helper
from pages import needs_smaps
from processes import mapped, started, wait_until

import onnxarchive

pytestmark = [pytest.mark.tool, needs_smaps]

RECIPES = Path(__file__).resolve().parents[3] / "tools" / "recipes"
WORKERS = 4
SIDE = 4096  # rows and columns of the weight
SIZE = SIDE * SIDE * 4  # its bytes
X = np.ones((1, SIDE), np.float32)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "m.onnxa"
    weight = np.random.default_rng(1).standard_normal((SIDE, SIDE), np.float32)
    text = f"served (float[n, {SIDE}] x) => (float[n, {SIDE}] y) {{ y = MatMul(x, w) }}"
    onnxarchive.save(text_model(text, numpy_helper.from_array(weight, "w")), path)
    return path


@pytest.fixture
def server(archive: Path) -> Iterator[tuple[str, Popen[str]]]:
    """The address of a running server, and its process."""
    for library in ("onnxruntime", "starlette", "uvicorn"):
        pytest.importorskip(library, reason=f"{library} is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "serve:app", "--app-dir", RECIPES, "--port", port]
    environment = {**os.environ, "MODEL": str(archive)}
    with started([*command, "--workers", WORKERS], env=environment) as process:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: is_listening(port), process)
        yield url, process


def is_listening(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def ask(url: str, inputs: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(inputs).encode())
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def workers(process: Popen[str]) -> list[int]:
    """The processes that a server has started and that made a session."""
    found = []
    for number in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        name = Path(f"/proc/{number}/cmdline").read_text()
        if "spawn_main" in name:
            found.append(int(number))
    return found


def test_four_workers_share_the_pages_of_the_weights(
    server: tuple[str, Popen[str]], archive: Path
) -> None:
    url, process = server
    with onnxarchive.open(archive) as opened:
        expected = (X @ opened.tensors["w"])[0]

    def all_have_answered() -> bool:
        with ThreadPoolExecutor(2 * WORKERS) as executor:
            for answer in executor.map(partial(ask, url), [{"x": X.tolist()}] * 4 * WORKERS):
                np.testing.assert_allclose(answer["y"][0], expected, rtol=1e-3, atol=1e-3)
        resident = [mapped(it, archive).get("Rss", 0) for it in workers(process)]
        return len(resident) == WORKERS and min(resident) > 0.9 * SIZE

    wait_until(all_have_answered, process)
    for worker in workers(process):
        sums = mapped(worker, archive)
        assert sums["Anonymous"] == 0
        assert 0.2 < sums["Pss"] / sums["Rss"] < 0.3


def test_a_wrong_request_is_answered_with_the_reason(server: tuple[str, Popen[str]]) -> None:
    url, _ = server
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(url, {"z": [[1]]})
    with caught.value as answer:
        assert answer.code == 400
        assert "Required inputs (['x']) are missing" in json.load(answer)["error"]
