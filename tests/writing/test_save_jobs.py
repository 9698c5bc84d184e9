"""Saving and converting with several threads: the outcome is that of one."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
import shutil
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import ml_dtypes
import numpy as np
import onnx
import pytest
from models import (
    entry_of,
    flip_byte,
    full_model,
    model_of,
    raw_tensor,
    run_python,
    typed,
)
from onnx import TensorProto, numpy_helper
from written import saved, write_parts

import onnxarchive
from onnxarchive import ArchiveFormatError, ChecksumError
from onnxarchive.files.data import Range
from onnxarchive.sources.zip_file import ZippedFile
from onnxarchive.writing import write as write_module

JOBS = [1, 2, 8]
LARGE = 1 << 20
PIECE = 8 << 20
MAPPED = 5 * PIECE  # more than is copied

several = pytest.mark.parametrize("jobs", [*JOBS, None])


def _converted(source: Path, **options: Any) -> bytes:
    target = io.BytesIO()
    onnxarchive.convert(source, target, **options)
    return target.getvalue()


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    """Small, large and empty tensors of one byte an element, of several, and of less than one."""
    model = full_model()
    model.graph.initializer.extend(
        [
            raw_tensor("large", dims=(LARGE,), seed=1),
            raw_tensor("empty", dims=(0, 3)),
            raw_tensor("larger", TensorProto.INT8, (PIECE + 5,), seed=2),
            raw_tensor("small", TensorProto.INT64, (200,), seed=3),
            typed(raw_tensor("floats", dims=(LARGE,), seed=4)),
            numpy_helper.from_array(np.ones(LARGE + 1, ml_dtypes.int4), "packed"),
            raw_tensor("last", TensorProto.DOUBLE, (LARGE,), seed=5),
        ]
    )
    return model


@pytest.fixture(scope="module")
def expected(model: onnx.ModelProto) -> bytes:
    """The archive that one thread makes."""
    return saved(model, jobs=1)


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
    assert saved(model, jobs=jobs, **options) == saved(model, jobs=1, **options)


@pytest.mark.parametrize("kind", ["single", "external", "archive"])
@several
def test_a_converted_model_is_the_same_bytes_with_any_number_of_jobs(
    expected: bytes, sources: dict[str, Path], kind: str, jobs: int | None
) -> None:
    assert _converted(sources[kind], jobs=jobs) == expected


@several
def test_progress_is_reported_in_the_callers_thread_up_to_all_bytes(
    model: onnx.ModelProto, jobs: int | None
) -> None:
    told: list[tuple[int, int]] = []
    callers: set[int] = set()

    def progress(done: int, total: int) -> None:
        told.append((done, total))
        callers.add(threading.get_ident())

    archive = saved(model, jobs=jobs, progress=progress, assets={"x": bytes(2 * PIECE)})
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        total = sum(info.file_size for info in file.infolist())
    done = [0, *(done for done, _ in told)]
    assert {total for _, total in told} == {total, done[-1]}
    assert all(0 <= after - before <= PIECE for before, after in itertools.pairwise(done))
    assert callers == {threading.get_ident()}


@several
def test_the_error_is_that_of_the_first_tensor(tmp_path: Path, jobs: int | None) -> None:
    # The second is the sooner found, since it is smaller; neither is Boolean.
    bad = [
        TensorProto(name=name, data_type=TensorProto.BOOL, dims=[size], raw_data=b"\x02" * size)
        for name, size in (("first", 20 * LARGE), ("second", LARGE))
    ]
    good = [raw_tensor(f"good{number}", dims=(LARGE,), seed=number) for number in range(3)]
    with pytest.raises(ArchiveFormatError, match="'first'"):
        onnxarchive.save(model_of(*good, *bad), tmp_path / "m.onnxa", jobs=jobs)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("jobs", JOBS)
def test_a_data_file_that_changes_while_it_is_read_gives_no_archive(
    tmp_path: Path, jobs: int
) -> None:
    source, data = write_parts(tmp_path, MAPPED, 3)

    def change(done: int, total: int) -> None:
        if done == MAPPED + PIECE:  # a fifth of w1 is written
            flip_byte(data, 2 * MAPPED - 1)

    with pytest.raises(ChecksumError, match="'w1'"):
        onnxarchive.convert(source, tmp_path / "m.onnxa", jobs=jobs, progress=change)
    assert set(tmp_path.iterdir()) == {data, source}
    data.unlink()  # pytest keeps what is left for days


@pytest.mark.parametrize("jobs", JOBS[1:])
def test_data_of_up_to_32_mib_is_read_once_by_threads(tmp_path: Path, jobs: int) -> None:
    nbytes = 2 * PIECE
    source, data = write_parts(tmp_path, nbytes, 3)
    changed = []

    def change(done: int, total: int) -> None:
        if done == PIECE:  # half of w0 is written, and its CRC-32 before
            flip_byte(data, nbytes - 1)
            changed.append(done)

    onnxarchive.convert(source, tmp_path / "m.onnxa", jobs=jobs, progress=change)
    assert changed == [PIECE]
    with onnxarchive.open(tmp_path / "m.onnxa") as archive:
        archive.verify()
        assert not archive.tensors["w0"].any()


@pytest.mark.parametrize("jobs", JOBS)
def test_an_asset_that_changes_while_it_is_read_gives_no_archive(tmp_path: Path, jobs: int) -> None:
    asset = bytearray(MAPPED)

    def change(done: int, total: int) -> None:
        asset[-1] = 1

    with pytest.raises(ChecksumError, match="assets/a"):
        onnxarchive.save(
            model_of(), tmp_path / "m.onnxa", assets={"a": asset}, jobs=jobs, progress=change
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("nbytes", [LARGE, MAPPED])
@pytest.mark.parametrize("jobs", JOBS)
def test_a_damaged_entry_of_an_archive_is_not_copied(
    tmp_path: Path, jobs: int, nbytes: int
) -> None:
    source, target = tmp_path / "source.onnxa", tmp_path / "target.onnxa"
    zeros = numpy_helper.from_array(np.zeros(nbytes, np.int8), "a")
    model = model_of(zeros, zeros)
    model.graph.initializer[1].name = "b"
    onnxarchive.save(model, source)
    entry = entry_of(source, "b")
    flip_byte(source, entry.data_offset + nbytes - 1)
    with pytest.raises(
        ChecksumError, match=f"'b': expected {nbytes} bytes with CRC-32 {entry.crc32:#x}"
    ):
        onnxarchive.convert(source, target, jobs=jobs)
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("jobs", JOBS)
def test_compressed_entries_are_inflated_in_threads_to_the_same_bytes(
    expected: bytes, sources: dict[str, Path], tmp_path: Path, jobs: int
) -> None:
    source = tmp_path / "compressed.zip"
    with (
        zipfile.ZipFile(sources["archive"]) as archive,
        zipfile.ZipFile(source, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in archive.namelist():
            target.writestr(name, archive.read(name))
    inflating: set[int] = set()

    inflate = ZippedFile._compared

    def noted(file: ZippedFile) -> Iterator[memoryview]:
        inflating.add(threading.get_ident())
        return inflate(file)

    with patch.object(ZippedFile, "_compared", noted):
        assert _converted(source, jobs=jobs) == expected
    assert len(inflating) <= jobs
    assert (inflating != {threading.get_ident()}) == (jobs > 1)


@pytest.mark.parametrize("is_directory", [False, True])
def test_a_source_that_is_replaced_while_it_is_read_is_read_to_its_end(
    expected: bytes, sources: dict[str, Path], tmp_path: Path, is_directory: bool
) -> None:
    source, other = tmp_path / "m.onnx", tmp_path / "other"
    shutil.copyfile(sources["single"], source)
    other.write_bytes(b"another")

    def replace(done: int, total: int) -> None:
        if other.exists():
            os.replace(other, source)

    given = tmp_path if is_directory else source
    with pytest.warns(UserWarning, match="other") if is_directory else contextlib.nullcontext():
        converted = _converted(given, progress=replace)
    assert source.read_bytes() == b"another"
    assert converted == expected


@pytest.mark.parametrize("jobs", JOBS[1:])
@pytest.mark.parametrize("is_single", [False, True])
def test_a_file_that_becomes_shorter_while_it_is_read_gives_no_archive(
    tmp_path: Path, jobs: int, is_single: bool
) -> None:
    source, data = write_parts(tmp_path, 2 * PIECE, 10)  # more than are read ahead
    if is_single:
        onnx.save(onnx.load(source), source)
        data.unlink()
        data = source
    before = set(tmp_path.iterdir())

    def truncate(done: int, total: int) -> None:
        os.truncate(data, PIECE)

    with pytest.raises(ArchiveFormatError, match=f"found a file truncated to {PIECE}") as raised:
        onnxarchive.convert(source, tmp_path / "m.onnxa", jobs=jobs, progress=truncate)
    assert raised.value.path == os.path.realpath(data)
    assert set(tmp_path.iterdir()) == before
    data.unlink()  # pytest keeps what is left for days


def test_an_error_of_reading_names_the_data_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, data = write_parts(tmp_path, LARGE, 3)

    read = os.pread

    def fail(descriptor: int, size: int, offset: int) -> bytes:
        if os.path.sameopenfile(descriptor, opened.fileno()):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", fail)
    with open(data, "rb") as opened, pytest.raises(OSError, match="Input/output error") as raised:
        onnxarchive.convert(source, io.BytesIO(), jobs=2)
    assert raised.value.filename == os.path.realpath(data)


@pytest.mark.parametrize("jobs", JOBS)
def test_bytes_are_the_same_below_and_above_the_size_that_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    monkeypatch.setattr(write_module, "MAX_COPIED_NBYTES", LARGE)
    sizes = (LARGE - 1, LARGE, LARGE + 1)
    model = model_of(
        *(raw_tensor(f"w{nbytes}", TensorProto.INT8, (nbytes,), seed=nbytes) for nbytes in sizes)
    )
    expected = saved(model, jobs=1)
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="w.data")
    with patch.object(Range, "read", autospec=True, side_effect=Range.read) as read:
        assert _converted(tmp_path / "m.onnx", jobs=jobs) == expected
    found = sorted(call.args[0].nbytes for call in read.mock_calls)
    assert found == ([] if jobs == 1 else [LARGE - 1, LARGE])


def test_a_model_is_saved_and_verified_while_python_ends(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    program = """
import atexit, sys, onnx, onnxarchive
def work():
    onnxarchive.convert(sys.argv[1], sys.argv[2], jobs=4)
    with onnxarchive.open(sys.argv[2]) as archive:
        archive.verify(jobs=4)
    print("done")
