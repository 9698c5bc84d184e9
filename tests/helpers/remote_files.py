"""Remote objects without a server, and caches of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from onnxarchive.errors import ArchiveFormatError
from onnxarchive.files.data import File
from onnxarchive.remote import cache, stores, uploads
from onnxarchive.remote.downloads import Read
from onnxarchive.remote.location import Location
from onnxarchive.remote.objects import RemoteFile
from onnxarchive.remote.origins import Version, origin_of
from onnxarchive.remote.uploads import ObjectWriter
from onnxarchive.remote.urls import Address

URL = "https://models.example/a/model.onnxa"
PLACE = "0123456789abcdef" * 4
KEY = "f" * 64
SIZE = 1_300_000
STEM = f"{PLACE[:32]}-{KEY[:32]}"


def data_of(size: int) -> bytes:
    return random.Random(1).randbytes(size)


DATA = data_of(SIZE)
CONTENT = bytes(range(251)) * 4000  # no two blocks are the same


class Remote(File):
    """An object without a server.

    Attributes:
        asked: The ranges of each call of `stream_ranges`.
        before: Called with the offset of each piece before the piece is yielded.
    """

    def __init__(
        self,
        data: bytes = DATA,
        key: str | None = KEY,
        piece_size: int = 100_001,
        place: str = PLACE,
    ) -> None:
        self.path = URL
        self.size = len(data)
        self.version = Version(len(data), key)
        self.place = place
        self.asked: list[list[tuple[int, int]]] = []
        self.before: Callable[[int], object] = lambda offset: None
        self._is_closed = False
        self._data = data
        self._key = key
        self._piece_size = piece_size

    def cache_key(self) -> str | None:
        return self._key

    def read(self, offset: int, size: int) -> bytes:
        return self._data[offset : offset + size]

    def stream_ranges(self, ranges: Iterable[tuple[int, int]]) -> Generator[tuple[int, bytes]]:
        ranges = list(ranges)
        self.asked.append(ranges)
        step = self._piece_size
        begins = [at for begin, size in ranges for at in range(begin, begin + size, step)]
        ends = [min(at + step, sum(it)) for it in ranges for at in range(it[0], sum(it), step)]
        pieces = list(zip(begins, ends, strict=True))
        random.Random(2).shuffle(pieces)
        for begin, end in pieces:
            self.before(begin)
            yield begin, self._data[begin:end]

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        self._is_closed = True

    @property
    def nbytes_asked(self) -> int:
        return sum(size for ranges in self.asked for _, size in ranges)


def open_object(url: str, *, keeps_end: bool = True, **access: Any) -> RemoteFile:
    return RemoteFile(origin_of(Location.of(url, **access).remote), keeps_end=keeps_end)


def create_object(url: str, size: int, **access: Any) -> ObjectWriter:
    return uploads.create_object(Location.of(url, **access).remote, size)


def list_objects(url: str, **access: Any) -> list[tuple[str, str]]:
    return [*stores.list_objects(Location.of(url, **access).remote)]


def reading(data: bytes) -> Read:
    """Opens a file that has to have these bytes."""

    def verify(file: Any) -> None:
        if file.read(0, file.size) != data:
            raise ArchiveFormatError("expected other bytes")

    return lambda file: SimpleNamespace(verify=lambda: verify(file))


def opened(
    directory: Path | bool,
    remote: Any = None,
    *,
    data: bytes | None = None,
    reads: bool = True,
    sha256: str | None = None,
) -> Any:
    """Opens a remote object through a cache, which requires `data` of what it downloads."""
    remote = remote or Remote()
    read = reading(remote._data if data is None else data) if reads else None
    origin = SimpleNamespace(is_lasting=True, identity=remote.place)
    with patch.multiple(
        cache, origin_of=lambda *_: origin, RemoteFile=lambda origin, known=None: remote
    ):
        return cache.open_cached(Address(URL), directory, read, sha256=sha256)


def require_right(directory: Path, data: bytes = DATA, **options: Any) -> int:
    """Requires that a newly opened file has the right bytes; returns how many were asked for."""
    remote = Remote(data, **options)
    with opened(directory, remote) as file:
        assert file is not remote
        assert file.read(0, len(data)) == data
        assert bytes(file.view()) == data
        assert file.path == URL
    assert remote.is_closed
    assert sorted(it.name for it in directory.iterdir() if it.name.startswith(PLACE[:32])) == [
        f"{PLACE[:32]}-{(options.get('key') or KEY)[:32]}.{it}" for it in ("json", "onnxa")
    ]
    return remote.nbytes_asked
