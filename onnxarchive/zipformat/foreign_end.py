"""Locates the directory of a zip written by any tool; refuses ambiguous end records."""

from __future__ import annotations

import re
from dataclasses import dataclass

from onnxarchive.errors import INTERRUPTED, ArchiveFormatError, UnsupportedFeatureError
from onnxarchive.zipformat import records
from onnxarchive.zipformat.layout import MAX_ENTRIES
from onnxarchive.zipformat.records import (
    DirectoryRecord,
    EndRecord,
    LocalHeader,
    Zip64EndRecord,
    Zip64Locator,
)

_DIRECTORY_SIGNATURES = (
    DirectoryRecord.SIGNATURE,
    EndRecord.SIGNATURE,
    Zip64EndRecord.SIGNATURE,
    Zip64Locator.SIGNATURE,
)
_BEGINS_DIRECTORY = re.compile(b"|".join(map(re.escape, _DIRECTORY_SIGNATURES)))
_BEGINS_RECORD = re.compile(
    b"|".join(map(re.escape, (*_DIRECTORY_SIGNATURES, LocalHeader.SIGNATURE)))
)


def format_error(message: str, name: str | None = None) -> ArchiveFormatError:
    """The error for a damaged or ambiguous zip; `name` is the entry's name, if any."""
    return ArchiveFormatError(_about(message, name), entry=name)


def unsupported(message: str, name: str | None = None) -> UnsupportedFeatureError:
    """The error for an unsupported feature; `name` is the entry's name, if any."""
    return UnsupportedFeatureError(_about(message, name), entry=name)


def _about(message: str, name: str | None) -> str:
    return message if name is None else f"entry {name!r}: {message}"


def describe_gap(view: memoryview, start: int, end: int, place: str) -> str:
    """Returns a sentence about unused bytes: the part of `view` from `start` to `end`.

    Raises:
        ArchiveFormatError: The unused bytes contain a signature of a directory record or of an end
            record. Other readers may find a second directory there.
    """
    gap = view[start:end]
    found = _BEGINS_DIRECTORY.search(gap)
    if found is not None:
        raise format_error(
            f"expected one central directory, found the signature of a directory record or an end "
            f"record at offset {start + found.start()}, in unused bytes {place}"
        )
    is_entry = gap[: len(LocalHeader.SIGNATURE)] == LocalHeader.SIGNATURE
    content = "an entry that the directory does not list" if is_entry else "they are unused"
    return f"{end - start} bytes at offset {start} {place} are left out: {content}"


@dataclass(frozen=True, slots=True)
class ForeignBounds:
    """Offset and size of the directory, number of its records, and offset of the end records."""

    offset: int
    size: int
    count: int
    end_records_offset: int

    @property
    def end(self) -> int:
        """Offset of the end of the directory in the file, in bytes."""
        return self.offset + self.size


def locate_foreign(view: memoryview) -> ForeignBounds:
    """Locates the directory of a zip.

    Raises:
        ArchiveFormatError: The end records are missing, damaged or ambiguous.
        UnsupportedFeatureError: The zip is split, is encrypted, or has too many entries.
    """
    end_offset, end = _find_end_record(view)
    locator_offset = end_offset - Zip64Locator.SIZE
    locator = Zip64Locator.unpack(view, locator_offset)
    last: EndRecord | Zip64EndRecord = end
    if locator is not None:
        end_offset, last = _zip64_record(view, locator, locator_offset)
        _require_same_values(end, last)
    # A saturated count is allowed: Python's zipfile writes 65,535 without a Zip64 record. For
    # saturated sizes and offsets, all writers write a Zip64 record.
    elif records.SATURATED_32 in (end.directory_size, end.directory_offset):
        raise format_error(
            f"expected a Zip64 locator at offset {locator_offset}, since the end record is "
            f"saturated, found none"
        )
    bounds = ForeignBounds(last.directory_offset, last.directory_size, last.entry_count, end_offset)
    if last.disk or last.directory_disk:
        raise unsupported(
            f"expected a zip in one file, found one part of a split zip: disk {last.disk}, with "
            f"the directory on disk {last.directory_disk}"
        )
    if last.disk_entry_count != bounds.count:
        raise format_error(
            f"expected equal counts of entries on this disk and on all disks, found "
            f"{last.disk_entry_count} and {bounds.count}"
        )
    if bounds.end > bounds.end_records_offset:
        raise format_error(
            f"expected the directory to end at or before offset {bounds.end_records_offset}, where "
            f"the end records begin, found {bounds.size} bytes at offset {bounds.offset}"
        )
    if bounds.size < DirectoryRecord.SIZE * bounds.count:
        raise format_error(
            f"expected at least {DirectoryRecord.SIZE} bytes for each of {bounds.count} directory "
            f"records, found {bounds.size} bytes in all"
        )
    if bounds.count > MAX_ENTRIES:
        raise unsupported(f"expected at most {MAX_ENTRIES} entries, found {bounds.count}")
    return bounds


