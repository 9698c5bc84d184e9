"""Writes nfc.h, which finds text that is not in Normalization Form C or has unassigned code points.

python3 make_nfc.py > nfc.h
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator

HEAD = """\
/* nfc.h: tells whether UTF-8 is in Normalization Form C and has assigned code points only.
 * Made by make_nfc.py from Unicode {version}. Include it in one file. */
#ifndef ONNXA_NFC_H
#define ONNXA_NFC_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
"""

CODE = """
#define NFC_MAX 1024 /* largest number of code points; a longer text counts as not normalized */

static int nfc_in(const uint32_t (*ranges)[3], size_t count, uint32_t c, uint32_t *value) {
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (c < ranges[middle][0])
            high = middle;
        else if (c > ranges[middle][1])
            low = middle + 1;
        else {
            *value = ranges[middle][2];
            return 1;
        }
    }
    return 0;
}

static unsigned nfc_class(uint32_t c) {
    uint32_t value = 0;
    nfc_in(nfc_classes, sizeof nfc_classes / sizeof *nfc_classes, c, &value);
    return (unsigned)value;
}

/* Writes the full canonical decomposition, at most 4 code points, and gives their number. */
static size_t nfc_decompose(uint32_t c, uint32_t *to) {
    size_t low = 0, high = sizeof nfc_decompositions / sizeof *nfc_decompositions;
    if (c >= 0xAC00 && c <= 0xD7A3) {
        uint32_t syllable = c - 0xAC00, trail = syllable % 28;
        to[0] = 0x1100 + syllable / 588;
        to[1] = 0x1161 + syllable % 588 / 28;
        to[2] = 0x11A7 + trail;
        return trail ? 3 : 2;
    }
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        const uint32_t *row = nfc_decompositions[middle];
        if (c == row[0]) {
            size_t count = 0;
            while (count < 4 && row[1 + count]) {
                to[count] = row[1 + count];
                count++;
            }
            return count;
        }
        if (c < row[0])
            high = middle;
        else
            low = middle + 1;
    }
    to[0] = c;
    return 1;
}

/* What two code points compose to, 0 for nothing. */
static uint32_t nfc_compose(uint32_t first, uint32_t second) {
    size_t low = 0, high = sizeof nfc_compositions / sizeof *nfc_compositions;
    if (first >= 0x1100 && first <= 0x1112 && second >= 0x1161 && second <= 0x1175)
        return 0xAC00 + ((first - 0x1100) * 21 + (second - 0x1161)) * 28;
    if (first >= 0xAC00 && first <= 0xD7A3 && (first - 0xAC00) % 28 == 0 && second > 0x11A7 &&
        second <= 0x11C2)
        return first + (second - 0x11A7);
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        const uint32_t *row = nfc_compositions[middle];
        if (first == row[0] && second == row[1]) return row[2];
        if (first < row[0] || (first == row[0] && second < row[1]))
            high = middle;
        else
            low = middle + 1;
    }
    return 0;
}

/* Takes well-formed UTF-8; can be used as onnxa_options.is_normalized. Decomposes the text, orders
 * and composes its marks, and compares the result with the text. */
