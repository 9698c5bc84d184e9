"""Serialized models: stripped, decoded and filled, compared with protobuf."""

from __future__ import annotations

import mmap
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto
from google.protobuf.message import DecodeError, Message
from hypothesis import given, settings, strategies as st
from models import every_tensor, full_model
from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    SparseTensorProto,
    StringStringEntryProto,
    TensorProto,
    TrainingInfoProto,
    numpy_helper,
)
from outcomes import count_outcome, requires_outcomes
from plain_wire import varint
from processes import completed
from versions import needs_compiled_parser

from onnxarchive.errors import ArchiveFormatError, UnsupportedFeatureError
from onnxarchive.model import walking, weights, wire
from onnxarchive.model.dtypes import BY_NUMBER
from onnxarchive.model.weights import (
    PIECE_BYTES,
    SPAN_LOCATION,
    Span,
    StrippedModel,
    decode,
    fill,
    strip_weights,
)

MAX_INT32 = 2**31 - 1
REPEATED = FieldDescriptorProto.LABEL_REPEATED
VARINT, I64, LEN, START_GROUP, END_GROUP, I32 = range(6)


# A byte builder


def tag(message: type[Message], name: str, wire_type: int) -> bytes:
    return varint(message.DESCRIPTOR.fields_by_name[name].number << 3 | wire_type)


def put(message: type[Message], name: str, value: bytes | int) -> bytes:
    """Encodes one field: bytes with their length, a number as a varint."""
    if isinstance(value, int):
        return tag(message, name, VARINT) + varint(value % 2**64)
    return tag(message, name, LEN) + varint(len(value)) + value


def unknown(number: int, value: bytes) -> bytes:
    return varint(number << 3 | LEN) + varint(len(value)) + value


def group(number: int, content: bytes = b"") -> bytes:
    return varint(number << 3 | START_GROUP) + content + varint(number << 3 | END_GROUP)


def tensor_of(**fields: bytes | int) -> bytes:
    """Encodes a tensor with these fields, in this order."""
    return b"".join(put(TensorProto, name, value) for name, value in fields.items())


def raw_tensor(data: bytes = b"w" * 2000, more: bytes = b"") -> bytes:
    header = tensor_of(data_type=TensorProto.UINT8, name=b"weight")
    return header + more + tensor_of(raw_data=data)


def within(path: str, content: bytes, message: type[Message] = ModelProto) -> bytes:
    """Encodes a message that has content at a path of fields, such as `graph.initializer`."""
    name, _, rest = path.partition(".")
    if rest:
        below: Any = message.DESCRIPTOR.fields_by_name[name].message_type
        content = within(rest, content, getattr(onnx, below.name))
    return put(message, name, content)


def model_of(tensor: bytes) -> bytes:
    return within("graph.initializer", tensor)


def attribute_model(attribute: bytes) -> bytes:
    return within("graph.node.attribute", attribute)


# The oracle: protobuf


def parsed(data: bytes) -> ModelProto | None:
    """The model that protobuf parses, or None if it refuses the bytes."""
    try:
        return ModelProto.FromString(data)
    except DecodeError:
        return None


def payload_of(data: bytes, span: Span) -> bytes:
    return data[span.offset : span.offset + span.nbytes]


def names_a_span(pair: StringStringEntryProto) -> bool:
    return SPAN_LOCATION.encode() in pair.SerializeToString()  # pair.value may be no UTF-8


def restored(data: bytes, result: StrippedModel) -> ModelProto | None:
    """Puts the spans back into the parsed model, in the fields that they came from."""
    model = parsed(result.model)
    if model is None:
        return None
    used = []
    for tensor in every_tensor(model):
        if not any(map(names_a_span, tensor.external_data)):
            continue
        (pair,) = tensor.external_data
        assert tensor.data_location == TensorProto.EXTERNAL
        index = int(pair.value.removeprefix(SPAN_LOCATION))
        used.append(index)
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
        span = result.spans[index]
        try:
            tensor.MergeFromString(put(TensorProto, span.field, payload_of(data, span)))
        except DecodeError:
            return None
    assert sorted(used) == list(range(len(result.spans)))
    return model


def comparable(model: ModelProto | None) -> bytes | None:
    """A model as bytes, unless it is refused; a DEFAULT that is spelled out is no difference."""
    if model is None:
        return None
    for tensor in every_tensor(model):
        if tensor.data_location == TensorProto.DEFAULT:
            tensor.ClearField("data_location")
    return model.SerializeToString(deterministic=True)


def seen_through_wire(data: bytes, size_threshold: int) -> ModelProto | None:
    """What a reader of stripped model and spans sees, or None where it refuses."""
    try:
        result = strip_weights(data, size_threshold=size_threshold)
        for span in result.spans:
            for _ in decode(data, span):
                pass
    except ArchiveFormatError as error:
        assert error.rule == "MODEL-3"
        return None
    assert all(span.nbytes >= size_threshold for span in result.spans)
    return restored(data, result)


def refilled(data: bytes, result: StrippedModel) -> bytes:
    def contents(location: str) -> bytes | None:
        if not location.startswith(SPAN_LOCATION):
            return None
        span = result.spans[int(location.removeprefix(SPAN_LOCATION))]
        return b"".join(decode(data, span))

    return b"".join(fill(result.model, contents))


# Models of all kinds

TYPED = [
    (onnx.helper.tensor_dtype_to_field(number), name)
    for name, number in TensorProto.DataType.items()
    if name not in ("UNDEFINED", "STRING")
]
TYPED_FIELDS = sorted({field for field, _ in TYPED})
FIXED_WIDTH = {"float_data": 4, "double_data": 8}
PER_INT32 = {"INT4": 2, "UINT4": 2, "FLOAT4E2M1": 2, "INT2": 4, "UINT2": 4}

