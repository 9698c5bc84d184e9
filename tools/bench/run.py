"""Measures this library, other libraries and the machine's limits, in one run on one machine.

python3 tools/dev.py python tools/bench/run.py [--quick | --scale 1] [--only CASE ... | --readme]
    [--rounds 5] [--directory DIR] [--json FILE]

A case compares several ways to do the same work: ways of this library, ways of other libraries
(peers), and limits of the machine. Each way is timed in a fresh process that has done the same work
with a small file before the clock starts, except in the case `start`: its rows time whole processes
(Python starts, imports, does the work once and ends), or the first step of a process. This library
syncs the files that it writes. So the time of every other way that writes files includes a
sync, too.

A round has one or more turns. A turn measures each way once, so that a change of the machine's
speed affects all ways. A way may gain from memory that the way before it has freed. So every second
turn takes the ways in reverse order. After every two turns the first way of the order becomes the
last.

For each way the report shows medians of the rounds, and the time of the first way divided by the
time of this way: the median, least and greatest ratio of the rounds. A target limits a ratio of two
rows, or a figure of one row. The median decides if the target is met. There is no verdict if the
spread (greatest minus least) exceeds the distance from the median to the target, or if the sizes
are scaled.

Before a process starts, its input files are read into the page cache, except sparse files and the
files of the cases `real` and `real-convert`. Output files are new. All files are synced before a
process starts, so that no way pays for the writes of another way. A virtual machine may return free
memory to the host; getting memory back may then take longer than the work itself: try a smaller
--scale.

CPU is the CPU time of all threads of the process. Memory is peak growth. Anonymous memory is
RssAnon of /proc/PID/status; this tool samples RssAnon every 5 ms from another process. Resident
memory is the kernel's VmHWM, and includes mapped files.

Optional packages and programs: safetensors, onnx-ir, ONNX Runtime, PyTorch, obstore, nginx (serves
remote archives), curl. The report names the missing ones and leaves their rows out.
Three rows show limits of the machine: "pwrite" writes the bytes of the tensors from memory,
"copy" copies a file with read and write in pieces of 8 MiB (no reflink, no copy in the kernel), and
"map" sums all bytes of a file through a memory map.

--only takes names of cases, or their first words, as in `--only save`. `--only real` writes an
archive of 20 GiB, makes a session of the archive, edits, checks and exports the archive, and
converts a model of that size. `--only real` needs 45 GB of disk; if the free disk is too small for
a case whose name begins with `real`, this case is skipped. --readme measures what the README shows,
`real-open` included, in three rounds; publish.py writes README and pictures from the file of
--json. --quick takes less than two minutes: a tenth of the sizes, three rounds, fewer cases, and no
PyTorch.

Needs about 13 GB of disk and 12 GB of memory, a tenth with --quick, 23 GB of disk with --readme. At
the end, only the file of --json is left.

Exit status: 0, even if targets are missed; 1 if a way other than a peer failed, or if the disk is
too small for a case whose name does not begin with `real`; 2 for wrong use; 130 after an interrupt.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import onnxarchive
from tools.bench import cases, report
from tools.bench.cases import CASES, Case, Measure
from tools.bench.inputs import FILES, PIECE_NBYTES, places
from tools.bench.process import (
    FailedError,
    Figures,
    median_of,
    raise_limit_of_files,
    run_tool,
    run_warm,
    run_whole,
)
from tools.bench.report import GB, Result, tell
from tools.bench.server import serve

QUICK: Final = 0.1
ROUNDS: Final = 5
QUICK_ROUNDS: Final = 3
FAILED: Final = 1
INTERRUPTED: Final = 128 + signal.SIGINT

# Keys of `GROUPS` and `FILES` in inputs.py.
Input = tuple[str, str]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit status."""
    arguments = _parse(argv)
    # pip compiles the modules that it installs. Modules of a checkout can be uncompiled.
    compileall.compile_dir(Path(onnxarchive.__file__).parent, quiet=1)
    raise_limit_of_files()
    try:
        with tempfile.TemporaryDirectory(
            prefix="onnxarchive-bench-", dir=arguments.directory
        ) as folder:
            return _run(Path(folder).resolve(), arguments)
    except KeyboardInterrupt:
        tell("interrupted; nothing is left behind")
        return INTERRUPTED


