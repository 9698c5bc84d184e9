"""For speed only: copies columns of numbers and spans of bytes with numpy."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NEWLINE: Final = ord("\n")
_ROWS: Final = 1 << 10  # spans gathered at a time
_MAX_SIZE: Final = 1 << 16  # bytes gathered at a time; each needs an index of 8 bytes


def integers(column: NDArray[Any]) -> array[int]:
    """Copies a column into an `array`, with 4 bytes per item if all numbers fit, else with 8.

    Reading an item takes a third as long from an `array` as from a numpy array.
    """
    is_short = column.size and 0 <= column.min() <= column.max() <= np.iinfo(np.uint32).max
    kind, dtype = ("I", np.uint32) if is_short else ("q", np.int64)
    numbers = array(kind)
    numbers.frombytes(np.ascontiguousarray(column, dtype).data.cast("B"))
    return numbers


def joined(parts: list[Any]) -> Iterator[Any]:
    """Joins the parts of each column: yields the columns in order, each as bytes or an array.

    Args:
        parts: A tuple for each group of rows, in order; item `i` of the tuple is the group's part
            of column `i`. The list is emptied, so that a column's parts are freed once the column
            is joined.
    """
    by_column = [list(column) for column in zip(*parts, strict=True)]
    parts.clear()
    while by_column:
        yield _joined(by_column.pop(0))


def _joined(parts: list[Any]) -> Any:
    return b"".join(parts) if isinstance(parts[0], bytes) else np.concatenate(parts)


def lines(data: bytes, begins: NDArray[np.int64], ends: NDArray[np.int64]) -> bytes:
    """Copies spans of `data`, with a newline after each.

    Args:
        data: The bytes.
        begins: Offset of each span.
        ends: Offset of the end of each span: at least its begin, at most the size of `data`.
    """
    parts = range(0, len(begins), _ROWS)
    return b"".join([_lines(data, begins[i : i + _ROWS], ends[i : i + _ROWS]) for i in parts])


def _lines(data: bytes, begins: NDArray[np.int64], ends: NDArray[np.int64]) -> bytes:
    sizes = ends - begins + 1
    stops = np.cumsum(sizes)
    if not data or stops[-1] > _MAX_SIZE:
        spans = zip(begins.tolist(), ends.tolist(), strict=True)
        return b"".join([data[begin:end] + b"\n" for begin, end in spans])
    # Gathers each span and the byte after the span, then replaces this byte by a newline. At the
    # end of `data`, "clip" reads the last byte again.
    gathered = np.frombuffer(data, np.uint8).take(indexes(begins, sizes), mode="clip")
    gathered[stops - 1] = _NEWLINE
    return gathered.tobytes()


def indexes(begins: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """The indexes of all bytes of spans, concatenated.

    Args:
        begins: Offset of each span.
        sizes: Size of each span in bytes.
    """
    places: NDArray[np.int64] = np.repeat(begins - (np.cumsum(sizes) - sizes), sizes)
    places += np.arange(places.size)
    return places


def items(raw: NDArray[np.uint8], begins: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Copies the item at each offset; the result is empty if `raw` is smaller than an item.

    If an item would pass the end of `raw`, the last item that lies within `raw` is copied instead.
    """
    if not begins.size or raw.size < dtype.itemsize:
        return np.empty(0, dtype)
    windows = _windows(raw, dtype.itemsize)
    found: NDArray[Any] = windows[np.minimum(begins, windows.size - 1)].view(dtype)
    return found


def set_items(raw: NDArray[np.uint8], begins: NDArray[Any], values: NDArray[Any]) -> None:
    """Copies each item of `values` to its offset in `raw`."""
    _windows(raw, values.itemsize)[begins] = values.view(f"V{values.itemsize}")


def _windows(raw: NDArray[np.uint8], size: int) -> NDArray[Any]:
    """Views the `size` bytes at every offset as one item, which numpy copies as a whole."""
    windows: NDArray[Any] = np.ndarray(raw.size - size + 1, f"V{size}", raw, strides=1)
    return windows
