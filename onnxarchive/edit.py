"""Changes of an archive that leave its weights where they are.

The model is the last entry, so a new model is a new end of the file: model, directory and end
records, behind new tensors if there are any. Where the file system can share blocks, the end of a
clone is written anew and the clone takes the archive's name; elsewhere it is written in the file's
place, with a journal beside it. After a crash the archive is the old one or the new one in any
case. Whatever would have to move entries writes a new file, and only if that is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import TYPE_CHECKING, Any

import onnx

from onnxarchive import journal
from onnxarchive.archive import MAX_MODEL_NBYTES, Archive
from onnxarchive.errors import ArchiveError, naming
from onnxarchive.model import proto, renaming, tensors
from onnxarchive.recovery import alone_with, locked, settle
from onnxarchive.rewriting import Model, Options, write_changed_model, write_model, write_tensor
from onnxarchive.zipformat.writer import Progress

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = ["EditableArchive", "Metadata", "change_model", "replace_model", "replace_tensor"]


def replace_model(
    path: str | os.PathLike[str],
    model: Model,
    *,
    compact: bool = False,
    copy: bool = False,
    size_threshold: int | None = None,
    convert_attribute: bool | None = None,
    timeout: float | None = None,
    progress: Progress | None = None,
) -> None:
    """Gives an archive another model; the weights are neither read nor moved.

    Only the end of the file is written: tensors that are new, the model, directory and end records.
    The cost follows these and the number of entries, not the size of the weights. The result is
    byte for byte what `save` makes of the same model and tensors, if the archive was. A crash at
    any moment leaves the old archive or the new one, where need be after `recover`. Readers that
    have the archive open keep what they see of tensors and assets.

    A tensor of the new model is one of the archive if its location is the key, if it points into
    the archive as a link does, or if it has the same bytes. Tensors that are new and come behind
    all others in the order of the model are added. Everything else moves entries: a tensor that is
    gone, renamed, or added between others or before assets. That takes `compact`.

    Args:
        path: The archive.
        model: The model, such as `Archive.model` with changes, whose external tensors name keys of
            the archive; or the path of a `.onnx`, such as a link, with its external data.
        compact: Whether to write the whole archive anew where entries have to move, with a thread
            for each core, and memory as `onnxarchive.convert` takes it.
        copy: Whether to write a new file under this name, which is needed where the file has
            further names: a hard link keeps the old content, and so does what a symbolic link at
            `path` led to. Where the file system can share blocks this costs no more.
        size_threshold: Tensors of this many bytes or more are stored outside the model; None for
            the threshold that fits the archive's tensors: 1024 if that does.
        convert_attribute: As in `save`; None for True if the archive has any such tensor outside.
        timeout: Seconds to wait for others who are at work on the archive; None waits as long as
            it takes, 0 fails at once.
        progress: Called with the bytes done and the bytes in all that are written. It must not open
            the archive, which nobody can meanwhile.

    Raises:
        ValueError: Entries would have to move, and `compact` is False; or the file has further
            names, and `copy` is False. Nothing is changed.
        LockedError: Somebody else was at work on the archive all the time.
        ArchiveFormatError: The file is not an archive, a tensor refers to no entry of it, or the
            model would break a rule.
        ChecksumError: Bytes of the archive that have to be copied have changed.
        ArchiveError: Writing failed and could not be taken back: `recover` does.
        OSError: The archive or its directory cannot be read or written; the archive is as it was.
    """
    options = Options(compact, copy, size_threshold, convert_attribute, progress)
    with naming(path), alone_with(path, timeout, copy=copy) as (archive, descriptor):
        write_model(archive, descriptor, model, options)


def change_model(
    path: str | os.PathLike[str],
    change: Callable[[onnx.ModelProto], onnx.ModelProto],
    *,
    compact: bool = False,
    copy: bool = False,
    timeout: float | None = None,
) -> None:
    """Gives an archive the model that a function makes of its own, as `replace_model` does.

    Nobody else opens or changes the archive meanwhile: `change` must not, either.

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
    with naming(path), alone_with(path, timeout, copy=copy) as (archive, descriptor):
        write_changed_model(archive, descriptor, change, Options(compact=compact, copy=copy))


