"""Errors about files that are no archives say what they are, and which command helps."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import re
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tarfile import TarInfo

import edits
import onnx
import pytest
from google.protobuf import text_format
from models import run_python, runnable_model
from written import zipped

import onnxarchive
from onnxarchive import ArchiveFormatError
from onnxarchive.cli import main
from onnxarchive.model.keys import MODEL_PROTO
from onnxarchive.sources import recognition
from onnxarchive.zipformat import layout


def _zip(*names: str) -> Callable[[Path], object]:
    return partial(zipped, files=dict.fromkeys(names, b"content"))


def _onnx(path: Path) -> None:
    path.write_bytes(runnable_model().SerializeToString())


def _directory(path: Path) -> None:
    path.mkdir()
    _onnx(path / "model.onnx")
    (path / "._model.onnx").touch()  # made by macOS on other file systems


def _directory_of_two(path: Path) -> None:
    _directory(path)
    _onnx(path / "another.onnx")


def _directory_of_kinds(path: Path) -> None:
    _directory(path)
    _onnx(path / MODEL_PROTO)


def _safetensors(path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


def _stubbed_zip(path: Path) -> None:
    _zip("m.onnx")(path)
    path.write_bytes(b"#!/bin/sh\n" + path.read_bytes())


def _split_zip(path: Path) -> None:
    """The last part, as Info-ZIP writes it: the end record has the numbers of two disks."""
    _zip("m.onnx")(path)
    data = bytearray(path.read_bytes())
    data[-18:-14] = b"\4\0\4\0"
    path.write_bytes(b"the rest of a tensor" + data[data.index(b"PK\1\2") :])


def _unwritten_zip(path: Path) -> None:
    _zip("m.onnx")(path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + bytes(2 << 20))


def _first_half_of_zip(path: Path) -> None:
    _zip("m.onnx")(path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def _last_half_of_zip(path: Path) -> None:
    _zip("m.onnx")(path)
    path.write_bytes(path.read_bytes()[20:])


def _cut_model(path: Path) -> None:
    data = runnable_model().SerializeToString()
    path.write_bytes(data[: len(data) // 2])


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
OLD_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80"
CONVERT = "'onnxarchive convert {} NEW.onnxa'"
CONVERT_ONE = f"'onnxarchive convert {{}}/{MODEL_PROTO} NEW.onnxa'"
CONVERT_ALL = "'onnxarchive convert {} --output-dir NEW'"
EXPORT = "'onnxarchive convert MODEL.onnx NEW.onnxa'"
TEXT = "# a comment\n" + text_format.MessageToString(runnable_model())
LOAD = "onnx.load('FILE')"
# How each kind of file is made, its name, what helps, and whether `convert` looks for a model.
KINDS: dict[str, tuple[Callable[[Path], object], str, str, bool]] = {
    "m.onnx": (_onnx, "an ONNX model", CONVERT, True),
    "model without suffix": (_onnx, "an ONNX model", CONVERT, True),
    "m.zip": (_zip("sub/m.onnx"), "a plain zip with a model", CONVERT, True),
    "directory": (_directory, "a directory with a model", CONVERT, True),
    "models": (_directory_of_two, "a directory with 2 models", CONVERT_ALL, True),
    "unzipped": (
        _directory_of_kinds,
        f"a directory with {MODEL_PROTO} and other",
        CONVERT_ONE,
        True,
    ),
    "models.zip": (_zip("a.onnx", "b.onnx"), "a plain zip with 2", "unzip", True),
    "renamed.zip": (_zip(f"{MODEL_PROTO}.onnx"), "a plain zip with a model", CONVERT, True),
    "stub.zip": (_stubbed_zip, "a zip after 10 other bytes", "unzip it", False),
    "m.zip.001": (_first_half_of_zip, "a part of a split file, by its name", "'cat NAME", False),
    "cut.onnxa": (_last_half_of_zip, "a zip that lacks 20 bytes before its", "download", False),
    "split.zip": (_split_zip, "the last part of a split zip", "'zip -s 0", False),
    "zips.zip": (_zip("a.txt", "in/m.zip"), "a zip with a zip in it, 'in/m.zip'", "unzip", False),
    "archives.zip": (_zip("m.onnxa"), "a zip with an archive in it", "unzip it first", False),
    "unwritten.zip": (_unwritten_zip, "a zip that ends with zeros", "download", False),
    "cut.onnx": (_cut_model, "an ONNX model that ends at least ", "interrupted", False),
    "folder": (os.mkdir, "a directory without a model (__MODEL_PROTO or *.onnx); ", CONVERT, True),
    "photos.zip": (_zip("a.jpg"), "a zip without a model", "*.onnx", True),
    "m.pt": (_zip("m/data.pkl"), "a file of torch.save", EXPORT, False),
    "m.safetensors": (_safetensors, "a safetensors file", EXPORT, False),
    "m.npz": (_zip("w.npy"), "a zip of numpy arrays", EXPORT, False),
    "m.keras": (_zip("model.weights.h5"), "a Keras model", "tf2onnx", False),
    **{
        name: (partial(Path.write_bytes, data=content), kind, help, False)
        for name, content, kind, help in (
            ("old.pt", OLD_TORCH, "a file of torch.save", "torch.onnx.export"),
            ("m.z01", b"PK\x07\x08PK\3\4", "the first part of a split zip", "'zip -s 0"),
            ("m.z02", b"\x80\xff\xfe", "a part of a split zip, by its name", "'zip -s 0"),
            ("m.onnxa.002", b"\x80\xff\xfe", "a part of a split file, by its name", "'cat NAME"),
            ("m.onnx.dvc", b"outs:\n- md5: d8e8\n  path: m.onnx\n", "a DVC pointer", "'dvc pull'"),
            ("wdir.dvc", b"md5: 1f\nouts:\n- size: 1\n", "a DVC pointer", "'dvc pull'"),
            ("m.textproto", TEXT.encode(), "an ONNX model as text", LOAD),
            ("m.json", b'{\n  "irVersion": "10"', "an ONNX model as JSON", LOAD),
            (
                "m.onnxtxt",
                b'<ir_version: 7, opset_import: ["": 10]>',
                "an ONNX model as text",
                LOAD,
            ),
            ("unwritten.onnxa", bytes(10_000), "a file that begins with zeros", "download"),
            ("m.gguf", b"GGUF\3\0\0\0", "a GGUF file", EXPORT),
            ("pointer.onnx", POINTER, "a Git LFS pointer", "'git lfs pull'"),
            ("page.onnxa", "\n<!DOCTYPE HTML>\n<html>ö\n".encode(), "an HTML page", "address"),
            ("text.onnxa", "ö <html>\n".encode(), "a text file", ""),
            ("cut.txt", ("x" + "ö" * 4096).encode(), "a text file", ""),
            ("empty.onnxa", b"", "an empty file", "interrupted"),
            ("m.ort", b"\x1c\0\0\0ORTM", "an ORT format model", "the .onnx from which"),
            ("m.tflite", b"\x1c\0\0\0TFL3", "a TFLite model", "tf2onnx"),
            ("m.h5", b"\x89HDF\r\n\x1a\n\0", "an HDF5 file, such as a Keras model", "tf2onnx"),
            ("m.pb", b"\x08\x01\x12\xb0\xfd\x05\n", "a TensorFlow SavedModel", "tf2onnx"),
            ("m.mlmodel", b"\x08\x05\x12\x80\x02\n\x05\n\x03", "a Core ML model", EXPORT),
            ("m.xml", b'<?xml version="1.0"?>\n<net name="m">', "an OpenVINO IR", EXPORT),
            ("m.pkl", b"\x80\x04\x95\0", "a pickle", EXPORT),
            ("m.npy", b"\x93NUMPY\x01\0", "an array of numpy", EXPORT),
            ("m.onnx.gz", gzip.compress(b"m"), "a gzip file", "gunzip"),
            ("m.onnx.xz", lzma.compress(b"m"), "an xz file", "unxz"),
            ("m.onnx.bz2", bz2.compress(b"m"), "a bzip2 file", "bunzip2"),
            ("m.onnx.zst", b"\x28\xb5\x2f\xfd\0", "a Zstandard file", "unzstd"),
            ("m.7z", b"7z\xbc\xaf\x27\x1c\0", "a 7z file", "7z x"),
            ("m.rar", b"Rar!\x1a\x07\x01", "a RAR file", "unrar"),
            ("m.tar", TarInfo("m.onnx").tobuf(), "a tar file", "tar -xf"),
        )
    },
}
OPENING: dict[str, Callable[[Path], object]] = {
    "open": onnxarchive.open,
    "edit": edits.document,
    "load": onnxarchive.load,
    "session": onnxarchive.session,
    "extract": lambda path: onnxarchive.extract(path, path.with_name("extracted")),
}


@pytest.fixture(params=KINDS)
def name(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a file of each kind in the working directory."""
    monkeypatch.chdir(tmp_path)
    name: str = request.param
    KINDS[name][0](tmp_path / name)
    return name


