from __future__ import annotations

import hashlib
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator
from operator import delitem, setitem
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import given, strategies as st
from models import (
    MEASURE_MEMORY,
    attribute,
    break_local_header,
    entry_of,
    flip_byte,
    full_graph,
    full_model,
    model_of,
    model_protos,
    nested_model,
    node,
    open_below,
    raw_tensor,
    run_python,
    runnable_model,
    sparse_tensor,
    string_tensor,
    typed,
)
from numpy.typing import NDArray
from onnx import AttributeProto, TensorProto, helper, numpy_helper

import onnxarchive
from onnxarchive.comparing.changes import Change
from onnxarchive.comparing.diff import Difference, diff
from onnxarchive.model import walking
from onnxarchive.model.copying import copied
from onnxarchive.zipformat.end_records import SEARCHED_SIZE

MIB = 1 << 20
Compare = Callable[..., Difference]
Edit = Callable[[onnx.ModelProto], object]


def a_model() -> onnx.ModelProto:
    """A model with something in each list that is compared, and names for its nodes."""
    model = runnable_model(1 << 12)
    for index, it in enumerate(model.graph.node):
        it.name = f"node {index}"
    model.graph.node[1].attribute.append(helper.make_attribute("alpha", 1.5))
    model.graph.output.append(helper.make_tensor_value_info("product", TensorProto.FLOAT, None))
    model.graph.value_info.append(
        helper.make_tensor_value_info("product", TensorProto.FLOAT, ["batch", 16])
    )
    model.metadata_props.add(key="author", value="Ada")
    opset = [helper.make_opsetid("", 21)]
    model.functions.append(
        helper.make_function(
            "test", "f", ["a"], ["b"], [helper.make_node("Abs", ["a"], ["b"])], opset
        )
    )
    model.training_info.add(algorithm=onnx.GraphProto(name="step"))
    model.graph.initializer.append(string_tensor("words", [f"word {it}" for it in range(40)]))
    model.graph.sparse_initializer.extend([sparse_tensor("s"), sparse_tensor("t", 1)])
    branches(model, 1, 2).graph.node[2].name = "node 2"
    for name in "ab":
        model.graph.node[2].attribute[0].g.output.add(name=name)
    constant = helper.make_node("Constant", [], ["c"], value=raw_tensor("t"), name="node 3")
    model.graph.node.append(constant)
    return model


def told(data: bytes) -> str:
    """The description of bytes in a change."""
    return f"{len(data):,} bytes, CRC-32 {zlib.crc32(data):#010x}"


def saved_twice(folder: Path, *weights: TensorProto) -> tuple[Path, Path]:
    """Two archives of the same model."""
    paths = folder / "one.onnxa", folder / "other.onnxa"
    for path in paths:
        onnxarchive.save(model_of(*weights), path, assets={"a": b"1"})
    return paths


@pytest.fixture
def compare(tmp_path: Path) -> Compare:
    """Saves two models and compares them; keywords that begin with `other_` are for the second."""

    def compare(
        model: onnx.ModelProto, other: onnx.ModelProto, *, full: bool = False, **options: Any
    ) -> Difference:
        others = {
            key.removeprefix("other_"): options.pop(key)
            for key in list(options)
            if key.startswith("other_")
        }
        onnxarchive.save(model, tmp_path / "one.onnxa", **options)
        onnxarchive.save(other, tmp_path / "other.onnxa", **{**options, **others})
        return diff(tmp_path / "one.onnxa", tmp_path / "other.onnxa", full=full)

    return compare


def only(difference: Difference, *sections: str) -> tuple[Change, ...]:
    """The changes; all must be in these sections."""
    assert sorted(sections) == sorted(
        name for name, changes in difference.sections.items() if changes
    )
    assert not difference.is_same
    return tuple(change for name in sections for change in difference.sections[name])


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("make", [a_model, full_model, model_of, lambda: nested_model(31)])
def test_an_archive_is_the_same_as_itself(
    make: Callable[[], onnx.ModelProto], full: bool, tmp_path: Path
) -> None:
    path = tmp_path / "m.onnxa"
    onnxarchive.save(make(), path, convert_attribute=True, size_threshold=0, assets={"a": b"1"})
    found = diff(path, path, full=full)
    assert found.is_same
    of_graph = ["nodes", "inputs", "outputs", "values", "tensors"]
    of_model = ["opsets", "metadata", "functions", "training", "fields", "models", "assets"]
    assert found.sections == dict.fromkeys(of_graph + of_model, ())
    assert (found.path, found.other) == (str(path), str(path))


def test_the_field_that_holds_equal_elements_is_no_difference(compare: Compare) -> None:
    numbers = [TensorProto.FLOAT, TensorProto.INT4, TensorProto.BFLOAT16, TensorProto.COMPLEX64]
    raw = [raw_tensor(f"w{number}", number, (3,)) for number in numbers]
    assert compare(model_of(*raw), model_of(*map(typed, raw))).is_same


