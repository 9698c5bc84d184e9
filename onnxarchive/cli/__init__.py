"""The command line: a thin `main(argv) -> int` over the library."""

from __future__ import annotations

import io
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from types import FrameType

from onnxarchive.cli.frame import DONE, FAULTY_FILE, TERMINAL_SIGNALS, WRONG_USE, call
from onnxarchive.cli.parser import parser
from onnxarchive.cli.table import printable
from onnxarchive.errors import ArchiveError, LockedError, UnsupportedFeatureError, describe

_INTERRUPTED = 128 + signal.SIGINT  # as shells report it


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: The arguments without the program's name; those of the process where None.

    Returns:
        0 done, 1 a check or comparison found something, 2 wrong use, an error of the system or a
        library that is not installed, 3 the file is corrupt or unsafe.

    Raises:
        BrokenPipeError: Nobody reads the output any more.
    """
    try:
        arguments = parser().parse_args(argv)
    except SystemExit as end:  # argparse has said why
        return end.code if isinstance(end.code, int) else WRONG_USE
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = _show_warning  # type: ignore[assignment]
            status = call(arguments)
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except (LockedError, UnsupportedFeatureError) as error:
        return _fail(error, WRONG_USE)
    except ArchiveError as error:
        return _fail(error, FAULTY_FILE)
    except OSError as error:
        return _fail(describe(error), WRONG_USE)
    except (ImportError, ValueError) as error:
        return _fail(error, WRONG_USE)
    except KeyboardInterrupt:
        return _fail("interrupted; no incomplete file is left", _INTERRUPTED)
    return status


def _show_warning(message: Warning | str, *_: object) -> None:
    print(f"onnxarchive: warning: {printable(str(message))}", file=sys.stderr)


def _fail(error: object, status: int) -> int:
    lines = (printable(line) for line in str(error).splitlines())
    print("onnxarchive: " + "\n".join(lines), file=sys.stderr)
    return status


def run() -> None:
    """Runs the command of this process and ends it."""
    # Ended from outside, a command cleans up as it does when interrupted. A signal that is ignored
    # on its start, as nohup has it, stays ignored.
    for number in (signal.SIGTERM, *TERMINAL_SIGNALS):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _raise_interrupt)
    for stream in (sys.stdout, sys.stderr):  # names may have letters that the terminal lacks
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        status = main()
    except BrokenPipeError:
        # Whoever read the output has seen enough; what is buffered must not be tried again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = DONE
    sys.exit(status)


def _raise_interrupt(signal_number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
