"""Files: read by position or through a map, written so that the target is whole or untouched."""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import re
import shutil
import stat
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from types import TracebackType
from typing import IO, Any, BinaryIO, Generic, Literal, TypeAlias, TypeVar

from onnxarchive import locking
from onnxarchive.errors import ArchiveFormatError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# How a file is read ahead of those who look at it through a map.
Prefetch: TypeAlias = Literal["willneed", "populate"]

READ_SIZE = 1 << 19  # bytes read at a time by `MappedFile.pieces`: they stay in a core's cache
_NO_SPACE = (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))
# What systems say where a file system has no permission bits.
_NO_MODES = (errno.EPERM, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS)
# What systems say where directories cannot be synced.
_NO_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS)
_CLONE = 0x40049409  # FICLONE of Linux: _IOW(0x94, 9, int)
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE of Linux
# File systems that write to the blocks that were set aside as fast as to others, or faster. Btrfs
# would not compress what is written there, and ZFS refuses what would fit when it is compressed.
_RESERVING = ("ext4", "xfs", "tmpfs")
# The flags of a map whose pages are all read and mapped when it is made; None where there is none.
_POPULATED = mmap.MAP_SHARED | mmap.MAP_POPULATE if hasattr(mmap, "MAP_POPULATE") else None
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class MappedFile:
    """A regular file, read and mapped through one descriptor, so that both see the same file.

    Attributes:
        path: The file's path as it was given.
        size: Its size in bytes when it was opened, or when `unchanged` began.
        identity: Tells it from every other file, also from one that takes its path.
    """

    def __init__(self, path: str | os.PathLike[str], *, rule: str | None = None) -> None:
        """Opens the file.

        Args:
            path: The file.
            rule: The rule that anything but a regular file breaks, if one does.

        Raises:
            ArchiveFormatError: `path` is a directory, a pipe or a device.
            OSError: It cannot be opened.
        """
        self.path = os.fsdecode(path)
        # A pipe is not waited for: it is refused below. Windows would change line ends.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        if os.name == "nt" and os.path.isdir(self.path):  # which Windows refuses to open
            raise _not_regular(self.path, "a directory", rule)
        try:
            self._descriptor = os.open(self.path, flags)
        except OSError as error:
            if error.errno == errno.ENXIO:  # which a socket is to those who open it
                raise _not_regular(self.path, "a socket", rule) from None
            raise
        try:
            status = os.fstat(self._descriptor)
            if not stat.S_ISREG(status.st_mode):
                kind = next((name for test, name in _KINDS if test(status.st_mode)), "another kind")
                raise _not_regular(self.path, kind, rule)
        except BaseException:
            os.close(self._descriptor)
            raise
        self.size = status.st_size
        self.identity = (status.st_dev, status.st_ino)
        self._view: memoryview | None = None
        self._is_open = True
        self._position_lock = threading.Lock()

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Keeps those out who change the file in its place, while the block runs."""
        with locking.shared(self._descriptor):
            self.size = os.fstat(self._descriptor).st_size
            yield

    def read(self, offset: int, size: int) -> bytes:
        """Reads `size` bytes from `offset`, fewer at the end of the file; a copy."""
        part = self._read_once(offset, size)
        if len(part) == size:
            return part
        parts = []
        while part:
            parts.append(part)
            offset += len(part)
            size -= len(part)
            part = self._read_once(offset, size)
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
        if not nbytes:
            self._require_open()
            return memoryview(b"")
        return self.reaching(offset + nbytes)[offset : offset + nbytes]

    def reaching(self, end: int) -> memoryview:
        """The file as a read-only view of which the bytes up to `end` are there.

        Raises:
            ArchiveFormatError: The file has become shorter than that since it was opened.
        """
        view = self._view
        if view is None:
            self._require_open()
            view = self._view = self._map()
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
            flags = {} if _POPULATED is None else {"flags": _POPULATED, "prot": mmap.PROT_READ}
            self._view = self._map(**flags)
            if _POPULATED is None:
                self._view[:: mmap.PAGESIZE].tobytes()  # a byte of each page brings the page
        elif hasattr(mmap, "MADV_WILLNEED"):
            mapped = self.reaching(0).obj
            with contextlib.suppress(OSError):  # it is an advice
                if isinstance(mapped, mmap.mmap):
                    mapped.madvise(mmap.MADV_WILLNEED)

    def _map(self, **kind: int) -> memoryview:
        """The file through a map: as much as it had when it was opened, or as it still has."""
        kind = kind or {"access": mmap.ACCESS_READ}
        size = self.size
        while size:
            try:
                return memoryview(mmap.mmap(self._descriptor, size, **kind))
            except ValueError:  # it has become shorter, perhaps again
                size = min(size - 1, os.fstat(self._descriptor).st_size)
        return memoryview(b"")

    def paths(self) -> Iterator[str]:
        """Where the file may be, without symbolic links: where it was opened, or is by now.

        On Linux the descriptor knows where a file that was renamed has gone. A path may lead to
        another file: compare its `identity`.
        """
        yield os.path.realpath(self.path)
        with contextlib.suppress(OSError):  # of another system
            yield os.readlink(f"/proc/self/fd/{self._descriptor}")

    def is_at(self, path: str | os.PathLike[str]) -> bool:
        """Whether `path` leads to this very file."""
        try:
            status = os.stat(path)
        except (OSError, ValueError):  # ValueError: a path with a NUL
            return False
        return (status.st_dev, status.st_ino) == self.identity

    def fileno(self) -> int:
        """The descriptor."""
        self._require_open()
        return self._descriptor

    def close(self) -> None:
        """Closes the descriptor and lets go of the map, which lives as long as a view of it."""
        if self._is_open:
            self._is_open = False
            self._view = None
            os.close(self._descriptor)

    def __enter__(self) -> MappedFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_is_open", False):
            self.close()

    def _read_once(self, offset: int, size: int) -> bytes:
        self._require_open()
        if hasattr(os, "pread"):
            return os.pread(self._descriptor, size, offset)
        with self._position_lock:  # Windows
            os.lseek(self._descriptor, offset, os.SEEK_SET)
            return os.read(self._descriptor, size)

    def _require_open(self) -> None:
        if not self._is_open:
            raise ValueError(f"{self.path}: the file is closed")


class MemoryFile(MappedFile):
    """Bytes in memory with the reading side of a file; they are not copied."""

    def __init__(self, data: memoryview) -> None:
        """Takes the bytes, as a view of single bytes."""
        self.path = "archive in memory"
        self.size = data.nbytes
        self.identity = (-1, id(self))
        self._data = data.toreadonly()
        self._is_open = True

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Nobody changes it."""
        yield

    def prefetch(self, how: Prefetch) -> None:
        """Does nothing: they are there."""

    def reaching(self, end: int) -> memoryview:
        """All of the bytes."""
        self._require_open()
        return self._data

    def paths(self) -> Iterator[str]:
        """None: it has no file."""
        return iter(())

    def close(self) -> None:
        """Ends the reading; views live on."""
        self._is_open = False

    def _read_once(self, offset: int, size: int) -> bytes:
        self._require_open()
        return bytes(self._data[offset : offset + size])


