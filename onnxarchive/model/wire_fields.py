"""Fields of a serialized message (protobuf encoding guide), within the limits of upb."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from onnxarchive.errors import ArchiveFormatError

# The wire (encoding guide, "Message Structure"), and the limits of upb.
VARINT, I64, LEN, START_GROUP, END_GROUP, I32 = range(6)
FIXED_WIDTHS: Final = {I32: 4, I64: 8}
WIRE_TYPE_BITS = 3
WIRE_TYPE_MASK = 0b111
_FIRST_TAG = 1 << WIRE_TYPE_BITS  # field number 0 is reserved
_MAX_TAG = 2**32 - 1
VARINT_BITS = 7
VARINT_CONTINUES = 0x80
VARINT_MASK = 0x7F
MAX_VARINT_WIDTH = 10
MAX_TAG_WIDTH = 5
MAX_LENGTH_WIDTH = 5
MAX_MESSAGE_BYTES = 2**31 - 1
MAX_DEPTH = 100  # messages and groups below the ModelProto
INT32_MASK = 2**32 - 1
# A field: its tag, and the offsets of the tag, the length, the value and the end.
Field = tuple[int, int, int, int, int]


def fields_in(wire: memoryview, start: int, stop: int, depth: int) -> Iterator[Field]:
    """Yields the fields of one message, without those inside of groups."""
    groups: list[int] = []
    check_depth(depth, start)
    position = start
    while position < stop:
        begin = position
        tag = wire[begin]
        prefix = begin + 1
        if tag >= VARINT_CONTINUES:
            tag, prefix = read_varint(wire, begin, stop, MAX_TAG_WIDTH)
        if (tag < _FIRST_TAG and not groups) or tag > _MAX_TAG:
            raise malformed(begin, "a field number from 1 to 536870911", f"tag {tag}")
        wire_type = tag & WIRE_TYPE_MASK
        value = prefix
        if wire_type == LEN:
            if prefix < stop and (length := wire[prefix]) < VARINT_CONTINUES:
                value += 1
            else:
                length, value = read_varint(wire, prefix, stop, MAX_LENGTH_WIDTH)
            position = value + length
        elif wire_type == VARINT:
            short = prefix < stop and wire[prefix] < VARINT_CONTINUES
            position = prefix + 1 if short else read_varint(wire, prefix, stop, MAX_VARINT_WIDTH)[1]
        elif wire_type in FIXED_WIDTHS:
            position = prefix + FIXED_WIDTHS[wire_type]
        else:
            position = prefix
            _enter_or_leave_group(groups, tag, begin, depth)
            continue
        if position > stop:
            raise malformed(begin, f"a field that ends by {stop}", f"one that ends at {position}")
        if not groups:
            yield tag, begin, prefix, value, position
    if groups:
        raise malformed(stop, f"the end of group {groups[-1]}", "the end of the message")


def check_depth(depth: int, offset: int) -> None:
    """Refuses messages and groups in one another that upb would."""
    if depth > MAX_DEPTH:
        raise malformed(offset, f"at most {MAX_DEPTH} nested messages and groups", "one more")


def _enter_or_leave_group(groups: list[int], tag: int, begin: int, depth: int) -> None:
    number = tag >> WIRE_TYPE_BITS
    wire_type = tag & WIRE_TYPE_MASK
    if wire_type == START_GROUP:
        groups.append(number)
        check_depth(depth + len(groups), begin)
    elif wire_type != END_GROUP:
        raise malformed(begin, "a wire type from 0 to 5", f"{wire_type}")
    elif not groups or groups.pop() != number:
        raise malformed(begin, "the end of the open group, if any", f"the end of group {number}")


def read_varint(wire: memoryview, start: int, stop: int, max_width: int) -> tuple[int, int]:
    """Reads a varint; gives its value, not yet cut to 64 bits, and the offset after it."""
    value = shift = 0
    for position in range(start, min(stop, start + max_width)):
        byte = wire[position]
        value |= (byte & VARINT_MASK) << shift
        if byte < VARINT_CONTINUES:
            return value, position + 1
        shift += VARINT_BITS
    raise malformed(start, f"a varint of at most {max_width} bytes that ends by {stop}", "none")


def read_int32(wire: memoryview, start: int, stop: int) -> int:
    """The varint of an int32 or enum."""
    value, _ = read_varint(wire, start, stop, MAX_VARINT_WIDTH)
    return int.from_bytes((value & INT32_MASK).to_bytes(4, "little"), "little", signed=True)


def malformed(offset: int, expected: str, found: str) -> ArchiveFormatError:
    """The error of bytes that are no message."""
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
