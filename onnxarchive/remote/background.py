"""Runs requests in a background thread, so that Ctrl-C cancels them immediately."""

from __future__ import annotations

import asyncio
import atexit
import errno
import os
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable
from concurrent.futures import Future
from contextlib import aclosing
from functools import partial
from itertools import islice
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeAlias, TypeVar

from onnxarchive.files.locking import OfOneProcess

_Result = TypeVar("_Result")
Request: TypeAlias = Callable[[], Coroutine[Any, Any, _Result]]
StreamRequest: TypeAlias = Callable[[], AsyncGenerator[_Result, None]]

IN_FLIGHT = 12  # requests at once
SECONDS_AHEAD = 16.0  # as many bytes are under way as arrive in this time, within limits
SPAWN = "start processes with multiprocessing's method 'spawn'"

_lock = Lock()
_loop: asyncio.AbstractEventLoop | None = None
_work: OfOneProcess | None = None  # the thread of `_loop`, which a fork lacks


def run(name: str, request: Request[_Result]) -> _Result:
    """Runs a request for the object of this name, and returns its result; Ctrl-C cancels it.

    Raises:
        OSError: This process is a fork of a process that made requests, or can start no thread.
    """
    future = _start(name, request)
    try:
        return future.result()
    finally:
        future.cancel()
        del future  # else a failed future, its error and this frame would be a reference cycle


def in_order(name: str, requests: Iterable[Request[_Result]]) -> Generator[_Result, None, None]:
    """Runs requests, up to `IN_FLIGHT` at once, and yields their results in order.

    A request that fails ends the iterator after the results of the requests before it. Closing the
    iterator cancels running requests. At most `IN_FLIGHT` results wait for the caller.
    """
    starting = map(partial(_start, name), requests)
    begun: deque[Future[_Result]] = deque()
    try:
        begun.extend(islice(starting, IN_FLIGHT))
        while begun:
            result = begun[0].result()
            begun.popleft()
            yield result
            _require_own(name)
            begun.extend(islice(starting, 1))
    finally:
        while begun:  # a failed future would be in a reference cycle, as in `run`
            begun.popleft().cancel()


def run_streams(
    name: str, streams: Iterable[StreamRequest[_Result]], most: Callable[[], int]
) -> Generator[_Result, None, None]:
    """Runs streams, up to `most()` at once, and yields their items as soon as they arrive.

    Closing the iterator cancels running streams. A stream pauses while many items wait for the
    caller.
    """
    # None for the end of a stream. A future in the queue would complete a reference cycle, which
    # would keep the connections of cancelled streams open.
    items: SimpleQueue[_Result | None] = SimpleQueue()

    async def pump(stream: StreamRequest[_Result]) -> None:
        async with aclosing(stream()) as arriving:
            async for item in arriving:
                items.put(item)
                while items.qsize() > IN_FLIGHT:
                    await asyncio.sleep(0.005)

    streams = iter(streams)
    begun: list[Future[None]] = []
    running = 0
    try:
        while True:
            for stream in islice(streams, max(0, most() - running)):
                begun.append(_start(name, partial(pump, stream)))
                begun[-1].add_done_callback(lambda _: items.put(None))
                running += 1
            if not running:
                return
            item = items.get()
            if item is None:
                running -= 1
                for future in [future for future in begun if future.done()]:
                    begun.remove(future)
                    future.result()
            else:
                yield item
                _require_own(name)
    finally:
        for future in begun:
            future.cancel()


def _start(name: str, request: Request[_Result]) -> Future[_Result]:
    global _loop, _work
    with _lock:
        if _loop is None:
            loop = asyncio.new_event_loop()
            try:
                start_thread(name, loop.run_forever)
            except BaseException:
                loop.close()
                raise
            _loop, _work = loop, OfOneProcess()
            atexit.register(_stop, loop)
        _require_own(name)
        return asyncio.run_coroutine_threadsafe(request(), _loop)


def start_thread(name: str, function: Callable[..., object], *arguments: object) -> Thread:
    """Runs a function in a new daemon thread, for requests to the object of this name.

    Raises:
        OSError: The system starts no further thread.
    """
    thread = Thread(target=function, args=arguments, name="onnxarchive requests", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise OSError(
            errno.EAGAIN,
            f"remote requests need a thread, which could not be started ({error}); end other "
            "threads or processes, or raise their limit ('ulimit -u')",
            name,
        ) from None
    return thread


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    """Cancels the running requests before Python ends.

    Up to Python 3.13, a thread of obstore aborts the process if the thread calls into Python while
    Python ends. So this function ends with a pause, in which threads that have just delivered a
    result finish their calls into Python.
    """

    async def cancel() -> None:
        for task in asyncio.all_tasks():
            if task is not asyncio.current_task():
                task.cancel()

    if _work is not None and _work.is_own:
        asyncio.run_coroutine_threadsafe(cancel(), loop).result(1)
        time.sleep(0.05)


def _require_own(name: str) -> None:
    if _work is not None and not _work.is_own:
        raise OSError(
            errno.ENOTSUP,
            f"process {os.getpid()} cannot make remote requests, since it is a fork of a process "
            f"that has made some; {SPAWN}",
            name,
        )
