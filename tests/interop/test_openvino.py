"""OpenVINO reads links: it knows external data, and no archives."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from models import run_model, text_model
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from processes import completed

import onnxarchive

pytestmark = pytest.mark.tool

openvino = pytest.importorskip("openvino", reason="OpenVINO is not installed")

RECIPE = Path(__file__).resolve().parents[2] / "tools" / "recipes" / "run_openvino.py"
# Small integers: every type has them, and sums of their products are exact in any order.
X = (np.arange(2 * 64) % 5 - 2).astype(np.float32).reshape(2, 64)
WEIGHT = (np.arange(64 * 64) % 7).reshape(64, 64)
SHAPE = np.array([1] * 126 + [4, 32])  # of 1 KiB: the archive keeps it outside, and the link not


def _linear_model(weight_type: int) -> onnx.ModelProto:
    """A model that reshapes x @ weight."""
    weight = WEIGHT.astype(helper.tensor_dtype_to_np_dtype(weight_type))
    arrays = {"weight": weight, "shape": SHAPE, "begin": np.array([126]), "end": np.array([128])}
    return text_model(
        """linear (float[2, 64] x) => (float[4, 32] y) {
  numbers = Cast<to = 1>(weight)
  product = MatMul(x, numbers)
  last = Slice(shape, begin, end)
  y = Reshape(product, last)
}""",
        *(numpy_helper.from_array(array, name) for name, array in arrays.items()),
    )


def _run_with_openvino(path: Path) -> NDArray[Any]:
    core = openvino.Core()
    options = {"INFERENCE_PRECISION_HINT": "f32"}  # some processors would take bfloat16
    compiled = core.compile_model(core.read_model(path), "CPU", options)
    return np.array(compiled([X])[0])


@pytest.mark.parametrize("place", [".", ".."], ids=["beside its archive", "above its archive"])
@pytest.mark.parametrize("weight_type", ["FLOAT", "FLOAT16", "BFLOAT16", "INT8", "INT4"])
def test_openvino_and_onnxruntime_compute_the_same_from_a_link(
    tmp_path: Path, weight_type: str, place: str
) -> None:
    archive = tmp_path / "Möbel" / "重み.onnxa"
    archive.parent.mkdir()
    onnxarchive.save(_linear_model(TensorProto.DataType.Value(weight_type)), archive)
    link = archive.parent / place / "link.onnx"
    onnxarchive.link(archive, link)
    weight, shape, *_ = onnx.load(link, load_external_data=False).graph.initializer
    assert (weight.data_location, shape.data_location) == (TensorProto.EXTERNAL, 0)
    found = _run_with_openvino(link)
    assert np.array_equal(found, (X @ WEIGHT.astype(np.float32)).reshape(4, 32))
    assert np.array_equal(found, run_model(link, x=X)[0])


def test_the_recipe_prints_the_outputs(path: Path) -> None:
    onnxarchive.save(_linear_model(TensorProto.FLOAT), path)
    done = completed([sys.executable, RECIPE, path], status=0)
    name, *numbers = done.stdout.replace("[", " ").replace("]", " ").split()
    assert name == "y"
    expected = np.tile(WEIGHT.sum(axis=0), 2)
    assert np.array_equal(np.array(numbers, np.float32), expected)
