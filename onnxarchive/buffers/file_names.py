"""File paths that mean the same on every operating system."""

from __future__ import annotations

import re
from typing import Final

PLAIN_PATH: Final = (
    "a relative path with slashes, no drive, backslash or control character, and no component that "
    "is empty, '.' or '..'"
)
"""Description of a plain path, for messages."""

_NOT_IN_PATH: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\\]|\A[A-Za-z]:")


def is_plain_path(path: str) -> bool:
    """True if a path is relative, has one spelling, and means the same on every system."""
    return {"", ".", ".."}.isdisjoint(path.split("/")) and _NOT_IN_PATH.search(path) is None
