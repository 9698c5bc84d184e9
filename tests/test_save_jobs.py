"""Saving and converting with several threads: the outcome is that of one."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from models import external, full_model, model_of, raw_tensor, typed
from onnx import TensorProto, numpy_helper

import onnxarchive
from onnxarchive import ArchiveFormatError, ChecksumError

JOBS = [1, 2, 3, 8]
LARGE = 1 << 20
PIECE = 8 << 20

several = pytest.mark.parametrize("jobs", [*JOBS, None])


def _model() -> onnx.ModelProto:
    """Small, large and empty tensors of one byte an element, of several, and of less than one."""
    model = full_model()
    model.graph.initializer.extend(
        [
            raw_tensor("large", TensorProto.FLOAT, (LARGE,), seed=1),
            raw_tensor("empty", TensorProto.FLOAT, (0, 3)),
            raw_tensor("larger", TensorProto.INT8, (PIECE + 5,), seed=2),
            raw_tensor("small", TensorProto.INT64, (200,), seed=3),
            typed(raw_tensor("floats", TensorProto.FLOAT, (LARGE,), seed=4)),
            numpy_helper.from_array(np.ones(LARGE + 1, ml_dtypes.int4), "packed"),
            raw_tensor("last", TensorProto.DOUBLE, (LARGE,), seed=5),
        ]
    )
    return model


def _saved(model: Any, **options: Any) -> bytes:
    target = io.BytesIO()
    onnxarchive.save(model, target, **options)
    return target.getvalue()


def _converted(source: Path, **options: Any) -> bytes:
    target = io.BytesIO()
    onnxarchive.convert(source, target, **options)
    return target.getvalue()


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    return _model()


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, model: onnx.ModelProto) -> dict[str, Path]:
    """The same model as a single file, beside its data, and as an archive."""
    top = tmp_path_factory.mktemp("sources")
    found = {
        "single": top / "single.onnx",
        "external": top / "external" / "m.onnx",
        "archive": top / "m.onnxa",
    }
    onnx.save(model, found["single"])
    found["external"].parent.mkdir()
    onnxarchive.save(model, found["archive"])
    onnxarchive.export(found["archive"], found["external"], external_data="weights")
    return found


@several
def test_a_saved_model_is_the_same_bytes_with_any_number_of_jobs(
    model: onnx.ModelProto, tmp_path: Path, jobs: int | None
) -> None:
    (tmp_path / "asset").write_bytes(bytes(range(256)) * (LARGE // 256))
    options: dict[str, Any] = {
        "size_threshold": 0,
        "convert_attribute": True,
        "assets": {"file": tmp_path / "asset", "bytes": b"b" * LARGE, "none": b""},
    }
    assert _saved(model, jobs=jobs, **options) == _saved(model, jobs=1, **options)


@pytest.mark.parametrize("kind", ["single", "external", "archive"])
@several
def test_a_converted_model_is_the_same_bytes_with_any_number_of_jobs(
    model: onnx.ModelProto, sources: dict[str, Path], kind: str, jobs: int | None
) -> None:
    assert _converted(sources[kind], jobs=jobs) == _saved(model, jobs=1)


@several
def test_progress_is_told_in_the_callers_thread_up_to_all_bytes(
    model: onnx.ModelProto, jobs: int | None
) -> None:
    told: list[tuple[int, int]] = []
    callers: set[int] = set()

    def progress(done: int, total: int) -> None:
        told.append((done, total))
        callers.add(threading.get_ident())

    _saved(model, jobs=jobs, progress=progress)
    done = [done for done, _ in told]
    assert done == sorted(done)
    assert {total for _, total in told} == {done[-1]}
    assert callers == {threading.get_ident()}


def _not_boolean(name: str, nbytes: int) -> TensorProto:
    return TensorProto(
        name=name, data_type=TensorProto.BOOL, dims=[nbytes], raw_data=b"\x02" * nbytes
    )


@several
def test_the_error_is_that_of_the_first_tensor(tmp_path: Path, jobs: int | None) -> None:
    good = [raw_tensor(f"good{number}", dims=(LARGE,), seed=number) for number in range(3)]
    # The second is the sooner found, since it is smaller.
    first, second = (_not_boolean(*it) for it in (("first", 20 * LARGE), ("second", LARGE)))
    model = model_of(*good, first, second)
    with pytest.raises(ArchiveFormatError, match="'first'"):
        onnxarchive.save(model, tmp_path / "m.onnxa", jobs=jobs)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("jobs", JOBS)
def test_a_data_file_that_changes_meanwhile_gives_no_archive(tmp_path: Path, jobs: int) -> None:
    nbytes = 2 * PIECE
    data = tmp_path / "w.bin"
    data.write_bytes(bytes(3 * nbytes))
    tensors = [
        external(
            TensorProto(name=f"w{number}", data_type=TensorProto.INT8, dims=[nbytes]),
            "w.bin",
            offset=number * nbytes,
            length=nbytes,
        )
        for number in range(3)
    ]
    source = tmp_path / "m.onnx"
    source.write_bytes(model_of(*tensors).SerializeToString())

    def change(done: int, total: int) -> None:
        if done == nbytes + PIECE:  # half of w1 is written
            with open(data, "r+b") as file:
                file.seek(2 * nbytes - 1)
                file.write(b"\x01")

    with pytest.raises(ChecksumError, match="'w1'"):
        onnxarchive.convert(source, tmp_path / "m.onnxa", jobs=jobs, progress=change)
    assert set(tmp_path.iterdir()) == {data, source}


@pytest.mark.parametrize("jobs", JOBS)
def test_an_asset_that_changes_meanwhile_gives_no_archive(tmp_path: Path, jobs: int) -> None:
    asset = bytearray(2 * PIECE)

    def change(done: int, total: int) -> None:
        asset[-1] = 1

    with pytest.raises(ChecksumError, match="assets/a"):
        onnxarchive.save(
            model_of(), tmp_path / "m.onnxa", assets={"a": asset}, jobs=jobs, progress=change
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ZeroDivisionError])
@several
def test_an_interrupt_leaves_nothing_and_no_thread(
    model: onnx.ModelProto, tmp_path: Path, jobs: int | None, kind: type[BaseException]
) -> None:
    before = threading.active_count()

    def interrupt(done: int, total: int) -> None:
        raise kind

    with pytest.raises(kind):
        onnxarchive.save(model, tmp_path / "m.onnxa", jobs=jobs, progress=interrupt)
    assert list(tmp_path.iterdir()) == []
    assert threading.active_count() == before


@several
def test_a_pipe_takes_what_threads_have_made_ready(
    model: onnx.ModelProto, jobs: int | None
) -> None:
    read_end, write_end = os.pipe()
    received = bytearray()

    def receive() -> None:
        with open(read_end, "rb") as file:
            received.extend(file.read())

    receiver = threading.Thread(target=receive)
    receiver.start()
    with open(write_end, "wb", buffering=0) as target:
        onnxarchive.save(model, target, jobs=jobs)
    receiver.join()
    assert bytes(received) == _saved(model, jobs=1)


def test_tensors_of_an_ir_model_are_made_in_the_callers_thread() -> None:
    ir = pytest.importorskip("onnx_ir")
    makers: set[int] = set()

    def tensor(number: int) -> Any:
        def evaluate() -> Any:
            makers.add(threading.get_ident())
            return ir.tensor(np.full(LARGE, number, np.float32))

        lazy = ir.LazyTensor(
            evaluate, dtype=ir.DataType.FLOAT, shape=ir.Shape([LARGE]), name=f"w{number}"
        )
        return ir.Value(name=f"w{number}", const_value=lazy)

    values = [tensor(number) for number in range(6)]
    graph = ir.Graph([], [], nodes=[], initializers=values, opset_imports={"": 20}, name="g")
    model = ir.Model(graph, ir_version=10)
    assert _saved(model, jobs=4) == _saved(model, jobs=1)
    assert makers == {threading.get_ident()}


def _save(source: Path, target: Path, jobs: int) -> None:
    onnxarchive.save(onnx.load(source), target, jobs=jobs)


def _convert(source: Path, target: Path, jobs: int) -> None:
    onnxarchive.convert(source, target, jobs=jobs)


def _convert_many(source: Path, target: Path, jobs: int) -> None:
    onnxarchive.convert_many([source], target, jobs=jobs)


@pytest.mark.parametrize("write", [_save, _convert, _convert_many])
def test_less_than_one_job_is_refused_before_anything_is_written(
    sources: dict[str, Path], tmp_path: Path, write: Callable[[Path, Path, int], None]
) -> None:
    with pytest.raises(ValueError, match="jobs must be 1 or more, got 0"):
        write(sources["single"], tmp_path / "target", 0)
    assert list(tmp_path.iterdir()) == []
