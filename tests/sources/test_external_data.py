"""External data as other tools write it, and data files that are missing or hold something else."""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from models import (
    BIT_WIDTHS,
    NUMBERS,
    entry_of,
    external,
    model_of,
    raw_tensor,
    runnable_model,
    typed,
)
from onnx import TensorProto, numpy_helper
from web_server import WebServer
from written import contents, write_model, zipped

import onnxarchive
from onnxarchive import ArchiveFormatError, ChecksumError

VECTORS = Path(__file__).parents[2] / "conformance" / "vectors"
DATA = "m.onnx_data"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 64000\n"
PAGE = b"<!doctype html>\n<html><body>Log in</body></html>\n"
# Elements of 4, 2 and 6 bits whose last byte is not full, below and above 1 KiB. Older versions of
# onnx lack types of 2 and 6 bits.
PACKED = [
    (NUMBERS[name], count)
    for name, count in (
        ("INT4", 11),
        ("INT4", 4001),
        ("UINT4", 200_001),
        ("FLOAT4E2M1", 7),
        ("UINT2", 8002),
        ("INT2", 13),
        ("FLOAT6E2M3", 1999),
    )
    if name in NUMBERS
]


@pytest.fixture(params=["file", "directory", "zip", "deflated zip", "url", "zip at a url"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Path], str]:
    """A function that makes a source of the files in a directory, one of them `m.onnx`."""
    kind: str = request.param

    def make(folder: Path) -> str:
        if kind in ("file", "directory"):
            return str(folder / "m.onnx" if kind == "file" else folder)
        files = contents(folder)
        if kind != "url":
            method = zipfile.ZIP_DEFLATED if kind == "deflated zip" else zipfile.ZIP_STORED
            zipped(tmp_path / "m.zip", files, method)
            if kind != "zip at a url":
                return str(tmp_path / "m.zip")
            files = {"m.onnx": (tmp_path / "m.zip").read_bytes()}
        web: WebServer = request.getfixturevalue("web")
        web.files |= {f"/a/{name}": data for name, data in files.items()}
        return web.url("/a/m.onnx")

    return make


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The directory of a model."""
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


def tensors(count: int, nbytes: int = 64) -> tuple[list[TensorProto], list[TensorProto]]:
    """Tensors one after another in the file DATA, external and complete."""
    complete = [raw_tensor(f"w{it}", dims=(nbytes // 4,), seed=it) for it in range(count)]
    outside = [
        external(tensor, DATA, offset=nbytes * number, length=nbytes)
        for number, tensor in enumerate(complete)
    ]
    return outside, complete


def loaded(source: str, folder: Path, **options: Any) -> onnx.ModelProto:
    """The model of a source, converted and loaded; warnings are errors."""
    target = folder.parent / "m.onnxa"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        onnxarchive.convert(source, target, **options)
    assert onnxarchive.check(target, full=True) == []
    return onnxarchive.load(target)


def refused(source: str, folder: Path) -> str:
    """What is said of a source that cannot be converted."""
    with pytest.raises(ArchiveFormatError) as caught:
        onnxarchive.convert(source, folder.parent / "m.onnxa")
    assert not (folder.parent / "m.onnxa").exists()
    return caught.value.message


# As other tools write it


@pytest.mark.parametrize("nbytes", [64, 4096, 1 << 17])
def test_a_length_of_0_counts_as_not_stated(
    source: Callable[[Path], str], folder: Path, nbytes: int
) -> None:
    outside, complete = tensors(3, nbytes)
    for tensor in outside:
        tensor.external_data[2].value = "0"
    (folder / DATA).write_bytes(b"".join(it.raw_data for it in complete))
    write_model(folder / "m.onnx", model_of(*outside))
    assert loaded(source(folder), folder) == model_of(*complete)


@pytest.mark.parametrize("size_threshold", [0, 1024])
def test_an_empty_data_field_beside_external_data_is_ignored(
    source: Callable[[Path], str], folder: Path, size_threshold: int
) -> None:
    outside, complete = tensors(3)
    for tensor in outside:
        tensor.raw_data = b""
    (folder / DATA).write_bytes(b"".join(it.raw_data for it in complete))
    write_model(folder / "m.onnx", model_of(*outside))
    assert loaded(source(folder), folder, size_threshold=size_threshold) == model_of(*complete)


@pytest.mark.parametrize("size_threshold", [0, 1024, 1 << 20])
@pytest.mark.parametrize("is_stated", [False, True])
def test_pairs_beside_data_in_the_model_are_left_out_with_a_note(
    source: Callable[[Path], str], folder: Path, size_threshold: int, is_stated: bool
) -> None:
    # A tool has put the data into the model, and has forgotten the pairs.
    complete = [raw_tensor("small"), raw_tensor("large", dims=(2000,)), typed(raw_tensor("typed"))]
    given = model_of(*complete)
    for tensor in given.graph.initializer:
        for key, value in (("location", "gone.bin"), ("offset", "4096")):
            tensor.external_data.add(key=key, value=value)
        if is_stated:
            tensor.data_location = TensorProto.DEFAULT
    write_model(folder / "m.onnx", given)
    target = folder.parent / "m.onnxa"
    with pytest.warns(UserWarning, match="external_data was left out") as caught:
        conversion = onnxarchive.convert(source(folder), target, size_threshold=size_threshold)
    note = "external_data was left out beside data in the model: 3 tensors ('small', 'large', "
    assert [it[: len(note)] for it in conversion.warnings] == [note]
    assert len(caught) == 1
    assert onnxarchive.check(target, full=True) == []
    with onnxarchive.open(target) as archive:
        for tensor in complete:
            expected = onnx.numpy_helper.to_array(tensor)
            assert archive.tensors[tensor.name].tobytes() == expected.tobytes()


def test_pairs_beside_no_data_are_refused(source: Callable[[Path], str], folder: Path) -> None:
    outside, complete = tensors(1)
    for field in ("none", "raw_data"):
        outside[0].ClearField("data_location")
        if field == "raw_data":
            outside[0].raw_data = b""
        (folder / DATA).write_bytes(complete[0].raw_data)
        write_model(folder / "m.onnx", model_of(*outside))
        message = refused(source(folder), folder)
        assert "tensor 'w0' (graph.initializer[0]): data_location is not EXTERNAL" in message
        assert "set it, or clear external_data" in message


# Unused bits


def packed() -> list[TensorProto]:
    return [raw_tensor(f"w{it}", kind, (count,), it) for it, (kind, count) in enumerate(PACKED)]


def dirty(tensor: TensorProto) -> TensorProto:
    """A copy of a tensor with every unused bit of its last byte set."""
    copy = TensorProto()
    copy.CopyFrom(tensor)
    used = tensor.dims[0] * BIT_WIDTHS[tensor.data_type] % 8
    copy.raw_data = copy.raw_data[:-1] + bytes([copy.raw_data[-1] | 0xFF << used & 0xFF])
    assert copy != tensor
    return copy


@pytest.mark.parametrize("size_threshold", [0, 1 << 24])
@pytest.mark.parametrize("place", ["raw_data", "typed", "external", "own file"])
def test_unused_bits_are_cleared_with_a_note(
    source: Callable[[Path], str], folder: Path, place: str, size_threshold: int
) -> None:
    clean = packed()
    given = [dirty(tensor) for tensor in clean]
    if place == "typed":
        given = [typed(it) for it in given if it.data_type != NUMBERS.get("FLOAT6E2M3")]
    elif place == "external":
        data = b""
        for number, tensor in enumerate(given):
            given[number] = external(tensor, DATA, offset=len(data))
            data += tensor.raw_data
        (folder / DATA).write_bytes(data)
    elif place == "own file":
        for number, tensor in enumerate(given):
            (folder / tensor.name).write_bytes(tensor.raw_data)
            given[number] = external(tensor, tensor.name)
    write_model(folder / "m.onnx", model_of(*given))
    target = folder.parent / "m.onnxa"
    with pytest.warns(UserWarning, match="unused bits"):
        conversion = onnxarchive.convert(source(folder), target, size_threshold=size_threshold)
    names = ", ".join(repr(it.name) for it in given)
    assert conversion.warnings == (f"unused bits in the last byte were cleared: {names}",)
    assert onnxarchive.check(target, full=True) == []
    with onnxarchive.open(target) as archive:
        for tensor in clean[: len(given)]:
            expected = onnx.numpy_helper.to_array(tensor)
            assert archive.tensors[tensor.name].tobytes() == expected.tobytes()


def test_no_note_is_given_if_no_unused_bits_are_set(
    source: Callable[[Path], str], folder: Path
) -> None:
    clean = packed()
    (folder / DATA).write_bytes(clean[1].raw_data)
    given = [
        external(tensor, DATA) if number == 1 else tensor for number, tensor in enumerate(clean)
    ]
    write_model(folder / "m.onnx", model_of(*given))
    assert loaded(source(folder), folder, size_threshold=0) == model_of(*clean)


@pytest.mark.parametrize("name", ["int4", "uint2", "float6", "float4"])
def test_unused_bits_of_an_archive_are_cleared_as_its_error_says(tmp_path: Path, name: str) -> None:
    archive = VECTORS / f"unused-bits-{name}.onnxa"
    (finding,) = onnxarchive.check(archive, full=True)
    assert finding.rule == "TENSOR-4"
    assert "'onnxarchive convert' clears these bits" in finding.message
    with pytest.warns(UserWarning, match="unused bits"):
        onnxarchive.convert(archive, tmp_path / "m.onnxa", size_threshold=0)
    assert onnxarchive.check(tmp_path / "m.onnxa", full=True) == []


def test_unused_bits_of_a_damaged_archive_are_not_cleared(tmp_path: Path) -> None:
    tensor = raw_tensor("w", TensorProto.INT4, (4001,))
    onnxarchive.save(model_of(tensor), tmp_path / "m.onnxa")
    entry = entry_of(tmp_path / "m.onnxa", "w")
    data = bytearray((tmp_path / "m.onnxa").read_bytes())
    data[entry.data_offset + entry.nbytes - 1] ^= 0xF0
    (tmp_path / "m.onnxa").write_bytes(data)
    for size_threshold in (0, 1 << 20):
        with pytest.raises(ChecksumError, match=r"entry 'w': expected .* CRC-32"):
            onnxarchive.convert(
                tmp_path / "m.onnxa", tmp_path / "new.onnxa", size_threshold=size_threshold
            )


def test_unused_bits_of_a_damaged_zip_are_not_cleared(tmp_path: Path) -> None:
    tensor = raw_tensor("w", TensorProto.INT4, (4001,))
    model = model_of(external(tensor, "w")).SerializeToString()
    path = zipped(tmp_path / "m.zip", {"m.onnx": model, "w": tensor.raw_data})
    data = bytearray(path.read_bytes())
    data[data.index(tensor.raw_data) + len(tensor.raw_data) - 1] ^= 0xF0
    path.write_bytes(data)
    with pytest.raises(ArchiveFormatError, match="CRC-32"):
        onnxarchive.convert(path, tmp_path / "m.onnxa")


# Data files that are missing, too short or something else


@pytest.mark.parametrize("nbytes", [64, 4096])
def test_a_missing_data_file_is_named_once(
    source: Callable[[Path], str], folder: Path, nbytes: int
) -> None:
    outside, _ = tensors(1000, nbytes)
    write_model(folder / "m.onnx", model_of(*outside))
    message = refused(source(folder), folder)
    assert message == (
        f"1,000 tensors ('w0', 'w1', 'w2', ...): the data file 'm.onnx_data', of {1000 * nbytes} "
        "bytes or more, is missing; copy this file along with the model, or keep the .onnx and "
        "give its data to each session: SessionOptions has add_external_initializers for values "
        "by name, and add_external_initializers_from_files_in_memory for files"
    )


def test_a_further_remedy_for_missing_files_is_named_once(
    source: Callable[[Path], str], folder: Path
) -> None:
    names = ["a.bin", "b.bin", "short.bin"]
    (folder / "short.bin").write_bytes(bytes(100))
    missing = [external(raw_tensor(name, dims=(300,)), name) for name in names]
    write_model(folder / "m.onnx", model_of(*missing))
    first, second, third = refused(source(folder), folder).splitlines()[1:]
    assert first.endswith("add_external_initializers_from_files_in_memory for files")
    assert second.endswith("is missing; copy this file along with the model")
    write_model(folder / "m.onnx", model_of(missing[2]))
    assert "SessionOptions" not in third + refused(source(folder), folder)


@pytest.mark.parametrize("way", ["by name", "by file"])
def test_a_session_takes_absent_data_as_the_message_says(way: str) -> None:
    ort = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    model = runnable_model()
    x = {"x": np.ones((2, 1024), np.float32)}
    expected = ort.InferenceSession(model.SerializeToString()).run(None, x)[0]
    weight = model.graph.initializer[0]
    values, data = numpy_helper.to_array(weight), weight.raw_data
    weight.CopyFrom(external(weight, "placeholder"))
    options = ort.SessionOptions()
    if way == "by name":
        value = ort.OrtValue.ortvalue_from_numpy(values)
        options.add_external_initializers([weight.name], [value])
    elif not hasattr(options, "add_external_initializers_from_files_in_memory"):
        pytest.skip("this ONNX Runtime does not take files in memory")
    else:
        files = (["placeholder"], [data], [len(data)])
        options.add_external_initializers_from_files_in_memory(*files)
    session = ort.InferenceSession(model.SerializeToString(), options)
    np.testing.assert_array_equal(session.run(None, x)[0], expected)


@pytest.mark.parametrize("nbytes", [64, 4096])
def test_a_data_file_that_is_too_short_is_named_once(
    source: Callable[[Path], str], folder: Path, nbytes: int
) -> None:
    outside, complete = tensors(100, nbytes)
    outside.sort(key=lambda it: it.name)  # the last tensor in the file is not the last in the model
    (folder / DATA).write_bytes(b"".join(it.raw_data for it in complete)[: 10 * nbytes + 5])
    write_model(folder / "m.onnx", model_of(*outside))
    message = refused(source(folder), folder)
    assert message.startswith("90 tensors ('w10', 'w11', 'w12', ...): expected ")
    assert f"offset {99 * nbytes} of 'm.onnx_data'" in message
    assert f"ends at least {90 * nbytes - 5:,} bytes too early; its download" in message


OTHERS = {
    "pointer": (POINTER, "a Git LFS pointer; 'git lfs pull' fetches the file"),
    "page": (PAGE, "an HTML page; its address"),
    "long page": (PAGE * 1000, "an HTML page; its address"),
    "empty": (b"", "an empty file; its download"),
    "gzip": (b"\x1f\x8b\x08\0", "a gzip file; decompress it first"),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("nbytes", [64, 4096])
def test_the_kind_of_a_file_in_place_of_a_data_file_is_named(
    source: Callable[[Path], str], folder: Path, other: str, nbytes: int
) -> None:
    content, kind = OTHERS[other]
    outside, _ = tensors(100, nbytes)
    (folder / DATA).write_bytes(content)
    write_model(folder / "m.onnx", model_of(*outside))
    message = refused(source(folder), folder)
    assert "tensors ('w" in message
    assert f"expected data in 'm.onnx_data', found {kind}" in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize("content", [POINTER, PAGE, PAGE * 1000], ids=["pointer", "page", "long"])
def test_a_git_lfs_pointer_or_web_page_is_no_data_even_if_it_is_long_enough(
    source: Callable[[Path], str], folder: Path, content: bytes
) -> None:
    outside, _ = tensors(2, 16)
    outside.append(external(raw_tensor("packed", TensorProto.INT4, (3,)), DATA))
    (folder / DATA).write_bytes(content)
    write_model(folder / "m.onnx", model_of(*outside))
    message = refused(source(folder), folder)
    assert message.startswith("3 tensors ('w0', 'w1', 'packed'): expected data in ")
    assert "Git LFS pointer" in message or "HTML page" in message


@pytest.mark.parametrize("other", OTHERS)
def test_the_kind_of_a_file_in_place_of_a_model_is_named(
    source: Callable[[Path], str], folder: Path, other: str
) -> None:
    content, kind = OTHERS[other]
    (folder / "m.onnx").write_bytes(content)
    assert refused(source(folder), folder).startswith(f"expected a model, found {kind}")


def test_a_wrong_checksum_of_a_file_is_named_once(folder: Path) -> None:
    outside, complete = tensors(100)
    for tensor in outside:
        tensor.external_data.add(key="checksum", value="0" * 40)
    (folder / DATA).write_bytes(b"".join(it.raw_data for it in complete))
    path = write_model(folder / "m.onnx", model_of(*outside))
    with pytest.raises(ChecksumError) as caught:
        onnxarchive.convert(path, folder / "m.onnxa", verify_checksum=True)
    assert caught.value.rule == "DATA-6"
    assert "100 tensors ('w0', 'w1', 'w2', ...): expected SHA-1 0000" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
