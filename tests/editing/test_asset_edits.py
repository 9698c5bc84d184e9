"""Assets of an archive are added, replaced and removed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import edits
import pytest
from edits import Way, added, changed, entries_of, no_clone, refused, require, require_kept, weights
from models import copying_clone, entry_of, flip_byte
from several_models import A, B, of
from written import saved

import onnxarchive
from onnxarchive.errors import TensorNotFoundError
from onnxarchive.files import clones_and_sync

ASSETS = {"b": b"cat", "deep/er": b"x" * 5000}


@pytest.fixture
def archive(path: Path) -> Path:
    onnxarchive.save(weights(2), path, assets=ASSETS)
    return path


CHANGES: dict[str, tuple[dict[str, bytes], list[str]]] = {
    "one after the others": ({"z": b""}, []),
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
    path: Path, way: Way, alignment: int, new: dict[str, bytes], removed: list[str]
) -> None:
    onnxarchive.save(weights(2), path, assets=ASSETS, alignment=alignment)
    edits.change_assets(path, new, removed, **way)
    assets = {name: data for name, data in ASSETS.items() if name not in removed} | new
    require(path, saved(weights(2), assets=assets, alignment=alignment))


@pytest.mark.parametrize("new", [["a"], ["c/d"], ["z", "a"]])
def test_new_assets_come_before_the_models_and_move_no_tensor(
    archive: Path, way: Way, new: list[str]
) -> None:
    before, inode = archive.read_bytes(), archive.stat().st_ino
    is_in_place = not way["copy"] and clones_and_sync.clone is no_clone
    edits.change_assets(archive, {name: name.encode() for name in new}, **way)
    assert require_kept(archive, before, weights(2)) == [f"assets/{name}" for name in sorted(new)]
    assert (archive.stat().st_ino == inode) == is_in_place
    with onnxarchive.open(archive) as opened:
        assert dict(opened.assets) == ASSETS | {name: name.encode() for name in new}


def test_an_edit_of_assets_keeps_all_models(path: Path, way: Way) -> None:
    models = {"decoder": of(b=B, c=A)}
    onnxarchive.save(of(a=A, b=B), path, models=models)
    edits.add_asset(path, "a", b"new", **way)
    require(path, saved(of(a=A, b=B), models=models, assets={"a": b"new"}))


def test_assets_follow_tensors_that_an_edit_has_put_after_them(archive: Path, way: Way) -> None:
    edits.replace_model(archive, changed(weights(2), added("new")))
    names = [name for name, _ in entries_of(archive.read_bytes())]
    assert names == ["w0", "w1", "assets/b", "assets/deep/er", "new"]
    edits.add_asset(archive, "b", b"dog", **way)
    assets = {**ASSETS, "b": b"dog"}
    require(archive, saved(changed(weights(2), added("new")), assets=assets))


def test_only_what_follows_the_last_kept_entry_is_written(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clones_and_sync, "clone", copying_clone)
    calls: list[tuple[int, int]] = []
    for name, others in (("c", []), ("b", ["deep/er", "c"])):
        edits.add_asset(archive, name, b"new", progress=lambda *numbers: calls.append(numbers))
        with onnxarchive.open(archive) as opened:
            names = ["__MODEL_PROTO", *(f"assets/{it}" for it in (name, *others))]
            assert calls[-1] == (sum(opened.entries[it].nbytes for it in names),) * 2


REFUSED: dict[str, tuple[dict[str, Any], list[str], type[Exception], str]] = {
    "a name that leads out": ({"../a": b""}, [], ValueError, r"'assets/\.\./a'|'\.\./a'"),
    "a file in the place of a folder": ({"deep": b""}, [], ValueError, "assets/deep"),
    "names that differ in case": ({"B": b""}, [], ValueError, "assets/B"),
    "an asset that is missing": ({}, ["labels"], TensorNotFoundError, "'labels'"),
    "one of two that is missing": ({"new": b""}, ["b", "labels"], TensorNotFoundError, "'labels'"),
    "the archive itself": ({"self": Path(edits.NAME)}, [], ValueError, "is also the input"),
    "a file that is missing": ({"new": Path("missing")}, [], FileNotFoundError, "missing"),
}


@pytest.mark.parametrize(("new", "removed", "error", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_a_refused_change_of_assets_changes_nothing(
    archive: Path,
    way: Way,
    new: dict[str, Any],
    removed: list[str],
    error: type[Exception],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(archive.parent)
    with refused(archive, error, text):
        edits.change_assets(archive, new, removed, **way)


def test_a_damaged_tensor_is_not_copied(archive: Path, no_clones: None) -> None:
    flip_byte(archive, entry_of(archive, "w0").data_offset)
    with refused(archive, onnxarchive.ChecksumError, "w0"):
        edits.add_asset(archive, "b", b"new")


# In an edit


def test_an_edit_shows_assets_with_its_changes(archive: Path, way: Way, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"in a file")
    with onnxarchive.edit(archive, **way) as edit:
        assets = edit.assets
        assets["a"] = b"new"
        assets["f"] = tmp_path / "file"
        assert dict(assets) == {**ASSETS, "a": b"new", "f": b"in a file"}
        del assets["b"]
        assets.update({"c": b""})
        assert assets.pop("a") == b"new"
        assert dict(assets) == {"deep/er": ASSETS["deep/er"], "f": b"in a file", "c": b""}
        assert (len(assets), "a" in assets, "c" in assets) == (3, False, True)
        with pytest.raises(KeyError, match="'a'"):
            assets["a"]
        with pytest.raises(KeyError, match="'b'"):
            del assets["b"]
        with pytest.raises(TypeError, match=r"expected bytes or the path of a file .* found int"):
            assets["a"] = 3  # type: ignore[assignment]
        with pytest.raises(FileNotFoundError, match=r"give the content as bytes, .*\.encode\(\)"):
            assets["a"] = "some text"
        edit.model.doc_string = "after"
    with onnxarchive.open(archive) as reopened:
        assert list(reopened.assets) == ["c", "deep/er", "f"]
        assert reopened.assets["f"] == b"in a file"
        assert reopened.model.doc_string == "after"
    assert onnxarchive.check(archive, full=True) == []
