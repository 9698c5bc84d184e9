"""Small files that break a rule of records, extra fields or checksums (sections 5.2, 5.3, 5.5)."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from conformance.make.parts import (
    TIMESTAMP,
    Vector,
    alignment_extra,
    archive,
    changed,
    plain,
    refused,
    to_bytes,
)
from conformance.make.zips import Entry, extra_field, zip64_field


def bad_records() -> Iterator[Vector]:
    """The vectors of this module."""
    yield from _bad_headers()
    yield from _bad_directory_records()
    yield from _bad_extra_fields()


def _bad_headers() -> Iterator[Vector]:
    other: tuple[tuple[str, object, str], ...] = (
        ("signature", b"PK\3\5", "ZIP-7 (cd-no-lfh)"),
        ("version_needed", 20, "ZIP-7 (version-needed)"),
        ("flags", 2, "ZIP-7 (flags-mismatch)"),
        ("method", 8, "ZIP-7 (method-mismatch)"),
        ("time", 1, "ZIP-7"),
        ("date", 0x22, "ZIP-7"),
        ("crc32", 0, "ZIP-7 (crc-mismatch)"),
        ("compressed_size", 23, "ZIP-7 (size-mismatch)"),
        ("uncompressed_size", 23, "ZIP-7 (size-mismatch)"),
    )
    for field, value, rules in other:
        yield refused(
            f"local-{field.replace('_', '-')}: {rules}",
            f"The local header has a wrong value: {field.replace('_', ' ')}.",
            changed(0, local={field: value}),
        )
    yield refused(
        "local-name: ZIP-7 (lfh-name)",
        "The local header has a wrong name.",
        changed(0, local_name=b"u"),
    )
    yield refused(
        "local-name-of-model: ZIP-7 (lfh-name)",
        "The local header of the model has a wrong name.",
        changed(3, local_name=b"__MODEL_PROTQ"),
        stage="open",
    )
    yield refused(
        "local-header-of-asset: ZIP-7",
        "The local header of an asset has a wrong date.",
        changed(2, local={"date": 0x22}),
    )
    yield refused(
        "header-missing: ZIP-7 (cd-no-lfh)",
        "Zeros where a local header should be.",
        _without_header(),
    )
    yield refused(
        "data-misaligned: ALIGN-1 ALIGN-2 (misaligned)",
        "Data 32 bytes after a multiple of 64.",
        changed(0, padding=bytes(27 + 32)),
    )
    yield refused(
        "model-misaligned: ALIGN-1 ALIGN-2 (misaligned)",
        "The model is not aligned.",
        changed(3, padding=bytes(1)),
    )
    yield refused(
        "asset-misaligned: ALIGN-1 ALIGN-2 (misaligned)",
        "An asset is not aligned.",
        changed(2, padding=bytes(1)),
    )
    for alignment in (0, 1, 32, 63, 96, 128, 65535):
        rules = "ALIGN-2 ALIGN-3" if alignment in (1, 128) else "ALIGN-2"
        yield refused(
            f"alignment-{alignment}: {rules} (misaligned)",
            f"The alignment field states {alignment}; the data begins at byte 64.",
            changed(0, local_extra=alignment_extra(alignment, 27)),
        )
    yield refused(
        "padding-longer: ALIGN-3 (padding-nonzero)",
        "The padding is 64 bytes longer than needed.",
        changed(0, padding=bytes(27 + 64)),
    )
    for name, padding in (("first", b"\1" + bytes(26)), ("last", bytes(26) + b"\1")):
        yield refused(
            f"padding-{name}-byte: ALIGN-3 (padding-nonzero)",
            "A byte of the padding is not zero.",
            changed(0, padding=padding),
        )


def _without_header() -> bytes:
    image = plain()
    placed = image.place()[1]
    data = bytearray(to_bytes(image))
    data[placed.header_offset : placed.data_offset] = bytes(
        placed.data_offset - placed.header_offset
    )
    return bytes(data)


def _bad_directory_records() -> Iterator[Vector]:
    methods = {8: "deflate", 9: "deflate64", 12: "bzip2", 14: "lzma", 99: "AE-x"}
    for method, name in methods.items():
        yield refused(
            f"method-{method}: ZIP-8 (method)",
            f"An entry with the method {name}.",
            changed(0, both={"method": method}),
        )
    yield refused(
        "stored-sizes: ZIP-8 (stored-sizes)",
        "A stored entry whose sizes differ.",
        changed(0, both={"uncompressed_size": 48}),
    )
    flags = {0: "encrypted", 5: "reserved-bits", 6: "encrypted", 13: "encrypted"}
    for bit, attack in {**flags, 15: "reserved-bits", 11: "utf8"}.items():
        yield refused(
            f"flag-{bit}: ZIP-9 ({attack})",
            f"Bit {bit} of the flags is set.",
            changed(0, both={"flags": 1 << bit}),
        )
    yield refused(
        "flag-3-beside-11: ZIP-9 (data-descriptor)",
        "Bits 3 and 11 of the flags are set in an entry whose name is not ASCII.",
        archive(assets=(Entry("assets/é".encode(), b"", both={"flags": 0x0808}),)),
    )
    descriptor = b"PK\7\10" + struct.pack("<III", 0, 24, 24)
    empty = {"crc32": 0, "compressed_size": 0, "uncompressed_size": 0}
    yield refused(
        "data-descriptor: ZIP-9 ZIP-7 (data-descriptor)",
        "Sizes and CRC-32 are in a data descriptor.",
        changed(0, both={"flags": 8}, local=empty, after=descriptor),
    )
    yield refused(
        "data-descriptor-missing: ZIP-9 (data-descriptor)",
        "The flags announce a data descriptor that is missing.",
        changed(0, both={"flags": 8}),
    )
    for version in (0, 11, 46, 63, 255, 0x030A):
        yield refused(
            f"version-{version}: ZIP-10 (version-needed)",
            f"Version needed {version}.",
            changed(0, both={"version_needed": version}),
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
            f"attributes-{name}: ZIP-11 ({attack})",
            "The attributes are not those of a regular file on Unix.",
            changed(0, record=change),
        )
    yield refused(
        "entry-comment: ZIP-12 (entry-comment)",
        "A directory record has a comment.",
        changed(0, comment=b"hello"),
    )
    yield refused(
        "crc: ZIP-15 (crc)",
        "The CRC-32 of a tensor is wrong in the local header and in the directory record.",
        changed(0, both={"crc32": lambda crc: crc ^ 1}),
    )
    yield refused(
        "crc-zero: ZIP-15 (crc)",
        "The CRC-32 of a tensor is zero in the local header and in the directory record.",
        changed(0, both={"crc32": 0}),
    )
    yield refused(
        "crc-of-asset: ZIP-15 (crc)",
        "The CRC-32 of an asset is wrong.",
        changed(2, both={"crc32": 0}),
    )
    yield refused(
        "crc-of-model: ZIP-15 (crc)",
        "The CRC-32 of the model is wrong.",
        changed(3, both={"crc32": lambda crc: crc ^ 0x80000000}),
        stage="open",
    )
    yield refused(
        "crc-of-nothing: ZIP-15 (crc)",
        "The CRC-32 of an empty entry is not zero.",
        archive(assets=(Entry(b"assets/e", b"", both={"crc32": 1}),)),
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
            f"record-extra-{name}: {rules} ({attack})",
            "A directory record has extra fields that it must not have.",
            changed(0, record_extra=extra),
        )
    yield refused(
        "record-extra-missing: ZIP-13 (sentinel-no-extra)",
        "A saturated size, and no Zip64 field.",
        changed(0, both={"compressed_size": 0xFFFFFFFF, "uncompressed_size": 0xFFFFFFFF}),
    )
    fits = {"compressed_size": 0xFFFFFFFF, "uncompressed_size": 0xFFFFFFFF, "version_needed": 45}
    yield refused(
        "record-extra-fits: ZIP64-4 (extra-unneeded)",
        "A Zip64 field for a size that fits.",
        changed(
            0,
            both=fits,
            record_extra=zip64_field(24, 24),
            local_extra=zip64_field(24, 24) + alignment_extra(64, 7),
        ),
    )
    huge: tuple[tuple[str, bytes], ...] = (
        ("2-63", zip64_field(1 << 63, 1 << 63)),
        ("2-64", zip64_field((1 << 64) - 1, (1 << 64) - 1)),
    )
    for name, extra in huge:
        yield refused(
            f"size-{name}: ZIP-6 (extra-huge)",
            "A size larger than any file.",
            changed(0, both=fits, record_extra=extra),
        )
    yield refused(
        "offset-2-64: ZIP-6 (extra-huge)",
        "A header offset larger than any file.",
        changed(
            1,
            both={"version_needed": 45},
            record={"header_offset": 0xFFFFFFFF},
            record_extra=zip64_field((1 << 64) - 1),
        ),
    )
    for name, extra in (
        ("7-bytes", extra_field(1, bytes(7))),
        ("one-of-two", zip64_field(1 << 33)),
        ("too-long", zip64_field(1 << 33, 1 << 33, 0, 0)),
        ("with-disk", zip64_field(1 << 33, 1 << 33)[:2] + b"\x14\0" + bytes(20)),
    ):
        yield refused(
            f"zip64-field-{name}: ZIP64-4 (extra-length)",
            "A Zip64 field has a wrong length.",
            changed(0, both=fits, record_extra=extra),
        )
    yield refused(
        "zip64-field-twice: ZIP-13 (extra-duplicate)",
        "Two Zip64 fields in a directory record.",
        changed(0, both=fits, record_extra=zip64_field(1 << 33, 1 << 33) * 2),
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
        attack = "unicode-path" if name == "unicode-path" else "extra-framing"
        yield refused(
            f"local-extra-{name}: {rules} ({attack})",
            "The extra fields of a local header are not exactly one alignment field.",
            changed(0, local_extra=extra),
        )
