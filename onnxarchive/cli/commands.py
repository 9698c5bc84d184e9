"""The commands: what they take, what they print, and the status that they end with."""

from __future__ import annotations

import argparse
import contextlib
import math
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, wait
from typing import Any

import onnx

import onnxarchive
from onnxarchive.archive import Archive
from onnxarchive.batch import convert_many
from onnxarchive.cli.editing import add_recover, add_replace_model, add_set_metadata
from onnxarchive.cli.frame import DONE, FOUND, add_command, add_force, require_free, say
from onnxarchive.cli.progress import count_bar, progress_bar
from onnxarchive.cli.running import add_run
from onnxarchive.cli.table import count, printable, shape, size, table
from onnxarchive.cli.viewing import add_view
from onnxarchive.convert import Conversion
from onnxarchive.files import remove_temporaries
from onnxarchive.model import dtypes, proto, tensors
from onnxarchive.model.keys import ASSET_PREFIX, MODEL_PROTO
from onnxarchive.model.tensors import text
from onnxarchive.rules import rules
from onnxarchive.runtime.link import linked_archive
from onnxarchive.save import DEFAULT_SIZE_THRESHOLD
from onnxarchive.zipformat import layout
from onnxarchive.zipformat.layout import Placement

_STANDARD_STREAM = "-"


def parser() -> argparse.ArgumentParser:
    """The command line's arguments."""
    top = argparse.ArgumentParser(
        prog="onnxarchive",
        description="ONNX models as one zip file that is mapped, not read.",
        epilog="Exit status: 0 done, 1 a check or comparison found something, 2 wrong use or an "
        "error of the system, 3 the file is corrupt or unsafe.",
    )
    top.add_argument("--version", action="version", version=onnxarchive.__version__)
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    _add_convert(commands)
    _add_export(commands)
    _add_link(commands)
    _add_ls(commands)
    _add_info(commands)
    _add_check(commands)
    _add_extract(commands)
    add_replace_model(commands)
    add_set_metadata(commands)
    add_recover(commands)
    add_run(commands)
    add_view(commands)
    return top


def _add_convert(commands: Any) -> None:
    command = add_command(
        commands,
        "convert",
        _convert,
        "Convert a model to an archive: a .onnx, a directory, a zip of any tool, an archive.",
    )
    command.usage = (
        "onnxarchive convert [options] SOURCE TARGET\n"
        "       onnxarchive convert [options] DIR_OR_FILE... --output-dir OUT [--jobs N]"
    )
    command.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="SOURCE and TARGET (- for standard output), or with --output-dir the sources",
    )
    command.add_argument(
        "--output-dir", metavar="OUT", help="convert every model of the sources, keeping their tree"
    )
    command.add_argument(
        "--jobs", type=int, metavar="N", help="convert N models at once (default 1)"
    )
    command.add_argument(
        "--size-threshold",
        type=int,
        default=DEFAULT_SIZE_THRESHOLD,
        metavar="BYTES",
        help="store tensors of this size or more outside the model (default %(default)s)",
    )
    command.add_argument(
        "--alignment",
        type=int,
        default=layout.MIN_ALIGNMENT,
        metavar="BYTES",
        help="align every entry's data, a power of two from 64 to 32768 (default %(default)s)",
    )
    command.add_argument(
        "--convert-attribute",
        action="store_true",
        help="store tensors of attributes, functions and sparse tensors outside, too",
    )
    command.add_argument(
        "--asset",
        action="append",
        default=[],
        metavar="[NAME=]PATH",
        help="a file that the archive shall carry, under its own name or NAME",
    )
    command.add_argument(
        "--dedupe",
        action="store_true",
        help="let identical initializers of a graph become one",
    )
    command.add_argument(
        "--verify-checksum",
        action="store_true",
        help="compare data files with the SHA-1 that their tensors name",
    )
    command.add_argument(
        "--dry-run", action="store_true", help="tell what would be written, and write nothing"
    )
    add_force(command)


def _convert(arguments: argparse.Namespace) -> int:
    if arguments.jobs is not None and arguments.jobs < 1:
        raise ValueError(f"--jobs must be 1 or more, got {arguments.jobs}")
    options = {
        "size_threshold": arguments.size_threshold,
        "alignment": arguments.alignment,
        "convert_attribute": arguments.convert_attribute,
        "assets": _assets(arguments.asset),
        "dedupe": arguments.dedupe,
        "verify_checksum": arguments.verify_checksum,
        "dry_run": arguments.dry_run,
    }
    if arguments.output_dir is not None:
        return _convert_many(arguments, options)
    if len(arguments.paths) != 2 or arguments.jobs is not None:
        raise ValueError("convert takes SOURCE and TARGET, or sources with --output-dir and --jobs")
    source, target = arguments.paths
    if source == _STANDARD_STREAM:
        raise ValueError("a source must be a file, which is mapped; save standard input to one")
    to_stream = target == _STANDARD_STREAM
    if to_stream and arguments.json and not arguments.dry_run:
        raise ValueError("standard output takes either the archive or --json")
    if not to_stream:
        require_free(target, arguments.force)
    with progress_bar("convert") as progress:
        conversion = onnxarchive.convert(
            source, sys.stdout.buffer if to_stream else target, progress=progress, **options
        )
    if not to_stream or arguments.dry_run:
        say(arguments, _described(conversion), _told(conversion, arguments.dry_run))
    return DONE


