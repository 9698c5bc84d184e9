"""A serialized ModelProto, read and rewritten on the wire without loading its weights.

`hollow` takes the tensors' data out of a `.onnx` file: it gives a skeleton, a ModelProto without
weights, and the spans of the file where the data lies. `decode` turns a span into raw data.
`fill` is the way back: it puts raw data in the place of external data.

Both ways share one walk. It enters only the messages through which a TensorProto can be reached,
as the descriptors of onnx.ModelProto tell, and steps over everything else by its length, so that
no page of the weights is touched. What the walk does not enter is kept byte for byte and left to
protobuf, which parses the skeleton: a malformed model is refused by one of the two.

Sources: the protobuf encoding guide (https://protobuf.dev/programming-guides/encoding) for the
wire; upb, the parser below onnx, for the limits that the guide leaves open; onnx-ml.proto for the
meaning of the fields of a TensorProto.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import onnx

from onnxarchive.errors import ArchiveFormatError, UnsupportedFeatureError
from onnxarchive.model import dtypes, schema

if TYPE_CHECKING:
    import numpy.typing as npt
    from typing_extensions import Buffer

__all__ = [
    "LEN",
    "SPAN_LOCATION",
    "VARINT",
    "VARINT_BITS",
    "VARINT_CONTINUES",
    "WIRE_TYPE_MASK",
    "Hollow",
    "Span",
    "decode",
    "external_data",
    "fill",
    "has_more_messages",
    "hollow",
    "is_model",
    "occurrences",
    "tag_of",
    "varint",
]

SPAN_LOCATION: Final = "\0onnxarchive/span/"
"""What the location of a hollowed tensor begins with; no file path holds a NUL character."""

# The wire (encoding guide, "Message Structure"), and the limits of upb.
VARINT, _I64, LEN, _START_GROUP, _END_GROUP, _I32 = range(6)
_FIXED_WIDTHS: Final = {_I32: 4, _I64: 8}
_WIRE_TYPE_BITS = 3
WIRE_TYPE_MASK = 0b111
_FIRST_TAG = 1 << _WIRE_TYPE_BITS  # field number 0 is reserved
_MAX_TAG = 2**32 - 1
VARINT_BITS = 7
VARINT_CONTINUES = 0x80
_VARINT_MASK = 0x7F
_MAX_VARINT_WIDTH = 10
_MAX_TAG_WIDTH = 5
_MAX_LENGTH_WIDTH = 5
_MAX_MESSAGE_BYTES = 2**31 - 1
_MAX_DEPTH = 100  # messages and groups below the ModelProto
_INT32_MASK = 2**32 - 1

_PIECE_BYTES = 1 << 18  # of a payload, decoded at a time
_COALESCED_BYTES = 1 << 12  # shorter pieces are joined, longer ones are viewed

_Piece = bytes | memoryview
_Field = tuple[int, int, int, int, int]
"""A field on the wire: its tag, and the offsets of the tag, the length, the value and the end."""


@dataclass(frozen=True, slots=True)
class Span:
    """Where the data of one tensor lies in a serialized model.

    Attributes:
        offset: Byte offset of the payload in the model.
        nbytes: Size of the payload in bytes, as it stands in the model.
        field: The field of TensorProto that holds it: `raw_data`, or a packed typed field.
        data_type: The tensor's `data_type`, which gives a typed field its meaning.
    """

    offset: int
    nbytes: int
    field: str
    data_type: int

    @property
    def is_raw(self) -> bool:
        """Whether the payload is raw data as it stands, so that `nbytes` is the tensor's size."""
        return self.field in _FIXED_WIDTH_FIELDS


@dataclass(frozen=True, slots=True)
class Hollow:
    """A model without its weights.

    Attributes:
        skeleton: A serialized ModelProto; the location of a hollowed tensor is `SPAN_LOCATION`
            followed by the index of its span.
        spans: Where the weights lie, in the order of the file.
    """

    skeleton: bytes
    spans: tuple[Span, ...]


