from __future__ import annotations

import io
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import (
    attribute,
    every_tensor,
    external,
    flip_byte,
    full_model,
    model_of,
    model_protos,
    node,
    open_below,
    raw_tensor,
    run_model,
    run_python,
    runnable_model,
    sparse_tensor,
    string_tensor,
    tensor_protos,
)
from onnx import TensorProto

import onnxarchive
from onnxarchive import files, rewriting
from onnxarchive.edit import EditableArchive, change_model, replace_model, replace_tensor
from onnxarchive.errors import (
    ArchiveError,
    ArchiveFormatError,
    ChecksumError,
    TensorNotFoundError,
)
from onnxarchive.recovery import Recovery, recover
from onnxarchive.zipformat.records import LocalHeader

MODEL = "__MODEL_PROTO"
NAME = "ein Möbel 重み.onnxa"

Change = Callable[[onnx.ModelProto], object]

posix = pytest.mark.skipif(os.name == "nt", reason="links and modes are POSIX's")


def saved(model: onnx.ModelProto, **options: Any) -> bytes:
    """What `save` makes of a model."""
    target = io.BytesIO()
    onnxarchive.save(model, target, **options)
    return target.getvalue()


def changed(model: onnx.ModelProto, *changes: Change) -> onnx.ModelProto:
    """A copy of a model with changes."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for change in changes:
        change(copy)
    return copy


def referring(path: Path) -> onnx.ModelProto:
    """The model of an archive; its external tensors refer to it."""
    with onnxarchive.open(path) as archive:
        return archive.model


def weights(count: int, *more: TensorProto) -> onnx.ModelProto:
    """A model with initializers `w0`, `w1`, ... of 1,200 bytes each, which go outside."""
    return model_of(*(raw_tensor(f"w{i}", dims=(300,), seed=i) for i in range(count)), *more)


def added(name: str, nbytes: int = 2000, seed: int = 77) -> Change:
    tensor = raw_tensor(name, TensorProto.UINT8, (nbytes,), seed)
    return lambda model: model.graph.initializer.append(tensor)


def removed(index: int) -> Change:
    return lambda model: model.graph.initializer.pop(index)


def renamed(index: int, name: str) -> Change:
    def change(model: onnx.ModelProto) -> None:
        model.graph.initializer[index].name = name

    return change


def reversed_tensors(model: onnx.ModelProto) -> None:
    backwards = list(model.graph.initializer)[::-1]
    del model.graph.initializer[:]
    model.graph.initializer.extend(backwards)


def documented(text: str) -> Change:
    def change(model: onnx.ModelProto) -> None:
        model.doc_string = text

    return change


def entries_of(data: bytes) -> list[tuple[str, bytes]]:
    """Names and bytes of all entries but the model, in order."""
    view = memoryview(data)
    with zipfile_of(data) as archive:
        found = []
        for info in archive.infolist():
            header = view[info.header_offset : info.header_offset + 30]
            lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(
                header[28:30], "little"
            )
            start = info.header_offset + 30 + lengths
            found.append((info.filename, bytes(view[start : start + info.file_size])))
    assert found[-1][0] == MODEL
    return found[:-1]


def zipfile_of(data: bytes) -> Any:
    import zipfile

    return zipfile.ZipFile(io.BytesIO(data))


def require(path: Path, expected: bytes) -> None:
    """That an archive has these very bytes, keeps all rules, and nothing is left beside it."""
    assert path.read_bytes() == expected
    assert onnxarchive.check(path, full=True) == []
    assert os.listdir(path.parent) == [path.name]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "ein Verzeichnis"
    folder.mkdir()
    return folder / NAME


def copying_clone(source: files.MappedFile, target: BinaryIO) -> bool:
    target.write(source.read(0, source.size))
    target.flush()
    return True


@pytest.fixture(params=["in its place", "on a clone", "with copy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The three ways in which the end of a file is written; what they take as arguments."""
    cloning = request.param == "on a clone"
    monkeypatch.setattr(
        rewriting, "clone", copying_clone if cloning else lambda source, target: False
    )
    return {"copy": request.param == "with copy"}


@pytest.fixture
def no_clones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that does not share blocks, on which files are changed in their place."""
    monkeypatch.setattr(rewriting, "clone", lambda source, target: False)


@pytest.fixture
def own_path() -> Iterator[Path]:
    """A path whose directories everybody may go through, and which belongs to `nobody`."""
    if not hasattr(os, "geteuid"):
        pytest.skip("permissions are POSIX's")
    with tempfile.TemporaryDirectory() as folder:
        if not os.geteuid():
            os.chown(folder, 65534, 65534)
        yield Path(folder, NAME)


@pytest.fixture
def nobody(own_path: Path) -> Iterator[None]:
    """The test is not root's, who may do everything."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


# What is written is what `save` would write


LOCAL_CHANGES: dict[str, Change] = {
    "doc_string": documented("x" * 5000),
    "metadata": lambda model: onnx.helper.set_model_props(model, {"a": "b", "ü": ""}),
    "a node": lambda model: model.graph.node.add(op_type="Neg", input=["a"], output=["b"]),
    "no nodes": lambda model: model.graph.ClearField("node"),
    "a small tensor": lambda model: model.graph.initializer.append(raw_tensor("small")),
    "a string tensor": lambda model: model.graph.initializer.append(string_tensor("s")),
    "an empty tensor": lambda model: model.graph.initializer.append(raw_tensor("e", dims=(0,))),
    "nothing": lambda model: None,
    "opset": lambda model: model.opset_import.add(domain="test", version=3),
}


@pytest.mark.parametrize("change", LOCAL_CHANGES.values(), ids=LOCAL_CHANGES.keys())
def test_a_new_model_is_written_as_save_writes_it(
    path: Path, way: dict[str, Any], change: Change
) -> None:
    model = weights(3, raw_tensor("inside"), string_tensor("strings"))
    assets = {"labels": b"cat\ndog", "a/b": bytes(5000)}
    onnxarchive.save(model, path, assets=assets)
    replace_model(path, changed(referring(path), change), **way)
    require(path, saved(changed(model, change), assets=assets))
    # And so it is where the model that is given holds all of its tensors itself.
    replace_model(path, model, **way)
    require(path, saved(model, assets=assets))


@pytest.mark.parametrize("alignment", [64, 4096])
@pytest.mark.parametrize("nbytes", [1024, 5000, 70_000])
def test_new_tensors_behind_the_others_are_added(
    path: Path, way: dict[str, Any], nbytes: int, alignment: int
) -> None:
    model = weights(3)
    onnxarchive.save(model, path, alignment=alignment)
    before = path.read_bytes()
    start = entry(path, MODEL).header_offset
    more = [added("w3", nbytes), added("W3", 2 * nbytes, seed=5)]
    replace_model(path, changed(referring(path), *more), **way)
    require(path, saved(changed(model, *more), alignment=alignment))
    assert path.read_bytes()[:start] == before[:start]
    assert list(onnxarchive.open(path).tensors) == ["w0", "w1", "w2", "w3", "W3"]


MOVES: dict[str, Change] = {
    "the first is gone": removed(0),
    "the last is gone": removed(2),
    "all are gone": lambda model: model.graph.ClearField("initializer"),
    "another name": renamed(1, "other"),
    "another name of the last": renamed(2, "other"),
    "another order": reversed_tensors,
    "one before the others": lambda model: model.graph.initializer.insert(
        0, raw_tensor("new", dims=(300,))
    ),
    "other bytes": lambda model: model.graph.initializer[1].CopyFrom(
        raw_tensor("w1", dims=(300,), seed=99)
    ),
    "another size": lambda model: model.graph.initializer[1].CopyFrom(
        raw_tensor("w1", dims=(301,), seed=1)
    ),
}


