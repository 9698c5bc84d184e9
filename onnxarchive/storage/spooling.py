"""Bytes spooled to an unnamed temporary file and mapped."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable

from onnxarchive.errors import naming
from onnxarchive.storage.files import MappedFile, PositionalWriter
from onnxarchive.storage.filesystem import require_space


def spool(pieces: Iterable[memoryview], nbytes: int, directory: str | None) -> memoryview:
    """Copies bytes to an unnamed file and returns a view of its map.

    The file is removed when the last view is freed.

    Args:
        pieces: The bytes.
        nbytes: Number of the bytes that are expected, for which the disk must have space.
        directory: The directory of the file; None for the system's temporary directory.

    Raises:
        OSError: The file cannot be created or mapped, or the disk is full; the error names the
            directory.
    """
    with naming("the system's temporary directory"):
        directory = directory or tempfile.gettempdir()
    name = f"a temporary file in {directory}"
    require_space(name, nbytes, directory)
    with naming(name), tempfile.TemporaryFile(prefix=".onnxarchive-", dir=directory) as unnamed:
        file = MappedFile(name, descriptor=os.dup(unnamed.fileno()))
    with file:
        writer = PositionalWriter(file)
        for piece in pieces:
            writer.write(piece)
        file.size = writer.offset
        return file.view()
