"""Long lists in serialized models: they are read right, and without a step for each value."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import onnx
import plain_wire
import pytest
from hypothesis import given, settings, strategies as st
from onnx import AttributeProto, TensorProto, helper
from outcomes import count_outcome, requires_outcomes
from plain_wire import I32, I64, LEN, VARINT, MalformedError, varint
from versions import needs_compiled_parser

import onnxarchive
from onnxarchive.errors import ArchiveFormatError
from onnxarchive.model import model_proto, wire
from onnxarchive.model.weights import fill, strip_weights

# Runs of one field


VALUES = {
    VARINT: st.builds(
        varint, st.sampled_from([0, 1, 127, 128, 300, 2**63, 2**64 - 1]), st.integers(1, 10)
    ),
    I64: st.binary(min_size=8, max_size=8),
    I32: st.binary(min_size=4, max_size=4),
    LEN: st.one_of(
        st.binary(max_size=20),
        st.sampled_from([b"a" * 126, b"\x0a" * 127, b"\x80" * 128, b"b" * 300]),
    ).map(lambda value: varint(len(value)) + value),
}
# Short runs are read value by value; several windows of 256 bytes and more are needed for the last.
COUNTS = st.sampled_from([1, 2, 64, 65, 66, 67, 90, 200, 700])


@st.composite
def runs(draw: st.DrawFn) -> bytes:
    """Successive fields with one tag; a padded tag is another way to write the same one."""
    wire_type = draw(st.sampled_from([VARINT, I32, LEN, LEN, I64]))
    number = draw(st.sampled_from([1, 5, 7, 8, 9, 15, 16, 100]))
    tag = varint(number << 3 | wire_type, draw(st.sampled_from([1, 1, 1, 2, 5])))
    fields = [tag + value for value in draw(st.lists(VALUES[wire_type], min_size=1, max_size=4))]
    return b"".join(islice(cycle(fields), draw(COUNTS)))


def nested(content: bytes, names: Iterable[str]) -> bytes:
    """Puts fields into a message at a path of fields below a ModelProto."""
    message: Any = onnx.ModelProto.DESCRIPTOR
    tags = []
    for name in names:
        field = message.fields_by_name[name]
        tags.append(varint(field.number << 3 | LEN))
        message = field.message_type
    for tag in reversed(tags):
        content = tag + varint(len(content)) + content
    return content


PATHS = [
    (),
    ("graph",),
    ("graph", "node"),
    ("graph", "node", "attribute"),
    ("graph", "initializer"),
    ("functions", "node", "attribute", "t"),
]
GROUP = [
    b"",
    b"\x4b\x4c",
    b"\x4b" + b"\x38\x01" * 40 + b"\x4c",
    b"\x4b" + b"\x00\x01" * 40 + b"\x4c",
]


@st.composite
def models(draw: st.DrawFn) -> bytes:
    """Runs in messages of a model, after at most two changes of bytes."""
    parts = [
        nested(draw(runs()) + draw(st.sampled_from(GROUP)) + draw(runs()), path)
        for path in draw(st.lists(st.sampled_from(PATHS), min_size=1, max_size=3))
    ]
    data = bytearray(b"".join(parts))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(data) - 1))
        match draw(st.sampled_from(["flip", "insert", "delete", "cut"])):
            case "flip":
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "insert":
                data[at:at] = draw(st.sampled_from([b"\0", b"\x80", b"\xff" * 10, b"\x40\x01"]))
            case "delete":
                del data[at]
            case "cut" if at:
                del data[at:]
    return bytes(data)


# A reader of every value


def offset_of(error: ArchiveFormatError) -> int:
    assert error.rule == "MODEL-3"
    found = re.match(r"malformed model at byte (\d+): expected ", error.message)
    assert found
    return int(found[1])


def read_all(fields: Iterator[Any]) -> tuple[list[Any], int | None]:
    """The fields, and the offset of the malformed one that ends them."""
    read: list[Any] = []
    try:
        for field in fields:
            read.append(field)
    except MalformedError as error:
        return read, error.offset
    except ArchiveFormatError as error:
        return read, offset_of(error)
    return read, None


@requires_outcomes(whole=10, malformed=10)
@settings(deadline=None, max_examples=100)
@given(models(), st.sets(st.sampled_from([8, 0x2A, 0x3A, 0x3D, 0x40, 0x4A, 0x7A, 0x82])))
def test_fields_are_those_that_a_plain_reader_finds(data: bytes, tags: set[int]) -> None:
    fields, fault = read_all(plain_wire.fields_of(data, 0, len(data), 0))
    count_outcome("whole" if fault is None else "malformed")
    assert read_all(wire.fields_in(data, 0, len(data), 0)) == (fields, fault)
    wanted = [field for field in fields if field[0] in tags]
    view = memoryview(data)
    assert read_all(wire.fields_in(view, 0, len(data), 0, tags)) == (wanted, fault)


INT, FLOAT, TEXT = b"\x40\x05", b"\x3dabcd", b"\x4a\x02ab"
FAULTS = {
    "varint of eleven bytes": (INT, b"\x40" + b"\x80" * 10 + b"\0" + INT),
    "varint cut": (INT, b"\x40\x80"),
    "value missing": (INT, b"\x40"),
    "fixed32 cut": (FLOAT, b"\x3dabc"),
    "string past the end": (TEXT, b"\x4a\x03ab"),
    "string of half the memory": (TEXT, b"\x4a\xff\xff\xff\xff\x07" + TEXT),
    "length of six bytes": (TEXT, b"\x4a" + b"\x80" * 5 + b"\0" + TEXT),
    "field number 0": (INT, b"\x00\x05" + INT),
    "wire type 6": (FLOAT, b"\x3eabcd" + FLOAT),
    "end of a group": (TEXT, b"\x4c" + TEXT),
}


@pytest.mark.parametrize("count", [1, 64, 65, 66, 67, 130, 5000])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_long_list_is_found_where_it_is(name: str, count: int) -> None:
    field, fault = FAULTS[name]
    data = nested(field * count + fault, PATHS[3])
    start = len(data) - len(field * count + fault)
    _, expected = read_all(plain_wire.fields_of(data, start, len(data), 3))
    assert expected is not None
    assert expected >= start + len(field) * count
    assert read_all(wire.fields_in(data, start, len(data), 3, ())) == ([], expected)
    with pytest.raises(ArchiveFormatError) as caught:
        wire.have_more_messages([data], 3)
    assert offset_of(caught.value) == expected
    with pytest.raises(ArchiveFormatError) as caught:
        wire.require_well_formed(data)
    assert offset_of(caught.value) == expected
    with pytest.raises(ArchiveFormatError) as caught:
        strip_weights(data, size_threshold=0)
    assert offset_of(caught.value) == expected


def expected_count(data: bytes, limit: int) -> str:
    """The answer, read no further than it takes; or the offset of a malformed field."""
    count = 0
    offsets = plain_wire.messages_of(data)
    try:
        while len(data) // 2 > limit:
            offset = next(offsets)
            count += 1
            if count > limit or count + (len(data) - offset) // 2 <= limit:
                break
    except StopIteration:
        pass
    except MalformedError as error:
        return f"malformed at {error.offset}"
    return "more" if count > limit else "enough"


@requires_outcomes(more=10, enough=10, malformed=10)
@settings(deadline=None, max_examples=200)
@given(models(), st.integers(0, 20))
def test_messages_are_counted_as_by_a_plain_reader(data: bytes, limit: int) -> None:
    try:
        found = "more" if wire.have_more_messages([data], limit) else "enough"
    except ArchiveFormatError as error:
        found = f"malformed at {offset_of(error)}"
    count_outcome(found.split()[0])
    assert found == expected_count(data, limit)


# Steps of Python

COUNT = 3000


def unpacked(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def attribute(**lists: list[Any]) -> bytes:
    return unpacked(AttributeProto(name="list", **lists))  # type: ignore[arg-type]


def values_of(field: str, wire_type: int, value: bytes) -> bytes:
    """Unpacked values of a field of TensorProto."""
    number = TensorProto.DESCRIPTOR.fields_by_name[field].number
    return varint(number << 3 | wire_type) + value


LISTS: dict[str, tuple[Callable[[int], bytes], tuple[str, ...]]] = {
    "ints": (lambda count: attribute(ints=[*range(count)]), PATHS[3]),
    "negative ints": (lambda count: attribute(ints=[*range(-count, 0)]), PATHS[3]),
    "floats": (lambda count: attribute(floats=[*np.linspace(0, 1, count)]), PATHS[3]),
    "empty strings": (lambda count: attribute(strings=[b""] * count), PATHS[3]),
    "line breaks": (lambda count: attribute(strings=[b"a\n\r"] * count), PATHS[3]),
    "long strings": (lambda count: attribute(strings=[b"a" * 127] * count), PATHS[3]),
    "strings": (lambda count: attribute(strings=[b"%d" % n for n in range(count)]), PATHS[3]),
    "doubles": (lambda count: values_of("double_data", I64, b"abcdefgh") * count, PATHS[4]),
    "dims": (lambda count: values_of("dims", VARINT, b"\x01") * count, PATHS[4]),
    "string_data": (lambda count: values_of("string_data", LEN, b"\x01a") * count, PATHS[4]),
    "inputs": (lambda count: unpacked(onnx.NodeProto(input=["x"] * count)), PATHS[2]),
    "unknown fields": (lambda count: b"\x78\x01" * count, ()),
}


@contextmanager
def steps() -> Iterator[list[int]]:
    """Counts the lines of Python that this thread runs in the block."""
    count = [0]

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        count[0] += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("name", LISTS)
def test_values_of_a_long_list_take_no_step_of_python_each(name: str) -> None:
    make, path = LISTS[name]
    counts = []
    for count in (COUNT, 4 * COUNT):
        data = nested(make(count), path) + nested(b"", ("graph",))
        wire.have_more_messages([data], 3)  # compiles patterns
        with steps() as lines:
            assert wire.count_graphs(data) in (1, 2)
            assert not wire.have_more_messages([data], 4)
            wire.require_well_formed(data)
            strip_weights(data, size_threshold=0)
            fill(data, lambda _: None)
        counts.append(lines[0])
    few, many = counts
    assert many < few + COUNT


def forest(count: int) -> onnx.ModelProto:
    """A tree ensemble whose lists have `count` values each."""
    node = helper.make_node(
        "TreeEnsembleClassifier",
        ["x"],
        ["label", "y"],
        domain="ai.onnx.ml",
        nodes_nodeids=[*range(count)],
        nodes_values=np.linspace(0, 1, count).tolist(),
        nodes_modes=["BRANCH_LEQ", "LEAF"] * (count // 2),
    )
    labels = TensorProto(
        name="labels", data_type=TensorProto.STRING, dims=[count], string_data=[b"a label"] * count
    )
    weight = onnx.numpy_helper.from_array(np.zeros(1000, np.float32), "weight")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    graph = helper.make_graph([node], "g", [x], [y], [labels, weight])
    return helper.make_model(graph, ir_version=9)


def convert(folder: Path) -> None:
    onnxarchive.convert(folder / "model.onnx", folder / "converted.onnxa")


def open_and_close(folder: Path) -> None:
    onnxarchive.open(folder / "a.onnxa").close()


def edit(folder: Path) -> None:
    with onnxarchive.edit(folder / "a.onnxa") as edit:
        edit.metadata["key"] = "value"


def edit_model(folder: Path) -> None:
    with onnxarchive.edit(folder / "a.onnxa") as edit:
        edit.model.graph.doc_string = "other"


def check(folder: Path) -> None:
    assert onnxarchive.check(folder / "a.onnxa", full=True) == []


def link(folder: Path) -> None:
    onnxarchive.link(folder / "a.onnxa", folder / "link.onnx")


def export(folder: Path) -> None:
    onnxarchive.export(folder / "a.onnxa", folder / "exported.onnx")


@pytest.mark.parametrize(
    "act",
    [convert, open_and_close, edit, edit_model, check, link, export],
    ids=lambda it: it.__name__,
)
@needs_compiled_parser
def test_values_of_a_forest_take_no_step_of_python_each(
    act: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        model_proto, "MAX_MESSAGES", 100
    )  # so that a small model is read to count them
    counts = []
    for folder, count in (("warm", COUNT), ("few", COUNT), ("many", 4 * COUNT)):
        path = tmp_path / folder
        path.mkdir()
        model = forest(count)
        onnx.save(model, path / "model.onnx")
        onnxarchive.convert(path / "model.onnx", path / "a.onnxa")
        with steps() as lines:
            act(path)
        counts.append(lines[0])
        assert onnxarchive.load(path / "a.onnxa").graph.node == model.graph.node
    _, few, many = counts
    assert many < few + COUNT
