"""Copies models, with or without the bytes of their tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import onnx
from google.protobuf.unknown_fields import UnknownFieldSet

from onnxarchive.model import dtypes, serialization, walking
from onnxarchive.model.tensors import DATA_FIELDS, EXTERNAL, INITIALIZER, LOCATION
from onnxarchive.model.walking import Path
from onnxarchive.model.wire import varint

if TYPE_CHECKING:
    from google.protobuf.message import Message

_SMALL_NBYTES = 1 << 16  # of a message whose unknown fields are read one by one
_MANY_ELEMENTS = 1 << 18

_Copied = TypeVar("_Copied", onnx.ModelProto, onnx.TensorProto)


def copied(message: _Copied) -> _Copied:
    """A copy of a model or a tensor, with all bytes."""
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


def with_locations(
    model: onnx.ModelProto,
    locations: Mapping[Path, str],
    initializers: Mapping[int, str] | None = None,
    *,
    is_parsed: bool = False,
) -> onnx.ModelProto:
    """A copy of `model` whose tensors at the paths of `locations` are external and hold no data.

    The bytes of these tensors are not read. `model` is not changed. Unknown fields are kept.

    Args:
        model: The model.
        locations: The location of each of these tensors, by the path of the tensor in `model`.
        initializers: The same for initializers of the main graph, by index.
        is_parsed: True if the model is parsed from a file and its weights are left there.
    """
    copy = onnx.ModelProto()
    is_heavy = not is_parsed and holds_weights(model.graph)
    root = _branches(locations, initializers or {})
    stack: list[tuple[Message, Message, _Branch]] = [(model, copy, root)]
    while stack:
        source, target, branch = stack.pop()
        _copy_fields(source, target, tuple(branch), is_heavy)
        for field, indices in branch.items():
            children, copies = getattr(source, field), getattr(target, field)
            is_repeated = None not in indices
            if not is_repeated:
                copies.SetInParent()
            for index, child in enumerate(children) if is_repeated else [(None, children)]:
                below = indices.get(index)
                child_copy = copies.add() if is_repeated else copies
                if below is None:
                    child_copy.CopyFrom(child)
                elif isinstance(below, str):
                    _copy_fields(child, child_copy, _NOT_IN_EXTERNAL, is_heavy)
                    child_copy.data_location = EXTERNAL
                    pair = child_copy.external_data.add()
                    pair.key, pair.value = LOCATION, below
                else:
                    stack.append((child, child_copy, below))
    return copy


# The fields of a message that lead to external tensors, each with the indexes of messages (None if
# the field is not repeated), and the new location of a tensor or the fields of another message.
_Branch: TypeAlias = "dict[str, dict[int | None, _Branch | str]]"
_NOT_IN_EXTERNAL = (*DATA_FIELDS, "external_data", "data_location")


def _branches(locations: Mapping[Path, str], initializers: Mapping[int, str]) -> _Branch:
    root: _Branch = {}
    if initializers:
        root["graph"] = {None: {INITIALIZER: {**initializers}}}  # type: ignore[dict-item]
    for (*above, (field, index)), location in locations.items():
        branch = root
        for step, number in above:
            branch = branch.setdefault(step, {}).setdefault(number, {})  # type: ignore[assignment]
        branch.setdefault(field, {})[index] = location
    return root


def _copy_fields(
    source: Message, target: Message, left_out: tuple[str, ...], is_heavy: bool
) -> None:
    """Copies the fields of a message, also unknown ones; those of `left_out` are not read."""
    unknown = unknown_fields(source, is_heavy)
    if unknown:
        serialization.merge(target, unknown)
    for name, number, is_repeated, is_message, is_text in _fields(source.DESCRIPTOR, left_out):
        if is_repeated:
            values = getattr(source, name)
            if not values:
                continue
            if is_text and any(isinstance(value, bytes) for value in values):
                for value in values:
                    _merge_text(target, number, value)
            else:
                getattr(target, name).MergeFrom(values)
        elif source.HasField(name):
            value = getattr(source, name)
            if is_message:
                getattr(target, name).CopyFrom(value)
            elif is_text and isinstance(value, bytes):
                _merge_text(target, number, value)
            else:
                setattr(target, name, value)


@cache
def _fields(message: Any, left_out: tuple[str, ...]) -> list[tuple[str, int, bool, bool, bool]]:
    """The fields of a message's descriptor except `left_out`.

    For each: name, number, and whether it is repeated, holds messages, holds text.
    """
    return [
        (
            field.name,
            field.number,
            walking.is_repeated(field),
            field.message_type is not None,
            field.type == field.TYPE_STRING,
        )
        for field in message.fields
        if field.name not in left_out
    ]


def _merge_text(target: Message, number: int, value: str | bytes) -> None:
    """Adds a string by parsing it: protobuf cannot set a string that is not UTF-8."""
    encoded = value if isinstance(value, bytes) else value.encode()
    serialization.merge(target, varint(number << 3 | 2) + varint(len(encoded)) + encoded)


def holds_weights(graph: onnx.GraphProto) -> bool:
    """True if initializers of a graph hold many elements in memory, as their shapes say.

    This is not for a model whose weights are left in its file: no other tensor holds data then,
    whatever the shapes claim.
    """
    element_count = 0
    for tensor in graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            element_count += math.prod(tensor.dims[: dtypes.MAX_RANK])
            if element_count > _MANY_ELEMENTS:
                return True
    return False


def unknown_fields(message: Message, is_heavy: bool = False) -> bytes:
    """The unknown fields of a message, serialized; those of its submessages are not included.

    An `UnknownFieldSet` takes 125 bytes for each field, which may have two bytes in a file. So the
    fields of a large message are copied as bytes, together with the known fields, which are then
    cleared. Weights in memory (`is_heavy`) would take too long, and as much memory again.
    """
    if is_heavy or serialization.serialized_nbytes(message) <= _SMALL_NBYTES:
        unknown = UnknownFieldSet(message)
        if len(unknown) == 0:
            return b""
        serialized = bytearray()
        _serialize(unknown, serialized)
        return bytes(serialized)
    rest = type(message)()
    rest.CopyFrom(message)
    for field in message.DESCRIPTOR.fields:
        rest.ClearField(field.name)
    return serialization.serialize(rest)


def _serialize(unknown: Any, target: bytearray) -> None:
    """Appends the fields of an UnknownFieldSet to `target` (protobuf encoding guide)."""
    for field in unknown:
        target += varint(field.field_number << 3 | field.wire_type)
        if field.wire_type == 0:
            target += varint(field.data)
        elif field.wire_type == 1:
            target += field.data.to_bytes(8, "little")
        elif field.wire_type == 2:
            target += varint(len(field.data)) + field.data
        elif field.wire_type == 3:
            _serialize(field.data, target)
            target += varint(field.field_number << 3 | 4)
        else:
            target += field.data.to_bytes(4, "little")
