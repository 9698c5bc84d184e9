"""Commands that are called wrongly or with wrong files: a line that says so, and no file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from commands import error_of
from models import runnable_model
from written import write_model

import onnxarchive

Captured = pytest.CaptureFixture[str]
Case = tuple[list[str], int, str]

CASES: list[Case] = [
    (["ls", "missing.onnxa"], 2, "missing.onnxa: No such file or directory"),
    (["ls", "."], 3, "found a directory with 2 models"),
    (["ls", "no\nsuch.onnxa"], 2, r"no\nsuch.onnxa: No such file or directory"),
    (["ls", "empty"], 3, "empty: expected an ONNX archive, found an empty file"),
    (["info", "a model.onnx"], 3, "[ZIP-2]"),
    (["ls", "truncated.onnxa"], 3, "[ZIP-2]"),
    (["convert", "missing.onnx", "new.onnxa"], 2, "missing.onnx: No such file"),
    (["convert", "empty", "new.onnxa"], 3, "empty: expected a model"),
    (["convert", "text", "new.onnxa"], 3, "text: "),
    (["convert", ".", "new.onnxa"], 3, "expected one model"),
    (["convert", "-", "new.onnxa"], 2, "convert cannot read standard input"),
    (["convert", "-", "--output-dir", "new"], 2, "cannot read standard input"),
    (["ls", "-"], 2, "cannot read standard input: save it to a file"),
    (["check", "an archive.onnxa", "-"], 2, "cannot read standard input: save it to a file"),
    (["diff", "an archive.onnxa", "-"], 2, "cannot read standard input: save it to a file"),
    (["run", "-"], 2, "cannot read standard input: save it to a file"),
    (["assets", "ls", "-"], 2, "cannot read standard input: save it to a file"),
    (["replace-model", "an archive.onnxa", "-"], 2, "cannot read standard input"),
    (["convert", "a model.onnx", "an archive.onnxa"], 2, "exists; --force replaces it"),
    (["convert", "a model.onnx", "a model.onnx", "--force"], 2, "another file than the input"),
    (["convert", "a model.onnx", "no/such/new.onnxa"], 2, "No such file or directory"),
    (["convert", "a model.onnx", "new.onnxa", "--alignment", "100"], 2, "power of two"),
    (["convert", "a model.onnx", "new.onnxa", "--asset", "../x=text"], 2, "'../x'"),
    (["convert", "a model.onnx", "new.onnxa", "--asset", "missing"], 2, "missing: No such"),
    (["convert", "a model.onnx", "/dev/full", "--force"], 2, "is not a regular file"),
    (["convert", "a model.onnx", "new/"], 2, "new/: Is a directory"),
    (["convert", "a model.onnx", "-", "--json"], 2, "standard output"),
    (["export", "an archive.onnxa", "a model.onnx"], 2, "exists; --force replaces it"),
    (["export", "an archive.onnxa", "."], 2, ".: exists and is not a regular file"),
    (["export", "an archive.onnxa", "-"], 2, "write './-' for a file named '-'"),
    (["link", "an archive.onnxa", "-"], 2, "write './-' for a file named '-'"),
    (["export", "an archive.onnxa", "an archive.onnxa", "--force"], 2, "than the input"),
    (
        ["export", "an archive.onnxa", "n.onnx", "--external-data", "../n"],
        2,
        "expected --external-data to be another file beside 'n.onnx', found '../n'",
    ),
    (["extract", "an archive.onnxa", "."], 2, "the directory is not empty"),
    (["check", "missing.onnxa"], 2, "missing.onnxa: No such file"),
    (["unknown"], 2, "invalid choice"),
    (["convert", "a model.onnx", "new.onnxa", "--size-threshold", "x"], 2, "invalid int"),
    ([], 2, "required"),
    (["diff", "an archive.onnxa", "missing.onnxa"], 2, "onnxarchive: missing.onnxa: No such file"),
    (["diff", "missing.onnxa", "an archive.onnxa"], 2, "onnxarchive: missing.onnxa: No such file"),
    (["diff", "an archive.onnxa", "a model.onnx"], 3, "a model.onnx: expected an ONNX archive"),
    (["diff", "a model.onnx", "an archive.onnxa"], 3, "a model.onnx: expected an ONNX archive"),
    (["diff", "an archive.onnxa", "."], 3, ".: expected an ONNX archive, found a directory"),
    (["diff", "an archive.onnxa"], 2, "required: OTHER"),
    (["remove-model", "both.onnxa", ""], 2, "other than the default one"),
    (["remove-model", "both.onnxa", "past"], 2, "found 'past'"),
    (["rename-model", "both.onnxa", "", "past"], 2, "other than the default one"),
    (["rename-model", "both.onnxa", "decoder", ""], 2, "[a-z][a-z0-9_]*"),
    (["rename-model", "both.onnxa", "decoder", "Past"], 2, "[a-z][a-z0-9_]*"),
    (["rename-model", "both.onnxa", "past", "decoder"], 2, "found 'past'"),
    (["replace-model", "both.onnxa", "a model.onnx", "--name", "1"], 2, "[a-z][a-z0-9_]*"),
]
MODEL = "expected --model ID=PATH, each name once, found "
# Options of `convert "a model.onnx" new.onnxa`.
OPTIONS: list[Case] = [
    (["third.onnxa"], 2, "SOURCE and TARGET"),
    (["--alignment", "65536"], 2, "alignment must be"),
    (["--alignment", "32"], 2, "alignment must be"),
    (["--model", "other.onnx"], 2, f"{MODEL}'other.onnx'"),
    (["--model", "=other.onnx"], 2, f"{MODEL}'=other.onnx'"),
    (["--model", "a=x", "--model", "a=y"], 2, f"{MODEL}'a=y'"),
    (["--model", "A=a model.onnx"], 2, "as [a-z][a-z0-9_]* of at most 64 bytes"),
    (["--model", "a=missing.onnx"], 2, "missing.onnx: No such file"),
    (["--model", "a="], 2, "No such file"),
    (["--model", "a=a model.onnx", "--output-dir", "out"], 2, "not with --output-dir"),
    (["--asset", "x=text", "x=empty"], 2, "'x'"),
    (["--asset", "x=text", "X=empty"], 2, "X"),
    (["--asset", "../x=text"], 2, "'../x'"),
    (["--asset", "/x=text"], 2, "'/x'"),
    (["--asset", "=text"], 2, "''"),
    (["--asset", "missing"], 2, "missing: No such file"),
    (["--asset", "x="], 2, "No such file"),
    (["--asset", "x=folder"], 2, "directory"),
]
CASES += [
    (["convert", "a model.onnx", "new.onnxa", *options], status, message)
    for options, status, message in OPTIONS
]
CASES += [
    (["convert", "a model.onnx"], 2, "SOURCE and TARGET"),
    (
        ["convert", "a model.onnx", "--output-dir", "folder", "--alignment", "65"],
        2,
        "alignment must",
    ),
]


@pytest.mark.parametrize(("arguments", "status", "message"), CASES, ids=lambda it: str(it)[:80])
def test_it_is_told_in_a_line_and_leaves_nothing(
    arguments: list[str],
    status: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    monkeypatch.chdir(tmp_path)
    model = runnable_model()
    write_model(Path("a model.onnx"), model)
    onnxarchive.save(model, "an archive.onnxa", assets={"labels.txt": b"cat\n"})
    onnxarchive.save(model, "both.onnxa", models={"decoder": model})
    Path("empty").touch()
    Path("another.onnx").touch()
    Path("text").write_text("This is not a model, but a text.\n")
    Path("truncated.onnxa").write_bytes(Path("an archive.onnxa").read_bytes()[:-1])
    Path("folder").mkdir()
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    error = error_of(capsys, *arguments, status=status)
    assert message in error
    assert error.count("\n") == 1 or error.startswith("usage: ")
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
    assert os.listdir("folder") == []
