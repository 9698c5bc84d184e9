"""Reads the directory and the local headers of a zip written by any tool.

Accepts features that all readers read alike: comments, compression, data descriptors, extra
fields, any order of entries, and unused bytes (skipped and reported). Refuses zips that two readers
could read differently: each local header must match its directory record, entries must not overlap,
and unused bytes may hold an entry but no second directory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from onnxarchive.buffers.file_names import PLAIN_PATH, is_plain_path
from onnxarchive.zipformat import records
from onnxarchive.zipformat.foreign_end import (
    ForeignBounds,
    describe_gap,
    format_error,
    locate_foreign,
    unsupported,
)
from onnxarchive.zipformat.records import DirectoryRecord, LocalHeader

MAX_PATH_SIZE = 4096  # bytes; the longest path on Linux

_METHODS = frozenset(
    {
        records.METHOD_STORED,
        records.METHOD_DEFLATE,
        records.METHOD_DEFLATE64,
        records.METHOD_BZIP2,
        records.METHOD_LZMA,
    }
)
_OTHER_METHODS = {  # 4.4.5, for messages
    1: "shrunk",
    6: "imploded",
    20: "Zstandard, old number",
    93: "Zstandard",
    95: "XZ",
    98: "PPMd",
    99: "AES encryption",
}
_FLAGS_ENCRYPTED = (
    records.FLAG_ENCRYPTED | records.FLAG_STRONG_ENCRYPTION | records.FLAG_MASKED_HEADER
)
_FLAGS_ALLOWED = records.FLAGS_COMPRESSION_LEVEL | records.FLAG_DATA_DESCRIPTOR | records.FLAG_UTF8

# Info-ZIP's zip and the Finder of macOS write UTF-8 without marking it.
_UTF8_REMEDY = "make the zip with a tool that marks names as UTF-8, such as 7z or Python's zipfile"

_SIZE_LIMIT = 1 << 63  # no file has more bytes
_HERE = "./"  # prefix of names when tar or bsdtar packs the current folder
_MAX_SHOWN = 512  # characters of a name in a message

# The values of a Zip64 field in order (APPNOTE 4.5.3): names, formats, and the numbers in the
# header that refer to the field.
_ZIP64_NAMES = ("uncompressed size", "compressed size", "header offset", "disk")
_ZIP64_FORMATS = "QQQI"
_ZIP64_SATURATED = (*[records.SATURATED_32] * 3, records.SATURATED_16)

# 4.3.9: CRC-32 and both sizes, after an optional signature. Nothing states the width of the sizes.
_DESCRIPTOR_32 = struct.Struct("<3I")
_DESCRIPTOR_64 = struct.Struct("<I2Q")


@dataclass(frozen=True, slots=True)
class ForeignEntry:
    """One entry of a foreign zip.

    Attributes:
        name: The entry's name: a relative path with slashes, without `.` and `..`.
        method: Its compression method (APPNOTE 4.4.5): stored, deflate, deflate64, bzip2 or LZMA.
        compressed_nbytes: Size of its compressed data in bytes.
        nbytes: Size of its inflated data in bytes, as declared in the directory.
        crc32: CRC-32 of its inflated data, as declared in the directory.
        data_offset: Offset of its compressed data in the file, in bytes.
        has_end_marker: True if its LZMA data end with a marker (4.4.4).
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
    """The content of a foreign zip.

    Attributes:
        entries: Its entries in directory order, without folders.
        dropped: A sentence for each run of unused bytes.
    """

    entries: tuple[ForeignEntry, ...]
    dropped: tuple[str, ...]


