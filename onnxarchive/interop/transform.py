"""`transform` applies a function of another library to the model of an archive.

Such functions are `onnxsim.simplify`, `onnxoptimizer.optimize`, `onnxslim.slim` and
`onnx.version_converter.convert_version`, and converters that change weights. If a model is too
large for protobuf, or for the memory, the weights can be hidden from a function that changes only
the graph; they are then copied from archive to archive.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import compress
from typing import Any, Final, Literal, TypeAlias, get_args

import onnx

from onnxarchive.conversion.linked_models import with_external_data
from onnxarchive.errors import ArchiveFormatError, UnsupportedFeatureError, with_path
from onnxarchive.files.paths import require_no_input
from onnxarchive.files.progress import Progress
from onnxarchive.files.replacement import Replacement
from onnxarchive.model import dtypes, model_proto, tensors, walking
from onnxarchive.model.copying import copied
from onnxarchive.model.external import StaysOutside, is_unread
from onnxarchive.model.keys import model_entry
from onnxarchive.model.tensors import TensorRef
from onnxarchive.model.walking import MAIN_GRAPH
from onnxarchive.reading.archive import Archive, contents_of, fill_in_place, open
from onnxarchive.remote.location import require_local_target
from onnxarchive.writing.archive_models import archive_options, save_model_of_archive
from onnxarchive.writing.options import Asset
from onnxarchive.writing.plan import open_assets

# Returns the changed model or a new model. onnxsim also returns whether the model is valid.
Function: TypeAlias = Callable[[onnx.ModelProto], onnx.ModelProto | tuple[onnx.ModelProto, bool]]
Weights: TypeAlias = Literal["hidden", "external", "loaded"]

# The doc_string of an input that replaces a weight is this mark and the weight's name.
_MARK: Final = "onnxarchive:"
# A function that wants to convert weights inserts one of these operators after a hidden weight.
_CONVERSIONS: Final = frozenset({"Cast", "CastLike", "QuantizeLinear", "DynamicQuantizeLinear"})


def transform(
    path: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    function: Function,
    *,
    model: str | None = None,
    weights: Weights | None = None,
    size_threshold: int | None = None,
    alignment: int | None = None,
    convert_attribute: bool | None = None,
    assets: Mapping[str, Asset] | None = None,
    progress: Progress | None = None,
) -> None:
    """Applies a function to the model of an archive and saves the result as an archive.

    Assets and other models are kept. `weights` says how the function sees large tensors:

    - `"loaded"`: for all functions. The model is complete and in memory, so model and weights must
      be below 2 GiB, the limit of protobuf. This is the default.
    - `"hidden"`: for functions that change the graph. Large initializers become inputs of the
      graph, so the function cannot read, fold or merge them, and memory stays small. Afterwards the
      inputs that are still used become initializers again, copied from the archive. A function may
      replace such an input by a new initializer. A function that computes new weights (folds a
      batch normalization, changes a data type) skips hidden weights, or its result is refused;
      quantizers and converters to float16 need `"loaded"`. A warning is issued if the function
      changed nothing, or tried to convert hidden weights; the latter is an error if `destination`
      is `path`.
    - `"external"`: for functions that support external data. The model is `Archive.model`; its
      large tensors have keys as location. The function may rename, remove, move and copy large
      tensors, and add tensors with data. A function that does not support external data may see
      large tensors as empty, and damage the model: onnxoptimizer merges all large tensors of the
      same shape.

    These tensors are never hidden: tensors that shape inference needs, tensors other than
    initializers, initializers that are outputs of a subgraph, and initializers whose name is empty,
    not UTF-8 or not unique. In the main graph, a name must be unique among the initializers; in a
    subgraph, among the values of all graphs. Hidden initializers of subgraphs become initializers
    of the main graph.

    Args:
        path: The archive.
        destination: The archive to write; it may be `path`.
        function: Takes a ModelProto, and returns a ModelProto or a tuple of a ModelProto and a
            boolean, False if the model is invalid. Bind options with `functools.partial`.
        model: Id of the model, such as `"decoder"`; None for the default one.
        weights: How the function sees large tensors; see above. None means `"loaded"`, and is
            refused for a model that takes 2 GiB or more with its weights: choose one of the others.
        size_threshold: As in `save`. None means as in `edit` with `compact`; usually 1024.
        alignment: As in `save`; None for the alignment of the archive.
        convert_attribute: As in `save`. None means True if a model of the archive has an external
            tensor that is not an initializer, else False.
        assets: As in `save`. They replace assets of the archive that have the same path.
        progress: As in `save`.

    Raises:
        ArchiveFormatError: `path` breaks a rule, or the function's result is refused. The function
            returned False; removed the input of a hidden weight, although the name of the weight is
            still used; changed the type, the shape, or both name and doc_string of such an input;
            gave two initializers of a graph the same name; or set a location that is not a key.
        ChecksumError: Bytes of the archive do not match their CRC-32.
        ArchiveError: `destination` is `path`, which was edited meanwhile.
        UnsupportedFeatureError: `destination` is a URL; `weights` is `"loaded"`, and the model
            takes 2 GiB or more with its weights; or `weights` is `"hidden"`, and it takes 2 GiB or
            more without the hidden weights.
        TypeError: The function did not return a model.
        ValueError: An option is not allowed; or `weights` is None, and the model takes 2 GiB or
            more with its weights.
        LockedError: A file that is to be replaced stayed locked for 30 seconds.
        OSError: A file cannot be read or written.

    Example:
        to_22 = functools.partial(onnx.version_converter.convert_version, target_version=22)
        onnxarchive.transform("model.onnxa", "newer.onnxa", to_22)
    """
    if weights is not None and weights not in get_args(Weights):
        raise ValueError(f"expected one of {get_args(Weights)} for weights, found {weights!r}")
    destination = require_local_target(destination)
    with open(path, model=model) as archive, with_path(path):
        view = _view_of_weights(archive, weights)
        options = replace(
            archive_options(
                contents_of(archive), archive.models, size_threshold, convert_attribute
            ),
            alignment=archive.alignment if alignment is None else alignment,
            assets=assets,
            progress=progress,
        )
        require_no_input(destination, options.asset_files)
        # The function may take long, so the destination and assets are checked first.
        open_assets(assets)
        Replacement(destination).close()
        is_in_place = contents_of(archive).is_at(destination)
        transformed = _transformed(archive, function, view, is_in_place=is_in_place)
        save_model_of_archive(transformed, archive, destination, options)


def _view_of_weights(archive: Archive, weights: Weights | None) -> Weights:
    """How a function sees the weights; refuses models that protobuf cannot hold.

    Raises:
        ValueError: The caller has to choose.
        UnsupportedFeatureError: The model is too large to be loaded.
    """
    names = (model_entry(archive.model_id), *archive.tensors.refs)
    nbytes = sum(archive.entries[name].nbytes for name in names)
    if nbytes < model_proto.SIZE_LIMIT:
        return weights or "loaded"
    problem = (
        f"a model of {nbytes} bytes with its weights cannot be loaded, since the limit of protobuf "
        f"is {model_proto.SIZE_LIMIT - 1}"
    )
    if weights is None:
        raise ValueError(
            f"{archive.path}: {problem}; choose weights='hidden' for a function that changes the "
            "graph alone, such as an optimizer, or weights='external' for one that supports "
            "external data"
        )
    if weights == "loaded":
        raise UnsupportedFeatureError(
            f"{problem}; weights='hidden' is for functions that change the graph alone, and "
            "weights='external' for those that support external data; to change weights, save an "
            "onnx_ir.Model with lazy tensors"
        )
    return weights


def _transformed(
    archive: Archive, function: Function, weights: Weights, *, is_in_place: bool
) -> onnx.ModelProto:
    before = _repeated_initializers(archive.model)
    if weights == "loaded":
        result = _call(function, fill_in_place(archive))
    elif weights == "external":
        result = _call(function, archive.model)  # not copied: it is not used again
    else:
        model, hidden = _hide_weights(archive)
        before_call = copied(model)
        returned = _call(function, model)
        result = _restore_weights(archive.model, hidden, returned)
        _require_no_conversion(
            archive, _name(function), hidden, before_call, returned, is_in_place=is_in_place
        )
    for name in sorted(_repeated_initializers(result) - before, key=str):
        raise ArchiveFormatError(
            f"tensor {name!r}: the function returned several initializers of this name in a graph; "
            "remove the old one, or give them different names"
        )
    return result


def _call(function: Function, model: onnx.ModelProto) -> onnx.ModelProto:
    returned = function(model)
    result, is_valid = (
        returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, True)
    )
    name = _name(function)
    if result is None:
        raise TypeError(
            f"expected {name} to return an onnx.ModelProto, found None; if it changes the model "
            "that it gets, pass a function that calls it and returns this model"
        )
    if not isinstance(result, onnx.ModelProto):
        raise TypeError(f"expected {name} to return an onnx.ModelProto, found {type(result)}")
    if not is_valid:
        raise ArchiveFormatError(
            f"{name} returned False: its model is invalid; nothing was written"
        )
    return result


def _name(function: Function) -> str:
    function = getattr(function, "func", function)  # of a functools.partial
    return getattr(function, "__name__", type(function).__name__)


def _hide_weights(archive: Archive) -> tuple[onnx.ModelProto, dict[str, onnx.TensorProto]]:
    """A copy of the model with inputs instead of large initializers; and these by name.

    The doc_string of such an input holds the name of its weight, so that the input may be renamed.
    """
    # The only external tensors of this model are the weights to hide.
    model = with_external_data(archive, None, _is_hidable(archive.model))
    weights: dict[str, onnx.TensorProto] = {}
    for graph in _graphs(model):
        are_hidden = [tensor.data_location == tensors.EXTERNAL for tensor in graph.initializer]
        hidden = compress(graph.initializer, are_hidden)
        weights |= {tensor.name: copied(tensor) for tensor in hidden}
        tensors.remove(graph.initializer, are_hidden)
    inputs = {value.name for value in model.graph.input}
    for name, weight in weights.items():
        if name not in inputs:
            make, mark = onnx.helper.make_tensor_value_info, f"{_MARK}{name}"
            model.graph.input.append(make(name, weight.data_type, weight.dims, doc_string=mark))
    return model, weights


def _require_no_conversion(
    archive: Archive,
    name: str,
    hidden: Mapping[str, onnx.TensorProto],
    before: onnx.ModelProto,
    returned: onnx.ModelProto,
    *,
    is_in_place: bool,
) -> None:
    """Warns if a function did nothing, or failed to convert weights, since they were hidden.

    Raises:
        ArchiveFormatError: The function tried to convert weights, and the result would replace the
            archive.
    """
    if not hidden:
        return
    wish = _wish_for_weights(hidden, before, returned)
    if wish is None and returned != before:
        return
    problem = (
        f"{name} {wish or 'changed nothing'}: the data of large weights, such as "
        f"{next(iter(hidden))!r}, was hidden; use weights='loaded' for functions that need this "
        "data, such as quantizers and converters to float16"
    )
    if wish is not None and is_in_place:
        raise ArchiveFormatError(f"{problem}; nothing was written")
    warnings.warn(f"{archive.path}: {problem}", stacklevel=4)


def _wish_for_weights(
    hidden: Mapping[str, onnx.TensorProto], before: onnx.ModelProto, returned: onnx.ModelProto
) -> str | None:
    """Evidence that a function wanted to convert hidden weights; None without evidence."""
    added = _converted_weights(hidden, returned) - _converted_weights(hidden, before)
    if added:
        operator, weight = min(added)
        return f"added a {operator} of the weight {weight!r} instead of converting the weight"
    if returned.graph.node != before.graph.node:
        return None
    # ONNX Runtime's quantizers return such a model if they find no weight.
    domains = {opset.domain for opset in returned.opset_import}
    new_domains = domains - {opset.domain for opset in before.opset_import}
    if new_domains:
        return f"added the domain {min(new_domains)!r}, but no operator"
    has_new_producer = returned.producer_name != before.producer_name
    if has_new_producer and returned.opset_import == before.opset_import:
        return f"set the producer {returned.producer_name!r}, but changed no operator"
    return None


def _converted_weights(
    hidden: Mapping[str, onnx.TensorProto], model: onnx.ModelProto
) -> Counter[tuple[str, str]]:
    """Counts the nodes that convert the elements of hidden weights, by operator and weight."""
    weights = {value.name: _marked_name(value) or value.name for value in model.graph.input}
    return Counter(
        (node.op_type, weights[node.input[0]])
        for graph in _graphs(model)
        for node in graph.node
        if node.op_type in _CONVERSIONS and node.input and weights.get(node.input[0]) in hidden
    )


def _restore_weights(
    original: onnx.ModelProto, weights: Mapping[str, onnx.TensorProto], returned: onnx.ModelProto
) -> onnx.ModelProto:
    """Copies the function's result, and turns inputs that replace weights into initializers."""
    result = copied(returned)
    inputs = {value.name for value in original.graph.input}  # without a mark
    used_before, used = _used_names(original), _used_names(result)
    names = set(_initializer_names(result.graph))
    order = {tensor.name: index for index, tensor in enumerate(original.graph.initializer)}
    positions, end = dict(order), len(order)
    missing, restored, new = dict(weights), [], []
    are_replaced = []
    for value in result.graph.input:
        marked = "" if value.name in inputs else _marked_name(value)
        weight = weights.get(marked) or weights.get(value.name)
        if weight is None:
            are_replaced.append(False)
            if value.name not in inputs:
                new.append(value)
            continue
        _require_unchanged(weight, value)
        missing.pop(weight.name, None)
        are_replaced.append(weight.name not in inputs)
        if are_replaced[-1] and weight.name in used_before and value.name not in used:
            continue  # the result does not need it any more
        if value.name in names:
            raise ArchiveFormatError(
                f"tensor {weight.name!r}: the function returned several inputs or initializers "
                f"{value.name!r} for the tensor; keep one of them"
            )
        names.add(value.name)
        tensor = copied(weight)
        tensor.name = value.name
        restored.append(tensor)
        positions[tensor.name] = order.get(weight.name, end)
    _require_dropped(missing.values(), result, new)
    # Initializers of the archive keep their order; new initializers follow.
    result.graph.initializer.extend(restored)
    result.graph.initializer.sort(key=lambda tensor: positions.get(tensor.name, end))
    tensors.remove(result.graph.input, are_replaced)
    for graph in _graphs(result):
        for value in (*graph.input, *graph.output, *graph.value_info):
            if _marked_name(value) and value.name not in inputs:
                value.ClearField("doc_string")
    return result


