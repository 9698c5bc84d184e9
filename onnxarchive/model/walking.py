"""Walks over the messages of a model, and yields those of one type with their paths.

The descriptors of ONNX's protos (`schema`) give the fields that the walk enters, so the walk misses
no tensor or graph in a field that the installed onnx knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from onnxarchive.model import schema

if TYPE_CHECKING:
    import onnx
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
    fields = schema.fields_to(kind)
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
    """Those of `fields` that a message has, but for one."""
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
