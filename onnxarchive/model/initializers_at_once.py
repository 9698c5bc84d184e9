"""For speed only: finds initializers of at most 64 KiB; serializes those stored outside the model.

Protobuf takes microseconds for each field of each tensor. Almost all initializers have only a
name, a type, dims, and data in `raw_data` or at an external location: this module assembles the
messages of these initializers from bytes. `copying.with_locations` handles the others.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import islice
from typing import Final, TypeAlias

import onnx

from onnxarchive.buffers.data import Buffer, Data
from onnxarchive.model import dtypes, tensors
from onnxarchive.model.copying import holds_weights, unknown_fields
from onnxarchive.model.tensors import (
    EXTERNAL,
    INITIALIZER,
    LENGTH,
    LOCATION,
    OFFSET,
    TensorRef,
)
from onnxarchive.model.wire import LEN, VARINT_MASK, fields_in, fields_of, tag_of, varint

SMALL_SIZE: Final = 1 << 16  # greatest size of a small tensor in bytes

_MAX_REST: Final = 1 << 24  # greatest size of the model without initializers, in bytes
_JOINED_FIELDS: Final = 1 << 10
_GRAPH: Final = tag_of(onnx.ModelProto.DESCRIPTOR, "graph", LEN)
_INITIALIZER: Final = tag_of(onnx.GraphProto.DESCRIPTOR, INITIALIZER, LEN)
_NAME: Final = bytes([tag_of(onnx.TensorProto.DESCRIPTOR, "name", LEN)])
_RAW_DATA: Final = bytes([tag_of(onnx.TensorProto.DESCRIPTOR, "raw_data", LEN)])
_EXTERNAL_DATA: Final = bytes([tag_of(onnx.TensorProto.DESCRIPTOR, "external_data", LEN)])
_BEFORE_LOCATION: Final = onnx.StringStringEntryProto(key=LOCATION).SerializeToString() + bytes(
    [tag_of(onnx.StringStringEntryProto.DESCRIPTOR, "value", LEN)]
)
_FIELD: Final = bytes([_INITIALIZER])
_IS_EXTERNAL: Final = onnx.TensorProto(data_location=EXTERNAL).SerializeToString()
_LENGTHS: Final = [varint(length) for length in range(1 << 10)]


# A key-value pair of `external_data`. The groups capture the size of the pair, the size of the
# value, and the value.
_PAIR: Final = rb"j(.)\n%c%b\x12(.)(%b)"
# Size of a pair without its value.
_LOCATION_PAIR_SIZE, _OFFSET_PAIR_SIZE, _LENGTH_PAIR_SIZE = (
    len(onnx.StringStringEntryProto(key=key, value="").SerializeToString())
    for key in (LOCATION, OFFSET, LENGTH)
)
_NUMBER: Final = rb"0|[1-9][0-9]{0,17}"
# The fields after the name of an external tensor: the pair `location`, the optional pairs `offset`
# and `length`, and the field `data_location`.
_EXTERNAL: Final = re.compile(
    _PAIR % (len(LOCATION), LOCATION.encode(), rb".{1,100}?")
    + b"".join(
        rb"(?:%b)?" % (_PAIR % (len(key), key.encode(), _NUMBER)) for key in (OFFSET, LENGTH)
    )
    + re.escape(_IS_EXTERNAL),
    re.DOTALL,
)


# The fields before the name of a tensor, and the size of the name. Varints match only
# in their shortest form.
_VARINT: Final = rb"(?:[\x80-\xff]{1,9}[\x01-\x7f]|[\x00-\x7f])"
_BEGINNING: Final = re.compile(
    rb"((?:\x08%b){0,%d}\x10%b)%b((?:[\x80-\xff][\x01-\x7f])|[\x00-\x7f])"
    % (_VARINT, dtypes.MAX_RANK, _VARINT, _NAME)
)


# Location and offset of an external tensor's data.
ExternalPlace: TypeAlias = tuple[str, int]
IN_MODEL: Final = -1


class SmallInitializers:
    """Small usual initializers of a main graph, in columns.

    A usual initializer has a name, dims, a data type of 8 bits or more (not BOOL), data in
    `raw_data` or at an external location, and no other field.

    Attributes:
        initializers: All initializers of the graph; None if the small initializers were taken out.
        indexes: Index of each small usual initializer in the graph, ascending.
        sizes: Size in bytes of the data of each small usual initializer.
        location_numbers: Index, in `locations`, of the location of each small usual initializer;
            `IN_MODEL` for `raw_data`.
        offsets: Offset, in the file, of the data of each small usual initializer.
        files: The file of each location; None for a file that is missing or not local.
    """

    def __init__(self, initializers: Sequence[onnx.TensorProto] | None = ()) -> None:
        self.initializers = initializers
        self.indexes = array("i")
        self.sizes = array("i")
        self.location_numbers = array("i")
        self.offsets = array("q")
        self.files: Sequence[Data | None] = ()
        self._numbers: dict[str, int] = {}  # of locations
        # Serialized dims, data type and name of each small usual initializer, concatenated.
        self._beginnings = bytearray()
        self._ends = array("q")
        self._name_sizes = array("i")

    def __len__(self) -> int:
        return len(self.indexes)

    @property
    def locations(self) -> list[str]:
        """The distinct locations of data."""
        return list(self._numbers)

    def add(
        self,
        index: int,
        beginning: Buffer,
        name_size: int,
        nbytes: int,
        place: ExternalPlace | None,
    ) -> None:
        """Adds an initializer; `place` is None for data in `raw_data`."""
        number, offset = IN_MODEL, 0
        if place is not None:
            location, offset = place
            number = self._numbers.setdefault(location, len(self._numbers))
        self.indexes.append(index)
        self.sizes.append(nbytes)
        self.location_numbers.append(number)
        self.offsets.append(offset)
        self._beginnings += beginning
        self._ends.append(len(self._beginnings))
        self._name_sizes.append(name_size)

    def row(self, index: int) -> int | None:
        """The row of the initializer with this index; None if it is large or unusual."""
        row = bisect_left(self.indexes, index)
        return row if row < len(self) and self.indexes[row] == index else None

    def file(self, row: int) -> Data | None:
        """The file of an initializer's data; None for `raw_data`, or if `files` lacks the file."""
        number = self.location_numbers[row]
        return self.files[number] if 0 <= number < len(self.files) else None

    def name(self, row: int) -> str:
        """The name of an initializer."""
        end = self._ends[row]
        return self._beginnings[end - self._name_sizes[row] : end].decode()

    def ref(self, row: int) -> TensorRef:
        """The ref of an initializer; after `take_out`, the tensor has no `external_data`."""
        index = self.indexes[row]
        if self.initializers is None:
            tensor = onnx.TensorProto.FromString(self._beginning(row))
            return tensors.main_initializer(tensor, index)
        return tensors.main_initializer(self.initializers[index], index)

    def raw_data(self, row: int) -> bytes:
        """Copies the `raw_data` of an initializer; its size is not checked."""
        assert self.initializers is not None
        return self.initializers[self.indexes[row]].raw_data

    def _beginning(self, row: int) -> bytes:
        return bytes(self._beginnings[self._ends[row - 1] if row else 0 : self._ends[row]])

    def external(self, keys: Iterable[tuple[int, str]]) -> Iterator[tuple[int, bytes]]:
        """Makes initializers external: yields index and serialized `initializer` field of each.

        Args:
            keys: Row and new location of each initializer.
        """
        for row, key in keys:
            encoded = key.encode()
            beginning = self._beginning(row)
            before_key = _before_key(len(encoded))
            size = len(beginning) + len(before_key) + len(encoded) + len(_IS_EXTERNAL)
            parts = _FIELD, _varint(size), beginning, before_key, encoded, _IS_EXTERNAL
            yield self.indexes[row], b"".join(parts)


