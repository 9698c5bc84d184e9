from __future__ import annotations

import hashlib
import io
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import onnx
import pytest
from findings import states_fault
from hypothesis import HealthCheck, given, settings, strategies as st
from models import (
    entry_of,
    external,
    flip_byte,
    full_model,
    model_of,
    open_below,
    raw_tensor,
    typed,
)
from onnx import TensorProto
from opened_files import count_opens
from outcomes import count_outcome, requires_outcomes
from zip_entries import add_bytes

import onnxarchive
from onnxarchive import ArchiveFormatError, ChecksumError, Finding
from onnxarchive.reading.check import rules
from onnxarchive.zipformat import layout
from onnxarchive.zipformat.writer import ZipWriter

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


def _found(path: Path, *, full: bool = True) -> list[str]:
    """The rules that `check` finds broken; it must agree with opening the archive."""
    findings = onnxarchive.check(path, full=full)
    broken = []
    for finding in findings:
        assert finding.rule is not None
        assert finding.rule in rules()
        broken.append(finding.rule)
        assert states_fault(finding.message), finding.message
    # Header and CRC-32 of the model are looked at on opening, too.
    refused = {
        rule
        for rule, finding in zip(broken, findings, strict=True)
        if rules()[rule].seen == "open" or finding.entry == "__MODEL_PROTO"
    }
    try:
        onnxarchive.open(path).close()
    except ArchiveFormatError as error:
        assert error.rule in refused
    else:
        assert not refused
    return broken


# The archives to be damaged


def _two_tensors() -> onnx.ModelProto:
    weight = raw_tensor("w", dims=(300,), seed=1)
    return model_of(weight, raw_tensor("v", TensorProto.INT4, (2101,), seed=2))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnxa"
    onnxarchive.save(_two_tensors(), path, assets={"a/b": b"cat"})
    return path


class _Bytes:
    """An archive's bytes and where its records are; found without the library's reader."""

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)
        self.end = len(data) - 22
        assert self.data[self.end : self.end + 4] == b"PK\x05\x06"
        count, size, self.directory = struct.unpack_from("<HII", data, self.end + 10)
        assert self.directory + size == self.end
        self.records: dict[str, int] = {}
        self.headers: dict[str, int] = {}
        offset = self.directory
        for _ in range(count):
            assert data[offset : offset + 4] == b"PK\x01\x02"
            lengths = struct.unpack_from("<3H", data, offset + 28)
            name = data[offset + 46 : offset + 46 + lengths[0]].decode()
            self.records[name] = offset
            (self.headers[name],) = struct.unpack_from("<I", data, offset + 42)
            offset += 46 + sum(lengths)

    def put(self, offset: int, form: str, *values: int) -> None:
        struct.pack_into(form, self.data, offset, *values)

    def insert(self, offset: int, content: bytes) -> None:
        """Inserts into the directory, whose size the end record states."""
        self.data[offset:offset] = content
        self.end += len(content)
        self.put(self.end + 12, "<I", self.end - self.directory)


@pytest.mark.parametrize("prefix_nbytes", [0, 10])
def test_an_archive_without_entries_is_found_to_have_no_model_and_no_prefix(
    tmp_path: Path, prefix_nbytes: int
) -> None:
    path = tmp_path / "m.onnxa"
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 0, 0, 0, prefix_nbytes, 0)
    path.write_bytes(b"x" * prefix_nbytes + end)
    prefix = "ZIP-6: there are no entries, but bytes before the directory at offset 10"
    no_model = "MODEL-1: expected __MODEL_PROTO as the last entry, found no entry"
    found = [str(finding) for finding in onnxarchive.check(path, full=True)]
    assert found == ([prefix, no_model] if prefix_nbytes else [no_model])


def test_every_entry_that_overlaps_one_earlier_entry_is_found(path: Path) -> None:
    it = _Bytes(path.read_bytes())
    end = 2560
    assert it.headers["assets/a/b"] < it.headers["__MODEL_PROTO"] < end < it.directory
    it.put(it.records["w"] + 20, "<2I", end - 64, end - 64)
    it.put(it.records["v"] + 42, "<I", end)
    path.write_bytes(it.data)
    overlaps = [
        (finding.entry, finding.message)
        for finding in onnxarchive.check(path)
        if "after the entries before it" in finding.message
    ]
    assert overlaps == [
        (
            name,
            f"expected its local header at offset {end} or later, after the entries before it, "
            f"found {it.headers[name]}",
        )
        for name in ("assets/a/b", "__MODEL_PROTO")
    ]


