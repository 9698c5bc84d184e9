"""Entries of zips inflated: every method, every lie about size and checksum, bounded memory."""

from __future__ import annotations

import bz2
import lzma
import os
import random
import struct
import sys
import textwrap
import zlib
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings, strategies as st
from outcomes import count_outcome, requires_outcomes
from processes import completed

from onnxarchive.errors import (
    ArchiveError,
    ArchiveFormatError,
    ChecksumError,
    UnsupportedFeatureError,
)
from onnxarchive.files.data import PIECE_SIZE, Range
from onnxarchive.files.data_files import spool
from onnxarchive.sources import zip_file
from onnxarchive.sources.zip_file import ZippedFile, read_zip
from onnxarchive.zipformat import records
from onnxarchive.zipformat.records import DirectoryRecord, EndRecord, LocalHeader

STORED = records.METHOD_STORED
DEFLATE = records.METHOD_DEFLATE
DEFLATE64 = records.METHOD_DEFLATE64
BZIP2 = records.METHOD_BZIP2
LZMA = records.METHOD_LZMA

TEXT = b"".join(b"%d and " % number for number in range(20_000))


def deflated(data: bytes) -> bytes:
    encoder = zlib.compressobj(wbits=-15)
    return encoder.compress(data) + encoder.flush()


def lzma_header(
    dictionary_size: int = 1 << 20, packed: int = 93, properties_size: int = 5
) -> bytes:
    return struct.pack("<2BHBI", 9, 4, properties_size, packed, dictionary_size)


def lzma_with_end_marker(data: bytes) -> bytes:
    filters = [{"id": lzma.FILTER_LZMA1, "dict_size": 1 << 20, "lc": 3, "lp": 0, "pb": 2}]
    return lzma_header() + lzma.compress(data, lzma.FORMAT_RAW, filters=filters)


def deflated64_stored(data: bytes) -> bytes:
    """Deflate64 that does not compress: its stored blocks are those of deflate."""
    blocks = [data[start : start + 0xFFFF] for start in range(0, len(data), 0xFFFF)] or [b""]
    return b"".join(
        struct.pack("<BHH", block is blocks[-1], len(block), len(block) ^ 0xFFFF) + block
        for block in blocks
    )


ENCODERS: dict[int, Callable[[bytes], bytes]] = {
    STORED: bytes,
    DEFLATE: deflated,
    DEFLATE64: deflated64_stored,
    BZIP2: bz2.compress,
    LZMA: lzma_with_end_marker,
}
methods = pytest.mark.parametrize(
    "method", ENCODERS, ids=["stored", "deflate", "deflate64", "bzip2", "lzma"]
)
compressing = pytest.mark.parametrize(
    "method", [DEFLATE, DEFLATE64, BZIP2, LZMA], ids=["deflate", "deflate64", "bzip2", "lzma"]
)


def entry_of(
    method: int,
    compressed: bytes,
    data: bytes,
    *,
    nbytes: int | None = None,
    crc32: int | None = None,
) -> ZippedFile:
    """The only entry of a zip."""
    nbytes = len(data) if nbytes is None else nbytes
    sizes = len(compressed), nbytes
    extra = b""
    if nbytes > records.UINT32_MAX:
        extra = records.pack_zip64_extra(nbytes, len(compressed))
        sizes = records.SATURATED_32, records.SATURATED_32
    crc = zlib.crc32(data) if crc32 is None else crc32
    local = LocalHeader(20, 0, method, 0, 33, crc, *sizes, b"folder/w", extra)
    record = DirectoryRecord(20, *local[:8], 0, 0, 0, 0, b"folder/w", extra, b"").pack()
    end = EndRecord(0, 0, 1, 1, len(record), len(local.pack()) + len(compressed), 0).pack()
    files, _ = read_zip(memoryview(local.pack() + compressed + record + end), None)
    return files["folder/w"]


def inflated(method: int, compressed: bytes, data: bytes, **stated: int) -> bytes:
    return b"".join(Range.whole(entry_of(method, compressed, data, **stated)).pieces())


@methods
@given(st.binary(max_size=2000), st.integers(1, 60))
@settings(max_examples=30)
def test_any_compressed_data_is_inflated_unchanged(method: int, data: bytes, times: int) -> None:
    assert inflated(method, ENCODERS[method](data * times), data * times) == data * times


@methods
def test_pieces_are_of_bounded_size(method: int) -> None:
    data = bytes(3 * PIECE_SIZE + 5)
    found = [
        bytes(piece)
        for piece in Range.whole(entry_of(method, ENCODERS[method](data), data)).pieces()
    ]
    sizes = [len(piece) for piece in found]
    assert b"".join(found) == data
    assert len(sizes) > 3
    assert 0 < min(sizes) <= max(sizes) <= PIECE_SIZE


def test_stored_data_are_not_copied() -> None:
    file = entry_of(STORED, TEXT, TEXT)
    (piece,) = Range.whole(file).pieces()
    for view in (piece, file.view()):
        assert view.obj is file._compressed.obj
        assert view.tobytes() == TEXT


