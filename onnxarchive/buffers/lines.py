"""To save time and memory only: stores many names as lines of one text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, overload

import numpy as np

from onnxarchive.buffers import columns

if TYPE_CHECKING:
    from numpy.typing import NDArray

_TOGETHER: Final = 1 << 10  # lines split at a time
_SEARCHED: Final = 1 << 16  # characters searched for newlines at a time
_MAX_BUCKET_BITS: Final = 16


class Lines(Sequence[str]):
    """The lines of a text, each copied when it is read.

    Args:
        text: The text, with a newline after each line.
        begins: Offset of each line, then the offset after the newline of the last line. None means
            all lines of the text.
    """

    def __init__(self, text: str, begins: Sequence[int] | None = None) -> None:
        self._text = text
        self._begins = _begins(text) if begins is None else begins

    @property
    def text(self) -> str:
        """The lines, with a newline after each."""
        return self._text[self._begins[0] : self._begins[-1]]

    @cached_property
    def numbers(self) -> LineNumbers:
        """The number of each line, by its text."""
        return LineNumbers(self)

    def __len__(self) -> int:
        return len(self._begins) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...

    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:
                return Lines(self._text, self._begins[start : max(start, stop) + 1])
            return [self[number] for number in range(start, stop, step)]
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._text[self._begins[index] : self._begins[index + 1] - 1]

    def __iter__(self) -> Iterator[str]:
        for first in range(0, len(self), _TOGETHER):
            last = min(first + _TOGETHER, len(self))
            yield from self._text[self._begins[first] : self._begins[last] - 1].split("\n")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Lines):
            return self.text == other.text
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


class LineNumbers(Mapping[str, int]):
    """Maps each line to its number; if several lines are equal, to the number of any of them.

    Attributes:
        are_distinct: True if all lines are distinct; False if two lines are equal, or have the same
            hash by chance.
    """

    def __init__(self, lines: Lines) -> None:
        # Does not keep `lines`, which keeps this object: a reference cycle would be freed late.
        self._text, self._begins = lines._text, lines._begins
        self._likely = 0  # number of the line to try first
        found = hashes(lines)
        self.are_distinct = are_distinct(found)
        bits = min(len(lines).bit_length(), _MAX_BUCKET_BITS)
        self._mask = (1 << bits) - 1
        buckets = (found & self._mask).astype(np.uint16)
        # Line numbers sorted by bucket, and the index at which each bucket begins.
        self._sorted = columns.integers(np.argsort(buckets, kind="stable"))
        counts = np.bincount(buckets, minlength=self._mask + 1)
        self._starts = columns.integers(np.append(0, np.cumsum(counts)))

    def __getitem__(self, line: str) -> int:
        number: int | None = self.get(line)
        if number is None:
            raise KeyError(line)
        return number

    def get(self, line: object, default: Any = None) -> Any:
        """The number of a line, or `default`."""
        text, begins, number = self._text, self._begins, self._likely
        if number < len(begins) - 1 and text[begins[number] : begins[number + 1] - 1] == line:
            self._likely = number + 1
            return number
        if not isinstance(line, str):
            return default
        bucket = hash(line) & self._mask
        size = len(line) + 1
        for number in self._sorted[self._starts[bucket] : self._starts[bucket + 1]]:
            begin = begins[number]
            if begins[number + 1] == begin + size and text.startswith(line, begin):
                self._likely = number + 1
                return number
        return default

    def __contains__(self, line: object) -> bool:
        return self.get(line) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(Lines(self._text, self._begins))

    def __len__(self) -> int:
        return len(self._begins) - 1


def numbers_of(names: Sequence[str]) -> Mapping[str, int]:
    """Maps distinct names to their indexes."""
    if isinstance(names, Lines):
        return names.numbers
    return dict(zip(names, range(len(names)), strict=True))


def text_of(names: Sequence[str]) -> str:
    """Joins names, with a newline after each."""
    return names.text if isinstance(names, Lines) else "".join([f"{name}\n" for name in names])


def hashes(names: Sequence[str]) -> NDArray[np.int64]:
    """The hash of each name."""
    return np.fromiter(map(hash, names), np.int64, len(names))


def are_distinct(hashes: NDArray[np.int64]) -> bool:
    """True if all hashes, and so all hashed names, are distinct; False proves nothing."""
    ordered = np.sort(hashes)  # takes a fifth of the time of `np.unique`
    return bool((ordered[1:] != ordered[:-1]).all())


def _begins(text: str) -> Sequence[int]:
    found = [np.zeros(1, np.int64)]
    for start in range(0, len(text), _SEARCHED):
        piece = text[start : start + _SEARCHED]
        encoded, size = (piece.encode(), 1) if piece.isascii() else (piece.encode("utf-32-le"), 4)
        raw = np.frombuffer(encoded, f"<u{size}")
        found.append(np.flatnonzero(raw == ord("\n")) + (start + 1))
    return columns.integers(np.concatenate(found))
