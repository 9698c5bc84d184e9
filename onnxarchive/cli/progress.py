"""Progress bars on standard error, if it is a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from onnxarchive.buffers.counting import Progress, bytes_bar

if TYPE_CHECKING:
    from tqdm import tqdm

DELAY = 1.0  # seconds before a bar appears


@contextlib.contextmanager
def progress_bar(description: str) -> Iterator[Progress | None]:
    """Yields a callback that advances a progress bar of bytes; None without a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    with bytes_bar(desc=description, delay=DELAY, leave=False, dynamic_ncols=True) as bar:
        yield partial(_move, bar)


@contextlib.contextmanager
def count_bar(description: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """Yields a callback that advances a bar that counts `unit`s; no bar without a terminal."""
    from tqdm import tqdm

    with tqdm(
        desc=description,
        unit=f" {unit}",
        delay=DELAY,
        leave=False,
        dynamic_ncols=True,
        disable=not sys.stderr.isatty(),
    ) as bar:
        yield partial(_move, bar)


def _move(bar: tqdm[NoReturn], done: int, total: int) -> None:
    bar.total = total
    bar.update(done - bar.n)
