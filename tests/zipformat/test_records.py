"""Every record of a zip file against bytes written by hand from APPNOTE 6.3.10."""

from __future__ import annotations

import struct
from typing import Protocol, TypeAlias

import pytest
from hypothesis import given, strategies as st
from outcomes import count_outcome, requires_outcomes

from onnxarchive.zipformat import records
from onnxarchive.zipformat.records import (
    DirectoryRecord,
    EndRecord,
    LocalHeader,
    Zip64EndRecord,
    Zip64Locator,
)

Record: TypeAlias = LocalHeader | DirectoryRecord | Zip64EndRecord | Zip64Locator | EndRecord


class Unpack(Protocol):
    """The classmethod `unpack` of a record."""

    def __call__(self, buffer: bytes, offset: int = 0) -> Record | None: ...


UNPACK: dict[type[Record], Unpack] = {
    LocalHeader: LocalHeader.unpack,
    DirectoryRecord: DirectoryRecord.unpack,
    Zip64EndRecord: Zip64EndRecord.unpack,
    Zip64Locator: Zip64Locator.unpack,
    EndRecord: EndRecord.unpack,
}

UINT16 = st.integers(0, records.UINT16_MAX)
UINT32 = st.integers(0, records.UINT32_MAX)
UINT64 = st.integers(0, (1 << 64) - 1)
TAIL = st.binary(max_size=40)

LOCAL_HEADERS = st.builds(
    LocalHeader, *[UINT16] * 5, *[UINT32] * 3, name=TAIL | st.binary(max_size=300), extra=TAIL
)
DIRECTORY_RECORDS = st.builds(
    DirectoryRecord, *[UINT16] * 6, *[UINT32] * 3, *[UINT16] * 2, *[UINT32] * 2, TAIL, TAIL, TAIL
)
ZIP64_END_RECORDS = st.builds(Zip64EndRecord, UINT64, *[UINT16] * 2, *[UINT32] * 2, *[UINT64] * 4)
ZIP64_LOCATORS = st.builds(Zip64Locator, UINT32, UINT64, UINT32)
END_RECORDS = st.builds(EndRecord, *[UINT16] * 4, *[UINT32] * 2, UINT16)
RECORDS = st.one_of(
    LOCAL_HEADERS, DIRECTORY_RECORDS, ZIP64_END_RECORDS, ZIP64_LOCATORS, END_RECORDS
)

