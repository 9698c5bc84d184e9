"""Judges by name what lies beside a model: litter, weights, and folders of the Hugging Face cache.

A model of the hub is a directory `models--ORGANISATION--NAME`. The files of a revision, below
`snapshots/REVISION/`, are symbolic links to the files in `blobs/`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from fnmatch import fnmatchcase

# Files that file managers and Python add to zips and directories.
_APPLE_DOUBLE = "._"
_LITTER_FOLDERS = ("__MACOSX", "__pycache__")
_LITTER = (".DS_Store", "Thumbs.db", "desktop.ini")
# Other models with their data files, and weights in the formats of other libraries.
_WEIGHTS = (
    "*.onnx*",
    "*.safetensors",
    "pytorch_model*.bin",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.gguf",
    "*.h5",
    "*.msgpack",
    "*.tflite",
)
SNAPSHOTS = "snapshots"
_PREFIX = "models--"
_REVISION_LEVELS = 2  # from the directory of a model down to the directory of a revision


def is_litter(name: str) -> bool:
    """True for litter, such as `.DS_Store`, and for files in a top-level litter folder."""
    base = name[name.rfind("/") + 1 :]
    in_folder = name.partition("/")[0] in _LITTER_FOLDERS
    return in_folder or base in _LITTER or base.startswith(_APPLE_DOUBLE)


def is_hidden(name: str) -> bool:
    """True for litter, files in litter folders at any level, and paths with a hidden component."""
    parts = name.split("/")
    return is_litter(name) or any(part.startswith(".") or part in _LITTER_FOLDERS for part in parts)


def divided(names: Iterable[str]) -> tuple[list[str], tuple[str, ...]]:
    """Divides files into files to include and files to leave out.

    Left out are hidden files, litter, other models, files of weights, and folders that were not
    read.

    Args:
        names: Paths relative to the model's directory; a folder that was not read ends with a
            slash.
    """
    others: list[str] = []
    left_out: list[str] = []
    for name in names:
        base = name[name.rfind("/") + 1 :].lower()
        is_weights = any(fnmatchcase(base, pattern) for pattern in _WEIGHTS)
        (left_out if not base or is_hidden(name) or is_weights else others).append(name)
    return others, (*left_out,)


def levels_in_cache(path: str) -> int | None:
    """Counts the levels from a directory in a revision up to the directory of the model.

    Args:
        path: An absolute path without links.

    Returns:
        The number of levels; None if the directory is in no revision of a cached model.
    """
    parts = path.split(os.sep)
    for levels in range(_REVISION_LEVELS, len(parts)):
        if parts[-levels] == SNAPSHOTS and parts[-levels - 1].startswith(_PREFIX):
            return levels
    return None


def is_cached_model(path: str, folders: Iterable[str]) -> bool:
    """True if `path`, a directory that contains `folders`, is a model's directory in a cache."""
    return SNAPSHOTS in folders and os.path.basename(os.path.abspath(path)).startswith(_PREFIX)
