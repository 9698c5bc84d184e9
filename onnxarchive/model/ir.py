"""Models of onnx_ir as protos whose large tensors stay where onnx_ir has them.

onnx_ir's tensors may be lazy, or mapped from files; serialising its model would fetch all of them.
Here a clone is serialised, which shares the tensors, with placeholders for the large ones.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onnxarchive.model import dtypes, tensors
from onnxarchive.model.walking import Path

if TYPE_CHECKING:
    import onnx
    import onnx_ir

# No file has a name with a NUL character.
_PLACEHOLDER = "\0onnxarchive/ir/"


class Mapped:
    """What a tensor of onnx_ir is besides when its `raw_data` lies in a map."""

    __slots__ = ()

    @property
    def origin(self) -> object:
        """What it was loaded from, as the `meta` of its model has it."""
        raise NotImplementedError

    def verified(self) -> memoryview:
        """The bytes as a view of the map, once their CRC-32 is found right.

        Raises:
            ChecksumError: They have changed.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Outside:
    """A tensor that is not in the proto.

    Attributes:
        tensor: onnx_ir's tensor.
    """

    tensor: onnx_ir.TensorProtocol

    def tobytes(self) -> bytes | memoryview:
        """The bytes of `raw_data`: a view of the map that they lie in, or a copy."""
        import onnx_ir

        if isinstance(self.tensor, Mapped):
            return self.tensor.verified()
        if isinstance(self.tensor, onnx_ir.ExternalTensor):
            # `tobytes` would keep an unpacked copy of types of less than 8 bits in the tensor.
            copy = io.BytesIO()
            self.tensor.tofile(copy)
            return copy.getbuffer()
        return self.tensor.tobytes()


def is_ir_model(model: object) -> bool:
    """Whether `model` is an `onnx_ir.Model`; onnx_ir is not imported to tell."""
    return any(
        base.__module__.split(".")[0] == "onnx_ir" and base.__name__ == "Model"
        for base in type(model).__mro__
    )


@dataclass(frozen=True, slots=True)
class Converted:
    """An onnx_ir model as a proto.

    Attributes:
        model: The proto, in which some tensors are external without a usable location.
        outside: Each of them by where it stands.
        origins: What tensors of the model were loaded from, those that are mapped.
    """

    model: onnx.ModelProto
    outside: dict[Path, Outside]
    origins: tuple[object, ...]


def to_proto(model: onnx_ir.Model, *, size_threshold: int) -> Converted:
    """An onnx_ir model as a proto, and the tensors that are not in it.

    Args:
        model: The model. It is not changed.
        size_threshold: Tensors of this many bytes or more are left out, and so is every tensor
            whose data is external already.
    """
    import onnx_ir

    clone = model.clone()
    kept: list[Outside] = []
    origins: dict[object, None] = {}

    def detached(tensor: Any) -> Any:
        if isinstance(tensor, Mapped):
            origins[tensor.origin] = None
        is_external = isinstance(tensor, onnx_ir.ExternalTensor)
        if tensor.dtype.value not in dtypes.BY_NUMBER:  # strings
            return tensor
        if not is_external and tensor.nbytes < size_threshold:
            return tensor
        kept.append(Outside(tensor))
        return onnx_ir.ExternalTensor(
            f"{_PLACEHOLDER}{len(kept) - 1}",
            None,
            None,
            tensor.dtype,
            shape=onnx_ir.Shape(tensor.shape),
            name=tensor.name,
            doc_string=tensor.doc_string,
            metadata_props=dict(tensor.metadata_props),
        )

    replace_tensors(clone, detached)
    proto = onnx_ir.to_proto(clone)
    outside: dict[Path, Outside] = {}
    for ref in tensors.walk(proto):
        location = tensors.location(ref.tensor)
        if location is not None and location.startswith(_PLACEHOLDER):
            outside[ref.path] = kept[int(location.removeprefix(_PLACEHOLDER))]
    return Converted(proto, outside, tuple(origins))


def replace_tensors(model: onnx_ir.Model, replacement: Callable[[Any], Any]) -> None:
    """Puts `replacement(tensor)` in the place of every tensor of a model.

    These are the initializers and the tensors of attributes, in the main graph, subgraphs and
    functions, and the default values of functions' attributes.
    """
    for graph in _graphs(model):
        for value in graph.initializers.values():
            if value.const_value is not None:
                value.const_value = replacement(value.const_value)
    for attributes in _attributes(model):
        for name, attribute in list(attributes.items()):
            replaced = _replaced(attribute, replacement)
            if replaced is not attribute:
                attributes[name] = replaced


def _replaced(attribute: Any, replacement: Callable[[Any], Any]) -> Any:
    import onnx_ir

    if attribute.is_ref():
        return attribute
    name, doc_string = attribute.name, attribute.doc_string
    if attribute.type == onnx_ir.AttributeType.TENSOR:
        return onnx_ir.AttrTensor(name, replacement(attribute.as_tensor()), doc_string)
    if attribute.type == onnx_ir.AttributeType.TENSORS:
        values = [replacement(tensor) for tensor in attribute.as_tensors()]
        return onnx_ir.AttrTensors(name, values, doc_string)
    return attribute


def _graphs(model: onnx_ir.Model) -> Iterator[Any]:
    yield from model.graphs()
    for function in model.functions.values():
        yield from function.subgraphs()


def _attributes(model: onnx_ir.Model) -> Iterator[Any]:
    for node in model.graph.all_nodes():
        yield node.attributes
    for function in model.functions.values():
        yield function.attributes
        for node in function.all_nodes():
            yield node.attributes
