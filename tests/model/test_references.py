from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx
import pytest
from findings import Findings
from google.protobuf.message import DecodeError
from models import (
    NUMBERS,
    attribute,
    external,
    full_model,
    model_of,
    node,
    raw_tensor,
    typed,
)
from onnx import TensorProto
from outcomes import count_outcome, requires_outcomes

from onnxarchive.errors import ArchiveFormatError, Report, Strict
from onnxarchive.model import dtypes, references, tensors, walking
from onnxarchive.model.copying import with_locations
from onnxarchive.model.keys import MODEL_PROTO
from onnxarchive.model.references import CheckedModel
from onnxarchive.model.tensors import TensorRefs


def _check(
    model: onnx.ModelProto,
    sizes: Mapping[str, int | None],
    report: Report,
    *,
    are_all: bool = True,
) -> TensorRefs:
    """Checks the only model of an archive, with and without the fast path for usual tensors."""
    pairs = []
    for is_usual in (tensors.has_data, lambda _: True):
        collected = Findings()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tensors, "has_data", is_usual)
            pairs.append(
                (_checked(model, sizes, collected, are_all), (collected.pairs, collected.messages))
            )
    (found, findings), (other, others) = pairs
    assert (list(found.refs.items()), dict(found.kinds)) == (list(other.refs.items()), other.kinds)
    assert findings == others
    return _checked(model, sizes, report, are_all).refs


def _checked(
    model: onnx.ModelProto, sizes: Mapping[str, int | None], report: Report, are_all: bool
) -> CheckedModel:
    models = {MODEL_PROTO: model}
    return references.check_all_references(models, sizes, report, are_all=are_all)[MODEL_PROTO]


def _references(model: onnx.ModelProto, sizes: Mapping[str, int | None]) -> list[str]:
    collected = Findings()
    _check(model, sizes, collected)
    assert None not in collected.entries
    return collected.rules


def test_every_tensor_finds_its_entry() -> None:
    model = full_model()
    located = with_locations(
        model, {ref.path: f"k{i}" for i, ref in enumerate(tensors.walk(model))}
    )
    nbytes = {True: 300 * 8, False: 300 * 4}
    sizes = {
        f"k{i}": nbytes[ref.tensor.data_type == TensorProto.INT64]
        for i, ref in enumerate(tensors.walk(model))
    }
    found = _check(located, sizes, Strict())
    assert list(found) == list(sizes)
    assert all(tensors.location(ref.tensor) == key for key, ref in found.items())
    assert all(walking.at(located, ref.path) is ref.tensor for ref in found.values())


def test_length_and_offset_and_checksum_may_be_stated() -> None:
    tensor = external(raw_tensor("w"), "w", offset=0, length=16, checksum="any")
    assert _references(model_of(tensor), {"w": 16}) == []


def _change(change: Callable[[TensorProto], object], **pairs: object) -> onnx.ModelProto:
    tensor = external(raw_tensor("w"), "w", **pairs)
    change(tensor)
    return model_of(tensor)


def _nothing(_: TensorProto) -> None:
    pass


