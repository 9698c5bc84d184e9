"""Runs the command of a process, or a command line within a program."""

from __future__ import annotations

import _thread
import argparse
import gc
import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from types import FrameType

from onnxarchive.cli.all_commands import parser
from onnxarchive.cli.output import (
    DONE,
    TERMINAL_SIGNALS,
    WRONG_USE,
    crash,
    drop,
    drop_unwritten,
    fail,
    status_of,
    to_standard_output,
    use_json,
    warn,
)
from onnxarchive.errors import ArchiveError

_SIGNALLED = 128  # the exit status is this plus the signal's number, as in shells
_READER_ENDED = _SIGNALLED + 13  # SIGPIPE, which Windows lacks
_interrupted_by: int = signal.SIGINT
_AGAIN = 0.01  # seconds


def main(argv: Sequence[str] | None = None) -> int:
    """See `onnxarchive.cli.main`."""
    debug = False
    try:
        argv = sys.argv[1:] if argv is None else argv
        use_json("--json" in argv)
        try:
            arguments = parser(argv[0] if argv else None).parse(argv)
            use_json(getattr(arguments, "json", False))
            debug = arguments.debug
            status = _call(arguments)
        except SystemExit as end:  # argparse has printed an error, the help or the version
            status = end.code if isinstance(end.code, int) else WRONG_USE
        with to_standard_output():
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except (ArchiveError, ImportError, MemoryError, OSError, ValueError) as error:
        return fail(error, status_of(type(error)), debug=debug)
    except KeyboardInterrupt as interrupt:
        text = str(interrupt) or "interrupted; temporary files were removed"
        return fail(text, _SIGNALLED + _interrupted_by)
    except Exception as error:
        return crash(error)
    finally:
        use_json(False)
    return status


def _call(arguments: argparse.Namespace) -> int:
    """Calls the function of a command; warnings are printed as the command's."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = warn  # type: ignore[assignment]
        status: int | None = arguments.function(arguments)
    return DONE if status is None else status


def run() -> None:
    """Runs the command of this process and ends the process."""
    if getattr(sys, "frozen", False):  # for tqdm's lock, multiprocessing may start it anew
        import multiprocessing

        multiprocessing.freeze_support()
    # A terminated command cleans up as after Ctrl-C. Signals that the caller ignores, such as
    # SIGHUP under nohup, stay ignored.
    for number in (signal.SIGTERM, *TERMINAL_SIGNALS):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _raise_interrupt)
    sys.unraisablehook = _interrupt_again
    if sys.stderr is None:  # the parent closed it
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 until the process ends
    if sys.stdout is None:
        sys.exit(fail("standard output is closed", WRONG_USE))
    # Names may have characters that the terminal cannot show.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        status = main()
    except BrokenPipeError:
        drop(sys.stdout)
        status = _READER_ENDED
    drop_unwritten()
    if status == _SIGNALLED + _interrupted_by:
        _end_without_threads(status)
    # Without this, Python searches all imported modules for cycles of references when it ends: a
    # tenth of the time of a short command.
    gc.freeze()
    sys.exit(status)


def _end_without_threads(status: int) -> None:
    """Ends the process if threads are running, as after a second interrupt; else does nothing.

    The first interrupt waits until the threads have ended their work. Python would wait, too.
    """
    if any(it is not threading.main_thread() and not it.daemon for it in threading.enumerate()):
        from onnxarchive.files.hidden_files import remove_temporaries

        remove_temporaries()
        os._exit(status)


def _interrupt_again(ignored: sys.UnraisableHookArgs) -> None:
    """Repeats an interrupt that came in a destructor or callback, whose errors Python ignores."""
    if not issubclass(ignored.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(ignored)
        return
    # Sent at once, it would be raised in this function, and be ignored again.
    timer = threading.Timer(_AGAIN, _interrupt_main, [_interrupted_by])
    timer.daemon = True
    timer.start()


def _interrupt_main(number: int) -> None:
    """Sends a signal to the main thread, which stops waiting for it, except on Windows."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, number)
    else:
        _thread.interrupt_main(signal.Signals(number))


def _raise_interrupt(signal_number: int, frame: FrameType | None) -> None:
    global _interrupted_by
    _interrupted_by = signal_number
    raise KeyboardInterrupt
