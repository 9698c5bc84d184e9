"""`open` opens an archive to read it: an `Archive` of entries, models and tensors.

Opening copies end records, directory and models to memory, and raises an error if they break a
rule. It also compares the local headers of the models with the directory. The local header of
another entry is compared when the entry is first read.

Tensors are views of one map of the file, so a weight is read from the disk when its view is used.
If the file is not mapped, tensors are arrays in memory, verified by their CRC-32s.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Unpack, get_args

import onnx

from onnxarchive.errors import ArchiveFormatError, Strict, quoted, with_path
from onnxarchive.files import locking, threads
from onnxarchive.files.data import Closing, File, closing_on_error
from onnxarchive.files.local_file import MappedFile, Prefetch
from onnxarchive.files.progress import Progress, ProgressCounter
from onnxarchive.model import model_proto, tensors
from onnxarchive.model.keys import is_model
from onnxarchive.reading.archive_file import locked_archive_file
from onnxarchive.reading.contents import (
    MAX_MODEL_NBYTES,
    Contents,
    NamedEntries,
    read_contents,
)
from onnxarchive.reading.slices import TensorSlice
from onnxarchive.reading.views import Assets, Models, Tensors, require_model
from onnxarchive.remote.location import Access, Location, Openable
from onnxarchive.sources.recognition import recognised

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from onnxarchive.remote.downloads import Read


# By id(). Other threads may add archives at any time, so its references are listed in one step.
_archives: weakref.WeakValueDictionary[int, Archive] = weakref.WeakValueDictionary()


class Archive(Closing):
    """An open ONNX archive, returned by `onnxarchive.open`.

    Arrays are read-only. They are views of the mapped file or of the given bytes. An array is a
    copy in five cases: its elements have less than 8 bits, the model itself holds the tensor, the
    archive is read from a file object, a remote archive is opened without a cache, or the system
    refuses to map the file. Arrays stay valid after `close`, and after this library edits or
    replaces the archive.

    Data types are little-endian (`<f4`), as in the file. On a big-endian machine, arrays of
    bfloat16 are copies in the machine's byte order.

    If another program overwrites the file, views change. If it truncates the file, reading a view
    ends the process with SIGBUS. Several threads may use an archive at once.

    Methods that read an entry raise ArchiveFormatError if its local header does not match the
    directory, ChecksumError if bytes of a remote archive or file object do not match their CRC-32
    (`get_slice` compares no CRC-32 of a part), OSError if the bytes cannot be read, and ValueError
    if the archive is closed.

    An archive in a file can be pickled, for worker processes. Unpickling opens the same path with
    the same `model_id` and `max_model_nbytes`.

    Attributes:
        entries: Every entry by name, in the order of the archive.
        models: Every model by id, the default one (`""`) first. Copy a model before you change it.
        tensors: Initializers of the main graph and its subgraphs by name, as read-only arrays. If
            several initializers have the same name, looking it up raises an error that says where
            they are.
        assets: The assets by path (without the prefix `assets/`), as copies verified by their
            CRC-32.
        path: The path as it was given; a URL without credentials and query. For bytes and file
            objects, a name for messages.
        model_id: The id of `model`; `""` for the default one.
        alignment: Alignment in bytes, from the default model's local header. Other entries may have
            another alignment.
        max_model_nbytes: Limit in bytes on all models together, as given to `open`.

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
    path: str
    model_id: str
    alignment: int
    max_model_nbytes: int

    def __init__(self, contents: Contents, model: str | None = None) -> None:
        """Makes an archive of the contents of its file; None chooses the default model."""
        model = "" if model is None else model
        require_model(contents.models, model)
        self._contents = contents
        self.path = contents.path
        self.max_model_nbytes = contents.max_model_nbytes
        self.model_id = model
        self.alignment = contents.alignment
        self.entries = contents.entries
        self.models = Models(contents)
        self.tensors = Tensors(contents, model)
        self.assets = Assets(contents)
        _archives[id(self)] = self

    @property
    def model(self) -> onnx.ModelProto:
        """The model chosen in `open`; its large tensors are external, with their keys as locations.

        It is parsed once and not copied: copy it before you change it.
        """
        return self.models[self.model_id]

    @property
    def metadata(self) -> Mapping[str, str]:
        """The model's metadata (`metadata_props`) by key; a repeated key has its last value.

        It is read-only; `onnxarchive.edit` changes the metadata.
        """
        return MappingProxyType(model_proto.metadata(self._contents.models[self.model_id].model))

    def read(self, name: str) -> memoryview:
        """The bytes of an entry, read-only: a view of a mapped file, or a copy.

        The bytes of a tensor are those of `raw_data`: little-endian, row-major, with types of less
        than 8 bits packed. A model is always copied, since an edit may overwrite the model in the
        file.

        Args:
            name: Name of the entry, as in `entries`.

        Returns:
            The bytes. A view stays valid after `close`.

        Raises:
            TensorNotFoundError: There is no such entry.
            ArchiveError: The entry is a model that was edited after the archive was opened.

        Example:
            with onnxarchive.open("model.onnxa") as archive:
                data = archive.read("layer_0_weight")
        """
        if name not in self.entries:
            message = f"there is no entry {quoted(name)}"
            raise self._contents.not_found(message, name, self.entries)
        return self._contents.model(name) if is_model(name) else self._contents.view(name)

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

        Example:
            with onnxarchive.open("model.onnxa") as archive:
                weight = archive.tensor_by_key("layer_0_weight")
        """
        if key not in self.tensors.refs:
            message = f"no tensor of the model has the key {quoted(key)}"
            raise self._contents.not_found(message, key, self.tensors.refs)
        return self.tensors.array(key, self._contents.view(key))

    def get_slice(self, name: str) -> TensorSlice:
        """The initializer of this name, to read a part of it by indexing.

        Shape, type and size are known without reading: `archive.get_slice(name)[:4]` reads only
        four rows, of a remote archive by a request for their range. A part is not compared with the
        CRC-32.

        Args:
            name: Name of the initializer, as in `tensors`.

        Returns:
            The tensor with `shape`, `dtype`, `nbytes` and `[...]`.

        Raises:
            TensorNotFoundError: No initializer has this name, or several have it.
            ArchiveFormatError: The model itself holds the data, which does not fit type and shape.

        Example:
            with onnxarchive.open("model.onnxa") as archive:
                rows = archive.get_slice("layer.0/weight")[:4]
        """
        return TensorSlice(self._contents, self.tensors, name)

    def fetch(self, names: Iterable[str] | None = None) -> dict[str, NDArray[Any]]:
        """Reads several initializers at once, by parallel requests if the archive is remote.

        Args:
            names: Names of initializers; None for all of `tensors`.

        Returns:
            The arrays by name, views or copies as in `tensors`.

        Raises:
            TensorNotFoundError: No initializer has one of these names, or several have it.
            TypeError: `names` is a string.

        Example:
            with onnxarchive.open("model.onnxa") as archive:
                weights = archive.fetch(["layer.0/weight"])
        """
        if isinstance(names, str):
            raise TypeError(f"expected a list of names, found a string; write [{names!r}]")
        names = list(self.tensors if names is None else dict.fromkeys(names))
        key_of = {name: self.tensors.key(name) for name in names}
        keys = sorted({*filter(None, key_of.values())}, key=self.entries.index_of.__getitem__)
        views = zip(keys, self._contents.views(keys), strict=True)
        arrays = {key: self.tensors.array(key, view) for key, view in views}
        return {
            name: self.tensors[name] if key is None else arrays[key] for name, key in key_of.items()
        }

    def verify(self, progress: Progress | None = None, *, jobs: int | None = None) -> None:
        """Reads every entry, and checks the rules that opening does not check.

        Local headers, CRC-32s and SHA-1 `checksum`s must match, unused bits must be zero, and
        booleans must be 0 or 1. An archive that opens and passes is valid.

        Args:
            progress: As in `onnxarchive.save`.
            jobs: Number of threads; None for one per core. If there are several faults, the first
                in the file is raised.

        Raises:
            ChecksumError: The bytes of an entry do not match a checksum (ZIP-15, DATA-6).
            ArchiveFormatError: A local header does not match the directory, or a tensor cannot have
                these bytes (TENSOR-4, TENSOR-5).
            ArchiveError: The archive was edited after it was opened.

        Example:
            with onnxarchive.open("model.onnxa") as archive:
                archive.verify()
        """
        contents = self._contents
        entries, first_model = contents.directory.entries, contents.first_model
        counter = ProgressCounter(progress, sum(entry.nbytes for entry in entries))
        jobs = threads.require_jobs(jobs) if contents.file.is_mapped else 1

        def verify(number: int, counter: ProgressCounter = counter) -> None:
            contents.check_header(number, contents.strict)
            contents.check_data(number, contents.strict, counter)

        sizes = [entry.nbytes for entry in entries[:first_model]]
        threads.for_each(range(first_model), sizes, verify, jobs)
        models = range(first_model, len(entries))
        try:
            for number in models:
                verify(number)
        except ArchiveFormatError:
            with contents.unedited():  # an edit may have overwritten the models meanwhile
                for number in models:
                    verify(number, ProgressCounter(None, 0))

    @property
    def closed(self) -> bool:
        """True after `close`, as of Python's files."""
        return self._contents.file.is_closed

    def close(self) -> None:
        """Closes the file. Views stay valid; no new ones can be made.

        Example:
            archive = onnxarchive.open("model.onnxa")
            archive.close()
        """
        self._contents.file.close()

    def __repr__(self) -> str:
        return f"<onnxarchive.Archive {self.path!r}, {len(self.entries)} entries>"

    def __reduce__(self) -> tuple[Callable[[str], Archive], tuple[str]]:
        """Pickles the path, `max_model_nbytes` and the model's id; unpickling opens the archive.

        Raises:
            TypeError: The archive is not a local file.
            ValueError: The archive is closed.
        """
        file = self._contents.file
        if not isinstance(file, MappedFile):
            raise TypeError(
                f"{self.path}: an archive in memory, in a file object or at a URL cannot be "
                "pickled; open it in the process that uses it"
            )
        file.fileno()  # raises if the file is closed
        reopen = partial(open, model=self.model_id, max_model_nbytes=self.max_model_nbytes)
        return reopen, (file.absolute_path,)

    def _repr_html_(self) -> str:
        from html import escape  # only notebooks need it

        parts = [f"<p>{escape(repr(self))}</p>", self.tensors._repr_html_()]
        if self.assets:
            parts.append(self.assets._repr_html_())
        return "\n".join(parts)


