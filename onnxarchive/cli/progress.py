"""A progress bar on standard error, for what takes a while on a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from onnxarchive.archive import Progress

_DELAY = 1.0  # seconds; what is done sooner shows no bar


@contextlib.contextmanager
def progress_bar(description: str) -> Iterator[Progress | None]:
    """A callback that moves a bar with throughput; None where standard error is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(
        desc=description,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        delay=_DELAY,
        leave=False,
        dynamic_ncols=True,
    ) as bar:

        def move(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield move
