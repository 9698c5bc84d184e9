"""The tolerant reader reads the zips of all tools and refuses those that readers disagree about."""

from __future__ import annotations

import io
import re
import struct
import tracemalloc
import zipfile
import zlib
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from outcomes import count_outcome, requires_outcomes

from onnxarchive.errors import ArchiveError, ArchiveFormatError, UnsupportedFeatureError
from onnxarchive.files.data import Range
from onnxarchive.sources.zip_file import ZippedFile, read_zip
from onnxarchive.zipformat import records
from onnxarchive.zipformat.layout import MAX_ENTRIES
from onnxarchive.zipformat.records import (
    DirectoryRecord,
    EndRecord,
    LocalHeader,
    Zip64EndRecord,
    Zip64Locator,
)

MAX_32 = records.SATURATED_32
MAX_64 = (1 << 64) - 1
DESCRIPTOR = records.FLAG_DATA_DESCRIPTOR
UTF8 = records.FLAG_UTF8
LINK = 0o120777 << records.UNIX_MODE_SHIFT
UNIX_FOLDER = 0o040755 << records.UNIX_MODE_SHIFT
FIFO = 0o010600 << records.UNIX_MODE_SHIFT


# A zip taken apart, each piece to be changed.


@dataclass
class Part:
    """One entry: its headers, and the bytes around its data."""

    local: LocalHeader
    record: DirectoryRecord
    data: bytes
    gap: bytes = b""  # before the local header
    descriptor: bytes = b""
    header_offset: int | None = None  # stated in the directory, if not where it is
    is_listed: bool = True
    is_written: bool = True  # else its bytes are those of another entry


def part(name: str | bytes, data: bytes, **changes: Any) -> Part:
    """A stored entry, with the same changes in both headers."""
    raw_name = name.encode() if isinstance(name, str) else name
    flags = 0 if raw_name.isascii() or isinstance(name, bytes) else UTF8
    crc, nbytes = zlib.crc32(data), len(data)
    local = LocalHeader(10, flags, 0, 0, 33, crc, nbytes, nbytes, raw_name, b"")
    record = DirectoryRecord(
        20, 10, flags, 0, 0, 33, crc, nbytes, nbytes, 0, 0, 0, 0, raw_name, b"", b""
    )
    return Part(local._replace(**changes), record._replace(**changes), data)


@dataclass
class Zip:
    """A whole file."""

    parts: list[Part]
    prefix: bytes = b""
    before_directory: bytes = b""
    after_directory: bytes = b""
    comment: bytes = b""
    trailing: bytes = b""
    is_zip64: bool = False
    is_reversed: bool = False  # the directory
    end: dict[str, Any] = field(default_factory=dict)
    zip64: dict[str, Any] = field(default_factory=dict)
    locator: dict[str, Any] = field(default_factory=dict)

    def pack(self) -> bytes:
        file = bytearray(self.prefix)
        listed = []
        for item in self.parts:
            file += item.gap
            offset = len(file) if item.header_offset is None else item.header_offset
            if item.is_written:
                file += item.local.pack() + item.data + item.descriptor
            if item.is_listed:
                stated = item.record.header_offset or offset  # a change by `central` wins
                listed.append(item.record._replace(header_offset=stated))
        file += self.before_directory
        offset = len(file)
        for record in reversed(listed) if self.is_reversed else listed:
            file += record.pack()
        size, count = len(file) - offset, len(listed)
        file += self.after_directory
        stated_end = {"count": count, "size": size, "offset": offset}
        if self.is_zip64:
            record_offset = len(file)
            zip64 = Zip64EndRecord(44, 45, 45, 0, 0, count, count, size, offset)
            file += zip64._replace(**self.zip64).pack()
            file += Zip64Locator(0, record_offset, 1)._replace(**self.locator).pack()
            stated_end = {"count": 0xFFFF, "size": MAX_32, "offset": MAX_32}
        end = EndRecord(
            0,
            0,
            stated_end["count"],
            stated_end["count"],
            stated_end["size"],
            stated_end["offset"],
            len(self.comment),
        )
        return bytes(file + end._replace(**self.end).pack() + self.comment + self.trailing)


DATA = {"a": b"first", "folder/b": b"", "é:0": b"third" * 20}


def sound() -> Zip:
    return Zip([part(name, data) for name, data in DATA.items()])


def with_end(**changes: Any) -> bytes:
    return with_file(end=changes)


def with_zip64(**changes: Any) -> bytes:
    return with_file(is_zip64=True, zip64=changes)


def with_locator(**changes: Any) -> bytes:
    return with_file(is_zip64=True, locator=changes)


def with_file(**changes: Any) -> bytes:
    return replace(sound(), **changes).pack()


def with_part(index: int = 0, **changes: Any) -> bytes:
    file = sound()
    file.parts[index] = replace(file.parts[index], **changes)
    return file.pack()


