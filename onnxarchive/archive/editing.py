"""Edits of archives, which neither read nor move weights.

The model is the last entry, so a new model is a new end of the file: new tensors, model, directory
and end records. If the file system can share blocks, the new end is written to a clone, which then
gets the archive's name; else to the file itself, with an undo log at its end until it is complete.
After a crash the archive is the old one or the new one. An edit that moves entries writes a new
file, and only on request.

An edit locks the archive before it reads the state that it changes, and until it has read the new
one. So no other edit is lost.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import TYPE_CHECKING, Any

import onnx

from onnxarchive.archive.contents import MAX_MODEL_NBYTES
from onnxarchive.archive.reading import Archive
from onnxarchive.archive.recovery import require_finished, roll_back
from onnxarchive.archive.rewriting import EditOptions, GivenModel, write_model, write_tensor
from onnxarchive.archive.snapshot import Snapshot
from onnxarchive.buffers.counting import Progress
from onnxarchive.errors import ArchiveError, LockedError, with_path
from onnxarchive.model import proto, renaming, tensors
from onnxarchive.model.keys import model_entry
from onnxarchive.storage import files, locking
from onnxarchive.storage.files import MappedFile, require_process

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

_MAX_COMPARED_NBYTES = 64 << 20  # size of a model that `close` compares with the file

__all__ = ["EditableArchive", "Metadata", "change_model", "replace_model", "replace_tensor"]


def replace_model(
    path: str | os.PathLike[str],
    model: GivenModel,
    *,
    compact: bool = False,
    copy: bool = False,
    size_threshold: int | None = None,
    convert_attribute: bool | None = None,
    timeout: float | None = None,
    progress: Progress | None = None,
) -> None:
    """Replaces the model of an archive; weights are neither read nor moved.

    Only the end of the file is written: new tensors, model, directory and end records. The time
    grows with these and the number of entries, not with the size of the weights. Entries stay where
    they are and keep their keys; new tensors follow them. After a crash the archive is the old one
    or the new one, in some cases after `recover`. Views of tensors and assets stay valid.

    A tensor of the new model is one of the archive if its location is the key, if it refers to the
    archive as a link does, or if `save` would give it the key and bytes of an entry. All others are
    new.

    Args:
        path: The archive.
        model: The model, such as `Archive.model` with changes, whose external tensors name keys of
            the archive; or the path of a `.onnx`, such as a link, with its external data.
        compact: Whether to write the archive as `save` does: in the order of the model, with keys
            derived from the names of tensors, and without tensors that the model no longer has. The
            whole archive is written, unless its entries are already in this order; with a thread
            for each core.
        copy: Whether to write a new file. This is needed if the file has further names: a hard
            link, or the target of a symbolic link at `path`, then keeps the old content. If the
            file system can share blocks, it takes no longer.
        size_threshold: Tensors of this many bytes or more are stored outside the model; None for
            1024, or another threshold that fits the tensors of the archive.
        convert_attribute: Whether to store outside the model not only initializers, but all
            tensors; None for True if the archive has any such tensor outside.
        timeout: Seconds to wait until nobody else has the archive locked; None waits without
            limit, 0 fails at once.
        progress: Called with the bytes written and the bytes in all. The archive is locked
            meanwhile.

    Raises:
        ValueError: The model lacks a tensor of the archive, and `compact` is False; or the file has
            further names, and `copy` is False. Nothing is changed.
        LockedError: The archive stayed locked until `timeout`.
        ArchiveFormatError: The file is not an archive, a tensor refers to no entry of it, or the
            model would break a rule.
        ChecksumError: Bytes of the archive that have to be copied have changed.
        ArchiveError: Writing failed, and so did rolling back; `recover` rolls back later.
        OSError: The archive or its directory cannot be read or written; the archive is unchanged.
    """
    options = EditOptions(compact, copy, size_threshold, convert_attribute, progress)
    with _locked(path, timeout, copy=copy) as archive:
        _release(write_model(archive, model, options))


def change_model(
    path: str | os.PathLike[str],
    change: Callable[[onnx.ModelProto], onnx.ModelProto],
    *,
    compact: bool = False,
    copy: bool = False,
    timeout: float | None = None,
) -> None:
    """Changes the model of an archive by a function; see `replace_model` for the errors.

    Args:
        path: The archive. It is locked meanwhile, so `change` cannot open it.
        change: Takes the model, which it may change, and returns the new one.
        compact: Whether to write the archive anew, without tensors that the model no longer has.
        copy: Whether to write a new file, so that further names of the file keep the old content.
        timeout: Seconds to wait until nobody else has the archive locked; None waits without
            limit, 0 fails at once.
    """
    with _locked(path, timeout, copy=copy) as archive:
        process = os.getpid()
        changed = change(_copy(archive.model))
        require_process(process)  # a fork may have returned from the function, too
        if changed != archive.model:
            _release(write_model(archive, changed, EditOptions(compact=compact, copy=copy)))


def replace_tensor(
    path: str | os.PathLike[str],
    name: str,
    array: ArrayLike,
    *,
    copy: bool = False,
    timeout: float | None = None,
    progress: Progress | None = None,
) -> None:
    """Replaces the elements of an initializer; see `replace_model` for the errors of an edit.

    A new file is written, which then gets the archive's name: views and sessions of the old one
    still show the old elements. If the file system can share blocks, only the changed bytes are
    written. A tensor that the model itself holds is replaced as `replace_model` replaces a model.

    Args:
        path: The archive.
        name: Name of the initializer.
        array: Its new elements, of the same shape and data type.
        copy: Whether to write a new file, so that further names of the file keep the old content.
        timeout: Seconds to wait until nobody else has the archive locked; None waits without
            limit, 0 fails at once.
        progress: Called with the bytes written and the bytes in all.

    Raises:
        TensorNotFoundError: There is no such initializer, or several have the name.
        ValueError: The array has another shape or data type.
    """
    with _locked(path, timeout, copy=copy) as archive:
        _release(write_tensor(archive, name, array, copy, progress))


@contextlib.contextmanager
def _locked(
    path: str | os.PathLike[str], timeout: float | None, *, copy: bool
) -> Iterator[Archive]:
    """Opens an archive and locks it while the block runs."""
    with (
        with_path(path),
        files.opened(
            path,
            rule="FILE-1",
            is_exclusive=True,
            is_writable=None if copy else True,
            timeout=timeout,
        ) as file,
        file,
    ):
        if copy:
            require_finished(file)
        else:
            _require_one_name(path, file)
            roll_back(file)
        yield Archive(file)


def _require_one_name(path: str | os.PathLike[str], file: MappedFile) -> None:
    names = os.fstat(file.fileno()).st_nlink
    found = None
    if os.path.islink(path):
        found = f"a symbolic link to {os.path.realpath(path)}, which others may use"
    elif names > 1:
        found = f"a file with {names} names (hard links), all of which would change"
    if found is not None:
        raise ValueError(
            f"{os.fspath(path)}: expected a file with this name alone, found {found}; copy=True "
            "(--copy) puts a new file here"
        )


def _release(file: MappedFile) -> None:
    """Closes a file that an edit has written, and unlocks it: a fork may share the lock."""
    with file:
        locking.unlock(file.fileno())


def _copy(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


class _Text:
    """A text field of an archive's model; assigning it changes the archive."""

    def __set_name__(self, owner: type[EditableArchive], name: str) -> None:
        self._name = name

    def __get__(self, archive: EditableArchive, owner: type[EditableArchive]) -> str:
        return tensors.text(getattr(archive.model, self._name))

    def __set__(self, archive: EditableArchive, value: str) -> None:
        with archive.edit() as model:
            model.ClearField(self._name)  # an empty text is stored as none
            if value:
                setattr(model, self._name, value)


