"""Removes data of large tensors from a serialized ModelProto, and inserts data of external tensors.

`strip_weights` and `fill` read only TensorProtos and the messages that can contain a TensorProto
(`walking.fields_to`). They skip all other fields, and the data of tensors, by the length of the
field, so no page of large weights is read. Skipped fields that are not replaced are copied
unchanged. A malformed skipped field is found only when protobuf parses the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
import onnx
from google.protobuf.message import DecodeError

from onnxarchive.errors import ArchiveFormatError, UnsupportedFeatureError
from onnxarchive.files.data import Buffer, as_bytes
from onnxarchive.model import DEFAULT_SIZE_THRESHOLD, dtypes, serialization, walking
from onnxarchive.model.dtypes import DataType
from onnxarchive.model.tensors import LOCATION
from onnxarchive.model.wire import (
    I32,
    I64,
    LEN,
    MAX_DEPTH,
    MAX_MESSAGE_BYTES,
    MAX_VARINT_WIDTH,
    VARINT,
    VARINT_BITS,
    VARINT_CONTINUES,
    VARINT_MASK,
    Field,
    fields_in,
    malformed,
    read_int32,
    tag_of,
    varint,
)

if TYPE_CHECKING:
    import numpy.typing as npt

SPAN_LOCATION: Final = "\0onnxarchive/span/"
"""Prefix of the location of a stripped tensor; no file path contains a NUL character."""

_COALESCED_BYTES: Final = 1 << 12  # `fill` joins successive pieces shorter than this

PIECE_BYTES = 1 << 18  # of a payload, decoded at a time

_Piece: TypeAlias = bytes | memoryview

_CODES_IN_GROUP: Final = 4  # six-bit codes that fill whole bytes


@dataclass(frozen=True, slots=True)
class Span:
    """The data of one tensor in a serialized model.

    Attributes:
        offset: Byte offset of the payload in the model.
        nbytes: Size of the payload in the model, in bytes.
        field: The field of TensorProto with the payload: `raw_data`, or a packed typed field.
        data_type: The data type of a payload of varints; None if the payload is raw data already,
            and `nbytes` the tensor's size.
    """

    offset: int
    nbytes: int
    field: str
    data_type: DataType | None


class StrippedModel(NamedTuple):
    """A model without its weights.

    Attributes:
        model: A serialized ModelProto; the location of a stripped tensor is `SPAN_LOCATION`
            followed by the index of its span.
        spans: The spans of the weights in the complete model, by ascending offset.
    """

    model: bytes
    spans: tuple[Span, ...]


def strip_weights(data: Buffer, *, size_threshold: int = DEFAULT_SIZE_THRESHOLD) -> StrippedModel:
    """Removes the data of large tensors from a serialized model.

    A tensor is stripped if all its data is in one field: `raw_data`, or a packed typed field that
    suits its `data_type`. These tensors do not change: strings, external tensors, tensors with
    unpacked data or with data in several fields, tensors below a singular field that occurs twice
    (protobuf merges the two), and tensors at the greatest depth that protobuf reads, since pairs of
    `external_data` are nested one level deeper.

    Args:
        data: A serialized ModelProto; bytes, or a map of a file. No reference is kept.
        size_threshold: Least size of a stripped tensor's data in the model, in bytes.

    Raises:
        ArchiveFormatError: The model is malformed, or holds `SPAN_LOCATION` itself.
    """
    spans: list[Span] = []

    def strip(tensor: _Frame) -> list[_Splice]:
        if tensor.depth == MAX_DEPTH:
            return []  # external_data would be nested too deep
        data_field = _data_field(wire, tensor)
        if data_field is None or data_field[1].nbytes < size_threshold:
            return []
        begin, span = data_field
        location = f"{SPAN_LOCATION}{len(spans)}"
        spans.append(span)
        # At the end of the tensor: of several `data_location` fields, protobuf takes the last.
        return [
            (begin, span.offset + span.nbytes, [_external_data(location)]),
            (tensor.stop, tensor.stop, [_EXTERNAL_LOCATION]),
        ]

    with memoryview(data) as view, view.cast("B") as wire:
        stripped = b"".join(_with_edits(wire, size_threshold, strip))
    if stripped.count(SPAN_LOCATION.encode()) != len(spans):
        raise ArchiveFormatError(
            f"the model holds the reserved location {SPAN_LOCATION!r}", rule="MODEL-3"
        )
    return StrippedModel(stripped, tuple(spans))


def fill(model: Buffer, data: Callable[[str], Buffer | None]) -> list[bytes | memoryview]:
    """Replaces external data in a serialized model by raw data.

    Tensors below a singular field that occurs twice (protobuf merges the two) do not change.

    Args:
        model: The model.
        data: Gives the raw data of a location, or None for a tensor that stays external.

    Returns:
        The filled model in pieces; `len` of each is its size in bytes. Parts of 4 KiB or more are
        views of `model` or of buffers from `data`; successive shorter parts are copied and joined.

    Raises:
        ArchiveFormatError: The model is malformed.
        UnsupportedFeatureError: The filled model would exceed protobuf's limit of 2 GiB.
    """
    wire = as_bytes(model)

    def fill_in(tensor: _Frame) -> list[_Splice]:
        location, outdated = _external_fields(wire, tensor)
        contents = None if location is None else data(location)
        if contents is None:
            return []
        raw = as_bytes(contents)
        header = varint(_RAW_DATA) + varint(len(raw))
        place = next(begin for tag, begin, *_ in outdated if tag == _EXTERNAL_DATA)
        return [
            (begin, end, [header, raw] if begin == place else [])
            for _, begin, _, _, end in outdated
        ]

    return list(_coalesced(_with_edits(wire, _SMALLEST_EXTERNAL_TENSOR, fill_in)))


# The messages that lead to a tensor

_TENSOR: Final = onnx.TensorProto.DESCRIPTOR
# {message type: {tag of a field: (message type of the field, True if the field is repeated)}}, for
# the fields that lead to a tensor.
_FIELDS_TO_TENSORS: Final = {
    message: {
        tag_of(message, name, LEN): (message.fields_by_name[name].message_type, is_repeated)
        for name, is_repeated in fields
    }
    for message, fields in walking.fields_to(_TENSOR).items()
}


class _Frame(NamedTuple):
    """A message on the way to a tensor, or the tensor itself."""

    message: Any  # descriptor
    prefix: int  # offset of the varint with the length of the message
    start: int
    stop: int
    depth: int


def _children(wire: memoryview, frame: _Frame, smallest: int) -> list[_Frame]:
    """Submessages of `frame` that lead to TensorProtos and have `smallest` bytes or more.

    Submessages of a singular field that occurs twice are left out, since protobuf merges them.
    """
    leading = _FIELDS_TO_TENSORS[frame.message]
    children: list[tuple[int, _Frame]] = []
    singular: set[int] = set()
    merged: set[int] = set()
    fields = fields_in(wire, frame.start, frame.stop, frame.depth, leading)
    for tag, _, prefix, start, stop in fields:
        message, is_repeated = leading[tag]
        if not is_repeated:
            (merged if tag in singular else singular).add(tag)
        if stop - start >= smallest:
            children.append((tag, _Frame(message, prefix, start, stop, frame.depth + 1)))
    return [child for tag, child in children if tag not in merged]


# The fields of a tensor


def _tensor_tag(field: str, wire_type: int) -> int:
    return tag_of(_TENSOR, field, wire_type)


_DATA_TYPE: Final = _tensor_tag("data_type", VARINT)
_DATA_LOCATION: Final = _tensor_tag("data_location", VARINT)
_DATA_LOCATIONS: Final = frozenset(onnx.TensorProto.DataLocation.values())
_EXTERNAL_DATA: Final = _tensor_tag("external_data", LEN)
_RAW_DATA: Final = _tensor_tag("raw_data", LEN)

_PACKED_FIELDS: Final[dict[int, str]] = {
    _tensor_tag(field, LEN): field for field in ("raw_data", *dtypes.TYPED_FIELDS)
}
_DATA_TAGS: Final = frozenset(
    {
        *_PACKED_FIELDS,
        _tensor_tag("string_data", LEN),
        _tensor_tag("float_data", I32),
        _tensor_tag("double_data", I64),
        _tensor_tag("int32_data", VARINT),
        _tensor_tag("int64_data", VARINT),
        _tensor_tag("uint64_data", VARINT),
    }
)
_TAGS_OF_DATA: Final = _DATA_TAGS | {_DATA_TYPE, _DATA_LOCATION, _EXTERNAL_DATA}
_OUTDATED_TAGS: Final = frozenset({_DATA_LOCATION, _EXTERNAL_DATA, _RAW_DATA})


def _data_field(wire: memoryview, tensor: _Frame) -> tuple[int, Span] | None:
    """The offset of the field with the data of a tensor in the model, and the span of the data.

    None for an external tensor, if the number of data fields is not 1, for strings, for unpacked
    numbers, and if the field does not suit the data type.
    """
    sole: Field | None = None
    number = 0
    for field in fields_in(wire, tensor.start, tensor.stop, tensor.depth, _TAGS_OF_DATA):
        tag, _, _, value, end = field
        if tag in _DATA_TAGS:
            if sole is not None:
                return None
            sole = field
        elif tag == _DATA_TYPE:
            number = read_int32(wire, value, end)
        elif tag == _DATA_LOCATION:
            if read_int32(wire, value, end) == onnx.TensorProto.EXTERNAL:
                return None
        else:  # external_data
            return None
    if sole is None or number == onnx.TensorProto.STRING:
        return None
    tag, begin, _, value, end = sole
    name, nbytes = _PACKED_FIELDS.get(tag), end - value
    if name is None:
        return None
    data_type = dtypes.BY_NUMBER.get(number)
    if tag == _RAW_DATA:
        data_type = None
    elif data_type is None or data_type.typed_field != name:
        return None
    elif dtypes.TYPED_FIELDS[name].kind == "f":
        if nbytes % data_type.typed_nbytes:
            expected = f"elements of {data_type.typed_nbytes} bytes"
            raise malformed(value, expected, f"{nbytes} bytes")
        data_type = None
    return begin, Span(value, nbytes, name, data_type)


def _external_fields(wire: memoryview, tensor: _Frame) -> tuple[str | None, list[Field]]:
    """Finds a tensor's external location, and the fields that raw data replaces."""
    location: str | bytes | None = None  # bytes, if it is not UTF-8
    data_location: int = onnx.TensorProto.DEFAULT
    outdated: list[Field] = []
    for field in fields_in(wire, tensor.start, tensor.stop, tensor.depth, _OUTDATED_TAGS):
        tag, _, _, value, end = field
        if tag == _DATA_LOCATION:
            number = read_int32(wire, value, end)
            if number in _DATA_LOCATIONS:  # else protobuf treats the field as unknown
                data_location = number
            if number != onnx.TensorProto.EXTERNAL:
                continue
        elif tag == _EXTERNAL_DATA:
            try:
                pair = serialization.parse(onnx.StringStringEntryProto, bytes(wire[value:end]))
            except DecodeError as error:
                raise malformed(value, "a pair of external_data", f"{error}") from None
            if pair.key == LOCATION:
                location = pair.value
        outdated.append(field)
    if location is None or data_location != onnx.TensorProto.EXTERNAL:
        return None, outdated
    if isinstance(location, bytes):
        raise malformed(tensor.start, "a location in UTF-8", repr(location))
    return location, outdated


