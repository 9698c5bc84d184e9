"""Reads the framing of a zip that any tool has made.

Tolerant of what changes no reading: comments, other methods, data descriptors, extra fields, any
order, bytes that belong to nothing (which are left out and told of). Whatever two readers could
read differently is refused: every local header is compared with its directory record, no two
entries share a byte, and bytes that belong to nothing may hide an entry but no other directory.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from onnxarchive.zipformat import records
from onnxarchive.zipformat.foreign_end import (
    ForeignBounds,
    format_error,
    gap,
    locate_foreign,
    unsupported,
)
from onnxarchive.zipformat.records import DirectoryRecord, LocalHeader

MAX_NAME_SIZE = 4096  # bytes; no longer path can be opened on Linux

_METHODS = frozenset(
    {
        records.METHOD_STORED,
        records.METHOD_DEFLATE,
        records.METHOD_DEFLATE64,
        records.METHOD_BZIP2,
        records.METHOD_LZMA,
    }
)
# 4.4.5: what else a zip may hold, for messages.
_OTHER_METHODS = {
    1: "shrunk",
    2: "reduced",
    3: "reduced",
    4: "reduced",
    5: "reduced",
    6: "imploded",
    10: "imploded by PKWARE",
    16: "IBM z/OS CMPSC",
    18: "IBM TERSE",
    19: "IBM LZ77",
    20: "Zstandard, old number",
    93: "Zstandard",
    94: "MP3",
    95: "XZ",
    96: "JPEG",
    97: "WavPack",
    98: "PPMd",
    99: "AES encryption",
}
_FLAGS_ENCRYPTED = (
    records.FLAG_ENCRYPTED | records.FLAG_STRONG_ENCRYPTION | records.FLAG_MASKED_HEADER
)
_FLAGS_ALLOWED = records.FLAGS_COMPRESSION_LEVEL | records.FLAG_DATA_DESCRIPTOR | records.FLAG_UTF8


# Info-ZIP's zip and the Finder of macOS write UTF-8 and do not say so.
_UTF8_REMEDY = "pack it with a tool that marks names as UTF-8, such as 7z or Python's zipfile"

_CONTROL_CHARACTER = re.compile("[\x00-\x1f\x7f-\x9f]")
# How tar and bsdtar begin the names of what is in the folder that they were told to pack.
_HERE = "./"
_DRIVE = re.compile("[A-Za-z]:")

# 4.5.3: the order of a Zip64 field's values, and the number that says in a header: look there.
_SATURATED = (
    records.SATURATED_32,
    records.SATURATED_32,
    records.SATURATED_32,
    records.SATURATED_16,
)
_ZIP64_CODES = ("Q", "Q", "Q", "I")
_FULL_FORMS = [list(range(count)) for count in range(len(_ZIP64_CODES) + 1)]
_VALUE_NAMES = ("uncompressed size", "compressed size", "header offset", "disk")

# 4.3.9: CRC-32 and both sizes. The first four bytes may be missing or not, and which width a writer
# takes for the sizes cannot be told beforehand.
_DESCRIPTOR_32 = struct.Struct("<3I")
_DESCRIPTOR_64 = struct.Struct("<I2Q")

# Headers are copied out of the map: most have this many bytes, and none has more than that.
_USUAL_SIZE = 512
_MAX_RECORD_SIZE = DirectoryRecord.SIZE + 3 * records.UINT16_MAX

_Record = TypeVar("_Record", DirectoryRecord, LocalHeader)


@dataclass(frozen=True, slots=True)
class ForeignEntry:
    """One entry of a foreign zip.

    Attributes:
        name: The entry's name: relative, with slashes, without `.` and `..`.
        method: How it is compressed (APPNOTE 4.4.5): stored, deflate, deflate64, bzip2 or LZMA.
        compressed_nbytes: Size of its compressed data in bytes.
        nbytes: Size of its data in bytes once inflated, as both headers declare it.
        crc32: CRC-32 of its data once inflated, as both headers declare it.
        data_offset: Where its compressed data begins, in bytes from the start of the file.
        has_end_marker: Whether compressed data of LZMA end with a marker.
    """

    name: str
    method: int
    compressed_nbytes: int
    nbytes: int
    crc32: int
    data_offset: int
    has_end_marker: bool = False


@dataclass(frozen=True, slots=True)
class ForeignZip:
    """What a foreign zip holds.

    Attributes:
        entries: Its entries in the order of its directory, without folders.
        dropped: What of the file is no part of that, a sentence each.
    """

    entries: tuple[ForeignEntry, ...]
    dropped: tuple[str, ...]


def read(view: memoryview) -> ForeignZip:
    """Reads a zip that any tool has made; no entry's data is inflated.

    Args:
        view: The whole file.

    Raises:
        ArchiveFormatError: It is no zip, it is damaged, or readers could differ about it.
        UnsupportedFeatureError: It is encrypted or split, uses a compression method that cannot
            be inflated here, or has too many entries.
    """
    bounds = locate_foreign(view)
    listed = list(_list(view, bounds))
    _require_distinct_names(item.name for item in listed)
    data_offsets: dict[int, int] = {}
    dropped: list[str] = []
    end = 0
    # Each header is only looked at when it lies behind all others, so none is read twice.
    for item in sorted(listed, key=lambda item: item.header_offset):
        if item.header_offset < end:
            raise format_error(
                f"expected its local header at offset {end} or later, behind the entry before it, "
                f"found it at {item.header_offset}: entries overlap",
                item.name,
            )
        data_offset = _check_local_header(view, item, bounds.offset)
        if item.header_offset > end:
            if not data_offsets:
                raise format_error(
                    f"expected the first local header at offset 0, found it at "
                    f"{item.header_offset}",
                    item.name,
                )
            dropped.append(gap(view, end, item.header_offset, f"before entry {item.name!r}"))
        data_offsets[item.header_offset] = data_offset
        end = _end_of_entry(view, item, data_offset, bounds.offset)
    if not listed and bounds.end_records_offset:
        raise format_error(
            f"expected nothing in a zip without entries, found {bounds.end_records_offset} bytes"
        )
    if end < bounds.offset:
        dropped.append(gap(view, end, bounds.offset, "before the central directory"))
    if bounds.end < bounds.end_records_offset:
        dropped.append(
            gap(view, bounds.end, bounds.end_records_offset, "after the central directory")
        )
    entries = tuple(
        ForeignEntry(
            item.name,
            item.method,
            item.compressed_nbytes,
            item.nbytes,
            item.crc32,
            data_offsets[item.header_offset],
            bool(item.flags & records.FLAG_LZMA_END_MARKER) and item.method == records.METHOD_LZMA,
        )
        for item in listed
        if not item.is_folder
    )
    return ForeignZip(entries, tuple(dropped))


# The end of the file


# The central directory


@dataclass(frozen=True, slots=True)
class _Listed:
    """What a directory record says, with values taken from where they stand, Zip64 field or not."""

    name: str
    raw_name: bytes
    flags: int
    method: int
    crc32: int
    compressed_nbytes: int
    nbytes: int
    header_offset: int

    @property
    def is_folder(self) -> bool:
        return self.name.endswith("/")

    @property
    def has_descriptor(self) -> bool:
        return bool(self.flags & records.FLAG_DATA_DESCRIPTOR)


def _list(view: memoryview, bounds: ForeignBounds) -> Iterator[_Listed]:
    position = bounds.offset
    for index in range(bounds.count):
        record = _unpacked(DirectoryRecord, view, position, bounds.end)
        if record is None:
            raise format_error(
                f"expected directory record {index + 1} of {bounds.count} at offset {position}, "
                f"found none"
            )
        position += record.packed_size
        yield _listed(record)
    if position != bounds.end:
        raise format_error(
            f"expected {bounds.count} directory records of {bounds.size} bytes in all, found "
            f"{position - bounds.offset} bytes"
        )


def _unpacked(kind: type[_Record], view: memoryview, offset: int, end: int) -> _Record | None:
    """A header of any length, or None. Few bytes are copied at first, then four times as many."""
    size = _USUAL_SIZE
    while True:
        stop = min(offset + size, end)
        record = kind.unpack(bytes(view[offset:stop]))
        if record is not None or stop == end or size > _MAX_RECORD_SIZE:
            return record
        size *= 4


def _listed(record: DirectoryRecord) -> _Listed:
    name = _name(record)
    _check_flags(record.flags, name)
    _check_method(record.method, name)
    _check_version(record.version_needed, record.method, name)
    stated = (
        record.uncompressed_size,
        record.compressed_size,
        record.header_offset,
        record.disk_start,
    )
    values = list(stated)
    zip64 = _zip64_values(record.extra, stated, name)
    for index, value in zip64.items():
        if stated[index] not in (_SATURATED[index], value):
            raise format_error(
                f"expected {_VALUE_NAMES[index]} {stated[index]} in the Zip64 field, as in the "
                f"directory record, found {value}",
                name,
            )
        values[index] = value
    nbytes, compressed_nbytes, header_offset, disk = values
    if disk:
        raise unsupported(f"expected it on disk 0, found it on disk {disk}", name)
    if record.method == records.METHOD_STORED and compressed_nbytes != nbytes:
        raise format_error(
            f"expected equal sizes of a stored entry, found {compressed_nbytes} bytes stored of "
            f"{nbytes}",
            name,
        )
    listed = _Listed(
        name,
        record.name,
        record.flags,
        record.method,
        record.crc32,
        compressed_nbytes,
        nbytes,
        header_offset,
    )
    _check_attributes(record, listed)
    return listed


def _name(record: DirectoryRecord) -> str:
    shown = record.name.decode(errors="backslashreplace")
    if len(record.name) > MAX_NAME_SIZE:
        raise format_error(
            f"expected a name of at most {MAX_NAME_SIZE} bytes, found {len(record.name)}",
            shown[:_USUAL_SIZE],
        )
    if not record.name.isascii() and not record.flags & records.FLAG_UTF8:
        raise format_error(
            f"expected a name of ASCII, or one that is marked as UTF-8, found the bytes "
            f"{record.name!r}; {_UTF8_REMEDY}",
            shown,
        )
    try:
        name = record.name.decode()
    except UnicodeDecodeError:
        raise format_error(
            f"expected a name in UTF-8, as it is marked, found the bytes {record.name!r}", shown
        ) from None
    if name == _HERE:
        return name  # a folder, which holds no data
    path = name.removeprefix(_HERE)
    components = path.removesuffix("/").split("/")
    if not {"", ".", ".."}.isdisjoint(components) or "\\" in path or _DRIVE.match(path):
        raise format_error(
            "expected a relative path with slashes, without '.', '..' and drive letter, found "
            "another name",
            name,
        )
    if _CONTROL_CHARACTER.search(name):
        raise format_error("expected a name without control characters, found some", name)
    return path


def _check_flags(flags: int, name: str) -> None:
    if flags & _FLAGS_ENCRYPTED:
        raise unsupported(f"expected it not to be encrypted, found flags {flags:#06x}", name)
    if flags & ~_FLAGS_ALLOWED:
        raise unsupported(
            f"expected no flags but {_FLAGS_ALLOWED:#06x}, found {flags:#06x}: patched data or "
            f"reserved flags",
            name,
        )


def _check_method(method: int, name: str) -> None:
    if method not in _METHODS:
        raise unsupported(
            f"expected it stored or compressed by deflate, deflate64, bzip2 or LZMA, found method "
            f"{method} ({_OTHER_METHODS.get(method, 'unknown')})",
            name,
        )


def _check_version(version: int, method: int, name: str) -> None:
    # 4.4.3.2: what LZMA needs is the largest number; all that else needs it is encryption.
    if version > records.VERSION_LZMA or (
        version == records.VERSION_LZMA and method != records.METHOD_LZMA
    ):
        raise unsupported(
            f"expected a version needed below {records.VERSION_LZMA}, or that with LZMA, found "
            f"{version}",
            name,
        )


def _check_attributes(record: DirectoryRecord, listed: _Listed) -> None:
    unix_type = record.external_attributes >> records.UNIX_MODE_SHIFT & records.UNIX_TYPE_MASK
    dos_type = record.external_attributes & (records.DOS_DIRECTORY | records.DOS_VOLUME_LABEL)
    # zip and 7z keep the type of a pipe that they read the data from.
    expected_types = [0, records.UNIX_REGULAR, records.UNIX_FIFO]
    if listed.is_folder:
        expected_types.append(records.UNIX_DIRECTORY)
        dos_type &= ~records.DOS_DIRECTORY
    if unix_type not in expected_types or dos_type:
        raise format_error(
            f"expected a regular file, or a folder with a slash at the end of its name, found "
            f"attributes {record.external_attributes:#010x}: a link, a device or a folder",
            listed.name,
        )
    if listed.is_folder and (listed.nbytes or listed.crc32):
        raise format_error(
            f"expected a folder to be empty, found {listed.nbytes} bytes", listed.name
        )


def _require_distinct_names(names: Iterable[str]) -> None:
    """No two names may be equal under ASCII down-casing, or they are one on some file systems."""
    seen: dict[bytes, str] = {}
    for name in names:
        folded = name.encode().lower()
        if folded in seen:
            raise format_error(
                f"expected every name once, whatever its case, found it after {seen[folded]!r}",
                name,
            )
        seen[folded] = name


def _zip64_values(extra: bytes, stated: Sequence[int], name: str) -> Mapping[int, int]:
    """The values in the Zip64 field of a directory record, by their place in its full form.

    The field holds what does not fit the record, in the order of the full form (4.5.3). Some
    writers put more: the full form, up to some value.
    """
    missing = _missing(stated)
    content = _zip64_content(_extra_fields(extra, name), missing, name)
    return _zip64_form(content, missing, [missing, *_FULL_FORMS], name)


def _missing(stated: Sequence[int]) -> list[int]:
    return [index for index, value in enumerate(stated) if value == _SATURATED[index]]


def _extra_fields(extra: bytes, name: str) -> list[tuple[int, bytes]]:
    try:
        fields = list(records.unpack_extra(extra))
    except ValueError as error:
        raise format_error(f"expected whole extra fields, found {error}", name) from None
    if any(identifier == records.UNICODE_PATH_EXTRA for identifier, _ in fields):
        raise format_error(
            f"expected one name, found a second one in extra field "
            f"{records.UNICODE_PATH_EXTRA:#06x}; {_UTF8_REMEDY}",
            name,
        )
    return fields


def _zip64_content(fields: Sequence[tuple[int, bytes]], missing: Sequence[int], name: str) -> bytes:
    contents = [content for identifier, content in fields if identifier == records.ZIP64_EXTRA]
    if len(contents) > 1:
        raise format_error(f"expected one Zip64 field, found {len(contents)}", name)
    if missing and not contents:
        raise format_error(
            f"expected a Zip64 field for its {_VALUE_NAMES[missing[0]]}, found none", name
        )
    return contents[0] if contents else b""


def _zip64_form(
    content: bytes, missing: Sequence[int], forms: Iterable[Sequence[int]], name: str
) -> Mapping[int, int]:
    """Reads a Zip64 field in the one form that has its length and all that is missing."""
    if not (content or missing):
        return {}
    for form in forms:
        layout = struct.Struct("<" + "".join(_ZIP64_CODES[index] for index in form))
        if layout.size == len(content) and set(missing) <= set(form):
            return dict(zip(form, layout.unpack(content), strict=True))
    raise format_error(
        f"expected {', '.join(_VALUE_NAMES[index] for index in missing) or 'nothing'} in the Zip64 "
        f"field, found {len(content)} bytes",
        name,
    )


# Local headers and what follows the data


def _check_local_header(view: memoryview, item: _Listed, end: int) -> int:
    """Compares the local header with the directory record; gives where the data begins."""
    header = _unpacked(LocalHeader, view, item.header_offset, end)
    if header is None:
        raise format_error(
            f"expected its local header at offset {item.header_offset}, before the directory at "
            f"{end}, found none",
            item.name,
        )
    for field, expected, found in (
        ("name", item.raw_name, header.name),
        ("flags", item.flags, header.flags),
        ("method", item.method, header.method),
    ):
        if expected != found:
            raise format_error(
                f"expected {field} {expected!r} in its local header, as in the directory, found "
                f"{found!r}",
                item.name,
            )
    _check_version(header.version_needed, item.method, item.name)
    _check_local_values(header, item)
    return item.header_offset + LocalHeader.SIZE + len(header.name) + len(header.extra)


def _check_local_values(header: LocalHeader, item: _Listed) -> None:
    expected = (item.nbytes, item.compressed_nbytes, item.header_offset, 0)
    stated = (header.uncompressed_size, header.compressed_size)
    missing = _missing(stated)
    fields = _extra_fields(_without_stray_zeros(header.extra), item.name)
    content = _zip64_content(fields, missing, item.name)
    # 4.5.3: in a local header, either both sizes are in the field or none.
    forms = [form for form in _FULL_FORMS if not missing or len(form) >= len(stated)]
    zip64 = _zip64_form(content, missing, forms, item.name)
    found = [(index, value) for index, value in enumerate(stated) if index not in missing]
    for index, value in (*found, *zip64.items()):
        _require_equal(_VALUE_NAMES[index], expected[index], value, item)
    _require_equal("CRC-32", item.crc32, header.crc32, item)


def _require_equal(what: str, expected: int, found: int, item: _Listed) -> None:
    # 4.4.4: before a data descriptor the local header has zeros; some writers fill them in later.
    if found != expected and not (item.has_descriptor and found == 0):
        raise format_error(
            f"expected {what} {expected} in its local header, as in the directory, found {found}",
            item.name,
        )


def _without_stray_zeros(extra: bytes) -> bytes:
    """Local extra fields without zeros at their end that are too few to be a field.

    Old versions of Android's zipalign padded with them.
    """
    position = 0
    while len(extra) - position >= records.EXTRA_HEADER_SIZE:
        size = int.from_bytes(extra[position + 2 : position + 4], "little")
        position += records.EXTRA_HEADER_SIZE + size
    rest = extra[position:]
    return extra[:position] if rest.strip(b"\0") == b"" else extra


def _end_of_entry(view: memoryview, item: _Listed, data_offset: int, directory_offset: int) -> int:
    """Where the entry ends, its data descriptor included."""
    end = data_offset + item.compressed_nbytes
    if end > directory_offset:
        raise format_error(
            f"expected its {item.compressed_nbytes} bytes of data, which begin at offset "
            f"{data_offset}, to end at {directory_offset} or before, where the directory begins: "
            f"they overlap or lie beyond the file",
            item.name,
        )
    if not item.has_descriptor:
        return end
    for descriptor in _descriptors(item):
        descriptor_end = end + len(descriptor)
        if view[end : min(descriptor_end, directory_offset)] == descriptor:
            return descriptor_end
    raise format_error(
        f"expected a data descriptor at offset {end} with CRC-32 {item.crc32:#010x} and sizes "
        f"{item.compressed_nbytes} and {item.nbytes}, as in the directory, found none",
        item.name,
    )


def _descriptors(item: _Listed) -> Iterator[bytes]:
    """The data descriptor in every form that writers give it, longest first (4.3.9)."""
    values = (item.crc32, item.compressed_nbytes, item.nbytes)
    for signature in (records.DATA_DESCRIPTOR_SIGNATURE, b""):
        yield signature + _DESCRIPTOR_64.pack(*values)
        if max(values) <= records.UINT32_MAX:
            yield signature + _DESCRIPTOR_32.pack(*values)
