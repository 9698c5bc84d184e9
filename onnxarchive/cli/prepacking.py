"""The command that stores packed weights, and how commands describe them."""

from __future__ import annotations

import argparse
from typing import Any

import onnxarchive
from onnxarchive.cli.frame import DONE, say
from onnxarchive.cli.terminal import cut, printable, progress_bar, size
from onnxarchive.interop.ort_options import compares_packed, machine
from onnxarchive.interop.prepacking import remove_prepacked
from onnxarchive.reading.archive import Archive
from onnxarchive.reading.linked_models import packed_sets


def prepack_command(arguments: argparse.Namespace) -> int:
    """Runs `prepack`."""
    path = arguments.archive
    options = {"copy": arguments.copy, "timeout": arguments.timeout}
    if arguments.remove and arguments.model is not None:
        raise ValueError("expected --remove, for all models, or --model, found both")
    with progress_bar("prepack") as progress:
        if arguments.remove:
            remove_prepacked(path, progress=progress, **options)
        else:
            onnxarchive.prepack(path, model=arguments.model, progress=progress, **options)
    with onnxarchive.open(path) as archive:
        sets = described_sets(archive)
    lines = [f"{printable(path)}: {line}" for it in sets for line in set_lines(it)]
    say(arguments, {"path": path, "packed": sets}, lines or f"{printable(path)}: no packed weights")
    return DONE


def described_sets(archive: Archive) -> list[dict[str, Any]]:
    """The sets of packed weights in an archive, as dicts for JSON."""
    return [
        {
            "onnxruntime": it.onnxruntime,
            "machine": it.machine,
            "weights": sum(map(len, it.weights.values())),
            "nbytes": sum(it.files.values()),
            "unpacked": {id: list(names) for id, names in it.unpacked.items()},
            "is_usable": it.machine == machine() and _has_onnxruntime(),
        }
        for it in packed_sets(archive)
    ]


def set_lines(described: dict[str, Any]) -> list[str]:
    """A described set as lines of text."""
    usable = "" if described["is_usable"] else ", not usable here"
    lines = [
        f"{described['weights']:,} packed weights, {size(described['nbytes'])}, of ONNX Runtime "
        f"{printable(described['onnxruntime'])} on {printable(described['machine'])}{usable}"
    ]
    for identifier, names in described["unpacked"].items():
        if names:
            model = f" of the model {identifier!r}" if identifier else ""
            lines.append(cut(f"{len(names):,} not packed{model}: {', '.join(names)}"))
    return lines


def _has_onnxruntime() -> bool:
    try:
        return compares_packed()
    except (ImportError, onnxarchive.UnsupportedFeatureError):
        return False
