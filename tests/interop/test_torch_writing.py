"""Tensors of PyTorch written to archives."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from models import model_of

import onnxarchive
from onnxarchive import UnsupportedFeatureError, Writer

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from onnxarchive.interop import torch as archived  # noqa: E402

pytestmark = pytest.mark.tool

CODES = torch.arange(48, dtype=torch.uint8).reshape(3, 16)
NAMES = (
    "uint8 int8 uint16 int16 int32 int64 float16 uint32 uint64 complex64 complex128 bfloat16 "
    "float32 float64 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu "
    "float4_e2m1fn_x2"
)


def _bytes(tensor: Any) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()  # type: ignore[no-any-return]


def written(folder: Path, tensor: Any) -> onnxarchive.Archive:
    """The archive of one tensor, `w`."""
    with Writer(folder / "m.onnxa") as writer:
        writer.add("w", tensor)
        writer.finish(model_of())
    assert onnxarchive.check(folder / "m.onnxa", full=True) == []
    return onnxarchive.open(folder / "m.onnxa")


@pytest.mark.parametrize("name", NAMES.split())
def test_a_tensor_of_every_type_comes_back_as_it_was(tmp_path: Path, name: str) -> None:
    tensor = CODES.view(getattr(torch, name))
    with written(tmp_path, tensor) as archive:
        found = archived.tensor(archive, "w")
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert _bytes(found) == _bytes(tensor)


@pytest.mark.parametrize("name", ["int4", "uint4", "int2", "uint2"])
def test_types_of_a_few_bits_are_packed(tmp_path: Path, name: str) -> None:
    codes = torch.tensor([1, 0, 3, 2, 1], dtype=torch.uint8)
    with written(tmp_path, codes.view(getattr(torch, name))) as archive:
        dtype = getattr(ml_dtypes, name)
        assert archive.tensors["w"].dtype == dtype
        assert archive.tensors["w"].tolist() == codes.numpy().view(dtype).tolist()


MATRIX = torch.arange(12, dtype=torch.float32).reshape(3, 4)
COMPLEX = torch.complex(MATRIX, -MATRIX)
ODD = {
    "a parameter": torch.nn.Parameter(MATRIX.to(torch.bfloat16)),
    "transposed": MATRIX.T,
    "every other": MATRIX[::2, 1::2],
    "expanded": MATRIX[0].expand(5, 4),
    "conjugate": COMPLEX.conj(),
    "imaginary part of a conjugate": COMPLEX.conj().imag,
    "of a conjugate scalar": COMPLEX[1, 1].conj().imag,
    "booleans": MATRIX > 5,
    "a scalar": torch.tensor(2.5),
    "nothing": torch.empty(0, 3, dtype=torch.float16),
    "a result": torch.nn.Parameter(MATRIX) * 2,
    "channels last": torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("odd", ODD)
def test_a_tensor_of_any_layout_has_its_elements_in_order(tmp_path: Path, odd: str) -> None:
    with written(tmp_path, ODD[odd]) as archive:
        found = archived.tensor(archive, "w")
        assert (found.dtype, found.shape) == (ODD[odd].dtype, ODD[odd].shape)
        assert torch.equal(found, ODD[odd].detach())


def test_a_tensor_on_another_device_is_copied_from_there(tmp_path: Path) -> None:
    devices = [it for it in ("cuda", "mps", "xpu") if getattr(torch, it).is_available()]
    if not devices:
        pytest.skip("there is no other device")
    with written(tmp_path, MATRIX.to(devices[0])) as archive:
        assert np.array_equal(archive.tensors["w"], MATRIX.numpy())


def _fake() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.zeros(3)


def _sparse() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.eye(3).to_sparse()


REFUSED = {
    "on meta": (lambda: torch.zeros(3, device="meta"), "layout torch.strided on device meta"),
    "fake": (_fake, "FakeTensor of"),
    "sparse": (_sparse, "layout torch.sparse_coo"),
    "without data": (torch.nn.UninitializedParameter, "UninitializedParameter"),
    "of half complex numbers": (lambda: torch.zeros(3, dtype=torch.complex32), "complex32"),
    "quantized": (lambda: torch.quantize_per_tensor(MATRIX, 1, 0, torch.quint8), "torch.quint8"),
    "of 3 bits": (lambda: CODES.view(torch.uint3), "torch.uint3"),
    "two in a scalar": (lambda: CODES[0, 0].view(torch.float4_e2m1fn_x2), "float4_e2m1fn_x2"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_tensor_without_bytes_or_type_is_refused_and_writing_goes_on(
    path: Path, kind: str
) -> None:
    make, message = REFUSED[kind]
    with warnings.catch_warnings(), Writer(path) as writer:
        warnings.simplefilter("ignore")
        with pytest.raises(UnsupportedFeatureError, match=rf"tensor 'w': .*{message}"):
            writer.add("w", make())
        writer.add("w", MATRIX)
        writer.finish(model_of())


def test_a_state_dict_of_safetensors_and_of_pytorch_give_the_same_archive(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    state = {
        "bfloat16": MATRIX.to(torch.bfloat16),
        "float8": MATRIX.to(torch.float8_e4m3fn),
        "scale": torch.ones(4).to(torch.float8_e8m0fnu),
        "float4": CODES.view(torch.float4_e2m1fn_x2),
        "matrix": MATRIX,
    }
    library.save_file(state, tmp_path / "m.safetensors")
    with Writer(tmp_path / "one.onnxa") as writer:
        writer.add_from(tmp_path / "m.safetensors", list(state))
        writer.finish(model_of())
    with Writer(tmp_path / "other.onnxa") as writer:
        for name, tensor in state.items():
            writer.add(name, tensor)
        writer.finish(model_of())
    assert (tmp_path / "one.onnxa").read_bytes() == (tmp_path / "other.onnxa").read_bytes()
