"""The commands that look at an archive: its entries, its model, the rules that it keeps."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
from typing import Any

import onnxarchive
from onnxarchive.archive.reading import Archive
from onnxarchive.cli.frame import DONE, FOUND, say
from onnxarchive.cli.progress import progress_bar
from onnxarchive.cli.table import count, printable, shape, size, table
from onnxarchive.model import dtypes, proto, tensors
from onnxarchive.model.keys import ASSET_PREFIX, MODEL_PROTO
from onnxarchive.model.tensors import text
from onnxarchive.zipformat.layout import Placement


def ls_command(arguments: argparse.Namespace) -> int:
    """Runs `ls`."""
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
    for key, ref in archive._refs.items():
        entry = archive.entries[key]
        listed.append(
            {
                "name": ref.name,
                "key": key,
                "data_type": dtypes.BY_NUMBER[ref.tensor.data_type].name,
                "dims": list(ref.tensor.dims),
                "nbytes": entry.nbytes,
                "data_offset": entry.data_offset,
                "crc32": entry.crc32,
            }
        )
    return sorted(listed, key=lambda item: item["data_offset"])


def _counts(archive: Archive) -> dict[str, int]:
    return {
        "tensors": len(archive._refs),
        "in_model": sum(1 for _ in tensors.walk(archive.model)) - len(archive._refs),
        "assets": len(archive.assets),
    }


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
            described = [printable(f"{name}: {what}") for name, what in value.items()]
            lines += [f"{label if not row else '':<12}{line}" for row, line in enumerate(described)]
        elif value:
            lines.append(f"{label:<12}{value:,}" if isinstance(value, int) else _line(label, value))
    say(arguments, result, "\n".join(lines))
    return DONE


def _line(label: str, value: str) -> str:
    return f"{label:<12}{printable(value)}"


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


def check_command(arguments: argparse.Namespace) -> int:
    """Runs `check`."""
    archives: list[str] = arguments.archives
    link = arguments.link
    if len(archives) > 1 and link is not None:
        raise ValueError("check takes several ARCHIVEs, or --link LINK and one at most")
    if not (archives or link):
        raise ValueError("check takes an ARCHIVE, or --link LINK")
    result: list[dict[str, Any]] = []
    lines: list[str] = []
    for archive in archives or _linked(link):
        with progress_bar("check") as progress:
            findings = onnxarchive.check(archive, full=arguments.full, progress=progress)
        result += [{"archive": archive, **dataclasses.asdict(finding)} for finding in findings]
        lines += [f"{archive}: {finding}" for finding in findings]
        if not findings:
            lines.append(f"{archive}: {_passed(arguments.full)}")
    if link is not None and not result:
        findings = onnxarchive.check_link(link, *archives)
        result = [{"link": link, **dataclasses.asdict(finding)} for finding in findings]
        lines += [f"{link}: {finding}" for finding in findings]
        if not findings:
            lines.append(f"{link}: fits it")
    say(arguments, result, "\n".join(map(printable, lines)))
    return FOUND if result else DONE


def _linked(link: str) -> list[str]:
    """The archive that a link names, if it is there; otherwise the link's own check says so."""
    from onnxarchive.interop.link_checks import linked_archive

    archive = linked_archive(link)
    return [archive] if archive is not None and os.path.exists(archive) else []


def _passed(full: bool) -> str:
    from onnxarchive.archive.rules import rules

    passed = [rule for rule in rules().values() if full or rule.seen != "data"]
    unread = "" if full else "; weights were not read (--full)"
    return f"keeps all {len(passed)} rules that were checked{unread}"
