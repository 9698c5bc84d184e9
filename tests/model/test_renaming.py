from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from models import full_model, model_protos, run_model, runnable_model
from onnx import TensorProto, helper, numpy_helper

from onnxarchive.model.renaming import renamed


def value(name: str, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, [1])


def model_with(*nodes: onnx.NodeProto, inputs: str, outputs: str, **more: Any) -> onnx.ModelProto:
    """A model of these nodes, its inputs and outputs given as words."""
    graph = helper.make_graph(
        nodes, "graph", list(map(value, inputs.split())), list(map(value, outputs.split())), **more
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def branch(name: str, *nodes: onnx.NodeProto, output: str, **more: Any) -> onnx.GraphProto:
    return helper.make_graph(nodes, name, [], [value(output)], **more)


def choosing() -> onnx.ModelProto:
    """A model whose branches capture `x`, one of them two subgraphs down."""
    inner = helper.make_node(
        "If",
        ["flag"],
        ["deep"],
        then_branch=branch("a", helper.make_node("Neg", ["x"], ["negative"]), output="negative"),
        else_branch=branch("b", helper.make_node("Abs", ["x"], ["absolute"]), output="absolute"),
    )
    chosen = helper.make_node(
        "If",
        ["flag"],
        ["y"],
        then_branch=branch("then", helper.make_node("Add", ["x", "x"], ["twice"]), output="twice"),
        else_branch=branch("else", inner, output="deep"),
    )
    model = model_with(chosen, inputs="x", outputs="y")
    model.graph.input.append(helper.make_tensor_value_info("flag", TensorProto.BOOL, []))
    return model


def texts(message: Any) -> list[str]:
    """Every string in a message."""
    found = []
    for field, content in message.ListFields():
        for item in [content] if isinstance(content, str) or not field.is_repeated else content:
            if hasattr(item, "ListFields"):
                found += texts(item)
            elif isinstance(item, str):
                found.append(item)
    return found


# That it runs


def test_a_renamed_model_runs_with_the_new_names(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model = runnable_model(1 << 10)
    path = tmp_path / "renamed.onnx"
    onnx.save(renamed(model, {"x": "pixels"}, {"y": "größe"}), path)
    given = np.arange(32, dtype=np.float32).reshape(2, 16)
    onnx.save(model, tmp_path / "before.onnx")
    (expected,) = run_model(tmp_path / "before.onnx", x=given)
    (found,) = run_model(path, pixels=given)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("flag", "expected"), [(True, -6), (False, 3)])
def test_subgraphs_that_capture_an_input_follow(
    tmp_path: Path, flag: bool, expected: float
) -> None:
    model = renamed(choosing(), {"x": "image", "flag": "is_twice"}, {"y": "result"})
    onnx.checker.check_model(model, full_check=True)
    assert not {"x", "flag", "y"} & set(texts(model))
    pytest.importorskip("onnxruntime")
    path = tmp_path / "renamed.onnx"
    onnx.save(model, path)
    given = np.array([-3], np.float32)
    (found,) = run_model(path, image=given, is_twice=np.array(flag))
    assert found == expected


def test_two_inputs_may_swap_their_names(tmp_path: Path) -> None:
    model = model_with(helper.make_node("Sub", ["a", "b"], ["y"]), inputs="a b", outputs="y")
    swapped = renamed(model, {"a": "b", "b": "a"}, {})
    assert [item.name for item in swapped.graph.input] == ["b", "a"]
    assert swapped.graph.node[0].input == ["b", "a"]
    onnx.checker.check_model(swapped)
    pytest.importorskip("onnxruntime")
    onnx.save(swapped, tmp_path / "swapped.onnx")
    inputs = {"a": np.array([1], np.float32), "b": np.array([5], np.float32)}
    (found,) = run_model(tmp_path / "swapped.onnx", **inputs)
    assert found == 4


def test_an_input_and_an_output_may_swap_their_names() -> None:
    model = model_with(helper.make_node("Neg", ["x"], ["y"]), inputs="x", outputs="y")
    swapped = renamed(model, {"x": "y"}, {"y": "x"})
    assert [*swapped.graph.node[0].input, *swapped.graph.node[0].output] == ["y", "x"]
    onnx.checker.check_model(swapped)


# Names that follow


def test_an_input_with_a_default_keeps_it(tmp_path: Path) -> None:
    default = numpy_helper.from_array(np.array([7], np.float32), "x")
    model = model_with(
        helper.make_node("Neg", ["x"], ["y"]), inputs="x", outputs="y", initializer=[default]
    )
    changed = renamed(model, {"x": "image"}, {})
    assert changed.graph.initializer[0].name == "image"
    assert changed.graph.initializer[0].raw_data == default.raw_data
    pytest.importorskip("onnxruntime")
    onnx.save(changed, tmp_path / "renamed.onnx")
    assert run_model(tmp_path / "renamed.onnx")[0] == -7


def test_sparse_defaults_value_infos_and_annotations_follow() -> None:
    sparse = onnx.SparseTensorProto(
        values=numpy_helper.from_array(np.ones(1, np.float32), "x"),
        indices=numpy_helper.from_array(np.zeros(1, np.int64), "x_indices"),
        dims=[1],
    )
    neg = helper.make_node("Neg", ["x"], ["y"])
    configured = neg.device_configurations.add(configuration_id="devices")
    configured.sharding_spec.add(tensor_name="y")
    model = model_with(
        neg,
        inputs="x",
        outputs="y",
        sparse_initializer=[sparse],
        value_info=[value("x"), value("y")],
    )
    annotation = model.graph.quantization_annotation.add(tensor_name="y")
    annotation.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="x")
    changed = renamed(model, {"x": "image"}, {"y": "result"}).graph
    assert changed.sparse_initializer[0].values.name == "image"
    assert changed.sparse_initializer[0].indices.name == "x_indices"
    assert [item.name for item in changed.value_info] == ["image", "result"]
    assert changed.node[0].device_configurations[0].sharding_spec[0].tensor_name == "result"
    assert changed.quantization_annotation[0].tensor_name == "result"
    parameter = changed.quantization_annotation[0].quant_parameter_tensor_names[0]
    assert (parameter.key, parameter.value) == ("SCALE_TENSOR", "image")


