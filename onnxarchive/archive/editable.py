"""`EditableArchive`: an open archive that can be edited; see `editing`."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from functools import partial
from typing import TYPE_CHECKING, Any

import onnx

from onnxarchive.archive.contents import MAX_MODEL_NBYTES
from onnxarchive.archive.editing import require_one_name
from onnxarchive.archive.entry_edits import write_assets, write_tensor
from onnxarchive.archive.options import Asset
from onnxarchive.archive.reading import Archive
from onnxarchive.archive.recovery import opened_for_edit, roll_back
from onnxarchive.archive.rewriting import (
    EditOptions,
    GivenModel,
    write_model,
    write_renamed,
    write_without,
)
from onnxarchive.archive.snapshot import Snapshot
from onnxarchive.buffers.counting import Progress
from onnxarchive.errors import ArchiveError, LockedError, shown, with_path
from onnxarchive.model import proto, renaming, tensors
from onnxarchive.model.copying import copied
from onnxarchive.model.keys import model_entry
from onnxarchive.storage import locking
from onnxarchive.storage.files import MappedFile, require_process

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

_MAX_COMPARED_NBYTES = 64 << 20  # `close` compares only smaller models with the file

__all__ = ["EditableArchive", "Metadata"]


class _Text:
    """A text field of an archive's model; assigning it changes the archive."""

    def __set_name__(self, owner: type[EditableArchive], name: str) -> None:
        self._name = name

    def __get__(self, archive: EditableArchive, owner: type[EditableArchive]) -> str:
        return tensors.text(getattr(archive.model, self._name))

    def __set__(self, archive: EditableArchive, value: str) -> None:
        _require_text(archive, self._name, value)
        with archive.edit() as model:
            model.ClearField(self._name)  # an empty text is stored as an absent field
            if value:
                setattr(model, self._name, value)


