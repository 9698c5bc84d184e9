"""Beyond 32 bits: a tensor of more than 4 GiB followed by another, and models over 2 GiB.

Sources and archives are sparse, but where a test is about writing.
"""

from __future__ import annotations

import itertools
import os
import shutil
import struct
import subprocess
import zipfile
import zlib
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from processes import completed
from sparse_files import GIB, convert_sparsely, external, write_data, write_model

import onnxarchive
from onnxarchive.files.data import crc32

pytestmark = pytest.mark.large

SIZE = 4 * GIB + 100
# Bytes that are not 0, at offsets of the large tensor.
MARKS = {
    0: b"first",
    2 * GIB - 3: b"over 2 GiB",
    4 * GIB - 3: b"over 4 GiB",
    SIZE - 4: b"last",
}
SMALL = np.arange(300, dtype=np.float32)


# A tensor of more than 4 GiB


@pytest.fixture(scope="module")
def source(large_folder: Path) -> Path:
    path = large_folder / "over_4_gib.onnx"
    data = large_folder / "over_4_gib.data"
    write_data(data, SIZE + SMALL.nbytes, {**MARKS, SIZE: SMALL.tobytes()})
    write_model(
        path,
        [
            external("large", TensorProto.INT8, [SIZE], data.name, 0),
            external("small", TensorProto.FLOAT, [300], data.name, SIZE),
        ],
    )
    return path


@pytest.fixture(scope="module")
def archive(source: Path) -> Path:
    path = source.with_suffix(".onnxa")
    convert_sparsely(source, path)
    return path


def test_an_archive_of_more_than_4_gib_has_the_same_bytes_at_a_path_and_in_a_stream(
    source: Path, archive: Path, tmp_path: Path
) -> None:
    path = tmp_path / "written.onnxa"
    try:
        onnxarchive.convert(source, path)
        assert os.listdir(tmp_path) == [path.name]
        with open(path, "rb") as written, open(archive, "rb") as expected:
            while piece := written.read(1 << 24):
                assert piece == expected.read(1 << 24)
            assert expected.read() == b""
    finally:
        path.unlink(missing_ok=True)


def test_sizes_and_offsets_over_4_gib_are_found(archive: Path) -> None:
    with onnxarchive.open(archive) as opened:
        large, small, model = opened.entries.values()
        assert (large.name, large.nbytes, large.header_offset) == ("large", SIZE, 0)
        # 30 bytes, the name, 20 of the Zip64 field, 6 of the alignment field, and padding.
        assert large.data_offset == 64
        assert (small.name, small.nbytes, small.header_offset) == ("small", 1200, 64 + SIZE)
        assert small.data_offset % 64 == 0
        assert model.header_offset == small.data_offset + small.nbytes
        assert small.crc32 == zlib.crc32(SMALL.tobytes())
    size = os.path.getsize(archive)
    assert size > 4 * GIB
    with open(archive, "rb") as file:
        file.seek(size - 98)
        zip64_record, locator, end = struct.unpack("<56s20s22s", file.read())
    assert zip64_record.startswith(b"PK\6\6")
    assert locator.startswith(b"PK\6\7")
    assert end == b"PK\5\6" + bytes(4) + b"\xff" * 12 + bytes(2)


def test_a_tensor_over_4_gib_is_a_view(archive: Path) -> None:
    with onnxarchive.open(archive) as opened:
        array = opened.tensors["large"]
        assert array.dtype == np.int8
        assert array.shape == (SIZE,)
        for offset, mark in MARKS.items():
            assert array[offset : offset + len(mark)].tobytes() == mark
        assert not array[4 * GIB + 10 : SIZE - 4].any()
        np.testing.assert_array_equal(opened.tensors["small"], SMALL)


def test_the_crc32_of_more_than_4_gib_is_that_of_zlib(archive: Path) -> None:
    with onnxarchive.open(archive) as opened:
        data = opened.read("large")
        expected = 0
        for start in range(0, SIZE, 1 << 30):
            expected = zlib.crc32(data[start : start + (1 << 30)], expected)
        assert opened.entries["large"].crc32 == expected
        assert crc32(data) == expected  # all at once, as some callers do


def test_every_byte_of_more_than_4_gib_is_verified(archive: Path) -> None:
    assert onnxarchive.check(archive, full=True) == []
    done: list[int] = []
    with onnxarchive.open(archive) as opened:
        opened.verify(lambda now, total: done.append(now))
        assert done[-1] == sum(entry.nbytes for entry in opened.entries.values())
        assert max(after - before for before, after in itertools.pairwise(done)) <= 1 << 24
    position = 64 + SIZE - 1
    with open(archive, "r+b") as file:
        file.seek(position)
        file.write(b"T")
        file.flush()
        try:
            with (
                onnxarchive.open(archive) as opened,
                pytest.raises(onnxarchive.ChecksumError, match="entry 'large'"),
            ):
                opened.verify()
        finally:
            file.seek(position)
            file.write(b"t")


