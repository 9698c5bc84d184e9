from __future__ import annotations

import contextlib
import itertools
import os
import resource
import sys
import zipfile
from pathlib import Path
from types import FrameType
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from limits import limited
from models import (
    MEASURE_MEMORY,
    NUMBERS,
    attribute,
    entry_of,
    external,
    little_endian,
    model_of,
    node,
    raw_tensor,
    run_python,
    runnable_model,
    string_tensor,
    typed,
)
from onnx import TensorProto, numpy_helper
from written import contents

import onnxarchive
from onnxarchive import ArchiveFormatError, UnsupportedFeatureError, Writer
from onnxarchive.files import data as data_module
from onnxarchive.writing import writer as writer_module

WEIGHT = np.arange(600, dtype=np.float32).reshape(20, 30)
MIB = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.onnxa"


def _left(path: Path) -> list[str]:
    return sorted(os.listdir(path.parent))


def write(path: Path, model: onnx.ModelProto | None = None, **tensors: Any) -> None:
    """Writes tensors by name, and a model of nothing else if none is given."""
    with Writer(path) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.finish(model_of() if model is None else model)


def tensors_of(path: Path) -> dict[str, Any]:
    """The initializers of a sound archive as arrays."""
    assert onnxarchive.check(path, full=True) == []
    with onnxarchive.open(path) as archive:
        return dict(archive.tensors)


def _initializer(name: str, array: np.ndarray[Any, Any] | None = None) -> TensorProto:
    """An initializer of an array's shape and type, without data."""
    if array is None:
        return TensorProto(name=name)
    tensor = numpy_helper.from_array(array, name)
    tensor.ClearField("raw_data")
    return tensor


# What is written


def test_an_added_tensor_becomes_the_data_of_the_initializer_of_its_name(path: Path) -> None:
    bias = np.ones(7, ml_dtypes.bfloat16)
    with Writer(path) as writer:
        assert writer.add("layer.0/weight", WEIGHT) == "layer_0_weight"
        assert writer.add("layer.0/bias", bias) == "layer_0_bias"
        writer.finish(model_of(_initializer("layer.0/bias"), _initializer("layer.0/weight")))
    assert onnxarchive.check(path, full=True) == []
    with onnxarchive.open(path) as archive:
        assert list(archive.entries) == ["layer_0_weight", "layer_0_bias", "__MODEL_PROTO"]
        assert [it.name for it in archive.model.graph.initializer] == [
            "layer.0/bias",
            "layer.0/weight",
        ]
        assert np.array_equal(archive.tensors["layer.0/weight"], WEIGHT)
        assert archive.tensors["layer.0/bias"].dtype == ml_dtypes.bfloat16
        assert np.array_equal(archive.tensors["layer.0/bias"], bias)
    loaded = onnxarchive.load(path)
    assert loaded.graph.initializer[1] == numpy_helper.from_array(WEIGHT, "layer.0/weight")


def test_an_initializer_that_the_model_lacks_is_appended(path: Path) -> None:
    model = model_of(raw_tensor("first"), _initializer("a", WEIGHT))
    write(path, model, b=WEIGHT, a=WEIGHT, c=WEIGHT)
    names = [tensor.name for tensor in onnxarchive.load(path).graph.initializer]
    assert names == ["first", "a", "b", "c"]
    assert np.array_equal(tensors_of(path)["c"], WEIGHT)


def test_an_added_tensor_becomes_the_data_of_an_initializer_of_a_subgraph(path: Path) -> None:
    graph = onnx.GraphProto(initializer=[_initializer("w")])
    model = model_of()
    model.graph.node.append(node(attribute("g", g=graph)))
    write(path, model, w=WEIGHT)
    assert not onnxarchive.load(path).graph.initializer
    assert np.array_equal(tensors_of(path)["w"], WEIGHT)


