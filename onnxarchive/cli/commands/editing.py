"""The commands that edit an archive, `recover`, and what `[NAME=]PATH` arguments match."""

from __future__ import annotations

import argparse
import contextlib
import glob
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import onnxarchive
from onnxarchive.cli.output import StandardOutput, say
from onnxarchive.cli.parser import Command, add_command, add_group, file_name, pairs, path_name
from onnxarchive.cli.terminal import count, progress_bar, size, table
from onnxarchive.errors import shown, shown_names
from onnxarchive.files.filesystem import in_utf8
from onnxarchive.model.keys import ASSET_PREFIX
from onnxarchive.reading.archive import Archive
from onnxarchive.remote.location import Location
from onnxarchive.sources.recognition import is_hidden

if TYPE_CHECKING:
    from onnxarchive.editing.transaction import Edit

ASSET: Final = "[NAME=]PATH"
ASSET_HELP: Final = (
    "a file; a directory, with all files below it except hidden ones; or a quoted pattern such as "
    "'llm/*.json' (** matches folders). In the archive, NAME replaces the name of the file or the "
    "directory; with a pattern, NAME is the folder of the assets. Links to files are followed"
)
_TEXT_FIELDS: Final = ("doc_string", "producer_name", "producer_version", "domain")


@contextlib.contextmanager
def edit(arguments: argparse.Namespace, command: str, **options: Any) -> Iterator[Edit]:
    """Edits the archive, with the command's options of `onnxarchive.edit`; prints its new size."""
    for name in ("compact", "copy", "size_threshold", "timeout"):
        if hasattr(arguments, name):
            options[name] = getattr(arguments, name)
    with (
        progress_bar(command) as progress,
        onnxarchive.edit(arguments.archive, progress=progress, **options) as changes,
    ):
        yield changes
    path, nbytes = arguments.archive, os.path.getsize(arguments.archive)
    say(arguments, {"path": path, "nbytes": nbytes}, f"{path}: {size(nbytes)}")


def _add_edit_options(command: Command) -> None:
    command.add("--compact", "rewrite the whole archive, without tensors that no model uses")
    command.add_copy()


def add_replace_model(commands: Any) -> None:
    help = "Replace or add a model; the weights stay in place, unless --compact or --copy is given."
    example = "model.onnxa decoder.onnx --name decoder"
    command = add_command(commands, replace_model, help, example)
    help = (
        "a .onnx, such as an edited link or a __MODEL_PROTO that was extracted and edited; its "
        "external data may be in the archive or in other files"
    )
    command.add("model MODEL", help, type=file_name)
    help = "the id of the model to replace; an unknown id adds a model"
    command.add("--name ID", help, default="")
    help = "store initializers of this size or more outside the model (default: as in the archive)"
    command.add("--size-threshold BYTES", help, type=int)
    _add_edit_options(command)


def replace_model(arguments: argparse.Namespace) -> None:
    with edit(arguments, "replace-model") as changes:
        changes.models[arguments.name] = arguments.model


def add_remove_model(commands: Any) -> None:
    help = "Remove a model; the weights stay in place unless --compact or --copy is given."
    command = add_command(commands, remove_model, help, "model.onnxa decoder")
    command.add("id ID", "the id of the model")
    _add_edit_options(command)


def remove_model(arguments: argparse.Namespace) -> None:
    with edit(arguments, "remove-model") as changes:
        del changes.models[arguments.id]


def add_rename_model(commands: Any) -> None:
    help = "Give a model of an archive another id."
    command = add_command(commands, rename_model, help, "model.onnxa decoder encoder")
    command.add("old OLD", "the id of the model")
    command.add("new NEW", "the new id: [a-z][a-z0-9_]*")
    command.add_copy()


def rename_model(arguments: argparse.Namespace) -> None:
    with edit(arguments, "rename-model") as changes:
        changes.models.rename(arguments.old, arguments.new)


def add_set_metadata(commands: Any) -> None:
    help = "Set metadata, doc string, producer and domain of a model in an archive."
    command = add_command(commands, set_metadata, help, "model.onnxa author=Ada")
    command.add("pairs KEY=VALUE", "metadata to set", nargs="*")
    command.add_repeated("--remove KEY", "metadata to remove")
    for field in _TEXT_FIELDS:
        option, words = field.replace("_", "-"), field.replace("_", " ")
        command.add(f"--{option} TEXT", f"set the {words}; '' removes it")
    command.add_model("change this model")
    _add_edit_options(command)


def set_metadata(arguments: argparse.Namespace) -> None:
    metadata = pairs("KEY=VALUE", arguments.pairs)
    with edit(arguments, "set-metadata", model=arguments.model) as changes:
        for field in _TEXT_FIELDS:
            value = getattr(arguments, field)
            if value:
                setattr(changes.model, field, value)
            elif value is not None:
                changes.model.ClearField(field)
        for key in arguments.remove:
            if key not in changes.metadata:
                raise ValueError(
                    f"--remove: no metadata {shown(key)}; there is {shown_names(changes.metadata)}"
                )
            del changes.metadata[key]
        changes.metadata.update(metadata)


