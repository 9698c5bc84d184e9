"""Reads the end of an archive: end records, central directory, and a local header when it is due.

Everything here takes bytes that the caller has read and a `Report` that takes each broken rule.
Where the report raises, reading stops at the first; where it collects, reading goes on as far as
the bytes make sense.

Since entries lie in directory order without a gap, the directory alone says where data begins:
where the next header begins, less the entry's size. No local header is read to open an archive.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, Final, NamedTuple, overload

import numpy as np

from onnxarchive.buffers import columns
from onnxarchive.errors import Report, shown
from onnxarchive.zipformat import layout, records
from onnxarchive.zipformat.layout import Placement
from onnxarchive.zipformat.records import (
    DirectoryRecord,
    EndRecord,
    LocalHeader,
    Zip64EndRecord,
    Zip64Locator,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_NAME_SIZE = 1024  # bytes
# A record with the longest name and a Zip64 field of three values; comments are not allowed.
MAX_RECORD_SIZE = DirectoryRecord.SIZE + MAX_NAME_SIZE + len(records.pack_zip64_extra(0, 0, 0))
LOCATOR_DISTANCE = Zip64Locator.SIZE + EndRecord.SIZE  # from a Zip64 locator to the end, in bytes
# What `locate` needs to see of the end of a file, in bytes; less where the file is smaller.
TAIL_SIZE = Zip64EndRecord.SIZE + LOCATOR_DISTANCE

_MAX_SHOWN_FIELDS = 8  # in a message
_PIECE_SIZE = 1 << 16  # bytes that are searched at a time
_VERSIONS_NEEDED = (records.VERSION_STORED, records.VERSION_FOLDER, records.VERSION_ZIP64)


class Entry(NamedTuple):
    """One entry of an archive.

    Attributes:
        name: The entry's name.
        header_offset: Where its local header begins, in bytes from the start of the file.
        data_offset: Where its data begins, in bytes from the start of the file.
        nbytes: Size of its data in bytes.
        crc32: CRC-32 of its data as the directory states it.
    """

    name: str
    header_offset: int
    data_offset: int
    nbytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Bounds:
    """Where the central directory lies.

    Attributes:
        offset: Where it begins, in bytes from the start of the file.
        size: Its size in bytes.
        count: How many records it holds.
    """

    offset: int
    size: int
    count: int


def locate(tail: bytes, file_size: int, report: Report) -> Bounds | None:
    """Finds the central directory; nothing is searched for.

    Args:
        tail: The last `TAIL_SIZE` bytes of the file, or all of a smaller one.
        file_size: Size of the file in bytes.
        report: Takes each broken rule (ZIP-2 to ZIP-5, ZIP64-1 to ZIP64-3).

    Returns:
        Where the directory is, inside the file; None where that cannot be told.
    """
    end = EndRecord.unpack(tail, len(tail) - EndRecord.SIZE)
    if end is None or end.comment_size:
        report.broken(
            "ZIP-2",
            f"expected an end record without comment in the last {EndRecord.SIZE} bytes, found "
            f"none in {file_size} bytes; the file is no archive, or its end is missing",
        )
        return None
    end_offset = file_size - EndRecord.SIZE
    stated = (end.disk_count, end.count, end.directory_size, end.directory_offset)
    saturated = (*(records.SATURATED_16,) * 2, *(records.SATURATED_32,) * 2)
    if any(value == limit for value, limit in zip(stated, saturated, strict=True)):
        if stated != saturated:
            report.broken(
                "ZIP64-1", f"expected all four values of the end record saturated, found {stated}"
            )
        bounds = _locate_zip64(tail, file_size, report)
        if bounds is None:
            return None
        end_offset -= Zip64EndRecord.SIZE + Zip64Locator.SIZE
    else:
        _require_equal_counts(end.disk_count, end.count, report)
        bounds = Bounds(end.directory_offset, end.directory_size, end.count)
    if end.disk or end.directory_disk:
        report.broken(
            "ZIP-3", f"expected disk 0 in the end record, found {end.disk} and {end.directory_disk}"
        )
    return _require_inside(bounds, end_offset, report)


def _locate_zip64(tail: bytes, file_size: int, report: Report) -> Bounds | None:
    locator_position = len(tail) - LOCATOR_DISTANCE
    record_position = locator_position - Zip64EndRecord.SIZE
    record_offset = file_size - TAIL_SIZE
    locator = Zip64Locator.unpack(tail, locator_position)
    record = Zip64EndRecord.unpack(tail, record_position)
    if locator is None:
        report.broken(
            "ZIP64-1", "expected a Zip64 locator before the saturated end record, found none"
        )
        return None
    if locator.record_disk or locator.disks != 1:
        report.broken(
            "ZIP-3",
            f"expected disk 0 of 1 in the Zip64 locator, found {locator.record_disk} of "
            f"{locator.disks}",
        )
    if record is None or locator.record_offset != record_offset:
        report.broken(
            "ZIP64-3",
            f"expected the Zip64 end record at offset {record_offset}, directly before its "
            f"locator, found {'none' if record is None else 'one'} there and a locator that "
            f"says {locator.record_offset}",
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
            f"expected disk 0 in the Zip64 end record, found {record.disk} and "
            f"{record.directory_disk}",
        )
    _require_equal_counts(record.disk_count, record.count, report)
    if not layout.needs_zip64_end(record.count, record.directory_size, record.directory_offset):
        report.broken(
            "ZIP64-1",
            f"expected no Zip64 end record, since the end record can state {record.count} "
            f"entries in {record.directory_size} bytes at offset "
            f"{record.directory_offset}, found one",
        )
    return Bounds(record.directory_offset, record.directory_size, record.count)


def _require_equal_counts(disk_count: int, count: int, report: Report) -> None:
    if disk_count != count:
        report.broken(
            "ZIP-4",
            f"expected as many entries on the disk as in all, found {disk_count} and {count}",
        )


def _require_inside(bounds: Bounds, end_offset: int, report: Report) -> Bounds | None:
    if bounds.offset + bounds.size != end_offset:
        report.broken(
            "ZIP-5",
            f"expected the directory to end at offset {end_offset}, where the end records "
            f"begin, found {bounds.size} bytes at offset {bounds.offset}",
        )
        return None
    if bounds.count > layout.MAX_ENTRIES:
        report.broken(
            "ZIP-4", f"expected at most {layout.MAX_ENTRIES} entries, found {bounds.count}"
        )
        return None
    if not DirectoryRecord.SIZE * bounds.count <= bounds.size <= MAX_RECORD_SIZE * bounds.count:
        report.broken(
            "ZIP-4",
            f"expected {DirectoryRecord.SIZE} to {MAX_RECORD_SIZE} bytes for each of "
            f"{bounds.count} directory records, found {bounds.size} bytes in all",
        )
        return None
    return bounds


class Entries(Sequence[Entry]):
    """Entries in columns, each made when it is looked at.

    Attributes:
        names: As `Entry` has them, and so
        header_offsets: these,
        data_offsets: these,
        sizes: these, which are its `nbytes`,
        crc32s: and these.
    """

    def __init__(
        self,
        names: Sequence[str],
        header_offsets: Sequence[int],
        data_offsets: Sequence[int],
        sizes: Sequence[int],
        crc32s: Sequence[int],
    ) -> None:
        self.names = names
        self.header_offsets = header_offsets
        self.data_offsets = data_offsets
        self.sizes = sizes
        self.crc32s = crc32s

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[Entry]:
        return map(Entry, *self._columns)

    @overload
    def __getitem__(self, index: int) -> Entry: ...

    @overload
    def __getitem__(self, index: slice) -> Entries: ...

    def __getitem__(self, index: int | slice) -> Entry | Entries:
        if isinstance(index, slice):
            return Entries(*(column[index] for column in self._columns))
        return Entry(*(column[index] for column in self._columns))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Entries) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    @property
    def _columns(self) -> tuple[Sequence[Any], ...]:
        return self.names, self.header_offsets, self.data_offsets, self.sizes, self.crc32s


class Records(Sequence[DirectoryRecord]):
    """Directory records as they are packed, each unpacked when it is looked at."""

    def __init__(self, data: bytes, offsets: Sequence[int]) -> None:
        """Takes the directory's bytes and where each record begins in them."""
        self._data = data
        self._offsets = offsets

    def __len__(self) -> int:
        return len(self._offsets)

    @overload
    def __getitem__(self, index: int) -> DirectoryRecord: ...

    @overload
    def __getitem__(self, index: slice) -> Records: ...

    def __getitem__(self, index: int | slice) -> DirectoryRecord | Records:
        if isinstance(index, slice):
            return Records(self._data, self._offsets[index])
        record = DirectoryRecord.unpack(self._data, self._offsets[index])
        assert record is not None  # it has been unpacked, or looked at, before
        return record

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Records) and self.pack() == other.pack()

    __hash__ = None  # type: ignore[assignment]

    def pack(self) -> bytes:
        """The bytes of the records, which lie one after another."""
        if not self._offsets:
            return b""
        return self._data[self._offsets[0] : self._offsets[-1] + self[-1].packed_size]

    def common(self, start: int, stop: int) -> list[bytes]:
        """What some records have as their local headers: version needed to size of the name.

        See 4.3.7 and 4.3.12.
        """
        data = self._data
        return [data[offset + 6 : offset + 30] for offset in self._offsets[start:stop]]


