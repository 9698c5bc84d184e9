"""A new model for an archive: written entries, unmoved entries, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from edits import (
    Change,
    Way,
    added,
    changed,
    documented,
    entries_of,
    no_clone,
    other_bytes,
    referring,
    refused,
    removed,
    renamed,
    replace_model,
    require,
    require_kept,
    reversed_tensors,
    weights,
    written,
)
from hypothesis import HealthCheck, example, given, settings, strategies as st
from models import (
    attribute,
    copying_clone,
    entry_of,
    every_tensor,
    external,
    full_model,
    model_of,
    model_protos,
    node,
    raw_tensor,
    sparse_tensor,
    string_tensor,
    tensor_protos,
)
from onnx import TensorProto, numpy_helper
from outcomes import count_outcome, requires_outcomes
from several_models import keys_of
from written import saved

import onnxarchive
from onnxarchive.files import clones_and_sync

# What is written is what `save` would write, if the entries lie as it would put them

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
def test_a_new_model_is_written_as_save_writes_it(path: Path, way: Way, change: Change) -> None:
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
def test_new_tensors_after_the_existing_ones_are_added(
    path: Path, way: Way, nbytes: int, alignment: int
) -> None:
    model = weights(3)
    onnxarchive.save(model, path, alignment=alignment)
    before = path.read_bytes()
    start = entry_of(path, "__MODEL_PROTO").header_offset
    more = [added("w3", nbytes), added("W3", 2 * nbytes, seed=5)]
    replace_model(path, changed(referring(path), *more), **way)
    require(path, saved(changed(model, *more), alignment=alignment))
    assert path.read_bytes()[:start] == before[:start]
    assert list(onnxarchive.open(path).tensors) == ["w0", "w1", "w2", "w3", "W3"]


# Otherwise every entry stays, and new tensors follow all of them

KEEPING: dict[str, tuple[Change, list[str]]] = {
    "another name": (renamed(1, "other"), []),
    "another name of the last": (renamed(2, "other"), []),
    "another order": (reversed_tensors, []),
    "names exchanged": (
        lambda model: [change(model) for change in (renamed(0, "w1"), renamed(1, "w0"))],
        [],
    ),
    "one before the others": (
        lambda model: model.graph.initializer.insert(0, raw_tensor("new", dims=(300,))),
        ["new"],
    ),
    "one behind the others, before the asset": (added("new"), ["new"]),
    "one of a name that is a key": (
        lambda model: [change(model) for change in (renamed(1, "other"), added("w1"))],
        ["w1_2"],
    ),
}


@pytest.mark.parametrize("alignment", [64, 4096])
@pytest.mark.parametrize(("change", "follow"), KEEPING.values(), ids=KEEPING.keys())
def test_a_model_with_every_tensor_of_the_archive_moves_no_entry(
    path: Path, way: Way, change: Change, follow: list[str], alignment: int
) -> None:
    model = weights(3)
    rest: dict[str, Any] = {"assets": {"labels": b"cat"}, "alignment": alignment}
    onnxarchive.save(model, path, **rest)
    before = path.read_bytes()
    new = changed(referring(path), change)
    replace_model(path, new, **way)
    assert require_kept(path, before, changed(model, change)) == follow
    # The keys of before are those of the tensors that had them.
    locations = {it.name: location_of(it) for it in new.graph.initializer if it.external_data}
    stored = keys_of(path)
    assert stored == locations | dict(zip(stored.keys() - locations.keys(), follow, strict=True))
    after = path.read_bytes()
    replace_model(path, referring(path), **way)
    assert path.read_bytes() == after
    replace_model(path, referring(path), compact=True, **way)
    require(path, saved(changed(model, change), **rest))


LACKING: dict[str, tuple[Change, str]] = {
    "the first is gone": (removed(0), "'w0'"),
    "the last is gone": (removed(4), "'w4'"),
    "all are gone": (
        lambda model: model.graph.ClearField("initializer"),
        "'w0', 'w1', 'w2' and 2 more",
    ),
    "other bytes": (other_bytes, "'w1'"),
    "another size": (
        lambda model: model.graph.initializer[1].CopyFrom(raw_tensor("w1", dims=(301,), seed=1)),
        "'w1'",
    ),
}


@pytest.mark.parametrize(("change", "listed"), LACKING.values(), ids=LACKING.keys())
def test_a_model_that_lacks_a_tensor_of_the_archive_is_refused_unless_compact(
    path: Path, way: Way, change: Change, listed: str
) -> None:
    model = weights(5)
    onnxarchive.save(model, path, assets={"labels": b"cat"})
    new = changed(referring(path), change)
    with refused(path, ValueError, "compact=True") as caught:
        replace_model(path, new, **way)
    advice = "; edit.tensors['w1'] = array replaces the elements" if change is other_bytes else ""
    assert str(caught.value) == (
        f"{path}: no model would use {listed}; compact=True (--compact) rewrites the "
        f"whole archive without them{advice}"
    )
    replace_model(path, new, compact=True, **way)
    require(path, saved(changed(model, change), assets={"labels": b"cat"}))


@st.composite
def structural_changes(draw: st.DrawFn) -> list[Change]:
    """Changes of any kind of a model; most leave its tensors as they are."""

    def if_any(change: Change) -> Change:
        return lambda model: model.graph.initializer and change(model)

    index = draw(st.integers(0, 2))
    tensor = draw(tensor_protos())
    choices: list[Change] = [
        documented(draw(st.text(max_size=5))),
        lambda model: model.graph.initializer.append(tensor),
        lambda model: model.graph.initializer.insert(0, tensor),
        lambda model: model.graph.node.append(node(attribute("t", t=tensor))),
        lambda model: onnx.helper.set_model_props(model, {"key": "value"}),
        if_any(lambda model: removed(index % len(model.graph.initializer))(model)),
        if_any(lambda model: renamed(index % len(model.graph.initializer), "renamed")(model)),
        reversed_tensors,
        lambda model: model.graph.ClearField("node"),
        lambda model: model.ClearField("functions"),
        lambda model: model.ClearField("training_info"),
    ]
    return draw(st.lists(st.sampled_from(choices), max_size=2))


def options_of_save() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {"size_threshold": st.sampled_from([0, 1, 30, 1024]), "convert_attribute": st.booleans()}
    )


@pytest.mark.sweep
@requires_outcomes(kept=10, refused=1)
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
@example(weights(2), [removed(0)], {"size_threshold": 0}, None, 64, {}, True, "in its place")
def test_any_change_of_any_model_keeps_every_entry_or_is_refused_and_compact_gives_what_save_makes(
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
    folder = tmp_path / "archive"
    folder.mkdir(exist_ok=True)
    path, other = folder / "model.onnxa", tmp_path / "expected"
    rest: dict[str, Any] = {"alignment": alignment, "assets": assets}
    onnxarchive.save(model, path, **before_options, **rest)
    before = path.read_bytes()
    complete = onnxarchive.load(path) if is_referring else model
    new = changed(referring(path) if is_referring else model, *changes)
    if new_options is None and changed(model, *changes) != model:
        new_options = before_options  # which cannot be told for tensors that are new
    stated = new_options or {}
    expected = saved(changed(complete, *changes), **(new_options or before_options), **rest)
    other.write_bytes(expected)
    expected_model = referring(other)
    old_entries, new_entries = entries_of(before), entries_of(expected)

    old = {(name, data) for name, data in old_entries if not name.startswith("assets/")}
    are_stored = old <= set(new_entries)
    lies_as_saved = new_entries[: len(old_entries)] == old_entries and all(
        location_of(tensor) in (None, location_of(stored))
        for tensor, stored in zip(every_tensor(new), every_tensor(expected_model), strict=True)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clones_and_sync, "clone", copying_clone if kind == "on a clone" else no_clone)
        try:
            replace_model(path, new, copy=kind == "with copy", **stated)
        except ValueError as error:
            count_outcome("refused")
            assert "compact=True" in str(error)
            require(path, before)
            assert not lies_as_saved
            # By name alone the tensors would all be there: one that refers to another is none.
            assert not are_stored or is_referring
            assert not (is_referring and not stated)
        else:
            count_outcome("kept")
            if lies_as_saved:
                require(path, expected)
            follow = require_kept(path, before, onnxarchive.load(other))
            assert len(follow) >= len(new_entries) - len(old_entries)
            used = {location_of(tensor) for tensor in every_tensor(referring(path))}
            assert {name for name, _ in old} <= used
        replace_model(path, new, compact=True, copy=kind == "with copy", **stated)
    require(path, expected)


def location_of(tensor: TensorProto) -> str | None:
    """The key of a tensor that is external, or None."""
    return next((pair.value for pair in tensor.external_data if pair.key == "location"), None)


# Tensors stored outside the model


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
    with pytest.raises(ValueError, match="would use 'w0', 'w1', 'w2'; compact=True"):
        replace_model(path, referring(path), size_threshold=1201)
    replace_model(path, referring(path), size_threshold=1201, compact=True)
    require(path, saved(model, size_threshold=1201))
    assert list(referring(path).graph.initializer) == list(model.graph.initializer)
    replace_model(path, referring(path))  # which leaves them where they are
    require(path, saved(model, size_threshold=1201))
    replace_model(path, referring(path), size_threshold=1200)  # and these are new
    require(path, saved(model))


def test_tensors_of_attributes_are_moved_out_of_the_model_if_asked_for(path: Path) -> None:
    model = weights(1)
    model.graph.node.append(node(attribute("t", t=raw_tensor("t", dims=(300,), seed=9))))
    model.graph.sparse_initializer.append(sparse_tensor("s", 1, 300))
    onnxarchive.save(model, path)
    before = path.read_bytes()
    replace_model(path, referring(path))
    require(path, before)
    replace_model(path, referring(path), convert_attribute=True)  # behind what is there
    assert require_kept(path, before, model) == ["s", "s_indices", "t"]
    replace_model(path, referring(path), convert_attribute=True, compact=True)
    require(path, saved(model, convert_attribute=True))
    replace_model(path, referring(path))
    require(path, saved(model, convert_attribute=True))
    with pytest.raises(ValueError, match="compact=True"):
        replace_model(path, referring(path), convert_attribute=False)
    replace_model(path, referring(path), convert_attribute=False, compact=True)
    require(path, saved(model))


def test_the_threshold_of_new_tensors_is_that_of_the_archive(path: Path) -> None:
    large, small = raw_tensor("large", dims=(1024,)), raw_tensor("small", dims=(1000,))
    cases: list[tuple[int, list[TensorProto], TensorProto]] = [
        (4096, [large, small], raw_tensor("new", dims=(999,))),
        (0, [raw_tensor("w")], raw_tensor("new")),
        (1024, [raw_tensor("w")], raw_tensor("new", dims=(256,))),
        (1024, [*weights(2).graph.initializer], raw_tensor("new", TensorProto.UINT8, (1023,))),
    ]
    for threshold, tensors, new in cases:
        onnxarchive.save(model_of(*tensors), path, size_threshold=threshold)
        replace_model(path, model_of(*tensors, new))
        require(path, saved(model_of(*tensors, new), size_threshold=threshold))


def test_a_model_without_any_tensors_is_replaced(path: Path, way: Way) -> None:
    onnxarchive.save(model_of(), path)
    for text in ("longer" * 1000, "short", ""):
        replace_model(path, changed(model_of(), documented(text)), **way)
        require(path, saved(changed(model_of(), documented(text))))
    replace_model(path, weights(2), **way)
    require(path, saved(weights(2)))
    replace_model(path, model_of(), compact=True, **way)
    require(path, saved(model_of()))


def test_empty_tensors_are_kept_and_distinguished(path: Path) -> None:
    model = model_of(*(raw_tensor(name, dims=(0,)) for name in "abc"))
    onnxarchive.save(model, path, size_threshold=0)
    replace_model(path, changed(referring(path), documented("new")))
    require(path, saved(changed(model, documented("new")), size_threshold=0))
    with pytest.raises(ValueError, match="would use 'b'; compact"):
        replace_model(path, changed(referring(path), removed(1)))
    replace_model(path, changed(referring(path), reversed_tensors))
    assert [name for name, _ in entries_of(path.read_bytes())] == ["a", "b", "c"]
    replace_model(path, referring(path), compact=True)
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


# Archives in another order than that of `save`


@pytest.mark.parametrize("asset", [False, True])
def test_an_archive_written_tensor_by_tensor_keeps_its_order(
    path: Path, way: Way, asset: bool
) -> None:
    written(path, "w2", "w0", "w1", asset=asset)
    before = path.read_bytes()
    changes = [documented("new"), added("w3")]
    replace_model(path, changed(referring(path), *changes), **way)
    assert require_kept(path, before, changed(weights(3), *changes)) == ["w3"]
    data = path.read_bytes()
    replace_model(path, referring(path), **way)
    assert path.read_bytes() == data


@pytest.mark.parametrize("change", [removed(1), documented("new")], ids=["gone", "all there"])
def test_compacting_an_archive_written_tensor_by_tensor_gives_the_order_of_save(
    path: Path, way: Way, change: Callable[[onnx.ModelProto], Any]
) -> None:
    model = written(path, "w2", "w0", "w1")
    with refused(path, ValueError, "would use 'w1'; compact"):
        replace_model(path, changed(referring(path), removed(1)), **way)
    replace_model(path, changed(referring(path), change), compact=True, **way)
    require(path, saved(changed(model, change)))


def test_keys_that_save_would_not_choose_stay(path: Path) -> None:
    model = model_of(*(external(raw_tensor(it, dims=(300,)), f"of_{it}") for it in ("w0", "w1")))
    model.graph.node.append(node(attribute("t", t=external(raw_tensor("", dims=(300,)), "of_t"))))
    keys = ["of_w1", "of_t", "of_w0"]
    with onnxarchive.Writer(path) as writer:
        for seed, name in enumerate(keys):
            writer.add(name, numpy_helper.to_array(raw_tensor("", dims=(300,), seed=seed)))
        writer.finish(model)
    assert [name for name, _ in entries_of(path.read_bytes())] == keys
    before, complete = path.read_bytes(), onnxarchive.load(path)
    # The name of the new tensor would give a key that is taken, and not by a tensor of its name.
    replace_model(path, changed(referring(path), documented("new"), added("of_w1")))
    expected = changed(complete, documented("new"), added("of_w1"))
    assert require_kept(path, before, expected) == ["of_w1_2"]


def test_attributes_stay_in_a_model_beside_one_that_has_them_outside(path: Path) -> None:
    first, decoder = weights(1), weights(2)
    for model in (first, decoder):
        value = raw_tensor("value", dims=(2048,))
        model.graph.node.append(node(attribute("value", t=value)))
    onnxarchive.save(first, path)
    replace_model(path, decoder, name="decoder", convert_attribute=True)
    before = entries_of(path.read_bytes())
    assert [name for name, _ in before][:3] == ["w0", "w1", "value"]
    replace_model(path, changed(first, documented("changed")))
    assert entries_of(path.read_bytes()) == before


def test_compacting_keeps_small_tensors_of_another_model_outside(path: Path) -> None:
    decoder = weights(2, raw_tensor("small", dims=(2,)))
    onnxarchive.save(weights(1), path, models={"decoder": decoder}, size_threshold=0)
    before = path.read_bytes()
    replace_model(path, weights(1), compact=True)
    assert path.read_bytes() == before
