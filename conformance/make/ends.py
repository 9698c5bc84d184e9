"""The vectors about false records, which mislead readers that search for the end records."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from conformance.make.parts import (
    EMPTY_ZIP,
    MODEL_PROTO,
    UINT8,
    Tensor,
    Vector,
    W,
    accepted,
    archive,
    graph,
    model,
    refused,
    to_bytes,
)
from conformance.make.zips import Entry, Image, content

# The last END_NBYTES bytes of a file must contain no false record.
END_NBYTES = 65_535 + 98
LOCATOR = struct.pack("<4sIQI", b"PK\6\7", 0, 64, 1)
ZIP64_END = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 0x032D, 45, 0, 0, 1, 1, 47, 0)
# The last fields of an end record: a directory of 47 bytes at offset 0, no comment.
END_REST = struct.pack("<IIH", 47, 0, 0)


def end_record(
    disk: int = 0, directory_disk: int = 0, disk_count: int = 1, count: int = 1
) -> bytes:
    """A false end record."""
    return struct.pack("<4s4H", b"PK\5\6", disk, directory_disk, disk_count, count) + END_REST


def holding(data: bytes) -> Tensor:
    """A tensor of these bytes."""
    return Tensor("t", UINT8, (len(data),), data)


def at_distance(record: bytes, distance: int) -> Tensor:
    """A tensor that holds `record`; the record begins `distance` bytes before the archive's end."""
    behind = len(to_bytes(archive(holding(bytes(1 << 17))))) - 64 - (1 << 17)
    rest = distance - behind - len(record)
    return holding(bytes((1 << 17) - rest - len(record)) + record + bytes(rest))


def of_tensor(data: bytes) -> Image:
    """An archive with a tensor of these bytes."""
    return archive(holding(data))


def of_model(data: bytes) -> Image:
    """An archive whose model ends with `data`, in an unknown field."""
    return archive(W, proto=model(graph(W), more=content(1000, data)))


def of_asset(data: bytes) -> Image:
    """An archive with an asset of these bytes."""
    return archive(W, assets=(Entry(b"assets/a", data),))


def false_ends() -> Iterator[Vector]:
    """The vectors about false records."""
    yield from _conforming()
    records = (
        ("end-record", end_record(), "an end record"),
        ("locator", LOCATOR, "a Zip64 locator"),
        ("zip64-end-record", ZIP64_END, "a Zip64 end record"),
    )
    for name, record, called in records:
        for place, source in (
            ("tensor", of_tensor(record)),
            ("asset", of_asset(record)),
            ("model", of_model(record)),
        ):
            yield refused(
                f"false-{name}-in-{place}: ZIP-16 (false-end)",
                f"The {place} holds {called}.",
                source,
            )
        yield refused(
            f"false-{name}-as-far-as-can-be: ZIP-16 (false-end)",
            f"The last 65,633 bytes begin with {called}.",
            archive(at_distance(record, END_NBYTES)),
        )
    yield refused(
        "false-zip64-end-record-cut: ZIP-16 (false-end)",
        "Signature and size of a Zip64 end record, without further fields.",
        of_tensor(ZIP64_END[:12]),
    )
    for name, count in (("zero", 0), ("largest", 0xFFFF)):
        yield refused(
            f"false-end-record-counts-{name}: ZIP-16 (false-end)",
            f"A tensor holds an end record with {count} in both counts.",
            of_tensor(end_record(disk_count=count, count=count)),
        )
    yield refused(
        "false-end-record-other-comment: ZIP-16 (false-end)",
        "A tensor holds an end record whose comment does not end with the file.",
        of_tensor(end_record()[:-2] + b"\xff\xff"),
    )
    yield refused(
        "false-pair: ZIP-16 (false-end)",
        "The signature of a locator begins 20 bytes before the signature of an end record.",
        of_tensor(LOCATOR[:4] + b"\xff" * 16 + b"PK\5\6" + b"\xff" * 18),
    )
    yield refused(
        "false-end-record-in-a-zip: ZIP-16 (false-end)",
        "An asset is an empty zip.",
        of_asset(EMPTY_ZIP),
    )
    yield refused(
        "false-end-record-across-entries: ZIP-16 (false-end)",
        "An end record that begins in a tensor and ends in the next local header.",
        of_tensor(b"PK\5\6" + bytes(4) + b"PK"),
    )
    yield refused(
        "false-end-record-in-directory: ZIP-16 (false-end)",
        "The time and date of an empty asset form the signature of an end record.",
        archive(W, assets=(Entry(b"assets/a", both={"time": 0x4B50, "date": 0x0605}),)),
    )
    yield refused(
        "false-directory: ZIP-16 (false-end)",
        "A tensor holds another archive, with a Zip64 end record and a locator.",
        _false_directory(),
    )


def _false_directory() -> Image:
    """An archive whose tensor holds a whole archive with a Zip64 end record and a locator."""
    other = Image([Entry(MODEL_PROTO, model(graph()))], has_zip64=True)
    data = to_bytes(other)
    return archive(holding(data), assets=(Entry(b"assets/labels", b"x"),))


def _conforming() -> Iterator[Vector]:
    for name, record, called in (
        ("end-record", end_record(), "An end record"),
        ("locator", LOCATOR, "A Zip64 locator"),
        ("zip64-end-record", ZIP64_END, "A Zip64 end record"),
    ):
        tensor = at_distance(record, END_NBYTES + 1)
        yield accepted(
            f"far-{name}: ZIP-16",
            f"{called} in a tensor begins 65,634 bytes before the end of the file.",
            archive(tensor),
            tensor,
        )
    signatures = holding(b"PK\5\6PK\6\7PK\6\6PK\3\4PK\1\2" * 20)
    yield accepted(
        "bare-signatures: ZIP-16",
        "A tensor and the model are full of signatures.",
        archive(
            signatures,
            proto=model(graph(signatures), more=content(1000, signatures.data)),  # type: ignore[arg-type]
        ),
        signatures,
    )
    near = holding(
        end_record(disk=1)
        + end_record(directory_disk=1)
        + end_record(disk_count=2)
        + LOCATOR[:4]
        + b"\1"
        + LOCATOR[5:]
        + LOCATOR[:16]
        + struct.pack("<I", 2)
        + ZIP64_END[:4]
        + struct.pack("<Q", 45)
        + ZIP64_END[12:]
        + LOCATOR[:4]
        + bytes(15)
        + b"PK\5\6\1"
    )
    yield accepted(
        "nearly-records: ZIP-16",
        "Bytes that are nearly false records: end records with a disk number of 1 or with unequal "
        "counts, locators with the disk 1 or with 2 disks, a Zip64 end record with the size 45, "
        "and the signature of a locator 19 instead of 20 bytes before the signature of an end "
        "record.",
        archive(near),
        near,
    )
