"""An open archive: its entries, its model, and views of its tensors through one map of the file.

Opening reads the end records, the central directory and the model, by position and not through the
map, and refuses whatever they show to be wrong. An entry's local header is compared with the
directory when the entry is first read, the model's therefore on opening. Weights are read by
whoever looks at a view.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, ValuesView
from functools import cached_property
from itertools import chain, islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, overload

import onnx

from onnxarchive.archive import recovery
from onnxarchive.archive.contents import MAX_MODEL_NBYTES, check_crc32, check_data, read_contents
from onnxarchive.archive.local_headers import LocalHeaders
from onnxarchive.buffers import checksums
from onnxarchive.buffers.counting import Progress, ProgressCounter
from onnxarchive.errors import (
    ArchiveError,
    ArchiveFormatError,
    Report,
    TensorNotFoundError,
    UnfinishedEditError,
    naming,
    shown,
)
from onnxarchive.model import dtypes, proto, tensors
from onnxarchive.model.keys import ASSET_PREFIX, MODEL_PROTO
from onnxarchive.model.shapes import Shapes
from onnxarchive.model.tensors import Site, Sites
from onnxarchive.storage import threads
from onnxarchive.storage.files import MappedFile, Prefetch
from onnxarchive.zipformat import directory
from onnxarchive.zipformat.directory import Entries, Entry, Records

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from onnxarchive.archive.editing import EditableArchive

_Opened = TypeVar("_Opened", bound="Archive")

_MAX_SHOWN_OWNERS = 8  # of a name, in a message


class Snapshot:
    """State of an archive when it was opened; an edit replaces it by another one.

    Its file is closed when nobody uses the state any more.

    Attributes:
        file: The open file.
        size: The size in bytes that it had.
        directory: Its directory.
        entries: The entries by name.
        model: The model.
        sites: The tensor of each key.
        headers: The local headers.
    """

    def __init__(self, file: MappedFile, max_model_nbytes: int) -> None:
        """Reads what `read_contents` does, and the local header of the model."""
        contents = read_contents(file, Report(), max_model_nbytes)
        assert contents.model is not None  # the report would have raised
        self.file = file
        self.size = file.size
        self.directory = contents.directory
        self.entries = NamedEntries(contents.directory.entries)
        self.model = contents.model
        self.sites = contents.sites
        self.headers = LocalHeaders(file, contents.directory)
        shapes = contents.shapes
        if shapes is None:
            shapes = Shapes.of(map(self.sites.tensor, self.entries.names))
        self._shapes = shapes
        self._require_header(len(self.entries) - 1)  # the model's

    @cached_property
    def index(self) -> _Index:
        """Where the initializers are."""
        return _Index(self.entries, self.model, self.sites)

    def is_in(self, file: MappedFile) -> bool:
        """Whether a file has this directory, and so this content; a lock keeps editors out."""
        packed, entries = self.directory.records.pack(), self.directory.entries
        offset = entries.data_offsets[-1] + entries.sizes[-1]
        return file.size == self.size and file.read(offset, len(packed)) == packed

    def locate(self, number: int) -> tuple[memoryview, int, int]:
        """A view in which an entry lies, where it begins there, and its size in bytes.

        Raises:
            ArchiveFormatError: The entry's local header does not match the directory.
            ValueError: The archive is closed.
        """
        listed = self.directory.entries
        offset, nbytes = listed.data_offsets[number], listed.sizes[number]
        view = self.file.reaching(offset + nbytes)
        if not self.headers.are_right[number]:
            self._require_header(number)
        return view, offset, nbytes

    def _require_header(self, number: int) -> None:
        """Compares an entry's local header with its directory record."""
        with naming(self.file.path):
            self.headers.require(number)

    def array(self, number: int) -> NDArray[Any]:
        """The tensor whose bytes are those of an entry, as `Archive.tensor` gives it."""
        view, offset, _ = self.locate(number)
        data_type, shape = self._shapes[number]
        return dtypes.as_array(view, data_type, shape, offset)


