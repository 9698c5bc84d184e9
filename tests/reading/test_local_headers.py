from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from findings import Findings
from models import break_local_header, entry_of
from processes import at_once

import onnxarchive
from onnxarchive.errors import ArchiveFormatError
from onnxarchive.files.local_file import MappedFile
from onnxarchive.reading.contents import read_contents
from onnxarchive.zipformat import records
from onnxarchive.zipformat.records import LocalHeader

COUNT = 600


@pytest.fixture(params=[(16, 64), (1 << 15, 64), (16, 4096)], ids=["close", "apart", "on pages"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An archive of many tensors: close together, far apart, or aligned otherwise."""
    nbytes, alignment = request.param
    written = tmp_path / "model.onnxa"
    with onnxarchive.Writer(written, alignment=alignment) as writer:
        for index in range(COUNT):
            writer.add(f"w{index}", np.full(nbytes, index % 256, np.uint8))
        writer.finish(onnx.ModelProto(ir_version=10, graph=onnx.GraphProto(name="g")))
    return written


Order = Callable[[int], list[int]]
in_every_order = pytest.mark.parametrize(
    "order",
    [
        lambda count: list(range(count)),
        lambda count: list(reversed(range(count))),
        lambda count: [index * 7 % count for index in range(count)],
        lambda count: [*range(0, count, 2), *range(1, count, 2)],
    ],
    ids=["in order", "backwards", "by sevens", "every other one"],
)


@pytest.mark.sweep
@in_every_order
@pytest.mark.parametrize("broken", [0, 1, 2, 300, 301, COUNT - 1])
def test_a_broken_header_is_refused_when_its_tensor_is_read_and_hides_no_other(
    path: Path, order: Order, broken: int
) -> None:
    break_local_header(path, entry_of(path, f"w{broken}"))
    with onnxarchive.open(path) as archive:
        for _ in range(2):  # those that are right stay so, and the broken one does not get right
            for index in order(COUNT):
                if index == broken:
                    with pytest.raises(ArchiveFormatError, match=f"'w{broken}'") as caught:
                        archive.tensors[f"w{index}"]
                    assert (caught.value.rule, caught.value.path) == ("ZIP-7", str(path))
                else:
                    assert archive.tensors[f"w{index}"][-1] == index % 256


def test_every_header_is_compared_once(path: Path) -> None:
    with onnxarchive.open(path) as archive:
        for index in range(COUNT):
            archive.tensors[f"w{index}"]
        for entry in archive.entries.values():
            break_local_header(path, entry)
        assert [archive.tensors[f"w{index}"][0] for index in range(COUNT)] == [
            index % 256 for index in range(COUNT)
        ]


def test_a_tensor_that_is_read_alone_brings_no_other_header(path: Path) -> None:
    with onnxarchive.open(path) as archive:
        for index in (5, 100, 101 + COUNT // 2):
            archive.tensors[f"w{index}"]
            break_local_header(path, archive.entries[f"w{index + 1}"])
            with pytest.raises(ArchiveFormatError, match="ZIP-7"):
                archive.tensors[f"w{index + 1}"]


def test_a_header_that_cannot_be_read_hides_no_other(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = MappedFile.read
    with onnxarchive.open(path) as archive:
        bad = archive.entries["w9"].header_offset

        def failing(file: MappedFile, offset: int, size: int) -> bytes:
            if offset <= bad < offset + size:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return read(file, offset, size)

        monkeypatch.setattr(MappedFile, "read", failing)
        for index in range(9):
            assert archive.tensors[f"w{index}"][0] == index
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            archive.tensors["w9"]
        assert archive.tensors["w10"][0] == 10


def test_threads_that_read_all_tensors_agree_on_the_broken_one(path: Path) -> None:
    break_local_header(path, entry_of(path, "w77"))
    refused: list[list[str]] = []
    with onnxarchive.open(path) as archive:
        names = list(archive.tensors)

        def read() -> None:
            found = []
            for name in names:
                try:
                    archive.tensors[name]
                except ArchiveFormatError:
                    found.append(name)
            refused.append(found)

        at_once(read for _ in range(4))
    assert refused == [["w77"]] * 4


def test_a_comparison_that_reports_goes_on(path: Path) -> None:
    with onnxarchive.open(path) as archive:
        for name in ("w3", "w9"):
            break_local_header(path, archive.entries[name])
        count = len(archive.entries)
    findings = Findings()
    with MappedFile(path) as file:
        contents = read_contents(file, findings)
        for number in range(count):
            contents.check_header(number, findings)
    assert findings.pairs == [("ZIP-7", "w3"), ("ZIP-7", "w9")]


def test_a_padding_that_is_a_whole_unit_too_long_is_refused(
    tmp_path: Path,
) -> None:
    path = tmp_path / "model.onnxa"
    with onnxarchive.Writer(path, alignment=256) as writer:
        for index in range(COUNT):
            writer.add(f"w{index}", np.full(64 + index % 3 * 64, index % 256, np.uint8))
        writer.finish(onnx.ModelProto(ir_version=10, graph=onnx.GraphProto(name="g")))
    with onnxarchive.open(path) as archive:
        entries = list(archive.entries.values())
    content = bytearray(path.read_bytes())
    wrong = set()
    for entry in entries:  # half of the alignment: half of the paddings are too long for it
        extra = entry.header_offset + LocalHeader.SIZE + len(entry.name.encode())
        content[extra + 4 : extra + 6] = (128).to_bytes(2, "little")
        if entry.data_offset - extra - records.ALIGNMENT_EXTRA_SIZE >= 128:
            wrong.add(entry.name)
    path.write_bytes(content)
    assert COUNT / 4 < len(wrong) < COUNT * 3 / 4
    refused = set()
    with onnxarchive.open(path) as archive:
        for index in range(COUNT):
            try:
                assert archive.tensors[f"w{index}"][0] == index % 256
            except ArchiveFormatError as error:
                assert error.rule == "ALIGN-3"
                refused.add(f"w{index}")
    assert refused == wrong - {"__MODEL_PROTO"}
