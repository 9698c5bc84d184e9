from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from models import model_of, raw_tensor, run_python

import onnxarchive

ROOT = Path(__file__).resolve().parent.parent
NAMES = [
    "Archive",
    "ArchiveError",
    "ArchiveFormatError",
    "ChecksumError",
    "Conversion",
    "Entry",
    "Finding",
    "Misfit",
    "TensorNotFoundError",
    "UnsupportedFeatureError",
    "Writer",
    "check",
    "check_link",
    "check_model",
    "convert",
    "convert_many",
    "export",
    "extract",
    "infer_shapes",
    "link",
    "load",
    "open",
    "options",
    "save",
    "session",
    "transform",
]
# What only one function, or nobody, needs.
LAZY = ["onnxruntime", "onnx_ir", "zipfile_deflate64", "tqdm", "onnx.reference"]


def test_the_public_names_are_these() -> None:
    assert onnxarchive.__all__ == NAMES


def test_every_public_name_is_there_and_explained() -> None:
    for name in onnxarchive.__all__:
        value: Any = getattr(onnxarchive, name)
        assert inspect.getdoc(value), name
        assert value.__module__.startswith("onnxarchive."), name
        if inspect.isfunction(value):
            _require_arguments_explained(name, value)
        elif name in ("Archive", "Writer"):
            for method, function in inspect.getmembers(value, inspect.isfunction):
                if not method.startswith("_"):
                    assert inspect.getdoc(function), f"{name}.{method}"
                    _require_arguments_explained(f"{name}.{method}", function)


def _require_arguments_explained(name: str, function: Any) -> None:
    arguments = [it for it in inspect.signature(function).parameters if it != "self"]
    doc = inspect.getdoc(function) or ""
    if arguments == ["name"] or arguments == ["key"]:
        return  # the sentence says it
    for argument in arguments:
        assert re.search(rf"^ +\**{argument}: ", doc, re.MULTILINE), f"{name}({argument})"


def test_the_version_is_that_of_the_project() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(r'^version = "(.*)"$', text, re.MULTILINE)
    # It stands once: here, or in the package, where the project reads it.
    assert onnxarchive.__version__
    if found:
        assert found[1] == onnxarchive.__version__


def test_importing_is_silent_and_imports_nothing_that_only_some_need() -> None:
    code = f"""
import sys, warnings
warnings.simplefilter("error")
import onnxarchive
print([name for name in {LAZY!r} if name in sys.modules])
"""
    assert run_python(code) == "[]\n"


def test_reading_and_writing_imports_nothing_that_only_some_need(tmp_path: Path) -> None:
    onnxarchive.save(model_of(raw_tensor("w")), tmp_path / "m.onnxa")
    code = f"""
import sys, zipfile, onnxarchive
names = dict(vars(zipfile))
model = onnxarchive.load(sys.argv[1])
onnxarchive.save(model, sys.argv[1])
onnxarchive.check(sys.argv[1], full=True)
onnxarchive.export(sys.argv[1], sys.argv[1] + ".onnx")
onnxarchive.convert(sys.argv[1] + ".onnx", sys.argv[1])
onnxarchive.link(sys.argv[1], sys.argv[1] + ".link.onnx")
onnxarchive.check_link(sys.argv[1] + ".link.onnx", sys.argv[1])
with onnxarchive.open(sys.argv[1]) as archive:
    archive.verify()
print([name for name in {LAZY!r} if name in sys.modules])
print(names == vars(zipfile))
"""
    assert run_python(code, tmp_path / "m.onnxa") == "[]\nTrue\n"


def test_types_are_marked_as_such() -> None:
    assert (ROOT / "onnxarchive" / "py.typed").exists()


def test_a_star_import_gives_the_public_names() -> None:
    names: dict[str, Any] = {}
    exec("from onnxarchive import *", names)
    assert sorted(name for name in names if name != "__builtins__") == NAMES


@pytest.mark.parametrize("name", ["open", "load", "check", "export", "extract", "convert", "link"])
def test_the_file_comes_first(name: str) -> None:
    parameters = list(inspect.signature(getattr(onnxarchive, name)).parameters.values())
    assert parameters[0].name == ("source" if name == "convert" else "path")
    keyword_only = [it for it in parameters if it.kind is it.KEYWORD_ONLY]
    assert all(it.default is not it.empty for it in keyword_only)
    assert len(parameters) - len(keyword_only) <= 2
