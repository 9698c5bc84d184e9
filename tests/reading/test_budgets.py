"""The costs of save and convert grow with the size of a hostile input.

They grow neither with its square nor with the sizes that it declares.
"""

from __future__ import annotations

import errno
import io
import os
import random
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import onnx
import pytest
from models import attribute, external, model_of, node, raw_tensor
from onnx import TensorProto
from steps import steps

import onnxarchive
from onnxarchive import ArchiveFormatError
from onnxarchive.files.data import Made
from onnxarchive.sources.source import Source
from onnxarchive.writing.options import WriteOptions
from onnxarchive.writing.plan import plan_archive
from onnxarchive.zipformat.records import DirectoryRecord, LocalHeader

GIB = 1 << 30
METHODS = [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]


def _zip(path: Path, contents: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    """A zip of these files, whose models are stored."""
    with zipfile.ZipFile(path, "w") as file:
        for name, content in contents.items():
            kind = zipfile.ZIP_STORED if name.endswith(".onnx") else method
            file.writestr(name, content, kind)
    return path


def _declare(path: Path, nbytes: int, declared: int) -> None:
    """Changes the size that both headers of an entry declare."""
    data = path.read_bytes()
    found, wanted = (number.to_bytes(4, "little") for number in (nbytes, declared))
    assert data.count(found) == 2
    path.write_bytes(data.replace(found, wanted))


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk with 1 GiB of free space."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=9 * GIB, free=GIB))


@pytest.fixture
def spooled(monkeypatch: pytest.MonkeyPatch) -> Iterable[Callable[[], list[int]]]:
    """The sizes of the temporary files that were made, in bytes."""
    descriptors: list[int] = []
    make: Any = tempfile.TemporaryFile

    def counted(*arguments: Any, **options: Any) -> Any:
        file = make(*arguments, **options)
        descriptors.append(os.dup(file.fileno()))
        return file

    monkeypatch.setattr(tempfile, "TemporaryFile", counted)
    yield lambda: [os.fstat(descriptor).st_size for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)


# Declared sizes


@pytest.mark.parametrize("method", METHODS)
def test_a_model_that_is_declared_too_large_is_refused_before_it_is_inflated(
    tmp_path: Path, method: int, spooled: Callable[[], list[int]]
) -> None:
    model = model_of(raw_tensor("w", dims=(123_456,))).SerializeToString()
    path = tmp_path / "m.zip"
    with zipfile.ZipFile(path, "w", method) as file:
        file.writestr("m.onnx", model)
    _declare(path, len(model), 3 * GIB)
    with pytest.raises(ArchiveFormatError, match=f"less than {2 * GIB} bytes, found {3 * GIB}"):
        onnxarchive.convert(path, tmp_path / "m.onnxa")
    assert spooled() == []


@pytest.mark.parametrize("method", METHODS)
def test_sizes_that_a_zip_declares_are_compared_with_its_data(tmp_path: Path, method: int) -> None:
    data = bytes(123_456)
    tensor = TensorProto(name="w", data_type=TensorProto.UINT8, dims=[3 * GIB])
    model = model_of(external(tensor, "w.bin")).SerializeToString()
    path = _zip(tmp_path / "m.zip", {"m.onnx": model, "w.bin": data}, method)
    _declare(path, len(data), 3 * GIB)
    with pytest.raises(ArchiveFormatError, match=f"{3 * GIB} bytes inflated, found {len(data)}"):
        onnxarchive.convert(path, tmp_path / "m.onnxa")


@pytest.mark.usefixtures("full_disk")
@pytest.mark.parametrize("field", ["raw_data", "int64_data"])
def test_a_shape_that_does_not_fit_the_data_is_named_before_the_full_disk(
    tmp_path: Path, field: str
) -> None:
    tensor = TensorProto(name="w", data_type=TensorProto.INT64, dims=[3 * GIB])
    if field == "raw_data":
        tensor.raw_data = bytes(4000)
    else:
        tensor.int64_data.extend(range(4000))
    path = tmp_path / "m.onnx"
    path.write_bytes(model_of(tensor).SerializeToString())
    with pytest.raises(ArchiveFormatError, match=f"expected {24 * GIB} bytes"):
        onnxarchive.convert(path, tmp_path / "m.onnxa")


def _sharing(path: Path, count: int, nbytes: int, form: str) -> Path:
    """A source whose tensors all name the same bytes."""
    tensors = (
        TensorProto(name=f"w{number}", data_type=TensorProto.UINT8, dims=[nbytes - number])
        for number in range(count)
    )
    model = model_of(*(external(it, "w.bin") for it in tensors)).SerializeToString()
    files = {"m.onnx": model, "w.bin": bytes(nbytes)}
    if form == "zip":
        return _zip(path / "m.zip", files, zipfile.ZIP_DEFLATED)
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path if form == "directory" else path / "m.onnx"


@pytest.mark.parametrize("form", ["onnx", "zip", "directory"])
@pytest.mark.parametrize("nbytes", [50_000, 5 << 20], ids=["small", "large"])
def test_tensors_that_need_far_more_bytes_than_a_source_has_are_refused(
    tmp_path: Path, form: str, nbytes: int
) -> None:
    source = _sharing(tmp_path, (1 << 29) // nbytes, nbytes, form)
    before = sorted(os.listdir(tmp_path))
    expected = rf"at most \d+ bytes in files of {nbytes} bytes, found \d+ bytes: too many tensors"
    for dry_run in (False, True):
        with pytest.raises(ArchiveFormatError, match=expected):
            onnxarchive.convert(source, tmp_path / "m.onnxa", dry_run=dry_run)
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("is_shared", [True, False])
def test_the_models_of_a_source_may_share_its_bytes(tmp_path: Path, is_shared: bool) -> None:
    source, target = _sharing(tmp_path, 30, 5 << 20, "directory"), tmp_path / "m.onnxa"
    default = onnx.load(source / "m.onnx", load_external_data=False)
    os.remove(source / "m.onnx")
    for number, name in enumerate(["", "_a", "_b", "_c"]):
        for tensor in default.graph.initializer:
            tensor.dims[0] -= 0 if is_shared else number * 100
        (source / f"__MODEL_PROTO{name}").write_bytes(default.SerializeToString())
    if is_shared:
        assert onnxarchive.convert(source, target, dry_run=True).tensors == 30
        return
    with pytest.raises(ArchiveFormatError, match="too many tensors name the same bytes"):
        onnxarchive.convert(source, target)


@pytest.mark.parametrize("form", ["onnx", "zip", "directory"])
def test_a_few_tensors_may_name_the_same_bytes(tmp_path: Path, form: str) -> None:
    source = _sharing(tmp_path, 40, 5000, form)
    onnxarchive.convert(source, tmp_path / "m.onnxa")
    with onnxarchive.open(tmp_path / "m.onnxa") as archive:
        assert [archive.tensors[f"w{it}"].nbytes for it in range(40)] == [*range(5000, 4960, -1)]


@pytest.mark.usefixtures("full_disk")
@pytest.mark.parametrize("form", ["onnx", "zip"])
def test_a_source_that_is_larger_than_the_free_space_is_refused_before_it_is_written(
    tmp_path: Path, form: str
) -> None:
    source, target = _sharing(tmp_path, 11, 100 << 20, form), tmp_path / "m.onnxa"
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(OSError, match=rf"1153\d+ bytes are needed, {GIB} are free") as raised:
        onnxarchive.convert(source, target)
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(target))
    assert sorted(os.listdir(tmp_path)) == before


# Temporary files


@pytest.mark.parametrize("method", METHODS)
def test_a_compressed_file_is_inflated_to_disk_once(
    tmp_path: Path, method: int, spooled: Callable[[], list[int]]
) -> None:
    data = random.Random(1).randbytes(1_200_000)
    ranges = [(0, 2000), (1000, 3000), (3000, 3000), (5000, 9000), (5000, 7000)]
    ranges += [(890_000, 1_060_000), (1_198_000, 1_200_000), (1_200_000, 1_200_000)]
    tensors = [
        TensorProto(name=f"w{begin}", data_type=TensorProto.UINT8, dims=[end - begin])
        for begin, end in ranges
    ]
    model = model_of(
        *(
            external(tensor, "w.bin", offset=begin)
            for tensor, (begin, _) in zip(tensors, ranges, strict=True)
        )
    )
    path = _zip(tmp_path / "m.zip", {"m.onnx": model.SerializeToString(), "w.bin": data}, method)
    onnxarchive.convert(path, tmp_path / "m.onnxa", size_threshold=0)
    assert spooled() == [len(data)]
    for tensor, (begin, end) in zip(tensors, ranges, strict=True):
        tensor.raw_data = data[begin:end]
    assert onnxarchive.load(tmp_path / "m.onnxa") == model_of(*tensors)


def test_nothing_is_inflated_before_all_tensors_are_found(
    tmp_path: Path, spooled: Callable[[], list[int]]
) -> None:
    tensors = [external(raw_tensor("w"), "w.bin"), external(raw_tensor("v"), "missing.bin")]
    contents = {"m.onnx": model_of(*tensors).SerializeToString(), "w.bin": bytes(100_000)}
    path = _zip(tmp_path / "m.zip", contents, zipfile.ZIP_DEFLATED)
    with pytest.raises(ArchiveFormatError, match=r"'missing\.bin'"):
        onnxarchive.convert(path, tmp_path / "m.onnxa", size_threshold=0)
    assert spooled() == []


# Models that are too large


def test_what_is_too_large_for_the_model_is_refused_before_it_is_read() -> None:
    tensor = TensorProto(name="t", data_type=TensorProto.UINT8, dims=[GIB])
    model = model_of()
    model.graph.node.append(node(attribute("t", tensors=[external(tensor, "w")] * 2)))
    read = Mock(side_effect=AssertionError("it is read"))
    with pytest.raises(ArchiveFormatError, match=f"less than {2 * GIB}.*found {2 * GIB}.*MODEL-2"):
        plan_archive({"": Source(model, [Made(GIB, read)] * 2)}, WriteOptions())


# How the time grows


def _named(names: Iterable[str]) -> onnx.ModelProto:
    return model_of(*(raw_tensor(name, TensorProto.UINT8, (1,)) for name in names))


def _nested(count: int) -> onnx.ModelProto:
    """As many graphs beside one another, each with the same names."""
    model = model_of(raw_tensor("w"))
    for _ in range(count):
        graph = onnx.GraphProto(initializer=[raw_tensor("w"), raw_tensor("v")])
        model.graph.node.append(node(attribute("g", g=graph)))
    return model


MODELS: dict[str, Callable[[int], onnx.ModelProto]] = {
    "one name": lambda count: _named(["w"] * count),
    "long names": lambda count: _named(
        ["w" * 252 + f"{i % (count // 2):05}" for i in range(count)]
    ),
    "names that differ in case": lambda count: _named(
        f"{i:012b}".translate({48: "w", 49: "W"}) for i in range(count)
    ),
    "numbered names": lambda count: _named([*(f"w_{i}" for i in range(count)), *["w"] * count]),
    "subgraphs": _nested,
}


@pytest.mark.parametrize("kind", MODELS)
def test_saving_takes_steps_in_proportion_to_the_model(kind: str) -> None:
    def steps_of(model: onnx.ModelProto) -> int:
        options: dict[str, Any] = {"size_threshold": 0, "convert_attribute": True, "jobs": 1}
        return steps(lambda: onnxarchive.save(model, io.BytesIO(), **options))

    few, many = map(MODELS[kind], (200, 800))
    assert steps_of(many) < 5 * steps_of(few)


def _parts(count: int, location: Callable[[int], str] = lambda index: "w.bin") -> bytes:
    tensors = [
        external(raw_tensor(f"w{i}", dims=(1,)), location(i), offset=4 * (i * 7 % count), length=4)
        for i in range(count)
    ]
    return model_of(*tensors).SerializeToString()


def _files(count: int, folder: str = "") -> dict[str, bytes]:
    tensors = [external(raw_tensor(f"w{i}", dims=(1,)), f"{folder}w{i}.bin") for i in range(count)]
    contents = {f"{folder}w{i}.bin": i.to_bytes(4, "little") for i in range(count)}
    return {"m.onnx": model_of(*tensors).SerializeToString(), **contents}


SOURCES: dict[str, Callable[[int], dict[str, bytes]]] = {
    "parts of one file": lambda count: {"m.onnx": _parts(count), "w.bin": bytes(4 * count)},
    "one file by many names": lambda count: {
        "m.onnx": _parts(count, lambda index: "./" * (index % 100) + "w.bin"),
        "w.bin": bytes(4 * count),
    },
    "many files": _files,
    "many files in folders": lambda count: _files(count, "a/" * 50),
    "many assets": lambda count: {
        "m.onnx": _parts(1),
        "w.bin": bytes(4),
        **{f"assets/{'a/' * 50}{i}": b"" for i in range(count)},
    },
    "many names that are left out": lambda count: {
        "m.onnx": _parts(1),
        "w.bin": bytes(4),
        **{f"{'w' * 200}{i}": b"" for i in range(count)},
    },
}


@pytest.mark.filterwarnings("ignore:.*left out")
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("kind", SOURCES)
def test_converting_takes_steps_in_proportion_to_the_source(
    tmp_path: Path, kind: str, method: int
) -> None:
    def steps_of(count: int) -> int:
        path = _zip(tmp_path / "m.zip", SOURCES[kind](count), method)
        return steps(lambda: onnxarchive.convert(path, io.BytesIO(), size_threshold=0, jobs=1))

    steps_of(1)  # what is done once
    assert steps_of(800) < 5 * steps_of(200)


def test_long_headers_of_a_zip_are_copied_in_proportion_to_their_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.zip"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("m.onnx", _parts(0))
        for number in range(300):
            info = zipfile.ZipInfo(f"{'w' * 500}{number:03}")
            info.comment = b"words"
            file.writestr(info, b"")
    copied = []
    for kind in (DirectoryRecord, LocalHeader):

        def counted(buffer: bytes | memoryview, offset: int = 0, unpack: Any = kind.unpack) -> Any:
            record = unpack(buffer, offset)
            is_map = isinstance(buffer, memoryview)  # of which only the record is copied
            copied.append(len(record.pack()) if is_map else len(buffer))
            return record

        monkeypatch.setattr(kind, "unpack", counted)
    with pytest.warns(UserWarning, match="left out"):
        onnxarchive.convert(path, tmp_path / "m.onnxa")
    assert path.stat().st_size / 2 < sum(copied) < 6 * path.stat().st_size
