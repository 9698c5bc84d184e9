from __future__ import annotations

import copy
import errno
import gc
import io
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from models import (
    MEASURE_MEMORY,
    NUMBERS,
    attribute,
    break_local_header,
    entry_of,
    external_tensors,
    flip_byte,
    full_model,
    keys_of,
    little_endian,
    model_of,
    node,
    open_below,
    raw_tensor,
    run_python,
    runnable_model,
    string_tensor,
    typed,
)
from onnx import TensorProto, numpy_helper
from processes import at_once
from steps import steps
from versions import needs_compiled_parser

import onnxarchive
from onnxarchive import (
    Archive,
    ArchiveError,
    ArchiveFormatError,
    ChecksumError,
    TensorNotFoundError,
    UnsupportedFeatureError,
)
from onnxarchive.files.local_file import MappedFile
from onnxarchive.model import dtypes

if TYPE_CHECKING:
    from numpy.typing import NDArray


def _values(*tensors: TensorProto) -> dict[str, NDArray[Any]]:
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in tensors}
    return {name: array.astype(little_endian(array.dtype)) for name, array in arrays.items()}


def _nested_model() -> onnx.ModelProto:
    """Two large initializers, a small one, a string, and one in a subgraph."""
    model = model_of(
        raw_tensor("layer.0/weight", dims=(20, 30), seed=1),
        raw_tensor("layer.0/bias", TensorProto.BFLOAT16, (700,), seed=2),
        raw_tensor("scale", dims=(), seed=3),
        string_tensor("labels", ["a", "b"]),
    )
    inner = onnx.GraphProto(initializer=[raw_tensor("inner", TensorProto.INT8, (2000,), seed=4)])
    model.graph.node.append(node(attribute("g", g=inner)))
    return model


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnxa"
    onnxarchive.save(_nested_model(), path, assets={"a/labels.txt": b"cat\n", "empty": b""})
    return path


@pytest.fixture
def archive(path: Path) -> Iterator[Archive]:
    with onnxarchive.open(path) as archive:
        yield archive


# Contents


def test_entries_are_shown_in_the_order_of_the_archive(path: Path, archive: Archive) -> None:
    names = ["layer_0_weight", "layer_0_bias", "inner", "assets/a/labels.txt", "assets/empty"]
    assert list(archive.entries) == [*names, "__MODEL_PROTO"]
    data = path.read_bytes()
    end = 0
    for name, entry in archive.entries.items():
        assert entry.name == name
        assert entry.header_offset == end
        assert data[entry.header_offset :].startswith(b"PK\x03\x04")
        assert entry.data_offset % 64 == 0
        end = entry.data_offset + entry.nbytes
        assert bytes(archive.read(name)) == data[entry.data_offset : end]
    assert data[end:].startswith(b"PK\x01\x02")
    with pytest.raises(TypeError):
        archive.entries["x"] = archive.entries["inner"]  # type: ignore[index]


def test_initializers_of_the_main_graph_and_its_subgraphs_are_tensors(archive: Archive) -> None:
    expected = _values(*_nested_model().graph.initializer)
    expected |= _values(*_nested_model().graph.node[0].attribute[0].g.initializer)
    assert list(archive.tensors) == ["layer.0/weight", "layer.0/bias", "scale", "labels", "inner"]
    assert len(archive.tensors) == 5
    assert dict(archive.tensors).keys() == expected.keys()
    for name, array in archive.tensors.items():
        assert array.dtype == expected[name].dtype
        assert array.shape == expected[name].shape
        assert array.tobytes() == expected[name].tobytes() or array.dtype == object
        assert not array.flags.writeable
    assert archive.tensors["labels"].tolist() == ["a", "b"]
    assert "inner" in archive.tensors
    assert "layer_0_weight" not in archive.tensors
    assert archive.tensors.get("layer_0_weight") is None


def test_the_key_of_an_initializer_is_found_by_its_name(archive: Archive) -> None:
    assert archive.tensors.key("layer.0/weight") == "layer_0_weight"
    assert archive.tensors.key("scale") is None  # the model holds it
    with pytest.raises(TensorNotFoundError, match="'layer_0_weight'"):
        archive.tensors.key("layer_0_weight")


def test_the_model_is_parsed_once_and_names_its_keys(archive: Archive) -> None:
    assert archive.model is archive.model
    located = archive.model.graph.initializer[0]
    assert located.data_location == TensorProto.EXTERNAL
    assert located.external_data[0].value == "layer_0_weight"
    assert archive.model.graph.initializer[2].HasField("raw_data")


