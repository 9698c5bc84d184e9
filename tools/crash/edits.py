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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import onnx
from onnx import helper, numpy_helper

import onnxarchive
from onnxarchive.archive.reading import Archive
from onnxarchive.editing.recovery import recover
from onnxarchive.errors import ArchiveError, UnfinishedEditError
from onnxarchive.storage import undo
from onnxarchive.storage.files import MappedFile
from onnxarchive.zipformat.records import EndRecord

NAME: Final = "model.onnxa"
WEIGHTS: Final = 6
WEIGHT_NBYTES: Final = 256 << 10
CHANGING: Final = "changing"  # the tensor that is replaced
CHANGING_NBYTES: Final = 128 << 10
ADDED: Final = "added"  # a tensor that most models have
ASSET: Final = "labels.txt"
DECODER: Final = "decoder"  # a further model, which never changes
OWN: Final = "own"  # the tensor that only the decoder has
MIN_PADDING: Final = 64 << 10  # bytes of the model's doc_string
MAX_PADDING: Final = 4 << 20

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
IMPATIENCE: Final = 0.01  # seconds that impatient edits wait for the lock
# Operations of the parent after a kill of writers; each run performs one of them.
RECOVERIES: Final = ("recover", "empty edit", "read", "compact", "copy", "save", "nothing")
# Operations that do not change the `State` of an archive.
_LOOKS: Final = ("read", "recover", "empty edit")

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


# Content of the archive


class Traits(NamedTuple):
    """Traits of a numbered model.

    Attributes:
        padding: Bytes of the doc_string.
        has_added: True if the last tensor of the model is `ADDED`.
        has_asset: True if a save with this number writes an asset.
        is_referring: True if the model of an edit gives the locations of the tensors in `weights`,
            not their data. `ADDED` always has data.
    """

    padding: int
    has_added: bool
    has_asset: bool
    is_referring: bool


def traits(number: int) -> Traits:
    """The traits of the model with this number."""
    drawn = random.Random(number)
    padding = drawn.randrange(MIN_PADDING, MAX_PADDING)
    return Traits(padding, *(drawn.random() < share for share in (0.8, 0.5, 0.5)))


@functools.cache
def weight(name: str) -> bytes:
    """The data of a tensor that never changes."""
    return random.Random(name).randbytes(WEIGHT_NBYTES)


def weights(number: int) -> list[str]:
    """Names of all tensors of the model `number`, except `CHANGING`."""
    names = [f"weight_{index}" for index in range(WEIGHTS)]
    return [*names, ADDED] if traits(number).has_added else names


@functools.lru_cache(maxsize=32)
def changing(number: int) -> bytes:
    """The data that edit `number` gives the tensor `CHANGING`; begins with `number` in 8 bytes."""
    head = number.to_bytes(8, "little")
    return head + random.Random(number).randbytes(CHANGING_NBYTES - len(head))


@functools.cache
def asset() -> bytes:
    """The data of the asset."""
    return random.Random(ASSET).randbytes(10_000)


