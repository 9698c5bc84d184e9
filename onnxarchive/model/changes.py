"""In what two messages of models differ, and what in one list is the same thing as in another.

The bytes of a tensor that has a location are not looked at: such tensors are the same if their
types, shapes and locations are. So who compares models first sets locations that tell bytes apart.
"""

from __future__ import annotations

import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import onnx
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from onnxarchive.model import dtypes, schema, tensors, walking, wording
from onnxarchive.model.tensors import text
from onnxarchive.model.walking import Path

# Indices in a list of the other model, and those in the same list of the first.
Pairs: TypeAlias = dict[int, int]

# Lists of values that are given and taken by their position.
_POSITIONAL: Final = ("input", "output")
# Messages of which a text tells all, or nearly.
_TOLD_WHOLLY: Final = (
    onnx.OperatorSetIdProto,
    onnx.StringStringEntryProto,
    onnx.TypeProto,
)
# Fields of an attribute of which a text does not.
_WITH_TENSORS: Final = ("t", "g", "sparse_tensor", "tensors", "graphs", "sparse_tensors")


@dataclass(frozen=True, slots=True)
class Change:
    """A thing that one of two archives lacks, or that differs in them.

    Attributes:
        name: Its name: a node's, a tensor's, an input's, a field's, the path of an asset. What has
            no name, or shares it, goes by its place: `node[3]`, `graph.node[3].attribute[0].t`.
        before: What it is in the first archive, as text; None where that lacks it.
        after: What it is in the other one; None where that lacks it.
        parts: What differs in it, where it has parts and both archives have it.
    """

    name: str
    before: str | None
    after: str | None
    parts: tuple[Change, ...] = ()

    @property
    def kind(self) -> Literal["added", "removed", "changed"]:
        """What became of it from the first archive to the other one."""
        if self.before is None:
            return "added"
        return "removed" if self.after is None else "changed"


def list_changes(
    field: str,
    ones: Sequence[Message],
    others: Sequence[Message],
    *,
    pairs: Pairs | None = None,
    prefix: str = "",
) -> tuple[Change, ...]:
    """What differs in two lists of messages, in the order of the first and then of the other one.

    Args:
        field: The field that they are of.
        ones: The list of the first model.
        others: The list of the other one.
        pairs: How they are paired, where that is known.
        prefix: What stands before a name.
    """
    if pairs is None:
        pairs = _pair(field, ones, others)
    other_indices = {index: other_index for other_index, index in pairs.items()}
    names, other_names = _names(field, ones, prefix), _names(field, others, prefix)
    shared = {
        name for it in (names, other_names) for name, count in Counter(it).items() if count > 1
    }
    found: list[Change] = []
    for index, message in enumerate(ones):
        name = _place(field, index) if names[index] in shared else names[index]
        if index in other_indices:
            found += message_changes(name, message, others[other_indices[index]])
        else:
            found.append(Change(name, wording.told(message), None))
    for index, message in enumerate(others):
        if index not in pairs:
            name = _place(field, index) if other_names[index] in shared else other_names[index]
            found.append(Change(name, None, wording.told(message)))
    return tuple(found)


def _names(field: str, messages: Sequence[Message], prefix: str) -> list[str]:
    """What the elements of a list are known by, or their places where that is nothing."""
    if field not in _KNOWN_BY:
        return [_place(field, index) for index in range(len(messages))]
    found = []
    for index, message in enumerate(messages):
        key: Any = _KNOWN_BY[field](message)
        known = "::".join(map(text, filter(None, key))) if isinstance(key, tuple) else text(key)
        found.append(f"{prefix}{known}" if known else _place(field, index))
    return found


def _place(field: str, index: int) -> str:
    return f"{field}[{index}]"


def message_changes(name: str, one: Message, other: Message) -> Iterator[Change]:
    """The change from one message to another of its type, if there is one.

    Args:
        name: What the change is called.
        one: The message of the first model.
        other: That of the other one.
    """
    if _serialized(one) == _serialized(other):
        return
    parts = _parts(one, other)
    if parts:
        before, after = wording.told(one), wording.told(other)
        is_seen = before != after and _is_told_wholly(one) and _is_told_wholly(other)
        yield Change(name, before, after, () if is_seen else parts)


def _is_told_wholly(message: Message) -> bool:
    if isinstance(message, onnx.AttributeProto):
        return not any(tensors.has_field(message, field) for field in _WITH_TENSORS)
    return isinstance(message, _TOLD_WHOLLY)


def _parts(one: Message, other: Message) -> tuple[Change, ...]:
    """What differs in two messages of a type; nothing if only the order does of what has names."""
    if isinstance(one, onnx.TensorProto) and isinstance(other, onnx.TensorProto):
        return tuple(_tensor_parts(one, other))
    if isinstance(one, onnx.GraphProto) and isinstance(other, onnx.GraphProto):
        return (*field_changes(one, other), *order_changes(one, other))
    found = tuple(field_changes(one, other))
    if isinstance(one, onnx.AttributeProto) and len(found) == 1 and found[0].name in ("t", "g"):
        return found[0].parts or found  # of what the attribute is, and nothing else
    return found


