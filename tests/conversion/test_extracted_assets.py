"""`extract` of assets alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from models import entry_of, flip_byte, runnable_model

import onnxarchive

ASSETS = {"labels.txt": b"cat\n", "deep/er.json": b"{}"}


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "m.onnxa"
    onnxarchive.save(runnable_model(), path, assets=ASSETS)
    return path


def files_of(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def test_assets_are_written_at_their_paths_and_nothing_else(archive: Path) -> None:
    new = archive.with_name("new")
    onnxarchive.extract(archive, new, assets=["deep/er.json", "deep/er.json"])
    assert files_of(new) == {"deep/er.json": b"{}"}
    onnxarchive.extract(archive, archive.with_name("all"), assets="all")
    assert files_of(archive.with_name("all")) == ASSETS


def test_without_assets_there_is_an_empty_directory(archive: Path) -> None:
    onnxarchive.save(runnable_model(), archive, assets={})
    onnxarchive.extract(archive, archive.with_name("new"), assets="all")
    assert os.listdir(archive.with_name("new")) == []


def test_a_wrong_name_is_refused_before_anything_is_written(archive: Path) -> None:
    with pytest.raises(
        onnxarchive.TensorNotFoundError, match=r"m\.onnxa: there is no asset 'label'; did"
    ):
        onnxarchive.extract(archive, archive.with_name("new"), assets=["labels.txt", "label"])
    with pytest.raises(TypeError, match=r"paths of assets or 'all', got the string 'labels\.txt'"):
        onnxarchive.extract(archive, archive.with_name("new"), assets="labels.txt")
    assert os.listdir(archive.parent) == [archive.name]


def test_a_damaged_asset_leaves_no_directory(archive: Path) -> None:
    flip_byte(archive, entry_of(archive, "assets/labels.txt").data_offset)
    with pytest.raises(onnxarchive.ChecksumError, match=r"assets/labels\.txt"):
        onnxarchive.extract(archive, archive.with_name("new"), assets="all")
    assert os.listdir(archive.parent) == [archive.name]
    onnxarchive.extract(archive, archive.with_name("new"), assets=["deep/er.json"])
