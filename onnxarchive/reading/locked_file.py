"""Opens the file of an archive, and refuses what is read of it while an edit runs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from onnxarchive.errors import (
    ArchiveFormatError,
    LockedError,
    Report,
    UnfinishedEditError,
    with_path,
    without_traceback,
)
from onnxarchive.files import local_file, locking
from onnxarchive.files.local_file import MappedFile
from onnxarchive.files.random_access import RandomAccessFile
from onnxarchive.remote.location import Location
from onnxarchive.sources.recognition import recognised
from onnxarchive.zipformat.end_records import SEARCHED_SIZE, locate

if TYPE_CHECKING:
    from onnxarchive.remote.transfers import Read


@contextlib.contextmanager
def opened(
    location: Location,
    *,
    timeout: float | None = locking.TIMEOUT,
    read: Read | None = None,
) -> Iterator[RandomAccessFile]:
    """Opens an archive's file; a local file is not edited while the block runs.

    The file is closed if the block raises an error, and otherwise stays open; a file object of the
    caller always stays open.

    Args:
        location: The archive.
        timeout: Seconds to wait for the lock of a local file; None waits without limit.
        read: See `Location.open`.

    Raises:
        UnfinishedEditError: The block raised ArchiveFormatError, and an edit of the file was
            interrupted.
        LockedError: The file was edited while the block ran.
        ArchiveFormatError: The file is not a regular file.
        OSError: The file cannot be opened; for other errors see `Location.open`.
    """
    if location.path is not None:
        with (
            recognised(location.path),
            opened_archive(location.path, rule="FILE-1", timeout=timeout) as local,
        ):
            yield local
        return
    file = location.open(read)
    try:
        with recognised(file), with_path(file.path):
            yield file
    except BaseException:
        file.close()
        raise


@contextlib.contextmanager
def opened_archive(
    path: str | os.PathLike[str],
    *,
    rule: str | None = None,
    timeout: float | None = locking.TIMEOUT,
) -> Iterator[MappedFile]:
    """Opens an archive's file, and locks it against edits while the block runs.

    If the file cannot be locked in time, the block runs without the lock, and what it has read is
    refused if an edit was running.

    Args:
        path: The archive.
        rule: The rule to name in the error if the path is no regular file, or None.
        timeout: Seconds to wait for the lock; None waits without limit.

    Raises:
        UnfinishedEditError: The block raised ArchiveFormatError, and an edit of the file was
            interrupted.
        LockedError: The file could not be locked and was edited while the block ran, or this
            thread is editing it.
        ArchiveFormatError: The file is not a regular file.
        OSError: The file cannot be opened.
    """
    with (
        with_path(path),
        local_file.opened(path, rule=rule, timeout=timeout) as file,
        contextlib.nullcontext() if file.lock_failure is None else _unedited(file),
    ):
        try:
            yield file
        except ArchiveFormatError as error:
            from onnxarchive.reading import unfinished  # not needed to open a complete archive

            try:
                unfinished.require_finished(file)
            except UnfinishedEditError:
                without_traceback(error)
                raise
            raise


@contextlib.contextmanager
def _unedited(file: MappedFile) -> Iterator[None]:
    """Refuses what the block has read of a file without a lock if an edit was running."""
    failure = file.lock_failure
    edited = LockedError(
        "the file cannot be locked, and an edit changed it while it was read; try again"
    )
    if isinstance(failure, LockedError):
        edited = failure
    with file.reopened() as copy:  # the block may close `file`
        before = _end(copy)
        file.size = copy.size  # an edit may have ended since the size was read
        try:
            yield
        except (ArchiveFormatError, UnfinishedEditError) as error:
            is_running = edited is failure and isinstance(error, UnfinishedEditError)
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
        bounds = locate(end, file.size, Report())
        if bounds is not None:
            end = file.read(bounds.offset, file.size - bounds.offset)
    return file.size, end
