"""`onnx.checker` on archives, whose directory is not touched."""

from __future__ import annotations

import inspect
import os
import tempfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from models import attribute, flip_byte, keys_of, model_of, raw_tensor, runnable_model
from onnx import TensorProto, helper, numpy_helper

import onnxarchive
from onnxarchive import ArchiveFormatError, ChecksumError, Finding, UnsupportedFeatureError
from onnxarchive.interop.onnx_functions import check_model
from onnxarchive.model import proto


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's directory of temporary files, for this test alone."""
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


def _saved(tmp_path: Path, model: onnx.ModelProto, *, convert_attribute: bool = False) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir(exist_ok=True)
    path = folder / "m.onnxa"
    onnxarchive.save(model, path, convert_attribute=convert_attribute)
    return path


def _fault(findings: list[Finding]) -> str:
    (finding,) = findings
    assert (finding.rule, finding.entry) == (None, "__MODEL_PROTO")
    assert len(str(finding).splitlines()) == 1
    return finding.message


@pytest.mark.parametrize("full_check", [False, True])
def test_a_valid_model_passes(tmp_path: Path, temporary: Path, full_check: bool) -> None:
    assert check_model(_saved(tmp_path, runnable_model()), full_check=full_check) == []
    assert os.listdir(temporary) == []


def test_a_directory_that_nobody_may_write_to_will_do(tmp_path: Path, temporary: Path) -> None:
    path = _saved(tmp_path, runnable_model())
    before = os.stat(path.parent).st_mtime_ns
    path.parent.chmod(0o555)  # which does not keep root from it
    try:
        assert check_model(path, full_check=True) == []
    finally:
        path.parent.chmod(0o755)
    assert os.stat(path.parent).st_mtime_ns == before  # nothing was made there, even for a moment
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("make", [os.link, os.symlink], ids=["a hard link", "a symbolic link"])
def test_an_archive_of_several_names_will_do(tmp_path: Path, temporary: Path, make: object) -> None:
    path = _saved(tmp_path, runnable_model())
    assert callable(make)
    make(path, tmp_path / "other.onnxa")
    assert check_model(tmp_path / "other.onnxa", full_check=True) == []


def test_a_faulty_model_is_found(tmp_path: Path, temporary: Path) -> None:
    model = runnable_model()
    model.graph.node[0].input[0] = "nowhere"
    path = _saved(tmp_path, model)
    assert "nowhere" in _fault(check_model(path))
    assert os.listdir(temporary) == []


def test_shapes_that_do_not_fit_are_found_by_a_full_check(tmp_path: Path, temporary: Path) -> None:
    model = runnable_model()
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value += 1
    path = _saved(tmp_path, model)
    assert check_model(path) == []
    assert "MatMul" in _fault(check_model(path, full_check=True))
    assert os.listdir(temporary) == []


def test_the_options_are_onnx_s_own() -> None:
    def options(function: object) -> list[tuple[str, object]]:
        assert callable(function)
        return [(it.name, it.default) for it in inspect.signature(function).parameters.values()][1:]

    *ours, (model, _) = options(check_model)
    assert model == "model"
    assert ours == options(onnx.checker.check_model)


def test_an_operator_of_the_user_s_is_unknown_if_that_is_asked(
    tmp_path: Path, temporary: Path
) -> None:
    model = runnable_model()
    model.opset_import.add(domain="mine", version=1)
    model.graph.node.add(op_type="Mine", domain="mine", input=["y"], output=["z"])
    path = _saved(tmp_path, model)
    assert check_model(path) == []
    assert "Mine" in _fault(check_model(path, check_custom_domain=True))


@pytest.mark.parametrize("full_check", [False, True])
def test_shapes_are_seen_wherever_they_are_stored(
    tmp_path: Path, temporary: Path, full_check: bool
) -> None:
    shape = numpy_helper.from_array(np.ones(200, np.int64), "value")
    graph = helper.make_graph(
        [
            helper.make_node("Constant", [], ["shape"], value=shape),
            helper.make_node("Constant", [], ["c"], value=raw_tensor("large", dims=(300,))),
            helper.make_node("Expand", ["c", "shape"], ["y"]),
        ],
        "graph",
        [],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1] * 199 + [300])],
    )
    graph.node[2].output[0] = "y"
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    path = _saved(tmp_path, model, convert_attribute=True)
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
def test_indices_of_sparse_tensors_are_checked(tmp_path: Path, temporary: Path, count: int) -> None:
    model = _sparse_model(count)
    assert check_model(_saved(tmp_path, model, convert_attribute=True)) == []
    model.graph.sparse_initializer[0].dims[0] = 100
    assert "index" in _fault(check_model(_saved(tmp_path, model, convert_attribute=True)))


def test_damage_of_what_is_looked_at_is_found_and_of_weights_not(
    tmp_path: Path, temporary: Path
) -> None:
    shape = numpy_helper.from_array(np.ones(200, np.int64), "shape")
    path = _saved(tmp_path, model_of(shape, raw_tensor("w", dims=(300,))))
    with onnxarchive.open(path) as archive:
        offsets = [archive.entries[name].data_offset for name in ("w", "shape")]
    flip_byte(path, offsets[0])
    assert check_model(path, full_check=True) == []
    flip_byte(path, offsets[1])
    with pytest.raises(ChecksumError, match=r"m\.onnxa: entry 'shape'"):
        check_model(path)


def test_what_is_no_archive_is_refused(tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(runnable_model().SerializeToString())
    with pytest.raises(ArchiveFormatError, match=r"m\.onnx"):
        check_model(tmp_path / "m.onnx")
    with pytest.raises(FileNotFoundError):
        check_model(tmp_path / "none.onnxa")


def test_a_model_too_large_without_its_weights_is_refused(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _saved(tmp_path, _sparse_model(1000), convert_attribute=True)
    monkeypatch.setattr(proto, "SIZE_LIMIT", 10_000)
    with pytest.raises(UnsupportedFeatureError, match=r"m\.onnxa: expected less than 10000 bytes"):
        check_model(path)


def test_a_disk_without_room_for_a_stand_in_will_do(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _saved(tmp_path, runnable_model())
    size = os.path.getsize
    monkeypatch.setattr(
        os.path, "getsize", lambda it: 1 << 62 if os.fspath(it) == str(path) else size(it)
    )
    assert check_model(path, full_check=True) == []


def test_attributes_are_those_of_the_model(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proto, "SIZE_LIMIT", 10_000)  # the large tensor stays outside
    model = runnable_model()
    large = raw_tensor("large", dims=(4000,))
    model.graph.node.add(op_type="Constant", output=["c"], attribute=[attribute("value", t=large)])
    assert check_model(_saved(tmp_path, model, convert_attribute=True), full_check=True) == []
    model.graph.node[2].attribute[0].name = "wrong"
    path = _saved(tmp_path, model, convert_attribute=True)
    assert "wrong" in _fault(check_model(path))
