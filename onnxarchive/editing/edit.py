"""`edit`: the one way to change an archive, as one transaction."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import onnx

from onnxarchive.editing.commit import commit
from onnxarchive.editing.comparison import in_memory, require_fit
from onnxarchive.editing.recover import opened_for_edit, roll_back
from onnxarchive.editing.state import Draft, EditOptions, EditState
from onnxarchive.errors import ArchiveError, UnsupportedFeatureError, quoted, with_path
from onnxarchive.files import locking
from onnxarchive.files.local_file import MappedFile
from onnxarchive.files.paths import require_no_input
from onnxarchive.files.progress import Progress
from onnxarchive.model import dtypes, keys, model_proto, tensors, walking
from onnxarchive.model.copying import copied
from onnxarchive.model.keys import PACKED_PREFIX
from onnxarchive.model.prepacked import unused_nbytes, warn_of_sets
from onnxarchive.reading.archive import contents_of, open, read_archive
from onnxarchive.reading.archive_file import require_finished
from onnxarchive.reading.contents import MAX_MODEL_NBYTES
from onnxarchive.reading.views import array_in_model
from onnxarchive.remote.location import Location
from onnxarchive.writing.options import Asset, require_size_threshold
from onnxarchive.writing.plan import open_assets, require_model_ids
from onnxarchive.writing.tensor_data import elements_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from onnxarchive.editing.state import AssignedModel
    from onnxarchive.model.tensors import TensorRef
    from onnxarchive.sources.source import TensorData
    from onnxarchive.writing.tensor_data import Tensor
    from onnxarchive.zipformat.directory import Entry

__all__ = ["Edit", "edit"]

_Value = TypeVar("_Value")


@contextlib.contextmanager
def edit(
    path: str | os.PathLike[str],
    *,
    model: str | None = None,
    compact: bool = False,
    copy: bool = False,
    size_threshold: int | None = None,
    convert_attribute: bool | None = None,
    max_model_nbytes: int = MAX_MODEL_NBYTES,
    timeout: float | None = locking.TIMEOUT,
    progress: Progress | None = None,
) -> Iterator[Edit]:
    """Changes an archive: the changes of a `with` block are written when the block ends.

    All changes are written or none, even in a crash; an exception in the block discards them. If
    nothing changed, nothing is written. An edit that a crash interrupted before is rolled back
    first. While the block runs, the archive is locked: other threads and processes wait, and this
    thread cannot open it a second time.

    Existing entries keep their offsets and keys, and only the end of the file is written: new
    tensors and assets, models and directory. So the time does not depend on the size of the
    weights. There are two exceptions. If a tensor or an asset is replaced or removed, the edit
    writes a clone of the file (a copy that shares its blocks), or a new file if the file system has
    no clones. If a model is removed whose tensors no other model uses, the whole archive is written
    anew, as with `compact`.

    Views and sessions of the archive keep their data. A crash leaves the old archive, the new one,
    or a file that `open` refuses until `recover`, or the next edit, has restored the old archive.

    Args:
        path: The archive, a local file.
        model: Id of the model for `Edit.model`, `Edit.metadata` and `Edit.tensors`, such as
            `"decoder"`; None for the default one.
        compact: Whether to write the whole archive anew, as `save` does: with tensors in the order
            of the models, with keys derived from their names, and without tensors that no model
            uses.
        copy: Whether to write a new file at `path`, even if nothing changed. Needed for a symbolic
            link or a file with other hard links, which keep the old content.
        size_threshold: As in `save`, for changed models. None means a threshold that moves no
            tensor out of the model as it was, and as few as possible into it: the size of its
            smallest external initializer, but at most 1024, and more than the size of every
            initializer that it holds. If any other tensor is external, such as that of an
            attribute, all tensors count. For an added model, or with `compact`, the tensors of all
            models of the archive count.
        convert_attribute: As in `save`, for changed models. None means True if an external tensor
            of these models is not an initializer.
        max_model_nbytes: Limit in bytes on all models together, before and after the edit.
        timeout: Seconds to wait for the archive's lock; None waits without limit, 0 not at all.
        progress: As in `save`.

    Yields:
        The edit, usable until the block ends.

    Raises:
        ValueError: No model uses a tensor any more, and `compact` is false; or `path` is a symbolic
            link or has several hard links, and `copy` is false.
        LockedError: The archive stayed locked until `timeout`, or this thread is editing it. On
            Windows also: the file has to be replaced or shortened while this process has it open
            elsewhere, or another program changed it when it was closed to be replaced.
        ModelNotFoundError: There is no model of the id `model`.
        ArchiveFormatError: The file is not an archive, or the edited one would break a rule.
        ChecksumError: Bytes that are copied do not match their CRC-32.
        ArchiveError: The block ended in a forked process, or in another thread than it began in; or
            another program replaced or removed the file meanwhile.
        UnfinishedEditError: Writing failed, and so did restoring the old archive. Remove the cause;
            then `recover` restores it.
        UnsupportedFeatureError: The archive is not a local file.
        OSError: The archive or its folder cannot be read or written. On Windows, another process
            may have it open.

    Warns:
        UserWarning: With `compact`, or after a model was removed, the archive still has weights
            that `onnxarchive.prepack` packed for models that it no longer has; the warning says how
            many bytes.

    Example:
        with onnxarchive.edit("model.onnxa") as edit:
            edit.metadata["author"] = "Ada"
            edit.model.graph.node[0].name = "first"
            edit.assets["labels.txt"] = b"cat"
    """
    options = EditOptions(compact, copy, size_threshold, convert_attribute, timeout, progress)
    require_size_threshold(size_threshold or 0)
    path = Location.of(path).require_local()
    thread = threading.get_ident()
    is_writable = None if copy else True
    with opened_for_edit(path, is_writable=is_writable, timeout=timeout) as file, file:
        if copy:
            require_finished(file)
        else:
            _require_one_name(path, file)
            roll_back(file)
        if os.name == "nt":  # which neither replaces nor shortens a mapped file
            file.avoid_maps()
        archive = read_archive(file, model, max_model_nbytes)
        # `with_path` is innermost: errors name this path, not the open file of an assigned model.
        with contextlib.ExitStack() as resources, with_path(path):
            changes = EditState(archive, options, resources)
            resources.callback(changes.end)
            yield Edit(changes)
            file.refuse_fork()
            if threading.get_ident() != thread:
                raise ArchiveError(
                    "the edit ended in another thread than the one that began it; nothing was "
                    "written: end it in the same thread"
                )
            if not file.is_at(file.absolute_path):
                raise ArchiveError(
                    "the file was replaced or removed during the edit, by a program that ignores "
                    "the lock; nothing was written: edit the new file"
                )
            commit(changes)
            has_packed = any(name.startswith(PACKED_PREFIX) for name in archive.entries)
            may_leave_unused = has_packed and (compact or changes.removes_model)
    if may_leave_unused:
        _warn_of_unused(path, max_model_nbytes)


def _warn_of_unused(path: str, max_model_nbytes: int) -> None:
    """Warns of packed weights that no model of the edited archive uses."""
    faults: list[str] = []
    try:
        with open(path, max_model_nbytes=max_model_nbytes, timeout=0) as archive:
            models = contents_of(archive).models.values()
            nbytes = unused_nbytes(models, archive.entries, archive.read, faults)
    except (ArchiveError, OSError):
        return  # others have changed the file since; the edit itself is written
    warn_of_sets(path, faults)
    if nbytes:
        warnings.warn(
            f"{path}: {nbytes} bytes of packed weights stay that no model has any more; "
            "onnxarchive.prepack replaces those of this kind of machine, 'onnxarchive prepack "
            "--remove' removes all packed weights",
            stacklevel=4,
        )


def _require_one_name(path: str | os.PathLike[str], file: MappedFile) -> None:
    """Refuses to change a symbolic link, or a file that has several hard links."""
    if os.path.islink(path):
        kind = f"a symbolic link to {os.path.realpath(path)}, a file that others may use"
    elif (names := file.status().st_nlink) > 1:
        kind = f"a file with {names} names (hard links), which share the content"
    else:
        return
    raise ValueError(
        f"{os.fspath(path)}: this is {kind}; copy=True (--copy) writes a new file at this path "
        "instead"
    )


class Edit:
    """The changes of an archive in a block of `onnxarchive.edit`, written when the block ends.

    Reading returns assigned values, otherwise the archive's. An assigned `onnx.ModelProto` and
    contiguous arrays are not copied: changes made to them before the block ends are written, too.
    An edit belongs to the thread that began it. After the block, only `nbytes_written` can be used;
    anything else raises a ValueError.

    Example:
        with onnxarchive.edit("model.onnxa") as edit:
            weight = edit.tensors["layer.0/weight"].copy()
            weight[0] = 0
            edit.tensors["layer.0/weight"] = weight
    """

    __slots__ = ("_changes",)

    def __init__(self, changes: EditState) -> None:
        self._changes = changes

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Every entry by name, as before the edit."""
        return self._changes.require_open().archive.entries

    @property
    def model(self) -> onnx.ModelProto:
        """The model chosen by `model` of `onnxarchive.edit`, to be changed or assigned.

        It is `models[id]`. Its large tensors are external; their location is a key or a
        placeholder: do not change it. `tensors` replaces their elements. A new initializer holds
        its data in `raw_data`, as `onnx.numpy_helper.from_array` makes it.
        """
        return self.models[self._changes.model_id]

    @model.setter
    def model(self, model: AssignedModel) -> None:
        self.models[self._changes.model_id] = model

    @property
    def models(self) -> EditedModels:
        """Every model by id, the default one (`""`) first; items can be assigned and deleted.

        An assigned model replaces the model of this id, or is added. It may be:

        - an `onnx.ModelProto`; its external tensors must be those of the archive,
        - an `onnx_ir.Model`, a `torch.onnx.ONNXProgram`, an open archive, or the path of a `.onnx`
          or of an archive. Their tensors are copied when the edit is written: until then, the files
          must not change, and an open archive must stay open.

        Assigning a model of the edit to another id adds a copy of it. `rename(old, new)` gives a
        model other than the default one a new id, which no model has; `Edit.model` follows.
        """
        return EditedModels(self._changes.require_open())

    @property
    def metadata(self) -> EditedMetadata:
        """The metadata (`metadata_props`) of `model` by key; items can be assigned and deleted.

        Unchanged items keep their place.
        """
        return EditedMetadata(self._changes.require_open())

    @property
    def assets(self) -> EditedAssets:
        """The assets by path without `assets/`, as bytes; items can be assigned and deleted.

        An assigned asset is its bytes, or the path of a file that must not change until the block
        ends.
        """
        return EditedAssets(self._changes.require_open())

    @property
    def tensors(self) -> EditedTensors:
        """The initializers of `model` by name, as read-only arrays; assigning replaces elements.

        A new array must have the tensor's data type and shape. It may be anything that `Writer.add`
        takes. If several models share the tensor, only this model's changes. Items cannot be
        deleted.
        """
        return EditedTensors(self._changes.require_open())

    @property
    def nbytes_written(self) -> int:
        """The bytes of the file that the edit wrote; 0 before the block ends, and without a change.

        In a clone, only the new bytes count; an undo log does not count.
        """
        return self._changes.nbytes_written

    def __repr__(self) -> str:
        path = self._changes.archive.path
        state = "" if self._changes.is_open else " (ended)"
        return f"<onnxarchive.Edit {path!r}{state}>"


