"""Differences of two archives: graph, tensors, assets, and the other fields of their models.

Tensors and assets are compared by size and CRC-32; with `full`, also by bytes. Models are compared
as copies, in which each tensor except string tensors has its size and CRC-32 in place of data and
location. So keys are not compared.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from operator import ne
from typing import Any, Final, TypeAlias, Unpack

import onnx

from onnxarchive.comparing.changes import Change, field_changes, list_changes, value_changes
from onnxarchive.errors import ArchiveFormatError
from onnxarchive.files.data import crc32 as checksum
from onnxarchive.files.progress import Progress, ProgressCounter
from onnxarchive.model import tensors
from onnxarchive.model.copying import with_locations
from onnxarchive.model.keys import ASSET_PREFIX
from onnxarchive.model.tensors import TensorRef, text
from onnxarchive.model.walking import Path, below
from onnxarchive.model.wording import describe
from onnxarchive.reading.archive import Archive, contents_of, read_archive
from onnxarchive.reading.archive_file import opened
from onnxarchive.remote.location import Access, Location, Openable

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
    """The differences of two archives.

    Attributes:
        path: Path of the first archive.
        other: Path of the other archive.
        sections: The changes by section: `"nodes"`, `"inputs"`, `"outputs"`, `"values"`
            (`value_info`) and `"tensors"` (initializers) of the main graph; `"opsets"`,
            `"metadata"`, `"functions"` and `"training"` of the model; `"fields"`, other fields of
            graph and model. If all models were compared, `"models"` lists models that only one
            archive has, `"assets"` lists changed assets, and the sections of further models begin
            with the id: `"decoder/nodes"`. Additions come last, except in `"fields"`. A change
            within a node, such as in a tensor of a subgraph, is a change of the node.

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
    stack_traces: bool = False,
    progress: Progress | None = None,
    **access: Unpack[Access],
) -> Difference:
    """Compares the models, weights and assets of two archives.

    Unless `full` is True, no weight is read: large tensors are compared by size and by the CRC-32
    in the central directory. Nodes are matched by name, or by first output if they have no name.
    The order of nodes, attributes and initializers does not matter, nor do keys and offsets.

    Args:
        path: An archive, as in `onnxarchive.open`.
        other: Another archive.
        model: Id of the only model to compare, such as `"decoder"`; `""` for the default one. None
            compares all models by id, and the assets.
        full: Whether to compare the bytes of both archives, too. `diff` verifies the CRC-32s of
            models; `Archive.verify` verifies all data.
        stack_traces: Whether to compare the stack traces that exporters store in nodes' metadata.
        progress: If `full`, called with the bytes done and the bytes in all; True shows a bar.
        access: Options for remote archives; see `onnxarchive.open`.

    Returns:
        The differences; `is_same` is True if there are none.

    Raises:
        ArchiveFormatError: One of the files is not an archive, or breaks a rule.
        ChecksumError: The bytes of a model do not match their CRC-32.
        ModelNotFoundError: An archive has no model of this id.
        OSError: A file cannot be opened or read.

    Example:
        for section, changes in onnxarchive.diff("model.onnxa", "other.onnxa").sections.items():
            print(section, [(change.kind, change.name) for change in changes])
    """
    locations = Location.of(path, **access), Location.of(other, **access)
    with _open(locations[0], model) as one, _open(locations[1], model) as two:
        archives = one, two
        ids = [id for id in one.models if id in two.models] if model is None else [model]
        contents = [_contents(archive, ids, has_assets=model is None) for archive in archives]
        if full:
            _compare_bytes(_distinct(contents[0]), _distinct(contents[1]), progress)
        sections: dict[str, tuple[Change, ...]] = {}
        for id in ids:
            models = [
                _described_model(archive.models[id], each[id], stack_traces)
                for archive, each in zip(archives, contents, strict=True)
            ]
            prefix = f"{id}/" if id and model is None else ""
            changes = _model_changes(*models)
            sections |= {prefix + section: changes[section] for section in changes}
        if model is None:
            unmatched = [
                {id: describe(archive.models[id].graph) for id in archive.models if id not in ids}
                for archive in archives
            ]
            assets = [{path: str(each[None][path]) for path in each[None]} for each in contents]
            sections["models"] = _text_changes(*unmatched)
            sections["assets"] = _text_changes(*assets)
        return Difference(one.path, two.path, sections)


