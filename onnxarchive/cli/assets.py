"""The `assets` commands, and the files that `[NAME=]PATH` arguments match."""

from __future__ import annotations

import argparse
import glob
import os
from collections.abc import Iterable, Iterator

import onnxarchive
from onnxarchive.cli.editing import edited, say_size
from onnxarchive.cli.frame import DONE, StandardOutput, say
from onnxarchive.cli.terminal import count, table
from onnxarchive.model.keys import ASSET_PREFIX
from onnxarchive.reading.archive import Archive, asset_pieces
from onnxarchive.sources.other_files import is_hidden


def ls_command(arguments: argparse.Namespace) -> int:
    """Runs `assets ls`."""
    with onnxarchive.open(arguments.archive) as archive:
        sizes = {name: archive.entries[ASSET_PREFIX + name].nbytes for name in archive.assets}
    listed = [{"name": name, "nbytes": nbytes} for name, nbytes in sizes.items()]
    lines = (*table(["name", "bytes"], sizes.items()), "", count(len(sizes), "asset"))
    say(arguments, {"path": arguments.archive, "assets": listed}, lines)
    return DONE


def add_command(arguments: argparse.Namespace) -> int:
    """Runs `assets add`."""
    added = named_assets(arguments.assets)
    with edited(arguments, "assets add") as changes:
        for name, path in added.items():
            changes.assets[name] = path
    return say_size(arguments)


def rm_command(arguments: argparse.Namespace) -> int:
    """Runs `assets rm`."""
    with edited(arguments, "assets rm") as changes:
        for name in dict.fromkeys(arguments.names):
            del changes.assets[name]
    return say_size(arguments)


def cat_command(arguments: argparse.Namespace) -> int:
    """Runs `assets cat`."""
    with onnxarchive.open(arguments.archive) as archive:
        write_asset(archive, arguments.name)
    return DONE


def write_asset(archive: Archive, path: str) -> None:
    """Writes an asset to standard output and compares its CRC-32."""
    output = StandardOutput()
    for piece in asset_pieces(archive, path):
        output.write(piece)


def named_assets(given: Iterable[str]) -> dict[str, str]:
    """The paths of the files that arguments `[NAME=]PATH` match, by asset path.

    Raises:
        ValueError: Two files have the same asset path, a pattern or directory has no files, or a
            directory has a link to a folder.
        OSError: A directory cannot be read.
    """
    assets: dict[str, str] = {}
    for argument in given:
        name, equals, path = argument.partition("=")
        for asset, file in _files(name if equals else None, path if equals else argument):
            if assets.setdefault(asset, file) != file:
                raise ValueError(
                    f"{assets[asset]!r} and {file!r} are both named {asset!r}; rename one: "
                    "NAME=PATH"
                )
    return assets


def _files(name: str | None, path: str) -> Iterator[tuple[str, str]]:
    """Yields asset path and file path of each file that a path or pattern matches."""
    folder = "" if name is None else f"{name}/"
    if glob.has_magic(path) and not os.path.lexists(path):
        fixed = path
        while glob.has_magic(fixed):
            fixed = os.path.dirname(fixed)
        matches = _matches(fixed, path[len(fixed) :].strip(os.sep))
        if not matches:
            raise ValueError(f"expected files that match {path!r}, found none")
        for match in matches:
            yield folder + _with_slashes(os.path.relpath(match, fixed or os.curdir)), match
    elif os.path.isdir(path):
        folder = folder or f"{os.path.basename(os.path.abspath(path))}/"
        found = list(_below(path))
        if not found:
            raise ValueError(f"expected files in the directory {path!r}, found none")
        for file in found:
            yield folder + _with_slashes(os.path.relpath(file, path)), file
    else:
        yield os.path.basename(path) if name is None else name, path


def _matches(directory: str, pattern: str) -> list[str]:
    """The files below a directory that match a pattern, sorted.

    Unlike in `glob`, `**` does not follow links to folders, which may form cycles.
    """
    parts = pattern.split(os.sep)
    found = [directory]
    for part in [*parts, "*"] if parts[-1] == "**" else parts:
        folders = dict.fromkeys(found)
        if part == "**":
            walks = (_walk(it or os.curdir) for it in folders if os.path.isdir(it or os.curdir))
            found = [place for walk in walks for place, _, _ in walk]
        else:
            patterns = (os.path.join(glob.escape(it), part) for it in folders)
            found = [match for it in patterns for match in glob.glob(it)]
    return sorted(set(filter(os.path.isfile, found)))


def _walk(directory: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walks the folders below a directory like `os.walk`, sorted and without hidden folders."""
    for place, folders, names in os.walk(directory, onerror=_raise):
        folders[:] = [folder for folder in sorted(folders) if not is_hidden(f"{folder}/")]
        yield place, folders, names


def _below(directory: str) -> Iterator[str]:
    """All files below a directory, except hidden files; links to folders are refused."""
    for place, folders, names in _walk(directory):
        for folder in folders:
            if os.path.islink(os.path.join(place, folder)):
                raise ValueError(
                    f"links to folders are not followed: {os.path.join(place, folder)!r}; add the "
                    "folder separately: NAME=PATH"
                )
        yield from (os.path.join(place, name) for name in sorted(names) if not is_hidden(name))


def _raise(error: OSError) -> None:
    try:
        raise error
    finally:
        del error  # else error, traceback and frame would refer to each other


def _with_slashes(path: str) -> str:
    return path.replace(os.sep, "/")
