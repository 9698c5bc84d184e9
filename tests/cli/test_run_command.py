from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from commands import error_of, output_of, result_of
from models import entry_of, flip_byte, runnable_model
from onnx import TensorProto, helper, numpy_helper
from processes import completed
from written import write_model

import onnxarchive
from onnxarchive.cli import main
from onnxarchive.interop import run as run_module
from onnxarchive.interop.run import Outcome, Port, make_inputs, random_input, run as run_model
from onnxarchive.model import dtypes

ort = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")

Captured = pytest.CaptureFixture[str]
X = np.linspace(-1, 1, 2048, dtype=np.float32).reshape(2, 1024)
FLOAT = TensorProto.FLOAT
value = helper.make_tensor_value_info
sequence = helper.make_tensor_sequence_value_info
node = helper.make_node


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "an archive.onnxa"
    onnxarchive.save(runnable_model(), path)
    return path


@pytest.fixture
def unloadable() -> str:
    """A model that ONNX Runtime cannot load: an error before that is another one."""
    model = runnable_model()
    model.graph.node[0].op_type = "NoSuchOperator"
    return os.fspath(write_model(Path("m.onnx"), model))


def write_graph(
    path: str,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    *initializers: TensorProto,
) -> None:
    graph = helper.make_graph(nodes, "graph", inputs, outputs, initializers)
    opsets = [helper.make_opsetid("", 21)]
    write_model(Path(path), helper.make_model(graph, opset_imports=opsets, ir_version=10))


def write_identities(path: str, **dims: Sequence[int | str | None]) -> None:
    """Writes a model that gives each of its inputs, as `y` and the name."""
    write_graph(
        path,
        [node("Identity", [name], [f"y{name}"]) for name in dims],
        [value(name, FLOAT, shape) for name, shape in dims.items()],
        [value(f"y{name}", FLOAT, None) for name in dims],
    )


def run(*arguments: str | Path) -> int:
    return main(["run", *(str(argument) for argument in arguments)])


def test_run_prints_inputs_outputs_time_and_memory(archive: Path, capsys: Captured) -> None:
    assert run(archive) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0].split() == ["input", "data", "type", "shape", "from"]
    assert lines[1].split() == ["x", "FLOAT", "[2,", "1024]", "random"]
    assert lines[3].split() == ["output", "data", "type", "shape"]
    assert lines[4].split() == ["y", "FLOAT", "[2,", "16]"]
    assert [line.split()[0] for line in lines[6:]] == ["provider", "time", "memory"]
    assert " ms, run " in lines[7]
    assert "MiB" in lines[8]
    assert captured.err == ""
    result = result_of(capsys, "run", archive, "--repeat", "3", "--provider", "cpu")
    assert result["path"] == str(archive)
    assert result["providers"] == ["CPUExecutionProvider"]
    assert (result["assumed_dims"], result["saved"]) == ({}, {})
    y = {"name": "y", "data_type": "FLOAT", "dims": [2, 16]}
    assert result["inputs"] == [{**y, "name": "x", "dims": [2, 1024], "random": True}]
    assert result["outputs"] == [y]
    assert result["run_ms"] == sorted(result["runs_ms"])[1]
    if os.path.exists("/proc/self/status"):
        assert set(result["memory"]) == {"anonymous_nbytes", "mapped_nbytes"}


