"""The commands that list and clear a cache of remote archives."""

from __future__ import annotations

import argparse
import os
from datetime import datetime
from itertools import chain
from typing import Any

from onnxarchive.cli.frame import DONE, say
from onnxarchive.cli.terminal import count, printable, size, table
from onnxarchive.remote.cache import CachedArchive, cached_archives, clear, directory_of_cache


def ls_command(arguments: argparse.Namespace) -> int:
    """Runs `cache ls`."""
    directory = directory_of_cache(arguments.directory)
    found = cached_archives(directory)
    rows = [[it.url or _damaged(it), it.nbytes, it.present, _time(it)] for it in found]
    header = ["URL", "bytes", "present", "last used"]
    summary = f"{_count(found)} in {printable(directory)}"
    say(arguments, _result(directory, found), chain(table(header, rows), ("", summary)))
    return DONE


def clear_command(arguments: argparse.Namespace) -> int:
    """Runs `cache clear`."""
    directory = directory_of_cache(arguments.directory)
    removed = clear(directory, arguments.urls)
    summary = f"removed {_count(removed)} from {printable(directory)}"
    say(arguments, _result(directory, removed), summary)
    return DONE


def _result(directory: str, archives: list[CachedArchive]) -> dict[str, Any]:
    listed = [
        {"url": it.url, "nbytes": it.nbytes, "present": it.present, "last_used": _time(it)}
        for it in archives
    ]
    return {"directory": directory, "archives": listed}


def _count(archives: list[CachedArchive]) -> str:
    return f"{count(len(archives), 'archive')} with {size(sum(it.present for it in archives))}"


def _damaged(archive: CachedArchive) -> str:
    return f"(damaged: {os.path.basename(archive.path)})"


def _time(archive: CachedArchive) -> str:
    return datetime.fromtimestamp(archive.used).astimezone().isoformat(" ", "seconds")