class Archive:
    """An open ONNX archive, as `onnxarchive.open` gives it.

    Views and arrays are read-only and lie in the file's map. They stay valid after `close` and
    after the archive object is gone. What this library does to an archive meanwhile does not
    change them, whether its model is replaced in its place or the whole of it is saved anew; but
    another program that rewrites the file changes them, and one that truncates it makes reading
    them end the process with SIGBUS. An archive may be used by several threads at once.

    Attributes:
        path: The archive's path as it was given.
        max_model_nbytes: Size in bytes above which its model is refused.
    """

    def __init__(self, file: MappedFile, max_model_nbytes: int = MAX_MODEL_NBYTES) -> None:
        """Takes over `file`, which must have been opened for this archive alone."""
        self.path = file.path
        self.max_model_nbytes = max_model_nbytes
        self._read(file)

    def _read(self, file: MappedFile) -> None:
        self._found = Snapshot(file, self.max_model_nbytes)

    @property
    def file(self) -> MappedFile:
        """The open file."""
        return self._found.file

    @property
    def sites(self) -> Sites:
        """The tensors that are stored outside the model, and where they stand in it, by key."""
        return self._found.sites

    @property
    def entries(self) -> NamedEntries:
        """Every entry by name, in the order of the archive."""
        return self._found.entries

    @property
    def model(self) -> onnx.ModelProto:
        """The model, its large tensors external with their keys as location.

        It is the archive's own, parsed once: copy it before changing it.
        """
        found = self._found
        found.sites.keep()  # before anybody changes the model
        return found.model

    @property
    def metadata(self) -> Mapping[str, str]:
        """The model's metadata (`metadata_props`) by key; of a key that is there twice the last."""
        return proto.metadata(self._found.model)

    @property
    def records(self) -> Records:
        """The directory record of every entry, in the order of the archive."""
        return self._found.directory.records

    @property
    def alignment(self) -> int:
        """What the data of the model's entry is aligned to, in bytes, as its local header says."""
        entry = self.entries[MODEL_PROTO]
        header = self.file.read(entry.header_offset, entry.data_offset - entry.header_offset)
        return directory.stated_alignment(header)

    @property
    def tensors(self) -> Tensors:
        """Initializers of the main graph and its subgraphs by name, as read-only arrays.

        See `Tensors` for names that several graphs have.
        """
        return Tensors(self)

    @property
    def assets(self) -> Mapping[str, memoryview]:
        """The assets by path (without the prefix `assets/`), as read-only views."""
        return Assets(self)

    def read(self, name: str) -> memoryview:
        """The bytes of an entry, as a read-only view; nothing is copied but the model's.

        The bytes of a tensor are those of `raw_data`: little-endian, row-major, sub-byte types
        packed. The model's are a copy, since it may be replaced in the file.

        Raises:
            TensorNotFoundError: There is no such entry.
            ArchiveFormatError: Its local header does not match the directory.
            ArchiveError: It is the model, which is no longer that of when the archive was opened.
            ValueError: The archive is closed.
        """
        found = self._found
        if name == MODEL_PROTO:
            return self._read_model()
        number = found.entries.index_of.get(name)
        if number is None:
            raise self._not_found(f"expected the name of an entry, found {shown(name)}")
        view, offset, nbytes = found.locate(number)
        return view[offset : offset + nbytes]

    @contextlib.contextmanager
    def _settled(self) -> Iterator[Snapshot]:
        """The state, whose model this object does not overwrite while the block runs."""
        yield self._found

    def _read_model(self) -> memoryview:
        with self._settled() as found:
            entry = found.entries[MODEL_PROTO]
            data = found.file.read(entry.data_offset, entry.nbytes)
        if (len(data), checksums.crc32(data)) == (entry.nbytes, entry.crc32):
            return memoryview(data)
        raise self._changed()

    def _changed(self) -> ArchiveError:
        error = ArchiveError(
            "expected the model with which the archive was opened, found that the file has been "
            "changed since; open it anew"
        )
        error.path = self.path
        return error

    def _has_another_end(self, found: Snapshot) -> bool:
        """Whether others have edited the file in its place since; waits while they do."""
        try:
            with recovery.opened(self.path) as file, file:
                records = read_contents(file, Report()).directory.records
                return file.identity == found.file.identity and records != found.directory.records
        except UnfinishedEditError:
            return True
        except (ArchiveError, OSError):
            return False

    def tensor(self, key: str) -> NDArray[Any]:
        """The tensor of a key as a read-only array, wherever it stands in the model.

        This reaches what `tensors` does not name: tensors of attributes, functions and
        training_info, and initializers whose name several graphs have.

        Returns:
            A view of the file; for types of less than 8 bits (int4, uint2, float4e2m1, ...) an
            unpacked copy of one byte an element, whose packed bytes `read(key)` gives.

        Raises:
            TensorNotFoundError: No tensor has this key.
            ArchiveFormatError: The entry's local header does not match the directory.
            ValueError: The archive is closed.
        """
        found = self._found
        if key not in found.sites:
            raise self._not_found(f"expected the key of a tensor, found {shown(key)}")
        return found.array(found.entries.index_of[key])

    def require_current(self, path: str | os.PathLike[str], file: MappedFile | None = None) -> None:
        """Refuses to replace this archive if others have edited it since it was opened.

        Args:
            path: What is to be replaced; nothing is refused if it is another file.
            file: The file at `path`, locked: some file systems let nobody read a locked file
                through another descriptor. None for the archive's own.

        Raises:
            ArchiveError: The archive has another directory by now.
            OSError: It is gone, or cannot be read.
        """
        if os.path.realpath(path) == os.path.realpath(self.path) or self.file.is_at(path):
            with MappedFile(path) if file is None else contextlib.nullcontext(file) as found:
                if not self._found.is_in(found):
                    raise self._edited()

    def _edited(self) -> ArchiveError:
        error = ArchiveError(
            "expected the archive as it was when it was opened, found that others have changed it "
            "since; open it anew"
        )
        error.path = self.path
        return error

    def verify(self, progress: Progress | None = None, *, jobs: int | None = None) -> None:
        """Reads every entry and holds it against the rules that need its local header and bytes.

        These are what opening has not seen: local header and CRC-32 are those of the directory,
        a SHA-1 that the tensor states is that of its bytes, unused bits are zero, and booleans 0
        or 1. An archive that opens and passes breaks no rule.

        Args:
            progress: Called with the bytes done and the bytes in all, after every MiB or less; from
                any thread, by one at a time.
            jobs: How many threads to use; None for one for each core. It changes no outcome: of
                several faults the first in the file is raised.

        Raises:
            ChecksumError: Bytes of an entry have changed (ZIP-15, DATA-6).
            ArchiveFormatError: A local header does not match the directory, or bytes are none that
                the tensor may have (TENSOR-4, TENSOR-5).
            ArchiveError: The archive has got another model since it was opened.
        """
        found = self._found
        entries = found.directory.entries
        counter = ProgressCounter(progress, sum(entries.sizes))

        def verify(number: int) -> None:
            found.headers.compare(number, Report())
            entry = entries[number]
            check_data(found.file, entry, found.sites.get(entry.name), Report(), counter)

        model = len(entries) - 1
        with naming(self.path):
            threads.for_each(
                range(model), entries.sizes[:model], verify, threads.require_jobs(jobs)
            )
            try:
                with self._settled() as current:
                    if current is found:
                        verify(model)
                    else:  # an edit has overwritten the model, which was right until then
                        counter.add(entries.sizes[model])
            except ArchiveFormatError as error:
                if self._has_another_end(found):
                    raise self._changed() from error
                raise

    def close(self) -> None:
        """Closes the file. Views live on; new ones can no longer be made."""
        self.file.close()

    def __enter__(self: _Opened) -> _Opened:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        name = type(self).__name__
        return f"<onnxarchive.{name} {self.path!r}, {len(self.entries)} entries>"

    def _not_found(self, message: str) -> TensorNotFoundError:
        error = TensorNotFoundError(message)
        error.path = self.path
        return error


