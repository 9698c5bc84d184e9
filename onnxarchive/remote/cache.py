"""Block cache: keeps fetched blocks of remote archives in files of this machine.

A cache is a directory with one file for each version of an object. On POSIX systems, only the owner
can enter the directory. A file of the cache consists of:

- the bytes of the archive at their own offsets, with holes for blocks that are missing,
- a header, in JSON,
- a byte for each block, set once the block is on the disk,
- a byte for each entry, set once the entry's CRC-32 was found correct.

The header and the two byte arrays are the file's state. The state is at the end, so a truncated
file has no complete state. A block is written and synced before its byte is set, so after a crash
some blocks are fetched again at worst. A process locks a file only while it opens the file.
Afterwards, processes and threads share the file without locks: two of them may write the same bytes
of a block, until its byte is set. A file with a wrong state is removed, never truncated: others may
have mapped the file.

Without sparse files, as on Windows, a file takes the archive's size on the disk. Machines must not
share a cache: a map of a network file may show old bytes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar

import numpy as np

from onnxarchive.errors import ArchiveFormatError, LockedError, shown
from onnxarchive.remote.objects import END_SIZE
from onnxarchive.remote.urls import shown_url
from onnxarchive.storage import locking
from onnxarchive.storage.beneath import open_own
from onnxarchive.storage.files import MappedFile
from onnxarchive.storage.filesystem import sync
from onnxarchive.storage.random_access import RandomAccessFile

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from onnxarchive.remote.objects import RemoteFile

# The directory of a cache; True for the user's cache directory.
Cache: TypeAlias = str | os.PathLike[str] | Literal[True]

# The last block ends where the archive ends, so the END_SIZE bytes that opening reads are one whole
# block. A block takes less time than the latency of a request; 100 GB have 763,000 blocks.
BLOCK_SIZE: Final = END_SIZE
# The largest file of ext4. Only a hostile server claims a larger size, to fill memory: the cache's
# file has a byte for each block, and opening reads all these bytes.
MAX_SIZE: Final = 1 << 44
SYNC_SIZE: Final = 64 << 20  # bytes that are written between two syncs
_SET: Final = 1  # value of the byte of a fetched block or a verified entry
_FORMAT: Final = {"onnxarchive_cache": 1, "block_size": BLOCK_SIZE}
_HEADER_SIZE: Final = 16 << 10  # bytes; zeros follow the JSON
_NAME: Final = re.compile(r"[0-9a-f]{64}\.([0-9]+)\.blocks")  # the key, and the size of the archive
_OWN_MODE: Final = 0o700


def open_cached(file: RemoteFile, cache: Cache) -> RandomAccessFile:
    """Opens a remote file through a cache.

    Args:
        file: The remote file.
        cache: The directory, created with mode 0700 if missing. True for the user's cache.

    Returns:
        A `CachedFile`. `file` itself if it is unknown which server gives it, as in a store of the
        caller, or if nothing distinguishes its versions: it has neither a strong ETag nor a version
        id.

    Raises:
        PermissionError: The directory belongs to another user, or grants others permissions
            (checked on POSIX systems only).
        OSError: The directory cannot be written, the file system allows no file of the archive's
            size, or the archive is over 16 TiB.
    """
    key = file.cache_key()
    return file if key is None else CachedFile(file, key, directory_of_cache(cache))


def directory_of_cache(cache: Cache = True) -> str:
    """The directory of a cache; True gives `onnxarchive` in XDG_CACHE_HOME or ~/.cache."""
    if cache is not True:
        return os.path.abspath(os.fsdecode(cache))
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the XDG specification ignores relative paths
        base = os.path.expanduser(os.path.join("~", ".cache"))
    if not os.path.isabs(base):
        raise FileNotFoundError(
            errno.ENOENT, "no home directory for the cache; set XDG_CACHE_HOME", base
        )
    return os.path.join(base, "onnxarchive")


class CachedFile(RandomAccessFile):
    """A remote file whose blocks are fetched once into a file of this machine, and mapped there.

    Attributes:
        local: The file in the cache, with the fetched bytes at their own offsets.
    """

    _truncated = "the cache's file was truncated after it was opened; open the archive again"

    def __init__(self, remote: RemoteFile, key: str | None, directory: str) -> None:
        """Opens or creates the file in the cache.

        Args:
            remote: The remote file; it is closed with this object.
            key: The remote file's `cache_key()`.
            directory: The directory of the cache.

        Raises:
            OSError: As for `open_cached`.
        """
        self._remote = remote
        self.path = remote.path
        self.size = remote.size
        self.identity = remote.identity
        if self.size > MAX_SIZE:
            raise OSError(
                errno.EFBIG,
                f"expected an object of at most {MAX_SIZE} bytes, found one of {self.size} bytes",
                self.path,
            )
        self._header = {**_FORMAT, "key": key, "size": self.size, "url": _cut(remote.path)}
        self._blocks = _Blocks(self.size)
        self._marks_offset = self.size + _HEADER_SIZE
        self._verified_offset = self._marks_offset + self._blocks.count
        self.local = self._open(directory)

    def _open(self, directory: str) -> MappedFile:
        """Opens the file in the cache; creates a missing file and replaces a damaged one."""
        os.makedirs(directory, _OWN_MODE, exist_ok=True)
        _require_private(directory)
        path = os.path.join(directory, f"{self._header['key']}.{self.size}.blocks")
        while True:
            file = MappedFile(path, descriptor=open_own(path, 0o600))
            with contextlib.suppress(LockedError):
                locking.keep_exclusive(file.fileno())  # so only one process writes the header
            try:
                if not file.status().st_size:
                    self._begin(file)
                is_there = file.is_at(path)  # another process may have removed the file
                if is_there and self._is_valid(file):
                    file.size = self.size  # without the state
                    with contextlib.suppress(OSError):  # removed meanwhile, perhaps
                        os.utime(path)  # the time of the last use
                    return file
            finally:
                locking.unlock(file.fileno())
            file.close()
            if is_there:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)

    def _begin(self, file: MappedFile) -> None:
        """Gives an empty file the state of a file without blocks."""
        file.write(self.size, json.dumps(self._header).encode())
        file.truncate(self._verified_offset)

    def _is_valid(self, file: MappedFile) -> bool:
        """True if the header and block states of a file in the cache fit this remote file."""
        header = _read_header(file, self.size)
        if {**header, "url": None} != {**self._header, "url": None}:  # the URL may differ
            return False
        marks = np.frombuffer(file.read(self._marks_offset, self._blocks.count), np.uint8)
        return marks.size == self._blocks.count and not np.any(marks > _SET)

    def fetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Brings the missing blocks of ranges into the cache, many at once.

        After an error, the blocks that arrived whole are kept.

        Args:
            ranges: Offset and size of each range.

        Raises:
            OSError: A request failed, or the cache's file cannot be written: the disk is full, for
                example.
            ArchiveFormatError: Another process has truncated the cache's file.
            ArchiveError: The remote object has changed.
        """
        blocks = self._missing(ranges)
        if not blocks.size:
            return
        arriving = _Arriving(self._blocks, blocks, self._marks)
        unsynced = 0
        try:
            for offset, part in self._remote.parts(self._blocks.ranges(blocks)):
                unsynced += arriving.write(self.local, offset, part)
                if unsynced >= SYNC_SIZE:
                    self._set(arriving.take())
                    unsynced = 0
        finally:
            self._set(arriving.take())
        if arriving.nbytes:
            problem = f"expected {arriving.nbytes} more bytes, found none"
            raise OSError(errno.EIO, problem, self.path)

    def _missing(self, ranges: Iterable[tuple[int, int]]) -> NDArray[np.int64]:
        """The numbers of missing blocks in ranges, ascending."""
        spans = [(it, min(it + size, self.size)) for it, size in ranges if size > 0]
        spans = [it for it in spans if it[0] < it[1]]
        if not spans:
            return np.empty(0, np.int64)
        first = self._blocks.holding(min(begin for begin, _ in spans))
        count = self._blocks.holding(max(end for _, end in spans) - 1) + 1 - first
        marks = self._marks(first, count)
        if marks.count(_SET) == count:  # numpy would take longer for this check
            return np.empty(0, np.int64)
        begins, ends = np.array(spans, np.int64).T
        changes = np.zeros(count + 1, np.int32)
        np.add.at(changes, self._blocks.holding(begins) - first, 1)
        np.add.at(changes, self._blocks.holding(ends - 1) + 1 - first, -1)
        is_missing = np.frombuffer(marks, np.uint8) != _SET
        return first + np.flatnonzero((changes.cumsum()[:-1] > 0) & is_missing)

    def _marks(self, first: int, count: int) -> bytes:
        """The present state of successive blocks, a byte for each."""
        marks = self.local.read(self._marks_offset + first, count)
        if len(marks) < count:
            raise ArchiveFormatError(self._truncated, path=self.local.path)
        return marks

    def _set(self, blocks: NDArray[np.int64]) -> None:
        """Syncs the file, then sets the state of blocks that were written."""
        if not blocks.size:
            return
        self._sync()
        for begin, end in _runs(blocks):
            self.local.write(self._marks_offset + begin, bytes([_SET]) * (end - begin))

    def _sync(self) -> None:
        sync(self.local, "choose a cache on another file system")

    def read(self, offset: int, size: int) -> bytes:
        """Reads `size` bytes from `offset`, fewer at the end of the file; returns a copy.

        Raises:
            OSError: As for `fetch`.
            ArchiveError: As for `fetch`.
        """
        size = max(min(size, self.size - offset), 0)
        self.fetch([(offset, size)])
        return self.local.read(offset, size)

    def read_ranges(self, ranges: Iterable[tuple[int, int]]) -> Iterator[memoryview]:
        """Fetches all ranges, many at once, then yields the bytes of each."""
        ranges = list(ranges)
        self.fetch(ranges)
        return super().read_ranges(ranges)

    def pieces(self, offset: int, size: int) -> Iterator[bytes | memoryview]:
        """Fetches `size` bytes from `offset`, then yields copies of a few MiB at most."""
        self.fetch([(offset, size)])
        yield from super().pieces(offset, size)

    def reaching(self, end: int) -> memoryview:
        """A read-only view of the whole file; only fetched ranges have valid bytes.

        Raises:
            ArchiveFormatError: Another process has truncated the cache's file.
        """
        return self.local.reaching(end)

    @property
    def is_mapped(self) -> bool:
        """True unless the system refuses to map the file in the cache."""
        return self.local.is_mapped

    @property
    def mapped_file(self) -> MappedFile:
        """The file in the cache."""
        return self.local

    def hold(self, offset: int) -> None:
        """Fetches the bytes from `offset` to the end of the file."""
        self.fetch([(offset, self.size - offset)])
        self._remote.release()  # these bytes are now in the cache's file

    def is_verified(self, number: int) -> bool:
        """True if the CRC-32 of an entry was found correct after its bytes were fetched."""
        return self.local.read(self._verified_offset + number, 1) == bytes([_SET])

    def set_verified(self, number: int) -> None:
        """Stores that the CRC-32 of an entry is correct, for all processes.

        If the disk is full, nothing is stored, and the next reader compares the CRC-32 again.
        """
        with contextlib.suppress(OSError):
            self.local.write(self._verified_offset + number, bytes([_SET]))

    def discard(self) -> None:
        """Removes the cache's file after its bytes failed a check; the next open fetches anew.

        Every `CachedFile` that has the file open can still read it. On Windows, an open file cannot
        be removed: its header is overwritten, and the next open removes the file.
        """
        if self.local.is_at(self.local.absolute_path):
            try:
                os.unlink(self.local.absolute_path)
            except FileNotFoundError:  # another process was faster
                pass
            except PermissionError:
                self.local.write(self.size, b"\0")

    def close(self) -> None:
        """Closes the remote file and the cache's file; views remain valid."""
        self._remote.close()
        self.local.close()


