from __future__ import annotations

from typing import Any

import onnx
import pytest
from models import run_python
from onnx import TensorProto, helper

from onnxarchive.comparing.changes import Change, field_changes, list_changes, value_changes
from onnxarchive.model import tensors
from onnxarchive.model.wording import describe


def located(name: str, location: str, *dims: int) -> onnx.TensorProto:
    """A tensor outside the model."""
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=dims)
    tensors.set_location(tensor, location)
    return tensor


def test_messages_are_compared_without_the_modules_that_read_archives() -> None:
    code = """
import sys
import onnxarchive.comparing.changes
upper = ("reading", "writing", "cli", "conversion", "zipformat", "comparing.diff")
print([name for name in upper if f"onnxarchive.{name}" in sys.modules])
"""
    assert run_python(code) == "[]\n"


def test_both_names_of_the_default_domain_are_equal() -> None:
    one = onnx.ModelProto(opset_import=[helper.make_opsetid("", 1)])
    other = onnx.ModelProto(opset_import=[helper.make_opsetid("ai.onnx", 2)])
    (change,) = list_changes("opset_import", one, other)
    assert (change.name, change.kind) == ("ai.onnx", "changed")


def test_elements_that_share_a_name_are_numbered() -> None:
    one, other = onnx.ModelProto(), onnx.ModelProto()
    for model, values in ((one, "ab"), (other, "a")):
        for value in values:
            model.metadata_props.add(key="k", value=value)
    assert [*list_changes("metadata_props", one, other)] == [Change("k[1]", "b", None)]
    assert [*list_changes("metadata_props", other, onnx.ModelProto())] == [Change("k", "a", None)]


def test_tensors_are_compared_by_type_shape_and_location() -> None:
    one = onnx.GraphProto(initializer=[located("w", "here", 2, 3)])
    other = onnx.GraphProto(initializer=[located("w", "there", 3, 2)])
    assert [*list_changes("initializer", one, other)] == [
        Change("w", "FLOAT [2, 3], here", "FLOAT [3, 2], there")
    ]
    assert not [*list_changes("initializer", one, one)]


def test_a_default_value_is_no_change_but_an_empty_message_is_one() -> None:
    assert not [*field_changes(onnx.ModelProto(), onnx.ModelProto(producer_name=""))]
    scalar = helper.make_tensor_type_proto(TensorProto.FLOAT, [])
    unshaped = helper.make_tensor_type_proto(TensorProto.FLOAT, None)
    (change,) = field_changes(scalar, unshaped)
    assert (change.name, change.kind) == ("tensor_type: shape", "removed")


def test_the_first_difference_of_long_lists_is_described() -> None:
    def texts(ones: int, others: int) -> tuple[str | None, str | None]:
        (change,) = value_changes("a", range(ones), range(others))
        return change.before, change.after

    assert texts(5, 30) == ("length 5", "length 30, [5] 5")
    assert texts(30, 5) == ("length 30, [5] 5", "length 5")
    assert texts(30, 31) == ("length 30", "length 31, [30] 30")
    assert texts(0, 17) == (None, "length 17, [0] 0")
    assert texts(1, 3) == ("0", "0, 1, 2")
    assert texts(15, 16) == (", ".join(map(str, range(15))), ", ".join(map(str, range(16))))
    assert not [*value_changes("a", range(30), range(30))]
    (change,) = value_changes("a", range(30), [*range(20), 7, *range(21, 30)])
    assert (change.before, change.after) == ("length 30, [20] 20", "length 30, [20] 7")


def map_type(key: int, value: onnx.TypeProto) -> onnx.TypeProto:
    return onnx.TypeProto(map_type=onnx.TypeProto.Map(key_type=key, value_type=value))


SHAPED = helper.make_tensor_type_proto(TensorProto.FLOAT, [1, None, "n"])
UNSHAPED = helper.make_tensor_type_proto(TensorProto.INT64, None)
TYPES = {
    "FLOAT [1, ?, n]": SHAPED,
    "INT64": UNSHAPED,
    "BOOL scalar": helper.make_tensor_type_proto(TensorProto.BOOL, []),
    "sparse FLOAT [3]": helper.make_sparse_tensor_type_proto(TensorProto.FLOAT, [3]),
    "sequence of FLOAT [1, ?, n]": helper.make_sequence_type_proto(SHAPED),
    "optional INT64": helper.make_optional_type_proto(UNSHAPED),
    "map from STRING to INT64": map_type(TensorProto.STRING, UNSHAPED),
    "opaque": onnx.TypeProto(opaque_type=onnx.TypeProto.Opaque(name="o")),
    "no type": onnx.TypeProto(),
}


@pytest.mark.parametrize("text", TYPES)
def test_a_type_is_described(text: str) -> None:
    assert describe(TYPES[text]) == text


def test_a_node_is_described_by_outputs_operator_and_inputs() -> None:
    node = helper.make_node("Add", ["a", "", "b"], ["c", "d"], domain="test", overload="o")
    assert describe(node) == "c, d = test.Add:o(a, , b)"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.1, "0.1"),
        ([1, 2], "1, 2"),
        ("s", "s"),
        (onnx.GraphProto(name="g"), "nodes: 0"),
        (TensorProto(data_type=1, dims=[2]), "FLOAT [2]"),
        ([UNSHAPED, UNSHAPED], "INT64, INT64"),
    ],
)
def test_an_attribute_is_described_by_its_value(value: object, text: str) -> None:
    assert describe(helper.make_attribute("a", value)) == text


def test_an_attribute_that_refers_to_one_of_a_function_is_described() -> None:
    assert describe(onnx.AttributeProto(name="a", ref_attr_name="b")) == "AttributeProto"


def test_changes_within_a_part_repeat_its_name_in_short() -> None:
    def graph(value: int) -> onnx.NodeProto:
        attributes: dict[str, Any] = {f"a{number}": value for number in range(100)}
        inner = helper.make_node("Op", [], ["y"], name="x" * 100_000, **attributes)
        return helper.make_node(
            "If", [], ["z"], then_branch=helper.make_graph([inner], "g", [], [])
        )

    changes = [*field_changes(graph(1), graph(2))]
    assert len(changes) == 100
    short = f"{'x' * 45}...{'x' * 50}"
    assert changes[0] == Change(
        f"attribute then_branch: g: node {short}: attribute a0: i", "1", "2"
    )
