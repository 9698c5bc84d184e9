"""`is_archive` tells archives from other files, without reading their models."""

from __future__ import annotations

import os
from typing import Any

from onnxarchive.errors import ArchiveFormatError, UnfinishedEditError, UnsupportedFeatureError
from onnxarchive.model.keys import MODEL_PROTO
from onnxarchive.reading.archive_file import locked_archive_file
from onnxarchive.reading.contents import read_entries
from onnxarchive.remote.location import Location, Openable


def is_archive(source: Openable) -> bool:
    """Tells whether a file is an ONNX archive, as `zipfile.is_zipfile` does for zips.

    Only the directory at the end of the file is read, so True does not mean that the archive is
    valid; `onnxarchive.check` checks that. Not recognised are a truncated archive, an archive whose
    last edit was interrupted, and an archive of a later version of the format.

    Args:
        source: A path, the bytes of a file, or a seekable binary file object, which keeps its
            position.

    Returns:
        True for an archive. False for every other file, and for a file that is missing or cannot be
        read.

    Raises:
        LockedError: The archive is being edited, and could not be read within 30 seconds.
        ValueError: `source` is a URL, or a file object that is closed, not seekable or not binary.
        TypeError: `source` is of another type.

    Example:
        print(onnxarchive.is_archive("model.onnxa"), onnxarchive.is_archive("model.onnx"))
    """
    location = Location.of(source)
    if location.url is not None:
        raise ValueError(
            f"{location.name}: expected a path, bytes or a file object, found a URL; "
            "onnxarchive.open opens it"
        )
    file_object: Any = source if hasattr(source, "seek") else None
    position = 0 if file_object is None else file_object.seek(0, os.SEEK_CUR)
    try:
        with locked_archive_file(location) as file:
            entries = read_entries(file)
        file.close()
    except (ArchiveFormatError, OSError, UnfinishedEditError, UnsupportedFeatureError):
        return False
    finally:
        if file_object is not None:
            file_object.seek(position)
    return bool(entries) and entries[-1].name == MODEL_PROTO