varints = st.builds(
    varint,
    st.one_of(st.integers(0, 300), st.integers(0, 2**64 - 1), st.integers(2**64 - 300, 2**64 - 1)),
    st.integers(1, 10),
)
stray_fields = st.one_of(
    st.builds(unknown, st.integers(100, 200), st.binary(max_size=4)),
    st.builds(lambda content: group(150, content), st.sampled_from([b"", b"\x08\x01", group(3)])),
    st.builds(lambda width: varint(101 << 3 | VARINT, 4) + varint(5, width), st.integers(1, 10)),
    st.just(varint(102 << 3 | I32) + b"abcd"),
    st.just(varint(103 << 3 | I64) + b"abcdefgh"),
)
strays = st.lists(stray_fields, max_size=1)


@st.composite
def typed_payloads(draw: st.DrawFn) -> tuple[str, str, bytes]:
    field, name = draw(st.sampled_from(TYPED))
    if field in FIXED_WIDTH:
        count = draw(st.integers(0, 6)) * (2 if "COMPLEX" in name else 1)
        width = FIXED_WIDTH[field] * count
        return field, name, draw(st.binary(min_size=width, max_size=width))
    return field, name, b"".join(draw(st.lists(varints, max_size=12)))


@st.composite
def tensors(draw: st.DrawFn) -> bytes:
    """A tensor with its data in any of the possible fields."""
    kind = draw(st.sampled_from(["raw", "typed", "typed", "split", "mixed", "strings", "external"]))
    field, name, payload = draw(typed_payloads())
    data = put(TensorProto, field, payload)
    parts = [tensor_of(data_type=TensorProto.DataType.Value(name))]
    raw = put(TensorProto, "raw_data", draw(st.binary(max_size=40)))
    pair = put(StringStringEntryProto, "key", b"location")
    pair += put(StringStringEntryProto, "value", draw(st.sampled_from([b"a.bin", b"b.bin"])))
    parts += {
        "raw": [raw],
        "typed": [data],
        "split": [data, data],
        "mixed": [data, raw],
        "strings": [tensor_of(string_data=b"text" * 8)] * 2,
        "external": [
            tensor_of(external_data=pair),
            tensor_of(data_location=TensorProto.EXTERNAL),
        ],
    }[kind]
    if kind != "external" and draw(st.booleans()):
        parts.append(put(TensorProto, "data_location", draw(st.sampled_from([0, 0, 7]))))
    parts.append(put(TensorProto, "name", draw(st.binary(max_size=5).map(bytes.hex)).encode()))
    return b"".join(draw(st.permutations(parts + draw(strays))))


BELOW: dict[type[Message], list[tuple[str, type[Message]]]] = {
    ModelProto: [
        ("graph", GraphProto),
        ("functions", FunctionProto),
        ("training_info", TrainingInfoProto),
    ],
    GraphProto: [
        ("initializer", TensorProto),
        ("sparse_initializer", SparseTensorProto),
        ("node", NodeProto),
    ],
    NodeProto: [("attribute", AttributeProto)],
    FunctionProto: [("attribute_proto", AttributeProto), ("node", NodeProto)],
    TrainingInfoProto: [("initialization", GraphProto), ("algorithm", GraphProto)],
    SparseTensorProto: [("values", TensorProto), ("indices", TensorProto)],
    AttributeProto: [
        ("t", TensorProto),
        ("tensors", TensorProto),
        ("sparse_tensor", SparseTensorProto),
        ("sparse_tensors", SparseTensorProto),
        ("g", GraphProto),
        ("graphs", GraphProto),
    ],
}


@st.composite
def messages(draw: st.DrawFn, kind: type[Message], depth: int = 3) -> bytes:
    """A message that leads to tensors, with a few of its fields in any order."""
    if kind is TensorProto:
        return draw(tensors())
    below = BELOW[kind]
    if depth <= 0:
        below = [(name, child) for name, child in below if child is TensorProto]
    if not below:
        return b""
    names = st.lists(st.sampled_from(below), max_size=3)
    parts = [put(kind, name, draw(messages(child, depth - 1))) for name, child in draw(names)]
    if "name" in kind.DESCRIPTOR.fields_by_name:
        parts.append(put(kind, "name", b"name"))
    return b"".join(draw(st.permutations(parts + draw(strays))))


models = messages(ModelProto, 6)
thresholds = st.sampled_from([0, 1, 8, 30])


@st.composite
def mutated_models(draw: st.DrawFn) -> bytes:
    """A model after a few flips, insertions, deletions, repetitions or cuts."""
    data = bytearray(draw(st.one_of(models, st.sampled_from(SEEDS))))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        to = min(len(data), at + draw(st.integers(1, 6)))
        match draw(st.sampled_from(["flip", "flip", "byte", "insert", "delete", "repeat", "cut"])):
            case "flip" if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "byte" if at < len(data):
                data[at] = draw(st.integers(0, 255))
            case "insert":
                data[at:at] = draw(st.one_of(st.binary(max_size=4), stray_fields))
            case "delete":
                del data[at:to]
            case "repeat":
                data[at:at] = data[at:to]
            case "cut":
                del data[at:]
    return bytes(data)


def seed_models() -> list[bytes]:
    typed = [
        tensor_of(data_type=TensorProto.DataType.Value(name), **{field: b"\x01\x7f\x00\x02" * 4})
        for field, name in TYPED
    ]
    sparse = put(SparseTensorProto, "values", raw_tensor(b"v" * 9))
    sparse += put(SparseTensorProto, "indices", typed[TYPED.index(("int64_data", "INT64"))])
    attribute = put(AttributeProto, "t", raw_tensor(b"t" * 12))
    attribute += within("g.initializer", raw_tensor(b"i" * 20), AttributeProto)
    attribute += put(AttributeProto, "sparse_tensor", sparse)
    full = put(ModelProto, "ir_version", 10) + attribute_model(attribute)
    return [*map(model_of, typed), full + within("functions.node.attribute", attribute)]


