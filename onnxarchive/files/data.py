"""Bytes in memory, in maps and elsewhere, in pieces that can be read repeatedly; CRC-32."""

from __future__ import annotations

import io
import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeAlias, TypeVar

import numpy as np
from zlib_ng import zlib_ng

Buffer: TypeAlias = bytes | bytearray | memoryview
PIECE_SIZE = 8 << 20  # largest size of a piece of data, in bytes
_Piece = TypeVar("_Piece", bound="bytes | memoryview")
_MAX_COMPARED = 1 << 20  # bytes compared at a time; numpy makes a boolean for each


class SupportsWrite(Protocol):
    """A binary file, a pipe, or the file of a socket."""

    def write(self, data: memoryview, /) -> int | None:
        """Writes `data`, perhaps only in part; returns the number of bytes written.

        None means all, but nothing for an unbuffered file (`io.RawIOBase`).
        """


def add_name(error: OSError, file: object) -> None:
    """Adds the name of a file object to its error, if the error names no file."""
    if error.filename is None and error.errno is not None:
        error.filename = name_of(file)


def name_of(file: object) -> str:
    """The name of a file object for messages."""
    name = getattr(file, "name", None)
    return name if isinstance(name, str) else f"file object {type(file).__name__}"


class Data(Protocol):
    """The bytes of an entry, in pieces; they can be read repeatedly."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""

    @property
    def crc32(self) -> int | None:
        """CRC-32 of the bytes, or None if unknown; compared by iteration or by the writer."""

    def __iter__(self) -> Iterator[memoryview]:
        """Yields views of successive pieces, each of at most `PIECE_SIZE` bytes."""


class Stored:
    """Bytes in memory or mapped, and their CRC-32 if it is known."""

    __slots__ = ("crc32", "view")

    def __init__(self, view: memoryview, crc32: int | None = None) -> None:
        self.view = view
        self.crc32 = crc32

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.view.nbytes

    def part(self, offset: int, nbytes: int) -> Stored:
        """A range of these bytes; nothing is copied."""
        return Stored(self.view[offset : offset + nbytes])

    def head(self, nbytes: int) -> bytes:
        """A copy of the first `nbytes` bytes, or of all if there are fewer."""
        return bytes(self.view[:nbytes])

    @property
    def is_constant(self) -> bool:
        """True if the bytes cannot change, since they belong to a `bytes` object."""
        return isinstance(self.view.obj, bytes)

    def __iter__(self) -> Iterator[memoryview]:
        return pieces(self.view)


def as_bytes(data: Buffer) -> memoryview:
    """`data` as a flat view of its bytes; nothing is copied."""
    view = memoryview(data)
    if view.format == "B" and view.ndim == 1 and view.c_contiguous:
        return view
    # A view with a 0 in its shape cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")


def pieces(data: Buffer) -> Iterator[memoryview]:
    """`data` as views of at most `PIECE_SIZE` bytes each; nothing is copied."""
    view = as_bytes(data)
    if len(view) <= PIECE_SIZE:
        return iter((view,) if view else ())
    return (view[start : start + PIECE_SIZE] for start in range(0, len(view), PIECE_SIZE))


def copied(data: Data) -> bytes | None:
    """Copies `data` into memory; None if its pieces have more bytes than `data.nbytes`."""
    copy = io.BytesIO()
    for piece in data:
        if copy.tell() + len(piece) > data.nbytes:
            return None
        copy.write(piece)
    return copy.getvalue()


class Pieces:
    """The concatenation of several buffers, and their CRC-32 if it is known."""

    __slots__ = ("crc32", "nbytes", "parts")

    def __init__(self, parts: tuple[memoryview, ...], crc32: int | None = None) -> None:
        self.parts = parts
        self.nbytes = sum([part.nbytes for part in parts])
        self.crc32 = crc32

    @property
    def is_constant(self) -> bool:
        """True if the bytes cannot change, since they belong to `bytes` objects."""
        return all(isinstance(part.obj, bytes) for part in self.parts)

    def __iter__(self) -> Iterator[memoryview]:
        return itertools.chain.from_iterable(map(pieces, self.parts))


def are_equal(first: Iterable[memoryview], second: Iterable[memoryview]) -> bool:
    """True if the bytes are the same, even in different pieces."""
    end = memoryview(b"")
    firsts, seconds = filter(len, first), filter(len, second)
    ours, theirs = next(firsts, end), next(seconds, end)
    while ours and theirs:
        size = min(len(ours), len(theirs), _MAX_COMPARED)
        if not np.array_equal(
            np.frombuffer(ours[:size], np.uint8), np.frombuffer(theirs[:size], np.uint8)
        ):
            return False
        ours = ours[size:] or next(firsts, end)
        theirs = theirs[size:] or next(seconds, end)
    return not ours and not theirs


# `crc32(data, before=0)`: continues the CRC-32 `before` with the bytes of `data` (APPNOTE 4.4.7).
crc32 = zlib_ng.crc32


class Crc32:
    """Computes CRC-32 and size of bytes that come in pieces.

    Attributes:
        value: CRC-32 of the pieces so far.
        nbytes: Size of the pieces so far, in bytes.
    """

    def __init__(self) -> None:
        self.value = 0
        self.nbytes = 0

    @classmethod
    def of(cls, pieces: Iterable[bytes | memoryview]) -> Crc32:
        """CRC-32 and size of all pieces; exhausts the iterable."""
        checksum = cls()
        deque(checksum(pieces), maxlen=0)
        return checksum

    def __call__(self, pieces: Iterable[_Piece]) -> Iterator[_Piece]:
        """Yields the pieces; `value` and `nbytes` include a piece before it is yielded."""
        for piece in pieces:
            self.value = crc32(piece, self.value)
            self.nbytes += len(piece)
            yield piece
