"""Links: small `.onnx` files whose external data is in an archive."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Unpack

import onnx

from onnxarchive.conversion.linked_models import (
    Pairs,
    as_location,
    stored_keys,
    with_external_data,
)
from onnxarchive.errors import (
    ArchiveFormatError,
    ModelNotFoundError,
    Report,
    Strict,
    quoted,
    with_path,
)
from onnxarchive.files.local_file import MappedFile
from onnxarchive.files.paths import (
    from_utf8,
    is_below,
    leads_out,
    require_file_names,
    require_no_input,
)
from onnxarchive.files.replacement import Replacement
from onnxarchive.interop.onnxruntime import machine
from onnxarchive.interop.packed_pairs import packed_pairs, ranges_of
from onnxarchive.model import model_proto, tensors
from onnxarchive.model.keys import model_entry
from onnxarchive.reading.archive import Archive, contents_of, open, with_model
from onnxarchive.reading.check import Finding
from onnxarchive.remote.location import Access, Location, require_local_target
from onnxarchive.remote.urls import local_path


def link(
    path: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    model: str | None = None,
    prepack: bool = False,
    **access: Unpack[Access],
) -> None:
    """Writes a link: a small `.onnx` whose external data is in the archive.

    Every tool that supports external data reads a link: onnx, ONNX Runtime, onnx_ir, OpenVINO, ...
    A link is valid for this archive only: move both together, and write a new link after the
    archive is replaced or edited. Edits of other models keep a link valid if they move none of the
    link's tensors. `check_link` detects an invalid link.

    The link has a fingerprint in the metadata `onnxarchive.link`: a SHA-256 over the model's
    CRC-32, and over keys, offsets, sizes and CRC-32s of its tensors. Unless the model id is `""`, a
    space and the model id follow the SHA-256.

    Small tensors, and tensors that tools do not read from external data, are copied to the link; no
    other weight is copied. An optimized model that ONNX Runtime writes from a link refers to the
    archive, too, but has no fingerprint; see `session`.

    Args:
        path: The archive. With `cache` it may be a URL, which is downloaded; the link then names
            the file in the cache and is valid until the cache is cleared.
        destination: The `.onnx` to write, in the archive's directory or a parent directory, since
            ONNX allows external data only in a model's directory or below. An existing file is
            replaced. A directory gets a link `ID.onnx` for each model, and for the default model
            one with the archive's name, such as `model.onnx` for `model.onnx_data`.
        model: Id of the model, such as `"decoder"`; None for the default one, or for all if
            `destination` is a directory.
        prepack: Whether the link names the weights that `onnxarchive.prepack` has stored for this
            kind of machine. ONNX Runtime before 1.32 does not notice if they are damaged, and some
            tools refuse such a link.
        access: Options for a remote archive, as in `onnxarchive.open`.

    Raises:
        ArchiveError: The archive cannot be opened; see `onnxarchive.open`.
        ChecksumError: The bytes of a model, or of a tensor that is copied to the link, do not match
            their CRC-32.
        UnsupportedFeatureError: The link would take 2 GiB or more, `path` is a URL without `cache`,
            or `destination` is a URL.
        ValueError: `destination` is the archive, a symbolic link, in a directory that is not
            allowed, or begins with `~`; the archive's path is not allowed in external data; or the
            links of two models would have the same name.
        LockedError: A file that is to be replaced stayed locked for 30 seconds.
        OSError: The archive cannot be read, or the link cannot be written.

    Warns:
        UserWarning: The archive's file has several names (hard links). ONNX Runtime reads external
            data in such files, but onnx and onnx_ir refuse it.

    Example:
        onnxarchive.link("model.onnxa", "link.onnx")
        session = onnxruntime.InferenceSession("link.onnx")
    """
    destination = require_local_target(destination)
    if not os.path.isdir(destination):
        _require_target(destination, Location.of(path, **access).path)  # before a download
    with open(path, model=model, **access) as archive:
        write_links(archive, link_targets(archive, destination, model), prepack=prepack)


def link_targets(
    archive: Archive, destination: str | os.PathLike[str], model: str | None
) -> dict[str, str]:
    """The files that `link` writes for an archive, by model id; `model` is that of `link`."""
    target = os.fspath(destination)
    if not os.path.isdir(target):
        return {archive.model_id: target}
    ids = list(archive.models) if model is None else [model]
    name = os.path.splitext(os.path.basename(archive.path))[0]
    if "" in ids and name.lower() in ids:
        raise ValueError(
            f"{archive.path}: the id {name.lower()!r} of a model is the name of the archive, so "
            "its link would have the name of the default model's; write each of these links by "
            "itself, with its model (--model), to a .onnx of another name"
        )
    names = {identifier: f"{identifier or name}.onnx" for identifier in ids}
    with with_path(archive.path):
        require_file_names(names.values())
    return {identifier: os.path.join(target, names[identifier]) for identifier in ids}


def write_links(archive: Archive, targets: Mapping[str, str], *, prepack: bool) -> None:
    """Writes the links of models to files, by model id; see `link`.

    The models of the archive are changed, so it must not be used afterwards.
    """
    file = contents_of(archive).local_file
    for target in targets.values():
        _require_target(target, file.absolute_path)
    with with_path(archive.path):
        path = file.present_path()
        packed = packed_pairs(archive, targets, machine()) if prepack else {}
        for identifier, target in targets.items():
            pairs = packed.get(identifier)
            _write_link(with_model(archive, identifier), path, target, pairs)
    names = os.stat(path).st_nlink
    if names > 1:
        warnings.warn(
            f"{archive.path}: the file has {names} names (hard links); ONNX Runtime reads such "
            "external data, but onnx and onnx_ir refuse it; for these, copy the archive and "
            "link the copy",
            stacklevel=3,
        )


def _require_target(target: str | os.PathLike[str], archive: str | None) -> None:
    require_no_input(target, [archive])
    if os.path.islink(target):
        raise ValueError(
            f"{os.fspath(target)}: the destination is a symbolic link, and tools look for external "
            "data beside the symbolic link itself; choose another path"
        )


def _write_link(archive: Archive, path: str, target: str, pairs: Pairs | None) -> None:
    """Writes a link of the archive's chosen model; `path` is the present path of the archive."""
    linked = with_external_data(archive, _location(path, target), pairs=pairs, in_place=True)
    model_proto.take_link_fingerprint(linked)
    linked.metadata_props.add(key=model_proto.LINK_FINGERPRINT, value=fingerprint(archive))
    serialized = model_proto.serialize(linked)
    with Replacement(target) as replacement:
        replacement.writer.write(serialized)
        replacement.commit()


