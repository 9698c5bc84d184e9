"""Writes an archive whose model or tensor was replaced.

Entries that stay are neither read nor moved: a new model is a new end of the file. It is written to
a clone if the file system can share blocks and the clone can have the owner and the name, else to
the file itself, with an undo log. Only an edit that removes an entry writes a new file, in the
order of `save`, and only on request.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import onnx

from onnxarchive.archive.contents import check_model_nbytes
from onnxarchive.archive.options import WriteOptions
from onnxarchive.archive.planning import Item, Plan, Resolve, plan_archive, plan_model
from onnxarchive.archive.reading import Archive
from onnxarchive.archive.referring import (
    EntryData,
    asset_items,
    entry_data,
    entry_items,
    has_outside_attributes,
    referred_data,
    require_referring,
)
from onnxarchive.archive.writing import stream, write_file
from onnxarchive.buffers import checksums
from onnxarchive.buffers.checksums import Crc32
from onnxarchive.buffers.counting import Progress, ProgressCounter
from onnxarchive.buffers.data import Data, Pieces, Stored, pieces
from onnxarchive.errors import ArchiveFormatError, ChecksumError, Report, shown
from onnxarchive.model import dtypes, proto, tensors, walking
from onnxarchive.model.copying import with_locations
from onnxarchive.model.keys import MODEL_PROTO, Keys
from onnxarchive.model.tensors import TensorRef
from onnxarchive.model.threshold import DEFAULT_SIZE_THRESHOLD
from onnxarchive.model.walking import Path
from onnxarchive.sources.source import Source, open_model
from onnxarchive.storage import attributes, undo
from onnxarchive.storage.file_data import FileData
from onnxarchive.storage.files import MappedFile, PositionalWriter
from onnxarchive.storage.filesystem import clone
from onnxarchive.storage.paths import directory_of, require_no_input
from onnxarchive.storage.replacement import Replacement
from onnxarchive.zipformat import writer
from onnxarchive.zipformat.records import LocalHeader
from onnxarchive.zipformat.writer import ZipWriter

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = ["EditOptions", "GivenModel", "write_model", "write_tensor"]

_MAX_SHOWN_ENTRIES = 3  # in a message
# Errors of a mount point, and of a directory in which a user cannot replace the files of others.
_NO_RENAME = (errno.EBUSY, errno.EPERM, errno.EACCES)

# A model whose external tensors may refer to the archive, or the path of a .onnx.
GivenModel: TypeAlias = onnx.ModelProto | str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class EditOptions:
    """How a model is replaced; `onnxarchive.replace_model` describes each option."""

    compact: bool = False
    copy: bool = False
    size_threshold: int | None = None
    convert_attribute: bool | None = None
    progress: Progress | None = None


def write_model(archive: Archive, given: GivenModel, options: EditOptions) -> MappedFile:
    """Gives an archive another model; see `onnxarchive.replace_model`.

    Args:
        archive: The archive. Its file is locked, and open for writing unless `options.copy`.
        given: The model.
        options: The options of the edit.

    Returns:
        The file that then has the archive's path, open and still locked.
    """
    write_options = _write_options(archive, options)
    with contextlib.ExitStack() as resources:
        model, resolve = _open_given(archive, given, resources)
        plan = plan_archive(
            model,
            resolve,
            write_options,
            kept_assets=asset_items(archive),
            temporary=directory_of(archive._file.absolute_path),
        )
        keeps_all = _keeps_all(plan, archive)
        if not (keeps_all or options.compact):
            plan = _plan_keeping_all(archive, plan, model, resolve, write_options)
            keeps_all = True
        # The archive's own limit, so that it can still be read by those who set it.
        nbytes = sum(item.nbytes for item in plan.models)
        check_model_nbytes(nbytes, archive.max_model_nbytes, Report())
        if keeps_all:
            return _write_end(archive, plan, write_options, copy=options.copy)
        return _write_anew(archive, plan, write_options)


def _write_options(archive: Archive, options: EditOptions) -> WriteOptions:
    """The given options; by default those that keep the archive's tensors where they are."""
    outside_attributes = has_outside_attributes(archive)
    threshold, convert_attribute = options.size_threshold, options.convert_attribute
    return WriteOptions(
        size_threshold=_threshold(archive, outside_attributes) if threshold is None else threshold,
        alignment=archive.alignment,
        convert_attribute=outside_attributes if convert_attribute is None else convert_attribute,
        progress=options.progress,
    )


