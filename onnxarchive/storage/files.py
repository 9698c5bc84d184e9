"""Files: read by position or through a map, written so that the target is whole or untouched."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from collections.abc import Iterator
from typing import Literal, TypeAlias

from onnxarchive.errors import ArchiveError, ArchiveFormatError, with_path
from onnxarchive.storage import locking
from onnxarchive.storage.closing import Closing

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# How a file is read ahead of those who look at it through a map.
Prefetch: TypeAlias = Literal["willneed", "populate"]

READ_SIZE = 1 << 19  # bytes read at a time by `MappedFile.pieces`: they stay in a core's cache
# Errors of a file that may be read and not written.
_NO_WRITING = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ETXTBSY)
# What systems say where directories cannot be synced.
_NO_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS)
# The flags of a map whose pages are all read and mapped when it is made; None where there is none.
POPULATED = mmap.MAP_SHARED | mmap.MAP_POPULATE if hasattr(mmap, "MAP_POPULATE") else None
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class _Descriptor:
    """A descriptor that is closed when its last user lets go of it.

    A thread that reads holds it meanwhile: its number cannot become that of another file.
    """

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


class MappedFile(Closing):
    """A regular file, read, mapped, locked and written through one descriptor.

    Attributes:
        path: The file's path as it was given.
        absolute_path: The same as an absolute path, which stays right when the process changes its
            directory.
        size: Its size in bytes when it was opened or locked.
        identity: Device and inode, which tell it from every other file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rule: str | None = None,
        is_writable: bool | None = False,
        descriptor: int | None = None,
    ) -> None:
        """Opens the file.

        Args:
            path: The file.
            rule: The rule that anything but a regular file breaks, if one does.
            is_writable: Whether to open it for writing, too; None to do so if it is permitted.
            descriptor: A descriptor of the file, which is taken over; None opens `path`.

        Raises:
            ArchiveFormatError: `path` is a directory, a pipe or a device.
            OSError: It cannot be opened.
        """
        self.set_path(path)
        self._is_writable = True
        if descriptor is None:
            descriptor, self._is_writable = _open(self.path, rule, is_writable)
        self._descriptor: _Descriptor | None = _Descriptor(descriptor)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            kind = next((name for test, name in _KINDS if test(status.st_mode)), "another kind")
            self._descriptor = None  # also while the error is kept
            raise _not_regular(self.path, kind, rule)
        self.size = status.st_size
        self.identity = (status.st_dev, status.st_ino)
        self._view: memoryview | None = None
        self._locking_process = os.getpid()

    def set_path(self, path: str | os.PathLike[str]) -> None:
        """Takes the path that the file has, or will have once it is renamed."""
        self.path = os.fsdecode(path)
        try:
            self.absolute_path = os.path.abspath(self.path)
        except OSError:  # the working directory is gone
            self.absolute_path = self.path

    @contextlib.contextmanager
    def locked(self, *, is_exclusive: bool, timeout: float | None = None) -> Iterator[None]:
        """Locks the file while the block runs, and brings `size` up to date.

        Args:
            is_exclusive: Whether to keep out readers as well as editors.
            timeout: Seconds to wait at most; None waits without limit, 0 not at all.

        Raises:
            LockedError: The file stayed locked.
            OSError: The file system has no exclusive locks.
        """
        descriptor = self._require_open()  # held, so that no other file is unlocked in the end
        kind = locking.exclusive if is_exclusive else locking.shared
        with contextlib.ExitStack() as lock:
            try:
                with with_path(self.path):
                    lock.enter_context(kind(descriptor.number, timeout))
                self.size = os.fstat(descriptor.number).st_size
            except OSError as error:
                error.filename = self.path
                if error.errno == errno.EBADF:
                    error.strerror = "can be locked for a change only where it may be written (NFS)"
                raise
            self._locking_process = os.getpid()
            yield

    def require_locking_process(self) -> None:
        """Refuses to go on in a fork, which shares the lock of the process that locked the file.

        Raises:
            ArchiveError: This is one.
        """
        require_process(self._locking_process)

    def require_writable(self) -> None:
        """Refuses a file that may not be written.

        Raises:
            OSError: It cannot be opened for writing, or could not when it was opened.
        """
        os.close(_open(self.absolute_path, None, is_writable=True)[0])
        if not self._is_writable:
            raise PermissionError(
                errno.EACCES, "could only be read when it was opened; open it anew", self.path
            )

    def reopened(self) -> MappedFile:
        """The same open file as a new object, with the size that it has now and a map of its own.

        It shares the lock with this one.
        """
        file = MappedFile(self.path, descriptor=os.dup(self._require_open().number))
        file.absolute_path = self.absolute_path
        return file

    def read(self, offset: int, size: int) -> bytes:
        """Reads `size` bytes from `offset`, fewer at the end of the file; a copy.

        Raises:
            OSError: It cannot be read; the file is named.
        """
        try:
            part = self._read_once(offset, size)
            if len(part) == size:
                return part
            parts = []
            while part:
                parts.append(part)
                offset += len(part)
                size -= len(part)
                part = self._read_once(offset, size)
        except OSError as error:
            error.filename = self.path
            raise
        return b"".join(parts)

    def pieces(self, offset: int, size: int) -> Iterator[bytes]:
        """Reads `size` bytes from `offset` in pieces of at most `READ_SIZE` bytes; copies.

        A file that was truncated meanwhile gives fewer bytes, and no fault as a map would.
        """
        while size > 0:
            piece = self.read(offset, min(size, READ_SIZE))
            if not piece:
                return
            yield piece
            offset += len(piece)
            size -= len(piece)

    def has_zeros_alone(self, offset: int, size: int) -> bool:
        """Whether `size` bytes from `offset` are all zeros; holes of the file are not read."""
        return not any(
            piece.strip(b"\0")
            for begin, end in self._written_parts(offset, offset + size)
            for piece in self.pieces(begin, end - begin)
        )

    def _written_parts(self, offset: int, end: int) -> Iterator[tuple[int, int]]:
        """Begin and end of each part that is no hole; one part if the system cannot tell."""
        if not hasattr(os, "SEEK_DATA"):  # Windows
            yield offset, end
            return
        descriptor = self._require_open()
        while offset < end:
            try:
                begin = os.lseek(descriptor.number, offset, os.SEEK_DATA)
                offset = os.lseek(descriptor.number, begin, os.SEEK_HOLE)
            except OSError as error:
                if error.errno != errno.ENXIO:  # a file system that does not know
                    yield offset, end
                return  # the rest is a hole, or beyond the end of the file
            yield begin, min(offset, end)

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Writes all of `data` from `offset` on, which may be beyond the end of the file.

        Raises:
            OSError: It cannot be written; the file is named.
        """
        descriptor = self._require_open()  # held, so that no other file is written to in the end
        try:
            write_at(descriptor.number, offset, data)
        except OSError as error:
            error.filename = self.path
            raise
        finally:
            del descriptor  # an error that is kept keeps the file open no longer

    def view(self) -> memoryview:
        """The whole file as a read-only view through a map; nothing is read or copied.

        The view keeps the map alive, also after `close`.

        Raises:
            ArchiveFormatError: The file has become shorter since it was opened.
        """
        return self.part(0, self.size)

    def part(self, offset: int, nbytes: int) -> memoryview:
        """Some bytes of the file as a read-only view, as `view` gives all.

        The file may have become shorter behind them, as it does when its end is written anew.

        Raises:
            ArchiveFormatError: The file has become shorter since it was opened, by some of them.
        """
        return self.reaching(offset + nbytes)[offset : offset + nbytes]

    def reaching(self, end: int) -> memoryview:
        """The file as a read-only view of which the bytes up to `end` are there.

        Raises:
            ArchiveFormatError: The file has become shorter than that since it was opened.
        """
        view = self._view
        if view is None:
            view = self._view = self._map()
            if self._descriptor is None:  # another thread has closed the file meanwhile
                self._view = None
        if end > view.nbytes:
            error = ArchiveFormatError(
                f"expected {self.size} bytes as when opened, found {view.nbytes}"
            )
            error.path = self.path
            raise error
        return view

    def prefetch(self, how: Prefetch) -> None:
        """Has the system read the file before it is looked at through the map.

        Args:
            how: As `onnxarchive.open` takes it.
        """
        if how == "populate":
            flags = {} if POPULATED is None else {"flags": POPULATED, "prot": mmap.PROT_READ}
            self._view = self._map(**flags)
            if POPULATED is None:
                self._view[:: mmap.PAGESIZE].tobytes()  # a byte of each page brings the page
        elif hasattr(mmap, "MADV_WILLNEED"):
            mapped = self.reaching(0).obj
            with contextlib.suppress(OSError):  # it is an advice
                if isinstance(mapped, mmap.mmap):
                    mapped.madvise(mmap.MADV_WILLNEED)

    def _map(self, **kind: int) -> memoryview:
        """The file through a map: as much as it had when it was opened, or as it still has."""
        kind = kind or {"access": mmap.ACCESS_READ}
        descriptor = self._require_open()
        size = self.size
        while size:
            try:
                return memoryview(mmap.mmap(descriptor.number, size, **kind))
            except ValueError:  # it has become shorter, perhaps again
                size = min(size - 1, os.fstat(descriptor.number).st_size)
        return memoryview(b"")

    def paths(self) -> Iterator[str]:
        """Where the file may be, without symbolic links: where it was opened, or is by now.

        On Linux the descriptor knows where a file that was renamed has gone. A path may lead to
        another file: compare its `identity`.
        """
        yield os.path.realpath(self.absolute_path)
        descriptor = self._require_open()  # held, so that it is not another file's
        with contextlib.suppress(OSError):  # of another system
            yield os.readlink(f"/proc/self/fd/{descriptor.number}")

    def is_at(self, path: str | os.PathLike[str]) -> bool:
        """Whether `path` leads to this very file."""
        try:
            status = os.stat(path)
        except (OSError, ValueError):  # ValueError: a path with a NUL
            return False
        return (status.st_dev, status.st_ino) == self.identity

    def fileno(self) -> int:
        """The descriptor, valid as long as the file is open."""
        return self._require_open().number

    def close(self) -> None:
        """Lets go of descriptor and map, each of which its last user closes."""
        self._descriptor = None
        self._view = None

    def _read_once(self, offset: int, size: int) -> bytes:
        descriptor = self._require_open()
        if hasattr(os, "pread"):
            return os.pread(descriptor.number, size, offset)
        with locking.POSITION_LOCK:  # Windows
            os.lseek(descriptor.number, offset, os.SEEK_SET)
            return os.read(descriptor.number, size)

    def _require_open(self) -> _Descriptor:
        descriptor = self._descriptor
        if descriptor is None:
            raise ValueError(f"{self.path}: the file is closed")
        return descriptor


@contextlib.contextmanager
def opened(
    path: str | os.PathLike[str],
    *,
    rule: str | None = None,
    is_exclusive: bool = False,
    is_writable: bool | None = False,
    timeout: float | None = None,
) -> Iterator[MappedFile]:
    """Opens the file at a path and locks it while the block runs.

    It is the file that has the path once the lock is held. It stays open unless the block raises.

    Args:
        path: The file.
        rule: As `MappedFile` takes it.
        is_exclusive: As `MappedFile.locked` takes it.
        is_writable: As `MappedFile` takes it.
        timeout: As `MappedFile.locked` takes it.

    Raises:
        ArchiveFormatError: It is not a regular file.
        LockedError: The file stayed locked.
        OSError: It cannot be opened or locked.
    """
    while True:
        file = MappedFile(path, rule=rule, is_writable=is_writable)
        try:
            with file.locked(is_exclusive=is_exclusive, timeout=timeout):
                if file.is_at(path):
                    yield file
                    return
        except BaseException:
            file.close()
            raise
        file.close()  # another file took the path while the lock was waited for


def _open(path: str, rule: str | None, is_writable: bool | None) -> tuple[int, bool]:
    """A descriptor of a file, and whether it is open for writing."""
    # A pipe is not waited for: it is refused afterwards. Windows would change line ends.
    flags = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    if os.path.isdir(path):  # which some systems refuse to open, or to open for writing
        raise _not_regular(path, "a directory", rule)
    try:
        if is_writable is not False:
            try:
                return os.open(path, flags | os.O_RDWR), True
            except OSError as error:
                if is_writable or error.errno not in _NO_WRITING:
                    raise
        return os.open(path, flags | os.O_RDONLY), False
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            raise _not_regular(path, "a socket", rule) from None
        raise


def make_file(path: str, mode: int = 0o666) -> MappedFile:
    """Makes a file and opens it for reading and writing.

    Args:
        path: The file.
        mode: Its permission bits, less those of the umask.

    Raises:
        FileExistsError: There is one.
        OSError: It cannot be made.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    return MappedFile(path, descriptor=os.open(path, flags, mode))


