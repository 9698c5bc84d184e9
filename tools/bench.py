"""Measures the library beside others and beside the machine's limits, in one run on one machine.

python3 tools/dev.py python tools/bench.py [--quick] [--only CASE ...] [--rounds 5]
    [--directory DIR] [--cold] [--json FILE] [--plot FILE.svg]

Every figure is of a fresh process, which has imported what it needs and has done the same with a
small file before the clock starts. The ways of a case take turns, and another one begins in each
round, so that a change of the machine's speed meets all of them; told are medians, and ratios
within each round with the least and most of them. Targets are judged by the median of these ratios;
beside it stands the ratio of the best figures of all rounds, on which other programs weigh least.
Where a virtual machine gives free memory back to its host, and has to fetch it again, that takes up
to ten times as long as to write the same bytes, and meets one figure and not the next: a smaller
--scale may then tell more of what writes gigabytes.

Files that are read are in the page cache, with --cold they are dropped from it (posix_fadvise).
What is written is a new file, without fsync unless a case says so; everything is synced before a
process begins, so that nobody writes back what another one wrote. Where memory counts, and not with
--cold, a fork does the same right before the clock starts, so that the machine has the memory at
hand; what it wrote is removed, and not synced, since the host would take the memory meanwhile.

CPU is the time that all threads of the process were busy. Memory is the growth at its peak:
anonymous memory as RssAnon of /proc/PID/status sampled every 5 ms from outside, resident memory,
which has mapped files as well, as the kernel's own VmHWM.

Peers that are not installed are named and left out: safetensors, onnx-safetensors, onnx-ir,
ONNX Runtime, PyTorch. "pwrite", "copy" and "map" are limits of the machine: the same bytes written
from memory, a file copied with read and write in pieces of 8 MiB (no reflink, no copy in the
kernel), all bytes of a file added up through a map.

Some 13 GB of disk and 12 GB of memory are used, a tenth of it with --quick; nothing is left behind.

Exit status: 0, whether targets are met or not; 1 where something failed other than a peer, which is
told; 2 for wrong use.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Final

import bench_cases
import bench_report
from bench_cases import CASES, Measure
from bench_inputs import FILES, PIECE_NBYTES, places
from bench_process import FailedError, Figures, run_measure, run_tool
from bench_report import Result, tell

QUICK: Final = 0.1
FAILED: Final = 1
INTERRUPTED: Final = 128 + signal.SIGINT

# Files of a kind of a group.
Input = tuple[str, str]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and gives its exit status."""
    arguments = _parse(argv)
    signal.signal(signal.SIGTERM, _raise_interrupt)
    missing = bench_cases.missing()
    selected = bench_cases.names(arguments.only or ())
    try:
        with tempfile.TemporaryDirectory(
            prefix="onnxarchive-bench-", dir=arguments.directory
        ) as made:
            folder = Path(made).resolve()
            machine = bench_report.machine(folder)
            run = Run(folder, arguments, missing)
            run.require_room(selected)
            print(_header(machine, arguments))
            results = run.cases(selected)
    except KeyboardInterrupt:
        tell("interrupted; nothing is left behind")
        return INTERRUPTED
    print(bench_report.summary(results))
    if arguments.json is not None:
        settings = {"rounds": arguments.rounds, "scale": arguments.scale, "cold": arguments.cold}
        told = bench_report.as_json(machine, settings, results)
        arguments.json.write_text(json.dumps(told, indent=2) + "\n")
    if arguments.plot is not None:
        title = f"{machine['CPU']}, {machine['memory']}, {machine['file system']}"
        bench_report.plot(arguments.plot, title, results)
    return FAILED if any(it.is_failed for it in results) else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="CASE", choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--scale", type=float, default=1.0, help="what the sizes are multiplied by")
    sizes.add_argument(
        "--quick", action="store_const", const=QUICK, dest="scale", help="a tenth of the sizes"
    )
    parser.add_argument("--directory", type=Path, help="where the files are written for the time")
    parser.add_argument("--cold", action="store_true", help="drop files from the page cache")
    parser.add_argument("--json", type=Path, help="a file for all figures")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="a drawing of the times")
    parser.epilog = "cases: " + ", ".join(CASES)
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1 or not 0 < arguments.scale <= 1:
        parser.error(
            "expected one round at least and a scale above 0 and up to 1, found "
            f"{arguments.rounds} and {arguments.scale}"
        )
    if arguments.cold and not hasattr(os, "posix_fadvise"):
        parser.error("expected a system with posix_fadvise for --cold, found none; leave it out")
    if arguments.plot is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("expected matplotlib for --plot, found none; pip install matplotlib")
    return arguments


def _raise_interrupt(signal_number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _header(machine: Mapping[str, str], arguments: argparse.Namespace) -> str:
    cache = "dropped from the page cache" if arguments.cold else "in the page cache"
    told = {
        **machine,
        "rounds": f"{arguments.rounds}, of sizes times {arguments.scale:g}, files {cache}",
        "memory told": "growth at its peak: anonymous sampled (RssAnon), resident VmHWM",
    }
    width = max(map(len, told))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in told.items()) + "\n"


