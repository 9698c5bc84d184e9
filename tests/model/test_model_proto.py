from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import SupportsIndex

import onnx
import pytest
from findings import Findings
from hypothesis import given, settings
from models import (
    external,
    model_of,
    model_protos,
    nested_model,
    raw_tensor,
)
from versions import needs_compiled_parser

from onnxarchive.errors import ArchiveFormatError, Strict
from onnxarchive.model import model_proto

# Serializing and parsing


@settings(deadline=None)
@given(model_protos())
def test_a_serialized_model_is_parsed_to_an_equal_one(model: onnx.ModelProto) -> None:
    data = model_proto.serialize(model)
    # The bytes, since protobuf's Python parser finds NaNs unequal.
    parsed = model_proto.parse(data, Strict())
    assert parsed is not None
    assert parsed.SerializeToString(deterministic=True) == data
    assert (
        model_proto.serialize(onnx.ModelProto.FromString(data)) == model_proto.encode(model) == data
    )


@pytest.mark.parametrize(
    ("model", "missing"),
    [
        (onnx.ModelProto(), "no ir_version and no graph"),
        (onnx.ModelProto(ir_version=10), "no graph"),
        (onnx.ModelProto(graph=onnx.GraphProto()), "no ir_version"),
    ],
)
def test_a_model_has_ir_version_and_graph(model: onnx.ModelProto, missing: str) -> None:
    for write in (model_proto.serialize, model_proto.encode):
        with pytest.raises(ArchiveFormatError, match=missing) as caught:
            write(model)
        assert caught.value.rule == "MODEL-3"
    collected = Findings()
    assert model_proto.parse(model.SerializeToString(), collected) is None
    assert (collected.rules, collected.entries) == (["MODEL-3"], ["__MODEL_PROTO"])


def test_two_graphs_are_refused_and_the_entry_is_named() -> None:
    data = model_of().SerializeToString()
    collected = Findings()
    assert model_proto.parse(data + data, collected) is None
    assert (collected.rules, collected.entries) == (["MODEL-3"], ["__MODEL_PROTO"])


def test_an_empty_graph_is_a_graph() -> None:
    model = onnx.ModelProto(ir_version=10, graph=onnx.GraphProto())
    assert model_proto.parse(model_proto.serialize(model), Strict()) == model


@pytest.mark.parametrize(
    "data", [b"", b"\0", b"text", b"\x08", b"\x3a\x05\0", b"\xff" * 20], ids=repr
)
def test_bytes_of_another_kind_are_no_model(data: bytes) -> None:
    with pytest.raises(ArchiveFormatError) as caught:
        model_proto.parse(data, Strict())
    assert caught.value.rule == "MODEL-3"
    collected = Findings()
    assert model_proto.parse(data, collected) is None
    assert collected.rules == ["MODEL-3"]


@pytest.mark.parametrize("depth", [*range(32, 37), 300])
@needs_compiled_parser
def test_a_model_that_protobuf_could_not_parse_is_not_serialized(depth: int) -> None:
    # protobuf writes deeper than it reads
    model = nested_model(depth)
    data = model.SerializeToString()
    collected = Findings()
    is_readable = model_proto.parse(data, collected) is not None
    assert is_readable == (depth <= 33)
    if is_readable:
        assert model_proto.serialize(model) == data
    else:
        with pytest.raises(ArchiveFormatError, match="nested"):
            model_proto.serialize(model)


def test_a_model_over_the_limit_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of(raw_tensor("w", dims=(1000,)))
    size = len(model.SerializeToString())
    monkeypatch.setattr(model_proto, "SIZE_LIMIT", size + 1)
    assert len(model_proto.serialize(model)) == size
    monkeypatch.setattr(model_proto, "SIZE_LIMIT", size)
    with pytest.raises(ArchiveFormatError, match="size_threshold") as caught:
        model_proto.serialize(model)
    assert caught.value.rule == "MODEL-2"


def test_a_filled_model_over_the_limit_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = model_of(external(raw_tensor("w", dims=(1000,)), "w")).SerializeToString()
    weight = {"w": memoryview(bytes(4000))}
    monkeypatch.setattr(model_proto, "SIZE_LIMIT", len(data) + 4001)
    model = onnx.ModelProto.FromString(b"".join(model_proto.filled(data, weight)))
    assert model.graph.initializer[0].raw_data == bytes(4000)
    monkeypatch.setattr(model_proto, "SIZE_LIMIT", len(data) + 4000)
    with pytest.raises(ArchiveFormatError, match="size_threshold") as caught:
        model_proto.filled(data, weight)
    assert caught.value.rule == "MODEL-2"


def test_the_data_of_a_filled_model_is_freed_without_a_garbage_collection() -> None:
    data = model_of(external(raw_tensor("w", dims=(1000,)), "w")).SerializeToString()
    weight = memoryview(bytes(4000))
    reference = weakref.ref(weight)
    gc.disable()
    try:
        model_proto.filled(data, {"w": weight})
        del weight
        assert reference() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ({}, []),
        ({"a": "1", "b": "\ufffd"}, [("a", "0"), ("a", "1"), ("b", b"\xff")]),
        ({"a": "2", "b": "\ufffd"}, [("a", "2"), ("b", b"\xff")]),
        ({"b": "\ufffd", "c": "3"}, [("b", b"\xff"), ("c", "3")]),
        ({"b": "3"}, [("b", "3")]),
    ],
)
@needs_compiled_parser
def test_metadata_that_stay_are_left_as_they_are(
    pairs: dict[str, str], expected: list[tuple[str, str | bytes]]
) -> None:
    model = model_of()
    for key, value in (("a", "0"), ("a", "1")):
        model.metadata_props.add(key=key, value=value)
    # A value that is not UTF-8, which protobuf hands out as bytes.
    model.MergeFromString(b"\x72\x06\x0a\x01b\x12\x01\xff")
    assert model_proto.metadata(model) == {"a": "1", "b": "\ufffd"}
    model_proto.set_metadata(model, pairs)
    assert [(pair.key, pair.value) for pair in model.metadata_props] == expected
    assert model_proto.metadata(model) == pairs


class _Moved(list[onnx.StringStringEntryProto]):
    """A list that counts how many of its elements are moved by removing others."""

    moves = 0

    def __delitem__(self, index: SupportsIndex | slice) -> None:
        end = len(self) if isinstance(index, slice) else index.__index__() + 1
        self.moves += len(self) - end
        super().__delitem__(index)


def test_fingerprints_are_removed_without_moving_other_metadata_again_and_again() -> None:
    pairs = [
        onnx.StringStringEntryProto(
            key=model_proto.LINK_FINGERPRINT * (index % 2), value=f"{index}"
        )
        for index in range(1000)
    ]
    metadata_props = _Moved(pairs)
    model = SimpleNamespace(metadata_props=metadata_props)
    assert model_proto.take_link_fingerprint(model) == "1"  # type: ignore[arg-type]
    assert metadata_props == pairs[::2]
    assert metadata_props.moves < 1000
