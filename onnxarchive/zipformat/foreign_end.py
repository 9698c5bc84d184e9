"""Finds the directory of a zip that another tool made; its end has one reading."""

from __future__ import annotations

import re
from dataclasses import dataclass

from onnxarchive.errors import ArchiveFormatError, UnsupportedFeatureError
from onnxarchive.zipformat import records
from onnxarchive.zipformat.records import (
    DirectoryRecord,
    EndRecord,
    LocalHeader,
    Zip64EndRecord,
    Zip64Locator,
)

MAX_ENTRIES = 1 << 18

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
    """The error of a zip that has no reading, or more than one; `name` is of an entry."""
    return ArchiveFormatError(_about(message, name), entry=name)


def unsupported(message: str, name: str | None = None) -> UnsupportedFeatureError:
    """The error of a zip that has what is not read here; `name` is of an entry."""
    return UnsupportedFeatureError(_about(message, name), entry=name)


def _about(message: str, name: str | None) -> str:
    return message if name is None else f"entry {name!r}: {message}"


def gap(view: memoryview, start: int, end: int, where: str) -> str:
    """Tells of bytes that belong to nothing.

    Raises:
        ArchiveFormatError: They could be a directory: another reader may find other entries there.
    """
    gap = view[start:end]
    found = _BEGINS_DIRECTORY.search(gap)
    if found is not None:
        raise format_error(
            f"expected one central directory, found the signature of another one, or of another "
            f"end of the file, at offset {start + found.start()}, in bytes that belong to nothing "
            f"{where}"
        )
    hidden = gap[: len(LocalHeader.SIGNATURE)] == LocalHeader.SIGNATURE
    what = "an entry that the directory does not list" if hidden else "they belong to nothing"
    return f"{end - start} bytes at offset {start} {where} are left out: {what}"


@dataclass(frozen=True, slots=True)
class ForeignBounds:
    """Where the central directory lies, and where the end records begin after it."""

    offset: int
    size: int
    count: int
    end_records_offset: int

    @property
    def end(self) -> int:
        """Where the directory ends, in bytes from the start of the file."""
        return self.offset + self.size


def locate_foreign(view: memoryview) -> ForeignBounds:
    """Finds the directory of a zip, whatever follows or precedes it.

    Raises:
        ArchiveFormatError: There is none, or what is said of it has two readings.
        UnsupportedFeatureError: The zip is in several files, or encrypted.
    """
    end_offset, end = _find_end_record(view)
    locator_offset = end_offset - Zip64Locator.SIZE
    locator = Zip64Locator.unpack(bytes(view[max(0, locator_offset) : end_offset]))
    if locator is None:
        # A count of 65,535 needs no Zip64 record in the eyes of Python's zipfile; the records are
        # counted. Sizes and offsets that look so are always written with one.
        if records.SATURATED_32 in (end.directory_size, end.directory_offset):
            raise format_error(
                f"expected a Zip64 locator at offset {locator_offset}, since the end record is "
                f"saturated, found none"
            )
        disks = (end.disk, end.directory_disk)
        bounds = ForeignBounds(end.directory_offset, end.directory_size, end.count, end_offset)
        disk_count = end.disk_count
    else:
        record_offset, record = _zip64_record(view, locator, locator_offset)
        _require_one_truth(end, record)
        disks = (record.disk, record.directory_disk)
        bounds = ForeignBounds(
            record.directory_offset, record.directory_size, record.count, record_offset
        )
        disk_count = record.disk_count
    if disks != (0, 0):
        raise unsupported(
            f"expected one file, found one of several: the end of disk {disks[0]}, with the "
            f"directory on disk {disks[1]}"
        )
    if disk_count != bounds.count:
        raise format_error(
            f"expected as many entries on the disk as in all, found {disk_count} and {bounds.count}"
        )
    if bounds.end > bounds.end_records_offset:
        raise format_error(
            f"expected the directory to end at offset {bounds.end_records_offset} or before, where "
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
    """The end record and its offset; it has to be searched for where it has a comment."""
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
            f"the file is no zip, or its end is missing"
        )
    comment = tail[position + EndRecord.SIZE :]
    if len(comment) != end.comment_size:
        raise format_error(
            f"expected a comment of {end.comment_size} bytes after the end record at offset "
            f"{tail_offset + position}, found {len(comment)} bytes"
        )
    if _BEGINS_RECORD.search(comment):
        raise format_error("expected a comment of words, found the signature of a zip record in it")
    return tail_offset + position, end


def _zip64_record(
    view: memoryview, locator: Zip64Locator, locator_offset: int
) -> tuple[int, Zip64EndRecord]:
    if (locator.record_disk, locator.disks) != (0, 1):
        raise unsupported(
            f"expected one file, found one of several: the Zip64 locator says disk "
            f"{locator.record_disk} of {locator.disks}"
        )
    offset = locator_offset - Zip64EndRecord.SIZE
    record = Zip64EndRecord.unpack(bytes(view[max(0, offset) : locator_offset]))
    if record is None or locator.record_offset != offset:
        raise format_error(
            f"expected the Zip64 end record at offset {offset}, directly before its locator, found "
            f"{'none' if record is None else 'one'} there and a locator that says "
            f"{locator.record_offset}"
        )
    if record.stated_size != Zip64EndRecord.STATED_SIZE:
        raise format_error(
            f"expected size {Zip64EndRecord.STATED_SIZE} in the Zip64 end record, found "
            f"{record.stated_size}"
        )
    if record.version_needed >= records.VERSION_ZIP64_ENCRYPTED:
        raise unsupported(
            f"expected a version needed below {records.VERSION_ZIP64_ENCRYPTED} in the Zip64 end "
            f"record, found {record.version_needed}: the directory may be encrypted"
        )
    return offset, record


def _require_one_truth(end: EndRecord, record: Zip64EndRecord) -> None:
    """Each value of the end record must be saturated or that of the Zip64 end record."""
    for field, saturated in (
        ("disk", records.SATURATED_16),
        ("directory_disk", records.SATURATED_16),
        ("disk_count", records.SATURATED_16),
        ("count", records.SATURATED_16),
        ("directory_size", records.SATURATED_32),
        ("directory_offset", records.SATURATED_32),
    ):
        stated, expected = getattr(end, field), getattr(record, field)
        if stated not in (saturated, expected):
            raise format_error(
                f"expected {field.replace('_', ' ')} {expected} in the end record, as in the Zip64 "
                f"end record, found {stated}"
            )
