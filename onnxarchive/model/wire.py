"""Reads the fields of serialized messages in protobuf's wire format.

Sources: the protobuf encoding guide (https://protobuf.dev/programming-guides/encoding), and upb,
the protobuf parser that onnx uses, for limits that the guide leaves open.

Readers name the tags of the fields that they want. A long list of other values, such as the
millions of numbers in the attributes of a tree ensemble, is a run of fields with one tag (encoding
guide, "Repeated Elements"). numpy finds the end of a run of numbers, and `re` that of a run of
strings, with no step of Python for each value.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Container, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import onnx

from onnxarchive.errors import ArchiveFormatError
from onnxarchive.files.data import Buffer, as_bytes
from onnxarchive.model import walking

if TYPE_CHECKING:
    import numpy.typing as npt

# Encoding guide, "Message Structure"
VARINT, I64, LEN, START_GROUP, END_GROUP, I32 = range(6)
WIRE_TYPE_BITS: Final = 3
WIRE_TYPE_MASK: Final = 0b111
VARINT_BITS: Final = 7
VARINT_CONTINUES: Final = 0x80
VARINT_MASK: Final = 0x7F
_FIXED_WIDTHS: Final = {I32: 4, I64: 8}
_FIRST_TAG: Final = 1 << WIRE_TYPE_BITS  # field number 0 is reserved
# Limits of upb, the protobuf parser of onnx
MAX_VARINT_WIDTH: Final = 10
MAX_MESSAGE_BYTES: Final = 2**31 - 1
MAX_DEPTH: Final = 100  # messages and groups below the ModelProto
_MAX_TAG: Final = 2**32 - 1
_MAX_TAG_WIDTH: Final = 5
MAX_LENGTH_WIDTH: Final = 5
_INT32_MASK: Final = 2**32 - 1
_TOO_LONG_VARINT: Final = re.compile(rb"[\x80-\xff]{%d}" % MAX_VARINT_WIDTH)
# Runs of one field
_SHORT_RUN: Final = 64  # fields that are read one by one: numpy takes as long for a few
_FIRST_WINDOW: Final = 1 << 8  # bytes that are compared together
_MAX_WINDOW: Final = 1 << 16

Field: TypeAlias = tuple[int, int, int, int, int]
"""A field: its tag, and the offsets of the tag, the length, the value and the end."""


# One loop: a call for each field would make reading a model a sixth slower.
def fields_in(  # noqa: PLR0912
    wire: bytes | memoryview, start: int, stop: int, depth: int, tags: Container[int] | None = None
) -> Iterator[Field]:
    """Yields fields of one message, and checks the others; groups are skipped.

    Args:
        wire: Bytes that hold the message.
        start: Offset of the message in `wire`.
        stop: Offset of the end of the message in `wire`.
        depth: Number of messages that enclose the message.
        tags: Tags of the fields to yield; None for all.

    Raises:
        ArchiveFormatError: The message is malformed.
    """
    groups: list[int] = []
    if depth > MAX_DEPTH:
        raise _too_deep(start)
    position = start
    previous_tag = repeated = 0
    while position < stop:
        begin = position
        tag = wire[begin]
        prefix = begin + 1
        if tag >= VARINT_CONTINUES:
            tag, prefix = _read_varint(wire, begin, stop, _MAX_TAG_WIDTH)
        if tag > _MAX_TAG or (tag < _FIRST_TAG and not groups):
            raise malformed(begin, "a field number from 1 to 536870911", f"tag {tag}")
        wire_type = tag & WIRE_TYPE_MASK
        value = prefix
        if wire_type == LEN:
            if prefix < stop and (length := wire[prefix]) < VARINT_CONTINUES:
                value += 1
            else:
                length, value = _read_varint(wire, prefix, stop, MAX_LENGTH_WIDTH)
            position = value + length
        elif wire_type == VARINT:
            is_short = prefix < stop and wire[prefix] < VARINT_CONTINUES
            position = prefix + 1
            if not is_short:
                _, position = _read_varint(wire, prefix, stop, MAX_VARINT_WIDTH)
        elif wire_type in _FIXED_WIDTHS:
            position = prefix + _FIXED_WIDTHS[wire_type]
        else:
            position = prefix
            _enter_or_leave_group(groups, tag, begin, depth)
            continue
        if position > stop:
            raise malformed(
                begin, f"a field that ends at byte {stop} or before", f"one that ends at {position}"
            )
        if tags is None or tag in tags:
            if not groups:
                yield tag, begin, prefix, value, position
        elif tag != previous_tag:
            previous_tag, repeated = tag, 0
        else:
            repeated += 1
            if repeated == _SHORT_RUN and tag < VARINT_CONTINUES:
                position = _end_of_run(wire, tag, position, stop)
                repeated = 0
    if groups:
        raise malformed(stop, f"the end of group {groups[-1]}", "the end of the message")


# Runs of one field (encoding guide, "Repeated Elements")


def _end_of_run(wire: bytes | memoryview, tag: int, start: int, stop: int) -> int:
    """The end of successive fields with a tag of one byte, from `start`.

    A malformed field, a string of 128 bytes or more, or a padded tag may end the run early;
    `fields_in` then reads it.
    """
    nbytes_of_run = _nbytes_of_strings if tag & WIRE_TYPE_MASK == LEN else _nbytes_of_numbers
    nbytes = _FIRST_WINDOW
    while True:
        window = wire[start : min(stop, start + nbytes)]
        run = nbytes_of_run(window, tag)
        start += run
        if 2 * run <= len(window):  # the rest is larger than a field that the window cuts off
            return start
        nbytes = min(4 * nbytes, _MAX_WINDOW)


def _nbytes_of_numbers(window: bytes | memoryview, tag: int) -> int:
    """The size of the fields with this tag at the start of a window; none is cut off."""
    wire = np.frombuffer(window, np.uint8)
    wire_type = tag & WIRE_TYPE_MASK
    if wire_type in _FIXED_WIDTHS:
        width = 1 + _FIXED_WIDTHS[wire_type]
        return width * _leading(wire[: wire.size - wire.size % width : width] == tag)
    # "Base 128 Varints": only the last byte is below 128. Every other varint is a tag.
    ends = np.flatnonzero(wire < VARINT_CONTINUES)[1::2] + 1
    widths = np.diff(ends, prepend=0)
    count = _leading((wire[ends - widths] == tag) & (widths <= 1 + MAX_VARINT_WIDTH))
    return int(ends[count - 1]) if count else 0


def _leading(are_fields: npt.NDArray[np.bool_]) -> int:
    """The number of true elements before the first false one."""
    return are_fields.size if are_fields.all() else int(are_fields.argmin())


def _nbytes_of_strings(window: bytes | memoryview, tag: int) -> int:
    """As `_nbytes_of_numbers`, for the fields of strings of less than 128 bytes."""
    found = _short_strings(tag).match(window)
    return found.end() if found else 0


@cache
def _short_strings(tag: int) -> re.Pattern[bytes]:
    """Matches fields with this tag, and lengths of one byte ("Length-Delimited Records")."""
    lengths = b"|".join(b"\\x%02x.{%d}" % (length, length) for length in range(VARINT_CONTINUES))
    return re.compile(b"(?:\\x%02x(?:%b))+" % (tag, lengths), re.DOTALL)


# Faults and groups


def _too_deep(offset: int) -> ArchiveFormatError:
    return malformed(offset, f"at most {MAX_DEPTH} nested messages and groups", "one more")


def _enter_or_leave_group(groups: list[int], tag: int, begin: int, depth: int) -> None:
    number = tag >> WIRE_TYPE_BITS
    wire_type = tag & WIRE_TYPE_MASK
    if wire_type == START_GROUP:
        groups.append(number)
        if depth + len(groups) > MAX_DEPTH:
            raise _too_deep(begin)
    elif wire_type != END_GROUP:
        raise malformed(begin, "a wire type from 0 to 5", f"{wire_type}")
    elif not groups:
        raise malformed(begin, "no end of a group", f"the end of group {number}")
    elif (opened := groups.pop()) != number:
        raise malformed(begin, f"the end of group {opened}", f"the end of group {number}")


def _read_varint(
    wire: bytes | memoryview, start: int, stop: int, max_width: int
) -> tuple[int, int]:
    """Returns a varint's value, not cut to 64 bits, and the offset of the varint's end."""
    value = shift = 0
    for position in range(start, min(stop, start + max_width)):
        byte = wire[position]
        value |= (byte & VARINT_MASK) << shift
        if byte < VARINT_CONTINUES:
            return value, position + 1
        shift += VARINT_BITS
    raise malformed(
        start,
        f"a varint of at most {max_width} bytes that ends at byte {stop} or before",
        "a longer one",
    )


def read_int32(wire: memoryview, start: int, stop: int) -> int:
    """The value of an int32 or enum without its sign; of a longer varint, the low 32 bits count."""
    value, _ = _read_varint(wire, start, stop, MAX_VARINT_WIDTH)
    return value & _INT32_MASK


def malformed(offset: int, expected: str, found: str) -> ArchiveFormatError:
    """The error for bytes that are not a message."""
    return ArchiveFormatError(
        f"malformed model at byte {offset}: expected {expected}, found {found}", rule="MODEL-3"
    )


def varint(number: int) -> bytes:
    """A number below 2^64 as the shortest varint (encoding guide, "Base 128 Varints")."""
    encoded = bytearray()
    while number >= VARINT_CONTINUES:
        encoded.append(number & VARINT_MASK | VARINT_CONTINUES)
        number >>= VARINT_BITS
    encoded.append(number)
    return bytes(encoded)


def tag_of(message: Any, field: str, wire_type: int) -> int:
    """The tag of a field of a message's descriptor (encoding guide, "Message Structure")."""
    number: int = message.fields_by_name[field].number
    return number << WIRE_TYPE_BITS | wire_type