class NamedEntries(Mapping[str, Entry]):
    """The entries of an archive by name, each made when looked up.

    Attributes:
        names: The names, in the order of the archive.
    """

    def __init__(self, entries: Entries) -> None:
        """Takes the entries, no two of which have the same name."""
        self.names = entries.names
        self._entries = entries

    @cached_property
    def index_of(self) -> dict[str, int]:
        """Which of the entries has which name."""
        return dict(zip(self.names, range(len(self.names)), strict=True))

    def __getitem__(self, name: str) -> Entry:
        return self._entries[self.index_of[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries.names)

    def __len__(self) -> int:
        return len(self._entries)

    def values(self) -> ValuesView[Entry]:
        """The entries, in the order of the archive."""
        return _Values(self)

    def __repr__(self) -> str:
        return repr(dict(self))


class _Values(ValuesView[Entry]):
    """Entries one after the other, none of which is looked up by its name."""

    _mapping: NamedEntries

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._mapping._entries)


class Tensors(Mapping[str, "NDArray[Any]"]):
    """Initializers by name, as read-only arrays; made when looked up.

    It holds those of the main graph and of every subgraph of its nodes. ONNX lets two subgraphs
    own the same name (the branches of an If): such a name is ambiguous, is not iterated over, and
    looking it up raises, naming the keys under which `Archive.tensor` gives each of them. So a
    lookup never gives another graph's tensor. Initializers that the model itself holds, small
    ones and strings, are here as well.
    """

    def __init__(self, archive: Archive) -> None:
        """Shows the initializers of an archive."""
        self._archive = archive

    @property
    def _index(self) -> _Index:
        """Where they are in the archive as it is now."""
        return self._archive._found.index

    def site(self, name: str) -> Site:
        """The tensor of an initializer and where it stands in the model.

        Raises:
            TensorNotFoundError: No initializer has this name, or several have it.
        """
        return self._site(self._index, name)

    def _site(self, index: _Index, name: str) -> Site:
        site = index.site(name)
        if site is None:
            raise self._archive._not_found(index.why_not(name))
        return site

    def key(self, name: str) -> str | None:
        """The key of the entry that holds an initializer; None where the model itself holds it.

        Raises:
            TensorNotFoundError: No initializer has this name, or several have it.
        """
        found = self._archive._found
        number = found.index.number_of.get(name)
        if number is not None:
            return found.entries.names[number]
        self._site(found.index, name)
        return None

    def __getitem__(self, name: str) -> NDArray[Any]:
        """The initializer of this name.

        Returns:
            A view of the file; an unpacked copy for types of less than 8 bits; a copy for an
            initializer that the model itself holds.

        Raises:
            ArchiveFormatError: It is held by the model and cannot be an array.
            TensorNotFoundError: No initializer has this name, or several have it.
        """
        found = self._archive._found
        number = found.index.number_of.get(name)
        if number is not None:
            return found.array(number)
        site = self._site(found.index, name)
        tensor = site.tensor
        data_type = tensors.stored_type(tensor)
        with naming(self._archive.path):
            if data_type is not None:
                return dtypes.as_array(tensors.raw_data(site), data_type, tensor.dims)
            try:
                return tensors.strings(tensor)
            except ValueError as error:
                raise ArchiveFormatError(
                    f"{site}: expected a data type and a shape that an array can have, found data "
                    f"type {tensor.data_type} and dims {shown(tensor.dims)}"
                ) from error

    def __iter__(self) -> Iterator[str]:
        index = self._index
        return chain(index.names, index.others)

    def __len__(self) -> int:
        index = self._index
        return len(index.names) + len(index.others)

    def __contains__(self, name: object) -> bool:
        index = self._index
        return isinstance(name, str) and (name in index.number_of or index.site(name) is not None)

    def __repr__(self) -> str:
        return f"<{len(self)} tensors of {self._archive!r}>"


