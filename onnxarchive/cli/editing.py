"""The commands that edit the models of an archive, and `recover`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import onnx

from onnxarchive.archive.editing import (
    change_model,
    remove_model,
    rename_model,
    replace_model,
)
from onnxarchive.archive.recovery import recover
from onnxarchive.cli.frame import DONE, pairs, say
from onnxarchive.cli.parser import WORDS
from onnxarchive.cli.progress import progress_bar
from onnxarchive.cli.table import printable, size
from onnxarchive.errors import shown, shown_names
from onnxarchive.model import proto, renaming


def replace_model_command(arguments: argparse.Namespace) -> int:
    """Runs `replace-model`."""
    with progress_bar("replace-model") as progress:
        replace_model(
            arguments.archive,
            arguments.model,
            name=arguments.name,
            compact=arguments.compact,
            copy=arguments.copy,
            size_threshold=arguments.size_threshold,
            timeout=arguments.timeout,
            progress=progress,
        )
    return say_size(arguments)


def remove_model_command(arguments: argparse.Namespace) -> int:
    """Runs `remove-model`."""
    with progress_bar("remove-model") as progress:
        remove_model(
            arguments.archive,
            arguments.id,
            compact=arguments.compact,
            copy=arguments.copy,
            timeout=arguments.timeout,
            progress=progress,
        )
    return say_size(arguments)


def rename_model_command(arguments: argparse.Namespace) -> int:
    """Runs `rename-model`."""
    rename_model(
        arguments.archive,
        arguments.old,
        arguments.new,
        copy=arguments.copy,
        timeout=arguments.timeout,
    )
    return say_size(arguments)


def set_metadata_command(arguments: argparse.Namespace) -> int:
    """Runs `set-metadata`."""
    new = pairs("KEY=VALUE", arguments.pairs)

    def change(model: onnx.ModelProto) -> onnx.ModelProto:
        for field in WORDS:
            value = getattr(arguments, field)
            if value:
                setattr(model, field, value)
            elif value is not None:
                model.ClearField(field)
        metadata = proto.metadata(model)
        for key in arguments.remove:
            if key not in metadata:
                raise ValueError(
                    f"--remove: no metadata {shown(key)}; there is {shown_names(metadata)}"
                )
            del metadata[key]
        metadata.update(new)
        proto.set_metadata(model, metadata)
        return model

    return _change(arguments, change)


def rename_command(arguments: argparse.Namespace) -> int:
    """Runs `rename`."""
    inputs = pairs("--input OLD=NEW", arguments.input)
    outputs = pairs("--output OLD=NEW", arguments.output)
    if not (inputs or outputs):
        raise ValueError("rename needs --input OLD=NEW or --output OLD=NEW")
    return _change(arguments, lambda model: renaming.renamed(model, inputs, outputs))


def _change(
    arguments: argparse.Namespace, change: Callable[[onnx.ModelProto], onnx.ModelProto]
) -> int:
    change_model(
        arguments.archive,
        change,
        name=arguments.model,
        compact=arguments.compact,
        copy=arguments.copy,
        timeout=arguments.timeout,
    )
    return say_size(arguments)


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
