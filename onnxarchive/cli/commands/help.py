"""The commands that help: `help` and `completion`."""

from __future__ import annotations

import argparse
from typing import Any, Final

from onnxarchive.cli.output import say
from onnxarchive.cli.parser import add_command
from onnxarchive.errors import requires_library

_URLS: Final = """\
Most commands take URLs in place of paths:

  https://  http://     by obstore, if the server answers range requests
  s3://  gs://  az://   by obstore; buckets of Amazon, Google and Azure
  others, as hf://      by fsspec and its file system of this name
  file:///              the path of a local file

An archive is opened in one to four requests. A tensor that is read is verified,
but the rows of 'cat --rows' are not. Messages leave out what follows '?' or '#', since it
may be secret, except in s3, gs, az and hf.

Options of these commands:

  --storage-option KEY=VALUE
      an option for obstore or fsspec, such as region=eu-west-1, timeout=60 (seconds),
      allow_redirects=true or default_headers='{"accept": "*/*"}'; it can be given several
      times. Put credentials in the environment, where other users cannot see them.
  --cache
      use the copy in the user's cache. 'run' and 'link' download the archive to the cache
      if it is not there; the others then read the URL. 'onnxarchive cache list' lists
      the copies.
  --cache-dir DIR
      use this directory as the cache
  --sha256 DIGEST
      the SHA-256 of the whole archive, as 'sha256sum' prints it: 'download', and with
      a cache 'run' and 'link', compare it before the archive gets its name, and every
      command with a cache compares a copy once. Without a cache it is refused.

These commands need obstore and fsspec, and platformdirs for the user's cache.
"""
TOPICS: Final = {"urls": _URLS}


def add_help(commands: Any) -> None:
    help = "Print the help of a command, or what URLs commands take ('help urls')."
    command = add_command(
        commands, print_help, help, "urls", name="help", archive=False, json=False
    )
    command.add("words WORD", "'urls', or the name of a command, such as: models add", nargs="*")


def print_help(arguments: argparse.Namespace) -> None:
    words = arguments.words
    if len(words) == 1 and words[0] in TOPICS:
        text = TOPICS[words[0]]
    else:
        command, _ = arguments.parser_of_all().find(words, TOPICS)
        text = command.format_help()
    say(arguments, None, text.splitlines())


def add_completion(commands: Any) -> None:
    help = "Print a shell script that completes commands, options and files."
    command = add_command(commands, completion, help, "bash > onnxarchive.bash", archive=False)
    command.add_argument("shell", choices=["bash", "zsh", "fish", "tcsh"], help="the shell")


def completion(arguments: argparse.Namespace) -> None:
    with requires_library("shtab", "complete commands"):
        import shtab
    top = arguments.parser_of_all()
    _complete_files(top, shtab.FILE)
    script = shtab.complete(top, arguments.shell)
    say(arguments, {"shell": arguments.shell, "script": script}, script.splitlines())


def _complete_files(command: argparse.ArgumentParser, file: object) -> None:
    """Sets file-name completion for each argument that takes a value and has no choices."""
    for action in command._actions:  # noqa: SLF001 argparse has no public list of them
        if isinstance(action.choices, dict):  # of the commands, or of the actions of one
            for each in action.choices.values():
                _complete_files(each, file)
        elif action.nargs != 0 and action.choices is None:
            action.complete = file  # type: ignore[attr-defined]  # where shtab looks
