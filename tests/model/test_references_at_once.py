from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings, strategies as st
from models import (
    BIT_WIDTHS,
    attribute,
    element_count,
    every_tensor,
    external,
    model_of,
    model_protos,
    node,
    raw_tensor,
    string_tensor,
)
from onnx import TensorProto
from outcomes import came, requires

import onnxarchive
from onnxarchive.errors import ArchiveFormatError, Report
from onnxarchive.model import dtypes, proto, references_at_once, tensors
from onnxarchive.model.references_at_once import References
from onnxarchive.model.shapes import Shapes
from onnxarchive.model.tensors import TensorRef, TensorRefs


def tensor_of(
    name: str = "w", data_type: int = TensorProto.FLOAT, dims: tuple[int, ...] = (2, 2)
) -> TensorProto:
    return external(raw_tensor(name, data_type, dims), name)


def sizes_of(model: onnx.ModelProto) -> dict[str, int]:
    return {
        location: dtypes.BY_NUMBER[it.data_type].nbytes(it.dims)
        for it in model.graph.initializer
        if (location := tensors.location(it)) is not None
    }


def read_references(model: onnx.ModelProto, sizes: Mapping[str, int]) -> References | None:
    serialized = model.SerializeToString()
    return references_at_once.read_references(serialized, list(sizes), list(sizes.values()))


def at_once(
    model: onnx.ModelProto, sizes: Mapping[str, int], data: bytes | None = None
) -> TensorRefs | None:
    """What is found at once, which is what is found one by one, and breaks no rule."""
    serialized = model.SerializeToString() if data is None else data
    checked = proto.check_at_once(serialized, list(sizes), list(sizes.values()))
    if checked is None:
        return None
    found, shapes = checked.refs, checked.shapes
    assert checked.model == model
    assert checked.model is checked.model
    assert checked.names is not None
    assert list(checked.names) == tensors.names(model.graph.initializer)
    others = tensors.walk_others(model)
    assert checked.has_others == any(ref.is_initializer for ref in others)
    assert shapes is not None
    slowly = proto.check_references(model, sizes, Report())
    assert [(key, *found[key]) for key in found] == [(key, *slowly[key]) for key in slowly]
    one_by_one = Shapes.of(slowly[key].tensor for key in sizes)
    assert len(shapes) == len(one_by_one) == len(sizes)
    assert all(shapes[number] == one_by_one[number] for number in range(len(sizes)))
    return found


# Usual tensors


def _held() -> list[TensorProto]:
    typed = TensorProto(name="typed", data_type=TensorProto.FLOAT, dims=[2], float_data=[1, 2])
    odd = TensorProto(name="odd", data_type=99, dims=[0, 1 << 50])
    return [raw_tensor("held"), typed, string_tensor("text"), odd, TensorProto()]


def _described(tensor: TensorProto) -> TensorProto:
    tensor.doc_string = "what it is for" * 20
    for key in "ab":
        tensor.metadata_props.add(key=key, value="value")
    return tensor


@pytest.mark.parametrize(
    "found",
    [
        [],
        [tensor_of()],
        [tensor_of(f"w{index}", dims=(index + 1,)) for index in range(300)],
        [*_held(), tensor_of("a"), *_held(), tensor_of("b"), *_held()],
        [tensor_of(f"w{rank}", dims=(2,) * rank) for rank in range(12)],
        [tensor_of("w", dims=(1,) * 28)],
        [tensor_of("x" * 255), tensor_of("y" * 200)],
        [tensor_of("w", dims=(300, 40))],
        [tensor_of("empty", dims=(0,)), tensor_of("thin", dims=(3, 0, 70000))],
        [_described(tensor_of()), tensor_of("v")],
        [tensor_of(f"type{number}", number, (5,)) for number in dtypes.BY_NUMBER],
    ],
    ids=[
        "none",
        "one",
        "many",
        "beside others that the model holds",
        "of every rank",
        "of a high rank",
        "long names",
        "long dimensions",
        "empty",
        "described",
        "of every type",
    ],
)
def test_usual_tensors_are_read_at_once(found: list[TensorProto]) -> None:
    model = model_of(*found)
    sizes = sizes_of(model)
    for keys in (sorted(sizes), sorted(sizes, reverse=True)):
        assert at_once(model, {key: sizes[key] for key in keys}) is not None
    keys = sorted(sizes)
    read = read_references(model, {key: sizes[key] for key in keys})
    assert read is not None
    assert [keys[number] for number in read.numbers] == list(sizes)
    indexes = read.indexes.tolist()
    locations = [tensors.location(model.graph.initializer[index]) for index in indexes]
    assert locations == list(sizes)


