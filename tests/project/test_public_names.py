from __future__ import annotations

import ast
import importlib
import inspect
import io
import os
import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from models import model_of, raw_tensor, run_python, weight_model

import onnxarchive
from onnxarchive import ir
from onnxarchive.interop.netron import Server
from onnxarchive.interop.run import run

ROOT = Path(__file__).resolve().parents[2]
# Modules that `import onnxarchive` must not import.
LAZY = [
    *("distributed", "fsspec", "http.server", "jax", "netron", "obstore", "onnx.reference"),
    *("onnx_ir", "onnxoptimizer", "onnxruntime", "onnxsim", "onnxslim", "selenium", "shtab"),
    *("torch", "tqdm", "zipfile_deflate64"),
]


def test_the_version_is_that_of_the_project() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(r'^version = "(.*)"$', text, re.MULTILINE)
    # The version is written once: in pyproject.toml, or in the package.
    assert onnxarchive.__version__
    if found:
        assert found[1] == onnxarchive.__version__


def test_importing_is_silent_and_imports_nothing_that_only_some_need() -> None:
    code = """
import sys, warnings, onnx
before = set(sys.modules)
warnings.simplefilter("error")
import onnxarchive
print(*sorted(set(sys.modules) - before))
"""
    assert run_python(code).split() == [
        "onnxarchive",
        "onnxarchive.interop",
        "onnxarchive.interop.onnx_registry",
    ]


def test_importing_before_onnx_imports_neither_onnx_nor_numpy() -> None:
    code = """
import sys
before = set(sys.modules)
import onnxarchive
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(new - sys.stdlib_module_names))
"""
    assert run_python(code) == "onnxarchive\n"


def test_opening_imports_nothing_that_only_edits_and_faults_need(path: Path) -> None:
    onnxarchive.save(weight_model(seed=1), path)
    code = """
import sys, onnxarchive
with onnxarchive.open(sys.argv[1]) as archive:
    print(len(list(archive.tensors.values())))
    names = ("hashlib", "html", "shlex", "concurrent.futures")
    print([name for name in names if name in sys.modules])
    archive.verify()
unneeded = ["reading.unfinished", "editing", "model.weights", "files.replacement", "reading.check"]
unneeded += ["writing", "cli", "conversion", "interop.run", "ir"]
print([name for name in unneeded if f"onnxarchive.{name}" in sys.modules])
"""
    assert run_python(code, path) == "1\n[]\n[]\n"


def test_type_checkers_see_the_same_public_names() -> None:
    tree = ast.parse(Path(onnxarchive.__file__).read_text())
    conditions = {ast.unparse(it.test): it for it in tree.body if isinstance(it, ast.If)}
    told = {}
    for statement in conditions["_TYPE_CHECKING"].body:
        assert isinstance(statement, ast.ImportFrom)
        for alias in statement.names:
            if statement.module != "typing":
                assert alias.asname == alias.name
                told[alias.name] = str(statement.module)
    assert sorted(told) == onnxarchive.__all__
    for name, module in told.items():
        assert getattr(onnxarchive, name) is vars(importlib.import_module(module))[name]
        assert module == f"onnxarchive.{onnxarchive._MODULES[name]}"


def test_the_names_are_listed_before_they_are_used() -> None:
    code = """
import onnxarchive
print("archive" in vars(onnxarchive), set(onnxarchive.__all__) <= set(dir(onnxarchive)))
print("__version__" in dir(onnxarchive), dir(onnxarchive) == sorted(set(dir(onnxarchive))))
"""
    assert run_python(code) == "False True\nTrue True\n"


def test_the_names_that_are_listed_are_public_whatever_was_imported() -> None:
    code = """
import onnxarchive, onnxarchive.cli, onnxarchive.ir, onnxarchive.interop.torch
onnxarchive.open, onnxarchive.save, onnxarchive.edit
print({name for name in dir(onnxarchive) if name[0] != "_"} - set(onnxarchive.__all__))
"""
    assert ast.literal_eval(run_python(code)) == {"interop", "ir"}


