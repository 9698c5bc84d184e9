"""Small files that break a rule of framing, order or Zip64 (sections 5.1 and 5.4)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from conformance.make.parts import (
    EMPTY_ZIP,
    SIGNING_BLOCK,
    UINT8,
    Tensor,
    V,
    Vector,
    W,
    archive,
    entry_with,
    image_with,
    plain,
    plus,
    refused,
    to_bytes,
)
from conformance.make.zips import Entry, Image


def bad_framing() -> Iterator[Vector]:
    """The vectors of this module."""
    yield from _bad_ends()
    yield from _bad_zip64_ends()
    yield from _bad_order()


def _bad_ends() -> Iterator[Vector]:
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
