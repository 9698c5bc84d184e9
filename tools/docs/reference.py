#!/usr/bin/env python3
"""Renders the reference of public names and command line, and the guide, as HTML pages.

python3 tools/dev.py docs              into build/reference
python3 tools/dev.py docs DIRECTORY    into another directory
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import onnxarchive
import onnxarchive.interop.torch
import onnxarchive.ir
from onnxarchive.cli.all_commands import parser
from onnxarchive.cli.commands.helping import TOPICS

ROOT = Path(__file__).resolve().parents[2]
MODULES = (onnxarchive, onnxarchive.ir, onnxarchive.interop.torch)
"""The modules whose `__all__` is public."""

_EXAMPLE = re.compile(r"^Example:\n((?:[ \t]+.*\n|\n)+)", re.MULTILINE)


class Annotation(str):
    """An annotation as in the source, such as `Unpack[Access]`; its `repr` has no quotes."""

    def __repr__(self) -> str:
        return str(self)


def example(docstring: str) -> str | None:
    """The code in the section `Example` of a docstring, or None."""
    section = _EXAMPLE.search(docstring + "\n")
    return None if section is None else textwrap.dedent(section[1]).strip() + "\n"


def commands() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yields the name, such as `ls` or `assets add`, and the parser of each command."""
    for name, command in choices(parser()).items():
        actions = choices(command)
        if actions:
            yield from ((f"{name} {action}", each) for action, each in actions.items())
        else:
            yield name, command


def choices(command: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The subcommands of a command, by name."""
    subcommands: dict[str, argparse.ArgumentParser] = {}
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            subcommands |= action.choices
    return subcommands


def render(directory: Path) -> None:
    """Writes the pages."""
    import pdoc  # only this function needs it

    os.environ["COLUMNS"] = "88"  # argparse makes lines of up to 86 characters
    convert = pdoc.docstrings.convert

    def with_code(text: str, form: str, file: Path | None) -> str:
        return convert(_EXAMPLE.sub(_fenced, text + "\n"), form, file)

    def as_written(annotation: Any, *_: object) -> Any:
        return Annotation(annotation) if isinstance(annotation, str) else annotation

    onnxarchive.__doc__ = (
        f"{onnxarchive.__doc__}\nThe commands: `onnxarchive.cli`. The guide: `onnxarchive.guide`."
    )
    pages = {"onnxarchive.cli": _command_line(), "onnxarchive.guide": _guide()}
    for name, text in pages.items():
        page = ModuleType(name, text)
        page.__spec__ = ModuleSpec(name, None)
        vars(page)["__all__"] = []
        sys.modules[name] = page
    pdoc.render.configure(docformat="google", show_source=False, footer_text="onnxarchive")
    names = [*(module.__name__ for module in MODULES), *pages]
    with (
        mock.patch.object(pdoc.docstrings, "convert", with_code),
        mock.patch.object(pdoc.doc, "safe_eval_type", as_written),
    ):
        pdoc.pdoc(*names, output_directory=directory)


def _fenced(section: re.Match[str]) -> str:
    return f"###### Example:\n\n```python\n{textwrap.dedent(section[1]).strip()}\n```\n\n"


def _command_line() -> str:
    """The help of the program, of its topics and of each command."""
    texts = [f"The command line.\n\n```text\n{parser().format_help()}```\n"]
    texts += [f"## help {name}\n\n```text\n{text}```\n" for name, text in TOPICS.items()]
    texts += [f"## {name}\n\n```text\n{each.format_help()}```\n" for name, each in commands()]
    return "\n".join(texts)


def _guide() -> str:
    """The guide, without links to files of the repository."""
    text = (ROOT / "tools" / "docs" / "guide.md").read_text(encoding="utf-8")
    return re.sub(r"\[([^]]+)\]\(\.\.[^)]*\)", r"\1", text)


if __name__ == "__main__":
    render(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "reference")
