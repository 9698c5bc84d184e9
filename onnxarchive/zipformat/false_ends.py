"""Finds false end records: other bytes near the end of a file that a zip reader believes.

Some readers search the last bytes of a file for end records, instead of computing where they are:
zlib's minizip believes a Zip64 locator anywhere in the last 64 KiB, libzip weighs several end
records, and adm-zip takes a header offset for a signature. An archive holds nothing of the kind.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator, Sequence

from onnxarchive.errors import Report
from onnxarchive.zipformat import layout, records
from onnxarchive.zipformat.end_records import TAIL_SIZE
from onnxarchive.zipformat.records import EndRecord, Zip64EndRecord, Zip64Locator

# The last bytes of a file that are searched: the longest comment and all end records.
SEARCHED_SIZE = records.UINT16_MAX + TAIL_SIZE

_KINDS = {
    EndRecord.SIGNATURE: "an end record",
    Zip64Locator.SIGNATURE: "a Zip64 locator",
    Zip64EndRecord.SIGNATURE: "a Zip64 end record",
}
_RECORD = re.compile(
    rb"PK(?:"
    rb"\x05\x06\0{4}(?P<count>..)(?P=count).{10}"  # both disks 0, both counts equal (4.3.16)
    rb"|\x06\x07(?:\0{4}.{8}\x01\0{3}|.{16}PK\x05\x06)"  # disk 0 of 1 (4.3.15), or a record next
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
    """Reports false end records, and offsets that hold a signature (ZIP-16).

    Args:
        end: The last `SEARCHED_SIZE` bytes of the file, or all of a smaller one.
        file_size: Size of the file in bytes.
        directory_offset: Offset of the directory in bytes.
        directory_end: Offset of its end in bytes; only the true end records follow.
        names: Names of the entries in `end`, and possibly of earlier ones.
        header_offsets: Offsets of their local headers in bytes.
        report: Takes the broken rule.
    """
    for offset, kind in _find(end, file_size):
        if offset < directory_end:
            owner = bisect.bisect_right(header_offsets, offset) - 1
            report.broken(
                "ZIP-16",
                f"expected nothing in the last {SEARCHED_SIZE} bytes of the file that reads as a "
                f"record of its end, found {kind} at offset {offset}, which zip readers that "
                "search would believe",
                entry=names[owner] if owner >= 0 else None,
            )
    for called, offset in (
        ("header offset of the last entry", header_offsets[-1] if header_offsets else 0),
        ("offset of the directory", directory_offset),
    ):
        if layout.holds_signature(offset):
            report.broken(
                "ZIP-16",
                f"expected no signature of an end record in the {called}, which zip readers that "
                f"search would believe, found {offset:#010x}",
            )


def _find(end: bytes, file_size: int) -> Iterator[tuple[int, str]]:
    """Yields offset in the file and kind of each end record, true or false."""
    found = _RECORD.search(end)
    while found is not None:
        yield file_size - len(end) + found.start(), _KINDS[found.group()[:4]]
        found = _RECORD.search(end, found.start() + 1)
