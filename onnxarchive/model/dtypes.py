"""ONNX data types: widths, numpy types, and conversion between raw data and arrays.

Raw data has the layout of `TensorProto.raw_data` (onnx.proto): little-endian, row-major; elements
of less than 8 bits are packed, the first in the low bits of the first byte.

Arrays are correct on hosts of either byte order: numpy's own types are declared little-endian, and
the bytes of ml_dtypes elements are swapped on big-endian hosts.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np

from onnxarchive.errors import UnsupportedFeatureError, quoted

if TYPE_CHECKING:
    from numpy.typing import NDArray

BITS_PER_BYTE = 8
MAX_RANK = 64  # limit of numpy
MAX_NBYTES = (1 << 63) - 1  # of an array; limit of numpy
MAX_NBYTES_HERE = sys.maxsize  # 2 GiB where a size has 32 bits

# Numpy types of the numbers in the type-specific fields of TensorProto.
TYPED_FIELDS: dict[str, np.dtype[Any]] = {
    "float_data": np.dtype(np.float32),
    "int32_data": np.dtype(np.int32),
    "int64_data": np.dtype(np.int64),
    "double_data": np.dtype(np.float64),
    "uint64_data": np.dtype(np.uint64),
}


def is_extension(dtype: np.dtype[Any]) -> bool:
    """True for a numpy type of an extension, such as ml_dtypes.

    `item` and `tolist` ignore the byte order of such types, so arrays need the host's byte order.
    """
    return dtype.isbuiltin == 2  # registered by an extension


class DataType(NamedTuple):
    """A data type of ONNX whose elements have a fixed width.

    Attributes:
        name: Name in `TensorProto.DataType`.
        number: Number in `TensorProto.DataType`.
        dtype: Numpy type of arrays: little-endian, or the host's byte order for ml_dtypes.
        typed_field: The field of TensorProto that holds the elements if `raw_data` does not.
        bit_width: Bits of an element in `raw_data`.
        is_viewed: True if arrays are views of the raw data. False if arrays may be copies: for
            elements of less than 8 bits and, on a big-endian host, for types of ml_dtypes.
    """

    name: str
    number: int
    dtype: np.dtype[Any]
    typed_field: str
    bit_width: int
    is_viewed: bool

    @property
    def is_packed(self) -> bool:
        """True if an element has less than 8 bits; arrays are then unpacked copies."""
        return self.bit_width < BITS_PER_BYTE

    @property
    def typed_nbytes(self) -> int:
        """Bytes of `raw_data` for one number of the type-specific field.

        Such a number is one element, a byte of packed elements, half of a complex element, or one
        6-bit code (counted as a byte: codes are packed later).
        """
        number = TYPED_FIELDS[self.typed_field]
        if number.kind == "f":
            return number.itemsize
        return max(self.bit_width // BITS_PER_BYTE, 1)

    def nbytes(self, dims: Sequence[int]) -> int:
        """Size of the raw data of a tensor with shape `dims`, in bytes."""
        return -(-math.prod(dims) * self.bit_width // BITS_PER_BYTE)

    def tail_bits(self, dims: Sequence[int]) -> int:
        """The number of unused high bits in the last byte of `raw_data`."""
        return -math.prod(dims) * self.bit_width % BITS_PER_BYTE


def _declare(
    name: str, number: int, dtype: Any, typed_field: str, bit_width: int | None = None
) -> DataType:
    declared = np.dtype(dtype)
    if not is_extension(declared):
        declared = declared.newbyteorder("<")
    width = bit_width or declared.itemsize * BITS_PER_BYTE
    has_order = sys.byteorder == "little" or not is_extension(declared)
    return DataType(
        name, number, declared, typed_field, width, width >= BITS_PER_BYTE and has_order
    )


# TensorProto.DataType of onnx.proto, except UNDEFINED and STRING, which have no fixed width.
_DATA_TYPES = (
    _declare("FLOAT", 1, np.float32, "float_data"),
    _declare("UINT8", 2, np.uint8, "int32_data"),
    _declare("INT8", 3, np.int8, "int32_data"),
    _declare("UINT16", 4, np.uint16, "int32_data"),
    _declare("INT16", 5, np.int16, "int32_data"),
    _declare("INT32", 6, np.int32, "int32_data"),
    _declare("INT64", 7, np.int64, "int64_data"),
    _declare("BOOL", 9, np.bool_, "int32_data"),
    _declare("FLOAT16", 10, np.float16, "int32_data"),
    _declare("DOUBLE", 11, np.float64, "double_data"),
    _declare("UINT32", 12, np.uint32, "uint64_data"),
    _declare("UINT64", 13, np.uint64, "uint64_data"),
    _declare("COMPLEX64", 14, np.complex64, "float_data"),
    _declare("COMPLEX128", 15, np.complex128, "double_data"),
    _declare("BFLOAT16", 16, ml_dtypes.bfloat16, "int32_data"),
    _declare("FLOAT8E4M3FN", 17, ml_dtypes.float8_e4m3fn, "int32_data"),
    _declare("FLOAT8E4M3FNUZ", 18, ml_dtypes.float8_e4m3fnuz, "int32_data"),
    _declare("FLOAT8E5M2", 19, ml_dtypes.float8_e5m2, "int32_data"),
    _declare("FLOAT8E5M2FNUZ", 20, ml_dtypes.float8_e5m2fnuz, "int32_data"),
    _declare("UINT4", 21, ml_dtypes.uint4, "int32_data", 4),
    _declare("INT4", 22, ml_dtypes.int4, "int32_data", 4),
    _declare("FLOAT4E2M1", 23, ml_dtypes.float4_e2m1fn, "int32_data", 4),
    _declare("FLOAT8E8M0", 24, ml_dtypes.float8_e8m0fnu, "int32_data"),
    _declare("UINT2", 25, ml_dtypes.uint2, "int32_data", 2),
    _declare("INT2", 26, ml_dtypes.int2, "int32_data", 2),
    _declare("FLOAT6E2M3", 27, ml_dtypes.float6_e2m3fn, "int32_data", 6),
    _declare("FLOAT6E3M2", 28, ml_dtypes.float6_e3m2fn, "int32_data", 6),
)
BY_NUMBER = {data_type.number: data_type for data_type in _DATA_TYPES}
BY_NAME = {data_type.name: data_type for data_type in _DATA_TYPES}
_BY_DTYPE = {data_type.dtype: data_type for data_type in _DATA_TYPES}
BOOL = BY_NUMBER[9]


def name_of(number: int) -> str:
    """The name of a data type, or its number if this version of onnxarchive does not know it."""
    if number in BY_NUMBER:
        return BY_NUMBER[number].name
    return {0: "UNDEFINED", 8: "STRING"}.get(number, str(number))


def of_array(array: NDArray[Any]) -> DataType:
    """The data type of a numpy array.

    Raises:
        UnsupportedFeatureError: ONNX has no data type of fixed width for the array, or the array
            has a type of ml_dtypes and not the host's byte order.
    """
    dtype = array.dtype
    if not is_extension(dtype):
        dtype = dtype.newbyteorder("<")
    data_type = _BY_DTYPE.get(dtype)
    if data_type is None:
        raise UnsupportedFeatureError(
            f"expected an array of a type that ONNX can store outside a model, found {array.dtype}"
        )
    return data_type


def as_array(data: memoryview, data_type: DataType, dims: Sequence[int]) -> NDArray[Any]:
    """Converts the raw data of a tensor to a read-only array.

    The array is a view that keeps `data` alive; for packed types, a copy with one byte per element.
    On a big-endian host, an array of bfloat16 is a copy as well, in the host's byte order.

    Raises:
        UnsupportedFeatureError: The array is empty, and another dimension too large for numpy on a
            machine of 32 bits.
    """
    shape = tuple(dims)
    if 0 in shape:
        nbytes = data_type.dtype.itemsize * math.prod(dim for dim in shape if dim)
        if nbytes > MAX_NBYTES_HERE:
            raise UnsupportedFeatureError(
                "expected a shape whose dimensions other than 0 take at most "
                f"{MAX_NBYTES_HERE} bytes, numpy's limit on this machine, found "
                f"{quoted(list(shape))}; read the tensor on a machine of 64 bits"
            )
    if data_type.is_viewed:
        array: NDArray[Any] = np.ndarray(shape, data_type.dtype, data)
        return array
    if data_type.is_packed:
        codes = _unpack(np.frombuffer(data, np.uint8), data_type.bit_width, math.prod(dims))
        array = codes.view(data_type.dtype)
    else:  # a type of ml_dtypes on a big-endian host
        bits = np.frombuffer(data, np.dtype(f"<u{data_type.dtype.itemsize}"))
        array = bits.astype(bits.dtype.newbyteorder("="), copy=False).view(data_type.dtype)
    array = array.reshape(shape)
    array.flags.writeable = False
    return array


def as_raw_data(array: NDArray[Any]) -> memoryview:
    """Converts an array to raw data: little-endian, row-major, packed.

    The result is a view of `array` if the array's memory has this layout, else a copy. For errors
    see `of_array`.
    """
    data_type = of_array(array)
    flat = np.ascontiguousarray(array).reshape(-1)
    if data_type.is_packed:
        return _bytes_of(pack(flat.view(np.uint8), data_type.bit_width))
    if is_extension(data_type.dtype):
        bits = flat.view(f"=u{data_type.dtype.itemsize}")
        return _bytes_of(bits.astype(bits.dtype.newbyteorder("<"), copy=False))
    return _bytes_of(flat.astype(data_type.dtype, copy=False))


def typed_raw_data(elements: NDArray[Any], data_type: DataType) -> memoryview:
    """Converts the numbers in `data_type.typed_field` to raw data.

    Each number in `int32_data` has one element in its low bits, or one byte of packed 2-bit or
    4-bit elements (onnx.proto).
    """
    if data_type.bit_width == 6:
        return _bytes_of(pack(elements.astype(np.uint8), data_type.bit_width))
    width = elements.dtype
    if width.kind != "f":  # complex numbers are pairs of floating-point numbers
        width = np.dtype(f"u{data_type.typed_nbytes}")
    return _bytes_of(elements.astype(width.newbyteorder("<"), copy=False))


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return array.view(np.uint8).data.toreadonly()


def _unpack(packed: NDArray[np.uint8], bit_width: int, count: int) -> NDArray[np.uint8]:
    """The inverse of `pack`: unpacks `count` codes, one byte each."""
    codes_in_group, bytes_in_group = _group(bit_width)
    group_count = -(-count // codes_in_group)
    groups = np.zeros((group_count, bytes_in_group), np.uint8)
    groups.reshape(-1)[: packed.size] = packed
    codes = np.empty((group_count, codes_in_group), np.uint8)
    for index in range(codes_in_group):
        byte, shift = divmod(index * bit_width, BITS_PER_BYTE)
        code = groups[:, byte] >> np.uint8(shift)
        if shift + bit_width > BITS_PER_BYTE:
            code |= groups[:, byte + 1] << np.uint8(BITS_PER_BYTE - shift)
        codes[:, index] = code & ((1 << bit_width) - 1)
    return codes.reshape(-1)[:count]


def pack(codes: NDArray[np.uint8], bit_width: int) -> NDArray[np.uint8]:
    """Packs codes of one byte each into 2, 4 or 6 bits each, the first in the lowest bits.

    Higher bits of a code are ignored; the bits after the last code are zero.
    """
    codes_in_group, bytes_in_group = _group(bit_width)
    grouped = np.zeros((-(-codes.size // codes_in_group), codes_in_group), np.uint8)
    grouped.reshape(-1)[: codes.size] = codes & ((1 << bit_width) - 1)
    groups = np.zeros((len(grouped), bytes_in_group), np.uint8)
    for index in range(codes_in_group):
        byte, shift = divmod(index * bit_width, BITS_PER_BYTE)
        groups[:, byte] |= grouped[:, index] << np.uint8(shift)
        if shift + bit_width > BITS_PER_BYTE:
            groups[:, byte + 1] |= grouped[:, index] >> np.uint8(BITS_PER_BYTE - shift)
    return groups.reshape(-1)[: -(-codes.size * bit_width // BITS_PER_BYTE)]


def _group(bit_width: int) -> tuple[int, int]:
    """The least number of codes that fills whole bytes, and the number of bytes."""
    bits = math.lcm(bit_width, BITS_PER_BYTE)
    return bits // bit_width, bits // BITS_PER_BYTE
