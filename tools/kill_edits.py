"""Kills edits of an archive at random moments and looks at what they leave.

Two writers, each a process of its own, change one archive without end, in every way there is: a
new model in the file's place, on a copy, with entries that move, through `open` with mode "r+"; a
new tensor in its place or in a new file; a save over everything. A third process reads it all the
time. Each of them says what it is about to do, and afterwards that it is done. One writer or both
are killed (SIGKILL) at a random moment of an edit, while it waits for the lock or does nothing;
then the archive is recovered, by `recover`, by whoever opens it for writing, by an edit or a save.

Afterwards no file may be left beside the archive. The archive must break no rule, and be byte for
byte what `save` makes of the model and the tensors that were written last: of everything that was
said to be done nothing is lost, what was cut off is done or not, and what the reader has seen
agrees with it. That is so if the edits and what was read can be put in one order, each between its
announcement and its end.

Prints a few lines of figures. Exit status: 0, or 1 where a run showed anything else. It needs
`fork`.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import io
import json
import mmap
import os
import random
import select
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import onnx
from onnx import helper, numpy_helper

import onnxarchive
from onnxarchive import journal
from onnxarchive.archive import Archive
from onnxarchive.edit import replace_model, replace_tensor
from onnxarchive.errors import ArchiveError
from onnxarchive.files import MappedFile
from onnxarchive.model.keys import MODEL_PROTO
from onnxarchive.recovery import recover

NAME: Final = "model.onnxa"
WEIGHTS: Final = 6
WEIGHT_NBYTES: Final = 256 << 10
CHANGING: Final = "changing"  # the tensor that is replaced
CHANGING_NBYTES: Final = 128 << 10
ADDED: Final = "added"  # a tensor that some models have, behind all others
ASSET: Final = "labels.txt"
MIN_PADDING: Final = 64 << 10  # bytes of the model's doc_string
MAX_PADDING: Final = 4 << 20

WRITERS: Final = ("first writer", "second writer")
READER: Final = "reader"
PARENT: Final = "parent"
# Whose numbers are which: every edit has a number of its own.
_TURNS: Final = (*WRITERS, PARENT)
_ADDED_FOR: Final = 60  # numbers for which models have a tensor more, and as many without it

# How often each edit is made.
EDITS: Final = {
    "in place": 30,
    "compact": 20,
    "copy": 10,
    "open": 10,
    "impatient": 5,
    "tensor": 5,
    "tensor in place": 10,
    "save": 5,
}
IMPATIENCE: Final = 0.01  # seconds to wait for the lock
# What is done after a kill, while the writers that are left go on.
RECOVERIES: Final = ("recover", "open for writing", "read", "compact", "copy", "save", "nothing")

BETWEEN: Final = "between edits"
WAITING: Final = "while the other one had the lock"
PREPARING: Final = "before anything was written"
JOURNAL: Final = "in the journal"
JOURNALED: Final = "behind the journal"
ARCHIVE: Final = "in the archive"
NEW_FILE: Final = "in a new file"
AFTER: Final = "behind the edit"
PHASES: Final = (BETWEEN, WAITING, PREPARING, JOURNAL, JOURNALED, ARCHIVE, NEW_FILE, AFTER)

# The latest kill of an edit comes this part of a usual duration behind its start.
BEYOND: Final = 1.2
PATIENCE: Final = 60.0  # seconds for which a process may say nothing
USUAL: Final = 0.1  # seconds for an edit of which none is known
CLOSE: Final = 0.3  # how often a kill comes soon after the archive itself begins to change
AGAIN: Final = 0.2  # how often the next kill comes before anyone has looked
WARM_UP: Final = 20  # edits before the first kill, whose durations are taken


# What is in the archive


class Traits(NamedTuple):
    """What the model of a number is like.

    Attributes:
        padding: Bytes of its doc_string.
        has_added: Whether it has a tensor behind all others.
        has_asset: Whether there is an asset, where the number is that of a save.
        is_referring: Whether its tensors name keys where it is given to `replace_model`.
    """

    padding: int
    has_added: bool
    has_asset: bool
    is_referring: bool


def traits(number: int) -> Traits:
    """What the model of this number is like."""
    drawn = random.Random(number)
    padding = drawn.randrange(MIN_PADDING, MAX_PADDING)
    has_added = number // _ADDED_FOR % 2 == 1
    return Traits(padding, has_added, drawn.random() < 0.5, drawn.random() < 0.5)


@functools.cache
def weight(name: str) -> bytes:
    """The bytes of a tensor that never changes."""
    return random.Random(name).randbytes(WEIGHT_NBYTES)


def weights(number: int) -> list[str]:
    """The names of those tensors of a model that never change."""
    names = [f"weight_{index}" for index in range(WEIGHTS)]
    return [*names, ADDED] if traits(number).has_added else names


@functools.lru_cache(maxsize=32)
def changing(number: int) -> bytes:
    """The bytes of the tensor that is replaced; they begin with the number."""
    head = number.to_bytes(8, "little")
    return head + random.Random(number).randbytes(CHANGING_NBYTES - len(head))


@functools.cache
def asset() -> bytes:
    """The bytes of the asset."""
    return random.Random(ASSET).randbytes(10_000)


def padding(number: int) -> str:
    """The doc_string of a model, which shows its number all over."""
    size = traits(number).padding
    line = f"model {number:08} "
    return (line * (size // len(line) + 1))[:size]


def model_of(number: int, tensor: int | None) -> onnx.ModelProto:
    """The model of a number.

    Args:
        number: The number.
        tensor: The number of the tensor that is replaced; None for whichever the archive has.
    """
    is_referring = tensor is None and traits(number).is_referring
    initializers = []
    for name in [*weights(number)[:WEIGHTS], CHANGING, *weights(number)[WEIGHTS:]]:
        nbytes = CHANGING_NBYTES if name == CHANGING else WEIGHT_NBYTES
        # One that is added is not yet in the archive.
        if (tensor is None and name == CHANGING) or (is_referring and name != ADDED):
            made = onnx.TensorProto(
                name=name, data_type=onnx.TensorProto.UINT8, dims=[nbytes], data_location="EXTERNAL"
            )
            made.external_data.add(key="location", value=name)
        else:
            data = weight(name) if tensor is None or name != CHANGING else changing(tensor)
            made = numpy_helper.from_array(np.frombuffer(data, np.uint8), name)
        initializers.append(made)
    graph = helper.make_graph([], "graph", [], [], initializers)
    opsets = [helper.make_opsetid("", 17)]
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    model.doc_string = padding(number)
    helper.set_model_props(model, {"number": str(number)})
    return model


class State(NamedTuple):
    """What an archive holds.

    Attributes:
        model: The number of its model.
        tensor: The number of the tensor that is replaced; None where a reader could not tell.
        has_asset: Whether it has an asset.
    """

    model: int
    tensor: int | None
    has_asset: bool

    def write(self, target: Any) -> None:
        """Saves this state."""
        assets = {ASSET: asset()} if self.has_asset else None
        onnxarchive.save(model_of(self.model, self.tensor), target, assets=assets)

    def content(self) -> bytes:
        """An archive of this state, byte for byte."""
        target = io.BytesIO()
        self.write(target)
        return target.getvalue()

    def is_seen_as(self, seen: State) -> bool:
        """Whether this is what a reader has seen."""
        return seen == (self if seen.tensor is not None else self._replace(tensor=None))


class WrongError(Exception):
    """What was read is nothing that anybody has written."""


def require(is_right: bool, problem: str) -> None:
    """Raises a `WrongError` that says what the problem is, unless all is right."""
    if not is_right:
        raise WrongError(problem)


def read_state(archive: Archive, path: Path) -> State:
    """What an open archive holds, as any reader sees it.

    The tensor that is replaced may be replaced in the file's place, at once. So it is read as the
    library itself reads models: only while no one changes the file, and only if that is still the
    one at the path. Everything else is looked at as it is.

    Raises:
        WrongError: It holds anything else than what was written.
    """
    number = int(archive.metadata["number"])
    require(archive.model.doc_string == padding(number), f"model {number} has another doc_string")
    names = [initializer.name for initializer in archive.model.graph.initializer]
    expected = [*weights(number)[:WEIGHTS], CHANGING, *weights(number)[WEIGHTS:]]
    require(names == expected, f"model {number} has the initializers {names}")
    require_weights(archive, number)
    has_asset = ASSET in archive.assets
    if has_asset:
        require(bytes(archive.assets[ASSET]) == asset(), "the asset has other bytes")
    entry = archive.entries[CHANGING]
    try:
        with archive.file.unchanged():
            if not os.path.samestat(os.fstat(archive.file.fileno()), os.stat(path)):
                return State(number, None, has_asset)
            journal.require_complete(archive.file)
            archive.read(MODEL_PROTO)
            data = archive.file.read(entry.data_offset, entry.nbytes)
    except ArchiveError:  # changed, or cut off, since it was opened
        return State(number, None, has_asset)
    tensor = int.from_bytes(data[:8], "little")
    require(data == changing(tensor), f"the tensor {CHANGING} has other bytes than any, {tensor}?")
    return State(number, tensor, has_asset)


def require_weights(archive: Archive, number: int) -> None:
    """Compares those tensors that never change.

    Raises:
        WrongError: They have.
    """
    for name in weights(number):
        require(bytes(archive.read(name)) == weight(name), f"the tensor {name} has other bytes")


# What is done to it


@dataclass(frozen=True)
class Operation:
    """An edit, or a look at the archive.

    Attributes:
        process: Whose it is.
        number: Tells it from all others; that of the model or the tensor that it writes.
        kind: One of `EDITS`, "read" or "recover".
        seen: What a look has shown, once that is known.
    """

    process: str
    number: int
    kind: str
    seen: State | None = None

    def apply(self, state: State) -> State | None:
        """What this makes of an archive; None where it cannot have met it so."""
        if self.kind == "read":
            return state if self.seen is None or state.is_seen_as(self.seen) else None
        if self.kind == "recover":
            return state
        if self.kind.startswith("tensor"):
            return state._replace(tensor=self.number)
        if self.kind == "save":
            return saved(self.number)
        return state._replace(model=self.number)

    def perform(self, path: Path) -> None:
        """Makes the edit."""
        if self.kind == "save":
            saved(self.number).write(path)
        elif self.kind.startswith("tensor"):
            array = np.frombuffer(changing(self.number), np.uint8)
            replace_tensor(path, CHANGING, array, in_place=self.kind == "tensor in place")
        elif self.kind == "open":
            with onnxarchive.open(path, mode="r+") as archive:
                archive.replace_model(model_of(self.number, None), compact=True)
        else:
            replace_model(
                path,
                model_of(self.number, None),
                compact=self.kind != "in place",
                copy=self.kind == "copy",
                timeout=IMPATIENCE if self.kind == "impatient" else None,
            )


def saved(number: int) -> State:
    """What a save of this number writes."""
    return State(number, number, traits(number).has_asset)


# What the processes say


@dataclass(frozen=True)
class Event:
    """A line of the log.

    Attributes:
        process: Whose it is.
        what: "begin", "done" or "refused", of an operation; "paused", "wrong", "killed"; "killing"
            before that.
        number: The operation's number.
        kind: The operation's kind; the cause, where it was refused.
        detail: A message, or what was read.
        moment: When, in seconds.
    """

    process: str
    what: str
    number: int = 0
    kind: str = ""
    detail: Any = None
    moment: float = 0.0

    def __str__(self) -> str:
        detail = "" if self.detail is None else f" ({self.detail})"
        return f"{self.process}: {self.what} {self.kind} {self.number or ''}{detail}"


class Log:
    """A pipe into which all processes write: what is in it stays when they are killed.

    Lines are short enough to be written in one piece, so that all of them are in one order.
    """

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()
        self._begun = b""

    def write(
        self, process: str, what: str, number: int = 0, kind: str = "", detail: Any = None
    ) -> None:
        """Writes an event."""
        if isinstance(detail, str):
            detail = detail[-select.PIPE_BUF // 2 :]
        line = json.dumps([process, what, number, kind, detail, time.monotonic()]).encode() + b"\n"
        os.write(self._write_end, line[: select.PIPE_BUF])

    def read(self, seconds: float) -> list[Event]:
        """The events that have come, if any come within some seconds."""
        if not select.select([self._read_end], [], [], max(seconds, 0))[0]:
            return []
        *lines, self._begun = (self._begun + os.read(self._read_end, 1 << 16)).split(b"\n")
        return [Event(*json.loads(line)) for line in lines]

    def close(self) -> None:
        """Closes both ends."""
        os.close(self._read_end)
        os.close(self._write_end)


def is_seen(event: Event) -> bool:
    """Whether the event tells what was read."""
    return (event.what, event.kind) == ("done", "read")


def read_operation(begin: Event, end: Event | None) -> Operation:
    """The operation that an event begins.

    Args:
        begin: The event.
        end: That which ends it, if it was ended.
    """
    seen = State(*end.detail) if end is not None and is_seen(end) else None
    return Operation(begin.process, begin.number, begin.kind, seen)


# Whether it agrees

# An archive as it may be by now, and the operations under way that have not come into effect in it.
_Possible = tuple[State, frozenset[Operation]]


class DisagreementError(Exception):
    """What was read, or done, cannot have been so."""


def possible_states(before: State, events: Sequence[Event]) -> set[State]:
    """What an archive may hold after some events, which end all operations that they begin.

    An operation comes into effect at one moment between its beginning and its end; one that is
    refused never does, and one that is killed does before that or never.

    Args:
        before: What it held before.
        events: What the processes have said since, in order.

    Raises:
        DisagreementError: No order of the operations shows what was read.
    """
    ends = {
        (event.process, event.number): event
        for event in events
        if event.what in ("done", "refused")
    }
    under_way: dict[str, Operation] = {}
    possible: set[_Possible] = {(before, frozenset())}
    for event in events:
        name = event.process
        if event.what == "begin":
            operation = read_operation(event, ends.get((name, event.number)))
            under_way[name] = operation
            possible = {(state, rest | {operation}) for state, rest in possible}
        elif event.what in ("done", "refused", "killed", "wrong"):
            ended = under_way.pop(name, None)
            if ended is None:
                continue
            if event.what != "refused":
                possible = set(_come_into_effect(possible))
            if event.what == "done":
                possible = {(state, rest) for state, rest in possible if ended not in rest}
            elif event.what == "refused":
                possible = {(state, rest) for state, rest in possible if ended in rest}
            possible = {(state, rest - {ended}) for state, rest in possible}
            if not possible:
                raise DisagreementError(f"no order of what was done explains '{event}'")
    if under_way:
        raise ValueError(f"these were not ended: {under_way}")
    return {state for state, _ in possible}


def _come_into_effect(possible: Iterable[_Possible]) -> Iterator[_Possible]:
    """What an archive may be when any operations that are under way come into effect, or none."""
    left = list(possible)
    known = set(left)
    while left:
        state, rest = left.pop()
        yield state, rest
        for operation in rest:
            after = operation.apply(state)
            if after is not None:
                reached = (after, rest - {operation})
                if reached not in known:
                    known.add(reached)
                    left.append(reached)


def unfounded(events: Sequence[Event]) -> list[str]:
    """Refusals that have no cause, and whatever else a process has found wrong.

    An archive is cut off, for those who may not write to it, from a kill to the end of whatever
    else was done to it: by an operation that began after the kill.
    """
    wrong = []
    may_be_cut = False
    may_have_met_it: set[tuple[str, int]] = set()  # operations
    under_way: set[tuple[str, int]] = set()
    recovering: set[tuple[str, int]] = set()
    for event in events:
        operation = (event.process, event.number)
        if event.what == "killing":
            may_be_cut = True
            may_have_met_it |= under_way
        elif event.what == "killed":
            recovering.clear()
        elif event.what == "begin":
            under_way.add(operation)
            if may_be_cut:
                may_have_met_it.add(operation)
                if event.kind != "read":
                    recovering.add(operation)
        elif event.what == "done":
            under_way.discard(operation)
            if operation in recovering:
                may_be_cut = False
        elif event.what == "refused":
            under_way.discard(operation)
            if not _is_founded(event, operation in may_have_met_it):
                wrong.append(str(event))
        elif event.what == "wrong":
            wrong.append(str(event))
    return wrong


def _is_founded(event: Event, may_be_cut: bool) -> bool:
    error, message = event.detail
    if error == "UnfinishedEditError":  # others take the change back
        return may_be_cut and event.kind in ("read", "copy", "open")
    if error == "ValueError":
        return event.kind == "in place" and "--compact" in message
    if error == "LockedError":
        return event.kind == "impatient"
    return error == "ArchiveError" and event.kind == "open" and "changed it since" in message


# The processes


class Control:
    """Memory that the processes share, by which the parent makes them pause."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self._parent = os.getpid()
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._pauses = 0

    def pause(self) -> int:
        """Makes everyone pause and say so; gives the number of the pause."""
        self._pauses += 1
        self._memory[:8] = self._pauses.to_bytes(8, "little")
        return self._pauses

    def go_on(self) -> None:
        """Ends the pause."""
        self._memory[:8] = bytes(8)

    def wait(self, name: str) -> None:
        """Waits while there is a pause; ends the process if its parent is gone."""
        known = 0
        while pause := int.from_bytes(self._memory[:8], "little"):
            if pause != known:
                known = pause
                self.log.write(name, "paused", pause)
            self._end_with_parent()
            time.sleep(0.001)
        self._end_with_parent()

    def _end_with_parent(self) -> None:
        if os.getppid() != self._parent:
            os._exit(1)


