"""The command that stores packed weights, and how commands describe them."""

from __future__ import annotations

import argparse
from typing import Any

import onnxarchive
from onnxarchive.cli.output import say
from onnxarchive.cli.parser import add_arguments, add_command, add_copy, add_model
from onnxarchive.cli.terminal import count, cut, printable, progress_bar, size
from onnxarchive.reading.archive import Archive


def add_prepack(commands: Any) -> None:
    help = (
        "Store the weights as ONNX Runtime packs them, so that sessions run fast and share memory."
    )
    command = add_command(commands, prepack, help, "model.onnxa")
    add_model(command, "pack the weights of this model alone", default=None)
    add_arguments(command, {"--remove": "remove all packed weights instead"})
    add_copy(command)


def prepack(arguments: argparse.Namespace) -> None:
    from onnxarchive.interop.prepacking import remove_prepacked

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
    lines = [f"{printable(path)}: {line}" for described in sets for line in set_lines(described)]
    say(arguments, {"path": path, "packed": sets}, lines or f"{printable(path)}: no packed weights")


def described_sets(archive: Archive) -> list[dict[str, Any]]:
    """The sets of packed weights in an archive, as dicts for JSON.

    Only weights are counted that have the same bytes as when they were packed.
    """
    from onnxarchive.interop.ort_options import machine
    from onnxarchive.reading.linked_models import packed_sets

    present = {
        (id, ref.name, archive.entries[key].nbytes, archive.entries[key].crc32)
        for id, model in archive.contents.models.items()
        for key, ref in model.refs.items()
    }
    return [
        {
            "onnxruntime": packed.onnxruntime,
            "machine": packed.machine,
            "weights": sum(
                (id, name, weight.nbytes, weight.crc32) in present
                for id, weights in packed.weights.items()
                for name, weight in weights.items()
            ),
            "nbytes": sum(packed.files.values()),
            "unpacked": {id: list(names) for id, names in packed.unpacked.items()},
            "is_usable": packed.machine == machine() and _compares_packed(),
        }
        for packed in packed_sets(archive)
    ]


def set_lines(described: dict[str, Any]) -> list[str]:
    """A described set as lines of text."""
    usable = "" if described["is_usable"] else ", not usable here"
    lines = [
        f"{count(described['weights'], 'packed weight')}, {size(described['nbytes'])}, "
        f"of ONNX Runtime {printable(described['onnxruntime'])} "
        f"on {printable(described['machine'])}{usable}"
    ]
    for identifier, names in described["unpacked"].items():
        if names:
            model = f" of the model {identifier!r}" if identifier else ""
            lines.append(cut(f"{len(names):,} not packed{model}: {', '.join(names)}"))
    return lines


def _compares_packed() -> bool:
    """Whether there is an ONNX Runtime that compares packed weights before it uses them."""
    from onnxarchive.interop.ort_options import compares_packed

    try:
        return compares_packed()
    except (ImportError, onnxarchive.UnsupportedFeatureError):
        return False
