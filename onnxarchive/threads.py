"""Work on many entries in several threads, with the outcome that one thread would have."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from threading import Event
from typing import TypeVar

_Item = TypeVar("_Item")

# Threads hinder one another where an item takes less than this many bytes: it is Python that works.
_LEAST_SIZE = 1 << 17


def require_jobs(jobs: int | None) -> int:
    """How many threads to use: `jobs`, or one for each core that this process may use.

    Raises:
        ValueError: `jobs` is less than 1.
    """
    if jobs is None:
        return (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )
    if jobs < 1:
        raise ValueError(f"jobs must be 1 or more, got {jobs}")
    return jobs


def for_each(
    items: Sequence[_Item], sizes: Sequence[int], work: Callable[[_Item], None], jobs: int
) -> None:
    """Calls a function with each item; of errors, the one of the first item is raised.

    Every thread takes a run of items in their order. When one fails, those behind it are given up.

    Args:
        items: The items.
        sizes: How many bytes each takes, by which they are shared out.
        work: The function. It is called from several threads.
        jobs: How many threads there are at most.
    """
    total = sum(sizes)
    if jobs == 1 or total < _LEAST_SIZE * len(items):
        for item in items:
            work(item)
        return
    starts = [0, *accumulate(sizes)]
    bounds = [bisect_left(starts, total * number // jobs) for number in range(jobs)]
    bounds.append(len(items))
    has_failed = Event()

    def run(start: int, stop: int) -> None:
        for item in items[start:stop]:
            if has_failed.is_set():
                return
            work(item)

    with ThreadPoolExecutor(jobs) as executor:
        runs = [executor.submit(run, *share) for share in pairwise(bounds)]
        try:
            for each in runs:
                each.result()
        except BaseException:
            has_failed.set()
            raise
