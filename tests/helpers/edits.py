"""Models and their changes for tests of edits, and checks after an edit."""

from __future__ import annotations

import contextlib
import io
import os
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from unittest.mock import patch

import numpy as np
import onnx
import pytest
from models import copying_clone, model_of, raw_tensor
from onnx import TensorProto
from zip_entries import add_bytes

import onnxarchive
from onnxarchive.files import clones_and_sync, local_file
from onnxarchive.zipformat.writer import ZipWriter

MODEL = "__MODEL_PROTO"
NAME = "ein Möbel 重み.onnxa"

_Error = TypeVar("_Error", bound=BaseException)
Change = Callable[[onnx.ModelProto], object]
Way: TypeAlias = dict[str, Any]  # arguments of an edit, as the fixture `way` gives them

posix = pytest.mark.skipif(os.name == "nt", reason="links and modes are POSIX's")


# Models and their changes


def weights(count: int, *more: TensorProto) -> onnx.ModelProto:
    """A model with initializers `w0`, `w1`, ... of 1,200 bytes each, all stored as entries."""
    return model_of(*(raw_tensor(f"w{i}", dims=(300,), seed=i) for i in range(count)), *more)


def changed(model: onnx.ModelProto, *changes: Change) -> onnx.ModelProto:
    """A copy of a model with changes."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for change in changes:
        change(copy)
    return copy


def added(name: str, nbytes: int = 2000, seed: int = 77) -> Change:
    tensor = raw_tensor(name, TensorProto.UINT8, (nbytes,), seed)
    return lambda model: model.graph.initializer.append(tensor)


def removed(index: int) -> Change:
    return lambda model: model.graph.initializer.pop(index)


def renamed(index: int, name: str) -> Change:
    return lambda model: setattr(model.graph.initializer[index], "name", name)


def reversed_tensors(model: onnx.ModelProto) -> None:
    backwards = list(model.graph.initializer)[::-1]
    del model.graph.initializer[:]
    model.graph.initializer.extend(backwards)


def other_bytes(model: onnx.ModelProto) -> None:
    model.graph.initializer[1].CopyFrom(raw_tensor("w1", dims=(300,), seed=99))


def documented(text: str) -> Change:
    return lambda model: setattr(model, "doc_string", text)


def with_array(model: onnx.ModelProto, index: int, array: np.ndarray[Any, Any]) -> onnx.ModelProto:
    """A copy of a model with `array` as the elements of an initializer."""
    tensor = model.graph.initializer[index]
    given = onnx.numpy_helper.from_array(array, tensor.name)
    return changed(model, lambda model: model.graph.initializer[index].CopyFrom(given))


def new_model() -> onnx.ModelProto:
    return changed(weights(2), documented("new"))


# Edits of one thing


def replace_model(path: Any, model: Any, *, name: str = "", **options: Any) -> None:
    with onnxarchive.edit(path, **options) as edit:
        edit.models[name] = model


def remove_model(path: Any, name: str, **options: Any) -> None:
    with onnxarchive.edit(path, **options) as edit:
        del edit.models[name]


def rename_model(path: Any, old: str, new: str, **options: Any) -> None:
    with onnxarchive.edit(path, **options) as edit:
        edit.models.rename(old, new)


def change_model(
    path: Any,
    change: Callable[[onnx.ModelProto], onnx.ModelProto],
    *,
    name: str = "",
    **options: Any,
) -> None:
    with onnxarchive.edit(path, model=name, **options) as edit:
        edit.model = change(edit.model)


def replace_tensor(path: Any, name: str, array: Any, **options: Any) -> None:
    with onnxarchive.edit(path, **options) as edit:
        edit.tensors[name] = array


def change_assets(
    path: Any, added: Mapping[str, Any], removed: Collection[str] = (), **options: Any
) -> None:
    with onnxarchive.edit(path, **options) as edit:
        for name in removed:
            del edit.assets[name]
        for name, data in added.items():
            edit.assets[name] = data


def add_asset(path: Any, name: str, data: Any, **options: Any) -> None:
    change_assets(path, {name: data}, **options)


def document(path: str | Path, text: str = "new", **options: Any) -> None:
    """Changes the doc string of an archive's model."""
    with onnxarchive.edit(path, **options) as edit:
        edit.model.doc_string = text


