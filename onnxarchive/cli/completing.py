"""The command that prints a script for shell completion."""

from __future__ import annotations

import argparse

from onnxarchive.cli.frame import DONE, say
from onnxarchive.cli.parser import parser
from onnxarchive.storage.optional import needing


def completion_command(arguments: argparse.Namespace) -> int:
    """Runs `completion`."""
    with needing("shtab", "complete commands"):
        import shtab
    top = parser()
    _complete_files(top, shtab.FILE)
    script = shtab.complete(top, arguments.shell)
    say(arguments, {"shell": arguments.shell, "script": script}, script.rstrip("\n"))
    return DONE


def _complete_files(command: argparse.ArgumentParser, file: object) -> None:
    """Sets file-name completion for each argument that takes a value and has no choices."""
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                _complete_files(each, file)
        elif action.nargs != 0 and action.choices is None:
            action.complete = file  # type: ignore[attr-defined]  # where shtab looks
