"""Tensors of archives in PyTorch: their types, their memory, and the cost of reading a part."""

from __future__ import annotations

import gc
import signal
import sys
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
from onnx import TensorProto
from pages import needs_smaps, require_slice_to_read_its_pages_alone
from processes import completed

import onnxarchive
from onnxarchive import ArchiveFormatError, TensorNotFoundError, UnsupportedFeatureError

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from onnxarchive.interop import torch as archived  # noqa: E402

pytestmark = pytest.mark.tool

# The types that hold the very bytes of `raw_data`.
SAME = {
    "FLOAT": torch.float32,
    "UINT8": torch.uint8,
    "INT8": torch.int8,
    "UINT16": torch.uint16,
    "INT16": torch.int16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "BOOL": torch.bool,
    "FLOAT16": torch.float16,
    "DOUBLE": torch.float64,
    "UINT32": torch.uint32,
    "UINT64": torch.uint64,
    "COMPLEX64": torch.complex64,
    "COMPLEX128": torch.complex128,
    "BFLOAT16": torch.bfloat16,
    "FLOAT8E4M3FN": torch.float8_e4m3fn,
    "FLOAT8E4M3FNUZ": torch.float8_e4m3fnuz,
    "FLOAT8E5M2": torch.float8_e5m2,
    "FLOAT8E5M2FNUZ": torch.float8_e5m2fnuz,
    "FLOAT8E8M0": torch.float8_e8m0fnu,
}
UNPACKED = {
    "INT4": torch.int8,
    "UINT4": torch.uint8,
    "INT2": torch.int8,
    "UINT2": torch.uint8,
}
NONE = ["FLOAT6E2M3", "FLOAT6E3M2"]
DIMS = (6, 50)


def test_every_type_is_accounted_for() -> None:
    assert set(NUMBERS) <= {*SAME, *UNPACKED, *NONE, "FLOAT4E2M1"}


# Older versions of onnx lack the types of 2 and 6 bits.
for kinds in (SAME, UNPACKED):
    for unknown in set(kinds) - set(NUMBERS):
        del kinds[unknown]
NONE = [name for name in NONE if name in NUMBERS]


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
@pytest.mark.parametrize("name", SAME)
def test_a_type_that_pytorch_has_arrives_as_it_is(
    archive: onnxarchive.Archive, name: str, copy: bool
) -> None:
    tensor = archived.tensor(archive, name, copy=copy)
    assert tensor.dtype == SAME[name]
    assert tuple(tensor.shape) == DIMS
    assert _raw(tensor) == random_raw(NUMBERS[name], DIMS, NUMBERS[name])
    lies_in_file = tensor.data_ptr() == np.frombuffer(archive.read(name), np.uint8).ctypes.data
    assert lies_in_file is not copy
    if copy:
        tensor.view(torch.uint8).zero_()
        assert not any(_raw(tensor))


@pytest.mark.parametrize("name", ["BFLOAT16", "FLOAT16", *(it for it in SAME if "FLOAT8" in it)])
def test_numbers_agree_with_numpys(archive: onnxarchive.Archive, name: str) -> None:
    found = archived.tensor(archive, name).to(torch.float32).numpy()
    expected = archive.tensors[name].astype(np.float32)
    assert np.array_equal(found, expected, equal_nan=True)


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


@pytest.mark.parametrize("copy", [False, True])
def test_float4_arrives_in_pairs(archive: onnxarchive.Archive, copy: bool) -> None:
    tensor = archived.tensor(archive, "FLOAT4E2M1", copy=copy)
    assert tensor.dtype == torch.float4_e2m1fn_x2
    assert tuple(tensor.shape) == (6, 25)
    number = NUMBERS["FLOAT4E2M1"]
    assert _raw(tensor) == random_raw(number, DIMS, number)
    lies_in_file = tensor.data_ptr() == np.frombuffer(archive.read("FLOAT4E2M1"), "u1").ctypes.data
    assert lies_in_file is not copy
    # The first of a pair is in the low bits: so PyTorch's header says, and so ONNX packs.
    codes = tensor.view(torch.uint8).numpy()
    pairs = np.stack([codes & 15, codes >> 4], axis=-1).reshape(DIMS)
    assert np.array_equal(pairs, archive.tensors["FLOAT4E2M1"].view(np.uint8))


