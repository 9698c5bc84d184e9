"""Zips of other tools, read by Python's zipfile.

zipfile parses the directory and decompresses. This module adds the checks that zipfile lacks: the
size of the directory before it is read; a single end record; entries that do not overlap, with
distinct names that their local headers repeat; and the sizes and CRC-32s of the inflated data, in
bounded memory. Stored entries are read in place. A compressed entry is inflated while it is read as
a whole; if parts of it are needed, it is inflated once, to a temporary file.
"""

from __future__ import annotations

import bz2
import contextlib
import io
import lzma
import os
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from itertools import islice
from threading import Lock

from onnxarchive.errors import (
    DAMAGED,
    INTERRUPTED,
    ArchiveError,
    ArchiveFormatError,
    ChecksumError,
    UnsupportedFeatureError,
)
from onnxarchive.files.data import Crc32, File, difference, pieces
from onnxarchive.files.data_files import spool
from onnxarchive.model.keys import PLAIN_PATH, is_plain_path
from onnxarchive.sources.source import MAX_PATH_SIZE
from onnxarchive.zipformat import records
from onnxarchive.zipformat.layout import MAX_ENTRIES
from onnxarchive.zipformat.records import (
    DirectoryRecord,
    EndRecord,
    LocalHeader,
    Zip64EndRecord,
    Zip64Locator,
)

_MAX_DIRECTORY_NBYTES = 64 << 20  # zipfile reads the directory as a whole
_MAX_NBYTES = 1 << 63  # of all entries together
_MAX_DICTIONARY_NBYTES = 1 << 30  # of LZMA; 7-Zip takes up to 256 MiB unless told otherwise
_MAX_DESCRIPTOR_NBYTES = 24  # 4.3.9: signature, CRC-32 and two sizes of 8 bytes
_PIECE_NBYTES = 1 << 20
_MAX_SHOWN = 512  # characters of a name in a message
# Bytes that zipfile decompresses at a time. Only deflate's output is limited to as many; 256 bytes
# of deflate64 expand to 7.3 MiB at most, 4096 bytes of LZMA to some 30 MiB. bzip2 is not left to
# zipfile: 4096 bytes of it, which is zipfile's least, expand to GiB.
_STEPS = {
    records.METHOD_DEFLATE: 1 << 18,
    records.METHOD_DEFLATE64: 256,
    records.METHOD_BZIP2: 1 << 18,
    records.METHOD_LZMA: 4096,
}
_ENCRYPTED = records.FLAG_ENCRYPTED | records.FLAG_STRONG_ENCRYPTION | records.FLAG_MASKED_HEADER
_PATCHED = 1 << 5  # 4.4.4: the data are a patch of other data
_SECOND_DIRECTORY = re.compile(rb"PK(?:\x01\x02|\x05\x06|\x06\x06|\x06\x07)")
_HERE = "./"  # before each name if bsdtar packs the current folder
# What zipfile and the decompressors raise for damaged files; nothing else is read here.
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    ArithmeticError,
    EOFError,
    OSError,
    RuntimeError,
    ValueError,
)


def read_zip(view: memoryview, temporary: str | None) -> tuple[dict[str, ZippedFile], list[str]]:
    """Reads the directory of a zip; inflates no data.

    Args:
        view: The bytes of the whole file.
        temporary: Directory for inflated files; None for the system's.

    Returns:
        The files by name, in the order of their data, without folders; and a sentence for each run
        of unused bytes.

    Raises:
        ArchiveFormatError: The file is no zip, is damaged, or readers could read it differently.
        UnsupportedFeatureError: The zip is split or encrypted, is compressed by another method, or
            has too many entries.
    """
    directory, count = _find_directory(view)
    try:
        reader = zipfile.ZipFile(_Reader(view))
    except _DAMAGE as error:
        raise _translated(error) from None
    entries = sorted(reader.infolist(), key=lambda entry: entry.header_offset)
    if len(entries) != count:
        raise ArchiveFormatError(f"expected {count} directory records, found {len(entries)}")
    files: dict[str, ZippedFile] = {}
    names: dict[bytes, str] = {}
    dropped: list[str] = []
    end = nbytes = slack = 0
    for entry in entries:
        with _naming(entry.orig_filename):  # as zipfile decoded it, and not yet changed it
            name = _name(entry)
            _require_supported(entry, is_folder=name.endswith("/"))
            folded = name.encode().lower()  # of ASCII alone, as file systems may do
            if folded in names:
                raise ArchiveFormatError(
                    f"the earlier entry {names[folded]!r} has the same name, ignoring case"
                )
            start = entry.header_offset
            if start < end or (start > 0 and not names):
                expected = f"{end} or later, after the entry before it" if names else "0"
                raise ArchiveFormatError(
                    f"its local header is at offset {start}, not at offset {expected}: entries "
                    "overlap, or bytes were put before them"
                )
            names[folded] = name
            data_offset = _data_offset(view[:directory], entry)
            data_end = data_offset + entry.compress_size
            if data_end > directory:
                raise ArchiveFormatError(
                    f"expected its data to end at or before offset {directory}, where the "
                    f"directory begins, found {entry.compress_size} bytes at offset {data_offset}"
                )
        dropped += _unused(view, end, start, slack, f"before entry {name!r}")
        end = data_end
        slack = _MAX_DESCRIPTOR_NBYTES if entry.flag_bits & records.FLAG_DATA_DESCRIPTOR else 0
        nbytes += entry.file_size
        if not name.endswith("/"):
            crc32, compressed = entry.CRC, view[data_offset:end]
            del entry.CRC  # so that zipfile does not compare it, too
            files[name] = ZippedFile(reader, entry, name, crc32, compressed, temporary)
    if nbytes >= _MAX_NBYTES:
        raise ArchiveFormatError(
            f"all entries together have {_MAX_NBYTES} bytes or more, which is too many"
        )
    dropped += _unused(view, end, directory, slack, "before the central directory")
    return files, dropped


