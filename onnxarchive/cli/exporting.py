"""The commands `export`, `link` and `extract`, which write models for other tools."""

from __future__ import annotations

import argparse
import os

import onnxarchive
from onnxarchive.cli.frame import DONE, access, require_free, say
from onnxarchive.cli.terminal import printable, progress_bar, size
from onnxarchive.interop.links import link_targets
from onnxarchive.model.keys import is_model, model_id
from onnxarchive.remote.urls import shown_url


def export_command(arguments: argparse.Namespace) -> int:
    """Runs `export`."""
    require_free(arguments.target, arguments.force)
    written = [arguments.target]
    if arguments.external_data is not None:
        beside = os.path.join(os.path.dirname(arguments.target), arguments.external_data)
        require_free(beside, arguments.force)
        written.append(beside)
    with progress_bar("export") as progress:
        onnxarchive.export(
            arguments.archive,
            arguments.target,
            model=arguments.model,
            external_data=arguments.external_data,
            progress=progress,
            **access(arguments),
        )
    files = [{"path": path, "nbytes": os.path.getsize(path)} for path in written]
    lines = [f"{printable(file['path'])}: {size(file['nbytes'])}" for file in files]
    say(arguments, {"files": files}, lines)
    return DONE


def link_command(arguments: argparse.Namespace) -> int:
    """Runs `link`."""
    archive = shown_url(arguments.archive)
    targets = link_targets(
        arguments.archive, arguments.target, arguments.model, **access(arguments)
    )
    for target in targets.values():
        require_free(target, arguments.force)
    links, lines = [], []
    for model, target in targets.items():
        options = {"model": model, "prepack": arguments.prepack}
        onnxarchive.link(arguments.archive, target, **options, **access(arguments))
        nbytes = os.path.getsize(target)
        links.append({"path": target, "archive": archive, "nbytes": nbytes})
        lines.append(f"{printable(target)}: {size(nbytes)}, large tensors in {printable(archive)}")
    say(arguments, links if os.path.isdir(arguments.target) else links[0], lines)
    return DONE


def extract_command(arguments: argparse.Namespace) -> int:
    """Runs `extract`."""
    with progress_bar("extract") as progress:
        onnxarchive.extract(
            arguments.archive, arguments.directory, progress=progress, **access(arguments)
        )
    paths = {
        model_id(name): os.path.join(arguments.directory, name)
        for name in os.listdir(arguments.directory)
        if is_model(name)
    }
    paths = dict(sorted(paths.items()))
    lines = [
        f"{printable(path)}: the model{f' {id}' * bool(id)}, with its tensors beside it"
        for id, path in paths.items()
    ]
    say(arguments, {"model": paths[""], "models": paths}, lines)
    return DONE