def replace_tensor(
    path: str | os.PathLike[str],
    name: str,
    array: ArrayLike,
    *,
    in_place: bool = False,
    copy: bool = False,
    timeout: float | None = None,
    progress: Progress | None = None,
) -> None:
    """Gives an initializer other elements, of the same shape and type.

    It is the only change that writes where weights are. So it goes to a new file, which then takes
    the archive's name, and views and sessions of the old one keep what they see. Where the file
    system can share blocks, only what changes is written. A tensor that the model itself holds is
    replaced with the model, as `replace_model` does it.

    Args:
        path: The archive.
        name: Name of the initializer.
        array: Its elements. Shape and data type must be those that it has.
        in_place: Whether to write into the file instead, with a journal, so that a crash leaves
            the old tensor or the new one. Views of others who have the archive open change.
        copy: As in `replace_model`.
        timeout: As in `replace_model`.
        progress: As in `replace_model`.

    Raises:
        TensorNotFoundError: There is no such initializer, or several have the name.
        ValueError: Shape or type differ, or as in `replace_model`.
        ArchiveError: As in `replace_model`, and so for the other errors.
        OSError: As in `replace_model`.
    """
    with naming(path), alone_with(path, timeout, copy=copy) as (archive, descriptor):
        write_tensor(archive, descriptor, name, array, in_place, copy, progress)


