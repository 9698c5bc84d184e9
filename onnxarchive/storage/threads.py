"""Work on many entries in several threads, with the outcome that one thread would have."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Generator, Sequence
from itertools import accumulate, pairwise
from threading import Event
from typing import TYPE_CHECKING, TypeVar

from onnxarchive.storage.files import require_process

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

_Item = TypeVar("_Item")
_Made = TypeVar("_Made")

AHEAD_SIZE = 96 << 20  # bytes that `in_order` works on at most before they are due

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
    count = min(jobs, len(items))
    if count > 1 and total >= _LEAST_SIZE * len(items):
        executor, count = _executor(count)
    else:
        executor = None
    if executor is None:
        for item in items:
            work(item)
        return
    starts = [0, *accumulate(sizes)]
    bounds = [bisect_left(starts, total * number // count) for number in range(count)]
    bounds.append(len(items))
    has_failed = Event()

    def run(start: int, stop: int) -> None:
        for item in items[start:stop]:
            if has_failed.is_set():
                return
            work(item)

    with executor:
        try:
            runs = [executor.submit(run, *share) for share in pairwise(bounds)]
            for each in runs:
                each.result()
        except BaseException:
            has_failed.set()
            raise


def in_order(
    items: Sequence[_Item], sizes: Sequence[int], work: Callable[[_Item], _Made], jobs: int
) -> Generator[_Made, None, None]:
    """Gives what a function makes of each item, in order; threads work on those that come next.

    Ahead of the item that is due are at most `jobs` items and `AHEAD_SIZE` bytes. Items that are
    small, or larger than that alone, are worked on in the caller's thread when they are due. An
    error is raised when its item is due. Closing the iterator gives up what is not begun, and waits
    for the rest.

    Args:
        items: The items.
        sizes: How many bytes each takes.
        work: The function. It is called from several threads.
        jobs: How many threads there are at most, the caller's among them.
    """
    coming = deque(number for number, size in enumerate(sizes) if _LEAST_SIZE <= size <= AHEAD_SIZE)
    # No more than can be at work, since the allocator keeps memory for each.
    most = AHEAD_SIZE // min((sizes[number] for number in coming), default=AHEAD_SIZE)
    executor, _ = _executor(min(jobs - 1, len(coming), most))
    if executor is None:
        yield from map(work, items)
        return
    begun: deque[tuple[int, Future[_Made]]] = deque()
    nbytes = 0  # of those that are begun
    process = os.getpid()
    try:
        for number, item in enumerate(items):
            due: Future[_Made] | None = None
            if begun and begun[0][0] == number:
                _, due = begun.popleft()
                nbytes -= sizes[number]
            elif coming and coming[0] == number:
                coming.popleft()
            while coming and len(begun) < jobs and nbytes + sizes[coming[0]] <= AHEAD_SIZE:
                following = coming.popleft()
                nbytes += sizes[following]
                begun.append((following, executor.submit(work, items[following])))
            yield work(item) if due is None else due.result()
            require_process(process)  # a fork has none of the threads
    finally:
        executor.shutdown(cancel_futures=True)


def _executor(count: int) -> tuple[ThreadPoolExecutor | None, int]:
    """Up to `count` threads, all of them started, and how many they are.

    They are fewer where the system has no more, and None where there is not one, as when Python
    ends.
    """
    if not count:
        return None, 0
    try:
        # It takes as long to import as an archive to open.
        from concurrent.futures import ThreadPoolExecutor
    except RuntimeError:  # Python ends
        return None, 0
    executor = ThreadPoolExecutor(count)
    are_started = Event()
    started = 0
    try:
        while started < count:
            executor.submit(are_started.wait)
            started += 1
    except RuntimeError:
        pass  # there are no more
    finally:
        are_started.set()
    if started == count:
        return executor, count
    executor.shutdown()
    return _executor(started)
