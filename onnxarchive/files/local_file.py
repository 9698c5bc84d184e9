"""Opens, locks and maps regular files, and reads and writes them by position."""

from __future__ import annotations

import contextlib
import errno
import io
import mmap
import os
import stat
import sys
import time
from collections.abc import Iterator
from typing import Literal, TypeAlias
from weakref import WeakKeyDictionary

from onnxarchive.errors import (
    ArchiveError,
    ArchiveFormatError,
    LockedError,
    path_in_errors,
    with_path,
)
from onnxarchive.files import locking
from onnxarchive.files.data import File
from onnxarchive.files.locking import OfOneProcess
from onnxarchive.files.paths import kind_of

# How the system reads a mapped file ahead.
Prefetch: TypeAlias = Literal["willneed", "populate"]

# Errors of a file that is not writable.
_NO_WRITING = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ETXTBSY)
# Flags of a map with all pages read in advance; None if the system has no such maps.
POPULATED = mmap.MAP_SHARED | mmap.MAP_POPULATE if hasattr(mmap, "MAP_POPULATE") else None
# Without this, each map holds a descriptor of its own, until its last view is freed.
_MAP_OPTIONS = {"trackfd": False} if sys.version_info >= (3, 13) and os.name != "nt" else {}
# What to do if the system refuses a map.
_MAP_REMEDIES = {
    errno.EFBIG: "use a 64-bit Python",
    errno.ENOMEM: "raise the limit of the address space ('ulimit -v')",
    errno.EMFILE: "raise the limit of open files ('ulimit -n'), or close some",
    errno.ENFILE: "close files, or raise the system's limit of open files",
}
_MAX_COPIED = min(1 << 31, sys.maxsize)  # bytes that are copied if they cannot be mapped
_READ_SIZE = 1 << 30  # limit in bytes for one system call that reads into memory
PATIENCE = 1.0  # seconds in which others close a file that Windows is to replace
_PAUSE = 0.01  # seconds between two tries


class _Descriptor:
    """A descriptor, closed with the last reference to this object.

    A thread holds a reference while it reads, so the system cannot give the number to another file.
    """

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        with contextlib.suppress(OSError):  # see `MappedFile.flush`
            os.close(self.number)


# What this process has open and mapped: device and inode of the file.
_in_use: WeakKeyDictionary[_Descriptor | mmap.mmap, tuple[int, int]] = WeakKeyDictionary()