def _described(conversion: Conversion) -> dict[str, Any]:
    """A conversion as JSON has it."""
    return {
        "source": conversion.source,
        "path": conversion.target,
        "error": conversion.error,
        "nbytes": conversion.nbytes,
        "tensors": conversion.tensors,
        "assets": conversion.assets,
        "saved_nbytes": conversion.saved_nbytes,
        "warnings": list(conversion.warnings),
    }


def _told(conversion: Conversion, is_dry_run: bool) -> str:
    told = (
        f"{printable(conversion.target)}: {'would be ' if is_dry_run else ''}"
        f"{count(conversion.tensors, 'tensor')}, {count(conversion.assets, 'asset')}, "
        f"{size(conversion.nbytes or 0)}"
    )
    if conversion.saved_nbytes:
        told += f"; {size(conversion.saved_nbytes)} saved by merging identical initializers"
    return told


def _convert_many(arguments: argparse.Namespace, options: dict[str, Any]) -> int:
    with contextlib.ExitStack() as stack:
        several = arguments.jobs is not None and arguments.jobs > 1
        executor = stack.enter_context(_executor(arguments.jobs)) if several else None
        advance = stack.enter_context(count_bar("convert", "model"))
        conversions = convert_many(
            arguments.paths,
            arguments.output_dir,
            executor,
            replace=arguments.force,
            on_done=lambda _, done, total: advance(done, total),
            **options,
        )
    for item in conversions:
        for warning in item.warnings:
            print(
                f"onnxarchive: warning: {printable(item.source)}: {printable(warning)}",
                file=sys.stderr,
            )
    failed = [item for item in conversions if item.error is not None]
    rows = [
        [item.source, item.target, "failed" if item.nbytes is None else item.nbytes]
        for item in conversions
    ]
    verb = "would be converted" if arguments.dry_run else "converted"
    total = f"{count(len(conversions) - len(failed), 'model')} {verb}, {len(failed)} failed"
    saved = sum(item.saved_nbytes for item in conversions)
    if saved:
        total += f"; {size(saved)} saved by merging identical initializers"
    lines = [table(["source", "archive", "bytes"], rows), "", total]
    lines += [f"failed: {printable(item.source)}: {printable(item.error or '')}" for item in failed]
    say(arguments, [_described(item) for item in conversions], "\n".join(lines))
    return FOUND if failed else DONE


@contextlib.contextmanager
def _executor(jobs: int) -> Iterator[Executor]:
    """Processes that convert; an interrupt ends them, and they clean up after themselves."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_await_the_end) as executor:
        try:
            # Workers that are born now ignore interrupts from their first moment, by inheritance;
            # one is born for each piece of work, as none is idle yet.
            with _interrupts_ignored():
                wait([executor.submit(_await_the_end) for _ in range(jobs)])
            yield executor
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # which alone gets them
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _await_the_end() -> None:
    """In a worker: the terminal's interrupt is for the parent, which then terminates this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end_worker)


def _end_worker(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the pool sends it, too
    # An exception would be taken for the outcome of the work, and the worker would go on.
    remove_temporaries()
    os._exit(FOUND)


def _assets(given: list[str]) -> dict[str, str]:
    assets: dict[str, str] = {}
    for argument in given:
        name, equals, path = argument.partition("=")
        if not equals:
            name, path = os.path.basename(argument), argument
        if name in assets:
            raise ValueError(f"expected each asset once, found {name!r} again")
        assets[name] = path
    return assets


def _add_export(commands: Any) -> None:
    command = add_command(commands, "export", _export, "Write an archive's model as a .onnx.")
    command.add_argument("archive")
    command.add_argument("target", help="the .onnx to write")
    command.add_argument(
        "--external-data",
        metavar="NAME",
        help="put the large tensors into this file beside it; needed from 2 GiB on",
    )
    add_force(command)


def _export(arguments: argparse.Namespace) -> int:
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
            external_data=arguments.external_data,
            progress=progress,
        )
    files = [{"path": path, "nbytes": os.path.getsize(path)} for path in written]
    lines = [f"{printable(file['path'])}: {size(file['nbytes'])}" for file in files]
    say(arguments, {"files": files}, "\n".join(lines))
    return DONE


