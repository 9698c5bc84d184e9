"""The command that converts models, one or many, in this process or in several."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, wait
from typing import Any

from onnxarchive.cli.frame import DONE, FOUND, TERMINAL_SIGNALS, require_free, say
from onnxarchive.cli.progress import count_bar, progress_bar
from onnxarchive.cli.table import count, printable, size, table
from onnxarchive.conversion.batch import convert_many
from onnxarchive.conversion.converting import Conversion, convert
from onnxarchive.storage.replacement import remove_temporaries
from onnxarchive.storage.threads import require_jobs

_STANDARD_STREAM = "-"


def convert_command(arguments: argparse.Namespace) -> int:
    """Runs `convert`."""
    if arguments.jobs is not None and arguments.jobs < 1:
        raise ValueError(f"--jobs must be 1 or more, got {arguments.jobs}")
    options = {
        "size_threshold": arguments.size_threshold,
        "alignment": arguments.alignment,
        "convert_attribute": arguments.convert_attribute,
        "assets": _assets(arguments.asset),
        "dedupe": arguments.dedupe,
        "verify_checksum": arguments.verify_checksum,
        "dry_run": arguments.dry_run,
    }
    if arguments.output_dir is not None:
        return _convert_many(arguments, options)
    if len(arguments.paths) != 2:
        raise ValueError("convert takes SOURCE and TARGET, or sources with --output-dir")
    source, target = arguments.paths
    if source == _STANDARD_STREAM:
        raise ValueError("a source must be a file, which is mapped; save standard input to one")
    to_stream = target == _STANDARD_STREAM
    if to_stream and arguments.json and not arguments.dry_run:
        raise ValueError("standard output takes either the archive or --json")
    if not to_stream:
        require_free(target, arguments.force)
    with progress_bar("convert") as progress:
        conversion = convert(
            source,
            sys.stdout.buffer if to_stream else target,
            progress=progress,
            jobs=arguments.jobs,
            **options,
        )
    if not to_stream or arguments.dry_run:
        say(arguments, _described(conversion), _told(conversion, arguments.dry_run))
    return DONE


def _described(conversion: Conversion) -> dict[str, Any]:
    """A conversion as JSON has it."""
    return {
        "source": conversion.source,
        "path": conversion.target,
        "error": conversion.error,
        "nbytes": conversion.nbytes,
        "tensors": conversion.tensors,
        "assets": conversion.assets,
        "saved_nbytes": conversion.saved_nbytes,
        "warnings": list(conversion.warnings),
    }


def _told(conversion: Conversion, is_dry_run: bool) -> str:
    told = (
        f"{printable(conversion.target)}: {'would be ' if is_dry_run else ''}"
        f"{count(conversion.tensors, 'tensor')}, {count(conversion.assets, 'asset')}, "
        f"{size(conversion.nbytes or 0)}"
    )
    if conversion.saved_nbytes:
        told += f"; {size(conversion.saved_nbytes)} saved by merging identical initializers"
    return told


def _convert_many(arguments: argparse.Namespace, options: dict[str, Any]) -> int:
    with contextlib.ExitStack() as stack:
        processes = arguments.jobs or 1
        executor = stack.enter_context(_executor(processes)) if processes > 1 else None
        advance = stack.enter_context(count_bar("convert", "model"))
        conversions = convert_many(
            arguments.paths,
            arguments.output_dir,
            executor,
            replace=arguments.force,
            on_done=lambda _, done, total: advance(done, total),
            jobs=max(require_jobs(None) // processes, 1),
            **options,
        )
    for item in conversions:
        for warning in item.warnings:
            print(
                f"onnxarchive: warning: {printable(item.source)}: {printable(warning)}",
                file=sys.stderr,
            )
    failed = [item for item in conversions if item.error is not None]
    rows = [
        [item.source, item.target, "failed" if item.nbytes is None else item.nbytes]
        for item in conversions
    ]
    verb = "would be converted" if arguments.dry_run else "converted"
    total = f"{count(len(conversions) - len(failed), 'model')} {verb}, {len(failed)} failed"
    saved = sum(item.saved_nbytes for item in conversions)
    if saved:
        total += f"; {size(saved)} saved by merging identical initializers"
    lines = [table(["source", "archive", "bytes"], rows), "", total]
    lines += [f"failed: {printable(item.source)}: {printable(item.error or '')}" for item in failed]
    say(arguments, [_described(item) for item in conversions], "\n".join(lines))
    return FOUND if failed else DONE


@contextlib.contextmanager
def _executor(jobs: int) -> Iterator[Executor]:
    """Processes that convert; an interrupt ends them, and they clean up after themselves."""
    context = multiprocessing.get_context("spawn")
    # Processes that start while interrupts are ignored ignore them from their first moment: here
    # multiprocessing's resource tracker, below a worker for each task, as none is idle yet.
    with _interrupts_ignored():
        executor = ProcessPoolExecutor(jobs, mp_context=context, initializer=_start_worker)
    with executor:
        try:
            with _interrupts_ignored():
                wait([executor.submit(os.getpid) for _ in range(jobs)])
            yield executor
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # which alone gets them
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in TERMINAL_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start_worker() -> None:
    """In a worker: the terminal's signals are for the parent, which then terminates this one."""
    for number in TERMINAL_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end_worker)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """In a worker: ends it when the parent was killed, which could not terminate it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def _end_worker(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the pool sends it, too
    # An exception would be taken for the outcome of the work, and the worker would go on.
    remove_temporaries()
    os._exit(FOUND)


def _assets(given: list[str]) -> dict[str, str]:
    assets: dict[str, str] = {}
    for argument in given:
        name, equals, path = argument.partition("=")
        if not equals:
            name, path = os.path.basename(argument), argument
        if name in assets:
            raise ValueError(f"expected each asset once, found {name!r} again")
        assets[name] = path
    return assets