def test_an_input_that_is_also_an_output_gets_one_name() -> None:
    model = model_with(helper.make_node("Neg", ["x"], ["y"]), inputs="x", outputs="x y")
    changed = renamed(model, {"x": "image"}, {"x": "image"})
    assert [item.name for item in changed.graph.input] == ["image"]
    assert [item.name for item in changed.graph.output] == ["image", "y"]
    assert changed.graph.node[0].input == ["image"]
    message = "expected one new name for 'x', which is both an input and an output, found "
    with pytest.raises(ValueError, match=f"^{message}'image' and 'x'$"):
        renamed(model, {"x": "image"}, {})
    with pytest.raises(ValueError, match=f"^{message}'x' and 'image'$"):
        renamed(model, {}, {"x": "image"})
    with pytest.raises(ValueError, match=f"^{message}'image' and 'result'$"):
        renamed(model, {"x": "image"}, {"x": "result"})


def test_omitted_inputs_of_nodes_stay_omitted() -> None:
    model = model_with(helper.make_node("Clip", ["x", "", "x"], ["y"]), inputs="x", outputs="y")
    assert renamed(model, {"x": "image"}, {}).graph.node[0].input == ["image", "", "image"]


def test_functions_are_names_of_their_own() -> None:
    model = model_with(
        helper.make_node("negated", ["x"], ["y"], domain="test"), inputs="x", outputs="y"
    )
    function = helper.make_function(
        "test",
        "negated",
        ["x"],
        ["y"],
        [helper.make_node("Neg", ["x"], ["y"])],
        [helper.make_opsetid("", 21)],
    )
    model.functions.append(function)
    model.opset_import.append(helper.make_opsetid("test", 1))
    changed = renamed(model, {"x": "image"}, {"y": "result"})
    assert changed.functions == [function]
    assert [*changed.graph.node[0].input, *changed.graph.node[0].output] == ["image", "result"]
    onnx.checker.check_model(changed)


# Subgraphs that define a name themselves


def shadowing(*nodes: onnx.NodeProto, **defined: Any) -> onnx.ModelProto:
    """A model with an input `x` and a subgraph that defines `x`, too, and reads it."""
    reading = helper.make_node("Neg", ["x"], ["negative"])
    graph = onnx.GraphProto(
        name="body", node=[*nodes, reading], output=[value("negative")], **defined
    )
    outer = helper.make_node("Anything", ["x"], ["y"], domain="test", body=graph)
    return model_with(outer, inputs="x", outputs="y")


