"""For speed only: if initializers are looked up in order, prepares the next views together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress
from operator import add
from typing import Final, TypeAlias

from onnxarchive.model import dtypes
from onnxarchive.model.dtypes import DataType
from onnxarchive.model.shapes import Shapes
from onnxarchive.zipformat.entries import Entries

_MAX_COUNT: Final = 1 << 8

# Name of an initializer, its data type and shape, and offset and end of its data in the file.
View: TypeAlias = tuple[object, tuple[DataType, tuple[int, ...]], int, int]
NONE: Final[View] = object(), (dtypes.BOOL, ()), 0, 0  # the `object()` equals no name


class ViewsAhead:
    """The views that are probably looked up next. Several threads may use this object.

    Args:
        names: Names of the initializers.
        indexes: As `Initializers.in_order` in `snapshot`.
        entries: The entries.
        shapes: Data type and shape of each entry's tensor.
        verified: For each entry 1 if its local header is verified.

    Attributes:
        first: The next view; `NONE` if none is prepared.
        others: The views after it.
    """

    def __init__(
        self,
        names: Sequence[str],
        indexes: Sequence[int],
        entries: Entries,
        shapes: Shapes,
        verified: bytearray,
    ) -> None:
        self._names, self._indexes, self._entries = names, indexes, entries
        self._shapes, self._verified = shapes, verified
        self.first = NONE
        self.others: Iterator[View] = iter(())
        self._next = 0  # number of the entry whose lookup continues the order
        self._count = 1

    def prepare(self, number: int) -> None:
        """Prepares the views after entry `number`, if entries are looked up in order."""
        is_next, start = number == self._next, number + 1
        self._count = min(2 * self._count, _MAX_COUNT) if is_next else 1
        stop = min(start + self._count, len(self._indexes))
        self._next = start
        if not is_next or start >= stop or not self._verified[start]:
            return
        unverified = self._verified.find(0, start, stop)
        self._next = stop = stop if unverified < 0 else unverified
        indexes, shapes = self._indexes[start:stop], self._shapes[start:stop]
        names = (
            list(self._names[indexes[0] : indexes[-1] + 1])
            if indexes[-1] - indexes[0] == len(indexes) - 1
            else [self._names[index] for index in indexes]
        )
        offsets, sizes = self._entries.data_offsets[start:stop], self._entries.sizes[start:stop]
        # Iterators made by `zip` and `map`, since threads cannot share a generator.
        views = zip(names, shapes, offsets, map(add, offsets, sizes), strict=True)
        self.others = compress(views, [data_type.is_viewed for data_type, _ in shapes])
        self.first = next(self.others, NONE)
