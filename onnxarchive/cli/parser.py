"""What the command line takes.

The module that carries a command out is imported when the command is called, and not to tell what
commands there are.
"""

from __future__ import annotations

import argparse
from typing import Any, Final

import onnxarchive
from onnxarchive.cli.frame import add_command, add_force
from onnxarchive.model.threshold import DEFAULT_SIZE_THRESHOLD
from onnxarchive.zipformat import layout

WORDS: Final = ("doc_string", "producer_name", "producer_version", "domain")
"""Fields of a model that `set-metadata` sets."""


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
    _add_replace_model(commands)
    _add_set_metadata(commands)
    _add_rename(commands)
    _add_recover(commands)
    _add_diff(commands)
    _add_run(commands)
    _add_view(commands)
    return top


def _add_convert(commands: Any) -> None:
    command = add_command(
        commands,
        "convert",
        "converting.convert_command",
        "Convert a model to an archive: a .onnx, a directory, a zip of any tool, an archive.",
    )
    command.usage = (
        "onnxarchive convert [options] SOURCE TARGET [--jobs N]\n"
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
        "--jobs",
        type=int,
        metavar="N",
        help="use N threads (default one for each core); with --output-dir, convert N models at "
        "once (default 1), each with its share of the cores",
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


def _add_export(commands: Any) -> None:
    command = add_command(
        commands, "export", "exporting.export_command", "Write an archive's model as a .onnx."
    )
    command.add_argument("archive")
    command.add_argument("target", help="the .onnx to write")
    command.add_argument(
        "--external-data",
        metavar="NAME",
        help="put the large tensors into this file beside it; needed from 2 GiB on",
    )
    add_force(command)


def _add_link(commands: Any) -> None:
    command = add_command(
        commands,
        "link",
        "exporting.link_command",
        "Write a small .onnx whose external data points into an archive, for tools that know none.",
    )
    command.add_argument("archive")
    command.add_argument("target", help="the .onnx to write, in the archive's directory or above")
    add_force(command)


def _add_ls(commands: Any) -> None:
    command = add_command(
        commands, "ls", "listing.ls_command", "List an archive's tensors and assets."
    )
    command.add_argument("archive")


def _add_info(commands: Any) -> None:
    command = add_command(
        commands, "info", "listing.info_command", "Tell what model an archive holds."
    )
    command.add_argument("archive")


def _add_check(commands: Any) -> None:
    command = add_command(
        commands, "check", "listing.check_command", "List every rule that an archive breaks."
    )
    command.usage = (
        "onnxarchive check [--full] [--json] ARCHIVE ...\n"
        "       onnxarchive check [--full] [--json] --link LINK [ARCHIVE]"
    )
    command.add_argument(
        "archives",
        nargs="*",
        metavar="ARCHIVE",
        help="the archives; with --link at most one, or the one that LINK names",
    )
    command.add_argument("--full", action="store_true", help="read every byte, for checksums")
    command.add_argument("--link", metavar="LINK", help="whether this .onnx fits the archive, too")


def _add_extract(commands: Any) -> None:
    command = add_command(
        commands,
        "extract",
        "exporting.extract_command",
        "Unzip an archive to a directory that ONNX tools read.",
    )
    command.add_argument("archive")
    command.add_argument("directory", help="the directory to make")


def _add_replace_model(commands: Any) -> None:
    command = add_command(
        commands,
        "replace-model",
        "editing.replace_model_command",
        "Give an archive another model; weights are neither read nor moved.",
    )
    command.add_argument("archive")
    command.add_argument(
        "model",
        help="a .onnx whose external data is in the archive (a changed link, or the archive's own "
        "__MODEL_PROTO), beside it, or in it",
    )
    command.add_argument(
        "--size-threshold",
        type=int,
        metavar="BYTES",
        help="store tensors of this size or more outside the model (default: as the archive does)",
    )
    _add_common(command)


def _add_set_metadata(commands: Any) -> None:
    command = add_command(
        commands,
        "set-metadata",
        "editing.set_metadata_command",
        "Set metadata and other words of an archive's model.",
    )
    command.add_argument("archive")
    command.add_argument(
        "pairs", nargs="*", metavar="KEY=VALUE", help="metadata to set, before any option"
    )
    command.add_argument(
        "--remove", action="append", default=[], metavar="KEY", help="metadata to remove"
    )
    for field in WORDS:
        words = field.replace("_", " ")
        command.add_argument(
            f"--{field.replace('_', '-')}", metavar="TEXT", help=f"set the {words}; '' removes it"
        )
    _add_common(command)


def _add_rename(commands: Any) -> None:
    command = add_command(
        commands,
        "rename",
        "editing.rename_command",
        "Give inputs and outputs of an archive's model other names, wherever they are used.",
    )
    command.add_argument("archive")
    for kind in ("input", "output"):
        command.add_argument(
            f"--{kind}",
            action="append",
            default=[],
            metavar="OLD=NEW",
            help=f"the new name of an {kind}",
        )
    _add_common(command)


def _add_recover(commands: Any) -> None:
    command = add_command(
        commands,
        "recover",
        "editing.recover_command",
        "Roll back an edit that a crash interrupted, and remove what killed processes left.",
    )
    command.add_argument("archive")
    _add_timeout(command)


def _add_diff(commands: Any) -> None:
    command = add_command(
        commands,
        "diff",
        "comparing.diff_command",
        "Compare graphs, tensors and assets of two archives, weights by their CRC-32.",
    )
    command.add_argument("archive")
    command.add_argument("other")
    command.add_argument(
        "--full", action="store_true", help="compare the bytes of equal CRC-32s, too"
    )
    command.add_argument(
        "--stack-traces",
        action="store_true",
        help="compare stack traces in the metadata of nodes, too",
    )


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--compact",
        action="store_true",
        help="write the whole archive as convert does, without tensors that the model lacks",
    )
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


