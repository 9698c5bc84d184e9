"""Writes what an edit changed: into a clone, in place under the undo log, or as a new file.

Three kinds of change are distinguished:

- If every entry but the models stays where it is, one new end is written: new tensors and assets,
  models, directory and end records. It is written to a clone (a copy that shares blocks with the
  archive), which is renamed over the archive; where blocks cannot be shared, to the archive itself
  under an undo log (specification, section 10.4).
- If a tensor or an asset is replaced or removed, readers may have mapped the old one. So only a
  clone is changed; without clones, a new file is written.
- `compact` plans the whole archive anew, and writes a new file.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, takewhile

from onnxarchive.editing.changes import (
    ChangedModel,
    Draft,
    EditOptions,
    has_bytes,
    set_reshaped_apart,
)
from onnxarchive.editing.placeholders import Placeholders
from onnxarchive.errors import ChecksumError, Report, naming, shown
from onnxarchive.files import attributes, filesystem, locking, undo
from onnxarchive.files.checksums import Crc32
from onnxarchive.files.data import Stored
from onnxarchive.files.filesystem import directory_of
from onnxarchive.files.local_file import MappedFile, PositionalWriter
from onnxarchive.files.progress import ProgressCounter
from onnxarchive.files.replacement import Replacement
from onnxarchive.model import keys, proto
from onnxarchive.model.keys import ASSET_PREFIX, Keys, is_key
from onnxarchive.reading.archive import Archive
from onnxarchive.reading.contents import check_model_sizes, require_models
from onnxarchive.writing.options import WriteOptions
from onnxarchive.writing.plan import (
    Item,
    ModelToStore,
    Plan,
    plan_archive,
    plan_model,
    require_names,
)
from onnxarchive.writing.sharing import SharedEntries, type_and_dims
from onnxarchive.writing.stored_entries import (
    archive_options,
    asset_items,
    entry_data,
    entry_items,
)
from onnxarchive.writing.write import stream, write_file
from onnxarchive.zipformat import writer
from onnxarchive.zipformat.end_records import SEARCHED_SIZE
from onnxarchive.zipformat.records import DirectoryRecord, LocalHeader
from onnxarchive.zipformat.writer import ZipWriter

_MAX_SHOWN_ENTRIES = 3  # in a message
# Errors of a rename over a mount point, or over another user's file in some directories.
_NO_RENAME = (errno.EBUSY, errno.EPERM, errno.EACCES)


def commit(
    archive: Archive,
    drafts: Mapping[str, Draft],
    assets: Mapping[str, Item | None],
    placeholders: Placeholders,
    options: EditOptions,
) -> None:
    """Writes the changes of an edit; without a change, only if `compact` or `copy` asks for it.

    Args:
        archive: The archive. Its file is locked, and open for writing unless `options.copy`.
        drafts: Every model of the edited archive, by id.
        assets: The new entry of each assigned asset, by name; None for a deleted one.
        placeholders: The data of external tensors that are in no entry.
        options: The options of the edit.

    Raises:
        ArchiveFormatError: The edited archive would break a rule.
        ValueError: A tensor of the archive would be unused, or an assigned tensor is not in the
            model.
        UnfinishedEditError: Writing failed, and the old end could not be restored.
        OSError: The archive cannot be written. It is unchanged, unless only the last sync failed.
    """
    models = {id: ChangedModel(archive, draft, options) for id, draft in sorted(drafts.items())}
    assets = {
        name: item
        for name, item in assets.items()
        if item is None or not has_bytes(archive, name, item.data())
    }
    is_same = not assets and {*models} == {*archive.models}
    is_same = is_same and all(id == it.origin and not it.is_changed for id, it in models.items())
    if is_same and not (options.compact or options.copy):
        return
    plan = _plan_anew if options.compact else _plan_end
    entries = plan(archive, models, assets, placeholders, options)
    if (
        not (options.compact or options.copy or entries.plan.items)
        and _is_end(archive, entries)
        and _has_models(archive, entries.plan.models)
    ):
        return  # options asked for a change of tensors, and there was none
    file = _write(archive, entries, options)
    if file is not None:
        with file:
            locking.unlock(file.fileno())  # closing alone would leave the lock to forks


@dataclass(frozen=True, slots=True)
class _Entries:
    """The entries of an edited archive.

    Attributes:
        stay: The number of leading entries that keep their place.
        replaced: New bytes of some of them, by name.
        plan: The entries after them.
    """

    stay: int
    replaced: Mapping[str, Stored]
    plan: Plan


def _plan_end(
    archive: Archive,
    models: Mapping[str, ChangedModel],
    assets: Mapping[str, Item | None],
    placeholders: Placeholders,
    options: EditOptions,
) -> _Entries:
    """Plans an edit that leaves entries where they are, as far as no asset is replaced or removed.

    Raises:
        ArchiveFormatError: The edited archive would break a rule.
        ValueError: A tensor of the archive would be unused.
    """
    names = _kept_names(archive)
    uses = Counter(chain.from_iterable(_keys_of(archive, model) for model in models.values()))
    replaced: dict[str, Stored] = {}
    for model in models.values():
        replaced |= model.replace_entries(archive, uses)
    set_reshaped_apart(archive, models.values(), uses)
    end = _NewTensors(archive, placeholders, replaced.keys())
    serialized = {
        keys.model_entry(id): end.serialize(model, options) for id, model in models.items()
    }
    uses.update(end.shared)
    unused = [name for name in names if not (name in uses or name.startswith(ASSET_PREFIX))]
    _require_none_unused(archive, models.values(), unused)
    stay = len(names)
    items = end.items + [item for _, item in sorted(assets.items()) if item is not None]
    if not assets.keys().isdisjoint(names):
        stay, items = _moved(archive, names, items, assets)
        items = [
            Item.of(item.name, replaced.pop(item.name)) if item.name in replaced else item
            for item in items
        ]
    if not {item.name for item in items} <= {*names}:
        require_names([*names[:stay], *(item.name for item in items)])
    writer.require_entries(stay + len(items) + len(models))
    sizes = {name: archive.entries[name].nbytes for name in names[:stay]}
    sizes |= {item.name: item.nbytes for item in items}
    sizes = {name: size for name, size in sizes.items() if not name.startswith(ASSET_PREFIX)}
    check_model_sizes(
        {name: len(data) for name, data in serialized.items()}, archive.max_model_nbytes, Report()
    )
    require_models(serialized, sizes)
    ordered = [*serialized.items()]
    stored = (Item.of(name, Stored(memoryview(data))) for name, data in ordered[1:] + ordered[:1])
    return _Entries(stay, replaced, Plan(items, tuple(stored)))


def _moved(
    archive: Archive, names: Sequence[str], new: Sequence[Item], assets: Mapping[str, Item | None]
) -> tuple[int, list[Item]]:
    """The entries after a change of assets, all in the order of `save`.

    Args:
        archive: The archive.
        names: The names of its entries except the models.
        new: The entries that are added or replaced.
        assets: The assets that are added, replaced or, if None, removed.

    Returns:
        The number of leading entries that stay, and the entries after them.
    """
    by_name = {item.name: item for item in (*entry_items(archive, names), *new)}
    kept = [name for name in by_name if assets.get(name, by_name) is not None]
    order = [name for name in kept if not name.startswith(ASSET_PREFIX)]
    order += [name for name in sorted(kept) if name.startswith(ASSET_PREFIX)]
    pairs = zip(names, order, strict=False)
    stay = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1] not in assets, pairs))
    return stay, [by_name[name] for name in order[stay:]]


def _kept_names(archive: Archive) -> list[str]:
    """The names of all entries except the models, in the order of the archive."""
    return list(archive.entries.names[: archive.contents.first_model])


def _keys_of(archive: Archive, model: ChangedModel) -> Iterable[str]:
    """The keys of the entries that a model uses."""
    if model.has_other_tensors or model.origin is None:
        return model.stored.values()
    return archive._refs_of(model.origin)


class _NewTensors:
    """The tensors of changed models that get an entry of their own.

    Attributes:
        items: Their entries.
        shared: The keys of entries that such tensors share, since their bytes are equal.
    """

    def __init__(
        self, archive: Archive, placeholders: Placeholders, replaced: Collection[str]
    ) -> None:
        self.items: list[Item] = []
        self.shared: set[str] = set()
        self._archive = archive
        self._placeholders = placeholders
        self._replaced = replaced

    @cached_property
    def _assigned(self) -> Keys:
        return Keys(filter(is_key, _kept_names(self._archive)))

    @cached_property
    def _alike(self) -> SharedEntries:
        """The entries of the archive by content, without those that get other bytes."""
        alike = SharedEntries()
        for identifier in self._archive.models:
            alike.add(
                (key, ref, partial(entry_data, self._archive, key))
                for key, ref in self._archive._refs_of(identifier).items()
                if key not in self._replaced
            )
        return alike

    def serialize(self, model: ChangedModel, options: EditOptions) -> bytes:
        """Serializes a model, and adds the entries of its new tensors."""
        if not model.is_changed:
            assert model.origin is not None
            return bytes(self._archive.read(keys.model_entry(model.origin)))
        if not model.has_tensors_to_place():
            return proto.encode(model.message)
        replaced = [*self._archive.models] if model.origin is None else [model.origin]
        planned = plan_model(
            model.message,
            partial(model.data, self._placeholders),
            archive_options(
                self._archive, replaced, options.size_threshold, options.convert_attribute
            ),
            stored=model.stored,
            assigned=self._assigned,
            shared=self._alike,
            temporary=directory_of(self._archive._local_file.absolute_path),
        )
        self.items += planned.items
        self.shared |= planned.keys
        return b"".join(proto.filled(*planned.serialize()))


def _plan_anew(
    archive: Archive,
    models: Mapping[str, ChangedModel],
    assets: Mapping[str, Item | None],
    placeholders: Placeholders,
    options: EditOptions,
) -> _Entries:
    """Plans the whole archive as `save` does.

    Raises:
        ArchiveFormatError: The edited archive would break a rule.
    """
    for model in models.values():
        model.replace_entries(archive, Counter())
    kept = {item.name: item for item in asset_items(archive)} | dict(assets)
    plan = plan_archive(
        {
            id: ModelToStore(model.message, partial(model.data, placeholders))
            for id, model in models.items()
        },
        archive_options(archive, archive.models, options.size_threshold, options.convert_attribute),
        kept_assets=[item for item in kept.values() if item is not None],
        temporary=directory_of(archive._local_file.absolute_path),
    )
    sizes = {item.name: item.nbytes for item in plan.models}
    check_model_sizes(sizes, archive.max_model_nbytes, Report())
    return _Entries(0, {}, plan)


def _is_end(archive: Archive, entries: _Entries) -> bool:
    """True if an edit leaves every entry of the archive but the models as it is."""
    return entries.stay == archive.contents.first_model and not entries.replaced


def _has_models(archive: Archive, models: Collection[Item]) -> bool:
    """True if these are the models of the archive."""
    return len(models) == len(archive.models) and all(
        has_bytes(archive, item.name, item.data()) for item in models
    )


def _require_none_unused(
    archive: Archive, models: Iterable[ChangedModel], unused: Sequence[str]
) -> None:
    if unused:
        listed = ", ".join(map(shown, unused[:_MAX_SHOWN_ENTRIES]))
        more = f" and {len(unused) - _MAX_SHOWN_ENTRIES} more"
        others = [ref for model in models for ref in model.others if ref.is_initializer]
        before = [ref for key in unused for ref in archive.contents.refs(key)]
        kept, stored = ({(it.name, type_and_dims(it)) for it in refs} for refs in (others, before))
        names = sorted(name for name, _ in kept & stored)
        advice = f"; edit.tensors[{shown(names[0])}] = array replaces the elements" if names else ""
        raise ValueError(
            f"{archive.path}: no model would use {listed}"
            f"{more * (len(unused) > _MAX_SHOWN_ENTRIES)}; compact=True (--compact) rewrites the "
            f"whole archive without them{advice}"
        )


# Writing


def _write(archive: Archive, entries: _Entries, options: EditOptions) -> MappedFile | None:
    """Writes an edited archive.

    Returns:
        The new file at the archive's path, open, and still locked except on Windows; None if the
        archive was changed in place.
    """
    file = archive._local_file
    offset = archive.entries[archive.entries.names[entries.stay]].header_offset
    kept = entries.stay, _records(archive, entries)
    is_end = _is_end(archive, entries) and not options.compact

    def write(target: PositionalWriter) -> None:
        nbytes = sum(data.nbytes for data in entries.replaced.values()) + entries.plan.nbytes
        counter = ProgressCounter(options.progress, nbytes)
        for name, data in entries.replaced.items():
            _write_entry(archive, name, data, target, counter)
        target.offset = offset
        before = target.last(SEARCHED_SIZE)
        listed = archive.contents.directory.entries[: entries.stay]
        zip_writer = ZipWriter(
            target,
            alignment=archive.alignment,
            kept=kept,
            named=([it.name for it in listed], [it.header_offset for it in listed]),
            offset=offset,
            before=before,
        )
        stream(entries.plan, zip_writer, counter)

    file.require_own()
    for name in entries.replaced:
        archive._require_header(name)
    if not options.compact:
        changed = _changed_clone(file, write, else_in_place=is_end and not options.copy)
        if changed is not None:
            return changed
    if (
        is_end
        and not (options.compact or options.copy)
        and file.size - offset <= undo.MAX_END_NBYTES
    ):
        # Compares the local headers: a rollback would refuse the archive if one were wrong.
        archive._require_headers(archive.entries)
        new_size = entries.plan.size(archive.alignment, offset, kept)
        undo.change_end(file, offset, new_size, write)
        return None
    items = (
        Item.of(item.name, entries.replaced.get(item.name) or item.data())
        for item in entry_items(archive, archive.entries.names[: entries.stay])
    )
    plan = replace(entries.plan, items=[*items, *entries.plan.items])
    write_options = WriteOptions(alignment=archive.alignment, progress=options.progress)
    return write_file(plan, file.absolute_path, write_options, is_locked=True)


def _records(archive: Archive, entries: _Entries) -> bytes:
    """The directory records of the entries that keep their place, with their new CRC-32s."""
    records = [*archive._records[: entries.stay]]
    for name, data in entries.replaced.items():
        number = archive.entries.index_of[name]
        record = DirectoryRecord.unpack(records[number])
        assert record is not None
        assert data.crc32 is not None
        records[number] = record._replace(crc32=data.crc32).pack()
    return b"".join(records)


def _write_entry(
    archive: Archive,
    name: str,
    data: Stored,
    target: PositionalWriter,
    counter: ProgressCounter,
) -> None:
    """Writes new bytes of an entry, and its CRC-32 in the local header."""
    entry = archive.entries[name]
    packed = archive._local_file.read(entry.header_offset, entry.data_offset - entry.header_offset)
    header = LocalHeader.unpack(packed, 0)
    assert header is not None
    assert data.crc32 is not None
    target.offset = entry.header_offset
    target.write(header._replace(crc32=data.crc32).pack())
    written = Crc32()
    for piece in written(counter(data)):
        target.write(piece)
    if written.value != data.crc32:
        raise ChecksumError(
            f"{archive.path}: entry {shown(name)}: the array changed while it was written: "
            f"expected CRC-32 {data.crc32:#010x}, found {written.value:#010x}"
        )


def _changed_clone(
    file: MappedFile, write: Callable[[PositionalWriter], None], *, else_in_place: bool
) -> MappedFile | None:
    """Writes to a clone, which then replaces the archive; None if cloning fails.

    Args:
        file: The archive.
        write: Writes to the clone, which is cut off where `write` stops.
        else_in_place: Whether the caller can change the file in place instead. If True, the result
            is also None for a clone that would lose the archive's owner or attributes, or cannot be
            renamed over the archive.
    """
    if not filesystem.may_clone(file):
        return None
    try:
        replacement = Replacement(file.absolute_path, follow_links=False, is_locked=True)
    except OSError:  # a new file, if needed, raises it again
        return None
    try:
        clone = replacement.fileno()
        with naming(file.path):
            is_unfit = else_in_place and attributes.keep_owner(clone, file.fileno(), file.status())
        if is_unfit or not filesystem.clone(file, clone):
            replacement.discard()
            return None
        write(replacement.file)
        with naming(file.path):
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
