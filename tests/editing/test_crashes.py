"""An edit that fails or is interrupted at any call leaves the old archive or the new one."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from processes import completed

if not hasattr(os, "fork"):
    pytest.skip("calls are made to fail in forks", allow_module_level=True)

import faults

import onnxarchive
from onnxarchive.editing import changes, commit, models, transaction
from onnxarchive.files import filesystem, local_file, locking, replacement, undo

pytestmark = pytest.mark.sweep

# Where files are written, locked and closed.
MODULES = (changes, commit, models, transaction, local_file, filesystem, locking, replacement, undo)


@pytest.mark.parametrize("name", faults.EDITS)
def test_whatever_call_fails_the_old_or_the_new_archive_is_left_and_nothing_else(
    tmp_path: Path, name: str, record_property: Callable[[str, Any], None]
) -> None:
    done = completed([sys.executable, faults.__file__, name, str(tmp_path)], status=0)
    result = json.loads(done.stdout)
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


# What is interrupted while an object goes is told of, and lost.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_between_any_two_lines_leaves_the_old_or_the_new_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filesystem, "clone", lambda *_: False)
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
