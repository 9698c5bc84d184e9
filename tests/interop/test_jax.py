"""Arrays of archives in JAX, which accepts them like all numpy arrays."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from models import NUMBERS, model_of, random_raw, raw_tensor

import onnxarchive

pytestmark = pytest.mark.tool

with warnings.catch_warnings():  # what other libraries say of one another
    warnings.simplefilter("ignore")
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    import jax.numpy as jnp

# JAX's own: 64-bit types need its option, and it has none of 6 bits.
WIDE = ["INT64", "UINT64", "DOUBLE", "COMPLEX128"]
NONE = ["FLOAT6E2M3", "FLOAT6E3M2"]
SAME = [name for name in NUMBERS if name not in (*WIDE, *NONE)]
DIMS = (3, 1001)


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[onnxarchive.Archive]:
    tensors = [raw_tensor(name, number, DIMS, number) for name, number in NUMBERS.items()]
    onnxarchive.save(model_of(*tensors), tmp_path / "m.onnxa", size_threshold=0)
    with onnxarchive.open(tmp_path / "m.onnxa") as archive:
        yield archive


@pytest.mark.parametrize("name", SAME)
def test_a_type_arrives_as_it_is(archive: onnxarchive.Archive, name: str) -> None:
    expected = archive.tensors[name]
    found = jnp.asarray(expected)
    assert found.dtype == expected.dtype
    assert found.shape == DIMS
    assert np.asarray(found).tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", WIDE)
def test_types_of_64_bits_need_jaxs_option(archive: onnxarchive.Archive, name: str) -> None:
    with jax.experimental.enable_x64() if not hasattr(jax, "enable_x64") else jax.enable_x64(True):
        found = jnp.asarray(archive.tensors[name])
        assert found.dtype == archive.tensors[name].dtype
        assert np.asarray(found).tobytes() == random_raw(NUMBERS[name], DIMS, NUMBERS[name])


def test_numbers_agree_with_numpys(archive: onnxarchive.Archive) -> None:
    for name in ("BFLOAT16", "FLOAT8E4M3FN", "FLOAT8E5M2"):
        expected = archive.tensors[name].astype(np.float32)
        found = jnp.asarray(archive.tensors[name]).astype(jnp.float32)
        assert np.array_equal(np.asarray(found), expected, equal_nan=True)


def test_an_array_of_jax_outlives_the_archive(path: Path) -> None:
    onnxarchive.save(model_of(raw_tensor("w", dims=(4000,))), path)
    with onnxarchive.open(path) as archive:
        array = jnp.asarray(archive.tensors["w"])
    del archive
    path.unlink()
    assert np.asarray(array).tobytes() == random_raw(NUMBERS["FLOAT"], (4000,))
    assert jax.jit(lambda it: it * 0)(array).shape == (4000,)