def test_assets_are_shown_by_their_path(archive: Archive) -> None:
    assert list(archive.assets) == ["a/labels.txt", "empty"]
    assert len(archive.assets) == 2
    assert archive.assets["a/labels.txt"] == b"cat\n"
    assert archive.assets["empty"] == b""
    assert "empty" in archive.assets
    assert "assets/empty" not in archive.assets
    with pytest.raises(TensorNotFoundError, match="'a/nothing'"):
        archive.assets["a/nothing"]


def test_an_archive_and_its_tensors_have_a_short_repr(path: Path, archive: Archive) -> None:
    assert repr(archive) == f"<onnxarchive.Archive {str(path)!r}, 6 entries>"
    assert repr(archive.tensors) == f"<5 tensors of {str(path)!r}>"
    assert archive.path == str(path)


def test_an_archive_without_tensors_is_an_archive(path: Path) -> None:
    onnxarchive.save(model_of(), path, assets={})
    with onnxarchive.open(path) as archive:
        assert list(archive.entries) == ["__MODEL_PROTO"]
        assert len(archive.tensors) == len(archive.assets) == 0
        archive.verify()
    assert onnxarchive.load(path) == model_of()


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("size_threshold", [0, 1 << 40])
def test_tensors_of_every_type_are_the_arrays_of_onnx(
    path: Path, name: str, size_threshold: int
) -> None:
    shapes = enumerate([(), (0,), (7,), (2, 3)])
    tensors = [raw_tensor(f"raw{it}", NUMBERS[name], dims) for it, dims in shapes]
    in_fields = [typed(it) for it in tensors]
    for tensor in in_fields:
        tensor.name = tensor.name.replace("raw", "typed")
    onnxarchive.save(model_of(*tensors, *in_fields), path, size_threshold=size_threshold, assets={})
    with onnxarchive.open(path) as archive:
        for tensor, expected in zip(tensors * 2, [*tensors, *in_fields], strict=True):
            array = archive.tensors[expected.name]
            reference = numpy_helper.to_array(expected)
            reference = reference.astype(little_endian(reference.dtype))
            assert (array.dtype, array.shape) == (reference.dtype, tuple(tensor.dims))
            assert array.tobytes() == reference.tobytes()
            assert not array.flags.writeable
            if size_threshold == 0:
                assert bytes(archive.read(expected.name)) == tensor.raw_data
                assert archive.tensor_by_key(expected.name).tobytes() == reference.tobytes()


@pytest.mark.skipif(sys.maxsize < 1 << 40, reason="numpy's shapes have at most 2 GiB")
def test_tensors_with_a_zero_among_large_dims_are_read(path: Path) -> None:
    dims = (0, 1 << 40, 3)
    onnxarchive.save(model_of(raw_tensor("w", dims=dims)), path, size_threshold=0, assets={})
    with onnxarchive.open(path) as archive:
        assert archive.tensors["w"].shape == dims


@pytest.mark.parametrize(
    ("data_type", "dims", "data", "found"),
    [
        (0, [1], {"raw_data": bytes(4)}, r"cannot hold this tensor: data type 0 and dims \[1\]$"),
        (99, [1], {"raw_data": bytes(4)}, r"cannot hold this tensor: data type 99 and dims \[1\]$"),
        (1, [-1], {"raw_data": bytes(4)}, r"cannot hold this tensor: data type 1 and dims \[-1\]$"),
        (
            1,
            [1 << 33, 0, 1 << 33],
            {"raw_data": b""},
            "cannot hold this tensor: data type 1 and dims",
        ),
        (1, [2], {"raw_data": bytes(4)}, "expected 8 bytes for FLOAT of shape .*, found 4$"),
        (8, [1], {"raw_data": bytes(4)}, "with wrong string_data"),
        (8, [2], {"string_data": [b"a"]}, r"type 8 and dims \[2\] with wrong string_data: "),
        (8, [1], {"string_data": [b"\xff"]}, "with wrong string_data: .*utf-8"),
        (
            1,
            [1],
            {"segment": TensorProto.Segment(end=4)},
            "cannot hold this tensor: a segment of a tensor",
        ),
    ],
)
def test_the_error_of_a_tensor_that_makes_no_array_names_tensor_and_fault(
    path: Path, data_type: int, dims: list[int], data: dict[str, Any], found: str
) -> None:
    tensor = TensorProto(name="odd/one", data_type=data_type, dims=dims, **data)
    onnxarchive.save(model_of(tensor, raw_tensor("w")), path, assets={})
    with onnxarchive.open(path) as archive:
        with pytest.raises(ArchiveFormatError, match=f"odd/one.*{found}") as caught:
            archive.tensors["odd/one"]
        assert caught.value.path == str(path)
        assert archive.tensors["w"].shape == (4,)


