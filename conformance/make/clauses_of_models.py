"""Vectors for clauses about models and tensors that a reader could leave out; see `clauses`."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from conformance.make import zips as v
from conformance.make.parts import (
    BOOL,
    FLOAT,
    FLOAT6,
    INT4,
    MESSAGES,
    UINT2,
    W_DATA,
    Tensor,
    Vector,
    W,
    accepted,
    archive,
    graph,
    model,
    of_proto,
    refused,
    with_models,
)
from conformance.make.zips import Image, content, number


def clauses_of_models() -> Iterator[Vector]:
    """The vectors of this module, small and large."""
    yield from _models()
    yield from _wire()
    yield from _wrong_wire_types()
    yield from _later_faults()
    yield from _tensors()
    yield from _pairs()
    for vector in _large():
        yield replace(vector, large=True)


def _models() -> Iterator[Vector]:
    yield accepted(
        "model-ir-version-twice: MODEL-3",
        "The field ir_version occurs twice.",
        of_proto(number(1, 9) + model(graph(W)), W),
        W,
    )
    double = Tensor("inside", 11, (1,), pairs=(), is_external=False)
    yield refused(
        "model-packed-part-of-double: MODEL-3 (proto-corrupt)",
        "Packed double_data of 12 bytes.",
        of_proto(model(graph(W, replace(double, more=content(10, bytes(12))))), W),
    )
    for name, raw, printed in (
        ("cut", b"a\xe2\x82b", "a\ufffdb"),
        ("surrogate", b"a\xed\xa0\x80b", "a\ufffd\ufffd\ufffdb"),
        ("too-large", b"a\xf4\x90\x80\x80b", "a\ufffd\ufffd\ufffd\ufffdb"),
    ):
        tensor = replace(W, name=printed, more=content(8, raw))
        yield accepted(
            f"tensor-name-{name}: MODEL-3",
            f"The name of a tensor has the bytes {raw[1:-1].hex(' ')}, which are not UTF-8.",
            archive(tensor),
            tensor,
        )


def _wire() -> Iterator[Vector]:
    """Fields that are present, merged, skipped or refused by their tags alone."""
    yield refused(
        "model-tag-2-32: MODEL-3 (proto-corrupt)",
        "A field number of 2^29 + 1001, which is 1001 if the tag is cut to 32 bits.",
        of_proto(model(graph(W), more=number(2**29 + 1001, 1)), W),
    )
    yield refused(
        "model-wire-type-6: MODEL-3 (proto-corrupt)",
        "Fault in the model: wire type 6.",
        of_proto(model(graph(W), more=v.varint(1001 << 3 | 6)), W),
    )
    for name, about, cut, rest in (
        ("varint-past-message", "a number that begins in a message", b"\x10\x89", b"\0"),
        ("short-group-past-message", "a group that begins in a message", b"\x4b", b"\x4c"),
    ):
        yield refused(
            f"model-{name}: MODEL-3 (proto-corrupt)",
            f"Fault in the model: {about} and ends one byte after this message.",
            of_proto(model(graph(W), more=content(8, cut) + rest), W),
        )
    both = content(1, content(2, b"")) + content(4, content(1, b""))  # a tensor and a sequence
    yield accepted(
        "model-oneof-twice: MODEL-3",
        "A TypeProto states two fields of a oneof.",
        of_proto(model(graph(W, more=content(11, content(1, "x") + content(2, both)))), W),
        W,
    )
    damaged = content(1, b"\x0a") + content(4, content(1, b""))
    yield refused(
        "model-oneof-first-damaged: MODEL-3 (proto-corrupt)",
        "A TypeProto states two fields of a oneof; the first one is cut.",
        of_proto(model(graph(W, more=content(11, content(1, "x") + content(2, damaged)))), W),
    )
    values, indices, sparse_values = (Tensor(it) for it in ("values", "indices", "sparse"))

    def in_two(tensor: Tensor, field: int) -> bytes:
        """A tensor in two occurrences of a field that is not repeated."""
        dims = len(v.numbers(1, tensor.dims))
        return content(field, tensor.proto[:dims]) + content(field, tensor.proto[dims:])

    initializer = in_two(values, 1) + in_two(indices, 2)
    dims = len(v.numbers(1, sparse_values.dims))
    attribute = b"".join(
        content(22, content(1, it))
        for it in (sparse_values.proto[:dims], sparse_values.proto[dims:])
    )
    proto = model(
        graph(more=content(15, initializer) + content(1, content(5, content(1, "a") + attribute)))
    )
    yield accepted(
        "model-merged-sparse: MODEL-3 DATA-3",
        "The fields values and indices of a sparse initializer, and the field sparse_tensor of an "
        "attribute, each occur twice with a part of a tensor.",
        of_proto(proto, values, indices, sparse_values),
        values,
        indices,
        sparse_values,
    )
    unnamed = replace(W, name="")
    yield accepted(
        "tensor-name-none: MODEL-3",
        "A tensor without the field name.",
        of_proto(model(graph_of(unnamed.proto.replace(content(8, ""), b""))), unnamed),
        unnamed,
    )
    yield refused(
        "data-type-none: TENSOR-1 (dtype)",
        "An external tensor without the field data_type.",
        of_proto(model(graph_of(W.proto.replace(number(2, FLOAT), b""))), W),
    )


def _wrong_wire_types() -> Iterator[Vector]:
    """Known fields with other wire types, which are unknown fields."""
    for name, about, field in (
        ("of-wrong-type", "only as a string", content(1, b"\1")),
        ("in-a-group", "only in a group", v.varint(9 << 3 | 3) + number(1, 9) + b"\x4c"),
        ("but-model-version", "not, but model_version is", number(5, 1)),
    ):
        yield refused(
            f"model-ir-version-{name}: MODEL-3 (proto-corrupt)",
            f"The field ir_version is present {about}.",
            of_proto(content(7, graph(W)) + field, W),
        )
    for wire_type in (6, 7):
        yield refused(
            f"model-wire-type-{wire_type}-and-fields: MODEL-3 (proto-corrupt)",
            f"A field of the wire type {wire_type}, then other fields.",
            of_proto(
                model(graph(W), more=v.varint(1001 << 3 | wire_type) + number(1, 9) * 4),
                W,
            ),
        )
    late = replace(W, more=number(1000, 0) + content(14, b"\0"))
    yield accepted(
        "data-location-of-wrong-wire-type: MODEL-3 DATA-7",
        "An external tensor also has a data_location with the wire type 2, an unknown field.",
        archive(late),
        late,
    )
    pair = content(1, "location") + content(2, "w") + number(1, 1) + number(2, 1)
    bare = W.proto.replace(LOCATION_OF_W, b"")
    yield accepted(
        "external-data-strings-of-wrong-wire-type: MODEL-3 DATA-4",
        "A pair of external_data also has a key and a value with the wire type 0.",
        of_proto(model(graph_of(bare + content(13, pair))), W),
        W,
    )
    fixed = {message: _fixed(message) for message in PLACES}
    sparse_tensor = content(1, Tensor("s").proto) + fixed["SparseTensorProto"]
    attribute = content(1, "a") + content(22, sparse_tensor) + fixed["AttributeProto"]
    main = graph(W, more=content(1, content(5, attribute) + fixed["NodeProto"]))
    proto = model(
        main + fixed["GraphProto"],
        more=content(25, content(1, "f") + fixed["FunctionProto"])
        + content(20, fixed["TrainingInfoProto"])
        + fixed["ModelProto"],
    )
    yield accepted(
        "places-of-wrong-wire-types: MODEL-3 DATA-1",
        "All fields that lead to tensors also occur with the wire type 1; as messages, their bytes "
        "would hold an external tensor without a location.",
        of_proto(proto, W, Tensor("s")),
        W,
        Tensor("s"),
    )


# The fields of section 8.1, each with 8 bytes that hold an external tensor in such a message.
TENSOR_BYTES = number(14, 1) * 4
ATTRIBUTE_BYTES = content(5, number(14, 1)) * 2
NODE_BYTES = content(5, content(5, number(14, 1))) + number(9, 1)
GRAPH_BYTES = content(5, number(14, 1)) * 2
SPARSE_BYTES = content(1, number(14, 1)) * 2
PLACES: dict[str, dict[int, bytes]] = {
    "ModelProto": {
        20: content(1, content(5, number(14, 1))) + number(9, 1),
        25: content(11, content(5, number(14, 1))) + number(9, 1),
    },
    "GraphProto": {5: TENSOR_BYTES, 15: SPARSE_BYTES, 1: NODE_BYTES},
    "NodeProto": {5: ATTRIBUTE_BYTES},
    "AttributeProto": {
        **dict.fromkeys((5, 10), TENSOR_BYTES),
        **dict.fromkeys((6, 11), GRAPH_BYTES),
        **dict.fromkeys((22, 23), SPARSE_BYTES),
    },
    "SparseTensorProto": dict.fromkeys((1, 2), TENSOR_BYTES),
    "FunctionProto": {11: ATTRIBUTE_BYTES, 7: NODE_BYTES},
    "TrainingInfoProto": dict.fromkeys((1, 2), GRAPH_BYTES),
}


def _fixed(message: str) -> bytes:
    """The fields of a message in `PLACES`, with the wire type 1."""
    return b"".join(v.varint(field << 3 | 1) + data for field, data in PLACES[message].items())


def _later_faults() -> Iterator[Vector]:
    """A fault in one field of an attribute, and no fault in later fields."""
    lost = Tensor("lost")
    good = (
        (5, "t", Tensor("t").proto),
        (10, "tensors", Tensor("ts").proto),
        (6, "g", graph(Tensor("g"))),
        (11, "graphs", graph(Tensor("gs"))),
        (22, "sparse_tensor", content(1, Tensor("st").proto)),
        (23, "sparse_tensors", content(1, Tensor("sts").proto)),
    )
    bad = {
        **dict.fromkeys(("t", "tensors"), lost.proto),
        **dict.fromkeys(("g", "graphs"), graph(lost)),
        **dict.fromkeys(("sparse_tensor", "sparse_tensors"), content(1, lost.proto)),
    }
    keys = {"t": "t", "tensors": "ts", "g": "g", "graphs": "gs"}
    keys |= {"sparse_tensor": "st", "sparse_tensors": "sts"}
    for _, place, _ in good:
        attribute = b"".join(
            content(number_, bad[name] if name == place else proto) for number_, name, proto in good
        )
        yield refused(
            f"dangling-in-{place.replace('_', '-')}-of-an-attribute: DATA-1 (dangling)",
            f"In an attribute with tensors in all fields, the location in {place} is no key.",
            of_proto(
                model(graph(more=content(1, content(5, content(1, "a") + attribute)))),
                *(Tensor(key) for name, key in keys.items() if name != place),
            ),
        )


LOCATION_OF_W = content(13, content(1, "location") + content(2, "w"))


def graph_of(tensor_proto: bytes) -> bytes:
    """A serialized GraphProto with this initializer."""
    return content(5, tensor_proto) + content(2, "g")


def _pairs() -> Iterator[Vector]:
    """Pairs of external_data that lack the key or the value, or have one of them twice."""
    location = LOCATION_OF_W
    bare = W.proto.replace(location, b"")
    for name, about, pairs, rules in (
        ("pair-without-key", "a pair without a key", location + content(13, b""), "DATA-4"),
        (
            "pair-with-value-alone",
            "a pair that has only a value",
            location + content(13, content(2, "0")),
            "DATA-4",
        ),
        (
            "location-without-value",
            "a location without a value",
            content(13, content(1, "location")),
            "DATA-1 DATA-2",
        ),
        (
            "offset-without-value",
            "an offset without a value",
            location + content(13, content(1, "offset")),
            "DATA-5",
        ),
    ):
        yield refused(
            f"external-data-{name}: {rules} (ext-keys)",
            f"Pairs of external_data: {about}.",
            of_proto(model(graph_of(bare + pairs)), W),
        )
    twice = content(1, "offset") + content(1, "location") + content(2, "u") + content(2, "w")
    yield accepted(
        "external-data-key-twice-in-a-pair: DATA-4 MODEL-3",
        "A pair of external_data has two keys and two values; the last ones count.",
        of_proto(model(graph_of(bare + content(13, twice))), W),
        W,
    )


def _tensors() -> Iterator[Vector]:
    for name, more in (("segment", content(3, b"")), ("string-data", content(6, b""))):
        yield refused(
            f"two-sources-{name}-empty: DATA-7 (two-sources)",
            f"An external tensor has an empty {name.replace('-', '_')}.",
            archive(replace(W, more=more)),
        )
    unknown = replace(W, more=b"".join(number(it, 1) for it in (3, 4, 6, 9, 10)))
    yield accepted(
        "external-data-fields-of-wrong-wire-types: DATA-7 MODEL-3",
        "An external tensor has the fields segment, float_data, string_data, raw_data and "
        "double_data with the wire type 0: unknown fields.",
        archive(unknown),
        unknown,
    )
    one = {4: struct.pack("<f", 1), 10: struct.pack("<d", 1)}
    wire_types = {4: 5, 10: 1}
    for field, called in PACKED.items():
        data = one.get(field, b"\1")
        unpacked = v.varint(field << 3 | wire_types.get(field, 0)) + data
        for name, more in (("packed", content(field, data)), ("unpacked", unpacked)):
            yield refused(
                f"two-sources-{name}-{called.replace('_', '-')}: DATA-7 (two-sources)",
                f"An external tensor has an element in its {called}, {name}.",
                archive(replace(W, more=more)),
            )
    whole = (
        Tensor("int4", INT4, (4,), b"\xff\xff"),
        Tensor("uint2", UINT2, (4,), b"\xff"),
        Tensor("float6", FLOAT6, (4,), b"\xff\xff\xff"),
    )
    yield accepted(
        "packed-without-unused-bits: TENSOR-4 TENSOR-3",
        "Tensors of packed types whose last byte has no unused bits, and all bits set.",
        archive(*whole),
        *whole,
    )
    for field in (4, 5, 7, 10, 11):
        tensor = replace(W, more=content(field, b""))
        yield accepted(
            f"external-packed-{PACKED[field].replace('_', '-')}-empty: DATA-7",
            f"An external tensor has a packed {PACKED[field]} without elements.",
            archive(tensor),
            tensor,
        )
    inside = Tensor("inside", pairs=(), is_external=False)
    yield accepted(
        "data-location-external-then-default: MODEL-3 DATA-7",
        "A tensor with raw_data has the data_location EXTERNAL, then DEFAULT.",
        of_proto(
            model(
                graph(
                    W,
                    replace(inside, more=number(14, 1) + number(14, 0) + content(9, bytes(8))),
                )
            ),
            W,
        ),
        W,
    )
    yield refused(
        "external-data-length-empty: DATA-5 (ext-numbers)",
        "Pairs of external_data: a length of no digits.",
        archive(replace(W, pairs=(("location", "w"), ("length", "")))),
    )
    checksum = hashlib.sha1(W_DATA).hexdigest()
    right, wrong = (
        replace(W, pairs=(("location", "w"), ("checksum", it))) for it in (checksum, "0" * 40)
    )
    for name, about, default, further in (
        ("default", "right in the further model, wrong in the default model", wrong, right),
        ("further", "wrong in the further model, right in the default model", right, wrong),
    ):
        yield refused(
            f"models-checksum-wrong-in-{name}: DATA-6",
            f"Two models share an entry; the checksum is {about}.",
            with_models((W,), model(graph(default)), {"a": model(graph(further))}),
        )
    yield accepted(
        "models-checksum-in-one: DATA-6",
        "Two models share an entry; only the further model states its checksum.",
        with_models((W,), model(graph(W)), {"a": model(graph(right))}),
        W,
        further={"a": (W,)},
    )
    yield refused(
        "external-data-none-and-no-entry: DATA-4 (ext-keys)",
        "An external tensor has no pairs of external_data, and no key is without a tensor.",
        of_proto(model(graph(W, Tensor("u", pairs=()))), W),
    )
    large_dim = Tensor("w", FLOAT, (1 << 40, 0), b"")
    yield accepted(
        "dims-2-40-beside-zero: TENSOR-2 TENSOR-3",
        "A dim of 2^40, of which the lowest 40 bits are 0, beside a dim of 0.",
        archive(large_dim),
        large_dim,
    )
    for place, data in (("first", b"\2" + bytes(8)), ("last", bytes(8) + b"\2")):
        yield refused(
            f"bool-{place}-of-9: TENSOR-5 (dtype)",
            f"The {place} of nine booleans is neither 0 nor 1.",
            archive(Tensor("w", BOOL, (9,), data)),
        )
    two = Tensor("w", FLOAT, (2,), bytes(8))
    yield refused(
        "models-differ-in-dims-of-further-prefix: DATA-8",
        "Two models share an entry; the dims are [2] in the further model, [2, 1] in the default "
        "model.",
        with_models((two,), model(graph(replace(two, dims=(2, 1)))), {"a": model(graph(two))}),
    )


PACKED = {4: "float_data", 5: "int32_data", 7: "int64_data", 10: "double_data", 11: "uint64_data"}


def _large() -> Iterator[Vector]:
    def occurrences(count: int) -> Image:
        """A model of `count` messages, most of them occurrences of one tensor."""
        return of_proto(
            model(graph(more=content(1, content(5, content(1, "a") + b"\x2a\0" * (count - 4)))))
        )

    yield accepted(
        "model-messages-merged-most: MODEL-3",
        "A model of 4,194,304 messages, most of which are merged into one tensor.",
        partial(occurrences, MESSAGES),
    )
    yield refused(
        "model-messages-merged: MODEL-3 (proto-amplify)",
        "A model of 4,194,305 messages, most of which are merged into one tensor.",
        partial(occurrences, MESSAGES + 1),
    )
    yield accepted(
        "model-groups-most: MODEL-3",
        "A model of 4,194,305 groups, which do not count as messages.",
        lambda: of_proto(model(graph(), more=b"\x0b\x0c" * (MESSAGES + 1))),
    )
