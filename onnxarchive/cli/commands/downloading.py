"""The commands `download`, for a remote archive, and `cache`, for the copies in a cache."""

from __future__ import annotations

import argparse
import os
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import onnxarchive
from onnxarchive.cli.output import say
from onnxarchive.cli.parser import add_command, add_group, require_free, storage_options
from onnxarchive.cli.terminal import count, progress_bar, size, table
from onnxarchive.files.replacement import partial_path

if TYPE_CHECKING:
    from onnxarchive.remote.cache import CachedArchive

_URL: Final = "https://example.com/model.onnxa"  # in examples


def add_download(commands: Any) -> None:
    help = "Download a remote archive and verify it; resume an interrupted download."
    command = add_command(commands, download, help, _URL, archive=False)
    command.add_argument("url", metavar="URL")
    command.add("path PATH", "the file (default: the URL's last part)", nargs="?")
    command.add_force()
    command.add_url_options(cache=False)


def download(arguments: argparse.Namespace) -> None:
    from onnxarchive.conversion.downloading import path_of

    options = storage_options(arguments)
    path = path_of(arguments.url, arguments.path)
    require_free(path, arguments.force)
    try:
        with progress_bar("download") as progress:
            path = onnxarchive.download(
                arguments.url, path, progress=progress, storage_options=options
            )
    except KeyboardInterrupt:
        if not os.path.lexists(partial_path(os.path.realpath(path))):
            raise
        text = "interrupted; run the same command to resume the download"
        raise KeyboardInterrupt(text) from None
    nbytes = os.path.getsize(path)
    say(arguments, {"path": path, "nbytes": nbytes}, f"{path}: {size(nbytes)}, verified")


def add_cache(commands: Any) -> None:
    help = "List or clear the cache of remote archives."
    actions = add_group(commands, "cache", help, "ls")
    help = "List the archives in the cache, most recently used first."
    ls = add_command(actions, list_cache, help, "", name="ls", archive=False)
    help = "Remove archives from the cache; programs that use them are not affected."
    clear = add_command(actions, clear_cache, help, _URL, name="clear", archive=False)
    clear.add("urls URL", "remove only these archives", nargs="*")
    help = "the directory of the cache (default: the user's cache)"
    for command in (ls, clear):
        command.add("--directory DIR", help, default=True)


def list_cache(arguments: argparse.Namespace) -> None:
    from onnxarchive.remote.cache import cached_archives, directory_of_cache

    directory = directory_of_cache(arguments.directory)
    archives = cached_archives(directory)
    rows: list[list[object]] = []
    for copy in archives:
        name = copy.url or f"(damaged: {os.path.basename(copy.path)})"
        rows.append([name, copy.nbytes, copy.present, _time(copy)])
    lines = table(["URL", "bytes", "present", "last used"], rows)
    _say(arguments, directory, archives, [*lines, "", f"{_count(archives)} in {directory}"])


def clear_cache(arguments: argparse.Namespace) -> None:
    from onnxarchive.remote.cache import clear, directory_of_cache

    directory = directory_of_cache(arguments.directory)
    removed = clear(directory, arguments.urls)
    _say(arguments, directory, removed, [f"removed {_count(removed)} from {directory}"])


def _say(
    arguments: argparse.Namespace, directory: str, archives: list[CachedArchive], lines: list[str]
) -> None:
    listed = [
        {"url": copy.url, "nbytes": copy.nbytes, "present": copy.present, "last_used": _time(copy)}
        for copy in archives
    ]
    say(arguments, {"directory": directory, "archives": listed}, lines)


def _count(archives: list[CachedArchive]) -> str:
    return f"{count(len(archives), 'archive')} with {size(sum(copy.present for copy in archives))}"


def _time(archive: CachedArchive) -> str:
    return datetime.fromtimestamp(archive.used).astimezone().isoformat(" ", "seconds")