class _Index:
    """Where the initializers of an archive are, but for names that several of them have.

    Attributes:
        number_of: In which entry each initializer is that the model itself does not hold, by name.
        names: The names of the main graph's initializers.
        others: The other initializers by name.
    """

    def __init__(self, entries: NamedEntries, model: onnx.ModelProto, stored: Sites) -> None:
        self._model = model
        self._stored = stored
        self.names = names = tensors.names(stored.initializers)
        sites = [site for site in tensors.walk_others(model) if site.is_initializer]
        self.others = {site.name: site for site in sites}
        if entries.names[: len(stored.names)] == stored.names:  # as almost always
            numbers: Iterable[int] = range(len(stored.names))
        else:
            numbers = map(entries.index_of.__getitem__, stored.names)
        self.number_of = dict(zip(map(names.__getitem__, stored.indexes), numbers, strict=True))
        for key, (_, tensor) in stored.others.items():
            other = self.others.get(tensors.text(tensor.name))
            if other is not None and other.tensor is tensor:
                self.number_of[other.name] = entries.index_of[key]
        self._indexes: Sequence[int] = range(len(names))
        self._ambiguous: set[str] = set()
        if len({*names, *self.others}) != len(names) + len(sites):
            self._leave_out_ambiguous([*names, *(site.name for site in sites)])

    def _leave_out_ambiguous(self, names: Sequence[str]) -> None:
        ambiguous = self._ambiguous = {name for name, n in Counter(names).items() if n > 1}
        self._indexes = [i for i, name in enumerate(self.names) if name not in ambiguous]
        self.names = [self.names[i] for i in self._indexes]
        for name in ambiguous:
            self.others.pop(name, None)
            self.number_of.pop(name, None)

    @cached_property
    def _index_of(self) -> dict[str, int]:
        return dict(zip(self.names, self._indexes, strict=True))

    def site(self, name: str) -> Site | None:
        """The tensor of a name and where it stands, or None where there is not just one."""
        index = self._index_of.get(name)
        return self.others.get(name) if index is None else self._stored.initializer(index)

    def why_not(self, name: str) -> str:
        """What is wrong with a name that no initializer has, or several have."""
        if name not in self._ambiguous:
            return f"expected the name of an initializer, found {shown(name)}"
        walked = tensors.walk(self._model)
        sites = [site for site in walked if site.is_initializer and site.name == name]
        keys = {site.path: key for key, site in self._stored.items()}
        owners = ", ".join(
            f"tensor({keys[site.path]!r})" if site.path in keys else f"model.{site}"
            for site in islice(sites, _MAX_SHOWN_OWNERS)
        )
        more = f" or one of {len(sites)} in all" if len(sites) > _MAX_SHOWN_OWNERS else ""
        return (
            f"expected the name of one initializer, found several of {shown(name)}: take "
            f"{owners}{more}"
        )


