"""Finds the models of directories and stores, and converts them, perhaps in workers."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import unicodedata
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Executor, Future, as_completed
from dataclasses import dataclass, replace as with_changes
from functools import partial
from typing import Unpack

from onnxarchive.conversion.convert import Conversion, convert_locations
from onnxarchive.errors import ArchiveError, UnsupportedFeatureError, describe_error, quoted
from onnxarchive.files import attributes
from onnxarchive.files.paths import is_below, require_file_names, require_no_tilde
from onnxarchive.model import DEFAULT_SIZE_THRESHOLD
from onnxarchive.model.keys import MODEL_PROTO, PLAIN_PATH, is_plain_path
from onnxarchive.remote.location import Access, Location, require_no_digest
from onnxarchive.sources.reader import SNAPSHOTS, FollowLinks, SourceReader, is_cached_model
from onnxarchive.sources.recognition import is_model_file
from onnxarchive.writing.options import Asset, WriteOptions
from onnxarchive.writing.plan import open_assets
from onnxarchive.zipformat import layout

_ARCHIVE_SUFFIX = ".onnxa"
_MODEL_SUFFIXES = (".onnx", _ARCHIVE_SUFFIX)  # other files are skipped unless they hold a model
_SUFFIXES = (*_MODEL_SUFFIXES, ".zip", ".pb")


@dataclass(frozen=True, slots=True)
class _Task:
    """A model to convert.

    Attributes:
        source: The model.
        target: The archive to make of it.
        error: The error message if this is impossible, else None.
        tree: The local directory in which the model was found; None if the caller has named it.
    """

    source: Location
    target: Location
    error: str | None = None
    tree: str | None = None


class _Cancellation:
    """The progress callback of conversions in an executor; ends them once `is_set` is True.

    In another process it is a copy, which does not change after it was sent.

    Attributes:
        is_set: True if the conversions are to end.
    """

    is_set = False

    def __call__(self, done: int, total: int) -> None:
        if self.is_set:
            raise CancelledError(f"cancelled after {done} of {total} bytes")


def convert_many(
    sources: Iterable[str | os.PathLike[str]],
    out_dir: str | os.PathLike[str],
    executor: Executor | None = None,
    *,
    replace: bool = True,
    on_done: Callable[[Conversion, int, int], None] | None = None,
    size_threshold: int = DEFAULT_SIZE_THRESHOLD,
    alignment: int = layout.MIN_ALIGNMENT,
    convert_attribute: bool = False,
    assets: Mapping[str, Asset] | None = None,
    other_files: bool = False,
    verify_checksum: bool = False,
    follow_links: FollowLinks = False,
    dry_run: bool = False,
    jobs: int | None = None,
    skip_existing: bool = False,
    **access: Unpack[Access],
) -> list[Conversion]:
    """Converts many models to archives; a failure does not stop the other conversions.

    See `convert` for what is kept of a source.

    Args:
        sources: Models, and directories to search for models, or URLs of these. A model that is
            found twice is converted once. Archives that the search finds below `out_dir` are
            skipped.
        out_dir: Directory for the archives (created if missing), or a URL. Each archive keeps the
            model's path relative to the source, with the suffix `.onnxa`.
        executor: Any `concurrent.futures.Executor` to run the conversions, such as a
            `ThreadPoolExecutor`, or one of Dask for many machines. Workers on other machines need
            the same files at the same paths, and receive `access`. None runs one conversion after
            another. If this function is interrupted, or `on_done` raises an error, conversions that
            have not begun are cancelled. Conversions in threads of this process then soon end, with
            their targets complete or unchanged; conversions in other processes are completed.
        replace: Whether to replace archives that exist. If False, a conversion fails if its archive
            exists, unless `skip_existing` is True.
        on_done: Called after each conversion with its outcome, the number of finished conversions,
            and the number of all conversions.
        size_threshold: As in `save`.
        alignment: As in `convert`.
        convert_attribute: As in `save`.
        assets: As in `convert`, for each archive.
        other_files: As in `convert`.
        verify_checksum: As in `convert`.
        follow_links: As in `convert`, also for the models that are found in a directory. In a
            Hugging Face cache only snapshots are converted.
        dry_run: Whether to write nothing and only return the outcomes.
        jobs: Number of threads of each conversion, as in `save`; but with an executor, None means a
            single thread.
        skip_existing: Whether to skip models whose archives exist; their outcomes have
            `is_skipped`. True continues an interrupted run, since an archive appears only when it
            is complete.
        access: Options for remote sources and targets, as in `convert`.

    Returns:
        The outcome of each conversion, in the order in which the models were found; a failure has
        an `error`. An unreadable source and a directory without models are failures, too.

    Raises:
        TypeError: `sources` is a single path or URL instead of a list.
        ValueError: An option or the path of an asset is not allowed, or `out_dir` begins with `~`.
        OSError: `out_dir` cannot be created, or an asset cannot be opened.

    Example:
        for outcome in onnxarchive.convert_many(["model.onnx", "decoder.onnx"], "archives"):
            print(outcome.target, outcome.error)
    """
    if isinstance(sources, str | bytes | os.PathLike):
        raise TypeError("expected a list of sources, found a single source; pass [source]")
    require_no_digest(access)
    open_assets(assets)  # raises a fault of an asset once, not for each model
    cancellation = _Cancellation()
    options = WriteOptions(
        size_threshold=size_threshold,
        alignment=alignment,
        convert_attribute=convert_attribute,
        assets=_absolute(assets),
        progress=None if executor is None else cancellation,
        jobs=1 if jobs is None and executor is not None else jobs,
    )
    folder = Location.of(out_dir, **access)
    if folder.path is not None:
        require_no_tilde(folder.path)
        if os.path.exists(folder.path) and not os.path.isdir(folder.path):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder.path)
        folder = folder.at(os.path.realpath(folder.path))
        if not dry_run:
            os.makedirs(folder.require_local(), exist_ok=True)
    met: set[str] = set()
    tasks = [task for source in sources for task in _tasks(folder.at(source), folder, met)]
    outcomes: dict[int, Conversion] = {}
    if not isinstance(follow_links, bool):
        follow_links = os.path.abspath(Location.of(follow_links).require_local())
    convert = partial(
        convert_one,
        options=options,
        replace=replace,
        skip_existing=skip_existing,
        reader=SourceReader(verify_checksum, other_files, follow_links, size_threshold),
        dry_run=dry_run,
    )
    with contextlib.closing(_outcomes(tasks, convert, executor, cancellation)) as found:
        for index, conversion in found:
            outcomes[index] = conversion
            if on_done is not None:
                on_done(conversion, len(outcomes), len(tasks))
    return [outcomes[index] for index in range(len(tasks))]


def _outcomes(
    tasks: Iterable[_Task],
    convert: Callable[[Location, Location, str | None], Conversion],
    executor: Executor | None,
    cancellation: _Cancellation,
) -> Generator[tuple[int, Conversion], None, None]:
    """Runs conversions, and yields each outcome with its index.

    Closing the iterator cancels the conversions that are not done; so does an interrupt.
    """
    sources: dict[str, Location] = {}  # by target
    futures: dict[Future[Conversion], tuple[int, Location, Location]] = {}
    try:
        for index, task in enumerate(tasks):
            source, target, error = task.source, task.target, task.error
            if error is None:
                other = sources.setdefault(_comparable(target), source)
                if other.address != source.address:
                    same = f"{other.name} has the same target {target.name}"
                    error = f"{same}; convert one of them to another directory"
            if error is not None:
                yield index, _failure(source, target, error)
            elif executor is None:
                yield index, convert(source, target, task.tree)
            else:
                try:
                    future = executor.submit(convert, source, target, task.tree)
                    futures[future] = index, source, target
                except RuntimeError as refusal:  # its workers are dead, or it was shut down
                    error = f"the executor accepts no more work: {refusal}"
                    yield index, _failure(source, target, error)
        for future in as_completed(futures):
            index, source, target = futures[future]
            try:
                yield index, future.result()
            except Exception as failure:  # an error of the executor; conversions return theirs
                yield index, _failure(source, target, f"the worker failed: {failure!r}")
    finally:
        cancellation.is_set = True
        for future in futures:
            future.cancel()  # does nothing to one that is done


def _comparable(target: Location) -> str:
    """The address of a target, equal for two paths that may be one file on this system."""
    if target.path is not None and sys.platform == "darwin":
        # Most volumes of macOS compare names without case, and accents in any form.
        return unicodedata.normalize("NFD", target.address).casefold()
    return os.path.normcase(target.address)


def _tasks(source: Location, folder: Location, met: set[str]) -> Iterator[_Task]:
    """Yields a task for each model of a source.

    Yields tasks with an error for a model whose path is not allowed, for a source or folder that
    cannot be read, and for a source without models. `met` has the addresses of models that are
    converted already.
    """
    faults: list[_Task] = []
    tree = None
    if source.path is not None and os.path.isdir(source.path):
        tree = os.path.abspath(source.path)

    def note(error: Exception) -> None:
        faults.append(_fault(source, folder, error))

    has_model = False
    try:
        for address, relative in _models(source, note):
            if _is_made(address, source, folder):
                continue
            has_model = True
            if address in met:
                continue
            met.add(address)
            try:
                _require_path(relative, source, folder)
            except (ValueError, UnsupportedFeatureError) as error:
                yield _fault(source.at(address), folder, error)
            else:
                yield _Task(source.at(address), _archive(folder, relative), tree=tree)
    except (OSError, ArchiveError, ImportError) as error:
        note(error)
    if not has_model and not faults:
        message = "there is no model in this tree"
        note(FileNotFoundError(errno.ENOENT, message, source.name))
    yield from faults


def _require_path(relative: str, source: Location, folder: Location) -> None:
    """Refuses a model's path below a source that cannot be the path of an archive in a folder."""
    if source.path is None and not is_plain_path(relative):
        raise ValueError(f"expected {PLAIN_PATH} below {source.name}, found {quoted(relative)}")
    if folder.path is not None:
        require_file_names([relative])


