"""Finds false end records: bytes near the end of a file that some zip readers take for end records.

Some readers search the last bytes of a file for end records, instead of computing the offsets:
zlib's minizip accepts a Zip64 locator anywhere in the last 64 KiB, libzip selects among several end
records, and adm-zip may take a header offset for a signature. An archive holds no such bytes.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator, Sequence

from onnxarchive.errors import Report
from onnxarchive.zipformat import layout, records
from onnxarchive.zipformat.end_records import TAIL_SIZE
from onnxarchive.zipformat.records import EndRecord, Zip64EndRecord, Zip64Locator

# Number of last bytes of a file to search: the longest comment and all end records.
SEARCHED_SIZE = records.UINT16_MAX + TAIL_SIZE

_KINDS = {
    EndRecord.SIGNATURE: "an end record",
    Zip64Locator.SIGNATURE: "a Zip64 locator",
    Zip64EndRecord.SIGNATURE: "a Zip64 end record",
}
# The sections are those of APPNOTE.
_RECORD = re.compile(
    rb"PK(?:"
    rb"\x05\x06\0{4}(?P<count>..)(?P=count).{10}"  # both disks 0, both counts equal (4.3.16)
    rb"|\x06\x07(?:\0{4}.{8}\x01\0{3}|.{16}PK\x05\x06)"  # disk 0 of 1 (4.3.15) or end record next
    rb"|\x06\x06\x2c\0{7}"  # a size of 44 (4.3.14)
    rb")",
    re.DOTALL,
)


def check(
    end: bytes,
    file_size: int,
    directory_offset: int,
    directory_end: int,
    names: Sequence[str],
    header_offsets: Sequence[int],
    report: Report,
) -> None:
    """Reports false end records, and offsets whose bytes contain a signature (ZIP-16).

    The offsets are those of the last local header and of the directory.

    Args:
        end: The last `SEARCHED_SIZE` bytes of the file, or all bytes of a smaller file.
        file_size: Size of the file in bytes.
        directory_offset: Offset of the directory in bytes.
        directory_end: Offset of the end of the directory in bytes; only the true end records
            follow.
        names: Names of the entries in `end`, and possibly of entries before `end`.
        header_offsets: Offset of the local header of each of these entries, in bytes.
        report: Receives the broken rule.
    """
    for offset, kind in _find(end, file_size):
        if offset < directory_end:
            owner = bisect.bisect_right(header_offsets, offset) - 1
            report.broken(
                "ZIP-16",
                f"expected no false end record in the last {SEARCHED_SIZE} bytes of the file, "
                f"found {kind} at offset {offset}, which some zip readers would accept",
                entry=names[owner] if owner >= 0 else None,
            )
    for called, offset in (
        ("header offset of the last entry", header_offsets[-1] if header_offsets else 0),
        ("offset of the directory", directory_offset),
    ):
        if layout.holds_signature(offset):
            report.broken(
                "ZIP-16",
                f"expected no signature of an end record in the {called}, where some zip readers "
                f"would accept it, found {offset:#010x}",
            )


def _find(end: bytes, file_size: int) -> Iterator[tuple[int, str]]:
    """Yields file offset and kind of each end record, both true and false ones."""
    found = _RECORD.search(end)
    while found is not None:
        yield file_size - len(end) + found.start(), _KINDS[found.group()[:4]]
        found = _RECORD.search(end, found.start() + 1)
