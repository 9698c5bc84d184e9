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

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxarchive.errors import UnsupportedFeatureError, needing, with_path
from onnxarchive.model import dtypes
from onnxarchive.reading.archive import Archive
from onnxarchive.writing.elements import TORCH_TYPES

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

__all__ = ["TorchTensors", "from_numpy", "tensor", "tensors"]

_FLOAT4 = "FLOAT4E2M1"
# Names of PyTorch types, by name of the ONNX type.
_TYPES = {
    **TORCH_TYPES,
    **dict.fromkeys(("INT4", "INT2"), "int8"),
    **dict.fromkeys(("UINT4", "UINT2"), "uint8"),
}
# Types, by size, that carry the bytes of ml_dtypes types from numpy to PyTorch.
_BITS: dict[int, np.dtype[Any]] = {1: np.dtype(np.uint8), 2: np.dtype(np.int16)}


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
        packed = _packed_float4(archive, name)
        if packed is not None:
            return _as_torch(packed, _FLOAT4, copy=copy)
        return _convert(archive.tensors[name], f"tensor {name!r}", copy=copy)


def tensors(archive: Archive, *, copy: bool = False) -> TorchTensors:
    """The initializers of an archive by name, as PyTorch tensors that are made on lookup.

    Args:
        archive: The archive. It must stay open until the last lookup.
        copy: As in `tensor`.

    Returns:
        The tensors by name.

    Example:
        with onnxarchive.open("model.onnxa") as archive:
            state = dict(onnxarchive.interop.torch.tensors(archive, copy=True))
    """
    return TorchTensors(archive, copy=copy)


class TorchTensors(Mapping[str, "torch.Tensor"]):
    """Initializers by name as PyTorch tensors; returned by `tensors`.

    Example:
        with onnxarchive.open("model.onnxa") as archive:
            tensors = onnxarchive.interop.torch.tensors(archive)
            weight = tensors["layer.0/weight"]
    """

    def __init__(self, archive: Archive, *, copy: bool = False) -> None:
        self._archive = archive
        self._copy = copy

    def __getitem__(self, name: str) -> torch.Tensor:
        return tensor(self._archive, name, copy=self._copy)

    def __iter__(self) -> Iterator[str]:
        return iter(self._archive.tensors)

    def __len__(self) -> int:
        return len(self._archive.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._archive.tensors


def from_numpy(array: NDArray[Any], *, copy: bool = False) -> torch.Tensor:
    """Converts an array, such as the result of `archive.tensor_by_key`, to a PyTorch tensor.

    Unlike `torch.from_numpy`, accepts read-only arrays without a warning, and types of ml_dtypes.

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
    data_type = None if array.dtype.hasobject else dtypes.of_array(array)
    if data_type is None:
        raise UnsupportedFeatureError(
            f"{subject}: expected a type that PyTorch has, found STRING; use it as a numpy array: "
            "archive.tensors[name]"
        )
    if data_type.name not in _TYPES:
        raise UnsupportedFeatureError(
            f"{subject}: expected a type that PyTorch has, found {data_type.name}; use it as a "
            "numpy array, or as another type: archive.tensors[name].astype(numpy.float32)"
        )
    if data_type.name == _FLOAT4:
        return _as_torch(_pack_float4(array, subject), _FLOAT4, copy=copy)
    if data_type.is_packed:
        array, copy = array.astype(_TYPES[data_type.name]), False  # it is a copy already
    return _as_torch(array, data_type.name, copy=copy)


def _packed_float4(archive: Archive, name: str) -> NDArray[np.uint8] | None:
    """The bytes of an external FLOAT4E2M1 tensor in PyTorch's shape; None for any other tensor."""
    key = archive.tensors.key(name)
    if key is None or dtypes.BY_NUMBER[archive.tensors.refs[key].tensor.data_type].name != _FLOAT4:
        return None
    shape = _halved(tuple(archive.tensors.refs[key].tensor.dims), f"tensor {name!r}")
    return np.frombuffer(archive.read(key), np.uint8).reshape(shape)


def _pack_float4(array: NDArray[Any], subject: str) -> NDArray[np.uint8]:
    shape = _halved(array.shape, subject)
    return np.frombuffer(dtypes.as_raw_data(array), np.uint8).reshape(shape)


def _halved(shape: tuple[int, ...], subject: str) -> tuple[int, ...]:
    """The shape in PyTorch: an element has two numbers, the first in the low bits as in ONNX.

    Raises:
        UnsupportedFeatureError: The last dimension is odd, or there is none.
    """
    if not shape or shape[-1] % 2:
        raise UnsupportedFeatureError(
            f"{subject}: expected an even last dimension, since PyTorch has FLOAT4E2M1 only in "
            f"pairs, found shape {list(shape)}; use it as another type: "
            "archive.tensors[name].astype(numpy.float32)"
        )
    return (*shape[:-1], shape[-1] // 2)


def _as_torch(array: NDArray[Any], name: str, *, copy: bool) -> torch.Tensor:
    """Converts the bytes of an array to a PyTorch tensor; `name` is the ONNX type."""
    with needing("torch", "hold a tensor of an archive"):
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
        array = array.view(_BITS[array.dtype.itemsize])
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
