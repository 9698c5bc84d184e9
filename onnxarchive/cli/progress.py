"""Progress bars on standard error, if it is a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Final

from onnxarchive.buffers.counting import Bar, Progress, bytes_bar

DELAY = 1.0  # seconds before a bar appears
_OPTIONS: Final = {"leave": False, "dynamic_ncols": True}


@contextlib.contextmanager
def progress_bar(description: str) -> Iterator[Progress | None]:
    """Yields a callback that advances a progress bar of bytes; None without a terminal."""
    if not _has_terminal():
        yield None
        return
    with contextlib.closing(bytes_bar(desc=description, delay=DELAY, **_OPTIONS)) as bar:
        yield bar.move


@contextlib.contextmanager
def count_bar(description: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """Yields a callback that advances a bar that counts `unit`s; no bar without a terminal."""
    options = {"desc": description, "unit": f" {unit}", "disable": not _has_terminal()}
    with contextlib.closing(Bar(delay=DELAY, **options, **_OPTIONS)) as bar:
        yield bar.move


def _has_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is no standard error, or it is closed
        return False
