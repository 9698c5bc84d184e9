"""The memory of converting and exporting does not depend on the size of the model.

Each call runs in a process of its own that says how much anonymous memory it took at most, beyond
an interpreter with onnx imported; pages of mapped files are the system's to take back.
"""

from __future__ import annotations

import os
import shutil
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from models import MEASURE_MEMORY, external, model_of, run_python
from onnx import TensorProto
from plain_wire import varint
from sparse_files import (
    GIB,
    GRAPH,
    INITIALIZER,
    header,
    write_int64_data,
    write_sparse_model,
)
from zip_entries import add_bytes

import onnxarchive
from onnxarchive.model import model_proto
from onnxarchive.model.keys import MODEL_PROTO
from onnxarchive.zipformat.writer import ZipWriter

MIB = 1 << 20
BOUND = 150 * MIB
STREAMED = 40 * MIB  # of tensors that are copied from file to file
NEEDED = 6 * GIB

pytestmark = [
    pytest.mark.large,
    pytest.mark.skipif(
        not os.path.exists("/proc/self/status"),
        reason="/proc/self/status says how much is allocated",
    ),
]

_INT64_DATA = TensorProto.INT64_DATA_FIELD_NUMBER


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk with room, emptied in the end."""
    free = shutil.disk_usage(tmp_path).free
    if free < NEEDED:
        pytest.skip(f"6 GiB of free disk are needed, {free / GIB:.1f} GiB are free in {tmp_path}")
    yield tmp_path
    shutil.rmtree(tmp_path)


def _growth(call: str, *paths: Path) -> int:
    """The most anonymous memory that a call took; nothing of the library is imported before."""
    code = f"""
{MEASURE_MEMORY}
import onnx
def call():
    import onnxarchive
    onnxarchive.{call}
print(growth(call))
"""
    found = int(run_python(code, *paths))
    print(f"onnxarchive.{call}: {found / MIB:.1f} MiB")  # noqa: T201
    return found


_CONVERT = "convert(sys.argv[1], sys.argv[2])"
_EXPORT = "export(sys.argv[1], sys.argv[2])"
_EXPORT_OUTSIDE = "export(sys.argv[1], sys.argv[2], external_data='weights.bin')"


def _is_same_file(one: Path, other: Path) -> bool:
    with open(one, "rb") as first, open(other, "rb") as second:
        while True:
            piece = first.read(16 * MIB)
            if piece != second.read(16 * MIB):
                return False
            if not piece:
                return True


def test_the_measured_memory_is_the_memory_that_a_process_allocates() -> None:
    code = f"""
{MEASURE_MEMORY}
import time
def hold():
    taken = b"x" * (200 << 20)
    time.sleep(1)