def _is_hidable(model: onnx.ModelProto) -> StaysOutside:
    """True if an input of the main graph can replace an initializer."""
    everywhere = Counter(name for graph in _graphs(model) for name in _defined_names(graph))
    # Here, an input of the main graph may have the same name.
    main = Counter(_initializer_names(model.graph))
    # A subgraph cannot return a value of an outer graph.
    graphs = walking.below(model, (), onnx.GraphProto.DESCRIPTOR)
    subgraphs: list[Any] = [graph for path, graph in graphs if path != MAIN_GRAPH]
    returned = {value.name for graph in subgraphs for value in graph.output}

    def is_hidable(ref: TensorRef, nbytes: int) -> bool:
        name = ref.tensor.name
        is_in_main_graph = len(ref.path) == 2
        if not ref.is_initializer or not isinstance(name, str) or not name:
            return False
        if not is_in_main_graph and name in returned:
            return False
        count = (main if is_in_main_graph else everywhere)[name]
        return count == 1 and is_unread(ref, nbytes)

    return is_hidable


def _marked_name(value: onnx.ValueInfoProto) -> str:
    """The name after `_MARK` in the doc_string of an input; empty if the doc_string has no mark."""
    doc_string = tensors.text(value.doc_string)
    return doc_string.removeprefix(_MARK) if doc_string.startswith(_MARK) else ""


