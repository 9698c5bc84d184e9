"""The arguments of the command line.

The module of a command is imported when the command is called. Help needs no such module.
"""

from __future__ import annotations

import argparse
from typing import Any, Final

import onnxarchive
from onnxarchive.cli.command_parser import CommandParser
from onnxarchive.cli.examples import add_examples
from onnxarchive.model.threshold import DEFAULT_SIZE_THRESHOLD
from onnxarchive.storage import locking
from onnxarchive.zipformat import layout

WORDS: Final = ("doc_string", "producer_name", "producer_version", "domain")
"""Fields of a model that `set-metadata` sets."""
ASSET: Final = "[NAME=]PATH"
_ASSET_HELP = (
    "a file; a directory, with all files below it except hidden ones; or a quoted pattern such as "
    "'llm/*.json' (** matches folders). In the archive, NAME replaces the name of the file or the "
    "directory; with a pattern, NAME is the folder of the assets. Links to files are followed"
)

# Commands with the options of `_add_remote`.
_TAKES_URLS: Final = (
    *("cat", "check", "convert", "diff", "export", "extract", "info", "link", "ls", "models"),
    *("run", "view"),
)


def parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser of the command line.

    Args:
        command: The only command to add, to save time; None or an unknown name adds all.
    """
    top = argparse.ArgumentParser(
        prog="onnxarchive",
        description="Work with ONNX archives: zip files whose weights are mapped into memory.",
        epilog="Exit status: 0 success; 1 'check' found faults, or 'diff' found differences; "
        "2 wrong use, a system error or a missing library; 3 a corrupt or unsafe file; 129 the "
        "terminal was closed; 130 interrupted; 141 the program that reads binary output ended "
        "early; 143 terminated. With several files, the highest status counts.",
    )
    top.add_argument("--version", action="version", version=onnxarchive.__version__)
    commands = top.add_subparsers(required=True, metavar="COMMAND", parser_class=CommandParser)
    for add in [_COMMANDS[command]] if command in _COMMANDS else _COMMANDS.values():
        add(commands)
    for name in _TAKES_URLS:
        if name in commands.choices:
            _add_remote(commands.choices[name])
    add_examples(commands)
    return top


def _add(
    commands: Any, name: str, module: str, help: str, *, archive: bool = True, json: bool = True
) -> argparse.ArgumentParser:
    """Adds a command.

    Args:
        commands: The subparsers to which the command is added.
        name: Name of the command.
        module: The module in `onnxarchive.cli` with the command's function.
        help: A sentence for the help.
        archive: Whether the first argument is an archive.
        json: Whether to add the option `--json`.
    """
    command: argparse.ArgumentParser = commands.add_parser(name, help=help, description=help)
    command.set_defaults(module=module, function=f"{name.replace('-', '_')}_command")
    if json:
        _add_flag(command, "--json", "print the result as JSON")
    _add_flag(command, "--debug", "print the traceback of an error, for bug reports")
    if archive:
        command.add_argument("archive", type=_file, metavar="ARCHIVE")
    return command


def _add_flag(command: argparse.ArgumentParser, name: str, help: str) -> None:
    command.add_argument(name, action="store_true", help=help)


def _add_model(command: argparse.ArgumentParser, action: str, *, default: str | None = "") -> None:
    command.add_argument(
        "--model",
        default=default,
        metavar="ID",
        help=f"{action}; 'onnxarchive models' lists the ids",
    )


def _add_remote(command: argparse.ArgumentParser) -> None:
    """Adds the options for URLs, which `frame.access` reads."""
    group = command.add_argument_group("URLs (https://, s3://, gs://, az://, hf://, ...)")
    group.add_argument(
        "--cache",
        action="store_true",
        help="use the copy in the user's cache (run and link download it)",
    )
    group.add_argument("--cache-dir", metavar="DIR", help="a directory for copies instead")
    _add_storage_option(group)


def _add_storage_option(command: argparse._ActionsContainer) -> None:
    command.add_argument(
        "--storage-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option for obstore or fsspec, such as region=eu-west-1; put credentials in the "
        "environment, where other users cannot see them",
    )


def _add_force(command: argparse.ArgumentParser) -> None:
    _add_flag(command, "--force", "replace files that exist")


def _add_jobs(command: argparse.ArgumentParser) -> None:
    command.add_argument("--jobs", type=_positive, metavar="N", help="use N cores (default: all)")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number of 1 or more, found {number}")
    return number


def _file(text: str) -> str:
    if text == "-":
        raise argparse.ArgumentTypeError("cannot read standard input: save it to a file")
    return text


def _add_ls(commands: Any) -> None:
    _add_model(
        _add(commands, "ls", "listing", "List the tensors and assets of an archive."),
        "list the tensors of this model only",
        default=None,
    )


def _add_info(commands: Any) -> None:
    _add_model(
        _add(commands, "info", "listing", "Describe a model in an archive."), "describe this model"
    )


def _add_models(commands: Any) -> None:
    _add(
        commands,
        "models",
        "listing",
        "List the models in an archive with inputs, outputs, parameters and bytes of weights.",
    )


def _add_convert(commands: Any) -> None:
    command = _add(
        commands,
        "convert",
        "converting",
        "Convert models (.onnx files, directories, zips of any tool, archives) to archives.",
        archive=False,
    )
    command.usage = (
        "onnxarchive convert [options] SOURCE TARGET\n"
        "       onnxarchive convert [options] SOURCE... --output-dir DIR"
    )
    command.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="SOURCE and TARGET (- is standard output); with --output-dir, models and directories",
    )
    command.add_argument(
        "--output-dir",
        metavar="DIR",
        help="convert every model in the sources, one at a time, or N at a time with --jobs N; "
        "archives keep the relative paths of the models, below DIR",
    )
    _add_jobs(command)
    command.add_argument(
        "--size-threshold",
        type=int,
        default=DEFAULT_SIZE_THRESHOLD,
        metavar="BYTES",
        help="store initializers of this size or more outside the model (default %(default)s)",
    )
    command.add_argument(
        "--alignment",
        type=int,
        default=layout.MIN_ALIGNMENT,
        metavar="BYTES",
        help="begin the data of every entry at a multiple of BYTES, a power of two from 64 to "
        "32768 (default %(default)s)",
    )
    _add_flag(
        command,
        "--convert-attribute",
        "store all large tensors outside the model, not only initializers",
    )
    _add_flag(
        command,
        "--assets",
        "add other files of the model's directory or zip, such as tokenizer.json, as assets, "
        "except hidden files, models and weights",
    )
    command.add_argument(
        "--asset",
        nargs="+",
        action="extend",
        default=[],
        metavar=ASSET,
        help=f"add assets (give the option after the paths): {_ASSET_HELP}",
    )
    command.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="ID=PATH",
        help="add another model, such as decoder=decoder.onnx; equal tensors of the models are "
        "stored once",
    )
    _add_flag(
        command, "--verify-checksum", "compare data files with the SHA-1 checksums in the model"
    )
    command.add_argument(
        "--follow-links",
        nargs="?",
        const=True,
        default=False,
        metavar="DIRECTORY",
        help="follow symbolic links in a source if they lead to files below DIRECTORY (without "
        "DIRECTORY: within the model's folder of a Hugging Face cache)",
    )
    _add_flag(command, "--dry-run", "report the outcome, but write no archive")
    _add_flag(command, "--skip-existing", "with --output-dir: skip models whose archive exists")
    _add_force(command)


def _add_export(commands: Any) -> None:
    command = _add(commands, "export", "exporting", "Write a model of an archive as a .onnx.")
    command.add_argument("target", metavar="TARGET", help="the .onnx to write")
    command.add_argument(
        "--external-data",
        metavar="NAME",
        help="write large tensors to this file beside the .onnx; needed from 2 GiB on",
    )
    _add_model(command, "write this model")
    _add_force(command)


def _add_link(commands: Any) -> None:
    command = _add(
        commands,
        "link",
        "exporting",
        "Write a small .onnx that uses an archive as its external data, for other tools.",
    )
    command.add_argument(
        "target", metavar="TARGET", help="the .onnx to write, in the archive's directory or above"
    )
    _add_model(command, "link this model")
    _add_force(command)


def _add_extract(commands: Any) -> None:
    command = _add(
        commands, "extract", "exporting", "Unzip an archive to a directory of ONNX external data."
    )
    command.add_argument("directory", metavar="DIRECTORY", help="a new or an empty directory")


def _add_check(commands: Any) -> None:
    command = _add(
        commands,
        "check",
        "checking",
        "Check archives against the specification, and list broken rules.",
        archive=False,
    )
    command.usage = (
        "onnxarchive check [options] ARCHIVE...\n"
        "       onnxarchive check [options] --link LINK [ARCHIVE]"
    )
    command.add_argument(
        "archives",
        type=_file,
        nargs="*",
        metavar="ARCHIVE",
        help="an archive; with --link, the link's archive",
    )
    _add_flag(command, "--full", "read every byte and compare checksums")
    command.add_argument(
        "--link", type=_file, metavar="LINK", help="check that this link fits its archive"
    )
    _add_jobs(command)


def _add_diff(commands: Any) -> None:
    command = _add(
        commands,
        "diff",
        "comparing",
        "Compare the graphs, tensors and assets of two archives (weights by CRC-32).",
    )
    command.add_argument("other", type=_file, metavar="OTHER")
    _add_model(command, "compare this model only", default=None)
    _add_flag(command, "--full", "also compare bytes, not only the CRC-32s of tensors and assets")
    _add_flag(command, "--stack-traces", "also compare the stack traces in the metadata of nodes")


def _add_replace_model(commands: Any) -> None:
    command = _add(
        commands,
        "replace-model",
        "editing",
        "Replace or add a model; the weights stay in place, unless --compact or --copy is given.",
    )
    command.add_argument(
        "model",
        type=_file,
        metavar="MODEL",
        help="a .onnx, such as an edited link or a __MODEL_PROTO that was extracted and edited; "
        "its external data may be in the archive or in other files",
    )
    command.add_argument(
        "--name",
        default="",
        metavar="ID",
        help="the id of the model to replace; an unknown id adds a model",
    )
    command.add_argument(
        "--size-threshold",
        type=int,
        metavar="BYTES",
        help="store initializers of this size or more outside the model (default: as in the "
        "archive)",
    )
    _add_edit_options(command)


def _add_remove_model(commands: Any) -> None:
    command = _add(
        commands,
        "remove-model",
        "editing",
        "Remove a model; the weights stay in place unless --compact or --copy is given.",
    )
    command.add_argument("id", metavar="ID", help="the id of the model")
    _add_edit_options(command)


def _add_rename_model(commands: Any) -> None:
    command = _add(commands, "rename-model", "editing", "Give a model of an archive another id.")
    command.add_argument("old", metavar="OLD", help="the id of the model")
    command.add_argument("new", metavar="NEW", help="the new id: [a-z][a-z0-9_]*")
    _add_copy(command)
    _add_timeout(command)


def _add_assets(commands: Any) -> None:
    help = "List, add, remove or print the assets of an archive."
    assets = commands.add_parser("assets", help=help, description=help)
    actions = assets.add_subparsers(required=True, metavar="ACTION")
    _add(actions, "ls", "assets", "List the assets.")
    command = _add(actions, "add", "assets", "Add files, or replace assets of the same names.")
    command.add_argument("assets", nargs="+", metavar=ASSET, help=_ASSET_HELP)
    _add_copy(command)
    _add_timeout(command)
    command = _add(actions, "rm", "assets", "Remove assets.")
    command.add_argument("names", nargs="+", metavar="NAME", help="the name of an asset")
    _add_copy(command)
    _add_timeout(command)
    command = _add(actions, "cat", "assets", "Write an asset to standard output.", json=False)
    command.add_argument("name", metavar="NAME", help="the name of the asset")


def _add_set_metadata(commands: Any) -> None:
    command = _add(
        commands,
        "set-metadata",
        "editing",
        "Set metadata, doc string, producer and domain of a model in an archive.",
    )
    command.add_argument("pairs", nargs="*", metavar="KEY=VALUE", help="metadata to set")
    command.add_argument(
        "--remove", action="append", default=[], metavar="KEY", help="metadata to remove"
    )
    for field in WORDS:
        option, words = field.replace("_", "-"), field.replace("_", " ")
        command.add_argument(f"--{option}", metavar="TEXT", help=f"set the {words}; '' removes it")
    _add_model(command, "change this model")
    _add_edit_options(command)


def _add_recover(commands: Any) -> None:
    command = _add(
        commands,
        "recover",
        "editing",
        "Roll back an interrupted edit, and remove temporary files of killed processes.",
    )
    _add_timeout(command)


def _add_edit_options(command: argparse.ArgumentParser) -> None:
    _add_flag(
        command,
        "--compact",
        "rewrite the whole archive, without tensors that no model uses",
    )
    _add_copy(command)
    _add_timeout(command)


def _add_copy(command: argparse.ArgumentParser) -> None:
    _add_flag(
        command,
        "--copy",
        "write a new file; needed if ARCHIVE is a symbolic link or has further hard links",
    )


def _add_timeout(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        default=locking.TIMEOUT,
        help="wait at most this long while other processes open or edit the archive (default: "
        "%(default)s; inf: without limit)",
    )


def _add_run(commands: Any) -> None:
    command = _add(
        commands,
        "run",
        "running",
        "Run a model with ONNX Runtime, and print inputs, outputs, time and memory growth.",
        archive=False,
    )
    command.add_argument("path", type=_file, metavar="MODEL", help="an archive or a .onnx")
    _add_model(command, "run this model of the archive")
    command.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="NAME=FILE.npy",
        help="an input (.npz for a sequence); other inputs are random",
    )
    command.add_argument(
        "--dim",
        action="append",
        default=[],
        metavar="NAME=SIZE",
        help="the size of a dimension that the model leaves open (default 1); NAME is x[0] for an "
        "unnamed first dimension of the input x",
    )
    command.add_argument(
        "--provider",
        action="append",
        metavar="NAME",
        help="an execution provider, such as cpu or cuda; repeat --provider in order of preference",
    )
    command.add_argument(
        "--repeat",
        type=int,
        default=1,
        metavar="N",
        help="run the model N times and print the median time (default %(default)s)",
    )
    _add_flag(
        command, "--no-prepack", "make no packed copies of weights, so that memory stays small"
    )
    command.add_argument(
        "--output",
        metavar="DIR",
        help="save the outputs as .npy files in a new directory, which --input reads; types that "
        "numpy lacks, such as BFLOAT16, as raw bytes: np.load(PATH).view(ml_dtypes.bfloat16)",
    )


def _add_view(commands: Any) -> None:
    command = _add(
        commands,
        "view",
        "viewing",
        "Show the graph and the weights of an archive in a browser, with Netron.",
    )
    command.add_argument(
        "--port", type=int, default=0, metavar="N", help="the server's port (default: any free)"
    )
    _add_model(command, "show this model")
    _add_flag(command, "--no-browser", "print the address without starting a browser")


def _add_cache(commands: Any) -> None:
    help = "List or clear the cache of remote archives."
    cache = commands.add_parser("cache", help=help, description=help)
    actions = cache.add_subparsers(required=True, metavar="ACTION")
    help = "List the archives in the cache, most recently used first."
    ls = _add(actions, "ls", "caching", help, archive=False)
    help = "Remove archives from the cache; programs that use them are not affected."
    clear = _add(actions, "clear", "caching", help, archive=False)
    clear.add_argument("urls", nargs="*", metavar="URL", help="remove only these archives")
    for command in (ls, clear):
        command.add_argument(
            "--directory",
            default=True,
            metavar="DIR",
            help="the directory of the cache (default: the user's cache)",
        )


def _add_download(commands: Any) -> None:
    command = _add(
        commands,
        "download",
        "downloading",
        "Download a remote archive and verify it; resume an interrupted download.",
        archive=False,
    )
    command.add_argument("url", metavar="URL")
    command.add_argument(
        "path", nargs="?", metavar="PATH", help="the file (default: the URL's last part)"
    )
    _add_force(command)
    _add_storage_option(command)


def _add_cat(commands: Any) -> None:
    help = "Write a tensor (as .npy) or an asset to standard output."
    command = _add(commands, "cat", "downloading", help, json=False)
    command.add_argument(
        "name",
        metavar="NAME",
        help="the tensor, or the path of the asset; a type that numpy lacks, such as BFLOAT16, is "
        "written as raw bytes: np.load(PATH).view(ml_dtypes.bfloat16)",
    )
    _add_model(command, "write the tensor of this model")


def _add_completion(commands: Any) -> None:
    help = "Print a shell script that completes commands, options and files."
    command = _add(commands, "completion", "completing", help, archive=False)
    command.add_argument("shell", choices=["bash", "zsh", "fish", "tcsh"], help="the shell")


_COMMANDS: Final = {
    "convert": _add_convert,
    "export": _add_export,
    "link": _add_link,
    "extract": _add_extract,
    "ls": _add_ls,
    "info": _add_info,
    "models": _add_models,
    "check": _add_check,
    "diff": _add_diff,
    "replace-model": _add_replace_model,
    "remove-model": _add_remove_model,
    "rename-model": _add_rename_model,
    "assets": _add_assets,
    "set-metadata": _add_set_metadata,
    "recover": _add_recover,
    "run": _add_run,
    "view": _add_view,
    "download": _add_download,
    "cat": _add_cat,
    "cache": _add_cache,
    "completion": _add_completion,
}
