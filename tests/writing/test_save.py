from __future__ import annotations

import hashlib
import io
import os
import re
import resource
import weakref
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from limits import limited
from models import (
    MEASURE_MEMORY,
    NUMBERS,
    attribute,
    every_tensor,
    external,
    full_model,
    model_of,
    model_protos,
    nested_model,
    node,
    normalised,
    raw_tensor,
    run_python,
    string_tensor,
    typed,
)
from onnx import TensorProto
from versions import needs_compiled_parser
from written import Target, contents, saved

import onnxarchive
from onnxarchive import ArchiveFormatError
from onnxarchive.files.data import Bytes, Made
from onnxarchive.model.dtypes import BY_NAME
from onnxarchive.remote.location import Location
from onnxarchive.sources.source import Source
from onnxarchive.writing.options import WriteOptions
from onnxarchive.writing.plan import plan_archive
from onnxarchive.writing.write import write_archive

MIB = 1 << 20


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "model.onnxa"


def serialized(model: onnx.ModelProto) -> bytes:
    return model.SerializeToString(deterministic=True)


# Round trips


@settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    model=model_protos(),
    is_raw=st.booleans(),
    size_threshold=st.sampled_from([0, 1, 64, 1024]),
    convert_attribute=st.booleans(),
    alignment=st.sampled_from([64, 128, 4096, 32768]),
)
def test_any_model_is_loaded_equal_and_one_with_raw_tensors_byte_for_byte(
    target: Path, model: onnx.ModelProto, is_raw: bool, **options: Any
) -> None:
    if is_raw:
        model = normalised(model)
    before = serialized(model)
    onnxarchive.save(model, target, **options)
    assert serialized(model) == before
    assert onnxarchive.check(target, full=True) == []
    loaded = onnxarchive.load(target)
    # protobuf's Python parser finds NaNs unequal.
    assert serialized(normalised(loaded)) == serialized(normalised(model))
    assert not is_raw or serialized(loaded) == before
    with onnxarchive.open(target) as archive:
        stored = [it for it in every_tensor(archive.model) if it.data_location]
        assert len(stored) == len(archive.entries) - 1
        if options["size_threshold"] == 0 and options["convert_attribute"]:
            fixed_width = [it for it in every_tensor(model) if it.data_type != TensorProto.STRING]
            assert len(stored) == len(fixed_width)
        for entry in archive.entries.values():
            assert entry.data_offset % options["alignment"] == 0


def test_tensors_of_every_type_and_field_are_loaded_as_saved(target: Path) -> None:
    tensors = [string_tensor("strings")]
    for name, number in NUMBERS.items():
        for dims in [(), (0,), (1,), (7,), (3, 5), (2, 0, 3)]:
            tensors.append(raw_tensor(f"{name}{dims}", number, dims, seed=len(tensors)))
            tensors.append(typed(tensors[-1]))
            tensors[-1].name += "typed"
    model = model_of(*tensors)
    onnxarchive.save(model, target, size_threshold=0)
    assert onnxarchive.check(target, full=True) == []
    assert normalised(onnxarchive.load(target)) == normalised(model)
    with onnxarchive.open(target) as archive:
        assert len(archive.entries) == len(tensors)


def test_graphs_nested_as_deep_as_protobuf_reads_are_loaded_as_saved(target: Path) -> None:
    model = nested_model(33)
    onnx.ModelProto.FromString(model.SerializeToString())
    onnxarchive.save(model, target, size_threshold=0)
    with onnxarchive.open(target) as archive:
        assert sorted(archive.tensors) == sorted(f"weight{level}" for level in range(33))
    assert onnxarchive.load(target) == model


