"""Bytes in memory as a file."""

from __future__ import annotations

import numpy as np

from onnxarchive.storage.random_access import RandomAccessFile


class MemoryFile(RandomAccessFile):
    """Reads bytes in memory like a file; keeps a view of the bytes, not a copy."""

    is_mapped = True
    is_complete = True

    def __init__(self, data: memoryview, path: str = "archive in memory") -> None:
        """Reads from a flat view of bytes; `path` is the name for messages."""
        self.path = path
        self.size = data.nbytes
        self.identity = id(self)
        if not isinstance(data.obj, bytes):
            # `np.ndarray(buffer=view)` keeps `view.obj`, but not `view`. After `view` is freed, a
            # `bytearray` could be resized, or an `mmap` closed, while numpy still reads the memory.
            # Here `view.obj` becomes an array; the array holds the buffer and prevents both.
            data = np.frombuffer(data, np.uint8).data
        self._data: memoryview | None = data.toreadonly()

    def read(self, offset: int, size: int) -> bytes:
        """A copy of `size` bytes from `offset`, fewer at the end."""
        return bytes(self.reaching(offset + size)[offset : offset + size])

    def reaching(self, end: int) -> memoryview:
        """All bytes."""
        if self._data is None:
            raise ValueError(f"{self.path}: the file is closed")
        return self._data

    def close(self) -> None:
        """Ends reading; views remain valid."""
        self._data = None
