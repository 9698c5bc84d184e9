"""Commands that are called wrongly or with wrong files: a line that says so, and no file.

With `--debug` the line follows a traceback.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import pytest
from commands import error_of, run
from models import external, model_of, raw_tensor, runnable_model
from written import write_model

import onnxarchive

NO_INPUT = "cannot read standard input: save it to a file"
NO_FILE = "missing: No such file or directory\n"
NO_DIRECTORY = "the directory 'past' does not exist; create it first\n"
TO_DIRECTORY = "files are written to a directory, not to standard output; write './-'"
OTHER = "the target is also the input"
KINDS = "expected an ONNX archive, found"
PAIR = "onnxarchive: expected KEY=VALUE, each name once, found"
MODEL = "expected --model ID=PATH, each name once, found"
ID = "[a-z][a-z0-9_]*"

# Command, exit status, and a part of the message. ARCHIVE has an asset and the metadata k=v.
CASES: list[tuple[str, int, str]] = [
    ("", 2, "a command is missing; it is one of: convert, info, ls, "),
    ("models", 2, "is missing; it is one of: list, add, replace, remove, rename\n"),
    ("unknown", 2, "there is no command 'unknown'; 'onnxarchive --help' lists the commands\n"),
    ("modls list", 2, "there is no command 'modls'; did you mean 'models'?\n"),
    ("models relpace ARCHIVE", 2, "there is no command 'relpace'; did you mean 'replace'?\n"),
    ("help lss", 2, "there is no command 'lss'; did you mean 'ls'?\n"),
    ("help url", 2, "there is no command 'url'; did you mean 'urls'?\n"),
    ("ls zzz://a/b.onnxa", 2, "fsspec has no file system for the scheme 'zzz'\n"),
    ("ls missing", 2, f"onnxarchive: {NO_FILE}"),
    ("export ARCHIVE past/m.onnx", 2, f"onnxarchive: past/m.onnx: {NO_DIRECTORY}"),
    ("convert MODEL past/m.onnxa", 2, f"onnxarchive: past/m.onnxa: {NO_DIRECTORY}"),
    ("extract ARCHIVE past/new", 2, f"onnxarchive: past/new: {NO_DIRECTORY}"),
    ("download http://127.0.0.1:1/m.onnxa past/", 2, f"onnxarchive: past/: {NO_DIRECTORY}"),
    ("extract ARCHIVE -", 2, TO_DIRECTORY),
    ("assets extract ARCHIVE -", 2, TO_DIRECTORY),
    ("run ARCHIVE --output-dir -", 2, TO_DIRECTORY),
    ("convert MODEL --output-dir -", 2, TO_DIRECTORY),
    ("ls .", 3, "found a directory with 5 models"),
    ("ls 'no\nsuch.onnxa'", 2, r"no\nsuch.onnxa: No such file or directory"),
    ("ls empty", 3, f"empty: {KINDS} an empty file"),
    ("info MODEL", 3, "[ZIP-2]"),
    ("ls truncated.onnxa", 3, "[ZIP-2]"),
    ("ls -", 2, NO_INPUT),
    ("check ARCHIVE -", 2, NO_INPUT),
    ("diff ARCHIVE -", 2, NO_INPUT),
    ("run -", 2, NO_INPUT),
    ("assets list -", 2, NO_INPUT),
    ("models replace ARCHIVE -", 2, NO_INPUT),
    ("convert missing new.onnxa", 2, NO_FILE),
    ("convert empty new.onnxa", 3, "empty: expected a model"),
    ("convert text new.onnxa", 3, "text: "),
    ("convert - new.onnxa", 2, "convert cannot read standard input"),
    ("convert MODEL --output-dir text", 2, "onnxarchive: text: Not a directory\n"),
    ("convert MODEL --output-dir text --dry-run", 2, "onnxarchive: text: Not a directory\n"),
    ("convert - --output-dir new", 2, "convert cannot read standard input"),
    ("convert MODEL ARCHIVE", 2, "exists; --force replaces it"),
    ("convert MODEL ARCHIVE --dry-run", 2, "exists; --force replaces it"),
    ("convert faulty.onnx new.onnxa --dry-run", 3, "'nowhere'"),
    ("convert MODEL MODEL --force", 2, f"a model.onnx: {OTHER} a model.onnx; name another target"),
    ("convert MODEL no/such/new.onnxa", 2, "the directory 'no/such' does not exist"),
    ("convert MODEL /dev/full --force", 2, "is not a regular file"),
    ("convert MODEL new/", 2, "new/: the directory 'new' does not exist; create it first"),
    ("convert MODEL - --json", 2, "standard output"),
    ("convert", 2, "SOURCE and TARGET"),
    ("convert ARCHIVE", 2, "exists; to replace it, name it as TARGET and give --force"),
    ("convert ARCHIVE --force", 2, "exists; to replace it, name it as TARGET and give --force"),
    ("convert MODEL --follow-links new.onnxa", 2, "'new.onnxa' was taken as the DIR"),
    ("convert MODEL --asset a.txt new.onnxa", 2, "'new.onnxa' was taken as an asset"),
    ("convert --output-dir new", 2, "SOURCE and TARGET"),
    ("convert MODEL new.onnxa third.onnxa", 2, "SOURCE and TARGET"),
    ("convert MODEL --output-dir folder --alignment 65", 2, "alignment must"),
    ("convert MODEL new.onnxa --alignment 100", 2, "power of two"),
    ("convert MODEL new.onnxa --alignment 65536", 2, "alignment must be"),
    ("convert MODEL new.onnxa --alignment 32", 2, "alignment must be"),
    ("convert MODEL new.onnxa --size-threshold x", 2, "invalid int"),
    ("convert MODEL new.onnxa --model other.onnx", 2, f"{MODEL} 'other.onnx'"),
    ("convert MODEL new.onnxa --model =other.onnx", 2, f"{MODEL} '=other.onnx'"),
    ("convert MODEL new.onnxa --model a=x --model a=y", 2, f"{MODEL} 'a=y'"),
    ("convert MODEL new.onnxa --model A=both.onnx", 2, f"as {ID} of at most 64 bytes"),
    ("convert MODEL new.onnxa --model a=missing", 2, NO_FILE),
    ("convert MODEL new.onnxa --model a=", 2, "No such file"),
    ("convert MODEL new.onnxa --model a=text --output-dir out", 2, "not with --output-dir"),
    ("convert MODEL new.onnxa --asset x=text X=empty", 2, "X"),
    ("convert MODEL text --force --asset text", 2, OTHER),
    ("convert --asset a.txt MODEL new.onnxa", 2, "'new.onnxa' was taken as an asset: put --asset"),
    ("export ARCHIVE MODEL", 2, "exists; --force replaces it"),
    ("export ARCHIVE .", 2, ".: is a directory; give the path of a file in it"),
    ("convert MODEL folder", 2, "folder: is a directory; give the path of a file in it"),
    ("export ARCHIVE -", 2, "write './-' for a file named '-'"),
    ("export ARCHIVE ARCHIVE --force", 2, OTHER),
    (
        "export ARCHIVE n.onnx --external-data ../n",
        2,
        "expected --external-data to be another file beside 'n.onnx', found '../n'",
    ),
    ("link ARCHIVE -", 2, "write './-' for a file named '-'"),
    ("link ARCHIVE MODEL", 2, "exists; --force replaces it"),
    ("link ARCHIVE ARCHIVE --force", 2, OTHER),
    ("link ARCHIVE folder/link.onnx", 2, "ONNX allows no '..'"),
    ("link missing new.onnx", 2, NO_FILE),
    ("extract ARCHIVE .", 2, "the directory is not empty"),
    ("check", 2, "check takes an ARCHIVE, or --link LINK"),
    ("check missing", 2, f"onnxarchive: {NO_FILE}"),
    ("check --link missing", 2, NO_FILE),
    ("check --link text", 3, "serialized ModelProto"),
    ("check --link MODEL ARCHIVE both.onnxa", 2, "check takes only one ARCHIVE with --link"),
    ("diff ARCHIVE missing", 2, f"onnxarchive: {NO_FILE}"),
    ("diff missing ARCHIVE", 2, f"onnxarchive: {NO_FILE}"),
    ("diff ARCHIVE text", 3, "text: expected a model, found a text file"),
    ("diff text ARCHIVE", 3, "text: expected a model, found a text file"),
    ("diff ARCHIVE", 2, "required: OTHER"),
    ("models remove both.onnxa ''", 2, "the default model, '', is neither removed"),
    ("models remove both.onnxa past", 2, "no model with the id 'past'"),
    ("models rename both.onnxa '' past", 2, "the default model, '', is neither removed"),
    ("models rename both.onnxa decoder ''", 2, ID),
    ("models rename both.onnxa decoder Past", 2, ID),
    ("models rename both.onnxa past decoder", 2, "no model with the id 'past'"),
    ("models add both.onnxa 1=MODEL", 2, ID),
    ("models add both.onnxa MODEL", 2, "expected ID=PATH, each name once, found 'a model.onnx'\n"),
    ("models add ARCHIVE a=-", 2, NO_INPUT),
    (
        "models add both.onnxa decoder=MODEL",
        2,
        "there is a model 'decoder'; 'onnxarchive models replace' replaces it\n",
    ),
    ("models replace ARCHIVE missing", 2, f"onnxarchive: {NO_FILE}"),
    ("models replace ARCHIVE text", 3, "onnxarchive: text: expected a model, found a text file"),
    (
        "models replace ARCHIVE faulty.onnx",
        3,
        "onnxarchive: faulty.onnx: tensor 'w' (graph.initializer[0]): the data file "
        "'nowhere', of 1200 bytes or more, is missing; copy this file along with the model, or "
        "keep the .onnx and give its data to each session: SessionOptions has "
        "add_external_initializers for values by name, and "
        "add_external_initializers_from_files_in_memory for files\n",
    ),
    ("models replace ARCHIVE ARCHIVE", 2, OTHER),
    (
        "models replace ARCHIVE MODEL --size-threshold -1",
        2,
        "onnxarchive: size_threshold must not be negative, got -1\n",
    ),
    ("models replace ARCHIVE MODEL --size-threshold x", 2, "invalid int value: 'x'"),
    ("metadata get ARCHIVE key", 2, "an archive.onnxa: no metadata 'key'; there is 'k'\n"),
    ("metadata set ARCHIVE author --domain d", 2, f"{PAIR} 'author'\n"),
    ("metadata set ARCHIVE =Ada --domain d", 2, f"{PAIR} '=Ada'\n"),
    ("metadata set ARCHIVE a=1 a=2 --domain d", 2, f"{PAIR} 'a=2'\n"),
    (
        "metadata set ARCHIVE a=\udcff --domain d",
        2,
        "onnxarchive: expected text in UTF-8, found '\\udcff'\n",
    ),
    ("metadata set ARCHIVE \udcff=a", 2, "expected text in UTF-8"),
    ("metadata set ARCHIVE --doc-string \udcff", 2, "expected text in UTF-8"),
    (
        "metadata remove ARCHIVE a",
        2,
        "onnxarchive: an archive.onnxa: no metadata 'a'; there is 'k'\n",
    ),
    (
        "metadata remove ARCHIVE k k",
        2,
        "onnxarchive: an archive.onnxa: no metadata 'k'; there is none\n",
    ),
    ("recover ARCHIVE --timeout soon", 2, "invalid float value: 'soon'"),
    ("assets extract ARCHIVE new labels", 2, "there is no asset 'labels'"),
    ("cat ARCHIVE labels.txt --json", 2, "unrecognized arguments: --json"),
    (
        "cat ARCHIVE w --rows 3",
        2,
        "expected START:STOP or START:STOP:STEP, as in Python, found '3'",
    ),
    ("cat ARCHIVE w --rows 1:x", 2, "found '1:x'"),
    ("cat ARCHIVE w --rows 1:2:3:4", 2, "found '1:2:3:4'"),
    ("cat ARCHIVE w --rows 1:4:0", 2, "found '1:4:0'"),
    ("cat ARCHIVE labels.txt --rows 0:1", 2, "there is no initializer 'labels.txt'"),
    ("assets remove ARCHIVE labels.txt missing", 2, "no asset 'missing'"),
    ("view missing --no-browser", 2, NO_FILE),
    ("view text --no-browser", 3, f"text: {KINDS} a text file"),
    ("view ARCHIVE --port 65536 --no-browser", 2, "expected a port"),
    ("view ARCHIVE --port x --no-browser", 2, "invalid int"),
    ("run", 2, "required"),
    ("run missing", 2, NO_FILE),
    ("run .", 3, "a directory"),
    ("run text", 3, "text: expected a model, found a text file"),
    ("run truncated.onnxa", 3, "[ZIP-2]"),
    ("run empty", 3, "empty: expected a model, found an empty file; its download"),
    ("run bad.onnx", 2, "bad.onnx: ONNX Runtime cannot load the model: "),
    ("run ARCHIVE --input x", 2, "expected --input NAME=FILE.npy, each name once, found 'x'"),
    ("run ARCHIVE --input x=missing", 2, NO_FILE),
    (
        "run ARCHIVE --input x=text",
        2,
        "text: expected a .npy or .npz file; its first bytes match neither format",
    ),
    ("run ARCHIVE --input x=", 2, "'': No such file"),
    ("run ARCHIVE --input x=pickle.npy", 2, "pickle.npy: expected a .npy or .npz file"),
    ("run ARCHIVE --input x=broken.npz", 2, "broken.npz: expected a .npy or .npz file"),
    ("run ARCHIVE --input z=x.npy", 2, "the model has no input 'z' (inputs: 'x')"),
    ("run ARCHIVE --input x=x.npy", 2, "expected shape [2, 1024], found [2]"),
    ("run ARCHIVE --input x=x.npy --input x=y", 2, "each name once"),
    ("run ARCHIVE --dim n=2", 2, "no open dimension 'n' (open dimensions: none)"),
    ("run ARCHIVE --dim n=x", 2, "expected --dim NAME=SIZE, each name once, found 'n=x'"),
    ("run ARCHIVE --provider tpu", 2, "found tpu"),
    ("run ARCHIVE --repeat 0", 2, "repeat must be 1 or more, got 0"),
    *(  # told before the model is loaded, which fails
        (f"run bad.onnx --input x=x.npy --output-dir {output}", 2, message)
        for output, message in (
            ("bad.onnx", "bad.onnx: Not a directory"),
            ("x.npy", "x.npy: Not a directory"),
            ("x.npy/deep", "x.npy/deep: Not a directory"),
            ("missing/deep", "missing/deep: the directory 'missing' does not"),
            ("llm", "llm: the directory is not empty"),
            ("''", "the directory is not empty"),
            ("/proc/results", "/proc/results: "),
        )
    ),
]
CASES += [
    (f"{command} {given}", 2, message)
    for command in ("convert MODEL new.onnxa --asset", "assets add ARCHIVE")
    for given, message in (
        ("missing", NO_FILE),
        ("x=text x=empty", "'x'"),
        ("../x=text", "'../x'"),
        ("/x=text", "'/x'"),
        ("=text", "''"),
        ("x=", "No such file"),
        ("x=folder", "there are no files in the directory 'folder'"),
        ("folder", "there are no files in the directory 'folder'"),
        ("'llm/*.txt'", "there are no files that match 'llm/*.txt'"),
        ("llm/config.json config.json=text", "are both named 'config.json'; rename one"),
        ("linked", "links to folders are not followed"),
    )
]
CASES += [
    (f"{command} a b --jobs {number}", 2, "argument --jobs: ")
    for command in ("convert", "check")
    for number in ("0", "-1", "x")
]
CASES += [  # commands that change an archive
    (command.format(path), status, message)
    for command in ("models replace {} both.onnx", "metadata set {} author=Ada", "recover {}")
    for path, status, message in (
        ("missing", 2, f"onnxarchive: {NO_FILE}"),
        ("folder", 3, f"onnxarchive: folder: {KINDS} a directory"),
        ("empty", 3, "onnxarchive: empty: expected "),
        ("MODEL", 3, "onnxarchive: a model.onnx: expected "),
    )
]
CASES += [
    (f"{command} --model past", 2, "no model with the id 'past', only '', 'decoder'\n")
    for command in (
        "ls both.onnxa",
        "info both.onnxa",
        "export both.onnxa out",
        "export both.onnxa out --external-data data",
        "link both.onnxa out",
        "run both.onnxa",
        "diff both.onnxa both.onnxa",
        "metadata set both.onnxa a=b",
        "metadata get both.onnxa",
        "metadata remove both.onnxa k",
        "models replace both.onnxa MODEL",
        "view both.onnxa --no-browser",
    )
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the commands are called with."""
    folder = tmp_path_factory.mktemp("files")
    model = runnable_model()
    write_model(folder / "a model.onnx", model)
    write_model(folder / "both.onnx", model)
    onnxarchive.save(model, folder / "both.onnxa", models={"decoder": model})
    onnx.helper.set_model_props(model, {"k": "v"})
    onnxarchive.save(model, folder / "an archive.onnxa", assets={"labels.txt": b"cat\n"})
    archive = (folder / "an archive.onnxa").read_bytes()
    (folder / "truncated.onnxa").write_bytes(archive[:-1])
    write_model(folder / "faulty.onnx", model_of(external(raw_tensor("w", dims=(300,)), "nowhere")))
    model.graph.node[0].op_type = "NoSuchOperator"
    write_model(folder / "bad.onnx", model)
    (folder / "empty").touch()
    (folder / "another.onnx").touch()
    (folder / "text").write_text("This is not a model, but a text.\n")
    np.save(folder / "x.npy", np.zeros(2, np.float32))
    np.save(folder / "pickle.npy", np.array([{}]), allow_pickle=True)
    (folder / "broken.npz").write_bytes(b"PK\x03\x04")
    for name in ("folder", "llm", "linked"):
        (folder / name).mkdir()
    (folder / "llm" / "config.json").touch()
    (folder / "linked" / "link").symlink_to("../llm")
    return folder