@pytest.mark.parametrize("depth", [33, 34, 60])
@pytest.mark.parametrize("convert_attribute", [False, True])
def test_an_archive_that_cannot_be_opened_is_not_written(
    target: Path, depth: int, convert_attribute: bool
) -> None:
    # The tensor of the innermost node is as deep as protobuf reads, or deeper; external_data is
    # one level below its tensor.
    model = nested_model(depth)
    graph = model.graph
    for _ in range(depth - 1):
        graph = graph.node[0].attribute[0].g
    graph.node.append(node(attribute("t", t=raw_tensor("deepest", dims=(300,)))))
    before = model.SerializeToString()
    if depth == 33 and not convert_attribute:
        onnxarchive.save(model, target)
        assert onnxarchive.load(target) == model
    else:
        with pytest.raises(ArchiveFormatError, match="nested"):
            onnxarchive.save(model, target, convert_attribute=convert_attribute)
        assert not target.exists()
    assert model.SerializeToString() == before


def test_a_default_data_location_is_loaded_as_unset(target: Path) -> None:
    model = model_of(raw_tensor("w"))
    model.graph.initializer[0].data_location = TensorProto.DEFAULT
    onnxarchive.save(model, target, size_threshold=0)
    (loaded,) = onnxarchive.load(target).graph.initializer
    assert not loaded.HasField("data_location")
    loaded.data_location = TensorProto.DEFAULT
    assert loaded == model.graph.initializer[0]


def test_unknown_fields_are_loaded_as_saved(target: Path) -> None:
    model = full_model()
    for message in (model, model.graph, model.graph.initializer[0], model.graph.node[0]):
        message.MergeFromString(b"\x92\xfa\x01\x03abc")
    onnxarchive.save(model, target, size_threshold=0, convert_attribute=True)
    assert serialized(onnxarchive.load(target)) == serialized(model)


def test_an_external_data_field_that_says_nothing_makes_no_broken_archive(target: Path) -> None:
    # data_location is not EXTERNAL: the tensor holds its data itself
    for size_threshold in (0, 1024):
        model = model_of(raw_tensor("w"))
        model.graph.initializer[0].external_data.add(key="location", value="left over")
        onnxarchive.save(model, target, size_threshold=size_threshold)
        assert onnxarchive.check(target) == []


@pytest.mark.parametrize("field", ["tensor name", "graph name", "doc_string", "producer_name"])
@needs_compiled_parser
def test_text_that_is_not_utf_8_is_kept(target: Path, field: str) -> None:
    # protobuf reads and writes such strings of proto2
    model = model_of(raw_tensor("MARK" if field == "tensor name" else "w", dims=(300,)))
    if field == "graph name":
        model.graph.name = "MARK"
    elif field != "tensor name":
        setattr(model, field, "MARK")
    serialized = model.SerializeToString()
    assert serialized.count(b"MARK") == 1
    model = onnx.ModelProto.FromString(serialized.replace(b"MARK", b"M\xffRK"))
    onnxarchive.save(model, target)
    assert onnxarchive.load(target).SerializeToString() == model.SerializeToString()


# Tensors stored outside the model


def _outside(model: onnx.ModelProto, **options: Any) -> dict[str, int]:
    """Name and size of the entries that tensors have."""
    with zipfile.ZipFile(io.BytesIO(saved(model, **options))) as file:
        return {info.filename: info.file_size for info in file.infolist()[:-1]}


@pytest.mark.parametrize(
    ("size_threshold", "outside"),
    [
        (0, ["nothing", "one", "below", "equal", "above"]),
        (1, ["one", "below", "equal", "above"]),
        (1024, ["equal", "above"]),
        (1025, ["above"]),
        (1 << 40, []),
    ],
)
def test_tensors_of_the_threshold_or_more_are_stored_outside_the_model(
    size_threshold: int, outside: list[str]
) -> None:
    counts = {"nothing": 0, "one": 1, "below": 1023, "equal": 1024, "above": 1025}
    model = model_of(*(raw_tensor(n, TensorProto.UINT8, (c,)) for n, c in counts.items()))
    found = _outside(model, size_threshold=size_threshold)
    assert found == {name: counts[name] for name in outside}


def test_the_threshold_is_1024_and_counts_packed_bytes() -> None:
    model = model_of(
        raw_tensor("float", TensorProto.FLOAT, (256,)),
        raw_tensor("small_float", TensorProto.FLOAT, (255,)),
        raw_tensor("int4", TensorProto.INT4, (2047,)),
        raw_tensor("small_int4", TensorProto.INT4, (2046,)),
        typed(raw_tensor("typed", TensorProto.INT8, (1024,))),
        typed(raw_tensor("small_typed", TensorProto.INT8, (1023,))),
    )
    assert _outside(model) == {"float": 1024, "int4": 1024, "typed": 1024}


