"""`save`: a model in memory as an archive."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import onnx

from onnxarchive.archive.options import Asset, WriteOptions
from onnxarchive.archive.planning import (
    ModelToStore,
    Plan,
    plan_archive,
    refuse_external,
    with_further_models,
)
from onnxarchive.archive.writing import write_archive, write_file
from onnxarchive.buffers.counting import Progress
from onnxarchive.buffers.data import SupportsWrite
from onnxarchive.model.threshold import DEFAULT_SIZE_THRESHOLD
from onnxarchive.storage import locking
from onnxarchive.storage.files import MappedFile
from onnxarchive.storage.paths import directory_of, require_no_input
from onnxarchive.zipformat import layout

if TYPE_CHECKING:
    import onnx_ir

    from onnxarchive.archive.onnx_ir import SplitModel


def save(
    model: onnx.ModelProto | onnx_ir.Model,
    path: str | os.PathLike[str] | SupportsWrite,
    *,
    models: Mapping[str, onnx.ModelProto | onnx_ir.Model] | None = None,
    size_threshold: int = DEFAULT_SIZE_THRESHOLD,
    alignment: int = layout.MIN_ALIGNMENT,
    convert_attribute: bool = False,
    dedupe: bool = False,
    assets: Mapping[str, Asset] | None = None,
    progress: Progress | None = None,
    jobs: int | None = None,
) -> None:
    """Saves a model as an archive.

    The file appears at `path` when it is complete; until then, and after a failure, the file that
    was there is unchanged. If the file system can reserve space, a full disk is an error before
    anything is written. The same model and options give the same bytes. Memory holds copies of the
    tensors that stay in the model and of one tensor at a time; with several threads also of up to
    `jobs` tensors that come next, of 96 MiB in all.

    `onnxarchive.archive.options.WriteOptions` describes the options in full.

    Args:
        model: The model, with its tensors in memory; or an `onnx_ir.Model`, whose lazy and external
            tensors are fetched one at a time. It is not changed.
        path: The archive, usually `name.onnxa`; or a binary file, which is written to in order and
            need not be seekable.
        models: Further models by id, such as `{"decoder": model}`; an id is `[a-z][a-z0-9_]*` of at
            most 64 bytes. Tensors of different models that are equal in data type, dims and bytes
            are stored once, whatever their names.
        size_threshold: Tensors of this many bytes or more are stored outside the model.
        alignment: The data of every entry begins at a multiple of this many bytes.
        convert_attribute: Whether to store outside the model not only initializers, but all
            tensors.
        dedupe: Whether identical initializers of a graph become one initializer.
        assets: Further files for the archive, by relative path: their bytes, or the path of a file.
        progress: Called with the bytes done and the bytes in all.
        jobs: Number of threads; None for one for each core. An `onnx_ir.Model` is saved by the
            caller's thread alone, since the caller's code may make its tensors.

    Raises:
        ArchiveError: An `onnx_ir.Model` was loaded from the archive at `path`, and others have
            edited that since.
        ArchiveFormatError: The model would break a rule: a tensor does not have the bytes that its
            shape needs, or its data is external, or the model without large tensors is over 2 GiB.
        UnsupportedFeatureError: There are more tensors to be stored outside than an archive holds.
        ValueError: An option, the id of a model or the path of an asset is not allowed, or `path`
            is the file of an asset.
        OSError: The archive cannot be written.
    """
    options = WriteOptions(
        size_threshold=size_threshold,
        alignment=alignment,
        convert_attribute=convert_attribute,
        dedupe=dedupe,
        assets=assets,
        progress=progress,
        jobs=jobs,
    )
    if isinstance(path, str | os.PathLike):
        require_no_input(path, options.asset_files)
    given = with_further_models(model, models)
    splits = {
        identifier: _split(found, size_threshold)
        for identifier, found in given.items()
        if not isinstance(found, onnx.ModelProto)
    }
    planned = {
        identifier: ModelToStore(splits[identifier].proto, splits[identifier].resolve)
        if identifier in splits
        else ModelToStore(cast(onnx.ModelProto, found), refuse_external)
        for identifier, found in given.items()
    }
    if splits:
        options = replace(options, jobs=1)
    temporary = directory_of(path) if isinstance(path, str | os.PathLike) else None
    plan = plan_archive(planned, options, temporary=temporary)
    if splits and isinstance(path, str | os.PathLike):
        _write_split(plan, path, list(splits.values()), options)
    else:
        write_archive(plan, path, options)


def _write_split(
    plan: Plan, path: str | os.PathLike[str], splits: Sequence[SplitModel], options: WriteOptions
) -> None:
    """Writes models of onnx_ir; archives that they were loaded from must not have been edited."""
    replaced = [(split, split.replaced_archives(path)) for split in splits]

    def require_current(file: MappedFile | None) -> None:
        for _, archives in replaced:
            for archive in archives:
                archive._require_current(path, file)

    with write_file(plan, path, options, require=require_current) as file:
        try:
            for split, archives in replaced:
                if archives:
                    split.saved_as(file)
        finally:
            locking.unlock(file.fileno())


def _split(model: onnx_ir.Model, size_threshold: int) -> SplitModel:
    bases = ((base.__module__.split(".")[0], base.__name__) for base in type(model).__mro__)
    if ("onnx_ir", "Model") not in bases:  # found without importing onnx_ir
        raise TypeError(f"expected an onnx.ModelProto or onnx_ir.Model, found {type(model)}")
    from onnxarchive.archive.onnx_ir import split_model

    return split_model(model, size_threshold=size_threshold)
