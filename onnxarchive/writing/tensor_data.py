"""The elements of tensors for `Writer` and `edit`: of numpy, onnx, onnx_ir and PyTorch.

Tensors of onnx_ir and PyTorch are recognised by the names of their classes, without an import.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import onnx

from onnxarchive.errors import ArchiveError, UnsupportedFeatureError, is_instance, quoted
from onnxarchive.files.data import Bytes
from onnxarchive.model import dtypes, tensors
from onnxarchive.model.tensors import TensorRef
from onnxarchive.sources.source import TensorData
from onnxarchive.writing.plan import refuse_external

if TYPE_CHECKING:
    import onnx_ir
    from numpy.typing import ArrayLike

    class TorchTensor(Protocol):
        """`torch.Tensor`; PyTorch is not imported here, not even for its types."""

        def detach(self) -> Any:
            """The tensor without its autograd history."""

    Tensor: TypeAlias = ArrayLike | onnx.TensorProto | onnx_ir.TensorProtocol | TorchTensor

_FLOAT4 = "FLOAT4E2M1"
_SAME = (
    "UINT8 INT8 UINT16 INT16 INT32 INT64 BOOL FLOAT16 UINT32 UINT64 COMPLEX64 COMPLEX128 BFLOAT16"
)
# PyTorch's type names by ONNX type names, for types that both store as the same bytes.
TORCH_TYPES = {
    **{name: name.lower() for name in _SAME.split()},
    "FLOAT": "float32",
    "DOUBLE": "float64",
    "FLOAT8E4M3FN": "float8_e4m3fn",
    "FLOAT8E4M3FNUZ": "float8_e4m3fnuz",
    "FLOAT8E5M2": "float8_e5m2",
    "FLOAT8E5M2FNUZ": "float8_e5m2fnuz",
    "FLOAT8E8M0": "float8_e8m0fnu",
    _FLOAT4: "float4_e2m1fn_x2",  # each element holds two numbers
}
# PyTorch stores each element of these types in a byte; ONNX packs two or four into a byte.
_BYTES_IN_TORCH = ("INT4", "UINT4", "INT2", "UINT2")
_BY_TORCH_NAME = {torch_name: name for name, torch_name in TORCH_TYPES.items()} | {
    name.lower(): name for name in _BYTES_IN_TORCH
}


def elements_of(name: str, tensor: Tensor) -> TensorData:
    """Reads a tensor; a numpy array with the memory layout of `raw_data` is not copied.

    Args:
        name: Name of the tensor, for messages.
        tensor: An array or anything that numpy converts to one; a TensorProto; a tensor of onnx_ir
            or PyTorch.

    Raises:
        UnsupportedFeatureError: ONNX cannot store the data type outside a model, or the tensor has
            no readable bytes.
        ArchiveFormatError: A TensorProto's data is external, or does not fit its shape.
    """
    try:
        if isinstance(tensor, onnx.TensorProto):
            return _of_proto(tensor)
        if is_instance(tensor, "onnx_ir", "TensorBase"):
            return _of_onnx_ir(tensor)
        if is_instance(tensor, "torch", "Tensor"):
            return _of_torch(tensor)
        array = np.asarray(tensor)
        return TensorData(dtypes.of_array(array), array.shape, Bytes(dtypes.as_raw_data(array)))
    except ArchiveError as error:
        error.args = (f"tensor {quoted(name)}: {error.message}",)
        raise


def _of_proto(tensor: onnx.TensorProto) -> TensorData:
    ref = TensorRef((("TensorProto", None),), tensor)
    if tensor.data_location == tensors.EXTERNAL:
        refuse_external(ref)
    data_type = tensors.stored_type(tensor)
    if data_type is None:
        raise _unsupported(f"{dtypes.name_of(tensor.data_type)} of shape {quoted(tensor.dims)}")
    return TensorData(data_type, tuple(tensor.dims), Bytes(tensors.raw_data(ref)))


def _of_onnx_ir(tensor: Any) -> TensorData:
    from onnxarchive.writing.onnx_ir import data_of

    data_type = dtypes.BY_NUMBER.get(tensor.dtype.value)
    if data_type is None:
        raise _unsupported(tensor.dtype.name)
    return TensorData(data_type, tuple(tensor.shape.numpy()), data_of(tensor))


def _of_torch(tensor: Any) -> TensorData:
    torch_name = str(tensor.dtype).removeprefix("torch.")
    if torch_name not in _BY_TORCH_NAME:
        raise _unsupported(f"{tensor.dtype}")
    data_type = dtypes.BY_NAME[_BY_TORCH_NAME[torch_name]]
    try:
        dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        codes = dense.reshape(-1).view(sys.modules["torch"].uint8).numpy()
    except (RuntimeError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UnsupportedFeatureError(
            f"expected a dense PyTorch tensor with data, found {type(tensor).__name__} of layout "
            f"{tensor.layout} on device {tensor.device}: {reason}"
        ) from error
    dims = tuple(dense.shape)
    if data_type.name == _FLOAT4:
        if not dims:
            raise _unsupported(
                "a float4_e2m1fn_x2 tensor without dimensions, which holds two numbers"
            )
        dims = (*dims[:-1], 2 * dims[-1])
        return TensorData(data_type, dims, Bytes(codes.data))
    native = data_type.dtype
    if not dtypes.is_extension(native):  # extension types have no byte order
        native = native.newbyteorder("=")
    return TensorData(data_type, dims, Bytes(dtypes.as_raw_data(codes.view(native))))


def _unsupported(found: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(
        f"expected a tensor of a type that ONNX can store outside a model, found {found}"
    )