_Offsets = TypeVar("_Offsets", int, "NDArray[np.int64]")


class PartialFile(CachedFile):
    """A remote file that is fetched in order into a partial file.

    The partial file is not synced; verification finds what a power failure has damaged.
    """

    is_mapped = False
    first_size = MAX_SIZE  # a `ForwardFile` then reads the whole file by one call of `pieces`
    _truncated = "the partial download was truncated by another process; download it again"

    def __init__(self, remote: RemoteFile, local: MappedFile) -> None:
        """Continues `local`, or begins it anew if it is not of this version of the object."""
        self.local = local
        super().__init__(remote, remote.cache_key(), "")

    def _open(self, _: str) -> MappedFile:
        # Somebody else's partial file, say of a cloned repository, has another inode number.
        self._header["inode"] = self.local.status().st_ino
        if self._header["key"] is None or not self._is_valid(self.local):
            self.discard()
            self._begin(self.local)
        self.local.size = self.size  # without the state
        return self.local

    @property
    def missing_nbytes(self) -> int:
        """Number of the bytes that are still to be fetched."""
        missing = self._missing([(0, self.size)])
        return sum(nbytes for _, nbytes in self._blocks.ranges(missing)) if missing.size else 0

    def pieces(self, offset: int, size: int) -> Iterator[bytes | memoryview]:
        """Yields `size` bytes from `offset`; a thread writes fetched bytes to the file."""
        # Imported here: the import is slow and fails while Python exits; only downloads need it.
        from concurrent.futures import ThreadPoolExecutor

        end = min(offset + size, self.size)
        missing = self._missing([(offset, size)])
        arriving = _Arriving(self._blocks, missing, self._marks)
        unmarked = 0
        # Each piece is written while the caller uses it.
        with contextlib.ExitStack() as cleanup, ThreadPoolExecutor(1) as writer:
            cleanup.callback(lambda: self._set(arriving.take()))  # once all is written
            for begin, nbytes in self._blocks.ranges(missing) if missing.size else ():
                yield from self.local.pieces(offset, begin - offset)
                before = None
                for piece in self._remote.stream(begin, nbytes):
                    if before is not None:
                        unmarked += before.result()
                        if unmarked >= SYNC_SIZE:
                            self._set(arriving.take())
                            unmarked = 0
                    before = writer.submit(arriving.write, self.local, begin, piece)
                    yield piece[max(offset - begin, 0) : end - begin]
                    begin += len(piece)
                if before is not None:
                    before.result()
                offset = begin
        yield from self.local.pieces(offset, end - offset)

    def _sync(self) -> None:
        """Does nothing."""

    def discard(self) -> None:
        """Empties the partial file."""
        self.local.truncate(0)


