"""Versions of installed libraries, of which the oldest lack what some tests need."""

from __future__ import annotations

from importlib import metadata

from packaging.version import Version


def is_older(distribution: str, version: str) -> bool:
    """True if a library is installed in an older version than this."""
    try:
        return Version(metadata.version(distribution)) < Version(version)
    except metadata.PackageNotFoundError:
        return False