def _tensor_parts(one: onnx.TensorProto, other: onnx.TensorProto) -> Iterator[Change]:
    described = (
        ("type", dtypes.name_of(one.data_type), dtypes.name_of(other.data_type)),
        ("shape", wording.told_dims(one.dims), wording.told_dims(other.dims)),
        ("data", tensors.location(one), tensors.location(other)),
    )
    for name, before, after in described:
        if before != after:
            yield Change(name, before, after)
    described_fields = frozenset({"data_location", "data_type", "dims", "external_data"})
    yield from field_changes(one, other, without=described_fields)


def order_changes(one: onnx.GraphProto, other: onnx.GraphProto) -> Iterator[Change]:
    """The changes of the order of inputs and of outputs that two graphs have in common.

    Args:
        one: The graph of the first model.
        other: That of the other one.
    """
    for field in _POSITIONAL:
        names = [value.name for value in getattr(one, field)]
        other_names = [value.name for value in getattr(other, field)]
        known, other_known = {*names}, {*other_names}
        before = [name for name in names if name in other_known]
        after = [name for name in other_names if name in known]
        if sorted(map(text, before)) == sorted(map(text, after)) and before != after:
            told, other_told = wording.told_scalars(before), wording.told_scalars(after)
            yield Change(f"order of {field}s", told, other_told)


def field_changes(
    one: Message, other: Message, *, without: frozenset[str] = frozenset()
) -> Iterator[Change]:
    """What differs in two messages of a type, field by field.

    Args:
        one: The message of the first model.
        other: That of the other one.
        without: Names of fields that are left out.
    """
    for field in one.DESCRIPTOR.fields:
        name = field.name
        if name in without:
            continue
        value, other_value = getattr(one, name), getattr(other, name)
        if schema.is_repeated(field):
            if field.message_type:
                yield from list_changes(name, value, other_value, prefix=f"{name} ")
            else:
                yield from _listed(name, value, other_value)
            continue
        is_set, is_other_set = one.HasField(name), other.HasField(name)
        if field.message_type:
            if is_set and is_other_set:
                yield from message_changes(name, value, other_value)
            elif is_set or is_other_set:
                before, after = wording.told(value), wording.told(other_value)
                yield Change(name, before if is_set else None, after if is_other_set else None)
        elif _bits(value) != _bits(other_value) or (
            field.containing_oneof and is_set != is_other_set
        ):
            before = wording.told_scalar(value, field)
            after = wording.told_scalar(other_value, field)
            yield Change(name, before if is_set else None, after if is_other_set else None)
    unknown, other_unknown = _values(UnknownFieldSet(one)), _values(UnknownFieldSet(other))
    if unknown != other_unknown:
        told, other_told = wording.told_unknown(unknown), wording.told_unknown(other_unknown)
        yield Change("unknown fields", told, other_told)


def _listed(name: str, values: Sequence[Any], others: Sequence[Any]) -> Iterator[Change]:
    """The change from one list of numbers or strings to another."""
    before, after = [*map(_bits, values)], [*map(_bits, others)]
    if before == after:
        return
    index = None
    if max(len(before), len(after)) > wording.MAX_LISTED:
        pairs = enumerate(zip(before, after, strict=False))
        index = next((at for at, (it, other) in pairs if it != other), min(len(before), len(after)))
    yield Change(name, wording.told_elements(values, index), wording.told_elements(others, index))


def _bits(value: Any) -> Any:
    """A number or string, so that two are equal only if their bits are."""
    return struct.pack("<d", value) if isinstance(value, float) else value


def _values(unknown: Any) -> tuple[Any, ...]:
    """Fields that this version of onnx does not know: number, wire type, and value."""
    values = []
    for field in unknown:
        is_group = isinstance(field.data, UnknownFieldSet)
        value = _values(field.data) if is_group else field.data
        values.append((field.field_number, field.wire_type, value))
    return tuple(values)


def _full_domain(domain: str | bytes) -> str | bytes:
    return domain or "ai.onnx"  # the one domain that has two names


# By what an element of a list is known. Those of other lists are known by their index.
_KNOWN_BY: Final[Mapping[str, Callable[[Any], Hashable]]] = {
    "attribute": lambda attribute: attribute.name,
    "attribute_proto": lambda attribute: attribute.name,
    "functions": lambda it: (_full_domain(it.domain), it.name, it.overload),
    "initialization_binding": lambda pair: pair.key,
    "initializer": lambda tensor: tensor.name,
    "input": lambda value: value.name,
    "metadata_props": lambda pair: pair.key,
    "node": lambda node: node.name,
    "opset_import": lambda opset: _full_domain(opset.domain),
    "output": lambda value: value.name,
    "quant_parameter_tensor_names": lambda pair: pair.key,
    "quantization_annotation": lambda annotation: annotation.tensor_name,
    "sparse_initializer": lambda sparse: sparse.values.name,
    "update_binding": lambda pair: pair.key,
    "value_info": lambda value: value.name,
}