def _require_unchanged(weight: onnx.TensorProto, value: onnx.ValueInfoProto) -> None:
    """Refuses an input that differs from the archive's weight in type or shape."""
    kind = value.type.tensor_type
    dims = [dim.dim_value if dim.HasField("dim_value") else None for dim in kind.shape.dim]
    expected = list(weight.dims)
    is_shape = not kind.HasField("shape") or (
        len(dims) == len(expected)
        and all(dim in (None, size) for dim, size in zip(dims, expected, strict=True))
    )
    if kind.elem_type == weight.data_type and is_shape:
        return
    raise ArchiveFormatError(
        f"tensor {weight.name!r}: expected {dtypes.name_of(weight.data_type)} of shape "
        f"{expected} as in the archive, found {dtypes.name_of(kind.elem_type)} of shape {dims} in "
        "the function's result; functions that change weights need weights='loaded'"
    )


def _require_dropped(
    missing: Iterable[onnx.TensorProto],
    model: onnx.ModelProto,
    new_inputs: list[onnx.ValueInfoProto],
) -> None:
    """Refuses a result that lacks the input of a weight, in two cases.

    1. The result still uses the name of the weight, but does not define it.
    2. The result has a new input of the weight's type and shape. This new input is probably the
       weight's input with another name.
    """
    defined = {name for graph in _graphs(model) for name in _defined_names(graph)}
    undefined = _used_names(model) - defined
    renamed: dict[object, str] = {}
    for value in new_inputs:
        kind = value.type.tensor_type
        dims = tuple(dim.dim_value for dim in kind.shape.dim)
        renamed.setdefault((kind.elem_type, dims), value.name)
    for weight in missing:
        if weight.name in undefined:
            raise ArchiveFormatError(
                f"tensor {weight.name!r}: the function removed the input that replaces the tensor, "
                "although the tensor's name is still used; functions that choose the inputs of the "
                "graph, such as onnx.utils.Extractor, need weights='external' or weights='loaded'"
            )
        name = renamed.get((weight.data_type, tuple(weight.dims)))
        if name is not None:
            raise ArchiveFormatError(
                f"tensor {weight.name!r}: the function returned a new input {name!r} of the same "
                "type and shape, without the name or doc_string of the input that replaces the "
                "tensor; functions that rename weights need weights='external'"
            )