def test_zipfile_finds_more_than_4_gib(archive: Path) -> None:
    with onnxarchive.open(archive) as opened, zipfile.ZipFile(archive) as by_zipfile:
        found = [(info.filename, info.file_size, info.CRC) for info in by_zipfile.infolist()]
        expected = [(entry.name, entry.nbytes, entry.crc32) for entry in opened.entries.values()]
        assert found == expected
        # The CRC-32 of what is read is compared, too.
        assert by_zipfile.read("small") == SMALL.tobytes()
        assert by_zipfile.read("__MODEL_PROTO") == opened.read("__MODEL_PROTO")
        with by_zipfile.open("large") as large:
            large.seek(4 * GIB - 3)
            assert large.read(10) == b"over 4 GiB"


@pytest.mark.parametrize(
    ("command", "says"),
    [(["unzip", "-t"], "No errors detected"), (["7z", "t"], "Everything is Ok")],
    ids=["unzip", "7z"],
)
def test_a_zip_tool_tests_more_than_4_gib(archive: Path, command: list[str], says: str) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    done = completed([*command, archive], status=0)
    assert says in done.stdout
    assert "warning" not in done.stdout.lower()


def test_bsdtar_and_java_find_the_tensor_beyond_4_gib(archive: Path, tmp_path: Path) -> None:
    found = {}
    if bsdtar := shutil.which("bsdtar"):
        command = [bsdtar, "-xOf", str(archive), "small"]
        found["bsdtar"] = subprocess.run(command, capture_output=True, check=True).stdout
    if java := shutil.which("java"):
        program = tmp_path / "Tool.java"
        program.write_text("""
            public class Tool {
                public static void main(String[] arguments) throws java.io.IOException {
                    try (var file = new java.util.zip.ZipFile(arguments[0])) {
                        if (file.getEntry("large").getSize() != Long.parseLong(arguments[1])) {
                            throw new java.io.IOException("another size");
                        }
                        file.getInputStream(file.getEntry("small")).transferTo(System.out);
                    }
                }
            }
        """)
        command = [java, str(program), str(archive), str(SIZE)]
        found["java"] = subprocess.run(command, capture_output=True, check=True).stdout
    if not found:
        pytest.skip("neither bsdtar nor java is installed")
    assert found == dict.fromkeys(found, SMALL.tobytes())


# A model of more than 2 GiB

HALF = 295_279_002  # elements of 4 bytes: 1.1 GiB
HALF_SIZE = 4 * HALF


@pytest.fixture(scope="module")
def two_halves(large_folder: Path) -> Path:
    """An archive of two tensors that are too large for one .onnx."""
    source = large_folder / "halves.onnx"
    data, path = source.with_suffix(".data"), source.with_suffix(".onnxa")
    marks = {0: 1.0, HALF_SIZE - 4: 10.0, HALF_SIZE: 2.0, 2 * HALF_SIZE - 4: 11.0}
    packed = {offset: struct.pack("<f", value) for offset, value in marks.items()}
    write_data(data, 2 * HALF_SIZE, packed)
    halves = [
        external(f"half{half}", TensorProto.FLOAT, [HALF], data.name, half * HALF_SIZE)
        for half in range(2)
    ]
    write_model(source, halves)
    convert_sparsely(source, path)
    return path


def test_a_model_of_more_than_2_gib_is_opened(two_halves: Path) -> None:
    with onnxarchive.open(two_halves) as opened:
        assert opened.model.ByteSize() < 10_000
        for half in range(2):
            array = opened.tensors[f"half{half}"]
            assert (array[0], array[1], array[-1]) == (half + 1, 0, half + 10)


def test_a_model_of_more_than_2_gib_is_exported_with_external_data(
    two_halves: Path, tmp_path: Path
) -> None:
    path, data = tmp_path / "model.onnx", tmp_path / "model.data"
    try:
        onnxarchive.export(two_halves, path, external_data="model.data")
        onnx.checker.check_model(str(path), full_check=True)
        model = onnx.load(path, load_external_data=False)
        offsets = []
        for half, tensor in enumerate(model.graph.initializer):
            fields = {field.key: field.value for field in tensor.external_data}
            assert (fields["location"], fields["length"]) == ("model.data", str(HALF_SIZE))
            offset = int(fields["offset"])
            offsets.append(offset)
            with open(data, "rb") as file:
                file.seek(offset)
                assert struct.unpack("<2f", file.read(8)) == (half + 1, 0)
                file.seek(offset + HALF_SIZE - 8)
                assert struct.unpack("<2f", file.read(8)) == (0, half + 10)
        assert offsets == [0, -(-HALF_SIZE // 4096) * 4096]
        assert data.stat().st_size == offsets[1] + HALF_SIZE
    finally:
        data.unlink(missing_ok=True)


def test_a_model_of_more_than_2_gib_is_no_single_onnx(two_halves: Path, tmp_path: Path) -> None:
    with pytest.raises(onnxarchive.UnsupportedFeatureError, match=r"external_data='NAME\.data'"):
        onnxarchive.export(two_halves, tmp_path / "single.onnx")
    assert os.listdir(tmp_path) == []
