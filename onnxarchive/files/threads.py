"""Maps functions over items in several threads, with the same results as in one thread."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Generator, Sequence
from itertools import accumulate, pairwise
from threading import Event
from typing import TYPE_CHECKING, TypeVar

from onnxarchive.files.locking import OfOneProcess

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")

AHEAD_SIZE = 96 << 20  # limit in bytes for items that `in_order` begins before their turn

# Least size in bytes for which threads are used: in `in_order`, the size of an item; in `for_each`,
# the average size of all items. For smaller items, most of the work is Python's overhead.
_LEAST_SIZE = 1 << 17


def require_jobs(jobs: int | None) -> int:
    """The number of threads, at least 1: `jobs`, or one for each core available to this process."""
    if jobs is None:
        has_affinity = hasattr(os, "sched_getaffinity")
        return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    if jobs < 1:
        raise ValueError(f"jobs must be 1 or more, got {jobs}")
    return jobs


def for_each(
    items: Sequence[_Argument], sizes: Sequence[int], work: Callable[[_Argument], None], jobs: int
) -> None:
    """Calls a function for each item; raises the error of the failed item with the lowest index.

    Each of at most `jobs` threads takes a run of successive items, of about equal total size. Once
    the error to raise is known, no further items are begun.
    """
    total, count = sum(sizes), min(jobs, len(items))
    is_worthwhile = count > 1 and total >= _LEAST_SIZE * len(items)
    executor = thread_pool(count) if is_worthwhile else None
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
            for one in runs:
                one.result()
        except BaseException:
            has_failed.set()
            raise


def in_order(
    items: Sequence[_Argument],
    sizes: Sequence[int],
    work: Callable[[_Argument], _Result],
    jobs: int,
) -> Generator[_Result, None, None]:
    """Maps a function over items in order, with bounded look-ahead in threads.

    The look-ahead is at most `jobs` items and `AHEAD_SIZE` bytes. Small items, and items above
    `AHEAD_SIZE`, are mapped in the caller's thread. An error is raised in place of the item's
    result. Closing the iterator cancels pending items and waits for running ones. `jobs` counts the
    caller's thread, too.
    """
    coming = deque(number for number, size in enumerate(sizes) if _LEAST_SIZE <= size <= AHEAD_SIZE)
    # Starts no thread that would be idle: the allocator keeps memory for every thread.
    most = AHEAD_SIZE // min((sizes[number] for number in coming), default=AHEAD_SIZE)
    executor = thread_pool(min(jobs - 1, len(coming), most))
    if executor is None:
        yield from map(work, items)
        return
    begun: deque[tuple[int, Future[_Result]]] = deque()
    nbytes = 0  # of the items in `begun`
    own_work = OfOneProcess()
    try:
        for number, item in enumerate(items):
            due: Future[_Result] | None = None
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
            own_work.refuse_fork()  # a fork has no threads
    finally:
        executor.shutdown(cancel_futures=True)


def thread_pool(count: int) -> ThreadPoolExecutor | None:
    """An executor with `count` started threads, or as many as the system permits.

    None if it permits none, as when Python exits.
    """
    if not count:
        return None
    try:
        # This import takes as long as opening an archive.
        from concurrent.futures import ThreadPoolExecutor
    except RuntimeError:  # Python exits
        return None
    executor = ThreadPoolExecutor(count)
    are_started = Event()
    started = 0
    try:
        while started < count:
            executor.submit(are_started.wait)
            started += 1
    except RuntimeError:
        pass  # the system permits no more threads
    finally:
        are_started.set()
    if started == count:
        return executor
    executor.shutdown()
    return thread_pool(started)