def hollow(data: Buffer, *, size_threshold: int = 1024) -> Hollow:
    """Takes the data of large tensors out of a serialized model.

    A tensor is hollowed when all its data stands in one field: `raw_data`, or a packed typed field
    that suits its `data_type`. Strings, external tensors, tensors whose data is unpacked or stands
    in several fields, and whatever lies below a singular field that occurs twice (protobuf merges
    the two) stay as they are.

    Args:
        data: A serialized ModelProto; bytes, or a map of a file. It is not kept.
        size_threshold: Tensors whose data takes this many bytes of the model or more are hollowed.

    Returns:
        The skeleton, a copy of the rest of the model, and the spans, which copy nothing.

    Raises:
        ArchiveFormatError: The model is malformed, or names `SPAN_LOCATION` itself.
    """
    spans: list[Span] = []
    with memoryview(data) as view, view.cast("B") as wire:
        edits = _Edits(wire)
        for tensor in _tensors(wire, size_threshold):
            if tensor.depth == _MAX_DEPTH:
                continue  # no level is left for external_data
            found = _sole_data_field(wire, tensor)
            span = _span(*found) if found else None
            if found is None or span is None or span.nbytes < size_threshold:
                continue
            (_, begin, _, _, end), _ = found
            location = f"{SPAN_LOCATION}{len(spans)}"
            edits.replace(tensor, begin, end, _external_data(_LOCATION_KEY, location))
            # Last in the tensor, where it overrules a DEFAULT that the model spells out.
            edits.replace(tensor, tensor.stop, tensor.stop, _EXTERNAL_LOCATION)
            spans.append(span)
        skeleton = b"".join(edits.pieces())
    if skeleton.count(SPAN_LOCATION.encode()) != len(spans):
        raise ArchiveFormatError(
            f"the model holds the reserved location {SPAN_LOCATION!r}", rule="MODEL-3"
        )
    return Hollow(skeleton, tuple(spans))


def fill(model: Buffer, data: Callable[[str], Buffer | None]) -> list[bytes | memoryview]:
    """Puts raw data in the place of external data.

    What lies below a singular field that occurs twice (protobuf merges the two) stays as it is.

    Args:
        model: A serialized ModelProto.
        data: Gives the raw data of a location, or None for a tensor that shall stay external.

    Returns:
        Pieces which make up the plain model one after another; `len` of each is its size in bytes.
        A piece of 4 KiB or more is a view of `model` or of a buffer that `data` gave; shorter ones
        are copied and joined to their neighbours.

    Raises:
        ArchiveFormatError: The model is malformed.
        UnsupportedFeatureError: The plain model would pass protobuf's limit of 2 GiB.
    """
    wire = _bytes_of(model)
    edits = _Edits(wire)
    for tensor in _tensors(wire, _SMALLEST_EXTERNAL_TENSOR):
        location, outdated = _external_fields(wire, tensor)
        contents = None if location is None else data(location)
        if contents is None:
            continue
        raw = _bytes_of(contents)
        header = varint(_RAW_DATA) + varint(len(raw))
        place = next(begin for tag, begin, *_ in outdated if tag == _EXTERNAL_DATA)
        edits.replace(tensor, place, place, header, raw)
        for _, begin, _, _, end in outdated:
            edits.replace(tensor, begin, end)
    return list(_coalesced(edits.pieces()))


