"""Locates the central directory from the end records at fixed offsets; finds false end records.

False end records are bytes near the end of a file that some zip readers take for end records. These
readers search the last bytes of a file, instead of computing the offsets: zlib's minizip accepts a
Zip64 locator anywhere in the last 64 KiB, libzip selects among several end records, and adm-zip may
take a header offset for a signature. An archive holds no such bytes.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from onnxarchive.errors import INTERRUPTED, Report
from onnxarchive.zipformat import layout, records
from onnxarchive.zipformat.records import DirectoryRecord, EndRecord, Zip64EndRecord, Zip64Locator

MAX_NAME_SIZE = 1024  # bytes
# Size of a directory record with the longest name, three Zip64 values and no comment.
MAX_RECORD_SIZE = DirectoryRecord.SIZE + MAX_NAME_SIZE + len(records.pack_zip64_extra(0, 0, 0))
LOCATOR_DISTANCE = Zip64Locator.SIZE + EndRecord.SIZE  # bytes from a Zip64 locator to file end
TAIL_SIZE = Zip64EndRecord.SIZE + LOCATOR_DISTANCE  # number of last bytes that `locate` gets
# Number of last bytes of a file to search: the longest comment and all end records.
SEARCHED_SIZE = records.UINT16_MAX + TAIL_SIZE

_KINDS = {
    EndRecord.SIGNATURE: "an end record",
    Zip64Locator.SIGNATURE: "a Zip64 locator",
    Zip64EndRecord.SIGNATURE: "a Zip64 end record",
}
# The sections are those of APPNOTE.
_RECORD = re.compile(
    rb"PK(?:"
    rb"\x05\x06\0{4}(?P<count>..)(?P=count).{10}"  # both disks 0, both counts equal (4.3.16)
    rb"|\x06\x07(?:\0{4}.{8}\x01\0{3}|.{16}PK\x05\x06)"  # disk 0 of 1 (4.3.15) or end record next
    rb"|\x06\x06\x2c\0{7}"  # a size of 44 (4.3.14)
    rb")",
    re.DOTALL,
)


class Bounds(NamedTuple):
    """Position of the central directory.

    Attributes:
        offset: Offset of the directory in the file, in bytes.
        size: Size of the directory in bytes.
        entry_count: Number of directory records.
    """

    offset: int
    size: int
    entry_count: int


def locate(tail: bytes, file_size: int, report: Report) -> Bounds | None:
    """Locates the central directory.

    Args:
        tail: The last `TAIL_SIZE` bytes of the file, or all bytes of a smaller file.
        file_size: Size of the file in bytes.
        report: Receives each broken rule (ZIP-2 to ZIP-5, ZIP64-1 to ZIP64-3).

    Returns:
        The position of the directory, verified to be inside the file; None if unknown.
    """
    end = EndRecord.unpack(tail, len(tail) - EndRecord.SIZE)
    if end is None or end.comment_size:
        report.broken(
            "ZIP-2",
            f"there is no end record without comment in the last {EndRecord.SIZE} of {file_size} "
            "bytes; the file is not an archive, other bytes follow it, or its end is missing: "
            f"{INTERRUPTED}",
        )
        return None
    end_offset = file_size - EndRecord.SIZE
    stated = (end.disk_entry_count, end.entry_count, end.directory_size, end.directory_offset)
    if records.SATURATED_16 in stated[:2] or records.SATURATED_32 in stated[2:]:
        if stated != (*(records.SATURATED_16,) * 2, *(records.SATURATED_32,) * 2):
            report.broken(
                "ZIP64-1", f"expected all four values of the end record saturated, found {stated}"
            )
        bounds = _locate_zip64(tail, file_size, report)
        if bounds is None:
            return None
        end_offset -= Zip64EndRecord.SIZE + Zip64Locator.SIZE
    else:
        _require_equal_counts(end.disk_entry_count, end.entry_count, report)
        bounds = Bounds(end.directory_offset, end.directory_size, end.entry_count)
    if end.disk or end.directory_disk:
        report.broken(
            "ZIP-3",
            f"expected disk 0 and directory disk 0 in the end record, found disk {end.disk} and "
            f"directory disk {end.directory_disk}",
        )
    return _require_inside(bounds, end_offset, report)


def _locate_zip64(tail: bytes, file_size: int, report: Report) -> Bounds | None:
    locator_position = len(tail) - LOCATOR_DISTANCE
    record_position = locator_position - Zip64EndRecord.SIZE
    record_offset = file_size - TAIL_SIZE
    locator = Zip64Locator.unpack(tail, locator_position)
    record = Zip64EndRecord.unpack(tail, record_position)
    if locator is None:
        report.broken("ZIP64-1", "there is no Zip64 locator before the saturated end record")
        return None
    if locator.record_disk or locator.disks != 1:
        report.broken(
            "ZIP-3",
            f"expected disk 0 of 1 in the Zip64 locator, found {locator.record_disk} of "
            f"{locator.disks}",
        )
    if record is None:
        report.broken(
            "ZIP64-3",
            "there is no Zip64 end record directly before the Zip64 locator, at offset "
            f"{record_offset}",
        )
        return None
    if locator.record_offset != record_offset:
        report.broken(
            "ZIP64-3",
            f"expected the offset of the Zip64 end record, {record_offset}, in the Zip64 locator, "
            f"found {locator.record_offset}",
        )
        return None
    if (record.stated_size, record.version_needed) != (
        Zip64EndRecord.STATED_SIZE,
        records.VERSION_ZIP64,
    ):
        report.broken(
            "ZIP64-2",
            f"expected size {Zip64EndRecord.STATED_SIZE} and version "
            f"{records.VERSION_ZIP64} in the Zip64 end record, found {record.stated_size} and "
            f"{record.version_needed}",
        )
    if record.disk or record.directory_disk:
        report.broken(
            "ZIP-3",
            f"expected disk 0 and directory disk 0 in the Zip64 end record, found disk "
            f"{record.disk} and directory disk {record.directory_disk}",
        )
    _require_equal_counts(record.disk_entry_count, record.entry_count, report)
    if not layout.needs_zip64_end(
        record.entry_count, record.directory_size, record.directory_offset
    ):
        report.broken(
            "ZIP64-1",
            "there is a Zip64 end record, although the values fit the end record "
            f"({record.entry_count} entries, {record.directory_size} bytes at offset "
            f"{record.directory_offset})",
        )
    return Bounds(record.directory_offset, record.directory_size, record.entry_count)


def _require_equal_counts(disk_count: int, count: int, report: Report) -> None:
    if disk_count != count:
        report.broken(
            "ZIP-4",
            f"expected equal counts of entries on this disk and on all disks, found {disk_count} "
            f"and {count}",
        )


def _require_inside(bounds: Bounds, end_offset: int, report: Report) -> Bounds | None:
    if bounds.offset + bounds.size != end_offset:
        report.broken(
            "ZIP-5",
            f"expected the directory to end at offset {end_offset}, where the end records begin, "
            f"found its end at offset {bounds.offset + bounds.size}",
        )
        return None
    if bounds.entry_count > layout.MAX_ENTRIES:
        report.broken(
            "ZIP-4", f"expected at most {layout.MAX_ENTRIES} entries, found {bounds.entry_count}"
        )
        return None
    if (
        not DirectoryRecord.SIZE * bounds.entry_count
        <= bounds.size
        <= MAX_RECORD_SIZE * bounds.entry_count
    ):
        report.broken(
            "ZIP-4",
            f"expected {DirectoryRecord.SIZE} to {MAX_RECORD_SIZE} bytes for each of "
            f"{bounds.entry_count} directory records, found {bounds.size} bytes in all",
        )
        return None
    return bounds


def check_false_ends(
    end: bytes,
    file_size: int,
    directory_offset: int,
    directory_end: int,
    names: Sequence[str],
    header_offsets: Sequence[int],
    report: Report,
) -> None:
    """Reports false end records, and offsets whose bytes contain a signature (ZIP-16).

    The offsets are those of the last local header and of the directory.

    Args:
        end: The last `SEARCHED_SIZE` bytes of the file, or all bytes of a smaller file.
        file_size: Size of the file in bytes.
        directory_offset: Offset of the directory in bytes.
        directory_end: Offset of the end of the directory in bytes; only the true end records
            follow.
        names: Names of the entries in `end`, and possibly of entries before `end`.
        header_offsets: Offset of the local header of each of these entries, in bytes.
        report: Receives the broken rule.
    """
    for offset, kind in _find(end, file_size):
        if offset < directory_end:
            owner = bisect.bisect_right(header_offsets, offset) - 1
            report.broken(
                "ZIP-16",
                f"there is a false end record in the last {SEARCHED_SIZE} bytes of the file, "
                f"{kind} at offset {offset}, which some zip readers would accept; compress a file "
                "that is a zip itself, for example with gzip",
                entry=names[owner] if owner >= 0 else None,
            )
    for called, offset in (
        ("header offset of the last entry", header_offsets[-1] if header_offsets else 0),
        ("offset of the directory", directory_offset),
    ):
        if layout.holds_signature(offset):
            report.broken(
                "ZIP-16",
                f"the {called}, {offset:#010x}, has the signature of an end record, which some zip "
                "readers would accept",
            )


def _find(end: bytes, file_size: int) -> Iterator[tuple[int, str]]:
    """Yields file offset and kind of each end record, both true and false ones."""
    match = _RECORD.search(end)
    while match is not None:
        yield file_size - len(end) + match.start(), _KINDS[match.group()[:4]]
        match = _RECORD.search(end, match.start() + 1)  # it may begin within this one
