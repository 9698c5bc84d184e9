"""Inflates the entries of a foreign zip, piece by piece.

The declared size and CRC-32 are not trusted: both are verified, and no more bytes than the declared
size are yielded. Memory is bounded by a piece of input, a piece of output and the window of the
compression method.
"""

from __future__ import annotations

import bz2
import importlib.machinery
import importlib.util
import itertools
import lzma
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Protocol, cast

from zlib_ng import zlib_ng

from onnxarchive.buffers.checksums import Crc32
from onnxarchive.buffers.data import PIECE_SIZE, pieces
from onnxarchive.errors import (
    ArchiveError,
    ChecksumError,
    UnsupportedFeatureError,
)
from onnxarchive.zipformat import records
from onnxarchive.zipformat.foreign import ForeignEntry
from onnxarchive.zipformat.foreign_end import format_error, unsupported

# Limit of an LZMA dictionary, in bytes. 7-Zip uses up to 256 MiB by default, and 1 GiB was the
# largest choice in its dialog for years.
MAX_LZMA_DICTIONARY_SIZE = 1 << 30

_INPUT_SIZE = 1 << 20  # bytes

_RAW_DEFLATE = -15  # wbits of zlib: no header, the largest window

# A deflate64 match of the maximum length, 65,538 bytes, takes at least 18 bits: 1 bit for the
# length code 285, 16 bits for the length, 1 bit for the distance code. A call of the decoder gets
# 256 bytes of input, and may have 32 bits left over from earlier input: 2,080 bits, which hold at
# most 115 matches. The decoder may also hold back output in its window of 65,536 bytes. So a call
# returns at most 115 * 65,538 + 65,536 bytes: 7.3 MiB, less than `PIECE_SIZE`.
_DEFLATE64_INPUT_SIZE = 256

# APPNOTE 5.8.8: the version of the LZMA SDK (two bytes), then the size of the properties.
_LZMA_HEADER = struct.Struct("<2BH")
_LZMA_PROPERTIES = struct.Struct("<BI")
_LZMA_PROPERTY_LIMIT = 9 * 5 * 5  # lc, lp and pb in one byte
_LZMA_MIN_DICTIONARY_SIZE = 1 << 12
# Header of a .lzma file: the properties, then the size of the inflated data. If the data has an end
# marker, this size is `_LZMA_UNKNOWN_SIZE`.
_LZMA_FILE_HEADER = struct.Struct("<BIQ")
_LZMA_UNKNOWN_SIZE = records.UINT64_MAX

_ZLIB_ERROR = cast("type[Exception]", zlib_ng.error)
# What the decompressors raise if the data is damaged.
_DECODING_ERRORS = (_ZLIB_ERROR, lzma.LZMAError, OSError, ValueError, EOFError)


def inflate(view: memoryview, entry: ForeignEntry) -> Iterator[memoryview]:
    """Yields the inflated data of an entry in pieces of at most `PIECE_SIZE` bytes.

    Pieces of stored data are views, other pieces are copies. After the last piece, size and CRC-32
    are verified. If the data is too long, the piece that exceeds `entry.nbytes` is not yielded.

    Args:
        view: The bytes of the whole file.
        entry: The entry, as returned by `foreign.read_zip`.

    Raises:
        ArchiveFormatError: The compressed data are damaged, or inflate to another size than
            `entry.nbytes`.
        ChecksumError: The CRC-32 of the inflated data is not `entry.crc32`.
        UnsupportedFeatureError: The package that decodes deflate64 is missing, or the LZMA
            dictionary is too large.
    """
    data = view[entry.data_offset : entry.data_offset + entry.compressed_nbytes]
    inflated = _METHODS[entry.method](data, entry)
    found = Crc32()
    for piece in found(_decoded(inflated, entry)):
        if found.nbytes > entry.nbytes:
            raise format_error(f"expected {entry.nbytes} bytes inflated, found more", entry.name)
        if piece:
            yield memoryview(piece)
    if found.nbytes != entry.nbytes:
        raise format_error(
            f"expected {entry.nbytes} bytes inflated, found {found.nbytes}", entry.name
        )
    if found.value != entry.crc32:
        raise ChecksumError(
            f"entry {entry.name!r}: expected CRC-32 {entry.crc32:#010x}, found {found.value:#010x}",
            entry=entry.name,
        )


def _decoded(
    inflated: Iterator[bytes | memoryview], entry: ForeignEntry
) -> Iterator[bytes | memoryview]:
    try:
        yield from inflated
    except ArchiveError:
        raise
    except _DECODING_ERRORS as error:
        raise format_error(
            f"expected data of method {entry.method}, found {error}", entry.name
        ) from error


def _require_whole(entry: ForeignEntry, is_at_end: bool, unused: int) -> None:
    """Refuses compressed data that end before or after the end of the entry."""
    expected = f"expected {entry.compressed_nbytes} bytes of compressed data"
    if not is_at_end:
        raise format_error(f"{expected}, found no end of the data within them", entry.name)
    if unused:
        raise format_error(f"{expected}, found an earlier end", entry.name)


def _slices(data: memoryview, size: int) -> Iterator[memoryview]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


def _stored(data: memoryview, entry: ForeignEntry) -> Iterator[memoryview]:
    return pieces(data)


def _deflated(data: memoryview, entry: ForeignEntry) -> Iterator[bytes]:
    decoder = zlib_ng.decompressobj(_RAW_DEFLATE)
    fed = 0
    for piece in _slices(data, _INPUT_SIZE):
        fed += len(piece)
        rest: bytes | memoryview = piece
        while rest and not decoder.eof:
            yield decoder.decompress(rest, PIECE_SIZE)
            rest = decoder.unconsumed_tail
        if decoder.eof:
            break
    # Output may remain in the window after all input is consumed.
    while not decoder.eof and (waiting := decoder.decompress(b"", PIECE_SIZE)):
        yield waiting
    _require_whole(entry, decoder.eof, len(data) - fed + len(decoder.unused_data))


