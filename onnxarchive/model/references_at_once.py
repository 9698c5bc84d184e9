"""For speed only: reads the external initializers of a serialized model with numpy.

Protobuf takes microseconds for each field of each tensor. Here numpy reads one field of thousands
of tensors at a time. Almost all models have a form that it can read; for others `read_references`
returns None: ask `proto.check_references`, which reads the tensors one by one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np
import onnx

from onnxarchive.buffers import columns
from onnxarchive.errors import ArchiveFormatError
from onnxarchive.model import dtypes
from onnxarchive.model.shapes import Shapes
from onnxarchive.model.tensors import DATA_FIELDS, EXTERNAL, LOCATION
from onnxarchive.model.wire import (
    LEN,
    VARINT,
    VARINT_BITS,
    VARINT_CONTINUES,
    VARINT_MASK,
    WIRE_TYPE_MASK,
    fields_in,
    tag_of,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers: TypeAlias = NDArray[np.int64]

ROWS: Final = 1 << 12  # tensors read together: their columns stay in a core's cache


@dataclass(frozen=True, slots=True)
class References:
    """The external initializers of a model's main graph, none of which breaks a rule by itself.

    Attributes:
        count: How many initializers there are, external or not.
        indexes: The index of each external one among the initializers.
        locations: The location of each, one per line, decoded as Latin-1: right if it is ASCII.
        nbytes: The size in bytes that shape and data type of each need.
        shapes: The data type and shape of each.
    """

    count: int
    indexes: Numbers
    locations: str
    nbytes: Numbers
    shapes: Shapes


def read_references(model: bytes) -> References | None:
    """Reads the external initializers of a model's main graph.

    Args:
        model: A serialized ModelProto, which protobuf has parsed.

    Returns:
        The initializers; None if one of them breaks a rule or has something unusual: many fields,
        a field twice, more than a location in `external_data`.
    """
    raw = np.frombuffer(model, np.uint8)
    try:
        graphs = [field for field in fields_in(model, 0, len(model), 0) if field[0] == _GRAPH]
        if len(graphs) != 1:
            return None
        _, _, _, start, stop = graphs[0]
        prefixes = array("q")
        for tag, _, prefix, _, _ in fields_in(model, start, stop, 1):
            if tag == _INITIALIZER:
                prefixes.append(prefix)
        sizes, begins = _varints(raw, np.frombuffer(prefixes, np.int64))
        ends = begins + sizes
        tensors = _Columns(len(begins))
        for first in range(0, len(begins), ROWS):
            rows = slice(first, first + ROWS)
            for field in _fields(raw, begins[rows], ends[rows], first):
                tensors.take(raw, field)
        return tensors.references(model)
    except (ArchiveFormatError, _UnusualError):
        return None


class _UnusualError(Exception):
    """A tensor breaks a rule, or has a form that this module does not read."""


# Fields of many messages (encoding guide, "Message Structure")

_MAX_WIDTH: Final = 8  # bytes of a varint, whose number then has 56 bits
_MAX_FIELDS: Final = 32  # of a tensor
_MAX_TAG: Final = 1 << 10


class _Fields(NamedTuple):
    """A field of some messages.

    Attributes:
        tag: Its tag.
        rows: The messages.
        numbers: The number after the tag in each: the value, or its size in bytes.
        ends: Offset of the end of that number.
    """

    tag: int
    rows: Numbers | slice
    numbers: Numbers
    ends: Numbers


def _fields(
    raw: NDArray[np.uint8], begins: Numbers, ends: Numbers, first: int
) -> Iterator[_Fields]:
    """Yields the first field of all messages, then the second of all, and so on, grouped by tag.

    Args:
        raw: Bytes that hold the messages.
        begins: Offset of each message in them.
        ends: Offset of its end.
        first: The row of the first message.
    """
    rows = np.flatnonzero(begins < ends)
    positions, ends = begins[rows], ends[rows]
    rows += first
    for _ in range(_MAX_FIELDS):
        if not rows.size:
            return
        tags, positions = _varints(raw, positions)
        if tags.max() > _MAX_TAG:
            raise _UnusualError
        present = np.flatnonzero(np.bincount(tags)).tolist()
        if any(tag & WIRE_TYPE_MASK not in (VARINT, LEN) for tag in present):
            raise _UnusualError
        numbers, positions = _varints(raw, positions)
        if len(present) == 1:
            # A slice is several times faster than its indices.
            is_whole = len(rows) == len(begins)
            every = slice(first, first + len(begins)) if is_whole else rows
            yield _Fields(present[0], every, numbers, positions)
        else:
            for tag in present:
                having = np.flatnonzero(tags == tag)
                yield _Fields(tag, rows[having], numbers[having], positions[having])
        positions = positions + np.where(tags & WIRE_TYPE_MASK == LEN, numbers, 0)
        going = positions < ends
        if not going.all():
            rows, positions, ends = rows[going], positions[going], ends[going]
    if rows.size:
        raise _UnusualError


def _varints(raw: NDArray[np.uint8], positions: Numbers) -> tuple[Numbers, Numbers]:
    """The varints at many positions, and the offset of the end of each."""
    byte = raw.take(positions)
    ends = positions + 1
    if byte.max(initial=0) < VARINT_CONTINUES:  # as almost always
        return byte.astype(np.int64), ends
    numbers = (byte & VARINT_MASK).astype(np.int64)
    going = np.flatnonzero(byte >= VARINT_CONTINUES)
    for width in range(1, _MAX_WIDTH):
        if not going.size:
            return numbers, ends
        byte = raw[ends[going]]
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
_TEXT: Final = frozenset(
    tag_of(onnx.TensorProto.DESCRIPTOR, field, LEN)
    for field in ("name", "doc_string", "metadata_props")
)
# The bytes of a pair in `external_data` before the size of its value, if it is the location.
_BEFORE_LOCATION: Final = np.frombuffer(
    onnx.StringStringEntryProto(key=LOCATION).SerializeToString()
    + bytes([tag_of(onnx.StringStringEntryProto.DESCRIPTOR, "value", LEN)]),
    np.uint8,
)
# Bits of an element by the number of the data type; 0 if it has no fixed width.
_BIT_WIDTHS: Final = np.array(
    [
        dtypes.BY_NUMBER[number].bit_width if number in dtypes.BY_NUMBER else 0
        for number in range(max(dtypes.BY_NUMBER) + 2)
    ]
)
_MAX_INT32: Final = (1 << 31) - 1
_MAX_ELEMENTS: Final = 1 << 48  # of a tensor: their bits are then a number of 64 bits
_UNSET: Final = -1


class _Columns:
    """The fields of some tensors, a row for each tensor."""

    def __init__(self, count: int) -> None:
        self._data_types = np.full(count, _UNSET)
        self._data_locations = np.full(count, _UNSET)
        self._location_begins = np.full(count, _UNSET)  # in the model's bytes
        self._location_ends = np.full(count, _UNSET)
        self._is_held = np.zeros(count, np.bool_)
        self._is_empty = np.zeros(count, np.bool_)
        self._elements = np.ones(count)  # product of dims but zeros; exact up to _MAX_ELEMENTS
        self._ranks = np.zeros(count, np.int64)
        self._dims: list[_Dims] = []

    def take(self, raw: NDArray[np.uint8], field: _Fields) -> None:
        """Takes a field of some of the tensors."""
        if field.tag == _DIMS:
            self._take_dims(field)
        elif field.tag == _DATA_TYPE:
            _set(self._data_types, field.rows, _int32(field.numbers))
        elif field.tag == _DATA_LOCATION:
            _set(self._data_locations, field.rows, _int32(field.numbers))
        elif field.tag == _EXTERNAL_DATA:
            ends = field.ends + field.numbers
            _set(self._location_begins, field.rows, _locations(raw, field.ends, ends))
            self._location_ends[field.rows] = ends
        elif field.tag in _DATA:
            self._is_held[field.rows] = True
        elif field.tag not in _TEXT:
            raise _UnusualError

    def _take_dims(self, field: _Fields) -> None:
        rows, sizes = field.rows, field.numbers
        self._is_empty[rows] |= sizes == 0
        with np.errstate(over="ignore"):  # infinity is too large
            self._elements[rows] *= np.maximum(sizes, 1)
        self._dims.append(_Dims(rows, self._ranks[rows].copy(), sizes))  # a slice is a view
        self._ranks[rows] += 1

    def references(self, model: bytes) -> References:
        """The external tensors, after all fields were taken."""
        is_external = self._data_locations == EXTERNAL
        if (is_external != (self._location_begins != _UNSET)).any():
            raise _UnusualError
        indexes = np.flatnonzero(is_external)
        if self._is_held[indexes].any():
            raise _UnusualError
        nbytes = self._nbytes(indexes)
        located = self._location_begins[indexes], self._location_ends[indexes]
        locations = columns.lines(model, *located).decode("latin-1")
        return References(len(is_external), indexes, locations, nbytes, self._shapes(indexes))

    def _nbytes(self, indexes: Numbers) -> Numbers:
        # The last width, 0, is that of unknown types, and that of _UNSET.
        data_types = np.minimum(self._data_types[indexes], len(_BIT_WIDTHS) - 1)
        bit_widths, elements = _BIT_WIDTHS[data_types], self._elements[indexes]
        if (bit_widths == 0).any() or elements.max(initial=0) > _MAX_ELEMENTS:
            raise _UnusualError
        elements[self._is_empty[indexes]] = 0
        nbytes: Numbers = -(-elements.astype(np.int64) * bit_widths // dtypes.BITS_PER_BYTE)
        return nbytes

    def _shapes(self, indexes: Numbers) -> Shapes:
        begins = np.cumsum(self._ranks) - self._ranks
        dims = np.empty(self._ranks.sum(), np.int64)
        for rows, axis, sizes in self._dims:
            dims[begins[rows] + axis] = sizes
        return Shapes(self._data_types[indexes], self._ranks[indexes], begins[indexes], dims)


class _Dims(NamedTuple):
    """One dimension of some tensors: the tensors, and its axis and size in each."""

    rows: Numbers | slice
    axis: Numbers
    sizes: Numbers


def _set(column: Numbers, rows: Numbers | slice, values: Numbers) -> None:
    """Sets some rows of a column, none of which may be set yet."""
    if (column[rows] != _UNSET).any():
        raise _UnusualError
    column[rows] = values


def _int32(numbers: Numbers) -> Numbers:
    if (numbers > _MAX_INT32).any():  # protobuf keeps only the low 32 bits
        raise _UnusualError
    return numbers


def _locations(raw: NDArray[np.uint8], begins: Numbers, ends: Numbers) -> Numbers:
    """Offset of the location in each pair of external data; it ends with the pair."""
    size = len(_BEFORE_LOCATION)
    if (ends - begins <= size).any():
        raise _UnusualError
    if (np.lib.stride_tricks.sliding_window_view(raw, size)[begins] != _BEFORE_LOCATION).any():
        raise _UnusualError
    sizes, located = _varints(raw, begins + size)
    if (located + sizes != ends).any():
        raise _UnusualError
    return located