def test_only_initializers_are_stored_outside_unless_convert_attribute_is_given() -> None:
    model = full_model(300)
    graphs = ("main", "main_a", "main_b", "main_c")
    initializers = {f"{graph}_initializer{end}" for graph in graphs for end in ("", "2")}
    assert set(_outside(model)) == initializers
    assert len(_outside(model, convert_attribute=True)) == 257
    of_8_bytes = [it for it in every_tensor(model) if it.data_type == TensorProto.INT64]
    found = _outside(model, convert_attribute=True, size_threshold=1201)
    assert list(found.values()) == [2400] * len(of_8_bytes)


def test_strings_stay_in_the_model(target: Path) -> None:
    model = model_of(string_tensor("strings", ["x" * 5000]), raw_tensor("w"))
    assert list(_outside(model, size_threshold=0)) == ["w"]
    onnxarchive.save(model, target, size_threshold=0)
    assert onnxarchive.load(target) == model


def test_entries_are_named_after_their_tensors_in_the_order_of_the_model() -> None:
    tensors = ["layer.0/weight", "layer_0_weight", "con", ""]
    model = model_of(*(raw_tensor(name) for name in tensors))
    names = ["layer_0_weight", "layer_0_weight_2", "con_", "tensor"]
    assert list(_outside(model, size_threshold=0)) == names


def test_bytes_outside_are_raw_data_and_the_model_is_last(target: Path) -> None:
    tensor = raw_tensor("w", TensorProto.BFLOAT16, (600,))
    onnxarchive.save(model_of(tensor, typed(tensor)), target)
    with zipfile.ZipFile(target) as file:
        assert file.namelist() == ["w", "w_2", "__MODEL_PROTO"]
        assert file.read("w") == file.read("w_2") == tensor.raw_data
        model = onnx.ModelProto.FromString(file.read("__MODEL_PROTO"))
    assert [it.external_data[0].value for it in model.graph.initializer] == ["w", "w_2"]


# Determinism


def test_the_same_model_gives_the_same_bytes_in_every_process() -> None:
    code = """
import hashlib, io, onnxarchive
from models import full_model
file = io.BytesIO()
model = full_model()
model.metadata_props.add(key="b", value="1")
onnxarchive.save(model, file, size_threshold=0, convert_attribute=True,
                 assets={"b": b"2", "a": b"1", "c/d": b"3"})
print(hashlib.sha256(file.getvalue()).hexdigest())
"""
    model = full_model()
    model.metadata_props.add(key="b", value="1")
    assets = {"a": b"1", "b": b"2", "c/d": b"3"}
    data = saved(model, size_threshold=0, convert_attribute=True, assets=assets)
    expected = hashlib.sha256(data).hexdigest()
    assert {run_python(code, PYTHONHASHSEED=seed).strip() for seed in "12"} == {expected}


def test_a_plan_knows_the_size_of_the_archive() -> None:
    model = full_model()
    assets = {"a": b"1234", "ü": b""}
    plan = plan_archive({"": Source(model)}, WriteOptions(assets=assets, size_threshold=0))
    for alignment in (64, 4096):
        data = saved(model, size_threshold=0, assets=assets, alignment=alignment)
        assert plan.size(alignment) == len(data)


def test_data_is_freed_before_that_of_the_next_entry_is_read() -> None:
    read: list[weakref.ref[Any]] = []

    def read_weights() -> Bytes:
        assert [found() for found in read] == [None] * len(read)
        data = np.zeros(2 * MIB, np.uint8)
        read.append(weakref.ref(data))
        return Bytes(data.data)

    tensors = [
        external(TensorProto(name=name, data_type=TensorProto.UINT8, dims=[2 * MIB]), "elsewhere")
        for name in "uvw"
    ]
    options = WriteOptions(jobs=1)
    data = [Made(2 * MIB, read_weights) for _ in tensors]
    plan = plan_archive({"": Source(model_of(*tensors), data)}, options)
    write_archive(plan, Location.of(io.BytesIO()), options)
    assert len(read) == len(tensors)


