"""`open` and `load`: an archive to be looked at or edited, or its complete model."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal, get_args, overload

import onnx

from onnxarchive.archive import recovery
from onnxarchive.archive.contents import MAX_MODEL_NBYTES
from onnxarchive.archive.reading import Archive, complete_model
from onnxarchive.errors import with_path
from onnxarchive.storage.files import Prefetch

if TYPE_CHECKING:
    from onnxarchive.archive.editing import EditableArchive


@overload
def open(
    path: str | os.PathLike[str],
    mode: Literal["r"] = "r",
    *,
    model: str = ...,
    timeout: float | None = ...,
    max_model_nbytes: int = ...,
    prefetch: Prefetch | None = ...,
) -> Archive: ...


@overload
def open(
    path: str | os.PathLike[str],
    mode: Literal["r+"],
    *,
    model: str = ...,
    timeout: float | None = ...,
    max_model_nbytes: int = ...,
    prefetch: Prefetch | None = ...,
) -> EditableArchive: ...


def open(
    path: str | os.PathLike[str],
    mode: Literal["r", "r+"] = "r",
    *,
    model: str = "",
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
        model: Id of the model that `Archive.model` and `Archive.tensors` are of, such as
            `"decoder"`; `""` for the default one.
        timeout: Seconds to wait for others who edit the archive, and with `"r+"` also for those who
            open it; None waits without limit, 0 not at all.
        max_model_nbytes: Size in bytes above which the models, taken together, are refused before
            they are read; the format's own limit is 2 GiB for each. A lower one bounds the memory
            that a file from elsewhere can claim.
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
        ModelNotFoundError: There is no model of this id.
        LockedError: Others were at work on the archive until `timeout`.
        ValueError: `mode`, `timeout` or `prefetch` is not allowed.
        OSError: The file cannot be opened or read.
    """
    if prefetch not in (None, *get_args(Prefetch)):
        raise ValueError(f"expected prefetch 'willneed' or 'populate', found {prefetch!r}")
    if mode == "r+":
        from onnxarchive.archive.editing import EditableArchive  # which stands on this module

        archive: Archive = EditableArchive(path, max_model_nbytes, timeout, model)
    elif mode == "r":
        with recovery.opened(path, rule="FILE-1", timeout=timeout) as file:
            archive = Archive(file, max_model_nbytes, model)
    else:
        raise ValueError(f"expected mode 'r' or 'r+', found {mode!r}")
    if prefetch is not None:
        try:
            archive._file.prefetch(prefetch)
        except BaseException:
            archive.close()
            raise
    return archive


def load(
    path: str | os.PathLike[str], *, model: str = "", max_model_nbytes: int = MAX_MODEL_NBYTES
) -> onnx.ModelProto:
    """A complete model of an archive, in memory.

    Every tensor holds its bytes again, as `raw_data`. What `save` was given comes back equal, but
    for tensors that had type-specific fields, and for a `data_location` that was set to DEFAULT,
    which means the same as none.

    Args:
        path: The archive.
        model: Id of the model, such as `"decoder"`; `""` for the default one.
        max_model_nbytes: As in `open`.

    Raises:
        ArchiveFormatError: The file is not an archive or breaks a rule.
        ModelNotFoundError: There is no model of this id.
        ChecksumError: Bytes of a tensor have changed.
        OSError: The file cannot be opened or read.
    """
    with open(path, model=model, max_model_nbytes=max_model_nbytes) as archive, with_path(path):
        return complete_model(archive)