class Run:
    """Takes the figures of cases in a directory.

    Args:
        folder: The directory.
        arguments: The command line, parsed.
        missing: Packages that are not installed, and a sentence about each.
    """

    def __init__(
        self, folder: Path, arguments: argparse.Namespace, missing: Mapping[str, str]
    ) -> None:
        self._folder = folder
        self._scale: float = arguments.scale
        self._rounds: int = arguments.rounds
        self._is_cold: bool = arguments.cold
        self._missing = missing
        self._places = places(folder, arguments.scale)
        self._there: set[Input] = set()

    def cases(self, names: Sequence[str]) -> list[Result]:
        """The results of cases, each printed when it is there."""
        results = []
        for index, name in enumerate(names):
            tell(f"{name} ...")
            results.append(self._case(name))
            print(bench_report.text(results[-1]) + "\n", flush=True)
            self._remove(self._there - self._inputs(names[index + 1 :]))
        return results

    def require_room(self, names: Sequence[str]) -> None:
        """Ends the program where the disk has no room for the cases."""
        most = 0
        there: set[Input] = set()
        for index, name in enumerate(names):
            there |= self._inputs([name])
            written = [self._nbytes(it.group) for it in self._measures(name) if it.writes]
            most = max(most, sum(self._nbytes(it) for it, _ in there) + max(written, default=0))
            there &= self._inputs(names[index + 1 :])
        most += most // 10
        free = shutil.disk_usage(self._folder).free
        if free < most:
            sys.exit(
                f"expected {bench_report.size(most)} of free disk, found "
                f"{bench_report.size(free)}; give another --directory, or --quick"
            )

    def _nbytes(self, group: str) -> int:
        found = self._places[group].group
        return 0 if found.is_sparse else found.nbytes

    def _measures(self, name: str) -> list[Measure]:
        """The measures of a case that can be taken."""
        return [it for it in CASES[name].measures if not self._missing.keys() & set(it.needs)]

    def _inputs(self, names: Sequence[str]) -> set[Input]:
        """The files that cases read, and those that processes warm up with."""
        found: set[Input] = set()
        for name in names:
            for measure in self._measures(name):
                for kind in measure.reads:
                    found |= {(measure.group, kind), ("warm", kind)}
        return found

    def _case(self, name: str) -> Result:
        case = CASES[name]
        groups = list(dict.fromkeys(it.group for it in case.measures))
        nbytes = self._places[groups[0]].group.nbytes
        result = Result(name, case, " and ".join(map(self._size, groups)), nbytes)
        for measure in case.measures:
            absent = [self._missing[it] for it in measure.needs if it in self._missing]
            if absent:
                result.left_out[measure.name] = ", ".join(absent)
        measures = self._measures(name)
        try:
            self._make(self._inputs([name]) - self._there)
        except FailedError as error:
            result.failures = {it.name: f"its files: {error}" for it in measures}
            return result
        for index in range(self._rounds * case.times if self._rounds > 1 else 1):
            first = index % len(measures) if measures else 0
            for measure in measures[first:] + measures[:first]:
                if measure.name in result.failures:
                    continue
                try:
                    figures = self._take(name, measure)
                except FailedError as error:
                    result.failures[measure.name] = str(error)
                    result.rounds.pop(measure.name, None)
                else:
                    result.rounds.setdefault(measure.name, []).append(figures)
        return result

    def _size(self, name: str) -> str:
        group = self._places[name].group
        noun = "tensor" if group.count == 1 else "tensors"
        return f"{group.count:,} {noun} of {bench_report.size(group.tensor_nbytes)}"

    def _make(self, inputs: set[Input]) -> None:
        """Makes files, those of a group in one process."""
        for group in sorted({it for it, _ in inputs}):
            kinds = [kind for kind in FILES if (group, kind) in inputs]
            told = {
                "folder": os.fspath(self._folder),
                "scale": self._scale,
                "group": group,
                "kinds": kinds,
            }
            self._there |= {(group, kind) for kind in kinds}
            run_tool("bench_inputs.py", told, self._folder)

    def _remove(self, inputs: set[Input]) -> None:
        for group, kind in inputs:
            for path in self._places[group].files(kind):
                path.unlink(missing_ok=True)
        self._there -= inputs

    def _take(self, case: str, measure: Measure) -> Figures:
        place = self._places[measure.group]
        written = {self._places["warm"].output, place.output}
        for path in written:
            path.mkdir()
        try:
            if hasattr(os, "sync"):
                os.sync()
            for kind in measure.reads:
                for path in place.files(kind):
                    if self._is_cold:
                        _drop(path)
                    elif not place.group.is_sparse:
                        _warm(path)
            # A rehearsal would read the dropped files again.
            return run_measure(
                case, measure.name, self._folder, self._scale, rehearses=not self._is_cold
            )
        finally:
            for path in written:
                shutil.rmtree(path)


def _warm(path: Path) -> None:
    """Reads a file, so that it is in the page cache."""
    buffer = bytearray(PIECE_NBYTES)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def _drop(path: Path) -> None:
    """Drops a file from the page cache; all of it must be on disk."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    sys.exit(main())
