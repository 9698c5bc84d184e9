"""Kills conversions at evenly spread moments and checks the target afterwards.

Each run starts `onnxarchive convert` as a process and kills the process (SIGKILL). The moments of
the kills are spread evenly from the start of a conversion to shortly after its usual end. In every
second run the target exists already, as an older archive. After each run the target must be
unchanged or complete. A complete target breaks no rule, and has the same bytes as after an
undisturbed conversion. A killed run may leave one temporary file beside the target, nothing else.

Prints a line of figures. Exit status: 0, or 1 if a run broke one of these conditions.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import onnxarchive
from tools.bench.inputs import ITEM_NBYTES, Group, Place

MEGABYTE: Final = 1_000_000
TENSORS: Final = 20
# Time from the usual end of a conversion to the latest kill, as a fraction of the usual duration.
BEYOND: Final = 0.15
UNDISTURBED_RUNS: Final = 3

ABSENT, OLD, COMPLETE = "absent", "old", "complete"  # states of a target
DONE, KILLED = 0, -signal.SIGKILL  # exit statuses


class Scene(NamedTuple):
    """A directory for conversions: the model, its archive, an older one, and the target."""

    source: Path
    expected: Path
    old: Path
    target: Path  # in a directory that is otherwise empty

    def start(self) -> subprocess.Popen[bytes]:
        """Starts a conversion, as a user would."""
        paths = [str(self.source), str(self.target)]
        command = [sys.executable, "-m", "onnxarchive", "convert", "--force", *paths]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def write_model(path: Path, megabytes: int) -> None:
    """Writes a model of random weights."""
    width = int((megabytes * MEGABYTE / TENSORS / ITEM_NBYTES) ** 0.5)
    model = Place(path.parent, path.stem, Group(TENSORS, width)).model()
    path.write_bytes(model.SerializeToString())


def set_scene(directory: Path, megabytes: int) -> tuple[Scene, float]:
    """Makes the model and the archives; returns the scene and the seconds of a conversion."""
    names = ("model.onnx", "expected.onnxa", "old.onnxa", "work/model.onnxa")
    scene = Scene(*(directory / name for name in names))
    scene.target.parent.mkdir()
    write_model(scene.source, megabytes)
    older = directory / "older.onnx"
    write_model(older, megabytes=1)
    onnxarchive.convert(older, scene.old)
    durations = []
    for _ in range(UNDISTURBED_RUNS):
        begun = time.monotonic()
        if scene.start().wait() != DONE:
            raise RuntimeError("an undisturbed conversion failed")
        durations.append(time.monotonic() - begun)
    os.replace(scene.target, scene.expected)
    findings = onnxarchive.check(scene.expected, full=True)
    if findings:
        raise RuntimeError(f"an undisturbed conversion breaks rules: {findings}")
    return scene, sorted(durations)[UNDISTURBED_RUNS // 2]


def moments(runs: int, duration: float) -> Iterator[float]:
    """Yields the time of each kill, in seconds after the start of the run."""
    for run in range(runs):
        yield duration * (1 + BEYOND) * (run + 0.5) / runs


def convert_and_kill(scene: Scene, moment: float) -> int:
    """Starts a conversion and kills it; returns its exit status."""
    begun = time.monotonic()
    process = scene.start()
    try:
        time.sleep(max(0, begun + moment - time.monotonic()))
    finally:
        process.kill()
        status = process.wait()
    return status


def what_is_left(scene: Scene) -> str:
    """The target's state: `ABSENT`, `OLD`, `COMPLETE`, or a description of its fault."""
    if not os.path.lexists(scene.target):
        return ABSENT
    if filecmp.cmp(scene.target, scene.old, shallow=False):
        return OLD
    findings = onnxarchive.check(scene.target, full=True)
    if findings:
        return f"a file of {scene.target.stat().st_size} bytes that breaks rules: {findings[0]}"
    if not filecmp.cmp(scene.target, scene.expected, shallow=False):
        return "an archive with other bytes than an undisturbed conversion writes"
    return COMPLETE


def violation(before: str, status: int, left: str) -> str | None:
    """Describes the fault of a run, by the target's states and the exit status, or None."""
    if status not in (DONE, KILLED):
        return f"ended with status {status}; the target is {left}"
    if status == DONE and left != COMPLETE:
        return f"ended with status 0, but the target is {left}"
    if left not in (before, COMPLETE):
        return f"was killed; the target was {before} before, and afterwards {left}"
    return None


def kill_many(scene: Scene, runs: int, duration: float) -> tuple[Counter[str], list[str]]:
    """Runs and kills conversions; counts the outcomes, and describes the faults."""
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    for run, moment in enumerate(moments(runs, duration)):
        before = OLD if run % 2 else ABSENT
        if before == OLD:
            shutil.copyfile(scene.old, scene.target)
        status = convert_and_kill(scene, moment)
        left = what_is_left(scene)
        fault = violation(before, status, left)
        # A killed process cannot remove its temporary file.
        others = [path.name for path in scene.target.parent.iterdir() if path != scene.target]
        are_expected = all(name.endswith(".tmp") for name in others) and len(others) <= 1
        if not are_expected or (status == DONE and others):
            fault = fault or f"left {sorted(others)} beside the target"
        if fault is not None:
            wrong.append(f"run {run}, killed after {moment:.3f} s: {fault}")
        outcomes[left] += 1
        outcomes["killed"] += status == KILLED
        outcomes["temporary"] += bool(others)
        for path in scene.target.parent.iterdir():
            path.unlink()
    return outcomes, wrong


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=200, help="conversions (default %(default)s)")
    parser.add_argument(
        "--megabytes", type=int, default=200, help="size of the model (default %(default)s)"
    )
    parser.add_argument("--directory", help="where to make the temporary directory")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="onnxarchive-kill-", dir=arguments.directory) as made:
        scene, duration = set_scene(Path(made), arguments.megabytes)
        outcomes, wrong = kill_many(scene, arguments.runs, duration)
    print(
        f"{arguments.runs} conversions of {arguments.megabytes} MB, {duration:.2f} s each if left "
        f"alone: {outcomes['killed']} killed, {outcomes['temporary']} of them with a temporary "
        f"file; target absent {outcomes[ABSENT]}, old {outcomes[OLD]}, "
        f"complete {outcomes[COMPLETE]}; {len(wrong)} violations"
    )
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
