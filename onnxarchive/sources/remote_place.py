"""The data files of a remote model: the objects beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from onnxarchive.buffers.data import Data
from onnxarchive.sources.places import plain
from onnxarchive.storage.random_access import RandomAccessFile
from onnxarchive.storage.spooling import RandomAccessData


class RemotePlace:
    """The objects in a remote model's folder and below it; see `places.Place`.

    Args:
        open_beside: Opens the object of a location.
        resources: Closes the objects.
        temporary: The directory for copies of tensors; None for the system's.
    """

    names: list[str] = []  # noqa: RUF012 a store is not searched
    all_names = names

    def __init__(
        self,
        open_beside: Callable[[str], RandomAccessFile],
        resources: contextlib.ExitStack,
        temporary: str | None,
    ) -> None:
        self._open_beside = open_beside
        self._resources = resources
        self._temporary = temporary
        self._files: dict[str, _RemoteDataFile | None] = {}

    def find(self, location: str) -> _RemoteDataFile | None:
        """As `Place.find`."""
        path = plain(location)
        if path not in self._files:
            try:
                file = self._resources.enter_context(self._open_beside(path))
                self._files[path] = _RemoteDataFile(file, self._temporary)
            except FileNotFoundError:
                self._files[path] = None
        return self._files[path]


class _RemoteDataFile:
    """An object with the bytes of tensors; see `places.DataFile`."""

    def __init__(self, file: RandomAccessFile, temporary: str | None) -> None:
        self._file = file
        self._temporary = temporary

    @property
    def nbytes(self) -> int:
        return self._file.size

    def part(self, offset: int, nbytes: int) -> Data:
        return RandomAccessData(self._file, offset, nbytes, temporary=self._temporary)

    def head(self, nbytes: int) -> bytes:
        return self._file.read(0, nbytes)

    @property
    def view(self) -> memoryview:
        return memoryview(self._file.read(0, self._file.size))