# No two fields have the same value, so that no two can be mistaken for each other.
GOLDENS: dict[str, tuple[Record, bytes]] = {
    "local header (4.3.7)": (
        LocalHeader(
            version_needed=0x0102,
            flags=0x0304,
            method=0x0506,
            time=0x0708,
            date=0x090A,
            crc32=0x0B0C0D0E,
            compressed_size=0x0F101112,
            uncompressed_size=0x13141516,
            name=b"name",
            extra=b"extra",
        ),
        bytes.fromhex(
            "50 4b 03 04"  # local file header signature
            "02 01"  # version needed to extract
            "04 03"  # general purpose bit flag
            "06 05"  # compression method
            "08 07"  # last mod file time
            "0a 09"  # last mod file date
            "0e 0d 0c 0b"  # crc-32
            "12 11 10 0f"  # compressed size
            "16 15 14 13"  # uncompressed size
            "04 00"  # file name length
            "05 00"  # extra field length
            "6e 61 6d 65"  # file name
            "65 78 74 72 61"  # extra field
        ),
    ),
    "directory record (4.3.12)": (
        DirectoryRecord(
            version_made_by=0x0102,
            version_needed=0x0304,
            flags=0x0506,
            method=0x0708,
            time=0x090A,
            date=0x0B0C,
            crc32=0x0D0E0F10,
            compressed_size=0x11121314,
            uncompressed_size=0x15161718,
            disk_start=0x191A,
            internal_attributes=0x1B1C,
            external_attributes=0x1D1E1F20,
            header_offset=0x21222324,
            name=b"name",
            extra=b"extra",
            comment=b"remark",
        ),
        bytes.fromhex(
            "50 4b 01 02"  # central file header signature
            "02 01"  # version made by
            "04 03"  # version needed to extract
            "06 05"  # general purpose bit flag
            "08 07"  # compression method
            "0a 09"  # last mod file time
            "0c 0b"  # last mod file date
            "10 0f 0e 0d"  # crc-32
            "14 13 12 11"  # compressed size
            "18 17 16 15"  # uncompressed size
            "04 00"  # file name length
            "05 00"  # extra field length
            "06 00"  # file comment length
            "1a 19"  # disk number start
            "1c 1b"  # internal file attributes
            "20 1f 1e 1d"  # external file attributes
            "24 23 22 21"  # relative offset of local header
            "6e 61 6d 65"  # file name
            "65 78 74 72 61"  # extra field
            "72 65 6d 61 72 6b"  # file comment
        ),
    ),
    "Zip64 end record (4.3.14)": (
        Zip64EndRecord(
            stated_size=0x0102030405060708,
            version_made_by=0x090A,
            version_needed=0x0B0C,
            disk=0x0D0E0F10,
            directory_disk=0x11121314,
            disk_entry_count=0x15161718191A1B1C,
            entry_count=0x1D1E1F2021222324,
            directory_size=0x25262728292A2B2C,
            directory_offset=0x2D2E2F3031323334,
        ),
        bytes.fromhex(
            "50 4b 06 06"  # zip64 end of central dir signature
            "08 07 06 05 04 03 02 01"  # size of zip64 end of central directory record
            "0a 09"  # version made by
            "0c 0b"  # version needed to extract
            "10 0f 0e 0d"  # number of this disk
            "14 13 12 11"  # number of the disk with the start of the central directory
            "1c 1b 1a 19 18 17 16 15"  # entries in the central directory on this disk
            "24 23 22 21 20 1f 1e 1d"  # entries in the central directory
            "2c 2b 2a 29 28 27 26 25"  # size of the central directory
            "34 33 32 31 30 2f 2e 2d"  # offset of start of central directory
        ),
    ),
    "Zip64 locator (4.3.15)": (
        Zip64Locator(record_disk=0x01020304, record_offset=0x05060708090A0B0C, disks=0x0D0E0F10),
        bytes.fromhex(
            "50 4b 06 07"  # zip64 end of central dir locator signature
            "04 03 02 01"  # number of the disk with the zip64 end of central directory
            "0c 0b 0a 09 08 07 06 05"  # relative offset of the zip64 end record
            "10 0f 0e 0d"  # total number of disks
        ),
    ),
    "end record (4.3.16)": (
        EndRecord(
            disk=0x0102,
            directory_disk=0x0304,
            disk_entry_count=0x0506,
            entry_count=0x0708,
            directory_size=0x090A0B0C,
            directory_offset=0x0D0E0F10,
            comment_size=0x1112,
        ),
        bytes.fromhex(
            "50 4b 05 06"  # end of central dir signature
            "02 01"  # number of this disk
            "04 03"  # number of the disk with the start of the central directory
            "06 05"  # entries in the central directory on this disk
            "08 07"  # entries in the central directory
            "0c 0b 0a 09"  # size of the central directory
            "10 0f 0e 0d"  # offset of start of central directory
            "12 11"  # .ZIP file comment length
        ),
    ),
}

golden = pytest.mark.parametrize(("record", "packed"), GOLDENS.values(), ids=list(GOLDENS))


@golden
def test_a_record_is_packed_to_the_bytes_of_appnote_and_unpacked_from_amid_others(
    record: Record, packed: bytes
) -> None:
    assert record.pack() == packed
    assert UNPACK[type(record)](packed) == record
    assert UNPACK[type(record)](b"PK" + packed + b"PK", 2) == record


