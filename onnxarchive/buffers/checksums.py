"""CRC-32, at memory speed."""

from __future__ import annotations

from zlib_ng import zlib_ng

from onnxarchive.buffers.data import Buffer


def crc32(data: Buffer, before: int = 0) -> int:
    """CRC-32 of `data`, following bytes whose CRC-32 is `before` (APPNOTE 4.4.7)."""
    return zlib_ng.crc32(data, before)
