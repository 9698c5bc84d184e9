"""Writes the end of an archive anew: new tensors, model, directory and end records.

Every entry but the model stays where it is. The new end goes into a clone where the file system can
share blocks and the clone can have the owner and the name, else into the file itself with an undo
log. What would remove an entry writes a new file, in the order of `save`, and only on request.
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
from onnxarchive.archive.planning import Item, Plan, Resolve, plan_archive, plan_items
from onnxarchive.archive.reading import Archive
from onnxarchive.archive.referring import (
    EntryData,
    entry_data,
    has_outside_attributes,
    kept_assets,
    referred,
    resolver,
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
from onnxarchive.sources.opening import Source, open_model
from onnxarchive.storage import attributes, undo
from onnxarchive.storage.file_data import FileData
from onnxarchive.storage.files import MappedFile, PositionalWriter
from onnxarchive.storage.filesystem import clone
from onnxarchive.storage.paths import require_no_input
from onnxarchive.storage.replacement import Replacement
from onnxarchive.zipformat import writer
from onnxarchive.zipformat.false_ends import SEARCHED_SIZE
from onnxarchive.zipformat.records import LocalHeader
from onnxarchive.zipformat.writer import ZipWriter

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = ["Model", "Options", "write_model", "write_tensor"]

_MAX_SHOWN_ENTRIES = 3  # in a message
# Errors of a mount point, and of a directory that lets nobody take a name from another user.
_NO_RENAME = (errno.EBUSY, errno.EPERM, errno.EACCES)

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


def write_model(archive: Archive, model: Model, options: Options) -> MappedFile:
    """Gives an archive another model; see `onnxarchive.replace_model`.

    Args:
        archive: The archive, whose file is locked, and open for writing unless `options` ask for a
            copy.
        model: The model.
        options: How to replace it.

    Returns:
        The file that has the archive's path now, open and still locked.
    """
    threshold, convert_attribute = _placing(archive, options)
    with contextlib.ExitStack() as resources:
        if isinstance(model, onnx.ModelProto):
            given = _Given(model, resolver(archive, threshold, convert_attribute))
            for ref in tensors.walk(model):
                if ref.tensor.data_location == tensors.EXTERNAL:
                    referred(ref, archive)  # whatever else is the matter with the model
        elif isinstance(model, str | os.PathLike):
            require_no_input(archive._file.absolute_path, [os.fspath(model)])  # which is locked
            elsewhere = partial(_entry_of, archive)
            source = resources.enter_context(open_model(model, elsewhere=elsewhere))
            given = _Given(source.model, _by_entry(source, archive))
        else:
            raise TypeError(
                f"expected an onnx.ModelProto or the path of a .onnx, found {type(model)}"
            )
        plan = plan_archive(
            given.model,
            resolve=given.resolve,
            size_threshold=threshold,
            convert_attribute=convert_attribute,
            assets=kept_assets(archive),
            temporary=_directory_of(archive),
        )
        keeps_all = _keeps_all(plan, archive)
        if not (keeps_all or options.compact):
            plan = _plan_in_place(archive, given, plan, threshold, convert_attribute)
            keeps_all = True
        # Who opened the archive has to be able to read what is written.
        check_model_nbytes(plan.model.nbytes, archive.max_model_nbytes, Report())
        if keeps_all:
            return _write_end(archive, plan, options)
        return _write_anew(archive, plan, options.progress)


def _entry_of(archive: Archive, ref: TensorRef) -> Data:
    """The bytes of a tensor whose location is a key of the archive."""
    return entry_data(archive, referred(ref, archive)[0])


def write_tensor(
    archive: Archive, name: str, array: ArrayLike, copy: bool, progress: Progress | None
) -> MappedFile:
    """Gives an initializer other elements; see `onnxarchive.replace_tensor`.

    Returns:
        As `write_model` does.
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
    return write_model(archive, model, Options(copy=copy, progress=progress))


