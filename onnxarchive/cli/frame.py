"""What all commands share: statuses, arguments, and how a result is said."""

from __future__ import annotations

import argparse
import errno
import json
import os
import signal
from importlib import import_module
from typing import Any, Final

DONE: Final = 0
FOUND: Final = 1
WRONG_USE: Final = 2
FAULTY_FILE: Final = 3

# A terminal sends these to all processes of a command; Windows lacks the second.
TERMINAL_SIGNALS: Final = [it for it in signal.Signals if it.name in ("SIGINT", "SIGHUP")]


def add_command(commands: Any, name: str, command: str, help: str) -> argparse.ArgumentParser:
    """Adds a command, which gives its result as JSON, too.

    Args:
        commands: Where to add it.
        name: Its name.
        command: What carries it out, as `module.function` of this package.
        help: What it does.
    """
    added: argparse.ArgumentParser = commands.add_parser(name, help=help, description=help)
    added.set_defaults(command=command)
    added.add_argument("--json", action="store_true", help="print the result as JSON")
    return added


def call(arguments: argparse.Namespace) -> int:
    """Carries out the command of parsed arguments, and gives the exit status."""
    module, _, function = arguments.command.rpartition(".")
    status: int = getattr(import_module(f"onnxarchive.cli.{module}"), function)(arguments)
    return status


def add_force(command: argparse.ArgumentParser) -> None:
    """Adds the argument that lets a file be replaced."""
    command.add_argument("--force", action="store_true", help="replace a file that exists")


def require_free(path: str, force: bool) -> None:
    """Refuses a target that exists.

    Raises:
        FileExistsError: It exists, and is not to be replaced.
    """
    if not force and os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, "exists; --force replaces it", path)


def say(arguments: argparse.Namespace, result: object, told: str) -> None:
    """Prints a result: as JSON if that was asked for, else as it is told to people."""
    print(json.dumps(result, indent=2) if arguments.json else told, flush=True)
