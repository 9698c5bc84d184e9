"""Reads and strictly checks the header of a safetensors file, and finds the tensors' bytes.

The library safetensors (0.8) copies tensors into memory, and does not support bfloat16 and float8
with numpy. So this module reads the header. The format: 8 bytes with the header's size,
little-endian; the header, a JSON object with data type, shape and offsets of each tensor by name;
the tensors' bytes, little-endian and row-major, without gaps.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any, Final

from onnxarchive.errors import ArchiveFormatError, UnsupportedFeatureError, shown, with_path
from onnxarchive.files.file_data import FileData
from onnxarchive.model import dtypes, tensors
from onnxarchive.model.dtypes import DataType
from onnxarchive.sources.recognition import HEAD_SIZE, ends_early, kind_of_head

MAX_HEADER_NBYTES: Final = 100_000_000  # limit of the library
_SIZE_NBYTES: Final = 8
_METADATA: Final = "__metadata__"
_FIELDS: Final = {"dtype", "shape", "data_offsets"}

# Key: a data type's name in safetensors. Value: its name in ONNX. 6-bit types are missing, since
# their packing is unspecified. PyTorch packs 4-bit types as ONNX does.
_NAMES = {
    **{
        f"{letter}{bits}": f"{name}{bits}"
        for letter, name in (("I", "INT"), ("U", "UINT"))
        for bits in (8, 16, 32, 64)
    },
    "BOOL": "BOOL",
    "F16": "FLOAT16",
    "F32": "FLOAT",
    "F64": "DOUBLE",
    "BF16": "BFLOAT16",
    "C64": "COMPLEX64",
    "F8_E4M3": "FLOAT8E4M3FN",
    "F8_E4M3FNUZ": "FLOAT8E4M3FNUZ",
    "F8_E5M2": "FLOAT8E5M2",
    "F8_E5M2FNUZ": "FLOAT8E5M2FNUZ",
    "F8_E8M0": "FLOAT8E8M0",
    "F4": "FLOAT4E2M1",
}
_BY_NAME = {data_type.name: data_type for data_type in dtypes.BY_NUMBER.values()}


@dataclass(frozen=True, slots=True)
class SafetensorsTensor:
    """A tensor of a safetensors file.

    Attributes:
        name: Name of the tensor.
        dtype: Data type, as spelled in the file.
        dims: Shape.
        data: Bytes of the tensor, not yet read.
    """

    name: str
    dtype: str
    dims: tuple[int, ...]
    data: FileData

    @property
    def data_type(self) -> DataType:
        """The tensor's data type in ONNX.

        Raises:
            UnsupportedFeatureError: ONNX has no such data type, or stores it as other bytes.
        """
        if self.dtype not in _NAMES:
            raise UnsupportedFeatureError(
                f"tensor {shown(self.name)}: expected a data type that ONNX stores with the same "
                f"bytes, found {shown(self.dtype)}"
            )
        return _BY_NAME[_NAMES[self.dtype]]


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, SafetensorsTensor]:
    """Reads the header of a safetensors file.

    Returns:
        The tensors by name, in the order of their bytes in the file.

    Raises:
        ArchiveFormatError: The file is no safetensors file, or not of the size that its header
            states.
        OSError: The file cannot be read.
    """
    with with_path(path):
        whole = FileData.of(path)
        start = _SIZE_NBYTES + _header_nbytes(whole)
        header = _parsed(whole.part(_SIZE_NBYTES, start - _SIZE_NBYTES).read())
        metadata = header.pop(_METADATA, {})
        if not (
            isinstance(metadata, dict) and all(isinstance(it, str) for it in metadata.values())
        ):
            raise ArchiveFormatError(f"{_METADATA}: expected an object whose values are strings")
        places = sorted((_place(name, given), name) for name, given in header.items())
        end = 0
        for (begin, next_end), name in places:
            if begin != end:
                raise ArchiveFormatError(
                    f"tensor {shown(name)}: expected data_offsets from {end}, without gap or "
                    f"overlap, found {begin}"
                )
            end = next_end
        if start + end != whole.nbytes:
            missing = start + end - whole.nbytes
            remedy = f": it {ends_early(missing)}" if missing > 0 else ""
            raise ArchiveFormatError(
                f"expected a file of {start + end} bytes, as its header says, found {whole.nbytes}"
                f"{remedy}"
            )
        return {
            name: SafetensorsTensor(
                name,
                header[name]["dtype"],
                tuple(header[name]["shape"]),
                whole.part(start + begin, end - begin),
            )
            for (begin, end), name in places
        }


def _header_nbytes(whole: FileData) -> int:
    rest = whole.nbytes - _SIZE_NBYTES
    given = int.from_bytes(whole.part(0, _SIZE_NBYTES).read(), "little") if rest >= 0 else 0
    if not 2 <= given <= min(rest, MAX_HEADER_NBYTES):
        head = whole.part(0, min(whole.nbytes, HEAD_SIZE)).read()
        found = kind_of_head(head, whole.nbytes) or f"{given} in a file of {whole.nbytes} bytes"
        raise ArchiveFormatError(
            "expected a safetensors file, whose first 8 bytes are the size of its header, found "
            f"{found}"
        )
    return given


def _parsed(header: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(header.decode(), object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:  # ValueError: also for a header that is not UTF-8
        raise ArchiveFormatError(f"expected a header in JSON, found {error}") from error
    if not (header.startswith(b"{") and isinstance(parsed, dict)):
        raise ArchiveFormatError(f"expected a JSON object as header, found {shown(header)}")
    return parsed


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    "".join(found).encode()  # refuses a lone surrogate, which JSON can contain as \ud800
    if len(found) != len(pairs):
        raise ValueError("a name twice")
    return found


def _place(name: str, given: Any) -> tuple[int, int]:
    """The offsets of a tensor's bytes, checked against its type and shape."""
    if not (
        isinstance(given, dict) and given.keys() == _FIELDS and isinstance(given["dtype"], str)
    ):
        raise ArchiveFormatError(f"tensor {shown(name)}: expected {sorted(_FIELDS)} in the header")
    dims, offsets = given["shape"], given["data_offsets"]
    data_type = _BY_NAME.get(_NAMES.get(given["dtype"], ""))
    if not (
        _are_numbers(dims)
        and tensors.are_dims(dims, data_type)
        and _are_numbers(offsets)
        and len(offsets) == 2
        and offsets[0] <= offsets[1]
    ):
        raise ArchiveFormatError(
            f"tensor {shown(name)}: expected a valid shape and two offsets in ascending "
            f"order, found {shown(str(dims))} and {shown(str(offsets))}"
        )
    nbytes = offsets[1] - offsets[0]
    if data_type is not None and nbytes != data_type.nbytes(dims):
        raise ArchiveFormatError(
            f"tensor {shown(name)}: expected {data_type.nbytes(dims)} bytes for {given['dtype']} "
            f"of shape {shown(dims)}, found {nbytes}"
        )
    return offsets[0], offsets[1]


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(it) is int and it >= 0 for it in values)
