"""Many conversions, in this process or in the workers of an executor."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, as_completed
from dataclasses import dataclass, replace as with_changes

from onnxarchive.archive.options import Asset, WriteOptions
from onnxarchive.archive.planning import open_assets
from onnxarchive.conversion.converting import Conversion, convert_silently
from onnxarchive.errors import ArchiveError, describe_error
from onnxarchive.model.keys import MODEL_PROTO
from onnxarchive.model.threshold import DEFAULT_SIZE_THRESHOLD
from onnxarchive.sources.hugging_face import SNAPSHOTS, is_cached_model
from onnxarchive.sources.source import FollowLinks, is_model_file
from onnxarchive.storage import attributes
from onnxarchive.storage.paths import is_below
from onnxarchive.zipformat import layout

ARCHIVE_SUFFIX = ".onnxa"
_MODEL_SUFFIXES = (".onnx", ARCHIVE_SUFFIX)  # such a file is converted or a failure
_SUFFIXES = (*_MODEL_SUFFIXES, ".zip", ".pb")


def find_models(
    source: str | os.PathLike[str], on_error: Callable[[OSError], None] | None = None
) -> Iterator[tuple[str, str]]:
    """Finds the models of a tree, in the order of their paths.

    A directory with `__MODEL_PROTO` is one model. In other directories a file is a model if its
    content is one or a zip with one, or if its name ends with `.onnx` or `.onnxa`. Names that begin
    with a dot are left out, and of a model in a Hugging Face cache all but its snapshots. If
    `source` is a file, it is a model whatever its name.

    Args:
        source: A file or the root of a tree.
        on_error: Called with the error if a folder cannot be read; None raises it.

    Yields:
        The model's path, and its path below `source`.

    Raises:
        OSError: `source` cannot be read.
    """
    root = os.fspath(source)
    if not os.path.isdir(root):
        os.stat(root)  # raises for a file that is missing
        yield root, os.path.basename(root)
        return
    for directory, folders, names in os.walk(root, onerror=on_error or _raise):
        relative = os.path.relpath(directory, root)
        if MODEL_PROTO in names:
            name = os.path.basename(os.path.abspath(root)) if relative == os.curdir else relative
            yield directory, name
            folders.clear()
            continue
        if is_cached_model(directory, folders):  # its blobs are what the snapshots link to
            folders[:] = [SNAPSHOTS]
        folders[:] = sorted(folder for folder in folders if not folder.startswith("."))
        for name in sorted(names):
            path = os.path.join(directory, name)
            if not name.startswith(".") and _is_candidate(path):
                yield path, os.path.normpath(os.path.join(relative, name))


def _is_candidate(path: str) -> bool:
    if path.lower().endswith(_MODEL_SUFFIXES):
        return True
    try:
        return is_model_file(path)
    except OSError:
        return False


def _raise(error: OSError) -> None:
    raise error


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
    dedupe: bool = False,
    verify_checksum: bool = False,
    follow_links: FollowLinks = False,
    dry_run: bool = False,
    jobs: int | None = None,
) -> list[Conversion]:
    """Converts many models to archives; one that fails does not stop the others.

    Args:
        sources: Files, and directories in which models are looked for (`find_models`). A model that
            is found twice is converted once; archives of a tree that lie in `out_dir` are left out.
        out_dir: Directory for the archives, which is created. An archive has the relative path of
            its model, with the suffix `.onnxa`.
        executor: Any `concurrent.futures.Executor`, which runs the conversions; workers on other
            machines must see the same files at the same paths. None runs the conversions one after
            another.
        replace: Whether to replace archives that exist; otherwise such a conversion fails.
        on_done: Called after each conversion with its outcome, the number of conversions that are
            done, and the number in all.
        size_threshold: Tensors of this many bytes or more are stored outside the model.
        alignment: The data of every entry begins at a multiple of this many bytes.
        convert_attribute: Whether to store outside the model not only initializers, but all
            tensors.
        assets: Further files for each archive, by relative path: their bytes, or the path of a
            file. They replace a source's assets of the same paths.
        other_files: Whether to take along the other files of each source's directory as assets; see
            `convert`.
        dedupe: Whether identical initializers of a graph become one initializer.
        verify_checksum: Whether to compare data files with the SHA-1 `checksum` that tensors state.
        follow_links: As for `convert`. Of a Hugging Face cache only snapshots are converted.
        dry_run: Whether to write nothing and only return the outcomes.
        jobs: Number of threads of each conversion; None for one for each core, or for a single one
            if there is an executor, which has workers of its own.

    Returns:
        The outcome of each conversion, in the order in which the models were found; a failure has
        an `error`. A source that cannot be read, and a tree without models, are failures as well.

    Raises:
        ValueError: An option or the path of an asset is not allowed.
        OSError: `out_dir` cannot be made, or an asset not opened.
    """
    open_assets(assets)  # a fault in them is not one of each model
    options = WriteOptions(
        size_threshold=size_threshold,
        alignment=alignment,
        convert_attribute=convert_attribute,
        dedupe=dedupe,
        assets=_absolute(assets),
        jobs=1 if jobs is None and executor is not None else jobs,
    )
    out = os.path.realpath(out_dir)
    work = list(_work(sources, out))
    if not dry_run:
        os.makedirs(out, exist_ok=True)
    outcomes: dict[int, Conversion] = {}
    if not isinstance(follow_links, bool):
        follow_links = os.path.abspath(follow_links)
    convert = _Convert(options, replace, verify_checksum, follow_links, dry_run, other_files)
    for index, conversion in _outcomes(work, convert, executor):
        outcomes[index] = conversion
        if on_done is not None:
            on_done(conversion, len(outcomes), len(work))
    return [outcomes[index] for index in range(len(work))]


def _outcomes(
    work: Iterable[tuple[str, str, str | None]], convert: _Convert, executor: Executor | None
) -> Iterator[tuple[int, Conversion]]:
    """Runs conversions, and yields each outcome with its index when it is known."""
    todo: dict[int, tuple[str, str]] = {}
    taken: dict[str, str] = {}
    for index, (source, target, error) in enumerate(work):
        other = taken.setdefault(os.path.normcase(target), source)
        if error is None and other != source:
            error = f"{other} has the same target {target}; convert one of them elsewhere"
        if error is None:
            todo[index] = source, target
        else:
            yield index, Conversion(source, target, error)
    if executor is not None:
        yield from _submitted(executor, todo, convert)
        return
    for index, (source, target) in todo.items():
        yield index, convert(source, target)


def _submitted(
    executor: Executor,
    todo: Mapping[int, tuple[str, str]],
    convert: _Convert,
) -> Iterator[tuple[int, Conversion]]:
    """Runs conversions on an executor, and yields each outcome with its index when it is done."""
    futures: dict[Future[Conversion], int] = {}
    for index, (source, target) in todo.items():
        try:
            futures[executor.submit(convert, source, target)] = index
        except RuntimeError as error:  # its workers are dead, or it was shut down
            yield index, Conversion(source, target, f"the executor takes no more work: {error}")
    for future in as_completed(futures):
        index = futures[future]
        try:
            yield index, future.result()
        except Exception as error:  # of the executor: a conversion returns its own
            yield index, Conversion(*todo[index], f"the worker failed: {error!r}")


def _work(
    sources: Iterable[str | os.PathLike[str]], out: str
) -> Iterator[tuple[str, str, str | None]]:
    """Each model with its target, both absolute, and the error if there is one, else None."""
    met: set[str] = set()
    for source in sources:
        is_tree = os.path.isdir(source)
        errors: list[OSError] = []
        found = False
        try:
            for path, place in find_models(source, errors.append):
                absolute = os.path.abspath(path)
                is_archive = is_tree and path.endswith(ARCHIVE_SUFFIX)
                if is_archive and is_below(os.path.realpath(path), out):
                    continue  # made by an earlier run
                found = True
                if absolute not in met:
                    met.add(absolute)
                    yield absolute, os.path.join(out, _with_suffix(place)), None
        except OSError as error:
            errors.append(error)
        if not found and not errors:
            message = "expected a model in this tree, found none"
            errors.append(FileNotFoundError(errno.ENOENT, message, os.fspath(source)))
        for fault in errors:
            path = os.path.abspath(fault.filename or source)
            yield (
                path,
                os.path.join(out, _with_suffix(os.path.basename(path))),
                describe_error(fault),
            )


def _absolute(assets: Mapping[str, Asset] | None) -> dict[str, Asset]:
    """Assets that can be sent to workers: files by absolute path, bytes as `bytes`."""
    return {
        name: os.path.abspath(asset) if isinstance(asset, str | os.PathLike) else bytes(asset)
        for name, asset in (assets or {}).items()
    }


def _with_suffix(place: str) -> str:
    stem, suffix = os.path.splitext(place)
    return (stem if suffix.lower() in _SUFFIXES else place) + ARCHIVE_SUFFIX


@dataclass(frozen=True, slots=True)
class _Convert:
    """Converts one model; an error is an outcome. It can be sent to a worker."""

    options: WriteOptions
    replace: bool
    verify_checksum: bool
    follow_links: FollowLinks
    dry_run: bool
    other_files: bool

    def __call__(self, source: str, target: str) -> Conversion:
        try:
            if not self.replace and os.path.lexists(target):
                raise FileExistsError(
                    errno.EEXIST, "exists; --force or replace=True replaces it", target
                )
            if not self.dry_run:
                os.makedirs(os.path.dirname(target), exist_ok=True)
            with attributes.collected() as lost:  # the worker may be on another machine
                conversion = convert_silently(
                    source,
                    target,
                    self.options,
                    verify_checksum=self.verify_checksum,
                    follow_links=self.follow_links,
                    dry_run=self.dry_run,
                    other_files=self.other_files,
                    access={},
                )
            return with_changes(conversion, warnings=(*conversion.warnings, *lost))
        except (ArchiveError, ValueError) as error:
            return Conversion(source, target, str(error), error_type=type(error).__name__)
        except OSError as error:
            return Conversion(
                source, target, describe_error(error), error_type=type(error).__name__
            )
        except Exception as error:  # the other conversions go on
            return Conversion(source, target, f"{type(error).__name__}: {error}")
