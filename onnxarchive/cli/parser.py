"""The parser of a command, and the arguments that several commands have.

An option with more than a value is beside the function that reads it.
"""

from __future__ import annotations

import argparse
import errno
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Unpack

from onnxarchive.cli.output import WRONG_USE, without_secrets, wrong_use
from onnxarchive.cli.terminal import has_terminal
from onnxarchive.errors import did_you_mean, quoted
from onnxarchive.files import locking
from onnxarchive.remote.location import Access, Location
from onnxarchive.remote.urls import local_path

if TYPE_CHECKING:
    from onnxarchive.reading.archive import Archive


class Command(argparse.ArgumentParser):
    """The parser of a command; methods add the arguments that several commands have.

    Attributes:
        commands: The parsers of its commands or actions, by name; empty for a command without any.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands: Mapping[str, Command] = {}

    def add_commands(self, metavar: str) -> Any:
        """Makes this the parser of commands; returns what `add_command` adds them to."""
        commands = self.add_subparsers(required=True, metavar=metavar, parser_class=Command)
        self.commands = commands.choices
        return commands

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parses the words of a command line.

        Options may be between arguments: `convert model.onnx --force model.onnxa`.
        """
        command, rest = self.find(words)
        if command.commands and not rest:
            names = ", ".join(command.commands)
            command.error(f"a command is missing; it is one of: {names}")
        # `parse_intermixed_args` refuses commands of commands, and forgets "--".
        if command.commands or "--" in rest:
            return command.parse_args(rest)
        return command.parse_intermixed_args(rest)

    def find(
        self, words: Sequence[str], topics: Iterable[str] = ()
    ) -> tuple[Command, Sequence[str]]:
        """The command that the first words name, and the other words; an error if there is none.

        The error may ask if one of the topics was meant.
        """
        if not self.commands or not words or words[0].startswith("-"):
            return self, words
        name = words[0]
        if name not in self.commands:
            near = did_you_mean(name, [*self.commands, *topics])
            advice = near or f"; '{self.prog} --help' lists the commands"
            self.error(f"there is no command {quoted(name)}{advice}")
        return self.commands[name].find(words[1:])

    def error(self, message: str) -> NoReturn:
        """As in the base class; the message may quote an argument, such as a URL."""
        has_json = "--json" in self._option_string_actions or self.commands
        if has_json and wrong_use(message):
            self.exit(WRONG_USE)
        super().error(without_secrets(message))

    def add(
        self,
        argument: str,
        help: str | None = None,
        *,
        to: argparse._ArgumentGroup | None = None,
        **options: Any,
    ) -> None:
        """Adds an argument with its value, as in `--jobs N`; without a value it is a flag."""
        name, _, value = argument.partition(" ")
        options |= {"metavar": value} if value else {"action": "store_true"}
        (to or self).add_argument(name, help=help, **options)

    def add_repeated(self, argument: str, help: str | None = None, **options: Any) -> None:
        """Adds an option that may be given several times."""
        self.add(argument, help, action="append", default=[], **options)

    def add_model(self, action: str) -> None:
        self.add("--model ID", f"{action}; 'onnxarchive models list' lists the ids")

    def add_jobs(self) -> None:
        self.add("--jobs N", "use N cores (default: all)", type=_positive)

    def add_copy(self) -> None:
        help = "write a new file; needed if ARCHIVE is a symbolic link or has further hard links"
        self.add("--copy", help)
        self.add_timeout()

    def add_timeout(self) -> None:
        help = (
            "wait at most this long while other processes open or edit the archive (default: "
            "%(default)s; inf: without limit)"
        )
        self.add("--timeout SECONDS", help, type=float, default=locking.TIMEOUT)

    def add_force(self) -> None:
        """Adds the option for `require_free`."""
        self.add("--force", "replace files that exist")

    def add_url_options(self, *, cache: bool = True, sha256: bool = True) -> None:
        """Adds the options for `access`, at the end of the arguments."""
        group = self.add_argument_group("URLs ('onnxarchive help urls' explains these options)")
        if cache:
            self.add("--cache", to=group)
            self.add_cache_dir(default=None, to=group)
        if sha256:
            self.add("--sha256 DIGEST", to=group)
        else:
            self.set_defaults(sha256=None)
        self.add_repeated("--storage-option KEY=VALUE", to=group)

    def add_cache_dir(
        self, help: str | None = None, *, default: Any, to: argparse._ArgumentGroup | None = None
    ) -> None:
        """Adds the option for the directory of the cache."""
        self.add("--cache-dir DIR", help, to=to, type=path_name, default=default)