def test_another_order_of_named_items_and_another_key_are_no_difference(compare: Compare) -> None:
    model = model_of(raw_tensor("a.b"), raw_tensor("a/b", seed=1))  # their keys depend on the order
    model.graph.sparse_initializer.extend([sparse_tensor("s"), sparse_tensor("t", 1)])
    model.graph.node.append(node(attribute("i", i=1), attribute("j", i=2)))
    model.graph.node[0].metadata_props.add(key="k", value="1")
    model.graph.node[0].metadata_props.add(key="l", value="2")
    for name in "abc":
        model.graph.node.add(op_type="Neg", input=["x"], output=[name])
    model.graph.value_info.add(name="u")
    model.graph.value_info.add(name="v")
    model.opset_import.add(domain="test", version=1)
    other = copied(model)
    for items in (
        other.graph.initializer,
        other.graph.sparse_initializer,
        other.graph.node[0].attribute,
        other.graph.node[0].metadata_props,
        other.graph.node,
        other.graph.value_info,
        other.opset_import,
    ):
        items.reverse()
    assert compare(model, other).is_same
    assert compare(model, other, size_threshold=0).is_same


@pytest.mark.parametrize("is_named", [True, False])
def test_a_node_is_unchanged_if_only_the_key_of_its_tensor_differs(
    compare: Compare, is_named: bool
) -> None:
    model = model_of()
    for index in range(3):
        constant = helper.make_node("Constant", [], [f"c{index}"], value=raw_tensor("", seed=index))
        constant.name = f"constant {index}" if is_named else ""
        model.graph.node.append(constant)
    other = copied(model)
    added = helper.make_node("Constant", [], ["c"], value=raw_tensor("", seed=9), name="new")
    other.graph.node.insert(0, added)
    found = compare(model, other, convert_attribute=True, size_threshold=0)
    assert [(it.name, it.kind) for it in only(found, "nodes")] == [("new", "added")]


BIAS = np.arange(16, dtype=np.float32)
BIAS_TOLD, MORE_TOLD = told(BIAS.tobytes()), told((BIAS + 1).tobytes())
MATMUL = "product = MatMul(x, layer.0/weight)"
ADD = "y = Add(product, layer.0/bias)"
NODES = (MATMUL, ADD, "z = If(c)", "c = Constant()")
BEFORE, AFTER = (f"FLOAT [4], {told(data)}" for data in (raw_tensor("t").raw_data, bytes(16)))


def in_node(index: int, after: str, *parts: Change) -> Change:
    return Change(f"node {index}", NODES[index], after, parts)


def in_function(before: str, after: str, name: str) -> Change:
    return Change("test::f", "nodes: 1", "nodes: 1", (Change(f"node b: {name}", before, after),))


def set_bias(model: onnx.ModelProto, array: NDArray[Any]) -> None:
    model.graph.initializer[1].CopyFrom(numpy_helper.from_array(array, "layer.0/bias"))


