"""Archives in the hands of others: every zip tool finds the same, and ONNX reads what was unzipped.

Each tool that is not installed is passed over with a word about it.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxarchive

# Name, size and CRC-32 of the entries in their order.
Listing: TypeAlias = list[tuple[str, int, int]]

ENVIRONMENT = {**os.environ, "LC_ALL": "C.UTF-8", "TZ": "UTC"}


def tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def output(*command: str | Path, directory: Path | None = None) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=directory,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=120,
        check=False,
    )
    text = done.stdout.decode()
    assert done.returncode == 0, f"{command}: {text[-2000:]}{done.stderr.decode()[-2000:]}"
    return text


# What the archives hold


def make_model() -> onnx.ModelProto:
    """A model that reads a float, a half, an int4 and an empty tensor."""
    random = np.random.default_rng(0)
    weight = random.standard_normal((32, 16), np.float32)
    half = random.standard_normal((16, 16)).astype(np.float16)
    index = np.array([3, 1, 2, 0], np.int64)
    quantized = helper.make_tensor(
        "quantized/scale 8", TensorProto.INT4, [16], [number % 16 - 8 for number in range(16)]
    )
    graph = helper.make_graph(
        [
            helper.make_node("Concat", ["x", "empty"], ["all"], axis=0),
            helper.make_node("MatMul", ["all", "layer.0/weight"], ["product"]),
            helper.make_node("Cast", ["half"], ["whole"], to=TensorProto.FLOAT),
            helper.make_node("MatMul", ["product", "whole"], ["second"]),
            helper.make_node("DequantizeLinear", ["quantized/scale 8", "step"], ["shift"]),
            helper.make_node("Add", ["second", "shift"], ["sum"]),
            helper.make_node("Gather", ["sum", "index"], ["y"], axis=1),
        ],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 32])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
        [
            numpy_helper.from_array(weight, "layer.0/weight"),
            numpy_helper.from_array(half, "half"),
            numpy_helper.from_array(np.zeros((0, 32), np.float32), "empty"),
            quantized,
            numpy_helper.from_array(np.array(0.5, np.float32), "step"),
            numpy_helper.from_array(index, "index"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


ASSETS = {
    "größe/日本.txt": "größe".encode(),
    "empty": b"",
    "tokenizer.json": b"{}" * 5000,
    "PK\N{SNOWMAN}": b"PK\5\6" + bytes(18) + b"PK\1\2PK\3\4",
}


@dataclass(frozen=True)
class Saved:
    """An archive and what is in it."""

    path: Path
    alignment: int
    model: onnx.ModelProto
    contents: dict[str, bytes]

    @property
    def listing(self) -> Listing:
        return [(name, len(data), zlib.crc32(data)) for name, data in self.contents.items()]


def saved(path: Path, model: onnx.ModelProto, alignment: int = 64) -> Saved:
    onnxarchive.save(model, path, size_threshold=0, alignment=alignment, assets=ASSETS)
    with onnxarchive.open(path) as archive:
        contents = {name: bytes(archive.read(name)) for name in archive.entries}
    return Saved(path, alignment, model, contents)


@pytest.fixture(scope="module", params=[64, 4096])
def archive(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    directory = tmp_path_factory.mktemp("archive")
    return saved(directory / "model.onnxa", make_model(), request.param)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saved]:
    """An archive of more entries than 16 bits count, and so with a Zip64 end record."""
    initializers = [
        TensorProto(name=f"t{index}", data_type=TensorProto.UINT8, dims=[1], raw_data=b"x")
        for index in range(0x10000)
    ]
    graph = helper.make_graph([], "graph", [], [], initializers)
    path = tmp_path_factory.mktemp("many") / "model.onnxa"
    yield saved(path, helper.make_model(graph))
    path.unlink()


# What the tools say. Each is given an archive and an empty directory to unzip it to.


def by_zipfile(path: Path, directory: Path) -> Listing:
    with zipfile.ZipFile(path) as opened:
        assert opened.testzip() is None
        assert opened.comment == b""
        opened.extractall(directory)
        return [(info.filename, info.file_size, info.CRC) for info in opened.infolist()]


def by_unzip(path: Path, directory: Path) -> Listing:
    unzip = tool("unzip")
    assert "No errors detected" in output(unzip, "-t", path)
    output(unzip, "-q", path, "-d", directory)
    lines = re.findall(
        r"^ *(\d+)  Stored +\d+ +0% [-0-9]+ [:0-9]+ ([0-9a-f]{8})  (.+)$",
        output(unzip, "-v", path),
        re.MULTILINE,
    )
    return [(name, int(size), int(crc, 16)) for size, crc, name in lines]


def by_7z(path: Path, directory: Path) -> Listing:
    seven_zip = tool("7z")
    tested = output(seven_zip, "t", path)
    assert "Everything is Ok" in tested
    assert "Warning" not in tested
    output(seven_zip, "x", f"-o{directory}", path)
    details = output(seven_zip, "l", "-slt", path).split("----------\n")[1]
    listing = []
    for block in details.strip().split("\n\n"):
        fields = dict(line.split(" = ", 1) for line in block.splitlines() if " = " in line)
        # It shows no CRC-32 where there is nothing to be summed.
        crc = int(fields.get("CRC") or "0", 16)
        listing.append((fields["Path"], int(fields["Size"]), crc))
    return listing


def by_bsdtar(path: Path, directory: Path) -> Listing:
    bsdtar = tool("bsdtar")
    output(bsdtar, "-xf", path, "-C", directory)
    return unzipped(directory, output(bsdtar, "-tf", path).splitlines())


def by_bsdtar_from_a_pipe(path: Path, directory: Path) -> Listing:
    """Reads local headers as they come, and no directory."""
    bsdtar = tool("bsdtar")
    with open(path, "rb") as file:
        listed = subprocess.run(
            [bsdtar, "-xvf", "-", "-C", str(directory)],
            env=ENVIRONMENT,
            input=file.read(),
            capture_output=True,
            timeout=120,
            check=True,
        )
    names = [line.removeprefix("x ") for line in listed.stderr.decode().splitlines()]
    return unzipped(directory, names)


def unzipped(directory: Path, names: list[str]) -> Listing:
    contents = [(name, (directory / name).read_bytes()) for name in names]
    return [(name, len(data), zlib.crc32(data)) for name, data in contents]


JAVA = """
import java.io.*;
import java.nio.file.*;
import java.util.*;
import java.util.zip.*;

