"""`convert`: archives from models of any kind; weights are copied from file to file, in pieces."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Unpack

from onnxarchive.errors import (
    ArchiveError,
    ArchiveFormatError,
    ChecksumError,
    ObjectChangedError,
    with_path,
)
from onnxarchive.files import locking
from onnxarchive.files.data import Data, File, SupportsWrite
from onnxarchive.files.data_files import DataFiles, spool
from onnxarchive.files.local_file import MappedFile
from onnxarchive.files.paths import directory_of, require_no_input, require_no_tilde
from onnxarchive.files.progress import Progress
from onnxarchive.model import DEFAULT_SIZE_THRESHOLD, model_proto, tensors
from onnxarchive.model.keys import ASSET_PREFIX
from onnxarchive.reading.archive import Archive, contents_of, read_archive
from onnxarchive.reading.archive_file import locked_archive_file, require_finished
from onnxarchive.reading.contents import EntryData
from onnxarchive.reading.damaged_entries import naming_all_damaged
from onnxarchive.remote.location import Access, Location, require_no_digest
from onnxarchive.sources import compiled
from onnxarchive.sources.reader import (
    FollowLinks,
    Repository,
    SourceReader,
    models_of_repository,
)
from onnxarchive.sources.recognition import is_zip, recognised
from onnxarchive.sources.source import Source, sha1, with_cleared_tail
from onnxarchive.writing.archive_models import assets_of
from onnxarchive.writing.options import Asset, WriteOptions
from onnxarchive.writing.plan import plan_archive, with_further_models
from onnxarchive.writing.write import write_archive
from onnxarchive.zipformat import layout


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
        added_files: Paths of the files that the option `other_files` added as assets.
        left_out: Paths of files that were left out. Without the option `other_files`, these are
            compiled binaries that EPContext nodes name and, with `models="all"`, models that were
            not chosen. With `other_files`, all other files that did not become assets are listed,
            too.
        shared_nbytes: Bytes saved by storing equal tensors of several models once.
        attribute_tensors: Number of tensors of `size_threshold` bytes or more in Constant nodes and
            other attributes, which stay in the models without `convert_attribute`.
        attribute_nbytes: Size of these tensors in bytes.
        warnings: Messages about files, bytes and `external_data` of the source that were left out,
            and about unused bits that were cleared (not after a dry run). After `convert_many`,
            also about file attributes that were lost.
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
    added_files: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    shared_nbytes: int = 0
    attribute_tensors: int = 0
    attribute_nbytes: int = 0
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
    `assets/` or `other_files` is True. A warning lists the files that were left out; for a
    directory it omits system files and subfolders. `convert` also warns if it clears unused bits in
    the last byte of a packed tensor, or ignores `external_data` of a tensor that has data in the
    model. A `.onnx` that `onnxarchive.link` wrote is read as any `.onnx` with external data; check
    it first with `onnxarchive.check_link`.

    No data file is read from outside the source's directory, even if somebody renames files at the
    same time. The same holds for the models found in a directory. Symbolic links that lead out of
    the directory are refused, unless `follow_links` allows them. Hard links to files elsewhere
    cannot be detected.

    If the source is an archive, its models and assets are kept, but not its options:
    `size_threshold`, `alignment` and `convert_attribute` are those of this call, or their defaults.

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
        path: The file to write, usually `name.onnxa`; a URL, where the object appears when it is
            complete; or a binary file, which is written in order and need not be seekable.
        models: Other sources by model id, such as `{"decoder": "decoder.onnx"}`, with ids and
            shared tensors as in `save`. Each replaces a model of `source` that has the same id.
            Assets of these other sources are not stored. `"all"` means every `.onnx` in the
            directory `source` and below it, except those of further precisions such as
            `model_fp16.onnx`, and those named `.ONNX`. The id is then the file's name, in lower
            case and with `_` for other characters. The outcome lists the models that are left out;
            `include` chooses others.
        default: With `models="all"`, the default model: its path in the directory, or its file's
            name with or without `.onnx`. None means `model.onnx`, or the only model.
        include: With `models="all"`, a pattern of file names, such as `*_fp16.onnx`, or several
            patterns. Only these files become models, also those in further precisions or named
            `.ONNX`.
        size_threshold: As in `save`.
        alignment: As in `save`. With a multiple of the block size, such as 4096, XFS and Btrfs
            share weights with an aligned data file.
        convert_attribute: As in `save`.
        assets: As in `save`. They replace assets of the source that have the same path.
        other_files: Whether other files of the source's zip or the model's directory, such as
            `tokenizer.json`, become assets with the same paths. With `models="all"`, these are the
            files of the directory `source`. Hidden files, system files such as `Thumbs.db`, other
            models (`*.onnx*`) and weights of other libraries are left out; the outcome lists them.
            The directory of a remote `.onnx` is not read; a warning says so. A compiled binary that
            a node EPContext names (`embed_mode` 0) is added whatever its name. A warning names each
            binary that is left out or missing, or that was not looked for beside a remote `.onnx`.
        verify_checksum: Whether to compare the SHA-1 of each data file with the `checksum` of its
            tensors.
        follow_links: A directory: symbolic links of the source may also lead to files below this
            directory. True allows only links within the model's folder of a Hugging Face cache
            (`models--*`).
        dry_run: Whether to write nothing and only return the outcome.
        progress: As in `save`.
        jobs: As in `save`. With a remote source, `jobs` is 1.
        timeout: As in `save`.
        access: Options for remote sources and targets, as in `open`. If `store` is given, `source`
            and `path` are paths in the store.

    Returns:
        The outcome.

    Raises:
        ArchiveFormatError: The source is not a model; its external data is missing, too short or
            outside its directory; or the model would break a rule.
        ChecksumError: Bytes of the source do not match a checksum. If several entries of a local
            archive do not, the error names all of them.
        UnsupportedFeatureError: A zip is encrypted, or compressed by an unknown method.
        LockedError: The old file at `path` stayed locked until `timeout`, or an archive was edited
            while it was opened.
        ValueError: An option or the path of an asset is not allowed; `path` is one of the source's
            files or begins with `~`; the directory `source` has several models; or with
            `models="all"` two models get the same id, or no model is the default.
        OSError: A file cannot be read, or the archive cannot be written.

    Example:
        onnxarchive.convert("model.onnx", "new.onnxa")
        onnxarchive.convert("model.onnx", "both.onnxa", models={"decoder": "decoder.onnx"})
        # onnxarchive.convert("repository", "all.onnxa", models="all", other_files=True)
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
    repository = None
    sources: Mapping[str, str | os.PathLike[str]]
    if models == "all":
        location = Location.of(source, **access)
        if location.path is None or not os.path.isdir(location.path):
            raise ValueError(
                f'{location.name}: models="all" (--all-models) takes a local directory'
            )
        repository = models_of_repository(location.path, default, include)
        sources = repository.models
    elif default is not None or include is not None:
        raise ValueError('default and include (--default, --include) go with models="all"')
    else:
        sources = with_further_models(source, models)
    conversion = convert_locations(
        {identifier: Location.of(path, **access) for identifier, path in sources.items()},
        Location.of(path, **access),
        options,
        SourceReader(verify_checksum, other_files, follow_links, size_threshold),
        dry_run=dry_run,
        repository=repository,
    )
    for warning in conversion.warnings:
        warnings.warn(f"{conversion.source}: {warning}", stacklevel=2)
    return conversion


def convert_locations(
    sources: Mapping[str, Location],
    target: Location,
    options: WriteOptions,
    reader: SourceReader,
    *,
    dry_run: bool,
    repository: Repository | None = None,
) -> Conversion:
    """Converts models by id, as `convert`, but issues no warnings.

    Warnings are only in `Conversion.warnings`, since the module `warnings` is not thread-safe.
    `repository` is the directory in which the models were found, or None: its other files become
    assets.
    """
    if target.path is not None:
        require_no_tilde(target.path)
    temporary = None if target.path is None or dry_run else directory_of(target.path)
    reader = replace(reader, temporary=temporary)
    if repository is not None:
        reader = replace(reader, tree=repository.path)
    without_others = replace(reader, other_files=False)
    names = {identifier: location.name for identifier, location in sources.items()}
    # What is found when the models are planned and written may be a fault of any of them.
    together = ", ".join(names.values()) if repository is None else repository.path
    with contextlib.ExitStack() as resources, naming_all_damaged(), with_path(together):
        data_files = resources.enter_context(DataFiles())
        models: dict[str, Source] = {}
        for identifier, location in sources.items():
            if location.url is not None:
                options = replace(options, jobs=1)
            with with_path(names[identifier]):
                models[identifier] = open_source(
                    location, resources, without_others if identifier else reader, data_files
                )
        default = models[""]
        models = {**default.further, **models}
        files = [file for model in models.values() for file in model.files]
        directory = default.directory if repository is None else repository.directory
        if reader.other_files and directory is not None:
            reader.add_others(default, directory, files, models.values(), data_files)
            files += default.files
        if target.path is not None:
            require_no_input(target.path, [*files, *options.asset_files])
        plan = plan_archive(models, options, temporary=temporary)
        nbytes = plan.size(options.alignment) if dry_run else write_archive(plan, target, options)
        assets = options.assets or {}
        left_out, notes = _left_out(models, {*default.assets, *assets}, directory, repository)
        count = len([item for item in plan.items if not item.name.startswith(ASSET_PREFIX)])
        return Conversion(
            source=names[""],
            target=target.name,
            nbytes=nbytes,
            tensors=count,
            assets=len(plan.items) - count,
            added_files=tuple(name for name in default.others if name not in assets),
            left_out=left_out,
            shared_nbytes=plan.shared_nbytes,
            attribute_tensors=len(plan.attributes),
            attribute_nbytes=sum(plan.attributes),
            warnings=notes,
        )


def _left_out(
    models: Mapping[str, Source],
    stored: Collection[str],
    directory: str | None,
    repository: Repository | None,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The files that a conversion left out, sorted, and its warnings.

    Args:
        models: The converted models by id.
        stored: The paths of the archive's assets.
        directory: The directory whose other files may become assets; None if there is none.
        repository: The directory in which the models were found; None if they were named.
    """
    default = models[""]
    notes: list[str] = []
    for model in models.values():
        notes += model.warnings
        if model.cleared:
            notes.append(model.note_of_cleared())
    further = [model for model in models.values() if model is not default]
    binaries, of_binaries = compiled.not_stored(default, further, directory, stored)
    notes += of_binaries
    left_out = {*default.left_out, *binaries}
    for name in () if repository is None else repository.left_out:
        if name.removeprefix(ASSET_PREFIX) not in stored:
            left_out.add(name)
    return tuple(sorted(left_out)), tuple(notes)