def fields_of(data: Buffer, tags: Container[int]) -> Iterator[Field]:
    """The fields of a serialized message that have one of `tags`; see `fields_in`."""
    wire = as_bytes(data)
    return fields_in(wire, 0, len(wire), 0, tags)


def count_graphs(data: Buffer) -> int:
    """The number of fields with a graph in a serialized ModelProto; protobuf merges several."""
    return sum([1 for _ in fields_of(data, {_GRAPH})])


def is_model(data: Buffer) -> bool:
    """True if `data` consists of fields, including a ModelProto's ir_version and graph.

    Fields of submessages are not read.
    """
    try:
        tags = {tag for tag, *_ in fields_of(data, {_IR_VERSION, _GRAPH})}
    except ArchiveFormatError:
        return False
    return len(tags) == 2


def missing_nbytes(data: Buffer) -> int:
    """The least number of bytes that a ModelProto lacks at its end.

    Returns:
        The number of bytes by which the last field of the ModelProto itself exceeds the end of
        `data`; 0 if no field does, or if the fields before it are not those of a ModelProto.
    """
    wire = as_bytes(data)
    tag = end = 0
    try:
        for tag, _, _, _, end in fields_in(wire, 0, sys.maxsize, 0):
            if tag not in _MODEL_TAGS or end >= len(wire):
                break
    except (ArchiveFormatError, IndexError):  # IndexError: `data` ends in a tag or number
        return 0
    is_model = len(wire) > 0 and wire[0] == _IR_VERSION and tag in _MODEL_TAGS
    return max(0, end - len(wire)) if is_model else 0


