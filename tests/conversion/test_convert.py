from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import stat
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from limits import limited, umask
from models import (
    MEASURE_MEMORY,
    attribute,
    entry_of,
    every_tensor,
    external,
    flip_byte,
    full_model,
    keys_of,
    mixed_model,
    model_of,
    model_protos,
    nested_model,
    node,
    normalised,
    raw_tensor,
    run_model,
    run_python,
    runnable_model,
    string_tensor,
    typed,
)
from onnx import TensorProto, helper, numpy_helper
from outcomes import count_outcome, requires_outcomes
from sparse_files import write_int64_data

import onnxarchive
from onnxarchive import ArchiveError, ArchiveFormatError, ChecksumError, UnsupportedFeatureError
from onnxarchive.writing import plan as plan_module

MIB = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnxa"
    onnxarchive.save(mixed_model(), path, assets={"a/labels.txt": b"cat\n"})
    return path


def _left(path: Path) -> dict[str, bytes]:
    return {it.name: it.read_bytes() for it in path.parent.iterdir() if it != path}


# Convert


in_one_directory = settings(
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.sweep
@in_one_directory
@given(
    model=model_protos(),
    size_threshold=st.sampled_from([0, 1, 64, 1024]),
    convert_attribute=st.booleans(),
)
def test_any_model_converts_to_an_archive_and_exports_unchanged(
    tmp_path: Path, model: onnx.ModelProto, size_threshold: int, convert_attribute: bool
) -> None:
    options: dict[str, Any] = {"size_threshold": size_threshold}
    options["convert_attribute"] = convert_attribute
    source, archive = tmp_path / "m.onnx", tmp_path / "m.onnxa"
    source.write_bytes(model.SerializeToString())
    onnxarchive.convert(source, archive, **options)
    assert source.read_bytes() == model.SerializeToString()
    assert onnxarchive.check(archive, full=True) == []
    raw = normalised(model)
    assert normalised(onnxarchive.load(archive)) == raw

    source.write_bytes(raw.SerializeToString())
    onnxarchive.convert(source, archive, **options)
    onnxarchive.save(raw, tmp_path / "saved.onnxa", **options)
    assert archive.read_bytes() == (tmp_path / "saved.onnxa").read_bytes()

    onnxarchive.export(archive, tmp_path / "single.onnx")
    assert onnx.load(tmp_path / "single.onnx", load_external_data=False) == raw
    onnxarchive.export(archive, tmp_path / "beside.onnx", external_data="data")
    assert normalised(onnx.load(tmp_path / "beside.onnx")) == raw
    onnxarchive.convert(tmp_path / "beside.onnx", tmp_path / "again.onnxa", **options)
    assert (tmp_path / "again.onnxa").read_bytes() == archive.read_bytes()


def _small_model() -> bytes:
    graph = onnx.GraphProto(initializer=[raw_tensor("inner", dims=(300,))])
    model = model_of(
        raw_tensor("w", dims=(300,)),
        typed(raw_tensor("v", TensorProto.INT32, (300,))),
        typed(raw_tensor("t", TensorProto.DOUBLE, (3,))),
        raw_tensor("p", TensorProto.INT4, (2101,)),
        string_tensor("s"),
    )
    model.graph.node.append(node(attribute("g", g=graph), attribute("t", t=raw_tensor("t"))))
    return model.SerializeToString()


SMALL_MODEL = _small_model()
# Offsets of most bytes that are no weights: everything but long runs of raw data.
_STRUCTURE = [
    offset
    for offset in range(len(SMALL_MODEL))
    if any(
        abs(offset - SMALL_MODEL.find(part)) < 40
        for part in (b"graph", b"\x01w", b"\x01v", b"\x01t", b"\x01p", b"inner", b"Anything")
    )
]


@pytest.mark.sweep
@requires_outcomes(accepted=20, refused=20)
@settings(in_one_directory, max_examples=600)
@given(
    changes=st.lists(
        st.tuples(
            st.sampled_from(_STRUCTURE) | st.integers(0, len(SMALL_MODEL) - 1),
            st.sampled_from(["set", "insert", "delete"]),
            st.sampled_from([0, 1, 2, 7, 8, 10, 14, 22, 34, 42, 58, 66, 74, 112, 127, 128, 255]),
        ),
        min_size=1,
        max_size=4,
    ),
    size_threshold=st.sampled_from([0, 1024]),
    convert_attribute=st.booleans(),
)
def test_a_damaged_model_is_refused_or_gives_a_sound_archive(
    tmp_path: Path,
    changes: list[tuple[int, str, int]],
    size_threshold: int,
    convert_attribute: bool,
) -> None:
    data = bytearray(SMALL_MODEL)
    for offset, kind, byte in changes:
        if kind == "set":
            data[offset : offset + 1] = bytes([byte])
        elif kind == "insert":
            data[offset:offset] = bytes([byte])
        else:
            del data[offset : offset + 1]
    source, archive = tmp_path / "m.onnx", tmp_path / "m.onnxa"
    source.write_bytes(data)
    archive.unlink(missing_ok=True)
    options: dict[str, Any] = {"size_threshold": size_threshold}
    options["convert_attribute"] = convert_attribute
    try:
        with warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter("always", UserWarning)
            onnxarchive.convert(source, archive, **options)
    except ArchiveError as error:
        assert str(error).startswith(f"{source}: ")
        assert not archive.exists()
        count_outcome("refused")
        return
    count_outcome("accepted")
    assert onnxarchive.check(archive, full=True) == []
    if notes:  # `save` clears no unused bits
        assert all("unused bits in the last byte were cleared" in str(it.message) for it in notes)
        return
    loaded = onnxarchive.load(archive)
    with onnxarchive.open(archive) as opened:
        for name in opened.tensors:
            with contextlib.suppress(ArchiveError):
                assert opened.tensors[name].size >= 0
    # The model comes back, with raw tensors.
    model = onnx.ModelProto.FromString(bytes(data))
    for one, other in zip(every_tensor(model), every_tensor(loaded), strict=True):
        assert (one.data_type, one.dims, one.name) == (other.data_type, other.dims, other.name)
    onnxarchive.save(model, tmp_path / "saved.onnxa", **options)
    assert normalised_where_possible(onnxarchive.load(tmp_path / "saved.onnxa")) == (
        normalised_where_possible(loaded)
    )


def normalised_where_possible(model: onnx.ModelProto) -> onnx.ModelProto:
    """As `normalised`, but tensors that onnx cannot read stay as they are."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for tensor in every_tensor(copy):
        with contextlib.suppress(Exception):
            one = normalised(model_of(tensor)).graph.initializer[0]
            tensor.CopyFrom(one)
    return copy


def test_converting_reports_its_progress(tmp_path: Path) -> None:
    model = model_of(raw_tensor("w", TensorProto.UINT8, (20 * MIB,)), raw_tensor("v"))
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    calls: list[tuple[int, int]] = []
    onnxarchive.convert(
        tmp_path / "m.onnx", tmp_path / "m.onnxa", progress=lambda *call: calls.append(call)
    )
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert {call[1] for call in calls} == {done[-1]}
    assert len(done) >= 3
    with onnxarchive.open(tmp_path / "m.onnxa") as archive:
        assert done[-1] == sum(entry.nbytes for entry in archive.entries.values())


@pytest.mark.parametrize(
    "fields",
    [
        {"data_type": 1, "dims": [600], "raw_data": bytes(2399)},
        {"data_type": 1, "dims": [600], "raw_data": bytes(2401)},
        {"data_type": 1, "dims": [600], "float_data": [0] * 599},
        {"data_type": 6, "dims": [2000], "int32_data": [7] * 1999},
        {"data_type": 9, "dims": [2000], "raw_data": b"\2" * 2000},
        {"data_type": 9, "dims": [2000], "int32_data": [2] * 2000},
        {"data_type": 22, "dims": [3001], "raw_data": b"\xff" * 1500},
        {"data_type": 1, "dims": [600]},
    ],
    ids=["short", "long", "short field", "varints", "bool", "bool field", "int4", "nothing"],
)
def test_a_bad_tensor_of_a_source_is_named_and_nothing_is_left(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    tensor = TensorProto(name="odd/one", **fields)
    source = tmp_path / "m.onnx"
    source.write_bytes(model_of(raw_tensor("w", dims=(600,)), tensor).SerializeToString())
    with pytest.raises(ArchiveFormatError, match="'odd/one'") as caught:
        onnxarchive.convert(source, tmp_path / "m.onnxa")
    assert caught.value.path == str(source)
    assert os.listdir(tmp_path) == ["m.onnx"]


@pytest.mark.parametrize("name", ["m.onnx", "link", "m.data", "asset"])
def test_a_source_is_not_written_over(tmp_path: Path, name: str) -> None:
    onnx.save(mixed_model(), tmp_path / "m.onnx", save_as_external_data=True, location="m.data")
    (tmp_path / "link").symlink_to("m.onnx")
    (tmp_path / "asset").write_bytes(b"cat")
    before = _left(tmp_path / "nothing")
    with pytest.raises(ValueError, match="input"):
        onnxarchive.convert(tmp_path / "m.onnx", tmp_path / name, assets={"a": tmp_path / "asset"})
    assert _left(tmp_path / "nothing") == before


# Export to one file


@pytest.mark.parametrize("options", [{}, {"size_threshold": 0, "convert_attribute": True}], ids=str)
def test_an_exported_model_equals_the_original(tmp_path: Path, options: dict[str, Any]) -> None:
    for model in (mixed_model(), full_model(), nested_model(20), runnable_model(), model_of()):
        onnxarchive.save(model, tmp_path / "m.onnxa", **options)
        onnxarchive.export(tmp_path / "m.onnxa", tmp_path / "m.onnx")
        exported = onnx.load(tmp_path / "m.onnx", load_external_data=False)
        assert exported == model
        assert exported.SerializeToString(deterministic=True) == model.SerializeToString(
            deterministic=True
        )
    assert sorted(os.listdir(tmp_path)) == ["m.onnx", "m.onnxa"]


def test_onnxruntime_runs_an_exported_model(tmp_path: Path) -> None:
    model = runnable_model()
    onnx.save(model, tmp_path / "original.onnx")
    onnxarchive.convert(tmp_path / "original.onnx", tmp_path / "m.onnxa")
    onnxarchive.export(tmp_path / "m.onnxa", tmp_path / "single.onnx")
    onnxarchive.export(tmp_path / "m.onnxa", tmp_path / "e.onnx", external_data="e.data")
    onnxarchive.extract(tmp_path / "m.onnxa", tmp_path / "extracted")
    rows = model.graph.input[0].type.tensor_type.shape.dim[1].dim_value
    x = np.random.default_rng(0).standard_normal((2, rows), np.float32)
    (expected,) = run_model(tmp_path / "original.onnx", x=x)
    for name in ("single.onnx", "e.onnx", "extracted/__MODEL_PROTO"):
        (found,) = run_model(tmp_path / name, x=x)
        assert np.array_equal(found, expected)
        onnx.checker.check_model(str(tmp_path / name), full_check=True)


def test_a_model_over_the_limit_is_not_exported_to_one_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with onnxarchive.open(path) as archive:
        size = sum(archive.entries[name].nbytes for name in ("__MODEL_PROTO", *keys_of(archive)))
    monkeypatch.setattr("onnxarchive.model.model_proto.SIZE_LIMIT", size)
    with pytest.raises(UnsupportedFeatureError, match="external_data=") as caught:
        onnxarchive.export(path, path.parent / "m.onnx")
    assert caught.value.path == str(path)
    assert _left(path) == {}
    onnxarchive.export(path, path.parent / "m.onnx", external_data="m.data")
    assert normalised(onnx.load(path.parent / "m.onnx")) == mixed_model()


def test_assets_do_not_count_towards_the_limit_of_one_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnxarchive.save(mixed_model(), path, assets={"large": bytes(1 << 20)})
    monkeypatch.setattr("onnxarchive.model.model_proto.SIZE_LIMIT", 1 << 20)
    onnxarchive.export(path, path.parent / "m.onnx")
    assert onnx.load(path.parent / "m.onnx") == mixed_model()


# Export beside a data file


def _references(model: onnx.ModelProto) -> list[dict[str, str]]:
    return [
        {pair.key: pair.value for pair in tensor.external_data}
        for tensor in every_tensor(model)
        if tensor.data_location == TensorProto.EXTERNAL
    ]


@pytest.mark.parametrize("options", [{}, {"size_threshold": 0, "convert_attribute": True}], ids=str)
@pytest.mark.parametrize(
    "build", [mixed_model, full_model, lambda: nested_model(20), runnable_model]
)
def test_onnx_loads_a_model_beside_its_data(
    tmp_path: Path, build: Callable[[], onnx.ModelProto], options: dict[str, Any]
) -> None:
    model = build()
    onnxarchive.save(model, tmp_path / "m.onnxa", **options)
    (tmp_path / "out").mkdir()
    onnxarchive.export(
        tmp_path / "m.onnxa", tmp_path / "out" / "m.onnx", external_data="weights of m.bin"
    )
    assert sorted(os.listdir(tmp_path / "out")) == ["m.onnx", "weights of m.bin"]
    assert normalised(onnx.load(tmp_path / "out" / "m.onnx")) == model

    references = _references(onnx.load(tmp_path / "out" / "m.onnx", load_external_data=False))
    end = 0
    for reference in sorted(references, key=lambda it: int(it["offset"])):
        assert list(reference) == ["location", "offset", "length"]
        assert reference["location"] == "weights of m.bin"
        offset, length = int(reference["offset"]), int(reference["length"])
        assert offset % 4096 == 0
        assert end <= offset < end + 4096
        assert length > 0
        end = offset + length
    assert (tmp_path / "out" / "weights of m.bin").stat().st_size == end
    assert references or build is not mixed_model


def _model_with_shape(
    op_type: str, dims: list[int], shape: np.ndarray[Any, Any], outputs: int = 1, **attributes: Any
) -> onnx.ModelProto:
    """A model of a MatMul, and of a node whose second input gives the shape of its outputs."""
    names = [f"y{index}" for index in range(outputs)]
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["product"]),
            helper.make_node(op_type, ["product", "shape"], names, **attributes),
        ],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [*dims, 64])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names],
        [
            numpy_helper.from_array(np.ones((64, 64), np.float32), "w"),
            numpy_helper.from_array(shape, "shape"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


_PARTS = _model_with_shape("Split", [600], np.full(300, 2, np.int64), 300, axis=0)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (_PARTS, {}),  # sizes of 2,400 bytes
        (_PARTS, {"size_threshold": 0}),
        (_model_with_shape("Reshape", [2, 8], np.array([-1, 32])), {"size_threshold": 0}),
        (_model_with_shape("Pad", [2], np.array([0, 1, 2, 3])), {"size_threshold": 0}),
        (_model_with_shape("Unsqueeze", [2], np.array([0])), {"size_threshold": 0}),
        (_model_with_shape("Expand", [2], np.array([3, 2, 64])), {"size_threshold": 0}),
        (_model_with_shape("Tile", [2], np.array([2, 2])), {"size_threshold": 0}),
    ],
    ids=lambda it: str(it) if isinstance(it, dict) else it.graph.node[1].op_type,
)
def test_tools_read_from_an_export_the_shapes_that_they_read_from_a_link(
    tmp_path: Path, model: onnx.ModelProto, options: dict[str, Any]
) -> None:
    archive, link, beside = (tmp_path / name for name in ("m.onnxa", "link.onnx", "beside.onnx"))
    onnxarchive.save(model, archive, **options)
    onnxarchive.link(archive, link)
    onnxarchive.export(archive, beside, external_data="beside.data")
    x = np.ones([dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim], "f")
    for expected, found in zip(run_model(link, x=x), run_model(beside, x=x), strict=True):
        assert np.array_equal(expected, found)
    onnx.shape_inference.infer_shapes_path(os.fspath(beside), os.fspath(tmp_path / "inferred"))
    inferred = onnx.load(tmp_path / "inferred", load_external_data=False).graph
    assert all(value.type.tensor_type.HasField("shape") for value in inferred.output)
    for path in (link, beside):
        initializers = onnx.load(path, load_external_data=False).graph.initializer
        outside = [it.name for it in initializers if it.data_location == TensorProto.EXTERNAL]
        assert outside == ["w"]


def test_space_between_tensors_is_zero(path: Path) -> None:
    onnxarchive.export(path, path.parent / "m.onnx", external_data="m.data")
    data = bytearray((path.parent / "m.data").read_bytes())
    model = onnx.load(path.parent / "m.onnx", load_external_data=False)
    for reference in _references(model):
        offset, length = int(reference["offset"]), int(reference["length"])
        data[offset : offset + length] = bytes(length)
    assert data == bytes(len(data))
    assert len(_references(model)) == 3


def test_an_archive_without_large_tensors_is_exported_with_external_data(tmp_path: Path) -> None:
    model = model_of(raw_tensor("w"))
    onnxarchive.save(model, tmp_path / "m.onnxa")
    onnxarchive.export(tmp_path / "m.onnxa", tmp_path / "m.onnx", external_data="m.data")
    assert onnx.load(tmp_path / "m.onnx") == model


@pytest.mark.parametrize(
    "name", ["", ".", "..", "m.onnx", "a/b", "../m.data", "/m.data", "./m.data", "a/"]
)
def test_the_name_of_a_data_file_is_plain_and_not_that_of_the_model(path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="external_data"):
        onnxarchive.export(path, path.parent / "m.onnx", external_data=name)
    assert _left(path) == {}


def test_a_data_file_is_no_link_to_the_model(path: Path) -> None:
    (path.parent / "m.data").symlink_to("m.onnx")
    with pytest.raises(ValueError, match=r"'m\.data', which is the same file"):
        onnxarchive.export(path, path.parent / "m.onnx", external_data="m.data")


def test_exporting_replaces_existing_files_and_keeps_their_permissions(path: Path) -> None:
    (path.parent / "m.onnx").write_bytes(b"old")
    (path.parent / "m.onnx").chmod(0o600)
    (path.parent / "m.data").write_bytes(bytes(1 << 20))
    onnxarchive.export(path, path.parent / "m.onnx", external_data="m.data")
    assert stat.S_IMODE((path.parent / "m.onnx").stat().st_mode) == 0o600
    assert normalised(onnx.load(path.parent / "m.onnx")) == mixed_model()
    assert (path.parent / "m.data").stat().st_size < 1 << 16


# Failures of export and extract


def _export(path: Path, **options: Any) -> None:
    onnxarchive.export(path, path.parent / "m.onnx", **options)


def _export_data(path: Path, **options: Any) -> None:
    onnxarchive.export(path, path.parent / "m.onnx", external_data="m.data", **options)


def _extract(path: Path, **options: Any) -> None:
    onnxarchive.extract(path, path.parent / "m.onnx", **options)


def _convert(path: Path) -> None:
    onnxarchive.convert(path, path.parent / "m.onnx")


outputs = pytest.mark.parametrize("output", [_export, _export_data, _extract])


@outputs
@pytest.mark.parametrize("entry", ["a_w", "c"])
def test_damaged_data_is_not_written_to_a_new_file(
    path: Path, output: Callable[..., None], entry: str
) -> None:
    flip_byte(path, entry_of(path, entry).data_offset)
    with pytest.raises(ChecksumError, match=entry) as caught:
        output(path)
    assert caught.value.path == str(path)
    assert _left(path) == {}


@outputs
@pytest.mark.parametrize("rule", ["ZIP-7", "ZIP-2"])
def test_a_damaged_header_and_a_file_that_is_no_archive_are_refused(
    path: Path, output: Callable[..., None], rule: str
) -> None:
    if rule == "ZIP-7":
        flip_byte(path, entry_of(path, "c").header_offset)
    else:
        path.write_bytes(b"text")
    with pytest.raises(ArchiveFormatError, match=rule):
        output(path)
    assert _left(path) == {}


@outputs
def test_an_error_of_the_progress_function_leaves_no_file(
    path: Path, output: Callable[..., None]
) -> None:
    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        output(path, progress=stop)
    assert _left(path) == {}


@outputs
def test_progress_goes_up_to_all_bytes(path: Path, output: Callable[..., None]) -> None:
    onnxarchive.save(mixed_model(), path, assets={"x": bytes(9 * MIB)}, size_threshold=0)
    calls: list[tuple[int, int]] = []
    output(path, progress=lambda *call: calls.append(call))
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert {call[1] for call in calls} == {done[-1]}


@outputs
@pytest.mark.parametrize("limit", [0, 5000, 15_000])
def test_a_full_disk_leaves_no_file(path: Path, output: Callable[..., None], limit: int) -> None:
    onnxarchive.save(model_of(*(raw_tensor(n, dims=(4000,)) for n in "abc")), path, assets={})
    with limited(resource.RLIMIT_FSIZE, limit), pytest.raises(OSError, match="File too large"):
        output(path)
    assert _left(path) == {}


@pytest.mark.parametrize("output", [_export, _export_data, _extract, _convert])
def test_a_full_disk_is_reported_before_anything_is_written(
    path: Path, output: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=1 << 40, free=9))
    with pytest.raises(OSError, match=r"\d+ bytes are needed, 9 are free") as raised:
        output(path)
    assert raised.value.errno == errno.ENOSPC
    assert _left(path) == {}
    assert Path(raised.value.filename).parent == path.parent


def test_a_failed_export_leaves_existing_files_alone(path: Path) -> None:
    flip_byte(path, entry_of(path, "c").data_offset)
    old = {"m.onnx": b"old model", "m.data": b"old data"}
    for name, content in old.items():
        (path.parent / name).write_bytes(content)
    for output in (_export, _export_data):
        with pytest.raises(ChecksumError):
            output(path)
        assert _left(path) == old


@pytest.mark.parametrize(
    ("output", "name"), [(_export, "m.onnx"), (_export_data, "m.onnx"), (_export_data, "m.data")]
)
def test_a_directory_as_target_is_refused_and_no_file_is_left(
    path: Path, output: Callable[..., None], name: str
) -> None:
    (path.parent / name).mkdir()
    with pytest.raises(IsADirectoryError):
        output(path)
    assert sorted(os.listdir(path.parent)) == [name, "model.onnxa"]


# Extract


@pytest.mark.parametrize("destination", ["out", "out/", ".", "./", "../out"])
def test_an_archive_is_extracted_to_a_new_or_empty_directory(
    path: Path, destination: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = path.parent / "out"
    monkeypatch.chdir(path.parent)
    if destination.startswith("."):
        target.mkdir()
        monkeypatch.chdir(target)
    onnxarchive.extract(path, destination)
    assert os.path.samefile(destination, target)
    found = {
        str(it.relative_to(target)): it.read_bytes() for it in target.rglob("*") if it.is_file()
    }
    with zipfile.ZipFile(path) as file:
        assert found == {name: file.read(name) for name in file.namelist()}
    assert "assets/a/labels.txt" in found
    assert normalised(onnx.load(target / "__MODEL_PROTO")) == mixed_model()
    assert sorted(os.listdir(path.parent)) == ["model.onnxa", "out"]


@pytest.mark.parametrize("content", ["file", "directory", ".hidden"])
def test_a_directory_that_is_not_empty_is_refused_as_target_of_extract(
    path: Path, content: str
) -> None:
    target = path.parent / "out"
    target.mkdir()
    if content == "directory":
        (target / content).mkdir()
    else:
        (target / content).write_bytes(b"mine")
    with pytest.raises(FileExistsError, match="not empty"):
        onnxarchive.extract(path, target)
    assert os.listdir(target) == [content]
    assert sorted(os.listdir(path.parent)) == ["model.onnxa", "out"]


def test_a_file_as_target_of_extract_is_refused(path: Path) -> None:
    (path.parent / "out").write_bytes(b"mine")
    with pytest.raises(OSError, match="out"):
        onnxarchive.extract(path, path.parent / "out")
    assert _left(path) == {"out": b"mine"}


def test_a_failed_extract_leaves_an_empty_directory_as_it_was(path: Path) -> None:
    flip_byte(path, entry_of(path, "c").data_offset)
    (path.parent / "out").mkdir()
    with pytest.raises(ChecksumError):
        onnxarchive.extract(path, path.parent / "out")
    assert os.listdir(path.parent / "out") == []
    assert sorted(os.listdir(path.parent)) == ["model.onnxa", "out"]


def test_an_extracted_directory_has_the_permissions_of_any_new_one(path: Path) -> None:
    with umask(0o027):
        onnxarchive.extract(path, path.parent / "out")
        (path.parent / "reference").mkdir()
        (path.parent / "reference" / "file").write_bytes(b"")
    for name, reference in (("", ""), ("assets", ""), ("a_w", "file"), ("assets/a", "")):
        found = (path.parent / "out" / name).stat().st_mode
        assert found == (path.parent / "reference" / reference).stat().st_mode


# Memory


def test_a_tensor_of_varints_is_decoded_in_pieces(tmp_path: Path) -> None:
    write_int64_data(tmp_path / "m.onnx", range(0, 1 << 28, 1 << 18), 8 << 10)
    code = f"""
{MEASURE_MEMORY}
import onnx, onnxarchive
print(growth(lambda: onnxarchive.convert(sys.argv[1], sys.argv[1] + "a", progress=sample)))
"""
    assert int(run_python(code, tmp_path / "m.onnx")) < 40 * MIB
    assert (tmp_path / "m.onnxa").stat().st_size > 64 * MIB
    (tmp_path / "m.onnxa").unlink()  # pytest keeps what is left for days


def test_an_archive_is_not_exported_onto_itself(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(ValueError, match="input"):
        onnxarchive.export(path, path)
    with pytest.raises(ValueError, match="input"):
        onnxarchive.export(path, path.parent / "m.onnx", external_data=path.name)
    assert (path.read_bytes(), _left(path)) == (before, {})


def test_a_link_to_its_own_data_is_no_target(path: Path) -> None:
    (path.parent / "q.data").write_bytes(b"old")
    (path.parent / "q.onnx").symlink_to("q.data")
    with pytest.raises(ValueError, match="the same file"):
        onnxarchive.export(path, path.parent / "q.onnx", external_data="q.data")
    assert (path.parent / "q.data").read_bytes() == b"old"


# Tensors that stay in the model


@pytest.mark.parametrize("file_count", [1, 2, 150])
def test_more_tensors_than_files_may_be_open_can_stay_in_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_count: int
) -> None:
    monkeypatch.setattr(plan_module, "MIN_MAPPED_NBYTES", 64)
    tensors = [raw_tensor(f"w{index}", dims=(40 + index,), seed=index) for index in range(150)]
    model = model_of()
    for index, tensor in enumerate(tensors):
        location = f"data{index % file_count}"
        with open(tmp_path / location, "ab") as file:
            located = external(tensor, location, offset=file.tell())
            file.write(tensor.raw_data)
        model.graph.node.append(node(attribute("value", t=located)))
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    with limited(resource.RLIMIT_NOFILE, len(os.listdir("/proc/self/fd")) + 75):
        onnxarchive.convert(path, tmp_path / "model.onnxa")
    found = onnxarchive.load(tmp_path / "model.onnxa")
    assert [it.attribute[0].t for it in found.graph.node] == tensors