@pytest.mark.parametrize(("missing", "number"), [("w", 1), ("v", 2), ("__MODEL_PROTO", 4)])
def test_the_first_record_that_is_missing_is_found_by_number_and_offset(
    path: Path, missing: str, number: int
) -> None:
    it = _Bytes(path.read_bytes())
    it.put(it.records[missing], "<I", 0)
    path.write_bytes(it.data)
    found = [str(finding) for finding in onnxarchive.check(path) if finding.rule == "ZIP-4"]
    assert found == [
        f"ZIP-4: there is no directory record at offset {it.records[missing]}, where record "
        f"{number} of 4 should be"
    ]


# Archives that no byte of a sound one leads to


def _write(path: Path, model: onnx.ModelProto | bytes, **entries: bytes) -> Path:
    """Writes any entries and a model, also what `ZipWriter` refuses."""
    unchecked = patch("onnxarchive.zipformat.writer.end_records.check_false_ends")
    with open(path, "wb") as file, unchecked:
        target = ZipWriter(file)
        for name, data in entries.items():
            add_bytes(target, name, data)
        serialized = model if isinstance(model, bytes) else model.SerializeToString()
        add_bytes(target, "__MODEL_PROTO", serialized)
        target.finish()
    return path


def _referring(tensor: TensorProto | None = None, **pairs: object) -> onnx.ModelProto:
    return model_of(external(tensor or raw_tensor("w"), "w", **pairs))


BOOLS = raw_tensor("w", TensorProto.BOOL, (16,))
ODD = raw_tensor("w", TensorProto.INT4, (31,))
SHA1 = hashlib.sha1(b"x" * 16).hexdigest()

# Rules about the data of `w`, the data, and the model. The vectors break the other rules.
DATA: list[tuple[list[str], bytes, onnx.ModelProto]] = [
    ([], bytes(16), _referring(offset=0, length=16)),
    ([], b"x" * 16, _referring(checksum=SHA1)),
    ([], b"\0\1" * 8, _referring(BOOLS)),
    ([], b"\xff" * 15 + b"\x0f", _referring(ODD)),
    (["DATA-6"], bytes(16), _referring(checksum="0" * 40)),
    (["DATA-6"], b"x" * 16, _referring(checksum=SHA1.upper())),
    (["DATA-6"], bytes(16), _referring(checksum="")),
    (["TENSOR-4"], b"\xff" * 16, _referring(ODD)),
    (["TENSOR-5"], bytes(15) + b"\2", _referring(BOOLS)),
]


@pytest.mark.parametrize(("expected", "data", "model"), DATA)
def test_data_breaks_only_its_own_rule_and_is_refused_by_verify(
    path: Path, expected: list[str], data: bytes, model: onnx.ModelProto
) -> None:
    _write(path, model, w=data)
    assert _found(path) == expected
    assert _found(path, full=False) == []
    with onnxarchive.open(path) as archive:
        if not expected:
            archive.verify()
            return
        with pytest.raises(ArchiveFormatError) as caught:
            archive.verify()
    assert ([caught.value.rule], caught.value.entry) == (expected, "w")
    assert caught.value.path == str(path)
    assert isinstance(caught.value, ChecksumError) == (expected == ["DATA-6"])


def _write_model_of_2_gib(path: Path, header: bytes | None = None) -> None:
    """An archive of a model alone, all zeros, which is a hole in the file."""
    placement = layout.EntryLayout(b"__MODEL_PROTO", 1 << 31, 0, 0)
    local_header, record = placement.pack()
    with open(path, "wb") as file:
        file.write(header or local_header)
        file.seek(placement.end)
        file.write(record + layout.end_of_archive(1, len(record), placement.end))


def test_a_model_of_two_gib_breaks_a_rule_and_is_not_read(path: Path) -> None:
    _write_model_of_2_gib(path)
    assert _found(path, full=False) == ["MODEL-2"]
    with pytest.raises(ArchiveFormatError, match=r"at most 2147483647 bytes.*\[MODEL-2\]"):
        onnxarchive.open(path, max_model_nbytes=10)


