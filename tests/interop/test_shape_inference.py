"""`onnx.shape_inference` on archives, and archives with the inferred shapes."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from edits import NAME, refused, untouched
from models import (
    entry_of,
    flip_byte,
    full_model,
    keys_by_path,
    keys_of,
    raw_tensor,
    runnable_model,
    text_model,
)
from onnx import TensorProto, helper, numpy_helper

import onnxarchive
from onnxarchive import ChecksumError
from onnxarchive.interop.onnx_functions import infer_shapes
from onnxarchive.interop.transform import transform
from onnxarchive.model import tensors
from onnxarchive.model.external import is_unread

ASSETS = {"labels.txt": b"cat\ndog\n"}


def _shape(value: onnx.ValueInfoProto) -> list[int]:
    return [dim.dim_value for dim in value.type.tensor_type.shape.dim]


def _reshaping_model() -> onnx.ModelProto:
    """A model whose shapes depend on weights, on a large vector, and on one in an attribute."""
    one = np.ones(198, np.int64)
    model = text_model(
        """g (float[2, 32] x, bool c) => (float[] y) {
  product = MatMul(x, w)
  reshaped = Reshape(product, shape)
  constant = Constant()
  y = Reshape(product, constant)
  z = If(c) <
    else_branch = e () => (float[] e_y) { e_sum = Add(w2, w2) e_y = Relu(e_sum) },
    then_branch = t () => (float[] t_y) { t_sum = Add(w2, w2) t_y = Relu(t_sum) }
  >
  size = Shape(x)
  zeros = ConstantOfShape(size)
}""",
        raw_tensor("w", dims=(32, 64)),
        numpy_helper.from_array(np.array([*one, 4, 32]), "shape"),
    )
    value = numpy_helper.from_array(np.array([*one, 8, 16]), "value")
    model.graph.node[2].attribute.append(helper.make_attribute("value", value))
    for branch in model.graph.node[4].attribute:
        branch.g.initializer.append(raw_tensor("w2", dims=(20, 20)))
    return model


@pytest.fixture
def path(path: Path) -> Path:
    onnxarchive.save(_reshaping_model(), path, convert_attribute=True, assets=ASSETS)
    return path


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize("data_prop", [False, True])
def test_inferred_shapes_are_those_that_onnx_infers(
    path: Path, tmp_path: Path, is_strict: bool, data_prop: bool
) -> None:
    options: dict[str, Any] = {"check_type": is_strict, "strict_mode": is_strict}
    options["data_prop"] = data_prop
    expected = onnx.shape_inference.infer_shapes(_reshaping_model(), **options)
    infer_shapes(path, tmp_path / "out.onnxa", **options)
    assert onnxarchive.load(tmp_path / "out.onnxa") == expected
    shapes = {value.name: _shape(value) for value in expected.graph.value_info}
    assert shapes["reshaped"][-2:] == [4, 32]
    assert shapes["zeros"] == ([2, 32] if data_prop else [0, 0])
    assert _shape(expected.graph.output[0])[-2:] == [8, 16]


def _with_table(op_type: str, count: int) -> onnx.ModelProto:
    """A model with a vector of `count` numbers, in which a Gather or a Split needs the values."""
    nodes, outputs = "shape = Gather(table, index) y = Reshape(x, shape)", ["y"]
    if op_type == "Split":
        outputs = [f"y{index}" for index in range(count)]
        nodes = f"{', '.join(outputs)} = Split<axis = 0>(x, table)"
    ports = ", ".join(f"float[] {name}" for name in outputs)
    return text_model(
        f"g (float[{2 * count}] x) => ({ports}) {{ {nodes} }}",
        numpy_helper.from_array(np.full(count, 2), "table"),
        numpy_helper.from_array(np.array([3, 5]), "index"),
    )


@pytest.mark.parametrize("data_prop", [False, True])
@pytest.mark.parametrize("op_type", ["Gather", "Split"])
def test_values_of_large_index_tables_are_used_as_onnx_uses_them(
    path: Path, tmp_path: Path, op_type: str, data_prop: bool
) -> None:
    model = _with_table(op_type, 8192)  # 64 KiB
    onnxarchive.save(model, path, size_threshold=0, assets={})
    expected = onnx.shape_inference.infer_shapes(model, data_prop=data_prop)
    infer_shapes(path, tmp_path / "out.onnxa", data_prop=data_prop)
    assert onnxarchive.load(tmp_path / "out.onnxa") == expected
    sizes = [_shape(value) for value in expected.graph.output]
    assert sizes == ([[2, 2] if data_prop else [0, 0]] if op_type == "Gather" else [[2]] * 8192)
    if op_type == "Split" or data_prop:
        infer = functools.partial(onnx.shape_inference.infer_shapes, data_prop=data_prop)
        transform(path, tmp_path / "other.onnxa", infer)
        assert onnxarchive.load(tmp_path / "other.onnxa") == expected


@pytest.mark.parametrize(
    ("data_type", "dims", "expected"),
    [
        (TensorProto.INT64, [(1 << 21) - 1], False),
        (TensorProto.INT64, [1 << 21], True),
        (TensorProto.INT32, [(1 << 22) - 1], False),
        (TensorProto.INT32, [1 << 22], True),
        (TensorProto.INT64, [64, 128], True),
        (TensorProto.FLOAT, [8192], True),
        (TensorProto.FLOAT, [255], False),
    ],
)
def test_weights_and_vectors_of_16_mib_are_not_read(
    data_type: int, dims: list[int], expected: bool
) -> None:
    tensor = TensorProto(data_type=data_type, dims=dims)
    nbytes = math.prod(dims) * (8 if data_type == TensorProto.INT64 else 4)
    assert is_unread(tensors.main_initializer(tensor, 0), nbytes) is expected


def test_infer_shapes_returns_the_model_that_it_writes(path: Path, tmp_path: Path) -> None:
    model = infer_shapes(path, tmp_path / "out.onnxa")
    with onnxarchive.open(tmp_path / "out.onnxa") as archive:
        assert archive.model == model
    with onnxarchive.open(path) as archive:
        assert keys_by_path(model) == keys_by_path(archive.model)
        assert set(keys_by_path(model).values()) == set(keys_of(archive))


def test_infer_shapes_without_a_target_writes_nothing(path: Path) -> None:
    with untouched(path):
        model = infer_shapes(path)
    assert "reshaped" in [value.name for value in model.graph.value_info]


def test_weights_and_assets_are_copied_bit_by_bit(path: Path, tmp_path: Path) -> None:
    infer_shapes(path, tmp_path / "out.onnxa")
    assert onnxarchive.check(tmp_path / "out.onnxa", full=True) == []
    with onnxarchive.open(path) as before, onnxarchive.open(tmp_path / "out.onnxa") as after:
        assert list(after.entries) == list(before.entries)
        for name in list(before.entries)[:-1]:
            assert after.read(name) == before.read(name)


def test_infer_shapes_may_replace_its_own_archive(path: Path, tmp_path: Path) -> None:
    infer_shapes(path, tmp_path / "out.onnxa")
    infer_shapes(path, path)
    assert path.read_bytes() == (tmp_path / "out.onnxa").read_bytes()


def test_tensors_of_every_place_keep_their_entries(path: Path, tmp_path: Path) -> None:
    model = full_model()
    for owner in (model, model.functions[0]):
        owner.opset_import.add(domain="test", version=1)
    onnxarchive.save(model, path, convert_attribute=True, assets={})
    infer_shapes(path, tmp_path / "out.onnxa")
    with onnxarchive.open(path) as before, onnxarchive.open(tmp_path / "out.onnxa") as after:
        assert keys_by_path(after.model) == keys_by_path(before.model)
        assert keys_of(after) == keys_of(before)


@pytest.mark.parametrize("place", ["out.onnxa", NAME])
def test_shapes_that_do_not_fit_leave_everything_as_it_was(path: Path, place: str) -> None:
    model = runnable_model()
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value += 1
    onnxarchive.save(model, path, assets={})
    with refused(path, onnx.shape_inference.InferenceError, "MatMul"):
        infer_shapes(path, path.with_name(place), strict_mode=True)


def test_weights_are_read_only_to_be_copied(path: Path) -> None:
    flip_byte(path, entry_of(path, "w").data_offset)
    infer_shapes(path)
    with refused(path, ChecksumError, "entry 'w'"):
        infer_shapes(path, path.with_name("out.onnxa"))


def test_a_damaged_shape_is_found(path: Path) -> None:
    flip_byte(path, entry_of(path, "shape").data_offset)
    with pytest.raises(ChecksumError, match=r"\.onnxa: entry 'shape'"):
        infer_shapes(path)


def test_infer_shapes_has_the_options_of_onnx() -> None:
    def options(function: Callable[..., object]) -> dict[str, object]:
        parameters = inspect.signature(function).parameters
        own = {"path", "destination", "model"}
        return {it: parameters[it].default for it in parameters if it not in own}

    assert options(infer_shapes) == options(onnx.shape_inference.infer_shapes)


def test_the_inference_of_onnxruntime_goes_through_transform(archive: Path) -> None:
    pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    pytest.importorskip("sympy", reason="sympy is not installed")
    from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

    transform(archive, archive, SymbolicShapeInference.infer_shapes)
    with onnxarchive.open(archive) as opened:
        shapes = {value.name: _shape(value) for value in opened.model.graph.value_info}
    assert shapes["product"] == [2, 16]