@pytest.mark.parametrize("change", MOVES.values(), ids=MOVES.keys())
def test_what_moves_entries_is_refused_unless_compact(path: Path, change: Change) -> None:
    model = weights(3)
    onnxarchive.save(model, path, assets={"labels": b"cat"})
    before = path.read_bytes()
    new = changed(referring(path), change)
    with pytest.raises(
        ValueError, match=r"compact=True \(--compact\) writes the whole archive anew$"
    ):
        replace_model(path, new)
    require(path, before)
    replace_model(path, new, compact=True)
    require(path, saved(changed(model, change), assets={"labels": b"cat"}))


def test_a_tensor_before_assets_is_refused_unless_compact(path: Path) -> None:
    onnxarchive.save(weights(1), path, assets={"labels": b"cat"})
    with pytest.raises(ValueError, match="expected entry 'assets/labels' where it is") as caught:
        replace_model(path, weights(2))
    assert str(caught.value) == (
        f"{path}: expected entry 'assets/labels' where it is, since nothing may be moved, found "
        "tensor 'w1' (graph.initializer[1]) in its place, in the order of the model; compact=True "
        "(--compact) writes the whole archive anew"
    )
    replace_model(path, weights(2), compact=True)
    require(path, saved(weights(2), assets={"labels": b"cat"}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (removed(1), "where it is, found no tensor of it to be stored under 'w1'; compact"),
        (
            renamed(1, "other"),
            "where it is, found no tensor of it to be stored under 'w1'; compact",
        ),
        (
            lambda model: model.graph.ClearField("initializer"),
            "to be stored under 'w0', 'w1', 'w2' and 2 more; compact",
        ),
        (
            MOVES["other bytes"],
            "expected entry 'w1' where it is, since nothing may be moved, found other contents of",
        ),
        (
            reversed_tensors,
            "expected entry 'w0' where it is, since nothing may be moved, found "
            "tensor 'w4' (graph.initializer[0]) in its place, in the order of the model; compact",
        ),
    ],
    ids=["gone", "renamed", "many gone", "other bytes", "another order"],
)
def test_the_error_says_what_would_move(path: Path, change: Change, message: str) -> None:
    onnxarchive.save(weights(5), path)
    with pytest.raises(ValueError, match="compact=True") as caught:
        replace_model(path, changed(referring(path), change))
    assert str(caught.value).startswith(f"{path}: expected ")
    assert message in str(caught.value)


def entry(path: Path, name: str) -> Any:
    with onnxarchive.open(path) as archive:
        return archive.entries[name]


@st.composite
def structural_changes(draw: st.DrawFn) -> list[Change]:
    """Changes of a model of any kind, most of which leave its tensors as they are."""

    def at(index: int, tensors: Any) -> int:
        return index % len(tensors)

    def remove(model: onnx.ModelProto) -> None:
        if model.graph.initializer:
            del model.graph.initializer[at(index, model.graph.initializer)]

    def rename(model: onnx.ModelProto) -> None:
        if model.graph.initializer:
            model.graph.initializer[at(index, model.graph.initializer)].name = "renamed"

    def empty(model: onnx.ModelProto) -> None:
        model.graph.ClearField("node")

    index = draw(st.integers(0, 2))
    tensor = draw(tensor_protos())
    choices: list[Change] = [
        documented(draw(st.text(max_size=5))),
        lambda model: model.graph.initializer.append(tensor),
        lambda model: model.graph.node.append(node(attribute("t", t=tensor))),
        lambda model: onnx.helper.set_model_props(model, {"key": "value"}),
        remove,
        rename,
        reversed_tensors,
        empty,
        lambda model: model.ClearField("functions"),
        lambda model: model.ClearField("training_info"),
    ]
    return draw(st.lists(st.sampled_from(choices), max_size=2))


def options_of_save() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {"size_threshold": st.sampled_from([0, 1, 30, 1024]), "convert_attribute": st.booleans()}
    )


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    model=model_protos(),
    changes=structural_changes(),
    before_options=options_of_save(),
    new_options=st.none() | options_of_save(),
    alignment=st.sampled_from([64, 4096]),
    assets=st.dictionaries(st.sampled_from(["a", "b/c", "ü"]), st.binary(max_size=9), max_size=2),
    is_referring=st.booleans(),
    kind=st.sampled_from(["in its place", "on a clone", "with copy"]),
)
def test_any_change_of_any_model_gives_what_save_makes_or_is_refused(
    tmp_path: Path,
    model: onnx.ModelProto,
    changes: list[Change],
    before_options: dict[str, Any],
    new_options: dict[str, Any] | None,
    alignment: int,
    assets: dict[str, bytes],
    is_referring: bool,
    kind: str,
) -> None:
    path = tmp_path / "model.onnxa"
    rest: dict[str, Any] = {"alignment": alignment, "assets": assets}
    onnxarchive.save(model, path, **before_options, **rest)
    before = path.read_bytes()
    complete = onnxarchive.load(path) if is_referring else model
    new = changed(referring(path) if is_referring else model, *changes)
    if new_options is None and changed(model, *changes) != model:
        new_options = before_options  # which cannot be told for tensors that are new
    stated = new_options or {}
    expected = saved(changed(complete, *changes), **(new_options or before_options), **rest)
    old_entries, new_entries = entries_of(before), entries_of(expected)
    with pytest.MonkeyPatch.context() as patch:
        cloning = kind == "on a clone"
        patch.setattr(
            rewriting, "clone", copying_clone if cloning else lambda source, target: False
        )
        if new_entries[: len(old_entries)] == old_entries:
            replace_model(path, new, copy=kind == "with copy", **stated)
        else:
            with pytest.raises(ValueError, match="compact=True"):
                replace_model(path, new, copy=kind == "with copy", **stated)
            require(path, before)
            replace_model(path, new, compact=True, **stated)
    require(path, expected)


@pytest.mark.parametrize("convert_attribute", [False, True])
@pytest.mark.parametrize("size_threshold", [0, 1024, 4096])
def test_a_model_with_tensors_in_every_place_keeps_them_where_they_are(
    path: Path, size_threshold: int, convert_attribute: bool
) -> None:
    options: dict[str, Any] = {
        "size_threshold": size_threshold,
        "convert_attribute": convert_attribute,
    }
    model = full_model()
    onnxarchive.save(model, path, **options)
    replace_model(path, changed(referring(path), documented("new")))
    require(path, saved(changed(model, documented("new")), **options))
    # Without saying how the archive was made, a model that holds all its tensors is the same.
    replace_model(path, model)
    require(path, saved(model, **options))


def test_another_threshold_moves_tensors_into_the_model_and_out_again(path: Path) -> None:
    model = weights(3)
    onnxarchive.save(model, path)
    replace_model(path, referring(path), size_threshold=1201, compact=True)
    require(path, saved(model, size_threshold=1201))
    assert list(referring(path).graph.initializer) == list(model.graph.initializer)
    replace_model(path, referring(path))  # which leaves them where they are
    require(path, saved(model, size_threshold=1201))
    replace_model(path, referring(path), size_threshold=1200)  # and these are new
    require(path, saved(model))


def test_tensors_of_attributes_go_out_of_the_model_if_that_is_asked_for(path: Path) -> None:
    model = weights(1)
    model.graph.node.append(node(attribute("t", t=raw_tensor("t", dims=(300,), seed=9))))
    model.graph.sparse_initializer.append(sparse_tensor("s", 1, 300))
    onnxarchive.save(model, path)
    replace_model(path, referring(path))
    require(path, saved(model))
    replace_model(path, referring(path), convert_attribute=True, compact=True)
    require(path, saved(model, convert_attribute=True))
    replace_model(path, referring(path))
    require(path, saved(model, convert_attribute=True))
    replace_model(path, referring(path), convert_attribute=False, compact=True)
    require(path, saved(model))


