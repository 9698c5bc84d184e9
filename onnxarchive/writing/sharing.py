"""Finds equal tensors of an archive's models, which are then stored once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from onnxarchive.files.data import Crc32, Data, Spool, are_equal
from onnxarchive.files.data_files import spool
from onnxarchive.model.tensors import TensorRef

# Different data rarely has the same CRC-32, but an attacker can give any number of different
# tensors the same CRC-32. To avoid comparing all pairs, data is compared with at most this many
# contents of the same CRC-32; further contents are not shared.
_MAX_COLLISIONS = 8


@dataclass(frozen=True, slots=True)
class _SharedContent:
    """Data of one entry, or of several equal entries.

    Attributes:
        keys: The keys of the entries, in their order.
        data: The data.
        crc32: Its CRC-32.
    """

    keys: list[str]
    data: Data
    crc32: int


class _Alike:
    """Entries with equal data type and dims; no data is read before `find` is called."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._unread: list[tuple[str, Data]] = []
        self._by_crc32: defaultdict[int, list[_SharedContent]] = defaultdict(list)

    def add(self, key: str, data: Data) -> None:
        self._unread.append((key, data))

    def find(self, data: Data) -> _SharedContent | None:
        """The entries that hold this data, or None."""
        for key, unread in self._unread:
            crc32, content = self._find(unread)
            contents = self._by_crc32[crc32]
            if content is not None:
                content.keys.append(key)
            elif len(contents) < _MAX_COLLISIONS:
                contents.append(_SharedContent([key], unread, crc32))
        self._unread.clear()
        return self._find(data)[1]

    def _find(self, data: Data) -> tuple[int, _SharedContent | None]:
        """The CRC-32 of this data, and the `_SharedContent` of equal data or None."""
        fetched = data.fetch(0, self._spool)
        crc32 = fetched.crc32
        if crc32 is None:
            crc32 = Crc32.of(fetched.pieces()).value
        for content in self._by_crc32[crc32]:
            if _are_same(content.data, data, fetched, self._spool):
                return crc32, content
        return crc32, None


class SharedEntries:
    """Finds entries of earlier models with the same data as a tensor of a later model.

    A tensor is read only if another model has a tensor of the same data type and dims: once to
    compute an unknown CRC-32, and again to compare the data with other data of this CRC-32.

    Attributes:
        crc32s: CRC-32 of the data that models share, by key.
        saved_nbytes: Number of bytes saved by sharing.
    """

    def __init__(self, temporary: str | None = None) -> None:
        """Shares nothing yet; `temporary` is the directory for copies of remote data.

        None is the system's temporary directory.
        """
        of_remote = partial(spool, directory=temporary)
        self._alike: defaultdict[object, _Alike] = defaultdict(partial(_Alike, of_remote))
        self._known: set[str] = set()
        self._used: set[str] = set()
        # By `id()` of a `_SharedContent`: number of its keys that `find` has tried for this model.
        self._tried: dict[int, int] = {}
        self.crc32s: dict[str, int] = {}
        self.saved_nbytes = 0

    def begin_model(self, used: Iterable[str] = ()) -> None:
        """Begins another model, which may share all entries that were added before.

        Args:
            used: Keys of entries that this model already uses; no other tensor of the model gets
                these keys.
        """
        self._used = {*used}
        self._tried.clear()

    def add(self, planned: Iterable[tuple[str, TensorRef, Data]]) -> None:
        """Adds the entries of a model: the key, the tensor and its data."""
        for key, ref, data in planned:
            if key not in self._known:
                self._known.add(key)
                self._alike[type_and_dims(ref)].add(key, data)

    def find(self, ref: TensorRef, data: Data) -> str | None:
        """The key of an entry to share for this tensor; None if there is none.

        Tensors of one model have different entries (DATA-3), so a model gets no key twice.

        Args:
            ref: The tensor.
            data: Its data; only read if a tensor of the same type and dims was added.
        """
        alike = self._alike.get(type_and_dims(ref))
        content = None if alike is None else alike.find(data)
        if content is None:
            return None
        first = self._tried.get(id(content), 0)
        for number in range(first, len(content.keys)):
            self._tried[id(content)] = number + 1
            key = content.keys[number]
            if key not in self._used:
                self._used.add(key)
                self.crc32s[key] = content.crc32
                self.saved_nbytes += data.nbytes
                return key
        return None


def type_and_dims(ref: TensorRef) -> object:
    """Data type and dims of a tensor: equal in all models that share the tensor (DATA-8)."""
    return ref.tensor.data_type, tuple(ref.tensor.dims)


def _are_same(first: Data, second: Data, fetched: Data, spool: Spool) -> bool:
    """True if the data is equal; data at the same position is not read.

    `fetched` has the bytes of `second`, and can be read repeatedly.
    """
    if first.nbytes != second.nbytes:
        return False
    if first.position is not None and first.position == second.position:
        return True
    return are_equal(first.fetch(0, spool).pieces(), fetched.pieces())
