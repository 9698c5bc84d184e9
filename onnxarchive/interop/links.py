"""Links: a small `.onnx` beside an archive, whose external data points into it.

Tools that know no archives read a link as any model with external data: location, offset and
length of each large tensor are those of its entry. ONNX Runtime sessions of archives are made of
the same model, which `linked_model` gives.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

import onnx

from onnxarchive.archive.opening import open
from onnxarchive.archive.reading import Archive, read_verified
from onnxarchive.archive.rules import Finding
from onnxarchive.errors import (
    ArchiveError,
    ArchiveFormatError,
    Report,
    UnsupportedFeatureError,
    shown,
    with_path,
)
from onnxarchive.model import dtypes, proto, tensors, walking, wire
from onnxarchive.model.copying import with_locations
from onnxarchive.model.keys import MODEL_PROTO
from onnxarchive.model.tensors import TensorRef
from onnxarchive.model.walking import Path
from onnxarchive.storage.files import MappedFile
from onnxarchive.storage.paths import is_below, require_no_input
from onnxarchive.storage.replacement import replacing

_HELD_NBYTES: Final = 1024
_HELD_VECTOR_NBYTES: Final = 1 << 16
_INDEX_TYPES: Final = (onnx.TensorProto.INT32, onnx.TensorProto.INT64)

# What describes a tensor, beside its data and where that is.
_DESCRIBING_FIELDS: Final = tuple(
    field.name
    for field in onnx.TensorProto.DESCRIPTOR.fields
    if field.name not in (*tensors.DATA_FIELDS, "external_data", "data_location")
)
_SHOWN: Final[Mapping[str, Callable[[Any], str]]] = {
    "dims": lambda dims: str(list(dims[: dtypes.MAX_RANK + 1])),
    "data_type": dtypes.name_of,
}

# Tells whether a tensor of so many bytes is left in the archive.
Rule: TypeAlias = Callable[[TensorRef, int], bool]


def is_left_outside(ref: TensorRef, nbytes: int) -> bool:
    """Whether a tensor that an archive stores outside its model is external in a link, too.

    All others are held by the link. They are

    - tensors that may give a shape (`may_give_shape`);
    - tensors of attributes, functions, sparse tensors and training_info. ONNX Runtime 1.24 reads
      neither sparse ones nor the value of a ConstantOfShape from outside, 1.27 not the latter, and
      onnx.load passes over sparse ones. Only convert_attribute puts them outside in an archive.

    What is left are dense initializers of the main graph and of subgraphs, which every tool that
    knows external data reads from outside.

    Args:
        ref: The tensor.
        nbytes: Its size in bytes.
    """
    return ref.is_initializer and not may_give_shape(ref.tensor, nbytes)


def may_give_shape(tensor: onnx.TensorProto, nbytes: int) -> bool:
    """Whether shape inference may need a tensor's values, by its size and type.

    Those are tensors below 1024 bytes, and vectors of INT32 and INT64 below 64 KiB: the shape of a
    Reshape, the parts of a Split. Shape inference does not look for them outside: ONNX Runtime
    stops with "Cannot parse data from external tensors". Those of 0 bytes are among them, on which
    ONNX Runtime from 1.27 stops as well.

    From 64 KiB on a vector counts as a table of weights, whatever takes it. Most operators could
    not take it for a shape, which has a number for each dimension; Split and SplitToSequence could,
    of 8192 parts or more of given sizes, and these stop with that error. Such a model runs from an
    archive that keeps the vector in its model, as a larger `size_threshold` makes it.

    Args:
        tensor: The tensor; its data is not looked at.
        nbytes: Its size in bytes.
    """
    if nbytes >= _HELD_VECTOR_NBYTES:  # as of almost all that are stored outside
        return False
    is_vector = len(tensor.dims) == 1 and tensor.data_type in _INDEX_TYPES
    return is_vector or nbytes < _HELD_NBYTES


def linked_model(
    archive: Archive,
    location: str,
    is_outside: Rule = is_left_outside,
    *,
    is_spent: bool = False,
) -> onnx.ModelProto:
    """The model of an archive with its large tensors as external data in the archive's file.

    Every local header is compared with the directory, and the CRC-32 of what the model holds with
    its bytes; of what stays outside no byte is read.

    Args:
        archive: The archive. Its own model is not changed.
        location: The archive's file as external data names it.
        is_outside: Tells which of the tensors that the archive stores outside stay there.
        is_spent: Whether the archive is used for nothing else any more. Then it is its own model
            that is changed and given, and no copy is made.

    Raises:
        ArchiveFormatError: A local header does not match the directory.
        ChecksumError: Bytes of a tensor that the model is to hold have changed.
        UnsupportedFeatureError: The model would take 2 GiB or more.
        ValueError: The archive is closed.
    """
    model = archive.model
    if not is_spent:
        model = onnx.ModelProto()
        model.CopyFrom(archive.model)
    entries, refs = archive.entries, archive._refs
    encoded_external_data = wire.external_data_encoder(location)
    held: list[tuple[str, onnx.TensorProto]] = []
    nbytes = entries[MODEL_PROTO].nbytes
    for entry in entries.values():
        key = entry.name
        if key not in refs:
            continue
        ref = refs[key]
        tensor = ref.tensor if is_spent else walking.at(model, ref.path)
        if not is_outside(ref, entry.nbytes):
            held.append((key, tensor))
            nbytes += entry.nbytes
            continue
        archive.read(key)  # compares its local header; nothing is read through the map
        # An archive opens only if such a tensor is external and holds no data itself.
        tensor.ClearField("external_data")
        tensor.MergeFromString(encoded_external_data(entry.data_offset, entry.nbytes))
    if nbytes >= proto.SIZE_LIMIT:
        raise UnsupportedFeatureError(
            f"expected less than {proto.SIZE_LIMIT} bytes of model, small tensors, and tensors "
            f"that runtimes do not read from outside (of attributes, functions, sparse tensors), "
            f"which is what a single .onnx holds, found {nbytes}"
        )
    for key, tensor in held:
        tensors.set_raw_data(tensor, bytes(read_verified(archive, key)))
    return model


def real_path(archive: Archive) -> str:
    """Where the file of an open archive is now, without symbolic links.

    An archive may have been renamed since it was opened: on Linux its descriptor knows where to.

    Raises:
        ArchiveError: The path leads to another file by now, or to none.
    """
    for candidate in archive._file.paths():
        if archive._file.is_at(candidate):
            return candidate
    error = ArchiveError(
        "expected the file that was opened, found another in its place or none; open it anew"
    )
    error.path = archive.path
    raise error


def link(path: str | os.PathLike[str], destination: str | os.PathLike[str]) -> None:
    """Writes a small `.onnx` whose external data points into an archive.

    onnx.load, onnx.checker, onnx.shape_inference, ONNX Runtime, onnx_ir, OpenVINO and whatever
    else knows external data read it unchanged; no weight is copied. It fits this one archive: the
    two move together, an archive that is written anew needs a new link, and `check_link` tells
    whether a link still fits. For that it has one entry of metadata more than the model,
    `onnxarchive.link`: the SHA-256 of position, size and CRC-32 of every tensor in the archive.

    Small tensors, and those that tools do not look for outside, are in the link itself
    (`is_left_outside`).

    Args:
        path: The archive.
        destination: The `.onnx`, in the archive's directory or in one above: external data cannot
            be elsewhere. It is replaced if it exists.

    Raises:
        ArchiveFormatError: The archive breaks a rule.
        ChecksumError: Bytes of a tensor that the link is to hold have changed.
        UnsupportedFeatureError: The link would take 2 GiB or more.
        ValueError: `destination` is the archive itself or a symbolic link, or the archive does not
            lie in its directory or below, or has a name that external data cannot have.
        OSError: The archive cannot be read, or the link not written.

    Warns:
        UserWarning: The archive's file has several names (hard links), which onnx.checker and
            onnx.load refuse.
    """
    require_no_input(destination, [os.fspath(path)])
    if os.path.islink(destination):
        raise ValueError(
            f"expected a destination that is no symbolic link, since tools look for external data "
            f"beside the name that they are given, found {os.fspath(destination)}"
        )
    with open(path) as archive, with_path(path):
        file = real_path(archive)
        model = linked_model(archive, _location(file, destination))
        proto.take_link_fingerprint(model)
        model.metadata_props.add(key=proto.LINK_FINGERPRINT, value=fingerprint(archive))
        serialized = proto.serialize(model)
        with replacing(destination) as replacement:
            replacement.file.write(serialized)
    names = os.stat(file).st_nlink
    if names > 1:
        warnings.warn(
            f"{os.fspath(path)}: the file has {names} names (hard links), and onnx reads no "
            f"external data from such files; a copy of it has one",
            stacklevel=2,
        )


def _location(file: str, destination: str | os.PathLike[str]) -> str:
    """The archive at `file` as external data of a `.onnx` at `destination` names it."""
    directory = os.path.realpath(os.path.dirname(os.fspath(destination)))
    if not is_below(file, directory):
        raise ValueError(
            f"expected the archive in the link's directory or below it, since ONNX allows no '..' "
            f"and no symbolic links in external data, found the archive at {file} and the link in "
            f"{directory}; write the link to {os.path.dirname(file)}"
        )
    location = os.path.relpath(file, directory)
    if os.sep != "/":
        location = location.replace(os.sep, "/")
    require_text(location)
    if "\\" in location:
        raise ValueError(
            f"expected no backslash in the archive's path, since it separates directories on "
            f"Windows, found {location!r}"
        )
    return location


def require_text(path: str) -> None:
    """Refuses a path that cannot be a string of a model.

    Raises:
        ValueError: It is not UTF-8.
    """
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ValueError(f"expected the archive's path in UTF-8, found {path!r}") from None


def fingerprint(archive: Archive) -> str:
    """What a link says of its archive: the SHA-256 of where each tensor lies and of its CRC-32.

    It is taken over one line for each tensor entry, in the order of the archive: name, data offset
    and size in decimal digits, CRC-32 in eight hexadecimal ones, with blanks between. An archive
    with other weights has another one, also where all of them lie at the same places; assets and
    the model do not matter.
    """
    digest = hashlib.sha256()
    for entry in archive.entries.values():
        if entry.name in archive._refs:
            line = f"{entry.name} {entry.data_offset} {entry.nbytes} {entry.crc32:08x}\n"
            digest.update(line.encode())
    return digest.hexdigest()


def check_link(
    path: str | os.PathLike[str], archive: str | os.PathLike[str] | None = None
) -> list[Finding]:
    """Tells whether a link still fits its archive.

    It does when each of its external tensors points at the entry of the archive's tensor in the
    same place of the model, with the same name, type and shape; when the tensors that it holds
    have the bytes that the archive has; when the models are otherwise the same; and when the
    tensors in the archive are those that the link was written for, by their CRC-32 in the archive's
    directory. No weight is read that the link does not hold: `onnxarchive.check(..., full=True)`
    compares the CRC-32 with the bytes.

    Args:
        path: The link.
        archive: The archive; None for the one that the link names.

    Returns:
        Every fault found, an empty list if the link fits. The rule of a finding is None, its entry
        the tensor's in the archive, or None.

    Raises:
        ArchiveFormatError: The link is not a model, or larger than one can be, or the archive
            breaks a rule.
        ValueError: `archive` is None, and the link holds all tensors itself and so names none.
        OSError: The link, or the archive that was given, cannot be read.
    """
    with MappedFile(path) as file, with_path(path):
        model = _parse(file)
    named = _named_archive(model, path) if archive is None else archive
    if isinstance(named, Finding):
        return [named]
    try:
        opened = open(named)
    except FileNotFoundError:
        if archive is not None:
            raise
        return [_fault(f"expected the archive {named}, found no such file")]
    with opened, with_path(named):
        return list(_findings(model, path, opened))


def _fault(message: str) -> Finding:
    return Finding(None, None, message)


def linked_archive(path: str | os.PathLike[str]) -> str | None:
    """The path of the archive that a link names, or None where that is not one file near it.

    Raises:
        ArchiveFormatError: The link is not a model, or larger than one can be.
        OSError: It cannot be read.
    """
    with MappedFile(path) as file, with_path(path):
        model = _parse(file)
    locations = _locations(model)
    if len(locations) != 1:
        return None
    found = _beside(path, locations[0])
    return None if isinstance(found, Finding) else found


class _LinkReport(Report):
    """Raises what is wrong with a link's model: there it is no rule of archives that breaks."""

    def broken(self, rule: str, message: str, *, entry: str | None = None) -> None:
        raise ArchiveFormatError(message)


