"""For speed only: small initializers of a model in memory, which become external all together.

A protobuf object takes microseconds for each field of each tensor. Almost all initializers have a
name, a type, dims and `raw_data`, and nothing else; their messages are made of bytes here. Others
are left to `copying.with_locations`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import onnx
from google.protobuf.unknown_fields import UnknownFieldSet

from onnxarchive.buffers.data import Stored
from onnxarchive.model import dtypes, tensors
from onnxarchive.model.tensors import EXTERNAL, INITIALIZER, LOCATION, TensorRef
from onnxarchive.model.wire import LEN, fields_in, fields_of, tag_of, varint

SMALL_SIZE: Final = 1 << 16  # bytes of a tensor; larger ones are not copied to look at them

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


class SmallInitializer(NamedTuple):
    """An initializer of the main graph that is stored outside; it is planned as an entry.

    Attributes:
        name: The key of its entry.
        nbytes: Size of its data in bytes.
        initializers: The initializers of the graph.
        number: Its index.
    """

    name: str
    nbytes: int
    initializers: Sequence[onnx.TensorProto]
    number: int

    @property
    def ref(self) -> TensorRef:
        """The tensor."""
        return tensors.main_initializer(self.initializers[self.number], self.number)

    @property
    def raw_data(self) -> bytes:
        """Its data, as a copy; the bytes are checked by no rule."""
        return self.initializers[self.number].raw_data

    def data(self) -> Stored:
        """Its data, as a copy.

        Raises:
            ArchiveFormatError: It has not as many bytes as shape and type need any more.
        """
        return Stored(tensors.raw_data(self.ref))


def find_small(model: onnx.ModelProto, size_threshold: int) -> dict[int, tuple[str, int, bytes]]:
    """Finds small initializers of the main graph that have `raw_data` and nothing unusual.

    Args:
        model: The model.
        size_threshold: Least size of their data in bytes.

    Returns:
        By index the name, the size of the data in bytes, and the serialized tensor without data.
    """
    if len(UnknownFieldSet(model.graph)):  # they would follow the initializers
        return {}
    found: dict[int, tuple[str, int, bytes]] = {}
    known: dict[tuple[int, ...], tuple[int, bytes, bytes] | None] = {}
    for index, tensor in enumerate(model.graph.initializer):
        described = data_type, *dims = tensor.data_type, *tensor.dims[:]
        if described not in known:
            known[described] = _describe(data_type, dims, size_threshold)
        name = tensor.name
        usual = known[described]
        if usual is None or not isinstance(name, str):
            continue
        nbytes, beginning, before_data = usual
        encoded = name.encode()
        beginning = b"".join((beginning, _NAME, _varint(len(encoded)), encoded))
        size = len(beginning) + len(before_data) + nbytes
        serialized = tensor.SerializeToString()
        # Its length leaves room for no other field.
        if len(serialized) == size and serialized.startswith(beginning + before_data):
            found[index] = name, nbytes, beginning
    return found


def _describe(
    number: int, dims: Sequence[int], size_threshold: int
) -> tuple[int, bytes, bytes] | None:
    """Size of a tensor's data, and what precedes its name and its data; None if unusual."""
    data_type = tensors.array_type(onnx.TensorProto(data_type=number, dims=dims))
    if data_type is None or data_type is dtypes.BOOL or data_type.is_packed:
        return None  # their bytes are checked
    nbytes = data_type.nbytes(dims)
    if not size_threshold <= nbytes <= SMALL_SIZE:
        return None
    beginning = onnx.TensorProto(data_type=number, dims=dims).SerializeToString()
    return nbytes, beginning, _RAW_DATA + _varint(nbytes)


def external(beginning: bytes, location: str) -> bytes:
    """A tensor as a serialized field of a graph.

    Args:
        beginning: Its serialized dims, data type and name.
        location: The location of its data.
    """
    encoded = location.encode()
    value = b"".join((_BEFORE_LOCATION, _varint(len(encoded)), encoded))
    ending = b"".join((_EXTERNAL_DATA, _varint(len(value)), value, _IS_EXTERNAL))
    return b"".join((_FIELD, _varint(len(beginning) + len(ending)), beginning, ending))


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
