"""`Mapping` classes: tensors (views of an archive's file), assets (copies) and models."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import onnx

from onnxarchive.errors import (
    ArchiveFormatError,
    ModelNotFoundError,
    did_you_mean,
    quoted,
    quoted_names,
    with_path,
)
from onnxarchive.model import dtypes, tensors
from onnxarchive.model.dtypes import DataType
from onnxarchive.model.keys import ASSET_PREFIX
from onnxarchive.model.tensors import TensorRef
from onnxarchive.reading.contents import Contents, NamedMapping
from onnxarchive.zipformat.directory import Entry

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAX_SHOWN_OWNERS = 8  # initializers of one name, in a message


class Tensors(NamedMapping["NDArray[Any]"]):
    """Initializers by name, as read-only arrays; each is made when it is looked up.

    The mapping has the initializers of the main graph and of its subgraphs, including small and
    string initializers, whose data is in the model itself. Several graphs, such as the branches of
    an If, may define the same name. Iteration skips such a name, and looking it up raises an error
    that says where these initializers are.

    Attributes:
        refs: The tensors that are stored outside the model, by key.
    """

    def __init__(self, contents: Contents, model: str) -> None:
        self._contents = contents
        self._checked = contents.models[model]
        self.refs = self._checked.refs
        # As `_index`, for the names that several initializers have, once `_index` is made.
        self._ambiguous: dict[str, list[str | TensorRef]] = {}

    @cached_property
    def _index(self) -> dict[str, str | TensorRef]:
        """The key of each initializer, or its ref if the model itself holds it, by name."""
        initializers = self.refs.initializers
        names = [tensors.text(tensor.name) for tensor in initializers]
        stored: list[str | TensorRef | None] = [None] * len(names)
        key_of: dict[int, str] = {}
        for key, position in self.refs.positions.items():
            if isinstance(position, int):
                stored[position] = key
            else:
                key_of[id(position.tensor)] = key
        for ref in tensors.walk_others(self._checked.model) if self._checked.has_inner else ():
            if ref.is_initializer:
                names.append(ref.name)
                stored.append(key_of.get(id(ref.tensor), ref))
        index: dict[str, str | TensorRef] = {}
        ambiguous: dict[str, list[str | TensorRef]] = {}
        for number, (name, one) in enumerate(zip(names, stored, strict=True)):
            one = one or tensors.main_initializer(initializers[number], number)
            if name in index:
                ambiguous.setdefault(name, [index[name]]).append(one)
            index[name] = one
        for name in ambiguous:
            del index[name]
        self._ambiguous = ambiguous  # whole, since several threads may come here
        return index

    def _find(self, name: str) -> str | TensorRef:
        """As `_index`; a TensorNotFoundError if no initializer or several have this name."""
        stored = self._index.get(name)
        if stored is not None:
            return stored
        named = self._ambiguous.get(name)
        if named is None:
            what = quoted(name) if isinstance(name, str) else repr(name)
            message = f"there is no initializer {what}"
            raise self._contents.not_found(message, name, self._index)
        owners = ", ".join(
            f"tensor_by_key({one!r})" if isinstance(one, str) else f"model.{one.where}"
            for one in named[:_MAX_SHOWN_OWNERS]
        )
        more = f" or another one of the {len(named)}" if len(named) > _MAX_SHOWN_OWNERS else ""
        raise self._contents.not_found(
            f"several initializers have the name {quoted(name)}; take {owners}{more}"
        )

    def type_and_shape(self, key: str) -> tuple[DataType, tuple[int, ...]]:
        """Data type and shape of the tensor with this key."""
        data_type, shape = self._checked.kinds[key]
        return dtypes.BY_NUMBER[data_type], shape

    def array(self, key: str, data: memoryview) -> NDArray[Any]:
        """The array over the data of the entry with this key."""
        return dtypes.as_array(data, *self.type_and_shape(key))

    def key(self, name: str) -> str | None:
        """The key of an initializer; None if the initializer's data is in the model itself."""
        stored = self._find(name)
        return stored if isinstance(stored, str) else None

    def __getitem__(self, name: str) -> NDArray[Any]:
        """The initializer of this name; a TensorNotFoundError if none or several have it.

        It is a view of the file. It is a copy if the file is not mapped, if the type has less than
        8 bits, or if the model itself holds the data; data in the model that does not fit type and
        shape raises ArchiveFormatError.
        """
        stored = self._find(name)
        if isinstance(stored, str):
            return self.array(stored, self._contents.view(stored))
        with with_path(self._contents.file.path):
            return array_in_model(stored)

    def __reduce__(self) -> NoReturn:
        """Refuses to pickle or copy the tensors, which belong to an open archive."""
        raise TypeError(
            "the tensors of an archive cannot be pickled or copied; pickle the archive, which is "
            "opened again, or dict(tensors), which has the arrays"
        )

    def __repr__(self) -> str:
        return f"<{len(self)} tensors of {self._contents.file.path!r}>"

    def _repr_html_(self) -> str:
        from onnxarchive.reading import html  # only notebooks need it

        return html.table(repr(self), ["name", "type", "shape"], map(self._row, self), len(self))

    def _row(self, name: str) -> tuple[list[str], int | None]:
        """Name, data type, shape and size of an initializer; the data is not read."""
        stored = self._find(name)
        tensor = (self.refs[stored] if isinstance(stored, str) else stored).tensor
        texts = [quoted(name), dtypes.name_of(tensor.data_type), quoted(tensor.dims)]
        if isinstance(stored, str):
            return texts, self._contents.entries[stored].nbytes
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
    found = f"data type {tensor.data_type} and dims {quoted(tensor.dims)}"
    if tensor.data_type == tensors.STRING and min(tensor.dims, default=0) >= 0:
        try:
            elements = [element.decode() for element in tensor.string_data]
            strings = np.array(elements, dtype=object).reshape(tuple(tensor.dims))
        except ValueError as error:
            found += f" with wrong string_data: {error}"
        else:
            strings.flags.writeable = False
            return strings
    if tensor.HasField("segment"):
        found = "a segment of a tensor"
    raise ArchiveFormatError(f"{ref}: an array cannot hold this tensor: {found}")