def test_the_threshold_of_new_tensors_is_that_of_the_archive(path: Path) -> None:
    large, small = raw_tensor("large", dims=(1024,)), raw_tensor("small", dims=(1000,))
    onnxarchive.save(model_of(large, small), path, size_threshold=4096)
    replace_model(path, model_of(large, small, raw_tensor("new", dims=(999,))))
    require(
        path, saved(model_of(large, small, raw_tensor("new", dims=(999,))), size_threshold=4096)
    )
    onnxarchive.save(model_of(raw_tensor("w")), path, size_threshold=0)
    replace_model(path, model_of(raw_tensor("w"), raw_tensor("new")))
    require(path, saved(model_of(raw_tensor("w"), raw_tensor("new")), size_threshold=0))
    onnxarchive.save(model_of(raw_tensor("w")), path)
    replace_model(path, model_of(raw_tensor("w"), raw_tensor("new", dims=(256,))))
    require(path, saved(model_of(raw_tensor("w"), raw_tensor("new", dims=(256,)))))


def test_small_tensors_that_are_new_stay_in_the_model(path: Path) -> None:
    onnxarchive.save(weights(2), path)
    small = raw_tensor("small", TensorProto.UINT8, (1023,))
    replace_model(path, weights(2, small))
    require(path, saved(weights(2, small)))


def test_tensors_that_exchange_their_entries_are_moved(path: Path) -> None:
    onnxarchive.save(weights(2), path)
    before = path.read_bytes()
    exchanged = changed(referring(path), renamed(0, "w1"), renamed(1, "w0"), reversed_tensors)
    with pytest.raises(ValueError, match=r"entry 'w0' where it is, .* found other contents of it"):
        replace_model(path, exchanged)
    require(path, before)
    replace_model(path, exchanged, compact=True)
    require(path, saved(changed(weights(2), renamed(0, "w1"), renamed(1, "w0"), reversed_tensors)))


def test_a_model_without_any_tensors_is_replaced(path: Path, way: dict[str, Any]) -> None:
    onnxarchive.save(model_of(), path)
    for text in ("longer" * 1000, "short", ""):
        replace_model(path, changed(model_of(), documented(text)), **way)
        require(path, saved(changed(model_of(), documented(text))))
    replace_model(path, weights(2), **way)
    require(path, saved(weights(2)))
    replace_model(path, model_of(), compact=True, **way)
    require(path, saved(model_of()))


def test_empty_tensors_are_kept_and_told_apart(path: Path) -> None:
    model = model_of(*(raw_tensor(name, dims=(0,)) for name in "abc"))
    onnxarchive.save(model, path, size_threshold=0)
    replace_model(path, changed(referring(path), documented("new")))
    require(path, saved(changed(model, documented("new")), size_threshold=0))
    with pytest.raises(ValueError, match="stored under 'b'; compact"):
        replace_model(path, changed(referring(path), removed(1)))
    replace_model(path, changed(referring(path), reversed_tensors), compact=True)
    require(path, saved(changed(model, documented("new"), reversed_tensors), size_threshold=0))


def test_one_entry_for_two_tensors_becomes_two(path: Path) -> None:
    onnxarchive.save(weights(1), path)
    twice = changed(
        referring(path),
        lambda model: model.graph.initializer.add().CopyFrom(model.graph.initializer[0]),
        renamed(1, "again"),
    )
    replace_model(path, twice)
    again = raw_tensor("again", dims=(300,), seed=0)
    require(path, saved(weights(1, again)))


def test_the_same_change_again_changes_no_byte(path: Path, no_clones: None) -> None:
    onnxarchive.save(weights(2), path)
    replace_model(path, changed(referring(path), documented("new")))
    before, inode = path.read_bytes(), path.stat().st_ino
    replace_model(path, referring(path))
    require(path, before)
    assert path.stat().st_ino == inode


def test_a_changed_model_runs(path: Path) -> None:
    pytest.importorskip("onnxruntime")
    onnxarchive.save(runnable_model(), path)
    given = np.ones((2, 1024), np.float32)
    (before,) = onnxarchive.session(path).run(None, {"x": given})
    new = referring(path)
    new.graph.node.add(op_type="Neg", input=["y"], output=["z"])
    new.graph.output[0].name = "z"
    replace_model(path, new)
    (after,) = onnxarchive.session(path).run(["z"], {"x": given})
    np.testing.assert_array_equal(after, -before)


# Archives in another order than that of `save`


def written(path: Path, *names: str, asset: bool = False) -> onnx.ModelProto:
    """An archive whose tensors are in the order of `names`, and the model, in that of `weights`."""
    model = weights(3)
    arrays = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    with onnxarchive.Writer(path) as writer:
        for name in names:
            writer.add(name, arrays[name])
        if asset:
            writer.add_asset("labels", b"cat")
        writer.finish(model)
    return model


@pytest.mark.parametrize("asset", [False, True])
def test_an_archive_written_tensor_by_tensor_keeps_its_order(
    path: Path, way: dict[str, Any], asset: bool
) -> None:
    written(path, "w2", "w0", "w1", asset=asset)
    before = entries_of(path.read_bytes())
    new = changed(referring(path), documented("new"), added("w3"))
    replace_model(path, new, **way)
    assert onnxarchive.check(path, full=True) == []
    data = path.read_bytes()
    after = entries_of(data)
    assert after[: len(before)] == before
    assert [name for name, _ in after[len(before) :]] == ["w3"]
    expected = changed(weights(3), documented("new"), added("w3"))
    assert onnxarchive.load(path) == expected
    # Nothing else is in it: no gaps, no dead bytes.
    with onnxarchive.open(path) as archive:
        end = max(item.data_offset + item.nbytes for item in archive.entries.values())
    assert data[end : end + 4] == b"PK\x01\x02"
    replace_model(path, referring(path), **way)
    assert path.read_bytes() == data


def test_compacting_an_archive_written_tensor_by_tensor_gives_the_order_of_save(
    path: Path,
) -> None:
    model = written(path, "w2", "w0", "w1")
    before = path.read_bytes()
    with pytest.raises(ValueError, match="stored under 'w1'; compact"):
        replace_model(path, changed(referring(path), removed(1)))
    require(path, before)
    replace_model(path, changed(referring(path), removed(1)), compact=True)
    require(path, saved(changed(model, removed(1))))


def test_keys_that_are_not_those_of_save_stay(path: Path) -> None:
    arrays = {
        f"w{i}": onnx.numpy_helper.to_array(raw_tensor(f"w{i}", dims=(300,), seed=i))
        for i in range(2)
    }
    model = model_of(*(external(raw_tensor(name, dims=(300,)), f"of_{name}") for name in arrays))
    model.graph.node.append(node(attribute("t", t=external(raw_tensor("", dims=(300,)), "of_t"))))
    with onnxarchive.Writer(path) as writer:
        for name in ("of_w1", "of_t", "of_w0"):
            writer.add(name, arrays.get(name[3:], arrays["w0"]))
        writer.finish(model)
    keys = [name for name, _ in entries_of(path.read_bytes())]
    assert keys == ["of_w1", "of_t", "of_w0"]
    complete = onnxarchive.load(path)
    # The name of the new tensor would give a key that is taken, and not by a tensor of its name.
    replace_model(path, changed(referring(path), documented("new"), added("of_w1")))
    assert [name for name, _ in entries_of(path.read_bytes())] == [*keys, "of_w1_2"]
    assert onnxarchive.check(path, full=True) == []
    assert onnxarchive.load(path) == changed(complete, documented("new"), added("of_w1"))


# The models that are given


def test_a_model_file_with_its_data_in_the_archive_is_taken(path: Path, tmp_path: Path) -> None:
    onnxarchive.save(weights(2), path)
    with onnxarchive.open(path) as archive:
        (tmp_path / MODEL).write_bytes(archive.read(MODEL))
    new = onnx.load(tmp_path / MODEL, load_external_data=False)
    new.doc_string = "new"
    (tmp_path / "a model.onnx").write_bytes(new.SerializeToString())
    for model_file in (tmp_path / "a model.onnx", str(tmp_path / "a model.onnx")):
        replace_model(path, model_file)
        require(path, saved(changed(weights(2), documented("new"))))


def test_a_link_that_was_changed_is_taken(path: Path) -> None:
    onnxarchive.save(weights(2), path)
    link = path.with_name("link.onnx")
    onnxarchive.link(path, link)
    new = onnx.load(link, load_external_data=False)
    new.doc_string = "new"
    new.graph.initializer.append(raw_tensor("w2", dims=(300,), seed=2))
    onnx.save(new, link)
    replace_model(path, link)
    link.unlink()
    require(path, saved(changed(weights(3), documented("new"))))
    assert not referring(path).metadata_props


