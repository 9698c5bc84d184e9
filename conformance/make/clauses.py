"""Vectors for clauses that a reader could leave out without failing any other vector."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from conformance.make import zips as v
from conformance.make.ends import END_NBYTES, LOCATOR, ZIP64_END, end_record, holding
from conformance.make.parts import (
    BIG,
    BIG_CRC32,
    MODEL_PROTO,
    UINT8,
    Tensor,
    Vector,
    W,
    accepted,
    alignment_extra,
    archive,
    graph,
    model,
    more_entries,
    plus,
    refused,
    sparse,
    with_models,
)
from conformance.make.zips import Entry, Image, extra_field, zip64_field

# A constant, since computing the CRC-32 of 0xFFFFFFFF - 64 zeros takes seconds.
BEFORE_OFFSET_CRC32 = 0x624BDB78


def clauses() -> Iterator[Vector]:
    """The vectors of this module, small and large."""
    yield from _ends()
    yield from _records()
    yield from _spaces()
    yield from _false_records()
    yield from _names()
    for vector in (*_sparse_ends(), *_sparse_entries()):
        yield replace(vector, large=True)


def _first_changed(**changes: object) -> Image:
    image = archive(W)
    image.entries[0] = replace(image.entries[0], **changes)  # type: ignore[arg-type]
    return image


def _ends() -> Iterator[Vector]:
    for field in ("disk", "directory_disk"):
        yield refused(
            f"end-{field.replace('_', '-')}-saturated: ZIP-3 (disk)",
            f"The end record has 0xFFFF as the number of {DISKS[field]}.",
            replace(archive(W), end={field: 0xFFFF}),
        )
    saturated = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, *[0xFFFFFFFF] * 2, 0)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, 2**64 - 1, 1)
    yield refused(
        "file-of-97-bytes: ZIP64-1 ZIP64-3 (locator-offset)",
        "A file of 97 bytes: a Zip64 end record without its first byte, a locator with the offset "
        "2^64 - 1, and an end record with saturated values.",
        ZIP64_END[1:] + locator + saturated,
    )
    small = replace(archive(W), has_zip64=True)
    last = small.place()[-1]
    offset = last.data_offset + len(last.entry.data)
    nbytes = sum(len(it.record) for it in small.place())
    end = offset + nbytes
    for name, about, rules, count, size, at in (
        (
            "size-wraps-most",
            "the largest count and size, and an offset with which the end is right modulo 2^64",
            "ZIP-5 ZIP-4",
            262_144,
            262_144 * 1098,
            end - 262_144 * 1098 + 2**64,
        ),
        (
            "size-wraps-least",
            "the largest count with the least size, and an offset with which the end is right "
            "modulo 2^64",
            "ZIP-5 ZIP-4",
            262_144,
            262_144 * 46,
            end - 262_144 * 46 + 2**64,
        ),
        ("offset-2-32", "the right offset plus 2^32", "ZIP-5", 2, nbytes, offset + 2**32),
        ("size-2-32", "the right size plus 2^32", "ZIP-4 ZIP-5", 2, nbytes + 2**32, offset),
        ("count-2-32", "the right counts plus 2^32", "ZIP-4", 2 + 2**32, nbytes, offset),
    ):
        yield refused(
            f"small-file-{name}: {rules} (record-huge)",
            f"In a small file, the Zip64 end record states {about}.",
            replace(
                small,
                zip64={
                    "disk_count": count,
                    "count": count,
                    "directory_size": size,
                    "directory_offset": at,
                },
            ),
        )


DISKS = {"disk": "this disk", "directory_disk": "the disk of the directory"}


def _records() -> Iterator[Vector]:
    for bit in (0x40, 0x80, 0x100, 0x8000):
        yield refused(
            f"attributes-of-dos-{bit:#06x}: ZIP-11",
            f"The bit {bit:#06x} of MS-DOS is set in the attributes of an entry.",
            _first_changed(record={"external_attributes": 0x81A40000 | bit}),
        )
    for file_type, called in ((0x9, "0x9"), (0xC, "0xC, a socket"), (0x1, "0x1, a pipe")):
        yield refused(
            f"attributes-type-{file_type}: ZIP-11",
            f"The type of an entry is {called}.",
            _first_changed(record={"external_attributes": file_type << 28 | 0x01A40000}),
        )

    for field in ("name_length", "extra_length"):
        yield refused(
            f"local-{field.replace('_', '-')}: ZIP-7 (size-mismatch)",
            f"The local header has a wrong value: {field.replace('_', ' ')}.",
            _first_changed(local={field: plus(1)}),
        )

    exact = Tensor("k" * 28, UINT8, (8,))
    image = archive(exact)
    image.entries[0].padding = bytes(64)
    yield refused(
        "padding-of-64-for-none: ALIGN-3 (gaps)",
        "An entry that needs no padding has 64 bytes of it.",
        image,
    )


def _spaces() -> Iterator[Vector]:
    name = "k" * 29
    short = Tensor(name, UINT8, (8,))
    image = archive(short)
    image.entries[0].local_extra = extra_field(0xD935, b"\0")
    yield refused(
        "space-of-one-byte-less: ZIP-6 ZIP-14 (gaps)",
        "The space for a local header has room for all but one byte of the alignment field.",
        image,
        stage="open",
    )
    # The header needs 36 + 58 bytes. The data is stated to begin in the middle of the name.
    longer = Tensor("k" * 58, UINT8, (72,), bytes(8))
    image = archive(longer)
    image.entries[0].both = {"compressed_size": plus(64), "uncompressed_size": plus(64)}
    yield refused(
        "space-within-the-name: ZIP-6 ZIP-7 ZIP-15 (gaps)",
        "The data of an entry is stated to begin at a multiple of 64 within the name.",
        image,
        stage="open",
    )


def _false_records() -> Iterator[Vector]:
    near = holding(
        ZIP64_END[:4]
        + struct.pack("<Q", 44 + 2**32)
        + ZIP64_END[12:]
        + end_record(disk=0x100)
        + end_record(directory_disk=0x100)
        + end_record(disk_count=0x101)
        + struct.pack("<4sIQI", b"PK\6\7", 0x10000, 64, 1)
        + struct.pack("<4sIQI", b"PK\6\7", 0, 64, 0x10001)
        + struct.pack("<4sIQI", b"PK\6\7", 0, 64, 0)
        + LOCATOR[:4]
        + bytes(16)
        + b"PK\5\7"
    )
    yield accepted(
        "nearly-records-in-upper-bytes: ZIP-16",
        "Bytes that differ from false records only in the upper bytes of a number, among them the "
        "signature of a Zip64 end record with the size 44 + 2^32.",
        archive(near),
        near,
    )
    signatures = (
        signature[:at] + bytes([signature[at] + 1]) + signature[at + 1 :]
        for signature in (b"PK\5\6", b"PK\6\6", b"PK\6\7")
        for at in (0, 1, 3)
    )
    other = holding(b"".join(it + struct.pack("<Q12x", 44) for it in signatures))
    yield accepted(
        "nearly-records-with-other-signatures: ZIP-16",
        "Bytes that would be false records if one byte of the signature were one less.",
        archive(other),
        other,
    )
    filler = holding(bytes(END_NBYTES))
    stamped = Entry(b"assets/a", both={"time": 0x4B50, "date": 0x0605})
    yield refused(
        "false-end-record-in-directory-alone: ZIP-16 (false-end)",
        "The time and date of an empty asset form the signature of an end record. Only the "
        "directory record, not the local header, lies in the last 65,633 bytes.",
        Image([stamped, filler.entry, Entry(MODEL_PROTO, model(graph(filler)))]),
    )


def _not_utf_8() -> Iterator[Vector]:
    for data in (
        *("80", "c1bf", "c328", "c3", "e09fbf", "e228a1", "e28228", "e282c0", "e282"),
        *("f08fbfbf", "f09f9828", "f09f98", "f4908080", "f5808080", "ff"),
    ):
        name = b"assets/" + bytes.fromhex(data)
        yield refused(
            f"name-with-bytes-{data}: NAME-1",
            f"The name of an asset ends with the bytes {data}, which are not UTF-8.",
            archive(W, assets=(Entry(name, b"x", both={"flags": 0x0800}),)),
        )
    yield accepted(
        "asset-names-of-all-lengths: NAME-1 ASSET-1",
        "Names with the first and the last characters of 2, 3 and 4 bytes that names may have.",
        archive(
            W,
            assets=tuple(
                Entry(f"assets/{it}".encode(), b"x")
                for it in "\u00a1\u07fe\u0800\u0e01\ud7fb\ue000\ufffd\U00010000\U0010fffd"
            ),
        ),
        W,
    )


def _hangul() -> Iterator[Vector]:
    pairs = (
        *("a\u1161", "\u1113\u1161", "\u1100a", "\u1100\u1176", "a\u11a8", "\ud7b0\u11a8"),
        *("\uac01\u11a8", "\uac00\u11a7", "\uac00\u11c3"),
        # 28 code points in a row: a syllable without a third letter is one of 28 syllables.
        *("".join(f"{chr(first + it)}\u11a8" for it in range(28)) for first in (0x4E00, 0xE000)),
    )
    yield accepted(
        "asset-names-of-hangul-not-composed: ASSET-1",
        "Hangul letters and syllables next to code points with which they do not compose.",
        archive(W, assets=tuple(Entry(f"assets/{it}".encode(), b"x") for it in pairs)),
        W,
    )
    for first, second in (("\u1112", "\u1161"), ("\u1100", "\u1175"), ("\uac00", "\u11c2")):
        code = f"{ord(first):04x}-{ord(second):04x}"
        yield refused(
            f"name-of-asset-hangul-{code}: ASSET-1 (fold-collision)",
            "The name of an asset has the first or last letter of a range, which composes.",
            _with_asset(first + second),
        )
    yield refused(
        "name-of-asset-mark-between: ASSET-1 (fold-collision)",
        "The name of an asset has a letter and a mark that compose although another mark of a "
        "lower class is between them.",
        _with_asset("a\u0327\u0301"),
    )


def _with_asset(name: str) -> Image:
    return archive(W, assets=(Entry(f"assets/{name}".encode(), b"x"),))


def _names() -> Iterator[Vector]:
    yield from _not_utf_8()
    yield from _hangul()
    for character in "@[`{:":
        code = f"{ord(character):02x}"
        yield refused(
            f"name-with-0x{code}: KEY-1",
            f"A key has the character 0x{code}, next to a range of letters or digits.",
            archive(replace(W, key=f"w{character}")),
        )
        yield refused(
            f"model-id-with-0x{code}: MODEL-4",
            f"The id of a further model has the character 0x{code}.",
            with_models((W,), model(graph(W)), {f"a{character}": model(graph(W))}),
        )
    border = Tensor("azAZ09_")
    yield accepted(
        "names-of-first-and-last-letters: KEY-1 MODEL-4",
        "A key and an id of a model with the first and the last letters and digits.",
        with_models((border,), model(graph(border)), {"z09az_": model(graph(border))}),
        border,
        further={"z09az_": (border,)},
    )
    for lower in "az":
        yield refused(
            f"fold-collision-of-{lower}: NAME-2 (fold-collision)",
            f"Two keys that differ only in the case of {lower}.",
            archive(Tensor(lower.upper()), Tensor(lower)),
        )
    names = (".a", "a.", "..a", "a..", "...", ".b/..c", "d /.e")
    yield accepted(
        "asset-names-with-dots: ASSET-1",
        "Names of assets with dots at the begin or at the end of a component.",
        archive(W, assets=tuple(Entry(f"assets/{it}".encode(), b"x") for it in names)),
        W,
    )
    for name, text, about in (
        ("private", "\ue000", "a code point for private use, U+E000"),
        ("joiner", "a\u200db", "a character for formatting, U+200D"),
        ("u-00a0", "a\u00a0b", "a no-break space, U+00A0, the first character after the controls"),
    ):
        yield accepted(
            f"name-of-asset-{name}: ASSET-1",
            f"The name of an asset has {about}.",
            _with_asset(text),
            W,
        )
    near = ("@", "`", "[", "{", "]", "}", "^", "~", "0", "P", "p!")
    yield accepted(
        "asset-names-of-punctuation: NAME-2",
        "Names that differ only in a bit that is not the case of a letter, such as `@` and a grave "
        "accent.",
        archive(W, assets=tuple(Entry(f"assets/{it}".encode(), b"x") for it in near)),
        W,
    )
    for name, text, about in (
        ("u-001f", "a\x1f", "the control character U+001F"),
        ("u-009f", "a\u009f", "the control character U+009F"),
        (
            "composed-and-lower-mark",
            "\u00e1\u0323",
            "a composed letter, and a mark that in canonical order comes before the mark of this "
            "letter",
        ),
        (
            "letter-of-two-marks",
            "\u0112\u0300",
            "a letter with a mark, and a mark that composes with this letter to U+1E14",
        ),
    ):
        yield refused(
            f"name-of-asset-{name}: ASSET-1",
            f"The name of an asset has {about}.",
            _with_asset(text),
        )


def _sparse_ends() -> Iterator[Vector]:
    yield accepted(
        "entries-65535-made-by: ZIP64-2",
        "The Zip64 end record states 0 as the version made by.",
        lambda: replace(more_entries(65535), zip64={"version_made_by": 0}),
        W,
    )
    yield refused(
        "sparse-locator-offset-2-32: ZIP64-3 (locator-offset)",
        "The locator gives the right offset plus 2^32.",
        partial(sparse, locator={"record_offset": plus(2**32)}),
    )
    yield refused(
        "sparse-locator-signature: ZIP64-1 (locator-missing)",
        "The locator has a wrong signature.",
        partial(sparse, locator={"signature": b"PK\6\x08"}),
    )
    yield refused(
        "sparse-record-size-2-32: ZIP64-2 (record-size)",
        "The Zip64 end record states the size 44 + 2^32.",
        partial(sparse, zip64={"rest_size": 44 + 2**32}),
    )
    for field, called in DISKS.items():
        yield refused(
            f"sparse-end-{field.replace('_', '-')}-saturated: ZIP-3 (disk)",
            f"In the end record, the number of {called} is saturated like the other values.",
            partial(sparse, end={field: 0xFFFF}),
        )


def _sparse_entries() -> Iterator[Vector]:
    yield accepted(
        "header-offset-4294967295: ZIP64-4 ZIP-13",
        "A header offset of 0xFFFFFFFF, the first one that needs a Zip64 field.",
        partial(_with_header_at, v.SATURATED_32),
        W,
    )
    yield accepted(
        "header-offset-of-another-entry: ZIP-16",
        "The header offset of an entry before the last one, 0x06054b50, is the signature of an end "
        "record.",
        partial(_with_header_at, 0x06054B50, crc_before=None),
        W,
    )
    yield refused(
        "sparse-field-offset-4294967294: ZIP64-4 (extra-unneeded)",
        "A Zip64 field with the header offset 0xFFFFFFFE, which fits 32 bits.",
        partial(
            _with_header_at,
            v.SATURATED_32 - 1,
            both={"version_needed": 45},
            record={"header_offset": v.SATURATED_32},
            record_extra=zip64_field(v.SATURATED_32 - 1),
        ),
    )
    yield refused(
        "sparse-space-without-zip64-field: ZIP-6 ZIP-14 (gaps)",
        "The space for a local header has room for all but one byte of Zip64 field and alignment "
        "field.",
        _without_zip64_space,
        stage="open",
    )
    yield accepted(
        "sparse-padding-longest: ZIP-6 ALIGN-3",
        "An entry with a Zip64 field and 32,767 bytes of padding.",
        partial(_big_padded, alignment=32768, padding=32767),
        BIG,
    )
    yield refused(
        "sparse-padding-of-32768: ZIP-6 ALIGN-3 (gaps)",
        "An entry with a Zip64 field and one byte more padding than any alignment needs.",
        partial(_big_padded, alignment=64, padding=32768),
        stage="open",
    )
    for name, what, header_offset in (
        ("header-offset-holds-end-record", "header offset of the model", 0x06054B50F0),
        ("directory-offset-holds-end-record", "offset of the directory", 0x06054B4FF0),
    ):
        yield refused(
            f"{name}: ZIP-16 (false-end)",
            f"The {what}, which takes 8 bytes, contains the signature of an end record from its "
            "second byte on.",
            partial(_with_model_at, header_offset),
        )


def _with_model_at(header_offset: int) -> Image:
    """An archive whose model has this header offset, which does not fit 32 bits."""
    zeros = v.Zeros(header_offset - 64)
    image = archive(Tensor("w", UINT8, (zeros.nbytes,), zeros))
    image.entries[0].crc = 0  # not computed, since it is compared only by a full check
    return image


def _with_header_at(
    offset: int, crc_before: int | None = BEFORE_OFFSET_CRC32, **changes: object
) -> Image:
    """An archive whose entry `w` has this header offset, 0xFFFFFFFF or less.

    `crc_before` is the CRC-32 of the zeros before `w`; None to compute it.
    """
    zeros = v.Zeros(offset - 64)
    before = Entry(b"assets/zeros", zeros, crc=crc_before)
    entry = replace(W.entry, **changes)  # type: ignore[arg-type]
    return Image([before, entry, Entry(MODEL_PROTO, model(graph(W)))])


def _without_zip64_space() -> Image:
    """An archive of a tensor like `BIG`, whose alignment field has one byte of data."""
    nbytes = len(BIG.data)
    image = archive(replace(BIG, key="b" * 9))
    image.entries[0].crc = BIG_CRC32
    image.entries[0].local_extra = zip64_field(nbytes, nbytes) + extra_field(0xD935, b"\0")
    return image


def _big_padded(alignment: int, padding: int) -> Image:
    """An archive of `BIG` with this padding, after an asset that makes it end at the alignment."""
    fill = Entry(b"assets/fill")
    big = replace(BIG.entry, crc=BIG_CRC32)
    image = Image([fill, big, Entry(MODEL_PROTO, model(graph(BIG)))])
    unpadded = image.place()[1].header_offset + 30 + len(big.name) + 20 + 6
    fill.data = bytes(-(unpadded + padding) % 32768)
    nbytes = len(BIG.data)
    big.local_extra = zip64_field(nbytes, nbytes) + alignment_extra(alignment, padding)
    return image
