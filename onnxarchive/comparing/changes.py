"""Compares two messages of models; matches the messages in two lists by name or by index.

External tensors are compared by data type, shape and location, not by bytes. So callers must set
different locations for different bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field as dataclass_field, replace
from itertools import takewhile
from operator import eq
from typing import Any, Final, Literal

import onnx
from google.protobuf.message import Message

from onnxarchive.comparing.values import ValueChange
from onnxarchive.model import walking
from onnxarchive.model.copying import unknown_fields
from onnxarchive.model.serialization import serialize
from onnxarchive.model.tensors import text
from onnxarchive.model.wording import describe, describe_values, type_as_data

_MAX_LISTED: Final = 16  # of longer lists, only the first difference is described
_MAX_AROUND: Final = 50  # characters at either end of the name of a part around a change

# Message types whose fields are compared only if `describe` shows no difference.
_DESCRIBED: Final = (
    onnx.OperatorSetIdProto,
    onnx.StringStringEntryProto,
    onnx.TensorProto,
    onnx.TypeProto,
    onnx.ValueInfoProto,
)
# Lists whose order has a meaning: `field_changes` matches their elements by index.
_POSITIONAL: Final = frozenset({"graphs", "input", "output", "sparse_tensors", "tensors"})


@dataclass(frozen=True, slots=True)
class Change:
    """A difference of two archives: an added, removed or changed model, asset or model part.

    Attributes:
        name: Id of a model; path of an asset; name of a tensor, input, field or node; first output
            of a node without a name; index of other parts, such as `training_info[0]`. The name of
            a nested field begins with the names of the parts around it, each cut to about 100
            characters: `attribute then_branch: g: node y: op_type`.
        before: Description of the part in the first archive; None if it is missing there.
        after: Description of the part in the other archive; None if it is missing there.
        parts: The fields that differ; empty if `before` and `after` show the difference.
        before_type: Type and shape of an input, output, value or tensor in the first archive, as
            `diff --json` prints them (see the guide); None for other changes. It is not compared.
        after_type: The same in the other archive.
        values: How far the elements of a tensor differ, if `diff` was called with `values`; else
            None.

    Example:
        for change in onnxarchive.diff("model.onnxa", "other.onnxa").sections["tensors"]:
            print(change.name, change.before, change.after)
    """

    name: str
    before: str | None
    after: str | None
    parts: tuple[Change, ...] = ()
    before_type: Mapping[str, Any] | None = dataclass_field(default=None, compare=False, repr=False)
    after_type: Mapping[str, Any] | None = dataclass_field(default=None, compare=False, repr=False)
    values: ValueChange | None = None

    @property
    def kind(self) -> Literal["added", "removed", "changed"]:
        """The kind of change from the first archive to the other."""
        if self.before is None:
            return "added"
        return "removed" if self.after is None else "changed"


def list_changes(field: str, one: Message, other: Message) -> Iterator[Change]:
    """The changes between the lists of messages in a field, matched by name; additions are last."""
    ones, others = (_by_name(field, getattr(message, field)) for message in (one, other))
    names = {**ones, **others}
    changes = (_message_change(name, ones.get(name), others.get(name)) for name in names)
    return filter(None, changes)


def field_changes(one: Message, other: Message) -> Iterator[Change]:
    """Yields the changes of fields between two messages of the same type; enters submessages."""
    values, others = (dict(_values(message)) for message in (one, other))
    for name in {**values, **others}:
        before, after = values.get(name), others.get(name)
        if not (isinstance(before, Message) or isinstance(after, Message)):
            yield from value_changes(name, before or (), after or ())
            continue
        change = _message_change(name, before, after)
        if change is not None and change.parts:
            if len(name) > 2 * _MAX_AROUND:  # all changes within the part repeat its name
                name = f"{name[:_MAX_AROUND]}...{name[-_MAX_AROUND:]}"
            yield from (replace(part, name=f"{name}: {part.name}") for part in change.parts)
        elif change is not None:
            yield change


def _message_change(name: str, one: Message | None, other: Message | None) -> Change | None:
    """The change of a message, whose parts are the fields that differ; None if there is none."""
    if one is not None and other is not None and serialize(one) == serialize(other):
        return None
    before, after = (None if message is None else describe(message) for message in (one, other))
    types = type_as_data(one), type_as_data(other)
    if one is None or other is None or (isinstance(one, _DESCRIBED) and before != after):
        return Change(name, before, after, (), *types)
    parts = tuple(field_changes(one, other))
    return Change(name, before, after, parts, *types) if parts else None


def value_changes(name: str, ones: Sequence[Any], others: Sequence[Any]) -> Iterator[Change]:
    """Yields a change if two lists of numbers or strings differ.

    If a list is long, the change describes only the first difference.
    """
    # `repr` distinguishes -0.0 from 0.0, and gives equal strings for NaN.
    before, after = [*map(repr, ones)], [*map(repr, others)]
    if before != after:
        is_long = max(len(ones), len(others)) > _MAX_LISTED
        index = sum(takewhile(bool, map(eq, before, after))) if is_long else None
        texts = [describe_values(values, index) if values else None for values in (ones, others)]
        yield Change(name, texts[0], texts[1])


def _values(message: Message) -> Iterator[tuple[str, Any]]:
    """Yields name and value of each field, and of each message in a repeated field.

    Fields that hold their default value are left out, except in a oneof.
    """
    for field, value in message.ListFields():
        if field.message_type and walking.is_repeated(field):
            yield from _by_name(field.name, value, f"{field.name} ").items()
        elif field.message_type or walking.is_repeated(field):
            yield field.name, value
        elif field.containing_oneof or repr(value) != repr(field.default_value):
            names = field.enum_type.values_by_number if field.enum_type else {}
            yield field.name, [names[value].name if value in names else value]
    unknown = unknown_fields(message)
    yield "unknown fields", [unknown] if unknown else []


def _by_name(field: str, messages: Iterable[Message], prefix: str = "") -> dict[str, Message]:
    """The messages by name: `x`, a second `x` is `x[1]`, an unnamed node is `node[0]`."""
    counts: Counter[str] = Counter()
    named: dict[str, Message] = {}
    for message in messages:
        name = "" if prefix and field in _POSITIONAL else _name(message)
        key = f"{prefix}{name}" if name else field
        if counts[name] or not name:
            key += f"[{counts[name]}]"
        while key in named:  # another message has this name
            key += "'"
        named[key] = message
        counts[name] += 1
    return named


def _name(message: Any) -> str:
    if isinstance(message, onnx.NodeProto):
        return text(message.name or next(filter(None, message.output), ""))
    if isinstance(message, onnx.OperatorSetIdProto):
        return text(message.domain) or "ai.onnx"
    if isinstance(message, onnx.FunctionProto):
        return "::".join(map(text, filter(None, (message.domain, message.name, message.overload))))
    if isinstance(message, onnx.SparseTensorProto):
        return text(message.values.name)
    if isinstance(message, onnx.TensorAnnotation):
        return text(message.tensor_name)
    name = getattr(message, "name", "") or getattr(message, "key", "")
    return "" if isinstance(name, int) else text(name)
