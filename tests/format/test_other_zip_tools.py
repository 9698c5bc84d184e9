"""Archives in the hands of others: every zip tool finds the same, and ONNX reads what was unzipped.

Each tool that is not installed is passed over with a word about it.
"""

from __future__ import annotations

import re
import shutil
import stat
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxarchive
from tools.zip_readers.readers import ReaderError, output_of

pytestmark = pytest.mark.tool


def tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


# What the archives hold


def make_model() -> onnx.ModelProto:
    """A model that reads a float, a half, an int4 and an empty tensor."""
    random = np.random.default_rng(0)
    weight = random.standard_normal((32, 16), np.float32)
    half = random.standard_normal((16, 16)).astype(np.float16)
    index = np.array([3, 1, 2, 0], np.int64)
    quantized = helper.make_tensor(
        "quantized/scale 8", TensorProto.INT4, [16], [number % 16 - 8 for number in range(16)]
    )
    graph = helper.make_graph(
        [
            helper.make_node("Concat", ["x", "empty"], ["all"], axis=0),
            helper.make_node("MatMul", ["all", "layer.0/weight"], ["product"]),
            helper.make_node("Cast", ["half"], ["whole"], to=TensorProto.FLOAT),
            helper.make_node("MatMul", ["product", "whole"], ["second"]),
            helper.make_node("DequantizeLinear", ["quantized/scale 8", "step"], ["shift"]),
            helper.make_node("Add", ["second", "shift"], ["sum"]),
            helper.make_node("Gather", ["sum", "index"], ["y"], axis=1),
        ],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 32])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
        [
            numpy_helper.from_array(weight, "layer.0/weight"),
            numpy_helper.from_array(half, "half"),
            numpy_helper.from_array(np.zeros((0, 32), np.float32), "empty"),
            quantized,
            numpy_helper.from_array(np.array(0.5, np.float32), "step"),
            numpy_helper.from_array(index, "index"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


ASSETS = {
    "größe/日本.txt": "größe".encode(),
    "empty": b"",
    "tokenizer.json": b"{}" * 5000,
    "PK\N{SNOWMAN}": b"PK\5\6\1" + bytes(17) + b"PK\1\2PK\3\4",
}


@dataclass(frozen=True)
class Saved:
    """An archive and what is in it."""

    path: Path
    alignment: int
    model: onnx.ModelProto
    contents: dict[str, bytes]


@pytest.fixture(scope="module", params=[64, 4096])
def archive(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    path, model = tmp_path_factory.mktemp("archive") / "model.onnxa", make_model()
    onnxarchive.save(model, path, size_threshold=0, alignment=request.param, assets=ASSETS)
    with onnxarchive.open(path) as opened:
        contents = {name: bytes(opened.read(name)) for name in opened.entries}
    return Saved(path, request.param, model, contents)


# What the tools say


def test_what_the_archives_hold_is_worth_a_look(archive: Saved) -> None:
    names = list(archive.contents)
    assert names[0] == "layer_0_weight"
    assert names[-1] == "__MODEL_PROTO"
    assert archive.contents["empty"] == archive.contents["assets/empty"] == b""
    assert archive.contents["assets/größe/日本.txt"] == "größe".encode()
    assert len(archive.contents) == 6 + len(ASSETS) + 1
    assert onnxarchive.check(archive.path, full=True) == []


def test_unzipped_files_are_regular_files_that_others_may_read(
    archive: Saved, tmp_path: Path
) -> None:
    output_of(tool("unzip"), "-q", archive.path, "-d", tmp_path)
    modes = {path.stat().st_mode for path in tmp_path.rglob("*") if not path.is_dir()}
    assert modes == {stat.S_IFREG | 0o644}


def test_zipalign_finds_every_entry_aligned(archive: Saved) -> None:
    zipalign = tool("zipalign")
    listed = output_of(zipalign, "-c", "-v", str(archive.alignment), archive.path)
    assert "Verification successful" in listed
    with onnxarchive.open(archive.path) as opened:
        expected = [(str(entry.data_offset), entry.name) for entry in opened.entries.values()]
    assert re.findall(r"^ *(\d+) (.+) \(OK\)$", listed, re.MULTILINE) == expected
    with pytest.raises(ReaderError, match="BAD"):
        output_of(zipalign, "-c", "-v", str(2 * archive.alignment), archive.path)


# ONNX


@pytest.fixture
def directory(archive: Saved, tmp_path: Path) -> Path:
    """The archive, unzipped."""
    with zipfile.ZipFile(archive.path) as opened:
        opened.extractall(tmp_path / "unzipped")
    return tmp_path / "unzipped"


def test_the_unzipped_model_is_loaded_and_checked_by_onnx(archive: Saved, directory: Path) -> None:
    onnx.checker.check_model(str(directory / "__MODEL_PROTO"), full_check=True)
    loaded = onnx.load(directory / "__MODEL_PROTO")
    for tensor, original in zip(
        loaded.graph.initializer, archive.model.graph.initializer, strict=True
    ):
        assert (tensor.name, tensor.data_type) == (original.name, original.data_type)
        array, expected = numpy_helper.to_array(tensor), numpy_helper.to_array(original)
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(array, expected)


def test_onnxruntime_runs_the_unzipped_model_as_the_original(
    archive: Saved, directory: Path
) -> None:
    onnxruntime = pytest.importorskip(
        "onnxruntime", minversion="1.24", reason="onnxruntime before 1.24 crashes on an empty file"
    )
    inputs = {"x": np.random.default_rng(1).standard_normal((3, 32), np.float32)}
    expected, found = (
        onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, inputs)
        for model in (archive.model.SerializeToString(), str(directory / "__MODEL_PROTO"))
    )
    assert np.any(expected[0])
    np.testing.assert_array_equal(found, expected)
