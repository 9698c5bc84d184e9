"""The model of an archive with its large tensors as external data in one file.

The file is the archive itself for `link`, sessions, the checker, shape inference and `transform`,
and a data file for `export`. So all of them keep the same tensors in the model.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import onnx

from onnxarchive.errors import UnsupportedFeatureError
from onnxarchive.files.paths import in_utf8
from onnxarchive.model import model_proto, tensors, walking
from onnxarchive.model.copying import copied
from onnxarchive.model.external import StaysOutside, stays_outside
from onnxarchive.model.keys import model_entry
from onnxarchive.reading.archive import Archive, contents_of

# Pairs for the `external_data` of tensors, by key of their entry.
Pairs: TypeAlias = Mapping[str, Sequence[tuple[str, str]]]


def with_external_data(
    archive: Archive,
    location: str | None,
    is_outside: StaysOutside | None = None,
    *,
    offsets: Mapping[str, int] | None = None,
    pairs: Pairs | None = None,
    in_place: bool = False,
) -> onnx.ModelProto:
    """The model of an archive with its large tensors as external data in one file.

    Compares local headers with the central directory. Reads and verifies the tensors that become
    part of the model, and no others.

    Args:
        archive: The archive.
        location: Location of the file for `external_data`. None keeps the keys as locations, and
            does not compare the local headers of external tensors.
        is_outside: Called for each tensor outside the archive's model; True if the tensor becomes
            external data. None for `stays_outside`.
        offsets: The offsets of the external tensors in another file than the archive, by key; the
            local headers of these tensors are not compared. None for the archive itself.
        pairs: Further pairs for `external_data` by key, such as those about packed weights.
        in_place: Whether to change and return `archive.model` instead of a copy.

    Raises:
        UnsupportedFeatureError: The model would take 2 GiB or more.
    """
    model = archive.model if in_place else copied(archive.model)
    is_outside = is_outside or stays_outside(archive.model)
    inner: list[tuple[str, onnx.TensorProto]] = []
    nbytes = archive.entries[model_entry(archive.model_id)].nbytes
    for key in stored_keys(archive):
        ref, entry = archive.tensors.refs[key], archive.entries[key]
        tensor = ref.tensor if in_place else walking.at(model, ref.path)
        if not is_outside(ref, entry.nbytes):
            inner.append((entry.name, tensor))
            nbytes += entry.nbytes
            continue
        if location is not None:
            if offsets is None:
                contents_of(archive).require_header(entry.name)
            offset = entry.data_offset if offsets is None else offsets[entry.name]
            tensors.set_location(tensor, location, offset=offset, length=entry.nbytes)
            for name, value in pairs.get(entry.name, ()) if pairs else ():
                tensor.external_data.add(key=name, value=value)
    if nbytes >= model_proto.SIZE_LIMIT:
        raise UnsupportedFeatureError(
            f"expected less than {model_proto.SIZE_LIMIT} bytes, the limit of a single .onnx, for "
            "the model and the tensors that runtimes do not read from external data, found "
            f"{nbytes} bytes"
        )
    read = contents_of(archive).verified([key for key, _ in inner])
    for (_, tensor), data in zip(inner, read, strict=True):
        tensors.set_raw_data(tensor, bytes(data))
    return model


def stored_keys(archive: Archive) -> list[str]:
    """The keys of the model's tensors in archive order.

    The time does not grow with the entries of other models.
    """
    return sorted(archive.tensors.refs, key=archive.entries.index_of.__getitem__)


def as_location(path: str) -> str:
    """The location of a path in external data, with the bytes of the path.

    A path that is not UTF-8 is refused with a ValueError, since a model's strings must be UTF-8.
    """
    try:
        location = in_utf8(path)
        location.encode()
    except UnicodeEncodeError:
        encoding = sys.getfilesystemencoding()
        hint = "" if encoding == "utf-8" else f"; the locale's encoding is {encoding}"
        raise ValueError(f"expected a path in UTF-8, found {path!r}{hint}; rename it") from None
    return location