# Targets


@pytest.mark.parametrize("limit", [None, 1000])
def test_anything_with_write_takes_an_archive(limit: int | None) -> None:
    target = Target([limit])
    onnxarchive.save(full_model(), target)
    assert bytes(target.content) == saved(full_model())


def test_an_open_file_and_a_pipe_take_an_archive(target: Path) -> None:
    model = model_of(raw_tensor("w", dims=(300,)))
    with open(target, "wb", buffering=0) as file:
        onnxarchive.save(model, file)
        assert not file.closed
    reading, writing = os.pipe()
    with open(writing, "wb") as pipe:
        onnxarchive.save(model, pipe)
    with open(reading, "rb") as pipe:
        assert pipe.read() == target.read_bytes() == saved(model)


def test_bytes_before_the_archive_in_an_open_file_are_not_counted() -> None:
    file = io.BytesIO()
    onnxarchive.save(model_of(raw_tensor("w")), file)
    onnxarchive.save(model_of(raw_tensor("w")), file)
    half = len(file.getvalue()) // 2
    assert file.getvalue()[:half] == file.getvalue()[half:]


# Failures


def _interrupt(done: int, total: int) -> None:
    if done > total // 2:
        raise KeyboardInterrupt


def _divide(done: int, total: int) -> None:
    _ = done // 0


def _with_tensor(tensor: TensorProto) -> onnx.ModelProto:
    good = [raw_tensor(f"w{index}", dims=(1000,)) for index in range(4)]
    return model_of(*good[:2], tensor, *good[2:])


def _bad(data_type: int, dim: int, **fields: Any) -> TensorProto:
    return TensorProto(name="layer/w", data_type=data_type, dims=[dim], **fields)


BAD_TENSORS = {
    "too short": _bad(TensorProto.FLOAT, 300, raw_data=bytes(1199)),
    "too long": _bad(TensorProto.FLOAT, 300, raw_data=bytes(1201)),
    "empty": _bad(TensorProto.FLOAT, 300, raw_data=b""),
    "without data": _bad(TensorProto.FLOAT, 300),
    "typed, too short": _bad(TensorProto.FLOAT, 300, float_data=[0] * 299),
    "in the wrong field": _bad(TensorProto.FLOAT, 300, int32_data=[0] * 300),
    "bool of 2": _bad(TensorProto.BOOL, 1100, raw_data=bytes(1099) + b"\2"),
    "typed bool of 2": _bad(TensorProto.BOOL, 1100, int32_data=[2] * 1100),
    "int4 with a tail": _bad(TensorProto.INT4, 2999, raw_data=b"\xff" * 1500),
    "uint2 with a tail": _bad(BY_NAME["UINT2"].number, 5999, raw_data=b"\xff" * 1500),
    "float6 with a tail": _bad(BY_NAME["FLOAT6E2M3"].number, 1999, raw_data=b"\xff" * 1500),
    "external": external(raw_tensor("layer/w", dims=(300,)), "layer.bin"),
    "small and external": external(raw_tensor("layer/w", dims=(3,)), "layer.bin"),
    "external with data": external(raw_tensor("layer/w", dims=(300,)), "layer.bin"),
}
BAD_TENSORS["external with data"].raw_data = bytes(1200)


@pytest.fixture(params=[{}, {"model.onnxa": b"an old archive"}], ids=["nothing", "an archive"])
def untouched(request: pytest.FixtureRequest, target: Path) -> Iterator[Path]:
    """A target that is as it was after the test: missing, or with its old content."""
    for content in request.param.values():
        target.write_bytes(content)
    yield target
    assert contents(target.parent) == request.param


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_a_bad_tensor_is_named_and_nothing_is_left(untouched: Path, name: str) -> None:
    model = _with_tensor(BAD_TENSORS[name])
    before = serialized(model)
    with pytest.raises(ArchiveFormatError, match="layer/w") as caught:
        onnxarchive.save(model, untouched)
    assert serialized(model) == before
    if name == "external":
        assert "onnxarchive.convert" in str(caught.value)
        assert "load the model with its external data" in str(caught.value)
    elif name == "too short":
        assert re.search(r"1200 bytes for FLOAT of shape \[300\].*1199", str(caught.value))


