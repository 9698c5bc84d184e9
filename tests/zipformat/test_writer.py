"""The writer: its bytes, its targets, and its refusals."""

from __future__ import annotations

import errno
import io
import itertools
import os
import threading
import zipfile
import zlib
from collections.abc import Iterable, Iterator

import numpy as np
import pytest
from hypothesis import given, strategies as st
from zip_image import directory_of

from onnxarchive.errors import ChecksumError, Strict, UnsupportedFeatureError
from onnxarchive.files.data import PIECE_SIZE, Buffer, Stored, SupportsWrite, crc32, pieces
from onnxarchive.zipformat import directory, layout, writer
from onnxarchive.zipformat.end_records import TAIL_SIZE, locate
from onnxarchive.zipformat.layout import Placement
from onnxarchive.zipformat.writer import ZipWriter

Entries = list[tuple[str, bytes]]


ENTRIES: Entries = [
    ("w", b"abc"),
    ("empty", b""),
    ("a_longer_name_that_shifts_the_data", bytes(range(256)) * 5),
    ("assets/größe.txt", "größe".encode()),
    ("__MODEL_PROTO", b"\x08\x0a"),
]


class OnlyWrites:
    """Takes bytes and has nothing but `write`."""

    def __init__(self) -> None:
        self.content = bytearray()

    def write(self, data: memoryview, /) -> int:
        self.content += data
        return len(data)


class WritesSome:
    """Takes at most as many bytes as `sizes` says, call by call."""

    def __init__(self, sizes: Iterable[int]) -> None:
        self.content = bytearray()
        self._sizes = itertools.cycle(sizes)

    def write(self, data: memoryview, /) -> int:
        taken = data[: next(self._sizes)]
        self.content += taken
        return len(taken)


def write_all(target: SupportsWrite, entries: Entries, alignment: int = 64) -> list[int]:
    """Writes an archive; gives the offsets of its data and then its size."""
    zip_writer = ZipWriter(target, alignment=alignment)
    offsets = [zip_writer.add(name, data).data_offset for name, data in entries]
    return [*offsets, zip_writer.finish()]


def written(entries: Entries, alignment: int = 64) -> bytes:
    target = io.BytesIO()
    write_all(target, entries, alignment)
    return target.getvalue()


def by_zipfile(archive: bytes) -> Entries:
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        assert opened.testzip() is None
        return [(info.filename, opened.read(info)) for info in opened.infolist()]


# Written bytes


def test_an_archive_of_two_entries_is_these_bytes() -> None:
    assert written([("w", b"abc"), ("é", b"")]) == bytes.fromhex(
        # 0: local header of "w"
        "50 4b 03 04"  # signature
        "0a 00"  # version needed: 1.0
        "00 00"  # flags
        "00 00"  # method: stored
        "00 00"  # time: 00:00:00
        "21 00"  # date: 1980-01-01
        "c2 41 24 35"  # crc-32 of "abc"
        "03 00 00 00"  # compressed size
        "03 00 00 00"  # uncompressed size
        "01 00"  # name length
        "21 00"  # extra field length
        "77"  # w
        "35 d9"  # alignment field
        "1d 00"  # its size: 29
        "40 00"  # alignment: 64
        "00 00 00 00 00 00 00 00 00 00 00 00 00 00"  # padding: 27 bytes
        "00 00 00 00 00 00 00 00 00 00 00 00 00"
        # 64: its data
        "61 62 63"
        # 67: local header of "é"
        "50 4b 03 04"  # signature
        "0a 00"  # version needed: 1.0
        "00 08"  # flags: name in UTF-8
        "00 00"  # method: stored
        "00 00"  # time: 00:00:00
        "21 00"  # date: 1980-01-01
        "00 00 00 00"  # crc-32 of nothing
        "00 00 00 00"  # compressed size
        "00 00 00 00"  # uncompressed size
        "02 00"  # name length
        "1d 00"  # extra field length
        "c3 a9"  # é
        "35 d9"  # alignment field
        "19 00"  # its size: 25
        "40 00"  # alignment: 64
        "00 00 00 00 00 00 00 00 00 00 00 00"  # padding: 23 bytes
        "00 00 00 00 00 00 00 00 00 00 00"
        # 128: its data, of 0 bytes, and the directory; the record of "w"
        "50 4b 01 02"  # signature
        "2d 03"  # made by: Unix, 4.5
        "0a 00"  # version needed: 1.0
        "00 00"  # flags
        "00 00"  # method: stored
        "00 00"  # time
        "21 00"  # date
        "c2 41 24 35"  # crc-32
        "03 00 00 00"  # compressed size
        "03 00 00 00"  # uncompressed size
        "01 00"  # name length
        "00 00"  # extra field length
        "00 00"  # comment length
        "00 00"  # disk
        "00 00"  # internal attributes
        "00 00 a4 81"  # external attributes: regular file, rw-r--r--
        "00 00 00 00"  # offset of the local header
        "77"  # w
        # 175: the record of "é"
        "50 4b 01 02"  # signature
        "2d 03"  # made by: Unix, 4.5
        "0a 00"  # version needed: 1.0
        "00 08"  # flags: name in UTF-8
        "00 00"  # method: stored
        "00 00"  # time
        "21 00"  # date
        "00 00 00 00"  # crc-32
        "00 00 00 00"  # compressed size
        "00 00 00 00"  # uncompressed size
        "02 00"  # name length
        "00 00"  # extra field length
        "00 00"  # comment length
        "00 00"  # disk
        "00 00"  # internal attributes
        "00 00 a4 81"  # external attributes: regular file, rw-r--r--
        "43 00 00 00"  # offset of the local header: 67
        "c3 a9"  # é
        # 223: the end record
        "50 4b 05 06"  # signature
        "00 00"  # number of this disk
        "00 00"  # disk with the directory
        "02 00"  # entries on this disk
        "02 00"  # entries
        "5f 00 00 00"  # size of the directory: 95
        "80 00 00 00"  # offset of the directory: 128
        "00 00"  # comment length
    )