def _pair(field: str, ones: Sequence[Any], others: Sequence[Any]) -> Pairs:
    """Pairs the elements of two lists of a field, in time in proportion to their number."""
    if field == "node":
        return _pair_nodes(ones, others)
    if field not in _KNOWN_BY:
        return {index: index for index in range(min(len(ones), len(others)))}
    key = _KNOWN_BY[field]
    return _pair_by(
        {index: key(message) for index, message in enumerate(ones)},
        {index: key(message) for index, message in enumerate(others)},
    )


def _pair_by(
    ones: Mapping[int, Hashable], others: Mapping[int, Hashable], *, only_unique: bool = False
) -> Pairs:
    """Pairs what has the same key, the first with the first, the second with the second.

    Args:
        ones: The key of each index; what has None is left over.
        others: The same of the other list.
        only_unique: Whether to leave over what shares its key with another of its list.
    """
    pairs: Pairs = {}
    places = _by_key(ones)
    for key, indices in _by_key(others).items():
        found = places.get(key, [])
        if not only_unique or len(found) == len(indices) == 1:
            pairs.update(zip(indices, found, strict=False))
    return pairs


def _by_key(keys: Mapping[int, Hashable]) -> dict[Hashable, list[int]]:
    indices: dict[Hashable, list[int]] = defaultdict(list)
    for index, key in keys.items():
        if key is not None:
            indices[key].append(index)
    return indices


def _node_name(node: onnx.NodeProto) -> Hashable:
    return node.name or None


def _first_output(node: onnx.NodeProto) -> Hashable:
    return next((name for name in node.output if name), None)


def _operator(node: onnx.NodeProto) -> tuple[Hashable, ...]:
    return _full_domain(node.domain), node.op_type, node.overload


def _operator_and_first_output(node: onnx.NodeProto) -> Hashable:
    output = _first_output(node)
    return None if output is None else (_operator(node), output)


def _operator_and_inputs(node: onnx.NodeProto) -> Hashable:
    return _operator(node), tuple(node.input)


def _all_but_outputs(node: onnx.NodeProto) -> Hashable:
    return _operator(node), tuple(node.input), tuple(map(_serialized, node.attribute))


def _serialized(message: Message) -> bytes:
    return message.SerializeToString(deterministic=True)


# In what nodes are alike, the surest sign first, and whether it has to be that of one node alone.
_LIKENESSES: Final[tuple[tuple[Callable[[Any], Hashable], bool], ...]] = (
    (_serialized, False),
    (_node_name, True),
    (_operator_and_first_output, True),
    (_all_but_outputs, False),
    (_first_output, True),
    (_operator_and_inputs, True),
)


def _pair_nodes(ones: Sequence[onnx.NodeProto], others: Sequence[onnx.NodeProto]) -> Pairs:
    """Pairs nodes by one likeness after the other."""
    left, other_left = dict(enumerate(ones)), dict(enumerate(others))
    pairs: Pairs = {}
    for likeness, only_unique in _LIKENESSES:
        found = _pair_by(
            {index: likeness(node) for index, node in left.items()},
            {index: likeness(node) for index, node in other_left.items()},
            only_unique=only_unique,
        )
        for other_index, index in found.items():
            del left[index], other_left[other_index]
        pairs |= found
    return pairs


class Places:
    """Where in one model is what is at a place in another, with lists paired one by one.

    Args:
        one: The one model.
        other: The other one.
    """

    def __init__(self, one: onnx.ModelProto, other: onnx.ModelProto) -> None:
        self._one = one
        self._other = other
        self._counterparts: dict[Path, Path | None] = {(): ()}
        self._indices: dict[tuple[Path, str], Pairs] = {}

    def counterpart(self, path: Path) -> Path | None:
        """The path in the one model to what is at `path` in the other; None where it lacks that."""
        if path not in self._counterparts:
            above, (field, index) = path[:-1], path[-1]
            parent = self.counterpart(above)
            if parent is not None and index is not None:
                index = self.indices(above, field).get(index)
                parent = None if index is None else parent
            self._counterparts[path] = None if parent is None else (*parent, (field, index))
        return self._counterparts[path]

    def indices(self, path: Path, field: str) -> Pairs:
        """The pairs of a list of the message at `path` in the other model, which both have."""
        if (path, field) not in self._indices:
            counterpart = self.counterpart(path)
            assert counterpart is not None  # else nobody asks
            one, other = walking.at(self._one, counterpart), walking.at(self._other, path)
            self._indices[path, field] = _pair(field, getattr(one, field), getattr(other, field))
        return self._indices[path, field]