def attempt(operation: Operation, log: Log, act: Callable[[], Any]) -> Any:
    """Announces an operation, performs it, and tells how that ended."""
    about = (operation.number, operation.kind)
    log.write(operation.process, "begin", *about)
    try:
        result = act()
    except (ValueError, OSError, ArchiveError, WrongError) as error:
        log.write(operation.process, "refused", *about, [type(error).__name__, str(error)[:1000]])
        return None
    log.write(operation.process, "done", *about, result)
    return result


def write_on(
    name: str, first_turn: int, path: Path, control: Control, drawn: random.Random
) -> None:
    """Edits the archive without end."""
    turn = first_turn
    while True:
        control.wait(name)
        kind = drawn.choices(list(EDITS), weights=list(EDITS.values()))[0]
        operation = Operation(name, turn * len(_TURNS) + _TURNS.index(name), kind)
        attempt(operation, control.log, functools.partial(operation.perform, path))
        turn += 1
        time.sleep(drawn.choice((0, 0, 0.003)))


def read_on(path: Path, control: Control) -> None:
    """Reads the archive without end, and looks again at what was opened before."""
    before: tuple[Archive, int] | None = None
    number = 0
    while True:
        control.wait(READER)
        number += 1
        operation = Operation(READER, number, "read")
        opened: list[Archive] = []

        def read(opened: list[Archive] = opened) -> State:
            opened.append(onnxarchive.open(path))
            return read_state(opened[0], path)

        state = attempt(operation, control.log, read)
        if before is not None:
            require_weights(*before)
            before[0].close()
            before = None
        if state is not None:
            before = (opened[0], state.model)
        time.sleep(0.003)


