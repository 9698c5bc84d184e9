"""The layout of the Hugging Face cache.

A model of the hub is a directory `models--ORGANISATION--NAME`. The files of a revision, below
`snapshots/REVISION/`, are symbolic links to the files in `blobs/`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

SNAPSHOTS = "snapshots"
_PREFIX = "models--"
_REVISION_LEVELS = 2  # from the directory of a model down to the directory of a revision


def levels_of(path: str) -> int | None:
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
