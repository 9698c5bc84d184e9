"""The layout of an archive: alignment, padding and Zip64, computed from sizes alone.

The writer packs the results of these functions, and the reader compares an archive with the same
results. So equal entries with equal alignments have one layout.
"""

from __future__ import annotations

from typing import NamedTuple

from onnxarchive.zipformat import records
from onnxarchive.zipformat.records import (
    DirectoryRecord,
    EndRecord,
    LocalHeader,
    Zip64EndRecord,
    Zip64Locator,
)

MAX_ENTRIES = 1 << 18
MIN_ALIGNMENT = 64
MAX_ALIGNMENT = 1 << 15  # with a larger power of two, padding may not fit an extra field
ALIGNMENTS = frozenset(1 << exponent for exponent in range(6, 16))
_LOCAL_ZIP64_SIZE = len(records.pack_zip64_extra(0, 0))  # with both sizes
END_SIGNATURES = (EndRecord.SIGNATURE, Zip64EndRecord.SIGNATURE, Zip64Locator.SIGNATURE)


def require_alignment(value: object) -> None:
    """Refuses an invalid alignment.

    Raises:
        ValueError: `value` is not a power of two from 64 to 32768.
    """
    if not (isinstance(value, int) and value in ALIGNMENTS):
        raise ValueError(
            f"alignment must be a power of two from {MIN_ALIGNMENT} to {MAX_ALIGNMENT}, got "
            f"{value!r}"
        )


def fits_16(value: int) -> bool:
    """True if `value` fits a field of 16 bits, whose largest number means "see Zip64"."""
    return value < records.SATURATED_16


def fits_32(value: int) -> bool:
    """True if `value` fits a field of 32 bits, whose largest number means "see Zip64"."""
    return value < records.SATURATED_32


def local_zip64_values(nbytes: int) -> tuple[int, ...]:
    """The values in the Zip64 field of a local header: both sizes or none (APPNOTE 4.5.3)."""
    return () if fits_32(nbytes) else (nbytes, nbytes)


def header_size(name_size: int, nbytes: int) -> int:
    """Size of a local header without padding, in bytes, by the sizes of the name and the data."""
    zip64_size = _LOCAL_ZIP64_SIZE if nbytes >= records.SATURATED_32 else 0
    return LocalHeader.SIZE + name_size + zip64_size + records.ALIGNMENT_EXTRA_SIZE


def directory_zip64_values(nbytes: int, header_offset: int) -> tuple[int, ...]:
    """The values in the Zip64 field of a directory record: those that do not fit 32 bits."""
    offset = () if fits_32(header_offset) else (header_offset,)
    return local_zip64_values(nbytes) + offset


def needs_zip64_end(count: int, directory_size: int, directory_offset: int) -> bool:
    """True if a value does not fit its field of the end record."""
    return not (fits_16(count) and fits_32(directory_size) and fits_32(directory_offset))


def holds_signature(offset: int) -> bool:
    """True if the packed offset contains a signature, which misleads some zip readers (ZIP-16)."""
    packed = offset.to_bytes(4 if offset < records.SATURATED_32 else 8, "little")
    return b"PK" in packed and any(signature in packed for signature in END_SIGNATURES)


def padding(offset: int, alignment: int) -> int:
    """The number of bytes from an offset to the next multiple of an alignment."""
    return -offset % alignment


