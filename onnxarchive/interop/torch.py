"""Initializers of archives as PyTorch tensors, without copying them if PyTorch has their type.

    from onnxarchive.interop import torch as archived

    with onnxarchive.open("model.onnxa") as archive:
        weight = archived.tensor(archive, "layer.0/weight")
        module.load_state_dict(archived.tensors(archive))

PyTorch lacks some types of ONNX. Their tensors are converted:

| ONNX | PyTorch |
| --- | --- |
| INT4, INT2 | `int8`, an unpacked copy |
| UINT4, UINT2 | `uint8`, an unpacked copy |
| FLOAT4E2M1 | `float4_e2m1fn_x2`, two numbers in an element: the last dimension is halved |
| FLOAT6E2M3, FLOAT6E3M2, STRING | an error that names an alternative |

The last dimension of a FLOAT4E2M1 tensor must be even.

PyTorch has no read-only tensors. A tensor made without `copy=True` is usually in a read-only map of
the file: **writing into the tensor ends the process** with SIGSEGV. Reading is safe
(`load_state_dict`, `to`, every operation that is not in place).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from onnxarchive.errors import UnsupportedFeatureError, requires_library, with_path
from onnxarchive.model import dtypes
from onnxarchive.reading.archive import Archive
from onnxarchive.reading.contents import NamedMapping
from onnxarchive.writing.tensor_data import TORCH_TYPES

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

__all__ = ["from_numpy", "tensor", "tensors"]

_FLOAT4 = "FLOAT4E2M1"
# Names of PyTorch types, by name of the ONNX type.
_TYPES = {
    **TORCH_TYPES,
    **dict.fromkeys(("INT4", "INT2"), "int8"),
    **dict.fromkeys(("UINT4", "UINT2"), "uint8"),
}


def tensor(archive: Archive, name: str, *, copy: bool = False) -> torch.Tensor:
    """An initializer of an archive as a PyTorch tensor.

    Args:
        archive: The archive. It may be closed afterwards; the tensor keeps the map alive.
        name: Name of the initializer, as in `archive.tensors`.
        copy: True gives a copy, which may be changed. False usually gives a view of the file's
            read-only map: nothing is read, and writing into the tensor ends the process with
            SIGSEGV.

    Returns:
        The tensor, on the CPU.

    Raises:
        TensorNotFoundError: No initializer has this name, or several have it.
        UnsupportedFeatureError: PyTorch has no type for the tensor.
        ArchiveFormatError: The entry's local header does not match the central directory.
        ImportError: PyTorch is not installed.

    Example:
        with onnxarchive.open("model.onnxa") as archive:
            weight = onnxarchive.interop.torch.tensor(archive, "layer.0/weight")
    """
    with with_path(archive.path):
        subject, key = f"tensor {name!r}", archive.tensors.key(name)
        if key is not None:
            stored = archive.tensors.refs[key].tensor
            if stored.data_type == onnx.TensorProto.FLOAT4E2M1:
                return _from_float4(archive.read(key), tuple(stored.dims), subject, copy=copy)
        return _convert(archive.tensors[name], subject, copy=copy)


def tensors(archive: Archive, *, copy: bool = False) -> Mapping[str, torch.Tensor]:
    """The initializers of an archive by name, as PyTorch tensors that are made on lookup.

    Args:
        archive: The archive. It must stay open until the last lookup.
        copy: As in `tensor`.

    Returns:
        The tensors by name; errors of a lookup are those of `tensor`.

    Example:
        with onnxarchive.open("model.onnxa") as archive:
            state = dict(onnxarchive.interop.torch.tensors(archive, copy=True))
    """
    return _TorchTensors(archive, copy)


class _TorchTensors(NamedMapping["torch.Tensor"]):
    def __init__(self, archive: Archive, copy: bool) -> None:
        self._archive, self._index, self._copy = archive, archive.tensors, copy

    def __getitem__(self, name: str) -> torch.Tensor:
        return tensor(self._archive, name, copy=self._copy)


def from_numpy(array: NDArray[Any], *, copy: bool = False) -> torch.Tensor:
    """Converts an array, such as the result of `archive.tensor_by_key`, to a PyTorch tensor.

    Unlike `torch.from_numpy`, it accepts types of ml_dtypes, and read-only arrays without a
    warning.

    Args:
        array: The array. The tensor keeps the array alive.
        copy: True gives a copy. False gives a view of the array's memory; do not write into the
            view if the array is read-only. Arrays with negative strides, another byte order or
            elements of less than 8 bits are always copied.

    Returns:
        The tensor, on the CPU.

    Raises:
        UnsupportedFeatureError: PyTorch has no type for the array.
        ImportError: PyTorch is not installed.

    Example:
        with onnxarchive.open("model.onnxa") as archive:
            array = archive.tensor_by_key("layer_0_weight")
            weight = onnxarchive.interop.torch.from_numpy(array, copy=True)
    """
    return _convert(array, "array", copy=copy)


def _convert(array: NDArray[Any], subject: str, *, copy: bool) -> torch.Tensor:
    name = "STRING" if array.dtype.hasobject else dtypes.of_array(array).name
    if name not in _TYPES:
        raise UnsupportedFeatureError(
            f"{subject}: expected a type that PyTorch has, found {name}; use it as a numpy array, "
            "archive.tensors[name], whose astype(numpy.float32) converts numbers"
        )
    if name == _FLOAT4:
        return _from_float4(dtypes.as_raw_data(array), array.shape, subject, copy=copy)
    if dtypes.of_array(array).is_packed:
        array, copy = array.astype(_TYPES[name]), False  # it is a copy already
    return _as_torch(array, name, copy=copy)


def _from_float4(
    data: memoryview, shape: tuple[int, ...], subject: str, *, copy: bool
) -> torch.Tensor:
    """Converts raw data of FLOAT4E2M1, which PyTorch has only in pairs.

    An element has two numbers, the first in the low bits as in ONNX.
    """
    if not shape or shape[-1] % 2:
        raise UnsupportedFeatureError(
            f"{subject}: expected an even last dimension, since PyTorch has FLOAT4E2M1 only in "
            f"pairs, found shape {list(shape)}; use it as another type: "
            "archive.tensors[name].astype(numpy.float32)"
        )
    pairs = np.frombuffer(data, np.uint8).reshape(*shape[:-1], shape[-1] // 2)
    return _as_torch(pairs, _FLOAT4, copy=copy)


def _as_torch(array: NDArray[Any], name: str, *, copy: bool) -> torch.Tensor:
    """Converts the bytes of an array to a PyTorch tensor; `name` is the ONNX type."""
    with requires_library("torch", "hold a tensor of an archive"):
        import torch
    dtype = getattr(torch, _TYPES[name], None)
    if dtype is None:
        raise UnsupportedFeatureError(
            f"{name} needs a PyTorch that has torch.{_TYPES[name]}, found {torch.__version__}"
        )
    if not array.size:
        return torch.empty(array.shape, dtype=dtype)
    if any(stride < 0 for stride in array.strides):  # PyTorch has no negative strides
        array = np.ascontiguousarray(array)
    if dtypes.is_extension(array.dtype) or name == _FLOAT4:
        array = array.view(f"i{array.dtype.itemsize}")  # numpy has no such type
    else:
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
    result = torch.from_numpy(np.asarray(_DeclaredWritable(array)))
    if copy:
        result = result.clone()
    return result if result.dtype == dtype else result.view(dtype)


class _DeclaredWritable:
    """The array interface of a read-only array, declared writable.

    `torch.from_numpy` warns about read-only arrays, and a filter for the warning would apply to all
    threads.
    """

    def __init__(self, array: NDArray[Any]) -> None:
        interface = array.__array_interface__
        # An array made from this object keeps this object alive; this object keeps `array` alive.
        self.array = array
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}
