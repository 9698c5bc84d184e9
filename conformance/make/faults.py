"""The vectors of small files that break a rule."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from conformance.make.parts import (
    EMPTY_ZIP,
    FLOAT,
    FLOAT4,
    FLOAT6,
    INT4,
    LABELS,
    MODEL_PROTO,
    SIGNING_BLOCK,
    STRING,
    TIMESTAMP,
    UINT2,
    UINT8,
    B,
    Tensor,
    V,
    Vector,
    W,
    alignment_extra,
    archive,
    attribute,
    changed,
    everywhere,
    graph,
    model,
    nested_graphs,
    node,
    of_proto,
    plain,
    plus,
    refused,
    to_bytes,
)
from conformance.make.zips import Entry, Image, content, extra_field, number, numbers, zip64_field


def image_with(**changes: object) -> Callable[[], Image]:
    """Returns a function that makes the image of `plain` with these attributes replaced."""
    return lambda: replace(plain(), **changes)  # type: ignore[arg-type]


def entry_with(index: int, **changes: object) -> Callable[[], Image]:
    """Returns a function that makes the image of `plain` with attributes of one entry replaced."""
    return lambda: changed(index, **changes)


def nonconforming() -> Iterator[Vector]:
    """The vectors of small files that break a rule."""
    yield from _bad_framing()
    yield from _bad_zip64_ends()
    yield from _bad_order()
    yield from _bad_headers()
    yield from _bad_records()
    yield from _bad_extra_fields()
    yield from _bad_names()
    yield from _bad_models()
    yield from _bad_external_data()
    yield from _bad_tensors()


def _bad_framing() -> Iterator[Vector]:
    whole = to_bytes(plain())
    end = len(whole) - 22
    directory = end - sum(len(it.record) for it in plain().place())

    yield refused("empty", "A file of no bytes.", "ZIP-2", lambda: b"", "eocd-absent")
    yield refused(
        "cut-by-one", "The last byte is missing.", "ZIP-2", lambda: whole[:-1], "truncated"
    )
    yield refused(
        "cut-in-directory",
        "The file ends in the directory.",
        "ZIP-2",
        lambda: whole[: end - 40],
        "truncated",
    )
    yield refused(
        "cut-in-data", "The file ends in a tensor.", "ZIP-2", lambda: whole[:70], "eocd-absent"
    )
    yield refused(
        "comment",
        "A comment of the archive.",
        "ZIP-2 ZIP-16",
        image_with(after_end=b"hello", end={"comment_length": 5}),
        "eocd-comment",
    )
    yield refused(
        "comment-missing",
        "The end record states the length of a comment that is missing.",
        "ZIP-2",
        image_with(end={"comment_length": 5}),
        "eocd-comment",
    )
    yield refused(
        "comment-is-end-record",
        "The comment is the end record of an empty zip.",
        "ZIP-5 MODEL-1 ZIP-16",
        image_with(after_end=EMPTY_ZIP, end={"comment_length": 22}),
        "eocd-in-comment",
    )
    yield refused(
        "comment-is-zip",
        "The comment is a whole zip.",
        "ZIP-5 ZIP-16 ZIP-4",
        image_with(after_end=to_bytes(archive()), end={"comment_length": len(to_bytes(archive()))}),
        "zip-in-comment",
    )
    yield refused(
        "comment-is-zip-with-offsets",
        "The comment is a whole zip with offsets that count from the start of the file.",
        "ZIP-1 ZIP-16",
        lambda: (
            whole[:-2]
            + struct.pack("<H", len(to_bytes(replace(archive(), prefix=whole))) - len(whole))
            + to_bytes(replace(archive(), prefix=whole))[len(whole) :]
        ),
        "zip-in-comment",
    )
    yield refused(
        "stacked",
        "Two archives, one after the other.",
        "ZIP-5 ZIP-16",
        lambda: whole * 2,
        "stacked",
    )
    yield refused(
        "stacked-with-offsets",
        "Two archives; the offsets of the second count from the start of the file.",
        "ZIP-1 ZIP-16",
        image_with(prefix=whole),
        "stacked",
    )
    yield refused(
        "trailing",
        "A byte after the end record.",
        "ZIP-2 ZIP-16",
        lambda: whole + b"\0",
        "trailing",
    )
    yield refused(
        "trailing-64",
        "64 bytes after the end record.",
        "ZIP-2 ZIP-16",
        image_with(after_end=bytes(64)),
        "trailing",
    )
    yield refused(
        "prefix",
        "Bytes before the first header; the offsets do not count them.",
        "ZIP-5 ZIP-4",
        lambda: b"#!/bin/sh\n".ljust(64) + whole,
        "prefix",
    )
    yield refused(
        "prefix-with-offsets",
        "Bytes before the first header; the offsets count them.",
        "ZIP-1",
        image_with(prefix=b"#!/bin/sh\n".ljust(64)),
        "prefix",
    )
    yield refused(
        "spanned-marker",
        "The file begins with the marker of a split zip.",
        "ZIP-1",
        image_with(prefix=b"PK00"),
        "spanned-marker",
    )
    for field in ("disk", "directory_disk"):
        yield refused(
            f"end-{field.replace('_', '-')}",
            "The end record names a second disk.",
            "ZIP-3",
            image_with(end={field: 1}),
            "disk",
        )
    yield refused(
        "record-disk",
        "A directory record names a second disk.",
        "ZIP-3",
        entry_with(1, record={"disk_start": 1}),
        "disk",
    )
    yield refused(
        "record-disk-saturated",
        "A disk number is saturated.",
        "ZIP-3",
        entry_with(1, record={"disk_start": 0xFFFF}),
        "disk",
    )
    for name, change in (("less", -1), ("more", 1)):
        count = 4 + change
        yield refused(
            f"count-one-{name}",
            f"The end record counts one record {name} than the directory has.",
            "ZIP-4",
            image_with(end={"disk_count": count, "count": count}),
            "count",
        )
    yield refused(
        "count-of-disk",
        "The end record counts fewer records on the disk than in all.",
        "ZIP-4",
        image_with(end={"disk_count": 3}),
        "count",
    )
    yield refused(
        "count-zero",
        "The end record counts no records.",
        "ZIP-4",
        image_with(end={"disk_count": 0, "count": 0}),
        "count",
    )
    yield refused(
        "count-beyond-size",
        "The end record counts more records than fit the directory.",
        "ZIP-4",
        image_with(end={"disk_count": 60000, "count": 60000}),
        "entry-bomb",
    )
    for name, size in (("one-less", -1), ("one-record-more", 46)):
        yield refused(
            f"directory-size-{name}",
            "The end record states a wrong size of the directory.",
            "ZIP-5 ZIP-4",
            image_with(end={"directory_size": plus(size)}),
            "cd-size",
        )
    first = len(plain().place()[0].record)
    yield refused(
        "directory-first-record-only",
        "The end record states a directory that ends after its first record.",
        "ZIP-5 MODEL-1",
        image_with(end={"directory_size": first, "count": 1, "disk_count": 1}),
        "cd-size",
    )
    last = len(plain().place()[3].record)
    yield refused(
        "directory-last-record-only",
        "The end record states a directory that consists of the last record.",
        "ZIP-1 DATA-1",
        image_with(
            end={
                "directory_size": last,
                "directory_offset": end - last,
                "count": 1,
                "disk_count": 1,
            }
        ),
        "cd-size",
    )
    yield refused(
        "directory-record-cut",
        "The end record states a directory that begins one byte later and is one byte shorter.",
        "ZIP-4",
        image_with(end={"directory_size": plus(-1), "directory_offset": plus(1)}),
        "cd-size",
    )
    yield refused(
        "directory-offset",
        "The end record states a directory that begins one byte too late.",
        "ZIP-5 ZIP-4",
        image_with(end={"directory_offset": plus(1)}),
        "cd-size",
    )
    records = whole[directory:end]
    yield refused(
        "two-directories",
        "A second directory follows the true one.",
        "ZIP-5",
        image_with(after_directory=records),
        "two-cds",
    )
    yield refused(
        "two-directories-second",
        "A second directory precedes the true one.",
        "ZIP-6 ZIP-7 ALIGN-1 ZIP-15 MODEL-3",
        image_with(before_directory=records.replace(b"\1\2\x2d", b"\1\2\x14")),
        "two-cds",
    )
    yield refused(
        "directory-signature",
        "A directory record has a wrong signature.",
        "ZIP-4",
        entry_with(1, record={"signature": b"PK\1\3"}),
        "cd-no-lfh",
    )


def _bad_zip64_ends() -> Iterator[Vector]:
    yield refused(
        "locator-missing",
        "The end record is saturated; Zip64 end record and locator are missing.",
        "ZIP64-1",
        image_with(is_saturated=True),
        "locator-missing",
    )
    yield refused(
        "count-saturated",
        "Both counts of the end record are saturated; Zip64 end record and locator are missing.",
        "ZIP64-1",
        image_with(end={"disk_count": 0xFFFF, "count": 0xFFFF}),
        "locator-missing",
    )
    yield refused(
        "zip64-unneeded",
        "A Zip64 end record and a locator, although all values fit the end record.",
        "ZIP64-1",
        image_with(has_zip64=True),
        "two-truths",
    )
    yield refused(
        "zip64-beside-values",
        "A Zip64 end record, a locator, and an end record without saturated values.",
        "ZIP-5 ZIP64-1",
        image_with(has_zip64=True, is_saturated=False),
        "two-truths",
    )
    yield refused(
        "zip64-other-values",
        "The Zip64 end record and the end record state different counts.",
        "ZIP-5 ZIP64-1",
        image_with(has_zip64=True, is_saturated=False, zip64={"count": 1, "disk_count": 1}),
        "two-truths",
    )
    yield refused(
        "zip64-locator-in-attributes",
        "The last 20 bytes of the directory begin with the signature of a Zip64 locator.",
        "ZIP-11 ZIP64-1 ZIP-16",
        _looking_like_a_locator,
        "two-truths",
    )


def _looking_like_a_locator() -> Image:
    """An archive in which the model's directory record contains the signature of a locator.

    The signature begins in the external attributes, 20 bytes before the end record, and ends in the
    header offset.
    """
    fill = next(
        Entry(b"assets/fill", bytes(size))
        for size in range(256)
        if archive(assets=(Entry(b"assets/fill", bytes(size)),)).place()[1].header_offset % 256 == 7
    )
    image = archive(assets=(fill,))
    image.entries[1].record = {"external_attributes": 0x064B5000}
    return image


def _bad_order() -> Iterator[Vector]:
    def swap(image: Image) -> Image:
        image.order = [1, 0, 2, 3]
        return image

    gap = b"\0" * 64
    long_gap = bytes(32768)
    yield refused(
        "gap-before-directory",
        "Bytes between the last entry and the directory.",
        "ZIP-7 ZIP-6 ZIP-15 MODEL-3",
        image_with(before_directory=gap),
        "gaps",
        stage="open",
    )
    yield refused(
        "gap-before-directory-long",
        "A gap of 32,768 bytes before the directory, longer than the longest padding.",
        "ZIP-6 ZIP-7",
        image_with(before_directory=long_gap),
        "gaps",
    )
    yield refused(
        "gap-after-directory",
        "Bytes between the directory and the end record.",
        "ZIP-5",
        image_with(after_directory=gap),
        "gaps",
    )
    yield refused(
        "gap-between-entries",
        "Bytes between two entries.",
        "ZIP-7 ZIP-6",
        entry_with(1, before=gap),
        "gaps",
    )
    yield refused(
        "gap-between-entries-long",
        "A gap of 32,768 bytes between two entries, longer than the longest padding.",
        "ZIP-6 ZIP-7",
        entry_with(1, before=long_gap),
        "gaps",
    )
    yield refused(
        "signing-block",
        "A signing block, as Android packages have it, before the directory.",
        "ZIP-6 ZIP-7 ALIGN-1 ZIP-15 MODEL-3",
        image_with(before_directory=SIGNING_BLOCK),
        "gaps",
    )
    yield refused(
        "directory-order",
        "The directory and the entries are in different orders.",
        "ZIP-1 ZIP-6",
        lambda: swap(plain()),
        "cd-order",
    )
    yield refused(
        "hidden-entry",
        "An entry that the directory does not list.",
        "ZIP-7 ZIP-6",
        lambda: _hidden(b"x" * (64 + 24)),
        "hidden-lfh",
    )
    yield refused(
        "hidden-entry-long",
        "A long entry that the directory does not list.",
        "ZIP-6",
        lambda: _hidden(bytes(40000)),
        "hidden-lfh",
    )
    yield refused(
        "record-without-entry",
        "A directory record without an entry.",
        "ZIP-6",
        lambda: _with_record(Tensor("u"), header_offset=0xFFFF),
        "cd-no-lfh",
    )
    for name, key, rules in (
        ("another-name", "u", "ZIP-6"),
        ("the-same-name", "w", "ZIP-6 NAME-2 DATA-3"),
    ):
        yield refused(
            f"shared-header-{name}",
            "Two directory records state the same header offset.",
            rules,
            partial(_with_record, replace(W, key=key), header_offset=0),
            "same-lfh",
        )
    yield refused("nested-entry", "An entry in another entry's data.", "ZIP-6", _nested, "nested")
    yield refused(
        "quoted-header",
        "The data of an entry contains the local header and the data of the next entry.",
        "ZIP-6 ALIGN-1",
        _quoted,
        "quoted",
    )
    yield refused(
        "data-into-directory",
        "The data of the last entry runs into the directory.",
        "ZIP-6",
        entry_with(3, both={"compressed_size": plus(4096), "uncompressed_size": plus(4096)}),
        "into-cd",
    )
    yield refused(
        "data-past-end",
        "The data of an entry runs past the end of the file.",
        "ZIP-6 TENSOR-3",
        entry_with(1, both={"compressed_size": 0x7FFFFFFF, "uncompressed_size": 0x7FFFFFFF}),
        "past-eof",
    )
    yield refused(
        "header-past-directory",
        "A directory record gives a header offset after the directory.",
        "ZIP-6",
        entry_with(1, record={"header_offset": 0x10000}),
        "lfh-past-cd",
    )


def _hidden(data: bytes) -> Image:
    image = plain()
    image.entries.insert(1, Entry(b"hidden", data, is_listed=False))
    return image


def _with_record(tensor: Tensor, header_offset: int) -> Image:
    """An archive of W and V, and a directory record of a tensor that is not stored."""
    image = archive(W, V, tensor)
    image.entries[2] = replace(
        tensor.entry, is_stored=False, record={"header_offset": header_offset}
    )
    return image


def _nested() -> Image:
    inner = Tensor("inner")
    placed = Image([W.entry, inner.entry]).place()[1]
    data = placed.local_header + (inner.data if isinstance(inner.data, bytes) else b"")
    outer = Tensor("outer", UINT8, (len(data),), data)
    image = archive(outer, inner)
    image.entries[1] = replace(inner.entry, is_stored=False, record={"header_offset": 64})
    return image


def _quoted() -> Image:
    second = Tensor("second", UINT8, (64,), bytes(range(64)))
    header = Image([Entry(b"w", bytes(24)), second.entry]).place()[1].local_header
    data = header + (second.data if isinstance(second.data, bytes) else b"")
    first = Tensor("first", UINT8, (len(data),), data)
    image = archive(first, second)
    begin = image.place()[0].data_offset
    image.entries[1] = replace(second.entry, is_stored=False, record={"header_offset": begin})
    image.order = [0, 1, 2]
    return image


def _bad_headers() -> Iterator[Vector]:
    other: tuple[tuple[str, object, str | None], ...] = (
        ("signature", b"PK\3\5", "cd-no-lfh"),
        ("version_needed", 20, "version-needed"),
        ("flags", 2, "flags-mismatch"),
        ("method", 8, "method-mismatch"),
        ("time", 1, None),
        ("date", 0x22, None),
        ("crc32", 0, "crc-mismatch"),
        ("compressed_size", 23, "size-mismatch"),
        ("uncompressed_size", 23, "size-mismatch"),
    )
    for field, value, attack in other:
        yield refused(
            f"local-{field.replace('_', '-')}",
            f"The local header has a wrong value: {field.replace('_', ' ')}.",
            "ZIP-7",
            entry_with(0, local={field: value}),
            attack,
        )
    yield refused(
        "local-name",
        "The local header has a wrong name.",
        "ZIP-7",
        entry_with(0, local_name=b"u"),
        "lfh-name",
    )
    yield refused(
        "local-name-of-model",
        "The local header of the model has a wrong name.",
        "ZIP-7",
        entry_with(3, local_name=b"__MODEL_PROTQ"),
        "lfh-name",
        stage="open",
    )
    yield refused(
        "local-header-of-asset",
        "The local header of an asset has a wrong date.",
        "ZIP-7",
        entry_with(2, local={"date": 0x22}),
    )
    yield refused(
        "header-missing",
        "Zeros where a local header should be.",
        "ZIP-7",
        _without_header,
        "cd-no-lfh",
    )
    yield refused(
        "data-misaligned",
        "Data 32 bytes after a multiple of 64.",
        "ALIGN-1 ALIGN-2",
        entry_with(0, padding=bytes(27 + 32)),
        "misaligned",
    )
    yield refused(
        "model-misaligned",
        "The model is not aligned.",
        "ALIGN-1 ALIGN-2",
        entry_with(3, padding=bytes(1)),
        "misaligned",
    )
    for alignment in (0, 1, 32, 63, 96, 128, 65535):
        yield refused(
            f"alignment-{alignment}",
            f"The alignment field states {alignment}; the data begins at byte 64.",
            "ALIGN-2 ALIGN-3" if alignment in (1, 128) else "ALIGN-2",
            entry_with(0, local_extra=alignment_extra(alignment, 27)),
            "misaligned",
        )
    yield refused(
        "padding-longer",
        "The padding is 64 bytes longer than needed.",
        "ALIGN-3",
        entry_with(0, padding=bytes(27 + 64)),
        "padding-nonzero",
    )
    for name, padding in (("first", b"\1" + bytes(26)), ("last", bytes(26) + b"\1")):
        yield refused(
            f"padding-{name}-byte",
            "A byte of the padding is not zero.",
            "ALIGN-3",
            entry_with(0, padding=padding),
            "padding-nonzero",
        )


def _without_header() -> bytes:
    image = plain()
    placed = image.place()[1]
    data = bytearray(to_bytes(image))
    data[placed.header_offset : placed.data_offset] = bytes(
        placed.data_offset - placed.header_offset
    )
    return bytes(data)


def _bad_records() -> Iterator[Vector]:
    methods = {8: "deflate", 9: "deflate64", 12: "bzip2", 14: "lzma", 99: "AE-x"}
    for method, name in methods.items():
        yield refused(
            f"method-{method}",
            f"An entry with the method {name}.",
            "ZIP-8",
            entry_with(0, both={"method": method}),
            "method",
        )
    yield refused(
        "stored-sizes",
        "A stored entry whose sizes differ.",
        "ZIP-8",
        entry_with(0, both={"uncompressed_size": 48}),
        "stored-sizes",
    )
    flags = {0: "encrypted", 5: "reserved-bits", 6: "encrypted", 13: "encrypted"}
    for bit, attack in {**flags, 15: "reserved-bits", 11: "utf8"}.items():
        yield refused(
            f"flag-{bit}",
            f"Bit {bit} of the flags is set.",
            "ZIP-9",
            entry_with(0, both={"flags": 1 << bit}),
            attack,
        )
    descriptor = b"PK\7\10" + struct.pack("<III", 0, 24, 24)
    empty = {"crc32": 0, "compressed_size": 0, "uncompressed_size": 0}
    yield refused(
        "data-descriptor",
        "Sizes and CRC-32 are in a data descriptor.",
        "ZIP-9 ZIP-7",
        entry_with(0, both={"flags": 8}, local=empty, after=descriptor),
        "data-descriptor",
    )
    yield refused(
        "data-descriptor-missing",
        "The flags announce a data descriptor that is missing.",
        "ZIP-9",
        entry_with(0, both={"flags": 8}),
        "data-descriptor",
    )
    for version in (0, 11, 46, 63, 255, 0x030A):
        yield refused(
            f"version-{version}",
            f"Version needed {version}.",
            "ZIP-10",
            entry_with(0, both={"version_needed": version}),
            "version-needed",
        )
    attributes: tuple[tuple[str, dict[str, int], str], ...] = (
        ("symbolic-link", {"external_attributes": 0xA1FF0000}, "symlink"),
        ("directory", {"external_attributes": 0x41ED0000}, "dir"),
        ("directory-of-dos", {"external_attributes": 0x81A40010}, "dir"),
        ("volume-label", {"external_attributes": 0x81A40008}, "dir"),
        ("device", {"external_attributes": 0x21A40000}, "dir"),
        ("internal", {"internal_attributes": 1}, "dir"),
        ("ntfs", {"version_made_by": 11 << 8 | 20, "external_attributes": 0x81A40400}, "symlink"),
        ("reparse-point", {"external_attributes": 0x81A40400}, "symlink"),
        ("amiga", {"version_made_by": 1 << 8 | 20, "external_attributes": 0x89A40000}, "dir"),
        ("dos", {"version_made_by": 20}, "dir"),
    )
    for name, change, attack in attributes:
        yield refused(
            f"attributes-{name}",
            "The attributes are not those of a regular file on Unix.",
            "ZIP-11",
            entry_with(0, record=change),
            attack,
        )
    yield refused(
        "entry-comment",
        "A directory record has a comment.",
        "ZIP-12",
        entry_with(0, comment=b"hello"),
        "entry-comment",
    )
    yield refused(
        "crc",
        "The CRC-32 of a tensor is wrong in the local header and in the directory record.",
        "ZIP-15",
        entry_with(0, both={"crc32": lambda crc: crc ^ 1}),
        "crc",
    )
    yield refused(
        "crc-zero",
        "The CRC-32 of a tensor is zero in the local header and in the directory record.",
        "ZIP-15",
        entry_with(0, both={"crc32": 0}),
        "crc",
    )
    yield refused(
        "crc-of-asset",
        "The CRC-32 of an asset is wrong.",
        "ZIP-15",
        entry_with(2, both={"crc32": 0}),
        "crc",
    )
    yield refused(
        "crc-of-model",
        "The CRC-32 of the model is wrong.",
        "ZIP-15",
        entry_with(3, both={"crc32": lambda crc: crc ^ 0x80000000}),
        "crc",
        stage="open",
    )
    yield refused(
        "crc-of-nothing",
        "The CRC-32 of an empty entry is not zero.",
        "ZIP-15",
        lambda: archive(assets=(Entry(b"assets/e", b"", both={"crc32": 1}),)),
        "crc",
    )


def _bad_extra_fields() -> Iterator[Vector]:
    renamed = extra_field(0x7075, b"\1" + bytes(4) + b"other")
    records: tuple[tuple[str, bytes, str, str], ...] = (
        ("unicode-path", renamed, "ZIP-13", "unicode-path"),
        ("timestamp", TIMESTAMP, "ZIP-13", "extra-framing"),
        ("alignment", alignment_extra(64, 0), "ZIP-13", "extra-framing"),
        ("overrun", struct.pack("<HH", 0x5455, 9) + b"ab", "ZIP-13", "extra-framing"),
        ("stray", b"\0", "ZIP-13", "extra-framing"),
        ("stray-3", b"\1\0\0", "ZIP-13", "extra-framing"),
        ("zip64-empty", extra_field(1, b""), "ZIP-13 ZIP64-4 ZIP-10", "extra-unneeded"),
        ("zip64-equal", zip64_field(24, 24), "ZIP-13 ZIP64-4 ZIP-10", "extra-unneeded"),
        ("zip64-lying", zip64_field(99, 99), "ZIP-13 ZIP64-4 ZIP-10", "extra-unneeded"),
    )
    for name, extra, rules, attack in records:
        yield refused(
            f"record-extra-{name}",
            "A directory record has extra fields that it must not have.",
            rules,
            entry_with(0, record_extra=extra),
            attack,
        )
    yield refused(
        "record-extra-missing",
        "A saturated size, and no Zip64 field.",
        "ZIP-13",
        entry_with(0, both={"compressed_size": 0xFFFFFFFF, "uncompressed_size": 0xFFFFFFFF}),
        "sentinel-no-extra",
    )
    fits = {"compressed_size": 0xFFFFFFFF, "uncompressed_size": 0xFFFFFFFF, "version_needed": 45}
    yield refused(
        "record-extra-fits",
        "A Zip64 field for a size that fits.",
        "ZIP64-4",
        lambda: changed(
            0,
            both=fits,
            record_extra=zip64_field(24, 24),
            local_extra=zip64_field(24, 24) + alignment_extra(64, 7),
        ),
        "extra-unneeded",
    )
    huge: tuple[tuple[str, bytes], ...] = (
        ("2-63", zip64_field(1 << 63, 1 << 63)),
        ("2-64", zip64_field((1 << 64) - 1, (1 << 64) - 1)),
    )
    for name, extra in huge:
        yield refused(
            f"size-{name}",
            "A size larger than any file.",
            "ZIP-6",
            entry_with(0, both=fits, record_extra=extra),
            "extra-huge",
        )
    yield refused(
        "offset-2-64",
        "A header offset larger than any file.",
        "ZIP-6",
        entry_with(
            1,
            both={"version_needed": 45},
            record={"header_offset": 0xFFFFFFFF},
            record_extra=zip64_field((1 << 64) - 1),
        ),
        "extra-huge",
    )
    for name, extra in (
        ("7-bytes", extra_field(1, bytes(7))),
        ("one-of-two", zip64_field(1 << 33)),
        ("too-long", zip64_field(1 << 33, 1 << 33, 0, 0)),
        ("with-disk", zip64_field(1 << 33, 1 << 33)[:2] + b"\x14\0" + bytes(20)),
    ):
        yield refused(
            f"zip64-field-{name}",
            "A Zip64 field has a wrong length.",
            "ZIP64-4",
            entry_with(0, both=fits, record_extra=extra),
            "extra-length",
        )
    yield refused(
        "zip64-field-twice",
        "Two Zip64 fields in a directory record.",
        "ZIP-13",
        entry_with(0, both=fits, record_extra=zip64_field(1 << 33, 1 << 33) * 2),
        "extra-duplicate",
    )
    local: tuple[tuple[str, bytes, str], ...] = (
        ("none", b"", "ZIP-6 ALIGN-1 ZIP-14"),
        ("zeros", bytes(33), "ZIP-14"),
        ("timestamp-before", TIMESTAMP + alignment_extra(64, 18), "ZIP-14"),
        ("timestamp-after", alignment_extra(64, 18) + TIMESTAMP, "ZIP-14"),
        ("alignment-twice", alignment_extra(64, 0) + alignment_extra(64, 21), "ZIP-14"),
        ("stray", alignment_extra(64, 26) + b"\0", "ZIP-14"),
        ("overrun", struct.pack("<HHH", 0xD935, 200, 64) + bytes(27), "ZIP-14"),
        ("alignment-empty", extra_field(0xD935, b"") + extra_field(0, bytes(25)), "ZIP-14"),
        ("zip64-unneeded", zip64_field(24, 24) + alignment_extra(64, 7), "ZIP-14"),
        ("unicode-path", renamed + alignment_extra(64, 13), "ZIP-14"),
    )
    for name, extra, rules in local:
        yield refused(
            f"local-extra-{name}",
            "The extra fields of a local header are not exactly one alignment field.",
            rules,
            entry_with(0, local_extra=extra),
            "unicode-path" if name == "unicode-path" else "extra-framing",
        )


def _bad_names() -> Iterator[Vector]:
    def named(name: bytes, **changes: object) -> Callable[[], Image]:
        """Returns a function that makes an archive with a tensor in an entry called `name`."""

        def source() -> Image:
            text = name.decode(errors="replace")
            image = archive(W, Tensor("v", pairs=(("location", text),)))
            entry = replace(image.entries[1], name=name)
            image.entries[1] = replace(entry, **changes)  # type: ignore[arg-type]
            return image

        return source

    keys: tuple[tuple[str, bytes, str, str], ...] = (
        ("digit-first", b"0w", "KEY-1", "path-like"),
        ("dash", b"w-0", "KEY-1", "path-like"),
        ("256-bytes", b"k" * 256, "KEY-1", "path-like"),
        ("reserved", b"__META", "VERSION-1", "later-version"),
        ("assets", b"assets", "KEY-1", "path-like"),
        ("assets-in-capitals", b"ASSETS", "KEY-1", "path-like"),
        ("letter-beyond-ascii", "é".encode(), "KEY-1", "control"),
        ("newline", b"u\n", "KEY-1", "control"),
        ("nul", b"u\0", "KEY-1", "control"),
        ("nul-inside", b"u\0.exe", "KEY-1", "control"),
        ("folder", b"a/w0", "KEY-1", "path-like"),
        ("parent", b"..", "KEY-1", "path-like"),
        ("above", b"../w0", "KEY-1", "path-like"),
        ("absolute", b"/w0", "KEY-1", "path-like"),
        ("backslash", b"a\\w0", "KEY-1", "path-like"),
        ("drive", b"C:", "KEY-1", "path-like"),
        ("dot", b".", "KEY-1", "path-like"),
        ("empty", b"", "KEY-1", "path-like"),
        ("directory-entry", b"u/", "KEY-1", "directory"),
        ("assets-folder-in-capitals", b"Assets/a", "KEY-1", "path-like"),
        ("model-in-small-letters", b"__model_proto", "VERSION-1 NAME-2", "fold-collision"),
    )
    for name, entry_name, rules, attack in keys:
        yield refused(f"name-{name}", "A key is invalid.", rules, named(entry_name), attack)
    yield refused(
        "name-not-utf-8",
        "A name that is not UTF-8, flagged as UTF-8.",
        "NAME-1",
        named(b"u\xff\xfe"),
        "utf8",
    )
    yield refused(
        "name-latin-1",
        "A name in Latin-1, not flagged.",
        "NAME-1 ZIP-9",
        named(b"gr\xf6\xdfe", both={"flags": 0}),
        "utf8",
    )
    yield refused(
        "name-utf-8-not-flagged",
        "The name of an asset has a letter beyond ASCII, but bit 11 of the flags is not set.",
        "ZIP-9",
        lambda: archive(assets=(Entry("assets/é".encode(), b"", both={"flags": 0}),)),
        "utf8",
    )
    yield refused(
        "name-surrogate",
        "The name of an asset has a surrogate, encoded as in UTF-8.",
        "NAME-1",
        lambda: archive(assets=(Entry(b"assets/\xed\xa0\x80"),)),
        "utf8",
    )
    yield refused(
        "name-overlong",
        "The name of an asset has a slash in two bytes, an overlong form of UTF-8.",
        "NAME-1",
        lambda: archive(assets=(Entry(b"assets/a\xc0\xafb"),)),
        "utf8",
    )
    yield refused(
        "duplicate-tensor",
        "Two entries with the same key.",
        "NAME-2 DATA-3",
        lambda: archive(W, replace(W, name="w2")),
        "duplicate",
    )
    yield refused(
        "duplicate-model",
        "Two default models.",
        "NAME-2 MODEL-1",
        lambda: archive(assets=(Entry(MODEL_PROTO, model(graph())),)),
        "duplicate",
    )
    yield refused(
        "fold-collision",
        "Two keys that differ only in case.",
        "NAME-2",
        lambda: archive(Tensor("w0"), Tensor("W0")),
        "fold-collision",
    )
    for name, first, second in (
        ("file-and-folder", b"assets/a", b"assets/A/b"),
        ("file-and-folders", b"assets/x/y", b"assets/x/y/z/w"),
    ):
        yield refused(
            f"names-{name}",
            "After down-casing, the name of an asset is a folder in the name of another asset.",
            "NAME-2",
            partial(archive, assets=(Entry(first), Entry(second))),
            "fold-collision",
        )
    assets: tuple[tuple[str, bytes, str], ...] = (
        ("empty", b"assets/", "directory"),
        ("empty-component", b"assets//a", "path-like"),
        ("directory", b"assets/a/", "directory"),
        ("parent", b"assets/../a", "path-like"),
        ("dot", b"assets/./a", "path-like"),
        ("parent-last", b"assets/a/..", "path-like"),
        ("backslash", b"assets/a\\b", "path-like"),
        ("colon", b"assets/a:b", "path-like"),
        ("newline", b"assets/a\n", "control"),
        ("nul", b"assets/a\0b", "control"),
        ("delete", b"assets/a\x7f", "control"),
        ("c1", "assets/a\x85".encode(), "control"),
        ("component-256", b"assets/" + b"x" * 256, "path-like"),
        ("1025", b"assets/" + b"/".join([b"x" * 255] * 3 + [b"y" * 250]), "path-like"),
        ("version", b"assets/a;1", "path-like"),
        ("not-composed", "assets/e\u0301".encode(), "utf8"),
    )
    for name, entry_name, attack in assets:
        yield refused(
            f"name-of-asset-{name}",
            "The name of an asset is invalid.",
            "ASSET-1",
            partial(archive, W, assets=(Entry(entry_name, b"data"),)),
            attack,
        )


def _bad_models() -> Iterator[Vector]:
    yield refused(
        "no-model", "There is no model.", "MODEL-1", lambda: Image([LABELS]), "model-missing"
    )
    yield refused("no-entries", "An empty zip.", "MODEL-1", lambda: EMPTY_ZIP, "model-missing")
    yield refused(
        "model-first",
        "The model comes before a tensor.",
        "MODEL-1",
        lambda: Image([Entry(MODEL_PROTO, model(graph(W))), W.entry]),
        "model-not-last",
    )
    two = model(graph(W)) + model(graph())
    overlong = number(1, 10)[:1] + b"\x8a" + b"\x80" * 9 + b"\0"
    rest = content(7, graph(W))
    protos: tuple[tuple[str, str, bytes, str], ...] = (
        ("empty", "no bytes", b"", "proto-corrupt"),
        ("no-ir-version", "no ir_version", content(7, graph(W)), "proto-corrupt"),
        ("no-graph", "no graph", number(1, 10), "proto-corrupt"),
        ("cut", "the last byte is missing", model(graph(W))[:-1], "proto-corrupt"),
        ("two-graphs", "two graphs", model(graph(W), content(7, graph())), "proto-concat"),
        ("two-models", "two ModelProtos", two, "proto-concat"),
        ("field-0", "field number 0", number(1, 10) + rest + b"\0\0", "proto-corrupt"),
        ("wire-type-7", "wire type 7", number(1, 10) + rest + b"\x0f\0", "proto-corrupt"),
        ("length", "a length past the end", number(1, 10) + rest + b"\x12\x7f", "proto-corrupt"),
        ("varint", "a varint of 11 bytes", rest + overlong, "proto-corrupt"),
        ("group-open", "a group without end", number(1, 10) + rest + b"\xc3\x3e", "proto-corrupt"),
        ("group-end", "an extra group end", number(1, 10) + rest + b"\xc4\x3e", "proto-corrupt"),
        (
            "inside",
            "damage inside a node",
            model(graph(W, more=content(1, b"\x0a\x7f"))),
            "proto-corrupt",
        ),
        ("tag-long", "a tag of 6 bytes", _odd(b"\x90\x80\x80\x80\x80\x00\x01"), "proto-corrupt"),
        ("tag-large", "a field number of 2^29", _odd(b"\x80\x80\x80\x80\x10\x01"), "proto-corrupt"),
        (
            "length-long",
            "a length encoded in 6 bytes",
            _odd(b"\x12\x80\x80\x80\x80\x80\x00"),
            "proto-corrupt",
        ),
        (
            "packed-cut",
            "a packed field that ends within a varint",
            _odd(_in_w(b"\x3a\x01\x80")),
            "proto-corrupt",
        ),
        ("packed-part", "a float of 3 bytes", _odd(_in_w(b"\x22\x03abc")), "proto-corrupt"),
        ("zip", "a zip instead of a ModelProto", to_bytes(archive(W)), "proto-corrupt"),
        ("too-deep", "messages nested 101 deep", nested_graphs(101), "proto-deep"),
        ("far-too-deep", "messages nested 1,000 deep", nested_graphs(1000), "proto-deep"),
    )
    for name, words, proto, attack in protos:
        yield refused(
            f"model-{name}",
            f"Fault in the model: {words}.",
            "MODEL-3 ZIP-16" if name == "zip" else "MODEL-3",
            partial(of_proto, proto, W),
            attack,
        )


def _odd(graph_fields: bytes) -> bytes:
    """A model with these bytes in its graph."""
    return model(graph(W, more=graph_fields))


def _in_w(fields: bytes) -> bytes:
    """A GraphProto field: an initializer with these fields."""
    return content(5, content(8, "inside") + fields)


def _bad_external_data() -> Iterator[Vector]:
    def locations(location: str) -> Callable[[], Image]:
        return lambda: archive(W, replace(V, pairs=(("location", location),)))

    dangling: tuple[tuple[str, str], ...] = (
        ("unknown", "u"),
        ("empty", ""),
        ("path", "/etc/passwd"),
        ("above", "../v"),
        ("dot", "./v"),
        ("case", "V"),
        ("model", "__MODEL_PROTO"),
        ("nul", "v\0"),
        ("newline", "v\n"),
    )
    for name, location in dangling:
        yield refused(
            f"location-{name}",
            "A location is no key of the archive.",
            "DATA-1 DATA-2",
            locations(location),
            "dangling",
        )
    yield refused(
        "location-asset",
        "The location of a tensor is an asset.",
        "DATA-1",
        _located_in_asset,
        "dangling",
    )
    yield refused(
        "unreferenced",
        "An entry is the location of no tensor.",
        "DATA-2",
        lambda: of_proto(model(graph(W)), W, V),
        "unreferenced",
    )
    yield refused(
        "shared-key",
        "Two tensors of one model have the same location.",
        "DATA-3",
        lambda: of_proto(model(graph(W, replace(W, name="w2"))), W),
        "shared-key",
    )
    hidden = content(1, node(attribute(5, replace(W, name="w2").proto)))
    yield refused(
        "shared-key-in-attribute",
        "An initializer and a tensor in an attribute have the same location.",
        "DATA-3",
        lambda: of_proto(model(graph(W, more=hidden)), W),
        "shared-key",
    )
    proto, tensors = everywhere()
    for tensor in tensors:
        yield refused(
            f"unreferenced-place-{tensor.key.removesuffix('_key').replace('_', '-')}",
            "A model has a tensor at every possible place; one of these tensors has no entry.",
            "DATA-1",
            partial(of_proto, proto, *(it for it in tensors if it != tensor)),
            "ref-elsewhere",
        )
    at = ("location", "w")
    pairs: tuple[tuple[str, tuple[tuple[str, str | bytes], ...], str, str], ...] = (
        ("none", (), "DATA-4 DATA-2", "ext-keys"),
        ("no-location", (("offset", "0"),), "DATA-4 DATA-2", "ext-keys"),
        ("location-twice", (at, at), "DATA-4", "ext-keys"),
        ("two-locations", (("location", "u"), at), "DATA-4", "ext-keys"),
        ("offset-twice", (at, ("offset", "0"), ("offset", "0")), "DATA-4", "ext-keys"),
        ("basepath", (at, ("basepath", "/etc")), "DATA-4", "ext-keys"),
        ("unknown", (at, ("Offset", "0")), "DATA-4", "ext-keys"),
        ("empty-key", (at, ("", "")), "DATA-4", "ext-keys"),
        ("offset", (at, ("offset", "4")), "DATA-5", "ext-numbers"),
        ("offset-00", (at, ("offset", "00")), "DATA-5", "ext-numbers"),
        ("offset-minus", (at, ("offset", "-0")), "DATA-5", "ext-numbers"),
        ("offset-empty", (at, ("offset", "")), "DATA-5", "ext-numbers"),
        ("length", (at, ("length", "23")), "DATA-5", "ext-numbers"),
        ("length-zero", (at, ("length", "0")), "DATA-5", "ext-numbers"),
        ("length-plus", (at, ("length", "+24")), "DATA-5", "ext-numbers"),
        ("length-blank", (at, ("length", " 24")), "DATA-5", "ext-numbers"),
        ("length-newline", (at, ("length", "24\n")), "DATA-5", "ext-numbers"),
        ("length-underscore", (at, ("length", "2_4")), "DATA-5", "ext-numbers"),
        ("length-leading-zero", (at, ("length", "024")), "DATA-5", "ext-numbers"),
        ("length-other-digits", (at, ("length", "\u0662\u0664")), "DATA-5", "ext-numbers"),
        ("length-2-64", (at, ("length", str(2**64 + 24))), "DATA-5", "ext-numbers"),
        ("checksum", (at, ("checksum", "0" * 40)), "DATA-6", "ext-keys"),
        ("location-not-utf-8", (("location", b"\xff"),), "DATA-1 DATA-2", "dangling"),
        ("length-not-utf-8", (at, ("length", b"\xff")), "DATA-5", "ext-numbers"),
        ("checksum-not-utf-8", (at, ("checksum", b"\xff")), "DATA-6", "ext-keys"),
        ("checksum-empty", (at, ("checksum", "")), "DATA-6", "ext-keys"),
        (
            "checksum-in-capitals",
            (at, ("checksum", hashlib.sha1(_bytes(W)).hexdigest().upper())),
            "DATA-6",
            "ext-keys",
        ),
    )
    for name, given, rules, attack in pairs:
        yield refused(
            f"external-data-{name}",
            "The pairs of external_data are invalid.",
            rules,
            partial(archive, replace(W, pairs=given)),
            attack,
        )
    more: tuple[tuple[str, bytes], ...] = (
        ("raw-data", content(9, _bytes(W))),
        ("raw-data-empty", content(9, b"")),
        ("float-data", content(4, bytes(24))),
        ("int32-data", numbers(5, (1,))),
        ("string-data", content(6, "")),
        ("int64-data", numbers(7, (1,))),
        ("double-data", content(10, bytes(8))),
        ("uint64-data", numbers(11, (1,))),
        ("segment", content(3, number(1, 0))),
    )
    for name, fields in more:
        yield refused(
            f"two-sources-{name}",
            "An external tensor also has data in the model.",
            "DATA-7",
            partial(archive, replace(W, more=fields)),
            "two-sources",
        )
    for name, fields in (("default", b""), ("unknown", number(14, 7))):
        yield refused(
            f"not-external-{name}",
            "Pairs of external_data in a tensor that is not external.",
            "DATA-7 DATA-2",
            partial(archive, replace(W, is_external=False, more=fields)),
            "two-sources",
        )


def _located_in_asset() -> Image:
    tensor = Tensor("labels", pairs=(("location", "assets/labels.txt"),))
    return Image([LABELS, Entry(MODEL_PROTO, model(graph(tensor)))])


def _bytes(tensor: Tensor) -> bytes:
    assert isinstance(tensor.data, bytes)
    return tensor.data


def _bad_tensors() -> Iterator[Vector]:
    for data_type in (0, STRING, 29, 99, -1):
        yield refused(
            f"data-type-{data_type}".replace("--", "-minus-"),
            "An external tensor has an invalid data type.",
            "TENSOR-1",
            partial(archive, replace(W, data_type=data_type)),
            "dtype",
        )
    shapes: tuple[tuple[str, tuple[int, ...], int, bytes, str], ...] = (
        ("negative", (-1,), UINT8, bytes(1), "dims"),
        ("negative-twice", (-2, -4), UINT8, bytes(8), "dims"),
        ("65", (1,) * 65, UINT8, bytes(1), "dims"),
        ("2-64", (2**32, 2**32), UINT8, b"", "dims"),
        ("2-64-and-1", (2**32, 2**32, 1), FLOAT, b"", "dims"),
        ("2-63", (2**62, 2), UINT8, b"", "dims"),
        ("element", (2**61,), FLOAT, b"", "dims"),
        ("zero-between", (2**33, 0, 2**33), UINT8, b"", "zero-size"),
        ("packed", (2**62, 4, 0), INT4, b"", "zero-size"),
    )
    for name, dims, data_type, data, attack in shapes:
        yield refused(
            f"dims-{name}",
            "An external tensor has invalid dims.",
            "TENSOR-2 TENSOR-3" if name in ("2-63", "element") else "TENSOR-2",
            partial(archive, Tensor("w", data_type, dims, data)),
            attack,
        )
    sizes: tuple[tuple[str, Tensor], ...] = (
        ("one-less", Tensor("w", FLOAT, (2,), bytes(7))),
        ("one-more", Tensor("w", FLOAT, (2,), bytes(9))),
        ("none", Tensor("w", FLOAT, (2,), b"")),
        ("of-no-elements", Tensor("w", FLOAT, (2, 0), bytes(8))),
        ("unpacked", Tensor("w", INT4, (4,), bytes(4))),
        ("packed-one-less", Tensor("w", INT4, (5,), bytes(2))),
        ("six-bits", Tensor("w", FLOAT6, (5,), bytes(3))),
        ("overflow", Tensor("w", UINT8, (2**61 + 8,), bytes(8))),
    )
    for name, tensor in sizes:
        yield refused(
            f"tensor-size-{name}",
            "An entry and its tensor differ in size.",
            "TENSOR-3",
            partial(archive, tensor),
            "size-lie",
        )
    tails: tuple[tuple[str, Tensor], ...] = (
        ("int4", Tensor("w", INT4, (3,), b"\x21\x13")),
        ("uint2", Tensor("w", UINT2, (5,), b"\x1b\x04")),
        ("float6", Tensor("w", FLOAT6, (1,), b"\x40")),
        ("float4", Tensor("w", FLOAT4, (1,), b"\x80")),
    )
    for name, tensor in tails:
        yield refused(
            f"unused-bits-{name}",
            "An unused bit in the last byte of a packed tensor is set.",
            "TENSOR-4",
            partial(archive, tensor),
            "dtype",
        )
    for value in (2, 255):
        yield refused(
            f"bool-{value}",
            "A boolean that is neither 0 nor 1.",
            "TENSOR-5",
            partial(archive, replace(B, data=bytes([0, 1, value]))),
            "dtype",
        )
