"""`Mapping` classes: tensors (views of an archive's file), assets (copies) and models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import onnx

from onnxarchive.archive.snapshot import Snapshot
from onnxarchive.errors import ArchiveFormatError, shown, shown_names, with_path
from onnxarchive.model import dtypes, tensors
from onnxarchive.model.keys import ASSET_PREFIX
from onnxarchive.model.tensors import TensorRef

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Tensors(Mapping[str, "NDArray[Any]"]):
    """Initializers by name, as read-only arrays; each is made when it is looked up.

    The mapping has the initializers of the main graph and of its subgraphs, including small and
    string initializers, whose data is in the model itself. Several graphs, such as the branches of
    an If, may define the same name. Iteration skips such a name, and looking it up raises an error
    that says where these initializers are found.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def ref(self, name: str) -> TensorRef:
        """The tensor of an initializer and its path in the model.

        Raises:
            TensorNotFoundError: No initializer has this name, or several have it.
        """
        return self._snapshot.ref(name)

    def key(self, name: str) -> str | None:
        """The key of an initializer; None if the initializer's data is in the model itself.

        Raises:
            TensorNotFoundError: No initializer has this name, or several have it.
        """
        snapshot = self._snapshot
        number = snapshot.number(name)
        return None if number is None else snapshot.entries.names[number]

    def __getitem__(self, name: str) -> NDArray[Any]:
        """The initializer of this name.

        Returns:
            A view of the file; a copy if the file is not mapped, the type has less than 8 bits, or
            the model itself holds the data.

        Raises:
            ArchiveFormatError: Data in the model does not fit type and shape, or the local header
                of an entry does not match the directory.
            ChecksumError: Bytes from a file object or a remote archive do not match their CRC-32.
            TensorNotFoundError: No initializer has this name, or several have it.
        """
        snapshot = self._snapshot
        number = snapshot.number(name)
        if number is not None:
            return snapshot.array(number)
        with with_path(snapshot.file.path):
            return array_in_model(snapshot.ref(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._snapshot.initializers)

    def __len__(self) -> int:
        return len(self._snapshot.initializers)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._snapshot.initializers

    def __repr__(self) -> str:
        return f"<{len(self)} tensors of {self._snapshot.file.path!r}>"

    def _repr_html_(self) -> str:
        snapshot = self._snapshot
        rows = (_row(snapshot, name) for name in snapshot.initializers)
        from onnxarchive.archive import html  # only notebooks need it

        return html.table(repr(self), ["name", "type", "shape"], rows, len(self))

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)


def _row(snapshot: Snapshot, name: str) -> tuple[list[str], int | None]:
    """Name, data type, shape and size of an initializer; the data is not read."""
    tensor = snapshot.ref(name).tensor
    texts = [shown(name), dtypes.name_of(tensor.data_type), shown(tensor.dims)]
    number = snapshot.number(name)
    if number is not None:
        return texts, snapshot.directory.entries[number].nbytes
    data_type = tensors.stored_type(tensor)
    return texts, None if data_type is None else data_type.nbytes(tensor.dims)


def array_in_model(ref: TensorRef) -> NDArray[Any]:
    """The array of a tensor that the model itself holds, as a copy.

    Raises:
        ArchiveFormatError: The data does not fit type and shape.
    """
    tensor = ref.tensor
    stored_type = tensors.stored_type(tensor)
    if stored_type is not None:
        return dtypes.as_array(tensors.raw_data(ref), stored_type, tensor.dims)
    try:
        strings = tensors.strings(tensor)
    except ValueError as error:
        found = f"data type {tensor.data_type} and dims {shown(tensor.dims)}"
        if tensor.HasField("segment"):
            found = "a segment of a tensor"
        elif tensor.data_type == tensors.STRING and min(tensor.dims, default=0) >= 0:
            found += f" with wrong string_data: {error}"
        raise ArchiveFormatError(
            f"{ref}: expected a tensor that an array can hold, found {found}"
        ) from None
    strings.flags.writeable = False
    return strings


class Assets(Mapping[str, bytes]):
    """The assets of an archive by path; each is read when it is looked up."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def __getitem__(self, path: str) -> bytes:
        """The asset with this path, as a copy.

        If the file is mapped, `Archive.read("assets/" + path)` gives a view.

        Raises:
            ChecksumError: Its bytes do not match their CRC-32.
            TensorNotFoundError: There is no such asset.
        """
        return self._snapshot.read(self._snapshot.asset_number(path))

    def __contains__(self, path: object) -> bool:
        return isinstance(path, str) and ASSET_PREFIX + path in self._snapshot.entries.index_of

    def __iter__(self) -> Iterator[str]:
        return (
            name.removeprefix(ASSET_PREFIX)
            for name in self._snapshot.entries
            if name.startswith(ASSET_PREFIX)
        )

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"<{len(self)} assets of {self._snapshot.file.path!r}>"

    def _repr_html_(self) -> str:
        entries = self._snapshot.entries
        names = [name for name in entries if name.startswith(ASSET_PREFIX)]
        rows = (([shown(name.removeprefix(ASSET_PREFIX))], entries[name].nbytes) for name in names)
        from onnxarchive.archive import html  # only notebooks need it

        return html.table(repr(self), ["name"], rows, len(names))

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)


class Models(Mapping[str, onnx.ModelProto]):
    """The models of an archive by id, as they were when this object was made.

    Args:
        snapshot: The state of the archive.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def __getitem__(self, id: str) -> onnx.ModelProto:
        return self._snapshot.given_model(id)

    def __iter__(self) -> Iterator[str]:
        return iter(self._snapshot.model_ids)

    def __len__(self) -> int:
        return len(self._snapshot.model_ids)

    def __repr__(self) -> str:
        return f"<models {shown_names(self)} of {self._snapshot.file.path!r}>"

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)
