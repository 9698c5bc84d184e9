"""Finds interrupted edits of archives and rolls them back.

An interrupted edit in place leaves its undo log at the end of the archive (see `undo`); a rollback
needs no other file. The edit is rolled back only if the result is an archive.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from onnxarchive.archive.contents import read_contents
from onnxarchive.archive.local_headers import LocalHeaders
from onnxarchive.errors import (
    ArchiveError,
    ArchiveFormatError,
    Report,
    UnfinishedEditError,
    with_path,
)
from onnxarchive.model.keys import MODEL_PROTO
from onnxarchive.sources.recognition import recognised
from onnxarchive.storage import files, locking, undo
from onnxarchive.storage.files import MappedFile
from onnxarchive.storage.replacement import remove_abandoned
from onnxarchive.storage.undo import FileBefore, UnfinishedEdit
from onnxarchive.zipformat import layout
from onnxarchive.zipformat.layout import Placement
from onnxarchive.zipformat.records import METHOD_STORED, EndRecord, LocalHeader

_USUAL_HEADER_SIZE = 512  # bytes; the largest local header has about 128 KiB

__all__ = ["Recovery", "opened_for_edit", "recover", "require_finished", "roll_back"]


@dataclass(frozen=True, slots=True)
class Recovery:
    """The outcome of `recover`.

    Attributes:
        is_rolled_back: True if an interrupted edit was rolled back.
        removed: Paths of removed temporary files, left by killed processes.

    Example:
        recovery = onnxarchive.recover("model.onnxa")
        print(recovery.is_rolled_back, recovery.removed)
    """

    is_rolled_back: bool
    removed: tuple[str, ...]


def recover(path: str | os.PathLike[str], *, timeout: float | None = locking.TIMEOUT) -> Recovery:
    """Rolls back an interrupted edit, and removes temporary files of killed processes.

    A complete archive is never changed. `open` with mode `"r+"` rolls back, too. Temporary files
    are not removed if the archive's folder cannot be listed.

    Args:
        path: The archive. The file need not exist: its first `save` may have been killed.
        timeout: Seconds to wait for the archive's lock; None waits without limit.

    Returns:
        Whether an edit was rolled back, and the removed files.

    Raises:
        LockedError: The archive stayed locked until `timeout`.
        ArchiveError: The file is not an archive, and a rollback would not restore one. The file is
            unchanged.
        OSError: The archive cannot be read or written, or no archive and no temporary file exists.

    Example:
        onnxarchive.recover("model.onnxa")
    """
    locking.require_timeout(timeout)
    with recognised(path):
        removed = tuple(remove_abandoned(path, _is_leftover))
    if removed and not os.path.exists(path):
        return Recovery(False, removed)
    with opened_for_edit(path, is_writable=True, timeout=timeout) as file, file:
        is_rolled_back = roll_back(file)
        if not is_rolled_back:
            _require_whole(file)
        return Recovery(is_rolled_back, removed)


@contextlib.contextmanager
def opened_for_edit(
    path: str | os.PathLike[str], *, is_writable: bool | None, timeout: float | None
) -> Iterator[MappedFile]:
    """Opens the file of an archive, locked exclusively during the block; see `files.opened`.

    An error names the path. If the file is not an archive, but of a kind that `recognised` knows,
    the error also names this kind.
    """
    with (
        recognised(path),
        with_path(path),
        files.opened(
            path, rule="FILE-1", is_exclusive=True, is_writable=is_writable, timeout=timeout
        ) as file,
    ):
        yield file


def require_finished(file: MappedFile) -> None:
    """Refuses a file with an interrupted edit; the caller has locked the file.

    Raises:
        UnfinishedEditError: The file ends with an undo log.
    """
    if _find(file) is not None:
        raise UnfinishedEditError(
            "expected a complete archive, found one whose last edit was interrupted; 'onnxarchive "
            "recover' rolls the edit back, and so does opening the archive for editing",
            path=file.path,
        )


def roll_back(file: MappedFile) -> bool:
    """Rolls back an interrupted edit.

    Args:
        file: The archive, locked; also open for writing if an edit was interrupted.

    Returns:
        True if an edit was rolled back.

    Raises:
        ArchiveError: After a rollback the file would not be an archive. The file is unchanged.
        OSError: The file cannot be read or written.
    """
    edit = _find(file)
    if edit is None:
        return False
    file.require_writable()
    try:
        _require_whole(FileBefore(file, edit))
    except ArchiveFormatError as error:
        raise ArchiveError(
            "an edit was interrupted, and rolling it back would not give a valid archive "
            f"({error.message}); the file is unchanged: restore it from a backup"
        ) from error
    undo.restore(file, edit)
    return True


def _require_whole(file: MappedFile) -> None:
    """Checks all of an archive except the data of tensors and assets."""
    contents = read_contents(file, Report(), undo.MAX_END_NBYTES)
    LocalHeaders(file, contents.directory).require_all()


def _find(file: MappedFile) -> UnfinishedEdit | None:
    """The interrupted edit of an archive; None if the file does not end with an undo log."""
    edit = undo.find(file)
    if edit is not None or EndRecord.unpack(
        file.read(max(file.size - EndRecord.SIZE, 0), EndRecord.SIZE)
    ):
        return edit
    before = _first_archive(file)
    return None if before is None else undo.find_torn(file, *before)


def _first_archive(file: MappedFile) -> tuple[int, int] | None:
    """Finds the archive at the beginning of a file by local headers alone.

    Returns:
        The offset of the first model's entry and the size of the archive, in bytes; None if the
        file does not begin with an archive.
    """
    offset = directory_size = 0
    first_model = None
    for count in range(1, layout.MAX_ENTRIES + 1):
        placement = _placement(file, offset)
        if placement is None or placement.end > file.size:
            return None
        directory_size += placement.directory_record().packed_size
        if placement.name.startswith(MODEL_PROTO.encode()):
            first_model = offset if first_model is None else first_model
            if placement.name == MODEL_PROTO.encode():
                end = layout.end_of_archive(count, directory_size, placement.end)
                return first_model, placement.end + directory_size + len(end)
        offset = placement.end
    return None


def _placement(file: MappedFile, offset: int) -> Placement | None:
    """The entry with a local header at `offset`, or None."""
    for size in (_USUAL_HEADER_SIZE, LocalHeader.MAX_SIZE):
        local = LocalHeader.unpack(file.read(offset, size))
        if local is not None:
            return layout.placement(local, offset)
    return None


def _is_leftover(file: MappedFile) -> bool:
    """True if a file holds the beginning of an archive, or only zeros."""
    begun = file.read(0, LocalHeader.MAX_SIZE)
    local = LocalHeader.unpack(begun.ljust(LocalHeader.MAX_SIZE, b"\0"))
    if local is None:
        return file.has_zeros_alone(0, file.size)
    is_cut = len(begun) < LocalHeader.SIZE + len(local.name) + len(local.extra)
    is_stored = local.method == METHOD_STORED
    return is_stored and (is_cut or layout.placement(local, 0) is not None)
