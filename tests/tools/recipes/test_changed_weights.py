"""The recipes that change weights one at a time give what ONNX Runtime's own tools give."""

from __future__ import annotations

import importlib
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from models import flip_byte, text_model
from onnx import helper, numpy_helper

import onnxarchive

ort: Any = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
pytest.importorskip("onnx_ir", reason="onnx_ir is not installed")
quantize: Any = importlib.import_module("tools.recipes.quantize")
to_float16: Any = importlib.import_module("tools.recipes.to_float16")

pytestmark = pytest.mark.tool

SIDE = 96
X = np.random.default_rng(7).standard_normal((8, SIDE), np.float32)
# `both` is also used by another operator than MatMul, `tall` has 100 rows, `outer` is one matrix
# with three dims, `branch` is used in a branch, `inner` belongs to one, and `small` stays in the
# model, also when it is quantized. Max stays float32 as `peak` does; `scale` is converted back.
SHAPES = {
    "both": (SIDE, SIDE),
    "wide": (SIDE, 100),
    "tall": (100, SIDE),
    "outer": (1, SIDE, SIDE),
    "branch": (SIDE, SIDE),
    "small": (SIDE, 2),
    "peak": (1024,),
    "scale": (1024,),
}
TEXT = f"""
changed (float[8, {SIDE}] x, bool b)
    => (float[8, {SIDE}] y, float[8, 2] z, float[1024] top, float[1024] p) {{
  m0 = MatMul(x, both)
  t = Transpose(both)
  m1 = MatMul(m0, t)
  m2 = MatMul(m1, wide)
  m3 = MatMul(m2, tall)
  axes = Constant<value = int64[1] {{0}}>()
  m4 = Unsqueeze(m3, axes)
  m5 = MatMul(m4, outer)
  m6 = Squeeze(m5, axes)
  m7 = If(b) <
    then_branch = then () => (float[8, {SIDE}] yes) {{ yes = MatMul(m6, branch) }},
    else_branch = otherwise () => (float[8, {SIDE}] no) {{ no = MatMul(m6, inner) }}
  >
  z = MatMul(m7, small)
  y = Add(m7, offset)
  top = Max(peak, scale)
  p = Mul(scale, scale)
}}
"""


def values(name: str, shape: tuple[int, ...]) -> onnx.TensorProto:
    array = np.random.default_rng([*name.encode()]).standard_normal(shape, np.float32)
    return numpy_helper.from_array(array / 8, name)


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    model = text_model(TEXT, *(values(*it) for it in SHAPES.items()), opset=17)
    (branches,) = (node for node in model.graph.node if node.op_type == "If")
    branches.attribute[1].g.initializer.append(values("inner", (SIDE, SIDE)))
    constant = helper.make_node("Constant", [], ["offset"], value=values("", (8, SIDE)))
    model.graph.node.insert(0, constant)
    return onnx.shape_inference.infer_shapes(model)


def outputs(path: Path, b: bool) -> list[bytes]:
    session = onnxarchive.session(path, providers=["CPUExecutionProvider"])
    return [output.tobytes() for output in session.run(None, {"x": X, "b": np.array(b)})]


def tensors(model: onnx.ModelProto) -> dict[str, bytes]:
    """The initializers of a model with its subgraphs: type, dims and elements by name."""
    found: dict[str, bytes] = {}
    graphs = [model.graph]
    for graph in graphs:
        for tensor in graph.initializer:
            array = numpy_helper.to_array(tensor)
            found[tensor.name] = f"{array.dtype} {array.shape}".encode() + array.tobytes()
        graphs += [it.g for node in graph.node for it in node.attribute if it.HasField("g")]
    return found


def test_weights_of_4_bits_are_those_of_the_quantizer_of_onnx_runtime(
    model: onnx.ModelProto, path: Path
) -> None:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    onnxarchive.save(model, path, convert_attribute=True)
    small, expected = path.with_name("small.onnxa"), path.with_name("expected.onnxa")
    quantize.quantize_to_4_bits(str(path), str(small))
    quantizer = MatMulNBitsQuantizer(onnxarchive.load(path), bits=4, block_size=32)
    quantizer.process()
    onnxarchive.save(quantizer.model.model, expected)
    found = onnxarchive.load(small)
    assert tensors(found) == tensors(quantizer.model.model)
    assert {"both", "both_Q4", "outer_Q4", "inner_Q4", "branch_Q4"} <= tensors(found).keys()
    assert "branch" not in tensors(found)
    for b in (False, True):
        assert outputs(small, b) == outputs(expected, b)


