"""Many small tensors: what is there for their speed gives the bytes of the plain way."""

from __future__ import annotations

import io
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from models import (
    MEASURE_MEMORY,
    attribute,
    external,
    model_of,
    node,
    raw_tensor,
    run_python,
    string_tensor,
    typed,
)
from onnx import TensorProto

import onnxarchive
from onnxarchive import ArchiveFormatError
from onnxarchive.archive import small_items
from onnxarchive.errors import Report
from onnxarchive.model import initializers_at_once, tensors
from onnxarchive.model.initializers_at_once import SmallInitializers
from onnxarchive.model.weights import SPAN_LOCATION
from onnxarchive.model.wire import varint
from onnxarchive.sources import finder, source
from onnxarchive.storage import file_data

NAMES = ["w", "W", "con", "", "ü", "a\nb", "__w", "1", "_", "assets", "layer.0/weight", "x" * 300]


def documented(tensor: TensorProto) -> TensorProto:
    tensor.doc_string = "about it"
    return tensor


def with_unknown_field(tensor: TensorProto) -> TensorProto:
    tensor.MergeFromString(b"\xf8\x3f\x05")
    return tensor


def with_location_of_none(tensor: TensorProto) -> TensorProto:
    tensor.external_data.add(key="location", value="nowhere")
    return tensor


CHANGES: list[Callable[[TensorProto], TensorProto]] = [
    *[lambda tensor: tensor] * 20,
    typed,
    documented,
    with_unknown_field,
    with_location_of_none,
]


def mixed(seed: int, count: int = 300) -> onnx.ModelProto:
    """A model of small, large, usual and unusual initializers in any order."""
    choose = random.Random(seed)
    initializers = [
        choose.choice(CHANGES)(
            raw_tensor(
                choose.choice(NAMES) + str(choose.randrange(count)) * choose.randrange(2),
                choose.choice([TensorProto.FLOAT, TensorProto.BOOL, TensorProto.INT4, 10]),
                choose.choice([(), (0,), (1,), (7,), (16,), (3, 50), (40_000,)]),
            )
        )
        for _ in range(count)
    ]
    initializers.insert(choose.randrange(count), string_tensor("strings"))
    model = model_of(*initializers)
    model.graph.node.append(node(attribute("value", t=raw_tensor("inside", 1, (9,)))))
    return model


def saved(model: onnx.ModelProto, **options: object) -> bytes:
    target = io.BytesIO()
    onnxarchive.save(model, target, **options)  # type: ignore[arg-type]
    return target.getvalue()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("options", [{}, {"size_threshold": 0}, {"alignment": 4096, "jobs": 1}])
