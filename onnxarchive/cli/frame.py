"""Exit statuses, and functions that all commands use."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any, Final, Unpack

from onnxarchive.cli.terminal import printable
from onnxarchive.errors import (
    ArchiveError,
    LockedError,
    ModelNotFoundError,
    TensorNotFoundError,
    UnsupportedFeatureError,
    describe_error,
    shown,
)
from onnxarchive.files.data import Buffer
from onnxarchive.reading.archive import Archive
from onnxarchive.reading.locked_file import opened
from onnxarchive.remote.location import Access, Location
from onnxarchive.remote.urls import shown_url

DONE: Final = 0
FOUND: Final = 1
WRONG_USE: Final = 2
FAULTY_FILE: Final = 3

# Without the scheme: a search for it would take time that grows with the square of a word's length.
_URL: Final = re.compile(r"://[^\s'\"]+")
_MAX_LINES: Final = 50  # of a message

# A terminal sends these signals to all processes of a command; Windows lacks SIGHUP.
TERMINAL_SIGNALS: Final = [it for it in signal.Signals if it.name in ("SIGINT", "SIGHUP")]


def call(arguments: argparse.Namespace) -> int:
    """Runs the command of parsed arguments and returns its exit status."""
    module = import_module(f"onnxarchive.cli.{arguments.module}")
    status: int = getattr(module, arguments.function)(arguments)
    return status


def status_of(error: type[BaseException] | None) -> int:
    """The exit status for an error."""
    if error is None or issubclass(
        error,
        LockedError | ModelNotFoundError | TensorNotFoundError | UnsupportedFeatureError,
    ):
        return WRONG_USE
    return FAULTY_FILE if issubclass(error, ArchiveError) else WRONG_USE


def fail(error: object, status: int, *, debug: bool = False) -> int:
    """Prints an error to standard error and returns the exit status.

    Args:
        error: The error, or its message.
        status: The exit status.
        debug: Whether to print the traceback of the error first.
    """
    if debug and isinstance(error, BaseException):
        print(_shown_safely("".join(traceback.format_exception(error))), file=sys.stderr)
    text = describe_error(error) if isinstance(error, OSError) else str(error)
    path = getattr(error, "filename", None) or getattr(error, "path", None)
    if isinstance(path, str):  # a newline in the path must not split the message
        text = text.replace(path, printable(path))
    if isinstance(error, UnicodeEncodeError):
        text = f"expected text in UTF-8, found {shown(error.object)}"
    first = text.splitlines(keepends=True)
    if len(first) > _MAX_LINES:
        text = f"{''.join(first[:_MAX_LINES])}and {len(first) - _MAX_LINES:,} more lines"
    print("onnxarchive:", _shown_safely(as_options(text)), file=sys.stderr)
    return status


def _shown_safely(text: str) -> str:
    """Text without the secrets of URLs (which may be in place of paths), and printable."""
    text = _URL.sub(lambda url: shown_url(url[0]), text)
    return "\n".join(map(printable, text.splitlines()))


def warn(message: str) -> None:
    """Prints a warning to standard error."""
    print(f"onnxarchive: warning: {printable(as_options(message))}", file=sys.stderr)


def as_options(message: str) -> str:
    """Replaces arguments by options in a message: `replace=True (--force)` by `--force`."""
    return re.sub(r"\b\w+=[^\s;=]+ \((--[^()]+)\)", r"\1", message)


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


def pairs(form: str, given: Iterable[str], convert: Callable[[str], Any] = str) -> dict[str, Any]:
    """Splits arguments such as NAME=VALUE at the first equals sign.

    Args:
        form: The option with its value, as in `--help`, for the error message.
        given: The arguments.
        convert: Converts the part after the equals sign; may raise a ValueError.

    Raises:
        ValueError: An argument has another form, or two have the same name.
    """
    found: dict[str, Any] = {}
    for argument in given:
        name, equals, text = argument.partition("=")
        try:
            if not (name and equals) or name in found:
                raise ValueError
            found[name] = convert(text)
        except ValueError:
            raise ValueError(f"expected {form}, each name once, found {argument!r}") from None
    return found


def open_archive(arguments: argparse.Namespace, model: str = "") -> Archive:
    """Opens the archive of a command that downloads nothing; a copy in the cache is used."""
    with opened(Location.of(arguments.archive, **access(arguments))) as file:
        return Archive(file, model=model)


def access(arguments: argparse.Namespace) -> Access:
    """Options for remote archives, from the arguments that `parser._add_remote` adds."""
    cache = arguments.cache_dir or arguments.cache or None
    return Access(storage_options=storage_options(arguments), cache=cache)


def storage_options(arguments: argparse.Namespace) -> dict[str, str] | None:
    """The options of `--storage-option`. Errors do not show them, since they may be secret."""
    form = "--storage-option KEY=VALUE"
    try:
        return pairs(form, arguments.storage_option) or None
    except ValueError:
        raise ValueError(
            f"expected {form}, each key once, found another form or a repeated key"
        ) from None


def say(arguments: argparse.Namespace, result: object, text: str | Iterable[str]) -> None:
    """Prints a result: `result` as JSON under `--json`, else `text`, or each of its lines.

    If the program that reads the output, such as `head`, has ended, the command continues without
    output, since the exit status of the command can be a result, too.
    """
    try:
        with to_standard_output():
            if arguments.json:
                json.dump(result, sys.stdout, indent=2)
                print()
            else:
                for line in [text] if isinstance(text, str) else text:
                    print(line)
            sys.stdout.flush()
    except BrokenPipeError:
        drop_output()


def drop_output() -> None:
    """Sends all further output nowhere, also what is still buffered."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def require_no_terminal() -> None:
    """Refuses a terminal as standard output for bytes.

    Raises:
        ValueError: Standard output is a terminal.
    """
    if sys.stdout.isatty():
        raise ValueError("expected a file or a pipe as standard output, found a terminal")


@contextlib.contextmanager
def to_standard_output() -> Iterator[None]:
    """Sets the file name of an `OSError` in the block to "standard output"."""
    try:
        yield
    except OSError as error:
        error.filename = "standard output"
        raise


class StandardOutput:
    """Standard output for bytes."""

    def write(self, data: Buffer) -> int:
        """Writes bytes; an error names standard output."""
        with to_standard_output():
            return sys.stdout.buffer.write(data)