def _not_regular(path: str, kind: str, rule: str | None) -> ArchiveFormatError:
    error = ArchiveFormatError(f"expected a regular file, found {kind}", rule=rule)
    error.path = path
    return error


_TEMPORARY = re.compile(r"[0-9]+-[0-9]+\.tmp")
_Made = TypeVar("_Made")
_serial_numbers = itertools.count()
_temporaries: weakref.WeakSet[_Temporary[Any]] = weakref.WeakSet()


def remove_temporaries() -> None:
    """Removes what this process has not completed, when it is about to end without unwinding."""
    for temporary in list(_temporaries):
        temporary.remove()


class _Temporary(Generic[_Made]):
    """A new file or directory beside a target, removed unless it is kept.

    It is known before it is made, and removed with this object at the latest: an interrupt at
    whatever moment leaves nothing behind.

    Attributes:
        path: Its path.
        made: What `make` gave.
    """

    def __init__(
        self, target: str, make: Callable[[str], _Made], remove: Callable[[str], None]
    ) -> None:
        while True:
            number = f"{os.getpid()}-{next(_serial_numbers)}"
            self.path = f"{_temporary_prefix(target)}{number}.tmp"
            self._finalizer = weakref.finalize(
                self, _remove_in_process, os.getpid(), remove, self.path
            )
            _temporaries.add(self)
            try:
                self.made = make(self.path)
                return
            except FileExistsError:  # another machine's, in a shared directory
                self._finalizer.detach()
            except OSError:
                self._finalizer.detach()  # nothing was made
                raise

    def keep(self) -> None:
        """Leaves it where it is."""
        self._finalizer.detach()

    def remove(self) -> None:
        """Removes it, unless it was removed or kept before."""
        self._finalizer()


