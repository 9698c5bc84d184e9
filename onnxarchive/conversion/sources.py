"""Opens the sources of conversions: archives, and models of other tools."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from onnxarchive.errors import (
    ArchiveError,
    ArchiveFormatError,
    ChecksumError,
    LockedError,
    ObjectChangedError,
    UnfinishedEditError,
    with_path,
)
from onnxarchive.files.file import File
from onnxarchive.files.file_data import spool
from onnxarchive.files.local_file import MappedFile
from onnxarchive.model import proto, tensors
from onnxarchive.model.keys import ASSET_PREFIX, is_key
from onnxarchive.reading.archive import Archive
from onnxarchive.reading.archive_file import opened_archive
from onnxarchive.reading.contents import EntryData
from onnxarchive.remote.location import Location
from onnxarchive.sources.models import FollowLinks, open_model, read_copy
from onnxarchive.sources.places import RemotePlace, sha1
from onnxarchive.sources.recognition import is_zip, recognised
from onnxarchive.sources.source import Source, with_cleared_tail


@contextlib.contextmanager
def open_source(
    location: Location,
    *,
    verify_checksum: bool = False,
    temporary: str | None = None,
    other_files: bool = False,
    follow_links: FollowLinks = False,
) -> Iterator[Source]:
    """Opens the source of a conversion, and closes it when the block ends.

    Args:
        location: An archive, a `.onnx`, or a directory or zip with one model; or the URL of such a
            file.
        verify_checksum: Whether to compare data with the SHA-1 `checksum` of tensors.
        other_files: Whether the source includes the other files of its directory or zip.
        follow_links: See `open_model`.
        temporary: Directory for temporary files; None for the system's. They hold the
            inflated files of a zip, a remote file other than an archive, and one large remote
            tensor at a time.

    Raises:
        ArchiveFormatError: The file is not a model, or its external data is missing or too short.
        ChecksumError: Data does not match the SHA-1 `checksum` of a tensor, or an entry of a zip or
            archive does not match its CRC-32.
        LockedError: An edit changed the archive while it was opened.
        UnfinishedEditError: An edit of the archive was interrupted.
        ObjectChangedError: A remote file changed while it was read.
        OSError: A file cannot be opened.
    """
    path, name = location.path, location.name
    with contextlib.ExitStack() as resources, with_path(name):
        file = resources.enter_context(location.open()) if path is None else None
        with recognised(path, expected="a model"), with_path(name):
            archive = _open_archive(path, file)
        if archive is not None:
            with archive:  # closing it ends the stream of a remote file
                yield _source(archive, verify_checksum)
            return
        # An ExitStack with `recognised` would keep the error, and the copy mapped, on Python 3.12.
        with recognised(path, expected="a model"), with_path(name):
            if file is None:
                opened = open_model(
                    location.address,
                    verify_checksum=verify_checksum,
                    temporary=temporary,
                    other_files=other_files,
                    follow_links=follow_links,
                )
                source = resources.enter_context(opened)
            else:
                source = read_copy(
                    _copy(file, temporary),
                    RemotePlace(location.open_beside, resources, temporary),
                    verify_checksum=verify_checksum,
                    temporary=temporary,
                    other_files=other_files,
                )
        yield source


def _copy(file: File, temporary: str | None) -> memoryview:
    """A temporary copy of a remote file, if it may be a model or a zip.

    Raises:
        ArchiveFormatError: The file is too large for a model, and is not a zip.
    """
    if file.size >= proto.SIZE_LIMIT and not is_zip(file.read(0, 4)):
        raise ArchiveFormatError(
            f"expected an archive, a zip or a .onnx of less than {proto.SIZE_LIMIT} bytes,"
            f" found a file of {file.size} bytes that does not begin as a zip"
        )
    return spool(map(memoryview, file.pieces(0, file.size)), file.size, temporary)


def _open_archive(path: str | None, file: File | None) -> Archive | None:
    """Opens an archive and checks all local headers; None if the file is not an archive.

    Args:
        path: The path of a local file or directory, or None.
        file: A remote file, or None.
    """
    # A `@contextmanager` that swallowed the error would leave it in a reference cycle on Python
    # 3.12 and newer, which would keep the copy of a remote file mapped.
    try:
        if path is None:
            assert file is not None
            archive = Archive(file)
            archive.contents.require_headers(archive.entries)
            return archive
        if os.path.isdir(path):
            return None
        with MappedFile(path) as local:  # a file that is not an archive needs no lock
            if not is_zip(local.read(0, 4)):
                return None
        with opened_archive(path) as local:
            archive = Archive(local)
            archive.contents.require_headers(archive.entries)
            return archive
    except ArchiveError as error:
        # VERSION-1: a conversion could lose data of a later format version.
        if error.rule == "VERSION-1" or isinstance(
            error, LockedError | UnfinishedEditError | ObjectChangedError
        ):
            raise
        return None


def _source(archive: Archive, verify_checksum: bool) -> Source:
    stored = partial(EntryData, archive.contents)
    if verify_checksum:
        for key in [name for name in archive.entries if is_key(name)]:
            actual = sha1(stored(key))
            for ref in archive.contents.refs(key):
                expected = tensors.checksum(ref.tensor)
                if expected not in (None, actual):
                    raise ChecksumError(
                        f"{ref}: expected SHA-1 {expected}, found {actual}",
                        rule="DATA-6",
                        entry=key,
                    )

    def source(identifier: str) -> Source:
        refs = archive.contents.models[identifier].refs.items()  # in the order of `tensors.walk`
        cleared: dict[str, str] = {}
        data = [with_cleared_tail(stored(key), ref, cleared) for key, ref in refs]
        return Source(archive.models[identifier], data, is_own=True, cleared=cleared)

    assets = {path: stored(ASSET_PREFIX + path) for path in archive.assets}
    default, *further = archive.models
    files = (archive.path,) if isinstance(archive.contents.file, MappedFile) else ()
    return replace(
        source(default),
        assets=assets,
        files=files,
        further={identifier: source(identifier) for identifier in further},
    )
