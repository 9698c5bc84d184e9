"""The records of a zip file, each declared once: signature, size, `unpack` and `pack`.

Fields are in the order of PKWARE's APPNOTE.TXT 6.3.10, whose sections are cited. All numbers are
little-endian. `unpack` checks length and signature only, and returns None if either is wrong; its
callers check the values.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple, Self

UINT16_MAX = 0xFFFF
UINT32_MAX = 0xFFFFFFFF
# A field with its largest number refers to the Zip64 field or the Zip64 end record (4.4.1.4).
SATURATED_16 = UINT16_MAX
SATURATED_32 = UINT32_MAX

# Compression methods (4.4.5).
METHOD_STORED = 0
METHOD_DEFLATE = 8
METHOD_DEFLATE64 = 9
METHOD_BZIP2 = 12
METHOD_LZMA = 14
# Flags (4.4.4).
FLAG_ENCRYPTED = 1 << 0
FLAG_DATA_DESCRIPTOR = 1 << 3
FLAG_STRONG_ENCRYPTION = 1 << 6
FLAG_UTF8 = 1 << 11
FLAG_MASKED_HEADER = 1 << 13

# Versions needed to extract (4.4.3.2).
VERSION_STORED = 10
VERSION_FOLDER = 20
VERSION_ZIP64 = 45
MADE_BY_UNIX = 3 << 8  # 4.4.2: the upper byte is the system, the lower one the version
MADE_BY_SYSTEM_MASK = 0xFF << 8

# 4.4.15: st_mode of Unix in the upper half, attributes of MS-DOS in the lower half.
UNIX_MODE_SHIFT = 16
UNIX_TYPE_MASK = 0o170000
UNIX_SPECIAL_BITS = 0o7000  # set-user-ID, set-group-ID, sticky
UNIX_REGULAR = 0o100000
DOS_ATTRIBUTES_MASK = 0xFFFF
DOS_FILE_ATTRIBUTES = 0x01 | 0x02 | 0x04 | 0x20  # read-only, hidden, system, archive
REGULAR_FILE_ATTRIBUTES = (UNIX_REGULAR | 0o644) << UNIX_MODE_SHIFT

# 4.4.6: 1980-01-01 00:00:00, the earliest time of a zip.
EPOCH_TIME = 0
EPOCH_DATE = 1 << 5 | 1

ZIP64_EXTRA = 0x0001  # 4.5.3
# Android's field for aligned zips (4.6.1): uint16 alignment, then padding.
ALIGNMENT_EXTRA = 0xD935

_EXTRA_HEADER = struct.Struct("<HH")
_ALIGNMENT_VALUE = struct.Struct("<H")
_ALIGNMENT_EXTRA = struct.Struct("<HHH")
EXTRA_HEADER_SIZE = _EXTRA_HEADER.size
ALIGNMENT_EXTRA_SIZE = _EXTRA_HEADER.size + _ALIGNMENT_VALUE.size  # without padding
_UINT64_SIZE = 8


class _Record:
    """Base of all records. Records are named tuples: dataclasses would slow down the import.

    A record may end with texts: a name and further fields of variable size.
    """

    __slots__: tuple[str, ...] = ()
    SIGNATURE: ClassVar[bytes]
    STRUCT: ClassVar[struct.Struct]
    SIZE: ClassVar[int]  # without texts
    TEXT_SIZES: ClassVar[slice] = slice(0, 0)  # where the sizes of the texts are among the numbers

    @classmethod
    def unpack(cls, buffer: bytes | memoryview, offset: int = 0) -> Self | None:
        """The record at `offset` with its texts, or None if there is none."""
        if offset < 0 or len(buffer) - offset < cls.SIZE:
            return None
        signature, *numbers = cls.STRUCT.unpack_from(buffer, offset)
        end = offset + cls.SIZE
        texts = []
        for size in numbers[cls.TEXT_SIZES]:
            texts.append(bytes(buffer[end : end + size]))
            end += size
        if signature != cls.SIGNATURE or end > len(buffer):
            return None
        del numbers[cls.TEXT_SIZES]
        make: Callable[..., Self] = cls
        return make(*numbers, *texts)

    def pack(self: Any) -> bytes:
        """The bytes of the record, with its texts."""
        begin, end = self.TEXT_SIZES.start, self.TEXT_SIZES.stop
        count = len(self) - (end - begin)
        numbers, texts = self[:count], self[count:]
        sizes = map(len, texts)
        packed = self.STRUCT.pack(self.SIGNATURE, *numbers[:begin], *sizes, *numbers[begin:])
        return b"".join((packed, *texts))

    @property
    def packed_size(self) -> int:
        """Size of the record with its texts, in bytes."""
        return len(self.pack())


class _LocalHeaderFields(NamedTuple):
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


class LocalHeader(_LocalHeaderFields, _Record):
    """Precedes the data of an entry (APPNOTE 4.3.7)."""

    __slots__ = ()
    SIGNATURE = b"PK\x03\x04"
    STRUCT = struct.Struct("<4s5H3I2H")
    SIZE = STRUCT.size  # 30, without name and extra fields
    MAX_SIZE: ClassVar[int] = STRUCT.size + 2 * UINT16_MAX  # with name and extra fields
    TEXT_SIZES = slice(8, 10)


class _DirectoryRecordFields(NamedTuple):
    version_made_by: int
    version_needed: int
    flags: int
    method: int
    time: int
    date: int
    crc32: int
    compressed_size: int
    uncompressed_size: int
    # A packed record has the sizes of name, extra fields and comment between the fields
    # `uncompressed_size` and `disk_start` (4.4.10 to 4.4.12).
    disk_start: int
    internal_attributes: int
    external_attributes: int
    header_offset: int
    name: bytes
    extra: bytes
    comment: bytes


class DirectoryRecord(_DirectoryRecordFields, _Record):
    """Describes one entry in the central directory (APPNOTE 4.3.12)."""

    __slots__ = ()
    SIGNATURE = b"PK\x01\x02"
    STRUCT = struct.Struct("<4s6H3I5H2I")
    SIZE = STRUCT.size  # 46, without name, extra fields and comment
    TEXT_SIZES = slice(9, 12)


class _Zip64EndRecordFields(NamedTuple):
    stated_size: int
    version_made_by: int
    version_needed: int
    disk: int
    directory_disk: int
    disk_entry_count: int
    entry_count: int
    directory_size: int
    directory_offset: int


class Zip64EndRecord(_Zip64EndRecordFields, _Record):
    """Locates the directory if the end record cannot (APPNOTE 4.3.14)."""

    __slots__ = ()
    SIGNATURE = b"PK\x06\x06"
    STRUCT = struct.Struct("<4sQ2H2I4Q")
    SIZE = STRUCT.size  # 56, without extensible data
    # 4.3.14.1: the stated size excludes the signature and the field itself.
    STATED_SIZE: ClassVar[int] = STRUCT.size - 12


class _Zip64LocatorFields(NamedTuple):
    record_disk: int
    record_offset: int
    disks: int


class Zip64Locator(_Zip64LocatorFields, _Record):
    """Points to the Zip64 end record (APPNOTE 4.3.15)."""

    __slots__ = ()
    SIGNATURE = b"PK\x06\x07"
    STRUCT = struct.Struct("<4sIQI")
    SIZE = STRUCT.size  # 20


class _EndRecordFields(NamedTuple):
    disk: int
    directory_disk: int
    disk_entry_count: int
    entry_count: int
    directory_size: int
    directory_offset: int
    comment_size: int


class EndRecord(_EndRecordFields, _Record):
    """Ends the file and locates the directory (APPNOTE 4.3.16)."""

    __slots__ = ()
    SIGNATURE = b"PK\x05\x06"
    STRUCT = struct.Struct("<4s4H2IH")
    SIZE = STRUCT.size  # 22, without comment


def unequal_sizes(compressed: int, uncompressed: int) -> str:
    """The message for a stored entry with different sizes."""
    return (
        "expected equal compressed and uncompressed sizes of a stored entry, found "
        f"{compressed} and {uncompressed}"
    )


def pack_extra(identifier: int, data: bytes) -> bytes:
    """The bytes of one extra field: id, size, data (APPNOTE 4.5.1)."""
    return _EXTRA_HEADER.pack(identifier, len(data)) + data


def unpack_extra(extra: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields id and data of each extra field, in order (APPNOTE 4.5.1).

    Raises:
        ValueError: A field exceeds the end of `extra`, or stray bytes follow the last field.
    """
    offset = 0
    while offset < len(extra):
        if len(extra) - offset < EXTRA_HEADER_SIZE:
            raise ValueError(f"{len(extra) - offset} stray bytes after the last extra field")
        identifier, size = _EXTRA_HEADER.unpack_from(extra, offset)
        offset += EXTRA_HEADER_SIZE
        if size > len(extra) - offset:
            raise ValueError(
                f"extra field {identifier:#06x} with the stated size {size} and the actual size "
                f"{len(extra) - offset}"
            )
        yield identifier, extra[offset : offset + size]
        offset += size


def pack_zip64_extra(*values: int) -> bytes:
    """The Zip64 field with `values`; empty if there are no values (APPNOTE 4.5.3)."""
    if not values:
        return b""
    return pack_extra(ZIP64_EXTRA, struct.pack(f"<{len(values)}Q", *values))


def unpack_zip64_values(data: bytes) -> tuple[int, ...] | None:
    """The 64-bit numbers of a Zip64 field; None if its size is no multiple of 8."""
    count, rest = divmod(len(data), _UINT64_SIZE)
    return None if rest else struct.unpack(f"<{count}Q", data)


def pack_alignment_extra(alignment: int, padding: int) -> bytes:
    """The alignment field with `padding` zero bytes."""
    size = _ALIGNMENT_VALUE.size + padding
    return _ALIGNMENT_EXTRA.pack(ALIGNMENT_EXTRA, size, alignment) + bytes(padding)


def unpack_alignment(data: bytes) -> tuple[int, bytes] | None:
    """Alignment and padding from the data of an alignment field; None if `data` is too short."""
    if len(data) < _ALIGNMENT_VALUE.size:
        return None
    return _ALIGNMENT_VALUE.unpack_from(data)[0], data[_ALIGNMENT_VALUE.size :]
