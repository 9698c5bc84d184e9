"""A change of an archive that fails, or is cut off, at whatever call: old or new, never else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onnxarchive.errors import UnfinishedEditError

if not hasattr(os, "fork"):
    pytest.skip("calls are made to fail in forks", allow_module_level=True)

import faults

import onnxarchive


@pytest.mark.parametrize("change", faults.CHANGES)
def test_whatever_call_fails_the_old_or_the_new_archive_is_left_and_nothing_else(
    tmp_path: Path, change: str, record_property: Callable[[str, Any], None]
) -> None:
    done = subprocess.run(
        [sys.executable, faults.__file__, change, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["problems"] == []
    outcomes = result["outcomes"]
    record_property("calls of changes made to fail", result["calls"])
    record_property("faults tried", sum(outcomes.values()))
    # Each call was killed before and behind, and failed, and so the change was made or not.
    assert outcomes["killed, old"] >= result["calls"]
    assert outcomes["killed, new"] >= 1
    assert outcomes["OSError, old"] >= result["calls"] - 1
    assert outcomes["done, new"] >= 1
    assert outcomes["killed again"] >= 1
    assert outcomes["power failure, all lost"] > result["calls"]


@pytest.mark.parametrize("change", ["replace_model by a larger one", "replace_tensor in place"])
def test_an_archive_whose_change_was_cut_off_is_refused_to_readers_and_says_what_to_do(
    tmp_path: Path, change: str
) -> None:
    refused = 0
    scene = faults.Scene(tmp_path / "a scene", *faults.CHANGES[change])
    for at in range(len(scene.log)):
        scene.set_up()
        killed = faults.Calls(at, "killed behind")
        assert faults.fork(faults.CHANGES[change][1], scene.path, killed) == "killed"
        try:
            onnxarchive.open(scene.path).close()
        except UnfinishedEditError as error:
            refused += 1
            journal = f"{scene.path}-journal"
            assert str(error) == (
                f"{scene.path}: expected a complete archive, found one whose last change was cut "
                f"off; 'onnxarchive recover' takes it back with the journal {journal}, and so does "
                "whoever opens it for writing"
            )
            with pytest.raises(UnfinishedEditError):
                onnxarchive.check(scene.path)
            with pytest.raises(UnfinishedEditError):
                onnxarchive.convert(scene.path, tmp_path / "other.onnxa")
        if refused:
            with onnxarchive.open(scene.path, mode="r+"):  # which takes it back
                pass
            onnxarchive.open(scene.path).close()
            assert scene.path.read_bytes() in (scene.old, scene.new)
    assert refused >= 5