# By section: a function that changes a model, and the change that is reported.
SINGLE_CHANGES: dict[str, list[tuple[Edit, Change]]] = {
    "nodes": [
        (
            lambda m: setattr(m.graph.node[1], "op_type", "Sub"),
            in_node(1, "y = Sub(product, layer.0/bias)", Change("op_type", "Add", "Sub")),
        ),
        (
            lambda m: setattr(m.graph.node[1], "domain", "test"),
            in_node(1, "y = test.Add(product, layer.0/bias)", Change("domain", None, "test")),
        ),
        (
            lambda m: setitem(m.graph.node[0].input, 0, "y"),
            in_node(
                0,
                "product = MatMul(y, layer.0/weight)",
                Change("input", "x, layer.0/weight", "y, layer.0/weight"),
            ),
        ),
        (
            lambda m: setitem(m.graph.node[0].output, 0, "z"),
            in_node(0, "z = MatMul(x, layer.0/weight)", Change("output", "product", "z")),
        ),
        (
            lambda m: setattr(m.graph.node[1].attribute[0], "f", 2.5),
            in_node(1, ADD, Change("attribute alpha: f", "1.5", "2.5")),
        ),
        (
            lambda m: m.graph.node[0].attribute.append(helper.make_attribute("to", [1, 2])),
            in_node(0, MATMUL, Change("attribute to", None, "1, 2")),
        ),
        (
            lambda m: delitem(m.graph.node[1].attribute, 0),
            in_node(1, ADD, Change("attribute alpha", "1.5", None)),
        ),
        (
            lambda m: m.graph.node.insert(0, helper.make_node("Neg", ["x"], ["z"], name="new")),
            Change("new", None, "z = Neg(x)"),
        ),
        (lambda m: delitem(m.graph.node, 0), Change("node 0", MATMUL, None)),
        (
            lambda m: setattr(m.graph.node[2].attribute[1].g.initializer[0], "raw_data", bytes(16)),
            in_node(
                2,
                NODES[2],
                Change(
                    "attribute else_branch: g: initializer w",
                    f"FLOAT [4], {told(raw_tensor('w', seed=2).raw_data)}",
                    AFTER,
                ),
            ),
        ),
        (
            lambda m: m.graph.node[2].attribute[0].g.output.reverse(),
            in_node(
                2,
                NODES[2],
                Change("attribute then_branch: g: output[0]: name", "a", "b"),
                Change("attribute then_branch: g: output[1]: name", "b", "a"),
            ),
        ),
        (
            lambda m: setattr(m.graph.node[3].attribute[0].t, "raw_data", bytes(16)),
            in_node(3, NODES[3], Change("attribute value: t", BEFORE, AFTER)),
        ),
    ],
    "functions": [
        (lambda m: m.functions[0].node[0].input.append("c"), in_function("a", "a, c", "input")),
        (
            lambda m: setattr(m.functions[0].node[0], "op_type", "Neg"),
            in_function("Abs", "Neg", "op_type"),
        ),
        (lambda m: delitem(m.functions, 0), Change("test::f", "nodes: 1", None)),
    ],
    "inputs": [
        (
            lambda m: setattr(m.graph.input[0].type.tensor_type.shape.dim[0], "dim_value", 3),
            Change("x", "FLOAT [2, 64]", "FLOAT [3, 64]"),
        ),
        (
            lambda m: setattr(m.graph.input[0].type.tensor_type, "elem_type", TensorProto.INT8),
            Change("x", "FLOAT [2, 64]", "INT8 [2, 64]"),
        ),
        (
            lambda m: m.graph.input[0].type.tensor_type.ClearField("shape"),
            Change("x", "FLOAT [2, 64]", "FLOAT"),
        ),
        (
            lambda m: m.graph.input[0].type.tensor_type.shape.dim[1].Clear(),
            Change("x", "FLOAT [2, 64]", "FLOAT [2, ?]"),
        ),
        (
            lambda m: m.graph.input.append(
                helper.make_tensor_sequence_value_info("z", TensorProto.FLOAT, ["n"])
            ),
            Change("z", None, "sequence of FLOAT [n]"),
        ),
        (lambda m: delitem(m.graph.input, 0), Change("x", "FLOAT [2, 64]", None)),
    ],
    "outputs": [
        (
            lambda m: setattr(m.graph.output[0].type.tensor_type.shape.dim[1], "dim_value", 17),
            Change("y", "FLOAT [2, 16]", "FLOAT [2, 17]"),
        ),
        (lambda m: delitem(m.graph.output, 1), Change("product", "FLOAT", None)),
    ],
    "fields": [
        (
            lambda m: m.graph.output.reverse(),
            Change("graph: order of outputs", "y, product", "product, y"),
        ),
        (lambda m: setattr(m, "ir_version", 11), Change("ir_version", "10", "11")),
        (lambda m: setattr(m, "producer_name", "Ada"), Change("producer_name", "test", "Ada")),
        (lambda m: setattr(m, "producer_version", "1.0"), Change("producer_version", None, "1.0")),
        (lambda m: setattr(m, "domain", "test"), Change("domain", None, "test")),
        (lambda m: setattr(m, "model_version", 2), Change("model_version", None, "2")),
        (lambda m: setattr(m, "doc_string", "words"), Change("doc_string", None, "words")),
        (
            lambda m: setattr(m.graph, "doc_string", "words"),
            Change("graph: doc_string", None, "words"),
        ),
        (lambda m: setattr(m.graph, "name", "other"), Change("graph: name", "linear", "other")),
        (
            lambda m: setitem(m.graph.sparse_initializer[1].dims, 0, 200),
            Change("graph: sparse_initializer t: dims", "100", "200"),
        ),
        (  # field 2046 of bytes, which onnx does not know
            lambda m: m.graph.MergeFromString(b"\xf2\x7f\x03abc"),
            Change("graph: unknown fields", None, "\\xf2\x7f\x03abc"),
        ),
    ],
    "values": [
        (
            lambda m: setattr(m.graph.value_info[0].type.tensor_type.shape.dim[0], "dim_value", 2),
            Change("product", "FLOAT [batch, 16]", "FLOAT [2, 16]"),
        ),
    ],
    "opsets": [
        (lambda m: setattr(m.opset_import[0], "version", 22), Change("ai.onnx", "21", "22")),
        (lambda m: m.opset_import.add(domain="test", version=1), Change("test", None, "1")),
    ],
    "metadata": [
        (
            lambda m: setattr(m.metadata_props[0], "value", "Grace"),
            Change("author", "Ada", "Grace"),
        ),
        (lambda m: m.metadata_props.add(key="licence", value=""), Change("licence", None, "")),
        (lambda m: delitem(m.metadata_props, 0), Change("author", "Ada", None)),
    ],
    "training": [
        (
            lambda m: setattr(m.training_info[0].algorithm, "name", "other"),
            Change(
                "training_info[0]",
                "TrainingInfoProto",
                "TrainingInfoProto",
                (Change("algorithm: name", "step", "other"),),
            ),
        ),
    ],
    "tensors": [
        (
            lambda m: set_bias(m, BIAS + 1),
            Change("layer.0/bias", f"FLOAT [16], {BIAS_TOLD}", f"FLOAT [16], {MORE_TOLD}"),
        ),
        (
            lambda m: set_bias(m, BIAS.reshape(4, 4)),
            Change("layer.0/bias", f"FLOAT [16], {BIAS_TOLD}", f"FLOAT [4, 4], {BIAS_TOLD}"),
        ),
        (
            lambda m: set_bias(m, BIAS.view(np.int32)),
            Change("layer.0/bias", f"FLOAT [16], {BIAS_TOLD}", f"INT32 [16], {BIAS_TOLD}"),
        ),
        (
            lambda m: setattr(m.graph.initializer[1], "doc_string", "words"),
            Change(
                "layer.0/bias",
                f"FLOAT [16], {BIAS_TOLD}",
                f"FLOAT [16], {BIAS_TOLD}",
                (Change("doc_string", None, "words"),),
            ),
        ),
        (
            lambda m: delitem(m.graph.initializer, 1),
            Change("layer.0/bias", f"FLOAT [16], {BIAS_TOLD}", None),
        ),
        (
            lambda m: m.graph.initializer.append(string_tensor("new")),
            Change("new", None, "STRING [3]"),
        ),
        (
            lambda m: setitem(m.graph.initializer[2].string_data, 35, b"Wort"),
            Change(
                "words",
                "STRING [40]",
                "STRING [40]",
                (Change("string_data", "length 40, [35] word 35", "length 40, [35] Wort"),),
            ),
        ),
        (
            lambda m: m.graph.initializer[2].CopyFrom(string_tensor("words", ["a"])),
            Change("words", "STRING [40]", "STRING [1]"),
        ),
    ],
}
each_change = pytest.mark.parametrize(
    ("section", "change", "expected"),
    [(section, *each) for section, changes in SINGLE_CHANGES.items() for each in changes],
)


