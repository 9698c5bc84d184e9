"""Usual records and headers, which take a fast path: each of thousands of changes is found."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from findings import Findings
from zip_image import Image, in_both

from onnxarchive.errors import Strict
from onnxarchive.zipformat import directory, local_header, records
from onnxarchive.zipformat.directory import Directory
from onnxarchive.zipformat.end_records import Bounds
from onnxarchive.zipformat.local_header import check_local_header
from onnxarchive.zipformat.records import DirectoryRecord, LocalHeader

GIB_4 = 1 << 32
# Numbers that fields are set to: what rules name, and its neighbours.
NUMBERS = (
    *(0, 1, 8, 10, 20, 45, 46, 63, 64, 128, 0x300, 0x800, 0xFFFE, 0xFFFF),
    *(0x10000, 0x81A40000, GIB_4 - 2, GIB_4 - 1),
)


def image_of(alignment: int = 64) -> Image:
    """An archive of entries with and without data."""
    sizes = enumerate((100, 0, 64, 7, 200, 1))
    entries = [(f"layer.{index}.weight", size) for index, size in sizes]
    return Image.of([*entries, ("__MODEL_PROTO", 5)], alignment=alignment)


def directory_of(image: Image) -> tuple[bytes, Bounds]:
    data = b"".join(record.pack() for record in image.records)
    return data, Bounds(image.directory_offset, len(data), len(image.records))


def beyond_4_gib() -> Image:
    """An archive in whose directory the offsets of the last headers are in Zip64 fields."""
    return Image.of([("w0", GIB_4 - 200), ("w1", 10), ("w2", 90), ("w3", 0), ("model", 20)])


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


@pytest.mark.parametrize("base", [image_of, beyond_4_gib])
def test_a_changed_directory_is_read_as_without_the_fast_path_for_usual_records(
    base: Callable[[], Image], monkeypatch: pytest.MonkeyPatch
) -> None:
    data, bounds = directory_of(base())
    changes = [*with_changed_bytes(data), *with_changed_records(data, bounds)]
    found = []
    for usual_item in (directory._usual_item, lambda data, position: None):
        monkeypatch.setattr(directory, "_usual_item", usual_item)
        findings = [Findings() for _ in changes]
        read = [
            directory.read_directory(changed, bounds._replace(size=len(changed)), report)
            for changed, report in zip(changes, findings, strict=True)
        ]
        found.append((read, [it.pairs for it in findings]))
    assert found[0] == found[1]
    assert len(changes) > 3500
    assert sum(not pairs for pairs in found[0][1]) > 1000


def test_records_beyond_4_gib_take_the_fast_path_for_usual_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    image = Image.of([(f"w{index}", GIB_4 - 200) for index in range(9)])
    data, bounds = directory_of(image)
    expected = directory.read_directory(data, bounds, Strict())
    assert expected.entries[-1].header_offset > GIB_4
    monkeypatch.setattr(directory, "_check_record", None)
    assert directory.read_directory(data, bounds, Strict()) == expected


def headers_of(image: Image) -> list[bytes]:
    return [header.pack() for header in image.headers]


def rules_of(headers: list[bytes], found: Directory) -> list[str]:
    """The rules that local headers break, by the fast path and by all checks, which must agree."""
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


@pytest.mark.sweep
@pytest.mark.parametrize("alignment", [64, 128])
def test_a_changed_byte_of_a_local_header_breaks_a_rule(alignment: int) -> None:
    image = image_of(alignment)
    found = directory.read_directory(*directory_of(image), Strict())
    headers = headers_of(image)
    assert rules_of(headers, found) == []
    tried = 0
    for index, header in enumerate(headers):
        for changed in with_changed_bytes(header[:200]):
            tried += 1
            others = [*headers[:index], changed + header[200:], *headers[index + 1 :]]
            assert rules_of(others, found)
    assert tried > 4000


@pytest.mark.parametrize("alignment", [64, 128])
def test_headers_that_change_with_their_records_are_compared_as_without_the_fast_path(
    alignment: int,
) -> None:
    tried = right = 0
    for index, record in enumerate(image_of(alignment).records):
        for name, value in with_changed_field(record):
            image = image_of(alignment)
            try:
                image.change_record(index, **{name: value})
                if name in {*LocalHeader._fields} - {"extra"}:
                    image.change_header(index, **{name: value})
                found = directory.read_directory(*directory_of(image), Findings())
                headers = headers_of(image)
            except struct.error:
                continue
            if len(found.entries) == len(headers):
                tried += 1
                right += not rules_of(headers, found)
    assert tried > 500
    assert right > 300


def require(image: Image, in_directory: list[str], in_headers: list[str]) -> Directory:
    """Requires the rules that the directory and the local headers break."""
    findings = Findings()
    found = directory.read_directory(*directory_of(image), findings)
    assert findings.rules == in_directory
    assert rules_of(headers_of(image), found) == in_headers
    return found


def three(size: int = 10, name: str = "w", alignment: int = 64) -> Image:
    return Image.of([(f"{index}{name}", size) for index in range(3)], alignment=alignment)


@pytest.mark.parametrize("alignment", [64, 128])
def test_a_name_that_is_not_utf_8_is_compared_with_the_directory(alignment: int) -> None:
    image = three(name="w" * 42, alignment=alignment)
    in_both(1, name=b"\xc3" * 43)(image)
    found = require(image, ["NAME-1", "ZIP-9"], [])
    assert found.entries[1].name == r"\xc3" * 43


@pytest.mark.parametrize("has_padding", [True, False])
@pytest.mark.parametrize("alignment", [64, 128])
def test_a_padding_that_is_a_whole_unit_too_long_is_refused(
    alignment: int, has_padding: bool
) -> None:
    length = 5 if has_padding else alignment - LocalHeader.SIZE - records.ALIGNMENT_EXTRA_SIZE
    image = three(alignment, "w" * (length - 1), alignment)
    content = image.headers[1].extra[records.EXTRA_HEADER_SIZE :] + bytes(alignment)
    image.change_header(1, extra=records.pack_extra(records.ALIGNMENT_EXTRA, content))
    image.move_from(2, alignment)
    require(image, [], ["ALIGN-3"])


@pytest.mark.parametrize("alignment", [64, 128])
def test_an_entry_that_lacks_its_zip64_field_is_refused(alignment: int) -> None:
    image = three(GIB_4, alignment=alignment)
    # The Zip64 field's bytes become padding: right for entries that need none.
    padding = len(image.headers[0].extra) - records.ALIGNMENT_EXTRA_SIZE
    image.change_header(0, extra=records.pack_alignment_extra(alignment, padding))
    require(image, [], ["ZIP-14"])


def test_data_at_another_alignment_is_refused() -> None:
    image = three(alignment=128)
    extra = image.headers[1].extra
    padding = (len(extra) - records.ALIGNMENT_EXTRA_SIZE - 64) % 128
    image.change_header(1, extra=records.pack_alignment_extra(128, padding))
    image.move_from(2, padding + records.ALIGNMENT_EXTRA_SIZE - len(extra))
    require(image, [], ["ALIGN-2", "ALIGN-2"])
