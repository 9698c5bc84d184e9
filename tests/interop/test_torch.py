"""Tensors of archives in PyTorch, and PyTorch's in archives: types, memory, the cost of a part."""

from __future__ import annotations

import gc
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from models import (
    NUMBERS,
    break_local_header,
    model_of,
    open_below,
    random_raw,
    raw_tensor,
    run_python,
    runnable_model,
    string_tensor,
    typed,
)
from onnx import TensorProto, helper
from pages import needs_smaps, require_slice_to_read_its_pages_alone
from processes import completed

import onnxarchive
from onnxarchive import ArchiveFormatError, TensorNotFoundError, UnsupportedFeatureError, Writer

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from onnxarchive.interop import torch as archived  # noqa: E402

pytestmark = pytest.mark.tool

NONE = ["FLOAT6E2M3", "FLOAT6E3M2"]
IN_PAIRS = "FLOAT4E2M1"
UNPACKED = {
    name: torch.int8 if name.startswith("INT") else torch.uint8
    for name in ("INT4", "UINT4", "INT2", "UINT2")
}
# The types that hold the very bytes of `raw_data` have numpy's names.
SAME = {
    name: getattr(torch, helper.tensor_dtype_to_np_dtype(number).name)
    for name, number in NUMBERS.items()
    if name not in {*NONE, *UNPACKED, IN_PAIRS}
}
DIMS = (6, 50)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("torch") / "m.onnxa"
    tensors = [raw_tensor(name, number, DIMS, number) for name, number in NUMBERS.items()]
    tensors += [raw_tensor(f"{name} scalar", number, ()) for name, number in NUMBERS.items()]
    tensors += [raw_tensor(f"{name} nothing", number, (0, 4)) for name, number in NUMBERS.items()]
    tensors += [string_tensor("labels")]
    onnxarchive.save(model_of(*tensors), path, size_threshold=0)
    return path


@pytest.fixture
def archive(path: Path) -> Iterator[onnxarchive.Archive]:
    with onnxarchive.open(path) as archive:
        yield archive


def _raw(tensor: Any) -> bytes:
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    return data.numpy().tobytes()  # type: ignore[no-any-return]


# Types and memory


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("name", [*SAME, IN_PAIRS])
def test_a_type_that_pytorch_has_arrives_as_it_is(
    archive: onnxarchive.Archive, name: str, copy: bool
) -> None:
    tensor = archived.tensor(archive, name, copy=copy)
    assert tensor.dtype == SAME.get(name, torch.float4_e2m1fn_x2)
    assert tuple(tensor.shape) == (DIMS if name in SAME else (6, 25))
    assert _raw(tensor) == random_raw(NUMBERS[name], DIMS, NUMBERS[name])
    lies_in_file = tensor.data_ptr() == np.frombuffer(archive.read(name), np.uint8).ctypes.data
    assert lies_in_file is not copy
    if copy:
        tensor.view(torch.uint8).zero_()
        assert not any(_raw(tensor))


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("name", UNPACKED)
def test_integers_of_less_than_8_bits_are_unpacked(
    archive: onnxarchive.Archive, name: str, copy: bool
) -> None:
    tensor = archived.tensor(archive, name, copy=copy)
    assert tensor.dtype == UNPACKED[name]
    assert tuple(tensor.shape) == DIMS
    assert np.array_equal(tensor.numpy(), archive.tensors[name].astype(np.int8))
    if name.startswith("INT"):
        assert tensor.min() < 0 < tensor.max()
    tensor.zero_()  # its own memory


def test_the_first_float4_of_a_pair_is_in_the_low_bits(archive: onnxarchive.Archive) -> None:
    """So PyTorch's header says, and so ONNX packs."""
    codes = archived.tensor(archive, IN_PAIRS).view(torch.uint8).numpy()
    pairs = np.stack([codes & 15, codes >> 4], axis=-1).reshape(DIMS)
    assert np.array_equal(pairs, archive.tensors[IN_PAIRS].view(np.uint8))


def test_float4_that_the_model_holds_is_packed(tmp_path: Path) -> None:
    number = NUMBERS[IN_PAIRS]
    tensors = [raw_tensor("raw", number, (2, 6)), typed(raw_tensor("typed", number, (2, 6)))]
    onnxarchive.save(model_of(*tensors), tmp_path / "m.onnxa")
    with onnxarchive.open(tmp_path / "m.onnxa") as archive:
        for name in ("raw", "typed"):
            tensor = archived.tensor(archive, name)
            assert tuple(tensor.shape) == (2, 3)
            assert _raw(tensor) == random_raw(number, (2, 6))


