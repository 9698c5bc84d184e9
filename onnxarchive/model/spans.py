"""Decodes the data of one tensor in a serialized model to raw data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from onnxarchive.buffers.data import Buffer, as_bytes
from onnxarchive.model import dtypes
from onnxarchive.model.wire import (
    MAX_VARINT_WIDTH,
    VARINT_BITS,
    VARINT_CONTINUES,
    VARINT_MASK,
    malformed,
)

if TYPE_CHECKING:
    import numpy.typing as npt


PIECE_BYTES = 1 << 18  # of a payload, decoded at a time

FIXED_WIDTH_FIELDS: Final = frozenset({"raw_data", "float_data", "double_data"})
# Bytes of raw data per number of a typed field, for each field and data type that fit together.
ELEMENT_WIDTHS: Final[dict[tuple[str, int], int]] = {
    (data_type.typed_field, number): data_type.typed_nbytes
    for number, data_type in dtypes.BY_NUMBER.items()
}
_SIX_BITS: Final = 6
_SIX_BIT_TYPES: Final = frozenset(
    number for number, data_type in dtypes.BY_NUMBER.items() if data_type.bit_width == _SIX_BITS
)


@dataclass(frozen=True, slots=True)
class Span:
    """The data of one tensor in a serialized model.

    Attributes:
        offset: Byte offset of the payload in the model.
        nbytes: Size of the payload in the model, in bytes.
        field: The field of TensorProto with the payload: `raw_data`, or a packed typed field.
        data_type: The tensor's `data_type`.
    """

    offset: int
    nbytes: int
    field: str
    data_type: int

    @property
    def is_raw(self) -> bool:
        """True if the payload is raw data already; then `nbytes` is the tensor's size."""
        return self.field in FIXED_WIDTH_FIELDS


def decode(data: Buffer, span: Span) -> Iterator[memoryview]:
    """Decodes the data of a tensor to raw data: little-endian, row-major, sub-byte types packed.

    If a number in a typed field is too large for the data type, only the low bits count, as in
    onnx. The number of elements is not compared with the tensor's dims.

    Args:
        data: The serialized model.
        span: Position, field and data type of the tensor's data.

    Yields:
        Pieces of at most 2 MiB. They are views of `data` if the payload is raw data already.

    Raises:
        ArchiveFormatError: The payload is malformed.
    """
    payload = as_bytes(data)[span.offset : span.offset + span.nbytes]
    if len(payload) != span.nbytes:
        raise malformed(span.offset, f"{span.nbytes} bytes of data", f"{len(payload)}")
    if span.is_raw:
        for start in range(0, len(payload), PIECE_BYTES):
            yield payload[start : start + PIECE_BYTES]
        return
    element = np.dtype(f"<u{ELEMENT_WIDTHS[span.field, span.data_type]}")
    pieces: Iterable[npt.NDArray[Any]] = (
        values.astype(element) for values in _varints(payload, span.offset)
    )
    if span.data_type in _SIX_BIT_TYPES:
        pieces = _packed_six_bit(pieces)
    for piece in pieces:
        yield piece.view(np.uint8).data


def _varints(payload: memoryview, offset: int) -> Iterator[npt.NDArray[np.uint64]]:
    """Decodes the numbers of a packed field piece by piece."""
    start = 0
    while start < len(payload):
        piece = np.frombuffer(payload[start : start + PIECE_BYTES], np.uint8)
        ends = np.flatnonzero(piece < VARINT_CONTINUES) + 1
        widths = np.diff(ends, prepend=0)
        firsts = ends - widths
        if not ends.size or widths.max() > MAX_VARINT_WIDTH:
            bad = firsts[(widths > MAX_VARINT_WIDTH).argmax()] if ends.size else 0
            raise malformed(
                offset + start + int(bad), f"a varint of at most {MAX_VARINT_WIDTH} bytes", "none"
            )
        values = (piece[firsts] & VARINT_MASK).astype(np.uint64)
        for width in range(1, widths.max()):
            longer = np.flatnonzero(widths > width)
            bits = (piece[firsts[longer] + width] & VARINT_MASK).astype(np.uint64)
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
