"""Walks over the messages of a model, and yields those of one type with their paths.

The fields that the walk enters come from the descriptors of ONNX's protos, so the walk misses no
tensor or graph in a field that the installed onnx knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import onnx

if TYPE_CHECKING:
    from google.protobuf.message import Message

Path: TypeAlias = tuple[tuple[str, int | None], ...]
"""The fields from a model to a message in it, each with an index if the field is repeated."""

MAIN_GRAPH: Final[Path] = (("graph", None),)


def below(
    message: Message, path: Path, kind: Any, *, without: str = ""
) -> Iterator[tuple[Path, Message]]:
    """Yields every message of one type below `message`, with its path, depth first.

    Subgraphs may be nested to any depth: the walk is not recursive, and memory grows with depth.

    Args:
        message: The message.
        path: Its path.
        kind: Descriptor of the type.
        without: A field of `message` that is not entered.
    """
    fields = fields_to(kind)
    steps = list(path)
    stack = [_children(message, _present(message, fields[message.DESCRIPTOR], without))]
    while stack:
        for step, child in stack[-1]:
            if child.DESCRIPTOR is kind:
                yield (*steps, step), child
            present = _present(child, fields[child.DESCRIPTOR])
            if present:  # most attributes have none
                steps.append(step)
                stack.append(_children(child, present))
                break
        else:
            stack.pop()
            if stack:
                steps.pop()


def _present(
    message: Message, fields: list[tuple[str, bool]], without: str = ""
) -> list[tuple[str, bool]]:
    """The fields among `fields` that a message has, except one."""
    present = []
    for field in fields:
        name, is_repeated = field
        if name != without and (getattr(message, name) if is_repeated else message.HasField(name)):
            present.append(field)
    return present


def _children(
    message: Message, fields: list[tuple[str, bool]]
) -> Iterator[tuple[tuple[str, int | None], Message]]:
    for name, is_repeated in fields:
        if is_repeated:
            for index, child in enumerate(getattr(message, name)):
                yield (name, index), child
        else:
            yield (name, None), getattr(message, name)


def at(model: onnx.ModelProto, path: Path) -> Any:
    """The message at a path."""
    message: Any = model
    for field, index in path:
        message = getattr(message, field)
        if index is not None:
            message = message[index]
    return message


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
