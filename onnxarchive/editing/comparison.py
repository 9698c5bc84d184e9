"""Compares the models of an edit with those of the archive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

import onnx

from onnxarchive.editing.state import Draft, EditState, is_placeholder
from onnxarchive.errors import ArchiveFormatError, quoted
from onnxarchive.files.data import Bytes, Crc32, Data, are_equal, copy_of
from onnxarchive.files.data_files import spool
from onnxarchive.model import dtypes, tensors
from onnxarchive.model.copying import copied
from onnxarchive.model.tensors import TensorRef, TensorRefs
from onnxarchive.model.walking import Path
from onnxarchive.reading.contents import Contents
from onnxarchive.sources.source import Source, TensorData
from onnxarchive.writing.archive_models import key_of_entry

_LARGE_FIELDS = frozenset({"graph", "functions", "training_info"})


class ModelComparison:
    """A model of the edited archive, compared with the archive's model.

    Attributes:
        origin: As in `Draft`.
        message: The model, which must not be changed.
        old_refs: The tensors of the archive's model that are stored outside it, by key.
        is_changed: False if the model equals the archive's, including all tensors.
        has_other_tensors: False if the tensors are those of the archive's model.
        stored: If it has other tensors, the key of each tensor that keeps an entry, by path.
        others: If it has other tensors, the tensors that do not keep an entry.
        elements: The new bytes of external tensors, by path.
    """

    def __init__(self, changes: EditState, draft: Draft) -> None:
        self._changes = changes
        self._contents = changes.contents
        self.origin = draft.origin
        self.message = draft.message
        self.old_refs = TensorRefs()
        self.stored: dict[Path, str] = {}
        self.others: list[TensorRef] = []
        self.elements: dict[Path, Data] = {}
        before = None
        if draft.origin is not None:
            checked = changes.contents.models[draft.origin]
            before, self.old_refs = checked.model, checked.refs
        # Options that say which tensors are stored outside may move tensors of an equal model.
        options = changes.options.size_threshold, changes.options.convert_attribute
        moves = self.message is not before and options != (None, None)
        is_same = self.message is before or _are_equal(self.message, before)
        self.is_changed = moves or not is_same
        self.has_other_tensors = bool(draft.elements or moves) or not (
            is_same or _have_same_tensors(self.message, before)
        )
        if self.has_other_tensors:
            self._compare_tensors(draft.elements)

    def _compare_tensors(self, elements: Mapping[str, TensorData]) -> None:
        if elements:
            self.message = copied(self.message)  # they may go into it
        refs = [*tensors.walk(self.message)]
        named = Counter(ref.name for ref in refs if ref.is_initializer)
        for name in sorted(elements):
            if named[name] != 1:
                count = "several initializers" if named[name] else "no initializer"
                raise ValueError(
                    f"{self._contents.path}: elements were assigned to "
                    f"edit.tensors[{quoted(name)}], but the model has {count} of this name"
                )
        keys: set[str] = set()
        for ref in refs:
            key = self._key(ref)
            # A key that occurs twice, as in a copy of an initializer, stays with the first tensor:
            # the tensors of one model need different entries (DATA-3).
            if key is None or key in keys:
                self.others.append(ref)
            else:
                self.stored[ref.path] = key
                keys.add(key)
            if ref.is_initializer and ref.name in elements:
                self._assign(ref, elements[ref.name])

    def _key(self, ref: TensorRef) -> str | None:
        """The key of a tensor that may keep its entry, or None."""
        location = tensors.location(ref.tensor)
        if location is None:
            return None
        if ref.is_initializer and tensors.has_data(ref.tensor):
            fields = ", ".join(tensors.data_fields(ref.tensor))
            if fields:
                raise ArchiveFormatError(
                    f"{ref}: there is data beside data_location EXTERNAL, in {fields}; "
                    f"edit.tensors[{quoted(ref.name)}] = array replaces the external data; to keep "
                    f"it, clear {fields}"
                )
        if is_placeholder(location):
            return None
        key = key_of_entry(self._contents, ref)
        options, nbytes = self._changes.options, self._contents.entries[key].nbytes
        is_stored = ref.is_initializer or options.convert_attribute is not False
        return key if is_stored and nbytes >= (options.size_threshold or 0) else None

    def _assign(self, ref: TensorRef, elements: TensorData) -> None:
        """Stores assigned elements, unless the tensor has the same elements already."""
        require_fit(self._contents, ref, elements)
        tensor, data = ref.tensor, elements.data
        location = tensors.location(tensor)
        if location is None:
            if are_equal(Bytes(tensors.raw_data(ref)).pieces(), data.pieces()):
                return
            for name in tensors.DATA_FIELDS:
                tensor.ClearField(name)
            tensors.set_raw_data(tensor, b"".join(data.pieces()))
        elif ref.path in self.stored and has_bytes(self._contents, location, data):
            return
        else:
            self.elements[ref.path] = data
            if tensors.checksum(tensor) is not None:  # of the old bytes
                tensors.set_location(tensor, location)
        self.is_changed = True

    @property
    def keys(self) -> Collection[str]:
        """The keys of the entries that the model uses."""
        return self.stored.values() if self.has_other_tensors else self.old_refs

    def set_apart(self, ref: TensorRef, data: Data, uses: Counter[str]) -> None:
        """Gives a tensor an entry of its own with this data, instead of a shared one."""
        uses[self.stored.pop(ref.path)] -= 1
        self.others.append(ref)
        self.elements[ref.path] = data

    def source(self, without: Collection[Path] = ()) -> Source:
        """The message, and the data of its external tensors except those at the given paths."""
        data = (
            self.elements[ref.path] if ref.path in self.elements else self._changes.data(ref)
            for ref in tensors.external(self.message)
            if ref.path not in without
        )
        return Source(self.message, data)


def _are_equal(model: onnx.ModelProto, before: onnx.ModelProto | None) -> bool:
    """True if two models are equal; graphs, which take longest, are compared last."""
    if before is None:
        return False
    small = [field.name for field in model.DESCRIPTOR.fields if field.name not in _LARGE_FIELDS]
    return all(getattr(model, name) == getattr(before, name) for name in small) and model == before


def _have_same_tensors(model: onnx.ModelProto, before: onnx.ModelProto | None) -> bool:
    """True if two models have equal tensors; then no tensor moves into or out of the model."""
    if before is None:
        return False
    fields = [field.name for field in model.DESCRIPTOR.fields if field.message_type is not None]
    fields.remove("metadata_props")  # most edits change nothing else
    if all(getattr(model, name) == getattr(before, name) for name in fields):
        return True
    return model.graph.initializer == before.graph.initializer and (
        [*tensors.walk_others(model)] == [*tensors.walk_others(before)]
    )


def require_fit(contents: Contents, ref: TensorRef, elements: TensorData) -> None:
    """Refuses elements of another data type or shape than the tensor's by a ValueError."""
    number, dims = ref.tensor.data_type, tuple(ref.tensor.dims)
    if (elements.data_type.number, elements.dims) != (number, dims):
        raise ValueError(
            f"{contents.path}: {ref}: expected {dtypes.name_of(number)} of shape {quoted(dims)}, "
            f"found {elements.data_type.name} of shape {quoted(elements.dims)}"
        )


def has_bytes(contents: Contents, name: str, data: Data) -> bool:
    """True if the archive has an entry of this name with these bytes."""
    entry = contents.entries.get(name)
    if entry is None or entry.nbytes != data.nbytes or Crc32.of(data.pieces()).value != entry.crc32:
        return False
    stored = contents.file.pieces(entry.data_offset, entry.nbytes)
    return are_equal(map(memoryview, stored), data.pieces())


def in_memory(data: Data) -> memoryview:
    """The bytes of data; bytes that are in memory already are not copied."""
    data = data.fetch(0, spool)
    return data.view() if data.position is None else copy_of(data).view()
