"""The commands that list, describe and check archives."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
from typing import Any

import onnxarchive
from onnxarchive.archive.reading import Archive
from onnxarchive.cli.frame import DONE, FOUND, fail, say, status_of
from onnxarchive.cli.progress import progress_bar
from onnxarchive.cli.table import count, printable, shape, size, table
from onnxarchive.errors import ArchiveError
from onnxarchive.model import dtypes, proto, tensors
from onnxarchive.model.keys import ASSET_PREFIX, MODEL_PROTO
from onnxarchive.model.tensors import text
from onnxarchive.zipformat.entries import Entry
from onnxarchive.zipformat.layout import Placement


def ls_command(arguments: argparse.Namespace) -> int:
    """Runs `ls`."""
    listed: list[dict[str, Any]] = []
    with onnxarchive.open(arguments.archive) as archive:
        for key, ref in archive._refs.items():
            described = {
                "name": ref.name,
                "key": key,
                "data_type": dtypes.BY_NUMBER[ref.tensor.data_type].name,
                "dims": list(ref.tensor.dims),
            }
            listed.append(described | _place(archive.entries[key]))
        others = [
            {"name": entry.name, **_place(entry)}
            for entry in archive.entries.values()
            if entry.name == MODEL_PROTO or entry.name.startswith(ASSET_PREFIX)
        ]
        totals = {
            "tensors": len(listed),
            "in_model": sum(1 for _ in tensors.walk(archive.model)) - len(listed),
            "assets": len(archive.assets),
            "weights": sum(item["nbytes"] for item in listed),
            "nbytes": os.path.getsize(arguments.archive),
        }
    listed.sort(key=lambda item: item["data_offset"])
    rows = [
        [*list(it.values())[:3], shape(it["dims"]), it["nbytes"], it["data_offset"]]
        for it in listed
    ]
    rows += [["", it["name"], "", "", it["nbytes"], it["data_offset"]] for it in others]
    lines = table(["name", "key", "data type", "shape", "bytes", "offset"], rows)
    summary = (
        f"{count(totals['tensors'], 'tensor')} of {size(totals['weights'])}, "
        f"{totals['in_model']:,} more in the model, {count(totals['assets'], 'asset')}; "
        f"archive of {size(totals['nbytes'])}"
    )
    result = {"path": arguments.archive, "tensors": listed, "others": others, "totals": totals}
    say(arguments, result, f"{lines}\n\n{summary}")
    return DONE


def _place(entry: Entry) -> dict[str, int]:
    return {"nbytes": entry.nbytes, "data_offset": entry.data_offset, "crc32": entry.crc32}


def info_command(arguments: argparse.Namespace) -> int:
    """Runs `info`."""
    from onnxarchive.model.wording import describe

    with onnxarchive.open(arguments.archive) as archive:
        model = archive.model
        version = model.producer_version
        initializers = [ref.tensor for ref in tensors.walk(model) if ref.is_initializer]
        result: dict[str, Any] = {
            "path": arguments.archive,
            "producer": " ".join(filter(None, map(text, (model.producer_name, version)))),
            "ir_version": model.ir_version,
            "opsets": {
                text(opset.domain) or "ai.onnx": opset.version for opset in model.opset_import
            },
            "graph": text(model.graph.name),
            "nodes": len(model.graph.node),
            "inputs": {text(value.name): describe(value) for value in model.graph.input},
            "outputs": {text(value.name): describe(value) for value in model.graph.output},
            "parameters": sum(math.prod(tensor.dims) for tensor in initializers),
            "bytes": _bytes(archive, os.path.getsize(arguments.archive)),
            "metadata": proto.metadata(model),
        }
    lines = []
    for label, value in result.items():
        if label == "bytes":
            lines += [f"{part:<12}{size(nbytes)}" for part, nbytes in value.items()]
        elif isinstance(value, dict):
            for row, item in enumerate(value.items()):
                lines.append(f"{label if not row else '':<12}{printable('{}: {}'.format(*item))}")
        elif value:
            shown = f"{value:,}" if isinstance(value, int) else printable(value)
            lines.append(f"{label:<12}{shown}")
    say(arguments, result, "\n".join(lines))
    return DONE


def _bytes(archive: Archive, nbytes: int) -> dict[str, int]:
    """The bytes of an archive by use."""
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


def check_command(arguments: argparse.Namespace) -> int:
    """Runs `check`."""
    archives, link = arguments.archives, arguments.link
    if len(archives) > 1 and link is not None:
        raise ValueError("check takes only one ARCHIVE with --link")
    if not (archives or link):
        raise ValueError("check takes an ARCHIVE, or --link LINK")
    result: list[dict[str, Any]] = []
    lines: list[str] = []
    status = DONE
    for archive in archives or _linked(link):
        try:
            with progress_bar("check") as progress:
                findings = onnxarchive.check(
                    archive, full=arguments.full, progress=progress, jobs=arguments.jobs
                )
        except (ArchiveError, OSError) as error:  # the other archives are checked
            status = max(status, fail(error, status_of(type(error))))
            continue
        result += [{"archive": archive, **dataclasses.asdict(finding)} for finding in findings]
        lines += [f"{archive}: {it}" for it in findings or (_passed(arguments.full),)]
    if link is not None and not result and status == DONE:
        findings = onnxarchive.check_link(link, *archives)
        result = [{"link": link, **dataclasses.asdict(finding)} for finding in findings]
        lines += [f"{link}: {it}" for it in findings or ("fits the archive",)]
    if lines:
        say(arguments, result, "\n".join(map(printable, lines)))
    return max(status, FOUND if result else DONE)


def _linked(link: str) -> list[str]:
    """The archive of a link; nothing if it is missing, which the check of the link reports."""
    from onnxarchive.interop.link_checks import linked_archive

    archive = linked_archive(link)
    return [archive] if archive is not None and os.path.exists(archive) else []


def _passed(full: bool) -> str:
    from onnxarchive.archive.rules import rules

    checked = [rule for rule in rules().values() if full or rule.seen != "data"]
    unread = "" if full else "; weights not read, --full reads them"
    return f"valid ({len(checked)} rules checked{unread})"