def _bzipped(data: memoryview, entry: ForeignEntry) -> Iterator[bytes]:
    return _decompressed(bz2.BZ2Decompressor(), data, entry)


def _lzma(data: memoryview, entry: ForeignEntry) -> Iterator[bytes]:
    """Decodes the data as a .lzma file, which holds the same data after another header.

    A raw decoder does not know the size, and invents bytes after data without an end marker.
    """
    header_size = _LZMA_HEADER.size + _LZMA_PROPERTIES.size
    if len(data) < header_size:
        raise format_error(
            f"expected an LZMA header of {header_size} bytes, found {len(data)}", entry.name
        )
    _, _, properties_size = _LZMA_HEADER.unpack_from(data)
    packed, dictionary_size = _LZMA_PROPERTIES.unpack_from(data, _LZMA_HEADER.size)
    if properties_size != _LZMA_PROPERTIES.size or packed >= _LZMA_PROPERTY_LIMIT:
        raise format_error(
            f"expected {_LZMA_PROPERTIES.size} bytes of LZMA properties with a first byte below "
            f"{_LZMA_PROPERTY_LIMIT}, found {properties_size} bytes with a first byte of {packed}",
            entry.name,
        )
    # A match reaches back to the first inflated byte at most, so a dictionary need not be larger
    # than the inflated data.
    needed_size = max(min(dictionary_size, entry.nbytes), _LZMA_MIN_DICTIONARY_SIZE)
    if needed_size > MAX_LZMA_DICTIONARY_SIZE:
        raise unsupported(
            f"expected an LZMA dictionary of at most {MAX_LZMA_DICTIONARY_SIZE} bytes, found "
            f"{needed_size}",
            entry.name,
        )
    size = _LZMA_UNKNOWN_SIZE if entry.has_end_marker else entry.nbytes
    decoder = lzma.LZMADecompressor(lzma.FORMAT_ALONE)
    decoder.decompress(_LZMA_FILE_HEADER.pack(packed, needed_size, size))
    yield from _decompressed(decoder, data[header_size:], entry)


def _decompressed(
    decoder: bz2.BZ2Decompressor | lzma.LZMADecompressor, data: memoryview, entry: ForeignEntry
) -> Iterator[bytes]:
    fed = 0
    for piece in _slices(data, _INPUT_SIZE):
        if decoder.eof:
            break
        fed += len(piece)
        yield decoder.decompress(piece, PIECE_SIZE)
        while not (decoder.needs_input or decoder.eof):
            yield decoder.decompress(b"", PIECE_SIZE)
    _require_whole(entry, decoder.eof, len(data) - fed + len(decoder.unused_data))


class _Deflate64Decoder(Protocol):
    """A decoder for deflate64, without a limit for the output of a call."""

    @property
    def eof(self) -> bool:
        """True after the end of the data."""

    def decompress(self, data: memoryview, /) -> bytes:
        """Returns all output of the next piece of input."""


def _deflated64(data: memoryview, entry: ForeignEntry) -> Iterator[bytes]:
    decoder = _deflate64_decoders()()
    # The decoder does not report unused input. So the last byte is passed alone: if the compressed
    # data ends before this byte, the byte is not passed, and counts as unused.
    body, last = data[: max(0, len(data) - 1)], data[max(0, len(data) - 1) :]
    fed = 0
    for piece in itertools.chain(_slices(body, _DEFLATE64_INPUT_SIZE), [last]):
        if decoder.eof:
            break
        fed += len(piece)
        yield decoder.decompress(piece)
    _require_whole(entry, decoder.eof, len(data) - fed)


_deflate64_lock = threading.Lock()
_deflate64: Callable[[], _Deflate64Decoder] | None = None


def _deflate64_decoders() -> Callable[[], _Deflate64Decoder]:
    """The decoder class of the package zipfile-deflate64, loaded on first use.

    Importing the package patches `zipfile` for the whole process. So its extension module is loaded
    alone, and removed from `sys.modules`, so that a later import of the package works as usual.
    """
    global _deflate64
    with _deflate64_lock:
        if _deflate64 is None:
            _deflate64 = _load_deflate64()
        return _deflate64


def _load_deflate64() -> Callable[[], _Deflate64Decoder]:
    package_name, name = "zipfile_deflate64", "zipfile_deflate64.deflate64"
    if name in sys.modules:
        module = sys.modules[name]
    else:
        package = importlib.util.find_spec(package_name)
        places = package and package.submodule_search_locations
        spec = importlib.machinery.PathFinder.find_spec(name, places) if places else None
        if spec is None or spec.loader is None:
            raise UnsupportedFeatureError(
                "expected the package zipfile-deflate64 for deflate64 data, found it missing: "
                "pip install 'onnxarchive[deflate64]'"
            )
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules.pop(name, None)  # an extension module adds itself
    return cast("Callable[[], _Deflate64Decoder]", module.Deflate64)


_METHODS: dict[
    int, Callable[[memoryview, ForeignEntry], Iterator[bytes] | Iterator[memoryview]]
] = {
    records.METHOD_STORED: _stored,
    records.METHOD_DEFLATE: _deflated,
    records.METHOD_DEFLATE64: _deflated64,
    records.METHOD_BZIP2: _bzipped,
    records.METHOD_LZMA: _lzma,
}
