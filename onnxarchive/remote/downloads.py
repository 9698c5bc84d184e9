"""Downloads whole objects: in parts, resumed after a break, verified, renamed when complete.

While an object arrives, its file consists of the object's bytes at their own offsets, then a mark,
then the log: begin and end of each piece that was written. The mark is a hash of the object's
version and of the file's inode number, so a download continues neither the file of another version
nor a copy of the file. A piece is logged after it is written, so after a kill at most a few pieces
are requested again. Nothing is synced before the object is complete: if a power failure loses
bytes, verification finds it, and the next download restarts.

From a server without ranges, the object comes in one stream, which cannot be resumed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import struct
import warnings
from collections.abc import Callable, Iterator
from typing import Protocol, TypeAlias

from onnxarchive.errors import (
    ArchiveFormatError,
    ChecksumError,
    ObjectChangedError,
    path_in_errors,
    without_traceback,
)
from onnxarchive.files import locking
from onnxarchive.files.clones_and_sync import require_space
from onnxarchive.files.data import File
from onnxarchive.files.hidden_files import partial_path
from onnxarchive.files.local_file import MappedFile
from onnxarchive.files.progress import Progress, ProgressCounter
from onnxarchive.files.replacement import Replacement
from onnxarchive.remote.objects import Range, RemoteFile, WholeObject
from onnxarchive.zipformat.records import LocalHeader

_MARK_SIZE = 32
_LOGGED = struct.Struct("<QQ")  # begin and end of a piece
# What to do about an object with another digest.
_NOTHING_KEPT = (
    "nothing was kept; compare the digest with that of the publisher: if it is right, this "
    "address gives another file"
)
_MOST_LOGGED = 1 << 20  # pieces that are read from a log; the bytes of others are asked for again


class Verifiable(Protocol):
    """An archive, which can be verified."""

    def verify(self) -> None:
        """Raises ArchiveFormatError if the archive breaks a rule."""


# Opens a file as an archive; raises ArchiveFormatError if it is none.
Read: TypeAlias = Callable[[File], Verifiable]


def download_object(
    remote: RemoteFile | WholeObject,
    replacement: Replacement,
    read: Read,
    progress: Progress | None = None,
    sha256: str | None = None,
) -> MappedFile:
    """Downloads an archive into a new file, verifies it, and renames it into place.

    Args:
        remote: The object. If it is not an archive, it is refused before its bytes are requested,
            or after the first of them if they come in one stream; then a warning says that such a
            download cannot be resumed.
        replacement: The new file. If it can be resumed after an error, it keeps the bytes that have
            arrived.
        read: Opens the object, and later the new file, as an archive.
        progress: Called with the bytes that have arrived and the bytes in all.
        sha256: The digest that the object must have, in lower case; None to compare none.

    Returns:
        The open file, without a lock.

    Raises:
        ArchiveFormatError: The object is not an archive, or breaks a rule; nothing is kept.
        ChecksumError: The object has another digest; nothing is kept.
        ObjectChangedError: The object has changed since it was opened; nothing is kept, since its
            bytes could not be continued.
    """
    file = replacement.file
    has_ranges = not isinstance(remote, WholeObject)
    replacement.is_resumable &= has_ranges and remote.cache_key() is not None
    found = None
    try:
        if isinstance(remote, WholeObject):
            size, found = _fetch_whole(remote, file, progress, is_hashed=sha256 is not None)
        else:
            read(remote)
            _fetch(remote, replacement, progress)
            size = remote.size
        with _Arrived(file, remote.path, size) as arrived:
            archive = read(arrived)  # first: an error says what a file is that is no archive
            if sha256 is not None:
                require_digest(sha256, found or sha256_of(arrived), remote.path, _NOTHING_KEPT)
            archive.verify()
    except ArchiveFormatError:
        file.truncate(0)
        raise
    except ObjectChangedError as error:
        file.truncate(0)
        raise ObjectChangedError(
            "the object has changed during the download, and what had arrived was removed; try "
            "again; if this fails each time, the servers of the address send different ETags for "
            "one file: use the address of one server, or another tool, such as curl",
            path=remote.path,
        ) from without_traceback(error)
    downloaded = replacement.commit_open(lambda _: replacement.complete(remote.size))
    locking.unlock(downloaded.fileno())  # a copy in the cache stays open
    return downloaded


def sha256_of(file: File) -> str:
    """The SHA-256 of all bytes of a file, in hexadecimal."""
    digest = hashlib.sha256()
    for piece in file.pieces(0, file.size):
        digest.update(piece)
    return digest.hexdigest()


def require_digest(expected: str, found: str, name: str, remedy: str) -> None:
    """Refuses an object with another digest than the one expected by the caller."""
    if found != expected:
        raise ChecksumError(f"expected the SHA-256 {expected}, found {found}; {remedy}", path=name)


class _Arrived(MappedFile):
    """The bytes of an object that has arrived, without the log; errors name the object."""

    def __init__(self, file: MappedFile, name: str, size: int) -> None:
        with path_in_errors(file.path):
            super().__init__(file.absolute_path, descriptor=os.dup(file.fileno()))
        self.path, self.size = name, size

    def read(self, offset: int, size: int) -> bytes:
        """Reads `size` bytes from `offset`, fewer at the end of the object."""
        return super().read(offset, max(0, min(size, self.size - offset)))


def _fetch(remote: RemoteFile, replacement: Replacement, progress: Progress | None) -> None:
    """Requests the bytes that have not arrived, and writes them as they arrive; see the module."""
    file, size, key = replacement.file, remote.size, remote.cache_key()
    mark = hashlib.sha256(f"{key} {file.status().st_ino}".encode()).digest()
    if key is None or file.read(size, _MARK_SIZE) != mark:
        file.truncate(0)
        file.write(size, mark)
    logged = logged_pieces(file, size)
    log_end = size + _MARK_SIZE + len(logged) * _LOGGED.size
    gaps = list(_gaps(logged, size))
    missing = sum(nbytes for _, nbytes in gaps)
    counter = ProgressCounter(progress, size)
    if missing < size:
        counter.add(size - missing)
    try:
        require_space(file.absolute_path, missing)
        with contextlib.closing(remote.stream_ranges(gaps)) as arriving:
            for offset, piece in arriving:
                file.write(offset, piece)
                file.write(log_end, _LOGGED.pack(offset, offset + len(piece)))
                log_end += _LOGGED.size
                missing -= len(piece)
                counter.add(len(piece))
    except OSError as error:
        if missing == size:
            file.truncate(0)  # so that nothing is left
        elif replacement.is_resumable:
            path = partial_path(os.path.realpath(file.absolute_path))
            error.strerror = (
                f"{error.strerror}; {path} keeps {size - missing} of {size} bytes, and the "
                "next download asks for the others"
            )
        raise
    if missing:
        raise OSError(errno.EIO, f"the server sent {missing} bytes too few", remote.path)


def _fetch_whole(
    remote: WholeObject, file: MappedFile, progress: Progress | None, *, is_hashed: bool
) -> tuple[int, str | None]:
    """Writes all bytes as they arrive; returns their number, and their SHA-256 if `is_hashed`.

    If the first bytes are not those of an archive, as of a page for a login, reading ends there.
    """
    warnings.warn(
        f"{remote.path}: the server does not answer requests for ranges of bytes, so the download "
        "cannot be resumed if it is interrupted",
        stacklevel=2,
    )
    file.truncate(0)
    counter = ProgressCounter(progress, remote.size)
    digest = hashlib.sha256() if is_hashed else None
    nbytes = 0
    try:
        require_space(file.absolute_path, remote.size)
        with contextlib.closing(remote.stream()) as pieces:
            for piece in pieces:
                is_archive = nbytes > 0 or piece.startswith(LocalHeader.SIGNATURE)
                file.write(nbytes, piece)
                if digest is not None:
                    digest.update(piece)
                nbytes += len(piece)
                counter.add(len(piece))
                if not is_archive:
                    break
    except OSError:
        file.truncate(0)
        raise
    return nbytes, None if digest is None else digest.hexdigest()


def logged_pieces(file: MappedFile, size: int) -> list[tuple[int, int]]:
    """Begin and end of the pieces of an object of `size` bytes that have arrived in a file."""
    log = file.read(size + _MARK_SIZE, _MOST_LOGGED * _LOGGED.size)
    pieces = []
    for begin, end in _LOGGED.iter_unpack(log[: len(log) - len(log) % _LOGGED.size]):
        if not begin < end <= size:
            break  # damaged
        pieces.append((begin, end))
    return pieces


def _gaps(pieces: list[tuple[int, int]], size: int) -> Iterator[Range]:
    """Offset and size of each range between pieces."""
    position = 0
    for begin, end in [*sorted(pieces), (size, size)]:
        if begin > position:
            yield position, begin - position
        position = max(position, end)


def arrived_nbytes(file: MappedFile, size: int) -> int:
    """Number of the bytes of an object of `size` bytes that have arrived in a file."""
    return size - sum(nbytes for _, nbytes in _gaps(logged_pieces(file, size), size))