@compressing
def test_parts_are_taken_from_one_temporary_file(
    method: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def counted(pieces: Iterable[memoryview], nbytes: int, directory: str | None) -> memoryview:
        made.append(nbytes)
        return spool(pieces, nbytes, directory)

    monkeypatch.setattr(zip_file, "spool", counted)
    file = entry_of(method, ENCODERS[method](TEXT), TEXT)
    parts = [Range(file, offset, 999) for offset in (0, 500, len(TEXT) - 999)]
    assert made == []
    assert [b"".join(part.pieces()) for part in parts] == [TEXT[:999], TEXT[500:1499], TEXT[-999:]]
    assert made == [len(TEXT)]


@methods
def test_nothing_happens_before_the_first_piece_is_taken(method: int) -> None:
    data = b"\xff" * 30
    file = entry_of(method, data, data)
    Range.whole(file).pieces()
    Range(file, 3, 4)


# Wrong sizes and checksums


@methods
@pytest.mark.parametrize("crc32", [0, 0xBAD])
def test_a_wrong_crc_is_an_error_that_names_both_values(method: int, crc32: int) -> None:
    with pytest.raises(ChecksumError) as caught:
        inflated(method, ENCODERS[method](TEXT), TEXT, crc32=crc32)
    assert caught.value.entry == "folder/w"
    assert str(caught.value) == (
        f"entry 'folder/w': expected {len(TEXT)} bytes with CRC-32 {crc32:#010x}, found "
        f"{len(TEXT)} bytes with {zlib.crc32(TEXT):#010x}; the file is damaged: copy or download "
        "it again"
    )


# What is wrong with the data of an entry.
FAULT = "(expected .*found .|it inflates to more than [0-9]+ bytes|the zip is damaged: .)"


@compressing
@pytest.mark.parametrize("by", [-len(TEXT), -TEXT.index(b"9"), -1, 1, 1 << 40])
def test_a_wrong_size_is_an_error(method: int, by: int) -> None:
    file = entry_of(method, ENCODERS[method](TEXT), TEXT, nbytes=len(TEXT) + by)
    taken: list[int] = []
    with pytest.raises(ArchiveError, match=f"entry 'folder/w': {FAULT}") as caught:
        taken.extend(map(len, Range.whole(file).pieces()))
    assert sum(taken) <= file.size
    assert caught.value.entry == "folder/w"


@compressing
@pytest.mark.parametrize("size", [0, 1, 3, 10, -20])
def test_compressed_data_that_end_early_are_an_error(method: int, size: int) -> None:
    compressed = ENCODERS[method](TEXT)
    with pytest.raises(ArchiveFormatError, match=FAULT):
        inflated(method, compressed[:size], TEXT)


@compressing
def test_data_that_is_not_compressed_is_an_error(method: int) -> None:
    for seed in range(50):
        other = random.Random(seed).randbytes(500)
        with pytest.raises(ArchiveError):
            inflated(method, other, TEXT)


@compressing
@requires_outcomes(refused=100)
@given(st.floats(0, 1), st.binary(min_size=1, max_size=4))
@settings(max_examples=200)
def test_damaged_compressed_data_is_an_error(method: int, place: float, data: bytes) -> None:
    compressed = bytearray(ENCODERS[method](TEXT[:5000]))
    position = int(place * (len(compressed) - 1))
    compressed[position : position + len(data)] = data
    try:
        assert inflated(method, bytes(compressed), TEXT[:5000]) == TEXT[:5000]
        count_outcome("harmless")
    except ArchiveError as error:
        assert error.entry == "folder/w"
        count_outcome("refused")


# LZMA


# A sentence as 7-Zip packs it without an end marker (7z a -m0=LZMA), after the header of a zip.
SENTENCE = b"one and two and three and one and two and three and one and two"
PACKED_SENTENCE = lzma_header() + bytes.fromhex(
    "00379b88ce7637ab589a5d0997cc864f0fa52897b7aa35eea500"
)


def test_lzma_needs_no_end_marker() -> None:
    assert inflated(LZMA, PACKED_SENTENCE, SENTENCE) == SENTENCE


def test_lzma_data_of_nothing_may_have_no_end_marker() -> None:
    assert inflated(LZMA, lzma_header() + bytes(5), b"") == b""


@pytest.mark.parametrize("by", [-len(SENTENCE), -5, -1, 1, 1 << 30])
def test_a_wrong_size_of_lzma_data_without_end_marker_is_an_error(by: int) -> None:
    with pytest.raises(ArchiveError, match=f"entry 'folder/w': {FAULT}"):
        inflated(LZMA, PACKED_SENTENCE, SENTENCE, nbytes=len(SENTENCE) + by)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        lzma_header()[:-1],
        lzma_header(properties_size=6),
        lzma_header(properties_size=0xFFFF),
        lzma_header(packed=225),
        lzma_header(packed=4 * 9 + 8),  # lc + lp > 4
    ],
)
def test_a_wrong_lzma_header_is_an_error(header: bytes) -> None:
    with pytest.raises(ArchiveError, match=f"entry 'folder/w': {FAULT}"):
        inflated(LZMA, header + lzma_with_end_marker(TEXT)[9:] * (len(header) == 9), TEXT)


