"""The recipe of a program in Node that runs a model of an archive."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from models import entry_of, flip_byte, further_model, runnable_model
from processes import completed

import onnxarchive

ort = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")

pytestmark = pytest.mark.tool

RECIPE = Path(__file__).resolve().parents[3] / "tools" / "recipes" / "node"
MIB = 1 << 20


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    if shutil.which("node") is None or not (RECIPE / "node_modules").exists():
        pytest.skip("npm install in the recipe's directory brings ONNX Runtime")
    path = tmp_path / "model.onnxa"
    onnxarchive.save(runnable_model(MIB), path, models={"further": further_model(MIB)})
    return path


def run_node(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return completed(["node", *arguments], cwd=cwd)


@pytest.mark.parametrize("model", ["", "further"])
def test_a_model_gives_in_node_what_it_gives_in_python(archive: Path, model: str) -> None:
    done = run_node(RECIPE / "run.mjs", archive.name, *[model] * bool(model), cwd=archive.parent)
    assert done.returncode == 0, done.stderr
    session = onnxarchive.session(archive, model=model, providers=["CPUExecutionProvider"])
    (x,) = session.get_inputs()
    (expected,) = session.run(None, {x.name: np.ones(x.shape, np.float32)})
    name, dims, *numbers = done.stdout.split()
    assert name == session.get_outputs()[0].name
    assert dims == f"[{','.join(map(str, expected.shape))}]:"
    found = np.array(numbers, np.float32)
    np.testing.assert_allclose(found, expected.ravel(), rtol=1e-4, atol=1e-3)


def test_a_weight_that_has_changed_is_refused(archive: Path) -> None:
    flip_byte(archive, entry_of(archive, "layer_0_weight").data_offset)
    done = run_node(RECIPE / "run.mjs", archive, cwd=archive.parent)
    assert done.returncode != 0
    assert "expected data with the CRC-32" in done.stderr


def test_a_session_of_a_link_without_packed_copies_maps_the_archive(archive: Path) -> None:
    link = archive.with_suffix(".onnx")
    onnxarchive.link(archive, link)
    program = """
import { readFileSync } from 'node:fs';
import * as ort from 'onnxruntime-node';
const extra = { session: { disable_prepacking: '1' } };
const session = await ort.InferenceSession.create(process.argv[1], { extra });
console.log(readFileSync('/proc/self/maps', 'utf8').includes('model.onnxa'));
"""
    done = run_node("--input-type=module", "--eval", program, link, cwd=RECIPE)
    assert done.stdout == "true\n", done.stderr
