from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import ml_dtypes
import numpy as np
import onnx
import pytest
from models import run_python, runnable_model, text_model
from onnx import TensorProto, helper, numpy_helper
from pages import needs_smaps
from written import write_model

import onnxarchive
from onnxarchive.cli import main
from onnxarchive.interop import run as run_module
from onnxarchive.interop.run import Outcome, Port, RunError, random_input, run

ort = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")

CPU = "CPUExecutionProvider"


def identity(kind: str, dims: str = "2, 3") -> onnx.ModelProto:
    kind = kind.lower()
    return text_model(f"g ({kind}[{dims}] x) => ({kind}[{dims}] y) {{ y = Identity(x) }}")


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
        ((name, y),) = outcome.outputs.items()
        assert (name, str(y.dtype)) == ("y", "float32")
        assert y.tobytes() == expected.tobytes()
        assert outcome.path == os.fspath(source)
        assert outcome.random == frozenset()
        assert outcome.providers[-1] == CPU


def test_an_archive_and_a_model_are_recognised_by_their_content(
    archive: Path, tmp_path: Path
) -> None:
    os.rename(archive, tmp_path / "archive.onnx")
    assert run(tmp_path / "archive.onnx").outputs
    assert run(write_model(tmp_path / "model.onnxa", runnable_model())).outputs


def test_random_inputs_follow_from_name_type_and_shape_alone(archive: Path) -> None:
    one, two = run(archive), run(archive)
    assert one.random == {"x"}
    assert one.inputs["x"].tobytes() == two.inputs["x"].tobytes()
    assert one.outputs["y"].tobytes() == two.outputs["y"].tobytes()
    x = random_input(Port("x", "tensor(float)", (2, 1024)), (2, 1024))
    assert x.tobytes() == one.inputs["x"].tobytes()
    other = random_input(Port("z", "tensor(float)", (2, 1024)), (2, 1024))
    assert other.tobytes() != x.tobytes()