def _threshold(archive: Archive, outside_attributes: bool) -> int:
    """The size threshold that fits all tensors, or at least those that the model holds."""
    inside, outside = -1, DEFAULT_SIZE_THRESHOLD
    for ref in tensors.walk(archive.model):
        if not (ref.is_initializer or outside_attributes):
            continue
        key = tensors.location(ref.tensor)
        if key is not None:
            outside = min(outside, archive.entries[key].nbytes)
        else:
            data_type = tensors.stored_type(ref.tensor)
            if data_type is not None:
                inside = max(inside, data_type.nbytes(ref.tensor.dims))
    return max(inside + 1, outside)


def _open_given(
    archive: Archive, given: GivenModel, resources: contextlib.ExitStack
) -> tuple[onnx.ModelProto, Resolve]:
    """The new model, and a function that gives the bytes of its external tensors."""
    if isinstance(given, onnx.ModelProto):
        require_referring(given, archive)
        return given, partial(referred_data, archive)
    if isinstance(given, str | os.PathLike):
        require_no_input(archive._file.absolute_path, [os.fspath(given)])  # which is locked
        opened = open_model(given, elsewhere=partial(referred_data, archive))
        source = resources.enter_context(opened)
        return source.model, _by_entry(source, archive)
    raise TypeError(f"expected an onnx.ModelProto or the path of a .onnx, found {type(given)}")


def write_tensor(
    archive: Archive, name: str, array: ArrayLike, copy: bool, progress: Progress | None
) -> MappedFile:
    """Gives an initializer other elements; see `onnxarchive.replace_tensor`.

    Returns:
        The file that then has the archive's path, open and still locked.
    """
    ref = archive.tensors.ref(name)
    elements = np.asarray(array)
    found = dtypes.of_array(elements)
    expected = dtypes.BY_NUMBER.get(ref.tensor.data_type)
    if found != expected or elements.shape != tuple(ref.tensor.dims):
        raise ValueError(
            f"{archive.path}: {ref}: expected {dtypes.name_of(ref.tensor.data_type)} of shape "
            f"{list(ref.tensor.dims)}, found {found.name} of shape {list(elements.shape)}"
        )
    data = dtypes.as_raw_data(elements)
    key = tensors.location(ref.tensor)
    if key is not None:
        return _replace_entry(archive, key, ref, data, progress)
    model = onnx.ModelProto()
    model.CopyFrom(archive.model)
    tensor = walking.at(model, ref.path)
    for field in tensors.DATA_FIELDS:
        tensor.ClearField(field)
    tensors.set_raw_data(tensor, bytes(data))
    return write_model(archive, model, EditOptions(copy=copy, progress=progress))


def _by_entry(source: Source, archive: Archive) -> Resolve:
    """Gives the bytes of the source; those that lie in the archive, as a link's do, as entries.

    Raises:
        ArchiveFormatError: Bytes of a tensor lie in the model or the directory of the archive.
    """
    entries = [archive.entries[name] for name in _kept_names(archive)]
    name_of = {(entry.data_offset, entry.nbytes): entry.name for entry in entries}
    end = _end_offset(archive)
    data: dict[Path, Data] = {}
    for path, found in source.data.items():
        data[path] = found
        if isinstance(found, FileData) and found.identity == archive._file.identity:
            name = name_of.get((found.offset, found.nbytes))
            if name is not None:
                data[path] = entry_data(archive, name)
            elif found.nbytes and found.offset + found.nbytes > end:
                ref = TensorRef(path, walking.at(source.model, path))
                raise ArchiveFormatError(
                    f"{ref}: expected external data in the archive to be one of its tensors, "
                    f"found {found.nbytes} bytes from offset {found.offset}, which are of its "
                    "model or directory"
                )
    return lambda ref: data[ref.path]