def _find_directory(view: memoryview) -> tuple[int, int]:
    """Offset of the directory and number of its records; their size is within limits."""
    tail_offset = max(0, len(view) - EndRecord.SIZE - records.UINT16_MAX)
    tail = bytes(view[tail_offset:])
    position = tail.rfind(EndRecord.SIGNATURE)  # as zipfile does
    end = EndRecord.unpack(tail, position)
    if end is None:
        raise ArchiveFormatError(
            f"there is no end record in the last {len(tail)} bytes of {len(view)}: the file is "
            f"not a zip, or its end is missing: {INTERRUPTED}"
        )
    comment_nbytes = len(tail) - position - EndRecord.SIZE
    if end.comment_size != comment_nbytes:
        raise ArchiveFormatError(
            f"expected a comment of {end.comment_size} bytes after the end record, found "
            f"{comment_nbytes} bytes"
        )
    if _SECOND_DIRECTORY.search(tail, position + EndRecord.SIZE):
        raise ArchiveFormatError("the comment has the signature of another directory")
    last: EndRecord | Zip64EndRecord = end
    directory_end = tail_offset + position
    locator = Zip64Locator.unpack(view, directory_end - Zip64Locator.SIZE)
    if locator is not None:
        directory_end -= Zip64Locator.SIZE + Zip64EndRecord.SIZE
        last = _zip64_end_record(view, directory_end, locator, end)
    size, offset, count = last.directory_size, last.directory_offset, last.entry_count
    if (last.disk, last.directory_disk, last.disk_entry_count) != (0, 0, count):
        raise UnsupportedFeatureError(
            f"the file is one part of a split zip: disk {last.disk}, and "
            f"{last.disk_entry_count} of {count} directory records on it"
        )
    if offset + size != directory_end:
        raise ArchiveFormatError(
            f"expected the directory directly before the end records at offset {directory_end}, "
            f"found {size} bytes at offset {offset}: bytes were put before or between them; unzip "
            "it and convert the directory"
        )
    if size < DirectoryRecord.SIZE * count:
        raise ArchiveFormatError(
            f"expected at least {DirectoryRecord.SIZE} bytes for each of {count} directory "
            f"records, found {size} bytes in all"
        )
    if count > MAX_ENTRIES or size > _MAX_DIRECTORY_NBYTES:
        raise UnsupportedFeatureError(
            f"expected at most {MAX_ENTRIES} entries and {_MAX_DIRECTORY_NBYTES} bytes of "
            f"directory, found {count} and {size}; unzip it and convert the directory"
        )
    return offset, count


def _zip64_end_record(
    view: memoryview, offset: int, locator: Zip64Locator, end: EndRecord
) -> Zip64EndRecord:
    record = Zip64EndRecord.unpack(view, offset)
    if record is None or locator != (0, offset, 1):
        raise ArchiveFormatError(
            f"expected the Zip64 end record at offset {offset}, directly before its locator, found "
            f"disk {locator.record_disk} of {locator.disks} and offset {locator.record_offset} in "
            "the locator"
        )
    if record.stated_size != Zip64EndRecord.STATED_SIZE:
        raise ArchiveFormatError(
            f"expected size {Zip64EndRecord.STATED_SIZE} in the Zip64 end record, found "
            f"{record.stated_size}"
        )
    saturated = (*[records.SATURATED_16] * 4, *[records.SATURATED_32] * 2)
    for name, value, limit in zip(EndRecord._fields, end, saturated, strict=False):
        expected = getattr(record, name)
        if value not in (limit, expected):
            raise ArchiveFormatError(
                f"expected {name.replace('_', ' ')} {expected} in the end record, as in the Zip64 "
                f"end record, found {value}"
            )
    return record