def with_local(**changes: Any) -> bytes:
    return with_part(local=sound().parts[0].local._replace(**changes))


def with_record(index: int = 0, **changes: Any) -> bytes:
    return with_part(index, record=sound().parts[index].record._replace(**changes))


def with_both(**changes: Any) -> bytes:
    first = sound().parts[0]
    return with_part(local=first.local._replace(**changes), record=first.record._replace(**changes))


def with_name(name: str | bytes, data: bytes = b"", **changes: Any) -> bytes:
    return Zip([part("first", b"1"), part(name, data, **changes)]).pack()


def counts(number: int) -> dict[str, Any]:
    return {"entry_count": number, "disk_entry_count": number}


def sizes(nbytes: int) -> dict[str, Any]:
    return {"compressed_size": nbytes, "uncompressed_size": nbytes}


def zip64_field(*values: int) -> bytes:
    return records.pack_zip64_extra(*values)


def field_of(identifier: int, content: bytes) -> bytes:
    return records.pack_extra(identifier, content)


def descriptor(name: str, pattern: str, *, signed: bool, changes: tuple[int, int, int]) -> bytes:
    values = (zlib.crc32(DATA[name]), len(DATA[name]), len(DATA[name]))
    changed_values = [value + by for value, by in zip(values, changes, strict=True)]
    return b"PK\x07\x08" * signed + struct.pack(pattern, *changed_values)


def streamed(
    pattern: str = "<3I",
    *,
    signed: bool = True,
    changes: tuple[int, int, int] = (0, 0, 0),
    absent: bool = False,
    **local: Any,
) -> bytes:
    """A zip whose first entry has its sizes in a data descriptor."""
    first = sound().parts[0]
    zeros: dict[str, Any] = {"crc32": 0, "compressed_size": 0, "uncompressed_size": 0}
    return with_part(
        local=first.local._replace(flags=DESCRIPTOR, **{**zeros, **local}),
        record=first.record._replace(flags=DESCRIPTOR),
        descriptor=b"" if absent else descriptor("a", pattern, signed=signed, changes=changes),
    )


def contents(file: bytes) -> dict[str, bytes]:
    return {name: b"".join(Range.whole(data).pieces()) for name, data in read(file)[0].items()}


def read(file: bytes) -> tuple[dict[str, ZippedFile], list[str]]:
    return read_zip(memoryview(file), None)


def folder(name: str, attributes: int = 0, **changes: Any) -> Part:
    item = part(name, b"", **changes)
    item.record = item.record._replace(external_attributes=attributes)
    return item


END = EndRecord.SIZE
ONE = Zip([part("a", b"first")]).pack()
SOUND = sound().pack()
DIRECTORY_OFFSET = SOUND.index(DirectoryRecord.SIGNATURE)
DIRECTORY_SIZE = len(SOUND) - END - DIRECTORY_OFFSET


def test_a_sound_zip_is_read() -> None:
    files, unused = read(SOUND)
    assert list(files) == list(DATA)
    assert contents(SOUND) == DATA
    assert unused == []


def test_an_empty_zip_has_no_entries() -> None:
    assert read(Zip([]).pack()) == ({}, [])
    assert read(Zip([], is_zip64=True).pack()) == ({}, [])
    assert read(Zip([], comment=b"nothing").pack()) == ({}, [])


