"""What the page of recipes says about the habits of Git, pre-commit and adapters."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import run
from models import flip_byte, runnable_model, text_model
from onnx import TensorProto, helper
from processes import completed

import onnxarchive

ROOT = Path(__file__).resolve().parents[3]


def test_the_hook_of_pre_commit_checks_archives(path: Path) -> None:
    manifest = ROOT / ".pre-commit-hooks.yaml"
    text = manifest.read_text()
    entry = re.search(r"entry: onnxarchive (.*)", text)
    files = re.search(r"files: (.*)", text)
    assert entry is not None
    assert files is not None
    assert re.search(files[1], path.name)
    onnxarchive.save(runnable_model(), path)
    assert run(*entry[1].split(), path) == 0
    flip_byte(path, 1000)
    assert run(*entry[1].split(), path) == 1


@pytest.mark.tool
def test_pre_commit_accepts_the_manifest_of_the_hook() -> None:
    pytest.importorskip("pre_commit")
    command = [sys.executable, "-m", "pre_commit", "validate-manifest", ".pre-commit-hooks.yaml"]
    subprocess.run(command, cwd=ROOT, check=True)


@pytest.mark.tool
def test_git_shows_what_changed_in_an_archive(tmp_path: Path) -> None:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    page = (ROOT / "tools" / "recipes" / "README.md").read_text()
    attribute = re.search(r"`(\*\.onnxa diff=onnxa)`", page)
    setting = re.search(r"`git config (diff\.onnxa\.textconv) \"onnxarchive info\"`", page)
    assert attribute is not None
    assert setting is not None

    def git(*arguments: str) -> str:
        options = ["-c", "user.name=Ada", "-c", "user.email=ada@example.com"]
        command = ["git", *options, *arguments]
        done = completed(command, status=0, cwd=tmp_path)
        return done.stdout

    git("init")
    (tmp_path / ".gitattributes").write_text(f"{attribute[1]}\n")
    git("config", setting[1], f"{sys.executable} -m onnxarchive info")
    onnxarchive.save(runnable_model(), tmp_path / "model.onnxa")
    git("add", ".")
    git("commit", "-m", "A model")
    with onnxarchive.edit(tmp_path / "model.onnxa") as edit:
        edit.metadata["author"] = "Ada"
    assert re.search(r"^\+metadata +author: Ada$", git("diff"), re.MULTILINE)
    git("commit", "--all", "-m", "An author")
    assert git("diff") == ""
    with onnxarchive.edit(tmp_path / "model.onnxa") as edit:
        edit.tensors["layer.0/weight"] = -edit.tensors["layer.0/weight"]
    changed = re.findall(r"^[+-]\w.*", git("diff"), re.MULTILINE)
    assert [line[:23] for line in changed] == [f"{sign}tensors       SHA-256 " for sign in "-+"]


def test_a_lora_adapter_is_stored_as_an_asset(path: Path, tmp_path: Path) -> None:
    ort: Any = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    from compared_sessions import session_of_archive

    text = "adapted (float[4] x, float[4] a) => (float[4] y) { y = Add(x, a) }"
    zeros = helper.make_tensor("a", TensorProto.FLOAT, [4], [0.0] * 4)
    adapter = ort.AdapterFormat()
    adapter.set_parameters({"a": ort.OrtValue.ortvalue_from_numpy(np.arange(4, dtype=np.float32))})
    adapter.export_adapter(str(tmp_path / "a.onnx_adapter"))
    onnxarchive.save(
        text_model(text, zeros), path, assets={"a.onnx_adapter": tmp_path / "a.onnx_adapter"}
    )
    with onnxarchive.open(path) as archive:
        (tmp_path / "read.onnx_adapter").write_bytes(archive.assets["a.onnx_adapter"])
    loaded, options = ort.LoraAdapter(), ort.RunOptions()
    loaded.Load(str(tmp_path / "read.onnx_adapter"))
    options.add_active_adapter(loaded)
    session = session_of_archive(path)
    ones = {"x": np.ones(4, np.float32)}
    np.testing.assert_array_equal(session.run(None, ones)[0], [1, 1, 1, 1])
    np.testing.assert_array_equal(session.run(None, ones, options)[0], [1, 2, 3, 4])
