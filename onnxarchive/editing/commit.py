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
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, takewhile
from typing import TypeAlias

from onnxarchive.editing.changes import (
    ChangedModel,
    Changes,
    has_bytes,
    in_memory,
    packed_changes,
)
from onnxarchive.errors import ChecksumError, Report, naming, shown
from onnxarchive.files import attributes, filesystem, locking, undo
from onnxarchive.files.checksums import Crc32
from onnxarchive.files.data import Stored
from onnxarchive.files.filesystem import directory_of
from onnxarchive.files.local_file import MappedFile, PositionalWriter
from onnxarchive.files.progress import ProgressCounter
from onnxarchive.files.replacement import Replacement
from onnxarchive.model import keys, proto, tensors, walking
from onnxarchive.model.keys import ASSET_PREFIX, Keys, is_key
from onnxarchive.model.prepacked import PREFIX
from onnxarchive.model.tensors import TensorRef
from onnxarchive.reading.archive import Archive
from onnxarchive.reading.contents import check_model_sizes, require_models
from onnxarchive.writing.options import WriteOptions
from onnxarchive.writing.plan import (
    Item,
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
    entry_of,
)
from onnxarchive.writing.write import stream, write_file
from onnxarchive.zipformat import writer
from onnxarchive.zipformat.end_records import SEARCHED_SIZE
from onnxarchive.zipformat.records import DirectoryRecord, LocalHeader
from onnxarchive.zipformat.writer import ZipWriter

_MAX_SHOWN_ENTRIES = 3  # in a message
# Errors of a rename over a mount point, or over another user's file in some directories.
_NO_RENAME = (errno.EBUSY, errno.EPERM, errno.EACCES)

_Models: TypeAlias = Mapping[str, ChangedModel]  # by id
# The new entry of each changed asset, by name; None for one to remove.
_Assets: TypeAlias = Mapping[str, Item | None]


@dataclass(frozen=True)
class _Plan(Plan):
    """The entries of an edited archive that are written.

    Attributes:
        stay: The number of leading entries of the archive that keep their place before the others.
        replaced: New bytes of some of these entries, by name.
    """

    stay: int = 0
    replaced: Mapping[str, Stored] = field(default_factory=dict)

    def is_end(self, archive: Archive) -> bool:
        """True if every entry of the archive but the models stays as it is."""
        return self.stay == archive.contents.first_model and not self.replaced


def commit(changes: Changes) -> None:
    """Writes the changes of an edit; without a change, only if `compact` or `copy` asks for it.

    Raises:
        ArchiveFormatError: The edited archive would break a rule, or an assigned file has changed.
        ValueError: A tensor of the archive would be unused, or an assigned tensor is not in the
            model.
        UnfinishedEditError: Writing failed, and the old end could not be restored.
        OSError: The archive cannot be written. It is unchanged, unless only the last sync failed.
    """
    archive, options = changes.archive, changes.options
    changes.placeholders.require_unchanged()
    models = {id: ChangedModel(changes, draft) for id, draft in sorted(changes.drafts.items())}
    assets = changes.assets
    are_same = models.keys() == {*archive.models} and not any(
        model.has_other_tensors or model.origin != id for id, model in models.items()
    )
    # Packed weights that the edit assigns are those of the models as they were.
    if not (are_same or any(name.startswith(PREFIX) for name in assets)):
        assets = assets | packed_changes(archive, models)
    assets = {
        name: item
        for name, item in assets.items()
        if (name in archive.entries if item is None else not has_bytes(archive, name, item.data))
    }
    plan = (_plan_anew if options.compact else _plan_end)(changes, models, assets)
    is_same = (
        plan.is_end(archive)
        and not plan.items
        and len(models) == len(archive.models)
        and all(has_bytes(archive, name, data) for name, data in plan.models)
    )
    if options.compact or options.copy or not is_same:
        _write(changes, plan)


# Planning


def _plan_anew(changes: Changes, models: _Models, assets: _Assets) -> _Plan:
    """Plans the whole archive as `save` does."""
    archive, options = changes.archive, changes.options
    items = {item.name: item for item in asset_items(archive)} | dict(assets)
    plan = plan_archive(
        {id: model.source() for id, model in models.items()},
        archive_options(archive, archive.models, options.size_threshold, options.convert_attribute),
        assets=[item for item in items.values() if item is not None],
        temporary=directory_of(changes.file.absolute_path),
    )
    sizes = {name: data.nbytes for name, data in plan.models}
    check_model_sizes(sizes, archive.max_model_nbytes, Report())
    return _Plan(plan.items, plan.models)