def archive_of_model(model: onnx.ModelProto) -> Archive | None:
    """The archive that has this very object as a model, also in an edit; None without one."""
    for reference in _archives.valuerefs():
        archive = reference()
        if archive is not None and contents_of(archive).has_model(model):
            return archive
    return None


def contents_of(archive: Archive) -> Contents:
    """The contents of an archive's file, for the modules of this library."""
    return archive._contents  # noqa: SLF001  users of `Archive` have no use for it


def read_archive(
    file: File, model: str | None = None, max_model_nbytes: int = MAX_MODEL_NBYTES
) -> Archive:
    """Reads an archive, which closes the file when it is closed; for errors see `open`."""
    return Archive(read_contents(file, Strict(), max_model_nbytes), model)


def with_model(archive: Archive, model: str) -> Archive:
    """The same open archive with another model chosen; nothing is read again.

    Both share the file, so closing one closes the other.

    Raises:
        ModelNotFoundError: There is no model of this id.
    """
    with with_path(archive.path):
        return Archive(contents_of(archive), model)


def fill_in_place(archive: Archive) -> onnx.ModelProto:
    """Puts the bytes of all tensors into the archive's own model, which makes the archive unusable.

    Raises:
        ChecksumError: The bytes of a tensor do not match their CRC-32.
    """
    refs = archive.tensors.refs
    for ref, data in zip(refs.values(), contents_of(archive).verified([*refs]), strict=True):
        tensors.set_raw_data(ref.tensor, bytes(data))
    return archive.model


