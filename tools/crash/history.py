"""What happened to an archive: operations, events, and the states that they can lead to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

import onnxarchive
from onnxarchive.editing.recover import recover
from tools.crash.states import (
    ASSET,
    CHANGING,
    State,
    asset,
    changing,
    model_of,
    padding,
    read_state,
    saved,
)

IMPATIENCE: Final = 0.01  # seconds that impatient edits wait for the lock
# Operations that do not change the `State` of an archive.
_LOOKS: Final = ("read", "recover", "empty edit")


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
