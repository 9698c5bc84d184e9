"""An archive that is open for edits: assignments, metadata, and renaming."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from edits import (
    MODEL,
    changed,
    documented,
    entry,
    referring,
    removed,
    require,
    reversed_tensors,
    weights,
)
from models import copying_clone, model_of, open_below, raw_tensor, run_model, runnable_model
from written import saved

import onnxarchive
from onnxarchive.archive import rewriting
from onnxarchive.archive.editable import EditableArchive
from onnxarchive.archive.editing import change_model
from onnxarchive.errors import ArchiveFormatError
from onnxarchive.storage import files


def test_assigning_a_model_changes_the_archive_at_once(path: Path, no_clones: None) -> None:
    onnxarchive.save(weights(2), path, assets={"labels": b"cat"})
    with onnxarchive.open(path, mode="r+") as archive:
        assert isinstance(archive, EditableArchive)
        view = archive.tensors["w1"]
        model = archive.model
        model.graph.node.add(op_type="Neg", input=["a"], output=["b"])
        assert referring(path).graph.node == []
        archive.model = model
        assert referring(path) == archive.model
        assert list(archive.entries) == ["w0", "w1", "assets/labels", MODEL]
        expected = changed(
            weights(2), lambda model: model.graph.node.extend(archive.model.graph.node)
        )
        require(path, saved(expected, assets={"labels": b"cat"}))
        with pytest.raises(ValueError, match="compact=True"):
            archive.model = changed(archive.model, removed(0))
        require(path, saved(expected, assets={"labels": b"cat"}))
        archive.replace_model(changed(archive.model, removed(0)), compact=True)
        expected.graph.initializer.pop(0)
        require(path, saved(expected, assets={"labels": b"cat"}))
        assert list(archive.entries) == ["w1", "assets/labels", MODEL]
        assert list(archive.tensors) == ["w1"]
        assert bytes(archive.assets["labels"]) == b"cat"
        assert bytes(archive.read(MODEL)) == archive.model.SerializeToString(deterministic=True)
        archive.verify()
        np.testing.assert_array_equal(archive.tensors["w1"].view(np.uint8), view.view(np.uint8))


def test_tensors_that_were_asked_for_before_follow_their_names(path: Path) -> None:
    """Two names that derive the same key change their keys when they change places."""
    model = model_of(*(raw_tensor(name, dims=(300,), seed=ord(name[1])) for name in ("a.b", "a/b")))
    onnxarchive.save(model, path)
    with onnxarchive.open(path, mode="r+") as archive:
        tensors = archive.tensors
        before = {name: array.tobytes() for name, array in tensors.items()}
        keys = {name: tensors.key(name) for name in tensors}
        archive.replace_model(changed(archive.model, reversed_tensors), compact=True)
        assert {name: archive.tensors.key(name) for name in tensors} != keys
        assert {name: array.tobytes() for name, array in archive.tensors.items()} == before
        assert {name: array.tobytes() for name, array in tensors.items()} == before


@pytest.mark.filterwarnings("ignore:.*changed in memory and not assigned")
def test_what_is_done_to_the_model_that_was_read_is_not_written_by_other_changes(
    path: Path,
) -> None:
    onnxarchive.save(weights(2), path)
    changes: list[Callable[[EditableArchive], object]] = [
        lambda archive: archive.metadata.update(a="b"),
        lambda archive: setattr(archive, "doc_string", "new"),
        lambda archive: archive.rename(),
    ]
    for change in changes:
        with onnxarchive.open(path, mode="r+") as archive:
            archive.model.graph.name = "changed in memory alone"
            change(archive)
            assert referring(path).graph.name == "graph"
    expected = changed(weights(2), documented("new"))
    onnx.helper.set_model_props(expected, {"a": "b"})
    require(path, saved(expected))


def test_the_words_of_a_model_are_set_and_removed(path: Path) -> None:
    onnxarchive.save(weights(1), path)
    before = path.read_bytes()
    with onnxarchive.open(path, mode="r+") as archive:
        for field in ("doc_string", "producer_name", "producer_version"):
            assert getattr(archive, field) == ""
            setattr(archive, field, f"größer {field}")
            assert getattr(archive, field) == f"größer {field}"
            assert getattr(referring(path), field) == f"größer {field}"
            with pytest.raises(TypeError):
                setattr(archive, field, 3)
        assert archive.model.HasField("doc_string")
        for field in ("doc_string", "producer_name", "producer_version"):
            setattr(archive, field, "")
            assert not archive.model.HasField(field)
    require(path, before)


@pytest.mark.parametrize("value", [5, None, True, 1.5, b"x"])
def test_metadata_and_texts_take_strings_only_and_say_so(path: Path, value: Any) -> None:
    onnxarchive.save(weights(1), path)
    before = path.read_bytes()
    with onnxarchive.open(path, mode="r+") as archive:
        found = f"found {type(value).__name__}; convert it with str"
        with pytest.raises(TypeError, match=rf"expected a string for metadata\['n'\], {found}"):
            archive.metadata["n"] = value
        with pytest.raises(TypeError, match=rf"expected a string for a key of metadata, {found}"):
            archive.metadata.update({value: "n"})
        with pytest.raises(TypeError, match=rf"expected a string for domain, {found}"):
            archive.domain = value
    assert path.read_bytes() == before


def test_metadata_of_an_archive_that_is_read_say_how_they_are_changed(path: Path) -> None:
    onnxarchive.save(weights(1), path)
    with onnxarchive.open(path) as archive:
        assert (dict(archive.metadata), repr(archive.metadata)) == ({}, "{}")
        with pytest.raises(TypeError, match="mode='r\\+'"):
            archive.metadata["n"] = "x"  # type: ignore[index]


def test_metadata_are_a_mapping_whose_changes_are_written(path: Path) -> None:
    model = weights(1)
    onnxarchive.save(model, path)
    with onnxarchive.open(path, mode="r+") as archive:
        metadata = archive.metadata
        assert (len(metadata), dict(metadata), repr(metadata)) == (0, {}, "{}")
        metadata["author"] = "Ada"
        metadata["größe"] = ""
        assert referring_metadata(path) == {"author": "Ada", "größe": ""} == dict(metadata)
        assert metadata == archive.metadata
        assert repr(metadata) == "{'author': 'Ada', 'größe': ''}"
        assert "author" in metadata
        assert list(metadata) == ["author", "größe"]
        assert metadata.get("missing") is None
        metadata["author"] = "Grace"
        assert referring_metadata(path) == {"author": "Grace", "größe": ""}
        assert metadata.pop("größe") == ""
        assert metadata.setdefault("author", "Alan") == "Grace"
        assert metadata.setdefault("year", "1952") == "1952"
        assert referring_metadata(path) == {"author": "Grace", "year": "1952"}
        metadata.update({"year": "1959"}, language="COBOL")
        assert referring_metadata(path) == {
            "author": "Grace",
            "year": "1959",
            "language": "COBOL",
        }
        del metadata["year"]
        with pytest.raises(KeyError, match="year"):
            metadata["year"]
        with pytest.raises(KeyError, match="year"):
            metadata.pop("year")
        with pytest.raises(KeyError, match="year"):
            del metadata["year"]
        with pytest.raises(TypeError):
            metadata["year"] = 1959  # type: ignore[assignment]
        assert referring_metadata(path) == {"author": "Grace", "language": "COBOL"}
        metadata.clear()
        assert dict(metadata) == {}
    require(path, saved(model))


def referring_metadata(path: Path) -> dict[str, str]:
    return {pair.key: pair.value for pair in referring(path).metadata_props}


def test_a_key_that_is_there_twice_is_one_after_it_is_changed(path: Path) -> None:
    model = weights(1)
    for value in ("first", "last"):
        model.metadata_props.add(key="twice", value=value)
    onnxarchive.save(model, path)
    with onnxarchive.open(path, mode="r+") as archive:
        assert dict(archive.metadata) == {"twice": "last"}
        archive.metadata["other"] = "value"
    assert [pair.key for pair in referring(path).metadata_props] == ["twice", "twice", "other"]
    with onnxarchive.open(path, mode="r+") as archive:
        archive.metadata["twice"] = "new"
    assert [pair.key for pair in referring(path).metadata_props] == ["twice", "other"]
    assert referring_metadata(path) == {"twice": "new", "other": "value"}


def test_several_pairs_are_written_in_one_go_and_what_changes_nothing_not_at_all(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = 0

    def counted(source: files.MappedFile, target: int) -> bool:
        nonlocal written
        written += 1
        return copying_clone(source, target)

    monkeypatch.setattr(rewriting, "clone", counted)
    onnxarchive.save(weights(1), path)
    with onnxarchive.open(path, mode="r+") as archive:
        archive.metadata.update(a="1", b="2", c="3")
        assert written == 1
        archive.metadata.update(a="1", b="2")
        archive.metadata["c"] = "3"
        assert written == 1
        archive.metadata.clear()
        assert written == 2
        archive.metadata.clear()
    change_model(path, lambda model: model)
    assert written == 2


def test_inputs_and_outputs_are_renamed(path: Path) -> None:
    onnxarchive.save(runnable_model(), path)
    with onnxarchive.open(path, mode="r+") as archive:
        archive.rename(inputs={"x": "pixels"}, outputs={"y": "größe"})
        assert [value.name for value in archive.model.graph.input] == ["pixels"]
        before = path.read_bytes()
        with pytest.raises(ValueError, match=r"\(inputs: 'pixels'\), found 'x'"):
            archive.rename(inputs={"x": "z"})
        with pytest.raises(ValueError, match="found 'product'"):
            archive.rename(outputs={"größe": "product"})
        archive.rename()
        require(path, before)
    onnx.checker.check_model(onnxarchive.load(path), full_check=True)
    pytest.importorskip("onnxruntime")
    given = np.ones((2, 1024), np.float32)
    (found,) = onnxarchive.session(path).run(["größe"], {"pixels": given})
    onnx.save(runnable_model(), path.with_name("before.onnx"))
    np.testing.assert_array_equal(found, run_model(path.with_name("before.onnx"), x=given)[0])


@pytest.mark.parametrize("compact", [False, True])
def test_a_model_above_the_limit_is_refused_when_opened_and_before_it_is_written(
    path: Path, compact: bool
) -> None:
    onnxarchive.save(weights(2), path)
    nbytes = entry(path, MODEL).nbytes
    with pytest.raises(ArchiveFormatError, match="max_model_nbytes"):
        onnxarchive.open(path, mode="r+", max_model_nbytes=nbytes - 1)
    before = path.read_bytes()
    with onnxarchive.open(path, mode="r+", max_model_nbytes=nbytes + 9) as archive:
        archive.model = weights(2)
        larger = changed(weights(1 if compact else 2), documented("x" * nbytes))
        with pytest.raises(ArchiveFormatError, match="max_model_nbytes") as caught:
            archive.replace_model(larger, compact=compact)
        assert (caught.value.rule, caught.value.path) == ("MODEL-2", str(path))
        del caught  # whose traceback holds the file
        require(path, before)
        archive.metadata["a"] = ""  # which still fits
        del archive.metadata["a"]
    assert open_below(path.parent) == []


def test_another_mode_is_refused(path: Path) -> None:
    onnxarchive.save(weights(1), path)
    for mode in ("w", "a", "rb", ""):
        with pytest.raises(ValueError, match=f"^expected mode 'r' or 'r\\+', found '{mode}'$"):
            onnxarchive.open(path, mode=mode)  # type: ignore[call-overload]


def test_an_archive_is_edited_wherever_the_process_goes(
    path: Path, way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    onnxarchive.save(weights(2), path)
    monkeypatch.chdir(path.parent)
    with onnxarchive.open(path.name, mode="r+") as archive:
        monkeypatch.chdir("/")
        for text in ("once", "again"):
            with archive.edit(**way) as model:
                model.doc_string = text
            assert archive.doc_string == text
    require(path, saved(changed(weights(2), documented("again"))))


# Changes that would be lost silently


def test_a_model_that_was_changed_and_not_assigned_is_warned_of(path: Path) -> None:
    onnxarchive.save(weights(2), path)
    archive = onnxarchive.open(path, mode="r+")
    archive.model.doc_string = "lost"
    with pytest.warns(UserWarning, match="changed in memory and not assigned") as warned:
        archive.close()
    assert warned[0].filename == __file__
    assert str(path) in str(warned[0].message)
    archive.close()  # warns no more


def test_nothing_is_warned_of_where_nothing_is_lost(path: Path) -> None:
    onnxarchive.save(weights(2), path)
    with onnxarchive.open(path, mode="r+") as archive:
        model = archive.model
        model.doc_string = "assigned"
        archive.model = model
        assert archive.model.doc_string == "assigned"
    with onnxarchive.open(path) as reader:
        reader.model.doc_string = "nobody would think that it is saved"
