"""Reads the central directory, record by record.

It takes bytes that the caller has read and a `Report` that takes each broken rule. Where the report
raises, reading stops at the first; where it collects, reading goes on as far as the bytes make
sense.

Since entries lie in directory order without a gap, the directory alone says where data begins:
where the next header begins, less the entry's size. No local header is read to open an archive.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from onnxarchive.errors import Report, shown
from onnxarchive.zipformat import layout, records
from onnxarchive.zipformat.directory_at_once import read_at_once
from onnxarchive.zipformat.end_records import Bounds
from onnxarchive.zipformat.entries import EMPTY, VERSIONS_NEEDED, Directory, Entries, Entry, Records
from onnxarchive.zipformat.layout import Placement
from onnxarchive.zipformat.records import DirectoryRecord

_MAX_SHOWN_FIELDS = 8  # in a message


class Listed(NamedTuple):
    """What a directory record says, its values taken from where they stand, Zip64 field or not.

    Attributes:
        name: The entry's name; what is not UTF-8 in it is escaped.
        is_utf8: Whether the name is UTF-8 (NAME-1).
        nbytes: Size of its data in bytes; None where it cannot be told.
        header_offset: Where its local header begins; None where it cannot be told.
        record: The record.
        offset: Where the record begins, in bytes from the start of the directory.
    """

    name: str
    is_utf8: bool
    nbytes: int | None
    header_offset: int | None
    record: DirectoryRecord
    offset: int


def read(data: bytes, bounds: Bounds, report: Report) -> Directory:
    """Reads the central directory.

    Args:
        data: Its bytes, `bounds.size` of them.
        bounds: Where it lies, as `locate` gives it.
        report: Takes each broken rule (ZIP-1, ZIP-3, ZIP-4, ZIP-6, ZIP-8 to ZIP-13, ZIP64-4,
            ALIGN-1, NAME-1).

    Returns:
        The entries whose records make sense; all of them where nothing was reported.
    """
    return read_at_once(data, bounds) or _read_one_by_one(data, bounds, report)


def _read_one_by_one(data: bytes, bounds: Bounds, report: Report) -> Directory:
    listed, is_whole = _list(data, bounds, report)
    entries: list[Entry] = []
    offsets: list[int] = []
    if not listed:
        if bounds.count == 0 and bounds.offset:
            report.broken(
                "ZIP-6", f"expected entries up to the directory at {bounds.offset}, found none"
            )
        return Directory(EMPTY.entries, Records(data, ()), is_whole=is_whole)
    if listed[0].header_offset not in (0, None):
        report.broken(
            "ZIP-1",
            f"expected the first local header at offset 0, found {listed[0].header_offset}",
            entry=listed[0].name,
        )
    ends = [following.header_offset for following in listed[1:]]
    ends.append(bounds.offset if is_whole else None)
    end_of_last = 0
    for item, end in zip(listed, ends, strict=True):
        name, _, nbytes, header_offset, record, offset = item
        if nbytes is None or header_offset is None or end is None:
            continue  # why that is has been reported
        entry = Entry(name, header_offset, end - nbytes, nbytes, record.crc32)
        if header_offset < end_of_last:
            # Nothing is read twice, whatever the directory says.
            report.broken(
                "ZIP-6",
                f"expected its local header at offset {end_of_last} or behind, where the entries "
                f"before it end, found {header_offset}",
                entry=name,
            )
        elif _require_header_space(entry, record, bounds, report):
            end_of_last = end
            entries.append(entry)
            offsets.append(offset)
    names = [item.name if item.is_utf8 else None for item in listed]
    sizes = [item.nbytes for item in listed]
    return Directory(_in_columns(entries), Records(data, offsets), names, sizes, is_whole)


def _in_columns(entries: Sequence[Entry]) -> Entries:
    return Entries(*map(list, zip(*entries, strict=True))) if entries else EMPTY.entries


def _list(data: bytes, bounds: Bounds, report: Report) -> tuple[list[Listed], bool]:
    """The records, and whether they are those that are counted (ZIP-4)."""
    listed: list[Listed] = []
    position = 0
    for index in range(bounds.count):
        record = DirectoryRecord.unpack(data, position)
        if record is None:
            report.broken(
                "ZIP-4",
                f"expected directory record {index + 1} of {bounds.count} at offset "
                f"{bounds.offset + position}, found none",
            )
            return listed, False
        name, is_utf8 = _decode(record.name, report)
        _require_plain_record(record, name, report)
        listed.append(Listed(name, is_utf8, *_values(record, name, report), record, position))
        position += record.packed_size
    if position != bounds.size:
        report.broken(
            "ZIP-4",
            f"expected the {bounds.count} directory records to fill {bounds.size} bytes, found "
            f"{position} bytes of them",
        )
    return listed, position == bounds.size


def _decode(encoded: bytes, report: Report) -> tuple[str, bool]:
    try:
        return encoded.decode(), True
    except UnicodeDecodeError:
        name = encoded.decode(errors="backslashreplace")
        report.broken(
            "NAME-1", f"expected a name in UTF-8, found the bytes {shown(encoded)}", entry=name
        )
        return name, False


def _require_plain_record(record: DirectoryRecord, name: str, report: Report) -> None:
    broken = partial(report.broken, entry=name)
    expected_flags = 0 if record.name.isascii() else records.FLAG_UTF8
    if record.flags != expected_flags:
        broken("ZIP-9", f"expected flags {expected_flags:#06x}, found {_flag_names(record.flags)}")
    if record.method != records.METHOD_STORED:
        broken("ZIP-8", f"expected method 0 (stored), found {record.method}")
    if record.compressed_size != record.uncompressed_size:
        broken(
            "ZIP-8",
            f"expected equal sizes, found {record.compressed_size} bytes stored of "
            f"{record.uncompressed_size}",
        )
    if record.version_needed not in VERSIONS_NEEDED:
        broken("ZIP-10", f"expected version needed 10, 20 or 45, found {record.version_needed}")
    unix_type = record.external_attributes >> records.UNIX_MODE_SHIFT & records.UNIX_TYPE_MASK
    dos_attributes = record.external_attributes & records.DOS_ATTRIBUTES_MASK
    if record.version_made_by & records.MADE_BY_SYSTEM_MASK != records.MADE_BY_UNIX:
        broken(
            "ZIP-11",
            f"expected version made by {records.MADE_BY_UNIX:#06x} (Unix) with any lower byte, "
            f"found {record.version_made_by:#06x}",
        )
    if (
        unix_type not in (0, records.UNIX_REGULAR)
        or dos_attributes & ~records.DOS_FILE_ATTRIBUTES
        or record.internal_attributes
    ):
        broken(
            "ZIP-11",
            f"expected the attributes of a regular file (type 0x8 or 0x0 in the upper 4 bits, of "
            f"the lower 16 bits none but {records.DOS_FILE_ATTRIBUTES:#06x}) and internal 0x0000, "
            f"found {record.external_attributes:#010x} and internal "
            f"{record.internal_attributes:#06x}",
        )
    if record.comment:
        broken("ZIP-12", f"expected no comment, found {len(record.comment)} bytes")
    if record.disk_start:
        broken("ZIP-3", f"expected disk 0, found {record.disk_start}")


def _flag_names(flags: int) -> str:
    encrypted = records.FLAG_ENCRYPTED | records.FLAG_STRONG_ENCRYPTION | records.FLAG_MASKED_HEADER
    if flags & encrypted:
        return f"{flags:#06x} (encrypted)"
    if flags & records.FLAG_DATA_DESCRIPTOR:
        return f"{flags:#06x} (sizes in a data descriptor)"
    return f"{flags:#06x}"


def _values(record: DirectoryRecord, name: str, report: Report) -> tuple[int | None, int | None]:
    """Size and header offset of an entry, each None where it cannot be told."""
    broken = partial(report.broken, entry=name)
    size_fits = layout.fits_32(record.uncompressed_size)
    offset_fits = layout.fits_32(record.header_offset)
    if not record.extra and size_fits and offset_fits:
        return record.uncompressed_size, record.header_offset
    plain = (
        record.uncompressed_size if size_fits else None,
        record.header_offset if offset_fits else None,
    )
    try:
        fields = list(records.unpack_extra(record.extra))
    except ValueError as error:
        broken("ZIP-13", f"expected whole extra fields, found {error}")
        return plain
    identifiers = [identifier for identifier, _ in fields]
    if records.ZIP64_EXTRA in identifiers and record.version_needed < records.VERSION_ZIP64:
        broken(
            "ZIP-10",
            f"expected version needed 45 beside a Zip64 field, found {record.version_needed}",
        )
    expected_identifiers = [] if size_fits and offset_fits else [records.ZIP64_EXTRA]
    if identifiers != expected_identifiers:
        broken(
            "ZIP-13",
            f"expected the extra fields {hexadecimal(expected_identifiers)}, found "
            f"{hexadecimal(identifiers)}",
        )
    zip64 = next(
        (content for identifier, content in fields if identifier == records.ZIP64_EXTRA), b""
    )
    values = records.unpack_zip64_values(zip64)
    expected_count = (0 if size_fits else 2) + (0 if offset_fits else 1)
    if values is None or len(values) != expected_count:
        # Where the field is missing as a whole, ZIP-13 has said so.
        if identifiers == expected_identifiers:
            broken(
                "ZIP64-4",
                f"expected {expected_count} values in the Zip64 field, found {len(zip64)} bytes",
            )
        if not (size_fits and offset_fits):
            return plain
        values = ()
    nbytes, compressed_size = (record.uncompressed_size,) * 2 if size_fits else values[:2]
    header_offset = record.header_offset if offset_fits else values[-1]
    if compressed_size != nbytes:
        broken("ZIP-8", f"expected equal sizes, found {compressed_size} bytes stored of {nbytes}")
    if values != layout.directory_zip64_values(nbytes, header_offset):
        broken("ZIP64-4", f"expected only values that do not fit 32 bits, found {values}")
    return nbytes, header_offset


def hexadecimal(identifiers: list[int]) -> str:
    """The identifiers of extra fields as a message shows them."""
    texts = [f"{identifier:#06x}" for identifier in identifiers[:_MAX_SHOWN_FIELDS]]
    return "[" + ", ".join(texts + ["..."] * (len(identifiers) > _MAX_SHOWN_FIELDS)) + "]"


def _require_header_space(
    entry: Entry, record: DirectoryRecord, bounds: Bounds, report: Report
) -> bool:
    """Whether the local header has room between its offset and the data, and no more than that."""
    least = Placement(record.name, entry.nbytes, 0, 0).unpadded_offset
    space = entry.data_offset - entry.header_offset
    is_inside = entry.data_offset + entry.nbytes <= bounds.offset
    if not (is_inside and least <= space < least + layout.MAX_ALIGNMENT):
        report.broken(
            "ZIP-6",
            f"expected {least} to {least + layout.MAX_ALIGNMENT - 1} "
            f"bytes of local header at offset {entry.header_offset} before {entry.nbytes} bytes "
            f"of data, found {space}: entries overlap or leave a gap, or the directory is not "
            f"in their order",
            entry=entry.name,
        )
        return False
    if entry.data_offset % layout.MIN_ALIGNMENT:
        report.broken(
            "ALIGN-1",
            f"expected its data at a multiple of {layout.MIN_ALIGNMENT}, "
            f"found offset {entry.data_offset}",
            entry=entry.name,
        )
    return True
