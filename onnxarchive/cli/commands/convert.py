"""The command that converts models: one, or many in several threads."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import onnxarchive
from onnxarchive import errors
from onnxarchive.cli.commands.assets import ASSET, ASSET_HELP, named_assets
from onnxarchive.cli.output import (
    DONE,
    StandardOutput,
    as_options,
    require_no_terminal,
    say,
    status_of,
    warn,
)
from onnxarchive.cli.parser import (
    access,
    add_command,
    directory_name,
    pairs,
    path_name,
    require_free,
)
from onnxarchive.cli.terminal import count, count_bar, progress_bar, size, table
from onnxarchive.files.threads import thread_pool
from onnxarchive.model import DEFAULT_SIZE_THRESHOLD
from onnxarchive.remote.location import Location
from onnxarchive.zipformat import layout

if TYPE_CHECKING:
    from onnxarchive.conversion.convert import Conversion

_MODEL_SUFFIX = ".onnx"
_ARCHIVE_SUFFIX = ".onnxa"
_STANDARD_STREAM = "-"


def add_convert(commands: Any) -> None:
    help = "Convert models (.onnx files, directories, zips of any tool, archives) to archives."
    command = add_command(commands, convert, help, "model.onnx archive.onnxa", archive=False)
    command.usage = (
        "onnxarchive convert [options] SOURCE [TARGET]\n"
        "       onnxarchive convert [options] SOURCE... --output-dir DIR"
    )
    help = (
        "SOURCE and TARGET (- is standard output; default: the source's name with .onnxa, beside a "
        "local source or in the working directory); with --output-dir, models and directories"
    )
    command.add_argument("paths", nargs="*", type=path_name, metavar="PATH", help=help)
    help = (
        "convert every model in the sources, one at a time, or N at a time with --jobs N; "
        "archives keep the relative paths of the models, below DIR"
    )
    command.add("--output-dir DIR", help, type=directory_name)
    command.add_jobs()
    help = "store initializers of this size or more outside the model (default %(default)s)"
    command.add("--size-threshold BYTES", help, type=int, default=DEFAULT_SIZE_THRESHOLD)
    help = (
        "begin the data of every entry at a multiple of BYTES, a power of two from 64 to 32768 "
        "(default %(default)s)"
    )
    command.add("--alignment BYTES", help, type=int, default=layout.MIN_ALIGNMENT)
    help = (
        "store all large tensors outside the model, not only initializers: weights in Constant "
        "nodes are then mapped, too"
    )
    command.add("--convert-attribute", help)
    help = (
        "add other files of the model's directory or zip, such as tokenizer.json, as assets, "
        "except hidden files, models and weights; compiled binaries that EPContext nodes name are "
        "added, too"
    )
    command.add("--assets", help)
    help = f"add assets (give the option after the paths): {ASSET_HELP}"
    command.add(f"--asset {ASSET}", help, nargs="+", action="extend", default=[])
    help = (
        "add another model, such as decoder=decoder.onnx; equal tensors of the models are stored "
        "once"
    )
    command.add_repeated("--model ID=PATH", help)
    help = (
        "add every .onnx in the directory SOURCE and below it, except further precisions such as "
        "model_fp16.onnx; ids are made of the file names"
    )
    command.add("--all-models", help)
    help = "with --all-models: the default model (default: model.onnx)"
    command.add("--default NAME", help)
    help = "with --all-models: only files of these names, as '*_fp16.onnx'"
    command.add_repeated("--include PATTERN", help)
    command.add("--verify-checksum", "compare data files with the SHA-1 checksums in the model")
    help = (
        "follow symbolic links in a source if they lead to files below DIR (without DIR: "
        "within the model's folder of a Hugging Face cache)"
    )
    command.add("--follow-links DIR", help, type=path_name, nargs="?", const=True, default=False)
    command.add("--dry-run", "report the outcome, but write no archive")
    command.add("--skip-existing", "with --output-dir: skip models whose archive exists")
    command.add_force()
    command.add_url_options(sha256=False)


def convert(arguments: argparse.Namespace) -> int:
    _require_paths(arguments)
    options = {
        "size_threshold": arguments.size_threshold,
        "alignment": arguments.alignment,
        "convert_attribute": arguments.convert_attribute,
        "assets": named_assets(arguments.asset),
        "other_files": arguments.assets,
        "verify_checksum": arguments.verify_checksum,
        "follow_links": arguments.follow_links,
        "dry_run": arguments.dry_run,
        **access(arguments),
    }
    models = pairs("--model ID=PATH", arguments.model, path_name)
    sources = arguments.paths if arguments.output_dir is not None else arguments.paths[:1]
    if _STANDARD_STREAM in (*sources, *models.values()):
        raise ValueError("convert cannot read standard input: save it to a file")
    if arguments.output_dir is not None:
        _require_no_choice_of_models(arguments)
        return _convert_many(arguments, options)
    return _convert_one(arguments, models, options)


def _require_no_choice_of_models(arguments: argparse.Namespace) -> None:
    """Refuses options that choose the models of one archive, if each model gets its own."""
    for name in ("model", "all_models", "default", "include"):
        if getattr(arguments, name):
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} goes with one SOURCE and TARGET, not with --output-dir")


def _convert_one(
    arguments: argparse.Namespace, models: Mapping[str, str], options: Mapping[str, Any]
) -> int:
    if arguments.all_models and models:
        raise ValueError("give --all-models or --model, not both")
    source = arguments.paths[0]
    target = _target(arguments)
    to_stream = target == _STANDARD_STREAM
    with progress_bar("convert") as progress:
        conversion = onnxarchive.convert(
            source,
            StandardOutput() if to_stream else target,
            models="all" if arguments.all_models else models,
            default=arguments.default,
            include=arguments.include or None,
            progress=progress,
            jobs=arguments.jobs,
            **options,
        )
    if not to_stream or arguments.dry_run:
        say(arguments, _as_json(conversion), _lines(conversion, arguments))
    if target.endswith(".onnx"):
        warn(f"{target} is an archive; 'onnxarchive export ARCHIVE TARGET' writes a .onnx")
    return DONE


def _target(arguments: argparse.Namespace) -> str:
    """The target: a path that is free, or standard output if it can take the archive."""
    if len(arguments.paths) == 1:
        target = _beside(arguments.paths[0])
        if os.path.lexists(target):
            text = "exists; to replace it, name it as TARGET and give --force"
            raise FileExistsError(errno.EEXIST, text, target)
        return target
    target = str(arguments.paths[1])
    if target != _STANDARD_STREAM:
        require_free(target, arguments.force, **access(arguments))
    elif not arguments.dry_run:
        if arguments.json:
            raise ValueError("--json and the archive would both go to standard output")
        require_no_terminal()
    return target


def _beside(source: str) -> str:
    """The path of the archive for a source: beside it, or for a URL in the working directory."""
    location = Location.of(source)
    if location.url is not None:
        from onnxarchive.conversion.download import path_of  # and all that it needs

        name = os.path.basename(path_of(location.remote, None))
        return os.path.splitext(name)[0] + _ARCHIVE_SUFFIX
    if not os.path.isdir(source):
        return os.path.splitext(source)[0] + _ARCHIVE_SUFFIX
    directory = os.path.normpath(source)
    if os.path.basename(directory) in ("", os.curdir, os.pardir):
        directory = os.path.abspath(directory)
    return directory + _ARCHIVE_SUFFIX


def _lines(conversion: Conversion, arguments: argparse.Namespace) -> list[str]:
    text = (
        f"{conversion.target}: {'would have ' if arguments.dry_run else ''}"
        f"{count(conversion.tensors, 'tensor')}, {count(conversion.assets, 'asset')}, "
        f"{size(conversion.nbytes or 0)}{_shared(conversion)}"
    )
    lines = [text, *_in_attributes(conversion), *_other_files(conversion)]
    if arguments.all_models:
        lines += _choice_of_models(conversion)
    return lines


def _require_paths(arguments: argparse.Namespace) -> None:
    """Requires SOURCE and TARGET, or sources with --output-dir; names options that took a path."""
    count = len(arguments.paths)
    if count == 2 or (count and arguments.output_dir is not None):
        return
    # A source alone needs no target, unless an option took the source or the target.
    is_alone = count == 1 and not arguments.paths[0].endswith(_ARCHIVE_SUFFIX)
    directory, assets = arguments.follow_links, arguments.asset
    taken = ""
    if isinstance(directory, str) and not (is_alone and os.path.isdir(directory)):
        taken += f"; {directory!r} was taken as the DIR of --follow-links: "
        taken += "put --follow-links after the paths"
    if len(assets) > 1 and (assets[-1].endswith(_ARCHIVE_SUFFIX) or not is_alone):
        taken += f"; {assets[-1]!r} was taken as an asset: put --asset after the paths"
    if count != 1 or taken:
        raise ValueError(f"convert takes SOURCE and TARGET, or sources with --output-dir{taken}")


def _as_json(conversion: Conversion) -> dict[str, Any]:
    fields = asdict(conversion)
    del fields["error_type"]
    return {"source": fields.pop("source"), "path": fields.pop("target"), **fields}


def _other_files(conversion: Conversion) -> list[str]:
    """A line for each file that became an asset or was left out."""
    return [
        *(f"took      {name}" for name in conversion.added_files),
        *(f"left out  {name}" for name in conversion.left_out),
    ]


def _in_attributes(*conversions: Conversion) -> list[str]:
    """A line about tensors that stay in models, if there are any."""
    tensors = sum(conversion.attribute_tensors for conversion in conversions)
    if not tensors:
        return []
    nbytes = sum(conversion.attribute_nbytes for conversion in conversions)
    return [
        f"{count(tensors, 'tensor')} in Constant nodes and other attributes, {size(nbytes)}, stay "
        "inside; --convert-attribute stores them outside"
    ]


def _choice_of_models(conversion: Conversion) -> list[str]:
    """A line that says how to choose models, if --all-models left some out."""
    left_out = [name for name in conversion.left_out if name.lower().endswith(_MODEL_SUFFIX)]
    if not left_out:
        return []
    return [
        f"{count(len(left_out), 'model')} left out: --include PATTERN takes the models whose file "
        "names match, and no others; it can be given several times"
    ]


def _shared(*conversions: Conversion) -> str:
    shared = sum(conversion.shared_nbytes for conversion in conversions)
    return f"; {size(shared)} shared by several models" if shared else ""


def _convert_many(arguments: argparse.Namespace, options: Mapping[str, Any]) -> int:
    with contextlib.ExitStack() as stack:
        jobs = arguments.jobs
        executor = None if jobs in (None, 1) else thread_pool(jobs)
        if executor is not None:
            stack.enter_context(executor)  # waits for its threads
        advance = stack.enter_context(count_bar("convert", "model"))
        conversions = onnxarchive.convert_many(
            arguments.paths,
            arguments.output_dir,
            executor,
            replace=arguments.force,
            skip_existing=arguments.skip_existing,
            on_done=lambda _, done, total: advance(done, total),
            jobs=None if jobs is None else 1,
            **options,
        )
    conversions = [_as_given(item, arguments) for item in conversions]
    for item in conversions:
        for warning in item.warnings:
            warn(f"{item.source}: {warning}")
    lines = _lines_of_many(conversions, is_dry_run=arguments.dry_run)
    say(arguments, [_as_json(item) for item in conversions], lines)
    failed = [item for item in conversions if item.error is not None]
    statuses = [status_of(getattr(errors, item.error_type or "", None)) for item in failed]
    return max(statuses, default=DONE)


def _as_given(conversion: Conversion, arguments: argparse.Namespace) -> Conversion:
    """A conversion whose paths begin as in the arguments, instead of with the root directory."""
    given = {os.path.abspath(path): path for path in arguments.paths}
    given[os.path.realpath(arguments.output_dir)] = arguments.output_dir
    source, target, error = conversion.source, conversion.target, conversion.error
    for absolute, path in given.items():
        source, target = (_beginning_as(path, absolute, each) for each in (source, target))
        if error is not None and absolute != os.path.dirname(absolute):  # the root is everywhere
            error = error.replace(os.path.join(absolute, ""), os.path.join(path, ""))
    if error is not None:
        error = error.replace(conversion.source, source)
    return replace(conversion, source=source, target=target, error=error)


def _beginning_as(given: str, absolute: str, path: str) -> str:
    """A path, with `given` instead of its beginning `absolute`, if it begins with that."""
    if path == absolute:
        return given
    start = os.path.join(absolute, "")
    return os.path.join(given, path.removeprefix(start)) if path.startswith(start) else path


def _lines_of_many(conversions: Sequence[Conversion], *, is_dry_run: bool) -> list[str]:
    """A table of the conversions, their totals, the reason of each failure, and other files."""
    failed = [item for item in conversions if item.error is not None]
    rows = [
        [item.source, item.target, "failed" if item.error else item.nbytes or "there already"]
        for item in conversions
    ]
    verb = "would be converted" if is_dry_run else "converted"
    skipped = sum(item.is_skipped for item in conversions)
    done = count(len(conversions) - len(failed) - skipped, "model")
    there = f", {skipped} there already" if skipped else ""
    total = f"{done} {verb}{there}, {len(failed)} failed{_shared(*conversions)}"
    lines = [*table(["source", "archive", "bytes"], rows), "", total, *_in_attributes(*conversions)]
    lines += [f"failed: {item.source}: {_reason(item)}" for item in failed]
    for item in conversions:
        others = _other_files(item)
        lines += ["", item.source, *others] if others else []
    return lines


def _reason(failed: Conversion) -> str:
    """Why a conversion failed, in one line."""
    text = as_options(failed.error or "").removeprefix(f"{failed.source}: ")
    head, *rest = map(str.strip, text.splitlines() or [""])
    return f"{head} {'; '.join(rest)}" if rest else head
