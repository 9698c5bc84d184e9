"""The entries and records of a directory, in columns, each made when it is looked at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, Final, NamedTuple, overload

from onnxarchive.zipformat import layout, records
from onnxarchive.zipformat.records import DirectoryRecord, LocalHeader

VERSIONS_NEEDED = (records.VERSION_STORED, records.VERSION_FOLDER, records.VERSION_ZIP64)


class Entry(NamedTuple):
    """One entry of an archive.

    Attributes:
        name: The entry's name.
        header_offset: Where its local header begins, in bytes from the start of the file.
        data_offset: Where its data begins, in bytes from the start of the file.
        nbytes: Size of its data in bytes.
        crc32: CRC-32 of its data as the directory states it.
    """

    name: str
    header_offset: int
    data_offset: int
    nbytes: int
    crc32: int


class Entries(Sequence[Entry]):
    """Entries in columns, each made when it is looked at.

    Attributes:
        names: As `Entry` has them, and so
        header_offsets: these,
        data_offsets: these,
        sizes: these, which are its `nbytes`,
        crc32s: and these.
    """

    def __init__(
        self,
        names: Sequence[str],
        header_offsets: Sequence[int],
        data_offsets: Sequence[int],
        sizes: Sequence[int],
        crc32s: Sequence[int],
    ) -> None:
        self.names = names
        self.header_offsets = header_offsets
        self.data_offsets = data_offsets
        self.sizes = sizes
        self.crc32s = crc32s

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[Entry]:
        return map(Entry, *self._columns)

    @overload
    def __getitem__(self, index: int) -> Entry: ...

    @overload
    def __getitem__(self, index: slice) -> Entries: ...

    def __getitem__(self, index: int | slice) -> Entry | Entries:
        if isinstance(index, slice):
            return Entries(*(column[index] for column in self._columns))
        return Entry(*(column[index] for column in self._columns))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Entries) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    @property
    def _columns(self) -> tuple[Sequence[Any], ...]:
        return self.names, self.header_offsets, self.data_offsets, self.sizes, self.crc32s


class Records(Sequence[DirectoryRecord]):
    """Directory records as they are packed, each unpacked when it is looked at."""

    def __init__(self, data: bytes, offsets: Sequence[int]) -> None:
        """Takes the directory's bytes and where each record begins in them."""
        self._data = data
        self._offsets = offsets

    def __len__(self) -> int:
        return len(self._offsets)

    @overload
    def __getitem__(self, index: int) -> DirectoryRecord: ...

    @overload
    def __getitem__(self, index: slice) -> Records: ...

    def __getitem__(self, index: int | slice) -> DirectoryRecord | Records:
        if isinstance(index, slice):
            return Records(self._data, self._offsets[index])
        record = DirectoryRecord.unpack(self._data, self._offsets[index])
        assert record is not None  # it has been unpacked, or looked at, before
        return record

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Records) and self.pack() == other.pack()

    __hash__ = None  # type: ignore[assignment]

    def pack(self) -> bytes:
        """The bytes of the records, which lie one after another."""
        if not self._offsets:
            return b""
        return self._data[self._offsets[0] : self._offsets[-1] + self[-1].packed_size]

    def common(self, start: int, stop: int) -> list[bytes]:
        """What some records have as their local headers: version needed to size of the name.

        See 4.3.7 and 4.3.12.
        """
        data = self._data
        return [data[offset + 6 : offset + 30] for offset in self._offsets[start:stop]]


@dataclass(frozen=True, slots=True)
class Directory:
    """The central directory, read.

    Attributes:
        entries: The entries in directory order. Names may still occur twice.
        records: The directory record of each of them.
        names: The name of every record, in directory order, also of those that give no entry; None
            for one that is not UTF-8.
        sizes: Size in bytes of the data of every record, in the same order; None where it cannot
            be told.
        is_whole: Whether every record that the end records count is among them, and no other.
    """

    entries: Entries
    records: Records
    names: Sequence[str | None] = ()
    sizes: Sequence[int | None] = ()
    is_whole: bool = True

    def local_headers(self, start: int, stop: int, alignment: int) -> bytes | None:
        """The local headers that some entries have if `layout` has made them, one behind the other.

        Others may yet be right: `check_local_header` tells. None where they need Zip64, or cannot
        have this alignment.

        Args:
            start: The index of the first of them.
            stop: The index behind the last.
            alignment: What their data is aligned to, in bytes.
        """
        listed = self.entries
        names = [name.encode() for name in listed.names[start:stop]]
        ends = listed.data_offsets[start:stop]
        places = zip(names, listed.header_offsets[start:stop], ends, strict=True)
        paddings = [end - begin - len(name) - LEAST_HEADER_SIZE for name, begin, end in places]
        if (
            not 0 <= min(paddings) <= max(paddings) < alignment
            or max(listed.sizes[start:stop]) >= records.SATURATED_32
            or any(end % alignment for end in ends)
        ):
            return None
        if alignment == layout.MIN_ALIGNMENT:
            extras = [_EXTRAS[padding] for padding in paddings]
            extra_sizes = [_EXTRA_SIZES[padding] for padding in paddings]
        else:
            extras = [records.pack_alignment_extra(alignment, padding) for padding in paddings]
            extra_sizes = [len(extra).to_bytes(2, "little") for extra in extras]
        signatures = repeat(LocalHeader.SIGNATURE, stop - start)
        common = self.records.common(start, stop)
        parts = zip(signatures, common, extra_sizes, names, extras, strict=True)
        return b"".join(chain.from_iterable(parts))


LEAST_HEADER_SIZE: Final = LocalHeader.SIZE + records.ALIGNMENT_EXTRA_SIZE
# The extra fields of a local header for each padding of the usual alignment, and their sizes.
_EXTRAS: Final = [
    records.pack_alignment_extra(layout.MIN_ALIGNMENT, padding)
    for padding in range(layout.MIN_ALIGNMENT)
]
_EXTRA_SIZES: Final = [len(extra).to_bytes(2, "little") for extra in _EXTRAS]
EMPTY: Final = Directory(Entries((), (), (), (), ()), Records(b"", ()))