@pytest.mark.parametrize(
    ("model", "rules"),
    [
        (_change(lambda it: it.external_data[0].ClearField("value")), ["DATA-1", "DATA-2"]),
        (_change(lambda it: it.ClearField("external_data")), ["DATA-4", "DATA-2"]),
        (_change(_nothing, other="1"), ["DATA-4"]),
        (_change(_nothing, offset="00"), ["DATA-5"]),
        (_change(_nothing, offset="1"), ["DATA-5"]),
        (_change(_nothing, offset="64"), ["DATA-5"]),
        (_change(_nothing, length="15"), ["DATA-5"]),
        (_change(_nothing, length="17"), ["DATA-5"]),
        (_change(_nothing, length="0"), ["DATA-5"]),
        (_change(lambda it: it.ClearField("data_location")), ["DATA-7", "DATA-2"]),
        (_change(lambda it: setattr(it, "data_location", 0)), ["DATA-7", "DATA-2"]),
        (_change(lambda it: setattr(it, "raw_data", b"")), ["DATA-7"]),
        (_change(lambda it: setattr(it, "raw_data", bytes(16))), ["DATA-7"]),
        (_change(lambda it: it.float_data.append(1)), ["DATA-7"]),
        (_change(lambda it: it.int32_data.append(1)), ["DATA-7"]),
        (_change(lambda it: it.int64_data.append(1)), ["DATA-7"]),
        (_change(lambda it: it.double_data.append(1)), ["DATA-7"]),
        (_change(lambda it: it.uint64_data.append(1)), ["DATA-7"]),
        (_change(lambda it: it.string_data.append(b"a")), ["DATA-7"]),
        (_change(lambda it: setattr(it.segment, "begin", 0)), ["DATA-7"]),
        (_change(lambda it: it.ClearField("data_type")), ["TENSOR-1"]),
        (_change(lambda it: setattr(it, "data_type", 0)), ["TENSOR-1"]),
        (_change(lambda it: setattr(it, "data_type", 8)), ["TENSOR-1"]),
        (_change(lambda it: setattr(it, "data_type", 1000)), ["TENSOR-1"]),
        (_change(lambda it: setattr(it, "data_type", -1)), ["TENSOR-1"]),
        (_change(lambda it: it.dims.append(-1)), ["TENSOR-2"]),
        (_change(lambda it: it.dims.extend([1] * 64)), ["TENSOR-2"]),
        (_change(lambda it: it.dims.extend([1 << 32, 1 << 32])), ["TENSOR-2"]),
        (_change(lambda it: it.dims.extend([0, 1 << 62])), ["TENSOR-2"]),
        (_change(lambda it: it.dims.append(2)), ["TENSOR-3"]),
        (_change(lambda it: it.dims.append(0)), ["TENSOR-3"]),
        (_change(lambda it: it.ClearField("dims")), ["TENSOR-3"]),
        (_change(lambda it: setattr(it, "data_type", 11)), ["TENSOR-3"]),
        (_change(lambda it: setattr(it, "data_type", 22)), ["TENSOR-3"]),
    ],
    ids=lambda it: "-".join(it) if isinstance(it, list) else "",
)
def test_a_tensor_that_does_not_fit_its_entry_breaks_a_rule(
    model: onnx.ModelProto, rules: list[str]
) -> None:
    assert _references(model, {"w": 16}) == rules
    with pytest.raises(ArchiveFormatError) as caught:
        _check(model, {"w": 16}, Strict())
    assert caught.value.rule == rules[0]


def test_two_tensors_do_not_share_an_entry() -> None:
    tensor = external(raw_tensor("w"), "w")
    model = model_of(tensor)
    model.graph.node.append(node(attribute("t", t=tensor)))
    collected = Findings()
    found = _check(model, {"w": 16}, collected)
    assert (collected.rules, collected.entries) == (["DATA-3"], ["w"])
    assert "graph.initializer[0]" in collected.messages[0]
    assert "graph.node[0].attribute[0].t" in collected.messages[0]
    assert [str(ref) for ref in found.values()] == ["tensor 'w' (graph.initializer[0])"]


def test_an_entry_that_no_tensor_names_breaks_a_rule() -> None:
    collected = Findings()
    assert _check(model_of(raw_tensor("w")), {"w": 16}, collected) == {}
    assert (collected.rules, collected.entries) == (["DATA-2"], ["w"])


def test_every_broken_rule_is_reported_and_not_only_the_first() -> None:
    model = model_of(
        external(raw_tensor("a"), "nowhere"),
        external(raw_tensor("b"), "b", length=1),
        external(raw_tensor("c", dims=(5,)), "c"),
    )
    rules = _references(model, {"b": 16, "c": 16, "d": 16})
    assert rules == ["DATA-1", "DATA-5", "TENSOR-3", "DATA-2"]


def test_a_faulty_tensor_is_checked_as_far_as_possible() -> None:
    tensor = external(raw_tensor("w"), "w", foo="1", offset="4")
    tensor.dims[:] = [-1]
    tensor.data_type = 99
    tensor.raw_data = b"x"
    model = model_of(tensor)
    everything = ["DATA-4", "DATA-5", "DATA-7", "TENSOR-1", "TENSOR-2"]
    assert _references(model, {"w": 16}) == everything
    # and beside a location that is none
    assert _references(model, {}) == [everything[0], "DATA-1", *everything[1:]]
    # and where another tensor has it
    model = model_of(external(raw_tensor("v"), "w"), tensor)
    assert _references(model, {"w": 16}) == [everything[0], "DATA-3", *everything[1:]]


def test_the_dims_of_a_tensor_without_type_are_checked() -> None:
    tensor = external(raw_tensor("w"), "w")
    tensor.data_type = 99
    assert _references(model_of(tensor), {"w": 16}) == ["TENSOR-1"]
    tensor.dims[:] = [1 << 62, 1 << 62]
    assert _references(model_of(tensor), {"w": 16}) == ["TENSOR-1", "TENSOR-2"]


def test_a_key_of_unknown_size_is_a_key() -> None:
    tensor = external(raw_tensor("w"), "w", length=3)
    assert _references(model_of(tensor), {"w": None}) == []
    tensor.external_data.add(key="offset", value="1")
    assert _references(model_of(tensor), {"w": None}) == ["DATA-5"]