def read_zip(view: memoryview) -> ForeignZip:
    """Reads a zip written by any tool; inflates no data.

    Args:
        view: The bytes of the whole file.

    Raises:
        ArchiveFormatError: The file is no zip, is damaged, or readers could read it differently.
        UnsupportedFeatureError: The zip is encrypted or split, uses an unsupported compression
            method, or has too many entries.
    """
    bounds = locate_foreign(view)
    listed = list(_list(view, bounds))
    _require_distinct_names(item.name for item in listed)
    data_offsets: dict[int, int] = {}  # by the offset of the local header
    dropped: list[str] = []
    end = 0
    # In file order, so that overlaps and gaps are found.
    for item in sorted(listed, key=lambda item: item.header_offset):
        if item.header_offset < end:
            raise format_error(
                f"expected its local header at offset {end} or later, after the entry before it, "
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
            place = f"before entry {item.name!r}"
            dropped.append(describe_gap(view, end, item.header_offset, place))
        data_offsets[item.header_offset] = data_offset
        end = _end_of_entry(view, item, data_offset, bounds.offset)
    if not listed and bounds.end_records_offset:
        raise format_error(
            f"expected nothing in a zip without entries, found {bounds.end_records_offset} bytes"
        )
    for start, stop, place in (
        (end, bounds.offset, "before the central directory"),
        (bounds.end, bounds.end_records_offset, "after the central directory"),
    ):
        if start < stop:
            dropped.append(describe_gap(view, start, stop, place))
    if sum(item.nbytes for item in listed) >= _SIZE_LIMIT:
        raise format_error(f"expected less than {_SIZE_LIMIT} bytes of data in all, found more")
    entries = (
        item.entry(data_offsets[item.header_offset]) for item in listed if not item.is_folder
    )
    return ForeignZip(tuple(entries), tuple(dropped))


@dataclass(frozen=True, slots=True)
class _Listed:
    """A decoded directory record; large values come from its Zip64 field."""

    name: str
    record: DirectoryRecord
    nbytes: int
    compressed_nbytes: int
    header_offset: int

    @property
    def is_folder(self) -> bool:
        return self.name.endswith("/")

    @property
    def has_descriptor(self) -> bool:
        return bool(self.record.flags & records.FLAG_DATA_DESCRIPTOR)

    def entry(self, data_offset: int) -> ForeignEntry:
        is_lzma = self.record.method == records.METHOD_LZMA
        return ForeignEntry(
            self.name,
            self.record.method,
            self.compressed_nbytes,
            self.nbytes,
            self.record.crc32,
            data_offset,
            is_lzma and bool(self.record.flags & records.FLAG_LZMA_END_MARKER),
        )


def _list(view: memoryview, bounds: ForeignBounds) -> Iterator[_Listed]:
    directory = view[: bounds.end]
    position = bounds.offset
    for index in range(bounds.count):
        record = DirectoryRecord.unpack(directory, position)
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


def _listed(record: DirectoryRecord) -> _Listed:
    name = _name(record)
    _require_supported(record, name)
    stated = (
        record.uncompressed_size,
        record.compressed_size,
        record.header_offset,
        record.disk_start,
    )
    values = list(stated)
    for index, value in _zip64_values(record.extra, stated, name).items():
        if stated[index] not in (_ZIP64_SATURATED[index], value):
            raise format_error(
                f"expected {_ZIP64_NAMES[index]} {stated[index]} in the Zip64 field, as in the "
                f"directory record, found {value}",
                name,
            )
        values[index] = value
    nbytes, compressed_nbytes, header_offset, disk = values
    if disk:
        raise unsupported(f"expected it on disk 0, found it on disk {disk}", name)
    if record.method == records.METHOD_STORED and compressed_nbytes != nbytes:
        raise format_error(records.unequal_sizes(compressed_nbytes, nbytes), name)
    # Drops extra fields and comment, which may be too large to keep for all records.
    record = record._replace(extra=b"", comment=b"")
    listed = _Listed(name, record, nbytes, compressed_nbytes, header_offset)
    _check_attributes(listed)
    return listed


def _name(record: DirectoryRecord) -> str:
    readable = record.name.decode(errors="backslashreplace")
    if len(record.name) > MAX_PATH_SIZE:
        raise format_error(
            f"expected a name of at most {MAX_PATH_SIZE} bytes, found {len(record.name)}",
            readable[:_MAX_SHOWN],
        )
    if not record.name.isascii() and not record.flags & records.FLAG_UTF8:
        raise format_error(
            f"expected a name in ASCII or marked as UTF-8, found the bytes {record.name!r}; "
            f"{_UTF8_REMEDY}",
            readable,
        )
    try:
        name = record.name.decode()
    except UnicodeDecodeError:
        raise format_error(
            f"expected a name in UTF-8, as its flag states, found {record.name!r}", readable
        ) from None
    if name == _HERE:
        return name  # a folder
    path = name.removeprefix(_HERE)
    if not is_plain_path(path.removesuffix("/")):
        raise format_error(f"expected {PLAIN_PATH}, found another name", name)
    return path


def _require_supported(record: DirectoryRecord, name: str) -> None:
    flags, method = record.flags, record.method
    if flags & _FLAGS_ENCRYPTED:
        raise unsupported(
            f"expected flags of an entry that is not encrypted, found {flags:#06x}", name
        )
    if flags & ~_FLAGS_ALLOWED:
        raise unsupported(
            f"expected flags within {_FLAGS_ALLOWED:#06x}, found {flags:#06x}; other flags are "
            f"reserved or mark patched data",
            name,
        )
    if method not in _METHODS:
        raise unsupported(
            f"expected it stored or compressed by deflate, deflate64, bzip2 or LZMA, found method "
            f"{method} ({_OTHER_METHODS.get(method, 'unknown')})",
            name,
        )
    _check_version(record.version_needed, method, name)


def _check_version(version: int, method: int, name: str) -> None:
    # 4.4.3.2: LZMA needs version 63. All other methods in `_METHODS` need a smaller version.
    if version > records.VERSION_LZMA or (
        version == records.VERSION_LZMA and method != records.METHOD_LZMA
    ):
        raise unsupported(
            f'expected "version needed to extract" of at most {records.VERSION_LZMA - 1}, or '
            f"{records.VERSION_LZMA} for LZMA, found {version}",
            name,
        )


def _check_attributes(listed: _Listed) -> None:
    record = listed.record
    unix_type = record.external_attributes >> records.UNIX_MODE_SHIFT & records.UNIX_TYPE_MASK
    dos_type = record.external_attributes & (records.DOS_DIRECTORY | records.DOS_VOLUME_LABEL)
    # zip and 7z store the type of a pipe if they read the data from a pipe.
    expected_types = [0, records.UNIX_REGULAR, records.UNIX_FIFO]
    if listed.is_folder:
        expected_types.append(records.UNIX_DIRECTORY)
        dos_type &= ~records.DOS_DIRECTORY
    if unix_type not in expected_types or dos_type:
        raise format_error(
            f"expected a regular file, or a folder with a name that ends with a slash, found "
            f"attributes {record.external_attributes:#010x}: a link, a device, a volume label, or "
            f"a folder without the slash",
            listed.name,
        )
    if listed.is_folder and (listed.nbytes or record.crc32):
        raise format_error(
            f"expected the entry of a folder to be empty, found {listed.nbytes} bytes and CRC-32 "
            f"{record.crc32:#010x}",
            listed.name,
        )


def _require_distinct_names(names: Iterable[str]) -> None:
    """Refuses names equal up to ASCII case: some file systems treat them as one name."""
    seen: dict[bytes, str] = {}
    for name in names:
        folded = name.encode().lower()
        if folded in seen:
            raise format_error(
                f"expected every name once, ignoring case, found an earlier entry {seen[folded]!r}",
                name,
            )
        seen[folded] = name


def _zip64_values(
    extra: bytes, stated: Sequence[int], name: str, *, is_local: bool = False
) -> dict[int, int]:
    """The values of the Zip64 field, by index in `_ZIP64_NAMES`.

    The field holds the values that do not fit the header, in order (4.5.3); in a local header, both
    sizes or none. Some writers store the first value, or the first two, three or four, even if they
    fit.

    Args:
        extra: The extra fields.
        stated: The values in the header, in the order of `_ZIP64_NAMES`.
        name: The entry's name.
        is_local: True for a local header.
    """
    missing = [index for index, value in enumerate(stated) if value == _ZIP64_SATURATED[index]]
    fields = _extra_fields(extra, name)
    contents = [content for identifier, content in fields if identifier == records.ZIP64_EXTRA]
    if len(contents) > 1:
        raise format_error(f"expected one Zip64 field, found {len(contents)}", name)
    if missing and not contents:
        raise format_error(
            f"expected a Zip64 field for its {_ZIP64_NAMES[missing[0]]}, found none", name
        )
    content = contents[0] if contents else b""
    if not (content or missing):
        return {}
    forms = [list(range(count)) for count in range(1, len(_ZIP64_NAMES) + 1)]
    if is_local and missing:
        forms = forms[1:]
    elif missing:
        forms = [missing, *forms]
    sizes = set()
    for form in forms:
        values = struct.Struct("<" + "".join(_ZIP64_FORMATS[index] for index in form))
        if set(missing) <= set(form):
            if values.size == len(content):
                return dict(zip(form, values.unpack(content), strict=True))
            sizes.add(values.size)
    raise format_error(
        f"expected a Zip64 field of {' or '.join(map(str, sorted(sizes)))} bytes, found "
        f"{len(content)} bytes",
        name,
    )


def _extra_fields(extra: bytes, name: str) -> list[tuple[int, bytes]]:
    try:
        fields = list(records.unpack_extra(extra))
    except ValueError as error:
        raise format_error(f"expected complete extra fields, found {error}", name) from None
    if any(identifier == records.UNICODE_PATH_EXTRA for identifier, _ in fields):
        raise format_error(
            f"expected one name, found a second one in extra field "
            f"{records.UNICODE_PATH_EXTRA:#06x}; {_UTF8_REMEDY}",
            name,
        )
    return fields


# Local headers and data descriptors


def _check_local_header(view: memoryview, item: _Listed, end: int) -> int:
    """Compares the local header with the directory record, and returns the offset of the data."""
    header = LocalHeader.unpack(view[:end], item.header_offset)
    if header is None:
        raise format_error(
            f"expected its local header at offset {item.header_offset}, before the directory at "
            f"{end}, found none",
            item.name,
        )
    for field in ("name", "flags", "method"):
        expected, found = getattr(item.record, field), getattr(header, field)
        if expected != found:
            raise format_error(
                f"expected {field} {expected!r} in its local header, as in the directory, found "
                f"{found!r}",
                item.name,
            )
    _check_version(header.version_needed, header.method, item.name)
    stated = (header.uncompressed_size, header.compressed_size)
    extra = _without_stray_zeros(header.extra)
    zip64_values = _zip64_values(extra, stated, item.name, is_local=True)
    own_values = [pair for pair in enumerate(stated) if pair[1] != records.SATURATED_32]
    expected_values = (item.nbytes, item.compressed_nbytes, item.header_offset, 0)
    for index, value in (*own_values, *zip64_values.items()):
        _require_equal(_ZIP64_NAMES[index], expected_values[index], value, item)
    _require_equal("CRC-32", item.record.crc32, header.crc32, item)
    return item.header_offset + header.packed_size


def _require_equal(field: str, expected: int, found: int, item: _Listed) -> None:
    # 4.4.4: if a data descriptor holds the values, the local header may hold zeros instead.
    if found != expected and not (item.has_descriptor and found == 0):
        raise format_error(
            f"expected {field} {expected} in its local header, as in the directory, found {found}",
            item.name,
        )


def _without_stray_zeros(extra: bytes) -> bytes:
    """Strips the padding of old Android zipalign versions: final zeros too short for a field."""
    position = 0
    while len(extra) - position >= records.EXTRA_HEADER_SIZE:
        size = int.from_bytes(extra[position + 2 : position + 4], "little")
        position += records.EXTRA_HEADER_SIZE + size
    rest = extra[position:]
    return extra[:position] if rest.strip(b"\0") == b"" else extra


def _end_of_entry(view: memoryview, item: _Listed, data_offset: int, directory_offset: int) -> int:
    """Offset of the end of the entry, after its data descriptor."""
    end = data_offset + item.compressed_nbytes
    if end > directory_offset:
        raise format_error(
            f"expected its data to end at or before offset {directory_offset}, where the "
            f"directory begins, found {item.compressed_nbytes} bytes at offset {data_offset}: "
            f"they reach into the directory or beyond the end of the file",
            item.name,
        )
    if not item.has_descriptor:
        return end
    for descriptor in _descriptors(item):
        descriptor_end = end + len(descriptor)
        if view[end : min(descriptor_end, directory_offset)] == descriptor:
            return descriptor_end
    raise format_error(
        f"expected a data descriptor at offset {end} with CRC-32 {item.record.crc32:#010x} and "
        f"sizes {item.compressed_nbytes} and {item.nbytes}, as in the directory, found none",
        item.name,
    )


def _descriptors(item: _Listed) -> Iterator[bytes]:
    """The data descriptor in each form that writers use; forms with a signature first (4.3.9)."""
    values = (item.record.crc32, item.compressed_nbytes, item.nbytes)
    for signature in (records.DATA_DESCRIPTOR_SIGNATURE, b""):
        yield signature + _DESCRIPTOR_64.pack(*values)
        if max(values) <= records.UINT32_MAX:
            yield signature + _DESCRIPTOR_32.pack(*values)
