"""`Archive`: entries, model and tensors of an open archive.

Opening copies end records, directory and models to memory, and raises an error if they break a
rule. Opening also compares the local headers of the models with the directory; the local header of
another entry is compared when the entry is first read. Tensors are views of one map of the file, so
a weight is read from the disk when its view is used. If the file is not mapped, tensors are arrays
in memory, verified by their CRC-32s.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import onnx

from onnxarchive.errors import (
    ArchiveError,
    ArchiveFormatError,
    LockedError,
    Report,
    UnfinishedEditError,
    UnsupportedFeatureError,
    shown,
    with_path,
)
from onnxarchive.files import checksums, local_file, threads
from onnxarchive.files.local_file import MappedFile
from onnxarchive.files.progress import Progress, ProgressCounter
from onnxarchive.files.random_access import Closing, RandomAccessFile
from onnxarchive.model import proto, tensors
from onnxarchive.model.keys import is_key, is_model
from onnxarchive.model.tensors import TensorRefs
from onnxarchive.reading.contents import (
    MAX_MODEL_NBYTES,
    NamedEntries,
    check_crc32,
    check_data,
    check_header,
    read_contents,
)
from onnxarchive.reading.locked_file import opened_archive
from onnxarchive.reading.views import Assets, Models, Tensors, require_model
from onnxarchive.sources.recognition import recognised

if TYPE_CHECKING:
    from numpy.typing import NDArray


# By id(). Its references are listed in one step, while a set may grow under those who look through.
_archives: weakref.WeakValueDictionary[int, Archive] = weakref.WeakValueDictionary()


class Archive(Closing):
    """An open ONNX archive, returned by `onnxarchive.open`.

    Arrays are read-only. An array is a copy if its elements have less than 8 bits, if the model
    itself holds the tensor, if the archive is read from a file object, if a remote archive is
    opened without a cache, or if the system refuses to map the file. Every other array is a view of
    the mapped file or of the given bytes. Arrays stay valid after `close`, and after this library
    edits or replaces the archive. If another program overwrites the file, views change; if it
    truncates the file, reading a view ends the process with SIGBUS. Several threads may use an
    archive at once.

    An archive in a file can be pickled, for worker processes. Unpickling opens the same path with
    the same `model_id` and `max_model_nbytes`.

    Attributes:
        entries: Every entry by name, in the order of the archive.
        models: Every model by id, the default one (`""`) first. Copy a model before you change it.
        tensors: Initializers of the main graph and its subgraphs by name, as read-only arrays. If
            several initializers have the same name, looking it up raises an error that says where
            they are found.
        assets: The assets by path (without the prefix `assets/`), as copies verified by their
            CRC-32.

    Example:
        with onnxarchive.open("model.onnxa") as archive:
            weight = archive.tensors["layer.0/weight"]
            print(weight.shape, archive.entries["layer_0_weight"].data_offset)
    """

    # Plain attributes, since IPython completes names in `archive.tensors["` without evaluating
    # properties.
    entries: NamedEntries
    models: Models
    tensors: Tensors
    assets: Assets

    def __init__(
        self, file: RandomAccessFile, max_model_nbytes: int = MAX_MODEL_NBYTES, model: str = ""
    ) -> None:
        """Reads the archive in `file`, and takes over the file."""
        self._path = file.path
        self._max_model_nbytes = max_model_nbytes
        self._model_id = model
        with with_path(self._path):
            contents = read_contents(file, Report(), max_model_nbytes)
            require_model(contents.models, model)
            for number in range(contents.first_model, len(contents.entries)):
                alignment = check_header(file, contents.directory, number, Report())
        assert alignment is not None  # else `Report` has raised an error
        self._alignment = alignment
        self.contents = contents  # for other modules of this library
        self.entries = contents.entries
        self.models = Models(contents)
        self.tensors = Tensors(contents, model)
        self.assets = Assets(contents)
        _archives[id(self)] = self

    @property
    def path(self) -> str:
        """The path as it was given; a URL without credentials and query.

        For bytes and file objects, a name for messages.
        """
        return self._path

    @property
    def max_model_nbytes(self) -> int:
        """Limit in bytes on all models together, as given to `open`."""
        return self._max_model_nbytes

    @property
    def _file(self) -> RandomAccessFile:
        """The file from which the archive is read."""
        return self.contents.file

    @property
    def _local_file(self) -> MappedFile:
        """The open local file with the archive's bytes: the archive itself, or its cached copy.

        Raises:
            UnsupportedFeatureError: The archive is neither in a local file nor in a cache.
        """
        if isinstance(self._file, MappedFile):
            return self._file
        raise UnsupportedFeatureError(
            "expected a local file, found an archive in memory, in a file object or at a URL; "
            "'onnxarchive download' copies a remote archive to a file",
            path=self.path,
        )

    @property
    def _refs(self) -> TensorRefs:
        """The tensors that are stored outside the model, by key."""
        return self._refs_of(self._model_id)

    def _refs_of(self, model: str) -> TensorRefs:
        """The tensors of a model that are stored outside it, by key."""
        return self.contents.models[model].refs

    def _model_of(self, model: str) -> onnx.ModelProto:
        """The model with this id. It is shared: the caller must not change it."""
        return self.contents.models[model].model

    @property
    def _keys(self) -> list[str]:
        """The names of all entries that hold tensors."""
        return [name for name in self.entries.names if is_key(name)]

    @property
    def model_id(self) -> str:
        """The id of `model`; `""` for the default one."""
        return self._model_id

    @property
    def model(self) -> onnx.ModelProto:
        """The model chosen in `open`; its large tensors are external, with their keys as location.

        It is parsed once and not copied: copy it before you change it.
        """
        return self.contents.given_model(self._model_id)

    @property
    def metadata(self) -> Mapping[str, str]:
        """The model's metadata (`metadata_props`) by key; a repeated key has its last value.

        `onnxarchive.edit` changes the metadata.
        """
        return MappingProxyType(proto.metadata(self._model_of(self._model_id)))

    @property
    def _records(self) -> Sequence[bytes]:
        """The packed directory record of every entry, in the order of the archive."""
        return self.contents.directory.records

    @property
    def alignment(self) -> int:
        """Alignment in bytes, from the default model's local header; other entries may differ."""
        return self._alignment

    def read(self, name: str) -> memoryview:
        """The bytes of an entry, read-only: a view of a mapped file, or a copy.

        A tensor has the bytes of `raw_data`: little-endian, row-major, types of less than 8 bits
        packed. A model is always copied, since an edit may overwrite the model in the file.

        Args:
            name: Name of the entry, as in `entries`.

        Returns:
            The bytes. A view stays valid after `close`.

        Raises:
            TensorNotFoundError: There is no such entry.
            ArchiveFormatError: The entry's local header does not match the directory.
            ChecksumError: The bytes of a remote archive or file object do not match their CRC-32.
            ArchiveError: The entry is a model that was edited after the archive was opened.
            ValueError: The archive is closed.

        Example:
            with onnxarchive.open("model.onnxa") as archive:
                data = archive.read("layer_0_weight")
        """
        if is_model(name) and name in self.entries:
            return self._read_model(name)
        number = self.entries.index_of.get(name)
        if number is None:
            raise self.contents.not_found(f"expected the name of an entry, found {shown(name)}")
        return self.contents.view(number)

    def _read_model(self, name: str) -> memoryview:
        entry = self.entries[name]
        data = self._file.read(entry.data_offset, entry.nbytes)
        if (len(data), checksums.crc32(data)) == (entry.nbytes, entry.crc32):
            return memoryview(data)
        raise self._changed()

    def _changed(self) -> ArchiveError:
        return ArchiveError(
            "the archive has been changed since it was opened; open it again", path=self.path
        )

    @contextlib.contextmanager
    def _unedited(self) -> Iterator[None]:
        """Locks out editors during the block, unless the path now leads to another file or to none.

        Raises:
            ArchiveError: The directory has changed since the archive was opened, or an edit is
                unfinished.
        """
        if not isinstance(self._file, MappedFile):
            yield
            return
        with contextlib.ExitStack() as resources:
            from onnxarchive.reading import unfinished  # not needed to open a complete archive

            is_edited = False
            try:
                file = resources.enter_context(local_file.opened(self._file.absolute_path))
                resources.callback(file.close)
                if isinstance(file.lock_failure, LockedError):
                    raise file.lock_failure
                unfinished.require_finished(file)
                contents = read_contents(file, Report(), self._max_model_nbytes)
                records = contents.directory.records
                is_same = file.identity == self._file.identity
                is_edited = is_same and records != self._records
            except (LockedError, UnfinishedEditError):
                is_edited = True
            except (ArchiveError, OSError):
                pass  # the file is damaged, or the path now leads to another file or to none
            if is_edited:
                raise self._changed()
            yield

    def tensor_by_key(self, key: str) -> NDArray[Any]:
        """The tensor with this key, as a read-only array.

        Unlike `tensors`, it also finds tensors of attributes, functions and training_info, and
        initializers whose name is not unique.

        Args:
            key: Name of the tensor's entry, as in `entries`.

        Returns:
            A view if the file is mapped. Types of less than 8 bits (int4, uint2, float4e2m1, ...)
            are unpacked to a copy with one byte per element; `read(key)` gives the packed bytes.

        Raises:
            TensorNotFoundError: No tensor of the model has this key.
            ArchiveFormatError: The entry's local header does not match the directory.
            ChecksumError: The bytes of a remote archive or file object do not match their CRC-32.
            ValueError: The archive is closed.

        Example:
            with onnxarchive.open("model.onnxa") as archive:
                weight = archive.tensor_by_key("layer_0_weight")
        """
        if key not in self._refs:
            raise self.contents.not_found(
                f"expected the key of a tensor of the model, found {shown(key)}"
            )
        number = self.entries.index_of[key]
        return self.tensors._array(number, self.contents.view(number))

    def fetch(self, names: Iterable[str] | None = None) -> dict[str, NDArray[Any]]:
        """Reads several initializers at once, by parallel requests if the archive is remote.

        Args:
            names: Names of initializers; None for all of `tensors`.

        Returns:
            The arrays by name, each as `tensors` gives it.

        Raises:
            TensorNotFoundError: A name belongs to no initializer, or to several.
            ArchiveFormatError: A local header does not match the directory.
            ChecksumError: Remote bytes do not match their CRC-32.
            ValueError: The archive is closed.
            OSError: The data cannot be read.

        Example:
            with onnxarchive.open("model.onnxa") as archive:
                weights = archive.fetch(["layer.0/weight"])
        """
        names = list(self.tensors if names is None else dict.fromkeys(names))
        number_of = {name: self.tensors._number(name) for name in names}
        stored = sorted({number for number in number_of.values() if number is not None})
        views = zip(stored, self.contents.views(stored), strict=True)
        arrays = {number: self.tensors._array(number, view) for number, view in views}
        return {
            name: self.tensors[name] if number is None else arrays[number]
            for name, number in number_of.items()
        }

    def _read_all(self, names: Iterable[str]) -> Iterator[memoryview]:
        """The bytes of tensors and assets as `read` gives them, fetched together."""
        return self.contents.views([self.entries.index_of[name] for name in names])

    def _require_current(
        self, path: str | os.PathLike[str], file: MappedFile | None = None
    ) -> None:
        """Refuses to replace the archive if another object or process has edited it since `open`.

        Args:
            path: The file to replace; a path other than the archive's is never refused.
            file: The locked file at `path`, or None to open the file. On some file systems only the
                descriptor that holds the lock can read the file.

        Raises:
            ArchiveError: The directory of the archive has changed.
            OSError: The archive is gone, or cannot be read.
        """
        if self.contents.is_at(path):
            with MappedFile(path) if file is None else contextlib.nullcontext(file) as current:
                # A file of the same size with the same directory has the same content.
                contents, packed = self.contents, b"".join(self._records)
                last = contents.directory.entries[-1]
                offset = last.data_offset + last.nbytes
                if current.size != contents.size or current.read(offset, len(packed)) != packed:
                    raise self._changed()

    def verify(self, progress: Progress | None = None, *, jobs: int | None = None) -> None:
        """Reads every entry, and checks the rules that opening does not check.

        Local headers, CRC-32s and SHA-1 `checksum`s must match, unused bits must be zero, and
        booleans 0 or 1. An archive that opens and passes is valid.

        Args:
            progress: Called with the bytes done and the bytes in all, every few MiB or more often,
                by one thread at a time; True shows a bar.
            jobs: Number of threads; None for one per core. Of several faults the first in the file
                is raised.

        Raises:
            ChecksumError: The bytes of an entry do not match a checksum (ZIP-15, DATA-6).
            ArchiveFormatError: A local header does not match the directory, or a tensor cannot
                have these bytes (TENSOR-4, TENSOR-5).
            ArchiveError: The archive was edited after it was opened.

        Example:
            with onnxarchive.open("model.onnxa") as archive:
                archive.verify()
        """
        contents = self.contents
        entries, first_model = contents.directory.entries, contents.first_model
        counter = ProgressCounter(progress, sum(entry.nbytes for entry in entries))
        jobs = threads.require_jobs(jobs)
        file = contents.file
        if not file.is_mapped:
            jobs = 1

        def verify(number: int, counter: ProgressCounter = counter) -> None:
            check_header(file, contents.directory, number, Report())
            entry = entries[number]
            check_data(file, entry, contents.refs(entry.name), Report(), counter)

        models = range(first_model, len(entries))
        with with_path(self.path):
            sizes = [entry.nbytes for entry in entries[:first_model]]
            threads.for_each(range(first_model), sizes, verify, jobs)
            try:
                for number in models:
                    verify(number)
            except ArchiveFormatError:
                with self._unedited():  # an edit may have overwritten the models meanwhile
                    for number in models:
                        verify(number, ProgressCounter(None, 0))

    def _require_header(self, name: str) -> None:
        """Compares the local header of an entry with its directory record.

        Raises:
            ArchiveFormatError: They do not match.
        """
        self.contents.require_header(self.entries.index_of[name])

    def _require_headers(self, names: Iterable[str]) -> None:
        """As `_require_header` for many entries; does nothing for a remote archive or file object.

        Their local headers are compared when their data is read.
        """
        if self._file.is_mapped:
            for name in names:
                self._require_header(name)

    def close(self) -> None:
        """Closes the file. Views stay valid; no new ones can be made.

        Example:
            archive = onnxarchive.open("model.onnxa")
            archive.close()
        """
        self._file.close()

    def __repr__(self) -> str:
        name = type(self).__name__
        return f"<onnxarchive.{name} {self.path!r}, {len(self.entries)} entries>"

    def __reduce__(self) -> tuple[Callable[..., Archive], tuple[str, int, str]]:
        """Pickles the path, `max_model_nbytes` and the model's id; unpickling opens the archive.

        Raises:
            TypeError: The archive is not a local file.
            ValueError: The archive is closed.
        """
        file = self._file
        if not isinstance(file, MappedFile):
            raise TypeError(
                f"{self.path}: expected a local file to pickle, found an archive in memory, in a "
                "file object or at a URL; open it in the process that uses it"
            )
        file.fileno()  # raises if the file is closed
        return type(self)._reopened, (file.absolute_path, self.max_model_nbytes, self.model_id)

    @classmethod
    def _reopened(cls, path: str, max_model_nbytes: int, model: str) -> Archive:
        """Opens an archive that was pickled."""
        with opened_archive(path, rule="FILE-1") as file:
            return cls(file, max_model_nbytes, model)

    def _repr_html_(self) -> str:
        from html import escape  # only notebooks need it

        parts = [f"<p>{escape(repr(self))}</p>", self.tensors._repr_html_()]
        return "\n".join(parts + [self.assets._repr_html_()] * bool(self.assets))