def decode(data: Buffer, span: Span) -> Iterator[memoryview]:
    """Gives the raw data of a tensor: little-endian, row-major, sub-byte types packed.

    A number of a typed field that is too large for the data type is cut to its low bits, as onnx
    cuts it. How many elements there are is not compared with the tensor's dims.

    Args:
        data: The model that was hollowed.
        span: A span of it.

    Yields:
        Pieces of at most 2 MiB. They are views of `data` where the payload is raw data already.

    Raises:
        ArchiveFormatError: The payload is malformed.
    """
    payload = _bytes_of(data)[span.offset : span.offset + span.nbytes]
    if len(payload) != span.nbytes:
        raise _malformed(span.offset, f"{span.nbytes} bytes of data", f"{len(payload)}")
    if span.is_raw:
        for start in range(0, len(payload), _PIECE_BYTES):
            yield payload[start : start + _PIECE_BYTES]
        return
    element = np.dtype(f"<u{_ELEMENT_WIDTHS[span.field, span.data_type]}")
    pieces: Iterable[npt.NDArray[Any]] = (
        values.astype(element) for values in _varints(payload, span.offset)
    )
    if span.data_type in _SIX_BIT_TYPES:
        pieces = _packed_six_bit(pieces)
    for piece in pieces:
        yield piece.view(np.uint8).data


def external_data(location: str) -> Callable[[int, int], bytes]:
    """Gives what serializes the `external_data` of tensors whose data lies in one file.

    A tensor takes it with `MergeFromString`, in a third of the time that its strings take one by
    one.

    Args:
        location: The file as external data names it.

    Returns:
        A function of a tensor's offset and length in bytes, which gives a serialized TensorProto
        with the pairs `location`, `offset` and `length` and nothing else.
    """
    named = _external_data(_LOCATION_KEY, location)

    def serialized(offset: int, length: int) -> bytes:
        return named + _external_number("offset", offset) + _external_number("length", length)

    return serialized


def occurrences(data: Buffer, field: str) -> int:
    """How often a field of the ModelProto itself occurs, which protobuf merges or lists.

    Args:
        data: A serialized ModelProto.
        field: Name of a field that holds a message.

    Raises:
        ArchiveFormatError: The model is malformed.
    """
    wanted = tag_of(onnx.ModelProto.DESCRIPTOR, field, LEN)
    wire = _bytes_of(data)
    return sum(tag == wanted for tag, *_ in _fields(wire, 0, len(wire), 0))


def has_more_messages(data: Buffer, limit: int) -> bool:
    """Whether a model has more messages than that, its own not counted.

    A message takes at least two bytes here, and a hundred or more as an object: this bounds what
    parsing costs, before it is done. Only as much is scanned as may decide it.

    Args:
        data: A serialized ModelProto.
        limit: The number of messages.

    Raises:
        ArchiveFormatError: The model is malformed.
    """
    wire = _bytes_of(data)
    count = 0
    stack = [(_MESSAGES[_MODEL], _fields(wire, 0, len(wire), 0))]
    while stack:
        below, fields = stack[-1]
        for tag, _, _, start, stop in fields:
            if tag in below:
                count += 1
                if count > limit or count + (len(wire) - start) // _SMALLEST_MESSAGE_FIELD <= limit:
                    return count > limit
                stack.append((_MESSAGES[below[tag]], _fields(wire, start, stop, len(stack))))
                break
        else:
            stack.pop()
    return False


def is_model(data: Buffer) -> bool:
    """Whether bytes are framed as a ModelProto with ir_version and graph; no more is looked at."""
    model = onnx.ModelProto.DESCRIPTOR
    wire = _bytes_of(data)
    try:
        tags = {tag for tag, *_ in _fields(wire, 0, len(wire), 0)}
    except ArchiveFormatError:
        return False
    return {tag_of(model, "ir_version", VARINT), tag_of(model, "graph", LEN)} <= tags


# The messages that lead to a tensor


_MODEL: Final[str] = onnx.ModelProto.DESCRIPTOR.full_name


def _routes() -> dict[str, dict[int, tuple[str, bool]]]:
    """For each message that can hold a tensor: tag -> (message below it, whether repeated)."""
    return {
        name: {
            field.number << _WIRE_TYPE_BITS | LEN: (
                field.message_type.full_name,
                schema.is_repeated(field),
            )
            for field in fields
        }
        for name, fields in schema.fields_to_tensors().items()
    }


