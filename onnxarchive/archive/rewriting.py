"""Replaces, adds, removes and renames models of an archive.

An edit leaves tensors and assets in place, and writes a new end of the file: new tensors, models,
directory and end records. The new end is written to a clone (a copy that shares blocks with the
archive). The clone gets the archive's owner, and is renamed over the archive. If one of these three
steps is not possible or not permitted, the new end is written to the archive itself, with an undo
log.

In three cases an edit writes a whole new file instead: if the option `compact` moves or removes an
entry; if the option `copy` is true, but the file cannot be cloned; or if there is no clone, and the
old end is too large for an undo log.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import onnx

from onnxarchive.archive.contents import check_model_sizes
from onnxarchive.archive.items import Item, Items, Resolve
from onnxarchive.archive.options import WriteOptions
from onnxarchive.archive.planning import (
    ModelToStore,
    Plan,
    SerializedModel,
    model_items,
    plan_archive,
    plan_model,
    require_model_ids,
)
from onnxarchive.archive.reading import Archive
from onnxarchive.archive.referring import (
    EntryData,
    archive_options,
    asset_items,
    entry_data,
    entry_items,
    referred_data,
    require_referring,
)
from onnxarchive.archive.sharing import SharedEntries, type_and_dims
from onnxarchive.archive.snapshot import require_model
from onnxarchive.archive.writing import stream, write_file
from onnxarchive.buffers.checksums import Crc32
from onnxarchive.buffers.counting import Progress, ProgressCounter
from onnxarchive.buffers.data import Data
from onnxarchive.errors import ArchiveFormatError, Report, naming, shown
from onnxarchive.model import keys, walking
from onnxarchive.model.keys import Keys
from onnxarchive.model.tensors import TensorRef
from onnxarchive.model.walking import Path
from onnxarchive.sources.source import Source, open_model
from onnxarchive.storage import attributes, undo
from onnxarchive.storage.file_data import FileData
from onnxarchive.storage.files import MappedFile, PositionalWriter
from onnxarchive.storage.filesystem import clone
from onnxarchive.storage.paths import directory_of, require_no_input
from onnxarchive.storage.replacement import Replacement
from onnxarchive.zipformat import writer
from onnxarchive.zipformat.false_ends import SEARCHED_SIZE
from onnxarchive.zipformat.writer import ZipWriter

__all__ = [
    "EditOptions",
    "GivenModel",
    "changed_clone",
    "continued_writer",
    "end_offset",
    "kept_names",
    "write_anew",
    "write_model",
    "write_renamed",
    "write_without",
]

_MAX_SHOWN_ENTRIES = 3  # in a message
# Errors of a rename over a mount point, or over another user's file in some directories.
_NO_RENAME = (errno.EBUSY, errno.EPERM, errno.EACCES)

# The path of a .onnx file, or a ModelProto whose external tensors refer to the archive by key.
GivenModel: TypeAlias = onnx.ModelProto | str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class EditOptions:
    """Options of an edit of models; see `onnxarchive.replace_model`."""

    compact: bool = False
    copy: bool = False
    size_threshold: int | None = None
    convert_attribute: bool | None = None
    progress: Progress | None = None


def write_model(
    archive: Archive, given: GivenModel, options: EditOptions, identifier: str | None = None
) -> MappedFile:
    """Replaces or adds a model; see `onnxarchive.replace_model`.

    Args:
        archive: The archive. Its file is locked, and open for writing unless `options.copy`.
        given: The model.
        options: The options of the edit.
        identifier: The id of the model; None for the id of `archive.model`.

    Returns:
        The file at the archive's path after the edit, open, and still locked except on Windows.
    """
    identifier = archive.model_id if identifier is None else identifier
    return _write_models(archive, {**archive.models, identifier: given}, options)


def write_without(archive: Archive, identifier: str, options: EditOptions) -> MappedFile:
    """Removes a model other than the default one from an archive; see `write_model`.

    Raises:
        ModelNotFoundError: There is no model of this id.
        ValueError: The id is the default model's id.
    """
    _require_further(archive, identifier)
    return _write_models(
        archive, {id: model for id, model in archive.models.items() if id != identifier}, options
    )


def write_renamed(archive: Archive, old: str, new: str, options: EditOptions) -> MappedFile:
    """Changes the id of a model other than the default one; see `write_model`.

    Raises:
        ModelNotFoundError: There is no model with the id `old`.
        ValueError: `old` is the default model's id, or `new` is taken or not an id.
    """
    _require_further(archive, old)
    if not new or new in archive.models:
        raise ValueError(
            f"{archive.path}: expected an id that no model has, {keys.MODEL_ID}, got {new!r}"
        )
    models = {new if id == old else id: model for id, model in archive.models.items()}
    return _write_models(archive, models, options)


def _require_further(archive: Archive, identifier: str) -> None:
    if not identifier:
        raise ValueError(
            f"{archive.path}: expected the id of a model other than the default one, got ''; "
            "replace_model replaces the default one"
        )
    require_model(archive.models, identifier)


def _write_models(
    archive: Archive, given: Mapping[str, GivenModel], options: EditOptions
) -> MappedFile:
    """Replaces the models of an archive; see `write_model`.

    Args:
        archive: The archive.
        given: All models of the new archive by id. At most one is new; the others must be the
            objects in `archive.models`.
        options: The options of the edit.
    """
    require_model_ids(given)
    replaced = [name for name, model in archive.models.items() if given.get(name) is not model]
    planned = list(archive.models) if options.compact or not replaced else replaced
    write_options = replace(
        archive_options(archive, planned, options.size_threshold, options.convert_attribute),
        progress=options.progress,
    )
    own = {id(model) for model in archive.models.values()}
    with contextlib.ExitStack() as resources:
        models = {
            identifier: ModelToStore(model, partial(referred_data, archive))
            if isinstance(model, onnx.ModelProto) and id(model) in own
            else _open_given(archive, model, resources)
            for identifier, model in given.items()
        }
        is_only_model = list(given) == list(archive.models) == [""]
        plan = None
        if options.compact or is_only_model:
            plan = plan_archive(
                models,
                write_options,
                kept_assets=asset_items(archive),
                temporary=directory_of(archive._local_file.absolute_path),
            )
        keeps_all = plan is not None and _keeps_all(plan, archive)
        if plan is None or not (keeps_all or options.compact):
            plan = _plan_keeping_all(archive, models, write_options, plan)
            keeps_all = True
        # With the limit given to `open`, the caller must be able to read the edited archive.
        sizes = {item.name: item.nbytes for item in plan.models}
        check_model_sizes(sizes, archive.max_model_nbytes, Report())
        if keeps_all:
            return _write_end(archive, plan, write_options, copy=options.copy)
        return write_anew(archive, plan, write_options)


def _open_given(
    archive: Archive, given: GivenModel, resources: contextlib.ExitStack
) -> ModelToStore:
    """Opens a new model; if `given` is a path, its files stay open until `resources` is closed."""
    if isinstance(given, onnx.ModelProto):
        require_referring(given, archive)
        return ModelToStore(given, partial(referred_data, archive))
    if isinstance(given, str | os.PathLike):
        # The archive is locked, so it cannot be its own input.
        require_no_input(archive._local_file.absolute_path, [os.fspath(given)])
        opened = open_model(given, elsewhere=partial(referred_data, archive))
        source = resources.enter_context(opened)
        return ModelToStore(source.model, _by_entry(source, archive))
    raise TypeError(f"expected an onnx.ModelProto or the path of a .onnx, found {type(given)}")


def _by_entry(source: Source, archive: Archive) -> Resolve:
    """The `Resolve` of a source; data that is an entry of the archive becomes `EntryData`.

    A `.onnx` written by `link`, for example, has such data.

    Raises:
        ArchiveFormatError: The bytes of a tensor overlap the archive's models or directory.
    """
    entries = [archive.entries[name] for name in kept_names(archive)]
    name_of = {(entry.data_offset, entry.nbytes): entry.name for entry in entries}
    end = end_offset(archive)
    data: dict[Path, Data] = {}
    for path, found in source.data.items():
        data[path] = found
        if isinstance(found, FileData) and found.identity == archive._local_file.identity:
            name = name_of.get((found.offset, found.nbytes))
            if name is not None:
                data[path] = entry_data(archive, name)
            elif found.nbytes and found.offset + found.nbytes > end:
                ref = TensorRef(path, walking.at(source.model, path))
                raise ArchiveFormatError(
                    f"{ref}: expected external data in a tensor of the archive, found "
                    f"{found.nbytes} bytes at offset {found.offset}, in a model or the directory"
                )
    return lambda ref: data[ref.path]


def kept_names(archive: Archive) -> list[str]:
    """The names of all entries except the models, in the order of the archive."""
    return list(archive.entries.names[: archive._snapshot.model_numbers.start])


def end_offset(archive: Archive) -> int:
    """Offset in bytes of the first model's entry, which is the end of all other entries."""
    first = archive._snapshot.model_numbers.start
    return archive.entries[archive.entries.names[first]].header_offset


