"""Opens remote files, with or without a cache."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from onnxarchive.remote.cache import open_cached
from onnxarchive.remote.objects import END_SIZE, open_object
from onnxarchive.remote.urls import beside
from onnxarchive.storage.random_access import RandomAccessFile


def open_remote(
    url: str,
    *,
    store: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    cache: str | os.PathLike[str] | bool | None = None,
) -> RandomAccessFile:
    """Opens a remote file; `onnxarchive.open` describes the arguments."""
    file = open_object(url, store=store, storage_options=storage_options)
    if cache is None or cache is False:
        return file
    try:
        return open_cached(file, cache)
    except BaseException:
        file.close()
        raise


def open_beside(url: str, location: str, **access: Any) -> RandomAccessFile:
    """Opens another remote file by its location, a plain path relative to the folder of `url`.

    Thousands of files may be open at a time, so the end of a large file is not kept in memory.
    """
    file = open_remote(beside(url, location), **access)
    if file.size > END_SIZE:
        file.release()
    return file
