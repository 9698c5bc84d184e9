"""Weights in Constant nodes: mapped by sessions and links of archives that store them outside."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from models import MEASURE_MEMORY, every_tensor, normalised, run_python
from onnx import TensorProto, helper, numpy_helper

import onnxarchive
from onnxarchive import ArchiveError, UnsupportedFeatureError
from onnxarchive.interop.onnxruntime import compares_packed

ort = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")

MIB = 1 << 20
WIDTH = 64
CPU = ["CPUExecutionProvider"]
OPSETS = [helper.make_opsetid("", 18), helper.make_opsetid("test", 1)]
# The anonymous memory that a session keeps, in bytes, for each pair of a way to make it and a file
# in argv. A first session of each way loads what it needs.
KEPT = f"""
{MEASURE_MEMORY}
import gc, onnxarchive, onnxruntime

def make(how, path):
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_prepacking", "1")
    if how == "path":
        return onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])
    return onnxarchive.session(path, options, ["CPUExecutionProvider"])

pairs = [*zip(sys.argv[1::2], sys.argv[2::2])]
for how, path in pairs:
    make(how, path)
for how, path in pairs:
    gc.collect()
    before = anonymous()
    made = make(how, path)
    gc.collect()
    print(anonymous() - before)
    del made
"""


def weight(seed: int, rows: int = WIDTH) -> TensorProto:
    elements = np.random.default_rng(seed).standard_normal((rows, WIDTH)) / 8
    return numpy_helper.from_array(elements.astype(np.float32), f"weight {seed}")


def product(x: str, seed: int, y: str) -> list[onnx.NodeProto]:
    """A Constant and a product with it."""
    constant = helper.make_node("Constant", [], [f"{y}.w"], value=weight(seed))
    return [constant, helper.make_node("MatMul", [x, f"{y}.w"], [y])]


def value(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", WIDTH])


def model_of_nodes(nodes: list[onnx.NodeProto], **fields: Any) -> onnx.ModelProto:
    condition = helper.make_tensor_value_info("c", TensorProto.BOOL, [])
    graph = helper.make_graph(nodes, "g", [value("x"), condition], [value("y")])
    return helper.make_model(graph, ir_version=9, opset_imports=OPSETS, **fields)


def in_graph() -> onnx.ModelProto:
    return model_of_nodes([*product("x", 1, "a"), *product("a", 2, "y")])


def in_branches() -> onnx.ModelProto:
    one, two = (
        helper.make_graph(product("x", seed, name), name, [], [value(name)])
        for seed, name in ((1, "one"), (2, "two"))
    )
    return model_of_nodes([helper.make_node("If", ["c"], ["y"], then_branch=one, else_branch=two)])


def in_a_function() -> onnx.ModelProto:
    function = helper.make_function("test", "f", ["x"], ["y"], product("x", 1, "y"), OPSETS[:1])
    nodes = [helper.make_node("f", [x], [y], domain="test") for x, y in (("x", "a"), ("a", "y"))]
    return model_of_nodes(nodes, functions=[function])


def with_a_shape() -> onnx.ModelProto:
    """A model with a Constant that shape inference needs, and one that looks like it."""
    sizes = numpy_helper.from_array(np.ones(WIDTH * 4, np.int64), "sizes")
    many = numpy_helper.from_array(np.zeros((1, WIDTH * 4), np.float32), "many")
    nodes = [
        helper.make_node("Constant", [], ["sizes"], value=sizes),
        helper.make_node("Constant", [], ["many"], value=many),
        helper.make_node("Split", ["many", "sizes"], [f"s{i}" for i in range(WIDTH * 4)], axis=1),
        *product("x", 1, "a"),
        helper.make_node("Add", ["a", "s0"], ["y"]),
    ]
    return model_of_nodes(nodes)


MAKERS = [in_graph, in_branches, in_a_function, with_a_shape]


def outside(model: onnx.ModelProto) -> list[TensorProto]:
    return [it for it in every_tensor(model) if it.data_location == TensorProto.EXTERNAL]


def outputs(session: Any) -> list[bytes]:
    x = np.random.default_rng(9).standard_normal((2, WIDTH)).astype(np.float32)
    names = {port.name for port in session.get_inputs()}
    feeds = [{"x": x, "c": np.array(it)} for it in (True, False)]
    return [session.run(None, {name: feed[name] for name in names})[0].tobytes() for feed in feeds]


def plain_outputs(model: onnx.ModelProto | Path) -> list[bytes]:
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    options = ort.SessionOptions()
    options.add_session_config_entry("session.disable_prepacking", "1")
    return outputs(ort.InferenceSession(source, options, CPU))


@pytest.mark.parametrize("is_in_memory", [False, True])
@pytest.mark.parametrize("make", MAKERS, ids=lambda it: it.__name__)
def test_a_session_with_constants_gives_the_bits_of_the_model(
    path: Path, make: Callable[[], onnx.ModelProto], is_in_memory: bool
) -> None:
    for convert_attribute in (False, True):
        onnxarchive.save(make(), path, convert_attribute=convert_attribute)
        source = path.read_bytes() if is_in_memory else path
        session = onnxarchive.session(source, providers=CPU, prepack=False)
        assert outputs(session) == plain_outputs(make())


@pytest.mark.parametrize(
    ("make", "count"), [(in_graph, 2), (in_branches, 2), (in_a_function, 1), (with_a_shape, 2)]
)
def test_a_session_reads_constants_from_the_archive(
    path: Path, make: Callable[[], onnx.ModelProto], count: int
) -> None:
    onnxarchive.save(make(), path, convert_attribute=True)
    model = onnx.ModelProto.FromString(onnxarchive.session_options(path)[0])
    found = outside(model)
    assert len(found) == count
    with onnxarchive.open(path) as archive:
        offsets = {str(entry.data_offset) for entry in archive.entries.values()}
    for tensor in found:
        pairs = {pair.key: pair.value for pair in tensor.external_data}
        assert pairs["location"] == path.name
        assert pairs["offset"] in offsets


@pytest.mark.parametrize("make", MAKERS, ids=lambda it: it.__name__)
def test_links_and_exports_of_constants_are_read_by_onnx(
    path: Path, make: Callable[[], onnx.ModelProto]
) -> None:
    onnxarchive.save(make(), path, convert_attribute=True)
    link, exported = path.with_name("link.onnx"), path.with_name("exported.onnx")
    onnxarchive.link(path, link)
    onnxarchive.export(path, exported, external_data="exported.data")
    onnxarchive.export(path, path.with_name("single.onnx"))
    assert normalised(onnx.load(path.with_name("single.onnx"))) == normalised(make())
    for file in (link, exported):
        onnx.checker.check_model(file, full_check=True)
        loaded = onnx.load(file)
        del loaded.metadata_props[:]  # a link has its fingerprint there
        assert normalised(loaded) == normalised(make())
        assert plain_outputs(file) == plain_outputs(make())
        # onnx does not read the external data of functions.
        expected = make is not in_a_function
        assert bool(outside(onnx.load(file, load_external_data=False))) == expected


@pytest.mark.sweep
def test_a_session_copies_no_constants_outside_the_model_and_copies_those_inside_once(
    tmp_path: Path,
) -> None:
    rows = 48 * MIB // 4 // WIDTH  # malloc returns blocks of 32 MiB and more to the system
    nodes = [
        helper.make_node("Constant", [], ["w"], value=weight(1, rows)),
        helper.make_node("Gather", ["w", "x"], ["y"]),
    ]
    indices = helper.make_tensor_value_info("x", TensorProto.INT64, ["n"])
    graph = helper.make_graph(nodes, "g", [indices], [value("y")])
    model = helper.make_model(graph, ir_version=9, opset_imports=OPSETS[:1])
    onnx.save(model, tmp_path / "m.onnx")
    onnxarchive.save(model, tmp_path / "inside.onnxa")
    onnxarchive.save(model, tmp_path / "outside.onnxa", convert_attribute=True)
    ways = {"m.onnx": "path", "inside.onnxa": "session", "outside.onnxa": "session"}
    arguments = [argument for name, how in ways.items() for argument in (how, tmp_path / name)]
    plain, inside, outside = map(int, run_python(KEPT, *arguments).split())
    assert plain > 47 * MIB
    assert inside < 52 * MIB
    assert outside < 4 * MIB


def test_a_session_gets_other_providers_unless_its_archive_was_edited(path: Path) -> None:
    onnxarchive.save(in_graph(), path)
    session = onnxarchive.session(path, providers=CPU, prepack=False)
    expected = outputs(session)
    for _ in range(2):
        session.set_providers(CPU)
        assert outputs(session) == expected
    with onnxarchive.edit(path) as edit:
        edit.metadata["author"] = "Ada"
    with pytest.raises(ArchiveError, match=r"was edited or replaced after the session was made"):
        session.set_providers(CPU)
    assert outputs(session) == expected


# Packed weights

needs_comparing = pytest.mark.skipif(
    not compares_packed(), reason="this ONNX Runtime does not compare packed weights"
)


@needs_comparing
@pytest.mark.parametrize("ir_version", [3, 8, 10])
@pytest.mark.parametrize("make", [in_graph, in_branches, with_a_shape], ids=lambda it: it.__name__)
def test_constants_of_the_main_graph_are_packed(
    path: Path, make: Callable[[], onnx.ModelProto], ir_version: int
) -> None:
    model = make()
    model.ir_version = ir_version
    onnxarchive.save(model, path, convert_attribute=True)
    expected = outputs(ort.InferenceSession(model.SerializeToString(), providers=CPU))
    with contextlib.suppress(UnsupportedFeatureError):  # nothing to pack
        onnxarchive.prepack(path)
    session = onnxarchive.session(path, providers=CPU)
    assert outputs(session) == expected
    assert session.packed_weights == {in_graph: 2, in_branches: 0, with_a_shape: 1}[make]
    assert onnxarchive.load(path) == model
    assert onnxarchive.check(path, full=True) == []


@needs_comparing
@pytest.mark.parametrize("names", [[], ["a", "b"]], ids=["none", "two"])
def test_a_constant_without_one_output_is_refused_by_onnxruntime(
    path: Path, names: list[str]
) -> None:
    model = in_graph()
    model.graph.node.append(helper.make_node("Constant", [], names, value=weight(9)))
    onnxarchive.save(model, path, convert_attribute=True)
    with pytest.raises(UnsupportedFeatureError, match="cannot load"):
        onnxarchive.prepack(path)


@needs_comparing
def test_a_constant_whose_name_is_not_in_utf_8_is_not_packed(path: Path) -> None:
    model = in_graph()
    serialized = helper.make_node("Constant", [], [], value=weight(9)).SerializeToString()
    # protobuf parses a string that is not UTF-8, but cannot set it.
    model.graph.node.add().ParseFromString(serialized + bytes([2 << 3 | 2, 1, 0xFF]))
    onnxarchive.save(model, path, convert_attribute=True)
    onnxarchive.prepack(path)
    assert onnxarchive.session(path, providers=CPU).packed_weights == 2


@needs_comparing
def test_an_edit_keeps_packed_constants_whose_bytes_stay(path: Path) -> None:
    onnxarchive.save(in_graph(), path, convert_attribute=True)
    onnxarchive.prepack(path)
    with (
        pytest.warns(UserWarning, match="16384 bytes of packed weights stay"),
        onnxarchive.edit(path, compact=True) as edit,
    ):
        edit.model.graph.node[2].attribute[0].t.CopyFrom(weight(3))
    session = onnxarchive.session(path, providers=CPU)
    assert session.packed_weights == 1
    changed = in_graph()
    changed.graph.node[2].attribute[0].t.CopyFrom(weight(3))
    assert outputs(session) == outputs(
        ort.InferenceSession(changed.SerializeToString(), providers=CPU)
    )
