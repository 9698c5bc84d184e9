"""The commands that edit the models of an archive, and `recover`."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import onnxarchive
from onnxarchive.cli.output import say
from onnxarchive.cli.parser import Command, add_command, file_name, pairs
from onnxarchive.cli.terminal import progress_bar, size
from onnxarchive.errors import shown, shown_names

if TYPE_CHECKING:
    from onnxarchive.editing.transaction import Edit

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
    help = "Roll back an interrupted edit, and remove temporary files of killed processes."
    add_command(commands, recover, help, "model.onnxa").add_timeout()


def recover(arguments: argparse.Namespace) -> None:
    recovery = onnxarchive.recover(arguments.archive, timeout=arguments.timeout)
    result = {
        "path": arguments.archive,
        "is_rolled_back": recovery.is_rolled_back,
        "removed": list(recovery.removed),
    }
    path = arguments.archive
    lines = [f"removed   {removed}" for removed in recovery.removed]
    if recovery.is_rolled_back:
        lines.append(f"{path}: an interrupted edit was rolled back")
    elif not lines:
        lines.append(f"{path}: nothing to recover")
    say(arguments, result, lines)