def _run(folder: Path, arguments: argparse.Namespace) -> int:
    machine = report.machine(folder)
    run = Run(folder, arguments, cases.missing(arguments.quick))
    selected = run.with_room(cases.names(arguments.only or (), arguments.quick))
    print(_header(machine, arguments))
    results = run.cases(selected)
    print(report.summary(results))
    settings = {"rounds": arguments.rounds, "scale": arguments.scale}
    run_as_json = report.as_json(machine, settings, results)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(run_as_json, indent=2) + "\n")
    return FAILED if any(it.is_failed for it in results) else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    selected = parser.add_mutually_exclusive_group()
    selected.add_argument("--only", nargs="+", metavar="CASE")
    selected.add_argument("--readme", action="store_true", help="the cases that the README shows")
    parser.add_argument("--rounds", type=int, help="5, or 3 with --quick or --readme")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--scale", type=float, default=1.0, help="factor for all sizes")
    sizes.add_argument(
        "--quick", action="store_true", help="inputs of a tenth of the size, fewer cases and ways"
    )
    parser.add_argument("--directory", type=Path, help="directory for temporary files")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.epilog = "cases: " + ", ".join(CASES)
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.scale = QUICK
    if arguments.readme:
        arguments.only = cases.README
    if arguments.rounds is None:
        arguments.rounds = QUICK_ROUNDS if arguments.quick or arguments.readme else ROUNDS
    if arguments.rounds < 1 or not 0 < arguments.scale <= 1:
        parser.error(
            "expected --rounds of at least 1 and --scale above 0 and up to 1, found "
            f"--rounds {arguments.rounds} and --scale {arguments.scale}"
        )
    for name in arguments.only or ():
        if not cases.names([name]):
            parser.error(f"expected cases or their first words, found {name!r}: {parser.epilog}")
    return arguments


def _header(machine: Mapping[str, str], arguments: argparse.Namespace) -> str:
    lines = {
        **machine,
        "rounds": f"{arguments.rounds}; sizes times {arguments.scale:g}; files in the page cache",
        "memory shown": "peak growth; anonymous: RssAnon, sampled; resident: VmHWM",
    }
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items()) + "\n"


