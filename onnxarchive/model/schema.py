"""Descriptors of ONNX's protos: the fields of a model that lead to its tensors and graphs."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import onnx

TENSOR: Final[str] = onnx.TensorProto.DESCRIPTOR.full_name


@cache
def fields_to(kind: str) -> dict[str, list[Any]]:
    """For each message type, the fields that lead to messages of the type `kind`.

    Args:
        kind: The full name of a message type.

    Returns:
        The descriptors of these fields, by the full name of the containing type. Fields with a
        shorter path to `kind` come first.
    """
    distances = {kind: 0}
    descriptors = messages()
    nearest = [kind]
    while nearest:
        distance = distances[nearest[0]] + 1
        farther = (name for name in descriptors if name not in distances)
        nearest = [name for name in farther if _leading(descriptors[name], distances)]
        distances.update(dict.fromkeys(nearest, distance))
    return {
        name: sorted(
            _leading(descriptors[name], distances),
            key=lambda field: (distances[_below(field)], field.number),
        )
        for name in distances
    }


def is_repeated(field: Any) -> bool:
    """True if a field is repeated; for descriptors of old and new protobuf."""
    # protobuf 6 added `FieldDescriptor.is_repeated`; protobuf 7 removed `FieldDescriptor.label`.
    repeated = getattr(field, "is_repeated", None)
    return bool(field.label == field.LABEL_REPEATED if repeated is None else repeated)


@cache
def messages() -> dict[str, Any]:
    """The descriptors of ModelProto and of every message below it, by full name."""
    descriptors: dict[str, Any] = {}
    pending: list[Any] = [onnx.ModelProto.DESCRIPTOR]
    while pending:
        message = pending.pop()
        if message.full_name not in descriptors:
            descriptors[message.full_name] = message
            pending += [field.message_type for field in message.fields if field.message_type]
    return descriptors


def _leading(message: Any, known: dict[str, int]) -> list[Any]:
    return [field for field in message.fields if field.message_type and _below(field) in known]


def _below(field: Any) -> str:
    """The full name of the message that a field holds."""
    name: str = field.message_type.full_name
    return name
