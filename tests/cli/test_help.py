"""The help: commands in groups, what URLs need, and the arguments of each command."""

from __future__ import annotations

import re

import pytest
from commands import error_of, output_of

from onnxarchive.cli.all_commands import GROUPS, parser
from tools.docs.commands import commands

Captured = pytest.CaptureFixture[str]
OLD = ("replace-model", "remove-model", "rename-model", "set-metadata")


def test_the_help_lists_each_command_once_in_a_group(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = output_of(capsys, "--help").partition("Exit status")[0]
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if title := re.fullmatch(r"(\S.*):", line):
            names = found[title[1]] = []
        elif name := re.match(r"  (\S+)  ", line):
            names.append(name[1])
    assert found == {title: list(names) for title, names in GROUPS.items()}
    assert max(map(len, text.splitlines())) <= 80


def test_there_are_few_commands_and_none_has_an_old_name(capsys: Captured) -> None:
    assert len(parser().commands) <= 20
    names = {name for name, _ in commands()}
    for noun, verbs in {
        "models": "list add replace remove rename",
        "assets": "list add remove extract",
        "metadata": "get set remove",
        "cache": "list clear",
    }.items():
        assert {name for name in names if name.startswith(f"{noun} ")} == {
            f"{noun} {verb}" for verb in verbs.split()
        }
    for words in (*OLD, "assets ls", "assets rm", "assets cat", "cache ls"):
        assert "there is no command" in error_of(capsys, *words.split(), "x")


def test_one_thing_has_one_name_in_all_commands() -> None:
    options = {
        option
        for _, command in commands()
        for action in command._actions
        for option in action.option_strings
    }
    assert {"--model", "--cache-dir", "--output-dir"} <= options
    assert options.isdisjoint({"--name", "--directory", "--output", "--id"})


def test_options_for_urls_are_explained_in_one_topic_and_named_by_each_command(
    capsys: Captured,
) -> None:
    topic = output_of(capsys, "help", "urls")
    takers = 0
    for name, _ in commands():
        text = output_of(capsys, *name.split(), "--help")
        if "--storage-option" in text:
            takers += 1
            assert "'onnxarchive help urls' explains these options" in text
            assert re.search(r"^  --storage-option KEY=VALUE$", text, re.MULTILINE)
    assert takers > 10
    for option in ("--storage-option KEY=VALUE", "--cache", "--cache-dir DIR"):
        assert re.search(rf"^  {option}\n      \w", topic, re.MULTILINE)


def test_help_prints_the_help_of_a_command(capsys: Captured) -> None:
    assert output_of(capsys, "help") == output_of(capsys, "--help")
    for words in (["ls"], ["models"], ["models", "add"]):
        assert output_of(capsys, "help", *words) == output_of(capsys, *words, "--help")
