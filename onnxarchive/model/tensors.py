"""The tensors of a model: their paths, types, bytes and external data.

The walk visits every tensor: initializers, sparse initializers, attributes, subgraphs, functions
and training_info.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
import onnx

from onnxarchive.errors import ArchiveFormatError, Report, quoted
from onnxarchive.files.data import Bytes, Made
from onnxarchive.model import dtypes
from onnxarchive.model.dtypes import DataType
from onnxarchive.model.walking import MAIN_GRAPH, Path, below

EXTERNAL = onnx.TensorProto.EXTERNAL
STRING = onnx.TensorProto.STRING
# onnx.proto: exactly one of these fields holds the elements of a tensor that is not external.
DATA_FIELDS = (
    "raw_data",
    "float_data",
    "int32_data",
    "string_data",
    "int64_data",
    "double_data",
    "uint64_data",
)

INITIALIZER: Final = "initializer"

# Locations by which ONNX Runtime refers to memory of its process; their offset is an address.
_IN_MEMORY: Final = frozenset({"*/_ORT_MEM_ADDR_/*", "*/_ORT_NATIVE_ENDIAN_MEM_ADDR_/*"})

LOCATION = "location"
OFFSET = "offset"
LENGTH = "length"
CHECKSUM = "checksum"
_MAX_SHOWN_PAIRS = 8  # in a message
EXTERNAL_DATA_KEYS = frozenset({LOCATION, OFFSET, LENGTH, CHECKSUM})
UINT8_MAX: Final = 0xFF
# Stricter than int(), which accepts blanks, underscores and the digits of other scripts.
_NUMBER = re.compile(r"0|[1-9][0-9]{0,18}")


class TensorRef(NamedTuple):
    """A tensor of the model itself (not a copy) and its path in the model."""

    path: Path
    tensor: onnx.TensorProto

    @property
    def name(self) -> str:
        """The tensor's name; bytes that are not UTF-8 are replaced."""
        name = self.tensor.name
        return name if isinstance(name, str) else text(name)

    @property
    def is_initializer(self) -> bool:
        """True for a dense initializer of the main graph or of a subgraph of its nodes.

        Other tensors are stored outside the model only if `convert_attribute` is true, or if their
        location is the key of a tensor added to a `Writer`.
        """
        return self.path[0][0] == "graph" and self.path[-1][0] == INITIALIZER

    @property
    def where(self) -> str:
        """The path, as text."""
        return ".".join(
            field if index is None else f"{field}[{index}]" for field, index in self.path
        )

    def __str__(self) -> str:
        return f"tensor {quoted(self.name)} ({self.where})"


@dataclass(slots=True, eq=False)
class TensorRefs(Mapping[str, TensorRef]):
    """The external tensors of a model by key.

    To save memory, refs of the main graph's initializers are made when they are looked up.

    Attributes:
        initializers: The initializers of the main graph.
        positions: By key, the index of one of them, or the ref of another tensor.
    """

    initializers: Sequence[onnx.TensorProto] = ()
    positions: dict[str, int | TensorRef] = field(default_factory=dict)

    def keep(self) -> None:
        """Makes these refs refer to the present initializers, even if the model gets others."""
        if not isinstance(self.initializers, list):
            self.initializers = list(self.initializers)

    def __getitem__(self, key: str) -> TensorRef:
        position = self.positions[key]
        if isinstance(position, TensorRef):
            return position
        return main_initializer(self.initializers[position], position)

    def __iter__(self) -> Iterator[str]:
        return iter(self.positions)

    def __len__(self) -> int:
        return len(self.positions)

    def __contains__(self, key: object) -> bool:
        return key in self.positions


def text(value: str | bytes) -> str:
    """A string of a proto; bytes that are not UTF-8 are replaced.

    protobuf gives a string that is not UTF-8 as bytes.
    """
    return value if isinstance(value, str) else value.decode(errors="replace")


def walk(model: onnx.ModelProto) -> Iterator[TensorRef]:
    """Yields the ref of every tensor; in each graph, initializers before tensors of nodes."""
    for index, tensor in enumerate(model.graph.initializer):
        yield TensorRef((*MAIN_GRAPH, (INITIALIZER, index)), tensor)
    yield from walk_others(model)


def main_initializer(tensor: onnx.TensorProto, index: int) -> TensorRef:
    """The ref of an initializer of the main graph, from its index."""
    return TensorRef((*MAIN_GRAPH, (INITIALIZER, index)), tensor)


def external(model: onnx.ModelProto) -> Iterator[TensorRef]:
    """Yields the refs of the external tensors, in the order of `walk`."""
    return (ref for ref in walk(model) if ref.tensor.data_location == EXTERNAL)


