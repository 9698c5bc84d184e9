"""Makes zip records and protobuf messages byte by byte, for valid and damaged archives.

Each field of a zip record has the value that the specification requires, unless the caller
overrides the field. So a recipe for a damaged record states only the damage. Needs only Python;
shares no code with the library, which the vectors test.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

Value: TypeAlias = "int | bytes | Callable[[int], int]"
Fields: TypeAlias = Mapping[str, Value]
Layout: TypeAlias = Mapping[str, str]

SATURATED_16 = 0xFFFF
SATURATED_32 = 0xFFFFFFFF
ZIP64_FIELD = 0x0001
ALIGNMENT_FIELD = 0xD935


def _layout(fields: str) -> Layout:
    """The fields of a record, each as `name:code` with a format code of `struct`."""
    return dict(field.split(":") for field in fields.split())


_COMMON = """version_needed:H flags:H method:H time:H date:H
    crc32:I compressed_size:I uncompressed_size:I name_length:H extra_length:H"""
LOCAL_HEADER = _layout(f"signature:4s {_COMMON}")
DIRECTORY_RECORD = _layout(
    f"""signature:4s version_made_by:H {_COMMON} comment_length:H disk_start:H
    internal_attributes:H external_attributes:I header_offset:I"""
)
END_RECORD = _layout(
    """signature:4s disk:H directory_disk:H disk_count:H count:H
    directory_size:I directory_offset:I comment_length:H"""
)
ZIP64_END_RECORD = _layout(
    """signature:4s rest_size:Q version_made_by:H version_needed:H disk:I directory_disk:I
    disk_count:Q count:Q directory_size:Q directory_offset:Q"""
)
ZIP64_LOCATOR = _layout("signature:4s record_disk:I record_offset:Q disks:I")


def pack(layout: Layout, values: Fields, changes: Fields) -> bytes:
    """Packs a record. A change is a new value, or a function of the old value."""
    unknown = set(changes) - set(layout)
    if unknown:
        raise KeyError(f"{sorted(unknown)} are no fields of {list(layout)}")
    changed: dict[str, Value] = dict(values)
    for name, change in changes.items():
        if callable(change):
            value = values[name]
            assert isinstance(value, int)
            changed[name] = change(value)
        else:
            changed[name] = change
    return struct.pack("<" + "".join(layout.values()), *(changed[name] for name in layout))


def extra_field(identifier: int, data: bytes) -> bytes:
    """An extra field: id, size of its data, data."""
    return struct.pack("<HH", identifier, len(data)) + data


def zip64_field(*values: int) -> bytes:
    """A Zip64 field of these 8-byte numbers; no bytes if there are no numbers."""
    return extra_field(ZIP64_FIELD, struct.pack(f"<{len(values)}Q", *values)) if values else b""


@dataclass(frozen=True)
class Zeros:
    """Data of `nbytes` zeros, not held in memory."""

    nbytes: int

    def __len__(self) -> int:
        return self.nbytes

    @property
    def crc32(self) -> int:
        """CRC-32 of the zeros."""
        crc, piece = 0, bytes(1 << 24)
        for start in range(0, self.nbytes, len(piece)):
            crc = zlib.crc32(piece[: self.nbytes - start], crc)
        return crc


def crc32(data: bytes | Zeros) -> int:
    """CRC-32 of an entry's data."""
    return data.crc32 if isinstance(data, Zeros) else zlib.crc32(data)


