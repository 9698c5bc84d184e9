"""Which tensors of a model other tools can read from external data, and which must be in the model.

Tools read external initializers and most external values of Constant nodes. If a tensor may give a
shape, they need its values in the model itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

import onnx

from onnxarchive.model import DEFAULT_SIZE_THRESHOLD, tensors, walking
from onnxarchive.model.tensors import TensorRef
from onnxarchive.model.walking import MAIN_GRAPH, Path

_LARGE_VECTOR_NBYTES: Final = 1 << 16  # for runtimes
_MAX_INFERRED_NBYTES: Final = 1 << 24  # for onnx, whose data propagation also reads index tables
_ONNX_DOMAINS: Final = ("", "ai.onnx")
_INDEX_TYPES: Final = (onnx.TensorProto.INT32, onnx.TensorProto.INT64)

# Takes a tensor and the tensor's size in bytes; returns True if the tensor stays outside the model.
StaysOutside: TypeAlias = Callable[[TensorRef, int], bool]


def stays_outside(model: onnx.ModelProto, *, in_functions: bool = False) -> StaysOutside:
    """A function that is True for the tensors of a model which tools can read from external data.

    These are dense initializers and values of Constant nodes, of the main graph and of subgraphs,
    unless their values may be a shape (`may_give_shape`). With `in_functions`, also values of
    Constant nodes in functions, which ONNX Runtime reads and `onnx.load` does not.

    Others stay in the model, since some tools cannot read them: onnx.load and ONNX Runtime 1.24
    cannot read external sparse tensors, and ONNX Runtime 1.24 and 1.27 cannot read an external
    value of a ConstantOfShape. Only archives made with `convert_attribute` store such tensors, and
    values of Constant nodes, outside the model.
    """
    roots = ("graph", "functions") if in_functions else ("graph",)

    # ConstantOfShape: onnx/onnx#3157. Sparse tensors: no report is known; the tests show it.
    def is_outside(ref: TensorRef, nbytes: int) -> bool:
        is_read = ref.is_initializer or (
            ref.path[0][0] in roots and is_constant_value(model, ref.path)
        )
        return is_read and not may_give_shape(ref.tensor, nbytes)

    return is_outside


def is_constant_value(model: onnx.ModelProto, path: Path) -> bool:
    """True for the path of the attribute `value` of a Constant node of ONNX's own domain."""
    fields = [field for field, _ in path[-3:]]
    if fields != ["node", "attribute", "t"]:
        return False
    node = walking.at(model, path[:-2])
    attribute = walking.at(model, path[:-1])
    is_constant = node.op_type == "Constant" and node.domain in _ONNX_DOMAINS
    return is_constant and attribute.name == "value"


def may_give_shape(
    tensor: onnx.TensorProto, nbytes: int, large_vector_nbytes: int = _LARGE_VECTOR_NBYTES
) -> bool:
    """True if shape inference may need the values of a tensor of this type and size.

    True for tensors below 1024 bytes, and for INT32 and INT64 vectors below 64 KiB, such as the
    shape of a Reshape. Shape inference does not read external data: ONNX Runtime fails with "Cannot
    parse data from external tensors", since 1.27 also for tensors of 0 bytes.

    Vectors of 64 KiB or more count as weights. Only Split and SplitToSequence with 8192 parts or
    more need the values of such a vector; ONNX Runtime then fails with the error above. To run such
    a model, keep the vector in the archive's model with a larger `size_threshold`.
    """
    # microsoft/onnxruntime#11137, #21325; since 1.27 of empty tensors, too: the tests show it.
    is_vector = len(tensor.dims) == 1 and tensor.data_type in _INDEX_TYPES
    # Nearly every shape, axis and pad is smaller than the default threshold.
    return nbytes < (large_vector_nbytes if is_vector else DEFAULT_SIZE_THRESHOLD)


def is_unread(ref: TensorRef, nbytes: int) -> bool:
    """True if onnx can check the model and infer shapes without the tensor's data.

    False for tensors that may give a shape (`may_give_shape`), here with vectors below 16 MiB:
    `data_prop` computes with index tables. False for indices and values of sparse tensors: onnx
    reads the indices.
    """
    is_sparse = any(field.startswith("sparse_") for field, _ in ref.path)
    # Vectors: onnx/onnx#6182.
    return not is_sparse and not may_give_shape(ref.tensor, nbytes, _MAX_INFERRED_NBYTES)


def weight_name(model: onnx.ModelProto, ref: TensorRef) -> str | None:
    """The name of a weight of the main graph in ONNX Runtime; None for other tensors.

    It is the name of an initializer, or of the output of a Constant, which ONNX Runtime makes an
    initializer of this name.
    """
    graph, *place = ref.path
    if graph not in MAIN_GRAPH:
        return None
    if len(place) == 1 and ref.is_initializer:
        return ref.name
    if len(place) == 3 and is_constant_value(model, ref.path):
        node = walking.at(model, ref.path[:2])
        return tensors.text(node.output[0]) if node.output else None
    return None
