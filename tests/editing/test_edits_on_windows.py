"""Edits on Windows, simulated: the archive is closed before another file replaces it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from unittest.mock import Mock

import edits
import numpy as np
import onnx
import pytest
from edits import added, changed, documented, refused, require, untouched, weights
from interruptions import interrupt
from models import model_of
from windows import Windows, simulate

import onnxarchive
from onnxarchive.errors import ArchiveFormatError, LockedError
from onnxarchive.files import local_file, locking

Edit = Callable[[Path], object]
ASSETS = {"labels": b"cat", "more": b"dog" * 1000}
ARRAY = np.ones(300, np.float32)


@pytest.fixture
def archive(path: Path) -> Path:
    """An archive of two models, with assets."""
    further = changed(weights(2), added("own"), documented("further" * 50))
    onnxarchive.save(weights(3), path, models={"further": further}, assets=ASSETS)
    return path


@pytest.fixture
def windows(archive: Path, no_clones: None, monkeypatch: pytest.MonkeyPatch) -> Windows:
    return simulate(monkeypatch)


def with_views(path: Path) -> list[object]:
    """Replaces a tensor by one that is computed from another, and keeps what was read."""
    with onnxarchive.edit(path) as edit:
        views: list[object] = [edit.tensors["w0"], edit.assets["labels"], edit.model]
        edit.tensors["w2"] = edit.tensors["w2"][::-1]
    return views


def swapped(path: Path) -> None:
    """Assigns the model of another archive, which is open, and the path of a link to this one."""
    other, link = path.with_name("other"), path.with_name("link.onnx")
    onnxarchive.save(changed(weights(3), documented("other")), other)
    onnxarchive.link(path, link)
    with onnxarchive.open(other) as source, onnxarchive.edit(path) as edit:
        edit.models["open"] = source
        edit.models["linked"] = str(link)
        edit.tensors["w2"] = ARRAY
    other.unlink()
    link.unlink()


def linked(path: Path) -> None:
    """Assigns the path of a link to this archive."""
    link = path.with_name("link.onnx")
    onnxarchive.link(path, link)
    with onnxarchive.edit(path) as edit:
        edit.model = str(link)
        edit.tensors["w2"] = ARRAY
    link.unlink()


def documented_by_function(model: onnx.ModelProto) -> onnx.ModelProto:
    model.doc_string = "by a function"
    return model


# By what they change; each needs a new file unless the file system has clones.
REPLACING: dict[str, Edit] = {
    "a tensor": lambda path: edits.replace_tensor(path, "w2", ARRAY),
    "a tensor, with views": with_views,
    "an asset": lambda path: edits.add_asset(path, "labels", b"mouse"),
    "an asset less": lambda path: edits.change_assets(path, {}, ["labels"]),
    "models of others": swapped,
    "a link to it": linked,
    "compact": lambda path: edits.replace_model(path, model_of(), compact=True),
    "copy": lambda path: edits.document(path, copy=True),
    "nothing, with copy": lambda path: edits.change_assets(path, {}, copy=True),
}
FUNCTIONS: dict[str, Edit] = {
    "a function": lambda path: onnxarchive.transform(path, path, documented_by_function),
    "a function of loaded weights": lambda path: onnxarchive.transform(
        path, path, documented_by_function, weights="loaded"
    ),
    "inferred shapes": lambda path: onnxarchive.infer_shapes(path, path),
}
GROWING: dict[str, Edit] = {
    "a model": lambda path: edits.document(path, "longer than before"),
    "a new tensor": lambda path: edits.change_model(
        path, lambda model: changed(model, added("new"))
    ),
    "a shared tensor": lambda path: edits.replace_tensor(path, "w0", ARRAY),
    "a new asset": lambda path: edits.add_asset(path, "new", bytes(3000)),
    "a new model": lambda path: edits.replace_model(path, weights(1), name="new"),
}
SHRINKING: dict[str, Edit] = {
    "a shorter model": lambda path: edits.document(path, "", model="further"),
}


def expected(archive: Path, edit: Edit) -> bytes:
    """The bytes that an edit gives on Linux; the archive stays as it is."""
    before = archive.read_bytes()
    edit(archive)
    after = archive.read_bytes()
    changes_nothing = edit in (REPLACING["nothing, with copy"], FUNCTIONS["inferred shapes"])
    assert (after == before) == changes_nothing
    archive.write_bytes(before)
    return after


EDITS = {**REPLACING, **FUNCTIONS, **GROWING, **SHRINKING}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_every_edit_gives_the_same_bytes(
    archive: Path, edit: Edit, no_clones: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = expected(archive, edit)
    windows = simulate(monkeypatch)
    gc.disable()  # nothing may wait for it
    kept = edit(archive)
    gc.enable()
    assert windows.users(archive) == []
    require(archive, result)
    del kept


@pytest.mark.parametrize("is_mapped", [False, True])
@pytest.mark.parametrize("edit", GROWING.values(), ids=GROWING.keys())
def test_an_edit_in_place_goes_on_beside_readers(
    archive: Path, edit: Edit, is_mapped: bool, windows: Windows
) -> None:
    result = expected(archive, edit)
    with onnxarchive.open(archive) as reader:
        views = {name: reader.tensors[name] for name in ("w0", "w1") if is_mapped}
        before = {name: view.copy() for name, view in views.items()}
        with windows.held_by_another_process(archive, is_mapped=is_mapped):
            edit(archive)
        for name, view in views.items():
            np.testing.assert_array_equal(view, before[name])
    del views
    require(archive, result)


OWN = "this process has the file open or mapped, .*; close its archives"
OTHERS = "another process, or a session of this one, .*; close it there first"
REFUSED = {**REPLACING, **SHRINKING}
del REFUSED["models of others"], REFUSED["a link to it"]  # make files, too


@pytest.mark.parametrize("edit", REFUSED.values(), ids=REFUSED.keys())
def test_an_archive_that_this_process_reads_is_neither_replaced_nor_shortened(
    archive: Path, edit: Edit, windows: Windows
) -> None:
    with pytest.MonkeyPatch.context() as patches:
        for name in ("write", "ftruncate"):
            patches.setattr(windows, name, Mock(side_effect=AssertionError(name)), raising=False)
        with onnxarchive.open(archive) as reader, untouched(archive):
            with pytest.raises(LockedError, match=OWN) as caught:
                edit(archive)
            assert caught.value.path == str(archive)
            view = reader.tensors["w0"]
        with untouched(archive), pytest.raises(LockedError, match=OWN):
            edit(archive)
    del view, reader
    edit(archive)
    assert onnxarchive.check(archive, full=True) == []


@pytest.mark.parametrize("edit", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_an_archive_that_this_process_reads_is_not_replaced_by_a_transformed_one(
    archive: Path, edit: Edit, windows: Windows
) -> None:
    with onnxarchive.open(archive) as reader, refused(archive, LockedError, OWN):
        assert reader.tensors["w0"].nbytes
        edit(archive)


@pytest.mark.parametrize("edit", [*REFUSED.values(), *FUNCTIONS.values()])
def test_an_archive_that_another_process_has_mapped_stays_as_it_was(
    archive: Path, edit: Edit, windows: Windows
) -> None:
    with (
        windows.held_by_another_process(archive, is_mapped=True),
        refused(archive, PermissionError, OTHERS) as caught,
    ):
        edit(archive)
    assert caught.value.filename == str(archive)
    edit(archive)
    assert onnxarchive.check(archive, full=True) == []


def test_the_lock_of_another_file_with_the_number_of_the_archive_is_kept(
    archive: Path, windows: Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The archive is closed while its lock is held, and its descriptor gets another file."""
    other = archive.with_name("other")
    onnxarchive.save(weights(1), other)
    opened = []
    replace = windows.replace

    def late(source: str, target: str) -> None:
        file = local_file.MappedFile(other, is_writable=True)
        assert file.keep_locked(0)
        opened.append(file)
        replace(source, target)

    monkeypatch.setattr(windows, "replace", late)
    edits.replace_tensor(archive, "w2", ARRAY)
    with pytest.raises(LockedError):
        edits.document(other, timeout=0)
    opened.pop().close()
    edits.document(other, timeout=0)


