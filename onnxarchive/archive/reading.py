"""An open archive: its entries, its model, and views of its tensors through one map of the file.

Opening reads the end records, the central directory and the model, by position and not through the
map, and refuses whatever they show to be wrong. An entry's local header is compared with the
directory when the entry is first read, the model's therefore on opening. Weights are read by
whoever looks at a view.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import onnx

from onnxarchive.archive import recovery
from onnxarchive.archive.contents import MAX_MODEL_NBYTES, check_crc32, check_data, read_contents
from onnxarchive.archive.snapshot import NamedEntries, Snapshot
from onnxarchive.archive.views import Assets, Tensors
from onnxarchive.buffers import checksums
from onnxarchive.buffers.counting import Progress, ProgressCounter
from onnxarchive.errors import (
    ArchiveError,
    ArchiveFormatError,
    LockedError,
    Report,
    UnfinishedEditError,
    shown,
    with_path,
)
from onnxarchive.model import proto, tensors
from onnxarchive.model.keys import is_model
from onnxarchive.model.tensors import TensorRefs
from onnxarchive.storage import files, threads
from onnxarchive.storage.closing import Closing
from onnxarchive.storage.files import MappedFile
from onnxarchive.zipformat.entries import Records

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Archive(Closing):
    """An open ONNX archive, as `onnxarchive.open` gives it.

    Views and arrays are read-only and lie in the file's map. They stay valid after `close` and
    after the archive object is gone. What this library does to an archive meanwhile does not
    change them, whether its model is replaced in its place or the whole of it is saved anew; but
    another program that rewrites the file changes them, and one that truncates it makes reading
    them end the process with SIGBUS. An archive may be used by several threads at once.
    """

    def __init__(
        self, file: MappedFile, max_model_nbytes: int = MAX_MODEL_NBYTES, model: str = ""
    ) -> None:
        """Takes over `file`, which must have been opened for this archive alone."""
        self._path = file.path
        self._max_model_nbytes = max_model_nbytes
        self._model_id = model
        self._read(file)

    def __setattr__(self, name: str, value: object) -> None:
        # A property without a setter has `__set__`, too.
        attribute = inspect.getattr_static(type(self), name, None)
        is_settable = hasattr(attribute, "__set__") and getattr(attribute, "fset", 1) is not None
        if not (name.startswith("_") or is_settable):
            raise AttributeError(
                f"{self._path}: expected an attribute that can be assigned, found {name!r}; opened "
                "with mode='r+' an archive takes another model, doc_string, domain, producer_name "
                "and producer_version, and items of its metadata"
            )
        super().__setattr__(name, value)

    @property
    def path(self) -> str:
        """The archive's path as it was given."""
        return self._path

    @property
    def max_model_nbytes(self) -> int:
        """Size in bytes above which its model is refused."""
        return self._max_model_nbytes

    def _read(self, file: MappedFile) -> None:
        with with_path(self._path):
            self._found = Snapshot(file, self._model_id, self._max_model_nbytes)

    @property
    def _file(self) -> MappedFile:
        """The open file."""
        return self._found.file

    @property
    def _refs(self) -> TensorRefs:
        """The tensors that are stored outside the model, and where they stand in it, by key."""
        return self._found.refs

    @property
    def entries(self) -> NamedEntries:
        """Every entry by name, in the order of the archive."""
        return self._found.entries

    @property
    def models(self) -> Mapping[str, onnx.ModelProto]:
        """Every model by id; the default one, whose id is `""`, is the first.

        They are the archive's own, as `model` is.
        """
        found = self._found
        found.refs.keep()
        return MappingProxyType(found.models)

    @property
    def model_id(self) -> str:
        """The id of `model`; `""` for the default one."""
        return self._model_id

    @property
    def model(self) -> onnx.ModelProto:
        """The model that was asked for, its large tensors external with their keys as location.

        It is the archive's own, parsed once: copy it before changing it.
        """
        found = self._found
        found.refs.keep()  # before anybody changes the model
        return found.model

    @property
    def metadata(self) -> Mapping[str, str]:
        """The model's metadata (`metadata_props`) by key; of a key that is there twice the last.

        It may be changed where the archive is open with mode `"r+"`.
        """
        return MappingProxyType(proto.metadata(self._found.model))

    @property
    def _records(self) -> Records:
        """The directory record of every entry, in the order of the archive."""
        return self._found.directory.records

    @property
    def alignment(self) -> int:
        """What the data of the model's entry is aligned to, in bytes, as its local header says."""
        return self._found.alignment

    @property
    def tensors(self) -> Tensors:
        """Initializers of the main graph and its subgraphs by name, as read-only arrays.

        See `Tensors` for names that several graphs have.
        """
        return Tensors(self._state)

    @property
    def assets(self) -> Mapping[str, memoryview]:
        """The assets by path (without the prefix `assets/`), as read-only views."""
        return Assets(self._state)

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
        if is_model(name) and name in found.entries:
            return self._read_model(name)
        number = found.entries.index_of.get(name)
        if number is None:
            raise found.not_found(f"expected the name of an entry, found {shown(name)}")
        view, offset, nbytes = found.locate(number)
        return view[offset : offset + nbytes]

    @contextlib.contextmanager
    def _settled(self) -> Iterator[Snapshot]:
        """The state, whose model this object does not overwrite while the block runs."""
        yield self._found

    def _read_model(self, name: str) -> memoryview:
        with self._settled() as found:
            entry = found.entries[name]
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

    @contextlib.contextmanager
    def _unedited(self, found: Snapshot) -> Iterator[None]:
        """Keeps editors out while the block runs, unless the file has got another directory.

        Raises:
            ArchiveError: It has another one, or an edit of it is not finished.
        """
        with contextlib.ExitStack() as resources:
            is_edited = False
            try:
                file = resources.enter_context(files.opened(self._file.absolute_path))
                resources.callback(file.close)
                recovery.require_finished(file)
                records = read_contents(file, Report()).directory.records
                is_same = file.identity == found.file.identity
                is_edited = is_same and records != found.directory.records
            except (LockedError, UnfinishedEditError):
                is_edited = True
            except (ArchiveError, OSError):
                pass  # another file has the path by now, or none
            if is_edited:
                raise self._changed()
            yield

    def tensor_by_key(self, key: str) -> NDArray[Any]:
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
        if key not in found.refs:
            raise found.not_found(f"expected the key of a tensor, found {shown(key)}")
        return found.array(found.entries.index_of[key])

    def _require_current(
        self, path: str | os.PathLike[str], file: MappedFile | None = None
    ) -> None:
        """Refuses to replace this archive if others have edited it since it was opened.

        Args:
            path: What is to be replaced; nothing is refused if it is another file.
            file: The file at `path`, locked: some file systems let nobody read a locked file
                through another descriptor. None for the archive's own.

        Raises:
            ArchiveError: The archive has another directory by now.
            OSError: It is gone, or cannot be read.
        """
        if self._is_at(path):
            with MappedFile(path) if file is None else contextlib.nullcontext(file) as found:
                if not self._found.is_in(found):
                    raise self._edited()

    def _is_at(self, path: str | os.PathLike[str]) -> bool:
        """Whether saving under `path` would replace this archive, or what has its path by now."""
        own = os.path.realpath(self._file.absolute_path)
        return os.path.realpath(path) == own or self._file.is_at(path)

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

        def verify(number: int, counter: ProgressCounter = counter) -> None:
            found.headers.compare(number, Report())
            entry = entries[number]
            check_data(found.file, entry, found.all_refs(entry.name), Report(), counter)

        models = found.model_numbers
        others = range(models.start)
        with with_path(self.path):
            threads.for_each(
                others, entries.sizes[: models.start], verify, threads.require_jobs(jobs)
            )
            try:
                with self._settled() as current:
                    for number in models:
                        if current is found:
                            verify(number)
                        else:  # an edit has overwritten the models, which were right until then
                            counter.add(entries.sizes[number])
            except ArchiveFormatError:
                with self._unedited(found):  # an edit may have been at it meanwhile
                    for number in models:
                        verify(number, ProgressCounter(None, 0))

    def _require_headers(self) -> None:
        """Compares the local header of every entry with its directory record.

        Raises:
            ArchiveFormatError: One does not match.
        """
        with with_path(self.path):
            self._found.headers.require_all()

    def close(self) -> None:
        """Closes the file. Views live on; new ones can no longer be made."""
        self._file.close()

    def __repr__(self) -> str:
        name = type(self).__name__
        return f"<onnxarchive.{name} {self.path!r}, {len(self.entries)} entries>"

    def _state(self) -> Snapshot:
        return self._found


def complete_model(archive: Archive) -> onnx.ModelProto:
    """The model of an archive that is used for nothing else any more, with every tensor's bytes.

    Raises:
        ChecksumError: Bytes of a tensor have changed.
    """
    for key, ref in archive._refs.items():
        tensors.set_raw_data(ref.tensor, bytes(read_verified(archive, key)))
    return archive.model


def read_verified(archive: Archive, name: str) -> memoryview:
    """The bytes of an entry as `Archive.read` gives them, once their CRC-32 is found right.

    Raises:
        ChecksumError: They have changed.
    """
    data = archive.read(name)
    check_crc32(archive.entries[name], len(data), checksums.crc32(data), Report())
    return data
