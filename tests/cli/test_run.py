from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from models import flip_byte, run_python, runnable_model
from onnx import TensorProto, helper, numpy_helper
from written import write_model

import onnxarchive
from onnxarchive.cli import main, running
from onnxarchive.interop.running import run as run_model

pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")

Captured = pytest.CaptureFixture[str]
X = np.linspace(-1, 1, 2048, dtype=np.float32).reshape(2, 1024)
value = helper.make_tensor_value_info


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "an archive.onnxa"
    onnxarchive.save(runnable_model(), path)
    monkeypatch.chdir(tmp_path)
    return path


def identities(**dims: Sequence[int | str | None]) -> onnx.ModelProto:
    """A model that gives each of its inputs, as `y` and the name."""
    nodes = [helper.make_node("Identity", [name], [f"y{name}"]) for name in dims]
    graph = helper.make_graph(
        nodes,
        "graph",
        [value(name, TensorProto.FLOAT, shape) for name, shape in dims.items()],
        [value(f"y{name}", TensorProto.FLOAT, None) for name in dims],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def run(*arguments: str | Path) -> int:
    return main(["run", *(str(argument) for argument in arguments)])


def result_of(capsys: Captured, *arguments: str | Path, status: int = 0) -> Any:
    assert run(*arguments, "--json") == status
    captured = capsys.readouterr()
    assert captured.err == ""

    def refuse(name: str) -> None:
        raise AssertionError(f"JSON has no {name}")

    return json.loads(captured.out, parse_constant=refuse)


def test_run_tells_inputs_outputs_time_and_memory(archive: Path, capsys: Captured) -> None:
    assert run(archive) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0].split() == ["input", "data", "type", "shape", "min", "max", "mean", "from"]
    assert lines[1].split()[:3] == ["x", "FLOAT", "2x1024"]
    assert lines[1].endswith("random, seed 0")
    assert lines[3].split() == ["output", "data", "type", "shape", "min", "max", "mean"]
    assert lines[4].split()[:3] == ["y", "FLOAT", "2x16"]
    assert [line.split()[0] for line in lines[6:]] == ["provider", "time", "memory"]
    assert " ms, run " in lines[7]
    assert "MiB" in lines[8]
    assert captured.err == ""


def test_run_gives_the_same_as_json(archive: Path, capsys: Captured) -> None:
    result = result_of(capsys, archive, "--seed", "7", "--repeat", "3", "--provider", "cpu")
    assert result["path"] == str(archive)
    assert result["seed"] == 7
    assert result["providers"] == ["CPUExecutionProvider"]
    assert result["assumed_dims"] == {}
    (x,), (y,) = result["inputs"], result["outputs"]
    assert (x["name"], x["data_type"], x["dims"], x["random"]) == ("x", "FLOAT", [2, 1024], True)
    assert (y["name"], y["data_type"], y["dims"], y["nans"]) == ("y", "FLOAT", [2, 16], 0)
    assert y["minimum"] <= y["mean"] <= y["maximum"]
    assert result["run_ms"] == sorted(result["runs_ms"])[1]
    assert set(result["memory"]) == {"anonymous_nbytes", "mapped_nbytes", "resident_nbytes"}


def test_given_inputs_are_taken_and_outputs_saved(archive: Path, capsys: Captured) -> None:
    np.save("x.npy", X)
    assert run(archive, "--input", "x=x.npy", "--output", "y=y.npy") == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[1].endswith("given")
    assert "saved     y as y.npy" in printed
    weight, bias = map(numpy_helper.to_array, runnable_model().graph.initializer)
    np.testing.assert_allclose(np.load("y.npy"), X @ weight + bias, rtol=1e-3, atol=1e-4)
    result = result_of(capsys, archive, "--input", "x=x.npy")
    assert result["inputs"][0]["random"] is False


