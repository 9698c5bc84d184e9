"""Objects that are closed when a block ends."""

from __future__ import annotations

from typing import Self


class Closing:
    """Base of classes that have `close`: the end of a `with` block closes the object."""

    def close(self) -> None:
        """Closes the object."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
