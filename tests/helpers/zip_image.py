"""The headers of an archive, for tests that change one of them; the file is sparse.

Entries may be of any size: where their data would lie, the file has zeros that nobody stores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from onnxarchive.errors import Report
from onnxarchive.zipformat import directory, layout
from onnxarchive.zipformat.directory import Directory, Entry
from onnxarchive.zipformat.end_records import TAIL_SIZE, locate
from onnxarchive.zipformat.layout import EntryLayout
from onnxarchive.zipformat.local_header import check_local_header
from onnxarchive.zipformat.records import (
    DirectoryRecord,
    EndRecord,
    LocalHeader,
    Zip64EndRecord,
    Zip64Locator,
)

CRC32 = 0xC0FFEE


class Sparse:
    """A file that holds some bytes at some offsets, and zeros between them."""

    def __init__(self, segments: Iterable[tuple[int, bytes]]) -> None:
        self.segments = list(segments)
        self.size = max((offset + len(data) for offset, data in self.segments), default=0)

    def read(self, offset: int, size: int) -> bytes:
        """Bytes from `offset`, fewer at the end."""
        content = bytearray(max(0, min(size, self.size - offset)))
        for start, data in self.segments:
            low, high = max(start, offset), min(start + len(data), offset + len(content))
            if low < high:
                content[low - offset : high - offset] = data[low - start : high - start]
        return bytes(content)


def unpacked_header(placement: EntryLayout) -> LocalHeader:
    """The fields of an entry's local header."""
    header = LocalHeader.unpack(placement.pack()[0])
    assert header is not None
    return header


def unpacked_record(placement: EntryLayout) -> DirectoryRecord:
    """The fields of an entry's directory record."""
    record = DirectoryRecord.unpack(placement.pack()[1])
    assert record is not None
    return record


def inspect(file: Sparse, report: Report) -> Directory | None:
    """Checks all that can be checked without an entry's data, as opening and `check` do."""
    tail = file.read(max(0, file.size - TAIL_SIZE), TAIL_SIZE)
    bounds = locate(tail, file.size, report)
    if bounds is None:
        return None
    data = file.read(bounds.offset, bounds.size)
    found = directory.read_directory(data, bounds, report)
    for entry, record in zip(found.entries, found.records, strict=True):
        header = file.read(entry.header_offset, entry.data_offset - entry.header_offset)
        check_local_header(header, entry, record, report)
    return found


