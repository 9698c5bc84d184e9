"""Modules and functions that CONTRIBUTING names exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / ".github" / "CONTRIBUTING.md").read_text(encoding="utf-8")
ROOMS = sorted(path.parent.name for path in ROOT.glob("onnxarchive/*/__init__.py"))
NAMES = sorted(set(re.findall(rf"`((?:{'|'.join(ROOMS)})(?:\.\w+)+)`", TEXT)))


@pytest.mark.parametrize("name", NAMES)
def test_each_name_with_dots_is_in_the_package(name: str) -> None:
    room, module, *attributes = name.split(".")
    found = importlib.import_module(f"onnxarchive.{room}.{module}")
    for attribute in attributes:
        found = getattr(found, attribute)


def test_the_walks_name_the_rooms_that_they_pass() -> None:
    assert {name.partition(".")[0] for name in NAMES} >= {
        "model",
        "reading",
        "writing",
        "zipformat",
    }


def test_the_table_has_each_room() -> None:
    rooms = TEXT.partition("| beside the package |")[0]
    assert sorted(re.findall(r"^\| `(\w+)/` \|", rooms, re.MULTILINE)) == ROOMS


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([a-z_]+/[\w/.]*)`", TEXT))))
def test_each_path_exists(path: str) -> None:
    assert any((ROOT / above / path).exists() for above in ("", "onnxarchive", "tests"))
