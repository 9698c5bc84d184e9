"""Describes types, tensors, nodes and numbers of a model in one line each, and types as data."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import Message
from onnx import helper

from onnxarchive.model import dtypes, tensors
from onnxarchive.model.tensors import text


def describe(message: Any) -> str:
    """Describes a message in one line: a type as `FLOAT [1, 3, N]`, a node as `y = Add(a, b)`."""
    if isinstance(message, onnx.NodeProto):
        return _describe_node(message)
    if isinstance(message, onnx.TensorProto):
        described: str = f"{dtypes.name_of(message.data_type)} {describe_dims(message.dims)}"
        location = tensors.location(message)
        return described if location is None else f"{described}, {location}"
    if isinstance(message, onnx.FunctionProto | onnx.GraphProto):
        return f"nodes: {len(message.node):,}"
    if isinstance(message, onnx.AttributeProto):
        with contextlib.suppress(ValueError):  # a type of attribute that onnx does not know
            value = helper.get_attribute_value(message)
            return describe_values(value if isinstance(value, list) else [value])
    if isinstance(message, onnx.TypeProto):
        return _describe_type(message)
    if isinstance(message, onnx.ValueInfoProto):
        return describe(message.type)
    if isinstance(message, onnx.StringStringEntryProto):
        return describe_values([message.value])
    if isinstance(message, onnx.OperatorSetIdProto):
        return str(message.version)
    return str(message.DESCRIPTOR.name)


def _describe_node(node: onnx.NodeProto) -> str:
    operator = ".".join(map(text, filter(None, (node.domain, node.op_type))))
    overload = f":{text(node.overload)}" if node.overload else ""
    outputs = f"{describe_values(node.output)} = " if node.output else ""
    return f"{outputs}{operator}{overload}({describe_values(node.input)})"


def _describe_type(type: onnx.TypeProto) -> str:
    kind = type.WhichOneof("value")
    if kind in ("tensor_type", "sparse_tensor_type"):
        tensor = getattr(type, kind)
        name = dtypes.name_of(tensor.elem_type)
        if kind == "sparse_tensor_type":
            name = f"sparse {name}"
        if not tensor.HasField("shape"):
            return name
        return f"{name} {describe_dims([*map(_describe_dim, tensor.shape.dim)])}"
    if kind == "sequence_type":
        return f"sequence of {_describe_type(type.sequence_type.elem_type)}"
    if kind == "optional_type":
        return f"optional {_describe_type(type.optional_type.elem_type)}"
    if kind == "map_type":
        key = dtypes.name_of(type.map_type.key_type)
        return f"map from {key} to {_describe_type(type.map_type.value_type)}"
    return "no type" if kind is None else str(kind).removesuffix("_type")


def _describe_dim(dim: onnx.TensorShapeProto.Dimension) -> str:
    return str(dim.dim_value) if dim.HasField("dim_value") else text(dim.dim_param) or "?"


def describe_dims(dims: Sequence[object]) -> str:
    """Describes a shape: `[batch, 64]`, or `scalar`."""
    return f"[{', '.join(map(str, dims))}]" if dims else "scalar"


def type_as_data(message: Any) -> dict[str, Any] | None:
    """The type of an input, output or tensor as data for JSON; None for other messages.

    `kind` names the kind of type. A tensor has `data_type` and `dims`: a list of numbers, names,
    and None for an unknown dimension; or None if there is no shape. A sequence or optional has the
    type of an `element`; a map has `key` and `value`.
    """
    if isinstance(message, onnx.TensorProto):
        data_type = dtypes.name_of(message.data_type)
        return {"kind": "tensor", "data_type": data_type, "dims": [*message.dims]}
    if isinstance(message, onnx.ValueInfoProto):
        return _type_as_data(message.type)
    return _type_as_data(message) if isinstance(message, onnx.TypeProto) else None


def _type_as_data(type: onnx.TypeProto) -> dict[str, Any]:
    field = type.WhichOneof("value")
    kind = None if field is None else field.removesuffix("_type")
    if kind in ("tensor", "sparse_tensor"):
        tensor = getattr(type, f"{kind}_type")
        dims = [*map(_dim_as_data, tensor.shape.dim)] if tensor.HasField("shape") else None
        return {"kind": kind, "data_type": dtypes.name_of(tensor.elem_type), "dims": dims}
    if kind in ("sequence", "optional"):
        return {"kind": kind, "element": _type_as_data(getattr(type, f"{kind}_type").elem_type)}
    if kind == "map":
        key = dtypes.name_of(type.map_type.key_type)
        return {"kind": kind, "key": key, "value": _type_as_data(type.map_type.value_type)}
    return {"kind": kind}


def _dim_as_data(dim: onnx.TensorShapeProto.Dimension) -> int | str | None:
    return dim.dim_value if dim.HasField("dim_value") else text(dim.dim_param) or None


def describe_values(values: Sequence[Any], index: int | None = None) -> str:
    """Joins values by commas, or describes only the list's length and the value at `index`."""
    if index is None:
        return ", ".join(map(_describe_value, values))
    value = f", [{index}] {_describe_value(values[index])}" if index < len(values) else ""
    return f"length {len(values):,}{value}"


def _describe_value(value: Any) -> str:
    if isinstance(value, Message):
        return describe(value)
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    if isinstance(value, float) and (short := np.float32(value)) == value:
        return str(short)  # with the digits of a float32
    return str(value)