def fork(name: str, control: Control, run: Callable[[], None]) -> int:
    """Lets a process of its own run; gives its id."""
    process = os.fork()
    if process:
        return process
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
        run()
    except BaseException:
        control.log.write(name, "wrong", detail=traceback.format_exc())
    finally:
        os._exit(1)


# The runs


@dataclass
class Figures:
    """What came of all runs.

    Attributes:
        runs: How many there were.
        killed: How many writers were killed.
        phases: In which moment of an edit, how often.
        ended: How many operations were done, by kind, or refused, by error.
        wrong: What is wrong.
    """

    runs: int = 0
    killed: int = 0
    phases: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        def listed(names: Iterable[str], counter: Counter[str]) -> str:
            return ", ".join(f"{name} {counter[name]}" for name in names)

        refused = sorted(name for name in self.ended if name.endswith("Error"))
        return "\n".join(
            (
                f"{self.runs} runs, {self.killed} writers killed: {listed(PHASES, self.phases)}",
                f"{self.phases[ARCHIVE]} edits rolled back, {self.phases[AFTER]} new, unsaid",
                f"edits done: {listed(EDITS, self.ended)}; reads {self.ended['read']}; "
                f"refused: {listed(refused, self.ended)}",
                f"{len(self.wrong)} violations",
            )
        )


