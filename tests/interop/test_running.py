from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from models import flip_byte, run_python, runnable_model
from onnx import TensorProto, helper, numpy_helper
from written import write_model

import onnxarchive
from onnxarchive.interop import running as run_module
from onnxarchive.interop.comparing import OutputDifference, compare
from onnxarchive.interop.inputs import Port, random_input
from onnxarchive.interop.running import Outcome, RunError, Summary, Value, run

ort = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")

CPU = "CPUExecutionProvider"
value = helper.make_tensor_value_info
node = helper.make_node


def model_of(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    initializers: Sequence[TensorProto] = (),
) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "graph", inputs, outputs, initializers)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def identity(number: int, dims: Sequence[int | str | None] = (2, 3)) -> onnx.ModelProto:
    inputs, outputs = [value("x", number, dims)], [value("y", number, dims)]
    return model_of([node("Identity", ["x"], ["y"])], inputs, outputs)


def constant(array: Any, name: str = "y") -> onnx.ModelProto:
    """A model that gives an array."""
    tensor = numpy_helper.from_array(array, "c")
    nodes = [node("Identity", ["c"], [name])]
    return model_of(nodes, [], [value(name, tensor.data_type, None)], [tensor])


def arrays(outcome: Outcome) -> dict[str, Any]:
    return {it.name: it.array for it in outcome.outputs}


# Runs


def test_an_archive_and_its_model_give_what_onnxruntime_gives(
    archive: Path, tmp_path: Path
) -> None:
    x = np.linspace(-1, 1, 2048, dtype=np.float32).reshape(2, 1024)
    original = ort.InferenceSession(runnable_model().SerializeToString(), providers=[CPU])
    (expected,) = original.run(None, {"x": x})
    plain = write_model(tmp_path / "m.onnx", runnable_model())
    onnxarchive.link(archive, tmp_path / "link.onnx")
    for source in (archive, os.fspath(archive), plain, tmp_path / "link.onnx"):
        outcome = run(source, {"x": x})
        (y,) = outcome.outputs
        assert (y.name, y.data_type) == ("y", "FLOAT")
        assert y.array.tobytes() == expected.tobytes()
        assert outcome.path == os.fspath(source)
        assert outcome.random == frozenset()
        assert outcome.providers[-1] == CPU


def test_what_a_file_is_its_content_tells(archive: Path, tmp_path: Path) -> None:
    os.rename(archive, tmp_path / "archive.onnx")
    assert run(tmp_path / "archive.onnx").outputs
    assert run(write_model(tmp_path / "model.onnxa", runnable_model())).outputs


def test_random_inputs_follow_from_name_type_and_shape_alone(archive: Path) -> None:
    one, two = run(archive), run(archive)
    assert one.random == {"x"}
    assert one.inputs[0].array.tobytes() == two.inputs[0].array.tobytes()
    assert one.outputs[0].array.tobytes() == two.outputs[0].array.tobytes()
    x = random_input(Port("x", "tensor(float)", (2, 1024)), (2, 1024))
    assert x.tobytes() == one.inputs[0].array.tobytes()
    other = random_input(Port("z", "tensor(float)", (2, 1024)), (2, 1024))
    assert other.tobytes() != x.tobytes()


RUN_BY_ONNXRUNTIME = [
    "FLOAT",
    "DOUBLE",
    "FLOAT16",
    "BFLOAT16",
    "FLOAT8E4M3FN",
    "FLOAT8E4M3FNUZ",
    "FLOAT8E5M2",
    "FLOAT8E5M2FNUZ",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "BOOL",
]


@pytest.mark.parametrize("name", RUN_BY_ONNXRUNTIME)
def test_every_type_goes_in_and_comes_out(tmp_path: Path, name: str) -> None:
    path = write_model(tmp_path / "m.onnx", identity(TensorProto.DataType.Value(name), (16, 3)))
    outcome = run(path)
    (x,), (y,) = outcome.inputs, outcome.outputs
    expected = helper.tensor_dtype_to_np_dtype(TensorProto.DataType.Value(name))
    assert (x.data_type, y.data_type) == (name, name)
    assert (x.array.dtype, x.array.shape) == (expected, (16, 3))
    assert (y.array.dtype, y.array.tobytes()) == (expected, x.array.tobytes())
    assert len(np.unique(x.array.astype(np.float64))) > 1
    assert run(path, {"x": x.array}).outputs[0].array.tobytes() == x.array.tobytes()
    summary = y.summary()
    numbers = x.array.astype(np.float64)
    assert (summary.minimum, summary.maximum) == (numbers.min(), numbers.max())
    assert summary.mean == pytest.approx(numbers.mean())