class _Blocks:
    """The blocks of a file. The last block ends where the file ends; the first may be shorter.

    Attributes:
        count: The number of blocks.
    """

    def __init__(self, size: int) -> None:
        """Divides a file of `size` bytes."""
        self.count = -(-size // BLOCK_SIZE)
        self._lead = self.count * BLOCK_SIZE - size  # BLOCK_SIZE minus the first block's size

    def holding(self, offset: _Offsets) -> _Offsets:
        """The number of the block with the byte at `offset`; an array for several offsets."""
        return (offset + self._lead) // BLOCK_SIZE

    def begins(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """The offsets of blocks. A block ends at the offset of the next block."""
        return np.maximum(blocks * BLOCK_SIZE - self._lead, 0)

    def ranges(self, blocks: NDArray[np.int64]) -> list[tuple[int, int]]:
        """Offset and size of each run of successive blocks."""
        runs = np.array(_runs(blocks), np.int64).reshape(-1, 2)
        begins, ends = self.begins(runs[:, 0]), self.begins(runs[:, 1])
        return list(zip(begins.tolist(), (ends - begins).tolist(), strict=True))


class _Arriving:
    """Blocks whose bytes arrive in any order.

    Attributes:
        nbytes: Number of bytes that have not arrived.
    """

    def __init__(
        self, layout: _Blocks, blocks: NDArray[np.int64], read_marks: Callable[[int, int], bytes]
    ) -> None:
        """Begins with blocks of which no byte has arrived.

        Args:
            layout: All blocks of the file.
            blocks: The numbers of the blocks that will arrive, ascending.
            read_marks: Returns the states of blocks, given the first number and the count.
        """
        self._layout = layout
        self._read_marks = read_marks
        self._blocks = blocks
        self._begins = layout.begins(blocks)
        self._ends = layout.begins(blocks + 1)
        self._missing = self._ends - self._begins  # missing bytes of each block
        self.nbytes = int(self._missing.sum())

    def write(self, file: MappedFile, offset: int, part: memoryview) -> int:
        """Writes those bytes of `part` that are in the blocks, and counts these bytes as arrived.

        A block that another writer has completed is counted, but not written: it may be verified.

        Args:
            file: The file in the cache.
            offset: Offset of the part.
            part: Bytes of the part. Bytes that belong to no arriving block are ignored.

        Returns:
            Number of counted bytes.
        """
        end = offset + part.nbytes
        first = np.searchsorted(self._ends, offset, "right")
        last = np.searchsorted(self._begins, end)
        blocks = self._blocks[first:last]
        if not blocks.size:
            return 0
        marks = self._read_marks(int(blocks[0]), int(blocks[-1] - blocks[0]) + 1)
        is_missing = np.frombuffer(marks, np.uint8)[blocks - blocks[0]] != _SET
        for begin, size in self._layout.ranges(blocks[is_missing]):
            start, stop = max(begin, offset), min(begin + size, end)
            file.write(start, part[start - offset : stop - offset])
        begins = np.maximum(self._begins[first:last], offset)
        nbytes = np.minimum(self._ends[first:last], end) - begins
        self._missing[first:last] -= nbytes
        counted = int(nbytes.sum())
        self.nbytes -= counted
        return counted

    def take(self) -> NDArray[np.int64]:
        """The numbers of the blocks that were completed since the previous call of `take`."""
        whole = np.flatnonzero(self._missing == 0)
        self._missing[whole] = -1
        return self._blocks[whole]


def _runs(blocks: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Begin and end of each run of successive numbers; the end is excluded."""
    gaps = np.flatnonzero(np.diff(blocks) > 1)
    begins = np.concatenate([blocks[:1], blocks[gaps + 1]])
    ends = np.concatenate([blocks[gaps], blocks[-1:]]) + 1
    return list(zip(begins.tolist(), ends.tolist(), strict=True))


def _read_header(file: MappedFile, size: int) -> dict[str, Any]:
    """The header in the cache's file of an archive of `size` bytes; empty if it is damaged."""
    try:
        header = json.loads(file.read(size, _HEADER_SIZE).rstrip(b"\0"))
    except (ValueError, RecursionError):
        return {}
    return header if isinstance(header, dict) else {}


def _cut(url: str) -> str:
    """A URL cut to fit into a header."""
    return url[: _HEADER_SIZE // 16]  # in JSON, a character takes up to 12 bytes


def _require_private(directory: str) -> None:
    """On POSIX, refuses a directory that belongs to another user or grants others permissions."""
    status = os.stat(directory)
    mode = stat.S_IMODE(status.st_mode)
    if os.name == "posix" and (status.st_uid != os.geteuid() or mode & ~_OWN_MODE & 0o777):
        raise PermissionError(
            errno.EACCES,
            f"expected a directory of user {os.geteuid()} with mode 0700, found one of user "
            f"{status.st_uid} with mode {mode:04o}; use another directory, or change its mode",
            directory,
        )


# Listing a cache


@dataclass(frozen=True, slots=True)
class CachedArchive:
    """A file of a cache.

    Attributes:
        path: Path of the file in the cache.
        url: The URL of the archive, without credentials; None if the file is damaged.
        nbytes: The size of the archive in bytes.
        present: Number of fetched bytes.
        used: The time of the last use, in seconds since the epoch.
    """

    path: str
    url: str | None
    nbytes: int
    present: int
    used: float


def cached_archives(directory: str) -> list[CachedArchive]:
    """Lists the files of a cache, ordered from the latest use to the earliest.

    Args:
        directory: The directory of the cache; if it is missing, the list is empty.

    Raises:
        PermissionError: As for `open_cached`.
        OSError: The directory or a file cannot be read.
    """
    if not os.path.lexists(directory):
        return []
    _require_private(directory)
    found = []
    for name in os.listdir(directory):
        matched = _NAME.fullmatch(name)
        path = os.path.join(directory, name)
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            if matched is not None and stat.S_ISREG(os.lstat(path).st_mode):
                found.append(_cached_archive(path, int(matched[1])))
    return sorted(found, key=lambda it: it.used, reverse=True)


def _cached_archive(path: str, size: int) -> CachedArchive:
    with MappedFile(path) as file:
        used = file.status().st_mtime
        header = _read_header(file, size)
        if any(header.get(key) != value for key, value in _FORMAT.items()):
            return CachedArchive(path, None, size, 0, used)
        blocks = _Blocks(size)
        marks = np.frombuffer(file.read(size + _HEADER_SIZE, blocks.count), np.uint8)
        present = sum(nbytes for _, nbytes in blocks.ranges(np.flatnonzero(marks == _SET)))
        return CachedArchive(path, str(header.get("url")), size, present, used)


def clear(directory: str, urls: Collection[str] = ()) -> list[CachedArchive]:
    """Removes files of a cache; processes that have a file open can still read it.

    Args:
        directory: The directory of the cache.
        urls: URLs of the archives to remove, with all versions; if empty, all archives are removed.

    Returns:
        The files that were removed.

    Raises:
        ValueError: A URL has no archive in the cache.
        OSError: As for `cached_archives`; or a file cannot be removed, as on Windows while open.
    """
    found = cached_archives(directory)
    shown_urls = {_cut(shown_url(url)) for url in urls}
    unknown = sorted(shown_urls - {it.url for it in found})
    if unknown:
        raise ValueError(
            f"expected URLs of archives in the cache {directory}, found {shown(unknown[0])}; "
            "'onnxarchive cache ls' lists them"
        )
    removed = [it for it in found if not urls or it.url in shown_urls]
    for each in removed:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(each.path)
    return removed
