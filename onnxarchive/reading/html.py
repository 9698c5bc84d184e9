"""HTML tables of an archive's tensors, entries and assets, for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import islice

MAX_ROWS = 100
_BAR = '<div style="background:#4c78a8;height:0.8em;width:{:.0f}px"></div>'
_BAR_WIDTH = 120  # in pixels, for the largest size
_CELL = "text-align:{};max-width:40em;overflow-wrap:anywhere"


def table(
    caption: str,
    header: Sequence[str],
    rows: Iterable[tuple[Sequence[str], int | None]],
    count: int,
) -> str:
    """A table of the first `MAX_ROWS` rows, followed by the number of the other rows, if any.

    Args:
        caption: The line above the table.
        header: Names of the text columns; a column of sizes and a column of bars follow.
        rows: For each row, one text for each text column, and its size in bytes or None.
        count: The number of rows in all.
    """
    first = list(islice(rows, MAX_ROWS))
    largest = max((nbytes or 0 for _, nbytes in first), default=0) or 1
    lines = [
        "<table>",
        f'<caption style="text-align:left">{escape(caption)}</caption>',
        f"<thead><tr>{_cells([*header, 'bytes', ''], 'th')}</tr></thead>",
        "<tbody>",
    ]
    for texts, nbytes in first:
        size = max(nbytes or 0, 0)
        bar = f"<td>{_BAR.format(_BAR_WIDTH * size / largest)}</td>"
        shown = "" if nbytes is None else f"{nbytes:,}"
        number = f'<td style="{_CELL.format("right")}">{shown}</td>'
        lines.append(f"<tr>{_cells(texts, 'td')}{number}{bar}</tr>")
    lines.append("</tbody></table>")
    if count > len(first):
        lines.append(f"<p>and {count - len(first):,} more</p>")
    return "\n".join(lines)


def _cells(texts: Iterable[str], tag: str) -> str:
    style = _CELL.format("left")
    return "".join(f'<{tag} style="{style}">{escape(text)}</{tag}>' for text in texts)