def _fault(source: Location, folder: Location, error: Exception) -> _Task:
    """A task with the error of a source, or of the path below it that an `OSError` names."""
    if source.path is not None and isinstance(error, OSError):
        source = source.at(os.path.abspath(error.filename or source.path))
    target = _archive(folder, os.path.basename(source.name.rstrip("/")))
    return _Task(source, target, describe_error(error))


def _models(source: Location, on_error: Callable[[OSError], None]) -> Iterator[tuple[str, str]]:
    """Yields the absolute path or URL of each model, and its path relative to the source.

    Below a URL, an object is a model if its name ends with `.onnx` or `.onnxa`, and no component of
    its path begins with a dot; no object is read. Objects are sorted by path; paths are as the
    store lists them, and not checked.
    """
    if source.path is not None:
        for path, relative in find_models(source.path, on_error):
            yield os.path.abspath(path), relative
    elif source.name.lower().endswith(_MODEL_SUFFIXES):
        yield source.address, os.path.basename(source.name)
    else:
        from onnxarchive.remote.stores import list_objects

        for relative, address in sorted(list_objects(source.remote)):
            is_hidden = any(
                part[:1] == "." and part not in (".", "..") for part in relative.split("/")
            )
            if relative.lower().endswith(_MODEL_SUFFIXES) and not is_hidden:
                yield address, relative


