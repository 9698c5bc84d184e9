"""Plans archives: their entries, with keys and sources of data.

The data of a tensor that becomes an entry is read here only to find equal tensors. The writer reads
the `Plan` once, in order.
"""

from __future__ import annotations

import mmap
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import onnx

from onnxarchive.errors import ArchiveFormatError, ChecksumError, Report, shown
from onnxarchive.files.checksums import Crc32
from onnxarchive.files.data import Data, Pieces, Stored, as_bytes
from onnxarchive.files.file_data import FileData, read_all
from onnxarchive.files.spooling import spool
from onnxarchive.model import keys, proto, tensors, walking, weights
from onnxarchive.model.copying import with_locations
from onnxarchive.model.keys import ASSET_PREFIX, MODEL_PROTO, Keys
from onnxarchive.model.prepacked import least_alignment
from onnxarchive.model.tensors import TensorRef
from onnxarchive.model.walking import Path
from onnxarchive.writing.options import Asset, WriteOptions
from onnxarchive.writing.sharing import SharedEntries
from onnxarchive.zipformat import layout, writer

# From this size in bytes, external tensors that go into the model are mapped, not held in memory.
MAPPED_SIZE = 1 << 20
_MAX_MAPPED_FILES = 64  # each map needs a file descriptor
_Model = TypeVar("_Model")
# Gives the bytes of a tensor whose data is external.
Resolve: TypeAlias = Callable[[TensorRef], Data]
# A serialized model, and bytes to insert for external tensors, by location.
SerializedModel: TypeAlias = tuple[bytes, Mapping[str, memoryview]]


class Item(NamedTuple):
    """An entry to write.

    Attributes:
        name: Name of the entry.
        nbytes: Size of the data in bytes.
        resolve: Gives the data of `ref`; called in any thread, possibly several times. If the
            function copies the data to memory, the copy must hold only this entry's data: the
            writer frees the copy after writing the entry.
        ref: The tensor in the entry; None for an asset, a model, or an existing entry of an edited
            archive.
    """

    name: str
    nbytes: int
    resolve: Callable[[Any], Data]
    ref: TensorRef | None = None

    @classmethod
    def of(cls, name: str, data: Data) -> Item:
        """An entry with this data."""
        return cls(name, data.nbytes, lambda _: data)

    def data(self) -> Data:
        """The data."""
        return self.resolve(self.ref)


@dataclass(frozen=True)
class Plan:
    """An archive to write.

    Attributes:
        items: Its tensors and assets, in order.
        models: Its models, as the last entries.
        shared_nbytes: Number of bytes saved by sharing tensors between models.
    """

    items: list[Item]
    models: tuple[Item, ...]
    shared_nbytes: int = 0

    @cached_property
    def entries(self) -> list[Item]:
        """All entries, in order: the items and the models."""
        return [*self.items, *self.models]

    @cached_property
    def nbytes(self) -> int:
        """Size of all data in bytes, without headers and padding."""
        return sum([item.nbytes for item in self.entries])

    def size(
        self,
        alignment: int = layout.MIN_ALIGNMENT,
        offset: int = 0,
        kept: tuple[int, bytes] = (0, b""),
    ) -> int:
        """The size of the archive in bytes.

        Args:
            alignment: Alignment of the data of every entry, in bytes.
            offset: Offset of the plan's first entry, in bytes.
            kept: Number of entries before `offset`, and their packed directory records.
        """
        count, directory_size = kept[0] + len(self.items) + len(self.models), len(kept[1])
        for item in self.entries:
            least = max(alignment, least_alignment(item.name))
            placement = layout.place(item.name, item.nbytes, 0, offset, least)
            offset = placement.end
            directory_size += len(placement.pack()[1])
        return offset + directory_size + len(layout.end_of_archive(count, directory_size, offset))


@dataclass(slots=True)
class PlannedModel:
    """A model, and the entries of the tensors that are stored outside it.

    Attributes:
        items: The new entries, in the order of the model.
        model: A copy of the model; tensors stored outside are external.
        locations: The keys of tensors stored outside, by path. Keys of entries that are written
            already or planned for other models are included.
        held: Bytes of large tensors that go into the serialized model, by placeholder. In `model`,
            these tensors are external, with the placeholders as locations.
    """

    items: list[Item]
    model: onnx.ModelProto
    locations: Mapping[Path, str]
    held: Mapping[str, memoryview]

    @property
    def keys(self) -> frozenset[str]:
        """The keys of all tensors that are stored outside."""
        return frozenset(self.locations.values())

    def serialize(self) -> SerializedModel:
        """Serializes the model, and frees it before the bytes are parsed, which checks them.

        Raises:
            ArchiveFormatError: The model could not be read back; see `proto.serialize`.
        """
        data = proto.encode(self.model)
        del self.model
        proto.parse(data, Report())
        return data, self.held


