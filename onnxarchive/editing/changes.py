"""What an edit changes in models: their messages, tensors and elements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest

import onnx

from onnxarchive.editing.placeholders import Placeholders, is_placeholder
from onnxarchive.errors import ArchiveFormatError, Report, shown
from onnxarchive.files.checksums import Crc32
from onnxarchive.files.data import Data, Stored, are_equal
from onnxarchive.files.progress import Progress
from onnxarchive.model import dtypes, tensors, walking
from onnxarchive.model.copying import copied
from onnxarchive.model.tensors import TensorRef
from onnxarchive.model.walking import Path
from onnxarchive.reading.archive import Archive
from onnxarchive.writing.elements import Elements
from onnxarchive.writing.sharing import type_and_dims
from onnxarchive.writing.stored_entries import entry_data, referred_key


@dataclass(frozen=True, slots=True)
class EditOptions:
    """Options of an edit; see `onnxarchive.edit`."""

    compact: bool = False
    copy: bool = False
    size_threshold: int | None = None
    convert_attribute: bool | None = None
    progress: Progress | None = None


@dataclass(slots=True)
class Draft:
    """A model as an edit will leave it.

    Attributes:
        origin: Id of the model in the archive; None for a model that the edit adds.
        message: The model; None if it is the archive's and was not looked up.
        is_copy: True if `message` is a copy of the archive's model, made for this edit.
        elements: New elements of initializers, by name.
    """

    origin: str | None
    message: onnx.ModelProto | None = None
    is_copy: bool = False
    elements: dict[str, Elements] = field(default_factory=dict)


class ChangedModel:
    """A model of the edited archive, and what changed in it.

    Attributes:
        origin: As in `Draft`.
        message: The model, not to be changed unless `own_message` returned it.
        is_changed: False if the model is the archive's, with all its tensors.
        has_other_tensors: False if the model has the tensors of the archive's.
        stored: If it has other tensors, the key of each that refers to an entry, by path.
        others: If it has other tensors, those that refer to no entry.
        elements: The new bytes of tensors, by path.
    """

    def __init__(self, archive: Archive, draft: Draft, options: EditOptions) -> None:
        self._before = None if draft.origin is None else archive._model_of(draft.origin)
        message = self._before if draft.message is None else draft.message
        assert message is not None
        self.origin = draft.origin
        self.message = message
        self.stored: dict[Path, str] = {}
        self._keys: set[str] = set()  # those in `stored`
        self.others: list[TensorRef] = []
        self.elements: dict[Path, Data] = {}
        self._is_copy = draft.is_copy
        self.is_changed = message is not self._before and message != self._before
        # Options that say which tensors are stored outside may move tensors of an equal model.
        moves = (options.size_threshold, options.convert_attribute) != (None, None)
        self.is_changed = self.is_changed or (moves and draft.message is not None)
        self.has_other_tensors = bool(draft.elements) or (
            self.is_changed and (moves or not _have_same_tensors(message, self._before))
        )
        if self.has_other_tensors:
            missing = {*draft.elements}
            for ref in tensors.walk(message):
                self._take(archive, ref, options)
                if ref.is_initializer and ref.name in draft.elements:
                    if ref.name not in missing:
                        raise _not_one(archive, ref.name, "several")
                    missing.remove(ref.name)
                    self._take_elements(archive, ref, draft.elements[ref.name])
            if missing:
                raise _not_one(archive, min(missing), "none")
            self.is_changed = self.is_changed or bool(self.elements)

    def _take(self, archive: Archive, ref: TensorRef, options: EditOptions) -> None:
        key = tensors.location(ref.tensor)
        if key is not None and ref.is_initializer and tensors.has_data(ref.tensor):
            fields = ", ".join(tensors.data_fields(ref.tensor))
            if fields:
                raise ArchiveFormatError(
                    f"{ref}: expected no data beside data_location EXTERNAL, found {fields}; "
                    f"edit.tensors[{shown(ref.name)}] = array replaces the external data; to keep "
                    f"it, clear {fields}"
                )
        if key is None or is_placeholder(key):
            self.others.append(ref)
            return
        if referred_key(archive, ref) in self._keys or not _is_stored(archive, ref, key, options):
            self.others.append(ref)
        else:
            self.stored[ref.path] = key
            self._keys.add(key)

    def _take_elements(self, archive: Archive, ref: TensorRef, given: Elements) -> None:
        """Takes up assigned elements, unless they are those that the tensor has."""
        require_fit(archive, ref, given)
        key = tensors.location(ref.tensor)
        if key is None:
            is_same = are_equal(Stored(tensors.raw_data(ref)), given.data)
        else:
            is_same = ref.path in self.stored and has_bytes(archive, key, given.data)
        if not is_same:
            self.elements[ref.path] = given.data

    def has_tensors_to_place(self) -> bool:
        """True if a tensor may get an entry, or needs data from elsewhere."""
        for ref in self.others:
            if ref.tensor.data_location == tensors.EXTERNAL or ref.tensor.external_data:
                return True
            if tensors.stored_type(ref.tensor) is not None:
                return True
        return False

    def data(self, placeholders: Placeholders, ref: TensorRef) -> Data:
        """The bytes of an external tensor."""
        data = self.elements.get(ref.path)
        return placeholders.data(ref) if data is None else data

    def own_message(self) -> onnx.ModelProto:
        """The message, to be changed: a copy, unless it was made for this edit."""
        if not self._is_copy:
            self.message, self._is_copy = copied(self.message), True
            self.others = [
                TensorRef(ref.path, walking.at(self.message, ref.path)) for ref in self.others
            ]
        return self.message

    def replace_entries(self, archive: Archive, uses: Counter[str]) -> dict[str, Stored]:
        """Takes the new bytes of entries that no other model uses out of `elements`.

        New elements of tensors in the model are put into the message. `elements` keeps those of
        tensors that need an entry of their own.

        Args:
            archive: The archive.
            uses: The number of models that use an entry, by key. It is updated.

        Returns:
            The new bytes of entries, by key.
        """
        replaced: dict[str, Stored] = {}
        for path, data in list(self.elements.items()):
            tensor = walking.at(self.message, path)
            key = self.stored.get(path)
            if tensor.data_location != tensors.EXTERNAL:
                tensor = walking.at(self.own_message(), path)
                for name in tensors.DATA_FIELDS:
                    tensor.ClearField(name)
                tensors.set_raw_data(tensor, b"".join(data))
            elif key is not None and uses[key] == 1:
                stored = in_memory(data)
                pieces = tensors.checked(TensorRef(path, tensor), stored, Report(), entry=key)
                replaced[key] = Stored(stored.view, Crc32.of(pieces).value)
                if tensors.checksum(tensor) is not None:
                    tensors.set_location(walking.at(self.own_message(), path), key)
            else:
                if key is not None:
                    self.set_apart(path, uses)
                continue
            del self.elements[path]
        return replaced

    def set_apart(self, path: Path, uses: Counter[str]) -> None:
        """Gives a tensor an entry of its own, in place of one that it shares."""
        uses[self.stored.pop(path)] -= 1
        self.others.append(TensorRef(path, walking.at(self.message, path)))


def _is_stored(archive: Archive, ref: TensorRef, key: str, options: EditOptions) -> bool:
    """True unless the options of the edit ask for a tensor in the model instead of in an entry."""
    if options.convert_attribute is False and not ref.is_initializer:
        return False
    return archive.entries[key].nbytes >= (options.size_threshold or 0)


def _have_same_tensors(model: onnx.ModelProto, other: onnx.ModelProto | None) -> bool:
    """True if two models have equal tensors; then no tensor moves into or out of the model."""
    if other is None or model.graph.initializer != other.graph.initializer:
        return False
    pairs = zip_longest(tensors.walk_others(model), tensors.walk_others(other))
    return all(ref == before for ref, before in pairs)


def require_fit(archive: Archive, ref: TensorRef, given: Elements) -> None:
    """Refuses elements of another data type or shape than the tensor's.

    Raises:
        ValueError: The data type or the shape differs.
    """
    number, dims = ref.tensor.data_type, tuple(ref.tensor.dims)
    if (given.data_type.number, given.dims) != (number, dims):
        raise ValueError(
            f"{archive.path}: {ref}: expected {dtypes.name_of(number)} of shape {shown(dims)}, "
            f"found {given.data_type.name} of shape {shown(given.dims)}"
        )


def set_reshaped_apart(
    archive: Archive, models: Iterable[ChangedModel], uses: Counter[str]
) -> None:
    """Sets tensors apart that other models use with another data type or shape (DATA-8)."""
    first: dict[str, object] = {}
    for model in sorted(models, key=lambda model: model.has_other_tensors):
        if not model.has_other_tensors and model.origin is not None:
            refs = archive._refs_of(model.origin).items() if len(uses) < uses.total() else ()
            first |= {key: type_and_dims(ref) for key, ref in refs if uses[key] > 1}
            continue
        for path, key in list(model.stored.items()):
            ref = TensorRef(path, walking.at(model.message, path))
            if uses[key] > 1 and first.setdefault(key, type_and_dims(ref)) != type_and_dims(ref):
                model.elements[path] = entry_data(archive, key)
                model.set_apart(path, uses)


def has_bytes(archive: Archive, name: str, data: Data) -> bool:
    """True if the archive has an entry of this name with these bytes."""
    entry = archive.entries.get(name)
    if entry is None or entry.nbytes != data.nbytes or Crc32.of(data).value != entry.crc32:
        return False
    stored = archive._local_file.pieces(entry.data_offset, entry.nbytes)
    return are_equal(map(memoryview, stored), data)


def in_memory(data: Data) -> Stored:
    """Data in memory; data that is in memory already is not copied."""
    return data if isinstance(data, Stored) else Stored(memoryview(b"".join(data)))


def _not_one(archive: Archive, name: str, number: str) -> ValueError:
    return ValueError(
        f"{archive.path}: expected one initializer named {shown(name)}, whose elements were "
        f"assigned to edit.tensors, found {number}"
    )
