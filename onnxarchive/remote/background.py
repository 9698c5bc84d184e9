"""Runs requests in a background thread, so that Ctrl-C cancels them immediately."""

from __future__ import annotations

import atexit
import os
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable
from itertools import islice
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from concurrent.futures import Future

_Made = TypeVar("_Made")
Request: TypeAlias = Callable[[], Coroutine[Any, Any, _Made]]

IN_FLIGHT = 12  # requests at once

_lock = Lock()
_loop: AbstractEventLoop | None = None
_process = 0  # the process of `_loop`


def run(request: Request[_Made]) -> _Made:
    """Runs one request and returns its result. Ctrl-C cancels the request.

    Raises:
        OSError: This process is a fork of a process that made requests.
    """
    future = _start(request)
    try:
        return future.result()
    finally:
        future.cancel()
        del future  # else a failed future, its error and this frame would be a reference cycle


def in_order(requests: Iterable[Request[_Made]]) -> Generator[_Made, None, None]:
    """Runs requests, up to `IN_FLIGHT` at once, and yields their results in order.

    Closing the iterator cancels running requests. At most `IN_FLIGHT` results wait for the caller.
    """
    requests = iter(requests)
    begun: deque[Future[_Made]] = deque()
    try:
        while True:
            begun.extend(map(_start, islice(requests, IN_FLIGHT - len(begun))))
            if not begun:
                return
            result = begun[0].result()
            begun.popleft()
            yield result
            _require_this_process()
    finally:
        for future in begun:
            future.cancel()


def as_completed(requests: Iterable[Request[_Made]]) -> Generator[_Made, None, None]:
    """Runs requests as `in_order` does, but yields each result as soon as it arrives."""
    from concurrent.futures import FIRST_COMPLETED, wait

    requests = iter(requests)
    begun: set[Future[_Made]] = set()
    try:
        while True:
            begun.update(map(_start, islice(requests, IN_FLIGHT - len(begun))))
            if not begun:
                return
            future = next(iter(wait(begun, return_when=FIRST_COMPLETED).done))
            begun.remove(future)
            yield future.result()
            _require_this_process()
    finally:
        for future in begun:
            future.cancel()


def _start(request: Request[_Made]) -> Future[_Made]:
    global _loop, _process
    import asyncio

    with _lock:
        if _loop is None:
            _loop, _process = asyncio.new_event_loop(), os.getpid()
            Thread(target=_loop.run_forever, name="onnxarchive requests", daemon=True).start()
            atexit.register(_stop, _loop)
        _require_this_process()
        return asyncio.run_coroutine_threadsafe(request(), _loop)


def _stop(loop: AbstractEventLoop) -> None:
    """Cancels the running requests before Python ends.

    Up to Python 3.13, a thread of obstore aborts the process if the thread calls into Python while
    Python ends. So this function ends with a pause, in which threads that have just delivered a
    result finish their calls into Python.
    """
    import asyncio

    async def cancel() -> None:
        for task in asyncio.all_tasks():
            if task is not asyncio.current_task():
                task.cancel()

    if os.getpid() == _process:
        asyncio.run_coroutine_threadsafe(cancel(), loop).result(1)
        time.sleep(0.05)


def _require_this_process() -> None:
    if os.getpid() != _process:
        raise OSError(
            f"process {os.getpid()} cannot make remote requests, since it is a fork of process "
            f"{_process}, which has made some; start processes with multiprocessing's method "
            "'spawn'"
        )
