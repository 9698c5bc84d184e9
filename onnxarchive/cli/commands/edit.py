"""The commands that change an archive: `metadata`, `recover`; and how they edit it."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, Final

import onnxarchive
from onnxarchive.cli.output import say
from onnxarchive.cli.parser import Command, add_command, add_group, open_archive, pairs
from onnxarchive.cli.terminal import count, progress_bar, size
from onnxarchive.errors import did_you_mean, quoted, quoted_names

if TYPE_CHECKING:
    from onnxarchive.editing.edit import Edit

_TEXT_FIELDS: Final = ("doc_string", "producer_name", "producer_version", "domain")


@contextlib.contextmanager
def edit(arguments: argparse.Namespace, command: str, **options: Any) -> Iterator[Edit]:
    """Edits the archive, with the command's options of `onnxarchive.edit`; prints the sizes."""
    path = arguments.archive
    for name in ("compact", "copy", "model", "size_threshold", "timeout"):
        if hasattr(arguments, name):
            options[name] = getattr(arguments, name)
    with (
        progress_bar(command) as progress,
        onnxarchive.edit(path, progress=progress, **options) as changes,
    ):
        yield changes
    nbytes, written = os.path.getsize(path), changes.nbytes_written
    result = {"path": path, "nbytes": nbytes, "nbytes_written": written}
    say(arguments, result, f"{path}: {size(nbytes)}; {size(written)} written")


def add_edit_options(command: Command) -> None:
    command.add("--compact", "rewrite the whole archive, without tensors that no model uses")
    command.add_copy()


def add_metadata(commands: Any) -> None:
    help = "Print, set or remove metadata, doc string, producer and domain of a model."
    actions = add_group(commands, "metadata", help, "get model.onnxa")
    help = "Print metadata, doc string, producer and domain as 'metadata set' takes them."
    command = add_command(actions, get_metadata, help, "model.onnxa", name="get")
    command.add("key KEY", "print only the value of this metadata", nargs="?")
    command.add_model("print those of this model")
    command.add_url_options()
    help = "Set metadata, doc string, producer and domain."
    command = add_command(actions, set_metadata, help, "model.onnxa author=Ada", name="set")
    command.add("pairs KEY=VALUE", "metadata to set", nargs="*")
    for field in _TEXT_FIELDS:
        command.add(f"{_option(field)} TEXT", f"set the {field.replace('_', ' ')}; '' removes it")
    command.add_model("change this model")
    add_edit_options(command)
    help = "Remove metadata."
    command = add_command(actions, remove_metadata, help, "model.onnxa author", name="remove")
    command.add("keys KEY", "metadata to remove", nargs="+")
    command.add_model("change this model")
    add_edit_options(command)


def _option(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def get_metadata(arguments: argparse.Namespace) -> None:
    from onnxarchive.model.tensors import text

    with open_archive(arguments, arguments.model) as archive:
        path, model_id = archive.path, archive.model_id
        metadata, model = dict(archive.metadata), archive.model
        fields = {
            field: text(getattr(model, field)) if model.HasField(field) else None
            for field in _TEXT_FIELDS
        }
    result = {"path": path, "model": model_id}
    if arguments.key is not None:
        _require_key(path, metadata, arguments.key)
        value = metadata[arguments.key]
        say(arguments, result | {"key": arguments.key, "value": value}, value)
        return
    lines = [f"{key}={value}" for key, value in metadata.items()]
    lines += [f"{_option(field)}={value}" for field, value in fields.items() if value is not None]
    say(arguments, result | {"metadata": metadata} | fields, lines)


def set_metadata(arguments: argparse.Namespace) -> None:
    metadata = pairs("KEY=VALUE", arguments.pairs)
    with edit(arguments, "metadata set") as changes:
        for field in _TEXT_FIELDS:
            value = getattr(arguments, field)
            if value:
                setattr(changes.model, field, value)
            elif value is not None:
                changes.model.ClearField(field)
        changes.metadata.update(metadata)


def remove_metadata(arguments: argparse.Namespace) -> None:
    with edit(arguments, "metadata remove") as changes:
        for key in arguments.keys:
            _require_key(arguments.archive, changes.metadata, key)
            del changes.metadata[key]


def _require_key(path: str, metadata: Collection[str], key: str) -> None:
    if key not in metadata:
        raise ValueError(
            f"{path}: no metadata {quoted(key)}; there is {quoted_names(metadata)}"
            f"{did_you_mean(key, [*metadata])}"
        )


def add_recover(commands: Any) -> None:
    help = (
        "Roll back an interrupted edit, complete or undo an interrupted export, and remove what "
        "killed processes left. ARCHIVE may be what they were to write: an archive, a .onnx or "
        "its data, or a directory of extract."
    )
    command = add_command(commands, recover, help, "model.onnxa")
    help = "cut off bytes that another tool has put after the archive, if all before them is valid"
    command.add("--cut", help)
    command.add("--downloads", "remove the partial download of the file, too")
    command.add_timeout()


def recover(arguments: argparse.Namespace) -> None:
    recovery = onnxarchive.recover(
        arguments.archive,
        downloads=arguments.downloads,
        cut=arguments.cut,
        timeout=arguments.timeout,
    )
    result = {
        "path": arguments.archive,
        "is_rolled_back": recovery.is_rolled_back,
        "removed": list(recovery.removed),
        "downloads": list(recovery.downloads),
        "export": recovery.export,
        "cut_nbytes": recovery.cut_nbytes,
    }
    path = arguments.archive
    lines = [f"removed   {removed}" for removed in recovery.removed]
    for kept in recovery.downloads:
        lines.append(f"kept      {kept}, a partial download; --downloads removes it")
    if recovery.export is not None:
        lines.append(f"{path}: an interrupted export was {recovery.export}")
    if recovery.cut_nbytes:
        lines.append(f"{path}: {count(recovery.cut_nbytes, 'byte')} after the archive cut off")
    if recovery.is_rolled_back:
        lines.append(f"{path}: an interrupted edit was rolled back")
    elif not lines:
        lines.append(f"{path}: nothing to recover")
    say(arguments, result, lines)