def test_a_model_of_more_bytes_than_the_caller_allows_is_refused_and_not_read(path: Path) -> None:
    nbytes = entry_of(path, "__MODEL_PROTO").nbytes
    onnxarchive.open(path, max_model_nbytes=nbytes).close()
    assert onnxarchive.check(path, max_model_nbytes=nbytes) == []
    message = rf"at most {nbytes - 1} bytes in all \(max_model_nbytes\), found {nbytes} bytes"
    with pytest.raises(ArchiveFormatError, match=message):
        onnxarchive.open(path, max_model_nbytes=nbytes - 1)
    (finding,) = onnxarchive.check(path, max_model_nbytes=nbytes - 1)
    assert finding.rule == "MODEL-2"


def test_the_header_of_a_model_is_compared_whatever_else_is_wrong_with_it(path: Path) -> None:
    _write_model_of_2_gib(path, b"no")
    assert set(_found(path, full=False)) == {"MODEL-2", "ZIP-7"}


# Results of check


def test_a_sound_archive_breaks_no_rule(path: Path) -> None:
    choices: list[dict[str, Any]] = [
        {},
        {"size_threshold": 0, "convert_attribute": True},
        {"alignment": 4096},
    ]
    for options in choices:
        for model in (full_model(), model_of(), _two_tensors(), model_of(typed(raw_tensor("w")))):
            onnxarchive.save(model, path, assets={"a/b": b"", "ü": b"x"}, **options)
            assert onnxarchive.check(path) == []
            assert onnxarchive.check(path, full=True) == []


def test_every_broken_rule_is_found_and_not_only_the_first(path: Path) -> None:
    it = _Bytes(path.read_bytes())
    it.put(it.records["v"] + 34, "<H", 1)  # disk
    it.put(it.headers["w"] + 10, "<H", 5)  # time
    it.data[it.headers["v"] - 1] ^= 1  # data of w
    it.put(it.headers["assets/a/b"], "<I", 0)  # signature
    path.write_bytes(it.data)
    found = [(finding.rule, finding.entry) for finding in onnxarchive.check(path, full=True)]
    assert found == [
        ("ZIP-3", "v"),
        ("ZIP-7", "w"),
        ("ZIP-7", "assets/a/b"),
        ("ZIP-15", "w"),
    ]
    assert len(onnxarchive.check(path)) == 3


def test_data_is_read_only_with_full(path: Path) -> None:
    entry = entry_of(path, "w")
    flip_byte(path, entry.data_offset + 600)
    assert onnxarchive.check(path) == []
    (finding,) = onnxarchive.check(path, full=True)
    assert (finding.rule, finding.entry) == ("ZIP-15", "w")
    assert f"{entry.crc32:#010x}" in finding.message
    with onnxarchive.open(path) as archive, pytest.raises(ChecksumError):
        archive.verify()


@pytest.mark.parametrize("full", [False, True])
def test_a_local_archive_is_opened_once(path: Path, full: bool) -> None:
    assert count_opens(path, lambda: onnxarchive.check(path, full=full)) == 1


def test_a_finding_can_be_printed_compared_and_put_in_a_set() -> None:
    finding = Finding("ZIP-15", "w", "expected this, found that")
    assert str(finding) == "ZIP-15: entry 'w': expected this, found that"
    assert str(Finding("ZIP-2", None, "expected this")) == "ZIP-2: expected this"
    assert {finding, Finding("ZIP-15", "w", "expected this, found that")} == {finding}


def test_several_threads_find_what_one_finds_in_the_order_of_the_file(path: Path) -> None:
    tensors = [raw_tensor(f"w{number}", dims=(1 << 17,), seed=number) for number in range(8)]
    onnxarchive.save(model_of(*tensors), path, assets={})
    with onnxarchive.open(path) as archive:
        offsets = [entry.data_offset for entry in archive.entries.values()]
    for offset in offsets[:8:2]:
        flip_byte(path, offset + 77)
    found = onnxarchive.check(path, full=True, jobs=1)
    assert [finding.entry for finding in found] == ["w0", "w2", "w4", "w6"]
    for jobs in (2, 3, 64, None):
        assert onnxarchive.check(path, full=True, jobs=jobs) == found


