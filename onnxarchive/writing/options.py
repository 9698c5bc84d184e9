"""The options of all functions that write an archive; see `save`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from onnxarchive.files import locking, threads
from onnxarchive.files.data import Buffer
from onnxarchive.files.progress import Progress
from onnxarchive.model import DEFAULT_SIZE_THRESHOLD
from onnxarchive.remote.location import Location
from onnxarchive.zipformat import layout

# An asset is given as its bytes, or as the path of a file.
Asset: TypeAlias = Buffer | str | os.PathLike[str]


def require_size_threshold(nbytes: int) -> None:
    """Refuses a negative threshold with a ValueError."""
    if nbytes < 0:
        raise ValueError(f"size_threshold must not be negative, got {nbytes}")


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Options of the functions that write an archive; see `save`.

    Raises:
        ValueError: `size_threshold`, `alignment`, `jobs` or `timeout` is not allowed.
    """

    size_threshold: int = DEFAULT_SIZE_THRESHOLD
    alignment: int = layout.MIN_ALIGNMENT
    convert_attribute: bool = False
    assets: Mapping[str, Asset] | None = field(default=None, repr=False)  # perhaps many bytes
    progress: Progress | None = None
    jobs: int | None = None
    timeout: float | None = locking.TIMEOUT

    def __post_init__(self) -> None:
        require_size_threshold(self.size_threshold)
        layout.require_alignment(self.alignment)
        threads.require_jobs(self.jobs)
        locking.require_timeout(self.timeout)

    @property
    def asset_files(self) -> list[str]:
        """The paths of the files among `assets`."""
        assets = (self.assets or {}).values()
        files = [asset for asset in assets if isinstance(asset, str | os.PathLike)]
        return [Location.of(file).require_local() for file in files]