def _location(file: str, destination: str | os.PathLike[str]) -> str:
    """The location of an archive's file in the external data of a `.onnx` at `destination`."""
    directory = os.path.realpath(os.path.dirname(os.fspath(destination)))
    if not is_below(file, directory):
        raise ValueError(
            f"the archive {file} is not in the link's directory {directory} or below it, and ONNX "
            "allows no '..' and no symbolic links in external data; write the link to "
            f"{os.path.dirname(file)}"
        )
    location = as_location(os.path.relpath(file, directory).replace(os.sep, "/"))
    if "\\" in location:
        raise ValueError(
            f"the archive's path {location!r} has a backslash, which separates directories on "
            "Windows; rename the file or directory"
        )
    return location


def fingerprint(archive: Archive) -> str:
    """A SHA-256 over the model, and over keys, offsets, sizes and CRC-32s of its external tensors.

    The entry of each tensor adds a line, in archive order: key, data offset, size and CRC-32,
    separated by spaces. Offset and size are decimal; the CRC-32 has eight hexadecimal digits. The
    last line is the CRC-32 of the model's entry. So the fingerprint changes with the model and with
    bytes or offsets of its tensors, but not with other models or assets. Unless the model is the
    default one, a space and the model id follow the SHA-256.
    """
    digest = hashlib.sha256()
    for key in stored_keys(archive):
        entry = archive.entries[key]
        line = f"{key} {entry.data_offset} {entry.nbytes} {entry.crc32:08x}\n"
        digest.update(line.encode())
    digest.update(f"{archive.entries[model_entry(archive.model_id)].crc32:08x}\n".encode())
    return f"{digest.hexdigest()} {archive.model_id}".rstrip()


def check_link(
    path: str | os.PathLike[str], archive: str | os.PathLike[str] | None = None
) -> list[Finding]:
    """Checks whether a link is still valid for its archive.

    A link is valid if its fingerprint (see `link`) matches the archive, and each external tensor is
    exactly one entry. So the archive's model has not changed, and none of its tensors has moved.
    Graph and tensors in the link are not compared with the archive. Weights are not read;
    `onnxarchive.check(..., full=True)` compares them with their CRC-32.

    Args:
        path: The link.
        archive: The archive; None for the archive named in the link.

    Returns:
        The faults; an empty list if the link is valid. `rule` and `entry` of each are None.

    Raises:
        ArchiveFormatError: The file of the link holds no model, or the archive breaks a rule.
        ValueError: `archive` is None, and the link names no archive since no tensor is external.
        OSError: The link or the archive cannot be read. If `archive` is None, a missing archive is
            a fault of the link, not an OSError.

    Example:
        onnxarchive.link("model.onnxa", "link.onnx")
        assert onnxarchive.check_link("link.onnx") == []
    """
    path = local_path(path)
    return [Finding(None, None, fault) for fault in _faults(path, _parse(path), archive)]