def test_an_archive_without_entries_is_an_end_record() -> None:
    assert written([]) == b"PK\x05\x06" + bytes(18)


def test_zipfile_reads_what_was_written() -> None:
    assert by_zipfile(written(ENTRIES)) == ENTRIES


@pytest.mark.parametrize("alignment", [64 << shift for shift in range(10)])
def test_every_entry_lies_where_its_placement_says(alignment: int) -> None:
    target = io.BytesIO()
    zip_writer = ZipWriter(target, alignment=alignment)
    placements = [zip_writer.add(name, data) for name, data in ENTRIES]
    size = zip_writer.finish()
    archive = target.getvalue()
    assert size == len(archive)
    assert zip_writer.names == [name for name, _ in ENTRIES]
    assert list(zip_writer.header_offsets) == [placement.header_offset for placement in placements]
    for placement, (name, data) in zip(placements, ENTRIES, strict=True):
        assert placement.name == name.encode()
        assert placement.data_offset % alignment == 0
        assert archive[placement.data_offset : placement.end] == data
        assert archive[placement.header_offset :].startswith(b"PK\x03\x04")


def test_nothing_lies_between_the_parts_of_an_archive() -> None:
    target = io.BytesIO()
    zip_writer = ZipWriter(target)
    ends = [0] + [zip_writer.add(name, data).end for name, data in ENTRIES]
    assert list(zip_writer.header_offsets) == ends[:-1]
    zip_writer.finish()
    assert target.getvalue()[ends[-1] :].startswith(b"PK\x01\x02")


@pytest.mark.parametrize("count", range(len(ENTRIES) + 1))
def test_entries_that_are_in_the_file_already_are_listed_and_not_written(count: int) -> None:
    whole = written(ENTRIES)
    before = ZipWriter(io.BytesIO())
    placements = [before.add(name, data) for name, data in ENTRIES[:count]]
    offset = placements[-1].end if placements else 0
    target = io.BytesIO()
    zip_writer = ZipWriter(target, existing=directory_of(placements), offset=offset)
    for name, data in ENTRIES[count:]:
        zip_writer.add(name, data)
    assert zip_writer.finish() == len(whole)
    assert target.getvalue() == whole[offset:]


@pytest.mark.parametrize("count", [0xFFFE, 0xFFFF])
def test_entries_that_are_in_the_file_already_count(count: int) -> None:
    target = io.BytesIO()
    one = Placement(b"one", 0, 0, 0)
    zip_writer = ZipWriter(target, existing=directory_of([one] * (count - 1)))
    zip_writer.add("last", b"")
    zip_writer.finish()
    assert (target.getvalue()[-98:-94] == b"PK\x06\x06") == (count > 0xFFFE)
    with pytest.raises(UnsupportedFeatureError, match="at most"):
        ZipWriter(target, existing=directory_of([one] * layout.MAX_ENTRIES)).add("more", b"")


def test_entries_of_no_bytes_are_entries() -> None:
    entries = [("a", b""), ("b", b""), ("c", b"x"), ("d", b"")]
    archive = written(entries)
    assert by_zipfile(archive) == entries
    assert read_back(archive) == entries


