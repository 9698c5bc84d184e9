"""For speed only: fetches many small entries together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from onnxarchive.archive.planning import AnyItem
from onnxarchive.buffers.checksums import crc32
from onnxarchive.buffers.data import copied
from onnxarchive.model import tensors
from onnxarchive.model.initializers_at_once import SMALL_SIZE, SmallInitializer
from onnxarchive.storage.file_data import FileData, read_all

_MAX_COUNT: Final = 1 << 10
_MAX_NBYTES: Final = 1 << 20


class SmallEntries(NamedTuple):
    """Successive entries with their data.

    Attributes:
        names: The name of each.
        crc32s: The CRC-32 of its data.
        contents: Its data.
    """

    names: list[str]
    crc32s: list[int]
    contents: list[bytes]


def in_groups(items: Sequence[AnyItem]) -> list[Sequence[AnyItem]]:
    """Divides items into groups of successive small ones and groups of one item."""
    groups: list[Sequence[AnyItem]] = []
    start = nbytes = 0
    for number, item in enumerate(items):
        is_large = item.nbytes > SMALL_SIZE
        is_full = number - start == _MAX_COUNT or nbytes + item.nbytes > _MAX_NBYTES
        if number > start and (is_large or is_full):
            groups.append(items[start:number])
            start, nbytes = number, 0
        nbytes += item.nbytes
        if is_large:
            groups.append(items[number : number + 1])
            start, nbytes = number + 1, 0
    if start < len(items):
        groups.append(items[start:])
    return groups


def fetch_small(group: Sequence[AnyItem]) -> SmallEntries | None:
    """Fetches the data of small items; None if there is more to check, or a size is wrong."""
    contents: list[bytes] = []
    parts: list[FileData] = []
    places: list[int] = []  # indexes of their contents
    for item in group:
        if isinstance(item, SmallInitializer):
            if item.resolve is None:
                contents.append(item.raw_data)
                continue
        elif item.ref is not None and tensors.has_checked_elements(item.ref.tensor):
            return None
        data = item.data()
        if data.crc32 is not None:  # it is compared in the pass that writes it
            return None
        if isinstance(data, FileData):
            places.append(len(contents))
            parts.append(data)
            contents.append(b"")
        else:
            copy = copied(data)
            if copy is None:
                return None
            contents.append(copy)
    for place, content in zip(places, read_all(parts), strict=True):
        contents[place] = content
    if any(len(content) != item.nbytes for content, item in zip(contents, group, strict=True)):
        return None
    return SmallEntries([item.name for item in group], list(map(crc32, contents)), contents)
