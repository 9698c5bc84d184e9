"""The arguments of the command line.

The module of a command is imported when the command is called. Help needs no such module.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, Final

import onnxarchive
from onnxarchive.cli.frame import DONE, say
from onnxarchive.errors import needing
from onnxarchive.files import locking
from onnxarchive.model import DEFAULT_SIZE_THRESHOLD
from onnxarchive.zipformat import layout

WORDS: Final = ("doc_string", "producer_name", "producer_version", "domain")
"""Fields of a model that `set-metadata` sets."""
ASSET: Final = "[NAME=]PATH"
_ASSET_HELP = (
    "a file; a directory, with all files below it except hidden ones; or a quoted pattern such as "
    "'llm/*.json' (** matches folders). In the archive, NAME replaces the name of the file or the "
    "directory; with a pattern, NAME is the folder of the assets. Links to files are followed"
)

_REPEATED: Final[dict[str, Any]] = {"action": "append", "default": []}
# Commands with the options of `_add_remote`.
_TAKES_URLS: Final = (
    *("cat", "check", "convert", "diff", "export", "extract", "info", "link", "ls", "models"),
    *("run", "view"),
)

EXAMPLES: Final = {
    "convert": "convert model.onnx archive.onnxa",
    "export": "export model.onnxa exported.onnx",
    "link": "link model.onnxa linked.onnx",
    "extract": "extract model.onnxa unzipped",
    "ls": "ls model.onnxa",
    "info": "info model.onnxa --model decoder",
    "models": "models model.onnxa",
    "check": "check --full model.onnxa",
    "diff": "diff model.onnxa other.onnxa",
    "replace-model": "replace-model model.onnxa decoder.onnx --name decoder",
    "remove-model": "remove-model model.onnxa decoder",
    "rename-model": "rename-model model.onnxa decoder encoder",
    "assets": "assets ls model.onnxa",
    "assets ls": "assets ls model.onnxa",
    "assets add": "assets add model.onnxa labels.txt",
    "assets rm": "assets rm model.onnxa labels.txt",
    "assets cat": "assets cat model.onnxa labels.txt",
    "set-metadata": "set-metadata model.onnxa author=Ada",
    "prepack": "prepack model.onnxa",
    "recover": "recover model.onnxa",
    "run": "run model.onnxa --repeat 5",
    "view": "view model.onnxa --model decoder",
    "download": "download https://example.com/model.onnxa",
    "cat": "cat model.onnxa layer.0/weight > weight.npy",
    "cache": "cache ls",
    "cache ls": "cache ls",
    "cache clear": "cache clear https://example.com/model.onnxa",
    "completion": "completion bash > onnxarchive.bash",
}
"""An example for each command, shown at the end of its help."""


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
    commands = top.add_subparsers(required=True, metavar="COMMAND", parser_class=_CommandParser)
    for add in [_COMMANDS[command]] if command in _COMMANDS else _COMMANDS.values():
        add(commands)
    for name in _TAKES_URLS:
        if name in commands.choices:
            _add_remote(commands.choices[name])
    _add_examples(commands)
    return top


class _CommandParser(argparse.ArgumentParser):
    """Parses options between positional arguments: `convert model.onnx --force model.onnxa`."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses arguments; see `argparse.ArgumentParser`."""
        # `parse_known_intermixed_args` refuses subcommands, and forgets "--".
        if self._subparsers is not None or "--" in args:
            return super().parse_known_args(args, namespace)
        # In some versions of Python, `parse_known_intermixed_args` calls `self.parse_known_args`.
        # The attribute that is set here sends this call to the base class.
        self.__dict__["parse_known_args"] = super().parse_known_args
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            del self.__dict__["parse_known_args"]


def _add_examples(commands: Any) -> None:
    """Puts an example at the end of each command's help."""
    for command in commands.choices.values():
        name = command.prog.removeprefix("onnxarchive ")
        command.epilog = f"Example: onnxarchive {EXAMPLES[name]}"
        if command._subparsers is not None:
            _add_examples(command._subparsers._group_actions[0])


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
        _add_arguments(command, {"--json": "print the result as JSON"})
    _add_arguments(command, {"--debug": "print the traceback of an error, for bug reports"})
    if archive:
        command.add_argument("archive", type=_file, metavar="ARCHIVE")
    return command


