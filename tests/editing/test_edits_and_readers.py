"""The data that an edit reads, and the views of readers meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import edits
import numpy as np
import onnx
import pytest
from edits import (
    MODEL,
    Way,
    added,
    changed,
    documented,
    new_model,
    no_clone,
    referring,
    refused,
    removed,
    replace_model,
    replace_tensor,
    require,
    weights,
    with_array,
)
from models import copying_clone, entry_of, flip_byte, model_of, open_below, run_python
from written import contents, saved

import onnxarchive
from onnxarchive.editing.recover import recover
from onnxarchive.errors import ArchiveFormatError, ChecksumError
from onnxarchive.files import clones_and_sync, local_file, locking

# Weights are not read


@pytest.mark.parametrize(
    ("way", "is_of_tensor"),
    [("in its place", False), ("on a clone", False), ("on a clone", True)],
    indirect=["way"],
)
def test_weights_that_stay_are_neither_read_nor_written(
    path: Path, way: Way, is_of_tensor: bool
) -> None:
    onnxarchive.save(weights(3), path)
    new, ones = changed(referring(path), documented("new"), added("w3")), np.ones(300, np.float32)
    damaged = {name: entry_of(path, name).data_offset + 50 for name in ("w0", "w1", "w2")}
    for offset in damaged.values():
        flip_byte(path, offset)
    if is_of_tensor:
        replace_tensor(path, "w1", ones, **way)
        del damaged["w1"]  # which is written anew
        expected = with_array(weights(3), 1, ones)
    else:
        replace_model(path, new, **way)
        expected = changed(weights(3), documented("new"), added("w3"))
    for offset in damaged.values():
        flip_byte(path, offset)
    require(path, saved(expected))


INTO: dict[str, Any] = {"size_threshold": 2000, "compact": True}
READING: dict[str, Callable[[Path], None]] = {
    "copy": lambda path: replace_model(path, referring(path), copy=True),
    "compact": lambda path: replace_model(path, changed(referring(path), removed(0)), compact=True),
    "into the model": lambda path: replace_model(path, referring(path), **INTO),
    "another tensor": edits.EDITS["tensors"],
    "compared": lambda path: replace_model(path, weights(3)),
    "copy by a link": lambda path: replace_model(path, path.with_name("link.onnx"), copy=True),
    "compact by a link": lambda path: replace_model(
        path, path.with_name("shorter.onnx"), compact=True
    ),
    "into the model by a link": lambda path: replace_model(
        path, path.with_name("link.onnx"), **INTO
    ),
}


@pytest.mark.parametrize("change", READING.values(), ids=READING.keys())
def test_an_edit_that_reads_a_damaged_weight_is_refused_and_changes_nothing(
    path: Path, no_clones: None, change: Callable[[Path], None]
) -> None:
    onnxarchive.save(weights(3), path)
    link, shorter = path.with_name("link.onnx"), path.with_name("shorter.onnx")
    onnxarchive.link(path, link)
    model = onnx.load(link, load_external_data=False)
    del model.graph.initializer[0]
    shorter.write_bytes(model.SerializeToString())
    flip_byte(path, entry_of(path, "w2").data_offset + 50)
    with refused(path, ValueError, r"'w2'.* 0x|no model would use 'w2'"):
        change(path)


@pytest.mark.parametrize("clone", [copying_clone, no_clone])
def test_an_array_that_changes_while_it_is_written_is_noticed_and_changes_nothing(
    path: Path, clone: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    onnxarchive.save(weights(3), path)
    array = np.zeros(300, np.float32)

    def change_and_clone(*files: Any) -> bool:  # when the CRC-32 is known, and nothing is written
        array[7] = 1
        return clone(*files)

    monkeypatch.setattr(clones_and_sync, "clone", change_and_clone)
    with refused(path, ChecksumError, r"'w1'.*0x"):
        replace_tensor(path, "w1", array)
    monkeypatch.undo()


@pytest.mark.usefixtures("no_clones")
def test_a_damaged_header_of_an_asset_is_noticed_before_an_edit_that_could_not_be_rolled_back(
    path: Path,
) -> None:
    onnxarchive.save(weights(2), path, assets={"labels": b"cat"})
    flip_byte(path, entry_of(path, "assets/labels").header_offset + 12)
    with refused(path, ArchiveFormatError, r"'assets/labels': .*ZIP-7"):
        replace_model(path, changed(referring(path), added("w2")))


@pytest.mark.usefixtures("no_clones")
def test_an_open_archive_keeps_its_alignment_while_it_is_edited(path: Path) -> None:
    onnxarchive.save(weights(2), path, alignment=128)
    with onnxarchive.open(path) as archive:
        replace_model(path, changed(referring(path), added("n" * 200, 5000)))
        assert archive.alignment == 128


@pytest.mark.usefixtures("no_clones")
def test_an_archive_is_verified_even_if_it_is_edited_and_changed_back_meanwhile(
    two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = referring(two), changed(referring(two), documented("other" * 500))
    opened = local_file.locked_file
    steps = ["edit", "edit back"]

    def edit_before_the_end(done: int, total: int) -> None:
        if done == 2400 and steps[0] == "edit":
            replace_model(two, other)
            del steps[0]

    def edit_back_and_open(*arguments: Any, **options: Any) -> Any:
        if steps == ["edit back"]:
            steps.clear()
            assert b"other" * 500 in two.read_bytes()
            replace_model(two, model)
        return opened(*arguments, **options)

    monkeypatch.setattr(local_file, "locked_file", edit_back_and_open)
    with onnxarchive.open(two) as archive:
        archive.verify(edit_before_the_end, jobs=1)
    assert not steps


def test_a_damaged_tensor_can_be_replaced(path: Path) -> None:
    onnxarchive.save(weights(3), path)
    flip_byte(path, entry_of(path, "w1").data_offset)
    replace_tensor(path, "w1", onnx.numpy_helper.to_array(weights(3).graph.initializer[1]))
    require(path, saved(weights(3)))


def test_a_damaged_local_header_is_noticed(path: Path) -> None:
    onnxarchive.save(weights(3), path)
    model = referring(path)
    flip_byte(path, entry_of(path, "w1").header_offset)
    calls: list[Callable[[], None]] = [
        lambda: replace_model(path, changed(model, documented("new"))),
        lambda: replace_tensor(path, "w1", np.ones(300, np.float32)),
    ]
    for edit in calls:
        with refused(path, ArchiveFormatError, "'w1'"):
            edit()


# Readers that have the archive open


def bytes_of(archive: onnxarchive.Archive) -> dict[str, bytes]:
    found = {name: array.tobytes() for name, array in archive.tensors.items()}
    return found | {f"assets/{name}": bytes(view) for name, view in archive.assets.items()}


OTHERS: dict[str, Callable[[Path], object]] = {
    "a smaller model": lambda path: replace_model(path, weights(3)),
    "a larger model": partial(edits.document, text="x" * 200_000),
    "metadata": edits.document,
    "compact": lambda path: replace_model(path, weights(2), compact=True),
    "copy": lambda path: replace_model(path, weights(3), copy=True),
    "save": lambda path: onnxarchive.save(weights(1), path, assets={}),
    "a tensor": edits.EDITS["tensors"],
    "assets": lambda path: edits.change_assets(path, {"a": b"new"}, ["labels"]),
}


LONG = changed(weights(3), documented("x" * 100_000))


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("act", OTHERS.values(), ids=OTHERS.keys())
def test_views_of_an_open_archive_stay_right_while_it_is_edited(
    path: Path, no_clones: None, act: Callable[[Path], object], is_first: bool
) -> None:
    """Views that were asked for before a change, and views first asked for after it."""
    onnxarchive.save(LONG, path, assets={"labels": b"cat" * 5000})
    tensors = {tensor.name: tensor.raw_data for tensor in LONG.graph.initializer}
    with onnxarchive.open(path) as archive:
        views: list[Any] = []
        if not is_first:
            views = [archive.tensors["w2"], archive.read(MODEL)]
        act(path)
        assert bytes_of(archive) == {**tensors, "assets/labels": b"cat" * 5000}
        assert archive.model.doc_string == LONG.doc_string
        if not is_first:
            assert onnx.ModelProto.FromString(bytes(views[1])) == archive.model
    if not is_first:
        assert views[0].tobytes() == tensors["w2"]


COPIES: dict[str, Callable[[Path, Path], object]] = {
    "load": lambda path, target: onnx.save(onnxarchive.load(path), target),
    "export": onnxarchive.export,
    "export beside": lambda path, target: onnxarchive.export(path, target, external_data="data"),
    "extract": lambda path, target: onnxarchive.extract(path, target),
}


@pytest.mark.usefixtures("no_clones")
@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES.keys())
def test_an_archive_that_is_edited_after_opening_is_copied_as_it_was_opened(
    path: Path, tmp_path: Path, copy: Callable[[Path, Path], object]
) -> None:
    onnxarchive.save(weights(3), path)
    (tmp_path / "expected").mkdir()
    (tmp_path / "found").mkdir()
    copy(path, tmp_path / "expected" / "copy")
    unlock = locking.unlock
    edits = [partial(replace_model, path, changed(referring(path), documented("x" * 5000)))]

    def unlock_and_edit(descriptor: int) -> None:
        unlock(descriptor)
        while edits:
            edits.pop()()

    with patch.object(locking, "unlock", unlock_and_edit):
        copy(path, tmp_path / "found" / "copy")
    with onnxarchive.open(path) as archive:
        assert archive.model.doc_string == "x" * 5000
    assert contents(tmp_path / "found") == contents(tmp_path / "expected")


def test_the_model_of_an_archive_that_was_changed_is_refused_and_never_crashes(path: Path) -> None:
    """The file is shorter by more than a page, so that a map would end the process."""
    long = changed(weights(3), documented("x" * 3_000_000))
    onnxarchive.save(long, path)
    told = run_python(
        """
