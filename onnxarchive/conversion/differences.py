"""In what two archives differ: graph, tensors, assets, and what else a model says.

A tensor's content is its type, its shape, and the size and CRC-32 of its bytes, which the directory
of an archive has: weights are not read unless that is asked for. Both models are copied without
their tensors' bytes, with that content in the place of the location. So wherever a tensor stands,
messages are equal if their tensors are, and keys make no difference.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np
import onnx

from onnxarchive.archive.opening import open
from onnxarchive.archive.reading import Archive
from onnxarchive.buffers import checksums
from onnxarchive.buffers.counting import Progress, ProgressCounter
from onnxarchive.errors import ArchiveFormatError, shown, with_path
from onnxarchive.model import dtypes, tensors, walking, wording
from onnxarchive.model.changes import (
    Change,
    Pairs,
    Places,
    field_changes,
    list_changes,
    message_changes,
    order_changes,
)
from onnxarchive.model.copying import with_locations
from onnxarchive.model.keys import ASSET_PREFIX, MODEL_PROTO
from onnxarchive.model.tensors import TensorRef
from onnxarchive.model.walking import Path

__all__ = ["Change", "Difference", "diff"]

# Gives bytes of a tensor or an entry: an offset and how many.
_Read: TypeAlias = Callable[[int, int], bytes]

_PIECE_SIZE: Final = 2 << 20  # bytes of each archive at a time; four such are in memory
_GRAPH: Final[Path] = (("graph", None),)


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
        UnfinishedEditError: An edit of one of them was interrupted.
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
        refs: Its tensors by their paths, in the order of the model.
        keys: The key of each tensor that is outside the model.
        contents: What is compared of the bytes of a tensor. Those of which this cannot be told,
            such as strings, are compared field by field.
        names: How many initializers have each name.
        model: The model with these contents as the locations of its tensors.
        assets: What is compared of the bytes of each asset, by the name of its entry.
    """

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        self.refs = {ref.path: ref for ref in tensors.walk(archive.model)}
        self.keys = {ref.path: key for key, ref in archive._refs.items()}
        self.contents: dict[Path, str] = {}
        for path, ref in self.refs.items():
            content = self._content(ref)
            if content is not None:
                self.contents[path] = content
        self.names = Counter(ref.tensor.name for ref in self.refs.values() if ref.is_initializer)
        self.model = with_locations(archive.model, self.contents)
        self.assets = {
            name: _told_content(entry.nbytes, entry.crc32)
            for name, entry in archive.entries.items()
            if name.startswith(ASSET_PREFIX)
        }

    def _content(self, ref: TensorRef) -> str | None:
        if ref.path in self.keys:
            entry = self.archive.entries[self.keys[ref.path]]
            return _told_content(entry.nbytes, entry.crc32)
        if tensors.stored_type(ref.tensor) is None:
            return None
        try:
            data = tensors.raw_data(ref)
        except ArchiveFormatError:  # it holds more or less than its shape says
            return None
        return _told_content(data.nbytes, checksums.crc32(data))

    def nbytes(self, path: Path) -> int:
        """Size in bytes of a tensor that has a content."""
        tensor = self.refs[path].tensor
        return dtypes.BY_NUMBER[tensor.data_type].nbytes(tensor.dims)

    def tensor(self, path: Path) -> onnx.TensorProto:
        """A tensor, with its content as its location."""
        tensor: onnx.TensorProto = walking.at(self.model, path)
        return tensor

    def reader(self, path: Path) -> _Read:
        """Reads the bytes of a tensor that has a content."""
        if path in self.keys:
            return self.entry_reader(self.keys[path])
        data = tensors.raw_data(self.refs[path])
        return lambda offset, size: bytes(data[offset : offset + size])

    def entry_reader(self, name: str) -> _Read:
        """Reads the bytes of an entry, not through the map: a file that is cut makes no fault.

        Raises:
            ArchiveFormatError: The entry's local header does not match the directory.
        """
        self.archive.read(name)
        entry = self.archive.entries[name]

        def read(offset: int, size: int) -> bytes:
            data = self.archive._file.read(entry.data_offset + offset, size)
            if len(data) < size:
                with with_path(self.archive.path):
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
    nodes: Pairs


def _pair_tensors(one: _Side, other: _Side) -> _Pairing:
    """Pairs tensors by their places, and initializers that went to another graph by their names."""
    places = Places(one.model, other.model)
    pairs: dict[Path, Path] = {}
    for path in other.refs:
        counterpart = places.counterpart(path)
        if counterpart is not None and counterpart in one.refs:
            pairs[path] = counterpart
    paired = {*pairs.values()}
    by_name = {
        ref.tensor.name: path
        for path, ref in one.refs.items()
        if path not in paired and ref.is_initializer and one.names[ref.tensor.name] == 1
    }
    for path, ref in other.refs.items():
        name = ref.tensor.name
        if path not in pairs and ref.is_initializer and other.names[name] == 1 and name in by_name:
            pairs[path] = by_name[name]
    return _Pairing(pairs, places.indices(_GRAPH, "node"))


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
    counter = ProgressCounter(progress, total)
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
    read: _Read, other: _Read, nbytes: int, counter: ProgressCounter
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
        nodes=list_changes("node", graph.node, other_graph.node, pairs=pairs.nodes),
        inputs=list_changes("input", graph.input, other_graph.input),
        outputs=list_changes("output", graph.output, other_graph.output),
        values=list_changes("value_info", graph.value_info, other_graph.value_info),
        opsets=list_changes("opset_import", model.opset_import, other_model.opset_import),
        metadata=list_changes("metadata_props", model.metadata_props, other_model.metadata_props),
        fields=tuple(_changed_fields(model, other_model)),
        functions=list_changes("functions", model.functions, other_model.functions),
        training=list_changes("training_info", model.training_info, other_model.training_info),
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
    yield from field_changes(model, other, without=_OF_MODEL)
    for change in field_changes(model.graph, other.graph, without=_OF_GRAPH):
        yield replace(change, name=f"graph.{change.name}")
    yield from order_changes(model.graph, other.graph)


def _changed_tensors(one: _Side, other: _Side, pairs: _Pairing) -> Iterator[Change]:
    def name(ref: TensorRef) -> str:
        is_named = ref.is_initializer and ref.name != ""
        is_one = all(side.names[ref.tensor.name] < 2 for side in (one, other))
        return ref.name if is_named and is_one else ref.where

    others = {path: other_path for other_path, path in pairs.tensors.items()}
    for path, ref in one.refs.items():
        if path in others:
            yield from message_changes(name(ref), one.tensor(path), other.tensor(others[path]))
        else:
            yield Change(name(ref), wording.told(one.tensor(path)), None)
    for path, ref in other.refs.items():
        if path not in pairs.tensors:
            yield Change(name(ref), None, wording.told(other.tensor(path)))


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
        yield f"{wording.told_count(renamed, 'tensor')} under another key"
    moved = sum((key is None) != (other_key is None) for key, other_key in places)
    if moved:
        yield f"{wording.told_count(moved, 'tensor')} inside one of the models only"
    names |= {name: name for name in one.assets if name in other.assets}
    common = {*names.values()}
    order = [name for name in one.archive.entries if name in common]
    if order != [names[name] for name in other.archive.entries if name in names]:
        yield "the order of entries"
    indices = [pairs.nodes[index] for index in sorted(pairs.nodes)]
    if any(index > following for index, following in itertools.pairwise(indices)):
        yield "the order of nodes"
