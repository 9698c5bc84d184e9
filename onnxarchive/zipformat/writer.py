"""Streams aligned, stored entries to anything with `write`, then the directory and the end records.

Size and CRC-32 of an entry are known before its local header is written. So no byte is changed
later, and the target needs no `seek` and may be a pipe. Headers and small pieces are gathered, and
written together.
"""

from __future__ import annotations

import errno
import io
from array import array
from collections import deque
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from onnxarchive.errors import ChecksumError, Strict, UnsupportedFeatureError
from onnxarchive.files.data import Buffer, SupportsWrite, add_name, crc32, difference
from onnxarchive.zipformat import end_records, layout
from onnxarchive.zipformat.directory import EMPTY, Directory
from onnxarchive.zipformat.layout import EntryLayout

_MAX_GATHERED_NBYTES = 1 << 14  # larger pieces are written alone, without a copy
_MIN_WRITTEN_NBYTES = 1 << 20  # gathered bytes are written when there are as many


def require_entries(count: int) -> None:
    """Refuses too many entries with an UnsupportedFeatureError (rule ZIP-4)."""
    if count > layout.MAX_ENTRIES:
        raise UnsupportedFeatureError(
            f"expected at most {layout.MAX_ENTRIES} entries, found {count}; keep more tensors in "
            "the model (size_threshold)",
            rule="ZIP-4",
        )


@runtime_checkable
class SupportsSkip(Protocol):
    """A file that is written by position, such as `PositionalWriter`."""

    def skip(self, nbytes: int, /) -> None:
        """Moves the position by `nbytes` bytes, which stay as they are."""


