from __future__ import annotations

import os
import re
import resource
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import onnx
import pytest
from limits import limited
from models import (
    attribute,
    every_tensor,
    external,
    model_of,
    node,
    open_below,
    raw_tensor,
    string_tensor,
)
from onnx import StringStringEntryProto, TensorProto
from written import contents, converted, write_model, zipped

import onnxarchive
from onnxarchive import ArchiveFormatError
from onnxarchive.errors import quoted


def _loaded(path: Path) -> onnx.ModelProto:
    """The model of a source, converted and loaded, with all data in it."""
    target = path.parent / "loaded.onnxa"
    onnxarchive.convert(path, target, size_threshold=0, convert_attribute=True)
    assert onnxarchive.check(target, full=True) == []
    model = onnxarchive.load(target)
    target.unlink()
    return model


def _weights() -> onnx.ModelProto:
    """Initializers of 1.2 to 6 KiB and small ones, one of a packed type."""
    large = [raw_tensor(f"w{i}", dims=(300 * (i + 1),), seed=i) for i in range(5)]
    small = [raw_tensor("small", dims=(3,)), raw_tensor("int4", TensorProto.INT4, (4001,))]
    return model_of(*large, *small, string_tensor("labels"))


# Single files


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "an empty file"),
        (b"text, and no protobuf at all", "model"),
        (b"PK\x03\x04" + bytes(100), "model"),
        (onnx.ModelProto(ir_version=10).SerializeToString(), "no|none"),
        (_weights().SerializeToString()[:-1], "model"),
        (_weights().SerializeToString()[:3000], "model"),
        (_weights().SerializeToString() + b"\xff", "model"),
        (_weights().SerializeToString() * 2, "graph"),
    ],
    ids=["empty", "text", "zip", "no graph", "cut", "cut in weights", "one byte more", "twice"],
)
def test_a_file_that_is_no_model_is_refused_and_named(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(ArchiveFormatError, match=message) as caught:
        onnxarchive.convert(path, tmp_path / "m.onnxa")
    assert str(caught.value).startswith(f"{path}: ")
    assert os.listdir(tmp_path) == ["m.onnx"]


def test_a_pipe_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ArchiveFormatError, match="found a pipe"):
        onnxarchive.convert(tmp_path / "pipe", tmp_path / "m.onnxa")
    with pytest.raises(FileNotFoundError):
        onnxarchive.convert(tmp_path / "missing.onnx", tmp_path / "m.onnxa")


@pytest.mark.parametrize("change", ["segment", "type", "dims", "many dims"])
def test_a_large_tensor_that_cannot_be_external_is_converted_as_save_writes_it(
    tmp_path: Path, change: str
) -> None:
    # It holds its data itself. `save` leaves it in the model.
    tensor = raw_tensor("odd", dims=(600,))
    if change == "segment":
        tensor.segment.begin, tensor.segment.end = 0, 600
    elif change == "type":
        tensor.data_type = 99
    elif change == "dims":
        tensor.dims[:] = [-600]
    else:
        tensor.dims[:] = [1] * 65
    model = model_of(tensor, raw_tensor("w", dims=(600,)))
    onnxarchive.save(model, tmp_path / "saved.onnxa")
    path = write_model(tmp_path / "m.onnx", model)
    assert converted(path) == (tmp_path / "saved.onnxa").read_bytes()


@pytest.mark.parametrize("field", ["tensor name", "graph name", "doc_string"])
@pytest.mark.parametrize("count", [3, 300])
def test_text_that_is_not_utf_8_is_kept(tmp_path: Path, field: str, count: int) -> None:
    model = model_of(raw_tensor("MARK" if field == "tensor name" else "w", dims=(count,)))
    if field == "graph name":
        model.graph.name = "MARK"
    elif field == "doc_string":
        model.graph.doc_string = "MARK"
    serialized = model.SerializeToString().replace(b"MARK", b"M\xffRK")
    path = tmp_path / "m.onnx"
    path.write_bytes(serialized)
    onnxarchive.convert(path, tmp_path / "m.onnxa", size_threshold=0)
    loaded = onnxarchive.load(tmp_path / "m.onnxa")
    assert loaded.SerializeToString() == serialized