def linked_archive(path: str | os.PathLike[str]) -> str | None:
    """The path of a link's archive; None if it is missing, or the link names none or several."""
    path = local_path(path)
    locations = _locations(_parse(path))
    file = _beside(path, locations[0]) if len(locations) == 1 else None
    return file if file is not None and os.path.exists(file) else None


class _LinkReport(Report):
    """Raises faults of a link's model without a rule id, since rules apply only to archives."""

    def broken(self, rule: str, message: str, *, entry: str | None = None) -> None:
        raise ArchiveFormatError(message)


def _parse(path: str | os.PathLike[str]) -> onnx.ModelProto:
    path = Location.of(path).require_local()
    with MappedFile(path) as file, with_path(path):
        if file.size >= model_proto.SIZE_LIMIT:
            raise ArchiveFormatError(
                f"expected a link of less than {model_proto.SIZE_LIMIT} bytes, the limit of a "
                f"single .onnx, found {file.size}"
            )
        model = model_proto.parse(file.read(0, file.size), _LinkReport())
    assert model is not None  # else `_LinkReport` has raised an error
    return model


def _locations(model: onnx.ModelProto) -> list[str]:
    locations = (tensors.location(ref.tensor) for ref in tensors.walk(model))
    return sorted({location for location in locations if location is not None})


def _beside(path: str | os.PathLike[str], location: str) -> str | None:
    """The file at a location of a link; None if that is not below the directory of the link."""
    if {"\0", "\\"} & set(location) or leads_out(location):
        return None
    directory = os.path.dirname(os.fspath(path))
    file = os.path.join(directory, from_utf8(location))
    return file if is_below(os.path.realpath(file), os.path.realpath(directory)) else None


def _faults(
    link: str | os.PathLike[str], model: onnx.ModelProto, given: str | os.PathLike[str] | None
) -> Iterator[str]:
    """Describes how the model of a link differs from its archive, or from the given one."""
    locations = _locations(model)
    if given is None and not locations:
        raise ValueError(
            f"{os.fspath(link)}: the link names no archive, since no tensor is external; give the "
            "archive, too"
        )
    if given is None and len(locations) > 1:
        several = f"{len(locations)}, such as {quoted(locations[0])} and {quoted(locations[1])}"
        yield f"external data is in several files, not in one archive: {several}"
        return
    files = [_beside(link, location) for location in locations]
    outside = [quoted(it) for it, file in zip(locations, files, strict=True) if file is None]
    for location in outside:
        yield (
            "expected a location in the link's directory or below it, without '..' or backslashes "
            f"in the location, found {location}"
        )
    path = files[0] if given is None else given
    if path is None:
        return
    mark = model_proto.take_link_fingerprint(model)
    try:
        archive = open(path, model=(mark or "").partition(" ")[2])
    except ModelNotFoundError as error:
        yield f"{error.message}; write a new link"
        return
    except FileNotFoundError:
        if given is not None:
            raise
        yield f"the archive {path} does not exist"
        return
    with archive:
        for file in filter(None, files):
            if not contents_of(archive).local_file.is_at(file):
                yield f"external data is in {file}, not in {archive.path}"
        if mark is None:
            yield (
                f"the metadata {model_proto.LINK_FINGERPRINT!r}, which identifies the archive, is "
                "missing; write a new link"
            )
        elif mark != fingerprint(archive):
            yield (
                "the archive has changed since it was linked: its model is another one, or its "
                "tensors have other bytes or positions; write a new link"
            )
            return  # positions in the link are those of the earlier archive
        yield from _faults_of_tensors(model, archive)


def _faults_of_tensors(model: onnx.ModelProto, archive: Archive) -> Iterator[str]:
    """Describes external tensors of a link that are not entries of its archive."""
    positions = {(entry.data_offset, entry.nbytes) for entry in archive.entries.values()}
    for ref in tensors.external(model):
        try:
            data = tensors.external_data(ref, Strict())
        except ArchiveFormatError as error:
            yield error.message
            continue
        assert data is not None  # else `Strict` has raised an error
        packed = (
            position
            for pair in ref.tensor.external_data
            if tensors.names_packed(pair)
            for position in ranges_of(tensors.text(pair.value))
        )
        if not positions.issuperset(packed):
            yield (
                f"{ref}: its packed weights are not at entries of the archive, which has others "
                "by now; write a new link"
            )
        if (data.offset or 0, data.length) not in positions:
            yield (
                f"{ref}: expected offset and length of an entry of the archive, found "
                f"{data.offset or 0} and {data.length}; write a new link"
            )
