"""The recipes in Python that make and keep archives, run as their first lines say."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from models import run_python, text_model, weight_model
from object_servers import S3Server
from onnx import numpy_helper
from processes import completed

import onnxarchive
from onnxarchive.reading.archive import contents_of

pytestmark = pytest.mark.tool

RECIPES = Path(__file__).resolve().parents[3] / "tools" / "recipes"
SIDE = 256
X = np.random.default_rng(7).standard_normal((4, SIDE), np.float32)
ASSETS = {"labels.txt": b"cat\n"}


def run_recipe(name: str, *arguments: object, needs: tuple[str, ...] = ()) -> str:
    """Runs a recipe, which must succeed; returns its output."""
    for library in ("onnxruntime", *needs):
        pytest.importorskip(library, reason=f"{library} is not installed")
    return completed([sys.executable, RECIPES / name, *arguments], status=0).stdout


def _layers(*names: str) -> onnx.ModelProto:
    """A model that multiplies by one weight after another."""
    values = ["x", *(f"after_{name}" for name in names[:-1]), "y"]
    nodes = [
        f"{after} = MatMul({before}, {name})"
        for name, before, after in zip(names, values[:-1], values[1:], strict=True)
    ]
    text = f"layers (float[n, {SIDE}] x) => (float[n, {SIDE}] y) {{ {' '.join(nodes)} }}"
    weights = {
        name: np.random.default_rng([*name.encode()]).standard_normal((SIDE, SIDE), np.float32)
        for name in names
    }
    return text_model(text, *(numpy_helper.from_array(it / 16, n) for n, it in weights.items()))


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


def test_a_variant_with_fixed_shapes_costs_its_graph_alone(archive: Path) -> None:
    size = archive.stat().st_size
    printed = run_recipe("fixed_shapes.py", archive, "one", "n=1")
    growth = archive.stat().st_size - size
    assert printed == f"{growth} bytes more\n"
    assert 0 < growth < 500 < size // 1000
    assert onnxarchive.check(archive, full=True) == []
    any_rows, one_row = (onnxarchive.session(archive, model=it) for it in ("", "one"))
    assert [it.shape for it in (*one_row.get_inputs(), *one_row.get_outputs())] == [[1, SIDE]] * 2
    (found,) = one_row.run(None, {"x": X[:1]})
    assert np.array_equal(found, any_rows.run(None, {"x": X[:1]})[0])
    assert any_rows.run(None, {"x": X})[0].shape == X.shape
    with pytest.raises(Exception, match="invalid dimensions"):
        one_row.run(None, {"x": X})


@pytest.mark.parametrize(
    ("id", "pair", "message"),
    [
        ("two", "rows=2", "{}: the model has no dimension rows"),
        ("short", "n=2", "{}: has a model 'short'; choose another id"),
        ("", "n=2", "{}: has a model ''; choose another id"),
        ("two", "n", "expected NAME=SIZE with a size of at least 1, found 'n'"),
        ("two", "n=0", "expected NAME=SIZE with a size of at least 1, found 'n=0'"),
        ("two", "n=-2", "expected NAME=SIZE with a size of at least 1, found 'n=-2'"),
    ],
)
def test_a_variant_that_cannot_be_added_changes_nothing(
    archive: Path, id: str, pair: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe: Any = importlib.import_module("tools.recipes.fixed_shapes")
    content = archive.read_bytes()
    monkeypatch.setattr("sys.argv", ["fixed_shapes.py", str(archive), id, pair])
    with pytest.raises(SystemExit) as raised:
        recipe.main()
    assert str(raised.value) == message.format(archive)
    assert archive.read_bytes() == content


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
        ("fixed_shapes.py", "onnx"),
        ("hugging_face/layout.py", "onnx"),
        ("object_store.py", "onnx"),
        ("run_openvino.py", "openvino"),
        ("to_float16.py", "onnxruntime"),
        ("with_tokenizer.py", "tokenizers"),
    ],
)
def test_a_recipe_without_arguments_says_how_to_call_it(name: str, needs: str) -> None:
    pytest.importorskip(needs)
    done = completed([sys.executable, RECIPES / name], status=1)
    assert f"\npython {Path(name).name} " in done.stderr
    assert "Traceback" not in done.stderr


# Buckets


def run_in_store(s3: S3Server, name: str, *arguments: str, status: int = 0) -> str:
    """Runs a recipe with credentials from the environment; returns its output."""
    environment = {
        "AWS_ENDPOINT_URL": s3.endpoint,
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "SECRET",
    }
    command = [sys.executable, RECIPES / name, *arguments]
    done = completed(command, status=status, env={**os.environ, **environment})
    assert "SECRET" not in done.stdout + done.stderr
    return done.stdout


def test_a_model_is_saved_to_a_bucket_and_used_from_there(s3: S3Server) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    printed = run_in_store(s3, "object_store.py", "s3://bucket/folder").splitlines()
    assert printed[0] == f"w {4 << 20}"
    assert "(1024, 1024) float32" in printed
    url = "s3://bucket/folder/model.onnxa"
    assert onnxarchive.check(url, full=True, storage_options=s3.options) == []
    with onnxarchive.open(url, storage_options=s3.options) as archive:
        assert printed[-1] == f"{contents_of(archive).file.size:,} bytes downloaded"


def test_a_cluster_converts_the_models_of_a_bucket(s3: S3Server) -> None:
    pytest.importorskip("distributed", reason="distributed (Dask) is not installed")
    for seed in range(3):
        url = f"s3://bucket/models/{seed}.onnxa"
        onnxarchive.save(weight_model(seed), url, storage_options=s3.options)
    arguments = ("many_models.py", "s3://bucket/models", "s3://bucket/archives")
    lines = run_in_store(s3, *arguments).splitlines()
    assert [line.split()[0] for line in lines] == ["1/3", "2/3", "3/3"]
    assert all(line.endswith(" bytes") for line in lines)
    for seed in range(3):
        url = f"s3://bucket/archives/{seed}.onnxa"
        assert onnxarchive.load(url, storage_options=s3.options) == weight_model(seed)
    lines = run_in_store(s3, *arguments).splitlines()
    assert all(line.endswith(": there already") for line in lines)
    printed = run_in_store(s3, "many_models.py", "s3://bucket/none", "s3://bucket/a", status=1)
    assert "1/1 s3://bucket/none: " in printed
