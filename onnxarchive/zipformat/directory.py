"""Reads the central directory, record by record.

Each broken rule goes to a `Report`. If the report raises, reading stops at the first broken rule;
if the report only collects, reading stops at the first record that cannot be unpacked.

Entries are in directory order without a gap. So the directory alone gives the offset of each
entry's data: the offset of the next local header minus the entry's size. No local header is read to
locate data.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

from onnxarchive.errors import Report, quoted
from onnxarchive.zipformat import layout, records
from onnxarchive.zipformat.end_records import Bounds
from onnxarchive.zipformat.records import DirectoryRecord

_VERSIONS_NEEDED: Final = (records.VERSION_STORED, records.VERSION_FOLDER, records.VERSION_ZIP64)
# A `DirectoryRecord` in parts: all before the time, skipped time and date, CRC-32, both sizes, size
# of the name, all between it and the offset, offset of the local header.
_PARTS: Final = struct.Struct("<12s4x3IH12sI")
_BEFORE_TIME: Final = struct.Struct("<4s4H")
_BEFORE_OFFSET: Final = struct.Struct("<4HI")
# The Zip64 field of an entry below 4 GiB whose local header is at 4 GiB or more: only the offset.
_OFFSET_FIELD: Final = struct.Struct("<HHQ")
_OFFSET_FIELD_SIZE: Final = _OFFSET_FIELD.size - records.EXTRA_HEADER_SIZE


def _usual_parts(version_needed: int, extra_size: int) -> tuple[bytes, bytes]:
    """The parts before the time and before the offset, in records that this library writes."""
    before_time = _BEFORE_TIME.pack(
        DirectoryRecord.SIGNATURE,
        records.MADE_BY_UNIX | records.VERSION_ZIP64,
        version_needed,
        0,  # flags of an ASCII name
        records.METHOD_STORED,
    )
    before_offset = _BEFORE_OFFSET.pack(
        extra_size,
        0,  # size of the comment
        0,  # disk
        0,  # internal attributes
        records.REGULAR_FILE_ATTRIBUTES,
    )
    return before_time, before_offset


_USUAL: Final = _usual_parts(records.VERSION_STORED, 0)
_USUAL_ZIP64: Final = _usual_parts(records.VERSION_ZIP64, _OFFSET_FIELD.size)
_MAX_SHOWN_FIELDS: Final = 8  # in a message


class Entry(NamedTuple):
    """One entry of an archive.

    Attributes:
        name: The entry's name.
        header_offset: Offset of its local header in the file, in bytes.
        data_offset: Offset of its data in the file, in bytes.
        nbytes: Size of its data in bytes.
        crc32: CRC-32 of its data, as stated in the directory.

    Example:
        with onnxarchive.open("model.onnxa") as archive:
            for entry in archive.entries.values():
                print(entry.name, entry.data_offset, entry.nbytes)
    """

    name: str
    header_offset: int
    data_offset: int
    nbytes: int
    crc32: int


class Directory(NamedTuple):
    """The content of the central directory.

    Attributes:
        entries: The entries in directory order. Names may repeat.
        records: The packed directory record of each entry.
        names: Names of all records, even if the entry was left out; None for a name not in UTF-8.
        sizes: Size of every record's data in bytes; None if unknown.
        is_whole: True if number and size of the records match the end records.
    """

    entries: Sequence[Entry]
    records: Sequence[bytes]
    names: Sequence[str | None] = ()
    sizes: Sequence[int | None] = ()
    is_whole: bool = True


EMPTY: Final = Directory((), ())


class _Listed(NamedTuple):
    """The content of a directory record; values that do not fit 32 bits come from its Zip64 field.

    A name that is not UTF-8 has escapes. `nbytes` and `header_offset` are None if they are unknown.
    """

    name: str
    is_utf8: bool
    name_size: int
    nbytes: int | None
    header_offset: int | None
    crc32: int
    packed: bytes


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
    listed = _list(data, bounds, report)
    size = sum([len(item.packed) for item in listed])
    is_whole = len(listed) == bounds.entry_count and size == bounds.size
    if not listed:
        if bounds.entry_count == 0 and bounds.offset:
            report.broken(
                "ZIP-6",
                f"there are no entries, but bytes before the directory at offset {bounds.offset}",
            )
        return EMPTY._replace(is_whole=is_whole)
    # Some zip readers add the number of bytes before the first entry to each offset, others do not.
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
    packed: list[bytes] = []
    previous_end = 0
    for (name, _, name_size, nbytes, header_offset, crc32, record), end in zip(
        listed, ends, strict=True
    ):
        if nbytes is None or header_offset is None or end is None:
            continue  # the reason has been reported
        data_offset = end - nbytes
        least = layout.header_size(name_size, nbytes)
        space = data_offset - header_offset
        # An entry that begins before the previous one ends is left out: no byte is in two entries.
        if header_offset < previous_end:
            report.broken(
                "ZIP-6",
                f"expected its local header at offset {previous_end} or later, after the entries "
                f"before it, found {header_offset}",
                entry=name,
            )
        elif not (end <= bounds.offset and least <= space < least + layout.MAX_ALIGNMENT):
            report.broken(
                "ZIP-6",
                f"expected a local header of {least} to {least + layout.MAX_ALIGNMENT - 1} bytes "
                f"at offset {header_offset}, followed by {nbytes} bytes of data, found {space} "
                "bytes before the data: entries overlap or leave a gap, or the directory lists "
                "them in another order",
                entry=name,
            )
        else:
            if data_offset % layout.MIN_ALIGNMENT:
                report.broken(
                    "ALIGN-1",
                    f"expected its data at a multiple of {layout.MIN_ALIGNMENT}, found offset "
                    f"{data_offset}",
                    entry=name,
                )
            previous_end = end
            entries.append(Entry(name, header_offset, data_offset, nbytes, crc32))
            packed.append(record)
    names = [item.name if item.is_utf8 else None for item in listed]
    return Directory(entries, packed, names, [item.nbytes for item in listed], is_whole)


def _list(data: bytes, bounds: Bounds, report: Report) -> list[_Listed]:
    """Unpacks and checks the records; reports a wrong count or total size as ZIP-4.

    A record of a usual form, with an ASCII name and a size below 4 GiB, breaks no rule; all others
    are checked one rule at a time.
    """
    listed: list[_Listed] = []
    position = 0
    for index in range(bounds.entry_count):
        item = _usual_item(data, position)
        if item is None:
            record = DirectoryRecord.unpack(data, position)
            if record is None:
                report.broken(
                    "ZIP-4",
                    f"there is no directory record at offset {bounds.offset + position}, where "
                    f"record {index + 1} of {bounds.entry_count} should be",
                )
                return listed
            item = _check_record(record, report)
        listed.append(item)
        position += len(item.packed)
    if position != bounds.size:
        report.broken(
            "ZIP-4",
            f"expected {bounds.entry_count} directory records of {bounds.size} bytes in all, found "
            f"{position} bytes",
        )
    return listed


def _usual_item(data: bytes, position: int) -> _Listed | None:
    """The content of a record of a usual form; None if it has another form, or if there is none."""
    name_begin = position + DirectoryRecord.SIZE
    if name_begin > len(data):
        return None
    before_time, crc32, compressed, nbytes, name_size, before_offset, offset = _PARTS.unpack_from(
        data, position
    )
    name_end = end = name_begin + name_size
    usual = before_time, before_offset
    if usual == _USUAL_ZIP64 and offset == records.SATURATED_32:
        end += _OFFSET_FIELD.size
        if end > len(data):
            return None
        identifier, size, offset = _OFFSET_FIELD.unpack_from(data, name_end)
        if (
            identifier != records.ZIP64_EXTRA
            or size != _OFFSET_FIELD_SIZE
            or offset < records.SATURATED_32
        ):
            return None
    elif usual != _USUAL or offset == records.SATURATED_32 or end > len(data):
        return None
    name = data[name_begin:name_end]
    if compressed != nbytes or nbytes == records.SATURATED_32 or not name.isascii():
        return None
    return _Listed(name.decode(), True, name_size, nbytes, offset, crc32, data[position:end])


def _check_record(record: DirectoryRecord, report: Report) -> _Listed:
    """The content of a record of any form; reports each rule that the record breaks."""
    name, is_utf8 = _decode(record.name, report)
    _require_plain_record(record, name, report)
    nbytes, offset = _size_and_offset(record, name, report)
    packed = record.pack()
    return _Listed(name, is_utf8, len(record.name), nbytes, offset, record.crc32, packed)


def _decode(encoded: bytes, report: Report) -> tuple[str, bool]:
    try:
        return encoded.decode(), True
    except UnicodeDecodeError:
        name = encoded.decode(errors="backslashreplace")
        report.broken(
            "NAME-1", f"expected a name in UTF-8, found the bytes {quoted(encoded)}", entry=name
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
    if record.version_needed not in _VERSIONS_NEEDED:
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
    if len(identifiers) > _MAX_SHOWN_FIELDS:
        texts.append("...")
    return f"[{', '.join(texts)}]"