@dataclass
class Image:
    """The headers of an archive, each to be changed, and where they lie.

    The three fields of bytes stand where an archive has nothing.
    """

    offsets: list[int]
    headers: list[LocalHeader]
    records: list[DirectoryRecord]
    directory_offset: int
    zip64_record: Zip64EndRecord | None
    locator: Zip64Locator | None
    end: EndRecord
    after_directory: bytes = b""
    after_zip64_record: bytes = b""
    after_end: bytes = b""

    @classmethod
    def of(cls, sizes: Iterable[tuple[str, int]], *, alignment: int = 64) -> Image:
        """A sound archive with entries of these names and sizes."""
        placements: list[EntryLayout] = []
        offset = 0
        for name, nbytes in sizes:
            placements.append(EntryLayout(name.encode(), nbytes, CRC32, offset, alignment))
            offset = placements[-1].end
        directory_records = [unpacked_record(placement) for placement in placements]
        directory_size = sum(record.packed_size for record in directory_records)
        ends = layout.end_of_archive(len(placements), directory_size, offset)
        end = EndRecord.unpack(ends, len(ends) - EndRecord.SIZE)
        assert end is not None
        return cls(
            [placement.header_offset for placement in placements],
            [unpacked_header(placement) for placement in placements],
            directory_records,
            offset,
            Zip64EndRecord.unpack(ends),
            Zip64Locator.unpack(ends, Zip64EndRecord.SIZE),
            end,
        )

    def tail(self) -> bytes:
        """Directory and end records."""
        return b"".join(
            [
                *(record.pack() for record in self.records),
                self.after_directory,
                self.zip64_record.pack() if self.zip64_record else b"",
                self.after_zip64_record,
                self.locator.pack() if self.locator else b"",
                self.end.pack(),
                self.after_end,
            ]
        )

    def file(self) -> Sparse:
        """The archive, put together as it is."""
        headers = [header.pack() for header in self.headers]
        segments = zip(self.offsets, headers, strict=True)
        return Sparse([*segments, (self.directory_offset, self.tail())])

    def change_record(self, index: int, **changes: Any) -> None:
        """Changes a directory record; the end records follow its size."""
        before = self.records[index].packed_size
        self.records[index] = self.records[index]._replace(**changes)
        self.grow_directory(self.records[index].packed_size - before)

    def change_header(self, index: int, **changes: Any) -> None:
        """Changes a local header."""
        self.headers[index] = self.headers[index]._replace(**changes)

    def _state(self, field: str, by: int) -> None:
        """Lets the end records state a number that is larger by so much."""
        if self.zip64_record is None or self.locator is None:
            self.end = self.end._replace(**{field: getattr(self.end, field) + by})
            return
        value = getattr(self.zip64_record, field) + by
        self.zip64_record = self.zip64_record._replace(**{field: value})
        self.locator = self.locator._replace(record_offset=self.locator.record_offset + by)

    def grow_directory(self, by: int) -> None:
        """Lets the end records state a larger directory."""
        self._state("directory_size", by)

    def move_directory(self, by: int) -> None:
        """Moves the directory and end records."""
        self.directory_offset += by
        self._state("directory_offset", by)

    def move_from(self, index: int, by: int) -> None:
        """Moves an entry and all that follows; what states an offset of less than 4 GiB, too."""
        for later in range(index, len(self.offsets)):
            self.offsets[later] += by
            self.change_record(later, header_offset=self.records[later].header_offset + by)
        self.move_directory(by)

    def count(self, count: int) -> None:
        """Lets the end records state another number of entries."""
        if self.zip64_record is None:
            self.end = self.end._replace(disk_entry_count=count, entry_count=count)
        else:
            self.zip64_record = self.zip64_record._replace(
                disk_entry_count=count, entry_count=count
            )

    def drop(self, index: int) -> None:
        """Takes a record out of the directory and leaves its entry where it is."""
        self.grow_directory(-self.records.pop(index).packed_size)
        self.count(len(self.records))


# Changes for tables. A value that is a function is given what was there.

Change: TypeAlias = Callable[[Image], None]


def _evaluated(record: object, changes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        field: value(getattr(record, field)) if callable(value) else value
        for field, value in changes.items()
    }


def plus(by: int) -> Callable[[int], int]:
    """A number, `by` larger."""
    return lambda value: value + by


def in_record(index: int, **changes: Any) -> Change:
    """Changes a directory record."""
    return lambda image: image.change_record(index, **_evaluated(image.records[index], changes))


def in_header(index: int, **changes: Any) -> Change:
    """Changes a local header."""
    return lambda image: image.change_header(index, **_evaluated(image.headers[index], changes))


def in_both(index: int, **changes: Any) -> Change:
    """Changes fields of both headers of an entry."""
    return together(in_record(index, **changes), in_header(index, **changes))


def _in_part(part: str, changes: Mapping[str, Any]) -> Change:
    def change(image: Image) -> None:
        record = getattr(image, part)
        setattr(image, part, record._replace(**_evaluated(record, changes)))

    return change


def in_end(**changes: Any) -> Change:
    """Changes the end record."""
    return _in_part("end", changes)


def in_zip64_record(**changes: Any) -> Change:
    """Changes the Zip64 end record."""
    return _in_part("zip64_record", changes)


def in_locator(**changes: Any) -> Change:
    """Changes the Zip64 locator."""
    return _in_part("locator", changes)


def insert(field: str, data: bytes) -> Change:
    """Puts bytes where there are none: `after_directory`, `after_zip64_record`, `after_end`."""
    return lambda image: setattr(image, field, data)


def together(*changes: Change) -> Change:
    """Several changes, one after the other."""

    def change(image: Image) -> None:
        for single in changes:
            single(image)

    return change


def directory_of(placements: Iterable[EntryLayout]) -> Directory:
    """The directory of entries, which may be written elsewhere."""
    entries = [
        Entry(one.name.decode(), one.header_offset, one.data_offset, one.nbytes, one.crc32)
        for one in placements
    ]
    return Directory(entries, [one.pack()[1] for one in placements])