@pytest.mark.parametrize(
    "model",
    [
        shadowing(input=[value("x")]),
        shadowing(initializer=[numpy_helper.from_array(np.ones(1, np.float32), "x")]),
        shadowing(sparse_initializer=[onnx.SparseTensorProto(values=TensorProto(name="x"))]),
        shadowing(helper.make_node("Constant", [], ["x"], value_float=1.0)),
    ],
    ids=["input", "initializer", "sparse_initializer", "node"],
)
def test_what_a_subgraph_defines_itself_keeps_its_name(model: onnx.ModelProto) -> None:
    changed = renamed(model, {"x": "image"}, {})
    assert changed.graph.node[0].input == ["image"]
    assert changed.graph.node[0].attribute == model.graph.node[0].attribute


def test_a_name_that_a_subgraph_goes_on_to_define_is_taken() -> None:
    body = helper.make_graph(
        [helper.make_node("Add", ["a", "b"], ["sum"])], "body", [value("a")], [value("sum")]
    )
    outer = helper.make_node("Scan", ["a"], ["y"], body=body, num_scan_inputs=1)
    model = model_with(outer, inputs="a b", outputs="y")
    with pytest.raises(ValueError, match=r"found 'a'$"):
        renamed(model, {"a": "c", "b": "a"}, {})  # the subgraph would add its own `a` twice
    changed = renamed(model, {"a": "c", "b": "d"}, {})
    assert changed.graph.node[0].attribute[0].g.node[0].input == ["a", "d"]


def test_a_list_of_graphs_is_gone_through() -> None:
    bodies = [
        branch(str(number), helper.make_node("Neg", ["x"], ["n"]), output="n")
        for number in range(2)
    ]
    outer = helper.make_node("Anything", ["x"], ["y"], domain="test", bodies=bodies)
    changed = renamed(model_with(outer, inputs="x", outputs="y"), {"x": "image"}, {})
    assert [graph.node[0].input[0] for graph in changed.graph.node[0].attribute[0].graphs] == [
        "image",
        "image",
    ]


# Training


def trained(algorithm: onnx.GraphProto) -> onnx.ModelProto:
    """A model whose training graphs start from `w` and update it with `y`."""
    weight = numpy_helper.from_array(np.ones(1, np.float32), "w")
    model = model_with(
        helper.make_node("Mul", ["x", "w"], ["y"]),
        inputs="x w",
        outputs="y",
        initializer=[weight],
    )
    training = model.training_info.add(algorithm=algorithm)
    start = helper.make_node("Constant", [], ["start"], value_float=1.0)
    training.initialization.CopyFrom(helper.make_graph([start], "init", [], [value("start")]))
    training.initialization_binding.add(key="w", value="start")
    training.update_binding.add(key="w", value="y")
    return model


def test_training_graphs_and_their_bindings_follow() -> None:
    step = helper.make_graph(
        [helper.make_node("Sub", ["w", "y"], ["w_new"])], "step", [value("x")], [value("y")]
    )
    changed = renamed(trained(step), {"w": "weight", "x": "image"}, {"y": "result"})
    (training,) = changed.training_info
    assert training.algorithm.node[0].input == ["weight", "result"]
    assert training.algorithm.input[0].name == "x"  # its own
    assert training.algorithm.output[0].name == "result"
    assert training.initialization_binding[0].key == "weight"
    assert training.initialization_binding[0].value == "start"
    (binding,) = training.update_binding
    assert (binding.key, binding.value) == ("weight", "result")


def test_a_binding_of_what_the_training_graph_defines_itself_stays() -> None:
    step = helper.make_graph([helper.make_node("Neg", ["w"], ["y"])], "step", [], [value("y")])
    (training,) = renamed(trained(step), {}, {"y": "result"}).training_info
    assert training.algorithm == step
    assert training.update_binding[0].value == training.algorithm.output[0].name == "y"


def test_each_binding_names_what_its_graph_defines() -> None:
    """`y` is a value of the graph that initializes, and of the model; `x` one of the algorithm."""
    step = helper.make_graph([helper.make_node("Neg", ["x"], ["new"])], "step", [], [value("y")])
    step.initializer.add(name="x")
    model = trained(step)
    (training,) = model.training_info
    training.initialization.node[0].output[0] = "y"
    training.initialization_binding[0].value = "y"
    training.update_binding.add(key="x", value="new")
    training.initialization_binding.add(key="x", value="y")
    (changed,) = renamed(model, {"x": "image"}, {"y": "result"}).training_info
    assert [binding.value for binding in changed.initialization_binding] == ["y", "y"]
    assert [binding.value for binding in changed.update_binding] == ["result", "new"]
    assert changed.algorithm.output[0].name == "result"
    for bindings in (changed.initialization_binding, changed.update_binding):
        assert [binding.key for binding in bindings] == ["w", "x"]


