"""Data types and shapes of external tensors, in columns.

The columns are copied when the model is read. So a view has the shape that was checked against its
bytes, even if the protobuf objects change afterwards.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from onnxarchive.buffers import columns
from onnxarchive.model import dtypes
from onnxarchive.model.dtypes import DataType

if TYPE_CHECKING:
    import onnx
    from numpy.typing import NDArray

_RANKS: Final = dtypes.MAX_RANK + 1


class Shapes:
    """Data types and shapes by index; each is made on access."""

    def __init__(
        self,
        data_types: NDArray[Any],
        ranks: NDArray[Any],
        begins: NDArray[np.int64],
        dims: NDArray[np.int64],
    ) -> None:
        """Takes the columns.

        Args:
            data_types: The number of each data type.
            ranks: The rank of each tensor.
            begins: Index of each tensor's first dim in `dims`.
            dims: The dims of all tensors, concatenated.
        """
        self._dims = columns.integers(dims)
        self._begins = columns.integers(begins * self._dims.itemsize)
        # A kind of tensors has one data type and one rank.
        kinds = data_types.astype(np.uint16) * _RANKS + ranks.astype(np.uint16)
        self._kinds = array("H", kinds.tobytes())
        # For each kind, the data type and a function that reads the shape.
        self._readers = {
            kind: (dtypes.BY_NUMBER[kind // _RANKS], self._reader(kind % _RANKS))
            for kind in np.flatnonzero(np.bincount(kinds)).tolist()
            if kind // _RANKS in dtypes.BY_NUMBER
        }

    def _reader(self, rank: int) -> Callable[..., tuple[int, ...]]:
        # The tuple of a slice takes twice as long.
        return Struct(f"{rank}{self._dims.typecode}").unpack_from

    def reordered(self, numbers: NDArray[np.int64]) -> Shapes:
        """The data types and shapes at the indexes `numbers`, in this order."""
        dims = np.array(self._dims, np.int64)
        begins = np.array(self._begins, np.int64) // self._dims.itemsize
        data_types, ranks = np.divmod(np.array(self._kinds)[numbers], _RANKS)
        return Shapes(data_types, ranks, begins[numbers], dims)

    @classmethod
    def of(cls, tensors: Iterable[onnx.TensorProto | None]) -> Shapes:
        """Copies data types and shapes of valid tensors; None is an index without a tensor."""
        data_types: list[int] = []
        ranks: list[int] = []
        dims: list[int] = []
        for tensor in tensors:
            data_types.append(0 if tensor is None else tensor.data_type)
            ranks.append(0 if tensor is None else len(tensor.dims))
            if tensor is not None:
                dims.extend(tensor.dims)
        sizes = np.array(ranks, np.int64)
        return cls(
            np.array(data_types, np.int64),
            sizes,
            np.cumsum(sizes) - sizes,
            np.array(dims, np.int64),
        )

    def __len__(self) -> int:
        return len(self._kinds)

    def __getitem__(self, number: int) -> tuple[DataType, tuple[int, ...]]:
        data_type, read = self._readers[self._kinds[number]]
        return data_type, read(self._dims, self._begins[number])
