"""Sessions of models and of their archives, compared bit by bit.

Outputs of types that numpy lacks are compared as bytes in ONNX Runtime's memory, all others as
numpy arrays.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from models import BIT_WIDTHS, element_count
from onnx import TensorProto, helper, numpy_helper

import onnxarchive

ort = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")

_VERSION = tuple(map(int, ort.__version__.split(".")[:2]))
needs_mapped_buffers = pytest.mark.skipif(
    _VERSION < (1, 31), reason="this ONNX Runtime copies buffers of external data"
)
needs_packed_weights = pytest.mark.skipif(
    _VERSION < (1, 32), reason="this ONNX Runtime does not compare packed weights"
)

# Names of the counts of models.
COMPARED = "models compared with their archives' sessions"
ONLY_MADE = "models of which only a session is made"

_PROVIDERS = ["CPUExecutionProvider"]
_WITHOUT_NUMPY = re.compile(r"tensor\((float8.*|float4.*|bfloat16|u?int[42])\)")


def session_of_model(model: str | bytes) -> Any:
    """ONNX Runtime's session of a model; None if ONNX Runtime refuses the model."""
    try:
        return ort.InferenceSession(model, quiet(), _PROVIDERS, enable_fallback=0)
    except Exception:
        return None


def session_of_archive(source: Any) -> Any:
    return onnxarchive.session(source, quiet(), _PROVIDERS, enable_fallback=0)


def quiet() -> Any:
    """Options of a session that prints nothing and takes one thread."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return options


def run(session: Any, values: Mapping[str, Any]) -> tuple[bool, Any]:
    """Runs a session; returns True and the outputs, or False and the error's message.

    Args:
        session: The session.
        values: Inputs by name: arrays, TensorProtos, or lists of these.
    """
    arrays = {name: _array(value) for name, value in values.items()}
    as_ort_values = any(_WITHOUT_NUMPY.fullmatch(it.type) for it in session.get_outputs())
    feeds = {name: _feed(value, as_ort_values) for name, value in arrays.items()}
    try:
        if as_ort_values:
            return True, [_memory(it) for it in session.run_with_ort_values(None, feeds)]
        return True, [_bits(it) for it in session.run(None, feeds)]
    except Exception as error:
        return False, str(error)


def _array(value: Any) -> Any:
    if value is None:  # an empty optional
        return None
    if isinstance(value, list):
        return [_array(it) for it in value]
    if isinstance(value, TensorProto):
        return numpy_helper.to_array(value)
    return np.asarray(value)


def _feed(value: Any, as_ort_value: bool) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.isbuiltin != 1:  # a type of ml_dtypes
        number = helper.np_dtype_to_tensor_dtype(value.dtype)
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(value, number)
    return ort.OrtValue.ortvalue_from_numpy(value) if as_ort_value else value


def _memory(value: Any) -> Any:
    number, shape = value.element_type(), value.shape()
    if number == TensorProto.STRING:
        return _bits(value.numpy())
    nbytes = -(-element_count(shape) * BIT_WIDTHS[number] // 8)
    return number, shape, ctypes.string_at(value.data_ptr(), nbytes)


def _bits(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        elements = value.tolist() if value.dtype == object else value.tobytes()
        return value.dtype, value.shape, elements
    if isinstance(value, list):
        return [_bits(it) for it in value]
    if isinstance(value, dict):
        return {key: _bits(it) for key, it in value.items()}
    return value
