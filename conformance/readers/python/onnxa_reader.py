"""An independent reader of ONNX archives, written from the text of the specification alone.

It makes the full check: every rule of `spec/rules.toml`. It holds the central directory and all
models in memory, and reads other data in pieces.

    python3 onnxa_reader.py [--open] PATH

prints one JSON object in the form of `conformance/README.md`. With --open it only opens the
archive: it checks headers and data of models, not of other entries. Sections in comments are
sections of the specification.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
import stat
import struct
import sys
import unicodedata
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NoReturn

MODEL = b"__MODEL_PROTO"
FURTHER_MODEL = b"__MODEL_PROTO_"  # and the id
ASSETS = b"assets/"

_PIECE = 4 << 20  # bytes of data read at once; models are read whole
_MAX_ENTRIES = 262_144
_MAX_MODEL = (1 << 31) - 1
_MAX_MESSAGES = 4_194_304
_MAX_DEPTH = 100
_MAX_DIMS = 64

_FULL16 = 0xFFFF  # a field with its largest number is saturated: Zip64 has the value
_FULL32 = 0xFFFF_FFFF

_TAIL_SIZE = 65_633  # the last bytes of the file, searched for false records
_SIGNATURES_OF_END = (b"PK\5\6", b"PK\6\6", b"PK\6\7")
_FALSE_END = re.compile(
    rb"PK\x05\x06\0{4}(..)\1.{10}"  # an end record: disks 0, equal counts
    rb"|PK\x06\x07.{16}PK\x05\x06"  # a locator, then the signature of an end record
    rb"|PK\x06\x07\0{4}.{8}\x01\0{3}"  # a locator: disk 0, one disk
    rb"|PK\x06\x06\x2c\0{7}",  # a Zip64 end record: size 44
    re.DOTALL,
)

_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_RECORD = struct.Struct("<4s6H3I5H2I")
_SHARED = slice(6, 30)  # the fields of a directory record that a local header repeats
_LOCAL_SHARED = slice(4, 28)  # these fields in a local header: "version needed" to "name length"
_LOCAL_SIZE = 30
_ALIGNMENT_FIELD = struct.Struct("<3H")  # its id, the size of its data, the alignment
_ZIP64_FIELD_SIZE = 20  # of a local header
_MAX_PADDING = 32_767

_KEY = re.compile(rb"[A-Za-z_][A-Za-z0-9_]*")
_ID = re.compile(rb"[a-z][a-z0-9_]{,63}")
_BAD_IN_ASSET = re.compile(r"[\x00-\x1f\x7f-\x9f\\:;]")

# Section 8.2: bits per element in an entry, keyed by the number of the data type. An unpacked
# element has ceil(bits / 8) bytes.
_BITS = (
    dict.fromkeys((14, 11, 7, 13), 64)
    | dict.fromkeys((1, 6, 12), 32)
    | dict.fromkeys((4, 5, 10, 16), 16)
    | dict.fromkeys((2, 3, 9, 17, 18, 19, 20, 24), 8)
    | dict.fromkeys((27, 28), 6)
    | dict.fromkeys((21, 22, 23), 4)
    | dict.fromkeys((25, 26), 2)
    | {15: 128}
)
_BOOL = 9


class Refused(Exception):  # noqa: N818 - a verdict, not an error of the program
    """The file breaks a rule of the specification.

    Args:
        rule: The id of a rule that the file breaks.
        message: What was expected and what was found.
        entry: The name of the entry at fault, or None.
    """

    def __init__(self, rule: str, message: str, entry: bytes | None = None) -> None:
        super().__init__(message)
        self.rule = rule
        self.entry = None if entry is None else entry.decode("utf-8", "replace")


@dataclass(slots=True)
class Entry:
    """An entry, as its directory record describes it."""

    raw_name: bytes
    header_offset: int
    data_offset: int  # computed, section 4
    nbytes: int
    crc32: int
    shared: bytes = field(repr=False)  # the bytes that the local header repeats

    @property
    def name(self) -> str:
        """The name as text."""
        return self.raw_name.decode("utf-8", "replace")

    @property
    def is_model(self) -> bool:
        """True if the entry holds a model."""
        return self.raw_name == MODEL or self.raw_name.startswith(FURTHER_MODEL)

    @property
    def model_id(self) -> str:
        """The id of a further model; empty for the default model."""
        return self.raw_name[len(FURTHER_MODEL) :].decode()

    @property
    def is_key(self) -> bool:
        """True if the entry holds the data of a tensor."""
        return not self.is_model and not self.raw_name.startswith(ASSETS)


@dataclass(slots=True)
class Tensor:
    """An external tensor."""

    model: str  # the id of its model
    key: bytes
    name: str
    data_type: int
    dims: list[int]
    checksum: bytes | None  # the SHA-1 that the model states
    sha256: str = ""  # of the data; empty until the data is read

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.dims)


@dataclass(slots=True)
class Archive:
    """An archive that breaks none of the rules that were checked."""

    entries: list[Entry]
    tensors: list[Tensor]


def check_path(path: str | os.PathLike[str], *, is_full: bool = True) -> Archive:
    """Makes the full check of a file, or only opens it.

    Raises:
        Refused: The file breaks a rule.
        OSError: The file cannot be opened or read.
    """
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a writer.
        descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        if os.path.exists(path) and not os.path.isfile(path):  # a socket; a folder on Windows
            raise Refused(
                "FILE-1", f"expected a regular file, found another kind: {error}"
            ) from error
        raise
    try:
        status = os.fstat(descriptor)
        _expect("FILE-1", "kind of file", stat.S_IFREG, stat.S_IFMT(status.st_mode))
        with open(descriptor, "rb", closefd=False) as file:
            return _check(_Source(file, status.st_size), is_full)
    finally:
        os.close(descriptor)


def check_bytes(data: bytes, *, is_full: bool = True) -> Archive:
    """Makes the full check of an archive in memory, or only opens it.

    Raises:
        Refused: The archive breaks a rule.
    """
    return _check(_Source(io.BytesIO(data), len(data)), is_full)


def describe(archive: Archive) -> dict[str, Any]:
    """The JSON object for an accepted file."""
    return {
        "accepted": True,
        "entries": [
            {
                "name": entry.name,
                "header_offset": _json_number(entry.header_offset),
                "data_offset": _json_number(entry.data_offset),
                "nbytes": _json_number(entry.nbytes),
                "crc32": entry.crc32,
            }
            for entry in archive.entries
        ],
        "tensors": [
            {
                "model": tensor.model,
                "key": tensor.key.decode(),
                "name": tensor.name,
                "data_type": tensor.data_type,
                "dims": [_json_number(dim) for dim in tensor.dims],
            }
            | ({"sha256": tensor.sha256} if tensor.sha256 else {})
            for tensor in archive.tensors
        ],
    }


def refusal(error: Refused) -> dict[str, Any]:
    """The JSON object for a refused file."""
    return {
        "accepted": False,
        "rule": error.rule,
        "entry": error.entry,
        "message": str(error),
    }


def _json_number(value: int) -> int | str:
    """The number as int if it is below 2^53, otherwise as a string of digits."""
    return value if value < 1 << 53 else str(value)


def _expect(
    rule: str, what: str, expected: object, found: object, entry: bytes | None = None
) -> None:
    """Refuses the file if `found` is not what is expected."""
    if found != expected:
        _refuse(rule, what, f"{expected!r}", found, entry)


def _refuse(
    rule: str, what: str, expected: str, found: object, entry: bytes | None = None
) -> NoReturn:
    raise Refused(rule, f"{what}: expected {expected}, found {found!r:.200}", entry)


class _Source:
    """A file of known size, read at offsets."""

    def __init__(self, file: io.BufferedIOBase, size: int) -> None:
        self._file = file
        self.size = size

    def read(self, offset: int, size: int) -> bytearray:
        """Reads `size` bytes."""
        data = bytearray(size)
        self._fill(offset, memoryview(data))
        return data

    def pieces(self, entry: Entry, buffer: bytearray) -> Iterator[memoryview]:
        """Reads the data of an entry into a buffer; each piece is valid until the next one."""
        view = memoryview(buffer)
        end = entry.data_offset + entry.nbytes
        for offset in range(entry.data_offset, end, len(buffer)):
            piece = view[: min(len(buffer), end - offset)]
            self._fill(offset, piece)
            yield piece

    def _fill(self, offset: int, view: memoryview) -> None:
        self._file.seek(offset)
        if self._file.readinto(view) != len(view):
            raise OSError("the file became shorter while it was read")


def _check(source: _Source, is_full: bool) -> Archive:
    """Opens the archive roughly in the order of section 9.2; a full check then reads the rest."""
    directory, tail = _read_end(source)
    entries = _read_directory(source, directory)
    _check_names(entries)
    _check_models(entries)
    _lay_out(entries, directory.offset)
    _check_false_ends(tail, source.size, entries[-1].header_offset, directory)
    models = [entry for entry in entries if entry.is_model]
    tensors = _check_tensors(_parse_models(models, _read_models(source, models)), entries)
    if is_full:
        _check_rest(source, entries, tensors)
    return Archive(entries, tensors)


def _check_rest(source: _Source, entries: list[Entry], tensors: list[Tensor]) -> None:
    """Checks the local headers and the data of all entries except the models."""
    by_key: dict[bytes, list[Tensor]] = {}
    for tensor in tensors:
        by_key.setdefault(tensor.key, []).append(tensor)
    rest = [entry for entry in entries if not entry.is_model]
    for entry in rest:
        _check_header(source, entry)
    buffer = bytearray(min(_PIECE, source.size))
    for entry in rest:
        _check_data(source, entry, by_key.get(entry.raw_name, []), buffer)


# Section 5: zip structure


@dataclass(slots=True)
class _Directory:
    """The central directory as the end records describe it."""

    count: int
    size: int
    offset: int

    @property
    def end(self) -> int:
        """Offset of the end records."""
        return self.offset + self.size


def _read_directory(source: _Source, directory: _Directory) -> list[Entry]:
    """Reads the central directory. The data offsets are not known yet."""
    if directory.count > _MAX_ENTRIES:
        _refuse("ZIP-4", "records of the directory", f"at most {_MAX_ENTRIES}", directory.count)
    if not directory.count * 46 <= directory.size <= directory.count * 1098:
        expected = f"46 to 1098 bytes for each of {directory.count} records"
        _refuse("ZIP-4", "size of the directory", expected, directory.size)
    if directory.count == 0:
        _refuse("MODEL-1", "records of the directory", "1 or more", 0)
    data = bytes(source.read(directory.offset, directory.size))
    entries = []
    position = 0
    for _ in range(directory.count):
        entry, position = _parse_record(data, position)
        entries.append(entry)
    _expect("ZIP-4", "end of the last record", directory.size, position)
    return entries


def _read_end(source: _Source) -> tuple[_Directory, bytes]:
    """Reads the end of the file, and the end records in it."""
    size = source.size
    if size < _END.size:
        _refuse("ZIP-2", "size of the file", f"at least {_END.size}", size)
    tail_size = min(size, _TAIL_SIZE)
    tail = bytes(source.read(size - tail_size, tail_size))
    end, before = tail[-_END.size :], tail[: -_END.size]
    signature, disk, directory_disk, *values, comment = _END.unpack(end)
    _expect("ZIP-2", "signature of the end record", b"PK\5\6", signature)
    _expect("ZIP-2", "length of the comment", 0, comment)
    _expect("ZIP-3", "disks in the end record", (0, 0), (disk, directory_disk))

    full = [_FULL16, _FULL16, _FULL32, _FULL32]
    saturated = [value == largest for value, largest in zip(values, full, strict=True)]
    end_of_directory = size - _END.size
    if any(saturated):
        _expect("ZIP64-1", "values of the end record", full, values)
        values = _read_end64(before[-_END64.size - _LOCATOR.size :], size)
        end_of_directory -= _END64.size + _LOCATOR.size
    elif before[-_LOCATOR.size :].startswith(b"PK\6\7"):
        _refuse("ZIP64-1", "values of the end record after a Zip64 locator", f"{full}", values)

    on_disk, count, directory_size, offset = values
    _expect("ZIP-4", "records on this disk", count, on_disk)
    _expect("ZIP-5", "end of the directory", end_of_directory, offset + directory_size)
    return _Directory(count, directory_size, offset), tail


def _read_end64(before: bytes, file_size: int) -> list[int]:
    """Reads both counts, the size and the offset from the Zip64 end record.

    Args:
        before: The bytes before the end record: the Zip64 end record and its locator.
        file_size: The size of the file.
    """
    if len(before) != _END64.size + _LOCATOR.size:
        _refuse("ZIP64-1", "bytes before the end record", "76 or more (Zip64 records)", len(before))
    signature, disk, offset, disks = _LOCATOR.unpack(before[_END64.size :])
    _expect("ZIP64-1", "signature of the Zip64 locator", b"PK\6\7", signature)
    _expect("ZIP-3", "disk and number of disks in the Zip64 locator", (0, 1), (disk, disks))
    _expect("ZIP64-3", "offset in the Zip64 locator", file_size - 98, offset)
    signature, rest, _, needed, disk, directory_disk, *values = _END64.unpack_from(before)
    _expect("ZIP64-3", "signature of the Zip64 end record", b"PK\6\6", signature)
    _expect("ZIP64-2", "size and version of the Zip64 end record", (44, 45), (rest, needed))
    _expect("ZIP-3", "disks in the Zip64 end record", (0, 0), (disk, directory_disk))
    if values[1] < _FULL16 and max(values[2:]) < _FULL32:
        _refuse("ZIP64-1", "Zip64 end record", "a value that needs it", values)
    return list(values)


def _parse_record(data: bytes, position: int) -> tuple[Entry, int]:
    """Reads a directory record; returns the entry and the end of the record."""
    name_start = position + _RECORD.size
    if name_start > len(data):
        _refuse("ZIP-4", "directory", "a record", f"{len(data) - position} bytes")
    signature, *rest = _RECORD.unpack_from(data, position)
    made_by, needed, flags, method, _, _, crc, compressed, size, *rest = rest
    name_length, extra_length, comment_length, disk, internal, external, offset = rest
    _expect("ZIP-4", "signature of a directory record", b"PK\1\2", signature)
    extra_start = name_start + name_length
    name = data[name_start:extra_start]
    end = extra_start + extra_length
    if end > len(data):
        _refuse("ZIP-4", "end of a record", f"at most {len(data)}", end, name)
    _check_name(name)
    _expect("ZIP-3", "disk", 0, disk, name)
    _expect("ZIP-9", "flags", 0 if name.isascii() else 0x0800, flags, name)
    _expect("ZIP-8", "compression method", 0, method, name)
    _expect("ZIP-8", "compressed size", size, compressed, name)
    if needed not in (10, 20, 45):
        _refuse("ZIP-10", "version needed", "10, 20 or 45", needed, name)
    _expect("ZIP-11", 'system in "version made by"', 3, made_by >> 8, name)
    if external >> 28 not in (0x0, 0x8) or external & 0x0E00_FFD8:
        _refuse("ZIP-11", "external attributes", "a regular file", hex(external), name)
    _expect("ZIP-11", "internal attributes", 0, internal, name)
    _expect("ZIP-12", "length of the comment", 0, comment_length, name)

    zip64 = data[extra_start:end]
    if zip64 or _FULL32 in (size, offset):
        size, compressed, offset = _parse_zip64(zip64, [size, compressed, offset], name)
        _expect("ZIP-10", "version needed with a Zip64 field", 45, needed, name)
        _expect("ZIP-8", "compressed size in the Zip64 field", size, compressed, name)
    shared = data[position:name_start][_SHARED]
    return Entry(name, offset, -1, size, crc, shared), end


def _parse_zip64(extra: bytes, values: list[int], name: bytes) -> list[int]:
    """Replaces the saturated values of a directory record by the values of the Zip64 field."""
    wanted = [index for index, value in enumerate(values) if value == _FULL32]
    if not wanted:
        _refuse("ZIP-13", "extra fields of the directory record", "none", extra, name)
    if len(extra) < 4 or struct.unpack_from("<2H", extra) != (1, len(extra) - 4):
        _refuse("ZIP-13", "extra fields of the directory record", "a Zip64 field", extra, name)
    _expect("ZIP64-4", "size of the Zip64 field", 8 * len(wanted), len(extra) - 4, name)
    for index, (value,) in zip(wanted, struct.iter_unpack("<Q", extra[4:]), strict=True):
        if value < _FULL32:
            _refuse("ZIP64-4", "value in the Zip64 field", f"{_FULL32} or more", value, name)
        values[index] = value
    return values


def _lay_out(entries: list[Entry], directory_offset: int) -> None:
    """Computes each data offset from the header offset of the next entry."""
    _expect("ZIP-1", "first header offset", 0, entries[0].header_offset, entries[0].raw_name)
    following = [entry.header_offset for entry in entries[1:]]
    for entry, next_offset in zip(entries, [*following, directory_offset], strict=True):
        entry.data_offset = next_offset - entry.nbytes
        space = entry.data_offset - entry.header_offset
        least = _unpadded(entry)
        if not least <= space <= least + _MAX_PADDING:
            expected = f"{least} to {least + _MAX_PADDING} bytes"
            _refuse("ZIP-6", "space for the local header", expected, space, entry.raw_name)
        rest = entry.data_offset % 64
        _expect("ALIGN-1", "data offset modulo 64", 0, rest, entry.raw_name)


def _check_false_ends(
    tail: bytes, file_size: int, last_header_offset: int, directory: _Directory
) -> None:
    """Checks ZIP-16 in the last bytes, the last header offset and the offset of the directory."""
    start = file_size - len(tail)
    found = _FALSE_END.search(tail)
    if found and start + found.start() < directory.end:
        what = f"at byte {start + found.start()}"
        _refuse("ZIP-16", what, "no false record", found.group())
    for what, offset in (
        ("header offset of the last entry", last_header_offset),
        ("offset of the directory", directory.offset),
    ):
        data = offset.to_bytes(4 if offset < _FULL32 else 8, "little")
        if any(signature in data for signature in _SIGNATURES_OF_END):
            _refuse("ZIP-16", what, "no signature of the end records", data)


def _unpadded(entry: Entry) -> int:
    """The size of a local header without padding."""
    zip64 = 0 if entry.nbytes < _FULL32 else _ZIP64_FIELD_SIZE
    return _LOCAL_SIZE + len(entry.raw_name) + zip64 + _ALIGNMENT_FIELD.size


def _check_header(source: _Source, entry: Entry) -> None:
    """Compares the local header of an entry with its directory record."""
    name = entry.raw_name
    size = entry.data_offset - entry.header_offset
    header = bytes(source.read(entry.header_offset, size))
    extra_start = _LOCAL_SIZE + len(name)
    _expect("ZIP-7", "signature of the local header", b"PK\3\4", header[:4], name)
    _expect("ZIP-7", "fields of the local header", entry.shared, header[_LOCAL_SHARED], name)
    _expect("ZIP-7", "name in the local header", name, header[_LOCAL_SIZE:extra_start], name)
    extra_length = int.from_bytes(header[28:30], "little")
    _expect("ZIP-7", "length of the extra fields", size - extra_start, extra_length, name)

    extra = header[extra_start:]
    if entry.nbytes >= _FULL32:
        zip64, extra = extra[:_ZIP64_FIELD_SIZE], extra[_ZIP64_FIELD_SIZE:]
        _expect("ZIP-14", "id of the first extra field", b"\1\0", zip64[:2], name)
        expected = struct.pack("<2H2Q", 1, 16, entry.nbytes, entry.nbytes)
        _expect("ZIP64-5", "Zip64 field of the local header", expected, zip64, name)
    identifier, length, alignment = _ALIGNMENT_FIELD.unpack_from(extra)
    _expect("ZIP-14", "id of the alignment field", 0xD935, identifier, name)
    _expect("ZIP-14", "size of the alignment field", len(extra) - 4, length, name)
    if not 64 <= alignment <= 32_768 or alignment & (alignment - 1):
        _refuse("ALIGN-2", "alignment", "a power of two from 64 to 32768", alignment, name)
    _expect("ALIGN-2", "data offset modulo alignment", 0, entry.data_offset % alignment, name)
    padding = extra[_ALIGNMENT_FIELD.size :]
    shortest = -(entry.header_offset + _unpadded(entry)) % alignment
    _expect("ALIGN-3", "length of the padding", shortest, len(padding), name)
    if any(padding):
        _refuse("ALIGN-3", "padding", "zeros", padding.strip(b"\0"), name)


# Section 6: names


def _check_name(name: bytes) -> None:
    """Checks a name by itself."""
    try:
        text = name.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refused("NAME-1", f"name: expected UTF-8, found {error}", name) from error
    if name == MODEL:
        return
    if name.startswith(FURTHER_MODEL):
        model_id = name[len(FURTHER_MODEL) :]
        if not _ID.fullmatch(model_id):
            _refuse("MODEL-4", "id of a model", _ID.pattern.decode(), model_id, name)
    elif name.startswith(b"__"):
        expected = "the name of a model (later versions of the format may use other names)"
        _refuse("VERSION-1", "name that begins with two underscores", expected, name, name)
    elif name.startswith(ASSETS):
        _check_asset_name(name, text)
    else:
        _check_key(name)


def _check_names(entries: list[Entry]) -> None:
    """Checks that no two names collide in a file system."""
    # With NUL in place of "/", sorting puts the names in a folder directly after the folder's name.
    folded = sorted(entry.raw_name.lower().replace(b"/", b"\0") for entry in entries)
    for first, second in pairwise(folded):
        if second == first or second.startswith(first + b"\0"):
            name = second.replace(b"\0", b"/")
            other = first.replace(b"\0", b"/")
            _refuse(
                "NAME-2",
                "name under down-casing",
                f"a name that does not collide with {other!r}",
                name,
                name,
            )


def _check_models(entries: list[Entry]) -> None:
    """Checks positions and sizes of the models."""
    _expect("MODEL-1", "last entry", MODEL, entries[-1].raw_name, entries[-1].raw_name)
    further = sorted(entry.raw_name for entry in entries[:-1] if entry.is_model)
    for name, entry in zip(further, entries[-1 - len(further) : -1], strict=True):
        _expect("MODEL-4", "next model in ascending order", name, entry.raw_name, entry.raw_name)
    for entry in entries:
        if entry.is_model and entry.nbytes > _MAX_MODEL:
            expected = f"at most {_MAX_MODEL}"
            _refuse("MODEL-2", "size of the model", expected, entry.nbytes, entry.raw_name)


def _check_asset_name(name: bytes, text: str) -> None:
    if len(name) > 1024:
        _refuse("ASSET-1", "length of the name", "at most 1024 bytes", len(name), name)
    if bad := _BAD_IN_ASSET.search(text):
        expected = "no control character, backslash, colon or semicolon"
        _refuse("ASSET-1", "path of the asset", expected, bad.group(), name)
    for character in text:
        if unicodedata.category(character) == "Cn":
            _refuse("ASSET-1", "path of the asset", "assigned code points", character, name)
    if not unicodedata.is_normalized("NFC", text):
        _refuse("ASSET-1", "name", "Normalization Form C", name, name)
    for component in name.split(b"/"):
        if component in (b".", b"..") or not 1 <= len(component) <= 255:
            expected = "1 to 255 bytes, not . and .."
            _refuse("ASSET-1", "component of the path", expected, component, name)


def _check_key(name: bytes) -> None:
    if len(name) > 255:
        _refuse("KEY-1", "length of the key", "at most 255 bytes", len(name), name)
    if not _KEY.fullmatch(name):
        _refuse("KEY-1", "key", _KEY.pattern.decode(), name, name)
    if name.lower() == b"assets":
        _refuse("KEY-1", "key", "not the word assets", name, name)


# Section 7: the models, in the encoding of Protocol Buffers


class _Sink:
    """Receives the fields of one message. This base class ignores all but nested messages."""

    __slots__ = ("found",)

    def __init__(self, found: list[_TensorProto]) -> None:
        self.found = found  # the tensors of the model that have to be checked

    def number(self, tag: int, value: int) -> None:
        """Takes the value of a varint, or 0 in place of a number of fixed width."""

    def span(self, tag: int, value: memoryview) -> None:
        """Takes a string, bytes, or packed numbers."""

    def child(self, number: int, field: _Field) -> _Sink | None:
        """The sink for a nested message; None if only messages within that message are of use."""
        return field.sink(self.found) if field.sink else None


class _Merging(_Sink):
    """Uses one sink for all occurrences of a field that is not repeated, and so merges them."""

    __slots__ = ("single",)

    def __init__(self, found: list[_TensorProto]) -> None:
        super().__init__(found)
        self.single: dict[int, _Sink | None] = {}

    def child(self, number: int, field: _Field) -> _Sink | None:
        if field.repeated or field.sink is None:
            return super().child(number, field)
        if number not in self.single:
            self.single[number] = field.sink(self.found)
        return self.single[number]


class _ModelProto(_Sink):
    """Records the top-level fields that MODEL-3 requires."""

    __slots__ = ("graphs", "has_ir_version")

    def __init__(self, found: list[_TensorProto]) -> None:
        super().__init__(found)
        self.has_ir_version = False
        self.graphs = 0

    def number(self, tag: int, value: int) -> None:
        if tag == 1 << 3:
            self.has_ir_version = True

    def child(self, number: int, field: _Field) -> _Sink | None:
        if number == 7:
            self.graphs += 1
        return super().child(number, field)


class _Pair(_Sink):
    """A StringStringEntryProto of external_data."""

    __slots__ = ("key", "value")

    def __init__(self, found: list[_TensorProto]) -> None:
        super().__init__(found)
        self.key = self.value = memoryview(b"")

    def span(self, tag: int, value: memoryview) -> None:
        if tag == 1 << 3 | 2:
            self.key = value
        elif tag == 2 << 3 | 2:
            self.value = value


class _TensorProto(_Sink):
    """A tensor; adds itself to `found` once a field shows that it may be external."""

    __slots__ = ("data_type", "dims", "external", "holds_data", "is_found", "name", "pairs")

    # tags of unpacked elements: float_data, int32_data, int64_data, double_data, uint64_data
    _ELEMENTS = frozenset((4 << 3 | 5, 5 << 3, 7 << 3, 10 << 3 | 1, 11 << 3))
    _PACKED = frozenset(number << 3 | 2 for number in (4, 5, 7, 10, 11))
    _STRING_DATA_RAW_DATA = (6 << 3 | 2, 9 << 3 | 2)

    def __init__(self, found: list[_TensorProto]) -> None:
        super().__init__(found)
        self.dims: list[int] = []  # at most one more than a tensor may have
        self.data_type = 0
        self.name = memoryview(b"")
        self.external = False
        self.pairs: list[_Pair] = []  # at most one more than DATA-4 permits
        self.holds_data = False
        self.is_found = False

    def number(self, tag: int, value: int) -> None:
        if tag == 1 << 3:
            self._add_dim(value)
        elif tag == 2 << 3:
            self.data_type = value & _FULL32
        elif tag == 14 << 3:
            if value & _FULL32 == 1:
                self._be_found()
                self.external = True
            elif value & _FULL32 == 0:
                self.external = False
        elif tag in self._ELEMENTS:
            self.holds_data = True

    def span(self, tag: int, value: memoryview) -> None:
        if tag == 8 << 3 | 2:
            self.name = value
        elif tag == 1 << 3 | 2:
            position = 0
            while position < len(value) and len(self.dims) <= _MAX_DIMS:
                dim, position = _varint(value, position, len(value))
                self._add_dim(dim)
        elif tag in self._STRING_DATA_RAW_DATA or (tag in self._PACKED and len(value)):
            self.holds_data = True

    def child(self, number: int, field: _Field) -> _Sink | None:
        if number == 13:
            self._be_found()
            pair = _Pair(self.found)
            if len(self.pairs) < 5:
                self.pairs.append(pair)
            return pair
        if number == 3:  # segment
            self.holds_data = True
        return None

    def _be_found(self) -> None:
        if not self.is_found:
            self.is_found = True
            self.found.append(self)

    def _add_dim(self, value: int) -> None:
        if len(self.dims) <= _MAX_DIMS:
            self.dims.append(value - (1 << 64) if value >> 63 else value)


# The fields of onnx.proto that hold messages or repeated numbers; "*" marks repeated fields. All
# other fields are read without a schema.
_SCHEMA: dict[str, str] = {
    "ModelProto": (
        "7 GraphProto, 8 OperatorSetIdProto*, 14 StringStringEntryProto*, "
        "20 TrainingInfoProto*, 25 FunctionProto*, 26 DeviceConfigurationProto*"
    ),
    "GraphProto": (
        "1 NodeProto*, 5 TensorProto*, 11 ValueInfoProto*, 12 ValueInfoProto*, "
        "13 ValueInfoProto*, 14 TensorAnnotation*, 15 SparseTensorProto*, "
        "16 StringStringEntryProto*"
    ),
    "NodeProto": "5 AttributeProto*, 9 StringStringEntryProto*, 10 NodeDeviceConfigurationProto*",
    "AttributeProto": (
        "5 TensorProto, 6 GraphProto, 7 fixed32*, 8 varint*, 10 TensorProto*, "
        "11 GraphProto*, 14 TypeProto, 15 TypeProto*, 22 SparseTensorProto, "
        "23 SparseTensorProto*"
    ),
    "FunctionProto": (
        "7 NodeProto*, 9 OperatorSetIdProto*, 11 AttributeProto*, 12 ValueInfoProto*, "
        "14 StringStringEntryProto*"
    ),
    "TrainingInfoProto": (
        "1 GraphProto, 2 GraphProto, 3 StringStringEntryProto*, 4 StringStringEntryProto*"
    ),
    "TensorProto": (
        "1 varint*, 3 Segment, 4 fixed32*, 5 varint*, 7 varint*, 10 fixed64*, 11 varint*, "
        "13 StringStringEntryProto*, 16 StringStringEntryProto*"
    ),
    "SparseTensorProto": "1 TensorProto, 2 TensorProto, 3 varint*",
    "ValueInfoProto": "2 TypeProto, 4 StringStringEntryProto*",
    "TypeProto": "1 Tensor, 4 Sequence, 5 Map, 7 Opaque, 8 SparseTensor, 9 Optional",
    "Tensor": "2 TensorShapeProto",
    "Sequence": "1 TypeProto",
    "Map": "2 TypeProto",
    "Optional": "1 TypeProto",
    "SparseTensor": "2 TensorShapeProto",
    "Opaque": "",
    "TensorShapeProto": "1 Dimension*",
    "Dimension": "",
    "TensorAnnotation": "2 StringStringEntryProto*",
    "NodeDeviceConfigurationProto": "2 ShardingSpecProto*",
    "ShardingSpecProto": "2 varint*, 3 IntIntListEntryProto*, 4 ShardedDimProto*",
    "IntIntListEntryProto": "2 varint*",
    "ShardedDimProto": "2 SimpleShardedDimProto*",
    "SimpleShardedDimProto": "",
    "DeviceConfigurationProto": "",
    "OperatorSetIdProto": "",
    "Segment": "",
    "StringStringEntryProto": "",
}
_SINKS: dict[str, type[_Sink]] = {
    "AttributeProto": _Merging,
    "SparseTensorProto": _Merging,
    "TensorProto": _TensorProto,
}
_VARINT, _FIXED64, _LENGTH, _START_GROUP, _END_GROUP, _FIXED32 = range(6)  # wire types
_NUMBERS = {"varint": _VARINT, "fixed32": _FIXED32, "fixed64": _FIXED64}


@dataclass(slots=True)
class _Field:
    """A field of a message in the schema."""

    repeated: bool
    numbers: int | None  # the wire type of its numbers, or None if it holds messages
    fields: dict[int, _Field]  # the fields of its messages
    sink: type[_Sink] | None  # receives its messages


def _compile_schema() -> dict[int, _Field]:
    """The fields of ModelProto, linked with the fields of all other messages."""
    compiled: dict[str, dict[int, _Field]] = {name: {} for name in _SCHEMA}
    for message, fields in _SCHEMA.items():
        for number, kind in re.findall(r"(\d+) (\w+\*?)", fields):
            name = kind.rstrip("*")
            compiled[message][int(number)] = _Field(
                repeated=kind.endswith("*"),
                numbers=_NUMBERS.get(name),
                fields=compiled.get(name, {}),
                sink=_SINKS.get(name),
            )
    return compiled["ModelProto"]


_MODEL_FIELDS = _compile_schema()
_TOO_LONG_VARINT = re.compile(rb"[\x80-\xff]{10}")


def _read_models(source: _Source, models: list[Entry]) -> list[bytearray]:
    """Reads all models, and checks the local header and the CRC-32 of each model."""
    read = []
    for entry in models:
        _check_header(source, entry)
        data = source.read(entry.data_offset, entry.nbytes)
        _expect("ZIP-15", "CRC-32 of the data", entry.crc32, zlib.crc32(data), entry.raw_name)
        read.append(data)
    return read


def _parse_models(models: list[Entry], read: list[bytearray]) -> list[list[_TensorProto]]:
    """Checks MODEL-3 at every level; returns the tensors to check, by model."""
    messages = 0
    found = []
    for entry, data in zip(models, read, strict=True):
        model = _ModelProto([])
        try:
            messages = _parse_messages(memoryview(data), model, messages)
        except Refused as error:
            error.entry = entry.name
            raise
        if not model.has_ir_version:
            _refuse("MODEL-3", "ir_version", "to be present", "none", entry.raw_name)
        _expect("MODEL-3", "number of graphs at the top level", 1, model.graphs, entry.raw_name)
        found.append(model.found)
    return found


def _parse_messages(view: memoryview, model: _Sink, messages: int) -> int:
    """Reads a ModelProto; returns `messages` plus the number of messages nested in it."""
    sink: _Sink | None = model
    position, end, fields = 0, len(view), _MODEL_FIELDS
    around: list[tuple[int, dict[int, _Field], _Sink | None]] = []
    while True:
        if position == end:
            if not around:
                return messages
            end, fields, sink = around.pop()
            continue
        tag = view[position]
        if tag < 0x80:
            position += 1
        else:
            tag, position = _varint(view, position, end, 5)
        number, wire_type = tag >> 3, tag & 7
        if not 0 < number < 1 << 29:
            _corrupt(position, "field number from 1 to 2^29 - 1", number)

        if wire_type != _LENGTH:
            if wire_type == _VARINT:
                value, position = _varint(view, position, end)
            elif wire_type == _START_GROUP:
                position = _skip_group(view, position, end, number, len(around))
                continue
            else:
                value, position = 0, _skip(view, position, end, wire_type)
            if sink is not None:
                sink.number(tag, value)
            continue

        if position < end and view[position] < 0x80:
            stop = position + 1 + view[position]
            position += 1
        else:
            size, position = _varint(view, position, end, 5)
            stop = position + size
        if stop > end:
            _corrupt(position, f"a field that ends at {end} or before", stop)
        field = fields.get(number)
        if field is None or field.numbers is not None:
            if field is not None:
                _check_packed(view, position, stop, field.numbers)
            if sink is not None:
                sink.span(tag, view[position:stop])
            position = stop
        else:
            messages += 1
            if messages > _MAX_MESSAGES:
                _corrupt(position, f"at most {_MAX_MESSAGES} messages in all", "more")
            around.append((end, fields, sink))
            if len(around) > _MAX_DEPTH:
                _corrupt(position, f"nesting of at most {_MAX_DEPTH}", "more")
            if sink is not None:
                sink = sink.child(number, field)
            elif field.sink is not None:
                sink = field.sink(model.found)
            end, fields = stop, field.fields


def _varint(view: memoryview, position: int, end: int, most: int = 10) -> tuple[int, int]:
    """Reads a varint of at most `most` bytes; returns its low 64 bits and its end."""
    value = shift = 0
    for byte in view[position : min(end, position + most)]:
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
    else:
        _corrupt(position, f"a varint of at most {most} bytes", "none that ends")
    return value & 0xFFFF_FFFF_FFFF_FFFF, position


def _check_packed(view: memoryview, start: int, stop: int, wire_type: int | None) -> None:
    """Checks that the numbers of a packed field are complete, and no varint is too long."""
    if wire_type == _VARINT:
        whole = start == stop or view[stop - 1] < 0x80
        whole = whole and not _TOO_LONG_VARINT.search(view, start, stop)
    else:
        whole = (stop - start) % (4 if wire_type == _FIXED32 else 8) == 0
    if not whole:
        _corrupt(start, "complete numbers in a packed field", "one that is incomplete or too long")


def _skip(view: memoryview, position: int, end: int, wire_type: int) -> int:
    """Skips a field that is no group, from the end of its tag; returns the end of the field."""
    if wire_type == _VARINT:
        return _varint(view, position, end)[1]
    if wire_type == _LENGTH:
        size, position = _varint(view, position, end, 5)
    elif wire_type in (_FIXED32, _FIXED64):
        size = 4 if wire_type == _FIXED32 else 8
    else:
        _corrupt(position, "a wire type from 0 to 5 that is allowed here", wire_type)
    if position + size > end:
        _corrupt(position, f"a field that ends at {end} or before", position + size)
    return position + size


def _skip_group(view: memoryview, position: int, end: int, number: int, depth: int) -> int:
    """Skips a group, from the end of its first tag; returns the end of the group."""
    groups = [number]
    while groups:
        if depth + len(groups) > _MAX_DEPTH:
            _corrupt(position, f"nesting of at most {_MAX_DEPTH}", "more")
        tag, position = _varint(view, position, end, 5)
        number, wire_type = tag >> 3, tag & 7
        if number >= 1 << 29:
            _corrupt(position, "field number of at most 2^29 - 1", number)
        if wire_type == _START_GROUP:
            groups.append(number)
        elif wire_type == _END_GROUP:
            if number != groups.pop():
                _corrupt(position, "the end of the group that is open", number)
        else:
            position = _skip(view, position, end, wire_type)
    return position


def _corrupt(position: int, expected: str, found: object) -> NoReturn:
    _refuse("MODEL-3", f"at byte {position} of the model", expected, found)


# Section 8: tensors


def _check_tensors(found: list[list[_TensorProto]], entries: list[Entry]) -> list[Tensor]:
    """Compares the external tensors of each model with the keys."""
    models = [entry for entry in entries if entry.is_model]
    keys = {entry.raw_name: entry for entry in entries if entry.is_key}
    tensors: list[Tensor] = []
    first_at: dict[bytes, Tensor] = {}
    for model, protos in zip(models, found, strict=True):
        locations: set[bytes] = set()
        for proto in protos:
            if not proto.external:
                name = str(proto.name, "utf-8", "replace")
                if proto.pairs:
                    _refuse("DATA-7", f"tensor {name!r}", "EXTERNAL with external_data", "DEFAULT")
                continue
            tensor = _check_tensor(model.model_id, proto, keys)
            if tensor.key in locations:
                _refuse("DATA-3", "location", "one tensor of a model", "two", tensor.key)
            locations.add(tensor.key)
            first = first_at.setdefault(tensor.key, tensor)
            expected = (first.data_type, first.dims)
            found_here = (tensor.data_type, tensor.dims)
            _expect("DATA-8", "data type and dims", expected, found_here, tensor.key)
            tensors.append(tensor)
    for key in keys:
        if key not in first_at:
            _refuse("DATA-2", "key", "to be the location of a tensor", "no tensor", key)
    return tensors


def _check_tensor(model: str, proto: _TensorProto, keys: dict[bytes, Entry]) -> Tensor:
    """Checks an external tensor and the size of its entry."""
    name = str(proto.name, "utf-8", "replace")
    what = f"tensor {name!r}"
    if proto.holds_data:
        _refuse("DATA-7", what, "no data in the model", "segment or a data field")
    pairs: dict[bytes, bytes] = {}
    for pair in proto.pairs:
        if (key := bytes(pair.key)) in pairs:
            _refuse("DATA-4", what, "a pair of external_data once", key)
        pairs[key] = bytes(pair.value)
    if "location" not in (names := {key.decode("latin-1") for key in pairs}):
        _refuse("DATA-4", what, "the pair location", sorted(names))
    if names - {"location", "offset", "length", "checksum"}:
        _refuse("DATA-4", what, "location, offset, length and checksum only", sorted(names))

    location = pairs[b"location"]
    entry = keys.get(location)
    if entry is None:
        _refuse("DATA-1", what, "the key of an entry as location", location, location)
    _expect("DATA-5", f"{what}, offset", b"0", pairs.get(b"offset", b"0"), location)
    size = str(entry.nbytes).encode()
    _expect("DATA-5", f"{what}, length", size, pairs.get(b"length", size), location)

    if proto.data_type not in _BITS:
        _refuse("TENSOR-1", f"{what}, data_type", "one of section 8.2", proto.data_type, location)
    bits = _BITS[proto.data_type]
    dims = proto.dims
    if len(dims) > _MAX_DIMS:
        _refuse("TENSOR-2", f"{what}, number of dims", f"at most {_MAX_DIMS}", "more", location)
    if any(dim < 0 for dim in dims):
        _refuse("TENSOR-2", f"{what}, dims", "0 or more", dims, location)
    if math.prod(dim for dim in dims if dim) * -(-bits // 8) >= 1 << 63:
        _refuse("TENSOR-2", f"{what}, bytes unpacked", "below 2^63", dims, location)
    tensor = Tensor(model, location, name, proto.data_type, dims, pairs.get(b"checksum"))
    _expect("TENSOR-3", f"{what}, size", -(-tensor.elements * bits // 8), entry.nbytes, location)
    return tensor


def _check_data(source: _Source, entry: Entry, tensors: list[Tensor], buffer: bytearray) -> None:
    """Reads the data of an entry once, and checks all rules about it.

    Args:
        source: The file.
        entry: The entry.
        tensors: The tensors whose data the entry holds, all of one data type and shape.
        buffer: Takes one piece at a time.
    """
    name = entry.raw_name
    crc = 0
    sha1 = hashlib.sha1(usedforsecurity=False)
    sha256 = hashlib.sha256()
    checksums = [tensor.checksum for tensor in tensors if tensor.checksum is not None]
    is_bool = any(tensor.data_type == _BOOL for tensor in tensors)
    last = 0
    for piece in source.pieces(entry, buffer):
        crc = zlib.crc32(piece, crc)
        if not tensors:
            continue
        sha256.update(piece)
        if checksums:
            sha1.update(piece)
        if is_bool and (bad := bytes(piece).translate(None, b"\0\1")):
            _refuse("TENSOR-5", "byte of a BOOL tensor", "0 or 1", bad[0], name)
        last = piece[-1]
    _expect("ZIP-15", "CRC-32 of the data", entry.crc32, crc, name)
    for checksum in checksums:
        _expect("DATA-6", "checksum", sha1.hexdigest().encode(), checksum, name)
    for tensor in tensors:
        used = tensor.elements * _BITS[tensor.data_type] % 8
        if used and last >> used:
            _refuse("TENSOR-4", "unused bits of the last byte", "zeros", f"{last:08b}", name)
        tensor.sha256 = sha256.hexdigest()


def main(arguments: list[str]) -> int:
    """Prints the verdict on one file as a JSON object; returns the exit status."""
    is_full = arguments[:1] != ["--open"]
    paths = arguments if is_full else arguments[1:]
    if len(paths) != 1:
        print("usage: onnxa_reader.py [--open] PATH", file=sys.stderr)
        return 2
    try:
        result = describe(check_path(paths[0], is_full=is_full))
    except Refused as error:
        result = refusal(error)
    except MemoryError:
        result = {
            "accepted": None,
            "message": "the directory and the models do not fit into memory",
        }
    except OSError as error:
        print(f"onnxa_reader.py: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
