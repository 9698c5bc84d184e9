"""Remote files without a server, and caches of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from onnxarchive.remote.cache import BLOCK_SIZE, CachedFile, open_cached
from onnxarchive.storage.random_access import RandomAccessFile

URL = "https://models.example/a/model.onnxa"
KEY = "0123456789abcdef" * 4
SIZE = 10 * BLOCK_SIZE + 12_345


def data_of(size: int) -> bytes:
    return random.Random(1).randbytes(size)


DATA = data_of(SIZE)


class Remote(RandomAccessFile):
    """A remote file without a server.

    Attributes:
        asked: The ranges of each call of `parts`.
        before: Called with the offset of each part before the part is yielded.
    """

    def __init__(self, data: bytes = DATA, key: str | None = KEY, part_size: int = 100_001) -> None:
        self.path = URL
        self.size = len(data)
        self.identity = ("remote", key)
        self.asked: list[list[tuple[int, int]]] = []
        self.before: Callable[[int], object] = lambda offset: None
        self.is_closed = False
        self._data = data
        self._key = key
        self._part_size = part_size

    def cache_key(self) -> str | None:
        return self._key

    def parts(self, ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, memoryview]]:
        ranges = list(ranges)
        self.asked.append(ranges)
        step = self._part_size
        begins = [at for begin, size in ranges for at in range(begin, begin + size, step)]
        ends = [min(at + step, sum(it)) for it in ranges for at in range(it[0], sum(it), step)]
        parts = list(zip(begins, ends, strict=True))
        random.Random(2).shuffle(parts)
        for begin, end in parts:
            self.before(begin)
            yield begin, memoryview(self._data)[begin:end]

    def close(self) -> None:
        self.is_closed = True


def opened(directory: Path, remote: Remote | None = None) -> CachedFile:
    file = open_cached(remote or Remote(), directory)  # type: ignore[arg-type]
    assert isinstance(file, CachedFile)
    return file


def require_right(directory: Path, data: bytes = DATA, **options: Any) -> list[Any]:
    """Requires that a newly opened file has the right bytes; returns the fetched ranges."""
    remote = Remote(data, **options)
    with opened(directory, remote) as file:
        assert file.read(0, len(data)) == data
        assert bytes(file.reaching(len(data))[: len(data)]) == data
    return remote.asked