def _temporary_prefix(target: str) -> str:
    directory, name = os.path.split(target)
    return os.path.join(directory, f".{name[:50]}.")  # 200 bytes at most, of 255


def remove_abandoned(path: str | os.PathLike[str]) -> list[str]:
    """Removes the temporary files of processes that were killed while they wrote `path`.

    Those that are being written are locked, and stay; so does what is not a regular file.

    Returns:
        The paths of what was removed.
    """
    above, own = os.path.split(os.path.abspath(path))
    # A symbolic link may itself have been about to be replaced.
    targets = {os.path.realpath(path), os.path.join(os.path.realpath(above), own)}
    removed = []
    for target in sorted(targets):
        directory, prefix = os.path.split(_temporary_prefix(target))
        for name in sorted(os.listdir(directory)):
            if not (name.startswith(prefix) and _TEMPORARY.fullmatch(name, len(prefix))):
                continue
            found = os.path.join(directory, name)
            with contextlib.suppress(OSError):  # of somebody else, or gone by now
                if stat.S_ISREG(os.lstat(found).st_mode) and _removes_abandoned(found):
                    removed.append(found)
    return removed


def _removes_abandoned(path: str) -> bool:
    """Removes a file unless it is locked; whoever waits for the lock sees that it is gone."""
    with open(path, "rb+") as file:
        if not locking.try_exclusive(file.fileno()):
            return False
        if os.name != "nt":  # which removes no open file
            os.unlink(path)
    if os.name == "nt":
        os.unlink(path)
    return True


def _remove_in_process(process: int, remove: Callable[[str], None], path: str) -> None:
    if os.getpid() == process:  # a fork has its parent's finalizers
        remove(path)


