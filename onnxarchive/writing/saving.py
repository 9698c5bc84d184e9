"""`save` makes an archive of a model that is in memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeAlias, Unpack, cast

import onnx

from onnxarchive.errors import is_instance
from onnxarchive.files import locking
from onnxarchive.files.data import SupportsWrite
from onnxarchive.files.filesystem import directory_of, require_no_input, require_no_tilde
from onnxarchive.files.local_file import MappedFile
from onnxarchive.files.progress import Progress
from onnxarchive.model import DEFAULT_SIZE_THRESHOLD
from onnxarchive.remote.location import Access, Location
from onnxarchive.sources.source import Source
from onnxarchive.writing.options import Asset, WriteOptions
from onnxarchive.writing.overwriting import require_no_loss
from onnxarchive.writing.plan import Plan, plan_archive, with_further_models
from onnxarchive.writing.stored_entries import archive_options, assets_of, sources_of
from onnxarchive.writing.write import write_archive, write_file
from onnxarchive.zipformat import layout

if TYPE_CHECKING:
    import onnx_ir

    from onnxarchive.writing.onnx_ir import SplitModel

    class ONNXProgram(Protocol):
        """Stands for `torch.onnx.ONNXProgram`, so that not even type checkers import torch."""

        model: onnx_ir.Model

    Model: TypeAlias = onnx.ModelProto | onnx_ir.Model | ONNXProgram


def save(
    model: Model,
    path: str | os.PathLike[str] | SupportsWrite,
    *,
    models: Mapping[str, Model] | None = None,
    size_threshold: int | None = None,
    alignment: int | None = None,
    convert_attribute: bool | None = None,
    assets: Mapping[str, Asset] | None = None,
    keep: bool = True,
    progress: Progress | None = None,
    jobs: int | None = None,
    timeout: float | None = locking.TIMEOUT,
    **access: Unpack[Access],
) -> None:
    """Saves a model as an archive.

    The archive appears at `path` when it is complete; after a failure the old file is unchanged. If
    the disk has too little free space, an error is raised before anything is written. The same
    model and options give the same bytes. Memory holds copies of the tensors that stay in the
    model, and a copy of the tensor that is being written. With several threads, memory also holds
    copies of the next tensors: at most `jobs` tensors, and at most 96 MiB.

    If the archive that is replaced has assets, and `assets` is not given, or further models, and
    `models` is not given, an error is raised before anything is written; `{}` drops them. A model
    from `onnxarchive.ir.load` keeps those of its own archive (`keep`). Other models do not remember
    their file: to keep its assets, other models and alignment, assign the model in
    `onnxarchive.edit(path)`. In a store, the end of the object is read for this; an object that the
    caller may not read is replaced.

    Args:
        model: The model: an `onnx.ModelProto` with its tensors in memory, an `onnx_ir.Model`, or
            PyTorch's `ONNXProgram`. The last two may have lazy and external tensors, which are
            read one at a time. The model is not changed.
        path: The archive, usually `name.onnxa`; a URL in a store, where the archive appears when it
            is complete; or a binary file, which is written in order and need not be seekable.
        models: Other models by id, such as `{"decoder": model}`; an id is `[a-z][a-z0-9_]*` of at
            most 64 bytes. Tensors of different models are stored once if their data type, dims and
            bytes are equal.
        size_threshold: Initializers of this many bytes or more are stored outside the model. With
            `keep`, None means a threshold that moves no tensor out of a model of the archive from
            which the model was loaded, and as few as possible into models. Otherwise None means
            1024.
        alignment: The data of every entry begins at a multiple of this many bytes. None means: as
            in the archive from which the model was loaded, if `keep` is true; else 64.
        convert_attribute: Whether all tensors of `size_threshold` bytes or more are stored outside
            the model, not only initializers. With `keep`, None means True if the archive from which
            the model was loaded has an entry that holds a tensor other than an initializer.
            Otherwise None means False.
        assets: Other files for the archive, by relative path: their bytes, or the path of a file.
        keep: Whether a model from `onnxarchive.ir.load` keeps its id and the other models and
            assets of its archive, unless `models` and `assets` replace them. False saves only the
            given models and assets, with `model` as the default one. Models from elsewhere are
            always saved as with False.
        progress: Called with the bytes done and the bytes in all; True shows a bar.
        jobs: Number of threads; None for one per core. An `onnx_ir.Model` is saved by the calling
            thread alone, since reading its tensors may run code of the caller.
        timeout: Seconds to wait if another process has locked the old file at `path`; None waits
            without limit.
        access: Options for a store; see `onnxarchive.open`.

    Raises:
        ArchiveError: An `onnx_ir.Model` was loaded from the archive at `path`, and the archive was
            edited since.
        LockedError: The old file at `path` stayed locked until `timeout`.
        ArchiveFormatError: The model would break a rule: a tensor's bytes do not fit its shape or
            are external, or the model without large tensors is over 2 GiB.
        UnsupportedFeatureError: The model has more large tensors than an archive can hold.
        ValueError: An option, the id of a model or the path of an asset is not allowed, `path` is
            the file of an asset or begins with `~`, two models have the same id, or the archive at
            `path` has assets or further models that would be lost.
        TypeError: `model` is not a model.
        OSError: The archive cannot be written.

    Example:
        model = onnx.load("model.onnx")
        onnxarchive.save(model, "new.onnxa", assets={"labels.txt": "labels.txt"})
    """
    split_threshold = DEFAULT_SIZE_THRESHOLD if size_threshold is None else size_threshold
    parts = {
        identifier: split(one, split_threshold)
        for identifier, one in with_further_models(model, models).items()
    }
    default = parts[""]
    origin = default.origin if keep and not isinstance(default, onnx.ModelProto) else None
    if origin is not None:
        _move_to_own_id(parts, origin.model_id)
        kept = archive_options(origin, origin.models, size_threshold, convert_attribute)
        size_threshold, convert_attribute = kept.size_threshold, kept.convert_attribute
        alignment = kept.alignment if alignment is None else alignment
    options = WriteOptions(
        size_threshold=DEFAULT_SIZE_THRESHOLD if size_threshold is None else size_threshold,
        alignment=layout.MIN_ALIGNMENT if alignment is None else alignment,
        convert_attribute=bool(convert_attribute),
        assets=assets,
        progress=progress,
        jobs=jobs,
        timeout=timeout,
    )
    target = Location.of(path, **access)
    if target.path is not None:
        require_no_tilde(target.path)
        require_no_input(target.path, options.asset_files)
    # An archive that was edited since it was opened is refused when it is to be replaced.
    if origin is None or target.path is None or not origin.contents.is_at(target.path):
        require_no_loss(
            target,
            names_models=models is not None,
            names_assets=assets is not None,
            kept=() if origin is None else origin.entries.values(),
            timeout=timeout,
        )
    splits = {id: part for id, part in parts.items() if not isinstance(part, onnx.ModelProto)}
    sources = {
        id: Source(part) if isinstance(part, onnx.ModelProto) else part.source()
        for id, part in parts.items()
    }
    if origin is not None:
        others = {id: one for id, one in origin.models.items() if id not in parts}
        sources |= sources_of(origin, others)
        sources[""].assets = assets_of(origin)
    if splits:
        options = replace(options, jobs=1)
    plan = plan_archive(
        sources,
        options,
        temporary=directory_of(target.path) if target.path is not None else None,
    )
    if splits and target.path is not None:
        _write_split(plan, target.path, splits, options)
    else:
        write_archive(plan, target, options)


def split(model: Model, size_threshold: int) -> onnx.ModelProto | SplitModel:
    """Splits a model of onnx_ir or PyTorch from its large tensors; a ModelProto is unchanged.

    Raises:
        TypeError: `model` is no model.
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


def _move_to_own_id(parts: dict[str, onnx.ModelProto | SplitModel], identifier: str) -> None:
    """Gives the saved model the id that it has in the archive from which it was loaded.

    Raises:
        ValueError: Another model is given for this id.
    """
    model = parts.pop("")
    if identifier in parts:
        raise ValueError(
            f"models: {identifier!r} is also the id of `model`, which was loaded under this id; "
            "give another id, or keep=False to save `model` as the default model"
        )
    parts[identifier] = model


def _write_split(
    plan: Plan,
    path: str | os.PathLike[str],
    splits: Mapping[str, SplitModel],
    options: WriteOptions,
) -> None:
    """Writes models of onnx_ir; refuses to replace an archive edited since it was opened."""
    replaced = {id: split.replaced_archives(path) for id, split in splits.items()}

    def require_current(file: MappedFile | None) -> None:
        for archives in replaced.values():
            for archive in archives:
                archive.contents.require_current(path, file)

    with write_file(plan, path, options, require=require_current) as file:
        for identifier, archives in replaced.items():
            if archives:
                splits[identifier].saved_as(file, identifier)