class EditableArchive(Archive):
    """An archive that can be edited, returned by `open` with mode `"r+"`.

    Assigning `model`, an item of `metadata` or a text such as `doc_string` changes the file at
    once, like `replace_model`; assignments in an `edit` block are written together when the block
    ends. A change is made completely or not at all, even in a crash. After a change this object
    shows the new state; earlier views do not change. The file is locked while it is opened and
    during each change.

    Several threads may use one archive: while one thread edits, the others read the state before
    the edit. A forked process may read, but not edit.

    A method with the name of a public function, such as `replace_tensor`, works like the function
    and raises the same errors; `edit` and `rename` raise the errors of `onnxarchive.replace_model`.
    In an `edit` block, the methods that change the archive raise a `LockedError`, except `edit` and
    `rename`.

    Example:
        with onnxarchive.open("model.onnxa", mode="r+") as archive:
            archive.metadata["author"] = "Ada"
            with archive.edit() as model:
                model.graph.node[0].name = "first"
                archive.doc_string = "A small model"
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        max_model_nbytes: int = MAX_MODEL_NBYTES,
        timeout: float | None = locking.TIMEOUT,
        model: str = "",
    ) -> None:
        """Opens the archive at `path`; an interrupted edit is rolled back first."""
        self._process = os.getpid()
        self._editor = threading.RLock()  # held by the thread that edits
        self._writing = threading.RLock()  # held while the file is edited and read anew
        # Per thread: `is_editing`; in an `edit` block also the block's `model` and the asyncio
        # `task` that entered the block.
        self._draft = threading.local()
        self._shown: onnx.ModelProto | None = None  # last result of `model` outside of blocks
        with opened_for_edit(path, is_writable=None, timeout=timeout) as file:
            roll_back(file)
            super().__init__(file, max_model_nbytes, model)

    @classmethod
    def _reopened(cls, path: str, max_model_nbytes: int, model: str) -> EditableArchive:
        return cls(path, max_model_nbytes, model=model)

    @property
    def model(self) -> onnx.ModelProto:
        """The model; its large tensors are external, with their keys as location.

        In an `edit` block this is the model that will be written. Outside of a block, assign a
        changed model to this property; otherwise the changes are lost. `close` warns of lost
        changes in a model below 64 MiB.
        """
        model = self._drafted
        if model is None:
            self._shown = model = super().model
        return model

    @model.setter
    def model(self, model: onnx.ModelProto) -> None:
        drafted = self._drafted
        if drafted is None:
            self.replace_model(model)
        else:
            drafted.CopyFrom(model)  # the block will write `drafted`

    @property
    def metadata(self) -> Metadata:
        """The model's metadata; assigning or deleting items changes the archive."""
        return Metadata(self)

    # Texts of the model; assigning one changes the archive.
    doc_string = _Text()
    domain = _Text()
    producer_name = _Text()  # of the tool that made the model
    producer_version = _Text()

    @contextlib.contextmanager
    def edit(
        self, *, compact: bool = False, copy: bool = False, timeout: float | None = locking.TIMEOUT
    ) -> Iterator[onnx.ModelProto]:
        """Collects changes of the model, and writes them as one edit when the block ends.

        The archive is locked while the block runs: `open` in other threads and processes waits.
        In the block, `model`, `metadata` and the texts, such as `doc_string`, show and change the
        model that will be written; `tensors`, `models`, `entries` and `assets` show the archive as
        it is. An exception discards all changes; a block without changes writes nothing. An inner
        block is part of the outer one. Other threads and asyncio tasks see the state before the
        block; an edit by another thread waits, an edit by another task raises a `LockedError`. But
        a block entered outside of a task is shared by all tasks of its thread.

        Args:
            compact: As in `onnxarchive.replace_model`.
            copy: As in `onnxarchive.replace_model`.
            timeout: As in `onnxarchive.replace_model`.

        Yields:
            A copy of the model, to change in the block.

        Raises:
            ArchiveError: Another object or program has changed the archive since it was opened.
            ValueError: An inner block is given arguments.

        Example:
            with onnxarchive.open("model.onnxa", "r+") as archive:
                with archive.edit() as model:
                    model.graph.name = "renamed"
        """
        if self._drafted is not None:
            if compact or copy or timeout != locking.TIMEOUT:
                raise ValueError("give compact, copy and timeout to the outer block of edit()")
            yield self._drafted
            return
        with self._locked(timeout, copy=copy) as current:
            self._draft.task = _running_task()
            changed = self._draft.model = copied(current.model)
            try:
                yield changed
            finally:
                del self._draft.model, self._draft.task
            require_process(self._process)  # a process forked in the block gets here, too
            if changed != current.model:
                options = EditOptions(compact=compact, copy=copy)
                self._write(partial(write_model, current, changed, options))

    def rename(
        self,
        *,
        inputs: Mapping[str, str] | None = None,
        outputs: Mapping[str, str] | None = None,
        compact: bool = False,
        copy: bool = False,
        timeout: float | None = locking.TIMEOUT,
    ) -> None:
        """Renames inputs and outputs of the main graph, and all their uses.

        Args:
            inputs: The new name of each input to rename, by the old name.
            outputs: The new name of each output to rename, by the old name.
            compact: As in `onnxarchive.replace_model`.
            copy: As in `onnxarchive.replace_model`.
            timeout: As in `onnxarchive.replace_model`.

        Raises:
            ValueError: An old name does not exist, or a new one is taken.

        Example:
            with onnxarchive.open("model.onnxa", "r+") as archive:
                archive.rename(inputs={"x": "tokens"})
        """
        with self.edit(compact=compact, copy=copy, timeout=timeout) as model:
            self.model = renaming.renamed(model, inputs or {}, outputs or {})

    def replace_model(
        self,
        model: GivenModel,
        *,
        name: str | None = None,
        compact: bool = False,
        copy: bool = False,
        size_threshold: int | None = None,
        convert_attribute: bool | None = None,
        timeout: float | None = locking.TIMEOUT,
        progress: Progress | None = None,
    ) -> None:
        """Replaces or adds a model.

        Args:
            model: As in `onnxarchive.replace_model`.
            name: Id of the model; None for the model chosen in `open`.
            compact: As in `onnxarchive.replace_model`.
            copy: As in `onnxarchive.replace_model`.
            size_threshold: As in `onnxarchive.replace_model`.
            convert_attribute: As in `onnxarchive.replace_model`.
            timeout: As in `onnxarchive.replace_model`.
            progress: Called with the bytes written and the bytes in all; True shows a bar.

        Raises:
            ArchiveError: Another object or program has changed the archive since it was opened.

        Example:
            with onnxarchive.open("model.onnxa", "r+") as archive:
                archive.replace_model("decoder.onnx", name="decoder")
        """
        options = EditOptions(compact, copy, size_threshold, convert_attribute, progress)
        with self._locked(timeout, copy=copy) as current:
            self._write(partial(write_model, current, model, options, name))

    def remove_model(
        self,
        name: str,
        *,
        compact: bool = False,
        copy: bool = False,
        timeout: float | None = locking.TIMEOUT,
        progress: Progress | None = None,
    ) -> None:
        """Removes a model other than the default one.

        Args:
            name: Id of the model.
            compact: As in `onnxarchive.replace_model`.
            copy: As in `onnxarchive.replace_model`.
            timeout: As in `onnxarchive.replace_model`.
            progress: Called with the bytes written and the bytes in all; True shows a bar.

        Raises:
            ArchiveError: Another object or program has changed the archive since it was opened.
            ValueError: `name` is the model chosen in `open`.

        Example:
            with onnxarchive.open("model.onnxa", "r+") as archive:
                archive.remove_model("decoder")
        """
        if name and name == self.model_id:
            raise ValueError(
                f"{self.path}: the model {name!r} is open and cannot be removed; open the archive "
                "with model='' to remove it"
            )
        options = EditOptions(compact=compact, copy=copy, progress=progress)
        with self._locked(timeout, copy=copy) as current:
            self._write(partial(write_without, current, name, options))

    def rename_model(
        self, old: str, new: str, *, copy: bool = False, timeout: float | None = locking.TIMEOUT
    ) -> None:
        """Changes the id of a model other than the default one.

        Args:
            old: Id of the model.
            new: Its new id.
            copy: As in `onnxarchive.replace_model`.
            timeout: As in `onnxarchive.replace_model`.

        Raises:
            ArchiveError: Another object or program has changed the archive since it was opened.

        Example:
            with onnxarchive.open("model.onnxa", "r+") as archive:
                archive.rename_model("decoder", "decoder_with_past")
        """
        with self._locked(timeout, copy=copy) as current:
            write = partial(write_renamed, current, old, new, EditOptions(copy=copy))
            self._write(write, new if old == self.model_id else None)

    def replace_tensor(
        self,
        name: str,
        array: ArrayLike,
        *,
        copy: bool = False,
        timeout: float | None = locking.TIMEOUT,
        progress: Progress | None = None,
    ) -> None:
        """Replaces the elements of an initializer.

        Args:
            name: Name of the initializer.
            array: Its new elements, of the same shape and data type.
            copy: As in `onnxarchive.replace_model`.
            timeout: As in `onnxarchive.replace_model`.
            progress: Called with the bytes written and the bytes in all; True shows a bar.

        Raises:
            ArchiveError: Another object or program has changed the archive since it was opened.

        Example:
            with onnxarchive.open("model.onnxa", "r+") as archive:
                archive.replace_tensor("layer.0/weight", np.zeros((64, 32), np.float32))
        """
        with self._locked(timeout, copy=copy) as current:
            self._write(partial(write_tensor, current, name, array, copy, progress))

    def add_asset(
        self,
        name: str,
        data: Asset,
        *,
        copy: bool = False,
        timeout: float | None = locking.TIMEOUT,
        progress: Progress | None = None,
    ) -> None:
        """Adds or replaces an asset.

        Args:
            name: Path of the asset.
            data: Its bytes, or the path of a file.
            copy: As in `onnxarchive.replace_model`.
            timeout: As in `onnxarchive.replace_model`.
            progress: Called with the bytes written and the bytes in all; True shows a bar.

        Raises:
            ArchiveError: Another object or program has changed the archive since it was opened.

        Example:
            with onnxarchive.open("model.onnxa", "r+") as archive:
                archive.add_asset("config.json", b"{}")
        """
        self.change_assets({name: data}, copy=copy, timeout=timeout, progress=progress)

    def remove_asset(
        self,
        name: str,
        *,
        copy: bool = False,
        timeout: float | None = locking.TIMEOUT,
        progress: Progress | None = None,
    ) -> None:
        """Removes an asset.

        Args:
            name: Path of the asset.
            copy: As in `onnxarchive.replace_model`.
            timeout: As in `onnxarchive.replace_model`.
            progress: Called with the bytes written and the bytes in all; True shows a bar.

        Raises:
            ArchiveError: Another object or program has changed the archive since it was opened.

        Example:
            with onnxarchive.open("model.onnxa", "r+") as archive:
                archive.remove_asset("labels.txt")
        """
        self.change_assets({}, [name], copy=copy, timeout=timeout, progress=progress)

    def change_assets(
        self,
        added: Mapping[str, Asset],
        removed: Collection[str] = (),
        *,
        copy: bool = False,
        timeout: float | None = locking.TIMEOUT,
        progress: Progress | None = None,
    ) -> None:
        """Adds, replaces and removes assets in one edit.

        Args:
            added: For the path of each asset to add or replace: its bytes, or the path of a file.
            removed: Paths of assets to remove.
            copy: As in `onnxarchive.replace_model`.
            timeout: As in `onnxarchive.replace_model`.
            progress: Called with the bytes written and the bytes in all; True shows a bar.

        Raises:
            ArchiveError: Another object or program has changed the archive since it was opened.

        Example:
            with onnxarchive.open("model.onnxa", "r+") as archive:
                archive.change_assets({"config.json": b"{}"}, ["labels.txt"])
        """
        with self._locked(timeout, copy=copy) as current:
            self._write(partial(write_assets, current, added, removed, progress))

    def close(self) -> None:
        """Closes the file, after waiting for an edit by another thread. Views stay valid.

        Raises:
            LockedError: This thread is editing, for example in an `edit` block.

        Example:
            archive = onnxarchive.open("model.onnxa", "r+")
            archive.close()
        """
        if os.getpid() == self._process:
            with with_path(self.path):
                self._require_no_edit_by_this_thread()
        with self._unless_forked(self._editor):
            if os.getpid() == self._process:
                self._warn_of_lost_changes()
            super().close()

    def _warn_of_lost_changes(self) -> None:
        """Warns if `model` was changed and not assigned; large models are not compared."""
        shown, self._shown = self._shown, None
        name = model_entry(self.model_id)
        is_large = self.entries[name].nbytes >= _MAX_COMPARED_NBYTES
        # The last condition is costly: `_snapshot.model` may parse the model.
        if shown is None or is_large or shown is not self._snapshot.model:
            return
        with contextlib.suppress(ArchiveError, OSError, ValueError):  # edited by others, or closed
            if onnx.ModelProto.FromString(bytes(self.read(name))) != shown:
                warnings.warn(
                    f"{self.path}: the model was changed in memory and not assigned, so changes "
                    "are lost; assign it (archive.model = model) or change it in archive.edit()",
                    stacklevel=3,
                )

    @property
    def _drafted(self) -> onnx.ModelProto | None:
        """The model of the `edit` block of this thread and asyncio task; None outside of a block.

        If the block was entered outside of a task, all tasks of this thread use its model.
        """
        model: onnx.ModelProto | None = getattr(self._draft, "model", None)
        if model is None or not self._draft.is_editing:
            return None
        return model if self._draft.task in (None, _running_task()) else None

    def _require_no_edit_by_this_thread(self) -> None:
        """Refuses a second edit by this thread, which already holds all locks."""
        if getattr(self._draft, "is_editing", False):
            raise LockedError("this thread is already editing the archive; finish the edit first")

    @contextlib.contextmanager
    def _locked(self, timeout: float | None, *, copy: bool) -> Iterator[Archive]:
        """Locks the archive while the block runs, and opens its current state."""
        require_process(self._process)
        locking.require_timeout(timeout)
        seconds = -1 if timeout is None else min(timeout, threading.TIMEOUT_MAX)
        begin = time.monotonic()
        with with_path(self.path):
            self._require_no_edit_by_this_thread()
            try:
                if not self._editor.acquire(timeout=seconds):
                    raise LockedError(
                        "another thread is editing the archive; try again, or with a longer timeout"
                    )
                self._draft.is_editing = True
                if timeout is not None:
                    timeout = max(timeout - (time.monotonic() - begin), 0)
                # Until `_editor` is acquired, another thread may replace `_local_file`.
                file = self._local_file
                path = file.absolute_path
                with file.locked(is_exclusive=True, timeout=timeout):
                    if not copy:
                        file.require_writable()
                        require_one_name(path, file)
                    roll_back(file)
                    os.stat(path)  # if the archive is gone, the error names it
                    if not (file.is_at(path) and self._snapshot.is_in(file)):
                        raise self._changed()
                    yield Archive(file, self.max_model_nbytes, self.model_id)
            finally:
                self._draft.is_editing = False
                with contextlib.suppress(RuntimeError):  # `_editor` was not acquired
                    self._editor.release()

    def _write(self, write: Callable[[], MappedFile], renamed: str | None = None) -> None:
        """Makes an edit, and reads the new state.

        Args:
            write: Makes the edit and returns the edited file, still locked except on Windows.
            renamed: The new id of the model chosen in `open`; None if the id stays.
        """
        with self._writing:
            file = write()
            if renamed is not None:
                self._model_id = renamed
            try:
                self._read(file)
            finally:
                locking.unlock(file.fileno())

    @contextlib.contextmanager
    def _settled(self) -> Iterator[Snapshot]:
        with self._unless_forked(self._writing):
            yield self._snapshot

    def _unless_forked(
        self, lock: contextlib.AbstractContextManager[object]
    ) -> contextlib.AbstractContextManager[object]:
        """The lock, or none in a forked process: no thread there could release a held lock."""
        return lock if os.getpid() == self._process else contextlib.nullcontext()