@pytest.mark.parametrize("after", [{}, {"quantization_annotation": [onnx.TensorAnnotation()]}])
def test_an_empty_tensor_may_be_the_last_initializer(after: dict[str, Any]) -> None:
    graph = onnx.GraphProto(initializer=[tensor_of(), TensorProto()], **after)
    assert at_once(onnx.ModelProto(ir_version=10, graph=graph), {"w": 16}) is not None


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 12])
def test_tensors_that_are_looked_at_in_parts_are_those_of_the_whole(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = ((2, 3), (5,), (), (7, 1, 4), (0, 9))
    own = [tensor_of(f"w{index}", dims=dims) for index, dims in enumerate(shapes)]
    model = model_of(*_held(), own[0], *_held()[:2], *own[1:4], *_held()[:4], own[4])
    sizes = sizes_of(model)
    assert (len(model.graph.initializer) - 4) % 3 == 0
    monkeypatch.setattr(references_at_once, "ROWS", rows)
    for keys in (sorted(sizes), ["w2", "w0", "w4", "w1", "w3"]):
        assert at_once(model, {key: sizes[key] for key in keys}) is not None


@pytest.mark.parametrize(("dims", "is_copied"), [((2, 2), True), ((64, 64), False)])
def test_a_model_that_holds_most_of_its_bytes_itself_is_not_copied(
    dims: tuple[int, int], is_copied: bool
) -> None:
    own = [raw_tensor("held", dims=dims), raw_tensor("too", dims=(0,))]
    u, v, w = map(tensor_of, "uvw")
    data = model_of(u, own[0], v, w, own[1]).SerializeToString()
    read = references_at_once.read_references(data, [*"uvw"], [16, 16, 16])
    assert read is not None
    assert (read.rest is not data) == is_copied
    left = [it.name for it in onnx.ModelProto.FromString(read.rest).graph.initializer]
    assert left == (["held", "too"] if is_copied else ["u", "held", "v", "w", "too"])


def test_many_bytes_of_names_are_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(tensor_of("w" * 100), raw_tensor("v" * 100))
    for limit, is_read in ((202, True), (201, False)):
        monkeypatch.setattr(references_at_once, "MAX_NAMES_SIZE", limit)
        assert (read_references(model, sizes_of(model)) is not None) == is_read


@pytest.mark.parametrize("held", [raw_tensor("a\nb"), string_tensor("\n")])
def test_names_with_newlines_are_read_one_by_one(held: TensorProto) -> None:
    for model in (model_of(held, tensor_of("w")), model_of(tensor_of("w\n"))):
        assert read_references(model, sizes_of(model)) is None


def test_large_tensors_are_read_at_once() -> None:
    tensor = tensor_of()
    del tensor.dims[:]
    tensor.dims.extend([1 << 24, 1 << 24])
    assert at_once(model_of(tensor), {"w": 4 << 48}) is not None


@pytest.mark.parametrize("by", ["save", "Writer"])
def test_what_this_library_writes_is_read_at_once(by: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnxa"
    arrays = {f"layer.{index}/weight": np.full((index + 1, 300), 1.0) for index in range(50)}
    if by == "save":
        initializers = [onnx.numpy_helper.from_array(it, name) for name, it in arrays.items()]
        onnxarchive.save(model_of(*initializers, raw_tensor("small")), path)
    else:
        with onnxarchive.Writer(path) as writer:
            for name in reversed(arrays):
                writer.add(name, arrays[name])
            writer.finish(model_of(raw_tensor("small")))
    with onnxarchive.open(path) as archive:
        data = archive.read("__MODEL_PROTO")
        model = onnx.ModelProto.FromString(bytes(data))
        read = read_references(model, sizes_of(model))
        assert read is not None
        assert len(read.indexes) == 50
        assert all(np.array_equal(archive.tensors[name], arrays[name]) for name in arrays)


# Unusual tensors


def _changed(change: Callable[[TensorProto], object]) -> onnx.ModelProto:
    tensor = tensor_of()
    change(tensor)
    return model_of(tensor, tensor_of("v"))


def _with_attribute(tensor: TensorProto) -> onnx.ModelProto:
    model = model_of(tensor_of("w"), tensor_of("v"))
    model.graph.node.append(node(attribute("value", t=tensor)))
    return model


def _without_location() -> TensorProto:
    tensor = tensor_of("u")
    tensor.ClearField("external_data")
    return tensor


@pytest.mark.parametrize(
    "model",
    [
        _changed(lambda it: it.external_data[0].ClearField("value")),
        _changed(lambda it: it.external_data[0].ClearField("key")),
        _changed(lambda it: setattr(it.external_data[0], "key", "Location")),
        _changed(lambda it: setattr(it.external_data[0], "value", "u")),
        _changed(lambda it: setattr(it.external_data[0], "value", "v")),
        _changed(lambda it: setattr(it.external_data[0], "value", "w\nv")),
        _changed(lambda it: setattr(it.external_data[0], "value", "ẃ")),
        _changed(lambda it: it.ClearField("external_data")),
        _changed(lambda it: it.external_data.add(key="location", value="w")),
        _changed(lambda it: it.external_data.add(key="offset", value="0")),
        _changed(lambda it: it.ClearField("data_location")),
        _changed(lambda it: setattr(it, "data_location", 0)),
        _changed(lambda it: setattr(it, "raw_data", b"")),
        _changed(lambda it: it.float_data.append(1)),
        _changed(lambda it: setattr(it.segment, "begin", 0)),
        _changed(lambda it: it.ClearField("data_type")),
        _changed(lambda it: setattr(it, "data_type", 8)),
        _changed(lambda it: setattr(it, "data_type", 120)),
        _changed(lambda it: setattr(it, "data_type", 1000)),
        _changed(lambda it: setattr(it, "data_type", -1)),
        _changed(lambda it: it.dims.append(-1)),
        _changed(lambda it: it.dims.extend([1] * 64)),
        _changed(lambda it: it.dims.extend([1 << 32, 1 << 32])),
        _changed(lambda it: it.dims.extend([0, 1 << 62])),
        _changed(lambda it: it.dims.append(2)),
        _changed(lambda it: it.dims.append(0)),
        _changed(lambda it: it.ClearField("dims")),
        model_of(tensor_of("w")),
        model_of(tensor_of("w"), tensor_of("v"), tensor_of("u")),
        model_of(tensor_of("w"), tensor_of("v"), tensor_of("v")),
        _with_attribute(tensor_of("u")),
        _with_attribute(_without_location()),
    ],
)
def test_what_breaks_a_rule_is_left_to_those_who_look_at_each(model: onnx.ModelProto) -> None:
    data = model.SerializeToString()
    for keys in (["w", "v"], ["v", "w"]):
        assert proto.check_at_once(data, keys, [16, 16]) is None


def test_a_key_that_stands_twice_is_left_to_those_who_look_at_each() -> None:
    model = model_of(tensor_of("w"), tensor_of("w"))
    assert proto.check_at_once(model.SerializeToString(), ["w", "w"], [16, 16]) is None


@pytest.mark.parametrize(
    "field",
    [
        TensorProto(name="again"),
        TensorProto(data_type=TensorProto.DOUBLE),
        TensorProto(data_location=TensorProto.DEFAULT),
        TensorProto(data_location=TensorProto.EXTERNAL),
        TensorProto(dims=[3]),
        TensorProto(dims=[0]),
    ],
    ids=str,
)
def test_a_field_that_stands_twice_means_what_protobuf_takes_it_for(field: TensorProto) -> None:
    tensor = tensor_of().SerializeToString() + field.SerializeToString()
    data = onnx.ModelProto(ir_version=10).SerializeToString()
    data += _field(onnx.ModelProto.GRAPH_FIELD_NUMBER, _field(5, tensor))
    model = onnx.ModelProto.FromString(data)
    (found,) = model.graph.initializer
    nbytes = dtypes.BY_NUMBER[found.data_type].nbytes(found.dims)
    is_in_order = found.name == "again" or len(found.dims) > 2
    assert (at_once(model, {"w": nbytes}, data) is not None) == is_in_order


@pytest.mark.parametrize(
    ("usual", "overlong"),
    [
        (b"\x2a", b"\xaa\x00"),  # a tag of graph.initializer in two bytes
        (b"p\x01", b"p\x81\x80\x80\x80\x10"),  # data_location of 2^32 + 1
        (b"p\x01", b"\xf0\x00\x01"),  # its tag in two bytes
        (b"p\x01", b"p\x81\x00"),  # itself in two bytes
        (b"\x10\x01", b"\x10\x81\x80\x80\x80\x10"),  # data_type of 2^32 + 1
        (b"\x08\x02", b"\x08\x82\x00"),  # a dimension in two bytes
    ],
)
@pytest.mark.parametrize("is_sound", [True, False])
def test_numbers_in_more_bytes_than_they_need_are_what_protobuf_takes_them_for(
    usual: bytes, overlong: bytes, is_sound: bool
) -> None:
    tensor = tensor_of("v") if is_sound else external(raw_tensor("v", dims=(32,)), "nowhere")
    serialized = _field(5, tensor.SerializeToString()).replace(usual, overlong, 1)
    if usual != b"\x2a":
        serialized = serialized[:1] + bytes([len(serialized) - 2]) + serialized[2:]
    parts = [_field(5, tensor_of(name).SerializeToString()) for name in "wu"]
    data = onnx.ModelProto(ir_version=10).SerializeToString()
    data += _field(onnx.ModelProto.GRAPH_FIELD_NUMBER, parts[0] + serialized + parts[1])
    model = onnx.ModelProto.FromString(data)
    assert len(model.graph.initializer) == 3
    sizes = {"w": 16, "v": 16, "u": 16}
    found = at_once(model, sizes, data)
    assert is_sound or found is None
    if not is_sound:
        for keys in (["w", "u"], ["w", "v", "u"]):
            assert proto.check_at_once(data, keys, [16] * len(keys)) is None


@pytest.mark.parametrize(("width", "is_sound"), [(2, True), (5, True), (6, False), (8, False)])
def test_a_size_of_a_location_in_more_bytes_than_protobuf_takes_is_refused(
    width: int, is_sound: bool
) -> None:
    tensor = tensor_of()
    tensor.ClearField("external_data")
    pair = b"\x0a\x08location\x12\x81" + b"\x80" * (width - 2) + b"\0w"
    data = onnx.ModelProto(ir_version=10).SerializeToString()
    serialized = tensor.SerializeToString() + _field(13, pair)
    data += _field(onnx.ModelProto.GRAPH_FIELD_NUMBER, _field(5, serialized))
    model = _parsed(data)
    assert (model is not None) == is_sound
    if model is None:
        assert proto.check_at_once(data, ["w"], [16]) is None
    else:
        assert at_once(model, {"w": 16}, data) is not None


def test_a_product_of_dimensions_that_no_number_holds_is_no_warning() -> None:
    tensor = tensor_of()
    tensor.dims.extend([1 << 55] * 22)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_references(model_of(tensor), {"w": 16}) is None


def _field(number: int, message: bytes) -> bytes:
    return bytes([number << 3 | 2, len(message)]) + message


# Any bytes


BASE = model_of(*_held()[:2], tensor_of("w"), _described(tensor_of("v")), tensor_of("u", dims=()))
BASE_SIZES = {"w": 16, "v": 16, "u": 4}


@pytest.mark.sweep
@requires(at_once=100, one_by_one=10, refused=500)
@given(
    st.lists(
        st.tuples(
            st.integers(0, len(BASE.SerializeToString()) - 1),
            st.sampled_from([0, 1]),
            st.integers(0, 255).map(lambda byte: bytes([byte]))
            | st.sampled_from([b"\xaa\x00", b"\x81\x00", b"\x81\x80\x80\x80\x10"]),
        ),
        min_size=1,
        max_size=3,
    )
)
@example([(0, 1, b"\x08")])
@settings(max_examples=3000, deadline=None)
def test_whatever_protobuf_parses_is_found_as_one_by_one_or_left_to_that(
    changes: list[tuple[int, int, bytes]],
) -> None:
    data = bytearray(BASE.SerializeToString())
    for position, replaced, inserted in changes:
        data[position : position + replaced] = inserted
    try:
        model = onnx.ModelProto.FromString(bytes(data))
    except DecodeError:
        assert proto.check_at_once(bytes(data), list(BASE_SIZES), list(BASE_SIZES.values())) is None
        came("refused")
        return
    came("at_once" if at_once(model, BASE_SIZES, bytes(data)) else "one_by_one")


@pytest.mark.sweep
@requires(at_once=5, one_by_one=5)
@settings(max_examples=200, deadline=None)
@given(model_protos(), st.integers(1, 4))
def test_any_model_is_found_as_one_by_one_or_left_to_that(
    model: onnx.ModelProto, step: int
) -> None:
    sizes: dict[str, int] = {}
    numbers = [it for it in every_tensor(model) if it.data_type != TensorProto.STRING]
    for tensor in numbers[::step]:
        key = f"k{len(sizes)}"
        sizes[key] = -(-element_count(tensor.dims) * BIT_WIDTHS[tensor.data_type] // 8)
        tensor.CopyFrom(external(tensor, key))
    came("one_by_one" if at_once(model, sizes) is None else "at_once")


def _mutants(data: bytes) -> Iterator[bytes]:
    """`data` with one byte changed, left out or added, at every position."""
    for position in range(len(data)):
        before, byte, after = data[:position], data[position], data[position + 1 :]
        for other in {*(byte ^ 1 << bit for bit in range(8)), 0, 1, 0x7F, 0x80, 0xFF} - {byte}:
            yield before + bytes([other]) + after
        yield before + after
        yield before + b"\x81\x00" + after


def _parsed(data: bytes) -> onnx.ModelProto | None:
    try:
        return onnx.ModelProto.FromString(data)
    except DecodeError:
        return None


def test_mutants_are_found_as_one_by_one_or_left_to_that_and_hundreds_are_found() -> None:
    mutants = {data: _parsed(data) for data in _mutants(BASE.SerializeToString())}
    found = [
        at_once(model, BASE_SIZES, data) is not None for data, model in mutants.items() if model
    ]
    assert found.count(True) > 400
    assert found.count(False) > 400
    refused = [data for data, model in mutants.items() if model is None]
    assert len(refused) > 400
    keys, sizes = list(BASE_SIZES), list(BASE_SIZES.values())
    assert not any(proto.check_at_once(data, keys, sizes) for data in refused)


@pytest.mark.parametrize(
    "end", [b"j\x7f", b"j\x7fx", b"j\xff", b"j", b"\x08\xff", b"B\x05w", b"\x08"]
)
@pytest.mark.parametrize("before", [b"", tensor_of().SerializeToString()])
def test_a_tensor_that_ends_within_a_field_is_refused(before: bytes, end: bytes) -> None:
    data = onnx.ModelProto(ir_version=10).SerializeToString()
    data += _field(onnx.ModelProto.GRAPH_FIELD_NUMBER, _field(5, before + end))
    assert _parsed(data) is None
    assert proto.check_at_once(data, ["w"] if before else [], [16] if before else []) is None


# TensorRefs


def test_tensor_refs_are_a_mapping_of_initializers_and_others() -> None:
    model = model_of(raw_tensor("a"), raw_tensor("b"))
    other = TensorRef((("graph", None), ("node", 0)), raw_tensor("c"))
    refs = TensorRefs(model.graph.initializer, ["x", "y"], [1, 0], {"z": other})
    assert (list(refs), len(refs)) == (["x", "y", "z"], 3)
    assert [ref.where for ref in refs.values()] == [
        "graph.initializer[1]",
        "graph.initializer[0]",
        "graph.node[0]",
    ]
    assert [ref.tensor.name for ref in refs.values()] == ["b", "a", "c"]
    assert [*refs.items()] == [(key, refs[key]) for key in ("x", "y", "z")]
    assert [refs.tensor(key) is not None for key in ("x", "z", "w")] == [True, True, False]
    assert ("x" in refs, "z" in refs, "w" in refs) == (True, True, False)
    with pytest.raises(KeyError):
        refs["w"]
    assert TensorRefs() == {}


def test_the_message_of_what_is_left_names_the_tensor() -> None:
    model = _changed(lambda it: it.dims.append(2))
    with pytest.raises(ArchiveFormatError, match=r"graph\.initializer\[0\]"):
        proto.check_references(model, {"w": 16, "v": 16}, Report())
