"""Copies models, with or without the bytes of their tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import onnx
from google.protobuf.unknown_fields import UnknownFieldSet

from onnxarchive.model import dtypes, schema
from onnxarchive.model.tensors import DATA_FIELDS, set_location
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
    *,
    without: Iterable[int] = (),
    is_parsed: bool = False,
) -> onnx.ModelProto:
    """A copy of `model` whose tensors at the paths of `locations` are external and hold no data.

    The bytes of these tensors are not read. `model` is not changed. Unknown fields are kept.

    Args:
        model: The model.
        locations: New location of each of these tensors, by the path of the tensor in `model`.
        without: Indexes of the main graph's initializers that are left out.
        is_parsed: True if the model is parsed from a file and its weights are left there.
    """
    copy = onnx.ModelProto()
    is_heavy = not is_parsed and holds_weights(model.graph)
    stack: list[tuple[Message, Message, _Branch]] = [(model, copy, _branches(locations, without))]
    while stack:
        source, target, branch = stack.pop()
        unknown = unknown_fields(source, is_heavy)
        if unknown:
            target.MergeFromString(unknown)
        if branch.location is not None:
            _copy_fields(source, target, (*DATA_FIELDS, "external_data", "data_location"))
            set_location(target, branch.location)  # type: ignore[arg-type]
            continue
        _copy_fields(source, target, tuple(branch.fields))
        for field, indices in branch.fields.items():
            children = getattr(source, field)
            if None in indices:
                submessage = getattr(target, field)
                submessage.SetInParent()
                stack.append((children, submessage, indices[None]))
                continue
            copies = getattr(target, field)
            for index, child in enumerate(children):
                below = indices.get(index, _WHOLE)
                if below is _WHOLE:
                    copies.add().CopyFrom(child)
                elif below is not _LEFT_OUT:
                    stack.append((child, copies.add(), below))
    return copy


class _Branch:
    """A tree of the paths below one message, with locations at its leaves."""

    __slots__ = ("fields", "location")

    def __init__(self) -> None:
        self.fields: dict[str, dict[int | None, _Branch]] = {}
        self.location: str | None = None


_WHOLE = _Branch()  # a message without locations below it
_LEFT_OUT = _Branch()


def _branches(locations: Mapping[Path, str], without: Iterable[int]) -> _Branch:
    root = _Branch()
    left_out: dict[int | None, _Branch] = dict.fromkeys(without, _LEFT_OUT)
    if left_out:
        root.fields["graph"] = {None: _Branch()}
        root.fields["graph"][None].fields["initializer"] = left_out
    for path, location in locations.items():
        branch = root
        for field, index in path:
            branch = branch.fields.setdefault(field, {}).setdefault(index, _Branch())
        branch.location = location
    return root


def _copy_fields(source: Message, target: Message, left_out: tuple[str, ...]) -> None:
    """Copies all fields except `left_out`, which are not read."""
    for field, is_repeated in _copied_fields(source.DESCRIPTOR, left_out):
        is_text = field.type == field.TYPE_STRING
        if is_repeated:
            values = getattr(source, field.name)
            if is_text and any(isinstance(value, bytes) for value in values):
                for value in values:
                    _merge_text(target, field.number, value)
            else:
                getattr(target, field.name).MergeFrom(values)
        elif source.HasField(field.name):
            value = getattr(source, field.name)
            if field.message_type:
                getattr(target, field.name).CopyFrom(value)
            elif is_text and isinstance(value, bytes):
                _merge_text(target, field.number, value)
            else:
                setattr(target, field.name, value)


@cache
def _copied_fields(message: Any, left_out: tuple[str, ...]) -> list[tuple[Any, bool]]:
    """The fields of a message's descriptor except `left_out`; for each, True if it is repeated."""
    return [
        (field, schema.is_repeated(field)) for field in message.fields if field.name not in left_out
    ]


def _merge_text(target: Message, number: int, value: str | bytes) -> None:
    """Adds a string by parsing it: protobuf cannot set a string that is not UTF-8."""
    encoded = value if isinstance(value, bytes) else value.encode()
    target.MergeFromString(varint(number << 3 | 2) + varint(len(encoded)) + encoded)


def holds_weights(graph: onnx.GraphProto) -> bool:
    """True if initializers of a graph hold many elements in memory, as their shapes say.

    This is not for a model whose weights are left in its file: no other tensor holds data then,
    whatever the shapes claim.
    """
    held = 0
    for tensor in graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            held += math.prod(tensor.dims[: dtypes.MAX_RANK])
            if held > _MANY_ELEMENTS:
                return True
    return False


def unknown_fields(message: Message, is_heavy: bool = False) -> bytes:
    """The unknown fields of a message, serialized; those of its submessages are not included.

    An `UnknownFieldSet` takes 125 bytes for each field, which may have two bytes in a file. So the
    fields of a large message are copied as bytes, together with the known fields, which are then
    cleared. A message that holds weights would take too long, and as much memory again.

    Args:
        message: The message.
        is_heavy: True if the message holds weights in memory.
    """
    if is_heavy or message.ByteSize() <= _SMALL_NBYTES:
        serialized = bytearray()
        _serialize(UnknownFieldSet(message), serialized)
        return bytes(serialized)
    rest = type(message)()
    rest.CopyFrom(message)
    for field in message.DESCRIPTOR.fields:
        rest.ClearField(field.name)
    return rest.SerializeToString()


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