def _find_end_record(view: memoryview) -> tuple[int, EndRecord]:
    """Finds the end record; searches unless the record is the last 22 bytes of the file."""
    tail_offset = max(0, len(view) - EndRecord.SIZE - records.UINT16_MAX)
    tail = bytes(view[tail_offset:])
    position = len(tail) - EndRecord.SIZE
    end = EndRecord.unpack(tail, position)
    if end is None or end.comment_size:
        position = tail.rfind(EndRecord.SIGNATURE)
        end = EndRecord.unpack(tail, position)
    if end is None:
        raise format_error(
            f"expected an end record in the last {len(tail)} bytes of {len(view)}, found none: "
            f"the file is not a zip, or its end is missing: {INTERRUPTED}"
        )
    comment = tail[position + EndRecord.SIZE :]
    if len(comment) != end.comment_size:
        raise format_error(
            f"expected a comment of {end.comment_size} bytes after the end record at offset "
            f"{tail_offset + position}, found {len(comment)} bytes"
        )
    if _BEGINS_RECORD.search(comment):
        raise format_error("expected no signature of a zip record in the comment, found one")
    return tail_offset + position, end


def _zip64_record(
    view: memoryview, locator: Zip64Locator, locator_offset: int
) -> tuple[int, Zip64EndRecord]:
    if (locator.record_disk, locator.disks) != (0, 1):
        raise unsupported(
            "expected a zip in one file, found one part of a split zip: disk "
            f"{locator.record_disk} of {locator.disks} in the Zip64 locator"
        )
    offset = locator_offset - Zip64EndRecord.SIZE
    record = Zip64EndRecord.unpack(view, offset)
    if record is None:
        raise format_error(
            f"expected the Zip64 end record at offset {offset}, directly before its locator, found "
            "none"
        )
    if locator.record_offset != offset:
        raise format_error(
            f"expected the Zip64 locator to state offset {offset}, where the Zip64 end record "
            f"begins, found {locator.record_offset}"
        )
    if record.stated_size != Zip64EndRecord.STATED_SIZE:
        raise format_error(
            f"expected size {Zip64EndRecord.STATED_SIZE} in the Zip64 end record, found "
            f"{record.stated_size}"
        )
    if record.version_needed >= records.VERSION_ZIP64_ENCRYPTED:
        raise unsupported(
            f"expected a version needed to extract below {records.VERSION_ZIP64_ENCRYPTED} in the "
            f"Zip64 end record, found {record.version_needed}: the directory may be encrypted"
        )
    return offset, record


def _require_same_values(end: EndRecord, record: Zip64EndRecord) -> None:
    """Requires each value of the end record to be saturated or equal to the Zip64 end record's."""
    for field, saturated in (
        ("disk", records.SATURATED_16),
        ("directory_disk", records.SATURATED_16),
        ("disk_entry_count", records.SATURATED_16),
        ("entry_count", records.SATURATED_16),
        ("directory_size", records.SATURATED_32),
        ("directory_offset", records.SATURATED_32),
    ):
        stated, expected = getattr(end, field), getattr(record, field)
        if stated not in (saturated, expected):
            raise format_error(
                f"expected {field.replace('_', ' ')} {expected} in the end record, as in the Zip64 "
                f"end record, found {stated}"
            )
