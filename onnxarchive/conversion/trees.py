"""Finds the models of a tree: a directory, or the URL of a folder in a store."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from onnxarchive.model.keys import MODEL_PROTO
from onnxarchive.remote.location import Location
from onnxarchive.sources.hugging_face import SNAPSHOTS, is_cached_model
from onnxarchive.sources.source import is_model_file

ARCHIVE_SUFFIX = ".onnxa"
_MODEL_SUFFIXES = (".onnx", ARCHIVE_SUFFIX)  # other files are skipped unless they hold a model
_SUFFIXES = (*_MODEL_SUFFIXES, ".zip", ".pb")


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
        on_error: Called with the error if a folder cannot be read; None raises it.

    Yields:
        The model's path, and the model's path relative to `source`. If `source` is the model, the
        second path is the name of `source`.

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
        if is_cached_model(directory, folders):  # snapshots link to blobs
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
    try:
        raise error
    finally:
        del error  # else error, traceback and frame would refer to each other


def find_remote_models(folder: Location) -> Iterator[tuple[str, str]]:
    """Finds the models below a URL, in the order of their paths.

    An object is a model if its name ends with `.onnx` or `.onnxa`; no object is read. Names that
    begin with a dot are skipped. If the URL ends with `.onnx` or `.onnxa`, it is the only model.

    Yields:
        The URL of a model, and the path that the store lists, relative to `folder` and unchecked.

    Raises:
        OSError: A request failed.
    """
    if folder.name.lower().endswith(_MODEL_SUFFIXES):
        yield folder.url or "", os.path.basename(folder.name)
        return
    for found in sorted(folder.objects()):
        is_hidden = any(it[:1] == "." and it not in (".", "..") for it in found.path.split("/"))
        if found.path.lower().endswith(_MODEL_SUFFIXES) and not is_hidden:
            yield found.url, found.path


def with_suffix(place: str) -> str:
    """Replaces a suffix in `_SUFFIXES` at the end of a path by `.onnxa`, or appends `.onnxa`."""
    stem, suffix = os.path.splitext(place)
    return (stem if suffix.lower() in _SUFFIXES else place) + ARCHIVE_SUFFIX
