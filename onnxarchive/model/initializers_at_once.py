"""For speed only: makes many small initializers of a model in memory external.

Protobuf takes microseconds for each field of each tensor. Almost all initializers have a name, a
type, dims and `raw_data`, and nothing else; here their messages are put together from bytes. The
others are left to `copying.with_locations`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import onnx
from google.protobuf.unknown_fields import UnknownFieldSet

from onnxarchive.buffers.data import Data, Stored
from onnxarchive.model import dtypes, tensors
from onnxarchive.model.tensors import (
    EXTERNAL,
    INITIALIZER,
    LENGTH,
    LOCATION,
    OFFSET,
    TensorRef,
)
from onnxarchive.model.wire import LEN, fields_in, fields_of, tag_of, varint

SMALL_SIZE: Final = 1 << 16  # most bytes of a small tensor: it is copied to be looked at

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


# The fields after the name of an external tensor: location, and perhaps offset and length. Each has
# three groups: the size of the pair of key and value, the size of the value, and the value.
_PAIR: Final = rb"j(.)\n%c%b\x12(.)(%b)"
# Bytes of a pair beside its value.
_LOCATION_PAIR_SIZE, _OFFSET_PAIR_SIZE, _LENGTH_PAIR_SIZE = (
    len(onnx.StringStringEntryProto(key=key, value="").SerializeToString())
    for key in (LOCATION, OFFSET, LENGTH)
)
_NUMBER: Final = rb"0|[1-9][0-9]{0,17}"
_EXTERNAL: Final = re.compile(
    _PAIR % (len(LOCATION), LOCATION.encode(), rb".{1,100}?")
    + b"".join(
        rb"(?:%b)?" % (_PAIR % (len(key), key.encode(), _NUMBER)) for key in (OFFSET, LENGTH)
    )
    + re.escape(_IS_EXTERNAL),
    re.DOTALL,
)


# Location, offset and length of an external tensor's data; see `tensors.ExternalData`.
ExternalPlace: TypeAlias = tuple[str, int | None, int | None]
# A tensor's name; size of its data in bytes; serialized dims, data type and name; place of its
# data, None for `raw_data`. The garbage collector untracks plain tuples, but not named ones.
SmallTensor: TypeAlias = tuple[str, int, bytes, ExternalPlace | None]


class SmallInitializer(NamedTuple):
    """A small initializer of the main graph, planned as an entry.

    Attributes:
        name: The key of its entry.
        nbytes: Size of its data in bytes.
        initializers: The initializers of the graph.
        number: Its index.
        resolve: Gives its data; None if it is in `raw_data`.
    """

    name: str
    nbytes: int
    initializers: Sequence[onnx.TensorProto]
    number: int
    resolve: Callable[[TensorRef], Data] | None = None

    @property
    def ref(self) -> TensorRef:
        """The tensor."""
        return tensors.main_initializer(self.initializers[self.number], self.number)

    @property
    def raw_data(self) -> bytes:
        """Its `raw_data`, as a copy; no rule checks the bytes."""
        return self.initializers[self.number].raw_data

    def data(self) -> Data:
        """Its data.

        Raises:
            ArchiveFormatError: It no longer has as many bytes as shape and type need.
        """
        if self.resolve is not None:
            return self.resolve(self.ref)
        return Stored(tensors.raw_data(self.ref))


def find_small(model: onnx.ModelProto) -> dict[int, SmallTensor]:
    """Finds the small initializers of the main graph that have nothing unusual, by index.

    They have a name, dims, a data type whose bytes no rule checks, data in `raw_data` or at an
    external location, and nothing else.
    """
    if len(UnknownFieldSet(model.graph)):  # `insert` cannot order them
        return {}
    found: dict[int, SmallTensor] = {}
    known: dict[tuple[int, ...], tuple[int, bytes, bytes] | None] = {}
    for index, tensor in enumerate(model.graph.initializer):
        dims = tensor.dims
        # A slice takes half of the time of the elements one by one, and one element half of that.
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
        # This length leaves room for no other field.
        if len(serialized) == size and serialized.startswith(before_data, len(beginning)):
            found[index] = name, nbytes, beginning, None
        else:
            place = _place(serialized, len(beginning))
            if place is not None:
                found[index] = name, nbytes, beginning, place
    return found


def _describe(tensor: onnx.TensorProto) -> tuple[int, bytes, bytes] | None:
    """Size of a tensor's data, and what precedes its name and its data; None if unusual."""
    number, dims = tensor.data_type, tensor.dims[:]
    data_type = tensors.array_type(tensor)
    if data_type is None or data_type is dtypes.BOOL or data_type.is_packed:
        return None  # their bytes are checked
    nbytes = data_type.nbytes(dims)
    if nbytes > SMALL_SIZE:
        return None
    beginning = onnx.TensorProto(data_type=number, dims=dims).SerializeToString()
    return nbytes, beginning, _RAW_DATA + _varint(nbytes)


def _place(serialized: bytes, start: int) -> ExternalPlace | None:
    """The place of a tensor's data, if nothing else follows its name; else None."""
    match = _EXTERNAL.fullmatch(serialized, start)
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
        length_size[0] != len(length) or length_pair_size[0] != len(length) + _LENGTH_PAIR_SIZE
    ):
        return None
    if not location.isascii():
        return None
    return (
        location.decode(),
        None if offset is None else int(offset),
        None if length is None else int(length),
    )


def external(beginning: bytes, location: str) -> bytes:
    """A tensor as a serialized field of a graph.

    Args:
        beginning: Its serialized dims, data type and name.
        location: The location of its data.
    """
    encoded = location.encode()
    length = _varint(len(encoded))
    pair_size = len(_BEFORE_LOCATION) + len(length) + len(encoded)
    pair_length = _varint(pair_size)
    size = len(beginning) + len(_EXTERNAL_DATA) + len(pair_length) + pair_size + len(_IS_EXTERNAL)
    return b"".join(
        (
            *(_FIELD, _varint(size), beginning),
            *(_EXTERNAL_DATA, pair_length, _BEFORE_LOCATION, length, encoded),
            _IS_EXTERNAL,
        )
    )


def insert(model: bytes, added: Mapping[int, bytes], count: int) -> bytes:
    """Adds initializers to the main graph of a serialized model.

    Args:
        model: The model, as protobuf serializes it; its graph has no unknown fields.
        added: The serialized field of each by its index in the new graph.
        count: How many initializers the new graph has.

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
    before = model[start : others[0][0] if others else place]
    between = iter(others)
    parts = [before]
    for index in range(count):
        field = added.get(index)
        parts.append(field if field is not None else model[slice(*next(between))])
    parts.append(model[place:stop])
    graph_nbytes = sum(map(len, parts))
    return b"".join((model[:prefix], varint(graph_nbytes), *parts, model[stop:]))


def _varint(number: int) -> bytes:
    return _LENGTHS[number] if number < len(_LENGTHS) else varint(number)
