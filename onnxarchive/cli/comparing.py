"""The command that tells in what two archives differ."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any, Final

from onnxarchive.cli.frame import DONE, FOUND, say
from onnxarchive.cli.progress import progress_bar
from onnxarchive.cli.table import printable
from onnxarchive.conversion.differences import Change, Difference, diff

_MAX_LINES: Final = 50  # of a section
_MAX_PARTS: Final = 8  # of a line
_MAX_LENGTH: Final = 100  # letters of a name or a value
_SIGNS: Final = {"added": "+", "removed": "-", "changed": "~"}


def diff_command(arguments: argparse.Namespace) -> int:
    """Runs `diff`."""
    with progress_bar("diff") as progress:
        found = diff(arguments.archive, arguments.other, full=arguments.full, progress=progress)
    say(arguments, _described(found), "\n".join(_lines(found, arguments.full)))
    return DONE if found.is_same else FOUND


def _described(found: Difference) -> dict[str, Any]:
    changes = {name: [_as_json(it) for it in section] for name, section in found.sections.items()}
    return {
        "path": found.path,
        "other": found.other,
        "is_same": found.is_same,
        "is_same_layout": found.is_same_layout,
        **changes,
        "layout": list(found.layout),
    }


def _as_json(change: Change) -> dict[str, Any]:
    return {
        "name": change.name,
        "kind": change.kind,
        "before": change.before,
        "after": change.after,
        "parts": [_as_json(part) for part in change.parts],
    }


def _lines(found: Difference, is_full: bool) -> Iterator[str]:
    paths = [printable(path) for path in (found.path, found.other)]
    if found.is_same:
        told = "compared byte by byte" if is_full else "weights compared by CRC-32"
        yield f"{paths[0]} and {paths[1]}: the same model, tensors and assets; {told}"
    else:
        yield f"--- {paths[0]}"
        yield f"+++ {paths[1]}"
    for name, changes in found.sections.items():
        if changes:
            kinds = [change.kind for change in changes]
            counts = [f"{kinds.count(kind):,} {kind}" for kind in _SIGNS if kind in kinds]
            yield f"{name}: {', '.join(counts)}"
            yield from (f"  {_line(change)}" for change in changes[:_MAX_LINES])
            if len(changes) > _MAX_LINES:
                yield f"  and {len(changes) - _MAX_LINES:,} more"
    if found.layout:
        yield f"held differently, which is no difference: {', '.join(found.layout)}"


def _line(change: Change) -> str:
    told = _told(change)
    if change.parts:
        leaves = [*_leaves(change.parts)]
        more = [f"and {len(leaves) - _MAX_PARTS:,} more"] * (len(leaves) > _MAX_PARTS)
        told = "; ".join(leaves[:_MAX_PARTS] + more)
    return f"{_SIGNS[change.kind]} {_shown(change.name)}: {told}"


def _leaves(changes: Sequence[Change], above: str = "") -> Iterator[str]:
    """What has no parts itself, after the names of what it is a part of."""
    for change in changes:
        name = f"{above}{_shown(change.name)}"
        if change.parts:
            yield from _leaves(change.parts, f"{name}: ")
        elif change.kind == "changed":
            yield f"{name} {_told(change)}"
        else:
            yield f"{_SIGNS[change.kind]} {name} {_told(change)}"


def _told(change: Change) -> str:
    return " => ".join(
        _shown(value) for value in (change.before, change.after) if value is not None
    )


def _shown(value: str) -> str:
    if len(value) > _MAX_LENGTH:  # paths of tensors have what matters at their ends
        value = f"{value[: _MAX_LENGTH // 2]}...{value[-_MAX_LENGTH // 2 :]}"
    return printable(value) if value else "''"