def test_a_weight_of_two_operators_is_quantized_once(path: Path) -> None:
    twice = (
        f"t (float[8, {SIDE}] x) => (float[8, {SIDE}] y) {{ m = MatMul(x, w) y = MatMul(m, w) }}"
    )
    weight, other = (values("w", (SIDE, SIDE)) for _ in range(2))
    other.name = "v"
    onnxarchive.save(text_model(twice, weight), path)
    quantize.quantize_to_4_bits(str(path), str(path))
    once = onnxarchive.session(path).run(None, {"x": X})
    assert len(onnxarchive.load(path).graph.initializer) == 3
    onnxarchive.save(text_model(twice.replace("(m, w)", "(m, v)"), weight, other), path)
    quantize.quantize_to_4_bits(str(path), str(path))
    np.testing.assert_array_equal(onnxarchive.session(path).run(None, {"x": X}), once)


@pytest.mark.filterwarnings("ignore:.*the float32 number")
def test_weights_of_16_bits_are_those_of_the_converter_of_onnx_runtime(
    model: onnx.ModelProto, path: Path
) -> None:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnxarchive.save(model, path, convert_attribute=True)
    half, expected = path.with_name("half.onnxa"), path.with_name("expected.onnxa")
    to_float16.convert(str(path), str(half))
    converted = convert_float_to_float16(onnxarchive.load(path), keep_io_types=True)
    onnxarchive.save(converted, expected)
    found = onnxarchive.load(half)
    assert tensors(found) == tensors(converted)
    types = {name: data.split()[0] for name, data in tensors(found).items()}
    assert (types["peak"], types["scale"], types["inner"]) == (b"float32", b"float16", b"float16")
    onnx.checker.check_model(found, full_check=True)
    with onnxarchive.open(half) as archive:
        assert (
            len(archive.entries) == len(tensors(found)) - 1 + 2
        )  # not `small`; Constant and model
    for b in (False, True):
        assert outputs(half, b) == outputs(expected, b)


@pytest.mark.parametrize("name", ["4 bits", "float16"])
def test_each_weight_is_computed_once_and_only_one_is_held(
    name: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, side = 40, 256
    names = [f"w{number}" for number in range(count)]
    nodes = [f"m{i + 1} = MatMul(m{i}, {name})" for i, name in enumerate(names)]
    text = f"t (float[1, {side}] m0) => (float[1, {side}] m{count}) {{ {' '.join(nodes)} }}"
    onnxarchive.save(text_model(text, *(values(it, (side, side)) for it in names)), path)
    target = path.with_name("target.onnxa")
    if name == "4 bits":
        owner, computing, run = quantize.QUANTIZER, "qbits_block_quant", quantize.quantize_to_4_bits
    else:
        owner, computing, run = to_float16.float16, "convert_np_to_float16", to_float16.convert
    original, computed = getattr(owner, computing), Counter[bytes]()

    def counting(array: np.ndarray) -> Any:
        computed[array.tobytes()] += 1
        return original(array)

    monkeypatch.setattr(owner, computing, counting)
    run(str(path), str(target))
    assert [*computed.values()] == [1] * count
    monkeypatch.setattr(owner, computing, original)
    tracemalloc.start()
    try:
        run(str(path), str(target))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The converter to float16 makes some copies of the weight that it converts.
    assert peak < 6 * side**2 * 4
    assert onnxarchive.check(target, full=True) == []


@pytest.mark.parametrize("run", [quantize.quantize_to_4_bits, to_float16.convert])
def test_a_damaged_weight_is_not_converted(run: Any, model: onnx.ModelProto, path: Path) -> None:
    onnxarchive.save(model, path)
    with onnxarchive.open(path) as archive:
        offset = archive.entries["tall"].data_offset
    flip_byte(path, offset)
    target = path.with_name("target.onnxa")
    with pytest.raises(onnxarchive.ChecksumError, match="tall"):
        run(str(path), str(target))
    assert not target.exists()