@dataclass(frozen=True, slots=True)
class Directory:
    """The central directory, read.

    Attributes:
        entries: The entries in directory order. Names may still occur twice.
        records: The directory record of each of them.
        names: The name of every record, in directory order, also of those that give no entry; None
            for one that is not UTF-8.
        sizes: Size in bytes of the data of every record, in the same order; None where it cannot
            be told.
        is_whole: Whether every record that the end records count is among them, and no other.
    """

    entries: Entries
    records: Records
    names: Sequence[str | None] = ()
    sizes: Sequence[int | None] = ()
    is_whole: bool = True

    def local_headers(self, start: int, stop: int, alignment: int) -> bytes | None:
        """The local headers that some entries have if `layout` has made them, one behind the other.

        Others may yet be right: `check_local_header` tells. None where they need Zip64, or cannot
        have this alignment.

        Args:
            start: The index of the first of them.
            stop: The index behind the last.
            alignment: What their data is aligned to, in bytes.
        """
        listed = self.entries
        names = [name.encode() for name in listed.names[start:stop]]
        ends = listed.data_offsets[start:stop]
        places = zip(names, listed.header_offsets[start:stop], ends, strict=True)
        paddings = [end - begin - len(name) - _LEAST_HEADER_SIZE for name, begin, end in places]
        if (
            not 0 <= min(paddings) <= max(paddings) < alignment
            or max(listed.sizes[start:stop]) >= records.SATURATED_32
            or any(end % alignment for end in ends)
        ):
            return None
        if alignment == layout.MIN_ALIGNMENT:
            extras = [_EXTRAS[padding] for padding in paddings]
            extra_sizes = [_EXTRA_SIZES[padding] for padding in paddings]
        else:
            extras = [records.pack_alignment_extra(alignment, padding) for padding in paddings]
            extra_sizes = [len(extra).to_bytes(2, "little") for extra in extras]
        signatures = repeat(LocalHeader.SIGNATURE, stop - start)
        common = self.records.common(start, stop)
        parts = zip(signatures, common, extra_sizes, names, extras, strict=True)
        return b"".join(chain.from_iterable(parts))


