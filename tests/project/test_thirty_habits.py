"""Thirty habits of Python and of the shell, each of which does what one expects."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import pickle
import pydoc
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from commands import output_of, run
from models import runnable_model
from processes import completed

import onnxarchive
from onnxarchive.cli.all_commands import parser
from onnxarchive.cli.parser import Command

Captured = pytest.CaptureFixture[str]
COMMAND = [sys.executable, "-m", "onnxarchive"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnxa"
    onnxarchive.save(runnable_model(), path, assets={"labels.txt": b"cat\n"})
    return path


def test_archives_follow_the_habits_of_mappings(path: Path) -> None:
    with onnxarchive.open(path) as archive:  # 1: with
        mappings = (archive.tensors, archive.assets, archive.entries, archive.models)
        assert all(isinstance(each, Mapping) for each in mappings)
        assert "layer.0/weight" in archive.tensors  # 2: in
        assert "weight" not in archive.tensors
        assert (3 in archive.tensors) is False  # type: ignore[comparison-overlap]
        assert [len(each) for each in mappings] == [2, 1, 3, 1]  # 3: len
        for each in mappings:
            with pytest.raises(KeyError):  # 4: KeyError
                each["missing"]
            assert each.get("missing") is None  # 5: get
            assert list(each) == list(each.keys())  # 6: keys, items
            assert [name for name, _ in each.items()] == list(each)
            repr(each)
        assert dict(archive.assets) == {"labels.txt": b"cat\n"}  # 7: dict
        weight = archive.tensors["layer.0/weight"]
        assert not weight.flags.writeable  # 8: a view, of which np.array makes a copy
        assert np.array(weight).flags.writeable
    assert archive.closed  # 9: closed
    archive.close()  # 10: close twice
    with contextlib.closing(onnxarchive.open(path)) as archive:
        assert archive.tensors
    assert weight.shape == (1024, 16)


def test_archives_and_errors_follow_the_habits_of_objects(path: Path) -> None:
    with onnxarchive.open(path) as archive:
        assert repr(archive) == f"<onnxarchive.Archive {str(path)!r}, 3 entries>"  # 11: repr
        with pickle.loads(pickle.dumps(archive)) as again:  # 12: pickle
            assert list(again.tensors) == list(archive.tensors)
        with copy.copy(archive) as again:  # 13: copy
            assert list(again.tensors) == list(archive.tensors)
        assert not archive.closed
        entry = archive.entries["layer_0_weight"]
        assert pickle.loads(pickle.dumps(entry)) == copy.deepcopy(entry) == entry
        model = copy.deepcopy(archive.model)
        model.graph.name = "mine"
        assert archive.model.graph.name != "mine"
    error = onnxarchive.ChecksumError("text", entry="e", path="p")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # 14: errors in processes


def test_functions_follow_the_habits_of_paths_and_files(path: Path, tmp_path: Path) -> None:
    class Named:
        def __fspath__(self) -> str:
            return str(path)

    for source in (path, str(path), Named(), path.read_bytes(), io.BytesIO(path.read_bytes())):
        with onnxarchive.open(source) as archive:  # 15: os.fspath, bytes, file objects
            assert len(archive.tensors) == 2
    assert onnxarchive.is_archive(path)  # 16: as zipfile.is_zipfile
    assert zipfile.is_zipfile(path)
    with pytest.raises(FileNotFoundError) as caught:  # 17: an OSError with the name
        onnxarchive.open(tmp_path / "missing")
    assert caught.value.filename == str(tmp_path / "missing")
    assert issubclass(onnxarchive.TensorNotFoundError, KeyError)
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        assert len(onnxarchive.load("model.onnxa").graph.initializer) == 2  # 18: relative paths
    finally:
        os.chdir(before)
    assert isinstance(onnx.load(path), onnx.ModelProto)  # 19: the tool one knows


def test_the_package_follows_the_habits_of_the_prompt(path: Path) -> None:
    assert "open" in dir(onnxarchive)  # 20: completion of names
    with onnxarchive.open(path) as archive:
        assert "tensors" in dir(archive)
        assert archive.tensors._ipython_key_completions_() == list(archive.tensors)
    for name in onnxarchive.__all__:  # 21: help()
        assert "Example:" in pydoc.plain(pydoc.render_doc(getattr(onnxarchive, name))), name
    assert onnxarchive.__version__  # 22: __version__


def _all_commands(command: Command, words: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    below = [
        found
        for name, each in command.commands.items()
        for found in _all_commands(each, (*words, name))
    ]
    return [words, *below]


def test_every_command_has_help_by_either_option(capsys: Captured) -> None:
    commands = _all_commands(parser())
    assert len(commands) > 30
    for words in commands:  # 23: -h and --help everywhere
        assert output_of(capsys, *words, "-h") == output_of(capsys, *words, "--help")
    version = output_of(capsys, "--version")  # 24: --version
    assert version.startswith(f"{onnxarchive.__version__} (CRC-32: zlib")
    assert run() == 2


def test_commands_follow_the_habits_of_the_shell(path: Path, tmp_path: Path) -> None:
    def shell(command: str, **environment: str) -> str:
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command.replace("ONNXARCHIVE", " ".join(COMMAND))],
            cwd=tmp_path,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    if os.name != "posix":
        pytest.skip("there is no bash")
    assert shell("ONNXARCHIVE ls model.onnxa | head -n 1").startswith("name ")  # 25: | head
    assert "\x1b" not in shell("ONNXARCHIVE info model.onnxa", NO_COLOR="1")  # 26: NO_COLOR
    assert "\x1b" not in shell("ONNXARCHIVE -h", FORCE_COLOR="")
    filter = f"{sys.executable} -c 'import json, sys; print(json.load(sys.stdin)[\"nodes\"])'"
    assert shell(f"ONNXARCHIVE info model.onnxa --json | {filter}") == "2\n"  # 27: --json | jq
    assert shell("ONNXARCHIVE cat model.onnxa labels.txt | cat") == "cat\n"
    shell("ONNXARCHIVE cat model.onnxa layer.0/weight > w.npy")  # 28: redirection
    assert np.load(tmp_path / "w.npy").shape == (1024, 16)


def test_commands_follow_the_habits_of_scripts(path: Path) -> None:
    missing = subprocess.run(
        [*COMMAND, "info", "missing", "--json"], capture_output=True, text=True, cwd=path.parent
    )
    assert (missing.returncode, missing.stdout) == (2, "")  # 29: status, and nothing on stdout
    assert json.loads(missing.stderr)["error"]["path"] == "missing"
    pytest.importorskip("shtab")  # 30: completion of the shell
    done = completed([*COMMAND, "completion", "bash"], status=0)
    assert "onnxarchive" in done.stdout
