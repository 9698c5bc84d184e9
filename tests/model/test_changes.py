from __future__ import annotations

import onnx
import pytest
from models import model_of, raw_tensor, run_python
from onnx import TensorProto, helper

from onnxarchive.model import tensors, wording
from onnxarchive.model.changes import (
    Change,
    Places,
    field_changes,
    list_changes,
    message_changes,
    order_changes,
)


def graph_of(*nodes: onnx.NodeProto, inputs: str = "", outputs: str = "") -> onnx.GraphProto:
    """A graph of these nodes, its inputs and outputs given as words."""
    given, taken = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in names.split()]
        for names in (inputs, outputs)
    )
    return helper.make_graph(nodes, "graph", given, taken)


def located(name: str, location: str, *dims: int) -> onnx.TensorProto:
    """A tensor outside the model."""
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=dims)
    tensors.set_location(tensor, location)
    return tensor


def test_messages_are_compared_and_told_without_what_reads_archives() -> None:
    code = """
import sys
import onnxarchive.model.changes
upper = ("archive", "cli", "diff", "files", "rules", "zipformat")
print([name for name in upper if f"onnxarchive.{name}" in sys.modules])
"""
    assert run_python(code) == "[]\n"


def test_a_change_is_added_removed_or_changed() -> None:
    kinds = [Change("a", None, "1").kind, Change("a", "1", None).kind, Change("a", "1", "2").kind]
    assert kinds == ["added", "removed", "changed"]


def test_elements_are_paired_by_name_and_those_left_over_are_told() -> None:
    ones = [helper.make_opsetid("a", 1), helper.make_opsetid("b", 1)]
    others = [helper.make_opsetid("c", 3), helper.make_opsetid("b", 2)]
    assert list_changes("opset_import", ones, others) == (
        Change("a", "1", None),
        Change("b", "1", "2"),
        Change("c", None, "3"),
    )


def test_the_two_names_of_the_default_domain_are_one() -> None:
    ones, others = [helper.make_opsetid("", 1)], [helper.make_opsetid("ai.onnx", 2)]
    (change,) = list_changes("opset_import", ones, others)
    assert (change.name, change.kind) == ("ai.onnx", "changed")


def test_pairs_that_are_given_are_not_looked_for() -> None:
    ones = [helper.make_node("Abs", ["x"], ["y"], name="n")]
    assert list_changes("node", ones, ones) == ()
    assert [it.kind for it in list_changes("node", ones, ones, pairs={})] == ["removed", "added"]


def test_what_shares_its_name_goes_by_its_place() -> None:
    pairs = [onnx.StringStringEntryProto(key="k", value=value) for value in "ab"]
    assert list_changes("metadata_props", pairs, pairs[:1], prefix="metadata ") == (
        Change("metadata_props[1]", "b", None),
    )
    assert list_changes("metadata_props", pairs[:1], [], prefix="metadata ") == (
        Change("metadata k", "a", None),
    )


def test_tensors_are_compared_by_type_shape_and_location() -> None:
    (change,) = message_changes("w", located("w", "here", 2, 3), located("w", "there", 3, 2))
    assert change == Change(
        "w",
        "FLOAT 2x3, here",
        "FLOAT 3x2, there",
        (Change("shape", "2x3", "3x2"), Change("data", "here", "there")),
    )
    assert not [*message_changes("w", located("w", "here", 2), located("w", "here", 2))]


def test_a_message_is_not_changed_by_the_order_of_what_has_names() -> None:
    one = helper.make_node("Gemm", ["a", "b"], ["c"], alpha=1.0, beta=2.0)
    other = onnx.NodeProto()
    other.CopyFrom(one)
    other.ClearField("attribute")
    other.attribute.extend(reversed(one.attribute))
    assert one != other
    assert not [*message_changes("node", one, other)]


def test_fields_that_are_left_out_are_not_compared() -> None:
    one = onnx.ModelProto(producer_name="a", model_version=1)
    other = onnx.ModelProto(producer_name="b", model_version=2)
    assert [*field_changes(one, other, without=frozenset({"producer_name"}))] == [
        Change("model_version", "1", "2")
    ]


def test_the_order_is_that_of_what_both_graphs_have() -> None:
    one = graph_of(inputs="a b c", outputs="y z")
    other = graph_of(inputs="b new a", outputs="y z")
    assert [*order_changes(one, other)] == [Change("order of inputs", "a, b", "b, a")]
    assert not [*order_changes(one, graph_of(inputs="new a c", outputs="z"))]


def test_a_place_is_found_where_its_node_has_moved_to() -> None:
    one, other = model_of(), model_of()
    for model, index in ((one, 0), (other, 1)):
        model.graph.node.extend(helper.make_node("Abs", ["x"], [name]) for name in "pq"[:index])
        model.graph.node.append(
            helper.make_node("Constant", [], ["c"], value=raw_tensor("t"), name="constant")
        )
    places = Places(one, other)
    at = len(other.graph.node) - 1
    below = (("attribute", 0), ("t", None))
    there = (("graph", None), ("node", at), *below)
    assert places.counterpart(there) == (("graph", None), ("node", at - 1), *below)
    assert places.counterpart((("graph", None), ("node", at - 1), *below)) is None
    assert places.indices((("graph", None),), "node")[at] == at - 1


def map_type(key: int, value: onnx.TypeProto) -> onnx.TypeProto:
    return onnx.TypeProto(map_type=onnx.TypeProto.Map(key_type=key, value_type=value))


SHAPED = helper.make_tensor_type_proto(TensorProto.FLOAT, [1, None, "n"])
UNSHAPED = helper.make_tensor_type_proto(TensorProto.INT64, None)
TYPES = {
    "FLOAT 1x?xn": SHAPED,
    "INT64": UNSHAPED,
    "BOOL scalar": helper.make_tensor_type_proto(TensorProto.BOOL, []),
    "sparse FLOAT 3": helper.make_sparse_tensor_type_proto(TensorProto.FLOAT, [3]),
    "sequence of FLOAT 1x?xn": helper.make_sequence_type_proto(SHAPED),
    "optional INT64": helper.make_optional_type_proto(UNSHAPED),
    "map from STRING to INT64": map_type(TensorProto.STRING, UNSHAPED),
    "opaque": onnx.TypeProto(opaque_type=onnx.TypeProto.Opaque(name="o")),
    "no type": onnx.TypeProto(),
}


@pytest.mark.parametrize("text", TYPES)
def test_a_type_is_told(text: str) -> None:
    assert wording.told(TYPES[text]) == text


def test_a_node_is_told_as_what_it_makes_of_what() -> None:
    node = helper.make_node("Add", ["a", "", "b"], ["c", "d"], domain="test", overload="o")
    assert wording.told(node) == "c, d = test.Add:o(a, , b)"


def test_of_a_long_list_one_element_is_told() -> None:
    values = [0.1] * 1234
    assert wording.told_elements(values, 3) == "1,234 elements, [3] 0.1"
    assert wording.told_elements(values, len(values)) == "1,234 elements"
    assert wording.told_elements(values[:2], None) == "0.1, 0.1"
    assert wording.told_elements([], None) is None
