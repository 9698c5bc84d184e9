"""Bytes: a `File` is read by position; `Data` is the data of an entry, in pieces; and CRC-32.

`crc32(data, before=0)` continues the CRC-32 `before` with the bytes of `data` (APPNOTE 4.4.7).
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby
from typing import ClassVar, NamedTuple, Protocol, Self, TypeAlias, TypeVar

from onnxarchive.errors import ArchiveFormatError

try:
    from zlib_ng.zlib_ng import crc32 as crc32  # 24 GB/s; zlib computes 4 GB/s

    CRC32_LIBRARY = "zlib-ng"
except ImportError:  # it has no wheel for this processor
    from zlib import crc32 as crc32

    CRC32_LIBRARY = "zlib"

Buffer: TypeAlias = bytes | bytearray | memoryview
PIECE_SIZE = 8 << 20  # largest size of a piece of data, in bytes
READ_SIZE = 1 << 19  # bytes of a piece in `File.pieces`: it stays in a core's cache
_Piece = TypeVar("_Piece", bound="bytes | memoryview")
_MAX_COMPARED = 1 << 20  # bytes compared at a time; numpy makes a boolean for each


class SupportsWrite(Protocol):
    """A binary file, a pipe, or the file of a socket."""

    def write(self, data: memoryview, /) -> int | None:
        """Writes `data`, perhaps only in part; returns the number of bytes written.

        None means all, but nothing for an unbuffered file (`io.RawIOBase`).
        """


def add_name(error: OSError, file: object) -> None:
    """Adds the name of a file object to its error, if the error names no file."""
    if error.filename is None and error.errno is not None:
        error.filename = name_of(file)


def name_of(file: object) -> str:
    """The name of a file object for messages."""
    name = getattr(file, "name", None)
    return name if isinstance(name, str) else f"file object {type(file).__name__}"


# Files


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
        crc32: CRC-32 of all bytes, if `pieces` of all bytes compares it; else None.
        is_remote: True if each read asks a server.
        device: The device on which the file is, if it is opened by a local path; else None.
    """

    path: str
    size: int
    identity: Hashable
    crc32: int | None = None
    is_remote = False
    device: int | None = None

    @property
    def is_closed(self) -> bool:
        """True after `close`; then nothing more can be read."""
        return False

    @property
    def is_held(self) -> bool:
        """True if this thread has locked the file for an edit; then it must not be read."""
        return False

    @property
    def is_mapped(self) -> bool:
        """True if `view` gives views of the file, not copies."""
        return False

    def has_path(self, path: str) -> bool:
        """True if a path is that of this local file or of its replacement, or leads to it."""
        return False

    def open_file(self) -> File:
        """The open file, which stays open until the returned object is dropped."""
        return self

    def state(self) -> Hashable:
        """A value that changes when the file is written to; None if unknown."""
        return None

    def present_size(self) -> int | None:
        """The size in bytes now, after a read gave too few bytes; None if unknown."""
        return None

    def read(self, offset: int, size: int) -> bytes:
        """Reads `size` bytes from `offset`, fewer at the end of the file; returns a copy.

        Raises:
            OSError: The read failed; the error names the file.
        """
        raise NotImplementedError

    def head(self, nbytes: int) -> bytes:
        """The first `nbytes` bytes, or all if there are fewer; no checksum is compared."""
        return self.read(0, min(nbytes, self.size))

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


class Position(NamedTuple):
    """Position of bytes in a file; equal ones have equal bytes while the file object exists."""

    file: File
    offset: int


# Data


# Copies pieces, of so many bytes in all, to a temporary file; gives a view of its map.
Spool: TypeAlias = Callable[[Iterable[memoryview], int], memoryview]


