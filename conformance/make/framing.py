"""Small files that break a rule of framing, order or Zip64 (sections 5.1 and 5.4)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace

from conformance.make.parts import (
    EMPTY_ZIP,
    SIGNING_BLOCK,
    UINT8,
    Tensor,
    V,
    Vector,
    W,
    archive,
    changed,
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

    yield refused("empty: ZIP-2 (eocd-absent)", "A file of no bytes.", b"")
    yield refused("cut-by-one: ZIP-2 (truncated)", "The last byte is missing.", whole[:-1])
    yield refused(
        "cut-in-directory: ZIP-2 (truncated)", "The file ends in the directory.", whole[: end - 40]
    )
    yield refused("cut-in-data: ZIP-2 (eocd-absent)", "The file ends in a tensor.", whole[:70])
    yield refused(
        "comment: ZIP-2 ZIP-16 (eocd-comment)",
        "A comment of the archive.",
        image_with(after_end=b"hello", end={"comment_length": 5}),
    )
    yield refused(
        "comment-missing: ZIP-2 (eocd-comment)",
        "The end record states the length of a comment that is missing.",
        image_with(end={"comment_length": 5}),
    )
    yield refused(
        "comment-is-end-record: ZIP-5 MODEL-1 ZIP-16 (eocd-in-comment)",
        "The comment is the end record of an empty zip.",
        image_with(after_end=EMPTY_ZIP, end={"comment_length": 22}),
    )
    yield refused(
        "comment-is-zip: ZIP-5 ZIP-16 ZIP-4 (zip-in-comment)",
        "The comment is a whole zip.",
        image_with(after_end=to_bytes(archive()), end={"comment_length": len(to_bytes(archive()))}),
    )
    yield refused(
        "comment-is-zip-with-offsets: ZIP-1 ZIP-16 (zip-in-comment)",
        "The comment is a whole zip with offsets that count from the start of the file.",
        whole[:-2]
        + struct.pack("<H", len(to_bytes(replace(archive(), prefix=whole))) - len(whole))
        + to_bytes(replace(archive(), prefix=whole))[len(whole) :],
    )
    yield refused(
        "stacked: ZIP-5 ZIP-16 (stacked)", "Two archives, one after the other.", whole * 2
    )
    yield refused(
        "stacked-with-offsets: ZIP-1 ZIP-16 (stacked)",
        "Two archives; the offsets of the second count from the start of the file.",
        image_with(prefix=whole),
    )
    yield refused(
        "trailing: ZIP-2 ZIP-16 (trailing)", "A byte after the end record.", whole + b"\0"
    )
    yield refused(
        "trailing-64: ZIP-2 ZIP-16 (trailing)",
        "64 bytes after the end record.",
        image_with(after_end=bytes(64)),
    )
    yield refused(
        "prefix: ZIP-5 ZIP-4 (prefix)",
        "Bytes before the first header; the offsets do not count them.",
        b"#!/bin/sh\n".ljust(64) + whole,
    )
    yield refused(
        "prefix-with-offsets: ZIP-1 (prefix)",
        "Bytes before the first header; the offsets count them.",
        image_with(prefix=b"#!/bin/sh\n".ljust(64)),
    )
    yield refused(
        "spanned-marker: ZIP-1 (spanned-marker)",
        "The file begins with the marker of a split zip.",
        image_with(prefix=b"PK00"),
    )
    for field in ("disk", "directory_disk"):
        yield refused(
            f"end-{field.replace('_', '-')}: ZIP-3 (disk)",
            "The end record names a second disk.",
            image_with(end={field: 1}),
        )
    yield refused(
        "record-disk: ZIP-3 (disk)",
        "A directory record names a second disk.",
        changed(1, record={"disk_start": 1}),
    )
    yield refused(
        "record-disk-saturated: ZIP-3 (disk)",
        "A disk number is saturated.",
        changed(1, record={"disk_start": 0xFFFF}),
    )
    for name, change in (("less", -1), ("more", 1)):
        count = 4 + change
        yield refused(
            f"count-one-{name}: ZIP-4 (count)",
            f"The end record counts one record {name} than the directory has.",
            image_with(end={"disk_count": count, "count": count}),
        )
    yield refused(
        "count-of-disk: ZIP-4 (count)",
        "The end record counts fewer records on the disk than in all.",
        image_with(end={"disk_count": 3}),
    )
    yield refused(
        "count-zero: ZIP-4 (count)",
        "The end record counts no records.",
        image_with(end={"disk_count": 0, "count": 0}),
    )
    yield refused(
        "count-beyond-size: ZIP-4 (entry-bomb)",
        "The end record counts more records than fit the directory.",
        image_with(end={"disk_count": 60000, "count": 60000}),
    )
    for name, size in (("one-less", -1), ("one-record-more", 46)):
        yield refused(
            f"directory-size-{name}: ZIP-5 ZIP-4 (cd-size)",
            "The end record states a wrong size of the directory.",
            image_with(end={"directory_size": plus(size)}),
        )
    first = len(plain().place()[0].record)
    yield refused(
        "directory-first-record-only: ZIP-5 MODEL-1 (cd-size)",
        "The end record states a directory that ends after its first record.",
        image_with(end={"directory_size": first, "count": 1, "disk_count": 1}),
    )
    last = len(plain().place()[3].record)
    yield refused(
        "directory-last-record-only: ZIP-1 DATA-1 (cd-size)",
        "The end record states a directory that consists of the last record.",
        image_with(
            end={
                "directory_size": last,
                "directory_offset": end - last,
                "count": 1,
                "disk_count": 1,
            }
        ),
    )
    yield refused(
        "directory-record-cut: ZIP-4 (cd-size)",
        "The end record states a directory that begins one byte later and is one byte shorter.",
        image_with(end={"directory_size": plus(-1), "directory_offset": plus(1)}),
    )
    yield refused(
        "directory-offset: ZIP-5 ZIP-4 (cd-size)",
        "The end record states a directory that begins one byte too late.",
        image_with(end={"directory_offset": plus(1)}),
    )
    records = whole[directory:end]
    yield refused(
        "two-directories: ZIP-5 (two-cds)",
        "A second directory follows the true one.",
        image_with(after_directory=records),
    )
    yield refused(
        "two-directories-second: ZIP-6 ZIP-7 ALIGN-1 ZIP-15 MODEL-3 (two-cds)",
        "A second directory precedes the true one.",
        image_with(before_directory=records.replace(b"\1\2\x2d", b"\1\2\x14")),
    )
    yield refused(
        "directory-signature: ZIP-4 (cd-no-lfh)",
        "A directory record has a wrong signature.",
        changed(1, record={"signature": b"PK\1\3"}),
    )


def _bad_zip64_ends() -> Iterator[Vector]:
    yield refused(
        "locator-missing: ZIP64-1 (locator-missing)",
        "The end record is saturated; Zip64 end record and locator are missing.",
        image_with(is_saturated=True),
    )
    yield refused(
        "count-saturated: ZIP64-1 (locator-missing)",
        "Both counts of the end record are saturated; Zip64 end record and locator are missing.",
        image_with(end={"disk_count": 0xFFFF, "count": 0xFFFF}),
    )
    yield refused(
        "zip64-unneeded: ZIP64-1 (two-truths)",
        "A Zip64 end record and a locator, although all values fit the end record.",
        image_with(has_zip64=True),
    )
    yield refused(
        "zip64-beside-values: ZIP-5 ZIP64-1 (two-truths)",
        "A Zip64 end record, a locator, and an end record without saturated values.",
        image_with(has_zip64=True, is_saturated=False),
    )
    yield refused(
        "zip64-other-values: ZIP-5 ZIP64-1 (two-truths)",
        "The Zip64 end record and the end record state different counts.",
        image_with(has_zip64=True, is_saturated=False, zip64={"count": 1, "disk_count": 1}),
    )
    yield refused(
        "zip64-locator-in-attributes: ZIP-11 ZIP64-1 ZIP-16 (two-truths)",
        "The last 20 bytes of the directory begin with the signature of a Zip64 locator.",
        _looking_like_a_locator(),
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
        "gap-before-directory: ZIP-7 ZIP-6 ZIP-15 MODEL-3 (gaps)",
        "Bytes between the last entry and the directory.",
        image_with(before_directory=gap),
        stage="open",
    )
    yield refused(
        "gap-before-directory-long: ZIP-6 ZIP-7 (gaps)",
        "A gap of 32,768 bytes before the directory, longer than the longest padding.",
        image_with(before_directory=long_gap),
    )
    yield refused(
        "gap-after-directory: ZIP-5 (gaps)",
        "Bytes between the directory and the end record.",
        image_with(after_directory=gap),
    )
    yield refused(
        "gap-between-entries: ZIP-7 ZIP-6 (gaps)",
        "Bytes between two entries.",
        changed(1, before=gap),
    )
    yield refused(
        "gap-between-entries-long: ZIP-6 ZIP-7 (gaps)",
        "A gap of 32,768 bytes between two entries, longer than the longest padding.",
        changed(1, before=long_gap),
    )
    yield refused(
        "signing-block: ZIP-6 ZIP-7 ALIGN-1 ZIP-15 MODEL-3 (gaps)",
        "A signing block, as Android packages have it, before the directory.",
        image_with(before_directory=SIGNING_BLOCK),
    )
    yield refused(
        "directory-order: ZIP-1 ZIP-6 (cd-order)",
        "The directory and the entries are in different orders.",
        swap(plain()),
    )
    yield refused(
        "hidden-entry: ZIP-7 ZIP-6 (hidden-lfh)",
        "An entry that the directory does not list.",
        _hidden(b"x" * (64 + 24)),
    )
    yield refused(
        "hidden-entry-long: ZIP-6 (hidden-lfh)",
        "A long entry that the directory does not list.",
        _hidden(bytes(40000)),
    )
    yield refused(
        "record-without-entry: ZIP-6 (cd-no-lfh)",
        "A directory record without an entry.",
        _with_record(Tensor("u"), header_offset=0xFFFF),
    )
    for name, key, rules in (
        ("another-name", "u", "ZIP-6"),
        ("the-same-name", "w", "ZIP-6 NAME-2 DATA-3"),
    ):
        yield refused(
            f"shared-header-{name}: {rules} (same-lfh)",
            "Two directory records state the same header offset.",
            _with_record(replace(W, key=key), header_offset=0),
        )
    yield refused("nested-entry: ZIP-6 (nested)", "An entry in another entry's data.", _nested())
    yield refused(
        "quoted-header: ZIP-6 ALIGN-1 (quoted)",
        "The data of an entry contains the local header and the data of the next entry.",
        _quoted(),
    )
    yield refused(
        "data-into-directory: ZIP-6 (into-cd)",
        "The data of the last entry runs into the directory.",
        changed(3, both={"compressed_size": plus(4096), "uncompressed_size": plus(4096)}),
    )
    yield refused(
        "data-past-end: ZIP-6 TENSOR-3 (past-eof)",
        "The data of an entry runs past the end of the file.",
        changed(1, both={"compressed_size": 0x7FFFFFFF, "uncompressed_size": 0x7FFFFFFF}),
    )
    yield refused(
        "header-past-directory: ZIP-6 (lfh-past-cd)",
        "A directory record gives a header offset after the directory.",
        changed(1, record={"header_offset": 0x10000}),
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
