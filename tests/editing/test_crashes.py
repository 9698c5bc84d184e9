"""An edit that fails or is killed at any call leaves the old archive or the new one.

tools/crash/edits.py kills 500 edits at any moment; here it kills 15."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from processes import completed

if not hasattr(os, "fork"):
    pytest.skip("calls are made to fail in forks", allow_module_level=True)

import faults
from models import entry_of, flip_byte

import onnxarchive
from onnxarchive.editing import commit, comparison, edit, state
from onnxarchive.files import clones_and_sync, hidden_files, local_file, locking, replacement, undo
from tools.crash import edits
from tools.crash.history import DisagreementError, Event, possible_states, unfounded
from tools.crash.states import State, WrongError, read_state, saved

# Where files are written, locked and closed.
MODULES = (
    *(state, commit, comparison, edit),
    *(local_file, clones_and_sync, hidden_files, locking, replacement, undo),
)


@pytest.fixture(scope="module")
def trying() -> Iterator[subprocess.Popen[str]]:
    """The process that makes calls fail: starting one for each edit took half of the time."""
    command = [sys.executable, faults.__file__]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.communicate()
    assert process.returncode == 0


@pytest.mark.sweep
@pytest.mark.parametrize("name", faults.EDITS)
def test_whichever_system_call_fails_only_the_old_or_the_new_archive_is_left(
    tmp_path: Path,
    name: str,
    trying: subprocess.Popen[str],
    record_property: Callable[[str, Any], None],
) -> None:
    assert trying.stdin is not None
    assert trying.stdout is not None
    print(json.dumps([str(tmp_path), name]), file=trying.stdin, flush=True)
    result = json.loads(trying.stdout.readline())
    assert result["problems"] == []
    calls, outcomes = result["calls"], result["outcomes"]
    record_property("calls of changes made to fail", len(calls))
    record_property("faults tried", sum(outcomes.values()))
    # Kills after each call and failing calls lead to the old or the new archive.
    assert outcomes["killed, old"] + outcomes["killed, new"] > len(calls)
    assert outcomes["killed, new"] >= 1
    assert outcomes["OSError, old"] >= len(calls) - 1
    assert outcomes["done, new"] >= 1
    assert outcomes["recovery, killed"] >= 1
    assert outcomes["power failure"] > len(calls)
    assert outcomes["power failure of recovery"] >= 1
    # Only the last sync of an edit in its place fails when the edit has been made.
    assert outcomes.get("OSError, new", 0) == (0 if "rename" in calls else 4)


class Interrupt:
    """Raises KeyboardInterrupt before a line of some modules is run, as Ctrl-C may do it."""

    def __init__(self, at: int | None = None) -> None:
        self.count = 0
        self._at = at
        self._files = {module.__file__ for module in MODULES}

    def __call__(self, frame: FrameType, event: str, _: Any) -> Interrupt | None:
        if frame.f_code.co_filename not in self._files:
            return None
        if event == "line":
            if self.count == self._at:
                raise KeyboardInterrupt
            self.count += 1
        return self


# Python reports an interrupt in a finalizer as a warning, and goes on.
@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("no_clones")
def test_an_interrupt_between_any_two_lines_leaves_the_old_or_the_new_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.onnxa"
    before, change = faults.EDITS["replace_model with a longer end"]

    def run(interrupt: Interrupt) -> None:
        sys.settrace(interrupt)
        try:
            change(path)
        finally:
            sys.settrace(None)

    before(path)
    old = path.read_bytes()
    run(whole := Interrupt())
    new = path.read_bytes()
    found = []
    gc.freeze()  # so that each collection is fast
    for at in range(whole.count):
        path.write_bytes(old)
        with contextlib.suppress(KeyboardInterrupt):
            run(Interrupt(at))
        gc.collect()
        found.append(path.read_bytes())
        with onnxarchive.edit(path, timeout=0):  # nobody holds its lock
            pass
    gc.unfreeze()
    assert whole.count > 500
    assert found.count(old) + found.count(new) == whole.count
    assert found.count(old) > found.count(new) > 10


# Kills at any moment, and the tool that makes them

BEFORE = State(1, 1, False)
UNFINISHED = [
    "UnfinishedEditError",
    "the last edit of the archive was interrupted",
]


def said(text: str) -> list[Event]:
    """Events from lines such as `A begin copy 5`, or `R done read 1 (5, 1, False)`."""
    found = []
    for line in filter(None, map(str.strip, text.splitlines())):
        process, what, kind, number, detail = (*line.split(" ", 4), "", "", "")[:5]
        value: Any = None
        if what == "refused":
            value = UNFINISHED
        elif detail:
            model, tensor, has_asset = map(int, detail.split(","))
            value = [model, tensor, has_asset == 1]
        found.append(Event(process, what, int(number or 0), kind, value))
    return found


def possible(text: str) -> set[State]:
    return possible_states(BEFORE, said(text))


@pytest.mark.sweep
def test_edits_killed_at_any_moment_lose_nothing_and_leave_nothing(tmp_path: Path) -> None:
    done = completed(
        [sys.executable, edits.__file__, "--runs", "15", "--directory", str(tmp_path)], status=0
    )
    first, *_, last = done.stdout.splitlines()
    assert last == "0 violations"
    assert first.startswith("seed 1: 15 runs")
    phases = re.findall(r"\d+", first.partition("killed: ")[2])
    assert sum(map(int, phases)) == 15
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "models"),
    [
        ("A begin copy 5 \n A done copy 5", {5}),
        ("A begin copy 5 \n A refused copy 5", {1}),
        ("A begin copy 5 \n A killed", {1, 5}),
        ("A begin copy 5 \n A undone", {1}),
        ("A begin copy 5 \n A killed \n B begin copy 6 \n B done copy 6", {6}),
        ("A begin copy 5 \n B begin copy 6 \n A done copy 5 \n B done copy 6", {5, 6}),
        ("A begin copy 5 \n B begin copy 6 \n A done copy 5 \n B refused copy 6", {5}),
        ("A begin copy 5 \n B begin copy 6 \n A done copy 5 \n B killed", {5, 6}),
        ("A begin copy 5 \n A done copy 5 \n B begin copy 6 \n B killed", {5, 6}),
        ("A begin save 5 \n A done save 5 \n B begin tensor 6 \n B done tensor 6", {5}),
        # What was read tells it, too.
        ("R begin read 1 \n R done read 1 1,1,0", {1}),
        ("A begin copy 5 \n R begin read 1 \n A killed \n R done read 1 5,1,0", {5}),
        ("A begin copy 5 \n R begin read 1 \n A killed \n R done read 1 1,1,0", {1, 5}),
        ("A begin copy 5 \n A killed \n R begin read 1 \n R done read 1 1,1,0", {1}),
    ],
)
def test_the_tool_knows_which_states_an_archive_may_have(text: str, models: set[int]) -> None:
    assert {state.model for state in possible(text)} == models


def test_the_tool_distinguishes_edits_of_models_and_of_tensors() -> None:
    assert possible("A begin tensor 5 \n A done tensor 5") == {State(1, 5, False)}
    assert possible("A begin save 5 \n A done save 5") == {saved(5)}


@pytest.mark.parametrize(
    "text",
    [
        # An edit that was done is lost.
        "A begin copy 5 \n A done copy 5 \n R begin read 1 \n R done read 1 1,1,0",
        # An edit is seen before it was announced.
        "R begin read 1 \n R done read 1 5,1,0 \n A begin copy 5 \n A done copy 5",
        # One that was refused is seen.
        "A begin copy 5 \n R begin read 1 \n A refused copy 5 \n R done read 1 5,1,0",
        # One that was cut off is seen, and then is not.
        "A begin copy 5 \n A killed \n R begin read 1 \n R done read 1 5,1,0 \n"
        "R begin read 2 \n R done read 2 1,1,0",
        # One that was rolled back comes back.
        "A begin copy 5 \n A killed \n R begin read 1 \n R done read 1 1,1,0 \n"
        "R begin read 2 \n R done read 2 5,1,0",
        # One that is to be rolled back is seen.
        "A begin copy 5 \n R begin read 1 \n A undone \n R done read 1 5,1,0",
        # A tensor is lost by an edit of the model.
        "A begin tensor 5 \n A done tensor 5 \n B begin copy 6 \n B done copy 6 \n"
        "R begin read 1 \n R done read 1 6,1,0",
    ],
)
def test_the_tool_finds_a_state_that_no_order_of_the_edits_explains(text: str) -> None:
    with pytest.raises(DisagreementError, match="no order"):
        possible(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("R begin read 1 \n R refused read 1", 1),
        ("R begin read 1 \n P killing \n A killed \n R refused read 1", 0),
        ("P killing \n A killed \n R begin read 1 \n R refused read 1", 0),
        ("P killing \n A killed \n B begin compact 5 \n B refused compact 5", 1),
        ("P killing \n A killed \n B begin copy 5 \n B refused copy 5", 0),
        (
            "P killing \n A killed \n P begin recover 5 \n P done recover 5 \n"
            "R begin read 1 \n R refused read 1",
            1,
        ),
        (
            "P begin recover 5 \n P killing \n A killed \n P done recover 5 \n"
            "R begin read 1 \n R refused read 1",
            0,
        ),
        (
            "P killing \n A begin recover 5 \n A done recover 5 \n A begin copy 6 \n A undone \n"
            "R begin read 1 \n R refused read 1",
            0,
        ),
        ("A wrong", 1),
    ],
)
def test_an_edit_is_unfinished_from_a_kill_to_the_end_of_a_recovery(text: str, count: int) -> None:
    assert len(unfounded(said(text))) == count


@pytest.mark.parametrize("name", ["weight_0", "added", "changing", "assets/labels.txt"])
def test_the_tool_finds_a_changed_byte(path: Path, name: str) -> None:
    state = State(70, 3, True)
    state.write(path)
    with onnxarchive.open(path) as archive:
        assert read_state(archive) == state
    entry = entry_of(path, name)
    flip_byte(path, entry.data_offset + entry.nbytes - 1)
    with onnxarchive.open(path) as archive, pytest.raises(WrongError):
        read_state(archive)
