"""`diff` of what `convert` takes, and of the values of tensors."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from commands import output_of, result_of, run
from models import (
    NUMBERS,
    break_local_header,
    entry_of,
    flip_byte,
    mixed_model,
    model_of,
    raw_tensor,
    runnable_model,
)
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper
from written import contents, zipped

import onnxarchive
from onnxarchive import Entry, ValueChange, diff

Captured = pytest.CaptureFixture[str]


def flip_model(path: Path, entry: Entry) -> None:
    flip_byte(path, entry.data_offset)


def _single(model: onnx.ModelProto, folder: Path) -> Path:
    onnx.save(model, folder / "single.onnx")
    return folder / "single.onnx"


def _external(model: onnx.ModelProto, folder: Path) -> Path:
    onnxarchive.save(model, folder / "temporary.onnxa")
    path = folder / "external.onnx"
    onnxarchive.export(folder / "temporary.onnxa", path, external_data="external.data")
    return path


def _directory(model: onnx.ModelProto, folder: Path) -> Path:
    onnxarchive.save(model, folder / "unzipped.onnxa")
    onnxarchive.extract(folder / "unzipped.onnxa", folder / "unzipped")
    return folder / "unzipped"


def _zip(model: onnx.ModelProto, folder: Path) -> Path:
    return zipped(folder / "plain.zip", contents(_directory(model, folder)), zipfile.ZIP_DEFLATED)


SOURCES: list[Callable[[onnx.ModelProto, Path], Path]] = [_single, _external, _directory, _zip]


@pytest.mark.parametrize("make", SOURCES)
@pytest.mark.parametrize("full", [False, True])
def test_a_conversion_is_compared_with_its_source(
    tmp_path: Path, make: Callable[[onnx.ModelProto, Path], Path], full: bool
) -> None:
    source = make(mixed_model(), tmp_path)
    onnxarchive.convert(source, tmp_path / "converted.onnxa")
    assert diff(tmp_path / "converted.onnxa", source, full=full).is_same
    assert diff(source, tmp_path / "converted.onnxa", full=full).is_same
    with onnxarchive.edit(tmp_path / "converted.onnxa") as edit:
        edit.tensors["b"] = np.zeros_like(edit.tensors["b"])
    difference = diff(tmp_path / "converted.onnxa", source, full=full)
    assert [change.name for change in difference.sections["tensors"]] == ["b"]


def test_assets_are_compared_between_archives_alone(tmp_path: Path) -> None:
    source = _single(runnable_model(), tmp_path)
    path, other = tmp_path / "a.onnxa", tmp_path / "b.onnxa"
    onnxarchive.convert(source, path, assets={"labels.txt": b"cat"})
    difference = diff(path, source)
    assert difference.is_same
    assert "assets" not in difference.sections
    onnxarchive.convert(source, other)
    assert [change.name for change in diff(path, other).sections["assets"]] == ["labels.txt"]


def test_two_sources_are_compared_without_an_archive(tmp_path: Path) -> None:
    assert diff(_single(mixed_model(), tmp_path), _external(mixed_model(), tmp_path)).is_same


def test_a_model_that_a_source_lacks_is_refused(tmp_path: Path) -> None:
    source = _single(runnable_model(), tmp_path)
    onnxarchive.convert(source, tmp_path / "a.onnxa", models={"decoder": source})
    with pytest.raises(
        onnxarchive.ModelNotFoundError, match=r"single\.onnx: there is no model with the id"
    ):
        diff(tmp_path / "a.onnxa", source, model="decoder")


@pytest.mark.parametrize("damage", [flip_model, break_local_header])
def test_a_damaged_archive_is_refused_and_not_read_as_a_zip(
    path: Path, damage: Callable[[Path, Entry], None]
) -> None:
    onnxarchive.save(runnable_model(), path)
    good = path.read_bytes()
    damage(path, entry_of(path, "__MODEL_PROTO"))
    with pytest.raises(onnxarchive.ArchiveFormatError, match="entry '__MODEL_PROTO'"):
        diff(path, good)


def test_the_values_of_a_changed_tensor_are_compared(path: Path, tmp_path: Path) -> None:
    one = np.arange(1, 1_000_001, dtype=np.float32)
    other = one.copy()
    other[[0, 9, 999_999]] += [2, 5, 1]
    onnxarchive.save(model_of(numpy_helper.from_array(one, "w")), path)
    onnxarchive.save(model_of(numpy_helper.from_array(other, "w")), tmp_path / "other.onnxa")
    (change,) = diff(path, tmp_path / "other.onnxa", values=True).sections["tensors"]
    assert change.values == ValueChange(1_000_000, 3, 5.0, 2.0)
    (change,) = diff(path, tmp_path / "other.onnxa").sections["tensors"]
    assert change.values is None


def test_values_are_compared_across_types_and_not_across_shapes(path: Path, tmp_path: Path) -> None:
    half = np.linspace(-1, 1, 4000, dtype=np.float16)
    tensors: dict[str, NDArray[Any]] = {"a": half, "b": half.reshape(40, 100)}
    others: dict[str, NDArray[Any]] = {"a": half.astype(np.float32), "b": half.reshape(100, 40)}
    for values, target in ((tensors, path), (others, tmp_path / "other.onnxa")):
        named = [numpy_helper.from_array(array, name) for name, array in values.items()]
        onnxarchive.save(model_of(*named), target)
    a, b = diff(path, tmp_path / "other.onnxa", values=True).sections["tensors"]
    assert a.values == ValueChange(4000, 0, 0.0, 0.0)
    assert b.values is None


@pytest.mark.parametrize("name", sorted(NUMBERS))
def test_values_of_every_type_are_compared(path: Path, tmp_path: Path, name: str) -> None:
    zeros = raw_tensor("w", NUMBERS[name], (300_001,))
    zeros.raw_data = bytes(len(zeros.raw_data))
    other = TensorProto()
    other.CopyFrom(zeros)
    other.raw_data = b"\1" + other.raw_data[1:]
    onnxarchive.save(model_of(zeros), path)
    onnxarchive.save(model_of(other), tmp_path / "other.onnxa")
    (change,) = diff(path, tmp_path / "other.onnxa", values=True).sections["tensors"]
    assert change.values is not None
    assert (change.values.elements, change.values.different) == (300_001, 1)
    assert change.values.max_absolute > 0
    has_zero = name != "FLOAT8E8M0"
    assert change.values.max_relative == (math.inf if has_zero else 1)


def test_nan_and_zero_are_equal_to_themselves(path: Path, tmp_path: Path) -> None:
    one = np.array([np.nan, 0.0, np.inf, 1.0, 2.0], np.float32)
    other = np.array([np.nan, -0.0, np.inf, np.nan, 3.0], np.float32)
    onnxarchive.save(model_of(numpy_helper.from_array(one, "w")), path)
    onnxarchive.save(model_of(numpy_helper.from_array(other, "w")), tmp_path / "other.onnxa")
    (change,) = diff(path, tmp_path / "other.onnxa", values=True).sections["tensors"]
    assert change.values == ValueChange(5, 2, math.inf, math.inf)


def test_the_command_prints_how_far_values_differ(
    path: Path, tmp_path: Path, capsys: Captured
) -> None:
    one = np.array([1, 2, 4], np.float32)
    onnx.save(model_of(numpy_helper.from_array(one, "w")), tmp_path / "m.onnx")
    onnxarchive.convert(tmp_path / "m.onnx", path)
    printed = output_of(capsys, "diff", path, tmp_path / "m.onnx")
    assert printed.endswith(": the same model and tensors (weights compared by CRC-32)\n")
    with onnxarchive.edit(path) as edit:
        edit.tensors["w"] = np.array([1, 3, 0], np.float32)
    assert run("diff", "--values", tmp_path / "m.onnx", path) == 1
    assert "; 2 of 3 elements differ, by at most 4, relatively 1\n" in capsys.readouterr().out
    result = result_of(capsys, "diff", "--values", path, tmp_path / "m.onnx", status=1)
    (change,) = result["tensors"]
    expected = {"elements": 3, "different": 2, "max_absolute": 4.0, "max_relative": None}
    assert change["values"] == expected
    assert change["before_type"] == {"kind": "tensor", "data_type": "FLOAT", "dims": [3]}
