"""Archives with one to three changed fields: every reader gives the same verdict.

Fields of the records, of their extra fields and of the model are set to numbers that have a meaning
elsewhere: limits, neighbours, other fields of the same file. Some changes are made before sizes,
offsets and CRC-32s are worked out, so that nothing but the field itself is wrong, if it is; others
are made in the bytes as they stand.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import fault_seeds
import onnx
import onnxa_reader
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from models import BIT_WIDTHS, element_count, external, model_of, random_raw
from onnx import TensorProto
from processes import completed
from zip_image import unpacked_header, unpacked_record

import onnxarchive
from onnxarchive.files.data import crc32
from onnxarchive.reading.check import rules
from onnxarchive.zipformat import layout, records
from onnxarchive.zipformat.layout import EntryLayout
from tools.fuzz import run as fuzz

pytestmark = pytest.mark.sweep

READERS = Path(__file__).resolve().parents[2] / "conformance" / "readers"
RecordProperty = Callable[[str, object], None]

mutations = settings(
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


# Takes paths from standard input, and prints for each a rule, or null where it is accepted.
_CHECK_ALL = """
import { createInterface } from "node:readline";
const [node, onnxa] = process.argv.slice(1);
const { fileSource } = await import(node);
const { ArchiveError, openArchive } = await import(onnxa);
for await (const path of createInterface({ input: process.stdin })) {
  const source = await fileSource(path);
  let rule = null;
  try {
    await (await openArchive(source)).check();
  } catch (error) {
    if (!(error instanceof ArchiveError)) throw error;
    rule = error.rule;
  } finally {
    await source.close();
  }
  console.log(JSON.stringify(rule));
}
"""


class Disagreements:
    """Counts the files that one reader accepts and another refuses."""

    def __init__(self) -> None:
        self.count = 0

    def compare(self, is_archive: bool, path: Path) -> None:
        """Gives a file to the Python reader of the suite, which shares no code with the library."""
        try:
            onnxa_reader.check_bytes(path.read_bytes())
        except onnxa_reader.Refused as refused:
            assert refused.rule in rules()
            self.count += is_archive
            assert not is_archive, f"refused by another reader: {refused.rule} {refused}"
        else:
            self.count += not is_archive
            assert is_archive, "accepted by another reader"

    def compare_with_javascript(self, are_archives: list[bool], folder: Path) -> None:
        """Gives files by their numbers to the reader in JavaScript, all at once."""
        modules = [(READERS / "javascript" / name).as_uri() for name in ("node.mjs", "onnxa.mjs")]
        done = completed(
            ["node", "--input-type=module", "--eval", _CHECK_ALL, *modules],
            status=0,
            input="".join(f"{folder / str(number)}\n" for number in range(len(are_archives))),
        )
        broken = [json.loads(line) for line in done.stdout.splitlines()]
        assert {rule for rule in broken if rule is not None} <= rules().keys()
        differing = [
            (number, rule)
            for number, (is_archive, rule) in enumerate(zip(are_archives, broken, strict=True))
            if is_archive is not (rule is None)
        ]
        self.count += len(differing)
        assert differing == [], "read otherwise by the reader in JavaScript"


def _is_archive(path: Path, disagreements: Disagreements | None = None) -> bool:
    """Whether a file is accepted, by every reader."""
    is_archive = fuzz.is_archive(path)
    (disagreements or Disagreements()).compare(is_archive, path)
    return is_archive


@contextmanager
def _counted(record_property: RecordProperty) -> Iterator[Disagreements]:
    """Records how many files the readers disagreed about, also where that fails a test."""
    disagreements = Disagreements()
    try:
        yield disagreements
    finally:
        record_property("accepted that should be refused", disagreements.count)


# Archives before their offsets are worked out


@dataclass
class Entry:
    """An entry, and changed fields of its headers.

    Attributes:
        in_both: Fields of local header and directory record.
        more_padding: Bytes of padding beyond what the alignment asks for.
        more_extra: Extra fields behind the last one of the local header.
    """

    name: bytes
    data: bytes = b""
    alignment: int = 64
    in_both: dict[str, Any] = field(default_factory=dict)
    in_record: dict[str, Any] = field(default_factory=dict)
    more_padding: int = 0
    more_extra: bytes = b""

    def placed(self, offset: int) -> tuple[bytes, bytes]:
        """The bytes of the local header at an offset, and of the record."""
        size = len(self.data)
        placement = EntryLayout(self.name, size, crc32(self.data), offset, self.alignment)
        padding = min(max(placement.padding + self.more_padding, 0), 40000)
        extra = records.pack_alignment_extra(self.alignment, padding) + self.more_extra
        header = unpacked_header(placement)._replace(**{"extra": extra, **self.in_both})
        record = unpacked_record(placement)._replace(**{**self.in_both, **self.in_record})
        return header.pack(), record.pack()


def _assembled(entries: list[Entry], *, zip64_end: bool = False) -> bytes:
    """The archive of these entries; sizes, counts and offsets are those that it has."""
    archive = directory = b""
    for entry in entries:
        header, record = entry.placed(len(archive))
        archive += header + entry.data
        directory += record
    ends = layout.end_of_archive(len(entries), len(directory), len(archive))
    if zip64_end and len(ends) == records.EndRecord.SIZE:
        ends = _zip64_end(len(entries), len(directory), len(archive))
    return archive + directory + ends


def _zip64_end(count: int, size: int, offset: int) -> bytes:
    """Zip64 end records for values that do not need them."""
    record = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, offset)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, offset + size, 1)
    return record + locator + b"PK\5\6" + bytes(4) + b"\xff" * 12 + bytes(2)


# Where the fields are in the bytes


@dataclass(frozen=True)
class Field:
    """A number in the bytes of a file.

    Attributes:
        name: The same for the fields of both headers of an entry that state the same.
        offset: Where in the file it stands.
        width: Its bytes.
        value: What it says.
    """

    name: str
    offset: int
    width: int
    value: int


_LOCAL = (
    ("signature", 4),
    *(("version", 2), ("flags", 2), ("method", 2), ("time", 2), ("date", 2), ("crc32", 4)),
    *(("compressed", 4), ("uncompressed", 4), ("name size", 2), ("extra size", 2)),
)
_RECORD = (
    *(("record signature", 4), ("made by", 2)),
    *_LOCAL[1:-1],
    *(("record extra size", 2), ("comment size", 2), ("disk", 2), ("internal", 2)),
    *(("external", 4), ("header offset", 4)),
)
_ZIP64_END = (
    *(("Zip64 signature", 4), ("Zip64 size", 8), ("Zip64 made by", 2), ("Zip64 version", 2)),
    *(("Zip64 disk", 4), ("Zip64 directory disk", 4), ("Zip64 disk count", 8), ("Zip64 count", 8)),
    *(("Zip64 directory size", 8), ("Zip64 directory offset", 8)),
    *(("locator signature", 4), ("locator disk", 4), ("locator offset", 8), ("disks", 4)),
)
_END = (
    *(("end signature", 4), ("end disk", 2), ("directory disk", 2), ("disk count", 2)),
    *(("count", 2), ("directory size", 4), ("directory offset", 4), ("end comment size", 2)),
)


def _fields(archive: bytes) -> Iterator[Field]:
    """Yields the fields of all records of a sound archive."""

    def fields(table: tuple[tuple[str, int], ...], offset: int, prefix: str = "") -> list[Field]:
        found = []
        for name, width in table:
            number = int.from_bytes(archive[offset : offset + width], "little")
            found.append(Field(prefix + name, offset, width, number))
            offset += width
        return found

    def extra_fields(offset: int, end: int, prefix: str) -> Iterator[Field]:
        while offset < end:
            yield from fields((("id", 2), ("data size", 2)), offset, prefix)
            (size,) = struct.unpack("<H", archive[offset + 2 : offset + 4])
            is_zip64 = archive[offset : offset + 2] == b"\1\0"
            offset += 4
            if is_zip64:
                numbers = tuple((f"Zip64 value {index}", 8) for index in range(size // 8))
                yield from fields(numbers, offset, prefix)
            else:
                yield from fields((("alignment", 2),), offset, prefix)
                if size > 2:
                    yield from fields((("padding", 1),), offset + 2, prefix)
                    yield from fields((("padding", 1),), offset + size - 1, prefix)
            offset += size

    end = fields(_END, len(archive) - 22)
    yield from end
    count, position = end[4].value, end[6].value
    if position == 0xFFFFFFFF:
        zip64_end = fields(_ZIP64_END, len(archive) - 98)
        yield from zip64_end
        count, position = zip64_end[7].value, zip64_end[9].value
    for index in range(count):
        record = fields(_RECORD, position, f"{index} ")
        yield from record
        name_size, extra_size = record[10].value, record[11].value
        header_offset = record[-1].value
        position += 46
        yield from fields((("name", 1),), position, f"{index} ")
        position += name_size
        if extra_size:
            yield from extra_fields(position, position + extra_size, f"{index} record ")
        if header_offset == 0xFFFFFFFF:
            (header_offset,) = struct.unpack_from("<Q", archive, position + extra_size - 8)
        position += extra_size
        header = fields(_LOCAL, header_offset, f"{index} ")
        yield from header
        begin = header_offset + 30
        yield from fields((("name", 1),), begin, f"{index} ")
        yield from extra_fields(
            begin + name_size, begin + name_size + header[-1].value, f"{index} local "
        )


def _replaced(archive: bytes, offset: int, data: bytes) -> bytes:
    return archive[:offset] + data + archive[offset + len(data) :]


def _interesting(width: int, value: int, others: list[int]) -> st.SearchStrategy[int]:
    """Numbers that a field of `width` bytes may be set to."""
    top = (1 << 8 * width) - 1
    near = [value + by for by in (-64, -2, -1, 1, 2, 64)] + [value * 2, value // 2]
    limits = [0, 1, top, top - 1, top // 2, top // 2 + 1]
    zip_limits = [10, 20, 45, 46, 64, 128, 0x800, 32768, 0xFFFE, 0xFFFF, 0xFFFFFFFE, 0xFFFFFFFF]
    # `limits` twice: hypothesis draws the numbers evenly.
    return st.sampled_from([number & top for number in limits * 2 + near * 2 + zip_limits + others])


@st.composite
def _with_fields_set(draw: st.DrawFn, archive: bytes) -> bytes:
    """The archive with up to three of its fields set, in one header or in both."""
    fields = list(_fields(archive))
    others = [it.value for it in fields] + [it.offset for it in fields[:1]] + [len(archive)]
    for _ in range(draw(st.integers(1, 3))):
        chosen = draw(st.sampled_from(fields))
        value = draw(_interesting(chosen.width, chosen.value, others))
        places = [chosen]
        if draw(st.booleans()):
            places = [it for it in fields if it.name == chosen.name and it.width == chosen.width]
        for place in places:
            data = value.to_bytes(place.width, "little")
            archive = _replaced(archive, place.offset, data)
    return archive


# The bits of fields that may change and leave an archive one. A version needed of 20 is as good as
# 10, and a larger alignment that the data obeys already, as good as a smaller one.
_FREE = {
    "made by": 0x00FF,
    "external": fault_seeds.EXTERNAL_BITS,
    **dict.fromkeys(("time", "date", "version", "Zip64 made by", "local alignment"), 0xFFFF),
}


def _require_free(sound: bytes, archive: bytes) -> None:
    """Requires that no bits but free ones are others."""
    for it in _fields(sound):
        value = int.from_bytes(archive[it.offset : it.offset + it.width], "little")
        name = it.name.lstrip("0123456789 ")
        assert (value ^ it.value) & ~_FREE.get(name, 0) == 0, name


_NAMES = [b"w", b"W", b"v", b"bools", b"__MODEL_PROTO", b"__model_proto", b"assets", b"ASSETS"]
_NAMES += [b"__x", b"", b"con", b"a" * 255, b"a" * 256, b"w\n", b"w\0", b"a/b", b"7", b"\xff"]
_NAMES += ["ü".encode(), b"assets/", b"assets/a", b"assets/a/b", b"assets/A/b", b"assets/../a"]
_NAMES += [b"assets/a;1", "assets/e\u0301".encode(), "assets/\u00e9".encode(), b"Assets/a"]
_NAMES += ["assets/ü".encode(), b"assets/a:b", b"assets/a\x7f", "assets/\x85".encode()]
_NAMES += [b"assets/" + b"a" * 255, b"assets/" + b"a" * 256, b"assets" + b"/aaaaaaa" * 128]

_IN_BOTH: dict[str, list[Any]] = {
    "version_needed": [0, 9, 10, 11, 20, 45, 46, 63, 0x030A],
    "flags": [0, 1, 2, 8, 0x40, 0x800, 0x801, 0x2000, 0x8000],
    "method": [0, 1, 8, 9, 12, 14, 99],
    "time": [0, 1, 0xFFFF, 0xBF7D],
    "date": [0, 33, 0xFFFF, 0x21],
    "crc32": [0, 0xFFFFFFFF],
    "compressed_size": [0, 1, 0xFFFFFFFF],
    "uncompressed_size": [0, 1, 0xFFFFFFFF],
}
_IN_RECORD: dict[str, list[Any]] = {
    "version_made_by": [0, 45, 0x0114, 0x0300, 0x0314, 0x03FF, 0x0A3F, 0x132D, 0xFFFF],
    "disk_start": [0, 1, 0xFFFF],
    "internal_attributes": [0, 1, 2, 0xFFFF],
    "external_attributes": [
        *(0, 1, 2, 4, 8, 16, 32, 0x27, 64, 0x80, 0x400, 0x8000),
        *(0o100777 << 16, 0o107777 << 16, 0o040755 << 16, 0o120777 << 16, 1 << 31),
    ],
    "comment": [b"", b"c", b"PK\5\6" + bytes(18)],
    "extra": [
        *(b"", b"\0", b"\1\0\0\0", b"up\0\0"),
        struct.pack("<HHQ", 1, 8, 0),
        struct.pack("<HHQQ", 1, 16, 8, 8),
        struct.pack("<HHH", 0xD935, 2, 64),
    ],
    "header_offset": [0, 64, 0xFFFFFFFF],
    "compressed_size": [0, 0xFFFFFFFF],
    "uncompressed_size": [0, 0xFFFFFFFF],
    "flags": [1, 0x800],
}


@st.composite
def _changed_entries(draw: st.DrawFn, entries: list[Entry]) -> list[Entry]:
    """The entries with one change before anything is worked out; the data stays theirs."""
    changed = [replace(entry) for entry in entries]
    index = draw(st.integers(0, len(changed) - 1))
    entry = changed[index]
    kind = draw(st.sampled_from(["alignment", "name", "both", "record", "extra", "order", "none"]))
    if kind == "alignment":
        entry.alignment = draw(st.sampled_from([1, 2, 32, 64, 128, 4096, 32768, 65, 0xFFFF]))
        entry.more_padding = draw(st.sampled_from([0, 0, 0, -64, -1, 1, 64, 4096]))
    elif kind == "name":
        entry.name = draw(st.sampled_from(_NAMES))
    elif kind in ("both", "record"):
        table = _IN_BOTH if kind == "both" else _IN_RECORD
        name = draw(st.sampled_from(sorted(table)))
        value = draw(st.sampled_from(table[name]))
        setattr(entry, f"in_{kind}", {name: value})
    elif kind == "extra":
        entry.more_extra = draw(
            st.sampled_from([b"\0", b"\1\0\0\0", b"\x35\xd9\2\0\x40\0", bytes(64)])
        )
    elif kind == "order":
        other = draw(st.integers(0, len(changed) - 1))
        what = draw(st.sampled_from(["swap", "double", "drop"]))
        if what == "swap":
            changed[index], changed[other] = changed[other], changed[index]
        elif what == "double":
            changed.insert(other, replace(entry))
        elif len(changed) > 1:
            del changed[index]
    return changed


@cache
def _entries(name: str) -> tuple[Entry, ...]:
    """The entries of a sound archive."""
    pieces = {"plain": fault_seeds.plain, "odd types": fault_seeds.odd_types}[name]()
    ((_, data),) = pieces.parts
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return tuple(
            Entry(info.filename.encode(), archive.read(info)) for info in archive.infolist()
        )


@st.composite
def _mutated_records(draw: st.DrawFn) -> tuple[bytes | None, bytes]:
    """An archive with fields set, and what it was before; or one made wrong, and nothing."""
    entries = list(_entries(draw(st.sampled_from(["plain", "odd types"]))))
    if draw(st.booleans()):
        archive = _assembled(entries, zip64_end=draw(st.sampled_from([False, False, True])))
        return archive, draw(_with_fields_set(archive))
    for _ in range(draw(st.integers(1, 2))):
        entries = draw(_changed_entries(entries))
    return None, _assembled(entries, zip64_end=draw(st.integers(0, 9)) == 0)


# Models


_PAIR_KEYS = ["location", "offset", "length", "checksum", "basepath", "Location", ""]
_DIMS = [0, 1, 2, 3, 4, 5, 8, 16, 255, 1 << 31, 1 << 32, 1 << 61, 1 << 62, (1 << 63) - 1, -1]
_DATA_TYPES = [*range(30), 99, -1]
# Fields of a TensorProto that no field of the Python class can be set to.
_ODD_TENSOR_FIELDS = [
    b"\x70\x02",  # data_location 2, which there is not
    b"\x70\x00",  # DEFAULT
    b"\x70\x01",  # EXTERNAL
    b"\x70\x81\x80\x80\x80\x10",  # 2^32 + 1, which an enumeration cuts to EXTERNAL
    b"\x42\x02\xff\xfe",  # a name that is not UTF-8
    b"\x6a\x00",  # a pair of nothing
    b"\x6a\x05\x0a\x01\xff\x12\x00",  # a pair whose key is not UTF-8
    b"\x4a\x00",  # raw_data of no bytes
    b"\x0a\x00",  # dims, packed, none
    b"\x0a\x01\x01",  # dims, packed, 1
    b"\x1a\x00",  # a segment of nothing
    b"\x22\x00",  # float_data of none
    b"\xfa\x7f\x00",  # an unknown field
    b"\xfb\x7f\xfc\x7f",  # an unknown group
    b"\xfd\x7f\xff\xff\xff\xff",  # an unknown fixed32
]
# Bytes after a model.
_BEHIND_MODEL = [
    *(b"\x3a\x00", b"\x3a\x04\x12\x02gg", b"\x08\x00", b"\x0a\x00", b"\x00", b"\x0f", b"\x0c"),
    *(b"\xfb\x7f\xfc\x7f", b"\xfb\x7f", b"\xfc\x7f", b"\xfa\x7f\x05"),
    b"\x08" + b"\x80" * 9 + b"\1",
    *(b"\x08" + b"\x80" * 10 + b"\1", b"\x88\x80\x80\x80\x00\x01", b"\x88\x80\x80\x80\x80\x00\x01"),
    *(b"\xfb\x7f" * 100 + b"\xfc\x7f" * 100, b"\xfb\x7f" * 101 + b"\xfc\x7f" * 101),
    b"\x3d\x00\x00\x00\x00",  # graph, of another wire type
    *(b"\xfd\x7f\xff\xff\xff\xff", b"\xf9\x7f" + b"\xff" * 8),
]


@st.composite
def _mutated_models(draw: st.DrawFn) -> bytes:
    """Tensors of which one to three things were changed, with data that suits them or not."""
    tensors = [
        TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2, 2]),
        TensorProto(name="bools", data_type=TensorProto.BOOL, dims=[3]),
        TensorProto(name="four", data_type=TensorProto.INT4, dims=[3]),
    ]
    for tensor in tensors:
        tensor.CopyFrom(external(tensor, tensor.name))
    first = draw(st.sampled_from(tensors))
    resized = draw(st.booleans())
    before = {tensor.name: _data_of(tensor, resized=True) for tensor in tensors}
    odd: list[bytes] = []
    for _ in range(draw(st.integers(1, 3))):
        _change_tensor(draw, first, before, odd)
    entries = []
    for name, tensor in zip(before, tensors, strict=True):
        data = _data_of(tensor, resized=resized) or before[name]
        if draw(st.integers(0, 5)) == 0:
            data = draw(st.sampled_from([b"", b"\2" * len(data), b"\xff" * len(data), data + b"x"]))
        entries.append(Entry(name.encode(), data))
    if draw(st.integers(0, 7)) == 0:
        entries.append(Entry(b"assets/a", b"cat"))
    piece = b"".join(odd)
    mark = b"\x7a" + bytes([len(piece) - 2]) + b"?" * (len(piece) - 2) if piece else b""
    first.MergeFromString(mark)  # a field that ONNX lacks, as long as the odd ones
    model = _model_around(draw, tensors).SerializeToString().replace(mark, piece, 1)
    if draw(st.integers(0, 4)) == 0:
        model += draw(st.sampled_from(_BEHIND_MODEL))
    if draw(st.integers(0, 3)) == 0:
        at = draw(st.integers(0, len(model) - 1))
        by = draw(st.sampled_from([-1, 1, 0x80, 0x40]))
        model = model[:at] + bytes([(model[at] + by) % 256]) + model[at + 1 :]
    return _assembled([*entries, Entry(b"__MODEL_PROTO", model)])


def _data_of(tensor: TensorProto, *, resized: bool) -> bytes:
    """Data for a tensor, or none where it must not be resized or is too large to be had."""
    count = element_count(tensor.dims)
    if not resized or tensor.data_type not in BIT_WIDTHS or not 0 <= count < 1000:
        return b""
    return random_raw(tensor.data_type, tensor.dims)


def _change_tensor(
    draw: st.DrawFn, tensor: TensorProto, data: dict[str, bytes], odd: list[bytes]
) -> None:
    kind = draw(st.sampled_from(["pair", "pair", "dims", "type", "place", "data", "odd"]))
    if kind == "pair":
        sha1 = hashlib.sha1(data[tensor.name], usedforsecurity=False).hexdigest()
        size = len(data[tensor.name])
        key = draw(st.sampled_from(_PAIR_KEYS))
        values = ["", "0", "1", "00", "-0", "+0", " 0", "0x0", "\u0660", "1_6"]
        values += ["9" * 19, "9" * 5000]
        values += [str(size), str(size), str(size + 1), f"0{size}", sha1, sha1, sha1.upper()]
        values += ["w", "W", "bools", "four", "assets/a", "__MODEL_PROTO", "../w", "/etc/passwd"]
        value = draw(st.sampled_from(values))
        if draw(st.booleans()):
            pair = draw(st.sampled_from(list(tensor.external_data) or [tensor.external_data.add()]))
            pair.key, pair.value = draw(st.sampled_from([pair.key, key])), value
        else:
            tensor.external_data.add(key=key, value=value)
    elif kind == "dims":
        if len(tensor.dims) and draw(st.booleans()):
            index = draw(st.integers(0, len(tensor.dims) - 1))
            tensor.dims[index] = draw(st.sampled_from(_DIMS))
        else:
            times = draw(st.sampled_from([1, 1, 1, 62, 63, 64]))
            tensor.dims.extend([draw(st.sampled_from(_DIMS))] * times)
    elif kind == "type":
        tensor.data_type = draw(st.sampled_from(_DATA_TYPES))
    elif kind == "place":
        tensor.data_location = draw(st.sampled_from([TensorProto.DEFAULT, TensorProto.EXTERNAL]))
        if draw(st.booleans()):
            tensor.ClearField("data_location")
    elif kind == "data":
        what = draw(st.sampled_from(["raw_data", "float_data", "string_data", "segment"]))
        if what == "raw_data":
            tensor.raw_data = draw(st.sampled_from([b"", b"x"]))
        elif what == "segment":
            tensor.segment.begin = 0
        else:
            getattr(tensor, what).extend([b"x"] if what == "string_data" else [1.0])
    else:
        odd.append(draw(st.sampled_from(_ODD_TENSOR_FIELDS)))


def _model_around(draw: st.DrawFn, tensors: list[TensorProto]) -> onnx.ModelProto:
    """A model that has its tensors in one place or another, some twice."""
    place = draw(
        st.sampled_from(["initializer"] * 3 + ["attribute", "sparse", "function", "twice"])
    )
    model = model_of(*tensors[1:])
    if place == "initializer":
        model.graph.initializer.append(tensors[0])
    elif place == "attribute":
        model.graph.node.add().attribute.add().t.CopyFrom(tensors[0])
    elif place == "sparse":
        model.graph.sparse_initializer.add().indices.CopyFrom(tensors[0])
    elif place == "function":
        model.functions.add().attribute_proto.add().tensors.append(tensors[0])
    else:
        model.graph.initializer.extend(tensors[:2])
    return model


MUTANTS = {
    "records": _mutated_records(),
    "models": _mutated_models().map(lambda archive: (None, archive)),
}


@pytest.mark.parametrize("kind", MUTANTS)
def test_mutants_are_refused_or_read_alike_by_every_reader(
    kind: str, tmp_path: Path, record_property: RecordProperty
) -> None:
    verdicts: list[bool] = []

    @settings(mutations, max_examples=3000)
    @given(MUTANTS[kind])
    def run(mutated: tuple[bytes | None, bytes]) -> None:
        sound, archive = mutated
        path = tmp_path / str(len(verdicts))
        path.write_bytes(archive)
        verdicts.append(_is_archive(path, disagreements))
        if sound and verdicts[-1]:
            _require_free(sound, archive)

    with _counted(record_property) as disagreements:
        run()
        has_node = shutil.which("node") is not None
        if has_node:
            disagreements.compare_with_javascript(verdicts, tmp_path)
    assert 100 < sum(verdicts) < len(verdicts) - 1000
    record_property("mutated files", len(verdicts))
    if not has_node:
        pytest.skip("node is not installed: the files were given to the reader in Python alone")


# What the mutations cannot be expected to hit


def test_attributes_that_look_like_a_zip64_locator_are_refused(tmp_path: Path) -> None:
    # They and the offset behind them spell its signature where zipfile looks for one.
    model = onnx.ModelProto(ir_version=10, graph={"name": "g"})
    sound = _assembled(
        [Entry(b"assets/a", bytes(199)), Entry(b"__MODEL_PROTO", model.SerializeToString())]
    )
    (attributes,) = (it for it in _fields(sound) if it.name == "1 external")
    archive = _replaced(sound, attributes.offset + 1, b"PK\6")
    assert archive[-42:-38] == b"PK\6\7"
    (tmp_path / "m").write_bytes(archive)
    assert not _is_archive(tmp_path / "m")
    assert "ZIP-11" in {finding.rule for finding in onnxarchive.check(tmp_path / "m")}


@pytest.mark.parametrize("level", ["model", "graph", "tensor"])
def test_field_number_0_in_an_unknown_group_is_ignored_at_every_level(
    tmp_path: Path, level: str
) -> None:
    group = b"\xfb\x7f\x00\x00\xfc\x7f"
    tensor = b"\x08\x01\x10\x01\x4a\x04cats" + group * (level == "tensor")
    graph = b"\x2a" + bytes([len(tensor)]) + tensor + group * (level == "graph")
    model = b"\x08\x0a\x3a" + bytes([len(graph)]) + graph + group * (level == "model")
    (tmp_path / "m").write_bytes(_assembled([Entry(b"__MODEL_PROTO", model)]))
    assert _is_archive(tmp_path / "m")
    with onnxarchive.open(tmp_path / "m") as archive:
        assert archive.model == onnx.ModelProto.FromString(model)


def test_entries_over_one_another_are_not_read_again_and_again(tmp_path: Path) -> None:
    # Every other record states the same large entry.
    large = Entry(b"a", bytes(100_000))
    header, _ = large.placed(0)
    end = len(header) + len(large.data)
    records_of = []
    for index in range(200):
        name = b"a%d" % index
        records_of.append(replace(large, name=name).placed(0)[1])
        records_of.append(Entry(b"b%d" % index).placed(end)[1])
    directory = b"".join(records_of)
    ends = layout.end_of_archive(len(records_of), len(directory), end)
    path = tmp_path / "m"
    path.write_bytes(header + large.data + directory + ends)
    totals = {0}
    found = onnxarchive.check(path, full=True, progress=lambda done, total: totals.add(total))
    assert found
    assert max(totals) <= path.stat().st_size
