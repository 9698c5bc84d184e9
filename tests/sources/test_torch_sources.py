"""Real exports of torch.onnx of PyTorch 1.x, see data/torch-zip/README.md."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from models import model_of, raw_tensor, run_model
from onnx import TensorProto
from written import contents, zipped

import onnxarchive
from onnxarchive import ArchiveFormatError

DATA = Path(__file__).parents[1] / "data" / "torch-zip"
VERSIONS = ["1.4.0", "1.11.0"]
FORMS = [".onnx", ".zip", ".deflated.zip", ".dir", ".dir/__MODEL_PROTO"]
KEYS = {"1.4.0": {"_1", "_8", "_10"}, "1.11.0": {"features_4_weight", "fc_weight", "onnx__Conv_22"}}


def source_of(version: str, form: str) -> Path:
    return DATA / f"conv_torch{version}{form}"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("version", VERSIONS)
def test_an_old_export_converts_and_runs_as_pytorch_ran_it(
    tmp_path: Path, version: str, form: str
) -> None:
    target = tmp_path / "m.onnxa"
    onnxarchive.convert(source_of(version, form), target)
    assert onnxarchive.check(target, full=True) == []
    with onnxarchive.open(target) as archive:
        assert set(archive.entries) == {*KEYS[version], "__MODEL_PROTO"}
    assert onnxarchive.load(target) == onnx.load(source_of(version, ".onnx"))
    onnxarchive.export(target, tmp_path / "m.onnx")
    with np.load(source_of(version, ".npz")) as arrays:
        (found,) = run_model(tmp_path / "m.onnx", x=arrays["x"])
        assert np.any(arrays["y"])
        np.testing.assert_allclose(found, arrays["y"], rtol=1e-4, atol=1e-5)


def torch_directory(path: Path, *tensors: TensorProto) -> Path:
    """A directory as torch.onnx wrote it, of these tensors."""
    path.mkdir()
    model = model_of(*tensors)
    for tensor in model.graph.initializer:
        (path / tensor.name).write_bytes(tensor.raw_data)
        tensor.raw_data = b"__EXTERNAL"
    (path / "__MODEL_PROTO").write_bytes(model.SerializeToString())
    return path


def genuine(name: str) -> TensorProto:
    return TensorProto(name=name, data_type=TensorProto.UINT8, dims=[10], raw_data=b"__EXTERNAL")


def test_ten_bytes_that_read_like_the_placeholder_are_data_in_a_single_file(tmp_path: Path) -> None:
    model = model_of(genuine("w"), raw_tensor("large", dims=(600,)))
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    for size_threshold in (0, 1024):
        onnxarchive.convert(
            tmp_path / "m.onnx", tmp_path / "m.onnxa", size_threshold=size_threshold
        )
        assert onnxarchive.load(tmp_path / "m.onnxa") == model


def test_ten_bytes_that_read_like_the_placeholder_are_data_if_no_file_has_their_name(
    tmp_path: Path,
) -> None:
    directory = torch_directory(tmp_path / "m", raw_tensor("large", dims=(600,)))
    model = onnx.load(directory / "__MODEL_PROTO", load_external_data=False)
    model.graph.initializer.append(genuine("w"))
    (directory / "__MODEL_PROTO").write_bytes(model.SerializeToString())
    onnxarchive.convert(directory, tmp_path / "m.onnxa")
    loaded = onnxarchive.load(tmp_path / "m.onnxa")
    assert loaded.graph.initializer[1] == genuine("w")


@pytest.mark.parametrize(("data_type", "count"), [(TensorProto.FLOAT16, 5), (TensorProto.INT8, 10)])
@pytest.mark.parametrize("is_zip", [False, True])
def test_a_tensor_of_ten_bytes_has_the_data_of_the_file_of_its_name(
    tmp_path: Path, data_type: int, count: int, is_zip: bool
) -> None:
    # As wide as the placeholder: what torch.onnx wrote is the file, not these ten letters.
    tensors = [raw_tensor("large", dims=(600,)), raw_tensor("fc.bias", data_type, (count,), seed=3)]
    source = torch_directory(tmp_path / "m", *tensors)
    if is_zip:
        source = zipped(tmp_path / "m.zip", contents(source))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what counts is the data
        onnxarchive.convert(source, tmp_path / "m.onnxa")
    loaded = onnxarchive.load(tmp_path / "m.onnxa")
    assert list(loaded.graph.initializer) == tensors


@pytest.mark.parametrize("is_zip", [False, True])
def test_a_missing_entry_is_named_with_its_tensor(tmp_path: Path, is_zip: bool) -> None:
    source = tmp_path / "m"
    shutil.copytree(source_of("1.11.0", ".dir"), source)
    (source / "features.4.weight").unlink()
    (source / "onnx::Conv_23").unlink()
    if is_zip:
        source = zipped(tmp_path / "m.zip", contents(source))
    with pytest.raises(ArchiveFormatError) as caught:
        onnxarchive.convert(source, tmp_path / "m.onnxa")
    message = str(caught.value)
    assert message.startswith(f"{source}: ")
    assert "2 tensors have faulty data" in message
    assert "tensor 'features.4.weight'" in message
    assert "18432 bytes" in message
    assert "tensor 'onnx::Conv_23'" in message
    assert "fc.weight" not in message
    assert not (tmp_path / "m.onnxa").exists()


@pytest.mark.parametrize("change", [-1, 1])
def test_an_entry_of_the_wrong_size_is_not_taken_for_the_tensor(
    tmp_path: Path, change: int
) -> None:
    source = torch_directory(tmp_path / "m", raw_tensor("w", dims=(600,)))
    (source / "w").write_bytes(bytes(2400 + change))
    with pytest.raises(ArchiveFormatError, match="'w'") as caught:
        onnxarchive.convert(source, tmp_path / "m.onnxa")
    assert "2400" in str(caught.value)
    assert str(2400 + change) in str(caught.value)


def test_tensors_of_an_old_export_may_be_in_subgraphs_and_attributes(tmp_path: Path) -> None:
    placeholder = raw_tensor("body.weight", dims=(600,), seed=4)
    expected: Any = placeholder.raw_data
    source = torch_directory(tmp_path / "m", raw_tensor("w", dims=(600,)))
    model = onnx.load(source / "__MODEL_PROTO", load_external_data=False)
    (source / "body.weight").write_bytes(expected)
    placeholder.raw_data = b"__EXTERNAL"
    body = onnx.GraphProto(name="body", initializer=[placeholder])
    model.graph.node.add(op_type="If").attribute.add(name="then_branch", type=5, g=body)
    (source / "__MODEL_PROTO").write_bytes(model.SerializeToString())
    onnxarchive.convert(source, tmp_path / "m.onnxa")
    with onnxarchive.open(tmp_path / "m.onnxa") as archive:
        assert set(archive.entries) == {"w", "body_weight", "__MODEL_PROTO"}
        assert archive.read("body_weight") == expected