def open(
    source: Openable,
    mode: Literal["r"] = "r",
    *,
    model: str | None = None,
    timeout: float | None = locking.TIMEOUT,
    max_model_nbytes: int = MAX_MODEL_NBYTES,
    prefetch: Prefetch | None = None,
    **access: Unpack[Access],
) -> Archive:
    """Opens an archive without reading its weights.

    Time and memory grow with the number of entries and with the size of the models, not counting
    external tensors. If another process is editing the file, `open` waits for at most `timeout`,
    and then reads the file without a lock: a half-written edit is detected and raises LockedError.

    Opening a remote archive takes one to three requests (`az`: one more; fsspec: two more). Reading
    a tensor takes one request for each 8 MiB; `Archive.fetch` reads many tensors in parallel. A
    remote tensor is an array in memory, verified by its CRC-32. If the object changes between
    requests (by its ETag, or by its size and modification time), ObjectChangedError is raised.

    Args:
        source: The archive: a path, its bytes, a seekable binary file object, or a URL. obstore
            reads `http`, `https`, `s3`, `gs` and `az`; fsspec reads other schemes (`hf://`, ...).
            All functions take a URL `file:///p` for a local path, and refuse one with another host.
            The archive uses a file object from one thread at a time; `close` leaves the file object
            open.
        mode: Only `"r"`. `onnxarchive.edit` changes an archive; `save` and `Writer` make one.
        model: Id of the model for `Archive.model` and `Archive.tensors`, such as `"decoder"`; None
            for the default one.
        timeout: Seconds to wait while another process edits the file, or on Windows opens it. None
            waits without limit, 0 not at all.
        max_model_nbytes: Limit in bytes on the size of all models together, not counting external
            tensors. It bounds the memory that an untrusted file can take. The format allows 2 GiB
            for each model.
        prefetch: Reads a local file ahead, for programs that use most weights. `"willneed"`: the
            system reads the file in the background (`madvise`; no effect on Windows), which helps
            if tensors are not used in file order. `"populate"`: `open` reads and maps the whole
            file before it returns (`MAP_POPULATE`), so the file counts as resident memory. None:
            pages are read when they are used. An edit of the archive ends the prefetch.
        access: Options for remote archives:
            `storage_options`: Options for obstore or fsspec as a mapping, as in pandas:
            credentials, region, `timeout` in seconds, ... Two more options are this library's own.
            Reading fails after `stall_timeout` seconds (30 by default) without a byte; an upload
            fails if no part arrives within `stall_timeout` plus eight times the usual time of the
            parts under way. `allow_redirects` (False by default) allows a web address with a user,
            a query or headers to redirect to another server; otherwise such a redirect is refused.
            `cache`: A directory for copies of remote archives, or True for the user's cache
            directory. `open`, `load`, `session` and `link` download the whole archive once, verify
            it, and map the copy, which processes share. An interrupted download is resumed, and
            opening the copy takes one request. Other functions use a copy that exists, but download
            none. An object with neither a strong ETag nor a version is not cached. Objects in a
            `store` of S3, Google or Azure are not cached, since a store does not say which server
            it uses: pass a URL and `storage_options` instead. With fsspec, only s3fs, gcsfs, adlfs
            and huggingface_hub can be cached: others do not say which server they use.
            `cache_progress`: Called with the bytes downloaded into the cache and the bytes in all;
            True shows a bar.
            `sha256`: The SHA-256 of the whole archive, 64 hexadecimal digits, as `sha256sum` prints
            it; needs `cache`. A download is compared before it enters the cache; an existing copy
            once, or each time if files in the cache cannot be locked. Refused for local files, and
            by functions that read ranges without a copy.
            `store`: An obstore store; `source` is then a path in it.

    Returns:
        The archive.

    Raises:
        ArchiveFormatError: The file is not an archive: its end records, its directory, its models
            or the local headers of its models break a rule of the specification.
        UnfinishedEditError: An edit of the archive was interrupted.
        ModelNotFoundError: There is no model of this id.
        LockedError: An edit in progress has made the archive unreadable, or this thread is editing
            it.
        ObjectChangedError: A remote archive changed while it was opened.
        ChecksumError: A download does not match its CRC-32s, or the archive does not match
            `sha256`.
        ValueError: `mode`, `timeout`, `prefetch` or `sha256` is not allowed, or a file object is
            closed, not seekable or not binary.
        TypeError: `source` is of another type, or a keyword is unknown.
        ImportError: The URL needs obstore or fsspec, which is not installed.
        OSError: The archive cannot be opened or read.

    Example:
        with onnxarchive.open("model.onnxa") as archive:
            weight = archive.tensors["layer.0/weight"]
    """
    if prefetch not in (None, *get_args(Prefetch)):
        raise ValueError(f"expected prefetch 'willneed' or 'populate', found {prefetch!r}")
    if mode != "r":
        raise ValueError(
            f"expected mode 'r', found {mode!r}; onnxarchive.edit changes an archive, save and "
            "Writer make one"
        )
    read = partial(open_recognised, max_model_nbytes=max_model_nbytes)
    location = Location.of(source, **access)
    archive = open_location(
        location, model, max_model_nbytes=max_model_nbytes, timeout=timeout, read=read
    )
    file = contents_of(archive).file
    if prefetch is not None and isinstance(file, MappedFile):
        with closing_on_error(archive):
            file.prefetch(prefetch)
    return archive