def padding(number: int) -> str:
    """The doc_string of a model: its number, repeated."""
    size = traits(number).padding
    line = f"model {number:08} "
    return (line * (size // len(line) + 1))[:size]


def model_of(number: int, tensor: int | None) -> onnx.ModelProto:
    """Builds a numbered model.

    Args:
        number: The number of the model.
        tensor: Number of the edit that gives the tensor `CHANGING` its data; None to refer to the
            archive's `CHANGING`.
    """
    is_referring = tensor is None and traits(number).is_referring
    initializers = []
    for name in [*weights(number)[:WEIGHTS], CHANGING, *weights(number)[WEIGHTS:]]:
        nbytes = CHANGING_NBYTES if name == CHANGING else WEIGHT_NBYTES
        # The archive may lack `ADDED`, so this tensor never refers to the archive.
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


@functools.cache
def decoder() -> onnx.ModelProto:
    """The further model: two tensors of the default model, and the tensor `OWN`."""
    graph = helper.make_graph([], "decoder", [], [], [])
    for name in (OWN, "weight_1", "weight_0"):
        elements = np.frombuffer(weight(name), np.uint8)
        graph.initializer.append(numpy_helper.from_array(elements, name))
    model: onnx.ModelProto = helper.make_model(graph, ir_version=8)
    return model


class State(NamedTuple):
    """The content of an archive, except the further model, which never changes.

    Attributes:
        model: The number of the edit that wrote the model; 0 at first.
        tensor: The number of the edit that wrote the tensor `CHANGING`; 0 at first.
        has_asset: True if the archive has the asset.
    """

    model: int
    tensor: int
    has_asset: bool

    def write(self, target: Any) -> None:
        """Saves an archive with this content."""
        assets = {ASSET: asset()} if self.has_asset else None
        model = model_of(self.model, self.tensor)
        onnxarchive.save(model, target, models={DECODER: decoder()}, assets=assets)


class WrongError(Exception):
    """An archive has content that no process has written."""


def require(is_right: bool, problem: str) -> None:
    """Raises a `WrongError` with this problem unless `is_right`."""
    if not is_right:
        raise WrongError(problem)


def read_state(archive: Archive) -> State:
    """Reads the content of an open archive.

    Raises:
        WrongError: The content was not written by this tool.
    """
    number = int(archive.metadata["number"])
    require(archive.model.doc_string == padding(number), f"model {number} has another doc_string")
    names = [initializer.name for initializer in archive.model.graph.initializer]
    expected = [*weights(number)[:WEIGHTS], CHANGING, *weights(number)[WEIGHTS:]]
    require(names == expected, f"model {number} has the initializers {names}")
    for name in weights(number):
        require(bytes(archive.read(name)) == weight(name), f"the tensor {name} has other bytes")
    has_asset = ASSET in archive.assets
    if has_asset:
        require(archive.read(f"assets/{ASSET}") == asset(), "the asset has other bytes")
    data = bytes(archive.read(CHANGING))
    tensor = int.from_bytes(data[:8], "little")
    require(
        data == changing(tensor),
        f"the first 8 bytes of {CHANGING} are of edit {tensor}, but its other bytes are not",
    )
    require([*archive.models] == ["", DECODER], f"found the models {[*archive.models]}")
    for tensor_of, written in zip(
        archive.models[DECODER].graph.initializer, decoder().graph.initializer, strict=True
    ):
        (location,) = tensor_of.external_data
        is_right = tensor_of.name == written.name == location.value
        require(
            is_right and bytes(archive.read(location.value)) == weight(written.name),
            f"the tensor {written.name} of the further model has another name, key or data",
        )
    return State(number, tensor, has_asset)


# Operations


@dataclass(frozen=True)
class Operation:
    """An edit or a read of the archive.

    Attributes:
        process: The process that performs the operation.
        number: The number of the operation, and of the written model or tensor.
        kind: One of `EDITS` or `RECOVERIES`.
        seen: The state that was read, once known.
    """

    process: str
    number: int
    kind: str
    seen: State | None = None

    def apply(self, state: State) -> State | None:
        """The state after this operation; None if the operation read another state than `state`."""
        if self.kind in _LOOKS:
            return state if self.seen in (None, state) else None
        if self.kind == "tensor":
            return state._replace(tensor=self.number)
        if self.kind == "asset":
            return state._replace(has_asset=not state.has_asset)
        if self.kind == "save":
            return saved(self.number)
        return state._replace(model=self.number)

    def perform(self, path: Path) -> State | None:
        """Performs the operation; returns the state that was read, or None."""
        if self.kind == "read":
            with onnxarchive.open(path) as archive:
                return read_state(archive)
        if self.kind == "recover":
            recover(path)
        elif self.kind == "empty edit":
            with onnxarchive.edit(path, timeout=None):
                pass
        elif self.kind == "save":
            saved(self.number).write(path)
        elif self.kind == "tensor":
            with onnxarchive.edit(path, timeout=None) as edit:
                edit.tensors[CHANGING] = np.frombuffer(changing(self.number), np.uint8)
        elif self.kind == "asset":
            with onnxarchive.edit(path, timeout=None) as edit:
                if ASSET in edit.assets:
                    del edit.assets[ASSET]
                else:
                    edit.assets[ASSET] = asset()
        elif self.kind == "several":
            with onnxarchive.edit(path, timeout=None) as edit:
                edit.model = model_of(self.number, None)
                edit.model.doc_string = "to be changed"
                edit.metadata["number"] = "to be changed"
                edit.model.doc_string = padding(self.number)
                edit.metadata["number"] = str(self.number)
        else:
            compact, copy = self.kind in ("compact", "copy"), self.kind == "copy"
            timeout = IMPATIENCE if self.kind == "impatient" else None
            with onnxarchive.edit(path, compact=compact, copy=copy, timeout=timeout) as edit:
                edit.model = model_of(self.number, None)
        return None


def saved(number: int) -> State:
    """The state after a save with this number."""
    return State(number, number, traits(number).has_asset)


# Events


@dataclass(frozen=True)
class Event:
    """The beginning or end of an operation, a fault of a process, or a kill.

    Attributes:
        process: The process.
        what: "begin", "done" or "refused" for an operation; "wrong" for a fault; "killing" before a
            kill; "undone" after the kill of a single writer whose interrupted edit must be rolled
            back; "killed" after any other kill.
        number: The operation's number.
        kind: The operation's kind.
        detail: For the "done" of a read, the state; for "refused", the name and the message of the
            error; for "wrong", the end of the traceback.
        moment: Time of the event in seconds, from `time.monotonic`.
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


# Possible states

# A possible state, and the operations under way that have not taken effect in it.
_Possible = tuple[State, frozenset[Operation]]


class DisagreementError(Exception):
    """No order of the operations explains the events."""


def possible_states(before: State, events: Sequence[Event]) -> set[State]:
    """The possible states of an archive after events; the events must end every operation.

    An operation takes effect at one moment between its beginning and its end. A refused or undone
    operation has no effect. A killed operation takes effect before the kill or never.

    Args:
        before: The state before the events.
        events: The events, in order.

    Raises:
        DisagreementError: No order of the operations explains the events.
    """
    seen = {
        (event.process, event.number): State(*event.detail)
        for event in events
        if (event.what, event.kind) == ("done", "read")
    }
    under_way: dict[str, Operation] = {}
    possible: set[_Possible] = {(before, frozenset())}
    for event in events:
        name = event.process
        if event.what == "begin":
            shown = seen.get((name, event.number))
            operation = Operation(name, event.number, event.kind, shown)
            under_way[name] = operation
            possible = {(state, rest | {operation}) for state, rest in possible}
        elif event.what in ("done", "refused", "killed", "undone", "wrong"):
            ended = under_way.pop(name, None)
            if ended is None:
                continue
            if event.what in ("refused", "undone"):
                possible = {(state, rest) for state, rest in possible if ended in rest}
            else:
                possible = set(_come_into_effect(possible))
            if event.what == "done":
                possible = {(state, rest) for state, rest in possible if ended not in rest}
            possible = {(state, rest - {ended}) for state, rest in possible}
            if not possible:
                raise DisagreementError(f"no order of the operations explains '{event}'")
    if under_way:
        raise ValueError(f"operations without an end: {under_way}")
    return {state for state, _ in possible}


def _come_into_effect(possible: Iterable[_Possible]) -> Iterator[_Possible]:
    """Yields the given states, and every state after some operations under way took effect."""
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
    """Describes refusals without a cause, and other faults that processes have reported.

    Between a kill and the end of the first edit that began after the kill, a running read or copy
    may find an unfinished edit. The kill is between the events "killing" and "killed" (or
    "undone"): until it comes, the process may end its edit and begin another.
    """
    wrong = []
    may_be_unfinished = False
    may_have_met_it: set[tuple[str, int]] = set()  # operations
    under_way: set[tuple[str, int]] = set()
    recovering: set[tuple[str, int]] = set()
    for event in events:
        operation = (event.process, event.number)
        if event.what == "killing":
            may_be_unfinished = True
            may_have_met_it |= under_way
        elif event.what in ("killed", "undone"):
            recovering.clear()
            may_be_unfinished = True
            may_have_met_it |= under_way
        elif event.what == "begin":
            under_way.add(operation)
            if may_be_unfinished:
                may_have_met_it.add(operation)
                if event.kind != "read":
                    recovering.add(operation)
        elif event.what == "done":
            under_way.discard(operation)
            if operation in recovering:
                may_be_unfinished = False
        elif event.what == "refused":
            under_way.discard(operation)
            if not _is_founded(event, operation in may_have_met_it):
                wrong.append(str(event))
        elif event.what == "wrong":
            wrong.append(str(event))
    return wrong


def _is_founded(event: Event, may_be_unfinished: bool) -> bool:
    error, message = event.detail
    if error == "UnfinishedEditError":  # a read or copy does not roll back an unfinished edit
        return may_be_unfinished and event.kind in ("read", "copy")
    if error == "ValueError":
        return event.kind in ("in place", "impatient", "several") and "--compact" in message
    return error == "LockedError" and event.kind == "impatient"


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


@dataclass
class Figures:
    """Figures of all runs.

    Attributes:
        runs: Number of runs.
        killed: Number of writers killed before the end of a run.
        phases: Number of kills, by phase of the edit.
        ended: Number of operations: by kind if done, by name of the error if refused.
        wrong: Descriptions of faults.
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
                f"edits done: {listed(EDITS, self.ended)}; reads {self.ended['read']}; "
                f"refused: {listed(refused, self.ended)}",
                f"{len(self.wrong)} violations",
            )
        )