def test_a_link_to_the_old_archive_no_longer_fits(path: Path) -> None:
    onnxarchive.save(weights(2), path)
    link = path.with_name("link.onnx")
    onnxarchive.link(path, link)
    replace_model(path, changed(weights(2), documented("new")))
    assert onnxarchive.check_link(link) != []
    onnxarchive.link(path, link)
    assert onnxarchive.check_link(link) == []


def test_a_link_to_another_archive_is_taken_if_its_tensors_are_equal(path: Path) -> None:
    onnxarchive.save(weights(2), path)
    other, link = path.with_name("other.onnxa"), path.with_name("link.onnx")
    new = changed(weights(2), documented("new"))
    onnxarchive.save(new, other)
    onnxarchive.link(other, link)
    replace_model(path, link)
    assert path.read_bytes() == saved(new)
    different = changed(new, MOVES["other bytes"])
    onnxarchive.save(different, other)  # the same places in another file
    onnxarchive.link(other, link)
    with pytest.raises(ValueError, match=r"entry 'w1' where it is, .* found other contents of it"):
        replace_model(path, link)
    assert path.read_bytes() == saved(new)
    replace_model(path, link, compact=True)
    assert path.read_bytes() == saved(different)


def test_a_model_file_with_its_data_in_it_is_taken_if_that_is_equal(
    path: Path, tmp_path: Path
) -> None:
    onnxarchive.save(weights(2), path)
    before = path.read_bytes()
    onnx.save(changed(weights(2), documented("new"), added("w2", 3000)), tmp_path / "full.onnx")
    replace_model(path, tmp_path / "full.onnx")
    require(path, saved(changed(weights(2), documented("new"), added("w2", 3000))))
    path.write_bytes(before)
    other = changed(weights(2), MOVES["other bytes"])
    onnx.save(other, tmp_path / "full.onnx")
    with pytest.raises(ValueError, match=r"entry 'w1' where it is, .* found other contents of it"):
        replace_model(path, tmp_path / "full.onnx")
    require(path, before)
    replace_model(path, tmp_path / "full.onnx", compact=True)
    require(path, saved(other))


@pytest.mark.parametrize("together", [True, False])
def test_a_model_file_with_its_data_beside_it_is_taken(
    path: Path, tmp_path: Path, together: bool
) -> None:
    onnxarchive.save(weights(2), path)
    new = changed(weights(3), documented("new"))
    model_file = tmp_path / "model.onnx"
    onnx.save(
        changed(new),
        model_file,
        save_as_external_data=True,
        all_tensors_to_one_file=together,
        size_threshold=0,
        location="weights.bin" if together else None,
    )
    replace_model(path, model_file)
    require(path, saved(new))


def test_another_archive_is_no_model_but_what_is_exported_from_it(
    path: Path, tmp_path: Path
) -> None:
    onnxarchive.save(weights(2), path, assets={"labels": b"cat"})
    before = path.read_bytes()
    other = changed(weights(2), documented("new"))
    onnxarchive.save(other, tmp_path / "other.onnxa", assets={"other": b"dog"})
    # Its writer may wait for this archive, as a model, at the same time.
    with pytest.raises(onnxarchive.ArchiveFormatError, match=r"other.onnxa: expected a .onnx or a"):
        replace_model(path, tmp_path / "other.onnxa")
    require(path, before)
    onnxarchive.export(tmp_path / "other.onnxa", tmp_path / "other.onnx")
    replace_model(path, tmp_path / "other.onnx")
    require(path, saved(other, assets={"labels": b"cat"}))


@pytest.mark.parametrize(
    "form", [str, Path, lambda path: path.parent / ".." / path.parent.name / path.name]
)
def test_the_archive_itself_is_no_model_for_it(path: Path, form: Callable[[Path], Any]) -> None:
    onnxarchive.save(weights(2), path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="expected another file than the input"):
        replace_model(path, form(path))
    require(path, before)


def test_the_model_given_is_not_changed(path: Path) -> None:
    onnxarchive.save(weights(2), path)
    for model in (referring(path), weights(2), changed(referring(path), removed(0))):
        before = model.SerializeToString(deterministic=True)
        replace_model(path, model, compact=True, size_threshold=2000)
        assert model.SerializeToString(deterministic=True) == before
        onnxarchive.save(weights(2), path)


@pytest.mark.parametrize("model", [None, 3, {}, model_of().graph, b"bytes"])
def test_another_kind_of_model_is_refused(path: Path, model: Any) -> None:
    onnxarchive.save(weights(1), path)
    before = path.read_bytes()
    message = f"^expected an onnx.ModelProto or the path of a .onnx, found {type(model)}$"
    with pytest.raises(TypeError, match=message):
        replace_model(path, model)
    require(path, before)


def broken_models() -> dict[str, tuple[onnx.ModelProto, str]]:
    tensor = raw_tensor("w0", dims=(300,))
    no_graph = onnx.ModelProto(ir_version=10)
    both = external(tensor, "w0")
    both.raw_data = tensor.raw_data
    return {
        "an unknown key": (
            model_of(external(tensor, "nowhere")),
            "tensor 'w0' (graph.initializer[0]): expected a key of the archive as the location of "
            "external data, found 'nowhere'; give a new tensor its bytes as raw_data",
        ),
        "an unknown key of a small tensor": (
            model_of(external(raw_tensor("tiny", dims=(1,)), "nowhere")),
            "expected a key of the archive as the location of external data, found 'nowhere'",
        ),
        "the model itself": (
            model_of(external(tensor, MODEL)),
            "expected a key of the archive as the location of external data",
        ),
        "an asset": (
            model_of(external(tensor, "assets/labels")),
            "expected a key of the archive as the location of external data",
        ),
        "another shape": (
            model_of(external(raw_tensor("w0", dims=(299,)), "w0")),
            "expected the whole of entry 'w0', which is 1200 bytes, found a shape and type of 1196 "
            "bytes, offset None and length None",
        ),
        "a part": (
            model_of(external(raw_tensor("w0", dims=(299,)), "w0", offset=4)),
            "expected the whole of entry 'w0'",
        ),
        "another offset": (
            model_of(external(tensor, "w0", offset=4)),
            "expected the whole of entry 'w0', which is 1200 bytes, found a shape and type of 1200 "
            "bytes, offset 4 and length None",
        ),
        "another length": (
            model_of(external(tensor, "w0", offset=0, length=1196)),
            "bytes, offset 0 and length 1196",
        ),
        "too few bytes": (
            model_of(TensorProto(name="w0", data_type=1, dims=[300], raw_data=bytes(1199))),
            "1199",
        ),
        "no graph": (no_graph, "no graph"),
        "data in two places": (model_of(both), ""),
    }


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("kind", broken_models())
def test_a_model_that_no_archive_could_have_is_refused(
    path: Path, kind: str, compact: bool
) -> None:
    onnxarchive.save(weights(1), path, assets={"labels": bytes(1200)})
    before = path.read_bytes()
    model, message = broken_models()[kind]
    if kind == "data in two places":  # of which the archive's are taken
        replace_model(path, model, compact=compact)
        require(path, before)
        return
    with pytest.raises(ArchiveFormatError) as caught:
        replace_model(path, model, compact=compact)
    assert caught.value.path == str(path)
    assert message in str(caught.value)
    require(path, before)


