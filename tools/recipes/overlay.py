"""Stores a fine-tuned model as an overlay: an archive of only what differs from a base archive.

pip install 'onnxarchive[ort]'
python overlay.py make base.onnxa tuned.onnxa overlay.onnxa
python overlay.py run base.onnxa overlay.onnxa inputs.npz outputs.npz
python overlay.py merge base.onnxa overlay.onnxa merged.onnxa

An initializer whose bytes are in the base becomes an input of the overlay's graph. The asset
`overlay.json` says of each such input which tensor of the base it is. A session maps both files;
they are external data below the directory that both are in. The base is always given by the caller.

Initializers of the main graph with 64 KiB or more are left to the base, unless they are inputs of
the graph, too (a caller may override them), or the model has an IR version below 4, where all must
be. The archives must hold one model each; a base may hold more, but only its default one counts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import onnx
import onnxruntime as ort
from google.protobuf.message import Message
from onnx.helper import make_tensor_value_info

import onnxarchive

INDEX = "overlay.json"
VERSION = 1
LEAST_NBYTES = 1 << 16  # runtimes may need the values of smaller tensors in the model
OLDEST_IR_VERSION = 4
DIRECTORY = "session.model_external_initializers_file_folder_path"
EXTERNAL = onnx.TensorProto.EXTERNAL


@dataclasses.dataclass(frozen=True)
class Shared:
    """A tensor of the base that is an input of the overlay's graph.

    Attributes:
        key: The name of its entry in the base.
        sha256: The SHA-256 of its bytes, in hexadecimal digits.
        position: Its index among the initializers of the fine-tuned model.
        doc_string: That of the initializer.
    """

    key: str
    sha256: str
    position: int
    doc_string: str


def require_other_file(base: str, target: str) -> None:
    """Refuses to replace the base, which overlays need."""
    if os.path.exists(target) and os.path.samefile(base, target):
        raise ValueError(f"{target}: is the base; choose another file for the result")


# Making


def make(base: str, tuned: str, overlay: str) -> int:
    """Writes the overlay of a fine-tuned archive; gives the number of tensors left to the base."""
    require_other_file(base, overlay)
    with onnxarchive.open(base) as base_archive, onnxarchive.open(tuned) as tuned_archive:
        require_one_model(tuned_archive)
        if INDEX in tuned_archive.assets:
            raise ValueError(f"{tuned}: it is an overlay, with the asset {INDEX}; merge it first")
        shared = find_shared(base_archive, tuned_archive)
        index = {
            "version": VERSION,
            "base": fingerprint(base_archive, shared.values()),
            "tensors": {name: dataclasses.asdict(one) for name, one in shared.items()},
        }

    def leave_to_base(model: onnx.ModelProto) -> onnx.ModelProto:
        initializers = [*model.graph.initializer]
        del model.graph.initializer[:]
        for tensor in initializers:
            if tensor.name not in shared:
                model.graph.initializer.append(tensor)
                continue
            value = make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            value.metadata_props.extend(tensor.metadata_props)
            model.graph.input.append(value)
        return model

    asset = json.dumps(index, indent=1).encode()
    onnxarchive.transform(tuned, overlay, leave_to_base, weights="external", assets={INDEX: asset})
    return len(shared)


def find_shared(base: onnxarchive.Archive, tuned: onnxarchive.Archive) -> dict[str, Shared]:
    """The initializers of a fine-tuned model that the base has, too, by name."""
    graph = tuned.model.graph
    if tuned.model.ir_version < OLDEST_IR_VERSION:
        return {}
    base_keys = {kind(base, key, it): key for key, it in stored_initializers(base).items()}
    overridable = {value.name for value in graph.input}
    positions = {tensor.name: number for number, tensor in enumerate(graph.initializer)}
    if len(positions) < len(graph.initializer):
        raise ValueError(f"{tuned.path}: expected initializers of different names")
    shared = {}
    for key, tensor in stored_initializers(tuned).items():
        if tensor.name in overridable or tuned.entries[key].nbytes < LEAST_NBYTES:
            continue
        base_key = base_keys.get(kind(tuned, key, tensor))
        if base_key is None:
            continue
        sha256 = sha256_of(tuned, key)
        if sha256_of(base, base_key) == sha256:
            position, doc_string = positions[tensor.name], tensor.doc_string
            shared[tensor.name] = Shared(base_key, sha256, position, doc_string)
    return shared


def stored_initializers(archive: onnxarchive.Archive) -> dict[str, onnx.TensorProto]:
    """The initializers of the main graph that are stored outside the model, by key."""
    initializers = archive.model.graph.initializer
    return {location(it).value: it for it in initializers if it.data_location == EXTERNAL}


def kind(archive: onnxarchive.Archive, key: str, tensor: onnx.TensorProto) -> tuple[Any, ...]:
    """What is equal if the bytes are: data type, dims and CRC-32."""
    return tensor.data_type, tuple(tensor.dims), archive.entries[key].crc32


def sha256_of(archive: onnxarchive.Archive, key: str) -> str:
    """The SHA-256 of a tensor's bytes."""
    return hashlib.sha256(archive.read(key)).hexdigest()


