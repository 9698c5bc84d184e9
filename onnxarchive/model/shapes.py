"""Data types and shapes of external tensors, in columns.

The columns are copied when the model is read. So a view has the shape that was checked against its
bytes, even if the protobuf objects change afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from onnxarchive.buffers import columns
from onnxarchive.model import dtypes
from onnxarchive.model.dtypes import DataType

if TYPE_CHECKING:
    import onnx
    from numpy.typing import NDArray

# Functions that read a shape, by rank; a tuple of an array's slice takes twice as long.
_SHAPES: Final = {
    typecode: [Struct(f"{rank}{typecode}").unpack_from for rank in range(dtypes.MAX_RANK + 1)]
    for typecode in "Iq"
}


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
        self._data_types = data_types.astype(np.uint8).tobytes()
        self._ranks = ranks.astype(np.uint8).tobytes()
        self._dims = columns.integers(dims)
        self._begins = columns.integers(begins * self._dims.itemsize)
        self._shapes = _SHAPES[self._dims.typecode]

    def reordered(self, numbers: NDArray[np.int64]) -> Shapes:
        """The data types and shapes at the indexes `numbers`, in this order."""
        dims = np.array(self._dims, np.int64)
        begins = np.array(self._begins, np.int64) // self._dims.itemsize
        return Shapes(
            np.frombuffer(self._data_types, np.uint8)[numbers],
            np.frombuffer(self._ranks, np.uint8)[numbers],
            begins[numbers],
            dims,
        )

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
        return len(self._ranks)

    def __getitem__(self, number: int) -> tuple[DataType, tuple[int, ...]]:
        shape = self._shapes[self._ranks[number]](self._dims, self._begins[number])
        return dtypes.BY_NUMBER[self._data_types[number]], shape