class Scene:
    """An archive, the processes at work on it, and its known state."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.figures = Figures()
        self._random = random.Random(seed)
        self._log = Log()
        self._processes: dict[str, int] = {}
        self._state = State(0, 0, True)
        self._state.write(path)
        self._events: list[Event] = []  # of this run
        self._looked_at = 0  # number of events that `_wait_for` has examined
        self._durations: dict[str, float] = {}  # of the latest operation of each kind, in seconds

    def run(self) -> None:
        """Kills one writer or both, then all processes, and checks the archive."""
        self.figures.runs += 1
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
        turn = self.figures.runs * _TURNS_OF_A_RUN
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
        self.figures.killed += len(victims)
        self.figures.phases[phase] += 1
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
            return LOG if undo.find(file) is None else NEW_END

    # Checks

    def _perform(self, kind: str, turn: int) -> None:
        if kind != "nothing":
            turn += self.figures.runs * _TURNS_OF_A_RUN
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
                self.figures.ended[event.kind] += 1
                self._durations[event.kind] = event.moment - begun[operation]
            elif event.what == "refused":
                self.figures.ended[event.detail[0]] += 1
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
            self.figures.wrong += wrong
            said = "\n  ".join([f"from {self._state}", *map(str, self._events)])
            print(f"run {self.figures.runs}: {wrong}\n  {said}", file=sys.stderr)
        if found is None:
            found = State(0, 0, True)
            found.write(self.path)
        self._state = found


def ends_whole(path: Path) -> bool:
    """True if a file ends with an end record: no edit of the file is unfinished."""
    with open(path, "rb") as file:
        file.seek(-EndRecord.SIZE, os.SEEK_END)
        return EndRecord.unpack(file.read()) is not None


def kill_many(path: Path, runs: int, seed: int) -> Figures:
    """Makes `runs` runs; returns the figures of all runs."""
    scene = Scene(path, seed)
    try:
        for _ in range(runs):
            scene.run()
    finally:
        scene.close()
    return scene.figures


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
        figures = kill_many(Path(made) / NAME, arguments.runs, arguments.seed)
    print(f"seed {arguments.seed}: {figures}")
    return 1 if figures.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