def test_tensors_outside_initializers_are_reached_by_their_key(path: Path) -> None:
    model = full_model()
    onnxarchive.save(model, path, convert_attribute=True, assets={})
    with onnxarchive.open(path) as archive:
        assert len(archive.tensors) == 8
        assert "function.t" not in archive.tensors
        for name in ("function_t", "main_t", "default", "initialization_a_tensors1"):
            assert archive.tensor_by_key(name).shape == (300,)
        indices = archive.tensor_by_key("main_sparse_tensor_indices")
        assert indices.dtype == np.dtype("<i8")
        with pytest.raises(TensorNotFoundError, match="'__MODEL_PROTO'"):
            archive.tensor_by_key("__MODEL_PROTO")
        with pytest.raises(TensorNotFoundError, match=r"'main\.t'"):
            archive.tensor_by_key("main.t")


# Names that several graphs have


@pytest.fixture
def branches(path: Path) -> Iterator[Archive]:
    """An If whose branches both have a `w` and a small `b`, besides other names."""
    model = model_of(raw_tensor("own", dims=(300,)))
    graphs = [
        onnx.GraphProto(
            initializer=[
                raw_tensor("w", dims=(300,), seed=seed),
                raw_tensor("b", dims=(3,), seed=seed),
                raw_tensor(f"own{seed}", dims=(300,), seed=seed),
            ]
        )
        for seed in (1, 2)
    ]
    model.graph.node.append(
        node(attribute("then_branch", g=graphs[0]), attribute("else_branch", g=graphs[1]))
    )
    onnxarchive.save(model, path, assets={})
    with onnxarchive.open(path) as archive:
        yield archive


def test_a_name_of_two_graphs_is_ambiguous_and_its_keys_are_named(branches: Archive) -> None:
    with pytest.raises(TensorNotFoundError) as caught:
        branches.tensors["w"]
    assert str(caught.value) == (
        f"{branches.path}: several initializers have the name 'w'; take tensor_by_key('w'), "
        "tensor_by_key('w_2')"
    )
    for key, seed in (("w", 1), ("w_2", 2)):
        expected = numpy_helper.to_array(raw_tensor("w", dims=(300,), seed=seed))
        assert branches.tensor_by_key(key).tobytes() == expected.tobytes()


def test_an_ambiguous_name_is_not_among_the_tensors(branches: Archive) -> None:
    assert list(branches.tensors) == ["own", "own1", "own2"]
    assert len(branches.tensors) == 3
    assert "w" not in branches.tensors
    assert branches.tensors.get("w") is None
    assert len(dict(branches.tensors)) == 3


def test_the_error_of_an_ambiguous_name_says_where_it_occurs(branches: Archive) -> None:
    with pytest.raises(TensorNotFoundError) as caught:
        branches.tensors["b"]
    for index in range(2):
        where = f"model.graph.node[0].attribute[{index}].g.initializer[1]"
        assert where in str(caught.value)


def test_the_message_for_a_name_of_ten_initializers_names_eight(path: Path) -> None:
    model = model_of(raw_tensor("w", dims=(300,)))
    for seed in range(9):
        graph = onnx.GraphProto(initializer=[raw_tensor("w", dims=(300,), seed=seed)])
        model.graph.node.append(node(attribute("then_branch", g=graph)))
    onnxarchive.save(model, path, assets={})
    with onnxarchive.open(path) as archive, pytest.raises(TensorNotFoundError) as caught:
        archive.tensors["w"]
    keys = ["w", *(f"w_{number}" for number in range(2, 9))]
    taken = ", ".join(f"tensor_by_key({key!r})" for key in keys)
    assert str(caught.value) == (
        f"{path}: several initializers have the name 'w'; take {taken} or another one of the 10"
    )