def test_a_model_file_that_names_an_unknown_key_is_refused(path: Path, tmp_path: Path) -> None:
    onnxarchive.save(weights(1), path)
    before = path.read_bytes()
    bad = model_of(external(raw_tensor("w0", dims=(300,)), "nowhere"))
    (tmp_path / "bad.onnx").write_bytes(bad.SerializeToString())
    with pytest.raises(ArchiveFormatError, match="expected 1200 bytes in 'nowhere'") as caught:
        replace_model(path, tmp_path / "bad.onnx")
    assert caught.value.path == str(tmp_path / "bad.onnx")
    (tmp_path / "bad.onnx").write_bytes(b"no model")
    with pytest.raises(ArchiveFormatError, match=r"bad.onnx: "):
        replace_model(path, tmp_path / "bad.onnx")
    with pytest.raises(FileNotFoundError) as missing:
        replace_model(path, tmp_path / "missing.onnx")
    assert missing.value.filename == str(tmp_path / "missing.onnx")
    require(path, before)


def test_a_negative_threshold_is_refused(path: Path) -> None:
    onnxarchive.save(weights(1), path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="size_threshold must not be negative, got -1"):
        replace_model(path, weights(1), size_threshold=-1)
    require(path, before)


# The files that are given


CALLS: dict[str, Callable[[Path], object]] = {
    "replace_model": lambda path: replace_model(path, weights(1)),
    "replace_model with compact": lambda path: replace_model(path, model_of(), compact=True),
    "replace_model with copy": lambda path: replace_model(path, weights(1), copy=True),
    "change_model": lambda path: change_model(path, lambda model: model),
    "replace_tensor": lambda path: replace_tensor(path, "w0", np.ones(300, np.float32)),
    "open": lambda path: onnxarchive.open(path, mode="r+"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_what_is_no_archive_is_refused_and_left_as_it_is(
    tmp_path: Path, call: Callable[[Path], object]
) -> None:
    folder = tmp_path / "ein Verzeichnis"
    folder.mkdir()
    (tmp_path / "empty").write_bytes(b"")
    onnx.save(weights(1), tmp_path / "model.onnx")
    kept = (tmp_path / "model.onnx").read_bytes()
    with pytest.raises(ArchiveFormatError, match="expected a regular file, found a directory"):
        call(folder)
    for name in ("empty", "model.onnx"):
        with pytest.raises(ArchiveFormatError) as caught:
            call(tmp_path / name)
        assert caught.value.path == str(tmp_path / name)
        assert caught.value.rule is not None
    with pytest.raises(FileNotFoundError) as missing:
        call(tmp_path / "missing")
    assert missing.value.filename == str(tmp_path / "missing")
    assert sorted(os.listdir(tmp_path)) == ["ein Verzeichnis", "empty", "model.onnx"]
    assert (tmp_path / "model.onnx").read_bytes() == kept


CHANGES: dict[str, Callable[..., None]] = {
    "replace_model": lambda path, **options: replace_model(path, new_model(), **options),
    "change_model": lambda path, **options: change_model(
        path, lambda model: new_model(), **options
    ),
    "replace_tensor": lambda path, **options: replace_tensor(
        path, "w0", np.ones(300, np.float32), in_place=not options, **options
    ),
    "EditableArchive": lambda path, **options: assign(path, **options),
}


def new_model() -> onnx.ModelProto:
    return changed(weights(2), documented("new"))


def assign(path: Path, **options: Any) -> None:
    with onnxarchive.open(path, mode="r+") as archive:
        if options:
            archive.replace_model(new_model(), **options)
        else:
            archive.model = new_model()


@posix
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_file_with_further_names_is_changed_only_as_a_copy(
    path: Path, tmp_path: Path, change: Callable[..., None]
) -> None:
    onnxarchive.save(weights(2), path)
    before = path.read_bytes()
    other = tmp_path / "another name"
    os.link(path, other)
    with pytest.raises(ValueError, match="hard links") as caught:
        change(path)
    assert str(caught.value) == (
        f"{path}: expected a file with this name alone, found a file with 2 names (hard links), "
        "all of which would change; copy=True (--copy) puts a new file here"
    )
    assert path.read_bytes() == before
    inode = other.stat().st_ino
    change(path, copy=True)
    assert path.read_bytes() != before
    assert other.read_bytes() == before
    assert other.stat().st_ino == inode != path.stat().st_ino
    assert onnxarchive.check(path, full=True) == []
    change(path)  # it has one name now


@posix
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_symbolic_link_is_replaced_only_as_a_copy(
    path: Path, tmp_path: Path, change: Callable[..., None]
) -> None:
    target = tmp_path / "the cache"
    onnxarchive.save(weights(2), target)
    before = target.read_bytes()
    path.symlink_to(target)
    with pytest.raises(ValueError, match="symbolic link") as caught:
        change(path)
    assert str(caught.value) == (
        f"{path}: expected a file with this name alone, found a symbolic link to "
        f"{target.resolve()}, which others may use; copy=True (--copy) puts a new file here"
    )
    assert path.is_symlink()
    change(path, copy=True)
    assert not path.is_symlink()
    assert target.read_bytes() == before
    assert path.read_bytes() != before
    assert onnxarchive.check(path, full=True) == []
    assert os.listdir(path.parent) == [path.name]
    assert sorted(os.listdir(tmp_path)) == ["ein Verzeichnis", "the cache"]


@posix
def test_a_link_to_a_directory_on_the_way_is_no_further_name(path: Path, tmp_path: Path) -> None:
    onnxarchive.save(weights(2), path)
    (tmp_path / "way").symlink_to(path.parent)
    replace_model(tmp_path / "way" / path.name, new_model())
    require(path, saved(new_model()))


@posix
def test_a_link_that_leads_to_nothing_is_named(path: Path) -> None:
    path.symlink_to("nothing")
    with pytest.raises(FileNotFoundError) as caught:
        replace_model(path, new_model(), copy=True)
    assert caught.value.filename == str(path)
    assert path.is_symlink()


@posix
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o755, 0o666])
def test_permission_bits_stay(path: Path, way: dict[str, Any], mode: int) -> None:
    onnxarchive.save(weights(2), path)
    path.chmod(mode)
    replace_model(path, new_model(), **way)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    replace_model(path, model_of(), compact=True, **way)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    onnxarchive.save(weights(2), path)
    replace_tensor(path, "w1", np.ones(300, np.float32), **way)
    assert stat.S_IMODE(path.stat().st_mode) == mode


@posix
def test_changes_in_place_keep_the_file_and_others_make_a_new_one(
    path: Path, no_clones: None
) -> None:
    onnxarchive.save(weights(2), path)
    inode = path.stat().st_ino
    ones = np.ones(300, np.float32)
    replace_model(path, new_model())
    change_model(path, lambda model: weights(2))
    replace_tensor(path, "w0", ones, in_place=True)
    with onnxarchive.open(path, mode="r+") as archive:
        archive.metadata["a"] = "b"
    assert path.stat().st_ino == inode
    replace_tensor(path, "w1", ones)
    assert path.stat().st_ino != inode
    for options in ({"copy": True}, {"compact": True, "size_threshold": 2000}):
        inode = path.stat().st_ino
        replace_model(path, referring(path), **options)
        assert path.stat().st_ino != inode


@pytest.mark.usefixtures("nobody", "no_clones")
def test_a_read_only_file_is_changed_only_as_a_copy(own_path: Path) -> None:
    path = own_path
    onnxarchive.save(weights(2), path)
    path.chmod(0o444)
    before = path.read_bytes()
    for change in CHANGES.values():
        with pytest.raises(PermissionError) as caught:
            change(path)
        assert caught.value.filename == str(path)
    require(path, before)
    with onnxarchive.open(path, mode="r+") as archive:  # it may be read
        assert archive.model == referring(path)
    replace_model(path, new_model(), copy=True)
    require(path, saved(new_model()))
    assert stat.S_IMODE(path.stat().st_mode) == 0o444


@pytest.mark.usefixtures("nobody", "no_clones")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_read_only_directory_is_named_and_nothing_is_changed(
    own_path: Path, change: Callable[..., None]
) -> None:
    path = own_path
    onnxarchive.save(weights(2), path)
    before = path.read_bytes()
    path.parent.chmod(0o555)
    for options in ({}, {"copy": True}):
        with pytest.raises(PermissionError) as caught:
            change(path, **options)
        assert str(caught.value.filename).startswith(str(path))
    require(path, before)


