"""Makes each system call of a cached fetch fail, and reads the cache afterwards.

`main` prints JSON: the number of faults by outcome, and a description of each fault that broke the
cache. `faults.WAYS` lists the ways in which a call fails.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import faults
from remote_files import Remote, data_of, opened, require_right

from onnxarchive.remote import cache

BLOCK_SIZE = 1024  # small, so that tries are quick
DATA = data_of(5 * BLOCK_SIZE + 300)


def fetch(directory: Path) -> None:
    """Fetches twice into the damaged cache, with several syncs."""
    with opened(directory, Remote(DATA, part_size=700)) as file:
        file.fetch([(BLOCK_SIZE, 100)])
        file.fetch([(0, len(DATA))])


def prepare(directory: Path) -> Path:
    """Makes a cache with a damaged file; returns the file's path."""
    with opened(directory, Remote(DATA)) as file:
        file.fetch([(0, len(DATA))])
    (path,) = directory.iterdir()
    with open(path, "r+b") as target:
        target.seek(len(DATA))
        target.write(b"garbage")
    return path


def missing(directory: Path) -> int:
    """Requires that all bytes read correctly; returns the number of bytes that were not cached."""
    asked = require_right(directory, DATA)
    return sum(size for ranges in asked for _, size in ranges)


def try_fault(directory: Path, at: int, way: str) -> tuple[str, str | None]:
    """The outcome of the fetches, and the problem of the cache afterwards or None."""
    prepare(directory)
    outcome = faults.attempt(fetch, directory, faults.Calls(at, way))
    expected = "killed" if way in faults.KILLS else "done" if way == "short" else "OSError"
    if outcome != expected:
        return outcome, f"expected {expected}, found {outcome}"
    try:
        is_complete = not missing(directory)
    except Exception as error:
        return outcome, repr(error)
    return outcome, "not complete" if outcome == "done" and not is_complete else None


def power_failures(path: Path, log: list[faults.Call]) -> set[bytes]:
    """The contents that the cache's file may have on the disk after a power failure."""
    calls = [it for it in log if it.kind in ("write", "truncate", "sync")]
    states = set()
    for end in range(1, len(calls) + 1):
        changes = faults.Changes()
        for call in calls[:end]:
            if call.kind == "sync":
                changes.synced = len(changes.calls)
            else:
                changes.calls.append(call)
        states |= changes.after_power_failures(is_new=False)
    return states


def main() -> None:
    """Tries all faults with caches in a directory, and prints the outcomes."""
    directory = Path(sys.argv[1])
    outcomes: Counter[str] = Counter()
    problems: list[str] = []
    patches: dict[str, Any] = {"BLOCK_SIZE": BLOCK_SIZE, "SYNC_SIZE": 2 * BLOCK_SIZE}
    with patch.multiple(cache, **patches), patch.object(os, "fsync", lambda _: None):
        path = prepare(directory / "cache")
        calls = faults.Calls()
        assert faults.attempt(fetch, path.parent, calls) == "done"
        for at, way in faults.faults(calls.log):
            outcome, problem = try_fault(directory / f"{at} {way}", at, way)
            outcomes[outcome] += 1
            if problem is not None:
                problems.append(f"call {at} {calls.log[at][:3]} {way}: {problem}")
        for state in power_failures(path, calls.log):
            path.write_bytes(state)
            try:
                nbytes = missing(path.parent)
            except Exception as error:
                problems.append(f"power failure: {error!r}")
            kept = "nothing" if nbytes == len(DATA) else "in part" if nbytes else "complete"
            outcomes[f"power failure, {kept}"] += 1
    kinds = [call.kind for call in calls.log]
    json.dump({"calls": kinds, "outcomes": outcomes, "problems": problems}, sys.stdout)