@pytest.mark.parametrize("name", ["UINT4", "INT4"])
def test_packed_types_go_in_and_come_out(tmp_path: Path, name: str) -> None:
    number = TensorProto.DataType.Value(name)
    nodes = [
        node("DequantizeLinear", ["x", "scale"], ["f"]),
        node("QuantizeLinear", ["f", "scale"], ["y"], output_dtype=number),
    ]
    scale = numpy_helper.from_array(np.array(1, np.float32), "scale")
    model = model_of(nodes, [value("x", number, (5, 3))], [value("y", number, None)], [scale])
    outcome = run(write_model(tmp_path / "m.onnx", model))
    (x,), (y,) = outcome.inputs, outcome.outputs
    assert y.data_type == name
    assert y.array.astype(np.int64).tolist() == x.array.astype(np.int64).tolist()
    assert len(np.unique(x.array.astype(np.int64))) > 5


def test_strings_go_in_and_come_out(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.onnx", identity(TensorProto.STRING, ("n",)))
    (y,) = run(path, dims={"n": 20}).outputs
    assert y.data_type == "STRING"
    assert len(set(y.array)) > 1
    assert y.summary() == Summary(None, None, None, None)
    for given in (np.array(["a", "größer"]), np.array(["a", "größer"], object), ["a", "größer"]):
        assert run(path, {"x": given}).outputs[0].array.tolist() == ["a", "größer"]
    empty = run(path, dims={"n": 0}).outputs[0].array
    assert empty.shape == (0,)


@pytest.mark.parametrize(
    ("data_type", "least", "greatest"),
    [
        ("int64", 0, 1),
        ("int32", 0, 1),
        ("uint16", 0, 1),
        ("uint8", 0, 255),
        ("int8", -128, 127),
        ("int4", -8, 7),
        ("uint2", 0, 3),
        ("bool", 0, 1),
    ],
)
def test_random_integers_are_good_as_indices_or_samples(
    data_type: str, least: int, greatest: int
) -> None:
    found = random_input(Port("x", f"tensor({data_type})", ()), (10_000,)).astype(np.int64)
    assert (found.min(), found.max()) == (least, greatest)


@pytest.mark.parametrize("data_type", ["float", "bfloat16", "float8e8m0", "float4e2m1", "double"])
def test_random_numbers_are_finite_and_differ(data_type: str) -> None:
    found = random_input(Port("x", f"tensor({data_type})", ()), (1000,)).astype(np.float64)
    assert np.isfinite(found).all()
    assert len(np.unique(found)) > 5
    assert 0.1 < np.abs(found).mean() < 10


def test_indices_made_up_run_a_gather(tmp_path: Path) -> None:
    table = numpy_helper.from_array(np.arange(8, dtype=np.float32).reshape(2, 4), "w")
    nodes = [node("Gather", ["w", "i"], ["y"])]
    inputs = [value("i", TensorProto.INT64, ["batch", 64])]
    model = model_of(nodes, inputs, [value("y", TensorProto.FLOAT, None)], [table])
    (y,) = run(write_model(tmp_path / "m.onnx", model)).outputs
    assert y.array.shape == (1, 64, 4)


# Dimensions


@pytest.fixture
def open_model(tmp_path: Path) -> Path:
    float_ = TensorProto.FLOAT
    inputs = [value("x", float_, ["batch", 3, None]), value("z", float_, ["batch", "length"])]
    nodes = [node("Identity", ["x"], ["x2"]), node("Identity", ["z"], ["z2"])]
    outputs = [value("x2", float_, None), value("z2", float_, None)]
    return write_model(tmp_path / "open.onnx", model_of(nodes, inputs, outputs))


def shapes(outcome: Outcome) -> list[tuple[int, ...]]:
    return [it.array.shape for it in outcome.inputs]


def test_open_dimensions_are_assumed_and_told(open_model: Path) -> None:
    outcome = run(open_model)
    assert shapes(outcome) == [(1, 3, 1), (1, 1)]
    assert outcome.assumed == {"batch": 1, "x[2]": 1, "length": 1}


def test_dimensions_may_be_given_by_name_and_by_axis(open_model: Path) -> None:
    outcome = run(open_model, dims={"batch": 2, "x[2]": 5})
    assert shapes(outcome) == [(2, 3, 5), (2, 1)]
    assert outcome.assumed == {"length": 1}
    assert shapes(run(open_model, dims={"batch": 0})) == [(0, 3, 1), (0, 1)]


def test_given_inputs_say_the_sizes_of_random_ones(open_model: Path) -> None:
    outcome = run(open_model, {"z": np.zeros((4, 7), np.float32)})
    assert shapes(outcome) == [(4, 3, 1), (4, 7)]
    assert outcome.assumed == {"x[2]": 1}
    assert outcome.random == {"x"}


@pytest.mark.parametrize(
    ("given", "dims", "message"),
    [
        ({}, {"n": 1}, r"dimensions: 'batch', 'length', 'x\[2\]'\), found 'n'"),
        ({}, {"batch": -1}, "dimension 'batch': expected a size of 0 or more, found -1"),
        ({"y": 0}, {}, r"an input of the model \(inputs: 'x', 'z'\), found 'y'"),
        (
            {"z": np.zeros((4, 7))},
            {},
            "input 'z': expected tensor.float., an array of float32, found .* float64; con",
        ),
        (
            {"z": np.zeros(4, np.float32)},
            {},
            r"input 'z': expected shape \[batch, length\], found \[4\]",
        ),
        ({"z": np.float32(1)}, {}, r"found \[\]"),
        (
            {"x": np.zeros((1, 2, 1), np.float32)},
            {},
            r"expected shape \[batch, 3, x\[2\]\], found \[1, 2, 1\]",
        ),
        (
            {"z": np.zeros((4, 7), np.float32)},
            {"batch": 5},
            "expected 4, as in a given input, found 5",
        ),
        ({"z": np.array([["a"]])}, {}, "found an array of <U1"),
        ({"z": np.zeros((4, 7), "V4")}, {}, "found an array of \\|V4"),
        ({}, {"length": 1 << 60}, "input 'z': expected a shape that fits memory"),
        ({}, {"length": 1 << 70}, "input 'z': expected a shape that fits memory"),
    ],
)
def test_inputs_and_dimensions_that_do_not_fit_are_told(
    open_model: Path, given: dict[str, Any], dims: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        run(open_model, given, dims=dims)
    assert str(caught.value).startswith(f"{open_model}: ")


def test_raw_bytes_are_taken_for_types_that_npy_files_lack(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.onnx", identity(TensorProto.BFLOAT16))
    x = np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16)
    np.save(tmp_path / "x.npy", x)
    loaded = np.load(tmp_path / "x.npy")
    assert loaded.dtype.kind == "V"
    assert run(path, {"x": loaded}).outputs[0].array.tobytes() == x.tobytes()
    with pytest.raises(ValueError, match="an array of bfloat16, found an"):
        run(path, {"x": np.zeros((2, 3), "V4")})
    with pytest.raises(ValueError, match="an array of bfloat16, found an"):
        run(path, {"x": np.zeros((2, 3), np.int16)})


def test_arrays_of_the_other_byte_order_are_taken(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.onnx", identity(TensorProto.FLOAT))
    x = np.arange(6, dtype=">f4").reshape(2, 3)
    assert run(path, {"x": x}).outputs[0].array.tolist() == x.tolist()


# Sequences, maps, optionals


def test_a_sequence_must_be_given(tmp_path: Path) -> None:
    inputs = [helper.make_tensor_sequence_value_info("x", TensorProto.FLOAT, None)]
    nodes = [node("SequenceLength", ["x"], ["y"]), node("SequenceAt", ["x", "i"], ["z"])]
    outputs = [value("y", TensorProto.INT64, []), value("z", TensorProto.FLOAT, None)]
    last = numpy_helper.from_array(np.array(-1), "i")
    path = write_model(tmp_path / "m.onnx", model_of(nodes, inputs, outputs, [last]))
    with pytest.raises(ValueError, match=r"seq\(tensor\(float\)\); give one: --input x=FILE.npy"):
        run(path)
    outcome = run(path, {"x": [np.zeros(2, np.float32), np.ones(3, np.float32)]})
    assert [(it.name, it.data_type) for it in outcome.inputs] == [
        ("x[0]", "FLOAT"),
        ("x[1]", "FLOAT"),
    ]
    assert arrays(outcome)["y"] == 2
    assert arrays(outcome)["z"].tolist() == [1, 1, 1]


def test_outputs_in_sequences_and_maps_have_names(tmp_path: Path) -> None:
    labels = [3, 5]
    pairs = helper.make_map_type_proto(
        TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, [])
    )
    nodes = [
        node("SplitToSequence", ["x"], ["parts"], axis=0),
        node("ZipMap", ["x"], ["maps"], domain="ai.onnx.ml", classlabels_int64s=labels),
    ]
    outputs = [
        helper.make_tensor_sequence_value_info("parts", TensorProto.FLOAT, None),
        helper.make_value_info("maps", helper.make_sequence_type_proto(pairs)),
    ]
    model = model_of(nodes, [value("x", TensorProto.FLOAT, [2, 2])], outputs)
    x = np.array([[1, 2], [3, 4]], np.float32)
    found = arrays(run(write_model(tmp_path / "m.onnx", model), {"x": x}))
    assert {name: array.tolist() for name, array in found.items()} == {
        "parts[0]": [[1, 2]],
        "parts[1]": [[3, 4]],
        "maps[0].keys": labels,
        "maps[0].values": [1, 2],
        "maps[1].keys": labels,
        "maps[1].values": [3, 4],
    }


def test_what_onnxruntime_cannot_be_given_together_is_told(tmp_path: Path) -> None:
    nodes = [node("Identity", ["x"], ["y"]), node("Identity", ["b"], ["c"])]
    inputs = [value("x", TensorProto.STRING, [2]), value("b", TensorProto.BFLOAT16, [1])]
    outputs = [value("y", TensorProto.STRING, [2]), value("c", TensorProto.BFLOAT16, [1])]
    path = write_model(tmp_path / "m.onnx", model_of(nodes, inputs, outputs))
    with pytest.raises(RunError, match=r"m.onnx: ONNX Runtime cannot run the model: "):
        run(path)


# Cost


def test_times_are_told_for_each_run(archive: Path) -> None:
    outcome = run(archive, repeat=3)
    assert len(outcome.run_seconds) == 3
    assert all(0 < seconds < 60 for seconds in (*outcome.run_seconds, outcome.session_seconds))


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="/proc says what is resident")
def test_memory_is_told_in_parts(tmp_path: Path) -> None:
    mib = 1 << 20
    weight = numpy_helper.from_array(np.ones((48 << 18,), np.float32), "w")
    nodes = [node("Add", ["x", "w"], ["s"]), node("ReduceMax", ["s"], ["y"], keepdims=0)]
    inputs = [value("x", TensorProto.FLOAT, ["n"])]
    model = model_of(nodes, inputs, [value("y", TensorProto.FLOAT, None)], [weight])
    onnxarchive.save(model, tmp_path / "m.onnxa")
    code = """
import sys
from onnxarchive.interop.running import run
memory = run(sys.argv[1], repeat=2).memory
print(memory["anonymous"], memory["mapped"])
"""
    printed = run_python(code, tmp_path / "m.onnxa")
    anonymous, mapped = map(int, printed.split())
    assert 48 * mib <= anonymous < 120 * mib  # the sum
    assert 48 * mib <= mapped < 80 * mib  # the weight


def test_memory_that_the_system_does_not_report_is_left_out(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "STATUS", "/no/such/file")
    assert run(archive).memory == {}


# Errors


def test_providers_may_be_named_briefly(archive: Path) -> None:
    for name in ("cpu", "CPU", "CPUExecutionProvider", "cpuexecutionprovider"):
        assert run(archive, providers=[name]).providers == (CPU,)
    with pytest.raises(ValueError, match=r"expected providers among .*cpu.*, found tpu"):
        run(archive, providers=["tpu"])


def test_a_provider_that_a_session_comes_without_is_told(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = ["CUDAExecutionProvider", CPU]
    made = ort.InferenceSession(runnable_model().SerializeToString(), providers=[CPU])
    monkeypatch.setattr(ort, "get_available_providers", lambda: known)
    monkeypatch.setattr(ort, "InferenceSession", lambda *_, **__: made)
    with pytest.raises(RunError, match="cannot use CUDAExecutionProvider"):
        run(archive, providers=["cuda", "cpu"])


def test_a_model_that_onnxruntime_does_not_load_is_told_in_a_line(tmp_path: Path) -> None:
    model = identity(TensorProto.FLOAT)
    model.graph.node[0].op_type = "NoSuchOperator"
    onnxarchive.save(model, tmp_path / "m.onnxa")
    for path in (tmp_path / "m.onnxa", write_model(tmp_path / "m.onnx", model)):
        with pytest.raises(RunError, match=r"ONNX Runtime cannot load the model: .*NoSuchOp") as it:
            run(path)
        assert str(it.value).startswith(f"{path}: ")
        assert "\n" not in str(it.value)


def test_a_run_that_fails_is_told_in_a_line(tmp_path: Path) -> None:
    nodes = [node("Reshape", ["x", "i"], ["y"])]
    inputs = [value("x", TensorProto.FLOAT, [5]), value("i", TensorProto.INT64, [1])]
    path = write_model(
        tmp_path / "m.onnx", model_of(nodes, inputs, [value("y", TensorProto.FLOAT, None)])
    )
    with pytest.raises(RunError, match=r"ONNX Runtime cannot run the model: .*Reshape") as caught:
        run(path, {"i": np.array([7])})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("one\n  two\n"), "the model: one two"),
        (MemoryError(), "the model: MemoryError"),
    ],
)
def test_errors_of_several_lines_and_of_none_become_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    path = write_model(tmp_path / "m.onnx", runnable_model())
    monkeypatch.setattr(ort, "InferenceSession", fail)
    with pytest.raises(RunError, match=f"{message}$"):
        run(path)


