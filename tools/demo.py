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

import onnx

import onnxarchive
from onnxarchive.cli import main as command_line
from tools.bench.inputs import Group, Place

WEIGHTS = Group(24, 1024, is_chain=True)


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
        with step(f"build a model: {WEIGHTS.count} layers of {WEIGHTS.width}x{WEIGHTS.width}"):
            model = Place(Path(directory), "demo", WEIGHTS).model()
            Path(source).write_bytes(model.SerializeToString())
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