def test_a_name_of_a_training_graph_is_taken() -> None:
    step = helper.make_graph([helper.make_node("Neg", ["w"], ["new"])], "step", [], [value("new")])
    for name in ("new", "start"):
        with pytest.raises(ValueError, match=f"found '{name}'$"):
            renamed(trained(step), {"x": name}, {})


# Refusals


def test_a_name_that_there_is_not_is_refused() -> None:
    model = model_with(helper.make_node("Add", ["a", "b"], ["y"]), inputs="a b", outputs="y")
    with pytest.raises(ValueError, match=r"^expected the name of an input of the model \(inputs: "):
        renamed(model, {"y": "z"}, {})
    with pytest.raises(ValueError, match=r"\(inputs: 'a', 'b'\), found 'image'$"):
        renamed(model, {"image": "z"}, {})
    with pytest.raises(ValueError, match=r"the name of an output of the model \(outputs: 'y'\), "):
        renamed(model, {}, {"a": "z"})
    with pytest.raises(ValueError, match=r"\(inputs: none\), found 'x'$"):
        renamed(onnx.ModelProto(), {"x": "z"}, {})


def test_no_new_name_is_refused() -> None:
    model = model_with(helper.make_node("Neg", ["x"], ["y"]), inputs="x", outputs="y")
    with pytest.raises(ValueError, match=r"^expected a new name for the input 'x', found none$"):
        renamed(model, {"x": ""}, {})


@pytest.mark.parametrize("taken", ["y", "flag", "twice", "deep", "negative", "w", "s", "seen"])
def test_a_name_that_something_has_is_refused(taken: str) -> None:
    model = choosing()
    model.graph.initializer.append(numpy_helper.from_array(np.ones(1, np.float32), "w"))
    model.graph.sparse_initializer.add().values.name = "s"
    model.graph.value_info.append(value("seen"))
    message = f"^expected a new name that no other value has or gets, found '{taken}'$"
    with pytest.raises(ValueError, match=message):
        renamed(model, {"x": taken}, {})


def test_two_values_never_get_one_name() -> None:
    model = model_with(helper.make_node("Add", ["a", "b"], ["y"]), inputs="a b", outputs="y")
    with pytest.raises(ValueError, match=r"found 'z'$"):
        renamed(model, {"a": "z", "b": "z"}, {})
    with pytest.raises(ValueError, match=r"found 'z'$"):
        renamed(model, {"a": "z"}, {"y": "z"})


class _Compared(str):
    """A name that counts how often names like it are compared with others."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        _Compared.comparisons += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_many_names_are_not_compared_each_with_each() -> None:
    names = [f"x{index}" for index in range(300)]
    model = model_with(helper.make_node("Sum", names, ["y"]), inputs=" ".join(names), outputs="y")
    found = renamed(model, {_Compared(name): _Compared(f"new_{name}") for name in names}, {})
    assert [it.name for it in found.graph.input] == [f"new_{name}" for name in names]
    assert _Compared.comparisons < 20 * len(names)


def test_the_model_given_is_not_changed() -> None:
    model = choosing()
    before = model.SerializeToString(deterministic=True)
    renamed(model, {"x": "image"}, {"y": "result"})
    assert model.SerializeToString(deterministic=True) == before


@given(model_protos())
def test_renaming_there_and_back_gives_the_same_model(model: onnx.ModelProto) -> None:
    model.graph.input.append(value("an input"))
    model.graph.output.append(value("an output"))
    model.graph.node.add(op_type="Neg", input=["an input"], output=["an output"])
    there = renamed(model, {"an input": "in"}, {"an output": "out"})
    assert there != model
    assert renamed(there, {"in": "an input"}, {"out": "an output"}) == model


def test_tensors_stay_whole_and_where_they_are() -> None:
    model = full_model(3)
    model.graph.input.append(value("main.initializer"))
    model.graph.node.add(op_type="Neg", input=["main.initializer"], output=["y"])
    changed = renamed(model, {"main.initializer": "w"}, {})
    assert changed.graph.initializer[0].name == "w"
    changed.graph.initializer[0].name = "main.initializer"
    changed.graph.input[0].name = changed.graph.node[-1].input[0] = "main.initializer"
    assert changed == model
