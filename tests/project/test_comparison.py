"""Each cell of the README's table of formats is true of a file of that format."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from models import text_model
from onnx import numpy_helper

import onnxarchive

pytestmark = pytest.mark.tool

README = Path(__file__).resolve().parents[2] / "README.md"
# Odd sizes: the next tensor is aligned only if the format pads.
TENSORS: dict[str, Any] = {
    "a": np.arange(1201, dtype=np.int8),
    "b": np.arange(1001, dtype=np.float32),
    "c": np.arange(999, dtype=np.float16),
    "d": np.arange(1003, dtype=np.float32) + 0.5,
    "e": np.arange(333, dtype=np.int8)[::-1].copy(),
}
FORMATS = ["ONNX archive", "ONNX external data", "safetensors", "GGUF", "`torch.save`"]


def _model() -> onnx.ModelProto:
    tensors = (numpy_helper.from_array(array, name) for name, array in TENSORS.items())
    return text_model("g () => (float[1001] y) { y = Identity(b) }", *tensors)


def _write_gguf(path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    writer = gguf.GGUFWriter(path, "none")
    for name, array in TENSORS.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(params=FORMATS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def path(name: str, tmp_path: Path) -> Path:
    """Writes the tensors with the format's own library; returns the main file."""
    if name == "ONNX archive":
        onnxarchive.save(_model(), tmp_path / "m.onnxa", size_threshold=0)
    elif name == "ONNX external data":
        options: Any = {"save_as_external_data": True, "location": "m.data", "size_threshold": 0}
        onnx.save(_model(), tmp_path / "m.onnx", **options)
        return tmp_path / "m.onnx"
    elif name == "safetensors":
        library = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
        library.save_file(TENSORS, tmp_path / "m.safetensors")
    elif name == "GGUF":
        _write_gguf(tmp_path / "m.gguf")
    else:
        torch = pytest.importorskip("torch", reason="torch is not installed")
        state = {key: torch.from_numpy(array) for key, array in TENSORS.items()}
        torch.save(state, tmp_path / "m.pt")
    (file,) = tmp_path.iterdir()
    return file


def _cell(row: str, name: str) -> str:
    """The cell of a row and a format in the README's table."""
    found = re.search(rf"^\| {re.escape(row)} \| (.*) \|$", README.read_text("utf-8"), re.MULTILINE)
    assert found, row
    cells: list[str] = found[1].split(" | ")
    return dict(zip(FORMATS, cells, strict=True))[name]


def _yes(condition: bool) -> str:
    return "yes" if condition else "no"


def _data_file(path: Path) -> Path:
    return path.with_name("m.data") if path.suffix == ".onnx" else path


def _arrays(path: Path, library: str = "") -> dict[str, Any]:
    """The tensors as numpy arrays, read with the format's own library or with `library`."""
    if path.suffix == ".onnxa":
        with onnxarchive.open(path) as archive:
            return dict(archive.tensors)
    if library == "with onnx-ir":
        loaded = pytest.importorskip("onnx_ir").load(path)
        return {key: value.const_value.numpy() for key, value in loaded.graph.initializers.items()}
    if path.suffix == ".onnx":
        model = onnx.load(path)
        return {it.name: numpy_helper.to_array(it) for it in model.graph.initializer}
    if path.suffix == ".safetensors":
        framework = "numpy"
        if library == "through PyTorch":
            framework = "pt"
            pytest.importorskip("torch", reason="torch is not installed")
        with pytest.importorskip("safetensors").safe_open(path, framework) as file:
            return {key: np.asarray(file.get_tensor(key)) for key in file.keys()}  # noqa: SIM118
    if path.suffix == ".gguf":
        return {it.name: it.data for it in pytest.importorskip("gguf").GGUFReader(path).tensors}
    state = pytest.importorskip("torch").load(path, mmap=bool(library))
    return {key: tensor.numpy() for key, tensor in state.items()}


def _load(path: Path) -> object:
    """Reads all tensors with the format's library and its default options."""
    if path.suffix == ".onnxa":
        return onnxarchive.load(path)
    if path.suffix == ".pt":
        return pytest.importorskip("torch").load(path)
    if path.suffix == ".safetensors":
        return pytest.importorskip("safetensors.numpy").load_file(path)
    return {key: array.copy() for key, array in _arrays(path).items()}


def test_every_format_of_the_table_gives_the_tensors_back(path: Path) -> None:
    arrays = _arrays(path)
    assert arrays.keys() == TENSORS.keys()
    assert all(np.array_equal(arrays[key], array) for key, array in TENSORS.items())


def test_the_table_states_the_number_of_files(path: Path, name: str) -> None:
    assert _cell("files for one model", name) == str(len(list(path.parent.iterdir())))


def test_the_table_states_which_formats_hold_the_graph(path: Path, name: str) -> None:
    readers: dict[str, Any] = {".onnxa": onnxarchive.load, ".onnx": onnx.load}
    read = readers.get(path.suffix)
    assert _cell("holds the graph", name) == _yes(read is not None)
    if read is not None:
        assert read(path).graph.node[0].op_type == "Identity"
    else:  # writer and reader handle tensors only
        assert _arrays(path).keys() == TENSORS.keys()


def test_the_table_states_which_formats_unzip_opens(path: Path, name: str) -> None:
    assert _cell("opened by `unzip`", name) == _yes(zipfile.is_zipfile(path))


def test_the_table_states_where_tensors_begin(path: Path, name: str) -> None:
    content = _data_file(path).read_bytes()
    offsets = {key: content.index(array.tobytes()) for key, array in TENSORS.items()}
    cell = _cell("tensors begin at multiples of", name)
    if cell == "their elements' size":
        assert all(offsets[key] % array.itemsize == 0 for key, array in TENSORS.items())
        assert any(offset % 2 for offset in offsets.values())
        return
    unit = int(cell.split()[0])
    assert all(offset % unit == 0 for offset in offsets.values())
    assert any(offset % (2 * unit) for offset in offsets.values())


def test_the_table_states_which_arrays_are_views_of_the_file(path: Path, name: str) -> None:
    """A view shows bytes that are written to the file later; a copy does not."""
    cell = _cell("numpy views without a copy", name)
    ways = [cell, ""] if cell not in ("yes", "no") else [""]
    arrays = [_arrays(path, way)["b"] for way in ways]
    file = _data_file(path)
    offset = file.read_bytes().index(TENSORS["b"].tobytes())
    with open(file, "r+b") as opened:
        opened.seek(offset)
        opened.write(np.float32(99).tobytes())
    are_views = [array[0] == 99 for array in arrays]
    assert are_views == ([True, False] if len(ways) == 2 else [cell == "yes"])


def test_the_table_states_where_a_flipped_bit_is_found(path: Path, name: str) -> None:
    file = _data_file(path)
    content = bytearray(file.read_bytes())
    content[content.index(TENSORS["b"].tobytes()) + 2000] ^= 1
    file.write_bytes(content)
    try:
        _load(path)
        found = False
    except onnxarchive.ChecksumError:
        found = True
    assert _cell("loading the whole file compares checksums", name) == _yes(found)


def test_the_table_states_which_formats_hold_pickles(path: Path, name: str) -> None:
    names = zipfile.ZipFile(path).namelist() if zipfile.is_zipfile(path) else []
    assert _cell("holds pickles", name) == _yes(any(it.endswith(".pkl") for it in names))