def test_checking_reports_its_progress(path: Path) -> None:
    onnxarchive.save(_two_tensors(), path, assets={"large": bytes(20 * MIB)})
    calls: list[tuple[int, int]] = []
    onnxarchive.check(path, full=True, progress=lambda *call: calls.append(call))
    with onnxarchive.open(path) as archive:
        total = sum(entry.nbytes for entry in archive.entries.values())
    done = [call[0] for call in calls]
    assert (done[-1], {call[1] for call in calls}) == (total, {total})
    assert done == sorted(set(done))
    assert len(done) >= 6
    onnxarchive.check(path, progress=lambda *call: pytest.fail("nothing is read"))


def test_checking_leaves_nothing_open(path: Path) -> None:
    for data in (path.read_bytes(), b"text"):
        path.write_bytes(data)
        onnxarchive.check(path, full=True)
        assert open_below(path.parent) == []


# Any bytes


def _sound_archives() -> list[bytes]:
    found = []
    tensors = [raw_tensor("w", dims=(20,)), raw_tensor("v", TensorProto.INT4, (21,)), BOOLS]
    for model in (model_of(*tensors), model_of(), model_of(raw_tensor("x", dims=(0,)))):
        for assets in ({}, {"a/b": b"cat", "ü": b""}):
            file = io.BytesIO()
            onnxarchive.save(model, file, size_threshold=0, assets=assets)
            found.append(file.getvalue())
    return found


SOUND = _sound_archives()


@st.composite
def _damaged(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(st.sampled_from(SOUND)))
    for _ in range(draw(st.integers(1, 4))):
        # Half of the changes go to the directory and the end record.
        where = st.integers(0, len(data)) | st.integers(max(len(data) - 300, 0), len(data))
        start = draw(where)
        kinds = ["keep", "keep", "set", "set", "set", "number", "insert", "delete", "cut"]
        kind = draw(st.sampled_from(kinds))
        if kind == "set":
            data[start : start + 1] = bytes([draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF, 64]))])
        elif kind == "number":
            size = draw(st.sampled_from([2, 4, 8]))
            number = draw(st.sampled_from([0, 1, -1, 1 << (size * 8 - 1), 0xFFFF, 64, 46]))
            data[start : start + size] = (number % (1 << size * 8)).to_bytes(size, "little")
        elif kind == "insert":
            data[start:start] = draw(st.binary(min_size=1, max_size=8) | st.just(bytes(64)))
        elif kind == "delete":
            del data[start : start + draw(st.integers(1, 64))]
        elif kind == "cut":
            del data[start:]
        if not data:
            break
    return bytes(data)


