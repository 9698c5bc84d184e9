"""Compares the local headers of an archive with its directory, each when its entry is first read.

If entries are read in order, the next headers are read ahead and compared together, which takes
less than half of the time.
"""

from __future__ import annotations

from onnxarchive.errors import Report
from onnxarchive.storage.random_access import RandomAccessFile
from onnxarchive.zipformat import layout
from onnxarchive.zipformat.entries import Directory
from onnxarchive.zipformat.local_header import check_local_header
from onnxarchive.zipformat.local_headers_at_once import pack_local_header, pack_local_headers

_MAX_AHEAD = 256  # headers
_WINDOW_SIZE = 1 << 17  # bytes; headers within a range of this size are read at once


class LocalHeaders:
    """The local headers of an archive. Several threads may use them.

    Args:
        file: The archive.
        listed: Its directory.

    Attributes:
        verified: For each entry 1 if its header has been found to match, else 0. `require` sets the
            1; after `compare`, the caller may set the 1.
        alignment: Alignment in bytes, from the last compared header with a valid alignment; 64 if
            there was no such header.
    """

    def __init__(self, file: RandomAccessFile, listed: Directory) -> None:
        self._file = file
        self._listed = listed
        self.verified = bytearray(len(listed.entries))
        self._ahead = 1
        self._next = -1
        self.alignment = layout.MIN_ALIGNMENT  # the usual alignment

    def require(self, number: int) -> None:
        """Compares a local header with its directory record, if it is not yet verified.

        The headers of the next entries may be compared at the same time.

        Args:
            number: Index of the entry.

        Raises:
            ArchiveFormatError: The local header does not match.
        """
        if self.verified[number]:
            return
        ahead = min(2 * self._ahead, _MAX_AHEAD) if number == self._next else 1
        stop = min(number + ahead, len(self.verified))
        if ahead == 1 or not self._are_equal(number, stop):
            ahead, stop = 1, number + 1
            self.compare(number, Report())
        self.verified[number:stop] = b"\1" * (stop - number)
        self._next, self._ahead = stop, ahead

    def require_all(self) -> None:
        """Compares every local header with its directory record.

        Raises:
            ArchiveFormatError: A local header does not match.
        """
        for number in range(len(self.verified)):
            self.require(number)

    def compare(self, number: int, report: Report) -> None:
        """Compares a local header with its directory record.

        Args:
            number: Index of the entry.
            report: Receives each broken rule (ZIP-7, ZIP-14, ZIP64-5, ALIGN-2, ALIGN-3).
        """
        (header,) = self._read(number, number + 1)
        self.compare_given(number, header, report)

    def compare_given(self, number: int, header: bytes, report: Report) -> None:
        """As `compare`, for a local header that the caller has read."""
        if header != pack_local_header(self._listed, number, self.alignment):
            entry, record = self._listed.entries[number], self._listed.records[number]
            alignment = check_local_header(header, entry, record, report)
            self.alignment = alignment or self.alignment

    def _are_equal(self, start: int, stop: int) -> bool:
        """True if successive local headers have the bytes that this library would write."""
        expected = pack_local_headers(self._listed, start, stop, self.alignment)
        try:
            return expected is not None and b"".join(self._read(start, stop)) == expected
        except OSError:  # a later header that cannot be read is not an error yet
            return False

    def _read(self, start: int, stop: int) -> list[bytes]:
        entries = self._listed.entries
        begins, ends = entries.header_offsets[start:stop], entries.data_offsets[start:stop]
        first, last = begins[0], ends[-1]
        if last - first <= _WINDOW_SIZE:
            window = self._file.read(first, last - first)
            return [window[b - first : e - first] for b, e in zip(begins, ends, strict=True)]
        return [self._file.read(b, e - b) for b, e in zip(begins, ends, strict=True)]