@dataclass(frozen=True, slots=True)
class _Given:
    """A new model, and what gives the bytes of its external tensors."""

    model: onnx.ModelProto
    resolve: Resolve


def _by_entry(source: Source, archive: Archive) -> Resolve:
    """Gives the bytes of the source; those that lie in the archive, as a link's do, as entries.

    Raises:
        ArchiveFormatError: A tensor's bytes are some of the model or directory of the archive.
    """
    entries = [entry for name, entry in archive.entries.items() if name != MODEL_PROTO]
    name_of = {(entry.data_offset, entry.nbytes): entry.name for entry in entries}
    end = archive.entries[MODEL_PROTO].header_offset
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


def _directory_of(archive: Archive) -> str:
    return os.path.dirname(os.path.realpath(archive._file.absolute_path))


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
        threshold = max(inside + 1, outside)
    return threshold, convert_attribute


def _keeps_all(plan: Plan, archive: Archive) -> bool:
    """Whether a plan begins with every entry of the archive but the model, each in its place."""
    names = list(archive.entries)[:-1]
    return [item.name for item in plan.items[: len(names)]] == names and all(
        _is_entry(item, archive) for item in plan.items[: len(names)]
    )


def _is_entry(item: Item, archive: Archive) -> bool:
    """Whether an item has the bytes of the archive's entry of its name."""
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


def _plan_in_place(
    archive: Archive, given: _Given, plan: Plan, threshold: int, convert_attribute: bool
) -> Plan:
    """A plan that keeps every entry of the archive, and lets new tensors follow them.

    Args:
        archive: The archive.
        given: The new model.
        plan: The archive that `save` would make of it.
        threshold: As in `plan_items`.
        convert_attribute: As in `plan_items`.

    Raises:
        ValueError: The model has no tensor for an entry.
    """
    stored = _stored(archive, plan)
    gone = archive._refs.keys() - stored.values()
    if gone:
        names = [name for name in archive.entries if name in gone]
        listed = ", ".join(map(shown, names[:_MAX_SHOWN_ENTRIES]))
        more = f" and {len(names) - _MAX_SHOWN_ENTRIES} more" * (len(names) > _MAX_SHOWN_ENTRIES)
        raise ValueError(
            f"{archive.path}: expected the new model to have every tensor of the archive, found "
            f"none with the bytes of {listed}{more}; compact=True (--compact) writes the whole "
            "archive anew"
        )
    items, copy, held = plan_items(
        given.model,
        resolve=given.resolve,
        size_threshold=threshold,
        convert_attribute=convert_attribute,
        stored=stored,
        assigned=Keys(archive._refs),
        temporary=_directory_of(archive),
    )
    kept = _kept(archive)
    writer.require_entries(len(kept) + len(items) + 1)
    return Plan((*kept, *items), Pieces(proto.serialize_filled(copy, held)))


def _stored(archive: Archive, plan: Plan) -> dict[Path, str]:
    """The key of each planned tensor that is an entry of the archive: one tensor for each key."""
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


def _kept(archive: Archive) -> list[Item]:
    """Every entry of an archive but the model, as it is."""
    return [
        Item(name, entry.nbytes, partial(entry_data, archive, name))
        for name, entry in archive.entries.items()
        if name != MODEL_PROTO
    ]


def _write_anew(archive: Archive, plan: Plan, progress: Progress | None) -> MappedFile:
    archive._file.require_locking_process()
    return write_file(
        plan,
        archive._file.absolute_path,
        alignment=archive.alignment,
        progress=progress,
        follow_links=False,
        is_locked=True,
    )