class _EditedMapping(MutableMapping[str, _Value]):
    def __init__(self, changes: EditState) -> None:
        self._all_changes = changes

    @property
    def _changes(self) -> EditState:
        return self._all_changes.require_open()

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        kind = type(self).__name__.removeprefix("Edited").lower()
        return f"<{len(self)} {kind} of {self._changes.archive.path!r}>"


class EditedModels(_EditedMapping[onnx.ModelProto]):
    """The models of an edit, by id; see `Edit.models`."""

    def __getitem__(self, id: str) -> onnx.ModelProto:
        changes = self._changes
        draft, own = changes.draft(id), changes.contents.edited
        if not any(draft.message is message for message in own):
            draft.message = copied(draft.message)
            own.append(draft.message)
        return draft.message

    def __setitem__(self, id: str, model: AssignedModel) -> None:
        changes = self._changes
        require_model_ids([id])
        old = changes.drafts.get(id)
        own = changes.contents.edited
        elements: dict[str, TensorData] = {}
        if isinstance(model, onnx.ModelProto) and any(model is message for message in own):
            if old is not None and model is old.message:
                return
            for draft in changes.drafts.values():
                if draft.message is model:
                    elements |= draft.elements
            message = copied(model)
        else:
            message = changes.message(model, is_new=old is None)
        own.append(message)
        origin = None if old is None else old.origin
        changes.drafts[id] = Draft(message, origin, elements)

    def __delitem__(self, id: str) -> None:
        self._require_further(id)
        del self._changes.drafts[id]

    def rename(self, old: str, new: str) -> None:
        """Gives a model other than the default one a new id, which no model has.

        `Edit.model` follows.
        """
        changes = self._changes
        self._require_further(old)
        if not keys.is_model_id(new):
            raise ValueError(
                f"{changes.archive.path}: expected {keys.MODEL_ID} as the new id, got {new!r}"
            )
        if new in changes.drafts:
            raise ValueError(
                f"{changes.archive.path}: there is a model with the id {new!r}; choose another id"
            )
        changes.drafts[new] = changes.drafts.pop(old)
        if changes.model_id == old:
            changes.model_id = new

    def _require_further(self, id: str) -> None:
        if id == "":
            raise ValueError(
                f"{self._changes.archive.path}: the default model, '', is neither removed nor "
                "renamed; assign another model to replace it"
            )
        self._changes.draft(id)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._changes.drafts))

    def __repr__(self) -> str:
        return f"<models {', '.join(map(repr, self))} of {self._changes.archive.path!r}>"


