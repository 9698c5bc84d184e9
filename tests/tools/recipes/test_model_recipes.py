"""The recipes that export, quantize and convert models, run as their first lines say."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from models import run_python
from onnx import TensorProto, helper, numpy_helper
from processes import completed

import onnxarchive

pytestmark = pytest.mark.tool

RECIPES = Path(__file__).resolve().parents[3] / "tools" / "recipes"
SIDE = 256
X = np.random.default_rng(7).standard_normal((4, SIDE), np.float32)
ASSETS = {"labels.txt": b"cat\n"}


def run_recipe(name: str, *arguments: object, needs: tuple[str, ...] = ()) -> str:
    """Runs a recipe, which must succeed; returns its output."""
    for library in ("onnxruntime", *needs):
        pytest.importorskip(library, reason=f"{library} is not installed")
    done = completed([sys.executable, RECIPES / name, *map(str, arguments)], status=0)
    return done.stdout


def _layers(*names: str) -> onnx.ModelProto:
    """A model that multiplies by one weight after another."""
    values = ["x", *(f"after {name}" for name in names[:-1]), "y"]
    weights = [
        np.random.default_rng([*name.encode()]).standard_normal((SIDE, SIDE), np.float32) / 16
        for name in names
    ]
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", [before, name], [after], name)
            for name, before, after in zip(names, values[:-1], values[1:], strict=True)
        ],
        "layers",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", SIDE])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", SIDE])],
        [numpy_helper.from_array(it, name) for it, name in zip(weights, names, strict=True)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "m.onnxa"
    onnxarchive.save(_layers("a", "b"), path, models={"short": _layers("a")}, assets=ASSETS)
    return path


@pytest.mark.parametrize(
    ("recipe", "options", "operator", "size", "error"),
    [
        ("quantize.py", [], "MatMulInteger", 0.3, 0.05),
        ("quantize.py", ["--bits", 4], "MatMulNBits", 0.2, 0.2),
        ("to_float16.py", [], "Cast", 0.55, 0.005),
    ],
    ids=["8 bits", "4 bits", "float16"],
)
def test_models_become_smaller_and_nearly_compute_what_they_did(
    archive: Path, recipe: str, options: list[Any], operator: str, size: float, error: float
) -> None:
    target = archive.with_name("small.onnxa")
    printed = run_recipe(recipe, archive, target, *options, needs=("onnx_ir",))
    assert f"{target.stat().st_size:,} bytes" in printed
    assert target.stat().st_size < size * archive.stat().st_size
    assert onnxarchive.check(target, full=True) == []
    with onnxarchive.open(target) as opened:
        assert {name: bytes(data) for name, data in opened.assets.items()} == ASSETS
        assert list(opened.models) == ["", "short"]
        for model in opened.models.values():
            assert operator in [node.op_type for node in model.graph.node]
    for id in ("", "short"):
        found, expected = (
            onnxarchive.session(path, model=id).run(None, {"x": X})[0] for path in (target, archive)
        )
        assert 0 < np.abs(found - expected).mean() < error * np.abs(expected).mean()


def test_a_module_of_pytorch_becomes_an_archive(path: Path) -> None:
    printed = run_recipe("export_torch.py", path, needs=("torch", "onnxscript"))
    assert f"{path}: scores of shape (3, 10), as PyTorch's" in printed
    assert onnxarchive.check(path, full=True) == []


def test_encoder_and_decoder_share_their_embedding(path: Path) -> None:
    printed = run_recipe("encoder_decoder.py", path, needs=("torch", "onnxscript"))
    assert "tokens as PyTorch's" in printed
    tokens = printed.partition("tokens as PyTorch's:")[2]
    assert len(set(tokens.split())) > 8  # not the same one again and again
    assert onnxarchive.check(path, full=True) == []
    with onnxarchive.open(path) as archive:
        sizes = [entry.nbytes for entry in archive.entries.values()]
        assert sizes.count(2000 * 64 * 4) == 1


def test_a_tokenizer_comes_with_its_model(path: Path) -> None:
    texts = ["the cat sat", "cat sat the", "a dog ran"]
    printed = run_recipe("with_tokenizer.py", path, *texts, needs=("tokenizers",))
    likeness = np.array(
        [[float(it) for it in line.strip(" []").split()] for line in printed.splitlines()]
    )
    assert likeness.shape == (3, 3)
    assert likeness[0, 1] == 1  # the same words
    assert likeness[0, 2] < 0.9
    assert onnxarchive.check(path, full=True) == []
    code = "import sys, onnxarchive; print(*onnxarchive.open(sys.argv[1]).assets)"
    assert run_python(code, path) == "tokenizer.json\n"


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("hugging_face/layout.py", "onnx"),
        ("object_store.py", "onnx"),
        ("run_openvino.py", "openvino"),
        ("to_float16.py", "onnxruntime"),
        ("with_tokenizer.py", "tokenizers"),
    ],
)
def test_a_recipe_without_arguments_says_how_to_call_it(name: str, needs: str) -> None:
    pytest.importorskip(needs)
    command = [sys.executable, str(RECIPES / name)]
    done = completed(command, status=1)
    assert f"\npython {Path(name).name} " in done.stderr
    assert "Traceback" not in done.stderr