atexit.register(work)
"""
    assert run_python(program, sources["single"], tmp_path / "m.onnxa").split() == ["done"]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ZeroDivisionError])
@several
def test_an_interrupt_leaves_nothing_and_no_thread(
    model: onnx.ModelProto, tmp_path: Path, jobs: int | None, kind: type[BaseException]
) -> None:
    before = threading.active_count()

    progress = Mock(side_effect=kind)
    with pytest.raises(kind):
        onnxarchive.save(model, tmp_path / "m.onnxa", jobs=jobs, progress=progress)
    assert list(tmp_path.iterdir()) == []
    assert threading.active_count() == before


@several
def test_a_pipe_gets_what_threads_have_prepared(
    model: onnx.ModelProto, expected: bytes, jobs: int | None
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
    assert bytes(received) == expected


def test_tensors_of_an_ir_model_are_made_in_the_callers_thread() -> None:
    ir = pytest.importorskip("onnx_ir")
    makers: set[int] = set()

    def tensor(number: int) -> Any:
        def evaluate() -> Any:
            makers.add(threading.get_ident())
            return ir.tensor(np.full(LARGE, number, np.float32))

        name = f"w{number}"
        lazy = ir.LazyTensor(evaluate, ir.DataType.FLOAT, ir.Shape([LARGE]), name=name)
        return ir.Value(name=name, const_value=lazy)

    graph = ir.Graph([], [], nodes=[], initializers=map(tensor, range(6)), opset_imports={"": 20})
    model = ir.Model(graph, ir_version=10)
    assert saved(model, jobs=4) == saved(model, jobs=1)
    assert makers == {threading.get_ident()}


def test_less_than_one_job_is_refused_before_anything_is_written(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    source, target = sources["single"], tmp_path / "target"
    for write in (
        lambda: onnxarchive.save(onnx.load(source), target, jobs=0),
        lambda: onnxarchive.convert(source, target, jobs=0),
        lambda: onnxarchive.convert_many([source], target, jobs=0),
    ):
        with pytest.raises(ValueError, match="jobs must be 1 or more, got 0"):
            write()
    assert list(tmp_path.iterdir()) == []
