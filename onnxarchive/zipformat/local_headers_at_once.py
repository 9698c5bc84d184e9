"""For speed only: packs the expected local headers of entries, one or many together.

If an entry's local header in the file has exactly the packed bytes, then
`local_header.check_local_header` would report nothing. If the bytes differ, or if the result is
None, call that function for each entry.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from onnxarchive.buffers import columns
from onnxarchive.zipformat import layout, records
from onnxarchive.zipformat.entries import LEAST_HEADER_SIZE, Directory
from onnxarchive.zipformat.records import DirectoryRecord, LocalHeader

# The fields that a local header shares with its directory record: "version needed" to "file name
# length" (APPNOTE 4.3.7 and 4.3.12).
_COMMON: Final = np.dtype([("first", "V22"), ("name_size", "<u2")])
# A local header up to its name.
_BEFORE_NAME: Final = np.dtype([("signature", "S4"), ("common", _COMMON), ("extra_size", "<u2")])
# An alignment field up to its padding.
_EXTRA: Final = np.dtype([("identifier", "<u2"), ("size", "<u2"), ("alignment", "<u2")])
_COMMON_OFFSET: Final = 6  # in a directory record


def pack_local_header(directory: Directory, number: int, alignment: int) -> bytes | None:
    """The local header of an entry.

    Args:
        directory: The directory of the archive.
        number: Index of the entry.
        alignment: Alignment of the entry's data, in bytes.

    Returns:
        The header; None if it needs a Zip64 field or cannot have this alignment.
    """
    entries, listed = directory.entries, directory.records
    begin = listed.offsets[number] + _COMMON_OFFSET
    common = listed.data[begin : begin + _COMMON.itemsize]
    begin = listed.offsets[number] + DirectoryRecord.SIZE
    name = listed.data[begin : begin + int.from_bytes(common[-2:], "little")]
    end = entries.data_offsets[number]
    padding = end - entries.header_offsets[number] - LEAST_HEADER_SIZE - len(name)
    if not 0 <= padding < alignment or end % alignment or not layout.fits_32(entries.sizes[number]):
        return None
    extra = records.pack_alignment_extra(alignment, padding)
    return b"".join((LocalHeader.SIGNATURE, common, len(extra).to_bytes(2, "little"), name, extra))


def pack_local_headers(directory: Directory, start: int, stop: int, alignment: int) -> bytes | None:
    """The local headers of successive entries, concatenated.

    Args:
        directory: The directory of the archive.
        start: Index of the first entry.
        stop: Index after the last entry.
        alignment: Alignment of all data, in bytes.

    Returns:
        The headers; None if a header needs a Zip64 field or cannot have this alignment.
    """
    entries, listed = directory.entries, directory.records
    header_begins, header_ends, data_sizes, record_begins = (
        np.array(column[start:stop], np.int64)
        for column in (entries.header_offsets, entries.data_offsets, entries.sizes, listed.offsets)
    )
    sizes = header_ends - header_begins
    raw = np.frombuffer(listed.data, np.uint8)
    common = columns.items(raw, record_begins + _COMMON_OFFSET, _COMMON)
    name_sizes = common["name_size"].astype(np.int64)
    paddings = sizes - name_sizes - LEAST_HEADER_SIZE
    if (
        paddings.min() < 0
        or paddings.max() >= alignment
        or (header_ends % alignment).any()
        or not layout.fits_32(int(data_sizes.max()))
    ):
        return None
    before_names = np.empty(len(sizes), _BEFORE_NAME)
    before_names["signature"] = LocalHeader.SIGNATURE
    before_names["common"] = common
    before_names["extra_size"] = paddings + records.ALIGNMENT_EXTRA_SIZE
    extras = np.empty(len(sizes), _EXTRA)
    extras["identifier"] = records.ALIGNMENT_EXTRA
    extras["size"] = paddings + records.ALIGNMENT_EXTRA_SIZE - records.EXTRA_HEADER_SIZE
    extras["alignment"] = alignment
    packed = np.zeros(sizes.sum(), np.uint8)
    begins = np.cumsum(sizes) - sizes
    columns.set_items(packed, begins, before_names)
    names = columns.indexes(record_begins + DirectoryRecord.SIZE, name_sizes)
    begins += LocalHeader.SIZE
    packed[columns.indexes(begins, name_sizes)] = raw[names]
    columns.set_items(packed, begins + name_sizes, extras)
    return packed.tobytes()
