"""Edits interrupted by an exception, and the files of killed ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from edits import (
    add_asset,
    added,
    change_model,
    changed,
    new_model,
    replace_model,
    replace_tensor,
    require,
    weights,
)
from models import model_of
from written import saved

import onnxarchive
from onnxarchive.editing.recovery import Recovery, recover

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
    "add_asset": lambda path, progress: add_asset(path, "new", b"data", progress=progress),
}


@pytest.mark.usefixtures("clones_or_none")
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
@pytest.mark.parametrize("call", BROKEN_OFF.values(), ids=BROKEN_OFF.keys())
def test_a_change_that_is_broken_off_is_taken_back_at_once(
    path: Path, call: Callable[..., None], error: type[BaseException]
) -> None:
    onnxarchive.save(weights(2), path)
    before = path.read_bytes()
    calls: list[tuple[int, int]] = []
    call(path, lambda *numbers: calls.append(numbers))
    done, totals = zip(*calls, strict=True)
    assert len(set(totals)) == 1
    assert list(done) == sorted(done)
    assert done[-1] == totals[0]
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


# Files left behind


def test_what_killed_processes_left_is_removed_if_it_begins_as_an_archive(path: Path) -> None:
    onnxarchive.save(weights(1), path)
    half = path.read_bytes()[:700]
    assert recover(path) == Recovery(is_rolled_back=False, removed=())
    require(path, saved(weights(1)))
    left = [path.with_name(f".{path.name}.4242-{number}.tmp") for number in range(2)]
    kept = {
        path.with_name(f".{path.name}.tmp"): half,
        path.with_name(f".{path.name}.4242-2.tmp"): b"somebody's own",
        path.with_name(f".{path.name}.4242-3.tmp"): b"PK\3\4, but no archive",
    }
    left[0].write_bytes(half)
    left[1].write_bytes(b"")
    for name, content in kept.items():
        name.write_bytes(content)
    assert recover(path) == Recovery(False, tuple(str(name.resolve()) for name in left))
    assert {name: name.read_bytes() for name in kept} == kept
    assert sorted(path.parent.iterdir()) == sorted([*kept, path])
    path.unlink()
    left[0].write_bytes(half)
    assert recover(path) == Recovery(False, (str(left[0].resolve()),))
    with pytest.raises(FileNotFoundError):
        recover(path)
