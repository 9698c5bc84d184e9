"""Bytes of files as data of an entry, and bytes spooled to a temporary file and mapped."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TypeVar

from onnxarchive.errors import ArchiveFormatError, naming
from onnxarchive.files.beneath import Root
from onnxarchive.files.data import Data, Stored, pieces
from onnxarchive.files.file import File
from onnxarchive.files.filesystem import require_space
from onnxarchive.files.local_file import MappedFile, PositionalWriter

_Key = TypeVar("_Key")


@dataclass(frozen=True, slots=True)
class FileData:
    """A range of bytes of a file, which is opened on access unless it is open already.

    Each access raises ArchiveFormatError if the file is not regular or not beneath `root`, if it
    was truncated, or if another file has its path.

    Attributes:
        path: The path of the file, relative to `root` if there is one.
        identity: The identity of the file; see `MappedFile`.
        offset: Offset of the bytes in the file.
        file: The open file; None to open it on access.
        root: The directory beneath which the file is opened; None for no restriction.
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
        """All bytes of a file, which is opened on access; see the class."""
        with _open_file(path, root) as file:
            return cls(os.fsdecode(path), file.identity, 0, file.size, root=root)

    def state(self) -> tuple[int, int]:
        """Size in bytes and time of the last write (ns), which tell whether the file changed."""
        with self.opened() as file:
            status = file.status()
            return status.st_size, status.st_mtime_ns

    def part(self, offset: int, nbytes: int) -> FileData:
        """A range of these bytes, not yet read."""
        return FileData(
            self.path, self.identity, self.offset + offset, nbytes, self.file, self.root
        )

    def __iter__(self) -> Iterator[memoryview]:
        with self.opened() as file:
            if file.is_mapped:
                return pieces(file.view(self.offset, self.nbytes))
        return self._read_pieces()

    def _read_pieces(self) -> Iterator[memoryview]:
        """Yields copies, for a file that the system refuses to map."""
        with self.opened() as file:
            nbytes = 0
            for piece in file.pieces(self.offset, self.nbytes):
                nbytes += len(piece)
                yield memoryview(piece)
            self._require_all(nbytes, file)

    @property
    def view(self) -> memoryview:
        """The bytes as a view of a map, or of a copy if the system refuses to map the file."""
        with self.opened() as file:
            view = file.view(self.offset, self.nbytes)
            self._require_all(view.nbytes, file)
            return view

    def read(self) -> bytes:
        """The bytes as a copy, read without a map."""
        with self.opened() as file:
            return self.read_from(file)

    def head(self, nbytes: int) -> bytes:
        """The first `nbytes` bytes, or all if there are fewer; see `read`."""
        return self.part(0, min(nbytes, self.nbytes)).read()

    def read_from(self, file: MappedFile) -> bytes:
        """As `read`, from the file that is open already."""
        copy = file.read(self.offset, self.nbytes)
        self._require_all(len(copy), file)
        return copy

    def opened(self) -> contextlib.AbstractContextManager[MappedFile]:
        """The file; a file that was not open is closed at the end of the `with` block."""
        if self.file is not None:
            return contextlib.nullcontext(self.file)
        file = _open_file(self.path, self.root)
        if file.identity != self.identity:
            file.close()
            raise ArchiveFormatError("the file was replaced after it was opened", path=file.path)
        return file

    def _require_all(self, nbytes: int, file: MappedFile) -> None:
        if nbytes != self.nbytes:
            size = file.status().st_size
            raise ArchiveFormatError(
                f"expected {self.nbytes} bytes at offset {self.offset}, found a file truncated to "
                f"{size} bytes",
                path=file.path,
            )


def read_all(parts: Iterable[FileData]) -> list[bytes]:
    """Reads parts into copies, in order.

    A file of successive parts is opened once. If the parts are at least half of the span from the
    first to the last, one read takes the complete span; otherwise each part is read by itself.
    """
    contents: list[bytes] = []
    for _, group in itertools.groupby(parts, attrgetter("path", "identity", "file", "root")):
        same = list(group)
        begin = min([part.offset for part in same])
        nbytes = max([part.offset + part.nbytes for part in same]) - begin
        is_dense = nbytes <= 2 * sum([part.nbytes for part in same])
        with same[0].opened() as file:
            whole = file.read(begin, nbytes) if is_dense else b""
            if len(whole) == nbytes:
                contents += [
                    whole[part.offset - begin : part.offset - begin + part.nbytes] for part in same
                ]
            else:
                contents += [part.read_from(file) for part in same]
    return contents


def _open_file(path: str | os.PathLike[str], root: Root | None) -> MappedFile:
    if root is None:
        return MappedFile(path)
    path = os.fsdecode(path)
    return MappedFile(root.joined(path), descriptor=root.open(path))


def spool(pieces: Iterable[memoryview], nbytes: int, directory: str | None) -> memoryview:
    """Copies bytes to an unnamed file and returns a view of its map.

    The file is removed when the last view is freed. Its directory, None for the system's temporary
    one, must have space for `nbytes` bytes; an OSError of the file names the directory.
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


def spool_all(parts: Mapping[_Key, Data], directory: str | None) -> dict[_Key, memoryview]:
    """Copies several data to an unnamed file, as `spool`, and returns views of them by key."""
    sizes: dict[_Key, int] = {}

    def pieces() -> Iterator[memoryview]:
        for key, data in parts.items():
            sizes[key] = 0
            for piece in data:
                sizes[key] += piece.nbytes
                yield piece

    views: dict[_Key, memoryview] = {}
    rest = spool(pieces(), sum(data.nbytes for data in parts.values()), directory)
    for key, size in sizes.items():
        views[key], rest = rest[:size], rest[size:]
    return views


@dataclass(frozen=True, slots=True)
class RandomAccessData:
    """A range of bytes of a remote file; each iteration reads the bytes in pieces.

    Attributes:
        temporary: Directory for a temporary copy; None for the system's temporary directory.
    """

    file: File
    offset: int
    nbytes: int
    temporary: str | None = None
    crc32: None = None

    def local(self) -> Data:
        """The same bytes for repeated reading: a temporary copy."""
        return Stored(spool(self, self.nbytes, self.temporary))

    def part(self, offset: int, nbytes: int) -> RandomAccessData:
        """A range of these bytes, not yet read."""
        return replace(self, offset=self.offset + offset, nbytes=nbytes)

    def head(self, nbytes: int) -> bytes:
        """A copy of the first `nbytes` bytes, or of all if there are fewer."""
        return self.file.read(self.offset, min(nbytes, self.nbytes))

    @property
    def view(self) -> memoryview:
        """A copy of the bytes."""
        return memoryview(self.file.read(self.offset, self.nbytes))

    def __iter__(self) -> Iterator[memoryview]:
        nbytes = 0
        for piece in self.file.pieces(self.offset, self.nbytes):
            nbytes += len(piece)
            yield memoryview(piece)
        if nbytes != self.nbytes:
            raise ArchiveFormatError(
                f"expected {self.nbytes} bytes at offset {self.offset}, found {nbytes}",
                path=self.file.path,
            )
