"""Archives converted to archives: written anew, with other options."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import onnx
import pytest
from google.protobuf.message import Message
from models import entry_of, external, flip_byte, mixed_model, model_of, raw_tensor
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto
from opened_files import count_opens
from written import contents, converted, saved, zipped

import onnxarchive
from onnxarchive import ArchiveFormatError, ChecksumError, LockedError
from onnxarchive.errors import Report
from onnxarchive.files import locking
from onnxarchive.files.data import crc32
from onnxarchive.model.wire import LEN, tag_of, varint
from onnxarchive.reading.contents import Contents
from onnxarchive.zipformat.writer import ZipWriter

ASSETS = {"labels.txt": b"cat\n", "größe/日本.json": b"{}" * 1000, "empty": b""}


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    onnxarchive.save(mixed_model(), tmp_path / "m.onnxa", assets=ASSETS)
    return tmp_path / "m.onnxa"


def test_converting_with_other_options_and_back_gives_the_same_bytes(archive: Path) -> None:
    other = archive.parent / "other.onnxa"
    onnxarchive.convert(archive, other, alignment=4096, size_threshold=0, convert_attribute=True)
    assert converted(other) == archive.read_bytes()


def test_an_archive_is_not_written_over_itself(archive: Path) -> None:
    before = archive.read_bytes()
    link = archive.parent / "link.onnxa"
    link.symlink_to(archive.name)
    for path in (archive, link):
        with pytest.raises(ValueError, match="input"):
            onnxarchive.convert(archive, path)
    assert archive.read_bytes() == before


def test_an_archive_is_recognised_whatever_its_suffix(archive: Path) -> None:
    before = archive.read_bytes()
    assert converted(archive.rename(archive.with_suffix(".onnx"))) == before


@pytest.mark.parametrize("name", ["a_w", "assets/labels.txt", "__MODEL_PROTO"])
def test_damaged_bytes_of_an_archive_are_not_converted(archive: Path, name: str) -> None:
    entry = entry_of(archive, name)
    flip_byte(archive, entry.data_offset + entry.nbytes // 2)
    with pytest.raises(ChecksumError, match=name) as caught:
        onnxarchive.convert(archive, archive.parent / "new.onnxa")
    assert str(caught.value).startswith(f"{archive}: ")
    assert list(archive.parent.iterdir()) == [archive]


# Sound zips that break a rule of archives, which converting mends or refuses


def _write(path: Path, entries: Mapping[str, bytes]) -> Path:
    with open(path, "wb") as file:
        writer = ZipWriter(file, alignment=64)
        for name, content in entries.items():
            writer.add(name, len(content), crc32(content), [content])
        writer.finish()
    return path


W, V = raw_tensor("w", dims=(600,)), raw_tensor("v", dims=(600,))


def _entries(*tensors: TensorProto, **content: bytes) -> dict[str, bytes]:
    return {**content, "__MODEL_PROTO": model_of(*tensors).SerializeToString()}


@pytest.mark.parametrize("count", [2000, 2 << 20], ids=["small", "large"])
def test_elements_that_break_a_rule_are_not_converted(tmp_path: Path, count: int) -> None:
    mask = TensorProto(name="w", data_type=TensorProto.BOOL, dims=[count])
    path = _write(tmp_path / "m.onnxa", _entries(external(mask, "w"), w=b"\2" * count))
    with pytest.raises(ArchiveFormatError, match="found 2") as caught:
        onnxarchive.convert(path, tmp_path / "new.onnxa", jobs=1)
    assert (caught.value.rule, caught.value.entry) == ("TENSOR-5", "w")
    assert list(tmp_path.iterdir()) == [path]


def test_checksums_of_tensors_are_compared_if_asked_for(tmp_path: Path) -> None:
    tensor = external(W, "w", checksum="0" * 40)
    path = _write(tmp_path / "m.onnxa", _entries(tensor, w=W.raw_data))
    assert converted(path) == saved(model_of(W))
    with pytest.raises(ChecksumError, match="expected SHA-1 0000") as caught:
        onnxarchive.convert(path, tmp_path / "new.onnxa", verify_checksum=True)
    assert (caught.value.rule, caught.value.entry) == ("DATA-6", "w")


def _field(message: type[Message], name: str, content: bytes) -> bytes:
    return varint(tag_of(message.DESCRIPTOR, name, LEN)) + varint(len(content)) + content


def test_a_tensor_in_two_halves_which_protobuf_merges_is_exported(tmp_path: Path) -> None:
    shape = TensorProto(name=W.name, data_type=W.data_type, dims=W.dims)
    place = TensorProto(data_location=TensorProto.EXTERNAL)
    place.external_data.add(key="location", value="w")
    halves = [
        AttributeProto(name="value", type=AttributeProto.TENSOR, t=shape),
        AttributeProto(t=place),
    ]
    attribute = b"".join(half.SerializeToString() for half in halves)
    node = NodeProto(op_type="Constant", output=["y"]).SerializeToString()
    node += _field(NodeProto, "attribute", attribute)
    model = ModelProto(ir_version=10).SerializeToString()
    model += _field(ModelProto, "graph", _field(GraphProto, "node", node))
    path = _write(tmp_path / "m.onnxa", {"w": W.raw_data, "__MODEL_PROTO": model})
    onnxarchive.export(path, tmp_path / "m.onnx")
    exported = onnx.load(tmp_path / "m.onnx").graph.node[0].attribute[0].t
    assert exported == W


BROKEN = {
    "an entry that no tensor names": (
        [W],
        _entries(external(W, "w"), w=W.raw_data, orphan=b"data"),
    ),
    "an entry of two tensors": ([W, V], _entries(external(W, "w"), external(V, "w"), w=W.raw_data)),
    "a model that is not last": ([W], {**_entries(external(W, "w")), "w": W.raw_data}),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_an_archive_that_breaks_a_rule_is_converted_to_a_valid_one(
    tmp_path: Path, kind: str
) -> None:
    tensors, entries = BROKEN[kind]
    path = _write(tmp_path / "m.onnxa", entries)
    assert onnxarchive.check(path) != []
    is_told = kind == "an entry that no tensor names"
    with pytest.warns(UserWarning, match="orphan") if is_told else nullcontext():
        assert converted(path) == saved(model_of(*tensors))


def test_an_archive_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    path = _write(tmp_path / "m.onnxa", _entries(W, external(V, "v")))
    with pytest.raises(ArchiveFormatError, match="'v'"):
        onnxarchive.convert(path, tmp_path / "new.onnxa")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("count", [2000, 300_000], ids=["small", "large"])
def test_a_damaged_tensor_does_not_go_into_the_model(tmp_path: Path, count: int) -> None:
    path = tmp_path / "m.onnxa"
    onnxarchive.save(model_of(raw_tensor("w", dims=(count,), seed=1)), path)
    flip_byte(path, entry_of(path, "w").data_offset + count)
    with pytest.raises(ChecksumError, match=r"m\.onnxa: entry 'w': expected \d+ bytes with CRC-32"):
        onnxarchive.convert(path, tmp_path / "other.onnxa", size_threshold=1 << 30)
    assert sorted(it.name for it in tmp_path.iterdir()) == ["m.onnxa"]


def test_a_source_is_locked_while_convert_finds_out_whether_it_is_an_archive(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = Contents.check_header
    tried: list[int] = []

    def check_locked(archived: Contents, number: int, report: Report) -> int | None:
        with pytest.raises(LockedError), onnxarchive.edit(archive, timeout=0):
            pass
        tried.append(number)
        return check(archived, number, report)

    monkeypatch.setattr(Contents, "check_header", check_locked)
    onnxarchive.convert(archive, tmp_path / "converted.onnxa")
    assert 0 in tried


@pytest.mark.parametrize("is_archive", [True, False], ids=["an archive", "a zip"])
def test_a_local_source_is_opened_once(archive: Path, tmp_path: Path, is_archive: bool) -> None:
    source = archive
    if not is_archive:
        onnxarchive.extract(archive, tmp_path / "unzipped")
        source = zipped(tmp_path / "other.zip", contents(tmp_path / "unzipped"))
    target = tmp_path / "converted.onnxa"
    assert count_opens(source, lambda: onnxarchive.convert(source, target)) == 1
    assert target.read_bytes() == archive.read_bytes()


def test_an_archive_that_replaces_the_source_before_it_is_locked_is_converted(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = locking.shared
    other = tmp_path / "other.onnxa"
    onnxarchive.save(model_of(raw_tensor("w")), other)
    expected = other.read_bytes()

    def late(descriptor: int, timeout: float | None) -> AbstractContextManager[object]:
        if other.exists():
            other.replace(archive)
        return lock(descriptor, timeout)

    monkeypatch.setattr(locking, "shared", late)
    assert converted(archive) == expected