def _parse(file: MappedFile) -> onnx.ModelProto:
    if file.size >= proto.SIZE_LIMIT:
        raise ArchiveFormatError(
            f"expected a link of less than {proto.SIZE_LIMIT} bytes, as any model in one file, "
            f"found {file.size}"
        )
    model = proto.parse(file.read(0, file.size), _LinkReport())
    assert model is not None  # the report would have raised
    return model


def _locations(model: onnx.ModelProto) -> list[str]:
    found = (tensors.location(ref.tensor) for ref in tensors.walk(model))
    return sorted({location for location in found if location is not None})


def _named_archive(model: onnx.ModelProto, path: str | os.PathLike[str]) -> str | Finding:
    locations = _locations(model)
    if not locations:
        raise ValueError(
            f"{os.fspath(path)}: expected the archive to be given, since no tensor of the link is "
            "outside it"
        )
    if len(locations) > 1:
        return _fault(f"expected all external data in one file, found it in {locations}")
    return _beside(path, locations[0])


def _beside(path: str | os.PathLike[str], location: str) -> str | Finding:
    """The file of a location, which has to lie in the directory of the link at `path` or below."""
    directory = os.path.dirname(os.fspath(path))
    found = os.path.join(directory, location)
    is_plain = not (
        {"\0", "\\"} & set(location) or os.path.isabs(location) or ".." in location.split("/")
    )
    if is_plain and is_below(os.path.realpath(found), os.path.realpath(directory)):
        return found
    return _fault(
        f"expected the archive in the link's directory or below it, without '..' and backslashes, "
        f"found the location {shown(location)}",
    )