_LEAST_HEADER_SIZE: Final = LocalHeader.SIZE + records.ALIGNMENT_EXTRA_SIZE
# The extra fields of a local header for each padding of the usual alignment, and their sizes.
_EXTRAS: Final = [
    records.pack_alignment_extra(layout.MIN_ALIGNMENT, padding)
    for padding in range(layout.MIN_ALIGNMENT)
]
_EXTRA_SIZES: Final = [len(extra).to_bytes(2, "little") for extra in _EXTRAS]

EMPTY: Final = Directory(Entries((), (), (), (), ()), Records(b"", ()))


class Listed(NamedTuple):
    """What a directory record says, its values taken from where they stand, Zip64 field or not.

    Attributes:
        name: The entry's name; what is not UTF-8 in it is escaped.
        is_utf8: Whether the name is UTF-8 (NAME-1).
        nbytes: Size of its data in bytes; None where it cannot be told.
        header_offset: Where its local header begins; None where it cannot be told.
        record: The record.
        offset: Where the record begins, in bytes from the start of the directory.
    """

    name: str
    is_utf8: bool
    nbytes: int | None
    header_offset: int | None
    record: DirectoryRecord
    offset: int


def read(data: bytes, bounds: Bounds, report: Report) -> Directory:
    """Reads the central directory.

    Args:
        data: Its bytes, `bounds.size` of them.
        bounds: Where it lies, as `locate` gives it.
        report: Takes each broken rule (ZIP-1, ZIP-3, ZIP-4, ZIP-6, ZIP-8 to ZIP-13, ZIP64-4,
            ALIGN-1, NAME-1).

    Returns:
        The entries whose records make sense; all of them where nothing was reported.
    """
    return _read_at_once(data, bounds) or _read_one_by_one(data, bounds, report)


