"""In what two archives differ: graph, tensors, assets, and what else a model says.

A tensor's content is its type, its shape, and the size and CRC-32 of its bytes, which the directory
of an archive has: weights are not read unless that is asked for. Both models are copied without
their tensors' bytes, with that content in the place of the location. So wherever a tensor stands,
messages are equal if their tensors are, and keys make no difference.
"""

from __future__ import annotations

import itertools
import math
import os
import struct
from collections import Counter as Multiset
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import onnx
from google.protobuf import text_format
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from onnxarchive.archive import Archive, open
from onnxarchive.errors import ArchiveFormatError, naming, shown
from onnxarchive.model import dtypes, schema, tensors
from onnxarchive.model.keys import ASSET_PREFIX, MODEL_PROTO
from onnxarchive.model.tensors import Path, Site, text
from onnxarchive.zipformat import writer
from onnxarchive.zipformat.writer import Counter, Progress

# Indices in a list of the other model, and those in the same list of the first.
_Pairs: TypeAlias = dict[int, int]
# Gives bytes of a tensor or an entry: an offset and how many.
_Read: TypeAlias = Callable[[int, int], bytes]

_PIECE_SIZE: Final = 2 << 20  # bytes of each archive at a time; four such are in memory
_MAX_LISTED: Final = 16  # numbers or strings of a list that are shown
_GRAPH: Final[Path] = (("graph", None),)


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


@dataclass(frozen=True, slots=True)
class Difference:
    """In what two archives differ.

    Each list has what the first archive has and the other lacks or has otherwise, in the order of
    the first, and then what only the other has, in its order.

    Attributes:
        path: The first archive.
        other: The other one.
        nodes: Nodes of the main graph, each with what is in its subgraphs.
        inputs: Inputs of the main graph: their types and shapes.
        outputs: Outputs of the main graph.
        values: What the main graph says of the values in it (`value_info`).
        opsets: The imported operator sets by domain.
        metadata: The model's metadata (`metadata_props`) by key.
        fields: What else the model and its graph say: `ir_version`, `producer_name`,
            `graph.doc_string` and so on, and the order of inputs and outputs.
        functions: Functions by domain and name.
        training: Steps of training (`training_info`).
        tensors: Tensors wherever they stand, in the model and outside. Those of a node, a function
            or a step of training are also a change of that.
        assets: Assets by path.
        layout: In what way the same things are held differently, which is no difference of the
            model: `"alignment 64 and 4096"`, `"1 tensor under another key"`.
    """

    path: str
    other: str
    nodes: tuple[Change, ...]
    inputs: tuple[Change, ...]
    outputs: tuple[Change, ...]
    values: tuple[Change, ...]
    opsets: tuple[Change, ...]
    metadata: tuple[Change, ...]
    fields: tuple[Change, ...]
    functions: tuple[Change, ...]
    training: tuple[Change, ...]
    tensors: tuple[Change, ...]
    assets: tuple[Change, ...]
    layout: tuple[str, ...]

    @property
    def sections(self) -> Mapping[str, tuple[Change, ...]]:
        """Every list of changes by the name of its attribute."""
        return {name: getattr(self, name) for name in _SECTIONS}

    @property
    def is_same(self) -> bool:
        """Whether both archives hold the same model, weights and assets."""
        return not any(self.sections.values())

    @property
    def is_same_layout(self) -> bool:
        """Whether what both archives hold is held in the same way."""
        return not self.layout


_SECTIONS: Final = (
    "nodes",
    "inputs",
    "outputs",
    "values",
    "opsets",
    "metadata",
    "fields",
    "functions",
    "training",
    "tensors",
    "assets",
)


def diff(
    path: str | os.PathLike[str],
    other: str | os.PathLike[str],
    *,
    full: bool = False,
    progress: Progress | None = None,
) -> Difference:
    """Compares two archives by what they hold, and not by how they hold it.

    No weight is read: tensors outside the models are compared by the size and CRC-32 that the
    directories have. Nodes that are not the same are matched by their names, where a name is that
    of one node, then by what they give out and take. Neither the order of nodes, attributes and
    initializers nor the keys and places of tensors make a difference.

    Args:
        path: An archive.
        other: The one to compare it with.
        full: Whether to compare the bytes of what has the same CRC-32, too. They are read a few
            MiB at a time. Whether they are those that the CRC-32 is of, is left to
            `Archive.verify`.
        progress: Called with the bytes done and the bytes in all, under `full`.

    Raises:
        ArchiveFormatError: One of the files is not an archive, or breaks a rule.
        UnfinishedEditError: A change of one of them was cut off.
        OSError: One cannot be opened or read.
    """
    with open(path) as archive, open(other) as other_archive:
        one, two = _Side(archive), _Side(other_archive)
        pairs = _pair_tensors(one, two)
        if full:
            _compare_bytes(one, two, pairs, progress)
        return _difference(one, two, pairs)


