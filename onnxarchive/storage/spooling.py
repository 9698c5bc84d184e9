"""Bytes put aside in a file that has no name, and mapped."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable
from typing import IO

from onnxarchive.storage.files import MappedFile, PositionalWriter


def spool(pieces: Iterable[memoryview], directory: str | None) -> memoryview:
    """Bytes as a view of a file without a name, which goes when the last view does.

    Args:
        pieces: The bytes.
        directory: Where the file is made; None for the system's directory of temporary files.

    Raises:
        OSError: It cannot be made, or the disk is full; the directory is named.
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
            if error.filename is None:  # else it is of what is read
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
