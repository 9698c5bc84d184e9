from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import numpy as np
import onnx
import pytest
from findings import Findings
from hypothesis import given, settings, strategies as st
from models import (
    attribute,
    every_tensor,
    external,
    full_model,
    model_of,
    model_protos,
    names,
    nested_model,
    node,
    normalised,
    raw_tensor,
    string_tensor,
    typed,
)
from onnx import TensorProto
from versions import needs_compiled_parser

from onnxarchive.errors import ArchiveFormatError, Strict, quoted
from onnxarchive.model import tensors, walking
from onnxarchive.model.copying import with_locations
from onnxarchive.model.dtypes import BY_NUMBER
from onnxarchive.model.tensors import ExternalData, TensorRef, TensorRefs


def _ref(tensor: TensorProto) -> TensorRef:
    model = model_of(tensor)
    (ref,) = tensors.walk(model)
    return ref


# The walk


def _identities(found: Any) -> Counter[int]:
    return Counter(id(tensor) for tensor in found)


def test_the_walk_visits_every_tensor_of_every_place_once() -> None:
    model = full_model()
    found = list(tensors.walk(model))
    expected = list(every_tensor(model))  # kept alive, so that identities stay
    assert _identities(ref.tensor for ref in found) == _identities(expected)
    assert len(found) == 257


@settings(deadline=None, max_examples=60)
@given(model_protos())
def test_the_walk_visits_every_tensor_of_any_model_once(model: onnx.ModelProto) -> None:
    found = list(tensors.walk(model))
    expected = list(every_tensor(model))
    assert _identities(ref.tensor for ref in found) == _identities(expected)


def test_the_way_to_a_tensor_leads_to_it_and_to_no_other() -> None:
    model = full_model()
    found = list(tensors.walk(model))
    assert len({ref.path for ref in found}) == len(found)
    for ref in found:
        assert walking.at(model, ref.path) is ref.tensor


@needs_compiled_parser
def test_the_walk_and_the_copy_need_no_stack() -> None:
    model = nested_model(700)
    found = list(tensors.walk(model))
    assert [ref.tensor.name for ref in found] == [f"weight{level}" for level in range(700)]
    copy = with_locations(model, {found[-1].path: "key", found[300].path: "other"})
    located = [ref for ref in tensors.walk(copy) if tensors.location(ref.tensor) is not None]
    assert [ref.path for ref in located] == [found[300].path, found[-1].path]
    assert walking.at(copy, found[-1].path).name == "weight699"


def test_initializers_are_those_of_the_main_graph_and_of_its_subgraphs() -> None:
    found = {ref.tensor.name for ref in tensors.walk(full_model(1)) if ref.is_initializer}
    graphs = ("main", "main.a", "main.b", "main.c")
    assert found == {f"{graph}.initializer{end}" for graph in graphs for end in ("", "2")}


def test_a_tensor_ref_says_which_tensor_it_is_and_where() -> None:
    model = model_of()
    graph = onnx.GraphProto(initializer=[raw_tensor("w/1")])
    model.graph.node.append(node(attribute("i", i=1), attribute("g", g=graph)))
    (ref,) = tensors.walk(model)
    assert str(ref) == "tensor 'w/1' (graph.node[0].attribute[1].g.initializer[0])"


# Copies with locations


def test_a_copy_without_locations_is_equal() -> None:
    model = full_model()
    copy = with_locations(model, {})
    assert copy == model
    assert copy is not model


@settings(deadline=None, max_examples=60)
@given(model_protos(), st.randoms(use_true_random=False))
def test_only_the_tensors_with_locations_change_in_a_copy(
    model: onnx.ModelProto, random: Any
) -> None:
    before = model.SerializeToString(deterministic=True)
    found = list(tensors.walk(model))
    chosen = {ref.path: f"key{i}" for i, ref in enumerate(found) if random.random() < 0.4}
    copy = with_locations(model, chosen)
    assert model.SerializeToString(deterministic=True) == before
    for path, key in chosen.items():
        located = walking.at(copy, path)
        assert located.data_location == TensorProto.EXTERNAL
        assert [(pair.key, pair.value) for pair in located.external_data] == [("location", key)]
        assert not tensors.has_data(located)
        located.CopyFrom(walking.at(model, path))
    assert copy == model
    assert copy.SerializeToString(deterministic=True) == before


