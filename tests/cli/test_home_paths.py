"""`~` in paths: expanded by commands, refused by functions as a target, and read as any name."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from commands import error_of, run
from models import runnable_model
from public_calls import WRITES, make_files

import onnxarchive
from onnxarchive.cli.all_commands import parser
from tools.docs.commands import choices

REMEDY = r"pass os\.path\.expanduser\(path\), or '\./~"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's home directory, with models; the working directory is another one."""
    home = tmp_path / "home"
    home.mkdir()
    make_files(home)
    shutil.copy(home / "m.onnxa", home / "n.onnxa")
    np.save(home / "x.npy", np.zeros((2, 1024), np.float32))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(home))
    return home


@pytest.mark.parametrize(
    ("command", "made"),
    [
        ("convert ~/m.onnx ~/new.onnxa", "new.onnxa"),
        ("convert ~/m.onnx --output-dir=~/new", "new/m.onnxa"),
        ("convert ~/m.onnx ~/new.onnxa --model=b=~/external/m.onnx", "new.onnxa"),
        ("convert ~/m.onnx ~/new.onnxa --asset=a=~/old --follow-links=~/external", "new.onnxa"),
        ("convert ~/m.onnx ~/new.onnxa --cache-dir=~/cache", "new.onnxa"),
        ("export ~/m.onnxa ~/new.onnx", "new.onnx"),
        ("link ~/m.onnxa ~/new.onnx", "new.onnx"),
        ("extract ~/m.onnxa ~/new", "new/__MODEL_PROTO"),
        ("run ~/m.onnxa --input=x=~/x.npy --output-dir=~/new", "new"),
        ("assets add ~/m.onnxa a=~/old", "m.onnxa"),
        ("models replace ~/m.onnxa ~/m.onnx", "m.onnxa"),
        ("models add ~/m.onnxa b=~/external/m.onnx", "m.onnxa"),
        ("assets extract ~/m.onnxa ~/new", "new"),
        ("diff ~/m.onnxa ~/n.onnxa", "m.onnxa"),
        ("check --link=~/l.onnx ~/m.onnxa", "m.onnxa"),
        ("cache list --cache-dir=~/cache", "m.onnxa"),
    ],
)
def test_a_command_expands_the_home_directory(command: str, made: str, home: Path) -> None:
    if command.startswith("run"):
        pytest.importorskip("onnxruntime")
    assert run(*command.split()) == 0
    assert (home / made).exists()
    assert list(Path.cwd().iterdir()) == []


def _actions(command: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    yield from command._actions
    for each in choices(command).values():
        yield from _actions(each)


def test_each_argument_that_names_a_file_expands_the_home_directory(home: Path) -> None:
    # Not paths; and those whose paths follow `=`, which the commands above give.
    others = {"N", "BYTES", "SECONDS", "ID", "NAME", "OLD", "NEW", "KEY", "TEXT", "PATTERN", "URL"}
    others |= {"KEY=VALUE", "NAME=SIZE", "COMMAND", "ACTION", "WORD", "RANGE", "DIGEST"}
    others |= {"ID=PATH", "[NAME=]PATH", "NAME=FILE.npy"}
    paths = set()
    for action in _actions(parser()):
        if action.nargs == 0 or action.choices is not None or action.metavar in others:
            continue
        assert callable(action.type), action
        assert action.type("~/m.onnx") == str(home / "m.onnx"), action
        paths.add(action.metavar)
    assert paths >= {"ARCHIVE", "PATH", "TARGET", "DIR", "LINK", "MODEL", "OTHER"}


CALLS: dict[str, Callable[[Path, str], object]] = {
    **{
        name: lambda source, target, write=write: write(source, Path(target))  # type: ignore[misc]
        for name, write in WRITES.items()
        if name != "export external data"  # whose target is a name beside the model
    },
    "save text": lambda source, target: onnxarchive.save(runnable_model(), target),
    "dry run": lambda source, target: onnxarchive.convert(source, target, dry_run=True),
    "extract": onnxarchive.extract,
    "convert_many": lambda source, target: onnxarchive.convert_many([source], target),
    "cache": lambda source, target: onnxarchive.open("http://127.0.0.1:9/m.onnxa", cache=target),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("target", ["~/new.onnxa", "~"])
def test_a_function_makes_no_folder_that_a_shell_would_have_expanded(
    target: str, name: str, home: Path
) -> None:
    before = sorted(home.rglob("*"))
    with pytest.raises(ValueError, match=REMEDY):
        CALLS[name](home / "m.onnxa", target)
    assert sorted(home.rglob("*")) == before
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.skipif(os.name == "nt", reason="Windows has no list of the names of users")
def test_a_tilde_before_the_name_of_a_user_is_refused_and_is_plain_before_other_names(
    home: Path,
) -> None:
    onnxarchive.save(runnable_model(), "~no such user.onnxa")
    assert onnxarchive.load("~no such user.onnxa") == runnable_model()
    with pytest.raises(ValueError, match=REMEDY):
        onnxarchive.save(runnable_model(), "~root/m.onnxa")


def test_a_tilde_that_does_not_begin_the_path_is_a_plain_name(home: Path) -> None:
    Path("~").mkdir()
    for path in ("./~/m.onnxa", str(Path.cwd() / "~" / "n.onnxa"), "m~.onnxa"):
        onnxarchive.save(runnable_model(), path)
        assert os.path.exists(path)


def test_a_folder_whose_name_is_a_tilde_is_read_and_edited(home: Path) -> None:
    shutil.copytree(home, "~")
    assert onnxarchive.load("~/m.onnxa") == runnable_model()
    assert onnxarchive.check("~/m.onnxa") == []
    with onnxarchive.edit("~/m.onnxa") as edit:
        edit.metadata["author"] = "Ada"
    with onnxarchive.edit("~/m.onnxa", copy=True) as edit:
        edit.assets["labels"] = b"dog"
    with onnxarchive.open("~/m.onnxa") as archive:
        assert archive.assets["labels"] == b"dog"
    onnxarchive.convert("~/m.onnx", "new.onnxa", assets={"old": "~/old"})


def test_without_a_home_directory_a_command_says_what_it_cannot_expand(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    error = error_of(capsys, "convert", home / "m.onnx", "~/new.onnxa", status=2)
    assert "found '~/new.onnxa'" in error
    assert list(Path.cwd().iterdir()) == []
