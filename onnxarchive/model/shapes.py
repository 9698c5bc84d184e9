"""Data types and shapes of external tensors.

They are copied when the model is read. So an array over the bytes of a tensor has the
shape that was checked against these bytes, even if the protobuf objects change afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, overload

import numpy as np

from onnxarchive.buffers import columns
from onnxarchive.model import dtypes
from onnxarchive.model.dtypes import DataType

if TYPE_CHECKING:
    import onnx
    from numpy.typing import NDArray

_MULTIPLIER: Final = -0x61C8864680B583EB  # odd: 2^64 divided by the golden ratio, as an int64


class Shapes:
    """Data types and shapes by index. Most models repeat pairs, so equal pairs are stored once.

    Args:
        distinct: Pairs of a data type and a shape, by arbitrary numbers.
        numbers: For each index, the number of its pair.
    """

    def __init__(
        self, distinct: Mapping[int, tuple[DataType, tuple[int, ...]]], numbers: NDArray[np.int64]
    ) -> None:
        self._distinct = distinct
        self._numbers = columns.integers(numbers)

    @classmethod
    def of(cls, tensors: Iterable[onnx.TensorProto | None]) -> Shapes:
        """Copies the data type and shape of each valid tensor; the index of a None gets no pair."""
        keys: dict[tuple[DataType, tuple[int, ...]], int] = {}
        numbers = [
            -1
            if tensor is None
            else keys.setdefault(
                (dtypes.BY_NUMBER[tensor.data_type], tuple(tensor.dims)), len(keys)
            )
            for tensor in tensors
        ]
        return cls(dict(enumerate(keys)), np.array(numbers, np.int64))

    @classmethod
    def of_columns(
        cls, data_types: NDArray[Any], ranks: NDArray[Any], dims: NDArray[np.int64]
    ) -> Shapes:
        """Makes `Shapes` from columns that describe valid tensors.

        Args:
            data_types: The data type of each tensor, as a number of `TensorProto.DataType`.
            ranks: The rank of each tensor.
            dims: The dims of all tensors, concatenated.
        """
        data_types, ranks, dims = (np.asarray(it, np.int64) for it in (data_types, ranks, dims))
        begins = np.cumsum(ranks) - ranks
        firsts, groups = _equals(data_types, ranks, begins, dims)
        found = zip(*(it[firsts].tolist() for it in (data_types, begins, ranks)), strict=True)
        pairs = (
            (dtypes.BY_NUMBER[data_type], tuple(dims[begin : begin + rank].tolist()))
            for data_type, begin, rank in found
        )
        return cls(dict(enumerate(pairs)), groups)

    def reordered(self, numbers: NDArray[np.int64]) -> Shapes:
        """The data types and shapes at the indexes `numbers`, in this order."""
        return Shapes(self._distinct, np.array(self._numbers, np.int64)[numbers])

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> tuple[DataType, tuple[int, ...]]: ...

    @overload
    def __getitem__(self, index: slice) -> list[tuple[DataType, tuple[int, ...]]]: ...

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._distinct[number] for number in self._numbers[index]]
        return self._distinct[self._numbers[index]]


def _equals(
    data_types: NDArray[np.int64],
    ranks: NDArray[np.int64],
    begins: NDArray[np.int64],
    dims: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Groups tensors of equal data type and shape, by hashes.

    Returns:
        The index of one tensor of each group, and the group of each tensor. If two tensors with
        equal hashes differ in data type or shape, each tensor gets a group of its own.
    """
    types_and_ranks = data_types * (dtypes.MAX_RANK + 1) + ranks
    hashes = _hashes(types_and_ranks, ranks, begins, dims)
    _, firsts, groups = np.unique(hashes, return_index=True, return_inverse=True)
    first_of = firsts[groups]
    equal = (types_and_ranks[first_of] == types_and_ranks).all()
    if equal and (dims[columns.indexes(begins[first_of], ranks)] == dims).all():
        return firsts, groups
    return np.arange(len(ranks)), np.arange(len(ranks))


def _hashes(
    types_and_ranks: NDArray[np.int64],
    ranks: NDArray[np.int64],
    begins: NDArray[np.int64],
    dims: NDArray[np.int64],
) -> NDArray[np.int64]:
    """A hash of each tensor's data type and shape."""
    places = np.arange(dims.size) - np.repeat(begins, ranks)
    # numpy wraps products and sums at 64 bits.
    mixed = (dims + 1) * (2 * places + 3) * _MULTIPLIER
    sums = np.append(0, np.cumsum(mixed ^ (mixed >> 32)))
    hashes: NDArray[np.int64] = sums[begins + ranks] - sums[begins] + types_and_ranks * _MULTIPLIER
    return hashes
