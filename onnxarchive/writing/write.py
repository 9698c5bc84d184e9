"""Writes planned archives in one pass over the entries; threads fetch data ahead."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Final, TypeAlias, cast

from onnxarchive.errors import ArchiveFormatError, Strict
from onnxarchive.files import threads
from onnxarchive.files.clones_and_sync import require_space
from onnxarchive.files.data import (
    READ_SIZE,
    Crc32,
    Data,
    Spool,
    SupportsWrite,
    read_together,
)
from onnxarchive.files.data_files import spool
from onnxarchive.files.local_file import MappedFile
from onnxarchive.files.progress import ProgressCounter
from onnxarchive.files.replacement import Replacement, Require
from onnxarchive.model import tensors
from onnxarchive.model.keys import least_alignment
from onnxarchive.remote.location import Location
from onnxarchive.writing.cloning import Cloner
from onnxarchive.writing.options import WriteOptions
from onnxarchive.writing.plan import Item, Plan
from onnxarchive.zipformat.writer import ZipWriter

# With several threads, data of up to this many bytes is read once, into memory. Larger data of a
# file is read twice through a map: once for the CRC-32, and once by the writer. One read into
# memory would take as long.
MAX_COPIED_NBYTES = 1 << 25
SMALL_SIZE: Final = 1 << 16  # greatest size of an entry whose data is fetched with that of others
_BATCH_COUNT: Final = 1 << 10
_BATCH_SIZE: Final = 1 << 18

# Size and CRC-32 of an entry, its data in pieces, and True if the CRC-32 need not be compared:
# the arguments of `ZipWriter.add`.
Fetched: TypeAlias = tuple[int, int, Iterable[memoryview], bool]


def write_archive(
    plan: Plan, target: Location, options: WriteOptions, *, require: Require | None = None
) -> int:
    """Writes a planned archive; returns its size in bytes.

    Args:
        plan: The plan.
        target: A path or URL, where the archive appears when it is complete; or a binary file,
            which is written sequentially.
        options: The options; only `alignment`, `progress`, `jobs` and `timeout` are used.
        require: As in `write_file`; not called if the target is not a path.
    """
    if target.path is not None:
        with write_file(plan, target.path, options, require=require) as written:
            return written.size
    if target.url is None:
        return _stream_all(plan, cast(SupportsWrite, target.source), options)
    from onnxarchive.remote.uploads import create_object

    nbytes = plan.size(options.alignment)
    with create_object(target.remote, nbytes) as written_object:
        _stream_all(plan, written_object, options)
        written_object.commit()
    return nbytes


def write_file(
    plan: Plan,
    path: str | os.PathLike[str],
    options: WriteOptions,
    *,
    require: Require | None = None,
    locked: MappedFile | None = None,
) -> MappedFile:
    """Writes a planned archive like `write_archive`; returns it, still locked except on Windows.

    Args:
        plan: The plan.
        path: The archive.
        options: The options; only `alignment`, `progress`, `jobs` and `timeout` are used.
        require: Called before the file is renamed; an error discards the file.
        locked: The file at `path`, if the caller has locked it; see `Replacement`.
    """
    with Replacement(path, locked=locked, timeout=options.timeout) as replacement:
        cloner = Cloner(replacement.file, options.alignment)
        cloned = [item.data.nbytes for item in plan.entries if cloner.may_clone(item.data)]
        require_space(path, plan.nbytes - sum(cloned))
        _stream_all(plan, replacement.writer, options, cloner)
        return replacement.commit_open(require)


def _stream_all(
    plan: Plan, target: SupportsWrite, options: WriteOptions, cloner: Cloner | None = None
) -> int:
    zip_writer = ZipWriter(target, alignment=options.alignment)
    counter = ProgressCounter(options.progress, plan.nbytes)
    jobs = threads.require_jobs(options.jobs)
    write_entries(plan.entries, zip_writer, counter, jobs, plan.temporary, cloner)
    return zip_writer.finish()


def write_entries(
    items: Iterable[Item],
    target: ZipWriter,
    counter: ProgressCounter,
    jobs: int = 1,
    temporary: str | None = None,
    cloner: Cloner | None = None,
) -> None:
    """Writes entries in order; up to `jobs` threads fetch data, and the caller's thread writes it.

    Large remote data is first copied to the directory `temporary`, None for the system's. If
    possible, `cloner` clones data instead of copying it.
    """
    copied_size = MAX_COPIED_NBYTES if jobs > 1 else READ_SIZE
    batches = [*_batches(items)]
    sizes = [batch[0].data.nbytes if len(batch) == 1 else 0 for batch in batches]
    read_batches = partial(
        read_batch, copied_size=copied_size, spool=partial(spool, directory=temporary)
    )

    def get(batch: Sequence[Item]) -> list[Fetched] | None:
        """Fetches a batch; None if it may be cloned, so that it need not be read."""
        if cloner is not None and cloner.may_clone(batch[0].data):
            return None
        return read_batches(batch)

    with contextlib.closing(threads.in_order(batches, sizes, get, jobs)) as fetched:
        for batch in batches:
            parts = next(fetched)
            if parts is None and cloner is not None:
                if _add_cloned(batch[0], target, counter, cloner):
                    continue
                parts = read_batches(batch)
            assert parts is not None
            for item, (nbytes, crc, pieces, is_verified) in zip(batch, parts, strict=True):
                target.add(
                    item.name,
                    nbytes,
                    crc,
                    counter(pieces),
                    is_verified=is_verified,
                    alignment=least_alignment(item.name),
                )
            del parts, pieces  # frees their data before further entries are fetched


def _add_cloned(item: Item, target: ZipWriter, counter: ProgressCounter, cloner: Cloner) -> bool:
    """Adds an entry with cloned data; returns False if cloning is refused.

    The CRC-32 is computed from the bytes in the archive, which nobody else can change.
    """
    nbytes, alignment = item.data.nbytes, least_alignment(item.name)
    offset = target.next_data_offset(item.name, nbytes, alignment)
    if not cloner.may_clone(item.data) or not cloner.clone(item.data, offset):
        return False
    checksum = Crc32.of(counter(_checked(item, cloner.pieces(offset, nbytes))))
    end = cloner.end(offset + nbytes)
    target.add_present(item.name, nbytes, checksum.value, end, alignment)
    return True


def _batches(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Divides entries into lists of successive small entries, and lists of one large entry."""
    batch: list[Item] = []
    batch_nbytes = last = 0
    for item in items:
        nbytes = item.data.nbytes
        batch_nbytes += nbytes
        is_full = batch_nbytes > _BATCH_SIZE or len(batch) == _BATCH_COUNT
        if batch and (is_full or nbytes > SMALL_SIZE or last > SMALL_SIZE):
            yield batch
            batch, batch_nbytes = [], nbytes
        batch.append(item)
        last = nbytes
    if batch:
        yield batch


