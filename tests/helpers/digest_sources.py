"""The sources that `archive_digests.py` converts, by kind.

Each is written byte by byte, but for zips, whose compressed bytes are in no archive.
"""

from __future__ import annotations

import io
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from digest_models import decoder_of, encoder_of
from models import every_tensor
from onnx import ModelProto, TensorProto
from sparse_files import GRAPH, INITIALIZER, header

import onnxarchive

_ASSETS: Final = {"assets/labels.txt": b"old", "assets/b/tokenizer.json": b"{}" * 500}


def assets_in(folder: Path) -> dict[str, bytes | Path]:
    """Assets of several sizes; one is a file in the folder."""
    path = folder / "asset"
    path.write_bytes(bytes(range(256)) * 300)
    return {
        "größe/日本.json": b"{}",
        "größe/empty": b"",
        "labels.txt": path,
        "a/deep/file.bin": b"x" * ((1 << 20) + 1),
        "-rf": b"\0",
    }


def write_files(directory: Path, files: Mapping[str, bytes]) -> Path:
    """Writes files by their paths in the directory."""
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return directory


def serialized(model: ModelProto) -> bytes:
    """The bytes of a model."""
    return model.SerializeToString(deterministic=True)


def refer(tensor: TensorProto, **pairs: object) -> None:
    """Makes a tensor external."""
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key, value in pairs.items():
        tensor.external_data.add(key=key, value=str(value))


def apart(model: ModelProto, name: str = "m.onnx") -> dict[str, bytes]:
    """The files of a model whose tensors have a file each."""
    copy = ModelProto()
    copy.CopyFrom(model)
    files = {}
    tensors = (tensor for tensor in every_tensor(copy) if tensor.HasField("raw_data"))
    for number, tensor in enumerate(tensors):
        location = f"data/{number:03}.bin"
        files[location] = tensor.raw_data
        refer(tensor, location=location)
    return {name: serialized(copy), **files}


def together(model: ModelProto, *locations: str) -> dict[str, bytes]:
    """The files of a model whose tensors are parts of one file.

    With several files, tensors are in each in turn, in reverse order, with unused bytes between
    them; tensors with equal data share it.
    """
    copy = ModelProto()
    copy.CopyFrom(model)
    is_one = len(locations) == 1
    files = {location: bytearray() for location in locations}
    shared: dict[tuple[str, bytes], int] = {}
    tensors = [tensor for tensor in every_tensor(copy) if tensor.HasField("raw_data")]
    for number, tensor in [*enumerate(tensors)][:: 1 if is_one else -1]:
        location, raw_data = locations[number % len(locations)], tensor.raw_data
        data = files[location]
        if is_one or (location, raw_data) not in shared:
            data += b"" if is_one else b"\0unused"
            shared[location, raw_data] = len(data)
            data += raw_data
        offset = shared[location, raw_data]
        refer(tensor, location=location, offset=offset, length=len(raw_data))
    return {"m.onnx": serialized(copy), **{name: bytes(data) for name, data in files.items()}}


def _backwards(model: ModelProto) -> bytes:
    """A serialized model with the fields of its tensors backwards, and the graph first."""
    rest = ModelProto()
    rest.CopyFrom(model)
    graph = b""
    for tensor in model.graph.initializer:
        fields = [descriptor.name for descriptor, _ in tensor.ListFields()]
        body = b""
        for name in reversed(fields):
            alone = TensorProto()
            alone.CopyFrom(tensor)
            for other in set(fields) - {name}:
                alone.ClearField(other)
            body += alone.SerializeToString(deterministic=True)
        graph += header(INITIALIZER, len(body)) + body
    del rest.graph.initializer[:]
    graph += rest.graph.SerializeToString(deterministic=True)
    rest.ClearField("graph")
    return header(GRAPH, len(graph)) + graph + serialized(rest)