def find_small(
    model: onnx.ModelProto, but_of_nbytes: int | None = None, *, is_parsed: bool = False
) -> SmallInitializers:
    """Finds the small usual initializers of the main graph (see `SmallInitializers`).

    Args:
        model: The model.
        but_of_nbytes: Leaves out initializers with `raw_data` of exactly this size in bytes.
        is_parsed: True if the model is parsed from a file and its weights are left there.
    """
    found = SmallInitializers(model.graph.initializer)
    is_heavy = not is_parsed and holds_weights(model.graph)
    if unknown_fields(model.graph, is_heavy):  # `insert` does not support unknown fields
        return found
    known: dict[tuple[int, ...], tuple[int, bytes, bytes] | None] = {}
    for index, tensor in enumerate(model.graph.initializer):
        dims = tensor.dims
        # `dims[:]` is faster than iterating over `dims`, and `dims[0]` is faster than `dims[:]`.
        described = tensor.data_type, *((dims[0],) if len(dims) == 1 else dims[:])
        if described not in known:
            known[described] = _describe(tensor)
        name = tensor.name
        usual = known[described]
        if usual is None or not isinstance(name, str):
            continue
        nbytes, beginning, before_data = usual
        encoded = name.encode()
        beginning = b"".join((beginning, _NAME, _varint(len(encoded)), encoded))
        serialized = tensor.SerializeToString()
        if not serialized.startswith(beginning):
            continue
        size = len(beginning) + len(before_data) + nbytes
        # A message with these parts and this size has no other field.
        if len(serialized) == size and serialized.startswith(before_data, len(beginning)):
            if nbytes != but_of_nbytes:
                found.add(index, beginning, len(encoded), nbytes, None)
        else:
            place = _place(serialized, len(beginning), len(serialized), nbytes)
            if place is not None:
                found.add(index, beginning, len(encoded), nbytes, place)
    return found


