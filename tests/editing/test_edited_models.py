"""Edits of archives of several models: each is replaced, added, removed and renamed by its id."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from edits import (
    Way,
    added,
    change_model,
    changed,
    documented,
    refused,
    remove_model,
    rename_model,
    replace_model,
    replace_tensor,
    with_array,
)
from models import raw_tensor
from several_models import A, B, C, entries_of, floats, keys_of, of, require_loads
from steps import steps
from written import saved

import onnxarchive
from onnxarchive import ArchiveFormatError, ModelNotFoundError, TensorNotFoundError
from onnxarchive.files import undo

D = raw_tensor("", dims=(300,), seed=7).raw_data
ENCODER, DECODER = of(a=A, b=B), of(z=A, c=C)


@pytest.fixture
def pair(path: Path) -> Path:
    """An archive of two models that share a tensor."""
    onnxarchive.save(ENCODER, path, models={"decoder": DECODER}, assets={"x": b"y"})
    return path


def weights_of(path: Path) -> bytes:
    """All of an archive before its first model."""
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        first = next(it for it in archive.infolist() if it.filename.startswith("__"))
    return data[: first.header_offset]


def require_kept(path: Path, before: bytes, models: dict[str, onnx.ModelProto]) -> None:
    """Requires that no earlier entry was moved, and that the archive has these models."""
    assert weights_of(path).startswith(before)
    require_loads(path, models)
    assert os.listdir(path.parent) == [path.name]


def raw_models(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist() if name.startswith("__")}


# Replacing and adding


def test_a_model_is_replaced_and_the_others_keep_their_bytes(pair: Path, way: Way) -> None:
    before, models = weights_of(pair), raw_models(pair)
    new = changed(DECODER, documented("new"), added("n"))
    replace_model(pair, new, name="decoder", **way)
    require_kept(pair, before, {"": ENCODER, "decoder": new})
    assert raw_models(pair)["__MODEL_PROTO"] == models["__MODEL_PROTO"]
    replace_model(pair, changed(ENCODER, documented("new")), **way)
    require_kept(pair, before, {"": changed(ENCODER, documented("new")), "decoder": new})


def test_a_model_of_a_new_id_is_added(pair: Path, way: Way) -> None:
    before = weights_of(pair)
    replace_model(pair, of(x=C, y=A, own=D), name="a", **way)
    require_kept(pair, before, {"": ENCODER, "decoder": DECODER, "a": of(x=C, y=A, own=D)})
    assert keys_of(pair, "a") == {"x": "c", "y": "a", "own": "own"}
    assert entries_of(pair.read_bytes())[-4:] == [
        *("own", "__MODEL_PROTO_a", "__MODEL_PROTO_decoder", "__MODEL_PROTO")
    ]


def test_a_model_is_added_to_an_archive_of_one(path: Path, way: Way) -> None:
    onnxarchive.save(ENCODER, path)
    before = weights_of(path)
    replace_model(path, DECODER, name="decoder", **way)
    require_kept(path, before, {"": ENCODER, "decoder": DECODER})
    assert path.read_bytes() == saved(ENCODER, models={"decoder": DECODER})
    remove_model(path, "decoder", compact=True, **way)
    assert path.read_bytes() == saved(ENCODER)


def test_a_model_that_refers_to_the_archive_is_added(pair: Path, way: Way, tmp_path: Path) -> None:
    before = weights_of(pair)
    with onnxarchive.open(pair, model="decoder") as archive:
        replace_model(pair, archive.model, name="past", **way)
        assert keys_of(pair, "past") == {"z": "a", "c": "c"}
        with pytest.raises(ValueError, match="external tensor of an unknown archive, not of this"):
            replace_model(pair, changed(archive.model), name="other", **way)
    require_kept(pair, before, {"": ENCODER, "decoder": DECODER, "past": DECODER})
    onnx.save(of(x=A, w=D), tmp_path / "past.onnx")
    replace_model(pair, tmp_path / "past.onnx", name="from_file", **way)
    assert keys_of(pair, "from_file") == {"x": "a", "w": "w"}


def test_the_n_th_equal_tensor_of_an_added_model_takes_the_n_th_equal_entry(path: Path) -> None:
    onnxarchive.save(of(a=A, a2=A), path)
    replace_model(path, of(x=A, y=A, z=A), name="three")
    assert keys_of(path, "three") == {"x": "a", "y": "a2", "z": "z"}
    # A tensor keeps the entry that it names; another one does not take that.
    with onnxarchive.open(path) as archive:
        archive.model.graph.initializer[0].CopyFrom(floats("new", A))
        replace_model(path, archive.model, name="two")
    assert keys_of(path, "two") == {"new": "a", "a2": "a2"}
    assert onnxarchive.check(path, full=True) == []


def test_an_entry_that_no_model_names_any_more_is_removed_only_on_request(pair: Path) -> None:
    edits: list[Callable[..., None]] = [
        partial(replace_model, pair, of(z=A), name="decoder"),
        partial(change_model, pair, lambda _: of(z=A), name="decoder"),
    ]
    for edit in edits:
        with refused(pair, ValueError, r"would use 'c'; compact=True"):
            edit()
    edits[0](compact=True)
    assert pair.read_bytes() == saved(ENCODER, models={"decoder": of(z=A)}, assets={"x": b"y"})
    with pytest.raises(ValueError, match="would use 'b'"):
        replace_model(pair, of(n=D))  # of a, which the decoder has, nothing is said


@pytest.mark.parametrize("id", ["A", "a-b", "é", "a" * 65])
def test_an_invalid_model_id_is_refused(pair: Path, id: str) -> None:
    edits: list[Callable[[], None]] = [
        partial(replace_model, pair, of(w=A), name=id),
        partial(rename_model, pair, "decoder", id),
    ]
    for edit in edits:
        with refused(pair, ValueError, "of at most 64 bytes"):
            edit()


def test_a_model_gets_the_options_of_the_one_that_it_replaces_or_of_all(path: Path) -> None:
    small = of(s=A[:40])
    onnxarchive.save(of(a=A), path, models={"b": small}, size_threshold=8, alignment=4096)
    replace_model(path, of(t=B[:40]), name="c")
    with onnxarchive.open(path, model="c") as archive:
        assert list(archive.tensors.refs) == ["t"]
        assert {entry.data_offset % 4096 for entry in archive.entries.values()} == {0}
    replace_model(path, of(s=A[:40], n=B[:80]), name="b")
    assert keys_of(path, "b") == {"s": "s", "n": "n"}
    replace_model(path, of(a=A, m=C[:80]))
    with onnxarchive.open(path) as archive:
        assert list(archive.tensors.refs) == ["a"]


@pytest.mark.parametrize("name", ["", "decoder"])
def test_a_shared_tensor_that_one_model_reshapes_gets_an_entry_of_its_own(
    pair: Path, way: Way, name: str
) -> None:
    def reshape(model: onnx.ModelProto) -> None:
        model.graph.initializer[0].dims[:] = [30, 10]

    before, models = weights_of(pair), {"": ENCODER, "decoder": DECODER}
    with onnxarchive.edit(pair, model=name, **way) as edit:
        reshape(edit.model)
    require_kept(pair, before, models | {name: changed(models[name], reshape)})
    # A tensor of one model alone keeps its entry.
    with onnxarchive.edit(pair, model=name, **way) as edit:
        edit.model.graph.initializer[1].dims[:] = [10, 30]
    assert keys_of(pair, name)["c" if name else "b"] == ("c" if name else "b")
    assert onnxarchive.check(pair, full=True) == []


# Removing and renaming


def test_a_model_is_removed_and_no_weight_is_moved(pair: Path, way: Way) -> None:
    before = weights_of(pair)
    replace_model(pair, of(x=C, y=B), name="past", **way)
    remove_model(pair, "decoder", **way)
    require_kept(pair, before, {"": ENCODER, "past": of(x=C, y=B)})
    remove_model(pair, "past", compact=True, **way)
    assert pair.read_bytes() == saved(ENCODER, assets={"x": b"y"})


def test_removing_a_model_removes_weights_that_no_other_model_has(pair: Path, way: Way) -> None:
    with onnxarchive.edit(pair, **way) as edit:
        del edit.models["decoder"]
    assert pair.read_bytes() == saved(ENCODER, assets={"x": b"y"})
    assert edit.nbytes_written == pair.stat().st_size


def test_a_tensor_of_a_removed_and_of_a_changed_model_is_removed_only_on_request(
    pair: Path,
) -> None:
    def edit(compact: bool = False) -> None:
        with onnxarchive.edit(pair, compact=compact) as edit:
            del edit.models["decoder"]
            edit.model = of(b=B)

    with refused(pair, ValueError, r"would use 'a', 'c'; compact=True"):
        edit()
    edit(compact=True)
    assert pair.read_bytes() == saved(of(b=B), assets={"x": b"y"})


def test_an_edit_says_how_many_bytes_of_the_file_it_wrote(pair: Path, way: Way) -> None:
    with onnxarchive.edit(pair, **way) as edit:
        assert edit.nbytes_written == 0
    assert edit.nbytes_written == (pair.stat().st_size if way.get("copy") else 0)
    before = weights_of(pair)
    with onnxarchive.edit(pair) as edit:
        edit.models["past"] = of(x=C, y=B)
    require_kept(pair, before, {"": ENCODER, "decoder": DECODER, "past": of(x=C, y=B)})
    assert edit.nbytes_written == pair.stat().st_size - len(before)


def test_a_model_is_renamed_and_its_bytes_stay(pair: Path, way: Way) -> None:
    before, models = weights_of(pair), raw_models(pair)
    replace_model(pair, of(y=B), name="m", **way)
    for old, new in (("decoder", "z9"), ("z9", "a"), ("a", "decoder")):
        rename_model(pair, old, new, **way)
        require_kept(pair, before, {"": ENCODER, "m": of(y=B), new: DECODER})
    assert raw_models(pair)["__MODEL_PROTO_decoder"] == models["__MODEL_PROTO_decoder"]


def test_the_default_model_is_neither_removed_nor_renamed(pair: Path) -> None:
    error = "the default model, '', is neither removed nor renamed; assign another model"
    for edit in (partial(remove_model, pair, ""), partial(rename_model, pair, "", "x")):
        with refused(pair, ValueError, error):
            edit()
    for new, message in (
        ("", "expected .* as the new id, got ''"),
        ("decoder", "there is a model with the id 'decoder'; choose another id"),
    ):
        with refused(pair, ValueError, message):
            rename_model(pair, "decoder", new)


def test_a_model_that_the_archive_lacks_is_not_edited(pair: Path) -> None:
    edits: list[Callable[[], None]] = [
        partial(remove_model, pair, "x"),
        partial(rename_model, pair, "x", "y"),
        partial(change_model, pair, lambda model: model, name="x"),
        partial(replace_tensor, pair, "w", np.ones(3), model="x"),
    ]
    for edit in edits:
        with refused(pair, ModelNotFoundError, "the id 'x', only '', 'decoder'") as caught:
            edit()
        assert caught.value.path == str(pair)


# Tensors


ONES = np.ones(300, np.float32)


@pytest.mark.parametrize("model", ["", "decoder"])
def test_a_tensor_that_models_share_is_replaced_in_one_of_them(
    pair: Path, way: Way, model: str
) -> None:
    before, models = weights_of(pair), {"": ENCODER, "decoder": DECODER}
    with onnxarchive.open(pair) as opened:
        view = opened.tensor_by_key("a")
        replace_tensor(pair, "z" if model else "a", ONES, model=model, **way)
        assert view.tobytes() == A
    require_kept(pair, before, models | {model: with_array(models[model], 0, ONES)})


@pytest.mark.parametrize("model", ["", "decoder"])
def test_a_tensor_of_one_model_is_replaced_in_place(pair: Path, way: Way, model: str) -> None:
    replace_tensor(pair, "c" if model else "b", ONES, model=model, **way)
    models = {"": ENCODER, "decoder": DECODER}
    models[model] = with_array(models[model], 1, ONES)
    assert pair.read_bytes() == saved(models.pop(""), models=models, assets={"x": b"y"})
    with pytest.raises(TensorNotFoundError):
        replace_tensor(pair, "z" if not model else "b", ONES, model=model, **way)


def test_an_added_model_does_not_share_an_entry_that_the_same_edit_gives_other_bytes(
    pair: Path, way: Way
) -> None:
    third = of(old=B, same=A, new=ONES.tobytes())
    with onnxarchive.edit(pair, **way) as edit:
        edit.tensors["b"] = ONES
        edit.models["third"] = third
    models = {"": of(a=A, b=ONES.tobytes()), "decoder": DECODER, "third": third}
    require_loads(pair, models)
    assert keys_of(pair, "third") == {"old": "old", "same": "a", "new": "new"}


def test_sharing_tensors_no_longer_takes_steps_in_proportion_to_their_number(path: Path) -> None:
    def steps_of(count: int) -> int:
        model = of(**{f"w{i}": i.to_bytes(4, "little") for i in range(count)})
        onnxarchive.save(model, path, models={"two": model}, size_threshold=0)

        def edit() -> None:
            with onnxarchive.edit(path) as edit:
                for i in range(count):
                    edit.tensors[f"w{i}"] = np.full(1, -1 - i, np.float32)

        return steps(edit)

    steps_of(1)  # what is done once
    assert steps_of(1600) < 5 * steps_of(400)


# In an edit


def test_an_edit_opened_for_a_further_model_changes_that_model(pair: Path, no_clones: None) -> None:
    before = weights_of(pair)
    with onnxarchive.edit(pair, model="decoder") as edit:
        edit.metadata["author"] = "Ada"
        edit.model.doc_string = "of the decoder"
        assert [it.name for it in edit.model.graph.initializer] == ["z", "c"]
        added("n")(edit.model)
        edit.tensors["c"] = np.frombuffer(D, np.float32)
        assert edit.tensors["c"].tobytes() == D
        assert edit.models[""].doc_string == ""
        edit.models[""] = changed(ENCODER, documented("default"))
        edit.models["third"] = of(q=A)
        edit.models.rename("decoder", "renamed")
        assert edit.model is edit.models["renamed"]
        assert edit.metadata["author"] == "Ada"
        edit.models.rename("third", "fourth")
        assert list(edit.models) == ["", "fourth", "renamed"]
    expected = changed(DECODER, documented("of the decoder"), added("n"))
    expected.metadata_props.add(key="author", value="Ada")
    expected.graph.initializer[1].CopyFrom(floats("c", D))
    assert weights_of(pair)[: len(before)] != before  # the elements of c
    for model, full in (("renamed", expected), ("fourth", of(q=A))):
        assert onnxarchive.load(pair, model=model) == full
    assert onnxarchive.load(pair) == changed(ENCODER, documented("default"))
    assert onnxarchive.check(pair, full=True) == []
    assert os.listdir(pair.parent) == [pair.name]


def test_a_model_that_was_deleted_is_not_found(pair: Path) -> None:
    with onnxarchive.edit(pair, model="decoder", compact=True) as edit:
        del edit.models["decoder"]
        assert list(edit.models) == [""]
        for use in (
            lambda: edit.model,
            lambda: edit.metadata["author"],
            lambda: edit.tensors.__setitem__("c", ONES),
            lambda: edit.models.pop("decoder"),
            lambda: edit.models.rename("decoder", "other"),
        ):
            with pytest.raises(ModelNotFoundError, match="the id 'decoder', only ''"):
                use()
    with pytest.raises(ModelNotFoundError), onnxarchive.edit(pair, model="decoder"):
        pass
    assert pair.read_bytes() == saved(ENCODER, assets={"x": b"y"})


def test_a_model_that_takes_the_id_of_a_deleted_one_is_shown_with_its_own_tensors(
    pair: Path,
) -> None:
    replace_model(pair, of(own=D), name="third")
    with onnxarchive.edit(pair, model="decoder", compact=True) as edit:
        del edit.models["decoder"]
        edit.models.rename("third", "decoder")
        assert list(edit.tensors) == ["own"]
        assert edit.tensors["own"].tobytes() == D
    require_loads(pair, {"": ENCODER, "decoder": of(own=D)})


def test_a_model_of_the_edit_that_gets_another_id_is_copied(pair: Path) -> None:
    before = weights_of(pair)
    with onnxarchive.edit(pair) as edit:
        edit.models["past"] = edit.models["decoder"]
        added("n")(edit.models["past"])
        assert edit.models["past"] is not edit.models["decoder"]
    models = {"": ENCODER, "decoder": DECODER, "past": changed(DECODER, added("n"))}
    require_kept(pair, before, models)


# Limits


def test_an_end_that_is_too_large_for_an_undo_log_is_written_to_a_new_file(
    pair: Path, no_clones: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_nbytes = pair.stat().st_size - len(weights_of(pair))
    inode = pair.stat().st_ino
    monkeypatch.setattr(undo, "MAX_END_NBYTES", end_nbytes)
    replace_model(pair, changed(DECODER, documented("x" * 10)), name="decoder")
    assert pair.stat().st_ino == inode
    replace_model(pair, DECODER, name="decoder")
    assert pair.stat().st_ino != inode
    require_loads(pair, {"": ENCODER, "decoder": DECODER})


def test_an_edit_refuses_models_above_its_limit(pair: Path) -> None:
    total = sum(map(len, raw_models(pair).values()))
    with onnxarchive.edit(pair, max_model_nbytes=total + 100) as edit:
        edit.model.doc_string = "x" * 90
    for compact in (False, True):
        with (
            pytest.raises(ArchiveFormatError, match=f"at most {total + 100} bytes in all"),
            onnxarchive.edit(pair, max_model_nbytes=total + 100, compact=compact) as edit,
        ):
            edit.models["third"] = of(w=A)
    with onnxarchive.open(pair) as archive:
        assert list(archive.models) == ["", "decoder"]
