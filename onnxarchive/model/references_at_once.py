"""For speed only: reads the external initializers of a serialized model with numpy.

Protobuf takes microseconds for each field of each tensor. Here numpy reads one field of thousands
of tensors at a time. Almost all models have a form that this module can read. For others
`read_references` returns None: then call `proto.check_references`, which reads the tensors one by
one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
import onnx

from onnxarchive.buffers import columns
from onnxarchive.buffers.lines import Lines, numbers_of, text_of
from onnxarchive.errors import ArchiveFormatError
from onnxarchive.model import dtypes
from onnxarchive.model.shapes import Shapes
from onnxarchive.model.tensors import DATA_FIELDS, EXTERNAL, LOCATION
from onnxarchive.model.wire import (
    LEN,
    MAX_LENGTH_WIDTH,
    VARINT,
    VARINT_BITS,
    VARINT_CONTINUES,
    VARINT_MASK,
    WIRE_TYPE_MASK,
    fields_in,
    tag_of,
    varint,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers: TypeAlias = NDArray[np.int64]

ROWS: Final = 1 << 12  # tensors read at a time; their columns fit a core's cache
# In bytes, all names together; `Lines` of short names take up to ten times as much.
MAX_NAMES_SIZE: Final = 1 << 26


class References(NamedTuple):
    """The external initializers of a model's main graph.

    The data of each initializer has the size of the initializer's entry. Several initializers may
    have the same entry.

    Attributes:
        names: The names of all initializers, external or not.
        indexes: Index of each external initializer among all initializers.
        numbers: Index, among the archive's keys, of the entry of each external initializer.
        shapes: Data type and shape of each external initializer.
        rest: The serialized model without external initializers, or the whole model if they take
            at most half of its bytes.
    """

    names: Lines
    indexes: Numbers
    numbers: NDArray[np.uint32]
    shapes: Shapes
    rest: bytes


def read_references(model: bytes, keys: Sequence[str], sizes: Sequence[int]) -> References | None:
    """Reads the external initializers of a model's main graph.

    All initializers that this function reads are valid for protobuf. So if protobuf parses `rest`,
    it also parses `model`.

    Args:
        model: Bytes that may be a serialized ModelProto.
        keys: The keys of the archive, all ASCII.
        sizes: Size of the entry of each key in bytes.

    Returns:
        The initializers. None if the model is malformed, or if an initializer does not fit its
        entry, breaks another rule or is unusual: for example, it has a newline in its name.
    """
    try:
        graphs = [field for field in fields_in(model, 0, len(model), 0) if field[0] == _GRAPH]
        if len(graphs) != 1:
            return None
        _, begin, _, start, stop = graphs[0]
        parts = _parts(model, start, stop, _Located(keys, np.asarray(sizes)))
    except (ArchiveFormatError, _UnusualError):
        return None
    if sum(len(part.names) for part in parts) > MAX_NAMES_SIZE:
        return None
    joined = columns.joined(parts)
    names = Lines(next(joined).decode(errors="replace"))
    indexes, numbers, data_types, ranks, dims, begins, ends = joined
    rest, left_out = model, int((ends - begins).sum())
    if 2 * left_out > len(model):  # if less is left out, `rest` would copy most of the model
        graph = bytes([_GRAPH]) + varint(stop - start - left_out)
        pieces = _between(model, start, stop, begins, ends)
        rest = b"".join([model[:begin], graph, *pieces, model[stop:]])
    return References(
        names,
        indexes,
        numbers,
        Shapes.of_columns(data_types, ranks, dims),
        rest,
    )


def _parts(model: bytes, start: int, stop: int, located: _Located) -> list[_Part]:
    """Reads the initializers of the graph from `start` to `stop`, `ROWS` at a time."""
    raw = np.frombuffer(model, np.uint8)
    fields = np.frombuffer(_initializers(model, start, stop), np.int64)
    firsts = range(0, max(len(fields), 1), ROWS)
    return [_read(model, raw, fields[it : it + ROWS], it, located) for it in firsts]


def _between(
    model: bytes, start: int, stop: int, begins: Numbers, ends: Numbers
) -> Iterator[bytes]:
    """The pieces of the model from `start` to `stop` that lie in none of the given spans."""
    starts, stops = np.append(start, ends), np.append(begins, stop)
    for piece in np.flatnonzero(starts < stops).tolist():
        yield model[starts[piece] : stops[piece]]


def _initializers(model: bytes, start: int, stop: int) -> array[int]:
    """The offset in `model` of the tag of each field `initializer` of a graph.

    Raises:
        ArchiveFormatError: The graph is malformed.
        _UnusualError: The tag of an initializer has several bytes, or a field exceeds the graph.
    """
    found = array("q")
    while start < stop:
        # For speed: most fields are initializers.
        while start < stop - 1 and model[start] == _INITIALIZER:
            size = model[start + 1]
            if size >= VARINT_CONTINUES:
                break
            found.append(start)
            start += 2 + size
        for tag, begin, prefix, _, end in fields_in(model, start, stop, 1):
            start = end
            if tag == _INITIALIZER:
                if prefix != begin + 1:
                    raise _UnusualError
                found.append(begin)
                break
        else:
            break
    if start > stop:
        raise _UnusualError
    return found


class _UnusualError(Exception):
    """A tensor breaks a rule, or has a form that this module does not read."""


# Reads the fields of many messages at once (protobuf encoding guide, "Message Structure")

_MAX_WIDTH: Final = 8  # limit of bytes per varint, here; 8 bytes hold 56 bits
_MAX_FIELDS: Final = 32  # of a message
_MAX_TAG: Final = 1 << 10


class _Fields(NamedTuple):
    """One field of some messages.

    Attributes:
        tag: Tag of the field.
        rows: Indexes of the messages.
        numbers: Number after the tag in each message: the value, or the value's size in bytes.
        ends: Offset of the end of each number.
    """

    tag: int
    rows: Numbers | slice
    numbers: Numbers
    ends: Numbers


def _fields(raw: NDArray[np.uint8], begins: Numbers, ends: Numbers) -> Iterator[_Fields]:
    """Yields the first fields of all messages, then the second fields, and so on, grouped by tag.

    Args:
        raw: Bytes that hold the messages.
        begins: Offset of each message in `raw`.
        ends: Offset of the end of each message in `raw`.

    Raises:
        _UnusualError: A message is malformed, or has many fields.
    """
    rows = np.flatnonzero(begins < ends)
    positions, stops = begins[rows], ends[rows]
    for _ in range(_MAX_FIELDS):
        if not rows.size:
            return
        tags, after_tags = _varints(raw, positions, MAX_LENGTH_WIDTH)
        if tags.max() > _MAX_TAG:
            raise _UnusualError
        present = np.flatnonzero(np.bincount(tags)).tolist()
        if any(tag & WIRE_TYPE_MASK not in (VARINT, LEN) for tag in present):
            raise _UnusualError
        numbers, ends = _varints(raw, after_tags)
        has_length = tags & WIRE_TYPE_MASK == LEN
        if (has_length & (ends - after_tags > MAX_LENGTH_WIDTH)).any():
            raise _UnusualError
        positions = ends + np.where(has_length, numbers, 0)
        if (positions > stops).any():
            raise _UnusualError
        if len(present) == 1:
            # A slice is several times faster than an array of indexes.
            is_whole = len(rows) == len(begins)
            every = slice(len(begins)) if is_whole else rows
            yield _Fields(present[0], every, numbers, ends)
        else:
            for tag in present:
                having = np.flatnonzero(tags == tag)
                yield _Fields(tag, rows[having], numbers[having], ends[having])
        going = positions < stops
        if not going.all():
            rows, positions, stops = rows[going], positions[going], stops[going]
    if rows.size:
        raise _UnusualError


def _varints(
    raw: NDArray[np.uint8], positions: Numbers, max_width: int = _MAX_WIDTH
) -> tuple[Numbers, Numbers]:
    """The varints at many positions, and the offset of the end of each (which may exceed `raw`)."""
    byte = raw.take(positions, mode="clip")
    ends = positions + 1
    if byte.max(initial=0) < VARINT_CONTINUES:  # as almost always
        return byte.astype(np.int64), ends
    numbers = (byte & VARINT_MASK).astype(np.int64)
    going = np.flatnonzero(byte >= VARINT_CONTINUES)
    for width in range(1, max_width):
        if not going.size:
            return numbers, ends
        byte = raw.take(ends[going], mode="clip")
        bits = (byte & VARINT_MASK).astype(np.int64)
        numbers[going] |= bits << VARINT_BITS * width
        ends[going] += 1
        going = going[byte >= VARINT_CONTINUES]
    if going.size:
        raise _UnusualError
    return numbers, ends


# The fields of a tensor

_GRAPH: Final = tag_of(onnx.ModelProto.DESCRIPTOR, "graph", LEN)
_INITIALIZER: Final = tag_of(onnx.GraphProto.DESCRIPTOR, "initializer", LEN)
_DIMS: Final = tag_of(onnx.TensorProto.DESCRIPTOR, "dims", VARINT)
_DATA_TYPE: Final = tag_of(onnx.TensorProto.DESCRIPTOR, "data_type", VARINT)
_DATA_LOCATION: Final = tag_of(onnx.TensorProto.DESCRIPTOR, "data_location", VARINT)
_EXTERNAL_DATA: Final = tag_of(onnx.TensorProto.DESCRIPTOR, "external_data", LEN)
_DATA: Final = frozenset(tag_of(onnx.TensorProto.DESCRIPTOR, field, LEN) for field in DATA_FIELDS)
_NAME: Final = tag_of(onnx.TensorProto.DESCRIPTOR, "name", LEN)
_DOC_STRING: Final = tag_of(onnx.TensorProto.DESCRIPTOR, "doc_string", LEN)
_METADATA: Final = tag_of(onnx.TensorProto.DESCRIPTOR, "metadata_props", LEN)
_PAIR: Final = frozenset(
    tag_of(onnx.StringStringEntryProto.DESCRIPTOR, field, LEN) for field in ("key", "value")
)
# The beginning of the location's pair in `external_data`; the size of the value follows.
_BEFORE_LOCATION: Final = np.frombuffer(
    onnx.StringStringEntryProto(key=LOCATION).SerializeToString()
    + bytes([tag_of(onnx.StringStringEntryProto.DESCRIPTOR, "value", LEN)]),
    np.uint8,
)
# Bits per element of each data type, by number; 0 for a type without fixed width.
_BIT_WIDTHS: Final = np.array(
    [
        dtypes.BY_NUMBER[number].bit_width if number in dtypes.BY_NUMBER else 0
        for number in range(max(dtypes.BY_NUMBER) + 2)
    ]
)
_MAX_INT32: Final = (1 << 31) - 1
_MAX_ELEMENTS: Final = 1 << 48  # of a tensor, so that its size in bits fits 64 bits
_UNSET: Final = -1


class _Part(NamedTuple):
    """Columns of external initializers; `names` has the names of all initializers, one per line.

    Each range from `begins` to `ends` in the model is a run of adjacent `initializer` fields whose
    tensors are external. `References` and `Shapes.of_columns` describe the other columns.
    """

    names: bytes
    indexes: NDArray[np.uint32]
    numbers: NDArray[np.uint32]
    data_types: NDArray[np.uint8]
    ranks: NDArray[np.uint8]
    dims: Numbers
    begins: Numbers
    ends: Numbers


def _read(
    model: bytes, raw: NDArray[np.uint8], fields: Numbers, first: int, located: _Located
) -> _Part:
    """Reads the initializers at the offsets `fields`; the first of them has the index `first`."""
    sizes, begins = _varints(raw, fields + 1)
    ends = begins + sizes
    tensors = _Columns(len(fields))
    for field in _fields(raw, begins, ends):
        tensors.take(raw, field)
    which = tensors.external()
    locations = columns.lines(model, tensors.location_begins[which], tensors.location_ends[which])
    begins, ends = fields[which], ends[which]
    is_gap = begins[1:] != ends[:-1]
    names = columns.lines(model, tensors.name_begins, tensors.name_ends)
    if names.count(b"\n") != len(fields):  # a name contains a newline
        raise _UnusualError
    return _Part(
        names,
        (which + first).astype(np.uint32),
        located.numbers(locations, tensors.nbytes(which)),
        tensors.data_types[which].astype(np.uint8),
        tensors.ranks[which].astype(np.uint8),
        tensors.dims(which),
        begins[np.append(True, is_gap)[: which.size]],
        ends[np.append(is_gap, True)[: which.size]],
    )


class _Located:
    """Finds the entry of each external initializer; call `numbers` in the order of the graph."""

    def __init__(self, keys: Sequence[str], sizes: NDArray[Any]) -> None:
        self._keys = keys
        self._sizes = sizes
        self._index_of: Mapping[str, int] = {}
        self._count = 0  # initializers whose keys were found

    def numbers(self, locations: bytes, nbytes: Numbers) -> NDArray[np.uint32]:
        """The index of the entry of each initializer; refuses entries of another size.

        Args:
            locations: The locations of the next initializers, one per line.
            nbytes: The size of each of these initializers in bytes.
        """
        start, self._count = self._count, self._count + nbytes.size
        numbers = np.arange(start, self._count, dtype=np.uint32)
        if text_of(self._keys[start : self._count]).encode() != locations:  # seldom
            self._index_of = self._index_of or numbers_of(self._keys)
            named = locations.decode("latin-1").split("\n")[:-1]
            found = [self._index_of.get(location, _UNSET) for location in named]
            if _UNSET in found:
                raise _UnusualError
            numbers = np.array(found, np.uint32)
        if not np.array_equal(self._sizes[numbers], nbytes):
            raise _UnusualError
        return numbers


class _Columns:
    """The fields of some tensors, a row for each tensor."""

    def __init__(self, count: int) -> None:
        self.data_types = np.full(count, _UNSET)
        self._data_locations = np.full(count, _UNSET)
        self.name_begins = np.zeros(count, np.int64)  # in the model's bytes
        self.name_ends = np.zeros(count, np.int64)
        self.location_begins = np.full(count, _UNSET)
        self.location_ends = np.full(count, _UNSET)
        self._is_held = np.zeros(count, np.bool_)
        self._is_empty = np.zeros(count, np.bool_)
        self._elements = np.ones(count)  # product of nonzero dims; exact up to _MAX_ELEMENTS
        self.ranks = np.zeros(count, np.int64)
        self._dims: list[_Dims] = []

    def take(self, raw: NDArray[np.uint8], field: _Fields) -> None:
        """Reads a field of some of the tensors into the columns."""
        if field.tag == _DIMS:
            self._take_dims(field)
        elif field.tag == _DATA_TYPE:
            _set(self.data_types, field.rows, _int32(field.numbers))
        elif field.tag == _DATA_LOCATION:
            _set(self._data_locations, field.rows, _int32(field.numbers))
        elif field.tag == _EXTERNAL_DATA:
            ends = field.ends + field.numbers
            _set(self.location_begins, field.rows, _locations(raw, field.ends, ends))
            self.location_ends[field.rows] = ends
        elif field.tag == _NAME:  # the last one counts
            self.name_begins[field.rows] = field.ends
            self.name_ends[field.rows] = field.ends + field.numbers
        elif field.tag == _METADATA:
            for inner in _fields(raw, field.ends, field.ends + field.numbers):
                if inner.tag not in _PAIR:
                    raise _UnusualError
        elif field.tag in _DATA:
            self._is_held[field.rows] = True
        elif field.tag != _DOC_STRING:
            raise _UnusualError

    def _take_dims(self, field: _Fields) -> None:
        rows, sizes = field.rows, field.numbers
        self._is_empty[rows] |= sizes == 0
        with np.errstate(over="ignore"):  # `nbytes` refuses infinity
            self._elements[rows] *= np.maximum(sizes, 1)
        self._dims.append(_Dims(rows, self.ranks[rows].copy(), sizes))  # a slice gives a view
        self.ranks[rows] += 1

    def external(self) -> Numbers:
        """The rows of the external tensors; call `external` after `take` has read all fields."""
        is_external = self._data_locations == EXTERNAL
        if (is_external != (self.location_begins != _UNSET)).any():
            raise _UnusualError
        if self._is_held[is_external].any():
            raise _UnusualError
        return np.flatnonzero(is_external)

    def nbytes(self, which: Numbers) -> Numbers:
        """The size in bytes of each tensor in the rows `which`."""
        # `_BIT_WIDTHS` ends with a 0, for numbers beyond the known types and for _UNSET (-1).
        data_types = np.minimum(self.data_types[which], len(_BIT_WIDTHS) - 1)
        bit_widths, elements = _BIT_WIDTHS[data_types], self._elements[which]
        if (bit_widths == 0).any() or elements.max(initial=0) > _MAX_ELEMENTS:
            raise _UnusualError
        elements[self._is_empty[which]] = 0
        nbytes: Numbers = -(-elements.astype(np.int64) * bit_widths // dtypes.BITS_PER_BYTE)
        return nbytes

    def dims(self, which: Numbers) -> Numbers:
        """The dims of the tensors in the rows `which`, concatenated."""
        if not self._dims:
            return np.empty(0, np.int64)
        dims = np.full((len(self.ranks), self.ranks.max()), _UNSET)
        numbers = np.arange(len(self.ranks))
        for rows, axis, sizes in self._dims:
            dims[numbers[rows], axis] = sizes
        chosen = dims[which]
        found: Numbers = chosen[chosen != _UNSET]
        return found


class _Dims(NamedTuple):
    """A dim of some tensors: row, axis and size for each tensor."""

    rows: Numbers | slice
    axis: Numbers
    sizes: Numbers


def _set(column: Numbers, rows: Numbers | slice, values: Numbers) -> None:
    """Sets rows of a column; refuses rows that are already set."""
    if (column[rows] != _UNSET).any():
        raise _UnusualError
    column[rows] = values


def _int32(numbers: Numbers) -> Numbers:
    if (numbers > _MAX_INT32).any():  # protobuf keeps only the low 32 bits
        raise _UnusualError
    return numbers


def _locations(raw: NDArray[np.uint8], begins: Numbers, ends: Numbers) -> Numbers:
    """Offset of the location in each pair of external data; the location ends with the pair."""
    size = len(_BEFORE_LOCATION)
    if (ends - begins <= size).any():
        raise _UnusualError
    if (np.lib.stride_tricks.sliding_window_view(raw, size)[begins] != _BEFORE_LOCATION).any():
        raise _UnusualError
    sizes, located = _varints(raw, begins + size, MAX_LENGTH_WIDTH)
    if (located + sizes != ends).any():
        raise _UnusualError
    return located
