"""Bytes of a file as data of an entry: opened when looked at, and judged when opened."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from onnxarchive.buffers.data import pieces
from onnxarchive.errors import ArchiveFormatError, with_path
from onnxarchive.storage.beneath import Root
from onnxarchive.storage.files import MappedFile

_Bytes = TypeVar("_Bytes", bytes, memoryview)


@dataclass(frozen=True, slots=True)
class FileData:
    """Some bytes of a file, which is opened when they are looked at unless it is open anyway.

    Attributes:
        path: The file, relative to `root` where there is one.
        identity: The file's, as `MappedFile` gives it.
        offset: Where they begin in it, in bytes.
        nbytes: How many they are.
        file: The file, where it stays open; else None.
        root: The directory beneath which it is opened; None where it may be anywhere.
        crc32: Not known.
    """

    path: str
    identity: tuple[int, int]
    offset: int
    nbytes: int
    file: MappedFile | None = None
    root: Root | None = None
    crc32: int | None = None

    @classmethod
    def of(cls, path: str | os.PathLike[str], root: Root | None = None) -> FileData:
        """All bytes of a file.

        Args:
            path: The file, relative to `root` where there is one.
            root: The directory beneath which it has to be; None where it may be anywhere.

        Raises:
            ArchiveFormatError: It is not a regular file, or not beneath `root`.
            OSError: It cannot be opened.
        """
        with _open_file(path, root) as file:
            return cls(os.fsdecode(path), file.identity, 0, file.size, root=root)

    @classmethod
    def kept_open(
        cls, path: str, resources: contextlib.ExitStack, root: Root | None = None
    ) -> FileData:
        """As `of`, of a file that stays open as long as `resources`, whatever has its path then."""
        file = resources.enter_context(_open_file(path, root))
        return cls(path, file.identity, 0, file.size, file, root)

    def part(self, offset: int, nbytes: int) -> FileData:
        """Some of these bytes."""
        return FileData(
            self.path, self.identity, self.offset + offset, nbytes, self.file, self.root
        )

    def __iter__(self) -> Iterator[memoryview]:
        return pieces(self.view)

    @property
    def view(self) -> memoryview:
        """The bytes as a view of the file's map, which lives as long as the view.

        Raises:
            ArchiveFormatError: The file has become smaller, or another one has its path.
            OSError: It cannot be opened any more.
        """
        with self._opened() as file:
            return self._all_of(file.view()[self.offset : self.offset + self.nbytes], file)

    def read(self) -> bytes:
        """The bytes as a copy, which is read without a map.

        Raises:
            ArchiveFormatError: As of `view`.
            OSError: It cannot be opened or read any more.
        """
        with self._opened() as file:
            return self._all_of(file.read(self.offset, self.nbytes), file)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[MappedFile]:
        kept = None if self.file is None else contextlib.nullcontext(self.file)
        with kept or _open_file(self.path, self.root) as file, with_path(file.path):
            if file.identity != self.identity:
                raise ArchiveFormatError(
                    "expected the file that was found here before, found another"
                )
            yield file

    def _all_of(self, found: _Bytes, file: MappedFile) -> _Bytes:
        if len(found) != self.nbytes:
            size = os.fstat(file.fileno()).st_size
            raise ArchiveFormatError(
                f"expected {self.nbytes} bytes from offset {self.offset}, found a file that has "
                f"become smaller, {size} bytes"
            )
        return found


def _open_file(path: str | os.PathLike[str], root: Root | None) -> MappedFile:
    if root is None:
        return MappedFile(path)
    path = os.fsdecode(path)
    return MappedFile(os.path.join(root.path, path), descriptor=root.open(path))