@pytest.mark.usefixtures("nobody")
def test_a_file_of_others_is_not_changed(own_path: Path) -> None:
    if os.getuid():
        pytest.skip("all files are this user's own")
    path = own_path
    os.seteuid(0)
    onnxarchive.save(weights(2), path)
    path.chmod(0o400)
    os.seteuid(65534)
    changes: list[Callable[[Path], object]] = [*CHANGES.values(), recover]
    for change in changes:
        with pytest.raises(PermissionError) as caught:
            change(path)
        assert caught.value.filename == str(path)
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("name", [NAME, "-", "a'b\n.onnxa", "%s", "n" * 200, "model.onnxa-journal"])
@pytest.mark.parametrize("is_relative", [False, True])
def test_any_path_will_do(
    path: Path, name: str, is_relative: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = path.with_name(name)
    onnxarchive.save(weights(2), path)
    monkeypatch.chdir(path.parent)
    given = name if is_relative else path
    replace_model(given, new_model())
    require(path, saved(new_model()))
    with onnxarchive.open(given, mode="r+") as archive:
        archive.doc_string = "newer"
    replace_tensor(given, "w0", np.zeros(300, np.float32))
    replace_model(given, changed(referring(path), removed(1)), compact=True)
    assert onnxarchive.check(path, full=True) == []
    assert recover(given) == Recovery(False, ())
    assert os.listdir(path.parent) == [name]


# Weights are not read


@pytest.mark.parametrize("way", ["in its place", "on a clone"], indirect=True)
def test_weights_are_neither_read_nor_written(path: Path, way: dict[str, Any]) -> None:
    onnxarchive.save(weights(3), path)
    new = changed(referring(path), documented("new"), added("w3"))
    end = entry(path, MODEL).header_offset
    damaged = [entry(path, f"w{i}").data_offset + 50 for i in range(3)]
    for offset in damaged:
        flip_byte(path, offset)
    before = path.read_bytes()
    replace_model(path, new, **way)
    assert path.read_bytes()[:end] == before[:end]
    replace_tensor(path, "w1", np.ones(300, np.float32), in_place=True)
    for offset in (damaged[0], damaged[2]):
        flip_byte(path, offset)
    ones = onnx.numpy_helper.from_array(np.ones(300, np.float32), "w1")
    expected = changed(new, lambda model: model.graph.initializer[1].CopyFrom(ones))
    for index in (0, 2):
        expected.graph.initializer[index].CopyFrom(weights(3).graph.initializer[index])
    require(path, saved(expected))


@pytest.mark.parametrize(
    "change",
    [
        lambda path: replace_model(path, referring(path), copy=True),
        lambda path: replace_model(path, changed(referring(path), removed(0)), compact=True),
        lambda path: replace_model(path, referring(path), size_threshold=2000, compact=True),
        lambda path: replace_tensor(path, "w0", np.ones(300, np.float32)),
        lambda path: replace_model(path, weights(3)),
        lambda path: replace_model(path, path.with_name("link.onnx"), copy=True),
        lambda path: replace_model(path, path.with_name("shorter.onnx"), compact=True),
        lambda path: replace_model(
            path, path.with_name("link.onnx"), size_threshold=2000, compact=True
        ),
    ],
    ids=[
        "copy",
        "compact",
        "into the model",
        "another tensor",
        "compared",
        "copy by a link",
        "compact by a link",
        "into the model by a link",
    ],
)
def test_whoever_reads_a_damaged_weight_notices_and_changes_nothing(
    path: Path, no_clones: None, change: Callable[[Path], None]
) -> None:
    onnxarchive.save(weights(3), path)
    link, shorter = path.with_name("link.onnx"), path.with_name("shorter.onnx")
    onnxarchive.link(path, link)
    model = onnx.load(link, load_external_data=False)
    del model.graph.initializer[0]
    shorter.write_bytes(model.SerializeToString())
    flip_byte(path, entry(path, "w2").data_offset + 50)
    before = path.read_bytes()
    with pytest.raises((ChecksumError, ValueError), match=r"0x|other contents") as caught:
        change(path)
    assert isinstance(caught.value, ChecksumError) or "other contents" in str(caught.value)
    assert path.read_bytes() == before
    assert sorted(os.listdir(path.parent)) == sorted(map(os.path.basename, (path, link, shorter)))


@pytest.mark.parametrize("in_place", [True, False])
def test_an_array_that_changes_while_it_is_written_is_noticed_and_changes_nothing(
    path: Path, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnxarchive.save(weights(3), path)
    before = path.read_bytes()
    array = np.zeros(300, np.float32)
    unpack = LocalHeader.unpack

    def unpack_and_change(data: bytes, offset: int) -> Any:  # which comes after the CRC-32
        array[7] = 1
        return unpack(data, offset)

    monkeypatch.setattr(LocalHeader, "unpack", unpack_and_change)
    with pytest.raises(ChecksumError, match=r"'w1'.*0x"):
        replace_tensor(path, "w1", array, in_place=in_place)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]
    onnxarchive.open(path).verify()


def test_a_damaged_tensor_can_be_replaced(path: Path) -> None:
    onnxarchive.save(weights(3), path)
    flip_byte(path, entry(path, "w1").data_offset)
    replace_tensor(path, "w1", onnx.numpy_helper.to_array(weights(3).graph.initializer[1]))
    require(path, saved(weights(3)))


def test_a_damaged_local_header_is_noticed(path: Path) -> None:
    onnxarchive.save(weights(3), path)
    model = referring(path)
    flip_byte(path, entry(path, "w1").header_offset)
    before = path.read_bytes()
    with pytest.raises(ArchiveFormatError, match="'w1'"):
        replace_model(path, model)
    assert path.read_bytes() == before


# Who has the archive open


def bytes_of(archive: onnxarchive.Archive) -> dict[str, bytes]:
    found = {name: array.tobytes() for name, array in archive.tensors.items()}
    return found | {f"assets/{name}": bytes(view) for name, view in archive.assets.items()}


OTHERS: dict[str, Callable[[Path], object]] = {
    "a smaller model": lambda path: replace_model(path, weights(3)),
    "a larger model": lambda path: replace_model(
        path, changed(weights(3), documented("x" * 200_000))
    ),
    "metadata": lambda path: change_model(path, documented_copy),
    "compact": lambda path: replace_model(path, weights(2), compact=True),
    "copy": lambda path: replace_model(path, weights(3), copy=True),
    "save": lambda path: onnxarchive.save(weights(1), path),
    "a tensor": lambda path: replace_tensor(path, "w0", np.ones(300, np.float32)),
}


def documented_copy(model: onnx.ModelProto) -> onnx.ModelProto:
    return changed(model, documented("by another"))


LONG = changed(weights(3), documented("x" * 100_000))


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("act", OTHERS.values(), ids=OTHERS.keys())
def test_views_of_those_who_have_the_archive_open_stay_right(
    path: Path, no_clones: None, act: Callable[[Path], object], mode: Any
) -> None:
    onnxarchive.save(LONG, path, assets={"labels": b"cat" * 5000})
    with onnxarchive.open(path, mode=mode) as archive:
        before = bytes_of(archive)
        weight, model = archive.tensors["w2"], archive.read(MODEL)
        act(path)
        assert weight.tobytes() == before["w2"]
        assert bytes_of(archive) == before
        assert onnx.ModelProto.FromString(bytes(model)) == archive.model
        assert archive.model.doc_string == LONG.doc_string
    assert weight.tobytes() == before["w2"]


@pytest.mark.parametrize("act", OTHERS.values(), ids=OTHERS.keys())
def test_views_that_are_first_asked_for_after_a_change_are_right(
    path: Path, no_clones: None, act: Callable[[Path], object]
) -> None:
    onnxarchive.save(LONG, path, assets={"labels": b"cat" * 5000})
    with onnxarchive.open(path) as archive:
        act(path)
        expected = {tensor.name: tensor.raw_data for tensor in LONG.graph.initializer}
        assert bytes_of(archive) == {**expected, "assets/labels": b"cat" * 5000}


def test_the_model_of_an_archive_that_was_changed_is_refused_and_never_crashes(
    path: Path,
) -> None:
    """The file is shorter by more than a page, so that a map would end the process."""
    long = changed(weights(3), documented("x" * 3_000_000))
    onnxarchive.save(long, path)
    told = run_python(
        """
import sys
import numpy as np
import onnxarchive
from onnxarchive import rewriting

rewriting.clone = lambda source, target: False
path = sys.argv[1]
archives = [onnxarchive.open(path), onnxarchive.open(path, mode="r+")]
weights = [archive.tensors["w1"] for archive in archives]
before = [weight.tobytes() for weight in weights]

def shorten(model):
    model.doc_string = ""
    return model

onnxarchive.change_model(path, shorten)
for archive in archives:
    try:
        archive.read("__MODEL_PROTO")
    except onnxarchive.ArchiveError as error:
        print(error)
    assert len(archive.model.doc_string) == 3_000_000
assert [weight.tobytes() for weight in weights] == before
assert [archive.tensors["w2"].shape for archive in archives] == [(300,), (300,)]
""",
        path,
    )
    expected = (
        f"{path}: expected the model with which the archive was opened, found that the file has "
        "been changed since; open it anew"
    )
    assert told.splitlines() == [expected, expected]


def test_the_model_of_an_archive_that_was_replaced_can_still_be_read(path: Path) -> None:
    onnxarchive.save(weights(3), path)
    with onnxarchive.open(path) as archive:
        replace_model(path, new_model(), compact=True)
        assert onnx.ModelProto.FromString(bytes(archive.read(MODEL))) == archive.model


@pytest.mark.parametrize("act", OTHERS.values(), ids=OTHERS.keys())
@pytest.mark.parametrize(
    "change",
    [
        lambda archive: setattr(archive, "model", archive.model),
        lambda archive: setattr(archive, "doc_string", "mine"),
        lambda archive: archive.metadata.update(a="b"),
        lambda archive: archive.replace_model(weights(3), compact=True),
        lambda archive: archive.replace_tensor("w0", np.zeros(300, np.float32)),
    ],
    ids=["model", "doc_string", "metadata", "replace_model", "replace_tensor"],
)
def test_a_change_by_another_is_not_overwritten(
    path: Path, act: Callable[[Path], object], change: Callable[[EditableArchive], None]
) -> None:
    onnxarchive.save(weights(3, raw_tensor("small")), path)
    onnxarchive.save(changed(weights(3), documented("old")), path)
    with onnxarchive.open(path, mode="r+") as archive:
        act(path)
        theirs = path.read_bytes()
        for _ in range(2):
            with pytest.raises(ArchiveError, match="somebody has changed it since") as caught:
                change(archive)
            assert str(caught.value) == (
                f"{path}: expected the archive as it was when it was opened, found that somebody "
                "has changed it since; open it anew"
            )
        require(path, theirs)
    with onnxarchive.open(path, mode="r+") as archive:
        archive.doc_string = "mine"
    assert referring(path).doc_string == "mine"


def test_an_archive_whose_file_is_gone_says_so(path: Path) -> None:
    onnxarchive.save(weights(1), path)
    with onnxarchive.open(path, mode="r+") as archive:
        path.unlink()
        with pytest.raises(FileNotFoundError) as caught:
            archive.doc_string = "new"
        assert caught.value.filename == str(path)
        assert archive.tensors["w0"].shape == (300,)
    assert os.listdir(path.parent) == []


def test_a_closed_archive_is_changed_no_more(path: Path) -> None:
    onnxarchive.save(weights(1), path)
    before = path.read_bytes()
    archive = onnxarchive.open(path, mode="r+")
    weight = archive.tensors["w0"]
    archive.close()
    changes: list[Callable[[], object]] = [
        lambda: setattr(archive, "model", weights(1)),
        lambda: setattr(archive, "producer_name", "new"),
        lambda: archive.metadata.update(a="b"),
        lambda: archive.replace_model(weights(1)),
        lambda: archive.replace_tensor("w0", np.zeros(300, np.float32)),
    ]
    for change in changes:
        with pytest.raises(ValueError, match="the file is closed"):
            change()
    require(path, before)
    assert weight.tobytes() == weights(1).graph.initializer[0].raw_data


def test_nothing_stays_open(path: Path) -> None:
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("what is open cannot be told")
    onnxarchive.save(weights(2), path)
    replace_model(path, new_model())
    replace_model(path, weights(1), compact=True)
    replace_tensor(path, "w0", np.zeros(300, np.float32), in_place=True)
    change_model(path, documented_copy)
    recover(path)
    for model in (None, weights(3), model_of()):
        with pytest.raises((TypeError, ValueError)):
            replace_model(path, model, size_threshold=-1)  # type: ignore[arg-type]
    assert open_below(path.parent) == []
    with onnxarchive.open(path, mode="r+") as archive:
        for text in "abc":
            archive.doc_string = text
        assert len(open_below(path.parent)) == 1
    assert open_below(path.parent) == []


def test_changes_by_several_threads_follow_one_another(path: Path, way: dict[str, Any]) -> None:
    onnxarchive.save(model_of(), path)

    def count(model: onnx.ModelProto) -> onnx.ModelProto:
        model.ir_version += 1
        return model

    def work() -> None:
        for _ in range(5):
            change_model(path, count, **way)

    with ThreadPoolExecutor(4) as executor:
        for done in [executor.submit(work) for _ in range(4)]:
            done.result()
    expected = model_of()
    expected.ir_version += 20
    require(path, saved(expected))


# A change that is broken off


BROKEN_OFF: dict[str, Callable[..., None]] = {
    "replace_model": lambda path, progress: replace_model(
        path, changed(new_model(), added("w2", 100_000)), progress=progress
    ),
    "with copy": lambda path, progress: replace_model(
        path, new_model(), copy=True, progress=progress
    ),
    "with compact": lambda path, progress: replace_model(
        path, model_of(), compact=True, progress=progress
    ),
    "replace_tensor": lambda path, progress: replace_tensor(
        path, "w1", np.zeros(300, np.float32), progress=progress
    ),
    "replace_tensor in place": lambda path, progress: replace_tensor(
        path, "w1", np.zeros(300, np.float32), in_place=True, progress=progress
    ),
    "EditableArchive": lambda path, progress: onnxarchive.open(path, mode="r+").replace_model(
        new_model(), progress=progress
    ),
}


@pytest.mark.parametrize("is_cloning", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
@pytest.mark.parametrize("call", BROKEN_OFF.values(), ids=BROKEN_OFF.keys())
def test_a_change_that_is_broken_off_is_taken_back_at_once(
    path: Path,
    call: Callable[..., None],
    error: type[BaseException],
    is_cloning: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        rewriting, "clone", copying_clone if is_cloning else lambda source, target: False
    )
    onnxarchive.save(weights(2), path)
    before = path.read_bytes()
    calls: list[tuple[int, int]] = []
    call(path, lambda *numbers: calls.append(numbers))
    assert calls
    path.write_bytes(before)
    for at in range(len(calls)):
        seen = 0

        def interrupt(done: int, total: int, at: int = at) -> None:
            nonlocal seen
            seen += 1
            if seen > at:
                raise error

        with pytest.raises(error):
            call(path, interrupt)
        require(path, before)


@pytest.mark.parametrize("call", BROKEN_OFF.values(), ids=BROKEN_OFF.keys())
def test_progress_goes_to_the_end(path: Path, call: Callable[..., None]) -> None:
    onnxarchive.save(weights(2), path)
    calls: list[tuple[int, int]] = []
    call(path, lambda *numbers: calls.append(numbers))
    done, totals = zip(*calls, strict=True)
    assert len(set(totals)) == 1
    assert list(done) == sorted(done)
    assert done[-1] == totals[0]


def test_a_function_that_fails_changes_nothing(path: Path) -> None:
    onnxarchive.save(weights(2), path)
    before = path.read_bytes()

    def fail(model: onnx.ModelProto) -> onnx.ModelProto:
        model.doc_string = "new"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        change_model(path, fail)
    with pytest.raises(TypeError, match="found <class 'NoneType'>"):
        change_model(path, lambda model: None)  # type: ignore[arg-type,return-value]
    require(path, before)


# An archive that is open for changes


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
            assert archive.model.graph.name == "graph"
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

    def counted(source: files.MappedFile, target: BinaryIO) -> bool:
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
        with pytest.raises(ValueError, match="which has 'pixels', found 'x'"):
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


def test_a_model_above_the_limit_is_refused_when_opened_and_when_read_again(path: Path) -> None:
    onnxarchive.save(weights(1), path)
    nbytes = entry(path, MODEL).nbytes
    with pytest.raises(ArchiveFormatError, match="that the caller allows"):
        onnxarchive.open(path, mode="r+", max_model_nbytes=nbytes - 1)
    with onnxarchive.open(path, mode="r+", max_model_nbytes=nbytes) as archive:
        archive.model = weights(1)
    assert open_below(path.parent) == []


def test_another_mode_is_refused(path: Path) -> None:
    onnxarchive.save(weights(1), path)
    for mode in ("w", "a", "rb", ""):
        with pytest.raises(ValueError, match=f"^expected mode 'r' or 'r\\+', found '{mode}'$"):
            onnxarchive.open(path, mode=mode)  # type: ignore[call-overload]


# Tensors


def with_array(model: onnx.ModelProto, index: int, array: np.ndarray[Any, Any]) -> onnx.ModelProto:
    tensor = model.graph.initializer[index]
    given = onnx.numpy_helper.from_array(array, tensor.name)
    return changed(model, lambda model: model.graph.initializer[index].CopyFrom(given))


@pytest.fixture(params=["in place", "in a new file", "on a clone"])
def tensor_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    cloning = request.param == "on a clone"
    monkeypatch.setattr(
        rewriting, "clone", copying_clone if cloning else lambda source, target: False
    )
    return {"in_place": request.param == "in place"}


@pytest.mark.parametrize("alignment", [64, 4096])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_tensor_gets_other_elements(
    path: Path, tensor_way: dict[str, Any], index: int, alignment: int
) -> None:
    model = weights(3)
    onnxarchive.save(model, path, alignment=alignment, assets={"labels": b"cat"})
    inode = path.stat().st_ino
    array = np.arange(300, dtype=np.float32)
    with onnxarchive.open(path) as archive:
        view = archive.tensors[f"w{index}"]
        replace_tensor(path, f"w{index}", array, **tensor_way)
        now = array.tobytes() if tensor_way["in_place"] else model.graph.initializer[index].raw_data
        assert view.tobytes() == now
    expected = with_array(model, index, array)
    require(path, saved(expected, alignment=alignment, assets={"labels": b"cat"}))
    assert (path.stat().st_ino == inode) == tensor_way["in_place"]


@pytest.mark.parametrize(
    "number",
    [
        TensorProto.BOOL,
        TensorProto.INT64,
        TensorProto.BFLOAT16,
        TensorProto.FLOAT8E4M3FN,
        TensorProto.INT4,
        TensorProto.UINT2,
        TensorProto.FLOAT4E2M1,
        TensorProto.COMPLEX64,
    ],
    ids=TensorProto.DataType.Name,
)
@pytest.mark.parametrize("size_threshold", [0, 10**6])
def test_tensors_of_every_kind_are_replaced(
    path: Path, tensor_way: dict[str, Any], number: int, size_threshold: int
) -> None:
    before, after = (raw_tensor("w", number, (3, 7), seed) for seed in (1, 2))
    onnxarchive.save(model_of(before, raw_tensor("v")), path, size_threshold=size_threshold)
    replace_tensor(path, "w", onnx.numpy_helper.to_array(after), **tensor_way)
    require(path, saved(model_of(after, raw_tensor("v")), size_threshold=size_threshold))


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((), np.float32),
        np.zeros((0, 3), np.float32),
        np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
        np.arange(12, dtype=np.float32)[::2],
        np.arange(6, dtype=">f4"),
    ],
    ids=["scalar", "empty", "columns first", "strided", "big-endian"],
)
@pytest.mark.parametrize("size_threshold", [0, 10**6])
def test_arrays_of_every_layout_are_taken(
    path: Path, array: np.ndarray[Any, Any], size_threshold: int
) -> None:
    model = model_of(raw_tensor("w", dims=array.shape), raw_tensor("v"))
    onnxarchive.save(model, path, size_threshold=size_threshold)
    replace_tensor(path, "w", array)
    little = array.astype("<f4", order="C")
    require(path, saved(with_array(model, 0, little), size_threshold=size_threshold))


