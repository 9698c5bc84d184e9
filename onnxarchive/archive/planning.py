"""Plans archives: what goes outside the model, under which keys, and where its bytes are.

A model becomes a `Plan`, which writing passes over once.
"""

from __future__ import annotations

import mmap
import os
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import onnx

from onnxarchive.buffers.checksums import Crc32
from onnxarchive.buffers.data import Buffer, Data, Pieces, Stored, as_bytes
from onnxarchive.errors import ArchiveFormatError, ChecksumError, Report, shown
from onnxarchive.model import keys, proto, tensors, walking, wire
from onnxarchive.model.copying import with_locations
from onnxarchive.model.deduplicate import deduplicate
from onnxarchive.model.keys import ASSET_PREFIX, MODEL_PROTO, Keys
from onnxarchive.model.tensors import TensorRef
from onnxarchive.model.threshold import DEFAULT_SIZE_THRESHOLD
from onnxarchive.model.walking import Path
from onnxarchive.storage.file_data import FileData
from onnxarchive.storage.spooling import spool
from onnxarchive.zipformat import layout, writer

# Tensors of attributes and the like of this many bytes or more are written from where they lie.
_HELD_SIZE = 1 << 20
_MAX_MAPPED = 64  # files of such tensors: each map has a descriptor
# What an asset may be given as: its bytes, or the path of a file.
Asset: TypeAlias = Buffer | str | os.PathLike[str]
# Gives the bytes of a tensor whose data is external.
Resolve: TypeAlias = Callable[[TensorRef], Data]


