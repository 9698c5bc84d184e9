"""Progress of reading or writing many bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from threading import Lock
from typing import TypeAlias, TypeVar

# Takes the bytes done and the bytes in all.
Progress: TypeAlias = Callable[[int, int], None]
_Piece = TypeVar("_Piece", bytes, memoryview)


class ProgressCounter:
    """Counts the bytes done, in one thread or several, and reports them.

    Args:
        progress: Called with the bytes done and the bytes in all after each piece, or None.
        total: The bytes in all.
    """

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0
        self._lock = Lock()

    def __call__(self, pieces: Iterable[_Piece]) -> Iterator[_Piece]:
        """Passes pieces on and counts each once the caller asks for the next."""
        for piece in pieces:
            yield piece
            self.add(len(piece))

    def add(self, nbytes: int) -> None:
        """Counts `nbytes` bytes as done."""
        if self._progress is None:
            return
        with self._lock:
            self._done += nbytes
            self._progress(self._done, self._total)
