"""Tensors that several models of an archive share: equal ones are stored once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from onnxarchive.buffers.checksums import Crc32
from onnxarchive.buffers.data import Data
from onnxarchive.model.deduplication import are_equal
from onnxarchive.model.tensors import TensorRef


@dataclass
class _Entry:
    """The entry of a tensor that is planned."""

    key: str
    data: Callable[[], Data]

    @cached_property
    def crc32(self) -> int:
        data = self.data()
        return Crc32.of(data).value if data.crc32 is None else data.crc32


class SharedEntries:
    """Finds the entries of earlier models that hold the data of a tensor of a later one.

    Only tensors with the data type and dims of another one are read: once for their CRC-32, and
    again to compare their bytes if that is equal.

    Attributes:
        saved_nbytes: Bytes of data that need no entry of their own.
    """

    def __init__(self) -> None:
        self._entries: defaultdict[object, list[_Entry]] = defaultdict(list)
        self._known: set[str] = set()
        self._taken: set[str] = set()
        self.saved_nbytes = 0

    def begin_model(self, taken: Iterable[str] = ()) -> None:
        """Begins another model, which may share all entries that there are by now.

        Args:
            taken: The keys that it names already.
        """
        self._taken = {*taken}

    def add(self, planned: Iterable[tuple[str, TensorRef, Callable[[], Data]]]) -> None:
        """Adds the entries of a model: the key and tensor of each, and what gives its data."""
        for key, ref, data in planned:
            if key not in self._known:
                self._known.add(key)
                self._entries[_type_and_dims(ref)].append(_Entry(key, data))

    def find(self, ref: TensorRef, data: Callable[[], Data]) -> str | None:
        """The key of the next entry that holds this tensor; None if there is none.

        Within a model each tensor has an entry of its own (DATA-3), so none is given twice.

        Args:
            ref: The tensor.
            data: Gives its bytes; it is called if a tensor of its type and dims has an entry.
        """
        given = _Entry("", data)
        for entry in self._entries.get(_type_and_dims(ref), ()):
            if entry.key in self._taken or entry.crc32 != given.crc32:
                continue
            if are_equal(entry.data(), given.data()):
                self._taken.add(entry.key)
                self.saved_nbytes += data().nbytes
                return entry.key
        return None


def _type_and_dims(ref: TensorRef) -> object:
    return ref.tensor.data_type, tuple(ref.tensor.dims)