@pytest.mark.parametrize("kind", UNPACK)
def test_a_record_with_nothing_after_its_fixed_part_is_a_record(kind: type[Record]) -> None:
    packed = kind.SIGNATURE + bytes(kind.SIZE - 4)
    record = UNPACK[kind](packed)
    assert record is not None
    assert record.pack() == packed
    assert UNPACK[kind](packed[:-1]) is None


@golden
def test_a_truncated_record_and_one_with_another_signature_is_none(
    record: Record, packed: bytes
) -> None:
    unpack = UNPACK[type(record)]
    for size in range(len(packed)):
        assert unpack(packed[:size]) is None
        assert unpack(b"before" + packed[:size], len(b"before")) is None
    for position in range(4):
        changed = bytearray(packed)
        changed[position] ^= 1
        assert unpack(bytes(changed)) is None
        assert unpack(packed, position + 1) is None


@golden
def test_a_record_is_of_one_kind_and_cannot_be_changed(record: Record, packed: bytes) -> None:
    long_enough = packed + bytes(64)
    taken = [kind for kind, unpack in UNPACK.items() if unpack(long_enough) is not None]
    assert taken == [type(record)]
    with pytest.raises(AttributeError):
        setattr(record, record._fields[0], 0)


@given(RECORDS, TAIL, TAIL)
def test_unpack_is_the_inverse_of_pack(record: Record, before: bytes, after: bytes) -> None:
    packed = record.pack()
    assert UNPACK[type(record)](before + packed + after, len(before)) == record
    assert not isinstance(record, DirectoryRecord) or record.packed_size == len(packed)


PACKED = RECORDS.map(lambda record: record.pack()[len(record.SIGNATURE) :])


@requires_outcomes(unpacked=50, refused=50)
@given(TAIL, st.binary(max_size=120) | PACKED)
def test_whatever_is_unpacked_packs_to_the_same_bytes(before: bytes, after: bytes) -> None:
    for kind, unpack in UNPACK.items():
        signed = kind.SIGNATURE + after
        record = unpack(before + signed, len(before))
        count_outcome("refused" if record is None else "unpacked")
        if record is not None:
            assert signed.startswith(record.pack())


def test_the_sizes_of_the_records_are_those_of_appnote() -> None:
    assert [kind.SIZE for kind in UNPACK] == [30, 46, 56, 20, 22]
    # 4.3.14.1: "should be the size of the remaining record": without 12 bytes before it.
    assert Zip64EndRecord.STATED_SIZE == 44


def test_the_flags_and_attributes_are_those_of_appnote() -> None:
    assert records.FLAG_ENCRYPTED == 0x0001
    assert records.FLAG_DATA_DESCRIPTOR == 0x0008
    assert records.FLAG_STRONG_ENCRYPTION == 0x0040
    assert records.FLAG_UTF8 == 0x0800
    assert records.FLAG_MASKED_HEADER == 0x2000
    assert records.REGULAR_FILE_ATTRIBUTES == 0o100644 << 16


@pytest.mark.parametrize("kind", [Zip64EndRecord, Zip64Locator, EndRecord])
def test_an_end_record_at_a_negative_position_is_none(kind: type[Record]) -> None:
    # What stands at the end of a file shorter than its end records has a negative position, which
    # struct would count from the end.
    packed = next(packed for record, packed in GOLDENS.values() if isinstance(record, kind))
    assert UNPACK[kind](packed, -len(packed)) is None
    assert UNPACK[kind](packed, -1) is None


def test_a_number_that_does_not_fit_its_field_is_an_error_and_not_cut_off() -> None:
    fitting, _ = GOLDENS["end record (4.3.16)"]
    assert isinstance(fitting, EndRecord)
    with pytest.raises(struct.error):
        fitting._replace(entry_count=records.UINT16_MAX + 1).pack()
    with pytest.raises(struct.error):
        fitting._replace(directory_offset=records.UINT32_MAX + 1).pack()


# Extra fields (4.5)


def test_an_extra_field_is_id_size_and_data() -> None:
    # header id, data size, data
    assert records.pack_extra(0xD935, b"data") == bytes.fromhex("35d9 0400 64617461")
    assert list(records.unpack_extra(bytes.fromhex("feca 0000"))) == [(0xCAFE, b"")]


