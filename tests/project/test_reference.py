"""Every public name is documented in the same form, and every example of the reference runs."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import inspect
import io
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import onnx
import pytest
from obstore.store import MemoryStore
from safetensors.numpy import save_file

import onnxarchive
from tools.docs import reference
from tools.docs.readme import make_files

# Classes that only functions instantiate.
RESULTS = ("Archive", "Edit", "TorchTensors")


def _documented() -> Iterator[tuple[str, Any]]:
    """All public functions, classes, methods and properties by name."""
    for module in reference.MODULES:
        for name in module.__all__:
            value = getattr(module, name)
            yield f"{module.__name__}.{name}", value
            for member, found in vars(value).items() if inspect.isclass(value) else ():
                is_documented = isinstance(found, FunctionType | property)
                if is_documented and not member.startswith("_"):
                    yield f"{module.__name__}.{name}.{member}", found


DOCUMENTED = dict(_documented())
FUNCTIONS = {name: it for name, it in DOCUMENTED.items() if isinstance(it, FunctionType)}
CLASSES = {name: it for name, it in DOCUMENTED.items() if inspect.isclass(it)}


def sections(value: object) -> dict[str, list[str]]:
    """The sections of a docstring, each with the names of its items."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in (inspect.getdoc(value) or "").splitlines():
        if re.fullmatch(r"[A-Z][a-z]+:", line):
            lines = found[line[:-1]] = []
        elif name := re.match(r" {4}([\w.]+): ", line):
            lines.append(name[1])
    return found


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_public_name_has_a_summary(name: str) -> None:
    first, _, rest = (inspect.getdoc(DOCUMENTED[name]) or "").partition("\n")
    assert first.endswith((".", "`."))
    assert not rest or rest.startswith("\n")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_and_result_of_every_function_are_documented(name: str) -> None:
    signature = inspect.signature(FUNCTIONS[name])
    found = sections(FUNCTIONS[name])
    assert found.get("Args", []) == [it for it in signature.parameters if it != "self"]
    is_context = hasattr(FUNCTIONS[name], "__wrapped__")
    result = "Yields" if is_context else "Returns"
    assert (result in found) is (signature.return_annotation != "None")


@pytest.mark.parametrize("name", CLASSES)
def test_arguments_or_attributes_of_every_class_are_documented(name: str) -> None:
    found, fields = sections(CLASSES[name]), getattr(CLASSES[name], "__match_args__", ())
    fields = getattr(CLASSES[name], "_fields", fields)
    if fields:
        assert sorted(found["Attributes"]) == sorted(fields)
    elif CLASSES[name].__name__ in RESULTS:
        annotated = vars(CLASSES[name]).get("__annotations__", {})
        assert found.get("Attributes", []) == [it for it in annotated if it[0] != "_"]
    elif not issubclass(CLASSES[name], Exception):
        arguments = list(inspect.signature(CLASSES[name]).parameters)
        assert found["Args"] == arguments


@pytest.mark.parametrize("name", DOCUMENTED)
def test_documented_errors_exist(name: str) -> None:
    found = sections(DOCUMENTED[name])
    assert found.get("Raises") != []
    for error in found.get("Raises", []):
        module, _, short = error.rpartition(".")
        home: Any = importlib.import_module(module) if module else onnxarchive
        kind = getattr(home, short, None) or getattr(builtins, short)
        assert issubclass(kind, Exception)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that examples read."""
    directory = tmp_path_factory.mktemp("files")
    make_files(directory)
    model, decoder = directory / "model.onnx", directory / "decoder.onnx"
    labels = {"labels.txt": directory / "labels.txt"}
    target = directory / "model.onnxa"
    onnxarchive.convert(model, target, models={"decoder": decoder}, assets=labels)
    onnxarchive.convert(decoder, directory / "other.onnxa")
    save_file({"weight": np.ones((64, 32), np.float32)}, directory / "model.safetensors")
    return directory


def _names(files: Path) -> dict[str, Any]:
    """The names that examples use."""
    store = MemoryStore()
    store.put("models/model.onnxa", (files / "model.onnxa").read_bytes())
    found = {name: importlib.import_module(name) for name in ("functools", "onnx", "warnings")}
    return {
        **found,
        "decoder": onnx.load(files / "decoder.onnx"),
        "model": onnx.load(files / "model.onnx"),
        "np": np,
        "onnxarchive": onnxarchive,
        "store": store,
    }


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(it, marks=pytest.mark.tool) if ".torch." in it else it
        for it in [*FUNCTIONS, *CLASSES]
    ],
)
def test_every_example_runs(
    name: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = reference.example(inspect.getdoc(DOCUMENTED[name]) or "")
    assert code
    names = _names(files)
    if ".session" in name or "onnxruntime." in code:
        names["onnxruntime"] = pytest.importorskip("onnxruntime")
    if ".ir." in name:
        pytest.importorskip("onnx_ir")
    if ".torch." in name:
        pytest.importorskip("torch")
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        exec(compile(code, name, "exec"), names)


@pytest.mark.tool
def test_the_reference_has_every_public_name_and_command(tmp_path: Path) -> None:
    for directory in ("one", "two"):
        command = [sys.executable, reference.__file__, str(tmp_path / directory)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    one = {it.name: it.read_text(encoding="utf-8") for it in (tmp_path / "one").rglob("*.html")}
    two = {it.name: it.read_text(encoding="utf-8") for it in (tmp_path / "two").rglob("*.html")}
    assert one == two
    for name in DOCUMENTED:
        short = name.removeprefix("onnxarchive.").removeprefix("interop.torch.").removeprefix("ir.")
        assert any(f'id="{short}"' in text for text in one.values()), name
    for name, _ in reference.commands():
        assert f"usage: onnxarchive {name} " in one["cli.html"]
    assert "Locks and crashes" in one["guide.html"]
    assert "README.md" not in one["guide.html"]
    for page in ("ir", "interop/torch", "cli", "guide"):
        assert f'href="onnxarchive/{page}.html"' in one["onnxarchive.html"]
    assert "Unpack[Access]" in re.sub("<[^>]+>", "", one["onnxarchive.html"])