def test_an_unknown_key_is_no_fault_if_only_some_keys_are_known() -> None:
    model = model_of(external(raw_tensor("w"), "w"))
    assert _check(model, {}, Strict(), are_all=False) == {}


def test_two_locations_of_a_tensor_are_both_named() -> None:
    tensor = external(raw_tensor("w"), "w")
    tensor.external_data.add(key="location", value="v")
    assert _references(model_of(tensor), {"w": 16, "v": 16}) == ["DATA-4"]


def test_every_finding_names_the_entry_of_the_key_or_of_the_model() -> None:
    model = model_of(
        external(raw_tensor("a"), "nowhere", offset="1", other="x"),
        external(raw_tensor("b"), "b", length="x", other="x"),
        raw_tensor("c"),
    )
    model.graph.initializer[2].external_data.add(key="location", value="b")
    collected = Findings()
    _check(model, {"b": 16}, collected)
    assert collected.pairs == [
        ("DATA-4", "__MODEL_PROTO"),
        ("DATA-1", "__MODEL_PROTO"),
        ("DATA-5", "__MODEL_PROTO"),
        ("DATA-4", "b"),
        ("DATA-5", "b"),
        ("DATA-7", "__MODEL_PROTO"),
    ]
    of_further = Findings()
    references.check_all_references({"__MODEL_PROTO_x": model}, {"b": 16}, of_further)
    entries = ["b" if entry == "b" else "__MODEL_PROTO_x" for entry in collected.entries]
    assert of_further.entries == entries


def test_long_values_of_a_model_are_not_printed_in_full() -> None:
    long = "x" * 1_000_000
    shared = external(raw_tensor(long), "w", **{long: long, "offset": long})
    shared.dims[:] = [(1 << 63) - 1] * 60
    model = model_of(shared, shared, external(raw_tensor(long), long))
    collected = Findings()
    _check(model, {"w": 16}, collected)
    assert {"DATA-1", "DATA-3", "DATA-4", "DATA-5", "TENSOR-2"} <= set(collected.rules)
    assert max(map(len, collected.messages)) < 600


def test_tensors_that_the_model_holds_are_not_checked() -> None:
    model = model_of(raw_tensor("a"), typed(raw_tensor("b")))
    model.graph.initializer[0].dims[:] = [-1]
    assert _references(model, {}) == []


def test_an_impossible_number_of_dims_is_not_printed_in_full() -> None:
    model = _change(lambda it: it.dims.extend([7] * 100_000))
    collected = Findings()
    _check(model, {"w": 16}, collected)
    assert collected.rules == ["TENSOR-2"]
    assert len(collected.messages[0]) < 1000


def test_a_wrong_number_of_bytes_is_reported_with_type_and_shape() -> None:
    model = model_of(external(raw_tensor("layer/w", TensorProto.INT4, (3, 5)), "w"))
    with pytest.raises(ArchiveFormatError) as caught:
        _check(model, {"w": 9}, Strict())
    assert str(caught.value) == (
        "entry 'w': tensor 'layer/w' (graph.initializer[0]): expected 8 bytes for INT4 of shape "
        "[3, 5], found an entry of 9 [TENSOR-3]"
    )


def test_tensors_of_every_type_and_of_any_rank_fit_their_entries() -> None:
    shapes: list[tuple[int, ...]] = [(), (0,), (3, 0, 70000), (300, 40), (1,) * 28, (1,) * 64]
    found = [
        external(raw_tensor(f"{number} {rank}", number, dims), f"k{number}_{rank}")
        for number in NUMBERS.values()
        for rank, dims in enumerate(shapes)
    ]
    model = model_of(raw_tensor("a"), *found, raw_tensor("b"))
    sizes = {
        it.external_data[0].value: dtypes.BY_NUMBER[it.data_type].nbytes(it.dims) for it in found
    }
    assert _references(model, sizes) == []
    assert list(_check(model, sizes, Strict())) == list(sizes)


@pytest.mark.sweep
@requires_outcomes(sound=100, broken=500)
def test_changed_bytes_of_a_model_are_found_as_without_the_fast_path() -> None:
    tensors_of = {"w": (2, 2), "v": (2, 2), "u": ()}
    model = model_of(*(external(raw_tensor(it, 1, dims), it) for it, dims in tensors_of.items()))
    data = model.SerializeToString()
    for position, byte in enumerate(data):
        for other in {*(byte ^ 1 << bit for bit in range(8)), 0, 1, 0x7F, 0x80, 0xFF}:
            changed = data[:position] + bytes([other]) + data[position + 1 :]
            try:
                parsed = onnx.ModelProto.FromString(changed)
            except DecodeError:
                continue
            count_outcome("broken" if _references(parsed, {"w": 16, "v": 16, "u": 4}) else "sound")
