"""`check_link`: compares a link with its archive."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import onnx

from onnxarchive.archive.opening import open
from onnxarchive.archive.reading import Archive
from onnxarchive.archive.rules import Finding
from onnxarchive.errors import (
    ArchiveFormatError,
    ModelNotFoundError,
    Report,
    shown,
    with_path,
)
from onnxarchive.interop.links import fingerprint, linked_id
from onnxarchive.model import dtypes, proto, tensors, walking
from onnxarchive.model.copying import with_locations
from onnxarchive.model.tensors import TensorRef
from onnxarchive.model.walking import Path
from onnxarchive.storage.files import MappedFile
from onnxarchive.storage.paths import is_below, leads_out

# Fields of a tensor other than its data and the location of its data.
_DESCRIBING_FIELDS: Final = tuple(
    field.name
    for field in onnx.TensorProto.DESCRIPTOR.fields
    if field.name not in (*tensors.DATA_FIELDS, "external_data", "data_location")
)
_SHOWN: Final[Mapping[str, Callable[[Any], str]]] = {
    "dims": lambda dims: str(list(dims[: dtypes.MAX_RANK + 1])),
    "data_type": dtypes.name_of,
}


def check_link(
    path: str | os.PathLike[str], archive: str | os.PathLike[str] | None = None
) -> list[Finding]:
    """Compares a link with its archive.

    In a valid link

    - every external tensor points at the entry of the same tensor in the archive, and has the same
      name, type and shape;
    - every other tensor has the same bytes as in the archive;
    - the rest of the model equals the archive's model;
    - the value of the metadata `onnxarchive.link` is the archive's fingerprint
      (`onnxarchive.interop.links.fingerprint`).

    Large weights are not read; `onnxarchive.check(..., full=True)` compares them with their CRC-32.

    Args:
        path: The link.
        archive: The archive; None for the archive named in the link.

    Returns:
        The faults; an empty list if the link is valid. If the link's archive or model cannot be
        found, the list holds only that fault. The `rule` of a finding is None; its `entry` is the
        key of the faulty tensor, or None.

    Raises:
        ArchiveFormatError: The file of the link holds no model, or the archive breaks a rule.
        ValueError: `archive` is None, and the link names no archive since no tensor is external.
        OSError: The link or the archive cannot be read. If `archive` is None, a missing archive is
            a fault of the link, not an OSError.

    Example:
        onnxarchive.link("model.onnxa", "link.onnx")
        assert onnxarchive.check_link("link.onnx") == []
    """
    model = _parse(path)
    if archive is not None:
        return _findings_in(archive, model, path)
    locations = _locations(model)
    if not locations:
        raise ValueError(
            f"{os.fspath(path)}: the link names no archive, since no tensor is external; give the "
            "archive, too"
        )
    if len(locations) > 1:
        first, other = map(shown, locations[:2])
        found = f"{len(locations)}, such as {first} and {other}"
        return [_finding(f"expected all external data in one file, found it in {found}")]
    named = _beside(path, locations[0])
    if named is None:
        return [_not_beside(locations[0])]
    try:
        return _findings_in(named, model, path)
    except FileNotFoundError:
        return [_finding(f"expected the archive {named}, found no such file")]


def linked_archive(path: str | os.PathLike[str]) -> str | None:
    """The path of a link's archive, or None.

    None means that the link has no external data, or several locations of external data, or a
    location that `_beside` refuses.

    Raises:
        ArchiveFormatError: The file of the link holds no model, or is too large to be a model.
        OSError: The link cannot be read.
    """
    locations = _locations(_parse(path))
    return _beside(path, locations[0]) if len(locations) == 1 else None


class _LinkReport(Report):
    """Raises faults of a link's model without a rule id, since rules apply only to archives."""

    def broken(self, rule: str, message: str, *, entry: str | None = None) -> None:
        raise ArchiveFormatError(message)


def _parse(path: str | os.PathLike[str]) -> onnx.ModelProto:
    with MappedFile(path) as file, with_path(path):
        if file.size >= proto.SIZE_LIMIT:
            raise ArchiveFormatError(
                f"expected a link of less than {proto.SIZE_LIMIT} bytes, the limit of a single "
                f".onnx, found {file.size}"
            )
        model = proto.parse(file.read(0, file.size), _LinkReport())
    assert model is not None  # else `_LinkReport` has raised an error
    return model


def _locations(model: onnx.ModelProto) -> list[str]:
    found = (tensors.location(ref.tensor) for ref in tensors.walk(model))
    return sorted({location for location in found if location is not None})


def _beside(path: str | os.PathLike[str], location: str) -> str | None:
    """The file at a location; None if the location is refused.

    A location is refused if it leads out of the directory of `path`, or if it contains a backslash
    or NUL.
    """
    if {"\0", "\\"} & set(location) or leads_out(location):
        return None
    directory = os.path.dirname(os.fspath(path))
    found = os.path.join(directory, location)
    return found if is_below(os.path.realpath(found), os.path.realpath(directory)) else None


