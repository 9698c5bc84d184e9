"""Limits, umask and user of this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

if sys.platform != "win32":
    import resource


@contextmanager
def limited(kind: int, value: int) -> Iterator[None]:
    """Sets a soft limit of this process, such as `resource.RLIMIT_FSIZE`, during the block."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


@contextmanager
def user(number: int, *groups: int) -> Iterator[None]:
    """Is another user during the block, if the process is root's; the first group is its own."""
    before = os.geteuid(), os.getegid(), os.getgroups()
    os.seteuid(0)
    os.setgroups(groups[1:])
    os.setegid(groups[0] if groups else number)
    os.seteuid(number)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(before[1])
        os.setgroups(before[2])
        os.seteuid(before[0])


@contextmanager
def umask(mask: int) -> Iterator[None]:
    """Sets the umask of this process during the block."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)
