"""For speed only: packs many small entries together, into the same bytes as `layout`."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from onnxarchive.zipformat import layout, records
from onnxarchive.zipformat.records import DirectoryRecord, LocalHeader, pack_alignment_extra

# The fields that a local header shares with its directory record: "version needed" to "file name
# length" (APPNOTE 4.3.7 and 4.3.12).
_COMMON: Final = struct.Struct("<5H3IH")
_BEFORE_COMMON: Final = DirectoryRecord.SIGNATURE + struct.pack(
    "<H", records.MADE_BY_UNIX | records.VERSION_ZIP64
)
# Size of extra fields, size of comment, disk, and both kinds of attributes.
_AFTER_COMMON: Final = struct.pack("<4HI", 0, 0, 0, 0, records.REGULAR_FILE_ATTRIBUTES)
_OFFSET: Final = struct.Struct("<I")
# Item n: the extra fields of a local header with n bytes of padding, at the usual alignment.
_EXTRAS: Final = [
    records.pack_alignment_extra(layout.MIN_ALIGNMENT, padding)
    for padding in range(layout.MIN_ALIGNMENT)
]
# Item n: the size of item n of `_EXTRAS`, as the 2 bytes of the field "extra field length".
_EXTRA_SIZES: Final = [len(extra).to_bytes(2, "little") for extra in _EXTRAS]
_END_SIGNATURES: Final = frozenset(
    int.from_bytes(signature, "little") for signature in layout.END_SIGNATURES
)


@dataclass(frozen=True, slots=True)
class PackedEntries:
    """Successive entries, packed.

    Attributes:
        data: Local header, padding and data of each entry, concatenated.
        directory: The directory records, concatenated.
        header_offsets: Offset of each entry's local header, in bytes.
    """

    data: bytes
    directory: bytes
    header_offsets: list[int]


def pack_entries(
    names: Sequence[str],
    crc32s: Sequence[int],
    contents: Sequence[bytes],
    offset: int,
    alignment: int,
) -> PackedEntries | None:
    """Packs successive entries.

    Args:
        names: Name of each entry.
        crc32s: CRC-32 of each entry's data.
        contents: Data of each entry.
        offset: Offset of the first local header, in bytes.
        alignment: Alignment of all data, in bytes.

    Returns:
        The packed entries. None if a name is not ASCII, if the offset of an entry's header or end
        does not fit 32 bits, or if an entry needs another alignment: then add the entries one by
        one.
    """
    if not (layout.fits_32(offset) and all(map(str.isascii, names))):
        return None
    is_usual = alignment == layout.MIN_ALIGNMENT
    data: list[bytes] = []
    directory: list[bytes] = []
    header_offsets: list[int] = []
    ends: set[int] = set()
    for name, crc32, content in zip(names, crc32s, contents, strict=True):
        encoded, nbytes = name.encode(), len(content)
        common = _COMMON.pack(
            records.VERSION_STORED,
            0,  # flags
            records.METHOD_STORED,
            records.EPOCH_TIME,
            records.EPOCH_DATE,
            crc32,
            nbytes,
            nbytes,
            len(encoded),
        )
        header_offsets.append(offset)
        directory += (_BEFORE_COMMON, common, _AFTER_COMMON, _OFFSET.pack(offset), encoded)
        unpadded_offset = offset + layout.header_size(len(encoded), nbytes)
        padding = -unpadded_offset % alignment
        extra = _EXTRAS[padding] if is_usual else pack_alignment_extra(alignment, padding)
        size = _EXTRA_SIZES[padding] if is_usual else len(extra).to_bytes(2, "little")
        data += (LocalHeader.SIGNATURE, common, size, encoded, extra, content)
        offset = unpadded_offset + padding + nbytes
        if not layout.fits_32(offset):
            return None
        ends.add(offset)
    if not ends.isdisjoint(_END_SIGNATURES):  # see `layout.place`
        return None
    return PackedEntries(b"".join(data), b"".join(directory), header_offsets)
