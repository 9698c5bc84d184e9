"""Zips of any tool with one model and its data files: each gives the archive of the directory."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import subprocess
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import Mock

import onnx
import pytest
from models import external, model_of, raw_tensor, run_python
from onnx import TensorProto
from written import converted, files_below, zipped

import onnxarchive
from onnxarchive import ArchiveError, ArchiveFormatError
from onnxarchive.sources.recognition import is_model_file

# Zips the content of a directory to a path.
Zip: TypeAlias = Callable[[Path, Path], None]

ASSETS = {
    "labels.txt": b"cat\ndog\n",
    "deep/tokenizer.json": b"{}" * 500,
    "empty": b"",
    "one": b"1",
    "onnx Conv_22": random.Random(1).randbytes(70_000),
    "zeros": bytes(1 << 20),
}


def _tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def _run(*command: str | Path, directory: Path | None = None, data: bytes = b"") -> None:
    subprocess.run(
        [str(part) for part in command],
        cwd=directory,
        input=data,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=True,
        timeout=60,
    )


def _repetitive(name: str, count: int, seed: int) -> TensorProto:
    """A tensor that compresses, and not to nothing."""
    tensor = raw_tensor(name, TensorProto.FLOAT, (count,), seed)
    part = tensor.raw_data[:1000]
    tensor.raw_data = (part * (count * 4 // len(part) + 1))[: count * 4]
    return tensor


def _compressible_model() -> onnx.ModelProto:
    return model_of(
        _repetitive("layer.0/weight", 50_000, seed=1),
        raw_tensor("layer.0/bias", dims=(700,), seed=2),
        raw_tensor("quantized", TensorProto.UINT4, (9001,), seed=3),
        _repetitive("layer.1/weight", 30_000, seed=4),
        raw_tensor("small", TensorProto.INT64, (3,), seed=5),
    )


# A file for each tensor, or one for several, with bytes that belong to none of them.
LOCATIONS = {
    "apart": {"layer.0/weight": "w0.bin", "layer.1/weight": "weights/w1.bin"},
    "together": dict.fromkeys(("layer.0/weight", "layer.0/bias", "layer.1/weight"), "all.data"),
}


@pytest.fixture(params=["apart", "together"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return _write_directory(tmp_path / "model dir", LOCATIONS[request.param])


@pytest.fixture
def apart(tmp_path: Path) -> Path:
    return _write_directory(tmp_path / "model dir", LOCATIONS["apart"])


@pytest.fixture
def together(tmp_path: Path) -> Path:
    return _write_directory(tmp_path / "model dir", LOCATIONS["together"])


def _write_directory(path: Path, locations: dict[str, str]) -> Path:
    model = _compressible_model()
    files: dict[str, bytes] = {}
    for tensor in model.graph.initializer:
        location = locations.get(tensor.name)
        if location is None:
            continue
        is_shared = list(locations.values()).count(location) > 1
        held = files.get(location, b"") + (b"unused" if is_shared else b"")
        files[location] = held + tensor.raw_data
        pairs = {"offset": len(held), "length": len(tensor.raw_data)} if is_shared else {}
        tensor.CopyFrom(external(tensor, location, **pairs))
    files["model.onnx"] = model.SerializeToString()
    for name, content in ASSETS.items():
        files[f"assets/{name}"] = content
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    (path / "assets" / "hollow").mkdir()
    return path


def _methods(path: Path) -> set[int]:
    with zipfile.ZipFile(path) as file:
        return {info.compress_type for info in file.infolist()}


# Tools


def _info_zip(*options: str) -> Zip:
    def make(directory: Path, path: Path) -> None:
        _run(_tool("zip"), "-q", "-r", *options, path, ".", directory=directory)

    return make


def _info_zip_with_folder(directory: Path, path: Path) -> None:
    _run(_tool("zip"), "-q", "-r", path, directory.name, directory=directory.parent)


def _info_zip_to_pipe(*options: str) -> Zip:
    """With data descriptors behind all entries."""

    def make(directory: Path, path: Path) -> None:
        with open(path, "wb") as file:
            command = [_tool("zip"), "-q", "-r", *options, "-", "."]
            subprocess.run(command, cwd=directory, stdout=file, check=True, timeout=60)

    return make


def _info_zip_with_comment(directory: Path, path: Path) -> None:
    _info_zip()(directory, path)
    _run(_tool("zip"), "-q", "-z", path, data=b"a comment\n.\n")
    assert b"a comment" in path.read_bytes()[-20:]


def _info_zip_changed_afterwards(directory: Path, path: Path) -> None:
    _info_zip()(directory, path)
    for name, option in (("assets/one", "-q"), ("assets/zeros", "-g")):
        _run(_tool("zip"), "-q", "-d", path, name)
        _run(_tool("zip"), "-q", option, path, name, directory=directory)


def _seven_zip(method: str, *options: str) -> Zip:
    def make(directory: Path, path: Path) -> None:
        given = ("-bd", "-tzip", f"-mm={method}", *options)
        _run(_tool("7z"), "a", *given, path, "*", directory=directory)

    return make


def _bsdtar(directory: Path, path: Path) -> None:
    _run(_tool("bsdtar"), "--format=zip", "-cf", path, ".", directory=directory)


def _bsdtar_by_name(options: str = "") -> Zip:
    def make(directory: Path, path: Path) -> None:
        given = ["--format=zip", *(["--options", options] if options else [])]
        names = sorted(os.listdir(directory))
        _run(_tool("bsdtar"), *given, "-cf", path, *names, directory=directory)

    return make


class _Pipe(io.BytesIO):
    """A file that cannot be sought in."""

    def seekable(self) -> bool:
        return False

    def seek(self, offset: int, whence: int = 0) -> int:
        raise io.UnsupportedOperation

    def tell(self) -> int:
        raise io.UnsupportedOperation


def _python(
    method: int = zipfile.ZIP_STORED,
    *,
    reverse: bool = False,
    force_zip64: bool = False,
    kind: type[io.BytesIO] = io.BytesIO,
) -> Zip:
    def make(directory: Path, path: Path) -> None:
        target = kind()
        with zipfile.ZipFile(target, "w", method) as file:
            for name in sorted(files_below(directory), reverse=reverse):
                info = zipfile.ZipInfo(name)
                info.compress_type = method
                with file.open(info, "w", force_zip64=force_zip64) as entry:
                    entry.write((directory / name).read_bytes())
        path.write_bytes(target.getvalue())

    return make


def _python_added_to(directory: Path, path: Path) -> None:
    for name in sorted(files_below(directory)):
        with zipfile.ZipFile(path, "a") as file:
            file.write(directory / name, name)
            file.comment = b"a comment that is shortened later"[: -len(name)]


def _jar(options: str) -> Zip:
    def make(directory: Path, path: Path) -> None:
        _run(_tool("jar"), options, path, *sorted(os.listdir(directory)), directory=directory)

    return make


# By name: the tool, and a method that its zips use. The second table takes longer.
TOOLS: dict[str, tuple[Zip, int]] = {
    "zip -0": (_info_zip("-0"), 0),
    "zip": (_info_zip(), 8),
    "zip -9": (_info_zip("-9"), 8),
    "zip -fd": (_info_zip("-fd"), 8),
    "zip -fz": (_info_zip("-fz"), 8),
    "zip -D without folders": (_info_zip("-D"), 8),
    "zip -Z bzip2": (_info_zip("-Z", "bzip2"), 12),
    "zip with a folder": (_info_zip_with_folder, 8),
    "zip to a pipe": (_info_zip_to_pipe(), 8),
    "7z Copy": (_seven_zip("Copy"), 0),
    "7z Deflate": (_seven_zip("Deflate"), 8),
    "7z Deflate64": (_seven_zip("Deflate64"), 9),
    "7z BZip2": (_seven_zip("BZip2"), 12),
    "7z LZMA": (_seven_zip("LZMA"), 14),
    "Python stored": (_python(), 0),
    "Python deflated": (_python(zipfile.ZIP_DEFLATED), 8),
    "Python bzip2": (_python(zipfile.ZIP_BZIP2), 12),
    "Python LZMA": (_python(zipfile.ZIP_LZMA), 14),
    "Python Zip64": (_python(force_zip64=True), 0),
    "Python deflated Zip64": (_python(zipfile.ZIP_DEFLATED, force_zip64=True), 8),
    "Python reversed": (_python(zipfile.ZIP_DEFLATED, reverse=True), 8),
    "Python to a pipe": (_python(zipfile.ZIP_DEFLATED, kind=_Pipe), 8),
    "jar": (_jar("cMf"), 8),
    "bsdtar": (_bsdtar_by_name(), 8),
    "bsdtar of .": (_bsdtar, 8),
}
FURTHER_TOOLS: dict[str, tuple[Zip, int]] = {
    "zip -1": (_info_zip("-1"), 8),
    "zip -0 -D": (_info_zip("-0", "-D"), 0),
    "zip -0 -fd": (_info_zip("-0", "-fd"), 0),
    "zip -fz-": (_info_zip("-fz-"), 8),
    "zip -X": (_info_zip("-X"), 8),
    "zip -0 to a pipe": (_info_zip_to_pipe("-0"), 0),
    "zip -Z bzip2 to a pipe": (_info_zip_to_pipe("-Z", "bzip2"), 12),
    "zip -fz- to a pipe": (_info_zip_to_pipe("-fz-"), 8),
    "zip with a comment": (_info_zip_with_comment, 8),
    "zip, changed afterwards": (_info_zip_changed_afterwards, 8),
    "7z Deflate -mx=9": (_seven_zip("Deflate", "-mx=9"), 8),
    "7z Deflate64 -mx=9": (_seven_zip("Deflate64", "-mx=9"), 9),
    "7z LZMA -mx=9": (_seven_zip("LZMA", "-mx=9"), 14),
    "7z LZMA:eos=off": (_seven_zip("LZMA:eos=off"), 14),
    "7z LZMA:lc=0:lp=2:pb=0": (_seven_zip("LZMA:lc=0:lp=2:pb=0"), 14),
    "7z -mtc=on -mcu=on": (_seven_zip("Deflate", "-mtc=on", "-mcu=on"), 8),
    **{
        f"Python method {method}, Zip64 {force_zip64}, {kind.__name__}": (
            _python(method, force_zip64=force_zip64, kind=kind),
            method,
        )
        for method in (0, 8, 12, 14)
        for force_zip64 in (False, True)
        for kind in (io.BytesIO, _Pipe)
    },
    "Python, added to": (_python_added_to, 0),
    "bsdtar, stored": (_bsdtar_by_name("zip:compression=store"), 0),
    "bsdtar, Zip64": (_bsdtar_by_name("zip:zip64"), 8),
    "bsdtar, no Zip64": (_bsdtar_by_name("zip:!zip64"), 8),
    "bsdtar, experimental": (_bsdtar_by_name("zip:experimental"), 8),
    "jar, stored": (_jar("c0Mf"), 0),
}


@pytest.mark.parametrize(
    "tool", [*TOOLS, *(pytest.param(it, marks=pytest.mark.tool) for it in FURTHER_TOOLS)]
)
def test_a_zip_of_any_tool_gives_the_archive_of_the_directory(
    tmp_path: Path, directory: Path, tool: str
) -> None:
    make, method = (TOOLS | FURTHER_TOOLS)[tool]
    path = tmp_path / "m.zip"
    make(directory, path)
    assert method in _methods(path)
    assert converted(path) == converted(directory)


def test_a_single_model_may_be_zipped_alone(tmp_path: Path) -> None:
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        files = {"söme/wo/m.onnx": _compressible_model().SerializeToString()}
        zipped(tmp_path / "m.zip", files, method)
        onnxarchive.save(_compressible_model(), tmp_path / "saved.onnxa")
        assert converted(tmp_path / "m.zip") == (tmp_path / "saved.onnxa").read_bytes()


def test_a_zip_is_recognised_whatever_its_suffix(tmp_path: Path, directory: Path) -> None:
    _python()(directory, tmp_path / "m.onnx")
    assert converted(tmp_path / "m.onnx") == converted(directory)


@pytest.mark.parametrize("where", ["apart", "together"])
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_external_tensors_of_a_zip_may_be_stored_in_the_model(
    tmp_path: Path, where: str, method: int
) -> None:
    source = _write_directory(tmp_path / "source", LOCATIONS[where])
    _python(method)(source, tmp_path / "m.zip")
    archive = converted(tmp_path / "m.zip", size_threshold=1 << 30)
    assert archive == converted(source, size_threshold=1 << 30)
    (tmp_path / "m.onnxa").write_bytes(archive)
    with onnxarchive.open(tmp_path / "m.onnxa") as opened:
        assert [name for name in opened.entries if not name.startswith("assets/")] == [
            "__MODEL_PROTO"
        ]
        assert opened.model == _compressible_model()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"PK\3\4 and no zip", False),
        (b"PK\5\6 and no zip", False),
        (b"no model", False),
        (model_of().SerializeToString(), True),
        (b"\0" + model_of().SerializeToString(), False),
    ],
)
def test_files_with_a_model_are_recognised_by_their_content(
    tmp_path: Path, content: bytes, expected: bool
) -> None:
    (tmp_path / "file").write_bytes(content)
    assert is_model_file(str(tmp_path / "file")) == expected


@pytest.mark.parametrize(
    ("name", "expected"), [("readme.txt", False), ("some/m.onnx", True), ("__MODEL_PROTO", True)]
)
def test_zips_with_a_model_are_recognised_by_the_names_in_them(
    tmp_path: Path, name: str, expected: bool
) -> None:
    assert is_model_file(str(zipped(tmp_path / "file", {name: b"content"}))) == expected


# Folders and files of the system


@pytest.mark.parametrize("folder", ["", "export/", "a/b c/d/"])
def test_files_of_the_system_are_ignored_and_a_common_folder_is_stripped(
    tmp_path: Path, directory: Path, folder: str
) -> None:
    path = tmp_path / "m.zip"
    with zipfile.ZipFile(path, "w") as file:
        if folder:
            file.writestr(folder, b"")
        for name in sorted(files_below(directory)):
            file.write(directory / name, folder + name)
            base = os.path.basename(name)
            file.writestr(f"__MACOSX/{folder}{name.removesuffix(base)}._{base}", b"attributes")
        file.writestr(f"{folder}.DS_Store", b"where icons lie")
        file.writestr(f"{folder}Thumbs.db", b"pictures")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert converted(path) == converted(directory)
    # Litter is no loss, but a word about it is no fault.
    assert len(told) <= 1


def test_entries_that_no_tensor_names_are_left_out_with_a_warning(
    tmp_path: Path, directory: Path
) -> None:
    path = tmp_path / "m.zip"
    with zipfile.ZipFile(path, "w") as file:
        for name in sorted(files_below(directory)):
            file.write(directory / name, f"export/{name}")
        file.writestr("export/README.md", b"words")
        file.writestr("elsewhere/notes.txt", b"words")
        file.writestr("withdrawn.txt", b"words")
        file.NameToInfo.pop("withdrawn.txt")
        file.filelist.pop()
    with pytest.warns(UserWarning, match="left out") as told:
        found = converted(path)
    text = "\n".join(str(warning.message) for warning in told)
    assert "README.md" in text
    assert "elsewhere/notes.txt" in text
    assert "are left out: the directory lists no entry there" in text
    assert "model.onnx" not in text
    assert "assets/labels.txt" not in text
    assert all(str(warning.message).startswith(f"{path}: ") for warning in told)
    assert found == converted(directory)


# Temporary files


@pytest.fixture
def no_temporary_file(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = Mock(side_effect=AssertionError("a temporary file was made"))
    for name in ("mkstemp", "TemporaryFile", "NamedTemporaryFile", "mkdtemp"):
        monkeypatch.setattr(tempfile, name, refuse)


@pytest.mark.usefixtures("no_temporary_file")
@pytest.mark.parametrize(
    ("where", "method"),
    [
        ("apart", zipfile.ZIP_DEFLATED),
        ("apart", zipfile.ZIP_BZIP2),
        ("apart", zipfile.ZIP_LZMA),
        ("together", zipfile.ZIP_STORED),
    ],
)
def test_tensors_that_are_files_or_stored_go_through_no_temporary_file(
    tmp_path: Path, where: str, method: int
) -> None:
    source = _write_directory(tmp_path / "source", LOCATIONS[where])
    path = tmp_path / "m.zip"
    with zipfile.ZipFile(path, "w", method) as file:
        for name in sorted(files_below(source)):
            kind = zipfile.ZIP_STORED if name.endswith(".onnx") else method
            file.write(source / name, name, kind)
    assert converted(path) == converted(source)


def test_compressed_tensors_of_a_file_go_through_one_temporary_file_that_is_then_removed(
    tmp_path: Path, together: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    make: Any = tempfile.TemporaryFile

    def counted(*arguments: Any, **options: Any) -> Any:
        made.append(options["dir"])
        return make(*arguments, **options)

    monkeypatch.setattr(tempfile, "TemporaryFile", counted)
    _python(zipfile.ZIP_DEFLATED)(together, tmp_path / "m.zip")
    before = sorted(os.listdir(tmp_path))
    assert converted(tmp_path / "m.zip") == converted(together)
    assert list(map(os.path.realpath, made)) == [os.path.realpath(tmp_path)] * 2  # model and data
    assert sorted(os.listdir(tmp_path)) == before


# Repacked archives


def test_a_repacked_archive_is_refused_by_open_and_converts_to_the_original(tmp_path: Path) -> None:
    original = tmp_path / "m.onnxa"
    onnxarchive.save(_compressible_model(), original, assets=ASSETS)
    onnxarchive.extract(original, tmp_path / "m")
    tools = ("zip -0", "zip", "zip -9", "zip -0 -D", "7z Copy", "Python stored")
    for tool in tools:
        path = tmp_path / f"{tool}.onnxa"
        (TOOLS | FURTHER_TOOLS)[tool][0](tmp_path / "m", path)
        remedy = "onnxarchive convert" if tool == "zip -9" else None
        with pytest.raises(ArchiveFormatError, match=remedy):
            onnxarchive.open(path)
        assert converted(path) == original.read_bytes()


# Deflate64

_ATTRIBUTES = """
import hashlib, json, sys, zipfile
def seen():
    return {
        f"{owner.__name__}.{name}": repr(value)
        for owner in (zipfile, zipfile.ZipFile, zipfile.ZipExtFile, zipfile.ZipInfo)
        for name, value in vars(owner).items()
        if name != "__builtins__"
    }