class EntryLayout(NamedTuple):
    """Position of an entry in an archive; gives its local header and its directory record.

    Attributes:
        name: The entry's name in UTF-8.
        nbytes: Size of the data in bytes.
        crc32: CRC-32 of the data.
        header_offset: Offset of the local header in the file, in bytes.
        alignment: Alignment of `data_offset` in bytes, a power of two.
    """

    name: bytes
    nbytes: int
    crc32: int
    header_offset: int
    alignment: int = MIN_ALIGNMENT

    @property
    def padding(self) -> int:
        """Number of zero bytes before the data."""
        return padding(self.unpadded_offset, self.alignment)

    @property
    def data_offset(self) -> int:
        """Offset of the data in the file, in bytes."""
        return self.unpadded_offset + self.padding

    @property
    def end(self) -> int:
        """Offset of the end of the data in the file, in bytes."""
        return self.data_offset + self.nbytes

    @property
    def unpadded_offset(self) -> int:
        """Offset of the data if there were no padding, in bytes."""
        return self.header_offset + header_size(len(self.name), self.nbytes)

    def pack(self) -> tuple[bytes, bytes]:
        """The local header, with the padding before the data, and the directory record."""
        name, nbytes, crc32, header_offset, alignment = self
        local_extra = records.pack_alignment_extra(alignment, self.padding)
        extra = b""
        size, offset = nbytes, header_offset
        is_small = size < records.SATURATED_32 > offset
        if not is_small:
            size, offset = min(size, records.SATURATED_32), min(offset, records.SATURATED_32)
            zip64_values = local_zip64_values(nbytes)
            local_extra = records.pack_zip64_extra(*zip64_values) + local_extra
            extra = records.pack_zip64_extra(*directory_zip64_values(nbytes, header_offset))
        shared = (
            records.VERSION_STORED if is_small else records.VERSION_ZIP64,
            0 if name.isascii() else records.FLAG_UTF8,
            records.METHOD_STORED,
            records.EPOCH_TIME,
            records.EPOCH_DATE,
            crc32,
            size,
            size,
            len(name),
        )
        # Packed by hand: with a `LocalHeader` and a `DirectoryRecord` for each of many small
        # entries, it would take half as long again.
        local = LocalHeader.STRUCT.pack(LocalHeader.SIGNATURE, *shared, len(local_extra))
        record = DirectoryRecord.STRUCT.pack(
            DirectoryRecord.SIGNATURE,
            records.MADE_BY_UNIX | records.VERSION_ZIP64,
            *shared,
            len(extra),
            0,  # size of the comment
            0,  # disk
            0,  # internal attributes
            records.REGULAR_FILE_ATTRIBUTES,
            offset,
        )
        return local + name + local_extra, record + name + extra


def lay_out(name: str, nbytes: int, crc32: int, header_offset: int, alignment: int) -> EntryLayout:
    """Computes the layout of a new entry.

    The alignment is doubled, up to `MAX_ALIGNMENT`, while the offset of the entry's end holds a
    signature (ZIP-16).

    Args:
        name: Name of the entry.
        nbytes: Size of the data in bytes.
        crc32: CRC-32 of the data.
        header_offset: Offset of the local header in the archive, in bytes.
        alignment: Least alignment of the data, in bytes.
    """
    encoded = name.encode()
    begin = header_offset + header_size(len(encoded), nbytes)
    while alignment < MAX_ALIGNMENT:
        if not holds_signature(begin + padding(begin, alignment) + nbytes):
            break
        alignment *= 2
    return EntryLayout(encoded, nbytes, crc32, header_offset, alignment)


def layout_of_header(local: LocalHeader, header_offset: int) -> EntryLayout | None:
    """The layout of an entry by its local header; None if the alignment field is missing or wrong.

    Args:
        local: The local header.
        header_offset: Offset of the local header in the file, in bytes.
    """
    try:
        *others, (identifier, content) = records.unpack_extra(local.extra)
    except ValueError:
        return None
    stated = records.unpack_alignment(content) if identifier == records.ALIGNMENT_EXTRA else None
    if stated is None or stated[0] not in ALIGNMENTS:
        return None
    nbytes = local.uncompressed_size
    if not fits_32(nbytes) and others:
        values = records.unpack_zip64_values(others[0][1])
        nbytes, *_ = values or (nbytes,)
    placed = EntryLayout(local.name, nbytes, local.crc32, header_offset, stated[0])
    return placed if placed.data_offset - header_offset == local.packed_size else None


def end_of_archive(count: int, directory_size: int, directory_offset: int) -> bytes:
    """The bytes after the directory: Zip64 record and locator if needed, then the end record.

    With Zip64, counts, size and offset in the end record are saturated, so none is stated twice.

    Args:
        count: Number of entries.
        directory_size: Size of the central directory in bytes.
        directory_offset: Offset of the central directory in the file, in bytes.
    """
    zip64 = b""
    if needs_zip64_end(count, directory_size, directory_offset):
        zip64_record = Zip64EndRecord(
            stated_size=Zip64EndRecord.STATED_SIZE,
            version_made_by=records.MADE_BY_UNIX | records.VERSION_ZIP64,
            version_needed=records.VERSION_ZIP64,
            disk=0,
            directory_disk=0,
            disk_entry_count=count,
            entry_count=count,
            directory_size=directory_size,
            directory_offset=directory_offset,
        )
        locator = Zip64Locator(
            record_disk=0, record_offset=directory_offset + directory_size, disks=1
        )
        zip64 = zip64_record.pack() + locator.pack()
        count = records.SATURATED_16
        directory_size = directory_offset = records.SATURATED_32
    end_record = EndRecord(
        disk=0,
        directory_disk=0,
        disk_entry_count=count,
        entry_count=count,
        directory_size=directory_size,
        directory_offset=directory_offset,
        comment_size=0,
    )
    return zip64 + end_record.pack()
