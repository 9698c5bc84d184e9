"""Plans archives: their entries, with keys and sources of data.

The data of a tensor that becomes an entry is read here only to find equal tensors. The writer reads
the `Plan` once, in order.
"""

from __future__ import annotations

import contextlib
import os
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, NoReturn, TypeAlias, TypeVar

import onnx

from onnxarchive.errors import ArchiveFormatError, Strict, quoted, without_traceback
from onnxarchive.files.data import Bytes, Data, Made, Range, read_together
from onnxarchive.files.data_files import DataFiles, spool_all
from onnxarchive.model import keys, model_proto, tensors, walking, weights
from onnxarchive.model.copying import with_locations
from onnxarchive.model.keys import ASSET_PREFIX, MODEL_PROTO, Keys, least_alignment
from onnxarchive.model.tensors import TensorRef
from onnxarchive.model.walking import Path
from onnxarchive.remote.location import Location
from onnxarchive.sources.source import (
    Source,
    require_entry_count,
    require_initializer_count,
)
from onnxarchive.writing.options import Asset, WriteOptions
from onnxarchive.writing.sharing import SharedEntries
from onnxarchive.zipformat import layout
from onnxarchive.zipformat.directory import EMPTY, Directory

# From this size in bytes, external tensors that go into the model are mapped, not held in memory.
MIN_MAPPED_NBYTES = 1 << 20
_READ_COUNT = 64  # of smaller ones that are read together
_Model = TypeVar("_Model")
# A serialized model, and bytes to insert for external tensors, by location.
SerializedModel: TypeAlias = tuple[bytes, Mapping[str, memoryview]]


class Item(NamedTuple):
    """An entry to write.

    Attributes:
        name: Name of the entry.
        data: Its data.
        ref: The tensor whose elements it holds, if these are checked; else None.
        crc32: CRC-32 of the data when it was read before; the writer compares it.
    """

    name: str
    data: Data
    ref: TensorRef | None = None
    crc32: int | None = None


@dataclass(frozen=True)
class Plan:
    """An archive to write.

    Attributes:
        items: Its tensors and assets, in order.
        models: Its models, as the last entries.
        shared_nbytes: Number of bytes saved by sharing tensors between models.
        attributes: Sizes in bytes of tensors that stay in the models, though `convert_attribute`
            would store them outside.
        temporary: Directory for temporary copies of remote data; None for the system's.
    """

    items: list[Item]
    models: tuple[Item, ...]
    shared_nbytes: int = 0
    attributes: Sequence[int] = ()
    temporary: str | None = None

    @cached_property
    def entries(self) -> list[Item]:
        """All entries, in order: the items and the models."""
        return [*self.items, *self.models]

    @cached_property
    def nbytes(self) -> int:
        """Size of all data in bytes, without headers and padding."""
        return sum([item.data.nbytes for item in self.entries])

    def size(
        self,
        alignment: int = layout.MIN_ALIGNMENT,
        offset: int = 0,
        existing: Directory = EMPTY,
    ) -> int:
        """The size of the archive in bytes, if `existing` entries end at `offset`."""
        count = len(existing.entries) + len(self.entries)
        directory_size = sum(map(len, existing.records))
        for name, data, *_ in self.entries:
            least = max(alignment, least_alignment(name))
            header, record = layout.lay_out(name, data.nbytes, 0, offset, least).pack()
            offset += len(header) + data.nbytes
            directory_size += len(record)
        return offset + directory_size + len(layout.end_of_archive(count, directory_size, offset))


@dataclass(slots=True)
class PlannedModel:
    """A model, and the entries of the tensors that are stored outside it.

    Attributes:
        items: The new entries, in the order of the model.
        model: The model; tensors stored outside are external.
        inlined: Bytes of large tensors that go into the serialized model, by placeholder. In
            `model`, these tensors are external, with the placeholders as locations.
        shared: The keys of entries of other models that this model shares.
        attributes: As in `Plan`.
    """

    items: list[Item]
    model: onnx.ModelProto
    inlined: Mapping[str, memoryview]
    shared: frozenset[str]
    attributes: Sequence[int]

    def serialize(self) -> SerializedModel:
        """Serializes the model, and frees it before the bytes are parsed, which checks them.

        Raises:
            ArchiveFormatError: The model could not be read back; see `model_proto.serialize`.
        """
        data = model_proto.encode(self.model)
        del self.model
        model_proto.parse(data, Strict())
        return data, self.inlined


