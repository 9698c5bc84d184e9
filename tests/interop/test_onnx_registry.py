"""onnx's own load and save, of paths, files and bytes that are archives."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from models import (
    MEASURE_MEMORY,
    NUMBERS,
    break_local_header,
    entry_of,
    external,
    flip_byte,
    full_model,
    model_of,
    raw_tensor,
    run_python,
    runnable_model,
    string_tensor,
)
from onnx import TensorProto, serialization
from pages import needs_smaps
from written import saved, write_model

import onnxarchive
from onnxarchive import ArchiveFormatError, ChecksumError
from onnxarchive.interop import onnx_registry

MIB = 1 << 20


def _of_all_types() -> onnx.ModelProto:
    return model_of(
        *(raw_tensor(name, number, (3001,), number) for name, number in NUMBERS.items()),
        raw_tensor("nothing", TensorProto.BFLOAT16, (0, 4)),
        raw_tensor("scalar", TensorProto.INT64, ()),
        string_tensor("labels"),
    )


MODELS = [runnable_model, full_model, _of_all_types]


@pytest.fixture
def registry() -> Iterator[Any]:
    """onnx's registry, restored after the test."""
    registry: Any = serialization.registry
    serializers = dict(registry._serializers)
    formats = dict(registry._extension_to_format)
    yield registry
    registry._serializers.clear()
    registry._serializers.update(serializers)
    registry._extension_to_format.clear()
    registry._extension_to_format.update(formats)


class _Other:
    """Another package's serializer."""

    file_extensions = frozenset({".onnxa"})
    supported_format = "onnxa"


# Registering


def test_importing_the_library_lets_onnx_load_and_save_archives(archive: Path) -> None:
    code = """
import sys, onnx, onnxarchive
model = onnx.load(sys.argv[1])
onnx.save(model, sys.argv[1] + ".2.onnxa")
print(len(model.graph.initializer))
"""
    assert run_python(code, archive) == "2\n"
    assert Path(f"{archive}.2.onnxa").read_bytes() == archive.read_bytes()


def test_if_onnx_is_imported_later_the_first_use_of_the_library_registers_archives(
    archive: Path,
) -> None:
    code = """
import sys, onnxarchive, onnx
find = onnx.serialization.registry.get_format_from_file_extension
print(find(".onnxa"))
onnxarchive.save
print(find(".onnxa"), len(onnx.load(sys.argv[1]).graph.initializer))
"""
    assert run_python(code, archive) == "None\nonnxa 2\n"


def test_registering_again_changes_nothing(registry: Any) -> None:
    serializer = registry.get("onnxa")
    onnx_registry.register()
    assert registry.get("onnxa") is serializer
    assert registry.get_format_from_file_extension(".onnxa") == "onnxa"


def test_a_format_of_the_same_name_is_left_alone(registry: Any) -> None:
    other = _Other()
    registry.register(other)
    onnx_registry.register()
    assert registry.get("onnxa") is other


def test_importing_leaves_another_packages_format_alone() -> None:
    code = """
import onnx
class Other:
    supported_format = "other"
    file_extensions = {".onnxa"}
onnx.serialization.registry.register(Other())
import onnxarchive
print(onnx.serialization.registry.get_format_from_file_extension(".onnxa"))
"""
    assert run_python(code) == "other\n"


def test_other_formats_of_onnx_stay_registered_as_they_were() -> None:
    get = serialization.registry.get_format_from_file_extension
    assert get(".onnx") == get(".pb") == "protobuf"


# Loading


@pytest.mark.parametrize("make", MODELS, ids=lambda it: it.__name__.strip("_"))
@pytest.mark.parametrize("convert_attribute", [False, True])
def test_onnx_load_gives_the_complete_model(path: Path, make: Any, convert_attribute: bool) -> None:
    onnxarchive.save(make(), path, size_threshold=0, convert_attribute=convert_attribute)
    assert onnx.load(path) == onnx.load(str(path)) == onnx.load(path, format="onnxa") == make()
    assert onnx.load(path, load_external_data=False) == make()
    with open(path, "rb") as file:
        assert onnx.load(file, format="onnxa") == make()


