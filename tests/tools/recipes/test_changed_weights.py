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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_of_16_bits_are_quantized_as_by_onnx_runtime(dtype: str, path: Path) -> None:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    text = f"t ({dtype}[8, {SIDE}] x) => ({dtype}[8, {SIDE}] y) {{ y = MatMul(x, w) }}"
    array = numpy_helper.to_array(values("w", (SIDE, SIDE))).astype(np.dtype(dtype))
    onnxarchive.save(text_model(text, numpy_helper.from_array(array, "w"), opset=17), path)
    quantizer = MatMulNBitsQuantizer(onnxarchive.load(path), bits=4, block_size=32)
    quantizer.process()
    quantize.quantize_to_4_bits(str(path), str(path))
    found = tensors(onnxarchive.load(path))
    assert found == tensors(quantizer.model.model)
    assert found["w_scales"].startswith(f"{dtype} ".encode())


def test_a_weight_stays_if_it_is_an_output_or_no_matrix_for_the_operator(path: Path) -> None:
    text = f"""t (float[8, {SIDE}] x, float[2, 8, {SIDE}] x3)
        => (float[8, {SIDE}] y, float[1, 8, {SIDE}] more, float[2, 8, {SIDE}] stack,
            float[{SIDE}, {SIDE}] out) {{
      y = MatMul(x, out)
      more = MatMul(x, outer)
      stack = MatMul(x3, two)
    }}"""
    shapes = {"out": (SIDE, SIDE), "outer": (1, SIDE, SIDE), "two": (2, SIDE, SIDE)}
    model = text_model(text, *(values(*it) for it in shapes.items()))
    # A caller could give another value for this weight, which becomes a constant.
    model.graph.input.append(helper.make_tensor_value_info("out", 1, [SIDE, SIDE]))
    onnxarchive.save(model, path)
    quantize.quantize_to_4_bits(str(path), str(path))
    found = onnxarchive.load(path)
    parts = {"out_Q4", "out_scales", "out_zero_points"}
    assert tensors(found).keys() == {*shapes, *parts}
    assert [value.name for value in found.graph.input] == ["x", "x3"]
    feeds = {"x": X, "x3": np.stack([X, X])}
    *_, out = onnxarchive.session(path).run(None, feeds)
    assert out.tobytes() == numpy_helper.to_array(model.graph.initializer[0]).tobytes()


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
    model = text_model(text, *(values(it, (side, side)) for it in names))
    small = text_model(
        "s (float[1, 64] x) => (float[1, 64] y) { y = MatMul(x, v) }", values("v", (64, 64))
    )
    # The last model has the same weights; only the float16 recipe converts these again.
    models = {"small": small} | ({"again": model} if name == "4 bits" else {})
    onnxarchive.save(model, path, models=models)
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
    assert [*computed.values()] == [1] * (count + 1)
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


def test_the_converter_to_16_bits_knows_shapes_that_are_outside_the_model(path: Path) -> None:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    # Max stays float32; so the type of each of its inputs must be known, to convert it.
    text = """t (float[8, 96] x) => (float[96, 8] y) {
        r = Reshape(x, shape)
        m = Max(r, bias)
        e = Expand(r, shape)
        y = Add(m, e)
    }"""
    shape = numpy_helper.from_array(np.array([96, 8]), "shape")
    model = text_model(text, shape, values("bias", (96, 8)), opset=17)
    onnxarchive.save(model, path, size_threshold=0)
    to_float16.convert(str(path), str(path))
    found = onnxarchive.load(path)
    assert tensors(found) == tensors(convert_float_to_float16(model, keep_io_types=True))
    onnx.checker.check_model(found, full_check=True)
    assert onnxarchive.session(path).run(None, {"x": X})[0].shape == (96, 8)


