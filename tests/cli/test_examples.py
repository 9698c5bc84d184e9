"""The example of each command, and completion in shells."""

from __future__ import annotations

import argparse
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import output_of, run
from processes import completed

import onnxarchive
from onnxarchive.cli.all_commands import parser
from tools.docs.commands import choices
from tools.docs.readme import make_files


def _commands(command: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    for each in choices(command).values():
        yield each
        yield from _commands(each)


_START = "Example: onnxarchive "
EXAMPLES = {
    command.prog.removeprefix("onnxarchive "): (command.epilog or "").removeprefix(_START)
    for command in _commands(parser())
}
# These serve a page, or need a network or the user's cache.
ONLY_PARSED = ("view", "download", "cache", "cache list", "cache clear")


def _arguments(command: str) -> list[str]:
    return shlex.split(EXAMPLES[command].partition(" > ")[0])


@pytest.mark.parametrize("command", EXAMPLES)
def test_the_help_of_a_command_ends_with_an_example(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    last = output_of(capsys, *command.split(), "--help").rstrip("\n").splitlines()[-1]
    assert last == f"{_START}{EXAMPLES[command]}"
    assert EXAMPLES[command].startswith(command)
    parser().parse_args(_arguments(command))


@pytest.mark.parametrize("command", sorted(set(EXAMPLES) - set(ONLY_PARSED)))
def test_the_example_in_the_help_of_a_command_runs(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, library in (("run", "onnxruntime"), ("completion", "shtab")):
        if command == name:
            pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    make_files(tmp_path)
    models, assets = {"decoder": "decoder.onnx"}, {"labels.txt": "labels.txt"}
    onnxarchive.convert("model.onnx", "model.onnxa", models=models, assets=assets)
    with onnxarchive.edit("model.onnxa") as edit:
        edit.metadata["author"] = "Bob"
    onnxarchive.convert("model.onnx", "other.onnxa")
    assert run(*_arguments(command)) == (1 if command == "diff" else 0)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "tcsh"])
def test_completion_scripts_name_the_commands(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("shtab")
    assert "metadata" in output_of(capsys, "completion", shell)


@pytest.mark.tool
@pytest.mark.parametrize(
    ("words", "completions"),
    [
        (["ex"], ["export", "extract"]),
        (["assets", "a"], ["add"]),
        (["ls", "--st"], ["--storage-option"]),
        (["ls", "mod"], ["model.onnxa"]),
        (["convert", "--output-dir", "mod"], ["model.onnxa"]),
    ],
)
def test_bash_completes_commands_options_and_paths(
    words: list[str], completions: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    (tmp_path / "script").write_text(output_of(capsys, "completion", "bash"))
    (tmp_path / "model.onnxa").touch()
    line = shlex.join(["onnxarchive", *words])
    code = f"source ./script; COMP_WORDS=({line}); COMP_CWORD={len(words)}; _shtab_onnxarchive; "
    code += 'printf "%s\\n" "${COMPREPLY[@]}"'
    command = [bash, "-c", code]
    found = completed(command, status=0, cwd=tmp_path)
    assert sorted(found.stdout.split()) == completions