def write_at(descriptor: int, offset: int, data: bytes | memoryview) -> None:
    """Writes all of `data` from `offset` on, which may be beyond the end of the file."""
    view = memoryview(data)
    while view.nbytes:
        if hasattr(os, "pwrite"):
            written = os.pwrite(descriptor, view, offset)
        else:  # Windows
            with locking.POSITION_LOCK:
                os.lseek(descriptor, offset, os.SEEK_SET)
                written = os.write(descriptor, view)
        offset += written
        view = view[written:]


class PositionalWriter:
    """Writes one piece after another into a file, from an offset on and without a buffer.

    A fork of this process shares the file, and neither position nor buffer; it may not write.

    Attributes:
        offset: Where the next piece goes, in bytes from the start of the file.
    """

    def __init__(self, file: MappedFile, offset: int = 0, end: int | None = None) -> None:
        """Begins to write.

        Args:
            file: The file, open for writing.
            offset: Where the first piece goes, in bytes from the start of the file.
            end: Where the last piece has to end at the latest; None for no limit.
        """
        self.offset = offset
        self._end = end
        self._file = file
        self._process = os.getpid()

    def write(self, data: bytes | memoryview, /) -> int:
        """Writes all of `data`, and gives its size in bytes.

        Raises:
            ArchiveError: This is a fork of the process that began to write, or there is no room.
        """
        require_process(self._process)
        nbytes = memoryview(data).nbytes
        if self._end is not None and self.offset + nbytes > self._end:
            raise ArchiveError(f"expected to write up to offset {self._end}, found more bytes")
        self._file.write(self.offset, data)
        self.offset += nbytes
        return nbytes

    def last(self, nbytes: int) -> bytes:
        """The last `nbytes` bytes before the next piece, or all if there are less."""
        nbytes = min(nbytes, self.offset)
        return self._file.read(self.offset - nbytes, nbytes)