def model_items(models: Mapping[str, SerializedModel]) -> tuple[Item, ...]:
    """Models as the last entries of an archive: the further ones, then the default one.

    Args:
        models: The models by id.

    Raises:
        ArchiveFormatError: A model is too large, or the models have too many messages (MODEL-3).
    """
    if len(models) > 1:
        proto.check_messages_together([data for data, _ in models.values()], Report())
    return tuple(
        Item.of(keys.model_entry(id), Pieces(proto.filled(*models[id])))
        for id in (*sorted(models.keys() - {""}), "")
    )


@dataclass(frozen=True, slots=True)
class ModelToStore:
    """A model to store.

    Attributes:
        model: The model. It is not changed.
        resolve: Gives the bytes of an external tensor.
        is_parsed: True if the model is parsed from a file and its weights are left there.
    """

    model: onnx.ModelProto
    resolve: Resolve
    is_parsed: bool = False


def refuse_external(ref: TensorRef) -> Data:
    """The `Resolve` of a model that must hold all of its tensors.

    Raises:
        ArchiveFormatError: Always.
    """
    fault = tensors.misplaced(ref.tensor) or (
        "expected its data in the model, found it external; convert the file with "
        "onnxarchive.convert, or load the model with its external data"
    )
    raise ArchiveFormatError(f"{ref}: {fault}")


def open_assets(assets: Mapping[str, Asset] | None) -> tuple[Item, ...]:
    """The assets as entries, in the order of their paths.

    Raises:
        ValueError: A path is not allowed (rule ASSET-1).
        ArchiveFormatError: A file is not a regular file.
        OSError: A file cannot be opened.
    """
    items = []
    for path, asset in sorted((assets or {}).items()):
        name = _asset_name(path)
        if isinstance(asset, bytes | bytearray | memoryview):
            items.append(Item.of(name, Stored(as_bytes(asset))))
        else:
            items.append(Item.of(name, FileData.of(asset)))
    return tuple(items)


def _asset_name(path: str) -> str:
    name = ASSET_PREFIX + path
    if keys.is_asset_name(name):
        return name
    if keys.is_asset_name(unicodedata.normalize("NFC", name)):
        raise ValueError(
            f"expected the path of an asset in {keys.ASSET_FORM}, found "
            f"{shown(path, in_ascii=True)}; use unicodedata.normalize('NFC', path)"
        )
    raise ValueError(f"expected the path of an asset as {keys.ASSET_PATH}, found {shown(path)}")


def plan_archive(
    models: Mapping[str, ModelToStore],
    options: WriteOptions,
    *,
    kept_assets: Iterable[Item] = (),
    temporary: str | None = None,
) -> Plan:
    """Plans the archive of one or several models.

    The data of a tensor that becomes an entry is read only to find equal tensors of several models.

    Args:
        models: The models by id; `""` is the id of the default model.
        options: The options of the archive.
        kept_assets: Assets of the source; `options.assets` overrides them.
        temporary: Directory for a temporary copy of large external tensors that go into a model
            and cannot be mapped; None for the system's temporary directory.

    Raises:
        ArchiveFormatError: A tensor cannot be stored, or a model is too large even without the
            tensors stored outside it.
        ValueError: The path of an asset or the id of a model is not allowed.
    """
    require_model_ids(models)
    assets = {item.name: item for item in (*kept_assets, *open_assets(options.assets))}
    if assets:
        require_names(assets)
    items: list[Item] = []
    serialized: dict[str, SerializedModel] = {}
    assigned = Keys()
    shared = SharedEntries() if len(models) > 1 else None
    for identifier, given in sorted(models.items()):
        planned = plan_model(
            given.model,
            given.resolve,
            options,
            assigned=assigned,
            shared=shared,
            temporary=temporary,
            is_parsed=given.is_parsed,
        )
        items += planned.items
        serialized[identifier] = planned.serialize()
    crc32s = shared.crc32s if shared else {}
    for number, item in enumerate(items):
        if item.name in crc32s:
            items[number] = item._replace(
                resolve=partial(_compared, item.resolve, crc32s[item.name])
            )
    items.extend(assets[name] for name in sorted(assets))
    writer.require_entries(len(items) + len(serialized))
    return Plan(items, model_items(serialized), shared.saved_nbytes if shared else 0)


