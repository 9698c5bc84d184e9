"""Edits of archives that leave their weights where they are.

The model is the last entry, so a new model is a new end of the file: new tensors, model, directory
and end records. Where the file system can share blocks, a clone gets the new end and then the
archive's name; elsewhere the file itself gets it, with an undo log at its end until it is complete.
After a crash the archive is the old one or the new one in any case. What would move entries writes
a new file, and only on request.

An editor holds the archive's lock from before it reads the state that it changes until it has read
the new one, so no edit of another is overwritten.
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

_MAX_COMPARED_NBYTES = 64 << 20  # of a model, to find out whether it was changed

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
    """Gives an archive another model; the weights are neither read nor moved.

    Only the end of the file is written: new tensors, the model, directory and end records. The
    cost follows these and the number of entries, not the size of the weights. Every entry stays
    where it is and keeps its key, and new tensors follow them. A crash at any moment leaves the old
    archive or the new one, in some cases after `recover`. Views that others have of tensors and
    assets stay valid.

    A tensor of the new model is one of the archive if its location is the key, if it points into
    the archive as a link does, or if it has the key and the bytes that `save` would give it. The
    others are new.

    Args:
        path: The archive.
        model: The model, such as `Archive.model` with changes, whose external tensors name keys of
            the archive; or the path of a `.onnx`, such as a link, with its external data.
        compact: Whether to write the archive as `save` does, in the order of the model, with keys
            by the names of tensors, and without tensors that the model no longer has. All of it is
            written unless entries happen to lie there already; with a thread for each core, and
            memory as `onnxarchive.convert` takes it.
        copy: Whether to write a new file under this name, which is needed where the file has
            further names: a hard link keeps the old content, and so does the target of a symbolic
            link at `path`. Where the file system can share blocks this costs no more.
        size_threshold: Tensors of this many bytes or more are stored outside the model; None for
            the threshold that fits the archive's tensors: 1024 if that does.
        convert_attribute: As in `save`; None for True if the archive has any such tensor outside.
        timeout: Seconds to wait for others who open or edit the archive; None waits without limit,
            0 fails at once.
        progress: Called with the bytes done and the bytes in all that are written. The archive is
            locked meanwhile.

    Raises:
        ValueError: The model lacks a tensor of the archive, and `compact` is False; or the file has
            further names, and `copy` is False. Nothing is changed.
        LockedError: Others were at work on the archive until `timeout`.
        ArchiveFormatError: The file is not an archive, a tensor refers to no entry of it, or the
            model would break a rule.
        ChecksumError: Bytes of the archive that have to be copied have changed.
        ArchiveError: Writing failed, and so did rolling it back: `recover` does it.
        OSError: The archive or its directory cannot be read or written; the archive is as it was.
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
    """Gives an archive the model that a function makes of its own, as `replace_model` does.

    The archive is locked meanwhile: `change` cannot open it.

    Args:
        path: The archive.
        change: Takes the model, which it may change, and gives the new one.
        compact: As in `replace_model`.
        copy: As in `replace_model`.
        timeout: As in `replace_model`.

    Raises:
        ArchiveError: As in `replace_model`, and so for the other errors.
        OSError: As in `replace_model`.
    """
    with _locked(path, timeout, copy=copy) as archive:
        process = os.getpid()
        changed = change(_copy(archive.model))
        require_process(process)  # the function may have been left by a fork, too
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
    """Gives an initializer other elements, of the same shape and type.

    A new file is written, which then takes the archive's name: views and sessions of the old one
    keep what they see. Where the file system can share blocks, only what changes is written. A
    tensor that the model itself holds is replaced with the model, as `replace_model` does it.

    Args:
        path: The archive.
        name: Name of the initializer.
        array: Its elements. Shape and data type must be those that it has.
        copy: As in `replace_model`.
        timeout: As in `replace_model`.
        progress: As in `replace_model`.

    Raises:
        TensorNotFoundError: There is no such initializer, or several have the name.
        ValueError: Shape or type differ, or as in `replace_model`.
        ArchiveError: As in `replace_model`, and so for the other errors.
        OSError: As in `replace_model`.
    """
    with _locked(path, timeout, copy=copy) as archive:
        _release(write_tensor(archive, name, array, copy, progress))


