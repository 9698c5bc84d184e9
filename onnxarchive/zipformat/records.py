"""The records of a zip file, each declared once: signature, size, `unpack` and `pack`.

Fields stand in the order of PKWARE's APPNOTE.TXT 6.3.10, whose sections are cited. All numbers are
little-endian. `unpack` checks lengths and signatures only; what values are allowed is decided by
`directory`. A buffer that is too short, or another signature, gives None: only the caller knows
what that means there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

UINT16_MAX = 0xFFFF
UINT32_MAX = 0xFFFFFFFF
UINT64_MAX = 0xFFFFFFFFFFFFFFFF
# A field that holds its largest value says: the real one is in the Zip64 field or record (4.4.1.4).
SATURATED_16 = UINT16_MAX
SATURATED_32 = UINT32_MAX

METHOD_STORED = 0  # 4.4.5, as all methods
METHOD_DEFLATE = 8
METHOD_DEFLATE64 = 9
METHOD_BZIP2 = 12
METHOD_LZMA = 14
FLAG_ENCRYPTED = 1 << 0  # 4.4.4, as all flags
FLAGS_COMPRESSION_LEVEL = 1 << 1 | 1 << 2
FLAG_LZMA_END_MARKER = 1 << 1
FLAG_DATA_DESCRIPTOR = 1 << 3
FLAG_STRONG_ENCRYPTION = 1 << 6
FLAG_UTF8 = 1 << 11
FLAG_MASKED_HEADER = 1 << 13

VERSION_STORED = 10  # 4.4.3.2, as all versions needed to extract
VERSION_FOLDER = 20
VERSION_ZIP64 = 45
VERSION_ZIP64_ENCRYPTED = 62  # has another Zip64 end record, with an encrypted directory (7.3.4)
VERSION_LZMA = 63
MADE_BY_UNIX = 3 << 8  # 4.4.2: the upper byte is the system, the lower one the version
MADE_BY_SYSTEM_MASK = 0xFF << 8

# 4.4.15: a Unix host keeps st_mode in the upper half, the lower one is that of MS-DOS.
UNIX_MODE_SHIFT = 16
UNIX_TYPE_MASK = 0o170000
UNIX_REGULAR = 0o100000
UNIX_DIRECTORY = 0o040000
UNIX_FIFO = 0o010000
DOS_ATTRIBUTES_MASK = 0xFFFF
DOS_FILE_ATTRIBUTES = 0x01 | 0x02 | 0x04 | 0x20  # read-only, hidden, system, archive
DOS_VOLUME_LABEL = 0x08
DOS_DIRECTORY = 0x10
REGULAR_FILE_ATTRIBUTES = (UNIX_REGULAR | 0o644) << UNIX_MODE_SHIFT

# 4.4.6: the first moment that a zip can express, 1980-01-01 00:00:00.
EPOCH_TIME = 0
EPOCH_DATE = 1 << 5 | 1

DATA_DESCRIPTOR_SIGNATURE = b"PK\x07\x08"  # 4.3.9.3; not every writer puts it

ZIP64_EXTRA = 0x0001  # 4.5.3
UNICODE_PATH_EXTRA = 0x7075  # 4.6.9
# A third party's (4.6.1), of Android's tools for aligned zips: uint16 alignment, then padding.
ALIGNMENT_EXTRA = 0xD935

_EXTRA_HEADER = struct.Struct("<HH")
_ALIGNMENT_VALUE = struct.Struct("<H")
EXTRA_HEADER_SIZE = _EXTRA_HEADER.size
ALIGNMENT_EXTRA_SIZE = _EXTRA_HEADER.size + _ALIGNMENT_VALUE.size  # with no padding
_UINT64_SIZE = 8


@dataclass(frozen=True, slots=True)
class LocalHeader:
    """Stands before an entry's data (APPNOTE 4.3.7)."""

    SIGNATURE: ClassVar[bytes] = b"PK\x03\x04"
    STRUCT: ClassVar[struct.Struct] = struct.Struct("<4s5H3I2H")
    SIZE: ClassVar[int] = STRUCT.size  # 30, without name and extra
    MAX_SIZE: ClassVar[int] = STRUCT.size + 2 * UINT16_MAX  # with them

    version_needed: int
    flags: int
    method: int
    time: int
    date: int
    crc32: int
    compressed_size: int
    uncompressed_size: int
    name: bytes
    extra: bytes

    @classmethod
    def unpack(cls, buffer: bytes, offset: int = 0) -> LocalHeader | None:
        """The record at `offset` with its name and extra fields, or None."""
        if len(buffer) - offset < cls.SIZE:
            return None
        (
            signature,
            version_needed,
            flags,
            method,
            time,
            date,
            crc32,
            compressed_size,
            uncompressed_size,
            name_size,
            extra_size,
        ) = cls.STRUCT.unpack_from(buffer, offset)
        name_offset = offset + cls.SIZE
        extra_offset = name_offset + name_size
        if signature != cls.SIGNATURE or len(buffer) < extra_offset + extra_size:
            return None
        return cls(
            version_needed,
            flags,
            method,
            time,
            date,
            crc32,
            compressed_size,
            uncompressed_size,
            buffer[name_offset:extra_offset],
            buffer[extra_offset : extra_offset + extra_size],
        )

    def pack(self) -> bytes:
        """The record's bytes, name and extra fields included."""
        header = self.STRUCT.pack(
            self.SIGNATURE,
            self.version_needed,
            self.flags,
            self.method,
            self.time,
            self.date,
            self.crc32,
            self.compressed_size,
            self.uncompressed_size,
            len(self.name),
            len(self.extra),
        )
        return header + self.name + self.extra