def model_items(models: Mapping[str, SerializedModel]) -> tuple[Item, ...]:
    """Models by id as the last entries of an archive: the further ones, then the default one.

    Raises:
        ArchiveFormatError: A model is too large, or the models have too many messages (MODEL-3).
    """
    if len(models) > 1:
        model_proto.check_messages_together([data for data, _ in models.values()], Strict())
    return tuple(
        Item(keys.model_entry(id), Bytes(*model_proto.filled(*models[id])))
        for id in (*sorted(models.keys() - {""}), "")
    )


def refuse_external(ref: TensorRef) -> NoReturn:
    """Refuses an external tensor of a model that must hold all of its tensors.

    Raises:
        ArchiveFormatError: Always.
    """
    tensors.require_no_data(ref)
    tensors.require_no_address(ref)
    raise ArchiveFormatError(
        f"{ref}: its data is external, not in the model; convert the file with "
        "onnxarchive.convert, or load the model with its external data"
    )


def open_assets(
    assets: Mapping[str, Asset] | None, files: DataFiles | None = None
) -> dict[str, Data]:
    """The data of assets by path.

    Args:
        assets: Bytes, or the path of a file, by path.
        files: Opens the files, and is closed by the caller; None closes them with the last data.

    Raises:
        TypeError: A path is no string, or an asset neither bytes nor a path.
        ValueError: A path is not allowed (rule ASSET-1).
        ArchiveFormatError: A file is not a regular file.
        UnsupportedFeatureError: An asset is a URL.
        OSError: A file cannot be opened.
    """
    files = DataFiles() if files is None else files
    opened: dict[str, Data] = {}
    for path, asset in (assets or {}).items():
        _require_asset_path(path)
        if isinstance(asset, bytes | bytearray | memoryview):
            opened[path] = Bytes(asset)
        elif isinstance(asset, str | os.PathLike):
            with _explaining_text(path, asset):
                opened[path] = Range.whole(files.open(Location.of(asset).require_local()))
        else:
            raise TypeError(
                f"expected bytes or the path of a file for the asset {quoted(path)}, found "
                f"{type(asset).__name__}"
            )
    return opened


@contextlib.contextmanager
def _explaining_text(path: str, asset: object) -> Iterator[None]:
    """Explains a string that is not the path of a file: it may be meant as the asset's content."""
    try:
        yield
    except FileNotFoundError as error:
        if not isinstance(asset, str):
            raise
        problem = (
            f"No such file for the asset {quoted(path)}: a string is the path of a file; give the "
            "content as bytes, such as text.encode()"
        )
        raise FileNotFoundError(error.errno, problem, error.filename) from without_traceback(error)


def _require_asset_path(path: str) -> None:
    if not isinstance(path, str):
        raise TypeError(f"expected the path of an asset as a string, found {path!r}")
    name = ASSET_PREFIX + path
    if keys.is_asset_name(name):
        return
    if keys.is_asset_name(unicodedata.normalize("NFC", name)):
        raise ValueError(
            f"expected the path of an asset in {keys.ASSET_FORM}, found "
            f"{quoted(path, in_ascii=True)}; use unicodedata.normalize('NFC', path)"
        )
    raise ValueError(f"expected the path of an asset as {keys.ASSET_PATH}, found {quoted(path)}")