def _unused(view: memoryview, start: int, end: int, slack: int, where: str) -> list[str]:
    """A sentence about bytes that belong to no entry, unless a data descriptor explains them."""
    second = _SECOND_DIRECTORY.search(view[start:end])
    if second is not None:
        raise ArchiveFormatError(
            f"unused bytes at offset {start + second.start()}, {where}, have the signature of "
            "another directory"
        )
    if end - start <= slack:
        return []
    return [
        f"{end - start} bytes at offset {start} {where} are left out: the directory lists no entry "
        "there"
    ]


def _name(entry: zipfile.ZipInfo) -> str:
    name = entry.orig_filename
    if len(name.encode()) > MAX_PATH_SIZE:
        raise ArchiveFormatError(
            f"expected a name of at most {MAX_PATH_SIZE} bytes, found {len(name.encode())}"
        )
    if not (name.isascii() or entry.flag_bits & records.FLAG_UTF8):
        # Info-ZIP's zip and the Finder of macOS write UTF-8 without marking it.
        raise ArchiveFormatError(
            "the name is neither in ASCII nor marked as UTF-8; make the zip with a tool that marks "
            "names, such as 7z or Python's zipfile"
        )
    path = name.removeprefix(_HERE)
    if name != _HERE and not is_plain_path(path.removesuffix("/")):
        raise ArchiveFormatError(f"the name is not {PLAIN_PATH}")
    return path or name


def _require_supported(entry: zipfile.ZipInfo, *, is_folder: bool) -> None:
    if entry.flag_bits & (_ENCRYPTED | _PATCHED):
        raise UnsupportedFeatureError(
            "expected an entry that is neither encrypted nor a patch, found flags "
            f"{entry.flag_bits:#06x}; decrypt the zip first"
        )
    method = entry.compress_type
    if method not in (records.METHOD_STORED, *_STEPS):
        raise UnsupportedFeatureError(
            "expected it stored or compressed by deflate, deflate64, bzip2 or LZMA, found method "
            f"{method}; unzip it and convert the directory"
        )
    if method == records.METHOD_STORED and entry.compress_size != entry.file_size:
        raise ArchiveFormatError(records.unequal_sizes(entry.compress_size, entry.file_size))
    kind = stat.S_IFMT(entry.external_attr >> records.UNIX_MODE_SHIFT)
    # zip and 7z store the type of a pipe if they read the data from a pipe.
    if kind not in (0, stat.S_IFDIR if is_folder else stat.S_IFREG, stat.S_IFIFO):
        raise ArchiveFormatError(
            "expected a regular file, or a folder whose name ends with a slash, found attributes "
            f"{entry.external_attr:#010x}, such as of a link; replace it by a file"
        )
    if is_folder and entry.file_size:
        raise ArchiveFormatError(
            f"expected the entry of a folder to be empty, found {entry.file_size} bytes"
        )


def _data_offset(before: memoryview, entry: zipfile.ZipInfo) -> int:
    """Offset of an entry's data, after its local header; `before` ends before the directory."""
    header = LocalHeader.unpack(before, entry.header_offset)
    if header is None:
        raise ArchiveFormatError(
            f"there is no local header at offset {entry.header_offset}, before the directory at "
            f"{len(before)}"
        )
    for what, expected, value in (
        ("name", entry.orig_filename.encode(), header.name),
        ("flags", entry.flag_bits, header.flags),
        ("method", entry.compress_type, header.method),
    ):
        if value != expected:
            raise ArchiveFormatError(
                f"expected {what} {expected!r} in its local header, as in the directory, found "
                f"{value!r}"
            )
    return entry.header_offset + header.packed_size


