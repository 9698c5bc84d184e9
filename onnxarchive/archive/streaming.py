"""`Writer`: an archive tensor by tensor, of a model that never stands in memory as a whole."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import onnx

from onnxarchive.archive.planning import (
    Asset,
    Item,
    Plan,
    open_assets,
    plan_items,
    refuse_external,
    require_names,
)
from onnxarchive.archive.writing import fetched_entry, stream, write_entry
from onnxarchive.buffers.data import Pieces
from onnxarchive.errors import ArchiveFormatError, Report
from onnxarchive.model import dtypes, proto, tensors
from onnxarchive.model.keys import Keys
from onnxarchive.model.tensors import TensorRef
from onnxarchive.model.threshold import DEFAULT_SIZE_THRESHOLD
from onnxarchive.model.walking import Path
from onnxarchive.storage.replacement import Replacement
from onnxarchive.zipformat import layout
from onnxarchive.zipformat.writer import ZipWriter

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


class Writer:
    """Writes an archive tensor by tensor, for a model that does not fit memory as a whole.

    ::

        with onnxarchive.Writer("model.onnxa") as writer:
            for name, array in weights:
                writer.add(name, array)
            writer.finish(model)

    The archive appears under its path when `finish` returns. Leaving the block without it, by an
    exception or otherwise, leaves nothing behind.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        size_threshold: int = DEFAULT_SIZE_THRESHOLD,
        alignment: int = layout.MIN_ALIGNMENT,
    ) -> None:
        """Begins an archive.

        Args:
            path: The archive.
            size_threshold: Tensors that the model given to `finish` holds itself are stored
                outside from this many bytes on. What `add` was given always is.
            alignment: As in `save`.

        Raises:
            ValueError: `alignment` is not allowed.
            OSError: The file cannot be made.
        """
        self._path = path
        self._size_threshold = size_threshold
        self._replacement = Replacement(path)
        self._is_open = True
        try:
            self._zip = ZipWriter(self._replacement.file, alignment=alignment)
        except BaseException:
            self.close()
            raise
        self._keys = Keys()
        self._key_of: dict[str, str] = {}
        self._added: dict[str, onnx.TensorProto] = {}
        self._nbytes: dict[str, int] = {}
        self._assets: list[str] = []

    def add(self, name: str, array: ArrayLike) -> str:
        """Writes a tensor.

        Args:
            name: The name of the initializer that it is.
            array: Its elements. Types that ml_dtypes adds to numpy (bfloat16, float8, int4, ...)
                are stored as what they are, those of less than 8 bits packed.

        Returns:
            The key under which the tensor is stored.

        Raises:
            ValueError: A tensor of this name was added before, or the writer is closed.
            UnsupportedFeatureError: ONNX has no data type for the array.
            OSError: The disk is full, or another error of writing.
        """
        self._require_open()
        if name in self._key_of:
            raise ValueError(f"expected each tensor once, found {name!r} again")
        elements = np.asarray(array)
        data = dtypes.as_raw_data(elements)
        key = self._keys.assign(name)
        data_type = dtypes.of_array(elements)
        tensor = onnx.TensorProto(name=name, data_type=data_type.number, dims=elements.shape)
        tensors.set_location(tensor, key)
        with self._closing_on_failure():
            self._zip.add(key, data)
            self._key_of[name] = key
            self._added[key] = tensor
            self._nbytes[key] = data.nbytes
        return key

    def add_asset(self, name: str, data: Asset) -> None:
        """Writes an asset.

        Args:
            name: Its path in the archive, without the prefix `assets/`.
            data: Its bytes, or the path of a file.

        Raises:
            ValueError: The path is not allowed or taken, or the writer is closed.
            OSError: The file cannot be read, or the archive not written.
        """
        self._require_open()
        (item,) = open_assets({name: data})
        require_names([*self._assets, item.name])
        with self._closing_on_failure():
            write_entry(fetched_entry(item), self._zip)
            self._assets.append(item.name)

    def finish(self, model: onnx.ModelProto) -> None:
        """Writes the model and puts the archive in its place.

        A tensor that was added becomes the data of the initializer of its name, which needs no
        data of its own and, where it gives shape and data type, the same ones. Where the model has
        no such initializer, one is appended to the main graph. A tensor elsewhere, in an attribute
        or a function, may name a key itself, as the location of its external data.

        Args:
            model: The model. It is not changed.

        Raises:
            ArchiveFormatError: An added tensor does not fit the model.
            ValueError: The writer is closed.
            OSError: The archive cannot be written.
        """
        self._require_open()
        with self._closing_on_failure():
            items, complete, _ = plan_items(
                model,
                resolve=refuse_external,
                size_threshold=self._size_threshold,
                stored=self._find_stored(model),
                assigned=self._keys,
            )
            self._fill_in(complete)
            self._check(complete, items)
            model_proto = Pieces((memoryview(proto.serialize(complete)),))
            stream(Plan(items, model_proto), self._zip, None)
            self._is_open = False
            self._replacement.commit()

    @contextlib.contextmanager
    def _closing_on_failure(self) -> Iterator[None]:
        """Gives the archive up when a write fails: its bytes so far are of no use."""
        try:
            yield
        except BaseException as error:
            self.close(error)
            raise

    def close(self, error: BaseException | None = None) -> None:
        """Gives the archive up, unless `finish` has completed it; nothing is left behind.

        Args:
            error: Why, or None. Where it tells of a full disk, it is made to name the archive.
        """
        if self._is_open:
            self._is_open = False
            self._replacement.discard(error)

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _require_open(self) -> None:
        if not self._is_open:
            raise ValueError("the writer is closed")

    def _find_stored(self, model: onnx.ModelProto) -> dict[Path, str]:
        """Which tensors of the model are those that were added."""
        stored: dict[Path, str] = {}
        refs: dict[str, TensorRef] = {}
        for ref in tensors.walk(model):
            if ref.tensor.data_location == tensors.EXTERNAL:
                reference = tensors.external_data(ref, Report())
                assert reference is not None  # the report would have raised
                key = reference.location
                if reference.offset or reference.length not in (None, self._nbytes.get(key)):
                    raise ArchiveFormatError(
                        f"{ref}: expected all of a tensor that was added as its data, found "
                        f"offset {reference.offset} and length {reference.length}"
                    )
                if key not in self._added:
                    raise ArchiveFormatError(
                        f"{ref}: expected the key of a tensor that was added as its location, "
                        f"found {key!r}"
                    )
            elif ref.is_initializer and ref.name in self._key_of:
                key = self._key_of[ref.name]
            else:
                continue
            if key in refs:
                raise ArchiveFormatError(
                    f"expected one tensor to be {self._added[key].name!r}, found {refs[key]} and "
                    f"{ref}"
                )
            refs[key] = ref
            stored[ref.path] = key
        return stored

    def _fill_in(self, model: onnx.ModelProto) -> None:
        """Gives the tensors that were added their shape and type, and the others a place."""
        unused = dict(self._added)
        for ref in tensors.walk(model):
            key = tensors.location(ref.tensor)
            added = unused.pop(key, None) if key is not None else None
            if added is None:
                continue
            tensor = ref.tensor
            if not tensor.data_type:
                tensor.data_type = added.data_type
                tensor.dims[:] = added.dims
            if (tensor.data_type, list(tensor.dims)) != (added.data_type, list(added.dims)):
                raise ArchiveFormatError(
                    f"{ref}: expected {_describe(tensor)} as in the model, found "
                    f"{_describe(added)} added"
                )
        model.graph.initializer.extend(unused.values())

    def _check(self, model: onnx.ModelProto, items: Iterable[Item]) -> None:
        """Refuses what a reader of the archive would."""
        sizes = self._nbytes | {item.name: item.nbytes for item in items}
        proto.check_references(model, sizes, Report())


def _describe(tensor: onnx.TensorProto) -> str:
    return f"{dtypes.name_of(tensor.data_type)} of shape {list(tensor.dims)}"
