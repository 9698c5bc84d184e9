"""`convert`, `export` and `extract`: archives from models of any kind, and models from archives.

All three copy weights from file to file, in pieces.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Literal, Unpack

from onnxarchive.conversion.sources import open_source
from onnxarchive.errors import Strict, UnsupportedFeatureError, with_path
from onnxarchive.files import locking
from onnxarchive.files.data import Data, SupportsWrite, crc32, pieces
from onnxarchive.files.file_data import FileData, spool
from onnxarchive.files.filesystem import directory_of, require_no_input, require_space
from onnxarchive.files.local_file import PositionalWriter, make_file
from onnxarchive.files.locking import Work
from onnxarchive.files.progress import Progress, ProgressCounter
from onnxarchive.files.replacement import Replacement, new_directory, replacing
from onnxarchive.model import DEFAULT_SIZE_THRESHOLD, proto, weights
from onnxarchive.model.keys import ASSET_PREFIX, model_entry
from onnxarchive.reading.archive import Archive, complete_model
from onnxarchive.reading.archive_file import opened
from onnxarchive.reading.contents import check_crc32
from onnxarchive.reading.linked_models import linked_model, stays_outside
from onnxarchive.remote.location import Access, Location, require_local_target
from onnxarchive.sources.models import (
    FollowLinks,
    SourceOptions,
    SourceReader,
    models_of_repository,
)
from onnxarchive.sources.source import Source
from onnxarchive.writing.options import Asset, WriteOptions
from onnxarchive.writing.plan import Item, plan_archive, with_further_models
from onnxarchive.writing.write import write_archive
from onnxarchive.zipformat import layout

# ONNX's document on external data: offsets should be multiples of the page size.
_PAGE_SIZE = 4096


@dataclass(frozen=True, slots=True)
class Conversion:
    """The outcome of one conversion.

    Attributes:
        source: The model to convert.
        target: The archive; `"-"` if it was written to an open file.
        error: The error message if the conversion failed, else None.
        nbytes: Size of the archive in bytes; None if the conversion failed or was skipped.
        tensors: Number of tensors stored outside the models; a shared tensor counts once.
        assets: Number of assets.
        taken: Paths of the files that the option `other_files` added as assets.
        left_out: Paths of the files that the option `other_files` left out; empty without this
            option.
        shared_nbytes: Bytes saved by storing equal tensors of several models once.
        warnings: Messages about files, bytes and `external_data` of the source that were left out,
            about unused bits that were cleared (not after a dry run) and, after `convert_many`,
            about file attributes that were lost.
        is_skipped: True if `convert_many` skipped the model, since the archive exists.
        error_type: Name of the type of the error, such as `"OSError"`; None without an error, and
            for some errors of `convert_many`, such as two models with the same target.

    Example:
        outcome = onnxarchive.convert("model.onnx", "new.onnxa", dry_run=True)
        print(outcome.nbytes, outcome.tensors)
    """

    source: str
    target: str
    error: str | None = None
    nbytes: int | None = None
    tensors: int = 0
    assets: int = 0
    taken: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    shared_nbytes: int = 0
    warnings: tuple[str, ...] = ()
    error_type: str | None = None
    is_skipped: bool = False


def convert(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str] | SupportsWrite,
    *,
    models: Mapping[str, str | os.PathLike[str]] | Literal["all"] | None = None,
    default: str | None = None,
    include: str | Collection[str] | None = None,
    size_threshold: int = DEFAULT_SIZE_THRESHOLD,
    alignment: int = layout.MIN_ALIGNMENT,
    convert_attribute: bool = False,
    assets: Mapping[str, Asset] | None = None,
    other_files: bool = False,
    verify_checksum: bool = False,
    follow_links: FollowLinks = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    jobs: int | None = None,
    timeout: float | None = locking.TIMEOUT,
    **access: Unpack[Access],
) -> Conversion:
    """Converts a model to an archive.

    Sources are recognised by content, not by extension. Weights are streamed. The source is not
    changed. In a zip or a directory, files that no tensor uses are left out, unless they are below
    `assets/` or `other_files` is True. A warning lists the files that were left out; the warning
    for a directory omits system files and subfolders. Other warnings tell of unused bits in the
    last byte of a packed tensor, which were cleared, and of `external_data` beside data in the
    model, which was left out. A `.onnx` that `onnxarchive.link` wrote is
    read as any `.onnx` with external data; check it first with `onnxarchive.check_link`.

    No data file is read from outside the source's directory, even if somebody renames files at the
    same time. Symbolic links that lead out of this directory are refused, unless `follow_links`
    allows them. Hard links to files elsewhere cannot be detected.

    An archive as the source keeps its models and assets, but not its options: `size_threshold`,
    `alignment` and `convert_attribute` are those of this call, also if they are not given.
    `onnxarchive.writing.options.WriteOptions` has more about them.

    Args:
        source: A `.onnx` with external data in its directory or below; a directory or a zip that
            holds one model (`__MODEL_PROTO` or one `.onnx`) and its data files, such as PyTorch
            1.x's ZIP_ARCHIVE, COMPRESSED_ZIP_ARCHIVE and DIRECTORY exports; an unzipped archive; an
            archive, to rewrite it; or the URL of a `.onnx`, zip or archive. Compressed models, and
            tensors in compressed files, are inflated to temporary files. A remote archive is
            streamed. A remote `.onnx` or zip is copied to a temporary file. The large tensors of
            remote external data are copied to temporary files one at a time. Temporary files are in
            the directory of `path`; if `path` is not local, or with `dry_run`, they are in the
            system's temporary directory.
        path: The file to write, usually `name.onnxa`; a URL (the object appears once complete);
            or a binary file (written in order; need not be seekable).
        models: Other sources by model id, such as `{"decoder": "decoder.onnx"}`. Each replaces a
            model of `source` that has the same id. An id is `[a-z][a-z0-9_]*` of at most 64 bytes.
            A tensor outside the models is stored once, even if several models have a tensor of the
            same data type, dims and bytes. Assets of these other sources are not stored. `"all"`
            means every `.onnx` in the directory `source` and below it, except those of further
            precisions such as `model_fp16.onnx`; the id is the file's name, in lower case and with
            `_` for other characters.
        default: With `models="all"`, the default model: its path in the directory, or its file's
            name with or without `.onnx`. None means `model.onnx`, or the only model.
        include: With `models="all"`, a pattern of file names, such as `*_fp16.onnx`, or several:
            only these files become models.
        size_threshold: Initializers of this many bytes or more are stored outside the model.
        alignment: The data of every entry begins at a multiple of this many bytes.
        convert_attribute: Whether all tensors of `size_threshold` bytes or more are stored outside
            the model, not only initializers.
        assets: Other files for the archive, by relative path: their bytes, or the path of a file.
            They replace assets of the source that have the same path.
        other_files: Whether other files of the source's zip or the model's directory, such as
            `tokenizer.json`, become assets with the same paths. Hidden files, system files such as
            `Thumbs.db`, other models (`*.onnx*`) and weights of other libraries are left out; the
            outcome lists them. The directory of a remote `.onnx` is not read; a warning says so.
            With `models="all"`, those of the directory `source`.
        verify_checksum: Whether to compare the SHA-1 of each data file with the `checksum` of its
            tensors.
        follow_links: A directory: symbolic links of the source may also lead to files below this
            directory. True allows only links within the model's folder of a Hugging Face cache
            (`models--*`).
        dry_run: Whether to write nothing and only return the outcome.
        progress: Called with the bytes done and the bytes in all; True shows a bar.
        jobs: Number of threads; None for one per core. One thread writes; the others read and
            verify up to `jobs` tensors ahead, 96 MiB at most. With a remote source, `jobs` is 1.
        timeout: Seconds to wait if another process has locked the old file at `path`; None waits
            without limit.
        access: Options for remote sources and targets; see `open`. If `store` is given,
            `source` and `path` are paths in the store.

    Returns:
        The outcome.

    Raises:
        ArchiveFormatError: The source is not a model, its external data is missing, too short or
            outside its directory, or the model would break a rule.
        ChecksumError: Bytes of the source do not match a checksum.
        UnsupportedFeatureError: A zip is encrypted, or compressed by an unknown method.
        LockedError: The old file at `path` stayed locked until `timeout`, or an archive was edited
            while it was opened.
        ValueError: An option or the path of an asset is not allowed, `path` is one of the source's
            files, or with `models="all"` two models get the same id, or no model is the default.
        OSError: A file cannot be read, or the archive cannot be written.

    Example:
        onnxarchive.convert("model.onnx", "new.onnxa")
        onnxarchive.convert("model.onnx", "both.onnxa", models={"decoder": "decoder.onnx"})
        # onnxarchive.convert("repository", "all.onnxa", models="all", other_files=True)
    """
    options = WriteOptions(
        size_threshold=size_threshold,
        alignment=alignment,
        convert_attribute=convert_attribute,
        assets=assets,
        progress=progress,
        jobs=jobs,
        timeout=timeout,
    )
    repository = None
    sources: Mapping[str, str | os.PathLike[str]]
    if models == "all":
        location = Location.of(source, **access)
        repository = location.path
        if repository is None or not os.path.isdir(repository):
            raise ValueError(
                f'{location.name}: expected a local directory for models="all" (--all-models)'
            )
        sources = models_of_repository(repository, default, include)
    elif default is not None or include is not None:
        raise ValueError('default and include (--default, --include) go with models="all"')
    else:
        sources = with_further_models(source, models)
    conversion = convert_silently(
        {identifier: Location.of(path, **access) for identifier, path in sources.items()},
        Location.of(path, **access),
        options,
        SourceOptions(verify_checksum, other_files, follow_links),
        dry_run=dry_run,
        repository=repository,
    )
    for warning in conversion.warnings:
        warnings.warn(f"{conversion.source}: {warning}", stacklevel=2)
    return conversion


def convert_silently(
    sources: Mapping[str, Location],
    target: Location,
    options: WriteOptions,
    reading: SourceOptions,
    *,
    dry_run: bool,
    repository: str | None = None,
) -> Conversion:
    """Converts models by id, as `convert`, but issues no warning about what was left out.

    Such warnings are only in `Conversion.warnings`, since the module `warnings` is not thread-safe.
    `repository` is the directory whose other files become assets, if it is not the default model's.
    """
    if any(source.url is not None for source in sources.values()):
        options = replace(options, jobs=1)
    temporary = None if target.path is None or dry_run else directory_of(target.path)
    reading = replace(reading, temporary=temporary)
    without_others = replace(reading, other_files=False)
    with contextlib.ExitStack() as resources, with_path(sources[""].name):
        models: dict[str, Source] = {}
        for identifier, location in sources.items():
            is_alone = not identifier and repository is None
            with with_path(location.name):
                models[identifier] = open_source(
                    location, resources, reading if is_alone else without_others
                )
        default = models[""]
        models = {**default.further, **models}
        files = [file for model in models.values() for file in model.files]
        if reading.other_files and repository is not None:
            SourceReader(resources, reading).add_others(default, repository)
            converted = {os.path.realpath(file) for file in files}
            default.left_out = tuple(
                name
                for name in default.left_out
                if os.path.realpath(os.path.join(repository, name)) not in converted
            )
        if target.path is not None:
            require_no_input(target.path, [*files, *options.asset_files])
        taken = _without_data_files(default.others, models.values())
        assets = [
            Item(ASSET_PREFIX + name, data)
            for name, data in chain(default.assets.items(), taken.items())
        ]
        plan = plan_archive(models, options, assets=assets, temporary=temporary)
        nbytes = plan.size(options.alignment) if dry_run else write_archive(plan, target, options)
        count = len([None for name, _ in plan.items if not name.startswith(ASSET_PREFIX)])
        return Conversion(
            source=sources[""].name,
            target=target.name,
            nbytes=nbytes,
            tensors=count,
            assets=len(plan.items) - count,
            taken=tuple(name for name in taken if name not in (options.assets or {})),
            left_out=default.left_out,
            shared_nbytes=plan.shared_nbytes,
            warnings=tuple(note for model in models.values() for note in model.notes()),
        )


def _without_data_files(files: Mapping[str, Data], models: Iterable[Source]) -> dict[str, Data]:
    """The files that hold no tensor of the models."""
    if not files:
        return {}
    data_of_models = chain.from_iterable(model.data for model in models)
    used = {data.identity for data in data_of_models if isinstance(data, FileData)}
    return {
        name: data
        for name, data in files.items()
        if not (isinstance(data, FileData) and data.identity in used)
    }


def export(
    path: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    model: str = "",
    external_data: str | None = None,
    progress: Progress | None = None,
    timeout: float | None = locking.TIMEOUT,
    **access: Unpack[Access],
) -> None:
    """Writes a model of an archive as a `.onnx`; weights are streamed.

    Args:
        path: The archive, or its URL.
        destination: The `.onnx`.
        model: Id of the model, such as `"decoder"`; `""` for the default one.
        external_data: Name of a file beside `destination` for the large tensors; each begins at a
            multiple of 4096 bytes. The `.onnx` holds the tensors that `link` copies to a link, such
            as the shape of a Reshape. None stores all in the `.onnx`, which must stay under 2 GiB.
        progress: Called with the bytes done and the bytes in all, every few MiB; True shows a bar.
            Tensors of a single `.onnx` count twice, since they are verified and then written.
        timeout: Seconds to wait if another process has locked a file to replace; None waits without
            limit.
        access: Options for a remote archive; see `open`. Without a copy in a cache, tensors for a
            single `.onnx` are copied to a temporary file first.

    Raises:
        ArchiveFormatError: The archive breaks a rule.
        ModelNotFoundError: There is no model of this id.
        ChecksumError: The bytes of a model or tensor do not match their CRC-32.
        UnsupportedFeatureError: The `.onnx` would take 2 GiB or more, or `destination` is a URL.
        LockedError: A file to replace stayed locked until `timeout`, or the archive was edited
            while it was opened.
        ValueError: `external_data` is not a file name, or names `destination`; or a written file
            would replace the archive.
        OSError: The archive cannot be read, or a file cannot be written.

    Example:
        onnxarchive.export("model.onnxa", "single.onnx")
        onnxarchive.export("model.onnxa", "large.onnx", external_data="large.data")
    """
    locking.require_timeout(timeout)
    require_local_target(destination)
    source = Location.of(path, **access)
    require_no_input(destination, [source.path])
    if external_data is None:
        with _opened(source, model) as (archive, models):
            _export_single(archive, models[model_entry(model)], destination, progress, timeout)
        return
    beside = _beside(destination, external_data)
    require_no_input(beside, [source.path])
    if os.path.realpath(beside) == os.path.realpath(destination):
        raise ValueError(
            f"expected external_data to be another file than {os.fspath(destination)}, found "
            f"{beside}, which is the same file"
        )
    with _opened(source, model) as (archive, _):
        _export_external(archive, destination, external_data, progress, timeout)


@contextlib.contextmanager
def _opened(source: Location, model: str | None) -> Iterator[tuple[Archive, dict[str, memoryview]]]:
    """Opens an archive, and reads one or all models before the block runs.

    While the block runs, an edit may overwrite the models in the file.

    Args:
        source: The archive.
        model: Id of the model; None for all.

    Yields:
        The archive, and the models' bytes by entry name.
    """
    with opened(source) as file:
        archive = Archive(file, model=model or "")
        ids = archive.models if model is None else (model,)
        models = {name: archive.read(name) for name in map(model_entry, ids)}
    with archive, with_path(archive.path):
        yield archive, models


def _beside(destination: str | os.PathLike[str], external_data: str) -> str:
    directory, name = os.path.split(os.fspath(destination))
    is_plain = os.path.basename(external_data) == external_data and "\\" not in external_data
    if not is_plain or external_data in ("", ".", "..", name):
        raise ValueError(
            f"expected external_data=NAME (--external-data) to be another file beside {name!r}, "
            f"found {external_data!r}"
        )
    return os.path.join(directory, external_data)


def _export_single(
    archive: Archive,
    model_proto: memoryview,
    destination: str | os.PathLike[str],
    progress: Progress | None,
    timeout: float | None,
) -> None:
    names = (model_entry(archive.model_id), *archive.tensors.refs)
    total = sum(archive.entries[name].nbytes for name in names)
    if total >= proto.SIZE_LIMIT:
        raise UnsupportedFeatureError(
            f"expected less than {proto.SIZE_LIMIT} bytes, the limit of a single .onnx, found "
            f"{total}; export with external_data='NAME.data' (--external-data NAME.data)"
        )
    is_mapped = archive.contents.file.is_mapped
    read = archive.read if is_mapped else _copied(archive, directory_of(destination))
    filled: set[str] = set()

    def fill_in(key: str) -> memoryview:
        filled.add(key)
        return read(key)

    parts = weights.fill(model_proto, fill_in)
    if filled != set(archive.tensors.refs):
        # If a singular field occurs twice, protobuf merges both messages, and `fill` skips the
        # tensors in them.
        parts = [proto.serialize(complete_model(archive))]
    # Tensors are read twice: for their CRC-32, and to be written.
    verified = sum(archive.entries[key].nbytes for key in archive.tensors.refs)
    counter = ProgressCounter(progress, verified + sum(map(len, parts)))
    for key in archive.tensors.refs:
        data = read(key)
        check_crc32(archive.entries[key], data.nbytes, crc32(data), Strict())
        counter.add(data.nbytes)
    with replacing(destination, timeout=timeout) as replacement:
        require_space(destination, sum(map(len, parts)))
        for part in parts:
            for piece in counter(pieces(part)):
                replacement.file.write(piece)


def _copied(archive: Archive, directory: str) -> Callable[[str], memoryview]:
    """Copies a model's tensors to a temporary file; returns a function that reads them by key."""
    keys = list(archive.tensors.refs)
    sizes = [archive.entries[key].nbytes for key in keys]
    verified = chain.from_iterable(archive.contents.pieces(key) for key in keys)
    copy = spool(verified, sum(sizes), directory)
    begins = dict(zip(keys, accumulate(sizes, initial=0), strict=False))
    return lambda key: copy[begins[key] : begins[key] + archive.entries[key].nbytes]