def test_a_save_together_gives_the_bytes_of_a_save_one_by_one(
    seed: int, options: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mixed(seed)
    together = saved(model, **options)
    monkeypatch.setattr(
        initializers_at_once, "find_small", lambda *_, **options: SmallInitializers()
    )
    monkeypatch.setattr(small_items, "SMALL_SIZE", -1)
    assert saved(model, **options) == together


def test_small_tensors_are_found_unless_there_is_something_unusual() -> None:
    usual = raw_tensor("w", TensorProto.FLOAT, (4,))
    others = [
        raw_tensor("bool", TensorProto.BOOL, (4,)),
        raw_tensor("large", TensorProto.FLOAT, (40_000,)),
        *(change(raw_tensor("u", TensorProto.FLOAT, (4,))) for change in CHANGES[20:]),
    ]
    model = model_of(*others, usual)
    assert list(initializers_at_once.find_small(model).indexes) == [len(others)]


def test_a_graph_keeps_its_unknown_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(raw_tensor("w", TensorProto.FLOAT, (4,)))
    model.graph.MergeFromString(b"\x1a\x01\x07")
    together = saved(model, size_threshold=0)
    monkeypatch.setattr(
        initializers_at_once, "find_small", lambda *_, **options: SmallInitializers()
    )
    assert saved(model, size_threshold=0) == together


def test_external_tensors_are_read_together(tmp_path: Path) -> None:
    data = bytes(range(256)) * 40
    (tmp_path / "w.bin").write_bytes(data)
    model = model_of(
        *(
            external(raw_tensor(f"w{index}", 1, (4,)), "w.bin", offset=index * 16, length=16)
            for index in range(600)
        )
    )
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    onnxarchive.convert(tmp_path / "m.onnx", tmp_path / "m.onnxa", size_threshold=0)
    with onnxarchive.open(tmp_path / "m.onnxa") as archive:
        for index in range(600):
            found = archive.tensors[f"w{index}"].tobytes()
            assert found == data[index * 16 : index * 16 + 16]


def test_external_tensors_that_go_into_the_model_are_read_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, count = 100_000, 25
    data = bytes(range(250)) * (size * count // 250)
    (tmp_path / "w.bin").write_bytes(data)
    weights = [raw_tensor(f"w{index}", TensorProto.UINT8, (size,)) for index in range(count)]
    model = model_of(
        *(
            external(weight, "w.bin", offset=index * size, length=size)
            for index, weight in enumerate(weights)
        )
    )
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    opened: list[str] = []
    open_file = file_data._open_file

    def noted(path: str, *args: Any) -> Any:
        opened.append(path)
        return open_file(path, *args)

    monkeypatch.setattr(file_data, "_open_file", noted)
    onnxarchive.convert(tmp_path / "m.onnx", tmp_path / "m.onnxa", size_threshold=size + 1)
    assert 0 < sum(path.endswith("w.bin") for path in opened) < count // 2
    for index, tensor in enumerate(onnxarchive.load(tmp_path / "m.onnxa").graph.initializer):
        assert tensor.raw_data == data[index * size : (index + 1) * size]


PAIRS: list[dict[str, object]] = [
    {},
    {"offset": 0},
    {"length": 16},
    {"offset": 160, "length": 16},
    {"offset": 160, "length": 16, "checksum": "0" * 40},
    {"offset": 16, "basepath": "/tmp"},
]


@pytest.mark.parametrize("location", ["w.bin", "x" * 100, "x" * 101, "x" * 200, "ü", "a\nb", "12"])
@pytest.mark.parametrize("pairs", PAIRS)
def test_the_place_of_external_data_is_read_as_one_by_one(
    location: str, pairs: dict[str, object]
) -> None:
    model = model_of(external(raw_tensor("w", TensorProto.FLOAT, (4,)), location, **pairs))
    found = initializers_at_once.find_small(model)
    usual = len(location) <= 100 and location != "ü" and not {"checksum", "basepath"} & {*pairs}
    assert len(found) == usual
    if usual:
        (ref,) = tensors.walk(model)
        expected = tensors.external_data(ref, Report())
        assert expected is not None
        assert found.locations == [expected.location]
        assert found.offsets[0] == (expected.offset or 0)


def test_external_tensors_that_go_into_the_model_find_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(range(256)) * 8)
    initializers = []
    for index in range(60):
        count = 2 if index % 3 else 8  # of 8 or 32 bytes
        tensor = raw_tensor(f"w{index}", TensorProto.FLOAT, (count,), seed=index)
        if index % 2:
            external(tensor, "w.bin", offset=index * 16, length=count * 4)
        initializers.append(tensor)
    (tmp_path / "m.onnx").write_bytes(model_of(*initializers).SerializeToString())
    archives = []
    for name in ("together", "alone"):
        onnxarchive.convert(tmp_path / "m.onnx", tmp_path / name, size_threshold=32)
        archives.append((tmp_path / name).read_bytes())
        for module in (initializers_at_once, finder):
            monkeypatch.setattr(module, "find_small", lambda *_, **options: SmallInitializers())
        monkeypatch.setattr(small_items, "SMALL_SIZE", -1)
    assert archives[0] == archives[1]


def test_parts_of_files_are_read_together_and_alone(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_bytes(bytes(range(200)))
    second.write_bytes(bytes(range(100)) + bytes(1 << 20) + b"end")
    whole = file_data.FileData.of(first), file_data.FileData.of(second)
    parts = [
        *(whole[0].part(start, 10) for start in (50, 0, 100, 60)),
        *(whole[1].part(start, 3) for start in (1 << 20, 0, (1 << 20) + 100)),
        whole[0].part(7, 0),
    ]
    assert file_data.read_all(parts) == [part.read() for part in parts]


def test_a_part_that_was_cut_off_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(100))
    parts = [file_data.FileData.of(path).part(start, 10) for start in (0, 50, 90)]
    path.write_bytes(bytes(95))
    with pytest.raises(ArchiveFormatError, match="expected 10 bytes at offset 90"):
        file_data.read_all(parts)


def test_a_save_takes_little_more_memory_than_the_model(tmp_path: Path) -> None:
    source = tmp_path / "model.onnx"
    data = bytes(64)
    model = model_of(
        *(
            TensorProto(name=f"layer.{index}.weight", data_type=1, dims=[16], raw_data=data)
            for index in range(20_000)
        )
    )
    source.write_bytes(model.SerializeToString())
    code = f"""
{MEASURE_MEMORY}
import onnx, onnxarchive
onnxarchive.save(onnx.ModelProto(ir_version=10, graph=onnx.GraphProto(name="g")), sys.argv[2])
serialized = open(sys.argv[1], "rb").read()
before = anonymous()
model = onnx.ModelProto.FromString(serialized)
size = anonymous() - before
print(growth(lambda: onnxarchive.save(model, sys.argv[2], size_threshold=0)) / size)
"""
    assert float(run_python(code, source, tmp_path / "model.onnxa")) < 2


def test_a_convert_takes_little_more_memory_than_the_model(tmp_path: Path) -> None:
    count, nbytes = 20_000, 64
    (tmp_path / "w.bin").write_bytes(bytes(count * nbytes))
    held = [raw_tensor(f"layer.{index}.weight", 1, (16,)) for index in range(count)]
    serialized = model_of(*held).SerializeToString()
    (tmp_path / "held").write_bytes(serialized)
    outside = [
        external(tensor, "w.bin", offset=index * nbytes, length=nbytes)
        for index, tensor in enumerate(held)
    ]
    (tmp_path / "m.onnx").write_bytes(model_of(*outside).SerializeToString())
    code = f"""
{MEASURE_MEMORY}
import onnx, onnxarchive
directory = sys.argv[1]
empty = onnx.ModelProto(ir_version=10, graph=onnx.GraphProto(name="g"))
open(directory + "/empty.onnx", "wb").write(empty.SerializeToString())
onnxarchive.convert(directory + "/empty.onnx", directory + "/empty")
serialized = open(directory + "/held", "rb").read()
before = anonymous()
model = onnx.ModelProto.FromString(serialized)
size = anonymous() - before
source, target = directory + "/m.onnx", directory + "/m.onnxa"
print(growth(lambda: onnxarchive.convert(source, target, size_threshold=0)) / size)
"""
    assert float(run_python(code, tmp_path)) < 2


def external_model(*tensors: TensorProto) -> bytes:
    given = (external(it, "w.bin", offset=16 * n, length=16) for n, it in enumerate(tensors))
    return model_of(*given).SerializeToString()


def floats(name: str) -> TensorProto:
    return raw_tensor(name, TensorProto.FLOAT, (4,))


def changed(old: bytes, new: bytes) -> bytes:
    """A model of a tensor with other bytes."""
    serialized = external(floats("w"), "w.bin").SerializeToString()
    assert serialized.count(old) == 1
    serialized = serialized.replace(old, new)
    field = b"*" + varint(len(serialized)) + serialized
    return initializers_at_once.insert(model_of().SerializeToString(), [(0, field)])


USUAL = external_model(*(floats(name) for name in NAMES))
SERIALIZED = {
    "usual": (USUAL, True),
    "scalars and matrices": (external_model(floats("a"), raw_tensor("b", 11, (1, 2))), True),
    "no initializers": (model_of().SerializeToString(), True),
    "held data": (model_of(floats("w")).SerializeToString(), False),
    "an unusual type": (external_model(raw_tensor("w", TensorProto.BOOL, (16,))), False),
    "a documented tensor": (
        model_of(documented(external(floats("w"), "w.bin"))).SerializeToString(),
        False,
    ),
    "a longer varint": (changed(b"\x08\x04", b"\x08\x84\x00"), False),
    "a data type of 64 bits": (changed(b"\x10\x01", b"\x10\x81\x80\x80\x80\x10"), False),
    "a name that is not UTF-8": (USUAL.replace("ü".encode(), b"\xff\xfe"), False),
    "a reserved name": (external_model(floats(f"{SPAN_LOCATION}0")), False),
    "another order": (USUAL.replace(b"\x08\x04\x10\x01", b"\x10\x01\x08\x04"), False),
    "another length": (USUAL.replace(b"length\x12\x0216", b"length\x12\x0215"), False),
    "no such file": (USUAL.replace(b"w.bin", b"v.bin"), False),
    "the end of the file": (USUAL.replace(b"offset\x12\x0232", b"offset\x12\x0299"), True),
    "beyond the file": (USUAL.replace(b"offset\x12\x0232", b"offset\x12\x03999"), False),
    "outside": (USUAL.replace(b"w.bin", b"../ab"), False),
    "two graphs": (USUAL + USUAL, False),
    "cut off": (USUAL[:-3], False),
    "nothing": (b"", False),
}


@pytest.mark.parametrize("case", SERIALIZED)
@pytest.mark.parametrize("options", [{"size_threshold": 0}, {"size_threshold": 17}, {}])
def test_initializers_are_taken_out_of_a_serialized_model_as_out_of_a_parsed_one(
    case: str, options: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serialized, _ = SERIALIZED[case]
    (tmp_path / "w.bin").write_bytes(bytes(range(200)))
    (tmp_path / "m.onnx").write_bytes(serialized)

    def convert() -> bytes | str:
        try:
            onnxarchive.convert(tmp_path / "m.onnx", tmp_path / "m.onnxa", **options)  # type: ignore[arg-type]
        except ArchiveFormatError as error:
            return str(error)
        return (tmp_path / "m.onnxa").read_bytes()

    together = convert()
    monkeypatch.setattr(source, "parse_taking_out", lambda *_: None)
    assert convert() == together


@pytest.mark.parametrize("case", SERIALIZED)
def test_only_usual_initializers_are_taken_out(case: str) -> None:
    serialized, is_usual = SERIALIZED[case]
    try:
        taken = initializers_at_once.take_out(memoryview(serialized), 0)
    except ArchiveFormatError:
        taken = None
    if case not in {"no such file", "beyond the file", "outside"}:  # as only their files tell
        assert (taken is not None) == is_usual
    if taken is not None:
        rest, small = taken
        fields = small.external(enumerate(["w.bin"] * len(small)))
        restored = onnx.ModelProto.FromString(initializers_at_once.insert(rest, fields))
        expected = onnx.ModelProto.FromString(serialized)
        for tensor in expected.graph.initializer:
            del tensor.external_data[1:]
            tensor.external_data[0].value = "w.bin"
        assert restored == expected


@pytest.mark.parametrize("part", [b":\0", b"\x08\x01"], ids=["graphs", "dims"])
def test_many_graphs_or_dims_are_not_kept_in_memory(part: bytes) -> None:
    many = part * 200_000
    graph = b"*" + varint(len(many)) + many  # an initializer
    model = many if part == b":\0" else b":" + varint(len(graph)) + graph
    tracemalloc.start()
    try:
        assert initializers_at_once.take_out(memoryview(model), 0) is None
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
