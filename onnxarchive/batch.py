"""Many conversions at once, here or on whatever machines an executor reaches."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Executor, Future, as_completed
from dataclasses import dataclass
from typing import Any

from onnxarchive.convert import convert
from onnxarchive.errors import ArchiveError
from onnxarchive.model.keys import MODEL_PROTO

ARCHIVE_SUFFIX = ".onnxa"
# What is taken for a model in a tree; what it really is, its content tells when it is converted.
_MODEL_SUFFIXES = (".onnx", ARCHIVE_SUFFIX, ".zip")


@dataclass(frozen=True, slots=True)
class Conversion:
    """What came of one conversion.

    Attributes:
        source: The model that was to be converted.
        target: The archive.
        nbytes: Size of the archive in bytes; None where there is none.
        error: Why there is none, or None.
        warnings: What was left out, a sentence each.
    """

    source: str
    target: str
    nbytes: int | None
    error: str | None
    warnings: tuple[str, ...] = ()


def find_models(source: str | os.PathLike[str]) -> Iterator[tuple[str, str]]:
    """The models of a tree, each with its place in the tree, in the order of their paths.

    A directory that holds `__MODEL_PROTO` is one model. In other directories every file named
    `*.onnx`, `*.onnxa` or `*.zip` is one. A file is a model whatever its name, and its place is its
    name.

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
    for directory, folders, names in os.walk(root, onerror=_raise):
        relative = os.path.relpath(directory, root)
        if MODEL_PROTO in names:
            name = os.path.basename(os.path.abspath(root)) if relative == os.curdir else relative
            yield directory, name
            folders.clear()
            continue
        folders.sort()
        for name in sorted(names):
            if name.lower().endswith(_MODEL_SUFFIXES):
                yield os.path.join(directory, name), os.path.normpath(os.path.join(relative, name))


def _raise(error: OSError) -> None:
    raise error


def convert_many(
    sources: Iterable[str | os.PathLike[str]],
    out_dir: str | os.PathLike[str],
    executor: Executor | None = None,
    *,
    replace: bool = True,
    on_done: Callable[[Conversion, int, int], None] | None = None,
    **save_options: Any,
) -> list[Conversion]:
    """Converts many models to archives; one that fails does not stop the others.

    Args:
        sources: Files and trees, as `find_models` takes them.
        out_dir: Where the archives go, each at its model's place in its tree, with the suffix
            `.onnxa`. It and the folders below it are made. What lies in it is no source.
        executor: Runs the conversions; any `concurrent.futures.Executor`, also one that reaches
            other machines, which then must see the same files under the same paths. None runs them
            one after another.
        replace: Whether to replace archives that exist; otherwise such a conversion fails.
        on_done: Called after each conversion with its outcome, the number of those that are done
            and the number of all.
        **save_options: As `convert` takes them, but for `progress`.

    Returns:
        What came of each model, in the order in which they were found.

    Raises:
        OSError: A source cannot be read, or `out_dir` not made.
    """
    out = os.path.abspath(out_dir)
    os.makedirs(out, exist_ok=True)
    work: list[tuple[str, str]] = []
    outcomes: dict[int, Conversion] = {}
    taken: dict[str, str] = {}
    for source in sources:
        for path, place in find_models(source):
            if os.path.isdir(source) and _is_below(path, out):
                continue  # what came of an earlier run
            target = os.path.join(out, _with_suffix(place))
            other = taken.setdefault(os.path.normcase(target), path)
            if other != path:
                error = f"expected a target of its own, found it to be that of {other}"
                outcomes[len(work)] = Conversion(path, target, None, error)
            work.append((os.path.abspath(path), target))
    total = len(work)

    def note(index: int, conversion: Conversion) -> None:
        outcomes[index] = conversion
        if on_done is not None:
            on_done(conversion, len(outcomes), total)

    todo = [index for index in range(total) if index not in outcomes]
    if executor is None:
        for index in todo:
            note(index, _convert_one(*work[index], replace, save_options))
        return [outcomes[index] for index in range(total)]
    futures: dict[Future[Conversion], int] = {
        executor.submit(_convert_one, *work[index], replace, save_options): index for index in todo
    }
    for future in as_completed(futures):
        index = futures[future]
        try:
            note(index, future.result())
        except (Exception, CancelledError) as error:  # a worker that died, not a conversion
            note(index, Conversion(*work[index], None, f"the worker failed: {error!r}"))
    return [outcomes[index] for index in range(total)]


def _is_below(path: str, directory: str) -> bool:
    try:
        return os.path.commonpath([os.path.abspath(path), directory]) == directory
    except ValueError:  # on another drive
        return False


def _with_suffix(place: str) -> str:
    stem, suffix = os.path.splitext(place)
    return (stem if suffix.lower() in _MODEL_SUFFIXES else place) + ARCHIVE_SUFFIX


def _convert_one(
    source: str, target: str, replace: bool, save_options: dict[str, Any]
) -> Conversion:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if not replace and os.path.lexists(target):
                raise FileExistsError(f"{target} exists")
            os.makedirs(os.path.dirname(target), exist_ok=True)
            convert(source, target, **save_options)
        except (ArchiveError, OSError, ValueError) as error:
            return Conversion(source, target, None, str(error))
    told = tuple(str(warning.message) for warning in caught)
    return Conversion(source, target, os.path.getsize(target), None, told)