def _add_run(commands: Any) -> None:
    command = add_command(
        commands,
        "run",
        "running.run_command",
        "Run a model with ONNX Runtime, and print inputs, outputs, time and growth of memory.",
    )
    command.add_argument("model", help="an archive or a .onnx")
    command.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="NAME=FILE.npy",
        help="an input (.npz for a sequence); inputs that are not given are random",
    )
    command.add_argument(
        "--dim",
        action="append",
        default=[],
        metavar="NAME=SIZE",
        help="the size of an open dimension (default 1)",
    )
    command.add_argument(
        "--provider",
        action="append",
        metavar="NAME",
        help="an execution provider, such as cpu or cuda; several in order of preference",
    )
    command.add_argument(
        "--repeat",
        type=int,
        default=1,
        metavar="N",
        help="run the model N times and print the median time (default %(default)s)",
    )
    command.add_argument(
        "--output", metavar="DIR", help="save the outputs as .npy files in a new directory"
    )
    command.add_argument(
        "--compare",
        metavar="OTHER",
        help="run another model on the same inputs, too; status 1 if an output differs",
    )
    command.add_argument(
        "--atol",
        type=float,
        default=0.0,
        metavar="X",
        help="absolute tolerance of --compare (default 0: every bit is equal)",
    )
    command.add_argument(
        "--rtol",
        type=float,
        default=0.0,
        metavar="X",
        help="relative tolerance, a factor of OTHER's number that is added to --atol (default 0)",
    )


def _add_view(commands: Any) -> None:
    command = add_command(
        commands,
        "view",
        "viewing.view_command",
        "Show an archive's graph and weights in a browser, with Netron.",
    )
    command.add_argument("archive")
    command.add_argument(
        "--port", type=int, default=0, metavar="N", help="the port to serve at (default: any free)"
    )
    command.add_argument(
        "--no-browser", action="store_true", help="print the address, and start no browser"
    )