class _Side:
    """One of the archives, and its model with the contents of tensors as their locations.

    Attributes:
        archive: The archive.
        sites: Its tensors by their paths, in the order of the model.
        keys: The key of each tensor that is outside the model.
        contents: What is compared of the bytes of a tensor. Those of which this cannot be told,
            such as strings, are compared field by field.
        names: How many initializers have each name.
        model: The model with these contents as the locations of its tensors.
        assets: What is compared of the bytes of each asset, by the name of its entry.
    """

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        self.sites = {site.path: site for site in tensors.walk(archive.model)}
        self.keys = {site.path: key for key, site in archive.sites.items()}
        self.contents: dict[Path, str] = {}
        for path, site in self.sites.items():
            content = self._content(site)
            if content is not None:
                self.contents[path] = content
        self.names = Multiset(
            site.tensor.name for site in self.sites.values() if site.is_initializer
        )
        self.model = tensors.with_locations(archive.model, self.contents)
        self.assets = {
            name: _told_content(entry.nbytes, entry.crc32)
            for name, entry in archive.entries.items()
            if name.startswith(ASSET_PREFIX)
        }

    def _content(self, site: Site) -> str | None:
        if site.path in self.keys:
            entry = self.archive.entries[self.keys[site.path]]
            return _told_content(entry.nbytes, entry.crc32)
        if tensors.stored_type(site.tensor) is None:
            return None
        try:
            data = tensors.raw_data(site)
        except ArchiveFormatError:  # it holds more or less than its shape says
            return None
        return _told_content(data.nbytes, writer.crc32(data))

    def nbytes(self, path: Path) -> int:
        """Size in bytes of a tensor that has a content."""
        tensor = self.sites[path].tensor
        return dtypes.BY_NUMBER[tensor.data_type].nbytes(tensor.dims)

    def tensor(self, path: Path) -> onnx.TensorProto:
        """A tensor, with its content as its location."""
        return tensors.at(self.model, path)

    def reader(self, path: Path) -> _Read:
        """Reads the bytes of a tensor that has a content."""
        if path in self.keys:
            return self.entry_reader(self.keys[path])
        data = tensors.raw_data(self.sites[path])
        return lambda offset, size: bytes(data[offset : offset + size])

    def entry_reader(self, name: str) -> _Read:
        """Reads the bytes of an entry, not through the map: a file that is cut makes no fault.

        Raises:
            ArchiveFormatError: The entry's local header does not match the directory.
        """
        self.archive.read(name)
        entry = self.archive.entries[name]

        def read(offset: int, size: int) -> bytes:
            data = self.archive.file.read(entry.data_offset + offset, size)
            if len(data) < size:
                with naming(self.archive.path):
                    raise ArchiveFormatError(
                        f"entry {shown(name)}: expected {entry.nbytes} bytes, found "
                        f"{offset + len(data)}; the file has become shorter since it was opened",
                        entry=name,
                    )
            return data

        return read


def _told_content(nbytes: int, crc32: int) -> str:
    return f"{nbytes:,} bytes, CRC-32 {crc32:#010x}"


@dataclass(frozen=True, slots=True)
class _Pairing:
    """What in one model is the same thing as in the other.

    Attributes:
        tensors: Paths of tensors in the other model, and in the first.
        nodes: Indices of nodes of the main graph in the other model, and in the first.
    """

    tensors: Mapping[Path, Path]
    nodes: _Pairs


def _pair_tensors(one: _Side, other: _Side) -> _Pairing:
    """Pairs tensors by their places, and initializers that went to another graph by their names."""
    places = _Places(one.model, other.model)
    pairs: dict[Path, Path] = {}
    for path in other.sites:
        counterpart = places.counterpart(path)
        if counterpart is not None and counterpart in one.sites:
            pairs[path] = counterpart
    paired = {*pairs.values()}
    by_name = {
        site.tensor.name: path
        for path, site in one.sites.items()
        if path not in paired and site.is_initializer and one.names[site.tensor.name] == 1
    }
    for path, site in other.sites.items():
        name = site.tensor.name
        if path not in pairs and site.is_initializer and other.names[name] == 1 and name in by_name:
            pairs[path] = by_name[name]
    return _Pairing(pairs, places.indices(_GRAPH, "node"))


