"""Vectors of more than 1 MiB; files of some GiB are sparse."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace

from conformance.make import zips as v
from conformance.make.parts import (
    BIG,
    GIB,
    MODEL_PROTO,
    Vector,
    W,
    accepted,
    alignment_extra,
    model,
    more_entries,
    of_proto,
    plus,
    refused,
    sparse,
    sparse_big,
)
from conformance.make.zips import Entry, Image, Zeros, content, zip64_field


def large() -> Iterator[Vector]:
    """The vectors of this module: each file is larger than 1 MiB."""
    for vector in (*_entries_and_models(), *_bad_zip64()):
        yield replace(vector, large=True)


def _entries_and_models() -> Iterator[Vector]:
    yield accepted(
        "entries-65534: ZIP64-1 ZIP-4",
        "The largest number of entries that the end record can count.",
        lambda: more_entries(65534),
        W,
    )
    yield accepted(
        "entries-65535: ZIP64-1 ZIP64-2 ZIP64-3 ZIP-4",
        "The smallest number of entries that needs Zip64.",
        lambda: more_entries(65535),
        W,
    )
    yield accepted(
        "entries-262144: ZIP-4",
        "The largest number of entries that an archive may have.",
        lambda: more_entries(262144),
        W,
    )
    yield accepted(
        "sparse: ZIP64-1 ZIP64-2 ZIP64-3 ZIP64-4 ZIP64-5 ZIP-13 ZIP-14 ZIP-10",
        "A size, header offsets and a directory offset that do not fit 32 bits.",
        sparse,
        BIG,
        W,
    )
    yield refused(
        "entries-262145: ZIP-4 (entry-bomb)",
        "One entry more than an archive may have.",
        lambda: more_entries(262145),
    )
    yield refused(
        "entries-mod-65536: ZIP-4 (count)",
        "65,537 entries, counted modulo 65,536.",
        lambda: replace(more_entries(65537), has_zip64=False, end={"disk_count": 1, "count": 1}),
    )
    yield refused(
        "model-2-gib: MODEL-2 (model-2gib)",
        "A model of 2 GiB.",
        lambda: Image([Entry(MODEL_PROTO, Zeros(2 * GIB), crc=0)]),
    )
    yield refused(
        "model-messages: MODEL-3 (proto-amplify)",
        "A model of 4,194,305 messages in 8 MiB.",
        lambda: of_proto(model(content(1, b"") * (4194305 - 2))),
    )


def _bad_zip64() -> Iterator[Vector]:
    def one(heading: str, about: str, **changes: object) -> Vector:
        return refused(heading, about, lambda: sparse(**changes))

    def big(heading: str, about: str, **changes: object) -> Vector:
        return refused(heading, about, lambda: sparse_big(**changes))

    yield one(
        "sparse-locator-missing: ZIP64-1 (locator-missing)",
        "The end record is saturated; Zip64 end record and locator are missing.",
        has_zip64=False,
        is_saturated=True,
    )
    for name, change in (("less", -1), ("more", 1), ("zero", None)):
        yield one(
            f"sparse-locator-offset-{name}: ZIP64-3 (locator-offset)",
            "The locator gives a wrong offset.",
            locator={"record_offset": 0 if change is None else plus(change)},
        )
    for name, about, locator in (
        ("disks", "states two disks", {"disks": 2}),
        ("no-disks", "states 0 disks", {"disks": 0}),
        ("disk", "puts the Zip64 end record on disk 1", {"record_disk": 1}),
    ):
        heading = f"sparse-locator-{name}: ZIP-3 (locator-disks)"
        yield one(heading, f"The locator {about}.", locator=locator)
    yield one(
        "sparse-record-disk: ZIP-3 (disk)", "The Zip64 end record names disk 1.", zip64={"disk": 1}
    )
    yield one(
        "sparse-gap-after-record: ZIP64-3 (gaps)",
        "Bytes between the Zip64 end record and the locator.",
        after_zip64=bytes(8),
    )
    yield one(
        "sparse-gap-after-locator: ZIP64-1 ZIP64-3 (gaps)",
        "Bytes between the locator and the end record.",
        after_locator=bytes(8),
    )
    for name, size in (("45", 45), ("43", 43), ("2-64", 2**64 - 1)):
        yield one(
            f"sparse-record-size-{name}: ZIP64-2 (record-size)",
            "The Zip64 end record states a wrong size.",
            zip64={"rest_size": size},
        )
    yield one(
        "sparse-extensible-data: ZIP64-2 ZIP64-3 (record-size)",
        "The Zip64 end record has extensible data.",
        zip64={"rest_size": 52},
        after_zip64=struct.pack("<HI2x", 0xCAFE, 2),
    )
    yield one(
        "sparse-record-version: ZIP64-2 (record-v2)",
        "The Zip64 end record states the version needed 62.",
        zip64={"version_needed": 62},
    )
    yield one(
        "sparse-partly-saturated: ZIP64-1 (two-truths)",
        "The end record is saturated except for the counts.",
        end={"disk_count": 3, "count": 3},
    )
    yield one(
        "sparse-count-of-disk: ZIP-4 (count)",
        "The Zip64 end record counts fewer records on the disk than in all.",
        zip64={"disk_count": 2},
    )
    yield one(
        "sparse-count-2-60: ZIP-4 (record-huge)",
        "The Zip64 end record counts 2^60 records.",
        zip64={"disk_count": 1 << 60, "count": 1 << 60},
    )
    yield one(
        "sparse-offset-2-64: ZIP-5 (record-huge)",
        "The stated offset of the directory is 2^64 - 1.",
        zip64={"directory_offset": 2**64 - 1},
    )
    yield one(
        "sparse-size-wraps: ZIP-4 ZIP-5 (record-huge)",
        "Offset plus size of the directory gives the right end only modulo 2^64.",
        zip64={
            "directory_offset": 2**64 - 64,
            "directory_size": plus(64 + sparse_directory_offset()),
        },
    )
    size = v.SATURATED_32
    offset = sparse().place()[1].header_offset
    yield big(
        "sparse-field-missing: ZIP-13 (sentinel-no-extra)",
        "A saturated size, and no Zip64 field in the directory record.",
        record_extra=b"",
    )
    yield big(
        "sparse-field-one-of-two: ZIP64-4 (extra-length)",
        "The Zip64 field holds only one of two sizes.",
        record_extra=zip64_field(size),
    )
    yield big(
        "sparse-field-offset: ZIP64-4 (extra-length)",
        "A Zip64 field with a header offset that fits 32 bits.",
        record_extra=zip64_field(size, size, 0),
    )
    yield big(
        "sparse-field-twice: ZIP-13 (extra-duplicate)",
        "Two Zip64 fields, one with false values.",
        record_extra=zip64_field(size, size) + zip64_field(8, 8),
    )
    yield big(
        "sparse-field-sizes: ZIP-8 (stored-sizes)",
        "The two sizes in the Zip64 field differ.",
        record_extra=zip64_field(size, size + 1),
    )
    yield big(
        "sparse-version-10: ZIP-10 (version-needed)",
        "Version needed 10 beside a Zip64 field.",
        both={"version_needed": 10},
    )
    for name, values, rule in (
        ("missing", (), "ZIP-14"),
        ("lying", (8, 8), "ZIP64-5"),
        ("one-of-two", (size,), "ZIP64-5"),
        ("too-long", (size, size, 0), "ZIP64-5"),
    ):
        field = zip64_field(*values)
        padding = -(30 + 3 + len(field) + 6) % 64
        yield big(
            f"sparse-local-field-{name}: {rule} (extra-length)",
            "The Zip64 field of the local header is missing, or does not hold just the two sizes.",
            local_extra=field + alignment_extra(64, padding),
        )
    yield one(
        "sparse-version-10-of-offset: ZIP-10 (version-needed)",
        "Version needed 10 beside a Zip64 field that holds only a header offset.",
        both={"version_needed": 10},
    )
    yield one(
        "sparse-offset-missing: ZIP-13 (sentinel-no-extra)",
        "A saturated header offset, and no Zip64 field.",
        record_extra=b"",
    )
    yield one(
        "sparse-offset-other: ZIP-6 ALIGN-1 (extra-huge)",
        "The Zip64 field gives a wrong header offset.",
        record_extra=zip64_field(offset + 128),
    )


def sparse_directory_offset() -> int:
    """Offset of the directory in the archive of `sparse`."""
    last = sparse().place()[-1]
    return last.data_offset + len(last.entry.data)
