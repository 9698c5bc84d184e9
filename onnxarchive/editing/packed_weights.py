"""Packed weights in an edit: those that no longer belong to a weight are dropped."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from onnxarchive.files.checksums import Crc32, crc32
from onnxarchive.model import tensors
from onnxarchive.model.keys import ASSET_PREFIX
from onnxarchive.model.prepacked import INDEX, PREFIX, PackedSet, PackedWeight
from onnxarchive.reading.linked_models import packed_sets
from onnxarchive.writing.plan import open_assets

if TYPE_CHECKING:
    from onnxarchive.editing.changes import Draft
    from onnxarchive.reading.archive import Archive
    from onnxarchive.writing.plan import Item


def with_packed_weights(
    archive: Archive, drafts: Mapping[str, Draft], assets: Mapping[str, Item | None]
) -> dict[str, Item | None]:
    """The changes of assets, among them those of packed weights that the edit makes necessary.

    Packed weights stay while a model has an initializer of their name with the same bytes.

    Args:
        archive: The archive as it was.
        drafts: Every model of the edited archive, by id.
        assets: The new entry of each assigned asset, by name; None for a deleted one.
    """
    changed = dict(assets)
    are_same = drafts.keys() == {*archive.models} and all(
        id == it.origin and it.message is None and not it.elements for id, it in drafts.items()
    )
    # Packed weights that the edit assigns are those of the models as they were.
    if are_same or any(name.startswith(PREFIX) for name in assets):
        return changed
    for found in packed_sets(archive):
        index = found.folder + INDEX
        remaining = _remaining(archive, drafts, found)
        if remaining == found:
            continue
        for file in found.files.keys() - remaining.files.keys():
            changed[found.folder + file] = None
        changed[index] = None
        if remaining.files:
            content = {index.removeprefix(ASSET_PREFIX): remaining.to_json()}
            changed |= {item.name: item for item in open_assets(content)}
    return changed


def _remaining(archive: Archive, drafts: Mapping[str, Draft], found: PackedSet) -> PackedSet:
    """The part of a set that belongs to the edited models, under their new ids."""
    weights: dict[str, Mapping[str, PackedWeight]] = {}
    unpacked: dict[str, tuple[str, ...]] = {}
    for identifier, draft in sorted(drafts.items()):
        if draft.origin is None or draft.origin not in found.weights:
            continue
        packed = found.weights[draft.origin]
        if draft.message is not None or draft.elements:
            contents = dict(_contents(archive, draft, packed))
            packed = {
                name: weight
                for name, weight in packed.items()
                if contents.get(name) == (weight.nbytes, weight.crc32)
            }
        weights[identifier] = packed
        if draft.origin in found.unpacked:
            unpacked[identifier] = found.unpacked[draft.origin]
    return replace(found, weights=weights, unpacked=unpacked)


def _contents(
    archive: Archive, draft: Draft, names: Container[str]
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yields the names of initializers, each with size in bytes and CRC-32, as far as known."""
    model = archive.models[draft.origin or ""] if draft.message is None else draft.message
    for tensor in model.graph.initializer:
        if tensor.name not in names:
            continue
        given = draft.elements.get(tensor.name)
        key = tensors.location(tensor)
        if given is not None:
            yield tensor.name, (given.data.nbytes, Crc32.of(given.data).value)
        elif key is not None and key in archive.entries:
            entry = archive.entries[key]
            yield tensor.name, (entry.nbytes, entry.crc32)
        elif tensor.raw_data:
            yield tensor.name, (len(tensor.raw_data), crc32(tensor.raw_data))
