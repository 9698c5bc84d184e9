"""Opens the sources of conversions: archives, and models of other tools."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from onnxarchive.archive import recovery
from onnxarchive.archive.reading import Archive
from onnxarchive.buffers.data import Data, Stored
from onnxarchive.errors import (
    ArchiveError,
    ChecksumError,
    LockedError,
    UnfinishedEditError,
    with_path,
)
from onnxarchive.model import tensors
from onnxarchive.model.keys import ASSET_PREFIX
from onnxarchive.model.walking import Path
from onnxarchive.sources.places import sha1
from onnxarchive.sources.source import FollowLinks, Source, is_zip, open_model


@contextlib.contextmanager
def open_source(
    path: str | os.PathLike[str],
    *,
    verify_checksum: bool = False,
    temporary: str | None = None,
    other_files: bool = False,
    follow_links: FollowLinks = False,
) -> Iterator[Source]:
    """Opens the source of a conversion; its files are mapped until the block ends.

    Args:
        path: An archive, a `.onnx`, or a directory or zip with one model.
        verify_checksum: Whether to compare data with the `checksum` that tensors state.
        temporary: Directory for files that have to be inflated; None for the system's.
        other_files: Whether to give the other files of a directory or zip, too.
        follow_links: See `open_model`.

    Raises:
        ArchiveFormatError: The file is not a model, or its external data is missing or too short.
        ChecksumError: A tensor of an archive has another SHA-1 than it states.
        LockedError: The archive stayed locked.
        UnfinishedEditError: An edit of the archive was interrupted.
        OSError: A file cannot be opened.
    """
    with contextlib.ExitStack() as resources, with_path(path):
        archive = None if os.path.isdir(path) else _open_archive(path, resources)
        if archive is not None:
            yield _source(archive, verify_checksum)
        else:
            opened = open_model(
                path,
                verify_checksum=verify_checksum,
                temporary=temporary,
                other_files=other_files,
                follow_links=follow_links,
            )
            yield resources.enter_context(opened)


def _open_archive(path: str | os.PathLike[str], resources: contextlib.ExitStack) -> Archive | None:
    """Opens a file as an archive and compares all local headers; None if it is not an archive."""
    try:
        with recovery.opened_archive(path) as file:
            if not is_zip(file.read(0, 4)):
                file.close()
                return None
            archive = resources.enter_context(Archive(file))
            archive._require_headers()
    except (LockedError, UnfinishedEditError):
        raise
    except ArchiveError as error:
        if error.rule == "VERSION-1":  # nothing of a later version is dropped
            raise
        return None
    return archive


def _source(archive: Archive, verify_checksum: bool) -> Source:
    def stored(name: str) -> Data:
        return Stored(archive.read(name), archive.entries[name].crc32)

    if verify_checksum:
        for key in archive._keys:
            found = sha1(stored(key))
            for ref in archive._snapshot.all_refs(key):
                expected = tensors.checksum(ref.tensor)
                if expected not in (None, found):
                    raise ChecksumError(
                        f"{ref}: expected SHA-1 {expected}, found {found}", rule="DATA-6", entry=key
                    )

    def data(identifier: str) -> dict[Path, Data]:
        return {ref.path: stored(key) for key, ref in archive._refs_of(identifier).items()}

    assets = {path: stored(ASSET_PREFIX + path) for path in archive.assets}
    default, *others = archive.models
    further = {other: Source(archive.models[other], data(other)) for other in others}
    return Source(archive.model, data(default), assets, (archive.path,), further=further)