class EditedMetadata(_EditedMapping[str]):
    """The metadata of the model of an edit; see `Edit.metadata`."""

    def __getitem__(self, key: str) -> str:
        return self._pairs()[key]

    def __setitem__(self, key: str, value: str) -> None:
        for text, role in ((key, "a key of metadata"), (value, f"metadata[{key!r}]")):
            if not isinstance(text, str):
                raise TypeError(
                    f"{self._changes.archive.path}: expected a string for {role}, found "
                    f"{type(text).__name__}; convert it with str() or json.dumps()"
                )
        pairs = self._pairs()
        if pairs.get(key) != value:
            self._set(pairs | {key: value})

    def __delitem__(self, key: str) -> None:
        pairs = self._pairs()
        del pairs[key]
        self._set(pairs)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pairs())

    def __repr__(self) -> str:
        return repr(self._pairs())

    def _pairs(self) -> dict[str, str]:
        changes = self._changes
        return model_proto.metadata(changes.draft(changes.model_id).message)

    def _set(self, pairs: dict[str, str]) -> None:
        changes = self._changes
        model_proto.set_metadata(EditedModels(changes)[changes.model_id], pairs)


class EditedAssets(_EditedMapping[bytes]):
    """The assets of an edit, by path without `assets/`; see `Edit.assets`."""

    def __getitem__(self, path: str) -> bytes:
        self._require(path)
        return b"".join(self._changes.assets[path].pieces())

    def __setitem__(self, path: str, data: Asset) -> None:
        changes = self._changes
        if isinstance(data, str | os.PathLike):
            require_no_input(changes.file.absolute_path, [Location.of(data).require_local()])
        changes.assets |= open_assets({path: data}, changes.files)
        changes.watch(changes.assets[path])

    def __delitem__(self, path: str) -> None:
        self._require(path)
        del self._changes.assets[path]

    def __contains__(self, path: object) -> bool:
        return path in self._changes.assets

    def __iter__(self) -> Iterator[str]:
        return iter([*self._changes.assets])

    def _require(self, path: str) -> None:
        if path not in self:
            message = f"there is no asset {quoted(path)}"
            raise self._changes.contents.not_found(message, path, self)