@pytest.mark.parametrize("left", [0, 1])
@pytest.mark.parametrize("is_indexed", [True, False])
def test_a_branch_that_is_removed_in_memory_gives_its_name_no_other_tensor(
    branches: Archive, left: int, is_indexed: bool
) -> None:
    if is_indexed:
        assert "w" not in branches.tensors
    del branches.model.graph.node[0].attribute[1 - left]
    if is_indexed:
        assert "w" not in branches.tensors
    else:
        expected = numpy_helper.to_array(raw_tensor("w", dims=(300,), seed=left + 1))
        assert branches.tensors["w"].tobytes() == expected.tobytes()
        assert branches.tensors.key("w") == ("w", "w_2")[left]


def test_an_initializer_that_was_removed_in_memory_is_no_tensor(branches: Archive) -> None:
    del branches.model.graph.node[:]
    assert list(branches.tensors) == ["own"]
    for name in ("w", "own1", "b"):
        assert name not in branches.tensors
        with pytest.raises(TensorNotFoundError, match=name):
            branches.tensors[name]


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="/proc tells the memory")
@needs_compiled_parser
def test_opening_keeps_no_object_for_each_initializer_of_a_subgraph(path: Path) -> None:
    model = model_of()
    branch = onnx.GraphProto(initializer=[TensorProto()] * 100_000)
    model.graph.node.append(node(attribute("g", g=branch)))
    onnxarchive.save(model, path, assets={})
    code = f"""
{MEASURE_MEMORY}
import onnx, onnxarchive
print(growth(lambda: onnxarchive.open(sys.argv[1])))
"""
    assert int(run_python(code, path)) < 100_000 * 400  # parsed, a message takes up to 200 bytes


# Views


