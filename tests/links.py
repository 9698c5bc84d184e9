"""An archive and a link to it, for the tests of both: fixtures, to be imported where they serve."""

from __future__ import annotations

from pathlib import Path

import pytest
from models import runnable_model

import onnxarchive


@pytest.fixture(name="folder")
def folder_fixture(tmp_path: Path) -> Path:
    """A directory whose name is no identifier."""
    folder = tmp_path / "ein Verzeichnis für Größen"
    folder.mkdir()
    return folder


@pytest.fixture(name="archive")
def archive_fixture(folder: Path) -> Path:
    """An archive of `runnable_model`, alone in that directory."""
    path = folder / "ein Möbel 重み.onnxa"
    onnxarchive.save(runnable_model(), path)
    return path


@pytest.fixture(name="link")
def link_fixture(archive: Path) -> Path:
    """A link beside it."""
    path = archive.with_name("ein Verweis.onnx")
    onnxarchive.link(archive, path)
    return path