class Data(Protocol):
    """The bytes of an entry; they can be read repeatedly, and nothing is read before `fetch`."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""

    @property
    def crc32(self) -> int | None:
        """CRC-32 of the bytes, which `pieces` compares after the last piece; None if unknown."""

    @property
    def position(self) -> Position | None:
        """Position of the bytes in a file; None if they are not in a file, or it is unknown."""

    @property
    def is_constant(self) -> bool:
        """True if the bytes cannot change: they are in memory that nobody can write to."""

    def pieces(self) -> Iterator[memoryview]:
        """Yields views of successive pieces, each of at most `PIECE_SIZE` bytes; can be repeated.

        Raises:
            ChecksumError: The bytes do not have the CRC-32 `crc32`.
            ArchiveFormatError: A file became shorter, or cannot be decoded.
            OSError: A file cannot be read.
        """

    def view(self) -> memoryview:
        """All bytes as one view of memory or a map, else of a copy; for errors see `pieces`."""

    def fetch(self, most_copied: int, spool: Spool) -> Data:
        """The same bytes, prepared for being read twice at the cost of reading them once.

        Up to `most_copied` bytes that could change are copied into memory. More bytes of a remote
        file are copied to a temporary file by `spool`, unless their CRC-32 is known.
        """


class Bytes:
    """Bytes in memory or in a map, in one buffer or several.

    Attributes:
        crc32: CRC-32 of a copy that was compared with it; else None.
    """

    __slots__ = ("_parts", "crc32", "nbytes")
    position: ClassVar[None] = None

    def __init__(self, *parts: Buffer, crc32: int | None = None) -> None:
        self._parts = [*map(as_bytes, parts)]
        self.nbytes = sum([part.nbytes for part in self._parts])
        self.crc32 = crc32

    @property
    def is_constant(self) -> bool:
        """True if the bytes belong to `bytes` objects."""
        return all(isinstance(part.obj, bytes) for part in self._parts)

    def pieces(self) -> Iterator[memoryview]:
        """See `Data.pieces`."""
        return chain.from_iterable(map(pieces, self._parts))

    def view(self) -> memoryview:
        """See `Data.view`; several buffers are copied into one."""
        return self._parts[0] if len(self._parts) == 1 else memoryview(b"".join(self._parts))

    def fetch(self, most_copied: int, spool: Spool) -> Data:
        """See `Data.fetch`; bytes that cannot change are not copied."""
        return self if self.is_constant or self.nbytes > most_copied else copy_of(self)


@dataclass(frozen=True, slots=True)
class Range:
    """A range of the bytes of a file."""

    is_constant: ClassVar[bool] = False
    file: File
    offset: int
    nbytes: int

    @classmethod
    def whole(cls, file: File) -> Range:
        """All bytes of a file."""
        return cls(file, 0, file.size)

    @property
    def crc32(self) -> int | None:
        """The file's CRC-32, if the range has all of its bytes."""
        return self.file.crc32 if self.nbytes == self.file.size else None

    @property
    def position(self) -> Position:
        """See `Data.position`."""
        return Position(self.file, self.offset)

    def view(self) -> memoryview:
        """See `Data.view`; of a file that is not mapped, a copy."""
        view = self.file.view(self.offset, self.nbytes)
        self._require_all(view.nbytes)
        return view

    def read(self) -> bytes:
        """The bytes as a copy, read by position."""
        copy = self.file.read(self.offset, self.nbytes)
        self._require_all(len(copy))
        return copy

    def pieces(self) -> Iterator[memoryview]:
        """See `Data.pieces`; of a mapped file, nothing is copied."""
        if self.file.is_mapped:
            return pieces(self.file.view(self.offset, self.nbytes))
        return self._read_pieces()

    def _read_pieces(self) -> Iterator[memoryview]:
        nbytes = 0
        for piece in self.file.pieces(self.offset, self.nbytes):
            nbytes += len(piece)
            yield memoryview(piece)
        self._require_all(nbytes)

    def _require_all(self, nbytes: int) -> None:
        if nbytes != self.nbytes:
            size = self.file.present_size()
            raise ArchiveFormatError(
                f"expected {self.nbytes} bytes at offset {self.offset}, found "
                f"{nbytes if size is None else f'a file truncated to {size} bytes'}",
                path=self.file.path,
            )

    def fetch(self, most_copied: int, spool: Spool) -> Data:
        """See `Data.fetch`."""
        if self.nbytes <= most_copied:
            # Successive ranges of a remote file come from one stream, if they are read in pieces.
            return copy_of(self) if self.file.is_remote else Bytes(self.read(), crc32=self.crc32)
        if self.file.is_remote and self.crc32 is None:
            return Bytes(spool(self.pieces(), self.nbytes))
        return self


@dataclass(slots=True, eq=False)
class Made:
    """Data that is made as a whole when it is read.

    Attributes:
        nbytes: Its size in bytes, before it is made; of a tensor, as shape and data type need.
        make: Makes the data; called in any thread, or repeatedly. If the result is a copy in
            memory, it holds only this data: the writer frees the copy after writing it.
        index: The argument of `make`, which selects one of several data; None for no argument. A
            number takes less memory than a function for each.
    """

    crc32: ClassVar[None] = None
    position: ClassVar[None] = None
    is_constant: ClassVar[bool] = False
    nbytes: int
    make: Callable[..., Data]
    index: int | None = None

    def pieces(self) -> Iterator[memoryview]:
        """See `Data.pieces`."""
        return self._made().pieces()

    def view(self) -> memoryview:
        """See `Data.view`."""
        return self._made().view()

    def fetch(self, most_copied: int, spool: Spool) -> Data:
        """See `Data.fetch`; makes the data."""
        return self._made().fetch(most_copied, spool)

    def _made(self) -> Data:
        return self.make() if self.index is None else self.make(self.index)