def test_an_added_tensor_replaces_the_data_that_an_initializer_holds(path: Path) -> None:
    zeros = np.zeros((20, 30), np.float32)
    full, other = (numpy_helper.from_array(zeros, name) for name in "wv")
    write(path, model_of(full, typed(other)), w=WEIGHT, v=WEIGHT)
    found = tensors_of(path)
    assert np.array_equal(found["w"], WEIGHT)
    assert np.array_equal(found["v"], WEIGHT)
    assert entry_of(path, "__MODEL_PROTO").nbytes < 300


def test_a_tensor_of_an_attribute_refers_to_an_added_tensor_by_its_key(path: Path) -> None:
    model = model_of(_initializer("w"))
    model.functions.add(name="f")
    with Writer(path) as writer:
        writer.add("w", WEIGHT)
        key = writer.add("constant.value", WEIGHT.astype(np.float16))
        inner = external(_initializer("any name"), key)
        further = writer.add("x", np.arange(3, dtype=np.int64))
        full = external(raw_tensor("other", TensorProto.INT64, (3,)), further)
        model.graph.node.append(node(attribute("t", t=inner)))
        model.functions[0].node.append(node(attribute("tensors", tensors=[full])))
        writer.finish(model)
    assert onnxarchive.check(path, full=True) == []
    with onnxarchive.open(path) as archive:
        assert np.array_equal(archive.tensor_by_key(key), WEIGHT.astype(np.float16))
        assert np.array_equal(archive.tensor_by_key("x"), np.arange(3))
        assert list(archive.tensors) == ["w"]
        attribute_tensor = archive.model.graph.node[0].attribute[0].t
        assert (attribute_tensor.name, list(attribute_tensor.dims)) == ("any name", [20, 30])
        assert attribute_tensor.data_type == TensorProto.FLOAT16


def test_large_tensors_that_the_model_holds_are_stored_outside_as_well(path: Path) -> None:
    model = model_of(
        raw_tensor("w", dims=(256,)), raw_tensor("small", dims=(255,)), string_tensor("s")
    )
    model.graph.node.append(node(attribute("t", t=raw_tensor("t", dims=(300,)))))
    write(path, model, added=WEIGHT[:0])
    with onnxarchive.open(path) as archive:
        assert list(archive.entries) == ["added", "w", "__MODEL_PROTO"]
        assert archive.tensors["added"].shape == (0, 30)
    with Writer(path, size_threshold=0) as writer:
        writer.finish(model)
    with onnxarchive.open(path) as archive:
        assert list(archive.entries) == ["w", "small", "__MODEL_PROTO"]
    assert onnxarchive.load(path) == model


def test_keys_of_added_and_held_tensors_do_not_collide(path: Path) -> None:
    with Writer(path) as writer:
        assert writer.add("a/b", WEIGHT) == "a_b"
        assert writer.add("a.b", WEIGHT) == "a_b_2"
        writer.finish(model_of(raw_tensor("a b", dims=(300,)), _initializer("a/b")))
    with onnxarchive.open(path) as archive:
        assert list(archive.entries) == ["a_b", "a_b_2", "a_b_3", "__MODEL_PROTO"]
        assert list(archive.tensors) == ["a b", "a/b", "a.b"]


def test_a_writer_makes_the_archive_that_save_writes(path: Path) -> None:
    model = runnable_model()
    onnxarchive.save(model, path, size_threshold=0)
    expected = path.read_bytes()
    with Writer(path, size_threshold=0) as writer:
        for tensor in model.graph.initializer:
            writer.add(tensor.name, numpy_helper.to_array(tensor))
            tensor.ClearField("raw_data")
        writer.finish(model)
    assert path.read_bytes() == expected


