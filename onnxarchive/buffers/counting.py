"""Progress of reading or writing many bytes, reported to a function or shown by a bar."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from threading import Lock
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar

if TYPE_CHECKING:
    from tqdm import tqdm

# A function, called with the bytes done and the total; or True for a bar in a notebook or terminal.
Progress: TypeAlias = Callable[[int, int], None] | bool
_Piece = TypeVar("_Piece", bytes, memoryview)


class ProgressCounter:
    """Counts the bytes done, in one thread or several, and reports them.

    Args:
        progress: Called after each piece, by one thread at a time, with the bytes done and the
            total. True shows a bar; None and False report nothing.
        total: Total number of bytes.
    """

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = _bar_of(total) if progress is True else progress or None
        self._total = total
        self._done = 0
        self._lock = Lock()

    def __call__(self, pieces: Iterable[_Piece]) -> Iterator[_Piece]:
        """Yields the pieces; each is counted when the next one is requested."""
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


def bytes_bar(**options: Any) -> tqdm[NoReturn]:
    """Makes a progress bar in bytes: a widget in a notebook, else text on standard error.

    Args:
        options: Further options of `tqdm`.
    """
    from tqdm.auto import tqdm  # imported late: this takes longer than opening an archive

    return tqdm(unit="B", unit_scale=True, unit_divisor=1024, **options)


def _bar_of(total: int) -> Callable[[int, int], None]:
    bar = bytes_bar(total=total)

    def move(done: int, total: int) -> None:
        bar.update(done - bar.n)
        if done == total:
            bar.close()

    return move
