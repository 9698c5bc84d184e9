"""The command `assets`, and the files that `[NAME=]PATH` arguments match."""

from __future__ import annotations

import argparse
import errno
import glob
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import onnxarchive
from onnxarchive.cli.commands.edit import edit
from onnxarchive.cli.output import say
from onnxarchive.cli.parser import (
    access,
    add_command,
    add_group,
    directory_name,
    open_archive,
    path_name,
)
from onnxarchive.cli.terminal import count, progress_bar, size, table
from onnxarchive.files.paths import in_utf8
from onnxarchive.remote.location import Location

ASSET: Final = "[NAME=]PATH"
ASSET_HELP: Final = (
    "a file; a directory, with all files below it except hidden ones; or a quoted pattern such as "
    "'llm/*.json' (** matches folders). In the archive, NAME replaces the name of the file or the "
    "directory; with a pattern, NAME is the folder of the assets. Links to files are followed"
)


def add_assets(commands: Any) -> None:
    help = "List, add, remove or extract the assets of an archive."
    actions = add_group(commands, "assets", help, "list model.onnxa")
    help, example = "List the assets.", "model.onnxa"
    add_command(actions, list_assets, help, example, name="list").add_url_options()
    help, example = "Add files, or replace assets of the same names.", "model.onnxa labels.txt"
    command = add_command(actions, add_files, help, example, name="add")
    command.add(f"assets {ASSET}", ASSET_HELP, nargs="+")
    command.add_copy()
    command = add_command(actions, remove_assets, "Remove assets.", example, name="remove")
    command.add("names NAME", "the name of an asset", nargs="+")
    command.add_copy()
    help, example = "Write assets to a directory.", "model.onnxa labels labels.txt"
    command = add_command(actions, extract_assets, help, example, name="extract")
    command.add("directory DIR", "a new or an empty directory", type=directory_name)
    command.add("names NAME", "the name of an asset (default: all)", nargs="*")
    command.add_url_options()


def list_assets(arguments: argparse.Namespace) -> None:
    with open_archive(arguments) as archive:
        sizes = {name: archive.assets.entry(name).nbytes for name in archive.assets}
        path = archive.path
    listed = [{"name": name, "nbytes": nbytes} for name, nbytes in sizes.items()]
    lines = (*table(["name", "bytes"], sizes.items()), "", count(len(sizes), "asset"))
    say(arguments, {"path": path, "assets": listed}, lines)


def add_files(arguments: argparse.Namespace) -> None:
    paths = named_assets(arguments.assets)
    with edit(arguments, "assets add") as changes:
        for name, path in paths.items():
            changes.assets[name] = path


def remove_assets(arguments: argparse.Namespace) -> None:
    with edit(arguments, "assets remove") as changes:
        for name in dict.fromkeys(arguments.names):
            del changes.assets[name]


def extract_assets(arguments: argparse.Namespace) -> None:
    directory = arguments.directory
    with progress_bar("assets extract") as progress:
        onnxarchive.extract(
            arguments.archive,
            directory,
            assets=arguments.names or "all",
            progress=progress,
            **access(arguments),
        )
    paths = [
        os.path.join(folder, name) for folder, _, names in os.walk(directory) for name in names
    ]
    files = [{"path": path, "nbytes": os.path.getsize(path)} for path in sorted(paths)]
    lines = [f"{file['path']}: {size(file['nbytes'])}" for file in files]
    say(arguments, {"files": files}, lines or f"{directory}: no assets")


def named_assets(arguments: Iterable[str]) -> dict[str, Path]:
    """The paths of the files that arguments `[NAME=]PATH` match, by asset path."""
    assets: dict[str, str] = {}
    for argument in arguments:
        name, equals, given = argument.partition("=")
        path = path_name(given if equals else argument)
        for asset, file in _files(name if equals else None, path):
            if assets.setdefault(asset, file) != file:
                raise ValueError(
                    f"{assets[asset]!r} and {file!r} are both named {asset!r}; rename one: "
                    "NAME=PATH"
                )
    return {asset: Path(file) for asset, file in assets.items()}


def _files(name: str | None, path: str) -> Iterator[tuple[str, str]]:
    """Yields asset path and file path of each file that a path or pattern matches."""
    if not path:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    path = Location.of(path).require_local()
    folder = "" if name is None else f"{name}/"
    if os.altsep is not None:  # Windows has two separators
        path = path.replace(os.altsep, os.sep)
    if glob.has_magic(path) and not os.path.lexists(path):
        fixed = path
        while glob.has_magic(fixed):
            fixed = os.path.dirname(fixed)
        which, files = "that match", _matches(fixed, path[len(fixed) :].strip(os.sep))
    elif os.path.isdir(path):
        folder = folder or f"{in_utf8(os.path.basename(os.path.abspath(path)))}/"
        fixed, which, files = path, "in the directory", list(_below(path))
    else:
        yield in_utf8(os.path.basename(path)) if name is None else name, path
        return
    if not files:
        raise ValueError(f"there are no files {which} {path!r}")
    for file in files:
        relative = in_utf8(os.path.relpath(file, fixed or os.curdir))
        yield folder + relative.replace(os.sep, "/"), file


def _matches(directory: str, pattern: str) -> list[str]:
    """The files below a directory that match a pattern, sorted.

    Unlike in `glob`, `**` does not follow links to folders, which may form cycles.
    """
    parts = pattern.split(os.sep)
    paths = [directory]
    for part in [*parts, "*"] if parts[-1] == "**" else parts:
        parents = dict.fromkeys(paths)
        if part == "**":
            walks = map(_walk, filter(os.path.isdir, (parent or os.curdir for parent in parents)))
            paths = [folder for walk in walks for folder, _, _ in walk]
        else:
            patterns = (os.path.join(glob.escape(parent), part) for parent in parents)
            paths = [match for pattern in patterns for match in glob.glob(pattern)]
    return sorted(set(filter(os.path.isfile, paths)))


def _walk(directory: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walks the folders below a directory like `os.walk`, sorted and without hidden folders."""
    from onnxarchive.sources.recognition import is_hidden

    for parent, folders, names in os.walk(directory, onerror=_raise):
        folders[:] = [folder for folder in sorted(folders) if not is_hidden(f"{folder}/")]
        yield parent, folders, names


def _below(directory: str) -> Iterator[str]:
    """All files below a directory, except hidden files; links to folders are refused."""
    from onnxarchive.sources.recognition import is_hidden

    for parent, folders, names in _walk(directory):
        for folder in (os.path.join(parent, folder) for folder in folders):
            if os.path.islink(folder):
                raise ValueError(
                    f"links to folders are not followed: {folder!r}; add the folder separately: "
                    "NAME=PATH"
                )
        yield from (os.path.join(parent, name) for name in sorted(names) if not is_hidden(name))


def _raise(error: OSError) -> None:
    raise error