def _external_data(location: str) -> bytes:
    pair = onnx.StringStringEntryProto(key=LOCATION, value=location)
    field: bytes = onnx.TensorProto(external_data=[pair]).SerializeToString()
    return field


_EXTERNAL_LOCATION: Final = onnx.TensorProto(
    data_location=onnx.TensorProto.EXTERNAL
).SerializeToString()
_SMALLEST_EXTERNAL_TENSOR: Final = len(_EXTERNAL_LOCATION + _external_data(""))


# Writing the wire


_Splice: TypeAlias = tuple[int, int, list[_Piece]]
"""Offsets of the begin and the end of bytes in a model, and what takes their place."""


def _with_edits(
    wire: memoryview, smallest: int, edit: Callable[[_Frame], list[_Splice]]
) -> list[_Piece]:
    """A serialized model with edited tensors, in pieces: views of `wire`, and what is inserted.

    Args:
        wire: The model.
        smallest: Least size of an edited tensor, in bytes.
        edit: Gives the edits of a tensor, in order. It is called for each TensorProto that
            `_children` finds, in the order of their offsets.
    """
    if len(wire) > MAX_MESSAGE_BYTES:
        raise malformed(0, f"at most {MAX_MESSAGE_BYTES} bytes", f"{len(wire)}")
    model = _Frame(onnx.ModelProto.DESCRIPTOR, 0, 0, len(wire), 0)
    pieces = _edited(wire, model, smallest, edit) or [wire]
    _length(pieces)
    return pieces