@pytest.mark.large
@pytest.mark.parametrize("count", [0xFFFE, 0xFFFF, 0x10000])
def test_as_many_entries_as_16_bits_do_not_count_are_read_back(count: int) -> None:
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


@given(
    st.lists(st.tuples(st.text("abcé_/", min_size=1, max_size=90), st.binary(max_size=200))),
    st.sampled_from([64, 256, 4096]),
)
def test_the_same_entries_give_the_same_bytes(entries: Entries, alignment: int) -> None:
    assert written(entries, alignment) == written(list(entries), alignment)


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=5))
def test_how_a_stream_is_cut_does_not_show(data: bytes, cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    parts = [data[start:end] for start, end in itertools.pairwise(bounds)]
    target = io.BytesIO()
    zip_writer = ZipWriter(target)
    zip_writer.add_stream("key", len(data), zlib.crc32(data), parts)
    zip_writer.finish()
    assert target.getvalue() == written([("key", data)])


@pytest.mark.parametrize("alignment", [0, 1, 32, 63, 65, 96, 1 << 16, -64])
def test_an_alignment_that_is_not_allowed_is_refused(alignment: int) -> None:
    target = io.BytesIO()
    with pytest.raises(ValueError, match=f"power of two from 64 to 32768, got {alignment}"):
        ZipWriter(target, alignment=alignment)
    assert target.getvalue() == b""


# To whom


def test_a_target_needs_nothing_but_write() -> None:
    target = OnlyWrites()
    sizes = write_all(target, ENTRIES)
    assert bytes(target.content) == written(ENTRIES)
    assert sizes[-1] == len(target.content)


def test_a_target_is_not_closed() -> None:
    target = io.BytesIO()
    write_all(target, ENTRIES)
    assert not target.closed


def test_a_target_that_gives_none_has_taken_everything() -> None:
    class GivesNone(OnlyWrites):
        def write(self, data: memoryview, /) -> None:  # type: ignore[override]
            super().write(data)

    target = GivesNone()
    write_all(target, ENTRIES)
    assert bytes(target.content) == written(ENTRIES)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=20))
def test_a_target_may_take_fewer_bytes_than_it_is_given(sizes: list[int]) -> None:
    target = WritesSome(sizes)
    write_all(target, ENTRIES)
    assert bytes(target.content) == written(ENTRIES)


def test_an_archive_goes_through_a_pipe() -> None:
    entries = [*ENTRIES, ("large", os.urandom(1 << 20))]  # more than a pipe holds
    receiving, sending = os.pipe()
    received = bytearray()

    def receive() -> None:
        with open(receiving, "rb") as pipe:
            received.extend(pipe.read())

    thread = threading.Thread(target=receive)
    thread.start()
    try:
        with open(sending, "wb", buffering=0) as pipe:
            write_all(pipe, entries)
    finally:
        thread.join()
    assert by_zipfile(bytes(received)) == entries


pipes_that_would_block = pytest.mark.skipif(
    not hasattr(os, "set_blocking"), reason="no pipes that would block"
)


def fill_a_pipe() -> tuple[BlockingIOError, bytes]:
    """The error of writing more than a pipe holds, and the content of the pipe."""
    receiving, sending = os.pipe()
    os.set_blocking(sending, False)
    with open(receiving, "rb") as received:
        with (
            open(sending, "wb", buffering=0) as pipe,
            pytest.raises(BlockingIOError) as caught,
        ):
            ZipWriter(pipe).add("key", bytes(1 << 22))
        return caught.value, received.read()


@pipes_that_would_block
def test_a_target_that_would_block_is_an_error_and_not_a_gap() -> None:
    error, taken = fill_a_pipe()
    assert error.errno == errno.EAGAIN
    assert taken == written([("key", bytes(1 << 22))])[: len(taken)]


@pipes_that_would_block
def test_no_more_is_said_to_be_written_than_was_before_a_target_blocked() -> None:
    error, taken = fill_a_pipe()
    assert error.characters_written <= len(taken)


def test_an_error_of_the_target_passes() -> None:
    class Full(OnlyWrites):
        def write(self, data: memoryview, /) -> int:
            if len(self.content) + len(data) > 100:
                raise OSError(errno.ENOSPC, "no space")
            return super().write(data)

    with pytest.raises(OSError, match="no space"):
        write_all(Full(), ENTRIES)


def test_a_target_may_keep_the_views_that_it_is_given() -> None:
    class Keeps(list[memoryview]):
        def write(self, data: memoryview, /) -> None:
            self.append(data)

    target = Keeps()
    entries = [(f"w{index}", bytes([index]) * (1 << 14)) for index in range(200)]
    write_all(target, entries)
    assert len(target) > 1
    assert b"".join(target) == written(entries)


