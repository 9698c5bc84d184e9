"""For speed only: packs the expected local headers of many entries together.

If the file holds equal bytes, `local_header.check_local_header` would report nothing. Otherwise,
and for None, call that function for each entry.
"""

from __future__ import annotations

from itertools import chain, repeat
from typing import Final

from onnxarchive.zipformat import layout, records
from onnxarchive.zipformat.entries import LEAST_HEADER_SIZE, Directory
from onnxarchive.zipformat.records import LocalHeader

# Extra fields of a local header by size of the padding, at the usual alignment; their packed sizes.
EXTRAS: Final = [
    records.pack_alignment_extra(layout.MIN_ALIGNMENT, padding)
    for padding in range(layout.MIN_ALIGNMENT)
]
EXTRA_SIZES: Final = [len(extra).to_bytes(2, "little") for extra in EXTRAS]


def pack_local_headers(directory: Directory, start: int, stop: int, alignment: int) -> bytes | None:
    """The local headers of successive entries, concatenated.

    Args:
        directory: The directory of the archive.
        start: Index of the first entry.
        stop: Index after the last entry.
        alignment: Alignment of all data, in bytes.

    Returns:
        The headers; None if one of them needs a Zip64 field or cannot have this alignment.
    """
    entries = directory.entries
    names = [name.encode() for name in entries.names[start:stop]]
    ends = entries.data_offsets[start:stop]
    spans = zip(names, entries.header_offsets[start:stop], ends, strict=True)
    paddings = [end - begin - len(name) - LEAST_HEADER_SIZE for name, begin, end in spans]
    if (
        not 0 <= min(paddings) <= max(paddings) < alignment
        or not layout.fits_32(max(entries.sizes[start:stop]))
        or any(end % alignment for end in ends)
    ):
        return None
    if alignment == layout.MIN_ALIGNMENT:
        extras = [EXTRAS[padding] for padding in paddings]
        extra_sizes = [EXTRA_SIZES[padding] for padding in paddings]
    else:
        extras = [records.pack_alignment_extra(alignment, padding) for padding in paddings]
        extra_sizes = [len(extra).to_bytes(2, "little") for extra in extras]
    signatures = repeat(LocalHeader.SIGNATURE, stop - start)
    common = directory.records.pack_common(start, stop)
    parts = zip(signatures, common, extra_sizes, names, extras, strict=True)
    return b"".join(chain.from_iterable(parts))
