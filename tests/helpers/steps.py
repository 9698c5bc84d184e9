"""Counts executed lines of Python: a measure of work that is equal on all machines, at any load."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def steps(call: Callable[[], object]) -> int:
    """The number of lines of Python that a call executes in this thread, with repetitions."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