@pytest.mark.parametrize("threshold", [0, 1024])
@pytest.mark.parametrize("dims", [(2, 3), ()])
def test_float4_of_an_odd_last_dimension_is_refused(
    tmp_path: Path, dims: tuple[int, ...], threshold: int
) -> None:
    model = model_of(raw_tensor("w", NUMBERS[IN_PAIRS], dims))
    onnxarchive.save(model, tmp_path / "m.onnxa", size_threshold=threshold)
    message = r"m\.onnxa: tensor 'w': .*even.*float32"
    with (
        onnxarchive.open(tmp_path / "m.onnxa") as archive,
        pytest.raises(UnsupportedFeatureError, match=message),
    ):
        archived.tensor(archive, "w")


@pytest.mark.parametrize("name", [*NONE, "labels"])
def test_a_type_that_pytorch_lacks_is_refused(archive: onnxarchive.Archive, name: str) -> None:
    kind = "STRING" if name == "labels" else name
    with pytest.raises(UnsupportedFeatureError, match=rf"m\.onnxa: tensor '{name}': .*{kind}; use"):
        archived.tensor(archive, name)


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("name", [*SAME, *UNPACKED])
def test_scalars_and_tensors_without_elements_keep_type_and_shape(
    archive: onnxarchive.Archive, name: str, copy: bool
) -> None:
    scalar, nothing = (
        archived.tensor(archive, f"{name} {kind}", copy=copy) for kind in ("scalar", "nothing")
    )
    assert scalar.dtype == nothing.dtype == {**SAME, **UNPACKED}[name]
    assert (tuple(scalar.shape), tuple(nothing.shape)) == ((), (0, 4))
    assert scalar.numel() == 1


def test_float4_without_elements_is_half_as_wide(archive: onnxarchive.Archive) -> None:
    tensor = archived.tensor(archive, "FLOAT4E2M1 nothing")
    assert (tensor.dtype, tuple(tensor.shape)) == (torch.float4_e2m1fn_x2, (0, 2))


def test_a_type_that_this_pytorch_lacks_is_named(
    archive: onnxarchive.Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch, "float8_e8m0fnu")
    with pytest.raises(UnsupportedFeatureError, match=r"needs a PyTorch.*float8_e8m0fnu.*found 2"):
        archived.tensor(archive, "FLOAT8E8M0")


# Names


def test_all_tensors_are_a_mapping_by_name(archive: onnxarchive.Archive) -> None:
    tensors = archived.tensors(archive)
    assert list(tensors) == list(archive.tensors)
    assert len(tensors) == len(archive.tensors)
    assert "FLOAT" in tensors
    assert "none" not in tensors
    assert tensors.get("none") is None
    assert _raw(tensors["FLOAT"]) == _raw(archived.tensor(archive, "FLOAT"))
    copy = archived.tensors(archive, copy=True)["FLOAT"]
    copy.zero_()


def test_a_name_that_is_not_there_is_a_key_error(archive: onnxarchive.Archive) -> None:
    with pytest.raises(TensorNotFoundError, match=r"m\.onnxa: .*'none'"):
        archived.tensor(archive, "none")


def test_a_local_header_is_compared_before_a_tensor_is_made(tmp_path: Path) -> None:
    path = tmp_path / "m.onnxa"
    onnxarchive.save(model_of(raw_tensor("w", TensorProto.FLOAT4E2M1, (4000,))), path)
    with onnxarchive.open(path) as archive:
        break_local_header(path, archive.entries["w"])
        with pytest.raises(ArchiveFormatError, match=r"m\.onnxa: .*'w'"):
            archived.tensor(archive, "w")


def test_a_module_takes_its_weights_from_an_archive(tmp_path: Path) -> None:
    module = torch.nn.Linear(64, 32, dtype=torch.bfloat16)
    weights = {
        name: parameter.detach().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        for name, parameter in module.named_parameters()
    }
    with onnxarchive.Writer(tmp_path / "m.onnxa") as writer:
        for name, weight in weights.items():
            writer.add(name, weight)
        writer.finish(model_of())
    other = torch.nn.Linear(64, 32, dtype=torch.bfloat16)
    assigned = torch.nn.Linear(64, 32, dtype=torch.bfloat16)
    with onnxarchive.open(tmp_path / "m.onnxa") as archive:
        other.load_state_dict(archived.tensors(archive))
        assigned.load_state_dict(archived.tensors(archive), assign=True)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    for loaded in (other, assigned):
        assert torch.equal(loaded(x), module(x))


# Arrays


def test_arrays_of_any_kind_are_taken() -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    tensor = archived.from_numpy(array)
    tensor[0, 0] = 7
    assert array[0, 0] == 7
    for other in (array.T, array[::2, 1:], array[::-1], array.astype(">f4"), array[:0]):
        other.flags.writeable = False
        assert np.array_equal(archived.from_numpy(other).numpy(), other)
        assert np.array_equal(archived.from_numpy(other, copy=True).numpy(), other)
    turned = array.astype(ml_dtypes.bfloat16).T
    assert archived.from_numpy(turned).dtype == torch.bfloat16
    assert np.array_equal(archived.from_numpy(turned).float().numpy(), turned.astype(np.float32))


