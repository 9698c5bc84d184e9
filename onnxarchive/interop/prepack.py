"""Weights packed by ONNX Runtime, stored in the archive, so that sessions map them.

ONNX Runtime packs many weights for speed, in the memory of each process. It can also write the
packed weights, and later compare them with its own packing and use the written ones in place.
`prepack` makes it write them, and stores them as assets; sessions and links then refer to them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx

from onnxarchive.conversion.linked_models import as_location
from onnxarchive.editing.edit import Edit, edit
from onnxarchive.errors import ArchiveError, UnsupportedFeatureError, with_path
from onnxarchive.files import locking
from onnxarchive.files.clones_and_sync import require_space
from onnxarchive.files.local_file import MappedFile
from onnxarchive.files.new_directory import temporary_directory
from onnxarchive.files.progress import Progress
from onnxarchive.interop.onnxruntime import (
    COMPARING,
    OPTIMIZED_DATA,
    OPTIMIZED_NBYTES,
    SAVE_PACKED,
    SessionInputs,
    machine,
    require_onnxruntime,
    run_errors,
    set_entries,
)
from onnxarchive.interop.packed_pairs import ranges_of
from onnxarchive.model import model_proto, tensors
from onnxarchive.model.external import is_constant_value
from onnxarchive.model.keys import ASSET_PREFIX
from onnxarchive.model.prepacked import (
    INDEX,
    MAX_INDEX_NBYTES,
    PackedSet,
    PackedWeight,
    WeightId,
    fault_of,
    packable,
)
from onnxarchive.model.walking import MAIN_GRAPH
from onnxarchive.reading.archive import Archive, contents_of, open, with_model
from onnxarchive.remote.location import Location

if TYPE_CHECKING:
    import onnxruntime as ort

_Buffers = dict[str, memoryview]  # packed buffers by file name


def prepack(
    path: str | os.PathLike[str],
    *,
    model: str | None = None,
    sess_options: ort.SessionOptions | None = None,
    copy: bool = False,
    timeout: float | None = locking.TIMEOUT,
    progress: Progress | None = None,
) -> None:
    """Stores the weights as ONNX Runtime packs them, so that sessions run fast and share memory.

    Afterwards `session` and `session_options` (and `link` with `prepack`) tell ONNX Runtime where
    the packed weights are. A session still reads and packs each weight once, compares the result
    with the archive, and then maps the archive's copy. The archive grows by about the size of its
    weights; the packed weights are assets below `onnxruntime/prepacked/`, written in one edit.

    Packed weights fit one version of ONNX Runtime and one kind of machine; ONNX Runtime ignores
    packed weights that do not fit. A second call replaces those of this kind, and keeps others.
    Weights that ONNX Runtime transposes or otherwise changes first are not stored.

    A packed weight is found by name, size and CRC-32 of the weight, in any model. Edits do not
    change or remove packed weights, even if their weight is removed.

    Args:
        path: The archive, a local file. Its directory temporarily needs free space for three times
            the weights; without /proc, if others may write there, the temporary directory needs it.
        model: Id of the only model to pack, such as `"decoder"`; None for all models.
        sess_options: Options of the sessions that will use the weights, such as the level of
            optimization; they are copied. ONNX Runtime cannot copy them for a model that may need
            custom operators.
        copy: Whether to write a new file at `path`, as in `onnxarchive.edit`.
        timeout: As in `onnxarchive.edit`.
        progress: As in `onnxarchive.save`, after ONNX Runtime has packed the weights.

    Raises:
        UnsupportedFeatureError: ONNX Runtime is older than 1.32, the first version that compares
            packed weights with its own; ONNX Runtime cannot load a model or copy `sess_options`; or
            the archive is not a local file.
        ArchiveError: The archive cannot be opened (see `onnxarchive.open`), or was edited while
            ONNX Runtime packed its weights.
        LockedError: The archive stayed locked until `timeout`.
        ValueError: `path` is a symbolic link or has several hard links, and `copy` is false.
        ImportError: ONNX Runtime is not installed.
        OSError: The archive cannot be read or written, the disk has too little space, or (without
            /proc) other users could rename a new directory in either place.

    Example:
        onnxarchive.prepack("model.onnxa")
        session = onnxarchive.session("model.onnxa")
    """
    reason = "the first that compares packed weights with its own"
    version: str = require_onnxruntime(COMPARING, reason).__version__
    options: dict[str, Any] = {"copy": copy, "timeout": timeout}
    path = Location.of(path).require_local()
    with open(path, model=model, timeout=timeout) as archive:
        ids, entries = list(archive.models) if model is None else [model], dict(archive.entries)
    if not copy:
        with edit(path, **options):
            pass  # fails early if the archive cannot be edited
    buffers: _Buffers = {}
    packed: dict[str, dict[str, PackedWeight]] = {}
    unpacked: dict[str, tuple[str, ...]] = {}
    with temporary_directory(path) as directory:
        try:
            with open(path, timeout=timeout) as archive, with_path(path):
                for number, identifier in enumerate(ids):
                    stem = os.path.join(directory.lasting_path(), str(number))
                    packed[identifier], unpacked[identifier] = _pack(
                        with_model(archive, identifier), stem, sess_options, buffers
                    )
                others = {
                    identifier: [*packable(checked, archive.entries).values()]
                    for identifier, checked in contents_of(archive).models.items()
                    if identifier not in packed
                }
            new = PackedSet(version, machine(), packed, unpacked)
            with edit(path, progress=progress, **options) as changes:
                if dict(changes.entries) != entries:
                    raise ArchiveError(
                        "the archive was edited while its weights were packed; try again"
                    )
                _store(changes, new, buffers, others)
        finally:
            buffers.clear()  # Windows removes no mapped file


def _store(
    changes: Edit,
    new: PackedSet,
    buffers: _Buffers,
    others: Mapping[str, Collection[WeightId]],
) -> None:
    """Replaces the packed weights of this kind, except for models that were not packed.

    `others` are the weights of those models.
    """
    assets, folder = changes.assets, new.folder.removeprefix(ASSET_PREFIX)
    entry = changes.entries.get(new.folder + INDEX)
    if entry is not None and entry.nbytes <= MAX_INDEX_NBYTES:
        with contextlib.suppress(ValueError):
            old = PackedSet.of_json(assets[folder + INDEX])
            unpacked = {id: names for id, names in old.unpacked.items() if id in others}
            new = replace(
                new,
                weights={**_packed_before(old, others), **new.weights},
                unpacked={**unpacked, **new.unpacked},
            )
    index = new.to_json()
    if len(index) > MAX_INDEX_NBYTES:
        raise UnsupportedFeatureError(
            f"expected an index of packed weights of at most {MAX_INDEX_NBYTES} bytes, found "
            f"{len(index)}; pack one model with model= (--model)"
        )
    files = new.files
    for path in [path for path in assets if path.startswith(folder)]:
        if path.removeprefix(folder) not in files:
            del assets[path]
    for name, buffer in buffers.items():
        assets[folder + name] = buffer
    if files:
        assets[folder + INDEX] = index


def _packed_before(
    old: PackedSet, models: Mapping[str, Collection[WeightId]]
) -> dict[str, dict[str, PackedWeight]]:
    """The weights in a set that these models have, by the present ids of the models."""
    forms = old.forms()
    packed: dict[str, dict[str, PackedWeight]] = {}
    for identifier, weights in models.items():
        for name, nbytes, crc32 in weights:
            found = forms.get((name, nbytes, crc32))
            if found is not None:
                weight = PackedWeight(nbytes, crc32, found)
                packed.setdefault(identifier, {})[name] = weight
    return packed


def _pack(
    archive: Archive, stem: str, sess_options: ort.SessionOptions | None, buffers: _Buffers
) -> tuple[dict[str, PackedWeight], tuple[str, ...]]:
    """Makes ONNX Runtime pack the weights of a model; returns them by name, and names of others.

    It writes to files whose paths begin with `stem`; `buffers` receives views of the written bytes.
    Weights that it changes before packing have other names in the written model, and are left out.
    """
    found = packable(contents_of(archive).models[archive.model_id], archive.entries).values()
    weights = {name: (nbytes, crc32) for name, nbytes, crc32 in found}
    nbytes = sum(nbytes for nbytes, _ in weights.values())
    require_space(archive.path, 2 * nbytes, os.path.dirname(stem))
    _write_packed(archive, stem, sess_options)
    values = [
        (tensor.name, pair.value)
        for tensor in onnx.load(f"{stem}.onnx", load_external_data=False).graph.initializer
        for pair in tensor.external_data
        if tensor.name in weights and tensors.names_packed(pair)
    ]
    if values:
        with MappedFile(f"{stem}.data") as written:
            data = written.view()
    if os.name != "nt":  # a map keeps the bytes, and a killed process leaves none of them
        for suffix in (".onnx", ".data"):
            Path(f"{stem}{suffix}").unlink(missing_ok=True)
    # By content, since ONNX Runtime writes the packed form of equal weights for one of them.
    forms: dict[tuple[int, int], dict[str, tuple[tuple[str, int], ...]]] = {}
    ranges: dict[str, tuple[int, int]] = {}
    for name, value in values:
        key = value.partition("|")[0]  # contains a hash of the buffers
        stored = {f"{key}.{index}": place for index, place in enumerate(ranges_of(value))}
        ranges |= stored
        forms.setdefault(weights[name], {})[key] = tuple(
            (file, size) for file, (_, size) in stored.items()
        )
    packed = {
        name: PackedWeight(*content, forms[content])
        for name, content in weights.items()
        if content in forms and fault_of(forms[content]) is None
    }
    for weight in packed.values():
        for file, _ in chain.from_iterable(weight.buffers.values()):
            offset, size = ranges[file]
            buffers[file] = data[offset : offset + size]
    return packed, tuple(sorted(weights.keys() - packed.keys()))


def _write_packed(archive: Archive, stem: str, sess_options: ort.SessionOptions | None) -> None:
    """Makes ONNX Runtime write a model with packed weights, to `stem` with `.onnx` and `.data`."""
    with contextlib.ExitStack() as files:
        inputs = SessionInputs(archive, None, sess_options, True, {}, files, uses_packed=False)
    options = inputs.own_options()
    options.optimized_model_filepath = as_location(f"{stem}.onnx")
    options.log_severity_level = 3  # a warning says that the optimized model suits this machine
    file = f"{os.path.basename(stem)}.data"
    set_entries(options, {SAVE_PACKED: "1", OPTIMIZED_DATA: file, OPTIMIZED_NBYTES: "1"})
    model = onnx.ModelProto.FromString(inputs.model)
    _lift_constants(model)
    with run_errors("load", archive.model_id):
        require_onnxruntime().InferenceSession(
            model_proto.encode(model), options, ["CPUExecutionProvider"]
        )


def _lift_constants(model: onnx.ModelProto) -> None:
    """Replaces Constants of the main graph whose values are external by initializers.

    In the model that ONNX Runtime writes, only initializers have packed forms.
    """
    are_lifted = []
    for index, node in enumerate(model.graph.node):
        path = (*MAIN_GRAPH, ("node", index), ("attribute", 0), ("t", None))
        is_constant = len(node.attribute) == 1 and is_constant_value(model, path)
        is_external = is_constant and node.attribute[0].t.data_location == tensors.EXTERNAL
        # ONNX Runtime says what is wrong with another number of outputs or another name.
        has_name = len(node.output) == 1 and isinstance(node.output[0], str)
        are_lifted.append(is_external and has_name)
        if are_lifted[-1]:
            tensor = model.graph.initializer.add()
            tensor.CopyFrom(node.attribute[0].t)
            tensor.name = node.output[0]
    tensors.remove(model.graph.node, are_lifted)
