from __future__ import annotations

import mmap
import tracemalloc
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings, strategies as st
from models import (
    MEASURE_MEMORY,
    attribute,
    external,
    full_model,
    model_of,
    raw_tensor,
    run_python,
    string_tensor,
    typed,
)
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper
from steps import steps
from zlib_ng import zlib_ng

import onnxarchive
from onnxarchive.archive.options import WriteOptions
from onnxarchive.archive.planning import ModelToStore, plan_archive
from onnxarchive.archive.writing import write_archive
from onnxarchive.buffers.data import Stored
from onnxarchive.errors import ArchiveFormatError
from onnxarchive.model import tensors
from onnxarchive.model.deduplication import Deduplicated, deduplicate
from onnxarchive.model.tensors import TensorRef
from onnxarchive.model.walking import Path

FLOAT = TensorProto.FLOAT


def _no_data(ref: TensorRef) -> Iterable[memoryview]:
    raise AssertionError(f"{ref} is not external")


def _deduplicated(model: onnx.ModelProto) -> Deduplicated[Iterable[memoryview]]:
    return deduplicate(model, _no_data)


def _names(graph: GraphProto) -> list[str]:
    return [tensor.name for tensor in graph.initializer]


def _inputs(nodes: Iterable[NodeProto]) -> list[list[str]]:
    return [list(node.input) for node in nodes]


def _taking(*names: str, **graphs: GraphProto) -> NodeProto:
    """A node that takes these values and has these subgraphs."""
    attributes = [attribute(name, g=graph) for name, graph in graphs.items()]
    return NodeProto(op_type="Any", domain="test", input=names, attribute=attributes)


def _giving(output: str, *names: str) -> NodeProto:
    return NodeProto(op_type="Any", domain="test", input=names, output=[output])


def _graph(*tensor_names: str, nodes: Sequence[NodeProto] = (), **fields: Any) -> GraphProto:
    """A graph whose initializers are all identical."""
    initializers = [raw_tensor(name) for name in tensor_names]
    return GraphProto(name="inner", initializer=initializers, node=nodes, **fields)


def _model_of(
    *tensor_names: str, nodes: Sequence[NodeProto] = (), **fields: Any
) -> onnx.ModelProto:
    model = model_of()
    model.graph.CopyFrom(_graph(*tensor_names, nodes=nodes, **fields))
    return model


def _value(name: str, dims: Sequence[int] = (4,)) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, FLOAT, dims)


# Identical tensors


def test_identical_initializers_become_the_first_of_them() -> None:
    model = _model_of("a", "b", "c", nodes=[_taking("c", "b", "x", "a", "")])
    model.graph.initializer.insert(1, raw_tensor("other", seed=1))
    done = _deduplicated(model)
    assert _names(done.model.graph) == ["a", "other"]
    assert _inputs(done.model.graph.node) == [["a", "a", "x", "a", ""]]
    assert (done.removed, done.saved_nbytes) == (2, 32)


def test_initializers_that_nothing_uses_become_one_too() -> None:
    assert _names(_deduplicated(_model_of("a", "b")).model.graph) == ["a"]


def test_the_original_is_not_changed() -> None:
    model = _model_of(
        "a", "b", nodes=[_taking("b", inner=_graph("c", "d", nodes=[_taking("b", "d")]))]
    )
    model.graph.value_info.append(_value("b"))
    before = model.SerializeToString(deterministic=True)
    assert _deduplicated(model).removed == 2
    assert model.SerializeToString(deterministic=True) == before


def test_a_model_without_identical_initializers_stays_the_same() -> None:
    model = full_model()
    done = _deduplicated(model)
    assert done.model is model  # not copied
    assert (done.removed, done.saved_nbytes) == (0, 0)


def _float(name: str, value: float) -> TensorProto:
    return TensorProto(
        name=name, data_type=FLOAT, dims=[1], raw_data=np.array([value], "<f4").tobytes()
    )


def _bits(name: str, bits: int) -> TensorProto:
    return TensorProto(name=name, data_type=FLOAT, dims=[1], raw_data=bits.to_bytes(4, "little"))


def _described(name: str, **fields: Any) -> TensorProto:
    tensor = TensorProto(doc_string=fields.pop("doc_string", None), **fields)
    tensor.MergeFrom(raw_tensor(name))
    return tensor


def _prop(key: str, value: str) -> onnx.StringStringEntryProto:
    return onnx.StringStringEntryProto(key=key, value=value)


