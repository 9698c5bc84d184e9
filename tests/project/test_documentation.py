"""README and guide run, and so does the example that documents each public name."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import inspect
import io
import re
import shutil
import textwrap
import warnings
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import onnx
import pytest
from documented_names import DOCUMENTED
from models import external, model_of, raw_tensor
from obstore.store import MemoryStore
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save_file

import onnxarchive
from tools.docs.readme import blocks, commands, make_files, run_commands, run_python
from tools.zip_readers.readers import READERS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / ".github" / "CONTRIBUTING.md").read_text(encoding="utf-8")
SECURITY = (ROOT / ".github" / "SECURITY.md").read_text(encoding="utf-8")


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_python_snippets_run_one_after_another(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for library in ("onnxruntime", "onnx_ir"):
        pytest.importorskip(library, reason=f"{library} is not installed")
    snippets = blocks("python")
    assert len(snippets) == 11
    run_python(snippets)
    printed = capsys.readouterr().out
    assert "(64, 32) float32" in printed
    assert "MatMul" in printed
    assert "cat\ndog" in printed
    assert "[0. 1. 2. 3.]" in printed
    assert "['', 'decoder']\n(64, 32)" in printed
    assert (directory / "streamed.onnxa").exists()


def test_snippet_with_a_pass_merges_tensors_that_name_the_same_bytes(directory: Path) -> None:
    pytest.importorskip("onnx_ir", reason="onnx_ir is not installed")
    (snippet,) = (it for it in blocks("python") if "Deduplicate" in it)
    model = model_of(*(external(raw_tensor(it, dims=(3000,)), "w.bin") for it in "abc"))
    model.graph.node.add(op_type="Sum", input="abc", output=["y"])
    (directory / "model.onnx").write_bytes(model.SerializeToString())
    (directory / "w.bin").write_bytes(bytes(range(1, 241)) * 50)
    run_python([snippet], onnxarchive=onnxarchive)
    assert onnxarchive.check("merged.onnxa", full=True) == []
    with onnxarchive.open("merged.onnxa") as archive:
        assert list(archive.tensors) == ["a"]
        assert archive.read("a") == (directory / "w.bin").read_bytes()
        assert archive.model.graph.node[0].input == ["a", "a", "a"]


@pytest.mark.tool
@pytest.mark.parametrize(("index", "library"), [(0, "torch"), (1, "onnxsim")])
def test_snippets_for_further_libraries_run(directory: Path, index: int, library: str) -> None:
    names = {library: pytest.importorskip(library, reason=f"{library} is not installed")}
    snippets = blocks("py")
    assert len(snippets) == 2
    onnxarchive.convert("model.onnx", "model.onnxa")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of the library
        run_python([snippets[index]], onnxarchive=onnxarchive, **names)


def test_commands_run_one_after_another(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    assert len(commands()) == 19
    run_commands(commands())
    assert (directory / "archives" / "decoder.onnxa").exists()
    assert "layer.0/weight" in capsys.readouterr().out
    assert (directory / "unzipped" / "__MODEL_PROTO").exists()
    assert onnx.load("decoder-back.onnx") == onnx.load("decoder.onnx")
    onnx.checker.check_model("onnx/model.onnx")


def test_set_up_commands_are_those_of_the_development_tool() -> None:
    words = " ".join((README + CONTRIBUTING).split())
    commands = set(re.findall(r"python3 tools/dev\.py (\w+)", words))
    assert commands == {"demo", "docs", "test"}
    assert '["demo", "test", "docs", "python"]' in (ROOT / "tools" / "dev.py").read_text("utf-8")
    assert "\npython3 tools/dev.py test --all\n" in (ROOT / ".ci" / "run").read_text(
        encoding="utf-8"
    )


def test_calls_of_recipes_in_the_readme_are_those_that_the_recipes_document() -> None:
    calls = re.findall(r"^python tools/recipes/(\w+\.py) (.*)", README, re.MULTILINE)
    assert len(calls) == 4
    for program, arguments in calls:
        recipe = (ROOT / "tools" / "recipes" / program).read_text(encoding="utf-8")
        assert f"\npython {program} {arguments}\n" in recipe.split('"""')[1]


def test_readme_has_at_most_260_lines() -> None:
    assert len(README.splitlines()) <= 260


def test_picture_of_the_layout_shows_a_real_archive(path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "layer.0/weight"], ["y"])],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 32])],
        [
            numpy_helper.from_array(np.zeros((64, 32), np.float32), "layer.0/weight"),
            numpy_helper.from_array(np.zeros(300, np.float32), "layer.0/bias"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnxarchive.save(model, path, assets={"labels.txt": b"cat\ndog\n"})
    with onnxarchive.open(path) as archive:
        entries = {name: f"{entry.data_offset:,}" for name, entry in archive.entries.items()}
    picture = (ROOT / "spec" / "images" / "layout.svg").read_text(encoding="utf-8")
    shown = re.findall(r">([^<]+)</text>", picture)
    assert [text for text in shown if text in entries] == [*entries]
    assert [text for text in shown if re.fullmatch(r"[\d,]+", text)] == [*entries.values()]
    assert f"{path.stat().st_size:,} bytes" in shown


def test_readers_that_are_promised_to_agree_are_compared() -> None:
    (claim,) = re.findall(
        r"^- \*\*One reading\.\*\* .*?:(.*?)\.\s", SECURITY, re.DOTALL | re.MULTILINE
    )
    named = {"7z": "7-Zip", "go": "Go's archive/zip", "perl": "Perl's Archive::Zip"}
    named |= {"zipfile": "Python's zipfile", "bsdtar-pipe": "bsdtar"}
    named |= dict.fromkeys(("java-file", "java-stream"), "Java (by the directory and as a stream)")
    listed = re.split(r", | and (?!as a)", " ".join(claim.split()))
    assert sorted(listed) == sorted({named.get(it, it) for it in READERS})


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        ".github/CHANGELOG.md",
        ".github/CONTRIBUTING.md",
        ".github/SECURITY.md",
        "conformance/README.md",
        "spec/proposal.md",
        "spec/specification.md",
        "tools/bench/README.md",
        "tools/docs/damaged.md",
        "tools/docs/guide.md",
        "tools/recipes/README.md",
    ],
)
def test_linked_files_and_headings_exist(page: str) -> None:
    path = ROOT / page
    links = re.findall(r"\]\(([^):]+)\)", path.read_text(encoding="utf-8"))
    for link in links:
        name, _, heading = link.partition("#")
        target = path.parent / name if name else path
        assert target.exists(), link
        if heading:
            titles = re.findall(r"^#+ (.*)", target.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = [re.sub(r"[^\w -]", "", it).lower().replace(" ", "-") for it in titles]
            assert heading in slugs, link


# Classes that only functions instantiate.
RESULTS = ("Archive", "Edit", "TensorSlice")


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


def example(docstring: str) -> str | None:
    """The code in the section `Example` of a docstring, or None."""
    section = re.search(r"^Example:\n((?:[ \t]+.*\n|\n)+)", docstring + "\n", re.MULTILINE)
    return None if section is None else textwrap.dedent(section[1]).strip() + "\n"


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
    code = example(inspect.getdoc(DOCUMENTED[name]) or "")
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