def _keeps_all(plan: Plan, archive: Archive) -> bool:
    """True if the plan begins with all the archive's entries except the models, unchanged."""
    names = kept_names(archive)
    return plan.items.names[: len(names)] == names and all(
        _is_entry(item, archive) for item in plan.items[: len(names)]
    )


def _is_entry(item: Item, archive: Archive) -> bool:
    """True if an item's data is the archive's entry of the same name, or has the entry's bytes."""
    entry = archive.entries[item.name]
    if entry.nbytes != item.nbytes:
        return False
    data = item.data()
    if isinstance(data, EntryData):
        return data.name == item.name
    if Crc32.of(data).value != entry.crc32:
        return False
    offset = entry.data_offset
    for piece in data:
        if archive._local_file.read(offset, len(piece)) != piece:
            return False
        offset += len(piece)
    return True


def _plan_keeping_all(
    archive: Archive,
    models: Mapping[str, ModelToStore],
    options: WriteOptions,
    plan: Plan | None,
) -> Plan:
    """Plans all tensors and assets of the archive unchanged, then new tensors and the models.

    Args:
        archive: The archive.
        models: The models of the new archive.
        options: The options of the plan.
        plan: The plan of the archive's only model, if already made; else None.

    Raises:
        ValueError: A tensor of the archive would be unused.
    """
    temporary = directory_of(archive._local_file.absolute_path)
    assigned = Keys(archive._keys)
    shared = SharedEntries() if len(models) > 1 else None
    items = Items()
    serialized: dict[str, SerializedModel] = {}
    missing = dict.fromkeys(archive._keys)
    id_of = {id(model): identifier for identifier, model in archive.models.items()}
    unchanged = {
        identifier: id_of[id(given.model)]
        for identifier, given in models.items()
        if id(given.model) in id_of
    }
    kept_refs: dict[str, TensorRef] = {}
    if shared is not None:
        for identifier in archive.models:
            refs = archive._refs_of(identifier)
            shared.add((key, ref, partial(entry_data, archive, key)) for key, ref in refs.items())
    for identifier in unchanged.values():
        kept_refs.update(archive._refs_of(identifier))
    for identifier, given in sorted(models.items()):
        if identifier in unchanged:
            name = keys.model_entry(unchanged[identifier])
            serialized[identifier] = SerializedModel(archive.read(name))
            named: Iterable[str] = archive._refs_of(unchanged[identifier])
        else:
            own = plan_model(given.model, given.resolve, options) if plan is None else plan
            stored = _stored(archive, own.items, kept_refs)
            planned = plan_model(
                given.model,
                given.resolve,
                options,
                stored=stored,
                assigned=assigned,
                shared=shared,
                temporary=temporary,
            )
            items.extend(planned.items)
            serialized[identifier] = planned.serialize()
            named = planned.keys
        for key in named:
            missing.pop(key, None)
    _require_none_missing(archive, list(missing))
    kept = entry_items(archive, kept_names(archive))
    writer.require_entries(len(kept) + len(items) + len(serialized))
    return Plan(Items((*kept, *items)), model_items(serialized))


