"""Fetches many small entries together, only for speed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final, NamedTuple

from onnxarchive.archive.items import Items
from onnxarchive.buffers.checksums import crc32
from onnxarchive.buffers.data import copied
from onnxarchive.model import tensors
from onnxarchive.model.initializers_at_once import IN_MODEL, SMALL_SIZE
from onnxarchive.storage.file_data import FileData, read_all

_MAX_COUNT: Final = 1 << 10
_MAX_NBYTES: Final = 1 << 20


class SmallEntries(NamedTuple):
    """Successive entries with their data.

    Attributes:
        names: The name of each entry.
        crc32s: The CRC-32 of each entry's data.
        contents: The data of each entry.
    """

    names: list[str]
    crc32s: list[int]
    contents: list[bytes]


def in_groups(sizes: Sequence[int]) -> list[range]:
    """Divides items into groups of successive small items and groups of one large item.

    Args:
        sizes: Size of each item in bytes.
    """
    groups: list[range] = []
    start = total = 0
    for number, nbytes in enumerate(sizes):
        is_large = nbytes > SMALL_SIZE
        is_full = number - start == _MAX_COUNT or total + nbytes > _MAX_NBYTES
        if number > start and (is_large or is_full):
            groups.append(range(start, number))
            start, total = number, 0
        total += nbytes
        if is_large:
            groups.append(range(number, number + 1))
            start, total = number + 1, 0
    if start < len(sizes):
        groups.append(range(start, len(sizes)))
    return groups


def fetch_small(items: Items) -> SmallEntries | None:
    """Fetches the data of small items.

    Returns:
        The entries; None if elements or a CRC-32 must be checked, or if a size is wrong.
    """
    contents = _fetch_rows(items)
    parts: list[FileData] = []
    places: list[int] = []  # index in `contents` of each of `parts`
    for number, content in enumerate(contents):
        if content is not None:
            continue
        item = items[number]
        if item.ref is not None and tensors.has_checked_elements(item.ref.tensor):
            return None
        data = item.data()
        if data.crc32 is not None:  # only `ZipWriter.add_stream` compares a CRC-32 with the data
            return None
        if isinstance(data, FileData):
            places.append(number)
            parts.append(data)
        else:
            contents[number] = copied(data)
            if contents[number] is None:
                return None
    for place, content in zip(places, read_all(parts), strict=True):
        contents[place] = content
    found = [content for content in contents if content is not None]
    if [*map(len, found)] != items.sizes.tolist():
        return None
    return SmallEntries(items.names, list(map(crc32, found)), found)


def _fetch_rows(items: Items) -> list[bytes | None]:
    """Data of small initializers in the model or in `items.small.files`; None for other items."""
    small = items.small
    contents: list[bytes | None] = []
    in_files: defaultdict[int, list[int]] = defaultdict(list)
    for number, row in enumerate(items.rows):
        location = small.location_numbers[row] if row >= 0 else len(small.files)
        if location == IN_MODEL:
            contents.append(small.raw_data(row))
            continue
        contents.append(None)
        if location < len(small.files):
            in_files[location].append(number)
    for location, numbers in in_files.items():
        file = small.files[location]
        if isinstance(file, FileData):
            offsets = [small.offsets[items.rows[number]] for number in numbers]
            sizes = [items.sizes[number] for number in numbers]
            for number, content in zip(numbers, file.read_parts(offsets, sizes), strict=True):
                contents[number] = content
    return contents
