"""The parser of the command line, and the arguments that several commands have.

An option that is more than a value stands beside the function that reads it.
"""

from __future__ import annotations

import argparse
import errno
import os
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any, Final, Unpack

import onnxarchive
from onnxarchive.cli.terminal import has_terminal
from onnxarchive.files import locking
from onnxarchive.reading.archive import Archive
from onnxarchive.reading.archive_file import opened
from onnxarchive.remote.location import Access, Location

COMMANDS: Final = {
    "convert": "converting",
    "export": "exporting",
    "link": "exporting",
    "extract": "exporting",
    "ls": "listing",
    "info": "listing",
    "models": "listing",
    "check": "checking",
    "diff": "checking",
    "replace-model": "editing",
    "remove-model": "editing",
    "rename-model": "editing",
    "assets": "assets",
    "set-metadata": "editing",
    "prepack": "prepacking",
    "recover": "editing",
    "run": "running",
    "view": "running",
    "download": "downloading",
    "cat": "listing",
    "cache": "downloading",
    "completion": "completion",
}
"""For each command, in the order of the help, the module of `cli/commands/` with `add_NAME`."""

REPEATED: Final[dict[str, Any]] = {"action": "append", "default": []}
"""Options of argparse for an argument that may be given several times."""


def parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser of the command line.

    Args:
        command: The only command to add, to save time; None or an unknown name adds all.
    """
    top = argparse.ArgumentParser(
        prog="onnxarchive",
        description="Work with ONNX archives: zip files whose weights are mapped into memory.",
        epilog="Exit status: 0 success; 1 'check' found faults, or 'diff' found differences; "
        "2 wrong use, a system error or a missing library; 3 a corrupt or unsafe file; 129 the "
        "terminal was closed; 130 interrupted; 141 the program that reads binary output ended "
        "early; 143 terminated. With several files, the highest status counts.",
    )
    top.add_argument("--version", action="version", version=onnxarchive.__version__)
    commands = top.add_subparsers(required=True, metavar="COMMAND", parser_class=_CommandParser)
    for name in [command] if command in COMMANDS else COMMANDS:
        module = import_module(f"onnxarchive.cli.commands.{COMMANDS[name]}")
        getattr(module, f"add_{name.replace('-', '_')}")(commands)
    return top


class _CommandParser(argparse.ArgumentParser):
    """Parses options between positional arguments: `convert model.onnx --force model.onnxa`."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # `parse_known_intermixed_args` refuses subcommands, and forgets "--".
        if self._subparsers is not None or "--" in args:
            return super().parse_known_args(args, namespace)
        # In some versions of Python, `parse_known_intermixed_args` calls `self.parse_known_args`.
        # The attribute that is set here sends this call to the base class.
        self.__dict__["parse_known_args"] = super().parse_known_args
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            del self.__dict__["parse_known_args"]


def add_command(
    commands: Any,
    function: Callable[[argparse.Namespace], int | None],
    help: str,
    example: str,
    *,
    name: str | None = None,
    archive: bool = True,
    json: bool = True,
) -> argparse.ArgumentParser:
    """Adds a command.

    Args:
        commands: The subparsers to which the command is added.
        function: Runs the command; returns its exit status, None for success.
        help: A sentence for the help.
        example: Arguments of an example, for the end of the help.
        name: Name of the command; None for that of the function, with hyphens.
        archive: Whether the first argument is an archive.
        json: Whether to add the option `--json`.
    """
    name = name or function.__name__.replace("_", "-")
    command: argparse.ArgumentParser = commands.add_parser(name, help=help, description=help)
    command.epilog = f"Example: {command.prog} {example}".rstrip()
    command.set_defaults(function=function)
    if json:
        add_arguments(command, {"--json": "print the result as JSON"})
    add_arguments(command, {"--debug": "print the traceback of an error, for bug reports"})
    if archive:
        command.add_argument("archive", type=file_name, metavar="ARCHIVE")
    return command


def add_group(commands: Any, name: str, help: str, example: str) -> Any:
    """Adds a command with actions of its own; returns the subparsers for these."""
    command = commands.add_parser(name, help=help, description=help)
    command.epilog = f"Example: {command.prog} {example}".rstrip()
    return command.add_subparsers(required=True, metavar="ACTION")


def add_arguments(
    command: argparse._ActionsContainer, arguments: Mapping[str, str], **options: Any
) -> None:
    """Adds arguments.

    Args:
        command: The command, or a group of its arguments.
        arguments: Help texts, by the argument and its value as in `--jobs N`. An option without a
            value is a flag.
        options: Options of argparse for all these arguments.
    """
    for argument, help in arguments.items():
        name, _, value = argument.partition(" ")
        kind = {"metavar": value} if value else {"action": "store_true"}
        command.add_argument(name, help=help, **kind, **options)  # type: ignore[arg-type]