def test_finish_does_not_change_the_model(path: Path) -> None:
    model = model_of(_initializer("w"), raw_tensor("held", dims=(300,)))
    before = model.SerializeToString(deterministic=True)
    write(path, model, w=WEIGHT, v=WEIGHT)
    assert model.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize(
    ("value", "dtype", "shape"),
    [
        (3.5, np.float64, ()),
        ([1, 2, 3], np.intp, (3,)),
        (np.zeros((0, 3), np.int8), np.int8, (0, 3)),
        (np.arange(6, dtype=">i4"), np.int32, (6,)),
        (WEIGHT[::-2, ::3], np.float32, (10, 10)),
        (np.arange(7).astype(ml_dtypes.int4), ml_dtypes.int4, (7,)),
    ],
)
def test_whatever_numpy_makes_an_array_of_can_be_added(
    path: Path, value: Any, dtype: Any, shape: tuple[int, ...]
) -> None:
    write(path, w=value)
    array = tensors_of(path)["w"]
    assert (array.dtype, array.shape) == (little_endian(np.dtype(dtype)), shape)
    assert np.array_equal(array, np.asarray(value))


@pytest.mark.parametrize("alignment", [64, 4096, 32768])
def test_data_is_aligned_as_asked_for(path: Path, alignment: int) -> None:
    with Writer(path, alignment=alignment) as writer:
        writer.add("w", WEIGHT)
        writer.finish(model_of(raw_tensor("v", dims=(300,))))
    with onnxarchive.open(path) as archive:
        assert all(entry.data_offset % alignment == 0 for entry in archive.entries.values())


def test_assets_are_written_where_they_were_added(tmp_path: Path, path: Path) -> None:
    (tmp_path / "labels.txt").write_bytes(b"cat\n")
    with Writer(path) as writer:
        writer.add_asset("first", b"1")
        writer.add("w", WEIGHT)
        writer.add_asset("a/labels.txt", tmp_path / "labels.txt")
        writer.add_asset("a/other", str(tmp_path / "labels.txt"))
        writer.finish(model_of())
    assert onnxarchive.check(path, full=True) == []
    with zipfile.ZipFile(path) as file:
        names = ["assets/first", "w", "assets/a/labels.txt", "assets/a/other", "__MODEL_PROTO"]
        assert file.namelist() == names
    with onnxarchive.open(path) as archive:
        assert {k: bytes(v) for k, v in archive.assets.items()} == {
            "first": b"1",
            "a/labels.txt": b"cat\n",
            "a/other": b"cat\n",
        }


def test_writing_takes_memory_for_a_tensor_at_a_time(path: Path) -> None:
    code = f"""
{MEASURE_MEMORY}
import numpy as np, onnxarchive
from models import model_of
def write(count):
    with onnxarchive.Writer(sys.argv[1]) as writer:
        for index in range(count):
            writer.add(f"w{{index}}", np.full(4 << 20, index, np.float32))
            sample()
        writer.finish(model_of())
write(1)
print(growth(lambda: write(20)))
"""
    assert int(run_python(code, path)) < 40 * MIB
    assert path.stat().st_size > 320 * MIB
    path.unlink()  # pytest keeps what is left for days


# What is refused


def test_a_name_cannot_be_added_twice(path: Path) -> None:
    with Writer(path) as writer:
        writer.add("w", WEIGHT)
        with pytest.raises(ValueError, match="'w' is added twice"):
            writer.add("w", WEIGHT)
        writer.finish(model_of())
    assert list(tensors_of(path)) == ["w"]


@pytest.mark.parametrize(
    "value",
    ["text", b"bytes", [None], np.array(["2000"], "datetime64[Y]"), np.zeros(1, "i4,i4")],
)
def test_an_array_that_onnx_has_no_type_for_is_refused_and_writing_goes_on(
    path: Path, value: Any
) -> None:
    with Writer(path) as writer:
        with pytest.raises(UnsupportedFeatureError):
            writer.add("w", value)
        writer.add("w", WEIGHT)
        writer.finish(model_of())
    assert list(tensors_of(path)) == ["w"]