SEEDS = seed_models()


# Stripping


def test_every_model_of_the_onnx_backend_tests_is_seen_as_protobuf_sees_it() -> None:
    folder = Path(onnx.__file__).parent / "backend" / "test" / "data"
    if not folder.exists():  # Debian's package
        pytest.skip("onnx is installed without its test data")
    paths = sorted(folder.rglob("*.onnx"))
    assert len(paths) > 100
    for path in paths:
        data = path.read_bytes()
        for size_threshold in (0, 16, 1024):
            expected = comparable(parsed(data))
            assert comparable(seen_through_wire(data, size_threshold)) == expected, path


@pytest.mark.sweep
@given(models, thresholds)
def test_the_stripped_model_and_spans_are_the_model_that_protobuf_reads(
    data: bytes, threshold: int
) -> None:
    expected = parsed(data)
    assert expected is not None
    assert comparable(seen_through_wire(data, threshold)) == comparable(expected)


@pytest.mark.sweep
@requires_outcomes(read=10, refused=10)
@settings(max_examples=400)
@given(mutated_models(), thresholds)
def test_a_mutated_model_is_refused_or_seen_as_protobuf_sees_it(
    data: bytes, threshold: int
) -> None:
    expected = parsed(data)
    count_outcome("refused" if expected is None else "read")
    assert comparable(seen_through_wire(data, threshold)) == comparable(expected)


def is_well_formed(data: bytes) -> bool:
    try:
        wire.require_well_formed(data)
    except ArchiveFormatError as error:
        assert error.rule == "MODEL-3"
        return False
    return True


@pytest.mark.sweep
@requires_outcomes(read=10, refused=10)
@settings(max_examples=400)
@given(mutated_models())
def test_a_model_is_well_formed_if_protobuf_parses_it(data: bytes) -> None:
    is_parsed = parsed(data) is not None
    count_outcome("read" if is_parsed else "refused")
    assert is_well_formed(data) == is_parsed


@requires_outcomes(read=10, refused=10)
@needs_compiled_parser
def test_packed_numbers_are_well_formed_if_protobuf_parses_them() -> None:
    payloads = [b"", b"\1", b"\x80", b"\1\x80", b"\x80" * 9 + b"\1", b"\x80" * 10 + b"\1"]
    payloads += [b"\xff" * 9 + b"\x7f", b"\xff" * 10, b"abcd", b"abcdefg", b"abcdefgh"]
    for field in ("dims", *TYPED_FIELDS, "string_data", "raw_data", "data_type", "name"):
        for payload in payloads:
            data = model_of(tensor_of(**{field: payload}))
            is_parsed = parsed(data) is not None
            count_outcome("read" if is_parsed else "refused")
            assert is_well_formed(data) == is_parsed, (field, payload)


PLACES = [
    *("graph.initializer", "graph.sparse_initializer.indices"),
    *(
        f"graph.node.attribute.{way}"
        for way in (
            *("t", "tensors", "sparse_tensor.values", "sparse_tensors.values"),
            *("g.initializer", "graphs.initializer"),
        )
    ),
    *("functions.node.attribute.t", "functions.attribute_proto.t"),
    *("training_info.initialization.initializer", "training_info.algorithm.initializer"),
]


@pytest.mark.parametrize("place", PLACES)
def test_tensors_of_every_place_are_stripped(place: str) -> None:
    data = within(place, raw_tensor())
    result = strip_weights(data)
    (span,) = result.spans
    assert payload_of(data, span) == b"w" * 2000
    (tensor,) = every_tensor(ModelProto.FromString(result.model))
    assert tensor.data_location == TensorProto.EXTERNAL
    assert [(pair.key, pair.value) for pair in tensor.external_data] == [
        ("location", SPAN_LOCATION + "0")
    ]
    assert not tensor.HasField("raw_data")
    assert tensor.name == "weight"


FLOATS = tag(TensorProto, "float_data", I32) + b"abcd"
DOUBLES = tag(TensorProto, "double_data", I64) + b"abcdefgh"


def test_every_way_from_a_model_to_a_tensor_is_known() -> None:
    def leads_to_a_tensor(message: Any, seen: frozenset[str]) -> bool:
        if message.full_name == "onnx.TensorProto":
            return True
        return message.full_name not in seen and any(
            field.message_type and leads_to_a_tensor(field.message_type, seen | {message.full_name})
            for field in message.fields
        )

    pending: list[Any] = [ModelProto.DESCRIPTOR]
    seen: set[str] = set()
    while pending:
        message = pending.pop()
        if message.full_name in seen or message.full_name == "onnx.TensorProto":
            continue
        seen.add(message.full_name)
        declaration = DescriptorProto()
        message.CopyToProto(declaration)
        assert dict(walking.fields_to(TensorProto.DESCRIPTOR)[message]) == {
            field.name: declared.label == REPEATED
            for field, declared in zip(message.fields, declaration.field, strict=True)
            if field.message_type and leads_to_a_tensor(field.message_type, frozenset())
        }
        pending += [field.message_type for field in message.fields if field.message_type]
        pending = [child for child in pending if leads_to_a_tensor(child, frozenset())]


def test_spans_are_numbered_in_the_order_of_the_file() -> None:
    tensor = put(GraphProto, "initializer", raw_tensor())
    data = put(ModelProto, "graph", tensor * 3)
    spans = strip_weights(data).spans
    assert [span.offset for span in spans] == sorted(span.offset for span in spans)
    stripped = ModelProto.FromString(strip_weights(data).model)
    locations = [tensor.external_data[0].value for tensor in every_tensor(stripped)]
    assert locations == [f"{SPAN_LOCATION}{index}" for index in range(3)]