print(growth(hold))
"""
    assert 200 * MIB <= int(run_python(code)) < 250 * MIB


@pytest.mark.parametrize(
    "sizes",
    [[3 * GIB // 2 - 1000], [100 * MIB] * 15 + [36 * MIB - 1000]],
    ids=["one tensor", "many tensors"],
)
def test_a_model_of_1_5_gib_converts_to_an_archive_and_back_in_40_mib(
    folder: Path, sizes: list[int]
) -> None:
    source, archive, exported = folder / "m.onnx", folder / "m.onnxa", folder / "back.onnx"
    write_sparse_model(source, sizes)
    assert source.stat().st_size > 3 * GIB // 2 - 2000
    assert _growth(_CONVERT, source, archive) < STREAMED
    with onnxarchive.open(archive) as opened:
        assert [entry.nbytes for entry in opened.entries.values()][:-1] == sizes
        assert all(array[-1] == 7 and array[-2] == 0 for array in opened.tensors.values())
    for verify in ("open(sys.argv[1]).verify()", "check(sys.argv[1], full=True)"):
        assert _growth(verify, archive) < STREAMED
    assert _growth(_EXPORT, archive, exported) < STREAMED
    assert _is_same_file(source, exported)


def test_exporting_1_5_gib_beside_a_data_file_takes_less_than_40_mib(folder: Path) -> None:
    write_sparse_model(folder / "m.onnx", [500 * MIB] * 3)
    onnxarchive.convert(folder / "m.onnx", folder / "m.onnxa")
    (folder / "m.onnx").unlink()
    (folder / "out").mkdir()
    assert _growth(_EXPORT_OUTSIDE, folder / "m.onnxa", folder / "out" / "m.onnx") < STREAMED
    (folder / "m.onnxa").unlink()
    assert (folder / "out" / "weights.bin").stat().st_size >= 1500 * MIB
    assert _growth(_CONVERT, folder / "out" / "m.onnx", folder / "again.onnxa") < STREAMED


def test_models_with_equal_data_files_of_1_gib_become_one_archive_in_150_mib(folder: Path) -> None:
    nbytes = 500 * MIB
    for name in ("one", "two"):
        (folder / name).mkdir()
        model = model_of()
        for index in range(2):
            tensor = TensorProto(name=f"{name}{index}", data_type=TensorProto.UINT8, dims=[nbytes])
            model.graph.initializer.append(
                external(tensor, "w.data", offset=index * nbytes, length=nbytes)
            )
        (folder / name / "m.onnx").write_bytes(model.SerializeToString())
        with open(folder / name / "w.data", "wb") as file:
            file.truncate(2 * nbytes)
            file.seek(-1, os.SEEK_END)
            file.write(b"\x07")  # the tensors differ at their end
    call = "convert(sys.argv[1], sys.argv[2], models={'two': sys.argv[3]})"
    one, two = (folder / name / "m.onnx" for name in ("one", "two"))
    assert _growth(call, one, folder / "m.onnxa", two) < BOUND
    assert (folder / "m.onnxa").stat().st_size < 2 * nbytes + MIB
    with onnxarchive.open(folder / "m.onnxa", model="two") as archive:
        assert [array[-1] for array in archive.tensors.values()] == [0, 7]


def test_300_mb_of_varints_are_decoded_in_150_mib(folder: Path) -> None:
    # Numbers of one to five bytes on the wire, as shapes, indices and hashes have them.
    values = np.array([5, 300, 70_000, 9_000_000, 2**32 - 1, 0, 1, 127], np.int64)
    repeats = 300_000_000 // sum(len(varint(int(value))) for value in values)
    write_int64_data(folder / "m.onnx", values.tolist(), repeats)
    assert _growth(_CONVERT, folder / "m.onnx", folder / "m.onnxa") < BOUND
    with onnxarchive.open(folder / "m.onnxa") as archive:
        rows = archive.tensors["w"].reshape(repeats, len(values))
        assert rows.nbytes > 800_000_000
        assert (rows[:1000] == values).all()
        assert (rows[-1000:] == values).all()
        assert (rows[:, 4] == values[4]).all()


@pytest.mark.parametrize("is_single", [False, True], ids=["a file a tensor", "a single model"])
def test_a_deflated_zip_of_300_mb_is_converted_in_150_mib(folder: Path, is_single: bool) -> None:
    nbytes = 300_000_000
    path = folder / "m.zip"
    if is_single:  # inflated to a temporary file, which is no memory
        write_sparse_model(folder / "m.onnx", [nbytes])
    else:
        tensor = TensorProto(
            name="w0",
            data_type=TensorProto.UINT8,
            dims=[nbytes],
            data_location=TensorProto.EXTERNAL,
        )
        tensor.external_data.add(key="location", value="w.bin")
        (folder / "m.onnx").write_bytes(model_of(tensor).SerializeToString())
        piece = np.random.default_rng(1).bytes(1_000_000)
        (folder / "w.bin").write_bytes(piece * (nbytes // len(piece)))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for name in ("m.onnx", "w.bin"):
            if (folder / name).exists():
                file.write(folder / name, name)
    assert _growth(_CONVERT, path, folder / "m.onnxa") < BOUND
    with onnxarchive.open(folder / "m.onnxa") as archive:
        expected = zlib.crc32((folder / "w.bin").read_bytes()) if not is_single else None
        assert archive.entries["w0"].nbytes == nbytes
        assert expected in (None, archive.entries["w0"].crc32)
        archive.verify()


def test_a_large_tensor_that_stays_in_the_model_is_converted_in_150_mib(folder: Path) -> None:
    value = TensorProto(
        name="value", data_type=TensorProto.UINT8, dims=[300_000_000], raw_data=bytes(300_000_000)
    )
    constant = onnx.helper.make_node("Constant", [], ["c"], value=value)
    graph = onnx.helper.make_graph([constant], "graph", [], [])
    (folder / "m.onnx").write_bytes(onnx.helper.make_model(graph).SerializeToString())
    assert _growth(_CONVERT, folder / "m.onnx", folder / "m.onnxa") < BOUND
    assert onnxarchive.check(folder / "m.onnxa", full=True) == []
    with onnxarchive.open(folder / "m.onnxa") as archive:
        assert archive.entries["__MODEL_PROTO"].nbytes > 300_000_000


def test_saving_with_threads_takes_memory_only_for_the_tensors_in_progress(folder: Path) -> None:
    nbytes = 24 * MIB
    code = f"""
{MEASURE_MEMORY}
import onnx
import onnxarchive
from models import model_of
jobs = int(sys.argv[2])
model = model_of()
onnxarchive.save(model, sys.argv[1])
tensor = onnx.TensorProto(name="w", data_type=onnx.TensorProto.UINT8, dims=[{nbytes}])
tensor.raw_data = bytes({nbytes})
for _ in range(20):
    model.graph.initializer.append(tensor)
