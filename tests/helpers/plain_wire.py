"""A plain reader of protobuf's wire format, value by value, to compare the library's with.

It is written from the encoding guide (https://protobuf.dev/programming-guides/encoding) alone, and
takes the limits from protobuf's parser upb.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from onnx import ModelProto

VARINT, I64, LEN, START_GROUP, END_GROUP, I32 = range(6)
FIXED = {I64: 8, I32: 4}
MAX_DEPTH = 100


class MalformedError(Exception):
    """The bytes are no message; `offset` is that of the fault."""

    def __init__(self, offset: int) -> None:
        super().__init__(offset)
        self.offset = offset


def varint(number: int, width: int = 1) -> bytes:
    """Encodes a varint, padded to `width` bytes."""
    groups = [number & 0x7F]
    while number := number >> 7:
        groups.append(number & 0x7F)
    groups += [0] * (width - len(groups))
    return bytes(group | 0x80 for group in groups[:-1]) + bytes(groups[-1:])


def varint_at(wire: bytes, offset: int, stop: int, max_width: int) -> tuple[int, int]:
    """The value of a varint, and the offset of its end."""
    value = 0
    for index in range(max_width):
        if offset + index >= stop:
            break
        byte = wire[offset + index]
        value += byte % 128 << 7 * index
        if byte < 128:
            return value, offset + index + 1
    raise MalformedError(offset)


def fields_of(
    wire: bytes, start: int, stop: int, depth: int
) -> Iterator[tuple[int, int, int, int, int]]:
    """Yields tag, and offsets of tag, length, value and end, of each field outside of groups."""
    open_groups: list[int] = []
    offset = start
    if depth > MAX_DEPTH:
        raise MalformedError(start)
    while offset < stop:
        begin = offset
        tag, offset = varint_at(wire, begin, stop, 5)
        number, wire_type = tag >> 3, tag & 7
        if tag >= 1 << 32 or (number == 0 and not open_groups):
            raise MalformedError(begin)
        prefix = value = offset
        if wire_type == VARINT:
            _, offset = varint_at(wire, prefix, stop, 10)
        elif wire_type == LEN:
            length, value = varint_at(wire, prefix, stop, 5)
            offset = value + length
        elif wire_type in FIXED:
            offset += FIXED[wire_type]
        elif wire_type == START_GROUP:
            open_groups.append(number)
            if depth + len(open_groups) > MAX_DEPTH:
                raise MalformedError(begin)
            continue
        elif wire_type == END_GROUP and open_groups and open_groups.pop() == number:
            continue
        else:
            raise MalformedError(begin)
        if offset > stop:
            raise MalformedError(begin)
        if not open_groups:
            yield tag, begin, prefix, value, offset
    if open_groups:
        raise MalformedError(stop)


def messages_of(wire: bytes) -> Iterator[int]:
    """Yields the offsets of the messages below a ModelProto; those without messages stay closed."""
    yield from _messages(wire, 0, len(wire), 0, ModelProto.DESCRIPTOR)


def _messages(wire: bytes, start: int, stop: int, depth: int, message: Any) -> Iterator[int]:
    below = {field.number << 3 | LEN: field for field in message.fields if field.message_type}
    if below:
        for tag, _, _, value, end in fields_of(wire, start, stop, depth):
            if tag in below:
                yield value
                yield from _messages(wire, value, end, depth + 1, below[tag].message_type)