def _open(location: Location, model: str | None) -> Archive:
    """Opens an archive, without downloading it into a cache."""
    with opened(location) as file:
        return read_archive(file, model)


def _text_changes(texts: Mapping[str, str], others: Mapping[str, str]) -> tuple[Change, ...]:
    """The changes between the descriptions of two archives' models or assets, by name."""
    names = [name for name in {**texts, **others} if texts.get(name) != others.get(name)]
    return tuple(Change(name, texts.get(name), others.get(name)) for name in names)


@dataclass(slots=True)
class _Content:
    """Bytes of a tensor or asset.

    `sha256` is set only if `_compare_bytes` found other bytes with the same size and CRC-32.
    """

    nbytes: int
    crc32: int
    pieces: Callable[[], Iterator[bytes]]
    sha256: str | None = None

    def __str__(self) -> str:
        sha256 = "" if self.sha256 is None else f", SHA-256 {self.sha256}"
        return f"{self.nbytes:,} bytes, CRC-32 {self.crc32:#010x}{sha256}"


# The contents of the tensors of each model by path, except strings, by model id; the contents of
# assets by name with the id None.
_Contents: TypeAlias = dict[str | None, dict[Any, _Content]]


def _contents(archive: Archive, ids: Iterable[str], *, has_assets: bool) -> _Contents:
    @cache
    def entry_content(name: str) -> _Content:
        entry = archive.entries[name]
        return _Content(entry.nbytes, entry.crc32, partial(_entry_pieces, archive, name))

    assets = archive.assets if has_assets else ()
    by_id: _Contents = {None: {name: entry_content(ASSET_PREFIX + name) for name in assets}}
    for id in ids:
        contents = by_id[id] = {}
        keys = {ref.path: key for key, ref in contents_of(archive).models[id].refs.items()}
        for ref in tensors.walk(archive.models[id]):
            if ref.path in keys:
                contents[ref.path] = entry_content(keys[ref.path])
            elif tensors.stored_type(ref.tensor) is not None:
                with contextlib.suppress(ArchiveFormatError):  # too few or too many bytes
                    data = tensors.raw_data(ref)
                    pieces = partial(_inner_pieces, ref)
                    contents[ref.path] = _Content(data.nbytes, checksum(data), pieces)
    return by_id


def _distinct(by_id: _Contents) -> Collection[_Content]:
    """All contents; those that several models share occur once."""
    return {id(each): each for group in by_id.values() for each in group.values()}.values()


def _entry_pieces(archive: Archive, name: str) -> Iterator[bytes]:
    entry = archive.entries[name]
    # Reading 0 bytes of a remote file begins a stream at the local header.
    next(iter(contents_of(archive).file.pieces(entry.header_offset, 0)), None)
    contents_of(archive).require_header(name)
    end = entry.data_offset + entry.nbytes
    for offset in range(entry.data_offset, end, _PIECE_SIZE):
        nbytes = min(_PIECE_SIZE, end - offset)
        piece = contents_of(archive).file.read(offset, nbytes)
        if len(piece) != nbytes:
            raise ArchiveFormatError(
                f"expected {nbytes} bytes at offset {offset}, found a file truncated to "
                f"{offset + len(piece)} bytes",
                path=archive.path,
            )
        yield piece


def _inner_pieces(ref: TensorRef) -> Iterator[bytes]:
    data = tensors.raw_data(ref)
    for offset in range(0, data.nbytes, _PIECE_SIZE):
        yield bytes(data[offset : offset + _PIECE_SIZE])


def _compare_bytes(
    contents: Collection[_Content], others: Collection[_Content], progress: Progress | None
) -> None:
    """Compares bytes where size and CRC-32 are equal.

    All contents of one size and CRC-32 are compared with the first such content. `sha256` is set
    for every content whose bytes differ from those of the first.
    """
    keys = ({(content.nbytes, content.crc32) for content in all} for all in (contents, others))
    common = set.intersection(*keys)
    firsts: dict[tuple[int, int], _Content] = {}
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
    model: onnx.ModelProto, contents: Mapping[Path, _Content], stack_traces: bool
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
