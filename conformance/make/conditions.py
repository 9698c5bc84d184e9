"""Vectors of files that each barely meet or break one condition in the code of a reader."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from conformance.make import zips as v
from conformance.make.parts import (
    BIG,
    FLOAT,
    MESSAGES,
    MODEL_PROTO,
    UINT8,
    UINT16,
    W_DATA,
    Tensor,
    Vector,
    W,
    accepted,
    alignment_extra,
    archive,
    graph,
    model,
    of_proto,
    refused,
    sparse,
    sparse_big,
    with_models,
)
from conformance.make.zips import Entry, Image, content, extra_field, number, zip64_field

FIXED_64, LENGTH, FIXED_32 = 1, 2, 5  # wire types


def single_conditions() -> Iterator[Vector]:
    """The vectors of this module, small and large."""
    yield from _headers()
    yield from _names()
    yield from _wire()
    yield from _external_data()
    yield from _zip64()
    yield from _bounds()
    yield from _missed()


def _with_asset(name: str) -> Image:
    return archive(W, assets=(Entry(f"assets/{name}".encode(), b"x"),))


def _headers() -> Iterator[Vector]:
    yield refused(
        "local-extra-other-id: ZIP-14 (extra-framing)",
        "The alignment field has a wrong id.",
        _first_changed(local_extra=extra_field(0xD934, struct.pack("<H", 64) + bytes(27))),
    )
    long_name = replace(W, key="w" * 80)
    yield refused(
        "alignment-96-obeyed: ALIGN-2 (misaligned)",
        "The alignment field states 96; the data is aligned to 96 and to 64.",
        Image(
            [replace(long_name.entry, alignment=96), Entry(MODEL_PROTO, model(graph(long_name)))]
        ),
    )
    for name, bits in (("set-user-id", 0o4000), ("set-group-id", 0o2000), ("sticky", 0o1000)):
        yield refused(
            f"attributes-{name}: ZIP-11 (special-bits)",
            f"The {name} bit is set in the attributes of an entry.",
            _first_changed(record={"external_attributes": (0o100644 | bits) << 16}),
        )
    yield refused(
        "small-file-saturated: ZIP64-1 (locator-missing)",
        "An end record with saturated values in a file of 62 bytes.",
        bytes(40) + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, *[0xFFFFFFFF] * 2, 0),
    )
    yield refused(
        "last-name-of-13-bytes: MODEL-1 (model-missing)",
        "The last entry is no model, but its name has 13 bytes, like __MODEL_PROTO.",
        Image([W.entry, Entry(b"x_MODEL_PROTO", model(graph(W)))]),
    )


def _first_changed(**changes: object) -> Image:
    image = archive(W)
    image.entries[0] = replace(image.entries[0], **changes)  # type: ignore[arg-type]
    return image


def _names() -> Iterator[Vector]:
    composed = (
        ("hangul", "\uac00 \uac01", "Hangul syllables of two and of three letters"),
        ("blocked", "a\u0305\u0301", "a mark that is blocked by an earlier mark of the same class"),
        (
            "two-marks",
            "\u1ea1\u0301",
            "a composed letter, and a mark that does not compose with this letter",
        ),
    )
    for name, text, about in composed:
        yield accepted(
            f"name-of-asset-{name}-composed: ASSET-1",
            f"The name of an asset has {about}.",
            _with_asset(text),
            W,
        )
    refusals = (
        ("hangul-two-letters", "\u1100\u1161", "two Hangul letters that compose to a syllable"),
        ("hangul-third-letter", "\uac00\u11a8", "a Hangul syllable and a letter that compose"),
        (
            "two-marks-of-a-class",
            "a\u0301\u0300",
            "two marks of one class, and the first mark composes",
        ),
        ("marks-out-of-order", "a\u0301\u0323", "two marks that are not in the canonical order"),
        ("exclusion", "\u0958", "a letter that every normalization form decomposes"),
        ("singleton", "\u212b", "a letter that decomposes to one other letter"),
        ("not-assigned", "\U00050005", "a code point that is not assigned"),
        ("noncharacter", "\uffff", "a noncharacter"),
        ("noncharacter-fdd0", "\ufdd0", "the noncharacter U+FDD0"),
    )
    for name, text, about in refusals:
        yield refused(
            f"name-of-asset-{name}: ASSET-1 (fold-collision)",
            f"The name of an asset has {about}.",
            _with_asset(text),
        )


def _fixed(wire_type: int, nbytes: int) -> bytes:
    """An unknown field of wire type `FIXED_64` or `FIXED_32`, with a value of `nbytes` bytes."""
    return v.varint(1001 << 3 | wire_type) + b"\1" * nbytes


def _groups(depth: int) -> bytes:
    """Unknown groups, nested `depth` deep."""
    return v.varint(1000 << 3 | 3) * depth + v.varint(1000 << 3 | 4) * depth


def _wire() -> Iterator[Vector]:
    last = {
        "varint": number(1001, 300),
        "fixed32": _fixed(FIXED_32, 4),
        "fixed64": _fixed(FIXED_64, 8),
        "bytes": content(1001, b"\xff"),
        "group": _groups(1),
    }
    for name, field in last.items():
        tensor = replace(W, more=field)
        yield accepted(
            f"model-ends-with-{name}: MODEL-3",
            f"The model, its graph and a tensor each end with an unknown field ({name}).",
            of_proto(
                number(1, 10)
                + content(7, content(2, "g") + content(5, tensor.proto) + field)
                + field,
                W,
            ),
            W,
        )
    yield accepted(
        "model-field-largest: MODEL-3",
        "A field with the number 2^29 - 1.",
        of_proto(model(graph(W), more=number(2**29 - 1, 1)), W),
        W,
    )
    yield accepted(
        "model-groups-deepest: MODEL-3",
        "Unknown groups nested 100 deep.",
        of_proto(model(graph(W), more=_groups(100)), W),
        W,
    )
    in_graph = (
        (
            "fixed32-cut",
            "a number of 4 bytes that runs past the end of the graph",
            _fixed(FIXED_32, 3),
        ),
        (
            "fixed64-cut",
            "a number of 8 bytes that runs past the end of the graph",
            _fixed(FIXED_64, 7),
        ),
        (
            "group-past-message",
            "a group that begins in the graph and ends after the graph",
            v.varint(1000 << 3 | 3),
        ),
        ("group-in-group", "an outer group that ends before the inner group", _crossed_groups()),
        ("group-holds-fault", "a wire type of 7 within a group", _group_of(b"\x0f")),
        ("group-holds-cut", "a cut number within a group", _group_of(_fixed(FIXED_32, 1))),
        (
            "group-too-deep",
            "groups nested 100 deep in a graph, so 101 deep with the graph",
            _groups(100),
        ),
    )
    for name, about, field in in_graph:
        end = v.varint(1000 << 3 | 4) if name == "group-past-message" else b""
        attack = "proto-deep" if name == "group-too-deep" else "proto-corrupt"
        yield refused(
            f"model-{name}: MODEL-3 ({attack})",
            f"In a model: {about}.",
            of_proto(model(graph(W, more=field), more=end), W),
        )
    yield refused(
        "model-groups-too-deep: MODEL-3 (proto-deep)",
        "Unknown groups nested 101 deep.",
        of_proto(model(graph(W), more=_groups(101)), W),
    )
    yield refused(
        "model-length-large: MODEL-3 (proto-corrupt)",
        "A length of 2^32 + 1, which is 1 if cut to 32 bits.",
        of_proto(model(graph(W, more=b"\x52\x81\x80\x80\x80\x10x")), W),
    )


def _crossed_groups() -> bytes:
    tags = (1000 << 3 | 3, 1002 << 3 | 3, 1000 << 3 | 4, 1002 << 3 | 4)
    return b"".join(map(v.varint, tags))


def _group_of(fields: bytes) -> bytes:
    return v.varint(1000 << 3 | 3) + fields + v.varint(1000 << 3 | 4)


def _external_data() -> Iterator[Vector]:
    inside = Tensor(
        "inside",
        FLOAT,
        (1,),
        pairs=(("location", "w"),),
        more=content(9, struct.pack("<f", 1)),
        is_external=False,
    )
    yield refused(
        "two-sources-not-external: DATA-7 (two-sources)",
        "A tensor whose data is in the model also has the location of another tensor.",
        of_proto(model(graph(W, inside)), W),
    )
    checksum = hashlib.sha1(W_DATA).hexdigest()
    at = ("location", "w")
    for name, about, pairs, rule in (
        ("length-twice", "length twice", (at, *[("length", "24")] * 2), "DATA-4"),
        ("checksum-twice", "checksum twice", (at, *[("checksum", checksum)] * 2), "DATA-4"),
        (
            "checksum-longer",
            "a checksum of 41 digits",
            (at, ("checksum", checksum + "0")),
            "DATA-6",
        ),
        ("checksum-newline", "newline in checksum", (at, ("checksum", checksum + "\n")), "DATA-6"),
    ):
        yield refused(
            f"external-data-{name}: {rule} (ext-keys)",
            f"Pairs of external_data: {about}.",
            archive(replace(W, pairs=pairs)),
        )


def _zip64() -> Iterator[Vector]:
    for field, about in (
        ("disk_count", "the number of records on this disk"),
        ("count", "the total number of records"),
        ("directory_size", "the size of the directory"),
        ("directory_offset", "the offset of the directory"),
    ):
        yield refused(
            f"sparse-one-value-{field.replace('_', '-')}: ZIP64-1 (two-truths)",
            f"The end record is saturated except for {about}.",
            partial(sparse, end={field: 3}),
            large=True,
        )
    for name, about, rule, changes in (
        ("record-signature", "has a wrong signature", "ZIP64-3", {"signature": b"PK\6\5"}),
        ("record-directory-disk", "names disk 1 for the directory", "ZIP-3", {"directory_disk": 1}),
    ):
        yield refused(
            f"sparse-{name}: {rule} (locator-offset)",
            f"The Zip64 end record {about}.",
            partial(sparse, zip64=changes),
            large=True,
        )
    nbytes = len(BIG.data)
    yield refused(
        "sparse-field-other-id: ZIP-13 (sentinel-no-extra)",
        "An extra field with the id 2 holds the sizes, in place of the Zip64 field.",
        lambda: sparse_big(record_extra=extra_field(2, struct.pack("<QQ", nbytes, nbytes))),
        large=True,
    )
    for name, sizes in (("first", (nbytes + 1, nbytes)), ("second", (nbytes, nbytes + 1))):
        yield refused(
            f"sparse-local-field-{name}-lying: ZIP64-5 (two-truths)",
            f"The {name} size in the Zip64 field of the local header is wrong.",
            partial(
                sparse_big,
                local_extra=zip64_field(*sizes) + alignment_extra(64, -(30 + 3 + 20 + 6) % 64),
            ),
            large=True,
        )


def _missed() -> Iterator[Vector]:
    """Vectors for conditions that `tools/fuzz/mutate_reader.py` found untested."""
    long_name = replace(W, key="w" * 28)
    yield refused(
        "padding-of-32768: ZIP-6 ALIGN-3 (gaps)",
        "An entry with one byte more padding than any alignment needs.",
        Image(
            [
                replace(long_name.entry, padding=bytes(32768)),
                Entry(MODEL_PROTO, model(graph(long_name))),
            ]
        ),
        stage="open",
    )
    longer = replace(W, key="w" * 100)
    yield refused(
        "count-one-more-of-long-records: ZIP-4 (count)",
        "The end record counts one record too many, but the directory has room for this count.",
        replace(archive(longer), end={"disk_count": 3, "count": 3}),
    )
    yield refused(
        "name-empty-last: MODEL-1 KEY-1 (model-missing)",
        "The last entry has no name.",
        Image([W.entry, Entry(b"", model(graph(W)))]),
    )
    saturated = dict.fromkeys(("compressed_size", "uncompressed_size"), v.SATURATED_32)
    for name, about, sizes, rules in (
        ("empty", "An empty Zip64 field although nothing is saturated", {}, "ZIP-13 ZIP64-4"),
        ("without-sizes", "An empty Zip64 field beside saturated sizes", saturated, "ZIP64-4"),
    ):
        yield refused(
            f"record-extra-zip64-{name}-45: {rules} (extra-unneeded)",
            f"{about}; the version needed is 45.",
            _first_changed(
                both={"version_needed": 45}, record=sizes, record_extra=extra_field(1, b"")
            ),
        )
    packed = Tensor("w", UINT8, (), b"\1", more=content(1, b"\1" * 65))
    yield refused("dims-65-packed: TENSOR-2 (dims)", "65 dims, packed.", archive(packed))
    of_2_63 = Tensor("w", UINT16, (0, 1 << 62), b"")
    yield refused(
        "dims-2-63-bytes-beside-zero: TENSOR-2 (dims)",
        "A dim of 0; the other dims make 2^63 bytes.",
        archive(of_2_63),
    )
    less = replace(of_2_63, dims=(0, (1 << 62) - 1))
    yield accepted(
        "dims-below-2-63-bytes-beside-zero: TENSOR-2",
        "A dim of 0; the other dims make 2^63 - 2 bytes.",
        archive(less),
        less,
    )
    fields = b"".join(number(1 << shift, 1) for shift in (4, 11, 18, 25)) + content(
        1001, bytes(128)
    )
    yield accepted(
        "model-tags-and-lengths-of-0x80: MODEL-3",
        "Unknown fields whose tag or length begins with the byte 0x80.",
        of_proto(model(graph(W), more=fields), W),
        W,
    )
    tag = partial(v.varint, 1001 << 3 | LENGTH)
    for name, about, end in (
        ("tag", "a tag without the length", tag()),
        ("length", "a length of 1 without data", tag() + b"\1"),
        ("varint", "an unfinished varint", v.varint(1001 << 3) + b"\x80"),
        ("fixed32", "the first 3 bytes of a 4-byte number", _fixed(FIXED_32, 3)),
        ("fixed64", "the first 7 bytes of an 8-byte number", _fixed(FIXED_64, 7)),
    ):
        yield refused(
            f"model-ends-in-{name}: MODEL-3 (proto-corrupt)",
            f"The last bytes of a model are {about}.",
            of_proto(model(graph(W), more=end), W),
        )
    yield refused(
        "model-group-holds-large-field: MODEL-3 (proto-corrupt)",
        "A field with the number 2^29 within a group.",
        of_proto(model(graph(W), more=_group_of(number(1 << 29, 1))), W),
    )


def _bounds() -> Iterator[Vector]:
    def messages(count: int) -> bytes:
        """A model of `count` messages: a graph, an opset, and empty nodes."""
        return model(content(1, b"") * (count - 2))

    half = MESSAGES // 2
    yield accepted(
        "model-messages-most: MODEL-3",
        "A model of 4,194,304 messages.",
        lambda: of_proto(messages(MESSAGES)),
        large=True,
    )
    yield accepted(
        "models-messages-most: MODEL-3",
        "Two models of 4,194,304 messages together.",
        lambda: with_models((), messages(half), {"a": messages(MESSAGES - half)}),
        large=True,
    )
    yield refused(
        "models-messages: MODEL-3 (proto-amplify)",
        "Two models of 4,194,305 messages together.",
        lambda: with_models((), messages(half), {"a": messages(MESSAGES - half + 1)}),
        large=True,
    )
    yield refused(
        "further-model-2-gib: MODEL-2 (model-2gib)",
        "A further model of 2 GiB.",
        lambda: Image(
            [
                Entry(MODEL_PROTO + b"_a", v.Zeros(1 << 31), crc=0),
                Entry(MODEL_PROTO, model(graph())),
            ]
        ),
        large=True,
    )
    for offset, name, record in (
        (0x06054B50, "end-record", "an end record"),
        (0x06064B50, "zip64-end-record", "a Zip64 end record"),
        (0x07064B50, "locator", "a Zip64 locator"),
    ):
        yield refused(
            f"header-offset-of-{name}: ZIP-16 (false-end)",
            f"The model's header offset, {offset:#010x}, is the signature of {record}.",
            partial(_with_model_at, offset),
            large=True,
        )
    yield refused(
        "directory-offset-of-end-record: ZIP-16 (false-end)",
        "The offset of the directory, 0x06054b50, is the signature of an end record.",
        _with_directory_at_signature,
        large=True,
    )
    yield accepted(
        "directory-offset-4294967295: ZIP64-1 ZIP64-3",
        "The directory is at 0xFFFFFFFF, the first offset that needs Zip64.",
        _with_directory_at_the_largest_number,
        large=True,
    )
    yield accepted(
        "directory-offset-avoided: ZIP-16 ALIGN-2",
        "The model is aligned to 128, since the directory would otherwise be at 0x06054b50.",
        partial(_with_directory_at_signature, alignment=128),
        BEFORE_MODEL,
        large=True,
    )


def _with_directory_at_the_largest_number() -> Image:
    """An archive whose directory is at 0xFFFFFFFF, the first offset that needs Zip64."""
    filler = 127 - len(model(graph(), more=content(1000, b"")))
    last = Entry(MODEL_PROTO, model(graph(), more=content(1000, bytes(filler))))
    zeros = v.Zeros(v.SATURATED_32 - len(last.data) - 30 - len(MODEL_PROTO) - 6 - 64)
    return Image([Entry(b"assets/zeros", zeros, crc=0xFF33DE15), last])


def _of_zeros(nbytes: int) -> Tensor:
    return Tensor("w", UINT8, (nbytes,), v.Zeros(nbytes))


def _with_model_at(header_offset: int) -> Image:
    """An archive whose model has this header offset."""
    return archive(_of_zeros(header_offset - 64))


DIRECTORY_OFFSET = 0x06054B50
MODEL_OFFSET = (
    DIRECTORY_OFFSET - 300
) // 128 * 128 + 64  # data offset of the model; no multiple of 128
BEFORE_MODEL = _of_zeros(MODEL_OFFSET - 64 - 30 - len(MODEL_PROTO) - 6)


def _with_directory_at_signature(alignment: int = 64) -> Image:
    """An archive whose directory is at 0x06054b50 if its model is aligned to 64."""
    without = len(model(graph(BEFORE_MODEL), more=content(1000, b"")))
    filler = content(1000, bytes(DIRECTORY_OFFSET - MODEL_OFFSET - without - 1))
    image = archive(BEFORE_MODEL, proto=model(graph(BEFORE_MODEL), more=filler))
    image.entries[1] = replace(image.entries[1], alignment=alignment)
    return image
