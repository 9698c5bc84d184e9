"""Changes of an archive that leave its weights where they are.

The model is the last entry, so a new model is a new end of the file: model, directory and end
records, behind new tensors if there are any. Where the file system can share blocks, the end of a
clone is written anew and the clone takes the archive's name; elsewhere it is written in the file's
place, with a journal beside it. After a crash the archive is the old one or the new one in any
case. Whatever would have to move entries writes a new file, and only if that is asked for.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import onnx

from onnxarchive import journal, locking
from onnxarchive.archive import MAX_MODEL_NBYTES, Archive, check_local_header
from onnxarchive.errors import ArchiveError, ArchiveFormatError, Report, naming, shown
from onnxarchive.files import (
    MappedFile,
    Replacement,
    clone,
    remove_abandoned,
    require_no_input,
)
from onnxarchive.journal import Journal, Positioned, Span
from onnxarchive.model import dtypes, proto, renaming, tensors
from onnxarchive.model.keys import MODEL_PROTO, Keys
from onnxarchive.referring import (
    EntryData,
    entry_data,
    has_outside_attributes,
    kept_assets,
    referred,
    resolver,
)
from onnxarchive.save import (
    DEFAULT_SIZE_THRESHOLD,
    FileData,
    Item,
    Pieces,
    Plan,
    Resolve,
    plan_archive,
    plan_items,
    stream,
    write_archive,
)
from onnxarchive.sources import open_source
from onnxarchive.zipformat import directory, writer
from onnxarchive.zipformat.records import LocalHeader
from onnxarchive.zipformat.writer import Data, Progress, Stored, ZipWriter

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = [
    "EditableArchive",
    "Metadata",
    "Recovery",
    "change_model",
    "recover",
    "replace_model",
    "replace_tensor",
]

_MAX_SHOWN_ENTRIES = 3  # in a message

# A new model: one whose tensors may refer to the archive, or the path of a .onnx.
Model: TypeAlias = onnx.ModelProto | str | os.PathLike[str]


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
        compact: Whether to write the whole archive anew where entries have to move.
        copy: Whether to write a new file under this name, which is needed where the file has
            further names: a hard link keeps the old content, and so does what a symbolic link at
            `path` led to. Where the file system can share blocks this costs no more.
        size_threshold: Tensors of this many bytes or more are stored outside the model; None for
            the threshold that fits the archive's tensors: 1024 if that does.
        convert_attribute: As in `save`; None for True if the archive has any such tensor outside.
        timeout: Seconds to wait for others who are at work on the archive; None waits as long as
            it takes, 0 fails at once.
        progress: Called with the bytes done and the bytes in all that are written.

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
    options = _Options(compact, copy, size_threshold, convert_attribute, progress)
    with naming(path), _alone_with(path, timeout, copy=copy) as (archive, descriptor):
        _replace_model(archive, descriptor, model, options)


def change_model(
    path: str | os.PathLike[str],
    change: Callable[[onnx.ModelProto], onnx.ModelProto],
    *,
    copy: bool = False,
    timeout: float | None = None,
) -> None:
    """Gives an archive the model that a function makes of its own, as `replace_model` does.

    Nobody else opens or changes the archive meanwhile: `change` must not, either.

    Args:
        path: The archive.
        change: Takes the model, which it may change, and gives the new one.
        copy: As in `replace_model`.
        timeout: As in `replace_model`.

    Raises:
        ArchiveError: As in `replace_model`, and so for the other errors.
        OSError: As in `replace_model`.
    """
    with naming(path), _alone_with(path, timeout, copy=copy) as (archive, descriptor):
        _change_model(archive, descriptor, change, copy)


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
    with naming(path), _alone_with(path, timeout, copy=copy) as (archive, descriptor):
        _replace_tensor(archive, descriptor, name, array, in_place, copy, progress)


@dataclass(frozen=True, slots=True)
class Recovery:
    """What `recover` did.

    Attributes:
        is_rolled_back: Whether a change that was cut off was taken back.
        removed: Paths of files that were left by processes that were killed, and are removed.
    """

    is_rolled_back: bool
    removed: tuple[str, ...]


def recover(
    path: str | os.PathLike[str], *, force: bool = False, timeout: float | None = None
) -> Recovery:
    """Makes an archive whole again after a crash, and removes what killed processes left beside it.

    Opening an archive for writing takes back a change that was cut off, too.

    Args:
        path: The archive, which need not exist: a first `save` may have been killed.
        force: Whether to write back a journal also where it says that it is of another file. A
            copy of archive and journal on another disk is such a one.
        timeout: As in `replace_model`.

    Raises:
        LockedError: Somebody else was at work on the archive all the time.
        ArchiveError: There is a journal, which does not belong to the file or is damaged, and the
            file is no archive.
        OSError: The archive cannot be read or written, or neither it nor anything left by killed
            processes is there.
    """
    removed = remove_abandoned(path)
    if removed and not os.path.exists(path):
        return Recovery(False, tuple(removed))
    with naming(path), _locked(path, timeout, os.O_RDWR) as descriptor:
        had_journal = os.path.lexists(journal.path_of(path))
        if _settle(path, descriptor, force=force):
            return Recovery(True, tuple(removed))
        if had_journal:
            removed.append(journal.path_of(path))
    return Recovery(False, tuple(removed))


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
                with _locked(path, None, os.O_RDWR) as descriptor:
                    _settle(path, descriptor)
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
    ) -> None:
        """Renames inputs and outputs of the main graph, wherever they are used.

        Args:
            inputs: The new name of each input by its old one.
            outputs: The new name of each output by its old one.

        Raises:
            ValueError: There is none of an old name, or a new one is taken.
            ArchiveError: As in `replace_model`, and so for the other errors.
        """
        self._edit(lambda model: renaming.renamed(model, inputs or {}, outputs or {}))

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
        options = _Options(compact, copy, size_threshold, convert_attribute, progress)
        self._change(timeout, copy, partial(_replace_model, model=model, options=options))

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
            lambda archive, descriptor: _replace_tensor(
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

    def _edit(self, change: Callable[[onnx.ModelProto], onnx.ModelProto]) -> None:
        """Changes the model as it is in the archive, and not as it was changed in memory."""
        self._change(None, False, partial(_change_model, change=change, copy=False))

    def _change(
        self, timeout: float | None, copy: bool, change: Callable[[Archive, int], None]
    ) -> None:
        self.file.fileno()  # refuses a closed one
        with naming(self.path), _alone_with(self.path, timeout, copy=copy) as (found, descriptor):
            if (found.file.identity, found.entries) != (self.file.identity, self.entries):
                raise ArchiveError(
                    "expected the archive as it was when it was opened, found that somebody has "
                    "changed it since; open it anew"
                )
            change(found, descriptor)
            before = self.file
            file = MappedFile(self.path, rule="FILE-1")
            try:
                self._read(file, self._max_model_nbytes)
            except BaseException:
                file.close()
                raise
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
            if pairs != proto.metadata(model):
                onnx.helper.set_model_props(model, pairs)
            return model

        self._archive._edit(changed)


# One writer at a time


@contextlib.contextmanager
def _locked(path: str | os.PathLike[str], timeout: float | None, flags: int) -> Iterator[int]:
    """The file at `path`, open and locked against all others."""
    MappedFile(path, rule="FILE-1").close()  # refuses what is no regular file
    with locking.exclusive_at(path, flags, timeout) as descriptor:
        yield descriptor


@contextlib.contextmanager
def _alone_with(
    path: str | os.PathLike[str], timeout: float | None, *, copy: bool
) -> Iterator[tuple[Archive, int]]:
    """An archive that nobody else opens or changes, and its descriptor for writing."""
    flags = os.O_RDONLY if copy else os.O_RDWR
    with _locked(path, timeout, flags) as descriptor:
        if not copy:
            _require_one_name(path, descriptor)
            _settle(path, descriptor)
        file = MappedFile(path, rule="FILE-1")
        try:
            journal.require_complete(file)  # of one that was not settled
            archive = Archive(file)
        except BaseException:
            file.close()
            raise
        with archive:
            yield archive, descriptor


def _require_one_name(path: str | os.PathLike[str], descriptor: int) -> None:
    names = os.fstat(descriptor).st_nlink
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


def _settle(path: str | os.PathLike[str], descriptor: int, *, force: bool = False) -> bool:
    """Takes back a change that was cut off, and removes the journal, of whichever file it is.

    Returns:
        Whether there was such a change.

    Raises:
        ArchiveError: The journal is of another file or damaged, and this one is no archive.
    """
    if not os.path.lexists(journal.path_of(path)):
        return False
    found = journal.read(path)
    if found is not None:
        with MappedFile(path) as file:
            is_of_file = force or (found.is_of(file) and _is_of_archive(found, file))
        if is_of_file:
            found.roll_back(descriptor)
            journal.remove(path)
            return True
    _require_archive(path)
    journal.remove(path)  # which was never completed, or is of no use to this archive
    return False


def _is_of_archive(found: Journal, file: MappedFile) -> bool:
    """Whether a file has the entries that stay, by the directory that a journal holds.

    Another archive may have been written into the same file since, as `cp` does.
    """
    tail = found.read(max(found.size - directory.TAIL_SIZE, found.spans[-1].offset), found.size)
    report = Report()
    try:
        bounds = directory.locate(tail, found.size, report)
        assert bounds is not None  # the report would have raised
        listed = directory.read(found.read(bounds.offset, bounds.size), bounds, report)
        for number, entry in enumerate(listed.entries):
            end = entry.data_offset + entry.nbytes
            if all(
                end <= start or start + nbytes <= entry.header_offset
                for start, nbytes in found.spans
            ):
                check_local_header(file, entry, listed.records, number, report)
    except ArchiveFormatError:
        return False
    return True


def _require_archive(path: str | os.PathLike[str]) -> None:
    with MappedFile(path) as file:
        try:
            Archive(file)
        except ArchiveFormatError as error:
            raise ArchiveError(
                f"expected an archive, or the journal of its last change, found a file that is "
                f"none ({error.message}) and a journal that is damaged or of another file, "
                f"{journal.path_of(path)}; if the two belong together, force=True (--force) "
                "writes it back; both are left as they are"
            ) from error


# What is written


@dataclass(frozen=True, slots=True)
class _Options:
    compact: bool = False
    copy: bool = False
    size_threshold: int | None = None
    convert_attribute: bool | None = None
    progress: Progress | None = None


def _replace_model(archive: Archive, descriptor: int, model: Model, options: _Options) -> None:
    threshold, convert_attribute = _placing(archive, options)
    with contextlib.ExitStack() as resources:
        if isinstance(model, onnx.ModelProto):
            given = _Given(model, resolver(archive, threshold, convert_attribute))
            for site in tensors.walk(model):
                if site.tensor.data_location == tensors.EXTERNAL:
                    referred(site, archive)  # whatever else is the matter with the model
        elif isinstance(model, str | os.PathLike):
            require_no_input(archive.path, [os.fspath(model)])  # which is locked
            source = resources.enter_context(open_source(model, archive=archive))
            given = _Given(source.model, source.resolve)
        else:
            raise TypeError(
                f"expected an onnx.ModelProto or the path of a .onnx, found {type(model)}"
            )
        plan = _plan(archive, given, threshold, convert_attribute)
        if not _keeps_all(plan, archive):
            in_order = _plan_in_archive_order(archive, given, threshold, convert_attribute)
            if in_order is not None:
                plan = in_order
            elif options.compact:
                _write_anew(archive, plan, options.progress)
                return
            else:
                raise ValueError(_why_moved(plan, archive))
        _write_end(archive, descriptor, plan, options)


def _change_model(
    archive: Archive,
    descriptor: int,
    change: Callable[[onnx.ModelProto], onnx.ModelProto],
    copy: bool,
) -> None:
    model = onnx.ModelProto()
    model.CopyFrom(archive.model)
    changed = change(model)
    if changed != archive.model:
        _replace_model(archive, descriptor, changed, _Options(copy=copy))


def _replace_tensor(
    archive: Archive,
    descriptor: int,
    name: str,
    array: ArrayLike,
    in_place: bool,
    copy: bool,
    progress: Progress | None,
) -> None:
    site = archive.tensors.site(name)
    elements = np.asarray(array)
    found = dtypes.of_array(elements)
    expected = dtypes.BY_NUMBER.get(site.tensor.data_type)
    if found != expected or elements.shape != tuple(site.tensor.dims):
        raise ValueError(
            f"{archive.path}: {site}: expected {dtypes.name_of(site.tensor.data_type)} of shape "
            f"{list(site.tensor.dims)}, found {found.name} of shape {list(elements.shape)}"
        )
    data = dtypes.as_raw_data(elements)
    key = tensors.location(site.tensor)
    if key is None:
        model = onnx.ModelProto()
        model.CopyFrom(archive.model)
        tensor = tensors.at(model, site.path)
        for field in tensors.DATA_FIELDS:
            tensor.ClearField(field)
        tensors.set_raw_data(tensor, bytes(data))
        _replace_model(archive, descriptor, model, _Options(copy=copy, progress=progress))
    else:
        _replace_entry(archive, descriptor, key, data, in_place, progress)


@dataclass(frozen=True, slots=True)
class _Given:
    """A new model, and what gives the bytes of its external tensors."""

    model: onnx.ModelProto
    resolve: Resolve


def _plan(archive: Archive, given: _Given, threshold: int, convert_attribute: bool) -> Plan:
    """The archive that `save` would make of the model."""
    return plan_archive(
        given.model,
        resolve=given.resolve,
        size_threshold=threshold,
        convert_attribute=convert_attribute,
        assets=kept_assets(archive),
        temporary=_directory_of(archive),
    )


def _directory_of(archive: Archive) -> str:
    return os.path.dirname(os.path.realpath(archive.path))


def _placing(archive: Archive, options: _Options) -> tuple[int, bool]:
    """The size threshold and `convert_attribute` by which the archive's tensors lie where they do.

    What `options` say takes their place. Where no threshold fits all tensors, the one that is given
    leaves those of the model where they are.
    """
    outside_attributes = has_outside_attributes(archive)
    convert_attribute = options.convert_attribute
    if convert_attribute is None:
        convert_attribute = outside_attributes
    threshold = options.size_threshold
    if threshold is None:
        threshold = DEFAULT_SIZE_THRESHOLD
        inside, outside = -1, threshold
        for site in tensors.walk(archive.model):
            if not (site.is_initializer or outside_attributes):
                continue
            key = tensors.location(site.tensor)
            if key is not None:
                outside = min(outside, archive.entries[key].nbytes)
            else:
                data_type = tensors.stored_type(site.tensor)
                if data_type is not None:
                    inside = max(inside, data_type.nbytes(site.tensor.dims))
        threshold = max(inside + 1, outside)
    return threshold, convert_attribute


def _keeps_all(plan: Plan, archive: Archive) -> bool:
    """Whether a plan leaves every entry of the archive but the model where it is."""
    return _kept(plan, archive) == len(archive.entries) - 1


def _kept(plan: Plan, archive: Archive) -> int:
    """How many entries of the archive a plan begins with."""
    pairs = zip(plan.items, archive.entries, strict=False)
    return sum(
        1
        for _ in takewhile(
            lambda pair: pair[0].name == pair[1] and _is_entry(pair[0], archive), pairs
        )
    )


def _is_entry(item: Item, archive: Archive) -> bool:
    """Whether an item has the bytes of the archive's entry of its name."""
    entry = archive.entries[item.name]
    if entry.nbytes != item.nbytes:
        return False
    data = item.data()
    source = _entry_of(data, archive)
    if source is not None:
        return source == item.name
    crc32 = 0
    for piece in data:
        crc32 = writer.crc32(piece, crc32)
    if crc32 != entry.crc32:
        return False
    offset = entry.data_offset
    for piece in data:
        if archive.file.read(offset, len(piece)) != piece:
            return False
        offset += len(piece)
    return True


