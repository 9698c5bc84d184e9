"""Small archives to damage, and the bits that no rule constrains.

An archive consists of pieces of its file, with holes between them.
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from models import external, model_of, raw_tensor
from onnx import TensorProto

import onnxarchive
from onnxarchive.files.data import crc32
from onnxarchive.zipformat import layout
from onnxarchive.zipformat.layout import EntryLayout

LARGE = (1 << 32) + 5  # bytes, all zero
LARGE_CRC32 = 0xB1C2A1A3
# Free bits of the external attributes: the type (regular file or none), permissions, and MS-DOS's
# read-only, hidden, system and archive.
EXTERNAL_BITS = 0x81FF0027


@dataclass(frozen=True)
class Pieces:
    """The bytes of a file at their offsets, in ascending order.

    Attributes:
        parts: Offset and bytes of each piece; the file ends with the last piece.
    """

    parts: tuple[tuple[int, bytes], ...]

    @property
    def size(self) -> int:
        offset, data = self.parts[-1]
        return offset + len(data)

    @property
    def stored(self) -> int:
        """The number of bytes in the pieces."""
        return sum(len(data) for _, data in self.parts)

    def each_byte(self) -> Iterator[tuple[int, int]]:
        """Yields the offset and the value of every stored byte."""
        for offset, data in self.parts:
            yield from enumerate(data, offset)

    def replaced(self, offset: int, data: bytes, *, instead_of: int) -> Pieces:
        """Replaces `instead_of` bytes by `data`; the rest of the file moves."""
        parts: list[tuple[int, bytes]] = []
        moved = 0
        for start, piece in self.parts:
            at = offset - start
            if 0 <= at <= len(piece) - instead_of:
                parts.append((start + moved, piece[:at] + data + piece[at + instead_of :]))
                moved += len(data) - instead_of
            else:
                parts.append((start + moved, piece))
        return Pieces(tuple(parts))

    def cut(self, size: int) -> Pieces:
        """The first `size` bytes."""
        parts = [(start, piece[: size - start]) for start, piece in self.parts if start < size]
        return Pieces((*parts, (size, b"")))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the file, in place if it exists."""
        with open(path, "wb", buffering=0) as file:
            for offset, data in self.parts:
                file.seek(offset)
                file.write(data)
            file.truncate(self.size)


def plain() -> Pieces:
    """Two tensors and an asset."""
    tensors = [raw_tensor("w", TensorProto.FLOAT, (5,)), raw_tensor("v", TensorProto.UINT16, (3,))]
    return _saved(*tensors, assets={"ü": b"cat"})


def odd_types() -> Pieces:
    """An empty tensor, a 4-bit tensor with unused bits, and a tensor of booleans."""
    return _saved(
        raw_tensor("none", TensorProto.FLOAT, (0, 2)),
        raw_tensor("four", TensorProto.INT4, (3,)),
        raw_tensor("bools", TensorProto.BOOL, (4,)),
    )


def _saved(*tensors: TensorProto, assets: dict[str, bytes] | None = None) -> Pieces:
    file = io.BytesIO()
    onnxarchive.save(model_of(*tensors), file, size_threshold=0, assets=assets)
    return Pieces(((0, file.getvalue()),))


def zip64() -> Pieces:
    """A tensor of more than 4 GiB, then an empty tensor: all kinds of Zip64 fields and records.

    The hole contains the data of the large tensor.
    """
    model = model_of(
        external(TensorProto(name="large", data_type=TensorProto.UINT8, dims=[LARGE]), "large"),
        external(raw_tensor("none", dims=(0,)), "none"),
    ).SerializeToString()
    large = EntryLayout(b"large", LARGE, LARGE_CRC32, 0)
    placements = [large]
    behind = b""
    for name, data in ((b"none", b""), (b"__MODEL_PROTO", model)):
        placements.append(EntryLayout(name, len(data), crc32(data), placements[-1].end))
        behind += placements[-1].pack()[0] + data
    directory = b"".join(placement.pack()[1] for placement in placements)
    end = layout.end_of_archive(len(placements), len(directory), placements[-1].end)
    return Pieces(((0, large.pack()[0]), (large.end, behind + directory + end)))


def free_bits(archive: Pieces) -> set[tuple[int, int]]:
    """The bits that may change one at a time by section 5.2, as offset and index in the byte.

    The bits are in directory records and Zip64 end records. No single bit of time and date may
    change: both headers of an entry state them.
    """
    start, tail = archive.parts[-1]
    end = len(tail) - 22
    free = []  # offset, bits
    count, _, directory_offset = struct.unpack_from("<HII", tail, end + 10)
    if directory_offset == 0xFFFFFFFF:
        record = end - 20 - 56
        free.append((record + 12, 0xFFFF))  # version made by
        count, _, directory_offset = struct.unpack_from("<3Q", tail, record + 32)
    position = directory_offset - start
    for _ in range(count):
        assert tail[position : position + 4] == b"PK\x01\x02"
        free.append((position + 4, 0x00FF))  # version made by
        free.append((position + 38, EXTERNAL_BITS))
        position += 46 + sum(struct.unpack_from("<3H", tail, position + 28))
    return {
        (start + at + bit // 8, bit % 8)
        for at, bits in free
        for bit in range(32)
        if bits >> bit & 1
    }