@pytest.mark.parametrize("field", ["raw_data", "float_data"])
def test_data_of_an_external_tensor_is_refused_with_the_remedy(target: Path, field: str) -> None:
    model = _with_tensor(external(raw_tensor("layer/w", dims=(2,)), "layer.bin"))
    tensor = model.graph.initializer[2]
    if field == "raw_data":  # as onnx.external_data_helper.convert_model_to_external_data leaves it
        tensor.raw_data = bytes(8)
    else:
        tensor.float_data.extend([1, 2])
    with pytest.raises(ArchiveFormatError) as caught:
        onnxarchive.save(model, target)
    assert str(caught.value).endswith(
        "tensor 'layer/w' (graph.initializer[2]): there is data beside data_location EXTERNAL, in "
        f"{field}; to store the data in these fields, clear external_data and set data_location "
        "to DEFAULT; to keep the external data, clear "
        f"{field}"
    )
    assert not target.exists()
    tensor.ClearField("external_data")
    tensor.data_location = TensorProto.DEFAULT
    onnxarchive.save(model, target)
    assert normalised(onnxarchive.load(target)) == normalised(model)


@pytest.mark.parametrize(
    ("name", "rule"), [("bool of 2", "TENSOR-5"), ("int4 with a tail", "TENSOR-4")]
)
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_value_that_breaks_a_rule_is_an_error_that_names_the_rule(
    target: Path, name: str, rule: str, is_shared: bool
) -> None:
    model = _with_tensor(BAD_TENSORS[name])
    with pytest.raises(ArchiveFormatError) as caught:
        onnxarchive.save(model, target, models={"other": model} if is_shared else None)
    assert (caught.value.rule, caught.value.entry) == (rule, "layer_w")


_good = _with_tensor(raw_tensor("w", dims=(1000,)))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"progress": _interrupt}, KeyboardInterrupt),
        ({"progress": _divide}, ZeroDivisionError),
        ({"alignment": 63}, ValueError),
        ({"assets": {"missing": "/nowhere/at/all"}}, FileNotFoundError),
        ({"assets": {"directory": "/"}}, ArchiveFormatError),
        ({"assets": {"../a": b""}}, ValueError),
        ({"assets": {"a": b"", "A": b""}}, ValueError),
    ],
)
def test_a_failure_leaves_nothing_and_an_existing_target_alone(
    untouched: Path, options: dict[str, Any], error: type[BaseException]
) -> None:
    before = serialized(_good)
    with pytest.raises(error):
        onnxarchive.save(_good, untouched, **options)
    assert serialized(_good) == before


@pytest.mark.parametrize("limit", [0, 100, 4096, 10_000, 20_000])
def test_a_full_disk_leaves_nothing_and_an_existing_target_alone(
    untouched: Path, limit: int
) -> None:
    before = serialized(_good)
    assert len(saved(_good)) > 20_000
    with limited(resource.RLIMIT_FSIZE, limit), pytest.raises(OSError, match="File too large"):
        onnxarchive.save(_good, untouched)
    assert serialized(_good) == before


