"""For a terminal: tables, sizes, names without control characters, and progress bars."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from onnxarchive.files.progress import Bar, Progress, bytes_bar

MAX_CELL: Final = 200  # characters
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
_STEP = 1024
DELAY = 1.0  # seconds before a bar appears
_OPTIONS: Final = {"leave": False, "dynamic_ncols": True}


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """The lines of a table: numbers are aligned right, text is aligned left, long cells are cut."""
    values = [*rows]
    cells = [[cut(title) for title in header], *([*map(_cell, row)] for row in values)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    are_numbers = [{*map(type, column)} == {int} for column in zip(*values, strict=True)]
    align = [
        str.rjust if is_number else str.ljust for is_number in are_numbers or [False] * len(widths)
    ]
    for row in cells:
        aligned = (to(cell, width) for to, cell, width in zip(align, row, widths, strict=True))
        yield "  ".join(aligned).rstrip()


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else cut(str(value))


def cut(text: str, length: int = MAX_CELL) -> str:
    """The text with at most `length` characters, before those that do not print are escaped."""
    if len(text) > length:  # the middle of a long name matters least
        text = f"{text[: length // 2]}...{text[-length // 2 :]}"
    return printable(text)


def printable(text: str) -> str:
    """The text with escape sequences for characters that do not print."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def count(number: int, noun: str) -> str:
    """A number of things: `1 tensor`, `2 tensors`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def size(nbytes: int) -> str:
    """A size in bytes and in a larger unit: `1,536 bytes (1.5 KiB)`."""
    exact = f"{nbytes:,} bytes"
    if nbytes < _STEP:
        return exact
    unit = min((nbytes.bit_length() - 1) // 10, len(_UNITS) - 1)
    return f"{exact} ({nbytes / _STEP**unit:.1f} {_UNITS[unit]})"


@contextlib.contextmanager
def progress_bar(description: str) -> Iterator[Progress | None]:
    """Yields a callback that advances a progress bar of bytes; None without a terminal."""
    if not has_terminal():
        yield None
        return
    with contextlib.closing(bytes_bar(desc=description, delay=DELAY, **_OPTIONS)) as bar:
        yield bar.move


@contextlib.contextmanager
def count_bar(description: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """Yields a callback that advances a bar that counts `unit`s; no bar without a terminal."""
    options = {"desc": description, "unit": f" {unit}", "disable": not has_terminal()}
    with contextlib.closing(Bar(delay=DELAY, **options, **_OPTIONS)) as bar:
        yield bar.move


def has_terminal() -> bool:
    """True if standard error is a terminal."""
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is no standard error, or it is closed
        return False