class Run:
    """Measures cases in a directory.

    Args:
        folder: The directory.
        arguments: The command line, parsed.
        missing: The packages and programs that are not used, each with the reason.
    """

    def __init__(
        self, folder: Path, arguments: argparse.Namespace, missing: Mapping[str, str]
    ) -> None:
        self._folder = folder
        self._scale: float = arguments.scale
        self._rounds: int = arguments.rounds
        self._is_quick: bool = arguments.quick
        self._missing = missing
        self._places = places(folder, arguments.scale)
        self._there: set[Input] = set()

    def cases(self, names: Sequence[str]) -> list[Result]:
        """Measures cases; prints each result before measuring the next case."""
        results = []
        for index, name in enumerate(names):
            tell(f"{name} ...")
            results.append(self._case(name))
            print(report.text(results[-1]) + "\n", flush=True)
            self._remove(self._there - self._inputs(names[index + 1 :]))
        return results

    def with_room(self, names: Sequence[str]) -> list[str]:
        """Drops large cases that exceed the free disk space; exits if a small case does."""
        free = shutil.disk_usage(self._folder).free
        files: set[Input] = set()
        chosen = []
        for index, name in enumerate(names):
            files |= self._inputs([name])
            written = [self._nbytes(it.group) for it in self._measures(name) if it.writes]
            needed = sum(self._nbytes(*it) for it in files) + max(written, default=0)
            needed += needed // 20
            files &= self._inputs(names[index + 1 :])
            shortage = f"expected {needed / GB:.1f} GB of free disk, found {free / GB:.1f} GB"
            if needed <= free:
                chosen.append(name)
            elif CASES[name].is_large:
                print(f"{name} is skipped: {shortage}; give another --directory")
            else:
                sys.exit(f"{name}: {shortage}; give another --directory, or --quick")
        return chosen

    def _nbytes(self, group: str, kind: str = "") -> int:
        tensors = self._places[group].group
        return 0 if tensors.is_sparse and kind else tensors.nbytes

    def _measures(self, name: str) -> list[Measure]:
        """The measures of a case, without those that need a missing package or program."""
        return [it for it in CASES[name].measures if not self._missing.keys() & set(it.needs)]

    def _inputs(self, names: Sequence[str]) -> set[Input]:
        """The files that cases read, and the warm-up files of the same kinds."""
        inputs: set[Input] = set()
        for name in names:
            for measure in self._measures(name):
                for kind in measure.reads:
                    inputs |= {(measure.group, kind), ("warm", kind)}
        return inputs

    def _case(self, name: str) -> Result:
        case = CASES[name]
        groups = list(dict.fromkeys(it.group for it in case.measures))
        nbytes = self._places[groups[0]].group.nbytes
        sizes = [] if case.grows else map(self._size, groups)
        result = Result(name, case, " and ".join(sizes), nbytes, is_scaled=self._scale < 1)
        for measure in case.measures:
            if case.grows:
                group = self._places[measure.group].group
                amount = group.count if case.grows == "tensors" else group.nbytes
                result.amounts[measure.name] = amount
            absent = [self._missing[it] for it in measure.needs if it in self._missing]
            if absent:
                result.left_out[measure.name] = ", ".join(absent)
        measures = self._measures(name)
        try:
            self._make(self._inputs([name]) - self._there)
        except FailedError as error:
            result.failures = {
                it.name: f"its input files cannot be made: {error}" for it in measures
            }
            return result
        rounds = 1 if case.is_large else self._rounds
        times = 1 if self._is_quick or rounds == 1 else case.times
        result.rounds = {it.name: [] for it in measures}
        for index in range(rounds):
            taken: dict[str, list[Figures]] = {}
            for turn in range(index * times, (index + 1) * times):
                first = turn // 2 % max(len(measures), 1)
                ordered = measures[first:] + measures[:first]
                for measure in reversed(ordered) if turn % 2 else ordered:
                    if measure.name not in result.failures:
                        self._add(result, measure, taken)
            for row, figures in taken.items():
                result.rounds[row].append(median_of(figures))
        for name in result.failures:
            del result.rounds[name]
        return result

    def _add(self, result: Result, measure: Measure, taken: dict[str, list[Figures]]) -> None:
        """Runs a measure; adds its figures to `taken`, or its failure to `result`."""
        place = self._places[measure.group]
        try:
            with self._ready(measure, result.case):
                if measure.clock == "warm":
                    figures = run_warm(result.name, measure.name, self._folder, self._scale)
                else:
                    figures = run_whole(measure, place, self._scale)
            taken.setdefault(measure.name, []).append(figures)
        except FailedError as error:
            result.failures[measure.name] = str(error)

    def _size(self, name: str) -> str:
        group = self._places[name].group
        noun = "tensor" if group.count == 1 else "tensors"
        return f"{group.count:,} {noun} of {report.size(group.tensor_nbytes)}"

    def _make(self, inputs: set[Input]) -> None:
        """Makes files, in one process for each group."""
        for group in sorted({it for it, _ in inputs}):
            kinds = [kind for kind in FILES if (group, kind) in inputs]
            request = {
                "folder": os.fspath(self._folder),
                "scale": self._scale,
                "group": group,
                "kinds": kinds,
            }
            self._there |= {(group, kind) for kind in kinds}
            run_tool("inputs.py", request, self._folder)

    def _remove(self, inputs: set[Input]) -> None:
        for group, kind in inputs:
            for path in self._places[group].files(kind):
                path.unlink(missing_ok=True)
        self._there -= inputs

    @contextlib.contextmanager
    def _ready(self, measure: Measure, case: Case) -> Iterator[None]:
        """Prepares output directories, page cache, server; removes the directories at the end."""
        place = self._places[measure.group]
        written = {self._places["warm"].output, place.output}
        for path in written:
            path.mkdir()
        try:
            if hasattr(os, "sync"):
                os.sync()
            for kind in measure.reads:
                for path in place.files(kind):
                    if not (case.is_large or place.group.is_sparse):
                        _warm(path)
            with serve(self._folder) if case.is_served else contextlib.nullcontext():
                yield
        finally:
            for path in written:
                shutil.rmtree(path)


def _warm(path: Path) -> None:
    """Reads a file into the page cache."""
    buffer = bytearray(PIECE_NBYTES)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
