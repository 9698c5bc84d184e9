"""Bytes near the end of an archive that read as an end record: no writer completes it (ZIP-16)."""

from __future__ import annotations

import contextlib
import io
import os
import struct
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from edits import added, change_model, changed, documented, replace_model, replace_tensor
from models import attribute, model_of, node, raw_tensor
from onnx import TensorProto
from written import saved

import onnxarchive
from onnxarchive import ArchiveFormatError, Writer

SEARCHED = 65_633
RECORDS = {
    "end record": struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, 47, 0, 0),
    "Zip64 locator": struct.pack("<4sIQI", b"PK\6\7", 0, 1 << 40, 1),
    "locator before an end record": b"PK\6\7".ljust(20, b"?") + b"PK\5\6",
    "Zip64 end record": struct.pack("<4sQ", b"PK\6\6", 44),
}
BEHIND = b"\xff" * 100  # zeros after a signature would read as an end record, too
SIGNATURES = (b"PK\5\6", b"PK\6\6", b"PK\6\7")
CLEAN = model_of(raw_tensor("w", dims=(300,), seed=1))
each_record = pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS.keys())


def bytes_tensor(name: str, data: bytes) -> TensorProto:
    return TensorProto(name=name, data_type=TensorProto.UINT8, dims=[len(data)], raw_data=data)


def outside(record: bytes) -> onnx.ModelProto:
    """A model of which a tensor that is stored outside holds these bytes."""
    return model_of(bytes_tensor("bad", bytes(2000) + record + BEHIND))


def inside(record: bytes) -> onnx.ModelProto:
    """A model that holds these bytes itself."""
    return model_of(bytes_tensor("bad", record + BEHIND))


@contextlib.contextmanager
def refused(path: Path, entry: str | None) -> Iterator[None]:
    """Requires that a block is refused for an entry, and that nothing beside it has changed."""
    before = {it: it.read_bytes() for it in path.parent.iterdir()}
    with pytest.raises(ArchiveFormatError) as caught:
        yield
    assert caught.value.rule == "ZIP-16"
    assert caught.value.entry == entry
    assert "there is a false end record" in str(caught.value)
    assert {it: it.read_bytes() for it in path.parent.iterdir()} == before


# Refused


@each_record
def test_save_refuses_a_false_end_record_and_names_the_entry(path: Path, record: bytes) -> None:
    for is_there in (False, True):
        if is_there:
            onnxarchive.save(CLEAN, path)
        with refused(path, "bad"):
            onnxarchive.save(outside(record), path)
        with refused(path, "__MODEL_PROTO"):
            onnxarchive.save(inside(record), path)
        with refused(path, "assets/dir/x"):
            onnxarchive.save(CLEAN, path, assets={"dir/x": record})
        with refused(path, "__MODEL_PROTO_decoder"):
            onnxarchive.save(CLEAN, path, models={"decoder": inside(record)})
        with refused(path, "bad"):
            onnxarchive.save(CLEAN, path, models={"decoder": outside(record)}, jobs=4)


@each_record
def test_a_writer_refuses_a_false_end_record_and_leaves_nothing(path: Path, record: bytes) -> None:
    with refused(path, "bad"), Writer(path) as writer:
        writer.add("bad", np.frombuffer(record, np.uint8))
        writer.finish(CLEAN)
    with refused(path, "assets/x"), Writer(path) as writer:
        writer.add_asset("x", record)
        writer.finish(CLEAN)
    with refused(path, "__MODEL_PROTO_decoder"), Writer(path) as writer:
        writer.finish(CLEAN, {"decoder": inside(record)})


@each_record
def test_convert_refuses_a_false_end_record(path: Path, record: bytes) -> None:
    source = path.with_name("m.onnx")
    for model, entry in ((outside(record), "bad"), (inside(record), "__MODEL_PROTO")):
        source.write_bytes(model.SerializeToString())
        with refused(path, entry):
            onnxarchive.convert(source, path)
    source.write_bytes(CLEAN.SerializeToString())
    with refused(path, "assets/x"):
        onnxarchive.convert(source, path, assets={"x": record})


@each_record
def test_an_edit_refuses_a_false_end_record_and_changes_nothing(
    path: Path, record: bytes, way: dict[str, Any]
) -> None:
    onnxarchive.save(changed(CLEAN, added("bytes", 2000)), path, models={"decoder": CLEAN})
    bad = changed(CLEAN, added("bytes", 2000))
    bad.graph.initializer.append(outside(record).graph.initializer[0])
    with refused(path, "bad"):
        replace_model(path, bad, **way)
    with refused(path, "__MODEL_PROTO_decoder"):
        with_record = changed(CLEAN)
        with_record.graph.initializer.extend(inside(record).graph.initializer)
        replace_model(path, with_record, name="decoder", **way)
    with refused(path, "__MODEL_PROTO"):
        change_model(path, _holding(record), **way)
    with refused(path, "__MODEL_PROTO"):
        change_model(path, _holding(record), compact=True, **way)
    elements = np.frombuffer(record.ljust(2000, b"\0"), np.uint8)
    with refused(path, "bytes"):
        replace_tensor(path, "bytes", elements, **way)
    assert os.listdir(path.parent) == [path.name]
    assert onnxarchive.check(path, full=True) == []


