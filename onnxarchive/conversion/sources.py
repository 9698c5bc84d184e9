"""Opens the sources of conversions: archives, and models of other tools."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from functools import partial

from onnxarchive.errors import (
    ArchiveError,
    ArchiveFormatError,
    ChecksumError,
    LockedError,
    ObjectChangedError,
    UnfinishedEditError,
)
from onnxarchive.files.file import File
from onnxarchive.files.file_data import FileData, RandomAccessData, spool
from onnxarchive.files.local_file import MappedFile
from onnxarchive.model import proto, tensors
from onnxarchive.model.keys import ASSET_PREFIX, is_key
from onnxarchive.reading.archive import Archive
from onnxarchive.reading.archive_file import opened
from onnxarchive.reading.contents import EntryData
from onnxarchive.remote.location import Location
from onnxarchive.sources.models import SourceOptions, SourceReader
from onnxarchive.sources.recognition import is_zip, recognised
from onnxarchive.sources.source import Source, sha1, with_cleared_tail


def open_source(
    location: Location, resources: contextlib.ExitStack, options: SourceOptions
) -> Source:
    """Opens the source of a conversion.

    Args:
        location: An archive, a `.onnx`, or a directory or zip with one model; or the URL of such a
            file.
        resources: Closes what is opened, when all data was read.
        options: The options. Temporary files hold the inflated files of a zip, a remote file other
            than an archive, and one large remote tensor at a time.
    """
    path = location.path
    reader = SourceReader(resources, options)
    with recognised(path, expected="a model"):
        if path is not None and os.path.isdir(path):
            return reader.read_directory(path)
        file = resources.enter_context(location.open())
        # A file that is no archive needs no lock.
        if path is not None and isinstance(file, MappedFile) and not is_zip(file.read(0, 4)):
            return reader.read_onnx(FileData(file.path, file.identity, 0, file.size, file))
        archive = _open_archive(location, file)
        if archive is not None:
            # Closing it ends the stream of a remote file.
            return _source(resources.enter_context(archive), options.verify_checksum)
        view = file.view() if path is not None else _copy(file, options.temporary)
        if is_zip(view):
            source = reader.read_zip(view)
            source.files = () if path is None else (path,)
            return source

        def open_beside(path: str) -> RandomAccessData | None:
            with contextlib.suppress(FileNotFoundError):
                beside = resources.enter_context(location.open_beside(path))
                return RandomAccessData(beside, 0, beside.size, temporary=options.temporary)
            return None

        return reader.read_remote(view, open_beside)


def _copy(file: File, temporary: str | None) -> memoryview:
    """A temporary copy of a remote file, if it may be a model or a zip."""
    if file.size >= proto.SIZE_LIMIT and not is_zip(file.read(0, 4)):
        raise ArchiveFormatError(
            f"expected an archive, a zip or a .onnx of less than {proto.SIZE_LIMIT} bytes,"
            f" found a file of {file.size} bytes that does not begin as a zip"
        )
    return spool(map(memoryview, file.pieces(0, file.size)), file.size, temporary)


def _open_archive(location: Location, file: File) -> Archive | None:
    """Opens an archive, a local one anew, and checks all local headers; None if it is none."""
    # A `@contextmanager` that swallowed the error would leave it in a reference cycle on Python
    # 3.12 and newer, which would keep the copy of a remote file mapped.
    try:
        local = None if location.path is None else opened(location, expected="a model")
        with local or contextlib.nullcontext(file) as readable:
            archive = Archive(readable)
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