@dataclass
class Entry:
    """An entry that conforms to the specification, except for the values given here.

    Attributes:
        name: Name in the directory.
        data: Data of the entry.
        alignment: Value of the alignment field. The conforming padding makes the data offset a
            multiple of this value.
        both: Overridden fields of the local header and of the directory record.
        local: Overridden fields of the local header.
        record: Overridden fields of the directory record.
        local_name: Name in the local header; None for `name`.
        local_extra: Extra fields of the local header; None for conforming fields.
        record_extra: Extra fields of the directory record; None for conforming fields.
        padding: Padding of the alignment field; None for the conforming padding.
        comment: Comment in the directory record.
        before: Bytes before the local header.
        after: Bytes after the data.
        is_stored: True if the file contains local header and data.
        is_listed: True if the directory contains a record of the entry.
        crc: CRC-32 to write; None for the CRC-32 of the data.
    """

    name: bytes
    data: bytes | Zeros = b""
    alignment: int = 64
    both: Fields = field(default_factory=dict)
    local: Fields = field(default_factory=dict)
    record: Fields = field(default_factory=dict)
    local_name: bytes | None = None
    local_extra: bytes | None = None
    record_extra: bytes | None = None
    padding: bytes | None = None
    comment: bytes = b""
    before: bytes = b""
    after: bytes = b""
    is_stored: bool = True
    is_listed: bool = True
    crc: int | None = None


@dataclass(frozen=True)
class Placed:
    """An entry with its headers and offsets in the file."""

    entry: Entry
    crc32: int
    header_offset: int
    data_offset: int
    local_header: bytes
    record: bytes


@dataclass
class Image:
    """A file of entries, directory and end records.

    Attributes:
        entries: The entries in the order of the file.
        order: Order of the directory, as indexes of `entries`; None for the order of the file.
        end: Overridden fields of the end record.
        zip64: Overridden fields of the Zip64 end record.
        locator: Overridden fields of the Zip64 locator.
        has_zip64: True to write a Zip64 end record and a Zip64 locator, False to write neither;
            None to write both if a value of the end record does not fit.
        is_saturated: True to saturate the end record; None to saturate it if a Zip64
            end record is written.
        prefix: Bytes before the first entry.
        before_directory, after_directory, after_zip64, after_locator, after_end: Bytes to insert
            at these places; a conforming archive has none.
    """

    entries: list[Entry]
    order: list[int] | None = None
    end: Fields = field(default_factory=dict)
    zip64: Fields = field(default_factory=dict)
    locator: Fields = field(default_factory=dict)
    has_zip64: bool | None = None
    is_saturated: bool | None = None
    prefix: bytes = b""
    before_directory: bytes = b""
    after_directory: bytes = b""
    after_zip64: bytes = b""
    after_locator: bytes = b""
    after_end: bytes = b""

    def place(self) -> list[Placed]:
        """The entries with their headers, in the order of the file."""
        placed: list[Placed] = []
        position = len(self.prefix)
        for entry in self.entries:
            position += len(entry.before)
            placed.append(_place(entry, position))
            if entry.is_stored:
                position = placed[-1].data_offset + len(entry.data) + len(entry.after)
        return placed

    def pieces(self) -> Iterator[tuple[int, bytes]]:
        """Yields offset and bytes of each piece of the file; all bytes between pieces are zero."""
        placed = self.place()
        yield 0, self.prefix
        position = len(self.prefix)
        for it in placed:
            if it.entry.is_stored:
                yield it.header_offset - len(it.entry.before), it.entry.before
                yield it.header_offset, it.local_header
                if isinstance(it.entry.data, bytes):
                    yield it.data_offset, it.entry.data
                position = it.data_offset + len(it.entry.data)
                yield position, it.entry.after
                position += len(it.entry.after)
        order = range(len(placed)) if self.order is None else self.order
        directory = [placed[index].record for index in order if placed[index].entry.is_listed]
        yield position, self.before_directory
        yield (
            position + len(self.before_directory),
            self._tail(directory, position + len(self.before_directory)),
        )

    def _tail(self, records: list[bytes], offset: int) -> bytes:
        directory = b"".join(records)
        stated = {
            "disk_count": len(records),
            "count": len(records),
            "directory_size": len(directory),
            "directory_offset": offset,
        }
        disks = {"disk": 0, "directory_disk": 0}
        needs_zip64 = len(records) >= SATURATED_16 or max(len(directory), offset) >= SATURATED_32
        has_zip64 = needs_zip64 if self.has_zip64 is None else self.has_zip64
        is_saturated = has_zip64 if self.is_saturated is None else self.is_saturated
        tail = directory + self.after_directory
        if has_zip64:
            record_offset = offset + len(tail)
            fixed: dict[str, Value] = {"signature": b"PK\6\6", "rest_size": 44}
            versions = {"version_made_by": 0x032D, "version_needed": 45}
            tail += pack(ZIP64_END_RECORD, {**fixed, **versions, **disks, **stated}, self.zip64)
            tail += self.after_zip64
            locator: dict[str, Value] = {
                "signature": b"PK\6\7",
                "record_disk": 0,
                "record_offset": record_offset,
                "disks": 1,
            }
            tail += pack(ZIP64_LOCATOR, locator, self.locator) + self.after_locator
        if is_saturated:
            stated |= {"disk_count": SATURATED_16, "count": SATURATED_16}
            stated |= {"directory_size": SATURATED_32, "directory_offset": SATURATED_32}
        end: dict[str, Value] = {"signature": b"PK\5\6", **disks, **stated, "comment_length": 0}
        return tail + pack(END_RECORD, end, self.end) + self.after_end