def open_source(
    location: Location,
    resources: contextlib.ExitStack,
    reader: SourceReader,
    data_files: DataFiles | None = None,
) -> Source:
    """Opens the source of a conversion.

    Args:
        location: An archive, a `.onnx`, or a directory or zip with one model; or the URL of such a
            file.
        resources: Closes the opened files when all data was read.
        reader: Reads sources of other tools. Its temporary files hold the inflated files of a zip,
            a remote file other than an archive, and one large remote tensor at a time.
        data_files: Opens the data files, once for several sources; None for this source alone.
    """
    if data_files is None:
        data_files = resources.enter_context(DataFiles())
    path = location.path
    if path is not None and os.path.isdir(path):
        return reader.read_directory(path, data_files)
    file = resources.enter_context(location.open())
    if isinstance(file, MappedFile):
        reader.require_in_tree(file)
    with recognised(path, expected="a model"):
        # A file that is no archive needs no lock.
        if path is not None and isinstance(file, MappedFile) and not is_zip(file.read(0, 4)):
            return reader.read_onnx(file, data_files)
        file, archive = _open_archive(location, file, reader)
        resources.enter_context(file)  # perhaps another one
        if archive is not None:
            # Closing it ends the stream of a remote file.
            return _source(resources.enter_context(archive), reader.verify_checksum)
        view = file.view() if path is not None else _copy(file, reader.temporary)
        if is_zip(view):
            source = reader.read_zip(view)
            source.files = () if path is None else (path,)
            return source

        def open_beside(path: str) -> File | None:
            with contextlib.suppress(FileNotFoundError):
                return resources.enter_context(location.open_beside(path))
            return None

        return reader.read_remote(view, open_beside)