def test_float4_that_the_model_holds_is_packed(tmp_path: Path) -> None:
    number = TensorProto.FLOAT4E2M1
    tensors = [raw_tensor("raw", number, (2, 6)), typed(raw_tensor("typed", number, (2, 6)))]
    onnxarchive.save(model_of(*tensors), tmp_path / "m.onnxa")
    with onnxarchive.open(tmp_path / "m.onnxa") as archive:
        for name in ("raw", "typed"):
            tensor = archived.tensor(archive, name)
            assert tuple(tensor.shape) == (2, 3)
            assert _raw(tensor) == random_raw(number, (2, 6))


@pytest.mark.parametrize("dims", [(2, 3), ()])
def test_float4_of_an_odd_last_dimension_is_refused(tmp_path: Path, dims: tuple[int, ...]) -> None:
    number = TensorProto.FLOAT4E2M1
    for threshold in (0, 1024):
        path = tmp_path / "m.onnxa"
        onnxarchive.save(model_of(raw_tensor("w", number, dims)), path, size_threshold=threshold)
        with (
            onnxarchive.open(path) as archive,
            pytest.raises(UnsupportedFeatureError, match=r"m\.onnxa: tensor 'w': .*even.*float32"),
        ):
            archived.tensor(archive, "w")


@pytest.mark.parametrize("name", [*NONE, "labels"])
def test_what_pytorch_has_no_type_for_is_refused(archive: onnxarchive.Archive, name: str) -> None:
    kind = "STRING" if name == "labels" else name
    with pytest.raises(UnsupportedFeatureError, match=rf"m\.onnxa: tensor '{name}': .*{kind}; use"):
        archived.tensor(archive, name)


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("name", [*SAME, *UNPACKED])
def test_scalars_and_tensors_without_elements(
    archive: onnxarchive.Archive, name: str, copy: bool
) -> None:
    scalar = archived.tensor(archive, f"{name} scalar", copy=copy)
    nothing = archived.tensor(archive, f"{name} nothing", copy=copy)
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


def test_all_tensors_by_name(archive: onnxarchive.Archive) -> None:
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
    model.graph.node.add(op_type="Constant", output=["y"]).attribute.add(
        name="value", type=4, t=value
    )
    onnxarchive.save(model, tmp_path / "m.onnxa", convert_attribute=True)
    with onnxarchive.open(tmp_path / "m.onnxa") as archive:
        tensor = archived.from_numpy(archive.tensor_by_key("v"))
    assert tensor.dtype == torch.bfloat16
    assert _raw(tensor) == value.raw_data


# Warnings, lifetimes, and what is read


def test_nothing_is_warned_of_and_no_filter_is_touched(path: Path) -> None:
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


def test_dlpack_gives_the_same_memory(archive: onnxarchive.Archive) -> None:
    array = archive.tensors["FLOAT"]
    try:
        tensor = torch.from_dlpack(array)
    except BufferError:  # of a PyTorch or numpy that cannot say read-only
        pytest.skip("this PyTorch or numpy exchanges no read-only arrays by DLPack")
    assert tensor.data_ptr() == array.ctypes.data
    assert torch.equal(
        tensor.view(torch.uint8), archived.tensor(archive, "FLOAT").view(torch.uint8)
    )


@needs_smaps
def test_a_slice_of_a_large_tensor_reads_its_pages_alone(tmp_path: Path) -> None:
    program = """
from onnxarchive.interop import torch as archived
tensor = archived.tensor(archive, "w")
"""
    require_slice_to_read_its_pages_alone(tmp_path, ml_dtypes.bfloat16, program)
