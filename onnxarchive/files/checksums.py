"""CRC-32, at memory speed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeVar

from zlib_ng import zlib_ng

_Piece = TypeVar("_Piece", bound="bytes | memoryview")


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
        found = cls()
        deque(found(pieces), maxlen=0)
        return found

    def __call__(self, pieces: Iterable[_Piece]) -> Iterator[_Piece]:
        """Yields the pieces; `value` and `nbytes` include a piece before it is yielded."""
        for piece in pieces:
            self.value = crc32(piece, self.value)
            self.nbytes += len(piece)
            yield piece
