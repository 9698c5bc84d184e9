from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from models import (
    BIT_WIDTHS,
    NEW_TYPES,
    NUMBERS,
    element_count,
    little_endian,
    random_raw,
    raw_tensor,
    typed,
)
from onnx import TensorProto, helper, numpy_helper

from onnxarchive.errors import UnsupportedFeatureError
from onnxarchive.model import dtypes
from onnxarchive.model.dtypes import (
    BY_NAME,
    BY_NUMBER,
    DataType,
    as_array,
    as_raw_data,
    typed_raw_data,
)

every_type = pytest.mark.parametrize("data_type", BY_NUMBER.values(), ids=lambda it: it.name)
whole_bytes = pytest.mark.parametrize(
    "data_type", [it for it in BY_NUMBER.values() if it.bit_width >= 8], ids=lambda it: it.name
)

# Types of which numpy knows a byte order.
WIDE_BUILTINS = [it.name for it in BY_NUMBER.values() if it.bit_width > 8 and it.name != "BFLOAT16"]
# bfloat16 has the machine's byte order, so it is a copy on a big-endian machine.
SWAPPED = [] if sys.byteorder == "little" else ["BFLOAT16"]
SHAPES: list[tuple[int, ...]] = [
    *((), (0,), (3, 0, 2), (1,), (2,), (3,), (4,), (5,), (7,), (8,), (9,), (33,)),
    *((1, 1, 1), (3, 5)),
]


def test_the_table_has_every_type_of_onnx_but_undefined_and_string() -> None:
    table = {it.name: it.number for it in BY_NUMBER.values()}
    older = {*NEW_TYPES} - {*NUMBERS}
    assert {name: number for name, number in table.items() if name not in older} == NUMBERS
    assert all(BY_NUMBER[it.number] is it for it in BY_NUMBER.values())


@every_type
def test_a_data_type_has_the_properties_that_onnx_states(data_type: DataType) -> None:
    assert data_type.dtype == little_endian(helper.tensor_dtype_to_np_dtype(data_type.number))
    assert data_type.typed_field == helper.tensor_dtype_to_field(data_type.number)
    assert data_type.bit_width == BIT_WIDTHS[data_type.number]
    assert data_type.is_packed == (data_type.bit_width < 8)


def test_bool_is_the_boolean_type() -> None:
    assert dtypes.BOOL.number == TensorProto.BOOL


@every_type
@pytest.mark.parametrize("dims", SHAPES, ids=str)
def test_arrays_are_those_of_onnx_and_convert_back_to_the_same_bytes(
    data_type: DataType, dims: tuple[int, ...]
) -> None:
    tensor = raw_tensor("x", data_type.number, dims, seed=3)
    expected = numpy_helper.to_array(tensor)
    expected = expected.astype(little_endian(expected.dtype))
    array = as_array(memoryview(tensor.raw_data), data_type, tensor.dims)
    assert array.shape == dims
    assert array.dtype == expected.dtype
    assert array.tobytes() == expected.tobytes()
    assert np.array_equal(array.astype(np.complex128), expected.astype(np.complex128), True)
    assert bytes(as_raw_data(array)) == tensor.raw_data


@every_type
@pytest.mark.parametrize("dims", SHAPES, ids=str)
def test_sizes_are_those_of_raw_data(data_type: DataType, dims: tuple[int, ...]) -> None:
    assert data_type.nbytes(dims) == len(random_raw(data_type.number, dims))
    bits = element_count(dims) * BIT_WIDTHS[data_type.number]
    assert data_type.tail_bits(dims) == data_type.nbytes(dims) * 8 - bits
    assert 0 <= data_type.tail_bits(dims) < 8


def test_sizes_do_not_wrap_around() -> None:
    assert BY_NUMBER[TensorProto.FLOAT].nbytes((1 << 32, 1 << 32, 1)) == 1 << 66
    assert BY_NAME["UINT2"].nbytes((1 << 32, 1 << 32, 1)) == 1 << 62


@every_type
@pytest.mark.parametrize("dims", [*SHAPES, (1021,)], ids=str)
def test_every_bit_pattern_of_a_typed_field_is_kept(
    data_type: DataType, dims: tuple[int, ...]
) -> None:
    tensor = raw_tensor("x", data_type.number, dims, seed=8)
    if data_type.typed_field in ("float_data", "double_data"):
        # A Python float holds no signalling NaN.
        numbers = np.nan_to_num(numpy_helper.to_array(tensor))
        tensor.raw_data = numbers.astype(little_endian(numbers.dtype)).tobytes()
    elements = _elements(typed(tensor), data_type)
    assert bytes(typed_raw_data(elements, data_type)) == tensor.raw_data


@pytest.mark.parametrize(
    ("name", "number", "expected"),
    [
        ("INT8", -1, b"\xff"),
        ("INT16", -2, b"\xfe\xff"),
        ("INT32", -2, b"\xfe\xff\xff\xff"),
        ("UINT16", 0xFFFE, b"\xfe\xff"),
        ("FLOAT16", 0x3C00, b"\x00\x3c"),
        ("FLOAT6E2M3", 0x3F, b"\x3f"),
        ("INT4", 0xF1, b"\xf1"),
    ],
)
def test_low_bits_of_int32_data_are_the_element(name: str, number: int, expected: bytes) -> None:
    elements = np.array([number], np.int32)
    assert bytes(typed_raw_data(elements, BY_NUMBER[NUMBERS[name]])) == expected


