"""Many small tensors: they are read together, and take little memory."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import pytest
from models import MEASURE_MEMORY, model_of, run_python
from versions import needs_compiled_parser
from written import write_parts

import onnxarchive


def test_external_tensors_are_read_together(tmp_path: Path) -> None:
    data = bytes(range(256)) * 40
    source, _ = write_parts(tmp_path, 16, 640, data)
    onnxarchive.convert(source, tmp_path / "m.onnxa", size_threshold=0)
    with onnxarchive.open(tmp_path / "m.onnxa") as archive:
        assert len(archive.tensors) == 640
        for index in range(640):
            found = archive.tensors[f"w{index}"].tobytes()
            assert found == data[index * 16 : index * 16 + 16]


def test_external_tensors_that_go_into_the_model_are_read_together(tmp_path: Path) -> None:
    size, count = 100_000, 25
    data = bytes(range(250)) * (size * count // 250)
    source, _ = write_parts(tmp_path, size, count, data)
    with patch.object(os, "pread", side_effect=os.pread) as read:
        onnxarchive.convert(source, tmp_path / "m.onnxa", size_threshold=size + 1)
    assert [call.args[1] for call in read.mock_calls if call.args[1] >= size] == [size * count]
    for index, tensor in enumerate(onnxarchive.load(tmp_path / "m.onnxa").graph.initializer):
        assert tensor.raw_data == data[index * size : (index + 1) * size]


@pytest.mark.parametrize(
    ("function", "load", "most"), [("save", "onnx.load", 1024), ("convert", "str", 1536)]
)
@needs_compiled_parser
def test_a_call_takes_little_memory_for_each_tensor(
    tmp_path: Path, function: str, load: str, most: int
) -> None:
    count = 20_000
    source, _ = write_parts(tmp_path, 64, count)
    (tmp_path / "empty.onnx").write_bytes(model_of().SerializeToString())
    code = f"""
{MEASURE_MEMORY}
import onnx, onnxarchive
*paths, target = sys.argv[1:]
source, empty = map({load}, paths)
onnxarchive.{function}(empty, target)
print(growth(lambda: onnxarchive.{function}(source, target, size_threshold=0)))
"""
    growth = run_python(code, source, tmp_path / "empty.onnx", tmp_path / "m.onnxa")
    assert int(growth) < most * count