def _kept_names(archive: Archive) -> list[str]:
    """The names of all entries but the model, in the order of the archive."""
    return list(archive.entries)[:-1]


def _end_offset(archive: Archive) -> int:
    """Offset of the first byte after these entries."""
    return archive.entries[MODEL_PROTO].header_offset


def _keeps_all(plan: Plan, archive: Archive) -> bool:
    """True if the plan moves and removes no entry except the model."""
    names = _kept_names(archive)
    return [item.name for item in plan.items[: len(names)]] == names and all(
        _is_entry(item, archive) for item in plan.items[: len(names)]
    )


def _is_entry(item: Item, archive: Archive) -> bool:
    """True if an item has the bytes of the archive's entry with its name."""
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
        if archive._file.read(offset, len(piece)) != piece:
            return False
        offset += len(piece)
    return True


def _plan_keeping_all(
    archive: Archive,
    plan: Plan,
    model: onnx.ModelProto,
    resolve: Resolve,
    options: WriteOptions,
) -> Plan:
    """Plans all entries of the archive as they are, then the new tensors of a model.

    Args:
        archive: The archive.
        plan: The plan of a new archive of the model.
        model: The model.
        resolve: Gives the bytes of its external tensors.
        options: The options of the plan.

    Raises:
        ValueError: The model has no tensor for an entry.
    """
    stored = _stored(archive, plan)
    missing = archive._refs.keys() - stored.values()
    if missing:
        names = [name for name in archive.entries if name in missing]
        listed = ", ".join(map(shown, names[:_MAX_SHOWN_ENTRIES]))
        more = f" and {len(names) - _MAX_SHOWN_ENTRIES} more" * (len(names) > _MAX_SHOWN_ENTRIES)
        raise ValueError(
            f"{archive.path}: expected the new model to have every tensor of the archive, found "
            f"none with the bytes of {listed}{more}; compact=True (--compact) writes the whole "
            "archive anew"
        )
    planned = plan_model(
        model,
        resolve,
        options,
        stored=stored,
        assigned=Keys(archive._refs),
        temporary=directory_of(archive._file.absolute_path),
    )
    items = (*entry_items(archive, _kept_names(archive)), *planned.items)
    writer.require_entries(len(items) + 1)
    return Plan(items, (planned.entry(),))


def _stored(archive: Archive, plan: Plan) -> dict[Path, str]:
    """The keys of planned tensors that are entries of the archive, one tensor for each entry."""
    stored: dict[Path, str] = {}
    taken: set[str] = set()
    for item in plan.items:
        if item.ref is None:
            continue
        data = item.data()
        key = data.name if isinstance(data, EntryData) else item.name
        is_entry = isinstance(data, EntryData) or (
            key in archive._refs and _is_entry(item, archive)
        )
        if is_entry and key not in taken:
            taken.add(key)
            stored[item.ref.path] = key
    return stored


def _write_anew(archive: Archive, plan: Plan, options: WriteOptions) -> MappedFile:
    archive._file.require_locking_process()
    return write_file(plan, archive._file.absolute_path, options, is_locked=True)


def _write_end(archive: Archive, plan: Plan, options: WriteOptions, *, copy: bool) -> MappedFile:
    """Writes new tensors, models, directory and end records after the entries that stay."""
    offset = _end_offset(archive)
    count = len(_kept_names(archive))
    kept = count, archive._records[:count].pack()
    new = Plan(plan.items[count:], plan.models)

    def write(target: PositionalWriter) -> None:
        zip_writer = ZipWriter(target, alignment=options.alignment, kept=kept, offset=offset)
        stream(new, zip_writer, ProgressCounter(options.progress, new.nbytes))

    changed = _changed_clone(archive, offset, write, else_in_place=not copy)
    if changed is not None:
        return changed
    if copy:
        return _write_anew(archive, plan, options)
    archive._require_headers()  # or an edit that is cut off could not be rolled back
    undo.change_end(archive._file, offset, new.size(options.alignment, offset, kept), write)
    return archive._file.reopened()