def test_tensors_of_subgraphs_and_of_archives_in_another_order_are_replaced(
    path: Path, tensor_way: dict[str, Any]
) -> None:
    model = full_model()
    onnxarchive.save(model, path, convert_attribute=True)
    array = np.arange(300, dtype=np.float32)
    replace_tensor(path, "main.b.initializer2", array, **tensor_way)
    (tensor,) = (t for t in every_tensor(model) if t.name == "main.b.initializer2")
    tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    require(path, saved(model, convert_attribute=True))
    model = written(path, "w2", "w0", "w1", asset=True)
    order = [name for name, _ in entries_of(path.read_bytes())]
    replace_tensor(path, "w0", array, **tensor_way)
    assert [name for name, _ in entries_of(path.read_bytes())] == order
    assert onnxarchive.check(path, full=True) == []
    assert onnxarchive.load(path) == with_array(model, 0, array)


@pytest.mark.parametrize("size_threshold", [0, 10**6])
@pytest.mark.parametrize(
    ("array", "found"),
    [
        (np.zeros(301, np.float32), "FLOAT of shape [301]"),
        (np.zeros((300, 1), np.float32), "FLOAT of shape [300, 1]"),
        (np.zeros(300, np.float64), "DOUBLE of shape [300]"),
        (np.zeros(300, np.int32), "INT32 of shape [300]"),
        ([1.0] * 300, "DOUBLE of shape [300]"),
    ],
)
def test_another_shape_or_type_is_refused(
    path: Path, array: Any, found: str, size_threshold: int
) -> None:
    onnxarchive.save(weights(1), path, size_threshold=size_threshold)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="expected FLOAT of shape") as caught:
        replace_tensor(path, "w0", array)
    assert str(caught.value) == (
        f"{path}: tensor 'w0' (graph.initializer[0]): expected FLOAT of shape [300], found {found}"
    )
    require(path, before)