class _Unseekable(io.RawIOBase):
    """A file that cannot seek: zipfile then writes sizes after the data."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        return int(self._file.write(data))


def _zip(path: Path, files: Mapping[str, bytes], method: int, *, is_streamed: bool = False) -> Path:
    with (
        open(path, "wb") as file,
        zipfile.ZipFile(_Unseekable(file) if is_streamed else file, "w") as archive,
    ):
        archive.comment = b"made by a test"
        for name, content in files.items():
            info = zipfile.ZipInfo(name, (2020, 2, 29, 12, 30, 58))
            info.compress_type = method
            with archive.open(info, "w", force_zip64=is_streamed) as entry:
                entry.write(content)
    return path


def _deflate64_zip(path: Path, files: Mapping[str, bytes]) -> Path:
    """A zip of stored blocks, which deflate and Deflate64 share, with the method of Deflate64."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=0) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        methods = [info.header_offset + 8 for info in archive.infolist()]
        record = archive.start_dir
    data = bytearray(path.read_bytes())
    while data[record : record + 4] == b"PK\1\2":
        methods.append(record + 10)
        record += 46 + int.from_bytes(data[record + 28 : record + 30], "little")
    for offset in methods:
        data[offset] = 9
    path.write_bytes(data)
    return path


def _archive(folder: Path, model: ModelProto, **options: Any) -> Path:
    onnxarchive.save(model, folder / "source.onnxa", **options)
    return folder / "source.onnxa"


def archive_of_three(folder: Path, model: ModelProto) -> Path:
    """An archive of three models that share tensors, with assets."""
    return _archive(
        folder,
        model,
        models={"decoder": decoder_of(model), "zz": encoder_of(model)},
        assets=assets_in(folder),
        convert_attribute=True,
        size_threshold=100,
        alignment=4096,
    )


def _unzipped(folder: Path, model: ModelProto) -> Path:
    target = folder / "unzipped"
    shutil.rmtree(target, ignore_errors=True)
    onnxarchive.extract(archive_of_three(folder, model), target)
    return target


def _onnx(folder: Path, files: Mapping[str, bytes]) -> Path:
    return write_files(folder, files) / "m.onnx"


# Each writes a source to a folder and gives its path.
SOURCES: Final[dict[str, Callable[[Path, ModelProto], Path]]] = {
    "a .onnx": lambda folder, model: _onnx(folder, {"m.onnx": serialized(model)}),
    "a .onnx, backwards": lambda folder, model: _onnx(folder, {"m.onnx": _backwards(model)}),
    "a .onnx and a file": lambda folder, model: _onnx(folder, together(model, "m.onnx.data")),
    "a .onnx and many files": lambda folder, model: _onnx(folder, apart(model)),
    "a .onnx and pieces": lambda folder, model: _onnx(folder, together(model, "b", "a", "c/d")),
    "a directory": lambda folder, model: write_files(
        folder / "directory", together(model, "w.data") | _ASSETS
    ),
    "a stored zip": lambda folder, model: _zip(
        folder / "stored.zip", together(model, "w.data") | _ASSETS, zipfile.ZIP_STORED
    ),
    "a deflated zip": lambda folder, model: _zip(
        folder / "deflated.zip", _ASSETS | apart(model, "__MODEL_PROTO"), zipfile.ZIP_DEFLATED
    ),
    "a streamed zip of pieces": lambda folder, model: _zip(
        folder / "streamed.zip",
        {f"dir/{name}": data for name, data in together(model, "b", "a", "c/d").items()},
        zipfile.ZIP_DEFLATED,
        is_streamed=True,
    ),
    "a Deflate64 zip": lambda folder, model: _deflate64_zip(
        folder / "deflate64.zip", together(model, "b", "a")
    ),
    "a bzip2 zip": lambda folder, model: _zip(
        folder / "bzip2.zip", together(model, "w.data"), zipfile.ZIP_BZIP2
    ),
    "an LZMA zip": lambda folder, model: _zip(
        folder / "lzma.zip", together(model, "w.data"), zipfile.ZIP_LZMA
    ),
    "an archive": lambda folder, model: _archive(folder, model, size_threshold=1),
    "an archive of 3 models": archive_of_three,
    "an unzipped archive": _unzipped,
}