class ZippedFile(File):
    """A file in a zip, inflated when it is read.

    A compressed file is inflated in pieces if all of it is read; if a part of it is read, it is
    inflated to a temporary file once, which then gives all parts.

    Attributes:
        path: The name of the entry.
        size: Size of the inflated data in bytes, as the directory states.
        crc32: CRC-32 of the inflated data, as the directory states.
    """

    crc32: int

    def __init__(
        self,
        reader: zipfile.ZipFile,
        entry: zipfile.ZipInfo,
        name: str,
        crc32: int,
        compressed: memoryview,
        temporary: str | None,
    ) -> None:
        self.path, self.size, self.crc32 = name, entry.file_size, crc32
        self.identity = id(self)
        self._reader, self._entry, self._compressed = reader, entry, compressed
        self._step = _STEPS.get(entry.compress_type)  # None for a stored entry
        self._temporary = temporary
        self._whole: memoryview | None = None
        self._lock = Lock()

    def pieces(self, offset: int, size: int) -> Iterator[bytes | memoryview]:
        """Yields a range in pieces; of the whole, size and CRC-32 are compared after the last."""
        if (offset, size) == (0, self.size):
            return self._compared()
        return pieces(self.view(offset, size))

    def read(self, offset: int, size: int) -> bytes:
        """See `File.read`; the whole is inflated without a temporary file."""
        if (offset, size) == (0, self.size):
            return b"".join(self._compared())
        return bytes(self.view(offset, size))

    def head(self, nbytes: int) -> bytes:
        """The first bytes of the file; `nbytes` is less than that of a piece."""
        return bytes(next(self._compared(), b"")[:nbytes])

    def view(self, offset: int = 0, nbytes: int | None = None) -> memoryview:
        """A view of the stored bytes or the temporary file, after size and CRC-32 were compared."""
        with self._lock:
            if self._whole is None and self._step is None:
                Crc32.of(self._compared())
                self._whole = self._compressed
            elif self._whole is None:
                self._whole = spool(self._compared(), self.size, self._temporary)
            return self._whole[offset:][:nbytes]

    def close(self) -> None:
        """Does nothing: the zip stays open as long as there are views of it."""

    def _compared(self) -> Iterator[memoryview]:
        checksum = Crc32()
        with _naming(self.path):
            contents = (
                pieces(self._compressed) if self._step is None else self._inflated(self._step)
            )
            for piece in checksum(contents):
                if checksum.nbytes > self.size:
                    raise ArchiveFormatError(f"it inflates to more than {self.size} bytes")
                yield piece
            if checksum.nbytes != self.size:
                raise ArchiveFormatError(
                    f"expected {self.size} bytes inflated, found {checksum.nbytes}"
                )
            fault = difference((self.size, self.crc32), (checksum.nbytes, checksum.value))
            if fault is not None:
                raise ChecksumError(f"{fault}; {DAMAGED}")

    def _inflated(self, step: int) -> Iterator[memoryview]:
        try:
            with self._open(step) as opened:
                parts = iter(lambda: opened.read1(step), b"")
                while piece := b"".join(islice(parts, _PIECE_NBYTES // step)):
                    yield memoryview(piece)
        except _DAMAGE as error:
            raise _translated(error) from None

    def _open(self, step: int) -> bz2.BZ2File | zipfile.ZipExtFile:
        method = self._entry.compress_type
        if method == records.METHOD_BZIP2:
            return bz2.BZ2File(_Reader(self._compressed))
        if method == records.METHOD_DEFLATE64:
            try:
                import zipfile_deflate64  # noqa: F401 teaches zipfile the method
            except ImportError:
                raise UnsupportedFeatureError(
                    "zipfile-deflate64 is needed to read deflate64 data, but is missing: "
                    "pip install zipfile-deflate64"
                ) from None
        if method == records.METHOD_LZMA:
            dictionary_nbytes = int.from_bytes(self._compressed[5:9], "little")  # 5.8.8
            if dictionary_nbytes > _MAX_DICTIONARY_NBYTES:
                raise UnsupportedFeatureError(
                    f"expected an LZMA dictionary of at most {_MAX_DICTIONARY_NBYTES} bytes, found "
                    f"{dictionary_nbytes}"
                )
        stream = self._reader.open(self._entry)
        assert isinstance(stream, zipfile.ZipExtFile)
        stream.MIN_READ_SIZE = step
        return stream


class _Reader(io.RawIOBase):
    """Bytes as a file."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._position = 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        offset += (0, self._position, len(self._view))[whence]
        if offset < 0:
            raise OSError(f"expected an offset of 0 or more, found {offset}")
        self._position = offset
        return offset

    def read(self, size: int = -1) -> bytes:
        end = len(self._view) if size < 0 else self._position + size
        read = bytes(self._view[self._position : end])
        self._position += len(read)
        return read


def _translated(error: Exception) -> ArchiveError:
    """The error for one of `_DAMAGE`."""
    reason = str(error) or type(error).__name__
    if isinstance(error, NotImplementedError):
        return UnsupportedFeatureError(f"Python's zipfile cannot read this zip: {reason}")
    is_name = isinstance(error, UnicodeDecodeError)
    fault = "a name is not UTF-8, as its flags state" if is_name else "the zip is damaged"
    return ArchiveFormatError(f"{fault}: {reason}")


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Names the entry in an ArchiveError that the block raises."""
    try:
        yield
    except ArchiveError as error:
        error.entry = name if len(name) <= MAX_PATH_SIZE else name[:_MAX_SHOWN]
        error.args = (f"entry {error.entry!r}: {error.message}",)
        raise