def _holding(record: bytes) -> Callable[[onnx.ModelProto], onnx.ModelProto]:
    def change(model: onnx.ModelProto) -> onnx.ModelProto:
        held = bytes_tensor("t", record + BEHIND)
        model.graph.node.append(node(attribute("t", t=held)))
        return model

    return change


def test_a_shorter_model_that_brings_a_false_end_record_near_the_end_is_refused(
    path: Path, way: dict[str, Any]
) -> None:
    record = RECORDS["end record"]
    long = changed(outside(record), documented("x" * 70_000))
    onnxarchive.save(long, path)
    before = path.read_bytes()
    with pytest.raises(ArchiveFormatError, match="there is a false end record") as caught:
        replace_model(path, outside(record), **way)
    assert (caught.value.rule, caught.value.entry) == ("ZIP-16", "bad")
    assert path.read_bytes() == before
    replace_model(path, changed(long, documented("y" * 70_000)), **way)
    assert onnxarchive.check(path, full=True) == []


@each_record
def test_an_archive_with_a_false_end_record_is_not_completed_in_a_pipe(record: bytes) -> None:
    reading, writing = os.pipe()
    received = io.BytesIO()

    def receive() -> None:
        with open(reading, "rb") as pipe:
            received.write(pipe.read())

    reader = threading.Thread(target=receive)
    reader.start()
    error = r"entry 'bad': .*there is a false end record"
    with open(writing, "wb") as pipe, pytest.raises(ArchiveFormatError, match=error):
        onnxarchive.save(outside(record), pipe)
    reader.join()
    assert received.getvalue()  # what was written before its end was known


# Allowed


@pytest.mark.parametrize("distance", [SEARCHED, SEARCHED + 1])
def test_a_false_end_record_may_be_where_no_reader_searches(path: Path, distance: int) -> None:
    record = RECORDS["end record"]
    behind = len(saved(model_of(bytes_tensor("t", bytes(1 << 17))))) - 64 - (1 << 17)
    rest = distance - behind - len(record)
    data = bytes((1 << 17) - rest - len(record)) + record + bytes(rest)
    if distance == SEARCHED:
        with refused(path, "t"):
            onnxarchive.save(model_of(bytes_tensor("t", data)), path)
    else:
        onnxarchive.save(model_of(bytes_tensor("t", data)), path)
        assert onnxarchive.check(path, full=True) == []
        assert path.read_bytes().index(record) == path.stat().st_size - distance


def test_bare_signatures_are_saved_everywhere(path: Path, way: dict[str, Any]) -> None:
    full = b"".join(SIGNATURES) * 1000
    model = model_of(bytes_tensor("w", full), bytes_tensor("small", full[:120]))
    model.doc_string = (full[:1200]).decode()
    model.graph.node.append(node(attribute("t", t=bytes_tensor("t", full))))
    for name in ("PK\5\6", "PK\6\7"):
        model.metadata_props.add(key=name, value=name * 5)
    onnxarchive.save(model, path, models={"pk": model}, assets={"PK": full})
    assert onnxarchive.check(path, full=True) == []
    replace_model(path, changed(model, added("n")), name="other", **way)
    replace_tensor(path, "w", np.frombuffer(full[4:] + full[:4], np.uint8), **way)
    assert onnxarchive.check(path, full=True) == []
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    with Writer(path) as writer:
        writer.add("v", np.frombuffer(full, np.uint8))
        writer.add_asset("x", full)
        writer.finish(CLEAN)
    assert onnxarchive.check(path, full=True) == []


@each_record
def test_all_but_one_byte_of_a_false_end_record_is_saved(record: bytes) -> None:
    found = 0
    for at in range(len(record)):
        changed_record = bytearray(record)
        changed_record[at] ^= 0xFF
        try:
            saved(outside(bytes(changed_record)))
            found += 1
        except ArchiveFormatError:  # a byte that says nothing
            assert at >= 4
    assert found >= 8


# Offsets


@pytest.mark.large
@pytest.mark.parametrize(
    ("signature", "is_held"),
    [(0x06054B50, False), (0x06064B50, False), (0x07064B50, False), (0x07064B50, True)],
    ids=["a tensor", "a tensor, Zip64", "a tensor, a locator", "the model, a locator"],
)
def test_an_entry_that_would_end_at_a_signature_gets_a_larger_alignment(
    path: Path, signature: int, is_held: bool
) -> None:
    """At its end another header or the directory begins, which adm-zip takes for an end record."""

    def save(nbytes: int) -> int:
        """Saves a tensor of this size, alone in an entry or in the model; gives the entry's end."""
        model = model_of(bytes_tensor("w", bytes(nbytes)))
        onnxarchive.save(model, path, size_threshold=1 << 40 if is_held else 0)
        assert onnxarchive.check(path) == []
        with onnxarchive.open(path) as archive:
            first = next(iter(archive.entries.values()))
            assert first.data_offset in (64, 128)
            assert (first.data_offset == 128) == (
                first.data_offset + first.nbytes == signature + 64
            )
            return first.data_offset + first.nbytes

    nbytes = signature - 100
    nbytes += signature - 64 - save(nbytes)  # as if the data still began at 64
    assert save(nbytes) == signature - 64
    assert save(nbytes + 64) == signature + 64
    assert save(nbytes + 65) == signature + 1
    with zipfile.ZipFile(path) as zipped:
        assert zipped.testzip() is None
