"""Kills exports over a model and its external data, and extractions, and recovers what they leave.

Each run starts `onnxarchive export --external-data --force` or `onnxarchive extract` as a process
and kills it (SIGKILL). The moments of the kills are spread evenly from the first hidden file to
shortly after the usual end. After a kill there must be both old files, both new ones, or a model
whose data is missing; or no directory, or a complete one. Then `onnxarchive.recover` gets the name
of the model, of the data or of the directory. Afterwards there must be both old files or both new
ones, and nothing else; or no directory, or a complete one.

Prints a line of figures for each kind. Exit status: 0, or 1 if a run broke a condition.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final

import onnxarchive
from onnxarchive.errors import ArchiveError
from tools.crash.conversions import DONE, KILLED, moments, write_model

MODEL, DATA, DIRECTORY = "m.onnx", "m.data", "out"
PAUSE: Final = 0.0005  # seconds between two looks
MISSING: Final = "model without its data"
RECOVERED: Final = "changed by recover"
Content = dict[str, str]  # SHA-256 by path


class Scene:
    """A folder in which a command is killed.

    Attributes:
        command: The arguments of the command.
        folder: The folder, in which only `names` may be afterwards.
        names: What the command writes.
        old: The content before the command.
        new: The content after it.
        duration: Seconds that the command takes from its first hidden file.
    """

    def __init__(self, folder: Path, command: Sequence[str], names: Sequence[str]) -> None:
        self.command, self.folder, self.names = command, folder, names
        self._files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.old = self.content()
        process = self.start()
        begun = time.monotonic()
        if process.wait() != DONE:
            raise RuntimeError("an undisturbed command failed")
        self.duration = time.monotonic() - begun
        self.new = self.content()

    def start(self) -> subprocess.Popen[bytes]:
        """Starts the command, and waits until it has made a hidden file."""
        process = subprocess.Popen(
            [sys.executable, "-m", "onnxarchive", *self.command],
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while process.poll() is None:
            if any(path.name.startswith(".") for path in self.folder.iterdir()):
                break
            time.sleep(PAUSE)
        return process

    def content(self) -> Content:
        """The SHA-256 of each file, except those that are hidden."""
        paths = [path for path in self.folder.rglob("*") if path.is_file()]
        relative = {path.relative_to(self.folder).as_posix(): path for path in paths}
        return {
            name: sha256(path.read_bytes()).hexdigest()
            for name, path in relative.items()
            if not name.startswith(".")
        }

    def set_up(self) -> None:
        """Puts the folder into the state before the command."""
        for path in sorted(self.folder.rglob("*"), reverse=True):
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink()
        for name, content in self._files.items():
            (self.folder / name).write_bytes(content)

    def kill(self, moment: float) -> int:
        """Starts the command and kills it after `moment` seconds; returns its exit status."""
        process = self.start()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(moment)
        finally:
            process.kill()
            status = process.wait()
        return status

    def fault(self, status: int, name: str, outcomes: Counter[str]) -> str | None:
        """What is wrong after a run and its recovery by `name`; None if nothing is."""
        left = self.content()
        models = [self.old.get(MODEL), self.new.get(MODEL)]
        lacks_data = list(left) == [MODEL] and left[MODEL] in models
        if status not in (DONE, KILLED) or (status == DONE and left != self.new):
            return f"ended with status {status}, and left {sorted(left)}"
        if not (lacks_data or left in (self.old, self.new)):
            return f"left {sorted(left)}, of which not all is old or new"
        outcomes["killed"] += status == KILLED
        outcomes[MISSING] += lacks_data
        before = sorted(path.name for path in self.folder.iterdir())
        with contextlib.suppress(ArchiveError, FileNotFoundError):  # nothing to recover
            onnxarchive.recover(self.folder / name)
        outcomes[RECOVERED] += before != sorted(path.name for path in self.folder.iterdir())
        found = self.content()
        others = sorted({path.name for path in self.folder.iterdir()} - {*self.names})
        if found not in (self.old, self.new) or others:
            return f"recovery left {sorted(found)} and {others}"
        outcomes["new" if found == self.new else "old"] += 1
        return None

    def run(self, runs: int) -> tuple[Counter[str], list[str]]:
        """Kills the command many times; counts the outcomes, and describes the faults."""
        outcomes: Counter[str] = Counter()
        wrong = []
        for number, moment in enumerate(moments(runs, self.duration)):
            self.set_up()
            status = self.kill(moment)
            problem = self.fault(status, self.names[number % len(self.names)], outcomes)
            if problem is not None:
                wrong.append(f"run {number} of {self.command[0]}, after {moment:.3f} s: {problem}")
        return outcomes, wrong


def scenes(directory: Path, megabytes: int) -> dict[str, Scene]:
    """Makes the archives and the folders."""
    for name, size in (("old", 1), ("new", megabytes)):
        write_model(directory / f"{name}.onnx", size)
        onnxarchive.convert(directory / f"{name}.onnx", directory / f"{name}.onnxa")
    pair, new = directory / "pair", str(directory / "new.onnxa")
    pair.mkdir()
    onnxarchive.export(directory / "old.onnxa", pair / MODEL, external_data=DATA)
    command = ["export", "--force", new, MODEL, "--external-data", DATA]
    (directory / "extracted").mkdir()
    extracted = Scene(directory / "extracted", ["extract", new, DIRECTORY], [DIRECTORY])
    return {"exports": Scene(pair, command, [MODEL, DATA]), "extractions": extracted}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=200, help="of each kind (default %(default)s)")
    parser.add_argument(
        "--megabytes", type=int, default=20, help="size of the model (default %(default)s)"
    )
    parser.add_argument("--directory", help="where to make the temporary directory")
    arguments = parser.parse_args(argv)
    faults = []
    with tempfile.TemporaryDirectory(prefix="onnxarchive-kill-", dir=arguments.directory) as made:
        for kind, scene in scenes(Path(made), arguments.megabytes).items():
            outcomes, wrong = scene.run(arguments.runs)
            faults += wrong
            print(
                f"{arguments.runs} {kind}, {scene.duration:.2f} s each if left alone: "
                f"{outcomes['killed']} killed; {outcomes[MISSING]} left a {MISSING}; "
                f"{outcomes[RECOVERED]} {RECOVERED}; in the end old {outcomes['old']}, "
                f"new {outcomes['new']}; {len(wrong)} violations"
            )
    print(*faults, sep="\n", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
