"""Reads and strictly checks the header of a safetensors file, and finds the tensors' bytes.

The library safetensors (0.8) copies tensors into memory, and does not support bfloat16 and float8
with numpy. So this module reads the header. The format: 8 bytes with the header's size,
little-endian; the header, a JSON object with data type, shape and offsets of each tensor by name;
the tensors' bytes, little-endian and row-major, without gaps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any, Final

from onnxarchive.errors import (
    ArchiveFormatError,
    TensorNotFoundError,
    UnsupportedFeatureError,
    quoted,
    with_path,
)
from onnxarchive.files.data import Range
from onnxarchive.files.local_file import MappedFile
from onnxarchive.model import dtypes, tensors
from onnxarchive.sources.recognition import HEAD_SIZE, ends_early, kind_of_head
from onnxarchive.sources.source import TensorData

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


def read_safetensors(
    path: str | os.PathLike[str], names: Iterable[str] | None
) -> dict[str, TensorData]:
    """Reads the header of a safetensors file.

    Args:
        path: The file.
        names: The tensors to give; None for all, in the order of their bytes in the file.

    Returns:
        The tensors by name, with data that is not yet read.
    """
    with with_path(path):
        file = MappedFile(path)
        start = _SIZE_NBYTES + _header_nbytes(file)
        header = _parsed(Range(file, _SIZE_NBYTES, start - _SIZE_NBYTES).read())
        metadata = header.pop(_METADATA, {})
        if not (isinstance(metadata, dict) and {str}.issuperset(map(type, metadata.values()))):
            raise ArchiveFormatError(f"{_METADATA}: expected an object whose values are strings")
        ranges = {name: _range(name, fields) for name, fields in header.items()}
        stored = sorted(ranges, key=lambda name: (ranges[name], name))
        end = 0
        for name in stored:
            if ranges[name][0] != end:
                raise ArchiveFormatError(
                    f"tensor {quoted(name)}: expected data_offsets from {end}, without gap or "
                    f"overlap, found {ranges[name][0]}"
                )
            end = ranges[name][1]
        if start + end != file.size:
            missing = start + end - file.size
            remedy = f": it {ends_early(missing)}" if missing > 0 else ""
            raise ArchiveFormatError(
                f"expected a file of {start + end} bytes, as its header says, found {file.size}"
                f"{remedy}"
            )
        elements: dict[str, TensorData] = {}
        for name in stored if names is None else names:
            if name not in ranges:
                message = f"the file has no tensor {quoted(name)}"
                raise TensorNotFoundError(message, name=name, names=ranges)
            (begin, end), fields = ranges[name], header[name]
            if fields["dtype"] not in _NAMES:
                raise UnsupportedFeatureError(
                    f"tensor {quoted(name)}: expected a data type that ONNX stores with the same "
                    f"bytes, found {quoted(fields['dtype'])}"
                )
            data_type = dtypes.BY_NAME[_NAMES[fields["dtype"]]]
            data = Range(file, start + begin, end - begin)
            elements[name] = TensorData(data_type, tuple(fields["shape"]), data)
        return elements


def _header_nbytes(file: MappedFile) -> int:
    rest = file.size - _SIZE_NBYTES
    nbytes = int.from_bytes(file.head(_SIZE_NBYTES), "little") if rest >= 0 else 0
    if not 2 <= nbytes <= min(rest, MAX_HEADER_NBYTES):
        kind = kind_of_head(file.head(HEAD_SIZE), file.size)
        found = kind or f"{nbytes} in a file of {file.size} bytes"
        raise ArchiveFormatError(
            "expected a safetensors file, whose first 8 bytes are the size of its header, found "
            f"{found}"
        )
    return nbytes


def _parsed(header: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(header.decode(), object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:  # ValueError: also for a header that is not UTF-8
        raise ArchiveFormatError(f"expected a header in JSON, found {error}") from error
    if not (header.startswith(b"{") and isinstance(parsed, dict)):
        raise ArchiveFormatError(f"expected a JSON object as header, found {quoted(header)}")
    return parsed


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    "".join(fields).encode()  # refuses a lone surrogate, which JSON can contain as \ud800
    if len(fields) != len(pairs):
        raise ValueError("a name twice")
    return fields


def _range(name: str, fields: Any) -> tuple[int, int]:
    """The offsets of a tensor's bytes, checked against its type and shape."""
    if not (
        isinstance(fields, dict) and fields.keys() == _FIELDS and isinstance(fields["dtype"], str)
    ):
        raise ArchiveFormatError(f"tensor {quoted(name)}: expected {sorted(_FIELDS)} in the header")
    dims, offsets = fields["shape"], fields["data_offsets"]
    data_type = dtypes.BY_NAME.get(_NAMES.get(fields["dtype"], ""))
    if not (
        _are_numbers(dims)
        and tensors.are_dims(dims, data_type)
        and _are_numbers(offsets)
        and len(offsets) == 2
        and offsets[0] <= offsets[1]
    ):
        raise ArchiveFormatError(
            f"tensor {quoted(name)}: expected a valid shape and two offsets in ascending "
            f"order, found {quoted(str(dims))} and {quoted(str(offsets))}"
        )
    nbytes = offsets[1] - offsets[0]
    if data_type is not None and nbytes != data_type.nbytes(dims):
        raise ArchiveFormatError(
            f"tensor {quoted(name)}: expected {data_type.nbytes(dims)} bytes for {fields['dtype']} "
            f"of shape {quoted(dims)}, found {nbytes}"
        )
    return offsets[0], offsets[1]


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
