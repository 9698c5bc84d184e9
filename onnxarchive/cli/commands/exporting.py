"""The commands `export`, `link` and `extract`, which write models for other tools."""

from __future__ import annotations

import argparse
import os
from typing import Any

import onnxarchive
from onnxarchive.cli.output import say
from onnxarchive.cli.parser import access, add_command, require_free
from onnxarchive.cli.terminal import progress_bar, size
from onnxarchive.model.keys import is_model, model_id
from onnxarchive.remote.location import require_local_target
from onnxarchive.remote.urls import shown_url


def add_export(commands: Any) -> None:
    help = "Write a model of an archive as a .onnx."
    command = add_command(commands, export, help, "model.onnxa exported.onnx")
    command.add("target TARGET", "the .onnx to write")
    help = "write large tensors to this file beside the .onnx; needed from 2 GiB on"
    command.add("--external-data NAME", help)
    command.add_model("write this model")
    command.add_force()
    command.add_url_options()


def export(arguments: argparse.Namespace) -> None:
    require_local_target(arguments.target)
    paths = [arguments.target]
    if arguments.external_data is not None:
        paths.append(os.path.join(os.path.dirname(arguments.target), arguments.external_data))
    for path in paths:
        require_free(path, arguments.force)
    with progress_bar("export") as progress:
        onnxarchive.export(
            arguments.archive,
            arguments.target,
            model=arguments.model,
            external_data=arguments.external_data,
            progress=progress,
            **access(arguments),
        )
    files = [{"path": path, "nbytes": os.path.getsize(path)} for path in paths]
    lines = [f"{file['path']}: {size(file['nbytes'])}" for file in files]
    say(arguments, {"files": files}, lines)


def add_link(commands: Any) -> None:
    help = "Write a small .onnx that uses an archive as its external data, for other tools."
    command = add_command(commands, link, help, "model.onnxa linked.onnx")
    help = "the .onnx to write, in the archive's directory or above; a directory gets one per model"
    command.add("target TARGET", help)
    command.add_model("link this model")
    command.add("--prepack", "refer to packed weights, for ONNX Runtime 1.32 or newer")
    command.add_force()
    command.add_url_options()


def link(arguments: argparse.Namespace) -> None:
    from onnxarchive.interop.links import link_targets

    archive = shown_url(arguments.archive)
    targets = link_targets(
        arguments.archive, arguments.target, arguments.model, **access(arguments)
    )
    for target in targets.values():
        require_free(target, arguments.force)
    options = {"model": arguments.model, "prepack": arguments.prepack}
    onnxarchive.link(arguments.archive, arguments.target, **options, **access(arguments))
    links, lines = [], []
    for target in targets.values():
        nbytes = os.path.getsize(target)
        links.append({"path": target, "archive": archive, "nbytes": nbytes})
        lines.append(f"{target}: {size(nbytes)}, large tensors in {archive}")
    say(arguments, links if os.path.isdir(arguments.target) else links[0], lines)


def add_extract(commands: Any) -> None:
    help = "Unzip an archive to a directory of ONNX external data."
    command = add_command(commands, extract, help, "model.onnxa unzipped")
    command.add("directory DIRECTORY", "a new or an empty directory")
    command.add_url_options()


def extract(arguments: argparse.Namespace) -> None:
    directory = arguments.directory
    with progress_bar("extract") as progress:
        onnxarchive.extract(arguments.archive, directory, progress=progress, **access(arguments))
    names = {model_id(name): name for name in os.listdir(directory) if is_model(name)}
    paths = {id: os.path.join(directory, names[id]) for id in sorted(names)}
    lines = [
        f"{path}: the model{f' {id}' * bool(id)}, with its tensors beside it"
        for id, path in paths.items()
    ]
    say(arguments, {"model": paths[""], "models": paths}, lines)
