"""Arrays of archives by numpy's own ways: DLPack, and slices that read their pages alone."""

from __future__ import annotations

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from models import model_of, raw_tensor, run_python
from onnx import TensorProto

import onnxarchive

MIB = 1 << 20


def test_dlpack_gives_the_same_memory_and_keeps_it_read_only(tmp_path: Path) -> None:
    tensor = raw_tensor("w", dims=(4000,))
    onnxarchive.save(model_of(tensor), tmp_path / "m.onnxa")
    with onnxarchive.open(tmp_path / "m.onnxa") as archive:
        array = archive.tensors["w"]
    try:
        other = np.from_dlpack(array)
    except BufferError:  # of numpy 2.0
        pytest.skip("this numpy exchanges no read-only arrays by DLPack")
    assert np.shares_memory(array, other)
    assert not other.flags.writeable
    del array, archive
    assert other.tobytes() == tensor.raw_data


def test_dlpack_has_no_types_of_ml_dtypes(tmp_path: Path) -> None:
    tensor = raw_tensor("w", TensorProto.BFLOAT16, (4000,))
    onnxarchive.save(model_of(tensor), tmp_path / "m.onnxa")
    with onnxarchive.open(tmp_path / "m.onnxa") as archive:
        with pytest.raises(BufferError):
            np.from_dlpack(archive.tensors["w"])
        bits = archive.tensors["w"].view(np.uint16)
    assert np.shares_memory(bits, bits.view(ml_dtypes.bfloat16))
    assert bits.tobytes() == tensor.raw_data


@pytest.mark.skipif(
    not os.path.exists("/proc/self/smaps"), reason="/proc/self/smaps says what is resident"
)
def test_a_slice_of_a_large_tensor_reads_its_pages_alone(tmp_path: Path) -> None:
    path = tmp_path / "m.onnxa"
    with onnxarchive.Writer(path) as writer:
        writer.add("w", np.zeros((65536, 1024), np.float32))  # 256 MiB
        writer.finish(model_of())
    code = """
import sys, onnxarchive
def resident():
    with open("/proc/self/smaps") as maps:
        lines = iter(maps)
        for line in lines:
            if line.rstrip().endswith("m.onnxa"):
                return next(int(it.split()[1]) << 10 for it in lines if it.startswith("Rss:"))
    return 0
with onnxarchive.open(sys.argv[1]) as archive:
    array = archive.tensors["w"]
opened = resident()
array[30000:30010, 100:200].sum()
sliced = resident()
array.sum()
print(opened, sliced, resident())
"""
    opened, sliced, everything = map(int, run_python(code, path).split())
    print(f"{opened=} {sliced=} {everything=}")  # noqa: T201
    assert opened <= MIB
    assert sliced <= 16 * MIB  # ten rows are 40 KiB; the system may map what lies around them
    assert everything >= 256 * MIB
