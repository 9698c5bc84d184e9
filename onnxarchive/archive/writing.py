"""Writes planned archives in one pass over the entries; threads fetch data ahead."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

from onnxarchive.archive.items import Item, Items
from onnxarchive.archive.options import WriteOptions
from onnxarchive.archive.planning import Plan, require_names
from onnxarchive.archive.small_items import SmallEntries, fetch_small, in_groups
from onnxarchive.buffers.checksums import Crc32
from onnxarchive.buffers.counting import ProgressCounter
from onnxarchive.buffers.data import Data, Pieces, Stored, SupportsWrite, copied
from onnxarchive.errors import ArchiveFormatError, Report
from onnxarchive.model import tensors
from onnxarchive.remote.location import Location
from onnxarchive.storage import locking, threads
from onnxarchive.storage.file_data import FileData
from onnxarchive.storage.files import MappedFile
from onnxarchive.storage.filesystem import require_space
from onnxarchive.storage.random_access import READ_SIZE
from onnxarchive.storage.random_access_data import RandomAccessData
from onnxarchive.storage.replacement import Replacement, Require
from onnxarchive.zipformat.writer import ZipWriter

# With several threads, data of up to this many bytes is read once, into memory. Larger data of a
# file is read twice through a map: once for the CRC-32, and once by the writer. One read into
# memory would take as long.
COPIED_SIZE = 1 << 25


def write_archive(plan: Plan, target: Location, options: WriteOptions) -> int:
    """Writes a planned archive; gives its size in bytes.

    Args:
        plan: The plan.
        target: A path or URL, where the archive appears when it is complete; or a binary file,
            which is written sequentially.
        options: The options; only `alignment`, `progress`, `jobs` and `timeout` are used.
    """
    if target.path is not None:
        with write_file(plan, target.path, options) as written:
            locking.unlock(written.fileno())
            return written.size
    require_names(plan.items.names)
    if target.url is None:
        return _stream_all(plan, cast(SupportsWrite, target.source), options)
    nbytes = plan.size(options.alignment)
    with target.create(nbytes) as written_object:
        _stream_all(plan, written_object, options)
        written_object.commit()
    return nbytes


def write_file(
    plan: Plan,
    path: str | os.PathLike[str],
    options: WriteOptions,
    *,
    require: Require | None = None,
    is_locked: bool = False,
) -> MappedFile:
    """Writes a planned archive like `write_archive`; returns it, still locked except on Windows.

    Args:
        plan: The plan.
        path: The archive.
        options: The options; only `alignment`, `progress`, `jobs` and `timeout` are used.
        require: Called before the file is renamed; an error discards the file.
        is_locked: Whether the caller has locked the file at `path`. If so, a symbolic link is
            replaced, not its target.
    """
    require_names(plan.items.names)
    replacement = Replacement(
        path, follow_links=not is_locked, is_locked=is_locked, timeout=options.timeout
    )
    try:
        require_space(path, plan.nbytes)
        _stream_all(plan, replacement.file, options)
    except BaseException:
        replacement.discard()
        raise
    return replacement.commit_open(require)


def _stream_all(plan: Plan, target: SupportsWrite, options: WriteOptions) -> int:
    zip_writer = ZipWriter(target, alignment=options.alignment)
    counter = ProgressCounter(options.progress, plan.nbytes)
    return stream(plan, zip_writer, counter, options.thread_count)


def stream(plan: Plan, target: ZipWriter, counter: ProgressCounter, jobs: int = 1) -> int:
    """Writes entries, directory and end records; gives the size of the archive in bytes.

    Args:
        plan: The plan.
        target: The writer; only the caller's thread uses it.
        counter: Counts the bytes that are written.
        jobs: Largest number of threads that fetch data, including the caller's.
    """
    copied_size = COPIED_SIZE if jobs > 1 else READ_SIZE
    groups = [(entries, group) for entries in plan.parts for group in in_groups(entries.sizes)]
    sizes = [entries.sizes[it.start] if len(it) == 1 else 0 for entries, it in groups]

    def fetch(group: tuple[Items, range]) -> SmallEntries | Iterable[FetchedEntry]:
        entries, numbers = group
        return _fetched(entries[numbers.start : numbers.stop], copied_size)

    with contextlib.closing(threads.in_order(groups, sizes, fetch, jobs)) as fetched:
        for group in fetched:
            if isinstance(group, SmallEntries):
                target.add_small(*group)
                counter.add(sum(map(len, group.contents)))
            else:
                for entry in group:
                    write_entry(entry, target, counter)
                    del entry
            del group  # frees its data before further groups are fetched
    return target.finish()


def _fetched(group: Items, copied_size: int) -> SmallEntries | Iterable[FetchedEntry]:
    """Fetches one entry, or several small ones.

    Small entries are fetched together if possible, else one by one on iteration.
    """
    if len(group) == 1:
        return [fetched_entry(group[0], copied_size)]
    return fetch_small(group) or (fetched_entry(item, copied_size) for item in group)


@dataclass(frozen=True, slots=True)
class FetchedEntry:
    """An entry with its data.

    Attributes:
        name: Its name.
        nbytes: Size of its data in bytes.
        crc32: CRC-32 of its data.
        stream: Its data, in pieces.
        is_constant: True if the data cannot have changed since `crc32` was computed from it.
    """

    name: str
    nbytes: int
    crc32: int
    stream: Iterable[memoryview]
    is_constant: bool


def fetched_entry(item: Item, copied_size: int = READ_SIZE) -> FetchedEntry:
    """Gets an item's data and CRC-32; computes the CRC-32 unless the data states it.

    Data of more than `copied_size` bytes that states no CRC-32 is read twice: here, to compute the
    CRC-32, and then by the writer. If the data may have changed in between, the writer compares the
    CRC-32. If the data is remote, it is first copied to a temporary file.

    Args:
        item: The item.
        copied_size: Data of at most this many bytes is copied before its CRC-32 is computed; data
            that cannot change is never copied.

    Raises:
        ArchiveFormatError: Data that states no CRC-32 has another size than the item, or an element
            of the tensor breaks a rule.
    """
    data = item.data()
    stated = data.crc32
    if not _is_constant(data) and data.nbytes <= copied_size:
        data = _copied(data)
    elif stated is None and isinstance(data, RandomAccessData):
        data = data.local()
    if stated is not None and not _is_constant(data):  # checked while it is written
        return FetchedEntry(item.name, item.nbytes, stated, _checked(item, data), False)
    found = Crc32.of(_checked(item, data))
    if stated is not None:  # if the CRC-32s differ, the writer raises
        return FetchedEntry(item.name, item.nbytes, stated, data, found.value == stated)
    if found.nbytes != item.nbytes:
        raise ArchiveFormatError(
            f"{item.ref or item.name}: expected {item.nbytes} bytes, as its shape and data type "
            f"need, found {found.nbytes}"
        )
    return FetchedEntry(item.name, item.nbytes, found.value, data, _is_constant(data))


def _is_constant(data: Data) -> bool:
    return isinstance(data, Stored | Pieces) and data.is_constant


def _copied(data: Data) -> Data:
    """Copies data into memory; returns `data` itself if it yields more than `data.nbytes` bytes."""
    if isinstance(data, FileData):
        return Stored(memoryview(data.read()))
    copy = copied(data)
    return data if copy is None else Stored(memoryview(copy))


def _checked(item: Item, data: Data) -> Iterable[memoryview]:
    """Yields the pieces of data, and checks the rules about the elements of the item's tensor."""
    if item.ref is None:
        return data
    return tensors.checked(item.ref, data, Report(), entry=item.name)


def write_entry(
    entry: FetchedEntry,
    target: ZipWriter,
    counted: Callable[[Iterable[memoryview]], Iterable[memoryview]] = iter,
) -> None:
    """Writes an entry; `counted` counts the pieces of its data and yields them unchanged."""
    target.add_stream(
        entry.name,
        entry.nbytes,
        entry.crc32,
        counted(entry.stream),
        is_constant=entry.is_constant,
    )