def _add_arguments(
    command: argparse._ActionsContainer, arguments: Mapping[str, str], **options: Any
) -> None:
    """Adds arguments.

    Args:
        command: The command, or a group of its arguments.
        arguments: Help texts, by the argument and its value as in `--jobs N`. An option without a
            value is a flag.
        options: Options of argparse for all these arguments.
    """
    for argument, help in arguments.items():
        name, _, value = argument.partition(" ")
        kind = {"metavar": value} if value else {"action": "store_true"}
        command.add_argument(name, help=help, **kind, **options)  # type: ignore[arg-type]


def _add_model(command: argparse.ArgumentParser, action: str, *, default: str | None = "") -> None:
    help = f"{action}; 'onnxarchive models' lists the ids"
    _add_arguments(command, {"--model ID": help}, default=default)


def _add_remote(command: argparse.ArgumentParser) -> None:
    """Adds the options for URLs, which `frame.access` reads."""
    group = command.add_argument_group("URLs (https://, s3://, gs://, az://, hf://, ...)")
    _add_arguments(
        group,
        {
            "--cache": "use the copy in the user's cache (run and link download it)",
            "--cache-dir DIR": "a directory for copies instead",
        },
    )
    _add_storage_option(group)


def _add_storage_option(command: argparse._ActionsContainer) -> None:
    help = (
        "an option for obstore or fsspec, such as region=eu-west-1, timeout=60 (seconds) or "
        'default_headers=\'{"accept": "*/*"}\'; put credentials in the environment, where other '
        "users cannot see them"
    )
    _add_arguments(command, {"--storage-option KEY=VALUE": help}, **_REPEATED)


def _add_force(command: argparse.ArgumentParser) -> None:
    _add_arguments(command, {"--force": "replace files that exist"})


def _add_jobs(command: argparse.ArgumentParser) -> None:
    _add_arguments(command, {"--jobs N": "use N cores (default: all)"}, type=_positive)


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
    command = _add(commands, "ls", "listing", "List the tensors and assets of an archive.")
    _add_model(command, "list the tensors of this model only", default=None)


def _add_info(commands: Any) -> None:
    command = _add(commands, "info", "listing", "Describe a model in an archive.")
    _add_model(command, "describe this model")


def _add_models(commands: Any) -> None:
    help = "List the models in an archive with inputs, outputs, parameters and bytes of weights."
    _add(commands, "models", "listing", help)


def _add_convert(commands: Any) -> None:
    help = "Convert models (.onnx files, directories, zips of any tool, archives) to archives."
    command = _add(commands, "convert", "converting", help, archive=False)
    command.usage = (
        "onnxarchive convert [options] SOURCE TARGET\n"
        "       onnxarchive convert [options] SOURCE... --output-dir DIR"
    )
    help = "SOURCE and TARGET (- is standard output); with --output-dir, models and directories"
    command.add_argument("paths", nargs="*", metavar="PATH", help=help)
    help = (
        "convert every model in the sources, one at a time, or N at a time with --jobs N; "
        "archives keep the relative paths of the models, below DIR"
    )
    _add_arguments(command, {"--output-dir DIR": help})
    _add_jobs(command)
    help = "store initializers of this size or more outside the model (default %(default)s)"
    _add_bytes(command, "--size-threshold", help, default=DEFAULT_SIZE_THRESHOLD)
    help = (
        "begin the data of every entry at a multiple of BYTES, a power of two from 64 to 32768 "
        "(default %(default)s)"
    )
    _add_bytes(command, "--alignment", help, default=layout.MIN_ALIGNMENT)
    _add_arguments(
        command,
        {
            "--convert-attribute": "store all large tensors outside the model, not only "
            "initializers",
            "--assets": "add other files of the model's directory or zip, such as tokenizer.json, "
            "as assets, except hidden files, models and weights",
        },
    )
    help = f"add assets (give the option after the paths): {_ASSET_HELP}"
    _add_arguments(command, {f"--asset {ASSET}": help}, nargs="+", action="extend", default=[])
    help = "add another model, such as decoder=decoder.onnx; equal tensors of the models are "
    _add_arguments(command, {"--model ID=PATH": f"{help}stored once"}, **_REPEATED)
    _add_arguments(
        command,
        {
            "--all-models": "add every .onnx in the directory SOURCE and below it, except further "
            "precisions such as model_fp16.onnx; ids are made of the file names",
            "--default NAME": "with --all-models: the default model (default: model.onnx)",
            "--include PATTERN": "with --all-models: only files of these names, as '*_fp16.onnx'",
        },
    )
    help = "compare data files with the SHA-1 checksums in the model"
    _add_arguments(command, {"--verify-checksum": help})
    help = (
        "follow symbolic links in a source if they lead to files below DIRECTORY (without "
        "DIRECTORY: within the model's folder of a Hugging Face cache)"
    )
    _add_arguments(
        command, {"--follow-links DIRECTORY": help}, nargs="?", const=True, default=False
    )
    _add_arguments(
        command,
        {
            "--dry-run": "report the outcome, but write no archive",
            "--skip-existing": "with --output-dir: skip models whose archive exists",
        },
    )
    _add_force(command)