def tag_of(message: Any, field: str, wire_type: int) -> int:
    """The tag of a field by the descriptor of its message (encoding guide, "Message Structure")."""
    number: int = message.fields_by_name[field].number
    return number << _WIRE_TYPE_BITS | wire_type


_ROUTES: Final = _routes()
_MESSAGES: Final = {
    name: {
        tag_of(message, field.name, LEN): field.message_type.full_name
        for field in message.fields
        if field.message_type
    }
    for name, message in schema.messages().items()
}
_SMALLEST_MESSAGE_FIELD: Final = 2  # bytes: a tag and a length of 0


@dataclass(slots=True)
class _Frame:
    """A message on the way to a tensor, or the tensor itself."""

    message: str
    parent: _Frame | None
    prefix: int  # offset of its length
    start: int
    stop: int
    depth: int
    growth: int = 0


def _tensors(wire: memoryview, smallest: int) -> Iterator[_Frame]:
    """Yields every TensorProto of `smallest` bytes or more, in the order of the file."""
    if len(wire) > _MAX_MESSAGE_BYTES:
        raise _malformed(0, f"at most {_MAX_MESSAGE_BYTES} bytes", f"{len(wire)}")
    stack = [_Frame(_MODEL, None, 0, 0, len(wire), 0)]
    while stack:
        frame = stack.pop()
        if frame.message == schema.TENSOR:
            yield frame
        else:
            stack += reversed(_children(wire, frame, smallest))


def _children(wire: memoryview, frame: _Frame, smallest: int) -> list[_Frame]:
    """Gives the messages one step nearer to a tensor that may hold one of `smallest` bytes."""
    routes = _ROUTES[frame.message]
    children: list[tuple[int, _Frame]] = []
    singular: set[int] = set()
    merged: set[int] = set()
    for tag, _, prefix, start, stop in _fields(wire, frame.start, frame.stop, frame.depth):
        if tag not in routes:
            continue
        message, repeated = routes[tag]
        if not repeated:
            (merged if tag in singular else singular).add(tag)
        if stop - start >= smallest:
            children.append((tag, _Frame(message, frame, prefix, start, stop, frame.depth + 1)))
    return [child for tag, child in children if tag not in merged]


# The fields of a tensor


def _tensor_tag(field: str, wire_type: int) -> int:
    return tag_of(onnx.TensorProto.DESCRIPTOR, field, wire_type)


_DATA_TYPE: Final = _tensor_tag("data_type", VARINT)
_DATA_LOCATION: Final = _tensor_tag("data_location", VARINT)
_DATA_LOCATIONS: Final = frozenset(onnx.TensorProto.DataLocation.values())
_EXTERNAL_DATA: Final = _tensor_tag("external_data", LEN)
_RAW_DATA: Final = _tensor_tag("raw_data", LEN)
_KEY: Final = tag_of(onnx.StringStringEntryProto.DESCRIPTOR, "key", LEN)
_VALUE: Final = tag_of(onnx.StringStringEntryProto.DESCRIPTOR, "value", LEN)
_LOCATION_KEY: Final = "location"

_FIXED_WIDTH_FIELDS: Final = frozenset({"raw_data", "float_data", "double_data"})
# Bytes of raw data that a number of a typed field gives, for each data type that the field suits.
_ELEMENT_WIDTHS: Final[dict[tuple[str, int], int]] = {
    (data_type.typed_field, number): data_type.typed_nbytes
    for number, data_type in dtypes.BY_NUMBER.items()
}
_SIX_BITS: Final = 6
_SIX_BIT_TYPES: Final = frozenset(
    number for number, data_type in dtypes.BY_NUMBER.items() if data_type.bit_width == _SIX_BITS
)
_PACKED_FIELDS: Final[dict[int, str]] = {
    _tensor_tag(field, LEN): field
    for field in {"raw_data", *(field for field, _ in _ELEMENT_WIDTHS)}
}
_DATA_TAGS: Final = frozenset(
    {
        *_PACKED_FIELDS,
        _tensor_tag("string_data", LEN),
        _tensor_tag("float_data", _I32),
        _tensor_tag("double_data", _I64),
        _tensor_tag("int32_data", VARINT),
        _tensor_tag("int64_data", VARINT),
        _tensor_tag("uint64_data", VARINT),
    }
)