@pytest.mark.parametrize("opening", OPENING)
def test_functions_that_open_an_archive_name_the_kind_of_another_file(
    name: str, opening: str
) -> None:
    if opening == "session":
        pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    _, kind, help, _ = KINDS[name]
    with pytest.raises(ArchiveFormatError) as caught:
        OPENING[opening](Path(name))
    message = str(caught.value)
    quoted = f"'{name}'" if " " in name else name
    assert message.startswith(f"{name}: expected an ONNX archive, found {kind}")
    assert help.format(quoted) in message
    assert caught.value.rule in ("FILE-1", "ZIP-2", "ZIP-3", "ZIP-5", "ZIP-6")


@pytest.mark.parametrize("command", ["info", "ls", "models list", "assets list", "metadata get"])
def test_commands_name_the_kind_of_another_file_in_one_line(
    name: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), name]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"onnxarchive: {name}: expected an ONNX archive, found {KINDS[name][1]}")


def test_convert_names_the_kind_of_a_file_that_it_cannot_convert(name: str, tmp_path: Path) -> None:
    _, kind, help, is_source = KINDS[name]
    try:
        onnxarchive.convert(name, tmp_path / "new.onnxa")
    except ValueError as error:  # of a directory with several models, it is a wrong use
        message = str(error)
        assert isinstance(error, ArchiveFormatError) or os.path.isdir(name)
    else:
        assert is_source
        return
    if is_source:  # in which there is no model, or one that is damaged
        assert re.search("(expected (one|a)|there is no) model|malformed model", message)
    else:
        assert message.startswith(f"{name}: expected a model, found {kind}")
        assert help in message