# Edits of an archive whose model is `weights(2)`, by what they change
EDITS: dict[str, Callable[..., None]] = {
    "models": lambda path, **options: replace_model(path, new_model(), **options),
    "model": document,
    "tensors": lambda path, **options: replace_tensor(
        path, "w0", np.ones(300, np.float32), **options
    ),
    "assets": lambda path, **options: add_asset(path, "new", b"asset", **options),
}
# Edits that change a file in place if the file cannot be cloned, and give it `new_model`.
IN_PLACE = {name: EDITS[name] for name in ("models", "model")}


# Archives


def written(path: Path, *names: str, asset: bool = False) -> onnx.ModelProto:
    """Writes `weights(3)` with its entries in the order of `names`; returns the model."""
    model = weights(3)
    arrays = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    with onnxarchive.Writer(path) as writer:
        for name in names:
            writer.add(name, arrays[name])
        if asset:
            writer.add_asset("labels", b"cat")
        writer.finish(model)
    return model


def write_two(path: Path, model: bytes) -> None:
    """Writes the entries of `weights(2)`, and this serialized model of them."""
    with path.open("wb") as file:
        writer = ZipWriter(file)
        for tensor in weights(2).graph.initializer:
            add_bytes(writer, tensor.name, tensor.raw_data)
        add_bytes(writer, MODEL, model)
        writer.finish()
    assert onnxarchive.check(path, full=True) == []


def referring(path: Path) -> onnx.ModelProto:
    """The model of an archive, with external tensors that refer to the archive."""
    with onnxarchive.open(path) as archive:
        return archive.model


def entries_of(data: bytes) -> list[tuple[str, bytes]]:
    """Names and data of all entries except the model, in order."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        found = [(info.filename, archive.read(info)) for info in archive.infolist()]
    assert found[-1][0] == MODEL
    return found[:-1]


def require(path: Path, expected: bytes) -> None:
    """Requires that an archive has these bytes, breaks no rule, and is alone in its directory."""
    assert path.read_bytes() == expected
    assert onnxarchive.check(path, full=True) == []
    assert os.listdir(path.parent) == [path.name]


@contextlib.contextmanager
def refused(
    path: Path, error: type[_Error] | tuple[type[_Error], ...], match: str | None = None
) -> Iterator[pytest.ExceptionInfo[_Error]]:
    """Requires that a block raises an error, and leaves the archive and its directory as before."""
    before, names = path.read_bytes(), sorted(os.listdir(path.parent))
    with pytest.raises(error, match=match) as caught:
        yield caught
    assert (path.read_bytes(), sorted(os.listdir(path.parent))) == (before, names)


@contextlib.contextmanager
def fails_at(path: Path, error: type[OSError]) -> Iterator[None]:
    """Requires that a block raises an error of the system that names a file."""
    with pytest.raises(error) as caught:
        yield
    assert caught.value.filename == str(path)


@contextlib.contextmanager
def untouched(path: Path) -> Iterator[None]:
    """Requires that a block writes nothing: bytes, inode and time of the last write stay."""
    before, status = path.read_bytes(), path.stat()
    yield
    require(path, before)
    after = path.stat()
    assert (after.st_ino, after.st_mtime_ns) == (status.st_ino, status.st_mtime_ns)


def require_kept(path: Path, before: bytes, expected: onnx.ModelProto) -> list[str]:
    """Requires that an edited archive has a model and keeps all entries at their offsets.

    Returns:
        The names of the new entries, without the model.
    """
    assert onnxarchive.check(path, full=True) == []  # also excludes gaps and dead bytes
    assert onnxarchive.load(path) == expected
    assert os.listdir(path.parent) == [path.name]
    after = path.read_bytes()
    with zipfile.ZipFile(io.BytesIO(before)) as archive:
        offset = archive.infolist()[-1].header_offset
    assert after[:offset] == before[:offset]
    old, new = entries_of(before), entries_of(after)
    assert new[: len(old)] == old
    return [name for name, _ in new[len(old) :]]


# File systems


def no_clone(source: local_file.MappedFile, target: int) -> bool:
    return False


def in_place(write: Callable[..., Any]) -> Callable[..., Any]:
    """A function that writes, as on a file system that shares no blocks."""
    return patch.object(clones_and_sync, "clone", no_clone)(write)


def on_a_clone(write: Callable[..., Any]) -> Callable[..., Any]:
    """A function that writes, as on a file system that shares blocks."""
    return patch.object(clones_and_sync, "clone", copying_clone)(write)
