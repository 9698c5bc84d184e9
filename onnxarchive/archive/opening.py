"""`open` opens an archive to read or edit it; `load` gives its complete model."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal, get_args, overload

import onnx

from onnxarchive.archive import openable
from onnxarchive.archive.contents import MAX_MODEL_NBYTES
from onnxarchive.archive.openable import Access, Openable
from onnxarchive.archive.reading import Archive, complete_model
from onnxarchive.errors import with_path
from onnxarchive.storage.files import MappedFile, Prefetch

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from onnxarchive.archive.editable import EditableArchive


@overload
def open(
    source: Openable,
    mode: Literal["r"] = "r",
    *,
    model: str = ...,
    timeout: float | None = ...,
    max_model_nbytes: int = ...,
    prefetch: Prefetch | None = ...,
    **access: Unpack[Access],
) -> Archive: ...


@overload
def open(
    source: str | os.PathLike[str],
    mode: Literal["r+"],
    *,
    model: str = ...,
    timeout: float | None = ...,
    max_model_nbytes: int = ...,
    prefetch: Prefetch | None = ...,
) -> EditableArchive: ...


def open(
    source: Openable,
    mode: Literal["r", "r+"] = "r",
    *,
    model: str = "",
    timeout: float | None = None,
    max_model_nbytes: int = MAX_MODEL_NBYTES,
    prefetch: Prefetch | None = None,
    **access: Unpack[Access],
) -> Archive:
    """Opens an archive.

    Time and memory grow with the number of entries and the size of the models without external
    tensors. No weight is read, and no local header except the models'. If another process edits
    the file in its place, `open` waits.

    A remote archive is opened with one request for its end, which usually holds directory and
    model, and two more at most. A tensor takes one request; it is an array in memory, or a view of
    the cache's file. Its CRC-32 is compared before it is given. `Archive.fetch` brings many tensors
    at once. If the object changes while it is read, `ObjectChangedError` is raised: the store is
    asked for the same ETag, or if it gives none, size and time of the last change are compared.

    Args:
        source: The archive: a path; its bytes; a binary file object that is seekable, which one
            thread reads at a time and `close` leaves open; or a URL. Those of `http`, `https`,
            `s3`, `gs`, `az` are read by obstore, others (`hf://`, `github://`, ...) by fsspec.
        mode: `"r"` to read, `"r+"` to edit as well (see `EditableArchive`); an edit that a crash
            interrupted is then rolled back first.
        model: Id of the model that `Archive.model` and `Archive.tensors` give, such as
            `"decoder"`; `""` for the default one.
        timeout: Seconds to wait while others edit the file, with `"r+"` also while they open
            it; None waits without limit, 0 not at all.
        max_model_nbytes: Largest size in bytes of all models together, without their external
            tensors; the format's own limit is 2 GiB for each. A lower limit bounds the memory that
            an untrusted file can take.
        prefetch: Use it if most of the weights will be read. `"willneed"`: the system begins to
            read the whole file in the background (`madvise`); this is faster if tensors are read
            in another order than that of the file. `"populate"`: the whole file is read and mapped
            before `open` returns (`MAP_POPULATE`); no view waits for a page afterwards, and the
            resident memory of the process grows by the size of the file. None: pages are read when
            they are used. An edit of the archive ends the prefetch. Only a file has a prefetch.
        access: For remote archives; others ignore it:
            `storage_options`: A mapping for obstore or fsspec, as in pandas and polars, with
            credentials, a region, timeouts and so on.
            `cache`: A directory for what was read, or True for the user's cache directory; views
            are then maps of a file there, which processes share. An object without an ETag or a
            version is not cached. None or False: no cache.
            `store`: An obstore store; `source` is then a path in it.

    Returns:
        The archive; with mode `"r+"` an `EditableArchive`.

    Raises:
        ArchiveFormatError: The file is not an archive: its end records, directory or models break
            a rule of the specification.
        UnfinishedEditError: An edit of it was interrupted, and `mode` is `"r"`.
        ModelNotFoundError: There is no model of this id.
        LockedError: The archive stayed locked until `timeout`.
        ObjectChangedError: A remote archive changed while it was opened.
        UnsupportedFeatureError: An archive that is not a file is opened with `"r+"`.
        ValueError: `mode`, `timeout` or `prefetch` is not allowed, or a file object is not
            seekable.
        TypeError: `source` is of another type.
        ImportError: obstore or fsspec is not installed, and the URL needs it.
        OSError: The archive cannot be opened or read.

    Example:
        with onnxarchive.open("model.onnxa") as archive:
            weight = archive.tensors["layer.0/weight"]
    """
    if prefetch not in (None, *get_args(Prefetch)):
        raise ValueError(f"expected prefetch 'willneed' or 'populate', found {prefetch!r}")
    if mode == "r+":
        from onnxarchive.archive.editable import EditableArchive  # imports this module

        path = openable.require_path(source, access)
        archive: Archive = EditableArchive(path, max_model_nbytes, timeout, model)
    elif mode == "r":
        with openable.opened(source, timeout=timeout, **access) as file:
            archive = Archive(file, max_model_nbytes, model)
    else:
        raise ValueError(f"expected mode 'r' or 'r+', found {mode!r}")
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
    """A complete model of an archive, in memory.

    Every tensor holds its bytes, as `raw_data`. The model equals the one that `save` was given,
    except that elements of type-specific fields are in `raw_data`, and that a `data_location` of
    DEFAULT, which means the same as none, is not set.

    The model does not remember its archive: `save(load(path), path)` replaces the whole file, and
    loses assets and further models. `replace_model(path, model)` keeps them.

    Args:
        source: The archive, as in `open`.
        model: Id of the model, such as `"decoder"`; `""` for the default one.
        max_model_nbytes: Largest size in bytes of all models together, without their external
            tensors.
        access: As in `open`.

    Returns:
        The model.

    Raises:
        ArchiveFormatError: The file is not an archive or breaks a rule.
        ModelNotFoundError: There is no model of this id.
        ChecksumError: Bytes of a tensor have changed.
        OSError: The file cannot be opened or read.

    Example:
        model = onnxarchive.load("model.onnxa")
    """
    opened = open(source, model=model, max_model_nbytes=max_model_nbytes, **access)
    with opened as archive, with_path(archive.path):
        return complete_model(archive)
