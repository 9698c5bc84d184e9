"""What installed libraries can do: the oldest, and those of rare machines, lack some things."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest
from google.protobuf.internal import api_implementation
from packaging.version import Version

NO_OBSTORE = "obstore is not installed"
HAS_PYTHON_PARSER = api_implementation.Type() == "python"
needs_compiled_parser = pytest.mark.skipif(
    HAS_PYTHON_PARSER, reason="protobuf's Python parser reads, or needs memory, unlike the others"
)


def is_older(distribution: str, version: str) -> bool:
    """True if a library is installed in an older version than this."""
    try:
        return Version(metadata.version(distribution)) < Version(version)
    except metadata.PackageNotFoundError:
        return False


def object_store(kind: str, *arguments: Any) -> Any:
    """A store of obstore; without obstore, which not every machine has, the test is skipped."""
    return getattr(pytest.importorskip("obstore.store", reason=NO_OBSTORE), kind)(*arguments)