def _compared(resolve: Resolve, crc32: int, ref: TensorRef) -> Data:
    """The data of a shared tensor; `Stored` and `FileData` get a CRC-32, which the writer compares.

    Args:
        resolve: Gives the data. A CRC-32 that the data already has is kept.
        crc32: CRC-32 that the data had when models were searched for equal tensors.
        ref: The tensor.
    """
    found = resolve(ref)
    if found.crc32 is None and isinstance(found, Stored):
        return Stored(found.view, crc32)
    if found.crc32 is None and isinstance(found, FileData):
        return replace(found, crc32=crc32)
    return found


def with_further_models(default: _Model, further: Mapping[str, _Model] | None) -> dict[str, _Model]:
    """All models of an archive by id.

    Raises:
        ValueError: The id of a further model is empty.
    """
    if further and "" in further:
        raise ValueError("models: expected an id such as 'decoder', got '', the default model's id")
    return {"": default, **(further or {})}


def require_model_ids(ids: Iterable[str]) -> None:
    """Checks the ids of models.

    Raises:
        ValueError: An id is not allowed (rule MODEL-4).
    """
    for identifier in ids:
        if identifier != "" and not (isinstance(identifier, str) and keys.is_model_id(identifier)):
            raise ValueError(f"expected the id of a model as {keys.MODEL_ID}, got {identifier!r}")


def plan_model(
    model: onnx.ModelProto,
    resolve: Resolve,
    options: WriteOptions,
    *,
    stored: Mapping[Path, str] | None = None,
    assigned: Keys | None = None,
    shared: SharedEntries | None = None,
    temporary: str | None = None,
    is_parsed: bool = False,
) -> PlannedModel:
    """Plans the entries of a model's tensors.

    Args:
        model: The model. It is not changed.
        resolve: Gives the bytes of an external tensor.
        options: The options of the archive.
        stored: The keys of tensors whose entries are written already, by path.
        assigned: The keys that are assigned already.
        shared: The entries of other models, for this model to share; the new entries are added.
        temporary: Directory for a temporary file; None for the system's.
        is_parsed: True if the model is parsed from a file and its weights are left there.

    Raises:
        ArchiveFormatError: A tensor cannot be stored, or the model is too large even without the
            data that is stored outside.
    """
    stored, assigned = stored or {}, assigned or Keys()
    if shared:
        shared.begin_model(stored.values())
    items: list[Item] = []
    locations = dict(stored)
    staying: list[tuple[TensorRef, int]] = []  # external tensors that go into the model
    idle: list[Path] = []  # tensors in the model whose `external_data` has no effect
    for ref in tensors.walk(model):
        if stored and ref.path in stored:
            continue
        tensor = ref.tensor
        is_external = tensor.data_location == tensors.EXTERNAL
        data_type = tensors.external_type(ref) if is_external else tensors.stored_type(tensor)
        nbytes = -1 if data_type is None else data_type.nbytes(tensor.dims[:])
        may_leave = ref.is_initializer or options.convert_attribute
        if may_leave and nbytes >= options.size_threshold:
            data_of = resolve if is_external else _raw_data
            key = shared.find(ref, nbytes, partial(data_of, ref)) if shared else None
            if key is None:
                key = assigned.assign(ref.name)
                items.append(Item(key, nbytes, data_of, ref))
            locations[ref.path] = key
        elif is_external:
            staying.append((ref, nbytes))
        elif tensor.external_data:
            idle.append(ref.path)
    if shared:
        shared.add((item.name, item.ref, item.data) for item in items if item.ref)
    proto.require_size(sum(nbytes for _, nbytes in staying))  # before any of them is read
    copied, large = _staying(staying, resolve)
    held = _views(large, temporary)
    placeholders = {path: f"{weights.SPAN_LOCATION}{number}" for number, path in enumerate(held)}
    external = {**locations, **placeholders} if placeholders else locations
    copy = with_locations(model, external, is_parsed=is_parsed)
    for path, raw_data in copied.items():
        tensors.set_raw_data(walking.at(copy, path), raw_data)
    # Readers refuse `external_data` in a tensor that is not external (rule DATA-7).
    for path in idle:
        walking.at(copy, path).ClearField("external_data")
    return PlannedModel(
        items, copy, locations, {placeholders[path]: view for path, view in held.items()}
    )