def test_every_function_takes_none_for_a_model_that_is_not_chosen() -> None:
    functions = {name: getattr(onnxarchive, name) for name in onnxarchive.__all__}
    functions |= {"ir.load": ir.load, "run": run, "Server": Server}
    parameters = {
        name: inspect.signature(function).parameters
        for name, function in functions.items()
        if not (isinstance(function, type) and issubclass(function, Warning))
    }
    chosen = {name: them["model"].default for name, them in parameters.items() if "model" in them}
    del chosen["save"]  # its model is the one to save
    assert len(chosen) > 10
    assert set(chosen.values()) == {None}


def test_a_missing_name_raises_the_error_of_any_module() -> None:
    assert not hasattr(onnxarchive, "no_such_name")
    with pytest.raises(AttributeError) as caught:
        onnxarchive.sav  # noqa: B018
    assert str(caught.value) == "module 'onnxarchive' has no attribute 'sav'"
    assert (caught.value.name, caught.value.obj) == ("sav", onnxarchive)
    with pytest.raises(ImportError, match="cannot import name 'sav' from 'onnxarchive'"):
        exec("from onnxarchive import sav")


def test_importing_all_modules_replaces_no_public_name() -> None:
    code = """
import pkgutil
import onnxarchive
for module in pkgutil.walk_packages(onnxarchive.__path__, "onnxarchive."):
    if not module.name.endswith("__main__"):
        __import__(module.name)
module = type(pkgutil)
print([it for it in onnxarchive.__all__ if isinstance(getattr(onnxarchive, it), module)])
"""
    assert run_python(code) == "[]\n"


def test_an_attribute_may_be_replaced_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = onnxarchive.save
    with monkeypatch.context() as patch:
        patch.setattr(onnxarchive, "save", len)
        assert onnxarchive.save is len  # type: ignore[comparison-overlap]
    assert onnxarchive.save is before


def test_an_error_is_unpickled_where_no_name_was_used() -> None:
    code = """
import pickle, sys
error = pickle.loads(bytes.fromhex(sys.argv[1]))
import onnxarchive
print(type(error) is onnxarchive.ArchiveFormatError, error)
"""
    pickled = pickle.dumps(onnxarchive.ArchiveFormatError("expected this, found that"))
    assert run_python(code, pickled.hex()) == "True expected this, found that\n"


