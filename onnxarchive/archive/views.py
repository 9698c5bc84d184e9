"""The tensors and assets of an archive by name, as views of its file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from onnxarchive.archive.snapshot import Initializers, Snapshot
from onnxarchive.errors import ArchiveFormatError, shown, with_path
from onnxarchive.model import dtypes, tensors
from onnxarchive.model.keys import ASSET_PREFIX
from onnxarchive.model.tensors import TensorRef

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Tensors(Mapping[str, "NDArray[Any]"]):
    """Initializers by name, as read-only arrays; made when looked up.

    It holds those of the main graph and of every subgraph of its nodes. ONNX lets two subgraphs
    own the same name (the branches of an If): such a name is ambiguous, is not iterated over, and
    looking it up raises, naming the keys under which `Archive.tensor_by_key` gives each of them.
    So a lookup never gives another graph's tensor. Initializers that the model itself holds, small
    ones and strings, are here as well.
    """

    def __init__(self, state: Callable[[], Snapshot]) -> None:
        """Shows the initializers of an archive as it is whenever one is looked up."""
        self._state = state

    @property
    def _index(self) -> Initializers:
        return self._state().initializers

    def ref(self, name: str) -> TensorRef:
        """The tensor of an initializer and where it stands in the model.

        Raises:
            TensorNotFoundError: No initializer has this name, or several have it.
        """
        return self._ref(self._state(), name)

    def _ref(self, found: Snapshot, name: str) -> TensorRef:
        ref = found.initializers.ref(name)
        if ref is None:
            raise found.not_found(found.initializers.why_not(name))
        return ref

    def key(self, name: str) -> str | None:
        """The key of the entry that holds an initializer; None where the model itself holds it.

        Raises:
            TensorNotFoundError: No initializer has this name, or several have it.
        """
        found = self._state()
        number = found.initializers.number_of.get(name)
        if number is not None:
            return found.entries.names[number]
        self._ref(found, name)
        return None

    def __getitem__(self, name: str) -> NDArray[Any]:
        """The initializer of this name.

        Returns:
            A view of the file; an unpacked copy for types of less than 8 bits; a copy for an
            initializer that the model itself holds.

        Raises:
            ArchiveFormatError: It is held by the model and cannot be an array.
            TensorNotFoundError: No initializer has this name, or several have it.
        """
        found = self._state()
        number = found.initializers.number_of.get(name)
        if number is not None:
            return found.array(number)
        ref = self._ref(found, name)
        tensor = ref.tensor
        data_type = tensors.stored_type(tensor)
        with with_path(found.file.path):
            if data_type is not None:
                return dtypes.as_array(tensors.raw_data(ref), data_type, tensor.dims)
            try:
                return tensors.strings(tensor)
            except ValueError as error:
                raise ArchiveFormatError(
                    f"{ref}: expected a data type and a shape that an array can have, found data "
                    f"type {tensor.data_type} and dims {shown(tensor.dims)}"
                ) from error

    def __iter__(self) -> Iterator[str]:
        index = self._index
        return chain(index.names, index.others)

    def __len__(self) -> int:
        index = self._index
        return len(index.names) + len(index.others)

    def __contains__(self, name: object) -> bool:
        index = self._index
        return isinstance(name, str) and (name in index.number_of or index.ref(name) is not None)

    def __repr__(self) -> str:
        return f"<{len(self)} tensors of {self._state().file.path!r}>"


class Assets(Mapping[str, memoryview]):
    """The assets of an archive by path, as read-only views."""

    def __init__(self, state: Callable[[], Snapshot]) -> None:
        """Shows the assets of an archive as it is whenever one is looked up."""
        self._state = state

    def __getitem__(self, path: str) -> memoryview:
        found = self._state()
        number = found.entries.index_of.get(ASSET_PREFIX + path)
        if number is None:
            raise found.not_found(f"expected the path of an asset, found {shown(path)}")
        view, offset, nbytes = found.locate(number)
        return view[offset : offset + nbytes]

    def __iter__(self) -> Iterator[str]:
        return (
            name.removeprefix(ASSET_PREFIX)
            for name in self._state().entries
            if name.startswith(ASSET_PREFIX)
        )

    def __len__(self) -> int:
        return sum(1 for _ in self)