class Assets(NamedMapping[bytes]):
    """The assets of an archive by path; each is read when it is looked up."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents

    @cached_property
    def _index(self) -> dict[str, Entry]:
        return {
            entry.name.removeprefix(ASSET_PREFIX): entry
            for entry in self._contents.directory.entries
            if entry.name.startswith(ASSET_PREFIX)
        }

    def __getitem__(self, path: str) -> bytes:
        """The asset with this path, as a copy.

        If the file is mapped, `Archive.read("assets/" + path)` gives a view.

        Raises:
            ChecksumError: Its bytes do not match their CRC-32.
            TensorNotFoundError: There is no such asset.
        """
        copy = io.BytesIO()  # `getvalue` returns the bytes without another copy
        copy.writelines(self.pieces(path))
        return copy.getvalue()

    def entry(self, path: str) -> Entry:
        """The entry of the asset with this path; a TensorNotFoundError if there is none."""
        if path not in self._index:
            message = f"there is no asset {quoted(path)}"
            raise self._contents.not_found(message, path, self._index)
        return self._index[path]

    def pieces(self, path: str) -> Iterator[memoryview]:
        """An asset in pieces; as one copy if the file is not mapped.

        Errors are those of `__getitem__`; a ChecksumError comes before the first piece or after the
        last one.
        """
        name = self.entry(path).name
        if not self._contents.file.is_mapped:
            return iter([self._contents.view(name)])
        return self._contents.pieces(name)

    def __reduce__(self) -> NoReturn:
        """Refuses to pickle or copy the assets, which belong to an open archive."""
        raise TypeError(
            "the assets of an archive cannot be pickled or copied; pickle the archive, which is "
            "opened again, or dict(assets), which has the bytes"
        )

    def __repr__(self) -> str:
        return f"<{len(self)} assets of {self._contents.file.path!r}>"

    def _repr_html_(self) -> str:
        rows = (([quoted(path)], entry.nbytes) for path, entry in self._index.items())
        from onnxarchive.reading import html  # only notebooks need it

        return html.table(repr(self), ["name"], rows, len(self))


class Models(NamedMapping[onnx.ModelProto]):
    """The models of an archive by id, as they were when this object was made."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._index = contents.models

    def __getitem__(self, id: str) -> onnx.ModelProto:
        checked = self._contents.models[id]
        checked.refs.keep()  # the caller may change the model; its refs still give the old tensors
        return checked.model

    def __repr__(self) -> str:
        return f"<models {quoted_names(self)} of {self._contents.file.path!r}>"


def require_model(models: Collection[str], model: str) -> None:
    """Refuses an id that none of the models has, with a ModelNotFoundError."""
    if model not in models:
        raise ModelNotFoundError(
            "there is no model with the id "
            f"{quoted(model) if isinstance(model, str) else repr(model)}, "
            f"only {quoted_names(models)}{did_you_mean(model, [*models])}"
        )