class EditableArchive(Archive):
    """An archive whose model can be edited, as `open` gives it with mode `"r+"`.

    ::

        with onnxarchive.open("model.onnxa", mode="r+") as archive:
            archive.metadata["author"] = "Ada"
            with archive.edit() as model:
                model.graph.node.append(node)
                archive.doc_string = "With a softmax"

    Every assignment changes the file at once, as `replace_model` does; those in a block of `edit`
    change it together when the block ends. A change is made completely or not at all, also after a
    crash. The archive then shows the new state; earlier views stay as they are. The file is locked
    during a change, not in between. If others have changed it since the archive was opened, a
    change raises an error.

    Several threads may use it: one edits at a time, the others read the state before the edit. A
    fork of the process may read, but not edit.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        max_model_nbytes: int = MAX_MODEL_NBYTES,
        timeout: float | None = None,
        model: str = "",
    ) -> None:
        """Opens the archive at `path`; an interrupted edit is rolled back first."""
        self._process = os.getpid()
        self._editor = threading.RLock()  # held by the thread that edits
        self._writing = threading.RLock()  # held while the file differs from the state
        # Of this thread: `is_editing`; in a block of `edit` also its `model`, and the `task` that
        # entered the block.
        self._draft = threading.local()
        self._shown: onnx.ModelProto | None = None  # the model that `model` has given
        with (
            with_path(path),
            files.opened(
                path, rule="FILE-1", is_exclusive=True, is_writable=None, timeout=timeout
            ) as file,
        ):
            roll_back(file)
            super().__init__(file, max_model_nbytes, model)

    @property
    def model(self) -> onnx.ModelProto:
        """The model, its large tensors external with their keys as location.

        In a block of `edit` it is the model that will be written. Elsewhere a change of it does not
        change the archive, and `close` warns of that; assign a model to replace it.
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
            drafted.CopyFrom(model)  # the block keeps using the object that it was given

    @property
    def metadata(self) -> Metadata:
        """The model's metadata; assigning and deleting changes the archive."""
        return Metadata(self)

    # Texts of the model; assigning one changes the archive.
    doc_string = _Text()
    domain = _Text()
    producer_name = _Text()  # of the tool that made the model
    producer_version = _Text()

    @contextlib.contextmanager
    def edit(
        self, *, compact: bool = False, copy: bool = False, timeout: float | None = None
    ) -> Iterator[onnx.ModelProto]:
        """Makes several changes of the model in one edit, which is written when the block ends.

        The archive is locked while the block runs, so nobody else can open it. In the block,
        `model`, `metadata` and the other attributes show and change the model that will be written.
        An exception that leaves the block discards all changes; a block without changes writes
        nothing. An inner block is part of the outer one, which alone writes or discards. A block
        belongs to the thread and the asyncio task that entered it; others see the state before it,
        and their edits wait or are refused.

        `onnxarchive.replace_model` describes `compact`, `copy`, `timeout` and the errors of an
        edit.

        Yields:
            A copy of the model, to be changed in the block.

        Raises:
            ArchiveError: Others have changed the archive since it was opened.
            ValueError: An inner block is given arguments.
        """
        if self._drafted is not None:
            if compact or copy or timeout is not None:
                raise ValueError("give compact, copy and timeout to the outer block of edit()")
            yield self._drafted
            return
        with self._locked(timeout, copy=copy) as current:
            self._draft.task = _running_task()
            changed = self._draft.model = _copy(current.model)
            try:
                yield changed
            finally:
                del self._draft.model, self._draft.task
            require_process(self._process)  # a fork may have left the block, too
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
        timeout: float | None = None,
    ) -> None:
        """Renames inputs and outputs of the main graph, and all their uses.

        `inputs` and `outputs` map old names to new ones. `onnxarchive.replace_model` describes
        `compact`, `copy`, `timeout` and the errors of an edit.

        Raises:
            ValueError: An old name does not exist, or a new one is taken.
        """
        with self.edit(compact=compact, copy=copy, timeout=timeout) as model:
            self.model = renaming.renamed(model, inputs or {}, outputs or {})

    def replace_model(
        self,
        model: GivenModel,
        *,
        compact: bool = False,
        copy: bool = False,
        size_threshold: int | None = None,
        convert_attribute: bool | None = None,
        timeout: float | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Replaces the model, not in a block of `edit`.

        `onnxarchive.replace_model` describes the arguments and the errors of an edit.

        Raises:
            ArchiveError: Others have changed the archive since it was opened.
        """
        options = EditOptions(compact, copy, size_threshold, convert_attribute, progress)
        with self._locked(timeout, copy=copy) as current:
            self._write(partial(write_model, current, model, options))

    def replace_tensor(
        self,
        name: str,
        array: ArrayLike,
        *,
        copy: bool = False,
        timeout: float | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Replaces the elements of an initializer, not in a block of `edit`.

        `onnxarchive.replace_tensor` describes the arguments and errors.

        Raises:
            ArchiveError: Others have changed the archive since it was opened.
        """
        with self._locked(timeout, copy=copy) as current:
            self._write(partial(write_tensor, current, name, array, copy, progress))

    def close(self) -> None:
        """Closes the file, after an edit of another thread. Views stay valid.

        Raises:
            LockedError: This thread is making an edit, such as a block of `edit`.
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
        if shown is None or shown is not self._snapshot.model or is_large:
            return
        with contextlib.suppress(ArchiveError, OSError, ValueError):  # edited by others, or closed
            if onnx.ModelProto.FromString(bytes(self.read(name))) != shown:
                warnings.warn(
                    f"{self.path}: the model was changed in memory and not assigned, so that its "
                    "changes are lost: assign archive.model, or change what archive.edit() gives",
                    stacklevel=3,
                )

    @property
    def _drafted(self) -> onnx.ModelProto | None:
        """The model that the block of `edit` of this thread and task will write, or None.

        If a block was entered outside of all tasks, tasks that it runs are part of it.
        """
        model: onnx.ModelProto | None = getattr(self._draft, "model", None)
        if model is None or not self._draft.is_editing:
            return None
        return model if self._draft.task in (None, _running_task()) else None

    def _require_no_edit_by_this_thread(self) -> None:
        """Refuses a second edit by this thread, which already holds all locks."""
        if getattr(self._draft, "is_editing", False):
            raise LockedError("expected no edit by this thread, found one; finish the edit first")

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
                        "expected to edit the archive, found another thread editing it"
                    )
                self._draft.is_editing = True
                if timeout is not None:
                    timeout = max(timeout - (time.monotonic() - begin), 0)
                file = self._file  # of the last edit
                path = file.absolute_path
                with file.locked(is_exclusive=True, timeout=timeout):
                    if not copy:
                        file.require_writable()
                        _require_one_name(path, file)
                    roll_back(file)
                    os.stat(path)  # an archive that is gone is named
                    if not (file.is_at(path) and self._snapshot.is_in(file)):
                        raise self._changed()
                    yield Archive(file, self.max_model_nbytes)
            finally:
                self._draft.is_editing = False
                with contextlib.suppress(RuntimeError):  # this thread has not acquired it
                    self._editor.release()

    def _write(self, write: Callable[[], MappedFile]) -> None:
        """Makes an edit, and reads the state that it has written."""
        with self._writing:
            file = write()
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
        """The lock; none in a fork, where the thread that may hold it does not exist."""
        return lock if os.getpid() == self._process else contextlib.nullcontext()


def _running_task() -> object:
    """The task of asyncio that runs in this thread, or None."""
    # Unless asyncio was imported, completely, there is no task.
    current_task = getattr(sys.modules.get("asyncio"), "current_task", None)
    try:
        return None if current_task is None else current_task()
    except RuntimeError:  # no event loop runs
        return None


class Metadata(MutableMapping[str, str]):
    """The metadata (`metadata_props`) of an archive that is open for edits.

    Each change is an edit of its own; `update` makes several in one edit.
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
        """Adds or replaces pairs in one edit."""
        given = dict(*others, **pairs)
        self._write(lambda found: found.update(given))

    def clear(self) -> None:
        """Removes all pairs in one edit."""
        self._write(dict.clear)

    def _write(self, change: Callable[[dict[str, str]], object]) -> None:
        with self._archive.edit() as model:
            pairs = proto.metadata(model)
            change(pairs)
            proto.set_metadata(model, pairs)