def require_process(process: int) -> None:
    """Refuses to go on in a fork with what another process has begun.

    Args:
        process: Id of the process that began.

    Raises:
        ArchiveError: It is not this one.
    """
    if os.getpid() != process:
        raise ArchiveError(
            f"expected process {process}, which began to write the file, to write on, found its "
            f"fork {os.getpid()}; open or write the file anew there"
        )


class MemoryFile(MappedFile):
    """Bytes in memory with the reading side of a file; they are not copied."""

    def __init__(self, data: memoryview) -> None:
        """Takes the bytes, as a view of single bytes."""
        self.path = "archive in memory"
        self.absolute_path = ""
        self.size = data.nbytes
        self.identity = (-1, id(self))
        self._data: memoryview | None = data.toreadonly()

    def prefetch(self, how: Prefetch) -> None:
        """Does nothing: they are there."""

    def reaching(self, end: int) -> memoryview:
        """All of the bytes."""
        if self._data is None:
            raise ValueError(f"{self.path}: the file is closed")
        return self._data

    def paths(self) -> Iterator[str]:
        """None: it has no file."""
        return iter(())

    def close(self) -> None:
        """Ends the reading; views live on."""
        self._data = None

    def _read_once(self, offset: int, size: int) -> bytes:
        return bytes(self.reaching(offset + size)[offset : offset + size])


def _not_regular(path: str, kind: str, rule: str | None) -> ArchiveFormatError:
    error = ArchiveFormatError(f"expected a regular file, found {kind}", rule=rule)
    error.path = path
    return error


def sync(descriptor: int) -> None:
    """Waits until a file is on its device, and not only in the caches of system and drive."""
    full = getattr(fcntl, "F_FULLFSYNC", None)  # macOS, whose fsync stops at the drive's cache
    if full is not None:
        with contextlib.suppress(OSError):  # a file system that has it not
            fcntl.fcntl(descriptor, full)
            return
    os.fsync(descriptor)


def sync_directory(directory: str) -> None:
    """Makes names that were made or removed last, where the system lets directories be synced.

    Raises:
        OSError: The disk is broken.
    """
    if os.name == "nt":
        return
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except PermissionError:  # to list it, which those who may write to it need not have
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(descriptor)