class EditedTensors(_EditedMapping["NDArray[Any]"]):
    """The initializers of the model of an edit, by name; see `Edit.tensors`."""

    def __getitem__(self, name: str) -> NDArray[Any]:
        changes, ref = self._changes, self._ref(name)
        elements = self._draft.elements.get(name)
        if elements is not None:
            view = in_memory(elements.data).toreadonly()
            return dtypes.as_array(view, elements.data_type, elements.dims)
        with with_path(changes.archive.path):
            if tensors.location(ref.tensor) is None:
                return array_in_model(ref)
            view = in_memory(changes.data(ref))
            return dtypes.as_array(view, tensors.external_type(ref), ref.tensor.dims)

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        ref = self._ref(name)
        if ref.tensor.data_type == onnx.TensorProto.STRING:
            raise UnsupportedFeatureError(
                f"{ref}: expected a tensor of a type that ONNX can store outside a model, found "
                "STRING; change `string_data` in edit.model"
            )
        elements = elements_of(name, tensor)
        require_fit(self._changes.contents, ref, elements)
        self._draft.elements[name] = elements

    def __delitem__(self, name: str) -> None:
        raise TypeError(
            f"{self._changes.archive.path}: tensors cannot be deleted one by one; remove the "
            "initializer from edit.model, with compact=True"
        )

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and len(self._refs(name)) == 1

    def __iter__(self) -> Iterator[str]:
        return iter([name for name, refs in self._new_index().items() if len(refs) == 1])

    @property
    def _draft(self) -> Draft:
        return self._changes.draft(self._changes.model_id)

    def _new_index(self) -> dict[str, list[TensorRef]]:
        draft = self._draft
        draft.index = {}
        for ref in tensors.walk(draft.message):
            if ref.is_initializer:
                draft.index.setdefault(ref.name, []).append(ref)
        return draft.index

    def _refs(self, name: str) -> Sequence[TensorRef]:
        """The initializers of this name; rebuilds the index if it may be out of date."""
        draft = self._draft
        refs = draft.index.get(name, ())
        is_current = all(_is_at(draft.message, ref) and ref.name == name for ref in refs)
        return refs if refs and is_current else self._new_index().get(name, ())

    def _ref(self, name: str) -> TensorRef:
        refs = self._refs(name)
        if len(refs) != 1:
            count = f"{len(refs)} initializers have" if refs else "no initializer has"
            raise self._changes.contents.not_found(
                f"{count} the name {quoted(name)}",
                name,
                self._draft.index if not refs else (),
            )
        return refs[0]


def _is_at(model: onnx.ModelProto, ref: TensorRef) -> bool:
    """True if an initializer still has its path in a model."""
    with contextlib.suppress(IndexError):
        return walking.at(model, ref.path) is ref.tensor
    return False