ACCEPTED = {
    "eocd-comment": with_file(comment=b"made by hand"),
    "eocd-comment: the longest": with_file(comment=b"c" * 0xFFFF),
    "entry-comment": with_record(comment=b"PK a comment"),
    "entry-comment: the longest": with_record(comment=b"c" * 0xFFFF, extra=bytes(0xFFFC)),
    "cd-order": with_file(is_reversed=True),
    "zip64": with_file(is_zip64=True),
    "zip64: nothing saturated": with_file(
        is_zip64=True,
        end={
            "entry_count": 3,
            "disk_entry_count": 3,
            "directory_offset": DIRECTORY_OFFSET,
            "directory_size": DIRECTORY_SIZE,
        },
    ),
    "zip64: disks saturated": with_file(
        is_zip64=True, end={"disk": 0xFFFF, "directory_disk": 0xFFFF}
    ),
    "extra-unneeded: equal": with_record(extra=zip64_field(5, 5)),
    "extra-unneeded: empty": with_record(extra=zip64_field(0)[:2] + b"\0\0"),
    "extra-unneeded: with the offset": with_record(1, extra=zip64_field(0, 0, 36)),
    "extra-unneeded: with the disk": with_record(
        extra=field_of(1, struct.pack("<QQQI", 5, 5, 0, 0))
    ),
    "extra-unneeded: in the local header": with_local(extra=zip64_field(5, 5)),
    "zip64 sizes": with_both(**sizes(MAX_32), extra=zip64_field(5, 5)),
    "zip64 size alone in the directory": with_record(compressed_size=MAX_32, extra=zip64_field(5)),
    "zip64 offset": with_record(1, header_offset=MAX_32, extra=zip64_field(36)),
    "zip64 disk": with_record(
        disk_start=0xFFFF, compressed_size=MAX_32, extra=field_of(1, struct.pack("<QI", 5, 0))
    ),
    "extra: timestamp, owner, NTFS": with_both(
        extra=field_of(0x5455, b"\3" + bytes(8))
        + field_of(0x7875, bytes(11))
        + field_of(0x000A, bytes(32))
    ),
    "extra: differs between the headers": with_local(extra=field_of(0xD935, bytes(40))),
    "extra: long": with_local(extra=field_of(0xD935, bytes(40_000))),
    "extra: one stray zero": with_local(extra=b"\0"),
    "extra: two stray zeros": with_local(extra=field_of(0x5455, b"\1" + bytes(4)) + b"\0\0"),
    "extra: three stray zeros": with_local(extra=b"\0\0\0"),
    "extra: zeros that are fields": with_local(extra=bytes(16)),
    "data-descriptor": streamed(),
    "data-descriptor: no signature": streamed(signed=False),
    "data-descriptor: 64 bits": streamed("<I2Q"),
    "data-descriptor: 64 bits, no signature": streamed("<I2Q", signed=False),
    "data-descriptor: filled in": streamed(**sizes(5), crc32=zlib.crc32(b"first")),
    "data-descriptor: one size filled in": streamed(uncompressed_size=5),
    "flags: compression level": with_both(flags=6),
    "utf8: marked ASCII": with_both(flags=UTF8),
    "version-needed: bzip2's": with_both(version_needed=46),
    "attributes: text": with_record(internal_attributes=1),
    "attributes: MS-DOS archive": with_record(external_attributes=0x21),
    "attributes: Unix": with_record(external_attributes=records.REGULAR_FILE_ATTRIBUTES),
    "attributes: read from a pipe": with_record(external_attributes=FIFO),
    "local time differs": with_local(time=1, date=2),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_forms_that_all_readers_read_equally_are_accepted(case: str) -> None:
    assert contents(ACCEPTED[case]) == DATA
    assert read(ACCEPTED[case])[1] == []


HIDDEN = part("hidden", b"hidden data")
HIDDEN_SIZE = len(HIDDEN.local.pack() + HIDDEN.data)
SIGNING_BLOCK = struct.pack("<Q", 24) + struct.pack("<Q", 24) + b"APK Sig Block 42"

DROPPED = {
    "gaps: between entries": (with_part(1, gap=b"gap"), "3 bytes at offset 36 before entry 'fold"),
    "gaps: zeros between entries": (with_part(1, gap=bytes(9)), "9 bytes at offset 36"),
    "gaps: before the directory": (
        with_file(before_directory=b"gap!"),
        f"4 bytes at offset {DIRECTORY_OFFSET} before the central directory",
    ),
    "gaps: signing block": (with_file(before_directory=SIGNING_BLOCK), "32 bytes at offset"),
    "hidden-lfh: between entries": (
        with_part(1, gap=HIDDEN.local.pack() + HIDDEN.data),
        f"{HIDDEN_SIZE} bytes at offset 36 .* lists no entry there",
    ),
    "hidden-lfh: the last entry": (
        with_file(parts=[*sound().parts, replace(HIDDEN, is_listed=False)]),
        "before the central directory are left out: the directory lists no entry",
    ),
}


@pytest.mark.parametrize("case", DROPPED)
def test_bytes_that_belong_to_nothing_are_left_out_and_reported(case: str) -> None:
    file, sentence = DROPPED[case]
    assert contents(file) == DATA
    (told,) = read(file)[1]
    assert re.search(sentence, told)


def second_directory() -> bytes:
    """The end record names the first entry's directory, and the whole one follows."""
    directory = SOUND[DIRECTORY_OFFSET:-END]
    first_size = DirectoryRecord.SIZE + 1
    end = EndRecord(0, 0, 1, 1, first_size, DIRECTORY_OFFSET, 0)
    return SOUND[:DIRECTORY_OFFSET] + directory[:first_size] + directory + end.pack()


def first_entry_in_comment() -> bytes:
    """A comment that is a second directory and end record, both right, for the first entry."""
    directory = SOUND[DIRECTORY_OFFSET : DIRECTORY_OFFSET + DirectoryRecord.SIZE + 1]
    end = EndRecord(0, 0, 1, 1, len(directory), len(SOUND), 0)
    comment = directory + end.pack()
    return SOUND[:-2] + struct.pack("<H", len(comment)) + comment


def inside_another(inner: Part, outer: Part, offset: int) -> bytes:
    """Two listed entries, the inner one at an offset in the outer one, which holds its bytes."""
    return Zip([outer, replace(inner, is_written=False, header_offset=offset)]).pack()


INNER = part("inner", b"inner")
INNER_BYTES = INNER.local.pack() + INNER.data
OUTER = part("outer", INNER_BYTES)
QUOTING = part("outer", b"data")
QUOTING.local = QUOTING.local._replace(extra=field_of(0x9999, INNER_BYTES))
NESTED = inside_another(INNER, OUTER, len(OUTER.local.pack()))
QUOTED = inside_another(INNER, QUOTING, len(QUOTING.local.pack()) - len(INNER_BYTES))


def same_header(name: str) -> bytes:
    parts = [part("a", b"first"), part("second", b"x"), part(name, b"first")]
    file = Zip(parts).pack()
    # The third record is made to name the first header.
    position = file.rindex(DirectoryRecord.SIGNATURE)
    third = DirectoryRecord.unpack(file, position)
    assert third is not None
    return file[:position] + third._replace(header_offset=0).pack() + file[-END:]


TOO_LONG = 10_000
PLACE = "directly before the end records"  # of the directory
NO_HEADER = "there is no local header at offset"
SAME_NAME = "has the same name, ignoring case"

REFUSED = {
    "eocd-absent: nothing": (b"", "not a zip"),
    "eocd-absent: other data": (b"\x08\x07" * 100, "not a zip"),
    "eocd-absent: entries only": (SOUND[:DIRECTORY_OFFSET], "not a zip"),
    "eocd-in-comment: an empty zip's": (with_file(comment=Zip([]).pack()), PLACE),
    "eocd-in-comment: not at the end": (
        with_file(comment=Zip([]).pack() + b"words"),
        "after the end record",
    ),
    "eocd-in-comment: right for one entry": (first_entry_in_comment(), "the signature of another"),
    "zip-in-comment": (with_file(comment=ONE), PLACE),
    "comment with a directory record": (with_file(comment=b"..PK\1\2"), "the signature of another"),
    "comment with an end record": (with_file(comment=b"..PK\5\6"), "there is no end record"),
    "comment with a Zip64 end record": (with_file(comment=b"..PK\6\6"), "the signature of another"),
    "comment with a Zip64 locator": (with_file(comment=b"..PK\6\7"), "the signature of another"),
    "comment too long": (with_end(comment_size=1), "expected a comment of 1 bytes"),
    "stacked: offsets of the second": (SOUND + ONE, PLACE),
    "stacked: offsets of the file": (Zip([part("a", b"")], prefix=SOUND).pack(), "offset 0"),
    "trailing": (with_file(trailing=b"x"), "found 1 bytes"),
    "trailing: zeros": (with_file(trailing=bytes(1672)), "found 1672 bytes"),
    "trailing: after a comment": (with_file(comment=b"cc", trailing=b"x"), "found 3 bytes"),
    "trailing: a lot": (with_file(trailing=bytes(70_000)), "not a zip"),
    "prefix: offsets fixed": (
        with_file(prefix=b"#!stub"),
        "its local header is at offset 6, not at offset 0",
    ),
    "prefix: offsets not fixed": (b"#!stub" + SOUND, PLACE),
    "prefix: before an empty zip": (b"#!stub" + Zip([]).pack(), PLACE),
    "disk: of the end record": (with_end(disk=1), "one part of a split zip"),
    "disk: of the directory": (with_end(directory_disk=1), "one part of a split zip"),
    "disk: of the Zip64 end record": (
        with_file(is_zip64=True, zip64={"disk": 1}, end={"disk": 1}),
        "one part of a split zip",
    ),
    "count: one less": (with_end(**counts(2)), "2 directory records"),
    "count: one more": (with_end(**counts(4)), "directory record 4 of 4|at least"),
    "count: on this disk": (with_end(disk_entry_count=2), "2 of 3 directory records"),
    "count: more than fit": (with_end(**counts(60_000)), "at least 46 bytes"),
    "cd-size: one less": (with_end(directory_size=DIRECTORY_SIZE - 1), PLACE),
    "cd-size: one more": (with_end(directory_size=DIRECTORY_SIZE + 1), PLACE),
    "cd-size: +46": (with_end(directory_size=DIRECTORY_SIZE + 46), PLACE),
    "cd-size: first record only": (
        with_end(directory_size=DirectoryRecord.SIZE + 1, **counts(1)),
        PLACE,
    ),
    "cd-offset": (with_end(directory_offset=DIRECTORY_OFFSET - 1), PLACE),
    "two-cds": (second_directory(), PLACE),
    "two-cds: the named one is last": (
        with_file(before_directory=SOUND[DIRECTORY_OFFSET:-END]),
        "the signature of another",
    ),
    "gaps: an end record": (with_part(1, gap=Zip([]).pack()), "the signature of another"),
    "gaps: Zip64 end records": (
        with_file(before_directory=Zip([], is_zip64=True).pack()[:-END]),
        "the signature of another",
    ),
    "gaps: Zip64 end records before the end record": (
        with_file(after_directory=Zip([], is_zip64=True).pack()[:-END]),
        "offset 0 in the locator",
    ),
    "gaps: after the directory": (with_file(after_directory=b"gap"), "before the end records"),
    "gaps: before the Zip64 end record": (
        with_file(after_directory=b"gap", is_zip64=True),
        "before the end records",
    ),
    "spanned-marker": (with_file(prefix=b"PK00"), "offset 0"),
    "spanned-marker: offsets not fixed": (b"PK00" + SOUND, PLACE),
    "locator-missing: offset": (with_end(directory_offset=MAX_32), PLACE),
    "locator-missing: size": (with_end(directory_size=MAX_32), PLACE),
    "locator-missing: count": (with_end(**counts(0xFFFF)), "at least 46"),
    "locator-missing: all": (
        with_end(**counts(0xFFFF), directory_offset=MAX_32, directory_size=MAX_32),
        PLACE,
    ),
    "locator-offset": (with_locator(record_offset=0), "offset 0 in the locator"),
    "locator-offset: beyond the file": (
        with_locator(record_offset=1 << 63),
        f"offset {1 << 63} in the locator",
    ),
    "locator-disks": (with_locator(disks=2), "disk 0 of 2"),
    "locator-disk": (with_locator(record_disk=1), "disk 1 of 1"),
    "record-size: 45": (with_zip64(stated_size=45), "size 44"),
    "record-size: 2^64-1": (with_zip64(stated_size=MAX_64), "size 44"),
    "record-size: wraps": (with_zip64(stated_size=MAX_64 - 11), "size 44"),
    "two-truths: count": (
        with_file(is_zip64=True, end={"entry_count": 2}),
        "expected entry count 3 in the end record",
    ),
    "two-truths: offset": (
        with_file(is_zip64=True, end={"directory_offset": 9}),
        "directory offset",
    ),
    "two-truths: size": (with_file(is_zip64=True, end={"directory_size": 9}), "directory size"),
    "record-huge: count": (with_zip64(**counts(1 << 60)), "at least 46"),
    "record-huge: offset": (with_zip64(directory_offset=MAX_64), PLACE),
    "record-huge: size": (with_zip64(directory_size=MAX_64), PLACE),
    "record-huge: wraps": (with_zip64(directory_size=(1 << 64) - DIRECTORY_OFFSET), PLACE),
    "sentinel-no-extra: size": (with_both(**sizes(MAX_32)), "where the directory begins"),
    "sentinel-no-extra: offset": (with_record(1, header_offset=MAX_32), NO_HEADER),
    "extra-length: 7 bytes": (
        with_record(compressed_size=MAX_32, extra=field_of(1, bytes(7))),
        "Corrupt zip64",
    ),
    "extra-length: one of two": (
        with_record(**sizes(MAX_32), extra=zip64_field(5)),
        "Corrupt zip64",
    ),
    "extra-length: too long": (
        with_record(uncompressed_size=MAX_32, extra=field_of(1, bytes(32))),
        "found 5 and 0",
    ),
    "extra-huge: size 2^63": (
        with_record(**sizes(MAX_32), extra=zip64_field(1 << 63, 1 << 63)),
        "where the directory begins",
    ),
    "extra-huge: size 2^64-1 in both": (
        with_both(**sizes(MAX_32), extra=zip64_field(MAX_64, MAX_64)),
        "its data to end at or before",
    ),
    "extra-huge: inflated size 2^63 in both": (
        with_both(
            method=8,
            version_needed=records.VERSION_ZIP64,
            **sizes(MAX_32),
            extra=zip64_field(1 << 63, sound().parts[0].record.compressed_size),
        ),
        "all entries together have 9223372036854775808 bytes",
    ),
    "extra-huge: offset 2^64-1": (
        with_record(1, header_offset=MAX_32, extra=zip64_field(MAX_64)),
        "local header at offset 18446744073709551615",
    ),
    "extra-framing: overrun": (with_record(extra=b"\x55\x54\x09\0\1"), "Corrupt extra field"),
    "lfh-name": (with_local(name=b"b"), "expected name b'a' in its local header"),
    "lfh-name: longer": (with_local(name=b"ab"), "expected name b'a'"),
    "method-mismatch": (with_local(method=8), "expected method 0 in its local header"),
    "flags-mismatch": (with_local(flags=UTF8), "expected flags 0 in its local header"),
    "flags-mismatch: descriptor": (with_local(flags=DESCRIPTOR), "expected flags 0"),
    "cd-no-lfh: offset inside data": (with_record(1, header_offset=37), "before the directory"),
    "cd-no-lfh: broken signature": (b"PK\3\5" + SOUND[4:], "there is no local header at offset 0"),
    "same-lfh: two names": (same_header("b"), "overlap"),
    "same-lfh: the same name": (same_header("a"), SAME_NAME),
    "nested": (NESTED, "overlap"),
    "quoted": (QUOTED, "overlap"),
    "into-cd": (with_both(**sizes(DIRECTORY_OFFSET)), "where the directory begins"),
    "past-eof": (with_both(**sizes(TOO_LONG)), "where the directory begins"),
    "lfh-past-cd": (with_record(2, header_offset=DIRECTORY_OFFSET), NO_HEADER),
    "lfh past the end": (with_record(2, header_offset=TOO_LONG), NO_HEADER),
    "encrypted": (with_both(flags=1), "encrypted"),
    "encrypted: strong": (with_both(flags=1 << 6), "encrypted"),
    "encrypted: masked header": (with_both(flags=1 << 13), "encrypted"),
    "patched data": (with_both(flags=1 << 5), "nor a patch"),
    "utf8: invalid": (with_name(b"\xff", flags=UTF8), "a name is not UTF-8"),
    "utf8: overlong": (with_name(b"\xc0\xafb", flags=UTF8), "a name is not UTF-8"),
    "utf8: surrogate": (with_name(b"\xed\xa0\x80", flags=UTF8), "a name is not UTF-8"),
    "utf8: bare Latin-1": (with_name(b"caf\xe9"), "marked as UTF-8"),
    "utf8: bare UTF-8": (with_name("é".encode()), "marked as UTF-8"),
    "method: unknown": (with_both(method=77), "found method 77"),
    "method: Zstandard": (with_both(method=93), "found method 93"),
    "method: imploded": (with_both(method=6), "found method 6"),
    "version-needed: 255": (with_both(version_needed=255), "version 25.5"),
    "symlink": (with_record(external_attributes=LINK), "a link"),
    "dir: without a slash": (with_record(external_attributes=UNIX_FOLDER), "a folder whose name"),
    "symlink: to a folder": (Zip([part("a", b""), folder("f/", LINK)]).pack(), "a link"),
    "duplicate": (Zip([part("w", b"1"), part("w", b"2")]).pack(), SAME_NAME),
    "duplicate: folders": (Zip([part("w/", b""), part("w/", b"")]).pack(), SAME_NAME),
    "fold-collision": (
        Zip([part("w0", b"1"), part("W0", b"2")]).pack(),
        "the earlier entry 'w0' has the same name, ignoring case",
    ),
    **{
        f"control: {name!r}": (with_name(name), "control character")
        for name in ("a\0", "a\n", "\x1f", "\x7f", "\x85", "a\0.onnx")
    },
    **{
        f"path-like: {name!r}": (with_name(name), "relative path")
        for name in (
            *("", "/", "/a", "a//b", "a//", ".", "././a", "./../a", "a/.", "..", "../a"),
            *("a/../b", "a/..", "a\\b", "\\a", "C:", "c:a", "C:/a", "//host/share"),
        )
    },
    "name too long": (with_name("n" * 4097), "at most 4096 bytes"),
    "directory: with data": (with_name("f/", b"data"), "folder to be empty"),
    "stored-sizes": (with_both(uncompressed_size=6), "equal compressed and uncompressed sizes"),
}

# Read as the directory states, since neither zipfile nor `read_zip` looks at these fields.
UNLIKE = {
    "comment with a local header": with_file(comment=b"..PK\3\4"),
    "disk: of an entry": with_record(disk_start=1),
    "disk: saturated": with_record(disk_start=0xFFFF),
    "record-v2": with_zip64(version_needed=62),
    "sentinel-no-extra: local": with_local(compressed_size=MAX_32),
    "extra-unneeded: lying": with_record(extra=zip64_field(6, 5)),
    "extra-unneeded: lying about the offset": with_record(1, extra=zip64_field(0, 0, 35)),
    "extra-unneeded: lying in the local header": with_local(extra=zip64_field(5, 6)),
    "extra-unneeded: sizes of a lying local header": with_local(
        **sizes(6), extra=zip64_field(5, 5)
    ),
    "sentinel: one of two in the local header, the other lies": with_local(
        uncompressed_size=MAX_32, compressed_size=6, extra=zip64_field(5, 5)
    ),
    "extra-length: one of two in the local header": with_local(
        compressed_size=MAX_32, extra=zip64_field(5)
    ),
    "extra-length: too long by a half": with_record(extra=field_of(1, bytes(20))),
    "extra-duplicate": with_record(compressed_size=MAX_32, extra=zip64_field(5) * 2),
    "extra-duplicate: local": with_local(extra=zip64_field(5, 5) * 2),
    "extra-framing: stray bytes": with_record(extra=b"\0\0"),
    "extra-framing: local overrun": with_local(extra=b"\x55\x54\x09\0\1"),
    "extra-framing: local stray bytes": with_local(extra=b"\0\1"),
    "unicode-path": with_record(extra=field_of(0x7075, b"\1" + bytes(4) + b"b")),
    "unicode-path: local": with_local(extra=field_of(0x7075, b"\1" + bytes(4) + b"b")),
    "size-mismatch": with_local(uncompressed_size=6),
    "size-mismatch: compressed": with_local(compressed_size=4),
    "size-mismatch: zeros without a descriptor": with_local(**sizes(0)),
    "crc-mismatch": with_local(crc32=1),
    "crc-mismatch: zero without a descriptor": with_local(crc32=0),
    "data-descriptor: lying size": streamed(changes=(0, 1, 1)),
    "data-descriptor: lying CRC-32": streamed(changes=(1, 0, 0)),
    "data-descriptor: absent": streamed(absent=True),
    "data-descriptor: local size lies": streamed(uncompressed_size=6),
    "data-descriptor: local CRC-32 lies": streamed(crc32=6),
    **{f"reserved-bits: {bit}": with_both(flags=1 << bit) for bit in (4, 7, 8, 9, 10, 12, 14, 15)},
    "version-needed: 63 without LZMA": with_both(version_needed=63),
    "version-needed: local": with_local(version_needed=255),
    "dir: MS-DOS, without a slash": with_record(external_attributes=0x10),
    "volume label": with_record(external_attributes=0x08),
}


@pytest.mark.parametrize("case", UNLIKE)
def test_the_fields_of_the_directory_count_if_a_local_header_contradicts_them(case: str) -> None:
    try:
        assert contents(UNLIKE[case]) == DATA
    except ArchiveError as error:  # a zipfile that looks
        assert "found" in str(error)


@pytest.mark.parametrize("case", REFUSED)
def test_a_zip_that_readers_read_differently_is_refused(case: str) -> None:
    require_refused(*REFUSED[case])


def test_a_number_of_entries_modulo_65536_is_refused() -> None:
    file = Zip([part(f"{index}", b"") for index in range(0x10001)])
    file.end = {"entry_count": 1, "disk_entry_count": 1}
    require_refused(file.pack(), "1 directory records")


# What is wrong with a zip.
FAULT = (
    "expected .*found .|there is no (end record|local header) "
    "|the file is one part of a split zip: ."
    "|its local header is at offset [0-9]+, not at offset [0-9]+"
    "|the earlier entry '.+' has the same name"
    "|the name is (not a relative path|neither in ASCII nor marked)|a name is not UTF-8, .*: ."
    "|(has|have) the signature of another directory"
    "|all entries together have [0-9]+ bytes or more|Python's zipfile cannot read this zip: ."
    "|the zip is damaged: .|it inflates to more than [0-9]+ bytes"
)


def require_refused(file: bytes, message: str) -> None:
    with pytest.raises(ArchiveError, match=message) as caught:
        read(file)
    assert isinstance(caught.value, ArchiveFormatError | UnsupportedFeatureError)
    assert caught.value.rule is None
    if caught.value.entry is not None:
        assert str(caught.value).startswith(f"entry {caught.value.entry!r}: ")
    assert re.search(FAULT, str(caught.value), re.DOTALL), str(caught.value)


@pytest.mark.parametrize("flags", [1, 1 << 5, 1 << 6, 1 << 13])
def test_encrypted_and_patched_entries_are_a_feature_that_is_not_supported(flags: int) -> None:
    with pytest.raises(UnsupportedFeatureError):
        read(with_both(flags=flags))


def test_a_large_directory_is_refused_before_it_is_read() -> None:
    parts = [part(f"{number}", b"") for number in range(560)]
    for item in parts:
        extra = field_of(0xD935, bytes(60_000))
        item.record = item.record._replace(comment=bytes(60_000), extra=extra)
    packed = Zip(parts).pack()
    tracemalloc.start()
    try:
        with pytest.raises(UnsupportedFeatureError, match="67108864 bytes of directory"):
            read(packed)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_many_entries_take_less_than_two_kib_each() -> None:
    count = 20_000
    packed = Zip([part(f"{number:0100}", b"") for number in range(count)]).pack()
    tracemalloc.start()
    try:
        assert len(read(packed)[0]) == count
        assert tracemalloc.get_traced_memory()[1] < count * 2048
    finally:
        tracemalloc.stop()


def test_an_error_names_the_entry() -> None:
    with pytest.raises(ArchiveFormatError) as caught:
        read(with_local(name=b"b"))
    assert caught.value.entry == "a"


@pytest.mark.parametrize(
    "name", ["onnx::Conv_22", "a/b/c", "a/w:0", "ab:", "con", "...", "é", "a b"]
)
def test_names_that_lead_nowhere_else_are_kept(name: str) -> None:
    assert contents(with_name(name, b"data")) == {"first": b"1", name: b"data"}


@pytest.mark.parametrize("attributes", [0, 0x10, UNIX_FOLDER, UNIX_FOLDER | 0x10])
def test_empty_folders_are_left_out_without_a_warning(attributes: int) -> None:
    file = Zip([folder("f/", attributes), part("f/a", b"1")]).pack()
    assert contents(file) == {"f/a": b"1"}
    assert read(file)[1] == []


def test_an_empty_folder_may_be_deflated() -> None:
    item = folder("f/", method=8, compressed_size=2)
    item.data = b"\x03\x00"
    assert contents(Zip([item, part("f/a", b"1")]).pack()) == {"f/a": b"1"}


def test_lzma_needs_version_63() -> None:
    item = part("a", b"", method=14, version_needed=63)
    assert list(read(Zip([item]).pack())[0]) == ["a"]


def test_more_entries_than_the_limit_are_refused_before_any_is_read() -> None:
    count = MAX_ENTRIES + 1
    size = count * DirectoryRecord.SIZE
    zip64 = Zip64EndRecord(44, 45, 45, 0, 0, count, count, size, 0)
    end = EndRecord(0, 0, 0xFFFF, 0xFFFF, MAX_32, MAX_32, 0)
    file = bytes(size) + zip64.pack() + Zip64Locator(0, size, 1).pack() + end.pack()
    with pytest.raises(UnsupportedFeatureError, match=r"at most 262144 entries .*found 262145"):
        read(file)


def test_every_truncation_is_refused() -> None:
    for file in (SOUND, with_file(is_zip64=True), with_file(comment=b"a comment")):
        for size in range(len(file)):
            with pytest.raises(ArchiveFormatError):
                read(file[:size])


def test_every_byte_put_before_a_zip_is_refused() -> None:
    for size in range(1, 200):
        with pytest.raises(ArchiveError):
            read(bytes(size) + SOUND)


# Any bytes raise errors of this library only, and zipfile reads accepted files in the same way.


def as_zipfile_reads(file: bytes) -> dict[str, bytes] | None:
    """The contents that Python's zipfile reads, or None if it refuses the file."""
    try:
        with zipfile.ZipFile(io.BytesIO(file)) as opened:
            return {
                info.filename: opened.read(info) for info in opened.infolist() if not info.is_dir()
            }
    except Exception:
        return None


def require_agreement(file: bytes) -> None:
    try:
        found = contents(file)
    except ArchiveError:
        count_outcome("refused")
        return
    expected = as_zipfile_reads(file)
    count_outcome("accepted" if expected is None else "read_alike")
    assert expected is None or found == expected


@requires_outcomes(read_alike=50, refused=50)
@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused_or_read_as_zipfile_reads_them(data: bytes) -> None:
    require_agreement(data)
    require_agreement(data + Zip([]).pack())
    require_agreement(Zip([part("arbitrary", data)]).pack())


SEEDS = [*ACCEPTED.values(), *(file for file, _ in DROPPED.values())]
SMALL_SEEDS = [seed for seed in SEEDS if len(seed) < 2000]
EDGES = st.sampled_from(
    [b"\0", b"\1", b"\xff", b"\xff\xff", b"\xff" * 4, b"\xff" * 8, b"PK\3\4", b"PK\5\6", b"PK\6\7"]
)


@requires_outcomes(read_alike=10, refused=50)
@settings(max_examples=1000)
@given(
    st.sampled_from(SMALL_SEEDS),
    st.lists(
        st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=4) | EDGES),
        min_size=1,
        max_size=4,
    ),
)
def test_damaged_zips_are_refused_or_read_as_zipfile_reads_them(
    seed: bytes, changes: list[tuple[float, bytes]]
) -> None:
    file = bytearray(seed)
    for place, data in changes:
        position = int(place * (len(seed) - 1))
        file[position : position + len(data)] = data
    require_agreement(bytes(file))


@requires_outcomes(read_alike=5, refused=50)
@settings(max_examples=300)
@given(st.sampled_from(SMALL_SEEDS), st.floats(0, 1), st.floats(0, 1), st.binary(max_size=60))
def test_spliced_zips_are_refused_or_read_as_zipfile_reads_them(
    seed: bytes, start: float, end: float, data: bytes
) -> None:
    low, high = sorted((int(start * len(seed)), int(end * len(seed))))
    require_agreement(seed[:low] + data + seed[high:])


@requires_outcomes(read_alike=50, refused=50)
def test_every_changed_byte_is_refused_or_read_as_zipfile_reads_it() -> None:
    for seed in (SOUND, with_file(is_zip64=True), streamed()):
        for position in range(len(seed)):
            for value in (0, 1, seed[position] ^ 0x80, seed[position] ^ 1, 0xFF):
                require_agreement(seed[:position] + bytes([value]) + seed[position + 1 :])