class Assets(Mapping[str, memoryview]):
    """The assets of an archive by path, as read-only views."""

    def __init__(self, archive: Archive) -> None:
        """Shows the assets of an archive."""
        self._archive = archive

    def __getitem__(self, path: str) -> memoryview:
        name = ASSET_PREFIX + path
        if name not in self._archive.entries:
            raise self._archive._not_found(f"expected the path of an asset, found {shown(path)}")
        return self._archive.read(name)

    def __iter__(self) -> Iterator[str]:
        return (
            name.removeprefix(ASSET_PREFIX)
            for name in self._archive.entries
            if name.startswith(ASSET_PREFIX)
        )

    def __len__(self) -> int:
        return sum(1 for _ in self)


@overload
def open(
    path: str | os.PathLike[str],
    mode: Literal["r"] = "r",
    *,
    timeout: float | None = ...,
    max_model_nbytes: int = ...,
    prefetch: Prefetch | None = ...,
) -> Archive: ...


@overload
def open(
    path: str | os.PathLike[str],
    mode: Literal["r+"],
    *,
    timeout: float | None = ...,
    max_model_nbytes: int = ...,
    prefetch: Prefetch | None = ...,
) -> EditableArchive: ...


def open(
    path: str | os.PathLike[str],
    mode: Literal["r", "r+"] = "r",
    *,
    timeout: float | None = None,
    max_model_nbytes: int = MAX_MODEL_NBYTES,
    prefetch: Prefetch | None = None,
) -> Archive:
    """Opens an archive.

    It takes time and memory in proportion to the number of entries and the size of the model
    without its external tensors; no weight is read, and no local header but the model's. It waits
    while another process edits the file in its place.

    Args:
        path: The archive.
        mode: `"r"` to read it, `"r+"` to edit it, too: see `EditableArchive`. An edit that a crash
            interrupted is then rolled back first.
        timeout: Seconds to wait for others who edit the archive, and with `"r+"` also for those who
            open it; None waits without limit, 0 not at all.
        max_model_nbytes: Size in bytes above which a model is refused before it is read; the
            format's own limit is 2 GiB. A lower one bounds the memory that a file from elsewhere
            can claim.
        prefetch: For those who will read most of the weights: `"willneed"` has the system begin to
            read the whole file in the background (`madvise`), which pays where tensors are taken
            in another order than that of the file; `"populate"` reads and maps all of it before
            `open` returns (`MAP_POPULATE`), so that no view waits for a page afterwards, and the
            memory resident in the process grows by its size at once. None reads what is looked at,
            and what the system reads ahead by itself. A change of the archive ends it.

    Raises:
        ArchiveFormatError: The file is not an archive, or breaks a rule of the specification that
            its end records, directory or model show.
        UnfinishedEditError: An edit of it was interrupted, and `mode` is `"r"`.
        LockedError: Others were at work on the archive until `timeout`.
        ValueError: `mode`, `timeout` or `prefetch` is not allowed.
        OSError: The file cannot be opened or read.
    """
    if prefetch not in (None, *get_args(Prefetch)):
        raise ValueError(f"expected prefetch 'willneed' or 'populate', found {prefetch!r}")
    if mode == "r+":
        from onnxarchive.archive.editing import EditableArchive  # which stands on this module

        archive: Archive = EditableArchive(path, max_model_nbytes, timeout)
    elif mode == "r":
        with recovery.opened(path, rule="FILE-1", timeout=timeout) as file:
            archive = Archive(file, max_model_nbytes)
    else:
        raise ValueError(f"expected mode 'r' or 'r+', found {mode!r}")
    if prefetch is not None:
        try:
            archive.file.prefetch(prefetch)
        except BaseException:
            archive.close()
            raise
    return archive


