"""Progress of reading or writing many bytes, reported to a function or shown by a bar."""

from __future__ import annotations

import contextlib
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
        total: Number of bytes in all.
    """

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = bytes_bar(total=total).move if progress is True else progress or None
        self._total = total
        self._done = 0
        self._lock = Lock()

    def __call__(self, pieces: Iterable[_Piece]) -> Iterable[_Piece]:
        """The pieces; each is counted when the next one is requested."""
        return pieces if self._progress is None else self._counted(pieces)

    def _counted(self, pieces: Iterable[_Piece]) -> Iterator[_Piece]:
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


class Bar:
    """A progress bar: a widget in a notebook, else text on standard error.

    If a bar cannot be drawn, as on a full disk or without standard error, it is switched off. It
    never raises, so it cannot stop the work.
    """

    def __init__(self, **options: Any) -> None:
        """Shows a bar; `options` are those of `tqdm`."""
        self._bar: tqdm[NoReturn] | None = None
        with self._drawn():
            from tqdm.auto import tqdm  # imported late: this takes longer than opening an archive

            self._bar = tqdm.__new__(tqdm)
            self._bar.__init__(**options)  # type: ignore[misc] # draws, and may fail

    def move(self, done: int, total: int) -> None:
        """Shows that `done` of `total` units are done, and ends the bar if that is all."""
        with self._drawn():
            if self._bar is not None:
                self._bar.total = total
                self._bar.update(done - self._bar.n)
        if done == total:
            self.close()

    def close(self) -> None:
        """Ends the bar."""
        with self._drawn():
            if self._bar is not None:
                self._bar.close()

    @contextlib.contextmanager
    def _drawn(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if self._bar is not None:
                self._bar.disable = True
            self._bar = None
            # A bar that fails while it draws keeps tqdm's lock, and every other bar would wait.
            with contextlib.suppress(Exception):
                from tqdm.auto import tqdm

                tqdm.get_lock().release()  # type: ignore[no-untyped-call]
            if not isinstance(error, Exception):  # Ctrl-C
                raise


def bytes_bar(**options: Any) -> Bar:
    """Shows a bar that counts bytes; `options` are those of `tqdm`."""
    return Bar(unit="B", unit_scale=True, unit_divisor=1024, **options)