def _add_bytes(
    command: argparse.ArgumentParser, name: str, help: str, *, default: int | None = None
) -> None:
    _add_arguments(command, {f"{name} BYTES": help}, type=int, default=default)


def _add_export(commands: Any) -> None:
    command = _add(commands, "export", "exporting", "Write a model of an archive as a .onnx.")
    _add_arguments(
        command,
        {
            "target TARGET": "the .onnx to write",
            "--external-data NAME": "write large tensors to this file beside the .onnx; needed "
            "from 2 GiB on",
        },
    )
    _add_model(command, "write this model")
    _add_force(command)


def _add_link(commands: Any) -> None:
    help = "Write a small .onnx that uses an archive as its external data, for other tools."
    command = _add(commands, "link", "exporting", help)
    help = "the .onnx to write, in the archive's directory or above; a directory gets one per model"
    _add_arguments(command, {"target TARGET": help})
    _add_model(command, "link this model")
    help = "refer to packed weights, for ONNX Runtime 1.32 or newer"
    _add_arguments(command, {"--prepack": help})
    _add_force(command)


def _add_extract(commands: Any) -> None:
    help = "Unzip an archive to a directory of ONNX external data."
    command = _add(commands, "extract", "exporting", help)
    _add_arguments(command, {"directory DIRECTORY": "a new or an empty directory"})


def _add_check(commands: Any) -> None:
    help = "Check archives against the specification, and list broken rules."
    command = _add(commands, "check", "checking", help, archive=False)
    command.usage = (
        "onnxarchive check [options] ARCHIVE...\n"
        "       onnxarchive check [options] --link LINK [ARCHIVE]"
    )
    help = "an archive; with --link, the link's archive"
    _add_arguments(command, {"archives ARCHIVE": help}, type=_file, nargs="*")
    _add_arguments(command, {"--full": "read every byte and compare checksums"})
    _add_arguments(command, {"--link LINK": "check that this link fits its archive"}, type=_file)
    _add_jobs(command)


def _add_diff(commands: Any) -> None:
    help = "Compare the graphs, tensors and assets of two archives (weights by CRC-32)."
    command = _add(commands, "diff", "comparing", help)
    command.add_argument("other", type=_file, metavar="OTHER")
    _add_model(command, "compare this model only", default=None)
    _add_arguments(
        command,
        {
            "--full": "also compare bytes, not only the CRC-32s of tensors and assets",
            "--stack-traces": "also compare the stack traces in the metadata of nodes",
        },
    )


