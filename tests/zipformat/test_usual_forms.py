"""Usual records and headers, which are read at a glance: each of thousands of changes is seen."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from findings import Findings
from zip_image import Image

from onnxarchive.errors import Strict
from onnxarchive.zipformat import directory, local_header, records
from onnxarchive.zipformat.directory import Directory
from onnxarchive.zipformat.end_records import TAIL_SIZE, Bounds, locate
from onnxarchive.zipformat.local_header import check_local_header
from onnxarchive.zipformat.records import DirectoryRecord, LocalHeader
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
    bounds = locate(archive[-TAIL_SIZE:], len(archive), Strict())
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
    packed = directory.read_directory(data, bounds, Strict()).records
    for index, each in enumerate(packed):
        record = DirectoryRecord.unpack(each)
        assert record is not None
        for name, value in with_changed_field(record):
            try:
                changed = record._replace(**{name: value}).pack()
            except struct.error:
                continue
            yield b"".join([*packed[:index], changed, *packed[index + 1 :]])


@DIRECTORIES
def test_a_changed_directory_is_read_as_if_no_record_were_usual(
    base: Callable[[], tuple[bytes, Bounds]], monkeypatch: pytest.MonkeyPatch
) -> None:
    data, bounds = base()
    changes = [*with_changed_bytes(data), *with_changed_records(data, bounds)]
    found = []
    for begin in (directory._USUAL_BEGIN, None):
        monkeypatch.setattr(directory, "_USUAL_BEGIN", begin)
        findings = [Findings() for _ in changes]
        read = [
            directory.read_directory(changed, bounds._replace(size=len(changed)), report)
            for changed, report in zip(changes, findings, strict=True)
        ]
        found.append((read, [(it.rules, it.entries) for it in findings]))
    assert found[0] == found[1]
    assert len(changes) > 3500
    assert sum(not rules for rules, _ in found[0][1]) > 1000


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
def test_one_record_that_breaks_a_rule_is_found(broken: Callable[[], Image], rule: str) -> None:
    image = broken()
    data = b"".join(record.pack() for record in image.records)
    findings = Findings()
    directory.read_directory(data, Bounds(image.directory_offset, len(data), 3), findings)
    assert findings.rules[:1] == [rule]


def headers_of(archive: bytes, found: Directory) -> list[bytes]:
    return [archive[entry.header_offset : entry.data_offset] for entry in found.entries]


def rules_of(headers: list[bytes], found: Directory) -> list[str]:
    """The rules that local headers break; those that break none at a glance break none."""
    rules: list[str] = []
    for header, entry, packed in zip(headers, found.entries, found.records, strict=True):
        alone, plainly = Findings(), Findings()
        record = DirectoryRecord.unpack(packed)
        assert record is not None
        alignment = check_local_header(header, entry, packed, alone)
        assert alignment == local_header._compare(header, entry, record, plainly)
        assert alone.rules == plainly.rules
        rules += alone.rules
    return rules


@pytest.mark.parametrize("alignment", [64, 128])
def test_a_changed_byte_of_a_local_header_breaks_a_rule(alignment: int) -> None:
    archive = archive_of(alignment)
    found = directory.read_directory(*directory_of(archive), Strict())
    headers = headers_of(archive, found)
    assert rules_of(headers, found) == []
    tried = 0
    for index, header in enumerate(headers):
        for changed in with_changed_bytes(header[:200]):
            tried += 1
            others = [*headers[:index], changed + header[200:], *headers[index + 1 :]]
            assert rules_of(others, found)
    assert tried > 4000


@pytest.mark.parametrize("alignment", [64, 128])
def test_headers_that_change_with_their_records_are_compared_alike(alignment: int) -> None:
    archive = archive_of(alignment)
    data, bounds = directory_of(archive)
    sound = directory.read_directory(data, bounds, Strict())
    common = {*LocalHeader._fields} - {"extra"}
    tried = right = 0
    for index, packed in enumerate(sound.records):
        record = DirectoryRecord.unpack(packed)
        assert record is not None
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
            changed = b"".join([*sound.records[:index], changed, *sound.records[index + 1 :]])
            found = directory.read_directory(
                changed, bounds._replace(size=len(changed)), Findings()
            )
            if len(found.entries) == len(headers):
                tried += 1
                right += not rules_of(headers, found)
    assert tried > 500
    assert right > 300


# One entry of several


def found_in(image: Image) -> tuple[Directory, list[bytes], Findings]:
    file = image.file()
    findings = Findings()
    bounds = locate(file.read(file.size - TAIL_SIZE, TAIL_SIZE), file.size, Strict())
    assert bounds is not None
    found = directory.read_directory(file.read(bounds.offset, bounds.size), bounds, findings)
    headers = [
        file.read(entry.header_offset, entry.data_offset - entry.header_offset)
        for entry in found.entries
    ]
    return found, headers, findings


@pytest.mark.parametrize("alignment", [64, 128])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_name_that_is_not_utf_8_is_compared_with_the_directory(
    alignment: int, index: int
) -> None:
    image = Image.of([("w" * 43, 10), ("v" * 43, 10), ("u" * 43, 10)], alignment=alignment)
    image.change_record(index, name=b"\xc3" * 43)
    image.change_header(index, name=b"\xc3" * 43)
    found, headers, findings = found_in(image)
    assert findings.rules == ["NAME-1", "ZIP-9"]
    assert found.entries[index].name == r"\xc3" * 43
    assert rules_of(headers, found) == []


@pytest.mark.parametrize("has_padding", [True, False])
@pytest.mark.parametrize("alignment", [64, 128])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_padding_that_is_a_whole_unit_too_long_is_refused(
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
    assert rules_of(headers, found) == ["ALIGN-3"]


@pytest.mark.parametrize("alignment", [64, 128])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_an_entry_that_lacks_its_zip64_field_is_refused(alignment: int, index: int) -> None:
    sizes = [("w0", 10), ("w1", 10), ("w2", 10)]
    sizes[index] = (f"w{index}", GIB_4)
    image = Image.of(sizes, alignment=alignment)
    # The Zip64 field's bytes become padding: right for entries that need none.
    padding = len(image.headers[index].extra) - records.ALIGNMENT_EXTRA_SIZE
    image.change_header(index, extra=records.pack_alignment_extra(alignment, padding))
    found, headers, findings = found_in(image)
    assert findings.rules == []
    assert rules_of(headers, found) == ["ZIP-14"]


@pytest.mark.parametrize("index", [0, 1, 2])
def test_data_at_another_alignment_is_refused(index: int) -> None:
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
    assert set(rules_of(headers, found)) == {"ALIGN-2"}