class Replacement:
    """A new file that takes the place of another when it is complete, and only then.

    It is written beside the target under a temporary name. `commit` syncs it, renames it over the
    target and syncs the directory: at any moment the target is what it was or is complete. A
    target that is a symbolic link keeps being one: the file that it leads to is replaced. An
    existing target's permission bits are kept, and its owner where that is allowed. As long as the
    file is written it is locked, by which it can be told from one that was abandoned.

    Attributes:
        file: Where to write.
    """

    def __init__(self, path: str | os.PathLike[str], *, follow_links: bool = True) -> None:
        """Makes the temporary file.

        Args:
            path: The target.
            follow_links: Whether to replace the file that a symbolic link leads to, and not the
                link.

        Raises:
            OSError: The file cannot be made, or the target is there and is no regular file.
        """
        self._path = os.fspath(path)
        directory, name = os.path.split(self._path)
        self._target = os.path.join(os.path.realpath(directory), name)
        if follow_links:
            self._target = os.path.realpath(path)
        if os.path.isdir(self._target):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if os.path.exists(self._target) and not os.path.isfile(self._target):
            raise FileExistsError(errno.EEXIST, "is not a regular file", os.fspath(path))
        while True:
            try:
                self._temporary = _Temporary(self._target, _open_new, _unlink)
            except OSError as error:
                error.filename = self._path  # not that of the temporary file
                raise
            self.file: BinaryIO = self._temporary.made
            locking.keep_exclusive(self.file.fileno())
            if os.path.lexists(self._temporary.path):
                break
            self.discard()  # before it was locked, somebody took it for an abandoned one

    def commit(
        self, around: Callable[[], contextlib.AbstractContextManager[None]] | None = None
    ) -> None:
        """Puts the file in the target's place; on failure it is discarded instead.

        Args:
            around: Entered before the rename and left behind it, while the file is still locked.

        Raises:
            OSError: The file cannot be synced or renamed.
        """
        try:
            self.file.flush()
            sync(self.file.fileno())
            if os.name == "nt":  # which renames no open file
                self.file.close()
            with contextlib.suppress(FileNotFoundError):
                _set_owner_and_mode(self._temporary.path, os.stat(self._target))
            with contextlib.nullcontext() if around is None else around():
                os.replace(self._temporary.path, self._target)
                self._temporary.keep()
        except BaseException as error:
            self.discard(error)
            raise
        self.file.close()
        with contextlib.suppress(OSError):  # the file is complete in any case
            sync_directory(os.path.dirname(self._target))

    def discard(self, error: BaseException | None = None) -> None:
        """Removes the file; the target is untouched.

        Args:
            error: Why, or None. Where it tells of a full disk, it is made to name the target.
        """
        if isinstance(error, OSError) and error.errno in _NO_SPACE and error.filename is None:
            error.filename = self._path
        with contextlib.suppress(OSError):  # what is still buffered may not fit the disk
            self.file.close()
        self._temporary.remove()


def _set_owner_and_mode(path: str, status: os.stat_result) -> None:
    if hasattr(os, "chown"):
        with contextlib.suppress(OSError):  # as who is not root may not
            os.chown(path, status.st_uid, status.st_gid)
    try:
        os.chmod(path, stat.S_IMODE(status.st_mode))
    except OSError as error:
        if error.errno not in _NO_MODES:
            raise


def _open_new(path: str) -> BinaryIO:
    return open(path, "xb")


def clone(source: MappedFile, target: BinaryIO) -> bool:
    """Lets a new file share the blocks of another one, where the file system can (reflinks).

    Returns:
        Whether it did; if not, `target` is as it was.
    """
    if fcntl is None or not hasattr(fcntl, "ioctl"):
        return False
    try:
        fcntl.ioctl(target.fileno(), _CLONE, source.fileno())
    except OSError:  # systems say in many ways that they cannot
        return False
    return True


def reserve(file: BinaryIO, nbytes: int) -> None:
    """Has blocks set aside for bytes that are about to be written, where that is of use.

    A disk without room then says so at once, and writing goes faster. The file's size stays; its
    blocks are freed when it is removed.

    Args:
        file: The file, with nothing in it.
        nbytes: How many bytes.

    Raises:
        OSError: The disk has no room for them.
    """
    if not nbytes or _file_system(file.fileno()) not in _RESERVING:
        return
    allocate = _fallocate()
    if allocate is None:
        return
    error = allocate(file.fileno(), nbytes)
    if error in _NO_SPACE:
        raise OSError(error, os.strerror(error))


@cache
def _fallocate() -> Callable[[int, int], int] | None:
    """Linux's fallocate, which takes a descriptor and a number of bytes, and gives the error.

    Python has posix_fallocate alone, which writes into every block itself where the file system
    cannot set them aside.
    """
    if not sys.platform.startswith("linux"):
        return None
    try:
        import ctypes

        library = ctypes.CDLL(None, use_errno=True)
    except (ImportError, OSError):  # Python was built without it, or is linked statically
        return None
    # That of 64 bits, where there are two.
    function = getattr(library, "fallocate64", None) or getattr(library, "fallocate", None)
    if function is None:
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

    def allocate(descriptor: int, nbytes: int) -> int:
        return ctypes.get_errno() if function(descriptor, _KEEP_SIZE, 0, nbytes) else 0

    return allocate