def test_views_are_read_only_and_of_one_map(archive: Archive) -> None:
    view = archive.read("layer_0_weight")
    assert view.readonly
    assert (view.format, view.ndim) == ("B", 1)
    array = archive.tensors["layer.0/weight"]
    assert np.shares_memory(array, np.frombuffer(view, np.uint8))
    assert np.shares_memory(array, archive.tensor_by_key("layer_0_weight"))
    assert not array.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        array[0, 0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.flags.writeable = True


def test_data_lies_aligned_in_memory(archive: Archive) -> None:
    for name in ("layer.0/weight", "layer.0/bias", "inner"):
        assert archive.tensors[name].ctypes.data % 64 == 0


def test_views_outlive_the_archive_its_file_and_a_second_close(path: Path) -> None:
    archive = onnxarchive.open(path)
    array = archive.tensors["layer.0/weight"]
    packed_view = archive.read("inner")
    asset = archive.read("assets/a/labels.txt")
    tensors = archive.tensors
    archive.close()
    archive.close()
    with archive:
        pass
    del archive, tensors
    gc.collect()
    path.unlink()
    expected = numpy_helper.to_array(_nested_model().graph.initializer[0])
    assert array.tobytes() == expected.tobytes()
    assert len(bytes(packed_view)) == 2000
    assert bytes(asset) == b"cat\n"


def test_reading_after_close_is_a_value_error_that_says_so(path: Path) -> None:
    archive = onnxarchive.open(path)
    archive.read("inner")
    assets, tensors = archive.assets, archive.tensors
    archive.close()
    calls: list[Callable[[], object]] = [
        lambda: archive.read("inner"),
        lambda: archive.read("layer_0_weight"),
        lambda: archive.tensor_by_key("inner"),
        lambda: tensors["inner"],
        lambda: assets["empty"],
        lambda: assets["a/labels.txt"],
        archive.verify,
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"model\.onnxa: the file is closed"):
            call()
    assert next(iter(archive.entries)) == "layer_0_weight"  # what was read once is still there
    assert archive.model.graph.initializer[0].name == "layer.0/weight"


def test_an_archive_closes_when_a_block_ends_by_an_error(path: Path) -> None:
    with pytest.raises(RuntimeError), onnxarchive.open(path) as archive:
        raise RuntimeError
    with pytest.raises(ValueError, match="closed"):
        archive.read("inner")


def test_a_closed_archive_leaves_no_descriptor_and_no_map(path: Path) -> None:
    archive = onnxarchive.open(path)
    assert open_below(path.parent) == [str(path)]  # a descriptor, and no map
    views = [archive.read(name) for name in archive.entries for _ in range(10)]
    arrays = list(archive.tensors.values())
    assert len(open_below(path.parent)) <= 3  # the map, which has a descriptor of its own
    assert Path("/proc/self/maps").read_text().count(str(path)) == 1
    archive.close()
    assert Path("/proc/self/maps").read_text().count(str(path)) == 1
    del views, arrays, archive
    gc.collect()
    assert open_below(path.parent) == []


def test_an_archive_that_is_dropped_without_close_leaves_no_file_open(path: Path) -> None:
    archive = onnxarchive.open(path)
    archive.read("inner")
    del archive
    gc.collect()
    assert open_below(path.parent) == []


def test_a_failed_call_leaves_no_descriptor(path: Path) -> None:
    path.write_bytes(b"text")
    of_other_tests = open_below(path.parent.parent)  # whose closing was made to fail
    for call in (onnxarchive.open, onnxarchive.load):
        with pytest.raises(ArchiveFormatError):
            call(path)
        assert open_below(path.parent) == []
    assert onnxarchive.check(path) != []
    assert open_below(path.parent) == []
    with pytest.raises(ArchiveFormatError):
        onnxarchive.open(path.parent)
    assert open_below(path.parent.parent) == of_other_tests


def test_hundreds_of_archives_may_be_open_at_once(path: Path) -> None:
    archives = [onnxarchive.open(path) for _ in range(200)]
    try:
        assert all(bytes(it.assets["a/labels.txt"]) == b"cat\n" for it in archives)
    finally:
        for archive in archives:
            archive.close()


# Damage, and when it is seen


def test_opening_touches_no_weight_and_no_local_header_but_that_of_the_model(path: Path) -> None:
    with onnxarchive.open(path) as archive:
        entries = dict(archive.entries)
    for name, entry in entries.items():
        if name not in ("inner", "assets/a/labels.txt", "__MODEL_PROTO"):
            break_local_header(path, entry)
        if entry.nbytes and name != "__MODEL_PROTO":
            flip_byte(path, entry.data_offset)
    with onnxarchive.open(path) as archive:
        assert len(archive.tensors) == 5
        assert archive.tensors["inner"].shape == (2000,)
        assert len(archive.read("assets/a/labels.txt")) == 4
        for name in ("layer_0_weight", "layer_0_bias", "assets/empty"):
            for _ in range(2):  # it is not taken for compared after a failure
                with pytest.raises(ArchiveFormatError) as caught:
                    archive.read(name)
                assert (caught.value.rule, caught.value.entry) == ("ZIP-7", name)
                assert caught.value.path == str(path)
                assert str(path) in str(caught.value)
        with pytest.raises(ArchiveFormatError, match="ZIP-7"):
            archive.tensors["layer.0/weight"]
        with pytest.raises(ArchiveFormatError, match="ZIP-7"):
            archive.tensor_by_key("layer_0_bias")
        assert archive.tensors["scale"].shape == ()
    with pytest.raises(ArchiveFormatError, match="ZIP-7"):
        onnxarchive.load(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda initializers: initializers.pop(0),
        lambda initializers: initializers.insert(0, onnx.TensorProto(name="new")),
        lambda initializers: initializers.sort(key=lambda it: it.name, reverse=True),
        lambda initializers: initializers.__delitem__(slice(None)),
    ],
    ids=["removed", "inserted", "sorted", "cleared"],
)
@pytest.mark.parametrize("is_indexed", [True, False])
def test_a_model_that_is_changed_in_memory_changes_no_tensor_of_the_archive(
    tmp_path: Path,
    change: Callable[[Any], object],
    is_indexed: bool,
) -> None:
    path = tmp_path / "model.onnxa"
    arrays = {f"w{size}": np.full(size, size) for size in (16, 1000, 3, 64)}
    with onnxarchive.Writer(path) as writer:
        for name, array in arrays.items():
            writer.add(name, array)
        writer.finish(onnx.ModelProto(ir_version=10, graph=onnx.GraphProto(name="g")))
    with onnxarchive.open(path) as archive:
        if is_indexed:
            assert list(archive.tensors) == list(arrays)
        change(archive.model.graph.initializer)
        for name, array in arrays.items():
            assert archive.tensors.key(name) == name
            assert np.array_equal(archive.tensor_by_key(name), array)
            assert np.array_equal(archive.tensors[name], array)
        archive.verify()


