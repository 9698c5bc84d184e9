"""Entries of zips that the library's writer writes from bytes in memory."""

from __future__ import annotations

from onnxarchive.files.data import Buffer, as_bytes, crc32, pieces
from onnxarchive.zipformat.layout import EntryLayout
from onnxarchive.zipformat.writer import ZipWriter


def add_bytes(writer: ZipWriter, name: str, data: Buffer) -> EntryLayout:
    """Adds an entry with these bytes and their CRC-32."""
    view = as_bytes(data)
    return writer.add(name, view.nbytes, crc32(view), pieces(view))