def test_outputs_replace_no_model_and_none_of_its_files(archive: Path, capsys: Captured) -> None:
    onnxarchive.export(archive, "other.onnx", external_data="other.data")
    (name,) = (it.name for it in onnx.load("other.onnx").graph.output)
    before = {path: path.read_bytes() for path in archive.parent.iterdir()}
    for target in (archive.name, "other.onnx", "other.data"):
        status = run(archive, "--compare", "other.onnx", "--output", f"{name}={target}", "--force")
        assert status == 2
        assert "expected another file than the input" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in archive.parent.iterdir()} == before


def test_two_outputs_are_not_saved_in_one_file(tmp_path: Path, capsys: Captured) -> None:
    model = write_model(tmp_path / "two.onnx", identities(a=[1], b=[1]))
    same = (f"ya={tmp_path}/q.npy", f"yb={tmp_path}/./q.npy")
    assert run(model, "--output", same[0], "--output", same[1]) == 2
    assert "one file for each output" in capsys.readouterr().err
    assert not (tmp_path / "q.npy").exists()


def test_all_outputs_are_saved_in_a_directory_under_safe_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    model = identities(a=[2])
    model.graph.node[0].output[0] = model.graph.output[0].name = "../../out/put"
    model.graph.node.add(op_type="Identity", input=["a"], output=["CON"])
    model.graph.output.append(value("CON", TensorProto.FLOAT, None))
    write_model(tmp_path / "m.onnx", model)
    result = result_of(capsys, "m.onnx", "--output", "results/here")
    assert set(result["saved"]) == {"../../out/put", "CON"}
    files = sorted(path.name for path in (tmp_path / "results" / "here").iterdir())
    assert len(files) == 2
    assert not {"CON.npy", "con.npy"} & set(files)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx", "results"]
    for path in result["saved"].values():
        assert np.load(path).shape == (2,)


def test_names_with_an_equals_sign_can_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = identities(a=[2])
    model.graph.node[0].output[0] = model.graph.output[0].name = "y=1"
    write_model(tmp_path / "m.onnx", model)
    assert run("m.onnx", "--output", "y=1=y.npy") == 0
    assert np.load("y.npy").shape == (2,)


def test_nothing_is_replaced_without_force_and_an_input_never(
    archive: Path, capsys: Captured
) -> None:
    np.save("x.npy", X)
    Path("y.npy").write_bytes(b"mine")
    assert run(archive, "--output", "y=y.npy") == 2
    assert "y.npy: exists; --force replaces it" in capsys.readouterr().err
    assert Path("y.npy").read_bytes() == b"mine"
    for target in ("x.npy", archive.name):
        before = Path(target).read_bytes()
        arguments = ("--input", "x=x.npy", "--output", f"y={target}", "--force")
        assert run(archive, *arguments) == 2
        assert "expected another file than the input" in capsys.readouterr().err
        assert Path(target).read_bytes() == before
    assert run(archive, "--output", "y=y.npy", "--force") == 0
    assert np.load("y.npy").shape == (2, 16)


