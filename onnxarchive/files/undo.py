"""Edits the end of a file completely or not at all, with an undo log in the file itself.

During an edit of a file of `old_size` bytes, the file consists of:

- the bytes before `offset`, which do not change,
- at `offset` the old end, which the new end overwrites,
- at max(`old_size`, new size) the log: a copy of the old end with all bits inverted, so that no
  zip reader finds records in the copy,
- and the trailer of the log, in the last bytes.

The log is complete and synced before the new end is written. The new end is synced before the file
is truncated to its new size. The truncation completes the edit; until then, the log restores the
old file. While the log is incomplete, the bytes of the old file are unchanged. A file is rolled
back only if a complete or incomplete log is at the end of the file.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from onnxarchive.errors import ArchiveError, UnfinishedEditError, recover_command
from onnxarchive.files.clones_and_sync import require_space, sync
from onnxarchive.files.data import Buffer, File
from onnxarchive.files.local_file import MappedFile, PositionalWriter

# Magic, `offset`, `old_size`, SHA-256 of the inverted copy. The trailer consists of these four
# fields and their SHA-256.
_SIGNED: Final = struct.Struct("<16sQQ32s")
_MAGIC: Final = b"onnxa undo log 1"
TRAILER_SIZE: Final = _SIGNED.size + hashlib.sha256().digest_size
# Largest old end (models, directory and end records) that has an undo log, in bytes. A forged
# trailer in a sparse file could state a larger end, and `find` would hash all bytes of this end.
MAX_END_NBYTES: Final = 3 << 30


class UnfinishedEdit(File):
    """An interrupted edit; reads the file's state before the edit, and does not change the file.

    Attributes:
        file: The file.
        offset: Offset of the old end's first byte in the file, in bytes.
        size: Size of the old file in bytes.
        copy_offset: Offset of the inverted copy of the old end; None if the log is incomplete and
            the old end unchanged.
    """

    def __init__(
        self, file: MappedFile, offset: int, size: int, copy_offset: int | None = None
    ) -> None:
        self.path, self.identity = file.path, file.identity
        self.file, self.offset, self.size, self.copy_offset = file, offset, size, copy_offset

    @property
    def end_nbytes(self) -> int:
        """Size of the old end in bytes."""
        return self.size - self.offset

    def read(self, offset: int, size: int) -> bytes:
        """See `File.read`."""
        copy_offset = self.copy_offset
        size = max(min(size, self.size - offset), 0)
        if copy_offset is None:
            return self.file.read(offset, size)
        unchanged = max(min(self.offset - offset, size), 0)
        copy_offset += max(offset - self.offset, 0)
        old_end = _inverted(self.file.read(copy_offset, size - unchanged))
        return self.file.read(offset, unchanged) + old_end if unchanged else old_end


def unfinished_edit(file: MappedFile) -> UnfinishedEdit | None:
    """The edit with a complete log at the end of the file; None if there is none."""
    position = file.size - TRAILER_SIZE
    trailer = file.read(max(position, 0), TRAILER_SIZE)
    if position < 0 or len(trailer) != TRAILER_SIZE:
        return None
    signed = trailer[: _SIGNED.size]
    magic, offset, old_size, checksum = _SIGNED.unpack(signed)
    if magic != _MAGIC or trailer != signed + hashlib.sha256(signed).digest():
        return None
    copy_offset = position - (old_size - offset)
    if not (offset <= old_size <= copy_offset and old_size - offset <= MAX_END_NBYTES):
        return None
    digest = hashlib.sha256()
    for piece in file.pieces(copy_offset, old_size - offset):
        digest.update(piece)
    is_whole = digest.digest() == checksum
    return UnfinishedEdit(file, offset, old_size, copy_offset) if is_whole else None


def find_torn(file: MappedFile, offset: int, old_size: int) -> UnfinishedEdit | None:
    """The edit with an incomplete log at the end of the file; None if there is none.

    Bytes of the log that did not reach the disk are zeros. For arguments see `UnfinishedEdit`.
    """
    edit = UnfinishedEdit(file, offset, old_size)
    position = file.size - TRAILER_SIZE - edit.end_nbytes
    if position < old_size or edit.end_nbytes > MAX_END_NBYTES:
        return None
    if not file.has_zeros_alone(old_size, position - old_size):
        return None
    for piece in _log(edit):
        read = np.frombuffer(file.read(position, len(piece)), np.uint8)
        expected = np.frombuffer(piece, np.uint8)
        # A byte that is neither the log's nor 0 was written by somebody else: what follows the
        # archive is theirs, and not a log that may be cut off.
        if len(read) != len(piece) or ((read != 0) & (read != expected)).any():
            return None
        position += len(piece)
    return edit


def _inverted(data: Buffer) -> bytes:
    """The data with all bits inverted."""
    return np.invert(np.frombuffer(data, np.uint8)).tobytes()


def _log(edit: UnfinishedEdit) -> Iterator[bytes]:
    """Yields pieces of the log of an edit; called before the old end is overwritten."""
    checksum = hashlib.sha256()
    for piece in edit.file.pieces(edit.offset, edit.end_nbytes):
        inverted = _inverted(piece)
        checksum.update(inverted)
        yield inverted
    signed = _SIGNED.pack(_MAGIC, edit.offset, edit.size, checksum.digest())
    yield signed + hashlib.sha256(signed).digest()


def change_end(
    file: MappedFile, offset: int, new_size: int, write: Callable[[PositionalWriter], object]
) -> None:
    """Replaces the end of a file completely or not at all.

    After an error, the old end is restored. After a crash, `restore` can restore the old end. The
    file must be open for writing and locked; `new_size` is its size after `write`.

    Raises:
        ArchiveError: `write` wrote too few or too many bytes, this process is a fork, or both the
            edit and the rollback failed.
        OSError: The file cannot be written. The file is unchanged, unless only the last sync
            failed. In that case the file has the new end, but a power failure may undo the edit.
    """
    edit = UnfinishedEdit(file, offset, file.size)
    copy_offset = max(edit.size, new_size)
    logged_size = copy_offset + edit.end_nbytes + TRAILER_SIZE
    descriptor = file.fileno()
    try:
        directory = os.path.dirname(file.absolute_path)
        require_space(file.path, logged_size - file.size, directory)
        file.truncate(logged_size)
        log = PositionalWriter(file, copy_offset, logged_size)
        for piece in _log(edit):
            log.write(piece)
        sync(file, "copy=True (--copy) writes a new file instead of changing this one")
        edit.copy_offset = copy_offset
        target = PositionalWriter(file, offset, new_size)
        write(target)
        if target.offset != new_size:
            raise ArchiveError(f"expected to write up to offset {new_size}, found {target.offset}")
        sync(file)
        file.truncate(new_size)
        sync(file)
    except BaseException as error:
        is_made = edit.copy_offset is not None and os.fstat(descriptor).st_size == new_size
        if file.is_own and not is_made:  # a fork does not end the edit of its parent
            try:
                restore(edit)
            except OSError as second:
                raise UnfinishedEditError(
                    f"editing the archive failed: {error}; rolling the edit back failed, too: "
                    f"{second}; remove the cause, then run {recover_command(file.path)}",
                    path=file.path,
                ) from error
        raise


def restore(edit: UnfinishedEdit) -> None:
    """Restores the old end and size of a file; an interrupted restore can be repeated.

    The file must be open for writing and locked.

    Raises:
        ArchiveError: Another process has truncated the file meanwhile.
        OSError: The file cannot be written; the log remains.
    """
    file = edit.file
    if edit.copy_offset is not None:
        offset = edit.offset
        for piece in edit.pieces(offset, edit.end_nbytes):
            file.write(offset, piece)
            offset += len(piece)
        if offset != edit.size:
            raise ArchiveError(
                f"expected {edit.end_nbytes} bytes of an undo log, found {offset - edit.offset}"
            )
        sync(file)
    file.truncate(edit.size)
    sync(file)
    file.size = edit.size
