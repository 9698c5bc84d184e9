"""One edit of an archive: what it shows, what is written when its block ends, and what is not."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from edits import (
    MODEL,
    Way,
    added,
    changed,
    document,
    documented,
    new_model,
    referring,
    refused,
    require,
    require_kept,
    reversed_tensors,
    untouched,
    weights,
    with_array,
    write_two,
)
from models import copying_clone, entry_of, model_of, open_below, raw_tensor, runnable_model
from pages import needs_smaps
from processes import mapped
from written import saved

import onnxarchive
from onnxarchive.errors import ArchiveError, ArchiveFormatError, LockedError
from onnxarchive.files import clones_and_sync, local_file

posix = pytest.mark.skipif(not hasattr(os, "fork"), reason="a fork is made")
ASSETS = {"labels": b"cat"}
ONES = np.ones(300, np.float32)


@pytest.fixture
def archive(path: Path) -> Path:
    """An archive of `weights(2)` and an asset."""
    onnxarchive.save(weights(2), path, assets=ASSETS)
    return path


def saved_with_asset(*changes: Any) -> bytes:
    return saved(changed(weights(2), *changes), assets=ASSETS)


# What is written


def test_all_changes_are_written_as_one_when_the_block_ends(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []

    def clone(source: local_file.MappedFile, target: int) -> bool:
        written.append(target)
        return copying_clone(source, target)

    monkeypatch.setattr(clones_and_sync, "clone", clone)
    before = archive.read_bytes()
    with onnxarchive.edit(archive) as edit:
        edit.metadata["author"] = "Ada"
        edit.metadata.update(year="1843", place="London")
        del edit.metadata["place"]
        edit.model.doc_string = "new"
        edit.model.graph.node.add(op_type="Neg", input=["a"], output=["b"])
        edit.models["decoder"] = weights(1)
        edit.assets["new"] = b"dog"
        edit.tensors["w1"] = ONES
        assert edit.model is edit.models[""]
        assert dict(edit.metadata) == {"author": "Ada", "year": "1843"}
        assert archive.read_bytes() == before
        assert written == []
    assert len(written) == 1
    expected = with_array(changed(weights(2), documented("new")), 1, ONES)
    onnx.helper.set_model_props(expected, {"author": "Ada", "year": "1843"})
    expected.graph.node.add(op_type="Neg", input=["a"], output=["b"])
    assets = ASSETS | {"new": b"dog"}
    require(archive, saved(expected, models={"decoder": weights(1)}, assets=assets))


@pytest.mark.usefixtures("no_clones")
def test_an_edit_without_a_change_writes_nothing(archive: Path) -> None:
    for options in ({}, {"size_threshold": 1000}, {"convert_attribute": False}):
        with untouched(archive), onnxarchive.edit(archive, **options) as edit:
            edit.model.doc_string = "new"
            edit.model.ClearField("doc_string")
            edit.metadata.update({})
            edit.metadata["a"] = "b"
            edit.metadata.clear()
            edit.model = edit.models[""]
            edit.tensors["w0"] = edit.tensors["w0"].copy()
            edit.assets["labels"] = b"cat"
            edit.assets["new"] = b""
            del edit.assets["new"]


@pytest.mark.parametrize("option", ["compact", "copy"])
def test_an_edit_without_a_change_writes_a_new_file_with_compact_or_copy(
    archive: Path, option: str
) -> None:
    before, inode = archive.read_bytes(), archive.stat().st_ino
    options: dict[str, Any] = {option: True}
    with onnxarchive.edit(archive, **options):
        pass
    require(archive, before)
    assert archive.stat().st_ino != inode


def test_an_archive_of_another_writer_that_was_not_changed_keeps_its_bytes(two: Path) -> None:
    """Its model is not serialized as this library does it: the first field is the last."""
    serialized = changed(referring(two), lambda model: model.metadata_props.add(key="b", value="2"))
    data = serialized.SerializeToString()
    first = b"\x08\x0a"
    assert data.startswith(first)
    write_two(two, data.removeprefix(first) + first)
    assert referring(two) == serialized
    with untouched(two), onnxarchive.edit(two) as edit:
        edit.metadata["b"] = "2"
        edit.model.ir_version += 0


def test_the_metadata_of_an_edit_is_a_mapping(path: Path) -> None:
    model = weights(1)
    onnxarchive.save(model, path)
    with onnxarchive.edit(path) as edit:
        metadata = edit.metadata
        assert (len(metadata), dict(metadata), repr(metadata)) == (0, {}, "{}")
        metadata["author"] = "Ada"
        metadata["größe"] = ""
        assert metadata == edit.metadata == {"author": "Ada", "größe": ""}
        assert repr(metadata) == "{'author': 'Ada', 'größe': ''}"
        assert "author" in metadata
        assert list(metadata) == ["author", "größe"]
        assert metadata.get("missing") is None
        metadata["author"] = "Grace"
        assert metadata.pop("größe") == ""
        assert metadata.setdefault("author", "Alan") == "Grace"
        assert metadata.setdefault("year", "1952") == "1952"
        metadata.update({"year": "1959"}, language="COBOL")
        assert dict(metadata) == {"author": "Grace", "year": "1959", "language": "COBOL"}
        del metadata["year"]
        for use in (
            lambda: metadata["year"],
            lambda: metadata.pop("year"),
            lambda: metadata.__delitem__("year"),
        ):
            with pytest.raises(KeyError, match="year"):
                use()
        edit.model = changed(model, documented("assigned"))
        assert dict(metadata) == {}
        edit.metadata["language"] = "ALGOL"
    with onnxarchive.open(path) as archive:
        assert dict(archive.metadata) == {"language": "ALGOL"}


@pytest.mark.parametrize("value", [5, None, True, 1.5, b"x"])
def test_metadata_takes_strings_only_and_says_so(archive: Path, value: Any) -> None:
    message = f"found {type(value).__name__}; convert it with str"
    with untouched(archive), onnxarchive.edit(archive) as edit:
        with pytest.raises(TypeError, match=rf"expected a string for metadata\['n'\], {message}"):
            edit.metadata["n"] = value
        with pytest.raises(TypeError, match=rf"expected a string for a key of metadata, {message}"):
            edit.metadata.update({value: "n"})


def test_a_key_that_metadata_has_twice_is_there_once_after_a_change(path: Path) -> None:
    model = weights(1)
    for value in ("first", "last"):
        model.metadata_props.add(key="twice", value=value)
    onnxarchive.save(model, path)
    for key, keys in {"other": ["twice", "twice", "other"], "twice": ["twice", "other"]}.items():
        with onnxarchive.edit(path) as edit:
            assert edit.metadata["twice"] == "last"
            edit.metadata[key] = "new"
        assert [pair.key for pair in referring(path).metadata_props] == keys


def test_the_tensors_of_an_edit_are_a_mapping_of_read_only_arrays(archive: Path) -> None:
    with onnxarchive.edit(archive) as edit:
        tensors = edit.tensors
        assert (list(tensors), len(tensors), "w0" in tensors, "x" in tensors) == (
            *(["w0", "w1"], 2),
            *(True, False),
        )
        assert tensors["w1"].tobytes() == weights(2).graph.initializer[1].raw_data
        array = ONES.copy()
        tensors["w0"] = array
        assert not tensors["w0"].flags.writeable
        array[0] = 7  # it is held, not copied
        assert tensors["w0"][0] == 7
        assert list(tensors) == ["w0", "w1"]
        with pytest.raises(TypeError, match="tensors cannot be deleted"):
            del tensors["w0"]
        with pytest.raises(
            ValueError, match=r"'w1' .*: expected FLOAT .*, found INT64 of shape \[\]"
        ):
            tensors["w1"] = 3
        for name in ("x", "labels", "W0"):
            with pytest.raises(KeyError, match=name):
                tensors[name] = ONES
    array[0] = 8  # too late
    expected = ONES.copy()
    expected[0] = 7
    with onnxarchive.open(archive) as opened:
        np.testing.assert_array_equal(opened.tensors["w0"], expected)
    assert onnxarchive.check(archive, full=True) == []


def test_tensors_of_an_assigned_model_are_replaced_in_it(path: Path) -> None:
    onnxarchive.save(weights(1), path)
    small = raw_tensor("small", dims=(3,))
    with onnxarchive.edit(path, compact=True) as edit:
        edit.model = changed(weights(2), lambda model: model.graph.initializer.append(small))
        assert edit.tensors["w1"].tobytes() == weights(2).graph.initializer[1].raw_data
        edit.tensors["w1"] = ONES
        np.testing.assert_array_equal(edit.tensors["w1"], ONES)
        edit.tensors["small"] = np.arange(3, dtype=np.float32)
        assert "w2" not in edit.tensors
        assert not edit.tensors["small"].flags.writeable
        with pytest.raises(KeyError, match="'w2'"):
            edit.tensors["w2"] = ONES
        added("w2", nbytes=1200)(edit.model)
        edit.tensors["w2"] = np.ones(1200, np.uint8)
        assert list(edit.tensors) == ["w0", "w1", "small", "w2"]
    loaded = {it.name: it.raw_data for it in onnxarchive.load(path).graph.initializer}
    assert loaded == {
        "w0": weights(1).graph.initializer[0].raw_data,
        "w1": ONES.tobytes(),
        "small": np.arange(3, dtype=np.float32).tobytes(),
        "w2": b"\x01" * 1200,
    }


def assign_and_remove(edit: onnxarchive.Edit) -> None:
    edit.tensors["w1"] = ONES
    del edit.model.graph.initializer[1]


def assign_and_repeat(edit: onnxarchive.Edit) -> None:
    edit.tensors["w1"] = ONES
    edit.model.graph.initializer.add().CopyFrom(raw_tensor("w1", dims=(300,)))


REFUSED: dict[str, tuple[Callable[[onnxarchive.Edit], object], type[ValueError], str]] = {
    "a tensor is gone": (
        lambda edit: edit.model.graph.initializer.pop(0),
        ValueError,
        "no model would use 'w0'; compact=True",
    ),
    "an assigned tensor is gone": (
        assign_and_remove,
        ValueError,
        r"assigned to edit\.tensors\['w1'\], but the model has no initializer",
    ),
    "an assigned tensor has a double": (
        assign_and_repeat,
        ValueError,
        r"assigned to edit\.tensors\['w1'\], but the model has several initializers",
    ),
    "a new message for a tensor": (
        lambda edit: edit.model.graph.initializer[1].CopyFrom(
            onnx.numpy_helper.from_array(ONES, "w1")
        ),
        ValueError,
        r"would use 'w1'; .*; edit\.tensors\['w1'\] = array",
    ),
    "raw_data beside a reference": (
        lambda edit: setattr(edit.model.graph.initializer[1], "raw_data", ONES.tobytes()),
        ArchiveFormatError,
        r"tensor 'w1' \(graph\.initializer\[1\]\): there is data beside .*, in raw_data; "
        r"edit\.tensors\['w1'\] = array",
    ),
    "float_data beside a reference": (
        lambda edit: edit.model.graph.initializer[1].float_data.extend(ONES),
        ArchiveFormatError,
        r"there is data beside .*, in float_data; edit\.tensors\['w1'\] = array",
    ),
}


@pytest.mark.parametrize(("change", "error", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_change_that_cannot_be_written_is_refused_at_the_end_and_changes_nothing(
    archive: Path,
    change: Callable[[onnxarchive.Edit], object],
    error: type[ValueError],
    message: str,
) -> None:
    compact = change is assign_and_remove
    with refused(archive, error, message), onnxarchive.edit(archive, compact=compact) as edit:
        change(edit)


def test_an_attribute_that_an_edit_does_not_have_cannot_be_assigned(archive: Path) -> None:
    with untouched(archive), onnxarchive.edit(archive) as edit, pytest.raises(AttributeError):
        edit.modle = new_model()  # type: ignore[attr-defined]


def test_new_elements_obey_the_rules_of_their_type(path: Path) -> None:
    truths = onnx.numpy_helper.from_array(np.zeros(2000, bool), "truths")
    onnxarchive.save(model_of(truths), path)
    wrong = onnx.TensorProto(data_type=truths.data_type, dims=[2000], raw_data=b"\2" * 2000)
    with refused(path, ArchiveFormatError, "TENSOR-5"), onnxarchive.edit(path) as edit:
        edit.tensors["truths"] = wrong


def test_a_model_in_onnx_ir_is_changed_and_assigned_and_its_weights_stay(path: Path) -> None:
    ir = pytest.importorskip("onnx_ir")
    import onnxarchive.ir

    onnxarchive.save(runnable_model(), path)
    before = path.read_bytes()
    model = onnxarchive.ir.load(path)
    (x,) = (value for value in model.graph.inputs if value.name == "x")
    x.name = "pixels"
    with onnxarchive.edit(path) as edit:
        edit.model = model
        assert [value.name for value in edit.model.graph.input] == ["pixels"]
    expected = runnable_model()
    expected.graph.input[0].name = expected.graph.node[0].input[0] = "pixels"
    as_onnx_ir_writes_it = ir.to_proto(ir.from_proto(expected))
    assert require_kept(path, before, as_onnx_ir_writes_it) == []


@needs_smaps
@pytest.mark.usefixtures("no_clones")
def test_a_model_in_onnx_ir_is_assigned_without_reading_its_weights(path: Path) -> None:
    pytest.importorskip("onnx_ir")
    import onnxarchive.ir

    def read_nbytes() -> int:
        """The bytes that this process has read by calls, not by maps."""
        return int(Path("/proc/self/io").read_text().split()[1])

    def measure(*_: int) -> None:
        resident.append(mapped(os.getpid(), path).get("Rss", 0))

    nbytes = 16 << 20
    onnxarchive.save(runnable_model(nbytes), path)
    resident: list[int] = []  # bytes of the file in pages that this process has touched
    model = onnxarchive.ir.load(path)
    model.doc_string = "new"
    before = read_nbytes()
    with onnxarchive.edit(path, progress=measure) as edit:
        edit.model = model
    assert read_nbytes() - before < nbytes / 2
    assert max(resident) < nbytes / 2
    weight = model.graph.initializers["layer.0/weight"].const_value
    assert weight is not None
    assert weight.tobytes() == runnable_model(nbytes).graph.initializer[0].raw_data
    measure()
    assert resident[-1] > nbytes / 2


def test_an_assigned_model_is_held_and_written_as_it_is_at_the_end(archive: Path) -> None:
    model = changed(weights(2), documented("assigned"))
    with onnxarchive.edit(archive) as edit:
        edit.model = model
        edit.model = edit.model
        assert edit.model is model
        edit.metadata["author"] = "Ada"
        model.graph.name = "changed"
        assert list(edit.entries) == ["w0", "w1", "assets/labels", MODEL]
    expected = changed(weights(2), documented("assigned"))
    expected.metadata_props.add(key="author", value="Ada")
    expected.graph.name = "changed"
    assert model == expected
    require(archive, saved(expected, assets=ASSETS))


def test_keys_follow_the_order_of_the_model_in_a_compact_edit(path: Path) -> None:
    """Two names that derive the same key change their keys when they change places."""
    model = model_of(*(raw_tensor(name, dims=(300,), seed=ord(name[1])) for name in ("a.b", "a/b")))
    onnxarchive.save(model, path)
    with onnxarchive.edit(path, compact=True) as edit:
        reversed_tensors(edit.model)
    require(path, saved(changed(model, reversed_tensors)))


# Discarded changes


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, GeneratorExit, SystemExit])
def test_an_exception_discards_every_change(
    archive: Path, error: type[BaseException], way: Way
) -> None:
    with (  # noqa: PT012
        untouched(archive),
        pytest.raises(error),
        onnxarchive.edit(archive, **way) as edit,
    ):
        edit.metadata["author"] = "Ada"
        edit.model = new_model()
        edit.assets["a"] = b"b"
        edit.tensors["w0"] = ONES
        raise error
    document(archive, timeout=0)  # nothing is locked any more
    require(archive, saved_with_asset(documented("new")))


def test_a_generator_that_is_closed_or_collected_in_the_block_writes_nothing(archive: Path) -> None:
    def editing() -> Iterator[None]:
        with onnxarchive.edit(archive) as edit:
            edit.metadata["author"] = "Ada"
            yield

    before = archive.read_bytes()
    for end in (lambda it: it.close(), lambda it: None):
        generator = editing()
        next(generator)
        end(generator)
        del generator
        require(archive, before)
    document(archive, timeout=0)


def test_an_edit_that_has_ended_cannot_be_used(archive: Path) -> None:
    with onnxarchive.edit(archive) as edit:
        model, models, metadata = edit.model, edit.models, edit.metadata
        tensors, assets = edit.tensors, edit.assets
    uses: list[Callable[[], object]] = [
        lambda: edit.model,
        lambda: edit.models,
        lambda: edit.metadata,
        lambda: edit.tensors,
        lambda: edit.assets,
        lambda: edit.entries,
        lambda: setattr(edit, "model", model),
        lambda: models[""],
        lambda: models.__setitem__("a", weights(1)),
        lambda: models.__delitem__("a"),
        lambda: models.rename("a", "b"),
        lambda: list(models),
        lambda: len(models),
        lambda: metadata.get("a"),
        lambda: metadata.update(a="b"),
        lambda: list(metadata),
        lambda: tensors["w0"],
        lambda: tensors.__setitem__("w0", ONES),
        lambda: tensors.__delitem__("w0"),
        lambda: list(tensors),
        lambda: "w0" in tensors,
        lambda: assets["labels"],
        lambda: assets.__setitem__("a", b""),
        lambda: assets.__setitem__("a", archive.with_name("other")),
        lambda: assets.__delitem__("labels"),
        lambda: list(assets),
        lambda: "labels" in assets,
    ]
    for use in uses:
        with pytest.raises(ValueError, match="this edit has ended; begin another one with"):
            use()
    assert repr(edit) == f"<onnxarchive.Edit {str(archive)!r} (ended)>"


# Archives that may be edited, and refusals


def test_only_a_local_file_is_edited() -> None:
    data = saved(weights(1))
    for target in ("https://example.com/m.onnxa", data):
        message = r"expected a local file, found .*onnxarchive\.download .*onnxarchive\.save"
        with (
            pytest.raises(onnxarchive.UnsupportedFeatureError, match=message),
            onnxarchive.edit(target),  # type: ignore[arg-type]
        ):
            pass


def test_another_mode_of_open_is_refused(archive: Path) -> None:
    for mode in ("w", "a", "rb", "", "r+"):
        message = f"expected mode 'r', found {mode!r}; onnxarchive.edit changes .* save and Writer"
        with pytest.raises(ValueError, match=message.replace("+", r"\+")):
            onnxarchive.open(archive, mode=mode)  # type: ignore[arg-type]


@pytest.mark.parametrize("compact", [False, True])
def test_a_model_above_the_limit_is_refused_at_the_beginning_and_before_it_is_written(
    two: Path, compact: bool
) -> None:
    nbytes = entry_of(two, MODEL).nbytes
    with pytest.raises(ArchiveFormatError, match="max_model_nbytes"):
        document(two, max_model_nbytes=nbytes - 1)
    before = two.read_bytes()
    with (
        pytest.raises(ArchiveFormatError, match="max_model_nbytes") as caught,
        onnxarchive.edit(two, max_model_nbytes=nbytes + 9, compact=compact) as edit,
    ):
        edit.model = changed(weights(1 if compact else 2), documented("x" * nbytes))
    assert (caught.value.rule, caught.value.path) == ("MODEL-2", str(two))
    del caught  # its traceback holds the file
    require(two, before)
    assert open_below(two.parent) == []


def test_an_edit_continues_after_the_process_changes_its_directory(
    two: Path, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in ("new", "newer"):
        monkeypatch.chdir(two.parent)
        with onnxarchive.edit(two.name, **way) as edit:
            monkeypatch.chdir("/")
            edit.model.doc_string = text
        require(two, saved(changed(weights(2), documented(text))))


# Waiting for an edit


def test_readers_wait_for_an_edit_or_see_nothing_of_it(
    archive: Path,
) -> None:
    before = referring(archive)
    calls: list[Callable[[], object]] = [
        lambda: document(archive, timeout=0),
        lambda: document(archive, timeout=0, copy=True),
        lambda: onnxarchive.recover(archive, timeout=0),
    ]
    with ThreadPoolExecutor(1) as executor:
        with onnxarchive.edit(archive) as edit:
            for call in calls:
                with pytest.raises(LockedError) as caught:
                    executor.submit(call).result()
                assert caught.value.path == str(archive)
            with executor.submit(onnxarchive.open, archive, timeout=0).result() as other:
                assert other.model == before
            waiting = executor.submit(referring, archive)
            edit.model.doc_string = "new"
        assert waiting.result().doc_string == "new"


def test_a_thread_does_not_wait_for_its_own_edit(archive: Path) -> None:
    link = archive.with_name("link.onnxa")
    calls: list[Callable[[], object]] = [
        lambda: onnxarchive.open(archive),
        lambda: onnxarchive.open(link),
        lambda: onnxarchive.load(archive),
        lambda: onnxarchive.check(archive),
        lambda: onnxarchive.convert(archive, archive.with_name("other")),
        lambda: onnxarchive.export(archive, archive.with_name("other")),
        lambda: onnxarchive.recover(archive, timeout=None),
        lambda: onnxarchive.save(new_model(), archive),
        lambda: document(archive, timeout=None),
        lambda: document(archive, copy=True),
        lambda: document(link, copy=True),
        lambda: onnxarchive.transform(archive, archive, lambda model: model, weights="loaded"),
    ]
    before = archive.read_bytes()
    with onnxarchive.edit(archive) as edit:
        link.symlink_to(archive)
        for call in calls:
            with pytest.raises(LockedError, match="finish the edit first") as caught:
                call()
            assert caught.value.path in (str(archive), str(link))
            assert archive.read_bytes() == before
        link.unlink()
        assert edit.tensors["w0"].shape == (300,)
        assert edit.assets["labels"] == b"cat"
        edit.model.doc_string = "new"
    require(archive, saved_with_asset(documented("new")))
    onnxarchive.open(archive, timeout=0).close()


@pytest.mark.parametrize("written", ["model", "tensor"])
def test_a_progress_function_cannot_change_the_archive_that_is_edited(
    archive: Path, way: Way, written: str
) -> None:
    refused = []

    def progress(done: int, total: int) -> None:
        with pytest.raises(LockedError, match="finish the edit first") as caught:
            document(archive, "other")
        refused.append(caught.value.path)

    with onnxarchive.edit(archive, progress=progress, **way) as edit:
        if written == "model":
            edit.model.doc_string = "new"
        else:
            edit.tensors["w0"] = ONES
    assert set(refused) == {str(archive)}
    expected = with_array(weights(2), 0, ONES)
    if written == "model":
        expected = changed(weights(2), documented("new"))
    require(archive, saved(expected, assets=ASSETS))


def test_an_edit_that_ends_in_another_thread_writes_nothing(archive: Path) -> None:
    block = onnxarchive.edit(archive)
    edit = block.__enter__()
    edit.model.doc_string = "new"
    with ThreadPoolExecutor(1) as executor, refused(archive, ArchiveError, "another thread"):
        executor.submit(block.__exit__, None, None, None).result()
    document(archive, timeout=0)


@pytest.mark.parametrize("is_replaced", [True, False])
def test_an_edit_of_a_file_that_another_program_replaces_or_removes_is_an_error(
    archive: Path, tmp_path: Path, is_replaced: bool
) -> None:
    (tmp_path / "other").write_bytes(b"of another program")
    block = onnxarchive.edit(archive)
    edit = block.__enter__()
    edit.tensors["w0"] = np.zeros_like(edit.tensors["w0"])
    archive.unlink()
    if is_replaced:
        (tmp_path / "other").rename(archive)
    with pytest.raises(ArchiveError, match="replaced or removed during the edit") as caught:
        block.__exit__(None, None, None)
    assert caught.value.path == str(archive)
    assert not archive.exists() or archive.read_bytes() == b"of another program"


# Forks


def ends_well(call: Callable[[], object]) -> bool:
    """Whether a call returns in a fork of this process, and does so within a minute."""
    process = os.fork()
    if not process:
        signal.alarm(60)
        try:
            call()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(process, 0)[1] == 0


@posix
@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_a_fork_that_leaves_the_block_writes_nothing_and_keeps_the_lock(
    archive: Path, error: type[BaseException] | None, way: Way
) -> None:
    before = archive.read_bytes()

    def leave(block: Any) -> None:
        if error is None:
            with pytest.raises(ArchiveError, match="is a fork of"):
                block.__exit__(None, None, None)
        else:
            assert not block.__exit__(error, error(), None)
        assert archive.read_bytes() == before

    block = onnxarchive.edit(archive, **way)
    edit = block.__enter__()
    edit.model.doc_string = "new"
    assert ends_well(lambda: leave(block))
    assert archive.read_bytes() == before
    with ThreadPoolExecutor(1) as executor, pytest.raises(LockedError):
        executor.submit(onnxarchive.recover, archive, timeout=0).result()
    block.__exit__(None, None, None)
    require(archive, saved_with_asset(documented("new")))
