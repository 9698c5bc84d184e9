"""ONNX Runtime sessions and links of archives of more than 4 GiB."""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from sparse_files import GIB, convert_sparsely, external, write_data

import onnxarchive

pytestmark = pytest.mark.large

ort = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")

ROWS = 5 * GIB // (4 * 1024)
# Elements of the weight that are not 0, by row and column: first, behind 2 and 4 GiB, last.
MARKS = {(0, 0): 1.0, (600_000, 7): 2.0, (1_100_000, 1023): 3.0, (ROWS - 1, 1023): 4.0}
BIAS = np.arange(1024, dtype=np.float32)


@pytest.fixture(scope="module")
def archive(large_folder: Path) -> Path:
    """An archive of 5 GiB that takes no disk: y = w[i] + b, the bias behind the weight."""
    size = ROWS * 4096
    marks = {row * 4096 + column * 4: struct.pack("<f", it) for (row, column), it in MARKS.items()}
    write_data(large_folder / "data", size + BIAS.nbytes, {**marks, size: BIAS.tobytes()})
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["w", "i"], ["row"]),
            helper.make_node("Add", ["row", "b"], ["y"]),
        ],
        "graph",
        [helper.make_tensor_value_info("i", TensorProto.INT64, [None])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, 1024])],
        [
            external("w", TensorProto.FLOAT, [ROWS, 1024], "data", 0),
            external("b", TensorProto.FLOAT, [1024], "data", size),
        ],
    )
    opset = helper.make_opsetid("", 21)
    model = helper.make_model(graph, opset_imports=[opset], ir_version=10)
    (large_folder / "model.onnx").write_bytes(model.SerializeToString())
    path = large_folder / "model.onnxa"
    convert_sparsely(large_folder / "model.onnx", path)
    return path


def _require_rows(session: Any) -> None:
    rows = [row for row, _ in MARKS]
    (y,) = session.run(None, {"i": np.array(rows)})
    expected = np.tile(BIAS, (len(rows), 1))
    for line, ((_, column), mark) in zip(expected, MARKS.items(), strict=True):
        line[column] += mark
    np.testing.assert_array_equal(y, expected)


def _anonymous() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="/proc says what is resident")
@pytest.mark.parametrize("is_in_memory", [False, True])
def test_a_session_of_5_gib_runs_in_a_few_mib(archive: Path, is_in_memory: bool) -> None:
    assert archive.stat().st_size > 5 * GIB
    if is_in_memory and tuple(map(int, ort.__version__.split(".")[:2])) < (1, 31):
        pytest.skip("this ONNX Runtime copies buffers of external data")
    source: Any = archive
    if is_in_memory:
        with archive.open("rb") as file:
            source = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    before = _anonymous()
    session = onnxarchive.session(source, providers=["CPUExecutionProvider"], prepack=False)
    _require_rows(session)
    taken = _anonymous() - before
    print(f"{taken / (1 << 20):.1f} MiB")  # noqa: T201
    assert taken < 40 << 20


def test_a_link_to_5_gib_is_read(archive: Path) -> None:
    link = archive.with_name("link.onnx")
    onnxarchive.link(archive, link)
    assert link.stat().st_size < 10_000
    assert onnxarchive.check_link(link) == []
    onnx.checker.check_model(os.fspath(link), full_check=True)
    options = ort.SessionOptions()
    options.add_session_config_entry("session.disable_prepacking", "1")
    _require_rows(ort.InferenceSession(os.fspath(link), options, ["CPUExecutionProvider"]))