def _write_end(archive: Archive, plan: Plan, options: Options) -> MappedFile:
    """Writes what follows the archive's entries but for its model, which all stay."""
    offset = archive.entries[MODEL_PROTO].header_offset
    alignment = archive.alignment
    kept = (len(archive.entries) - 1, archive._records[:-1].pack())
    before = _before(archive, offset)
    new = Plan(plan.items[kept[0] :], plan.model)

    def write(target: PositionalWriter) -> None:
        zip_writer = ZipWriter(target, alignment=alignment, kept=kept, offset=offset, before=before)
        stream(new, zip_writer, options.progress)

    changed = _changed_clone(archive, offset, write, else_in_place=not options.copy)
    if changed is not None:
        return changed
    if options.copy:
        return _write_anew(archive, plan, options.progress)
    archive._require_headers()  # or an edit that is cut off could not be rolled back
    undo.change_end(archive._file, offset, new.size(alignment, offset, kept), write)
    return archive._file.reopened()


def _before(archive: Archive, offset: int) -> bytearray:
    """The last bytes before an offset, in which zip readers may search for end records."""
    begin = max(offset - SEARCHED_SIZE, 0)
    return bytearray(archive._file.read(begin, offset - begin))


def _replace_entry(
    archive: Archive, key: str, ref: TensorRef, data: memoryview, progress: Progress | None
) -> MappedFile:
    """Writes a clone or a new archive in which a tensor's entry has other bytes."""
    archive.read(key)  # its local header is compared with the directory
    crc32 = checksums.crc32(data)
    model_proto = archive.read(MODEL_PROTO)
    if tensors.checksum(ref.tensor) is not None:  # of the bytes that are replaced
        without = with_locations(archive.model, {ref.path: key})
        model_proto = memoryview(proto.serialize(without))
    model = Plan((), Pieces((model_proto,)))
    entry, number = archive.entries[key], archive.entries.index_of[key]
    offset = archive.entries[MODEL_PROTO].header_offset
    records = archive._records
    changed_record = replace(records[number], crc32=crc32).pack()
    packed = records[:number].pack() + changed_record + records[number + 1 : -1].pack()
    header = archive._file.read(entry.header_offset, entry.data_offset - entry.header_offset)
    unpacked = LocalHeader.unpack(header, 0)
    assert unpacked is not None
    nbytes = data.nbytes  # which are written before the model
    before = _before(archive, offset)
    position = entry.data_offset - (offset - len(before))
    seen = data[max(-position, 0) :]  # what of the new data lies in there
    before[max(position, 0) : max(position, 0) + len(seen)] = seen
    rest = progress and (lambda done, total: progress(nbytes + done, nbytes + total))

    def write(target: PositionalWriter) -> None:
        counter = ProgressCounter(progress, nbytes + model.nbytes)
        target.write(replace(unpacked, crc32=crc32).pack())
        written = Crc32()
        for piece in written(counter(pieces(data))):
            target.write(piece)
        if written.value != crc32:
            raise ChecksumError(
                f"{archive.path}: entry {shown(key)}: expected an array that nobody changes while "
                f"it is written, with CRC-32 {crc32:#010x}, found {written.value:#010x}"
            )
        target.offset = offset
        kept = (len(archive.entries) - 1, packed)
        stream(
            model,
            ZipWriter(target, alignment=archive.alignment, kept=kept, offset=offset, before=before),
            rest,
        )

    changed = _changed_clone(archive, entry.header_offset, write, else_in_place=False)
    if changed is not None:
        return changed
    given = partial(Stored, data, crc32)
    items = [replace(item, data=given) if item.name == key else item for item in _kept(archive)]
    return _write_anew(archive, replace(model, items=tuple(items)), progress)


def _changed_clone(
    archive: Archive, offset: int, write: Callable[[PositionalWriter], None], *, else_in_place: bool
) -> MappedFile | None:
    """Changes a clone that then takes the archive's name; None if there can be none.

    Args:
        archive: The archive.
        offset: Where `write` begins, in bytes from the start of the file.
        write: Writes up to the new end of the file.
        else_in_place: Whether the file can be changed in its place, too, as is better where a clone
            would have another owner.
    """
    archive._file.require_locking_process()
    try:
        replacement = Replacement(archive._file.absolute_path, follow_links=False, is_locked=True)
    except OSError:  # of this directory, which the other ways name if they need it
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
