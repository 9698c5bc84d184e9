"""Parses and serializes messages of ONNX; a lack of memory is a MemoryError.

protobuf has one error for a malformed message and for an allocation that failed. So after an error
the message is examined: if it is well-formed, or not too large, memory was lacking.

Without a compiled parser, protobuf's Python parser accepts some malformed messages, and cannot read
some that are well-formed. So a message is examined before it is parsed there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from google.protobuf.internal import api_implementation
from google.protobuf.message import DecodeError, EncodeError

from onnxarchive.errors import ArchiveFormatError, UnsupportedFeatureError
from onnxarchive.model import walking, wire

if TYPE_CHECKING:
    from google.protobuf.message import Message

_MAX_PREFIX_NBYTES: Final = 10  # of a tag and a length
_HAS_PYTHON_PARSER: Final = api_implementation.Type() == "python"

_Message = TypeVar("_Message", bound="Message")
_Parsed = TypeVar("_Parsed")


def parse(kind: type[_Message], data: bytes) -> _Message:
    """Parses a message.

    Raises:
        DecodeError: The message is malformed.
        UnsupportedFeatureError: It is well-formed, but protobuf's Python parser cannot read it.
        MemoryError: There is not enough memory.
    """
    return _parse(kind.FromString, kind.DESCRIPTOR, data)


def merge(message: Message, data: bytes) -> None:
    """Parses a message into another one; errors are those of `parse`."""
    _parse(message.MergeFromString, message.DESCRIPTOR, data)


def _parse(parser: Callable[[bytes], _Parsed], descriptor: Any, data: bytes) -> _Parsed:
    """Calls a parser of protobuf with a message; errors are those of `parse`."""
    if _HAS_PYTHON_PARSER:
        return _parse_in_python(parser, descriptor, data)
    try:
        return parser(data)
    except DecodeError:
        _require_malformed(descriptor, data)
        raise


def _parse_in_python(parser: Callable[[bytes], _Parsed], descriptor: Any, data: bytes) -> _Parsed:
    try:
        wire.require_well_formed(data, descriptor)
    except ArchiveFormatError as error:
        raise DecodeError(error.message) from None
    if wire.has_padded_tag(data, descriptor):  # it would be an unknown field
        raise _unreadable("a number of a field has more bytes than it needs")
    try:
        return parser(data)
    except UnicodeDecodeError:
        raise _unreadable("a text is not UTF-8") from None
    except RecursionError:
        raise _unreadable("its messages are nested too deep") from None
    except DecodeError as error:
        raise _unreadable(str(error)) from None


def _unreadable(reason: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(
        f"protobuf's Python parser cannot read the model, which is well-formed ({reason}); use a "
        "Python for which protobuf has a compiled parser (upb)"
    )


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
        "protobuf cannot serialize the model, which must be less than 2 GiB, not counting its "
        f"external tensors: {error}",
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