def _plan_end(changes: Changes, models: _Models, assets: _Assets) -> _Plan:
    """Plans an edit that leaves entries where they are, as far as no asset is replaced or removed.

    Raises:
        ArchiveFormatError: The edited archive would break a rule.
        ValueError: A tensor of the archive would be unused.
    """
    archive = changes.archive
    names = archive.entries.names[: archive.contents.first_model]
    uses = Counter(chain.from_iterable(model.keys for model in models.values()))
    replaced = _replaced(models, uses)
    _set_reshaped_apart(archive, models, uses)
    serialized, tensor_items = _serialize(changes, models, uses, replaced)
    unused = [name for name in names if not (name in uses or name.startswith(ASSET_PREFIX))]
    if unused:
        raise _unused(archive, models, unused)
    new = {item.name: item for item in tensor_items}
    new |= {name: item for name, item in sorted(assets.items()) if item is not None}
    order, stay = [*names, *new], len(names)
    if not assets.keys().isdisjoint(names):  # then in the order of `save`
        remaining = [name for name in dict.fromkeys(order) if assets.get(name, name) is not None]
        order = [name for name in remaining if not name.startswith(ASSET_PREFIX)]
        order += sorted(name for name in remaining if name.startswith(ASSET_PREFIX))
        pairs = zip(names, order, strict=False)
        stay = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1] not in assets, pairs))
    new |= {name: Item(name, replaced.pop(name)) for name in order[stay:] if name in replaced}
    items = [new[name] if name in new else entry_items(archive, [name])[0] for name in order[stay:]]
    if any(name not in archive.entries for name in new):
        require_names(order)
    writer.require_entries(len(order) + len(models))
    model_sizes = {name: len(data) for name, data in serialized.items()}
    check_model_sizes(model_sizes, archive.max_model_nbytes, Report())
    sizes = {entry.name: entry.nbytes for entry in archive.contents.directory.entries[:stay]}
    sizes |= {name: data.nbytes for name, data in items}
    tensor_sizes = {name: it for name, it in sizes.items() if not name.startswith(ASSET_PREFIX)}
    require_models(serialized, tensor_sizes)
    last = [*serialized][1:] + [*serialized][:1]  # the default model
    stored = [Item(name, Stored(memoryview(serialized[name]))) for name in last]
    return _Plan(items, tuple(stored), stay=stay, replaced=replaced)


def _replaced(models: _Models, uses: Counter[str]) -> dict[str, Stored]:
    """The new bytes of entries whose tensor has other elements.

    An entry that other models use stays, and the tensor gets an entry of its own.

    Args:
        models: The models of the edited archive.
        uses: The number of models that use an entry, by key. It is updated.
    """
    replaced: dict[str, Stored] = {}
    for model in models.values():
        for path, data in [*model.elements.items()]:
            key = model.stored.get(path)
            if key is None:
                continue
            ref = TensorRef(path, walking.at(model.message, path))
            if uses[key] > 1:
                model.set_apart(ref, data, uses)
            else:
                stored = in_memory(data)
                checked = tensors.checked(ref, stored, Report(), entry=key)
                replaced[key] = Stored(stored.view, Crc32.of(checked).value)
    return replaced


def _set_reshaped_apart(archive: Archive, models: _Models, uses: Counter[str]) -> None:
    """Sets tensors apart that other models use with another data type or shape (DATA-8)."""
    if len(uses) == uses.total():  # no entry is shared
        return
    first: dict[str, object] = {}
    for model in sorted(models.values(), key=lambda model: model.has_other_tensors):
        if not model.has_other_tensors:
            first |= {key: type_and_dims(ref) for key, ref in model.refs.items() if uses[key] > 1}
            continue
        for path, key in [*model.stored.items()]:
            ref = TensorRef(path, walking.at(model.message, path))
            if uses[key] > 1 and first.setdefault(key, type_and_dims(ref)) != type_and_dims(ref):
                model.set_apart(ref, entry_data(archive, key), uses)


def _serialize(
    changes: Changes, models: _Models, uses: Counter[str], replaced: Mapping[str, Stored]
) -> tuple[dict[str, bytes], list[Item]]:
    """Serializes the models.

    Args:
        changes: The changes of the edit.
        models: The models of the edited archive.
        uses: The number of models that use an entry, by key. Keys of further entries are added.
        replaced: The new bytes of entries, by key.

    Returns:
        The models by entry name, and the entries of their new tensors.
    """
    archive, options = changes.archive, changes.options
    serialized: dict[str, bytes] = {}
    items: list[Item] = []
    assigned, shared = Keys(), SharedEntries()
    if any(model.is_changed and model.others for model in models.values()):
        assigned = Keys(filter(is_key, archive.entries.names))
        for checked in archive.contents.models.values():
            # Without entries that get other bytes.
            shared.add(
                (key, ref, entry_of(archive, key, ref))
                for key, ref in checked.refs.items()
                if key not in replaced
            )
    for id, model in models.items():
        name = keys.model_entry(id)
        if not model.is_changed:
            serialized[name] = bytes(archive.read(keys.model_entry(model.origin or "")))
        elif not model.others:
            serialized[name] = proto.encode(model.message)
        else:
            origins = [*archive.models] if model.origin is None else [model.origin]
            planned = plan_model(
                model.source(model.stored),
                archive_options(
                    archive, origins, options.size_threshold, options.convert_attribute
                ),
                stored=model.stored,
                assigned=assigned,
                shared=shared,
                temporary=directory_of(changes.file.absolute_path),
            )
            items += planned.items
            uses.update(planned.shared)
            serialized[name] = b"".join(proto.filled(*planned.serialize()))
    return serialized, items


