"""The specification's text against the code: rules, tables and the worked example agree."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
import struct
import unicodedata
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from zip_image import unpacked_record

import onnxarchive
from onnxarchive.model import DEFAULT_SIZE_THRESHOLD, dtypes, keys, model_proto, tensors, walking
from onnxarchive.reading.check import rules
from onnxarchive.zipformat import end_records, layout, records
from onnxarchive.zipformat.end_records import MAX_RECORD_SIZE, TAIL_SIZE
from onnxarchive.zipformat.records import (
    DirectoryRecord,
    EndRecord,
    LocalHeader,
    Zip64EndRecord,
    Zip64Locator,
)
from tools.docs import messages, unicode

SPEC = Path(__file__).parents[2] / "spec"
VECTORS = SPEC.parent / "conformance" / "vectors"
TEXT = (SPEC / "specification.md").read_text(encoding="utf-8")
PARAGRAPHS = re.split(r"\n{2,}", TEXT)
BOLD_RULE = re.compile(r"\*\*([A-Z0-9]+-[0-9]+)\*\*")
RULE_FAMILIES = "|".join(sorted({id.rsplit("-", 1)[0] for id in rules()}))
RULE = re.compile(rf"\b(?:{RULE_FAMILIES})-[0-9]+\b")


def table(*header: str, containing: str = "") -> list[list[str]]:
    """The rows of the one table with this header and content, by cell."""
    line = f"| {' | '.join(header)} |"
    (found,) = [p for p in PARAGRAPHS if p.startswith(line) and containing in p]
    rows = found.split("\n")[2:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def rule_paragraph(rule: str) -> str:
    (found,) = [paragraph for paragraph in PARAGRAPHS if paragraph.startswith(f"**{rule}**")]
    return found


def code(cell: str) -> str:
    """The text between the backticks of a cell."""
    assert cell[0] == cell[-1] == "`", cell
    return cell[1:-1]


# Rules


def test_every_rule_is_in_the_text_exactly_once_in_bold_and_no_other_id_is() -> None:
    assert sorted(BOLD_RULE.findall(TEXT)) == sorted(rules())
    assert set(RULE.findall(TEXT)) <= set(rules())


@pytest.mark.parametrize("rule", sorted(rules()))
def test_rule_is_a_paragraph_that_says_must(rule: str) -> None:
    assert "MUST" in rule_paragraph(rule)


def test_must_is_used_in_rules_only() -> None:
    words = re.compile(r'(?<!")\b(MUST|SHALL|REQUIRED)\b')
    assert [p for p in PARAGRAPHS if words.search(p) and not BOLD_RULE.match(p)] == []


def test_table_of_stages_has_the_stages_of_the_rules() -> None:
    rows = table("Stage", "What a reader has read by then", "Rules")
    stages = {rule: stage for stage, _, listed in rows for rule in listed.split(", ")}
    assert stages == {rule.id: rule.seen for rule in rules().values()}


@pytest.mark.parametrize(
    ("rule", "numbers"),
    [
        ("ZIP-4", [layout.MAX_ENTRIES, DirectoryRecord.SIZE, MAX_RECORD_SIZE]),
        ("ZIP-6", [LocalHeader.SIZE + records.ALIGNMENT_EXTRA_SIZE, layout.MAX_ALIGNMENT - 1]),
        ("ZIP64-2", [Zip64EndRecord.STATED_SIZE]),
        ("ZIP64-3", [TAIL_SIZE]),
        ("ZIP-16", [end_records.SEARCHED_SIZE]),
        ("MODEL-4", [keys.MAX_MODEL_ID_SIZE]),
        ("ALIGN-2", [layout.MIN_ALIGNMENT, layout.MAX_ALIGNMENT]),
        ("KEY-1", [keys.MAX_KEY_SIZE]),
        ("ASSET-1", [keys.MAX_ASSET_COMPONENT_SIZE, keys.MAX_ASSET_NAME_SIZE]),
        ("MODEL-3", [model_proto.MAX_MESSAGES]),
        ("TENSOR-2", [dtypes.MAX_RANK]),
    ],
)
def test_limits_of_the_code_are_in_their_rule(rule: str, numbers: list[int]) -> None:
    found = re.findall(r"[0-9][0-9,]*[0-9]", rule_paragraph(rule))
    assert {f"{number:,}" for number in numbers} <= set(found)


@pytest.mark.parametrize(
    "sentence",
    [
        f"2 GiB are {model_proto.SIZE_LIMIT:,} bytes.",
        f"The threshold is {DEFAULT_SIZE_THRESHOLD:,} by default.",
        f"reads the last {end_records.SEARCHED_SIZE:,} bytes",
    ],
)
def test_number_of_the_code_is_in_the_text(sentence: str) -> None:
    assert sentence in re.sub(r"\s+", " ", TEXT)


# Records


def sizes(rows: list[list[str]], column: int) -> list[int]:
    """The sizes in a column; fields that a record lacks or that vary in length are left out."""
    return [int(row[column]) for row in rows if row[column].isdigit()]


def struct_sizes(record: struct.Struct) -> list[int]:
    codes = re.findall(r"([0-9]*)([a-zA-Z])", record.format)
    sizes = (
        [struct.calcsize(f"<{n}s")] if c == "s" else [struct.calcsize(f"<{c}")] * int(n or 1)
        for n, c in codes
    )
    return [*itertools.chain.from_iterable(sizes)]


ENTRY_TABLE = ("Field", "Local header", "Directory record", "A writer writes", "A reader accepts")
FIELD_TABLE = ("Field", "Size", "A writer writes", "A reader accepts")
END_TABLE = ("Field", "End record", "Zip64 end record", "A writer writes", "A reader accepts")


def test_records_have_the_fields_of_the_tables() -> None:
    entry, end = table(*ENTRY_TABLE), table(*END_TABLE)
    assert sizes(entry, 1) == struct_sizes(LocalHeader.STRUCT)
    assert sizes(entry, 2) == struct_sizes(DirectoryRecord.STRUCT)
    assert sizes(end, 1) == struct_sizes(EndRecord.STRUCT)
    assert sizes(end, 2) == struct_sizes(Zip64EndRecord.STRUCT)
    locator = table(*FIELD_TABLE, containing="offset of the Zip64 end record")
    assert sizes(locator, 1) == struct_sizes(Zip64Locator.STRUCT)
    alignment = table(*FIELD_TABLE, containing="0xD935")
    assert sum(sizes(alignment, 1)) == records.ALIGNMENT_EXTRA_SIZE


@pytest.mark.parametrize(
    ("field", "attribute"),
    [
        ("version made by", "version_made_by"),
        ("version needed to extract", "version_needed"),
        ("flags", "flags"),
        ("compression method", "method"),
        ("modification time", "time"),
        ("modification date", "date"),
        ("disk number start", "disk_start"),
        ("internal file attributes", "internal_attributes"),
        ("external file attributes", "external_attributes"),
    ],
)
def test_writer_writes_the_values_of_the_table(field: str, attribute: str) -> None:
    (cell,) = [row[3] for row in table(*ENTRY_TABLE) if row[0] == field]
    number = re.match(r"0x[0-9A-F]+|[0-9]+", cell)
    assert number is not None
    record = unpacked_record(layout.EntryLayout(b"w", 8, 0, 0))
    assert getattr(record, attribute) == int(number[0], 0)


def test_zip64_fields_hold_the_values_of_the_table() -> None:
    rows = table(
        "What does not fit 32 bits",
        "Zip64 field of the local header",
        "Zip64 field of the directory record",
    )
    size, offset = 1 << 40, 1 << 41
    names = {size: "size", offset: "header offset"}
    placements = [(8, 64), (size, 64), (8, offset), (size, offset)]
    for (_, *cells), (nbytes, header_offset) in zip(rows, placements, strict=True):
        local = layout.local_zip64_values(nbytes)
        of_record = layout.directory_zip64_values(nbytes, header_offset)
        assert cells == [
            ", ".join(names[value] for value in values) or "none" for values in (local, of_record)
        ]


# Messages


def message_rows(text: str) -> dict[tuple[str, ...], set[int]]:
    """The rows of the table of messages, and the numbers of each enumeration."""
    rows: dict[tuple[str, ...], set[int]] = {}
    for *columns, type_, repeated in list(csv.reader(io.StringIO(text)))[1:]:
        kind, *numbers = type_.split(" ")
        rows[*columns, kind, repeated] = set(map(int, numbers))
    return rows


def test_messages_in_the_text_are_those_of_onnx() -> None:
    text = (SPEC / "messages.csv").read_text(encoding="utf-8")
    (version,) = re.findall(r"\*\*onnx\.proto\*\*: ONNX ([0-9]+\.[0-9]+),", TEXT)
    if onnx.__version__.startswith(f"{version}."):
        assert text == messages.table()
    else:  # an older onnx lacks some
        listed = message_rows(text)
        for row, numbers in message_rows(messages.table()).items():
            assert numbers <= listed[row], row


# Unicode


def unicode_rows() -> list[tuple[range, str, str]]:
    """The rows of unicode.csv: the code points, the property and the value."""
    with (SPEC / "unicode.csv").open(newline="", encoding="utf-8") as file:
        return [
            (range(int(row["first"], 16), int(row["last"], 16) + 1), row["property"], row["value"])
            for row in csv.DictReader(file)
        ]


def test_table_of_unicode_is_that_of_python() -> None:
    assert "data of Unicode 14.0" in TEXT
    if unicodedata.unidata_version.startswith("14.0."):
        assert (SPEC / "unicode.csv").read_text(encoding="utf-8") == unicode.table()
    else:  # what a version of Unicode assigns and normalizes, later versions do, too
        assert unicodedata.unidata_version > "14"
        for points, property_, value in unicode_rows():
            if property_ == "class":
                assert {unicodedata.combining(chr(point)) for point in points} == {int(value)}
            elif property_ != "unassigned":
                assert {unicodedata.decomposition(chr(point)) for point in points} == {value}


class Normalization:
    """The steps of the text, with the table."""

    def __init__(self) -> None:
        self.classes: dict[int, int] = {}
        self.parts: dict[int, list[int]] = {}
        self.composed: dict[tuple[int, int], int] = {}
        for points, property_, value in unicode_rows():
            for point in points:
                if property_ == "class":
                    self.classes[point] = int(value)
                elif property_ != "unassigned":
                    self.parts[point] = [int(it, 16) for it in value.split()]
                    if property_ == "composition":
                        first, second = self.parts[point]
                        self.composed[first, second] = point
        for point in range(0xAC00, 0xD7A4):
            index = point - 0xAC00
            letters = [0x1100 + index // 588, 0x1161 + index % 588 // 28]
            if index % 28:
                letters.append(0x11A7 + index % 28)
                self.composed[point - index % 28, letters[2]] = point
            else:
                self.composed[letters[0], letters[1]] = point
            self.parts[point] = letters

    def decompose(self, point: int) -> list[int]:
        if point not in self.parts:
            return [point]
        return [it for part in self.parts[point] for it in self.decompose(part)]

    def compose(self, points: list[int]) -> list[int]:
        kept: list[int] = []
        starter = None
        for point in points:
            of_point = self.classes.get(point, 0)
            after = len(kept) if starter is None else starter + 1
            classes = [self.classes.get(it, 0) for it in kept[after:]]
            is_blocked = any(it >= of_point for it in classes)
            pair = None if starter is None else (kept[starter], point)
            if starter is not None and not is_blocked and pair in self.composed:
                kept[starter] = self.composed[pair]
                continue
            if of_point == 0:
                starter = len(kept)
            kept.append(point)
        return kept

    def __call__(self, text: str) -> str:
        points = [it for character in text for it in self.decompose(ord(character))]
        ordered: list[int] = []
        for is_mark, run in itertools.groupby(points, lambda it: self.classes.get(it, 0) > 0):
            marks = [*run]
            ordered += sorted(marks, key=lambda it: self.classes.get(it, 0)) if is_mark else marks
        return "".join(map(chr, self.compose(ordered)))


def test_steps_of_the_text_give_normalization_form_c() -> None:
    normalize = Normalization()
    marks = [*map(chr, normalize.classes)][::9]
    letters = [*map(chr, normalize.parts)][::23]
    texts = [chr(point) for point in normalize.parts]
    texts += ["".join(text) for text in itertools.product("aE\u0112\u1100\uac00", marks, marks[:9])]
    texts += [letter + mark for letter in letters for mark in marks]
    texts += ["\u1100\u1161\u11a8", "\uac00\u11a8", "\uac00\u11a7", "a\u0305\u0301", "\u0338\u0338"]
    for text in texts:
        assert normalize(text) == unicodedata.normalize("NFC", text), ascii(text)


# Tensors


def test_data_types_in_the_text_are_those_of_the_code() -> None:
    rows = table("Number", "Name", "Bits", "Element bytes", "Element")
    listed = [(int(number), name, int(bits), int(size)) for number, name, bits, size, _ in rows]
    assert listed == [
        (data_type.number, data_type.name, data_type.bit_width, data_type.dtype.itemsize)
        for data_type in dtypes.BY_NUMBER.values()
    ]


def test_sizes_in_the_text_are_those_of_the_code() -> None:
    by_name = {data_type.name: data_type for data_type in dtypes.BY_NUMBER.values()}
    for name, dims, size, unused in table("Data type", "dims", "Size", "Unused bits"):
        shape = json.loads(code(dims))
        assert by_name[name].nbytes(shape) == int(size)
        assert by_name[name].tail_bits(shape) == int(unused)


@pytest.mark.parametrize("bit_width", [4, 2, 6])
def test_packing_formulas_give_the_bytes_of_the_code(bit_width: int) -> None:
    (block,) = [p for p in PARAGRAPHS if p.startswith("```\n4 bits: byte0 = ")]
    match = re.search(rf"{bit_width} bits: (byte0 = .*(?:\n +byte[12] = .*)*)", block)
    assert match is not None
    formulas = re.findall(r"byte[0-2] = (.*)", match[1])
    data_type = next(t for t in dtypes.BY_NUMBER.values() if t.bit_width == bit_width)
    codes_in_group = len(formulas) * 8 // bit_width
    codes = np.random.default_rng(0).integers(0, 1 << bit_width, (100, codes_in_group), np.uint8)
    expected = bytes(
        eval(formula, {}, {f"x{index}": int(value) for index, value in enumerate(group)})
        for group in codes
        for formula in formulas
    )
    assert bytes(dtypes.as_raw_data(codes.view(data_type.dtype))) == expected


WALK = {
    message: fields.split(", ")
    for message, fields in table("Message", "Fields, in the order of the walk")
}


def test_places_of_tensors_in_the_text_are_those_of_onnx() -> None:
    ways = {*WALK, "TensorProto"}
    pending: list[Any] = [onnx.ModelProto.DESCRIPTOR]
    seen: set[str] = set()
    while pending:
        descriptor = pending.pop()
        if descriptor.full_name in seen:
            continue
        seen.add(descriptor.full_name)
        inner = [field for field in descriptor.fields if field.message_type]
        pending += [field.message_type for field in inner]
        leading = {field.name for field in inner if field.message_type.name in ways}
        assert leading == set(WALK.get(descriptor.name, ())), descriptor.full_name


def fill(message: Any, depth: int) -> None:
    """Sets every field that leads to a tensor, repeated ones twice."""
    for field in WALK.get(message.DESCRIPTOR.name, ()):
        if depth == 0:
            return
        child = getattr(message, field)
        if walking.is_repeated(message.DESCRIPTOR.fields_by_name[field]):
            fill(child.add(), depth - 1)
            fill(child.add(), depth - 1)
        else:
            child.SetInParent()
            fill(child, depth - 1)


def walked(message: Any, path: walking.Path) -> Iterator[walking.Path]:
    """The walk as the text has it."""
    if message.DESCRIPTOR.name == "TensorProto":
        yield path
    for field in WALK.get(message.DESCRIPTOR.name, ()):
        child = getattr(message, field)
        if walking.is_repeated(message.DESCRIPTOR.fields_by_name[field]):
            for index, element in enumerate(child):
                yield from walked(element, (*path, (field, index)))
        elif message.HasField(field):
            yield from walked(child, (*path, (field, None)))


def test_order_of_tensors_in_the_text_is_that_of_the_code() -> None:
    model = onnx.ModelProto()
    fill(model, depth=6)
    expected = list(walked(model, ()))
    assert len(expected) > 100
    assert [ref.path for ref in tensors.walk(model)] == expected


# Keys


def test_keys_in_the_text_are_those_of_the_code() -> None:
    derived = keys.Keys()
    for name, key in table("Tensor", "Key"):
        assert derived.assign(json.loads(code(name))) == code(key)


def derive(name: str, earlier: set[str]) -> str:
    """The steps of the text, word by word."""
    base = re.sub("[^A-Za-z0-9_]", "_", name)
    if base.startswith("__"):
        base = "_" + base.lstrip("_")
    if not base.strip("_"):
        base = "tensor"
    if base[0] in "0123456789":
        base = "_" + base
    if re.fullmatch("con|prn|aux|nul|com[0-9]|lpt[0-9]|assets", base.lower()):
        base += "_"
    base = base[:255]
    suffixes = itertools.chain([""], (f"_{number}" for number in itertools.count(2)))
    candidates = (base[: 255 - len(suffix)] + suffix for suffix in suffixes)
    return next(key for key in candidates if key.lower() not in earlier)


def test_steps_of_the_text_give_the_keys_of_the_code() -> None:
    parts = ["", "_", "__", "a", "A", "1", ".", "é", "con", "Assets", "a_2", "a" * 254, "tensor"]
    names = ["".join(pair) for pair in itertools.product(parts, repeat=2)] * 2
    derived = keys.Keys()
    earlier: set[str] = set()
    for name in names:
        key = derive(name, earlier)
        assert derived.assign(name) == key
        assert keys.is_key(key)
        earlier.add(key.lower())


# The worked examples


def dumped(section: str, data: bytes = b"") -> bytes:
    """The bytes of a section's hex dump, each line where its offset says, after those given."""
    (text,) = re.findall(rf"^### {section} .*?(?=^##)", TEXT, re.DOTALL | re.MULTILINE)
    for block in re.findall(r"```hex\n(.*?)```", text, re.DOTALL):
        for line in block.splitlines():
            match = re.match(r"([0-9a-f]{4})  ((?:[0-9a-f]{2} )*[0-9a-f]{2})(?:  |$)", line)
            assert match is not None, line
            assert int(match[1], 16) == len(data), line
            data += bytes.fromhex(match[2])
    return data


