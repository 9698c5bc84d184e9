"""Inflates the entries of a foreign zip, piece by piece.

What a zip declares is not believed: no more than the declared size is given, whatever the
compressed data hold, and at the end the size and the CRC-32 are compared. Memory is bounded by a
piece of input, a piece of output and the method's own window.
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
    ArchiveFormatError,
    ChecksumError,
    UnsupportedFeatureError,
)
from onnxarchive.zipformat import records
from onnxarchive.zipformat.foreign import ForeignEntry

# The dictionary that an LZMA entry may need, in bytes. 7-Zip writes 64 MiB at most unless it is
# told otherwise (256 MiB in new versions); 1 GiB is the largest that its dialog offered for years.
MAX_LZMA_DICTIONARY_SIZE = 1 << 30

_INPUT_SIZE = 1 << 20  # bytes

_RAW_DEFLATE = -15  # wbits of zlib: no header, the largest window

# What a deflate64 match costs at least: one bit for the length code 285, 16 bits that say how much
# longer than 3 bytes it is, one bit for a distance code without extra bits. It gives 65,538 bytes.
# 256 bytes of input, and 32 bits held back from before, thus give 115 matches at most, and what
# the window of 65,536 bytes held back: 7.3 MiB, less than `PIECE_SIZE`.
_DEFLATE64_INPUT_SIZE = 256

# 5.8.8: the version of the LZMA SDK (two bytes) and the size of the properties before them.
_LZMA_HEADER = struct.Struct("<2BH")
_LZMA_PROPERTIES = struct.Struct("<BI")
_LZMA_PROPERTY_LIMIT = 9 * 5 * 5  # lc, lp and pb in one byte
_LZMA_MIN_DICTIONARY_SIZE = 1 << 12
# The header of a .lzma: the properties and the size, which is this where an end marker tells it.
_LZMA_FILE_HEADER = struct.Struct("<BIQ")
_LZMA_UNKNOWN_SIZE = records.UINT64_MAX

_ZLIB_ERROR = cast("type[Exception]", zlib_ng.error)
# What the decompressors raise about data that are not theirs.
_DECODING_ERRORS = (_ZLIB_ERROR, lzma.LZMAError, OSError, ValueError, EOFError)


def inflate(view: memoryview, entry: ForeignEntry) -> Iterator[memoryview]:
    """The data of an entry, inflated, in pieces of at most `PIECE_SIZE` bytes.

    Stored data are not copied. Size and CRC-32 are verified when the last piece has been taken.

    Args:
        view: The whole file, as `foreign.read` was given it.
        entry: The entry, as `foreign.read` gave it.

    Raises:
        ArchiveFormatError: The compressed data are damaged, or do not give `entry.nbytes` bytes.
        ChecksumError: The data have another CRC-32.
        UnsupportedFeatureError: The method, or so large an LZMA dictionary, is not supported.
    """
    data = view[entry.data_offset : entry.data_offset + entry.compressed_nbytes]
    inflated = _METHODS[entry.method](data, entry)
    found = Crc32()
    for piece in found(_decoded(inflated, entry)):
        if found.nbytes > entry.nbytes:
            raise _damaged(entry, f"expected {entry.nbytes} bytes inflated, found more")
        if piece:
            yield memoryview(piece)
    if found.nbytes != entry.nbytes:
        raise _damaged(entry, f"expected {entry.nbytes} bytes inflated, found {found.nbytes}")
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
        raise _damaged(entry, f"expected data of method {entry.method}, found {error}") from error


def _damaged(entry: ForeignEntry, message: str) -> ArchiveFormatError:
    return ArchiveFormatError(f"entry {entry.name!r}: {message}", entry=entry.name)


def _require_whole(entry: ForeignEntry, is_at_end: bool, unused: int) -> None:
    """The compressed data must end where the entry ends, by what they say themselves."""
    expected = f"expected {entry.compressed_nbytes} bytes of compressed data"
    if not is_at_end:
        raise _damaged(entry, f"{expected}, found that they do not end there")
    if unused:
        raise _damaged(entry, f"{expected}, found that they end before")


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
    # All input may be consumed while output still waits in the window.
    while not decoder.eof and (waiting := decoder.decompress(b"", PIECE_SIZE)):
        yield waiting
    _require_whole(entry, decoder.eof, len(data) - fed + len(decoder.unused_data))


def _bzipped(data: memoryview, entry: ForeignEntry) -> Iterator[bytes]:
    return _decompressed(bz2.BZ2Decompressor(), data, entry)


def _lzma(data: memoryview, entry: ForeignEntry) -> Iterator[bytes]:
    """Decodes as a .lzma, which has the same data under another header.

    A raw decoder would not know where data without an end marker end, and make something up.
    """
    header_size = _LZMA_HEADER.size + _LZMA_PROPERTIES.size
    if len(data) < header_size:
        raise _damaged(entry, f"expected an LZMA header of {header_size} bytes, found {len(data)}")
    _, _, properties_size = _LZMA_HEADER.unpack_from(data)
    packed, dictionary_size = _LZMA_PROPERTIES.unpack_from(data, _LZMA_HEADER.size)
    if properties_size != _LZMA_PROPERTIES.size or packed >= _LZMA_PROPERTY_LIMIT:
        raise _damaged(
            entry,
            f"expected {_LZMA_PROPERTIES.size} bytes of LZMA properties, the first below "
            f"{_LZMA_PROPERTY_LIMIT}, found {properties_size} bytes and {packed}",
        )
    # Nothing refers farther back than to the first byte, whatever the header asks for.
    needed_size = max(min(dictionary_size, entry.nbytes), _LZMA_MIN_DICTIONARY_SIZE)
    if needed_size > MAX_LZMA_DICTIONARY_SIZE:
        raise UnsupportedFeatureError(
            f"entry {entry.name!r}: expected an LZMA dictionary of at most "
            f"{MAX_LZMA_DICTIONARY_SIZE} bytes, found {needed_size}",
            entry=entry.name,
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
    """What the package zipfile-deflate64 decodes with; its output is not limited."""

    @property
    def eof(self) -> bool:
        """Whether the end of the data has come."""

    def decompress(self, data: memoryview, /) -> bytes:
        """All that `data`, following what came before, give."""


def _deflated64(data: memoryview, entry: ForeignEntry) -> Iterator[bytes]:
    decoder = _deflate64_decoders()()
    # The decoder does not tell how much it used: the last byte comes alone, and must be used.
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
    """The decoder of the package zipfile-deflate64, loaded when it is first needed.

    Importing the package patches the standard library's `zipfile` for everyone in the process. So
    its extension module is loaded alone, which patches nothing, and forgotten, so that whoever
    imports the package still gets what they expect.
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
                "deflate64 is inflated by the package zipfile-deflate64, which is not installed: "
                "pip install zipfile-deflate64"
            )
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules.pop(name, None)  # an extension module enters itself
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