def open_recognised(file: RandomAccessFile, max_model_nbytes: int = MAX_MODEL_NBYTES) -> Archive:
    """Opens a file as an archive; an error says what else the file is."""
    with recognised(file), with_path(file.path):
        return Archive(file, max_model_nbytes)


def owner_of(model: onnx.ModelProto) -> Archive | None:
    """The archive that has this very object as a model, also in an edit, while it exists."""
    for reference in _archives.valuerefs():
        archive = reference()
        if archive is not None and archive.contents.has_model(model):
            return archive
    return None


def complete_model(archive: Archive) -> onnx.ModelProto:
    """Puts the bytes of all tensors into the archive's own model; the archive is then unusable.

    Raises:
        ChecksumError: The bytes of a tensor do not match their CRC-32.
    """
    refs = archive._refs
    for ref, data in zip(refs.values(), read_verified(archive, list(refs)), strict=True):
        tensors.set_raw_data(ref.tensor, bytes(data))
    return archive.model


def read_verified(archive: Archive, names: Sequence[str]) -> Iterator[memoryview]:
    """The bytes of entries as `Archive.read` gives them, fetched together and verified.

    Raises:
        ChecksumError: The bytes have changed.
    """
    for name, data in zip(names, archive._read_all(names), strict=True):
        if archive._file.is_mapped:  # if not, the bytes were verified when they were read
            check_crc32(archive.entries[name], len(data), checksums.crc32(data), Report())
        yield data


