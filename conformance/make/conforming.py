"""The vectors of small files that conform to the specification."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import replace

from conformance.make import zips as v
from conformance.make.parts import (
    BITS,
    BOOL,
    FLOAT,
    INT4,
    MODEL_PROTO,
    STRING,
    UINT8,
    UINT16,
    W_DATA,
    Tensor,
    V,
    Vector,
    W,
    accepted,
    archive,
    changed,
    everywhere,
    graph,
    model,
    nested_graphs,
    node,
    of_proto,
    plain,
    with_models,
)
from conformance.make.zips import Entry, Image, content, number


def simple(heading: str, about: str, *tensors: Tensor) -> Vector:
    """A vector of an archive with these initializers."""
    return accepted(heading, about, archive(*tensors), *tensors)


def every_data_type() -> tuple[Tensor, ...]:
    """A tensor of each data type; packed types leave bits of the last byte unused."""
    tensors = []
    for data_type, bits in sorted(BITS.items()):
        nbits = 5 * bits
        data = bytearray(hashlib.sha256(b"%d" % data_type).digest() * 3)[: (nbits + 7) // 8]
        if nbits % 8:
            data[-1] &= (1 << nbits % 8) - 1
        if data_type == BOOL:
            data = bytearray(b"\0\1\0\1\1")
        tensors.append(Tensor(f"t{data_type}", data_type, (5,), bytes(data)))
    return tuple(tensors)


def merged_tensor() -> tuple[bytes, Tensor]:
    """A model with a tensor in two parts that protobuf merges; some fields occur in both parts."""
    tensor = Tensor("merged", UINT16, (2, 2), data=bytes(range(8)))
    pair = content(1, "no") + content(2, "no") + content(2, "merged") + content(1, "location")
    first = content(1, b"\2\2") + number(2, FLOAT) + content(8, "before") + content(13, pair)
    second = number(14, 0) + number(2, UINT16) + content(8, "merged") + number(14, 1)
    attributes = content(1, "value") + content(5, first) + content(5, second)
    return model(graph(more=content(1, node(attributes)))), tensor


def oddly_encoded() -> tuple[bytes, Tensor]:
    """A model with longer varints than needed, numbers above 32 bits, and values given twice."""
    tensor = Tensor("odd", FLOAT, (2, 3), W.data)
    high = b"\x10\x81\x80\x80\x80\x10"  # data_type 2^32 + 1
    external = b"\xf0\x80\x80\x80\x00" + b"\x81\x80\x80\x80\x10" + number(14, 7)  # EXTERNAL, then 7
    dims = content(1, b"\x82\x80\x80\x80\x80\x80\x80\x80\x80\x7e") + number(1, 3)  # 2 in ten bytes
    pair = content(1, "location") + content(2, "odd")
    fields = dims + high + content(8, "odd") + content(13, pair) + external + content(2, b"\7")
    fields = number(14, 1) + number(14, 0) + fields  # EXTERNAL, DEFAULT; `external` overrides
    length = bytes([len(fields) & 0x7F | 0x80, 0x80, 0x80, 0x80, 0x00])
    return model(b"\x2a" + length + fields + content(2, "g")), tensor


def with_unknown_fields() -> bytes:
    """A model with fields and groups that ONNX does not define, and fields of wrong wire types."""
    group = b"\xc3\x3e" + number(5, 7) + b"\0\0\xc4\x3e"  # group 1000 with fields 5 and 0
    fixed = v.varint(1001 << 3 | 5) + bytes(4) + v.varint(1002 << 3 | 1) + bytes(8)
    strange = content(1, b"\xff\xff") + number(7, 1)  # ir_version as bytes, graph as a number
    tensor = W.proto + content(1003, b"\xff") + group
    main = group + content(5, tensor) + fixed + content(2, b"\xff\xfe")
    return strange + content(7, main) + group + number(1, 0)


def conforming() -> Iterator[Vector]:
    """The vectors of small files that conform."""
    example = Tensor("w", FLOAT, (2,), struct.pack("<2f", 1, -2))
    other = replace(example, name="v")
    example_model, other_model = (
        number(1, 4)
        + content(7, content(2, name) + content(5, it.proto))
        + content(8, number(2, 9))
        for name, it in (("g", example), ("h", other))
    )
    yield accepted(
        "example: FILE-1 ZIP-1 ZIP-2 ZIP-3 ZIP-4 ZIP-5 ZIP-6 ZIP-7 ZIP-8 ZIP-12 ZIP-15 MODEL-1 "
        "MODEL-2 ZIP64-1 ALIGN-1",
        "The first worked example of the specification, appendix A.1.",
        of_proto(example_model, example),
        example,
    )
    yield accepted(
        "example-of-two-models: MODEL-4 DATA-3 DATA-8",
        "The second worked example of the specification, appendix A.2.",
        with_models((example,), example_model, {"b": other_model}),
        example,
        further={"b": (other,)},
    )
    yield accepted("plain: ZIP-6 ZIP-14 ALIGN-3 DATA-2", "Two tensors and an asset.", plain(), W, V)
    yield accepted("model-alone: MODEL-1 DATA-2", "A model without external tensors.", archive())
    yield accepted(
        "free-fields: ZIP-7 ZIP-10 ZIP-11",
        "An entry with unusual but permitted versions, time, date and attributes.",
        changed(
            0,
            both={"version_needed": 20, "time": 0xBF7D, "date": 0x5D2B},
            record={"version_made_by": 0x03FF, "external_attributes": 0x81FF0027},
        ),
        W,
        V,
    )
    yield accepted(
        "attributes-of-dos: ZIP-11",
        "Attributes without a Unix file type, with the archive bit of MS-DOS.",
        changed(2, record={"external_attributes": 0x20}),
        W,
        V,
    )
    yield accepted(
        "version-45: ZIP-10",
        "Version needed 45 without a Zip64 field.",
        changed(1, both={"version_needed": 45}),
        W,
        V,
    )
    yield from _conforming_names()
    yield from _conforming_alignment()
    yield from _conforming_model()
    yield from _conforming_tensors()


def _conforming_names() -> Iterator[Vector]:
    def assets(*names: str) -> Image:
        return archive(W, assets=tuple(Entry(it.encode(), b"x") for it in names))

    yield accepted(
        "asset-names: NAME-1 ASSET-1 ZIP-9",
        "Assets whose names have blanks, dots, and characters beyond ASCII.",
        assets("assets/größe/日本 .txt", "assets/...", "assets/.hidden", "assets/a b/c.d"),
        W,
    )
    yield accepted(
        "asset-names-folded: NAME-2",
        "Names that differ only in the case of a non-ASCII letter, or only in a slash.",
        assets("assets/É", "assets/é", "assets/w", "assets/ab", "assets/a/b"),
        W,
    )
    yield accepted(
        "asset-name-longest: ASSET-1",
        "A name of 1,024 bytes with a component of 255.",
        assets("assets/" + "/".join(["x" * 255] * 3 + ["y" * 249])),
        W,
    )
    yield accepted(
        "asset-empty: ASSET-1", "An asset of no bytes.", archive(assets=(Entry(b"assets/e"),))
    )
    keys = ("_", "_a", "A9_", "k" * 255, "a" * 254 + "_", "w__w", "assets_", "xassets")
    yield simple("keys: KEY-1", "Shortest and longest keys, among others.", *map(Tensor, keys))
    yield simple(
        "keys-of-devices: KEY-1 (device)",
        "Keys that are names of devices on Windows: a reader accepts them.",
        *map(Tensor, ("con", "NUL", "com1", "aux")),
    )


def _conforming_alignment() -> Iterator[Vector]:
    def aligned(*alignments: int) -> Image:
        image = plain()
        image.entries = [
            replace(entry, alignment=alignment)
            for entry, alignment in zip(image.entries, alignments, strict=True)
        ]
        return image

    yield accepted(
        "alignment-4096: ALIGN-2", "All entries aligned to 4,096 bytes.", aligned(*[4096] * 4), W, V
    )
    yield accepted(
        "alignment-mixed: ALIGN-2 ALIGN-3",
        "Entries with four different alignments.",
        aligned(32768, 64, 128, 1024),
        W,
        V,
    )
    name = "k" * 28
    longest = Tensor(name, UINT8, (2,), b"ab")
    yield accepted(
        "padding-none-and-longest: ALIGN-3 ZIP-6",
        "An entry without padding, and an entry with 32,767 bytes of padding.",
        _padded(longest),
        longest,
    )


def _padded(tensor: Tensor) -> Image:
    """An archive whose first entry needs no padding, and whose model needs the most padding."""
    image = archive(tensor, assets=(Entry(b"assets/fill"),))
    fill, last = image.entries[1:]
    last.alignment = 32768
    unpadded = image.place()[2].header_offset + 30 + len(MODEL_PROTO) + 6
    fill.data = bytes((1 - unpadded) % 32768)
    return image


def _conforming_model() -> Iterator[Vector]:
    proto, tensors = everywhere()
    yield accepted(
        "places: DATA-1 DATA-2 DATA-3 (ref-elsewhere)",
        "An external tensor at every place of a model that can hold a tensor.",
        of_proto(proto, *tensors),
        *tensors,
    )
    yield accepted(
        "model-deepest: MODEL-3", "Messages nested 100 deep.", of_proto(nested_graphs(100))
    )
    merged, tensor = merged_tensor()
    yield accepted(
        "model-merged: MODEL-3 DATA-4",
        "A tensor message in two parts, packed dims, and numbers and strings given twice.",
        of_proto(merged, tensor),
        tensor,
    )
    odd, odd_tensor = oddly_encoded()
    yield accepted(
        "model-odd-encoding: MODEL-3 DATA-7",
        "Varints with more bytes or bits than needed, and an unknown enumeration value.",
        of_proto(odd, odd_tensor),
        odd_tensor,
    )
    yield accepted(
        "model-unknown-fields: MODEL-3",
        "Unknown fields and groups, fields of wrong wire types, ir_version 0, a name not in UTF-8.",
        of_proto(with_unknown_fields(), W),
        W,
    )


def _conforming_tensors() -> Iterator[Vector]:
    checksum = hashlib.sha1(W_DATA).hexdigest()
    full = (("length", "24"), ("checksum", checksum), ("location", "w"), ("offset", "0"))
    yield simple(
        "external-data-full: DATA-4 DATA-5 DATA-6",
        "All four pairs of external_data; the first is not the location.",
        replace(W, pairs=full),
    )
    strings = Tensor("s", STRING, (1,), pairs=(), is_external=False, more=content(6, "text"))
    strange = Tensor("u", 99, (-1,), pairs=(), is_external=False, more=content(9, b"x"))
    unknown = Tensor("o", UINT8, (1,), pairs=(), is_external=False)
    inside = (strings, strange, replace(unknown, more=content(9, b"y") + number(14, 7)))
    yield accepted(
        "tensors-inside: DATA-7 TENSOR-1 TENSOR-2",
        "Tensors that are not external; of the rules about tensors, only DATA-7 applies to them.",
        of_proto(model(graph(W, *inside)), W),
        W,
    )
    yield simple(
        "data-types: TENSOR-1 TENSOR-3 TENSOR-4 TENSOR-5",
        "Five elements of each data type.",
        *every_data_type(),
    )
    yield simple(
        "shapes-of-no-elements: TENSOR-2 TENSOR-3 ALIGN-1 (zero-size)",
        "Tensors with a 0 in dims, some with large numbers beside the 0.",
        Tensor("e1", FLOAT, (0,), b""),
        Tensor("e2", INT4, (3, 0, 2), b""),
        Tensor("e3", UINT8, (2**63 - 1, 0), b""),
        Tensor("e4", FLOAT, (0, 2**30, 2**30, 1), b""),
    )
    yield simple(
        "shapes: TENSOR-2 TENSOR-3",
        "A scalar, and a tensor with 64 dims.",
        Tensor("scalar", FLOAT, (), bytes(4)),
        Tensor("deep", UINT8, (1,) * 63 + (2,), b"ab"),
    )