def have_more_messages(models: Sequence[Buffer], limit: int) -> bool:
    """True if models together have more than `limit` messages, not counting the ModelProtos.

    A message may take only two bytes when serialized, but takes 50 to 200 when parsed. So this
    check, made before parsing, bounds the memory. It ends as soon as the answer is certain; a
    malformed field before that raises an ArchiveFormatError.
    """
    count = 0
    unseen = sum(map(len, models))  # bytes
    if unseen // _SMALLEST_MESSAGE_FIELD <= limit:
        return False
    for data in models:
        wire = as_bytes(data)
        unseen -= len(wire)
        messages = _MESSAGES[onnx.ModelProto.DESCRIPTOR]
        stack = [(messages, fields_of(wire, messages))]
        while stack:
            messages, fields = stack[-1]
            for tag, _, _, start, stop in fields:
                count += 1
                rest = unseen + len(wire) - start
                if count > limit or count + rest // _SMALLEST_MESSAGE_FIELD <= limit:
                    return count > limit
                below = _MESSAGES[messages[tag]]
                if below:
                    stack.append((below, fields_in(wire, start, stop, len(stack), below)))
                    break
            else:
                stack.pop()
    return False


def require_well_formed(data: Buffer, message: Any = onnx.ModelProto.DESCRIPTOR) -> None:
    """Refuses a serialized message that protobuf cannot parse; reads every field of all messages.

    Args:
        data: The serialized message.
        message: The descriptor of its type.

    Raises:
        ArchiveFormatError: The message is malformed, or too large or too deep for protobuf.
    """
    wire = as_bytes(data)
    if len(wire) > MAX_MESSAGE_BYTES:
        raise malformed(0, f"at most {MAX_MESSAGE_BYTES} bytes", f"{len(wire)}")
    stack = [(message, fields_of(wire, _MESSAGES[message] | _NUMBERS[message]))]
    while stack:
        kind, fields = stack[-1]
        for tag, _, _, start, stop in fields:
            if tag in _MESSAGES[kind]:
                below = _MESSAGES[kind][tag]
                tags = _MESSAGES[below] | _NUMBERS[below]
                stack.append((below, fields_in(wire, start, stop, len(stack), tags)))
                break
            _require_packed(wire, start, stop, _NUMBERS[kind][tag])
        else:
            stack.pop()


