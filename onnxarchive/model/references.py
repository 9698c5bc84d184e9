"""What the initializers of a serialized model are and refer to, read from the wire all at once.

A protobuf object takes microseconds for each tensor and each of its fields. Here numpy looks at one
field of all initializers of the main graph at a time, so that a model of many tensors opens about
as fast as protobuf parses it. Only what almost all models have is understood: for others `read`
gives None, and they are looked at tensor by tensor.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import onnx

from onnxarchive.buffers import columns
from onnxarchive.model import dtypes
from onnxarchive.model.shapes import Shapes
from onnxarchive.model.tensors import DATA_FIELDS, EXTERNAL, LOCATION
from onnxarchive.model.wire import tag_of
from onnxarchive.model.wire_fields import LEN, VARINT, VARINT_BITS, VARINT_CONTINUES, WIRE_TYPE_MASK

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class References:
    """The external initializers of a model's main graph, none of which breaks a rule by itself.

    Attributes:
        count: How many initializers there are, external or not.
        indexes: Which of the initializers they are.
        locations: The location of each, one to a line. What is not ASCII is not what it says.
        nbytes: How many bytes shape and data type of each need.
        data_types: The number of the data type of each.
        ranks: The rank of each.
        begins: Where in `dims` the dims of each begin.
        dims: The dims of one behind those of another, of tensors that are not external, too.
    """

    count: int
    indexes: Numbers
    locations: str
    nbytes: Numbers
    data_types: Numbers
    ranks: Numbers
    begins: Numbers
    dims: Numbers

    def shapes(self, numbers: Numbers) -> Shapes:
        """Data types and shapes of some of them, in this order."""
        return Shapes(
            self.data_types[numbers], self.ranks[numbers], self.begins[numbers], self.dims
        )


def read(model: bytes) -> References | None:
    """Reads the external initializers of a model's main graph.

    Args:
        model: A serialized ModelProto, which protobuf has parsed.

    Returns:
        What they are and refer to; None where that breaks a rule, or where there is something
        unusual: many fields, fields twice, more than a location in `external_data`.
    """
    raw = np.frombuffer(model, np.uint8)
    try:
        graphs = _occurrences(model, 0, len(model), _GRAPH)
        if len(graphs) != 1:
            return None
        start, stop = (int(it[0]) for it in _contents(raw, graphs))
        begins, ends = _contents(raw, _occurrences(model, start, stop, _INITIALIZER))
        parts = [
            _references(model, raw, begins[first : first + ROWS], ends[first : first + ROWS])
            for first in range(0, len(begins), ROWS)
        ]
    except _UnusualError:
        return None
    return _joined(parts)


def _joined(parts: Sequence[References]) -> References:
    """What is found in parts of a graph's initializers, as of all of them."""
    count = dim_count = 0
    found: list[tuple[Numbers, ...]] = [(_NONE,) * 6]
    for part in parts:
        indexes, begins = part.indexes + count, part.begins + dim_count
        found.append((indexes, part.nbytes, part.data_types, part.ranks, begins, part.dims))
        count += part.count
        dim_count += len(part.dims)
    indexes, *others = map(np.concatenate, zip(*found, strict=True))
    locations = "\n".join([part.locations for part in parts if part.indexes.size])
    return References(count, indexes, locations, *others)


class _UnusualError(Exception):
    """There is something that those have to look at who take one tensor after the other."""


# Fields on the wire (encoding guide, "Message Structure")

_MAX_WIDTH: Final = 8  # bytes of a varint, whose number then has 56 bits
_MAX_FIELDS: Final = 32  # of a tensor
_MAX_TAG: Final = 1 << 10
_MAX_INT32: Final = (1 << 31) - 1


_GRAPH: Final = tag_of(onnx.ModelProto.DESCRIPTOR, "graph", LEN)
_INITIALIZER: Final = tag_of(onnx.GraphProto.DESCRIPTOR, "initializer", LEN)