def _replace_entry(
    archive: Archive, key: str, ref: TensorRef, data: memoryview, progress: Progress | None
) -> MappedFile:
    """Writes a clone, or a new archive, in which the entry of a tensor has other bytes."""
    crc32 = checksums.crc32(data)
    header = _header_with(archive, key, crc32)
    kept = _records_with(archive, key, crc32)
    plan = Plan((), (_model_without_checksum(archive, key, ref),))
    header_offset, offset = archive.entries[key].header_offset, _end_offset(archive)

    def write(target: PositionalWriter) -> None:
        counter = ProgressCounter(progress, data.nbytes + plan.nbytes)
        target.write(header)
        written = Crc32()
        for piece in written(counter(pieces(data))):
            target.write(piece)
        if written.value != crc32:
            raise ChecksumError(
                f"{archive.path}: entry {shown(key)}: expected an array that nobody changes while "
                f"it is written, with CRC-32 {crc32:#010x}, found {written.value:#010x}"
            )
        target.offset = offset
        zip_writer = ZipWriter(target, alignment=archive.alignment, kept=kept, offset=offset)
        stream(plan, zip_writer, counter)

    changed = _changed_clone(archive, header_offset, write, else_in_place=False)
    if changed is not None:
        return changed
    new = Item.of(key, Stored(data, crc32))
    old = entry_items(archive, _kept_names(archive))
    items = tuple(new if item.name == key else item for item in old)
    options = WriteOptions(alignment=archive.alignment, progress=progress)
    return _write_anew(archive, replace(plan, items=items), options)


def _header_with(archive: Archive, key: str, crc32: int) -> bytes:
    """The local header of an entry with another CRC-32."""
    archive.read(key)  # its local header is compared with the directory
    entry = archive.entries[key]
    packed = archive._file.read(entry.header_offset, entry.data_offset - entry.header_offset)
    header = LocalHeader.unpack(packed, 0)
    assert header is not None
    return replace(header, crc32=crc32).pack()


def _records_with(archive: Archive, key: str, crc32: int) -> tuple[int, bytes]:
    """Number and directory records of the entries that stay, that of `key` with another CRC-32."""
    records, number = archive._records, archive.entries.index_of[key]
    count = len(_kept_names(archive))
    changed = replace(records[number], crc32=crc32)
    return count, records[:number].pack() + changed.pack() + records[number + 1 : count].pack()


def _model_without_checksum(archive: Archive, key: str, ref: TensorRef) -> Item:
    """The model as an entry, without a SHA-1 of the old bytes of a tensor."""
    model_proto = archive.read(MODEL_PROTO)
    if tensors.checksum(ref.tensor) is not None:
        without = with_locations(archive.model, {ref.path: key})
        model_proto = memoryview(proto.serialize(without))
    return Item.of(MODEL_PROTO, Pieces((model_proto,)))


def _changed_clone(
    archive: Archive, offset: int, write: Callable[[PositionalWriter], None], *, else_in_place: bool
) -> MappedFile | None:
    """Changes a clone, which then gets the archive's name; None if cloning is not possible.

    Args:
        archive: The archive.
        offset: Offset at which `write` begins, in bytes.
        write: Writes up to the new end of the file.
        else_in_place: Whether the caller can change the file itself; this is better than a clone
            with another owner.
    """
    archive._file.require_locking_process()
    try:
        replacement = Replacement(archive._file.absolute_path, follow_links=False, is_locked=True)
    except OSError:  # of the directory; an edit that needs it fails later
        return None
    try:
        old = os.fstat(archive._file.fileno())
        is_fit = not else_in_place or attributes.keep_owner(replacement.fileno(), old)
        if not (is_fit and clone(archive._file, replacement.fileno())):
            replacement.discard()
            return None
        replacement.file.offset = offset
        write(replacement.file)
        os.ftruncate(replacement.fileno(), replacement.file.offset)
    except BaseException as error:
        replacement.discard(error)
        raise
    try:
        return replacement.commit_open()
    except OSError as error:
        if not else_in_place or error.errno not in _NO_RENAME:
            raise
        return None
