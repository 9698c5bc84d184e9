"""Passes the model of an archive to functions of onnx and of other libraries, without weights.

`check_model`: onnx checks models of 2 GiB or more only by path. External data must be in regular
files without further hard links, in the model's directory or below; onnx does not read these files.
So two files are written to a temporary directory: the model without large weights, and an empty
file in place of the archive. Nothing is written to the archive's directory.

`transform` takes such functions as `onnxsim.simplify`, `onnxoptimizer.optimize`, `onnxslim.slim`
and `onnx.version_converter.convert_version`. Most of their work needs the graph and no weights. So
by default the weights are hidden from the function, and then copied from archive to archive.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

import onnx

from onnxarchive.errors import ArchiveFormatError, naming, with_path
from onnxarchive.files.filesystem import require_no_input
from onnxarchive.files.progress import Progress
from onnxarchive.files.replacement import Replacement
from onnxarchive.model import dtypes, proto, tensors, walking
from onnxarchive.model.copying import copied
from onnxarchive.model.keys import model_entry
from onnxarchive.model.tensors import TensorRef
from onnxarchive.reading.archive import Archive, complete_model, open
from onnxarchive.reading.linked_models import StaysOutside, is_unread, linked_model
from onnxarchive.reading.rules import Finding
from onnxarchive.remote.location import require_local_target
from onnxarchive.writing.options import Asset
from onnxarchive.writing.plan import open_assets
from onnxarchive.writing.stored_entries import archive_options, save_referring

# Returns the changed model or a new model. onnxsim also returns whether the model is valid.
Function: TypeAlias = Callable[[onnx.ModelProto], onnx.ModelProto | tuple[onnx.ModelProto, bool]]
Weights: TypeAlias = Literal["hidden", "external", "loaded"]

# The doc_string of an input that replaces a weight is this mark and the weight's name.
_MARK: Final = "onnxarchive:"
_EMPTY: Final = "archive.onnxa"  # in place of the archive, for `check_model`


def check_model(
    path: str | os.PathLike[str],
    full_check: bool = False,
    skip_opset_compatibility_check: bool = False,
    check_custom_domain: bool = False,
    *,
    model: str = "",
) -> list[Finding]:
    """Checks the model of an archive with `onnx.checker.check_model`.

    `onnxarchive.check` checks the file; this function checks the model without reading large
    weights. Unlike `onnx.checker.check_model`, this function returns a fault instead of raising it.
    Errors of `onnxarchive.open` pass.

    Args:
        path: The archive.
        full_check: Whether to also infer shapes and compare them with the model's shapes.
        skip_opset_compatibility_check: As in onnx.
        check_custom_domain: As in onnx.
        model: Id of the model, such as `"decoder"`; `""` for the default one.

    Returns:
        An empty list if the model is valid; else one finding with onnx's message, since onnx stops
        at the first fault.

    Raises:
        ChecksumError: The bytes of a model or small tensor do not match their CRC-32.
        UnsupportedFeatureError: The model takes 2 GiB or more without its large tensors.
        OSError: Temporary files cannot be written.

    Example:
        assert onnxarchive.check_model("model.onnxa", full_check=True) == []
    """
    with open(path, model=model) as archive, with_path(path):
        serialized = proto.serialize(linked_model(archive, _EMPTY, is_unread, in_place=True))
    with (
        naming("the system's temporary directory"),
        tempfile.TemporaryDirectory(prefix="onnxarchive-") as directory,
    ):
        linked = Path(directory, "model.onnx")
        linked.write_bytes(serialized)
        Path(directory, _EMPTY).touch()  # onnx does not check the size
        try:
            onnx.checker.check_model(
                linked,
                full_check=full_check,
                skip_opset_compatibility_check=skip_opset_compatibility_check,
                check_custom_domain=check_custom_domain,
            )
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            return [Finding(None, model_entry(model), " ".join(str(error).split()))]
    return []


def infer_shapes(
    path: str | os.PathLike[str],
    destination: str | os.PathLike[str] | None = None,
    *,
    model: str = "",
    check_type: bool = False,
    strict_mode: bool = False,
    data_prop: bool = False,
) -> onnx.ModelProto:
    """Infers shapes in the model of an archive with `onnx.shape_inference.infer_shapes`.

    The result is that of onnx for the complete model, with one exception: nothing is inferred from
    the values of vectors of 16 MiB or more, which are not read. Errors of `onnxarchive.open` pass.

    Args:
        path: The archive.
        destination: An archive to write, with the inferred shapes and copies of weights, assets
            and other models, and the alignment of the archive; it may be `path`. None writes
            nothing.
        model: Id of the model, such as `"decoder"`; `""` for the default one.
        check_type: As in onnx.
        strict_mode: As in onnx.
        data_prop: As in onnx.

    Returns:
        The model with the inferred shapes; large tensors are external, as in `Archive.model`.

    Raises:
        onnx.shape_inference.InferenceError: Shapes conflict (with `strict_mode`), or types
            conflict (with `check_type`).
        ChecksumError: Bytes of the archive do not match their CRC-32.
        ArchiveError: `destination` is `path`, which was edited meanwhile.
        UnsupportedFeatureError: The model takes 2 GiB or more without its large tensors, or
            `destination` is a URL.
        ValueError: `destination` is not allowed.
        LockedError: A file that is to be replaced stayed locked for 30 seconds.
        OSError: The archive cannot be written.

    Example:
        model = onnxarchive.infer_shapes("model.onnxa", "inferred.onnxa")
    """
    if destination is not None:
        require_local_target(destination)
    with open(path, model=model) as archive, with_path(path):
        inferred = onnx.shape_inference.infer_shapes(
            linked_model(archive, "archive", is_unread),
            check_type=check_type,
            strict_mode=strict_mode,
            data_prop=data_prop,
        )
        for ref in archive.tensors.refs.values():  # inference keeps their paths
            walking.at(inferred, ref.path).CopyFrom(ref.tensor)
        if destination is not None:
            options = archive_options(archive, archive.models)
            save_referring(inferred, archive, destination, options)
    return inferred


def transform(
    path: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    function: Function,
    *,
    model: str = "",
    weights: Weights = "hidden",
    size_threshold: int | None = None,
    alignment: int | None = None,
    convert_attribute: bool | None = None,
    assets: Mapping[str, Asset] | None = None,
    progress: Progress | None = None,
) -> None:
    """Applies a function to the model of an archive and saves the result as an archive.

    Assets and other models are kept. `weights` says how the function sees large tensors:

    - `"hidden"`: for functions that change the graph. Large initializers become inputs of the
      graph, so the function cannot read, fold or merge them, and memory stays small. Afterwards
      the inputs that are still used become initializers again, copied from the archive. A function
      may replace such an input by a new initializer. A function that computes new weights (folds
      a batch normalization, changes a data type) skips hidden weights, or its result is refused;
      quantizers and converters to float16 need `"loaded"`. A warning is raised if weights were
      hidden and the function changed nothing.
    - `"external"`: for functions that support external data. The model is `Archive.model`; its
      large tensors have keys as location. The function may rename, remove, move and copy large
      tensors, and add tensors with data. A function that does not support external data may see
      large tensors as empty, and damage the model: onnxoptimizer merges all large tensors of the
      same shape.
    - `"loaded"`: for all other functions. The model is complete and in memory.

    Never hidden are: tensors that shape inference needs, tensors other than initializers, and
    initializers whose name is empty, not UTF-8 or not unique. In the main graph, a name must be
    unique among the initializers; in a subgraph, among the values of all graphs. Hidden
    initializers of subgraphs become initializers of the main graph.

    Args:
        path: The archive.
        destination: The archive to write; it may be `path`.
        function: Takes a ModelProto, and returns a ModelProto or a tuple of a ModelProto and a
            boolean, False if the model is invalid. Bind options with `functools.partial`.
        model: Id of the model, such as `"decoder"`; `""` for the default one.
        weights: How the function sees large tensors; see above.
        size_threshold: Initializers of this many bytes or more are stored outside the model. None
            means a threshold that moves no tensor of the archive out of a model, and as few as
            possible into models; usually 1024.
        alignment: The data of every entry begins at a multiple of this many bytes; None for the
            alignment of the archive.
        convert_attribute: Whether all tensors of `size_threshold` bytes or more are stored outside
            the model, not only initializers. None means True if a tensor other than an initializer
            is already stored outside a model of the archive, else False.
        assets: Assets to store, by relative path: the bytes of an asset, or the path of a file.
            They replace assets of the archive that have the same path.
        progress: Called with the bytes done and the bytes in all; True shows a bar.

    Raises:
        ArchiveFormatError: `path` breaks a rule, or the function's result is refused. The function
            returned False; removed the input of a hidden weight, although the name of the weight is
            still used; changed the type, the shape, or both name and doc_string of such an input;
            gave two initializers of a graph the same name; or set a location that is not a key.
        ChecksumError: Bytes of the archive do not match their CRC-32.
        ArchiveError: `destination` is `path`, which was edited meanwhile.
        UnsupportedFeatureError: `destination` is a URL; or `weights` is `"hidden"`, and the model
            takes 2 GiB or more without the hidden weights.
        TypeError: The function did not return a model.
        ValueError: An option is not allowed.
        LockedError: A file that is to be replaced stayed locked for 30 seconds.
        OSError: A file cannot be read or written.

    Example:
        to_22 = functools.partial(onnx.version_converter.convert_version, target_version=22)
        onnxarchive.transform("model.onnxa", "newer.onnxa", to_22)
    """
    if weights not in get_args(Weights):
        raise ValueError(f"expected one of {get_args(Weights)} for weights, found {weights!r}")
    require_local_target(destination)
    with open(path, model=model) as archive, with_path(path):
        options = replace(
            archive_options(archive, archive.models, size_threshold, convert_attribute),
            alignment=archive.alignment if alignment is None else alignment,
            assets=assets,
            progress=progress,
        )
        require_no_input(destination, options.asset_files)
        # The function may take long, so the destination and assets are checked first.
        open_assets(assets)
        Replacement(destination).close()
        save_referring(_transformed(archive, function, weights), archive, destination, options)


def _transformed(archive: Archive, function: Function, weights: Weights) -> onnx.ModelProto:
    before = _repeated_initializers(archive.model)
    if weights == "loaded":
        result = _call(function, complete_model(archive))
    elif weights == "external":
        result = _call(function, archive.model)  # not copied: it is not used again
    else:
        model, hidden = _hide_weights(archive)
        before_call = copied(model)
        returned = _call(function, model)
        result = _restore_weights(archive.model, hidden, returned)
        if hidden and returned == before_call:
            warnings.warn(
                f"{archive.path}: {_name(function)} changed nothing: the data of large weights, "
                f"such as {next(iter(hidden))!r}, was hidden; use weights='loaded' for functions "
                "that need this data, such as quantizers and converters to float16",
                stacklevel=3,
            )
    for name in sorted(_repeated_initializers(result) - before, key=str):
        raise ArchiveFormatError(
            f"tensor {name!r}: expected the function to return one initializer of this name in a "
            "graph, found several; remove the old one, or give them different names"
        )
    return result


def _call(function: Function, model: onnx.ModelProto) -> onnx.ModelProto:
    returned = function(model)
    result, is_valid = (
        returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, True)
    )
    name = _name(function)
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
    """A copy of the model with inputs instead of its large initializers, and these by name.

    The doc_string of such an input holds the name of its weight, so that it may be renamed.
    """
    # The only external tensors of this model are the weights to hide.
    model = linked_model(archive, None, _is_hidable(archive.model))
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


def _restore_weights(
    original: onnx.ModelProto, weights: Mapping[str, onnx.TensorProto], returned: onnx.ModelProto
) -> onnx.ModelProto:
    """Copies the function's result, and turns inputs that replace weights into initializers."""
    result = copied(returned)
    inputs = {value.name for value in original.graph.input}  # which we have not marked
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
            continue  # the result needs it no longer
        if value.name in names:
            raise ArchiveFormatError(
                f"tensor {weight.name!r}: expected the function to return either one input or one "
                f"initializer {value.name!r} for the tensor, found several; keep one of them"
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
    """Says of an initializer whether an input of the main graph can replace it."""
    everywhere = Counter(name for graph in _graphs(model) for name in _defined_names(graph))
    # Here, an input of the main graph may have the same name.
    main = Counter(_initializer_names(model.graph))

    def is_hidable(ref: TensorRef, nbytes: int) -> bool:
        name = ref.tensor.name
        count = (main if len(ref.path) == 2 else everywhere)[name]
        is_name = isinstance(name, str) and name != ""
        return ref.is_initializer and is_name and count == 1 and is_unread(ref, nbytes)

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
                f"tensor {weight.name!r}: expected the function to keep the input that replaces "
                "the tensor, found no input, although the tensor's name is still used"
            )
        name = renamed.get((weight.data_type, tuple(weight.dims)))
        if name is not None:
            raise ArchiveFormatError(
                f"tensor {weight.name!r}: expected the function to keep the name or doc_string of "
                f"the input that replaces the tensor, found a new input {name!r} of the same type "
                "and shape; functions that rename weights need weights='external'"
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