EXAMPLES = {"A.1": dumped("A.1"), "A.2": dumped("A.2", dumped("A.1")[:72])}


def example_model(graph: str, tensor: str) -> onnx.ModelProto:
    weight = np.array([1, -2], np.dtype("<f4"))
    model = onnx.ModelProto(ir_version=4)
    model.opset_import.add(version=9)
    model.graph.name = graph
    model.graph.initializer.add(
        name=tensor, data_type=onnx.TensorProto.FLOAT, dims=weight.shape, raw_data=weight.tobytes()
    )
    return model


MODELS = {"": example_model("g", "w"), "b": example_model("h", "v")}


WORDS = {"A.1": "an archive of {} bytes", "A.2": "The archive has {} bytes"}
NAMED = {"A.1": "example", "A.2": "example-of-two-models"}


@pytest.mark.parametrize("section", EXAMPLES)
def test_example_in_the_text_is_what_is_written_read_and_unzipped(
    section: str, tmp_path: Path
) -> None:
    example, path = EXAMPLES[section], tmp_path / "example.onnxa"
    models = MODELS if section == "A.2" else {"": MODELS[""]}
    further = {id: model for id, model in models.items() if id}
    onnxarchive.save(models[""], path, models=further, size_threshold=0)
    assert path.read_bytes() == example
    assert (VECTORS / f"{NAMED[section]}.onnxa").read_bytes() == example
    assert WORDS[section].format(len(example)) in re.sub(r"\s+", " ", TEXT)
    assert onnxarchive.check(path, full=True) == []
    unzipped = tmp_path / "unzipped"
    with zipfile.ZipFile(path) as archive:
        archive.extractall(unzipped)
    names = {"": "__MODEL_PROTO", "b": "__MODEL_PROTO_b"}
    assert {path.name for path in unzipped.iterdir()} == {"w", *(names[id] for id in models)}
    for id, model in models.items():
        assert onnxarchive.load(path, model=id) == model
        onnx.checker.check_model(unzipped / names[id])
        (weight,) = onnx.load(unzipped / names[id]).graph.initializer
        assert onnx.numpy_helper.to_array(weight).tolist() == [1, -2]
