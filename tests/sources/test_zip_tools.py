"""Zips that other tools write are read, by every method and way of writing that they have."""

from __future__ import annotations

import io
import random
import shutil
import subprocess
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from onnxarchive.errors import ArchiveError, ArchiveFormatError
from onnxarchive.files.data import Range
from onnxarchive.sources.zip_file import ZippedFile, read_zip
from onnxarchive.zipformat.records import EndRecord, Zip64EndRecord

pytestmark = pytest.mark.tool

TEXT = b"".join(b"line %d\n" % number for number in range(40_000))


def needs(tool: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(tool) is None, reason=f"{tool} is not installed")


def run(command: list[str], directory: Path, *, data: bytes | None = None) -> bytes:
    """Runs a tool; returns its output."""
    done = subprocess.run(
        command, cwd=directory, input=data, capture_output=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def contents(file: ZippedFile) -> bytes:
    return b"".join(Range.whole(file).pieces())


def read(file: bytes) -> dict[str, ZippedFile]:
    """The files of a zip without unused bytes."""
    files, unused = read_zip(memoryview(file), None)
    assert unused == []
    return files


def require_files(file: bytes, expected: Mapping[str, bytes]) -> None:
    assert {name: contents(data) for name, data in read(file).items()} == dict(expected)


# Info-ZIP


@needs("zip")
@pytest.mark.parametrize(
    "command", [["made.zip", "-"], ["-fz-", "made.zip", "-"], ["-fz", "made.zip", "-"], ["-", "-"]]
)
def test_a_zip_that_zip_makes_from_a_pipe_is_read(tmp_path: Path, command: list[str]) -> None:
    printed = run(["zip", "-q", *command], tmp_path, data=TEXT)
    require_files(printed or (tmp_path / "made.zip").read_bytes(), {"-": TEXT})


@needs("zip")
def test_zip64_from_pipe_to_pipe_is_refused_since_zip_leaves_out_the_end_record(
    tmp_path: Path,
) -> None:
    with pytest.raises(ArchiveFormatError, match="directly before the end records"):
        read(run(["zip", "-q", "-fz", "-", "-"], tmp_path, data=TEXT))


@needs("zip")
def test_a_split_zip_is_refused(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "file").write_bytes(random.Random(1).randbytes(3 << 20))
    run(["zip", "-q", "-0", "-r", "-s", "1m", "../made.zip", "."], tmp_path / "source")
    with pytest.raises(ArchiveError, match="one part of a split zip"):
        read((tmp_path / "made.zip").read_bytes())


# 7-Zip


@needs("7z")
@pytest.mark.parametrize("method", ["Deflate", "Deflate64", "LZMA", "BZip2"])
def test_a_zip_that_7z_makes_from_pipe_to_pipe_is_read(tmp_path: Path, method: str) -> None:
    command = ["7z", "a", "-tzip", f"-mm={method}", "-simodel.onnx", "-so", "made.zip"]
    require_files(run(command, tmp_path, data=TEXT), {"model.onnx": TEXT})


@needs("7z")
def test_names_that_are_not_ascii_are_read_from_a_zip_of_7z(tmp_path: Path) -> None:
    (tmp_path / "é").write_bytes(b"data")
    run(["7z", "a", "-tzip", "made.zip", "é"], tmp_path)
    require_files((tmp_path / "made.zip").read_bytes(), {"é": b"data"})


@needs("7z")
@pytest.mark.parametrize("method", ["Deflate64", "LZMA:eos=off", "LZMA", "BZip2", "Deflate"])
def test_files_of_many_sizes_that_7z_compressed_are_read(tmp_path: Path, method: str) -> None:
    """The ends of compressed data, in all the states that an encoder may be in."""
    random_numbers = random.Random(2)
    expected = {}
    for size in range(1, 200):
        words = [b"and", b"or", b"%d" % size, random_numbers.randbytes(2)]
        data = b" ".join(random_numbers.choices(words, k=size))
        expected[f"{size}"] = data
        (tmp_path / f"{size}").write_bytes(data)
    run(["7z", "a", "-tzip", f"-mm={method}", "../made.zip", "."], tmp_path)
    require_files((tmp_path.parent / "made.zip").read_bytes(), expected)
    (tmp_path.parent / "made.zip").unlink()


# libarchive


@needs("bsdtar")
def test_bsdtar_to_a_pipe_is_refused_since_it_pads_as_for_a_tape(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(TEXT)
    printed = run(["bsdtar", "--format", "zip", "-cf", "-", "file"], tmp_path)
    with pytest.raises(ArchiveFormatError, match="expected a comment of 0 bytes"):
        read(printed)
    require_files(printed[: printed.rindex(EndRecord.SIGNATURE) + EndRecord.SIZE], {"file": TEXT})


# Many entries


@pytest.mark.parametrize("count", [65_535, 65_536])
def test_zipfile_of_many_entries_writes_a_zip64_record_for_the_second_only(count: int) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as written:
        for number in range(count):
            written.writestr(zipfile.ZipInfo(f"{number}"), b"")
    assert (Zip64EndRecord.SIGNATURE in file.getvalue()[-200:]) == (count > 65_535)
    assert len(read(file.getvalue())) == count