def asset_pieces(archive: Archive, path: str) -> Iterator[memoryview]:
    """Yields the bytes of an asset: in pieces if the file is mapped, else as one copy.

    Raises:
        ChecksumError: The bytes do not match their CRC-32; raised before the first or after the
            last piece.
        TensorNotFoundError: There is no such asset.
    """
    return archive.assets._pieces(path)


def verified_pieces(archive: Archive, name: str) -> Iterator[memoryview]:
    """Yields an entry's bytes; compares the local header before and the CRC-32 afterwards.

    Raises:
        ArchiveFormatError: The local header does not match.
        ChecksumError: The bytes have changed; raised after the last piece.
    """
    return archive.contents.pieces(archive.entries.index_of[name])


class StreamedEntry:
    """Data of an entry, in pieces; each pass over them compares the local header and the CRC-32.

    Attributes:
        nbytes: Its size in bytes.
        crc32: Its CRC-32.
        place: Identity of the file, and the offset of the data in the file.
    """

    def __init__(self, archive: Archive, name: str) -> None:
        """Finds the entry with this name."""
        entry = archive.entries[name]
        self.nbytes, self.crc32 = entry.nbytes, entry.crc32
        self.place = archive._file.identity, entry.data_offset
        self._archive, self._name = archive, name

    def __iter__(self) -> Iterator[memoryview]:
        return verified_pieces(self._archive, self._name)
