"""Archives of more than 2 and 4 GiB: sessions, links, and onnx's functions, in little memory.

onnx's functions run in a process each that says how much anonymous memory it took.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from compared_sessions import needs_mapped_buffers, ort
from models import MEASURE_MEMORY, run_python, text_model
from onnx import TensorProto
from pages import needs_smaps
from sparse_files import GIB, convert_sparsely, external, write_data
from written import write_model

import onnxarchive

pytestmark = [pytest.mark.large, needs_smaps]

MIB = 1 << 20
ROWS = 5 * GIB // (4 * 1024)
# Elements of the weight that are not 0, by row and column: first, behind 2 and 4 GiB, last.
MARKS = {(0, 0): 1.0, (600_000, 7): 2.0, (1_100_000, 1023): 3.0, (ROWS - 1, 1023): 4.0}
BIAS = np.arange(1024, dtype=np.float32)
HALF_ROWS = 300_000  # 1.1 GiB


def _archive(folder: Path, name: str, text: str, *tensors: TensorProto) -> Path:
    """Converts a model with external tensors to an archive whose zeros take no disk."""
    path = folder / f"{name}.onnxa"
    convert_sparsely(write_model(path.with_suffix(".onnx"), text_model(text, *tensors)), path)
    return path


@pytest.fixture(scope="module")
def of_5_gib(large_folder: Path) -> Path:
    """An archive of 5 GiB: y = w[i] + b, the bias behind the weight."""
    size = ROWS * 4096
    marks = {row * 4096 + column * 4: struct.pack("<f", it) for (row, column), it in MARKS.items()}
    write_data(large_folder / "data", size + BIAS.nbytes, {**marks, size: BIAS.tobytes()})
    path = _archive(
        large_folder,
        "sum",
        "g (int64[n] i) => (float[n, 1024] y) { row = Gather(w, i) y = Add(row, b) }",
        external("w", TensorProto.FLOAT, [ROWS, 1024], "data", 0),
        external("b", TensorProto.FLOAT, [1024], "data", size),
    )
    assert path.stat().st_size > 5 * GIB
    return path


# Sessions and links


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


@pytest.mark.parametrize("is_in_memory", [False, pytest.param(True, marks=needs_mapped_buffers)])
def test_a_session_of_5_gib_runs_in_a_few_mib(of_5_gib: Path, is_in_memory: bool) -> None:
    source: Any = of_5_gib
    if is_in_memory:
        with of_5_gib.open("rb") as file:
            source = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    before = _anonymous()
    session = onnxarchive.session(source, providers=["CPUExecutionProvider"], prepack=False)
    _require_rows(session)
    taken = _anonymous() - before
    assert taken < 40 * MIB


def test_a_link_to_5_gib_is_read(of_5_gib: Path) -> None:
    link = of_5_gib.with_name("link.onnx")
    onnxarchive.link(of_5_gib, link)
    assert link.stat().st_size < 10_000
    assert onnxarchive.check_link(link) == []
    onnx.checker.check_model(os.fspath(link), full_check=True)
    options = ort.SessionOptions()
    options.add_session_config_entry("session.disable_prepacking", "1")
    _require_rows(ort.InferenceSession(os.fspath(link), options, ["CPUExecutionProvider"]))


# onnx's functions


@pytest.fixture(scope="module")
def of_2_gib(large_folder: Path) -> Path:
    """An archive of two tensors of 1.1 GiB, each with a last element of 7."""
    size, last = HALF_ROWS * 4096, struct.pack("<f", 7.0)
    write_data(large_folder / "pair", 2 * size, {size - 4: last, 2 * size - 4: last})
    path = _archive(
        large_folder,
        "rows",
        """g (int64[3] i) => (float[3, 1024] y) {
  row0 = Gather(w0, i)
  same = Identity(row0)
  row1 = Gather(w1, i)
  y = Add(same, row1)
}""",
        *(
            external(f"w{i}", TensorProto.FLOAT, [HALF_ROWS, 1024], "pair", i * size)
            for i in (0, 1)
        ),
    )
    assert path.stat().st_size > 2 * GIB
    return path


def _growth(call: str, *paths: Path) -> int:
    code = f"""
{MEASURE_MEMORY}
import onnx
from onnxarchive import check_model, infer_shapes, transform
to_22 = lambda model: onnx.version_converter.convert_version(model, 22)
print(growth(lambda: {call}))
"""
    return int(run_python(code, *paths))


@pytest.mark.parametrize(
    "call",
    ["check_model(sys.argv[1], full_check=True)", "infer_shapes(sys.argv[1], strict_mode=True)"],
)
def test_more_than_2_gib_are_checked_and_their_shapes_inferred(of_2_gib: Path, call: str) -> None:
    before = sorted(os.listdir(of_2_gib.parent))
    assert _growth(call, of_2_gib) < 40 * MIB
    assert sorted(os.listdir(of_2_gib.parent)) == before


@pytest.mark.parametrize(
    ("call", "shapes"),
    [
        ("infer_shapes(*sys.argv[1:])", ["row0", "same", "row1"]),
        ("transform(*sys.argv[1:], to_22, weights='hidden')", []),
    ],
)
def test_more_than_2_gib_are_written_by_a_function(
    of_2_gib: Path, tmp_path: Path, call: str, shapes: list[str]
) -> None:
    path = tmp_path / "written.onnxa"
    try:
        assert _growth(call, of_2_gib, path) < 60 * MIB
        with onnxarchive.open(path) as opened:
            for weight in opened.tensors.values():
                assert weight.shape == (HALF_ROWS, 1024)
                assert (weight[0, 0], weight[-1, -2], weight[-1, -1]) == (0, 0, 7)
            assert list(opened.tensors) == ["w0", "w1"]
            assert [value.name for value in opened.model.graph.value_info][: len(shapes)] == shapes
    finally:
        path.unlink(missing_ok=True)