def _with_unknown_field(name: str) -> TensorProto:
    tensor = raw_tensor(name)
    tensor.MergeFromString(b"\xa2\x06\x03new")  # field 100
    return tensor


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (raw_tensor("a", dims=(4,)), raw_tensor("b", dims=(2, 2))),
        (raw_tensor("a", dims=(0,)), raw_tensor("b", dims=(0, 1))),
        (raw_tensor("a", TensorProto.INT32), raw_tensor("b", TensorProto.UINT32)),
        (raw_tensor("a"), raw_tensor("b", seed=1)),
        (_float("a", 0.0), _float("b", -0.0)),
        (_bits("a", 0x7FC00000), _bits("b", 0x7FC00001)),
        (raw_tensor("a"), _described("b", doc_string="why")),
        (_described("a", doc_string="how"), _described("b", doc_string="why")),
        (raw_tensor("a"), _described("b", metadata_props=[_prop("k", "v")])),
        (string_tensor("a"), string_tensor("b")),
        (_with_unknown_field("a"), _with_unknown_field("b")),
        (raw_tensor(""), raw_tensor("b")),
        (raw_tensor("b"), raw_tensor("")),
    ],
    ids=[
        "shape",
        "shape of nothing",
        "type",
        "bytes",
        "sign of zero",
        "payload of NaN",
        "doc_string of one",
        "doc_string of both",
        "metadata",
        "strings",
        "field of a later ONNX",
        "no name, first",
        "no name, second",
    ],
)
def test_initializers_that_differ_in_anything_both_stay(
    first: TensorProto, second: TensorProto
) -> None:
    model = model_of(first, second)
    model.graph.node.append(_taking(first.name, second.name, ""))
    done = _deduplicated(model)
    assert done.model == model
    assert done.removed == 0


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (raw_tensor("a"), typed(raw_tensor("b"))),
        (_bits("a", 0x7FC00001), _bits("b", 0x7FC00001)),
        (_described("a", doc_string="why"), _described("b", doc_string="why")),
        (
            _described("a", metadata_props=[_prop("k", "v")]),
            _described("b", metadata_props=[_prop("k", "v")]),
        ),
        (raw_tensor("a", dims=(0,)), raw_tensor("b", dims=(0,))),
        (raw_tensor("a", dims=()), raw_tensor("b", dims=())),
        (raw_tensor("a", TensorProto.INT4, (3,)), typed(raw_tensor("b", TensorProto.INT4, (3,)))),
    ],
    ids=["raw and typed", "NaN", "doc_string", "metadata", "empty", "scalar", "packed"],
)
def test_initializers_that_say_the_same_become_one(first: TensorProto, second: TensorProto) -> None:
    assert _names(_deduplicated(model_of(first, second)).model.graph) == ["a"]


def _bytes(name: str, raw_data: bytes) -> TensorProto:
    return TensorProto(
        name=name, data_type=TensorProto.UINT8, dims=[len(raw_data)], raw_data=raw_data
    )


def test_tensors_of_the_same_checksum_and_different_bytes_stay() -> None:
    first, second = b"plumless", b"buckeroo"
    assert zlib.crc32(first) == zlib.crc32(second)
    done = _deduplicated(model_of(_bytes("a", first), _bytes("b", second), _bytes("c", second)))
    assert _names(done.model.graph) == ["a", "b"]


def test_a_tensor_without_the_bytes_that_its_shape_needs_is_refused() -> None:
    short = raw_tensor("b")
    short.raw_data = short.raw_data[:-1]
    with pytest.raises(ArchiveFormatError, match=r"'b'.*expected 16 bytes.*found 15"):
        _deduplicated(model_of(raw_tensor("a"), short))


# Tensors that stay, with any data


@pytest.mark.parametrize("overridable", ["a", "b"])
def test_an_initializer_that_a_caller_can_override_neither_goes_nor_stands_for_another(
    overridable: str,
) -> None:
    model = _model_of("a", "b", nodes=[_taking("a", "b")], input=[_value(overridable)])
    assert _deduplicated(model).model == model


@pytest.mark.parametrize("output", ["a", "b", "c"])
def test_an_output_stays_and_the_others_become_it(output: str) -> None:
    done = _deduplicated(
        _model_of("a", "b", "c", nodes=[_taking("a", "b", "c")], output=[_value(output)])
    )
    assert _names(done.model.graph) == [output]
    assert [value.name for value in done.model.graph.output] == [output]
    assert _inputs(done.model.graph.node) == [[output] * 3]


def test_two_outputs_both_stay() -> None:
    done = _deduplicated(_model_of("a", "b", "c", output=[_value("c"), _value("b")]))
    assert _names(done.model.graph) == ["b", "c"]


def test_the_output_of_a_subgraph_may_be_an_initializer_around_it() -> None:
    inner = _graph(output=[_value("b")])
    done = _deduplicated(_model_of("a", "b", nodes=[_taking("a", inner=inner)]))
    assert _names(done.model.graph) == ["b"]
    assert done.model.graph.node[0].input == ["b"]


def test_an_output_of_a_subgraph_is_its_own_value_where_it_has_one_of_that_name() -> None:
    inner = _graph("b", output=[_value("b")])
    done = _deduplicated(_model_of("a", "b", nodes=[_taking("a", inner=inner)]))
    assert _names(done.model.graph) == ["a"]


