"""The commands that read archives: `ls`, `info` and `cat`."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from onnxarchive.cli.output import StandardOutput, require_no_terminal, say
from onnxarchive.cli.parser import add_command, open_archive
from onnxarchive.cli.terminal import count, cut, size, table
from onnxarchive.errors import ArchiveFormatError, quoted
from onnxarchive.files.data import Buffer, crc32
from onnxarchive.model import DEFAULT_SIZE_THRESHOLD
from onnxarchive.model.keys import ASSET_PREFIX, PACKED_PREFIX, model_entry
from onnxarchive.zipformat.layout import EntryLayout

if TYPE_CHECKING:
    import onnx
    from numpy.typing import NDArray

    from onnxarchive.model.tensors import TensorRef
    from onnxarchive.reading.archive import Archive

DEFAULT: Final = "(default)"  # shown for the empty id of the default model


def add_ls(commands: Any) -> None:
    help = "List the tensors and assets of an archive, with their CRC-32s."
    command = add_command(commands, ls, help, "model.onnxa")
    command.add_model("list the tensors of this model only")
    command.add("--all", "list the weights that 'onnxarchive prepack' has stored, too")
    command.add_url_options()


def ls(arguments: argparse.Namespace) -> None:
    from onnxarchive.model import dtypes
    from onnxarchive.reading.archive import contents_of

    only = arguments.model
    with open_archive(arguments, only) as archive:
        models = contents_of(archive).models
        chosen = models if only is None else {only: models[only]}
        users = users_of_entries(archive)
        stored: list[dict[str, Any]] = []
        packed: list[dict[str, Any]] = []
        others: list[dict[str, Any]] = []
        for name, entry in archive.entries.items():
            place = {"nbytes": entry.nbytes, "data_offset": entry.data_offset, "crc32": entry.crc32}
            ref = next((models[id].refs[name] for id in users.get(name, ()) if id in chosen), None)
            if ref is not None:
                data_type, dims = dtypes.BY_NUMBER[ref.tensor.data_type].name, [*ref.tensor.dims]
                tensor = {"name": ref.name, "key": name, "data_type": data_type, "dims": dims}
                stored.append({**tensor, "models": users[name], **place})
            elif name.startswith(PACKED_PREFIX):
                packed.append({"name": name, **place})
            elif name not in users:  # a model or an asset
                others.append({"name": name, **place})
        totals = {
            "tensors": len(stored),
            "in_model": sum(_count(model.model) - len(model.refs) for model in chosen.values()),
            "assets": len(others) - len(models),
            "packed": len(packed),
            "weights": sum(tensor["nbytes"] for tensor in stored),
            "nbytes": contents_of(archive).file.size,
        }
    listed = [*packed, *others] if arguments.all else others
    lines = table(*_columns(stored, listed, has_models=len(models) > 1))
    models_noun = "models" if len(chosen) > 1 else "model"
    summary = (
        f"{count(totals['tensors'], 'tensor')}, {size(totals['weights'])} in all; "
        f"{totals['in_model']:,} more in the {models_noun}; "
        f"{count(totals['assets'], 'asset')}; archive of {size(totals['nbytes'])}"
    )
    if packed and not arguments.all:
        summary += f"; --all lists {count(len(packed), 'file')} of packed weights, too"
    result = {"tensors": stored, "others": listed, "totals": totals}
    say(arguments, result, chain(lines, ("", summary)))


def _columns(
    tensors: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]], *, has_models: bool
) -> tuple[list[str], list[list[object]]]:
    """The header and the rows of `ls`.

    A key is shown if it is not the tensor's name. A column without a cell is left out.
    """
    from onnxarchive.model.wording import describe_dims

    rows: list[list[object]] = []
    for row in tensors:
        key = "" if row["key"] == row["name"] else row["key"]
        words = [row["name"], key, row["data_type"], describe_dims(row["dims"])]
        rows.append([*words, *_place(row), _ids(row["models"])])
    rows += [[row["name"], "", "", "", *_place(row), ""] for row in others]
    header = ["name", "key", "data type", "shape", "bytes", "offset", "CRC-32", "models"]
    has_key = any(row[1] for row in rows)
    left_out = {
        title for title, is_used in (("key", has_key), ("models", has_models)) if not is_used
    }
    indexes = [index for index, title in enumerate(header) if title not in left_out]
    return [header[index] for index in indexes], [[row[index] for index in indexes] for row in rows]


def _place(row: Mapping[str, Any]) -> list[object]:
    return [row["nbytes"], row["data_offset"], f"{row['crc32']:08x}"]


def _count(model: onnx.ModelProto) -> int:
    """The number of tensors of a model."""
    from onnxarchive.model import tensors

    return len(model.graph.initializer) + sum(1 for _ in tensors.walk_others(model))


def users_of_entries(archive: Archive) -> dict[str, list[str]]:
    """The ids of the models that use a key, by key."""
    from onnxarchive.reading.archive import contents_of

    users: dict[str, list[str]] = {}
    for id in archive.models:
        for key in contents_of(archive).models[id].refs:
            users.setdefault(key, []).append(id)
    return users


def _ids(ids: Iterable[str]) -> str:
    return ", ".join(id or DEFAULT for id in ids)


def ports(model: onnx.ModelProto) -> dict[str, dict[str, Any]]:
    """The types of the inputs and outputs of a model by name, for JSON."""
    from onnxarchive.model.tensors import text
    from onnxarchive.model.wording import type_as_data

    return {
        "inputs": {text(value.name): type_as_data(value) for value in model.graph.input},
        "outputs": {text(value.name): type_as_data(value) for value in model.graph.output},
    }


def count_parameters(model: onnx.ModelProto) -> int:
    """The number of elements of the initializers, without those of impossible shapes."""
    from onnxarchive.model import tensors

    shapes = (ref.tensor.dims for ref in tensors.walk(model) if ref.is_initializer)
    return sum(math.prod(dims) for dims in shapes if tensors.are_dims(dims, None))


def add_info(commands: Any) -> None:
    help = "Describe a model in an archive."
    command = add_command(commands, info, help, "model.onnxa --model decoder")
    command.add_model("describe this model")
    command.add_url_options()


def info(arguments: argparse.Namespace) -> None:
    from onnxarchive.model import model_proto, tensors
    from onnxarchive.model.tensors import text
    from onnxarchive.model.wording import describe

    with open_archive(arguments, arguments.model) as archive:
        model = archive.model
        version = model.producer_version
        inside = tensors.nbytes_in_attributes(model, DEFAULT_SIZE_THRESHOLD)
        result: dict[str, Any] = {
            "model": archive.model_id,
            "models": list(archive.models),
            "producer": " ".join(filter(None, map(text, (model.producer_name, version)))),
            "ir_version": model.ir_version,
            "opsets": {
                text(opset.domain) or "ai.onnx": opset.version for opset in model.opset_import
            },
            "graph": text(model.graph.name),
            "nodes": len(model.graph.node),
            **ports(model),
            "parameters": count_parameters(model),
            "sha256": _sha256_of_tensors(archive, arguments.model),
            "bytes": _bytes(archive),
            "attributes": {"tensors": len(inside), "nbytes": sum(inside)},
            "metadata": model_proto.metadata(model),
            "packed": described_sets(archive),
        }
    lines = []
    for label, value in result.items():
        if label in ("inputs", "outputs"):
            values = model.graph.input if label == "inputs" else model.graph.output
            described = {text(port.name): describe(port) for port in values}
            lines += _item_lines(label, described)
        elif label == "sha256":
            lines.append(f"{'tensors':<14}SHA-256 {value}")
        elif label == "bytes":
            lines += [f"{part:<14}{size(nbytes)}" for part, nbytes in value.items()]
        elif label == "models":
            others = [id for id in value if id != archive.model_id]
            lines += [f"{'other models':<14}{_ids(others)}"] if others else []
        elif label == "attributes":
            if inside:
                lines.append(
                    f"{label:<14}{count(len(inside), 'tensor')} in Constant nodes and others, "
                    f"{size(sum(inside))}, in the model; 'onnxarchive convert "
                    "--convert-attribute' stores them outside"
                )
        elif label == "packed":
            lines += [f"{label:<14}{line}" for described in value for line in set_lines(described)]
        elif isinstance(value, dict):
            lines += _item_lines(label, value)
        elif value:
            lines.append(f"{label:<14}{f'{value:,}' if isinstance(value, int) else cut(value)}")
    say(arguments, result, lines)


def _item_lines(label: str, items: Mapping[str, object]) -> list[str]:
    """A line for each item; the first one begins with the label."""
    lines = [": ".join(map(cut, (name, str(value)))) for name, value in items.items()]
    return [f"{'' if row else label:<14}{line}" for row, line in enumerate(lines)]


def _sha256_of_tensors(archive: Archive, only: str | None) -> str:
    """A SHA-256 that changes if a tensor of a model, or of any model, changes.

    It is that of a line of JSON for each tensor: name, data type, shape, size in bytes and CRC-32.
    The lines are sorted, since the order and the place of a tensor do not matter. The CRC-32s are
    those in the directory, so no tensor outside the models is read.
    """
    from onnxarchive.model import dtypes, tensors
    from onnxarchive.reading.archive import contents_of

    lines = []
    for id in archive.models if only is None else [only]:
        checked = contents_of(archive).models[id]
        key_of = {ref.path: key for key, ref in checked.refs.items()}
        for ref in tensors.walk(checked.model):
            entry = archive.entries.get(key_of.get(ref.path, ""))
            if entry is not None:
                nbytes, crc = entry.nbytes, entry.crc32
            else:
                data = _data_in_model(ref)
                nbytes, crc = len(data), crc32(data)
            data_type, dims = dtypes.name_of(ref.tensor.data_type), [*ref.tensor.dims]
            lines.append(json.dumps([ref.name, data_type, dims, nbytes, crc]) + "\n")
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


def _data_in_model(ref: TensorRef) -> Buffer:
    """The bytes of a tensor in the model; the message, of strings and of a faulty tensor."""
    from onnxarchive.model import tensors
    from onnxarchive.model.serialization import serialize

    if tensors.stored_type(ref.tensor) is not None:
        with contextlib.suppress(ArchiveFormatError):  # too few or too many bytes
            return tensors.raw_data(ref)
    return serialize(ref.tensor)


def _bytes(archive: Archive) -> dict[str, int]:
    """The bytes of an archive by use, such as weights or padding."""
    from onnxarchive.reading.archive import contents_of

    entries, nbytes = archive.entries.values(), contents_of(archive).file.size
    assets = sum(entry.nbytes for entry in entries if entry.name.startswith(ASSET_PREFIX))
    models = sum(archive.entries[model_entry(id)].nbytes for id in archive.models)
    data = sum(entry.nbytes for entry in entries)
    padding = sum(
        entry.data_offset
        - EntryLayout(entry.name.encode(), entry.nbytes, 0, entry.header_offset).unpadded_offset
        for entry in entries
    )
    return {
        "weights": data - models - assets,
        "models": models,
        "assets": assets,
        "padding": padding,
        "headers": nbytes - data - padding,
        "archive": nbytes,
    }


def described_sets(archive: Archive) -> list[dict[str, Any]]:
    """The sets of packed weights in an archive, as dicts for JSON.

    A weight counts if a model has it with the same bytes as when it was packed; the buffers of
    other weights are unused.
    """
    from onnxarchive.interop.onnxruntime import compares_packed, machine
    from onnxarchive.model.prepacked import packable, packed_sets, warn_of_sets
    from onnxarchive.reading.archive import contents_of

    weights = {
        id: [*packable(checked, archive.entries).values()]
        for id, checked in contents_of(archive).models.items()
    }
    present = {*chain.from_iterable(weights.values())}
    names = {id: {name for name, *_ in listed} for id, listed in weights.items()}
    faults: list[str] = []
    described = [
        {
            "onnxruntime": packed.onnxruntime,
            "machine": packed.machine,
            "weights": len(present & packed.forms().keys()),
            "nbytes": sum(packed.files.values()),
            "unused_nbytes": packed.unused_nbytes(present),
            "unpacked": {
                id: [name for name in unpacked if name in names[id]]
                for id, unpacked in packed.unpacked.items()
                if id in names
            },
            "is_usable": packed.machine == machine() and compares_packed(),
        }
        for packed in packed_sets(archive.entries, archive.read, faults)
    ]
    warn_of_sets(archive.path, faults)
    return described


def set_lines(described: dict[str, Any]) -> list[str]:
    """A described set as lines of text."""
    usable = "" if described["is_usable"] else ", not usable here"
    lines = [
        f"{count(described['weights'], 'packed weight')}, {size(described['nbytes'])}, "
        f"of ONNX Runtime {described['onnxruntime']} on {described['machine']}{usable}"
    ]
    if described["unused_nbytes"]:
        lines.append(
            f"{size(described['unused_nbytes'])}, of packed weights that no model has any more; "
            "'onnxarchive prepack --remove' removes all packed weights"
        )
    for identifier, names in described["unpacked"].items():
        if names:
            model = f" of the model {identifier!r}" if identifier else ""
            lines.append(cut(f"{len(names):,} not packed{model}: {', '.join(names)}"))
    return lines


def add_cat(commands: Any) -> None:
    help = "Write a tensor (as .npy) or an asset to standard output."
    example = "model.onnxa layer.0/weight > weight.npy"
    command = add_command(commands, cat, help, example, json=False)
    help = (
        "the tensor, or the path of the asset; a type that numpy lacks, such as BFLOAT16, is "
        "written as raw bytes: np.load(PATH).view(ml_dtypes.bfloat16)"
    )
    command.add("name NAME", help)
    command.add_model("write the tensor of this model")
    help = (
        "write only these rows (of the first axis), START:STOP or START:STOP:STEP as in Python; "
        "--rows=-4: for the last four. Rows are not compared with the tensor's CRC-32"
    )
    command.add("--rows RANGE", help, type=_rows)
    command.add_url_options()


def cat(arguments: argparse.Namespace) -> None:
    from onnxarchive.reading.archive import contents_of

    require_no_terminal()
    with open_archive(arguments, arguments.model) as archive:
        name = f"{archive.path}: tensor {quoted(arguments.name)}"
        remedy = "use onnxarchive.open in Python"
        if arguments.rows is not None:
            part = archive.get_slice(arguments.name)
            if not part.shape:
                raise ValueError(f"{name}: a scalar has no rows; leave out --rows")
            save_array(StandardOutput(), part[arguments.rows], name, remedy)
        elif arguments.name in archive.assets:
            output = StandardOutput()
            for piece in archive.assets.pieces(arguments.name):
                output.write(piece)
        else:
            key = archive.tensors.key(arguments.name)
            if key is None:
                array = archive.tensors[arguments.name]
            else:
                (data,) = contents_of(archive).verified([key])
                array = archive.tensors.array(key, data)
            save_array(StandardOutput(), array, name, remedy)


def _rows(text: str) -> slice:
    """Converts `START:STOP` or `START:STOP:STEP` to a slice; each number may be left out."""
    try:
        numbers = [int(number) if number else None for number in text.split(":")]
        if len(numbers) not in (2, 3) or numbers[2:] == [0]:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected START:STOP or START:STOP:STEP, as in Python, found {text!r}"
        ) from None
    return slice(*numbers)


def save_array(file: Any, array: NDArray[Any], name: str, remedy: str) -> None:
    """Writes an array in the format of `.npy` files to a file object that has `write`.

    Types of ml_dtypes are written as raw bytes (`V1`, `V2`), as by `np.save`; only for FLOAT8E5M2
    does `np.save` write `<f1`, which `np.load` refuses. Python strings are written as strings of
    fixed length. These lose null characters at their ends; so such strings are refused, with the
    array's name and a remedy.
    """
    import numpy as np

    from onnxarchive.model import dtypes

    if array.dtype.hasobject:
        strings = array.astype(str)
        if np.any(strings != array):
            raise ValueError(
                f"{name}: a string ends with a null character, which a .npy file cannot hold; "
                f"{remedy}"
            )
        array = strings
    elif dtypes.is_extension(array.dtype):
        array = array.view(np.dtype((np.void, array.dtype.itemsize)))
    np.save(file, array, allow_pickle=False)
