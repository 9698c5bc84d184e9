"""Plain paths: relative, separated by slashes, without a drive or `..`."""

from __future__ import annotations

import re
from typing import Final

PLAIN_PATH: Final = (
    "a relative path of components separated by '/', without a drive, a backslash or a control "
    "character, and without a component that is empty, '.' or '..'"
)
"""Description of a plain path, for messages."""

_NOT_IN_PATH: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\\]|\A[A-Za-z]:")


def is_plain_path(path: str) -> bool:
    """True if a path is as `PLAIN_PATH` describes."""
    return {"", ".", ".."}.isdisjoint(path.split("/")) and _NOT_IN_PATH.search(path) is None
