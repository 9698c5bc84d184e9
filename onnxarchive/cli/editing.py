"""The commands that edit the models of an archive, and `recover`."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator

from onnxarchive.cli.frame import DONE, pairs, say
from onnxarchive.cli.parser import WORDS
from onnxarchive.cli.terminal import printable, progress_bar, size
from onnxarchive.editing.recovery import recover
from onnxarchive.editing.transaction import Edit, edit
from onnxarchive.errors import shown, shown_names


def replace_model_command(arguments: argparse.Namespace) -> int:
    """Runs `replace-model`."""
    with edited(arguments, "replace-model") as changes:
        changes.models[arguments.name] = arguments.model
    return say_size(arguments)


def remove_model_command(arguments: argparse.Namespace) -> int:
    """Runs `remove-model`."""
    with edited(arguments, "remove-model") as changes:
        del changes.models[arguments.id]
    return say_size(arguments)


def rename_model_command(arguments: argparse.Namespace) -> int:
    """Runs `rename-model`."""
    with edited(arguments, "rename-model") as changes:
        changes.models.rename(arguments.old, arguments.new)
    return say_size(arguments)


def set_metadata_command(arguments: argparse.Namespace) -> int:
    """Runs `set-metadata`."""
    new = pairs("KEY=VALUE", arguments.pairs)
    with edited(arguments, "set-metadata") as changes:
        for field in WORDS:
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
        changes.metadata.update(new)
    return say_size(arguments)


@contextlib.contextmanager
def edited(arguments: argparse.Namespace, command: str) -> Iterator[Edit]:
    """Edits the archive, with those options of `edit` that the command has."""
    names = ("model", "compact", "copy", "size_threshold", "timeout")
    options = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    if command == "replace-model":  # its argument `model` is the new model
        del options["model"]
    with (
        progress_bar(command) as progress,
        edit(arguments.archive, progress=progress, **options) as changes,
    ):
        yield changes


def say_size(arguments: argparse.Namespace) -> int:
    """Prints the size of the edited archive."""
    path, nbytes = arguments.archive, os.path.getsize(arguments.archive)
    say(arguments, {"path": path, "nbytes": nbytes}, f"{printable(path)}: {size(nbytes)}")
    return DONE


def recover_command(arguments: argparse.Namespace) -> int:
    """Runs `recover`."""
    recovery = recover(arguments.archive, timeout=arguments.timeout)
    result = {
        "path": arguments.archive,
        "is_rolled_back": recovery.is_rolled_back,
        "removed": list(recovery.removed),
    }
    path = printable(arguments.archive)
    lines = [f"removed   {printable(removed)}" for removed in recovery.removed]
    if recovery.is_rolled_back:
        lines.append(f"{path}: an interrupted edit was rolled back")
    elif not lines:
        lines.append(f"{path}: nothing to recover")
    say(arguments, result, lines)
    return DONE
