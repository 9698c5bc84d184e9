"""What a message of a model is, as text for people: a node, a type, a tensor, an attribute."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import singledispatch
from typing import Any, Final

import numpy as np
import onnx
from google.protobuf import text_format
from google.protobuf.message import Message

from onnxarchive.errors import shown
from onnxarchive.model import dtypes, schema, tensors
from onnxarchive.model.tensors import text

MAX_LISTED: Final = 16  # numbers or strings of a list that are told
_OF_ATTRIBUTE: Final = ("name", "ref_attr_name", "doc_string", "type")  # but its value


@singledispatch
def told(message: Message) -> str:
    """A message as text for people: what it is, not all that it says.

    A type is `FLOAT 1x3xN`, a node `y = Add(a, b)`, a tensor its type, its shape and its location.
    """
    return text_format.MessageToString(message, as_one_line=True)


@told.register
def _(node: onnx.NodeProto) -> str:
    operator = text(node.op_type)
    if node.domain:
        operator = f"{text(node.domain)}.{operator}"
    if node.overload:
        operator = f"{operator}:{text(node.overload)}"
    outputs = f"{told_scalars(node.output)} = " if node.output else ""
    return f"{outputs}{operator}({told_scalars(node.input)})"


@told.register
def _(tensor: onnx.TensorProto) -> str:
    described = f"{dtypes.name_of(tensor.data_type)} {told_dims(tensor.dims)}"
    content = tensors.location(tensor)
    return described if content is None else f"{described}, {content}"


@told.register
def _(tensor: onnx.SparseTensorProto) -> str:
    count = math.prod(tensor.values.dims)
    kind = dtypes.name_of(tensor.values.data_type)
    return f"sparse {kind} {told_dims(tensor.dims)}, {told_count(count, 'element')}"


@told.register
def _(graph: onnx.GraphProto) -> str:
    return f"graph of {told_count(len(graph.node), 'node')}"


@told.register
def _(function: onnx.FunctionProto) -> str:
    return f"function of {told_count(len(function.node), 'node')}"


@told.register
def _(step: onnx.TrainingInfoProto) -> str:
    return f"initialization by {told(step.initialization)}, algorithm by {told(step.algorithm)}"


@told.register
def _(pair: onnx.StringStringEntryProto) -> str:
    return told_scalar(pair.value)


@told.register
def _(opset: onnx.OperatorSetIdProto) -> str:
    return str(opset.version)


@told.register
def _(value: onnx.ValueInfoProto) -> str:
    return told(value.type)


@told.register
def _(type: onnx.TypeProto) -> str:
    kind = type.WhichOneof("value")
    if kind in ("tensor_type", "sparse_tensor_type"):
        described = getattr(type, kind)
        name: str = "sparse " * (kind != "tensor_type") + dtypes.name_of(described.elem_type)
        if not described.HasField("shape"):
            return name
        return f"{name} {told_dims([*map(_told_dim, described.shape.dim)])}"
    if kind == "sequence_type":
        return f"sequence of {told(type.sequence_type.elem_type)}"
    if kind == "optional_type":
        return f"optional {told(type.optional_type.elem_type)}"
    if kind == "map_type":
        key = dtypes.name_of(type.map_type.key_type)
        return f"map from {key} to {told(type.map_type.value_type)}"
    return "no type" if kind is None else str(kind).removesuffix("_type")


def _told_dim(dim: onnx.TensorShapeProto.Dimension) -> str:
    return str(dim.dim_value) if dim.HasField("dim_value") else text(dim.dim_param) or "?"


def told_dims(dims: Sequence[object]) -> str:
    """A shape as people write it: `1x3x224x224`, or `scalar`."""
    return "x".join(map(str, dims)) or "scalar"


@told.register
def _(attribute: onnx.AttributeProto) -> str:
    if attribute.ref_attr_name:
        return f"@{text(attribute.ref_attr_name)}"
    for field in attribute.DESCRIPTOR.fields:
        if field.name in _OF_ATTRIBUTE or not tensors.has_field(attribute, field.name):
            continue
        value = getattr(attribute, field.name)
        if not schema.is_repeated(field):
            return told(value) if field.message_type else told_scalar(value)
        tell = told if field.message_type else told_scalar
        listed = [tell(it) for it in value[:MAX_LISTED]] + ["..."] * (len(value) > MAX_LISTED)
        return f"[{', '.join(listed)}]"
    return onnx.AttributeProto.AttributeType.Name(attribute.type)


def told_scalars(values: Iterable[Any]) -> str:
    """Numbers or strings as text, with commas between them."""
    return ", ".join(map(told_scalar, values))


def told_scalar(value: Any, field: Any = None) -> str:
    """A number or string as text.

    Args:
        value: It.
        field: The descriptor of its field, where it may be an enumeration.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    if isinstance(value, float):
        short = np.float32(value)  # which nearly all floats of a model are
        return str(short if short == value else value)
    if field is not None and field.enum_type and value in field.enum_type.values_by_number:
        return str(field.enum_type.values_by_number[value].name)
    return str(value)


def told_elements(values: Sequence[Any], index: int | None) -> str | None:
    """A list of numbers or strings as text, or how long it is and one element of it.

    Args:
        values: The list.
        index: The index of the only element to tell; None to tell all. At the end of the list
            there is none, and only its length is told.

    Returns:
        The text; None for an empty list.
    """
    if not values:
        return None
    if index is None:
        return told_scalars(values)
    length = told_count(len(values), "element")
    return length if index >= len(values) else f"{length}, [{index}] {told_scalar(values[index])}"


def told_unknown(values: Iterable[tuple[int, int, Any]]) -> str | None:
    """Fields that this version of onnx does not know as text.

    Args:
        values: The number, the wire type and the value of each.

    Returns:
        The text; None for no fields.
    """
    fields = (
        f"{number}: {shown(value) if isinstance(value, bytes) else value}"
        for number, _, value in values
    )
    return ", ".join(fields) or None


def told_count(number: int, noun: str) -> str:
    """How many of something: `1 node`, `2 nodes`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