def _staying(
    staying: Iterable[tuple[TensorRef, int]], resolve: Resolve
) -> tuple[dict[Path, bytes], dict[Path, Data]]:
    """Resolves external tensors that go into the model.

    Returns:
        Copies of the bytes of tensors below `MAPPED_SIZE`, and the `Data` of the others, by path.
    """
    small: dict[Path, bytes] = {}
    large: dict[Path, Data] = {}
    together: dict[Path, FileData] = {}  # parts of a file, which is opened once for many of them
    together_nbytes = 0
    for ref, nbytes in staying:
        data = _verified(ref, resolve(ref))
        if nbytes >= MAPPED_SIZE:
            large[ref.path] = data
        elif not isinstance(data, FileData):
            small[ref.path] = b"".join(data)
        else:
            together[ref.path] = data
            together_nbytes += nbytes
            if together_nbytes >= MAPPED_SIZE:
                small.update(zip(together, read_all([*together.values()]), strict=True))
                together, together_nbytes = {}, 0
    if together:
        small.update(zip(together, read_all([*together.values()]), strict=True))
    return small, large


def _verified(ref: TensorRef, data: Data) -> Data:
    """Returns data that goes into a model, after comparing its bytes with its CRC-32.

    Only `Stored` data is compared here: other data has no CRC-32, or is compared when it is read.
    """
    if isinstance(data, Stored) and data.crc32 is not None:
        found = Crc32.of(data).value
        if found != data.crc32:
            raise ChecksumError(
                f"{ref}: expected {data.nbytes} bytes with CRC-32 {data.crc32:#010x}, found "
                f"{found:#010x}; its source is damaged"
            )
    return data


def _views(given: Mapping[Path, Data], temporary: str | None) -> dict[Path, memoryview]:
    """A view of the data of each tensor, mapped from its file or from a temporary file.

    Data that is in no file is first copied to the temporary file, and so is the data of further
    files once `_MAX_MAPPED_FILES` files are mapped.
    """
    maps: dict[tuple[str, tuple[int, int]], memoryview] = {}
    views: dict[Path, memoryview] = {}
    sizes: dict[Path, int] = {}  # of data in the temporary file
    for path, data in given.items():
        view = _mapped(data, maps)
        if view is None:
            sizes[path] = 0
        else:
            views[path] = view
    if not sizes:
        return views

    def pieces() -> Iterator[memoryview]:
        for path in sizes:
            for piece in given[path]:
                sizes[path] += piece.nbytes
                yield piece

    rest = spool(pieces(), sum(given[path].nbytes for path in sizes), temporary)
    for path, size in sizes.items():
        views[path], rest = rest[:size], rest[size:]
    return views


def _mapped(data: Data, maps: dict[tuple[str, tuple[int, int]], memoryview]) -> memoryview | None:
    """A view of mapped data; None if the data is in no file, or too many files are mapped.

    Args:
        data: The data.
        maps: The maps made so far, by path and identity of the file; a new map is added.
    """
    if isinstance(data, Stored) and isinstance(data.view.obj, mmap.mmap):
        return data.view
    if not isinstance(data, FileData):
        return None
    if data.file is not None:
        return data.view
    file = data.path, data.identity
    whole = maps.get(file)
    if whole is not None and data.offset + data.nbytes <= whole.nbytes:
        return whole[data.offset : data.offset + data.nbytes]
    if len(maps) == _MAX_MAPPED_FILES:
        return None
    view = data.view
    if not isinstance(view.obj, mmap.mmap):  # the system refuses to map the file
        return None
    maps[file] = memoryview(view.obj)
    return view


def _raw_data(ref: TensorRef) -> Data:
    return Stored(tensors.raw_data(ref))


def require_names(names: Iterable[str]) -> None:
    """Checks the names of entries other than models.

    Raises:
        ValueError: Two names are equal or differ only in case, one name is a folder of another, or
            a name breaks another rule.
    """
    try:
        keys.check_names([*names, MODEL_PROTO], Report())
    except ArchiveFormatError as error:
        raise ValueError(error.message) from error