before = seen()
import onnxarchive
onnxarchive.convert(sys.argv[1], sys.argv[2])
print(json.dumps({
    "changed": sorted(key for key, value in seen().items() if before.get(key) != value),
    "gone": sorted(before.keys() - seen().keys()),
    "modules": sorted(name for name in sys.modules if "deflate64" in name)
}))
"""


@pytest.mark.parametrize("method", ["Deflate", "Deflate64"])
def test_deflate64_is_added_to_zipfile_only_if_a_zip_needs_it(
    tmp_path: Path, directory: Path, method: str
) -> None:
    path = tmp_path / "m.zip"
    make = _seven_zip(method) if method == "Deflate64" else _python(zipfile.ZIP_DEFLATED)
    make(directory, path)
    found = json.loads(run_python(_ATTRIBUTES, path, tmp_path / "m.onnxa"))
    assert found["gone"] == []
    for change in ("changed", "modules"):
        assert (found[change] == []) == (method == "Deflate")
    assert (tmp_path / "m.onnxa").read_bytes() == converted(directory)


# Damage and malice


@pytest.fixture
def apart_zip(tmp_path: Path, apart: Path) -> Path:
    _python()(apart, tmp_path / "m.zip")
    return tmp_path / "m.zip"


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., str]:
    """What is said of a zip that is refused; a target keeps being what it was."""

    def message_of(path: Path, kind: type[ArchiveError] = ArchiveError) -> str:
        before = {child.name for child in tmp_path.iterdir()}
        with pytest.raises(kind) as caught:
            onnxarchive.convert(path, tmp_path / "new.onnxa")
        assert {child.name for child in tmp_path.iterdir()} == before
        assert str(caught.value).startswith(f"{path}: ")
        old = tmp_path / "old.onnxa"
        old.write_bytes(b"old")
        with pytest.raises(kind):
            onnxarchive.convert(path, old)
        assert old.read_bytes() == b"old"
        old.unlink()
        return str(caught.value)

    return message_of


@pytest.mark.sweep
@pytest.mark.parametrize(
    "tool", ["Python stored", "zip", "7z Deflate64", "7z BZip2", "7z LZMA", "jar"]
)
@pytest.mark.parametrize("name", ["w0.bin", "model.onnx", "assets/deep/tokenizer.json"])
def test_a_damaged_entry_is_named_and_nothing_is_left(
    tmp_path: Path, apart: Path, tool: str, name: str, refused: Callable[..., str]
) -> None:
    path = tmp_path / "m.zip"
    TOOLS[tool][0](apart, path)
    with zipfile.ZipFile(path) as file:
        info = file.getinfo(name)
    data = bytearray(path.read_bytes())
    header = info.header_offset
    begin = (
        header
        + 30
        + sum(int.from_bytes(data[at : at + 2], "little") for at in (header + 26, header + 28))
    )
    data[begin + info.compress_size // 2] ^= 0x10
    path.write_bytes(data)
    assert repr(name) in refused(path, ArchiveFormatError)


def test_a_source_zip_is_not_overwritten(apart_zip: Path) -> None:
    before = apart_zip.read_bytes()
    with pytest.raises(ValueError, match="input"):
        onnxarchive.convert(apart_zip, apart_zip)
    assert apart_zip.read_bytes() == before


def test_a_zip_that_is_cut_is_refused(apart_zip: Path, refused: Callable[..., str]) -> None:
    apart_zip.write_bytes(apart_zip.read_bytes()[:-1])
    refused(apart_zip, ArchiveFormatError)


@pytest.mark.skipif(os.name == "nt", reason="Windows keeps the working directory")
def test_a_deflated_zip_is_converted_after_the_working_directory_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(raw_tensor("w", dims=(3000,))).SerializeToString()
    zipped(tmp_path / "m.zip", {"m.onnx": model}, zipfile.ZIP_DEFLATED)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    try:
        onnxarchive.convert(tmp_path / "m.zip", tmp_path / "m.onnxa")
    finally:
        os.chdir(tmp_path)
    assert onnxarchive.check(tmp_path / "m.onnxa", full=True) == []
