"""Makes each system call of a cached download fail, and uses the cache afterwards.

`main` prints JSON: the kinds of the calls, the number of faults by outcome, and a description of
each fault that broke the cache. `faults.WAYS` lists the ways in which a call fails.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import faults
from remote_files import Remote, data_of, opened, require_right

DATA = data_of(5000)


def download(directory: Path) -> None:
    """Continues a download beside an older version, which is then removed."""
    opened(directory, Remote(DATA, piece_size=700)).close()


def prepare(directory: Path) -> None:
    """Makes a cache with an older version, and with a part of the present one."""

    def stop(offset: int) -> None:
        if stopping.nbytes_asked and len(seen) == 3:
            raise OSError
        seen.append(offset)

    seen: list[int] = []
    stopping = Remote(DATA, piece_size=700)
    stopping.before = stop
    opened(directory, Remote(bytes(3000), key="a" * 64)).close()
    try:
        opened(directory, stopping)
    except OSError:
        return
    raise AssertionError


def try_fault(directory: Path, at: int, way: str) -> tuple[str, str | None]:
    """The outcome of the download, and the problem of the cache afterwards or None."""
    prepare(directory)
    outcome = faults.attempt(download, directory, faults.Calls(at, way))
    if way in faults.KILLS and outcome != "killed":
        return outcome, f"expected a kill, found {outcome}"
    try:
        asked = require_right(directory, DATA)
        again = require_right(directory, DATA)
    except Exception as error:
        return outcome, repr(error)
    if again or (outcome == "done" and asked):
        return outcome, f"{asked} and {again} bytes were asked for afterwards"
    return outcome, None


def main() -> None:
    """Tries all faults with caches in a directory, and prints the outcomes."""
    directory = Path(sys.argv[1])
    outcomes: Counter[str] = Counter()
    problems: list[str] = []
    with patch.object(os, "fsync", lambda _: None):
        prepare(directory / "cache")
        calls = faults.Calls()
        assert faults.attempt(download, directory / "cache", calls) == "done"
        for at, way in faults.faults(calls.log):
            outcome, problem = try_fault(directory / f"{at} {way}", at, way)
            outcomes[outcome] += 1
            if problem is not None:
                problems.append(f"call {at} {calls.log[at][:3]} {way}: {problem}")
    kinds = [call.kind for call in calls.log]
    json.dump({"calls": kinds, "outcomes": outcomes, "problems": problems}, sys.stdout)