def _add_link(commands: Any) -> None:
    command = add_command(
        commands,
        "link",
        _link,
        "Write a small .onnx whose external data points into an archive, for tools that know none.",
    )
    command.add_argument("archive")
    command.add_argument("target", help="the .onnx to write, in the archive's directory or above")
    add_force(command)


def _link(arguments: argparse.Namespace) -> int:
    require_free(arguments.target, arguments.force)
    onnxarchive.link(arguments.archive, arguments.target)
    result = {
        "path": arguments.target,
        "archive": arguments.archive,
        "nbytes": os.path.getsize(arguments.target),
    }
    told = (
        f"{printable(arguments.target)}: {size(result['nbytes'])}, "
        f"its large tensors in {printable(arguments.archive)}"
    )
    say(arguments, result, told)
    return DONE


def _add_ls(commands: Any) -> None:
    command = add_command(commands, "ls", _ls, "List an archive's tensors and assets.")
    command.add_argument("archive")


def _ls(arguments: argparse.Namespace) -> int:
    with onnxarchive.open(arguments.archive) as archive:
        listed = _listed_tensors(archive)
        others = [
            {
                "name": entry.name,
                "nbytes": entry.nbytes,
                "data_offset": entry.data_offset,
                "crc32": entry.crc32,
            }
            for entry in archive.entries.values()
            if entry.name == MODEL_PROTO or entry.name.startswith(ASSET_PREFIX)
        ]
        counts = _counts(archive)
    nbytes = os.path.getsize(arguments.archive)
    rows: list[list[object]] = [
        [
            item["name"],
            item["key"],
            item["data_type"],
            shape(item["dims"]),
            item["nbytes"],
            item["data_offset"],
        ]
        for item in listed
    ]
    rows += [["", item["name"], "", "", item["nbytes"], item["data_offset"]] for item in others]
    shown = table(["name", "key", "data type", "shape", "bytes", "offset"], rows)
    weights = sum(item["nbytes"] for item in listed)
    shown += (
        f"\n\n{count(counts['tensors'], 'tensor')} of {size(weights)}, "
        f"{counts['in_model']:,} more in the model, {count(counts['assets'], 'asset')}; "
        f"archive of {size(nbytes)}"
    )
    result = {
        "path": arguments.archive,
        "tensors": listed,
        "others": others,
        "totals": {**counts, "weights": weights, "nbytes": nbytes},
    }
    say(arguments, result, shown)
    return DONE


def _listed_tensors(archive: Archive) -> list[dict[str, Any]]:
    listed = []
    for site in tensors.walk(archive.model):
        key = tensors.location(site.tensor)
        if key is None:
            continue
        entry = archive.entries[key]
        listed.append(
            {
                "name": site.name,
                "key": key,
                "data_type": dtypes.BY_NUMBER[site.tensor.data_type].name,
                "dims": list(site.tensor.dims),
                "nbytes": entry.nbytes,
                "data_offset": entry.data_offset,
                "crc32": entry.crc32,
            }
        )
    return sorted(listed, key=lambda item: item["data_offset"])


def _counts(archive: Archive) -> dict[str, int]:
    sites = list(tensors.walk(archive.model))
    outside = sum(tensors.location(site.tensor) is not None for site in sites)
    return {
        "tensors": outside,
        "in_model": len(sites) - outside,
        "assets": len(archive.assets),
    }


def _add_info(commands: Any) -> None:
    command = add_command(commands, "info", _info, "Tell what model an archive holds.")
    command.add_argument("archive")


def _info(arguments: argparse.Namespace) -> int:
    with onnxarchive.open(arguments.archive) as archive:
        model = archive.model
        version = model.producer_version
        initializers = [site.tensor for site in tensors.walk(model) if site.is_initializer]
        result: dict[str, Any] = {
            "path": arguments.archive,
            "producer": " ".join(filter(None, map(text, (model.producer_name, version)))),
            "ir_version": model.ir_version,
            "opsets": {
                text(opset.domain) or "ai.onnx": opset.version for opset in model.opset_import
            },
            "graph": text(model.graph.name),
            "nodes": len(model.graph.node),
            "inputs": {text(value.name): _type(value.type) for value in model.graph.input},
            "outputs": {text(value.name): _type(value.type) for value in model.graph.output},
            "parameters": sum(math.prod(tensor.dims) for tensor in initializers),
            "bytes": _bytes(archive, os.path.getsize(arguments.archive)),
            "metadata": proto.metadata(model),
        }
    lines = []
    for label, value in result.items():
        if label == "bytes":
            lines += [f"{part:<12}{size(nbytes)}" for part, nbytes in value.items()]
        elif isinstance(value, dict):
            described = [printable(f"{name}: {what}") for name, what in value.items()]
            lines += [f"{label if not row else '':<12}{line}" for row, line in enumerate(described)]
        elif value:
            lines.append(f"{label:<12}{value:,}" if isinstance(value, int) else _line(label, value))
    say(arguments, result, "\n".join(lines))
    return DONE