# A function inside `_with_edits` that calls itself would be in a reference cycle with the model and
# the data, and keep both in memory until the next garbage collection.
def _edited(
    wire: memoryview, frame: _Frame, smallest: int, edit: Callable[[_Frame], list[_Splice]]
) -> list[_Piece]:
    """The pieces of a message; none if nothing in it changes."""
    edits: list[_Splice] = []
    if frame.message is _TENSOR:
        edits = edit(frame)
    else:
        for child in _children(wire, frame, smallest):
            if contents := _edited(wire, child, smallest, edit):
                length = varint(_length(contents))
                edits.append((child.prefix, child.stop, [length, *contents]))
    if not edits:
        return []
    pieces: list[_Piece] = []
    position = frame.start
    for begin, end, inserted in edits:
        if position < begin:
            pieces.append(wire[position:begin])
        pieces += inserted
        position = end
    if position < frame.stop:
        pieces.append(wire[position : frame.stop])
    return pieces


def _length(pieces: Iterable[_Piece]) -> int:
    """The size of a message in bytes; refuses one that protobuf could not read."""
    nbytes = sum(map(len, pieces))
    if nbytes > MAX_MESSAGE_BYTES:
        raise UnsupportedFeatureError(
            f"the model would contain a message of {nbytes} bytes; "
            f"protobuf allows {MAX_MESSAGE_BYTES}: keep the weights external"
        )
    return nbytes


