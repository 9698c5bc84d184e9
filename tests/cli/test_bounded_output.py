"""Output in proportion to the input, whatever names and messages a file has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from commands import output_of, result_of
from onnx import TensorProto, helper, numpy_helper

import onnxarchive
from onnxarchive.cli.output import fail

Captured = pytest.CaptureFixture[str]

LONG = "x" * 100_000


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """An archive of 200 tensors in two models, with a few long names."""
    weights = [numpy_helper.from_array(np.full(300, it, np.float32), f"w{it}") for it in range(200)]
    weights[7].name = LONG
    port = helper.make_tensor_value_info(LONG, TensorProto.FLOAT, [LONG])
    model = helper.make_model(helper.make_graph([], LONG, [port], [port], weights))
    helper.set_model_props(model, {LONG: LONG})
    path = tmp_path / "archive.onnxa"
    others = {f"m{it}": onnx.ModelProto(ir_version=10, graph={"name": "g"}) for it in range(100)}
    onnxarchive.save(model, path, models={**others, "decoder": model})
    return path


@pytest.mark.parametrize("command", ["ls", "models list", "info"])
def test_a_long_name_is_cut_in_a_table_and_whole_in_json(
    command: str, archive: Path, capsys: Captured
) -> None:
    output = output_of(capsys, *command.split(), archive)
    assert f"{'x' * 100}...{'x' * 100}" in output
    assert max(map(len, output.splitlines())) < 1000
    assert LONG in output_of(capsys, *command.split(), archive, "--json")


def test_the_rows_of_a_table_have_the_width_of_cut_cells(archive: Path, capsys: Captured) -> None:
    assert len(output_of(capsys, "ls", archive)) < 302 * 500
    assert len(result_of(capsys, "ls", archive)["tensors"]) == 200


@pytest.mark.parametrize("part", ["a", "a=", "a=b (--", "://", "::", "a::", "\x01"])
def test_a_message_takes_time_in_proportion_to_its_length(part: str, capsys: Captured) -> None:
    text = part * ((4 << 20) // len(part))
    assert fail(text, 2) == 2
    assert len(capsys.readouterr().err) >= len(text)


def test_only_the_first_lines_of_a_long_message_are_printed(capsys: Captured) -> None:
    fail("\n".join(["faults:", *map(str, range(1000))]), 3)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["onnxarchive: faults:", "0"]
    assert lines[-2:] == ["48", "and 951 more lines"]


@pytest.mark.parametrize("command", ["ls", "models list", "info", "check"])
def test_a_tensor_of_an_impossible_shape_is_listed(
    command: str, tmp_path: Path, capsys: Captured
) -> None:
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1 << 62] * 300)
    model = helper.make_model(helper.make_graph([], "g", [], [], [weight]))
    onnxarchive.save(model, tmp_path / "m.onnxa")
    assert output_of(capsys, *command.split(), tmp_path / "m.onnxa")