def _line(label: str, value: str) -> str:
    return f"{label:<12}{printable(value)}"


def _type(proto: onnx.TypeProto) -> str:
    """A type as text: `FLOAT 1x3xN`, `sequence of INT64`."""
    kind = proto.WhichOneof("value")
    if kind in ("tensor_type", "sparse_tensor_type"):
        described = getattr(proto, kind)
        name = dtypes.name_of(described.elem_type)
        if not described.HasField("shape"):
            return name
        dims = [
            dim.dim_value if dim.HasField("dim_value") else text(dim.dim_param) or "?"
            for dim in described.shape.dim
        ]
        return f"{name} {shape(dims)}"
    if kind == "sequence_type":
        return f"sequence of {_type(proto.sequence_type.elem_type)}"
    if kind == "optional_type":
        return f"optional {_type(proto.optional_type.elem_type)}"
    return (kind or "unknown").removesuffix("_type")


def _bytes(archive: Archive, nbytes: int) -> dict[str, int]:
    """Where the bytes of an archive are."""
    entries = archive.entries.values()
    assets = sum(entry.nbytes for entry in entries if entry.name.startswith(ASSET_PREFIX))
    model = archive.entries[MODEL_PROTO].nbytes
    data = sum(entry.nbytes for entry in entries)
    padding = sum(
        entry.data_offset
        - Placement(entry.name.encode(), entry.nbytes, 0, entry.header_offset).unpadded_offset
        for entry in entries
    )
    return {
        "weights": data - model - assets,
        "model": model,
        "assets": assets,
        "padding": padding,
        "headers": nbytes - data - padding,
        "archive": nbytes,
    }


def _add_check(commands: Any) -> None:
    command = add_command(commands, "check", _check, "List every rule that an archive breaks.")
    command.usage = (
        "onnxarchive check [--full] [--json] ARCHIVE\n"
        "       onnxarchive check [--full] [--json] --link LINK [ARCHIVE]"
    )
    command.add_argument("archive", nargs="?", help="with --link, the one that LINK names if none")
    command.add_argument("--full", action="store_true", help="read every byte, for checksums")
    command.add_argument("--link", metavar="LINK", help="whether this .onnx fits the archive, too")


def _check(arguments: argparse.Namespace) -> int:
    archive, link = arguments.archive, arguments.link
    if archive is None and link is None:
        raise ValueError("check takes an ARCHIVE, or --link LINK")
    result: list[dict[str, Any]] = []
    lines = []
    checked = archive if archive is not None else linked_archive(link)
    if checked is not None and (archive is not None or os.path.exists(checked)):
        with progress_bar("check") as progress:
            findings = onnxarchive.check(checked, full=arguments.full, progress=progress)
        result = [
            {
                "rule": finding.rule,
                "severity": finding.severity,
                "entry": finding.entry,
                "message": finding.message,
            }
            for finding in findings
        ]
        lines = [printable(f"{finding.severity}: {finding}") for finding in findings]
        if not findings:
            passed = [rule for rule in rules().values() if arguments.full or rule.seen != "data"]
            lines = [f"{printable(checked)}: keeps all {len(passed)} rules that were checked"]
    if link is not None and not result:
        misfits = onnxarchive.check_link(link, archive)
        result = [
            {
                "rule": None,
                "severity": "error",
                "entry": None,
                "tensor": misfit.tensor,
                "message": misfit.message,
            }
            for misfit in misfits
        ]
        lines += [printable(f"error: {link}: {misfit}") for misfit in misfits]
        if not misfits:
            lines.append(f"{printable(link)}: fits it")
    say(arguments, result, "\n".join(lines))
    return FOUND if result else DONE


def _add_extract(commands: Any) -> None:
    command = add_command(
        commands, "extract", _extract, "Unzip an archive to a directory that ONNX tools read."
    )
    command.add_argument("archive")
    command.add_argument("directory", help="the directory to make")


def _extract(arguments: argparse.Namespace) -> int:
    with progress_bar("extract") as progress:
        onnxarchive.extract(arguments.archive, arguments.directory, progress=progress)
    model = os.path.join(arguments.directory, MODEL_PROTO)
    say(arguments, {"model": model}, f"{printable(model)}: the model, its tensors beside it")
    return DONE