def _sole_data_field(wire: memoryview, tensor: _Frame) -> tuple[_Field, int] | None:
    """Finds the one field that holds all data of a tensor that is not external, and its type."""
    found: _Field | None = None
    data_type = 0
    for field in _fields(wire, tensor.start, tensor.stop, tensor.depth):
        tag, _, _, value, end = field
        if tag in _DATA_TAGS:
            if found is not None:
                return None
            found = field
        elif tag == _DATA_TYPE:
            data_type = _int32(wire, value, end)
        elif tag == _EXTERNAL_DATA or (tag == _DATA_LOCATION and _is_external(wire, value, end)):
            return None
    return None if found is None else (found, data_type)


def _span(field: _Field, data_type: int) -> Span | None:
    """Gives the span of a data field, if it can be read without the tensor around it."""
    tag, _, _, value, end = field
    name = _PACKED_FIELDS.get(tag)
    if name is None or data_type == onnx.TensorProto.STRING:
        return None
    span = Span(value, end - value, name, data_type)
    if tag == _RAW_DATA:
        return span
    width = _ELEMENT_WIDTHS.get((name, data_type))
    if width is None:
        return None
    if span.is_raw and span.nbytes % width:
        raise _malformed(value, f"elements of {width} bytes", f"{span.nbytes} bytes")
    return span


def _external_fields(wire: memoryview, tensor: _Frame) -> tuple[str | None, list[_Field]]:
    """Finds a tensor's external location, and the fields that raw data makes outdated."""
    location: bytes | None = None
    data_location: int = onnx.TensorProto.DEFAULT
    outdated: list[_Field] = []
    for field in _fields(wire, tensor.start, tensor.stop, tensor.depth):
        tag, _, _, value, end = field
        if tag == _DATA_LOCATION:
            number = _int32(wire, value, end)
            if number in _DATA_LOCATIONS:  # protobuf takes any other for an unknown field
                data_location = number
            if number != onnx.TensorProto.EXTERNAL:
                continue
        elif tag == _EXTERNAL_DATA:
            named = _location(wire, value, end, tensor.depth + 1)
            location = location if named is None else named
        elif tag != _RAW_DATA:
            continue
        outdated.append(field)
    if location is None or data_location != onnx.TensorProto.EXTERNAL:
        return None, outdated
    try:
        return location.decode(), outdated
    except UnicodeDecodeError:
        raise _malformed(tensor.start, "a location in UTF-8", repr(location)) from None


def _location(wire: memoryview, start: int, stop: int, depth: int) -> bytes | None:
    """Gives the location that a pair of external_data names, if it names one."""
    key = value = b""
    for tag, _, _, begin, end in _fields(wire, start, stop, depth):
        if tag == _KEY:
            key = bytes(wire[begin:end])
        elif tag == _VALUE:
            value = bytes(wire[begin:end])
    return value if key == _LOCATION_KEY.encode() else None


def _is_external(wire: memoryview, start: int, stop: int) -> bool:
    return _int32(wire, start, stop) == onnx.TensorProto.EXTERNAL


def _external_data(key: str, value: str) -> bytes:
    pair = onnx.StringStringEntryProto(key=key, value=value)
    field: bytes = onnx.TensorProto(external_data=[pair]).SerializeToString()
    return field


def _external_number(key: str, number: int) -> bytes:
    digits = b"%d" % number
    return _external_data_head(key, len(digits)) + digits


@cache
def _external_data_head(key: str, width: int) -> bytes:
    """What stands before a value of `width` bytes."""
    return _external_data(key, " " * width)[:-width]