def _require_none_missing(archive: Archive, missing: Sequence[str]) -> None:
    if missing:
        listed = ", ".join(map(shown, missing[:_MAX_SHOWN_ENTRIES]))
        more = f" and {len(missing) - _MAX_SHOWN_ENTRIES} more"
        raise ValueError(
            f"{archive.path}: no model would use {listed}"
            f"{more * (len(missing) > _MAX_SHOWN_ENTRIES)}; compact=True (--compact) rewrites the "
            "whole archive without them"
        )


def _stored(
    archive: Archive, items: Iterable[Item], others: Mapping[str, TensorRef]
) -> dict[Path, str]:
    """The key of each planned tensor whose data the archive already holds, by the tensor's path.

    No key occurs twice.

    Args:
        archive: The archive.
        items: The planned tensors.
        others: The tensors of other models by key; a shared key needs equal type and dims.
    """
    stored: dict[Path, str] = {}
    taken: set[str] = set()
    existing = set(archive._keys)
    for item in items:
        if item.ref is None:
            continue
        data = item.data()
        key = data.name if isinstance(data, EntryData) else item.name
        if key in taken or type_and_dims(others.get(key, item.ref)) != type_and_dims(item.ref):
            continue
        if isinstance(data, EntryData) or (key in existing and _is_entry(item, archive)):
            taken.add(key)
            stored[item.ref.path] = key
    return stored