@dataclass(frozen=True, slots=True)
class DirectoryRecord:
    """Describes one entry in the central directory (APPNOTE 4.3.12)."""

    SIGNATURE: ClassVar[bytes] = b"PK\x01\x02"
    STRUCT: ClassVar[struct.Struct] = struct.Struct("<4s6H3I5H2I")
    SIZE: ClassVar[int] = STRUCT.size  # 46, without name, extra and comment

    version_made_by: int
    version_needed: int
    flags: int
    method: int
    time: int
    date: int
    crc32: int
    compressed_size: int
    uncompressed_size: int
    disk_start: int
    internal_attributes: int
    external_attributes: int
    header_offset: int
    name: bytes
    extra: bytes
    comment: bytes

    @classmethod
    def unpack(cls, buffer: bytes, offset: int = 0) -> DirectoryRecord | None:
        """The record at `offset` with its name, extra fields and comment, or None."""
        if len(buffer) - offset < cls.SIZE:
            return None
        (
            signature,
            version_made_by,
            version_needed,
            flags,
            method,
            time,
            date,
            crc32,
            compressed_size,
            uncompressed_size,
            name_size,
            extra_size,
            comment_size,
            disk_start,
            internal_attributes,
            external_attributes,
            header_offset,
        ) = cls.STRUCT.unpack_from(buffer, offset)
        name_offset = offset + cls.SIZE
        extra_offset = name_offset + name_size
        comment_offset = extra_offset + extra_size
        if signature != cls.SIGNATURE or len(buffer) < comment_offset + comment_size:
            return None
        return cls(
            version_made_by,
            version_needed,
            flags,
            method,
            time,
            date,
            crc32,
            compressed_size,
            uncompressed_size,
            disk_start,
            internal_attributes,
            external_attributes,
            header_offset,
            buffer[name_offset:extra_offset],
            buffer[extra_offset:comment_offset],
            buffer[comment_offset : comment_offset + comment_size],
        )

    def pack(self) -> bytes:
        """The record's bytes, name, extra fields and comment included."""
        header = self.STRUCT.pack(
            self.SIGNATURE,
            self.version_made_by,
            self.version_needed,
            self.flags,
            self.method,
            self.time,
            self.date,
            self.crc32,
            self.compressed_size,
            self.uncompressed_size,
            len(self.name),
            len(self.extra),
            len(self.comment),
            self.disk_start,
            self.internal_attributes,
            self.external_attributes,
            self.header_offset,
        )
        return header + self.name + self.extra + self.comment

    @property
    def packed_size(self) -> int:
        """Size of the record with its name, extra fields and comment, in bytes."""
        return self.SIZE + len(self.name) + len(self.extra) + len(self.comment)


@dataclass(frozen=True, slots=True)
class Zip64EndRecord:
    """Holds the directory's place when the end record cannot (APPNOTE 4.3.14)."""

    SIGNATURE: ClassVar[bytes] = b"PK\x06\x06"
    STRUCT: ClassVar[struct.Struct] = struct.Struct("<4sQ2H2I4Q")
    SIZE: ClassVar[int] = STRUCT.size  # 56, without extensible data
    # 4.3.14.1: the stated size leaves out the signature and itself.
    STATED_SIZE: ClassVar[int] = SIZE - 12

    stated_size: int
    version_made_by: int
    version_needed: int
    disk: int
    directory_disk: int
    disk_count: int
    count: int
    directory_size: int
    directory_offset: int

    @classmethod
    def unpack(cls, buffer: bytes, offset: int = 0) -> Zip64EndRecord | None:
        """The record at `offset`, or None."""
        if offset < 0 or len(buffer) - offset < cls.SIZE:
            return None
        signature, *fields = cls.STRUCT.unpack_from(buffer, offset)
        return cls(*fields) if signature == cls.SIGNATURE else None

    def pack(self) -> bytes:
        """The record's bytes."""
        return self.STRUCT.pack(
            self.SIGNATURE,
            self.stated_size,
            self.version_made_by,
            self.version_needed,
            self.disk,
            self.directory_disk,
            self.disk_count,
            self.count,
            self.directory_size,
            self.directory_offset,
        )


