"""Counts the modules of the package that an action enters, and the calls that it makes there.

python3 tools/dev.py python tools/bench/count_calls.py [ACTION ...]

Each action is performed twice on an archive of three tensors; the second time is counted, so that
imports and caches are not. Unlike times, the counts are the same on every machine.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import onnxarchive

_PACKAGE: Final = os.path.dirname(onnxarchive.__file__)
_TENSORS: Final = 3


def _edit(folder: Path, number: int) -> None:
    with onnxarchive.edit(folder / "model.onnxa") as edit:
        edit.metadata["author"] = f"Ada {number}"


def _open(folder: Path, _: int) -> None:
    with onnxarchive.open(folder / "model.onnxa") as archive:
        archive.tensors["weight_1"]


ACTIONS: Final[dict[str, Callable[[Path, int], object]]] = {
    "edit": _edit,
    "open": _open,
    "save": lambda folder, _: onnxarchive.save(_model(), folder / "saved.onnxa"),
    "convert": lambda folder, _: onnxarchive.convert(folder / "model.onnx", folder / "new.onnxa"),
}


def _model() -> onnx.ModelProto:
    weights = [
        numpy_helper.from_array(np.full(1024, index, np.float32), f"weight_{index}")
        for index in range(_TENSORS)
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "weight_0"], ["y"])],
        "graph",
        [value("x", TensorProto.FLOAT, [1024])],
        [value("y", TensorProto.FLOAT, [1024])],
        weights,
    )
    model: onnx.ModelProto = helper.make_model(graph, ir_version=10)
    return model


def count(name: str) -> Counter[str]:
    """The number of calls in each module of the package, by the module's path in the package."""
    calls: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(_PACKAGE):
            calls[os.path.relpath(path, _PACKAGE)] += 1

    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        onnxarchive.save(_model(), folder / "model.onnxa")
        onnx.save(_model(), folder / "model.onnx")
        ACTIONS[name](folder, 1)
        sys.setprofile(profile)
        try:
            ACTIONS[name](folder, 2)
        finally:
            sys.setprofile(None)
    return calls


def main() -> None:
    """Prints the counts of the actions, and with --modules those of each module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("actions", nargs="*", choices=[[], *ACTIONS], metavar="ACTION")
    parser.add_argument("--modules", action="store_true", help="print the calls of each module")
    arguments = parser.parse_args()
    for name in arguments.actions or ACTIONS:
        calls = count(name)
        print(f"{name}: {len(calls)} modules, {calls.total()} calls")
        for module, number in calls.most_common() if arguments.modules else ():
            print(f"{number:7} {module}")


if __name__ == "__main__":
    main()