class _Places:
    """Where in one model is what is at a place in another, with lists paired one by one."""

    def __init__(self, one: onnx.ModelProto, other: onnx.ModelProto) -> None:
        self._one = one
        self._other = other
        self._counterparts: dict[Path, Path | None] = {(): ()}
        self._indices: dict[tuple[Path, str], _Pairs] = {}

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

    def indices(self, path: Path, field: str) -> _Pairs:
        """The pairs of a list of the message at `path` in the other model, which both have."""
        if (path, field) not in self._indices:
            counterpart = self.counterpart(path)
            assert counterpart is not None  # else nobody asks
            one, other = tensors.at(self._one, counterpart), tensors.at(self._other, path)
            self._indices[path, field] = _pair(field, getattr(one, field), getattr(other, field))
        return self._indices[path, field]


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


def _pair(field: str, ones: Sequence[Any], others: Sequence[Any]) -> _Pairs:
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
) -> _Pairs:
    """Pairs what has the same key, the first with the first, the second with the second.

    Args:
        ones: The key of each index; what has None is left over.
        others: The same of the other list.
        only_unique: Whether to leave over what shares its key with another of its list.
    """
    pairs: _Pairs = {}
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


def _pair_nodes(ones: Sequence[onnx.NodeProto], others: Sequence[onnx.NodeProto]) -> _Pairs:
    """Pairs nodes by one likeness after the other."""
    left, other_left = dict(enumerate(ones)), dict(enumerate(others))
    pairs: _Pairs = {}
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


def _compare_bytes(one: _Side, other: _Side, pairs: _Pairing, progress: Progress | None) -> None:
    """Compares the bytes of what has the same content, and adds to that where they differ."""
    paths = [
        (path, other_path)
        for other_path, path in pairs.tensors.items()
        if path in one.contents and one.contents[path] == other.contents.get(other_path)
    ]
    names = [name for name, content in one.assets.items() if other.assets.get(name) == content]
    entries = one.archive.entries
    total = sum(one.nbytes(path) for path, _ in paths) + sum(entries[it].nbytes for it in names)
    counter = Counter(progress, total)
    for path, other_path in paths:
        read, other_read = one.reader(path), other.reader(other_path)
        found = _first_unequal_byte(read, other_read, one.nbytes(path), counter)
        if found is not None:
            for side, place, byte in zip((one, other), (path, other_path), found, strict=True):
                tensors.set_location(side.tensor(place), f"{side.contents[place]}, {byte}")
    for name in names:
        read, other_read = one.entry_reader(name), other.entry_reader(name)
        found = _first_unequal_byte(read, other_read, entries[name].nbytes, counter)
        if found is not None:
            for side, byte in zip((one, other), found, strict=True):
                side.assets[name] += f", {byte}"


def _first_unequal_byte(
    read: _Read, other: _Read, nbytes: int, counter: Counter
) -> tuple[str, str] | None:
    """What the first byte that differs is on each side, as text; None where none differs."""
    for offset in range(0, nbytes, _PIECE_SIZE):
        size = min(_PIECE_SIZE, nbytes - offset)
        piece, other_piece = read(offset, size), other(offset, size)
        if piece != other_piece:
            counter.add(nbytes - offset)
            unequal = np.frombuffer(piece, np.uint8) != np.frombuffer(other_piece, np.uint8)
            index = int(unequal.argmax())
            where = f"at byte {offset + index:,}"
            return f"{piece[index]:#04x} {where}", f"{other_piece[index]:#04x} {where}"
        counter.add(size)
    return None


def _difference(one: _Side, other: _Side, pairs: _Pairing) -> Difference:
    model, other_model = one.model, other.model
    graph, other_graph = model.graph, other_model.graph
    found = Difference(
        one.archive.path,
        other.archive.path,
        nodes=_changes("node", graph.node, other_graph.node, pairs=pairs.nodes),
        inputs=_changes("input", graph.input, other_graph.input),
        outputs=_changes("output", graph.output, other_graph.output),
        values=_changes("value_info", graph.value_info, other_graph.value_info),
        opsets=_changes("opset_import", model.opset_import, other_model.opset_import),
        metadata=_changes("metadata_props", model.metadata_props, other_model.metadata_props),
        fields=tuple(_changed_fields(model, other_model)),
        functions=_changes("functions", model.functions, other_model.functions),
        training=_changes("training_info", model.training_info, other_model.training_info),
        tensors=tuple(_changed_tensors(one, other, pairs)),
        assets=tuple(_changed_assets(one, other)),
        layout=tuple(_layout(one, other, pairs)),
    )
    if found.is_same and found.is_same_layout:
        entries = [side.archive.entries[MODEL_PROTO] for side in (one, other)]
        if len({(entry.nbytes, entry.crc32) for entry in entries}) > 1:
            return replace(found, layout=("the bytes of the model",))
    return found


