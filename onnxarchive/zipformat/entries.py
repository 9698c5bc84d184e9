"""Columns of entries, and packed directory records; each `Entry` or record is made on access."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, overload

from onnxarchive.zipformat import records
from onnxarchive.zipformat.records import DirectoryRecord, LocalHeader

VERSIONS_NEEDED = (records.VERSION_STORED, records.VERSION_FOLDER, records.VERSION_ZIP64)
# Size of a local header without name, padding and Zip64 field, in bytes.
LEAST_HEADER_SIZE: Final = LocalHeader.SIZE + records.ALIGNMENT_EXTRA_SIZE


class Entry(NamedTuple):
    """One entry of an archive.

    Attributes:
        name: The entry's name.
        header_offset: Offset of its local header in the file, in bytes.
        data_offset: Offset of its data in the file, in bytes.
        nbytes: Size of its data in bytes.
        crc32: CRC-32 of its data, as stated in the directory.

    Example:
        with onnxarchive.open("model.onnxa") as archive:
            for entry in archive.entries.values():
                print(entry.name, entry.data_offset, entry.nbytes)
    """

    name: str
    header_offset: int
    data_offset: int
    nbytes: int
    crc32: int


class Entries(Sequence[Entry]):
    """Entries, one column per attribute of `Entry`; `sizes` holds `nbytes`."""

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
    """Packed directory records, each unpacked on access.

    Attributes:
        data: The bytes of the directory.
        offsets: Offset of each record in `data`.
    """

    def __init__(self, data: bytes, offsets: Sequence[int]) -> None:
        self.data = data
        self.offsets = offsets

    def __len__(self) -> int:
        return len(self.offsets)

    @overload
    def __getitem__(self, index: int) -> DirectoryRecord: ...

    @overload
    def __getitem__(self, index: slice) -> Records: ...

    def __getitem__(self, index: int | slice) -> DirectoryRecord | Records:
        if isinstance(index, slice):
            return Records(self.data, self.offsets[index])
        record = DirectoryRecord.unpack(self.data, self.offsets[index])
        assert record is not None  # the directory's reader found a record there
        return record

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Records) and self.pack() == other.pack()

    __hash__ = None  # type: ignore[assignment]

    def pack(self) -> bytes:
        """The bytes from first to last record; in a valid directory, records are adjacent."""
        if not self.offsets:
            return b""
        return self.data[self.offsets[0] : self.offsets[-1] + self[-1].packed_size]


class Directory(NamedTuple):
    """The content of the central directory.

    Attributes:
        entries: The entries in directory order. Names may repeat.
        records: The directory record of each entry.
        names: Names of all records, even if the entry was left out; None for a name not in UTF-8.
        sizes: Size of every record's data in bytes; None if unknown.
        is_whole: True if number and size of the records match the end records.
    """

    entries: Entries
    records: Records
    names: Sequence[str | None] = ()
    sizes: Sequence[int | None] = ()
    is_whole: bool = True


EMPTY: Final = Directory(Entries((), (), (), (), ()), Records(b"", ()))