@contextlib.contextmanager
def _locked(
    path: str | os.PathLike[str], timeout: float | None, *, copy: bool
) -> Iterator[Archive]:
    """An archive that nobody else opens or edits while the block runs."""
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
    """Closes a file that an edit has written, and its lock, which a fork may share."""
    with file:
        locking.unlock(file.fileno())


def _copy(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


class _Text:
    """A text of an archive's model, by the name of its field; assigning it changes the archive."""

    def __set_name__(self, owner: type[EditableArchive], name: str) -> None:
        self._name = name

    def __get__(self, archive: EditableArchive, owner: type[EditableArchive]) -> str:
        return tensors.text(getattr(archive.model, self._name))

    def __set__(self, archive: EditableArchive, value: str) -> None:
        with archive.edit() as model:
            model.ClearField(self._name)  # an empty text is none
            if value:
                setattr(model, self._name, value)


class EditableArchive(Archive):
    """An archive that is open for edits of its model, as `open` gives it with mode `"r+"`.

    ::

        with onnxarchive.open("model.onnxa", mode="r+") as archive:
            archive.metadata["author"] = "Ada"
            with archive.edit() as model:
                model.graph.node.append(node)
                archive.doc_string = "With a softmax"

    Every assignment changes the file at once, as `replace_model` does, and those in a block of
    `edit` together when it ends: afterwards, and after any crash, the change is made or not. The
    archive then shows the new state; views that were taken before stay what they are. The file is
    locked during a change and not in between. If others have changed it since the archive was
    opened, a change is an error.

    Several threads may use it: one edits at a time, and the others read the state before. A fork
    of the process may read and not edit.
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
        self._editor = threading.RLock()  # of the thread that edits
        self._writing = threading.RLock()  # while the file is another than the state shows
        # Of this thread: `is_editing`; and in a block of `edit` its `model`, and the `task` that
        # entered it.
        self._draft = threading.local()
        self._shown: onnx.ModelProto | None = None  # what `model` has given
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

        In a block of `edit` it is the model that will be written. Otherwise changing it changes
        nothing in the archive, of which `close` warns; assigning a model does, as `replace_model`.
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
            drafted.CopyFrom(model)  # and not another one: the block goes on with what it was given

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
        """Makes several changes of the model one: written when the block ends, or not at all.

        The archive is locked while the block runs, so nobody else can open it. In the block,
        `model`, `metadata` and the other attributes show and change the model that will be written.
        An exception that leaves the block discards all changes, and a block that changes nothing
        writes nothing. A block in another one belongs to that one, which alone writes or discards.
        A block belongs to the thread and the asyncio task that entered it; others see the state
        before, and their edits are refused or wait.

        `compact`, `copy` and `timeout` are those of `onnxarchive.replace_model`.

        Yields:
            The model, a copy that may be changed in the block.

        Raises:
            ArchiveError: Others have changed the archive since it was opened; or as
                `onnxarchive.replace_model` does.
            ValueError: The block belongs to another one, and arguments are given; or as
                `onnxarchive.replace_model` does.
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
            require_process(self._process)  # the block may have been left by a fork, too
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
        """Renames inputs and outputs of the main graph, wherever they are used.

        Args:
            inputs: The new name of each input by its old one.
            outputs: The new name of each output by its old one.
            compact: As in `onnxarchive.replace_model`, and so for the others.
            copy: As there.
            timeout: As there.

        Raises:
            ValueError: There is none of an old name, or a new one is taken.
            ArchiveError: As in `replace_model`, and so for the other errors.
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
        """As `onnxarchive.replace_model`, with its arguments; not in a block of `edit`.

        Raises:
            ArchiveError: Others have changed the archive since it was opened; or as
                `onnxarchive.replace_model` does.
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
        """As `onnxarchive.replace_tensor`, with its arguments; not in a block of `edit`.

        Raises:
            ArchiveError: Others have changed the archive since it was opened; or as
                `onnxarchive.replace_tensor` does.
        """
        with self._locked(timeout, copy=copy) as current:
            self._write(partial(write_tensor, current, name, array, copy, progress))

    def close(self) -> None:
        """Closes the file, after the edit that another thread is making. Views live on.

        Raises:
            LockedError: This thread is making an edit, such as in a block of `edit`.
        """
        if os.getpid() == self._process:
            with with_path(self.path):
                self._require_no_edit_by_this_thread()
        with self._unless_forked(self._editor):
            if os.getpid() == self._process:
                self._warn_of_lost_changes()
            super().close()

    def _warn_of_lost_changes(self) -> None:
        """Says so if `model` was changed and not assigned, where that is soon found out."""
        shown, self._shown = self._shown, None
        name = model_entry(self.model_id)
        is_large = self.entries[name].nbytes >= _MAX_COMPARED_NBYTES
        if shown is None or shown is not self._found.model or is_large:
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
        """The model that this thread's and task's block of `edit` will write; None outside of one.

        What a block that stands outside of all tasks runs as tasks stands in that block.
        """
        model: onnx.ModelProto | None = getattr(self._draft, "model", None)
        if model is None or not self._draft.is_editing:
            return None
        return model if self._draft.task in (None, _running_task()) else None

    def _require_no_edit_by_this_thread(self) -> None:
        """No lock keeps it out: all of them are this thread's or this open file's."""
        if getattr(self._draft, "is_editing", False):
            raise LockedError("expected no edit by this thread, found one; finish the edit first")

    @contextlib.contextmanager
    def _locked(self, timeout: float | None, *, copy: bool) -> Iterator[Archive]:
        """The archive as it is in its file, which nobody else opens or edits meanwhile."""
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
                file = self._file  # the one that the last edit has left
                path = file.absolute_path
                with file.locked(is_exclusive=True, timeout=timeout):
                    if not copy:
                        file.require_writable()
                        _require_one_name(path, file)
                    roll_back(file)
                    os.stat(path)  # names an archive that is gone
                    if not (file.is_at(path) and self._found.is_in(file)):
                        raise self._edited()
                    yield Archive(file, self.max_model_nbytes)
            finally:
                self._draft.is_editing = False
                with contextlib.suppress(RuntimeError):  # this thread did not get it
                    self._editor.release()

    def _write(self, write: Callable[[], MappedFile]) -> None:
        """Makes an edit, and shows the state that it has written."""
        with self._writing:
            file = write()
            try:
                self._read(file)
            finally:
                locking.unlock(file.fileno())

    @contextlib.contextmanager
    def _settled(self) -> Iterator[Snapshot]:
        with self._unless_forked(self._writing):
            yield self._found

    def _unless_forked(
        self, lock: contextlib.AbstractContextManager[object]
    ) -> contextlib.AbstractContextManager[object]:
        """A lock that no thread of a fork holds: the thread which did is not there any more."""
        return lock if os.getpid() == self._process else contextlib.nullcontext()


def _running_task() -> object:
    """The task of asyncio that runs in this thread, or None."""
    # Where nobody has imported asyncio, as a whole so far, there is no task.
    current_task = getattr(sys.modules.get("asyncio"), "current_task", None)
    try:
        return None if current_task is None else current_task()
    except RuntimeError:  # no event loop runs
        return None


class Metadata(MutableMapping[str, str]):
    """The metadata (`metadata_props`) of an archive that is open for changes.

    Each change is written at once; `update` writes several in one go.
    """

    def __init__(self, archive: EditableArchive) -> None:
        """Shows the metadata of an archive."""
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
        """Adds or replaces pairs, all of them in one change of the archive."""
        given = dict(*others, **pairs)
        self._write(lambda found: found.update(given))

    def clear(self) -> None:
        """Removes all pairs, in one change of the archive."""
        self._write(dict.clear)

    def _write(self, change: Callable[[dict[str, str]], object]) -> None:
        with self._archive.edit() as model:
            pairs = proto.metadata(model)
            change(pairs)
            proto.set_metadata(model, pairs)
