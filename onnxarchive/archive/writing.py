"""Writes planned archives: one pass over the entries, which threads may fetch ahead."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from onnxarchive.archive.planning import Item, Plan, given_data, require_names
from onnxarchive.buffers.checksums import Crc32
from onnxarchive.buffers.counting import Progress, ProgressCounter
from onnxarchive.buffers.data import Data, Pieces, Stored, SupportsWrite
from onnxarchive.errors import ArchiveFormatError, Report
from onnxarchive.model import tensors
from onnxarchive.model.keys import MODEL_PROTO
from onnxarchive.storage import locking, threads
from onnxarchive.storage.file_data import FileData
from onnxarchive.storage.files import READ_SIZE, MappedFile
from onnxarchive.storage.filesystem import reserve
from onnxarchive.storage.replacement import Replacement, Require
from onnxarchive.zipformat import layout
from onnxarchive.zipformat.writer import ZipWriter

# Up to this many bytes, threads copy data and so go through it once. What is larger is as fast
# through a map, since the memory for a copy would be new each time.
_COPIED_SIZE = 1 << 25


def write_archive(
    plan: Plan,
    path: str | os.PathLike[str] | SupportsWrite,
    *,
    alignment: int = layout.MIN_ALIGNMENT,
    progress: Progress | None = None,
    jobs: int | None = None,
    require: Require | None = None,
    reserved: int | None = None,
) -> None:
    """Writes a planned archive, whole or not at all.

    Args:
        plan: The plan.
        path: As in `save`.
        alignment: As in `save`.
        progress: As in `save`.
        jobs: As `stream` takes it; None for one for each core.
        require: As `Replacement.commit` takes it.
        reserved: The disk is asked for room for at most this many bytes beforehand; None for all.
    """
    if isinstance(path, str | os.PathLike):
        written = write_file(
            plan,
            path,
            alignment=alignment,
            progress=progress,
            jobs=jobs,
            require=require,
            reserved=reserved,
        )
        with written:
            locking.unlock(written.fileno())
    else:
        require_names([item.name for item in plan.items])
        zip_writer = ZipWriter(path, alignment=alignment)
        stream(plan, zip_writer, progress, threads.require_jobs(jobs))


def write_file(
    plan: Plan,
    path: str | os.PathLike[str],
    *,
    alignment: int,
    progress: Progress | None = None,
    jobs: int | None = None,
    require: Require | None = None,
    follow_links: bool = True,
    is_locked: bool = False,
    reserved: int | None = None,
) -> MappedFile:
    """Writes a planned archive as `write_archive` does, and gives its file, which is still locked.

    Args:
        plan: The plan.
        path: The archive.
        alignment: As in `save`.
        progress: As in `save`.
        jobs: As `stream` takes it; None for one for each core.
        require: As `Replacement.commit` takes it.
        follow_links: As `Replacement` takes it.
        is_locked: As `Replacement` takes it.
        reserved: As in `write_archive`.
    """
    require_names([item.name for item in plan.items])
    jobs = threads.require_jobs(jobs)
    replacement = Replacement(path, follow_links=follow_links, is_locked=is_locked)
    try:
        nbytes = plan.nbytes if reserved is None else min(plan.nbytes, reserved)
        reserve(replacement.fileno(), 0, nbytes)
        stream(plan, ZipWriter(replacement.file, alignment=alignment), progress, jobs)
    except BaseException as error:
        replacement.discard(error)
        raise
    return replacement.commit_open(require)


def stream(plan: Plan, target: ZipWriter, progress: Progress | None, jobs: int = 1) -> int:
    """Writes entries, directory and end records; gives the size of the archive in bytes.

    Args:
        plan: The plan.
        target: Where they go. It is written to in the caller's thread.
        progress: As in `save`. It is called in the caller's thread.
        jobs: How many threads there are at most, the caller's among them. Where they are more than
            one, the data of items is fetched in any of them.
    """
    counter = ProgressCounter(progress, plan.nbytes)
    fetch = partial(fetched_entry, copied_size=_COPIED_SIZE if jobs > 1 else READ_SIZE)
    model = Item(MODEL_PROTO, plan.model.nbytes, partial(given_data, plan.model))
    items = [*plan.items, model]
    sizes = [item.nbytes for item in items]
    with contextlib.closing(threads.in_order(items, sizes, fetch, jobs)) as fetched:
        for entry in fetched:
            write_entry(entry, target, counter)
            del entry  # before the next one is fetched
    return target.finish()


@dataclass(frozen=True, slots=True)
class FetchedEntry:
    """An entry that is due.

    Attributes:
        name: Its name.
        stream: Its bytes, in pieces.
        nbytes: How many they are.
        crc32: Their CRC-32.
        is_constant: As `ZipWriter.add_stream` takes it.
    """

    name: str
    stream: Iterable[memoryview]
    nbytes: int
    crc32: int
    is_constant: bool = False


def fetched_entry(item: Item, copied_size: int = READ_SIZE) -> FetchedEntry:
    """Makes an item an entry; what has no known CRC-32, or is copied, is gone through for it.

    Args:
        item: The item.
        copied_size: Up to how many bytes are copied, unless nobody can change them.
    """
    data = item.data()
    known = data.crc32
    if not _is_constant(data) and data.nbytes <= copied_size:
        data = _copied(data)
    is_constant = _is_constant(data)
    if known is not None and not is_constant:
        return FetchedEntry(item.name, _checked(item, data), item.nbytes, known)
    found = Crc32.of(_checked(item, data))
    if known is not None:  # found another one, that is told when it is written
        return FetchedEntry(item.name, data, item.nbytes, known, is_constant=found.value == known)
    if found.nbytes != item.nbytes:
        raise ArchiveFormatError(
            f"{item.ref or item.name}: expected {item.nbytes} bytes, as its shape and data type "
            f"need, found {found.nbytes}"
        )
    return FetchedEntry(item.name, data, found.nbytes, found.value, is_constant)


def _copied(data: Data) -> Data:
    """The bytes in memory; `data` itself where they are more than it says."""
    if isinstance(data, FileData):
        return Stored(memoryview(data.read()))
    copy = io.BytesIO()
    for piece in data:
        if copy.tell() + len(piece) > data.nbytes:
            return data
        copy.write(piece)
    return Stored(memoryview(copy.getvalue()))


def _is_constant(data: Data) -> bool:
    return isinstance(data, Stored | Pieces) and data.is_constant


def write_entry(
    entry: FetchedEntry,
    target: ZipWriter,
    counted: Callable[[Iterable[memoryview]], Iterable[memoryview]] = iter,
) -> None:
    """Writes an entry that was fetched; `counted` sees its pieces pass."""
    target.add_stream(
        entry.name,
        entry.nbytes,
        entry.crc32,
        counted(entry.stream),
        is_constant=entry.is_constant,
    )


def _checked(item: Item, data: Data) -> Iterable[memoryview]:
    if item.ref is None:
        return data
    return tensors.checked(item.ref, data, Report(), entry=item.name)
