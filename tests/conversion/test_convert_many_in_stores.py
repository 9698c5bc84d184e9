"""Many conversions of models in stores, without a server."""

from __future__ import annotations

import gc
import sys
import tempfile
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import onnx
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from models import model_of, weight_model
from obstore.store import MemoryStore
from onnx import TensorProto
from written import files_below

import onnxarchive
from onnxarchive import convert_many

SERIALIZED = weight_model(1).SerializeToString()
MISSING = model_of(
    TensorProto(
        name="w",
        data_type=TensorProto.FLOAT,
        dims=[4],
        data_location=TensorProto.EXTERNAL,
        external_data=[onnx.StringStringEntryProto(key="location", value="missing.data")],
    )
)


class _Recording(Executor):
    """Runs calls at once, and keeps what a log of them would show."""

    def __init__(self) -> None:
        self.shown = ""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.shown += f"{fn!r} {args!r} {kwargs!r}\n"
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The objects of `memory://`, by key; none yet."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(MemoryFileSystem, "store", found)
    return found


def test_keys_that_lead_out_of_the_target_are_refused_one_by_one(
    objects: dict[str, Any], tmp_path: Path
) -> None:
    system = MemoryFileSystem()
    system.pipe("/models/m.onnx", SERIALIZED)
    for key in ("/models/../up.onnx", "/models/deep/../../m.onnx", "/models/a//b.onnx"):
        objects[key] = objects["/models/m.onnx"]
    found = convert_many(["memory://models"], tmp_path / "out")
    errors = {item.source: item.error for item in found}
    assert errors.pop("memory://models/m.onnx") is None
    assert files_below(tmp_path) == {"out/m.onnxa"}
    assert len(errors) == 3
    for source, error in errors.items():
        assert "expected a relative path" in str(error)
        assert repr(source.removeprefix("memory://models/")) in str(error)


def test_a_failure_takes_no_target_from_another_model(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "m.onnx").write_bytes(SERIALIZED)
    found = convert_many([tmp_path / "gone" / "m.onnx", tmp_path / "m.onnx"], tmp_path / "out")
    assert [item.error is None for item in found] == [False, True]


def test_jobs_for_an_executor_show_no_secrets(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(SERIALIZED)
    executor = _Recording()
    found = convert_many(
        [tmp_path / "m.onnx", "https://127.0.0.1:1/n.onnx?sig=SECRET"],
        "memory://archives",
        executor,
        storage_options={"secret_access_key": "SECRET", "max_retries": 0},
    )
    for name in ("https://127.0.0.1:1/n.onnx", "memory://archives/n.onnxa"):
        assert f"Location.of({name!r})" in executor.shown
    assert "SECRET" not in executor.shown + str(found)


def test_targets_in_a_store_are_skipped_if_they_exist() -> None:
    store = MemoryStore()
    store.put("models/m.onnx", SERIALIZED)
    for is_skipped in (False, True):
        (found,) = convert_many(["models"], "archives", store=store, skip_existing=True)
        assert (found.error, found.is_skipped) == (None, is_skipped)
    assert onnxarchive.load("archives/m.onnxa", store=store) == weight_model(1)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("content", [b"broken", MISSING.SerializeToString(), SERIALIZED])
def test_the_local_copy_of_a_model_is_removed_at_once_even_after_a_failure(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    store = MemoryStore()
    store.put("models/m.onnx", content)
    gc.disable()
    try:
        (found,) = convert_many(["models"], "archives", store=store)
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    finally:
        gc.enable()
    assert (found.error is None) == (content == SERIALIZED)
    assert files_below(tmp_path) == set()
