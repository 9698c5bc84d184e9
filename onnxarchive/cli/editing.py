"""The commands that change an archive and leave its weights where they are."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from typing import Any

import onnx

from onnxarchive.cli.frame import DONE, add_command, say
from onnxarchive.cli.progress import progress_bar
from onnxarchive.cli.table import printable, size
from onnxarchive.edit import change_model, recover, replace_model
from onnxarchive.errors import shown
from onnxarchive.model import proto, renaming

_FIELDS = ("doc_string", "producer_name", "producer_version", "domain")


def add_replace_model(commands: Any) -> None:
    """Adds `replace-model`."""
    command = add_command(
        commands,
        "replace-model",
        _replace_model,
        "Give an archive another model; weights are neither read nor moved.",
    )
    command.add_argument("archive")
    command.add_argument(
        "model",
        help="a .onnx whose external data is in the archive (a changed link, or the archive's own "
        "__MODEL_PROTO), beside it, or in it",
    )
    command.add_argument(
        "--compact",
        action="store_true",
        help="write the whole archive anew where tensors are gone, renamed or in another order",
    )
    command.add_argument(
        "--size-threshold",
        type=int,
        metavar="BYTES",
        help="store new tensors of this size or more outside the model (default: as the archive's)",
    )
    _add_common(command)


def add_set_metadata(commands: Any) -> None:
    """Adds `set-metadata`."""
    command = add_command(
        commands,
        "set-metadata",
        _set_metadata,
        "Set metadata and other words of an archive's model, and rename its inputs and outputs.",
    )
    command.add_argument("archive")
    command.add_argument("pairs", nargs="*", metavar="KEY=VALUE", help="metadata to set")
    command.add_argument(
        "--remove", action="append", default=[], metavar="KEY", help="metadata to remove"
    )
    for field in _FIELDS:
        words = field.replace("_", " ")
        command.add_argument(
            f"--{field.replace('_', '-')}", metavar="TEXT", help=f"set the {words}; '' removes it"
        )
    for kind in ("input", "output"):
        command.add_argument(
            f"--rename-{kind}",
            action="append",
            default=[],
            metavar="OLD=NEW",
            help=f"give an {kind} another name, wherever it is used",
        )
    _add_common(command)


def add_recover(commands: Any) -> None:
    """Adds `recover`."""
    command = add_command(
        commands,
        "recover",
        _recover,
        "Take back a change of an archive that a crash cut off, and remove what was left of it.",
    )
    command.add_argument("archive")
    command.add_argument(
        "--force",
        action="store_true",
        help="write back a journal also where it says that it is of another file",
    )
    _add_timeout(command)


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--copy",
        action="store_true",
        help="put a new file in the archive's place, for one with several names (links)",
    )
    _add_timeout(command)


def _add_timeout(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="wait so long for others who change the archive, 0 for not at all (default: for ever)",
    )


def _replace_model(arguments: argparse.Namespace) -> int:
    with progress_bar("replace-model") as progress:
        replace_model(
            arguments.archive,
            arguments.model,
            compact=arguments.compact,
            copy=arguments.copy,
            size_threshold=arguments.size_threshold,
            timeout=arguments.timeout,
            progress=progress,
        )
    return _say_size(arguments)


def _set_metadata(arguments: argparse.Namespace) -> int:
    names = [
        dict(_pairs(f"--rename-{kind}", getattr(arguments, f"rename_{kind}")))
        for kind in ("input", "output")
    ]
    pairs = _pairs("KEY=VALUE", arguments.pairs)

    def change(model: onnx.ModelProto) -> onnx.ModelProto:
        renamed = renaming.renamed(model, *names)
        for field in _FIELDS:
            value = getattr(arguments, field)
            if value:
                setattr(renamed, field, value)
            elif value is not None:
                renamed.ClearField(field)
        metadata = proto.metadata(renamed)
        for key in arguments.remove:
            if key not in metadata:
                listed = ", ".join(map(shown, metadata)) or "none"
                raise ValueError(
                    f"--remove: expected a key of the metadata, which has {listed}, found "
                    f"{shown(key)}"
                )
            del metadata[key]
        metadata.update(pairs)
        if metadata != proto.metadata(renamed):
            onnx.helper.set_model_props(renamed, metadata)
        return renamed

    change_model(arguments.archive, change, copy=arguments.copy, timeout=arguments.timeout)
    return _say_size(arguments)


def _pairs(option: str, given: Iterable[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for argument in given:
        key, equals, value = argument.partition("=")
        if not equals or not key:
            raise ValueError(f"{option}: expected KEY=VALUE, found {argument!r}")
        if key in pairs:
            raise ValueError(f"{option}: expected each name once, found {key!r} again")
        pairs[key] = value
    return pairs


def _say_size(arguments: argparse.Namespace) -> int:
    nbytes = os.path.getsize(arguments.archive)
    say(
        arguments,
        {"path": arguments.archive, "nbytes": nbytes},
        f"{printable(arguments.archive)}: {size(nbytes)}",
    )
    return DONE


def _recover(arguments: argparse.Namespace) -> int:
    recovery = recover(arguments.archive, force=arguments.force, timeout=arguments.timeout)
    result = {
        "path": arguments.archive,
        "is_rolled_back": recovery.is_rolled_back,
        "removed": list(recovery.removed),
    }
    path = printable(arguments.archive)
    lines = [f"removed   {printable(removed)}" for removed in recovery.removed]
    if recovery.is_rolled_back:
        lines.append(f"{path}: a change that was cut off is taken back")
    elif not lines:
        lines.append(f"{path}: nothing was to be done")
    say(arguments, result, "\n".join(lines))
    return DONE