def load(path: str | os.PathLike[str]) -> onnx.ModelProto:
    """The complete model of an archive, in memory.

    Every tensor holds its bytes again, as `raw_data`. What `save` was given comes back equal, but
    for tensors that had type-specific fields, and for a `data_location` that was set to DEFAULT,
    which means the same as none.

    Args:
        path: The archive.

    Raises:
        ArchiveFormatError: The file is not an archive or breaks a rule.
        ChecksumError: Bytes of a tensor have changed.
        OSError: The file cannot be opened or read.
    """
    with open(path) as archive, naming(path):
        return complete_model(archive)


def complete_model(archive: Archive) -> onnx.ModelProto:
    """The model of an archive that is used for nothing else any more, with every tensor's bytes.

    Raises:
        ChecksumError: Bytes of a tensor have changed.
    """
    for key, site in archive.sites.items():
        tensors.set_raw_data(site.tensor, bytes(read_verified(archive, key)))
    return archive.model


def read_verified(archive: Archive, name: str) -> memoryview:
    """The bytes of an entry as `Archive.read` gives them, once their CRC-32 is found right.

    Raises:
        ChecksumError: They have changed.
    """
    data = archive.read(name)
    check_crc32(archive.entries[name], len(data), checksums.crc32(data), Report())
    return data