@pytest.mark.parametrize("run", [quantize.quantize_to_4_bits, to_float16.convert])
def test_a_model_that_would_lose_something_is_refused(
    run: Any, model: onnx.ModelProto, path: Path
) -> None:
    target = path.with_name("target.onnxa")
    changed = onnx.ModelProto.FromString(model.SerializeToString())
    changed.training_info.add()
    onnxarchive.save(changed, path)
    with pytest.raises(onnxarchive.UnsupportedFeatureError, match="training_info"):
        run(str(path), str(target))
    del changed.training_info[:]
    indices = helper.make_tensor("", onnx.TensorProto.INT64, [1], [3])
    data = helper.make_tensor("sparse", onnx.TensorProto.FLOAT, [1], [2.0])
    changed.graph.sparse_initializer.append(helper.make_sparse_tensor(data, indices, [SIDE]))
    onnxarchive.save(changed, path)
    with pytest.raises(onnxarchive.UnsupportedFeatureError, match="sparse"):
        run(str(path), str(target))
    assert not target.exists()


def test_a_small_tensor_of_another_model_is_not_replaced_by_a_weight_of_its_name(
    path: Path,
) -> None:
    text = f"t (float[8, {SIDE}] x) => (float[8, {SIDE}] y) {{ y = Add(x, w) }}"
    other = "o (float[2] x) => (float[2] y) { y = Mul(x, w) }"
    small = numpy_helper.from_array(np.full(2, 3, np.float32), "w")
    models = {"other": text_model(other, small)}
    onnxarchive.save(text_model(text, values("w", (8, SIDE))), path, models=models)
    quantize.quantize_to_4_bits(str(path), str(path))
    session = onnxarchive.session(path, model="other")
    assert session.run(None, {"x": np.ones(2, np.float32)})[0].tolist() == [3, 3]
    assert onnxarchive.check(path, full=True) == []


RUNS = [quantize.quantize_to_4_bits, quantize.quantize_to_8_bits, to_float16.convert]


@pytest.mark.parametrize("run", RUNS)
def test_packed_copies_of_the_old_weights_are_not_kept(run: Any, path: Path) -> None:
    text = f"t (float[8, {SIDE}] x) => (float[8, {SIDE}] y) {{ y = MatMul(x, w) }}"
    model = text_model(text, values("w", (SIDE, SIDE)))
    onnxarchive.save(model, path, assets={"labels.txt": b"cat\n"})
    onnxarchive.prepack(path)
    target = path.with_name("target.onnxa")
    run(str(path), str(target))
    for archive, count in ((path, 3), (target, 1)):
        with onnxarchive.open(archive) as opened:
            assert len(opened.assets) == count
            assert opened.assets["labels.txt"] == b"cat\n"


def test_all_models_get_weights_of_8_bits_or_none(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"t (float[8, {SIDE}] x) => (float[8, {SIDE}] y) {{ y = MatMul(x, w) }}"
    model = text_model(text, values("w", (SIDE, SIDE)))
    onnxarchive.save(model, path, models={"further": model})
    content, original = path.read_bytes(), quantize.to_8_bits
    models = []

    def interrupted(model: onnx.ModelProto) -> Any:
        models.append(model)
        if len(models) == 2:
            raise KeyboardInterrupt
        return original(model)

    monkeypatch.setattr(quantize, "to_8_bits", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantize.quantize_to_8_bits(str(path), str(path))
    assert path.read_bytes() == content
    assert [*path.parent.iterdir()] == [path]


@pytest.mark.parametrize("recipe", [quantize, to_float16])
def test_a_source_that_is_no_archive_ends_with_a_message(
    recipe: Any, model: onnx.ModelProto, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = path.with_suffix(".onnx")
    monkeypatch.setattr("sys.argv", ["recipe.py", str(source), str(path)])
    with pytest.raises(SystemExit, match="No such file"):
        recipe.main()
    onnx.save(model, source)
    with pytest.raises(SystemExit, match="expected an ONNX archive, found an ONNX model"):
        recipe.main()
    assert not path.exists()


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