def _is_made(address: str, source: Location, folder: Location) -> bool:
    """True for an archive that the search finds in the folder of the archives to make."""
    if not address.endswith(_ARCHIVE_SUFFIX):
        return False
    if source.path is None:
        return address.startswith(f"{folder.address.rstrip('/')}/")
    return os.path.isdir(source.path) and is_below(os.path.realpath(address), folder.address)


def _archive(folder: Location, relative: str) -> Location:
    """The archive of the model at `relative`, a path relative to its tree."""
    stem, suffix = os.path.splitext(relative)
    name = (stem if suffix.lower() in _SUFFIXES else relative) + _ARCHIVE_SUFFIX
    if folder.path is not None:
        return folder.at(os.path.join(folder.path, *name.split("/")))
    return folder.at(f"{folder.address.rstrip('/')}/{name}")


def find_models(
    source: str | os.PathLike[str], on_error: Callable[[OSError], None] | None = None
) -> Iterator[tuple[str, str]]:
    """Finds the models of a tree, sorted by name: first a directory's files, then its folders.

    A directory with `__MODEL_PROTO` is one model. In other directories a file is a model if it is
    an ONNX model or a zip with one, or if its name ends with `.onnx` or `.onnxa`. Names that
    begin with a dot are skipped. In a model's directory of a Hugging Face cache, only the snapshots
    are searched. If `source` is a file, it is always a model.

    Args:
        source: A file or the root of a tree.
        on_error: Called with the error if a folder cannot be read; None skips the folder.

    Yields:
        The model's path, and with slashes its path relative to `source`, or the name of `source`
        if that is it.
    """
    root = os.fspath(source)
    if not os.path.isdir(root):
        os.stat(root)  # raises for a file that is missing
        yield root, os.path.basename(root)
        return
    for directory, folders, names in os.walk(root, onerror=on_error):
        relative = os.path.relpath(directory, root).replace(os.sep, "/")
        if MODEL_PROTO in names:
            name = os.path.basename(os.path.abspath(root)) if relative == os.curdir else relative
            yield directory, name
            folders.clear()
            continue
        if is_cached_model(directory, folders):  # snapshots link to blobs
            folders[:] = [SNAPSHOTS]
        folders[:] = sorted(folder for folder in folders if not folder.startswith("."))
        for name in sorted(names):
            path = os.path.join(directory, name)
            if name.startswith("."):
                continue
            if name.lower().endswith(_MODEL_SUFFIXES) or is_model_file(path):
                yield path, name if relative == os.curdir else f"{relative}/{name}"


