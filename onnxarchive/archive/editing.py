"""Edits models, tensors and assets of an archive.

The models are the last entries, so replacing a model only needs a new end of the file: new tensors,
models, directory and end records. The new end is written to a clone (a copy that shares blocks with
the archive), and the clone replaces the archive. If the archive cannot be cloned or replaced, the
new end is written to the archive itself, with an undo log at the end of the file until the edit is
complete. A crash leaves the old archive, the new archive, or a file from which a rollback restores
the old archive. An edit that moves entries writes a new file. Edits of models move entries only on
request (`compact`).

An edit holds the lock of the archive while it reads the old state and writes the new one, so no
other edit is lost.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING

import onnx

from onnxarchive.archive.entry_edits import write_assets, write_tensor
from onnxarchive.archive.options import Asset
from onnxarchive.archive.reading import Archive
from onnxarchive.archive.recovery import opened_for_edit, require_finished, roll_back
from onnxarchive.archive.rewriting import (
    EditOptions,
    GivenModel,
    write_model,
    write_renamed,
    write_without,
)
from onnxarchive.buffers.counting import Progress
from onnxarchive.model.copying import copied
from onnxarchive.storage import locking
from onnxarchive.storage.files import MappedFile, require_process

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = [
    "add_asset",
    "change_assets",
    "change_model",
    "remove_asset",
    "remove_model",
    "rename_model",
    "replace_model",
    "replace_tensor",
    "require_one_name",
]


def replace_model(
    path: str | os.PathLike[str],
    model: GivenModel,
    *,
    name: str = "",
    compact: bool = False,
    copy: bool = False,
    size_threshold: int | None = None,
    convert_attribute: bool | None = None,
    timeout: float | None = locking.TIMEOUT,
    progress: Progress | None = None,
) -> None:
    """Replaces or adds a model of an archive.

    Without `compact` and `copy`, existing entries keep their offsets and keys, and only the end of
    the file is written: new tensors, models, directory and end records. So the time does not depend
    on the size of the weights. There is one exception: if the file cannot be cloned (copied by
    sharing blocks), and the old models and directory exceed 3 GiB, the whole file is written anew.
    Existing views stay valid. A crash leaves the old archive, the new archive, or a file that
    `open` refuses until `recover`, or the next edit, has restored the old archive.

    A tensor of the new model uses an existing entry in three cases: its location is the entry's
    key; its external data is the entry's data in the archive file (see `link`); or the entry has
    the tensor's bytes, and the key that `save` would give the tensor. In an archive of several
    models there is a fourth case: the entry has the tensor's data type, dims and bytes. Other
    tensors that are stored outside the model get new entries.

    Args:
        path: The archive.
        model: The model, such as a changed `Archive.model`; the locations of its external tensors
            must be keys. Or the path of a `.onnx` file, such as one written by `link`.
        name: Id of the model, such as `"decoder"`; `""` for the default one. An unknown id adds a
            model.
        compact: Whether to rewrite the archive as `save` does: with tensors in the same order as in
            the models, with keys derived from tensor names, and without tensors that no model uses.
            An archive whose tensors already meet these conditions is not rewritten.
        copy: Whether to write a new file at `path`; needed for a symbolic link or a file with other
            hard links. The link's target or the other hard links keep the old content.
        size_threshold: Initializers of this many bytes or more are stored outside the model. None
            means the larger of two sizes: the size of the largest initializer inside the replaced
            model, plus 1; and the size of that model's smallest external initializer, but at most
            1024. Tensors other than initializers count, too, if any of them is stored outside. For
            a new model, or with `compact`, the tensors of all models of the archive count.
        convert_attribute: Whether all tensors of `size_threshold` bytes or more are stored outside
            the model, not only initializers. None means True if any external tensor of the
            replaced model is not an initializer. For a new model, or with `compact`, the external
            tensors of all models of the archive count.
        timeout: Seconds to wait for the archive's lock; None waits without limit, 0 fails at once.
        progress: Called with the bytes written and the bytes in all; True shows a bar.

    Raises:
        ValueError: A tensor of the archive would be unused, and `compact` is False; `name` is not
            an id; or `copy` is False, and `path` is a symbolic link or has several hard links.
            Nothing is changed.
        LockedError: The archive stayed locked until `timeout`.
        ArchiveFormatError: The file is not an archive, an external tensor matches no entry, or the
            model would break a rule.
        ChecksumError: Bytes copied from the archive do not match their CRC-32.
        ArchiveError: Writing and rolling back failed; `recover` can roll back later.
        OSError: The archive or its folder cannot be read or written. The archive is unchanged,
            unless the edit was complete and the sync after it failed.

    Example:
        with onnxarchive.open("model.onnxa") as archive:
            model = archive.model
        model.graph.name = "renamed"
        onnxarchive.replace_model("model.onnxa", model)
    """
    options = EditOptions(compact, copy, size_threshold, convert_attribute, progress)
    with _locked(path, timeout, copy=copy) as archive:
        _release(write_model(archive, model, options, name))


def remove_model(
    path: str | os.PathLike[str],
    name: str,
    *,
    compact: bool = False,
    copy: bool = False,
    timeout: float | None = locking.TIMEOUT,
    progress: Progress | None = None,
) -> None:
    """Removes a model other than the default one; raises the errors of `replace_model`, too.

    Args:
        path: The archive.
        name: Id of the model, such as `"decoder"`.
        compact: Whether to rewrite the archive without the tensors that only this model uses.
        copy: Whether to write a new file; see `replace_model`.
        timeout: Seconds to wait for the archive's lock; None waits without limit, 0 fails at once.
        progress: Called with the bytes written and the bytes in all; True shows a bar.

    Raises:
        ModelNotFoundError: There is no model of this id.
        ValueError: `name` is empty; or `compact` is False, and a tensor is used by this model
            alone. Nothing is changed.

    Example:
        onnxarchive.remove_model("model.onnxa", "decoder")
    """
    options = EditOptions(compact=compact, copy=copy, progress=progress)
    with _locked(path, timeout, copy=copy) as archive:
        _release(write_without(archive, name, options))


def rename_model(
    path: str | os.PathLike[str],
    old: str,
    new: str,
    *,
    copy: bool = False,
    timeout: float | None = locking.TIMEOUT,
) -> None:
    """Changes the id of a model; raises the errors of `replace_model`, too.

    Args:
        path: The archive.
        old: Id of a model other than the default one, such as `"decoder"`.
        new: Its new id.
        copy: Whether to write a new file; see `replace_model`.
        timeout: Seconds to wait for the archive's lock; None waits without limit, 0 fails at once.

    Raises:
        ModelNotFoundError: There is no model with the id `old`.
        ValueError: `old` is empty, or `new` is not an id or is taken.

    Example:
        onnxarchive.rename_model("model.onnxa", "decoder", "decoder_with_past")
    """
    with _locked(path, timeout, copy=copy) as archive:
        _release(write_renamed(archive, old, new, EditOptions(copy=copy)))


def change_model(
    path: str | os.PathLike[str],
    change: Callable[[onnx.ModelProto], onnx.ModelProto],
    *,
    name: str = "",
    compact: bool = False,
    copy: bool = False,
    timeout: float | None = locking.TIMEOUT,
) -> None:
    """Replaces a model by what a function returns; raises the errors of `replace_model`, too.

    Args:
        path: The archive. It stays locked while `change` runs, so `change` cannot open it.
        change: A function that takes a copy of the model, may change the copy, and returns the new
            model. If the new model equals the old model, nothing is written.
        name: Id of the model, such as `"decoder"`; `""` for the default one.
        compact: Whether to rewrite the archive without tensors that no model uses.
        copy: Whether to write a new file; see `replace_model`.
        timeout: Seconds to wait for the archive's lock; None waits without limit, 0 fails at once.

    Raises:
        ModelNotFoundError: There is no model of this id.

    Example:
        def rename(model: onnx.ModelProto) -> onnx.ModelProto:
            model.graph.name = "renamed"
            return model

        onnxarchive.change_model("model.onnxa", rename)
    """
    with _locked(path, timeout, copy=copy, model=name) as archive:
        process = os.getpid()
        changed = change(copied(archive.model))
        require_process(process)  # a process forked by `change` gets here, too
        if changed != archive.model:
            _release(write_model(archive, changed, EditOptions(compact=compact, copy=copy)))


def replace_tensor(
    path: str | os.PathLike[str],
    name: str,
    array: ArrayLike,
    *,
    model: str = "",
    copy: bool = False,
    timeout: float | None = locking.TIMEOUT,
    progress: Progress | None = None,
) -> None:
    """Replaces the elements of an initializer; raises the errors of `replace_model`, too.

    If the tensor is in the model itself or shared with other models, the model is replaced as by
    `replace_model`, and the other models keep the old elements. Otherwise a new file replaces the
    archive; if the file system can share blocks, only the tensor, the models and the directory of
    the new file are written. In both cases, existing views and sessions keep the old elements.

    Args:
        path: The archive.
        name: Name of the initializer.
        array: Its new elements, of the same shape and data type.
        model: Id of the model, such as `"decoder"`; `""` for the default one.
        copy: Whether to write a new file in both cases; needed for a symbolic link or a file with
            other hard links (see `replace_model`).
        timeout: Seconds to wait for the archive's lock; None waits without limit, 0 fails at once.
        progress: Called with the bytes written and the bytes in all; True shows a bar.

    Raises:
        ModelNotFoundError: There is no model of this id.
        TensorNotFoundError: No initializer has this name, or several have it.
        ValueError: The array has another shape or data type.

    Example:
        zeros = np.zeros((64, 32), np.float32)
        onnxarchive.replace_tensor("model.onnxa", "layer.0/weight", zeros)
    """
    with _locked(path, timeout, copy=copy, model=model) as archive:
        _release(write_tensor(archive, name, array, copy, progress))


def add_asset(
    path: str | os.PathLike[str],
    name: str,
    data: Asset,
    *,
    copy: bool = False,
    timeout: float | None = locking.TIMEOUT,
    progress: Progress | None = None,
) -> None:
    """Adds or replaces an asset of an archive; see `change_assets`.

    Args:
        path: The archive.
        name: Path of the asset, such as `"tokenizer.json"`.
        data: Its bytes, or the path of a file.
        copy: Whether `path` may be a symbolic link or a file with other hard links; see
            `replace_model`.
        timeout: Seconds to wait for the archive's lock; None waits without limit, 0 fails at once.
        progress: Called with the bytes written and the bytes in all; True shows a bar.

    Raises:
        ValueError: `name` is not allowed (rules ASSET-1, NAME-2), or `data` is the path of the
            archive itself.
        ArchiveFormatError: The file with the path `data` is not a regular file.
        OSError: The file with the path `data` cannot be read.

    Example:
        onnxarchive.add_asset("model.onnxa", "config.json", b"{}")
    """
    change_assets(path, {name: data}, copy=copy, timeout=timeout, progress=progress)


def remove_asset(
    path: str | os.PathLike[str],
    name: str,
    *,
    copy: bool = False,
    timeout: float | None = locking.TIMEOUT,
    progress: Progress | None = None,
) -> None:
    """Removes an asset from an archive; see `change_assets`.

    Args:
        path: The archive.
        name: Path of the asset, such as `"tokenizer.json"`.
        copy: Whether `path` may be a symbolic link or a file with other hard links; see
            `replace_model`.
        timeout: Seconds to wait for the archive's lock; None waits without limit, 0 fails at once.
        progress: Called with the bytes written and the bytes in all; True shows a bar.

    Raises:
        TensorNotFoundError: There is no such asset.

    Example:
        onnxarchive.remove_asset("model.onnxa", "labels.txt")
    """
    change_assets(path, {}, [name], copy=copy, timeout=timeout, progress=progress)


def change_assets(
    path: str | os.PathLike[str],
    added: Mapping[str, Asset],
    removed: Collection[str] = (),
    *,
    copy: bool = False,
    timeout: float | None = locking.TIMEOUT,
    progress: Progress | None = None,
) -> None:
    """Adds, replaces and removes assets in one edit; raises the errors of `replace_model`, too.

    A new file replaces the archive, so existing views stay valid. If the file system can share
    blocks, the old and the new file share all blocks before the first changed entry, and only the
    rest is written.

    Args:
        path: The archive.
        added: Assets to add or replace, by path: their bytes, or the path of a file.
        removed: Paths of assets to remove.
        copy: Whether `path` may be a symbolic link or a file with other hard links; see
            `replace_model`.
        timeout: Seconds to wait for the archive's lock; None waits without limit, 0 fails at once.
        progress: Called with the bytes written and the bytes in all; True shows a bar.

    Raises:
        TensorNotFoundError: A path in `removed` is not the path of an asset.
        ValueError: The path of an asset is not allowed (rules ASSET-1, NAME-2), or an asset is
            given by the path of the archive itself.
        ArchiveFormatError: The file of an asset is not a regular file.
        OSError: The file of an asset cannot be read.

    Example:
        onnxarchive.change_assets("model.onnxa", {"config.json": b"{}"}, ["labels.txt"])
    """
    with _locked(path, timeout, copy=copy) as archive:
        _release(write_assets(archive, added, removed, progress))


@contextlib.contextmanager
def _locked(
    path: str | os.PathLike[str], timeout: float | None, *, copy: bool, model: str = ""
) -> Iterator[Archive]:
    """Opens an archive and locks it while the block runs."""
    is_writable = None if copy else True
    with opened_for_edit(path, is_writable=is_writable, timeout=timeout) as file, file:
        if copy:
            require_finished(file)
        else:
            require_one_name(path, file)
            roll_back(file)
        yield Archive(file, model=model)


def require_one_name(path: str | os.PathLike[str], file: MappedFile) -> None:
    """Refuses to change a file that has several names.

    Raises:
        ValueError: The file has several hard links, or `path` is a symbolic link.
    """
    names = file.status().st_nlink
    found = None
    if os.path.islink(path):
        found = f"a symbolic link to {os.path.realpath(path)}, a file that others may use"
    elif names > 1:
        found = f"a file with {names} names (hard links), which share the content"
    if found is not None:
        raise ValueError(
            f"{os.fspath(path)}: expected a file with one name, found {found}; copy=True (--copy) "
            "writes a new file at this path instead"
        )


def _release(file: MappedFile) -> None:
    """Unlocks and closes a file; closing alone would not release a lock shared with a fork."""
    with file:
        locking.unlock(file.fileno())