def _place(entry: Entry, header_offset: int) -> Placed:
    nbytes = len(entry.data)
    size_fits = nbytes < SATURATED_32
    offset_fits = header_offset < SATURATED_32
    checksum = crc32(entry.data) if entry.crc is None else entry.crc
    sizes = zip64_field(*[] if size_fits else [nbytes, nbytes])
    unpadded = header_offset + 30 + len(entry.name) + len(sizes) + 6
    padding = bytes(-unpadded % entry.alignment) if entry.padding is None else entry.padding
    alignment = extra_field(ALIGNMENT_FIELD, struct.pack("<H", entry.alignment) + padding)
    local_extra = sizes + alignment if entry.local_extra is None else entry.local_extra
    record_extra = zip64_field(
        *[] if size_fits else [nbytes, nbytes], *[] if offset_fits else [header_offset]
    )
    if entry.record_extra is not None:
        record_extra = entry.record_extra
    local_name = entry.name if entry.local_name is None else entry.local_name
    common: dict[str, Value] = {
        "version_needed": 10 if size_fits and offset_fits else 45,
        "flags": 0 if entry.name.isascii() else 0x0800,
        "method": 0,
        "time": 0,
        "date": 0x0021,
        "crc32": checksum,
        "compressed_size": min(nbytes, SATURATED_32),
        "uncompressed_size": min(nbytes, SATURATED_32),
    }
    local_header = (
        pack(
            LOCAL_HEADER,
            {
                "signature": b"PK\3\4",
                **common,
                "name_length": len(local_name),
                "extra_length": len(local_extra),
            },
            {**entry.both, **entry.local},
        )
        + local_name
        + local_extra
    )
    record = (
        pack(
            DIRECTORY_RECORD,
            {
                "signature": b"PK\1\2",
                "version_made_by": 0x032D,
                **common,
                "name_length": len(entry.name),
                "extra_length": len(record_extra),
                "comment_length": len(entry.comment),
                "disk_start": 0,
                "internal_attributes": 0,
                "external_attributes": 0x81A40000,
                "header_offset": min(header_offset, SATURATED_32),
            },
            {**entry.both, **entry.record},
        )
        + entry.name
        + record_extra
        + entry.comment
    )
    data_offset = header_offset + len(local_header)
    return Placed(entry, checksum, header_offset, data_offset, local_header, record)


# Protobuf: a message is the bytes of its fields, one after the other.


def varint(number: int) -> bytes:
    """Encodes a number as a varint; a negative number takes ten bytes."""
    number &= (1 << 64) - 1
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def number(field_number: int, value: int) -> bytes:
    """A field that holds a number."""
    return varint(field_number << 3) + varint(value)


def content(field_number: int, value: bytes | str) -> bytes:
    """A field that holds a string, bytes, a message, or packed numbers."""
    data = value.encode() if isinstance(value, str) else value
    return varint(field_number << 3 | 2) + varint(len(data)) + data


def numbers(field_number: int, values: Iterable[int]) -> bytes:
    """A repeated field of numbers, not packed."""
    return b"".join(number(field_number, value) for value in values)
