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
    bounds = _locate(view)
    listed = list(_list(view, bounds))
    _require_distinct_names(item.name for item in listed)
    data_offsets: dict[int, int] = {}
    dropped: list[str] = []
    end = 0
    # Each header is only looked at when it lies behind all others, so none is read twice.
    for item in sorted(listed, key=lambda item: item.header_offset):
        if item.header_offset < end:
            raise _format_error(
                f"expected its local header at offset {end} or later, behind the entry before it, "
                f"found it at {item.header_offset}: entries overlap",
                item.name,
            )
        data_offset = _check_local_header(view, item, bounds.offset)
        if item.header_offset > end:
            if not data_offsets:
                raise _format_error(
                    f"expected the first local header at offset 0, found it at "
                    f"{item.header_offset}",
                    item.name,
                )
            dropped.append(_gap(view, end, item.header_offset, f"before entry {item.name!r}"))
        data_offsets[item.header_offset] = data_offset
        end = _end_of_entry(view, item, data_offset, bounds.offset)
    if not listed and bounds.end_records_offset:
        raise _format_error(
            f"expected nothing in a zip without entries, found {bounds.end_records_offset} bytes"
        )
    if end < bounds.offset:
        dropped.append(_gap(view, end, bounds.offset, "before the central directory"))
    if bounds.end < bounds.end_records_offset:
        dropped.append(
            _gap(view, bounds.end, bounds.end_records_offset, "after the central directory")
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


def _format_error(message: str, name: str | None = None) -> ArchiveFormatError:
    return ArchiveFormatError(_about(message, name), entry=name)


def _unsupported(message: str, name: str | None = None) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(_about(message, name), entry=name)


def _about(message: str, name: str | None) -> str:
    return message if name is None else f"entry {name!r}: {message}"


def _gap(view: memoryview, start: int, end: int, where: str) -> str:
    """Tells of bytes that belong to nothing.

    Raises:
        ArchiveFormatError: They could be a directory: another reader may find other entries there.
    """
    gap = view[start:end]
    found = _BEGINS_DIRECTORY.search(gap)
    if found is not None:
        raise _format_error(
            f"expected one central directory, found the signature of another one, or of another "
            f"end of the file, at offset {start + found.start()}, in bytes that belong to nothing "
            f"{where}"
        )
    hidden = gap[: len(LocalHeader.SIGNATURE)] == LocalHeader.SIGNATURE
    what = "an entry that the directory does not list" if hidden else "they belong to nothing"
    return f"{end - start} bytes at offset {start} {where} are left out: {what}"


# The end of the file


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Where the central directory lies, and where the end records begin after it."""

    offset: int
    size: int
    count: int
    end_records_offset: int

    @property
    def end(self) -> int:
        return self.offset + self.size


def _locate(view: memoryview) -> _Bounds:
    end_offset, end = _find_end_record(view)
    locator_offset = end_offset - Zip64Locator.SIZE
    locator = Zip64Locator.unpack(bytes(view[max(0, locator_offset) : end_offset]))
    if locator is None:
        # A count of 65,535 needs no Zip64 record in the eyes of Python's zipfile; the records are
        # counted. Sizes and offsets that look so are always written with one.
        if records.SATURATED_32 in (end.directory_size, end.directory_offset):
            raise _format_error(
                f"expected a Zip64 locator at offset {locator_offset}, since the end record is "
                f"saturated, found none"
            )
        disks = (end.disk, end.directory_disk)
        bounds = _Bounds(end.directory_offset, end.directory_size, end.count, end_offset)
        disk_count = end.disk_count
    else:
        record_offset, record = _zip64_record(view, locator, locator_offset)
        _require_one_truth(end, record)
        disks = (record.disk, record.directory_disk)
        bounds = _Bounds(
            record.directory_offset, record.directory_size, record.count, record_offset
        )
        disk_count = record.disk_count
    if disks != (0, 0):
        raise _unsupported(
            f"expected one file, found one of several: the end of disk {disks[0]}, with the "
            f"directory on disk {disks[1]}"
        )
    if disk_count != bounds.count:
        raise _format_error(
            f"expected as many entries on the disk as in all, found {disk_count} and {bounds.count}"
        )
    if bounds.end > bounds.end_records_offset:
        raise _format_error(
            f"expected the directory to end at offset {bounds.end_records_offset} or before, where "
            f"the end records begin, found {bounds.size} bytes at offset {bounds.offset}"
        )
    if bounds.size < DirectoryRecord.SIZE * bounds.count:
        raise _format_error(
            f"expected at least {DirectoryRecord.SIZE} bytes for each of {bounds.count} directory "
            f"records, found {bounds.size} bytes in all"
        )
    if bounds.count > MAX_ENTRIES:
        raise _unsupported(f"expected at most {MAX_ENTRIES} entries, found {bounds.count}")
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
        raise _format_error(
            f"expected an end record in the last {len(tail)} bytes of {len(view)}, found none: "
            f"the file is no zip, or its end is missing"
        )
    comment = tail[position + EndRecord.SIZE :]
    if len(comment) != end.comment_size:
        raise _format_error(
            f"expected a comment of {end.comment_size} bytes after the end record at offset "
            f"{tail_offset + position}, found {len(comment)} bytes"
        )
    if _BEGINS_RECORD.search(comment):
        raise _format_error(
            "expected a comment of words, found the signature of a zip record in it"
        )
    return tail_offset + position, end


def _zip64_record(
    view: memoryview, locator: Zip64Locator, locator_offset: int
) -> tuple[int, Zip64EndRecord]:
    if (locator.record_disk, locator.disks) != (0, 1):
        raise _unsupported(
            f"expected one file, found one of several: the Zip64 locator says disk "
            f"{locator.record_disk} of {locator.disks}"
        )
    offset = locator_offset - Zip64EndRecord.SIZE
    record = Zip64EndRecord.unpack(bytes(view[max(0, offset) : locator_offset]))
    if record is None or locator.record_offset != offset:
        raise _format_error(
            f"expected the Zip64 end record at offset {offset}, directly before its locator, found "
            f"{'none' if record is None else 'one'} there and a locator that says "
            f"{locator.record_offset}"
        )
    if record.stated_size != Zip64EndRecord.STATED_SIZE:
        raise _format_error(
            f"expected size {Zip64EndRecord.STATED_SIZE} in the Zip64 end record, found "
            f"{record.stated_size}"
        )
    if record.version_needed >= records.VERSION_ZIP64_ENCRYPTED:
        raise _unsupported(
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
            raise _format_error(
                f"expected {field.replace('_', ' ')} {expected} in the end record, as in the Zip64 "
                f"end record, found {stated}"
            )


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


def _list(view: memoryview, bounds: _Bounds) -> Iterator[_Listed]:
    position = bounds.offset
    for index in range(bounds.count):
        record = _unpacked(DirectoryRecord, view, position, bounds.end)
        if record is None:
            raise _format_error(
                f"expected directory record {index + 1} of {bounds.count} at offset {position}, "
                f"found none"
            )
        position += record.packed_size
        yield _listed(record)
    if position != bounds.end:
        raise _format_error(
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
            raise _format_error(
                f"expected {_VALUE_NAMES[index]} {stated[index]} in the Zip64 field, as in the "
                f"directory record, found {value}",
                name,
            )
        values[index] = value
    nbytes, compressed_nbytes, header_offset, disk = values
    if disk:
        raise _unsupported(f"expected it on disk 0, found it on disk {disk}", name)
    if record.method == records.METHOD_STORED and compressed_nbytes != nbytes:
        raise _format_error(
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
        raise _format_error(
            f"expected a name of at most {MAX_NAME_SIZE} bytes, found {len(record.name)}",
            shown[:_USUAL_SIZE],
        )
    if not record.name.isascii() and not record.flags & records.FLAG_UTF8:
        raise _format_error(
            f"expected a name of ASCII, or one that is marked as UTF-8, found the bytes "
            f"{record.name!r}; {_UTF8_REMEDY}",
            shown,
        )
    try:
        name = record.name.decode()
    except UnicodeDecodeError:
        raise _format_error(
            f"expected a name in UTF-8, as it is marked, found the bytes {record.name!r}", shown
        ) from None
    if name == _HERE:
        return name  # a folder, which holds no data
    path = name.removeprefix(_HERE)
    components = path.removesuffix("/").split("/")
    if not {"", ".", ".."}.isdisjoint(components) or "\\" in path or _DRIVE.match(path):
        raise _format_error(
            "expected a relative path with slashes, without '.', '..' and drive letter, found "
            "another name",
            name,
        )
    if _CONTROL_CHARACTER.search(name):
        raise _format_error("expected a name without control characters, found some", name)
    return path


def _check_flags(flags: int, name: str) -> None:
    if flags & _FLAGS_ENCRYPTED:
        raise _unsupported(f"expected it not to be encrypted, found flags {flags:#06x}", name)
    if flags & ~_FLAGS_ALLOWED:
        raise _unsupported(
            f"expected no flags but {_FLAGS_ALLOWED:#06x}, found {flags:#06x}: patched data or "
            f"reserved flags",
            name,
        )


def _check_method(method: int, name: str) -> None:
    if method not in _METHODS:
        raise _unsupported(
            f"expected it stored or compressed by deflate, deflate64, bzip2 or LZMA, found method "
            f"{method} ({_OTHER_METHODS.get(method, 'unknown')})",
            name,
        )


def _check_version(version: int, method: int, name: str) -> None:
    # 4.4.3.2: what LZMA needs is the largest number; all that else needs it is encryption.
    if version > records.VERSION_LZMA or (
        version == records.VERSION_LZMA and method != records.METHOD_LZMA
    ):
        raise _unsupported(
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
        raise _format_error(
            f"expected a regular file, or a folder with a slash at the end of its name, found "
            f"attributes {record.external_attributes:#010x}: a link, a device or a folder",
            listed.name,
        )
    if listed.is_folder and (listed.nbytes or listed.crc32):
        raise _format_error(
            f"expected a folder to be empty, found {listed.nbytes} bytes", listed.name
        )


def _require_distinct_names(names: Iterable[str]) -> None:
    """No two names may be equal under ASCII down-casing, or they are one on some file systems."""
    seen: dict[bytes, str] = {}
    for name in names:
        folded = name.encode().lower()
        if folded in seen:
            raise _format_error(
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
        raise _format_error(f"expected whole extra fields, found {error}", name) from None
    if any(identifier == records.UNICODE_PATH_EXTRA for identifier, _ in fields):
        raise _format_error(
            f"expected one name, found a second one in extra field "
            f"{records.UNICODE_PATH_EXTRA:#06x}; {_UTF8_REMEDY}",
            name,
        )
    return fields


def _zip64_content(fields: Sequence[tuple[int, bytes]], missing: Sequence[int], name: str) -> bytes:
    contents = [content for identifier, content in fields if identifier == records.ZIP64_EXTRA]
    if len(contents) > 1:
        raise _format_error(f"expected one Zip64 field, found {len(contents)}", name)
    if missing and not contents:
        raise _format_error(
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
    raise _format_error(
        f"expected {', '.join(_VALUE_NAMES[index] for index in missing) or 'nothing'} in the Zip64 "
        f"field, found {len(content)} bytes",
        name,
    )


# Local headers and what follows the data


def _check_local_header(view: memoryview, item: _Listed, end: int) -> int:
    """Compares the local header with the directory record; gives where the data begins."""
    header = _unpacked(LocalHeader, view, item.header_offset, end)
    if header is None:
        raise _format_error(
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
            raise _format_error(
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
        raise _format_error(
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
        raise _format_error(
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
    raise _format_error(
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