def open_location(
    location: Location,
    model: str | None = None,
    *,
    max_model_nbytes: int = MAX_MODEL_NBYTES,
    timeout: float | None = locking.TIMEOUT,
    read: Read | None = None,
) -> Archive:
    """Opens an archive; see `open`. Without `read`, nothing is downloaded into the cache."""
    with locked_archive_file(location, timeout=timeout, read=read) as file:
        return read_archive(file, model, max_model_nbytes)


def load(
    source: Openable,
    *,
    model: str | None = None,
    max_model_nbytes: int = MAX_MODEL_NBYTES,
    **access: Unpack[Access],
) -> onnx.ModelProto:
    """Loads a model of an archive into memory, with all weights.

    The model equals the saved one with one exception: external tensors have their elements in
    `raw_data`, and no `data_location`.

    The model does not remember its archive. `save(load(path), path)` loses the alignment, and is
    refused if the archive has assets or other models. To keep them, assign the model in `edit`:
    `edit.model = model`.

    Args:
        source: The archive, as in `open`.
        model: Id of the model, such as `"decoder"`; None for the default one.
        max_model_nbytes: As in `open`.
        access: As in `open`.

    Returns:
        The model.

    Raises:
        ArchiveFormatError: The file is not an archive or breaks a rule.
        ModelNotFoundError: There is no model of this id.
        ChecksumError: The bytes of a tensor do not match their CRC-32.
        OSError: The file cannot be opened or read.

    Example:
        model = onnxarchive.load("model.onnxa")
    """
    archive = open(source, model=model, max_model_nbytes=max_model_nbytes, **access)
    with archive, with_path(archive.path):
        return fill_in_place(archive)


def open_recognised(file: File, max_model_nbytes: int = MAX_MODEL_NBYTES) -> Archive:
    """Opens a file as an archive; an error says what else the file is."""
    with recognised(file), with_path(file.path):
        return read_archive(file, max_model_nbytes=max_model_nbytes)
