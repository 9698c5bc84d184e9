"""`Writer` writes an archive tensor by tensor, for a model that does not fit in memory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import onnx

from onnxarchive.errors import ArchiveFormatError, Strict, with_path
from onnxarchive.files.data import Closing, closing_on_error
from onnxarchive.files.progress import ProgressCounter
from onnxarchive.files.replacement import Replacement
from onnxarchive.model import DEFAULT_SIZE_THRESHOLD, dtypes, references, tensors
from onnxarchive.model.keys import ASSET_PREFIX, Keys, model_entry
from onnxarchive.model.tensors import TensorRef
from onnxarchive.model.walking import Path
from onnxarchive.remote.location import Location, require_local_target
from onnxarchive.sources.safetensors import read_safetensors
from onnxarchive.sources.source import Source, TensorData
from onnxarchive.writing.options import Asset, WriteOptions
from onnxarchive.writing.plan import (
    Item,
    Plan,
    PlannedModel,
    model_items,
    open_assets,
    plan_model,
    require_model_ids,
    require_names,
    with_further_models,
)
from onnxarchive.writing.sharing import SharedEntries
from onnxarchive.writing.tensor_data import elements_of
from onnxarchive.writing.write import read_batch, write_entries
from onnxarchive.zipformat import layout
from onnxarchive.zipformat.writer import ZipWriter

if TYPE_CHECKING:
    from onnxarchive.writing.tensor_data import Tensor


class Writer(Closing):
    """Writes an archive tensor by tensor, for a model that does not fit in memory.

    The archive appears at its path when `finish` returns. If the `with` block ends without
    `finish`, nothing is kept, and an older file at the path is unchanged.

    Args:
        path: The archive, usually `name.onnxa`.
        size_threshold: For initializers in the models given to `finish`, as in `save`. Tensors
            given to `add` are always stored outside the models.
        alignment: As in `save`.

    Example:
        with onnxarchive.Writer("new.onnxa") as writer:
            writer.add("layer.0/weight", np.zeros((64, 32), np.float32))
            writer.finish(model)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        size_threshold: int = DEFAULT_SIZE_THRESHOLD,
        alignment: int = layout.MIN_ALIGNMENT,
    ) -> None:
        """Begins an archive.

        Raises:
            ValueError: `size_threshold` or `alignment` is not allowed, or `path` begins with `~`.
            UnsupportedFeatureError: `path` is a URL.
            OSError: The file cannot be created.
        """
        self._options = WriteOptions(size_threshold=size_threshold, alignment=alignment)
        self._replacement = Replacement(require_local_target(path))
        self._is_open = True
        self._zip = ZipWriter(self._replacement.writer, alignment=alignment)
        self._keys = Keys()
        self._key_of: dict[str, str] = {}  # by name
        self._added: dict[str, onnx.TensorProto] = {}  # by key
        self._nbytes: dict[str, int] = {}  # by key
        self._assets: list[str] = []

    def add(self, name: str, tensor: Tensor) -> str:
        """Writes a tensor.

        Args:
            name: Name of the initializer.
            tensor: The data: an array or anything that numpy converts to one, a PyTorch tensor on
                any device, a TensorProto (its name and doc_string are not used), or an onnx_ir
                tensor. The data type is kept, including bfloat16, float8 and int4.

        Returns:
            The key under which the tensor is stored.

        Raises:
            ValueError: The name is empty or was added before, or the writer is closed.
            UnsupportedFeatureError: ONNX cannot store the data type outside a model, or the tensor
                is sparse or on the device `meta`.
            ArchiveFormatError: The data of a TensorProto is external or does not fit its shape.
            OSError: The archive cannot be written.

        Example:
            with onnxarchive.Writer("new.onnxa") as writer:
                key = writer.add("layer.0/weight", np.zeros((64, 32), np.float32))
                writer.finish(model)
        """
        self._require_new([name])
        return self._write(name, elements_of(name, tensor))

    def add_from(
        self,
        path: str | os.PathLike[str],
        names: Iterable[str] | Mapping[str, str] | None = None,
    ) -> dict[str, str]:
        """Writes tensors of a safetensors file, which is mapped and not loaded.

        Args:
            path: The file.
            names: Names of the tensors to write, or a mapping from these names to the names of
                initializers; None for all tensors of the file.

        Returns:
            The key of each tensor, by name of the initializer.

        Raises:
            ArchiveFormatError: The file is not a safetensors file, or changes while it is read.
            TensorNotFoundError: The file lacks a tensor.
            TypeError: `names` is a string.
            UnsupportedFeatureError: ONNX lacks the data type of a tensor, or `path` is a URL.
            ValueError: A name is empty, given twice or was added before, or the writer is closed.
            OSError: The file cannot be read, or the archive cannot be written.

        Example:
            with onnxarchive.Writer("new.onnxa") as writer:
                writer.add_from("model.safetensors", {"weight": "layer.0/weight"})
                writer.finish(model)
        """
        if isinstance(names, str):
            raise TypeError(f"expected a list of names, found a string; write [{names!r}]")
        path = Location.of(path).require_local()
        with with_path(path):
            stored_names = None if names is None else [*names]
            new_names = [*names.values()] if isinstance(names, Mapping) else stored_names
            self._require_new(new_names or ())
            elements = read_safetensors(path, stored_names)
            if names is None:
                self._require_new(elements)
            pairs = zip(new_names or elements, stored_names or elements, strict=True)
            return {name: self._write(name, elements[stored_name]) for name, stored_name in pairs}

    def _require_new(self, names: Iterable[str]) -> None:
        """Refuses names that are empty, were added before, or are given twice."""
        self._require_open()
        new: set[str] = set()
        for name in names:
            if not name:
                raise ValueError("the name of an initializer must not be empty")
            if name in self._key_of or name in new:
                raise ValueError(f"the tensor {name!r} is added twice")
            new.add(name)

    def _write(self, name: str, elements: TensorData) -> str:
        data_type, dims, data = elements.data_type, elements.dims, elements.data
        tensor = onnx.TensorProto(name=name, data_type=data_type.number, dims=dims)
        ref = TensorRef((("given", None),), tensor)
        item = Item(name, data, ref)
        # Refuses its elements before anything is changed.
        ((nbytes, crc, pieces, is_verified),) = read_batch([item])
        key = self._keys.assign(name)
        tensors.set_location(tensor, key)
        with closing_on_error(self):
            self._zip.add(key, nbytes, crc, pieces, is_verified=is_verified)
            self._key_of[name] = key
            self._added[key] = tensor
            self._nbytes[key] = nbytes
        return key

    def add_asset(self, name: str, data: Asset) -> None:
        """Writes an asset.

        Args:
            name: Its path in the archive, without the prefix `assets/`.
            data: Its bytes, or the path of a file.

        Raises:
            ValueError: The path is not allowed or was added before, or the writer is closed.
            ArchiveFormatError: The file is not a regular file.
            OSError: The file cannot be read, or the archive cannot be written.

        Example:
            with onnxarchive.Writer("new.onnxa") as writer:
                writer.add_asset("labels.txt", b"cat, dog")
                writer.finish(model)
        """
        self._require_open()
        item = Item(ASSET_PREFIX + name, open_assets({name: data})[name])
        require_names([*self._assets, item.name])
        with closing_on_error(self):
            write_entries([item], self._zip, ProgressCounter(None, 0))
            self._assets.append(item.name)

    def finish(
        self, model: onnx.ModelProto, models: Mapping[str, onnx.ModelProto] | None = None
    ) -> None:
        """Writes the models and completes the archive.

        In each model, an initializer with the name of an added tensor gets the data of that tensor.
        The initializer may lack data, shape and data type; if it has a data type, its type and
        shape must match the added tensor. An external tensor of a model must have the key of an
        added tensor as its location, and gets the data of that tensor. An added tensor that no
        model uses becomes an initializer of the default model's main graph. Other tensors of the
        models are stored as by `save`.

        Args:
            model: The default model. It is not changed.
            models: Other models by id, as in `save`.

        Raises:
            ArchiveFormatError: An added tensor does not fit a model, or a model breaks a rule.
            ValueError: The writer is closed, or the id of a model is not allowed.
            LockedError: The file that is to be replaced stayed locked for 30 seconds.
            OSError: The archive cannot be written.

        Example:
            with onnxarchive.Writer("new.onnxa") as writer:
                writer.finish(model, {"decoder": decoder})
        """
        self._require_open()
        by_id = with_further_models(model, models)
        require_model_ids(by_id)
        with closing_on_error(self):
            plan = self._plan(by_id)
            write_entries(plan.entries, self._zip, ProgressCounter(None, plan.nbytes))
            self._zip.finish()
            self._replacement.commit()
            self._is_open = False

    def _plan(self, models: Mapping[str, onnx.ModelProto]) -> Plan:
        """Plans the models and the tensors in them; refuses models that a reader would refuse."""
        items: list[Item] = []
        planned: dict[str, PlannedModel] = {}
        unused = dict(self._added)
        shared = SharedEntries() if len(models) > 1 else None
        for identifier, model in sorted(models.items()):
            stored = self._find_added(model)
            planned[identifier] = plan_model(
                Source(model),
                self._options,
                stored=stored,
                assigned=self._keys,
                shared=shared,
            )
            self._fill_in(planned[identifier].model)
            for key in stored.values():
                unused.pop(key, None)
            items += planned[identifier].items
        planned[""].model.graph.initializer.extend(unused.values())
        sizes = self._nbytes | {item.name: item.data.nbytes for item in items}
        by_entry = {model_entry(id): plan.model for id, plan in planned.items()}
        references.check_all_references(by_entry, sizes, Strict())
        return Plan(items, model_items({id: plan.serialize() for id, plan in planned.items()}))

    def close(self) -> None:
        """Discards the archive, unless `finish` has completed it.

        Example:
            writer = onnxarchive.Writer("new.onnxa")
            writer.close()
        """
        if self._is_open:
            self._is_open = False
            self._replacement.close()

    def _require_open(self) -> None:
        if not self._is_open:
            raise ValueError("the writer is closed")

    def _find_added(self, model: onnx.ModelProto) -> dict[Path, str]:
        """The keys of the model's tensors that were added, by path."""
        refs: dict[str, TensorRef] = {}
        for ref in tensors.walk(model):
            key = self._key_of_added(ref)
            if key is None:
                continue
            if key in refs:
                raise ArchiveFormatError(
                    f"{refs[key]} and {ref} both have the data of {self._added[key].name!r}; add a "
                    "tensor for each"
                )
            refs[key] = ref
        return {ref.path: key for key, ref in refs.items()}

    def _key_of_added(self, ref: TensorRef) -> str | None:
        """The key of the added tensor that a tensor of the model uses, or None."""
        if ref.tensor.data_location != tensors.EXTERNAL:
            return self._key_of.get(ref.name) if ref.is_initializer else None
        tensors.require_no_data(ref)
        reference = tensors.external_data(ref, Strict())
        assert reference is not None  # else `Strict` has raised an error
        key = reference.location
        if reference.offset or reference.length not in (None, self._nbytes.get(key)):
            raise ArchiveFormatError(
                f"{ref}: expected all of an added tensor as its external data, found offset "
                f"{reference.offset} and length {reference.length}"
            )
        if key not in self._added:
            raise ArchiveFormatError(
                f"{ref}: expected the key of an added tensor as its location, found {key!r}"
            )
        return key

    def _fill_in(self, model: onnx.ModelProto) -> None:
        """Copies missing data types and shapes from added tensors.

        Raises:
            ArchiveFormatError: An existing data type or shape differs from the added tensor's.
        """
        for ref in tensors.walk(model):
            key = tensors.location(ref.tensor)
            added = self._added.get(key) if key is not None else None
            if added is None:
                continue
            tensor = ref.tensor
            if not tensor.data_type:
                tensor.data_type = added.data_type
                tensor.dims[:] = added.dims
            if (tensor.data_type, list(tensor.dims)) != (added.data_type, list(added.dims)):
                raise ArchiveFormatError(
                    f"{ref}: expected the added tensor to be {_describe(tensor)} as in the model, "
                    f"found {_describe(added)}"
                )


def _describe(tensor: onnx.TensorProto) -> str:
    return f"{dtypes.name_of(tensor.data_type)} of shape {list(tensor.dims)}"
