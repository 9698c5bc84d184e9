"""Opens the source of an archive: a file, bytes, a file object, or a remote object."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, TypeAlias, TypedDict, TypeGuard, Unpack

from onnxarchive.buffers.data import Buffer, as_bytes
from onnxarchive.errors import (
    ArchiveFormatError,
    LockedError,
    Report,
    UnfinishedEditError,
    with_path,
    without_traceback,
)
from onnxarchive.remote.urls import is_url
from onnxarchive.sources.recognition import not_a_file, recognised
from onnxarchive.storage import files, locking
from onnxarchive.storage.binary_file import BinaryFile, SupportsSeek
from onnxarchive.storage.files import MappedFile
from onnxarchive.storage.memory_file import MemoryFile
from onnxarchive.storage.random_access import RandomAccessFile
from onnxarchive.zipformat.end_records import locate
from onnxarchive.zipformat.false_ends import SEARCHED_SIZE

# A path, a URL, the bytes of an archive, or a seekable binary file object.
Openable: TypeAlias = str | os.PathLike[str] | Buffer | SupportsSeek


class StoreAccess(TypedDict, total=False):
    """Options for reaching a store; see `onnxarchive.open`."""

    store: Any
    storage_options: Mapping[str, Any] | None


class Access(StoreAccess, total=False):
    """Options for reaching remote archives; see `onnxarchive.open`. Local files ignore them."""

    cache: str | os.PathLike[str] | bool | None


def without_cache(access: Access) -> StoreAccess:
    """The options without `cache`."""
    return StoreAccess(store=access.get("store"), storage_options=access.get("storage_options"))


def require_known(
    options: Iterable[str], known: Collection[str] = Access.__optional_keys__
) -> None:
    """Refuses options with unknown names, such as misspelled arguments.

    Every function of this module that takes options calls it, whatever the source is.

    Raises:
        TypeError: There is such an option.
    """
    for name in options:
        if name not in known:
            from difflib import get_close_matches  # only this error needs it

            nearest = get_close_matches(name, known, 1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise TypeError(f"this function has no argument {name!r}{hint}")


def is_remote(source: object, access: Access) -> TypeGuard[str | os.PathLike[str]]:
    """True if the source is a URL or a path in a store."""
    require_known(access)
    is_path = isinstance(source, str | os.PathLike)
    return is_url(source) or (is_path and access.get("store") is not None)


def is_local(source: object, access: Access) -> TypeGuard[str | os.PathLike[str]]:
    """True if the source is a local path, neither a URL nor a path in a store."""
    return not is_remote(source, access) and isinstance(source, str | os.PathLike)


def require_path(source: Openable, access: Access) -> str | os.PathLike[str]:
    """The path of an archive to edit.

    Raises:
        UnsupportedFeatureError: The source is not a local file.
    """
    if is_local(source, access):
        return source
    raise not_a_file(source)


def exists(path: str, access: Access) -> bool:
    """True if the file or remote object exists."""
    if not is_remote(path, access):
        return os.path.lexists(path)
    from onnxarchive.remote.objects import has_object

    return has_object(path, **without_cache(access))


def files_of(source: object, access: Access) -> list[str]:
    """A list with the path of a local source; an empty list for other sources."""
    return [os.fspath(source)] if is_local(source, access) else []


@contextlib.contextmanager
def opened(
    source: Openable, *, timeout: float | None = locking.TIMEOUT, **access: Unpack[Access]
) -> Iterator[RandomAccessFile]:
    """Opens a source; a local file is not edited while the block runs, see `opened_archive`.

    The opened source is closed if the block raises an error, and otherwise stays open; a file
    object of the caller always stays open.

    Args:
        source: The source.
        timeout: Seconds to wait for the lock of a file; None waits without limit.
        access: Options for reaching a remote archive.

    Raises:
        UnfinishedEditError: The block raised ArchiveFormatError, and an edit of the file was
            interrupted.
        LockedError: The file was edited while the block ran.
        ArchiveFormatError: The file is not a regular file.
        TypeError: `source` is of another type.
        ValueError: A file object is not seekable or not binary.
        OSError: The source cannot be opened.
    """
    if is_local(source, access):
        with (
            recognised(source),
            opened_archive(source, rule="FILE-1", timeout=timeout) as file,
        ):
            yield file
        return
    other = _opened(source, access)
    try:
        with recognised(other), with_path(other.path):
            yield other
    except BaseException:
        other.close()
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
        files.opened(path, rule=rule, timeout=timeout) as file,
        _unedited(file),
    ):
        try:
            yield file
        except ArchiveFormatError as error:
            from onnxarchive.archive import unfinished  # not needed to open a complete archive

            try:
                unfinished.require_finished(file)
            except UnfinishedEditError:
                without_traceback(error)
                raise
            raise


@contextlib.contextmanager
def _unedited(file: MappedFile) -> Iterator[None]:
    """Refuses what the block has read if the file is not locked and an edit was running."""
    failure = file.lock_failure
    if failure is None:
        yield
        return
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


def _opened(source: Openable, access: Access) -> RandomAccessFile:
    if isinstance(source, bytes | bytearray | memoryview):
        return MemoryFile(as_bytes(source))
    if isinstance(source, str | os.PathLike):
        from onnxarchive.remote.opening import open_remote  # local files do not need it

        return open_remote(os.fspath(source), **access)
    if hasattr(source, "read"):
        return BinaryFile(source)
    raise TypeError(
        "expected a path, a URL, bytes or a binary file object, found "
        f"{type(source).__module__}.{type(source).__qualname__}"
    )
