"""Text for a terminal: aligned tables, sizes, and names without control characters."""

from __future__ import annotations

from collections.abc import Sequence

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
_STEP = 1024


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A header and rows in aligned columns: numbers to the right, text to the left."""
    columns = zip(*rows, strict=True) if rows else ([] for _ in header)
    aligned = [_aligned(*it) for it in zip(header, columns, strict=True)]
    return "\n".join(["  ".join(cells).rstrip() for cells in zip(*aligned, strict=True)])


def _aligned(title: str, values: Sequence[object]) -> list[str]:
    """A title and the values below it, with equal widths."""
    cells = [title, *[f"{it:,}" if isinstance(it, int) else str(it) for it in values]]
    if not "".join(cells).isprintable():
        cells = [printable(cell) for cell in cells]
    width = max(map(len, cells))
    is_number = {*map(type, values)} == {int}
    return [cell.rjust(width) if is_number else cell.ljust(width) for cell in cells]


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


def shape(dims: Sequence[object]) -> str:
    """A shape: `1x3x224x224`, or `scalar`."""
    return "x".join(map(str, dims)) or "scalar"


def size(nbytes: int) -> str:
    """A size in bytes and in a larger unit: `1,536 bytes (1.5 KiB)`."""
    exact = f"{nbytes:,} bytes"
    if nbytes < _STEP:
        return exact
    scaled, unit = float(nbytes), 0
    while scaled >= _STEP and unit < len(_UNITS) - 1:
        scaled /= _STEP
        unit += 1
    return f"{exact} ({scaled:.1f} {_UNITS[unit]})"
