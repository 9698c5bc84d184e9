"""Compares a local header with its directory record."""

from __future__ import annotations

from functools import partial
from typing import Final

from onnxarchive.errors import Report, quoted
from onnxarchive.zipformat import layout, records
from onnxarchive.zipformat.directory import Entry, hexadecimal
from onnxarchive.zipformat.records import DirectoryRecord, LocalHeader

# "Version needed" to "file name length", which both headers have (APPNOTE 4.3.7 and 4.3.12).
_SHARED: Final = slice(6, 30)


def check_local_header(header: bytes, entry: Entry, packed: bytes, report: Report) -> int | None:
    """Compares an entry's local header with its directory record.

    Args:
        header: The bytes from `entry.header_offset` to `entry.data_offset`.
        entry: The entry.
        packed: Its directory record.
        report: Receives each broken rule (ZIP-7, ZIP-14, ZIP64-5, ALIGN-2, ALIGN-3).

    Returns:
        The alignment in the header, in bytes; None if the alignment is invalid, or if the size or
        the extra fields of the header are wrong.
    """
    shared = packed[_SHARED]
    name = packed[DirectoryRecord.SIZE :][: int.from_bytes(shared[-2:], "little")]
    least = layout.header_size(len(name), entry.nbytes)
    padding = entry.data_offset - entry.header_offset - least
    alignment = int.from_bytes(header[least - 2 : least], "little")
    if (
        alignment in layout.ALIGNMENTS
        and entry.data_offset % alignment == 0
        and 0 <= padding < alignment
    ):
        extra = records.pack_alignment_extra(alignment, padding)
        expected = (LocalHeader.SIGNATURE, shared, len(extra).to_bytes(2, "little"), name, extra)
        if header == b"".join(expected):
            return alignment
    record = DirectoryRecord.unpack(packed)
    assert record is not None  # the directory's reader found it
    return _compare(header, entry, record, report)


def _compare(header: bytes, entry: Entry, record: DirectoryRecord, report: Report) -> int | None:
    """As `check_local_header`, field by field."""
    broken = partial(report.broken, entry=entry.name)
    local = LocalHeader.unpack(header)
    if local is None or local.packed_size != len(header):
        broken(
            "ZIP-7",
            f"expected a local header of {len(header)} bytes, found {_describe(header, local)}",
        )
        return None
    for field in LocalHeader._fields[:-1]:  # all but the extra fields
        expected, found = getattr(record, field), getattr(local, field)
        if expected != found:
            form = quoted if field == "name" else str
            broken(
                "ZIP-7",
                f"expected {field.replace('_', ' ')} {form(expected)} as in the directory, "
                f"found {form(found)}",
            )
    try:
        fields = list(records.unpack_extra(local.extra))
    except ValueError as error:
        broken("ZIP-14", f"expected complete extra fields, found {error}")
        return None
    zip64_values = layout.local_zip64_values(entry.nbytes)
    expected_identifiers = [records.ALIGNMENT_EXTRA]
    if zip64_values:
        expected_identifiers.insert(0, records.ZIP64_EXTRA)
    identifiers = [identifier for identifier, _ in fields]
    if identifiers != expected_identifiers:
        broken(
            "ZIP-14",
            f"expected the extra fields {hexadecimal(expected_identifiers)}, found "
            f"{hexadecimal(identifiers)}",
        )
        return None
    if zip64_values:
        content = fields[0][1]
        found_values = records.unpack_zip64_values(content)
        if found_values != zip64_values:
            found = f"{len(content)} bytes" if found_values is None else quoted(found_values)
            broken(
                "ZIP64-5",
                f"expected the sizes {quoted(zip64_values)} in the Zip64 field, found {found}",
            )
    return _check_alignment(fields[-1][1], entry, record, report)


def _describe(header: bytes, local: LocalHeader | None) -> str:
    if local is not None:
        return f"one of {local.packed_size} bytes"
    signature = header[: len(LocalHeader.SIGNATURE)]
    if signature != LocalHeader.SIGNATURE:
        return f"bytes that begin with {signature!r}"
    return "one that is longer"


def _check_alignment(
    content: bytes, entry: Entry, record: DirectoryRecord, report: Report
) -> int | None:
    broken = partial(report.broken, entry=entry.name)
    unpacked = records.unpack_alignment(content)
    if unpacked is None:
        broken("ZIP-14", f"expected an alignment field of 2 bytes or more, found {len(content)}")
        return None
    alignment, padding = unpacked
    if alignment not in layout.ALIGNMENTS or entry.data_offset % alignment:
        broken(
            "ALIGN-2",
            f"expected an alignment (a power of two from {layout.MIN_ALIGNMENT} to "
            f"{layout.MAX_ALIGNMENT}) that divides offset {entry.data_offset}, found {alignment}",
        )
        return None
    least = layout.header_size(len(record.name), entry.nbytes)
    expected = layout.padding(entry.header_offset + least, alignment)
    if padding != bytes(expected):
        broken(
            "ALIGN-3",
            f"expected {expected} zero bytes of padding, found {len(padding)} bytes"
            f"{', not all of them zero' if any(padding) else ''}",
        )
    return alignment
