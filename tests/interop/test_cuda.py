"""Archives on a CUDA device: sessions with its provider, and tensors that PyTorch copies to it.

What needs ONNX Runtime and what needs PyTorch is skipped each for itself, where the device or the
build for it is missing. Device and provider are parameters of everything else here.
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from models import (
    MEASURE_MEMORY,
    NUMBERS,
    external_tensors,
    keys_of,
    model_of,
    random_raw,
    raw_tensor,
    run_python,
    text_model,
)
from onnx import TensorProto, numpy_helper
from pages import needs_smaps

import onnxarchive
from onnxarchive.interop import torch as archived

pytestmark = pytest.mark.tool

CUDA = "CUDAExecutionProvider"

SESSIONS = 4
MIB = 1 << 20
PARTS = 4
PART = 64 * MIB

# Types that PyTorch lacks.
REFUSED = {"FLOAT6E2M3", "FLOAT6E3M2"}
UNPACKED = {"INT4", "UINT4", "INT2", "UINT2"}
IN_PAIRS = "FLOAT4E2M1"
NAMES = sorted(set(NUMBERS) - REFUSED)
DIMS = (6, 50)


# Providers and devices


@pytest.fixture(scope="module")
def provider() -> str:
    """The provider of CUDA, if ONNX Runtime has it and it has a device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ort = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
        if CUDA not in ort.get_available_providers():
            pytest.skip(f"this ONNX Runtime has no {CUDA}: it is in onnxruntime-gpu")
        if hasattr(ort, "preload_dlls"):  # from 1.21: finds those that packages of Python brought
            ort.preload_dlls()
        options = ort.SessionOptions()
        options.log_severity_level = 4
        serialized = integer_model().SerializeToString()
        try:
            found = ort.InferenceSession(serialized, options, [CUDA]).get_providers()
        except Exception as error:  # ONNX Runtime's own have no base but this
            pytest.skip(f"ONNX Runtime makes no session with {CUDA}: {error}")
    if found[0] != CUDA:
        pytest.skip(f"ONNX Runtime has {CUDA} and falls back to {found}: device or library missing")
    return CUDA


@pytest.fixture(scope="module")
def device() -> str:
    """The device of PyTorch, if it has one of CUDA."""
    driver = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        ctypes.CDLL(driver)  # which costs less than to import PyTorch
    except OSError:
        pytest.skip(f"there is no driver of a CUDA device ({driver})")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch = pytest.importorskip("torch", reason="PyTorch is not installed")
        if not torch.cuda.is_available():
            pytest.skip(f"PyTorch {torch.__version__} has no CUDA device")
        torch.zeros(1, device="cuda")  # may warn of the device, once
    return "cuda"


# Sessions


def _integers(name: str, seed: int, *shape: int) -> TensorProto:
    values = np.random.default_rng(seed).integers(-2, 3, shape)
    return numpy_helper.from_array(values.astype(np.float32), name)


def integer_model() -> onnx.ModelProto:
    """A model whose numbers are exact in whatever order and type a device sums them.

    Weights are from -2 to 2 and inputs from -1 to 1, so that what goes into a product stays below
    2048, which TensorFloat-32 holds, and sums stay below 2**24. The half that comes last keeps the
    outputs from being 0, which has two signs.
    """
    return text_model(
        """integers (float[4, 256] x) => (float[4, 32] y) {
  product = MatMul(x, first)
  sum = Add(product, bias)
  positive = Relu(sum)
  scaled = Mul(positive, scale)
  second_product = Gemm(scaled, second)
  y = Add(second_product, half)
}""",
        _integers("first", 1, 256, 64),
        _integers("bias", 2, 64),
        _integers("scale", 3, 4, 64),
        _integers("second", 4, 64, 32),
        numpy_helper.from_array(np.full(32, 0.5, np.float32), "half"),
        opset=17,
    )


X = np.random.default_rng(5).integers(-1, 2, (4, 256)).astype(np.float32)


def expected() -> bytes:
    """What the model gives, by numpy."""
    weight, bias, scale, second, half = (
        numpy_helper.to_array(it).astype(np.float64) for it in integer_model().graph.initializer
    )
    y = np.maximum(X @ weight + bias, 0) * scale @ second + half
    return y.astype(np.float32).tobytes()


