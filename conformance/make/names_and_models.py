"""Small files that break a rule of names or models (sections 6 and 7)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from conformance.make.parts import (
    EMPTY_ZIP,
    LABELS,
    MODEL_PROTO,
    Tensor,
    Vector,
    W,
    archive,
    graph,
    model,
    nested_graphs,
    of_proto,
    refused,
    to_bytes,
)
from conformance.make.zips import Entry, Image, content, number


def bad_names_and_models() -> Iterator[Vector]:
    """The vectors of this module."""
    yield from _bad_names()
    yield from _bad_models()


def _bad_names() -> Iterator[Vector]:
    def named(name: bytes, **changes: object) -> Image:
        """An archive with a tensor in an entry called `name`."""
        text = name.decode(errors="replace")
        image = archive(W, Tensor("v", pairs=(("location", text),)))
        entry = replace(image.entries[1], name=name)
        image.entries[1] = replace(entry, **changes)  # type: ignore[arg-type]
        return image

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
        yield refused(f"name-{name}: {rules} ({attack})", "A key is invalid.", named(entry_name))
    yield refused(
        "name-not-utf-8: NAME-1 (utf8)",
        "A name that is not UTF-8, flagged as UTF-8.",
        named(b"u\xff\xfe"),
    )
    yield refused(
        "name-latin-1: NAME-1 ZIP-9 (utf8)",
        "A name in Latin-1, not flagged.",
        named(b"gr\xf6\xdfe", both={"flags": 0}),
    )
    yield refused(
        "name-utf-8-not-flagged: ZIP-9 (utf8)",
        "The name of an asset has a letter beyond ASCII, but bit 11 of the flags is not set.",
        archive(assets=(Entry("assets/é".encode(), b"", both={"flags": 0}),)),
    )
    yield refused(
        "name-surrogate: NAME-1 (utf8)",
        "The name of an asset has a surrogate, encoded as in UTF-8.",
        archive(assets=(Entry(b"assets/\xed\xa0\x80"),)),
    )
    yield refused(
        "name-overlong: NAME-1 (utf8)",
        "The name of an asset has a slash in two bytes, an overlong form of UTF-8.",
        archive(assets=(Entry(b"assets/a\xc0\xafb"),)),
    )
    yield refused(
        "duplicate-tensor: NAME-2 DATA-3 (duplicate)",
        "Two entries with the same key.",
        archive(W, replace(W, name="w2")),
    )
    yield refused(
        "duplicate-model: NAME-2 MODEL-1 (duplicate)",
        "Two default models.",
        archive(assets=(Entry(MODEL_PROTO, model(graph())),)),
    )
    yield refused(
        "fold-collision: NAME-2 (fold-collision)",
        "Two keys that differ only in case.",
        archive(Tensor("w0"), Tensor("W0")),
    )
    for name, first, second in (
        ("file-and-folder", b"assets/a", b"assets/A/b"),
        ("file-and-folders", b"assets/x/y", b"assets/x/y/z/w"),
    ):
        yield refused(
            f"names-{name}: NAME-2 (fold-collision)",
            "After down-casing, the name of an asset is a folder in the name of another asset.",
            archive(assets=(Entry(first), Entry(second))),
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
        ("component-256-of-2-bytes-each", ("assets/" + "é" * 128).encode(), "path-like"),
        (
            "1025-of-2-bytes-each",
            ("assets/" + f"{'é' * 127}/" * 3 + "é" * 126 + "e").encode(),
            "path-like",
        ),
        ("version", b"assets/a;1", "path-like"),
        ("not-composed", "assets/e\u0301".encode(), "utf8"),
    )
    for name, entry_name, attack in assets:
        yield refused(
            f"name-of-asset-{name}: ASSET-1 ({attack})",
            "The name of an asset is invalid.",
            archive(W, assets=(Entry(entry_name, b"data"),)),
        )


def _bad_models() -> Iterator[Vector]:
    yield refused("no-model: MODEL-1 (model-missing)", "There is no model.", Image([LABELS]))
    yield refused("no-entries: MODEL-1 (model-missing)", "An empty zip.", EMPTY_ZIP)
    yield refused(
        "model-first: MODEL-1 (model-not-last)",
        "The model comes before a tensor.",
        Image([Entry(MODEL_PROTO, model(graph(W))), W.entry]),
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
        rules = "MODEL-3 ZIP-16" if name == "zip" else "MODEL-3"
        yield refused(
            f"model-{name}: {rules} ({attack})", f"Fault in the model: {words}.", of_proto(proto, W)
        )


def _odd(graph_fields: bytes) -> bytes:
    """A model with these bytes in its graph."""
    return model(graph(W, more=graph_fields))


def _in_w(fields: bytes) -> bytes:
    """A GraphProto field: an initializer with these fields."""
    return content(5, content(8, "inside") + fields)