class MappedFile(File, OfOneProcess):
    """A regular file, read, mapped, locked and written through one descriptor.

    A fork of the process that opened it cannot write to it, but gets an ArchiveError. An OSError
    names the file.

    Attributes:
        path: The path of the file as given.
        absolute_path: The absolute path, independent of the working directory.
        size: The size in bytes at the time of opening or locking.
        identity: Device and inode, unique while the file is open.
        lock_failure: Why the last `locked` for reading did not lock the file; None if it did.
    """

    identity: tuple[int, int]
    lock_failure: LockedError | OSError | None = None
    _is_refused = False  # whether the system refuses to map the file
    _is_kept_locked = False  # whether `close` has to unlock the file

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
            rule: Id of the rule broken by a file that is not regular, or None.
            is_writable: True to open for reading and writing, False for reading, None for writing
                if permitted.
            descriptor: A descriptor of the file, closed by this object; None opens `path`.

        Raises:
            ArchiveFormatError: The file is not a regular file.
            OSError: The file cannot be opened.
        """
        super().__init__()
        self.set_path(path)
        if descriptor is None:
            descriptor = _open(self.path, rule, is_writable)
        self._descriptor: _Descriptor | None = _Descriptor(descriptor)
        status = self.status()
        if not stat.S_ISREG(status.st_mode):
            self._descriptor = None  # closes the file, even if the caller keeps the error
            raise _not_regular(self.path, kind_of(status.st_mode), rule)
        self.size = status.st_size
        self.identity = (status.st_dev, status.st_ino)
        self.device = status.st_dev
        _in_use[self._descriptor] = self.identity
        self._view: memoryview | None = None

    def status(self) -> os.stat_result:
        """The present status of the file; an error names it."""
        try:
            return os.fstat(self._require_open().number)
        except OSError as error:
            error.filename = self.path
            raise

    def state(self) -> tuple[int, int]:
        """Present size in bytes and time of the last write (ns)."""
        status = self.status()
        return status.st_size, status.st_mtime_ns

    def present_size(self) -> int:
        """See `File.present_size`."""
        return self.status().st_size

    @property
    def is_held(self) -> bool:
        """See `File.is_held`."""
        return locking.is_held(self.identity)

    def set_path(self, path: str | os.PathLike[str]) -> None:
        """Sets the paths, as `Replacement` does, so that errors name the target."""
        self.path = os.fsdecode(path)
        try:
            self.absolute_path = os.path.abspath(self.path)
        except OSError:  # the working directory is gone
            self.absolute_path = self.path

    @contextlib.contextmanager
    def locked(
        self, *, is_exclusive: bool, timeout: float | None = locking.TIMEOUT
    ) -> Iterator[None]:
        """Locks the file during a block, and updates `size`.

        Args:
            is_exclusive: True to exclude readers and editors. False to exclude editors if possible:
                the block also runs without the lock, with the reason in `lock_failure`.
            timeout: Maximum seconds to wait; None waits without limit.

        Raises:
            LockedError: The file stayed locked by somebody who needs it exclusively, or this thread
                has locked it.
            OSError: The file system has no exclusive locks, or (NFS) the file is not open for
                writing.
        """
        descriptor = self._require_open()  # this reference keeps the descriptor open
        kind = locking.exclusive if is_exclusive else locking.shared
        with contextlib.ExitStack() as lock:
            try:
                with with_path(self.path):
                    self.lock_failure = lock.enter_context(kind(descriptor.number, timeout))
                self.size = os.fstat(descriptor.number).st_size
            except OSError as error:
                error.filename = self.path
                if error.errno == errno.EBADF:
                    error.strerror = "cannot be locked for an edit without write permission (NFS)"
                raise
            yield

    def keep_locked(self, timeout: float = locking.SHORT_TIMEOUT) -> bool:
        """Locks the file exclusively until it is closed; see `locking.keep_exclusive`."""
        self._is_kept_locked = locking.keep_exclusive(self._require_open().number, timeout)
        return self._is_kept_locked

    def reopened(self) -> MappedFile:
        """Another object for the open file, with its present size, a new map, and the same lock."""
        with path_in_errors(self.path):
            file = MappedFile(self.path, descriptor=os.dup(self.fileno()))
        file.absolute_path = self.absolute_path
        return file

    def read(self, offset: int, size: int) -> bytes:
        """See `File.read`."""
        descriptor = self._require_open()
        copy: io.BytesIO | None = None
        while True:
            try:
                if hasattr(os, "pread"):
                    part = os.pread(descriptor.number, min(size, _READ_SIZE), offset)
                else:  # Windows
                    with locking.POSITION_LOCK:
                        os.lseek(descriptor.number, offset, os.SEEK_SET)
                        part = os.read(descriptor.number, min(size, _READ_SIZE))
            except OSError as error:
                error.filename = self.path
                raise
            if copy is None:
                if len(part) == size:
                    return part
                copy = io.BytesIO()  # `getvalue` returns the bytes without another copy
            if not part:
                return copy.getvalue()
            copy.write(part)
            offset, size = offset + len(part), size - len(part)

    def has_zeros_alone(self, offset: int, size: int) -> bool:
        """True if `size` bytes from `offset` are all zeros; on most systems, holes are not read."""
        return not any(
            bytes(piece).strip(b"\0")
            for begin, end in self._written_parts(offset, offset + size)
            for piece in self.pieces(begin, end - begin)
        )

    def _written_parts(self, offset: int, end: int) -> Iterator[tuple[int, int]]:
        """Yields begin and end of each part that is no hole; one part if holes cannot be found."""
        if not hasattr(os, "SEEK_DATA"):  # Windows
            yield offset, end
            return
        descriptor = self._require_open()
        while offset < end:
            try:
                begin = os.lseek(descriptor.number, offset, os.SEEK_DATA)
                offset = os.lseek(descriptor.number, begin, os.SEEK_HOLE)
            except OSError as error:
                if error.errno != errno.ENXIO:  # a file system that cannot find holes
                    yield offset, end
                return  # ENXIO: the rest is a hole, or beyond the end
            yield begin, min(offset, end)

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Writes all of `data` at `offset`, which may be beyond the end of the file."""
        self.refuse_fork()
        view = memoryview(data)
        descriptor = self._require_open()  # this reference keeps the descriptor open
        try:
            while view.nbytes:
                if hasattr(os, "pwrite"):
                    written = os.pwrite(descriptor.number, view, offset)
                else:  # Windows
                    with locking.POSITION_LOCK:
                        os.lseek(descriptor.number, offset, os.SEEK_SET)
                        written = os.write(descriptor.number, view)
                offset += written
                view = view[written:]
        except OSError as error:
            error.filename = self.path
            raise
        finally:
            del descriptor  # else the traceback of a kept error would keep the file open

    def flush(self) -> None:
        """Raises the OSError of writes that failed late, as on NFS when a descriptor is closed."""
        with path_in_errors(self.path):
            os.close(os.dup(self.fileno()))

    def truncate(self, size: int) -> None:
        """Cuts or extends the file to `size` bytes, but does not change `self.size`."""
        self.refuse_fork()
        try:
            os.ftruncate(self._require_open().number, size)
        except OSError as error:
            error.filename = self.path
            if os.name == "nt" and isinstance(error, PermissionError):
                error.strerror = (
                    f"{error.strerror}; another process, or a session of this one, has the file "
                    "mapped, and Windows does not shorten such a file; close it there first"
                )
            raise

    def avoid_maps(self) -> None:
        """Makes `view` return copies; only for more than 2 GiB it still returns a view of a map."""
        self._is_refused = True

    @property
    def is_mapped(self) -> bool:
        """True unless the system refuses to map the file, which the first use tries."""
        if self._view is None and not self._is_refused:
            try:
                self._map()
            except OSError:
                self._is_refused = True
        return not self._is_refused

    def view(self, offset: int = 0, nbytes: int | None = None) -> memoryview:
        """See `File.view`; the map is closed with the last view, and a copy has up to 2 GiB."""
        end = self.size if nbytes is None else offset + nbytes
        if not self.is_mapped and end - offset <= _MAX_COPIED:
            return memoryview(self.read(offset, end - offset))
        view = self._view or self._map()
        if end > view.nbytes:
            raise ArchiveFormatError(
                f"the file was truncated after it was opened: expected {self.size} bytes, found "
                f"{view.nbytes}",
                path=self.path,
            )
        return view[offset:end]

    def prefetch(self, how: Prefetch) -> None:
        """Reads the mapped file ahead, in the background ("willneed") or at once ("populate")."""
        if how == "populate":
            flags = {} if POPULATED is None else {"flags": POPULATED, "prot": mmap.PROT_READ}
            view = self._map(**flags)
            if POPULATED is None:
                view[:: mmap.PAGESIZE].tobytes()  # reads a byte of each page
        elif hasattr(mmap, "MADV_WILLNEED"):
            with contextlib.suppress(OSError):  # it is only advice
                mapped = (self._view or self._map()).obj
                if isinstance(mapped, mmap.mmap):
                    mapped.madvise(mmap.MADV_WILLNEED)

    def _map(self, **kind: int) -> memoryview:
        """Maps the file up to `size`, or up to its end if it has been truncated."""
        kind = kind or {"access": mmap.ACCESS_READ}
        descriptor = self._require_open()
        size, view = self.size, memoryview(b"")
        while size > view.nbytes:
            try:
                try:
                    mapped = mmap.mmap(descriptor.number, size, **kind, **_MAP_OPTIONS)
                except OverflowError:  # 2 GiB, where a size has 32 bits
                    raise OSError(errno.EFBIG, f"more than {sys.maxsize} bytes") from None
                _in_use[mapped] = self.identity
                view = memoryview(mapped)
            except OSError as error:
                remedy = _MAP_REMEDIES.get(error.errno or 0, "copy it to another file system")
                reason = f"the file cannot be mapped ({error.strerror}); {remedy}"
                raise OSError(error.errno, reason, self.path) from None
            except ValueError:  # truncated, perhaps again
                size = min(size - 1, self.status().st_size)
        self._view = view
        if self._descriptor is None:  # closed by another thread meanwhile
            self._view = None
        return view

    def present_path(self) -> str:
        """The present path of the open file, without symbolic links.

        On Linux, a file that was renamed while it was open is found, too.

        Raises:
            ArchiveError: The file was replaced or removed.
        """
        path = os.path.realpath(self.absolute_path)
        if not self.is_at(path):
            with contextlib.suppress(OSError):  # no /proc
                path = os.readlink(f"/proc/self/fd/{self.fileno()}")
            if not self.is_at(path):
                raise ArchiveError(
                    "the file was replaced or removed after it was opened; open it again",
                    path=self.path,
                )
        return path

    def is_at(self, path: str | os.PathLike[str]) -> bool:
        """True if `path` leads to this file."""
        try:
            status = os.stat(path)
        except (OSError, ValueError):  # ValueError: a path with a NUL
            return False
        return (status.st_dev, status.st_ino) == self.identity

    def has_path(self, path: str | os.PathLike[str]) -> bool:
        """See `File.has_path`."""
        own = os.path.realpath(self.absolute_path)
        return os.path.realpath(path) == own or self.is_at(path)

    def fileno(self) -> int:
        """The descriptor, valid as long as the file is open."""
        return self._require_open().number

    def release(self) -> None:
        """Closes the file and ends its lock at once, although a block of `locked` still runs.

        Until that block ends, the descriptor is one of the null device. Otherwise the block might
        unlock another file that got the same number.
        """
        descriptor = self._require_open()
        locking.unlock(descriptor.number)
        nothing = os.open(os.devnull, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        try:
            os.dup2(nothing, descriptor.number, inheritable=False)
        finally:
            os.close(nothing)
        _in_use.pop(descriptor, None)
        self.close()

    @property
    def is_closed(self) -> bool:
        """See `File.is_closed`."""
        return self._descriptor is None

    def close(self) -> None:
        """Drops descriptor and map; each is closed when nothing else refers to it."""
        if self._is_kept_locked and self.is_own and self._descriptor is not None:
            locking.unlock(self._descriptor.number)  # closing alone would leave the lock to forks
        self._descriptor = None
        self._view = None

    def _require_open(self) -> _Descriptor:
        descriptor = self._descriptor
        if descriptor is None:
            raise ValueError(f"{self.path}: the file is closed")
        return descriptor


@contextlib.contextmanager
def locked_file(
    path: str | os.PathLike[str],
    *,
    rule: str | None = None,
    is_exclusive: bool = False,
    is_writable: bool | None = False,
    timeout: float | None = locking.TIMEOUT,
    file: MappedFile | None = None,
) -> Iterator[MappedFile]:
    """Opens a file and locks it during a block; for arguments and errors see `MappedFile`.

    `file` is the file if it is open already; it must not have been mapped. If another file gets the
    path during the wait for the lock, the new file is opened instead. If the block raises, the file
    is closed; otherwise it remains open.
    """
    locking.require_timeout(timeout)
    begun = time.monotonic()
    is_locked = is_late = False
    while True:
        if file is None:
            file = MappedFile(path, rule=rule, is_writable=is_writable)
        if os.name == "nt":
            # An editor cannot replace a file that others have open, and unlocks it just before. So
            # nobody waits with the file open, or opens it as soon as it is unlocked.
            was_locked, is_locked = is_locked, locking.is_locked(file.fileno())
            is_late = timeout is not None and time.monotonic() >= begun + timeout
            if (was_locked or is_locked) and not is_late:
                file.close()
                file = None
                time.sleep(_PAUSE)
                continue
        try:
            with file.locked(is_exclusive=is_exclusive, timeout=0 if is_late else timeout):
                if file.is_at(path):
                    yield file
                    return
        except BaseException:
            file.close()
            raise
        file.close()  # another file has the path now
        file = None


def replace_file(source: str, target: str, unlocked: os.stat_result | None) -> None:
    """Renames a file over another one, or to a new name.

    On Windows, this fails while a program has one of the files open, and virus scanners and
    indexers open each new file for a moment. So it is tried for a second.

    Args:
        source: The file.
        target: The new path.
        unlocked: Status of a target that was unlocked just now, and must be the same; or None.

    Raises:
        LockedError: The target has been changed since it was unlocked.
        OSError: The file cannot be renamed.
    """
    begun = time.monotonic()
    while True:
        if unlocked is not None and _version(unlocked) != _version(os.stat(target)):
            raise LockedError(
                "the file was changed by somebody else when it had to be closed to be replaced; "
                "it has their content: try again"
            )
        try:
            os.replace(source, target)
            return
        except PermissionError:
            if os.name != "nt" or time.monotonic() >= begun + PATIENCE:
                raise
        time.sleep(_PAUSE)


def _version(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def require_unused(file: MappedFile) -> None:
    """On Windows, refuses to replace or shorten a locked file that is also open elsewhere.

    Other processes are unknown. The call waits for other threads, since they may have opened the
    file only to see that it is locked.

    Raises:
        LockedError: This process has the file open or mapped.
    """
    if os.name != "nt":
        return
    begun = time.monotonic()
    while _is_in_use(file.identity, file.fileno()):
        if time.monotonic() >= begun + PATIENCE:
            raise LockedError(
                "this process has the file open or mapped, and Windows neither replaces nor "
                "shortens such a file; close its archives and delete their arrays and sessions, or "
                "write another file"
            )
        time.sleep(_PAUSE)


def _is_in_use(identity: tuple[int, int], number: int) -> bool:
    """True if this process has a file open or mapped, apart from the descriptor `number`."""
    for reference in _in_use.keyrefs():  # a copy: other threads open and close files meanwhile
        user = reference()
        if user is None or _in_use.get(user) != identity:
            continue
        if not (isinstance(user, _Descriptor) and user.number == number):
            return True
    return False


def _open(path: str, rule: str | None, is_writable: bool | None) -> int:
    """Opens a file; returns the descriptor."""
    # With O_NONBLOCK, opening a pipe does not block; `MappedFile` then refuses the pipe. With
    # O_BINARY, Windows does not change line ends.
    flags = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    if os.path.isdir(path):  # some systems cannot open a directory
        raise _not_regular(path, "a directory", rule)
    try:
        if is_writable is not False:
            try:
                return os.open(path, flags | os.O_RDWR)
            except OSError as error:
                if is_writable or error.errno not in _NO_WRITING:
                    raise
        return os.open(path, flags | os.O_RDONLY)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            raise _not_regular(path, "a socket", rule) from None
        raise


def make_file(path: str, mode: int = 0o666) -> MappedFile:
    """Creates a file and opens it for reading and writing; `mode` is that before the umask."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    return MappedFile(path, descriptor=os.open(path, flags, mode))


class PositionalWriter:
    """Writes successive pieces to a file from an offset, without a buffer.

    Attributes:
        offset: Offset of the next piece in the file, in bytes.
    """

    def __init__(self, file: MappedFile, offset: int = 0, end: int | None = None) -> None:
        """Writes to a file from `offset`, up to `end` if it is not None."""
        self.offset = offset
        self._end = end
        self._file = file

    def write(self, data: bytes | memoryview, /) -> int:
        """Writes all of `data`, and returns its size in bytes.

        Raises:
            ArchiveError: This process is a fork, or `data` exceeds the limit.
        """
        nbytes = memoryview(data).nbytes
        if self._end is not None and self.offset + nbytes > self._end:
            raise ArchiveError(f"the bytes to write go beyond offset {self._end}, the limit")
        self._file.write(self.offset, data)
        self.offset += nbytes
        return nbytes

    def skip(self, nbytes: int) -> None:
        """Leaves `nbytes` bytes, which are in the file already, as they are."""
        self.offset += nbytes

    def last(self, nbytes: int) -> bytes:
        """The `nbytes` bytes of the file before the next piece, or all if there are fewer."""
        nbytes = min(nbytes, self.offset)
        return self._file.read(self.offset - nbytes, nbytes)


def _not_regular(path: str, kind: str, rule: str | None) -> ArchiveFormatError:
    return ArchiveFormatError(f"expected a regular file, found {kind}", rule=rule, path=path)
