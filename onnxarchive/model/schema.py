"""Descriptors of ONNX's protos: the fields of a model that lead to its tensors and graphs."""

from __future__ import annotations

from functools import cache
from typing import Any

import onnx


@cache
def fields_to(kind: Any) -> dict[Any, list[tuple[str, bool]]]:
    """For each message type, by descriptor, the fields that lead to messages of the type `kind`.

    They are the name of each field, and True if it is repeated; the shortest paths come first.
    """
    distances = {kind: 0}
    others = [message for message in messages() if message is not kind]
    while nearest := [message for message in others if _leading(message, distances)]:
        distances |= dict.fromkeys(nearest, max(distances.values()) + 1)
        others = [message for message in others if message not in distances]
    return {
        message: [(field.name, is_repeated(field)) for field in _leading(message, distances)]
        for message in distances
    }


def _leading(message: Any, distances: dict[Any, int]) -> list[Any]:
    """The fields that hold messages of known types, by distance."""
    fields = [field for field in message.fields if field.message_type in distances]
    return sorted(fields, key=lambda field: (distances[field.message_type], field.number))


def is_repeated(field: Any) -> bool:
    """True if a field is repeated; for descriptors of old and new protobuf."""
    # protobuf 6 added `FieldDescriptor.is_repeated`; protobuf 7 removed `FieldDescriptor.label`.
    repeated = getattr(field, "is_repeated", None)
    return bool(field.label == field.LABEL_REPEATED if repeated is None else repeated)


@cache
def messages() -> list[Any]:
    """The descriptors of ModelProto and of every message below it."""
    descriptors = [onnx.ModelProto.DESCRIPTOR]
    for message in descriptors:  # grows meanwhile
        below = (field.message_type for field in message.fields if field.message_type)
        descriptors += [kind for kind in dict.fromkeys(below) if kind not in descriptors]
    return descriptors