def _file_system(descriptor: int) -> str | None:
    """The kind of the file system that a file is on, as Linux tells it in proc(5)."""
    device = os.fstat(descriptor).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with (
        contextlib.suppress(OSError),
        open("/proc/self/mountinfo", errors="surrogateescape") as mounts,
    ):
        for mount in mounts:
            fields, _, described = mount.partition(" - ")
            if fields.split()[2] == number:
                return described.split()[0]
    return None


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.unlink(path)


def spool(pieces: Iterable[memoryview], directory: str | None) -> memoryview:
    """Bytes as a view of a file without a name, which goes when the last view does.

    Args:
        pieces: The bytes.
        directory: Where the file is made; None for the system's directory of temporary files.

    Raises:
        OSError: It cannot be made, or the disk is full; the directory is named.
    """
    size = 0
    with _unnamed(directory) as file:
        try:
            for piece in pieces:
                size += file.write(piece)
            file.flush()
            if not size:
                return memoryview(b"")
            return memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))
        except OSError as error:
            if error.filename is None:  # else it is of what is read
                error.filename = _name_of_unnamed(directory)
            raise


def _unnamed(directory: str | None) -> IO[bytes]:
    try:
        return tempfile.TemporaryFile(prefix=".onnxarchive-", dir=directory)
    except OSError as error:
        error.filename = _name_of_unnamed(directory)
        raise


def _name_of_unnamed(directory: str | None) -> str:
    return f"a temporary file in {directory or tempfile.gettempdir()}"


def is_below(path: str, directory: str) -> bool:
    """Whether `path` is `directory` or lies in it; both are absolute, without links."""
    try:
        return os.path.commonpath([path, directory]) == directory
    except ValueError:  # on another drive
        return False


def require_no_input(target: str | os.PathLike[str], inputs: Iterable[str]) -> None:
    """Refuses to write over what is being read.

    Raises:
        ValueError: `target` is one of the files `inputs`, under whatever name.
    """
    for path in inputs:
        with contextlib.suppress(FileNotFoundError):
            if os.path.samefile(target, path):
                raise ValueError(f"expected another file than the input {path}, found {target!s}")


@contextlib.contextmanager
def replacing(
    path: str | os.PathLike[str],
    *,
    follow_links: bool = True,
    around: Callable[[], contextlib.AbstractContextManager[None]] | None = None,
) -> Iterator[BinaryIO]:
    """A `Replacement` that is committed when the block ends and discarded when it raises.

    Args:
        path: The target.
        follow_links: As `Replacement` takes it.
        around: As `Replacement.commit` takes it.
    """
    replacement = Replacement(path, follow_links=follow_links)
    try:
        yield replacement.file
    except BaseException as error:
        replacement.discard(error)
        raise
    replacement.commit(around)


@contextlib.contextmanager
def new_directory(path: str | os.PathLike[str]) -> Iterator[str]:
    """A directory to fill that gets its name when the block ends; removed when it raises.

    Raises:
        OSError: It cannot be made, or `path` exists and is not an empty directory.
    """
    target = os.path.realpath(path)
    if os.path.exists(target) and os.listdir(target):
        raise FileExistsError(errno.EEXIST, "the directory is not empty", os.fspath(path))
    try:
        temporary = _Temporary(target, os.mkdir, partial(shutil.rmtree, ignore_errors=True))
    except OSError as error:
        error.filename = os.fspath(path)
        raise
    try:
        yield temporary.path
        if os.path.exists(target):
            os.rmdir(target)
        os.rename(temporary.path, target)
    except BaseException:
        temporary.remove()
        raise
    temporary.keep()


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
