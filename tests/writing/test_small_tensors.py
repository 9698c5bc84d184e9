"""Many small tensors: they are read together, and take little memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from models import MEASURE_MEMORY, model_of, run_python
from written import write_parts

import onnxarchive
from onnxarchive import ArchiveFormatError
from onnxarchive.files import file_data


def test_external_tensors_are_read_together(tmp_path: Path) -> None:
    data = bytes(range(256)) * 40
    source, _ = write_parts(tmp_path, 16, 640, data)
    onnxarchive.convert(source, tmp_path / "m.onnxa", size_threshold=0)
    with onnxarchive.open(tmp_path / "m.onnxa") as archive:
        assert len(archive.tensors) == 640
        for index in range(640):
            found = archive.tensors[f"w{index}"].tobytes()
            assert found == data[index * 16 : index * 16 + 16]


def test_external_tensors_that_go_into_the_model_are_read_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, count = 100_000, 25
    data = bytes(range(250)) * (size * count // 250)
    source, _ = write_parts(tmp_path, size, count, data)
    opened: list[str] = []
    open_file = file_data._open_file

    def noted(path: str, *args: Any) -> Any:
        opened.append(path)
        return open_file(path, *args)

    monkeypatch.setattr(file_data, "_open_file", noted)
    onnxarchive.convert(source, tmp_path / "m.onnxa", size_threshold=size + 1)
    assert 0 < sum(path.endswith("w.bin") for path in opened) < count // 2
    for index, tensor in enumerate(onnxarchive.load(tmp_path / "m.onnxa").graph.initializer):
        assert tensor.raw_data == data[index * size : (index + 1) * size]


def test_parts_of_files_are_read_together_and_alone(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_bytes(bytes(range(200)))
    second.write_bytes(bytes(range(100)) + bytes(1 << 20) + b"end")
    whole = file_data.FileData.of(first), file_data.FileData.of(second)
    parts = [
        *(whole[0].part(start, 10) for start in (50, 0, 100, 60)),
        *(whole[1].part(start, 3) for start in (1 << 20, 0, (1 << 20) + 100)),
        whole[0].part(7, 0),
    ]
    assert file_data.read_all(parts) == [part.read() for part in parts]


def test_a_part_that_was_cut_off_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(100))
    parts = [file_data.FileData.of(path).part(start, 10) for start in (0, 50, 90)]
    path.write_bytes(bytes(95))
    with pytest.raises(ArchiveFormatError, match="expected 10 bytes at offset 90"):
        file_data.read_all(parts)


@pytest.mark.parametrize(
    ("function", "load", "most"), [("save", "onnx.load", 1024), ("convert", "str", 1536)]
)
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