# Buffers


def test_buffers_of_every_kind_and_shape_are_taken_as_their_bytes() -> None:
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    buffers: list[Buffer] = [bytearray(b"abc"), memoryview(b"abcdef")[1:5], array.data]
    for buffer in buffers:
        target = io.BytesIO()
        zip_writer = ZipWriter(target)
        zip_writer.add("key", buffer)
        zip_writer.finish()
        assert target.getvalue() == written([("key", bytes(buffer))])


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0, 5)])
def test_an_array_with_a_0_in_its_shape_has_no_bytes(shape: tuple[int, ...]) -> None:
    target = io.BytesIO()
    zip_writer = ZipWriter(target)
    assert zip_writer.add("key", np.zeros(shape, np.float32).data).nbytes == 0
    zip_writer.finish()
    assert target.getvalue() == written([("key", b"")])


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


def test_no_more_than_a_piece_is_written_at_a_time() -> None:
    class Measures(OnlyWrites):
        largest = 0

        def write(self, data: memoryview, /) -> int:
            self.largest = max(self.largest, len(data))
            return len(data)

    target = Measures()
    ZipWriter(target).add("key", bytes(PIECE_SIZE + 1))
    assert target.largest == PIECE_SIZE


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_the_crc32_is_that_of_zlib_and_can_be_continued(first: bytes, second: bytes) -> None:
    assert crc32(first) == zlib.crc32(first)
    assert crc32(second, crc32(first)) == zlib.crc32(first + second)


# When it refuses

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
def test_a_stream_that_is_not_what_was_said_is_refused(stream: list[bytes]) -> None:
    zip_writer = ZipWriter(io.BytesIO())
    zip_writer.add("first", b"1")
    with pytest.raises(ChecksumError, match="entry 'key': expected 12 bytes") as caught:
        zip_writer.add_stream("key", len(STATED), zlib.crc32(STATED), stream)
    assert caught.value.entry == "key"
    assert zip_writer.names == ["first"]


def test_a_wrong_crc32_is_refused_also_for_no_bytes() -> None:
    with pytest.raises(ChecksumError, match="CRC-32 0x00000001, found 0 bytes with 0x00000000"):
        ZipWriter(io.BytesIO()).add_stream("key", 0, 1, [])


def test_the_crc32_of_bytes_that_cannot_have_changed_is_not_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(writer, "crc32")
    target = io.BytesIO()
    zip_writer = ZipWriter(target)
    zip_writer.add_stream("key", len(STATED), 7, [STATED], is_constant=True)
    zip_writer.finish()
    with zipfile.ZipFile(target) as opened:
        assert opened.getinfo("key").CRC == 7
    with pytest.raises(ChecksumError, match=r"expected 12 bytes .*, found 13 bytes"):
        zip_writer.add_stream("other", len(STATED), 7, [STATED, b"!"], is_constant=True)


def test_only_bytes_objects_are_constant() -> None:
    data = bytes(range(100))
    assert Stored(memoryview(data)).is_constant
    assert Stored(memoryview(data)[1:].cast("b")).is_constant
    assert not Stored(memoryview(bytearray(data)).toreadonly()).is_constant
    assert not Stored(np.frombuffer(data, np.uint8).data).is_constant


def test_a_stream_without_end_is_left_when_it_is_too_long() -> None:
    def endless() -> Iterator[bytes]:
        yield STATED
        for _ in range(2):
            yield b"more"
        raise AssertionError("it was asked for more")

    target = io.BytesIO()
    with pytest.raises(ChecksumError):
        ZipWriter(target).add_stream("key", len(STATED), zlib.crc32(STATED), endless())
    assert b"more" not in target.getvalue()  # nothing beyond the limit is written


def test_an_error_of_a_stream_passes() -> None:
    def broken() -> Iterator[bytes]:
        yield STATED
        raise OSError(errno.EIO, "the source is gone")

    zip_writer = ZipWriter(io.BytesIO())
    with pytest.raises(OSError, match="the source is gone"):
        zip_writer.add_stream("key", len(STATED), zlib.crc32(STATED), broken())
    assert zip_writer.names == []


def test_a_placement_is_given_for_each_entry() -> None:
    zip_writer = ZipWriter(io.BytesIO(), alignment=128)
    zip_writer.add("first", b"1")
    placement = zip_writer.add("second", b"22")
    assert placement == Placement(b"second", 2, zlib.crc32(b"22"), 129, 128)