def changed_by(change: Edit) -> onnx.ModelProto:
    model = a_model()
    change(model)
    return model


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("size_threshold", [0, 1 << 20])
@each_change
def test_a_single_change_is_reported_and_nothing_else(
    compare: Compare,
    change: Edit,
    section: str,
    expected: Change,
    size_threshold: int,
    full: bool,
) -> None:
    options = {"size_threshold": size_threshold, "convert_attribute": True, "full": full}
    found = compare(a_model(), changed_by(change), **options)
    assert only(found, section) == (expected,)
    kinds = (expected.before is None, expected.after is None)
    assert expected.kind == {(1, 0): "added", (0, 1): "removed", (0, 0): "changed"}[kinds]


@each_change
def test_exchanging_the_two_archives_reverses_a_change(
    compare: Compare, change: Edit, section: str, expected: Change
) -> None:
    def reverse(change: Change) -> Change:
        parts = tuple(map(reverse, change.parts))
        return Change(change.name, change.after, change.before, parts)

    found = compare(changed_by(change), a_model())
    assert only(found, section) == (reverse(expected),)


def test_assets_are_compared(compare: Compare) -> None:
    assets = {"same": b"1", "removed": b"2", "changed": b"3", "longer": b""}
    others = {"same": b"1", "added/name": b"2", "changed": b"4", "longer": b"5"}
    found = only(compare(model_of(), model_of(), assets=assets, other_assets=others), "assets")
    assert found == (
        Change("changed", told(b"3"), told(b"4")),
        Change("longer", told(b""), told(b"5")),
        Change("removed", told(b"2"), None),
        Change("added/name", None, told(b"2")),
    )


def chain(count: int, *, is_named: bool) -> onnx.ModelProto:
    """A model of so many nodes, each of which takes what the one before gives out."""
    model = model_of()
    for index in range(count):
        it = model.graph.node.add(op_type="Clip", input=[f"t{index}"], output=[f"t{index + 1}"])
        it.attribute.append(helper.make_attribute("max", index % 7))
        if is_named:
            it.name = f"node {index}"
    return model


@pytest.mark.parametrize("is_named", [True, False])
def test_one_of_many_nodes_is_changed_and_one_inserted(compare: Compare, is_named: bool) -> None:
    model, other = chain(20_000, is_named=is_named), chain(20_000, is_named=is_named)
    nodes = other.graph.node
    nodes[10_000].attribute[0].i = 99
    nodes.insert(12_000, helper.make_node("Neg", ["t12000"], ["new"]))
    nodes[12_001].input[0] = "new"
    found = only(compare(model, other), "nodes")
    names = [f"node {index}" if is_named else f"t{index + 1}" for index in (10_000, 12_000)]
    assert [(it.name, it.kind) for it in found] == [
        (names[0], "changed"),
        (names[1], "changed"),
        ("new", "added"),
    ]
    assert found[0].parts == (Change("attribute max: i", "4", "99"),)
    assert found[1].parts == (Change("input", "t12000", "new"),)


def a_node(
    name: str = "", output: str = "y", op_type: str = "Neg", words: str = ""
) -> onnx.NodeProto:
    outputs = [output] if output else []
    return helper.make_node(op_type, ["x"], outputs, name=name, doc_string=words or None)


# The nodes of two models, and name, kind and changed fields of each change.
MATCHED: dict[str, tuple[list[onnx.NodeProto], list[onnx.NodeProto], list[tuple[str, ...]]]] = {
    "renamed": ([a_node("a")], [a_node("b")], [("a", "removed"), ("b", "added")]),
    "found by its name": (
        [a_node("a", "y", "Neg")],
        [a_node("a", "z", "Abs")],
        [("a", "changed", "output", "op_type")],
    ),
    "without a name, found by its output": (
        [a_node(output="y"), a_node(output="z")],
        [a_node(output="z", words="new"), a_node(output="y", words="new")],
        [("y", "changed", "doc_string"), ("z", "changed", "doc_string")],
    ),
    "without name and outputs, found by its index among such": (
        [a_node(output="", words=words) for words in ("first", "second", "third")],
        [a_node(output="", words=words) for words in ("first", "second")],
        [("node[2]", "removed")],
    ),
    "of a name that others have": (
        [a_node("same[1]"), a_node("same"), a_node("same")],
        [a_node("same[1]"), a_node("same"), a_node("same", words="new"), a_node("same")],
        [("same[1]'", "changed", "doc_string"), ("same[2]", "added")],
    ),
}


