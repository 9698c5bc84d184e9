"""Two editors of one archive, stopped at every lock, in every order: no edit is lost in silence."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from itertools import combinations, combinations_with_replacement, permutations
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import edits
import numpy as np
import onnx
import pytest
from edits import changed, documented, fails_at, referring, require, weights
from models import raw_tensor, runnable_model

import onnxarchive
import onnxarchive.ir

if sys.platform == "win32":
    pytest.skip("editors are stopped at flock", allow_module_level=True)

from schedules import Run, all_runs, stop


class State(NamedTuple):
    """The edits that an archive contains."""

    doc_string: str
    metadata: frozenset[str]
    tensors: tuple[bytes, ...]
    assets: frozenset[str] = frozenset()


def state_of(path: Path) -> State:
    assert onnxarchive.check(path, full=True) == []
    assert os.listdir(path.parent) == [path.name]
    model = onnxarchive.load(path)
    with onnxarchive.open(path) as archive:
        assets, metadata = frozenset(archive.assets), frozenset(archive.metadata)
    tensors = tuple(tensor.raw_data for tensor in model.graph.initializer)
    return State(model.doc_string, metadata, tensors, assets)


class Editor(NamedTuple):
    """An edit, and the state that it makes of another."""

    edit: Callable[[Path, str, onnx.ModelProto], object]
    apply: Callable[[State, str], State]


def marked(state: State, name: str) -> State:
    return state._replace(metadata=state.metadata | {name})


def set_metadata(path: Path, name: str, model: onnx.ModelProto) -> None:
    with onnxarchive.edit(path) as edit:
        edit.metadata[name] = "1"
        stop()


def add_asset(path: Path, name: str, model: onnx.ModelProto) -> None:
    with onnxarchive.edit(path) as edit:
        stop()
        edit.assets[name.lower()] = b"1"


def with_asset(state: State, name: str) -> State:
    return state._replace(assets=state.assets | {name.lower()})


def transform(path: Path, name: str, model: onnx.ModelProto) -> None:
    def mark(found: onnx.ModelProto) -> onnx.ModelProto:
        stop()
        found.metadata_props.add(key=name, value="1")
        return found

    onnxarchive.transform(path, path, mark)


def replace(path: Path, name: str, model: onnx.ModelProto) -> None:
    with onnxarchive.edit(path) as edit:
        edit.model = changed(model, documented(name))
        stop()


INDEX = {"A": 0, "B": 1}
ARRAYS = {name: np.full(300, index + 1, np.float32) for name, index in INDEX.items()}


def replace_own_tensor(path: Path, name: str, model: onnx.ModelProto) -> None:
    with onnxarchive.edit(path) as edit:
        edit.tensors[f"w{INDEX[name]}"] = ARRAYS[name]
        stop()


def with_own_tensor(state: State, name: str) -> State:
    tensors = list(state.tensors)
    tensors[INDEX[name]] = ARRAYS[name].tobytes()
    return state._replace(tensors=tuple(tensors))


def own_model(name: str) -> onnx.ModelProto:
    model = changed(weights(2), documented(f"saved by {name}"))
    for index, tensor in enumerate(model.graph.initializer):
        tensor.CopyFrom(raw_tensor(tensor.name, dims=(300,), seed=ord(name) + index))
    return model


def save(path: Path, name: str, model: onnx.ModelProto) -> None:
    onnxarchive.save(own_model(name), path, assets={})


def saved_state(state: State, name: str) -> State:
    tensors = tuple(tensor.raw_data for tensor in own_model(name).graph.initializer)
    return State(f"saved by {name}", frozenset(), tensors)


EDITORS: dict[str, Editor] = {
    "metadata": Editor(set_metadata, marked),
    "assets": Editor(add_asset, with_asset),
    "transform": Editor(transform, marked),
    "model": Editor(
        replace, lambda state, name: state._replace(doc_string=name, metadata=frozenset())
    ),
    "tensors": Editor(replace_own_tensor, with_own_tensor),
    "save": Editor(save, saved_state),
}


def serial_states(start: State, run: Run, editors: dict[str, Editor]) -> Iterable[State]:
    """What the archive may be: all edits that were said to be done, one after the other.

    One that had ended before another began comes before it.
    """
    done = [name for name, outcome in run.outcomes.items() if outcome.error is None]
    for order in permutations(done):
        pairs = combinations([run.outcomes[name] for name in order], 2)
        if all(other.end > one.begin for one, other in pairs):
            state = start
            for name in order:
                state = editors[name].apply(state, name)
            yield state


@pytest.mark.sweep
@pytest.mark.usefixtures("clones_or_none")
@pytest.mark.parametrize(("one", "other"), [*combinations_with_replacement(EDITORS, 2)], ids=str)
def test_no_edit_is_lost_without_an_error_whatever_the_order_of_two_editors(
    two: Path, one: str, other: str, record_property: Callable[[str, Any], None]
) -> None:
    content, start, model = two.read_bytes(), state_of(two), referring(two)
    editors = {"A": EDITORS[one], "B": EDITORS[other]}

    def edit(name: str) -> None:
        stop()  # an edit holds its lock from its begin to its end: the others wait before it
        editors[name].edit(two, name, model)

    def prepare() -> dict[str, Callable[[], object]]:
        two.unlink()
        two.write_bytes(content)
        return {name: partial(edit, name) for name in editors}

    count = both = 0
    # Of equal editors, the schedules in which B is the first are the others with the names swapped.
    for run in all_runs(two, prepare, first="A" if one == other else ""):
        count += 1
        errors = [outcome.error for outcome in run.outcomes.values() if outcome.error is not None]
        for error in errors:
            assert isinstance(error, onnxarchive.ArchiveError), run
            assert "has been changed since it was opened; open it again" in str(error), run
        assert len(errors) < 2, run
        both += not errors
        assert state_of(two) in list(serial_states(start, run, editors)), run
    record_property("schedules of two editors", count)
    assert count > 20
    assert both > 20


# Reading an archive and replacing it later


def transform_onto_itself(path: Path, meanwhile: Callable[[Path], None]) -> None:
    def function(model: onnx.ModelProto) -> onnx.ModelProto:
        meanwhile(path)
        model.doc_string += "mine"
        return model

    onnxarchive.transform(path, path, function)


def infer_shapes_onto_itself(path: Path, meanwhile: Callable[[Path], None]) -> None:
    infer = onnx.shape_inference.infer_shapes

    def infer_and_wait(*arguments: Any, **options: Any) -> onnx.ModelProto:
        meanwhile(path)
        return infer(*arguments, **options)

    with patch.object(onnx.shape_inference, "infer_shapes", infer_and_wait):
        onnxarchive.infer_shapes(path, path)


def save_an_ir_model_where_it_comes_from(path: Path, meanwhile: Callable[[Path], None]) -> None:
    pytest.importorskip("onnx_ir")
    model = onnxarchive.ir.load(path)
    meanwhile(path)
    model.producer_version = "mine"
    onnxarchive.save(model, path)


REPLACING = [transform_onto_itself, infer_shapes_onto_itself, save_an_ir_model_where_it_comes_from]


BY_ANOTHER = changed(runnable_model(), documented("by another"))


@pytest.mark.parametrize(
    "edit",
    [
        lambda path: edits.document(path, "by another"),
        lambda path: onnxarchive.save(BY_ANOTHER, path),
    ],
)
@pytest.mark.usefixtures("clones_or_none")
@pytest.mark.parametrize("replace", REPLACING)
@pytest.mark.parametrize("is_link", [False, True])
def test_replacing_an_archive_that_was_edited_since_it_was_read_is_refused(
    archive: Path,
    tmp_path: Path,
    replace: Callable[[Path, Callable[[Path], None]], None],
    edit: Callable[[Path], None],
    is_link: bool,
) -> None:
    given = archive
    if is_link:
        given = tmp_path / "link"
        given.symlink_to(archive)
    replace(given, lambda _: None)  # without other editors
    edited: list[bytes] = []

    def meanwhile(_: Path) -> None:
        edit(archive)
        edited.append(archive.read_bytes())

    with pytest.raises(onnxarchive.ArchiveError, match="changed since it was opened") as caught:
        replace(given, meanwhile)
    assert caught.value.path == str(given)
    require(archive, *edited)
    assert referring(archive).doc_string == "by another"


@pytest.mark.parametrize("replace", REPLACING)
def test_replacing_an_archive_that_was_removed_since_it_was_read_is_an_error(
    archive: Path, replace: Callable[[Path, Callable[[Path], None]], None]
) -> None:
    with fails_at(archive, FileNotFoundError):
        replace(archive, Path.unlink)
    assert os.listdir(archive.parent) == []