@pytest.mark.parametrize("dims", [[1000], [8, 8], [1 << 40], [-3], []])
@pytest.mark.parametrize("data_type", [onnx.TensorProto.FLOAT, onnx.TensorProto.INT4])
@pytest.mark.parametrize("is_usual", [True, False])
def test_a_shape_that_is_changed_in_memory_changes_no_tensor_of_the_archive(
    tmp_path: Path, dims: list[int], data_type: int, is_usual: bool
) -> None:
    path = tmp_path / "model.onnxa"
    array = np.arange(32).reshape(4, 8).astype(dtypes.BY_NUMBER[data_type].dtype)
    weight = numpy_helper.from_array(array, "w")
    model = model_of(weight)
    if not is_usual:  # which is looked at tensor by tensor
        model.graph.node.append(node(attribute("value", t=weight)))
    onnxarchive.save(model, path, size_threshold=0, convert_attribute=True, assets={})
    with onnxarchive.open(path) as archive:
        keys = keys_of(archive)
        assert len(keys) == 2 - is_usual
        for tensor in external_tensors(archive.model).values():
            tensor.dims[:] = dims
            tensor.data_type = onnx.TensorProto.DOUBLE
        for found in (archive.tensors["w"], *map(archive.tensor_by_key, keys)):
            assert (found.dtype, found.shape) == (array.dtype, array.shape)
            assert found.tobytes() == array.tobytes()


def test_entries_are_the_same_by_name_and_by_iteration(path: Path) -> None:
    with onnxarchive.open(path) as archive:
        entries = archive.entries
        found = [entries[name] for name in entries]
        assert (list(entries.values()), [entry.name for entry in found]) == (found, list(entries))
        assert dict(entries.items()) == entries == dict(zip(entries, found, strict=True))
        assert (len(entries), len(entries.values())) == (len(found), len(found))
        assert (found[0] in entries.values(), "inner" in entries, "none" in entries) == (
            True,
            True,
            False,
        )
        assert repr(entries) == f"<{len(found)} entries>"
        with pytest.raises(KeyError):
            entries["none"]


def test_a_local_header_is_compared_once_and_hides_no_other(path: Path) -> None:
    with onnxarchive.open(path) as archive:
        archive.read("inner")
        for name in ("inner", "layer_0_weight"):
            break_local_header(path, archive.entries[name])
        with pytest.raises(ArchiveFormatError, match="ZIP-7"):
            archive.read("layer_0_weight")
        assert archive.tensors["inner"].shape == (2000,)
        assert archive.tensors["layer.0/bias"].shape == (700,)


def test_a_local_header_that_cannot_be_read_hides_no_other(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, bad = MappedFile.read, archive.entries["inner"].header_offset

    def failing(file: MappedFile, offset: int, size: int) -> bytes:
        if offset <= bad < offset + size:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(file, offset, size)

    monkeypatch.setattr(MappedFile, "read", failing)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        archive.tensors["inner"]
    assert archive.tensors["layer.0/bias"].shape == (700,)


@pytest.mark.parametrize("name", ["layer_0_weight", "inner", "assets/a/labels.txt"])
@pytest.mark.parametrize("where", [0, -1])
def test_one_flipped_bit_is_found(path: Path, name: str, where: int) -> None:
    with onnxarchive.open(path) as archive:
        archive.verify()
        entry = archive.entries[name]
    data = bytearray(path.read_bytes())
    data[entry.data_offset + where % entry.nbytes] ^= 0x10
    path.write_bytes(data)
    with onnxarchive.open(path) as archive:
        archive.read(name)
        with pytest.raises(ChecksumError, match="CRC-32") as caught:
            archive.verify()
    assert (caught.value.rule, caught.value.entry) == ("ZIP-15", name)
    assert str(caught.value).startswith(f"{path}: entry {name!r}: ")
    if not name.startswith("assets"):
        with pytest.raises(ChecksumError, match=name):
            onnxarchive.load(path)


def test_verify_reports_its_progress(path: Path) -> None:
    model = model_of(raw_tensor("w", TensorProto.UINT8, (20 << 20,)), raw_tensor("b"))
    onnxarchive.save(model, path, size_threshold=0, assets={})
    calls: list[tuple[int, int]] = []
    with onnxarchive.open(path) as archive:
        archive.verify(lambda *call: calls.append(call))
        total = sum(entry.nbytes for entry in archive.entries.values())
    assert [call[0] for call in calls] == sorted({call[0] for call in calls})
    assert {call[1] for call in calls} == {total}
    assert calls[-1][0] == total
    assert len(calls) >= 5


def test_verify_stops_when_progress_raises(path: Path, archive: Archive) -> None:
    with pytest.raises(KeyboardInterrupt):
        archive.verify(Mock(side_effect=KeyboardInterrupt))
    archive.verify()


# Files that are no archives


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"", "ZIP-2"),
        (b"PK", "ZIP-2"),
        (b"text\n" * 100, "ZIP-2"),
        (bytes(5000), "ZIP-2"),
        (runnable_model().SerializeToString(), "ZIP-2"),
        (b"PK\x05\x06" + bytes(18), "MODEL-1"),  # an empty zip
    ],
    ids=["empty", "2 bytes", "text", "zeros", "onnx", "empty zip"],
)
def test_a_file_that_is_no_archive_is_refused_and_named(
    path: Path, content: bytes, rule: str
) -> None:
    path.write_bytes(content)
    for call in (onnxarchive.open, onnxarchive.load):
        with pytest.raises(ArchiveFormatError) as caught:
            call(path)
        assert (caught.value.rule, caught.value.path) == (rule, str(path))
        assert str(caught.value).startswith(f"{path}: expected ")
        assert f" [{rule}]" in str(caught.value)