def test_a_name_that_no_tensor_or_that_several_have_is_refused(path: Path) -> None:
    model = weights(1)
    for name in "ab":
        graph = onnx.GraphProto(name=name, initializer=[raw_tensor("twice", dims=(300,))])
        model.graph.node.append(node(attribute("g", g=graph)))
    onnxarchive.save(model, path)
    before = path.read_bytes()
    for name in ("missing", "", MODEL, "twice"):
        with pytest.raises(TensorNotFoundError) as caught:
            replace_tensor(path, name, np.zeros(300, np.float32))
        assert str(path) in str(caught.value)
    require(path, before)


# What is left behind


def test_there_is_nothing_to_recover(path: Path) -> None:
    onnxarchive.save(weights(1), path)
    before = path.read_bytes()
    assert recover(path) == Recovery(is_rolled_back=False, removed=())
    require(path, before)


def test_what_killed_processes_left_is_removed(path: Path) -> None:
    onnxarchive.save(weights(1), path)
    left = path.with_name(f".{path.name}.4242-0.tmp")
    kept = path.with_name(f".{path.name}.tmp")
    for name in (left, kept):
        name.write_bytes(b"half an archive")
    assert recover(path) == Recovery(False, (str(left.resolve()),))
    assert sorted(os.listdir(path.parent)) == sorted([kept.name, path.name])
    path.unlink()
    left.write_bytes(b"half a first archive")
    assert recover(path) == Recovery(False, (str(left.resolve()),))
    with pytest.raises(FileNotFoundError):
        recover(path)
