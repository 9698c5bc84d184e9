"""The table of the commands, and the parser of the command line.

A command's module is imported when the command is called. Each import is a statement of its own, so
that programs which freeze a program, such as PyInstaller, find the modules.
"""

from __future__ import annotations

import argparse
from types import ModuleType
from typing import Final

import onnxarchive
from onnxarchive.cli.parser import Command


def _converting() -> ModuleType:
    from onnxarchive.cli.commands import converting

    return converting


def _exporting() -> ModuleType:
    from onnxarchive.cli.commands import exporting

    return exporting


def _listing() -> ModuleType:
    from onnxarchive.cli.commands import listing

    return listing


def _checking() -> ModuleType:
    from onnxarchive.cli.commands import checking

    return checking


def _editing() -> ModuleType:
    from onnxarchive.cli.commands import editing

    return editing


def _running() -> ModuleType:
    from onnxarchive.cli.commands import running

    return running


# For each module of `cli/commands/`, the commands for which it has `add_NAME`; the help has the
# same order.
_COMMANDS: Final = {
    _converting: "convert",
    _exporting: "export link extract download cache",
    _listing: "ls info models cat",
    _checking: "check diff",
    _editing: "replace-model remove-model rename-model set-metadata recover assets",
    _running: "run view prepack completion",
}
_MODULES: Final = {name: module for module, names in _COMMANDS.items() for name in names.split()}

_STATUSES: Final = """\
Exit status (with several files, the highest one):
  0    success
  1    'check' found faults, or 'diff' found differences
  2    wrong use, a system error, too little memory or a missing library
  3    a corrupt or unsafe file
  70   a fault of onnxarchive itself, with its traceback
  129  the terminal was closed
  130  interrupted
  141  the program that reads binary output ended early
  143  terminated
"""


def parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser of the command line: of one command, to save time, or of all if it is unknown."""
    top = Command(
        prog="onnxarchive",
        description="Work with ONNX archives: zip files whose weights are mapped into memory.",
        epilog=_STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,  # keeps the lines of the table
    )
    top.add_argument("--version", action="version", version=onnxarchive.__version__)
    top.set_defaults(parser_of_all=parser)  # for `completion`
    commands = top.add_subparsers(required=True, metavar="COMMAND", parser_class=Command)
    for name in [command] if command in _MODULES else _MODULES:
        add = getattr(_MODULES[name](), f"add_{name.replace('-', '_')}")
        add(commands)
    return top