@dataclass(frozen=True, slots=True)
class Item:
    """An entry that is to be written.

    Attributes:
        name: Its name.
        nbytes: Size of its data in bytes.
        data: Gives its data when it is due, in any thread: where it lies, or a copy of this one
            tensor that is dropped when it is written.
        ref: The tensor that it is of, or None for an asset.
    """

    name: str
    nbytes: int
    data: Callable[[], Data]
    ref: TensorRef | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """An archive that is to be written.

    Attributes:
        items: Its entries but for the model, in order.
        model: The serialized model, in pieces.
        saved_nbytes: Bytes that need not be written, since identical initializers became one.
    """

    items: tuple[Item, ...]
    model: Pieces
    saved_nbytes: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of data in all, without headers and padding."""
        return sum(item.nbytes for item in self.items) + self.model.nbytes

    def size(
        self,
        alignment: int = layout.MIN_ALIGNMENT,
        offset: int = 0,
        kept: tuple[int, bytes] = (0, b""),
    ) -> int:
        """The size that the archive will have, in bytes.

        Args:
            alignment: As in `save`.
            offset: Where the first entry goes, in bytes from the start of the archive.
            kept: As `ZipWriter` takes it.
        """
        directory_size = len(kept[1])
        sizes = [(item.name, item.nbytes) for item in self.items]
        for name, nbytes in [*sizes, (MODEL_PROTO, self.model.nbytes)]:
            placement = layout.place(name, nbytes, 0, offset, alignment)
            offset = placement.end
            directory_size += placement.directory_record().packed_size
        end = layout.end_of_archive(kept[0] + len(sizes) + 1, directory_size, offset)
        return offset + directory_size + len(end)


def refuse_external(ref: TensorRef) -> Data:
    """Takes the place of `Resolve` for a model that has to hold all of its tensors.

    Raises:
        ArchiveFormatError: Always.
    """
    raise ArchiveFormatError(
        f"{ref}: expected its data in the model, found it external; convert the file with "
        "onnxarchive.convert, or load the model with its external data"
    )


def asset_files(assets: Mapping[str, Asset] | None) -> list[str]:
    """The files among assets."""
    given = (assets or {}).values()
    return [os.fspath(asset) for asset in given if isinstance(asset, str | os.PathLike)]


def open_assets(assets: Mapping[str, Asset] | None) -> tuple[Item, ...]:
    """The assets as entries, in the order of their paths.

    Raises:
        ValueError: A path is not allowed (rule ASSET-1).
        ArchiveFormatError: A file is not a regular one.
        OSError: A file cannot be opened.
    """
    items = []
    for path, asset in sorted((assets or {}).items()):
        name = _asset_name(path)
        if isinstance(asset, bytes | bytearray | memoryview):
            data: Data = Stored(as_bytes(asset))
        else:
            data = FileData.of(asset)
        items.append(Item(name, data.nbytes, partial(given_data, data)))
    return tuple(items)


def given_data(data: Data) -> Data:
    """`data` itself, for an `Item` whose bytes are at hand."""
    return data


def _asset_name(path: str) -> str:
    name = ASSET_PREFIX + path
    if keys.is_asset_name(name):
        return name
    if keys.is_asset_name(unicodedata.normalize("NFC", name)):
        raise ValueError(
            f"expected the path of an asset in {keys.ASSET_FORM}, found "
            f"{shown(path, in_ascii=True)}; give unicodedata.normalize('NFC', path)"
        )
    raise ValueError(f"expected the path of an asset as {keys.PLAIN_PATH}, found {shown(path)}")


def plan_archive(
    model: onnx.ModelProto,
    *,
    resolve: Resolve,
    size_threshold: int = DEFAULT_SIZE_THRESHOLD,
    convert_attribute: bool = False,
    assets: Iterable[Item] = (),
    dedupe: bool = False,
    temporary: str | None = None,
) -> Plan:
    """Decides what goes outside the model and under which key; reads no tensor that does.

    Args:
        model: The model. It is not changed.
        resolve: Gives the bytes of a tensor whose data is external already.
        size_threshold: As in `save`.
        convert_attribute: As in `save`.
        assets: Entries for the assets.
        dedupe: Whether identical initializers of a graph become one initializer.
        temporary: The directory for a file that takes large tensors which are to stay in the
            model, where they do not lie in a file as they are; None for the system's.

    Raises:
        ArchiveFormatError: A tensor cannot be stored, or the model is too large without them.
    """
    require_size_threshold(size_threshold)
    saved_nbytes = 0
    if dedupe:
        deduplicated = deduplicate(model, resolve)
        model, resolve = deduplicated.model, deduplicated.resolve
        saved_nbytes = deduplicated.saved_nbytes
    items, copy, held = plan_items(
        model,
        resolve=resolve,
        size_threshold=size_threshold,
        convert_attribute=convert_attribute,
        temporary=temporary,
    )
    planned = (*items, *assets)
    writer.require_entries(len(planned) + 1)
    return Plan(planned, Pieces(proto.serialize_filled(copy, held)), saved_nbytes)


def require_size_threshold(size_threshold: int) -> None:
    """Refuses a threshold below 0.

    Raises:
        ValueError: It is.
    """
    if size_threshold < 0:
        raise ValueError(f"size_threshold must not be negative, got {size_threshold}")


def plan_items(
    model: onnx.ModelProto,
    *,
    resolve: Resolve,
    size_threshold: int,
    convert_attribute: bool = False,
    stored: Mapping[Path, str] | None = None,
    assigned: Keys | None = None,
    temporary: str | None = None,
) -> tuple[tuple[Item, ...], onnx.ModelProto, dict[str, memoryview]]:
    """The entries of a model's tensors, and a copy of the model without their bytes.

    The third value holds the bytes of large tensors that are to stay in the model, by the location
    that they have in the copy until it is serialized.

    Args:
        model: The model. It is not changed.
        resolve: As in `plan_archive`.
        size_threshold: As in `save`.
        convert_attribute: As in `save`.
        stored: The keys of tensors whose entries are written already.
        assigned: The keys given so far.
        temporary: As in `plan_archive`.
    """
    assigned = assigned or Keys()
    locations = dict(stored or {})
    small: dict[Path, bytes] = {}
    held = _Held()
    idle: list[Path] = []
    items: list[Item] = []
    staying: list[tuple[TensorRef, int]] = []
    for ref in tensors.walk(model):
        if ref.path in locations:
            continue
        tensor = ref.tensor
        is_external = tensor.data_location == tensors.EXTERNAL
        data_type = tensors.external_type(ref) if is_external else tensors.stored_type(tensor)
        nbytes = -1 if data_type is None else data_type.nbytes(tensor.dims)
        if nbytes >= max(size_threshold, 0) and (ref.is_initializer or convert_attribute):
            key = assigned.assign(ref.name)
            locations[ref.path] = key
            read = partial(resolve, ref) if is_external else partial(_raw_data, ref)
            items.append(Item(key, nbytes, read, ref))
        elif is_external:
            staying.append((ref, nbytes))
        elif tensor.external_data:
            idle.append(ref.path)
    proto.require_size(sum(nbytes for _, nbytes in staying))  # before any of them is read
    for ref, nbytes in staying:
        verified = _verified(ref, resolve(ref))
        if nbytes < _HELD_SIZE:
            small[ref.path] = b"".join(verified)
        else:
            locations[ref.path] = held.add(verified)
    copy = with_locations(model, locations)
    for path, data in small.items():
        tensors.set_raw_data(walking.at(copy, path), data)
    for path in idle:  # it says nothing, and no reader would take it (rule DATA-7)
        walking.at(copy, path).ClearField("external_data")
    return tuple(items), copy, held.views(temporary)


def _verified(ref: TensorRef, data: Data) -> Data:
    """Data that goes into the model, where its CRC-32 would be lost, once that is found right.

    What is no entry's mapped bytes has none, or compares it when it is gone through.
    """
    if isinstance(data, Stored) and data.crc32 is not None:
        found = Crc32.of(data).value
        if found != data.crc32:
            raise ChecksumError(
                f"{ref}: expected {data.nbytes} bytes with CRC-32 {data.crc32:#010x}, found "
                f"{found:#010x}; its source is damaged"
            )
    return data


class _Held:
    """Bytes of large tensors that are to stay in the model, each as one view of a map.

    They are mapped where they lie, what is not in a file or in too many files goes into one that is
    temporary.
    """

    def __init__(self) -> None:
        self._views: dict[str, memoryview] = {}
        self._waiting: dict[str, Data] = {}
        self._maps: dict[tuple[str, tuple[int, int]], memoryview] = {}

    def add(self, data: Data) -> str:
        """Takes the bytes of a tensor, and gives the location that it has until they are put in."""
        location = f"{wire.SPAN_LOCATION}{len(self._views) + len(self._waiting)}"
        view = self._mapped(data)
        if view is None:
            self._waiting[location] = data
        else:
            self._views[location] = view
        return location

    def _mapped(self, data: Data) -> memoryview | None:
        """The bytes where they lie, or None where they are to go into the temporary file."""
        if isinstance(data, Stored) and isinstance(data.view.obj, mmap.mmap):
            return data.view
        if not isinstance(data, FileData):
            return None
        if data.file is not None:
            return data.view
        file = data.path, data.identity
        whole = self._maps.get(file)
        if whole is not None and data.offset + data.nbytes <= whole.nbytes:
            return whole[data.offset : data.offset + data.nbytes]
        if len(self._maps) == _MAX_MAPPED:
            return None
        view = data.view
        self._maps[file] = memoryview(view.obj)
        return view

    def views(self, temporary: str | None) -> dict[str, memoryview]:
        """The bytes by location.

        Args:
            temporary: The directory for the temporary file; None for the system's.
        """
        if not self._waiting:
            return self._views
        sizes = dict.fromkeys(self._waiting, 0)

        def pieces() -> Iterator[memoryview]:
            for location, data in self._waiting.items():
                for piece in data:
                    sizes[location] += piece.nbytes
                    yield piece

        rest = spool(pieces(), temporary)
        for location, size in sizes.items():
            self._views[location], rest = rest[:size], rest[size:]
        return self._views


def _raw_data(ref: TensorRef) -> Data:
    return Stored(tensors.raw_data(ref))


def require_names(names: list[str]) -> None:
    """Refuses what a reader would: two assets that differ in case, or one that is a folder."""
    try:
        keys.check_names([*names, MODEL_PROTO], Report())
    except ArchiveFormatError as error:
        raise ValueError(error.message) from error
