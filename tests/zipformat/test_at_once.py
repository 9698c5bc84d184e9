"""Small entries that are packed together, against entries that are written one by one."""

from __future__ import annotations

import io

import pytest

from onnxarchive.buffers.checksums import crc32
from onnxarchive.zipformat.small_entries_at_once import pack_entries
from onnxarchive.zipformat.writer import ZipWriter

GIB_4 = 1 << 32


@pytest.mark.parametrize("alignment", [64, 4096])
@pytest.mark.parametrize("offset", [0, 1000, 0x06054B50 - 64 * 3, GIB_4 - 500, GIB_4 + 64])
@pytest.mark.parametrize("name", ["w", "ü"])
def test_small_entries_are_written_as_one_by_one(alignment: int, offset: int, name: str) -> None:
    contents = [bytes([index]) * size for index, size in enumerate((64, 0, 1, 100, 16, 192, 64))]
    names = [f"{name}{index}" for index in range(len(contents))]
    written = []
    for is_together in (False, True):
        target = io.BytesIO()
        writer = ZipWriter(target, alignment=alignment, offset=offset)
        if is_together:
            writer.add_small(names, list(map(crc32, contents)), contents)
        else:
            for each, content in zip(names, contents, strict=True):
                writer.add(each, content)
        writer.add("__MODEL_PROTO", b"model")
        writer.finish()
        written.append((target.getvalue(), writer.names, writer.header_offsets))
    assert written[0] == written[1]


def test_an_end_that_holds_a_signature_is_left_to_the_plain_way() -> None:
    at = int.from_bytes(b"PK\5\6", "little")
    contents = [bytes(at % 64), b"1"]
    begin = at // 64 * 64 - 64
    assert pack_entries(["w0"], [0], contents[:1], begin, 64) is None
    assert pack_entries(["w0"], [0], contents[1:], begin, 64) is not None