_EXTERNAL_LOCATION: Final = onnx.TensorProto(
    data_location=onnx.TensorProto.EXTERNAL
).SerializeToString()
_SMALLEST_EXTERNAL_TENSOR: Final = len(_EXTERNAL_LOCATION + _external_data(_LOCATION_KEY, ""))


# Reading the wire


def _fields(wire: memoryview, start: int, stop: int, depth: int) -> Iterator[_Field]:
    """Yields the fields of one message, without those inside of groups."""
    groups: list[int] = []
    _check_depth(depth, start)
    position = start
    while position < stop:
        begin = position
        tag = wire[begin]
        prefix = begin + 1
        if tag >= VARINT_CONTINUES:
            tag, prefix = _varint(wire, begin, stop, _MAX_TAG_WIDTH)
        if (tag < _FIRST_TAG and not groups) or tag > _MAX_TAG:
            raise _malformed(begin, "a field number from 1 to 536870911", f"tag {tag}")
        wire_type = tag & WIRE_TYPE_MASK
        value = prefix
        if wire_type == LEN:
            if prefix < stop and (length := wire[prefix]) < VARINT_CONTINUES:
                value += 1
            else:
                length, value = _varint(wire, prefix, stop, _MAX_LENGTH_WIDTH)
            position = value + length
        elif wire_type == VARINT:
            short = prefix < stop and wire[prefix] < VARINT_CONTINUES
            position = prefix + 1 if short else _varint(wire, prefix, stop, _MAX_VARINT_WIDTH)[1]
        elif wire_type in _FIXED_WIDTHS:
            position = prefix + _FIXED_WIDTHS[wire_type]
        else:
            position = prefix
            _enter_or_leave_group(groups, tag, begin, depth)
            continue
        if position > stop:
            raise _malformed(begin, f"a field that ends by {stop}", f"one that ends at {position}")
        if not groups:
            yield tag, begin, prefix, value, position
    if groups:
        raise _malformed(stop, f"the end of group {groups[-1]}", "the end of the message")


def _check_depth(depth: int, offset: int) -> None:
    if depth > _MAX_DEPTH:
        raise _malformed(offset, f"at most {_MAX_DEPTH} nested messages and groups", "one more")


def _enter_or_leave_group(groups: list[int], tag: int, begin: int, depth: int) -> None:
    number = tag >> _WIRE_TYPE_BITS
    wire_type = tag & WIRE_TYPE_MASK
    if wire_type == _START_GROUP:
        groups.append(number)
        _check_depth(depth + len(groups), begin)
    elif wire_type != _END_GROUP:
        raise _malformed(begin, "a wire type from 0 to 5", f"{wire_type}")
    elif not groups or groups.pop() != number:
        raise _malformed(begin, "the end of the open group, if any", f"the end of group {number}")


def _varint(wire: memoryview, start: int, stop: int, max_width: int) -> tuple[int, int]:
    """Reads a varint; gives its value, not yet cut to 64 bits, and the offset after it."""
    value = shift = 0
    for position in range(start, min(stop, start + max_width)):
        byte = wire[position]
        value |= (byte & _VARINT_MASK) << shift
        if byte < VARINT_CONTINUES:
            return value, position + 1
        shift += VARINT_BITS
    raise _malformed(start, f"a varint of at most {max_width} bytes that ends by {stop}", "none")


def _int32(wire: memoryview, start: int, stop: int) -> int:
    value, _ = _varint(wire, start, stop, _MAX_VARINT_WIDTH)
    return int.from_bytes((value & _INT32_MASK).to_bytes(4, "little"), "little", signed=True)


def _malformed(offset: int, expected: str, found: str) -> ArchiveFormatError:
    return ArchiveFormatError(
        f"malformed model at byte {offset}: expected {expected}, found {found}", rule="MODEL-3"
    )


