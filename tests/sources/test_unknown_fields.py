"""Unknown fields at the end of every kind of message: those of a later ONNX, or of an attacker."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import edits
import onnx
import pytest
from models import external, raw_tensor
from onnx import TensorProto
from zip_entries import add_bytes

import onnxarchive
from onnxarchive.model import walking
from onnxarchive.model.wire import varint
from onnxarchive.zipformat.writer import ZipWriter

# Each is read beyond its end where it is taken for another one.
CONTENTS = {
    "varint": (0, b"\xff" * 9 + b"\1"),
    "fixed64": (1, b"\xff" * 8),
    "bytes": (2, b"\3cat"),
    "group": (3, b"\x0b\x0d\xff\xff\xff\xff\x0c"),
    "fixed32": (5, b"\xff" * 4),
}


def _paths() -> dict[str, tuple[str, ...]]:
    """A shortest way from a model to each kind of message that it may hold, in fields."""
    paths: dict[str, tuple[str, ...]] = {onnx.ModelProto.DESCRIPTOR.name: ()}
    pending: list[tuple[tuple[str, ...], Any]] = [((), onnx.ModelProto.DESCRIPTOR)]
    for path, message in pending:
        for field in message.fields:
            below = field.message_type
            if below is not None and below.name not in paths:
                paths[below.name] = (*path, field.name)
                pending.append((paths[below.name], below))
    # These stand in the bytes behind all others of their kind.
    paths["TensorProto"] = ("graph", "initializer")
    paths["StringStringEntryProto"] = ("metadata_props",)
    return paths


def _message(model: onnx.ModelProto, path: tuple[str, ...]) -> Any:
    """The message at the end of a way, which is made where there is none."""
    message: Any = model
    for field in path:
        descriptor = message.DESCRIPTOR.fields_by_name[field]
        below = getattr(message, field)
        if walking.is_repeated(descriptor):
            below = below[-1] if below else below.add()
        else:
            below.SetInParent()
        message = below
    return message


def _unknown_fields(message: Any, wire_type: int, content: bytes) -> Iterator[bytes]:
    """A field whose tag takes one byte, and one whose tag takes two."""
    for numbers in (range(1, 16), range(1000, 1001)):
        number = next(it for it in numbers if it not in message.DESCRIPTOR.fields_by_number)
        end = varint(number << 3 | 4) if wire_type == 3 else b""
        yield varint(number << 3 | wire_type) + content + end


@pytest.mark.parametrize("kind", CONTENTS)
@pytest.mark.parametrize("message", _paths())
def test_an_unknown_field_at_the_end_of_a_message_is_kept(
    message: str, kind: str, tmp_path: Path
) -> None:
    source, path = tmp_path / "model.onnx", tmp_path / "model.onnxa"
    weights = [raw_tensor("w"), raw_tensor("v", TensorProto.INT4, (3,))]
    model = onnx.ModelProto(ir_version=10, graph=onnx.GraphProto(initializer=weights))
    found = _message(model, _paths()[message])
    for field in _unknown_fields(found, *CONTENTS[kind]):
        found.MergeFromString(field)
        expected = model.SerializeToString(deterministic=True)
        source.write_bytes(expected)
        onnxarchive.save(model, path, size_threshold=0, convert_attribute=True)
        assert onnxarchive.check(path, full=True) == []
        assert onnxarchive.load(path).SerializeToString(deterministic=True) == expected
        onnxarchive.convert(
            source, tmp_path / "converted", size_threshold=0, convert_attribute=True
        )
        assert (tmp_path / "converted").read_bytes() == path.read_bytes()
        onnxarchive.export(path, tmp_path / "single.onnx")
        assert onnx.load(tmp_path / "single.onnx") == model
        onnxarchive.export(path, tmp_path / "exported.onnx", external_data="data")
        exported = onnx.load(tmp_path / "exported.onnx")
        for tensor in exported.graph.initializer:
            tensor.ClearField("data_location")
        assert exported == model


@pytest.mark.parametrize("kind", CONTENTS)
def test_an_unknown_field_at_the_end_of_external_data_is_accepted(
    kind: str, tmp_path: Path
) -> None:
    weight = raw_tensor("w")
    tensor = external(weight, "w")
    pair = tensor.external_data[0]
    for field in _unknown_fields(pair, *CONTENTS[kind]):
        pair.MergeFromString(field)
        tensors = [tensor, external(weight, "v")]
        for initializers in (tensors, tensors[::-1]):
            model = onnx.ModelProto(ir_version=10, graph=onnx.GraphProto(initializer=initializers))
            with (tmp_path / "model.onnxa").open("wb") as file:
                archive = ZipWriter(file)
                add_bytes(archive, "w", weight.raw_data)
                add_bytes(archive, "v", weight.raw_data)
                add_bytes(archive, "__MODEL_PROTO", model.SerializeToString())
                archive.finish()
            assert onnxarchive.check(tmp_path / "model.onnxa", full=True) == []
            with onnxarchive.open(tmp_path / "model.onnxa") as opened:
                assert opened.model == model
                assert opened.read("w") == weight.raw_data


# Weights which leave a model small enough to copy, whatever their shapes say.
SMALL_WEIGHTS = {
    "one": [raw_tensor("w", TensorProto.FLOAT, (512,))],
    "many": [
        raw_tensor(f"w{index}", TensorProto.FLOAT, (256 - index % 2,)) for index in range(300)
    ],
    "larger": [raw_tensor("w", TensorProto.FLOAT, (100_000,))],
}


@pytest.mark.parametrize(
    ("message", "weights"),
    [
        *((message, "one") for message in ("ModelProto", "GraphProto", "TensorProto")),
        *(("GraphProto", weights) for weights in ("many", "larger")),
    ],
)
def test_many_unknown_fields_are_copied_as_bytes(
    message: str, weights: str, tmp_path: Path
) -> None:
    source, path, saved, link = (tmp_path / name for name in ("m.onnx", "m", "s", "l.onnx"))
    graph = onnx.GraphProto(initializer=SMALL_WEIGHTS[weights])
    model = onnx.ModelProto(ir_version=10, graph=graph)
    _message(model, _paths()[message]).MergeFromString(b"\x78\0" * 100_000)
    source.write_bytes(model.SerializeToString())
    for act in (
        lambda: onnxarchive.convert(source, path),
        lambda: onnxarchive.save(model, saved),
        lambda: onnxarchive.diff(path, saved),
        lambda: edits.replace_model(path, source),
        lambda: onnxarchive.link(path, link),
        lambda: onnxarchive.check_link(link),
    ):
        assert _peak(act) < 10 << 20  # an object for each field would take 13 MB in all
    assert onnxarchive.load(saved) == onnxarchive.load(path) == model


def test_elements_without_data_do_not_count_as_weights(tmp_path: Path) -> None:
    tensor = TensorProto(name="w", dims=[1 << 30], data_type=TensorProto.FLOAT, raw_data=b"1234")
    model = onnx.ModelProto(ir_version=10, graph=onnx.GraphProto(initializer=[tensor]))
    model.graph.MergeFromString(b"\x78\0" * 100_000)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())

    def act() -> None:
        with pytest.raises(onnxarchive.ArchiveFormatError):
            onnxarchive.convert(tmp_path / "m.onnx", tmp_path / "m")
        onnxarchive.convert(tmp_path / "m.onnx", tmp_path / "m", size_threshold=1 << 40)

    assert _peak(act) < 10 << 20


def test_unknown_fields_beside_weights_take_no_more_than_protobuf_needs(tmp_path: Path) -> None:
    weight = raw_tensor("w", TensorProto.FLOAT, ((1 << 18) + 1,))
    model = onnx.ModelProto(ir_version=10, graph=onnx.GraphProto(initializer=[weight]))
    model.MergeFromString(b"\xa0\x1f\0" * 100_000)
    # 12 MB for the fields; the rest is for the weight.
    assert _peak(lambda: onnxarchive.save(model, tmp_path / "m")) < 20 << 20
    assert onnxarchive.load(tmp_path / "m") == model


def _peak(act: Callable[[], object]) -> int:
    """The most bytes that Python's objects take during a call."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
