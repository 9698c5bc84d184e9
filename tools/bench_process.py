"""The figures of tools/bench.py: a process that measures itself, and the one that watches it.

The measuring process warms up on small files, prepares what the clock is not to see, and says
"begin" and "end" around what it is to see.

Its anonymous memory (RssAnon of /proc/PID/status) is sampled meanwhile from outside, every few
milliseconds, so that nothing runs beside what is measured; a peak between two samples is not seen.
Its resident memory is the kernel's own peak (VmHWM), set back through /proc/self/clear_refs when
the clock starts. Both are told as growth since then, and as nothing where the system has no such
files.

Whole processes are timed from outside, from their start to their end; see `whole` of
tools/bench_ways.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from subprocess import PIPE
from typing import TYPE_CHECKING, Any, Final, TextIO

import bench_interrupts

if TYPE_CHECKING:
    from bench_cases import Measure
    from bench_inputs import Place

SAMPLING_INTERVAL: Final = 0.005
BEGIN: Final = "begin"
END: Final = "end"
_RESET_PEAK: Final = "5"  # of VmHWM, as proc(5) has it
_MANY_FILES: Final = 1 << 17
_LINES_TOLD: Final = 15  # of a process that failed
_answers: TextIO | None = None  # standard output


@dataclass(frozen=True)
class Figures:
    """Figures of one process.

    Attributes:
        seconds: Wall time.
        cpu_seconds: Time that processors were busy with it and its threads; None if not told.
        anonymous: By how many bytes its anonymous memory grew at its peak; None if not told.
        resident: By how many bytes its resident memory grew at its peak; None if not told.
    """

    seconds: float
    cpu_seconds: float | None = None
    anonymous: float | None = None
    resident: float | None = None


def median_of(figures: Sequence[Figures]) -> Figures:
    """The median of each figure; None where one was not told."""
    columns = zip(*map(astuple, figures), strict=True)
    medians: Any = [None if None in it else statistics.median(it) for it in columns]
    return Figures(*medians)


class FailedError(Exception):
    """A measuring process failed; the message is the end of its output."""


# The process that measures


def measure(case: str, name: str, folder: Path, scale: float) -> Figures:
    """Measures this process, while the one that started it watches.

    Args:
        case: The case.
        name: The name of the measure.
        folder: The directory of all groups.
        scale: Factor for all sizes.
    """
    import bench_cases
    from bench_inputs import places

    found = next(it for it in bench_cases.CASES[case].measures if it.name == name)
    there = places(folder, scale)
    found.prepare(there["warm"])()
    step = found.prepare(there[found.group])
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
    """Memory of a process by /proc, in bytes; empty without /proc."""
    found = {}
    with contextlib.suppress(OSError), open(f"/proc/{process}/status") as file:
        for line in file:
            if line.endswith(" kB\n"):
                field, value, _ = line.split()
                found[field.rstrip(":")] = int(value) << 10
    return found


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


def run_warm(case: str, name: str, folder: Path, scale: float) -> Figures:
    """Figures of a step in a process that has done the same before, with a small file.

    Args:
        case: The case.
        name: The name of the measure.
        folder: The directory of all groups.
        scale: Factor for all sizes.

    Raises:
        FailedError: The process did not end well.
    """
    told = {"case": case, "name": name, "folder": os.fspath(folder), "scale": scale}
    with tempfile.TemporaryFile("w+", dir=folder) as errors:
        command = [sys.executable, __file__, json.dumps(told)]
        process = bench_interrupts.start(command, stdout=PIPE, stderr=errors, cwd=folder)
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
            process.stdout.close()
            sampler.is_done.set()
            sampler.join()
        if process.wait() or not answer:
            raise FailedError(_end_of(errors, process.returncode))
    figures = Figures(**json.loads(answer))
    if figures.anonymous is None:
        return figures
    most = max(figures.anonymous, sampler.most - sampler.before)
    return dataclasses.replace(figures, anonymous=most)


def run_whole(measure: Measure, place: Place, scale: float) -> tuple[Figures, Figures]:
    """Figures of a process that does nothing but the step, and of the step in it.

    The former's time is less the time that data took to make.

    Args:
        measure: The measure.
        place: Its files.
        scale: Factor for all sizes.

    Raises:
        FailedError: The process did not end well.
    """
    way = getattr(measure.prepare, "func", measure.prepare).__name__
    arguments = getattr(measure.prepare, "keywords", {})
    told = f"{way!r}, {arguments!r}, {os.fspath(place.folder)!r}, {place.name!r}, {scale!r}"
    tools = os.path.dirname(os.path.abspath(__file__))
    program = f"import sys; sys.path[0] = {tools!r}; import bench_ways; bench_ways.whole({told})"
    with tempfile.TemporaryFile("w+", dir=place.folder) as errors:
        begun = time.perf_counter()
        process = bench_interrupts.start(
            [sys.executable, "-c", program], stdout=PIPE, stderr=errors, cwd=place.folder
        )
        output, _ = process.communicate()
        seconds = time.perf_counter() - begun
        if process.returncode:
            raise FailedError(_end_of(errors, process.returncode))
    made, step = map(float, output.splitlines()[-1].split())
    return Figures(seconds - made), Figures(step)


def run_tool(program: str, told: Mapping[str, Any], folder: Path) -> None:
    """Runs another of these tools, which is told in JSON what to do.

    Raises:
        FailedError: It did not end well.
    """
    command = [sys.executable, os.path.join(os.path.dirname(__file__), program), json.dumps(told)]
    with tempfile.TemporaryFile("w+", dir=folder) as errors:
        process = bench_interrupts.start(command, stdout=errors, stderr=errors, cwd=folder)
        if process.wait():
            raise FailedError(_end_of(errors, process.returncode))


def raise_limit_of_files() -> None:
    """Lets the processes open many files: onnx_ir has one open for each tensor."""
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
    """Measures in a process that is told what, and tells the figures."""
    told = json.loads(argv[0])
    figures = measure(told["case"], told["name"], Path(told["folder"]), told["scale"])
    _tell(json.dumps(asdict(figures)))
    return 0


if __name__ == "__main__":
    # Output of libraries must not reach the watching process.
    _answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.exit(main(sys.argv[1:]))
