"""The writer: its bytes, its targets, and its refusals."""

from __future__ import annotations

import errno
import io
import itertools
import os
import zipfile
import zlib
from collections.abc import Iterator
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, strategies as st
from written import Target
from zip_entries import add_bytes
from zip_image import directory_of

from onnxarchive.errors import ArchiveFormatError, ChecksumError, Strict, UnsupportedFeatureError
from onnxarchive.files.data import PIECE_SIZE, Buffer, Bytes, SupportsWrite, crc32, pieces
from onnxarchive.zipformat import directory, layout, writer
from onnxarchive.zipformat.end_records import TAIL_SIZE, locate
from onnxarchive.zipformat.layout import EntryLayout
from onnxarchive.zipformat.writer import ZipWriter

Entries = list[tuple[str, bytes]]

ENTRIES: Entries = [
    ("w", b"abc"),
    ("empty", b""),
    ("a_longer_name_that_shifts_the_data", bytes(range(256)) * 5),
    ("assets/größe.txt", "größe".encode()),
    ("__MODEL_PROTO", b"\x08\x0a"),
]


def write_all(target: SupportsWrite, entries: Entries, alignment: int = 64) -> list[int]:
    """Writes an archive; gives the offsets of its data and then its size."""
    zip_writer = ZipWriter(target, alignment=alignment)
    offsets = [add_bytes(zip_writer, name, data).data_offset for name, data in entries]
    return [*offsets, zip_writer.finish()]


def written(entries: Entries) -> bytes:
    target = io.BytesIO()
    write_all(target, entries)
    return target.getvalue()


def by_zipfile(archive: bytes) -> Entries:
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        assert opened.testzip() is None
        return [(info.filename, opened.read(info)) for info in opened.infolist()]


# Written bytes


def test_an_archive_without_entries_is_an_end_record() -> None:
    assert written([]) == b"PK\x05\x06" + bytes(18)


def test_zipfile_reads_what_was_written() -> None:
    assert by_zipfile(written(ENTRIES)) == ENTRIES


@pytest.mark.parametrize("alignment", [64 << shift for shift in range(10)])
def test_every_entry_is_where_its_layout_says_with_nothing_between(alignment: int) -> None:
    target = io.BytesIO()
    zip_writer = ZipWriter(target, alignment=alignment)
    placements = [add_bytes(zip_writer, name, data) for name, data in ENTRIES]
    size = zip_writer.finish()
    archive = target.getvalue()
    assert size == len(archive)
    assert zip_writer.names == [name for name, _ in ENTRIES]
    offset = 0
    for placement, (name, data) in zip(placements, ENTRIES, strict=True):
        assert placement == EntryLayout(name.encode(), len(data), crc32(data), offset, alignment)
        assert placement.data_offset % alignment == 0
        assert archive[placement.data_offset : placement.end] == data
        assert archive[offset:].startswith(b"PK\x03\x04")
        offset = placement.end
    assert list(zip_writer.header_offsets) == [placement.header_offset for placement in placements]
    assert archive[offset:].startswith(b"PK\x01\x02")


@pytest.mark.parametrize("count", range(len(ENTRIES) + 1))
def test_existing_entries_are_listed_and_not_written(count: int) -> None:
    whole = written(ENTRIES)
    before = ZipWriter(io.BytesIO())
    placements = [add_bytes(before, name, data) for name, data in ENTRIES[:count]]
    offset = placements[-1].end if placements else 0
    target = io.BytesIO()
    zip_writer = ZipWriter(target, existing=directory_of(placements), offset=offset)
    for name, data in ENTRIES[count:]:
        add_bytes(zip_writer, name, data)
    assert zip_writer.finish() == len(whole)
    assert target.getvalue() == whole[offset:]


def test_a_false_end_record_in_an_existing_entry_is_reported_with_its_name() -> None:
    data = b"PK\5\6" + bytes(18)
    one = EntryLayout(b"zip", len(data), crc32(data), 0)
    before = one.pack()[0] + data
    existing = directory_of([one])
    zip_writer = ZipWriter(io.BytesIO(), existing=existing, offset=one.end, before=before)
    add_bytes(zip_writer, "w", b"abc")
    with pytest.raises(ArchiveFormatError) as caught:
        zip_writer.finish()
    assert (caught.value.rule, caught.value.entry) == ("ZIP-16", "zip")


