"""Archives and models that tests write."""

from __future__ import annotations

import io
import itertools
import os
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import onnx
from models import external, model_of
from onnx import TensorProto

import onnxarchive


def saved(model: Any, **options: Any) -> bytes:
    """The bytes of an archive that `save` makes from a model."""
    target = io.BytesIO()
    onnxarchive.save(model, target, **options)
    return target.getvalue()


def converted(source: Path, **options: Any) -> bytes:
    """The bytes of an archive that `convert` makes from `source`, after a full check."""
    target = source.parent / "converted.onnxa"
    onnxarchive.convert(source, target, **options)
    assert onnxarchive.check(target, full=True) == []
    data = target.read_bytes()
    target.unlink()
    return data


class Target:
    """Has nothing but `write`, which takes at most a limit of bytes, or all and returns None."""

    def __init__(self, limits: Iterable[int | None]) -> None:
        self.content = bytearray()
        self._limits = itertools.cycle(limits)

    def write(self, data: memoryview, /) -> int | None:
        limit = next(self._limits)
        self.content += data[:limit]
        return None if limit is None else len(data[:limit])


def write_model(path: Path, model: onnx.ModelProto) -> Path:
    """Writes a model to a file and makes its parent directories; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString())
    return path


def write_parts(folder: Path, nbytes: int, count: int, data: bytes = b"") -> tuple[Path, Path]:
    """Writes a `.onnx` of tensors of as many bytes each, and the file of their data, or of zeros.

    Returns:
        The paths of both files.
    """
    path = folder / "w.bin"
    path.write_bytes(data)
    os.truncate(path, count * nbytes)
    tensors = (
        external(
            TensorProto(name=f"w{number}", data_type=TensorProto.UINT8, dims=[nbytes]),
            path.name,
            offset=number * nbytes,
            length=nbytes,
        )
        for number in range(count)
    )
    return write_model(folder / "m.onnx", model_of(*tensors)), path


def zipped(path: Path, files: Mapping[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    """Writes a zip of files, such as `contents` gives them; returns its path."""
    with zipfile.ZipFile(path, "w", method) as file:
        for name, data in files.items():
            # `ZipInfo` states 1980, and not the time of now, so equal files give equal zips.
            file.writestr(zipfile.ZipInfo(name), data, method)
    return path


def contents(directory: Path) -> dict[str, bytes]:
    """The bytes of all files below a directory, by their paths in it, with slashes."""
    return {name: (directory / name).read_bytes() for name in sorted(files_below(directory))}


def files_below(directory: Path) -> set[str]:
    """The paths of all files below a directory, relative to the directory, with slashes."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix() for path in files}
