"""`onnx.checker`, `onnx.shape_inference` and functions on a model of more than 2 GiB.

Each runs in a process of its own that says how much anonymous memory it took.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from models import MEASURE_MEMORY, run_python
from onnx import TensorProto, helper
from sparse_files import GIB, convert_sparsely, external, write_data

import onnxarchive

MIB = 1 << 20
ROWS = 300_000  # of 1024 floats: 1.1 GiB
SIZE = ROWS * 4096
LAST = struct.pack("<f", 7.0)

pytestmark = [
    pytest.mark.large,
    pytest.mark.skipif(
        not os.path.exists("/proc/self/status"),
        reason="/proc/self/status says how much is allocated",
    ),
]


@pytest.fixture(scope="module")
def archive(large_folder: Path) -> Path:
    """An archive of two tensors of 1.1 GiB that takes no disk; nodes that do nothing follow."""
    write_data(large_folder / "data", 2 * SIZE, {SIZE - 4: LAST, 2 * SIZE - 4: LAST})
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["w0", "i"], ["row0"]),
            helper.make_node("Identity", ["row0"], ["same"]),
            helper.make_node("Gather", ["w1", "i"], ["row1"]),
            helper.make_node("Add", ["same", "row1"], ["y"]),
        ],
        "graph",
        [helper.make_tensor_value_info("i", TensorProto.INT64, [3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 1024])],
        [
            external(f"w{index}", TensorProto.FLOAT, [ROWS, 1024], "data", index * SIZE)
            for index in range(2)
        ],
    )
    opset = helper.make_opsetid("", 21)
    model = helper.make_model(graph, opset_imports=[opset], ir_version=10)
    (large_folder / "model.onnx").write_bytes(model.SerializeToString())
    path = large_folder / "model.onnxa"
    convert_sparsely(large_folder / "model.onnx", path)
    assert path.stat().st_size > 2 * GIB
    return path


def _growth(call: str, *paths: Path) -> int:
    code = f"""
{MEASURE_MEMORY}
import time
import onnx, onnxarchive
from onnxarchive.interop.onnx_functions import check_model, infer_shapes
from onnxarchive.interop.transforming import transform
begin = time.perf_counter()
taken = growth(lambda: {call})
print(f"{{time.perf_counter() - begin:.2f}} {{taken}}")
"""
    seconds, taken = run_python(code, *paths).split()
    print(f"{call}: {seconds} s, {int(taken) / MIB:.1f} MiB")  # noqa: T201
    return int(taken)


def test_more_than_2_gib_are_checked(archive: Path) -> None:
    before = sorted(os.listdir(archive.parent))
    assert _growth("check_model(sys.argv[1], full_check=True)", archive) < 40 * MIB
    assert sorted(os.listdir(archive.parent)) == before


def test_shapes_of_more_than_2_gib_are_inferred(archive: Path) -> None:
    assert _growth("infer_shapes(sys.argv[1], strict_mode=True)", archive) < 40 * MIB


def _require_the_weights(path: Path) -> None:
    with onnxarchive.open(path) as opened:
        for index in range(2):
            weight = opened.tensors[f"w{index}"]
            assert weight.shape == (ROWS, 1024)
            assert (weight[0, 0], weight[-1, -2], weight[-1, -1]) == (0, 0, 7)


def test_shapes_of_more_than_2_gib_are_written(archive: Path, path: Path) -> None:
    try:
        assert _growth("infer_shapes(sys.argv[1], sys.argv[2])", archive, path) < 60 * MIB
        _require_the_weights(path)
        with onnxarchive.open(path) as opened:
            names = [value.name for value in opened.model.graph.value_info]
        assert names == ["row0", "same", "row1"]
    finally:
        path.unlink(missing_ok=True)


def test_a_function_works_on_more_than_2_gib(archive: Path, path: Path) -> None:
    call = "transform(*sys.argv[1:], lambda it: onnx.version_converter.convert_version(it, 22))"
    try:
        assert _growth(call, archive, path) < 60 * MIB
        _require_the_weights(path)
    finally:
        path.unlink(missing_ok=True)
