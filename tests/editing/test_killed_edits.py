"""Killed edits leave a sound archive; tools/crash/edits.py kills 500 of them."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import completed

if not hasattr(os, "fork"):
    pytest.skip("the tool forks", allow_module_level=True)

from models import entry_of, flip_byte

import onnxarchive
from tools.crash import edits
from tools.crash.history import DisagreementError, Event, possible_states, unfounded
from tools.crash.states import State, WrongError, read_state, saved

BEFORE = State(1, 1, False)
UNFINISHED = [
    "UnfinishedEditError",
    "expected a complete archive, found one of an interrupted edit",
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
def test_the_tool_tells_what_an_archive_may_hold(text: str, models: set[int]) -> None:
    assert {state.model for state in possible(text)} == models


def test_the_tool_tells_models_from_tensors() -> None:
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
def test_the_tool_finds_what_no_order_of_the_edits_explains(text: str) -> None:
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
def test_the_tool_finds_other_bytes(path: Path, name: str) -> None:
    state = State(70, 3, True)
    state.write(path)
    with onnxarchive.open(path) as archive:
        assert read_state(archive) == state
    entry = entry_of(path, name)
    flip_byte(path, entry.data_offset + entry.nbytes - 1)
    with onnxarchive.open(path) as archive, pytest.raises(WrongError):
        read_state(archive)
