"""Checks that paths are inside directories, and that outputs overwrite no inputs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable


def is_below(path: str, directory: str) -> bool:
    """True if `path` is `directory` or inside it; both must be absolute, with links resolved."""
    try:
        return os.path.commonpath([path, directory]) == directory
    except ValueError:  # on another drive
        return False


def leads_out(path: str) -> bool:
    """True if a path, joined to a directory, may lead out of it even without a symbolic link."""
    return os.path.isabs(path) or os.pardir in path.split("/")


def require_no_input(target: str | os.PathLike[str], inputs: Iterable[str | None]) -> None:
    """Refuses to overwrite an input.

    Raises:
        ValueError: `target` is one of the files `inputs`, perhaps by another path; None is no file.
    """
    for path in filter(None, inputs):
        with contextlib.suppress(FileNotFoundError):
            if os.path.samefile(target, path):
                raise ValueError(f"expected another file than the input {path}, found {target!s}")


def directory_of(path: str | os.PathLike[str]) -> str:
    """The directory that contains the file at `path`, after links are resolved."""
    return os.path.dirname(os.path.realpath(path))
