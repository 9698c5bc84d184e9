"""The reader of the zip, on the writer's files and on files with one fault."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable

import pytest
from findings import Findings
from hypothesis import example, given, settings, strategies as st
from outcomes import count_outcome, requires_outcomes
from zip_entries import add_bytes
from zip_image import (
    CRC32,
    Change,
    Image,
    Sparse,
    in_both,
    in_end,
    in_header,
    in_locator,
    in_record,
    in_zip64_record,
    insert,
    inspect,
    plus,
    together,
    unpacked_header,
    unpacked_record,
)

from onnxarchive.errors import ArchiveFormatError, Strict
from onnxarchive.reading.check import rules
from onnxarchive.zipformat import layout, records
from onnxarchive.zipformat.directory import Directory, Entry
from onnxarchive.zipformat.end_records import TAIL_SIZE, Bounds, locate
from onnxarchive.zipformat.layout import EntryLayout
from onnxarchive.zipformat.local_header import check_local_header
from onnxarchive.zipformat.records import (
    DirectoryRecord,
    EndRecord,
    LocalHeader,
    Zip64EndRecord,
    Zip64Locator,
)
from onnxarchive.zipformat.writer import ZipWriter

GIB_4 = 1 << 32
MODEL = "__MODEL_PROTO"


# The archives that are changed. Entry 0 is small; entry 1 is empty or does not fit 32 bits; entry 2
# has a name that is not ASCII, or an offset that does not fit; entry 3 is the last.


def small() -> Image:
    return Image.of([("w", 100), ("empty", 0), ("assets/é", 70_000), (MODEL, 20)])


def large() -> Image:
    return Image.of([("w", 100), ("large", GIB_4 + 1), ("behind", 10), (MODEL, 20)])


def aligned_to_32() -> Image:
    return Image.of([("w", 100), ("empty", 0), (MODEL, 20)], alignment=32)


def aligned_to_4096() -> Image:
    return Image.of([("w", 100), ("empty", 0), (MODEL, 20)], alignment=4096)


def broken_rules(file: Sparse) -> list[str]:
    """Every broken rule; a reader that stops at the first raises just that one."""
    findings = Findings()
    inspect(file, findings)
    if findings.rules:
        with pytest.raises(ArchiveFormatError) as caught:
            inspect(file, Strict())
        assert (caught.value.rule, caught.value.entry) == (findings.rules[0], findings.entries[0])
    else:
        assert inspect(file, Strict()) is not None
    return findings.rules


# Files of the writer


@given(
    st.lists(st.integers(0, 3) | st.integers(62, 66) | st.integers(0xFFFE, 0x10000), max_size=6),
    st.sampled_from([64, 256, 32768]),
)
def test_a_written_directory_is_read_back(sizes: list[int], alignment: int) -> None:
    target = io.BytesIO()
    zip_writer = ZipWriter(target, alignment=alignment)
    datas = [bytes([index + 1]) * nbytes for index, nbytes in enumerate(sizes)]
    placements = [add_bytes(zip_writer, f"k{index}", data) for index, data in enumerate(datas)]
    zip_writer.finish()
    archive = target.getvalue()
    found = inspect(Sparse([(0, archive)]), Strict())
    assert found is not None
    for entry, placement, data in zip(found.entries, placements, datas, strict=True):
        assert entry.name == placement.name.decode()
        assert entry.header_offset == placement.header_offset
        assert entry.data_offset == placement.data_offset
        assert archive[entry.data_offset : entry.data_offset + entry.nbytes] == data
        assert entry.crc32 == placement.crc32


@given(
    st.lists(
        st.integers(0, 200)
        | st.integers(GIB_4 - 140, GIB_4 + 3)
        | st.sampled_from([1 << 40, 1 << 60]),
        max_size=6,
    ),
    st.sampled_from([64 << shift for shift in range(10)]),
)
# The offset of the second header, and then that of the directory, at the limit of 32 bits.
@example([GIB_4 - 2 - 64, 0], 64)
@example([GIB_4 - 1 - 64, 0], 64)
@example([GIB_4 - 64, 0], 64)
@example([GIB_4 - 2 - 64], 64)
@example([GIB_4 - 1 - 64], 64)
@example([GIB_4 - 2, GIB_4 - 1, GIB_4], 64)
@example([], 64)
@settings(max_examples=300)
def test_entries_of_any_size_and_offset_are_found(sizes: list[int], alignment: int) -> None:
    named = [(f"k{index}", nbytes) for index, nbytes in enumerate(sizes)]
    image = Image.of(named, alignment=alignment)
    found = inspect(image.file(), Strict())
    assert found is not None
    assert [(entry.name, entry.nbytes) for entry in found.entries] == named
    assert [entry.header_offset for entry in found.entries] == image.offsets
    for entry, header in zip(found.entries, image.headers, strict=True):
        assert entry.data_offset == entry.header_offset + len(header.pack())
        assert entry.crc32 == CRC32
    assert list(found.records) == [record.pack() for record in image.records]
    assert found.is_whole


@pytest.mark.parametrize("base", [small, large])
def test_no_more_than_the_tail_is_needed_to_locate_the_directory(base: Callable[[], Image]) -> None:
    image = base()
    file = image.file()
    assert TAIL_SIZE == 56 + 20 + 22
    tail = file.read(file.size - TAIL_SIZE, TAIL_SIZE)
    size = sum(record.packed_size for record in image.records)
    expected = Bounds(image.directory_offset, size, len(image.records))
    assert locate(tail, file.size, Strict()) == expected


def test_the_large_archive_has_zip64_fields_of_every_kind() -> None:
    image = large()
    assert [len(record.extra) for record in image.records] == [0, 4 + 16, 4 + 8, 4 + 8]
    both = Image.of([("large", GIB_4), ("larger", GIB_4 + 1), (MODEL, 1)])
    assert [len(record.extra) for record in both.records] == [4 + 16, 4 + 24, 4 + 8]
    assert broken_rules(both.file()) == []


@pytest.mark.parametrize("base", [small, large, aligned_to_4096])
def test_the_archives_to_be_changed_break_no_rule(base: Callable[[], Image]) -> None:
    assert broken_rules(base().file()) == []


def broken_by(base: Callable[[], Image], change: Change) -> list[str]:
    image = base()
    change(image)
    return broken_rules(image.file())


# Free fields

FREE: dict[str, Change] = {
    "date and time": in_both(1, time=0x1234, date=0x5678),
    "version made by": in_record(0, version_made_by=0x0300),
    "another version made by": in_record(1, version_made_by=0x03FF),
    "permissions": in_record(0, external_attributes=0o100600 << 16),
    "all permissions": in_record(1, external_attributes=0o100777 << 16),
    "no attributes": in_record(0, external_attributes=0),
    "MS-DOS attributes": in_record(2, external_attributes=0x21),  # archive, read-only
    "all MS-DOS attributes of a file": in_record(0, external_attributes=0x81A40027),
    "version 2.0": in_both(0, version_needed=20),
    "version 4.5": in_both(0, version_needed=45),
}


@pytest.mark.parametrize("change", FREE.values(), ids=list(FREE))
@pytest.mark.parametrize("base", [small, large])
def test_changes_of_free_fields_break_no_rule(base: Callable[[], Image], change: Change) -> None:
    assert broken_by(base, change) == []


# Broken rules


def zip64(*values: int) -> bytes:
    return records.pack_zip64_extra(*values)


def alignment_field(alignment: int, padding: bytes) -> bytes:
    return records.pack_extra(0xD935, struct.pack("<H", alignment) + padding)


def filler(identifier: int, size: int) -> bytes:
    """An extra field of `size` bytes in all."""
    return records.pack_extra(identifier, bytes(size - 4))


def resize(index: int, by: int) -> Change:
    """States another size in a directory record."""
    return in_record(index, compressed_size=plus(by), uncompressed_size=plus(by))


def in_extra(index: int, of_size: Callable[[int], bytes]) -> Change:
    """Other extra fields in a local header, of the same size in all, which `of_size` is given."""

    def change(image: Image) -> None:
        extra = of_size(len(image.headers[index].extra))
        assert len(extra) == len(image.headers[index].extra), "the test itself is wrong"
        image.change_header(index, extra=extra)

    return change


def stated_alignment(index: int, alignment: int) -> Change:
    """Another alignment in the alignment field of an entry without Zip64 field."""
    return in_extra(index, lambda size: alignment_field(alignment, bytes(size - 6)))


def move_first_header(image: Image) -> None:
    image.move_from(0, 64)


def move_header_away(image: Image) -> None:
    image.offsets[0] = image.directory_offset - 64


def move_header_one_byte_up(image: Image) -> None:
    image.offsets[2] += 1


def swap_records(image: Image) -> None:
    image.records[0], image.records[1] = image.records[1], image.records[0]


def list_twice(image: Image) -> None:
    image.records.insert(1, image.records[0])
    image.grow_directory(image.records[0].packed_size)
    image.count(len(image.records))


def hide_record_in_comment(image: Image) -> None:
    hidden = image.records.pop(1)
    image.records[0] = image.records[0]._replace(comment=hidden.pack())


def put_bytes_into_directory(image: Image) -> None:
    image.after_directory = bytes(7)
    image.grow_directory(7)


def count_as(count: int) -> Change:
    return lambda image: image.count(count)


def drop(index: int) -> Change:
    return lambda image: image.drop(index)


def leave_gap_before(index: int, size: int) -> Change:
    return lambda image: image.move_from(index, size)


def leave_gap_before_directory(image: Image) -> None:
    image.move_directory(1 << 15)


def lengthen_local_name(image: Image) -> None:
    name, padding = b"w2", bytes(len(image.headers[0].extra) - 6 - 1)
    image.change_header(0, name=name, extra=alignment_field(64, padding))


def shorten_local_extra(image: Image) -> None:
    image.change_header(0, extra=image.headers[0].extra[:-1])


def state_no_alignment(image: Image) -> None:
    """The alignment field has one byte; the name takes what it leaves."""
    size = len(image.headers[0].extra) - 5
    image.change_header(0, name=b"w" * (1 + size), extra=filler(0xD935, 5))


def state_sizes_in_needless_zip64(image: Image) -> None:
    """Both headers are as they would be if 100 did not fit 32 bits."""
    saturated = {"compressed_size": 0xFFFFFFFF, "uncompressed_size": 0xFFFFFFFF}
    image.change_record(0, **saturated, extra=zip64(100, 100), version_needed=45)
    padding = bytes(len(image.headers[0].extra) - 6 - 20)
    extra = zip64(100, 100) + alignment_field(64, padding)
    image.change_header(0, **saturated, extra=extra, version_needed=45)


def add_needless_zip64_end(image: Image) -> None:
    count, size, offset = (
        image.end.entry_count,
        image.end.directory_size,
        image.end.directory_offset,
    )
    image.zip64_record = Zip64EndRecord(44, 0x032D, 45, 0, 0, count, count, size, offset)
    image.locator = Zip64Locator(0, offset + size, 1)
    in_end(entry_count=0xFFFF, disk_entry_count=0xFFFF)(image)
    in_end(directory_size=0xFFFFFFFF, directory_offset=0xFFFFFFFF)(image)


def unsign_zip64_record(image: Image) -> None:
    assert image.zip64_record is not None
    image.after_directory = b"PK\6\7" + image.zip64_record.pack()[4:]
    image.zip64_record = None


def unsign_locator(image: Image) -> None:
    assert image.locator is not None
    image.after_zip64_record = b"PK\6\6" + image.locator.pack()[4:]
    image.locator = None


def remove_zip64_end(image: Image) -> None:
    image.zip64_record = image.locator = None


def point_locator_to_earlier_copy(image: Image) -> None:
    assert image.zip64_record is not None
    image.after_directory = image.zip64_record.pack()
    image.grow_directory(len(image.after_directory))
    in_locator(record_offset=plus(-len(image.after_directory)))(image)


Row = tuple[str, str, Callable[[], Image], Change]

# The rule that a reader raises, with all others that are broken by the change or "..." where they
# only follow from it; what is changed, for people; the archive that is changed; and the change.
ROWS: list[Row] = [
    ("ZIP-1", "bytes before the first header", small, move_first_header),
    ("ZIP-1", "the first entry is not listed", small, drop(0)),
    ("ZIP-1 ...", "another order", small, swap_records),
    ("ZIP-2", "a comment is announced", small, in_end(comment_size=1)),
    ("ZIP-2", "the longest comment is announced", large, in_end(comment_size=0xFFFF)),
    ("ZIP-2", "a byte after the end", small, insert("after_end", b"\0")),
    ("ZIP-2", "a byte after the end", large, insert("after_end", b"\0")),
    ("ZIP-2", "half a second end", small, insert("after_end", b"PK\5\6" + bytes(17))),
    ("ZIP-2", "a comment", small, together(in_end(comment_size=3), insert("after_end", b"end"))),
    (
        "ZIP-2",
        "a comment that is an end record with a comment",
        small,
        together(
            in_end(comment_size=22), insert("after_end", EndRecord(0, 0, 0, 0, 0, 0, 1).pack())
        ),
    ),
    ("ZIP-3", "number of this disk", small, in_end(disk=1)),
    ("ZIP-3", "disk of the directory", small, in_end(directory_disk=1)),
    ("ZIP-3", "disk of an entry", small, in_record(1, disk_start=1)),
    ("ZIP-3", "number of this disk saturated", large, in_end(disk=0xFFFF)),
    ("ZIP-3", "disk of the directory saturated", large, in_end(directory_disk=0xFFFF)),
    ("ZIP-3", "disk of an entry saturated", large, in_record(1, disk_start=0xFFFF)),
    ("ZIP-3", "disk in the locator", large, in_locator(record_disk=1)),
    ("ZIP-3", "two disks", large, in_locator(disks=2)),
    ("ZIP-3", "no disks", large, in_locator(disks=0)),
    ("ZIP-3", "number of this disk", large, in_zip64_record(disk=1)),
    ("ZIP-3", "disk of the directory", large, in_zip64_record(directory_disk=1)),
    ("ZIP-4", "too few on this disk", small, in_end(disk_entry_count=3)),
    ("ZIP-4", "too many on this disk", small, in_end(disk_entry_count=5)),
    ("ZIP-4", "too few on this disk", large, in_zip64_record(disk_entry_count=3)),
    ("ZIP-4 ...", "one counted too few", small, count_as(3)),
    ("ZIP-4", "one counted too many", small, count_as(5)),
    ("ZIP-4", "one counted too many", large, count_as(5)),
    ("ZIP-4", "far too many counted", large, count_as(1 << 60)),
    ("ZIP-4", "none counted", small, count_as(0)),
    ("ZIP-4", "bytes after the records", small, put_bytes_into_directory),
    ("ZIP-12 ...", "a record in a comment", small, hide_record_in_comment),
    ("ZIP-5", "size too small", small, in_end(directory_size=plus(-1))),
    ("ZIP-5", "size too large", small, in_end(directory_size=plus(46))),
    ("ZIP-5", "offset too small", small, in_end(directory_offset=plus(-64))),
    ("ZIP-5", "offset too large", small, in_end(directory_offset=plus(1))),
    ("ZIP-5", "bytes after the directory", small, insert("after_directory", bytes(46))),
    (
        "ZIP-5",
        "bytes after the directory",
        large,
        together(insert("after_directory", bytes(46)), in_locator(record_offset=plus(46))),
    ),
    ("ZIP-5", "size too large", large, in_zip64_record(directory_size=plus(1))),
    ("ZIP-5", "offset too small", large, in_zip64_record(directory_offset=plus(-64))),
    ("ZIP-5", "size beyond all files", large, in_zip64_record(directory_size=(1 << 64) - 1)),
    ("ZIP-5", "offset beyond all files", large, in_zip64_record(directory_offset=(1 << 64) - 1)),
    ("ZIP-6", "the same entry twice", small, list_twice),
    ("ZIP-6 ...", "two entries with one header", small, in_record(1, header_offset=0)),
    ("ZIP-6", "an entry that is not listed", small, drop(2)),
    ("ALIGN-1 ZIP-7", "the last entry is not listed", small, drop(3)),
    ("ZIP-6", "a gap before an entry", small, leave_gap_before(2, 1 << 15)),
    ("ZIP-6", "a gap before the directory", small, leave_gap_before_directory),
    ("ZIP-6", "a gap before the directory", large, leave_gap_before_directory),
    ("ZIP-6", "data that begins in its header", small, resize(2, 64)),
    ("ZIP-6", "data that begins before the file", small, resize(0, 1 << 20)),
    ("ZIP-6", "a size far too small", small, resize(2, -69_000)),
    ("ZIP-6 ...", "a header in the directory", small, in_record(3, header_offset=plus(128))),
    ("ZIP-6", "a header beyond the file", small, in_record(3, header_offset=GIB_4 - 2)),
    ("ZIP-6", "2^64 - 1 bytes", large, in_record(1, extra=zip64(*[(1 << 64) - 1] * 2))),
    ("ZIP-6", "offset 2^64 - 1", large, in_record(2, extra=zip64((1 << 64) - 1))),
    ("ZIP-7", "version needed", small, in_header(0, version_needed=20)),
    ("ZIP-7", "version needed of an offset", large, in_header(2, version_needed=10)),
    ("ZIP-7", "flags", small, in_header(0, flags=0x800)),
    ("ZIP-7", "method", small, in_header(0, method=8)),
    ("ZIP-7", "time", small, in_header(0, time=1)),
    ("ZIP-7", "date", small, in_header(0, date=0)),
    ("ZIP-7", "CRC-32", small, in_header(0, crc32=plus(1))),
    ("ZIP-7", "CRC-32 in the directory", small, in_record(0, crc32=plus(1))),
    ("ZIP-7", "compressed size", small, in_header(0, compressed_size=plus(-1))),
    ("ZIP-7", "uncompressed size", small, in_header(0, uncompressed_size=plus(1))),
    ("ZIP-7", "size beside the Zip64 field", large, in_header(1, compressed_size=GIB_4 - 2)),
    ("ZIP-7", "name", small, in_header(0, name=b"x")),
    ("ZIP-7", "case of the name", small, in_header(0, name=b"W")),
    ("ZIP-7 ...", "a longer name", small, lengthen_local_name),
    ("ZIP-7", "no header", small, move_header_away),
    ("ZIP-7", "a header a byte further", small, move_header_one_byte_up),
    ("ZIP-7", "a header that ends before the data", small, shorten_local_extra),
    ("ZIP-7", "a size one unit too small", small, resize(2, -64)),
    (
        "ZIP-7",
        "sizes in a data descriptor",
        small,
        in_header(0, flags=8, crc32=0, compressed_size=0, uncompressed_size=0),
    ),
    ("ZIP-8", "deflated", small, in_both(0, method=8)),
    ("ZIP-8", "an unknown method", small, in_both(0, method=0xFFFF)),
    ("ZIP-8 ZIP-7", "sizes that differ", small, in_record(0, compressed_size=plus(-1))),
    ("ZIP-8", "sizes that differ in both headers", small, in_both(0, compressed_size=plus(-1))),
    (
        "ZIP-8 ZIP64-4",
        "sizes that differ in the Zip64 field",
        large,
        in_record(1, extra=zip64(GIB_4 + 1, GIB_4 + 2)),
    ),
    ("ZIP-9", "encrypted", small, in_both(0, flags=0x0001)),
    ("ZIP-9", "data descriptor", small, in_both(0, flags=0x0008)),
    ("ZIP-9", "strongly encrypted", small, in_both(0, flags=0x0041)),
    ("ZIP-9", "masked", small, in_both(0, flags=0x2000)),
    ("ZIP-9", "reserved", small, in_both(0, flags=0x8000)),
    ("ZIP-9", "UTF-8 for an ASCII name", small, in_both(0, flags=0x0800)),
    ("ZIP-9", "no UTF-8 for another name", small, in_both(2, flags=0)),
    ("ZIP-9", "UTF-8 and more", small, in_both(2, flags=0x0802)),
    ("ZIP-10", "0", small, in_both(0, version_needed=0)),
    ("ZIP-10", "1.1", small, in_both(0, version_needed=11)),
    ("ZIP-10", "6.3", small, in_both(0, version_needed=63)),
    ("ZIP-10", "4.5 for Unix", small, in_both(0, version_needed=0x032D)),
    ("ZIP-10", "6.3 beside a Zip64 field", large, in_both(1, version_needed=63)),
    ("ZIP-10", "1.0 beside the Zip64 field of a size", large, in_both(1, version_needed=10)),
    ("ZIP-10", "2.0 beside the Zip64 field of an offset", large, in_both(2, version_needed=20)),
    ("ZIP-11", "a symbolic link", small, in_record(0, external_attributes=0o120777 << 16)),
    ("ZIP-11", "a directory", small, in_record(0, external_attributes=0o040755 << 16)),
    ("ZIP-11", "a pipe", small, in_record(0, external_attributes=0o010644 << 16)),
    ("ZIP-11", "a directory of MS-DOS", small, in_record(0, external_attributes=0x81A40010)),
    ("ZIP-11", "a volume label of MS-DOS", small, in_record(0, external_attributes=0x08)),
    ("ZIP-11", "bit 6 of MS-DOS", small, in_record(0, external_attributes=0x40)),
    ("ZIP-11", "bit 7 of MS-DOS", small, in_record(0, external_attributes=0x80)),
    ("ZIP-11", "a reparse point", small, in_record(0, external_attributes=0x0400)),
    ("ZIP-11", "bit 15", small, in_record(0, external_attributes=0x8000)),
    ("ZIP-11", "made by MS-DOS", small, in_record(0, version_made_by=0x002D)),
    ("ZIP-11", "made by Amiga", small, in_record(1, version_made_by=0x012D)),
    ("ZIP-11", "made by NTFS", small, in_record(2, version_made_by=0x0A2D)),
    ("ZIP-11", "made by what is unknown", large, in_record(2, version_made_by=0xFF03)),
    ("ZIP-11", "text", small, in_record(0, internal_attributes=1)),
    ("ZIP-12", "a comment", small, in_record(0, comment=b"!")),
    ("ZIP-12", "a comment", large, in_record(1, comment=b"\0")),
    ("ZIP-13", "an unknown field", small, in_record(0, extra=filler(0xCAFE, 8))),
    ("ZIP-13", "an alignment field", small, in_record(0, extra=alignment_field(64, b""))),
    ("ZIP-13", "another name (4.6.9)", small, in_record(0, extra=filler(0x7075, 10))),
    ("ZIP-13", "stray bytes", small, in_record(0, extra=bytes(3))),
    ("ZIP-13", "a field that runs past the end", small, in_record(0, extra=b"\xfe\xca\1\0")),
    ("ZIP-13", "no Zip64 field", large, in_record(1, extra=b"")),
    ("ZIP-13", "no Zip64 field of an offset", large, in_record(2, extra=b"")),
    ("ZIP-13", "the Zip64 field twice", large, in_record(1, extra=lambda extra: extra * 2)),
    (
        "ZIP-13",
        "another field after the Zip64 field",
        large,
        in_record(1, extra=lambda extra: extra + filler(0xCAFE, 8)),
    ),
    (
        "ZIP-13",
        "a Zip64 field that is not needed",
        small,
        together(in_both(0, version_needed=45), in_record(0, extra=zip64(100, 100))),
    ),
    (
        "ZIP-13",
        "a Zip64 field of no values",
        small,
        together(in_both(0, version_needed=45), in_record(0, extra=filler(1, 4))),
    ),
    (
        "ZIP-13 ZIP-10",
        "a Zip64 field that is not needed, and version 1.0",
        small,
        in_record(0, extra=zip64(100, 100)),
    ),
    ("ZIP-13", "a Zip64 field cut short", large, in_record(1, extra=lambda extra: extra[:-1])),
    ("ZIP-14", "no extra fields", small, in_extra(0, bytes)),
    ("ZIP-14", "another field", small, in_extra(0, lambda size: filler(0xCAFE, size))),
    ("ZIP-14", "a field that runs past the end", small, in_extra(0, lambda size: b"\xff" * size)),
    (
        "ZIP-14",
        "stray bytes after the alignment field",
        small,
        in_extra(0, lambda size: alignment_field(64, bytes(size - 7)) + b"\0"),
    ),
    (
        "ZIP-14",
        "the alignment field twice",
        small,
        in_extra(0, lambda size: alignment_field(64, b"") + alignment_field(64, bytes(size - 12))),
    ),
    (
        "ZIP-14",
        "a field before the alignment field",
        small,
        in_extra(0, lambda size: filler(0xCAFE, 4) + alignment_field(64, bytes(size - 10))),
    ),
    (
        "ZIP-14",
        "a Zip64 field that is not needed",
        small,
        in_extra(0, lambda size: zip64(100, 100) + alignment_field(64, bytes(size - 26))),
    ),
    (
        "ZIP-14",
        "a Zip64 field of an offset",
        large,
        in_extra(2, lambda size: zip64(1) + alignment_field(64, bytes(size - 18))),
    ),
    ("ZIP-14", "no Zip64 field", large, in_extra(1, lambda size: filler(0xD935, size))),
    ("ZIP-14", "no alignment field", large, in_extra(1, lambda size: filler(0x0001, size))),
    (
        "ZIP-14",
        "the Zip64 field last",
        large,
        in_extra(
            1, lambda size: alignment_field(64, bytes(size - 26)) + zip64(GIB_4 + 1, GIB_4 + 1)
        ),
    ),
    ("ZIP-7 ZIP-14", "an alignment field of one byte", small, state_no_alignment),
    ("ZIP64-1", "a count stated twice", large, in_end(disk_entry_count=4, entry_count=4)),
    ("ZIP64-1", "one count stated twice", large, in_end(entry_count=4)),
    ("ZIP64-1", "a size stated twice", large, in_end(directory_size=1)),
    ("ZIP64-1", "an offset stated twice", large, in_end(directory_offset=0)),
    ("ZIP64-1", "no Zip64 record and locator", large, remove_zip64_end),
    ("ZIP64-1", "no locator", large, unsign_locator),
    (
        "ZIP64-1",
        "saturated without Zip64",
        small,
        in_end(entry_count=0xFFFF, disk_entry_count=0xFFFF),
    ),
    ("ZIP64-1", "not needed", small, add_needless_zip64_end),
    ("ZIP64-2", "size too small", large, in_zip64_record(stated_size=43)),
    ("ZIP64-2", "size too large", large, in_zip64_record(stated_size=45)),
    ("ZIP64-2", "the largest size", large, in_zip64_record(stated_size=(1 << 64) - 1)),
    ("ZIP64-2", "version needed", large, in_zip64_record(version_needed=62)),
    ("ZIP64-2", "version needed of Unix", large, in_zip64_record(version_needed=0x032D)),
    ("ZIP64-3", "locator too low", large, in_locator(record_offset=plus(-1))),
    ("ZIP64-3", "locator too high", large, in_locator(record_offset=plus(1))),
    ("ZIP64-3", "locator beyond all files", large, in_locator(record_offset=(1 << 64) - 1)),
    ("ZIP64-3", "locator at an earlier copy", large, point_locator_to_earlier_copy),
    ("ZIP64-3", "no Zip64 record", large, unsign_zip64_record),
    ("ZIP64-3", "bytes after the record", large, insert("after_zip64_record", bytes(56))),
    ("ZIP64-4", "no values", large, in_record(1, extra=filler(1, 4))),
    ("ZIP64-4", "one size", large, in_record(1, extra=zip64(GIB_4 + 1))),
    ("ZIP64-4 ...", "a value too many", large, in_record(1, extra=zip64(GIB_4 + 1, GIB_4 + 1, 0))),
    ("ZIP64-4", "half a value", large, in_record(1, extra=lambda e: b"\1\0\x0c\0" + e[4:16])),
    (
        "ZIP64-4 ...",
        "sizes beside an offset",
        large,
        in_record(2, extra=lambda extra: b"\1\0\x18\0" + struct.pack("<2Q", 10, 10) + extra[4:]),
    ),
    ("ZIP64-4 ZIP-14", "a size that fits", small, state_sizes_in_needless_zip64),
    (
        "ZIP64-4",
        "an offset that fits",
        large,
        in_record(1, header_offset=0xFFFFFFFF, extra=zip64(GIB_4 + 1, GIB_4 + 1, 164)),
    ),
    ("ZIP64-5", "other sizes", large, in_header(1, extra=lambda e: zip64(1, GIB_4 + 1) + e[20:])),
    ("ZIP64-5", "swapped", large, in_header(1, extra=lambda e: zip64(GIB_4 + 1, 1) + e[20:])),
    (
        "ZIP64-5 ...",
        "one size",
        large,
        in_extra(1, lambda size: zip64(GIB_4 + 1) + alignment_field(64, bytes(size - 18))),
    ),
    (
        "ZIP64-5 ...",
        "half a value",
        large,
        in_extra(1, lambda size: filler(1, 16) + alignment_field(64, bytes(size - 22))),
    ),
    ("ALIGN-1 ALIGN-2", "aligned to 32", aligned_to_32, together()),
    ("ALIGN-1 ZIP-7", "one byte less than there is", small, resize(0, -1)),
    ("ALIGN-2", "0", small, stated_alignment(0, 0)),
    ("ALIGN-2", "1", small, stated_alignment(0, 1)),
    ("ALIGN-2", "32", small, stated_alignment(0, 32)),
    ("ALIGN-2", "96", small, stated_alignment(0, 96)),
    ("ALIGN-2", "65535", small, stated_alignment(0, 65535)),
    ("ALIGN-2", "128 for an odd multiple of 64", small, stated_alignment(0, 128)),
    ("ALIGN-3", "padding that is not zero", small, in_header(0, extra=lambda e: e[:-1] + b"\1")),
    ("ALIGN-3", "padding for more", aligned_to_4096, stated_alignment(0, 2048)),
]


def row_id(row: Row) -> str:
    expected, what, base, _ = row
    return f"{expected} {what} ({base.__name__})"


@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_a_broken_rule_is_the_first_that_is_reported(row: Row) -> None:
    expected, _, base, change = row
    found = list(dict.fromkeys(broken_by(base, change)))
    first, *further = expected.split()
    assert found[:1] == [first]
    assert further in (["..."], found[1:])


def test_every_rule_of_the_zip_is_broken_by_a_case() -> None:
    broken = {expected.split()[0] for expected, *_ in ROWS}
    families = ("ZIP-", "ZIP64-", "ALIGN-")
    # ZIP-15 and ZIP-16 are about data.
    assert broken == {rule for rule in rules() if rule.startswith(families)} - {"ZIP-15", "ZIP-16"}


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (small, in_both(0, flags=0x0001), r"expected flags 0x0000, found 0x0001 \(encrypted\)"),
        (small, in_both(0, flags=0x0008), r"found 0x0008 \(sizes in a data descriptor\)"),
        (small, in_both(2, flags=0), "entry 'assets/é': expected flags 0x0800, found 0x0000"),
        (large, in_record(1, extra=filler(0xCAFE, 4)), r"fields \[0x0001\], found \[0xcafe\]"),
        (small, in_extra(0, lambda size: filler(0xCAFE, size)), r"\[0xd935\], found \[0xcafe\]"),
        (small, in_header(0, crc32=7), rf"expected crc32 {CRC32} as in the directory, found 7"),
        (
            small,
            in_end(disk=3),
            "expected disk 0 and directory disk 0 in the end record, "
            "found disk 3 and directory disk 0",
        ),
        (small, in_record(0, version_made_by=0x0A2D), r"made by 0x0300 \(Unix\).*found 0x0a2d"),
        (small, in_record(0, external_attributes=0x410), "within 0x0027.*found 0x00000410"),
        (small, in_header(0, name=b"x"), "expected name b'w' as in the directory, found b'x'"),
        (small, shorten_local_extra, "a local header of 64 bytes, found one of 63 bytes"),
        (small, move_header_one_byte_up, r"bytes that begin with b'.x00PK.x03'"),
        (
            large,
            in_header(1, extra=lambda e: zip64(1, GIB_4 + 1) + e[20:]),
            r"sizes \[4294967297, 4294967297\] in the Zip64 field, found \[1, 4294967297\]",
        ),
        (large, in_locator(disks=5), "expected disk 0 of 1 in the Zip64 locator, found 0 of 5"),
    ],
)
def test_messages_state_what_was_expected_and_what_was_found(
    base: Callable[[], Image], change: Change, message: str
) -> None:
    image = base()
    change(image)
    with pytest.raises(ArchiveFormatError, match=message):
        inspect(image.file(), Strict())


def test_a_long_name_or_field_is_not_printed_in_full() -> None:
    image = small()
    in_header(0, name=b"x" * 60_000)(image)
    image.change_record(0, extra=filler(0xCAFE, 4) * 10_000)
    findings = Findings()
    inspect(image.file(), findings)
    assert findings.messages
    assert max(map(len, findings.messages)) < 500


@pytest.mark.parametrize(
    ("base", "index", "change", "left_out"),
    [
        (large, 1, in_record(1, extra=b""), [1]),
        (large, 2, in_record(2, extra=b""), [1, 2]),
        (small, 0, in_record(0, extra=b"\0\0\0"), []),
    ],
)
def test_a_record_without_size_or_offset_is_listed_and_gives_no_entry(
    base: Callable[[], Image], index: int, change: Change, left_out: list[int]
) -> None:
    image = base()
    change(image)
    findings = Findings()
    found = inspect(image.file(), findings)
    assert found is not None
    assert (findings.rules, findings.entries) == (["ZIP-13"], [found.names[index]])
    names = [record.name.decode() for record in image.records]
    assert found.names == names
    kept = [name for number, name in enumerate(names) if number not in left_out]
    assert [entry.name for entry in found.entries] == kept
    assert found.is_whole


def test_another_header_is_not_taken_for_that_of_a_first_record_without_an_offset() -> None:
    change = in_record(0, uncompressed_size=0xFFFFFFFF, compressed_size=0xFFFFFFFF)
    assert broken_by(large, change) == ["ZIP-13"]


def test_a_name_that_is_not_utf8_is_refused() -> None:
    image = small()
    in_both(2, name=b"assets/\xc3")(image)
    image.change_header(2, extra=image.headers[2].extra + b"\0")
    image.change_header(2, extra=image.headers[2].extra.replace(b"\x35\xd9\x19", b"\x35\xd9\x1a"))
    findings = Findings()
    found = inspect(image.file(), findings)
    assert findings.rules[:1] == ["NAME-1"]
    assert found is not None
    assert found.entries[2].name == r"assets/\xc3"
    assert [name is None for name in found.names] == [False, False, True, False]


def test_all_broken_rules_are_reported_and_not_only_the_first() -> None:
    image = small()
    together(
        in_end(disk=1),
        in_both(0, method=8),
        in_record(1, comment=b"!", internal_attributes=1),
        in_header(2, crc32=plus(1)),
    )(image)
    findings = Findings()
    inspect(image.file(), findings)
    assert findings.pairs == [
        ("ZIP-3", None),
        ("ZIP-8", "w"),
        ("ZIP-11", "empty"),
        ("ZIP-12", "empty"),
        ("ZIP-7", "assets/é"),
    ]


# Limits


@pytest.mark.parametrize("size", range(22))
def test_a_file_shorter_than_an_end_record_is_no_archive(size: int) -> None:
    assert broken_rules(Sparse([(0, Image.of([]).tail()[:size])])) == ["ZIP-2"]


@pytest.mark.parametrize("base", [small, large])
def test_an_archive_cut_anywhere_at_its_end_is_no_archive(base: Callable[[], Image]) -> None:
    image = base()
    tail = image.tail()
    for size in range(len(tail)):
        headers = zip(image.offsets, (header.pack() for header in image.headers), strict=True)
        file = Sparse([*headers, (image.directory_offset, tail[:size])])
        assert broken_rules(file)[0] == "ZIP-2"


@pytest.mark.parametrize(("count", "rule"), [(1 << 18, None), ((1 << 18) + 1, "ZIP-4")])
def test_an_archive_has_at_most_262144_entries(count: int, rule: str | None) -> None:
    size = 47 * count
    end = layout.end_of_archive(count, size, 64 * count)
    findings = Findings()
    bounds = locate(end, 111 * count + len(end), findings)
    assert findings.rules == ([] if rule is None else [rule])
    assert bounds == (Bounds(64 * count, size, count) if rule is None else None)


@pytest.mark.parametrize(
    ("size", "is_possible"),
    [
        (3 * 46 - 1, False),
        (3 * 46, True),
        # The longest name, and a Zip64 field of three values.
        (3 * (46 + 1024 + 28), True),
        (3 * (46 + 1024 + 28) + 1, False),
    ],
)
def test_a_directory_that_is_too_small_or_large_for_its_count_is_not_read(
    size: int, is_possible: bool
) -> None:
    end = layout.end_of_archive(3, size, 1000)
    findings = Findings()
    bounds = locate(end, 1000 + size + len(end), findings)
    assert findings.rules == ([] if is_possible else ["ZIP-4"])
    assert (bounds is not None) == is_possible


# The local header of "w" is 37 bytes at least, and its data at 64.
@pytest.mark.parametrize(
    ("data_offset", "rule"),
    [(36, "ZIP-6"), (37, "ALIGN-1"), (37 + 32767, "ALIGN-1"), (37 + 32768, "ZIP-6")],
)
def test_the_space_before_data_holds_a_local_header_and_the_longest_padding(
    data_offset: int, rule: str
) -> None:
    assert broken_by(small, leave_gap_before(1, data_offset - 64))[0] == rule


def test_no_entry_is_listed_whose_data_is_outside_the_file() -> None:
    image = Image.of([("w", 3), ("v", 3), (MODEL, 2)])
    in_record(1, header_offset=-(-image.file().size // 64) * 64 + 3)(image)
    findings = Findings()
    found = inspect(image.file(), findings)
    assert findings.rules[0] == "ZIP-6"
    assert found is not None
    assert [entry.name for entry in found.entries] == [MODEL]


def test_the_padding_may_be_as_long_as_the_largest_alignment_needs() -> None:
    image = Image.of([("w", 1), (MODEL, 1)], alignment=32768)
    assert len(image.headers[1].extra) > 32606
    assert broken_rules(image.file()) == []


# Local headers alone

PLACEMENT = EntryLayout(b"key", 100, CRC32, 128, 256)


def check_header(header: bytes, placement: EntryLayout = PLACEMENT) -> list[str]:
    findings = Findings()
    entry = Entry(
        placement.name.decode(),
        placement.header_offset,
        placement.data_offset,
        placement.nbytes,
        placement.crc32,
    )
    check_local_header(header, entry, placement.pack()[1], findings)
    return findings.rules


def test_a_header_that_is_cut_or_too_long_is_refused() -> None:
    header = PLACEMENT.pack()[0]
    for size in range(len(header)):
        assert check_header(header[:size]) == ["ZIP-7"]
    assert check_header(header + b"\0") == ["ZIP-7"]
    assert check_header(bytes(len(header))) == ["ZIP-7"]


def test_every_byte_of_a_header_with_zip64_counts() -> None:
    placement = EntryLayout(b"key", GIB_4 + 5, CRC32, GIB_4 + 5, 64)
    header = placement.pack()[0]
    for position in range(len(header)):
        changed = bytearray(header)
        changed[position] ^= 0xFF
        assert check_header(bytes(changed), placement), position


@given(st.binary(max_size=120))
@settings(max_examples=300)
def test_arbitrary_bytes_are_no_header_and_no_crash(data: bytes) -> None:
    assert check_header(data)
    assert check_header(LocalHeader.SIGNATURE + data)


# Arbitrary bytes

WIDTHS = {1: "<B", 2: "<H", 4: "<I", 8: "<Q"}
INTERESTING = st.sampled_from([0, 1, 20, 45, 46, 63, 64, *(1 << bits for bits in range(7, 64))])
# Which part (0 is the tail, then headers), where in it, how wide, and which number; the last two
# are for replacing and inserting bytes.
EDITS = st.tuples(
    st.integers(0, 3),
    st.integers(0, 400),
    st.sampled_from([1, 2, 4, 8]),
    INTERESTING | st.integers(0, (1 << 64) - 1),
    st.sampled_from(["set", "set", "set", "add", "subtract", "insert", "delete"]),
)


def tiny() -> Image:
    return Image.of([("w", 3), ("assets/é", 0), (MODEL, 2)])


def tiny_but_for_one() -> Image:
    return Image.of([("w", GIB_4 - 1), ("v", 7), (MODEL, 2)])


def nothing() -> Image:
    return Image.of([])


def edited(image: Image, edits: list[tuple[int, int, int, int, str]]) -> Sparse:
    segments = [(image.directory_offset, bytearray(image.tail()))]
    for offset, header in zip(image.offsets, image.headers, strict=True):
        segments.append((offset, bytearray(header.pack())))
    for part, position, width, value, kind in edits:
        data = segments[part % len(segments)][1]
        position %= len(data) + 1
        end = min(position + width, len(data))
        value %= 1 << 8 * width
        before = int.from_bytes(data[position:end], "little")
        if kind == "insert":
            end = position
        elif kind == "add":
            value = (before + value) % (1 << 8 * width)
        elif kind == "subtract":
            value = (before - value) % (1 << 8 * width)
        data[position:end] = b"" if kind == "delete" else struct.pack(WIDTHS[width], value)
    return Sparse((offset, bytes(data)) for offset, data in segments)


def require_one_encoding(file: Sparse, found: Directory) -> None:
    """Requires that an accepted file is the writer's, except for free fields."""
    offset = 0
    tail = b""
    for entry, packed in zip(found.entries, found.records, strict=True):
        record = DirectoryRecord.unpack(packed)
        assert record is not None
        header = LocalHeader.unpack(file.read(offset, entry.data_offset - offset))
        assert header is not None
        *_, (_, content) = records.unpack_extra(header.extra)
        (alignment,) = struct.unpack_from("<H", content)
        placement = EntryLayout(entry.name.encode(), entry.nbytes, entry.crc32, offset, alignment)
        assert (entry.header_offset, entry.data_offset) == (offset, placement.data_offset)
        expected = unpacked_record(placement)._replace(
            version_made_by=record.version_made_by,
            version_needed=record.version_needed,
            time=record.time,
            date=record.date,
            external_attributes=record.external_attributes,
        )
        assert header == unpacked_header(placement)._replace(
            version_needed=record.version_needed, time=record.time, date=record.date
        )
        assert record == expected
        tail += expected.pack()
        offset = placement.end
    tail += layout.end_of_archive(len(found.entries), len(tail), offset)
    assert file.size == offset + len(tail)
    assert file.read(offset, len(tail)) == replace_zip64_origin(tail, file)