def file_name(text: str) -> str:
    """Converts the argument of a file to read; refuses "-"."""
    if text == "-":
        raise argparse.ArgumentTypeError("cannot read standard input: save it to a file")
    return text


def pairs(
    form: str, arguments: Iterable[str], convert: Callable[[str], Any] = str
) -> dict[str, Any]:
    """Splits arguments such as NAME=VALUE at the first equals sign.

    Args:
        form: The option with its value, as in `--help`, for the error message.
        arguments: The arguments.
        convert: Converts the part after the equals sign; may raise a ValueError.

    Raises:
        ValueError: An argument has another form, or two have the same name.
    """
    values: dict[str, Any] = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        try:
            if not (name and equals) or name in values:
                raise ValueError
            values[name] = convert(text)
        except ValueError:
            raise ValueError(f"expected {form}, each name once, found {argument!r}") from None
    return values


def add_model(command: argparse.ArgumentParser, action: str, *, default: str | None = "") -> None:
    help = f"{action}; 'onnxarchive models' lists the ids"
    add_arguments(command, {"--model ID": help}, default=default)


def add_jobs(command: argparse.ArgumentParser) -> None:
    add_arguments(command, {"--jobs N": "use N cores (default: all)"}, type=_positive)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number of 1 or more, found {number}")
    return number


def add_copy(command: argparse.ArgumentParser) -> None:
    help = "write a new file; needed if ARCHIVE is a symbolic link or has further hard links"
    add_arguments(command, {"--copy": help})
    add_timeout(command)


def add_timeout(command: argparse.ArgumentParser) -> None:
    help = (
        "wait at most this long while other processes open or edit the archive (default: "
        "%(default)s; inf: without limit)"
    )
    add_arguments(command, {"--timeout SECONDS": help}, type=float, default=locking.TIMEOUT)


def add_force(command: argparse.ArgumentParser) -> None:
    """Adds the option for `require_free`."""
    add_arguments(command, {"--force": "replace files that exist"})


def require_free(path: str, force: bool, **access: Unpack[Access]) -> None:
    """Refuses a target that exists, unless `force` is true.

    Args:
        path: The target.
        force: Whether the target may be replaced.
        access: Options for a remote target.

    Raises:
        FileExistsError: The target exists, and `force` is false.
        ValueError: The target is "-", which only `convert` takes as standard output.
    """
    if path == "-":
        raise ValueError("expected a path as target, found '-'; write './-' for a file named '-'")
    target = Location.of(path, **access)
    if not force and target.exists():
        is_special = os.path.exists(path) and not os.path.isfile(path)
        text = "exists and is not a regular file" if is_special else "exists; --force replaces it"
        raise FileExistsError(errno.EEXIST, text, target.name)


def add_url_options(command: argparse.ArgumentParser) -> None:
    """Adds the options for `access`, at the end of the arguments."""
    group = command.add_argument_group("URLs (https://, s3://, gs://, az://, hf://, ...)")
    add_arguments(
        group,
        {
            "--cache": "use the copy in the user's cache (run and link download it)",
            "--cache-dir DIR": "a directory for copies instead",
        },
    )
    add_storage_option(group)


def access(arguments: argparse.Namespace) -> Access:
    """Options for remote archives, from the arguments that `add_url_options` adds."""
    cache = arguments.cache_dir or arguments.cache or None
    options = storage_options(arguments)
    return Access(storage_options=options, cache=cache, cache_progress=has_terminal())


def open_archive(arguments: argparse.Namespace, model: str = "") -> Archive:
    """Opens the archive of a command that downloads nothing; a copy in the cache is used."""
    with opened(Location.of(arguments.archive, **access(arguments))) as file:
        return Archive(file, model=model)


def add_storage_option(command: argparse._ActionsContainer) -> None:
    """Adds the option for `storage_options`."""
    help = (
        "an option for obstore or fsspec, such as region=eu-west-1, timeout=60 (seconds) or "
        'default_headers=\'{"accept": "*/*"}\'; put credentials in the environment, where other '
        "users cannot see them"
    )
    add_arguments(command, {"--storage-option KEY=VALUE": help}, **REPEATED)


def storage_options(arguments: argparse.Namespace) -> dict[str, str] | None:
    """The options of `--storage-option`. Errors do not show them, since they may be secret."""
    form = "--storage-option KEY=VALUE"
    try:
        return pairs(form, arguments.storage_option) or None
    except ValueError:
        raise ValueError(
            f"expected {form}, each key once, found another form or a repeated key"
        ) from None