class Scene:
    """An archive, those who are at work on it, and what is known of it."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.figures = Figures()
        self._random = random.Random(seed)
        self._log = Log()
        self._control = Control(self._log)
        self._processes: dict[str, int] = {}
        self._state = State(0, 0, True)
        self._state.write(path)
        self._turn = 1
        self._events: list[Event] = []  # since the state was known
        self._looked_at = 0  # how many of these have been waited for
        self._rolled_back: set[int] = set()  # numbers of edits
        self._durations: dict[str, deque[float]] = {
            kind: deque(maxlen=20) for kind in (*EDITS, "recover", "read")
        }

    # Events

    def _take(self, seconds: float = 0) -> None:
        """Takes what has been said, if anything is said within some seconds."""
        while events := self._log.read(seconds):
            self._events += events
            seconds = 0
            for event in events:
                if event.kind and event.process != READER:
                    self._turn = max(self._turn, event.number // len(_TURNS) + 1)
                if event.what == "wrong" and event.process in self._processes:  # it has ended
                    self._kill(event.process)
                    self._start(event.process)

    def _wait_for(self, is_awaited: Callable[[Event], bool]) -> Event:
        """The next event of a kind, from those that no one has waited for yet."""
        deadline = time.monotonic() + PATIENCE
        while True:
            while self._looked_at < len(self._events):
                event = self._events[self._looked_at]
                self._looked_at += 1
                if is_awaited(event):
                    return event
            if time.monotonic() > deadline:
                last = "; ".join(map(str, self._events[-10:]))
                raise TimeoutError(f"for {PATIENCE:.0f} s nothing came behind: {last}")
            self._take(1)

    def _say(self, what: str, process: str = PARENT) -> None:
        self._take()  # so that there is space in the pipe
        self._log.write(process, what)

    # Processes

    def start(self) -> None:
        """Starts whoever is not at work."""
        for name in (*WRITERS, READER):
            if name not in self._processes:
                self._start(name)

    def _start(self, name: str) -> None:
        run = functools.partial(read_on, self.path, self._control)
        if name in WRITERS:
            drawn = random.Random(self._random.random())
            run = functools.partial(write_on, name, self._turn, self.path, self._control, drawn)
        self._processes[name] = fork(name, self._control, run)

    def close(self) -> None:
        """Ends all processes."""
        for name in list(self._processes):
            self._kill(name)
        self._log.close()

    def _kill(self, name: str) -> None:
        process = self._processes.pop(name)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)

    def _stop(self, names: Collection[str]) -> None:
        for name in names:
            os.kill(self._processes[name], signal.SIGSTOP)
        for name in names:
            os.waitpid(self._processes[name], os.WUNTRACED)

    def _go_on(self, names: Collection[str]) -> None:
        for name in names:
            os.kill(self._processes[name], signal.SIGCONT)

    # Runs

    def warm_up(self) -> None:
        """Lets the writers work, to see how long they take."""
        self.start()
        for _ in range(WARM_UP):
            self._wait_for(lambda event: event.what == "done" and event.process in WRITERS)
        self.come_to_rest()

    def run(self) -> None:
        """Kills a writer, or both, once, and mostly looks at what is left."""
        self._control.go_on()
        victims = self._random.choice([WRITERS[:1], WRITERS[1:], WRITERS])
        first = self._random.choice(victims)
        begin = self._wait_for(lambda event: event.what == "begin" and event.process == first)
        usual = self._random.choice(self._durations[begin.kind] or [USUAL])
        moment = begin.moment + self._random.random() * BEYOND * usual
        if self._random.random() < CLOSE:
            moment = self._wait_for_change() + self._random.random() * usual / 8
        time.sleep(max(0, moment - time.monotonic()))
        self._kill_writers(victims)
        self.figures.runs += 1
        if self._random.random() < 0.5:
            self.start()
        self._recover(self._random.choice(RECOVERIES))
        if self._random.random() < AGAIN:
            self.start()
            return
        living = [name for name in WRITERS if name in self._processes]
        if living and self._random.random() < 0.5:
            one = self._random.choice(living)
            self._wait_for(lambda event: event.what == "done" and event.process == one)
        self.come_to_rest()

    def _wait_for_change(self) -> float:
        """Waits, for a while, until an edit in the file's place begins to change it; gives when."""
        deadline = time.monotonic() + 2 * USUAL
        beside = journal.path_of(self.path)
        before = None
        while time.monotonic() < deadline:
            changed = os.stat(self.path).st_mtime_ns
            if not os.path.exists(beside):
                before = None
            elif before is None:
                before = changed
            elif before != changed:
                break
            time.sleep(0.0002)
        return time.monotonic()

    def _kill_writers(self, victims: Collection[str]) -> None:
        """Kills, and counts in what moment that was."""
        others = [name for name in WRITERS if name not in victims]
        self._say("killing")
        self._stop(others)
        processes = [self._processes[name] for name in victims]
        for name in victims:
            self._kill(name)
        self._take()
        numbers = self._under_way(victims)
        phase = self._phase(numbers, processes)
        self.figures.killed += len(victims)
        self.figures.phases[phase] += 1
        if phase == ARCHIVE and len(victims) == 1:
            self._rolled_back.update(numbers)
        for name in victims:
            self._say("killed", name)
        self._go_on(others)

    def _under_way(self, victims: Collection[str]) -> list[int]:
        """The numbers of edits that were cut off."""
        last = {event.process: event for event in self._events if event.kind}
        return [
            last[name].number for name in victims if name in last and last[name].what == "begin"
        ]

    def _phase(self, numbers: Collection[int], processes: Collection[int]) -> str:
        """In what moment of an edit someone was killed.

        Args:
            numbers: The edits.
            processes: Who was killed. The other writer, if any, is stopped.
        """
        if not numbers:
            return BETWEEN
        with open(self.path, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return WAITING
            if os.path.exists(journal.path_of(self.path)):
                return self._phase_in_place()
            if any(list(self.path.parent.glob(f".*.{process}-*.tmp")) for process in processes):
                return NEW_FILE
            try:
                state = self._read()
            except (ArchiveError, WrongError) as error:
                self._blame([f"behind a kill: {type(error).__name__}: {error}"])
                return PREPARING
            return AFTER if {state.model, state.tensor} & set(numbers) else PREPARING

    def _phase_in_place(self) -> str:
        with MappedFile(self.path) as file:
            left = journal.read(self.path)
            if left is None or not left.is_of(file):
                return JOURNAL
            return JOURNALED if left.is_intact(file) else ARCHIVE

    def _recover(self, way: str) -> None:
        if way == "nothing":
            return
        self._take()
        kind = "recover" if way == "open for writing" else way
        operation = Operation(PARENT, self._turn * len(_TURNS) + _TURNS.index(PARENT), kind)
        self._turn += 1
        acts: dict[str, Callable[[], Any]] = {
            "recover": lambda: recover(self.path) and None,
            "open for writing": lambda: onnxarchive.open(self.path, mode="r+").close(),
            "read": self._read,
        }
        perform = functools.partial(operation.perform, self.path)
        attempt(operation, self._log, acts.get(way, perform))

    def _read(self) -> State:
        with onnxarchive.open(self.path) as archive:
            return read_state(archive, self.path)

    def come_to_rest(self) -> None:
        """Lets everyone pause, recovers the archive, and looks whether all is right."""
        pause = self._control.pause()
        awaited = set(self._processes)
        while awaited:
            paused = self._wait_for(lambda event: (event.what, event.number) == ("paused", pause))
            awaited.discard(paused.process)
        self._recover("recover")
        self._take()
        self._count()
        wrong = unfounded(self._events)
        found = None
        try:
            wrong += self._left()
            found = self._read()
            require(found.tensor is not None, "the archive cannot be read at rest")
            wrong += self._disagreements(found)
        except (ArchiveError, WrongError, DisagreementError) as error:
            wrong.append(f"{type(error).__name__}: {error}")
        self._blame(wrong)
        if found is None or found.tensor is None:
            found = State(0, 0, True)
            found.write(self.path)
        self._state = found
        self._events.clear()
        self._looked_at = 0
        self._rolled_back.clear()
        self.start()

    def _blame(self, wrong: list[str]) -> None:
        """Notes what is wrong, and prints what has been said."""
        if wrong:
            self.figures.wrong += wrong
            said = "\n  ".join([f"from {self._state}", *map(str, self._events)])
            print(f"run {self.figures.runs}: {wrong}\n  {said}", file=sys.stderr)

    def _left(self) -> list[str]:
        """What is wrong with the archive's directory and the archive."""
        wrong = [f"broken: {found}" for found in onnxarchive.check(self.path, full=True)]
        names = sorted(path.name for path in self.path.parent.iterdir())
        if names != [NAME]:
            wrong.append(f"expected {NAME} alone in its directory, found {names}")
        return wrong

    def _disagreements(self, found: State) -> list[str]:
        """What speaks against an archive that holds this, now that all is at rest."""
        wrong = []
        if self.path.read_bytes() != found.content():
            wrong.append(f"other bytes than a save of {found} writes")
        possible = possible_states(self._state, self._events)
        if found not in possible:
            wrong.append(f"expected one of {sorted(possible)}, found {found}")
        seen = [State(*event.detail) for event in self._events if is_seen(event)]
        for state in (*seen, found):
            if {state.model, state.tensor} & self._rolled_back:
                wrong.append(f"{state} is of an edit that was cut off in the archive")
        return wrong

    def _count(self) -> None:
        """Counts what was done, and how long it took."""
        begun: dict[tuple[str, int], float] = {}
        for event in self._events:
            operation = (event.process, event.number)
            if event.what == "begin":
                begun[operation] = event.moment
            elif event.what == "done":
                self.figures.ended[event.kind] += 1
                self._durations[event.kind].append(event.moment - begun[operation])
            elif event.what == "refused":
                self.figures.ended[event.detail[0]] += 1


def kill_many(path: Path, runs: int, seed: int) -> Figures:
    """Kills writers, as often as there are to be runs."""
    scene = Scene(path, seed)
    try:
        scene.warm_up()
        for _ in range(runs):
            scene.run()
        scene.come_to_rest()
    finally:
        scene.close()
    return scene.figures


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and gives its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=500, help="kills (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of what is random")
    parser.add_argument("--directory", help="where to make the temporary directory")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="onnxarchive-kill-", dir=arguments.directory) as made:
        figures = kill_many(Path(made) / NAME, arguments.runs, arguments.seed)
    print(f"seed {arguments.seed}: {figures}")
    return 1 if figures.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
