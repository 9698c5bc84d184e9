"""A model with the unread data of its tensors, from any source."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import onnx

from onnxarchive.errors import UnsupportedFeatureError, quoted_names
from onnxarchive.files.data import Data, Streamed
from onnxarchive.model import dtypes, model_proto, tensors
from onnxarchive.model.dtypes import DataType
from onnxarchive.model.tensors import TensorRef
from onnxarchive.zipformat.layout import MAX_ENTRIES

MAX_PATH_SIZE = 4096  # bytes; the longest path on Linux


class CompiledBinary(NamedTuple):
    """A compiled binary that EPContext nodes of a model name.

    Attributes:
        path: Its path relative to the model's directory or zip: as in the nodes, but without `.`
            components.
        fault: Why it is missing or was not looked for, as the end of a sentence; None if it exists.
    """

    path: str
    fault: str | None = None


@dataclass(slots=True)
class Source:
    """A model to be stored, from any source.

    Attributes:
        model: The model.
        data: The bytes of each external tensor, in the order of `tensors.walk`.
        is_own: True if the plan of an archive may change the model, and take it away.
        assets: The bytes of each asset, by path without the prefix `assets/`.
        files: The paths of the files from which the source is read.
        directory: The directory of the model, without links in its path; None if it is in none.
        others: The paths of assets that are other files of the directory or zip; empty without
            `other_files`.
        left_out: The paths of other files that do not become assets, such as litter, hidden files,
            other models and weights; empty without `other_files`.
        warnings: Sentences about unused bytes of a zip, and about files that are left out or were
            not searched for.
        compiled: The compiled binaries that EPContext nodes of the model name.
        further: Further models by id, without assets.
        cleared: Names of tensors whose unused bits were cleared, by path as text; of tensors
            outside the model, those that were read so far.
    """

    model: onnx.ModelProto
    data: Iterable[Data] = ()
    is_own: bool = False
    assets: dict[str, Data] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    directory: str | None = None
    others: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    compiled: tuple[CompiledBinary, ...] = ()
    further: Mapping[str, Source] = field(default_factory=dict)
    cleared: dict[str, str] = field(default_factory=dict)

    def note_of_cleared(self) -> str:
        """A sentence about cleared bits, after the data was read."""
        names = [name for _, name in sorted(self.cleared.items())]
        return f"unused bits in the last byte were cleared: {quoted_names(names)}"


@dataclass(frozen=True, slots=True)
class TensorData:
    """The elements of a tensor.

    Attributes:
        data_type: Their data type.
        dims: Shape of the tensor.
        data: Their bytes, in the layout of `raw_data`.
    """

    data_type: DataType
    dims: tuple[int, ...]
    data: Data


def with_cleared_tail(data: Data, ref: TensorRef, cleared: dict[str, str]) -> Data:
    """Data of a tensor with zeros in the unused bits of the last byte.

    Args:
        data: The bytes as stored.
        ref: The tensor.
        cleared: Receives path and name of the tensor if an unused bit is set, when it is read.
    """
    data_type = dtypes.BY_NUMBER[ref.tensor.data_type]
    if data_type.is_packed and data_type.tail_bits(ref.tensor.dims):
        used = tensors.last_byte_mask(ref.tensor.dims, data_type)
        return Streamed(data.nbytes, partial(_clearing_tail, data, ref, used, cleared))
    return data


def _clearing_tail(
    data: Data, ref: TensorRef, used: int, cleared: dict[str, str]
) -> Iterator[memoryview]:
    """Yields the pieces of data; `used` has the used bits of the last byte."""
    nbytes = 0
    for piece in data.pieces():  # which compares the CRC-32 that it knows, after its last piece
        nbytes += len(piece)
        if nbytes != data.nbytes or not piece or not piece[-1] & ~used:
            yield piece
        else:
            cleared[ref.where] = ref.name
            yield piece[:-1]
            yield memoryview(bytes([piece[-1] & used]))


def require_initializer_count(model: onnx.ModelProto, size_threshold: int) -> None:
    """Refuses a model with more initializers to store outside it than an archive can have entries.

    Only shapes and types are used, so a model is refused before its data files are opened.
    """
    initializers = model.graph.initializer
    if len(initializers) < MAX_ENTRIES:
        return
    sizes = [tensors.stored_nbytes(tensor) for tensor in initializers]
    outside = [nbytes for nbytes in sizes if nbytes is not None and nbytes >= size_threshold]
    require_entry_count(outside, other_entries=1)


def require_entry_count(tensor_nbytes: Collection[int], other_entries: int) -> None:
    """Refuses more entries than an archive can hold (rule ZIP-4).

    Args:
        tensor_nbytes: Sizes of the tensors that become entries, in bytes.
        other_entries: Number of models and assets.

    Raises:
        UnsupportedFeatureError: There are too many. The message names the least `size_threshold`
            that makes them few enough.
    """
    count = len(tensor_nbytes) + other_entries
    if count <= MAX_ENTRIES:
        return
    problem = f"expected at most {MAX_ENTRIES} entries, found {count}"
    if other_entries > MAX_ENTRIES:
        raise UnsupportedFeatureError(f"{problem}; leave assets out", rule="ZIP-4")
    ascending = sorted(tensor_nbytes)
    # The largest tensor that has to stay in the model, and all as small as it.
    threshold = ascending[count - MAX_ENTRIES - 1] + 1
    if sum(nbytes for nbytes in ascending if nbytes < threshold) < model_proto.SIZE_LIMIT:
        remedy = (
            f"size_threshold={threshold} (--size-threshold {threshold}) keeps enough tensors in "
            "the model"
        )
    else:
        remedy = (
            f"no size_threshold helps, since the model must stay below {model_proto.SIZE_LIMIT} "
            "bytes; merge tensors, or split the model"
        )
    raise UnsupportedFeatureError(f"{problem}; {remedy}", rule="ZIP-4")


def sha1(data: Data) -> str:
    """The SHA-1 of data in the form of the external data's `checksum`: hexadecimal digits."""
    digest = hashlib.sha1(usedforsecurity=False)
    for piece in data.pieces():
        digest.update(piece)
    return digest.hexdigest()
