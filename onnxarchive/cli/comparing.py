"""The command that compares two archives."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, Final

from onnxarchive.cli.frame import DONE, FOUND, access, say
from onnxarchive.cli.terminal import cut, printable, progress_bar
from onnxarchive.comparing.archives import Change, Difference, diff

_MAX_LINES: Final = 50  # of a section
_MAX_PARTS: Final = 8  # of a line
_MAX_LENGTH: Final = 100  # characters of a name or a value
_SIGNS: Final = {"added": "+ ", "removed": "- ", "changed": "~ "}


def diff_command(arguments: argparse.Namespace) -> int:
    """Runs `diff`."""
    with progress_bar("diff") as progress:
        found = diff(
            arguments.archive,
            arguments.other,
            model=arguments.model,
            full=arguments.full,
            stack_traces=arguments.stack_traces,
            progress=progress,
            **access(arguments),
        )
    result = {"path": found.path, "other": found.other, "is_same": found.is_same}
    sections = {name: [*map(_as_json, changes)] for name, changes in found.sections.items()}
    say(arguments, result | sections, _lines(found, arguments.model, arguments.full))
    return DONE if found.is_same else FOUND


def _as_json(change: Change) -> dict[str, Any]:
    parts = [*map(_as_json, change.parts)]
    fields = {"name": change.name, "before": change.before, "after": change.after}
    return {**fields, "parts": parts, "kind": change.kind}


def _lines(found: Difference, model: str | None, full: bool) -> Iterator[str]:
    path, other = printable(found.path), printable(found.other)
    if found.is_same:
        how = "byte by byte" if full else "by CRC-32"
        what = "model, tensors and assets" if model is None else f"model {model}".strip()
        yield f"{path} and {other}: the same {what} (weights compared {how})"
        return
    yield f"--- {path}"
    yield f"+++ {other}"
    for section, changes in found.sections.items():
        if changes:
            kinds = [change.kind for change in changes]
            counts = [f"{kinds.count(kind):,} {kind}" for kind in _SIGNS if kind in kinds]
            yield f"{section}: {', '.join(counts)}"
            yield from (f"  {_line(change)}" for change in changes[:_MAX_LINES])
            if len(changes) > _MAX_LINES:
                yield f"  and {len(changes) - _MAX_LINES:,} more"


def _line(change: Change) -> str:
    parts = [_line(part).removeprefix(_SIGNS["changed"]) for part in change.parts[:_MAX_PARTS]]
    if len(change.parts) > _MAX_PARTS:
        parts.append(f"and {len(change.parts) - _MAX_PARTS:,} more")
    texts = (_shown(text) for text in (change.before, change.after) if text is not None)
    return f"{_SIGNS[change.kind]}{_shown(change.name)}: {'; '.join(parts) or ' => '.join(texts)}"


def _shown(text: str) -> str:
    return cut(text, _MAX_LENGTH) or "''"