def test_a_name_of_an_asset_that_is_taken_or_a_folder_is_refused_and_writing_goes_on(
    path: Path,
) -> None:
    with Writer(path) as writer:
        writer.add_asset("a/b", b"1")
        for taken in ("a/b", "A/B", "a"):
            with pytest.raises(ValueError, match="assets/") as caught:
                writer.add_asset(taken, b"2")
            assert not isinstance(caught.value, ArchiveFormatError)
        with pytest.raises(FileNotFoundError):
            writer.add_asset("other", path.parent / "missing")
        writer.add_asset("other", b"3")
        writer.finish(model_of())
    assert onnxarchive.check(path, full=True) == []
    with onnxarchive.open(path) as archive:
        assert dict(archive.assets) == {"a/b": b"1", "other": b"3"}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "empty"),
        ("..", "'..'"),
        ("../a", "'..'"),
        ("/a", "relative"),
        ("a/", "empty"),
        ("a\\b", "backslash"),
        ("C:a", "drive"),
        ("a:b", "colon"),
        ("a;b", "semicolon"),
        ("a\0b", "control character"),
        ("a\u0378", "unassigned"),
        ("x" * 300, "255 bytes"),
        ("x/" * 509, "1017 bytes"),
    ],
)
def test_an_asset_has_a_relative_plain_path(path: Path, name: str, reason: str) -> None:
    expected = f"path of an asset as .*{reason}"
    with Writer(path) as writer, pytest.raises(ValueError, match=expected):
        writer.add_asset(name, b"")
    assert _left(path) == []


_twice, _named_twice = model_of(_initializer("w")), model_of(_initializer("w"))
_twice.graph.node.append(node(attribute("g", g=onnx.GraphProto(initializer=[_initializer("w")]))))
_named_twice.graph.node.append(node(attribute("t", t=external(_initializer("t"), "w"))))
_held_twice = external(_initializer("w"), "w")
_held_twice.raw_data = bytes(2400)
_shape, _type = WEIGHT.reshape(30, 20), WEIGHT.astype(np.int32)
_OTHER = r"of shape {}.*FLOAT of shape \[20, 30\]"

UNFIT = {
    "shape": (model_of(_initializer("w", _shape)), r"'w'.*FLOAT " + _OTHER.format(r"\[30, 20\]")),
    "type": (model_of(_initializer("w", _type)), r"'w'.*INT32 " + _OTHER.format(r"\[20, 30\]")),
    "twice": (_twice, r"graph\.initializer\[0\].*g\.initializer\[0\].*both have the data of 'w'"),
    "data": (model_of(_held_twice), "'w'.*, in raw_data; to store"),
    "named": (
        _named_twice,
        r"graph\.initializer\[0\].*attribute\[0\]\.t.*both have the data of 'w'",
    ),
    "nowhere": (model_of(external(_initializer("v"), "nowhere")), "'v'.*'nowhere'"),
    "path": (model_of(external(_initializer("v"), "../w")), r"'v'.*'\.\./w'"),
    "empty": (model_of(external(_initializer("v"), "")), "'v'.*''"),
    "nothing": (
        model_of(
            raw_tensor("v", dims=(0,)), TensorProto(name="x", data_location=TensorProto.EXTERNAL)
        ),
        "'x'",
    ),
    "held": (
        model_of(TensorProto(name="v", data_type=1, dims=[500])),
        "'v'.*2000 bytes.*found 0",
    ),
    "none": (onnx.ModelProto(), "no ir_version"),
    "a part": (model_of(external(_initializer("t", WEIGHT), "w", offset=4)), "'t'"),
    "a shorter part": (model_of(external(_initializer("t", WEIGHT), "w", length=2399)), "'t'"),
}


@pytest.mark.parametrize(("model", "message"), UNFIT.values(), ids=UNFIT)
def test_a_model_that_does_not_fit_is_refused_and_nothing_is_left(
    path: Path, model: onnx.ModelProto, message: str
) -> None:
    before = model.SerializeToString(deterministic=True)
    path.write_bytes(b"old")
    with Writer(path) as writer:
        writer.add("w", WEIGHT)
        with pytest.raises(ArchiveFormatError, match=message):
            writer.finish(model)
        with pytest.raises(ValueError, match="closed"):
            writer.finish(model_of())
    assert model.SerializeToString(deterministic=True) == before
    assert contents(path.parent) == {path.name: b"old"}