def test_unknown_fields_of_messages_on_the_way_to_a_tensor_are_kept() -> None:
    model = model_of()
    graph = onnx.GraphProto(initializer=[raw_tensor("inner")])
    model.graph.node.append(node(attribute("g", g=graph)))
    model.graph.sparse_initializer.add(values=raw_tensor("s"))
    # Fields 4001, 4002 and 4004: 8 bytes, a string, 4 bytes.
    unknown = b"\x89\xfa\x01abcdefgh\x92\xfa\x01\x03\xff\x00\x80\xa5\xfa\x01wxyz"
    inner = model.graph.node[0].attribute[0]
    for message in (model.graph.node[0], inner, inner.g, model.graph.sparse_initializer[0]):
        message.MergeFromString(unknown)
    copy = with_locations(model, {ref.path: "key" for ref in tensors.walk(model)})
    assert copy.SerializeToString().count(unknown) == 4


def test_fields_of_a_tensor_beside_its_data_are_kept() -> None:
    tensor = raw_tensor("w")
    tensor.doc_string = "what it is"
    tensor.metadata_props.add(key="k", value="v")
    model = model_of(tensor)
    ((path,),) = [[ref.path for ref in tensors.walk(model)]]
    located = walking.at(with_locations(model, {path: "key"}), path)
    assert (located.name, located.doc_string) == ("w", "what it is")
    assert list(located.dims) == list(tensor.dims)
    assert located.data_type == tensor.data_type
    assert located.metadata_props[0].value == "v"


def test_an_empty_message_without_tensors_is_kept() -> None:
    model = model_of(raw_tensor("w"))
    model.graph.node.append(node(attribute("g", g=onnx.GraphProto())))
    ((path,),) = [[ref.path for ref in tensors.walk(model)]]
    copy = with_locations(model, {path: "key"})
    assert copy.graph.node[0].attribute[0].HasField("g")


def test_a_location_replaces_another() -> None:
    tensor = external(raw_tensor("w"), "old", offset=3, length=16, checksum="c")
    tensors.set_location(tensor, "new")
    assert [(pair.key, pair.value) for pair in tensor.external_data] == [("location", "new")]
    tensors.set_location(tensor, "newer", offset=0, length=16)
    pairs = [(pair.key, pair.value) for pair in tensor.external_data]
    assert pairs == [("location", "newer"), ("offset", "0"), ("length", "16")]


def test_raw_data_replaces_a_location() -> None:
    tensor = external(raw_tensor("w"), "old", offset=3)
    tensors.set_raw_data(tensor, b"1234")
    assert tensor.raw_data == b"1234"
    assert not tensor.external_data
    assert not tensor.HasField("data_location")


# Bytes


@settings(deadline=None, max_examples=60)
@given(model_protos())
def test_the_bytes_of_every_tensor_are_those_of_onnx(model: onnx.ModelProto) -> None:
    expected = list(every_tensor(normalised(model)))
    by_way = zip(tensors.walk(normalised(model)), tensors.walk(model), strict=True)
    for reference, ref in by_way:
        if tensors.stored_type(ref.tensor) is not None:
            assert bytes(tensors.raw_data(ref)) == reference.tensor.raw_data
    assert len(expected) == len(list(tensors.walk(model)))


@pytest.mark.parametrize("raw_data", [b"", b"123", bytes(15), bytes(17), bytes(32)])
def test_raw_data_of_another_size_is_refused(raw_data: bytes) -> None:
    tensor = raw_tensor("layer/w", dims=(4,))
    tensor.raw_data = raw_data
    with pytest.raises(ArchiveFormatError, match=r"'layer/w'.*expected 16 bytes for FLOAT of"):
        tensors.raw_data(_ref(tensor))


@pytest.mark.parametrize("count", [0, 3, 5])
def test_typed_data_of_another_size_is_refused(count: int) -> None:
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], float_data=[0] * count)
    with pytest.raises(ArchiveFormatError, match=rf"'w'.*expected 16 bytes.*found {count * 4}"):
        tensors.raw_data(_ref(tensor))


# Tensors that can be stored