def _occurrences(data: bytes, position: int, stop: int, wanted: int) -> Numbers:
    """Where one field of a message begins each time; `wanted` is its tag, of one byte."""
    found = array("q")
    while position < stop:
        tag = data[position]
        if tag == wanted:
            found.append(position)
        if tag >= VARINT_CONTINUES:
            tag, position = _number(data, position)
            if tag < VARINT_CONTINUES:  # in more bytes than it needs
                raise _UnusualError
        else:
            position += 1
        wire_type = tag & WIRE_TYPE_MASK
        if wire_type == LEN:
            if (size := data[position]) >= VARINT_CONTINUES:
                size, position = _number(data, position)
            else:
                position += 1
            position += size
        elif wire_type == VARINT:
            _, position = _number(data, position)
        else:
            raise _UnusualError
    return np.frombuffer(found, np.int64)


def _number(data: bytes, position: int) -> tuple[int, int]:
    """A varint, and where it ends."""
    number = shift = 0
    while (byte := data[position]) >= VARINT_CONTINUES:
        number |= (byte - VARINT_CONTINUES) << shift
        shift += VARINT_BITS
        position += 1
    return number | byte << shift, position + 1


def _contents(raw: NDArray[np.uint8], fields: Numbers) -> tuple[Numbers, Numbers]:
    """Where the messages begin and end that stand in fields with a tag of one byte."""
    sizes, begins = _numbers(raw, fields + 1)
    return begins, begins + sizes


def _numbers(raw: NDArray[np.uint8], positions: Numbers) -> tuple[Numbers, Numbers]:
    """Many varints, and where each ends."""
    byte = raw.take(positions)
    ends = positions + 1
    if byte.max(initial=0) < VARINT_CONTINUES:  # as almost always
        return byte.astype(np.int64), ends
    numbers = (byte & ~np.uint8(VARINT_CONTINUES)).astype(np.int64)
    going = np.flatnonzero(byte >= VARINT_CONTINUES)
    for width in range(1, _MAX_WIDTH):
        if not going.size:
            return numbers, ends
        byte = raw[ends[going]]
        bits = (byte & ~np.uint8(VARINT_CONTINUES)).astype(np.int64)
        numbers[going] |= bits << VARINT_BITS * width
        ends[going] += 1
        going = going[byte >= VARINT_CONTINUES]
    if going.size:
        raise _UnusualError
    return numbers, ends


def _fields(
    raw: NDArray[np.uint8], begins: Numbers, ends: Numbers
) -> Iterator[tuple[int, Numbers | slice, Numbers, Numbers]]:
    """Yields the fields of many messages: one of each, then the next of each, by their tags.

    Yields:
        A tag, the rows of the messages that have it, and of each the number that follows, which
        for what is not a number itself is its size in bytes, and where that number ends.
    """
    rows = np.flatnonzero(begins < ends)
    positions = begins[rows]
    for _ in range(_MAX_FIELDS):
        if not rows.size:
            return
        tags, positions = _numbers(raw, positions)
        if tags.max() > _MAX_TAG:
            raise _UnusualError
        present = np.flatnonzero(np.bincount(tags)).tolist()
        if any(tag & WIRE_TYPE_MASK not in (VARINT, LEN) for tag in present):
            raise _UnusualError
        numbers, positions = _numbers(raw, positions)
        for tag in present:
            if len(present) == 1:
                having: Numbers | slice = slice(None)
                found = having if len(rows) == len(begins) else rows
            else:
                having = np.flatnonzero(tags == tag)
                found = rows[having]
            yield tag, found, numbers[having], positions[having]
        positions = positions + np.where(tags & WIRE_TYPE_MASK == LEN, numbers, 0)
        going = positions < ends[rows]
        if not going.all():
            rows, positions = rows[going], positions[going]
    if rows.size:
        raise _UnusualError


# The fields of a tensor

_DIMS: Final = tag_of(onnx.TensorProto.DESCRIPTOR, "dims", VARINT)
_DATA_TYPE: Final = tag_of(onnx.TensorProto.DESCRIPTOR, "data_type", VARINT)
_DATA_LOCATION: Final = tag_of(onnx.TensorProto.DESCRIPTOR, "data_location", VARINT)
_EXTERNAL_DATA: Final = tag_of(onnx.TensorProto.DESCRIPTOR, "external_data", LEN)
_DATA: Final = frozenset(tag_of(onnx.TensorProto.DESCRIPTOR, field, LEN) for field in DATA_FIELDS)
_TEXT: Final = frozenset(
    tag_of(onnx.TensorProto.DESCRIPTOR, field, LEN)
    for field in ("name", "doc_string", "metadata_props")
)
# What stands in a pair of `external_data` before the size of its value, if it is the location.
_BEFORE_LOCATION: Final = np.frombuffer(
    onnx.StringStringEntryProto(key=LOCATION).SerializeToString()
    + bytes([tag_of(onnx.StringStringEntryProto.DESCRIPTOR, "value", LEN)]),
    np.uint8,
)
# Bits of an element by the number of the data type, 0 where it has no fixed width.
_BIT_WIDTHS: Final = np.array(
    [
        dtypes.BY_NUMBER[number].bit_width if number in dtypes.BY_NUMBER else 0
        for number in range(max(dtypes.BY_NUMBER) + 2)
    ]
)
_MAX_ELEMENTS: Final = 1 << 48  # of a tensor: their bits are then a number of 64 bits
_UNSET: Final = -1
_NONE: Final = np.empty(0, np.int64)
ROWS: Final = 1 << 12  # tensors that are looked at together: their columns stay in a core's cache