# A directory record (4.3.12), its attributes as the lower and upper half of the external ones.
_PACKED: Final = np.dtype(
    [
        ("signature", "S4"),
        *((name, "<u2") for name in ("made_by", "needed", "flags", "method", "time", "date")),
        *((name, "<u4") for name in ("crc32", "compressed_size", "size")),
        *((name, "<u2") for name in ("name_size", "extra_size", "comment_size", "disk")),
        *((f"{name}_attributes", "<u2") for name in ("internal", "dos", "unix")),
        ("header_offset", "<u4"),
    ]
)
# The Zip64 field where the header's offset alone does not fit (4.5.3).
_PACKED_ZIP64: Final = np.dtype([("identifier", "<u2"), ("size", "<u2"), ("header_offset", "<i8")])


def _read_at_once(data: bytes, bounds: Bounds) -> Directory | None:
    """A directory of ASCII names and of entries below 4 GiB each, if it breaks no rule.

    It makes the checks of `_read_one_by_one` on all records together. None says that one of them
    fails, or that there is more to be looked at, and not which.
    """
    raw = np.frombuffer(data, np.uint8)
    begins = _record_offsets(raw)
    if begins.size != bounds.count or not begins.size or begins[0] != 0:
        return None
    ends = np.append(begins[1:], raw.size)
    parts = []
    for first in range(0, begins.size, _ROWS):
        part = _sound_records(data, begins[first : first + _ROWS], ends[first : first + _ROWS])
        if part is None:
            return None
        parts.append(part)
    names = b"\n".join([part.names for part in parts])
    header_offset, size, name_size, crc32 = (
        np.concatenate(column) for column in zip(*(part[1:] for part in parts), strict=True)
    )
    data_offset = np.append(header_offset[1:], bounds.offset) - size
    padding = data_offset - header_offset - name_size - _LEAST_HEADER_SIZE
    if (
        header_offset[0] != 0
        or padding.min() < 0
        or padding.max() >= layout.MAX_ALIGNMENT
        or (data_offset % layout.MIN_ALIGNMENT).any()
        or not names.isascii()
        or names.count(b"\n") != begins.size - 1
    ):
        return None
    found = map(columns.integers, (header_offset, data_offset, size, crc32))
    entries = Entries(names.decode().split("\n"), *found)
    listed = Records(data, columns.integers(begins))
    return Directory(entries, listed, entries.names, entries.sizes)


_ROWS: Final = 1 << 12  # records that are checked together: their columns stay in a core's cache


class _SoundRecords(NamedTuple):
    """What some records say that break no rule by themselves: their names, and columns."""

    names: bytes
    header_offset: NDArray[np.int64]
    size: NDArray[np.int64]
    name_size: NDArray[np.int64]
    crc32: NDArray[np.int64]