RUN_BY_ONNXRUNTIME = [
    *("FLOAT", "DOUBLE", "FLOAT16", "BFLOAT16", "BOOL"),
    *("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ"),
    *(f"{sign}INT{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)),
]


@pytest.mark.parametrize("name", RUN_BY_ONNXRUNTIME)
def test_inputs_and_outputs_may_have_every_type(tmp_path: Path, name: str) -> None:
    path = write_model(tmp_path / "m.onnx", identity(name, "16, 3"))
    outcome = run(path)
    x, y = outcome.inputs["x"], outcome.outputs["y"]
    expected = helper.tensor_dtype_to_np_dtype(TensorProto.DataType.Value(name))
    assert (x.dtype, x.shape) == (expected, (16, 3))
    assert (y.dtype, y.tobytes()) == (expected, x.tobytes())
    assert len(np.unique(x.astype(np.float64))) > 1
    assert run(path, {"x": x}).outputs["y"].tobytes() == x.tobytes()


@pytest.mark.parametrize("name", ["UINT4", "INT4"])
def test_inputs_and_outputs_may_have_packed_types(tmp_path: Path, name: str) -> None:
    kind, number = name.lower(), TensorProto.DataType.Value(name)
    model = text_model(
        f"""g ({kind}[5, 3] x) => ({kind}[] y) {{
  f = DequantizeLinear(x, scale)
  y = QuantizeLinear<output_dtype = {number}>(f, scale)
}}""",
        numpy_helper.from_array(np.array(1, np.float32), "scale"),
    )
    outcome = run(write_model(tmp_path / "m.onnx", model))
    x, y = (array.astype(np.int64) for array in (outcome.inputs["x"], outcome.outputs["y"]))
    assert outcome.outputs["y"].dtype.name == kind
    assert y.tolist() == x.tolist()
    assert len(np.unique(x)) > 5


def test_outputs_may_have_types_that_numpy_lacks_beside_inputs_that_it_has(tmp_path: Path) -> None:
    model = text_model("g (float[2] x) => (bfloat16[2] y) { y = Cast<to = 16>(x) }")
    path = write_model(tmp_path / "m.onnx", model)
    y = run(path, {"x": np.ones(2, np.float32)}).outputs["y"]
    assert (y.dtype, y.tolist()) == (ml_dtypes.bfloat16, [1, 1])


def test_inputs_and_outputs_may_be_strings(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.onnx", identity("string", "n"))
    y = run(path, dims={"n": 20}).outputs["y"]
    assert y.dtype == object
    assert len(set(y)) > 1
    for given in (np.array(["a", "größer"]), np.array(["a", "größer"], object), ["a", "größer"]):
        assert run(path, {"x": given}).outputs["y"].tolist() == ["a", "größer"]
    empty = run(path, dims={"n": 0}).outputs["y"]
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


def test_random_indices_are_valid_for_a_gather(tmp_path: Path) -> None:
    table = numpy_helper.from_array(np.arange(8, dtype=np.float32).reshape(2, 4), "w")
    model = text_model("g (int64[batch, 64] i) => (float[] y) { y = Gather(w, i) }", table)
    assert run(write_model(tmp_path / "m.onnx", model)).outputs["y"].shape == (1, 64, 4)


# Dimensions


@pytest.fixture
def open_model(tmp_path: Path) -> Path:
    text = """g (float[batch, 3, ?] x, float[batch, length] z) => (float[] x2, float[] z2) {
  x2 = Identity(x)
  z2 = Identity(z)
}"""
    return write_model(tmp_path / "open.onnx", text_model(text))


def shapes(outcome: Outcome) -> list[tuple[int, ...]]:
    return [array.shape for array in outcome.inputs.values()]


def test_open_dimensions_are_assumed_and_reported(open_model: Path) -> None:
    outcome = run(open_model)
    assert shapes(outcome) == [(1, 3, 1), (1, 1)]
    assert outcome.assumed == {"batch": 1, "x[2]": 1, "length": 1}


def test_dimensions_may_be_given_by_name_and_by_axis(open_model: Path) -> None:
    outcome = run(open_model, dims={"batch": 2, "x[2]": 5})
    assert shapes(outcome) == [(2, 3, 5), (2, 1)]
    assert outcome.assumed == {"length": 1}
    assert shapes(run(open_model, dims={"batch": 0})) == [(0, 3, 1), (0, 1)]


def test_given_inputs_decide_the_sizes_of_random_ones(open_model: Path) -> None:
    outcome = run(open_model, {"z": np.zeros((4, 7), np.float32)})
    assert shapes(outcome) == [(4, 3, 1), (4, 7)]
    assert outcome.assumed == {"x[2]": 1}
    assert outcome.random == {"x"}


@pytest.mark.parametrize(
    ("given", "dims", "message"),
    [
        ({}, {"n": 1}, r"no open dimension 'n' \(open dimensions: 'batch', 'length', 'x\[2\]'\)"),
        ({}, {"batch": -1}, "dimension 'batch': expected a size of 0 or more, found -1"),
        ({"y": 0}, {}, r"the model has no input 'y' \(inputs: 'x', 'z'\)"),
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
def test_inputs_and_dimensions_that_do_not_fit_are_errors(
    open_model: Path, given: dict[str, Any], dims: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        run(open_model, given, dims=dims)
    assert str(caught.value).startswith(f"{open_model}: ")


def test_raw_bytes_are_taken_for_types_that_npy_files_lack(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.onnx", identity("bfloat16"))
    x = np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16)
    np.save(tmp_path / "x.npy", x)
    loaded = np.load(tmp_path / "x.npy")
    assert loaded.dtype.kind == "V"
    assert run(path, {"x": loaded}).outputs["y"].tobytes() == x.tobytes()
    for dtype in ("V4", np.int16):
        with pytest.raises(ValueError, match="an array of bfloat16, found an"):
            run(path, {"x": np.zeros((2, 3), dtype)})


def test_arrays_of_the_other_byte_order_are_taken(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.onnx", identity("float"))
    x = np.arange(6, dtype=">f4").reshape(2, 3)
    assert run(path, {"x": x}).outputs["y"].tolist() == x.tolist()


# Sequences, maps, optionals


def test_an_input_that_is_a_sequence_must_be_given(tmp_path: Path) -> None:
    model = text_model(
        "g (seq(float[]) x) => (int64 y, float[] z) { y = SequenceLength(x) z = SequenceAt(x, i) }",
        numpy_helper.from_array(np.array(-1), "i"),
    )
    path = write_model(tmp_path / "m.onnx", model)
    with pytest.raises(ValueError, match=r"seq\(tensor\(float\)\); give one: --input x=FILE.npy"):
        run(path)
    outcome = run(path, {"x": [np.zeros(2, np.float32), np.ones(3, np.float32)]})
    assert {name: array.dtype for name, array in outcome.inputs.items()} == {
        "x[0]": np.float32,
        "x[1]": np.float32,
    }
    assert outcome.outputs["y"] == 2
    assert outcome.outputs["z"].tolist() == [1, 1, 1]


def test_outputs_in_sequences_and_maps_have_names(tmp_path: Path) -> None:
    labels = [3, 5]
    model = text_model(
        f"""g (float[2, 2] x) => (seq(float[]) parts, seq(map(int64, float)) maps) {{
  parts = SplitToSequence<axis = 0>(x)
  maps = ai.onnx.ml.ZipMap<classlabels_int64s = {labels}>(x)
}}"""
    )
    model.opset_import.add(domain="ai.onnx.ml", version=3)
    x = np.array([[1, 2], [3, 4]], np.float32)
    found = run(write_model(tmp_path / "m.onnx", model), {"x": x}).outputs
    assert {name: array.tolist() for name, array in found.items()} == {
        "parts[0]": [[1, 2]],
        "parts[1]": [[3, 4]],
        "maps[0].keys": labels,
        "maps[0].values": [1, 2],
        "maps[1].keys": labels,
        "maps[1].values": [3, 4],
    }


def test_inputs_that_onnxruntime_cannot_take_together_are_an_error(tmp_path: Path) -> None:
    text = """g (string[2] x, bfloat16[1] b) => (string[2] y, bfloat16[1] c) {
  y = Identity(x)
  c = Identity(b)
}"""
    path = write_model(tmp_path / "m.onnx", text_model(text))
    with pytest.raises(RunError, match=r"m.onnx: ONNX Runtime cannot run the model: "):
        run(path)


def test_a_run_that_fails_names_the_sizes_that_were_assumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """g (float[batch, n] x) => (float[batch, 3] y) <float[2, 3] b = {1, 2, 3, 4, 5, 6}> {
  y = MatMul(x, b)
}"""
    model = text_model(text)
    path = write_model(tmp_path / "m.onnx", model)
    with pytest.raises(RunError, match=r"cannot run the model: .* 'batch': 1, 'n': 1; dims={NAME"):
        run(path)
    assert main(["run", str(path)]) == 2
    assert capsys.readouterr().err.endswith("'batch': 1, 'n': 1; --dim NAME=SIZE gives them\n")
    assert run(path, dims={"n": 2}).outputs["y"].shape == (1, 3)


# Cost


def test_the_time_of_each_run_is_reported(archive: Path) -> None:
    outcome = run(archive, repeat=3)
    assert len(outcome.run_seconds) == 3
    assert all(0 < seconds < 60 for seconds in (*outcome.run_seconds, outcome.session_seconds))


@needs_smaps
def test_memory_is_reported_in_parts(path: Path) -> None:
    mib = 1 << 20
    model = text_model(
        "g (float[n] x) => (float y) { s = Add(x, w) y = ReduceMax<keepdims = 0>(s) }",
        numpy_helper.from_array(np.ones((48 << 18,), np.float32), "w"),
    )
    onnxarchive.save(model, path)
    code = """
import sys
from onnxarchive.interop.run import run
memory = run(sys.argv[1], repeat=2).memory
print(memory["anonymous"], memory["mapped"])
"""
    anonymous, mapped = map(int, run_python(code, path).split())
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


def test_a_provider_that_the_session_lacks_is_an_error(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = ["CUDAExecutionProvider", CPU]
    made = ort.InferenceSession(runnable_model().SerializeToString(), providers=[CPU])
    monkeypatch.setattr(ort, "get_available_providers", lambda: known)
    monkeypatch.setattr("onnxarchive.interop.run.session", lambda *_, **__: made)
    with pytest.raises(RunError, match="cannot use CUDAExecutionProvider"):
        run(archive, providers=["cuda", "cpu"])


def test_a_model_that_onnxruntime_does_not_load_is_reported_in_one_line(tmp_path: Path) -> None:
    model = text_model("g (float[2] x) => (float[2] y) { y = NoSuchOperator(x) }")
    onnxarchive.save(model, tmp_path / "m.onnxa")
    for path in (tmp_path / "m.onnxa", write_model(tmp_path / "m.onnx", model)):
        with pytest.raises(RunError, match=r"ONNX Runtime cannot load the model: .*NoSuchOp") as it:
            run(path)
        assert str(it.value).startswith(f"{path}: ")
        assert "\n" not in str(it.value)


def test_an_empty_file_is_reported_as_empty(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").touch()
    with pytest.raises(onnxarchive.ArchiveFormatError, match=r"m\.onnx: .* found an empty file"):
        run(tmp_path / "m.onnx")


def test_a_run_that_fails_is_reported_in_one_line(tmp_path: Path) -> None:
    model = text_model("g (float[5] x, int64[1] i) => (float[] y) { y = Reshape(x, i) }")
    path = write_model(tmp_path / "m.onnx", model)
    with pytest.raises(RunError, match=r"ONNX Runtime cannot run the model: .*Reshape") as caught:
        run(path, {"i": np.array([7])})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("one\n  two\n"), "the model: one two"),
        (AssertionError(), "the model: AssertionError"),
    ],
)
def test_errors_of_several_lines_and_of_none_become_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    path = write_model(tmp_path / "m.onnx", runnable_model())
    monkeypatch.setattr(ort, "InferenceSession", Mock(side_effect=error))
    with pytest.raises(RunError, match=f"{message}$"):
        run(path)


def test_files_that_are_no_models_are_refused(archive: Path, tmp_path: Path) -> None:
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
    with pytest.raises(ValueError, match="repeat must be 1 or more, got 0"):
        run(archive, repeat=0)