def _findings(
    model: onnx.ModelProto, link_path: str | os.PathLike[str], archive: Archive
) -> Iterator[Finding]:
    """Compares the link at `link_path` with its archive; takes the link's fingerprint out of it."""
    found = proto.take_link_fingerprint(model)
    expected = fingerprint(archive)
    if found is None:
        yield _fault(
            f"expected the metadata {proto.LINK_FINGERPRINT!r}, which tells one archive from "
            "another of the same layout, found none; link it anew",
        )
    elif found != expected:
        yield _fault(
            "expected the archive that was linked, found one whose tensors have other contents or "
            "places; link it anew",
        )
    for location in _locations(model):
        beside = _beside(link_path, location)
        if isinstance(beside, Finding):
            yield beside
        elif not archive._file.is_at(beside):
            yield _fault(f"expected external data in {archive.path}, found it in {beside}")
        elif os.path.islink(beside) or os.stat(beside).st_nlink > 1:
            yield _fault(
                f"expected a file with one name, since onnx reads no external data from others, "
                f"found a symbolic or a further hard link at {beside}",
            )

    refs = {ref.path: ref for ref in tensors.walk(model)}
    originals = {ref.path: ref for ref in tensors.walk(archive.model)}
    keys = {ref.path: key for key, ref in archive._refs.items()}
    compared = [path for path in originals if path in refs]
    for path in compared:
        message = _difference(refs[path], originals[path], keys.get(path), archive)
        if message is not None:
            yield Finding(None, keys.get(path), message)
    differing = _differing_fields(_bare(model, compared), _bare(archive.model, compared))
    if differing:
        yield _fault(f"expected the model of the archive, found one with another {differing[0]}")


