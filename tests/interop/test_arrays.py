"""Arrays of archives by numpy's own ways, and in JAX, which accepts them like all numpy arrays."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from models import NUMBERS, model_of, random_raw, raw_tensor
from onnx import TensorProto
from pages import needs_smaps, require_slice_to_read_its_pages_alone

import onnxarchive

# JAX's own: 64-bit types need its option, and it has none of 6 bits.
WIDE = ["INT64", "UINT64", "DOUBLE", "COMPLEX128"]
SAME = [name for name in NUMBERS if name not in (*WIDE, "FLOAT6E2M3", "FLOAT6E3M2")]
DIMS = (3, 1001)


@pytest.fixture
def archive(path: Path) -> Iterator[onnxarchive.Archive]:
    tensors = [raw_tensor(name, number, DIMS, number) for name, number in NUMBERS.items()]
    onnxarchive.save(model_of(*tensors), path, size_threshold=0)
    with onnxarchive.open(path) as archive:
        yield archive


@pytest.fixture
def jax() -> Any:
    with warnings.catch_warnings():  # what other libraries say of one another
        warnings.simplefilter("ignore")
        library = pytest.importorskip("jax", reason="JAX is not installed")
        pytest.importorskip("jax.numpy")
    return library


def test_dlpack_gives_the_same_memory_and_keeps_it_read_only(archive: onnxarchive.Archive) -> None:
    array = archive.tensors["FLOAT"]
    archive.close()
    try:
        other = np.from_dlpack(array)
    except BufferError:  # of numpy 2.0
        pytest.skip("this numpy exchanges no read-only arrays by DLPack")
    assert np.shares_memory(array, other)
    assert not other.flags.writeable
    del array
    assert other.tobytes() == random_raw(TensorProto.FLOAT, DIMS, TensorProto.FLOAT)


def test_dlpack_has_no_types_of_ml_dtypes(archive: onnxarchive.Archive) -> None:
    array = archive.tensors["BFLOAT16"]
    with pytest.raises(BufferError):
        np.from_dlpack(array)
    bits = array.view(np.uint16)
    assert np.shares_memory(bits, bits.view(ml_dtypes.bfloat16))
    assert bits.tobytes() == random_raw(TensorProto.BFLOAT16, DIMS, TensorProto.BFLOAT16)


@needs_smaps
def test_a_slice_of_a_large_tensor_reads_its_pages_alone(tmp_path: Path) -> None:
    require_slice_to_read_its_pages_alone(tmp_path, np.float32, 'tensor = archive.tensors["w"]')


# JAX


@pytest.mark.tool
@pytest.mark.parametrize("name", [*SAME, *WIDE])
def test_a_type_arrives_in_jax_as_it_is(archive: onnxarchive.Archive, jax: Any, name: str) -> None:
    with jax.enable_x64(name in WIDE):
        expected = archive.tensors[name]
        found = jax.numpy.asarray(expected)
        assert (found.dtype, found.shape) == (expected.dtype, DIMS)
        assert np.asarray(found).tobytes() == expected.tobytes()


@pytest.mark.tool
@pytest.mark.parametrize("name", ["BFLOAT16", "FLOAT8E4M3FN", "FLOAT8E5M2"])
def test_numbers_in_jax_agree_with_numpys(
    archive: onnxarchive.Archive, jax: Any, name: str
) -> None:
    expected = archive.tensors[name].astype(np.float32)
    found = jax.numpy.asarray(archive.tensors[name]).astype(jax.numpy.float32)
    assert np.array_equal(np.asarray(found), expected, equal_nan=True)


@pytest.mark.tool
def test_an_array_of_jax_outlives_the_archive(path: Path, jax: Any) -> None:
    onnxarchive.save(model_of(raw_tensor("w", dims=(4000,))), path)
    with onnxarchive.open(path) as archive:
        array = jax.numpy.asarray(archive.tensors["w"])
    del archive
    path.unlink()
    assert np.asarray(array).tobytes() == random_raw(NUMBERS["FLOAT"], (4000,))
    assert jax.jit(lambda it: it * 0)(array).shape == (4000,)