def plan_archive(
    models: Mapping[str, Source],
    options: WriteOptions,
    *,
    temporary: str | None = None,
) -> Plan:
    """Plans the archive of one or several models, and of the assets of the default one.

    The data of a tensor that becomes an entry is read only to find equal tensors of several models.

    Args:
        models: The models by id; `""` is the id of the default model.
        options: The options of the archive; their assets replace those of the default model.
        temporary: Directory for temporary copies of remote data, and of large external tensors that
            go into a model; None for the system's temporary directory.

    Raises:
        ArchiveFormatError: A tensor cannot be stored, or a model is too large even without the
            tensors stored outside it.
        ValueError: The path of an asset or the id of a model is not allowed.
    """
    require_model_ids(models)
    assets = {**models[""].assets, **open_assets(options.assets)}
    if assets:
        require_names(ASSET_PREFIX + path for path in assets)
    items: list[Item] = []
    attributes: list[int] = []
    serialized: dict[str, SerializedModel] = {}
    assigned = Keys()
    shared = SharedEntries(temporary) if len(models) > 1 else None
    for identifier, source in sorted(models.items()):
        require_initializer_count(source.model, options.size_threshold)
        planned = plan_model(source, options, assigned=assigned, shared=shared, temporary=temporary)
        items += planned.items
        attributes += planned.attributes
        serialized[identifier] = planned.serialize()
    if shared:
        items = [item._replace(crc32=shared.crc32s.get(item.name)) for item in items]
    tensor_nbytes = [item.data.nbytes for item in items]
    require_entry_count(tensor_nbytes, other_entries=len(assets) + len(serialized))
    items.extend(Item(ASSET_PREFIX + path, assets[path]) for path in sorted(assets))
    shared_nbytes = shared.saved_nbytes if shared else 0
    return Plan(items, model_items(serialized), shared_nbytes, attributes, temporary)


def with_further_models(default: _Model, further: Mapping[str, _Model] | None) -> dict[str, _Model]:
    """All models of an archive by id.

    Raises:
        TypeError: `further` is not a mapping.
        ValueError: The id of a further model is empty.
    """
    if further is not None and not isinstance(further, Mapping):
        raise TypeError(
            "models: expected a mapping of ids, such as {'decoder': model}, got "
            f'{type(further).__name__}; "all" is for a directory that is converted'
        )
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
    source: Source,
    options: WriteOptions,
    *,
    stored: Mapping[Path, str] | None = None,
    assigned: Keys | None = None,
    shared: SharedEntries | None = None,
    temporary: str | None = None,
) -> PlannedModel:
    """Plans the entries of a model's tensors.

    Args:
        source: The model, and the data of its external tensors.
        options: The options of the archive.
        stored: The keys of tensors whose entries are written already, by path; `source` has no data
            of these.
        assigned: The keys that are assigned already.
        shared: The entries of other models, for this model to share; the new entries are added.
        temporary: Directory for a temporary file; None for the system's.

    Raises:
        ArchiveFormatError: A tensor cannot be stored, or the model is too large even without the
            data that is stored outside.
    """
    stored = stored or {}
    entries = _NewEntries(assigned or Keys(), shared)
    if shared:
        shared.begin_model(stored.values())
    main: dict[int, str] = {}  # locations of initializers of the main graph, by index
    locations = dict(stored)  # those of other tensors
    staying: list[tuple[TensorRef, Data]] = []  # external tensors that go into the model
    attributes: list[int] = []
    idle: list[Path] = []  # tensors in the model whose `external_data` has no effect
    leave = False  # whether tensors leave the model
    for index, ref, data in _with_data(source, stored):
        is_external = ref.tensor.data_location == tensors.EXTERNAL
        if data is not None and data.nbytes >= options.size_threshold:
            if options.convert_attribute or index is not None or ref.is_initializer:
                leave = leave or not is_external
                key = entries.key_of(ref, data)
                if index is not None:
                    main[index] = key
                else:
                    locations[ref.path] = key
                continue
            attributes.append(data.nbytes)
        if data is not None and is_external:
            staying.append((ref, data))
        elif ref.tensor.external_data:
            idle.append(ref.path)
    if shared:
        shared.add(entries.unshared)
    model_proto.require_size(sum(data.nbytes for _, data in staying))  # before any of them is read
    small, large = _staying(staying, temporary)
    inlined: dict[str, memoryview] = {}
    for path, view in large.items():
        locations[path] = f"{weights.SPAN_LOCATION}{len(inlined)}"
        inlined[locations[path]] = view
    model = _with_locations(source, main, locations, in_place=source.is_own and not leave)
    for path, raw_data in small.items():
        tensors.set_raw_data(walking.at(model, path), raw_data)
    # Readers refuse `external_data` in a tensor that is not external (rule DATA-7).
    for path in idle:
        walking.at(model, path).ClearField("external_data")
    return PlannedModel(entries.items, model, inlined, frozenset(entries.shared_keys), attributes)