@pytest.mark.parametrize(("nbytes", "stripped"), [(1023, 0), (1024, 1), (1025, 1)])
def test_the_threshold_counts_the_bytes_of_the_data(nbytes: int, stripped: int) -> None:
    assert len(strip_weights(model_of(raw_tensor(b"w" * nbytes))).spans) == stripped


UNTOUCHED = {
    "strings": tensor_of(data_type=TensorProto.STRING, string_data=b"s" * 2000),
    "raw data of strings": tensor_of(raw_data=b"s" * 2000, data_type=TensorProto.STRING),
    "raw data twice": raw_tensor() + tensor_of(raw_data=b"x" * 2000),
    **{
        f"raw data beside {field}": raw_tensor() + tensor_of(**{field: b"\1" * 8})
        for field in ("string_data", *TYPED_FIELDS)
    },
    **{
        f"raw data beside unpacked {field}": raw_tensor() + tensor_of(**{field: 1})
        for field in ("int32_data", "int64_data", "uint64_data")
    },
    "raw data beside unpacked float_data": raw_tensor() + FLOATS,
    "raw data beside unpacked double_data": raw_tensor() + DOUBLES,
    "typed data that is split": tensor_of(data_type=TensorProto.INT64)
    + tensor_of(int64_data=b"\1" * 2000) * 2,
    "unpacked float data": tensor_of(data_type=TensorProto.FLOAT) + FLOATS * 500,
    "unpacked double data": tensor_of(data_type=TensorProto.DOUBLE) + DOUBLES * 500,
    "packed and unpacked float data": tensor_of(
        data_type=TensorProto.FLOAT, float_data=b"abcd" * 500
    )
    + FLOATS,
    "typed data that does not suit its type": tensor_of(
        data_type=TensorProto.FLOAT, int64_data=b"\1" * 2000
    ),
    "typed data without a type": tensor_of(int32_data=b"\1" * 2000),
    "external": raw_tensor() + tensor_of(data_location=1) + tensor_of(data_location=7),
    "leftover external data": raw_tensor() + tensor_of(external_data=b""),
}


@pytest.mark.parametrize("case", UNTOUCHED)
def test_a_tensor_that_cannot_be_stripped_stays_byte_for_byte(case: str) -> None:
    data = model_of(UNTOUCHED[case])
    assert parsed(data) is not None
    assert strip_weights(data) == StrippedModel(data, ())


def test_the_last_of_several_data_types_counts_and_has_32_bits() -> None:
    types = tensor_of(data_type=TensorProto.FLOAT)
    types += tensor_of(data_type=2**32 + TensorProto.INT64, int64_data=b"\1" * 2000)
    (span,) = strip_weights(model_of(types)).spans
    assert span.data_type is BY_NUMBER[TensorProto.INT64]


# The way to a message, and the way from the message to a tensor, whose first field stands twice.
TWICE: list[tuple[str, type[Message], str]] = [
    *(("graph.node.attribute", AttributeProto, it) for it in ("t", "g.initializer")),
    ("graph.node.attribute", AttributeProto, "sparse_tensor.values"),
    ("graph.node.attribute.sparse_tensor", SparseTensorProto, "values"),
    ("graph.node.attribute.sparse_tensor", SparseTensorProto, "indices"),
    ("training_info", TrainingInfoProto, "algorithm.initializer"),
]
DOUBLED = {
    "graph": model_of(raw_tensor()) * 2,
    "graph, once empty": model_of(raw_tensor()) + put(ModelProto, "graph", b""),
    **{
        f"{path}: {way}": within(path, within(way, raw_tensor(), kind) * 2)
        for path, kind, way in TWICE
    },
}


@pytest.mark.parametrize("case", DOUBLED)
def test_singular_fields_that_protobuf_merges_stay_byte_for_byte(case: str) -> None:
    assert strip_weights(DOUBLED[case]) == StrippedModel(DOUBLED[case], ())


def test_the_siblings_of_a_doubled_field_are_stripped() -> None:
    doubled = put(AttributeProto, "t", raw_tensor()) * 2
    sibling = put(AttributeProto, "tensors", raw_tensor(b"s" * 3000))
    result = strip_weights(attribute_model(doubled + sibling))
    assert [span.nbytes for span in result.spans] == [3000]
    assert doubled in result.model


def test_a_known_field_of_another_wire_type_is_an_unknown_field() -> None:
    stray = tag(GraphProto, "initializer", VARINT) + b"\x05"
    stray += tag(ModelProto, "graph", VARINT) + b"\x01"
    tensor = raw_tensor(more=tag(TensorProto, "raw_data", VARINT) + b"\1")
    graph = put(GraphProto, "initializer", tensor)
    data = put(ModelProto, "graph", stray + graph) + tag(ModelProto, "graph", VARINT) + b"\1"
    result = strip_weights(data)
    assert len(result.spans) == 1
    assert refilled(data, result) == data


def test_unknown_fields_groups_and_padded_varints_survive_byte_for_byte() -> None:
    odd = unknown(1000, b"later") + group(99, group(98) + b"\x08\x01" + unknown(7, b"deep"))
    odd += varint(77 << 3 | VARINT, 5) + varint(3, 10)
    odd += varint(78 << 3 | LEN, 4) + varint(2, 5) + b"ab"
    tensor = odd + raw_tensor(more=odd) + odd
    data = odd + put(ModelProto, "graph", odd + put(GraphProto, "initializer", tensor) + odd) + odd
    result = strip_weights(data)
    assert result.model.count(odd) == 7
    assert refilled(data, result) == data