def test_errors_of_the_system_are_raised_unchanged(tmp_path: Path) -> None:
    for call in (onnxarchive.open, onnxarchive.load, onnxarchive.check):
        with pytest.raises(FileNotFoundError):
            call(tmp_path / "nothing")
        with pytest.raises(NotADirectoryError):
            call("/dev/null/x")


def test_a_link_to_an_archive_is_an_archive(tmp_path: Path, path: Path) -> None:
    (tmp_path / "link").symlink_to(path)
    with onnxarchive.open(tmp_path / "link") as archive:
        assert archive.path == str(tmp_path / "link")
        archive.verify()


# Changes of the file while the archive is open


def test_saving_over_an_open_archive_leaves_its_views_alone(path: Path) -> None:
    with onnxarchive.open(path) as archive:
        array = archive.tensors["layer.0/weight"]
        before = array.tobytes()
        onnxarchive.save(model_of(raw_tensor("layer.0/weight", dims=(9,))), path, assets={})
        assert array.tobytes() == before


# Threads


def test_threads_agree_on_names_that_several_initializers_have(path: Path) -> None:
    names = [f"w{index % 2000}" for index in range(4000)]
    onnxarchive.save(model_of(*(raw_tensor(name, dims=()) for name in names)), path, assets={})
    found: list[str] = []
    with onnxarchive.open(path) as archive:

        def look_up() -> None:
            with pytest.raises(TensorNotFoundError, match=r"'w1'; take .*\[2001\]$") as caught:
                archive.tensors["w1"]
            found.append(str(caught.value))

        at_once(look_up for _ in range(8))
    assert len(set(found)) == 1
    assert len(found) == 8


def test_threads_may_read_at_once_and_agree_on_a_broken_header(path: Path) -> None:
    model = model_of(*(raw_tensor(f"w{index}", dims=(300,), seed=index) for index in range(200)))
    onnxarchive.save(model, path, assets={})
    break_local_header(path, entry_of(path, "w77"))
    expected = {name: array.tobytes() for name, array in _values(*model.graph.initializer).items()}
    errors: list[BaseException] = []
    with onnxarchive.open(path) as archive:
        barrier = threading.Barrier(8)

        def read(seed: int) -> None:
            try:
                names = list(expected)
                np.random.default_rng(seed).shuffle(names)
                barrier.wait()
                for name in names:
                    if name == "w77":
                        with pytest.raises(ArchiveFormatError, match="ZIP-7"):
                            archive.tensors[name]
                    else:
                        assert archive.tensors[name].tobytes() == expected[name]
                with pytest.raises(ArchiveFormatError, match="'w77'"):
                    archive.verify()
            except BaseException as error:
                errors.append(error)

        at_once(partial(read, seed) for seed in range(8))
    assert errors == []


# Errors


@pytest.mark.parametrize("name", [None, 5, b"w0", "missing"])
def test_an_object_that_names_no_tensor_is_not_found(archive: Archive, name: Any) -> None:
    with pytest.raises(TensorNotFoundError, match="there is no initializer"):
        archive.tensors[name]
    assert archive.tensors.get(name) is None


def test_a_name_that_is_missing_is_not_looked_for_in_the_whole_model(path: Path) -> None:
    onnxarchive.save(model_of(*(raw_tensor(f"w{index}") for index in range(700))), path, assets={})
    with onnxarchive.open(path) as archive:
        assert "missing" not in archive.tensors
        assert steps(lambda: archive.tensors.get("missing")) < 100