def test_reading_and_writing_imports_nothing_that_only_some_need(path: Path) -> None:
    onnxarchive.save(model_of(raw_tensor("w")), path)
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
onnxarchive.session, onnxarchive.session_options
print([name for name in {LAZY!r} if name in sys.modules])
print(names == vars(zipfile))
"""
    assert run_python(code, path) == "[]\nTrue\n"


def test_the_package_is_marked_as_typed() -> None:
    assert (ROOT / "onnxarchive" / "py.typed").exists()


def test_a_star_import_gives_the_public_names() -> None:
    names: dict[str, Any] = {}
    exec("from onnxarchive import *", names)
    assert sorted(name for name in names if name != "__builtins__") == onnxarchive.__all__


@pytest.mark.parametrize("name", ["open", "load", "check", "export", "extract", "convert", "link"])
def test_the_file_is_the_first_argument_of_a_function(name: str) -> None:
    parameters = list(inspect.signature(getattr(onnxarchive, name)).parameters.values())
    parameters = [it for it in parameters if it.kind is not it.VAR_KEYWORD]
    takes_more = name in ("open", "load", "check", "convert")
    assert parameters[0].name == ("source" if takes_more else "path")
    keyword_only = [it for it in parameters if it.kind is it.KEYWORD_ONLY]
    assert all(it.default is not it.empty for it in keyword_only)
    assert len(parameters) - len(keyword_only) <= 2


# How each function that takes options for remote archives is called with a source.
CALLS: dict[str, Callable[[Any, str], partial[Any]]] = {
    "open": lambda source, _: partial(onnxarchive.open, source),
    "load": lambda source, _: partial(onnxarchive.load, source),
    "check": lambda source, _: partial(onnxarchive.check, source),
    "diff": lambda source, _: partial(onnxarchive.diff, source, source),
    "link": lambda source, target: partial(onnxarchive.link, source, target),
    "export": lambda source, target: partial(onnxarchive.export, source, target),
    "extract": lambda source, target: partial(onnxarchive.extract, source, target),
    "convert": lambda source, target: partial(onnxarchive.convert, source, target),
    "convert_many": lambda source, target: partial(onnxarchive.convert_many, [source], target),
    "save": lambda target, _: partial(onnxarchive.save, model_of(), target),
    "session": lambda source, _: partial(onnxarchive.session, source),
    "session_options": lambda source, _: partial(onnxarchive.session_options, source),
}
SOURCES: dict[str, Callable[[Path], Any]] = {
    "path": lambda path: path,
    "path as text": str,
    "missing path": lambda path: path.with_name("missing"),
    "bytes": Path.read_bytes,
    "file object": lambda path: io.BytesIO(path.read_bytes()),
    "URL": lambda _: "https://localhost:1/m.onnxa",
}


def test_every_function_with_options_for_remote_archives_is_tested() -> None:
    functions = {name: getattr(onnxarchive, name) for name in onnxarchive.__all__}
    parameters = {
        name: inspect.signature(function).parameters.values()
        for name, function in functions.items()
        if inspect.isfunction(function)
    }
    takes_any = [
        name for name, them in parameters.items() if any(it.kind is it.VAR_KEYWORD for it in them)
    ]
    assert sorted(takes_any) == sorted(CALLS)


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("name", CALLS)
def test_a_misspelled_argument_is_refused(name: str, kind: str, tmp_path: Path) -> None:
    if name.startswith("session"):
        pytest.importorskip("onnxruntime")
    path, other = tmp_path / "m.onnxa", tmp_path / "other"
    onnxarchive.save(model_of(raw_tensor("w")), path)
    before = path.read_bytes()
    call = CALLS[name](SOURCES[kind](path), str(other))
    hint = "" if name == "session" else "; did you mean 'cache'"
    with pytest.raises(TypeError, match=f"no argument 'chache'{hint}"):
        call(chache=True)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("function", [onnxarchive.session, onnxarchive.session_options])
def test_a_misspelled_argument_is_refused_with_an_open_archive(path: Path, function: Any) -> None:
    pytest.importorskip("onnxruntime")
    onnxarchive.save(model_of(raw_tensor("w")), path)
    with onnxarchive.open(path) as archive, pytest.raises(TypeError, match="no argument 'chache'"):
        function(archive, chache=True)


@pytest.mark.parametrize(
    ("function", "library"), [(run, "onnxruntime"), (Server, "netron")], ids=["run", "view"]
)
def test_functions_that_run_or_show_an_archive_refuse_a_misspelled_argument(
    path: Path, function: Any, library: str
) -> None:
    pytest.importorskip(library)
    onnxarchive.save(model_of(raw_tensor("w")), path)
    with pytest.raises(TypeError, match="no argument 'chache'"):
        function(path, chache=True)


@pytest.mark.parametrize("kind", ["path", "bytes", "file object"])
def test_local_sources_ignore_options_for_remote_archives(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m.onnxa"
    onnxarchive.save(model_of(raw_tensor("w")), path)
    options: Any = {"storage_options": {"region": "here"}, "cache": tmp_path / "cache"}
    with onnxarchive.open(SOURCES[kind](path), **options) as archive:
        assert list(archive.tensors) == ["w"]
    assert os.listdir(tmp_path) == [path.name]