def _add_replace_model(commands: Any) -> None:
    help = "Replace or add a model; the weights stay in place, unless --compact or --copy is given."
    command = _add(commands, "replace-model", "editing", help)
    help = (
        "a .onnx, such as an edited link or a __MODEL_PROTO that was extracted and edited; its "
        "external data may be in the archive or in other files"
    )
    _add_arguments(command, {"model MODEL": help}, type=_file)
    help = "the id of the model to replace; an unknown id adds a model"
    _add_arguments(command, {"--name ID": help}, default="")
    help = "store initializers of this size or more outside the model (default: as in the archive)"
    _add_bytes(command, "--size-threshold", help)
    _add_edit_options(command)


def _add_remove_model(commands: Any) -> None:
    help = "Remove a model; the weights stay in place unless --compact or --copy is given."
    command = _add(commands, "remove-model", "editing", help)
    _add_arguments(command, {"id ID": "the id of the model"})
    _add_edit_options(command)


def _add_rename_model(commands: Any) -> None:
    command = _add(commands, "rename-model", "editing", "Give a model of an archive another id.")
    _add_arguments(
        command, {"old OLD": "the id of the model", "new NEW": "the new id: [a-z][a-z0-9_]*"}
    )
    _add_copy(command)


def _add_assets(commands: Any) -> None:
    help = "List, add, remove or print the assets of an archive."
    assets = commands.add_parser("assets", help=help, description=help)
    actions = assets.add_subparsers(required=True, metavar="ACTION")
    _add(actions, "ls", "assets", "List the assets.")
    command = _add(actions, "add", "assets", "Add files, or replace assets of the same names.")
    _add_arguments(command, {f"assets {ASSET}": _ASSET_HELP}, nargs="+")
    _add_copy(command)
    command = _add(actions, "rm", "assets", "Remove assets.")
    _add_arguments(command, {"names NAME": "the name of an asset"}, nargs="+")
    _add_copy(command)
    command = _add(actions, "cat", "assets", "Write an asset to standard output.", json=False)
    _add_arguments(command, {"name NAME": "the name of the asset"})


def _add_set_metadata(commands: Any) -> None:
    help = "Set metadata, doc string, producer and domain of a model in an archive."
    command = _add(commands, "set-metadata", "editing", help)
    _add_arguments(command, {"pairs KEY=VALUE": "metadata to set"}, nargs="*")
    _add_arguments(command, {"--remove KEY": "metadata to remove"}, **_REPEATED)
    for field in WORDS:
        option, words = field.replace("_", "-"), field.replace("_", " ")
        _add_arguments(command, {f"--{option} TEXT": f"set the {words}; '' removes it"})
    _add_model(command, "change this model")
    _add_edit_options(command)


def _add_prepack(commands: Any) -> None:
    command = _add(
        commands,
        "prepack",
        "prepacking",
        "Store the weights as ONNX Runtime packs them, so that sessions run fast and share memory.",
    )
    _add_model(command, "pack the weights of this model alone", default=None)
    _add_arguments(command, {"--remove": "remove all packed weights instead"})
    _add_copy(command)


def _add_recover(commands: Any) -> None:
    help = "Roll back an interrupted edit, and remove temporary files of killed processes."
    _add_timeout(_add(commands, "recover", "editing", help))


def _add_edit_options(command: argparse.ArgumentParser) -> None:
    help = "rewrite the whole archive, without tensors that no model uses"
    _add_arguments(command, {"--compact": help})
    _add_copy(command)


def _add_copy(command: argparse.ArgumentParser) -> None:
    help = "write a new file; needed if ARCHIVE is a symbolic link or has further hard links"
    _add_arguments(command, {"--copy": help})
    _add_timeout(command)


def _add_timeout(command: argparse.ArgumentParser) -> None:
    help = (
        "wait at most this long while other processes open or edit the archive (default: "
        "%(default)s; inf: without limit)"
    )
    _add_arguments(command, {"--timeout SECONDS": help}, type=float, default=locking.TIMEOUT)