def test_the_error_of_a_missing_tensor_has_no_quotes_around_it(archive: Archive) -> None:
    with pytest.raises(TensorNotFoundError) as caught:
        archive.tensors["layer_0_weight"]
    assert str(caught.value) == (
        f"{archive.path}: there is no initializer 'layer_0_weight'; did you mean 'layer.0/weight'?"
    )
    assert isinstance(caught.value, KeyError)
    assert isinstance(caught.value, ArchiveError)
    with pytest.raises(TensorNotFoundError, match="there is no entry 'x'"):
        archive.read("x")
    with pytest.raises(KeyError):
        archive.entries["x"]


@pytest.mark.parametrize(
    "kind",
    [
        ArchiveError,
        ArchiveFormatError,
        ChecksumError,
        TensorNotFoundError,
        UnsupportedFeatureError,
    ],
)
def test_an_error_is_the_same_after_pickling_and_copying(kind: type[ArchiveError]) -> None:
    error = kind("expected this, found that", rule="ZIP-4", entry="w")
    error.path = "/a/model.onnxa"
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(other) is kind
        assert (other.rule, other.entry, other.path) == ("ZIP-4", "w", "/a/model.onnxa")
        assert other.message == "expected this, found that"
        assert str(other) == "/a/model.onnxa: expected this, found that [ZIP-4]"


def test_an_error_of_format_is_a_value_error() -> None:
    assert issubclass(ArchiveFormatError, ValueError)
    assert issubclass(ChecksumError, ArchiveFormatError)
    assert not issubclass(UnsupportedFeatureError, ValueError)


# Cost


def test_opening_takes_no_memory_for_weights(path: Path) -> None:
    with onnxarchive.Writer(path) as writer:
        for index in range(8):
            writer.add(f"w{index}", np.zeros(4 << 20, np.float32))
        writer.finish(model_of())
    code = """
import sys, onnxarchive
def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) >> 10 for line in status if line.startswith("VmRSS"))
onnxarchive.open(sys.argv[1]).close()
before = resident()
archive = onnxarchive.open(sys.argv[1])
views = [archive.tensors[name] for name in archive.tensors]
print(len(views), sum(view.nbytes for view in views) >> 20, resident() - before)
"""
    count, nbytes, growth = map(int, run_python(code, path).split())
    path.unlink()  # pytest keeps what is left for days
    assert (count, nbytes) == (8, 128)
    assert growth < 4


def test_tensors_of_a_file_object_are_aligned_in_memory(tmp_path: Path) -> None:
    # An entry after one of odd size begins at an odd offset. Libraries copy what is not aligned.
    odd, double = raw_tensor("odd", TensorProto.UINT8, (2001,)), TensorProto.DOUBLE
    path = tmp_path / "m.onnxa"
    onnxarchive.save(model_of(odd, raw_tensor("w", double, (300,)), odd), path, assets={})
    with onnxarchive.open(io.BytesIO(path.read_bytes())) as archive:
        assert archive.entries["w"].header_offset % 8
        for array in (archive.tensors["w"], archive.fetch()["w"]):
            assert array.flags.aligned
            assert array.tobytes() == raw_tensor("w", double, (300,)).raw_data


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="/proc says what is open")
@pytest.mark.skipif(sys.version_info < (3, 13), reason="each map of an older Python has one")
def test_a_view_of_a_closed_archive_holds_no_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "m.onnxa"
    onnxarchive.save(model_of(raw_tensor("w", dims=(3000,))), path, assets={})
    before = len(os.listdir("/proc/self/fd"))
    views = []
    for prefetch in (None, "populate", "willneed"):
        with onnxarchive.open(path, prefetch=prefetch) as archive:
            views.append(archive.tensors["w"])
    assert len(os.listdir("/proc/self/fd")) == before
    assert len({view.tobytes() for view in views}) == 1


def test_an_archive_is_closed_after_its_block_as_a_file_of_python(path: Path) -> None:
    for source in (path, path.read_bytes(), io.BytesIO(path.read_bytes())):
        with onnxarchive.open(source) as archive:
            assert not archive.closed
        assert archive.closed
        archive.close()
        assert archive.closed


@pytest.mark.parametrize("model", [None, ""])
def test_a_model_that_is_not_chosen_is_the_default_one(tmp_path: Path, model: str | None) -> None:
    path, decoder = tmp_path / "two.onnxa", model_of(raw_tensor("own"))
    onnxarchive.save(model_of(raw_tensor("w")), path, models={"decoder": decoder})
    with onnxarchive.open(path, model=model) as archive:
        assert archive.model_id == ""
        assert list(archive.models) == ["", "decoder"]
        assert [*archive.tensors] == ["w"]