def add_command(
    commands: Any,
    function: Callable[[argparse.Namespace], int | None],
    help: str,
    example: str,
    *,
    name: str | None = None,
    archive: bool = True,
    json: bool = True,
) -> Command:
    """Adds a command with a sentence of help and the arguments of an example.

    Its name is that of the function, unless `name` is given. The function returns the exit status,
    or None for success. `archive` adds the first argument, `json` the option `--json`.
    """
    command = _named(commands, name or function.__name__.replace("_", "-"), help, example)
    command.set_defaults(function=function)
    if json:
        command.add("--json", "print the result, errors and warnings as JSON")
    command.add("--debug", "print the traceback of an error, for bug reports")
    if archive:
        command.add_argument("archive", type=file_name, metavar="ARCHIVE")
    return command


def add_group(commands: Any, name: str, help: str, example: str) -> Any:
    """Adds a command with actions of its own; returns the subparsers for these."""
    return _named(commands, name, help, example).add_commands("ACTION")


def _named(commands: Any, name: str, help: str, example: str) -> Command:
    command: Command = commands.add_parser(name, help=help, description=help)
    command.epilog = f"Example: {command.prog} {example}".rstrip()
    return command


def path_name(text: str) -> str:
    """Converts the argument of a path or URL: expands `~`, as shells do not after `=`."""
    return local_path(os.path.expanduser(text))


def directory_name(text: str) -> str:
    """Converts the argument of a directory to write, as `path_name`; refuses "-"."""
    if text == "-":
        raise argparse.ArgumentTypeError(
            "files are written to a directory, not to standard output; write './-' for a directory "
            "named '-'"
        )
    return path_name(text)


def file_name(text: str) -> str:
    """Converts the argument of a file to read, as `path_name`; refuses "-"."""
    try:
        require_file(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return path_name(text)


def require_file(path: str) -> None:
    """Refuses "-" as a file to read."""
    if path == "-":
        raise ValueError("cannot read standard input: save it to a file")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number of 1 or more, found {number}")
    return number


def pairs(
    form: str, arguments: Iterable[str], convert: Callable[[str], Any] = str
) -> dict[str, Any]:
    """Splits arguments such as NAME=VALUE at the first equals sign, and converts the values.

    An error about another form, or a name that is given twice, states the expected `form`.
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


def require_free(path: str, force: bool, **access: Unpack[Access]) -> None:
    """Refuses a target that exists, unless `force` is true.

    Also refuses "-", which only `convert` takes as standard output.
    """
    if path == "-":
        raise ValueError("expected a path as target, found '-'; write './-' for a file named '-'")
    target = Location.of(path, **access)
    if not force and target.exists():
        if os.path.isdir(path):
            text = "is a directory; give the path of a file in it"
            raise IsADirectoryError(errno.EISDIR, text, target.name)
        is_special = os.path.exists(path) and not os.path.isfile(path)
        text = "exists and is not a regular file" if is_special else "exists; --force replaces it"
        raise FileExistsError(errno.EEXIST, text, target.name)


def access(arguments: argparse.Namespace) -> Access:
    """Options for remote archives, from the arguments of `Command.add_url_options`."""
    return Access(
        storage_options=storage_options(arguments),
        cache=arguments.cache_dir or arguments.cache or None,
        cache_progress=has_terminal(),
        sha256=arguments.sha256,
    )


def storage_options(arguments: argparse.Namespace) -> dict[str, str] | None:
    """The options of `--storage-option`. Errors do not show them, since they may be secret."""
    form = "--storage-option KEY=VALUE"
    try:
        return pairs(form, arguments.storage_option) or None
    except ValueError:
        raise ValueError(f"an option has another form than {form}, or repeats a key") from None


def open_archive(arguments: argparse.Namespace, model: str | None = None) -> Archive:
    """Opens the archive of a command that downloads nothing; a copy in the cache is used."""
    from onnxarchive.reading.archive import open_location

    return open_location(Location.of(arguments.archive, **access(arguments)), model)