def test_run_makes_no_packed_copies_with_no_prepack(
    archive: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    make, found = ort.InferenceSession.__init__, []

    def make_and_note(self: Any, *arguments: Any, **kwargs: Any) -> None:
        make(self, *arguments, **kwargs)
        entries = self.get_session_options()
        found.append(entries.get_session_config_entry("session.disable_prepacking"))

    onnxarchive.export(archive, "m.onnx")
    monkeypatch.setattr(ort.InferenceSession, "__init__", make_and_note)
    for path in (archive, "m.onnx"):
        found.clear()
        assert run(path, "--no-prepack") == 0
        assert set(found) == {"1"}


def test_given_inputs_are_used_and_outputs_saved_in_a_new_or_empty_directory(
    archive: Path, capsys: Captured
) -> None:
    np.save("x.npy", X)
    Path("empty").mkdir()
    weight, bias = map(numpy_helper.to_array, runnable_model().graph.initializer)
    for directory in ("new", "empty"):
        assert run(archive, "--input", "x=x.npy", "--output-dir", directory) == 0
        file = os.path.join(directory, "y.npy")
        printed = capsys.readouterr().out
        assert printed.splitlines()[1].endswith("given")
        assert f"saved     y as {file}" in printed
        np.testing.assert_allclose(np.load(file), X @ weight + bias, rtol=1e-3, atol=1e-4)
    assert result_of(capsys, "run", archive, "--input", "x=x.npy")["inputs"][0]["random"] is False


def test_all_outputs_are_saved_in_a_directory_under_safe_names(
    tmp_path: Path, capsys: Captured
) -> None:
    names = ["../../out/put", "CON", "y=1", "long" * 100]
    nodes = [node("Identity", ["a"], [name]) for name in names]
    outputs = [value(name, FLOAT, [2]) for name in names]
    write_graph("m.onnx", nodes, [value("a", FLOAT, [2])], outputs)
    result = result_of(capsys, "run", "m.onnx", "--output-dir", "results")
    assert set(result["saved"]) == set(names)
    files = sorted(path.name for path in (tmp_path / "results").iterdir())
    assert len(files) == 4
    assert not {"CON.npy", "con.npy"} & set(files)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx", "results"]
    for path in result["saved"].values():
        assert np.load(path).shape == (2,)


def test_a_run_that_fails_or_is_interrupted_leaves_no_output(
    unloadable: str, archive: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    Path("empty").mkdir()
    before = sorted(Path().rglob("*"))
    for target in ("new", "empty"):
        assert "cannot load" in error_of(capsys, "run", unloadable, "--output-dir", target)
        assert sorted(Path().rglob("*")) == before
    monkeypatch.setattr(run_module, "run", Mock(side_effect=KeyboardInterrupt))
    assert run(archive, "--output-dir", "new") == 130
    assert sorted(Path().rglob("*")) == before


def test_a_directory_made_during_the_run_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def run_and_make(*arguments: Any, **options: Any) -> Any:
        outcome = run_model(*arguments, **options)
        Path("out").mkdir()
        Path("out/ya.npy").write_bytes(b"mine")
        return outcome

    write_identities("m.onnx", a=[1])
    monkeypatch.setattr(run_module, "run", run_and_make)
    assert "out" in error_of(capsys, "run", "m.onnx", "--output-dir", "out")
    assert Path("out/ya.npy").read_bytes() == b"mine"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["m.onnx", "out", "ya.npy"]


def test_outputs_that_cannot_be_completed_leave_nothing(
    archive: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        save(*arguments, **options)
        raise OSError(errno.EIO, "the device is gone")

    save = np.save
    monkeypatch.setattr(np, "save", fail)
    assert "the device is gone" in error_of(capsys, "run", archive, "--output-dir", "out")
    assert [path.name for path in Path().iterdir()] == [archive.name]


def test_a_file_that_an_output_does_not_fit_is_named(archive: Path) -> None:
    script = 'ulimit -f 0; "$0" -m onnxarchive run "$1" --output out'
    command: list[str | Path] = ["sh", "-c", script, sys.executable, archive]
    done = completed(command, status=2)
    assert re.search(r"^onnxarchive: .*y\.npy: File too large$", done.stderr, re.MULTILINE)
    assert [path.name for path in Path().iterdir()] == [archive.name]


def test_each_array_of_a_sequence_is_saved(capsys: Captured) -> None:
    nodes = [node("SequenceConstruct", ["a", "a"], ["s"]), node("Identity", ["a"], ["s_0_"])]
    outputs = [sequence("s", FLOAT, None), value("s_0_", FLOAT, [3])]
    write_graph("m.onnx", nodes, [value("a", FLOAT, [3])], outputs)
    assert result_of(capsys, "run", "m.onnx", "--output-dir", "out")["saved"] == {
        "s[0]": os.path.join("out", "s_0_.npy"),
        "s[1]": os.path.join("out", "s_1_.npy"),
        "s_0_": os.path.join("out", "s_0__2.npy"),
    }
    assert np.load("out/s_1_.npy").shape == (3,)


def test_strings_that_a_file_would_change_are_not_saved(capsys: Captured) -> None:
    texts = TensorProto(
        name="c", data_type=TensorProto.STRING, dims=[2], string_data=[b"a\0", b"b"]
    )
    outputs = [value("y", TensorProto.STRING, [2])]
    write_graph("m.onnx", [node("Identity", ["c"], ["y"])], [], outputs, texts)
    assert (
        "output 'y': a string ends with a null character, which a .npy file cannot hold"
        in error_of(capsys, "run", "m.onnx", "--output-dir", "out")
    )
    assert not Path("out").exists()


def test_strings_and_sequences_come_from_files_and_go_there(capsys: Captured) -> None:
    nodes = [node("ConcatFromSequence", ["x"], ["y"], axis=0), node("Identity", ["s"], ["t"])]
    inputs = [sequence("x", FLOAT, None), value("s", TensorProto.STRING, ["n"])]
    outputs = [value("y", FLOAT, None), value("t", TensorProto.STRING, None)]
    write_graph("m.onnx", nodes, inputs, outputs)
    assert "give one: --input x=FILE.npy, or FILE.npz for a sequence" in error_of(
        capsys, "run", "m.onnx"
    )
    np.savez("x.npz", np.zeros(2, np.float32), np.ones(1, np.float32))
    np.save("s.npy", np.array(["a", "größer"]))
    assert run("m.onnx", "--input", "x=x.npz", "--input", "s=s.npy", "--output-dir", "out") == 0
    assert np.load("out/y.npy").tolist() == [0, 0, 1]
    assert np.load("out/t.npy").tolist() == ["a", "größer"]
    assert "x[1]" in capsys.readouterr().out


@pytest.mark.parametrize("name", [*(it.name for it in dtypes.BY_NUMBER.values()), "STRING"])
def test_an_output_of_any_type_comes_from_its_file_as_an_input(
    monkeypatch: pytest.MonkeyPatch, name: str, capsys: Captured
) -> None:
    def run_identity(path: str, inputs: Any, **_: object) -> Outcome:
        """Runs types that ONNX Runtime lacks, too."""
        feed, assumed = make_inputs([Port("x", f"tensor({name.lower()})", (3, 5))], inputs, {})
        outputs = {"y": feed["x"]}
        return Outcome(path, (), frozenset(), assumed, {}, outputs, 0, (0,), {})

    monkeypatch.setattr(run_module, "run", run_identity)
    (output,) = result_of(capsys, "run", "m.onnx", "--output-dir", "first")["outputs"]
    assert output == {"name": "y", "data_type": name, "dims": [3, 5]}
    assert run("m.onnx", "--input", "x=first/y.npy", "--output-dir", "second") == 0
    x = random_input(Port("x", f"tensor({name.lower()})", (3, 5)), (3, 5))
    y = np.load("second/y.npy")
    assert (y if x.dtype.hasobject else y.view(x.dtype)).tolist() == x.tolist()
    assert Path("first/y.npy").read_bytes() == Path("second/y.npy").read_bytes()


@pytest.mark.parametrize("name", ["FLOAT8E5M2", "BFLOAT16", "FLOAT16"])
def test_onnxruntime_reads_the_outputs_that_it_wrote(name: str, capsys: Captured) -> None:
    number = TensorProto.DataType.Value(name)
    nodes = [node("Identity", ["x"], ["y"])]
    write_graph("m.onnx", nodes, [value("x", number, [16])], [value("y", number, [16])])
    assert run("m.onnx", "--output-dir", "first") == 0
    assert run("m.onnx", "--input", "x=first/y.npy", "--output-dir", "second") == 0
    assert Path("first/y.npy").read_bytes() == Path("second/y.npy").read_bytes()


def test_dimensions_are_given_by_name_and_assumed_ones_are_printed(capsys: Captured) -> None:
    write_identities("m.onnx", a=["batch", None], b=["n + 1", "batch"])
    printed = output_of(capsys, "run", "m.onnx", "--dim", "batch=3")
    assert "assumed   a[1]=1, n + 1=1 (--dim NAME=SIZE sets another size)" in printed
    assert "  [3, 1]  " in printed
    result = result_of(capsys, "run", "m.onnx", "--dim", "n + 1=4", "--dim", "a[1]=2")
    assert [it["dims"] for it in result["inputs"]] == [[1, 2], [4, 1]]
    assert result["assumed_dims"] == {"batch": 1}


def test_control_characters_in_names_are_escaped(capsys: Captured) -> None:
    evil = "evil\x1b[2J\nname"
    write_identities("m.onnx", **{evil: [evil]})
    printed = output_of(capsys, "run", "m.onnx", "--output-dir", "out")
    assert "\x1b" not in printed
    assert printed.count("evil\\x1b[2J\\nname") >= 4
    assert "\x1b" not in error_of(capsys, "run", "m.onnx", "--dim", "x=1")


def test_a_run_that_fails_writes_one_line_and_nothing_else() -> None:
    inputs = [value("x", FLOAT, [5]), value("i", TensorProto.INT64, [2])]
    outputs = [value("y", FLOAT, None)]
    write_graph("m.onnx", [node("Reshape", ["x", "i"], ["y"])], inputs, outputs)
    command = [sys.executable, "-m", "onnxarchive", "run", "m.onnx"]
    done = completed(command, status=2)
    assert done.stdout == ""
    assert done.stderr.startswith("onnxarchive: m.onnx: ONNX Runtime cannot run the model: ")
    assert done.stderr.count("\n") == 1


def test_an_unsafe_archive_is_not_run(archive: Path, capsys: Captured) -> None:
    flip_byte(archive, entry_of(archive, "__MODEL_PROTO").data_offset)
    assert "[ZIP-15]" in error_of(capsys, "run", archive, status=3)


def test_run_says_which_command_helps_with_a_directory(capsys: Captured) -> None:
    Path("hub").mkdir()
    write_model(Path("hub/m.onnx"), runnable_model())
    assert error_of(capsys, "run", "hub", status=3) == (
        "onnxarchive: hub: expected an ONNX archive, found a directory with a model; "
        "'onnxarchive convert hub NEW.onnxa' makes an archive of it\n"
    )
