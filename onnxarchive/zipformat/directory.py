"""Reads the central directory, record by record.

Each broken rule goes to a `Report`. If the report raises, reading stops at the first broken rule;
if the report only collects, reading stops at the first record that cannot be unpacked.

Entries are in directory order without a gap. So the directory alone gives the offset of each
entry's data: the offset of the next local header minus the entry's size. No local header is read to
locate data.
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


class _Listed(NamedTuple):
    """A decoded directory record; values that do not fit 32 bits come from its Zip64 field.

    Attributes:
        name: The entry's name, with escapes for bytes that are not UTF-8.
        is_utf8: True if the name is UTF-8 (NAME-1).
        nbytes: Size of the entry's data in bytes; None if unknown.
        header_offset: Offset of the local header in the file, in bytes; None if unknown.
        record: The record.
        offset: Offset of the record in the directory, in bytes.
    """

    name: str
    is_utf8: bool
    nbytes: int | None
    header_offset: int | None
    record: DirectoryRecord
    offset: int


def read_directory(data: bytes, bounds: Bounds, report: Report) -> Directory:
    """Reads the central directory.

    Args:
        data: The `bounds.size` bytes of the directory.
        bounds: Position of the directory, as returned by `locate`.
        report: Receives each broken rule (ZIP-1, ZIP-3, ZIP-4, ZIP-6, ZIP-8 to ZIP-13, ZIP64-4,
            ALIGN-1, NAME-1).

    Returns:
        The directory, with every entry if nothing was reported. Otherwise, entries whose size or
        offsets are unknown or break ZIP-6 are left out.
    """
    return read_at_once(data, bounds) or read_one_by_one(data, bounds, report)


def read_one_by_one(data: bytes, bounds: Bounds, report: Report) -> Directory:
    """Reads the central directory without `read_at_once`; see `read_directory`."""
    listed = _list(data, bounds, report)
    last = listed[-1] if listed else None
    size = last.offset + last.record.packed_size if last else 0
    is_whole = len(listed) == bounds.entry_count and size == bounds.size
    if last is None:
        if bounds.entry_count == 0 and bounds.offset:
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
    # Each entry ends at the next local header, and the last entry at the directory.
    ends = [following.header_offset for following in listed[1:]]
    ends.append(bounds.offset if is_whole else None)
    entries: list[Entry] = []
    offsets: list[int] = []
    previous_end = 0
    for item, end in zip(listed, ends, strict=True):
        if item.nbytes is None or item.header_offset is None or end is None:
            continue  # the reason has been reported
        entry = Entry(
            item.name, item.header_offset, end - item.nbytes, item.nbytes, item.record.crc32
        )
        # An entry that begins before the previous one ends is left out: no byte is in two entries.
        if entry.header_offset < previous_end:
            report.broken(
                "ZIP-6",
                f"expected its local header at offset {previous_end} or later, after the entries "
                f"before it, found {entry.header_offset}",
                entry=entry.name,
            )
        elif _require_header_space(entry, item.record, bounds, report):
            previous_end = end
            entries.append(entry)
            offsets.append(item.offset)
    names = [item.name if item.is_utf8 else None for item in listed]
    sizes = [item.nbytes for item in listed]
    return Directory(_in_columns(entries), Records(data, offsets), names, sizes, is_whole)


def _in_columns(entries: Sequence[Entry]) -> Entries:
    return Entries(*map(list, zip(*entries, strict=True))) if entries else EMPTY.entries


def _list(data: bytes, bounds: Bounds, report: Report) -> list[_Listed]:
    """Unpacks and checks the records; reports a wrong count or total size as ZIP-4."""
    listed: list[_Listed] = []
    position = 0
    for index in range(bounds.entry_count):
        record = DirectoryRecord.unpack(data, position)
        if record is None:
            report.broken(
                "ZIP-4",
                f"expected directory record {index + 1} of {bounds.entry_count} at offset "
                f"{bounds.offset + position}, found none",
            )
            return listed
        name, is_utf8 = _decode(record.name, report)
        _require_plain_record(record, name, report)
        listed.append(
            _Listed(name, is_utf8, *_size_and_offset(record, name, report), record, position)
        )
        position += record.packed_size
    if position != bounds.size:
        report.broken(
            "ZIP-4",
            f"expected {bounds.entry_count} directory records of {bounds.size} bytes in all, found "
            f"{position} bytes",
        )
    return listed


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
        broken("ZIP-8", records.unequal_sizes(record.compressed_size, record.uncompressed_size))
    if record.version_needed not in VERSIONS_NEEDED:
        broken("ZIP-10", f"expected version needed 10, 20 or 45, found {record.version_needed}")
    mode = record.external_attributes >> records.UNIX_MODE_SHIFT
    dos_attributes = record.external_attributes & records.DOS_ATTRIBUTES_MASK
    if record.version_made_by & records.MADE_BY_SYSTEM_MASK != records.MADE_BY_UNIX:
        broken(
            "ZIP-11",
            f"expected version made by {records.MADE_BY_UNIX:#06x} (Unix) with any lower byte, "
            f"found {record.version_made_by:#06x}",
        )
    if (
        mode & records.UNIX_TYPE_MASK not in (0, records.UNIX_REGULAR)
        or dos_attributes & ~records.DOS_FILE_ATTRIBUTES
        or record.internal_attributes
    ):
        broken(
            "ZIP-11",
            "expected external attributes of a regular file (upper 4 bits 0x8 or 0x0, lower 16 "
            f"bits within {records.DOS_FILE_ATTRIBUTES:#06x}) and internal attributes 0x0000, "
            f"found {record.external_attributes:#010x} and {record.internal_attributes:#06x}",
        )
    if mode & records.UNIX_SPECIAL_BITS:
        broken(
            "ZIP-11",
            "expected permissions without set-user-ID, set-group-ID and sticky bit (unzip tools "
            f"restore these bits), found {mode & 0o7777:#06o}",
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


def _size_and_offset(
    record: DirectoryRecord, name: str, report: Report
) -> tuple[int | None, int | None]:
    """Size of an entry's data and offset of its local header; each None if unknown."""
    nbytes = record.uncompressed_size if layout.fits_32(record.uncompressed_size) else None
    header_offset = record.header_offset if layout.fits_32(record.header_offset) else None
    if not record.extra and nbytes is not None and header_offset is not None:
        return nbytes, header_offset
    # APPNOTE 4.5.3: both sizes, then the header offset; values that fit 32 bits are left out.
    count = (2 if nbytes is None else 0) + (1 if header_offset is None else 0)
    values = _zip64_values(record, count, name, report)
    if values is None:
        return nbytes, header_offset
    if nbytes is None:
        nbytes = values[0]
        if values[1] != nbytes:
            report.broken("ZIP-8", records.unequal_sizes(values[1], nbytes), entry=name)
    if header_offset is None:
        header_offset = values[-1]
    if values != layout.directory_zip64_values(nbytes, header_offset):
        report.broken(
            "ZIP64-4",
            f"expected a Zip64 field of values that do not fit 32 bits, found {values}",
            entry=name,
        )
    return nbytes, header_offset