def test_files_and_bytes_are_loaded(archive: Path, tmp_path: Path) -> None:
    data = archive.read_bytes()
    assert onnx.load(io.BytesIO(data), format="onnxa") == runnable_model()
    assert onnx.load_from_string(data, format="onnxa") == runnable_model()
    with open(archive, "rb") as file:
        assert onnx.load(file) == runnable_model()
    os.rename(archive, tmp_path / "m.zip")
    assert onnx.load(tmp_path / "m.zip", format="onnxa") == runnable_model()
    serializer: Any = serialization.registry.get("onnxa")
    for buffer in (bytearray(data), memoryview(data)):
        assert serializer.deserialize_proto(buffer, onnx.ModelProto()) == runnable_model()


def test_the_given_proto_becomes_the_model(archive: Path) -> None:
    proto = model_of(raw_tensor("before"))
    serializer = serialization.registry.get("onnxa")
    assert serializer.deserialize_proto(archive.read_bytes(), proto) is proto
    assert proto == runnable_model()


def test_a_loaded_model_does_not_share_memory_with_the_bytes(archive: Path) -> None:
    data = bytearray(archive.read_bytes())
    serializer: Any = serialization.registry.get("onnxa")
    model = serializer.deserialize_proto(data, onnx.ModelProto())
    data.clear()  # no view of it is left, or this raises
    assert model == runnable_model()


def test_a_changed_tensor_is_refused(archive: Path) -> None:
    flip_byte(archive, entry_of(archive, "layer_0_weight").data_offset)
    with pytest.raises(ChecksumError, match=r"entry 'layer_0_weight'.*CRC-32.*\[ZIP-15\]$"):
        onnx.load(archive)


def test_a_broken_local_header_is_refused_without_a_made_up_name(archive: Path) -> None:
    break_local_header(archive, entry_of(archive, "layer_0_weight"))
    with pytest.raises(ArchiveFormatError, match=r"^entry 'layer_0_weight': ") as caught:
        onnx.load(archive)
    assert caught.value.path is None


@pytest.mark.parametrize("data", [b"", b"PK", runnable_model().SerializeToString()])
def test_a_file_that_is_no_archive_is_refused_without_a_made_up_name(data: bytes) -> None:
    with pytest.raises(ArchiveFormatError) as caught:
        onnx.load_from_string(data, format="onnxa")
    assert caught.value.path is None
    assert "<bytes>" not in str(caught.value)


def test_text_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="expected the bytes of an archive, found str"):
        onnx.load_from_string("text", format="onnxa")


def test_a_tensor_alone_is_a_type_error(archive: Path, path: Path) -> None:
    with pytest.raises(TypeError, match=r"ModelProto, found TensorProto: an archive holds a model"):
        onnx.save_tensor(raw_tensor("w"), path)
    with pytest.raises(TypeError, match=r"ModelProto, found TensorProto: an archive holds a model"):
        onnx.load_tensor(archive)


# Saving


@pytest.mark.parametrize("make", MODELS, ids=lambda it: it.__name__.strip("_"))
def test_onnx_save_writes_the_archive_that_onnxarchive_saves(path: Path, make: Any) -> None:
    model = make()
    onnx.save(model, path)
    assert model == make()
    assert path.read_bytes() == saved(model)
    assert onnxarchive.check(path, full=True) == []


def test_onnx_saves_archives_to_file_objects_and_any_path(path: Path, tmp_path: Path) -> None:
    expected = saved(runnable_model())
    buffer = io.BytesIO()
    onnx.save(runnable_model(), buffer, format="onnxa")
    onnx.save(runnable_model(), tmp_path / "m.zip", format="onnxa")
    onnx.save(runnable_model().SerializeToString(), path)
    assert buffer.getvalue() == (tmp_path / "m.zip").read_bytes() == path.read_bytes() == expected


