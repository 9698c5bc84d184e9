"""Counts the outcomes of a property test's examples, and requires enough of each."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

_counts: Counter[str] = Counter()


def count_outcome(outcome: str) -> None:
    """Counts an outcome."""
    _counts[outcome] += 1


def requires_outcomes(**least: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a test: it must call `count_outcome` at least this often with each outcome."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def counted(*arguments: Any, **options: Any) -> None:
            _counts.clear()
            test(*arguments, **options)
            enough = all(_counts[outcome] >= number for outcome, number in least.items())
            assert enough, f"expected at least {least}, found {dict(_counts)}"

        return counted

    return decorate