# What has an attribute of its own in `Difference`.
_OF_MODEL: Final = frozenset(
    {"functions", "graph", "metadata_props", "opset_import", "training_info"}
)
_OF_GRAPH: Final = frozenset({"initializer", "input", "node", "output", "value_info"})


def _changed_fields(model: onnx.ModelProto, other: onnx.ModelProto) -> Iterator[Change]:
    yield from _fields(model, other, without=_OF_MODEL)
    for change in _fields(model.graph, other.graph, without=_OF_GRAPH):
        yield replace(change, name=f"graph.{change.name}")
    for field in _POSITIONAL:
        yield from _order(field, getattr(model.graph, field), getattr(other.graph, field))


def _changed_tensors(one: _Side, other: _Side, pairs: _Pairing) -> Iterator[Change]:
    def name(site: Site) -> str:
        is_named = site.is_initializer and site.name != ""
        is_one = all(side.names[site.tensor.name] < 2 for side in (one, other))
        return site.name if is_named and is_one else site.where

    others = {path: other_path for other_path, path in pairs.tensors.items()}
    for path, site in one.sites.items():
        if path in others:
            yield from _change(name(site), one.tensor(path), other.tensor(others[path]))
        else:
            yield Change(name(site), _told(one.tensor(path)), None)
    for path, site in other.sites.items():
        if path not in pairs.tensors:
            yield Change(name(site), None, _told(other.tensor(path)))


def _changed_assets(one: _Side, other: _Side) -> Iterator[Change]:
    for name in one.assets | other.assets:
        before, after = one.assets.get(name), other.assets.get(name)
        if before != after:
            yield Change(name.removeprefix(ASSET_PREFIX), before, after)


def _layout(one: _Side, other: _Side, pairs: _Pairing) -> Iterator[str]:
    """In what way the archives hold differently what both have."""
    alignment, other_alignment = one.archive.alignment, other.archive.alignment
    if alignment != other_alignment:
        yield f"alignment {alignment} and {other_alignment}"
    places = [(one.keys.get(path), other.keys.get(it)) for it, path in pairs.tensors.items()]
    names = {other_key: key for key, other_key in places if key and other_key}
    renamed = sum(key != other_key for other_key, key in names.items())
    if renamed:
        yield f"{_count(renamed, 'tensor')} under another key"
    moved = sum((key is None) != (other_key is None) for key, other_key in places)
    if moved:
        yield f"{_count(moved, 'tensor')} inside one of the models only"
    names |= {name: name for name in one.assets if name in other.assets}
    common = {*names.values()}
    order = [name for name in one.archive.entries if name in common]
    if order != [names[name] for name in other.archive.entries if name in names]:
        yield "the order of entries"
    indices = [pairs.nodes[index] for index in sorted(pairs.nodes)]
    if any(index > following for index, following in itertools.pairwise(indices)):
        yield "the order of nodes"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


# Lists of values that are given and taken by their position.
_POSITIONAL: Final = ("input", "output")
# Messages of which a text tells all, or nearly.
_TOLD_WHOLLY: Final = (
    onnx.OperatorSetIdProto,
    onnx.StringStringEntryProto,
    onnx.TypeProto,
)
_OF_ATTRIBUTE: Final = ("name", "ref_attr_name", "doc_string", "type")  # but its value
# Fields of an attribute of which a text does not.
_WITH_TENSORS: Final = ("t", "g", "sparse_tensor", "tensors", "graphs", "sparse_tensors")