@pytest.mark.parametrize("at", [0.3, 0.9, -1])
def test_a_model_that_is_cut_short_lacks_a_number_of_bytes(tmp_path: Path, at: float) -> None:
    # Of the fields of a model, the graph is the last here; so all that is missing is known.
    model = runnable_model()
    model.graph.doc_string = "d" * 5000
    data = onnx.ModelProto(ir_version=model.ir_version, graph=model.graph).SerializeToString()
    cut = data[: int(len(data) * at) if at > 0 else -1]
    unit = "byte" if at == -1 else "bytes"
    found = f"ends at least {len(data) - len(cut):,} {unit} too early; its download or copy may"
    path = tmp_path / "m.onnx"
    path.write_bytes(cut)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / MODEL_PROTO).write_bytes(cut)
    packed = zipped(tmp_path / "m.zip", {"m.onnx": cut}, zipfile.ZIP_DEFLATED)
    for source in (path, folder, packed):
        with pytest.raises(ArchiveFormatError, match=re.escape(found)):
            onnxarchive.convert(source, tmp_path / "new.onnxa")
    with pytest.raises(ArchiveFormatError, match=re.escape(f"found an ONNX model that {found}")):
        onnxarchive.open(path)


def test_an_archive_that_is_cut_short_may_have_been_interrupted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.onnxa"
    onnxarchive.save(runnable_model(), path, size_threshold=0)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ArchiveFormatError, match="its download or copy may") as raised:
        onnxarchive.open(path)
    assert raised.value.rule == "ZIP-2"
    for command in (["check", path], ["convert", path, tmp_path / "new.onnxa"]):
        assert main([str(it) for it in command]) in (1, 3)
        assert "its download or copy may have been interrupted" in "".join(capsys.readouterr())


@pytest.mark.parametrize("cut", [5, 50])
def test_other_damage_of_a_model_is_not_taken_for_a_cut(tmp_path: Path, cut: int) -> None:
    data = bytearray(runnable_model().SerializeToString())
    data[cut:cut] = b"\xff" * 9
    path = tmp_path / "m.onnx"
    path.write_bytes(data)
    with pytest.raises(ArchiveFormatError, match="malformed") as caught:
        onnxarchive.convert(path, tmp_path / "new.onnxa")
    assert "too early" not in str(caught.value)


