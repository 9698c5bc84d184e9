"""Kills edits of an archive at random moments and checks the file afterwards.

In each run two writer processes edit an archive of two models in several ways: a new model in
place, with and without new tensors; several changes in one edit; an asset that comes or goes; a
copy; a compaction; new data of a tensor; a save of the whole archive; a recovery. Meanwhile a
reader process reads the archive. Every process reports the beginning and the end of each operation.
One writer or both are killed (SIGKILL) at a random moment: in an edit, while waiting for the lock,
or between edits. While the remaining processes go on, this process performs one of `RECOVERIES`,
such as `recover`, an edit or a save. Then the remaining processes are killed, too, and this process
performs `recover`.

Afterwards the directory must contain only the archive, and the archive must break no rule. There
must be an order of all edits and reads in which each edit and read takes effect between its
reported beginning and end. So no finished edit is lost, an interrupted edit is complete or undone,
and the reads agree. This order must also lead to the final content of the archive.

Prints a few lines of figures. Exit status: 0, or 1 if a run broke a condition. Needs `fork`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import onnxarchive
from onnxarchive.errors import ArchiveError, UnfinishedEditError
from onnxarchive.files import undo
from onnxarchive.files.local_file import MappedFile
from onnxarchive.zipformat.records import EndRecord
from tools.crash.history import (
    DisagreementError,
    Event,
    Operation,
    possible_states,
    unfounded,
)
from tools.crash.states import State, WrongError, read_state, require

NAME: Final = "model.onnxa"
WRITERS: Final = ("first writer", "second writer")
READER: Final = "reader"
PARENT: Final = "parent"
# Every edit has its own number; number % 3 is the index of the process in this tuple.
_TURNS: Final = (*WRITERS, PARENT)
_TURNS_OF_A_RUN: Final = 1_000_000

# Relative frequency of each edit.
EDITS: Final = {
    "in place": 30,
    "several": 20,
    "asset": 10,
    "compact": 10,
    "copy": 10,
    "impatient": 5,
    "tensor": 10,
    "save": 5,
    "recover": 5,
}
# Operations of the parent after a kill of writers; each run performs one of them.
RECOVERIES: Final = ("recover", "empty edit", "read", "compact", "copy", "save", "nothing")

BETWEEN: Final = "between edits"
LOG: Final = "while an undo log was written"
NEW_END: Final = "while a new end was written"  # models, directory and end records
# Before the log is written, after the new end is written, in a new file, or waiting for the lock.
ELSEWHERE: Final = "elsewhere in an edit"
PHASES: Final = (BETWEEN, LOG, NEW_END, ELSEWHERE)

# Time from the beginning of an edit to the latest possible kill, as a multiple of the usual
# duration.
BEYOND: Final = 1.2
PATIENCE: Final = 60.0  # seconds to wait for an event
USUAL: Final = 0.1  # assumed seconds of an edit, if no edit of the same kind was timed
CLOSE: Final = 0.5  # the share of kills that come soon after the start of an undo log


class Log:
    """A pipe for the events of all processes. Events survive the kill of their process.

    Each line is short, so the system writes it to the pipe in one piece, and lines never mix.
    """

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()
        self._begun = b""

    def write(
        self, process: str, what: str, number: int = 0, kind: str = "", detail: Any = None
    ) -> None:
        """Writes an event."""
        line = json.dumps([process, what, number, kind, detail, time.monotonic()]).encode() + b"\n"
        os.write(self._write_end, line)

    def read(self, seconds: float = 0) -> Iterator[Event]:
        """Yields events; waits up to `seconds` for the first."""
        while select.select([self._read_end], [], [], max(seconds, 0))[0]:
            *lines, self._begun = (self._begun + os.read(self._read_end, 1 << 16)).split(b"\n")
            yield from (Event(*json.loads(line)) for line in lines)
            seconds = 0

    def close(self) -> None:
        """Closes both ends."""
        os.close(self._read_end)
        os.close(self._write_end)


# The processes


def attempt(operation: Operation, say: Callable[..., None], path: Path) -> State | None:
    """Performs an operation, reports its beginning and end; returns the state read, or None."""
    about = (operation.number, operation.kind)
    say("begin", *about)
    try:
        found = operation.perform(path)
    except (ValueError, OSError, ArchiveError, WrongError) as error:
        say("refused", *about, [type(error).__name__, str(error)[:1000]])
        return None
    say("done", *about, found)
    return found


def write_on(
    name: str, first_turn: int, path: Path, drawn: random.Random, say: Callable[..., None]
) -> Iterator[None]:
    """Edits the archive in an endless loop."""
    for turn in itertools.count(first_turn):
        kind = drawn.choices(list(EDITS), weights=list(EDITS.values()))[0]
        number = turn * len(_TURNS) + _TURNS.index(name)
        attempt(Operation(name, number, kind), say, path)
        yield
        time.sleep(drawn.choice((0, 0, 0.003)))


def read_on(path: Path, say: Callable[..., None]) -> Iterator[None]:
    """In an endless loop, compares two reads of an open archive, then opens and reads it again.

    Reports only the third read of each round as an operation.
    """
    for number in itertools.count(1):
        with contextlib.suppress(UnfinishedEditError), onnxarchive.open(path) as archive:
            before = read_state(archive)
            yield
            require(read_state(archive) == before, f"the open archive changed, expected {before}")
        attempt(Operation(READER, number, "read"), say, path)
        yield
        time.sleep(0.003)


def fork(name: str, log: Log, work: Callable[[Callable[..., None]], Iterator[None]]) -> int:
    """Forks a process that works as long as its parent lives; returns the process id."""
    parent = os.getpid()
    process = os.fork()
    if process:
        return process
    say = functools.partial(log.write, name)
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
        for _ in work(say):
            if os.getppid() != parent:
                break
    except BaseException:
        say("wrong", detail=traceback.format_exc()[-1000:])
    finally:
        os._exit(1)


# The runs


class Scene:
    """An archive, the processes at work on it, its known state, and figures of all runs.

    Attributes:
        wrong: Descriptions of faults.
    """

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.wrong: list[str] = []
        self._runs = 0
        self._killed = 0  # writers, before the end of a run
        self._phases: Counter[str] = Counter()  # kills, by phase of the edit
        self._ended: Counter[str] = Counter()  # operations: by kind if done, by error if refused
        self._random = random.Random(seed)
        self._log = Log()
        self._processes: dict[str, int] = {}
        self._state = State(0, 0, True)
        self._state.write(path)
        self._events: list[Event] = []  # of this run
        self._looked_at = 0  # number of events that `_wait_for` has examined
        self._durations: dict[str, float] = {}  # of the latest operation of each kind, in seconds

    def __str__(self) -> str:
        def listed(names: Iterable[str], counter: Counter[str]) -> str:
            return ", ".join(f"{name} {counter[name]}" for name in names)

        refused = sorted(name for name in self._ended if name.endswith("Error"))
        return (
            f"{self._runs} runs, {self._killed} writers killed: {listed(PHASES, self._phases)}\n"
            f"edits done: {listed(EDITS, self._ended)}; reads {self._ended['read']}; "
            f"refused: {listed(refused, self._ended)}\n"
            f"{len(self.wrong)} violations"
        )

    def run(self) -> None:
        """Kills one writer or both, then all processes, and checks the archive."""
        self._runs += 1
        self._events.clear()
        self._looked_at = 0
        self._start()
        victims = self._random.choice([WRITERS[:1], WRITERS[1:], WRITERS])
        first = self._random.choice(victims)
        for _ in range(self._random.randrange(1, 4)):
            begin = self._wait_for("begin", first)
        usual = self._durations.get(begin.kind, USUAL)
        moment = begin.moment + self._random.random() * BEYOND * usual
        if self._random.random() < CLOSE:
            self._wait_for_log()
            moment = time.monotonic() + self._random.random() ** 2 * usual / 4
        time.sleep(max(0, moment - time.monotonic()))
        self._kill_writers(victims)
        self._perform(self._random.choice(RECOVERIES), 0)
        if len(victims) == 1 and self._random.random() < 0.5:
            (living,) = set(WRITERS) - set(victims)
            self._wait_for("done", living)
        self._say(PARENT, "killing")
        for name in list(self._processes):
            self._kill(name)
            self._say(name, "killed")
        self._perform("recover", 1)
        self._look()

    # Events

    def _take(self, seconds: float = 0) -> None:
        """Reads new events; waits up to `seconds` for the first."""
        self._events += self._log.read(seconds)

    def _say(
        self, process: str, what: str, number: int = 0, kind: str = "", detail: Any = None
    ) -> None:
        """Records an event of this process, or the kill of another process."""
        self._take()
        self._events.append(Event(process, what, number, kind, detail, time.monotonic()))

    def _wait_for(self, what: str, process: str) -> Event:
        """Waits until `process` records an event with this `what`."""
        deadline = time.monotonic() + PATIENCE
        while True:
            while self._looked_at < len(self._events):
                event = self._events[self._looked_at]
                self._looked_at += 1
                if (event.what, event.process) == (what, process):
                    return event
            if time.monotonic() > deadline:
                last = "; ".join(map(str, self._events[-10:]))
                raise TimeoutError(
                    f"expected '{what}' of the {process} within {PATIENCE:.0f} s; "
                    f"last events: {last}"
                )
            self._take(1)

    # Processes

    def _start(self) -> None:
        self._processes[READER] = fork(READER, self._log, functools.partial(read_on, self.path))
        turn = self._runs * _TURNS_OF_A_RUN
        for name in WRITERS:
            drawn = random.Random(self._random.random())
            work = functools.partial(write_on, name, turn, self.path, drawn)
            self._processes[name] = fork(name, self._log, work)

    def close(self) -> None:
        """Ends all processes."""
        for name in list(self._processes):
            self._kill(name)
        self._log.close()

    def _kill(self, name: str) -> None:
        process = self._processes.pop(name)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)

    def _wait_for_log(self) -> None:
        """Waits a limited time for an edit to write an undo log."""
        deadline = time.monotonic() + 10 * USUAL
        while time.monotonic() < deadline and ends_whole(self.path):
            time.sleep(0.0002)

    def _kill_writers(self, victims: Collection[str]) -> None:
        """Kills writers and counts the phase of the edit; meanwhile the other writer is stopped."""
        living = [self._processes[name] for name in WRITERS if name not in victims]
        self._say(PARENT, "killing")
        for process in living:
            os.kill(process, signal.SIGSTOP)
            os.waitpid(process, os.WUNTRACED)
        for name in victims:
            self._kill(name)
        self._take()
        phase = self._phase(victims)
        self._killed += len(victims)
        self._phases[phase] += 1
        what = "undone" if phase in (LOG, NEW_END) and len(victims) == 1 else "killed"
        for name in victims:
            self._say(name, what)
        for process in living:
            os.kill(process, signal.SIGCONT)

    def _phase(self, victims: Collection[str]) -> str:
        """The phase of the edit in which writers were killed; the other writer must be stopped."""
        last = {event.process: event.what for event in self._events if event.kind}
        if all(last.get(name) != "begin" for name in victims):
            return BETWEEN
        with MappedFile(self.path) as file, file.locked(is_exclusive=False, timeout=0):
            if file.lock_failure is not None or ends_whole(self.path):
                return ELSEWHERE  # or the other writer holds the lock
            return LOG if undo.unfinished_edit(file) is None else NEW_END

    # Checks

    def _perform(self, kind: str, turn: int) -> None:
        if kind != "nothing":
            turn += self._runs * _TURNS_OF_A_RUN
            number = turn * len(_TURNS) + _TURNS.index(PARENT)
            attempt(
                Operation(PARENT, number, kind), functools.partial(self._say, PARENT), self.path
            )

    def _look(self) -> None:
        """Counts the operations and checks the archive."""
        begun: dict[tuple[str, int], float] = {}
        for event in self._events:
            operation = (event.process, event.number)
            if event.what == "begin":
                begun[operation] = event.moment
            elif event.what == "done":
                self._ended[event.kind] += 1
                self._durations[event.kind] = event.moment - begun[operation]
            elif event.what == "refused":
                self._ended[event.detail[0]] += 1
        wrong = unfounded(self._events)
        names = os.listdir(self.path.parent)
        if names != [NAME]:
            wrong.append(f"expected {NAME} alone in its directory, found {names}")
        wrong += [f"broken: {found}" for found in onnxarchive.check(self.path, full=True)]
        found = None
        try:
            with onnxarchive.open(self.path) as archive:
                found = read_state(archive)
            possible = possible_states(self._state, self._events)
            if found not in possible:
                wrong.append(f"expected one of {sorted(possible)}, found {found}")
        except (ArchiveError, WrongError, DisagreementError) as error:
            wrong.append(f"{type(error).__name__}: {error}")
        if wrong:
            self.wrong += wrong
            said = "\n  ".join([f"from {self._state}", *map(str, self._events)])
            print(f"run {self._runs}: {wrong}\n  {said}", file=sys.stderr)
        if found is None:
            found = State(0, 0, True)
            found.write(self.path)
        self._state = found


def ends_whole(path: Path) -> bool:
    """True if a file ends with an end record: no edit of the file is unfinished."""
    with open(path, "rb") as file:
        file.seek(-EndRecord.SIZE, os.SEEK_END)
        return EndRecord.unpack(file.read()) is not None


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=500, help="runs (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of all random choices")
    parser.add_argument("--directory", help="where to make the temporary directory")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="onnxarchive-kill-", dir=arguments.directory) as made:
        scene = Scene(Path(made) / NAME, arguments.seed)
        try:
            for _ in range(arguments.runs):
                scene.run()
        finally:
            scene.close()
    print(f"seed {arguments.seed}: {scene}")
    return 1 if scene.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
