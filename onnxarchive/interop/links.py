"""`link`: writes a small `.onnx` whose external data is in an archive."""

from __future__ import annotations

import hashlib
import os
import warnings
from typing import Unpack

from onnxarchive.archive.linked_models import linked_model, real_path, require_utf8
from onnxarchive.archive.openable import Access, files_of
from onnxarchive.archive.opening import open
from onnxarchive.archive.reading import Archive
from onnxarchive.errors import with_path
from onnxarchive.model import proto
from onnxarchive.storage.paths import is_below, require_no_input
from onnxarchive.storage.replacement import replacing


def link(
    path: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    model: str = "",
    **access: Unpack[Access],
) -> None:
    """Writes a link: a small `.onnx` whose external data is in the archive.

    Every tool that supports external data reads a link: onnx, ONNX Runtime, onnx_ir, OpenVINO, ...
    A link is valid for this archive only: move both together, and write a new link after the
    archive is replaced or edited. Edits of other models keep a link valid if they move none of the
    link's tensors. `check_link` detects an invalid link. The link has the metadata
    `onnxarchive.link`: a SHA-256 over keys, offsets, sizes and CRC-32s of the tensors; unless the
    model id is `""`, a space and the model id follow the SHA-256.

    Small tensors, and tensors that tools do not read from external data, are copied to the link; no
    other weight is copied. An optimized model that ONNX Runtime writes from a link refers to the
    archive, too, but has no such metadata; see `session`.

    Args:
        path: The archive. With `cache` it may be a URL, which is fetched; the link then names the
            file in the cache and is valid until the cache is cleared.
        destination: The `.onnx` to write, in the archive's directory or above it, since ONNX
            allows external data only in a model's directory or below. An existing file is replaced.
        model: Id of the model, such as `"decoder"`; `""` for the default one.
        access: Options for a remote archive; see `onnxarchive.open`.

    Raises:
        ArchiveFormatError: The archive breaks a rule.
        ModelNotFoundError: There is no model of this id.
        ChecksumError: The bytes of a model, or of a tensor that is copied to the link, do not match
            their CRC-32.
        UnsupportedFeatureError: The link would take 2 GiB or more, or `path` is a URL without
            `cache`.
        ValueError: `destination` is the archive, a symbolic link, or in a directory that is not
            allowed; or the archive's path is not allowed in external data.
        LockedError: A file that is to be replaced stayed locked for 30 seconds.
        OSError: The archive cannot be read, or the link cannot be written.

    Warns:
        UserWarning: The archive's file has several names (hard links). onnx.checker and onnx.load
            refuse external data in such files.

    Example:
        onnxarchive.link("model.onnxa", "link.onnx")
        session = onnxruntime.InferenceSession("link.onnx")
    """
    require_no_input(destination, files_of(path, access))
    if os.path.islink(destination):
        raise ValueError(
            f"expected a destination that is not a symbolic link, since tools look for external "
            f"data beside the symbolic link itself, found {os.fspath(destination)}"
        )
    with open(path, model=model, **access) as archive, with_path(archive.path):
        archive._fetch_entries(archive._refs)
        file = real_path(archive)
        linked = linked_model(archive, _location(file, destination), in_place=True)
        proto.take_link_fingerprint(linked)
        linked.metadata_props.add(key=proto.LINK_FINGERPRINT, value=fingerprint(archive))
        serialized = proto.serialize(linked)
        with replacing(destination) as replacement:
            replacement.file.write(serialized)
    names = os.stat(file).st_nlink
    if names > 1:
        warnings.warn(
            f"{archive.path}: the file has {names} names (hard links), and onnx reads no "
            f"external data from such files; copy the archive and write a .onnx for the copy",
            stacklevel=2,
        )


def _location(file: str, destination: str | os.PathLike[str]) -> str:
    """The location of an archive's file in the external data of a `.onnx` at `destination`."""
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
    require_utf8(location)
    if "\\" in location:
        raise ValueError(
            f"expected no backslash in the archive's path, since it separates directories on "
            f"Windows, found {location!r}"
        )
    return location


def fingerprint(archive: Archive) -> str:
    """A SHA-256 over keys, offsets, sizes and CRC-32s of the tensors outside `archive.model`.

    The entry of each tensor adds a line, in archive order: key, data offset, size and CRC-32,
    separated by spaces. Offset and size are decimal; the CRC-32 has eight hexadecimal digits. So
    the fingerprint changes with bytes or offsets of these tensors, but not with models or assets. A
    space and the model id follow the SHA-256, unless the model is the default one.
    """
    digest = hashlib.sha256()
    for entry in archive.entries.values():
        if entry.name in archive._refs:
            line = f"{entry.name} {entry.data_offset} {entry.nbytes} {entry.crc32:08x}\n"
            digest.update(line.encode())
    return f"{digest.hexdigest()} {archive.model_id}".rstrip()


def linked_id(found: str | None) -> str:
    """The model id in the fingerprint of a link; `""` for the default model or for None."""
    return (found or "").partition(" ")[2]