@pytest.mark.parametrize(
    ("data_type", "dims", "is_possible"),
    [
        ("FLOAT", (), True),
        ("FLOAT", (0,), True),
        ("FLOAT", (-1,), False),
        ("FLOAT", (0, -1), False),
        ("FLOAT", (1,) * 64, True),
        ("FLOAT", (1,) * 65, False),
        ("UINT8", ((1 << 63) - 1,), True),
        ("UINT8", (0, (1 << 63) - 1), True),
        ("UINT8", (1 << 31, 1 << 32), False),
        ("UINT8", (1 << 32, 1 << 32, 1), False),  # 0 where numbers have 64 bits
        ("UINT8", (1 << 32, 1 << 32, 0), False),
        ("UINT8", (1 << 33, 0, 1 << 33), False),
        ("UINT16", (1 << 61, 2), False),
        ("UINT16", (1 << 61, 1), True),
        ("UINT16", ((1 << 62) - 1,), True),
        ("FLOAT", (1 << 61,), False),
        ("FLOAT", ((1 << 61) - 1,), True),
        ("COMPLEX128", (1 << 59,), False),
        ("COMPLEX128", ((1 << 59) - 1,), True),
        ("UINT2", ((1 << 63) - 1,), True),
        ("UINT2", (1 << 62, 2), False),
    ],
)
def test_shapes_that_no_array_has_are_recognised(
    data_type: str, dims: tuple[int, ...], is_possible: bool
) -> None:
    number = TensorProto.DataType.Value(data_type)
    assert tensors.are_dims(dims, BY_NUMBER[number]) == is_possible
    tensor = TensorProto(data_type=number, dims=dims)
    assert (tensors.stored_type(tensor) is not None) == is_possible
    if is_possible and 0 in dims and max(dims) <= sys.maxsize:
        assert np.empty(0, np.uint8).reshape(dims).shape == dims


def test_strings_segments_and_unknown_types_stay_in_the_model() -> None:
    segment = raw_tensor("w")
    segment.segment.begin = 0
    both = raw_tensor("w")
    both.string_data.append(b"a")
    unknown = [TensorProto(data_type=number, dims=[1]) for number in (0, 8, 29, 1000, -1)]
    for tensor in (string_tensor("s"), segment, both, *unknown):
        assert tensors.stored_type(tensor) is None
    assert tensors.stored_type(raw_tensor("w")) is BY_NUMBER[TensorProto.FLOAT]
    assert tensors.stored_type(typed(raw_tensor("w"))) is BY_NUMBER[TensorProto.FLOAT]


def test_an_external_tensor_that_holds_data_is_refused_by_its_fields() -> None:
    tensor = external(raw_tensor("w"), "key")
    assert tensors.external_type(_ref(tensor)) is BY_NUMBER[TensorProto.FLOAT]
    tensor.segment.begin = 0
    with pytest.raises(
        ArchiveFormatError, match=r"'w'.*there is a segment beside data_location EXTERNAL$"
    ):
        tensors.external_type(_ref(tensor))
    tensor.string_data.append(b"a")
    with pytest.raises(ArchiveFormatError, match=r"'w'.*EXTERNAL, in string_data; to"):
        tensors.external_type(_ref(tensor))


# external_data


def test_external_data_is_read() -> None:
    ref = _ref(external(raw_tensor("w"), "key", offset=0, length="16", checksum="abc"))
    assert tensors.external_data(ref, Strict()) == ExternalData("key", 0, 16, "abc")
    ref = _ref(external(raw_tensor("w"), "key"))
    assert tensors.external_data(ref, Strict()) == ExternalData("key", None, None, None)
    assert tensors.location(ref.tensor) == "key"
    assert tensors.checksum(ref.tensor) is None


@pytest.mark.parametrize(
    ("number", "value"),
    [("0", 0), ("1", 1), ("16", 16), ("9" * 19, 10**19 - 1), (str(1 << 63), 1 << 63)],
)
def test_decimal_numbers_are_read(number: str, value: int) -> None:
    ref = _ref(external(raw_tensor("w"), "key", offset=number, length=number))
    assert tensors.external_data(ref, Strict()) == ExternalData("key", value, value, None)


NO_NUMBERS = [
    *("", " ", "1_6", " 16 ", "16 ", " 16", "16\n", "16\0", "True", "9" * 20, "9" * 5000),
    *("+1", "-1", "-0", "00", "016", "1.0", "1e3", "0x10"),
    # Arabic digits, wide digits and a superscript.
    *("\u0663", "1\u0663", "\uff11\uff16", "\u00b2"),
]


@pytest.mark.parametrize("field", ["offset", "length"])
@pytest.mark.parametrize("number", NO_NUMBERS)
def test_texts_that_int_takes_but_are_no_decimal_numbers_are_refused(
    field: str, number: str
) -> None:
    ref = _ref(external(raw_tensor("w"), "key", **{field: number}))
    says = r"'w'.*in at most 19 decimal digits without leading zeros, found"
    with pytest.raises(ArchiveFormatError, match=says) as caught:
        tensors.external_data(ref, Strict())
    assert caught.value.rule == "DATA-5"
    assert field in str(caught.value)
    collected = Findings()
    assert tensors.external_data(ref, collected) == ExternalData("key", None, None, None)
    assert collected.rules == ["DATA-5"]