@pytest.mark.parametrize(("nodes", "others", "expected"), MATCHED.values(), ids=MATCHED.keys())
def test_changed_inserted_and_removed_nodes_are_matched_with_the_others(
    compare: Compare,
    nodes: list[onnx.NodeProto],
    others: list[onnx.NodeProto],
    expected: list[tuple[str, ...]],
) -> None:
    model, other = model_of(), model_of()
    model.graph.node.extend(nodes)
    other.graph.node.extend(others)
    found = only(compare(model, other), "nodes")
    assert [(it.name, it.kind, *(part.name for part in it.parts)) for it in found] == expected
    assert compare(other, other).is_same


def branches(model: onnx.ModelProto, *seeds: int, name: str = "w") -> onnx.ModelProto:
    """The model with an If that has an initializer of this name in each branch."""
    graphs = [
        onnx.GraphProto(name=f"branch {index}", initializer=[raw_tensor(name, seed=seed)])
        for index, seed in enumerate(seeds)
    ]
    fields = ("then_branch", "else_branch")
    attributes = [attribute(it, g=graph) for it, graph in zip(fields, graphs, strict=False)]
    model.graph.node.add(op_type="If", input=["c"], output=["z"], attribute=attributes)
    return model


def test_an_initializer_that_went_to_another_graph_is_removed_and_added(compare: Compare) -> None:
    model = branches(model_of(raw_tensor("v"), raw_tensor("other")), 1)
    other = branches(model_of(raw_tensor("other"), raw_tensor("w", seed=1)), 0, name="v")
    node, removed, added = only(compare(model, other), "nodes", "tensors")
    prefix = "attribute then_branch: g: initializer"
    assert [(it.name, it.kind) for it in node.parts] == [
        (f"{prefix} w", "removed"),
        (f"{prefix} v", "added"),
    ]
    assert [(it.name, it.kind) for it in (removed, added)] == [("v", "removed"), ("w", "added")]


def test_a_change_in_a_nested_graph_is_reported_with_the_path_to_it(compare: Compare) -> None:
    model = nested_model(31)
    other = copied(model)
    graph = other.graph
    for _ in range(30):
        graph = graph.node[0].attribute[0].g
    graph.doc_string = "words"
    (change,) = only(compare(model, other), "nodes")
    (part,) = change.parts
    assert part.name.endswith(": doc_string")
    assert part.name.count("attribute b: g: ") == 30
    assert (part.before, part.after) == (None, "words")


def test_an_unknown_size_is_not_the_size_zero(compare: Compare) -> None:
    model, other = model_of(), model_of()
    for it, size in ((model, None), (other, 0)):
        value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [size])
        it.graph.input.append(value)
    (change,) = only(compare(model, other), "inputs")
    assert (change.before, change.after) == ("FLOAT [?]", "FLOAT [0]")


def test_a_difference_deep_in_a_type_is_found(compare: Compare) -> None:
    model = model_of()
    type = model.graph.input.add(name="x").type
    for _ in range(40):
        type = type.optional_type.elem_type
    type.tensor_type.elem_type = TensorProto.FLOAT
    other = copied(model)
    assert compare(model, other).is_same
    type.denotation = "IMAGE"  # which the description of a type lacks
    (change,) = only(compare(model, other), "inputs")
    assert change.before == change.after == "optional " * 40 + "FLOAT"
    prefix = "type: " + "optional_type: elem_type: " * 40
    assert change.parts == (Change(f"{prefix}denotation", "IMAGE", None),)


def test_malformed_tensors_are_compared_field_by_field(compare: Compare) -> None:
    short = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[3], float_data=[1, 2])
    other = copied(short)
    assert compare(model_of(short), model_of(other)).is_same
    other.float_data[1] = 3
    (change,) = only(compare(model_of(short), model_of(other)), "tensors")
    assert change.parts == (Change("float_data", "1.0, 2.0", "1.0, 3.0"),)
    other.float_data.append(4)  # now it has as many as its shape
    (change,) = only(compare(model_of(short), model_of(other)), "tensors")
    assert (change.before, change.kind) == ("FLOAT [3]", "changed")


def test_numbers_are_the_same_if_their_bits_are(compare: Compare) -> None:
    def make(*floats: float) -> onnx.ModelProto:
        model = model_of()
        model.graph.node.append(helper.make_node("Neg", ["x"], ["y"], a=[float("nan"), *floats]))
        return model

    assert compare(make(0.1), make(0.1)).is_same
    words = make(0.1)
    words.graph.node[0].attribute[0].doc_string = "words"
    (change,) = only(compare(make(0.1), words), "nodes")
    assert change.parts == (Change("attribute a: doc_string", None, "words"),)
    (change,) = only(compare(make(0.0), make(-0.0)), "nodes")
    assert change.parts == (Change("attribute a: floats", "nan, 0.0", "nan, -0.0"),)
    (change,) = only(compare(make(0.1), make(0.5)), "nodes")
    assert change.parts == (Change("attribute a: floats", "nan, 0.1", "nan, 0.5"),)


