"""For speed only: many numbers, or many spans of some bytes, taken together with numpy."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NEWLINE: Final = ord("\n")
_ROWS: Final = 1 << 10  # spans gathered together
_MAX_SIZE: Final = 1 << 16  # in bytes of such spans; the offset of each takes 8 bytes


def integers(column: NDArray[np.int64]) -> Sequence[int]:
    """A column as a sequence of `int`, each made when it is read.

    Python's array gives one in a third of numpy's time.
    """
    numbers = array("q")
    numbers.frombytes(np.ascontiguousarray(column, np.int64).data.cast("B"))
    return numbers


def lines(data: bytes, begins: NDArray[np.int64], ends: NDArray[np.int64]) -> bytes:
    """Spans of some bytes, one to a line, without a newline at the end; a copy.

    Args:
        data: The bytes.
        begins: Offset of each span.
        ends: Offset of its end, not before its begin and inside `data`.
    """
    parts = range(0, len(begins), _ROWS)
    return b"\n".join([_lines(data, begins[i : i + _ROWS], ends[i : i + _ROWS]) for i in parts])


def _lines(data: bytes, begins: NDArray[np.int64], ends: NDArray[np.int64]) -> bytes:
    sizes = ends - begins + 1
    stops = np.cumsum(sizes)
    if not data or stops[-1] > _MAX_SIZE:
        spans = zip(begins.tolist(), ends.tolist(), strict=True)
        return b"\n".join([data[begin:end] for begin, end in spans])
    places: NDArray[Any] = np.repeat(begins - (stops - sizes), sizes)
    places += np.arange(places.size)
    gathered = np.frombuffer(data, np.uint8).take(places, mode="clip")  # one may end with `data`
    gathered[stops - 1] = _NEWLINE
    return gathered[:-1].tobytes()