def test_a_faulty_pair_of_external_data_hides_no_later_pair() -> None:
    tensor = TensorProto(name="w", data_location=TensorProto.EXTERNAL)
    pairs = [("offset ", "1"), ("location", "key"), ("offset", "?"), ("location", "other")]
    for key, value in pairs:
        tensor.external_data.add(key=key, value=value)
    tensor.external_data.extend(tensor.external_data[0] for _ in range(10_000))
    collected = Findings()
    found = tensors.external_data(_ref(tensor), collected, entry="key")
    assert found == ExternalData("key", None, None, None)
    assert collected.rules == ["DATA-4", "DATA-5"]
    assert collected.entries == ["key", "key"]
    assert "found 'offset ', 'location' again, 'offset '" in collected.messages[0]
    assert len(collected.messages[0]) < 500
    del tensor.external_data[:]
    assert tensors.external_data(_ref(tensor), collected, entry="key") is None
    assert collected.entries[-1] == "key"


def test_a_further_key_of_external_data_may_be_allowed_once() -> None:
    also_allowed = frozenset({"basepath"})
    ref = _ref(external(raw_tensor("w"), "key", basepath="/tmp"))
    found = tensors.external_data(ref, Strict(), also_allowed=also_allowed)
    assert found == ExternalData("key", None, None, None)
    ref.tensor.external_data.add(key="basepath", value="")
    with pytest.raises(ArchiveFormatError, match="'basepath' again"):
        tensors.external_data(ref, Strict(), also_allowed=also_allowed)


@pytest.mark.parametrize(
    ("pair", "rules"),
    [
        (b"\x0a\x01\xff\x12\x010", ["DATA-4"]),  # the key is not UTF-8
        (b"\x0a\x06offset\x12\x01\xff", ["DATA-5"]),
        (b"\x0a\x06length\x12\x01\xff", ["DATA-5"]),
        (b"\x0a\x08checksum\x12\x01\xff", []),  # the bytes show that it is another
    ],
    ids=repr,
)
@needs_compiled_parser
def test_external_data_that_is_not_utf_8_is_checked_by_its_bytes(
    pair: bytes, rules: list[str]
) -> None:
    # protobuf gives bytes in the place of a string that is not UTF-8
    tensor = external(raw_tensor("w"), "key")
    tensor.external_data.add().MergeFromString(pair)
    collected = Findings()
    found = tensors.external_data(_ref(tensor), collected)
    assert found is not None
    assert found.location == "key"
    assert collected.rules == rules


@needs_compiled_parser
def test_a_location_that_is_not_utf_8_keeps_its_bytes() -> None:
    tensor = TensorProto(name="w", data_location=TensorProto.EXTERNAL)
    tensor.external_data.add().MergeFromString(b"\x0a\x08location\x12\x02k\xff")
    found = tensors.external_data(_ref(tensor), Strict())
    assert found is not None
    assert found.location == tensors.location(tensor) == "k\udcff"
    assert found.location.encode(errors="surrogateescape") == b"k\xff"


@needs_compiled_parser
def test_a_name_that_is_not_utf_8_can_be_printed() -> None:
    damaged = raw_tensor("MARK").SerializeToString().replace(b"MARK", b"M\xffRK")
    ref = _ref(TensorProto.FromString(damaged))
    assert ref.name == "M\ufffdRK"
    assert repr(ref.name) in str(ref)


def test_an_internal_tensor_has_no_location() -> None:
    tensor = external(raw_tensor("w"), "key", checksum="abc")
    assert (tensors.location(tensor), tensors.checksum(tensor)) == ("key", "abc")
    tensor.data_location = TensorProto.DEFAULT
    assert (tensors.location(tensor), tensors.checksum(tensor)) == (None, None)


# Values that only the bytes show


def _checked(tensor: TensorProto, *pieces: bytes) -> list[str]:
    collected = Findings()
    views = [memoryview(piece) for piece in pieces]
    passed_on = list(tensors.checked(_ref(tensor), views, collected, entry="key"))
    assert passed_on == views
    return collected.rules