def _entry_of(data: Data, archive: Archive) -> str | None:
    """The entry of the archive that data is, or None where it lies elsewhere."""
    if isinstance(data, EntryData):
        return data.name
    if isinstance(data, FileData) and data.identity == archive.file.identity:
        for name, entry in archive.entries.items():
            if (entry.data_offset, entry.nbytes) == (data.offset, data.nbytes):
                return name
    return None


def _plan_in_archive_order(
    archive: Archive, given: _Given, threshold: int, convert_attribute: bool
) -> Plan | None:
    """A plan for an archive whose order or keys are not those of `save`; None where there is none.

    An archive that was written tensor by tensor is such a one. That is no reason to move anything,
    as long as each of its tensors is still there.
    """
    placing = _placing(archive, _Options())
    before = _plan(archive, _Given(archive.model, resolver(archive, *placing)), *placing)
    if _keeps_all(before, archive):
        return None
    stored = {}
    for site in tensors.walk(given.model):
        if site.tensor.data_location == tensors.EXTERNAL:
            name = _entry_of(given.resolve(site), archive)
            if name is not None:
                stored[site.path] = name
    if sorted(stored.values()) != sorted(archive.sites):
        return None
    items, copy, held = plan_items(
        given.model,
        resolve=given.resolve,
        size_threshold=threshold,
        convert_attribute=convert_attribute,
        stored=stored,
        assigned=Keys(archive.sites),
        temporary=_directory_of(archive),
    )
    kept = [
        Item(name, entry.nbytes, partial(entry_data, archive, name))
        for name, entry in archive.entries.items()
        if name != MODEL_PROTO
    ]
    writer.require_entries(len(kept) + len(items) + 1)
    return Plan((*kept, *items), Pieces(proto.serialize_filled(copy, held)))