@pytest.mark.parametrize("named", ["a", "b"])
def test_what_a_quantization_annotation_names_is_left_alone(named: str) -> None:
    annotated = onnx.TensorAnnotation(tensor_name=named)
    parameter = onnx.TensorAnnotation(
        tensor_name="x", quant_parameter_tensor_names=[_prop("SCALE_TENSOR", named)]
    )
    for annotation in (annotated, parameter):
        model = _model_of("a", "b", quantization_annotation=[annotation])
        assert _deduplicated(model).model == model
        inner = _graph(quantization_annotation=[annotation])
        model = _model_of("a", "b", nodes=[_taking(inner=inner)])
        assert _deduplicated(model).model == model


@pytest.mark.parametrize("named", ["a", "b"])
def test_what_a_sharding_names_is_left_alone(named: str) -> None:
    node = _taking("a", "b")
    node.device_configurations.add().sharding_spec.add(tensor_name=named)
    model = _model_of("a", "b", nodes=[node])
    assert _deduplicated(model).model == model


@pytest.mark.parametrize("named", ["a", "b"])
def test_what_is_differentiated_is_left_alone(named: str) -> None:
    gradient = helper.make_node(
        "Gradient", ["a", "b"], ["g"], domain="ai.onnx.preview.training", xs=[named], y="y"
    )
    model = _model_of("a", "b", nodes=[gradient])
    assert _deduplicated(model).model == model


@pytest.mark.parametrize("named", ["a", "b"])
@pytest.mark.parametrize(
    "training",
    [
        lambda named: onnx.TrainingInfoProto(update_binding=[_prop(named, "new")]),
        lambda named: onnx.TrainingInfoProto(initialization_binding=[_prop(named, "new")]),
        lambda named: onnx.TrainingInfoProto(algorithm=_graph(nodes=[_taking(named)])),
        lambda named: onnx.TrainingInfoProto(initialization=_graph(nodes=[_taking(named)])),
        lambda named: onnx.TrainingInfoProto(
            algorithm=_graph(nodes=[_taking(inner=_graph(nodes=[_taking(named)]))])
        ),
        lambda named: onnx.TrainingInfoProto(algorithm=_graph(named)),
        lambda named: onnx.TrainingInfoProto(algorithm=_graph(output=[_value(named)])),
        lambda named: onnx.TrainingInfoProto(
            algorithm=_graph(
                nodes=[
                    helper.make_node("Gradient", ["x"], ["g"], xs=[named], y="x"),
                ]
            )
        ),
    ],
    ids=[
        "updated",
        "initialized",
        "taken",
        "taken to initialize",
        "taken below",
        "same name",
        "given out",
        "differentiated",
    ],
)
def test_what_training_changes_or_uses_is_left_alone(
    training: Callable[[str], onnx.TrainingInfoProto], named: str
) -> None:
    model = _model_of("a", "b", nodes=[_taking("a", "b")])
    model.training_info.append(training(named))
    assert _deduplicated(model).model == model


def test_what_training_does_not_name_becomes_one_and_its_own_graphs_stay() -> None:
    model = _model_of("a", "b", "c", nodes=[_taking("c")])
    algorithm = _graph("s", "t", nodes=[_taking("t", inner=_graph("u", "v"))])
    model.training_info.append(
        onnx.TrainingInfoProto(algorithm=algorithm, update_binding=[_prop("a", "new")])
    )
    done = _deduplicated(model)
    assert _names(done.model.graph) == ["a", "b"]
    assert done.model.graph.node[0].input == ["b"]
    assert done.model.training_info == model.training_info


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_name_that_a_graph_defines_twice_is_left_alone(name: str) -> None:
    twice = _model_of("a", "b", name)
    sparse = _model_of("a", "b")
    sparse.graph.sparse_initializer.add().values.CopyFrom(raw_tensor(name))
    output = _model_of("a", "b", nodes=[_giving(name, "b", "a")])
    for model in (twice, sparse, output):
        assert _deduplicated(model).model == model


def test_sparse_initializers_and_attributes_stay() -> None:
    model = _model_of("a")
    for name in ("s", "t"):
        sparse = model.graph.sparse_initializer.add(dims=[10])
        sparse.values.CopyFrom(raw_tensor(name))
        sparse.indices.CopyFrom(raw_tensor("", TensorProto.INT64))
    node = _taking("s", "t")
    node.attribute.append(attribute("value", t=raw_tensor("v")))
    model.graph.node.append(node)
    assert _deduplicated(model).model == model


def test_names_that_are_not_utf_8_stay() -> None:
    model = _model_of("aa", "bb", "cc", nodes=[_taking("bb", "cc")])
    broken = onnx.ModelProto.FromString(model.SerializeToString().replace(b"bb", b"\xff\xff"))
    done = _deduplicated(broken)
    assert [tensor.name for tensor in done.model.graph.initializer] == ["aa", b"\xff\xff"]
    assert list(done.model.graph.node[0].input) == [b"\xff\xff", "aa"]


# Names


