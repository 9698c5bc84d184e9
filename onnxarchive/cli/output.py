"""The output of a command: its result, its errors and warnings; and its exit status."""

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
from collections.abc import Iterable, Iterator
from typing import Any, Final, TextIO

from onnxarchive import errors
from onnxarchive.cli.terminal import printable
from onnxarchive.files.data import Buffer
from onnxarchive.remote.urls import url_without_secrets

DONE: Final = 0
FOUND: Final = 1
WRONG_USE: Final = 2
FAULTY_FILE: Final = 3
CRASHED: Final = 70  # EX_SOFTWARE of sysexits.h
_OF_WRONG_USE: Final = (
    errors.LockedError,
    errors.ModelNotFoundError,
    errors.TensorNotFoundError,
    errors.UnsupportedFeatureError,
)
STANDARD_OUTPUT: Final = "standard output"  # in place of a file's name in errors

# A longer scheme would take time that grows with the square of a word's length.
_URL: Final = re.compile(r"\w{0,16}://[^\s'\"]+")
# What is meant as a URL, up to the end of a password: http:/user:password@ or http//user@.
_MISSPELLED_URL: Final = re.compile(
    r"(?i)\b(https?|s3|gs|az|s?ftp)(?!://)(?::[/\\]*|[/\\]{2})[^\s'\"]*@"
)
_MAX_LINES: Final = 50  # of a message

# A terminal sends these signals to all processes of a command; Windows lacks SIGHUP.
TERMINAL_SIGNALS: Final = [
    number for number in signal.Signals if number.name in ("SIGINT", "SIGHUP")
]


def status_of(error: type[BaseException] | None) -> int:
    """The exit status for an error."""
    if error is None or not issubclass(error, errors.ArchiveError):
        return WRONG_USE
    return WRONG_USE if issubclass(error, _OF_WRONG_USE) else FAULTY_FILE


_is_json = False


def use_json(is_used: bool) -> None:
    """Makes errors and warnings be printed as JSON, each in a line, or as text."""
    global _is_json
    _is_json = is_used


def fail(error: object, status: int, *, debug: bool = False) -> int:
    """Prints an error, or a message, to standard error; `debug` adds the error's traceback."""
    if _is_json:
        _print_json({"error": _error_as_json(error, status, debug=debug)})
        return status
    if debug and isinstance(error, BaseException):
        _print_error(_shown_safely("".join(traceback.format_exception(error))))
    text = errors.describe_error(error)
    if isinstance(error, FileNotFoundError) and error.filename is None and not _has_directory():
        text = "the working directory has been removed; change to another one"
    path = getattr(error, "filename", None) or getattr(error, "path", None)
    if isinstance(path, str):  # a newline in the path must not split the message
        text = text.replace(path, printable(path))
    if isinstance(error, UnicodeEncodeError):
        text = f"expected text in UTF-8, found {errors.quoted(error.object)}"
    first = text.splitlines(keepends=True)
    if len(first) > _MAX_LINES:
        text = f"{''.join(first[:_MAX_LINES])}and {len(first) - _MAX_LINES:,} more lines"
    _print_error(f"onnxarchive: {_shown_safely(as_options(text))}")
    return status


def _has_directory() -> bool:
    """False if the working directory has been removed."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _error_as_json(error: object, status: int, *, debug: bool) -> dict[str, Any]:
    is_error = isinstance(error, BaseException)
    described: dict[str, Any] = {
        "type": type(error).__name__ if is_error else None,
        "message": as_options(errors.describe_error(error)),
        "path": getattr(error, "filename", None) or getattr(error, "path", None),
        "rule": getattr(error, "rule", None),
        "entry": getattr(error, "entry", None),
        "status": status,
    }
    if debug and isinstance(error, BaseException):
        described["traceback"] = "".join(traceback.format_exception(error))
    return {
        name: without_secrets(value) if isinstance(value, str) else value
        for name, value in described.items()
    }


def _print_json(value: object) -> None:
    """Prints a line of JSON to standard error."""
    _print_error(json.dumps(value, default=os.fsdecode))


def wrong_use(message: str) -> bool:
    """Prints a wrong use of the command line as JSON under `--json`; else returns False."""
    if _is_json:
        fail(message, WRONG_USE)
    return _is_json


def without_secrets(text: str) -> str:
    """Text without the secrets of URLs, wherever a URL is in it."""
    text = _MISSPELLED_URL.sub(r"\1://", text)
    return _URL.sub(lambda url: url_without_secrets(url[0]), text)


def crash(error: Exception) -> int:
    """Prints an error that no command foresees, with its traceback; returns the exit status."""
    if _is_json:
        return fail(error, CRASHED, debug=True)
    text = f"this is a fault of onnxarchive ({type(error).__name__}); please report the lines above"
    _print_error(_shown_safely("".join(traceback.format_exception(error))))
    return fail(text, CRASHED)


def _print_error(text: str) -> None:
    """Prints to standard error; if that fails, only the exit status reports the error."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def drop_unwritten() -> None:
    """Drops unwritten output, which would change the exit status when the process ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            drop(stream)


def _shown_safely(text: str) -> str:
    """Text without the secrets of URLs, and printable."""
    return "\n".join(map(printable, without_secrets(text).splitlines()))


def warn(message: Warning | str, *_: object) -> None:
    """Prints a warning to standard error; also takes the place of `warnings.showwarning`."""
    text = without_secrets(as_options(str(message)))
    if _is_json:
        _print_json({"warning": text})
        return
    _print_error(f"onnxarchive: warning: {printable(text)}")


def as_options(message: str) -> str:
    """Replaces arguments by options in a message: `replace=True (--force)` by `--force`."""
    return re.sub(r"\b\w+=[^\s;=]+ \((--[^()]+)\)", r"\1", message)


def say(arguments: argparse.Namespace, result: object, text: str | Iterable[str]) -> None:
    """Prints a result: `result` as JSON under `--json`, else `text`, or each of its lines.

    Characters that do not print are escaped: names in a file may have any.

    If the program that reads the output, such as `head`, has ended, the command continues without
    output, since the exit status of the command can be a result, too.
    """
    try:
        with to_standard_output():
            if getattr(arguments, "json", False):
                json.dump(result, sys.stdout, indent=2)
                print()
            else:
                for line in [text] if isinstance(text, str) else text:
                    print(printable(line))
            sys.stdout.flush()
    except BrokenPipeError:
        drop(sys.stdout)


@contextlib.contextmanager
def to_standard_output() -> Iterator[None]:
    """Names standard output in an `OSError` of the block.

    Raises:
        BrokenPipeError: The program that reads the output has ended; Windows calls it EINVAL.
    """
    try:
        with errors.path_in_errors(STANDARD_OUTPUT):
            yield
    except OSError as error:
        if os.name != "nt" or error.errno != errno.EINVAL:
            raise
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE), STANDARD_OUTPUT) from error


def drop(stream: TextIO) -> None:
    """Drops all further output of a stream, including buffered output."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def require_no_terminal() -> None:
    """Refuses a terminal as standard output for bytes, with a ValueError."""
    if sys.stdout.isatty():
        raise ValueError(
            "the output is binary, and standard output is a terminal: direct it to a file or a pipe"
        )


class StandardOutput:
    """Standard output for bytes."""

    def write(self, data: Buffer) -> int:
        """Writes bytes; an error names standard output."""
        with to_standard_output():
            return sys.stdout.buffer.write(data)