def _zip64_values(
    record: DirectoryRecord, count: int, name: str, report: Report
) -> tuple[int, ...] | None:
    """The `count` values of the Zip64 field, the only extra field allowed; None if malformed."""
    broken = partial(report.broken, entry=name)
    try:
        fields = list(records.unpack_extra(record.extra))
    except ValueError as error:
        broken("ZIP-13", f"expected complete extra fields, found {error}")
        return None
    identifiers = [identifier for identifier, _ in fields]
    expected = [records.ZIP64_EXTRA] if count else []
    if identifiers != expected:
        broken(
            "ZIP-13",
            f"expected the extra fields {hexadecimal(expected)}, found {hexadecimal(identifiers)}",
        )
    if records.ZIP64_EXTRA in identifiers and record.version_needed < records.VERSION_ZIP64:
        broken(
            "ZIP-10",
            f"expected version needed 45 with a Zip64 field, found {record.version_needed}",
        )
    contents = (content for identifier, content in fields if identifier == records.ZIP64_EXTRA)
    content = next(contents, b"")
    values = records.unpack_zip64_values(content)
    if values is not None and len(values) == count:
        return values
    if identifiers == expected:  # else ZIP-13 was reported
        broken("ZIP64-4", f"expected {count} values in the Zip64 field, found {len(content)} bytes")
    return None


def hexadecimal(identifiers: list[int]) -> str:
    """Formats the ids of extra fields for a message."""
    texts = [f"{identifier:#06x}" for identifier in identifiers[:_MAX_SHOWN_FIELDS]]
    return "[" + ", ".join(texts + ["..."] * (len(identifiers) > _MAX_SHOWN_FIELDS)) + "]"


def _require_header_space(
    entry: Entry, record: DirectoryRecord, bounds: Bounds, report: Report
) -> bool:
    """True if the local header fits the space before the data; reports ZIP-6 and ALIGN-1."""
    least = Placement(record.name, entry.nbytes, 0, 0).unpadded_offset
    space = entry.data_offset - entry.header_offset
    is_inside = entry.data_offset + entry.nbytes <= bounds.offset
    if not (is_inside and least <= space < least + layout.MAX_ALIGNMENT):
        report.broken(
            "ZIP-6",
            f"expected a local header of {least} to {least + layout.MAX_ALIGNMENT - 1} bytes at "
            f"offset {entry.header_offset}, followed by {entry.nbytes} bytes of data, found "
            f"{space} bytes before the data: entries overlap or leave a gap, or the directory "
            f"lists them in another order",
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
