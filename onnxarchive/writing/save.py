"""`save` makes an archive of a model in memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, Unpack, cast

import onnx

from onnxarchive.errors import is_instance
from onnxarchive.files import locking
from onnxarchive.files.data import SupportsWrite
from onnxarchive.files.local_file import MappedFile
from onnxarchive.files.paths import directory_of, require_no_input, require_no_tilde
from onnxarchive.files.progress import Progress
from onnxarchive.model import DEFAULT_SIZE_THRESHOLD
from onnxarchive.reading.archive import contents_of
from onnxarchive.remote.location import Access, Location, require_no_digest
from onnxarchive.sources.source import Source
from onnxarchive.writing.options import Asset, WriteOptions
from onnxarchive.writing.overwriting import require_no_loss
from onnxarchive.writing.plan import plan_archive, with_further_models
from onnxarchive.writing.write import write_archive
from onnxarchive.zipformat import layout

if TYPE_CHECKING:
    import onnx_ir

    from onnxarchive.reading.archive import Archive
    from onnxarchive.writing.onnx_ir import SplitModel

    class ONNXProgram(Protocol):
        """Stands for `torch.onnx.ONNXProgram`, so that not even type checkers import torch."""

        model: onnx_ir.Model

    Model: TypeAlias = onnx.ModelProto | onnx_ir.Model | ONNXProgram

# If the archive with the model's tensors was changed, by others or by an earlier save of the model.
_REMEDY: Final = (
    "load the model from it again; or to replace the model that it has now, assign yours: "
    "'with onnxarchive.edit(path) as edit: edit.model = model'"
)


def save(
    model: Model,
    path: str | os.PathLike[str] | SupportsWrite,
    *,
    models: Mapping[str, Model] | None = None,
    size_threshold: int = DEFAULT_SIZE_THRESHOLD,
    alignment: int = layout.MIN_ALIGNMENT,
    convert_attribute: bool = False,
    assets: Mapping[str, Asset] | None = None,
    progress: Progress | None = None,
    jobs: int | None = None,
    timeout: float | None = locking.TIMEOUT,
    **access: Unpack[Access],
) -> None:
    """Saves a model as an archive.

    The archive appears at `path` when it is complete; after a failure the old file is unchanged. If
    the disk has too little free space, an error is raised before anything is written. The same
    model and options give the same bytes. Memory holds copies of the tensors that stay in the
    model, of the tensor that is being written, and with several threads of the next tensors; see
    `jobs`.

    Nothing is kept of an archive that is replaced, even if the model was loaded from it. To keep
    its assets, other models and alignment, assign the model in `onnxarchive.edit(path)`:
    `edit.model = model`. An error is raised before anything is written if the old archive has
    assets and `assets` is not given, or if it has further models and `models` is not given; `{}`
    drops them. In a store, the end of the object is read for this check; an object that the caller
    may not read is replaced.

    Other functions that write archives refer to the options below.

    Args:
        model: The model: an `onnx.ModelProto` with its tensors in memory, an `onnx_ir.Model`, or
            PyTorch's `ONNXProgram`. The last two may have lazy and external tensors, which are read
            one at a time. The model is not changed.
        path: The archive, usually `name.onnxa`; a URL in a store, where the object appears when it
            is complete; or a binary file, which is written in order and need not be seekable.
        models: Other models by id, such as `{"decoder": model}`. An id is `[a-z][a-z0-9_]*` of at
            most 64 bytes. Tensors of different models are stored once if their data type, dims and
            bytes are equal.
        size_threshold: Initializers of this many bytes or more are stored outside the model.
            Smaller ones stay in it, since runtimes need them to infer shapes.
        alignment: The data of every entry begins at a multiple of this many bytes: a power of two
            from 64 to 32768. With 4096 every tensor begins on a page of its own.
        convert_attribute: Whether to store sparse tensors and tensors of attributes (such as
            weights in Constant nodes), functions and training_info outside the model, too, by the
            same threshold as initializers. `load` reads all of them. `onnx.load`, on the unzipped
            directory, reads only those of nodes' attributes.
        assets: Other files for the archive, by relative path: their bytes, or the path of a file.
        progress: Called with the bytes done and the bytes in all, every few MiB or more often, by
            one thread at a time; True shows a bar.
        jobs: Number of threads; None for one per core. One thread writes; the others read ahead, at
            most `jobs` tensors and at most 96 MiB. The archive's bytes do not depend on it. An
            `onnx_ir.Model` is saved by the calling thread alone, since reading its tensors may run
            code of the caller.
        timeout: Seconds to wait if another process has locked the old file at `path`; None waits
            without limit.
        access: Options for a store, as in `onnxarchive.open`.

    Raises:
        ArchiveError: Tensors of an `onnx_ir.Model` are in the archive at `path`, which was changed
            since the model was loaded, for example by an earlier save.
        LockedError: The old file at `path` stayed locked until `timeout`.
        ArchiveFormatError: The model would break a rule: a tensor's bytes do not fit its shape or
            are external, or the model without large tensors is over 2 GiB.
        UnsupportedFeatureError: The model has more large tensors than an archive can hold.
        ValueError: An option, the id of a model or the path of an asset is not allowed; `path` is
            the file of an asset or begins with `~`; or the archive at `path` has assets or further
            models that would be lost.
        TypeError: `model` is not a model.
        OSError: The archive cannot be written.

    Example:
        model = onnx.load("model.onnx")
        onnxarchive.save(model, "new.onnxa", assets={"labels.txt": "labels.txt"})
    """
    require_no_digest(access)
    options = WriteOptions(
        size_threshold=size_threshold,
        alignment=alignment,
        convert_attribute=convert_attribute,
        assets=assets,
        progress=progress,
        jobs=jobs,
        timeout=timeout,
    )
    parts = {
        identifier: split(one, size_threshold)
        for identifier, one in with_further_models(model, models).items()
    }
    target = Location.of(path, **access)
    if target.path is not None:
        require_no_tilde(target.path)
        require_no_input(target.path, options.asset_files)
    require_no_loss(
        target,
        names_models=models is not None,
        names_assets=assets is not None,
        timeout=timeout,
    )
    sources: dict[str, Source] = {}
    archives: list[Archive] = []  # that hold tensors of the models
    for identifier, part in parts.items():
        if isinstance(part, onnx.ModelProto):
            sources[identifier] = Source(part)
        else:
            sources[identifier] = part.source()
            archives += part.archives
            options = replace(options, jobs=1)
    plan = plan_archive(
        sources,
        options,
        temporary=directory_of(target.path) if target.path is not None else None,
    )

    def require_current(file: MappedFile | None) -> None:
        assert target.path is not None  # else no file is replaced
        for archive in archives:
            contents_of(archive).require_current(target.path, file, remedy=_REMEDY)

    write_archive(plan, target, options, require=require_current)


def split(model: Model, size_threshold: int) -> onnx.ModelProto | SplitModel:
    """Splits a model of onnx_ir or PyTorch from its large tensors; returns a ModelProto as it is.

    Raises:
        TypeError: `model` is not a model.
    """
    if isinstance(model, onnx.ModelProto):
        return model
    if is_instance(model, "torch", "ONNXProgram"):
        model = cast("ONNXProgram", model).model
    if not is_instance(model, "onnx_ir", "Model"):
        remedy = "; convert takes a path" if isinstance(model, str | os.PathLike) else ""
        raise TypeError(
            "expected an onnx.ModelProto, onnx_ir.Model or torch.onnx.ONNXProgram, found "
            f"{type(model)}{remedy}"
        )
    from onnxarchive.writing.onnx_ir import split_model

    return split_model(cast("onnx_ir.Model", model), size_threshold=size_threshold)