def replace_zip64_origin(tail: bytes, file: Sparse) -> bytes:
    """`tail` with the version made by of the file's Zip64 record, which is free, too."""
    position = len(tail) - TAIL_SIZE
    record = Zip64EndRecord.unpack(tail, position)
    if record is None:
        return tail
    there = Zip64EndRecord.unpack(file.read(file.size - TAIL_SIZE, Zip64EndRecord.SIZE))
    assert there is not None
    made = record._replace(version_made_by=there.version_made_by).pack()
    return tail[:position] + made + tail[position + len(made) :]


@pytest.mark.sweep
@requires_outcomes(accepted=20, refused=200)
@given(st.sampled_from([tiny, tiny_but_for_one, nothing]), st.lists(EDITS, min_size=1, max_size=4))
@settings(max_examples=2000)
@example(tiny, [(0, 4, 2, 0, "set")])  # version made by
@example(tiny_but_for_one, [(0, 38, 2, 0x21, "set")])  # attributes of MS-DOS
def test_changed_bytes_are_reported_or_harmless_and_never_a_crash(
    base: Callable[[], Image], edits: list[tuple[int, int, int, int, str]]
) -> None:
    file = edited(base(), edits)
    findings = Findings()
    found = inspect(file, findings)
    count_outcome("refused" if findings.rules else "accepted")
    for entry in found.entries if found else ():
        assert 0 <= entry.header_offset < entry.data_offset
        assert entry.data_offset + entry.nbytes <= file.size
    if findings.rules:
        with pytest.raises(ArchiveFormatError) as caught:
            inspect(file, Strict())
        assert caught.value.rule == findings.rules[0]
    else:
        assert found is not None
        assert inspect(file, Strict()) == found
        require_one_encoding(file, found)


@given(st.binary(max_size=300))
@settings(max_examples=300)
def test_arbitrary_bytes_are_no_archive_and_no_crash(data: bytes) -> None:
    assert broken_rules(Sparse([(0, data)]))


@given(st.lists(st.binary(min_size=42, max_size=80), max_size=6), st.sampled_from([0, 64, GIB_4]))
@settings(max_examples=300)
def test_directory_records_of_arbitrary_bytes_are_no_crash(
    contents: list[bytes], offset: int
) -> None:
    data = b"".join(DirectoryRecord.SIGNATURE + content for content in contents)
    tail = data + layout.end_of_archive(len(contents), len(data), offset)
    is_empty_zip = not contents and not offset
    assert bool(broken_rules(Sparse([(offset, tail)]))) != is_empty_zip
