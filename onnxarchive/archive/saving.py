"""`save`: a model in memory as an archive."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import onnx

from onnxarchive.archive.planning import (
    Asset,
    asset_files,
    open_assets,
    plan_archive,
    refuse_external,
)
from onnxarchive.archive.writing import write_archive, write_file
from onnxarchive.buffers.counting import Progress
from onnxarchive.buffers.data import SupportsWrite
from onnxarchive.model.threshold import DEFAULT_SIZE_THRESHOLD
from onnxarchive.storage import locking, threads
from onnxarchive.storage.files import MappedFile
from onnxarchive.storage.paths import require_no_input
from onnxarchive.zipformat import layout

if TYPE_CHECKING:
    import onnx_ir

    from onnxarchive.archive.onnx_ir import SplitModel


def save(
    model: onnx.ModelProto | onnx_ir.Model,
    path: str | os.PathLike[str] | SupportsWrite,
    *,
    size_threshold: int = DEFAULT_SIZE_THRESHOLD,
    alignment: int = layout.MIN_ALIGNMENT,
    convert_attribute: bool = False,
    dedupe: bool = False,
    assets: Mapping[str, Asset] | None = None,
    progress: Progress | None = None,
    jobs: int | None = None,
) -> None:
    """Saves a model as an archive.

    The file appears under `path` when it is complete; until then, and after a failure, whatever
    was there is untouched. A disk without room for it says so before anything is written, where its
    file system can set blocks aside. The same model and options give the same bytes. Beyond the
    model, what stays in it and one tensor at a time are held in memory as copies; with several
    threads also up to `jobs` tensors that come next, as far as they have 96 MiB in all.

    Args:
        model: The model, with its tensors in memory; or an `onnx_ir.Model`, whose lazy and external
            tensors are fetched one at a time. It is not changed.
        path: The archive, usually `name.onnxa`; or a binary file that is written to as it comes,
            which need not be seekable.
        size_threshold: Tensors of this many bytes or more are stored outside the model. Smaller
            ones stay in it, where runtimes need them to infer shapes.
        alignment: What the data of every entry is aligned to, in bytes: a power of two from 64 to
            32768. 4096 lets every tensor begin on a page of its own.
        convert_attribute: Whether tensors of attributes, sparse tensors, and tensors in functions
            and training_info are stored outside, too, and not only initializers of the graph and
            its subgraphs. `load` reads all of them; `onnx.load`, on the unzipped directory, reads
            attributes but not the rest.
        dedupe: Whether identical initializers of a graph become one initializer.
        assets: Further files that the archive carries, by relative path: the bytes themselves, or
            the path of a file.
        progress: Called with the bytes done and the bytes in all, after every few MiB.
        jobs: How many threads to use; None for one for each core. It changes neither the bytes nor
            the error. An `onnx_ir.Model` is saved by the caller's thread alone, since what makes
            its tensors may be the caller's code.

    Raises:
        ArchiveError: An `onnx_ir.Model` was loaded from the archive at `path`, and others have
            edited that since.
        ArchiveFormatError: The model would break a rule: a tensor does not have the bytes that its
            shape needs, or its data is external, or what stays in the model is over 2 GiB.
        UnsupportedFeatureError: There are more tensors to be stored outside than an archive holds.
        ValueError: `alignment`, `size_threshold`, `jobs` or the path of an asset is not allowed, or
            `path` is the file of an asset.
        OSError: The archive cannot be written.
    """
    jobs = threads.require_jobs(jobs)
    temporary = None
    if isinstance(path, str | os.PathLike):
        require_no_input(path, asset_files(assets))
        temporary = os.path.dirname(os.path.realpath(path))
    split, resolve = None, refuse_external
    if not isinstance(model, onnx.ModelProto):
        split = _split(model, size_threshold)
        model, resolve, jobs = split.proto, split.resolve, 1
    plan = plan_archive(
        model,
        resolve=resolve,
        size_threshold=size_threshold,
        convert_attribute=convert_attribute,
        dedupe=dedupe,
        assets=open_assets(assets),
        temporary=temporary,
    )
    if (
        split is None
        or not isinstance(path, str | os.PathLike)
        or not (replaced := split.replaced_archives(path))
    ):
        write_archive(plan, path, alignment=alignment, progress=progress, jobs=jobs)
        return

    def require_current(file: MappedFile | None) -> None:
        for archive in replaced:
            archive._require_current(path, file)

    with write_file(
        plan, path, alignment=alignment, progress=progress, jobs=jobs, require=require_current
    ) as file:
        try:
            split.saved_as(file)
        finally:
            locking.unlock(file.fileno())


def _split(model: onnx_ir.Model, size_threshold: int) -> SplitModel:
    bases = ((base.__module__.split(".")[0], base.__name__) for base in type(model).__mro__)
    if ("onnx_ir", "Model") not in bases:  # found without importing onnx_ir
        raise TypeError(f"expected an onnx.ModelProto or onnx_ir.Model, found {type(model)}")
    from onnxarchive.archive.onnx_ir import split_model

    return split_model(model, size_threshold=size_threshold)