def take_out(model: memoryview, least_nbytes: int) -> tuple[bytes, SmallInitializers] | None:
    """Takes the initializers out of the main graph, if all are small, external and usual.

    Args:
        model: A serialized model.
        least_nbytes: If the data of any initializer has fewer bytes, the result is None.

    Returns:
        The serialized model without initializers, and the initializers. None if an initializer is
        too small, too large, internal or unusual, if the rest of the model is large, or if the
        model does not have exactly one field `graph`.

    Raises:
        ArchiveFormatError: The model is malformed.
    """
    found = SmallInitializers(None)
    graphs = list(islice((field for field in fields_of(model) if field[0] == _GRAPH), 2))
    if len(graphs) != 1:
        return None
    _, _, prefix, start, stop = graphs[0]
    rest: list[memoryview] = []
    position = start
    known: dict[bytes, int | None] = {}
    for tag, begin, _, value, end in fields_in(model, start, stop, 1):
        if tag != _INITIALIZER:
            continue
        match = _BEGINNING.match(model, value, end)
        if match is None:
            return None
        described, size = match.groups()
        if described not in known:
            usual = _describe(onnx.TensorProto.FromString(described))
            known[described] = None if usual is None or usual[1] != described else usual[0]
        nbytes = known[described]
        name = match.end()
        name_end = name + (size[0] if len(size) == 1 else size[0] & VARINT_MASK | size[1] << 7)
        if nbytes is None or nbytes < least_nbytes or name_end > end:
            return None
        place = _place(model, name_end, end, nbytes)
        if place is None:
            return None
        try:
            if "\0" in str(model[name:name_end], "utf-8"):  # may hold `weights.SPAN_LOCATION`
                return None
        except UnicodeDecodeError:
            return None
        found.add(len(found), model[value:name_end], name_end - name, nbytes, place)
        if position < begin:
            rest.append(model[position:begin])
        position = end
    rest.append(model[position:stop])
    graph_nbytes = sum(map(len, rest))
    if len(model) - (stop - start) + graph_nbytes > _MAX_REST:
        return None
    return b"".join((model[:prefix], varint(graph_nbytes), *rest, model[stop:])), found


