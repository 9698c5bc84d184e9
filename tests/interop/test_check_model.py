"""`onnx.checker` on archives, whose directory is not touched."""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from models import (
    attribute,
    entry_of,
    flip_byte,
    keys_of,
    model_of,
    raw_tensor,
    runnable_model,
    text_model,
)
from onnx import helper, numpy_helper

import onnxarchive
from onnxarchive import ArchiveFormatError, ChecksumError, Finding, UnsupportedFeatureError
from onnxarchive.interop.onnx_functions import check_model
from onnxarchive.model import model_proto


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The system's directory of temporary files, for a test alone; nothing is left in it."""
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    yield
    assert os.listdir(path) == []


def _fault(findings: list[Finding]) -> str:
    (finding,) = findings
    assert (finding.rule, finding.entry) == (None, "__MODEL_PROTO")
    assert len(str(finding).splitlines()) == 1
    return finding.message


def test_a_model_is_checked_in_a_directory_that_nobody_may_write_to(archive: Path) -> None:
    before = os.stat(archive.parent).st_mtime_ns
    archive.parent.chmod(0o555)  # which does not keep root from it
    try:
        assert check_model(archive, full_check=True) == []
    finally:
        archive.parent.chmod(0o755)
    assert os.stat(archive.parent).st_mtime_ns == before  # nothing was there, even for a moment
    assert os.listdir(archive.parent) == [archive.name]


@pytest.mark.parametrize("make", [os.link, os.symlink], ids=["a hard link", "a symbolic link"])
def test_a_model_is_checked_in_an_archive_with_several_names(archive: Path, make: Any) -> None:
    other = archive.parent.with_name("other.onnxa")
    make(archive, other)
    assert check_model(other, full_check=True) == []


def test_a_faulty_model_is_found(path: Path) -> None:
    model = runnable_model()
    model.graph.node[0].input[0] = "nowhere"
    onnxarchive.save(model, path)
    assert "nowhere" in _fault(check_model(path))


def test_shapes_that_do_not_fit_are_found_by_a_full_check(path: Path) -> None:
    model = runnable_model()
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value += 1
    onnxarchive.save(model, path)
    assert check_model(path) == []
    assert "MatMul" in _fault(check_model(path, full_check=True))


def test_check_model_has_the_options_of_onnx() -> None:
    def options(function: Callable[..., object]) -> list[tuple[str, object]]:
        return [(it.name, it.default) for it in inspect.signature(function).parameters.values()][1:]

    *ours, (model, _) = options(check_model)
    assert model == "model"
    assert ours == options(onnx.checker.check_model)


def test_a_custom_operator_is_a_fault_only_if_asked_for(path: Path) -> None:
    model = runnable_model()
    model.opset_import.add(domain="mine", version=1)
    model.graph.node.add(op_type="Mine", domain="mine", input=["y"], output=["z"])
    onnxarchive.save(model, path)
    assert check_model(path) == []
    assert "Mine" in _fault(check_model(path, check_custom_domain=True))


@pytest.mark.parametrize("full_check", [False, True])
def test_shapes_are_checked_wherever_they_are_stored(path: Path, full_check: bool) -> None:
    dims = ", ".join(["1"] * 199)
    model = text_model(f"g () => (float[{dims}, 300] y) {{ y = Expand(c, shape) }}")
    shape = numpy_helper.from_array(np.ones(200, np.int64), "value")
    constants = {"shape": shape, "c": raw_tensor("large", dims=(300,))}
    for name, tensor in constants.items():
        model.graph.node.insert(0, helper.make_node("Constant", [], [name], value=tensor))
    onnxarchive.save(model, path, convert_attribute=True)
    with onnxarchive.open(path) as archive:
        assert set(keys_of(archive)) == {"value", "large"}
    assert check_model(path, full_check=full_check) == []


def _sparse_model(count: int) -> onnx.ModelProto:
    values = raw_tensor("s", dims=(count,))
    indices = numpy_helper.from_array(np.arange(count), "s_indices")
    sparse = onnx.SparseTensorProto(values=values, indices=indices, dims=[10_000])
    model = model_of()
    model.graph.sparse_initializer.append(sparse)
    return model


@pytest.mark.parametrize("count", [300, 9000])
def test_indices_of_sparse_tensors_are_checked(path: Path, count: int) -> None:
    model = _sparse_model(count)
    onnxarchive.save(model, path, convert_attribute=True)
    assert check_model(path) == []
    model.graph.sparse_initializer[0].dims[0] = 100
    onnxarchive.save(model, path, convert_attribute=True)
    assert "index" in _fault(check_model(path))


def test_damage_of_shapes_is_found_and_damage_of_weights_is_not(path: Path) -> None:
    shape = numpy_helper.from_array(np.ones(200, np.int64), "shape")
    onnxarchive.save(model_of(shape, raw_tensor("w", dims=(300,))), path)
    offsets = [entry_of(path, name).data_offset for name in ("w", "shape")]
    flip_byte(path, offsets[0])
    assert check_model(path, full_check=True) == []
    flip_byte(path, offsets[1])
    with pytest.raises(ChecksumError, match=r"\.onnxa: entry 'shape'"):
        check_model(path)


def test_check_model_refuses_a_file_that_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(runnable_model().SerializeToString())
    with pytest.raises(ArchiveFormatError, match=r"m\.onnx"):
        check_model(tmp_path / "m.onnx")
    with pytest.raises(FileNotFoundError):
        check_model(tmp_path / "none.onnxa")


def test_a_model_too_large_without_its_weights_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnxarchive.save(_sparse_model(1000), path, convert_attribute=True)
    monkeypatch.setattr(model_proto, "SIZE_LIMIT", 10_000)
    with pytest.raises(UnsupportedFeatureError, match=r"\.onnxa: expected less than 10000 bytes"):
        check_model(path)


def test_attributes_stored_outside_are_checked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_proto, "SIZE_LIMIT", 10_000)  # the large tensor stays outside
    model = runnable_model()
    large = raw_tensor("large", dims=(4000,))
    model.graph.node.add(op_type="Constant", output=["c"], attribute=[attribute("value", t=large)])
    onnxarchive.save(model, path, convert_attribute=True)
    assert check_model(path, full_check=True) == []
    model.graph.node[2].attribute[0].name = "wrong"
    onnxarchive.save(model, path, convert_attribute=True)
    assert "wrong" in _fault(check_model(path))
