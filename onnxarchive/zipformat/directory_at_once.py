"""For speed only: reads the records of a usual directory together, with numpy.

`read_at_once` returns the same as `directory.read_one_by_one`, or None. After None, the caller
calls `read_one_by_one`.
"""

from __future__ import annotations

import operator
from functools import reduce
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from onnxarchive.buffers import columns
from onnxarchive.buffers.lines import Lines
from onnxarchive.zipformat import layout, records
from onnxarchive.zipformat.end_records import Bounds
from onnxarchive.zipformat.entries import (
    LEAST_HEADER_SIZE,
    VERSIONS_NEEDED,
    Directory,
    Entries,
    Records,
)
from onnxarchive.zipformat.records import DirectoryRecord

if TYPE_CHECKING:
    from numpy.typing import NDArray


_PIECE_SIZE: Final = 1 << 16  # bytes searched at a time
ROWS: Final = 1 << 12  # records checked at a time; their columns fit a core's cache
# A directory record (APPNOTE 4.3.12); `dos` and `unix` are the halves of the external attributes.
_PACKED: Final = np.dtype(
    [
        ("signature", "S4"),
        *((name, "<u2") for name in ("made_by", "needed", "flags", "method", "time", "date")),
        *((name, "<u4") for name in ("crc32", "compressed_size", "size")),
        *((name, "<u2") for name in ("name_size", "extra_size", "comment_size", "disk")),
        *((f"{name}_attributes", "<u2") for name in ("internal", "dos", "unix")),
        ("header_offset", "<u4"),
    ]
)
# The Zip64 field of a record in which only the header offset does not fit 32 bits (APPNOTE 4.5.3).
_PACKED_ZIP64: Final = np.dtype([("identifier", "<u2"), ("size", "<u2"), ("header_offset", "<i8")])


def read_at_once(data: bytes, bounds: Bounds) -> Directory | None:
    """Reads a directory that breaks no rule and has ASCII names and sizes that fit 32 bits.

    Args:
        data: The bytes of the directory.
        bounds: Position of the directory.

    Returns:
        The directory. None if it has no records, may break a rule, has a name beyond ASCII, or has
        a size that does not fit 32 bits.
    """
    raw = np.frombuffer(data, np.uint8)
    begins = _record_offsets(raw)
    if begins.size != bounds.entry_count or not begins.size or begins[0] != 0:
        return None
    ends = np.append(begins[1:], raw.size)
    parts = []
    for first in range(0, begins.size, ROWS):
        part = _sound_records(data, begins[first : first + ROWS], ends[first : first + ROWS])
        if part is None:
            return None
        parts.append(part)
    names, header_offset, size, name_size, crc32 = columns.joined(parts)
    data_offset = np.append(header_offset[1:], bounds.offset) - size
    padding = data_offset - header_offset - name_size - LEAST_HEADER_SIZE
    if (
        header_offset[0] != 0
        or padding.min() < 0
        or padding.max() >= layout.MAX_ALIGNMENT
        or (data_offset % layout.MIN_ALIGNMENT).any()
        or not names.isascii()
        or names.count(b"\n") != begins.size
    ):
        return None
    found = map(columns.integers, (header_offset, data_offset, size, crc32))
    entries = Entries(Lines(names.decode()), *found)
    listed = Records(data, columns.integers(begins))
    return Directory(entries, listed, entries.names, entries.sizes)


class _SoundRecords(NamedTuple):
    """Columns of valid records; `names` has one name per line."""

    names: bytes
    header_offset: NDArray[np.int64]
    size: NDArray[np.uint32]
    name_size: NDArray[np.uint16]
    crc32: NDArray[np.uint32]


def _sound_records(
    data: bytes, begins: NDArray[np.int64], ends: NDArray[np.int64]
) -> _SoundRecords | None:
    """Decodes the records with these begins and ends; None if a record may break a rule."""
    raw = np.frombuffer(data, np.uint8)
    packed = columns.items(raw, begins, _PACKED)
    size, name_size, crc32 = (packed[field].copy() for field in ("size", "name_size", "crc32"))
    header_offset = packed["header_offset"].astype(np.int64)
    has_zip64 = header_offset == records.SATURATED_32
    name_begins = begins + DirectoryRecord.SIZE
    name_ends = name_begins + name_size
    zip64 = columns.items(raw, name_ends[has_zip64], _PACKED_ZIP64)
    header_offset[has_zip64] = zip64["header_offset"]
    # The file type, and the bits that must be 0.
    unix_type = packed["unix_attributes"] & (records.UNIX_TYPE_MASK | records.UNIX_SPECIAL_BITS)
    extra_size = np.where(has_zip64, _PACKED_ZIP64.itemsize, 0)
    is_sound = (
        (packed["made_by"] & records.MADE_BY_SYSTEM_MASK == records.MADE_BY_UNIX)
        & reduce(operator.or_, [packed["needed"] == version for version in VERSIONS_NEEDED])
        & (packed["flags"] == 0)
        & (packed["method"] == records.METHOD_STORED)
        & (packed["compressed_size"] == size)
        & (size < records.SATURATED_32)
        & (packed["extra_size"] == extra_size)
        & (packed["comment_size"] == 0)
        & (packed["disk"] == 0)
        & (packed["internal_attributes"] == 0)
        & (packed["dos_attributes"] & ~np.uint16(records.DOS_FILE_ATTRIBUTES) == 0)
        & ((unix_type == 0) | (unix_type == records.UNIX_REGULAR))
        & (name_ends + extra_size == ends)
    )
    is_sound_zip64 = (
        (zip64["identifier"] == records.ZIP64_EXTRA)
        & (zip64["size"] == zip64["header_offset"].itemsize)
        & (zip64["header_offset"] >= records.SATURATED_32)
        & (packed["needed"][has_zip64] == records.VERSION_ZIP64)
    )
    if not (is_sound.all() and is_sound_zip64.all()):
        return None
    names = columns.lines(data, name_begins, name_ends)
    return _SoundRecords(names, header_offset, size, name_size, crc32)


def _record_offsets(raw: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Offsets of all bytes that read as a signature of a directory record, even inside records."""
    first, *others = DirectoryRecord.SIGNATURE
    searched = raw[: 1 - DirectoryRecord.SIZE]
    parts = []
    for start in range(0, max(searched.size, 1), _PIECE_SIZE):
        found = np.flatnonzero(searched[start : start + _PIECE_SIZE] == first) + start
        for distance, byte in enumerate(others, 1):
            found = found[raw[found + distance] == byte]
        parts.append(found.astype(np.int64, copy=False))
    return np.concatenate(parts)
