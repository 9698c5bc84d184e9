"""Small files that break a rule of tensors (section 8)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace

from conformance.make.parts import (
    FLOAT,
    FLOAT4,
    FLOAT6,
    FLOAT6E3M2,
    INT2,
    INT4,
    LABELS,
    MODEL_PROTO,
    STRING,
    UINT2,
    UINT4,
    UINT8,
    W_DATA,
    B,
    Tensor,
    V,
    Vector,
    W,
    archive,
    attribute,
    everywhere,
    graph,
    model,
    node,
    of_proto,
    refused,
)
from conformance.make.zips import Entry, Image, content, number, numbers


def bad_tensors() -> Iterator[Vector]:
    """The vectors of this module."""
    yield from _bad_external_data()
    yield from _bad_elements()


def _bad_external_data() -> Iterator[Vector]:
    def locations(location: str) -> Image:
        return archive(W, replace(V, pairs=(("location", location),)))

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
            f"location-{name}: DATA-1 DATA-2 (dangling)",
            "A location is no key of the archive.",
            locations(location),
        )
    yield refused(
        "location-asset: DATA-1 (dangling)",
        "The location of a tensor is an asset.",
        _located_in_asset(),
    )
    yield refused(
        "unreferenced: DATA-2 (unreferenced)",
        "An entry is the location of no tensor.",
        of_proto(model(graph(W)), W, V),
    )
    yield refused(
        "shared-key: DATA-3 (shared-key)",
        "Two tensors of one model have the same location.",
        of_proto(model(graph(W, replace(W, name="w2"))), W),
    )
    hidden = content(1, node(attribute(5, replace(W, name="w2").proto)))
    yield refused(
        "shared-key-in-attribute: DATA-3 (shared-key)",
        "An initializer and a tensor in an attribute have the same location.",
        of_proto(model(graph(W, more=hidden)), W),
    )
    proto, tensors = everywhere()
    for tensor in tensors:
        place = tensor.key.removesuffix("_key").replace("_", "-")
        yield refused(
            f"unreferenced-place-{place}: DATA-1 (ref-elsewhere)",
            "A model has a tensor at every possible place; one of these tensors has no entry.",
            of_proto(proto, *(it for it in tensors if it != tensor)),
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
        ("key-with-nul", (at, ("offset\0", "0")), "DATA-4", "ext-keys"),
        ("key-with-blank", (at, (" offset", "0")), "DATA-4", "ext-keys"),
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
            (at, ("checksum", hashlib.sha1(W_DATA).hexdigest().upper())),
            "DATA-6",
            "ext-keys",
        ),
    )
    for name, given, rules, attack in pairs:
        yield refused(
            f"external-data-{name}: {rules} ({attack})",
            "The pairs of external_data are invalid.",
            archive(replace(W, pairs=given)),
        )
    more: tuple[tuple[str, bytes], ...] = (
        ("raw-data", content(9, W_DATA)),
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
            f"two-sources-{name}: DATA-7 (two-sources)",
            "An external tensor also has data in the model.",
            archive(replace(W, more=fields)),
        )
    for name, fields in (("default", b""), ("unknown", number(14, 7))):
        yield refused(
            f"not-external-{name}: DATA-7 DATA-2 (two-sources)",
            "Pairs of external_data in a tensor that is not external.",
            archive(replace(W, is_external=False, more=fields)),
        )


def _located_in_asset() -> Image:
    tensor = Tensor("labels", pairs=(("location", "assets/labels.txt"),))
    return Image([LABELS, Entry(MODEL_PROTO, model(graph(tensor)))])


def _bad_elements() -> Iterator[Vector]:
    for data_type in (0, STRING, 29, 99, -1):
        name = str(data_type).replace("-", "minus-")
        yield refused(
            f"data-type-{name}: TENSOR-1 (dtype)",
            "An external tensor has an invalid data type.",
            archive(replace(W, data_type=data_type)),
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
        ("2-63-elements-of-4-bits", (2**62, 2, 0), INT4, b"", "zero-size"),
    )
    for name, dims, data_type, data, attack in shapes:
        rules = "TENSOR-2 TENSOR-3" if name in ("2-63", "element") else "TENSOR-2"
        yield refused(
            f"dims-{name}: {rules} ({attack})",
            "An external tensor has invalid dims.",
            archive(Tensor("w", data_type, dims, data)),
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
            f"tensor-size-{name}: TENSOR-3 (size-lie)",
            "An entry and its tensor differ in size.",
            archive(tensor),
        )
    tails: tuple[tuple[str, Tensor], ...] = (
        ("int4", Tensor("w", INT4, (3,), b"\x21\x13")),
        ("uint2", Tensor("w", UINT2, (5,), b"\x1b\x04")),
        ("float6", Tensor("w", FLOAT6, (1,), b"\x40")),
        ("float4", Tensor("w", FLOAT4, (1,), b"\x80")),
        ("uint4", Tensor("w", UINT4, (1,), b"\x10")),
        ("int2", Tensor("w", INT2, (3,), b"\x5b")),
        ("float6e3m2", Tensor("w", FLOAT6E3M2, (2,), b"\x41\x20")),
    )
    for name, tensor in tails:
        yield refused(
            f"unused-bits-{name}: TENSOR-4 (dtype)",
            "An unused bit in the last byte of a packed tensor is set.",
            archive(tensor),
        )
    for value in (2, 255):
        yield refused(
            f"bool-{value}: TENSOR-5 (dtype)",
            "A boolean that is neither 0 nor 1.",
            archive(replace(B, data=bytes([0, 1, value]))),
        )