class EditableArchive(Archive):
    """An archive that is open for changes of its model, as `open` gives it with mode `"r+"`.

    ::

        with onnxarchive.open("model.onnxa", mode="r+") as archive:
            model = archive.model
            model.graph.node.append(node)
            archive.model = model
            archive.metadata["author"] = "Ada"

    Every assignment changes the file at once, as `replace_model` does: afterwards, and after any
    crash, it is made or not. The archive then shows the new state; views that were taken before
    stay what they are. Nothing is locked in between: what others have changed since the archive
    was opened is not overwritten, but an error.
    """

    def __init__(
        self, path: str | os.PathLike[str], max_model_nbytes: int = MAX_MODEL_NBYTES
    ) -> None:
        """Opens the archive at `path`; a change that was cut off is taken back first."""
        with naming(path):
            if os.path.lexists(journal.path_of(path)):
                with locked(path, None, os.O_RDWR) as descriptor:
                    settle(path, descriptor)
            self._max_model_nbytes = max_model_nbytes
            with journal.opened(path, rule="FILE-1") as file:
                super().__init__(file, max_model_nbytes)

    @property
    def model(self) -> onnx.ModelProto:
        """The model, its large tensors external with their keys as location.

        Changing it changes nothing in the archive; assigning a model does, as `replace_model`.
        """
        return super().model

    @model.setter
    def model(self, model: onnx.ModelProto) -> None:
        self.replace_model(model)

    @property
    def metadata(self) -> Metadata:
        """The model's metadata; assigning and deleting changes the archive."""
        return Metadata(self)

    @property
    def doc_string(self) -> str:
        """The model's doc_string; assigning it changes the archive."""
        return tensors.text(self.model.doc_string)

    @doc_string.setter
    def doc_string(self, value: str) -> None:
        self._set("doc_string", value)

    @property
    def domain(self) -> str:
        """The model's domain; assigning it changes the archive."""
        return tensors.text(self.model.domain)

    @domain.setter
    def domain(self, value: str) -> None:
        self._set("domain", value)

    @property
    def producer_name(self) -> str:
        """What made the model; assigning it changes the archive."""
        return tensors.text(self.model.producer_name)

    @producer_name.setter
    def producer_name(self, value: str) -> None:
        self._set("producer_name", value)

    @property
    def producer_version(self) -> str:
        """Its version; assigning it changes the archive."""
        return tensors.text(self.model.producer_version)

    @producer_version.setter
    def producer_version(self, value: str) -> None:
        self._set("producer_version", value)

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
            compact: As in `onnxarchive.replace_model`: an input with a default value is a tensor,
                whose key changes with its name.
            copy: As there.
            timeout: As there.

        Raises:
            ValueError: There is none of an old name, or a new one is taken.
            ArchiveError: As in `replace_model`, and so for the other errors.
        """
        self._edit(
            lambda model: renaming.renamed(model, inputs or {}, outputs or {}),
            Options(compact=compact, copy=copy),
            timeout,
        )

    def replace_model(
        self,
        model: Model,
        *,
        compact: bool = False,
        copy: bool = False,
        size_threshold: int | None = None,
        convert_attribute: bool | None = None,
        timeout: float | None = None,
        progress: Progress | None = None,
    ) -> None:
        """As `onnxarchive.replace_model`; assigning to `model` does it with these defaults.

        Args:
            model: The model.
            compact: As in `onnxarchive.replace_model`, and so for the others.
            copy: As there.
            size_threshold: As there.
            convert_attribute: As there.
            timeout: As there.
            progress: As there.

        Raises:
            ArchiveError: The archive was changed by somebody else since it was opened; or as
                `onnxarchive.replace_model` does.
        """
        options = Options(compact, copy, size_threshold, convert_attribute, progress)
        self._change(timeout, copy, partial(write_model, model=model, options=options))

    def replace_tensor(
        self,
        name: str,
        array: ArrayLike,
        *,
        in_place: bool = False,
        copy: bool = False,
        timeout: float | None = None,
        progress: Progress | None = None,
    ) -> None:
        """As `onnxarchive.replace_tensor`.

        Args:
            name: Name of the initializer.
            array: Its elements.
            in_place: As in `onnxarchive.replace_tensor`, and so for the others.
            copy: As there.
            timeout: As there.
            progress: As there.

        Raises:
            ArchiveError: The archive was changed by somebody else since it was opened; or as
                `onnxarchive.replace_tensor` does.
        """
        self._change(
            timeout,
            copy,
            lambda archive, descriptor: write_tensor(
                archive, descriptor, name, array, in_place, copy, progress
            ),
        )

    def _set(self, field: str, value: str) -> None:
        def change(model: onnx.ModelProto) -> onnx.ModelProto:
            if value:
                setattr(model, field, value)
            else:
                model.ClearField(field)
            return model

        self._edit(change)

    def _edit(
        self,
        change: Callable[[onnx.ModelProto], onnx.ModelProto],
        options: Options | None = None,
        timeout: float | None = None,
    ) -> None:
        """Changes the model as it is in the archive, and not as it was changed in memory."""
        options = options or Options()
        write = partial(write_changed_model, change=change, options=options)
        self._change(timeout, options.copy, write)

    def _change(
        self, timeout: float | None, copy: bool, change: Callable[[Archive, int], None]
    ) -> None:
        self.file.fileno()  # refuses a closed one
        with naming(self.path):
            with alone_with(self.path, timeout, copy=copy) as (found, descriptor):
                if (found.file.identity, found.entries) != (self.file.identity, self.entries):
                    raise ArchiveError(
                        "expected the archive as it was when it was opened, found that somebody "
                        "has changed it since; open it anew"
                    )
                change(found, descriptor)
            before = self.file
            with journal.opened(self.path, rule="FILE-1") as file:
                self._read(file, self._max_model_nbytes)
            before.close()


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
        def changed(model: onnx.ModelProto) -> onnx.ModelProto:
            pairs = proto.metadata(model)
            change(pairs)
            proto.set_metadata(model, pairs)
            return model

        self._archive._edit(changed)