def test_a_span_location_can_be_no_file_path() -> None:
    assert SPAN_LOCATION.startswith("\0")


def test_a_model_that_names_a_span_itself_is_refused() -> None:
    intruder = external_tensor(SPAN_LOCATION.encode() + b"0")
    tensors = [put(GraphProto, "initializer", it) for it in (raw_tensor(), intruder)]
    with pytest.raises(ArchiveFormatError, match="reserved location"):
        strip_weights(put(ModelProto, "graph", b"".join(tensors)))


def test_a_memoryview_of_wider_elements_is_read_as_bytes() -> None:
    data = model_of(raw_tensor(b"w" * 2001))
    data += unknown(100, b" " * (-(len(data) + 3) % 8))
    assert strip_weights(memoryview(data).cast("Q")) == strip_weights(data)


def test_a_map_can_be_closed_when_its_model_is_stripped(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(model_of(raw_tensor()))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        # Leaving the block closes the map.
        assert len(strip_weights(mapped).spans) == 1  # type: ignore[arg-type]


# Malformed models

MALFORMED: dict[str, tuple[bytes, int, str]] = {
    "tag cut": (b"\xca", 0, "varint"),
    "tag of six bytes": (varint(1 << 3, 6) + b"\0", 0, "varint of at most 5"),
    "tag over 32 bits": (b"\xc8\x80\x80\x80\x10\0", 0, "field number"),
    "field number 0": (b"\x02\x00", 0, "field number"),
    "wire type 6": (b"\x4e\x00", 0, "wire type"),
    "wire type 7": (b"\x4f\x00", 0, "wire type"),
    "length cut": (b"\x4a\x80", 1, "varint"),
    "length missing": (b"\x4a", 1, "varint"),
    "length of six bytes": (b"\x4a" + varint(0, 6), 1, "varint of at most 5"),
    "length past the end": (b"\x4a\x02a", 0, "ends at byte 3 or before"),
    "length of 2 GiB": (b"\x4a" + varint(2**31) + b"a", 0, "ends at byte 7 or before"),
    "length past its message": (
        put(ModelProto, "graph", b"\x4a\x03a") + put(ModelProto, "domain", b"ab"),
        2,
        "ends at byte 5 or before",
    ),
    "varint cut": (b"\x08\xff", 1, "varint"),
    "varint of eleven bytes": (b"\x08" + varint(1, 11), 1, "varint of at most 10"),
    "fixed32 cut": (b"\x4dabc", 0, "ends at byte 4 or before"),
    "fixed64 cut": (b"\x49abcdefg", 0, "ends at byte 8 or before"),
    "groups too deep": (b"\x4b" * 101 + b"\x4c" * 101, 100, "at most 100 nested"),
    "group not closed": (b"\x4b", 1, "the end of group 9"),
    "group closed by another": (
        b"\x4b\x54",
        1,
        "expected the end of group 9, found the end of group 10",
    ),
    "group closed, never opened": (b"\x4c", 0, "expected no end of a group"),
    "group closed outside of its message": (
        b"\x4b" + put(ModelProto, "graph", b"\x4c") + b"\x4c" + put(ModelProto, "graph", b"\x4c"),
        7,
        "expected no end of a group",
    ),
    "odd float data": (
        model_of(tensor_of(data_type=1, float_data=b"abcde")),
        8,
        "elements of 4 bytes",
    ),
    "odd double data": (
        model_of(tensor_of(data_type=11, double_data=b"a" * 9)),
        8,
        "elements of 8 bytes",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
@needs_compiled_parser
def test_a_malformed_model_is_refused_with_its_offset(case: str) -> None:
    data, offset, expected = MALFORMED[case]
    with pytest.raises(ArchiveFormatError, match=expected) as caught:
        strip_weights(data, size_threshold=0)
    assert f"byte {offset}:" in str(caught.value)
    assert caught.value.rule == "MODEL-3"
    assert parsed(data) is None


def test_every_truncation_of_a_model_is_refused_or_seen_as_protobuf_sees_it() -> None:
    data = SEEDS[-1]
    for size in range(len(data)):
        cut = data[:size]
        assert comparable(seen_through_wire(cut, 4)) == comparable(parsed(cut)), size


@pytest.mark.parametrize("width", [1, 9, 10])
def test_a_varint_may_be_padded_to_ten_bytes_and_pass_64_bits(width: int) -> None:
    data = tag(ModelProto, "ir_version", VARINT) + varint(1, width)
    assert strip_weights(data).model == data
    data = tag(ModelProto, "ir_version", VARINT) + b"\xff" * 9 + b"\x7f"
    assert strip_weights(data).model == data
    assert parsed(data) is not None


def nested(depth: int, leaf: bytes) -> bytes:
    """Puts the fields `leaf` into a message `depth` levels below the model."""
    steps = [(AttributeProto, "g"), (GraphProto, "node"), (NodeProto, "attribute")]
    for level in range(depth - 1, 0, -1):
        leaf = put(*steps[level % 3], leaf)
    return put(ModelProto, "graph", leaf)


def test_a_tensor_below_99_messages_is_stripped() -> None:
    data = nested(97, put(GraphProto, "initializer", raw_tensor()))
    assert len(strip_weights(data).spans) == 1
    assert comparable(seen_through_wire(data, 0)) == comparable(parsed(data))


def test_a_tensor_at_the_last_level_stays_as_external_data_would_be_too_deep() -> None:
    data = nested(99, put(AttributeProto, "t", raw_tensor()))
    assert parsed(data) is not None
    assert strip_weights(data) == StrippedModel(data, ())


def test_a_tensor_beyond_the_last_level_is_refused() -> None:
    data = nested(100, put(GraphProto, "initializer", raw_tensor()))
    assert parsed(data) is None
    with pytest.raises(ArchiveFormatError, match="at most 100 nested"):
        strip_weights(data)


@pytest.mark.parametrize(("depth", "groups"), [(1, 99), (1, 100), (99, 1), (99, 2)])
@needs_compiled_parser
def test_groups_count_as_levels(depth: int, groups: int) -> None:
    leaf = varint(99 << 3 | START_GROUP) * groups + varint(99 << 3 | END_GROUP) * groups
    data = nested(depth, leaf)
    expected = parsed(data)
    assert (expected is None) == (depth + groups > 100)
    assert comparable(seen_through_wire(data, 0)) == comparable(expected)


# Decoding


def raw_bytes(tensor: TensorProto, name: str) -> bytes:
    """A tensor as numpy_helper reads it, as raw data."""
    array = numpy_helper.to_array(tensor).ravel()
    width = 6 if name.startswith("FLOAT6") else 8 // PER_INT32.get(name, 1)
    if width < 8:
        bits = np.unpackbits(array.view(np.uint8)[:, None], axis=1, bitorder="little")[:, :width]
        return np.packbits(bits.ravel(), bitorder="little").tobytes()
    return array.astype(array.dtype.newbyteorder("<")).tobytes()


def typed_tensor(field: str, name: str, payload: bytes) -> bytes:
    """A tensor with a packed field and the dims that suit it."""
    tensor = tensor_of(data_type=TensorProto.DataType.Value(name), **{field: payload})
    count = len(getattr(TensorProto.FromString(tensor), field)) * PER_INT32.get(name, 1)
    return tensor_of(dims=count // (2 if "COMPLEX" in name else 1)) + tensor


def decoded(tensor: bytes) -> bytes:
    data = model_of(tensor)
    (span,) = strip_weights(data, size_threshold=0).spans
    return b"".join(decode(data, span))


@given(typed_payloads(), st.integers(40, 60))
def test_typed_data_decodes_to_what_numpy_helper_reads(
    payload: tuple[str, str, bytes], piece: int
) -> None:
    tensor = typed_tensor(*payload)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "PIECE_BYTES", piece)
        assert decoded(tensor) == raw_bytes(TensorProto.FromString(tensor), payload[1])


@pytest.mark.parametrize(("field", "name"), TYPED)
def test_each_data_type_decodes_across_many_pieces(field: str, name: str) -> None:
    random = np.random.default_rng(7)
    if field in FIXED_WIDTH:
        payload = random.integers(0, 63, 2**21, np.uint8).tobytes()
    else:
        numbers = random.integers(-(2**31), 2**31 - 1, 120_000) >> random.integers(0, 31, 120_000)
        message = TensorProto()
        signed = numbers if field != "uint64_data" else numbers.astype(np.uint64)
        getattr(message, field).extend(signed.tolist())
        payload = message.SerializeToString()
        payload = payload[1 + len(varint(len(payload))) :]
        assert len(payload) > PIECE_BYTES
    tensor = typed_tensor(field, name, payload)
    assert decoded(tensor) == raw_bytes(TensorProto.FromString(tensor), name)


def test_pieces_are_bounded_and_raw_ones_are_views() -> None:
    data = model_of(raw_tensor(bytes(2**21)))
    (span,) = strip_weights(data).spans
    pieces = list(decode(data, span))
    assert max(map(len, pieces)) <= 2**21
    assert all(piece.obj is data for piece in pieces)
    data = model_of(typed_tensor("int64_data", "INT64", b"\1" * 2**21))
    (span,) = strip_weights(data).spans
    assert {len(piece) for piece in decode(data, span)} == {2**21}


@pytest.mark.parametrize(
    ("payload", "offset"),
    [
        (b"\1\x80", 1),
        (b"\1" + b"\xff" * 10 + b"\1", 1),
        (b"\1\2" + b"\xff" * 30, 2),
        (b"\xff" * 2**19, 0),
        (b"\1" * (2**18 - 1) + b"\x80", 2**18 - 1),
        (b"\1" * (2**18 - 5) + b"\x80" * 10 + b"\1", 2**18 - 5),
    ],
)
def test_malformed_typed_data_is_refused_with_its_offset(payload: bytes, offset: int) -> None:
    tensor = tensor_of(data_type=TensorProto.INT64)
    data = model_of(tensor + tensor_of(int64_data=payload))
    assert parsed(data) is None
    (span,) = strip_weights(data, size_threshold=0).spans
    with pytest.raises(ArchiveFormatError, match=f"byte {span.offset + offset}:") as caught:
        list(decode(data, span))
    assert caught.value.rule == "MODEL-3"


def test_a_span_past_the_end_of_the_data_is_refused() -> None:
    data = model_of(raw_tensor())
    (span,) = strip_weights(data).spans
    with pytest.raises(ArchiveFormatError, match="2000 bytes of data"):
        list(decode(data[:1500], span))


# Filling


def external_tensor(location: bytes, more: bytes = b"") -> bytes:
    pair = put(StringStringEntryProto, "key", b"location")
    pair += put(StringStringEntryProto, "value", location)
    outside = tensor_of(external_data=pair, data_location=TensorProto.EXTERNAL)
    return tensor_of(data_type=TensorProto.UINT8) + more + outside


STALE = tensor_of(raw_data=b"stale")
LENGTH = tensor_of(external_data=put(StringStringEntryProto, "key", b"length"))
# External tensors, and what they are after `w.bin` is filled with "new".
FILLED = {
    "data stand where the external data were": (
        tensor_of(name=b"weight") + external_tensor(b"w.bin") + unknown(99, b""),
        tensor_of(name=b"weight", data_type=TensorProto.UINT8, raw_data=b"new") + unknown(99, b""),
    ),
    "every pair and data that external data overrules are gone": (
        external_tensor(b"w.bin", STALE + LENGTH) + LENGTH + STALE,
        tensor_of(data_type=TensorProto.UINT8, raw_data=b"new"),
    ),
    "data stand where the first pair was": (
        external_tensor(b"w.bin") + unknown(99, b"between") + external_tensor(b"w.bin"),
        tensor_of(data_type=TensorProto.UINT8, raw_data=b"new")
        + unknown(99, b"between")
        + tensor_of(data_type=TensorProto.UINT8),
    ),
    "an unknown location of data leaves a tensor external": (
        external_tensor(b"w.bin") + tensor_of(data_location=7),
        tensor_of(data_type=TensorProto.UINT8, raw_data=b"new", data_location=7),
    ),
}


@pytest.mark.parametrize("case", FILLED)
def test_external_data_is_filled_byte_for_byte(case: str) -> None:
    tensor, expected = FILLED[case]
    assert b"".join(fill(model_of(tensor), {"w.bin": b"new"}.get)) == model_of(expected)


@pytest.mark.sweep
@given(models, thresholds)
def test_filling_gives_back_the_bytes_that_were_stripped(data: bytes, threshold: int) -> None:
    result = strip_weights(data, size_threshold=threshold)
    if all(span.field == "raw_data" for span in result.spans):
        assert refilled(data, result) == data


def test_filling_gives_typed_data_back_as_raw_data() -> None:
    for field, name in TYPED:
        tensor = typed_tensor(field, name, b"\1\2\3\4\5\6\7\0" * 6)
        data = model_of(tensor)
        model = ModelProto.FromString(refilled(data, strip_weights(data, size_threshold=0)))
        (filled,) = model.graph.initializer
        assert not getattr(filled, field)
        assert raw_bytes(filled, name) == raw_bytes(TensorProto.FromString(tensor), name)


@pytest.mark.sweep
@given(models, st.binary(max_size=20))
def test_external_data_is_filled_as_through_protobuf(data: bytes, contents: bytes) -> None:
    model = ModelProto.FromString(data)
    data = model.SerializeToString()  # without doubled singular fields
    filled = fill(data, lambda location: contents if location == "a.bin" else None)
    for tensor in every_tensor(model):
        locations = [pair.value for pair in tensor.external_data]
        if tensor.data_location == TensorProto.EXTERNAL and locations[-1] == "a.bin":
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
            tensor.raw_data = contents
    assert comparable(parsed(b"".join(filled))) == comparable(model)


@pytest.mark.sweep
@requires_outcomes(filled=10, refused=10)
@settings(max_examples=400)
@given(mutated_models())
def test_filling_nothing_changes_nothing_or_is_refused(data: bytes) -> None:
    expected = parsed(data)
    try:
        assert b"".join(fill(data, lambda _: None)) == data
        count_outcome("filled")
    except ArchiveFormatError as error:
        count_outcome("refused")
        assert expected is None or "a location in UTF-8" in str(error)


@pytest.mark.parametrize("spelled", [TensorProto.DEFAULT, 7])
def test_a_data_location_that_the_model_states_is_restored_by_filling(spelled: int) -> None:
    spelled_out = tensor_of(data_location=spelled)
    for tensor in (raw_tensor(more=spelled_out), raw_tensor() + spelled_out):
        data = model_of(tensor)
        result = strip_weights(data)
        (stripped,) = every_tensor(ModelProto.FromString(result.model))
        assert stripped.data_location == TensorProto.EXTERNAL
        assert refilled(data, result) == data


def test_the_last_of_several_locations_counts() -> None:
    tensor = external_tensor(b"first") + external_tensor(b"last")
    asked: list[str] = []
    fill(model_of(tensor), asked.append)
    assert asked == ["last"]


@pytest.mark.parametrize(
    "tensor",
    [
        external_tensor(b"w.bin") + tensor_of(data_location=TensorProto.DEFAULT),
        tensor_of(data_location=TensorProto.EXTERNAL) + unknown(99, b"x" * 20),
        external_tensor(b"w.bin").replace(b"location", b"position"),
    ],
)
def test_a_tensor_without_an_external_location_is_not_filled(tensor: bytes) -> None:
    data = model_of(tensor)

    def unexpected(location: str) -> bytes:
        raise AssertionError(location)

    assert b"".join(fill(data, unexpected)) == data


@needs_compiled_parser
def test_a_location_that_is_not_utf_8_is_refused() -> None:
    with pytest.raises(ArchiveFormatError, match="UTF-8"):
        fill(model_of(external_tensor(b"\xff")), lambda _: None)


def test_filling_views_large_buffers_and_never_copies_them() -> None:
    weights: list[Any] = [bytearray(1 << 16), np.zeros((64, 256), np.float32), b"w" * 4096]
    graph = [external_tensor(b"%d" % index) for index in range(3)]
    data = put(
        ModelProto,
        "graph",
        b"".join(put(GraphProto, "initializer", tensor) for tensor in graph)
        + put(GraphProto, "doc_string", b"d" * 10_000),
    )
    pieces = fill(data, lambda location: weights[int(location)])
    large = [piece for piece in pieces if isinstance(piece, memoryview)]
    assert all(view.obj is weight for view, weight in zip(large, weights, strict=False))
    assert large[3].obj is data
    assert len(large) == 4
    assert len(pieces) == 7
    model = ModelProto.FromString(b"".join(pieces))
    assert sum(map(len, pieces)) == model.ByteSize()
    assert [len(tensor.raw_data) for tensor in model.graph.initializer] == [65536, 65536, 4096]


def test_small_pieces_are_joined() -> None:
    data = put(ModelProto, "graph", put(GraphProto, "initializer", external_tensor(b"w")) * 1000)
    assert len(fill(data, lambda _: b"contents")) == 1


def test_empty_data_is_filled() -> None:
    data = model_of(external_tensor(b"w"))
    for empty in (b"", np.empty((0, 3), np.float32)):
        contents: dict[str, Any] = {"w": empty}
        pieces = fill(data, contents.get)
        (tensor,) = every_tensor(ModelProto.FromString(b"".join(pieces)))
        assert tensor.HasField("raw_data")
        assert tensor.raw_data == b""


def test_a_plain_model_beyond_two_gibibytes_is_refused() -> None:
    data = model_of(external_tensor(b"w"))
    with mmap.mmap(-1, MAX_INT32) as untouched:
        with pytest.raises(UnsupportedFeatureError, match="2147483647"):
            fill(data, lambda _: untouched)  # type: ignore[arg-type, return-value]
        room = MAX_INT32 - 40
        with memoryview(untouched) as view, view[:room] as part:
            pieces = fill(data, lambda _: part)
            nbytes = sum(map(len, pieces))
            assert room < nbytes <= MAX_INT32
            for piece in pieces:
                if isinstance(piece, memoryview):
                    piece.release()
        # A byte more than the model may have, though its graph may.
        most = room + MAX_INT32 - nbytes
        with (
            memoryview(untouched) as view,
            view[: most + 1] as part,
            pytest.raises(UnsupportedFeatureError, match="2147483648 bytes"),
        ):
            fill(data, lambda _: part)


# Resources


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize("field", ["raw_data", "float_data", "int64_data"])
def test_stripping_does_not_touch_the_weights(tmp_path: Path, field: str) -> None:
    size = 3 << 29
    data_type = TensorProto.INT64 if field == "int64_data" else TensorProto.FLOAT
    before = tensor_of(data_type=data_type)
    after = tensor_of(name=b"weight")
    header = tag(TensorProto, field, LEN) + varint(size)
    tensor_size = len(before) + len(header) + size + len(after)
    header = tag(GraphProto, "initializer", LEN) + varint(tensor_size) + before + header
    graph_size = len(header) + size + len(after)
    header = tag(ModelProto, "graph", LEN) + varint(graph_size) + header
    path = tmp_path / "sparse.onnx"
    with path.open("wb") as file:
        file.write(header)
        file.seek(size, 1)
        file.write(after)
    script = f"""
        import mmap, re, sys
        from onnxarchive.model.weights import strip_weights
        def resident():
            with open("/proc/self/status") as status:
                return int(re.search(r"VmRSS:\\s+(\\d+) kB", status.read())[1]) * 1024
        with open(sys.argv[1], "rb") as file:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                before = resident()
                result = strip_weights(mapped)
                grown = resident() - before
        assert [span.nbytes for span in result.spans] == [{size}], result
        assert b"weight" in result.model
        print(grown)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(path)]
    root = Path(wire.__file__).parents[2]
    grown = completed(command, status=0, cwd=root).stdout
    assert int(grown) < 20 << 20


@pytest.mark.skipif(sys.maxsize == MAX_INT32, reason="no map is as large")
def test_a_model_of_more_than_two_gibibytes_is_refused_before_it_is_read() -> None:
    untouched = mmap.mmap(-1, MAX_INT32 + 1)
    with untouched, pytest.raises(ArchiveFormatError, match="at most 2147483647 bytes"):
        strip_weights(untouched)  # type: ignore[arg-type]


def test_small_messages_are_stepped_over() -> None:
    """Messages too small for a large tensor cost nothing; protobuf reads them when stripped."""
    malformed_node = put(GraphProto, "node", b"\x0a\xff")
    data = put(ModelProto, "graph", malformed_node + put(GraphProto, "initializer", raw_tensor()))
    result = strip_weights(data)
    assert malformed_node in result.model
    assert parsed(result.model) is None


# Counting messages


def _count(message: Message) -> int:
    """The messages below one, as protobuf sees them."""
    return sum(
        1 + _count(below)
        for field, value in message.ListFields()
        if field.message_type
        for below in (value if walking.is_repeated(field) else [value])
    )


def test_messages_are_counted_at_every_depth() -> None:
    model = full_model()
    data = model.SerializeToString()
    count = _count(model)
    assert count > 50
    assert not wire.have_more_messages([data], count)
    assert wire.have_more_messages([data], count - 1)
    assert wire.have_more_messages([data], 0)


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 5])
def test_messages_of_unknown_fields_and_other_wire_types_are_none(limit: int) -> None:
    unknown = b"\xc2\x3e\x02\x0a\x00"  # field 1000 with something like a message
    data = unknown + b"\x3a\x04" + b"\x0a\x00" * 2 + b"\x38\x01"  # a graph of two nodes; a number
    assert wire.have_more_messages([data], limit) == (limit < 3)


def test_counting_stops_where_the_rest_has_no_room_for_more() -> None:
    broken = b"\x3a\x02\x0a\x00" + b"\x0f" + bytes(10)  # no field begins so
    assert not wire.have_more_messages([broken], 10)
    with pytest.raises(ArchiveFormatError, match="wire type"):
        wire.have_more_messages([broken], 3)


# Recognising a model


def test_a_model_is_recognised_by_its_first_fields() -> None:
    model = ModelProto(ir_version=10, graph=GraphProto(name="g"), producer_name="p")
    data = model.SerializeToString()
    assert wire.is_model(data)
    for other in (b"\0" + data, b"\x08" + data, data[1:], data[:-1], b""):
        assert not wire.is_model(other)
    for missing in ("ir_version", "graph"):
        without = ModelProto.FromString(data)
        without.ClearField(missing)
        assert not wire.is_model(without.SerializeToString())
