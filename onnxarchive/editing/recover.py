"""Finds interrupted edits of archives and rolls them back.

An interrupted edit in place leaves its undo log at the end of the archive (see `undo`); a rollback
needs no other file. The edit is rolled back only if the result is an archive.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from onnxarchive.editing.pairs import recover_pairs
from onnxarchive.errors import AGAIN, ArchiveError, ArchiveFormatError, Strict, with_path
from onnxarchive.files import local_file, locking, undo
from onnxarchive.files.data import File
from onnxarchive.files.hidden_files import (
    TEMPORARY,
    hidden_names,
    partial_downloads,
    remove_abandoned,
    remove_regular,
    targets_of,
)
from onnxarchive.files.local_file import MappedFile
from onnxarchive.files.new_directory import CONTENT, remove_leftover
from onnxarchive.reading.archive_file import unfinished_edit
from onnxarchive.reading.contents import read_contents
from onnxarchive.remote.location import Location
from onnxarchive.sources.damage import followed_archive
from onnxarchive.sources.recognition import is_zip, recognised
from onnxarchive.zipformat.records import LocalHeader


@dataclass(frozen=True, slots=True)
class Recovery:
    """The outcome of `recover`.

    Attributes:
        is_rolled_back: True if an interrupted edit was rolled back.
        removed: Paths of removed files and directories that killed processes had left.
        downloads: Paths of partial downloads that remain.
        export: `"completed"` or `"undone"` if there was an interrupted export with external data;
            else None.
        cut_nbytes: Number of bytes after the archive that were cut off.

    Example:
        recovery = onnxarchive.recover("model.onnxa")
        print(recovery.is_rolled_back, recovery.removed)
    """

    is_rolled_back: bool
    removed: tuple[str, ...]
    downloads: tuple[str, ...] = ()
    export: Literal["completed", "undone"] | None = None
    cut_nbytes: int = 0


def recover(
    path: str | os.PathLike[str],
    *,
    downloads: bool = False,
    cut: bool = False,
    timeout: float | None = locking.TIMEOUT,
) -> Recovery:
    """Rolls back an interrupted edit, and removes what killed processes left of a file.

    A complete archive is never changed. `edit` rolls back, too.

    The files of a killed `export` or `extract` are found by the name of the file or directory that
    it was to write. If `export` was killed while it replaced a model and its external data, both
    become the new ones, or both the old ones. A directory that existed before and was being filled
    keeps its files. Nothing is removed if the folder cannot be listed, or if locks cannot show
    whether the process still runs.

    Args:
        path: The archive; or the file or directory that was to be written, which need not exist.
        downloads: Whether to also remove the partial download of the file, which the next download
            would resume.
        cut: Whether to cut off bytes that another tool has appended to the archive. Everything
            before them must be valid: directory, models and local headers. Without `cut`, the error
            says how many bytes follow, and how they begin.
        timeout: As in `edit`.

    Returns:
        What was rolled back, cut off, removed or kept.

    Raises:
        LockedError: The archive stayed locked until `timeout`.
        ArchiveError: The file is not an archive and nothing else was found, or a rollback or a cut
            would not restore an archive. The file is unchanged.
        OSError: The archive cannot be read or written; neither the file nor anything left of it
            exists; or a file cannot be renamed or removed.

    Example:
        onnxarchive.recover("model.onnxa")
    """
    locking.require_timeout(timeout)
    path = Location.of(path).require_local()
    pair = recover_pairs(path)
    removed = [*pair.removed, *remove_abandoned(path)]
    removed += _remove_directories(path)
    kept = []
    for partial in partial_downloads(path):
        if downloads and remove_regular(partial):
            removed.append(partial)
        else:
            kept.append(partial)
    export: Literal["completed", "undone"] | None = None
    if pair.is_completed or pair.is_undone:
        export = "completed" if pair.is_completed else "undone"
    recovery = Recovery(False, tuple(removed), tuple(kept), export)
    if (removed or kept or export) and not _is_zip(path):
        return recovery  # no archive is there, but an export, for example
    with opened_for_edit(path, is_writable=True, timeout=timeout) as file, file:
        if roll_back(file):
            return replace(recovery, is_rolled_back=True)
        cut_nbytes = _cut(file) if cut else 0
        _require_whole(file)
        return replace(recovery, cut_nbytes=cut_nbytes)


def _remove_directories(path: str) -> list[str]:
    """Removes the directories of killed processes; returns their paths.

    A directory that was to become the one at `path` is beside it. A directory whose content was to
    be moved into an existing one is in that one.
    """
    removed = []
    for target in targets_of(path):
        found = [*hidden_names(target, TEMPORARY)]
        if os.path.isdir(target):
            found += hidden_names(os.path.join(target, CONTENT), TEMPORARY)
        for directory in found:
            with contextlib.suppress(OSError):  # in use, or of another user
                if remove_leftover(directory):
                    removed.append(directory)
    return removed


def _is_zip(path: str) -> bool:
    try:
        with MappedFile(path) as file:
            return is_zip(file.read(0, len(LocalHeader.SIGNATURE)))
    except (FileNotFoundError, ArchiveFormatError):  # missing, or a directory
        return False


@contextlib.contextmanager
def opened_for_edit(
    path: str | os.PathLike[str], *, is_writable: bool | None, timeout: float | None
) -> Iterator[MappedFile]:
    """Opens the file of an archive, locked exclusively during the block; see `locked_file`.

    An error names the path, and the kind of a file that is not an archive.
    """
    with (
        recognised(path),
        with_path(path),
        local_file.locked_file(
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


def _cut(file: MappedFile) -> int:
    """Cuts off the bytes after the archive in a locked file; returns their number.

    Raises:
        ArchiveError: What would be left breaks a rule. The file is unchanged.
    """
    chain = followed_archive(file)
    if chain is None or chain.first_model is None or chain.size is None:
        return 0
    # The file as it was before the other bytes, like the state before an edit without a log.
    before = undo.UnfinishedEdit(file, chain.first_model, chain.size)
    cut_nbytes = file.size - before.size
    try:
        _require_whole(before)
    except ArchiveFormatError as error:
        raise ArchiveError(
            f"the archive before the last {cut_nbytes:,} bytes is not valid ({error.message}); "
            f"nothing was cut off: {AGAIN}"
        ) from error
    undo.restore(before)
    return cut_nbytes


def _require_whole(file: File) -> None:
    """Checks all of an archive except the data of tensors and assets."""
    contents = read_contents(file, Strict(), undo.MAX_END_NBYTES)
    for number in range(len(contents.directory.entries)):
        contents.check_header(number, contents.strict)
