"""The header of safetensors files, and their tensors in archives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from models import MEASURE_MEMORY, model_of, run_python

import onnxarchive
from onnxarchive import ArchiveFormatError, TensorNotFoundError, UnsupportedFeatureError, Writer

MIB = 1 << 20
ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    "F64": np.arange(6, dtype=np.float64).reshape(2, 3),
    "F32": np.arange(6, dtype=np.float32).reshape(2, 3),
    "F16": np.arange(7, dtype=np.float16),
    "BF16": np.arange(7).astype(ml_dtypes.bfloat16),
    "C64": np.array([1 + 2j, 3j], np.complex64),
    "F8_E4M3": np.arange(5).astype(ml_dtypes.float8_e4m3fn),
    "F8_E4M3FNUZ": np.arange(5).astype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2": np.arange(5).astype(ml_dtypes.float8_e5m2),
    "F8_E5M2FNUZ": np.arange(5).astype(ml_dtypes.float8_e5m2fnuz),
    "F8_E8M0": np.ones(5).astype(ml_dtypes.float8_e8m0fnu),
    "BOOL": np.array([True, False, True]),
    **{f"I{bits}": np.array(-3, f"i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"U{bits}": np.full((0, 2), 3, f"u{bits // 8}") for bits in (8, 16, 32, 64)},
}


def file_of(header: Any, data: bytes) -> bytes:
    """A safetensors file of a header, as JSON or an object that becomes JSON, and data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(begin: int, end: int, dtype: str = "F32", shape: Any = (1,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def archive_of(path: Path, names: Any = None) -> Path:
    """The archive of a safetensors file."""
    with Writer(path.with_suffix(".onnxa")) as writer:
        writer.add_from(path, names)
        writer.finish(model_of())
    assert onnxarchive.check(path.with_suffix(".onnxa"), full=True) == []
    return path.with_suffix(".onnxa")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with a tensor of each type, in another order than that of the header."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in ARRAYS.items():
        header[name] = entry(len(data), len(data) + array.nbytes, name, array.shape)
        data += array.tobytes()
    path = tmp_path / "m.safetensors"
    path.write_bytes(file_of(dict(reversed(header.items())), data))
    return path


def test_tensors_of_every_type_are_those_of_the_file(path: Path) -> None:
    with onnxarchive.open(archive_of(path)) as archive:
        assert sorted(archive.tensors) == sorted(ARRAYS)
        for name, expected in ARRAYS.items():
            found = archive.tensors[name]
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            assert found.tobytes() == expected.tobytes()


def test_numbers_of_4_bits_are_packed_as_onnx_packs_them(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(file_of({"w": entry(0, 2, "F4", (2, 2))}, b"\x21\x43"))
    with onnxarchive.open(archive_of(path)) as archive:
        assert archive.tensors["w"].dtype == ml_dtypes.float4_e2m1fn
        assert archive.tensors["w"].tolist() == [[0.5, 1], [1.5, 2]]


def test_files_of_the_safetensors_library_are_read(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    arrays = {it: ARRAYS[it] for it in ("F64", "F32", "F16", "BOOL", "I8", "U64")}
    library.save_file(arrays, tmp_path / "m.safetensors", metadata={"a": "b"})
    with onnxarchive.open(archive_of(tmp_path / "m.safetensors")) as archive:
        assert {it: archive.tensors[it].tobytes() for it in archive.tensors} == {
            it: array.tobytes() for it, array in arrays.items()
        }


def test_chosen_tensors_are_added_in_their_order_and_under_other_names(path: Path) -> None:
    with onnxarchive.open(archive_of(path, ["I8", "F32"])) as archive:
        assert list(archive.tensors) == ["I8", "F32"]
    with onnxarchive.open(archive_of(path, {"BF16": "layer.0/weight"})) as archive:
        assert list(archive.tensors) == ["layer.0/weight"]
        assert np.array_equal(archive.tensors["layer.0/weight"], ARRAYS["BF16"])
    with Writer(path.with_name("n.onnxa")) as writer:
        assert writer.add_from(path, {"F64": "a.b", "I8": "a/b"}) == {"a.b": "a_b", "a/b": "a_b_2"}


@pytest.mark.parametrize(
    ("names", "kind", "message"),
    [
        (["F64", "none"], TensorNotFoundError, "'none'"),
        ("F64", TypeError, r"found a string; write \['F64'\]"),
        (["F64", "F64"], ValueError, "'F64' is added twice"),
        ({"F64": "a", "F32": "a"}, ValueError, "'a' is added twice"),
        ({"F64": ""}, ValueError, "the name of an initializer must not be empty"),
        (["F64", "taken"], ValueError, "'taken' is added twice"),
        (["F64", "odd"], UnsupportedFeatureError, "'odd'.*'F6_E2M3'"),
    ],
)
def test_a_tensor_that_cannot_be_added_is_refused_before_any_is_written(
    tmp_path: Path, names: Any, kind: type[Exception], message: str
) -> None:
    path = tmp_path / "m.safetensors"
    header = {"F64": entry(0, 8, "F64"), "F32": entry(8, 12), "odd": entry(12, 15, "F6_E2M3", (4,))}
    path.write_bytes(file_of(header, bytes(15)))
    with Writer(tmp_path / "m.onnxa") as writer:
        writer.add("taken", [1.0])
        with pytest.raises(kind, match=message) as caught:
            writer.add_from(path, names)
        if isinstance(caught.value, onnxarchive.ArchiveError):
            assert caught.value.path == str(path)
        writer.add("F64", [1.0])
        writer.finish(model_of())
    with onnxarchive.open(tmp_path / "m.onnxa") as archive:
        assert list(archive.tensors) == ["taken", "F64"]


A = entry(0, 4)
FAULTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "expected a safetensors file.*found an empty file; its download"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\n", "found a Git LFS pointer"),
    "cut": (b"\0" * 7, "file of 7 bytes"),
    "another file": (b"PK\3\4" + bytes(100), "expected a safetensors file"),
    "a header longer than the file": (file_of({"a": A}, b"")[:-1], "expected a safetensors file"),
    "a header longer than any": ((10**9).to_bytes(8, "little") + b"{}", "safetensors file"),
    "no JSON": (file_of(b"{]", b""), "header in JSON"),
    "JSON after spaces": (file_of(b" {}", b""), "JSON object"),
    "a list": (file_of(b"[]", b""), "JSON object"),
    "no UTF-8": (file_of(b'{"\xff": 1}', b""), "header in JSON"),
    "half a character": (file_of(b'{"\\ud800": 1}', b""), "header in JSON"),
    "deep": (file_of(b'{"a":' * 100_000, b""), "header in JSON"),
    "a long number": (file_of(b'{"a":' + b"1" * 5000 + b"}", b""), "header in JSON"),
    "a name twice": (file_of(b'{"a": 1, "a": 1}', b""), "a name twice"),
    "metadata": (file_of({"__metadata__": {"a": 1}}, b""), "__metadata__: expected an object"),
    "no fields": (file_of({"a": {}}, b""), "tensor 'a': expected .'data_offsets', 'dtype'"),
    "no tensor": (file_of({"a": 1}, b""), "tensor 'a': expected"),
    "one field more": (file_of({"a": {**A, "b": 1}}, bytes(4)), "tensor 'a': expected"),
    "a type that is no text": (file_of({"a": {**A, "dtype": 1}}, bytes(4)), "tensor 'a'"),
    "a negative size": (file_of({"a": entry(0, 4, shape=(-1,))}, bytes(4)), "a valid shape"),
    "a size that is no number": (file_of({"a": {**A, "shape": [True]}}, bytes(4)), "a valid shape"),
    "a huge shape": (file_of({"a": entry(0, 4, shape=(1 << 62, 4))}, bytes(4)), "a valid shape"),
    "65 dimensions": (file_of({"a": entry(0, 4, shape=[1] * 65)}, bytes(4)), "a valid shape"),
    "three offsets": (file_of({"a": {**A, "data_offsets": [0, 4, 4]}}, bytes(4)), "two offsets"),
    "offsets backwards": (file_of({"a": entry(4, 0)}, bytes(4)), "two offsets"),
    "a broken offset": (file_of({"a": entry(0, 4.0)}, bytes(4)), "two offsets"),  # type: ignore[arg-type]
    "another size": (file_of({"a": entry(0, 8)}, bytes(8)), "expected 4 bytes for F32.*found 8"),
    "a gap": (
        file_of({"a": A, "b": entry(5, 9)}, bytes(9)),
        "'b': .*from 4, without gap or overlap, found 5",
    ),
    "a gap before all": (
        file_of({"a": entry(4, 8)}, bytes(8)),
        "'a': .*from 0, without gap or overlap, found 4",
    ),
    "an overlap": (
        file_of({"a": A, "b": entry(2, 6)}, bytes(6)),
        "'b': .*from 4, without gap or overlap, found 2",
    ),
    "cut data": (file_of({"a": A}, bytes(3)), "ends at least 1 byte too early; its download"),
    "more data": (file_of({"a": A}, bytes(5)), "expected a file of .* bytes, as its header"),
    "no boolean": (file_of({"a": entry(0, 1, "BOOL")}, b"\2"), "tensor 'a'.*0 and 1, found 2"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_file_is_refused_by_name(tmp_path: Path, fault: str) -> None:
    path = tmp_path / "m.safetensors"
    content, message = FAULTS[fault]
    path.write_bytes(content)
    with Writer(tmp_path / "m.onnxa") as writer:
        with pytest.raises(ArchiveFormatError, match=rf"m\.safetensors: .*{message}"):
            writer.add_from(path)
        writer.add("a", [1.0])
        writer.finish(model_of())


def test_a_file_that_is_missing_is_an_error_of_the_system(tmp_path: Path) -> None:
    with Writer(tmp_path / "m.onnxa") as writer, pytest.raises(FileNotFoundError):
        writer.add_from(tmp_path / "none.safetensors")


def test_tensors_are_mapped_and_not_loaded(tmp_path: Path) -> None:
    path, nbytes = tmp_path / "m.safetensors", 48 * MIB
    header = {f"w{it}": entry(it * nbytes, (it + 1) * nbytes, "U8", (nbytes,)) for it in range(2)}
    with open(path, "wb") as file:
        file.write(file_of(header, b""))
        file.truncate(file.tell() + 2 * nbytes)
    code = f"""
{MEASURE_MEMORY}
import onnxarchive
from models import model_of
def write():
    with onnxarchive.Writer(sys.argv[1] + ".onnxa") as writer:
        writer.add_from(sys.argv[1])
        sample()
        writer.finish(model_of())
print(growth(write))
"""
    assert int(run_python(code, path)) < 8 * MIB
    assert path.with_name("m.safetensors.onnxa").stat().st_size > 2 * nbytes
