"""`edit`: the one way to change an archive, as one transaction."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import onnx

from onnxarchive.editing.changes import Draft, EditOptions, in_memory, require_fit
from onnxarchive.editing.commit import commit
from onnxarchive.editing.packed_weights import with_packed_weights
from onnxarchive.editing.placeholders import Placeholders
from onnxarchive.editing.recovery import opened_for_edit, roll_back
from onnxarchive.errors import (
    ArchiveError,
    TensorNotFoundError,
    UnsupportedFeatureError,
    shown,
    with_path,
)
from onnxarchive.files import locking
from onnxarchive.files.file_data import FileData
from onnxarchive.files.filesystem import require_no_input
from onnxarchive.files.local_file import MappedFile
from onnxarchive.files.progress import Progress
from onnxarchive.model import dtypes, keys, proto, tensors, walking
from onnxarchive.model.copying import copied
from onnxarchive.model.keys import ASSET_PREFIX
from onnxarchive.reading.archive import Archive
from onnxarchive.reading.contents import MAX_MODEL_NBYTES
from onnxarchive.reading.unfinished import require_finished
from onnxarchive.reading.views import array_in_model, require_model
from onnxarchive.remote.location import Location
from onnxarchive.writing.elements import elements_of
from onnxarchive.writing.options import Asset, WriteOptions
from onnxarchive.writing.plan import open_assets, require_model_ids

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from onnxarchive.editing.placeholders import GivenModel
    from onnxarchive.model.tensors import TensorRef
    from onnxarchive.writing.elements import Elements, Tensor
    from onnxarchive.writing.plan import Item
    from onnxarchive.zipformat.directory import Entry

__all__ = ["Edit", "edit"]


@contextlib.contextmanager
def edit(
    path: str | os.PathLike[str],
    *,
    model: str = "",
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
    weights. A tensor or an asset that is replaced or removed is written to a clone of the file (a
    copy that shares its blocks), or where the file system has no clones, to a new file. Views and
    sessions of the archive keep what they had. A crash leaves the old archive, the new one, or a
    file that `open` refuses until `recover`, or the next edit, has restored the old archive.

    Args:
        path: The archive, a local file.
        model: Id of the model for `Edit.model`, `Edit.metadata` and `Edit.tensors`, such as
            `"decoder"`; `""` for the default one.
        compact: Whether to write the whole archive anew, as `save` does: with tensors in the order
            of the models, with keys derived from their names, and without those that no model uses.
        copy: Whether to write a new file at `path`, also if nothing changed; needed for a symbolic
            link or a file with other hard links, which keep the old content.
        size_threshold: Initializers of this many bytes or more are stored outside a changed model.
            None means the larger of two sizes: that of the largest initializer inside the model as
            it was, plus 1; and that of its smallest external initializer, but at most 1024. Tensors
            other than initializers count, too, if any of them is stored outside. For an added
            model, or with `compact`, the tensors of all models of the archive count.
        convert_attribute: Whether all tensors of `size_threshold` bytes or more are stored outside
            a changed model, not only initializers. None means True if an external tensor of the
            model as it was is not an initializer; for an added model, or with `compact`, of any
            model of the archive.
        max_model_nbytes: Limit in bytes on all models together, before and after the edit.
        timeout: Seconds to wait for the archive's lock; None waits without limit, 0 fails at once.
        progress: Called with the bytes written and the bytes in all; True shows a bar.

    Yields:
        The edit, usable until the block ends.

    Raises:
        ValueError: A tensor of the archive would be unused, and `compact` is false; or `path` is a
            symbolic link or has several hard links, and `copy` is false.
        LockedError: The archive stayed locked until `timeout`, or this thread is editing it.
        ModelNotFoundError: There is no model of the id `model`.
        ArchiveFormatError: The file is not an archive, or the edited one would break a rule.
        ChecksumError: Bytes that are copied do not match their CRC-32.
        ArchiveError: The block ended in a forked process, or in another thread than it began in.
        UnfinishedEditError: Writing failed, and so did restoring the old archive; remove the cause,
            then `recover` restores it.
        UnsupportedFeatureError: The archive is not a local file.
        OSError: The archive or its folder cannot be read or written.

    Example:
        with onnxarchive.edit("model.onnxa") as edit:
            edit.metadata["author"] = "Ada"
            edit.model.graph.node[0].name = "first"
            edit.assets["labels.txt"] = b"cat"
    """
    options = EditOptions(compact, copy, size_threshold, convert_attribute, progress)
    WriteOptions(size_threshold=size_threshold or 0)  # refuses a negative one
    path = Location.of(path).require_local()
    thread = threading.get_ident()
    is_writable = None if copy else True
    with opened_for_edit(path, is_writable=is_writable, timeout=timeout) as file, file:
        if copy:
            require_finished(file)
        else:
            require_one_name(path, file)
            roll_back(file)
        archive = Archive(file, max_model_nbytes, model)
        # Innermost, since an assigned model's file remains open, and would be named instead.
        with contextlib.ExitStack() as resources, with_path(path):
            changes = Edit(archive, resources, timeout)
            resources.callback(changes._end)
            yield changes
            file.require_own()
            if threading.get_ident() != thread:
                raise ArchiveError(
                    "expected the edit to end in the thread that began it, found another thread; "
                    "nothing was written"
                )
            changes._placeholders.require_unchanged()
            assets = with_packed_weights(archive, changes._drafts, changes._items)
            commit(archive, changes._drafts, assets, changes._placeholders, options)


