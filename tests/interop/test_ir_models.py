"""onnx_ir's models saved: the same archive as the proto, without fetching all tensors at once."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import edits
import numpy as np
import pytest
from models import (
    MEASURE_MEMORY,
    external,
    further_model,
    model_of,
    raw_tensor,
    run_python,
    runnable_model,
)
from onnx import TensorProto, helper
from several_models import A, B, entries_of, of, require_loads
from written import saved, write_model, write_parts

import onnxarchive
import onnxarchive.ir
from onnxarchive import ArchiveFormatError, ModelNotFoundError

ir = pytest.importorskip("onnx_ir")

from ir_models import MODELS, tensors_everywhere, tensors_of_all_types  # noqa: E402

from onnxarchive.writing.onnx_ir import ArchiveTensor  # noqa: E402

MIB = 1 << 20
ASSETS = {"labels.txt": b"cat"}


@pytest.mark.parametrize("make", MODELS, ids=lambda it: it.__name__)
@pytest.mark.parametrize("size_threshold", [0, 1024, 1 << 30])
@pytest.mark.parametrize("convert_attribute", [False, True])
def test_an_ir_model_gives_the_archive_of_its_proto(
    make: Any, size_threshold: int, convert_attribute: bool
) -> None:
    options: dict[str, Any] = {"size_threshold": size_threshold}
    options["convert_attribute"] = convert_attribute
    model = ir.from_proto(make())
    proto, data = ir.to_proto(model), saved(model, **options)
    assert onnxarchive.check(data, full=True) == []
    assert onnxarchive.load(data) == proto
    assert data == saved(proto, **options)


@pytest.mark.parametrize("make", MODELS, ids=lambda it: it.__name__)
def test_an_ir_model_is_not_changed(make: Any) -> None:
    model = ir.from_proto(make())
    before = ir.to_proto(model)
    held = {name: value.const_value for name, value in model.graph.initializers.items()}
    attributes = [dict(graph_node.attributes) for graph_node in model.graph.all_nodes()]
    saved(model, size_threshold=0, convert_attribute=True)
    assert ir.to_proto(model) == before
    for name, value in model.graph.initializers.items():
        assert value.const_value is held[name]
    assert [dict(graph_node.attributes) for graph_node in model.graph.all_nodes()] == attributes


def reverse_nodes(model: Any) -> None:
    """Reverses the nodes of every graph and function, so that none is sorted topologically."""
    functions = model.functions.values()
    for graph in [
        *model.graphs(),
        *functions,
        *(graph for function in functions for graph in function.subgraphs()),
    ]:
        nodes = list(graph)
        graph.remove(nodes)
        graph.extend(reversed(nodes))


@pytest.mark.parametrize("is_failing", [False, True])
def test_an_unsorted_ir_model_is_saved_in_its_order_and_not_changed(
    path: Path, is_failing: bool
) -> None:
    model = ir.from_proto(tensors_everywhere())
    reverse_nodes(model)
    with pytest.raises(RuntimeError):
        model.clone()
    held = [id(value.const_value) for value in model.graph.initializers.values()]
    attributes = [id(one) for node in model.graph.all_nodes() for one in node.attributes.values()]
    expected = ir.to_proto(model)
    if is_failing:
        model.graph.initializers["outer"].const_value = ir.ExternalTensor(
            "missing", 0, 1600, ir.DataType.FLOAT, shape=ir.Shape([400]), name="outer"
        )
        with pytest.raises(FileNotFoundError, match="missing"):
            onnxarchive.save(model, path)
        assert not path.exists()
        held[0] = id(model.graph.initializers["outer"].const_value)
    else:
        onnxarchive.save(model, path, convert_attribute=True)
        assert onnxarchive.load(path) == expected
        assert ir.to_proto(model) == expected
    assert [id(value.const_value) for value in model.graph.initializers.values()] == held
    assert attributes == [
        id(one) for node in model.graph.all_nodes() for one in node.attributes.values()
    ]


def test_an_ir_model_is_not_changed_by_a_save_that_fails(path: Path) -> None:
    model = ir.from_proto(runnable_model())
    before = ir.to_proto(model)

    with pytest.raises(InterruptedError):
        onnxarchive.save(model, path, progress=Mock(side_effect=InterruptedError))
    assert ir.to_proto(model) == before
    assert list(path.parent.iterdir()) == []


def test_assets_and_alignment_are_taken_with_an_ir_model() -> None:
    options: dict[str, Any] = {"alignment": 4096, "assets": {"labels.txt": b"cat"}}
    model = ir.from_proto(runnable_model())
    assert saved(model, **options) == saved(ir.to_proto(model), **options)


# Lazy tensors


class _Lazy:
    """Makes lazy tensors and watches how long their evaluated data lives."""

    def __init__(self) -> None:
        self.evaluated: list[str] = []
        self.live: weakref.WeakSet[Any] = weakref.WeakSet()
        self.most_live = 0

    def tensor(self, name: str, count: int) -> Any:
        def evaluate() -> Any:
            gc.collect()
            tensor = ir.Tensor(np.full(count, len(name), np.float32), name=name)
            self.evaluated.append(name)
            self.live.add(tensor)
            self.most_live = max(self.most_live, len(self.live))
            return tensor

        return ir.LazyTensor(evaluate, ir.DataType.FLOAT, ir.Shape([count]), name=name)


def _lazy_model(lazy: _Lazy) -> Any:
    initializers = []
    for index in range(10):
        value = ir.Value(
            name=f"w{index}", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1000])
        )
        value.const_value = lazy.tensor(f"w{index}", 1000)
        initializers.append(value)
    attribute = ir.AttrTensor("value", lazy.tensor("attribute", 1000))
    constant = ir.Node("", "Constant", [], [attribute], name="k")
    graph = ir.Graph(
        [], [], nodes=[constant], initializers=initializers, opset_imports={"": 21}, name="g"
    )
    return ir.Model(graph, ir_version=10)


@pytest.mark.large
@pytest.mark.parametrize("convert_attribute", [False, True])
def test_lazy_tensors_are_evaluated_once_and_one_at_a_time(
    path: Path, convert_attribute: bool
) -> None:
    lazy = _Lazy()
    model = _lazy_model(lazy)
    onnxarchive.save(model, path, convert_attribute=convert_attribute)
    assert sorted(lazy.evaluated) == sorted(["attribute", *(f"w{index}" for index in range(10))])
    assert lazy.most_live <= 2  # the one before is let go when the next has come
    assert onnxarchive.check(path, full=True) == []
    with onnxarchive.open(path) as archive:
        assert all(np.all(archive.tensors[f"w{index}"] == 2) for index in range(10))
        names = {"attribute"} if convert_attribute else set()
        assert set(archive.entries) == {*(f"w{i}" for i in range(10)), *names, "__MODEL_PROTO"}


def test_small_lazy_tensors_stay_in_the_model() -> None:
    model = _lazy_model(_Lazy())
    data = saved(model, size_threshold=4001)
    with onnxarchive.open(data) as archive:
        assert set(archive.entries) == {"__MODEL_PROTO"}
    assert onnxarchive.load(data) == ir.to_proto(model)


def _fail() -> Any:
    raise RuntimeError("the weights are gone")


@pytest.mark.parametrize(
    ("evaluate", "error", "message"),
    [
        (_fail, RuntimeError, "the weights are gone"),
        (
            lambda: ir.Tensor(np.zeros(999, np.float32)),
            ArchiveFormatError,
            r"'w5'.*4000 bytes.*found 3996",
        ),
    ],
)
def test_a_lazy_tensor_that_fails_or_has_another_size_than_it_says_leaves_no_file(
    path: Path, evaluate: Any, error: type[Exception], message: str
) -> None:
    model = _lazy_model(_Lazy())
    lazy = ir.LazyTensor(evaluate, ir.DataType.FLOAT, ir.Shape([1000]), name="w5")
    model.graph.initializers["w5"].const_value = lazy
    with pytest.raises(error, match=message):
        onnxarchive.save(model, path)
    assert list(path.parent.iterdir()) == []


# External tensors


@pytest.mark.parametrize("size_threshold", [0, 1024, 1 << 30])
def test_an_external_tensor_has_the_bytes_of_its_file(tmp_path: Path, size_threshold: int) -> None:
    proto = tensors_of_all_types()
    held = bytearray(b"unused")
    with_files = model_of()
    for tensor in proto.graph.initializer:
        if tensor.data_type == TensorProto.STRING or not tensor.raw_data:
            with_files.graph.initializer.append(tensor)
            continue
        pairs = {"offset": len(held), "length": len(tensor.raw_data)}
        with_files.graph.initializer.append(external(tensor, "w.bin", **pairs))
        held += tensor.raw_data
    (tmp_path / "w.bin").write_bytes(held)
    model = ir.load(write_model(tmp_path / "m.onnx", with_files))
    kinds = {type(value.const_value).__name__ for value in model.graph.initializers.values()}
    assert "ExternalTensor" in kinds
    expected = ir.to_proto(ir.from_proto(proto))
    data = saved(model, size_threshold=size_threshold)
    assert onnxarchive.load(data) == expected
    assert data == saved(expected, size_threshold=size_threshold)


def test_an_external_tensor_whose_file_is_gone_is_an_error_that_leaves_no_file(
    path: Path, tmp_path: Path
) -> None:
    proto = model_of(external(raw_tensor("w", dims=(600,)), "w.bin"))
    model = ir.load(write_model(tmp_path / "m.onnx", proto))
    with pytest.raises((OSError, ArchiveFormatError), match=r"w\.bin"):
        onnxarchive.save(model, path)
    assert list(path.parent.iterdir()) == []


def test_external_tensors_are_not_in_memory_all_at_once(tmp_path: Path) -> None:
    count, nbytes = 10, 20 * MIB
    path, _ = write_parts(tmp_path, nbytes, count)
    code = f"""
{MEASURE_MEMORY}
import onnx_ir, onnxarchive
model = onnx_ir.load(sys.argv[1])
print(growth(lambda: onnxarchive.save(model, sys.argv[1] + "a", progress=sample)))
"""
    found = int(run_python(code, path))
    assert found < 3 * nbytes, found // MIB
    assert (tmp_path / "m.onnxa").stat().st_size > count * nbytes


# Unusual models


def test_an_object_that_is_no_model_is_a_type_error(path: Path) -> None:
    wrongs: list[Any] = [ir.from_proto(runnable_model()).graph, b"bytes", None]
    for wrong in wrongs:
        with pytest.raises(TypeError, match="ModelProto"):
            onnxarchive.save(wrong, path)
    assert list(path.parent.iterdir()) == []


# Several models


def test_models_of_onnx_ir_are_saved_together_with_others(path: Path) -> None:
    models = {"decoder": further_model(), "plain": of(w=A)}
    onnxarchive.save(runnable_model(), path, models=models)
    entries = entries_of(path.read_bytes())
    other = path.with_name("other")
    loaded = {id: onnxarchive.ir.load(path, model=id) for id in ("", "decoder")}
    further: dict[str, Any] = {"decoder": loaded["decoder"], "plain": of(w=A)}
    onnxarchive.save(loaded[""], other, models=further)
    assert onnxarchive.check(other, full=True) == []
    assert entries_of(other.read_bytes()) == entries
    onnxarchive.save(loaded[""], path, models=further)  # over the archive that they lie in
    assert path.read_bytes() == other.read_bytes()
    loaded["decoder"].doc_string = "alone"
    alone = path.with_name("alone")
    onnxarchive.save(loaded["decoder"], alone)
    with onnxarchive.open(alone) as archive:
        assert list(archive.models) == [""]
        assert archive.model.doc_string == "alone"
    with pytest.raises(ModelNotFoundError):
        onnxarchive.ir.load(other, model="encoder")
    for model in loaded.values():
        model.doc_string = "changed"
    edits.change_model(other, lambda model: model_of(), compact=True)
    moved = onnxarchive.ir.load(other, model="decoder")
    edits.replace_model(other, of(w=B))
    with pytest.raises(onnxarchive.ArchiveError, match="changed since"):
        onnxarchive.save(of(w=A), other, models={"decoder": moved})


@pytest.mark.parametrize("id", ["", "decoder"])
def test_a_model_that_was_loaded_is_saved_as_the_only_one(path: Path, id: str) -> None:
    onnxarchive.save(runnable_model(), path, models={"decoder": further_model()}, assets=ASSETS)
    model = onnxarchive.ir.load(path, model=id)
    other = path.with_name("other")
    onnxarchive.save(model, other)
    require_loads(other, {"": ir.to_proto(model)})
    assert other.read_bytes() == saved(ir.to_proto(model))
    onnxarchive.save(model, path, models={"plain": of(w=A)}, assets={})
    require_loads(path, {"": ir.to_proto(model), "plain": of(w=A)})


def test_a_model_that_was_loaded_is_saved_with_the_options_of_any_other(path: Path) -> None:
    model = model_of(raw_tensor("w", dims=(300,)), raw_tensor("small", dims=(10,)))
    value = helper.make_attribute("value", raw_tensor("value", dims=(500,)))
    model.graph.node.add(op_type="Constant", output=["c"], attribute=[value])
    options: dict[str, Any] = {"alignment": 4096, "convert_attribute": True, "size_threshold": 0}
    onnxarchive.save(model, path, **options)
    loaded = onnxarchive.ir.load(path)
    assert saved(loaded) == saved(ir.to_proto(loaded))
    onnxarchive.save(loaded, path)
    with onnxarchive.open(path) as archive:
        assert archive.alignment == 64
        assert list(archive.entries) == ["w", "__MODEL_PROTO"]


def test_a_model_in_memory_holds_nothing_of_the_archive_but_its_tensors(path: Path) -> None:
    onnxarchive.save(runnable_model(), path, assets=ASSETS)
    model = onnxarchive.ir.load(path)
    assert [*model.meta, *model.graph.meta] == []
    weight = model.graph.initializers["layer.0/weight"]
    tensor = weight.const_value
    assert isinstance(tensor, ArchiveTensor)
    archive = weakref.ref(tensor.archive)
    weight.const_value = ir.tensor(tensor.numpy().copy(), name=weight.name)
    del tensor
    gc.collect()
    assert archive() is None