@dataclass(frozen=True, slots=True)
class Zip64Locator:
    """Points to the Zip64 end record (APPNOTE 4.3.15)."""

    SIGNATURE: ClassVar[bytes] = b"PK\x06\x07"
    STRUCT: ClassVar[struct.Struct] = struct.Struct("<4sIQI")
    SIZE: ClassVar[int] = STRUCT.size  # 20

    record_disk: int
    record_offset: int
    disks: int

    @classmethod
    def unpack(cls, buffer: bytes, offset: int = 0) -> Zip64Locator | None:
        """The record at `offset`, or None."""
        if offset < 0 or len(buffer) - offset < cls.SIZE:
            return None
        signature, *fields = cls.STRUCT.unpack_from(buffer, offset)
        return cls(*fields) if signature == cls.SIGNATURE else None

    def pack(self) -> bytes:
        """The record's bytes."""
        return self.STRUCT.pack(self.SIGNATURE, self.record_disk, self.record_offset, self.disks)


@dataclass(frozen=True, slots=True)
class EndRecord:
    """Ends the file and says where the directory is (APPNOTE 4.3.16)."""

    SIGNATURE: ClassVar[bytes] = b"PK\x05\x06"
    STRUCT: ClassVar[struct.Struct] = struct.Struct("<4s4H2IH")
    SIZE: ClassVar[int] = STRUCT.size  # 22, without comment

    disk: int
    directory_disk: int
    disk_count: int
    count: int
    directory_size: int
    directory_offset: int
    comment_size: int

    @classmethod
    def unpack(cls, buffer: bytes, offset: int = 0) -> EndRecord | None:
        """The record at `offset` without its comment, or None."""
        if offset < 0 or len(buffer) - offset < cls.SIZE:
            return None
        signature, *fields = cls.STRUCT.unpack_from(buffer, offset)
        return cls(*fields) if signature == cls.SIGNATURE else None

    def pack(self) -> bytes:
        """The record's bytes, without comment."""
        return self.STRUCT.pack(
            self.SIGNATURE,
            self.disk,
            self.directory_disk,
            self.disk_count,
            self.count,
            self.directory_size,
            self.directory_offset,
            self.comment_size,
        )


def pack_extra(identifier: int, data: bytes) -> bytes:
    """One extra field: its id, its size, its data (APPNOTE 4.5.1)."""
    return _EXTRA_HEADER.pack(identifier, len(data)) + data


def unpack_extra(extra: bytes) -> Iterator[tuple[int, bytes]]:
    """The extra fields as pairs of id and data, in order (APPNOTE 4.5.1).

    Raises:
        ValueError: A field runs past the end, or bytes are left that are no field.
    """
    offset = 0
    while offset < len(extra):
        if len(extra) - offset < EXTRA_HEADER_SIZE:
            raise ValueError(f"{len(extra) - offset} stray bytes after the last extra field")
        identifier, size = _EXTRA_HEADER.unpack_from(extra, offset)
        offset += EXTRA_HEADER_SIZE
        if size > len(extra) - offset:
            raise ValueError(
                f"extra field {identifier:#06x} states {size} bytes, {len(extra) - offset} are left"
            )
        yield identifier, extra[offset : offset + size]
        offset += size


def pack_zip64_extra(*values: int) -> bytes:
    """The Zip64 field holding `values`, or nothing where there are none (APPNOTE 4.5.3)."""
    if not values:
        return b""
    return pack_extra(ZIP64_EXTRA, struct.pack(f"<{len(values)}Q", *values))


def unpack_zip64_values(data: bytes) -> tuple[int, ...] | None:
    """The 64-bit numbers of a Zip64 field, or None where its length is no multiple of 8."""
    count, rest = divmod(len(data), _UINT64_SIZE)
    return None if rest else struct.unpack(f"<{count}Q", data)


def pack_alignment_extra(alignment: int, padding: int) -> bytes:
    """The alignment field with `padding` zero bytes."""
    return pack_extra(ALIGNMENT_EXTRA, _ALIGNMENT_VALUE.pack(alignment) + bytes(padding))


def unpack_alignment(data: bytes) -> tuple[int, bytes] | None:
    """Alignment and padding of an alignment field's data, or None where it is too short."""
    if len(data) < _ALIGNMENT_VALUE.size:
        return None
    return _ALIGNMENT_VALUE.unpack_from(data)[0], data[_ALIGNMENT_VALUE.size :]
