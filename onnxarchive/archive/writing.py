"""Writes archives: what goes outside the model is planned first, then streamed tensor by tensor.

A model becomes a `Plan`, which knows names, sizes and where each tensor's bytes come from, and
writing is one pass over it. `Writer` is for models that never stand in memory as a whole.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import mmap
import os
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from types import TracebackType
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np
import onnx

from onnxarchive.buffers import checksums
from onnxarchive.buffers.counting import Progress, ProgressCounter
from onnxarchive.buffers.data import Buffer, Data, Stored, SupportsWrite, as_bytes, pieces
from onnxarchive.errors import ArchiveFormatError, ChecksumError, Report, naming, shown
from onnxarchive.model import dtypes, ir, keys, proto, tensors, wire
from onnxarchive.model.deduplicate import deduplicate
from onnxarchive.model.keys import ASSET_PREFIX, MODEL_PROTO, Keys
from onnxarchive.model.tensors import Path, Site
from onnxarchive.storage import locking, threads
from onnxarchive.storage.beneath import Root
from onnxarchive.storage.files import READ_SIZE, MappedFile, require_no_input, spool
from onnxarchive.storage.filesystem import reserve
from onnxarchive.storage.replacement import Replacement, Require
from onnxarchive.zipformat import layout, writer
from onnxarchive.zipformat.writer import ZipWriter

if TYPE_CHECKING:
    import onnx_ir
    from numpy.typing import ArrayLike

# Tensors of attributes and the like of this many bytes or more are written from where they lie.
_HELD_SIZE = 1 << 20
_MAX_MAPPED = 64  # files of such tensors: each map has a descriptor
# Up to this many bytes, threads copy data and so go through it once. What is larger is as fast
# through a map, since the memory for a copy would be new each time.
_COPIED_SIZE = 1 << 25
DEFAULT_SIZE_THRESHOLD = 1024  # bytes; onnx's

# What an asset may be given as: its bytes, or the path of a file.
Asset: TypeAlias = Buffer | str | os.PathLike[str]
# Gives the bytes of a tensor whose data is external.
Resolve: TypeAlias = Callable[[Site], Data]
_Bytes = TypeVar("_Bytes", bytes, memoryview)


@dataclass(frozen=True, slots=True)
class Item:
    """An entry that is to be written.

    Attributes:
        name: Its name.
        nbytes: Size of its data in bytes.
        data: Gives its data when it is due, in any thread: where it lies, or a copy of this one
            tensor that is dropped when it is written.
        site: The tensor that it is of, or None for an asset.
    """

    name: str
    nbytes: int
    data: Callable[[], Data]
    site: Site | None = None


@dataclass(frozen=True, slots=True)
class Pieces:
    """Bytes in several places, one after another.

    Attributes:
        parts: The places.
        crc32: Not known.
    """

    parts: tuple[memoryview, ...]
    crc32: int | None = None

    @property
    def nbytes(self) -> int:
        """How many they are."""
        return sum(part.nbytes for part in self.parts)

    @property
    def is_constant(self) -> bool:
        """Whether nobody can change them: they are those of `bytes` objects."""
        return all(isinstance(part.obj, bytes) for part in self.parts)

    def __iter__(self) -> Iterator[memoryview]:
        return itertools.chain.from_iterable(map(pieces, self.parts))


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
            placement = layout.Placement(name.encode(), nbytes, 0, offset, alignment)
            offset = placement.end
            directory_size += placement.directory_record().packed_size
        end = layout.end_of_archive(kept[0] + len(sizes) + 1, directory_size, offset)
        return offset + directory_size + len(end)


def save(
    model: onnx.ModelProto | onnx_ir.Model,
    path: str | os.PathLike[str] | SupportsWrite,
    *,
    size_threshold: int = DEFAULT_SIZE_THRESHOLD,
    alignment: int = layout.MIN_ALIGNMENT,
    convert_attribute: bool = False,
    assets: Mapping[str, Asset] | None = None,
    progress: Progress | None = None,
    jobs: int | None = None,
) -> None:
    """Saves a model as an archive.

    The file appears under `path` when it is complete; until then, and after a failure, whatever
    was there is untouched. A disk without room for it says so before anything is written, where its
    file system can set blocks aside. The same model and options give the same bytes. Beyond the
    model, what stays in it and one tensor at a time are held in memory as copies; with several
    threads also up to `jobs` tensors that come next, as far as they have 96 MiB in all.

    Args:
        model: The model, with its tensors in memory; or an `onnx_ir.Model`, whose lazy and external
            tensors are fetched one at a time. It is not changed.
        path: The archive, usually `name.onnxa`; or a binary file that is written to as it comes,
            which need not be seekable.
        size_threshold: Tensors of this many bytes or more are stored outside the model. Smaller
            ones stay in it, where runtimes need them to infer shapes.
        alignment: What the data of every entry is aligned to, in bytes: a power of two from 64 to
            32768. 4096 lets every tensor begin on a page of its own.
        convert_attribute: Whether tensors of attributes, sparse tensors, and tensors in functions
            and training_info are stored outside, too, and not only initializers of the graph and
            its subgraphs. `load` reads all of them; `onnx.load`, on the unzipped directory, reads
            attributes but not the rest.
        assets: Further files that the archive carries, by relative path: the bytes themselves, or
            the path of a file.
        progress: Called with the bytes done and the bytes in all, after every few MiB.
        jobs: How many threads to use; None for one for each core. It changes neither the bytes nor
            the error. An `onnx_ir.Model` is saved by the caller's thread alone, since what makes
            its tensors may be the caller's code.

    Raises:
        ArchiveError: An `onnx_ir.Model` was loaded from the archive at `path`, and others have
            edited that since.
        ArchiveFormatError: The model would break a rule: a tensor does not have the bytes that its
            shape needs, or its data is external, or what stays in the model is over 2 GiB.
        UnsupportedFeatureError: There are more tensors to be stored outside than an archive holds.
        ValueError: `alignment`, `size_threshold`, `jobs` or the path of an asset is not allowed, or
            `path` is the file of an asset.
        OSError: The archive cannot be written.
    """
    jobs = threads.require_jobs(jobs)
    temporary = None
    if isinstance(path, str | os.PathLike):
        require_no_input(path, asset_files(assets))
        temporary = os.path.dirname(os.path.realpath(path))
    in_memory, resolve = _in_memory(model, size_threshold)
    plan = plan_archive(
        in_memory,
        resolve=resolve,
        size_threshold=size_threshold,
        convert_attribute=convert_attribute,
        assets=open_assets(assets),
        temporary=temporary,
    )
    origin: ir.Origin | None = None
    if not isinstance(model, onnx.ModelProto):
        jobs = 1
        origin = model.graph.meta.get(ir.ORIGIN)
    if origin is None or not isinstance(path, str | os.PathLike):
        write_archive(plan, path, alignment=alignment, progress=progress, jobs=jobs)
        return
    require = partial(origin.require_current, path)
    with write_file(
        plan, path, alignment=alignment, progress=progress, jobs=jobs, require=require
    ) as file:
        try:
            origin.follow(file)
        finally:
            locking.unlock(file.fileno())


def _in_memory(
    model: onnx.ModelProto | onnx_ir.Model, size_threshold: int
) -> tuple[onnx.ModelProto, Resolve]:
    if isinstance(model, onnx.ModelProto):
        return model, _refuse_external
    if not ir.is_ir_model(model):
        raise TypeError(f"expected an onnx.ModelProto or onnx_ir.Model, found {type(model)}")
    converted, outside = ir.to_proto(model, size_threshold=size_threshold)

    def resolve(site: Site) -> Data:
        if site.path not in outside:
            return _refuse_external(site)
        return Stored(memoryview(outside[site.path].tobytes()))

    return converted, resolve


def _refuse_external(site: Site) -> Data:
    raise ArchiveFormatError(
        f"{site}: expected its data in the model, found it external; convert the file with "
        "onnxarchive.convert, or load the model with its external data"
    )


@dataclass(frozen=True, slots=True)
class FileData:
    """Some bytes of a file, which is opened when they are looked at unless it is open anyway.

    Attributes:
        path: The file, relative to `root` where there is one.
        identity: The file's, as `MappedFile` gives it.
        offset: Where they begin in it, in bytes.
        nbytes: How many they are.
        file: The file, where it stays open; else None.
        root: The directory beneath which it is opened; None where it may be anywhere.
        crc32: Not known.
    """

    path: str
    identity: tuple[int, int]
    offset: int
    nbytes: int
    file: MappedFile | None = None
    root: Root | None = None
    crc32: int | None = None

    @classmethod
    def of(cls, path: str | os.PathLike[str], root: Root | None = None) -> FileData:
        """All bytes of a file.

        Args:
            path: The file, relative to `root` where there is one.
            root: The directory beneath which it has to be; None where it may be anywhere.

        Raises:
            ArchiveFormatError: It is not a regular file, or not beneath `root`.
            OSError: It cannot be opened.
        """
        with _open_file(path, root) as file:
            return cls(os.fsdecode(path), file.identity, 0, file.size, root=root)

    @classmethod
    def kept_open(
        cls, path: str, resources: contextlib.ExitStack, root: Root | None = None
    ) -> FileData:
        """As `of`, of a file that stays open as long as `resources`, whatever has its path then."""
        file = resources.enter_context(_open_file(path, root))
        return cls(path, file.identity, 0, file.size, file, root)

    def part(self, offset: int, nbytes: int) -> FileData:
        """Some of these bytes."""
        return FileData(
            self.path, self.identity, self.offset + offset, nbytes, self.file, self.root
        )

    def __iter__(self) -> Iterator[memoryview]:
        return pieces(self.view)

    @property
    def view(self) -> memoryview:
        """The bytes as a view of the file's map, which lives as long as the view.

        Raises:
            ArchiveFormatError: The file has become smaller, or another one has its path.
            OSError: It cannot be opened any more.
        """
        with self._opened() as file:
            return self._all_of(file.view()[self.offset : self.offset + self.nbytes], file)

    def read(self) -> bytes:
        """The bytes as a copy, which is read without a map.

        Raises:
            ArchiveFormatError: As of `view`.
            OSError: It cannot be opened or read any more.
        """
        with self._opened() as file:
            try:
                found = file.read(self.offset, self.nbytes)
            except OSError as error:
                error.filename = file.path
                raise
            return self._all_of(found, file)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[MappedFile]:
        kept = None if self.file is None else contextlib.nullcontext(self.file)
        with kept or _open_file(self.path, self.root) as file, naming(file.path):
            if file.identity != self.identity:
                raise ArchiveFormatError(
                    "expected the file that was found here before, found another"
                )
            yield file

    def _all_of(self, found: _Bytes, file: MappedFile) -> _Bytes:
        if len(found) != self.nbytes:
            size = os.fstat(file.fileno()).st_size
            raise ArchiveFormatError(
                f"expected {self.nbytes} bytes from offset {self.offset}, found a file that has "
                f"become smaller, {size} bytes"
            )
        return found


def _open_file(path: str | os.PathLike[str], root: Root | None) -> MappedFile:
    if root is None:
        return MappedFile(path)
    path = os.fsdecode(path)
    return MappedFile(os.path.join(root.path, path), descriptor=root.open(path))


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
    staying: list[tuple[Site, int]] = []
    for site in tensors.walk(model):
        if site.path in locations:
            continue
        tensor = site.tensor
        is_external = tensor.data_location == tensors.EXTERNAL
        data_type = tensors.external_type(site) if is_external else tensors.stored_type(tensor)
        nbytes = -1 if data_type is None else data_type.nbytes(tensor.dims)
        if nbytes >= max(size_threshold, 0) and (site.is_initializer or convert_attribute):
            key = assigned.assign(site.name)
            locations[site.path] = key
            read = partial(resolve, site) if is_external else partial(_raw_data, site)
            items.append(Item(key, nbytes, read, site))
        elif is_external:
            staying.append((site, nbytes))
        elif tensor.external_data:
            idle.append(site.path)
    proto.require_size(sum(nbytes for _, nbytes in staying))  # before any of them is read
    for site, nbytes in staying:
        verified = _verified(site, resolve(site))
        if nbytes < _HELD_SIZE:
            small[site.path] = b"".join(verified)
        else:
            locations[site.path] = held.add(verified)
    copy = tensors.with_locations(model, locations)
    for path, data in small.items():
        tensors.set_raw_data(tensors.at(copy, path), data)
    for path in idle:  # it says nothing, and no reader would take it (rule DATA-7)
        tensors.at(copy, path).ClearField("external_data")
    return tuple(items), copy, held.views(temporary)


def _verified(site: Site, data: Data) -> Data:
    """Data that goes into the model, where its CRC-32 would be lost, once that is found right.

    What is no entry's mapped bytes has none, or compares it when it is gone through.
    """
    if isinstance(data, Stored) and data.crc32 is not None:
        found = reduce(lambda before, piece: checksums.crc32(piece, before), data, 0)
        if found != data.crc32:
            raise ChecksumError(
                f"{site}: expected {data.nbytes} bytes with CRC-32 {data.crc32:#010x}, found "
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


def _raw_data(site: Site) -> Data:
    return Stored(tensors.raw_data(site))


def write_archive(
    plan: Plan,
    path: str | os.PathLike[str] | SupportsWrite,
    *,
    alignment: int = layout.MIN_ALIGNMENT,
    progress: Progress | None = None,
    jobs: int | None = None,
    require: Require | None = None,
    reserved: int | None = None,
) -> None:
    """Writes a planned archive, whole or not at all.

    Args:
        plan: The plan.
        path: As in `save`.
        alignment: As in `save`.
        progress: As in `save`.
        jobs: As `stream` takes it; None for one for each core.
        require: As `Replacement.commit` takes it.
        reserved: The disk is asked for room for at most this many bytes beforehand; None for all.
    """
    if isinstance(path, str | os.PathLike):
        written = write_file(
            plan,
            path,
            alignment=alignment,
            progress=progress,
            jobs=jobs,
            require=require,
            reserved=reserved,
        )
        with written:
            locking.unlock(written.fileno())
    else:
        _require_names([item.name for item in plan.items])
        zip_writer = ZipWriter(path, alignment=alignment)
        stream(plan, zip_writer, progress, threads.require_jobs(jobs))


def write_file(
    plan: Plan,
    path: str | os.PathLike[str],
    *,
    alignment: int,
    progress: Progress | None = None,
    jobs: int | None = None,
    require: Require | None = None,
    follow_links: bool = True,
    is_locked: bool = False,
    reserved: int | None = None,
) -> MappedFile:
    """Writes a planned archive as `write_archive` does, and gives its file, which is still locked.

    Args:
        plan: The plan.
        path: The archive.
        alignment: As in `save`.
        progress: As in `save`.
        jobs: As `stream` takes it; None for one for each core.
        require: As `Replacement.commit` takes it.
        follow_links: As `Replacement` takes it.
        is_locked: As `Replacement` takes it.
        reserved: As in `write_archive`.
    """
    _require_names([item.name for item in plan.items])
    jobs = threads.require_jobs(jobs)
    replacement = Replacement(path, follow_links=follow_links, is_locked=is_locked)
    try:
        nbytes = plan.nbytes if reserved is None else min(plan.nbytes, reserved)
        reserve(replacement.fileno(), 0, nbytes)
        stream(plan, ZipWriter(replacement.file, alignment=alignment), progress, jobs)
    except BaseException as error:
        replacement.discard(error)
        raise
    return replacement.commit_open(require)


def _require_names(names: list[str]) -> None:
    """Refuses what a reader would: two assets that differ in case, or one that is a folder."""
    try:
        keys.check_names([*names, MODEL_PROTO], Report())
    except ArchiveFormatError as error:
        raise ValueError(error.message) from error


def stream(plan: Plan, target: ZipWriter, progress: Progress | None, jobs: int = 1) -> int:
    """Writes entries, directory and end records; gives the size of the archive in bytes.

    Args:
        plan: The plan.
        target: Where they go. It is written to in the caller's thread.
        progress: As in `save`. It is called in the caller's thread.
        jobs: How many threads there are at most, the caller's among them. Where they are more than
            one, the data of items is fetched in any of them.
    """
    counter = ProgressCounter(progress, plan.nbytes)
    fetch = partial(_fetch, copied_size=_COPIED_SIZE if jobs > 1 else READ_SIZE)
    model = Item(MODEL_PROTO, plan.model.nbytes, partial(given_data, plan.model))
    items = [*plan.items, model]
    sizes = [item.nbytes for item in items]
    with contextlib.closing(threads.in_order(items, sizes, fetch, jobs)) as fetched:
        for entry in fetched:
            _write_entry(entry, target, counter)
            del entry  # before the next one is fetched
    return target.finish()


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry that is due.

    Attributes:
        name: Its name.
        stream: Its bytes, in pieces.
        nbytes: How many they are.
        crc32: Their CRC-32.
        is_constant: As `ZipWriter.add_stream` takes it.
    """

    name: str
    stream: Iterable[memoryview]
    nbytes: int
    crc32: int
    is_constant: bool = False