def _why_moved(plan: Plan, archive: Archive) -> str:
    """Why entries have to move."""
    planned = {item.name for item in plan.items}
    gone = [name for name in archive.entries if name not in planned and name != MODEL_PROTO]
    remedy = "compact=True (--compact) writes the whole archive anew"
    if gone:
        listed = ", ".join(map(shown, gone[:_MAX_SHOWN_ENTRIES]))
        more = f" and {len(gone) - _MAX_SHOWN_ENTRIES} more" * (len(gone) > _MAX_SHOWN_ENTRIES)
        return (
            f"{archive.path}: expected every tensor of the archive in the model, under its name, "
            f"found none for {listed}{more}; {remedy}"
        )
    kept = _kept(plan, archive)
    expected, found = list(archive.entries)[kept], plan.items[kept]
    what = "other contents of it" if found.name == expected else str(found.site or found.name)
    return (
        f"{archive.path}: expected entry {shown(expected)} where it is, since nothing may be "
        f"moved, found {what} in its place, in the order of the model; {remedy}"
    )


# How it is written


def _write_anew(archive: Archive, plan: Plan, progress: Progress | None) -> None:
    write_archive(
        plan,
        archive.path,
        alignment=archive.alignment,
        progress=progress,
        follow_links=False,
        is_locked=True,
    )


