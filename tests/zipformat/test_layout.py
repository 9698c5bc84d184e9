"""Where things lie: alignment, padding and Zip64, each at its boundaries."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given, strategies as st
from zip_image import unpacked_header, unpacked_record

from onnxarchive.zipformat import layout, records
from onnxarchive.zipformat.layout import EntryLayout
from onnxarchive.zipformat.records import (
    DirectoryRecord,
    EndRecord,
    LocalHeader,
    Zip64EndRecord,
    Zip64Locator,
)

GIB_4 = 1 << 32
FITTING = GIB_4 - 2  # the largest number that 32 bits state; one more means "see Zip64"
SATURATED = GIB_4 - 1

ALIGNMENTS = [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768]


def around(*middles: int) -> st.SearchStrategy[int]:
    """Numbers near `middles`, none below 0."""
    near = [st.integers(max(0, middle - 3), middle + 3) for middle in middles]
    return st.one_of(*near, st.integers(0, 1 << 50))


SIZES = around(0, 64, 0xFFFF, GIB_4, 1 << 40)
OFFSETS = around(0, 64, 32768, GIB_4, 1 << 40)
NAMES = st.binary(min_size=1, max_size=1024) | st.text(min_size=1, max_size=40).map(
    lambda name: name.encode(errors="replace")
)
PLACEMENTS = st.builds(
    EntryLayout, NAMES, SIZES, st.integers(0, 0xFFFFFFFF), OFFSETS, st.sampled_from(ALIGNMENTS)
)


def test_an_alignment_is_a_power_of_two_from_64_to_32768() -> None:
    candidates = [*range(-70_000, 70_000), 1 << 17, 1 << 32, 1 << 64]
    accepted = []
    for value in candidates:
        with contextlib.suppress(ValueError):
            layout.require_alignment(value)
            accepted.append(value)
    assert accepted == ALIGNMENTS


def test_the_largest_number_of_16_and_of_32_bits_does_not_fit() -> None:
    assert [layout.fits_16(it) for it in (0, 0xFFFE, 0xFFFF, 0x10000)] == [True, True, False, False]
    fitting = [layout.fits_32(it) for it in (0, FITTING, SATURATED, GIB_4, 1 << 63)]
    assert fitting == [True, True, False, False, False]


# Zip64 fields of entries


@pytest.mark.parametrize(
    ("nbytes", "values"),
    [(0, ()), (FITTING, ()), (SATURATED, (SATURATED, SATURATED)), (GIB_4, (GIB_4, GIB_4))],
)
def test_a_local_header_has_both_sizes_in_a_zip64_field_where_they_do_not_fit(
    nbytes: int, values: tuple[int, ...]
) -> None:
    assert layout.local_zip64_values(nbytes) == values
    header = unpacked_header(EntryLayout(b"key", nbytes, 0, 0))
    stated = 0xFFFFFFFF if values else nbytes
    assert (header.compressed_size, header.uncompressed_size) == (stated, stated)
    assert header.version_needed == (45 if values else 10)
    identifiers = [identifier for identifier, _ in records.unpack_extra(header.extra)]
    assert identifiers == ([0x0001, 0xD935] if values else [0xD935])
    if values:
        assert header.extra.startswith(struct.pack("<HHQQ", 1, 16, nbytes, nbytes))


@pytest.mark.parametrize("header_offset", [0, FITTING, SATURATED, GIB_4])
@pytest.mark.parametrize("nbytes", [0, FITTING, SATURATED, GIB_4])
def test_a_directory_record_has_only_what_does_not_fit_in_a_zip64_field(
    nbytes: int, header_offset: int
) -> None:
    values: list[int] = []
    if nbytes > FITTING:
        values += [nbytes, nbytes]
    if header_offset > FITTING:
        values += [header_offset]
    assert layout.directory_zip64_values(nbytes, header_offset) == tuple(values)
    record = unpacked_record(EntryLayout(b"key", nbytes, 0, header_offset))
    assert record.compressed_size == record.uncompressed_size == min(nbytes, 0xFFFFFFFF)
    assert record.header_offset == min(header_offset, 0xFFFFFFFF)
    assert record.version_needed == (45 if values else 10)
    expected = struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values) if values else b""
    assert record.extra == expected


def test_an_offset_that_does_not_fit_leaves_the_local_header_without_a_zip64_field() -> None:
    header = unpacked_header(EntryLayout(b"key", 5, 0, GIB_4))
    assert [identifier for identifier, _ in records.unpack_extra(header.extra)] == [0xD935]
    # The two headers state the same version, though only the directory has the field.
    assert header.version_needed == 45


# Alignment


@given(PLACEMENTS)
def test_data_begins_at_the_first_multiple_of_the_alignment_after_its_header(
    placement: EntryLayout,
) -> None:
    assert placement.data_offset % placement.alignment == 0
    assert 0 <= placement.padding < placement.alignment
    assert placement.data_offset == placement.unpadded_offset + placement.padding
    # The multiple before it would lie in the header.
    assert placement.data_offset - placement.alignment < placement.unpadded_offset
    assert placement.end == placement.data_offset + placement.nbytes
    assert placement.header_offset + len(placement.pack()[0]) == placement.data_offset
    # 30 bytes, the name, the Zip64 field of 20 bytes where there is one, 6 of the alignment field.
    zip64_size = 20 if placement.nbytes > FITTING else 0
    least = placement.header_offset + 30 + len(placement.name) + zip64_size + 6
    assert placement.unpadded_offset == least
    *_, (identifier, data) = records.unpack_extra(unpacked_header(placement).extra)
    assert identifier == 0xD935
    assert data == struct.pack("<H", placement.alignment) + bytes(placement.padding)


@given(PLACEMENTS)
def test_both_headers_of_an_entry_state_the_same(placement: EntryLayout) -> None:
    header, record = unpacked_header(placement), unpacked_record(placement)
    for field in ("version_needed", "flags", "method", "time", "date", "crc32", "name"):
        assert getattr(header, field) == getattr(record, field), field
    assert header.compressed_size == record.compressed_size
    assert header.uncompressed_size == record.uncompressed_size
    assert LocalHeader.unpack(header.pack()) == header
    assert DirectoryRecord.unpack(record.pack()) == record


@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_every_residue_of_an_offset_gets_its_own_padding_and_none_a_whole_unit(
    alignment: int,
) -> None:
    paddings = [EntryLayout(b"k", 0, 0, offset, alignment).padding for offset in range(alignment)]
    assert sorted(paddings) == list(range(alignment))


def test_the_extra_fields_of_the_largest_local_header_can_be_stated() -> None:
    # All of the largest alignment's padding, beside a Zip64 field.
    unpadded = 30 + 1 + 20 + 6
    placement = EntryLayout(b"k", GIB_4, 0, (1 - unpadded) % 32768, 32768)
    assert placement.padding == 32767
    assert unpacked_header(placement).pack() == placement.pack()[0]


@pytest.mark.parametrize(
    ("name", "flags"),
    [("key", 0), ("assets/~", 0), ("assets/\x7f", 0), ("assets/\x80", 0x800), ("é", 0x800)],
)
def test_bit_11_is_set_exactly_for_a_name_that_is_not_ascii(name: str, flags: int) -> None:
    placement = EntryLayout(name.encode(), 1, 0, 0)
    assert unpacked_header(placement).flags == flags
    assert unpacked_record(placement).flags == flags


def test_fields_that_do_not_depend_on_the_entry_are_the_same_for_every_entry() -> None:
    record = unpacked_record(EntryLayout(b"key", 5, 0x01020304, 64))
    assert record == DirectoryRecord(
        version_made_by=3 << 8 | 45,  # Unix
        version_needed=10,
        flags=0,
        method=0,
        time=0,  # 00:00:00
        date=0 << 9 | 1 << 5 | 1,  # 1980-01-01
        crc32=0x01020304,
        compressed_size=5,
        uncompressed_size=5,
        disk_start=0,
        internal_attributes=0,
        external_attributes=0o100644 << 16,
        header_offset=64,
        name=b"key",
        extra=b"",
        comment=b"",
    )


# End records

# count, directory_size, directory_offset, and whether they need Zip64
ENDS = [
    (0, 0, 0, False),
    (0xFFFE, FITTING, FITTING, False),
    (0xFFFE, 1, 1, False),
    (0xFFFF, 1, 1, True),
    (0x10000, 1, 1, True),
    (1, FITTING, 1, False),
    (1, SATURATED, 1, True),
    (1, GIB_4, 1, True),
    (1, 1, FITTING, False),
    (1, 1, SATURATED, True),
    (1, 1, GIB_4, True),
    (0x10000, GIB_4, GIB_4, True),
]


@pytest.mark.parametrize(("count", "directory_size", "directory_offset", "zip64"), ENDS)
def test_the_zip64_end_records_are_there_exactly_where_a_value_does_not_fit(
    count: int, directory_size: int, directory_offset: int, zip64: bool
) -> None:
    assert layout.needs_zip64_end(count, directory_size, directory_offset) == zip64
    end = layout.end_of_archive(count, directory_size, directory_offset)
    assert len(end) == (56 + 20 + 22 if zip64 else 22)
    end_record = EndRecord.unpack(end, len(end) - 22)
    if not zip64:
        assert end_record == EndRecord(0, 0, count, count, directory_size, directory_offset, 0)
        return
    # All four values, also those that would fit: none is stated twice.
    assert end_record == EndRecord(0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    record_offset = directory_offset + directory_size
    assert Zip64Locator.unpack(end, 56) == Zip64Locator(0, record_offset, 1)
    assert Zip64EndRecord.unpack(end) == Zip64EndRecord(
        stated_size=44,
        version_made_by=3 << 8 | 45,
        version_needed=45,
        disk=0,
        directory_disk=0,
        disk_entry_count=count,
        entry_count=count,
        directory_size=directory_size,
        directory_offset=directory_offset,
    )
