"""Bytes that lie somewhere, in pieces that can be gone through again and again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview
PIECE_SIZE = 8 << 20  # bytes handed to `write`, and to `progress`, at a time


class SupportsWrite(Protocol):
    """A binary file, a pipe, a socket's file: whatever takes bytes."""

    def write(self, data: memoryview, /) -> int | None:
        """Writes `data`, or its first bytes, and gives how many; None means all."""


class Data(Protocol):
    """The bytes of an entry, in pieces that can be gone through more than once."""

    @property
    def nbytes(self) -> int:
        """How many they are."""

    @property
    def crc32(self) -> int | None:
        """Their CRC-32 where it is known beforehand; it is verified as they are written."""

    def __iter__(self) -> Iterator[memoryview]:
        """The pieces, of at most a few MiB each."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Bytes that are at hand or mapped.

    Attributes:
        view: The bytes.
        crc32: Their CRC-32 where it is known.
    """

    view: memoryview
    crc32: int | None = None

    @property
    def nbytes(self) -> int:
        """How many they are."""
        return self.view.nbytes

    @property
    def is_constant(self) -> bool:
        """Whether nobody can change them: they are those of a `bytes` object."""
        return isinstance(self.view.obj, bytes)

    def __iter__(self) -> Iterator[memoryview]:
        return pieces(self.view)


def as_bytes(data: Buffer) -> memoryview:
    """`data` as a flat view of its bytes; nothing is copied."""
    view = memoryview(data)
    # A view with a 0 in its shape cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")


def pieces(data: Buffer) -> Iterator[memoryview]:
    """`data` as views of at most `PIECE_SIZE` bytes each; nothing is copied."""
    view = as_bytes(data)
    for start in range(0, len(view), PIECE_SIZE):
        yield view[start : start + PIECE_SIZE]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Bytes in several places, one after another.

    Attributes:
        parts: The places.
        crc32: Not known.
    """

    parts: tuple[memoryview, ...]
    crc32: int | None = None

    @property
    def nbytes(self) -> int:
        """How many they are."""
        return sum(part.nbytes for part in self.parts)

    @property
    def is_constant(self) -> bool:
        """Whether nobody can change them: they are those of `bytes` objects."""
        return all(isinstance(part.obj, bytes) for part in self.parts)

    def __iter__(self) -> Iterator[memoryview]:
        return itertools.chain.from_iterable(map(pieces, self.parts))