def _fetch(item: Item, copied_size: int = READ_SIZE) -> _Entry:
    """Makes an item an entry; what has no known CRC-32, or is copied, is gone through for it.

    Args:
        item: The item.
        copied_size: Up to how many bytes are copied, unless nobody can change them.
    """
    data = item.data()
    known = data.crc32
    if not _is_constant(data) and data.nbytes <= copied_size:
        data = _copied(data)
    is_constant = _is_constant(data)
    if known is not None and not is_constant:
        return _Entry(item.name, _checked(item, data), item.nbytes, known)
    nbytes = crc32 = 0
    for piece in _checked(item, data):
        nbytes += len(piece)
        crc32 = checksums.crc32(piece, crc32)
    if known is not None:  # found another one, that is told when it is written
        return _Entry(item.name, data, item.nbytes, known, is_constant=crc32 == known)
    if nbytes != item.nbytes:
        raise ArchiveFormatError(
            f"{item.site or item.name}: expected {item.nbytes} bytes, as its shape and data type "
            f"need, found {nbytes}"
        )
    return _Entry(item.name, data, nbytes, crc32, is_constant)


def _copied(data: Data) -> Data:
    """The bytes in memory; `data` itself where they are more than it says."""
    if isinstance(data, FileData):
        return Stored(memoryview(data.read()))
    copy = io.BytesIO()
    for piece in data:
        if copy.tell() + len(piece) > data.nbytes:
            return data
        copy.write(piece)
    return Stored(memoryview(copy.getvalue()))