@pytest.mark.parametrize(("command", "status", "message"), CASES)
def test_wrong_use_is_reported_in_one_line_and_leaves_nothing(
    command: str,
    status: int,
    message: str,
    files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, library in (("run", "onnxruntime"), ("view", "netron")):
        if command.startswith(name) and find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    folder = tmp_path / "folder"
    shutil.copytree(files, folder, symlinks=True)
    monkeypatch.chdir(folder)
    before = {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}
    names = {"ARCHIVE": "an archive.onnxa", "MODEL": "a model.onnx"}
    arguments = [names.get(word, word) for word in shlex.split(command)]
    error = error_of(capsys, *arguments, status=status)
    assert message in error
    if not error.startswith("usage: "):
        assert error.count("\n") == 1
        assert run(*arguments, "--debug") == status
        output, debug = capsys.readouterr()
        assert output == ""
        if "--json" in arguments:
            described, debugged = json.loads(error)["error"], json.loads(debug)["error"]
            traceback = debugged.pop("traceback")
            assert described == debugged
            assert traceback.startswith("Traceback (most recent call last):\n")
        else:
            assert "Traceback (most recent call last):\n" in debug
            assert debug.endswith(f"\n{error}")
    assert {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")} == before


@pytest.mark.skipif(os.name == "nt", reason="Windows removes no working directory")
@pytest.mark.parametrize("command", ["convert ARCHIVE new.onnxa", "export ARCHIVE new.onnx"])
def test_a_working_directory_that_was_removed_is_named(
    command: str,
    files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    arguments = command.replace("ARCHIVE", shlex.quote(str(files / "an archive.onnxa")))
    error = error_of(capsys, *shlex.split(arguments))
    assert error == ("onnxarchive: the working directory has been removed; change to another one\n")