def fingerprint(base: onnxarchive.Archive, shared: Iterable[Shared]) -> str:
    """A SHA-256 over key, size and CRC-32 of tensors of the base; their bytes are not read."""
    entries = (base.entries[key] for key in sorted({one.key for one in shared}))
    lines = (f"{entry.name} {entry.nbytes} {entry.crc32:08x}\n" for entry in entries)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


# Using


def session(
    base: str,
    overlay: str,
    sess_options: ort.SessionOptions | None = None,
    providers: Sequence[str] | None = None,
    *,
    verify: bool = True,
    prepack: bool | None = None,
) -> ort.InferenceSession:
    """Makes a session that maps the weights of both archives.

    Without `verify`, the weights are not read: only keys, sizes and CRC-32s of the base's directory
    are compared.
    """
    paths = [os.path.realpath(it) for it in (base, overlay)]
    folder = os.path.commonpath([os.path.dirname(it) for it in paths])
    base_path, overlay_path = (os.path.relpath(it, folder).replace(os.sep, "/") for it in paths)
    before = [state(it) for it in paths]
    with onnxarchive.open(paths[0]) as base_archive, onnxarchive.open(paths[1]) as overlay_archive:
        shared = require_fit(base_archive, overlay_archive, verify=verify)
        data, options = onnxarchive.session_options(overlay_archive, sess_options, prepack=prepack)
        model = onnx.ModelProto.FromString(data)
        for tensor in tensors_of(model):
            if tensor.data_location == EXTERNAL:
                location(tensor).value = overlay_path

        def refer(tensor: onnx.TensorProto, key: str) -> None:
            base_archive.read(key)  # compares its local header
            tensor.data_location = EXTERNAL
            tensor.external_data.add(key="location", value=base_path)
            entry = base_archive.entries[key]
            tensor.external_data.add(key="offset", value=str(entry.data_offset))
            tensor.external_data.add(key="length", value=str(entry.nbytes))

        restore(model, shared, refer)
    options.add_session_config_entry(DIRECTORY, folder)  # ONNX Runtime warns that it replaces one
    result = ort.InferenceSession(model.SerializeToString(), options, providers)
    if [state(it) for it in paths] != before:
        raise ValueError(f"{base} or {overlay} changed while the session was made; try again")
    return result