def test_an_lzma_dictionary_beyond_the_limit_is_not_supported() -> None:
    compressed = lzma_header(0xFFFFFFFF) + lzma_with_end_marker(TEXT)[9:]
    with pytest.raises(UnsupportedFeatureError, match="dictionary of at most 1073741824 bytes"):
        inflated(LZMA, compressed, TEXT)


# Deflate64


def packed_bits(fields: Iterable[tuple[int, int]]) -> bytes:
    """Values of so many bits each, the first in the lowest bits."""
    value = size = 0
    for field, width in fields:
        value |= field << size
        size += width
    return value.to_bytes(-(-size // 8), "little")


# A block with codes of its own: how many bits the codes of code lengths 0, 1 and 18 have.
CODE_LENGTH_ORDER = [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15]
LAST_DYNAMIC_BLOCK = [(1, 1), (2, 2)]


def longest_matches(count: int) -> bytes:
    """Deflate64 of `count` matches of 65,538 bytes, after one byte: what expands most.

    Literal codes: 0 has two bits, 256 (the end) two and 285 (the longest match) one; the one
    distance code has one bit.
    """
    code_lengths = {18: 1, 1: 2, 2: 2}  # canonical: 18 is 0, 1 is 10, 2 is 11
    bits = [*LAST_DYNAMIC_BLOCK, (286 - 257, 5), (0, 5), (19 - 4, 4)]
    bits += [(code_lengths.get(symbol, 0), 3) for symbol in CODE_LENGTH_ORDER]
    one, two, zeros = (0b01, 2), (0b11, 2), (0, 1)
    bits += [two, zeros, (138 - 11, 7), zeros, (117 - 11, 7)]  # 0, then 1 to 255 are not there
    bits += [two, zeros, (28 - 11, 7), one]  # 256, 257 to 284 are not there, 285
    bits += [one]  # distance code 0
    literal, end, match = (0b01, 2), (0b11, 2), [(0, 1), (0xFFFF, 16), (0, 1)]
    return packed_bits([*bits, literal, *match * count, end])


# Bombs, imports and other things that need a process of their own


def run(script: str, *arguments: str) -> str:
    """Runs a script with the tests' import path; returns its output."""
    done = completed(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        status=0,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return done.stdout


BOMB = """
    import bz2, lzma, resource, struct, sys, zlib
    from test_zipped_data import entry_of, longest_matches

    from onnxarchive.errors import ArchiveError
    from onnxarchive.files.data import Range

    method, total, declared = map(int, sys.argv[1:])
    zeros = bytes(1 << 20)
    if method == 9:
        compressed = longest_matches(total // 65_538)
        total = 1 + total // 65_538 * 65_538
    else:
        if method == 8:
            encoder = zlib.compressobj(1, wbits=-15)
        elif method == 12:
            encoder = bz2.BZ2Compressor(9)
        else:
            filters = [{"id": lzma.FILTER_LZMA1, "preset": 0}]
            encoder = lzma.LZMACompressor(lzma.FORMAT_RAW, filters=filters)
        parts = [encoder.compress(zeros) for _ in range(total >> 20)]
        compressed = b"".join([*parts, encoder.flush()])
        if method == 14:
            compressed = struct.pack("<2BHBI", 9, 4, 5, 93, 1 << 18) + compressed
    crc = 0
    for start in range(0, declared, len(zeros)):
        crc = zlib.crc32(zeros[: declared - start], crc)
    parts = None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    nbytes = 0
    try:
        file = entry_of(method, compressed, b"", nbytes=declared, crc32=crc)
        for piece in Range.whole(file).pieces():
            nbytes += len(piece)
    except ArchiveError as error:
        print(error)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert nbytes <= declared
    assert grown < 64 << 10, f"{grown} KiB"
    print(nbytes)
"""


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux")
bombs = pytest.mark.parametrize(
    ("method", "total"),
    [(DEFLATE, 1 << 30), (DEFLATE64, 1 << 30), (BZIP2, 1 << 30), (LZMA, 1 << 28)],
    ids=["deflate", "deflate64", "bzip2", "lzma"],
)


@pytest.mark.large
@on_linux
@bombs
def test_a_bomb_declared_as_ten_bytes_takes_little_memory(method: int, total: int) -> None:
    lines = run(BOMB, str(method), str(total), "10").splitlines()
    assert int(lines[-1]) <= 10


@pytest.mark.large
@on_linux
@bombs
def test_a_bomb_that_states_its_size_takes_little_memory(method: int, total: int) -> None:
    if method == DEFLATE64:
        total = 1 + total // 65_538 * 65_538
    assert run(BOMB, str(method), str(total), str(total)) == f"{total}\n"


def test_a_method_without_its_package_is_an_error_that_names_the_package() -> None:
    printed = run(
        """
    import sys
    sys.modules["zipfile_deflate64"] = None
    from test_zipped_data import inflated
    from onnxarchive.errors import UnsupportedFeatureError
    try:
        inflated(9, b"", b"")
    except UnsupportedFeatureError as error:
        print(error)
    """
    )
    assert printed.rstrip().endswith(": pip install zipfile-deflate64")