@pytest.mark.parametrize("value", [2, 3, 127, 128, 255])
@pytest.mark.parametrize("position", [0, 3, 7])
def test_a_boolean_is_0_or_1(value: int, position: int) -> None:
    tensor = TensorProto(name="b", data_type=TensorProto.BOOL, dims=[8])
    data = bytearray(8)
    assert _checked(tensor, bytes(data)) == []
    data[position] = value
    assert _checked(tensor, bytes(data)) == ["TENSOR-5"]
    assert _checked(tensor, bytes(data[:4]), b"", bytes(data[4:])) == ["TENSOR-5"]


def test_a_byte_of_another_type_may_be_anything() -> None:
    tensor = TensorProto(name="b", data_type=TensorProto.UINT8, dims=[4])
    assert _checked(tensor, b"\xff\x02\x80\x7f") == []


@pytest.mark.parametrize(
    ("data_type", "dims", "used_bits"),
    [
        ("INT4", (1,), 4),
        ("INT4", (3,), 4),
        ("UINT4", (3, 5), 4),
        ("FLOAT4E2M1", (1, 1), 4),
        ("UINT2", (1,), 2),
        ("INT2", (2,), 4),
        ("INT2", (7,), 6),
        ("FLOAT6E2M3", (1,), 6),
        ("FLOAT6E2M3", (2,), 4),
        ("FLOAT6E3M2", (3,), 2),
    ],
)
def test_bits_that_no_element_has_are_zero(
    data_type: str, dims: tuple[int, ...], used_bits: int
) -> None:
    number = TensorProto.DataType.Value(data_type)
    tensor = TensorProto(name="p", data_type=number, dims=dims)
    data = bytearray(b"\xff" * BY_NUMBER[number].nbytes(dims))
    for bit in range(8):
        data[-1] = 1 << bit
        assert _checked(tensor, bytes(data)) == (["TENSOR-4"] if bit >= used_bits else [])
    assert _checked(tensor, *(bytes([byte]) for byte in data), b"") == ["TENSOR-4"]


@pytest.mark.parametrize("data_type", ["INT4", "UINT2", "FLOAT6E2M3", "BOOL", "FLOAT"])
def test_a_tensor_of_whole_bytes_has_no_unused_bits(data_type: str) -> None:
    number = TensorProto.DataType.Value(data_type)
    tensor = TensorProto(name="p", data_type=number, dims=[4])
    nbytes = BY_NUMBER[number].nbytes([4])
    assert _checked(tensor, b"\1" * (nbytes - 1) + b"\1") == []
    tensor.dims[:] = [0]
    assert _checked(tensor) == []
    assert _checked(tensor, b"") == []


def test_the_error_of_a_broken_value_names_tensor_and_entry() -> None:
    tensor = TensorProto(name="layer/mask", data_type=TensorProto.BOOL, dims=[1])
    with pytest.raises(ArchiveFormatError, match="layer/mask") as caught:
        list(tensors.checked(_ref(tensor), [memoryview(b"\2")], Strict(), entry="layer_mask"))
    assert (caught.value.rule, caught.value.entry) == ("TENSOR-5", "layer_mask")


@given(names)
def test_a_tensor_ref_can_be_printed_whatever_its_name(name: str) -> None:
    assert quoted(name) in str(_ref(raw_tensor(name)))


@given(st.lists(st.booleans(), max_size=20))
def test_messages_are_removed_and_the_others_stay_in_order(are_removed: list[bool]) -> None:
    found = [raw_tensor(f"w{index}", seed=index) for index in range(len(are_removed))]
    graph = model_of(*found).graph
    tensors.remove(graph.initializer, are_removed)
    staying = [
        tensor for tensor, is_removed in zip(found, are_removed, strict=True) if not is_removed
    ]
    assert list(graph.initializer) == staying


def test_tensor_refs_are_a_mapping_of_initializers_and_others() -> None:
    model = model_of(raw_tensor("a"), raw_tensor("b"))
    other = TensorRef((("graph", None), ("node", 0)), raw_tensor("c"))
    refs = TensorRefs(model.graph.initializer, {"x": 1, "y": 0, "z": other})
    assert (list(refs), len(refs)) == (["x", "y", "z"], 3)
    assert [ref.where for ref in refs.values()] == [
        "graph.initializer[1]",
        "graph.initializer[0]",
        "graph.node[0]",
    ]
    assert [ref.tensor.name for ref in refs.values()] == ["b", "a", "c"]
    assert [*refs.items()] == [(key, refs[key]) for key in ("x", "y", "z")]
    assert ("x" in refs, "z" in refs, "w" in refs) == (True, True, False)
    with pytest.raises(KeyError):
        refs["w"]
    refs.keep()
    del model.graph.initializer[:]
    assert refs["x"].name == "b"
    assert TensorRefs() == {}
