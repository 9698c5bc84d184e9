"""Models of onnx_ir as protos whose large tensors stay where onnx_ir has them.

onnx_ir's tensors may be lazy, or mapped from files; serialising its model would fetch all of them.
Here a clone is serialised, which shares the tensors, with placeholders for the large ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from onnxarchive.errors import UnsupportedFeatureError
from onnxarchive.model import dtypes, tensors
from onnxarchive.model.tensors import Path

if TYPE_CHECKING:
    import onnx
    import onnx_ir

# No file has a name with a NUL character.
_PLACEHOLDER = "\0onnxarchive/ir/"


def is_ir_model(model: object) -> bool:
    """Whether `model` is an `onnx_ir.Model`; onnx_ir is not imported to tell."""
    return any(
        base.__module__.split(".")[0] == "onnx_ir" and base.__name__ == "Model"
        for base in type(model).__mro__
    )


def to_proto(
    model: onnx_ir.Model, *, size_threshold: int
) -> tuple[onnx.ModelProto, dict[Path, onnx_ir.TensorProtocol]]:
    """An onnx_ir model as a proto, and the tensors that are not in it.

    Args:
        model: The model. It is not changed.
        size_threshold: Tensors of this many bytes or more are left out, and so is every tensor
            whose data is external already.

    Returns:
        The proto, in which those tensors are external without a usable location, and each of them
        by where it stands.

    Raises:
        UnsupportedFeatureError: onnx_ir is not installed.
    """
    try:
        import onnx_ir
    except ImportError as error:  # pragma: no cover - the model comes from it
        raise UnsupportedFeatureError(
            "saving an onnx_ir.Model needs onnx_ir: pip install 'onnxarchive[ir]'"
        ) from error
    clone = model.clone()
    kept: list[onnx_ir.TensorProtocol] = []

    def detached(tensor: Any) -> Any:
        is_external = isinstance(tensor, onnx_ir.ExternalTensor)
        if tensor.dtype.value not in dtypes.BY_NUMBER:  # strings
            return tensor
        if not is_external and tensor.nbytes < size_threshold:
            return tensor
        kept.append(tensor)
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

    for graph in _graphs(clone):
        for value in graph.initializers.values():
            if value.const_value is not None:
                value.const_value = detached(value.const_value)
    for node in _nodes(clone):
        for name, attribute in list(node.attributes.items()):
            if attribute.is_ref():
                continue
            if attribute.type == onnx_ir.AttributeType.TENSOR:
                value = detached(attribute.as_tensor())
                node.attributes[name] = onnx_ir.AttrTensor(name, value, attribute.doc_string)
            elif attribute.type == onnx_ir.AttributeType.TENSORS:
                values = [detached(tensor) for tensor in attribute.as_tensors()]
                node.attributes[name] = onnx_ir.AttrTensors(name, values, attribute.doc_string)
    proto = onnx_ir.to_proto(clone)
    outside: dict[Path, onnx_ir.TensorProtocol] = {}
    for site in tensors.walk(proto):
        location = tensors.location(site.tensor)
        if location is not None and location.startswith(_PLACEHOLDER):
            outside[site.path] = kept[int(location.removeprefix(_PLACEHOLDER))]
    return proto, outside


def _graphs(model: onnx_ir.Model) -> Iterator[Any]:
    yield from model.graphs()
    for function in model.functions.values():
        yield from function.subgraphs()


def _nodes(model: onnx_ir.Model) -> Iterator[Any]:
    yield from model.graph.all_nodes()
    for function in model.functions.values():
        yield from function.all_nodes()