def read_batch(
    batch: Sequence[Item], copied_size: int = READ_SIZE, spool: Spool = spool
) -> list[Fetched]:
    """Gets the data and CRC-32 of one entry, or of several small ones.

    Successive ranges of a file are read together. Data of at most `copied_size` bytes is copied
    before its CRC-32 is computed, unless it cannot change.

    Raises:
        ArchiveFormatError: Data of unknown CRC-32 is not as large as it should be, or an
            element of a tensor breaks a rule.
    """
    data = [item.data for item in batch]
    if len(batch) > 1:
        data = read_together(data)
    return [
        _fetch_one(item, one, copied_size, spool) for item, one in zip(batch, data, strict=True)
    ]


def _fetch_one(item: Item, data: Data, copied_size: int, spool: Spool) -> Fetched:
    """Computes the CRC-32 unless it is known.

    Data of more than `copied_size` bytes without a CRC-32 is read twice, on purpose: here, to
    compute the CRC-32, and then by the writer. The local header with the CRC-32 comes before the
    data, and the target may be a pipe. If the data may have changed in between, the writer compares
    the CRC-32. Remote data is first copied to a temporary file.
    """
    nbytes = item.data.nbytes
    is_known = data.crc32 is not None or item.crc32 is not None
    if nbytes <= copied_size or not is_known:
        data = data.fetch(copied_size, spool)
    if data.crc32 is not None:  # `pieces` compares it
        return nbytes, data.crc32, _checked(item, data.pieces()), True
    if item.crc32 is not None:  # the writer compares it
        return nbytes, item.crc32, _checked(item, data.pieces()), False
    checksum = Crc32.of(_checked(item, data.pieces()))
    if checksum.nbytes != nbytes:
        raise ArchiveFormatError(
            f"{item.ref or item.name}: expected {nbytes} bytes, as its shape and data type need, "
            f"found {checksum.nbytes}"
        )
    # The writer compares bytes that may have changed since.
    return nbytes, checksum.value, data.pieces(), data.is_constant


def _checked(item: Item, pieces: Iterable[memoryview]) -> Iterable[memoryview]:
    """The pieces of an entry's data; checks the elements of a tensor while they are read."""
    if item.ref is None or item.ref.tensor.data_type not in tensors.CHECKED_TYPES:
        return pieces
    return tensors.checked(item.ref, pieces, Strict(), entry=item.name)
