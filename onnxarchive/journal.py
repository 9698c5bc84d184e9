"""Changes of a file in its place that a crash cannot leave half done.

What is about to be overwritten is first written to a journal beside the file, and synced. Then the
file is changed and synced, and the journal is removed: that is the moment at which the change is
made. A journal that is found later tells of a change that was cut off; writing its bytes back gives
the file as it was. A journal that is incomplete itself says that the file was not yet touched.

A journal belongs to one file: it has a checksum of the bytes around those that change, by which
other files are told, and the file's inode, by which copies are.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import stat
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from onnxarchive import locking
from onnxarchive.errors import ArchiveError, UnfinishedEditError
from onnxarchive.files import MappedFile, sync, sync_directory

_SUFFIX: Final = "-journal"
_MAGIC: Final = b"onnxa-journal 1\n"
# Magic, number of spans; of the file inode, size in bytes, and SHA-256 of what surrounds the spans.
_HEADER: Final = struct.Struct("<16sIQQ32s")
_SPAN: Final = struct.Struct("<QQ")
_CHECKSUM_SIZE: Final = hashlib.sha256().digest_size
_ABSENT: Final = (errno.ENOENT, errno.ENAMETOOLONG)
_MAX_SPANS: Final = 16
_SURROUNDING_SIZE: Final = 4096  # bytes that are looked at on either side of what changes
_MAX_INODE: Final = (1 << 64) - 1
_MAX_SIZE: Final = (1 << 63) - 1  # of a file, in bytes


class Span(NamedTuple):
    """A range of a file that changes.

    Attributes:
        offset: Where it begins, in bytes from the start of the file.
        nbytes: How many bytes it has.
    """

    offset: int
    nbytes: int


def path_of(path: str | os.PathLike[str]) -> str:
    """Where the journal of the file at `path` is; symbolic links to the file are followed."""
    return os.path.realpath(path) + _SUFFIX


@dataclass(frozen=True, slots=True)
class Journal:
    """A complete journal.

    Attributes:
        path: Its path.
        inode: That of the file when it was written.
        size: The size in bytes that the file had.
        surroundings: SHA-256 of what surrounds the spans in the file.
        spans: What was about to change. The last one may reach to the end of the file.
    """

    path: str
    inode: int
    size: int
    surroundings: bytes
    spans: tuple[Span, ...]

    def is_of(self, file: MappedFile) -> bool:
        """Whether it may be a journal of this file, which may have been changed half.

        A copy of the file, or the same one on a file system that numbers files anew, has another
        inode.
        """
        return self.surroundings == _surroundings(file.read, self.spans)

    def has_inode_of(self, file: MappedFile) -> bool:
        """Whether the file has the inode that it had when the journal was written."""
        _, inode = file.identity
        return self.inode == inode & _MAX_INODE

    def is_intact(self, file: MappedFile) -> bool:
        """Whether the file is as it was: it has not been changed yet, or no longer is."""
        return file.size == self.size and all(
            file.read(offset, len(piece)) == piece for offset, piece in self._pieces()
        )

    def roll_back(self, descriptor: int) -> None:
        """Makes the file what it was, and syncs it.

        Args:
            descriptor: The file, open for reading and writing.

        Raises:
            OSError: It cannot be written. The journal is still there, and can be tried again.
        """
        for offset, piece in self._pieces():
            write_at(descriptor, offset, piece)
        os.ftruncate(descriptor, self.size)
        sync(descriptor)

    def read(self, offset: int, size: int) -> bytes:
        """Reads bytes of the file as it was, in its last span; fewer at the end of that."""
        with MappedFile(self.path) as journal:
            end = journal.size - _CHECKSUM_SIZE
            start = end - self.spans[-1].nbytes + offset - self.spans[-1].offset
            return journal.read(start, min(size, end - start))

    def _pieces(self) -> Iterator[tuple[int, bytes]]:
        """The bytes that were there, in pieces, each with its offset in the file."""
        with MappedFile(self.path) as journal:
            position = _HEADER.size + _SPAN.size * len(self.spans)
            for span in self.spans:
                offset = span.offset
                for piece in journal.pieces(position, span.nbytes):
                    yield offset, piece
                    offset += len(piece)
                position += span.nbytes


def read(path: str | os.PathLike[str]) -> Journal | None:
    """The journal of the file at `path`; None where there is none, or an incomplete one.

    Raises:
        OSError: It cannot be read.
    """
    name = path_of(path)
    try:
        file = MappedFile(name)
    except OSError as error:
        if error.errno in _ABSENT:
            return None
        raise
    with file:
        header = file.read(0, _HEADER.size)
        if len(header) != _HEADER.size:
            return None
        magic, count, inode, size, surroundings = _HEADER.unpack(header)
        if magic != _MAGIC or count > _MAX_SPANS:
            return None
        table = file.read(_HEADER.size, _SPAN.size * count)
        if len(table) != _SPAN.size * count:
            return None
        spans = tuple(itertools.starmap(Span, _SPAN.iter_unpack(table)))
        if not _are_in_order(spans, size):
            return None
        covered = _HEADER.size + len(table) + sum(span.nbytes for span in spans)
        if file.size != covered + _CHECKSUM_SIZE:
            return None
        checksum = hashlib.sha256()
        for piece in file.pieces(0, covered):
            checksum.update(piece)
        if file.read(covered, _CHECKSUM_SIZE) != checksum.digest():
            return None
    return Journal(name, inode, size, surroundings, spans)


def _are_in_order(spans: Sequence[Span], size: int) -> bool:
    """Whether spans follow one another in a file of `size` bytes, which there can be."""
    bounds = [0, *(bound for offset, nbytes in spans for bound in (offset, offset + nbytes)), size]
    return size <= _MAX_SIZE and bounds == sorted(bounds)


@contextlib.contextmanager
def opened(path: str | os.PathLike[str], *, rule: str | None = None) -> Iterator[MappedFile]:
    """Opens the file at a path, and keeps those out who would change it while the block runs.

    A change that was cut off before it began does no harm, and is passed over. The file stays open
    unless the block raises.

    Args:
        path: The file.
        rule: As `MappedFile` takes it.

    Raises:
        UnfinishedEditError: It is neither what it was nor what it was to be.
        ArchiveFormatError: As `MappedFile` does.
        OSError: It cannot be opened.
    """
    while True:
        file = MappedFile(path, rule=rule)
        try:
            with file.unchanged():
                if file.is_at(path):  # and not replaced while the lock was waited for
                    require_complete(file)
                    yield file
                    return
        except BaseException:
            file.close()
            raise
        file.close()


def require_complete(file: MappedFile) -> None:
    """Refuses a file whose change was cut off; the caller holds a lock.

    Raises:
        UnfinishedEditError: It is neither what it was nor what it was to be.
    """
    journal = read(file.path)
    if journal is None or not journal.is_of(file) or journal.is_intact(file):
        return
    error = UnfinishedEditError(
        f"expected a complete archive, found one whose last change was cut off; 'onnxarchive "
        f"recover' takes it back with the journal {journal.path}, and so does whoever opens it for "
        "writing"
    )
    error.path = file.path
    raise error


def remove(path: str | os.PathLike[str]) -> bool:
    """Removes the journal of the file at `path`, for good; gives whether there was one."""
    name = path_of(path)
    try:
        os.unlink(name)
    except OSError as error:
        if error.errno in _ABSENT:
            return False
        raise
    with contextlib.suppress(OSError):  # it is removed in any case, for now
        sync_directory(os.path.dirname(name))
    return True


@contextlib.contextmanager
def superseding(path: str | os.PathLike[str], *, is_locked: bool = False) -> Iterator[None]:
    """Around the moment at which another file takes a path, for its journals.

    Nobody changes the file meanwhile that has been there, and no journal is left that the new one
    could be taken for the subject of: an inode that has become free may be given to any new file.

    Args:
        path: The path.
        is_locked: Whether the caller has the lock of the file that is there already.
    """
    with contextlib.ExitStack() as lock:
        if not is_locked:
            with contextlib.suppress(OSError):  # there is none, or it has no locks
                lock.enter_context(locking.exclusive_at(path, os.O_RDONLY))
        if not _is_of_file_at(path):
            remove(path)
        yield
        name = path_of(path)
        if os.path.lexists(name):
            with contextlib.suppress(OSError):  # then it is found to be of no use later on
                sync_directory(os.path.dirname(name))  # the new file lasts before the journal goes
                remove(path)


def _is_of_file_at(path: str | os.PathLike[str]) -> bool:
    """Whether there is a journal that the file at `path` may need."""
    found = read(path)
    if found is None:
        return False
    try:
        with MappedFile(path) as file:
            return found.is_of(file)
    except FileNotFoundError:
        return False


def write_at(descriptor: int, offset: int, data: bytes | memoryview) -> None:
    """Writes all of `data` from `offset` on, which may be behind the end of the file."""
    view = memoryview(data)
    while view.nbytes:
        if hasattr(os, "pwrite"):
            written = os.pwrite(descriptor, view, offset)
        else:  # Windows
            os.lseek(descriptor, offset, os.SEEK_SET)
            written = os.write(descriptor, view)
        offset += written
        view = view[written:]


class Positioned:
    """Writes one piece after the other into a file, from an offset on.

    Attributes:
        offset: Where the next piece goes, in bytes from the start of the file.
    """

    def __init__(self, descriptor: int, offset: int) -> None:
        self._descriptor = descriptor
        self.offset = offset

    def write(self, data: memoryview, /) -> int:
        """Writes all of `data`, and gives its size in bytes."""
        write_at(self._descriptor, self.offset, data)
        self.offset += data.nbytes
        return data.nbytes


def change(
    file: MappedFile, descriptor: int, spans: Sequence[Span], write: Callable[[int], int]
) -> None:
    """Changes a file in its place: afterwards, and after any crash, all of it or nothing.

    Args:
        file: The file, for reading.
        descriptor: The same file, open for reading and writing, with the caller's lock on it.
        spans: All that changes of what is in the file, in order.
        write: Writes the new bytes to the descriptor that it is given, into the spans and behind
            the end of the file, and gives the size in bytes that the file shall have.

    Raises:
        ArchiveError: The change failed and cannot be taken back now, so that the journal stays.
        OSError: The journal or the file cannot be written. The file is as it was.
    """
    path = os.path.realpath(file.path)
    journal = None
    try:
        journal = _write(path, file, spans)
        os.ftruncate(descriptor, write(descriptor))
        sync(descriptor)
        remove(path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None and error.errno is not None:
            error.filename = file.path
        if journal is not None and os.path.exists(journal.path):
            _take_back(journal, path, descriptor, error)
        raise


def _take_back(journal: Journal, path: str, descriptor: int, error: BaseException) -> None:
    try:
        journal.roll_back(descriptor)
        remove(path)
    except OSError as second:
        failed = ArchiveError(
            f"expected to change the archive, found: {error}; taking the change back failed, too: "
            f"{second}; once the cause is mended, 'onnxarchive recover' does it with the journal "
            f"{journal.path}"
        )
        failed.path = path
        raise failed from error


def _write(path: str, file: MappedFile, spans: Sequence[Span]) -> Journal:
    """Writes and syncs the journal, in the place of one that is of no use any more."""
    _, inode = file.identity
    surroundings = _surroundings(file.read, spans)
    journal = Journal(path_of(path), inode & _MAX_INODE, file.size, surroundings, tuple(spans))
    remove(path)
    mode = stat.S_IMODE(os.stat(path).st_mode)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    descriptor = None
    try:
        try:
            descriptor = os.open(journal.path, flags, mode)
            target = Positioned(descriptor, 0)
            checksum = hashlib.sha256()
            for piece in _content(journal, file):
                checksum.update(piece)
                target.write(memoryview(piece))
            target.write(memoryview(checksum.digest()))
            sync(descriptor)
        finally:
            if descriptor is not None:
                os.close(descriptor)
        sync_directory(os.path.dirname(journal.path))
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None and error.errno is not None:
            error.filename = journal.path
        with contextlib.suppress(OSError):
            os.unlink(journal.path)
        raise
    return journal


def _content(journal: Journal, file: MappedFile) -> Iterable[bytes]:
    """The bytes of a journal but for its checksum."""
    count = len(journal.spans)
    yield _HEADER.pack(_MAGIC, count, journal.inode, journal.size, journal.surroundings)
    yield b"".join(_SPAN.pack(*span) for span in journal.spans)
    for span in journal.spans:
        yield from file.pieces(span.offset, span.nbytes)


def _surroundings(read: Callable[[int, int], bytes], spans: Sequence[Span]) -> bytes:
    """SHA-256 of the beginning of the file, and of what lies just before each span."""
    checksum = hashlib.sha256()
    before = 0
    for offset, nbytes in spans:
        begin = max(before, offset - _SURROUNDING_SIZE)
        for start, stop in (
            (before, min(before + _SURROUNDING_SIZE, begin)),
            (begin, offset),
        ):
            checksum.update(read(start, stop - start))
        before = offset + nbytes
    return checksum.digest()