public class Tool {
    static void list(PrintStream out, ZipEntry entry, byte[] data, Path directory)
            throws IOException {
        CRC32 crc = new CRC32();
        crc.update(data);
        if (entry.getMethod() != ZipEntry.STORED || entry.getComment() != null
                || entry.getCrc() != crc.getValue() || entry.getSize() != data.length
                || entry.getCompressedSize() != data.length) {
            throw new IOException("unexpected: " + entry);
        }
        if (directory != null) {
            Path target = directory.resolve(entry.getName());
            Files.createDirectories(target.getParent());
            Files.write(target, data);
        }
        out.println(data.length + " " + entry.getCrc() + " " + entry.getName());
    }

    public static void main(String[] arguments) throws IOException {
        PrintStream out = new PrintStream(new FileOutputStream(FileDescriptor.out), true, "UTF-8");
        Path directory = arguments.length > 2 ? Path.of(arguments[2]) : null;
        if (arguments[0].equals("file")) {
            try (ZipFile file = new ZipFile(arguments[1])) {
                for (ZipEntry entry : Collections.list(file.entries())) {
                    list(out, entry, file.getInputStream(entry).readAllBytes(), directory);
                }
            }
        } else {
            InputStream file = new BufferedInputStream(new FileInputStream(arguments[1]));
            try (ZipInputStream stream = new ZipInputStream(file)) {
                for (ZipEntry entry; (entry = stream.getNextEntry()) != null; ) {
                    list(out, entry, stream.readAllBytes(), directory);
                }
            }
        }
    }
}
"""


def by_java(kind: str, path: Path, *directory: Path) -> Listing:
    java = tool("java")
    program = path.parent / "Tool.java"
    program.write_text(JAVA)
    lines = output(java, program, kind, path, *directory).splitlines()
    fields = (line.split(" ", 2) for line in lines)
    return [(name, int(size), int(crc)) for size, crc, name in fields]


def by_java_zip_file(path: Path, directory: Path) -> Listing:
    return by_java("file", path, directory)


def by_java_zip_input_stream(path: Path, directory: Path) -> Listing:
    return by_java("stream", path, directory)


READERS = [
    by_zipfile,
    by_unzip,
    by_7z,
    by_bsdtar,
    by_bsdtar_from_a_pipe,
    by_java_zip_file,
    by_java_zip_input_stream,
]


def files_in(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if not path.is_dir()
    }


@pytest.mark.parametrize("reader", READERS)
def test_a_zip_tool_finds_the_names_sizes_and_bytes_that_were_saved(
    archive: Saved, reader: Callable[[Path, Path], Listing], tmp_path: Path
) -> None:
    assert reader(archive.path, tmp_path) == archive.listing
    assert files_in(tmp_path) == archive.contents


def test_what_the_archives_hold_is_worth_a_look(archive: Saved) -> None:
    names = list(archive.contents)
    assert names[0] == "layer_0_weight"
    assert names[-1] == "__MODEL_PROTO"
    assert archive.contents["empty"] == archive.contents["assets/empty"] == b""
    assert archive.contents["assets/größe/日本.txt"] == "größe".encode()
    assert len(archive.contents) == 6 + len(ASSETS) + 1
    assert onnxarchive.check(archive.path, full=True) == []


def test_unzipped_files_are_regular_files_that_others_may_read(
    archive: Saved, tmp_path: Path
) -> None:
    output(tool("unzip"), "-q", archive.path, "-d", tmp_path)
    modes = {path.stat().st_mode for path in tmp_path.rglob("*") if not path.is_dir()}
    assert modes == {stat.S_IFREG | 0o644}


def test_zipalign_finds_every_entry_aligned(archive: Saved) -> None:
    zipalign = tool("zipalign")
    listed = output(zipalign, "-c", "-v", str(archive.alignment), archive.path)
    assert "Verification successful" in listed
    with onnxarchive.open(archive.path) as opened:
        expected = [(str(entry.data_offset), entry.name) for entry in opened.entries.values()]
    assert re.findall(r"^ *(\d+) (.+) \(OK\)$", listed, re.MULTILINE) == expected
    with pytest.raises(AssertionError, match="BAD"):
        output(zipalign, "-c", "-v", str(2 * archive.alignment), archive.path)


# Zip64


def names_by_zipfile(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as opened:
        assert opened.testzip() is None
        return opened.namelist()


def names_by_unzip(path: Path) -> list[str]:
    tested = output(tool("unzip"), "-t", path)
    assert "No errors detected" in tested
    return re.findall(r"^ +testing: (\S+) +OK$", tested, re.MULTILINE)


def names_by_7z(path: Path) -> list[str]:
    seven_zip = tool("7z")
    tested = output(seven_zip, "t", path)
    assert "Everything is Ok" in tested
    assert "Warning" not in tested
    details = output(seven_zip, "l", "-slt", path).split("----------\n")[1]
    return re.findall(r"^Path = (.+)$", details, re.MULTILINE)


def names_by_bsdtar(path: Path) -> list[str]:
    return output(tool("bsdtar"), "-tf", path).splitlines()


def names_by_java_zip_file(path: Path) -> list[str]:
    return [name for name, _, _ in by_java("file", path)]


def names_by_java_zip_input_stream(path: Path) -> list[str]:
    return [name for name, _, _ in by_java("stream", path)]


@pytest.mark.parametrize(
    "lister",
    [
        names_by_zipfile,
        names_by_unzip,
        names_by_7z,
        names_by_bsdtar,
        names_by_java_zip_file,
        names_by_java_zip_input_stream,
    ],
)
def test_a_zip_tool_finds_more_entries_than_16_bits_count(
    many: Saved, lister: Callable[[Path], list[str]]
) -> None:
    names = lister(many.path)
    assert len(names) == 0x10000 + len(ASSETS) + 1
    assert names == list(many.contents)


# ONNX


@pytest.fixture
def directory(archive: Saved, tmp_path: Path) -> Path:
    """The archive, unzipped."""
    with zipfile.ZipFile(archive.path) as opened:
        opened.extractall(tmp_path / "unzipped")
    return tmp_path / "unzipped"


def test_the_unzipped_model_is_loaded_by_onnx(archive: Saved, directory: Path) -> None:
    loaded = onnx.load(directory / "__MODEL_PROTO")
    assert len(loaded.graph.initializer) == len(archive.model.graph.initializer)
    for tensor, original in zip(
        loaded.graph.initializer, archive.model.graph.initializer, strict=True
    ):
        assert tensor.name == original.name
        assert tensor.data_type == original.data_type
        array, expected = numpy_helper.to_array(tensor), numpy_helper.to_array(original)
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(array, expected)


def test_the_unzipped_model_is_what_onnx_checker_wants(directory: Path) -> None:
    onnx.checker.check_model(str(directory / "__MODEL_PROTO"), full_check=True)


def test_onnxruntime_runs_the_unzipped_model_as_the_original(
    archive: Saved, directory: Path
) -> None:
    onnxruntime = pytest.importorskip(
        "onnxruntime", minversion="1.24", reason="onnxruntime before 1.24 crashes on an empty file"
    )
    inputs = {"x": np.random.default_rng(1).standard_normal((3, 32), np.float32)}
    providers = ["CPUExecutionProvider"]
    expected = onnxruntime.InferenceSession(
        archive.model.SerializeToString(), providers=providers
    ).run(None, inputs)
    found = onnxruntime.InferenceSession(str(directory / "__MODEL_PROTO"), providers=providers).run(
        None, inputs
    )
    assert np.any(expected[0])
    np.testing.assert_array_equal(found, expected)