def write_anew(archive: Archive, plan: Plan, options: WriteOptions) -> MappedFile:
    """Writes a new file, which then replaces the archive."""
    archive._local_file.require_locking_process()
    return write_file(plan, archive._local_file.absolute_path, options, is_locked=True)


def _write_end(archive: Archive, plan: Plan, options: WriteOptions, *, copy: bool) -> MappedFile:
    """Writes new tensors, models, directory and end records after the kept entries."""
    offset = end_offset(archive)
    count = len(kept_names(archive))
    kept = count, archive._records[:count].pack()
    new = Plan(plan.items[count:], plan.models)

    def write(target: PositionalWriter) -> None:
        zip_writer = continued_writer(archive, target, kept)
        stream(new, zip_writer, ProgressCounter(options.progress, new.nbytes))

    changed = changed_clone(archive, offset, write, else_in_place=not copy)
    if changed is not None:
        return changed
    if copy or archive._local_file.size - offset > undo.MAX_END_NBYTES:
        return write_anew(archive, plan, options)
    # Compares the local headers: a rollback would refuse the archive if one were wrong.
    archive._fetch_entries(archive.entries)
    undo.change_end(archive._local_file, offset, new.size(options.alignment, offset, kept), write)
    return archive._local_file.reopened()


def continued_writer(
    archive: Archive, target: PositionalWriter, kept: tuple[int, bytes]
) -> ZipWriter:
    """A writer that continues an archive after the kept entries."""
    count, _ = kept
    entries = archive._snapshot.directory.entries
    return ZipWriter(
        target,
        alignment=archive.alignment,
        kept=kept,
        named=(entries.names[:count], entries.header_offsets[:count]),
        offset=target.offset,
        before=target.last(SEARCHED_SIZE),
    )


def changed_clone(
    archive: Archive, offset: int, write: Callable[[PositionalWriter], None], *, else_in_place: bool
) -> MappedFile | None:
    """Writes a new end to a clone, which then replaces the archive; None if cloning fails.

    Args:
        archive: The archive.
        offset: Offset at which `write` begins, in bytes.
        write: Writes from `offset` on. The clone is cut off where `write` stops.
        else_in_place: Whether the caller can change the file in place instead. If True, the result
            is also None for a clone that cannot be given the archive's owner, or cannot be renamed
            over the archive.
    """
    archive._local_file.require_locking_process()
    try:
        replacement = Replacement(
            archive._local_file.absolute_path, follow_links=False, is_locked=True
        )
    except OSError:  # `write_anew`, if needed, raises it again
        return None
    try:
        old = archive._local_file.status()
        is_fit = not else_in_place or attributes.keep_owner(replacement.fileno(), old)
        if not (is_fit and clone(archive._local_file, replacement.fileno())):
            replacement.discard()
            return None
        replacement.file.offset = offset
        write(replacement.file)
        with naming(archive.path):
            os.ftruncate(replacement.fileno(), replacement.file.offset)
    except BaseException:
        replacement.discard()
        raise
    try:
        return replacement.commit_open()
    except OSError as error:
        if not else_in_place or error.errno not in _NO_RENAME:
            raise
        return None
