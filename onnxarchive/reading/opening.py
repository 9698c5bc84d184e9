"""`open` opens an archive to read it; `load` gives its complete model."""

from __future__ import annotations

from functools import partial
from typing import Literal, Unpack, get_args

import onnx

from onnxarchive.errors import with_path
from onnxarchive.files import locking
from onnxarchive.files.local_file import MappedFile, Prefetch
from onnxarchive.reading.archive import Archive, complete_model, open_recognised
from onnxarchive.reading.contents import MAX_MODEL_NBYTES
from onnxarchive.reading.locked_file import opened
from onnxarchive.remote.location import Access, Location, Openable


def open(
    source: Openable,
    mode: Literal["r"] = "r",
    *,
    model: str = "",
    timeout: float | None = locking.TIMEOUT,
    max_model_nbytes: int = MAX_MODEL_NBYTES,
    prefetch: Prefetch | None = None,
    **access: Unpack[Access],
) -> Archive:
    """Opens an archive without reading its weights.

    Time and memory grow with the number of entries and with the size of the models, not counting
    external tensors. While another process edits the file, `open` waits for at most `timeout`, and
    then reads the file without a lock; what it reads of a running edit is refused.

    Opening a remote archive takes one to three requests (`az`: one more; fsspec: two more). Reading
    a tensor takes one for each 8 MiB; `Archive.fetch` reads many tensors at once. A remote tensor
    is checked against its CRC-32, and is an array in memory. If the object changes between requests
    (ETag, or size and modification time), `ObjectChangedError` is raised. With `cache`, the whole
    archive is downloaded first, unless a verified copy is there.

    Args:
        source: The archive: a path, its bytes, a seekable binary file object, or a URL. obstore
            reads `http`, `https`, `s3`, `gs` and `az`; fsspec reads other schemes (`hf://`, ...).
            The archive uses a file object from one thread at a time; `close` leaves the file object
            open.
        mode: `"r"`. `onnxarchive.edit` changes an archive, `save` and `Writer` make one.
        model: Id of the model for `Archive.model` and `Archive.tensors`, such as `"decoder"`; `""`
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
        access: For remote archives only:
            `storage_options`: Options for obstore or fsspec as a mapping, as in pandas:
            credentials, region, `timeout` in seconds, ... Reading ends after `stall_timeout`
            seconds (30) without a byte. A web address with a user, a query or headers is
            refused if it redirects to another server, unless `allow_redirects` is True.
            `cache`: A directory for copies of remote archives, or True for the user's cache
            directory. `open`, `load`, `session` and `link` download the whole archive once, verify
            it, and map the copy, which processes share; a download goes on where it was
            interrupted, and opening the copy takes one request. Other functions use a copy that is
            there. An object with neither a strong ETag nor a version is not cached; nor is one in a
            `store` of S3, Google or Azure, which does not tell which server it asks: give a URL and
            `storage_options` instead. Of the file systems of fsspec, s3fs, gcsfs, adlfs and
            huggingface_hub tell it.
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
        ValueError: `mode`, `timeout` or `prefetch` is not allowed, or a file object is closed, not
            seekable or not binary.
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
    with opened(Location.of(source, **access), timeout=timeout, read=read) as file:
        archive = Archive(file, max_model_nbytes, model)
    if prefetch is not None and isinstance(archive._file, MappedFile):
        try:
            archive._file.prefetch(prefetch)
        except BaseException:
            archive.close()
            raise
    return archive


def load(
    source: Openable,
    *,
    model: str = "",
    max_model_nbytes: int = MAX_MODEL_NBYTES,
    **access: Unpack[Access],
) -> onnx.ModelProto:
    """Loads a model of an archive into memory, with all weights.

    The model equals the saved one, except that tensors stored outside the model have their elements
    in `raw_data`, and no `data_location`.

    The model does not remember its archive: `save(load(path), path)` replaces the whole file and
    loses assets, other models and the alignment. `edit` keeps them: `edit.model = model`.

    Args:
        source: The archive, as in `open`.
        model: Id of the model, such as `"decoder"`; `""` for the default one.
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
        return complete_model(archive)
