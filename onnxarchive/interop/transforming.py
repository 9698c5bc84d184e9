"""Models of archives through functions that take and give a ModelProto, weights not in memory.

Optimizers and the like (onnxsim, onnxoptimizer, onnxslim, onnx.version_converter, ...) are such
functions. Most of what they do needs the graph and no weights, so the weights are kept from them
and are copied from archive to archive afterwards.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

import onnx

from onnxarchive.archive.opening import open
from onnxarchive.archive.planning import Asset, asset_files, open_assets
from onnxarchive.archive.reading import Archive, complete_model
from onnxarchive.archive.referring import save_referring
from onnxarchive.buffers.counting import Progress
from onnxarchive.errors import ArchiveFormatError, naming
from onnxarchive.interop.links import is_left_outside, linked_model
from onnxarchive.model import dtypes, tensors, walking
from onnxarchive.model.tensors import TensorRef
from onnxarchive.model.threshold import DEFAULT_SIZE_THRESHOLD
from onnxarchive.storage.paths import require_no_input
from onnxarchive.storage.replacement import Replacement
from onnxarchive.zipformat import layout

__all__ = ["Function", "Weights", "transform"]

# Takes a model, and gives it changed, or another one. onnxsim gives (model, whether it is right).
Function: TypeAlias = Callable[[onnx.ModelProto], onnx.ModelProto | tuple[onnx.ModelProto, bool]]
Weights: TypeAlias = Literal["hidden", "external", "loaded"]

# Begins the doc_string of an input that stands for a weight, by which a renamed one is known.
_MARK: Final = "onnxarchive:"


def transform(
    path: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    function: Function,
    *,
    weights: Weights = "hidden",
    size_threshold: int = DEFAULT_SIZE_THRESHOLD,
    alignment: int = layout.MIN_ALIGNMENT,
    convert_attribute: bool | None = None,
    assets: Mapping[str, Asset] | None = None,
    progress: Progress | None = None,
) -> None:
    """Puts the model of an archive through a function, and saves what comes out as an archive.

    ::

        onnxarchive.transform("model.onnxa", "simple.onnxa", onnxsim.simplify)
        onnxarchive.transform("model.onnxa", "slim.onnxa", onnxslim.slim)
        onnxarchive.transform("model.onnxa", "optimized.onnxa", onnxoptimizer.optimize)

    Assets are kept, and the archive is written with a thread for each core. What the function sees
    of the weights is up to `weights`:

    - `"hidden"`: a large initializer is an input of the graph, of its type and shape. No function
      can read it, fold it, or take it for equal to another one, and memory stays small at any size.
      Afterwards it is an initializer again, with its data copied from the archive. One that nothing
      uses any more is left out. This is for functions that work on the graph; whatever computes new
      weights (a batch normalization folded into a convolution, another data type) is passed over
      by them, or refused here. A function may put an initializer of its own in the place of a
      weight, if it removes the input.
    - `"external"`: the model is as `Archive.model` has it, large tensors external with their keys
      as location. The function may rename them, remove them, use a key more than once, move
      them, and add tensors of its own. This is for functions that know about external data:
      others read such tensors as empty, as onnxoptimizer does, which merges all of the same shape.
    - `"loaded"`: the model is complete, in memory, as `onnxarchive.load` gives it.

    Tensors that shape inference needs, and all that are not initializers, are in the model except
    with `"external"` (`onnxarchive.interop.links.is_left_outside`); so are initializers of a
    subgraph whose name is not the only one of its kind. Hidden initializers of a subgraph are
    afterwards those of the main graph, which the subgraph sees.

    Args:
        path: The archive.
        destination: The archive to be written. It may be `path`, which is then replaced.
        function: Takes a ModelProto, and gives the same one changed, or another one, or a tuple of
            it and whether it is right. Give options with `functools.partial` or a lambda.
        weights: What it sees of the weights.
        size_threshold: As in `save`.
        alignment: As in `save`.
        convert_attribute: As in `save`; None for True if the archive has any such tensor outside.
        assets: As in `save`; they take the place of the archive's assets of the same path.
        progress: As in `save`; it counts what is written.

    Raises:
        ArchiveFormatError: `path` breaks a rule, or the function gives a model whose weights
            cannot be told or no longer have their type and shape, in which two initializers of a
            graph have one name that had not before, or that it says is not right.
        ChecksumError: Bytes of the archive have changed.
        ArchiveError: `destination` is the archive, and others have edited it since it was opened.
        UnsupportedFeatureError: What the function is to see takes 2 GiB or more.
        TypeError: The function gives no model.
        ValueError: An option is not allowed.
        OSError: A file cannot be read, or the archive not written.
    """
    if weights not in get_args(Weights):
        raise ValueError(f"expected one of {get_args(Weights)} for weights, found {weights!r}")
    layout.require_alignment(alignment)  # before anything is read
    require_no_input(destination, asset_files(assets))
    # The function may take long: what will not be written then is refused now.
    open_assets(assets)
    Replacement(destination).discard()
    with open(path) as archive, naming(path):
        transformed = _transformed(archive, function, weights)
        save_referring(
            transformed,
            archive,
            destination,
            size_threshold=size_threshold,
            alignment=alignment,
            convert_attribute=convert_attribute,
            assets=assets,
            progress=progress,
        )


def _transformed(archive: Archive, function: Function, weights: Weights) -> onnx.ModelProto:
    before = _repeated_initializers(archive.model)
    if weights == "loaded":
        result = _call(function, complete_model(archive))
    elif weights == "external":
        result = _call(function, archive.model)  # which nothing else looks at any more
    else:
        hidden = _Hidden(archive)
        result = hidden.restored(_call(function, hidden.model))
    for name in sorted(_repeated_initializers(result) - before, key=str):
        raise ArchiveFormatError(
            f"tensor {name!r}: expected the function to give one initializer of this name in a "
            "graph, found several; let it remove the one that another replaces, or name them apart"
        )
    return result


def _call(function: Function, model: onnx.ModelProto) -> onnx.ModelProto:
    given = function(model)
    result, is_right = given if isinstance(given, tuple) and len(given) == 2 else (given, True)
    name = getattr(function, "__name__", type(function).__name__)
    if not isinstance(result, onnx.ModelProto):
        raise TypeError(f"expected {name} to give an onnx.ModelProto, found {type(result)}")
    if not is_right:
        raise ArchiveFormatError(
            f"expected {name} to give a model that does the same, found that it says otherwise; "
            "nothing was written"
        )
    return result


@dataclass(frozen=True, slots=True)
class _Weight:
    """A hidden initializer.

    Attributes:
        key: Its key.
        tensor: As the archive's model has it.
        was_input: Whether it is an input of the graph in the archive as well.
        was_used: Whether anything in the archive's model uses it.
    """

    key: str
    tensor: onnx.TensorProto
    was_input: bool
    was_used: bool

    @property
    def name(self) -> str:
        return self.tensor.name

    def describe(self) -> str:
        return f"{dtypes.name_of(self.tensor.data_type)} of shape {list(self.tensor.dims)}"


class _Hidden:
    """A model whose large initializers are inputs, and the way back.

    Attributes:
        model: The model.
    """

    def __init__(self, archive: Archive) -> None:
        hidden = _hidable(archive)
        used = _used_names(archive.model)
        inputs = {value.name for value in archive.model.graph.input}
        self._inputs = inputs
        self._order = {
            tensor.name: index for index, tensor in enumerate(archive.model.graph.initializer)
        }
        self._weights = [
            _Weight(key, ref.tensor, ref.name in inputs, ref.name in used)
            for key, ref in hidden.items()
        ]
        paths = {ref.path for ref in hidden.values()}
        # Of hidden tensors no bytes are read, and their location is seen by no one.
        self.model = linked_model(archive, "hidden", lambda ref, nbytes: ref.path in paths)
        for graph in {path[:-1] for path in paths}:
            initializers = walking.at(self.model, graph).initializer
            numbers = range(len(initializers))
            tensors.remove(initializers, [(*graph, ("initializer", n)) in paths for n in numbers])
        for weight in self._weights:
            if not weight.was_input:
                self.model.graph.input.append(_as_input(weight))

    def restored(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """The model that a function made of `model`, with its weights as initializers."""
        by_key = {weight.key: weight for weight in self._weights}
        by_name = {weight.name: weight for weight in self._weights}
        result = onnx.ModelProto()
        result.CopyFrom(model)
        used = _used_names(result)
        defined = _defined_names(result)
        missing = dict(by_name)
        others: list[onnx.ValueInfoProto] = []  # inputs that are not hidden weights alone
        restored: list[tuple[int, onnx.TensorProto]] = [
            (self._place(tensor.name), tensor) for tensor in result.graph.initializer
        ]
        taken = set(_initializer_names(result.graph))
        strangers: list[onnx.ValueInfoProto] = []
        for value in result.graph.input:
            weight = by_name.get(value.name)
            if value.name not in self._inputs:  # and so can have been marked
                weight = by_key.get(_marked(value) or "", weight)
            if weight is None:
                others.append(value)
                if value.name not in self._inputs:
                    strangers.append(value)
                continue
            missing.pop(weight.name, None)
            _require_unchanged(weight, value)
            if weight.was_input:
                others.append(value)
            if weight.was_input or value.name in used or not weight.was_used:
                _require_free(weight, value.name, taken)
                taken.add(value.name)
                restored.append((self._place(weight.name), _as_initializer(weight, value.name)))
        for weight in missing.values():
            _require_dropped(weight, used - defined, strangers)
        restored.sort(key=lambda placed: placed[0])
        _replace(result.graph.input, others)
        _replace(result.graph.initializer, [tensor for _, tensor in restored])
        for graph in _graphs(result):
            for value in (*graph.input, *graph.output, *graph.value_info):
                if _marked(value) is not None and value.name not in self._inputs:
                    value.ClearField("doc_string")
        return result

    def _place(self, name: str) -> int:
        """Where an initializer belongs: where it was, or else behind all of them."""
        return self._order.get(name, len(self._order))


def _hidable(archive: Archive) -> dict[str, TensorRef]:
    """The initializers that can be inputs of the main graph instead, by key."""
    defined = Counter(_definitions(archive.model))
    main = Counter(_initializer_names(archive.model.graph))

    def is_hidable(ref: TensorRef) -> bool:
        name = ref.tensor.name
        if not name or not isinstance(name, str):
            return False
        if len(ref.path) == 2:  # of the main graph, where an input may have its name
            return main[name] == 1
        return defined[name] == 1

    return {
        key: ref
        for key, ref in archive._refs.items()
        if is_left_outside(ref, archive.entries[key].nbytes) and is_hidable(ref)
    }


def _as_input(weight: _Weight) -> onnx.ValueInfoProto:
    tensor = weight.tensor
    value = onnx.helper.make_tensor_value_info(weight.name, tensor.data_type, tensor.dims)
    value.doc_string = f"{_MARK}{weight.key}"
    return value


def _as_initializer(weight: _Weight, name: str) -> onnx.TensorProto:
    tensor = onnx.TensorProto()
    tensor.CopyFrom(weight.tensor)
    tensor.name = name
    return tensor


def _marked(value: onnx.ValueInfoProto) -> str | None:
    """The key that an input was marked with; None where it is not."""
    doc_string = tensors.text(value.doc_string)
    return doc_string.removeprefix(_MARK) if doc_string.startswith(_MARK) else None


def _require_unchanged(weight: _Weight, value: onnx.ValueInfoProto) -> None:
    """Refuses another type or shape: the data in the archive has this one."""
    found = value.type.tensor_type
    dims = [dim.dim_value if dim.HasField("dim_value") else None for dim in found.shape.dim]
    expected = list(weight.tensor.dims)
    is_shape = not found.HasField("shape") or (
        len(dims) == len(expected)
        and all(dim in (None, wanted) for dim, wanted in zip(dims, expected, strict=True))
    )
    if found.elem_type == weight.tensor.data_type and is_shape:
        return
    raise ArchiveFormatError(
        f"tensor {weight.name!r}: expected {weight.describe()} as in the archive, found the "
        f"function to make it {dtypes.name_of(found.elem_type)} of shape {dims}; functions that "
        "change weights need weights='loaded'"
    )


def _require_free(weight: _Weight, name: str, taken: set[str]) -> None:
    """Refuses to add an initializer beside another one of its name."""
    if name in taken:
        raise ArchiveFormatError(
            f"tensor {weight.name!r}: expected the function to give either the input {name!r} that "
            "stands for it or an initializer of this name, found both, or two such inputs; let it "
            "remove the input that an initializer replaces"
        )


def _require_dropped(
    weight: _Weight, undefined: set[str], strangers: Iterable[onnx.ValueInfoProto]
) -> None:
    """Refuses a weight that is gone but not dropped: renamed beyond recognition, or still used."""
    if weight.name in undefined:
        raise ArchiveFormatError(
            f"tensor {weight.name!r}: expected the function to keep the input that stands for it, "
            "found that it removed it and still uses it"
        )
    for value in strangers:
        found = value.type.tensor_type
        dims = [dim.dim_value for dim in found.shape.dim]
        if (found.elem_type, dims) == (weight.tensor.data_type, list(weight.tensor.dims)):
            raise ArchiveFormatError(
                f"tensor {weight.name!r}: expected the function to keep the name of the input that "
                f"stands for it, or its doc_string, found a new input {value.name!r} like it; "
                "functions that rename weights need weights='external'"
            )


def _replace(field: Any, messages: Iterable[Any]) -> None:
    copies = [type(message).FromString(message.SerializeToString()) for message in messages]
    del field[:]
    field.extend(copies)


def _graphs(model: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    """All graphs but those in functions."""
    return (ref.graph for ref in walking.graphs(model) if ref.root != "functions")


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


def _definitions(model: onnx.ModelProto) -> Iterator[str]:
    for graph in _graphs(model):
        yield from (value.name for value in graph.input)
        yield from _initializer_names(graph)
        yield from (name for node in graph.node for name in node.output)


def _initializer_names(graph: onnx.GraphProto) -> Iterator[str]:
    yield from (tensor.name for tensor in graph.initializer)
    yield from (tensor.values.name for tensor in graph.sparse_initializer)


def _repeated_initializers(model: onnx.ModelProto) -> set[str]:
    """The names that more than one initializer of a graph has."""
    return {
        name
        for graph in _graphs(model)
        for name, number in Counter(_initializer_names(graph)).items()
        if number > 1
    }


def _defined_names(model: onnx.ModelProto) -> set[str]:
    return set(_definitions(model))
