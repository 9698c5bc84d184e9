"""Makes the inputs of a model: checks given arrays, and makes random arrays for other inputs.

A `.npy` file holds types that numpy lacks as raw bytes: `npy_array` makes them, `make_inputs` reads
them.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from onnxarchive.errors import shown_names
from onnxarchive.model import dtypes

if TYPE_CHECKING:
    from numpy.typing import NDArray

_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    f"tensor({data_type.name.lower()})": data_type.dtype for data_type in dtypes.BY_NUMBER.values()
} | {"tensor(string)": np.dtype(object)}
_WORDS: Final = ("archive", "model", "one", "tensor", "two", "weight")

# An input: an array, or a list of arrays for a sequence.
Input: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output of a model.

    Attributes:
        name: Name of the input or output.
        type: Type in ONNX Runtime's notation: `tensor(float)`, `seq(tensor(int64))`.
        dims: Size of each axis, or the name of an open (dynamic) dimension. An unnamed open
            dimension is named by port and axis: `x[0]`. Empty for a scalar or an unknown shape.
    """

    name: str
    type: str
    dims: tuple[int | str, ...]

    @classmethod
    def of(cls, argument: Any) -> Port:
        """Converts an `onnxruntime.NodeArg`."""
        dims = tuple(
            dim if (dim >= 0 if isinstance(dim, int) else dim) else f"{argument.name}[{axis}]"
            for axis, dim in enumerate(argument.shape)
        )
        return cls(argument.name, argument.type, dims)

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """Data type of the port's arrays, `object` for strings; None if the port is no tensor."""
        return _DTYPES.get(self.type)

    @property
    def needs_ml_dtypes(self) -> bool:
        """True for a tensor of a type that numpy lacks, such as bfloat16."""
        return self.dtype is not None and dtypes.is_extension(self.dtype)


def make_inputs(
    ports: Sequence[Port], given: Mapping[str, Input], dims: Mapping[str, int]
) -> tuple[dict[str, Input], dict[str, int]]:
    """Checks the given inputs and makes random arrays for the other inputs.

    `dims` gives sizes of open dimensions by the names in `Port.dims`; those of given inputs apply
    to all inputs. Returned are the inputs, and the open dimensions that have no such size but 1.
    """
    by_name = {port.name: port for port in ports}
    open_dims = {dim for port in ports for dim in port.dims if isinstance(dim, str)}
    for noun, names, known in ("input", given, [*by_name]), ("open dimension", dims, [*open_dims]):
        for name in names:
            if name not in known:
                raise ValueError(
                    f"expected the name of an {noun} of the model ({noun}s: "
                    f"{shown_names(sorted(known))}), found {name!r}"
                )
    inputs: dict[str, Input] = {}
    sizes: dict[str, int] = {}
    for name, value in given.items():
        port, inputs[name] = by_name[name], _fitted(by_name[name], value)
        if port.dtype is not None:
            for dim, size in zip(port.dims, inputs[name].shape, strict=False):
                if isinstance(dim, str):
                    sizes.setdefault(dim, size)
    for dim, size in dims.items():
        if size < 0 or sizes.setdefault(dim, size) != size:
            expected = (
                f"{sizes[dim]}, as in a given input" if dim in sizes else "a size of 0 or more"
            )
            raise ValueError(f"dimension {dim!r}: expected {expected}, found {size}")
    assumed: dict[str, int] = {}
    for port in ports:
        if port.name not in inputs:
            assumed |= {dim: 1 for dim in port.dims if isinstance(dim, str) and dim not in sizes}
            shape = [dim if isinstance(dim, int) else (assumed | sizes)[dim] for dim in port.dims]
            inputs[port.name] = random_input(port, shape)
    return {name: inputs[name] for name in by_name}, assumed


def npy_array(array: NDArray[Any], name: str, remedy: str) -> NDArray[Any]:
    """An array that a `.npy` file can hold, with the same elements.

    Types of ml_dtypes become raw bytes (`V1`, `V2`), as in `np.save`; only for FLOAT8E5M2 does
    `np.save` write `<f1`, which `np.load` refuses. Python strings become strings of fixed length.
    These lose null characters at their ends; so such strings are refused, with the array's name and
    a remedy.
    """
    if array.dtype.hasobject:
        strings = array.astype(str)
        if np.any(strings != array):
            raise ValueError(
                f"{name}: expected strings that a .npy file can hold, found one that ends with a "
                f"null character; {remedy}"
            )
        return strings
    if dtypes.is_extension(array.dtype):
        return array.view(np.dtype((np.void, array.dtype.itemsize)))
    return array


def _fitted(port: Port, value: Input) -> Input:
    """Checks a given input, and returns it as an array of the port's data type.

    Strings of fixed length, raw bytes of ml_dtypes types and other byte orders are converted. An
    input that is no tensor is returned unchanged.
    """
    dtype = port.dtype
    if dtype is None:
        return value
    array = np.asarray(value)
    if port.needs_ml_dtypes and array.dtype == np.dtype((np.void, dtype.itemsize)):
        array = array.view(dtype)  # see `npy_array`
    fits = array.dtype.kind in "UO" if dtype.hasobject else np.can_cast(array.dtype, dtype, "equiv")
    if not fits:
        raise ValueError(
            f"input {port.name!r}: expected {port.type}, an array of {dtype}, found an array of "
            f"{array.dtype}; convert it with array.astype"
        )
    # ONNX Runtime gives the same shape for scalars and for unknown shapes.
    fits = len(port.dims) in (0, array.ndim) and all(
        isinstance(dim, str) or dim == size
        for dim, size in zip(port.dims, array.shape, strict=False)
    )
    if not fits:
        dims = ", ".join(map(str, port.dims))
        raise ValueError(f"input {port.name!r}: expected shape [{dims}], found {list(array.shape)}")
    return array.astype(dtype, copy=False)


def random_input(port: Port, shape: Sequence[int]) -> NDArray[Any]:
    """Makes a random array for an input; name, type and shape determine the values.

    Floating-point numbers are normally distributed. Integers of 16 bits or more are 0 or 1, which
    are valid indices, masks and token types. Integers of 8 bits or less take all values.
    """
    dtype = port.dtype
    if dtype is None:
        raise ValueError(
            f"input {port.name!r}: no random value can be made for type {port.type}; give one: "
            f"--input {port.name}=FILE.npy, or FILE.npz for a sequence"
        )
    generator = np.random.default_rng(zlib.crc32(port.name.encode()))
    try:
        if dtype.hasobject:
            return generator.choice(_WORDS, shape).astype(dtype)
        if "int" in dtype.name or dtype.kind == "b":
            has_all_values = dtype.itemsize == 1 and dtype.kind != "b"
            count = 1 << 8 if has_all_values else 2  # astype wraps: 200 gives -56 as int8
            return generator.integers(0, count, shape, np.uint8).astype(dtype)
        width = np.float64 if dtype == np.float64 else np.float32
        numbers: NDArray[Any] = generator.standard_normal(shape, width)
        numbers = np.abs(numbers) if "e8m0" in dtype.name else numbers  # a type without a sign
        return numbers.astype(dtype, copy=False)
    except (MemoryError, ValueError, OverflowError) as error:
        raise ValueError(
            f"input {port.name!r}: expected a shape that fits memory, found {list(shape)}; {error}"
        ) from error
