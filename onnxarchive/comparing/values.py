"""How far the elements of two tensors differ, read in pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from onnxarchive.model import dtypes
from onnxarchive.model.dtypes import DataType

_ELEMENTS: Final = 1 << 18  # compared at a time; whole bytes in every data type


@dataclass(frozen=True, slots=True)
class ValueChange:
    """How far the elements of two tensors of the same shape differ.

    Elements are compared as float64. Two NaNs are equal; 0.0 and -0.0 are equal.

    Attributes:
        elements: Number of elements.
        different: Number of elements that differ.
        max_absolute: Largest absolute change; infinite if an element changed from or to NaN or
            infinity.
        max_relative: Largest change relative to the first tensor's element; infinite if an element
            was 0.

    Example:
        difference = onnxarchive.diff("model.onnxa", "other.onnxa", values=True)
        for change in difference.sections["tensors"]:
            print(change.name, change.values)
    """

    elements: int
    different: int
    max_absolute: float
    max_relative: float


def compare_values(
    pieces: Iterable[bytes | memoryview],
    others: Iterable[bytes | memoryview],
    types: tuple[DataType, DataType],
    elements: int,
) -> ValueChange:
    """Compares two tensors with this number of elements, whose raw data is in pieces."""
    different, max_absolute, max_relative = 0, 0.0, 0.0
    counts = [min(_ELEMENTS, elements - begin) for begin in range(0, elements, _ELEMENTS)]
    chunks = parts_of(pieces, [types[0].nbytes([count]) for count in counts])
    other_chunks = parts_of(others, [types[1].nbytes([count]) for count in counts])
    for count, chunk, other_chunk in zip(counts, chunks, other_chunks, strict=True):
        # complex numbers have no order, but a distance
        number = np.complex128 if types[0].dtype.kind == "c" else np.float64
        one = dtypes.as_array(memoryview(chunk), types[0], [count]).astype(number)
        other = dtypes.as_array(memoryview(other_chunk), types[1], [count]).astype(number)
        differs = (one != other) & ~(np.isnan(one) & np.isnan(other))
        if not differs.any():
            continue
        before, after = one[differs], other[differs]
        with np.errstate(all="ignore"):
            absolute = np.nan_to_num(np.abs(after - before), nan=np.inf, posinf=np.inf)
            relative = np.nan_to_num(absolute / np.abs(before), nan=np.inf, posinf=np.inf)
        different += int(differs.sum())
        max_absolute = max(max_absolute, float(absolute.max()))
        max_relative = max(max_relative, float(relative.max()))
    return ValueChange(elements, different, max_absolute, max_relative)


def parts_of(pieces: Iterable[bytes | memoryview], sizes: Iterable[int]) -> Iterator[bytes]:
    """Yields copies of successive parts of these sizes, and reads the pieces to their end."""
    buffer = bytearray()
    stream = iter(pieces)
    for size in sizes:
        while len(buffer) < size:
            buffer += next(stream)
        yield bytes(buffer[:size])
        del buffer[:size]
    for _ in stream:  # to its end, where a CRC-32 is compared
        pass
