"""Merges identical initializers of a graph.

If several initializers of a graph are identical, one stays. It replaces the others as input of
nodes, in the graph and in its subgraphs. Initializers that are also inputs or outputs of a graph
stay as well. So do initializers whose names occur elsewhere than in inputs of nodes and in
value_info. `deduplicate` states the exact rules.

Names are resolved by the scopes of ONNX (IR.md, "Names Within a Graph"): a name that a
subgraph does not define is looked up in the graph around it. Functions do not see the names of the
calling graph.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import onnx

from onnxarchive.buffers.checksums import Crc32, crc32
from onnxarchive.buffers.data import are_equal
from onnxarchive.model import dtypes, tensors, walking
from onnxarchive.model.copying import MANY_ELEMENTS, unknown_fields, with_locations
from onnxarchive.model.tensors import TensorRef
from onnxarchive.model.walking import MAIN_GRAPH, Path, graphs

# The caller's type for the bytes of a tensor, in pieces.
_Data = TypeVar("_Data", bound=Iterable[memoryview])
_Resolve: TypeAlias = Callable[[TensorRef], Iterable[memoryview]]

_BEGINNING = 1 << 12  # bytes that are compared first
# The only operator of ONNX that names values in its attributes (ai.onnx.preview.training).
_GRADIENT = "Gradient"


@dataclass(frozen=True, slots=True)
class Deduplicated(Generic[_Data]):
    """A model without duplicate initializers.

    Attributes:
        model: Copy of the original model without duplicates; the original itself if it has none.
        resolve: Gives the bytes of an external tensor of `model`.
        removed: Number of removed initializers.
        saved_nbytes: Size of the removed data in bytes.
    """

    model: onnx.ModelProto
    resolve: Callable[[TensorRef], _Data]
    removed: int
    saved_nbytes: int


def deduplicate(
    model: onnx.ModelProto, resolve: Callable[[TensorRef], _Data]
) -> Deduplicated[_Data]:
    """Merges the identical initializers of each graph.

    Every graph is treated separately: the main graph, its subgraphs and the graphs in functions.
    The graphs of training_info do not change. Initializers are identical if they have the same data
    type, shape, bytes (external or not), doc_string and metadata_props. The first stays. If some
    of the identical initializers are outputs of a graph, all these outputs stay instead of the
    first, since the names of outputs must not change.

    Left alone are initializers

    - that are also inputs of their graph, which callers can override (up to IR version 3, all
      initializers are inputs);
    - that cannot be stored outside a model (strings, segments, unknown data types, impossible
      shapes), or have fields that this version of onnx does not know;
    - whose name is empty, not UTF-8, or defined twice in their graph;
    - that are named by quantization_annotation, a sharding_spec, training_info or an operator
      Gradient;
    - that a subgraph captures, if a subgraph shadows the name of the initializer that stays.

    Initializers with equal types, shapes and first bytes are read completely, to compute CRC-32;
    those with equal CRC-32 are read again, to compare bytes. External data is read in the pieces
    from `resolve`. Data in the model is copied, at most two tensors at a time.

    Args:
        model: The model. It is not changed.
        resolve: Gives the bytes of an external tensor; may be called several times for one tensor.

    Raises:
        ArchiveFormatError: The size of data in the model does not fit the tensor's shape and type.
    """
    scopes = _scopes_of(model)
    removed: dict[Path, int] = {}
    moved: dict[Path, Path] = {}
    # Innermost graphs first: a name that a subgraph no longer defines shadows no outer name.
    for scope in reversed(scopes):
        refs = _remove_identical(scope, resolve)
        removed.update(refs)
        if refs:
            moved.update(_moves(scope, removed))
        scope.shadow_names()
    if not removed:
        return Deduplicated(model, resolve, 0, 0)
    # In the copy, the removed initializers have no bytes; `_apply` deletes these initializers.
    copy = with_locations(model, dict.fromkeys(removed, "removed"))
    for scope in scopes:
        _apply(scope, removed, copy)

    def resolve_moved(ref: TensorRef) -> _Data:
        return resolve(ref._replace(path=moved.get(ref.path, ref.path)))

    return Deduplicated(copy, resolve_moved, len(removed), sum(removed.values()))


class _Scope:
    """A graph, the names that it defines ("own" names), and their uses here and in subgraphs.

    Attributes:
        graph: The graph.
        path: Path of the graph.
        outer: The enclosing scope, whose names the graph sees; None for the main graph and for an
            outermost graph in a function.
        defined: Number of definitions of each own name.
        captured: Own names that are inputs of nodes in a subgraph.
        shadowed: Own names that a subgraph redefines even after its equal initializers are merged.
        outputs: Own names that are outputs of the graph or of a subgraph.
        left_alone: Own names that stay, since they are used elsewhere than in node inputs, graph
            outputs and value_info.
        replaced: Name of the equal initializer that is kept, by the name of the removed one.
    """

    def __init__(self, graph: onnx.GraphProto, path: Path, outer: _Scope | None) -> None:
        self.graph = graph
        self.path = path
        self.outer = outer
        self.defined = Counter(value.name for value in graph.input)
        self.defined.update(tensor.name for tensor in graph.initializer)
        self.defined.update(sparse.values.name for sparse in graph.sparse_initializer)
        for node in graph.node:
            self.defined.update(node.output)
        self.captured: set[str] = set()
        self.shadowed: set[str] = set()
        self.outputs: set[str] = set()
        self.left_alone: set[str] = set()
        self.replaced: dict[str, str] = {}

    def follow_names(self) -> None:
        """Adds the uses of names in this graph to the scopes that define these names."""
        for node in self.graph.node:
            for name in node.input:
                scope = self._definer(name)
                if scope is not None and scope is not self:
                    scope.captured.add(name)
            for name in _named_otherwise(node):
                self._leave_alone(name)
        for value in self.graph.output:
            scope = self._definer(value.name)
            if scope is not None:
                scope.outputs.add(value.name)
        for annotation in self.graph.quantization_annotation:
            self._leave_alone(annotation.tensor_name)
            for parameter in annotation.quant_parameter_tensor_names:
                self._leave_alone(parameter.value)

    def shadow_names(self) -> None:
        """Records in each outer scope the names that this graph redefines even after merging."""
        names = self.defined.keys() - self.replaced.keys()
        scope = self.outer
        while scope is not None:
            scope.shadowed.update(names & scope.defined.keys())
            scope = scope.outer

    def replacement(self, name: str) -> str | None:
        """The new name for `name` in this graph; None if the name stays."""
        scope = self._definer(name)
        return scope.replaced.get(name) if scope is not None else None

    def _definer(self, name: str) -> _Scope | None:
        scope: _Scope | None = self
        while scope is not None and name not in scope.defined:
            scope = scope.outer
        return scope

    def _leave_alone(self, name: str) -> None:
        scope = self._definer(name)
        if scope is not None:
            scope.left_alone.add(name)


def _scopes_of(model: onnx.ModelProto) -> list[_Scope]:
    """The scopes whose initializers may be merged, each before the scopes inside.

    Names that training changes or uses are left alone (onnx.proto, TrainingInfoProto): variables
    that are equal now may differ after training.
    """
    scopes: dict[Path, _Scope] = {}
    trained: dict[Path, _Scope] = {}
    # Training graphs continue the main graph and see its names.
    continued = _Scope(model.graph, MAIN_GRAPH, None) if model.training_info else None
    for ref in graphs(model):
        is_trained = ref.root == "training_info"
        found = trained if is_trained else scopes
        outer = continued if is_trained else None
        if ref.outer is not None:
            outer = found[ref.outer.path]
        scope = found[ref.path] = _Scope(ref.graph, ref.path, outer)
        scope.follow_names()
        if continued is not None and outer is continued:
            continued.left_alone.update(scope.defined)
    if continued is not None:
        left_alone = scopes[MAIN_GRAPH].left_alone
        left_alone.update(continued.captured, continued.outputs, continued.left_alone)
        for training in model.training_info:
            for binding in (*training.initialization_binding, *training.update_binding):
                left_alone.update((binding.key, binding.value))
    return list(scopes.values())


def _named_otherwise(node: onnx.NodeProto) -> Iterator[str]:
    """Names of values that a node uses besides its inputs and outputs."""
    for configuration in node.device_configurations:
        for sharding in configuration.sharding_spec:
            yield sharding.tensor_name
    if node.op_type == _GRADIENT:
        for attribute in node.attribute:
            for value in (attribute.s, *attribute.strings):
                yield value.decode(errors="replace")


def _remove_identical(scope: _Scope, resolve: _Resolve) -> dict[Path, int]:
    """Finds the initializers to remove from a graph, and records their replacements.

    Returns:
        Size in bytes of the data of each initializer to remove, by path.
    """
    removed: dict[Path, int] = {}
    for alike in _groups(_candidates(scope), _description):
        nbytes = _nbytes(alike[0].tensor)
        for identical in _identical(alike, resolve):
            staying: list[TensorRef] = []
            unshadowed: list[TensorRef] = []
            # Outputs first: they stay in any case.
            for ref in sorted(identical, key=lambda ref: ref.name not in scope.outputs):
                # Only a name that no subgraph shadows may replace a captured name: onnxruntime 1.31
                # mixes up the values of a name that one subgraph captures and another shadows.
                others = unshadowed if ref.name in scope.captured else staying
                if others and ref.name not in scope.outputs:
                    scope.replaced[ref.name] = others[0].name
                    removed[ref.path] = nbytes
                    continue
                staying.append(ref)
                if ref.name not in scope.shadowed:
                    unshadowed.append(ref)
    return removed


def _identical(alike: list[TensorRef], resolve: _Resolve) -> Iterator[list[TensorRef]]:
    """Groups tensors by their bytes.

    Different bytes with the same CRC-32 are rare, but an attacker can make many, to cause a
    comparison of every pair. SHA-256 separates such tensors.
    """
    for begun in _alike_at_first(alike, resolve):
        for group in _groups(begun, lambda ref: Crc32.of(_data(ref, resolve)).value):
            first, *others = group
            if all(are_equal(_data(first, resolve), _data(other, resolve)) for other in others):
                yield group
            else:
                yield from _groups(group, lambda ref: _sha256(_data(ref, resolve)))


def _candidates(scope: _Scope) -> Iterator[TensorRef]:
    for index, tensor in enumerate(scope.graph.initializer):
        name: str | bytes = tensor.name
        if (
            isinstance(name, str)  # a name that is not UTF-8 comes as bytes, and cannot be written
            and name  # an empty name in a node means no input
            and scope.defined[name] == 1  # so the initializer is not also an input of the graph
            and name not in scope.left_alone
            and tensors.stored_type(tensor) is not None
            and not unknown_fields(tensor, math.prod(tensor.dims) > MANY_ELEMENTS)
        ):
            yield TensorRef((*scope.path, ("initializer", index)), tensor)


def _groups(
    refs: Iterable[TensorRef], property_of: Callable[[TensorRef], object]
) -> Iterator[list[TensorRef]]:
    """Groups of two or more refs with the same property, ordered by the first ref of each."""
    groups: defaultdict[object, list[TensorRef]] = defaultdict(list)
    for ref in refs:
        groups[property_of(ref)].append(ref)
    return (group for group in groups.values() if len(group) > 1)


def _description(ref: TensorRef) -> object:
    """The fields, other than data, that must be equal in identical tensors."""
    tensor = ref.tensor
    return (
        tensor.data_type,
        tuple(tensor.dims),
        tensor.doc_string,
        tuple((prop.key, prop.value) for prop in tensor.metadata_props),
    )


def _nbytes(tensor: onnx.TensorProto) -> int:
    return dtypes.BY_NUMBER[tensor.data_type].nbytes(tensor.dims)


def _data(ref: TensorRef, resolve: _Resolve) -> Iterable[memoryview]:
    if ref.tensor.data_location == tensors.EXTERNAL:
        return resolve(ref)
    return [tensors.raw_data(ref)]


def _alike_at_first(alike: list[TensorRef], resolve: _Resolve) -> Iterable[list[TensorRef]]:
    """Groups large tensors by their first bytes; different tensors almost always differ there."""
    if _nbytes(alike[0].tensor) <= _BEGINNING:
        return [alike]
    return _groups(alike, lambda ref: _beginning(_data(ref, resolve)))


def _beginning(data: Iterable[memoryview]) -> int:
    """The CRC-32 of the first `_BEGINNING` bytes, for pieces of any size."""
    found, rest = 0, _BEGINNING
    for piece in data:
        found = crc32(piece[:rest], found)
        rest -= min(len(piece), rest)
        if not rest:
            break
    return found


def _sha256(data: Iterable[memoryview]) -> bytes:
    digest = hashlib.sha256()
    for piece in data:
        digest.update(piece)
    return digest.digest()


def _moves(scope: _Scope, removed: Container[Path]) -> Iterator[tuple[Path, Path]]:
    """New and old path of each initializer that gets a new index in its graph."""
    paths = [(*scope.path, ("initializer", index)) for index in range(len(scope.graph.initializer))]
    kept = (path for path in paths if path not in removed)
    return ((path, before) for path, before in zip(paths, kept, strict=False) if path != before)


def _apply(scope: _Scope, removed: Container[Path], copy: onnx.ModelProto) -> None:
    """Removes merged initializers and their value_info from the copy; renames node inputs."""
    graph: onnx.GraphProto = walking.at(copy, scope.path)
    tensors.remove(
        graph.initializer,
        [
            (*scope.path, ("initializer", index)) in removed
            for index in range(len(graph.initializer))
        ],
    )
    tensors.remove(
        graph.value_info,
        [scope.replacement(value.name) is not None for value in graph.value_info],
    )
    for node in graph.node:
        for index, name in enumerate(node.input):
            replacement = scope.replacement(name)
            if replacement is not None:
                node.input[index] = replacement
