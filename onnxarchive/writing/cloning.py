"""Clones large tensors into a new archive where the file system shares blocks (XFS, Btrfs).

A range of a file is cloned if it begins at a multiple of the block size, and so does all data of
the archive (`alignment=4096`). The clone takes no space, and is read once, for its CRC-32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from onnxarchive.files import clones_and_sync
from onnxarchive.files.data import Data, Range
from onnxarchive.files.local_file import MappedFile
from onnxarchive.zipformat.end_records import SEARCHED_SIZE

MIN_CLONED_SIZE: Final = 1 << 20  # bytes; smaller tensors are copied as quickly


class Cloner:
    """Clones data into one new file, until the file system refuses."""

    def __init__(self, target: MappedFile, alignment: int) -> None:
        """Clones into `target`, in which all data begins at a multiple of `alignment` bytes."""
        self._target = target
        block_size = clones_and_sync.shared_block_size(target)
        is_aligned = block_size > 0 and alignment % block_size == 0
        self._block_size = block_size if is_aligned else 0  # 0 if nothing is cloned

    def may_clone(self, data: Data) -> bool:
        """True if `clone` may succeed; nothing is read, and no file is opened."""
        position = data.position
        return (
            self._block_size > 0
            and data.nbytes >= MIN_CLONED_SIZE
            and data.crc32 is None  # else it is to be compared with the bytes that are read
            and position is not None
            and position.file.device == self._target.device
            and position.offset % self._block_size == 0
        )

    def clone(self, data: Data, offset: int) -> bool:
        """Clones data to an offset in the target, a multiple of the alignment.

        Returns:
            False if it was refused, so that the data is to be copied; nothing is cloned from then
            on.
        """
        position = data.position
        assert position is not None  # as `may_clone` requires
        source = position.file.open_file()
        blocks_nbytes = data.nbytes // self._block_size * self._block_size
        is_cloned = isinstance(source, MappedFile) and clones_and_sync.clone_range(
            source, position.offset, blocks_nbytes, self._target, offset
        )
        if not is_cloned:
            self._block_size = 0
            return False
        # The rest is part of a block, which can only be cloned at the end of the source. Reading it
        # refuses a source that was truncated meanwhile.
        rest = Range(source, position.offset + blocks_nbytes, data.nbytes - blocks_nbytes)
        self._target.write(offset + blocks_nbytes, rest.read())
        return True

    def pieces(self, offset: int, nbytes: int) -> Iterator[memoryview]:
        """Yields bytes of the target, such as those that were cloned."""
        return map(memoryview, self._target.pieces(offset, nbytes))

    def end(self, offset: int) -> bytes:
        """The last bytes of the target before an offset, as many as `ZipWriter` searches."""
        nbytes = min(SEARCHED_SIZE, offset)
        return self._target.read(offset - nbytes, nbytes)
