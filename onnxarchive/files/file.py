"""`File`: bytes that are read by position, of a file object or in memory."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Hashable, Iterable, Iterator
from typing import Protocol, Self

import numpy as np

from onnxarchive.files.data import add_name, name_of

READ_SIZE = 1 << 19  # bytes of a piece in `File.pieces`: it stays in a core's cache


class Closing:
    """Base of classes that have `close`: the end of a `with` block closes the object."""

    def close(self) -> None:
        """Closes the object."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def closing_on_error(resource: Closing) -> Iterator[None]:
    """Closes an object if the block raises an error."""
    try:
        yield
    except BaseException:
        resource.close()
        raise


class File(Closing):
    """Bytes that are read by position. Several threads may read at once.

    Attributes:
        path: The name for messages: a path as given, or a URL without credentials.
        size: The size in bytes.
        identity: Equal for two objects of this class only if they read the same file.
    """

    path: str
    size: int
    identity: Hashable

    @property
    def is_mapped(self) -> bool:
        """True if `view` gives views of the file, not copies."""
        return False

    def read(self, offset: int, size: int) -> bytes:
        """Reads `size` bytes from `offset`, fewer at the end of the file; returns a copy.

        Raises:
            OSError: The read failed; the error names the file.
        """
        raise NotImplementedError

    def view(self, offset: int = 0, nbytes: int | None = None) -> memoryview:
        """The bytes of a range, read-only: a view of a file that `is_mapped`, else a copy.

        `nbytes` is None for all bytes from `offset`.

        Raises:
            ArchiveFormatError: The file was truncated after it was opened.
            OSError: The read failed; the error names the file.
        """
        return memoryview(self.read(offset, self.size - offset if nbytes is None else nbytes))

    def read_ranges(self, ranges: Iterable[tuple[int, int]]) -> Iterator[memoryview]:
        """Reads ranges, each an offset and a size; a remote file reads several at a time.

        Yields:
            The bytes of each range, in the order of `ranges`.
        """
        return (memoryview(self.read(offset, size)) for offset, size in ranges)

    def pieces(self, offset: int, size: int) -> Iterator[bytes | memoryview]:
        """Reads `size` bytes from `offset`; yields copies of a few MiB at most.

        If the file is truncated meanwhile, fewer bytes are yielded. Access to a map would crash
        instead.
        """
        while size > 0:
            piece = self.read(offset, min(size, READ_SIZE))
            if not piece:
                return
            yield piece
            offset += len(piece)
            size -= len(piece)


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
            raise ValueError(f"{self.path}: expected a seekable binary file") from error
        if not is_binary:
            raise ValueError(f"{self.path}: expected a binary file, found one open for text")
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

    def close(self) -> None:
        """Ends reading; views remain valid."""
        self._data = None
