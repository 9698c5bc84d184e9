"""Tensors are looked up by their names alone: in any order, by any number of threads."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from processes import at_once
from steps import steps

import onnxarchive

COUNT = 700
DTYPES = (np.float32, np.int64, np.bool_, np.uint8, ml_dtypes.int4, ml_dtypes.bfloat16)


def value(index: int) -> NDArray[np.generic]:
    """Tensors of several types and shapes; some are empty, or too small to be an entry."""
    dims = [(8, 8), (64,), (2, 4, 8), (0, 3), (2,), ()][index // 7 % 6]
    numbers = np.arange(np.prod(dims, dtype=int)).reshape(dims) + index
    return (numbers % 2 if index % 3 else numbers % 7).astype(DTYPES[index % len(DTYPES)])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = [numpy_helper.from_array(value(index), f"w{index}") for index in range(COUNT)]
    graph = helper.make_graph([], "g", [], [], initializer=tensors)
    written = tmp_path_factory.mktemp("written") / "model.onnxa"
    onnxarchive.save(helper.make_model(graph), written, size_threshold=16)
    return written


def test_threads_that_look_up_in_order_get_the_same_arrays(path: Path) -> None:
    wrong: list[int] = []
    values = [value(index).tobytes() for index in range(COUNT)]
    switch_interval = sys.getswitchinterval()

    def look_up(archive: onnxarchive.Archive) -> None:
        for index in [*range(COUNT)] * 20:
            try:
                is_same = archive.tensors[f"w{index}"].tobytes() == values[index]
            except ValueError:
                is_same = False
            if not is_same:
                wrong.append(index)

    sys.setswitchinterval(1e-6)
    try:
        with onnxarchive.open(path) as archive:
            at_once(partial(look_up, archive) for _ in range(4))
    finally:
        sys.setswitchinterval(switch_interval)
    assert not wrong


@pytest.mark.parametrize("count", [1, 10, 300])
def test_after_close_the_next_tensor_in_order_is_refused(path: Path, count: int) -> None:
    with onnxarchive.open(path) as archive:
        names = list(archive.tensors)
        kept = [archive.tensors[name] for name in names[:count]]
    with pytest.raises(ValueError, match="closed"):
        archive.tensors[next(it for it in names[count:] if archive.tensors.key(it) is not None)]
    assert [it.tobytes() for it in kept] == [value(i).tobytes() for i in range(count)]


def test_names_without_order_are_found(tmp_path: Path) -> None:
    tensors = [numpy_helper.from_array(np.full(8, i, np.float32), f"w{i}") for i in range(40)]
    tensors += [numpy_helper.from_array(np.zeros(8, np.float32), "w3")]  # ambiguous
    graph = helper.make_graph([], "g", [], [], initializer=tensors)
    onnxarchive.save(helper.make_model(graph), tmp_path / "model.onnxa", size_threshold=0)
    with onnxarchive.open(tmp_path / "model.onnxa") as archive:
        assert {name: array[0] for name, array in archive.tensors.items()} == {
            f"w{i}": i for i in range(40) if i != 3
        }
        with pytest.raises(onnxarchive.TensorNotFoundError, match="several"):
            archive.tensors["w3"]


@pytest.mark.parametrize("name", [None, 5, b"w0", "missing"])
def test_what_is_no_name_is_not_found_at_any_point_of_the_order(path: Path, name: object) -> None:
    with onnxarchive.open(path) as archive:
        for known in (None, "w0", "w1", "w2"):
            if known:
                archive.tensors[known]
            with pytest.raises(onnxarchive.TensorNotFoundError, match="expected the name"):
                archive.tensors[name]  # type: ignore[index]
            assert archive.tensors.get(name) is None  # type: ignore[call-overload]


def test_a_name_that_is_missing_is_not_looked_for_in_the_whole_model(path: Path) -> None:
    with onnxarchive.open(path) as archive:
        assert "missing" not in archive.tensors
        assert steps(lambda: archive.tensors.get("missing")) < 100
