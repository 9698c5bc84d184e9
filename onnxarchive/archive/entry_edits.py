"""Replaces a tensor of an archive, or adds, replaces and removes assets.

If the file system can share blocks, a clone is changed and replaces the archive; otherwise a new
file replaces the archive. For a tensor in the model itself or shared by several models,
`write_model` replaces the model instead. Views of the old tensors and assets never change.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from onnxarchive.archive.items import Item, Items
from onnxarchive.archive.options import Asset, WriteOptions
from onnxarchive.archive.planning import (
    Plan,
    SerializedModel,
    model_items,
    open_assets,
    require_names,
)
from onnxarchive.archive.reading import Archive
from onnxarchive.archive.referring import asset_items, entry_items
from onnxarchive.archive.rewriting import (
    EditOptions,
    changed_clone,
    continued_writer,
    end_offset,
    kept_names,
    write_anew,
    write_model,
)
from onnxarchive.archive.writing import stream
from onnxarchive.buffers import checksums
from onnxarchive.buffers.checksums import Crc32
from onnxarchive.buffers.counting import Progress, ProgressCounter
from onnxarchive.buffers.data import Buffer, Stored, pieces
from onnxarchive.errors import ChecksumError, shown
from onnxarchive.model import dtypes, keys, proto, tensors, walking
from onnxarchive.model.copying import copied, with_locations
from onnxarchive.model.keys import ASSET_PREFIX, is_key
from onnxarchive.storage.files import MappedFile, PositionalWriter
from onnxarchive.storage.paths import require_no_input
from onnxarchive.zipformat import writer
from onnxarchive.zipformat.records import LocalHeader

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = ["write_assets", "write_tensor"]


def write_tensor(
    archive: Archive, name: str, array: ArrayLike, copy: bool, progress: Progress | None
) -> MappedFile:
    """Replaces the elements of an initializer; see `onnxarchive.replace_tensor`.

    Returns:
        The file at the archive's path after the edit, open, and still locked except on Windows.
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
    if key is not None and len(archive._snapshot.all_refs(key)) == 1:
        return _replace_entry(archive, key, data, progress)
    model = copied(archive.model)
    tensor = walking.at(model, ref.path)
    for field in tensors.DATA_FIELDS:
        tensor.ClearField(field)
    tensors.set_raw_data(tensor, bytes(data))
    return write_model(archive, model, EditOptions(copy=copy, progress=progress))


def write_assets(
    archive: Archive,
    added: Mapping[str, Asset],
    removed: Collection[str],
    progress: Progress | None,
) -> MappedFile:
    """Adds, replaces and removes assets; see `onnxarchive.change_assets`.

    Returns:
        The file at the archive's path after the edit, open, and still locked except on Windows.
    """
    assets = {item.name: item for item in asset_items(archive)}
    for path in removed:
        if assets.pop(ASSET_PREFIX + path, None) is None:
            raise archive._snapshot.not_found(f"expected the path of an asset, found {shown(path)}")
    options = WriteOptions(alignment=archive.alignment, assets=added, progress=progress)
    require_no_input(archive._local_file.absolute_path, options.asset_files)
    new = {item.name: item for item in open_assets(added)}
    assets |= new
    require_names(assets)
    names = kept_names(archive)
    items = entry_items(archive, filter(is_key, names))
    items += (assets[name] for name in sorted(assets))
    models = {id: SerializedModel(archive.read(keys.model_entry(id))) for id in archive.models}
    writer.require_entries(len(items) + len(models))
    plan = Plan(Items(items), model_items(models))
    pairs = zip(names, items, strict=False)
    stay = sum(1 for _ in takewhile(lambda it: it[0] == it[1].name and it[0] not in new, pairs))
    rest = Plan(plan.items[stay:], plan.models)

    def write(target: PositionalWriter) -> None:
        kept = stay, archive._records[:stay].pack()
        counter = ProgressCounter(progress, rest.nbytes)
        stream(rest, continued_writer(archive, target, kept), counter)

    offset = archive.entries[archive.entries.names[stay]].header_offset
    changed = changed_clone(archive, offset, write, else_in_place=False)
    return write_anew(archive, plan, options) if changed is None else changed


def _replace_entry(
    archive: Archive, key: str, data: memoryview, progress: Progress | None
) -> MappedFile:
    """Replaces the bytes of a tensor's entry, in a clone or a new archive."""
    crc32 = checksums.crc32(data)
    header = _header_with(archive, key, crc32)
    kept = _records_with(archive, key, crc32)
    plan = Plan(Items(), _models_without_checksum(archive, key))
    header_offset, offset = archive.entries[key].header_offset, end_offset(archive)

    def write(target: PositionalWriter) -> None:
        counter = ProgressCounter(progress, data.nbytes + plan.nbytes)
        target.write(header)
        written = Crc32()
        for piece in written(counter(pieces(data))):
            target.write(piece)
        if written.value != crc32:
            raise ChecksumError(
                f"{archive.path}: entry {shown(key)}: the array changed while it was written: "
                f"expected CRC-32 {crc32:#010x}, found {written.value:#010x}"
            )
        target.offset = offset
        zip_writer = continued_writer(archive, target, kept)
        stream(plan, zip_writer, counter)

    changed = changed_clone(archive, header_offset, write, else_in_place=False)
    if changed is not None:
        return changed
    new = Item.of(key, Stored(data, crc32))
    old = entry_items(archive, kept_names(archive))
    items = Items(new if item.name == key else item for item in old)
    options = WriteOptions(alignment=archive.alignment, progress=progress)
    return write_anew(archive, replace(plan, items=items), options)


def _header_with(archive: Archive, key: str, crc32: int) -> bytes:
    """The packed local header of an entry, with its CRC-32 replaced by `crc32`."""
    archive.read(key)  # compares the local header with the directory
    entry = archive.entries[key]
    packed = archive._local_file.read(entry.header_offset, entry.data_offset - entry.header_offset)
    header = LocalHeader.unpack(packed, 0)
    assert header is not None
    return header._replace(crc32=crc32).pack()


def _records_with(archive: Archive, key: str, crc32: int) -> tuple[int, bytes]:
    """The directory records of all entries except models, with `crc32` in the record of `key`.

    Returns:
        The number of records, and the packed records.
    """
    records, number = archive._records, archive.entries.index_of[key]
    count = len(kept_names(archive))
    changed = records[number]._replace(crc32=crc32)
    return count, records[:number].pack() + changed.pack() + records[number + 1 : count].pack()


def _models_without_checksum(archive: Archive, key: str) -> tuple[Item, ...]:
    """The models as entries, without the `checksum` (SHA-1) of the tensor with this key."""
    models: dict[str, SerializedModel] = {}
    for identifier, model in archive.models.items():
        serialized: Buffer = archive.read(keys.model_entry(identifier))
        ref = archive._refs_of(identifier).get(key)
        if ref is not None and tensors.checksum(ref.tensor) is not None:
            serialized = proto.serialize(with_locations(model, {ref.path: key}))
        models[identifier] = SerializedModel(serialized)
    return model_items(models)
