"""Data types and shapes of the tensors outside a model, in columns.

They are copied when the model is read: a view has the shape that its bytes were checked against,
even if the protobuf objects are changed afterwards.
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

# Readers of a shape by rank; a slice of an array as a tuple takes twice as long.
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
            begins: Index of the first dim of each in `dims`.
            dims: The dims of all tensors, concatenated.
        """
        self._data_types = data_types.astype(np.uint8).tobytes()
        self._ranks = ranks.astype(np.uint8).tobytes()
        self._dims = columns.integers(dims)
        self._begins = columns.integers(begins * self._dims.itemsize)
        self._shapes = _SHAPES[self._dims.typecode]

    def reordered(self, numbers: NDArray[np.int64]) -> Shapes:
        """The data types and shapes at these indexes, in this order."""
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
        """Data types and shapes of tensors that break no rule; None for an index without one."""
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
