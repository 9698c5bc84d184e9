"""The table of the commands, and the parser of the command line.

A command's module is imported when the command is called. Each import is a statement of its own, so
that programs which freeze a program, such as PyInstaller, find the modules.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Final

import onnxarchive
from onnxarchive.cli.parser import Command
from onnxarchive.files.data import CRC32_LIBRARY


def _converting() -> ModuleType:
    from onnxarchive.cli.commands import convert

    return convert


def _exporting() -> ModuleType:
    from onnxarchive.cli.commands import export

    return export


def _listing() -> ModuleType:
    from onnxarchive.cli.commands import show

    return show


def _checking() -> ModuleType:
    from onnxarchive.cli.commands import check

    return check


def _editing() -> ModuleType:
    from onnxarchive.cli.commands import edit

    return edit


def _models() -> ModuleType:
    from onnxarchive.cli.commands import models

    return models


def _assets() -> ModuleType:
    from onnxarchive.cli.commands import assets

    return assets


def _running() -> ModuleType:
    from onnxarchive.cli.commands import run

    return run


def _helping() -> ModuleType:
    from onnxarchive.cli.commands import help

    return help


# The commands in the order of the help, by what one does with them. Each has the module of
# `cli/commands/` that has its `add_NAME`.
GROUPS: Final[dict[str, dict[str, Callable[[], ModuleType]]]] = {
    "Make an archive": {"convert": _converting},
    "Look at it": {
        "info": _listing,
        "ls": _listing,
        "cat": _listing,
        "check": _checking,
        "diff": _checking,
        "view": _running,
    },
    "Change it": {
        "models": _models,
        "assets": _assets,
        "metadata": _editing,
        "recover": _editing,
    },
    "Run it": {"run": _running, "prepack": _running},
    "Share it": {
        "export": _exporting,
        "link": _exporting,
        "extract": _exporting,
        "download": _exporting,
        "cache": _exporting,
    },
    "Get help": {"help": _helping, "completion": _helping},
}
_MODULES: Final = {name: module for group in GROUPS.values() for name, module in group.items()}

_DESCRIPTION: Final = """\
Work with ONNX archives: zip files whose weights are mapped into memory.
'onnxarchive help COMMAND' says more of a command, and 'onnxarchive help urls'
how to use URLs."""
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


class _Program(Command):
    """The parser of the command line, whose help lists the commands in groups."""

    def format_help(self) -> str:
        """The help, as wide as the terminal."""
        width = shutil.get_terminal_size().columns - 2
        return "\n".join([self.format_usage(), _DESCRIPTION, *self._groups(width), "", _STATUSES])

    def _groups(self, width: int) -> Iterator[str]:
        indent = 4 + max(map(len, self.commands))
        for title, names in GROUPS.items():
            yield f"\n{title}:"
            for name in names:
                sentence = (self.commands[name].description or "").partition(". ")[0]
                yield textwrap.fill(
                    sentence.removesuffix("."),
                    max(width, 2 * indent),
                    initial_indent=f"  {name}".ljust(indent),
                    subsequent_indent=" " * indent,
                )


def parser(command: str | None = None) -> Command:
    """The parser of the command line: of one command, to save time, or of all if it is unknown."""
    top = _Program(prog="onnxarchive")
    version = f"{onnxarchive.__version__} (CRC-32: {CRC32_LIBRARY})"
    top.add_argument("--version", action="version", version=version)
    commands: Any = top.add_commands("COMMAND")
    for name in [command] if command in _MODULES else _MODULES:
        getattr(_MODULES[name](), f"add_{name}")(commands)
        # `completion` and `help` print what all commands take. A default of the whole program would
        # not reach a command that is parsed by itself.
        top.commands[name].set_defaults(parser_of_all=parser)
    return top