def merge(base: str, overlay: str, merged: str) -> None:
    """Writes the archive of the fine-tuned model; one tensor after the other is in memory."""
    require_other_file(base, merged)
    with (
        onnxarchive.open(base) as base_archive,
        onnxarchive.open(overlay) as archive,
        onnxarchive.Writer(
            merged, size_threshold=sys.maxsize, alignment=archive.alignment
        ) as writer,
    ):
        shared = require_fit(base_archive, archive, verify=True)
        archive.verify()
        model = onnx.ModelProto()
        model.CopyFrom(archive.model)
        names = Counter(tensor.name for tensor in tensors_of(model))
        for tensor in tensors_of(model):
            if tensor.data_location == EXTERNAL:
                key = location(tensor).value
                # Branches may have initializers of the same name.
                name = tensor.name if tensor.name and names[tensor.name] == 1 else f"{key}/"
                location(tensor).value = writer.add(name, archive.tensor_by_key(key))
        restore(
            model,
            shared,
            lambda tensor, key: writer.add(tensor.name, base_archive.tensor_by_key(key)),
        )
        for path in archive.assets:
            if path != INDEX:
                writer.add_asset(path, archive.assets[path])
        writer.finish(model)


def restore(
    model: onnx.ModelProto,
    shared: Mapping[str, Shared],
    fill: Callable[[onnx.TensorProto, str], object],
) -> None:
    """Makes inputs initializers again; `fill` gets each, without data, and the key in the base."""
    graph = model.graph
    inputs, own = [*graph.input], iter([*graph.initializer])
    name_at = {one.position: name for name, one in shared.items()}
    count = len(graph.initializer) + len(shared)
    given = {value.name: value for value in inputs if value.name in shared}
    del graph.input[:], graph.initializer[:]
    graph.input.extend(value for value in inputs if value.name not in shared)
    for position in range(count):
        if position not in name_at:
            graph.initializer.append(next(own))
            continue
        value = given[name_at[position]]
        kind = value.type.tensor_type
        tensor = graph.initializer.add(
            name=value.name,
            data_type=kind.elem_type,
            dims=[dim.dim_value for dim in kind.shape.dim],
            metadata_props=value.metadata_props,
        )
        if shared[value.name].doc_string:
            tensor.doc_string = shared[value.name].doc_string
        fill(tensor, shared[value.name].key)


def state(path: str) -> tuple[int, ...]:
    """What differs if a file was replaced or written to."""
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def tensors_of(message: Message) -> Iterator[onnx.TensorProto]:
    """Every tensor of a model."""
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for one in [value] if isinstance(value, Message) else value:
            if isinstance(one, onnx.TensorProto):
                yield one
            else:
                yield from tensors_of(one)


def location(tensor: onnx.TensorProto) -> onnx.StringStringEntryProto:
    """The pair with the location of an external tensor; in an archive, its value is a key."""
    return next(pair for pair in tensor.external_data if pair.key == "location")


# The index, which anybody may have written


def require_one_model(archive: onnxarchive.Archive) -> None:
    """Refuses an archive of several models."""
    if [*archive.models] != [""]:
        raise ValueError(f"{archive.path}: expected one model, found {[*archive.models]}")


