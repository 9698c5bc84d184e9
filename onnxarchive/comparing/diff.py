"""Differences of two archives or models: graph, tensors, assets, and the models' other fields.

Tensors and assets are compared by size and CRC-32; with `full`, also by bytes. Models are compared
as copies. In a copy, each tensor except string tensors has its size and CRC-32 instead of data and
location. So keys are not compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from operator import ne
from typing import Final, Unpack

import onnx

from onnxarchive.comparing.changes import Change, field_changes, list_changes, value_changes
from onnxarchive.comparing.sides import Digest, DigestsById, open_side
from onnxarchive.comparing.values import compare_values
from onnxarchive.files.progress import Progress, ProgressCounter
from onnxarchive.model import tensors
from onnxarchive.model.copying import with_locations
from onnxarchive.model.tensors import TensorRef, text
from onnxarchive.model.walking import Path, below
from onnxarchive.model.wording import describe
from onnxarchive.remote.location import Access, Location, Openable, require_no_digest

_PIECE_SIZE: Final = 2 << 20  # bytes that are compared at a time
_STACK_TRACE: Final = "stack_trace"  # end of metadata keys, as in pkg.torch.onnx.stack_trace
# Fields by section.
_OF_GRAPH: Final = {
    "nodes": "node",
    "inputs": "input",
    "outputs": "output",
    "values": "value_info",
    "tensors": "initializer",
}
_OF_MODEL: Final = {
    "opsets": "opset_import",
    "metadata": "metadata_props",
    "functions": "functions",
    "training": "training_info",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """The differences of two archives or models.

    Attributes:
        path: Path of the first one.
        other: Path of the other one.
        sections: The changes by section: `"nodes"`, `"inputs"`, `"outputs"`, `"values"`
            (`value_info`) and `"tensors"` (initializers) of the main graph; `"opsets"`,
            `"metadata"`, `"functions"` and `"training"` of the model; `"fields"`, other fields of
            graph and model. If all models were compared, `"models"` lists models that only one
            archive has, `"assets"` lists changed assets (if both are archives), and the sections of
            further models begin with the id: `"decoder/nodes"`. Additions are last, except in
            `"fields"`. A change within a node, such as in a tensor of a subgraph, is a change of
            the node.

    Example:
        difference = onnxarchive.diff("model.onnxa", "other.onnxa")
        print(difference.is_same, list(difference.sections))
    """

    path: str
    other: str
    sections: Mapping[str, tuple[Change, ...]]

    @property
    def is_same(self) -> bool:
        """True if there is no difference."""
        return not any(self.sections.values())


def diff(
    path: Openable,
    other: Openable,
    *,
    model: str | None = None,
    full: bool = False,
    values: bool = False,
    stack_traces: bool = False,
    progress: Progress | None = None,
    **access: Unpack[Access],
) -> Difference:
    """Compares the models, weights and assets of two archives, or of sources of `convert`.

    Unless `full` is True, no weight of an archive is read: large tensors are compared by size and
    by the CRC-32 in the central directory. Another source, such as a `.onnx` with external data, is
    read once to compute CRC-32s. Assets are compared if both sources are archives.

    Nodes are matched by name, or by first output if they have no name. The order of nodes,
    attributes and initializers does not matter, nor do keys and offsets.

    Args:
        path: An archive, as in `onnxarchive.open`, or a source of `onnxarchive.convert`.
        other: Another one.
        model: Id of the only model to compare, such as `"decoder"`; `""` for the default one. None
            compares all models by id, and the assets.
        full: Whether to also compare the bytes of both archives. `diff` verifies the CRC-32s of
            models; `Archive.verify` verifies all data.
        values: Whether to read the tensors that differ and have the same shape, and to say in
            `Change.values` by how much. Initializers of main graphs are compared, in pieces.
        stack_traces: Whether to compare the stack traces that exporters store in nodes' metadata.
        progress: With `full`, as in `onnxarchive.save`.
        access: Options for remote archives, as in `onnxarchive.open`.

    Returns:
        The differences; `is_same` is True if there are none.

    Raises:
        ArchiveFormatError: One of the files is neither an archive nor a model, or breaks a rule.
        ChecksumError: The bytes of a model do not match their CRC-32.
        ModelNotFoundError: An archive has no model of this id.
        OSError: A file cannot be opened or read.

    Example:
        for section, changes in onnxarchive.diff("model.onnxa", "other.onnxa").sections.items():
            print(section, [(change.kind, change.name) for change in changes])
    """
    require_no_digest(access)
    locations = Location.of(path, **access), Location.of(other, **access)
    with contextlib.ExitStack() as resources:
        one, two = (open_side(location, model, resources) for location in locations)
        ids = [id for id in one.models if id in two.models] if model is None else [model]
        has_assets = model is None and one.is_archive and two.is_archive
        contents = [side.contents(ids, has_assets) for side in (one, two)]
        if full:
            _compare_bytes(_distinct(contents[0]), _distinct(contents[1]), progress)
        sections: dict[str, tuple[Change, ...]] = {}
        for id in ids:
            models = [
                _described_model(side.models[id], each[id], stack_traces)
                for side, each in zip((one, two), contents, strict=True)
            ]
            prefix = f"{id}/" if id and model is None else ""
            changes = _model_changes(*models)
            if values:
                named = [
                    _by_name(side.models[id], each[id])
                    for side, each in zip((one, two), contents, strict=True)
                ]
                changes["tensors"] = tuple(
                    _with_values(change, named[0], named[1]) for change in changes["tensors"]
                )
            sections |= {prefix + section: changes[section] for section in changes}
        if model is None:
            unmatched = [
                {id: describe(side.models[id].graph) for id in side.models if id not in ids}
                for side in (one, two)
            ]
            assets = [{path: str(each[None][path]) for path in each[None]} for each in contents]
            sections["models"] = _text_changes(*unmatched)
            if has_assets:
                sections["assets"] = _text_changes(*assets)
        return Difference(one.path, two.path, sections)


def _by_name(
    model: onnx.ModelProto, contents: Mapping[Path, Digest]
) -> dict[str, tuple[TensorRef, Digest]]:
    """The initializers of the main graph whose names are unique, with their contents."""
    initializers = model.graph.initializer
    counts = Counter(tensor.name for tensor in initializers)
    refs = (tensors.main_initializer(tensor, at) for at, tensor in enumerate(initializers))
    return {
        ref.name: (ref, contents[ref.path])
        for ref in refs
        if counts[ref.tensor.name] == 1 and ref.path in contents
    }


def _with_values(
    change: Change,
    ones: Mapping[str, tuple[TensorRef, Digest]],
    others: Mapping[str, tuple[TensorRef, Digest]],
) -> Change:
    """A change of an initializer with `values`, if the shape is the same."""
    if change.name not in ones or change.name not in others:
        return change
    (ref, content), (other, other_content) = ones[change.name], others[change.name]
    data_type, other_type = tensors.stored_type(ref.tensor), tensors.stored_type(other.tensor)
    if data_type is None or other_type is None or ref.tensor.dims != other.tensor.dims:
        return change
    types, elements = (data_type, other_type), math.prod(ref.tensor.dims)
    compared = compare_values(content.pieces(), other_content.pieces(), types, elements)
    return replace(change, values=compared)


def _text_changes(texts: Mapping[str, str], others: Mapping[str, str]) -> tuple[Change, ...]:
    """The changes between the descriptions of two archives' models or assets, by name."""
    names = [name for name in {**texts, **others} if texts.get(name) != others.get(name)]
    return tuple(Change(name, texts.get(name), others.get(name)) for name in names)


