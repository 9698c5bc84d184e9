"""`TensorSlice`: parts of a tensor, of which only the rows that an index needs are read."""

from __future__ import annotations

import math
import operator
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxarchive.errors import quoted
from onnxarchive.model import dtypes
from onnxarchive.reading.contents import Contents
from onnxarchive.reading.views import Tensors

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAX_GAP = 256 << 10  # bytes; rows that are this near to each other are read together


class TensorSlice:
    """A tensor of an open archive whose parts are read by indexing; see `Archive.get_slice`.

    `part[index]` equals `archive.tensors[name][index]` for integers, slices, `...`, None (newaxis)
    and tuples of these.

    Of a mapped file or of bytes, a part is a view. Of a remote archive or a file object, it is a
    read-only copy: rows (elements of the first axis) are read by their range, and later axes are
    cut from these rows. If the index has a step, the rows between are read, too, unless they have
    more than 256 KiB. The first part also reads the tensor's local header. Tensors of less than 8
    bits per element are read whole each time, and copied.

    A part is not compared with the CRC-32, which is that of the whole tensor. An index that needs
    all rows of a remote archive or a file object, such as `part[...]`, compares it; so do
    `Archive.verify` and `check(full=True)`.

    Attributes:
        name: The tensor's name.
        shape: Shape of the whole array.
        dtype: Data type of the array.
        nbytes: Size of the whole array in bytes; packed types take less in the archive.

    Example:
        with onnxarchive.open("model.onnxa") as archive:
            part = archive.get_slice("layer.0/weight")
            print(part.shape, part[:4, ::2])
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    nbytes: int

    def __init__(self, contents: Contents, tensors: Tensors, name: str) -> None:
        """Finds an initializer; its data is read only if the model itself holds it."""
        self.name = name
        self._contents = contents
        self._tensors = tensors
        # The key of the tensor's entry, or the tensor itself if the model holds it.
        self._stored: str | NDArray[Any] = tensors.key(name) or tensors[name]
        if isinstance(self._stored, str):
            self._data_type, self.shape = tensors.type_and_shape(self._stored)
            self.dtype = self._data_type.dtype
            self.nbytes = math.prod(self.shape) * self.dtype.itemsize
        else:
            array = self._stored
            self.shape, self.dtype, self.nbytes = array.shape, array.dtype, array.nbytes

    def __getitem__(self, index: Any) -> Any:
        """Reads the part with this index: an array, or for a single element a numpy scalar.

        Raises:
            IndexError: The index is out of range, or has too many items.
            TypeError: The index has an array, a list or a boolean.
            ObjectChangedError: A remote archive has changed since it was opened.
            ArchiveFormatError: The local header does not match the directory, or the file has
                become shorter.
            ChecksumError: All rows were read, and do not match their CRC-32.
            OSError: The bytes cannot be read.
            ValueError: The archive is closed, or a step is 0.
        """
        items = self._items(index)
        if not isinstance(self._stored, str):
            return self._stored[tuple(items)]
        is_mapped = self._contents.file.is_mapped
        if is_mapped or self._data_type.is_packed or not self.shape:
            array = self._whole(self._stored)
        else:
            array = self._rows(self._stored, items)
        part = array[tuple(items)]
        is_view = is_mapped and self._data_type.is_viewed
        if is_view or not isinstance(part, np.ndarray) or part.nbytes == array.nbytes:
            return part
        copy = part.copy()  # frees the bytes that were read around it
        copy.flags.writeable = False
        return copy

    def __repr__(self) -> str:
        return f"<TensorSlice {quoted(self.name)}, {self.dtype}, {quoted(self.shape)}>"

    def _items(self, index: Any) -> list[Any]:
        """The items of an index; refuses those that are not basic indices of numpy."""
        tensor = f"{self._contents.path}: tensor {quoted(self.name)}"
        items = list(index) if isinstance(index, tuple) else [index]
        for position, item in enumerate(items):
            if item is None or item is Ellipsis or isinstance(item, slice):
                continue
            try:
                if isinstance(item, bool | np.bool_ | np.ndarray):
                    raise TypeError
                items[position] = number = operator.index(item)
            except TypeError:
                raise TypeError(
                    f"{tensor}: expected integers, slices, `...` and None as index, found "
                    f"{type(item).__name__}; to index with arrays, lists or booleans, take the "
                    "array by `[...]`, then index"
                ) from None
            if not -sys.maxsize <= number <= sys.maxsize:  # numpy says that it is no integer
                raise IndexError(
                    f"{tensor}: expected an index within the shape {quoted(self.shape)}, found an "
                    f"integer of {number.bit_length()} bits"
                )
        try:
            np.broadcast_to(False, self.shape)[tuple(items)]  # takes no memory
        except (IndexError, TypeError, ValueError) as error:
            raise type(error)(f"{tensor}: {error}") from None
        return items

    def _rows(self, key: str, items: list[Any]) -> NDArray[Any]:
        """Reads the rows that an index needs; changes `items` to an index of these rows."""
        axes = sum(item is not None and item is not Ellipsis for item in items)
        end = items.index(Ellipsis) if Ellipsis in items else len(items)
        items[end:end] = [slice(None)] * (len(self.shape) - axes)
        first = next(number for number, item in enumerate(items) if item not in (None, Ellipsis))
        chosen = range(self.shape[0])[items[first]]
        if isinstance(chosen, int):
            chosen, items[first] = range(chosen, chosen + 1), 0
        else:
            items[first] = slice(None, None, chosen.step)
        rows = chosen if chosen.step > 0 else chosen[::-1]
        row_nbytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        start, stop = (rows[0], rows[-1] + 1) if rows else (0, 0)
        count, ranges = stop - start, [(start * row_nbytes, (stop - start) * row_nbytes)]
        if len(rows) > 1 and (rows.step - 1) * row_nbytes > _MAX_GAP:
            items[first] = slice(None, None, 1 if chosen.step > 0 else -1)
            count, ranges = len(rows), [(row * row_nbytes, row_nbytes) for row in rows]
        if count == self.shape[0]:
            return self._whole(key)
        data = self._contents.parts(key, ranges)
        return dtypes.as_array(data, self._data_type, (count, *self.shape[1:]))

    def _whole(self, key: str) -> NDArray[Any]:
        return self._tensors.array(key, self._contents.view(key))
