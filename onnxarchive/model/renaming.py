"""Renames inputs and outputs of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import onnx

from onnxarchive.errors import shown, shown_names
from onnxarchive.model.copying import copied
from onnxarchive.model.walking import MAIN_GRAPH, GraphRef, Path, graphs


def renamed(
    model: onnx.ModelProto, inputs: Mapping[str, str], outputs: Mapping[str, str]
) -> onnx.ModelProto:
    """A copy of a model with new names of inputs and outputs.

    All uses are renamed: in nodes, subgraphs (unless they define the name themselves), training
    graphs, value_info and annotations. If an input has an initializer (a default value), the
    initializer is renamed, too.

    Args:
        model: The model. It is not changed.
        inputs: New names of inputs of the main graph, by old name.
        outputs: New names of outputs of the main graph, by old name.

    Raises:
        ValueError: An old name is unknown, a new name is empty, taken or given twice, or a value
            would get two names.
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
    copy = copied(model)
    renamings = list(_renamings(copy, names))
    _require_free(renamings)
    names_in = {ref.path: inside for ref, inside in renamings}
    for number, training in enumerate(copy.training_info):
        of_initialization, of_algorithm = (
            names_in.get((("training_info", number), (field, None)), names)
            for field in ("initialization", "algorithm")
        )
        for bindings, of_values in (
            (training.initialization_binding, of_initialization),
            (training.update_binding, of_algorithm),
        ):
            for binding in bindings:
                binding.key = of_algorithm.get(binding.key, binding.key)
                binding.value = of_values.get(binding.value, binding.value)
    for ref, inside in renamings:
        _rename(ref.graph, inside)
    return copy


def _renamings(
    model: onnx.ModelProto, names: Mapping[str, str]
) -> Iterator[tuple[GraphRef, Mapping[str, str]]]:
    """The graphs that see names of the main graph, each with the new names that apply in it.

    In a graph that defines a name again, the name means another value, and is not renamed.
    """
    names_in: dict[Path, Mapping[str, str]] = {}
    for ref in graphs(model):
        if ref.root == "functions":
            continue
        inside = names
        if ref.path != MAIN_GRAPH:
            own = set(defined_names(ref.graph))
            around = names if ref.outer is None else names_in[ref.outer.path]
            inside = {name: new for name, new in around.items() if name not in own}
        names_in[ref.path] = inside
        yield ref, inside


def _require_known(kind: str, names: Mapping[str, str], known: list[str]) -> None:
    unknown = names.keys() - set(known)
    for name, new in names.items():
        if name in unknown:
            raise ValueError(
                f"expected the name of an {kind} of the model ({kind}s: "
                f"{shown_names(known)}), found {shown(name)}"
            )
        if not new:
            raise ValueError(f"expected a new name for the {kind} {shown(name)}, found none")


def _require_free(renamings: list[tuple[GraphRef, Mapping[str, str]]]) -> None:
    kept = {name for ref, names in renamings for name in _used(ref.graph) if name not in names}
    for name, count in Counter(renamings[0][1].values()).items():
        if name in kept or count > 1:
            raise ValueError(
                f"expected a new name that no other value has or gets, found {shown(name)}"
            )


def _used(graph: onnx.GraphProto) -> Iterator[str]:
    """The names of values in a graph, without its subgraphs."""
    yield from defined_names(graph)
    yield from (value.name for value in (*graph.output, *graph.value_info))
    for node in graph.node:
        yield from node.input


def defined_names(graph: onnx.GraphProto) -> Iterator[str]:
    """The names of a graph's inputs, initializers and node outputs, without its subgraphs."""
    yield from (value.name for value in graph.input)
    yield from (tensor.name for tensor in graph.initializer)
    yield from (tensor.values.name for tensor in graph.sparse_initializer)
    for node in graph.node:
        yield from node.output


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
