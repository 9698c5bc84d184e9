"""Arrays of archives by numpy's own ways: DLPack, and slices that read their pages alone."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from models import model_of, raw_tensor
from onnx import TensorProto
from pages import needs_smaps, require_slice_to_read_its_pages_alone

import onnxarchive


def test_dlpack_gives_the_same_memory_and_keeps_it_read_only(path: Path) -> None:
    tensor = raw_tensor("w", dims=(4000,))
    onnxarchive.save(model_of(tensor), path)
    with onnxarchive.open(path) as archive:
        array = archive.tensors["w"]
    try:
        other = np.from_dlpack(array)
    except BufferError:  # of numpy 2.0
        pytest.skip("this numpy exchanges no read-only arrays by DLPack")
    assert np.shares_memory(array, other)
    assert not other.flags.writeable
    del array, archive
    assert other.tobytes() == tensor.raw_data


def test_dlpack_has_no_types_of_ml_dtypes(path: Path) -> None:
    tensor = raw_tensor("w", TensorProto.BFLOAT16, (4000,))
    onnxarchive.save(model_of(tensor), path)
    with onnxarchive.open(path) as archive:
        with pytest.raises(BufferError):
            np.from_dlpack(archive.tensors["w"])
        bits = archive.tensors["w"].view(np.uint16)
    assert np.shares_memory(bits, bits.view(ml_dtypes.bfloat16))
    assert bits.tobytes() == tensor.raw_data


@needs_smaps
def test_a_slice_of_a_large_tensor_reads_its_pages_alone(tmp_path: Path) -> None:
    require_slice_to_read_its_pages_alone(tmp_path, np.float32, 'tensor = archive.tensors["w"]')
