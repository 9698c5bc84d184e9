from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, strategies as st

from onnxarchive.storage.binary_file import MemoryFile
from onnxarchive.storage.forward_file import ForwardFile, Streams, streamed
from onnxarchive.storage.random_access import RandomAccessFile
from onnxarchive.storage.spooling import RandomAccessData

CONTENT = bytes(range(256)) * 64


class Remote(RandomAccessFile):
    """A file that is not mapped and counts its requests."""

    def __init__(self, data: bytes = CONTENT) -> None:
        self.path, self.size, self.identity = "remote", len(data), 1
        self.data = data
        self.reads: list[tuple[int, int]] = []
        self.streams: list[tuple[int, int]] = []
        self.open_streams = 0

    def read(self, offset: int, size: int) -> bytes:
        self.reads.append((offset, size))
        return self.data[offset : offset + size]

    def pieces(self, offset: int, size: int) -> Iterator[memoryview]:
        self.streams.append((offset, size))
        self.open_streams += 1
        try:
            for start in range(offset, offset + size, 1000):
                yield memoryview(self.data)[start : min(start + 1000, offset + size)]
        finally:
            self.open_streams -= 1


def test_ranges_in_rising_order_are_read_from_one_stream() -> None:
    remote = Remote()
    file = ForwardFile(remote)
    for offset, size in ((10, 5), (30, 3000), (4000, 0), (5000, 1500)):
        assert b"".join(file.pieces(offset, size)) == CONTENT[offset : offset + size]
        assert file.read(offset + size, 7) == CONTENT[offset + size : offset + size + 7]
    assert remote.streams == [(10, len(CONTENT) - 10)]
    assert remote.reads == []


def test_going_back_begins_another_stream_and_ends_the_first() -> None:
    remote = Remote()
    file = ForwardFile(remote)
    for offset in (5000, 10):
        assert b"".join(file.pieces(offset, 100)) == CONTENT[offset : offset + 100]
        assert remote.open_streams == 1
    assert len(remote.streams) == 2
    file.stop()
    assert remote.open_streams == 0


def test_a_read_elsewhere_leaves_the_stream_where_it_is() -> None:
    remote = Remote()
    file = ForwardFile(remote)
    assert file.read(9000, 4) == CONTENT[9000:9004]
    assert b"".join(file.pieces(100, 50)) == CONTENT[100:150]
    assert file.read(20, 4) == CONTENT[20:24]
    assert b"".join(file.pieces(150, 50)) == CONTENT[150:200]
    assert (len(remote.streams), remote.reads) == (1, [(9000, 4), (20, 4)])


def test_a_consumer_may_stop_within_a_range() -> None:
    remote = Remote()
    file = ForwardFile(remote)
    first = next(iter(file.pieces(0, 5000)))
    rest = 5000 - len(first)
    assert b"".join(file.pieces(len(first), rest)) == CONTENT[len(first) : 5000]
    assert len(remote.streams) == 1


def test_two_ranges_may_be_read_in_turns() -> None:
    file = ForwardFile(Remote())
    turns = zip(file.pieces(1000, 8000), file.pieces(5000, 8000), strict=True)
    found = [b"".join(pieces) for pieces in zip(*turns, strict=True)]
    assert found == [CONTENT[1000:9000], CONTENT[5000:13_000]]


def test_no_more_is_asked_for_than_three_times_what_is_read() -> None:
    remote = Remote(bytes(64 << 20))
    file = ForwardFile(remote)
    offsets = range(60 << 20, -1, -3 << 20)  # each before the last
    for offset in offsets:
        assert sum(map(len, file.pieces(offset, 2 << 20))) == 2 << 20
    assert remote.streams == [(offset, 2 << 20) for offset in offsets]
    remote.streams.clear()
    for offset in range(10 << 20, 30 << 20, 1 << 20):
        assert sum(map(len, file.pieces(offset, 1 << 20))) == 1 << 20
    assert sum(size for _, size in remote.streams) <= 60 << 20
    assert len(remote.streams) <= 6


def test_several_ranges_are_read_as_the_other_file_reads_them() -> None:
    remote = Remote()
    remote.read_ranges = lambda ranges: iter([memoryview(b"both")])  # type: ignore[method-assign]
    assert list(ForwardFile(remote).read_ranges([(0, 1), (2, 3)])) == [b"both"]


@given(st.lists(st.tuples(st.integers(0, 17_000), st.integers(0, 3000)), max_size=12))
def test_any_order_gives_the_bytes_of_the_file(ranges: list[tuple[int, int]]) -> None:
    remote = Remote()
    file = ForwardFile(remote)
    for (offset, size), is_read in zip(ranges, itertools.cycle((True, False))):
        found = file.read(offset, size) if is_read else b"".join(file.pieces(offset, size))
        assert found == CONTENT[offset : offset + size]
        assert remote.open_streams <= 1


def test_data_of_a_file_that_became_shorter_is_an_error() -> None:
    data = RandomAccessData(Remote(), len(CONTENT) - 10, 20)
    with pytest.raises(ValueError, match=r"^remote: expected 20 bytes at offset 16374, found 10"):
        list(data)
    assert b"".join(RandomAccessData(Remote(), 5, 20)) == CONTENT[5:25]


def test_a_mapped_file_needs_no_stream() -> None:
    mapped = MemoryFile(memoryview(CONTENT))
    assert streamed(mapped) is mapped
    assert isinstance(streamed(Remote()), ForwardFile)


def test_a_stream_is_given_up_with_its_last_byte() -> None:
    remote = Remote()
    file = ForwardFile(remote)
    pieces = file.pieces(100, len(CONTENT) - 100)
    while next(pieces)[-1:] != CONTENT[-1:]:
        pass
    assert remote.open_streams == 0


def test_of_files_that_are_read_in_turn_two_are_streamed() -> None:
    streams = Streams()
    remotes = [Remote() for _ in range(3)]
    files = [ForwardFile(remote, streams) for remote in remotes]
    for offset in (0, 2000, 4000):
        for file in files:
            assert b"".join(file.pieces(offset, 1000)) == CONTENT[offset : offset + 1000]
            assert sum(remote.open_streams for remote in remotes) <= 2
    for file in files:
        file.stop()
    assert sum(remote.open_streams for remote in remotes) == 0