def test_arrays_of_other_types_are_refused() -> None:
    with pytest.raises(UnsupportedFeatureError, match="datetime64"):
        archived.from_numpy(np.zeros(2, "datetime64[s]"))
    with pytest.raises(UnsupportedFeatureError, match=r"array: .*STRING"):
        archived.from_numpy(np.array(["a"], object))


def test_a_tensor_of_an_attribute_is_reached_by_its_key(tmp_path: Path) -> None:
    model = model_of()
    value = raw_tensor("v", TensorProto.BFLOAT16, (700,))
    model.graph.node.append(helper.make_node("Constant", [], ["y"], value=value))
    onnxarchive.save(model, tmp_path / "m.onnxa", convert_attribute=True)
    with onnxarchive.open(tmp_path / "m.onnxa") as archive:
        tensor = archived.from_numpy(archive.tensor_by_key("v"))
    assert tensor.dtype == torch.bfloat16
    assert _raw(tensor) == value.raw_data


# Warnings, lifetimes, and what is read


def test_no_warning_is_given_and_no_warning_filter_is_changed(path: Path) -> None:
    code = """
import sys, warnings, onnxarchive
from onnxarchive.interop import torch as archived
import torch
warnings.resetwarnings()
warnings.simplefilter("error")
before = list(warnings.filters)
with onnxarchive.open(sys.argv[1]) as archive:
    tensor = archived.tensor(archive, "FLOAT")
assert warnings.filters == before
try:
    torch.from_numpy(archive_array := onnxarchive.open(sys.argv[1]).tensors["FLOAT"])
    print("no warning")
except UserWarning as warning:
    print("not writable" in str(warning))
"""
    assert run_python(code, path) == "True\n"  # PyTorch's own warning still comes


@pytest.mark.skipif(sys.platform != "linux", reason="/proc says what is mapped")
def test_a_tensor_keeps_the_map_alive_and_no_longer(tmp_path: Path) -> None:
    onnxarchive.save(runnable_model(), tmp_path / "m.onnxa")
    with onnxarchive.open(tmp_path / "m.onnxa") as archive:
        tensor = archived.tensor(archive, "layer.0/weight")
    del archive
    (tmp_path / "m.onnxa").unlink()
    row = tensor[3]
    del tensor
    gc.collect()
    expected = np.frombuffer(runnable_model().graph.initializer[0].raw_data, np.float32)
    assert np.array_equal(row.numpy(), expected[48:64])
    del row
    gc.collect()
    assert open_below(tmp_path) == []


@pytest.mark.skipif(sys.platform != "linux", reason="the signal of other systems differs")
def test_writing_into_a_tensor_over_the_file_ends_the_process_as_the_documentation_says(
    path: Path,
) -> None:
    before = path.read_bytes()
    code = """
import sys, onnxarchive
from onnxarchive.interop import torch as archived
with onnxarchive.open(sys.argv[1]) as archive:
    archived.tensor(archive, "FLOAT", copy=True).zero_()
    print("copied", flush=True)
    archived.tensor(archive, "FLOAT").zero_()
"""
    done = completed([sys.executable, "-c", code, str(path)])
    assert done.stdout == "copied\n"
    assert done.returncode == -signal.SIGSEGV
    assert path.read_bytes() == before


@needs_smaps
def test_a_slice_of_a_large_tensor_reads_its_pages_alone(tmp_path: Path) -> None:
    program = """
from onnxarchive.interop import torch as archived
tensor = archived.tensor(archive, "w")
"""
    require_slice_to_read_its_pages_alone(tmp_path, ml_dtypes.bfloat16, program)


# PyTorch's tensors written to archives

CODES = torch.arange(48, dtype=torch.uint8).reshape(3, 16)
NAMES = [str(it).removeprefix("torch.") for it in SAME.values() if it != torch.bool]
NAMES.append("float4_e2m1fn_x2")


def written(folder: Path, tensor: Any) -> onnxarchive.Archive:
    """The archive of one tensor, `w`."""
    path = folder / "m.onnxa"
    with Writer(path) as writer:
        writer.add("w", tensor)
        writer.finish(model_of())
    assert onnxarchive.check(path, full=True) == []
    return onnxarchive.open(path)


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_of_every_type_comes_back_as_it_was(tmp_path: Path, name: str) -> None:
    tensor = CODES.view(getattr(torch, name))
    with written(tmp_path, tensor) as archive:
        found = archived.tensor(archive, "w")
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert _raw(found) == _raw(tensor)


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
    tmp_path: Path, kind: str
) -> None:
    make, message = REFUSED[kind]
    with warnings.catch_warnings(), Writer(tmp_path / "m.onnxa") as writer:
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
    one, other = tmp_path / "one.onnxa", tmp_path / "other.onnxa"
    with Writer(one) as writer:
        writer.add_from(tmp_path / "m.safetensors", list(state))
        writer.finish(model_of())
    with Writer(other) as writer:
        for name, tensor in state.items():
            writer.add(name, tensor)
        writer.finish(model_of())
    assert one.read_bytes() == other.read_bytes()