def _require_text(archive: Archive, place: str, value: object) -> None:
    """Raises a TypeError unless the value is a string."""
    if not isinstance(value, str):
        raise TypeError(
            f"{archive.path}: expected a string for {place}, found {type(value).__name__}; convert "
            "it with str() or json.dumps()"
        )


def _running_task() -> object:
    """The asyncio task that runs in this thread, or None."""
    # There is no task before asyncio is completely imported.
    current_task = getattr(sys.modules.get("asyncio"), "current_task", None)
    try:
        return None if current_task is None else current_task()
    except RuntimeError:  # no event loop runs
        return None


class Metadata(MutableMapping[str, str]):
    """The metadata (`metadata_props`) of an archive opened with mode `"r+"`.

    Outside of `edit` blocks, each change is one edit of the file; `update` makes several changes in
    one edit.
    """

    def __init__(self, archive: EditableArchive) -> None:
        self._archive = archive

    def __getitem__(self, key: str) -> str:
        return proto.metadata(self._archive.model)[key]

    def __setitem__(self, key: str, value: str) -> None:
        self.update({key: value})

    def __delitem__(self, key: str) -> None:
        self._write(lambda found: found.pop(key))

    def __iter__(self) -> Iterator[str]:
        return iter(proto.metadata(self._archive.model))

    def __len__(self) -> int:
        return len(proto.metadata(self._archive.model))

    def __repr__(self) -> str:
        return repr(proto.metadata(self._archive.model))

    def update(self, *others: Any, **pairs: str) -> None:
        """Adds or replaces pairs in one edit.

        Raises:
            TypeError: A key or a value is not a string.
        """
        given = dict(*others, **pairs)
        for key, value in given.items():
            _require_text(self._archive, "a key of metadata", key)
            _require_text(self._archive, f"metadata[{shown(key)}]", value)
        self._write(lambda found: found.update(given))

    def clear(self) -> None:
        """Removes all pairs in one edit."""
        self._write(dict.clear)

    def _write(self, change: Callable[[dict[str, str]], object]) -> None:
        with self._archive.edit() as model:
            pairs = proto.metadata(model)
            change(pairs)
            proto.set_metadata(model, pairs)