def _changes(
    field: str,
    ones: Sequence[Message],
    others: Sequence[Message],
    *,
    pairs: _Pairs | None = None,
    prefix: str = "",
) -> tuple[Change, ...]:
    """What differs in two lists of messages.

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
        name for it in (names, other_names) for name, count in Multiset(it).items() if count > 1
    }
    found: list[Change] = []
    for index, message in enumerate(ones):
        name = _place(field, index) if names[index] in shared else names[index]
        if index in other_indices:
            found += _change(name, message, others[other_indices[index]])
        else:
            found.append(Change(name, _told(message), None))
    for index, message in enumerate(others):
        if index not in pairs:
            name = _place(field, index) if other_names[index] in shared else other_names[index]
            found.append(Change(name, None, _told(message)))
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


def _change(name: str, one: Message, other: Message) -> Iterator[Change]:
    """The change from one message to the other, if there is one."""
    if _serialized(one) == _serialized(other):
        return
    parts = _parts(one, other)
    if parts:
        before, after = _told(one), _told(other)
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
        orders = (_order(it, getattr(one, it), getattr(other, it)) for it in _POSITIONAL)
        return (*_fields(one, other), *itertools.chain.from_iterable(orders))
    found = tuple(_fields(one, other))
    if isinstance(one, onnx.AttributeProto) and len(found) == 1 and found[0].name in ("t", "g"):
        return found[0].parts or found  # of what the attribute is, and nothing else
    return found


def _tensor_parts(one: onnx.TensorProto, other: onnx.TensorProto) -> Iterator[Change]:
    described = (
        ("type", dtypes.name_of(one.data_type), dtypes.name_of(other.data_type)),
        ("shape", _told_dims(one.dims), _told_dims(other.dims)),
        ("data", tensors.location(one), tensors.location(other)),
    )
    for name, before, after in described:
        if before != after:
            yield Change(name, before, after)
    told = frozenset({"data_location", "data_type", "dims", "external_data"})
    yield from _fields(one, other, without=told)


def _order(field: str, ones: Sequence[Any], others: Sequence[Any]) -> Iterator[Change]:
    """The change of the order of what two lists have in common."""
    names, other_names = [it.name for it in ones], [it.name for it in others]
    known, other_known = {*names}, {*other_names}
    before = [name for name in names if name in other_known]
    after = [name for name in other_names if name in known]
    if sorted(map(text, before)) == sorted(map(text, after)) and before != after:
        yield Change(f"order of {field}s", _joined(before), _joined(after))


def _fields(
    one: Message, other: Message, *, without: frozenset[str] = frozenset()
) -> Iterator[Change]:
    """What differs in two messages of a type, field by field."""
    for field in one.DESCRIPTOR.fields:
        name = field.name
        if name in without:
            continue
        value, other_value = getattr(one, name), getattr(other, name)
        if schema.is_repeated(field):
            if field.message_type:
                yield from _changes(name, value, other_value, prefix=f"{name} ")
            else:
                yield from _listed(name, value, other_value)
            continue
        is_set, is_other_set = one.HasField(name), other.HasField(name)
        if field.message_type:
            if is_set and is_other_set:
                yield from _change(name, value, other_value)
            elif is_set or is_other_set:
                before, after = _told(value), _told(other_value)
                yield Change(name, before if is_set else None, after if is_other_set else None)
        elif _bits(value) != _bits(other_value) or (
            field.containing_oneof and is_set != is_other_set
        ):
            before, after = _told_scalar(value, field), _told_scalar(other_value, field)
            yield Change(name, before if is_set else None, after if is_other_set else None)
    unknown, other_unknown = _values(UnknownFieldSet(one)), _values(UnknownFieldSet(other))
    if unknown != other_unknown:
        yield Change("unknown fields", _told_unknown(unknown), _told_unknown(other_unknown))


def _listed(name: str, values: Sequence[Any], others: Sequence[Any]) -> Iterator[Change]:
    """The change from one list of numbers or strings to another."""
    before, after = [*map(_bits, values)], [*map(_bits, others)]
    if before == after:
        return
    index = None
    if max(len(before), len(after)) > _MAX_LISTED:
        pairs = enumerate(zip(before, after, strict=False))
        index = next((at for at, (it, other) in pairs if it != other), min(len(before), len(after)))
    yield Change(name, _told_list(values, index), _told_list(others, index))


def _told_list(values: Sequence[Any], index: int | None) -> str | None:
    """A list as text; only the element at `index`, if one is given. None for no list."""
    if not values:
        return None
    if index is None:
        return _joined(values)
    told = _count(len(values), "element")
    return told if index >= len(values) else f"{told}, [{index}] {_told_scalar(values[index])}"


def _bits(value: Any) -> Any:
    """A number or string, so that two are equal only if their bits are."""
    return struct.pack("<d", value) if isinstance(value, float) else value


def _joined(values: Sequence[Any]) -> str:
    return ", ".join(map(_told_scalar, values))


def _told_scalar(value: Any, field: Any = None) -> str:
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


def _values(unknown: Any) -> tuple[Any, ...]:
    """Fields that this version of onnx does not know: number, wire type, and value."""
    values = []
    for field in unknown:
        is_group = isinstance(field.data, UnknownFieldSet)
        value = _values(field.data) if is_group else field.data
        values.append((field.field_number, field.wire_type, value))
    return tuple(values)


def _told_unknown(values: tuple[Any, ...]) -> str | None:
    told = (
        f"{number}: {shown(value) if isinstance(value, bytes) else value}"
        for number, _, value in values
    )
    return ", ".join(told) or None


@singledispatch
def _told(message: Message) -> str:
    """A message as text for people: what it is, not all that it says."""
    return text_format.MessageToString(message, as_one_line=True)


@_told.register
def _(node: onnx.NodeProto) -> str:
    operator = text(node.op_type)
    if node.domain:
        operator = f"{text(node.domain)}.{operator}"
    if node.overload:
        operator = f"{operator}:{text(node.overload)}"
    outputs = f"{_joined(node.output)} = " if node.output else ""
    return f"{outputs}{operator}({_joined(node.input)})"


@_told.register
def _(tensor: onnx.TensorProto) -> str:
    told = f"{dtypes.name_of(tensor.data_type)} {_told_dims(tensor.dims)}"
    content = tensors.location(tensor)
    return told if content is None else f"{told}, {content}"


@_told.register
def _(tensor: onnx.SparseTensorProto) -> str:
    count = math.prod(tensor.values.dims)
    kind = dtypes.name_of(tensor.values.data_type)
    return f"sparse {kind} {_told_dims(tensor.dims)}, {_count(count, 'element')}"


@_told.register
def _(graph: onnx.GraphProto) -> str:
    return f"graph of {_count(len(graph.node), 'node')}"


@_told.register
def _(function: onnx.FunctionProto) -> str:
    return f"function of {_count(len(function.node), 'node')}"


@_told.register
def _(step: onnx.TrainingInfoProto) -> str:
    return f"initialization by {_told(step.initialization)}, algorithm by {_told(step.algorithm)}"


@_told.register
def _(pair: onnx.StringStringEntryProto) -> str:
    return _told_scalar(pair.value)


@_told.register
def _(opset: onnx.OperatorSetIdProto) -> str:
    return str(opset.version)


@_told.register
def _(value: onnx.ValueInfoProto) -> str:
    return _told(value.type)


@_told.register
def _(type: onnx.TypeProto) -> str:
    kind = type.WhichOneof("value")
    if kind in ("tensor_type", "sparse_tensor_type"):
        described = getattr(type, kind)
        told: str = "sparse " * (kind != "tensor_type") + dtypes.name_of(described.elem_type)
        if not described.HasField("shape"):
            return told
        return f"{told} {_told_dims([*map(_told_dim, described.shape.dim)])}"
    if kind == "sequence_type":
        return f"sequence of {_told(type.sequence_type.elem_type)}"
    if kind == "optional_type":
        return f"optional {_told(type.optional_type.elem_type)}"
    if kind == "map_type":
        key = dtypes.name_of(type.map_type.key_type)
        return f"map from {key} to {_told(type.map_type.value_type)}"
    return "no type" if kind is None else str(kind)


def _told_dim(dim: onnx.TensorShapeProto.Dimension) -> str:
    return str(dim.dim_value) if dim.HasField("dim_value") else text(dim.dim_param) or "?"


def _told_dims(dims: Sequence[object]) -> str:
    return "x".join(map(str, dims)) or "scalar"


@_told.register
def _(attribute: onnx.AttributeProto) -> str:
    if attribute.ref_attr_name:
        return f"@{text(attribute.ref_attr_name)}"
    for field in attribute.DESCRIPTOR.fields:
        if field.name in _OF_ATTRIBUTE or not tensors.has_field(attribute, field.name):
            continue
        value = getattr(attribute, field.name)
        if not schema.is_repeated(field):
            return _told(value) if field.message_type else _told_scalar(value)
        tell = _told if field.message_type else _told_scalar
        told = [tell(it) for it in value[:_MAX_LISTED]] + ["..."] * (len(value) > _MAX_LISTED)
        return f"[{', '.join(told)}]"
    return onnx.AttributeProto.AttributeType.Name(attribute.type)