def test_the_value_info_of_what_is_removed_goes_with_it() -> None:
    inner = _graph(value_info=[_value("b"), _value("own")])
    shadowing = _graph("b", value_info=[_value("b")])
    model = _model_of("a", "b", nodes=[_taking(inner=inner, shadowing=shadowing)])
    model.graph.value_info.extend([_value("a"), _value("b"), _value("x"), _value("b")])
    graph = _deduplicated(model).model.graph
    assert [value.name for value in graph.value_info] == ["a", "x"]
    inner, shadowing = (attribute.g for attribute in graph.node[0].attribute)
    assert [value.name for value in inner.value_info] == ["own"]
    assert [value.name for value in shadowing.value_info] == ["b"]


def test_a_capture_is_renamed_at_any_depth() -> None:
    innermost = _graph(nodes=[_taking("b", "x")])
    inner = _graph(nodes=[_taking("x", g=innermost), _taking("b")])
    graph = _deduplicated(_model_of("a", "b", nodes=[_taking(g=inner)])).model.graph
    assert _names(graph) == ["a"]
    inner = graph.node[0].attribute[0].g
    assert _inputs(inner.node) == [["x"], ["a"]]
    assert _inputs(inner.node[0].attribute[0].g.node) == [["a", "x"]]


@pytest.mark.parametrize(
    "shadowing",
    [
        GraphProto(input=[_value("b")]),
        GraphProto(initializer=[raw_tensor("b", seed=1)]),
        GraphProto(sparse_initializer=[onnx.SparseTensorProto(values=raw_tensor("b", seed=1))]),
        GraphProto(node=[_giving("b", "x")]),
    ],
    ids=["input", "initializer", "sparse initializer", "output of a node"],
)
def test_a_name_that_a_subgraph_defines_anew_is_not_renamed_in_it(shadowing: GraphProto) -> None:
    inner = GraphProto()
    inner.CopyFrom(shadowing)
    inner.node.append(_taking("b", g=_graph(nodes=[_taking("b")])))
    model = _model_of("a", "b", nodes=[_taking("b", g=inner), _taking("b")])
    done = _deduplicated(model).model
    assert _names(done.graph) == ["a"]
    assert _inputs(done.graph.node) == [["a"], ["a"]]
    assert done.graph.node[0].attribute[0].g == inner


def test_no_subgraph_is_made_to_capture_what_another_one_shadows() -> None:
    taking, shadowing = _graph(nodes=[_taking("b")]), _graph(input=[_value("a")])
    model = _model_of("a", "b", nodes=[_taking(taking=taking, shadowing=shadowing), _taking("b")])
    assert _deduplicated(model).model == model
    model = _model_of("a", "b", nodes=[_taking("b", shadowing=shadowing)])
    assert _names(_deduplicated(model).model.graph) == ["a"]


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_capture_is_not_renamed_to_what_a_subgraph_means_by_the_name(level: int) -> None:
    inner = _graph(nodes=[_taking("b")])
    for number in range(3):
        if number == level:
            inner.initializer.append(raw_tensor("a", seed=1))
        inner = _graph(nodes=[_taking(g=inner)])
    model = _model_of("a", "b", "c", nodes=[_taking("b", "c", g=inner)])
    done = _deduplicated(model).model
    assert _names(done.graph) == ["a", "b"]
    assert _inputs(done.graph.node) == [["b", "a"]]
    assert done.graph.node[0].attribute[0].g == inner


def test_what_cannot_become_the_first_becomes_the_second() -> None:
    inner = _graph(nodes=[_taking("b", "c")], input=[_value("a")])
    done = _deduplicated(_model_of("a", "b", "c", nodes=[_taking(g=inner)])).model
    assert _names(done.graph) == ["a", "b"]
    assert _inputs(done.graph.node[0].attribute[0].g.node) == [["b", "b"]]


def test_a_name_that_a_subgraph_gives_up_is_free_for_that_of_the_graph_around_it() -> None:
    inner = _graph(nodes=[_taking("a", "b", "own")])
    inner.initializer.extend([raw_tensor("own", seed=1), raw_tensor("a", seed=1)])
    done = _deduplicated(_model_of("a", "b", nodes=[_taking(g=inner)])).model
    assert _names(done.graph) == ["a"]
    inner = done.graph.node[0].attribute[0].g
    assert _names(inner) == ["own"]
    assert _inputs(inner.node) == [["own", "a", "own"]]


def test_initializers_of_different_graphs_stay() -> None:
    graphs = {name: _graph(name, nodes=[_taking(name, "a")]) for name in ("then", "else")}
    model = _model_of("a", nodes=[_taking("a", **graphs)])
    assert _deduplicated(model).model == model


def test_every_subgraph_is_looked_at_by_itself() -> None:
    inner = _graph("c", "d", nodes=[_taking("c", "d")])
    node = _taking(first=inner)
    node.attribute.append(attribute("more", graphs=[_graph("e"), _graph("f", "g")]))
    done = _deduplicated(_model_of("a", "b", nodes=[_taking("b"), node]))
    first, more = done.model.graph.node[1].attribute
    assert _names(done.model.graph) == ["a"]
    assert _names(first.g) == ["c"]
    assert _inputs(first.g.node) == [["c", "c"]]
    assert [_names(graph) for graph in more.graphs] == [["e"], ["f"]]
    assert (done.removed, done.saved_nbytes) == (3, 48)


