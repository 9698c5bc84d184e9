"""Names all damaged entries of an archive, where reading has found the first one."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator

from onnxarchive.errors import (
    DAMAGE_RULES,
    ArchiveError,
    ArchiveFormatError,
    Strict,
    quoted,
    without_traceback,
)
from onnxarchive.reading.archive_file import locked_archive_file
from onnxarchive.reading.contents import read_contents
from onnxarchive.remote.location import Location

_MAX_NAMES = 1000  # in a message


@contextlib.contextmanager
def naming_all_damaged() -> Iterator[None]:
    """Names all damaged entries of an archive in an error of the block about one of them.

    All entries of a local archive are read for that, but only after the error. An error about the
    only damaged entry is unchanged, and so is one about an archive that is remote or in memory.
    """
    try:
        yield
    except ArchiveFormatError as error:
        names = [] if error.rule not in DAMAGE_RULES else _damaged_entries(error.path)
        if len(names) < 2:
            raise
        first = ", ".join(map(quoted, names[:_MAX_NAMES]))
        more = f" and {len(names) - _MAX_NAMES:,} more" if len(names) > _MAX_NAMES else ""
        raise type(error)(
            f"{len(names):,} entries are damaged: {first}{more}",
            rule=error.rule,
            entry=error.entry,
            path=error.path,
        ) from without_traceback(error)


def _damaged_entries(path: str | None) -> list[str]:
    """The names of an archive's entries whose local header or bytes are not as the directory says.

    Empty if the archive cannot be opened again.
    """
    names: list[str] = []
    if path is None or not os.path.isfile(path):
        return names
    with contextlib.suppress(ArchiveError, OSError):
        with locked_archive_file(Location.of(path)) as file:
            contents = read_contents(file, Strict(path))
        with file:
            for name in contents.entries:
                try:
                    deque(contents.pieces(name), maxlen=0)
                except ArchiveFormatError:
                    names.append(name)
    return names