def _finding(message: str, key: str | None = None) -> Finding:
    return Finding(None, key, message)


def _not_beside(location: str) -> Finding:
    return _finding(
        f"expected a location in the link's directory or below it, without '..' or backslashes in "
        f"the location, found {shown(location)}"
    )


def _findings_in(
    path: str | os.PathLike[str], model: onnx.ModelProto, link_path: str | os.PathLike[str]
) -> list[Finding]:
    """Compares the model of a link with an archive; removes the fingerprint from the model."""
    found = proto.take_link_fingerprint(model)
    try:
        archive = open(path, model=linked_id(found))
    except ModelNotFoundError as error:
        return [_finding(f"{error.message}; write a new link")]
    with archive, with_path(path):
        return list(_findings(model, found, link_path, archive))


def _findings(
    model: onnx.ModelProto, found: str | None, link_path: str | os.PathLike[str], archive: Archive
) -> Iterator[Finding]:
    """Compares the model of a link, and the fingerprint found in it, with an archive."""
    if found is None:
        yield _finding(
            f"expected the metadata {proto.LINK_FINGERPRINT!r}, which identifies the archive, "
            "found none; write a new link"
        )
    elif found != fingerprint(archive):
        yield _finding(
            "the archive has changed since it was linked: its tensors have other bytes or "
            "positions; write a new link"
        )
    for location in _locations(model):
        yield from _location_findings(location, link_path, archive)

    refs = {ref.path: ref for ref in tensors.walk(model)}
    originals = {ref.path: ref for ref in tensors.walk(archive.model)}
    keys = {ref.path: key for key, ref in archive._refs.items()}
    compared = [path for path in originals if path in refs]
    for path in compared:
        message = _difference(refs[path], originals[path], keys.get(path), archive)
        if message is not None:
            yield _finding(message, keys.get(path))
    field = _differing_field(_without(compared, model), _without(compared, archive.model))
    if field is not None:
        yield _finding(f"expected the model of the archive, found one with another {field}")


def _location_findings(
    location: str, link_path: str | os.PathLike[str], archive: Archive
) -> Iterator[Finding]:
    file = _beside(link_path, location)
    if file is None:
        yield _not_beside(location)
    elif not archive._local_file.is_at(file):
        yield _finding(f"expected external data in {archive.path}, found it in {file}")
    elif os.path.islink(file) or os.stat(file).st_nlink > 1:
        yield _finding(
            f"expected a file with one name, since onnx reads no external data through symbolic or "
            f"hard links, found a symbolic link or several hard links at {file}"
        )


def _difference(
    ref: TensorRef, original: TensorRef, key: str | None, archive: Archive
) -> str | None:
    """Describes how a tensor of a link differs from the archive's tensor; None if equal."""
    tensor = ref.tensor
    for field in _DESCRIBING_FIELDS:
        expected, found = getattr(original.tensor, field), getattr(tensor, field)
        if expected != found:
            form = _SHOWN.get(field, repr)
            return f"{original}: expected {field} {form(expected)}, found {form(found)}"
    is_external = tensor.data_location == tensors.EXTERNAL
    if key is None:
        if is_external:
            return (
                f"{original}: expected internal data in the linked model, as in the archive's "
                "model, found external data"
            )
        is_same = tensor == original.tensor
        return None if is_same else f"{original}: expected the archive's data, found other data"
    fault = tensors.misplaced(tensor)
    if fault is not None:
        return f"{original}: {fault}"
    entry, data = archive.entries[key], archive.read(key)  # also checks the local header
    try:
        if not is_external:
            is_same = tensors.raw_data(ref) == data
            return None if is_same else f"{original}: expected the bytes of its entry, found others"
        reference = tensors.external_data(ref, Report())
    except ArchiveFormatError as error:
        return error.message
    assert reference is not None  # else `Report` has raised an error
    if (reference.offset or 0, reference.length) == (entry.data_offset, entry.nbytes):
        return None
    return (
        f"{original}: expected offset {entry.data_offset} and length {entry.nbytes} of its entry, "
        f"found {reference.offset} and {reference.length}"
    )


def _without(tensor_paths: Iterable[Path], model: onnx.ModelProto) -> onnx.ModelProto:
    """Copies a model; the copy has no link fingerprint, and empty tensors at `tensor_paths`."""
    copy = with_locations(model, dict.fromkeys(tensor_paths, ""))
    for path in tensor_paths:
        walking.at(copy, path).Clear()
    proto.take_link_fingerprint(copy)
    return copy


def _differing_field(one: onnx.ModelProto, other: onnx.ModelProto) -> str | None:
    """The first field in which two models, or their graphs, differ; None if they are equal."""
    if one == other:
        return None
    parts: list[tuple[str, Any, Any]] = [("graph.", one.graph, other.graph), ("", one, other)]
    for prefix, part, other_part in parts:
        for field in part.DESCRIPTOR.fields:
            if getattr(part, field.name) != getattr(other_part, field.name):
                return f"{prefix}{field.name}"
    return "field"
