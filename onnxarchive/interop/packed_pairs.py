"""Pairs in `external_data` that lead ONNX Runtime to the packed weights in an archive."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Final

from onnxarchive.conversion.linked_models import Pairs
from onnxarchive.errors import ArchiveFormatError
from onnxarchive.model.prepacked import Forms, WeightId, packable, packed_sets, warn_of_sets
from onnxarchive.reading.archive import Archive, contents_of

_PLACE: Final = re.compile(r"\|([0-9]{1,19});([0-9]{1,19});")


def packed_pairs(
    archive: Archive, models: Iterable[str], machine: str, version: str = ""
) -> dict[str, Pairs]:
    """The pairs for `external_data` by key that lead ONNX Runtime to packed weights, by model id.

    A weight is looked up by name, size and CRC-32, whichever model had it when it was packed. A
    model uses the packed weights of the version of ONNX Runtime that will read the pairs, if this
    version is known and packed any of them; otherwise those of the last other version. The archive
    is in a local file. A model without packed weights is left out.
    """
    left = set(models)
    wanted: dict[WeightId, list[tuple[str, str]]] | None = None
    pairs: dict[str, dict[str, Sequence[tuple[str, str]]]] = {}
    faults: list[str] = []
    for packed in packed_sets(archive.entries, archive.read, faults, machine, version):
        if wanted is None:  # most archives have no set
            wanted = _users(archive, sorted(left))
        place = cache(partial(_place, archive, packed.folder))
        for weight, forms in packed.forms().items():
            own = _pairs(forms, place) if weight in wanted else []
            if own:
                for model, key in wanted.pop(weight):
                    if model in left:
                        pairs.setdefault(model, {})[key] = own
        left -= pairs.keys()
        if not left:
            break
    warn_of_sets(archive.path, faults)
    return {**pairs}


def _users(archive: Archive, models: Iterable[str]) -> dict[WeightId, list[tuple[str, str]]]:
    """For each weight of these models, the ids of models that have it, each with the key there."""
    users: dict[WeightId, list[tuple[str, str]]] = {}
    for model in models:
        weights = packable(contents_of(archive).models[model], archive.entries)
        for key, weight in weights.items():
            users.setdefault(weight, []).append((model, key))
    return users


def _pairs(
    forms: Forms, place: Callable[[str, int], tuple[int, int] | None]
) -> list[tuple[str, str]]:
    """The pairs of a weight for those of its packed forms whose buffers are in the archive."""
    values = []
    for form, buffers in forms.items():
        ranges = [place(file, nbytes) for file, nbytes in buffers]
        if None not in ranges:
            values.append(_pair_value(form, filter(None, ranges)))
    return [(f"prepacked_{index}", value) for index, value in enumerate(values)]


def _place(archive: Archive, folder: str, file: str, nbytes: int) -> tuple[int, int] | None:
    """Offset and size of a packed buffer in the archive; None if it does not match the index."""
    name = folder + file
    entry = archive.entries.get(name)
    if entry is not None and entry.nbytes == nbytes:
        with contextlib.suppress(ArchiveFormatError):  # `check` names a damaged header
            contents_of(archive).require_header(name)
            return entry.data_offset, nbytes
    return None


def _pair_value(key: str, ranges: Iterable[tuple[int, int]]) -> str:
    """The value of a pair in `external_data` that names packed weights.

    It has ONNX Runtime's key of the packed form, and offset and size of each buffer in bytes.
    """
    return "|".join([key, *(f"{offset};{nbytes};0" for offset, nbytes in ranges)])


def ranges_of(value: str) -> list[tuple[int, int]]:
    """Offset and size of each buffer that the value of a pair names; see `_pair_value`."""
    return [(int(offset), int(nbytes)) for offset, nbytes in _PLACE.findall(value)]