@dataclass(slots=True, eq=False)
class Streamed:
    """Data that is made in pieces while it is read.

    Attributes:
        nbytes: Its size in bytes.
        stream: Makes the pieces; called in any thread, or repeatedly.
    """

    crc32: ClassVar[None] = None
    position: ClassVar[None] = None
    is_constant: ClassVar[bool] = False
    nbytes: int
    stream: Callable[[], Iterator[memoryview]]

    def pieces(self) -> Iterator[memoryview]:
        """See `Data.pieces`."""
        return self.stream()

    def view(self) -> memoryview:
        """See `Data.view`; a copy."""
        return copy_of(self).view()

    def fetch(self, most_copied: int, spool: Spool) -> Data:
        """See `Data.fetch`; larger data is made twice, a few MiB at a time."""
        return copy_of(self) if self.nbytes <= most_copied else self


def copy_of(data: Data) -> Bytes:
    """A copy of data in memory."""
    return Bytes(b"".join(data.pieces()), crc32=data.crc32)


def read_together(parts: Iterable[Data]) -> list[Data]:
    """Copies ranges of local files into memory, in order; returns other data unchanged.

    If successive ranges of one file make up at least half of the span from the first to the last,
    one read takes the complete span; otherwise each range is read by itself.
    """
    read: list[Data] = []
    for file, group in groupby(parts, _local_file):
        data = [*group]
        if file is None:
            read += data
            continue
        ranges = [(part.position.offset, part.nbytes) for part in data if part.position is not None]
        begin = min([offset for offset, _ in ranges])
        nbytes = max([offset + nbytes for offset, nbytes in ranges]) - begin
        is_dense = nbytes <= 2 * sum([nbytes for _, nbytes in ranges])
        whole = file.read(begin, nbytes) if is_dense else b""
        if len(whole) == nbytes:
            view = memoryview(whole)
            read += [Bytes(view[start - begin :][:size]) for start, size in ranges]
        else:
            read += [Bytes(Range(file, start, size).read()) for start, size in ranges]
    return read


def _local_file(data: Data) -> File | None:
    """The local file of data that has no CRC-32 to compare; else None."""
    if data.position is None or data.crc32 is not None or data.position.file.is_remote:
        return None
    return data.position.file


def as_bytes(data: Buffer) -> memoryview:
    """`data` as a flat view of its bytes; nothing is copied."""
    view = memoryview(data)
    if view.format == "B" and view.ndim == 1 and view.c_contiguous:
        return view
    # A view with a 0 in its shape cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")


def pieces(data: Buffer) -> Iterator[memoryview]:
    """`data` as views of at most `PIECE_SIZE` bytes each; nothing is copied."""
    view = as_bytes(data)
    if len(view) <= PIECE_SIZE:
        return iter((view,) if view else ())
    return (view[start : start + PIECE_SIZE] for start in range(0, len(view), PIECE_SIZE))


def are_equal(first: Iterable[memoryview], second: Iterable[memoryview]) -> bool:
    """True if the bytes are the same, even in different pieces."""
    import numpy as np  # not needed to print help

    end = memoryview(b"")
    firsts, seconds = filter(len, first), filter(len, second)
    ours, theirs = next(firsts, end), next(seconds, end)
    while ours and theirs:
        size = min(len(ours), len(theirs), _MAX_COMPARED)
        if not np.array_equal(
            np.frombuffer(ours[:size], np.uint8), np.frombuffer(theirs[:size], np.uint8)
        ):
            return False
        ours = ours[size:] or next(firsts, end)
        theirs = theirs[size:] or next(seconds, end)
    return not ours and not theirs


def difference(expected: tuple[int, int], found: tuple[int, int]) -> str | None:
    """How bytes differ from a size and a CRC-32, for a message; None if they do not.

    Args:
        expected: The size in bytes, and the CRC-32.
        found: Size and CRC-32 of the bytes; the CRC-32 is ignored if the size differs.
    """
    if found == expected:
        return None
    (nbytes, crc), (found_nbytes, found_crc) = expected, found
    with_crc = f" with {found_crc:#010x}" if found_nbytes == nbytes else ""
    return f"expected {nbytes} bytes with CRC-32 {crc:#010x}, found {found_nbytes} bytes{with_crc}"


class Crc32:
    """Computes CRC-32 and size of bytes that come in pieces.

    Attributes:
        value: CRC-32 of the pieces so far.
        nbytes: Size of the pieces so far, in bytes.
    """

    def __init__(self) -> None:
        self.value = 0
        self.nbytes = 0

    @classmethod
    def of(cls, pieces: Iterable[bytes | memoryview]) -> Crc32:
        """CRC-32 and size of all pieces; exhausts the iterable."""
        checksum = cls()
        deque(checksum(pieces), maxlen=0)
        return checksum

    def __call__(self, pieces: Iterable[_Piece]) -> Iterator[_Piece]:
        """Yields the pieces; `value` and `nbytes` include a piece before it is yielded."""
        for piece in pieces:
            self.value = crc32(piece, self.value)
            self.nbytes += len(piece)
            yield piece
