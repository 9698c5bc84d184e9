"""Models that refer to an archive: the locations of external tensors are keys of the archive."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from itertools import chain

import onnx

from onnxarchive.errors import ArchiveFormatError, Strict
from onnxarchive.files.data import Data
from onnxarchive.files.local_file import MappedFile
from onnxarchive.files.paths import directory_of
from onnxarchive.model import DEFAULT_SIZE_THRESHOLD, tensors
from onnxarchive.model.keys import ASSET_PREFIX, is_key
from onnxarchive.model.tensors import TensorRef
from onnxarchive.reading.archive import Archive, contents_of
from onnxarchive.reading.contents import Contents, EntryData
from onnxarchive.sources.source import Source
from onnxarchive.writing.options import WriteOptions
from onnxarchive.writing.plan import plan_archive
from onnxarchive.writing.write import write_file


def assets_of(contents: Contents) -> dict[str, Data]:
    """The data of an archive's assets by path."""
    return {
        name.removeprefix(ASSET_PREFIX): EntryData(contents, name)
        for name in contents.entries
        if name.startswith(ASSET_PREFIX)
    }


def archive_options(
    contents: Contents,
    models: Iterable[str],
    size_threshold: int | None = None,
    convert_attribute: bool | None = None,
) -> WriteOptions:
    """Options that keep the archive's alignment, and tensors outside its models or in them.

    Args:
        contents: The archive.
        models: Ids of the models whose tensors count.
        size_threshold: Another threshold. None means a threshold that moves no tensor out of a
            model, and as few as possible into models.
        convert_attribute: Another value. None means True if one of the models has an external
            tensor other than an initializer.
    """
    models = list(models)
    refs = chain.from_iterable(contents.models[model].refs.values() for model in models)
    outside_attributes = any(not ref.is_initializer for ref in refs)
    if size_threshold is None:
        inside, outside = -1, DEFAULT_SIZE_THRESHOLD
        for ref in chain.from_iterable(
            tensors.walk(contents.models[model].model) for model in models
        ):
            if not (ref.is_initializer or outside_attributes):
                continue
            key = tensors.location(ref.tensor)
            if key is not None:
                outside = min(outside, contents.entries[key].nbytes)
            elif (nbytes := tensors.stored_nbytes(ref.tensor)) is not None:
                inside = max(inside, nbytes)
        size_threshold = max(inside + 1, outside)
    return WriteOptions(
        size_threshold=size_threshold,
        alignment=contents.alignment,
        convert_attribute=outside_attributes if convert_attribute is None else convert_attribute,
    )


def data_of_entry(contents: Contents, ref: TensorRef) -> EntryData:
    """The bytes of the entry that an external tensor refers to; see `key_of_entry`."""
    return EntryData(contents, key_of_entry(contents, ref))


def key_of_entry(contents: Contents, ref: TensorRef) -> str:
    """The location of an external tensor, which must be a key of the archive.

    Raises:
        ArchiveFormatError: The archive has no such key, the tensor also has data itself, or it does
            not use the whole entry (by offset and length, or by type and shape).
    """
    nbytes = tensors.external_type(ref).nbytes(ref.tensor.dims)
    reference = tensors.external_data(ref, Strict())
    assert reference is not None  # else `Strict` has raised an error
    key = reference.location
    if not (is_key(key) and key in contents.entries):
        raise ArchiveFormatError(
            f"{ref}: expected a key of the archive as the location of external data, found "
            f"{key!r}; store a new tensor's bytes in raw_data"
        )
    stored = contents.entries[key].nbytes
    length = nbytes if reference.length is None else reference.length
    if (reference.offset or 0, length, nbytes) != (0, stored, stored):
        raise ArchiveFormatError(
            f"{ref}: expected all {stored} bytes of entry {key!r}, found offset "
            f"{reference.offset} and length {reference.length}, and {nbytes} bytes by shape and "
            "data type"
        )
    return key


def sources_of(
    contents: Contents,
    models: Mapping[str, onnx.ModelProto],
) -> dict[str, Source]:
    """Models by id that refer to an archive, as sources; the models are not changed."""
    sources: dict[str, Source] = {}
    for identifier, model in models.items():
        data = [data_of_entry(contents, ref) for ref in tensors.external(model)]
        sources[identifier] = Source(model, data)
    return sources


def save_model_of_archive(
    model: onnx.ModelProto,
    archive: Archive,
    path: str | os.PathLike[str],
    options: WriteOptions,
) -> None:
    """Saves a model that refers to an archive, with the archive's other models and assets.

    The model is not changed. If the target is the path of `archive`, the archive is replaced (on
    Windows it is closed before). If another object or process has edited it since it was opened, an
    ArchiveError is raised.
    """
    contents = contents_of(archive)
    models = {**archive.models, archive.model_id: model}
    sources = sources_of(contents, models)
    sources[""].assets = assets_of(contents)
    plan = plan_archive(sources, options, temporary=directory_of(path))

    def require(target: MappedFile | None) -> None:
        contents.require_current(path, target)
        if os.name == "nt" and contents.is_at(path):  # Windows replaces no open file
            archive.close()

    write_file(plan, path, options, require=require).close()
