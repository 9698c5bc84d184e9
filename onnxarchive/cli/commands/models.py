"""The command `models`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from onnxarchive.cli.commands.edit import add_edit_options, edit
from onnxarchive.cli.commands.show import DEFAULT, count_parameters, ports, users_of_entries
from onnxarchive.cli.output import say
from onnxarchive.cli.parser import (
    Command,
    add_command,
    add_group,
    file_name,
    open_archive,
    pairs,
    path_name,
    require_file,
)
from onnxarchive.cli.terminal import table
from onnxarchive.model.keys import MODEL_ID, model_entry

if TYPE_CHECKING:
    from onnxarchive.reading.archive import Archive

_MAX_PORTS: Final = 4  # inputs or outputs in a row
_MODEL_HELP: Final = (
    "a .onnx, such as an edited link or a __MODEL_PROTO that was extracted and edited; its "
    "external data may be in the archive or in other files"
)


def add_models(commands: Any) -> None:
    help = "List, add, replace, remove or rename the models of an archive."
    actions = add_group(commands, "models", help, "list model.onnxa")
    help = "List the models with inputs, outputs, parameters and bytes of weights."
    add_command(actions, list_models, help, "model.onnxa", name="list").add_url_options()
    help = "Add models."
    example = "model.onnxa encoder=decoder.onnx"
    command = add_command(actions, add_files, help, example, name="add")
    help = f"the model of this file gets the id ID, which is {MODEL_ID}; {_MODEL_HELP}"
    command.add("models ID=PATH", help, nargs="+")
    _add_size_threshold(command)
    add_edit_options(command)
    help = "Replace a model; the weights stay in place, unless --compact or --copy is given."
    example = "model.onnxa decoder.onnx --model decoder"
    command = add_command(actions, replace_model, help, example, name="replace")
    command.add("path PATH", _MODEL_HELP, type=file_name)
    command.add_model("replace this model")
    _add_size_threshold(command)
    add_edit_options(command)
    help = (
        "Remove a model. If all its weights are of other models, too, they stay in place; else the "
        "archive is written anew, without those that no other model uses."
    )
    command = add_command(actions, remove_model, help, "model.onnxa decoder", name="remove")
    command.add("id ID", "the id of the model")
    add_edit_options(command)
    help, example = "Give a model another id.", "model.onnxa decoder encoder"
    command = add_command(actions, rename_model, help, example, name="rename")
    command.add("old OLD", "the id of the model")
    command.add("new NEW", f"the new id: {MODEL_ID}")
    command.add_copy()


def _add_size_threshold(command: Command) -> None:
    help = "store initializers of this size or more outside the model (default: as in the archive)"
    command.add("--size-threshold BYTES", help, type=int)


def list_models(arguments: argparse.Namespace) -> None:
    with open_archive(arguments) as archive:
        users = users_of_entries(archive)
        listed = [_described(archive, id, users) for id in archive.models]
    header = ["model", "inputs", "outputs", "parameters", "shared bytes", "own bytes"]
    numbers = itemgetter("parameters", "shared_nbytes", "own_nbytes")
    rows = [
        [model["id"] or DEFAULT, _few(model["inputs"]), _few(model["outputs"]), *numbers(model)]
        for model in listed
    ]
    say(arguments, {"path": archive.path, "models": listed}, table(header, rows))


def _described(archive: Archive, id: str, users: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Describes a model, with the bytes of shared weights and of unshared weights."""
    from onnxarchive.reading.archive import contents_of

    used = [archive.entries[key] for key in contents_of(archive).models[id].refs]
    own_nbytes = sum(entry.nbytes for entry in used if len(users[entry.name]) == 1)
    model, name = archive.models[id], model_entry(id)
    return {
        "id": id,
        "entry": name,
        "nbytes": archive.entries[name].nbytes,
        **ports(model),
        "parameters": count_parameters(model),
        "shared_nbytes": sum(entry.nbytes for entry in used) - own_nbytes,
        "own_nbytes": own_nbytes,
    }


def _few(ports: Mapping[str, str]) -> str:
    """The names of the first inputs or outputs, and the number of others."""
    names = list(ports)
    more = [f"{len(names) - _MAX_PORTS:,} more"] if len(names) > _MAX_PORTS else []
    return ", ".join(names[:_MAX_PORTS] + more)


def add_files(arguments: argparse.Namespace) -> None:
    models = pairs("ID=PATH", arguments.models, path_name)
    for path in models.values():
        require_file(path)
    with edit(arguments, "models add") as changes:
        for id in sorted(models.keys() & set(changes.models)):
            raise ValueError(
                f"{arguments.archive}: there is a model {id!r}; 'onnxarchive models replace' "
                "replaces it"
            )
        for id, path in models.items():
            changes.models[id] = path


def replace_model(arguments: argparse.Namespace) -> None:
    with edit(arguments, "models replace") as changes:
        changes.model = arguments.path


def remove_model(arguments: argparse.Namespace) -> None:
    with edit(arguments, "models remove") as changes:
        del changes.models[arguments.id]


def rename_model(arguments: argparse.Namespace) -> None:
    with edit(arguments, "models rename") as changes:
        changes.models.rename(arguments.old, arguments.new)
