"""Assets of an archive are added, replaced and removed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from edits import added, changed, entries_of, no_clone, require, weights
from models import copying_clone
from several_models import A, B, of
from written import saved

import onnxarchive
from onnxarchive.archive import rewriting
from onnxarchive.errors import ArchiveError, LockedError, TensorNotFoundError

ASSETS = {"b": b"cat", "deep/er": b"x" * 5000}


@pytest.fixture(params=["in a new file", "on a clone", "with copy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    clone = copying_clone if request.param == "on a clone" else no_clone
    monkeypatch.setattr(rewriting, "clone", clone)
    return {"copy": request.param == "with copy"}


@pytest.fixture
def archive(path: Path) -> Path:
    onnxarchive.save(weights(2), path, assets=ASSETS)
    return path


CHANGES: dict[str, tuple[dict[str, bytes], list[str]]] = {
    "one before the others": ({"a": b"new"}, []),
    "one between them": ({"c/d": b"new"}, []),
    "one after them": ({"z": b""}, []),
    "one of the same size": ({"b": b"dog"}, []),
    "one of another size": ({"b": b"a longer text"}, []),
    "one to remove": ({}, ["b"]),
    "all to remove": ({}, ["deep/er", "b"]),
    "a folder in the place of a file": ({"b/b": b"deep"}, ["b"]),
    "removed and added": ({"b": b"again"}, ["b"]),
    "nothing": ({}, []),
}


@pytest.mark.parametrize("alignment", [64, 4096])
@pytest.mark.parametrize(("new", "removed"), CHANGES.values(), ids=CHANGES.keys())
def test_changed_assets_give_the_bytes_that_save_gives(
    path: Path, way: dict[str, Any], alignment: int, new: dict[str, bytes], removed: list[str]
) -> None:
    onnxarchive.save(weights(2), path, assets=ASSETS, alignment=alignment)
    onnxarchive.change_assets(path, new, removed, **way)
    assets = {name: data for name, data in ASSETS.items() if name not in removed} | new
    require(path, saved(weights(2), assets=assets, alignment=alignment))


def test_one_asset_is_added_replaced_and_removed(
    archive: Path, tmp_path: Path, way: dict[str, Any]
) -> None:
    (tmp_path / "file").write_bytes(b"of a file")
    onnxarchive.add_asset(archive, "a", tmp_path / "file", **way)
    onnxarchive.add_asset(archive, "b", b"dog", **way)
    onnxarchive.remove_asset(archive, "deep/er", **way)
    require(archive, saved(weights(2), assets={"a": b"of a file", "b": b"dog"}))


def test_views_of_the_old_assets_and_tensors_stay(archive: Path, way: dict[str, Any]) -> None:
    with onnxarchive.open(archive) as opened:
        tensor, asset = opened.read("w1"), opened.read("assets/deep/er")
        before = bytes(tensor)
        onnxarchive.change_assets(archive, {"a": b"new"}, ["deep/er"], **way)
        assert bytes(asset) == ASSETS["deep/er"]
        assert bytes(tensor) == before
        assert list(opened.assets) == ["b", "deep/er"]  # as it was when it was opened


def test_all_models_are_kept(path: Path, way: dict[str, Any]) -> None:
    models = {"decoder": of(b=B, c=A)}
    onnxarchive.save(of(a=A, b=B), path, models=models)
    onnxarchive.add_asset(path, "a", b"new", **way)
    require(path, saved(of(a=A, b=B), models=models, assets={"a": b"new"}))


def test_assets_follow_tensors_that_an_edit_has_put_after_them(
    archive: Path, way: dict[str, Any]
) -> None:
    onnxarchive.replace_model(archive, changed(weights(2), added("new")))
    names = [name for name, _ in entries_of(archive.read_bytes())]
    assert names == ["w0", "w1", "assets/b", "assets/deep/er", "new"]
    onnxarchive.add_asset(archive, "a", b"", **way)
    require(archive, saved(changed(weights(2), added("new")), assets={"a": b"", **ASSETS}))


def test_only_what_follows_the_last_kept_entry_is_written(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewriting, "clone", copying_clone)
    calls: list[tuple[int, int]] = []
    onnxarchive.add_asset(archive, "c", b"new", progress=lambda *numbers: calls.append(numbers))
    with onnxarchive.open(archive) as opened:
        names = ["assets/c", "assets/deep/er", "__MODEL_PROTO"]
        assert calls[-1] == (sum(opened.entries[name].nbytes for name in names),) * 2


REFUSED: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "a name that leads out": (
        lambda path: onnxarchive.add_asset(path, "../a", b""),
        ValueError,
        r"'assets/\.\./a'|'\.\./a'",
    ),
    "a file in the place of a folder": (
        lambda path: onnxarchive.add_asset(path, "deep", b""),
        ValueError,
        "assets/deep",
    ),
    "names that differ in case": (
        lambda path: onnxarchive.add_asset(path, "B", b""),
        ValueError,
        "assets/B",
    ),
    "an asset that is missing": (
        lambda path: onnxarchive.remove_asset(path, "labels"),
        TensorNotFoundError,
        "'labels'",
    ),
    "one of two that is missing": (
        lambda path: onnxarchive.change_assets(path, {"new": b""}, ["b", "labels"]),
        TensorNotFoundError,
        "'labels'",
    ),
    "the archive itself": (
        lambda path: onnxarchive.add_asset(path, "self", path),
        ValueError,
        "expected another file than the input",
    ),
    "a file that is missing": (
        lambda path: onnxarchive.add_asset(path, "new", path.with_name("missing")),
        FileNotFoundError,
        "missing",
    ),
}


@pytest.mark.parametrize(("edit", "error", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_refused_changes_nothing(
    archive: Path,
    way: dict[str, Any],
    edit: Callable[[Path], object],
    error: type[Exception],
    message: str,
) -> None:
    before = archive.read_bytes()
    with pytest.raises(error, match=message):
        edit(archive)
    require(archive, before)


def test_a_damaged_tensor_is_not_copied(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewriting, "clone", no_clone)
    with onnxarchive.open(archive) as opened:
        offset = opened.entries["w0"].data_offset
    data = bytearray(archive.read_bytes())
    data[offset] ^= 1
    archive.write_bytes(data)
    with pytest.raises(onnxarchive.ChecksumError, match="w0"):
        onnxarchive.add_asset(archive, "a", b"new")
    assert archive.read_bytes() == data


# The editable archive


def test_an_editable_archive_shows_its_new_assets(archive: Path, way: dict[str, Any]) -> None:
    with onnxarchive.open(archive, mode="r+") as opened:
        assets = opened.assets
        opened.add_asset("a", b"new", **way)
        assert dict(assets) == {"a": b"new", **ASSETS}
        opened.remove_asset("b", **way)
        opened.change_assets({"c": b""}, ["a"], **way)
        assert dict(assets) == {"c": b"", "deep/er": ASSETS["deep/er"]}
        opened.doc_string = "after"
    with onnxarchive.open(archive) as reopened:
        assert (list(reopened.assets), reopened.model.doc_string) == (["c", "deep/er"], "after")
    assert onnxarchive.check(archive, full=True) == []


def test_assets_are_not_changed_in_a_block_of_edit(archive: Path) -> None:
    before = archive.read_bytes()
    with onnxarchive.open(archive, mode="r+") as opened:
        with opened.edit(), pytest.raises(LockedError, match="finish the edit"):
            opened.add_asset("a", b"new")
        require(archive, before)


def test_a_change_by_others_is_not_lost(archive: Path, way: dict[str, Any]) -> None:
    with onnxarchive.open(archive, mode="r+") as opened:
        onnxarchive.add_asset(archive, "theirs", b"kept", **way)
        with pytest.raises(ArchiveError, match="open it again"):
            opened.add_asset("mine", b"lost", **way)
    with onnxarchive.open(archive) as reopened:
        assert list(reopened.assets) == ["b", "deep/er", "theirs"]


def test_a_locked_archive_is_waited_for_as_long_as_said(archive: Path) -> None:
    with onnxarchive.open(archive, mode="r+") as opened, opened.edit():
        with pytest.raises(LockedError):
            onnxarchive.add_asset(archive, "a", b"", timeout=0)
        with pytest.raises(LockedError):
            onnxarchive.remove_asset(archive, "b", timeout=0)
