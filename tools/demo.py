"""Builds a model of 100 MB, converts it to an archive, lists it, maps it, exports it."""

from __future__ import annotations

import filecmp
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import onnxarchive
from onnxarchive.cli import main as command_line

LAYERS = 24
WIDTH = 1024


def build_model() -> onnx.ModelProto:
    """A stack of linear layers with about 100 MB of float32 weights."""
    random = np.random.default_rng(seed=0)
    nodes, weights = [], []
    for layer in range(LAYERS):
        weight = random.standard_normal((WIDTH, WIDTH), np.float32)
        weights.append(numpy_helper.from_array(weight / WIDTH**0.5, f"layer.{layer}/weight"))
        bias = np.zeros(WIDTH, np.float32)
        weights.append(numpy_helper.from_array(bias, f"layer.{layer}/bias"))
        nodes += [
            helper.make_node("MatMul", [f"x{layer}", f"layer.{layer}/weight"], [f"p{layer}"]),
            helper.make_node("Add", [f"p{layer}", f"layer.{layer}/bias"], [f"s{layer}"]),
            helper.make_node("Tanh", [f"s{layer}"], [f"x{layer + 1}"]),
        ]
    graph = helper.make_graph(
        nodes,
        "demo",
        [helper.make_tensor_value_info("x0", TensorProto.FLOAT, ["batch", WIDTH])],
        [helper.make_tensor_value_info(f"x{LAYERS}", TensorProto.FLOAT, ["batch", WIDTH])],
        weights,
    )
    opsets = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8, producer_name="demo")


@contextmanager
def step(title: str) -> Iterator[None]:
    """Prints the step and its duration."""
    print(f"\n== {title}", flush=True)
    begun = time.perf_counter()
    yield
    print(f"   {(time.perf_counter() - begun) * 1000:.1f} ms", flush=True)


def run(*arguments: str) -> int:
    """Runs a command of the command line; returns its exit status."""
    with step(" ".join(["onnxarchive", *map(os.path.basename, arguments)])):
        return command_line(arguments)


def main() -> int:
    """Runs the demonstration in a temporary directory."""
    with tempfile.TemporaryDirectory(prefix="onnxarchive demo ") as directory:
        source, archive, exported = (
            os.path.join(directory, name) for name in ("model.onnx", "model.onnxa", "back.onnx")
        )
        with step(f"build a model: {LAYERS} layers of {WIDTH}x{WIDTH}"):
            Path(source).write_bytes(build_model().SerializeToString())
            print(f"   {source}: {os.path.getsize(source):,} bytes")
        if run("convert", source, archive) or run("ls", archive):
            return 1
        with step("map it: open the archive and make a view of every tensor"):
            opened = onnxarchive.open(archive)
            views = dict(opened.tensors)
            opened.close()
            print(f"   {len(views)} arrays, {sum(view.nbytes for view in views.values()):,} bytes")
        with step("use it: computing the mean of one layer's weights reads only this layer"):
            print(f"   mean of layer.7/weight: {views['layer.7/weight'].mean():.6f}")
        if run("check", "--full", archive) or run("export", archive, exported):
            return 1
        with step("compare the exported model with the original"):
            if onnx.load(source) != onnx.load(exported):
                print("   the exported model differs from the original", file=sys.stderr)
                return 1
            same_bytes = filecmp.cmp(source, exported, shallow=False)
            print(f"   equal models{', and the same bytes' if same_bytes else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
