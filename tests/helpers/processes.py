"""Starts processes and threads for tests, and waits for them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

_Result = TypeVar("_Result")
_ENDING = [it for it in signal.Signals if it.name in ("SIGHUP", "SIGINT", "SIGTERM")]


@contextlib.contextmanager
def started(command: Iterable[object], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Runs a process with pipes for its output; kills it and its children after the block.

    The process does not inherit ignored signals: SIGHUP, SIGINT and SIGTERM end it, also in tests
    that run in the background of a shell or with nohup.

    Args:
        command: The program and its arguments.
        options: Further arguments of `Popen`.
    """
    before = {it: signal.signal(it, signal.SIG_DFL) for it in _ENDING}
    try:
        process = subprocess.Popen(
            [str(it) for it in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **options,
        )
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    with process:
        try:
            yield process
        finally:
            with contextlib.suppress(
                ProcessLookupError, PermissionError
            ):  # all processes have ended
                os.killpg(process.pid, signal.SIGKILL)


def completed(
    command: Iterable[object], *, status: int | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs a process to its end; fails if it takes 280 seconds.

    Args:
        command: The program and its arguments.
        status: The required exit status; None for any.
        options: Further arguments of `subprocess.run`.
    """
    done = subprocess.run(
        [str(it) for it in command],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        **options,
    )
    assert status in (None, done.returncode), done.stdout[-4000:] + done.stderr[-4000:]
    return done


def at_once(calls: Iterable[Callable[[], object]]) -> None:
    """Makes calls in a thread each, and waits for all."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def wait_until(
    condition: Callable[[], _Result], process: subprocess.Popen[str] | None = None
) -> _Result:
    """Waits until a condition is true; returns its value.

    Fails after 280 seconds, or if `process` ends first.
    """
    deadline = time.monotonic() + 280
    while not (found := condition()):
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return found


def is_running(process: int) -> bool:
    """True if the process with this id runs; False if it ended or is a zombie."""
    try:
        status = Path("/proc", str(process), "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def mapped(process: int, path: Path) -> dict[str, int]:
    """The fields of /proc/PID/smaps in bytes, each summed over the process's maps of a file."""
    sums: dict[str, int] = {}
    is_of_file = False
    with open(f"/proc/{process}/smaps") as file:
        for line in file:
            first, *rest = line.split()
            if not first.endswith(":"):
                is_of_file = line.rstrip().endswith(os.path.realpath(path))
            elif is_of_file and rest[-1] == "kB":
                sums[first[:-1]] = sums.get(first[:-1], 0) + (int(rest[0]) << 10)
    return sums