def _describe(tensor: onnx.TensorProto) -> tuple[int, bytes, bytes] | None:
    """How a small usual initializer is encoded; None if the initializer is large or unusual.

    Returns:
        The size of its data in bytes, its serialized fields before the name, and the tag and size
        of `raw_data`.
    """
    number, dims = tensor.data_type, tensor.dims[:]
    data_type = tensors.array_type(tensor)
    if data_type is None or data_type is dtypes.BOOL or data_type.is_packed:
        return None  # no array has this type and shape, or rule TENSOR-4 or TENSOR-5 applies
    nbytes = data_type.nbytes(dims)
    if nbytes > SMALL_SIZE:
        return None
    beginning = onnx.TensorProto(data_type=number, dims=dims).SerializeToString()
    return nbytes, beginning, _RAW_DATA + _varint(nbytes)


def _place(wire: bytes | memoryview, start: int, stop: int, nbytes: int) -> ExternalPlace | None:
    """Location and offset of a tensor's data; None if the fields after the name are unusual."""
    match = _EXTERNAL.fullmatch(wire, start, stop)
    if match is None:
        return None
    pair_size, size, location, *numbers = match.groups()
    if size[0] != len(location) or pair_size[0] != len(location) + _LOCATION_PAIR_SIZE:
        return None
    pair_size, size, offset, length_pair_size, length_size, length = numbers
    if offset is not None and (
        size[0] != len(offset) or pair_size[0] != len(offset) + _OFFSET_PAIR_SIZE
    ):
        return None
    if length is not None and (
        length_size[0] != len(length)
        or length_pair_size[0] != len(length) + _LENGTH_PAIR_SIZE
        or int(length) != nbytes
    ):
        return None
    if not location.isascii():
        return None
    return location.decode(), int(offset or 0)


@cache
def _before_key(size: int) -> bytes:
    """The bytes between the name of an external tensor and a location of `size` bytes."""
    pair_size = len(_BEFORE_LOCATION) + len(_varint(size)) + size
    return _EXTERNAL_DATA + _varint(pair_size) + _BEFORE_LOCATION + _varint(size)


def insert(model: bytes, added: Iterable[tuple[int, bytes]]) -> bytes:
    """Adds initializers to the main graph of a serialized model.

    Args:
        model: A model serialized by protobuf, without unknown fields in the graph.
        added: For each tensor, the index in the new graph and the serialized field `initializer`;
            sorted by index.

    Returns:
        The model as protobuf would serialize it with these initializers.
    """
    (graph,) = (field for field in fields_of(model) if field[0] == _GRAPH)
    _, _, prefix, start, stop = graph
    others: list[tuple[int, int]] = []
    place = stop
    for tag, begin, _, _, end in fields_in(model, start, stop, 1):
        if tag == _INITIALIZER:
            others.append((begin, end))
        elif tag > _INITIALIZER:  # fields are in the order of their tags
            place = begin
            break
    position = others[0][0] if others else place
    parts = [model[start:position]]
    count = used = 0
    fields: list[bytes] = []
    for index, field in added:
        if index > count:
            used += index - count
            fields.append(model[position : others[used - 1][1]])
            position = others[used - 1][1]
        fields.append(field)
        count = index + 1
        if len(fields) > _JOINED_FIELDS:
            parts.append(b"".join(fields))
            fields.clear()
    parts += (*fields, model[position:stop])
    graph_nbytes = sum(map(len, parts))
    return b"".join((model[:prefix], varint(graph_nbytes), *parts, model[stop:]))


def _varint(number: int) -> bytes:
    return _LENGTHS[number] if number < len(_LENGTHS) else varint(number)