def _coalesced(pieces: Iterable[_Piece]) -> Iterator[_Piece]:
    """Joins successive pieces that are shorter than `_COALESCED_BYTES`."""
    short: list[_Piece] = []
    for piece in pieces:
        if len(piece) < _COALESCED_BYTES:
            short.append(piece)
            continue
        if short:
            yield b"".join(short)
            short = []
        yield piece
    if short:
        yield b"".join(short)


# Decoding the data of a tensor


def decode(data: Buffer, span: Span) -> Iterator[memoryview]:
    """Decodes the data of a tensor to raw data: little-endian, row-major, sub-byte types packed.

    If a number in a typed field is too large for the data type, only the low bits count, as in
    onnx. The number of elements is not compared with the tensor's dims.

    Yields:
        Pieces of at most 2 MiB. They are views of `data` if the payload is raw data already.
    """
    payload = as_bytes(data)[span.offset : span.offset + span.nbytes]
    if len(payload) != span.nbytes:
        raise malformed(span.offset, f"{span.nbytes} bytes of data", f"{len(payload)}")
    if span.data_type is None:
        for start in range(0, len(payload), PIECE_BYTES):
            yield payload[start : start + PIECE_BYTES]
        return
    for numbers in _varints(payload, span.offset):
        yield dtypes.typed_raw_data(numbers, span.data_type)


def _varints(payload: memoryview, offset: int) -> Iterator[npt.NDArray[np.uint64]]:
    """Decodes the numbers of a packed field in pieces, each but the last of whole groups."""
    start = 0
    while start < len(payload):
        piece = np.frombuffer(payload[start : start + PIECE_BYTES], np.uint8)
        ends = np.flatnonzero(piece < VARINT_CONTINUES) + 1
        widths = np.diff(ends, prepend=0)
        firsts = ends - widths
        if not ends.size or widths.max() > MAX_VARINT_WIDTH:
            bad = firsts[(widths > MAX_VARINT_WIDTH).argmax()] if ends.size else 0
            raise malformed(
                offset + start + int(bad),
                f"a varint of at most {MAX_VARINT_WIDTH} bytes",
                "a longer one",
            )
        if start + piece.size < len(payload):  # a varint or group that is cut begins the next piece
            count = ends.size - ends.size % _CODES_IN_GROUP
            ends, widths, firsts = ends[:count], widths[:count], firsts[:count]
        values = (piece[firsts] & VARINT_MASK).astype(np.uint64)
        for width in range(1, widths.max()):
            longer = np.flatnonzero(widths > width)
            bits = (piece[firsts[longer] + width] & VARINT_MASK).astype(np.uint64)
            values[longer] |= bits << np.uint64(width * VARINT_BITS)
        yield values
        start += int(ends[-1])
