"""Takes the figures of run.py: a process measures itself, and the parent process watches.

The measuring process warms up on small files, prepares the step, and writes "begin" before
the step and "end" after the step to standard output.

From "begin" to "end" the parent samples the anonymous memory of the measuring process (RssAnon of
/proc/PID/status) every few milliseconds, and misses peaks between two samples. Resident memory is
the kernel's own peak (VmHWM), reset through /proc/self/clear_refs when the clock starts. Both are
reported as growth since the start of the clock, or as None without /proc.

The parent also times whole processes from start to end; see `whole` of ways.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any, Final, TextIO

from tools.bench.cases import CASES, Measure
from tools.bench.inputs import Place, places

SAMPLING_INTERVAL: Final = 0.005
BEGIN: Final = "begin"
END: Final = "end"
_RESET_PEAK: Final = "5"  # written to clear_refs, resets VmHWM: see proc(5)
_MANY_FILES: Final = 1 << 17
_LINES_TOLD: Final = 15  # number of last lines of output in the message of `FailedError`
_ROOT: Final = os.fspath(Path(__file__).resolve().parents[2])
_answers: TextIO | None = None  # standard output


@dataclass(frozen=True)
class Figures:
    """Figures of one process.

    Attributes:
        seconds: Wall time.
        cpu_seconds: CPU time of all threads; None if unknown.
        anonymous: Peak growth of anonymous memory in bytes; None if unknown.
        resident: Peak growth of resident memory in bytes; None if unknown.
    """

    seconds: float
    cpu_seconds: float | None = None
    anonymous: float | None = None
    resident: float | None = None


def median_of(figures: Sequence[Figures]) -> Figures:
    """The median of each figure; None if any value of the figure is None."""
    columns = zip(*map(astuple, figures), strict=True)
    medians: Any = [None if None in it else statistics.median(it) for it in columns]
    return Figures(*medians)


class FailedError(Exception):
    """A process failed, or ended without printing its figures."""


# The process that measures


def measure(case: str, name: str, folder: Path, scale: float) -> Figures:
    """Measures a step in this process, while the parent process watches.

    Args:
        case: The case.
        name: The name of the measure.
        folder: The directory of all groups.
        scale: Factor for all sizes.
    """
    measured = next(it for it in CASES[case].measures if it.name == name)
    groups = places(folder, scale)
    measured.prepare(groups["warm"])()
    step = measured.prepare(groups[measured.group])
    gc.collect()
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write(_RESET_PEAK)
    before = status()
    _tell(f"{BEGIN} {before.get('RssAnon', 0)}")
    busy = time.process_time()
    begun = time.perf_counter()
    _kept = step()
    seconds = time.perf_counter() - begun
    busy = time.process_time() - busy
    after = status()
    _tell(END)
    return Figures(
        seconds, busy, _growth(before, after, "RssAnon"), _growth(before, after, "VmRSS", "VmHWM")
    )


def status(process: int | str = "self") -> dict[str, int]:
    """The memory fields of /proc/PID/status, in bytes; empty without /proc."""
    fields = {}
    with contextlib.suppress(OSError), open(f"/proc/{process}/status") as file:
        for line in file:
            if line.endswith(" kB\n"):
                field, value, _ = line.split()
                fields[field.rstrip(":")] = int(value) << 10
    return fields


def _growth(
    before: Mapping[str, int], after: Mapping[str, int], field: str, peak: str | None = None
) -> int | None:
    if field not in before or field not in after:
        return None
    return max(after[field], after.get(peak or field, 0)) - before[field]


def _tell(what: str) -> None:
    print(what, file=_answers, flush=True)


# The process that watches


class _Sampler(threading.Thread):
    """Samples the anonymous memory of a process while `is_running` is set."""

    def __init__(self, process: int) -> None:
        super().__init__(daemon=True)
        self._process = process
        self.before = 0
        self.most = 0
        self.is_running = threading.Event()
        self.is_done = threading.Event()

    def run(self) -> None:
        while not self.is_done.wait(SAMPLING_INTERVAL):
            if self.is_running.is_set():
                self.most = max(self.most, status(self._process).get("RssAnon", 0))


@contextlib.contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A child process; kills it at the end of the block, if it still runs."""
    with subprocess.Popen(command, stdin=DEVNULL, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def run_warm(case: str, name: str, folder: Path, scale: float) -> Figures:
    """Measures a step in a new process, after the same step with a small file.

    Args:
        case: The case.
        name: The name of the measure.
        folder: The directory of all groups.
        scale: Factor for all sizes.

    Raises:
        FailedError: The process failed.
    """
    request = {"case": case, "name": name, "folder": os.fspath(folder), "scale": scale}
    with tempfile.TemporaryFile("w+", dir=folder) as errors:
        command = [sys.executable, __file__, json.dumps(request)]
        with started(command, stdout=PIPE, stderr=errors, cwd=folder) as process:
            assert process.stdout is not None
            sampler = _Sampler(process.pid)
            sampler.start()
            answer = ""
            try:
                for line in process.stdout:
                    if line.startswith(BEGIN):
                        sampler.before = int(line.split()[1])
                        sampler.is_running.set()
                    elif line.strip() == END:
                        sampler.is_running.clear()
                    else:
                        answer = line
            finally:
                sampler.is_done.set()
                sampler.join()
            if process.wait() or not answer:
                raise FailedError(_end_of(errors, process.returncode))
    figures = Figures(**json.loads(answer))
    if figures.anonymous is None:
        return figures
    most = max(figures.anonymous, sampler.most - sampler.before)
    return dataclasses.replace(figures, anonymous=most)


def run_whole(measure: Measure, place: Place, scale: float) -> Figures:
    """Runs a new process that takes one step; times the process, or the step (`Clock`).

    Args:
        measure: The measure.
        place: The files of the measure's group.
        scale: Factor for all sizes.

    Raises:
        FailedError: The process failed.
    """
    way = getattr(measure.prepare, "func", measure.prepare).__name__
    arguments = getattr(measure.prepare, "keywords", {})
    call = f"{way!r}, {arguments!r}, {os.fspath(place.folder)!r}, {place.name!r}, {scale!r}"
    program = (
        f"import sys; sys.path[0] = {_ROOT!r}; from tools.bench import ways; ways.whole({call})"
    )
    command = [sys.executable, "-c", program]
    with tempfile.TemporaryFile("w+", dir=place.folder) as errors:
        begun = time.perf_counter()
        with started(command, stdout=PIPE, stderr=errors, cwd=place.folder) as process:
            output, _ = process.communicate()
        seconds = time.perf_counter() - begun
        if process.returncode:
            raise FailedError(_end_of(errors, process.returncode))
    return Figures(seconds if measure.clock == "process" else float(output.splitlines()[-1]))


def run_tool(program: str, request: Mapping[str, Any], folder: Path) -> None:
    """Runs another program of tools/bench/ with one argument, which is JSON.

    Raises:
        FailedError: The program failed.
    """
    command = [
        sys.executable,
        os.path.join(os.path.dirname(__file__), program),
        json.dumps(request),
    ]
    with (
        tempfile.TemporaryFile("w+", dir=folder) as errors,
        started(command, stdout=errors, stderr=errors, cwd=folder) as process,
    ):
        if process.wait():
            raise FailedError(_end_of(errors, process.returncode))


def raise_limit_of_files() -> None:
    """Lets this process and its children open many files: onnx_ir opens one for each tensor."""
    try:
        import resource
    except ImportError:  # Windows, which has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in ((_MANY_FILES, max(hard, _MANY_FILES)), (hard, hard)):
        if soft < _MANY_FILES:
            with contextlib.suppress(OSError, ValueError):  # not allowed
                resource.setrlimit(resource.RLIMIT_NOFILE, limit)
                return


def _end_of(errors: Any, status: int | None) -> str:
    errors.seek(0)
    lines = [line.rstrip() for line in errors if line.strip()]
    return "\n".join([*lines[-_LINES_TOLD:], f"exit status {status}"])


def main(argv: Sequence[str]) -> int:
    """Measures the step that the JSON argument names; prints the figures as JSON."""
    request = json.loads(argv[0])
    figures = measure(request["case"], request["name"], Path(request["folder"]), request["scale"])
    _tell(json.dumps(asdict(figures)))
    return 0


if __name__ == "__main__":
    # What libraries print goes to standard error, not among the answers to the watching process.
    _answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.exit(main(sys.argv[1:]))