def test_files_that_are_no_models_are_told(archive: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("This is not a model, but a text.\n")
    with pytest.raises(
        onnxarchive.ArchiveFormatError, match="text: expected a model, found a text"
    ):
        run(tmp_path / "text")
    archive.write_bytes(archive.read_bytes()[:-1])
    with pytest.raises(onnxarchive.ArchiveFormatError) as caught:
        run(archive)
    assert caught.value.rule == "ZIP-2"
    with pytest.raises(onnxarchive.ArchiveFormatError, match="a directory"):
        run(tmp_path)
    with pytest.raises(FileNotFoundError):
        run(tmp_path / "missing")


def test_a_model_is_run_once_or_more(archive: Path) -> None:
    with pytest.raises(ValueError, match="found repeat 0"):
        run(archive, repeat=0)


def test_without_onnxruntime_it_says_what_to_install(archive: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "m.onnx", runnable_model())
    code = """
import sys
sys.modules["onnxruntime"] = None
from onnxarchive.interop.running import run
for path in sys.argv[1:]:
    try:
        run(path)
    except ImportError as error:
        print("pip install 'onnxarchive[ort]'" in str(error))
"""
    assert run_python(code, archive, tmp_path / "m.onnx") == "True\nTrue\n"


# Summaries


def test_summaries_leave_out_nan_and_keep_infinity() -> None:
    summary = Value("y", np.array([1, math.nan, 3, math.inf], np.float32)).summary()
    assert summary == Summary(1, math.inf, math.inf, 1)
    for array in (np.array([math.nan]), np.zeros((0, 2), np.float32), np.zeros(0, np.int64)):
        assert Value("y", array).summary() == Summary(None, None, None, array.size)


def test_summaries_of_integers_are_exact() -> None:
    summary = Value("y", np.array([-(1 << 63), (1 << 63) - 1])).summary()
    assert (summary.minimum, summary.maximum) == (-(1 << 63), (1 << 63) - 1)


@pytest.mark.parametrize("dtype", [np.float16, np.uint8, ml_dtypes.bfloat16, ml_dtypes.int4])
def test_summaries_are_of_all_elements(dtype: Any) -> None:
    array = np.arange(8).reshape(2, 4).astype(dtype)
    expected = array.astype(np.float64)
    summary = Summary(expected.min(), expected.max(), expected.mean(), 0)
    assert Value("y", array).summary() == summary


# Comparisons


def compared(one: Path, two: Path, **tolerances: float) -> list[OutputDifference]:
    """How two models compare on random inputs."""
    outcome = run(one)
    return compare(outcome, run(two, outcome.feed), **tolerances)


def difference(tmp_path: Path, one: Any, two: Any, **tolerances: Any) -> OutputDifference:
    """How two models that give these arrays compare."""
    first = write_model(tmp_path / "one.onnx", constant(np.asarray(one)))
    second = write_model(tmp_path / "two.onnx", constant(np.asarray(two)))
    (found,) = compared(first, second, **tolerances)
    return found


def test_an_archive_and_its_source_are_the_same(archive: Path, tmp_path: Path) -> None:
    (found,) = compared(archive, write_model(tmp_path / "m.onnx", runnable_model()))
    assert found == OutputDifference("y", None, 0, 32, 0.0, 0.0)
    assert found.is_same


def test_another_weight_is_seen(archive: Path) -> None:
    outcome = run(archive)
    with onnxarchive.open(archive) as opened:
        flip_byte(archive, opened.entries["layer_0_weight"].data_offset + 2)
    (found,) = compare(outcome, run(archive, outcome.feed))
    assert not found.is_same
    assert 0 < found.differing <= 2
    assert found.greatest_absolute is not None
    assert found.greatest_absolute > 0


NP: Any = np  # whose scalar types make arrays of lists, which their stubs do not know
F = NP.float32


def BF16(numbers: list[float]) -> Any:  # noqa: N802
    return np.array(numbers, ml_dtypes.bfloat16)


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("one", "two", "differing", "absolute", "relative"),
    [
        (F([1, 2]), F([1, 2]), 0, 0, 0),
        (F([1, 2]), F([1, 4]), 1, 2, 0.5),
        (F([3, -1]), F([0, 1]), 2, 3, INF),
        (F([NAN, 1]), F([NAN, 1]), 0, 0, 0),
        (F([NAN, 1]), F([2, 1]), 1, INF, INF),
        (F([2, 1]), F([NAN, 1]), 1, INF, INF),
        (F([INF, -INF]), F([INF, INF]), 1, INF, INF),
        (F([0.0]), F([-0.0]), 1, 0, 0),
        (F([]), F([]), 0, 0, 0),
        (NP.float16([1, 2]), NP.float16([1, 2.5]), 1, 0.5, 0.2),
        (NP.float64([1]), NP.float64([1 + 2**-52]), 1, 2**-52, pytest.approx(2**-52)),
        (NP.int64([-(2**63)]), NP.int64([2**63 - 1]), 1, float(2**64 - 1), 2.0),
        (NP.uint8([1, 255]), NP.uint8([2, 1]), 2, 254, 254),
        (NP.int8([-128]), NP.int8([127]), 1, 255, 255 / 127),
        (NP.bool_([True, False]), NP.bool_([True, True]), 1, 1, 1),
        (np.array(["a", "b"], object), np.array(["a", "c"], object), 1, None, None),
        (BF16([1, 2, NAN]), BF16([1, 3, NAN]), 1, 1, 1 / 3),
    ],
)  # fmt: skip
def test_differences_are_counted_and_measured(
    tmp_path: Path, one: Any, two: Any, differing: int, absolute: Any, relative: Any
) -> None:
    found = difference(tmp_path, one, two)
    assert found.problem is None
    assert (found.differing, found.elements) == (differing, one.size)
    assert (found.greatest_absolute, found.greatest_relative) == (absolute, relative)
    assert found.is_same == (differing == 0)