def walk_others(model: onnx.ModelProto) -> Iterator[TensorRef]:
    """Yields the ref of every tensor except the initializers of the main graph."""
    messages = chain(
        below(model.graph, MAIN_GRAPH, _TENSOR, without=INITIALIZER),
        below(model, (), _TENSOR, without="graph"),
    )
    return (TensorRef(path, tensor) for path, tensor in messages)  # type: ignore[arg-type]


_TENSOR = onnx.TensorProto.DESCRIPTOR


def raw_data(ref: TensorRef, nbytes: int | None = None) -> memoryview:
    """The bytes of a tensor in the model, in the layout of `raw_data`.

    The bytes are a copy, since protobuf gives no views. Elements of type-specific fields are
    converted. `nbytes` is the size that shape and type need, if it is known.

    Raises:
        ArchiveFormatError: The size of the tensor's data does not fit its shape and type.
    """
    tensor = ref.tensor
    data_type = dtypes.BY_NUMBER[tensor.data_type]
    if tensor.HasField("raw_data"):
        data = memoryview(tensor.raw_data)
    else:
        values = getattr(tensor, data_type.typed_field)
        numbers = dtypes.TYPED_FIELDS[data_type.typed_field]
        elements = np.fromiter(values, numbers, count=len(values))
        data = dtypes.typed_raw_data(elements, data_type)
    expected = data_type.nbytes(tensor.dims[:]) if nbytes is None else nbytes
    if data.nbytes != expected:
        raise ArchiveFormatError(
            f"{ref}: expected {expected} bytes for {data_type.name} of shape "
            f"{quoted(tensor.dims)}, found {data.nbytes}"
        )
    return data


def data_in_model(ref: TensorRef, nbytes: int) -> Made:
    """The `nbytes` bytes of a tensor in the model, copied when they are read."""
    return Made(nbytes, partial(_copied_out, ref))


def initializer_maker(initializers: Sequence[onnx.TensorProto]) -> Callable[[int], Bytes]:
    """A function that copies an initializer of the main graph out of the model, by its index.

    Once an absent field of a message is accessed, protobuf's Python object of the message takes 300
    bytes. So `Made` refers to an initializer by the index.
    """

    def copied_out(index: int) -> Bytes:
        return _copied_out(main_initializer(initializers[index], index))

    return copied_out


def _copied_out(ref: TensorRef) -> Bytes:
    return Bytes(raw_data(ref))


def data_fields(tensor: onnx.TensorProto) -> list[str]:
    """The data fields of a tensor that are not empty; their values are read."""
    return [field for field in DATA_FIELDS if len(getattr(tensor, field))]


def has_data(tensor: onnx.TensorProto) -> bool:
    """True if a tensor has a data field.

    The fields are written out, since this is called for each tensor.
    """
    return tensor.HasField("raw_data") or bool(
        tensor.float_data
        or tensor.int32_data
        or tensor.string_data
        or tensor.int64_data
        or tensor.double_data
        or tensor.uint64_data
    )


def require_no_data(ref: TensorRef) -> None:
    """Refuses an external tensor that also has data itself; an empty `raw_data` is not data.

    Neither is preferred: other tools read the external data, but a program that set the field means
    the field.

    Raises:
        ArchiveFormatError: The tensor has data.
    """
    fields = ", ".join(data_fields(ref.tensor)) if has_data(ref.tensor) else ""
    if fields:
        raise ArchiveFormatError(
            f"{ref}: there is data beside data_location EXTERNAL, in {fields}; to store the data "
            "in these fields, clear external_data and set data_location to DEFAULT; to keep the "
            f"external data, clear {fields}"
        )


def require_no_address(ref: TensorRef) -> None:
    """Refuses an external tensor whose data was in the memory of another process.

    Raises:
        ArchiveFormatError: The location is such an address.
    """
    if location(ref.tensor) in _IN_MEMORY:
        raise ArchiveFormatError(
            f"{ref}: its data is not in a file, but at an address in the memory of the process of "
            "ONNX Runtime that wrote the model; let that program write the model anew, with its "
            "weights"
        )


def array_nbytes(tensor: onnx.TensorProto) -> int | None:
    """Size of a tensor's raw data in bytes; None if no array can have its type and shape."""
    data_type = dtypes.BY_NUMBER.get(tensor.data_type)
    dims = tensor.dims[:]
    return data_type.nbytes(dims) if data_type and are_dims(dims, data_type) else None


def stored_nbytes(tensor: onnx.TensorProto) -> int | None:
    """Size of a tensor's raw data in bytes; None if it cannot be stored outside the model.

    None for strings, types that ONNX does not define, segments of a tensor, and shapes that an
    array cannot have.
    """
    return None if tensor.HasField("segment") or tensor.string_data else array_nbytes(tensor)


