"""The public functions by name, for tests of what holds for each of them."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import edits
import numpy as np
import onnx
from models import runnable_model
from versions import object_store
from written import contents, zipped

import onnxarchive


def write(source: Path, target: Path) -> None:
    """Writes the tensors of an archive again, with an asset: the file `m.onnx` if it is there."""
    asset = source.with_name("m.onnx")
    with onnxarchive.open(source) as archive, onnxarchive.Writer(target) as writer:
        for name, array in archive.tensors.items():
            writer.add(name, array)
        writer.add_asset("m", asset if asset.exists() else b"one two")
        writer.finish(onnx.ModelProto(ir_version=10, graph=onnx.GraphProto(name="g")))


# Functions that write a file from an archive, most of them another archive.
WRITES: dict[str, Callable[..., object]] = {
    "save": lambda source, target: onnxarchive.save(onnxarchive.load(source), target),
    "Writer": write,
    "convert": onnxarchive.convert,
    "export": onnxarchive.export,
    "export external data": lambda source, target: onnxarchive.export(
        source, target.with_name("short.onnx"), external_data=target.name
    ),
    "link": onnxarchive.link,
    "infer_shapes": onnxarchive.infer_shapes,
    "transform": lambda source, target: onnxarchive.transform(
        source, target, lambda model: model, weights="loaded"
    ),
    "download": lambda source, target: onnxarchive.download(
        source.name, target, store=object_store("LocalStore", source.parent)
    ),
}


def make_files(folder: Path) -> None:
    """A model, with its weights inside and as external data, zips of it, and an archive."""
    model = runnable_model()
    external = folder / "external"
    external.mkdir(parents=True)
    onnx.save(model, folder / "m.onnx")
    onnxarchive.save(model, folder / "m.onnxa", size_threshold=0, assets={"labels": b"cat" * 9})
    onnxarchive.export(folder / "m.onnxa", external / "m.onnx", external_data="w.bin")
    zipped(folder / "stored.zip", contents(external))
    zipped(folder / "deflated.zip", contents(external), zipfile.ZIP_DEFLATED)
    (folder / "old").write_bytes(b"old")
    (folder / "empty").mkdir()
    onnxarchive.link(folder / "m.onnxa", folder / "l.onnx")


def read(path: Path, **options: Any) -> object:
    """All that an archive gives."""
    with onnxarchive.open(path, **options) as archive:
        archive.verify()
        archive.fetch()
        tensors = {name: array.tobytes() for name, array in archive.tensors.items()}
        entries = {name: bytes(archive.read(name)) for name in archive.entries}
        return tensors, entries, dict(archive.assets), archive.model.SerializeToString()


def replace_tensor(folder: Path) -> None:
    with onnxarchive.open(folder / "m.onnxa") as archive:
        name = next(iter(archive.tensors))
        zeros = np.zeros_like(archive.tensors[name])
    edits.replace_tensor(folder / "m.onnxa", name, zeros)


# Each takes a folder with the files of `make_files`.
CALLS: dict[str, Callable[[Path], object]] = {
    "open": lambda it: read(it / "m.onnxa"),
    "open and prefetch": lambda it: read(it / "m.onnxa", prefetch="populate"),
    "load": lambda it: onnxarchive.load(it / "m.onnxa"),
    "check": lambda it: onnxarchive.check(it / "m.onnxa", full=True),
    "check_model": lambda it: onnxarchive.check_model(it / "m.onnxa"),
    "diff": lambda it: onnxarchive.diff(it / "m.onnxa", it / "m.onnxa", full=True),
    "session": lambda it: onnxarchive.session(it / "m.onnxa"),
    **{
        name: lambda it, write=write: write(it / "m.onnxa", it / "new")  # type: ignore[misc]
        for name, write in WRITES.items()
    },
    "save over a file": lambda it: onnxarchive.save(runnable_model(), it / "old"),
    "convert a file": lambda it: onnxarchive.convert(it / "m.onnx", it / "new"),
    "convert external data": lambda it: onnxarchive.convert(it / "external", it / "new"),
    "convert a stored zip": lambda it: onnxarchive.convert(it / "stored.zip", it / "new"),
    "convert a deflated zip": lambda it: onnxarchive.convert(it / "deflated.zip", it / "new"),
    "convert_many": lambda it: onnxarchive.convert_many([it / "external"], it / "many"),
    "extract": lambda it: onnxarchive.extract(it / "m.onnxa", it / "new"),
    "extract into a directory": lambda it: onnxarchive.extract(it / "m.onnxa", it / "empty"),
    "check_link": lambda it: onnxarchive.check_link(it / "l.onnx"),
    "open with a cache": lambda it: onnxarchive.open(
        "m.onnxa", store=object_store("LocalStore", it), cache=it / "cache"
    ).close(),
    "edit": lambda it: edits.document(it / "m.onnxa"),
    "edit in place": edits.in_place(lambda it: edits.document(it / "m.onnxa")),
    "edit with copy": lambda it: edits.document(it / "m.onnxa", copy=True),
    "edit with compact": lambda it: edits.document(it / "m.onnxa", compact=True),
    "edit of a tensor": replace_tensor,
    "edit of assets": edits.in_place(lambda it: edits.add_asset(it / "m.onnxa", "a", b"new")),
    "edit with another archive": lambda it: edits.replace_model(
        it / "m.onnxa", it / "m.onnx", name="two"
    ),
    "recover": lambda it: onnxarchive.recover(it / "m.onnxa"),
}