def _with_data(
    source: Source, stored: Mapping[Path, str]
) -> Iterator[tuple[int | None, TensorRef, Data | None]]:
    """Yields each tensor that is not in an entry already, with its data.

    Yields:
        The index of an initializer of the main graph, or None; the tensor; and its data, or None if
        the model holds it and it cannot be stored outside.
    """
    initializers = source.model.graph.initializer
    count = len(initializers)
    make = tensors.initializer_maker(initializers)
    external_data = iter(source.data)
    for number, ref in enumerate(tensors.walk(source.model)):
        if stored and ref.path in stored:
            continue
        index = number if number < count else None
        data: Data | None = None
        if ref.tensor.data_location == tensors.EXTERNAL:
            data = next(external_data, None)
            if data is None:
                refuse_external(ref)
        else:
            nbytes = tensors.stored_nbytes(ref.tensor)
            if nbytes is not None and index is not None:
                data = Made(nbytes, make, index)
            elif nbytes is not None:
                data = tensors.data_in_model(ref, nbytes)
        yield index, ref, data


class _NewEntries:
    """The entries of a model's tensors, unless the model shares those of other models.

    Attributes:
        items: The new entries.
        shared_keys: The keys of entries of other models.
        unshared: Key, tensor and data of each new entry, for other models; empty without `shared`.
    """

    def __init__(self, assigned: Keys, shared: SharedEntries | None) -> None:
        self._assigned = assigned
        self._shared = shared
        self.items: list[Item] = []
        self.shared_keys: set[str] = set()
        self.unshared: list[tuple[str, TensorRef, Data]] = []

    def key_of(self, ref: TensorRef, data: Data) -> str:
        """The key of a tensor: of an entry of another model with the same bytes, or a new one."""
        key = self._shared.find(ref, data) if self._shared else None
        if key is not None:
            self.shared_keys.add(key)
            return key
        key = self._assigned.assign(ref.name)
        is_checked = ref.tensor.data_type in tensors.CHECKED_TYPES
        self.items.append(Item(key, data, ref if is_checked else None))
        if self._shared:
            self.unshared.append((key, ref, data))
        return key


def _with_locations(
    source: Source, main: Mapping[int, str], locations: Mapping[Path, str], *, in_place: bool
) -> onnx.ModelProto:
    """The model of a source with new locations; see `with_locations`.

    Args:
        source: The source.
        main: The locations of initializers of the main graph, by index.
        locations: Those of other tensors, by path.
        in_place: Whether to change the model, and to take it away from the source, so that
            `PlannedModel.serialize` frees it. No tensor in it has data that is needed later.
    """
    model = source.model
    if not in_place:
        return with_locations(model, locations, main, is_parsed=source.is_own)
    del source.model
    initializers = model.graph.initializer
    for index, key in main.items():
        tensors.set_location(initializers[index], key)
    for path, key in locations.items():
        tensors.set_location(walking.at(model, path), key)
    return model


def _staying(
    staying: Iterable[tuple[TensorRef, Data]], temporary: str | None
) -> tuple[dict[Path, bytes], dict[Path, memoryview]]:
    """Reads external tensors that go into the model.

    Returns:
        By path, copies of the bytes of tensors below `MIN_MAPPED_NBYTES`, and views of a temporary
        file with the bytes of the others.
    """
    small: dict[Path, Data] = {}
    large: dict[Path, Data] = {}
    for ref, data in staying:
        (small if data.nbytes < MIN_MAPPED_NBYTES else large)[ref.path] = data
    copies: dict[Path, bytes] = {}
    paths = [*small]
    for start in range(0, len(paths), _READ_COUNT):
        together = paths[start : start + _READ_COUNT]
        parts = read_together([small[path] for path in together])
        for path, part in zip(together, parts, strict=True):
            copies[path] = b"".join(part.pieces())
    return copies, spool_all(large, temporary) if large else {}


def require_names(names: Iterable[str]) -> None:
    """Checks the names of entries other than models.

    Raises:
        ValueError: Two names are equal or differ only in case, one name is a folder of another, or
            a name breaks another rule.
    """
    try:
        keys.check_names([*names, MODEL_PROTO], Strict())
    except ArchiveFormatError as error:
        raise ValueError(error.message) from error