def stored_type(tensor: onnx.TensorProto) -> DataType | None:
    """The data type of a tensor; None as for `stored_nbytes`."""
    return None if stored_nbytes(tensor) is None else dtypes.BY_NUMBER[tensor.data_type]


def nbytes_in_attributes(model: onnx.ModelProto, size_threshold: int) -> list[int]:
    """Sizes in bytes of tensors that the model holds in Constant nodes and other attributes.

    Only tensors of `size_threshold` bytes or more that could be stored outside the model.
    """
    sizes = [
        stored_nbytes(ref.tensor)
        for ref in walk(model)
        if not ref.is_initializer and ref.tensor.data_location != EXTERNAL
    ]
    return [nbytes for nbytes in sizes if nbytes is not None and nbytes >= size_threshold]


def external_type(ref: TensorRef) -> DataType:
    """The data type of a tensor whose data is outside the model.

    Raises:
        ArchiveFormatError: The tensor also has data itself, or cannot be stored outside the model
            (see `stored_type`).
    """
    tensor = ref.tensor
    require_no_data(ref)
    data_type = stored_type(tensor)
    if data_type is None:
        if tensor.HasField("segment"):
            raise ArchiveFormatError(f"{ref}: there is a segment beside data_location EXTERNAL")
        raise ArchiveFormatError(
            f"{ref}: expected external data of a fixed-width type and of a shape that an array can "
            f"have, found data type {tensor.data_type} and dims {quoted(tensor.dims)}"
        )
    return data_type


def are_dims(dims: Any, data_type: DataType | None) -> bool:
    """True if an array can have this shape and type (rule TENSOR-2).

    Without a data type, elements of one byte are assumed.
    """
    itemsize = 1 if data_type is None else data_type.dtype.itemsize
    least = min(dims, default=1)
    nonzero = dims if least else [dim for dim in dims if dim]
    return (
        least >= 0
        and len(dims) <= dtypes.MAX_RANK
        and itemsize * math.prod(nonzero) <= dtypes.MAX_NBYTES
    )


class ExternalData(NamedTuple):
    """The `external_data` field of a tensor.

    Bytes that are not UTF-8 become surrogates (PEP 383), so different bytes remain different.

    Attributes:
        location: Path of the file, or key of the entry.
        offset: Offset of the tensor's data in the file or entry, in bytes; None if not given.
        length: Size of the tensor's data in bytes; None if not given.
        checksum: SHA-1 of the file in hexadecimal digits; None if not given.
    """

    location: str
    offset: int | None
    length: int | None
    checksum: str | None


def external_data(
    ref: TensorRef,
    report: Report,
    *,
    also_allowed: frozenset[str] = frozenset(),
    entry: str | None = None,
) -> ExternalData | None:
    """Reads a tensor's `external_data` field strictly.

    Outside an archive, pairs by which ONNX Runtime finds packed weights are ignored.

    Args:
        ref: The tensor.
        report: Receives each broken rule (DATA-4, DATA-5).
        also_allowed: Keys of pairs that are allowed besides ONNX's; their values are ignored.
        entry: The entry that reports name; None for a model outside an archive.

    Returns:
        The first value of each key; None if there is no location. Malformed numbers are None.
    """
    pairs: dict[str, str] = {}
    unfit: list[str] = []  # the first unfit pairs; the message shows no others
    for pair in ref.tensor.external_data:
        key = pair.key
        is_known = key in EXTERNAL_DATA_KEYS or key in also_allowed
        if is_known and key not in pairs:
            pairs[key] = _decoded(pair.value)
        elif len(unfit) < _MAX_SHOWN_PAIRS and not (entry is None and names_packed(pair)):
            unfit.append(f"{quoted(key)} again" if is_known else quoted(key))
    location = pairs.get(LOCATION)
    if unfit:
        report.broken(
            "DATA-4",
            f"{ref}: expected only {sorted(EXTERNAL_DATA_KEYS | also_allowed)} in external_data, "
            f"each at most once, found {', '.join(unfit)}",
            entry=entry,
        )
    if location is None:
        report.broken("DATA-4", f"{ref}: external_data has no location", entry=entry)
    numbers: dict[str, int] = {}
    for key in (OFFSET, LENGTH):
        value = pairs.get(key)
        if value is not None and _NUMBER.fullmatch(value) is not None:
            numbers[key] = int(value)
        elif value is not None:
            report.broken(
                "DATA-5",
                f"{ref}: expected {key} in at most 19 decimal digits without leading zeros, found "
                f"{quoted(value)}",
                entry=entry,
            )
    if location is None:
        return None
    return ExternalData(location, numbers.get(OFFSET), numbers.get(LENGTH), pairs.get(CHECKSUM))