def _write_end(archive: Archive, descriptor: int, plan: Plan, options: _Options) -> None:
    """Writes what follows the archive's entries but for its model, which all stay."""
    offset = archive.entries[MODEL_PROTO].header_offset
    kept = archive.records[:-1]
    new = Plan(plan.items[len(kept) :], plan.model)

    def write(target: int) -> int:
        positioned = Positioned(target, offset)
        zip_writer = ZipWriter(positioned, alignment=archive.alignment, kept=kept, offset=offset)
        return stream(new, zip_writer, options.progress)

    if _changes_clone(archive, write):
        return
    if options.copy:
        _write_anew(archive, plan, options.progress)
    else:
        end = Span(offset, archive.file.size - offset)
        journal.change(archive.file, descriptor, [end], write)


def _replace_entry(
    archive: Archive,
    descriptor: int,
    key: str,
    data: memoryview,
    in_place: bool,
    progress: Progress | None,
) -> None:
    """Writes other bytes into a tensor's entry, or a new archive that has them."""
    options = _Options()
    threshold, convert_attribute = _placing(archive, options)
    given = _Given(archive.model, resolver(archive, threshold, convert_attribute))
    plan = _plan_in_archive_order(archive, given, threshold, convert_attribute)
    if plan is None:
        plan = _plan(archive, given, threshold, convert_attribute)
    crc32 = writer.crc32(data)
    entry = archive.entries[key]
    offset = archive.entries[MODEL_PROTO].header_offset
    kept = [
        replace(record, crc32=crc32) if name == key else record
        for name, record in zip(archive.entries, archive.records, strict=True)
    ][:-1]
    header = archive.file.read(entry.header_offset, entry.data_offset - entry.header_offset)
    unpacked = LocalHeader.unpack(header, 0)
    assert unpacked is not None  # it has been compared with the directory

    def write(target: int) -> int:
        positioned = Positioned(target, entry.header_offset)
        positioned.write(memoryview(replace(unpacked, crc32=crc32).pack()))
        for piece in writer.pieces(data):
            positioned.write(piece)
        end = Positioned(target, offset)
        zip_writer = ZipWriter(end, alignment=archive.alignment, kept=kept, offset=offset)
        return stream(Plan((), plan.model), zip_writer, progress)

    if in_place:
        spans = [
            Span(entry.header_offset, entry.data_offset + entry.nbytes - entry.header_offset),
            Span(offset, archive.file.size - offset),
        ]
        journal.change(archive.file, descriptor, spans, write)
    elif not _changes_clone(archive, write):
        changed = partial(Stored, data, crc32)
        items = [replace(item, data=changed) if item.name == key else item for item in plan.items]
        _write_anew(archive, replace(plan, items=tuple(items)), progress)


def _changes_clone(archive: Archive, write: Callable[[int], int]) -> bool:
    """Changes a clone that then takes the archive's name; gives whether there can be one."""
    replacement = Replacement(archive.path, follow_links=False)
    try:
        if not clone(archive.file, replacement.file):
            replacement.discard()
            return False
        target = replacement.file.fileno()
        os.ftruncate(target, write(target))
    except BaseException as error:
        replacement.discard(error)
        raise
    replacement.commit(partial(journal.superseding, archive.path, is_locked=True))
    return True