def add_recover(commands: Any) -> None:
    help = (
        "Roll back an interrupted edit, complete or undo an interrupted export, and remove what "
        "killed processes left. ARCHIVE may be what they were to write: an archive, a .onnx or "
        "its data, or a directory of extract."
    )
    command = add_command(commands, recover, help, "model.onnxa")
    command.add("--downloads", "remove the partial download of the file, too")
    command.add_timeout()


def recover(arguments: argparse.Namespace) -> None:
    recovery = onnxarchive.recover(
        arguments.archive, downloads=arguments.downloads, timeout=arguments.timeout
    )
    result = {
        "path": arguments.archive,
        "is_rolled_back": recovery.is_rolled_back,
        "removed": list(recovery.removed),
        "downloads": list(recovery.downloads),
        "export": recovery.export,
    }
    path = arguments.archive
    lines = [f"removed   {removed}" for removed in recovery.removed]
    for kept in recovery.downloads:
        lines.append(f"kept      {kept}, a partial download; --downloads removes it")
    if recovery.export is not None:
        lines.append(f"{path}: an interrupted export was {recovery.export}")
    if recovery.is_rolled_back:
        lines.append(f"{path}: an interrupted edit was rolled back")
    elif not lines:
        lines.append(f"{path}: nothing to recover")
    say(arguments, result, lines)


def add_assets(commands: Any) -> None:
    help = "List, add, remove or print the assets of an archive."
    actions = add_group(commands, "assets", help, "ls model.onnxa")
    add_command(actions, list_assets, "List the assets.", "model.onnxa", name="ls")
    help, example = "Add files, or replace assets of the same names.", "model.onnxa labels.txt"
    command = add_command(actions, store_assets, help, example, name="add")
    command.add(f"assets {ASSET}", ASSET_HELP, nargs="+")
    command.add_copy()
    command = add_command(actions, remove_assets, "Remove assets.", example, name="rm")
    command.add("names NAME", "the name of an asset", nargs="+")
    command.add_copy()
    help = "Write an asset to standard output."
    command = add_command(actions, print_asset, help, example, name="cat", json=False)
    command.add("name NAME", "the name of the asset")


def list_assets(arguments: argparse.Namespace) -> None:
    with onnxarchive.open(arguments.archive) as archive:
        sizes = {name: archive.entries[ASSET_PREFIX + name].nbytes for name in archive.assets}
    listed = [{"name": name, "nbytes": nbytes} for name, nbytes in sizes.items()]
    lines = (*table(["name", "bytes"], sizes.items()), "", count(len(sizes), "asset"))
    say(arguments, {"path": arguments.archive, "assets": listed}, lines)


def store_assets(arguments: argparse.Namespace) -> None:
    paths = named_assets(arguments.assets)
    with edit(arguments, "assets add") as changes:
        for name, path in paths.items():
            changes.assets[name] = path


def remove_assets(arguments: argparse.Namespace) -> None:
    with edit(arguments, "assets rm") as changes:
        for name in dict.fromkeys(arguments.names):
            del changes.assets[name]


def print_asset(arguments: argparse.Namespace) -> None:
    with onnxarchive.open(arguments.archive) as archive:
        write_asset(archive, arguments.name)


def write_asset(archive: Archive, path: str) -> None:
    """Writes an asset to standard output and compares its CRC-32."""
    output = StandardOutput()
    for piece in archive.assets.pieces(path):
        output.write(piece)


def named_assets(arguments: Iterable[str]) -> dict[str, str]:
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
    return assets


def _files(name: str | None, path: str) -> Iterator[tuple[str, str]]:
    """Yields asset path and file path of each file that a path or pattern matches."""
    path = Location.of(path).require_local()
    folder = "" if name is None else f"{name}/"
    if os.altsep is not None:  # Windows has two separators
        path = path.replace(os.altsep, os.sep)
    if glob.has_magic(path) and not os.path.lexists(path):
        fixed = path
        while glob.has_magic(fixed):
            fixed = os.path.dirname(fixed)
        expected, files = "that match", _matches(fixed, path[len(fixed) :].strip(os.sep))
    elif os.path.isdir(path):
        folder = folder or f"{in_utf8(os.path.basename(os.path.abspath(path)))}/"
        fixed, expected, files = path, "in the directory", list(_below(path))
    else:
        yield in_utf8(os.path.basename(path)) if name is None else name, path
        return
    if not files:
        raise ValueError(f"expected files {expected} {path!r}, found none")
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
    for parent, folders, names in os.walk(directory, onerror=_raise):
        folders[:] = [folder for folder in sorted(folders) if not is_hidden(f"{folder}/")]
        yield parent, folders, names


def _below(directory: str) -> Iterator[str]:
    """All files below a directory, except hidden files; links to folders are refused."""
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
