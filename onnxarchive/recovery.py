"""One writer at a time, and what a crash has left to the next one.

Whoever changes an archive has the lock of its file meanwhile. What is found then of a change that
was cut off is taken back first, with the journal that it left.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onnxarchive import journal, locking
from onnxarchive.archive import Archive, check_data, read_contents
from onnxarchive.errors import ArchiveError, ArchiveFormatError, Report, naming
from onnxarchive.files import MappedFile, remove_abandoned
from onnxarchive.journal import Journal, Span
from onnxarchive.local_headers import LocalHeaders
from onnxarchive.zipformat import directory
from onnxarchive.zipformat.directory import Entry
from onnxarchive.zipformat.writer import Counter

__all__ = ["Recovery", "alone_with", "locked", "recover", "settle"]


@dataclass(frozen=True, slots=True)
class Recovery:
    """What `recover` did.

    Attributes:
        is_rolled_back: Whether a change that was cut off was taken back.
        removed: Paths of files that were left by processes that were killed, and are removed.
    """

    is_rolled_back: bool
    removed: tuple[str, ...]


def recover(
    path: str | os.PathLike[str], *, force: bool = False, timeout: float | None = None
) -> Recovery:
    """Makes an archive whole again after a crash, and removes what killed processes left beside it.

    Opening an archive for writing takes back a change that was cut off, too.

    Args:
        path: The archive, which need not exist: a first `save` may have been killed.
        force: Whether to write back a journal also where other bytes of the file than those that
            it holds have changed, too.
        timeout: As in `replace_model`.

    Raises:
        LockedError: Somebody else was at work on the archive all the time.
        ArchiveError: There is a journal, which does not belong to the file or is damaged, and the
            file is no archive.
        OSError: The archive cannot be read or written, or neither it nor anything left by killed
            processes is there.
    """
    removed = remove_abandoned(path)
    if removed and not os.path.exists(path):
        return Recovery(False, tuple(removed))
    with naming(path), locked(path, timeout, os.O_RDWR) as descriptor:
        had_journal = os.path.lexists(journal.path_of(path))
        if settle(path, descriptor, force=force):
            return Recovery(True, tuple(removed))
        if had_journal:
            removed.append(journal.path_of(path))
        else:
            _require_archive(path)
    return Recovery(False, tuple(removed))


@contextlib.contextmanager
def locked(path: str | os.PathLike[str], timeout: float | None, flags: int) -> Iterator[int]:
    """The file at `path`, open and locked against all others."""
    MappedFile(path, rule="FILE-1").close()  # refuses what is no regular file
    with locking.exclusive_at(path, flags, timeout) as descriptor:
        yield descriptor


@contextlib.contextmanager
def alone_with(
    path: str | os.PathLike[str], timeout: float | None, *, copy: bool
) -> Iterator[tuple[Archive, int]]:
    """An archive that nobody else opens or changes, and its descriptor for writing."""
    flags = os.O_RDONLY if copy else os.O_RDWR
    with locked(path, timeout, flags) as descriptor:
        if not copy:
            _require_one_name(path, descriptor)
            settle(path, descriptor)
        file = MappedFile(path, rule="FILE-1")
        try:
            journal.require_complete(file)  # of one that was not settled
            archive = Archive(file)
        except BaseException:
            file.close()
            raise
        with archive:
            yield archive, descriptor


def _require_one_name(path: str | os.PathLike[str], descriptor: int) -> None:
    names = os.fstat(descriptor).st_nlink
    found = None
    if os.path.islink(path):
        found = f"a symbolic link to {os.path.realpath(path)}, which others may use"
    elif names > 1:
        found = f"a file with {names} names (hard links), all of which would change"
    if found is not None:
        raise ValueError(
            f"{os.fspath(path)}: expected a file with this name alone, found {found}; copy=True "
            "(--copy) puts a new file here"
        )


def settle(path: str | os.PathLike[str], descriptor: int, *, force: bool = False) -> bool:
    """Takes back a change that was cut off, and removes the journal, of whichever file it is.

    Returns:
        Whether there was such a change.

    Raises:
        ArchiveError: The journal is of another file or damaged, and this one is no archive.
    """
    if not os.path.lexists(journal.path_of(path)):
        return False
    found = journal.read(path)
    with MappedFile(path) as file:
        is_of_archive = found is not None and found.is_of(file) and _is_of_archive(found, file)
        if found is not None and not force and not (is_of_archive and found.has_inode_of(file)):
            fault = _fault(file, found.spans)
            if fault is None:  # another archive has come here, and is whole
                found = None
            elif not is_of_archive:
                raise _unsettled(path, fault)
        elif found is None:  # it was never completed, so that nothing was changed
            fault = _fault(file, ())
            if fault is not None:
                raise _unsettled(path, fault)
    if found is not None:
        found.roll_back(descriptor)
    journal.remove(path)
    return found is not None


def _is_of_archive(found: Journal, file: MappedFile) -> bool:
    """Whether a file has the entries that stay, by the directory that a journal holds.

    Another archive may have been written into the same file since, as `cp` does.
    """
    if not found.spans:
        return False
    tail = found.read(max(found.size - directory.TAIL_SIZE, found.spans[-1].offset), found.size)
    report = Report()
    try:
        bounds = directory.locate(tail, found.size, report)
        assert bounds is not None  # the report would have raised
        if bounds.offset < found.spans[-1].offset:  # which no change leaves out
            return False
        listed = directory.read(found.read(bounds.offset, bounds.size), bounds, report)
        headers = LocalHeaders(file, listed)
        for number, entry in enumerate(listed.entries):
            if not _overlaps(entry, found.spans):
                headers.compare(number, report)
    except ArchiveFormatError:
        return False
    return True


def _fault(file: MappedFile, spans: Sequence[Span]) -> ArchiveFormatError | None:
    """Why a file is no archive, or entries in its `spans` are not whole; None if all is well."""
    try:
        contents = read_contents(file, Report())
        headers = LocalHeaders(file, contents.directory)
        for number, entry in enumerate(contents.directory.entries):
            if _overlaps(entry, spans):
                headers.compare(number, Report())
                site = contents.sites.get(entry.name)
                check_data(file, entry, site, Report(), Counter(None, 0))
    except ArchiveFormatError as error:
        return error
    return None


def _overlaps(entry: Entry, spans: Sequence[Span]) -> bool:
    end = entry.data_offset + entry.nbytes
    return any(start < end and entry.header_offset < start + nbytes for start, nbytes in spans)


def _unsettled(path: str | os.PathLike[str], fault: ArchiveFormatError) -> ArchiveError:
    return ArchiveError(
        f"expected an archive, or the journal of its last change, found a file that is not whole "
        f"({fault.message}) and a journal that is damaged or of another file, "
        f"{journal.path_of(path)}; if the two belong together, force=True (--force) writes it "
        "back; both are left as they are"
    )


def _require_archive(path: str | os.PathLike[str]) -> None:
    with MappedFile(path) as file:
        fault = _fault(file, ())
    if fault is not None:
        raise ArchiveError(
            f"expected an archive, found a file that is not whole ({fault.message}), and no "
            f"journal {journal.path_of(path)}; if the file was moved, move its journal to there"
        ) from fault
