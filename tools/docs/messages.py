"""Prints spec/messages.csv: every field of ModelProto and of its nested messages.

Reads the message definitions of the installed onnx. Messages are in breadth-first order from
ModelProto, fields in ascending order of their numbers.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any, Final

import onnx
from google.protobuf.descriptor import FieldDescriptor

HEADER: Final = ("message", "field", "number", "wire type", "type", "repeated")
# For each field type: its wire type (0 varint, 1 eight bytes, 2 length-delimited, 5 four bytes),
# and its name in onnx.proto.
WIRE_TYPES: Final = {
    FieldDescriptor.TYPE_DOUBLE: (1, "double"),
    FieldDescriptor.TYPE_FLOAT: (5, "float"),
    FieldDescriptor.TYPE_INT64: (0, "int64"),
    FieldDescriptor.TYPE_UINT64: (0, "uint64"),
    FieldDescriptor.TYPE_INT32: (0, "int32"),
    FieldDescriptor.TYPE_ENUM: (0, "enum"),
    FieldDescriptor.TYPE_STRING: (2, "string"),
    FieldDescriptor.TYPE_BYTES: (2, "bytes"),
    FieldDescriptor.TYPE_MESSAGE: (2, "message"),
}


def rows() -> Iterator[tuple[str, str, int, int, str, str]]:
    """The rows of the table, without the header."""
    waiting: list[Any] = [onnx.ModelProto.DESCRIPTOR]  # Any: protobuf has two descriptor classes
    for message in waiting:  # the loop appends to `waiting`
        for field in sorted(message.fields, key=lambda field: field.number):
            wire_type, type_ = WIRE_TYPES[field.type]
            if field.message_type is not None:
                type_ = _name(field.message_type)
                if field.message_type not in waiting:
                    waiting.append(field.message_type)
            elif field.enum_type is not None:
                type_ = "enum " + " ".join(str(value.number) for value in field.enum_type.values)
            repeated = "repeated" if field.is_repeated else ""
            yield _name(message), field.name, field.number, wire_type, type_, repeated


def _name(message: Any) -> str:
    return str(message.full_name).removeprefix("onnx.")


def table() -> str:
    """The text of spec/messages.csv."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEADER)
    writer.writerows(rows())
    return text.getvalue()


if __name__ == "__main__":
    print(table(), end="")
