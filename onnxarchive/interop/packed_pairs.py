"""Pairs in `external_data` that lead ONNX Runtime to the packed weights in an archive."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Final

from onnxarchive.errors import ArchiveFormatError
from onnxarchive.model.prepacked import Forms, WeightId, packable, packed_sets, warn_of_sets
from onnxarchive.reading.archive import Archive, with_model
from onnxarchive.reading.linked_models import Pairs

_PLACE: Final = re.compile(r"\|([0-9]{1,19});([0-9]{1,19});")


def packed_pairs(
    archive: Archive, models: Iterable[str], machine: str, version: str = ""
) -> dict[str, Pairs]:
    """The pairs for `external_data` by key that lead ONNX Runtime to packed weights, by model id.

    They are those of the version of ONNX Runtime that will read the pairs, if it is known, or else
    of the last other one. The archive is in a local file. A model without packed weights is left
    out.
    """
    pairs: dict[str, Pairs] = {}
    left = set(models)
    faults: list[str] = []
    for packed in packed_sets(archive.entries, archive.read, faults, machine, version):
        found = left & packed.weights.keys()
        place = cache(partial(_place, archive, packed.folder))
        for model in found:
            pairs[model] = _pairs(with_model(archive, model), packed.forms(model), place)
        left -= found
        if not left:
            break
    warn_of_sets(archive.path, faults)
    return pairs


def _pairs(
    archive: Archive,
    forms: Mapping[WeightId, Forms],
    place: Callable[[str, int], tuple[int, int] | None],
) -> Pairs:
    pairs: dict[str, list[tuple[str, str]]] = {}
    for key, weight in packable(archive.contents.models[archive.model_id], archive.entries).items():
        values = []
        for form, buffers in forms.get(weight, {}).items():
            ranges = [place(file, nbytes) for file, nbytes in buffers]
            if None not in ranges:
                values.append(_pair_value(form, filter(None, ranges)))
        if values:
            pairs[key] = [(f"prepacked_{index}", value) for index, value in enumerate(values)]
    return pairs


def _place(archive: Archive, folder: str, file: str, nbytes: int) -> tuple[int, int] | None:
    """Offset and size of a packed buffer in the archive; None if it is not as the index says."""
    name = folder + file
    entry = archive.entries.get(name)
    if entry is not None and entry.nbytes == nbytes:
        with contextlib.suppress(ArchiveFormatError):  # `check` names a damaged header
            archive.contents.require_header(name)
            return entry.data_offset, nbytes
    return None


def _pair_value(key: str, ranges: Iterable[tuple[int, int]]) -> str:
    """The value of a pair in `external_data` that names packed weights.

    They have a key of ONNX Runtime; the ranges are offset and size of each buffer in bytes.
    """
    return "|".join([key, *(f"{offset};{nbytes};0" for offset, nbytes in ranges)])


def ranges_of(value: str) -> list[tuple[int, int]]:
    """Offset and size of each buffer that the value of a pair names; see `_pair_value`."""
    return [(int(offset), int(nbytes)) for offset, nbytes in _PLACE.findall(value)]
