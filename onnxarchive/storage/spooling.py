"""Bytes spooled to an unnamed temporary file and mapped."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable
from typing import IO

from onnxarchive.storage.files import MappedFile, PositionalWriter


def spool(pieces: Iterable[memoryview], directory: str | None) -> memoryview:
    """Copies bytes to an unnamed file and returns a view of its map.

    The file is removed when the last view is freed.

    Args:
        pieces: The bytes.
        directory: The directory of the file; None for the system's temporary directory.

    Raises:
        OSError: The file cannot be created, or the disk is full; the error names the directory.
    """
    with _unnamed(directory) as file:
        try:
            name = _name_of_unnamed(directory)
            writer = PositionalWriter(MappedFile(name, descriptor=os.dup(file.fileno())))
            for piece in pieces:
                writer.write(piece)
            if not writer.offset:
                return memoryview(b"")
            return memoryview(mmap.mmap(file.fileno(), writer.offset, access=mmap.ACCESS_READ))
        except OSError as error:
            if error.filename is None:  # otherwise, reading an input failed
                error.filename = _name_of_unnamed(directory)
            raise


def _unnamed(directory: str | None) -> IO[bytes]:
    try:
        return tempfile.TemporaryFile(prefix=".onnxarchive-", dir=directory)
    except OSError as error:
        error.filename = _name_of_unnamed(directory)
        raise


def _name_of_unnamed(directory: str | None) -> str:
    return f"a temporary file in {directory or tempfile.gettempdir()}"