def test_different_names_that_are_not_utf_8_are_distinguished(compare: Compare) -> None:
    def make(*names: bytes) -> onnx.ModelProto:
        model = model_of()
        for name in names:
            graph = b"\x0a" + bytes([len(name) + 2, 0x0A, len(name)]) + name  # a node's input
            model.graph.MergeFromString(graph)
        return model

    (change,) = only(compare(make(b"\xff"), make(b"\xfe")), "nodes")[:1]
    assert change.parts == (Change("input", "\\xff", "\\xfe"),)


def messages(message: Message, path: str = "model") -> Iterator[tuple[str, Any]]:
    """Every message below one, with the names of the fields on the way."""
    yield path, message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for child in [value] if isinstance(value, Message) else value:
                yield from messages(child, f"{path}.{field.name}")


def rich_model() -> onnx.ModelProto:
    """A model with every kind of message that ONNX has."""
    model = a_model()
    parts = [full_graph("main", 3, subgraphs=False), full_graph("below", 3, subgraphs=False)]
    model.graph.MergeFrom(parts[0])
    model.graph.metadata_props.add(key="k", value="v")
    annotation = model.graph.quantization_annotation.add(tensor_name="q")
    annotation.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="s")
    inner = model.graph.value_info.add(name="types").type.optional_type.elem_type
    inner = inner.sequence_type.elem_type
    inner.map_type.key_type = TensorProto.INT64
    inner.map_type.value_type.sparse_tensor_type.elem_type = TensorProto.FLOAT
    inner.map_type.value_type.sparse_tensor_type.shape.dim.add(dim_value=1)
    first = model.graph.node[0]
    first.attribute.append(attribute("g", g=parts[1]))
    first.attribute.add(name="tp", type=AttributeProto.TYPE_PROTO)
    first.attribute[-1].tp.tensor_type.elem_type = TensorProto.FLOAT
    model.configuration.add(name="two", num_devices=2, device=["a", "b"])
    placed = first.device_configurations.add(configuration_id="two", pipeline_stage=1)
    sharding = placed.sharding_spec.add(tensor_name="x", device=[0])
    sharding.index_to_device_group_map.add(key=0, value=[0])
    sharding.sharded_dim.add(axis=0).simple_sharding.add(dim_value=1, num_shards=2)
    model.graph.value_info.add(name="opaque").type.opaque_type.name = "o"
    part = model.graph.initializer.add(name="part", data_type=TensorProto.FLOAT, dims=[1])
    part.segment.end = 1
    part.float_data.append(1.0)
    step = model.training_info[0]
    step.initialization_binding.add(key="i", value="j")
    step.update_binding.add(key="u", value="v")
    return model


def changed_field(message: Any, field: FieldDescriptor) -> bool:
    """Changes one field of a message; False where there is nothing to change."""
    value = getattr(message, field.name)
    if isinstance(value, Message):
        is_set: bool = message.HasField(field.name)
        message.ClearField(field.name)
        return is_set
    if field.message_type is not None:
        is_set = len(value) > 0
        del value[-1:]
        return is_set
    more: Any = {field.TYPE_STRING: "!", field.TYPE_BYTES: b"!"}.get(field.type, 1)
    if field.enum_type is not None:
        more = next(it.number for it in field.enum_type.values if it.number not in (value, 0))
        setattr(message, field.name, more)
    elif isinstance(value, str | bytes | int | float):
        setattr(message, field.name, value + more)
    else:
        value.append(more)
    return True


@pytest.mark.sweep
def test_every_field_of_every_message_makes_a_difference(tmp_path: Path) -> None:
    model = rich_model()
    path, other_path = tmp_path / "one.onnxa", tmp_path / "other.onnxa"
    onnxarchive.save(model, path)
    # Fields that only say how data is held, or that archives do not have.
    passed_over = {"raw_data", "data_location", "data_type", "dims", "external_data"}
    passed_over |= {"model.graph"}
    seen = set()
    kinds = set()
    for index, (place, message) in enumerate(messages(model)):
        if place in seen:
            continue
        seen.add(place)
        kinds.add(message.DESCRIPTOR.name)
        for field in message.DESCRIPTOR.fields:
            names = {f"{place}.{field.name}"}
            if isinstance(message, TensorProto):
                names.add(field.name)
                if field.name.endswith("_data"):
                    continue
            if names & passed_over:
                continue
            other = copied(model)
            if not changed_field([*messages(other)][index][1], field):
                continue
            onnxarchive.save(other, other_path)
            found = diff(path, other_path)
            assert not found.is_same, f"{place}.{field.name}"
            for section in found.sections.values():
                for change in section:
                    require_telling(change)
    assert {it.name for it in walking.messages()} <= kinds


def require_telling(change: Change) -> None:
    """Fails if a change says nothing: the same before and after, and no parts."""
    assert change.parts or change.before != change.after, change
    for part in change.parts:
        require_telling(part)