@given(st.lists(st.tuples(UINT16, TAIL), max_size=5))
def test_extra_fields_are_unpacked_in_their_order(fields: list[tuple[int, bytes]]) -> None:
    extra = b"".join(records.pack_extra(identifier, data) for identifier, data in fields)
    assert list(records.unpack_extra(extra)) == fields


@pytest.mark.parametrize(
    ("end", "problem"),
    [
        *((bytes(stray), f"{stray} stray bytes") for stray in (1, 2, 3)),
        *(
            (
                struct.pack("<HH", 0x0102, stated) + b"five!",
                f"0x0102 with the stated size {stated} and the actual size 5",
            )
            for stated in (6, 0xFFFF)
        ),
    ],
)
def test_bytes_that_are_no_whole_extra_field_are_an_error(end: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        list(records.unpack_extra(records.pack_extra(1, b"whole") + end))


EXTRA_FIELDS = st.builds(records.pack_extra, st.integers(0, 0xFFFF), st.binary(max_size=8))


@requires_outcomes(unpacked=10, refused=10)
@given(st.lists(EXTRA_FIELDS | st.binary(max_size=6), max_size=4).map(b"".join))
def test_extra_fields_are_either_an_error_or_packed_again_the_same(extra: bytes) -> None:
    try:
        fields = list(records.unpack_extra(extra))
    except ValueError:
        count_outcome("refused")
        return
    count_outcome("unpacked")
    assert b"".join(records.pack_extra(*field) for field in fields) == extra


def test_an_extra_field_longer_than_its_size_can_state_is_an_error() -> None:
    assert len(records.pack_extra(1, bytes(0xFFFF))) == 4 + 0xFFFF
    with pytest.raises(struct.error):
        records.pack_extra(1, bytes(0x10000))


def test_the_zip64_field_holds_its_values_in_eight_bytes_each_and_is_not_written_without() -> None:
    assert records.pack_zip64_extra(0x0102030405060708, 0x090A0B0C0D0E0F10) == bytes.fromhex(
        "0100 1000 0807060504030201 100f0e0d0c0b0a09"  # id, size and values
    )
    assert records.pack_zip64_extra() == b""


@given(st.lists(UINT64, min_size=1, max_size=4))
def test_zip64_values_are_unpacked_as_they_were_packed(values: list[int]) -> None:
    ((identifier, data),) = records.unpack_extra(records.pack_zip64_extra(*values))
    assert identifier == records.ZIP64_EXTRA
    assert records.unpack_zip64_values(data) == tuple(values)


def test_zip64_values_of_a_broken_length_are_none_and_of_no_bytes_no_values() -> None:
    assert records.unpack_zip64_values(b"") == ()
    for size in (1, 7, 9, 15, 17, 23, 25):
        assert records.unpack_zip64_values(bytes(size)) is None


def test_the_alignment_field_is_the_alignment_and_zero_bytes() -> None:
    # id of zipalign's field, size, alignment, padding
    assert records.pack_alignment_extra(0x4000, 3) == bytes.fromhex("35d9 0500 0040 000000")
    assert len(records.pack_alignment_extra(64, 0)) == records.ALIGNMENT_EXTRA_SIZE


@given(UINT16, st.integers(0, 0xFFFF - 2))
def test_alignment_and_padding_are_unpacked_as_they_were_packed(
    alignment: int, padding: int
) -> None:
    ((identifier, data),) = records.unpack_extra(records.pack_alignment_extra(alignment, padding))
    assert identifier == records.ALIGNMENT_EXTRA
    assert records.unpack_alignment(data) == (alignment, bytes(padding))


def test_an_alignment_field_may_hold_any_padding_but_needs_an_alignment() -> None:
    assert records.unpack_alignment(b"\x40\x00\x00\x07") == (64, b"\x00\x07")
    assert records.unpack_alignment(b"\x40") is records.unpack_alignment(b"") is None