@pytest.mark.skipif("FLOAT6E2M3" not in NUMBERS, reason="this onnx lacks the type")
def test_bits_above_a_code_of_six_bits_are_dropped() -> None:
    elements = np.array([0xFF, 0x41, 0x80, 0x3F], np.int32)
    expected = numpy_helper.from_array(
        np.array([0x3F, 0x01, 0x00, 0x3F], np.uint8).view(ml_dtypes.float6_e2m3fn)
    )
    data = typed_raw_data(elements, BY_NAME["FLOAT6E2M3"])
    assert bytes(data) == expected.raw_data


def _elements(tensor: TensorProto, data_type: DataType) -> np.ndarray[Any, Any]:
    """The typed field as an array of the field's own type."""
    kinds = {"float": np.float32, "double": np.float64, "uint64": np.uint64}
    kinds |= {"int32": np.int32, "int64": np.int64}
    kind = kinds[data_type.typed_field.removesuffix("_data")]
    return np.array(getattr(tensor, data_type.typed_field), kind)


@every_type
def test_an_array_is_a_read_only_view_or_a_copy_of_one_byte_for_each_part_of_a_byte(
    data_type: DataType,
) -> None:
    data = random_raw(data_type.number, (6,))
    array = as_array(memoryview(data), data_type, (2, 3))
    is_copy = data_type.is_packed or data_type.name in SWAPPED
    assert np.shares_memory(array, np.frombuffer(data, np.uint8)) == (not is_copy)
    assert array.itemsize == max(data_type.bit_width // 8, 1)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = array[1]
    if not is_copy:
        assert not array.flags.owndata
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True


def test_an_empty_array_of_a_shape_too_large_for_the_machine_is_not_supported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dtypes, "MAX_NBYTES_HERE", (1 << 31) - 1)
    data, data_type = memoryview(b""), BY_NUMBER[TensorProto.INT16]
    assert as_array(data, data_type, (0, (1 << 30) - 1)).shape == (0, (1 << 30) - 1)
    expected = r"at most 2147483647 bytes, .*, found \[1073741824, 0\]; read the tensor"
    with pytest.raises(UnsupportedFeatureError, match=expected):
        as_array(data, data_type, (1 << 30, 0))


@whole_bytes
def test_the_bytes_of_an_array_are_a_read_only_view_of_it(data_type: DataType) -> None:
    array = np.ones((2, 3), data_type.dtype)
    data = as_raw_data(array)
    is_copy = data_type.name in SWAPPED
    assert np.shares_memory(np.frombuffer(data, np.uint8), array) == (not is_copy)
    assert data.readonly
    assert (data.format, data.ndim, data.nbytes) == ("B", 1, array.nbytes)


@every_type
def test_arrays_of_any_layout_in_memory_give_their_elements_row_by_row(
    data_type: DataType,
) -> None:
    tensor = raw_tensor("x", data_type.number, (6, 10), seed=9)
    array = numpy_helper.to_array(tensor)
    for view in (
        np.asfortranarray(array),
        array.T,
        array[::2, 1::3],
        array[::-1, ::-1],
        np.broadcast_to(array[0], (3, 10)),
        array[:0],
        array[1, 1],  # a numpy scalar becomes an array of no dimensions
    ):
        view = np.asarray(view)
        expected = numpy_helper.from_array(view.copy(order="C")).raw_data
        assert bytes(as_raw_data(view)) == expected


@pytest.mark.parametrize("name", WIDE_BUILTINS)
def test_big_endian_arrays_are_stored_little_endian(name: str) -> None:
    data_type = BY_NUMBER[NUMBERS[name]]
    big = np.arange(5).astype(data_type.dtype.newbyteorder(">"))
    assert big.dtype.str[0] == ">"
    assert dtypes.of_array(big) is data_type
    data = as_raw_data(big)
    assert bytes(data) == np.arange(5).astype(data_type.dtype.newbyteorder("<")).tobytes()
    assert np.array_equal(as_array(data, data_type, (5,)), big)


@every_type
def test_the_data_type_of_an_array_is_found(data_type: DataType) -> None:
    assert dtypes.of_array(np.zeros(1, data_type.dtype)) is data_type


def test_every_number_type_of_c_has_a_data_type() -> None:
    for char in "bhilqBHILQefd?FD":
        data_type = dtypes.of_array(np.zeros(1, char))
        assert data_type.dtype == little_endian(np.dtype(char))


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a"]),
        np.array([b"a"]),
        np.array([object()]),
        np.array(["2000-01-01"], "datetime64[D]"),
        np.array([1], "timedelta64[s]"),
        np.array([(1, 2)], [("a", "i4"), ("b", "i4")]),
        np.array([1], np.longdouble),
        np.zeros(1, ml_dtypes.float8_e3m4),
    ],
    ids=lambda array: str(array.dtype),
)
def test_arrays_that_onnx_has_no_type_for_are_refused(array: np.ndarray[Any, Any]) -> None:
    with pytest.raises(UnsupportedFeatureError) as caught:
        dtypes.of_array(array)
    assert str(array.dtype) in str(caught.value)
    with pytest.raises(UnsupportedFeatureError):
        as_raw_data(array)


@pytest.mark.parametrize(
    ("number", "name"), [(0, "UNDEFINED"), (1, "FLOAT"), (8, "STRING"), (99, "99"), (-1, "-1")]
)
def test_every_number_of_a_data_type_has_a_name(number: int, name: str) -> None:
    assert dtypes.name_of(number) == name