@pytest.mark.parametrize("phase", ["log begun", "log complete", "new end begun"])
def test_an_interrupted_edit_is_rolled_back(
    archive: Path, phase: str, no_clones: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = interrupt(archive, GROWING["a model"])
    archive.write_bytes(states.states[phase])
    simulate(monkeypatch)
    recovery = onnxarchive.recover(archive)
    assert recovery.is_rolled_back
    require(archive, states.old)


def test_recover_removes_only_leftovers_that_no_process_has_open(
    archive: Path, windows: Windows
) -> None:
    left = [archive.with_name(f".{archive.name}.onnxarchive-{number}.tmp") for number in range(2)]
    for path in left:
        path.write_bytes(archive.read_bytes()[:700])
    with windows.held_by_another_process(left[0]):
        assert onnxarchive.recover(archive).removed == (str(left[1]),)
    assert left[0].exists()
    assert onnxarchive.recover(archive).removed == (str(left[0]),)


def test_a_model_with_its_data_in_the_archive_is_assigned(archive: Path, windows: Windows) -> None:
    with onnxarchive.edit(archive) as edit:
        model = onnx.ModelProto()
        model.CopyFrom(edit.models["further"])
        edit.models["copy"] = edit.models["further"]
        edit.tensors["w0"] = ARRAY
    assert onnxarchive.load(archive, model="copy").doc_string == model.doc_string


@pytest.mark.parametrize("is_new", [False, True])
def test_a_file_that_changes_after_it_was_assigned_is_to_be_assigned_again(
    archive: Path, windows: Windows, is_new: bool
) -> None:
    asset = archive.with_name("folder") / "labels.txt"
    asset.parent.mkdir()
    asset.write_bytes(b"mouse")
    with (
        refused(
            archive,
            ArchiveFormatError,
            "the file was changed after it was assigned to the edit; assign it again",
        ),
        onnxarchive.edit(archive) as edit,
    ):
        edit.assets["labels"] = asset
        if is_new:
            asset.rename(asset.with_name("old.txt"))
        asset.write_bytes(b"a mouse")


@pytest.mark.parametrize("is_replaced", [False, True])
def test_an_edit_by_another_process_just_after_the_archive_is_closed_is_not_lost(
    archive: Path, is_replaced: bool, windows: Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = windows.replace

    def late(source: str, target: str) -> None:
        monkeypatch.setattr(windows, "replace", replace)
        edits.document(archive, "by others", copy=is_replaced)
        raise PermissionError

    monkeypatch.setattr(windows, "replace", late)
    monkeypatch.setattr(local_file, "PATIENCE", 30)
    with pytest.raises(LockedError, match="changed by somebody else") as caught:
        edits.replace_tensor(archive, "w2", ARRAY)
    assert caught.value.path == str(archive)
    assert onnxarchive.load(archive).doc_string == "by others"
    assert windows.users(archive) == []


def test_a_reader_that_waits_for_an_edit_does_not_prevent_it(
    archive: Path, windows: Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_waiting, is_locked = Event(), locking.is_locked

    def seen(descriptor: int) -> bool:
        result = is_locked(descriptor)
        is_waiting.set()
        return result

    def read() -> bytes:
        with onnxarchive.open(archive) as reader:
            return reader.tensors["w2"].tobytes()

    monkeypatch.setattr(local_file, "PATIENCE", 10)
    with ThreadPoolExecutor(1) as threads:
        with onnxarchive.edit(archive) as edit:
            before = edit.tensors["w2"].tobytes()
            edit.tensors["w2"] = ARRAY
            monkeypatch.setattr(locking, "is_locked", seen)
            reader = threads.submit(read)
            assert is_waiting.wait(30)
        assert reader.result(30) in (before, ARRAY.tobytes())
    assert read() == ARRAY.tobytes()