any_bytes = settings(
    deadline=None,
    max_examples=600,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.sweep
@requires_outcomes(accepted=20, refused=200)
@any_bytes
@given(data=_damaged())
def test_any_damage_is_found_without_an_unexpected_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "m.onnxa"
    path.write_bytes(data)
    found = _found(path)
    count_outcome("refused" if found else "accepted")
    if not found:
        with onnxarchive.open(path) as archive:
            archive.verify()
            for entry in archive.entries:
                archive.read(entry)
            assert dict(archive.tensors) is not None
        onnxarchive.load(path)


@pytest.mark.sweep
@settings(any_bytes, max_examples=200)
@given(data=st.binary(max_size=100))
def test_any_bytes_before_an_end_record_cause_no_unexpected_error(
    tmp_path: Path, data: bytes
) -> None:
    path = tmp_path / "m.onnxa"
    size = len(data) // 2
    for count in (0, 1, size // 46):
        end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, count, count, size, len(data) - size, 0)
        path.write_bytes(data + end)
        assert _found(path)
        path.write_bytes(data[:-46] + b"PK\x01\x02" + data[-42:] + end)
        assert _found(path)


@pytest.mark.sweep
@requires_outcomes(accepted=20, refused=200)
@any_bytes
@given(
    number=st.integers(0, 5),
    changes=st.lists(
        st.tuples(st.integers(0, 400), st.sampled_from([0, 1, 2, 8, 10, 0x7F, 0x80, 0xFF])),
        min_size=1,
        max_size=4,
    ),
    full=st.booleans(),
)
def test_any_damage_of_a_model_causes_no_unexpected_error(
    tmp_path: Path, number: int, changes: list[tuple[int, int]], full: bool
) -> None:
    # with a CRC-32 that is right
    path = tmp_path / "m.onnxa"
    path.write_bytes(SOUND[number])
    with onnxarchive.open(path) as archive:
        entries = {name: bytes(archive.read(name)) for name in archive.entries}
    model = bytearray(entries.pop("__MODEL_PROTO"))
    for offset, byte in changes:
        model[offset % len(model)] = byte
    _write(path, bytes(model), **entries)
    found = _found(path, full=full)
    count_outcome("refused" if found else "accepted")
    if not found:
        with onnxarchive.open(path) as archive:
            for name in archive.entries:
                archive.read(name)


# Many findings, and those that only follow from others


def test_a_thousand_findings_of_each_rule_are_kept_and_further_ones_counted(path: Path) -> None:
    name = "n" * 10_000
    tensors = [external(raw_tensor(name, dims=(index,)), "w") for index in range(2500)]
    _write(path, model_of(*tensors), w=bytes(16))
    findings = onnxarchive.check(path)
    assert len(findings) == 2 * 1001
    for rule, count in (("DATA-3", 2499), ("TENSOR-3", 2499)):
        of_rule = [finding for finding in findings if finding.rule == rule]
        assert all(finding.entry == "w" for finding in of_rule[:-1])
        assert str(of_rule[-1]) == (
            f"{rule}: {count - 1000} more findings of this rule are not listed"
        )
    assert max(len(str(finding)) for finding in findings) < 500


def test_a_record_that_cannot_be_read_breaks_no_rule_of_what_refers_to_it(path: Path) -> None:
    def add_stray_bytes(it: _Bytes) -> None:
        it.put(it.records["w"] + 30, "<H", 2)  # size of the extra fields
        it.insert(it.records["w"] + 46 + 1, b"\1\0")

    damages: list[Callable[[_Bytes], object]] = [
        add_stray_bytes,
        lambda it: it.put(it.records["w"] + 20, "<2I", 0xFFFFFFFF, 0xFFFFFFFF),
        lambda it: it.put(it.records["__MODEL_PROTO"] + 42, "<I", 0xFFFFFFFF),
        lambda it: it.put(it.records["__MODEL_PROTO"] + 20, "<2I", 0xFFFFFFFF, 0xFFFFFFFF),
        lambda it: it.put(it.records["w"] + 42, "<I", 0xFFFFFFFF),
    ]
    sound = path.read_bytes()
    for damage in damages:
        it = _Bytes(sound)
        damage(it)
        path.write_bytes(it.data)
        assert set(_found(path)) - {"ZIP-7"} == {"ZIP-13"}


def test_the_broken_crc32_of_each_model_is_one_finding_in_the_order_of_ids(
    path: Path,
) -> None:
    onnxarchive.save(model_of(), path, models={"b": model_of(), "a": model_of()}, assets={})
    it = _Bytes(path.read_bytes())
    for name in it.records:
        it.put(it.records[name] + 16, "<I", 1)
        it.put(it.headers[name] + 14, "<I", 1)
    path.write_bytes(it.data)
    entries = ["__MODEL_PROTO", "__MODEL_PROTO_a", "__MODEL_PROTO_b"]
    found = [(finding.rule, finding.entry) for finding in onnxarchive.check(path, full=True)]
    assert found == [("ZIP-15", entry) for entry in entries]


# The table of rules


def _ids_in_code() -> set[str]:
    code = "".join(path.read_text() for path in (ROOT / "onnxarchive").rglob("*.py"))
    quoted = re.findall(r"[\"']([A-Z][A-Z0-9]*-[0-9]+)[\"']", code)
    return set(quoted) - {"SHA-1", "CRC-32", "UTF-8"}


def test_the_code_and_the_table_have_the_same_rules() -> None:
    assert _ids_in_code() == set(rules())


def test_a_rule_has_a_stage_and_a_sentence() -> None:
    for id, rule in rules().items():
        assert rule.id == id
        assert rule.seen in ("open", "header", "data")
        assert len(rule.text) > 20
        assert rule.text.endswith(".")
        assert "\n" not in rule.text


def test_the_table_cannot_be_changed() -> None:
    table: Any = rules()
    with pytest.raises(TypeError):
        table["ZIP-1"] = None
    assert rules() is table