def test_graphs_in_functions_are_looked_at_and_functions_see_nothing_of_the_caller() -> None:
    inner = _graph("c", "d", nodes=[_taking("c", "d", "b")])
    default = _graph("e", "f", nodes=[_taking("f")])
    function = onnx.FunctionProto(
        name="f",
        domain="test",
        input=["b"],
        node=[_taking("b"), _taking("b", g=inner)],
        attribute_proto=[attribute("body", g=default)],
    )
    model = _model_of("a", "b", nodes=[_taking("b")])
    model.functions.extend([onnx.FunctionProto(name="empty"), function])
    done = _deduplicated(model)
    changed = done.model.functions[1]
    assert _names(done.model.graph) == ["a"]
    assert _inputs(changed.node) == [["b"], ["b"]]
    assert _names(changed.node[1].attribute[0].g) == ["c"]
    assert _inputs(changed.node[1].attribute[0].g.node) == [["c", "c", "b"]]
    assert _names(changed.attribute_proto[0].g) == ["e"]
    assert _inputs(changed.attribute_proto[0].g.node) == [["e"]]
    assert done.removed == 3


def test_subgraphs_may_be_nested_deeper_than_python_recurses() -> None:
    depth = 1100
    model = _model_of("a", "b")
    graph = model.graph
    for _ in range(depth):
        graph = (
            graph.node.add(input=["b"], attribute=[attribute("g", g=GraphProto())]).attribute[0].g
        )
        graph.name = "level"
    graph.initializer.extend([raw_tensor("c"), raw_tensor("d")])
    graph.node.append(_taking("d", "b"))
    done = _deduplicated(model)
    assert done.removed == 2
    graph = done.model.graph
    for _ in range(depth):
        assert graph.node[0].input == ["a"]
        graph = graph.node[0].attribute[0].g
    assert _inputs(graph.node) == [["c", "a"]]


# External data


class _External:
    """A model some of whose tensors are external, and their data by their place in it."""

    def __init__(self, model: onnx.ModelProto, paths: Iterable[Path] | None = None) -> None:
        self.model = onnx.ModelProto()
        self.model.CopyFrom(model)
        self.data: dict[Path, bytes] = {}
        self.calls: list[Path] = []
        for ref in list(tensors.walk(self.model)):
            if tensors.stored_type(ref.tensor) and (paths is None or ref.path in set(paths)):
                self.data[ref.path] = bytes(tensors.raw_data(ref))
                tensors.set_location(ref.tensor, f"file{len(self.data)}")

    def resolve(self, ref: TensorRef) -> Iterator[memoryview]:
        self.calls.append(ref.path)
        data = memoryview(self.data[ref.path])
        # Cut differently each time, with empty pieces in between.
        size = 1 + (len(self.calls) * 5) % 7
        for start in range(0, len(data), size):
            yield data[start : start + size]
            yield data[:0]


def _filled(done: Deduplicated[Iterator[memoryview]]) -> onnx.ModelProto:
    """The model with its external data put into it."""
    model = onnx.ModelProto()
    model.CopyFrom(done.model)
    for ref in tensors.walk(model):
        if ref.tensor.data_location == TensorProto.EXTERNAL:
            tensors.set_raw_data(ref.tensor, b"".join(done.resolve(ref)))
    return model


def test_external_data_is_found_where_it_was_before() -> None:
    model = _model_of("a", "b", nodes=[_taking("b", g=_graph("c", "d"))])
    model.graph.initializer.append(raw_tensor("e", seed=1))
    model.graph.initializer.append(raw_tensor("f"))
    model.graph.initializer.append(raw_tensor("g", seed=2))
    model.graph.node[0].attribute[0].g.initializer.append(raw_tensor("h", seed=3))
    model.graph.node.append(NodeProto(attribute=[attribute("t", t=raw_tensor("t", seed=4))]))
    source = _External(model)
    done = deduplicate(source.model, source.resolve)
    assert _names(done.model.graph) == ["a", "e", "g"]
    assert done.saved_nbytes == 48
    assert _filled(done) == _deduplicated(model).model


def test_external_and_embedded_tensors_of_the_same_bytes_become_the_first() -> None:
    first: Path = (("graph", None), ("initializer", 0))
    second: Path = (("graph", None), ("initializer", 1))
    model = _model_of("a", "b", nodes=[_taking("b")])
    for paths in ([first], [second], [first, second]):
        source = _External(model, paths)
        done = deduplicate(source.model, source.resolve)
        assert _names(done.model.graph) == ["a"]
        assert (done.model.graph.initializer[0].data_location == TensorProto.EXTERNAL) == (
            first in paths
        )
        assert _filled(done) == _deduplicated(model).model


def test_only_what_another_may_be_identical_to_is_read() -> None:
    tensor_list = [raw_tensor("a"), raw_tensor("b", dims=(5,)), raw_tensor("c", TensorProto.INT32)]
    source = _External(model_of(*tensor_list))
    assert deduplicate(source.model, source.resolve).removed == 0
    assert source.calls == []