def names_packed(pair: onnx.StringStringEntryProto) -> bool:
    """True for a pair by which ONNX Runtime finds packed weights."""
    return text(pair.key).startswith("prepacked")


def location(tensor: onnx.TensorProto) -> str | None:
    """The location of an external tensor; None if it is missing or the tensor is not external."""
    return _value(tensor, LOCATION)


def checksum(tensor: onnx.TensorProto) -> str | None:
    """The SHA-1 in the external data of a tensor, or None."""
    return _value(tensor, CHECKSUM)


def _value(tensor: onnx.TensorProto, key: str) -> str | None:
    if tensor.data_location == EXTERNAL:
        for pair in tensor.external_data:
            if pair.key == key:
                return _decoded(pair.value)
    return None


def _decoded(value: str | bytes) -> str:
    """A string of a proto, with surrogates for bytes that are not UTF-8."""
    return value if isinstance(value, str) else value.decode(errors="surrogateescape")


# The numbers of the data types with rules about elements (see `checked`).
CHECKED_TYPES: Final = frozenset(
    number
    for number, data_type in dtypes.BY_NUMBER.items()
    if data_type is dtypes.BOOL or data_type.is_packed
)


def checked(
    ref: TensorRef, data: Iterable[memoryview], report: Report, *, entry: str
) -> Iterator[memoryview]:
    """Yields the bytes of a tensor unchanged, and checks its elements (TENSOR-4, TENSOR-5).

    TENSOR-4 is checked only if the total size fits type and shape. `entry` is the tensor's key.
    """
    data_type = dtypes.BY_NUMBER[ref.tensor.data_type]
    largest = last = nbytes = 0
    for piece in data:
        if data_type is dtypes.BOOL:
            largest = max(largest, int(np.frombuffer(piece, np.uint8).max(initial=0)))
        if piece:
            last = piece[-1]
            nbytes += len(piece)
        yield piece
    if largest > 1:
        report.broken("TENSOR-5", f"{ref}: expected bytes of 0 and 1, found {largest}", entry=entry)
    tail_bits = data_type.tail_bits(ref.tensor.dims)
    if nbytes == data_type.nbytes(ref.tensor.dims) and last >> (dtypes.BITS_PER_BYTE - tail_bits):
        report.broken(
            "TENSOR-4",
            f"{ref}: expected zero in the {tail_bits} unused high bits of the last byte, found "
            f"{last:#04x}; 'onnxarchive convert' clears these bits",
            entry=entry,
        )


def clear_tail(tensor: onnx.TensorProto) -> bool:
    """Clears the unused bits in the last byte of a tensor in the model; True if one was set."""
    if tensor.data_type not in CHECKED_TYPES or array_nbytes(tensor) is None:
        return False
    data_type = dtypes.BY_NUMBER[tensor.data_type]
    if not data_type.tail_bits(tensor.dims):
        return False
    used = last_byte_mask(tensor.dims, data_type)
    if tensor.HasField("raw_data"):
        data = tensor.raw_data
        if len(data) != data_type.nbytes(tensor.dims) or not data[-1] & ~used:
            return False
        tensor.raw_data = data[:-1] + bytes([data[-1] & used])
        return True
    numbers = tensor.int32_data  # bytes of packed elements; 6-bit codes are packed later
    if data_type.bit_width == 6 or not numbers or not numbers[-1] & UINT8_MAX & ~used:
        return False
    numbers[-1] &= used
    return True


def last_byte_mask(dims: Sequence[int], data_type: DataType) -> int:
    """The bits of the last byte of a tensor's raw data that hold elements."""
    return UINT8_MAX >> data_type.tail_bits(dims)


def set_location(
    tensor: onnx.TensorProto,
    location: str,
    *,
    offset: int | None = None,
    length: int | None = None,
) -> None:
    """Makes a tensor external: clears its data fields and replaces `external_data`."""
    for name in (*DATA_FIELDS, "external_data"):
        tensor.ClearField(name)
    tensor.data_location = EXTERNAL
    for key, value in ((LOCATION, location), (OFFSET, offset), (LENGTH, length)):
        if value is not None:
            tensor.external_data.add(key=key, value=str(value))


def set_raw_data(tensor: onnx.TensorProto, data: bytes) -> None:
    """Makes an external tensor internal, with `data` as its `raw_data`."""
    tensor.ClearField("external_data")
    tensor.ClearField("data_location")
    tensor.raw_data = data


def remove(messages: Any, are_removed: Sequence[bool]) -> None:
    """Removes the messages of a repeated field for which `are_removed` is True, all at once.

    Single deletions take quadratic time.
    """
    marks = iter(are_removed)
    messages.sort(key=lambda message: next(marks))  # stable: kept messages stay in order
    del messages[are_removed.count(False) :]
