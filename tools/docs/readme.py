#!/usr/bin/env python3
"""Runs the Python snippets and the commands of README, guide and *My file is damaged*.

python3 tools/dev.py python tools/docs/readme.py      all; needs the extras ort, ir and remote
python3 tools/dev.py python tools/docs/readme.py 2    the first two snippets; need no extra
"""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from onnxarchive.cli import main as run_command

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "tools" / "docs"
PAGES = (ROOT / "README.md", DOCS / "guide.md", DOCS / "damaged.md")


def blocks(language: str) -> list[str]:
    """The code blocks of a language, in the order of the pages."""
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def commands() -> list[list[str]]:
    """The arguments of each `onnxarchive` command, in order."""
    lines = [line for block in blocks("console") for line in block.splitlines()]
    split = [shlex.split(line.removeprefix("$ ")) for line in lines]
    return [arguments for program, *arguments in split if program == "onnxarchive"]


def make_files(directory: Path) -> None:
    """Writes the files that the snippets and commands read."""
    weight = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
    for file, name in (("model.onnx", "layer.0/weight"), ("decoder.onnx", "shared")):
        graph = helper.make_graph(
            [helper.make_node("MatMul", ["x", name], ["y"])],
            "readme",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 64])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 32])],
            [numpy_helper.from_array(weight, name)],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
        (directory / file).write_bytes(model.SerializeToString())
        (directory / "models").mkdir(exist_ok=True)
        (directory / "models" / file).write_bytes(model.SerializeToString())
    (directory / "onnx").mkdir()
    (directory / "labels.txt").write_text("cat\ndog\n")


def run_python(snippets: Iterable[str], **names: object) -> None:
    """Runs snippets one after another, in one namespace that begins with these names."""
    for snippet in snippets:
        exec(compile(snippet, "a snippet of the README or the guide", "exec"), names)


def run_commands(commands: Iterable[list[str]]) -> None:
    """Runs commands one after another.

    Raises:
        RuntimeError: A command failed.
    """
    for arguments in commands:
        status = run_command(arguments)
        if status:
            raise RuntimeError(f"onnxarchive {shlex.join(arguments)}: exit status {status}")


@contextlib.contextmanager
def _with_files() -> Iterator[None]:
    """A temporary working directory with the files that the snippets and commands read."""
    with tempfile.TemporaryDirectory() as directory:
        make_files(Path(directory))
        with contextlib.chdir(directory):
            yield


def main() -> int:
    """Runs the first N snippets; without the argument N, all snippets and all commands."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else None
    with _with_files():
        run_python(blocks("python")[:count])
    if count is None:
        with _with_files():
            run_commands(commands())
    return 0


if __name__ == "__main__":
    sys.exit(main())
