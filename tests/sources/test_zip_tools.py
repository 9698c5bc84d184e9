"""Zips that other tools write are read, by every method and way of writing that they have."""

from __future__ import annotations

import io
import os
import random
import shutil
import subprocess
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from onnxarchive.errors import ArchiveError, ArchiveFormatError
from onnxarchive.sources.zip_file import ZippedFile, read_zip
from onnxarchive.zipformat.records import (
    METHOD_BZIP2,
    METHOD_DEFLATE,
    METHOD_DEFLATE64,
    METHOD_LZMA,
    METHOD_STORED,
    EndRecord,
    Zip64EndRecord,
)

pytestmark = pytest.mark.tool

TEXT = b"".join(b"line %d\n" % number for number in range(40_000))
FILES = {
    "model.onnx": TEXT,
    "onnx::Conv_22": random.Random(1).randbytes(70_000),
    "zeros": bytes(1 << 20),
    "empty": b"",
    "one": b"1",
    "folder/deeper/weight": TEXT[:999] * 50,
}


def needs(tool: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(tool) is None, reason=f"{tool} is not installed")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A directory with the files."""
    directory = tmp_path / "source"
    for name, data in FILES.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (directory / "hollow").mkdir()
    return directory


def run(command: list[str], directory: Path, *, data: bytes | None = None) -> bytes:
    """Runs a tool; returns its output."""
    done = subprocess.run(
        command, cwd=directory, input=data, capture_output=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def read(file: bytes) -> dict[str, ZippedFile]:
    """The files of a zip without unused bytes."""
    files, unused = read_zip(memoryview(file), None)
    assert unused == []
    return files


def require_files(file: bytes, expected: Mapping[str, bytes] = FILES) -> set[int]:
    """Requires exactly these files in a zip; returns its compression methods."""
    assert {name: b"".join(data) for name, data in read(file).items()} == dict(expected)
    with zipfile.ZipFile(io.BytesIO(file)) as opened:
        return {info.compress_type for info in opened.infolist() if not info.is_dir()}


# Info-ZIP


@needs("zip")
@pytest.mark.parametrize(
    ("options", "methods"),
    [
        (["-0"], {METHOD_STORED}),
        (["-9"], {METHOD_STORED, METHOD_DEFLATE}),
        (["-1"], {METHOD_STORED, METHOD_DEFLATE}),
        (["-Z", "bzip2"], {METHOD_STORED, METHOD_BZIP2}),
        (["-fd"], {METHOD_STORED, METHOD_DEFLATE}),
        (["-0", "-fd"], {METHOD_STORED}),
        (["-fz"], {METHOD_STORED, METHOD_DEFLATE}),
        (["-fz-"], {METHOD_STORED, METHOD_DEFLATE}),
        (["-D"], {METHOD_STORED, METHOD_DEFLATE}),
        (["-X"], {METHOD_STORED, METHOD_DEFLATE}),
    ],
)
def test_zip_to_a_file(source: Path, options: list[str], methods: set[int]) -> None:
    run(["zip", "-q", "-r", *options, "../made.zip", "."], source)
    assert require_files((source.parent / "made.zip").read_bytes()) == methods


@needs("zip")
@pytest.mark.parametrize("options", [[], ["-0"], ["-Z", "bzip2"], ["-fz-"]])
def test_zip_to_a_pipe(source: Path, options: list[str]) -> None:
    require_files(run(["zip", "-q", "-r", *options, "-", "."], source))


@needs("zip")
@pytest.mark.parametrize("options", [[], ["-fz-"], ["-fz"]])
def test_zip_from_a_pipe_to_a_file(tmp_path: Path, options: list[str]) -> None:
    run(["zip", "-q", *options, "made.zip", "-"], tmp_path, data=TEXT)
    require_files((tmp_path / "made.zip").read_bytes(), {"-": TEXT})


@needs("zip")
def test_zip_from_a_pipe_to_a_pipe(tmp_path: Path) -> None:
    require_files(run(["zip", "-q", "-", "-"], tmp_path, data=TEXT), {"-": TEXT})


@needs("zip")
def test_zip64_from_pipe_to_pipe_is_refused_since_zip_leaves_out_the_end_record(
    tmp_path: Path,
) -> None:
    with pytest.raises(ArchiveFormatError, match="directly before the end records"):
        read(run(["zip", "-q", "-fz", "-", "-"], tmp_path, data=TEXT))


@needs("zip")
def test_zip_with_comments(source: Path) -> None:
    run(["zip", "-q", "-r", "../made.zip", "."], source)
    run(["zip", "-q", "-z", "../made.zip"], source, data=b"a comment\n.\n")
    file = (source.parent / "made.zip").read_bytes()
    assert b"a comment" in file[-20:]
    require_files(file)


@needs("zip")
def test_zip_changed_afterwards(source: Path) -> None:
    run(["zip", "-q", "-r", "../made.zip", ".", "-x", "one"], source)
    run(["zip", "-q", "../made.zip", "one"], source)
    run(["zip", "-q", "-d", "../made.zip", "zeros"], source)
    run(["zip", "-q", "-g", "../made.zip", "zeros"], source)
    require_files((source.parent / "made.zip").read_bytes())


@needs("zip")
@pytest.mark.parametrize("option", ["-y", "-e"])
def test_zip_with_links_or_encryption_is_refused(source: Path, option: str) -> None:
    (source / "link").symlink_to("one")
    secret = ["-P", "secret"] if option == "-e" else []
    run(["zip", "-q", "-r", *(secret or [option]), "../made.zip", "."], source)
    with pytest.raises(ArchiveError, match=r"a link|encrypted"):
        read((source.parent / "made.zip").read_bytes())


@needs("zip")
def test_split_zip_is_refused(source: Path) -> None:
    run(["zip", "-q", "-0", "-r", "-s", "1m", "../made.zip", "."], source)
    with pytest.raises(ArchiveError, match="one part of a split zip"):
        read((source.parent / "made.zip").read_bytes())


# 7-Zip


@needs("7z")
@pytest.mark.parametrize(
    ("options", "method"),
    [
        (["-mm=Copy"], METHOD_STORED),
        (["-mm=Deflate"], METHOD_DEFLATE),
        (["-mm=Deflate", "-mx=9"], METHOD_DEFLATE),
        (["-mm=Deflate64"], METHOD_DEFLATE64),
        (["-mm=Deflate64", "-mx=9"], METHOD_DEFLATE64),
        (["-mm=BZip2"], METHOD_BZIP2),
        (["-mm=LZMA"], METHOD_LZMA),
        (["-mm=LZMA", "-mx=9"], METHOD_LZMA),
        (["-mm=LZMA:eos=off"], METHOD_LZMA),
        (["-mm=LZMA:lc=0:lp=2:pb=0"], METHOD_LZMA),
        (["-mm=Deflate", "-mtc=on", "-mcu=on"], METHOD_DEFLATE),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_7z(source: Path, options: list[str], method: int) -> None:
    run(["7z", "a", "-tzip", *options, "../made.zip", "."], source)
    assert require_files((source.parent / "made.zip").read_bytes()) == {METHOD_STORED, method}


@needs("7z")
@pytest.mark.parametrize("method", ["Deflate", "Deflate64", "LZMA", "BZip2"])
def test_7z_from_a_pipe_to_a_pipe(tmp_path: Path, method: str) -> None:
    command = ["7z", "a", "-tzip", f"-mm={method}", "-simodel.onnx", "-so", "made.zip"]
    require_files(run(command, tmp_path, data=TEXT), {"model.onnx": TEXT})


@needs("7z")
def test_7z_marks_names_that_are_not_ascii(tmp_path: Path) -> None:
    (tmp_path / "é").write_bytes(b"data")
    run(["7z", "a", "-tzip", "made.zip", "é"], tmp_path)
    require_files((tmp_path / "made.zip").read_bytes(), {"é": b"data"})


@needs("7z")
@pytest.mark.parametrize("method", ["Deflate64", "LZMA:eos=off", "LZMA", "BZip2", "Deflate"])
def test_7z_of_every_size(tmp_path: Path, method: str) -> None:
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


# Python's zipfile


class Pipe(io.BytesIO):
    """A file that cannot be sought in."""

    def seekable(self) -> bool:
        return False

    def seek(self, offset: int, whence: int = 0) -> int:
        raise io.UnsupportedOperation

    def tell(self) -> int:
        raise io.UnsupportedOperation


@pytest.mark.parametrize("file_type", [io.BytesIO, Pipe])
@pytest.mark.parametrize("force_zip64", [False, True])
@pytest.mark.parametrize("method", [METHOD_STORED, METHOD_DEFLATE, METHOD_BZIP2, METHOD_LZMA])
def test_zipfile(method: int, force_zip64: bool, file_type: type[io.BytesIO]) -> None:
    file = file_type()
    files = {**FILES, "é/ü": b"data"}
    with zipfile.ZipFile(file, "w", method) as written:
        for name, data in files.items():
            with written.open(name, "w", force_zip64=force_zip64) as entry:
                entry.write(data)
        written.writestr("hollow/", b"")
    assert require_files(file.getvalue(), files) == {method}


def test_zipfile_that_was_added_to() -> None:
    file = io.BytesIO()
    for name, data in FILES.items():
        with zipfile.ZipFile(file, "a") as written:
            written.writestr(name, data)
            written.comment = b"a comment that is shortened later"[: -len(name)]
    require_files(file.getvalue())


# libarchive


@needs("bsdtar")
@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--options", "zip:compression=store"],
        ["--options", "zip:zip64"],
        ["--options", "zip:!zip64"],
        ["--options", "zip:experimental"],
    ],
)
def test_bsdtar(source: Path, options: list[str]) -> None:
    names = sorted(os.listdir(source))
    run(["bsdtar", "--format", "zip", *options, "-cf", "../made.zip", *names], source)
    require_files((source.parent / "made.zip").read_bytes())


@needs("bsdtar")
def test_bsdtar_to_a_pipe_is_refused_since_it_pads_as_for_a_tape(source: Path) -> None:
    printed = run(["bsdtar", "--format", "zip", "-cf", "-", *sorted(os.listdir(source))], source)
    with pytest.raises(ArchiveFormatError, match="expected a comment of 0 bytes"):
        read(printed)
    require_files(printed[: printed.rindex(EndRecord.SIGNATURE) + EndRecord.SIZE])


# Java

JAVA = """
import java.io.*;
import java.nio.file.*;
import java.util.zip.*;