def _references(model: bytes, raw: NDArray[np.uint8], begins: Numbers, ends: Numbers) -> References:
    """What some tensors are and refer to."""
    count = len(begins)
    fields = {tag: np.full(count, _UNSET) for tag in (_DATA_TYPE, _DATA_LOCATION, _EXTERNAL_DATA)}
    location_ends = np.zeros(count, np.int64)
    elements = np.ones(count)  # their product is exact where it is not too large
    is_empty = np.zeros(count, np.bool_)
    is_held = np.zeros(count, np.bool_)
    ranks = np.zeros(count, np.int64)
    dims: list[tuple[Numbers | slice, Numbers, Numbers]] = []
    for tag, rows, numbers, positions in _fields(raw, begins, ends):
        if tag in fields:
            # protobuf takes the lower half of a number that is too large.
            if (fields[tag][rows] != _UNSET).any() or (numbers > _MAX_INT32).any():
                raise _UnusualError
            fields[tag][rows] = numbers
        if tag == _EXTERNAL_DATA:
            location_ends[rows] = positions + numbers
            fields[tag][rows] = _locations(raw, positions, positions + numbers)
        elif tag == _DIMS:
            is_empty[rows] |= numbers == 0
            with np.errstate(over="ignore"):  # what is infinite is too large
                elements[rows] *= np.maximum(numbers, 1)
            dims.append((rows, ranks[rows].copy(), numbers))  # a slice is a view
            ranks[rows] += 1
        elif tag in _DATA:
            is_held[rows] = True
        elif tag not in fields and tag not in _TEXT:
            raise _UnusualError
    location_begins = fields[_EXTERNAL_DATA]
    is_external = fields[_DATA_LOCATION] == EXTERNAL
    if (is_external != (location_begins != _UNSET)).any():
        raise _UnusualError
    indexes = np.flatnonzero(is_external)
    data_types = fields[_DATA_TYPE][indexes]
    # The last width is that of all other types, and that of _UNSET.
    bit_widths = _BIT_WIDTHS[np.minimum(data_types, len(_BIT_WIDTHS) - 1)]
    if (
        is_held[indexes].any()
        or (bit_widths == 0).any()
        or elements[indexes].max(initial=0) > _MAX_ELEMENTS
    ):
        raise _UnusualError
    elements[is_empty] = 0
    nbytes = -(-elements[indexes].astype(np.int64) * bit_widths // dtypes.BITS_PER_BYTE)
    locations = columns.lines(model, location_begins[indexes], location_ends[indexes])
    dims_begins = np.cumsum(ranks) - ranks
    joined = np.empty(ranks.sum(), np.int64)
    for rows, nth, numbers in dims:
        joined[dims_begins[rows] + nth] = numbers
    return References(
        count,
        indexes,
        locations.decode("latin-1"),
        nbytes,
        data_types,
        ranks[indexes],
        dims_begins[indexes],
        joined,
    )


def _locations(raw: NDArray[np.uint8], begins: Numbers, ends: Numbers) -> Numbers:
    """Where locations begin, each of which fills one pair of external data to its end."""
    size = len(_BEFORE_LOCATION)
    if (ends - begins <= size).any():
        raise _UnusualError
    if (np.lib.stride_tricks.sliding_window_view(raw, size)[begins] != _BEFORE_LOCATION).any():
        raise _UnusualError
    sizes, located = _numbers(raw, begins + size)
    if (located + sizes != ends).any():
        raise _UnusualError
    return located
