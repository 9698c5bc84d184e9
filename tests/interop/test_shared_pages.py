"""Sessions map the weights: memory stays flat, and processes share the pages."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from models import runnable_model

import onnxarchive

pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")

MIB = 1 << 20
SIZE = 64 * MIB

pytestmark = pytest.mark.skipif(
    not os.path.exists("/proc/self/smaps"), reason="/proc/PID/smaps says how much is shared"
)

# Runs a model once, says how many bytes of anonymous memory that took, and waits for a line.
PROGRAM = """
import json, sys
import numpy as np, onnxruntime, onnxarchive

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))

def session(path):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.disable_prepacking", sys.argv[3])
    made = onnxarchive.session(path, options, ["CPUExecutionProvider"])
    (value,) = [it for it in made.get_inputs()]
    (y,) = made.run(None, {"x": np.ones(value.shape, np.float32)})
    return made, float(y[0, 0])

first = session(sys.argv[1])  # what is there once
before = anonymous()
second = session(sys.argv[2])
print(json.dumps({"anonymous": anonymous() - before, "y": second[1]}), flush=True)
sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    folder = tmp_path_factory.mktemp("shared")
    paths = [folder / "small.onnxa", folder / "large.onnxa"]
    onnxarchive.save(runnable_model(), paths[0])
    onnxarchive.save(runnable_model(SIZE), paths[1])
    yield paths
    for path in paths:
        path.unlink()


@contextlib.contextmanager
def running(archives: list[Path], disable_prepacking: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROGRAM, *map(str, archives), disable_prepacking]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def told(process: subprocess.Popen[str]) -> dict[str, float]:
    assert process.stdout is not None
    result: dict[str, float] = json.loads(process.stdout.readline())
    return result


def mapped(process: subprocess.Popen[str], path: Path) -> dict[str, int]:
    """Bytes of a process's maps of a file, as /proc/PID/smaps has them, in sum."""
    sums: dict[str, int] = {}
    is_of_file = False
    with open(f"/proc/{process.pid}/smaps") as file:
        for line in file:
            first, *rest = line.split()
            if not first.endswith(":"):
                is_of_file = line.rstrip().endswith(os.path.realpath(path))
            elif is_of_file and rest[-1] == "kB":
                sums[first[:-1]] = sums.get(first[:-1], 0) + (int(rest[0]) << 10)
    return sums


def test_processes_share_the_pages_of_the_weights(archives: list[Path]) -> None:
    with running(archives, "1") as one:
        alone = told(one)
        sums = mapped(one, archives[1])
        assert sums["Rss"] > 0.9 * SIZE, "the weights are mapped from the archive, and were read"
        assert sums["Anonymous"] == 0
        assert sums["Pss"] > 0.9 * sums["Rss"]
        with running(archives, "1") as other:
            assert told(other)["y"] == alone["y"]
            for process in (one, other):
                sums = mapped(process, archives[1])
                print(f"Rss {sums['Rss'] / MIB:.1f} MiB, Pss {sums['Pss'] / MIB:.1f} MiB")  # noqa: T201
                assert sums["Rss"] > 0.9 * SIZE
                assert 0.45 < sums["Pss"] / sums["Rss"] < 0.55


def test_anonymous_memory_stays_flat_without_prepacking(archives: list[Path]) -> None:
    taken = {}
    for disable_prepacking in ("1", "0"):
        with running(archives, disable_prepacking) as process:
            taken[disable_prepacking] = told(process)["anonymous"]
    print({key: f"{value / MIB:.1f} MiB" for key, value in taken.items()})  # noqa: T201
    assert taken["1"] < 4 * MIB
    # With it a copy is made, as of any model: so this measures what it should.
    assert taken["0"] > 0.9 * SIZE


def test_the_pages_are_shared_with_views_of_the_archive(archives: list[Path]) -> None:
    with running(archives, "1") as process, onnxarchive.open(archives[1]) as archive:
        told(process)
        assert archive.tensors["layer.0/weight"].sum() != 0
        sums = mapped(process, archives[1])
        assert 0.45 < sums["Pss"] / sums["Rss"] < 0.55