public class Pack {
    public static void main(String[] names) throws Exception {
        boolean stored = names[0].equals("stored");
        try (ZipOutputStream zip = new ZipOutputStream(new FileOutputStream("../made.zip"))) {
            zip.setComment("by Java");
            zip.putNextEntry(new ZipEntry("hollow/"));
            for (int i = 1; i < names.length; i++) {
                byte[] data = Files.readAllBytes(Paths.get(names[i]));
                ZipEntry entry = new ZipEntry(names[i]);
                if (stored) {
                    CRC32 crc = new CRC32();
                    crc.update(data);
                    entry.setMethod(ZipEntry.STORED);
                    entry.setSize(data.length);
                    entry.setCrc(crc.getValue());
                }
                zip.putNextEntry(entry);
                zip.write(data);
                zip.closeEntry();
            }
        }
    }
}
"""


@needs("javac")
@pytest.mark.parametrize(
    ("way", "method"), [("deflated", METHOD_DEFLATE), ("stored", METHOD_STORED)]
)
def test_java(source: Path, way: str, method: int) -> None:
    program = source.parent / "Pack.java"
    program.write_text(JAVA)
    run(["java", str(program), way, *FILES], source)
    assert require_files((source.parent / "made.zip").read_bytes()) == {method}


@needs("jar")
@pytest.mark.parametrize("options", ["cMf", "c0Mf", "cf"])
def test_jar(source: Path, options: str) -> None:
    run(["jar", options, "../made.jar", *sorted(os.listdir(source))], source)
    file = (source.parent / "made.jar").read_bytes()
    with zipfile.ZipFile(io.BytesIO(file)) as opened:
        manifest = {
            info.filename: opened.read(info)
            for info in opened.infolist()
            if info.filename == "META-INF/MANIFEST.MF"
        }
    require_files(file, {**FILES, **manifest})


# Many entries


@pytest.mark.parametrize("count", [65_535, 65_536])
def test_zipfile_of_many_entries_writes_a_zip64_record_for_the_second_only(count: int) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as written:
        for number in range(count):
            written.writestr(zipfile.ZipInfo(f"{number}"), b"")
    assert (Zip64EndRecord.SIGNATURE in file.getvalue()[-200:]) == (count > 65_535)
    assert len(read(file.getvalue())) == count