def _add_run(commands: Any) -> None:
    help = "Run a model with ONNX Runtime, and print inputs, outputs, time and memory growth."
    command = _add(commands, "run", "running", help, archive=False)
    _add_arguments(command, {"path MODEL": "an archive or a .onnx"}, type=_file)
    _add_model(command, "run this model of the archive")
    _add_arguments(
        command,
        {
            "--input NAME=FILE.npy": "an input (.npz for a sequence); other inputs are random",
            "--dim NAME=SIZE": "the size of a dimension that the model leaves open (default 1); "
            "NAME is x[0] for an unnamed first dimension of the input x",
        },
        **_REPEATED,
    )
    help = "an execution provider, such as cpu or cuda; repeat --provider in order of preference"
    _add_arguments(command, {"--provider NAME": help}, action="append")
    help = "run the model N times and print the median time (default %(default)s)"
    _add_arguments(command, {"--repeat N": help}, type=int, default=1)
    _add_arguments(
        command,
        {
            "--no-prepack": "make no packed copies of weights, so that memory stays small",
            "--output DIR": "save the outputs as .npy files in a new directory, which --input "
            "reads; types that numpy lacks, such as BFLOAT16, as raw bytes: "
            "np.load(PATH).view(ml_dtypes.bfloat16)",
        },
    )


def _add_view(commands: Any) -> None:
    help = "Show the graph and the weights of an archive in a browser, with Netron."
    command = _add(commands, "view", "running", help)
    _add_arguments(
        command, {"--port N": "the server's port (default: any free)"}, type=int, default=0
    )
    _add_model(command, "show this model")
    _add_arguments(command, {"--no-browser": "print the address without starting a browser"})


def _add_cache(commands: Any) -> None:
    help = "List or clear the cache of remote archives."
    cache = commands.add_parser("cache", help=help, description=help)
    actions = cache.add_subparsers(required=True, metavar="ACTION")
    help = "List the archives in the cache, most recently used first."
    ls = _add(actions, "ls", "caching", help, archive=False)
    help = "Remove archives from the cache; programs that use them are not affected."
    clear = _add(actions, "clear", "caching", help, archive=False)
    _add_arguments(clear, {"urls URL": "remove only these archives"}, nargs="*")
    help = "the directory of the cache (default: the user's cache)"
    for command in (ls, clear):
        _add_arguments(command, {"--directory DIR": help}, default=True)


def _add_download(commands: Any) -> None:
    help = "Download a remote archive and verify it; resume an interrupted download."
    command = _add(commands, "download", "downloading", help, archive=False)
    command.add_argument("url", metavar="URL")
    _add_arguments(command, {"path PATH": "the file (default: the URL's last part)"}, nargs="?")
    _add_force(command)
    _add_storage_option(command)


def _add_cat(commands: Any) -> None:
    help = "Write a tensor (as .npy) or an asset to standard output."
    command = _add(commands, "cat", "downloading", help, json=False)
    help = (
        "the tensor, or the path of the asset; a type that numpy lacks, such as BFLOAT16, is "
        "written as raw bytes: np.load(PATH).view(ml_dtypes.bfloat16)"
    )
    _add_arguments(command, {"name NAME": help})
    _add_model(command, "write the tensor of this model")


def _add_completion(commands: Any) -> None:
    help = "Print a shell script that completes commands, options and files."
    command = _add(commands, "completion", "parser", help, archive=False)
    command.add_argument("shell", choices=["bash", "zsh", "fish", "tcsh"], help="the shell")


def completion_command(arguments: argparse.Namespace) -> int:
    """Runs `completion`."""
    with needing("shtab", "complete commands"):
        import shtab
    top = parser()
    _complete_files(top, shtab.FILE)
    script = shtab.complete(top, arguments.shell)
    say(arguments, {"shell": arguments.shell, "script": script}, script.rstrip("\n"))
    return DONE


def _complete_files(command: argparse.ArgumentParser, file: object) -> None:
    """Sets file-name completion for each argument that takes a value and has no choices."""
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                _complete_files(each, file)
        elif action.nargs != 0 and action.choices is None:
            action.complete = file  # type: ignore[attr-defined]  # where shtab looks


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
    "prepack": _add_prepack,
    "recover": _add_recover,
    "run": _add_run,
    "view": _add_view,
    "download": _add_download,
    "cat": _add_cat,
    "cache": _add_cache,
    "completion": _add_completion,
}
