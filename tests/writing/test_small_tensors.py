"""Many small tensors: they are read together, and take little memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from models import MEASURE_MEMORY, external, model_of, raw_tensor, run_python
from onnx import TensorProto

import onnxarchive
from onnxarchive import ArchiveFormatError
from onnxarchive.files import file_data


def test_external_tensors_are_read_together(tmp_path: Path) -> None:
    data = bytes(range(256)) * 40
    (tmp_path / "w.bin").write_bytes(data)
    model = model_of(
        *(
            external(raw_tensor(f"w{index}", 1, (4,)), "w.bin", offset=index * 16, length=16)
            for index in range(600)
        )
    )
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    onnxarchive.convert(tmp_path / "m.onnx", tmp_path / "m.onnxa", size_threshold=0)
    with onnxarchive.open(tmp_path / "m.onnxa") as archive:
        for index in range(600):
            found = archive.tensors[f"w{index}"].tobytes()
            assert found == data[index * 16 : index * 16 + 16]


def test_external_tensors_that_go_into_the_model_are_read_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, count = 100_000, 25
    data = bytes(range(250)) * (size * count // 250)
    (tmp_path / "w.bin").write_bytes(data)
    weights = [raw_tensor(f"w{index}", TensorProto.UINT8, (size,)) for index in range(count)]
    model = model_of(
        *(
            external(weight, "w.bin", offset=index * size, length=size)
            for index, weight in enumerate(weights)
        )
    )
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    opened: list[str] = []
    open_file = file_data._open_file

    def noted(path: str, *args: Any) -> Any:
        opened.append(path)
        return open_file(path, *args)

    monkeypatch.setattr(file_data, "_open_file", noted)
    onnxarchive.convert(tmp_path / "m.onnx", tmp_path / "m.onnxa", size_threshold=size + 1)
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


def test_a_save_takes_little_memory_for_each_tensor(tmp_path: Path) -> None:
    source, count = tmp_path / "model.onnx", 20_000
    data = bytes(64)
    model = model_of(
        *(
            TensorProto(name=f"layer.{index}.weight", data_type=1, dims=[16], raw_data=data)
            for index in range(count)
        )
    )
    source.write_bytes(model.SerializeToString())
    code = f"""
{MEASURE_MEMORY}
import onnx, onnxarchive
onnxarchive.save(onnx.ModelProto(ir_version=10, graph=onnx.GraphProto(name="g")), sys.argv[2])
model = onnx.load(sys.argv[1])
print(growth(lambda: onnxarchive.save(model, sys.argv[2], size_threshold=0)))
"""
    assert int(run_python(code, source, tmp_path / "model.onnxa")) < 1024 * count


def test_a_convert_takes_little_memory_for_each_tensor(tmp_path: Path) -> None:
    count, nbytes = 20_000, 64
    (tmp_path / "w.bin").write_bytes(bytes(count * nbytes))
    outside = [
        external(
            raw_tensor(f"layer.{index}.weight", 1, (16,)),
            "w.bin",
            offset=index * nbytes,
            length=nbytes,
        )
        for index in range(count)
    ]
    (tmp_path / "m.onnx").write_bytes(model_of(*outside).SerializeToString())
    code = f"""
{MEASURE_MEMORY}
import onnx, onnxarchive
directory = sys.argv[1]
empty = onnx.ModelProto(ir_version=10, graph=onnx.GraphProto(name="g"))
open(directory + "/empty.onnx", "wb").write(empty.SerializeToString())
onnxarchive.convert(directory + "/empty.onnx", directory + "/empty")
source, target = directory + "/m.onnx", directory + "/m.onnxa"
print(growth(lambda: onnxarchive.convert(source, target, size_threshold=0)))
"""
    assert int(run_python(code, tmp_path)) < 1536 * count