def require_fit(
    base: onnxarchive.Archive, overlay: onnxarchive.Archive, *, verify: bool
) -> dict[str, Shared]:
    """The shared tensors of an overlay by name; refuses what does not fit the base."""
    require_one_model(overlay)
    identity, shared = read_index(overlay)
    graph = overlay.model.graph
    count = len(graph.initializer) + len(shared)
    positions = {one.position for one in shared.values()}
    if len(positions) < len(shared) or not positions <= {*range(count)}:
        refuse(overlay, f"expected different positions below {count}")
    if shared and overlay.model.ir_version < OLDEST_IR_VERSION:
        refuse(overlay, f"expected an IR version of {OLDEST_IR_VERSION} or newer")
    inputs = Counter(value.name for value in graph.input)
    types = {value.name: value.type for value in graph.input}
    own = {tensor.name for tensor in graph.initializer}
    stored = stored_initializers(base)
    for name, one in shared.items():
        if inputs[name] != 1 or name in own:
            refuse(overlay, f"expected {name!r} as one input that is no initializer")
        tensor = stored.get(one.key)
        if tensor is None:
            raise ValueError(f"{base.path}: is another base: it has no tensor {one.key!r}")
        if types[name] != make_tensor_value_info(name, tensor.data_type, tensor.dims).type:
            raise ValueError(
                f"{base.path}: is another base: the tensor {one.key!r} has another type or shape "
                f"than the input {name!r} of {overlay.path}"
            )
        if base.entries[one.key].nbytes < LEAST_NBYTES:
            refuse(overlay, f"expected tensors of {LEAST_NBYTES} bytes or more, found {name!r}")
    if fingerprint(base, shared.values()) != identity:
        raise ValueError(
            f"{base.path}: is another base: its tensors have other sizes or CRC-32s than those "
            f"that {overlay.path} was made with"
        )
    for one in shared.values() if verify else ():
        if sha256_of(base, one.key) != one.sha256:
            raise ValueError(
                f"{base.path}: the tensor {one.key!r} has changed: its SHA-256 is not the one in "
                f"{overlay.path}"
            )
    return shared


def read_index(overlay: onnxarchive.Archive) -> tuple[str, dict[str, Shared]]:
    """What identifies the base, and the shared tensors by name."""
    if INDEX not in overlay.assets:
        raise ValueError(f"{overlay.path}: it is no overlay, since it has no asset {INDEX}")
    try:
        index = json.loads(overlay.assets[INDEX], object_pairs_hook=without_repetition)
    except (ValueError, RecursionError) as error:
        refuse(overlay, f"expected JSON: {error}")
    require_fields(overlay, index, {"version": int, "base": str, "tensors": dict})
    if index["version"] != VERSION:
        refuse(overlay, f"expected version {VERSION}, found {index['version']}; use a newer recipe")
    kinds = {"key": str, "sha256": str, "position": int, "doc_string": str}
    for fields in index["tensors"].values():
        require_fields(overlay, fields, kinds)
    return index["base"], {name: Shared(**it) for name, it in index["tensors"].items()}


def without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; refuses a name that occurs twice."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a name occurs twice in an object")
    return dict(pairs)


def require_fields(overlay: onnxarchive.Archive, value: Any, kinds: Mapping[str, type]) -> None:
    """Refuses what is no object with just these fields, of these types."""
    found = {name: type(it) for name, it in value.items()} if isinstance(value, dict) else value
    if found != kinds:
        names = ", ".join(f"{name} ({kind.__name__})" for name, kind in kinds.items())
        refuse(overlay, f"expected an object of {names}")


def refuse(overlay: onnxarchive.Archive, problem: str) -> NoReturn:
    """Refuses the index of an overlay."""
    raise ValueError(f"{overlay.path}: {INDEX}: {problem}; make the overlay again")


def run(base: str, overlay: str, inputs: str, outputs: str) -> None:
    """Runs the fine-tuned model on arrays in a file of numpy; writes the outputs to another one."""
    made = session(base, overlay)
    names = [output.name for output in made.get_outputs()]
    values = made.run(names, dict(np.load(inputs)))
    np.savez(outputs, **dict(zip(names, values, strict=True)))


def main() -> None:
    """Makes, runs or merges; a base or overlay that does not fit ends with a message."""
    action, *paths = sys.argv[1:] or [""]
    functions: dict[tuple[str, int], Callable[..., object]] = {
        ("make", 3): make,
        ("run", 4): run,
        ("merge", 3): merge,
    }
    function = functions.get((action, len(paths)))
    if function is None:
        raise SystemExit(__doc__)
    try:
        result = function(*paths)
    except (ValueError, OSError, onnxarchive.ArchiveError) as error:
        raise SystemExit(str(error)) from None
    if action == "make":
        base, _, overlay = paths
        print(f"{overlay}: {result} tensors are left to {base}")


if __name__ == "__main__":
    main()