def _unused(archive: Archive, models: _Models, unused: Sequence[str]) -> ValueError:
    """The error for tensors of the archive that no model would use."""
    listed = ", ".join(map(shown, unused[:_MAX_SHOWN_ENTRIES]))
    if len(unused) > _MAX_SHOWN_ENTRIES:
        listed += f" and {len(unused) - _MAX_SHOWN_ENTRIES} more"
    new = [ref for model in models.values() for ref in model.others if ref.is_initializer]
    old = [ref for key in unused for ref in archive.contents.refs(key)]
    new_kinds, old_kinds = ({(ref.name, type_and_dims(ref)) for ref in refs} for refs in (new, old))
    names = sorted(name for name, _ in new_kinds & old_kinds)
    advice = f"; edit.tensors[{shown(names[0])}] = array replaces the elements" if names else ""
    return ValueError(
        f"{archive.path}: no model would use {listed}; compact=True (--compact) rewrites the whole "
        f"archive without them{advice}"
    )


# Writing


def _write(changes: Changes, plan: _Plan) -> None:
    """Writes an edited archive: to a clone, in place, or to a new file."""
    archive, file, options = changes.archive, changes.file, changes.options
    directory = archive.contents.directory
    staying, offset = directory.entries[: plan.stay], directory.entries[plan.stay].header_offset
    kept = plan.stay, _records(archive, plan)

    def write(target: PositionalWriter) -> None:
        nbytes = sum(data.nbytes for data in plan.replaced.values()) + plan.nbytes
        counter = ProgressCounter(options.progress, nbytes)
        for name, data in plan.replaced.items():
            _write_entry(archive, name, data, target, counter)
        target.offset = offset
        zip_writer = ZipWriter(
            target,
            alignment=archive.alignment,
            kept=kept,
            named=([it.name for it in staying], [it.header_offset for it in staying]),
            offset=offset,
            before=target.last(SEARCHED_SIZE),
        )
        stream(plan, zip_writer, counter)

    file.require_own()
    is_end = plan.is_end(archive) and not (options.compact or options.copy)
    if not options.compact:
        _require_headers(archive, plan.replaced)
        if _write_clone(file, write, else_in_place=is_end):
            return
    if is_end and file.size - offset <= undo.MAX_END_NBYTES:
        # A rollback would refuse the archive if a local header were wrong.
        _require_headers(archive, archive.entries)
        undo.change_end(file, offset, plan.size(archive.alignment, offset, kept), write)
        return
    items = [
        Item(name, plan.replaced.get(name) or data)
        for name, data in entry_items(archive, archive.entries.names[: plan.stay])
    ]
    write_options = WriteOptions(alignment=archive.alignment, progress=options.progress)
    plan = replace(plan, items=[*items, *plan.items])
    with write_file(plan, file.absolute_path, write_options, is_locked=True) as written:
        locking.unlock(written.fileno())  # closing alone would leave the lock to forks


def _require_headers(archive: Archive, names: Iterable[str]) -> None:
    for name in names:
        archive.contents.require_header(archive.entries.index_of[name])


def _records(archive: Archive, plan: _Plan) -> bytes:
    """The directory records of the entries that keep their place, with their new CRC-32s."""
    records = [*archive.contents.directory.records[: plan.stay]]
    for name, data in plan.replaced.items():
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
    packed = archive.contents.file.read(
        entry.header_offset, entry.data_offset - entry.header_offset
    )
    header = LocalHeader.unpack(packed)
    assert header is not None
    assert data.crc32 is not None
    target.offset = entry.header_offset
    target.write(header._replace(crc32=data.crc32).pack())
    checksum = Crc32()
    for piece in checksum(counter(data)):
        target.write(piece)
    if checksum.value != data.crc32:
        raise ChecksumError(
            f"{archive.path}: entry {shown(name)}: the array changed while it was written: "
            f"expected CRC-32 {data.crc32:#010x}, found {checksum.value:#010x}"
        )


def _write_clone(
    file: MappedFile, write: Callable[[PositionalWriter], None], *, else_in_place: bool
) -> bool:
    """Writes to a clone, which then replaces the archive; False if cloning fails.

    Args:
        file: The archive.
        write: Writes to the clone, which is cut off where `write` stops.
        else_in_place: Whether the caller can change the file in place instead. If True, the result
            is also False for a clone that would lose the archive's owner or attributes, or cannot
            be renamed over the archive.
    """
    if not filesystem.may_clone(file):
        return False
    try:
        replacement = Replacement(file.absolute_path, follow_links=False, is_locked=True)
    except OSError:  # a new file, if needed, raises it again
        return False
    try:
        clone = replacement.fileno()
        with naming(file.path):
            is_unfit = else_in_place and attributes.keep_owner(clone, file.fileno(), file.status())
        if is_unfit or not filesystem.clone(file, clone):
            replacement.discard()
            return False
        write(replacement.file)
        replacement.written.truncate(replacement.file.offset)
    except BaseException:
        replacement.discard()
        raise
    try:
        replacement.commit()
    except OSError as error:
        if not else_in_place or error.errno not in _NO_RENAME:
            raise
        return False
    return True
