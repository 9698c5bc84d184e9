"""One figure of tools/bench.py: a process that measures itself, and the one that watches it.

The process warms up on small files, prepares what the clock is not to see, and says "begin" and
"end" around what it is to see. Where a case is rehearsed, a fork takes the step before and ends. It
leaves nothing but memory that the kernel has at hand: on a virtual machine, memory that nobody has
used for some seconds may have to be fetched from the host first, which can take ten times as long
as to write the same bytes, and would be all that is measured.

Its anonymous memory (RssAnon of /proc/PID/status) is sampled meanwhile from outside, every few
milliseconds, so that nothing runs beside what is measured; a peak between two samples is not seen.
Its resident memory is the kernel's own peak (VmHWM), set back through /proc/self/clear_refs when
the clock starts. Both are told as growth since then, and as nothing where the system has no such
files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TextIO

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
        cpu_seconds: Time that processors were busy with it, its threads and its own processes.
        anonymous: By how many bytes its anonymous memory grew at its peak; None if not told.
        resident: By how many bytes its resident memory grew at its peak; None if not told.
    """

    seconds: float
    cpu_seconds: float
    anonymous: int | None = None
    resident: int | None = None


class FailedError(Exception):
    """A measuring process failed; the message is the end of its output."""


# The process that measures


def measure(case: str, name: str, folder: Path, scale: float, *, rehearses: bool = True) -> Figures:
    """Measures this process, while the one that started it watches.

    Args:
        case: The case.
        name: The name of the measure.
        folder: The directory of all groups.
        scale: Factor for all sizes.
        rehearses: Whether to rehearse where the case says so.
    """
    import bench_cases
    from bench_inputs import places

    found = next(it for it in bench_cases.CASES[case].measures if it.name == name)
    there = places(folder, scale)
    warm, place = there["warm"], there[found.group]
    found.prepare(warm)()
    step = found.prepare(place)
    if rehearses and bench_cases.CASES[case].is_rehearsed and hasattr(os, "fork"):
        _rehearse(step)
        for output in (warm.output, place.output):
            for path in output.iterdir():
                path.unlink()
        # The fork shared all pages: those that this process is about to write become its own again.
        found.prepare(warm)()
    gc.collect()
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write(_RESET_PEAK)
    before = status()
    _tell(f"{BEGIN} {before.get('RssAnon', 0)}")
    busy = _busy()
    begun = time.perf_counter()
    kept = step()
    seconds = time.perf_counter() - begun
    busy = _busy() - busy
    after = status()
    _tell(END)
    if isinstance(kept, bench_cases.Told):
        return Figures(kept.seconds, kept.cpu_seconds)
    if found.is_process:
        return Figures(seconds, busy)
    return Figures(
        seconds, busy, _growth(before, after, "RssAnon"), _growth(before, after, "VmRSS", "VmHWM")
    )


def _rehearse(step: Callable[[], object]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which are idle
        process = os.fork()
    if process == 0:
        status = 1
        try:
            step()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    if os.waitpid(process, 0)[1]:
        sys.exit(1)  # the fork has said why


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


def _busy() -> float:
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def _raise_limit_of_files() -> None:
    """Lets this process open many files: onnx_ir has one open for each tensor."""
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


def run_measure(
    case: str, name: str, folder: Path, scale: float, *, rehearses: bool = True
) -> Figures:
    """Measures once, in a fresh process.

    Args:
        case: As `measure` takes it, and so
        name: this,
        folder: this,
        scale: this,
        rehearses: and this.

    Raises:
        FailedError: It did not end well.
    """
    told = {
        "case": case,
        "name": name,
        "folder": os.fspath(folder),
        "scale": scale,
        "rehearses": rehearses,
    }
    with (
        tempfile.TemporaryFile("w+", dir=folder) as errors,
        subprocess.Popen(
            [sys.executable, __file__, json.dumps(told)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=folder,
        ) as process,
    ):
        sampler = _Sampler(process.pid)
        sampler.start()
        answer = ""
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(BEGIN):
                    sampler.before = int(line.split()[1])
                    sampler.is_running.set()
                elif line.strip() == END:
                    sampler.is_running.clear()
                else:
                    answer = line
            process.wait()
        finally:
            sampler.is_done.set()
            if process.poll() is None:
                process.kill()
            sampler.join()
        if process.returncode or not answer:
            raise FailedError(_end_of(errors, process.returncode))
    figures = Figures(**json.loads(answer))
    if figures.anonymous is None:
        return figures
    most = max(figures.anonymous, sampler.most - sampler.before)
    return dataclasses.replace(figures, anonymous=most)


def run_tool(program: str, told: Mapping[str, Any], folder: Path) -> None:
    """Runs another of these tools, which is told in JSON what to do.

    Raises:
        FailedError: It did not end well.
    """
    with tempfile.TemporaryFile("w+", dir=folder) as errors:
        done = subprocess.run(
            [sys.executable, os.path.join(os.path.dirname(__file__), program), json.dumps(told)],
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            cwd=folder,
            check=False,
        )
        if done.returncode:
            raise FailedError(_end_of(errors, done.returncode))


def _end_of(errors: Any, status: int | None) -> str:
    errors.seek(0)
    lines = [line.rstrip() for line in errors if line.strip()]
    return "\n".join([*lines[-_LINES_TOLD:], f"exit status {status}"])


def main(argv: Sequence[str]) -> int:
    """Measures in a process that is told what, and tells the figures."""
    told = json.loads(argv[0])
    _raise_limit_of_files()
    figures = measure(
        told["case"],
        told["name"],
        Path(told["folder"]),
        told["scale"],
        rehearses=told["rehearses"],
    )
    _tell(json.dumps(asdict(figures)))
    return 0


if __name__ == "__main__":
    # Output of libraries must not reach the watching process.
    _answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.exit(main(sys.argv[1:]))