def _is_constant(data: Data) -> bool:
    return isinstance(data, Stored | Pieces) and data.is_constant


def _write_entry(
    entry: _Entry,
    target: ZipWriter,
    counted: Callable[[Iterable[memoryview]], Iterable[memoryview]] = iter,
) -> None:
    target.add_stream(
        entry.name,
        entry.nbytes,
        entry.crc32,
        counted(entry.stream),
        is_constant=entry.is_constant,
    )


def _checked(item: Item, data: Data) -> Iterable[memoryview]:
    if item.site is None:
        return data
    return tensors.checked(item.site, data, Report(), entry=item.name)


class Writer:
    """Writes an archive tensor by tensor, for a model that does not fit memory as a whole.

    ::

        with onnxarchive.Writer("model.onnxa") as writer:
            for name, array in weights:
                writer.add(name, array)
            writer.finish(model)

    The archive appears under its path when `finish` returns. Leaving the block without it, by an
    exception or otherwise, leaves nothing behind.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        size_threshold: int = DEFAULT_SIZE_THRESHOLD,
        alignment: int = layout.MIN_ALIGNMENT,
    ) -> None:
        """Begins an archive.

        Args:
            path: The archive.
            size_threshold: Tensors that the model given to `finish` holds itself are stored
                outside from this many bytes on. What `add` was given always is.
            alignment: As in `save`.

        Raises:
            ValueError: `alignment` is not allowed.
            OSError: The file cannot be made.
        """
        self._path = path
        self._size_threshold = size_threshold
        self._replacement = Replacement(path)
        self._is_open = True
        try:
            self._zip = ZipWriter(self._replacement.file, alignment=alignment)
        except BaseException:
            self.close()
            raise
        self._keys = Keys()
        self._key_of: dict[str, str] = {}
        self._added: dict[str, onnx.TensorProto] = {}
        self._nbytes: dict[str, int] = {}
        self._assets: list[str] = []

    def add(self, name: str, array: ArrayLike) -> str:
        """Writes a tensor.

        Args:
            name: The name of the initializer that it is.
            array: Its elements. Types that ml_dtypes adds to numpy (bfloat16, float8, int4, ...)
                are stored as what they are, those of less than 8 bits packed.

        Returns:
            The key under which the tensor is stored.

        Raises:
            ValueError: A tensor of this name was added before, or the writer is closed.
            UnsupportedFeatureError: ONNX has no data type for the array.
            OSError: The disk is full, or another error of writing.
        """
        self._require_open()
        if name in self._key_of:
            raise ValueError(f"expected each tensor once, found {name!r} again")
        elements = np.asarray(array)
        data = dtypes.as_raw_data(elements)
        key = self._keys.assign(name)
        data_type = dtypes.of_array(elements)
        tensor = onnx.TensorProto(name=name, data_type=data_type.number, dims=elements.shape)
        tensors.set_location(tensor, key)
        with self._closing_on_failure():
            self._zip.add(key, data)
        self._key_of[name] = key
        self._added[key] = tensor
        self._nbytes[key] = data.nbytes
        return key

    def add_asset(self, name: str, data: Asset) -> None:
        """Writes an asset.

        Args:
            name: Its path in the archive, without the prefix `assets/`.
            data: Its bytes, or the path of a file.

        Raises:
            ValueError: The path is not allowed or taken, or the writer is closed.
            OSError: The file cannot be read, or the archive not written.
        """
        self._require_open()
        (item,) = open_assets({name: data})
        _require_names([*self._assets, item.name])
        with self._closing_on_failure():
            _write_entry(_fetch(item), self._zip)
        self._assets.append(item.name)

    def finish(self, model: onnx.ModelProto) -> None:
        """Writes the model and puts the archive in its place.

        A tensor that was added becomes the data of the initializer of its name, which needs no
        data of its own and, where it gives shape and data type, the same ones. Where the model has
        no such initializer, one is appended to the main graph. A tensor elsewhere, in an attribute
        or a function, may name a key itself, as the location of its external data.

        Args:
            model: The model. It is not changed.

        Raises:
            ArchiveFormatError: An added tensor does not fit the model.
            ValueError: The writer is closed.
            OSError: The archive cannot be written.
        """
        self._require_open()
        with self._closing_on_failure():
            items, complete, _ = plan_items(
                model,
                resolve=_refuse_external,
                size_threshold=self._size_threshold,
                stored=self._find_stored(model),
                assigned=self._keys,
            )
            self._fill_in(complete)
            self._check(complete, items)
            model_proto = Pieces((memoryview(proto.serialize(complete)),))
            stream(Plan(items, model_proto), self._zip, None)
            self._is_open = False
            self._replacement.commit()

    @contextlib.contextmanager
    def _closing_on_failure(self) -> Iterator[None]:
        """Gives the archive up when a write fails: its bytes so far are of no use."""
        try:
            yield
        except BaseException as error:
            self.close(error)
            raise

    def close(self, error: BaseException | None = None) -> None:
        """Gives the archive up, unless `finish` has completed it; nothing is left behind.

        Args:
            error: Why, or None. Where it tells of a full disk, it is made to name the archive.
        """
        if self._is_open:
            self._is_open = False
            self._replacement.discard(error)

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _require_open(self) -> None:
        if not self._is_open:
            raise ValueError("the writer is closed")

    def _find_stored(self, model: onnx.ModelProto) -> dict[Path, str]:
        """Which tensors of the model are those that were added."""
        stored: dict[Path, str] = {}
        sites: dict[str, Site] = {}
        for site in tensors.walk(model):
            if site.tensor.data_location == tensors.EXTERNAL:
                reference = tensors.external_data(site, Report())
                assert reference is not None  # the report would have raised
                key = reference.location
                if reference.offset or reference.length not in (None, self._nbytes.get(key)):
                    raise ArchiveFormatError(
                        f"{site}: expected all of a tensor that was added as its data, found "
                        f"offset {reference.offset} and length {reference.length}"
                    )
                if key not in self._added:
                    raise ArchiveFormatError(
                        f"{site}: expected the key of a tensor that was added as its location, "
                        f"found {key!r}"
                    )
            elif site.is_initializer and site.name in self._key_of:
                key = self._key_of[site.name]
            else:
                continue
            if key in sites:
                raise ArchiveFormatError(
                    f"expected one tensor to be {self._added[key].name!r}, found {sites[key]} and "
                    f"{site}"
                )
            sites[key] = site
            stored[site.path] = key
        return stored

    def _fill_in(self, model: onnx.ModelProto) -> None:
        """Gives the tensors that were added their shape and type, and the others a place."""
        unused = dict(self._added)
        for site in tensors.walk(model):
            key = tensors.location(site.tensor)
            added = unused.pop(key, None) if key is not None else None
            if added is None:
                continue
            tensor = site.tensor
            if not tensor.data_type:
                tensor.data_type = added.data_type
                tensor.dims[:] = added.dims
            if (tensor.data_type, list(tensor.dims)) != (added.data_type, list(added.dims)):
                raise ArchiveFormatError(
                    f"{site}: expected {_describe(tensor)} as in the model, found "
                    f"{_describe(added)} added"
                )
        model.graph.initializer.extend(unused.values())

    def _check(self, model: onnx.ModelProto, items: Iterable[Item]) -> None:
        """Refuses what a reader of the archive would."""
        sizes = self._nbytes | {item.name: item.nbytes for item in items}
        proto.check_references(model, sizes, Report())


def _describe(tensor: onnx.TensorProto) -> str:
    return f"{dtypes.name_of(tensor.data_type)} of shape {list(tensor.dims)}"