@pytest.mark.parametrize("count", [0xFFFE, 0xFFFF])
def test_existing_entries_count_towards_the_limits(count: int) -> None:
    target = io.BytesIO()
    one = EntryLayout(b"one", 0, 0, 0)
    zip_writer = ZipWriter(target, existing=directory_of([one] * (count - 1)))
    add_bytes(zip_writer, "last", b"")
    zip_writer.finish()
    assert (target.getvalue()[-98:-94] == b"PK\x06\x06") == (count > 0xFFFE)
    with pytest.raises(UnsupportedFeatureError, match="at most"):
        add_bytes(ZipWriter(target, existing=directory_of([one] * layout.MAX_ENTRIES)), "more", b"")


@pytest.mark.large
@pytest.mark.parametrize("count", [0xFFFE, 0xFFFF, 0x10000])
def test_more_entries_than_16_bits_can_count_are_read_back(count: int) -> None:
    entries = [(f"k{index}", b"x" * (index % 3)) for index in range(count)]
    archive = written(entries)
    assert (archive[-98:-94] == b"PK\x06\x06") == (count > 0xFFFE)
    assert read_back(archive) == entries
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        assert opened.namelist() == [name for name, _ in entries]
        for name, data in (entries[0], entries[1], entries[-1]):
            assert opened.read(name) == data