def _sound_records(
    data: bytes, begins: NDArray[np.int64], ends: NDArray[np.int64]
) -> _SoundRecords | None:
    """What stands in records from `begins` to `ends`; None where one of them may break a rule."""
    raw = np.frombuffer(data, np.uint8)
    packed = _gathered(raw, begins, _PACKED)
    size, name_size, header_offset = (
        packed[field].astype(np.int64) for field in ("size", "name_size", "header_offset")
    )
    has_zip64 = header_offset == records.SATURATED_32
    name_begins = begins + DirectoryRecord.SIZE
    name_ends = name_begins + name_size
    zip64 = _gathered(raw, name_ends[has_zip64], _PACKED_ZIP64)
    header_offset[has_zip64] = zip64["header_offset"]
    unix_type = packed["unix_attributes"] & records.UNIX_TYPE_MASK
    extra_size = np.where(has_zip64, _PACKED_ZIP64.itemsize, 0)
    is_sound = (
        (packed["made_by"] & records.MADE_BY_SYSTEM_MASK == records.MADE_BY_UNIX)
        & reduce(operator.or_, [packed["needed"] == version for version in _VERSIONS_NEEDED])
        & (packed["flags"] == 0)
        & (packed["method"] == records.METHOD_STORED)
        & (packed["compressed_size"] == size)
        & (size < records.SATURATED_32)
        & (packed["extra_size"] == extra_size)
        & (packed["comment_size"] == 0)
        & (packed["disk"] == 0)
        & (packed["internal_attributes"] == 0)
        & (packed["dos_attributes"] & ~np.uint16(records.DOS_FILE_ATTRIBUTES) == 0)
        & ((unix_type == 0) | (unix_type == records.UNIX_REGULAR))
        & (name_ends + extra_size == ends)
    )
    is_sound_zip64 = (
        (zip64["identifier"] == records.ZIP64_EXTRA)
        & (zip64["size"] == zip64["header_offset"].itemsize)
        & (zip64["header_offset"] >= records.SATURATED_32)
        & (packed["needed"][has_zip64] == records.VERSION_ZIP64)
    )
    if not (is_sound.all() and is_sound_zip64.all()):
        return None
    names = columns.lines(data, name_begins, name_ends)
    return _SoundRecords(names, header_offset, size, name_size, packed["crc32"].astype(np.int64))