def _bytes_of(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(b"")  # cast refuses a shape with a zero


# Writing the wire


class _Edits:
    """Replacements in a model; the lengths of the messages around them follow."""

    def __init__(self, wire: memoryview) -> None:
        self._wire = wire
        self._edits: list[tuple[int, int, tuple[_Piece, ...]]] = []
        self._frames: dict[int, _Frame] = {}  # the edited messages, by the offset of their start

    def replace(self, frame: _Frame, begin: int, end: int, *contents: _Piece) -> None:
        """Puts `contents` in the place of the bytes from `begin` to `end`, fields of `frame`."""
        self._edits.append((begin, end, contents))
        frame.growth += sum(map(len, contents)) - (end - begin)
        edited: _Frame | None = frame
        while edited is not None and edited.start not in self._frames:
            self._frames[edited.start] = edited
            edited = edited.parent

    def pieces(self) -> Iterator[_Piece]:
        """Yields the edited model: views of it between the contents that were put in."""
        self._mend_lengths()
        position = 0
        for begin, end, contents in sorted(self._edits, key=lambda edit: edit[0]):
            if position < begin:
                yield self._wire[position:begin]
            yield from contents
            position = end
        if position < len(self._wire):
            yield self._wire[position:]

    def _mend_lengths(self) -> None:
        inner_first = sorted(self._frames.values(), key=lambda frame: frame.start, reverse=True)
        for frame in inner_first:
            length = frame.stop - frame.start + frame.growth
            if length > _MAX_MESSAGE_BYTES:
                raise UnsupportedFeatureError(
                    f"the model would take {length} bytes in one message; "
                    f"protobuf allows {_MAX_MESSAGE_BYTES}: keep its data external"
                )
            if frame.parent is not None:
                frame.parent.growth += frame.growth
                self.replace(frame.parent, frame.prefix, frame.start, varint(length))


def varint(number: int) -> bytes:
    """A number below 2^64 as the shortest varint (encoding guide, "Base 128 Varints")."""
    encoded = bytearray()
    while number >= VARINT_CONTINUES:
        encoded.append(number & _VARINT_MASK | VARINT_CONTINUES)
        number >>= VARINT_BITS
    encoded.append(number)
    return bytes(encoded)


def _coalesced(pieces: Iterable[_Piece]) -> Iterator[_Piece]:
    """Joins neighbours that are shorter than `_COALESCED_BYTES`."""
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


# Reading typed data


def _varints(payload: memoryview, offset: int) -> Iterator[npt.NDArray[np.uint64]]:
    """Yields the numbers of a packed field, a piece of it at a time."""
    start = 0
    while start < len(payload):
        piece = np.frombuffer(payload[start : start + _PIECE_BYTES], np.uint8)
        ends = np.flatnonzero(piece < VARINT_CONTINUES) + 1
        widths = np.diff(ends, prepend=0)
        firsts = ends - widths
        if not ends.size or widths.max() > _MAX_VARINT_WIDTH:
            bad = firsts[(widths > _MAX_VARINT_WIDTH).argmax()] if ends.size else 0
            raise _malformed(
                offset + start + int(bad), f"a varint of at most {_MAX_VARINT_WIDTH} bytes", "none"
            )
        values = (piece[firsts] & _VARINT_MASK).astype(np.uint64)
        for width in range(1, widths.max()):
            longer = np.flatnonzero(widths > width)
            bits = (piece[firsts[longer] + width] & _VARINT_MASK).astype(np.uint64)
            values[longer] |= bits << np.uint64(width * VARINT_BITS)
        yield values
        start += int(ends[-1])  # a varint that is cut here begins the next piece


def _packed_six_bit(codes: Iterable[npt.NDArray[Any]]) -> Iterator[npt.NDArray[np.uint8]]:
    """Packs four six-bit codes into three bytes, the first in the lowest bits."""
    rest = np.empty(0, np.uint8)
    for piece in codes:
        whole = np.concatenate([rest, piece])
        cut = whole.size - whole.size % 4
        rest = whole[cut:]
        if cut:
            yield dtypes.pack(whole[:cut], _SIX_BITS)
    if rest.size:
        yield dtypes.pack(rest, _SIX_BITS)
