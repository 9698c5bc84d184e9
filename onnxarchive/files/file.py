"""Bytes that are read by position, of a file object or in memory."""

from __future__ import annotations

import os
import threading
from typing import Protocol

from onnxarchive.files.data import File, add_name, name_of


class SupportsSeek(Protocol):
    """A seekable binary file, such as `io.BytesIO` or a file of fsspec."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Sets the position and returns it."""

    def read(self, size: int, /) -> bytes:
        """Returns up to `size` bytes, and `b""` at the end of the file."""


class BinaryFile(File):
    """A seekable binary file object. One thread reads at a time; the caller closes the object."""

    def __init__(self, file: SupportsSeek) -> None:
        """Reads from a file object.

        Raises:
            ValueError: The file object is not seekable, is closed, or is open for text.
            OSError: The file object cannot be read.
        """
        self.path = name_of(file)
        self._file: SupportsSeek | None = file
        self._lock = threading.Lock()
        try:
            self.size = file.seek(0, os.SEEK_END)
            is_binary = isinstance(file.read(0), bytes | bytearray | memoryview)
        except (AttributeError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                add_name(error, file)
                raise
            raise ValueError(
                f"{self.path}: the file object is not a seekable binary file"
            ) from error
        if not is_binary:
            raise ValueError(
                f"{self.path}: the file object is open for text; open it in binary mode"
            )
        self.identity = id(file)

    def read(self, offset: int, size: int) -> bytes:
        """Reads `size` bytes from `offset`, fewer at the end of the file."""
        parts = []
        with self._lock:
            file = self._file
            if file is None:
                raise ValueError(f"{self.path}: the file is closed")
            try:
                file.seek(offset)
                while size > 0 and (part := file.read(size)):
                    parts.append(bytes(part))  # `part` may be a view of bytes that `file` changes
                    size -= len(part)
            except OSError as error:
                add_name(error, file)
                raise
        return b"".join(parts)

    @property
    def is_closed(self) -> bool:
        """See `File.is_closed`."""
        return self._file is None

    def close(self) -> None:
        """Ends reading; the file object remains open."""
        self._file = None


class MemoryFile(File):
    """Reads bytes in memory like a file; keeps a view of the bytes, not a copy."""

    is_mapped = True

    def __init__(self, data: memoryview, path: str = "archive in memory") -> None:
        """Reads from a flat view of bytes; `path` is the name for messages."""
        self.path = path
        self.size = data.nbytes
        self.identity = id(self)
        if not isinstance(data.obj, bytes):
            # `np.ndarray(buffer=view)` keeps `view.obj`, but not `view`. After `view` is freed, a
            # `bytearray` could be resized, or an `mmap` closed, while numpy still reads the memory.
            # Here `view.obj` becomes an array; the array holds the buffer and prevents both.
            import numpy as np  # not needed to print help

            data = np.frombuffer(data, np.uint8).data
        self._data: memoryview | None = data.toreadonly()

    def read(self, offset: int, size: int) -> bytes:
        """A copy of `size` bytes from `offset`, fewer at the end."""
        return bytes(self.view(offset, size))

    def view(self, offset: int = 0, nbytes: int | None = None) -> memoryview:
        """A view of `nbytes` bytes from `offset`, fewer at the end."""
        if self._data is None:
            raise ValueError(f"{self.path}: the file is closed")
        return self._data[offset:][:nbytes]

    @property
    def is_closed(self) -> bool:
        """See `File.is_closed`."""
        return self._data is None

    def close(self) -> None:
        """Ends reading; views remain valid."""
        self._data = None