@pytest.mark.parametrize(
    ("one", "two", "tolerances", "is_same"),
    [
        (F([1.5]), F([1]), {"absolute": 0.5}, True),
        (F([1.5]), F([1]), {"absolute": 0.49}, False),
        (F([150]), F([100]), {"relative": 0.5}, True),
        (F([151]), F([100]), {"relative": 0.5}, False),
        (F([151]), F([100]), {"absolute": 1.0, "relative": 0.5}, True),
        (F([-0.0]), F([0.0]), {"absolute": 1e-30}, True),
        (F([NAN]), F([NAN]), {"absolute": 1.0}, True),
        (F([NAN]), F([1]), {"absolute": 1e30}, False),
        (F([1]), F([INF]), {"relative": 1e30}, False),
        (F([INF]), F([INF]), {"relative": 0.1}, True),
        (F([NAN]), F([1]), {"absolute": INF}, False),
        (NP.float64([NAN]), NP.float64([1e308]), {"relative": 1e30}, False),
        (NP.float64([1]), NP.float64([2]), {"absolute": INF}, True),
        (NP.int64([105]), NP.int64([100]), {"relative": 0.05}, True),
    ],
)
def test_tolerances_allow_what_they_say(
    tmp_path: Path, one: Any, two: Any, tolerances: dict[str, float], is_same: bool
) -> None:
    assert difference(tmp_path, one, two, **tolerances).is_same == is_same