def test_a_write_error_of_an_open_file_is_passed_on() -> None:
    with open("/dev/full", "wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        onnxarchive.save(_good, file)


def test_the_path_of_a_model_is_refused_with_the_remedy(target: Path) -> None:
    model: Any = "model.onnx"
    with pytest.raises(TypeError, match=r"found <class 'str'>; convert takes a path"):
        onnxarchive.save(model, target)
    assert not target.exists()


def test_a_model_without_graph_is_refused(tmp_path: Path, target: Path) -> None:
    with pytest.raises(ArchiveFormatError, match="no graph"):
        onnxarchive.save(onnx.ModelProto(ir_version=10), target)
    assert list(tmp_path.iterdir()) == []


def test_a_model_too_large_without_its_tensors_is_refused_with_the_remedy(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onnxarchive.model.model_proto.SIZE_LIMIT", 2000)
    model = model_of(*(raw_tensor(f"w{index}", dims=(200,)) for index in range(3)))
    with pytest.raises(ArchiveFormatError, match="size_threshold") as caught:
        onnxarchive.save(model, target)
    assert caught.value.rule == "MODEL-2"
    assert list(tmp_path.iterdir()) == []
    onnxarchive.save(model, target, size_threshold=100)
    assert onnxarchive.load(target) == model


# Assets


def test_assets_come_from_bytes_and_files_in_the_order_of_their_paths(
    tmp_path: Path, target: Path
) -> None:
    (tmp_path / "labels.txt").write_bytes(b"cat\ndog\n")
    (tmp_path / "empty").write_bytes(b"")
    array = np.arange(3, dtype=np.int32)
    assets: dict[str, tuple[Any, bytes]] = {
        "z/labels.txt": (tmp_path / "labels.txt", b"cat\ndog\n"),
        "labels.txt": (str(tmp_path / "labels.txt"), b"cat\ndog\n"),
        "bytes": (b"1", b"1"),
        "bytearray": (bytearray(b"2"), b"2"),
        "memoryview": (array.data, array.tobytes()),
        "größe/重み": (b"3", b"3"),
        "empty": (tmp_path / "empty", b""),
        "nothing": (b"", b""),
    }
    model = model_of(raw_tensor("w", dims=(300,)))
    onnxarchive.save(model, target, assets={name: given for name, (given, _) in assets.items()})
    assert onnxarchive.check(target, full=True) == []
    with onnxarchive.open(target) as archive:
        assert next(iter(archive.entries)) == "w"
        found = [(path, bytes(data)) for path, data in archive.assets.items()]
    assert found == sorted((name, content) for name, (_, content) in assets.items())
    with zipfile.ZipFile(target) as file:
        assert file.read("assets/größe/重み") == b"3"


@pytest.mark.parametrize(
    ("assets", "message"),
    [
        ({5: b""}, "expected the path of an asset as a string, found 5"),
        ({"k": 5}, "expected bytes or the path of a file for the asset 'k', found int"),
    ],
)
def test_assets_of_other_types_are_refused_by_name(
    target: Path, assets: dict[Any, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        onnxarchive.save(model_of(), target, assets=assets)
    assert not target.exists()


def test_assets_may_be_many_more_than_files_may_be_open(tmp_path: Path, target: Path) -> None:
    paths = {}
    for index in range(150):
        paths[f"a{index}"] = tmp_path / f"a{index}"
        paths[f"a{index}"].write_bytes(b"%d" % index)
    with limited(resource.RLIMIT_NOFILE, 100):
        onnxarchive.save(model_of(raw_tensor("w")), target, assets=paths)
    with onnxarchive.open(target) as archive:
        assert len(archive.assets) == 150


# Memory


TENSORS = {
    "raw": ('raw_tensor("w", onnx.TensorProto.UINT8, (16 << 20,))', 20, 56 * MIB),
    "typed": (
        'onnx.TensorProto(name="w", data_type=1, dims=[1 << 20], float_data=[1.0] * (1 << 20))',
        30,
        24 * MIB,
    ),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_saving_takes_memory_for_a_tensor_or_two_at_a_time(target: Path, kind: str) -> None:
    tensor, count, most = TENSORS[kind]
    code = f"""
{MEASURE_MEMORY}
import onnx, onnxarchive
from models import model_of, raw_tensor
model = model_of(raw_tensor("first"))
onnxarchive.save(model, sys.argv[1])
tensor = {tensor}
for index in range({count}):
    model.graph.initializer.append(tensor)
print(growth(lambda: onnxarchive.save(model, sys.argv[1], progress=sample, jobs=1)))
"""
    assert int(run_python(code, target)) < most
    assert target.stat().st_size > 100 * MIB
    target.unlink()  # pytest keeps what is left for days