print(growth(lambda: onnxarchive.save(model, sys.argv[1], jobs=jobs, progress=sample)))
"""
    # One is written; with threads, as many come next as there are jobs, and 96 MiB at most. The
    # allocator may keep the memory of one more for each thread at work and for the caller's; on a
    # busy machine it sometimes keeps more, since the order of the threads is another each time.
    for jobs, copies in ((1, 1), (2, 5), (16, 10)):
        runs = (int(run_python(code, folder / "m.onnxa", jobs)) for _ in range(3))
        assert any(found < copies * nbytes + 16 * MIB for found in runs), jobs


@pytest.mark.parametrize(("jobs", "copies"), [(1, 0), (2, 3), (16, 4)])
def test_converting_with_threads_takes_memory_only_for_the_tensors_in_progress(
    folder: Path, jobs: int, copies: int
) -> None:
    nbytes = 32 * MIB  # the most that is copied
    model = model_of()
    for index in range(12):
        tensor = TensorProto(name=f"w{index}", data_type=TensorProto.UINT8, dims=[nbytes])
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", "w.data"), ("offset", index * nbytes), ("length", nbytes)):
            tensor.external_data.add(key=key, value=str(value))
        model.graph.initializer.append(tensor)
    onnx.save(model, folder / "m.onnx")
    with open(folder / "w.data", "wb") as file:
        file.truncate(12 * nbytes)
    call = f"convert(sys.argv[1], sys.argv[2], jobs={jobs}, progress=sample)"
    assert _growth(call, folder / "m.onnx", folder / "m.onnxa") < copies * nbytes + 20 * MIB


def test_more_numbers_than_a_shape_has_are_not_collected(folder: Path) -> None:
    count = 20_000_000  # bytes, each a number that takes eight
    tensor = TensorProto(name="w", data_type=TensorProto.INT64, dims=[200]).SerializeToString()
    tensor += header(_INT64_DATA, count) + bytes(count)
    graph = header(INITIALIZER, len(tensor)) + tensor
    model = onnx.ModelProto(ir_version=10).SerializeToString()
    (folder / "m.onnx").write_bytes(model + header(GRAPH, len(graph)) + graph)
    code = f"""
{MEASURE_MEMORY}
import onnx
import onnxarchive
def refused():
    try:
        onnxarchive.convert(sys.argv[1], sys.argv[2], jobs=2)
    except onnxarchive.ArchiveFormatError as error:
        assert "expected 1600 bytes" in str(error), error
        assert "found {count * 8}" in str(error), error
        return
    raise AssertionError("not refused")
print(growth(refused))
"""
    assert int(run_python(code, folder / "m.onnx", folder / "m.onnxa")) < 48 * MIB


@pytest.mark.parametrize("kind", ["archive", "model"])
def test_a_model_of_more_messages_than_allowed_is_refused_without_parsing_it(
    folder: Path, kind: str
) -> None:
    path = folder / "m"
    nodes = (
        b"\x0a\x00" * model_proto.MAX_MESSAGES
    )  # each takes a hundred bytes and more once parsed
    model = onnx.ModelProto(ir_version=10).SerializeToString()
    model += header(GRAPH, len(nodes)) + nodes
    if kind == "archive":
        with open(path, "wb") as file:
            writer = ZipWriter(file)
            add_bytes(writer, MODEL_PROTO, model)
            writer.finish()
    else:
        path.write_bytes(model)
    call = {"archive": "open(sys.argv[1])", "model": _CONVERT}[kind]
    code = f"""
{MEASURE_MEMORY}
import onnx
import onnxarchive
def refused():
    try:
        onnxarchive.{call}
    except onnxarchive.ArchiveFormatError as error:
        assert error.rule == "MODEL-3", error
        assert "{model_proto.MAX_MESSAGES} messages" in str(error), error
        return
    raise AssertionError("not refused")
print(growth(refused))
"""
    assert int(run_python(code, path, folder / "m.onnxa")) < 40 * MIB