def test_signs_of_zero_differ_unless_there_is_a_tolerance(tmp_path: Path) -> None:
    one, two = F([0.0, -0.0, 0.0, 1.0]), F([-0.0, -0.0, 1.0, 1.0])
    assert difference(tmp_path, one, two) == OutputDifference("y", None, 2, 4, 1.0, 1.0, 2)
    assert difference(tmp_path, one, two, absolute=0.5) == OutputDifference(
        "y", None, 1, 4, 1.0, 1.0, 1
    )
    found = difference(tmp_path, BF16([0.0, 2.0]), BF16([-0.0, 2.0]))
    assert found == OutputDifference("y", None, 1, 2, 0.0, 0.0, 1)


def test_nan_is_the_same_as_nan_with_other_bits(tmp_path: Path) -> None:
    bits = np.array([0x7FC00000, 0xFFC00001], np.uint32)
    one, two = bits.view(np.float32), bits[::-1].copy().view(np.float32)
    assert difference(tmp_path, one, two) == OutputDifference("y", None, 0, 2, 0.0, 0.0)


def test_differences_are_those_of_all_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onnxarchive.interop.comparing.PIECE", 3)
    one = np.zeros(10, F)
    two = np.ones(10, F)
    two[[4, 9]] = [0, 5]
    found = difference(tmp_path, one, two)
    assert (found.differing, found.greatest_absolute) == (9, 5)
    assert difference(tmp_path, one, -one).differing == 10