def _distinct(by_id: DigestsById) -> Collection[Digest]:
    """All contents; those that several models share occur once."""
    return {id(each): each for group in by_id.values() for each in group.values()}.values()


def _compare_bytes(
    contents: Collection[Digest], others: Collection[Digest], progress: Progress | None
) -> None:
    """Compares bytes if size and CRC-32 are equal.

    All contents of one size and CRC-32 are compared with the first such content. `sha256` is set
    for every content whose bytes differ from those of the first.
    """
    keys = ({(content.nbytes, content.crc32) for content in all} for all in (contents, others))
    common = set.intersection(*keys)
    firsts: dict[tuple[int, int], Digest] = {}
    pairs = []
    for content in (*contents, *others):
        key = content.nbytes, content.crc32
        if key in common and firsts.setdefault(key, content) is not content:
            pairs.append((firsts[key], content))
    counter = ProgressCounter(progress, sum(content.nbytes for _, content in pairs))
    for first, content in pairs:
        if sum(map(ne, counter(content.pieces()), first.pieces())):
            sha256 = hashlib.sha256()
            for piece in content.pieces():
                sha256.update(piece)
            content.sha256 = sha256.hexdigest()


def _described_model(
    model: onnx.ModelProto, contents: Mapping[Path, Digest], stack_traces: bool
) -> onnx.ModelProto:
    """Copies a model; size and CRC-32 of each tensor in `contents` become the tensor's location.

    Without `stack_traces`, those in the metadata of nodes are left out.
    """
    copy = with_locations(model, {path: str(content) for path, content in contents.items()})
    for _, node in () if stack_traces else below(copy, (), onnx.NodeProto.DESCRIPTOR):
        metadata = node.metadata_props  # type: ignore[attr-defined]
        tensors.remove(metadata, [text(pair.key).endswith(_STACK_TRACE) for pair in metadata])
    return copy


def _model_changes(one: onnx.ModelProto, other: onnx.ModelProto) -> dict[str, tuple[Change, ...]]:
    """The changes between two models by section; clears the fields that have a section."""
    sections = {}
    fields: list[Change] = []
    for kind in ("input", "output"):
        names = [[value.name for value in getattr(model.graph, kind)] for model in (one, other)]
        if Counter(names[0]) == Counter(names[1]):
            fields += value_changes(f"graph: order of {kind}s", *names)
    for lists, messages in ((_OF_GRAPH, (one.graph, other.graph)), (_OF_MODEL, (one, other))):
        for section, field in lists.items():
            sections[section] = (*list_changes(field, *messages),)
            for message in messages:
                message.ClearField(field)
    fields += field_changes(one, other)
    return {**sections, "fields": tuple(fields)}