def test_a_file_of_another_kind_is_named_even_if_it_is_too_large_for_a_model(
    tmp_path: Path,
) -> None:
    path = tmp_path / "m.gguf"
    with open(path, "wb") as file:
        file.write(b"GGUF\3\0\0\0")
        file.truncate(1 << 31)
    with pytest.raises(ArchiveFormatError, match="expected a model, found a GGUF file"):
        onnxarchive.convert(path, tmp_path / "new.onnxa")


def test_the_kind_of_bytes_in_memory_is_named() -> None:
    for source in (b"GGUF\3\0\0\0", io.BytesIO(b"GGUF\3\0\0\0")):
        with pytest.raises(ArchiveFormatError, match="expected an ONNX archive, found a GGUF file"):
            onnxarchive.open(source)


def test_an_archive_after_a_stub_is_named(archive: Path, tmp_path: Path) -> None:
    path = tmp_path / "stub.onnxa"
    path.write_bytes(b"MZ" + bytes(998) + archive.read_bytes())
    for call in (onnxarchive.open, lambda it: onnxarchive.convert(it, tmp_path / "new.onnxa")):
        with pytest.raises(ArchiveFormatError, match="found a zip after 1,000 other bytes"):
            call(path)


@pytest.mark.parametrize("nbytes", [5_000, 3 << 20])
def test_a_complete_zip_before_zeros_is_not_taken_for_an_unfinished_download(
    tmp_path: Path, nbytes: int
) -> None:
    path = tmp_path / "padded.zip"
    _zip("m.onnx")(path)
    path.write_bytes(path.read_bytes() + bytes(nbytes))
    with pytest.raises(ArchiveFormatError) as caught:
        onnxarchive.open(path)
    assert "ends with zeros" not in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "the file lacks the last 1 of the {:,} bytes of the archive;"),
        (
            lambda data: data[:-100],
            "last 100 of the {:,} bytes of the archive; its download or copy",
        ),
        (lambda data: data + b"\0", "ends at {:,} bytes, and 1 byte follows it: b'\\x00'"),
        (
            lambda data: data[:3] + b"\xff" + data[4:],
            "weight': expected a local header of ",
        ),
    ],
)
def test_a_damaged_archive_is_no_file_of_another_kind(
    archive: Path, tmp_path: Path, damage: Callable[[bytes], bytes], message: str
) -> None:
    data = archive.read_bytes()
    path = tmp_path / "faulty.onnxa"
    path.write_bytes(damage(data))
    for source in (path, path.read_bytes()):
        with pytest.raises(ArchiveFormatError) as caught:
            onnxarchive.load(source)
        assert message.format(len(data)) in str(caught.value)
        assert "an ONNX archive, found" not in str(caught.value)


def test_the_kind_of_a_file_is_determined_only_after_an_error(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(recognition, "kind_of_path")
    _onnx(tmp_path / "m.onnx")
    onnxarchive.convert(tmp_path / "m.onnx", tmp_path / "m.onnxa")
    with onnxarchive.open(archive):
        pass
    code = """
import sys, onnxarchive
onnxarchive.open(sys.argv[1]).close()
print([it for it in sys.modules if it.startswith("onnxarchive.sources.zip_file")])
"""
    assert run_python(code, archive) == "[]\n"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no such pipes")
def test_a_pipe_is_recognised_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ArchiveFormatError, match="found a pipe"):
        onnxarchive.open(tmp_path / "pipe")
    with pytest.raises(FileNotFoundError):
        onnxarchive.open(tmp_path / "none")


@pytest.mark.large
def test_entries_of_4_gib_and_more_are_not_taken_for_those_of_another_tool(tmp_path: Path) -> None:
    path = tmp_path / "large.onnxa"
    weight = layout.lay_out("w", 5 << 30, 0, 0, 64)
    model = layout.lay_out(MODEL_PROTO, 1, 0, weight.end, 64)
    headers, records = zip(*(placement.pack() for placement in (weight, model)), strict=True)
    directory = b"".join(records)
    with open(path, "wb") as file:
        for placement, header in zip((weight, model), headers, strict=True):
            file.seek(placement.header_offset)
            file.write(header)
        file.seek(model.end)
        file.write(directory + layout.end_of_archive(2, len(directory), model.end))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("note.txt", b"note")
    with pytest.raises(ArchiveFormatError, match=r"another tool wrote 'note\.txt' to"):
        onnxarchive.open(path)
