"""What is there for speed only, against the plain way: on each of thousands of changes."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from zip_image import Findings, Image

from onnxarchive.buffers.checksums import crc32
from onnxarchive.errors import Report
from onnxarchive.zipformat import directory, records
from onnxarchive.zipformat.directory_at_once import read_at_once
from onnxarchive.zipformat.end_records import TAIL_SIZE, Bounds, locate
from onnxarchive.zipformat.entries import Directory
from onnxarchive.zipformat.local_header import check_local_header
from onnxarchive.zipformat.local_headers_at_once import pack_local_header, pack_local_headers
from onnxarchive.zipformat.records import DirectoryRecord, LocalHeader
from onnxarchive.zipformat.small_entries_at_once import pack_entries
from onnxarchive.zipformat.writer import ZipWriter

GIB_4 = 1 << 32
# Numbers that fields are set to: what rules name, and its neighbours.
NUMBERS = (
    *(0, 1, 8, 10, 20, 45, 46, 63, 64, 128, 0x300, 0x800, 0xFFFE, 0xFFFF),
    *(0x10000, 0x81A40000, GIB_4 - 2, GIB_4 - 1),
)


def archive_of(alignment: int) -> bytes:
    """An archive by the writer, of entries with and without data."""
    target = io.BytesIO()
    writer = ZipWriter(target, alignment=alignment)
    for index, size in enumerate((100, 0, 64, 7, 200, 1)):
        writer.add(f"layer.{index}.weight", bytes([index + 1]) * size)
    writer.add("__MODEL_PROTO", b"model")
    writer.finish()
    return target.getvalue()


def directory_of(archive: bytes) -> tuple[bytes, Bounds]:
    bounds = locate(archive[-TAIL_SIZE:], len(archive), Report())
    assert bounds is not None
    return archive[bounds.offset : bounds.offset + bounds.size], bounds


def usual_directory() -> tuple[bytes, Bounds]:
    return directory_of(archive_of(64))


def directory_beyond_4_gib() -> tuple[bytes, Bounds]:
    """A directory in which the offsets of the last headers are in Zip64 fields."""
    image = Image.of([("w0", GIB_4 - 200), ("w1", 10), ("w2", 90), ("w3", 0), ("model", 20)])
    data = b"".join(record.pack() for record in image.records)
    return data, Bounds(image.directory_offset, len(data), len(image.records))


DIRECTORIES = pytest.mark.parametrize("base", [usual_directory, directory_beyond_4_gib])


def with_changed_bytes(data: bytes) -> Iterator[bytes]:
    """`data` with one byte changed: each bit, all bits, and some numbers."""
    for position, byte in enumerate(data):
        others = {*(byte ^ 1 << bit for bit in range(8)), byte ^ 0xFF, 0, 1, 0xFF}
        for other in sorted(others - {byte}):
            yield data[:position] + bytes([other]) + data[position + 1 :]


def with_changed_field(record: DirectoryRecord) -> Iterator[tuple[str, Any]]:
    """The name of a field and another value of it; some do not fit the field."""
    for field, value in record._asdict().items():
        if isinstance(value, bytes):
            others: list[Any] = [b"", b"x", value + b"x", value[:-1], records.pack_zip64_extra(7)]
        else:
            others = [*NUMBERS, value + 1, value + 64, value ^ 0x40]
        yield from ((field, other) for other in others if other != value)


def with_changed_records(data: bytes, bounds: Bounds) -> Iterator[bytes]:
    packed = directory.read_directory(data, bounds, Report()).records
    for index, record in enumerate(packed):
        for name, value in with_changed_field(record):
            try:
                changed = record._replace(**{name: value}).pack()
            except struct.error:
                continue
            others = [each.pack() for each in packed]
            yield b"".join([*others[:index], changed, *others[index + 1 :]])


@DIRECTORIES
def test_a_changed_directory_is_read_at_once_as_it_is_record_by_record_or_not_at_all(
    base: Callable[[], tuple[bytes, Bounds]],
) -> None:
    data, bounds = base()
    tried = answered = sound = 0
    for changed in (*with_changed_bytes(data), *with_changed_records(data, bounds)):
        around = bounds._replace(size=len(changed))
        findings = Findings()
        plainly = directory.read_one_by_one(changed, around, findings)
        at_once = read_at_once(changed, around)
        tried += 1
        sound += not findings.rules
        if at_once is not None:
            answered += 1
            assert findings.rules == []
            assert list(at_once.entries) == list(plainly.entries)
            assert list(at_once.records) == list(plainly.records)
            assert (list(at_once.names), list(at_once.sizes)) == (plainly.names, plainly.sizes)
            assert (at_once.is_whole, plainly.is_whole) == (True, True)
    assert tried > 3500
    # Names, times, CRC-32s and some attributes are free: half of what is sound, at least.
    assert answered > 1000
    assert answered > sound / 2


def offset_in_needless_zip64() -> Image:
    image = Image.of([("w0", 10), ("w1", 10), ("w2", 10)])
    extra = records.pack_zip64_extra(image.records[1].header_offset)
    image.change_record(1, header_offset=records.SATURATED_32, extra=extra, version_needed=45)
    return image


def largest_32_bit_size_without_zip64() -> Image:
    image = Image.of([("w0", 10), ("w1", GIB_4 - 1), ("w2", 10)])
    image.change_record(1, extra=b"")
    return image


def gap_as_large_as_the_largest_alignment() -> Image:
    image = Image.of([("w0", 10), ("w1", 10), ("w2", 10)])
    image.move_from(1, 1 << 15)
    return image


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (offset_in_needless_zip64, "ZIP64-4"),
        (largest_32_bit_size_without_zip64, "ZIP-13"),
        (gap_as_large_as_the_largest_alignment, "ZIP-6"),
    ],
)
def test_a_directory_that_breaks_a_rule_in_one_record_is_not_read_at_once(
    broken: Callable[[], Image], rule: str
) -> None:
    image = broken()
    data = b"".join(record.pack() for record in image.records)
    bounds = Bounds(image.directory_offset, len(data), 3)
    findings = Findings()
    directory.read_one_by_one(data, bounds, findings)
    assert findings.rules[:1] == [rule]
    assert read_at_once(data, bounds) is None


def headers_of(archive: bytes, found: Directory) -> list[bytes]:
    return [archive[entry.header_offset : entry.data_offset] for entry in found.entries]


def expected_headers(found: Directory, start: int, stop: int, alignment: int) -> bytes | None:
    """The local headers of some entries, packed together; the same as one by one."""
    one_by_one = [pack_local_header(found, number, alignment) for number in range(start, stop)]
    whole = [header for header in one_by_one if header is not None]
    together = pack_local_headers(found, start, stop, alignment)
    assert together == (b"".join(whole) if len(whole) == stop - start else None)
    return together


def rules_of(headers: list[bytes], found: Directory) -> list[str]:
    """The rules that local headers break, compared one by one."""
    findings = Findings()
    for header, entry, record in zip(headers, found.entries, found.records, strict=True):
        check_local_header(header, entry, record, findings)
    return findings.rules


@pytest.mark.parametrize("alignment", [64, 128])
def test_headers_with_a_changed_byte_are_never_those_that_are_expected(alignment: int) -> None:
    archive = archive_of(alignment)
    found = directory.read_directory(*directory_of(archive), Report())
    headers = headers_of(archive, found)
    expected = expected_headers(found, 0, len(headers), alignment)
    assert expected == b"".join(headers)
    assert rules_of(headers, found) == []
    tried = 0
    for index, header in enumerate(headers):
        for changed in with_changed_bytes(header[:200]):
            tried += 1
            others = [*headers[:index], changed + header[200:], *headers[index + 1 :]]
            assert b"".join(others) != expected
            assert rules_of(others, found)
    assert tried > 4000


@pytest.mark.parametrize("alignment", [64, 128])
def test_headers_that_are_those_expected_break_no_rule_when_compared_one_by_one(
    alignment: int,
) -> None:
    archive = archive_of(alignment)
    data, bounds = directory_of(archive)
    sound = directory.read_directory(data, bounds, Report())
    common = {*LocalHeader._fields} - {"extra"}
    tried = answered = 0
    for index, record in enumerate(sound.records):
        for name, value in with_changed_field(record):
            headers = headers_of(archive, sound)
            local = LocalHeader.unpack(headers[index])
            assert local is not None
            try:
                changed = record._replace(**{name: value}).pack()
                if name in common:
                    headers[index] = local._replace(**{name: value}).pack()
            except struct.error:
                continue
            packed = [each.pack() for each in sound.records]
            changed = b"".join([*packed[:index], changed, *packed[index + 1 :]])
            found = directory.read_directory(
                changed, bounds._replace(size=len(changed)), Findings()
            )
            if len(found.entries) < len(headers):
                continue
            tried += 1
            for start in (0, index, 6):
                expected = expected_headers(found, start, len(headers), alignment)
                if expected == b"".join(headers[start:]):
                    answered += 1
                    run = Directory(found.entries[start:], found.records[start:])
                    assert rules_of(headers[start:], run) == []
    assert tried > 500
    assert answered > 1000


@pytest.mark.parametrize("stated", [64 << shift for shift in range(10)])
def test_headers_are_expected_with_no_other_alignment_than_theirs(stated: int) -> None:
    for alignment in (64, 128, 4096):
        archive = archive_of(alignment)
        found = directory.read_directory(*directory_of(archive), Report())
        expected = expected_headers(found, 0, len(found.entries), stated)
        assert (expected == b"".join(headers_of(archive, found))) == (stated == alignment)


# One entry of several for which the headers cannot be made together.


def found_in(image: Image) -> tuple[Directory, list[bytes], Findings]:
    file = image.file()
    findings = Findings()
    bounds = locate(file.read(file.size - TAIL_SIZE, TAIL_SIZE), file.size, Report())
    assert bounds is not None
    found = directory.read_directory(file.read(bounds.offset, bounds.size), bounds, findings)
    headers = [
        file.read(entry.header_offset, entry.data_offset - entry.header_offset)
        for entry in found.entries
    ]
    return found, headers, findings


@pytest.mark.parametrize("alignment", [64, 128])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_name_that_is_not_utf_8_is_expected_as_in_the_directory(
    alignment: int, index: int
) -> None:
    image = Image.of([("w" * 43, 10), ("v" * 43, 10), ("u" * 43, 10)], alignment=alignment)
    image.change_record(index, name=b"\xc3" * 43)
    image.change_header(index, name=b"\xc3" * 43)
    found, headers, findings = found_in(image)
    assert findings.rules == ["NAME-1", "ZIP-9"]
    assert found.entries[index].name == r"\xc3" * 43
    assert expected_headers(found, 0, 3, alignment) == b"".join(headers)
    assert rules_of(headers, found) == []


@pytest.mark.parametrize("has_padding", [True, False])
@pytest.mark.parametrize("alignment", [64, 128])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_padding_that_is_a_whole_unit_too_long_is_asked_about_the_plain_way(
    alignment: int, index: int, has_padding: bool
) -> None:
    size = 5 if has_padding else alignment - LocalHeader.SIZE - records.ALIGNMENT_EXTRA_SIZE
    image = Image.of([(str(number) * size, alignment) for number in range(3)], alignment=alignment)
    image.change_header(index, extra=image.headers[index].extra + bytes(alignment))
    field = image.headers[index].extra
    content = field[records.EXTRA_HEADER_SIZE :]
    image.change_header(index, extra=records.pack_extra(records.ALIGNMENT_EXTRA, content))
    if index < 2:
        image.move_from(index + 1, alignment)
    else:
        image.move_directory(alignment)
    found, headers, findings = found_in(image)
    assert findings.rules == []
    assert expected_headers(found, 0, 3, alignment) is None
    assert rules_of(headers, found) == ["ALIGN-3"]


@pytest.mark.parametrize("alignment", [64, 128])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_an_entry_that_needs_zip64_is_asked_about_the_plain_way(alignment: int, index: int) -> None:
    sizes = [("w0", 10), ("w1", 10), ("w2", 10)]
    sizes[index] = (f"w{index}", GIB_4)
    image = Image.of(sizes, alignment=alignment)
    # The Zip64 field's bytes become padding: right for entries that need none.
    padding = len(image.headers[index].extra) - records.ALIGNMENT_EXTRA_SIZE
    image.change_header(index, extra=records.pack_alignment_extra(alignment, padding))
    found, headers, findings = found_in(image)
    assert findings.rules == []
    assert expected_headers(found, 0, 3, alignment) is None
    assert rules_of(headers, found) == ["ZIP-14"]


@pytest.mark.parametrize("index", [0, 1, 2])
def test_data_at_another_alignment_is_asked_about_the_plain_way(index: int) -> None:
    image = Image.of([("w0", 10), ("w1", 10), ("w2", 10)], alignment=128)
    extra = image.headers[index].extra
    padding = (len(extra) - records.ALIGNMENT_EXTRA_SIZE - 64) % 128
    moved = padding + records.ALIGNMENT_EXTRA_SIZE - len(extra)
    image.change_header(index, extra=records.pack_alignment_extra(128, padding))
    if index < 2:
        image.move_from(index + 1, moved)
    else:
        image.move_directory(moved)
    found, headers, findings = found_in(image)
    assert findings.rules == []
    assert expected_headers(found, 0, 3, 128) is None
    assert set(rules_of(headers, found)) == {"ALIGN-2"}


@pytest.mark.parametrize("alignment", [64, 4096])
@pytest.mark.parametrize("offset", [0, 1000, 0x06054B50 - 64 * 3, GIB_4 - 500, GIB_4 + 64])
@pytest.mark.parametrize("name", ["w", "ü"])
def test_small_entries_are_written_as_one_by_one(alignment: int, offset: int, name: str) -> None:
    contents = [bytes([index]) * size for index, size in enumerate((64, 0, 1, 100, 16, 192, 64))]
    names = [f"{name}{index}" for index in range(len(contents))]
    written = []
    for is_together in (False, True):
        target = io.BytesIO()
        writer = ZipWriter(target, alignment=alignment, offset=offset)
        if is_together:
            writer.add_small(names, list(map(crc32, contents)), contents)
        else:
            for each, content in zip(names, contents, strict=True):
                writer.add(each, content)
        writer.add("__MODEL_PROTO", b"model")
        writer.finish()
        written.append((target.getvalue(), writer.names, writer.header_offsets))
    assert written[0] == written[1]


def test_an_end_that_holds_a_signature_is_left_to_the_plain_way() -> None:
    at = int.from_bytes(b"PK\5\6", "little")
    contents = [bytes(at % 64), b"1"]
    begin = at // 64 * 64 - 64
    assert pack_entries(["w0"], [0], contents[:1], begin, 64) is None
    assert pack_entries(["w0"], [0], contents[1:], begin, 64) is not None
