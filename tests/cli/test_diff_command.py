from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import onnx
import pytest
from commands import run
from models import entry_of, flip_byte, model_of, raw_tensor, runnable_model
from onnx import helper

import onnxarchive

Captured = pytest.CaptureFixture[str]
Compare = Callable[..., tuple[int, list[str]]]
SECTIONS = [
    *("nodes", "inputs", "outputs", "values", "opsets", "metadata"),
    *("fields", "functions", "training", "tensors", "models", "assets"),
]


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> Compare:
    """Saves two models as `a.onnxa` and `b.onnxa`, and gives the status and what is printed."""
    monkeypatch.chdir(tmp_path)

    def compare(
        model: onnx.ModelProto, other: onnx.ModelProto, *options: str
    ) -> tuple[int, list[str]]:
        onnxarchive.save(model, "a.onnxa")
        onnxarchive.save(other, "b.onnxa")
        status = run("diff", "a.onnxa", "b.onnxa", *options)
        captured = capsys.readouterr()
        assert captured.err == ""
        return status, captured.out.splitlines()

    return compare


def test_differences_are_printed_line_by_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    model, other = runnable_model(1 << 12), runnable_model(1 << 11)
    other.graph.node[1].op_type = "Sub"
    other.graph.node[1].attribute.append(helper.make_attribute("alpha", 0.5))
    branch = onnx.GraphProto(name="branch", node=[helper.make_node("Neg", ["x"], ["z"])])
    for it in (model, other):
        it.graph.node.append(helper.make_node("If", ["c"], ["z"], then_branch=branch))
    other.graph.node[2].attribute[0].g.node[0].op_type = "Abs"
    other.graph.node.append(helper.make_node("Relu", ["y"], ["u"], name="new"))
    other.graph.initializer.append(raw_tensor("added"))
    other.producer_name = ""
    onnxarchive.save(model, "a.onnxa", assets={"labels.txt": b"cat"})
    onnxarchive.save(other, "b.onnxa", alignment=128)
    assert run("diff", "a.onnxa", "b.onnxa") == 1
    weights = [it.graph.initializer[0].raw_data for it in (model, other)]
    data = [f"{len(it):,} bytes, CRC-32 {crc32(it):#010x}" for it in weights]
    added = raw_tensor("added").raw_data
    assert capsys.readouterr().out.splitlines() == [
        "--- a.onnxa",
        "+++ b.onnxa",
        "nodes: 1 added, 2 changed",
        "  ~ y: op_type: Add => Sub; + attribute alpha: 0.5",
        "  ~ z: attribute then_branch: g: node z: op_type: Neg => Abs",
        "  + new: u = Relu(y)",
        "inputs: 1 changed",
        "  ~ x: FLOAT [2, 64] => FLOAT [2, 32]",
        "tensors: 1 added, 1 changed",
        f"  ~ layer.0/weight: FLOAT [64, 16], {data[0]} => FLOAT [32, 16], {data[1]}",
        f"  + added: FLOAT [4], 16 bytes, CRC-32 {crc32(added):#010x}",
        "fields: 1 removed",
        "  - producer_name: test",
        "assets: 1 removed",
        f"  - labels.txt: 3 bytes, CRC-32 {crc32(b'cat'):#010x}",
    ]


@pytest.mark.parametrize(
    ("options", "how"),
    [((), "by CRC-32"), (("--full",), "byte by byte")],
)
def test_equal_archives_are_reported_in_one_line(
    compare: Compare, options: tuple[str, ...], how: str
) -> None:
    status, lines = compare(runnable_model(), runnable_model(), *options)
    assert status == 0
    assert lines == [
        f"a.onnxa and b.onnxa: the same model, tensors and assets (weights compared {how})"
    ]
    status, lines = compare(runnable_model(), runnable_model(), *options, "--json")
    assert status == 0
    result = json.loads("\n".join(lines))
    assert result["is_same"] is True
    assert not any(result[section] for section in SECTIONS)


def test_json_has_every_difference(compare: Compare) -> None:
    other = runnable_model()
    other.graph.node[1].op_type = "Sub"
    status, lines = compare(runnable_model(), other, "--json")
    assert status == 1
    result = json.loads("\n".join(lines))
    no_types = {"before_type": None, "after_type": None, "values": None}
    part: dict[str, Any] = {
        "name": "op_type",
        "kind": "changed",
        "before": "Add",
        "after": "Sub",
        "parts": [],
    }
    part |= no_types
    assert result == {
        "path": "a.onnxa",
        "other": "b.onnxa",
        "is_same": False,
        **{section: [] for section in SECTIONS},
        "nodes": [
            {
                "name": "y",
                "kind": "changed",
                **no_types,
                "before": "y = Add(product, layer.0/bias)",
                "after": "y = Sub(product, layer.0/bias)",
                "parts": [part],
            }
        ],
    }


def test_at_most_fifty_lines_are_shown_and_json_has_every_difference(compare: Compare) -> None:
    other = model_of(*(raw_tensor(f"w{index}") for index in range(1200)))
    _, lines = compare(model_of(), other)
    assert lines[2] == "tensors: 1,200 added"
    assert len(lines) == 3 + 50 + 1
    assert lines[-2].startswith("  + w49: ")
    assert lines[-1] == "  and 1,150 more"
    _, lines = compare(model_of(), other, "--json")
    assert len(json.loads("\n".join(lines))["tensors"]) == 1200


def test_at_most_eight_parts_of_a_difference_are_shown(compare: Compare) -> None:
    model, other = runnable_model(), runnable_model()
    for index in range(10):
        other.graph.node[0].attribute.append(helper.make_attribute(f"a{index}", index))
    _, lines = compare(model, other)
    assert lines[3].startswith("  ~ product: + attribute a0: 0; + attribute a1: 1; ")
    assert lines[3].endswith("; + attribute a7: 7; and 2 more")
    _, lines = compare(model, other, "--json")
    assert len(json.loads("\n".join(lines))["nodes"][0]["parts"]) == 10


def test_long_values_are_cut_in_the_middle(compare: Compare) -> None:
    other = model_of()
    other.doc_string = "a" * 300 + "z" * 300
    _, lines = compare(model_of(), other)
    assert lines[-1] == f"  + doc_string: {'a' * 50}...{'z' * 50}"
    _, lines = compare(model_of(), other, "--json")
    assert json.loads("\n".join(lines))["fields"][0]["after"] == other.doc_string


def test_control_characters_in_names_are_escaped(compare: Compare) -> None:
    name = "\x1b[2J\nw"
    other = model_of(raw_tensor(name))
    other.graph.node.append(helper.make_node("Neg", [name], [name], name=name, **{name: name}))
    changed = onnx.ModelProto()
    changed.CopyFrom(other)
    changed.graph.node[0].attribute[0].s = b"\x1b"
    changed.metadata_props.add(key=name, value=name)
    for models in ((model_of(), other), (other, changed)):
        status, lines = compare(*models)
        assert status == 1
        assert all(line.isprintable() for line in lines)
    assert r"  ~ \x1b[2J\nw: attribute \x1b[2J\nw: s: \x1b[2J\nw => \x1b" in lines


def test_diff_with_full_finds_a_changed_byte(compare: Compare, tmp_path: Path) -> None:
    assert compare(runnable_model(), runnable_model(), "--full")[0] == 0
    flip_byte("b.onnxa", entry_of("b.onnxa", "layer_0_weight").data_offset)
    assert run("diff", "a.onnxa", "b.onnxa") == 0
    assert run("diff", "a.onnxa", "b.onnxa", "--full") == 1