def _record_offsets(raw: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Where the signature of a directory record stands, be it in a name."""
    first, *others = DirectoryRecord.SIGNATURE
    searched = raw[: 1 - DirectoryRecord.SIZE]
    parts = []
    for start in range(0, max(searched.size, 1), _PIECE_SIZE):
        found = np.flatnonzero(searched[start : start + _PIECE_SIZE] == first) + start
        for distance, byte in enumerate(others, 1):
            found = found[raw[found + distance] == byte]
        parts.append(found.astype(np.int64, copy=False))
    return np.concatenate(parts)


def _gathered(raw: NDArray[np.uint8], begins: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """What begins at each of these bytes, as one array; where it would end behind all, nothing."""
    if not begins.size or raw.size < dtype.itemsize:
        return np.empty(0, dtype)
    # Whole items are copied, each in one go.
    windows: NDArray[Any] = np.ndarray(
        raw.size - dtype.itemsize + 1, f"V{dtype.itemsize}", raw, strides=1
    )
    found: NDArray[Any] = windows[np.minimum(begins, windows.size - 1)].view(dtype)
    return found


def _read_one_by_one(data: bytes, bounds: Bounds, report: Report) -> Directory:
    listed, is_whole = _list(data, bounds, report)
    entries: list[Entry] = []
    offsets: list[int] = []
    if not listed:
        if bounds.count == 0 and bounds.offset:
            report.broken(
                "ZIP-6", f"expected entries up to the directory at {bounds.offset}, found none"
            )
        return Directory(EMPTY.entries, Records(data, ()), is_whole=is_whole)
    if listed[0].header_offset not in (0, None):
        report.broken(
            "ZIP-1",
            f"expected the first local header at offset 0, found {listed[0].header_offset}",
            entry=listed[0].name,
        )
    ends = [following.header_offset for following in listed[1:]]
    ends.append(bounds.offset if is_whole else None)
    end_of_last = 0
    for item, end in zip(listed, ends, strict=True):
        name, _, nbytes, header_offset, record, offset = item
        if nbytes is None or header_offset is None or end is None:
            continue  # why that is has been reported
        entry = Entry(name, header_offset, end - nbytes, nbytes, record.crc32)
        if header_offset < end_of_last:
            # Nothing is read twice, whatever the directory says.
            report.broken(
                "ZIP-6",
                f"expected its local header at offset {end_of_last} or behind, where the entries "
                f"before it end, found {header_offset}",
                entry=name,
            )
        elif _require_header_space(entry, record, bounds, report):
            end_of_last = end
            entries.append(entry)
            offsets.append(offset)
    names = [item.name if item.is_utf8 else None for item in listed]
    sizes = [item.nbytes for item in listed]
    return Directory(_in_columns(entries), Records(data, offsets), names, sizes, is_whole)


def _in_columns(entries: Sequence[Entry]) -> Entries:
    return Entries(*map(list, zip(*entries, strict=True))) if entries else EMPTY.entries


def _list(data: bytes, bounds: Bounds, report: Report) -> tuple[list[Listed], bool]:
    """The records, and whether they are those that are counted (ZIP-4)."""
    listed: list[Listed] = []
    position = 0
    for index in range(bounds.count):
        record = DirectoryRecord.unpack(data, position)
        if record is None:
            report.broken(
                "ZIP-4",
                f"expected directory record {index + 1} of {bounds.count} at offset "
                f"{bounds.offset + position}, found none",
            )
            return listed, False
        name, is_utf8 = _decode(record.name, report)
        _require_plain_record(record, name, report)
        listed.append(Listed(name, is_utf8, *_values(record, name, report), record, position))
        position += record.packed_size
    if position != bounds.size:
        report.broken(
            "ZIP-4",
            f"expected the {bounds.count} directory records to fill {bounds.size} bytes, found "
            f"{position} bytes of them",
        )
    return listed, position == bounds.size


def _decode(encoded: bytes, report: Report) -> tuple[str, bool]:
    try:
        return encoded.decode(), True
    except UnicodeDecodeError:
        name = encoded.decode(errors="backslashreplace")
        report.broken(
            "NAME-1", f"expected a name in UTF-8, found the bytes {shown(encoded)}", entry=name
        )
        return name, False


def _require_plain_record(record: DirectoryRecord, name: str, report: Report) -> None:
    broken = partial(report.broken, entry=name)
    expected_flags = 0 if record.name.isascii() else records.FLAG_UTF8
    if record.flags != expected_flags:
        broken("ZIP-9", f"expected flags {expected_flags:#06x}, found {_flag_names(record.flags)}")
    if record.method != records.METHOD_STORED:
        broken("ZIP-8", f"expected method 0 (stored), found {record.method}")
    if record.compressed_size != record.uncompressed_size:
        broken(
            "ZIP-8",
            f"expected equal sizes, found {record.compressed_size} bytes stored of "
            f"{record.uncompressed_size}",
        )
    if record.version_needed not in _VERSIONS_NEEDED:
        broken("ZIP-10", f"expected version needed 10, 20 or 45, found {record.version_needed}")
    unix_type = record.external_attributes >> records.UNIX_MODE_SHIFT & records.UNIX_TYPE_MASK
    dos_attributes = record.external_attributes & records.DOS_ATTRIBUTES_MASK
    if record.version_made_by & records.MADE_BY_SYSTEM_MASK != records.MADE_BY_UNIX:
        broken(
            "ZIP-11",
            f"expected version made by {records.MADE_BY_UNIX:#06x} (Unix) with any lower byte, "
            f"found {record.version_made_by:#06x}",
        )
    if (
        unix_type not in (0, records.UNIX_REGULAR)
        or dos_attributes & ~records.DOS_FILE_ATTRIBUTES
        or record.internal_attributes
    ):
        broken(
            "ZIP-11",
            f"expected the attributes of a regular file (type 0x8 or 0x0 in the upper 4 bits, of "
            f"the lower 16 bits none but {records.DOS_FILE_ATTRIBUTES:#06x}) and internal 0x0000, "
            f"found {record.external_attributes:#010x} and internal "
            f"{record.internal_attributes:#06x}",
        )
    if record.comment:
        broken("ZIP-12", f"expected no comment, found {len(record.comment)} bytes")
    if record.disk_start:
        broken("ZIP-3", f"expected disk 0, found {record.disk_start}")


def _flag_names(flags: int) -> str:
    encrypted = records.FLAG_ENCRYPTED | records.FLAG_STRONG_ENCRYPTION | records.FLAG_MASKED_HEADER
    if flags & encrypted:
        return f"{flags:#06x} (encrypted)"
    if flags & records.FLAG_DATA_DESCRIPTOR:
        return f"{flags:#06x} (sizes in a data descriptor)"
    return f"{flags:#06x}"


def _values(record: DirectoryRecord, name: str, report: Report) -> tuple[int | None, int | None]:
    """Size and header offset of an entry, each None where it cannot be told."""
    broken = partial(report.broken, entry=name)
    size_fits = layout.fits_32(record.uncompressed_size)
    offset_fits = layout.fits_32(record.header_offset)
    if not record.extra and size_fits and offset_fits:
        return record.uncompressed_size, record.header_offset
    plain = (
        record.uncompressed_size if size_fits else None,
        record.header_offset if offset_fits else None,
    )
    try:
        fields = list(records.unpack_extra(record.extra))
    except ValueError as error:
        broken("ZIP-13", f"expected whole extra fields, found {error}")
        return plain
    identifiers = [identifier for identifier, _ in fields]
    if records.ZIP64_EXTRA in identifiers and record.version_needed < records.VERSION_ZIP64:
        broken(
            "ZIP-10",
            f"expected version needed 45 beside a Zip64 field, found {record.version_needed}",
        )
    expected_identifiers = [] if size_fits and offset_fits else [records.ZIP64_EXTRA]
    if identifiers != expected_identifiers:
        broken(
            "ZIP-13",
            f"expected the extra fields {_hexadecimal(expected_identifiers)}, found "
            f"{_hexadecimal(identifiers)}",
        )
    zip64 = next(
        (content for identifier, content in fields if identifier == records.ZIP64_EXTRA), b""
    )
    values = records.unpack_zip64_values(zip64)
    expected_count = (0 if size_fits else 2) + (0 if offset_fits else 1)
    if values is None or len(values) != expected_count:
        # Where the field is missing as a whole, ZIP-13 has said so.
        if identifiers == expected_identifiers:
            broken(
                "ZIP64-4",
                f"expected {expected_count} values in the Zip64 field, found {len(zip64)} bytes",
            )
        if not (size_fits and offset_fits):
            return plain
        values = ()
    nbytes, compressed_size = (record.uncompressed_size,) * 2 if size_fits else values[:2]
    header_offset = record.header_offset if offset_fits else values[-1]
    if compressed_size != nbytes:
        broken("ZIP-8", f"expected equal sizes, found {compressed_size} bytes stored of {nbytes}")
    if values != layout.directory_zip64_values(nbytes, header_offset):
        broken("ZIP64-4", f"expected only values that do not fit 32 bits, found {values}")
    return nbytes, header_offset


def _hexadecimal(identifiers: list[int]) -> str:
    texts = [f"{identifier:#06x}" for identifier in identifiers[:_MAX_SHOWN_FIELDS]]
    return "[" + ", ".join(texts + ["..."] * (len(identifiers) > _MAX_SHOWN_FIELDS)) + "]"


def _require_header_space(
    entry: Entry, record: DirectoryRecord, bounds: Bounds, report: Report
) -> bool:
    """Whether the local header has room between its offset and the data, and no more than that."""
    least = Placement(record.name, entry.nbytes, 0, 0).unpadded_offset
    space = entry.data_offset - entry.header_offset
    is_inside = entry.data_offset + entry.nbytes <= bounds.offset
    if not (is_inside and least <= space < least + layout.MAX_ALIGNMENT):
        report.broken(
            "ZIP-6",
            f"expected {least} to {least + layout.MAX_ALIGNMENT - 1} "
            f"bytes of local header at offset {entry.header_offset} before {entry.nbytes} bytes "
            f"of data, found {space}: entries overlap or leave a gap, or the directory is not "
            f"in their order",
            entry=entry.name,
        )
        return False
    if entry.data_offset % layout.MIN_ALIGNMENT:
        report.broken(
            "ALIGN-1",
            f"expected its data at a multiple of {layout.MIN_ALIGNMENT}, "
            f"found offset {entry.data_offset}",
            entry=entry.name,
        )
    return True


def check_local_header(
    header: bytes, entry: Entry, record: DirectoryRecord, report: Report
) -> int | None:
    """Compares an entry's local header with its directory record.

    Args:
        header: The bytes from `entry.header_offset` to `entry.data_offset`.
        entry: The entry.
        record: Its directory record.
        report: Takes each broken rule (ZIP-7, ZIP-14, ZIP64-5, ALIGN-2, ALIGN-3).

    Returns:
        The alignment that it states, in bytes; None where it states none that there is.
    """
    broken = partial(report.broken, entry=entry.name)
    local = LocalHeader.unpack(header)
    if local is None or LocalHeader.SIZE + len(local.name) + len(local.extra) != len(header):
        broken(
            "ZIP-7",
            f"expected a local header of {len(header)} bytes, found {_what_is(header, local)}",
        )
        return None
    for field in (
        "version_needed",
        "flags",
        "method",
        "time",
        "date",
        "crc32",
        "compressed_size",
        "uncompressed_size",
        "name",
    ):
        expected, found = getattr(record, field), getattr(local, field)
        if expected != found:
            form = shown if field == "name" else str
            broken(
                "ZIP-7",
                f"expected {field.replace('_', ' ')} {form(expected)} as in the directory, "
                f"found {form(found)}",
            )
    try:
        fields = list(records.unpack_extra(local.extra))
    except ValueError as error:
        broken("ZIP-14", f"expected whole extra fields, found {error}")
        return None
    zip64_values = layout.local_zip64_values(entry.nbytes)
    expected_identifiers = [records.ZIP64_EXTRA] * bool(zip64_values) + [records.ALIGNMENT_EXTRA]
    identifiers = [identifier for identifier, _ in fields]
    if identifiers != expected_identifiers:
        broken(
            "ZIP-14",
            f"expected the extra fields {_hexadecimal(expected_identifiers)}, found "
            f"{_hexadecimal(identifiers)}",
        )
        return None
    if zip64_values:
        content = fields[0][1]
        found_values = records.unpack_zip64_values(content)
        if found_values != zip64_values:
            found = f"{len(content)} bytes" if found_values is None else shown(found_values)
            broken(
                "ZIP64-5",
                f"expected the sizes {shown(zip64_values)} in the Zip64 field, found {found}",
            )
    return _check_alignment(fields[-1][1], entry, record, report)


def _what_is(header: bytes, local: LocalHeader | None) -> str:
    if local is not None:
        return f"one of {LocalHeader.SIZE + len(local.name) + len(local.extra)} bytes"
    signature = header[: len(LocalHeader.SIGNATURE)]
    if signature != LocalHeader.SIGNATURE:
        return f"bytes that begin with {signature!r}"
    return "one that is longer"


def stated_alignment(header: bytes) -> int:
    """The alignment that a local header states, in bytes.

    Args:
        header: The header and all that stands before the entry's data, found right before.
    """
    local = LocalHeader.unpack(header, 0)
    assert local is not None
    unpacked = records.unpack_alignment(list(records.unpack_extra(local.extra))[-1][1])
    assert unpacked is not None
    return unpacked[0]


def _check_alignment(
    content: bytes, entry: Entry, record: DirectoryRecord, report: Report
) -> int | None:
    broken = partial(report.broken, entry=entry.name)
    unpacked = records.unpack_alignment(content)
    if unpacked is None:
        broken("ZIP-14", f"expected an alignment field of 2 bytes or more, found {len(content)}")
        return None
    alignment, padding = unpacked
    if not layout.is_alignment(alignment) or entry.data_offset % alignment:
        broken(
            "ALIGN-2",
            f"expected an alignment from {layout.MIN_ALIGNMENT} to {layout.MAX_ALIGNMENT} that "
            f"offset {entry.data_offset} is a multiple of, found {alignment}",
        )
        return None
    expected = Placement(
        record.name, entry.nbytes, entry.crc32, entry.header_offset, alignment
    ).padding
    if padding != bytes(expected):
        broken(
            "ALIGN-3",
            f"expected {expected} zero bytes of padding, found {len(padding)} bytes"
            f"{' that are not all zero' if any(padding) else ''}",
        )
    return alignment
