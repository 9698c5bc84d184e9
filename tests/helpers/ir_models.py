"""Models with tensors in every place that onnx_ir has for one, and of every type that it knows."""

from __future__ import annotations

import onnx
import pytest
from models import NUMBERS, model_of, raw_tensor, runnable_model, string_tensor
from onnx import AttributeProto, TensorProto, helper

ir = pytest.importorskip("onnx_ir", reason="onnx_ir is not installed")

# Older versions of onnx_ir lack the types of 6 bits.
KNOWN = {name: number for name, number in NUMBERS.items() if number in set(ir.DataType)}


def branch(name: str, seed: int) -> onnx.GraphProto:
    weight = raw_tensor(f"{name}.w", dims=(400,), seed=seed)
    constant = raw_tensor(f"{name}.c", dims=(400,), seed=seed + 1)
    return helper.make_graph(
        [
            helper.make_node("Constant", [], [f"{name}.k"], value=constant),
            helper.make_node("Add", [weight.name, f"{name}.k"], [f"{name}.sum"]),
        ],
        name,
        [],
        [helper.make_tensor_value_info(f"{name}.sum", TensorProto.FLOAT, [400])],
        [weight],
    )


def if_node(name: str, seed: int) -> onnx.NodeProto:
    return helper.make_node(
        "If",
        ["condition"],
        [f"{name}.y"],
        then_branch=branch(f"{name}.then", seed),
        else_branch=branch(f"{name}.else", seed + 10),
    )


def tensors_everywhere() -> onnx.ModelProto:
    """A model with tensors in every place that onnx_ir has for one."""
    graph = helper.make_graph(
        [if_node("if", 1)],
        "graph",
        [helper.make_tensor_value_info("condition", TensorProto.BOOL, [])],
        [helper.make_tensor_value_info("if.y", TensorProto.FLOAT, [400])],
        [raw_tensor("outer", dims=(400,), seed=50), string_tensor("labels"), raw_tensor("small")],
    )
    several = [raw_tensor(f"several{index}", dims=(300,), seed=60 + index) for index in range(2)]
    attribute = AttributeProto(name="several", type=AttributeProto.TENSORS, tensors=several)
    graph.node.add(op_type="Odd", domain="test", output=["odd"], attribute=[attribute])
    function = helper.make_function(
        "test",
        "f",
        ["condition"],
        ["y"],
        [
            helper.make_node("Constant", [], ["k"], value=raw_tensor("in_f", dims=(500,), seed=70)),
            if_node("f.if", 80),
            helper.make_node("Add", ["k", "f.if.y"], ["y"]),
        ],
        [helper.make_opsetid("", 21)],
    )
    default = AttributeProto(
        name="default", type=AttributeProto.TENSOR, t=raw_tensor("default", dims=(600,), seed=90)
    )
    function.attribute_proto.append(default)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("test", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=[function])
    model.graph.initializer[0].doc_string = "a weight"
    return model


def tensors_of_all_types() -> onnx.ModelProto:
    return model_of(
        *(raw_tensor(name, number, (3, 1001), number) for name, number in KNOWN.items()),
        raw_tensor("odd", TensorProto.INT4, (7,)),
        raw_tensor("nothing", TensorProto.BFLOAT16, (0, 4)),
        raw_tensor("scalar", TensorProto.BFLOAT16, ()),
        string_tensor("labels"),
    )


MODELS = [runnable_model, tensors_everywhere, tensors_of_all_types]