def test_external_data_is_refused_and_the_remedies_named(path: Path, tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(16))
    source = write_model(tmp_path / "m.onnx", model_of(external(raw_tensor("w"), "w.bin")))
    message = r"tensor 'w' \(graph.initializer\[0\]\): its data is external, not in the model"
    with pytest.raises(ArchiveFormatError, match=rf"{message}.*onnxarchive\.convert"):
        onnx.save(onnx.load(source, load_external_data=False), path)
    assert not path.exists()
    onnx.save(onnx.load(source), path)
    assert onnxarchive.load(path).graph.initializer[0].raw_data == bytes(16)


@pytest.mark.parametrize("location", ["*/_ORT_MEM_ADDR_/*", "*/_ORT_NATIVE_ENDIAN_MEM_ADDR_/*"])
def test_an_address_in_memory_is_not_taken_for_a_file(tmp_path: Path, location: str) -> None:
    model = model_of(external(raw_tensor("w"), location, offset=140123456789, length=16))
    source = write_model(tmp_path / "m.onnx", model)
    path = tmp_path / "m.onnxa"
    for make in (
        lambda: onnx.save(model, path),
        lambda: onnxarchive.save(model, path),
        lambda: onnxarchive.convert(source, path),
    ):
        with pytest.raises(ArchiveFormatError, match=r"tensor 'w' .*address in the memory of"):
            make()
    assert not path.exists()


def test_save_as_external_data_is_refused_and_leaves_what_was_there(archive: Path) -> None:
    before = archive.read_bytes()
    with pytest.raises(ArchiveFormatError, match="save the model without save_as_external_data"):
        onnx.save(runnable_model(), archive, save_as_external_data=True, location="w.data")
    assert archive.read_bytes() == before


def test_the_advice_after_save_as_external_data_gives_the_archive(path: Path) -> None:
    model = runnable_model()
    with pytest.raises(ArchiveFormatError, match=r"load_external_data_for_model.*'w\.data'"):
        onnx.save(model, path, save_as_external_data=True, location="w.data")
    onnx.load_external_data_for_model(model, str(path.parent))
    onnx.save(model, path)
    (path.parent / "w.data").unlink()
    assert onnxarchive.load(path) == runnable_model()


def test_onnx_ir_loads_archives_through_onnx(archive: Path, tmp_path: Path) -> None:
    ir = pytest.importorskip("onnx_ir", reason="onnx_ir is not installed")
    model = ir.load(archive)
    assert ir.to_proto(model) == ir.to_proto(ir.from_proto(runnable_model()))
    ir.save(model, tmp_path / "again.onnxa")
    again = onnx.load(tmp_path / "again.onnxa").graph
    assert again.initializer[0].raw_data == runnable_model().graph.initializer[0].raw_data
    assert list(again.node) == list(runnable_model().graph.node)


# Memory


@pytest.mark.sweep
@needs_smaps
def test_loading_and_saving_hold_the_file_and_the_model_once_each(tmp_path: Path) -> None:
    tensors = [raw_tensor(f"w{index}", TensorProto.UINT8, (8 * MIB,), index) for index in range(12)]
    onnxarchive.save(model_of(*tensors), tmp_path / "m.onnxa")
    size = (tmp_path / "m.onnxa").stat().st_size
    code = f"""
{MEASURE_MEMORY}
import onnx, onnxarchive
path = sys.argv[1]
models = []
print(growth(lambda: models.append(onnx.load(path))))
print(growth(lambda: onnx.save(models[0], path)))
models.clear()
print(growth(lambda: models.append(onnxarchive.load(path))))
"""
    onnx_load, onnx_save, load = map(int, run_python(code, tmp_path / "m.onnxa").split())
    one = 24 * MIB  # copies of one tensor
    assert onnx_load < 2 * size + one
    assert onnx_save < 1.25 * size + one  # a buffer that grows
    assert load < size + one