def require_one_name(path: str | os.PathLike[str], file: MappedFile) -> None:
    """Refuses to change a file that has several names.

    Raises:
        ValueError: The file has several hard links, or `path` is a symbolic link.
    """
    names = file.status().st_nlink
    found = None
    if os.path.islink(path):
        found = f"a symbolic link to {os.path.realpath(path)}, a file that others may use"
    elif names > 1:
        found = f"a file with {names} names (hard links), which share the content"
    if found is not None:
        raise ValueError(
            f"{os.fspath(path)}: expected a file with one name, found {found}; copy=True (--copy) "
            "writes a new file at this path instead"
        )


class Edit:
    """The changes of an archive in a block of `onnxarchive.edit`, written when the block ends.

    What is read is what was assigned in the block, or else the archive as it was. An assigned
    `onnx.ModelProto` and contiguous arrays are held, not copied, so their last state is written. An
    edit belongs to the thread that began it. After the block, each use raises a ValueError.

    Example:
        with onnxarchive.edit("model.onnxa") as edit:
            weight = edit.tensors["layer.0/weight"].copy()
            weight[0] = 0
            edit.tensors["layer.0/weight"] = weight
    """

    __slots__ = (
        "_archive",
        "_drafts",
        "_index",
        "_is_open",
        "_items",
        "_messages",
        "_model_id",
        "_placeholders",
    )

    def __init__(
        self, archive: Archive, resources: contextlib.ExitStack, timeout: float | None
    ) -> None:
        self._archive = archive
        self._is_open = True
        self._model_id = archive.model_id
        self._drafts = {identifier: Draft(identifier) for identifier in archive.models}
        self._messages = archive._edited  # all that were looked up or assigned
        self._items: dict[str, Item | None] = {}
        # The initializers of a message by name, as they were when a tensor was last looked up.
        self._index: tuple[object, Mapping[str, list[TensorRef]]] = None, {}
        self._placeholders = Placeholders(archive, resources, timeout)

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Every entry of the archive as it was, by name."""
        return self._current.entries

    @property
    def model(self) -> onnx.ModelProto:
        """The model chosen by `model` of `onnxarchive.edit`, to be changed or assigned.

        It is `models[id]`. Its large tensors are external, and their location stands for an entry,
        or for data of an assigned model. `tensors` replaces their elements. A new initializer holds
        its data in `raw_data`, as `onnx.numpy_helper.from_array` makes it.
        """
        return self.models[self._model_id]

    @model.setter
    def model(self, model: GivenModel) -> None:
        self.models[self._model_id] = model

    @property
    def models(self) -> EditedModels:
        """Every model by id, the default one (`""`) first; items can be assigned and deleted."""
        self._require_open()
        return EditedModels(self)

    @property
    def metadata(self) -> EditedMetadata:
        """The metadata (`metadata_props`) of `model`, by key."""
        self._require_open()
        return EditedMetadata(self)

    @property
    def assets(self) -> EditedAssets:
        """The assets by path: bytes, or on assignment the path of a file."""
        self._require_open()
        return EditedAssets(self)

    @property
    def tensors(self) -> EditedTensors:
        """The initializers of `model` by name, as read-only arrays; assigning replaces elements."""
        self._require_open()
        return EditedTensors(self)

    def __repr__(self) -> str:
        return f"<onnxarchive.Edit {self._archive.path!r}{' (ended)' * (not self._is_open)}>"

    @property
    def _current(self) -> Archive:
        self._require_open()
        return self._archive

    def _require_open(self) -> None:
        if not self._is_open:
            raise ValueError(
                f"{self._archive.path}: this edit has ended; begin another one with "
                "onnxarchive.edit"
            )

    def _end(self) -> None:
        self._is_open = False

    def _draft(self, identifier: str) -> Draft:
        with with_path(self._current.path):
            require_model([*EditedModels(self)], identifier)
        return self._drafts[identifier]

    def _shown_message(self) -> onnx.ModelProto:
        """The chosen model, not to be changed."""
        draft = self._draft(self._model_id)
        if draft.message is not None:
            return draft.message
        return self._archive._model_of(draft.origin or "")


class EditedModels(MutableMapping[str, onnx.ModelProto]):
    """The models of an edit, by id.

    An assigned model replaces the one of this id, or is added. It is an `onnx.ModelProto`, whose
    external tensors are those of the archive; an `onnx_ir.Model`, a `torch.onnx.ONNXProgram`, an
    open archive or the path of a `.onnx` or of an archive, whose tensors are copied when the edit
    is written: until then, the files must not change, and an open archive must stay open.
    Assigning a model of the edit to another id adds a copy of it.
    """

    def __init__(self, edit: Edit) -> None:
        self._edit = edit

    def __getitem__(self, id: str) -> onnx.ModelProto:
        edit = self._edit
        draft = edit._draft(id)
        if draft.message is None:
            assert draft.origin is not None
            draft.message, draft.is_copy = (
                copied(edit._archive._model_of(draft.origin)),
                True,
            )
            edit._messages.append(draft.message)
        return draft.message

    def __setitem__(self, id: str, model: GivenModel) -> None:
        edit = self._edit
        edit._require_open()
        require_model_ids([id])
        old = edit._drafts.get(id, Draft(None))
        if isinstance(model, onnx.ModelProto) and any(model is it for it in edit._messages):
            if model is old.message:
                return
            message = copied(model)
            sources = (draft for draft in edit._drafts.values() if draft.message is model)
            elements = {name: it for draft in sources for name, it in draft.elements.items()}
        else:
            elements = {}
            message = edit._placeholders.message(model, is_new=id not in edit._drafts)
        edit._messages.append(message)
        edit._drafts[id] = Draft(old.origin, message, message is not model, elements)

    def __delitem__(self, id: str) -> None:
        self._require_further(id)
        del self._edit._drafts[id]

    def rename(self, old: str, new: str) -> None:
        """Gives a model another id; `Edit.model` follows.

        Args:
            old: Id of a model other than the default one.
            new: Its new id.

        Raises:
            ModelNotFoundError: There is no model with the id `old`.
            ValueError: `old` is empty, or `new` is not an id or is taken.

        Example:
            with onnxarchive.edit("model.onnxa") as edit:
                edit.models.rename("decoder", "decoder_with_past")
        """
        edit = self._edit
        self._require_further(old)
        if not keys.is_model_id(new) or new in edit._drafts:
            raise ValueError(
                f"{edit._archive.path}: expected an id that no model has, {keys.MODEL_ID}, got "
                f"{new!r}"
            )
        edit._drafts[new] = edit._drafts.pop(old)
        if edit._model_id == old:
            edit._model_id = new

    def _require_further(self, id: str) -> None:
        if id == "":
            raise ValueError(
                f"{self._edit._current.path}: expected the id of a model other than the default "
                "one, got ''; assign another model to replace the default one"
            )
        self._edit._draft(id)

    def __iter__(self) -> Iterator[str]:
        self._edit._require_open()
        return iter(sorted(self._edit._drafts))

    def __len__(self) -> int:
        self._edit._require_open()
        return len(self._edit._drafts)

    def __repr__(self) -> str:
        return f"<models {', '.join(map(repr, self))} of {self._edit._archive.path!r}>"


class EditedMetadata(MutableMapping[str, str]):
    """The metadata of the model of an edit; unchanged items keep their place."""

    def __init__(self, edit: Edit) -> None:
        self._edit = edit

    def __getitem__(self, key: str) -> str:
        return self._pairs()[key]

    def __setitem__(self, key: str, value: str) -> None:
        for text, place in ((key, "a key of metadata"), (value, f"metadata[{key!r}]")):
            if not isinstance(text, str):
                raise TypeError(
                    f"{self._edit._current.path}: expected a string for {place}, found "
                    f"{type(text).__name__}; convert it with str() or json.dumps()"
                )
        if self._pairs().get(key) != value:
            proto.set_metadata(self._edit.model, {**self._pairs(), key: value})

    def __delitem__(self, key: str) -> None:
        pairs = self._pairs()
        del pairs[key]
        proto.set_metadata(self._edit.model, pairs)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pairs())

    def __len__(self) -> int:
        return len(self._pairs())

    def __repr__(self) -> str:
        return repr(self._pairs())

    def _pairs(self) -> dict[str, str]:
        return proto.metadata(self._edit._shown_message())


class EditedAssets(MutableMapping[str, bytes]):
    """The assets of an edit, by path without `assets/`."""

    def __init__(self, edit: Edit) -> None:
        self._edit = edit

    def __getitem__(self, path: str) -> bytes:
        edit = self._edit
        if path not in self:
            raise self._not_found(path)
        item = edit._items.get(ASSET_PREFIX + path)
        return edit._archive.assets[path] if item is None else b"".join(item.data())

    def __setitem__(self, path: str, data: Asset) -> None:
        edit = self._edit
        if isinstance(data, str | os.PathLike):
            require_no_input(edit._current._local_file.absolute_path, [os.fspath(data)])
        elif not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(
                f"{edit._current.path}: expected bytes or the path of a file for the asset "
                f"{shown(path)}, found {type(data).__name__}"
            )
        edit._require_open()
        for item in open_assets({path: data}):
            edit._items[item.name] = item
            if isinstance(file_data := item.data(), FileData):
                edit._placeholders.watch(file_data)

    def __delitem__(self, path: str) -> None:
        if path not in self:
            raise self._not_found(path)
        name = ASSET_PREFIX + path
        if name in self._edit._archive.entries:
            self._edit._items[name] = None
        else:
            del self._edit._items[name]

    def __contains__(self, path: object) -> bool:
        edit = self._edit
        if path in edit._current.assets:
            return edit._items.get(f"{ASSET_PREFIX}{path}", path) is not None
        return f"{ASSET_PREFIX}{path}" in edit._items

    def __iter__(self) -> Iterator[str]:
        edit = self._edit
        items = {ASSET_PREFIX + path: True for path in edit._current.assets}
        items |= {name: item is not None for name, item in edit._items.items()}
        return iter(
            [name.removeprefix(ASSET_PREFIX) for name, is_there in items.items() if is_there]
        )

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"<{len(self)} assets of {self._edit._archive.path!r}>"

    def _not_found(self, path: str) -> TensorNotFoundError:
        contents = self._edit._current.contents
        return contents.not_found(f"expected the path of an asset, found {shown(path)}")


class EditedTensors(MutableMapping[str, "NDArray[Any]"]):
    """The initializers of the model of an edit, by name.

    A new array must have the tensor's data type and shape. It may be anything that
    `onnxarchive.Writer.add` takes. If several models share the tensor, only this model's changes.
    """

    def __init__(self, edit: Edit) -> None:
        self._edit = edit

    def __getitem__(self, name: str) -> NDArray[Any]:
        edit, given = self._edit, self._given.get(name)
        if given is None and self._message is None:
            return edit._archive.tensors[name]
        ref = self._ref(name)
        if given is not None:
            view = in_memory(given.data).view.toreadonly()
            return dtypes.as_array(view, given.data_type, given.dims)
        with with_path(edit._archive.path):
            if tensors.location(ref.tensor) is None:
                return array_in_model(ref)
            view = in_memory(edit._placeholders.data(ref)).view
            return dtypes.as_array(view, tensors.external_type(ref), ref.tensor.dims)

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        ref = self._ref(name)
        if ref.tensor.data_type == onnx.TensorProto.STRING:
            raise UnsupportedFeatureError(
                f"{ref}: expected a tensor of a type that ONNX can store outside a model, found "
                "STRING; change `string_data` in edit.model"
            )
        given = elements_of(name, tensor)
        require_fit(self._edit._archive, ref, given)
        self._given[name] = given

    def __delitem__(self, name: str) -> None:
        raise TypeError(
            f"{self._edit._current.path}: tensors cannot be deleted one by one; remove the "
            "initializer from edit.model, with compact=True"
        )

    def __contains__(self, name: object) -> bool:
        return name in (self._edit._archive.tensors if self._message is None else self._refs())

    def __iter__(self) -> Iterator[str]:
        if self._message is None:
            return iter(self._edit._archive.tensors)
        return iter([name for name, refs in self._refs().items() if len(refs) == 1])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"<{len(self)} tensors of {self._edit._archive.path!r}>"

    @property
    def _given(self) -> dict[str, Elements]:
        return self._edit._draft(self._edit._model_id).elements

    @property
    def _message(self) -> onnx.ModelProto | None:
        """The model of the edit; None if it is the archive's."""
        return self._edit._draft(self._edit._model_id).message

    def _refs(self) -> Mapping[str, list[TensorRef]]:
        """The initializers of `_message`, by name."""
        assert self._message is not None
        refs: dict[str, list[TensorRef]] = {}
        for ref in tensors.walk(self._message):
            if ref.is_initializer:
                refs.setdefault(ref.name, []).append(ref)
        self._edit._index = self._message, refs
        return refs

    def _ref(self, name: str) -> TensorRef:
        """The initializer of this name, in the archive's model or in the one that replaced it.

        Raises:
            TensorNotFoundError: No initializer has this name, or several have it.
        """
        edit, message = self._edit, self._message
        if message is None:
            return edit._archive.tensors.ref(name)
        indexed, refs = edit._index
        named = refs.get(name, []) if indexed is message else []
        if not (named and all(_is_at(message, ref) for ref in named)):
            named = self._refs().get(name, [])
        if len(named) != 1:
            raise edit._archive.contents.not_found(
                f"expected one initializer named {shown(name)}, found {len(named)}"
            )
        return named[0]


def _is_at(message: onnx.ModelProto, ref: TensorRef) -> bool:
    """True if an initializer still has its path in a model, and its name."""
    try:
        return walking.at(message, ref.path) is ref.tensor and ref.tensor.name == ref.name
    except IndexError:
        return False