def read_back(archive: bytes) -> Entries:
    """The entries that the library reads."""
    bounds = locate(archive[-TAIL_SIZE:], len(archive), Strict())
    assert bounds is not None
    data = archive[bounds.offset : bounds.offset + bounds.size]
    entries = directory.read_directory(data, bounds, Strict()).entries
    return [
        (entry.name, archive[entry.data_offset : entry.data_offset + entry.nbytes])
        for entry in entries
    ]


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=5))
def test_the_pieces_of_a_stream_do_not_change_the_archive(data: bytes, cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    parts = [data[start:end] for start, end in itertools.pairwise(bounds)]
    target = io.BytesIO()
    zip_writer = ZipWriter(target)
    zip_writer.add("key", len(data), zlib.crc32(data), parts)
    zip_writer.finish()
    assert target.getvalue() == written([("key", data)])


@pytest.mark.parametrize("alignment", [0, 1, 32, 63, 65, 96, 1 << 16, -64])
def test_an_alignment_that_is_not_allowed_is_refused(alignment: int) -> None:
    target = io.BytesIO()
    with pytest.raises(ValueError, match=f"power of two from 64 to 32768, got {alignment}"):
        ZipWriter(target, alignment=alignment)
    assert target.getvalue() == b""


# Targets


@given(
    st.sampled_from([[None], [1 << 30]]) | st.lists(st.integers(1, 100), min_size=1, max_size=20)
)
def test_a_target_needs_nothing_but_write_and_may_take_fewer_bytes(
    limits: list[int | None],
) -> None:
    target = Target(limits)
    sizes = write_all(target, ENTRIES)
    assert bytes(target.content) == written(ENTRIES)
    assert sizes[-1] == len(target.content)


@pytest.mark.skipif(not hasattr(os, "set_blocking"), reason="no pipes that would block")
def test_a_target_that_would_block_is_an_error_and_not_a_gap() -> None:
    receiving, sending = os.pipe()
    os.set_blocking(sending, False)
    with open(receiving, "rb") as received:
        with open(sending, "wb", buffering=0) as pipe, pytest.raises(BlockingIOError) as caught:
            add_bytes(ZipWriter(pipe), "key", bytes(1 << 22))
        taken = received.read()
    assert caught.value.errno == errno.EAGAIN
    assert caught.value.characters_written <= len(taken)
    assert taken == written([("key", bytes(1 << 22))])[: len(taken)]


def test_a_target_gets_views_of_limited_size_that_it_may_keep() -> None:
    target = Mock()
    target.write.return_value = None
    entries = [(f"w{index}", bytes([index]) * (1 << 14)) for index in range(200)]
    entries.append(("large", bytes(PIECE_SIZE + 1)))
    write_all(target, entries)
    views = [call.args[0] for call in target.write.call_args_list]
    assert max(map(len, views)) == PIECE_SIZE
    assert b"".join(views) == written(entries)


# Buffers


@pytest.mark.parametrize(
    "buffer",
    [
        bytearray(b"abc"),
        memoryview(b"abcdef")[1:5],
        np.arange(24, dtype=np.float32).reshape(2, 3, 4).data,
        *(np.zeros(shape, np.float32).data for shape in ((0,), (0, 3), (2, 0, 5))),
    ],
)
def test_buffers_of_every_kind_and_shape_are_taken_as_their_bytes(buffer: Buffer) -> None:
    target = io.BytesIO()
    zip_writer = ZipWriter(target)
    add_bytes(zip_writer, "key", buffer)
    zip_writer.finish()
    assert target.getvalue() == written([("key", bytes(buffer))])


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_large_buffers_are_handed_over_in_pieces_that_are_no_copies(extra: int) -> None:
    data = np.zeros(2 * PIECE_SIZE + extra, np.uint8)
    found = list(pieces(data.data))
    assert sum(len(piece) for piece in found) == len(data)
    assert len(found) == (3 if extra > 0 else 2)
    assert max(len(piece) for piece in found) == PIECE_SIZE
    data[-1] = 7
    assert found[-1][-1] == 7
    assert list(pieces(b"")) == []


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_the_crc32_is_that_of_zlib_and_can_be_continued(first: bytes, second: bytes) -> None:
    assert crc32(first) == zlib.crc32(first)
    assert crc32(second, crc32(first)) == zlib.crc32(first + second)


# Refusals

STATED = b"stated bytes"
OTHER_STREAMS: dict[str, list[bytes]] = {
    "nothing": [],
    "pieces of nothing": [b"", b""],
    "a byte too few": [STATED[:-1]],
    "a piece too few": [STATED[:6]],
    "a byte too many": [STATED + b"!"],
    "a piece too many": [STATED, b"!"],
    "another byte": [b"Stated bytes"],
    "pieces in another order": [STATED[6:], STATED[:6]],
}


@pytest.mark.parametrize("stream", OTHER_STREAMS.values(), ids=list(OTHER_STREAMS))
def test_a_stream_of_another_size_or_crc32_than_stated_is_refused(stream: list[bytes]) -> None:
    zip_writer = ZipWriter(io.BytesIO())
    add_bytes(zip_writer, "first", b"1")
    with pytest.raises(ChecksumError, match="entry 'key': expected 12 bytes") as caught:
        zip_writer.add("key", len(STATED), zlib.crc32(STATED), stream)
    assert caught.value.entry == "key"
    assert zip_writer.names == ["first"]


def test_a_wrong_crc32_is_refused_also_for_no_bytes() -> None:
    with pytest.raises(ChecksumError, match="CRC-32 0x00000001, found 0 bytes with 0x00000000"):
        ZipWriter(io.BytesIO()).add("key", 0, 1, [])


def test_the_crc32_of_bytes_that_cannot_have_changed_is_not_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(writer, "crc32")
    target = io.BytesIO()
    zip_writer = ZipWriter(target)
    zip_writer.add("key", len(STATED), 7, [STATED], is_verified=True)
    zip_writer.finish()
    with zipfile.ZipFile(target) as opened:
        assert opened.getinfo("key").CRC == 7
    with pytest.raises(ChecksumError, match=r"expected 12 bytes .*, found 13 bytes"):
        zip_writer.add("other", len(STATED), 7, [STATED, b"!"], is_verified=True)


def test_only_bytes_objects_are_constant() -> None:
    data = bytes(range(100))
    assert Bytes(data).is_constant
    assert Bytes(memoryview(data)[1:].cast("b")).is_constant
    assert not Bytes(memoryview(bytearray(data)).toreadonly()).is_constant
    assert not Bytes(np.frombuffer(data, np.uint8).data).is_constant


def test_a_stream_without_end_is_left_when_it_is_too_long() -> None:
    def endless() -> Iterator[bytes]:
        yield STATED
        for _ in range(2):
            yield b"more"
        raise AssertionError("it was asked for more")

    target = io.BytesIO()
    with pytest.raises(ChecksumError):
        ZipWriter(target).add("key", len(STATED), zlib.crc32(STATED), endless())
    assert b"more" not in target.getvalue()  # nothing beyond the limit is written


def test_an_error_of_a_stream_is_raised_unchanged() -> None:
    def broken() -> Iterator[bytes]:
        yield STATED
        raise OSError(errno.EIO, "the source is gone")

    zip_writer = ZipWriter(io.BytesIO())
    with pytest.raises(OSError, match="the source is gone"):
        zip_writer.add("key", len(STATED), zlib.crc32(STATED), broken())
    assert zip_writer.names == []
