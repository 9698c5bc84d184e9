"""Forks: a child process neither finishes nor undoes what its parent has begun."""

from __future__ import annotations

import os
from typing import Final
from weakref import WeakSet

from onnxarchive.errors import ArchiveError

_begun: Final[WeakSet[Work]] = WeakSet()


class Work:
    """Something that this process has begun: a locked file, a new file, a run of threads.

    Attributes:
        is_own: False in a fork of the process that began it.
    """

    is_own = True

    def __init__(self) -> None:
        _begun.add(self)

    def require_own(self) -> None:
        """Refuses a fork of the process that began the work.

        Raises:
            ArchiveError: This process is such a fork.
        """
        if not self.is_own:
            raise ArchiveError(
                f"process {os.getpid()} is a fork of the process that opened the file or began to "
                "write it; open or write the file in the fork itself"
            )


def _disown() -> None:
    for work in _begun:
        work.is_own = False
    _begun.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_disown)