@given(model_protos(), st.booleans(), st.sampled_from([0, 8, 1 << 20]), st.booleans())
def test_no_option_of_save_makes_a_difference(
    model: onnx.ModelProto, is_everywhere: bool, size_threshold: int, full: bool
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        paths = [Path(directory, name) for name in ("one.onnxa", "other.onnxa")]
        onnxarchive.save(model, paths[0])
        onnxarchive.save(
            model,
            paths[1],
            convert_attribute=is_everywhere,
            size_threshold=size_threshold,
            alignment=256,
        )
        for one, other in (paths, paths[::-1]):
            found = diff(one, other, full=full)
            assert found.is_same, found


def same_crc32(data: bytes) -> bytes:
    """Bytes of the same size and CRC-32 that differ in the first byte."""
    other = bytes([data[0] ^ 1, *data[1:-4]])
    # Both registers are made the same by the last four bytes.
    mask = zlib.crc32(data[:-4]) ^ zlib.crc32(other)
    other += (int.from_bytes(data[-4:], "little") ^ mask).to_bytes(4, "little")
    assert other != data
    assert zlib.crc32(other) == zlib.crc32(data)
    return other


@pytest.mark.parametrize("thresholds", [(0, 0), (0, 1 << 20), (1 << 20, 0), (1 << 20, 1 << 20)])
@pytest.mark.parametrize("offset", [0, 8 * MIB + 5])  # in the first piece, or in a later one
@pytest.mark.parametrize(
    ("place", "section", "names"),
    [
        ("initializer", "tensors", ["w"]),
        ("attribute", "nodes", ["c", "attribute value: t"]),
        ("asset", "assets", ["w"]),
    ],
)
def test_full_finds_a_change_that_an_equal_crc32_hides(
    compare: Compare,
    place: str,
    section: str,
    names: list[str],
    offset: int,
    thresholds: tuple[int, int],
) -> None:
    def make(data: bytes) -> onnx.ModelProto:
        tensor = raw_tensor("w", TensorProto.UINT8, (len(data),))
        tensor.raw_data = data
        same = raw_tensor("same", seed=1)
        model = model_of(same)
        if place == "initializer":
            model.graph.initializer.append(tensor)
        elif place == "attribute":
            for name, value in (("s", same), ("c", tensor)):
                model.graph.node.append(helper.make_node("Constant", [], [name], value=value))
        return model

    data = bytes(range(200)) * (1 + offset // 200)
    other = data[:offset] + same_crc32(data[offset:])
    options: dict[str, Any]
    options = {"size_threshold": thresholds[0], "other_size_threshold": thresholds[1]}
    if place == "asset":
        options |= {"assets": {"w": data, "b": b"1"}, "other_assets": {"w": other, "b": b"1"}}
    assert compare(make(data), make(other), **options).is_same
    (change,) = only(compare(make(data), make(other), full=True, **options), section)
    assert [change.name, *(part.name for part in change.parts)] == names
    part = change.parts[0] if change.parts else change
    prefix = "" if place == "asset" else f"UINT8 [{len(data)}], "
    assert part.before == f"{prefix}{told(data)}"
    assert part.after == f"{prefix}{told(data)}, SHA-256 {hashlib.sha256(other).hexdigest()}"


def test_full_distinguishes_three_tensors_that_share_a_crc32(compare: Compare) -> None:
    tensor = raw_tensor("v")
    same, third = copied(tensor), copied(tensor)
    same.raw_data = same_crc32(tensor.raw_data)
    third.raw_data = tensor.raw_data[:1] + same_crc32(tensor.raw_data[1:])
    same.name = third.name = "w"
    models = (model_of(tensor, same), model_of(tensor, third))
    assert compare(*models).is_same
    (change,) = only(compare(*models, full=True), "tensors")
    assert change.name == "w"
    assert compare(models[0], models[0], full=True).is_same


def test_stack_traces_of_exporters_are_compared_only_if_asked_for(tmp_path: Path) -> None:
    model = branches(a_model(), 1)
    model.graph.node[0].metadata_props.add(key="namespace", value="layer")
    other = copied(model)
    subgraph = other.graph.node[-1].attribute[0].g
    subgraph.node.add(op_type="Neg", input=["x"], output=["y"])
    model.graph.node[-1].attribute[0].g.CopyFrom(subgraph)
    for it, value in ((other.graph.node[0], "line 1"), (subgraph.node[0], "line 2")):
        it.metadata_props.add(key="pkg.torch.onnx.stack_trace", value=value)
    paths = tmp_path / "one.onnxa", tmp_path / "other.onnxa"
    onnxarchive.save(model, paths[0])
    onnxarchive.save(other, paths[1])
    assert diff(*paths).is_same
    found = only(diff(*paths, stack_traces=True), "nodes")
    names = [part.name for change in found for part in change.parts]
    key = "metadata_props pkg.torch.onnx.stack_trace"
    assert names == [key, f"attribute then_branch: g: node y: {key}"]
    other.graph.node[0].metadata_props[0].value = "another"
    onnxarchive.save(other, paths[1])
    (change,) = only(diff(*paths), "nodes")
    assert change.parts == (Change("metadata_props namespace", "layer", "another"),)


def test_many_stack_traces_are_left_out_in_linear_time(tmp_path: Path) -> None:
    paths = tmp_path / "one", tmp_path / "other"
    for path, end in zip(paths, "ab", strict=True):
        traced = onnx.NodeProto(op_type="Add", output=["y"])
        for number in range(100_000):
            key = f"{number}.stack_trace" if number % 2 else f"{number}"
            traced.metadata_props.add(key=key, value=end if number % 2 else "")
        onnxarchive.save(helper.make_model(helper.make_graph([traced], "g", [], [])), path)
    assert diff(*paths).is_same


def test_without_full_the_crc32_in_the_directory_is_trusted(tmp_path: Path) -> None:
    path, other = saved_twice(tmp_path, raw_tensor("w", dims=(300,)))
    flip_byte(other, entry_of(other, "w").data_offset + 1000)
    assert diff(path, other).is_same
    (change,) = only(diff(path, other, full=True), "tensors")
    assert (change.name, change.kind) == ("w", "changed")


def test_a_changed_weight_of_equal_size_is_found_without_reading_weights(tmp_path: Path) -> None:
    if not Path("/proc/self/io").exists():
        pytest.skip("Linux tells how much a process has read")
    nbytes = 8 * MIB
    paths = [tmp_path / "one.onnxa", tmp_path / "other.onnxa"]
    for seed, path in enumerate(paths):
        weights = [raw_tensor("w", TensorProto.UINT8, (nbytes,), seed), raw_tensor("v")]
        onnxarchive.save(model_of(*weights), path)
    code = """
import sys
from onnxarchive.comparing.diff import diff
def read():
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])
diff(*sys.argv[1:])
for full in (False, True):
    before = read()
    found = diff(*sys.argv[1:], full=full)
    print([change.name for change in found.sections["tensors"]], read() - before)
found = diff(sys.argv[1], sys.argv[1], full=True)
print(found.is_same, read() - before)
"""
    (changed, some), (full_changed, full_some), (_, all_of_it) = (
        line.rsplit(maxsplit=1) for line in run_python(code, *paths).splitlines()
    )
    assert changed == full_changed == "['w']"
    assert int(some) < 3 * SEARCHED_SIZE  # the end of both
    assert int(full_some) < 3 * SEARCHED_SIZE  # what has another CRC-32 need not be read
    assert int(all_of_it) > 2 * nbytes


def test_full_takes_a_few_mib_whatever_the_size_of_a_tensor(tmp_path: Path) -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("Linux tells how much memory a process has")
    path, other = saved_twice(tmp_path, raw_tensor("w", TensorProto.UINT8, (40 * MIB,)))
    code = f"""
{MEASURE_MEMORY}
from onnxarchive.comparing.diff import diff
diff(sys.argv[1], sys.argv[2])
print(growth(lambda: diff(sys.argv[1], sys.argv[2], full=True, progress=sample)))
"""
    assert int(run_python(code, path, other)) < 12 * MIB


@pytest.mark.parametrize("differs", [False, True])
def test_progress_counts_the_bytes_that_are_compared(tmp_path: Path, differs: bool) -> None:
    weights = raw_tensor("w", TensorProto.UINT8, (9 * MIB,)), raw_tensor("in the model")
    path, other = saved_twice(tmp_path, *weights)
    if differs:
        flip_byte(other, entry_of(other, "w").data_offset)
    calls: list[tuple[int, int]] = []
    diff(path, other, progress=lambda *call: calls.append(call))
    assert calls == []
    diff(path, other, full=True, progress=lambda *call: calls.append(call))
    total = 9 * MIB + 16 + 1
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert {all for _, all in calls} == {total}


@pytest.mark.parametrize("is_first", [True, False])
def test_errors_of_diff_name_the_file(tmp_path: Path, is_first: bool) -> None:
    path, bad = tmp_path / "good.onnxa", tmp_path / "bad.onnxa"
    onnxarchive.save(a_model(), path, size_threshold=0)

    def compare(full: bool = False) -> Difference:
        return diff(bad, path, full=full) if is_first else diff(path, bad, full=full)

    with pytest.raises(FileNotFoundError, match=r"bad\.onnxa"):
        compare()
    bad.write_text("not a model")
    with pytest.raises(onnxarchive.ArchiveFormatError, match=r"bad\.onnxa: expected a model"):
        compare()
    onnxarchive.save(a_model(), bad, size_threshold=0)
    break_local_header(bad, entry_of(bad, "layer_0_weight"))
    assert compare().is_same
    with pytest.raises(onnxarchive.ArchiveFormatError, match=r"bad\.onnxa: entry 'layer_0_weight'"):
        compare(full=True)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_file_that_becomes_shorter_during_a_comparison_is_an_error(
    tmp_path: Path, is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, short = saved_twice(tmp_path, raw_tensor("w", TensorProto.UINT8, (9 * MIB,)))

    def cut(done: int, total: int) -> None:
        if done >= 4 * MIB:
            os.truncate(short, 6 * MIB)

    paths = (short, path) if is_first else (path, short)
    with pytest.raises(onnxarchive.ArchiveFormatError, match="found a file truncated") as caught:
        diff(*paths, full=True, progress=cut)
    assert caught.value.path == str(short)


def test_diff_closes_both_files(tmp_path: Path) -> None:
    path = tmp_path / "m.onnxa"
    onnxarchive.save(a_model(), path, size_threshold=0)
    diff(path, path, full=True)
    assert open_below(tmp_path) == []