def test_an_alignment_that_is_not_allowed_leaves_nothing(path: Path) -> None:
    for alignment in (0, 1, 63, 65, 96, 65536):
        with pytest.raises(ValueError, match="power of two"):
            Writer(path, alignment=alignment)
    assert _left(path) == []


# Failures, which leave no file


def test_there_is_no_file_before_finish(path: Path) -> None:
    path.write_bytes(b"old")
    with Writer(path) as writer:
        writer.add("w", WEIGHT)
        assert path.read_bytes() == b"old"
        writer.finish(model_of())
        assert onnxarchive.check(path) == []
        assert _left(path) == ["model.onnxa"]


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("before", [{}, {"model.onnxa": b"old"}])
def test_leaving_the_block_without_finish_leaves_nothing(
    path: Path, error: type[BaseException] | None, before: dict[str, bytes]
) -> None:
    for content in before.values():
        path.write_bytes(content)
    with (
        pytest.raises(error) if error else contextlib.nullcontext(),
        Writer(path) as writer,
    ):
        writer.add("w", WEIGHT)
        writer.add_asset("a", b"1")
        if error:
            raise error
    assert contents(path.parent) == before


def _require_closed(writer: Writer) -> None:
    for call in (
        lambda: writer.add("v", WEIGHT),
        lambda: writer.add_asset("a", b""),
        lambda: writer.finish(model_of()),
    ):
        with pytest.raises(ValueError, match="the writer is closed"):
            call()


def test_a_closed_writer_leaves_nothing_and_refuses_more(path: Path) -> None:
    writer = Writer(path)
    writer.add("w", WEIGHT)
    for _ in range(2):
        writer.close()
        assert _left(path) == []
    _require_closed(writer)
    assert _left(path) == []


def test_a_finished_writer_refuses_more_and_keeps_the_archive(path: Path) -> None:
    with Writer(path) as writer:
        writer.add("w", WEIGHT)
        writer.finish(model_of())
        _require_closed(writer)
    writer.close()
    assert onnxarchive.check(path, full=True) == []


def test_a_writer_that_nobody_closed_leaves_nothing_when_its_process_ends(path: Path) -> None:
    code = """
import sys, numpy as np, onnxarchive
def write():
    writer = onnxarchive.Writer(sys.argv[1])
    writer.add("w", np.zeros(1000))
write()
"""
    run_python(code, path)
    assert _left(path) == []


def test_a_full_disk_during_finish_leaves_nothing(path: Path) -> None:
    with Writer(path) as writer:
        writer.add("w", WEIGHT)
        with limited(resource.RLIMIT_FSIZE, 3000), pytest.raises(OSError, match="File too large"):
            writer.finish(model_of(raw_tensor("v", dims=(5000,))))
    assert _left(path) == []


@pytest.mark.parametrize("kind", ["tensor", "asset"])
def test_a_full_disk_during_add_never_makes_a_broken_archive(path: Path, kind: str) -> None:
    # The caller catches the error, frees some space and goes on.
    big = np.zeros(100_000, np.float32)
    with Writer(path) as writer:
        writer.add("w", WEIGHT)
        with limited(resource.RLIMIT_FSIZE, 50_000), pytest.raises(OSError, match="File too large"):  # noqa: PT012
            if kind == "tensor":
                writer.add("big", big)
            else:
                writer.add_asset("big", big.data)
        try:
            writer.add("v", WEIGHT)
            writer.finish(model_of())
        except ValueError:
            pass  # it takes no more
    if path.exists():
        assert onnxarchive.check(path, full=True) == []