@pytest.fixture
def unloadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model that ONNX Runtime does not load: what is told of it first is told without it."""
    monkeypatch.chdir(tmp_path)
    model = runnable_model()
    model.graph.node[0].op_type = "NoSuchOperator"
    write_model(tmp_path / "m.onnx", model)
    return "m.onnx"


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("y=taken.npy", "taken.npy: exists; --force replaces it"),
        ("results", "results/y.npy: exists; --force replaces it"),
        ("y=results", "results: Is a directory"),
        ("y=new/", "expected one file for each output, found 'y=new/'"),
        ("y=taken.npy/y.npy", "taken.npy/y.npy: Not a directory"),
        ("taken.npy", "taken.npy/y.npy: Not a directory"),
        ("taken.npy/deep/er", "taken.npy/deep/er/y.npy: Not a directory"),
        ("y=/proc/y.npy", "/proc/y.npy: "),
        ("/proc/no/such", "/proc/no: "),
        ("z=z.npy", "which has 'y', found 'z=z.npy'"),
    ],
)
def test_outputs_that_cannot_be_saved_are_told_before_the_model_is_loaded(
    unloadable: str, output: str, message: str, capsys: Captured
) -> None:
    if "/proc/" in output and not os.path.exists("/proc/self"):
        pytest.skip("there is no directory in which nobody makes a file")
    Path("taken.npy").write_bytes(b"mine")
    Path("results").mkdir()
    Path("results/y.npy").write_bytes(b"mine, too")
    before = sorted(Path().rglob("*"))
    assert run(unloadable, "--output", output) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "does not load" not in captured.err
    assert sorted(Path().rglob("*")) == before
    assert Path("taken.npy").read_bytes() == b"mine"
    assert Path("results/y.npy").read_bytes() == b"mine, too"


def test_an_output_that_is_an_input_is_told_before_the_model_is_loaded(
    unloadable: str, capsys: Captured
) -> None:
    Path("x.npy").write_bytes(b"never read")
    for target in ("x.npy", unloadable):
        arguments = ("--input", "x=x.npy", "--output", f"y={target}", "--force")
        assert run(unloadable, *arguments) == 2
        assert "expected another file than the input" in capsys.readouterr().err


def test_an_output_inside_the_file_of_another_is_told(
    unloadable: str, tmp_path: Path, capsys: Captured
) -> None:
    write_model(tmp_path / "two.onnx", identities(a=[1], b=[1]))
    assert run("two.onnx", "--output", "ya=q", "--output", "yb=q/b.npy") == 2
    assert "expected a file in a directory, found 'q/b.npy'" in capsys.readouterr().err
    assert not Path("q").exists()


def test_a_comparison_that_cannot_be_is_told_before_the_model_is_loaded(
    unloadable: str, capsys: Captured
) -> None:
    assert run(unloadable, "--compare", "missing.onnx") == 2
    assert "missing.onnx: No such file" in capsys.readouterr().err
    assert run(unloadable, "--compare", unloadable, "--rtol", "-1") == 2
    assert "expected a tolerance of 0 or more" in capsys.readouterr().err


def test_a_target_that_can_be_written_is_left_as_it_is_until_then(
    unloadable: str, capsys: Captured
) -> None:
    Path("y.npy").write_bytes(b"mine")
    for arguments in (["--output", "y=y.npy", "--force"], ["--output", "new/er"]):
        assert run(unloadable, *arguments) == 2
        assert "does not load" in capsys.readouterr().err
        assert sorted(path.name for path in Path().iterdir()) == ["m.onnx", "y.npy"]
        assert Path("y.npy").read_bytes() == b"mine"


def test_a_file_made_during_the_run_is_not_replaced_and_other_outputs_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "m.onnx", identities(a=[1], b=[2]))

    def run_and_make(*arguments: Any, **options: Any) -> Any:
        outcome = run_model(*arguments, **options)
        Path("out").mkdir()
        Path("out/ya.npy").write_bytes(b"mine")
        return outcome

    monkeypatch.setattr(running, "run", run_and_make)
    assert run("m.onnx", "--output", "out") == 2
    assert "ya.npy: exists; --force replaces it" in capsys.readouterr().err
    assert Path("out/ya.npy").read_bytes() == b"mine"
    assert np.load("out/yb.npy").shape == (2,)
    assert len(list(Path("out").iterdir())) == 2


def test_a_file_made_while_an_output_is_written_is_not_replaced(
    archive: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def save_and_make(*arguments: Any, **options: Any) -> None:
        save(*arguments, **options)
        Path("y.npy").write_bytes(b"mine")

    save = np.save
    monkeypatch.setattr(np, "save", save_and_make)
    assert run(archive, "--output", "y=y.npy") == 2
    assert "y.npy: exists; --force replaces it" in capsys.readouterr().err
    assert Path("y.npy").read_bytes() == b"mine"
    assert sorted(path.name for path in Path().iterdir()) == [archive.name, "y.npy"]


def test_an_output_that_cannot_be_completed_leaves_nothing(
    archive: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def fail(source: str, target: str) -> None:
        raise OSError(errno.EIO, "the device is gone", target)

    monkeypatch.setattr(os, "replace", fail)
    assert run(archive, "--output", "y=y.npy") == 2
    assert "the device is gone" in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == [archive.name]


def test_outputs_are_saved_also_where_the_comparison_fails(archive: Path, capsys: Captured) -> None:
    other = runnable_model()
    other.graph.node[0].op_type = "NoSuchOperator"
    write_model(Path("other.onnx"), other)
    assert run(archive, "--compare", "other.onnx", "--output", "y=y.npy") == 2
    assert "other.onnx: ONNX Runtime does not load" in capsys.readouterr().err
    assert np.load("y.npy").shape == (2, 16)


def test_arrays_of_a_sequence_are_saved_as_far_as_there_are_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    nodes = [
        helper.make_node("SequenceConstruct", ["a", "a"], ["s"]),
        helper.make_node("Identity", ["a"], ["s_0_"]),
    ]
    inputs = [value("a", TensorProto.FLOAT, [3])]
    outputs = [
        helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, None),
        value("s_0_", TensorProto.FLOAT, [3]),
    ]
    graph = helper.make_graph(nodes, "graph", inputs, outputs)
    opset = helper.make_opsetid("", 21)
    write_model(tmp_path / "m.onnx", helper.make_model(graph, opset_imports=[opset], ir_version=10))
    Path("taken").write_bytes(b"mine")
    for output, message in {
        "s[1]=taken": "taken: exists",
        "sorted=f.npy": "which has 's_0_', 's', found 'sorted=f.npy'",
        "s[0]=taken/f.npy": "taken/f.npy: Not a directory",
    }.items():
        assert run("m.onnx", "--output", output) == 2
        assert message in capsys.readouterr().err
    assert run("m.onnx", "--output", "s[7]=7.npy", "--output", "s[1]=1.npy") == 2
    assert "which has 's_0_', 's[0]', 's[1]', found 's[7]=7.npy'" in capsys.readouterr().err
    assert np.load("1.npy").shape == (3,)
    saved_as = result_of(capsys, "m.onnx", "--output", "out")["saved"]
    # What a file of a tensor is called does not depend on what else comes out.
    assert saved_as == {
        "s_0_": os.path.join("out", "s_0_.npy"),
        "s[0]": os.path.join("out", "s_0__2.npy"),
        "s[1]": os.path.join("out", "s_1_.npy"),
    }
    np.save("out/s_1_.npy", np.ones(3, np.float32))
    assert run("m.onnx", "--input", "a=out/s_1_.npy", "--output", "out", "--force") == 2
    assert "expected another file than the input" in capsys.readouterr().err
    assert np.load("out/s_1_.npy").tolist() == [1, 1, 1]


def test_a_directory_for_the_arrays_of_a_sequence_is_tried_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    outputs = [helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, None)]
    inputs = [value("a", TensorProto.FLOAT, [3])]
    graph = helper.make_graph(
        [helper.make_node("NoSuchOperator", ["a"], ["s"])], "graph", inputs, outputs
    )
    opset = helper.make_opsetid("", 21)
    write_model(tmp_path / "m.onnx", helper.make_model(graph, opset_imports=[opset], ir_version=10))
    Path("taken").write_bytes(b"mine")
    assert run("m.onnx", "--output", "taken") == 2
    assert "onnxarchive: taken: Not a directory" in capsys.readouterr().err


def test_strings_that_a_file_would_change_are_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = TensorProto(
        name="c", data_type=TensorProto.STRING, dims=[2], string_data=[b"a\0", b"b"]
    )
    graph = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["y"])],
        "graph",
        [],
        [value("y", TensorProto.STRING, [2])],
        [texts],
    )
    opset = helper.make_opsetid("", 21)
    write_model(tmp_path / "m.onnx", helper.make_model(graph, opset_imports=[opset], ir_version=10))
    assert run("m.onnx", "--output", "y=y.npy") == 2
    assert "output 'y': expected strings that a .npy file can hold" in capsys.readouterr().err
    assert not Path("y.npy").exists()


def test_strings_and_sequences_come_from_files_and_go_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    nodes = [
        helper.make_node("ConcatFromSequence", ["x"], ["y"], axis=0),
        helper.make_node("Identity", ["s"], ["t"]),
    ]
    inputs = [
        helper.make_tensor_sequence_value_info("x", TensorProto.FLOAT, None),
        value("s", TensorProto.STRING, ["n"]),
    ]
    outputs = [value("y", TensorProto.FLOAT, None), value("t", TensorProto.STRING, None)]
    graph = helper.make_graph(nodes, "graph", inputs, outputs)
    opset = helper.make_opsetid("", 21)
    write_model(tmp_path / "m.onnx", helper.make_model(graph, opset_imports=[opset], ir_version=10))
    assert run("m.onnx") == 2
    assert "give it: --input x=FILE.npy, or FILE.npz for a sequence" in capsys.readouterr().err
    np.savez("x.npz", np.zeros(2, np.float32), np.ones(1, np.float32))
    np.save("s.npy", np.array(["a", "größer"]))
    assert run("m.onnx", "--input", "x=x.npz", "--input", "s=s.npy", "--output", "out") == 0
    assert np.load("out/y.npy").tolist() == [0, 0, 1]
    assert np.load("out/t.npy").tolist() == ["a", "größer"]
    assert "x[1]" in capsys.readouterr().out


def test_dimensions_are_given_by_name_and_assumptions_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "named.onnx", identities(c=["n=2"]))
    assert result_of(capsys, "named.onnx", "--dim", "n=2=5")["outputs"][0]["dims"] == [5]
    write_model(tmp_path / "m.onnx", identities(a=["batch", None], b=["n + 1", "batch"]))
    assert run("m.onnx", "--dim", "batch=3") == 0
    printed = capsys.readouterr().out
    assert "assumed   a[1]=1, n + 1=1 (--dim NAME=SIZE says another)" in printed
    assert "  3x1  " in printed
    result = result_of(capsys, "m.onnx", "--dim", "n + 1=4", "--dim", "a[1]=2")
    assert [it["dims"] for it in result["inputs"]] == [[1, 2], [4, 1]]
    assert result["assumed_dims"] == {"batch": 1}


def test_names_do_not_play_with_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    evil = "evil\x1b[2J\nname"
    write_model(tmp_path / "m.onnx", identities(**{evil: [evil]}))
    assert run("m.onnx", "--compare", "m.onnx", "--output", "out") == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert printed.count("evil\\x1b[2J\\nname") >= 4
    assert run("m.onnx", "--dim", "x=1") == 2
    assert "\x1b" not in capsys.readouterr().err


def test_numbers_that_json_lacks_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "m.onnx", identities(a=[3], b=[1]))
    np.save("a.npy", np.array([np.inf, -np.inf, np.nan], np.float32))
    np.save("b.npy", np.array([np.nan], np.float32))
    arguments = ("m.onnx", "--input", "a=a.npy", "--input", "b=b.npy")
    a, b = result_of(capsys, *arguments)["outputs"]
    assert (a["minimum"], a["maximum"], a["mean"], a["nans"]) == ("-Infinity", "Infinity", "NaN", 1)
    assert (b["minimum"], b["maximum"], b["mean"], b["nans"]) == (None, None, None, 1)
    assert run(*arguments) == 0
    assert "nan and 1 NaN" in capsys.readouterr().out


# Comparisons


def test_compare_ends_with_0_where_outputs_are_the_same(archive: Path, capsys: Captured) -> None:
    write_model(Path("m.onnx"), runnable_model())
    assert run(archive, "--compare", "m.onnx") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "compared with m.onnx" in lines
    assert lines[-2:] == [
        "  y: the same in 32 elements",
        "the models are the same on these inputs",
    ]


def test_compare_ends_with_1_and_tells_the_greatest_difference(
    archive: Path, capsys: Captured
) -> None:
    write_model(Path("m.onnx"), runnable_model())
    model = runnable_model()
    bias = numpy_helper.from_array(np.arange(16, dtype=np.float32) + 0.25, "layer.0/bias")
    model.graph.initializer[1].CopyFrom(bias)
    write_model(Path("other.onnx"), model)
    assert run(archive, "--compare", "other.onnx") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("  y: differs in 32 of 32 elements; at most by 0.25")
    assert lines[-1] == "the models are different on these inputs"
    result = result_of(capsys, archive, "--compare", "other.onnx", status=1)
    comparison = result["comparison"]
    assert comparison["is_same"] is False
    (y,) = comparison["differences"]
    assert y["greatest_absolute"] == pytest.approx(0.25, abs=1e-4)
    assert run(archive, "--compare", "other.onnx", "--atol", "0.26") == 0
    assert "the same in 32 elements; at most by 0.25" in capsys.readouterr().out
    assert run(archive, "--compare", "other.onnx", "--rtol", "1e-6") == 1
    assert run(archive, "--compare", "other.onnx", "--rtol", "1e6") == 0


def test_compare_tells_signs_of_zero_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, numbers in {
        "one": [0, -0.0, 1, 2],
        "zero": [0, 0, 1, 2],
        "two": [0, 0, 1, 3],
    }.items():
        tensor = numpy_helper.from_array(np.array(numbers, np.float32), "c")
        node = helper.make_node("Identity", ["c"], ["y"])
        outputs = [value("y", TensorProto.FLOAT, [4])]
        graph = helper.make_graph([node], "graph", [], outputs, [tensor])
        opset = helper.make_opsetid("", 21)
        model = helper.make_model(graph, opset_imports=[opset], ir_version=10)
        write_model(tmp_path / f"{name}.onnx", model)
    assert run("one.onnx", "--compare", "zero.onnx") == 1
    told = capsys.readouterr().out.splitlines()[-2]
    assert told == "  y: differs in 1 of 4 elements only in the sign of a zero (0 and -0)"
    assert run("one.onnx", "--compare", "two.onnx") == 1
    assert capsys.readouterr().out.splitlines()[-2] == (
        "  y: differs in 2 of 4 elements, 1 of them only in the sign of a zero (0 and -0); "
        "at most by 1, relatively by 0.333333"
    )
    result = result_of(capsys, "one.onnx", "--compare", "two.onnx", status=1)
    assert result["comparison"]["differences"][0]["signs_of_zero"] == 1
    assert run("one.onnx", "--compare", "zero.onnx", "--atol", "1e-30") == 0
    assert "  y: the same in 4 elements\n" in capsys.readouterr().out


def test_compare_tells_names_and_shapes_that_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "one.onnx", identities(a=[2]))
    write_model(tmp_path / "shaped.onnx", identities(a=[3]))
    write_model(tmp_path / "named.onnx", identities(b=[2]))
    assert run("one.onnx", "--compare", "shaped.onnx") == 1
    assert "  a: the other model does not take it: " in capsys.readouterr().out
    result = result_of(capsys, "one.onnx", "--compare", "named.onnx", status=1)
    assert [it["name"] for it in result["comparison"]["differences"]] == ["a", "b"]
    assert result["comparison"]["run_ms"] is None


# What goes wrong


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["missing.onnxa"], 2, "missing.onnxa: No such file"),
        (["."], 3, "a directory"),
        (["text"], 3, "text: expected an archive or a serialized ModelProto"),
        (["truncated.onnxa"], 3, "[ZIP-2]"),
        (["bad.onnx"], 2, "bad.onnx: ONNX Runtime does not load the model: "),
        (["an archive.onnxa", "--input", "x"], 2, "--input: expected NAME=VALUE, found 'x'"),
        (["an archive.onnxa", "--input", "x=missing.npy"], 2, "missing.npy: No such file"),
        (["an archive.onnxa", "--input", "x=text"], 2, "text: expected an array as numpy.save"),
        (["an archive.onnxa", "--input", "x=pickle.npy"], 2, "pickle.npy: expected an array"),
        (["an archive.onnxa", "--input", "x=broken.npz"], 2, "broken.npz: expected an array"),
        (["an archive.onnxa", "--input", "z=x.npy"], 2, "which has 'x', found 'z'"),
        (["an archive.onnxa", "--input", "x=x.npy"], 2, "expected shape 2x1024, found 2"),
        (["an archive.onnxa", "--input", "x=x.npy", "--input", "x=y"], 2, "each name once"),
        (["an archive.onnxa", "--dim", "n=2"], 2, "which has none, found 'n'"),
        (["an archive.onnxa", "--dim", "n=x"], 2, "--dim n: expected a whole number, found 'x'"),
        (["an archive.onnxa", "--provider", "tpu"], 2, "found 'tpu'"),
        (["an archive.onnxa", "--repeat", "0"], 2, "found repeat 0"),
        (["an archive.onnxa", "--seed", "-1"], 2, "a seed of 0 or more"),
        (["an archive.onnxa", "--output", "z=new.npy"], 2, "which has 'y', found 'z=new.npy'"),
        (["an archive.onnxa", "--output", "y="], 2, "expected one file for each output"),
        (["an archive.onnxa", "--output", "n", "--output", "n"], 2, "one file for each output"),
        (["an archive.onnxa", "--atol", "1"], 2, "--atol and --rtol go with --compare"),
        (["an archive.onnxa", "--compare", "text"], 3, "text: expected an archive"),
        (["an archive.onnxa", "--compare", "an archive.onnxa", "--atol", "-1"], 2, "tolerance"),
        ([], 2, "required"),
    ],
)
def test_wrong_use_and_wrong_files_are_told_in_a_line_and_leave_nothing(
    archive: Path, arguments: list[str], status: int, message: str, capsys: Captured
) -> None:
    Path("text").write_text("This is not a model, but a text.\n")
    Path("truncated.onnxa").write_bytes(archive.read_bytes()[:-1])
    np.save("x.npy", np.zeros(2, np.float32))
    np.save("pickle.npy", np.array([{}]), allow_pickle=True)
    Path("broken.npz").write_bytes(b"PK\x03\x04")
    model = runnable_model()
    model.graph.node[0].op_type = "NoSuchOperator"
    write_model(Path("bad.onnx"), model)
    before = {path: path.read_bytes() for path in Path().iterdir()}
    assert run(*arguments) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert "Traceback" not in captured.err
    if arguments:
        assert captured.err.count("\n") == 1
    assert {path: path.read_bytes() for path in Path().iterdir()} == before


def test_nothing_but_the_line_is_written_by_the_process(archive: Path) -> None:
    nodes = [helper.make_node("Reshape", ["x", "i"], ["y"])]
    inputs = [value("x", TensorProto.FLOAT, [5]), value("i", TensorProto.INT64, [2])]
    graph = helper.make_graph(nodes, "g", inputs, [value("y", TensorProto.FLOAT, None)])
    opset = helper.make_opsetid("", 21)
    write_model(Path("m.onnx"), helper.make_model(graph, opset_imports=[opset], ir_version=10))
    command = [sys.executable, "-m", "onnxarchive", "run", "m.onnx"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("onnxarchive: m.onnx: ONNX Runtime does not run the model: ")
    assert done.stderr.count("\n") == 1


def test_an_unsafe_archive_is_not_run(archive: Path, capsys: Captured) -> None:
    with onnxarchive.open(archive) as opened:
        flip_byte(archive, opened.entries["__MODEL_PROTO"].data_offset)
    assert run(archive) == 3
    assert "[ZIP-15]" in capsys.readouterr().err


def test_without_onnxruntime_it_says_what_to_install(archive: Path) -> None:
    code = """
import sys
sys.modules["onnxruntime"] = None
from onnxarchive.cli import main
sys.stderr = sys.stdout
print(main(["run", sys.argv[1]]))
"""
    told, status = run_python(code, os.fspath(archive)).splitlines()
    assert "pip install 'onnxarchive[ort]'" in told
    assert status == "2"
