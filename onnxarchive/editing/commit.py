"""Writes the changes of an edit: into a clone, in place under the undo log, or as a new file.

There are three kinds of change:

- Every entry except the models stays in place. Then only a new end is written: new tensors and
  assets, models, directory and end records. It is written to a clone (a copy that shares blocks
  with the archive), which is renamed over the archive. If blocks cannot be shared, it is written to
  the archive itself under an undo log (specification, section 10.4).
- A tensor or an asset is replaced or removed. Readers may have mapped the old one, so only a clone
  is changed; without clones, a new file is written.
- With `compact`, or if a model is removed whose tensors no other model uses, the whole archive is
  planned anew, and a new file is written.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import TypeAlias

from onnxarchive.editing.comparison import ModelComparison, has_bytes, in_memory
from onnxarchive.editing.state import EditState
from onnxarchive.errors import ChecksumError, path_in_errors, quoted
from onnxarchive.files import attributes, clones_and_sync, undo
from onnxarchive.files.data import Bytes, Crc32, Data, difference, pieces
from onnxarchive.files.local_file import MappedFile, PositionalWriter, make_file, require_unused
from onnxarchive.files.paths import directory_of
from onnxarchive.files.progress import ProgressCounter
from onnxarchive.files.replacement import Replacement
from onnxarchive.model import keys, model_proto, tensors, walking
from onnxarchive.model.keys import ASSET_PREFIX, Keys, is_key
from onnxarchive.model.tensors import TensorRef
from onnxarchive.reading.contents import Contents, EntryData, check_model_sizes, check_models
from onnxarchive.writing.archive_models import archive_options
from onnxarchive.writing.options import WriteOptions
from onnxarchive.writing.plan import (
    Item,
    Plan,
    SerializedModel,
    model_items,
    plan_archive,
    plan_model,
    require_names,
)
from onnxarchive.writing.sharing import SharedEntries, type_and_dims
from onnxarchive.writing.write import write_entries, write_file
from onnxarchive.zipformat import writer
from onnxarchive.zipformat.directory import Directory
from onnxarchive.zipformat.end_records import SEARCHED_SIZE
from onnxarchive.zipformat.layout import EntryLayout
from onnxarchive.zipformat.writer import ZipWriter

_MAX_SHOWN_ENTRIES = 3  # in a message
# Errors of a rename over a mount point, or over another user's file in some directories.
_NO_RENAME = (errno.EBUSY, errno.EPERM, errno.EACCES)

_Comparisons: TypeAlias = Mapping[str, ModelComparison]  # by id
# The new data of each changed asset, by the name of its entry; None for one to remove.
_ChangedAssets: TypeAlias = Mapping[str, Data | None]


@dataclass(frozen=True)
class _EditPlan(Plan):
    """The entries of an edited archive that are written.

    Attributes:
        stay: Number of leading entries of the archive that keep their place before the others.
        replaced: Items with new bytes and their CRC-32 for some of the staying entries, by name.
        is_anew: True if all entries are planned anew, for a new file.
    """

    stay: int = 0
    replaced: Mapping[str, Item] = field(default_factory=dict)
    is_anew: bool = False

    def is_end(self, contents: Contents) -> bool:
        """True if every entry of the archive except the models is unchanged."""
        return self.stay == contents.first_model and not self.replaced


def commit(changes: EditState) -> None:
    """Writes the changes of an edit; without a change, only if `compact` or `copy` asks for it.

    For errors see `onnxarchive.edit` and `undo.change_end`.
    """
    changes.require_unchanged_files()
    contents, options = changes.contents, changes.options
    models = {id: ModelComparison(changes, draft) for id, draft in sorted(changes.drafts.items())}
    assets = _changed_assets(changes)
    plan = (_plan_anew if options.compact else _plan_end)(changes, models, assets)
    is_same = (
        plan.is_end(contents)
        and not plan.items
        and len(models) == len(contents.models)
        and all(has_bytes(contents, item.name, item.data) for item in plan.models)
    )
    if options.compact or options.copy or not is_same:
        _require_valid(changes, plan)
        _write(changes, plan)


def _changed_assets(changes: EditState) -> dict[str, Data | None]:
    contents, old = changes.contents, changes.old_assets
    assets: dict[str, Data | None] = {
        ASSET_PREFIX + path: data
        for path, data in sorted(changes.assets.items())
        if data is not old.get(path) and not has_bytes(contents, ASSET_PREFIX + path, data)
    }
    removed = old.keys() - changes.assets.keys()
    return assets | {ASSET_PREFIX + path: None for path in removed}


def _require_valid(changes: EditState, plan: _EditPlan) -> None:
    """Refuses models that a reader of the edited archive would refuse."""
    contents = changes.contents
    model_sizes = {item.name: item.data.nbytes for item in plan.models}
    check_model_sizes(model_sizes, contents.max_model_nbytes, contents.strict)
    if plan.is_anew:  # as in `save`, and weights in a model are only mapped
        return
    sizes = {
        entry.name: entry.nbytes
        for entry in contents.directory.entries[: plan.stay]
        if not entry.name.startswith(ASSET_PREFIX)
    }
    for name, data, *_ in plan.items:
        if not name.startswith(ASSET_PREFIX):
            sizes[name] = data.nbytes
    models = sorted(plan.models, key=attrgetter("name"))  # the default one is first
    serialized = {item.name: b"".join(item.data.pieces()) for item in models}
    check_models(serialized, sizes, contents.strict)


# Planning


def _plan_anew(changes: EditState, models: _Comparisons, assets: _ChangedAssets) -> _EditPlan:
    """Plans the whole archive as `save` does."""
    contents, options = changes.contents, changes.options
    sources = {id: model.source() for id, model in models.items()}
    by_path = {name.removeprefix(ASSET_PREFIX): data for name, data in assets.items()}
    new = {**changes.old_assets, **by_path}
    sources[""].assets = {path: data for path, data in new.items() if data is not None}
    plan = plan_archive(
        sources,
        archive_options(
            contents, contents.models, options.size_threshold, options.convert_attribute
        ),
        temporary=directory_of(changes.file.absolute_path),
    )
    return _EditPlan(plan.items, plan.models, is_anew=True)


def _plan_end(changes: EditState, models: _Comparisons, assets: _ChangedAssets) -> _EditPlan:
    """Plans an edit that moves no entry, unless an asset is replaced or removed."""
    contents = changes.contents
    names = [*contents.entries][: contents.first_model]
    uses = Counter(chain.from_iterable(model.keys for model in models.values()))
    replaced = _replaced(contents, models, uses)
    serialized, tensor_items = _serialize(changes, models, uses, replaced.keys())
    unused = [name for name in names if not (name in uses or name.startswith(ASSET_PREFIX))]
    if unused:
        if not _were_of_removed_models(contents, models, unused):
            raise _unused(contents, models, unused)
        return _plan_anew(changes, models, assets)
    new = {item.name: item for item in tensor_items}
    new |= {name: Item(name, data) for name, data in assets.items() if data is not None}
    order, stay = _order(names, [*new], assets)
    new |= {name: replaced.pop(name) for name in order[stay:] if name in replaced}
    items = [new.get(name) or Item(name, EntryData(contents, name)) for name in order[stay:]]
    if any(name not in contents.entries for name in new):
        require_names(order)
    writer.require_entries(len(order) + len(models))
    return _EditPlan(items, model_items(serialized), stay=stay, replaced=replaced)


def _order(
    names: Sequence[str], added: Sequence[str], assets: _ChangedAssets
) -> tuple[list[str], int]:
    """The entries except the models in their new order, and how many of the first ones stay.

    New entries come last. If an asset is replaced or removed, tensors come before assets, and the
    assets are sorted, as in `save`.

    Args:
        names: The entries as before the edit.
        added: The entries that are added or replaced.
        assets: The assets that are added, replaced or removed.
    """
    if assets.keys().isdisjoint(names):
        return [*names, *added], len(names)
    of_tensors: list[str] = []
    of_assets: list[str] = []
    for name in dict.fromkeys((*names, *added)):
        is_removed = name in assets and assets[name] is None
        if not is_removed:
            (of_assets if name.startswith(ASSET_PREFIX) else of_tensors).append(name)
    order = of_tensors + sorted(of_assets)
    stay = 0
    for old, new in zip(names, order, strict=False):
        if old != new or new in assets:
            break
        stay += 1
    return order, stay


def _replaced(contents: Contents, models: _Comparisons, uses: Counter[str]) -> dict[str, Item]:
    """Items with the new bytes of entries whose tensor has other elements, by key.

    An entry that several models use stays: a tensor with other elements, or with another data type
    or shape than in other models (DATA-8), gets an entry of its own, and `uses` is updated.
    """
    replaced: dict[str, Item] = {}
    # Type and dims of shared entries by key. Models that keep their tensors come first: they cannot
    # get other entries.
    kinds: dict[str, object] = {}
    if len(uses) < uses.total():  # models share entries
        for model in models.values():
            if not model.has_other_tensors:
                refs = model.old_refs.items()
                kinds |= {key: type_and_dims(ref) for key, ref in refs if uses[key] > 1}
    for model in models.values():
        for path, key in [*model.stored.items()]:
            data, is_shared = model.elements.get(path), uses[key] > 1
            if data is None and not is_shared:
                continue
            ref = TensorRef(path, walking.at(model.message, path))
            if data is None:
                if kinds.setdefault(key, type_and_dims(ref)) != type_and_dims(ref):
                    model.set_apart(ref, EntryData(contents, key), uses)
            elif is_shared:
                model.set_apart(ref, data, uses)
            else:
                view = in_memory(data)
                checked = tensors.checked(ref, pieces(view), contents.strict, entry=key)
                replaced[key] = Item(key, Bytes(view), crc32=Crc32.of(checked).value)
    return replaced


def _serialize(
    changes: EditState, models: _Comparisons, uses: Counter[str], replaced: Collection[str]
) -> tuple[dict[str, SerializedModel], list[Item]]:
    """Serializes the models by id, and makes entries for their new tensors.

    The keys of entries that new tensors use are added to `uses`. Entries in `replaced` get other
    bytes, so new tensors do not share them.
    """
    contents, options = changes.contents, changes.options
    serialized: dict[str, SerializedModel] = {}
    items: list[Item] = []
    assigned, shared = Keys(), SharedEntries()
    if any(model.is_changed and model.others for model in models.values()):
        assigned = Keys(filter(is_key, contents.entries))
        for checked in contents.models.values():
            shared.add(
                (key, ref, EntryData(contents, key))
                for key, ref in checked.refs.items()
                if key not in replaced
            )
    for id, model in models.items():
        if not model.is_changed:
            serialized[id] = bytes(contents.model(keys.model_entry(model.origin or ""))), {}
        elif not model.others:
            serialized[id] = model_proto.encode(model.message), {}
        else:
            origins = contents.models if model.origin is None else [model.origin]
            planned = plan_model(
                model.source(model.stored),
                archive_options(
                    contents, origins, options.size_threshold, options.convert_attribute
                ),
                stored=model.stored,
                assigned=assigned,
                shared=shared,
                temporary=directory_of(changes.file.absolute_path),
            )
            items += planned.items
            uses.update(planned.shared)
            serialized[id] = planned.serialize()
    return serialized, items


def _were_of_removed_models(
    contents: Contents, models: _Comparisons, unused: Sequence[str]
) -> bool:
    """True if only models that the edit removes used these entries."""
    remaining = {model.origin for model in models.values()}
    used_before: set[str] = set()
    for id, old in contents.models.items():
        if id in remaining:
            used_before.update(old.refs)
    return used_before.isdisjoint(unused)


def _unused(contents: Contents, models: _Comparisons, unused: Sequence[str]) -> ValueError:
    """The error for tensors of the archive that no model would use."""
    listed = ", ".join(map(quoted, unused[:_MAX_SHOWN_ENTRIES]))
    if len(unused) > _MAX_SHOWN_ENTRIES:
        listed += f" and {len(unused) - _MAX_SHOWN_ENTRIES} more"
    new = [ref for model in models.values() for ref in model.others if ref.is_initializer]
    old = [ref for key in unused for ref in contents.refs(key)]
    new_kinds, old_kinds = ({(ref.name, type_and_dims(ref)) for ref in refs} for refs in (new, old))
    names = sorted(name for name, _ in new_kinds & old_kinds)
    advice = f"; edit.tensors[{quoted(names[0])}] = array replaces the elements" if names else ""
    return ValueError(
        f"{contents.path}: no model would use {listed}; compact=True (--compact) rewrites the "
        f"whole archive without them{advice}"
    )


# Writing


def _write(changes: EditState, plan: _EditPlan) -> None:
    """Writes an edited archive: to a clone, in place, or to a new file."""
    contents, file, options = changes.contents, changes.file, changes.options
    directory = contents.directory
    offset = directory.entries[plan.stay].header_offset
    staying = directory.entries[: plan.stay]
    names = [entry.name for entry in staying]
    file.refuse_fork()
    headers = {name: _headers(contents, item) for name, item in plan.replaced.items()}
    records = [
        headers[name][1] if name in headers else record
        for name, record in zip(names, directory.records, strict=False)
    ]
    existing = Directory(staying, records)

    def write(target: PositionalWriter) -> None:
        nbytes = sum(item.data.nbytes for item in plan.replaced.values()) + plan.nbytes
        counter = ProgressCounter(options.progress, nbytes)
        for name, item in plan.replaced.items():
            target.offset = contents.entries[name].header_offset
            target.write(headers[name][0])
            _write_data(contents, item, target, counter)
        target.offset = offset
        zip_writer = ZipWriter(
            target,
            alignment=contents.alignment,
            existing=existing,
            offset=offset,
            before=target.last(SEARCHED_SIZE),
        )
        write_entries(plan.entries, zip_writer, counter)
        zip_writer.finish()
        changes.nbytes_written = target.offset - offset
        for name, item in plan.replaced.items():
            changes.nbytes_written += len(headers[name][0]) + item.data.nbytes

    is_end = plan.is_end(contents) and not (plan.is_anew or options.copy)
    if not plan.is_anew and _write_clone(file, write, else_in_place=is_end):
        return
    if is_end and file.size - offset <= undo.MAX_END_NBYTES:
        for name in contents.entries:  # a rollback would refuse a wrong local header
            contents.require_header(name)
        new_size = plan.size(contents.alignment, offset, existing)
        if new_size < file.size:  # Windows could refuse to shorten it, when all is written
            require_unused(file)
        undo.change_end(file, offset, new_size, write)
        return
    items = [plan.replaced.get(name) or Item(name, EntryData(contents, name)) for name in names]
    write_options = WriteOptions(alignment=contents.alignment, progress=options.progress)
    plan = replace(plan, items=items + plan.items)
    with write_file(plan, file.absolute_path, write_options, locked=file) as written:
        changes.nbytes_written = written.size


def _headers(contents: Contents, item: Item) -> tuple[bytes, bytes]:
    """The local header and the directory record of an entry with these bytes."""
    entry = contents.entries[item.name]
    alignment = contents.check_header(contents.entries.index_of[item.name], contents.strict)
    assert alignment is not None  # else `strict` has raised an error
    assert item.crc32 is not None
    placement = EntryLayout(
        item.name.encode(), entry.nbytes, item.crc32, entry.header_offset, alignment
    )
    return placement.pack()


def _write_data(
    contents: Contents, item: Item, target: PositionalWriter, counter: ProgressCounter
) -> None:
    """Writes the new bytes of an entry, and compares them with the CRC-32 in its headers."""
    checksum = Crc32()
    for piece in checksum(counter(item.data.pieces())):
        target.write(piece)
    assert item.crc32 is not None  # as of `_replaced`
    fault = difference((item.data.nbytes, item.crc32), (checksum.nbytes, checksum.value))
    if fault is not None:
        raise ChecksumError(
            f"{contents.path}: entry {quoted(item.name)}: the array changed while it was written: "
            f"{fault}"
        )


def _write_clone(
    file: MappedFile, write: Callable[[PositionalWriter], None], *, else_in_place: bool
) -> bool:
    """Writes to a clone, truncates it where `write` stops, and renames it over the archive.

    Returns:
        False if cloning fails. With `else_in_place` (the caller can change the archive in place),
        also if the clone would lose owner or attributes, or cannot be renamed over the archive.
    """
    if not (clones_and_sync.may_clone(file) and clones_and_sync.has_clones(file)):
        return False
    if else_in_place and clones_and_sync.keeps_names(directory_of(file.absolute_path)):
        return False  # the clone could be neither renamed nor removed
    is_made = clones_and_sync.CLONES_TO_NAMES  # the new file is made as a clone
    make = partial(clones_and_sync.make_clone, file) if is_made else make_file
    try:
        replacement = Replacement(file.absolute_path, locked=file, make=make)
    except OSError:  # a new file, if needed, raises it again
        return False
    with replacement:
        clone = replacement.file.fileno()
        with path_in_errors(file.path):
            is_unfit = else_in_place and attributes.keep_owner(clone, file.fileno(), file.status())
        if is_unfit or not (is_made or clones_and_sync.clone(file, clone)):
            return False
        write(replacement.writer)
        replacement.file.truncate(replacement.writer.offset)
        try:
            replacement.commit()
        except OSError as error:
            if not else_in_place or error.errno not in _NO_RENAME:
                raise
            return False
    return True
