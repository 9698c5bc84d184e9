"""The commands that write models for other tools, or remote archives to files; and `cache`."""

from __future__ import annotations

import argparse
import os
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import onnxarchive
from onnxarchive.cli.output import say
from onnxarchive.cli.parser import (
    access,
    add_command,
    add_group,
    directory_name,
    path_name,
    require_free,
    storage_options,
)
from onnxarchive.cli.terminal import count, progress_bar, size, table
from onnxarchive.files.hidden_files import partial_path
from onnxarchive.model.keys import is_model, model_id
from onnxarchive.remote.location import require_local_target
from onnxarchive.remote.urls import Address, url_without_secrets

if TYPE_CHECKING:
    from onnxarchive.remote.cache import CachedArchive

_URL: Final = "https://example.com/model.onnxa"  # in examples


def add_export(commands: Any) -> None:
    help = "Write a model of an archive as a .onnx."
    command = add_command(commands, export, help, "model.onnxa exported.onnx")
    command.add("target TARGET", "the .onnx to write", type=path_name)
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
    command.add("target TARGET", help, type=path_name)
    command.add_model("link this model")
    command.add("--prepack", "refer to packed weights, for ONNX Runtime 1.32 or newer")
    command.add_force()
    command.add_url_options()


def link(arguments: argparse.Namespace) -> None:
    from onnxarchive.interop.links import link_targets, write_links

    require_local_target(arguments.target)
    if not os.path.isdir(arguments.target):
        require_free(arguments.target, arguments.force)  # before the archive is downloaded
    archive = url_without_secrets(arguments.archive)
    with onnxarchive.open(arguments.archive, model=arguments.model, **access(arguments)) as opened:
        targets = link_targets(opened, arguments.target, arguments.model)
        for target in targets.values():
            require_free(target, arguments.force)
        write_links(opened, targets, prepack=arguments.prepack)
    links, lines = [], []
    for target in targets.values():
        nbytes = os.path.getsize(target)
        links.append({"path": target, "archive": archive, "nbytes": nbytes})
        lines.append(f"{target}: {size(nbytes)}, large tensors in {archive}")
    say(arguments, links if os.path.isdir(arguments.target) else links[0], lines)


def add_extract(commands: Any) -> None:
    help = "Unzip an archive to a directory of ONNX external data."
    command = add_command(commands, extract, help, "model.onnxa unzipped")
    command.add("directory DIR", "a new or an empty directory", type=directory_name)
    command.add_url_options()


def extract(arguments: argparse.Namespace) -> None:
    directory = arguments.directory
    with progress_bar("extract") as progress:
        onnxarchive.extract(arguments.archive, directory, progress=progress, **access(arguments))
    names = {model_id(name): name for name in os.listdir(directory) if is_model(name)}
    paths = {id: os.path.join(directory, names[id]) for id in sorted(names)}
    lines = []
    for id, path in paths.items():
        name = f"the model {id}" if id else "the model"
        lines.append(f"{path}: {name}, with its tensors beside it")
    say(arguments, {"model": paths[""], "models": paths}, lines)


def add_download(commands: Any) -> None:
    help = "Download a remote archive and verify it; resume an interrupted download."
    command = add_command(commands, download, help, _URL, archive=False)
    command.add_argument("url", metavar="URL", type=path_name)
    command.add("path PATH", "the file (default: the URL's last part)", nargs="?", type=path_name)
    command.add_force()
    command.add_url_options(cache=False)


def download(arguments: argparse.Namespace) -> None:
    from onnxarchive.conversion.download import path_of

    options = storage_options(arguments)
    path = path_of(Address(arguments.url), arguments.path)
    require_free(path, arguments.force)
    try:
        with progress_bar("download") as progress:
            path = onnxarchive.download(
                arguments.url,
                path,
                progress=progress,
                storage_options=options,
                sha256=arguments.sha256,
            )
    except KeyboardInterrupt:
        if not os.path.lexists(partial_path(os.path.realpath(path))):
            raise
        text = "interrupted; run the same command to resume the download"
        raise KeyboardInterrupt(text) from None
    nbytes = os.path.getsize(path)
    say(arguments, {"path": path, "nbytes": nbytes}, f"{path}: {size(nbytes)}, verified")


def add_cache(commands: Any) -> None:
    help = "List or clear the cache of remote archives."
    actions = add_group(commands, "cache", help, "list")
    help = "List the archives in the cache, most recently used first."
    listed = add_command(actions, list_cache, help, "", name="list", archive=False)
    help = "Remove archives from the cache; programs that use them are not affected."
    cleared = add_command(actions, clear_cache, help, _URL, name="clear", archive=False)
    cleared.add("urls URL", "remove only these archives", nargs="*")
    for command in (listed, cleared):
        command.add_cache_dir("the directory of the cache (default: the user's)", default=True)


def list_cache(arguments: argparse.Namespace) -> None:
    from onnxarchive.remote.cache import cached_archives, directory_of_cache

    directory = directory_of_cache(arguments.cache_dir)
    copies = cached_archives(directory)
    rows: list[list[object]] = []
    for copy in copies:
        name = copy.url or f"(damaged: {os.path.basename(copy.path)})"
        rows.append([name, copy.nbytes, copy.present, _last_used(copy)])
    lines = table(["URL", "bytes", "present", "last used"], rows)
    say(arguments, _as_json(directory, copies), [*lines, "", f"{_total(copies)} in {directory}"])


def clear_cache(arguments: argparse.Namespace) -> None:
    from onnxarchive.remote.cache import clear, directory_of_cache

    directory = directory_of_cache(arguments.cache_dir)
    removed = clear(directory, arguments.urls)
    say(arguments, _as_json(directory, removed), f"removed {_total(removed)} from {directory}")


def _as_json(directory: str, copies: list[CachedArchive]) -> dict[str, Any]:
    archives = []
    for copy in copies:
        sizes = {"nbytes": copy.nbytes, "present": copy.present}
        archives.append({"url": copy.url, **sizes, "last_used": _last_used(copy)})
    return {"directory": directory, "archives": archives}


def _total(copies: list[CachedArchive]) -> str:
    return f"{count(len(copies), 'archive')} with {size(sum(copy.present for copy in copies))}"


def _last_used(copy: CachedArchive) -> str:
    return datetime.fromtimestamp(copy.used).astimezone().isoformat(" ", "seconds")