def _absolute(assets: Mapping[str, Asset] | None) -> dict[str, Asset]:
    """Assets that can be sent to workers: each an absolute path or `bytes`."""
    return {
        name: os.path.abspath(Location.of(asset).require_local())
        if isinstance(asset, str | os.PathLike)
        else bytes(asset)
        for name, asset in (assets or {}).items()
    }


def _failure(
    source: Location, target: Location, error: str, error_type: str | None = None
) -> Conversion:
    return Conversion(source.name, target.name, error, error_type=error_type)


def _public_type(error: Exception) -> str:
    """The name of an error's type, or of its first public base class."""
    known = (ArchiveError.__module__, Exception.__module__)
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ in known)


def convert_one(
    source: Location,
    target: Location,
    tree: str | None = None,
    *,
    options: WriteOptions,
    replace: bool,
    skip_existing: bool,
    reader: SourceReader,
    dry_run: bool,
) -> Conversion:
    """Converts one model, perhaps in a worker; errors are returned as outcomes.

    Dask names tasks after this function. A log of the call has no secrets, since the `repr` of
    `Location` has none.
    """
    try:
        if (skip_existing or not replace) and target.exists():
            if skip_existing:
                return Conversion(source.name, target.name, is_skipped=True)
            raise FileExistsError(
                errno.EEXIST, "exists; replace=True (--force) replaces it", target.name
            )
        if target.path is not None and not dry_run:
            os.makedirs(os.path.dirname(target.path), exist_ok=True)
        with attributes.collected() as lost:  # a worker's warnings would not be seen
            conversion = convert_locations(
                {"": source}, target, options, with_changes(reader, tree=tree), dry_run=dry_run
            )
        return with_changes(conversion, warnings=(*conversion.warnings, *lost))
    except (ArchiveError, MemoryError, ValueError, OSError) as error:
        return _failure(source, target, describe_error(error), _public_type(error))
    except Exception as error:  # the other conversions go on
        return _failure(source, target, f"{type(error).__name__}: {error}")
