"""Loads models of archives into onnx_ir; for `save`, splits models into proto and large tensors.

Neither loading nor splitting reads the large tensors. This module is not in interop, because
`save` uses it, and modules of this room must not import from interop.
Importing this module imports onnx_ir; importing the public `onnxarchive.ir` does not.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir

from onnxarchive.errors import ArchiveFormatError, UnsupportedFeatureError, quoted, with_path
from onnxarchive.files.data import Bytes, Data, Made, SupportsWrite, closing_on_error, pieces
from onnxarchive.model import dtypes, tensors
from onnxarchive.model.tensors import TensorRef
from onnxarchive.reading.archive import Archive, contents_of, open
from onnxarchive.reading.contents import EntryData
from onnxarchive.sources.source import Source
from onnxarchive.writing.plan import refuse_external

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PLACEHOLDER = "\0onnxarchive/"  # no file has a name with a NUL character


# Loading


@dataclass(frozen=True, slots=True)
class _ArchivedElements:
    """Elements of a tensor, read from the archive on request."""

    archive: Archive
    key: str

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.archive.tensor_by_key(self.key), dtype=dtype, copy=copy)


class ArchiveTensor(onnx_ir.Tensor[Any]):
    """A tensor of onnx_ir whose bytes are in an archive; the tensor keeps the file open and mapped.

    Nothing is read before the first access, which compares the entry's local header with the
    directory. `onnxarchive.save` also compares the CRC-32 when it writes the tensor. The method
    `numpy` gives a read-only view of the file; for types of less than 8 bits, an unpacked copy.

    Attributes:
        archive: The archive.
        key: Name of the tensor's entry.
    """

    __slots__ = ("archive", "key")

    def __init__(
        self,
        archive: Archive,
        key: str,
        *,
        name: str | None = None,
        doc_string: str | None = None,
        metadata_props: dict[str, str] | None = None,
    ) -> None:
        """Makes the tensor with this key.

        Args:
            archive: The archive. It must not be closed while the tensor is used.
            key: Name of the tensor's entry.
            name: Name of the tensor.
            doc_string: As in a TensorProto.
            metadata_props: As in a TensorProto.
        """
        proto = archive.tensors.refs[key].tensor
        super().__init__(
            _ArchivedElements(archive, key),
            onnx_ir.DataType(proto.data_type),
            shape=onnx_ir.Shape(proto.dims),
            name=name,
            doc_string=doc_string,
            metadata_props=metadata_props,
        )
        self.archive = archive
        self.key = key

    @property
    def raw(self) -> memoryview:
        """The bytes of `raw_data`, as a read-only view of the file."""
        return self.archive.read(self.key)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self._raw, dtype=dtype, copy=copy)  # onnx_ir's own takes no `copy`

    def __dlpack__(self, **options: Any) -> Any:
        return self.numpy().__dlpack__(**options)

    def tobytes(self) -> bytes:
        """The bytes of `raw_data`, as a copy."""
        return bytes(self.raw)

    def tofile(self, file: SupportsWrite) -> None:
        """Writes the bytes of `raw_data` to a binary file, a few MiB at a time."""
        for piece in pieces(self.raw):
            while piece.nbytes:  # an unbuffered file may write fewer bytes than given
                written = file.write(piece)
                piece = piece[written if isinstance(written, int) else len(piece) :]

    def __deepcopy__(self, memo: dict[int, Any]) -> ArchiveTensor:
        """A new tensor over the same read-only bytes, which are not copied."""
        return _with_names_of(self, self.archive, self.key)

    def __repr__(self) -> str:
        return f"{self._repr_base()}({self.archive.path!r}, key={self.key!r}, name={self.name!r})"


def _with_names_of(tensor: Any, archive: Archive, key: str) -> ArchiveTensor:
    return ArchiveTensor(
        archive,
        key,
        name=tensor.name,
        doc_string=tensor.doc_string,
        metadata_props=dict(tensor.metadata_props),
    )


def load(path: str | os.PathLike[str], model: str | None = None) -> onnx_ir.Model:
    """Loads a model of an archive; see `onnxarchive.ir.load`."""
    archive = open(path, model=model)
    with closing_on_error(archive), with_path(path):
        return _load(archive)


def _load(archive: Archive) -> onnx_ir.Model:
    _require_no_loss(archive.model)
    try:
        model = onnx_ir.from_proto(archive.model)
    except onnx_ir.serde.SerdeError as error:
        cause: BaseException = error
        while (before := cause.__cause__ or cause.__context__) is not None:
            cause = before
        raise UnsupportedFeatureError(
            f"onnx_ir cannot hold this model: {type(cause).__name__}: {cause}"
        ) from error
    missing = dict(archive.tensors.refs)

    def mapped(tensor: Any) -> Any:
        if not isinstance(tensor, onnx_ir.ExternalTensor):
            return tensor
        key = os.fspath(tensor.location)
        missing.pop(key, None)
        return _with_names_of(tensor, archive, key)

    _replace_tensors(model, mapped)
    for ref in missing.values():
        raise UnsupportedFeatureError(f"{ref}: onnx_ir cannot hold this tensor")
    return model


def _require_no_loss(model: onnx.ModelProto) -> None:
    """Refuses models with sparse tensors or training_info.

    onnx_ir drops training_info and sparse initializers without an error. For a sparse tensor in an
    attribute, onnx_ir raises an error that does not name the tensor.
    """
    for ref in tensors.walk(model):
        if any(field.startswith("sparse_") for field, _ in ref.path):
            raise UnsupportedFeatureError(
                f"{ref}: onnx_ir has no sparse tensors; make this tensor dense, or edit the "
                "model that onnxarchive.load gives"
            )
    if model.training_info:
        raise UnsupportedFeatureError(
            "onnx_ir has no training_info and would lose it; clear it, or edit the model that "
            "onnxarchive.load gives"
        )


# Saving


@dataclass(frozen=True, slots=True)
class SplitModel:
    """A model, split into a proto without the data of large tensors, and the large tensors.

    Attributes:
        proto: The proto; its large tensors are external, each with its own placeholder as location.
        large: The large tensors, in the order of `tensors.walk`.
        archives: The archives that hold tensors of the model.
    """

    proto: onnx.ModelProto
    large: list[onnx_ir.TensorProtocol]
    archives: tuple[Archive, ...]

    def source(self) -> Source:
        """The proto, and the large tensors, which are read on demand."""
        data: list[Data] = []
        for ref, tensor in zip(tensors.external(self.proto), self.large, strict=True):
            if isinstance(tensor, ArchiveTensor):
                data.append(data_of(tensor))
            else:
                nbytes = tensors.external_type(ref).nbytes(ref.tensor.dims)
                data.append(Made(nbytes, partial(_data_of_size, ref, tensor, nbytes)))
        return Source(self.proto, data, is_own=True)


def split_model(model: onnx_ir.Model, *, size_threshold: int) -> SplitModel:
    """Splits a model into a proto and its large tensors.

    onnx_ir would read all tensors to serialize a model. So this function clones the model without
    copying tensors, replaces the large tensors of the clone by external placeholders, and
    serializes the clone. onnx_ir writes graphs whose nodes are not sorted topologically, but does
    not clone them. Such a model itself has the placeholders while it is serialized.

    Args:
        model: The model. It is unchanged afterwards.
        size_threshold: Tensors of this many bytes or more are large; external tensors always are,
            string tensors never.
    """
    try:
        holder = model.clone()
    except RuntimeError:  # of onnx_ir, for any reason; if it is another one, `to_proto` fails, too
        holder = model
    large: list[onnx_ir.TensorProtocol] = []
    archives: dict[int, Archive] = {}

    def placeholder(tensor: Any) -> Any:
        if isinstance(tensor, ArchiveTensor):
            archives[id(tensor.archive)] = tensor.archive
        if tensor.dtype.value not in dtypes.BY_NUMBER:  # strings
            return tensor
        if not isinstance(tensor, onnx_ir.ExternalTensor) and tensor.nbytes < size_threshold:
            return tensor
        large.append(tensor)
        return onnx_ir.ExternalTensor(
            f"{_PLACEHOLDER}{len(large) - 1}",
            None,
            None,
            tensor.dtype,
            shape=onnx_ir.Shape(tensor.shape),
            name=tensor.name,
            doc_string=tensor.doc_string,
            metadata_props=dict(tensor.metadata_props),
        )

    with _replace_tensors(holder, placeholder):
        proto = onnx_ir.to_proto(holder)
    walked = []
    for ref in tensors.external(proto):
        location = tensors.location(ref.tensor)
        if location is None or not location.startswith(_PLACEHOLDER):
            refuse_external(ref)
        walked.append(large[int(location.removeprefix(_PLACEHOLDER))])
    return SplitModel(proto, walked, tuple(archives.values()))


def data_of(tensor: onnx_ir.TensorProtocol) -> Data:
    """The bytes of `raw_data`: the entry of an `ArchiveTensor`, otherwise a copy."""
    if isinstance(tensor, ArchiveTensor):
        return EntryData(contents_of(tensor.archive), tensor.key)
    if isinstance(tensor, onnx_ir.ExternalTensor):
        # For types of less than 8 bits, `tobytes` would leave an unpacked copy in the tensor.
        copy = io.BytesIO()
        try:
            tensor.tofile(copy)
        except FileNotFoundError as error:
            advice = (
                ""
                if tensor.base_dir
                else "; if onnx_ir.from_proto made the model of a model of an archive, assign or "
                "save what onnx_ir.to_proto makes of it"
            )
            raise FileNotFoundError(
                error.errno,
                f"tensor {quoted(tensor.name or '')}: the file of its external data does not "
                f"exist{advice}",
                str(tensor.path),
            ) from error
        return Bytes(copy.getbuffer())
    return Bytes(tensor.tobytes())


def _data_of_size(ref: TensorRef, tensor: onnx_ir.TensorProtocol, nbytes: int) -> Data:
    """As `data_of`; refuses a tensor whose bytes are not `nbytes` in number."""
    data = data_of(tensor)
    if data.nbytes != nbytes:
        raise ArchiveFormatError(
            f"{ref}: expected {nbytes} bytes, as its shape and data type need, found {data.nbytes}"
        )
    return data


# Tensors of a model


def _replace_tensors(
    model: onnx_ir.Model, replacement: Callable[[Any], Any]
) -> contextlib.ExitStack:
    """Replaces every initializer and every tensor of an attribute, also in functions.

    Returns:
        A stack of callbacks that puts the replaced tensors back when it is closed.
    """
    with contextlib.ExitStack() as restoration:
        for graph in _graphs(model):
            for value in graph.initializers.values():
                tensor = value.const_value
                if tensor is not None:
                    restoration.callback(setattr, value, "const_value", tensor)
                    value.const_value = replacement(tensor)
        for attributes in _attributes(model):
            for name, attribute in list(attributes.items()):
                if attribute.is_ref():
                    continue
                if attribute.type == onnx_ir.AttributeType.TENSOR:
                    tensor = replacement(attribute.as_tensor())
                    new = onnx_ir.AttrTensor(attribute.name, tensor, attribute.doc_string)
                elif attribute.type == onnx_ir.AttributeType.TENSORS:
                    several = [replacement(tensor) for tensor in attribute.as_tensors()]
                    new = onnx_ir.AttrTensors(attribute.name, several, attribute.doc_string)
                else:
                    continue
                restoration.callback(attributes.__setitem__, name, attribute)
                attributes[name] = new
        return restoration.pop_all()


def _graphs(model: onnx_ir.Model) -> Iterator[Any]:
    yield from model.graphs()
    for function in model.functions.values():
        yield from function.subgraphs()


def _attributes(model: onnx_ir.Model) -> Iterator[Any]:
    for node in model.graph.all_nodes():
        yield node.attributes
    for function in model.functions.values():
        yield function.attributes
        for node in function.all_nodes():
            yield node.attributes
