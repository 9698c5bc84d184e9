"""Sessions use weights in place: memory stays flat, and processes share the pages of a file."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from compared_sessions import needs_mapped_buffers, needs_packed_weights
from models import MEASURE_MEMORY, runnable_model
from pages import needs_smaps
from processes import mapped, started

import onnxarchive

MIB = 1 << 20
SIZE = 64 * MIB

pytestmark = needs_smaps

# Runs a model once, says how many bytes of anonymous memory that took, and waits for a line.
PROGRAM = """
import json, pathlib
import numpy as np, onnxruntime, onnxarchive

def session(source):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    prepack = {"prepack": True, "default": None}.get(sys.argv[3], False)
    made = onnxarchive.session(source, options, ["CPUExecutionProvider"], prepack=prepack)
    (value,) = [it for it in made.get_inputs()]
    (y,) = made.run(None, {"x": np.ones(value.shape, np.float32)})
    return made, float(y.sum())

def source(path):
    if sys.argv[3] == "bytes":
        return pathlib.Path(path).read_bytes()
    if sys.argv[3] == "unaligned":
        return memoryview(b"x" + pathlib.Path(path).read_bytes())[1:]
    if sys.argv[3] == "file":
        return open(path, "rb")
    return path

first = session(source(sys.argv[1]))  # what is there once
archive = source(sys.argv[2])
before = anonymous()
second = session(archive)
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


def running(
    archives: list[Path], how: str = "mapped"
) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    command = [sys.executable, "-c", MEASURE_MEMORY + PROGRAM, *archives, how]
    return started(command, stdin=subprocess.PIPE)


def told(process: subprocess.Popen[str]) -> dict[str, float]:
    assert process.stdout is not None
    result: dict[str, float] = json.loads(process.stdout.readline())
    return result


def test_processes_share_the_pages_of_the_weights(archives: list[Path]) -> None:
    with running(archives) as one:
        alone = told(one)
        sums = mapped(one.pid, archives[1])
        assert sums["Rss"] > 0.9 * SIZE, "the weights are mapped from the archive, and were read"
        assert sums["Anonymous"] == 0
        assert sums["Pss"] > 0.9 * sums["Rss"]
        with running(archives) as other:
            assert told(other)["y"] == alone["y"]
            for process in (one, other):
                sums = mapped(process.pid, archives[1])
                assert sums["Rss"] > 0.9 * SIZE
                assert 0.45 < sums["Pss"] / sums["Rss"] < 0.55


def taken(archives: list[Path], how: str) -> float:
    with running(archives, how) as process:
        return told(process)["anonymous"]


def test_anonymous_memory_stays_flat_without_prepacking(archives: list[Path]) -> None:
    assert taken(archives, "mapped") < 4 * MIB
    # With it a copy is made, as of any model: so this measures what it should.
    assert taken(archives, "prepack") > 0.9 * SIZE
    assert taken(archives, "default") > 0.9 * SIZE


@needs_mapped_buffers
def test_weights_in_memory_are_used_where_they_lie(archives: list[Path]) -> None:
    assert taken(archives, "bytes") < 4 * MIB
    assert taken(archives, "unaligned") > 0.9 * SIZE  # ONNX Runtime copies these
    assert 0.9 * SIZE < taken(archives, "file") < 1.5 * SIZE  # read once, and not copied


def test_the_pages_are_shared_with_views_of_the_archive(archives: list[Path]) -> None:
    with running(archives) as process, onnxarchive.open(archives[1]) as archive:
        told(process)
        assert archive.tensors["layer.0/weight"].sum() != 0
        sums = mapped(process.pid, archives[1])
        assert 0.45 < sums["Pss"] / sums["Rss"] < 0.55


@needs_packed_weights
def test_packed_weights_are_mapped(archives: list[Path], tmp_path: Path) -> None:
    packed = tmp_path / "packed.onnxa"
    shutil.copy(archives[1], packed)
    onnxarchive.prepack(packed)
    found = []
    for path in (archives[1], packed):
        with running([archives[0], path], "default") as process:
            found.append(told(process))
    assert found[0]["y"] == found[1]["y"]
    assert found[0]["anonymous"] > 0.9 * SIZE
    assert found[1]["anonymous"] < 0.35 * found[0]["anonymous"]
