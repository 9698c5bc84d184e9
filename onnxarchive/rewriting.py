"""The end of an archive, written anew: what stays where it is, what follows it, and how.

A new model is planned as `save` would plan it. Where that leaves every entry of the archive in its
place, the rest is written behind them: into a clone, or in the file's place with a journal.
Otherwise all of it is written to a new file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import onnx

from onnxarchive import journal
from onnxarchive.archive import Archive
from onnxarchive.errors import ChecksumError, shown
from onnxarchive.files import (
    Replacement,
    clone,
    require_no_input,
)
from onnxarchive.journal import Positioned, Span
from onnxarchive.model import dtypes, proto, tensors
from onnxarchive.model.keys import MODEL_PROTO, Keys
from onnxarchive.model.tensors import Site
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
from onnxarchive.zipformat import writer
from onnxarchive.zipformat.records import LocalHeader
from onnxarchive.zipformat.writer import Data, Progress, Stored, ZipWriter

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = ["Model", "Options", "write_changed_model", "write_model", "write_tensor"]

_MAX_SHOWN_ENTRIES = 3  # in a message

# A new model: one whose tensors may refer to the archive, or the path of a .onnx.
Model: TypeAlias = onnx.ModelProto | str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Options:
    """How a model is to be replaced, as `onnxarchive.replace_model` takes it."""

    compact: bool = False
    copy: bool = False
    size_threshold: int | None = None
    convert_attribute: bool | None = None
    progress: Progress | None = None


def write_model(archive: Archive, descriptor: int, model: Model, options: Options) -> None:
    """Gives an archive another model; see `onnxarchive.replace_model`.

    Args:
        archive: The archive, which nobody else opens or changes.
        descriptor: Its file, open for writing, but where `options` ask for a copy.
        model: The model.
        options: How.
    """
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
            given = _Given(source.model, _by_entry(source.resolve, archive))
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


def write_changed_model(
    archive: Archive,
    descriptor: int,
    change: Callable[[onnx.ModelProto], onnx.ModelProto],
    options: Options,
) -> None:
    """Gives an archive the model that a function makes of a copy of its own, if it is another."""
    model = onnx.ModelProto()
    model.CopyFrom(archive.model)
    changed = change(model)
    if changed != archive.model:
        write_model(archive, descriptor, changed, options)


def write_tensor(
    archive: Archive,
    descriptor: int,
    name: str,
    array: ArrayLike,
    in_place: bool,
    copy: bool,
    progress: Progress | None,
) -> None:
    """Gives an initializer other elements; see `onnxarchive.replace_tensor`."""
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
        write_model(archive, descriptor, model, Options(copy=copy, progress=progress))
    else:
        _replace_entry(archive, descriptor, key, data, in_place, progress)


@dataclass(frozen=True, slots=True)
class _Given:
    """A new model, and what gives the bytes of its external tensors."""

    model: onnx.ModelProto
    resolve: Resolve


def _by_entry(resolve: Resolve, archive: Archive) -> Resolve:
    """`resolve`, but what lies in the archive, as a link's does, is an entry of known CRC-32."""
    name_of = {
        (entry.data_offset, entry.nbytes): name
        for name, entry in archive.entries.items()
        if name != MODEL_PROTO
    }

    def resolve_by_entry(site: Site) -> Data:
        data = resolve(site)
        if isinstance(data, FileData) and data.identity == archive.file.identity:
            name = name_of.get((data.offset, data.nbytes))
            if name is not None:
                return entry_data(archive, name)
        return data

    return resolve_by_entry


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


def _placing(archive: Archive, options: Options) -> tuple[int, bool]:
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
    if isinstance(data, EntryData):
        return data.name == item.name
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


def _plan_in_archive_order(
    archive: Archive, given: _Given, threshold: int, convert_attribute: bool
) -> Plan | None:
    """A plan for an archive whose order or keys are not those of `save`; None where there is none.

    An archive that was written tensor by tensor is such a one. That is no reason to move anything,
    as long as each of its tensors is still there.
    """
    placing = _placing(archive, Options())
    before = _plan(archive, _Given(archive.model, resolver(archive, *placing)), *placing)
    if _keeps_all(before, archive):
        return None
    stored = {}
    for site in tensors.walk(given.model):
        if site.tensor.data_location == tensors.EXTERNAL:
            data = given.resolve(site)
            if isinstance(data, EntryData):
                stored[site.path] = data.name
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
            f"{archive.path}: expected the model to leave every entry where it is, found no tensor "
            f"of it to be stored under {listed}{more}; {remedy}"
        )
    kept = _kept(plan, archive)
    expected, found = list(archive.entries)[kept], plan.items[kept]
    what = "other contents of it" if found.name == expected else str(found.site or found.name)
    return (
        f"{archive.path}: expected entry {shown(expected)} where it is, since nothing may be "
        f"moved, found {what} in its place, in the order of the model; {remedy}"
    )


def _write_anew(archive: Archive, plan: Plan, progress: Progress | None) -> None:
    write_archive(
        plan,
        archive.path,
        alignment=archive.alignment,
        progress=progress,
        follow_links=False,
        is_locked=True,
    )


def _write_end(archive: Archive, descriptor: int, plan: Plan, options: Options) -> None:
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
    options = Options()
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
        written_crc32 = 0
        for piece in writer.pieces(data):
            written_crc32 = writer.crc32(piece, written_crc32)
            positioned.write(piece)
        if written_crc32 != crc32:
            raise ChecksumError(
                f"{archive.path}: entry {shown(key)}: expected an array that nobody changes while "
                f"it is written, with CRC-32 {crc32:#010x}, found {written_crc32:#010x}"
            )
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
    try:
        replacement = Replacement(archive.path, follow_links=False)
    except PermissionError:  # in this directory, which the other ways will name
        return False
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
