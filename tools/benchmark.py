"""Times the library beside onnx on one model, in one run; prints seconds and ratios.

python3 tools/dev.py python tools/benchmark.py [--mebibytes 1024] [--layers 64] [--rounds 5]

Each figure is the median of some rounds, taken in turn so that a change of the machine's speed
meets all of them. Files are in the page cache: what is compared is the work, not the disk.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import convert_model_to_external_data

import onnxarchive
from onnxarchive.cli.table import table


def build_model(mebibytes: int, layers: int) -> onnx.ModelProto:
    """A model of `layers` float32 tensors, `mebibytes` in all."""
    count = mebibytes * (1 << 20) // layers // 4
    weights = [
        numpy_helper.from_array(np.full(count, layer, np.float32), f"layer.{layer}/weight")
        for layer in range(layers)
    ]
    graph = helper.make_graph(
        [helper.make_node("Identity", [weights[0].name], ["y"])],
        "benchmark",
        [],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [count])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def main() -> int:
    """Runs the benchmark in a temporary directory."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mebibytes", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="onnxarchive-benchmark-") as directory:
        os.chdir(directory)
        model = build_model(arguments.mebibytes, arguments.layers)
        onnx.save(model, "single.onnx")
        os.mkdir("external")
        external = onnx.ModelProto()
        external.CopyFrom(model)
        convert_model_to_external_data(external, location="weights.data")
        onnx.save(external, "external/model.onnx")
        del external
        onnxarchive.save(model, "model.onnxa")
        steps = _steps(model)
        seconds: dict[str, list[float]] = {name: [] for name, *_ in steps}
        for _ in range(arguments.rounds):
            for name, _, step in steps:
                begun = time.perf_counter()
                step()
                seconds[name].append(time.perf_counter() - begun)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    rows = [
        [
            name,
            f"{medians[name]:.4f}",
            "" if beside is None else f"{medians[name] / medians[beside]:.3f} of {beside}",
        ]
        for name, beside, _ in steps
    ]
    print(f"{arguments.mebibytes} MiB in {arguments.layers} tensors, {arguments.rounds} rounds\n")
    print(table(["step", "seconds", "ratio"], rows))
    return 0


def _steps(model: onnx.ModelProto) -> list[tuple[str, str | None, Callable[[], object]]]:
    """What is timed: its name, what it is compared with, and how it is done."""

    def onnx_save_external() -> None:
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        if os.path.exists("external/again.data"):
            os.unlink("external/again.data")
        convert_model_to_external_data(copy, location="again.data")
        onnx.save(copy, "external/again.onnx")

    def open_and_view() -> None:
        with onnxarchive.open("model.onnxa") as archive:
            for _ in archive.tensors.values():
                pass

    def verify() -> None:
        with onnxarchive.open("model.onnxa") as archive:
            archive.verify()

    return [
        ("onnx.save", None, lambda: onnx.save(model, "again.onnx")),
        ("onnx.save, external data", None, onnx_save_external),
        ("save", "onnx.save", lambda: onnxarchive.save(model, "again.onnxa")),
        ("onnx.load", None, lambda: onnx.load("single.onnx")),
        ("onnx.load, external data", None, lambda: onnx.load("external/model.onnx")),
        ("load", "onnx.load", lambda: onnxarchive.load("model.onnxa")),
        ("open and view all tensors", "onnx.load", open_and_view),
        ("verify", "onnx.load", verify),
        (
            "convert single",
            "onnx.save",
            lambda: onnxarchive.convert("single.onnx", "again.onnxa"),
        ),
        (
            "convert external data",
            "onnx.save",
            lambda: onnxarchive.convert("external/model.onnx", "again.onnxa"),
        ),
        (
            "export single",
            "onnx.save",
            lambda: onnxarchive.export("model.onnxa", "again.onnx"),
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
