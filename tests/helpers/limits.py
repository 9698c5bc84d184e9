"""Limits of this process, as on a full disk or with many open files."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def limited(kind: int, value: int) -> Iterator[None]:
    """Sets a soft limit of this process, such as `resource.RLIMIT_FSIZE`, during the block."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)