def _export_external(
    archive: Archive,
    destination: str | os.PathLike[str],
    external_data: str,
    progress: Progress | None,
    timeout: float | None,
) -> None:
    offsets, nbytes = _offsets(archive)
    serialized = proto.serialize(
        linked_model(archive, external_data, offsets=offsets, in_place=True)
    )
    beside = _beside(destination, external_data)
    data_replacement = Replacement(beside, timeout=timeout)
    try:
        require_space(beside, nbytes + len(serialized))
        counter = ProgressCounter(progress, sum(archive.entries[key].nbytes for key in offsets))
        for key, offset in offsets.items():
            data_replacement.file.offset = offset
            for piece in counter(archive.contents.pieces(key)):
                data_replacement.file.write(piece)
        # The data is renamed just before the model. In between, the old model has new data, so the
        # model is locked before.
        with replacing(
            destination, require=lambda _: data_replacement.commit(), timeout=timeout
        ) as replacement:
            replacement.file.write(serialized)
    except BaseException:
        data_replacement.discard()
        raise


def _offsets(archive: Archive) -> tuple[dict[str, int], int]:
    """Offsets by key of the tensors in a file of external data, and the file's size in bytes."""
    offsets: dict[str, int] = {}
    end = 0
    for entry in archive.entries.values():
        ref = archive.tensors.refs.get(entry.name)
        if ref is not None and stays_outside(ref, entry.nbytes):
            offsets[entry.name] = end + -end % _PAGE_SIZE
            end = offsets[entry.name] + entry.nbytes
    return offsets, end


