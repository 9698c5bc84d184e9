"""Other elements for a tensor of an archive."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from edits import (
    MODEL,
    Way,
    entries_of,
    referring,
    refused,
    replace_tensor,
    require,
    weights,
    with_array,
    write_two,
    written,
)
from models import (
    NUMBERS,
    attribute,
    every_tensor,
    external,
    full_model,
    model_of,
    node,
    raw_tensor,
)
from written import saved

import onnxarchive
from onnxarchive.errors import TensorNotFoundError


def test_progress_counts_every_entry_that_is_written(
    path: Path, way: Way, request: pytest.FixtureRequest
) -> None:
    onnxarchive.save(model_of(*(raw_tensor(f"w{i}", dims=(400_000,)) for i in range(2))), path)
    with onnxarchive.open(path) as archive:
        nbytes = {name: entry.nbytes for name, entry in archive.entries.items()}
    if "on a clone" in request.node.name:
        del nbytes["w0"]
    calls: list[tuple[int, int]] = []
    ones = np.ones(400_000, np.float32)
    replace_tensor(path, "w1", ones, progress=lambda *numbers: calls.append(numbers), **way)
    done, totals = zip(*calls, strict=True)
    assert set(totals) == {sum(nbytes.values())}
    assert list(done) == sorted(set(done))
    assert done[-1] == totals[0]


@pytest.mark.parametrize("alignment", [64, 4096])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_tensor_gets_other_elements(path: Path, way: Way, index: int, alignment: int) -> None:
    model = weights(3)
    onnxarchive.save(model, path, alignment=alignment, assets={"labels": b"cat"})
    inode = path.stat().st_ino
    array = np.arange(300, dtype=np.float32)
    with onnxarchive.open(path) as archive:
        view = archive.tensors[f"w{index}"]
        replace_tensor(path, f"w{index}", array, **way)
        assert view.tobytes() == model.graph.initializer[index].raw_data
    expected = with_array(model, index, array)
    require(path, saved(expected, alignment=alignment, assets={"labels": b"cat"}))
    assert path.stat().st_ino != inode


def test_the_checksum_of_replaced_elements_is_dropped(path: Path, way: Way) -> None:
    stated = weights(2)
    for tensor in stated.graph.initializer:
        tensor.CopyFrom(
            external(tensor, tensor.name, checksum=hashlib.sha1(tensor.raw_data).hexdigest())
        )
    write_two(path, stated.SerializeToString())
    replace_tensor(path, "w0", np.ones(300, np.float32), **way)
    assert onnxarchive.check(path, full=True) == []
    kept = [len(tensor.external_data) for tensor in referring(path).graph.initializer]
    assert kept == [1, 2]


KINDS = "BOOL INT64 BFLOAT16 FLOAT8E4M3FN INT4 UINT2 FLOAT4E2M1 COMPLEX64"


@pytest.mark.parametrize("kind", KINDS.split())
@pytest.mark.parametrize("size_threshold", [0, 10**6])
def test_tensors_of_every_kind_are_replaced(
    path: Path, way: Way, kind: str, size_threshold: int
) -> None:
    before, after = (raw_tensor("w", NUMBERS[kind], (3, 7), seed) for seed in (1, 2))
    onnxarchive.save(model_of(before, raw_tensor("v")), path, size_threshold=size_threshold)
    replace_tensor(path, "w", onnx.numpy_helper.to_array(after), **way)
    require(path, saved(model_of(after, raw_tensor("v")), size_threshold=size_threshold))


LAYOUTS = {
    "scalar": np.zeros((), np.float32),
    "empty": np.zeros((0, 3), np.float32),
    "columns first": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
    "strided": np.arange(12, dtype=np.float32)[::2],
    "big-endian": np.arange(6, dtype=">f4"),
}


@pytest.mark.parametrize("array", LAYOUTS.values(), ids=LAYOUTS.keys())
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
    path: Path, way: Way
) -> None:
    model = full_model()
    onnxarchive.save(model, path, convert_attribute=True)
    array = np.arange(300, dtype=np.float32)
    replace_tensor(path, "main.b.initializer2", array, **way)
    (tensor,) = (t for t in every_tensor(model) if t.name == "main.b.initializer2")
    tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    require(path, saved(model, convert_attribute=True))
    model = written(path, "w2", "w0", "w1", asset=True)
    order = [name for name, _ in entries_of(path.read_bytes())]
    replace_tensor(path, "w0", array, **way)
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
    with refused(path, ValueError, "expected FLOAT of shape") as caught:
        replace_tensor(path, "w0", array)
    assert str(caught.value) == (
        f"{path}: tensor 'w0' (graph.initializer[0]): expected FLOAT of shape [300], found {found}"
    )


def test_a_name_that_no_tensor_or_that_several_have_is_refused(path: Path) -> None:
    model = weights(1)
    for name in "ab":
        graph = onnx.GraphProto(name=name, initializer=[raw_tensor("twice", dims=(300,))])
        model.graph.node.append(node(attribute("g", g=graph)))
    onnxarchive.save(model, path)
    for name in ("missing", "", MODEL, "twice"):
        with refused(path, TensorNotFoundError) as caught:
            replace_tensor(path, name, np.zeros(300, np.float32))
        assert str(path) in str(caught.value)