def test_outputs_of_other_names_types_and_shapes_are_told(tmp_path: Path) -> None:
    assert difference(tmp_path, F([1]), F([[1]])).problem == (
        "expected the same shape, found [1] and [1, 1]"
    )
    assert difference(tmp_path, F([1]), NP.int64([1])).problem == (
        "expected the same data type, found FLOAT and INT64"
    )
    one = write_model(tmp_path / "one.onnx", constant(F([1])))
    two = write_model(tmp_path / "two.onnx", constant(F([1]), "other"))
    found = compared(one, two)
    assert [(it.name, it.problem) for it in found] == [
        ("y", "found in the first model only"),
        ("other", "found in the other model only"),
    ]
    assert not any(it.is_same for it in found)


def test_models_with_other_inputs_are_refused(tmp_path: Path) -> None:
    float_ = TensorProto.FLOAT
    one = write_model(tmp_path / "one.onnx", identity(float_, ("n", 3)))
    typed = write_model(tmp_path / "typed.onnx", identity(TensorProto.DOUBLE, ("n", 3)))
    shaped = write_model(tmp_path / "shaped.onnx", identity(float_, (7, 3)))
    more = identity(float_, ("n", 3))
    more.graph.input.append(value("z", float_, [1]))
    named = identity(float_, ("n", 3))
    named.graph.input[0].name = named.graph.node[0].input[0] = "z"
    for other, message in {
        typed: r"typed.onnx: input 'x': expected tensor.double., an array of float64",
        shaped: r"shaped.onnx: input 'x': expected shape \[7, 3\], found \[1, 3\]",
        write_model(tmp_path / "more.onnx", more): r"more.onnx: expected only .*, found \['z'\]",
        write_model(
            tmp_path / "named.onnx", named
        ): "named.onnx: expected the name of an input .*, found 'x'",
    }.items():
        with pytest.raises(ValueError, match=message):
            compared(one, other)
    outcome = run(one, dims={"n": 7})
    (found,) = compare(outcome, run(shaped, outcome.feed))
    assert found.is_same


@pytest.mark.parametrize("tolerance", [-1.0, NAN])
def test_wrong_tolerances_are_told(archive: Path, tolerance: float) -> None:
    with pytest.raises(ValueError, match="expected a tolerance of 0 or more"):
        compared(archive, archive, absolute=tolerance)