def extract(
    path: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    progress: Progress | None = None,
    **access: Unpack[Access],
) -> None:
    """Unzips an archive to a directory of ONNX external data.

    Tools that read ONNX external data can open the directory's `__MODEL_PROTO`, and further models
    such as `__MODEL_PROTO_decoder`. ONNX Runtime refuses a model that has the values of a shape
    outside, such as the sizes of a Split in 128 or more parts, or nearly any model of an archive
    with `size_threshold=0`; it reads what `export` and `link` write.

    A new directory appears when it is complete. An empty one, such as the working directory, is
    filled at the end. After an error the directory is missing or empty, as before.

    Args:
        path: The archive, or its URL.
        directory: The directory to create or, if it exists and is empty, to fill.
        progress: Called with the bytes done and the bytes in all, every few MiB; True shows a bar.
        access: Options for a remote archive; see `open`.

    Raises:
        ArchiveFormatError: The archive breaks a rule.
        ChecksumError: The bytes of an entry do not match their CRC-32.
        UnsupportedFeatureError: `directory` is a URL.
        OSError: The archive cannot be read, the directory is not empty, or a file or directory
            cannot be written.

    Example:
        onnxarchive.extract("model.onnxa", "unzipped")
        model = onnx.load("unzipped/__MODEL_PROTO")
    """
    require_local_target(directory)
    source = Location.of(path, **access)
    with _opened(source, None) as (archive, models), new_directory(directory) as made:
        total = sum(entry.nbytes for entry in archive.entries.values())
        require_space(directory, total, made)
        counter = ProgressCounter(progress, total)
        work = Work()
        for name in archive.entries:
            work.require_own()  # a forked process would write into the same directory
            target = os.path.join(made, *name.split("/"))
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with make_file(target) as file:
                target_writer = PositionalWriter(file)
                content = pieces(models[name]) if name in models else archive.contents.pieces(name)
                for piece in counter(content):
                    target_writer.write(piece)
                file.flush()
