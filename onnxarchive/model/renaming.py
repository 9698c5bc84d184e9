"""New names for inputs and outputs of a model, wherever they are used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import onnx

from onnxarchive.errors import shown


def renamed(
    model: onnx.ModelProto, inputs: Mapping[str, str], outputs: Mapping[str, str]
) -> onnx.ModelProto:
    """A copy of a model whose inputs and outputs have other names.

    Nodes, subgraphs (where they do not define the name themselves), training graphs, value_info
    and annotations follow. An input with a default value keeps it: its initializer is renamed.

    Args:
        model: The model. It is not changed.
        inputs: The new name of each input of the main graph by its old one.
        outputs: The new name of each output of the main graph by its old one.

    Raises:
        ValueError: There is none of an old name, a new name is taken, or the same value would get
            two names.
    """
    _require_known("input", inputs, [value.name for value in model.graph.input])
    _require_known("output", outputs, [value.name for value in model.graph.output])
    for name in {value.name for value in model.graph.input} & {
        value.name for value in model.graph.output
    }:
        if inputs.get(name) != outputs.get(name):
            raise ValueError(
                f"expected one new name for {shown(name)}, which is both an input and an output, "
                f"found {shown(inputs.get(name, name))} and {shown(outputs.get(name, name))}"
            )
    names = {**inputs, **outputs}
    _require_free(model, names)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    _rename(copy.graph, names)
    for training in copy.training_info:
        of_initialization = _unless_defined(training.initialization, names)
        of_algorithm = _unless_defined(training.algorithm, names)
        for bindings, of_values in (
            (training.initialization_binding, of_initialization),
            (training.update_binding, of_algorithm),
        ):
            for binding in bindings:
                binding.key = of_algorithm.get(binding.key, binding.key)
                binding.value = of_values.get(binding.value, binding.value)
        _rename(training.initialization, of_initialization)
        _rename(training.algorithm, of_algorithm)
    return copy


def _require_known(kind: str, names: Mapping[str, str], known: list[str]) -> None:
    unknown = names.keys() - set(known)
    for name, new in names.items():
        if name in unknown:
            raise ValueError(
                f"expected the name of an {kind} of the model, which has "
                f"{', '.join(map(shown, known)) or 'none'}, found {shown(name)}"
            )
        if not new:
            raise ValueError(f"expected a new name for the {kind} {shown(name)}, found none")


def _require_free(model: onnx.ModelProto, names: Mapping[str, str]) -> None:
    kept = set(_kept(model.graph, names))
    for training in model.training_info:
        for graph in (training.initialization, training.algorithm):
            kept.update(_kept(graph, _unless_defined(graph, names)))
    for name, count in Counter(names.values()).items():
        if name in kept or count > 1:
            raise ValueError(
                f"expected a new name that nothing in the model has, found {shown(name)}"
            )


def _kept(graph: onnx.GraphProto, names: Mapping[str, str]) -> Iterator[str]:
    """All names of values in a graph and in its subgraphs that are still there afterwards."""
    used = [*_defined(graph), *(value.name for value in (*graph.output, *graph.value_info))]
    for node in graph.node:
        used += node.input
        for subgraph in _subgraphs(node):
            yield from _kept(subgraph, _unless_defined(subgraph, names))
    yield from (name for name in used if name not in names)


def _defined(graph: onnx.GraphProto) -> Iterator[str]:
    yield from (value.name for value in graph.input)
    yield from (tensor.name for tensor in graph.initializer)
    yield from (tensor.values.name for tensor in graph.sparse_initializer)
    for node in graph.node:
        yield from node.output


def _subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _unless_defined(graph: onnx.GraphProto, names: Mapping[str, str]) -> dict[str, str]:
    """The names that mean in a graph what they mean outside it."""
    own = set(_defined(graph))
    return {name: new for name, new in names.items() if name not in own}


def _rename(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    for value in (*graph.input, *graph.output, *graph.value_info):
        value.name = names.get(value.name, value.name)
    for tensor in graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    for sparse in graph.sparse_initializer:
        sparse.values.name = names.get(sparse.values.name, sparse.values.name)
    for annotation in graph.quantization_annotation:
        annotation.tensor_name = names.get(annotation.tensor_name, annotation.tensor_name)
        for parameter in annotation.quant_parameter_tensor_names:
            parameter.value = names.get(parameter.value, parameter.value)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        for configuration in node.device_configurations:
            for sharding in configuration.sharding_spec:
                sharding.tensor_name = names.get(sharding.tensor_name, sharding.tensor_name)
        for subgraph in _subgraphs(node):
            _rename(subgraph, _unless_defined(subgraph, names))
