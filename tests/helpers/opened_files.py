"""Counts how often files are opened."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

_opened: list[str] | None = None


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and _opened is not None and isinstance(arguments[0], str | bytes):
        _opened.append(os.fsdecode(arguments[0]))


sys.addaudithook(_note)  # it cannot be removed


def count_opens(path: Path, call: Callable[[], object]) -> int:
    """How often a call opens the file at `path`."""
    global _opened
    _opened = []
    try:
        call()
        return sum(os.path.abspath(each) == os.path.abspath(path) for each in _opened)
    finally:
        _opened = None
