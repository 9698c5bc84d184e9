"""The entries of a plan; small initializers are kept in columns, and become `Item`s on access."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias, overload

from onnxarchive.buffers.data import Data, Stored
from onnxarchive.model import tensors
from onnxarchive.model.initializers_at_once import IN_MODEL, SmallInitializers
from onnxarchive.model.tensors import TensorRef

# Gives the bytes of a tensor whose data is external.
Resolve: TypeAlias = Callable[[TensorRef], Data]
_NO_ROW = -1


@dataclass(frozen=True, slots=True)
class Item:
    """An entry to write.

    Attributes:
        name: Name of the entry.
        nbytes: Size of the data in bytes.
        data: Gives the data; called in any thread, possibly several times. If the function copies
            the data to memory, the copy must hold only this entry's data: the writer frees the copy
            after writing the entry.
        ref: The tensor in the entry; None for an asset, a model, or an existing entry of an edited
            archive.
    """

    name: str
    nbytes: int
    data: Callable[[], Data]
    ref: TensorRef | None = None

    @classmethod
    def of(cls, name: str, data: Data) -> Item:
        """An entry with this data."""
        return cls(name, data.nbytes, lambda: data)


class Items(Sequence[Item]):
    """Entries to write.

    Args:
        items: Entries.
        small: Small initializers; some of them are entries.
        resolve: Gives the bytes of small initializers with external data.

    Attributes:
        names: The name of each entry.
        sizes: Size of each entry's data in bytes.
        rows: Row of each entry in `small`; negative if the entry is no small initializer.
        others: The entries that are no small initializers, by index.
    """

    def __init__(
        self,
        items: Iterable[Item] = (),
        small: SmallInitializers | None = None,
        resolve: Resolve | None = None,
    ) -> None:
        self.names: list[str] = []
        self.sizes = array("q")
        self.rows = array("q")
        self.small = small or SmallInitializers()
        self._resolve = resolve
        self.others: dict[int, Item] = {}
        self.extend(items)

    def extend(self, items: Iterable[Item]) -> None:
        """Adds entries."""
        for item in items:
            self.others[len(self.names)] = item
            self.names.append(item.name)
            self.sizes.append(item.nbytes)
            self.rows.append(_NO_ROW)

    def add_small(self, row: int) -> None:
        """Adds a small initializer as an entry; the entry's name is empty until `rename`."""
        self.names.append("")
        self.sizes.append(self.small.sizes[row])
        self.rows.append(row)

    def rename(self, names: list[str]) -> None:
        """Gives each entry another name."""
        self.names = names
        for number, item in self.others.items():
            self.others[number] = replace(item, name=names[number])

    def tensor_names(self) -> Iterator[str]:
        """The name of each entry's tensor, in order; call this before `rename`."""
        for number, row in enumerate(self.rows):
            yield self.others[number].name if row == _NO_ROW else self.small.name(row)

    @property
    def indexes_in_graph(self) -> list[int]:
        """For each small initializer that is an entry, its index in the graph.

        The list is empty if the small initializers were taken out of the graph.
        """
        if self.small.initializers is None:
            return []
        return [self.small.indexes[row] for row in self.rows if row != _NO_ROW]

    def small_fields(self) -> Iterator[tuple[int, bytes]] | None:
        """Index and serialized `initializer` field of each small initializer that is an entry.

        None if no entry is a small initializer.
        """
        if max(self.rows, default=_NO_ROW) == _NO_ROW:
            return None
        pairs = zip(self.rows, self.names, strict=True)
        return self.small.external((row, name) for row, name in pairs if row != _NO_ROW)

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> Items: ...

    def __getitem__(self, index: int | slice) -> Item | Items:
        if isinstance(index, slice):
            part = Items((), self.small, self._resolve)
            part.names = self.names[index]
            part.sizes, part.rows = self.sizes[index], self.rows[index]
            numbers = enumerate(range(len(self))[index])
            part.others = {
                new: self.others[old] for new, old in numbers if self.rows[old] == _NO_ROW
            }
            return part
        number = range(len(self))[index]
        row = self.rows[number]
        if row == _NO_ROW:
            return self.others[number]
        data = partial(self._small_data, row)
        return Item(self.names[number], self.sizes[number], data, self.small.ref(row))

    def _small_data(self, row: int) -> Data:
        """The data of a small initializer.

        Raises:
            ArchiveFormatError: The data changed: its size no longer fits the shape and type.
        """
        ref = self.small.ref(row)
        if self.small.location_numbers[row] == IN_MODEL:
            return Stored(tensors.raw_data(ref))
        assert self._resolve is not None
        return self._resolve(ref)
