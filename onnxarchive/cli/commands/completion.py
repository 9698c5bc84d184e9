"""The command that prints scripts for shells."""

from __future__ import annotations

import argparse
from typing import Any

from onnxarchive.cli.output import say
from onnxarchive.cli.parser import add_command, parser
from onnxarchive.errors import needing


def add_completion(commands: Any) -> None:
    help = "Print a shell script that completes commands, options and files."
    command = add_command(commands, completion, help, "bash > onnxarchive.bash", archive=False)
    command.add_argument("shell", choices=["bash", "zsh", "fish", "tcsh"], help="the shell")


def completion(arguments: argparse.Namespace) -> None:
    with needing("shtab", "complete commands"):
        import shtab
    top = parser()
    _complete_files(top, shtab.FILE)
    script = shtab.complete(top, arguments.shell)
    say(arguments, {"shell": arguments.shell, "script": script}, script.rstrip("\n"))


def _complete_files(command: argparse.ArgumentParser, file: object) -> None:
    """Sets file-name completion for each argument that takes a value and has no choices."""
    for action in command._actions:  # noqa: SLF001 argparse has no public list of them
        if isinstance(action.choices, dict):  # of the commands, or of the actions of one
            for each in action.choices.values():
                _complete_files(each, file)
        elif action.nargs != 0 and action.choices is None:
            action.complete = file  # type: ignore[attr-defined]  # where shtab looks
