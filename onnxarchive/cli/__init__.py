"""The command line: a thin `main(argv) -> int` over the library.

`program` runs a command, `all_commands` has the table of the commands, `parser` the shared
arguments, `output` prints results and errors, and `commands` has everything else. The help imports
all of `commands`; so they import onnx, numpy and modules that need these only inside functions.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status, which the end of the help describes.

    Args:
        argv: The arguments without the program's name; None for the process's arguments.

    Raises:
        BrokenPipeError: The program that reads the binary output of a command such as `cat` has
            ended; the function `run` then exits with status 141.
    """
    from onnxarchive.cli import program

    return program.main(argv)


def run() -> None:
    """Runs the command of this process and ends the process."""
    # Imports take most of a short command's time. Until they are done, Ctrl-C ends the process at
    # once, without a traceback; then `program` sets handlers.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from onnxarchive.cli import program

    program.run()
