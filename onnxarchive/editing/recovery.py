"""Finds interrupted edits of archives and rolls them back.

An interrupted edit in place leaves its undo log at the end of the archive (see `undo`); a rollback
needs no other file. The edit is rolled back only if the result is an archive.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from onnxarchive.errors import ArchiveError, ArchiveFormatError, Strict, with_path
from onnxarchive.files import local_file, locking, undo
from onnxarchive.files.file import File
from onnxarchive.files.hidden_files import remove_abandoned
from onnxarchive.files.local_file import MappedFile
from onnxarchive.reading.archive_file import unfinished_edit
from onnxarchive.reading.contents import read_contents
from onnxarchive.remote.location import Location
from onnxarchive.sources.recognition import recognised


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

    A complete archive is never changed. `edit` rolls back, too. Temporary files
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
    path = Location.of(path).require_local()
    removed = tuple(remove_abandoned(path))
    if removed and not os.path.exists(path):
        return Recovery(False, removed)
    with opened_for_edit(path, is_writable=True, timeout=timeout) as file, file:
        if roll_back(file):
            return Recovery(True, removed)
        _require_whole(file)
        return Recovery(False, removed)


@contextlib.contextmanager
def opened_for_edit(
    path: str | os.PathLike[str], *, is_writable: bool | None, timeout: float | None
) -> Iterator[MappedFile]:
    """Opens the file of an archive, locked exclusively during the block; see `files.opened`.

    An error names the path, and the kind of a file that is not an archive.
    """
    with (
        recognised(path),
        with_path(path),
        local_file.opened(
            path, rule="FILE-1", is_exclusive=True, is_writable=is_writable, timeout=timeout
        ) as file,
    ):
        yield file


def roll_back(file: MappedFile) -> bool:
    """Rolls back an interrupted edit of an archive, a locked file; False if there is none.

    Raises:
        ArchiveError: After a rollback the file would not be an archive. The file is unchanged.
    """
    edit = unfinished_edit(file)
    if edit is None:
        return False
    try:
        _require_whole(edit)
    except ArchiveFormatError as error:
        raise ArchiveError(
            "an edit was interrupted, and rolling it back would not give a valid archive "
            f"({error.message}); the file is unchanged: restore it from a backup"
        ) from error
    undo.restore(edit)
    return True


def _require_whole(file: File) -> None:
    """Checks all of an archive except the data of tensors and assets."""
    contents = read_contents(file, Strict(), undo.MAX_END_NBYTES)
    for number in range(len(contents.directory.entries)):
        contents.check_header(number, contents.strict)
