"""Makes the states of a file during an edit, without killing a process."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from edits import no_clone

from onnxarchive.files import clones_and_sync

TRAILER_SIZE = 96  # bytes of an undo log's trailer
# States at which an edit may stop. A file system may write the last bytes of a log first.
PHASES = (
    "log empty",
    "log begun",
    "log without its beginning",
    "log complete",
    "new end begun",
    "new end complete",
)


@dataclass(frozen=True)
class Interrupted:
    """A file before, during and after an edit of its end in place.

    Attributes:
        old: Bytes of the file before the edit.
        new: Bytes of the file after the edit.
        states: Bytes of the file in each of `PHASES`.
    """

    old: bytes
    new: bytes
    states: dict[str, bytes]

    @property
    def copy_offset(self) -> int:
        """The offset of the undo log (an inverted copy of the old end, then the trailer)."""
        return max(len(self.old), len(self.new))

    @property
    def log(self) -> bytes:
        """The undo log."""
        return self.states["log complete"][self.copy_offset :]

    @property
    def offset(self) -> int:
        """The offset of the first edited byte."""
        return len(self.old) - (len(self.log) - TRAILER_SIZE)


def interrupt(path: Path, edit: Callable[[Path], object]) -> Interrupted:
    """Edits a file in place, on any file system; returns its states."""
    old = path.read_bytes()
    truncated: list[bytes] = []  # the file before each truncation
    written: list[tuple[int, bytes]] = []  # offset, and the file before each write
    pwrite, ftruncate = os.pwrite, os.ftruncate

    def watched_write(descriptor: int, data: Any, offset: int) -> int:
        written.append((offset, path.read_bytes()))
        return pwrite(descriptor, data, offset)

    def watched_truncation(descriptor: int, size: int) -> None:
        truncated.append(path.read_bytes())
        ftruncate(descriptor, size)

    with (
        patch.object(clones_and_sync, "clone", no_clone),
        patch.object(os, "pwrite", watched_write),
        patch.object(os, "ftruncate", watched_truncation),
    ):
        edit(path)
    empty = written[0][1]
    complete = truncated[-1]
    logged = next((content for offset, content in written if offset < len(old)), complete)
    found = Interrupted(old, path.read_bytes(), {"log complete": logged})
    amid_log = len(logged) - len(found.log) // 2
    amid_end = (found.offset + len(found.new)) // 2
    found.states.update(
        {
            "log empty": empty,
            "log begun": logged[:amid_log] + empty[amid_log:],
            "log without its beginning": empty[:amid_log] + logged[amid_log:],
            "new end begun": complete[:amid_end] + logged[amid_end:],
            "new end complete": complete,
        }
    )
    assert len(truncated) == 2
    assert found.states.keys() == set(PHASES)
    return found