def _difference(
    ref: TensorRef, original: TensorRef, key: str | None, archive: Archive
) -> str | None:
    """In what a tensor of a link is not that of the archive, or None."""
    tensor = ref.tensor
    for field in _DESCRIBING_FIELDS:
        expected, found = getattr(original.tensor, field), getattr(tensor, field)
        if expected != found:
            form = _SHOWN.get(field, repr)
            return f"{original}: expected {field} {form(expected)}, found {form(found)}"
    if key is None:
        if tensor.data_location == tensors.EXTERNAL:
            return (
                f"{original}: expected it in the link, as in the archive's model, found it outside"
            )
        return None if tensor == original.tensor else f"{original}: expected the archive's data"
    is_external = tensor.data_location == tensors.EXTERNAL
    is_in_both = bool(tensors.held_fields(tensor) if is_external else tensor.external_data)
    if is_in_both:
        return (
            f"{original}: expected its data in one place, found it in the link and in external_data"
        )
    if not is_external:
        try:
            is_same = tensors.raw_data(ref) == archive.read(key)
        except ArchiveFormatError as error:
            return error.message
        return None if is_same else f"{original}: expected the bytes of its entry, found others"
    try:
        reference = tensors.external_data(ref, Report())
    except ArchiveFormatError as error:
        return error.message
    assert reference is not None  # the report would have raised
    archive.read(key)  # compares its local header
    entry = archive.entries[key]
    if (reference.offset or 0, reference.length) != (entry.data_offset, entry.nbytes):
        return (
            f"{original}: expected offset {entry.data_offset} and length {entry.nbytes}, where "
            f"its entry lies, found {reference.offset} and {reference.length}"
        )
    return None


def _bare(model: onnx.ModelProto, compared: Iterable[Path]) -> onnx.ModelProto:
    """A copy without a fingerprint, in which the tensors that were compared are empty."""
    bare = with_locations(model, dict.fromkeys(compared, ""))
    for path in compared:
        walking.at(bare, path).Clear()
    proto.take_link_fingerprint(bare)
    return bare


def _differing_fields(one: onnx.ModelProto, other: onnx.ModelProto) -> list[str]:
    """The fields of models, and of their graphs, in which they differ."""
    if one == other:
        return []
    found = [
        f"graph.{field.name}"
        for field in onnx.GraphProto.DESCRIPTOR.fields
        if getattr(one.graph, field.name) != getattr(other.graph, field.name)
    ]
    found += [
        field.name
        for field in onnx.ModelProto.DESCRIPTOR.fields
        if getattr(one, field.name) != getattr(other, field.name)
    ]
    return found or ["field"]
