"""Prints spec/unicode.csv: what a reader without Unicode tables needs for the names of assets.

Reads the Unicode tables of this Python. The rows are in ascending order of their code points.
"""

from __future__ import annotations

import csv
import io
import sys
import unicodedata
from collections.abc import Callable, Iterator
from typing import Final

HEADER: Final = ("first", "last", "property", "value")
HANGUL_SYLLABLES: Final = range(0xAC00, 0xD7A4)  # the text says how these compose


def rows() -> list[tuple[str, ...]]:
    """The rows of the table, without the header."""
    listed = [
        *((first, last, "unassigned", "") for first, last, _ in ranges(unassigned)),
        *((first, last, "class", str(it)) for first, last, it in ranges(unicodedata.combining)),
        *((point, point, *it) for point, it in decompositions()),
    ]
    return [(f"{first:04X}", f"{last:04X}", *more) for first, last, *more in sorted(listed)]


def ranges(value: Callable[[str], int]) -> Iterator[tuple[int, int, int]]:
    """Yields the ranges of code points with the same value, as first, last, value; leaves 0 out."""
    first = 0
    for point in range(1, sys.maxunicode + 2):
        is_end = point > sys.maxunicode or value(chr(point)) != value(chr(first))
        if is_end:
            if value(chr(first)):
                yield first, point - 1, value(chr(first))
            first = point


def unassigned(character: str) -> int:
    """1 for a code point of the category Cn, 0 for others."""
    return int(unicodedata.category(character) == "Cn")


def decompositions() -> Iterator[tuple[int, tuple[str, str]]]:
    """Yields each code point that decomposes, with the property and the value of its row."""
    for point in range(sys.maxunicode + 1):
        character = chr(point)
        text = unicodedata.decomposition(character)
        if not text or text.startswith("<") or point in HANGUL_SYLLABLES:
            continue
        is_composed = unicodedata.is_normalized("NFC", character)
        yield point, ("composition" if is_composed else "decomposition", text)


def table() -> str:
    """The text of spec/unicode.csv."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEADER)
    writer.writerows(rows())
    return text.getvalue()


if __name__ == "__main__":
    print(table(), end="")