import sys
import numpy as np
import onnxarchive
from onnxarchive.files import clones_and_sync

clones_and_sync.clone = lambda source, target: False
path = sys.argv[1]
archive = onnxarchive.open(path)
weight = archive.tensors["w1"]
before = weight.tobytes()
with onnxarchive.edit(path) as edit:
    edit.model.doc_string = ""
try:
    archive.read("__MODEL_PROTO")
except onnxarchive.ArchiveError as error:
    print(error)
assert len(archive.model.doc_string) == 3_000_000
assert weight.tobytes() == before
assert archive.tensors["w2"].shape == (300,)
""",
        path,
    )
    expected = f"{path}: the archive has been changed since it was opened; open it again"
    assert told.splitlines() == [expected]


def test_the_model_of_an_archive_that_was_replaced_can_still_be_read(path: Path) -> None:
    onnxarchive.save(weights(3), path)
    with onnxarchive.open(path) as archive:
        replace_model(path, new_model(), compact=True)
        assert onnx.ModelProto.FromString(bytes(archive.read(MODEL))) == archive.model


def test_edits_leave_no_file_open(two: Path, tmp_path: Path) -> None:
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("what is open cannot be told")
    for edit in edits.EDITS.values():
        edit(two)
    replace_model(two, weights(1), compact=True)
    recover(two)
    for model in (None, weights(3), model_of()):
        with pytest.raises((TypeError, ValueError)):
            replace_model(two, model, size_threshold=-1)
    assert open_below(two.parent) == []
    onnxarchive.save(weights(1), tmp_path / "other.onnxa")
    with onnxarchive.edit(two) as block:
        block.models["other"] = tmp_path / "other.onnxa"
        block.tensors["w0"] = block.tensors["w0"].copy()
    del block
    assert open_below(tmp_path) == []


def test_changes_by_several_threads_follow_one_another(path: Path, way: Way) -> None:
    onnxarchive.save(model_of(), path)

    def work() -> None:
        for _ in range(5):
            with onnxarchive.edit(path, **way) as edit:
                edit.model.ir_version += 1

    with ThreadPoolExecutor(4) as executor:
        for done in [executor.submit(work) for _ in range(4)]:
            done.result()
    expected = model_of()
    expected.ir_version += 20
    require(path, saved(expected))
