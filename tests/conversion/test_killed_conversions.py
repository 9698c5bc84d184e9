"""Killed conversions, exports and extractions; tools/crash kills 200 of larger models."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import completed

pytestmark = pytest.mark.sweep

TOOL = Path(__file__).parents[2] / "tools" / "crash" / "conversions.py"


@pytest.fixture(scope="module")
def tool() -> dict[str, Any]:
    return runpy.run_path(str(TOOL))


@pytest.fixture(scope="module")
def scene(tool: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tool["set_scene"](tmp_path_factory.mktemp("kill"), 2)[0]


def test_a_conversion_killed_at_any_moment_leaves_the_target_whole_or_as_it_was(
    tmp_path: Path,
) -> None:
    options = ["--runs", "10", "--megabytes", "50", "--directory", str(tmp_path)]
    done = completed([sys.executable, str(TOOL), *options], status=0)
    assert done.stdout.startswith("10 conversions of 50 MB")
    assert "; 0 violations" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_an_export_and_an_extraction_killed_at_any_moment_are_recovered(tmp_path: Path) -> None:
    tool = TOOL.with_name("exports.py")
    options = ["--runs", "8", "--megabytes", "10", "--directory", str(tmp_path)]
    done = completed([sys.executable, str(tool), *options], status=0)
    exports, extractions = done.stdout.splitlines()
    assert exports.startswith("8 exports")
    assert extractions.startswith("8 extractions")
    assert done.stdout.count("; 0 violations") == 2
    assert list(tmp_path.iterdir()) == []


def test_kills_are_spread_from_the_start_to_past_the_end(tool: dict[str, Any]) -> None:
    found = list(tool["moments"](100, 2.0))
    assert len(found) == 100
    assert found == sorted(found)
    assert 0 < found[0] < 0.03
    assert 2.2 < found[-1] < 2.3


def test_the_tool_recognises_the_state_of_a_target(tool: dict[str, Any], scene: Any) -> None:
    complete = scene.expected.read_bytes()
    assert tool["what_is_left"](scene) == "absent"
    scene.target.write_bytes(scene.old.read_bytes())
    assert tool["what_is_left"](scene) == "old"
    scene.target.write_bytes(complete)
    assert tool["what_is_left"](scene) == "complete"
    scene.target.write_bytes(complete[:-1])
    assert "breaks rules" in tool["what_is_left"](scene)
    scene.target.write_bytes(b"")
    assert "breaks rules" in tool["what_is_left"](scene)
    scene.target.unlink()


@pytest.mark.parametrize(
    ("before", "status", "left", "is_wrong"),
    [
        ("absent", -9, "absent", False),
        ("absent", -9, "complete", False),
        ("absent", 0, "complete", False),
        ("old", -9, "old", False),
        ("old", -9, "complete", False),
        ("old", -9, "absent", True),
        ("absent", -9, "a file of 5 bytes", True),
        ("old", 0, "old", True),
        ("absent", 0, "absent", True),
        ("absent", 1, "absent", True),
    ],
)
def test_the_tool_finds_states_that_a_kill_must_not_leave(
    tool: dict[str, Any], before: str, status: int, left: str, is_wrong: bool
) -> None:
    assert (tool["violation"](before, status, left) is not None) is is_wrong