static int nfc_is_normalized(void *context, const char *name, size_t length) {
    uint32_t text[NFC_MAX], full[4 * NFC_MAX];
    size_t i, count = 0, size = 0, composed = 0, starter = 0;
    unsigned last = 0;
    int has_starter = 0;
    (void)context;
    for (i = 0; i < length; count++) {
        const uint8_t *at = (const uint8_t *)name + i;
        size_t rest = at[0] < 0x80 ? 0 : at[0] < 0xE0 ? 1 : at[0] < 0xF0 ? 2 : 3;
        uint32_t c = rest ? at[0] & (0x3Fu >> rest) : at[0], value;
        if (count == NFC_MAX || rest >= length - i) return 0;
        i += rest + 1;
        for (; rest; rest--) c = c << 6 | (*++at & 0x3Fu);
        if (!nfc_in(nfc_assigned, sizeof nfc_assigned / sizeof *nfc_assigned, c, &value)) return 0;
        text[count] = c;
        size += nfc_decompose(c, full + size);
    }
    for (i = 1; i < size; i++) { /* orders marks by class; equal classes keep their order */
        uint32_t c = full[i];
        unsigned class_of_c = nfc_class(c);
        size_t at = i;
        for (; class_of_c && at && nfc_class(full[at - 1]) > class_of_c; at--)
            full[at] = full[at - 1];
        full[at] = c;
    }
    for (i = 0; i < size; i++) {
        uint32_t c = full[i], pair = 0;
        unsigned class_of_c = nfc_class(c);
        /* A code point is blocked from the last starter if a mark of its class or of a higher one
           lies between them. */
        if (has_starter && (composed == starter + 1 || (last && last < class_of_c)))
            pair = nfc_compose(full[starter], c);
        if (pair) {
            full[starter] = pair;
            continue;
        }
        if (!class_of_c) {
            starter = composed;
            has_starter = 1;
        }
        last = class_of_c;
        full[composed++] = c;
    }
    return composed == count && !memcmp(full, text, count * sizeof *text);
}

#endif
"""


def ranges(value: Callable[[str], int | None]) -> Iterator[tuple[int, int, int]]:
    """Gives each range of code points with the same value, as first, last, value; skips None."""
    begin, of = 0, value(chr(0))
    for point in range(1, sys.maxunicode + 2):
        new = value(chr(point)) if point <= sys.maxunicode else None
        if new != of or point > sys.maxunicode:
            if of is not None:
                yield begin, point - 1, of
            begin, of = point, new


def is_assigned(char: str) -> int | None:
    """Gives 1 or None."""
    return None if unicodedata.category(char) in ("Cn", "Cs") else 1


def combining_class(char: str) -> int | None:
    """Gives None for class 0."""
    return unicodedata.combining(char) or None


def decompositions() -> Iterator[tuple[int, list[int]]]:
    """Gives each code point that decomposes and its full decomposition, except for Hangul."""
    for point in range(sys.maxunicode + 1):
        char = chr(point)
        full = unicodedata.normalize("NFD", char)
        if full != char and not 0xAC00 <= point <= 0xD7A3:
            yield point, [ord(it) for it in full]


def compositions() -> Iterator[tuple[int, int, int]]:
    """Gives the pairs that compose, each with the composed code point, except for Hangul."""
    for point in range(sys.maxunicode + 1):
        parts = unicodedata.decomposition(chr(point)).split()
        if len(parts) == 2 and not parts[0].startswith("<"):
            first, second = (int(it, 16) for it in parts)
            if unicodedata.normalize("NFC", chr(first) + chr(second)) == chr(point):
                yield first, second, point


def table(name: str, rows: Iterable[tuple[int, ...]], width: int) -> str:
    """Gives a table of C."""
    lines = [""]
    for row in rows:
        text = "{" + ",".join(f"0x{it:X}" if it > 9 else str(it) for it in row) + "},"
        if len(lines[-1]) + len(text) > 100:
            lines.append("")
        lines[-1] += text
    body = "\n".join(lines)
    return f"\nstatic const uint32_t {name}[][{width}] = {{\n{body}\n}};\n"


def main() -> None:
    """Writes the header."""
    full = [(point, *it, *[0] * (4 - len(it))) for point, it in decompositions()]
    sys.stdout.write(
        HEAD.format(version=unicodedata.unidata_version)
        + "\n/* Ranges of assigned code points: first, last, and an unused 1. */"
        + table("nfc_assigned", ranges(is_assigned), 3)
        + "\n/* Ranges of a combining class other than 0: first, last, class. */"
        + table("nfc_classes", ranges(combining_class), 3)
        + "\n/* A code point, and its full canonical decomposition, filled up by 0. */"
        + table("nfc_decompositions", full, 5)
        + "\n/* Two code points, and what they compose to. */"
        + table("nfc_compositions", sorted(compositions()), 3)
        + CODE
    )


if __name__ == "__main__":
    main()
