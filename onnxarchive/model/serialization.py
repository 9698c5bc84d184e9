"""Parses and serializes messages of ONNX; a lack of memory is a MemoryError.

protobuf has one error for a message at fault and for an allocation that failed. So after an error
the message is examined: one that is well-formed, or not too large, lacked memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

from google.protobuf.message import DecodeError, EncodeError

from onnxarchive.errors import ArchiveFormatError
from onnxarchive.model import walking, wire

if TYPE_CHECKING:
    from google.protobuf.message import Message

_MAX_PREFIX_NBYTES: Final = 10  # of a tag and a length

_Message = TypeVar("_Message", bound="Message")


def parse(kind: type[_Message], data: bytes) -> _Message:
    """Parses a message.

    Raises:
        DecodeError: The message is malformed.
        MemoryError: There is not enough memory.
    """
    try:
        return kind.FromString(data)
    except DecodeError:
        _require_malformed(kind.DESCRIPTOR, data)
        raise


def merge(message: Message, data: bytes) -> None:
    """Parses a message into another one; errors are those of `parse`."""
    try:
        message.MergeFromString(data)
    except DecodeError:
        _require_malformed(message.DESCRIPTOR, data)
        raise


def _require_malformed(descriptor: Any, data: bytes) -> None:
    """Raises a MemoryError for a well-formed message, which protobuf could not parse."""
    try:
        wire.require_well_formed(data, descriptor)
    except ArchiveFormatError:
        return
    raise MemoryError(f"protobuf cannot parse a message of {len(data)} bytes")


def serialize(message: Message) -> bytes:
    """Serializes a message deterministically.

    Raises:
        ArchiveFormatError: The message is too large for protobuf.
        MemoryError: There is not enough memory.
    """
    try:
        return message.SerializeToString(deterministic=True)
    except (EncodeError, ValueError) as error:
        raise _failure(message, error) from error


def serialized_nbytes(message: Message) -> int:
    """The size of a message when it is serialized, in bytes; errors are those of `serialize`."""
    try:
        return message.ByteSize()
    except (EncodeError, ValueError) as error:
        raise _failure(message, error) from error


def _failure(message: Message, error: Exception) -> Exception:
    """The error for a message that protobuf could not serialize."""
    if isinstance(error, EncodeError) and _max_nbytes(message) <= wire.MAX_MESSAGE_BYTES:
        return MemoryError("protobuf cannot serialize the model")
    return ArchiveFormatError(
        "expected a model that protobuf can serialize (less than 2 GiB, not counting its external "
        f"tensors), found: {error}",
        rule="MODEL-2",
    )


def _max_nbytes(message: Message) -> int:
    """An upper bound on the size of a serialized message, not counting unknown fields."""
    nbytes = 0
    for field, value in message.ListFields():
        values = value if walking.is_repeated(field) else [value]
        nbytes += len(values) * _MAX_PREFIX_NBYTES
        if field.message_type is not None:
            nbytes += sum(map(_max_nbytes, values))
        elif wire.is_text(field):
            nbytes += sum(len(text.encode() if isinstance(text, str) else text) for text in values)
        else:
            nbytes += len(values) * (wire.width_of(field) or wire.MAX_VARINT_WIDTH)
    return nbytes