def session(source: Any, provider: str) -> Any:
    """A session all of whose nodes run with `provider`, so that none runs on the CPU unnoticed."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    made = onnxarchive.session(source, options, [provider], enable_fallback=0)
    assert made.get_providers()[0] == provider
    return made


def run(session: Any) -> bytes:
    (y,) = session.run(None, {"x": X})
    return bytes(y.tobytes())


@pytest.fixture
def path(path: Path) -> Path:
    onnxarchive.save(integer_model(), path)
    with onnxarchive.open(path) as archive:
        outside = {tensor.name for tensor in external_tensors(archive.model).values()}
    assert outside == {"first", "second", "scale"}
    return path


@pytest.mark.parametrize("open", [Path, onnxarchive.open, Path.read_bytes])
def test_every_node_runs_on_the_device_for_every_source_of_a_session(
    provider: str, path: Path, open: Callable[[Path], Any]
) -> None:
    source = open(path)
    made = session(source, provider)
    if isinstance(source, onnxarchive.Archive):
        source.close()
    assert run(made) == expected()


def test_several_sessions_of_an_archive_are_on_the_device_at_once(
    provider: str, path: Path
) -> None:
    with onnxarchive.open(path) as archive:
        sessions = [session(source, provider) for source in (path, archive) * (SESSIONS // 2)]
    start = threading.Barrier(SESSIONS)

    def run_often(made: Any) -> list[bytes]:
        start.wait()
        return [run(made) for _ in range(10)]

    with ThreadPoolExecutor(SESSIONS) as executor:
        assert [*executor.map(run_often, sessions)] == [[expected()] * 10] * SESSIONS
    while sessions:  # those that are left do not need those that are gone
        del sessions[0]
        assert [run(made) for made in sessions] == [expected()] * len(sessions)


# Tensors


def _bytes(tensor: Any) -> bytes:
    import torch

    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    return bytes(data.numpy().tobytes())


def there_and_back(archive: onnxarchive.Archive, name: str, device: str) -> bytes:
    """The bytes that a tensor has after a copy of it was on the device."""
    copied = archived.tensor(archive, name).to(device, copy=True)
    assert copied.device.type == device
    return _bytes(copied.cpu())


def _pairs(codes: bytes) -> bytes:
    """Codes of 4 bits two to a byte, the first in the low bits."""
    return bytes(low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_of_any_type_comes_back_from_the_device_as_it_was(
    device: str, tmp_path: Path, name: str
) -> None:
    number = NUMBERS[name]
    shapes = {"whole": DIMS, "scalar": (), "nothing": (0, 4)}
    if name == IN_PAIRS:
        del shapes["scalar"]
    tensors = [raw_tensor(key, number, dims, number) for key, dims in shapes.items()]
    onnxarchive.save(model_of(*tensors), tmp_path / "m.onnxa", size_threshold=0)
    with onnxarchive.open(tmp_path / "m.onnxa") as archive:
        assert len(keys_of(archive)) == len(shapes)
        for key in shapes:
            array = archive.tensors[key]
            if name in UNPACKED:
                array = array.astype(np.int8)
            data = _pairs(array.tobytes()) if name == IN_PAIRS else array.tobytes()
            assert there_and_back(archive, key, device) == data
        if name not in UNPACKED:
            assert there_and_back(archive, "whole", device) == random_raw(number, DIMS, number)


COPY = f"""{MEASURE_MEMORY}
import json, warnings, onnxarchive
from onnxarchive.interop import torch as archived
device = sys.argv[2]
copied = []
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    # The device, and what the driver keeps for copies of this size.
    torch.ones({PART // 4}).to(device, copy=True).sum().item()
def copy():
    with onnxarchive.open(sys.argv[1]) as archive:
        for tensor in archived.tensors(archive).values():
            copied.append(tensor.to(device, copy=True))
            copied[-1][-1].item()
print(json.dumps([growth(copy), [[it.numel(), it.min().item(), it.max().item()] for it in copied]]))
"""


@needs_smaps
def test_a_copy_to_the_device_makes_none_in_the_memory_of_the_host(
    device: str, tmp_path: Path
) -> None:
    with onnxarchive.Writer(tmp_path / "m.onnxa") as writer:
        for index in range(PARTS):
            writer.add(f"part{index}", np.full(PART // 4, index, np.float32))
        writer.finish(model_of())
    growth, copied = json.loads(run_python(COPY, tmp_path / "m.onnxa", device))
    (tmp_path / "m.onnxa").unlink()
    assert copied == [[PART // 4, index, index] for index in range(PARTS)]
    assert growth < PART // 2  # not even one tensor at a time