# External data


Layout: TypeAlias = Callable[[Path, onnx.ModelProto], object]


def _saved(**options: Any) -> Layout:
    """Writes a model as `onnx.save` does."""
    return lambda path, model: onnx.save(model, path, save_as_external_data=True, **options)


_a_file_a_tensor = _saved(all_tensors_to_one_file=False, size_threshold=0)


def _by_hand(
    path: Path,
    model: onnx.ModelProto,
    *,
    location: str = "weights.bin",
    offsets: bool = True,
    lengths: bool = True,
    basepath: bool = False,
) -> None:
    """Every tensor at a multiple of 16 bytes after some bytes that belong to none."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    data = b"some bytes that belong to nobody"
    for index, tensor in enumerate(every_tensor(copy)):
        if tensor.data_type == TensorProto.STRING:
            continue
        raw_data = tensor.raw_data
        name = location if offsets else f"{location}.{index}"
        data = data.ljust(-len(data) % 16 + len(data), b"\xaa") if offsets else b""
        pairs: dict[str, object] = {"offset": len(data)} if offsets else {}
        if lengths:
            pairs["length"] = len(raw_data)
        if basepath:
            pairs["basepath"] = "/somewhere/else"
        tensor.CopyFrom(external(tensor, name, **pairs))
        data += raw_data
        (path.parent / name).parent.mkdir(parents=True, exist_ok=True)
        (path.parent / name).write_bytes(data)
    write_model(path, copy)


def _behind_a_link(path: Path, model: onnx.ModelProto) -> None:
    _by_hand(path, model, location="real.bin")
    (path.parent / "link").symlink_to("real.bin")
    moved = onnx.load(path, load_external_data=False)
    for tensor in every_tensor(moved):
        for pair in tensor.external_data:
            if pair.key == "location":
                pair.value = "link"
    write_model(path, moved)


def _linked(path: Path, model: onnx.ModelProto) -> None:
    onnxarchive.save(model, path.with_suffix(".onnxa"))
    onnxarchive.link(path.with_suffix(".onnxa"), path)


LAYOUTS: dict[str, Layout] = {
    "one file": _saved(location="weights.bin", size_threshold=1024),
    "one file with everything": _saved(location="weights.bin", size_threshold=0),
    "a file a tensor": _a_file_a_tensor,
    "with attributes": _saved(location="w.bin", size_threshold=0, convert_attribute=True),
    "by hand": _by_hand,
    "without length": partial(_by_hand, lengths=False),
    "with location alone": partial(_by_hand, lengths=False, offsets=False),
    "in folders": partial(_by_hand, location="weights/of the/model.bin"),
    "in dotted folders": partial(_by_hand, location="./weights/./model.bin"),
    "with basepath": partial(_by_hand, basepath=True),
    "behind a link": _behind_a_link,
    "linked": _linked,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size_threshold", [0, 1024])
@pytest.mark.parametrize("convert_attribute", [False, True])
def test_a_model_gives_the_same_archive_wherever_its_data_is(
    tmp_path: Path, layout: str, size_threshold: int, convert_attribute: bool
) -> None:
    model = _weights()
    model.graph.node.append(node(attribute("t", t=raw_tensor("attribute", dims=(500,)))))
    options: dict[str, Any] = {"size_threshold": size_threshold}
    options["convert_attribute"] = convert_attribute
    expected = converted(write_model(tmp_path / "single" / "m.onnx", model), **options)
    (tmp_path / "other").mkdir()
    path = tmp_path / "other" / "m.onnx"
    copy = onnx.ModelProto()
    copy.CopyFrom(model)  # onnx.save changes what it is given
    LAYOUTS[layout](path, copy)
    assert onnx.load(path, load_external_data=False) != model
    assert _loaded(path) == model
    assert converted(path, **options) == expected
    onnxarchive.save(model, tmp_path / "saved.onnxa", **options)
    assert (tmp_path / "saved.onnxa").read_bytes() == expected


def test_only_metadata_of_links_is_dropped(tmp_path: Path) -> None:
    model = _weights()
    for key, value in (("a", "1"), ("onnxarchive.link", "2"), ("onnxarchive.links", "3")):
        model.metadata_props.add(key=key, value=value)
    loaded = _loaded(write_model(tmp_path / "m.onnx", model))
    del model.metadata_props[1]
    assert loaded == model


def test_a_source_is_found_by_links_and_relative_paths_and_its_data_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _by_hand(tmp_path / "there" / "m.onnx", _weights())
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "weights.bin").write_bytes(bytes(1 << 16))
    (tmp_path / "link").symlink_to("there", target_is_directory=True)
    for folder, source in (
        *(("here", name) for name in ("../there/m.onnx", "../link/m.onnx", "../link")),
        *(("there", name) for name in ("m.onnx", ".")),
    ):
        monkeypatch.chdir(tmp_path / folder)
        onnxarchive.convert(source, tmp_path / "m.onnxa")
        assert onnxarchive.load(tmp_path / "m.onnxa") == _weights()


def test_many_more_data_files_than_may_be_open_are_read(tmp_path: Path) -> None:
    model = model_of(*(raw_tensor(f"w{index}", dims=(300,)) for index in range(150)))
    _a_file_a_tensor(tmp_path / "m.onnx", onnx.ModelProto.FromString(model.SerializeToString()))
    with limited(resource.RLIMIT_NOFILE, 100):
        onnxarchive.convert(tmp_path / "m.onnx", tmp_path / "m.onnxa")
    assert onnxarchive.load(tmp_path / "m.onnxa") == model


# External data that is not there


def _problem(tmp_path: Path, *initializers: TensorProto) -> str:
    """What is said about a model in `tmp_path/models`; nothing is left behind."""
    path = write_model(tmp_path / "models" / "m.onnx", model_of(*initializers))
    before = sorted(os.listdir(path.parent))
    with pytest.raises(ArchiveFormatError) as caught:
        onnxarchive.convert(path, path.parent / "m.onnxa")
    assert caught.value.path == str(path)
    assert sorted(os.listdir(path.parent)) == before
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    return message


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A directory for a model, which holds data, and one beside it, which holds more."""
    for name in ("models", "secret"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data.bin").write_bytes(bytes(4096))
    return tmp_path / "models"


def _outside(location: str = "data.bin", **pairs: object) -> TensorProto:
    return external(raw_tensor("layer/w"), location, **pairs)


def _with(tensor: TensorProto, **fields: Any) -> TensorProto:
    tensor.MergeFrom(TensorProto(**fields))
    return tensor


# Pairs whose key or value is no text.
_BAD_LOCATION, _BAD_OFFSET, _BAD_KEY = map(
    StringStringEntryProto.FromString,
    [b"\x0a\x08location\x12\x02\xffx", b"\x0a\x06offset\x12\x02\xffx", b"\x0a\x02\xffx"],
)
_EXTERNAL: dict[str, Any] = {"name": "layer/w", "data_location": TensorProto.EXTERNAL}
_BOTH = "there is data beside data_location EXTERNAL, in raw_data; to store"
# Tensors, and what is said of each.
FAULTY: list[tuple[TensorProto, str]] = [
    (_outside(offset=4090), "offset 4090"),
    (_outside(offset=4096), "offset 4096"),
    (_outside(offset=4081, length=16), "offset 4081"),
    (_outside(offset=(1 << 63) - 1), "offset 9223372036854775807"),
    (_outside(offset=1 << 63, length=16), "offset 9223372036854775808"),
    (_outside(length=15), "found 15"),
    (_outside(length=17), "found 17"),
    (_outside(length=4096), "found 4096"),
    (_outside(offset="-1"), "'-1'"),
    (_outside(offset="1_6"), "'1_6'"),
    (_outside(length="sixteen"), "'sixteen'"),
    (_outside(compression="zlib"), "'compression'"),
    # Python takes a time that grows with the square of the folders to make it a real path.
    (_outside("a/" * 2500 + "data.bin"), "at most 4096 characters, found .*5008 characters"),
    (TensorProto(**_EXTERNAL, data_type=1, dims=[4], external_data=[_BAD_LOCATION]), ""),
    (_with(_outside(), external_data=[_BAD_OFFSET]), ""),
    (_with(_outside(), external_data=[_BAD_KEY]), ""),
    *(
        (_with(_outside(), data_type=number), f"data type {number}")
        for number in (0, TensorProto.STRING, 99)
    ),
    (external(TensorProto(name="layer/w", data_type=1, dims=[1 << 32] * 2), "data.bin"), "dims"),
    (_with(_outside(), raw_data=bytes(16)), _BOTH),
    (TensorProto(**_EXTERNAL, raw_data=b"1"), _BOTH),
    (external(raw_tensor("layer/w", TensorProto.BOOL, (2000,)), "ones.bin"), "found 255"),
]


@pytest.mark.parametrize(("tensor", "found"), FAULTY)
def test_a_tensor_whose_external_data_is_faulty_is_named(
    tmp_path: Path, models: Path, tensor: TensorProto, found: str
) -> None:
    (models / "ones.bin").write_bytes(b"\xff" * 4096)
    message = _problem(tmp_path, tensor)
    assert "'layer/w'" in message
    assert re.search(found, message)


def test_a_file_as_long_as_the_last_tensor_needs_is_long_enough(models: Path) -> None:
    tensor = external(raw_tensor("w"), "data.bin", offset=4080)
    assert len(converted(write_model(models / "m.onnx", model_of(tensor)))) > 0


def test_an_empty_tensor_may_lie_at_the_end_of_a_file_and_not_beyond(
    tmp_path: Path, models: Path
) -> None:
    (models / "empty.bin").write_bytes(b"")
    nothing = raw_tensor("nothing", dims=(0,))
    path = write_model(
        models / "m.onnx",
        model_of(
            external(nothing, "data.bin", offset=4096, length=0), external(nothing, "empty.bin")
        ),
    )
    onnxarchive.convert(path, models / "m.onnxa", size_threshold=0)
    assert onnxarchive.load(models / "m.onnxa") == model_of(nothing, nothing)
    assert "4097" in _problem(tmp_path, external(nothing, "data.bin", offset=4097))


@pytest.mark.parametrize(
    "location",
    [
        *("", "..", "../secret/data.bin", "a/../../secret/data.bin", "./../secret/data.bin"),
        *("a/../data.bin", "/etc/hostname", "//etc/hostname", "/", "C:\\data.bin", "C:data.bin"),
        *("C:/data.bin", "\\\\server\\share", "a\\data.bin", "..\\secret\\data.bin"),
        *("data.bin\0.txt", "\0", "{models}/data.bin"),
    ],
)
def test_data_outside_the_directory_of_the_model_is_refused(
    tmp_path: Path, models: Path, location: str
) -> None:
    # What is a path elsewhere may be a plain name on this system, and such a file be there.
    for folder in ("a", "C:"):
        (models / folder).mkdir()
        (models / folder / "data.bin").write_bytes(bytes(4096))
    for name in ("C:data.bin", "C:\\data.bin", "a\\data.bin", "..\\secret\\data.bin", "data.bin"):
        (models / name).write_bytes(bytes(4096))
    location = location.format(models=models)
    message = _problem(tmp_path, external(raw_tensor("layer/w"), location))
    assert "'layer/w'" in message
    assert quoted(location) in message


@pytest.mark.parametrize(
    "target", ["../secret/data.bin", "../models2/data.bin", "/etc/hostname", "../secret"]
)
def test_a_link_that_leaves_the_directory_is_refused_with_the_remedy(
    tmp_path: Path, models: Path, target: str
) -> None:
    shutil.copytree(models, tmp_path / "models2")
    (models / "link").symlink_to(target)
    location = "link/data.bin" if target == "../secret" else "link"
    message = _problem(tmp_path, external(raw_tensor("layer/w"), location))
    for part in ("'layer/w'", repr(location), os.path.realpath(models / location)):
        assert part in message
    assert "a copy of its target" in message


@pytest.mark.parametrize("location", [".", "folder", "pipe", "data.bin/x", "loop"])
def test_a_location_that_is_no_regular_file_is_refused(
    tmp_path: Path, models: Path, location: str
) -> None:
    (models / "folder").mkdir()
    os.mkfifo(models / "pipe")
    (models / "loop").symlink_to("loop")
    path = write_model(models / "m.onnx", model_of(external(raw_tensor("layer/w"), location)))
    with pytest.raises((ArchiveFormatError, OSError)) as caught:
        onnxarchive.convert(path, models / "m.onnxa")
    if isinstance(caught.value, ArchiveFormatError):
        assert "'layer/w'" in str(caught.value)
        assert repr(location) in str(caught.value)
    assert not (models / "m.onnxa").exists()
    assert tmp_path.exists()


def test_faults_of_a_thousand_tensors_are_counted(tmp_path: Path, models: Path) -> None:
    tensors = [external(raw_tensor(f"w{index}"), "data.bin", length=15) for index in range(1000)]
    message = _problem(tmp_path, *tensors)
    assert "1,000 tensors (" in message
    for tensor in tensors:
        tensor.dims[:] = [5]
        tensor.external_data[1].value = tensor.name[1:]
    lines = _problem(tmp_path, *tensors).splitlines()
    assert "998 tensors have faulty data" in lines[0]
    assert len(lines) == 22
    assert lines[-1] == "  and 978 more faults"


def test_converting_a_source_leaves_no_file_open(tmp_path: Path) -> None:
    _a_file_a_tensor(tmp_path / "m.onnx", _weights())
    onnxarchive.convert(tmp_path / "m.onnx", tmp_path / "m.onnxa")
    assert open_below(tmp_path) == []
    (tmp_path / "w0").unlink()
    with pytest.raises(ArchiveFormatError, match="'w0'"):
        onnxarchive.convert(tmp_path / "m.onnx", tmp_path / "m.onnxa")
    assert open_below(tmp_path) == []


# Directories, zips and archives


@pytest.mark.parametrize("kind", ["directory", "zip"])
@pytest.mark.parametrize(
    "names",
    [[], ["a.onnx", "b.onnx"], ["a.onnx", "__MODEL_PROTO"], ["a/m.onnx", "b/m.onnx"]],
    ids=["none", "two", "both", "in folders"],
)
def test_a_source_with_no_or_several_models_is_refused(
    tmp_path: Path, kind: str, names: list[str]
) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "weights.bin").write_bytes(b"x")
    for name in names:
        write_model(tmp_path / "source" / name, _weights())
    source = tmp_path / "source"
    if kind == "zip":
        source = zipped(tmp_path / "m.zip", contents(source))
    fault = "expected one model" if names else "there is no model"
    with pytest.raises(ValueError, match=rf"{fault} \(__MODEL_PROTO or") as caught:
        onnxarchive.convert(source, tmp_path / "m.onnxa")
    assert str(caught.value).startswith(f"{source}: ")
    # A directory with several models is no faulty file.
    is_choice = kind == "directory" and names != []
    assert isinstance(caught.value, ArchiveFormatError) != is_choice
    for name in names:
        assert name in str(caught.value)
    assert not (tmp_path / "m.onnxa").exists()


@pytest.mark.parametrize(
    ("kind", "name"),
    [("directory", "A"), ("directory", "A/b"), ("zip", "A"), ("zip", "A/b"), ("zip", "a/b")],
)
def test_assets_that_no_archive_may_have_beside_one_another_are_refused(
    tmp_path: Path, kind: str, name: str
) -> None:
    files = {"m.onnx": _weights().SerializeToString(), "assets/a": b"", f"assets/{name}": b""}
    source = zipped(tmp_path / "m.zip", files)
    if kind == "directory":
        shutil.unpack_archive(source, tmp_path / "source")
        source = tmp_path / "source"
        if len(list((source / "assets").iterdir())) < 2:
            pytest.skip("the file system does not tell cases apart")
    with pytest.raises(ArchiveFormatError) as caught:
        onnxarchive.convert(source, tmp_path / "m.onnxa")
    assert caught.value.path == str(source)
    assert f"'assets/{name}'" in str(caught.value)
