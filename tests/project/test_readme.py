"""All snippets and commands of the README and the guide run, in a directory with their models."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
from models import external, model_of, raw_tensor
from onnx import TensorProto, helper, numpy_helper

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
    assert len(snippets) == 10
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
    assert len(commands()) == 16
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


def test_readme_is_for_five_minutes() -> None:
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


def test_readers_that_are_promised_to_agree_are_those_that_are_compared() -> None:
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
        ".github/CONTRIBUTING.md",
        ".github/SECURITY.md",
        "conformance/README.md",
        "spec/proposal.md",
        "spec/specification.md",
        "tools/bench/README.md",
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