@pytest.mark.parametrize("kind", ["tensor", "asset"])
def test_an_interrupt_between_any_two_lines_leaves_nothing_or_a_valid_archive(
    path: Path, kind: str
) -> None:
    count = finished = 0
    is_interrupted = True
    while is_interrupted:
        lines = itertools.count()

        def trace(frame: FrameType, event: str, _: Any, at: int = count, lines: Any = lines) -> Any:
            if frame.f_code.co_filename not in (writer_module.__file__, data_module.__file__):
                return None
            if event == "line" and next(lines) == at:
                raise KeyboardInterrupt
            return trace

        with onnxarchive.Writer(path) as writer:
            is_interrupted = False
            sys.settrace(trace)
            try:
                if kind == "tensor":
                    writer.add("w", np.ones(300, np.float32))
                else:
                    writer.add_asset("labels", b"cat")
            except KeyboardInterrupt:
                is_interrupted = True
            finally:
                sys.settrace(None)
            with contextlib.suppress(ValueError):  # the writer is closed
                writer.finish(model_of())
                finished += 1
                assert onnxarchive.check(path, full=True) == []
        path.unlink(missing_ok=True)
        assert not os.listdir(path.parent)
        count += 1
    assert count > 10
    assert finished > 1


# Tensors of other libraries


def test_a_tensor_proto_of_every_type_can_be_added(path: Path) -> None:
    given = [raw_tensor(name, number, (3, 7), number) for name, number in NUMBERS.items()]
    given += [
        numpy_helper.from_array(np.array(2, np.float32), "scalar"),
        typed(raw_tensor("typed")),
    ]
    with Writer(path) as writer:
        for tensor in given:
            writer.add(f"my {tensor.name}", tensor)
        writer.finish(model_of())
    assert onnxarchive.check(path, full=True) == []
    for found, tensor in zip(onnxarchive.load(path).graph.initializer, given, strict=True):
        assert found.name == f"my {tensor.name}"
        assert numpy_helper.to_array(found).tobytes() == numpy_helper.to_array(tensor).tobytes()
        assert (found.data_type, found.dims) == (tensor.data_type, tensor.dims)


def test_a_tensor_of_onnx_ir_can_be_added(tmp_path: Path, path: Path) -> None:
    ir = pytest.importorskip("onnx_ir", reason="onnx_ir is not installed")
    import onnxarchive.ir

    onnxarchive.save(model_of(raw_tensor("w", TensorProto.INT4, (2001,))), tmp_path / "other")
    tensor: Any = onnxarchive.ir.load(tmp_path / "other").graph.initializers["w"].const_value
    bfloat16 = np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3)
    with Writer(path) as writer:
        writer.add("archived", tensor)
        writer.add(
            "lazy",
            ir.LazyTensor(lambda: ir.Tensor(bfloat16), ir.DataType.BFLOAT16, ir.Shape([2, 3])),
        )
        with pytest.raises(UnsupportedFeatureError, match=r"'s': .*STRING"):
            writer.add("s", ir.tensor(["a", "b"]))
        writer.finish(model_of())
    with onnxarchive.open(path) as archive:
        assert archive.tensors["archived"].tobytes() == tensor.numpy().tobytes()
        assert archive.tensors["archived"].dtype == ml_dtypes.int4
        assert np.array_equal(archive.tensors["lazy"], bfloat16)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (string_tensor("s"), "STRING"),
        (external(raw_tensor("e"), "e.bin"), "'e' .*external.*convert"),
        (
            TensorProto(name="e", data_location=TensorProto.EXTERNAL, float_data=[1]),
            "'e' .*, in float_data; to store",
        ),
        (TensorProto(name="n", data_type=1, dims=[3], raw_data=b"1234"), "'n' .*12 bytes.*found 4"),
        (TensorProto(name="b", data_type=9, dims=[1], raw_data=b"\2"), "0 and 1, found 2"),
        (TensorProto(name="t", data_type=22, dims=[1], raw_data=b"\x10"), "4 unused high bits"),
        (TensorProto(data_type=1, dims=[-1]), "FLOAT of shape"),
    ],
)
def test_a_tensor_proto_that_an_archive_cannot_hold_is_refused_and_writing_goes_on(
    path: Path, tensor: TensorProto, message: str
) -> None:
    with Writer(path) as writer:
        with pytest.raises(onnxarchive.ArchiveError, match=rf"tensor 'w'.*{message}"):
            writer.add("w", tensor)
        assert writer.add("w", WEIGHT) == "w"
        writer.finish(model_of())
    assert list(tensors_of(path)) == ["w"]
