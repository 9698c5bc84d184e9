"""Opens the file of an archive; refuses half-written and interrupted edits.

An interrupted edit leaves an undo log at the end of the file (see `undo`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from onnxarchive.errors import (
    ArchiveFormatError,
    LockedError,
    Strict,
    UnfinishedEditError,
    recover_command,
    with_path,
    without_traceback,
)
from onnxarchive.files import local_file, locking
from onnxarchive.files.data import File, closing_on_error
from onnxarchive.files.local_file import MappedFile
from onnxarchive.remote.location import Location
from onnxarchive.sources.damage import read_chain
from onnxarchive.sources.recognition import recognised
from onnxarchive.zipformat.end_records import SEARCHED_SIZE, locate
from onnxarchive.zipformat.records import EndRecord

if TYPE_CHECKING:
    from onnxarchive.files.undo import UnfinishedEdit
    from onnxarchive.remote.downloads import Read


@contextlib.contextmanager
def locked_archive_file(
    location: Location,
    *,
    timeout: float | None = locking.TIMEOUT,
    read: Read | None = None,
    expected: str = "an ONNX archive",
    file: MappedFile | None = None,
) -> Iterator[File]:
    """Opens an archive's file; a local file is locked against edits while the block runs.

    The file is closed if the block raises an error, and otherwise stays open; a file object of the
    caller always stays open. If a local file cannot be locked in time, the block runs without the
    lock, and what it has read is refused if an edit was running.

    Args:
        location: The archive.
        timeout: Seconds to wait for the lock of a local file; None waits without limit.
        read: See `Location.open`, also for errors.
        expected: See `recognised`.
        file: The local file if it is open already, but not mapped. It is closed if another file is
            at its path once it can be locked.

    Raises:
        UnfinishedEditError: The block raised ArchiveFormatError, and an edit of the file was
            interrupted.
        LockedError: The file could not be locked and was edited while the block ran, or this
            thread is editing it.
    """
    path = location.path
    if path is None:
        remote = location.open(read)
        with (
            closing_on_error(remote),
            recognised(remote, expected=expected),
            with_path(remote.path),
        ):
            yield remote
        return
    with (
        recognised(path, expected=expected),
        with_path(path),
        local_file.locked_file(path, rule="FILE-1", timeout=timeout, file=file) as local,
        contextlib.nullcontext() if local.lock_failure is None else _unedited(local),
    ):
        try:
            yield local
        except ArchiveFormatError as error:
            try:
                require_finished(local)
            except UnfinishedEditError:
                without_traceback(error)
                raise
            raise


@contextlib.contextmanager
def _unedited(file: MappedFile) -> Iterator[None]:
    """Refuses what the block has read without a lock, if an edit was running meanwhile."""
    edited = file.lock_failure
    if not isinstance(edited, LockedError):
        edited = LockedError(
            "the file cannot be locked, and an edit changed it while it was read; try again"
        )
    with file.reopened() as copy:  # the block may close `file`
        before = _end(copy)
        file.size = copy.size  # an edit may have ended since the size was read
        try:
            yield
        except (ArchiveFormatError, UnfinishedEditError) as error:
            is_running = edited is file.lock_failure and isinstance(error, UnfinishedEditError)
            if is_running or _end(copy) != before:
                raise edited from error
            raise
        if _end(copy) != before:
            raise edited


def _end(file: MappedFile) -> tuple[int, bytes]:
    """The present size, directory and end records of an archive; updates `file.size`.

    Every edit changes them, since they hold the CRC-32s of all models.
    """
    file.size = file.status().st_size
    end = file.read(max(file.size - SEARCHED_SIZE, 0), SEARCHED_SIZE)
    with contextlib.suppress(ArchiveFormatError):
        bounds = locate(end, file.size, Strict())
        if bounds is not None:
            end = file.read(bounds.offset, file.size - bounds.offset)
    return file.size, end


def require_finished(file: MappedFile) -> None:
    """Refuses a locked file that ends with an undo log, with an UnfinishedEditError."""
    if unfinished_edit(file) is not None:
        raise UnfinishedEditError(
            f"the last edit of the archive was interrupted; {recover_command(file.path)} rolls "
            "the edit back, and so does the next edit",
            path=file.path,
        )


def unfinished_edit(file: MappedFile) -> UnfinishedEdit | None:
    """The interrupted edit of an archive; None if the file does not end with an undo log."""
    from onnxarchive.files import undo  # and hashlib: no need of them to open a complete archive

    edit = undo.unfinished_edit(file)
    if edit is not None or EndRecord.unpack(
        file.read(max(file.size - EndRecord.SIZE, 0), EndRecord.SIZE)
    ):
        return edit
    chain = read_chain(file)
    if chain.first_model is None or chain.size is None:
        return None
    return undo.find_torn(file, chain.first_model, chain.size)