def _require_packed(wire: memoryview, start: int, stop: int, width: int | None) -> None:
    """Refuses a malformed field of packed numbers; `width` is that of a number, None: varints."""
    if width is not None:
        if (stop - start) % width:
            raise malformed(start, f"numbers of {width} bytes", f"{stop - start} bytes")
        return
    payload = wire[start:stop]
    is_cut = start < stop and payload[-1] >= VARINT_CONTINUES
    if is_cut or _TOO_LONG_VARINT.search(payload):
        raise malformed(start, f"varints of at most {MAX_VARINT_WIDTH} bytes", "others")


def has_padded_tag(data: Buffer, message: Any = onnx.ModelProto.DESCRIPTOR) -> bool:
    """True if a known field of a well-formed message has a tag with more bytes than it needs."""
    wire = as_bytes(data)
    stack = [(message, fields_of(wire, _known_tags(message)))]
    while stack:
        kind, fields = stack[-1]
        for tag, begin, end_of_tag, start, stop in fields:
            if end_of_tag - begin != len(varint(tag)):
                return True
            below = _MESSAGES[kind].get(tag)
            if below is not None:
                stack.append((below, fields_in(wire, start, stop, len(stack), _known_tags(below))))
                break
        else:
            stack.pop()
    return False


def width_of(field: Any) -> int | None:
    """The bytes of a number in a field, by its descriptor; None for a varint."""
    if field.type in (field.TYPE_FLOAT, field.TYPE_FIXED32, field.TYPE_SFIXED32):
        return _FIXED_WIDTHS[I32]
    if field.type in (field.TYPE_DOUBLE, field.TYPE_FIXED64, field.TYPE_SFIXED64):
        return _FIXED_WIDTHS[I64]
    return None


def is_text(field: Any) -> bool:
    """True if a field, by its descriptor, holds strings or bytes."""
    return field.type in (field.TYPE_STRING, field.TYPE_BYTES)


@cache
def _known_tags(message: Any) -> set[int]:
    """The tags of the fields of a message's descriptor, each with every type of a value."""
    return {
        field.number << WIRE_TYPE_BITS | wire_type
        for field in message.fields
        for wire_type in (VARINT, I64, LEN, I32)
    }


# {message type: {tag of a field: message type of the field}}, for fields that hold messages.
_MESSAGES: Final = {
    message: {
        tag_of(message, field.name, LEN): field.message_type
        for field in message.fields
        if field.message_type
    }
    for message in walking.messages()
}
# {message type: {tag: width of a number}}, for fields of packed numbers.
_NUMBERS: Final = {
    message: {
        tag_of(message, field.name, LEN): width_of(field)
        for field in message.fields
        if walking.is_repeated(field) and not (field.message_type or is_text(field))
    }
    for message in walking.messages()
}
_IR_VERSION: Final = tag_of(onnx.ModelProto.DESCRIPTOR, "ir_version", VARINT)
_GRAPH: Final = tag_of(onnx.ModelProto.DESCRIPTOR, "graph", LEN)
_MODEL_TAGS: Final = {
    tag_of(field.containing_type, field.name, VARINT if field.type == field.TYPE_INT64 else LEN)
    for field in onnx.ModelProto.DESCRIPTOR.fields
}
_SMALLEST_MESSAGE_FIELD: Final = 2  # bytes: a tag and a length of 0