def test_large_tensors_that_differ_at_first_are_not_read_further() -> None:
    datas = [bytes([index]) + bytes(1 << 16) for index in (0, 1, 0, 2)]
    datas[2] = datas[2][:-1] + b"x"  # differs from the first at the end
    datas.append(datas[1])
    source = _External(model_of(*(_bytes(f"w{i}", data) for i, data in enumerate(datas))))
    read = [0] * len(datas)

    def resolve(ref: TensorRef) -> Iterator[memoryview]:
        for piece in source.resolve(ref):
            index = ref.path[-1][1]
            assert index is not None
            read[index] += len(piece)
            yield piece

    assert deduplicate(source.model, resolve).saved_nbytes == len(datas[1])
    assert read[3] < 1 << 13
    assert read[0] > len(datas[0])


@pytest.mark.parametrize("short", [0, 1])
def test_data_that_ends_early_is_not_identical(short: int) -> None:
    data = bytes.fromhex("9d0ad96d")
    assert zlib.crc32(data) == zlib.crc32(b"")
    source = _External(model_of(_bytes("a", data), _bytes("b", data)))
    source.data[list(source.data)[short]] = b""
    assert deduplicate(source.model, source.resolve).removed == 0


def test_tensors_of_one_checksum_are_not_compared_each_with_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zlib_ng, "crc32", lambda data, before=0: 0)  # as if they were made so

    def steps_of(count: int) -> int:
        data = [index.to_bytes(4, "little") for index in range(count // 2)] * 2
        model = model_of(*(_bytes(f"w{index}", it) for index, it in enumerate(data)))
        removed = 0

        def run() -> None:
            nonlocal removed
            removed = _deduplicated(model).removed

        found = steps(run)
        assert removed == count // 2
        return found

    assert steps_of(800) < 5 * steps_of(200)


def test_names_that_cannot_stand_for_one_another_are_not_tried_each_with_each() -> None:
    def steps_of(count: int) -> int:
        names = [f"w{index}" for index in range(count)]
        shadowing = _graph(input=[_value(name) for name in names])
        capturing = _graph(nodes=[_taking(*names)])
        model = _model_of(*names, nodes=[_taking(a=shadowing, b=capturing)])
        return steps(lambda: _deduplicated(model))

    assert steps_of(800) < 5 * steps_of(200)


def test_a_deduplicated_model_becomes_an_archive(tmp_path: FilePath) -> None:
    model = _model_of("a", "b", nodes=[_taking("b")])
    model.graph.initializer.append(raw_tensor("c", seed=1))
    source = _External(model)
    done = deduplicate(source.model, lambda ref: Stored(memoryview(source.data[ref.path])))
    path = tmp_path / "model.onnxa"
    options = WriteOptions(size_threshold=0)
    write_archive(
        plan_archive({"": ModelToStore(done.model, done.resolve)}, options), path, options
    )
    assert onnxarchive.load(path) == _deduplicated(model).model


def test_large_tensors_are_compared_piece_by_piece(tmp_path: FilePath) -> None:
    nbytes = 64 << 20
    pattern = np.arange(1 << 17, dtype=np.uint32).tobytes()
    for name in ("first", "second"):
        (tmp_path / name).write_bytes(pattern * (nbytes // len(pattern)))
    model = model_of(*(external(raw_tensor(name, dims=(1,)), name) for name in ("first", "second")))
    for tensor in model.graph.initializer:
        tensor.dims[:] = [nbytes // 4]
    views = []
    for name in ("first", "second"):
        with open(tmp_path / name, "rb") as file:
            views.append(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))

    def resolve(ref: TensorRef) -> Iterator[memoryview]:
        _, index = ref.path[-1]
        assert index is not None
        size = (8 << 20) + index * 12345
        for start in range(0, nbytes, size):
            yield views[index][start : start + size]

    tracemalloc.start()
    try:
        done = deduplicate(model, resolve)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (done.removed, done.saved_nbytes) == (1, nbytes)
    assert peak < 4 << 20


def test_what_is_removed_is_not_copied() -> None:
    code = f"""
{MEASURE_MEMORY}
from models import model_of, raw_tensor
from onnxarchive.model.deduplication import deduplicate
data = bytes(range(256)) * (1 << 16)
model = model_of()
for name in "abcdefghij":
    model.graph.initializer.add(name=name, data_type=2, dims=[len(data)], raw_data=data)
done = None
def call():
    global done
    done = deduplicate(model, None)
print(growth(call))
assert done.saved_nbytes == 9 * len(data)
"""
    # The one that stays, two that are compared, and what the allocator holds on to.
    assert int(run_python(code)) < 5 * (16 << 20)


# Random models of any names: what each of them means stays


_RANDOM_NAMES = st.sampled_from(["", "a", "b", "c", "d", "x"])


@st.composite
def _scoped_graphs(draw: st.DrawFn, depth: int = 2) -> GraphProto:
    """Graphs in which few names are defined and used in every way, many of them forbidden."""

    def some(most: int) -> list[str]:
        return draw(st.lists(_RANDOM_NAMES, max_size=most))

    graph = GraphProto(
        initializer=[
            raw_tensor(name, dims=(2,), seed=draw(st.integers(0, 1)))
            for name in draw(st.lists(_RANDOM_NAMES, max_size=6, unique=draw(st.booleans())))
        ]
    )
    for _ in range(draw(st.integers(0, 2))):
        node = graph.node.add(input=some(3), output=some(1) if draw(st.booleans()) else [])
        if depth and draw(st.booleans()):
            inner = draw(st.lists(_scoped_graphs(depth - 1), max_size=2))
            node.attribute.append(attribute("graphs", graphs=inner))
    if draw(st.integers(0, 3)) == 0:
        graph.input.extend(map(_value, some(1)))
        graph.output.extend(map(_value, some(2)))
        graph.value_info.extend(map(_value, some(2)))
        for name in some(1):
            graph.quantization_annotation.add(tensor_name=name)
        for name in some(1):
            graph.sparse_initializer.add().values.name = name
    return graph


@st.composite
def _scoped_models(draw: st.DrawFn) -> onnx.ModelProto:
    model = model_of()
    model.graph.CopyFrom(draw(_scoped_graphs()))
    if draw(st.integers(0, 3)) == 0:
        inner = draw(st.lists(_scoped_graphs(1), max_size=2))
        function = model.functions.add(name="function")
        function.node.add(input=["a"], attribute=[attribute("graphs", graphs=inner)])
    if draw(st.integers(0, 3)) == 0:
        training = model.training_info.add(algorithm=draw(_scoped_graphs(1)))
        training.update_binding.append(_prop(draw(_RANDOM_NAMES), "new"))
    return model


# What a name stands for: the bytes of an initializer, or the graph that defines it and the name.
_Meaning = Any


def _definitions(graph: GraphProto, place: str) -> dict[str, list[_Meaning]]:
    found: dict[str, list[_Meaning]] = {}
    for tensor in graph.initializer:
        found.setdefault(tensor.name, []).append(tensor.raw_data)
    others = [
        *(value.name for value in graph.input),
        *(sparse.values.name for sparse in graph.sparse_initializer),
        *(name for node in graph.node for name in node.output),
    ]
    for name in others:
        found.setdefault(name, []).append((place, name))
    return found


def _meanings(
    graph: GraphProto, place: str, outer: Mapping[str, list[_Meaning]]
) -> Iterator[tuple[str, _Meaning]]:
    """What the names that a graph and its subgraphs use stand for."""
    visible = {**outer, **_definitions(graph, place)}
    for index, node in enumerate(graph.node):
        for name in node.input:
            yield place, visible.get(name, name) if name else name
        for node_attribute in node.attribute:
            for number, inner in enumerate(node_attribute.graphs):
                yield from _meanings(inner, f"{place}/{index}.{number}", visible)
    kept = [value.name for value in graph.output]
    kept += [annotation.tensor_name for annotation in graph.quantization_annotation]
    for name in kept:
        yield place, (name, visible.get(name))
    for value in graph.input:
        yield place, (value.name, visible[value.name])


def _all_meanings(model: onnx.ModelProto) -> list[tuple[str, _Meaning]]:
    found = list(_meanings(model.graph, "main", {}))
    visible = _definitions(model.graph, "main")
    for number, training in enumerate(model.training_info):
        found.extend(_meanings(training.algorithm, f"training{number}", visible))
        found.extend(
            ("bound", (binding.key, visible.get(binding.key)))
            for binding in training.update_binding
        )
    for function in model.functions:
        for inner in function.node[0].attribute[0].graphs:
            found.extend(_meanings(inner, "function", {}))
    return found


@settings(deadline=None, max_examples=150)
@given(_scoped_models())
def test_every_name_means_the_same_afterwards(model: onnx.ModelProto) -> None:
    done = _deduplicated(model)
    assert _all_meanings(done.model) == _all_meanings(model)


@settings(deadline=None, max_examples=80)
@given(_scoped_models())
def test_there_is_nothing_left_to_do_afterwards(model: onnx.ModelProto) -> None:
    done = _deduplicated(model)
    again = _deduplicated(done.model)
    assert again.model == done.model
    assert (again.removed, again.saved_nbytes) == (0, 0)


@settings(deadline=None, max_examples=80)
@given(_scoped_models(), st.data())
def test_what_is_saved_is_the_size_of_what_is_gone(
    model: onnx.ModelProto, data: st.DataObject
) -> None:
    before = list(tensors.walk(model))
    paths = [ref.path for ref in before if data.draw(st.booleans())]
    source = _External(model, paths)
    original = source.model.SerializeToString(deterministic=True)
    done = deduplicate(source.model, source.resolve)
    after = list(tensors.walk(done.model))
    assert done.removed == len(before) - len(after)
    assert done.saved_nbytes == 8 * done.removed
    assert source.model.SerializeToString(deterministic=True) == original
    assert _filled(done) == _deduplicated(model).model


# Random models that onnxruntime runs: what they compute stays


class _Runnable:
    """Builds a model of sums, If and Loop, whose graphs take their own and outer initializers."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw
        self._count = 0

    def model(self) -> onnx.ModelProto:
        graph = self._graph(["x"], depth=2)
        graph.input.extend(
            [_value("x", [2]), helper.make_tensor_value_info("so", TensorProto.BOOL, [])]
        )
        for tensor in graph.initializer:
            if self._draw(st.integers(0, 5)) == 0:
                graph.input.append(_value(tensor.name, [2]))
            if self._draw(st.integers(0, 5)) == 0:
                graph.output.append(_value(tensor.name, [2]))
        for name in {tensor.name for tensor in graph.initializer}:
            if self._draw(st.booleans()):
                graph.value_info.append(_value(name, [2]))
        graph.initializer.extend(
            [
                numpy_helper.from_array(np.array(2, np.int64), "trips"),
                numpy_helper.from_array(np.array(2, np.int64), "trips_again"),
            ]
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)

    def _new(self) -> str:
        self._count += 1
        return f"v{self._count}"

    def _graph(self, outer: list[str], depth: int, state: str | None = None) -> GraphProto:
        draw = self._draw
        own = draw(st.lists(st.sampled_from("abc"), max_size=3, unique=True))
        # onnxruntime mixes up values of one name if one is captured and the other shadows it.
        captured = [*outer, *(self._new() for _ in range(draw(st.integers(1, 3))))]
        graph = GraphProto(name="graph")
        for name in draw(st.permutations([*own, *captured[len(outer) :]])):
            if name != state:
                value = np.full(2, draw(st.integers(1, 2)), np.float32)
                tensor = numpy_helper.from_array(value, name)
                graph.initializer.append(typed(tensor) if draw(st.booleans()) else tensor)
        visible = [*captured, *own]
        if state is not None:
            visible.append(state)
        result = draw(st.sampled_from(visible))
        for _ in range(draw(st.integers(1, 4))):
            kind = draw(st.sampled_from(["Add", "Add", "If", "Loop"] if depth else ["Add"]))
            output = self._new()
            if kind == "Add":
                inputs = [result, draw(st.sampled_from(visible))]
                graph.node.append(helper.make_node("Add", inputs, [output]))
            elif kind == "If":
                node = helper.make_node("If", ["so"], [output])
                for name in ("then_branch", "else_branch"):
                    node.attribute.append(attribute(name, g=self._graph(captured, depth - 1)))
                graph.node.append(node)
            else:
                trips = draw(st.sampled_from(["trips", "trips_again"]))
                body = self._body(captured, depth - 1)
                inputs = [trips, "", draw(st.sampled_from(visible))]
                graph.node.append(helper.make_node("Loop", inputs, [output], body=body))
            visible.append(output)
            captured.append(output)
            result = output
        graph.output.append(_value(result, [2]))
        return graph

    def _body(self, outer: list[str], depth: int) -> GraphProto:
        state = self._draw(st.sampled_from([*"abc", self._new()]))
        body = self._graph(outer, depth, state)
        step, going, still = self._new(), self._new(), self._new()
        body.input.extend(
            [
                helper.make_tensor_value_info(step, TensorProto.INT64, []),
                helper.make_tensor_value_info(going, TensorProto.BOOL, []),
                _value(state, [2]),
            ]
        )
        body.node.append(helper.make_node("Identity", [going], [still]))
        body.output.insert(0, helper.make_tensor_value_info(still, TensorProto.BOOL, []))
        return body


@st.composite
def _runnable_models(draw: st.DrawFn) -> onnx.ModelProto:
    return _Runnable(draw).model()


def _computed(model: onnx.ModelProto, is_so: bool, is_optimized: bool) -> list[Any]:
    ort = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if not is_optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    inputs = {"x": np.array([3, 5], np.float32), "so": np.array(is_so)}
    # Every default is overridden by a value of its own.
    for number, value in enumerate(model.graph.input[2:]):
        inputs[value.name] = np.array([100 * number, 7 * number], np.float32)
    found: list[Any] = session.run(None, inputs)
    return [array.tolist() for array in found]


@settings(deadline=None, max_examples=100)
@given(_runnable_models(), st.booleans(), st.booleans(), st.data())
def test_onnxruntime_computes_the_same(
    model: onnx.ModelProto, is_so: bool, is_optimized: bool, data: st.DataObject
) -> None:
    onnx.checker.check_model(model, full_check=True)
    paths = [ref.path for ref in tensors.walk(model) if data.draw(st.booleans())]
    source = _External(model, paths)
    done = deduplicate(source.model, source.resolve)
    filled = _filled(done)
    onnx.checker.check_model(filled, full_check=True)
    assert filled.graph.input == model.graph.input
    assert filled.graph.output == model.graph.output
    assert done.removed > 0  # the trips
    assert _computed(filled, is_so, is_optimized) == _computed(model, is_so, is_optimized)