class ZipWriter:
    """Writes one archive to `file`, entry by entry, without changing written bytes.

    Args:
        file: The target; it is not closed.
        alignment: Alignment of all data in bytes, a power of two from 64 to 32768.
        existing: The entries that are already in the file.
        offset: Offset of the end of these entries in the archive, in bytes.
        before: The last `end_records.SEARCHED_SIZE` bytes before `offset`, or all if fewer.

    Attributes:
        names: The names of the entries so far, in order.
        header_offsets: Offset of each entry's local header, in bytes.
    """

    def __init__(
        self,
        file: SupportsWrite,
        *,
        alignment: int = layout.MIN_ALIGNMENT,
        existing: Directory = EMPTY,
        offset: int = 0,
        before: bytes = b"",
    ) -> None:
        layout.require_alignment(alignment)
        self._file = file
        self._alignment = alignment
        self._offset = offset
        self.names = [entry.name for entry in existing.entries]
        self.header_offsets = array("q", [entry.header_offset for entry in existing.entries])
        self._records = [*existing.records]
        self._gathered = bytearray()
        self._end = deque([before])  # the last written bytes, see `_keep_end`
        self._end_nbytes = len(before)

    def add(
        self,
        name: str,
        nbytes: int,
        crc: int,
        stream: Iterable[bytes | memoryview],
        *,
        is_verified: bool = False,
        alignment: int = layout.MIN_ALIGNMENT,
    ) -> EntryLayout:
        """Writes an entry from pieces of its data.

        Args:
            name: Name of the entry.
            nbytes: Size of the data in bytes.
            crc: CRC-32 of the data.
            stream: The data in pieces.
            is_verified: True if `stream` compares its bytes with `crc` itself, or if `crc` was
                computed from bytes that cannot change; then the writer does not compare them.
            alignment: Alignment of the data in bytes, if larger than that of all entries.

        Raises:
            UnsupportedFeatureError: The archive has too many entries.
            ChecksumError: The data has another size or CRC-32. The written file is then unusable.
        """
        placement = self._place(name, nbytes, crc, alignment)
        header, record = placement.pack()
        self._append(header)
        written_nbytes = 0
        written_crc = crc if is_verified else 0
        for piece in stream:
            written_nbytes += len(piece)
            if written_nbytes > nbytes:
                break
            if not is_verified:
                written_crc = crc32(piece, written_crc)
            self._append(piece)
        fault = difference((nbytes, crc), (written_nbytes, written_crc))
        if fault is not None:
            more = " or more" if written_nbytes > nbytes else ""
            raise ChecksumError(f"entry {name!r}: {fault}{more}; its source is damaged", entry=name)
        self._note(placement, record)
        return placement

    def next_data_offset(
        self, name: str, nbytes: int, alignment: int = layout.MIN_ALIGNMENT
    ) -> int:
        """The offset of an entry's data, if the entry is added next; arguments as `add`."""
        return self._place(name, nbytes, 0, alignment).data_offset

    def _place(self, name: str, nbytes: int, crc: int, alignment: int) -> EntryLayout:
        """The placement of an entry that is added next; refuses one too many."""
        require_entries(len(self.names) + 1)
        alignment = max(self._alignment, alignment)
        return layout.lay_out(name, nbytes, crc, self._offset, alignment)

    def add_present(
        self,
        name: str,
        nbytes: int,
        crc: int,
        end: bytes,
        alignment: int = layout.MIN_ALIGNMENT,
    ) -> EntryLayout:
        """Adds an entry whose data is in the file already, at `next_data_offset`.

        Args:
            name: Name of the entry.
            nbytes: Size of the data in bytes.
            crc: CRC-32 of the data.
            end: The last `end_records.SEARCHED_SIZE` bytes of the data, or all if fewer.
            alignment: As in `add`.
        """
        placement = self._place(name, nbytes, crc, alignment)
        header, record = placement.pack()
        self._append(header)
        self._write_gathered()
        assert isinstance(self._file, SupportsSkip)  # only such a file has the data already
        self._file.skip(nbytes)
        self._offset += nbytes
        self._keep_end(memoryview(end))
        self._note(placement, record)
        return placement

    def _note(self, placement: EntryLayout, record: bytes) -> None:
        self.names.append(placement.name.decode())
        self.header_offsets.append(placement.header_offset)
        self._records.append(record)

    def finish(self) -> int:
        """Writes the directory and the end records; returns the size of the archive in bytes.

        Raises:
            ArchiveFormatError: The last bytes contain a false record, or an offset contains a
                signature (ZIP-16).
        """
        directory_offset = self._offset
        self._append(b"".join(self._records))
        directory_end = self._offset
        directory_size = directory_end - directory_offset
        self._append(layout.end_of_archive(len(self.names), directory_size, directory_offset))
        self._write_gathered()
        end_records.check_false_ends(
            b"".join(self._end)[-end_records.SEARCHED_SIZE :],
            self._offset,
            directory_offset,
            directory_end,
            self.names,
            self.header_offsets,
            Strict(),
        )
        return self._offset

    def _append(self, data: Buffer) -> None:
        """Writes bytes, small ones together with those that follow."""
        nbytes = len(data)
        self._offset += nbytes
        if nbytes <= _MAX_GATHERED_NBYTES:
            self._gathered += data
            if len(self._gathered) >= _MIN_WRITTEN_NBYTES:
                self._write_gathered()
        else:
            self._write_gathered()
            self._write(memoryview(data))

    def _write_gathered(self) -> None:
        if self._gathered:
            # The buffer is not used again: the target may keep the view.
            gathered, self._gathered = self._gathered, bytearray()
            self._write(memoryview(gathered))

    def _keep_end(self, view: memoryview) -> None:
        """Keeps a copy of the last bytes, for `finish` to check."""
        last = view[-end_records.SEARCHED_SIZE :].tobytes()
        self._end.append(last)
        self._end_nbytes += len(last)
        while self._end_nbytes - len(self._end[0]) >= end_records.SEARCHED_SIZE:
            self._end_nbytes -= len(self._end.popleft())

    def _write(self, view: memoryview) -> None:
        self._keep_end(view)
        while view.nbytes:
            try:
                # An unbuffered file may write only the first bytes of `view`.
                written = self._file.write(view)
                if written is None and isinstance(self._file, io.RawIOBase):
                    raise BlockingIOError(errno.EAGAIN, "the target would block", 0)
            except OSError as error:
                add_name(error, self._file)
                raise
            if written is None:
                return
            view = view[written:]
