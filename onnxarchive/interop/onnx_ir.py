"""onnx_ir's models with tensors that lie in an archive. Importing this imports onnx_ir."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from onnxarchive.archive import reading as archives
from onnxarchive.archive.opening import open
from onnxarchive.archive.reading import Archive
from onnxarchive.archive.saving import ORIGIN
from onnxarchive.buffers.data import SupportsWrite, pieces
from onnxarchive.errors import UnsupportedFeatureError, naming
from onnxarchive.interop.optional import needing
from onnxarchive.model import ir, tensors
from onnxarchive.storage.files import MappedFile

if TYPE_CHECKING:
    from numpy.typing import NDArray

with needing("onnx_ir", "hold the model of an archive"):
    import onnx_ir


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a tensor's elements come from when they are asked for."""

    archive: Archive
    key: str

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.archive.tensor_by_key(self.key), dtype=dtype, copy=copy)


class _Origin:
    """The state of an archive that a model was loaded from or saved as."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive

    def require_current(self, path: str | os.PathLike[str], file: MappedFile | None, /) -> None:
        self._archive._require_current(path, file)

    def is_at(self, path: str | os.PathLike[str], /) -> bool:
        return self._archive._is_at(path)

    def saved_as(self, file: MappedFile, /) -> _Origin:
        return _Origin(Archive(file.reopened()))

    def __deepcopy__(self, memo: dict[int, Any]) -> _Origin:
        return self


class ArchiveTensor(onnx_ir.Tensor[Any], ir.Mapped):
    """A tensor whose bytes lie in an archive; it keeps the file open and mapped.

    Nothing is read before the bytes are asked for. The entry's local header is compared with the
    directory when that first happens, its CRC-32 when `onnxarchive.save` writes the tensor.

    Attributes:
        key: The name of its entry.
    """

    __slots__ = ("_archive", "_origin", "key")

    def __init__(
        self,
        archive: Archive,
        key: str,
        *,
        name: str | None = None,
        doc_string: str | None = None,
        metadata_props: dict[str, str] | None = None,
        origin: object = None,
    ) -> None:
        """Stands for the tensor of a key.

        Args:
            archive: The archive, which must not be closed while the tensor is used.
            key: A key of the archive.
            name: The tensor's name.
            doc_string: As in a TensorProto.
            metadata_props: As in a TensorProto.
            origin: That of the model which it was loaded with; None for one of its own.
        """
        proto = archive._refs[key].tensor
        super().__init__(
            _Source(archive, key),
            onnx_ir.DataType(proto.data_type),
            shape=onnx_ir.Shape(proto.dims),
            name=name,
            doc_string=doc_string,
            metadata_props=metadata_props,
        )
        self._archive = archive
        self._origin = origin or _Origin(archive)
        self.key = key

    @property
    def origin(self) -> object:
        """As the `meta` of the model has it that it was loaded with."""
        return self._origin

    @property
    def raw(self) -> memoryview:
        """The bytes of `raw_data`, as a read-only view of the file."""
        return self._archive.read(self.key)

    def numpy(self) -> NDArray[Any]:
        """The elements as a read-only array.

        Returns:
            A view of the file; for types of less than 8 bits an unpacked copy, made at every call.
        """
        return self._archive.tensor_by_key(self.key)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def __dlpack__(self, **options: Any) -> Any:
        return self.numpy().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[Any, Any]:
        return self.numpy().__dlpack_device__()

    def tobytes(self) -> bytes:
        """The bytes of `raw_data`, as a copy."""
        return bytes(self.raw)

    def tofile(self, file: SupportsWrite) -> None:
        """Writes the bytes of `raw_data` to a binary file, a few MiB at a time."""
        for piece in pieces(self.raw):
            while piece.nbytes:  # an unbuffered file may take fewer bytes than it is given
                written = file.write(piece)
                piece = piece[written if isinstance(written, int) else len(piece) :]

    def verified(self) -> memoryview:
        """The bytes as a view of the file, once their CRC-32 is found right.

        Raises:
            ChecksumError: They have changed.
        """
        with naming(self._archive.path):
            return archives.read_verified(self._archive, self.key)

    def __deepcopy__(self, memo: dict[int, Any]) -> ArchiveTensor:
        """A tensor of its own over the same bytes, which nobody changes."""
        return ArchiveTensor(
            self._archive,
            self.key,
            name=self.name,
            doc_string=self.doc_string,
            metadata_props=dict(self.metadata_props),
            origin=self._origin,
        )

    def __repr__(self) -> str:
        return f"{self._repr_base()}({self._archive.path!r}, key={self.key!r}, name={self.name!r})"


def load(path: str | os.PathLike[str]) -> onnx_ir.Model:
    """As `onnxarchive.ir.load`."""
    archive = open(path)
    try:
        with naming(path):
            return _to_ir(archive)
    except BaseException:
        archive.close()
        raise


def _to_ir(archive: Archive) -> onnx_ir.Model:
    _require_no_loss(archive.model)
    try:
        model = onnx_ir.from_proto(archive.model)
    except onnx_ir.serde.SerdeError as error:
        cause: BaseException = error
        while (before := cause.__cause__ or cause.__context__) is not None:
            cause = before
        raise UnsupportedFeatureError(
            f"expected a model that onnx_ir can hold, found {type(cause).__name__}: {cause}"
        ) from error
    missing = dict(archive._refs)
    origin = _Origin(archive)

    def mapped(tensor: Any) -> Any:
        if not isinstance(tensor, onnx_ir.ExternalTensor):
            return tensor
        key = os.fspath(tensor.location)
        missing.pop(key, None)
        return ArchiveTensor(
            archive,
            key,
            name=tensor.name,
            doc_string=tensor.doc_string,
            metadata_props=dict(tensor.metadata_props),
            origin=origin,
        )

    ir.replace_tensors(model, mapped)
    model.graph.meta[ORIGIN] = origin
    for ref in missing.values():
        raise UnsupportedFeatureError(f"{ref}: onnx_ir does not hold a tensor that stands there")
    return model


def _require_no_loss(model: onnx.ModelProto) -> None:
    """Refuses what onnx_ir would pass over or cannot take.

    Raises:
        UnsupportedFeatureError: The model has sparse tensors or training_info.
    """
    for ref in tensors.walk(model):
        if any(field.startswith("sparse_") for field, _ in ref.path):
            raise UnsupportedFeatureError(
                f"{ref}: onnx_ir has no sparse tensors; make it dense, or work on the model that "
                "onnxarchive.load gives"
            )
    if model.training_info:
        raise UnsupportedFeatureError(
            "onnx_ir has no training_info, so that it would be lost; clear it, or work on the "
            "model that onnxarchive.load gives"
        )
