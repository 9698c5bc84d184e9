"""The commands of the command line, and their page on the site."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from onnxarchive.cli.all_commands import parser
from onnxarchive.cli.commands.help import TOPICS


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


def page() -> str:
    """The help of the program, of each command, and of its topics, in Markdown."""
    parts = [f"# Commands\n\n```text\n{parser().format_help()}```\n"]
    parts += [f"## {name}\n\n```text\n{each.format_help()}```\n" for name, each in commands()]
    parts += [f"## help {name}\n\n```text\n{text}```\n" for name, text in TOPICS.items()]
    return "\n".join(parts)
