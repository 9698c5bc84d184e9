"""An error is freed as soon as it was handled, and the files in its frames with it."""

from __future__ import annotations

import contextlib
import gc
import io
import os
from collections.abc import Callable
from pathlib import Path

import edits
import numpy as np
import onnx
import pytest
from interruptions import interrupt
from models import flip_byte, raw_tensor, runnable_model, weight_model
from obstore.store import MemoryStore

import onnxarchive
from onnxarchive.cli import main
from onnxarchive.errors import ArchiveError


def _missing(path: Path) -> None:
    """Writes no file."""


def _external(path: Path) -> None:
    tensor = raw_tensor("w", dims=(300,))
    model = weight_model(0)
    model.graph.initializer.append(tensor)
    onnx.save(model, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    os.unlink(path.with_name("w.bin"))


def _flipped(path: Path) -> None:
    onnxarchive.save(runnable_model(), path, size_threshold=0)
    with onnxarchive.open(path) as archive:
        offset = archive.entries[next(iter(archive.tensors.refs))].data_offset
    flip_byte(path, offset)


def _unfinished(path: Path) -> None:
    onnxarchive.save(weight_model(0), path)
    path.write_bytes(interrupt(path, _edit).states["log complete"])


def _edit(path: Path) -> None:
    edits.document(path, "changed " * 100)


FILES: dict[str, Callable[[Path], object]] = {
    "missing": _missing,
    "directory": Path.mkdir,
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("text"),
    "zip": lambda path: path.write_bytes(b"PK\3\4" + bytes(100)),
    "model": lambda path: onnx.save(runnable_model(), path),
    "model without its data": _external,
    "damaged": _flipped,
    "unfinished": _unfinished,
}
# Calls that also take an object of a store.
READING: dict[str, Callable[..., object]] = {
    "open": lambda path, _, **access: onnxarchive.open(path, **access).close(),
    "load": lambda path, _, **access: onnxarchive.load(path, **access),
    "check": lambda path, _, **access: onnxarchive.check(path, full=True, **access),
    "convert": lambda path, target, **access: onnxarchive.convert(
        path, os.fspath(target) if access else target, **access
    ),
    "convert_many": lambda path, target, **access: onnxarchive.convert_many(
        [path], target, **access
    ),
    "diff": lambda path, _, **access: onnxarchive.diff(path, path, full=True, **access),
    "export": lambda path, target, **access: onnxarchive.export(path, target, **access),
    "extract": lambda path, target, **access: onnxarchive.extract(path, target, **access),
    "session": lambda path, _, **access: onnxarchive.session(path, **access),
}
OTHERS: dict[str, Callable[..., object]] = {
    "check_model": lambda path, _: onnxarchive.check_model(path),
    "link": lambda path, target: onnxarchive.link(path, target),
    "check_link": lambda path, _: onnxarchive.check_link(path),
    "infer_shapes": lambda path, target: onnxarchive.infer_shapes(path, target),
    "recover": lambda path, _: onnxarchive.recover(path),
    "add_asset": lambda path, _: edits.add_asset(path, "labels", b"l"),
    "replace_model": lambda path, _: edits.replace_model(path, weight_model(1)),
    "replace_tensor": lambda path, _: edits.replace_tensor(path, "none", np.ones(3, np.float32)),
    "the command check": lambda path, _: _command("check", path),
    "the command run": lambda path, _: _command("run", path),
}
LOCAL = READING | OTHERS


def _command(*arguments: object) -> None:
    text = io.StringIO()
    with contextlib.redirect_stderr(text), contextlib.redirect_stdout(text):
        main([*map(str, arguments)])


def kept(call: Callable[..., object], *arguments: object, **access: object) -> list[str]:
    """The errors that are still there after a call raised one or caught all of them."""
    # The thread of remote requests may not be done with its OSErrors yet.
    kinds = (ArchiveError,) if access else (ArchiveError, OSError)

    def errors() -> dict[int, str]:
        return {id(it): repr(it) for it in gc.get_objects() if isinstance(it, kinds)}

    gc.collect()
    gc.disable()
    before = errors()
    try:
        call(*arguments, **access)
    except Exception:  # a context manager that catches it would be what is tested here
        pass
    finally:
        gc.enable()
    return [text for key, text in errors().items() if key not in before]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", LOCAL.values(), ids=LOCAL.keys())
@pytest.mark.parametrize("write", FILES.values(), ids=FILES.keys())
def test_an_error_of_a_local_file_is_freed_at_once(
    tmp_path: Path, write: Callable[[Path], object], call: Callable[..., object]
) -> None:
    path = tmp_path / "m.onnx"
    write(path)
    assert kept(call, path, tmp_path / "target") == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", READING.values(), ids=READING.keys())
@pytest.mark.parametrize("write", FILES.values(), ids=FILES.keys())
def test_an_error_of_a_remote_object_is_freed_at_once(
    tmp_path: Path, write: Callable[[Path], object], call: Callable[..., object]
) -> None:
    path = tmp_path / "m.onnx"
    write(path)
    store = MemoryStore()
    if path.is_file():
        store.put("m.onnx", path.read_bytes())
    assert kept(call, "m.onnx", tmp_path / "target", store=store) == []
