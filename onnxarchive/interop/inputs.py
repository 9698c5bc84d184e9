"""Inputs of a model that is to be run: what it takes, and arrays made up or checked for it."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from onnxarchive.model import dtypes
from onnxarchive.model.dtypes import DataType

if TYPE_CHECKING:
    from numpy.typing import NDArray

STRING: Final = "STRING"
ASSUMED_SIZE: Final = 1
"""Size of a dimension that the model leaves open, unless something says another."""

_BY_NAME: Final[Mapping[str, DataType]] = {it.name: it for it in dtypes.BY_NUMBER.values()}
_TENSOR: Final = "tensor("
_WORDS: Final = ("archive", "model", "one", "tensor", "two", "weight")
# Integers that are seldom indices, but samples, quantized: all their values make sense.
_SAMPLES: Final = frozenset({"INT8", "UINT8", "INT4", "UINT4", "INT2", "UINT2"})
_ANY_INDEX: Final = 2  # two rows are in almost every table

# An input as it is given: an array, or for a sequence a list of them.
Given: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class Port:
    """What a model takes, or gives, under one name.

    Attributes:
        name: Its name.
        type: Its type as ONNX Runtime writes it: `tensor(float)`, `seq(tensor(int64))`.
        dims: Its shape: sizes, names of sizes that the model leaves open, and None for those
            without a name.
    """

    name: str
    type: str
    dims: tuple[int | str | None, ...]

    @classmethod
    def of(cls, argument: Any) -> Port:
        """A port as ONNX Runtime describes it."""
        dims = tuple(
            it if (isinstance(it, str) and it) or (isinstance(it, int) and it >= 0) else None
            for it in argument.shape
        )
        return cls(argument.name, argument.type, dims)

    @property
    def data_type(self) -> str:
        """The name of its tensor's data type as ONNX has it; the type itself if it is no tensor."""
        if self.is_tensor:
            return self.type.removeprefix(_TENSOR).removesuffix(")").upper()
        return self.type

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor: not a sequence, a map, an optional or a sparse tensor."""
        return self.type.startswith(_TENSOR)

    @property
    def is_foreign(self) -> bool:
        """Whether it is a tensor of a type that numpy has from ml_dtypes only."""
        known = _BY_NAME.get(self.data_type)
        return self.is_tensor and known is not None and dtypes.is_extension(known.dtype)

    def open_dims(self) -> dict[int, str]:
        """The axes whose size the model leaves open, by number, with a name for each.

        An axis without a name has that of the port with its number: `x[0]`.
        """
        return {
            axis: f"{self.name}[{axis}]" if size is None else size
            for axis, size in enumerate(self.dims)
            if not isinstance(size, int)
        }


def make(
    ports: Sequence[Port], given: Mapping[str, Given], dims: Mapping[str, int], seed: int
) -> tuple[dict[str, Given], dict[str, int]]:
    """An input for each port: the given ones, checked, and random ones for the others.

    Args:
        ports: What the model takes.
        given: Inputs by name. Their shapes say what the sizes are that the model leaves open.
        dims: Sizes by the names of `Port.open_dims`.
        seed: Random inputs follow from it and from their names.

    Returns:
        The inputs by name, and the sizes that nobody gave and that were therefore assumed.

    Raises:
        ValueError: A name is unknown, an input does not fit, or none can be made up.
    """
    by_name = {port.name: port for port in ports}
    _require_known("the name of an input", given, by_name)
    open_names = {name for port in ports for name in port.open_dims().values()}
    _require_known("the name of a dimension that is left open in an input", dims, open_names)
    made: dict[str, Given] = {}
    sizes: dict[str, int] = {}
    for name, value in given.items():
        made[name] = value = fitting(by_name[name], value)
        if by_name[name].is_tensor:
            for axis, dim in by_name[name].open_dims().items():
                sizes.setdefault(dim, value.shape[axis])
    for dim, size in dims.items():
        if size < 0:
            raise ValueError(f"dimension {dim!r}: expected a size of 0 or more, found {size}")
        if sizes.setdefault(dim, size) != size:
            raise ValueError(
                f"dimension {dim!r}: expected {sizes[dim]}, which a given input has, found {size}"
            )
    assumed = {}
    for port in ports:
        if port.name in made:
            continue
        open_dims = port.open_dims()
        for dim in open_dims.values():
            if dim not in sizes:
                sizes[dim] = assumed[dim] = ASSUMED_SIZE
        shape = [
            sizes[open_dims[axis]] if axis in open_dims else int(size or 0)
            for axis, size in enumerate(port.dims)
        ]
        made[port.name] = random(port, shape, seed)
    return {port.name: made[port.name] for port in ports}, assumed


def _require_known(kind: str, names: Iterable[str], known: Iterable[str]) -> None:
    for name in names:
        if name not in known:
            listed = ", ".join(map(repr, sorted(known))) or "none"
            raise ValueError(f"expected {kind} of the model, which has {listed}, found {name!r}")


def random(port: Port, shape: Sequence[int], seed: int) -> NDArray[Any]:
    """A random array for an input, always the same for the same port, shape and seed.

    Floating-point numbers are normally distributed; integers of 16 bits and more are 0 or 1, so
    that they are good as indices, masks and token types; those of 8 bits and less take every
    value; strings are a few words.

    Raises:
        ValueError: No random value can be made up for this type, or it does not fit memory.
    """
    data_type = _BY_NAME.get(port.data_type)
    if data_type is None and port.data_type != STRING:
        raise ValueError(
            f"input {port.name!r}: expected a tensor, for which a random one can be made up, found "
            f"type {port.type}; give it: --input {port.name}=FILE.npy, or FILE.npz for a sequence"
        )
    generator = np.random.default_rng([seed, zlib.crc32(port.name.encode())])
    try:
        if data_type is None:
            return generator.choice(_WORDS, shape).astype(object)
        if data_type.name == "BOOL":
            return generator.integers(0, 2, shape).astype(np.bool_)
        if "INT" in data_type.name:
            return _random_integers(generator, data_type, shape)
        if data_type.name == "DOUBLE":
            return generator.standard_normal(shape)
        floats = generator.standard_normal(shape, np.float32)
        if data_type.name == "FLOAT8E8M0":  # powers of 2, without a sign
            floats = np.abs(floats)
        if data_type.name.startswith("COMPLEX"):
            return (floats + 1j * generator.standard_normal(shape, np.float32)).astype(
                data_type.dtype
            )
        return floats.astype(data_type.dtype, copy=False)
    except (MemoryError, ValueError, OverflowError) as error:
        raise ValueError(
            f"input {port.name!r}: expected a shape that fits memory, found {list(shape)}; {error}"
        ) from error


def _random_integers(
    generator: np.random.Generator, data_type: DataType, shape: Sequence[int]
) -> NDArray[Any]:
    if data_type.name not in _SAMPLES:
        return generator.integers(0, _ANY_INDEX, shape, np.uint8).astype(data_type.dtype)
    count = 1 << data_type.bit_width
    least = 0 if data_type.name.startswith("U") else -count // 2
    return generator.integers(least, least + count, shape, np.int16).astype(data_type.dtype)


def fitting(port: Port, value: Given) -> Given:
    """A given input as the model takes it.

    Returns:
        The array; for what is no tensor the value as it is. An array of raw bytes is taken for one
        of a type of ml_dtypes of the same size, as which `.npy` files hold those.

    Raises:
        ValueError: It does not fit.
    """
    if not port.is_tensor:
        return value
    array = np.asarray(value)
    data_type = _BY_NAME.get(port.data_type)
    if data_type is None:
        is_fitting = port.data_type == STRING and array.dtype.kind in "UO"
        expected = "strings"
        array = array.astype(object) if is_fitting else array
    else:
        expected = str(data_type.dtype)
        is_raw = array.dtype.kind == "V" and array.dtype.names is None
        if is_raw and port.is_foreign and array.dtype.itemsize == data_type.dtype.itemsize:
            array = np.ascontiguousarray(array).view(data_type.dtype).reshape(array.shape)
        elif not port.is_foreign and array.dtype != data_type.dtype:  # of the other byte order
            swapped = array.dtype.newbyteorder("=")
            array = array.astype(swapped) if swapped == data_type.dtype else array
        is_fitting = array.dtype == data_type.dtype
    if not is_fitting:
        raise ValueError(
            f"input {port.name!r}: expected {port.data_type} (numpy's {expected}), found "
            f"{array.dtype}; convert it with array.astype"
        )
    _require_shape(port, array.shape)
    return array


def _require_shape(port: Port, shape: tuple[int, ...]) -> None:
    # ONNX Runtime has the same shape for scalars and for what the model gives no shape.
    fits = not port.dims or (
        len(port.dims) == len(shape)
        and all(
            not isinstance(size, int) or size == found
            for size, found in zip(port.dims, shape, strict=True)
        )
    )
    if not fits:
        described = "x".join("?" if it is None else str(it) for it in port.dims)
        raise ValueError(
            f"input {port.name!r}: expected shape {described}, found "
            f"{'x'.join(map(str, shape)) or 'a scalar'}"
        )


def to_runtime(ort: Any, port: Port, value: Given) -> Any:
    """An input as `onnxruntime.InferenceSession.run` takes it.

    That is the value itself, but for types that numpy has from ml_dtypes: these are handed over as
    their bytes.
    """
    if not port.is_foreign:
        return value
    data_type = _BY_NAME[port.data_type]
    tensor = ort.OrtValue.ortvalue_from_shape_and_type(value.shape, data_type.number)
    data = bytes(dtypes.as_raw_data(value))
    ctypes.memmove(tensor.data_ptr(), data, len(data))
    return tensor


def from_runtime(tensor: Any) -> NDArray[Any]:
    """A tensor of ONNX Runtime in the memory of the CPU as an array, of whatever type."""
    data_type = dtypes.BY_NUMBER.get(tensor.element_type())
    if data_type is None or not dtypes.is_extension(data_type.dtype):
        array: NDArray[Any] = tensor.numpy()
        return array
    data = ctypes.string_at(tensor.data_ptr(), tensor.tensor_size_in_bytes())
    return dtypes.as_array(memoryview(data), data_type, tensor.shape())
