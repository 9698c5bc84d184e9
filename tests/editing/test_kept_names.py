"""Directories whose names can be made, but not removed: append-only ones, WORM shares, buckets."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import edits
import pytest
from models import copying_clone, model_of
from mounts import attempt

import onnxarchive
from onnxarchive.files import clones_and_sync
from onnxarchive.files.clones_and_sync import has_clones

REFUSED = "Operation not permitted"


@pytest.fixture
def worm(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An archive in a directory that keeps all names."""
    onnxarchive.save(edits.weights(2), path)

    def refuse(name: str, *_: object, **options: object) -> None:
        raise PermissionError(errno.EPERM, REFUSED, name)

    for name in ("unlink", "remove", "rename", "replace", "rmdir"):
        monkeypatch.setattr(os, name, refuse)
    return path


def test_an_edit_in_place_needs_no_new_name(worm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clones_and_sync, "has_clones", has_clones)
    monkeypatch.setattr(
        clones_and_sync, "_NO_CLONES", range(1000)
    )  # whatever this file system says
    edits.document(worm)
    assert os.listdir(worm.parent) == [worm.name]
    assert onnxarchive.check(worm, full=True) == []


def test_an_edit_whose_clone_cannot_be_renamed_is_made_in_place(
    worm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clones_and_sync, "clone", copying_clone)
    edits.document(worm)
    assert onnxarchive.check(worm, full=True) == []
    with onnxarchive.open(worm) as archive:
        assert archive.model.doc_string == "new"


def test_the_error_of_a_save_is_raised_and_not_that_of_its_cleanup(worm: Path) -> None:
    before = worm.read_bytes()
    with pytest.raises(PermissionError) as caught:
        onnxarchive.save(model_of(), worm)
    left = worm.parent.resolve() / f".{worm.name}.onnxarchive-0.tmp"
    assert caught.value.filename == str(worm)
    assert "cannot be renamed into place" in str(caught.value)
    assert f"; {left} could not be removed" in str(caught.value)
    assert worm.read_bytes() == before


def test_the_error_of_the_caller_is_raised_and_not_that_of_the_cleanup(worm: Path) -> None:
    with pytest.raises(ZeroDivisionError), onnxarchive.Writer(worm):
        raise ZeroDivisionError


@pytest.fixture
def append_only(path: Path) -> Iterator[Path]:
    """An archive in a directory that Linux keeps append-only."""
    onnxarchive.save(edits.weights(2), path)
    problem = attempt(["chattr", "+a", str(path.parent)])
    if problem is not None:
        pytest.skip(f"no append-only directory can be made: {problem}")
    yield path
    assert attempt(["chattr", "-a", str(path.parent)]) is None


def test_an_edit_in_an_append_only_directory_makes_no_name(
    append_only: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clones_and_sync, "clone", copying_clone)  # as on XFS
    edits.document(append_only)
    assert os.listdir(append_only.parent) == [append_only.name]
    assert onnxarchive.check(append_only, full=True) == []