def _copy(file: File, temporary: str | None) -> memoryview:
    """A temporary copy of a remote file, if it may be a model or a zip."""
    if file.size >= model_proto.SIZE_LIMIT and not is_zip(file.read(0, 4)):
        raise ArchiveFormatError(
            f"expected an archive, a zip or a .onnx of less than {model_proto.SIZE_LIMIT} bytes,"
            f" found a file of {file.size} bytes that does not begin as a zip"
        )
    return spool(map(memoryview, file.pieces(0, file.size)), file.size, temporary)


def _open_archive(
    location: Location, file: File, reader: SourceReader
) -> tuple[File, Archive | None]:
    """Reads an archive, a local one while it is locked, and checks all local headers.

    Returns:
        The file, or the one that has replaced it before it could be locked; and the archive, or
        None for other files.
    """
    locked: contextlib.AbstractContextManager[File] = contextlib.nullcontext(file)
    if location.path is not None and isinstance(file, MappedFile):
        locked = locked_archive_file(location, expected="a model", file=file)
    with locked as readable:
        if isinstance(readable, MappedFile):
            reader.require_in_tree(readable)
        # The error is not left to `locked`, which would close the file, and read it once more to
        # say what it is.
        try:
            archive = read_archive(readable)
            # Those of a file that is not mapped are compared when the data is read.
            for name in archive.entries if readable.is_mapped else ():
                contents_of(archive).require_header(name)
        except ArchiveError as error:
            # VERSION-1: a conversion could lose data of a later format version.
            if error.rule == "VERSION-1" or isinstance(error, ObjectChangedError):
                raise
            if location.path is not None and isinstance(readable, MappedFile):
                require_finished(readable)
            return readable, None
    return readable, archive


def _source(archive: Archive, verify_checksum: bool) -> Source:
    contents = contents_of(archive)

    def source(identifier: str) -> Source:
        tensors_data: list[Data] = []
        cleared: dict[str, str] = {}
        # In the order of `tensors.walk`.
        for key, ref in contents.models[identifier].refs.items():
            data = EntryData(contents, key)
            expected = tensors.checksum(ref.tensor) if verify_checksum else None
            if expected is not None and (actual := sha1(data)) != expected:
                raise ChecksumError(
                    f"{ref}: expected SHA-1 {expected}, found {actual}", rule="DATA-6", entry=key
                )
            tensors_data.append(with_cleared_tail(data, ref, cleared))
        return Source(archive.models[identifier], tensors_data, is_own=True, cleared=cleared)

    default, *further = archive.models
    whole = source(default)
    whole.assets = assets_of(contents)
    if isinstance(contents.file, MappedFile):
        whole.files = (archive.path,)
    whole.further = {identifier: source(identifier) for identifier in further}
    return whole
