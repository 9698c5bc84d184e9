"""Local files from which data is read, of which few are open; and spooled bytes."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from onnxarchive.errors import ArchiveFormatError, path_in_errors
from onnxarchive.files.clones_and_sync import require_space
from onnxarchive.files.data import Closing, Data, File
from onnxarchive.files.local_file import MappedFile, PositionalWriter
from onnxarchive.files.locking import is_held
from onnxarchive.files.paths import Root

_MAX_OPEN = 32  # data files at a time
_SHARE = 8  # they are at most this part of the files that the process may open
_TOO_MANY = (errno.EMFILE, errno.ENFILE)
_Key = TypeVar("_Key")


class DataFiles(Closing):
    """Opens files by path, of which at most 32 are open at a time.

    A file is checked when it is opened: it must be regular, and beneath a directory if one is
    given. The checked file is read, even if another file gets its path later. A file that had to be
    closed for others is opened and checked again when it is read; it must be the same file, with
    the same size and time.
    """

    def __init__(self, *, keeps_open: bool = True) -> None:
        """Opens nothing yet; without `keeps_open`, a file is closed after each read."""
        self._lock = threading.Lock()
        # The file opened or read last is last. A file that leaves is closed as soon as no thread
        # reads it any more, and a map as soon as no view of it is left. A `DataFile` refers to this
        # object, which must not keep it, too: files are closed with the last data of them.
        self._open: WeakKeyDictionary[DataFile, MappedFile] = WeakKeyDictionary()
        self._by_identity: WeakValueDictionary[tuple[int, int], DataFile] = WeakValueDictionary()
        self._most_open = _most_open() if keeps_open else 0

    def open(self, path: str | os.PathLike[str], root: Root | None = None) -> DataFile:
        """Opens a file by its path in `root`; None for any path, and no restriction.

        A file that was opened before, perhaps by another path, is the same object while it lives.

        Raises:
            ArchiveFormatError: It is not a regular file, or a link leads out of the directory
                (OutsideError).
            OSError: It cannot be opened.
        """
        path = os.fsdecode(path)
        with self._lock:
            file = self._open_in_turn(path, root)
            data_file = self._by_identity.get(file.identity)
            if data_file is None or data_file.first_state != file.state():
                data_file = DataFile(self, path, root, file)
                self._by_identity[file.identity] = data_file
            self._keep(data_file, self._open.pop(data_file, file))
        return data_file

    def open_file(self, data_file: DataFile) -> MappedFile:
        """The open file, which is opened again if it is closed; for errors see `open`.

        Raises:
            ArchiveFormatError: It is another file, or was changed since it was opened first.
        """
        with self._lock:
            file = self._open.pop(data_file, None)
            if file is None:
                file = self._open_in_turn(data_file.path_in_root, data_file.root)
                data_file.require_same(file)
            self._keep(data_file, file)
            return file

    def close(self) -> None:
        """Closes the open files; they are opened again if they are read."""
        with self._lock:
            self._open.clear()

    def _open_in_turn(self, path: str, root: Root | None) -> MappedFile:
        """Opens a file; if too many are open in this process, the others here are closed first."""
        try:
            return _open_judged(path, root)
        except OSError as error:
            if error.errno not in _TOO_MANY or not self._open:
                raise
        self._open.clear()
        return _open_judged(path, root)

    def _keep(self, data_file: DataFile, file: MappedFile) -> None:
        self._open[data_file] = file
        if len(self._open) > self._most_open:
            del self._open[next(iter(self._open))]


class DataFile(File):
    """A local file that may be closed between two reads; see `DataFiles`.

    Attributes:
        path_in_root: The path by which it is opened.
        root: The directory of `path_in_root`; None for no restriction.
        first_state: Its state when it was opened first.
    """

    identity: tuple[int, int]

    def __init__(self, files: DataFiles, path: str, root: Root | None, file: MappedFile) -> None:
        self._files, self.path_in_root, self.root = files, path, root
        self.path, self.size, self.identity = file.path, file.size, file.identity
        self.device = file.device
        self.first_state = file.state()

    def require_same(self, file: MappedFile) -> None:
        """Refuses and closes a file that is not this one, or was changed since it was opened."""
        fault = None
        if file.identity != self.identity:
            fault = "the file was replaced after it was opened"
        elif file.state() != self.first_state:
            fault = "the file was changed after it was opened"
        if fault is not None:
            file.close()
            raise ArchiveFormatError(fault, path=file.path)

    def open_file(self) -> MappedFile:
        """The file, open at least until the caller drops it."""
        return self._files.open_file(self)

    @property
    def is_mapped(self) -> bool:
        """See `MappedFile.is_mapped`."""
        return self.open_file().is_mapped

    @property
    def is_held(self) -> bool:
        """See `File.is_held`; the file is not opened for this."""
        return is_held(self.identity)

    def has_path(self, path: str) -> bool:
        """See `File.has_path`."""
        return self.open_file().has_path(path)

    def state(self) -> Hashable:
        """See `MappedFile.state`; None for a file that was closed, and then changed or replaced."""
        try:
            return self.open_file().state()
        except ArchiveFormatError:
            return None

    def present_size(self) -> int | None:
        """See `File.present_size`."""
        return self.open_file().present_size()

    def read(self, offset: int, size: int) -> bytes:
        """See `File.read`."""
        return self.open_file().read(offset, size)

    def view(self, offset: int = 0, nbytes: int | None = None) -> memoryview:
        """See `MappedFile.view`."""
        return self.open_file().view(offset, nbytes)

    def close(self) -> None:
        """Does nothing: `DataFiles` closes its files."""


def _most_open() -> int:
    """The number of files that a `DataFiles` keeps open, limited in a process that may have few."""
    try:
        import resource
    except ImportError:  # Windows
        return _MAX_OPEN
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return _MAX_OPEN
    return max(1, min(_MAX_OPEN, limit // _SHARE))


def _open_judged(path: str, root: Root | None) -> MappedFile:
    if root is None:
        return MappedFile(path)
    return MappedFile(root.joined(path), descriptor=root.open(path))


def spool(pieces: Iterable[memoryview], nbytes: int, directory: str | None = None) -> memoryview:
    """Copies bytes to an unnamed file and returns a view of its map.

    The file is removed when the last view is freed. Its directory, None for the system's temporary
    one, must have space for `nbytes` bytes; an OSError of the file names the directory.
    """
    with path_in_errors("the system's temporary directory"):
        directory = directory or tempfile.gettempdir()
    name = f"a temporary file in {directory}"
    require_space(name, nbytes, directory)
    with (
        path_in_errors(name),
        tempfile.TemporaryFile(prefix=".onnxarchive-", dir=directory) as unnamed,
    ):
        file = MappedFile(name, descriptor=os.dup(unnamed.fileno()))
    with file:
        writer = PositionalWriter(file)
        for piece in pieces:
            writer.write(piece)
        file.size = writer.offset
        return file.view()


def spool_all(parts: Mapping[_Key, Data], directory: str | None) -> dict[_Key, memoryview]:
    """Copies several data to an unnamed file, as `spool`, and returns views of them by key."""
    sizes: dict[_Key, int] = {}

    def pieces() -> Iterator[memoryview]:
        for key, data in parts.items():
            sizes[key] = 0
            for piece in data.pieces():
                sizes[key] += piece.nbytes
                yield piece

    views: dict[_Key, memoryview] = {}
    rest = spool(pieces(), sum(data.nbytes for data in parts.values()), directory)
    for key, size in sizes.items():
        views[key], rest = rest[:size], rest[size:]
    return views