def _graphs(model: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    """The main graph, training graphs and their subgraphs, but not the graphs in functions."""
    graphs = walking.below(model, (), onnx.GraphProto.DESCRIPTOR)
    return (graph for path, graph in graphs if path[0][0] != "functions")  # type: ignore[misc]


def _used_names(model: onnx.ModelProto) -> set[str]:
    names: set[str] = set()
    for training in model.training_info:
        for binding in (*training.initialization_binding, *training.update_binding):
            names.update((binding.key, binding.value))
    for graph in _graphs(model):
        names.update(name for node in graph.node for name in node.input)
        names.update(value.name for value in graph.output)
        for annotation in graph.quantization_annotation:
            names.update(pair.value for pair in annotation.quant_parameter_tensor_names)
    return names


def _initializer_names(graph: onnx.GraphProto) -> Iterator[str]:
    yield from (tensor.name for tensor in graph.initializer)
    yield from (tensor.values.name for tensor in graph.sparse_initializer)


def _repeated_initializers(model: onnx.ModelProto) -> set[str]:
    """The names that several initializers of a graph share."""
    return {
        name
        for graph in _graphs(model)
        for name, number in Counter(_initializer_names(graph)).items()
        if number > 1
    }


def _defined_names(graph: onnx.GraphProto) -> Iterator[str]:
    """The names of a graph's inputs, initializers and node outputs, without its subgraphs."""
    yield from (value.name for value in graph.input)
    yield from _initializer_names(graph)
    for node in graph.node:
        yield from node.output
