"""`transform`: optimizers and other functions on archives, with the weights kept from them or not.

The optimizers are skipped where they are not installed.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from edits import refused
from models import (
    MEASURE_MEMORY,
    attribute,
    entry_of,
    flip_byte,
    full_model,
    keys_of,
    model_of,
    normalised,
    raw_tensor,
    run_python,
    runnable_model,
    text_model,
)
from onnx import TensorProto, helper, numpy_helper
from pages import needs_smaps

import onnxarchive
from onnxarchive import ArchiveFormatError, ChecksumError
from onnxarchive.interop.transform import Function, Weights

pytestmark = [pytest.mark.tool, pytest.mark.filterwarnings("ignore:.*changed nothing")]

# Most tests are about hidden weights.
transform = partial(onnxarchive.transform, weights="hidden")

MIB = 1 << 20
ASSETS = {"tokenizer.json": b"{}", "deep/labels.txt": b"cat\ndog\n"}
HOWS: tuple[Weights, ...] = ("hidden", "external", "loaded")
# How each optimizer is called, in one line.
OPTIMIZERS = {"onnxsim": "simplify", "onnxslim": "slim", "onnxoptimizer": "optimize"}


def _optimizer(module: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(
        pytest.importorskip(module, reason=f"{module} is not installed"), OPTIMIZERS[module]
    )
    return found


def _weight(name: str, seed: int) -> TensorProto:
    elements = np.random.default_rng(seed).standard_normal((64, 64)).astype(np.float32)
    return numpy_helper.from_array(elements, name)


def _clumsy_model() -> onnx.ModelProto:
    """A model with much to be removed, and weights of one shape that differ."""
    model = text_model(
        """clumsy (float[2, 64] x, bool condition) => (float[2, 64] y) {
  p = MatMul(x, a)
  p2 = Identity(p)
  q = MatMul(p2, b)
  shape = Shape(q)
  q2 = Reshape(q, shape)
  dead = MatMul(q2, dead_w)
  z = If(condition) <
    else_branch = else () => (float[2, 64] else_y) {
      else_product = MatMul(x, else_w)
      else_y = Identity(else_product)
    },
    then_branch = then () => (float[2, 64] then_y) {
      then_product = MatMul(x, then_w)
      then_y = Identity(then_product)
    }
  >
  z2 = Identity(z)
  y = Mul(q2, z2)
}""",
        *(_weight("a", 1), _weight("b", 2), _weight("dead_w", 3)),
    )
    otherwise, then = model.graph.node[6].attribute
    then.g.initializer.append(_weight("then_w", 5))
    otherwise.g.initializer.append(_weight("else_w", 6))
    return model


def _run(path: Path) -> list[list[Any]]:
    pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    session = onnxarchive.session(path, providers=["CPUExecutionProvider"])
    x = np.random.default_rng(9).standard_normal((2, 64)).astype(np.float32)
    taken = {value.name for value in session.get_inputs()}
    given = [{"x": x, "condition": np.array(it)} for it in (True, False)]
    return [session.run(None, {name: it[name] for name in it if name in taken}) for it in given]


@pytest.fixture
def clumsy(tmp_path: Path) -> Path:
    path = tmp_path / "clumsy.onnxa"
    onnxarchive.save(_clumsy_model(), path, assets=ASSETS)
    return path


def _require_equal_outputs(one: Path, other: Path) -> None:
    for outputs, expected in zip(_run(one), _run(other), strict=True):
        np.testing.assert_array_equal(outputs, expected)


def _no_change(model: onnx.ModelProto) -> onnx.ModelProto:
    return model


def _in_place(change: Callable[[onnx.ModelProto], object]) -> Function:
    """A function that changes the model that it gets, and returns it."""

    def function(model: onnx.ModelProto) -> onnx.ModelProto:
        change(model)
        return model

    return function


def _transformed(model: onnx.ModelProto, function: Function, path: Path, **options: Any) -> Path:
    """Saves a model as `path`, transforms it, and returns the path of the result."""
    onnxarchive.save(model, path, assets=ASSETS, convert_attribute=True)
    transform(path, path.with_name("out.onnxa"), function, **options)
    return path.with_name("out.onnxa")


@contextlib.contextmanager
def _both(
    before: Path, function: Function, **options: Any
) -> Iterator[tuple[onnxarchive.Archive, onnxarchive.Archive]]:
    """Transforms an archive to another file, which breaks no rule, and opens it and the first."""
    path = before.with_name("out.onnxa")
    transform(before, path, function, **options)
    assert onnxarchive.check(path, full=True) == []
    with onnxarchive.open(path) as after, onnxarchive.open(before) as archive:
        yield after, archive


# Optimizers


@pytest.mark.parametrize("module", OPTIMIZERS)
def test_an_optimizer_that_sees_no_weights_leaves_every_bit_of_the_result(
    clumsy: Path, module: str
) -> None:
    with _both(clumsy, _optimizer(module)) as (after, before):
        assert {name: bytes(data) for name, data in after.assets.items()} == ASSETS
        kinds = [node.op_type for node in after.model.graph.node]
        assert len(kinds) < len(before.model.graph.node)
        assert "Identity" not in kinds
        assert kinds.count("MatMul") == 2  # a dead one is gone
        stored = {entry.crc32 for name, entry in after.entries.items() if name != "__MODEL_PROTO"}
        assert stored <= {entry.crc32 for entry in before.entries.values()}
        assert set(after.tensors) == {"a", "b", "then_w", "else_w"}
        assert [value.name for value in after.model.graph.input] == ["x", "condition"]
        assert b"onnxarchive:" not in bytes(after.read("__MODEL_PROTO"))
    path = clumsy.with_name("out.onnxa")
    _require_equal_outputs(path, clumsy)
    onnx.checker.check_model(onnxarchive.load(path), full_check=True)


@pytest.mark.parametrize("module", OPTIMIZERS)
def test_an_optimizer_that_sees_the_weights_works_on_all_of_them(path: Path, module: str) -> None:
    model = _clumsy_model()
    # onnxoptimizer fails on initializers of branches.
    del model.graph.node[6:8]
    model.graph.node[6].input[1] = "p"
    onnxarchive.save(model, path, assets=ASSETS)
    with _both(path, _optimizer(module), weights="loaded") as (after, _):
        assert {name: bytes(data) for name, data in after.assets.items()} == ASSETS
        assert len(after.model.graph.node) < len(model.graph.node)
    found, expected = _run(path.with_name("out.onnxa")), _run(path)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weights", ["hidden", "loaded"])
def test_weights_are_folded_only_where_they_are_seen(path: Path, weights: Weights) -> None:
    fold = partial(_optimizer("onnxoptimizer"), passes=["fuse_bn_into_conv"])
    vectors = [np.linspace(1, 2, 64, dtype=np.float32) + index for index in range(4)]
    model = text_model(
        """g (float[1, 8, 9, 9] x) => (float[1, 64, 7, 7] y) {
  c = Conv(x, kernel)
  y = BatchNormalization(c, v0, v1, v2, v3)
}""",
        raw_tensor("kernel", dims=(64, 8, 3, 3)),
        *(numpy_helper.from_array(it, f"v{index}") for index, it in enumerate(vectors)),
    )
    onnxarchive.save(model, path)
    with _both(path, fold, weights=weights) as (after, _):
        kinds = [node.op_type for node in after.model.graph.node]
    assert ("BatchNormalization" in kinds) == (weights == "hidden")


def test_the_version_of_operators_is_converted(clumsy: Path) -> None:
    convert = partial(onnx.version_converter.convert_version, target_version=22)
    with _both(clumsy, convert) as (after, _):
        assert after.model.opset_import[0].version == 22
        assert set(after.tensors) == {"a", "b", "dead_w", "then_w", "else_w"}
    _require_equal_outputs(clumsy.with_name("out.onnxa"), clumsy)


@needs_smaps
@pytest.mark.parametrize("module", OPTIMIZERS)
def test_300_mb_are_optimized_in_little_memory(tmp_path: Path, module: str) -> None:
    _optimizer(module)
    layers = "".join(f"p{i} = MatMul(x{i}, w{i}) x{i + 1} = Identity(p{i})\n" for i in range(5))
    with onnxarchive.Writer(tmp_path / "m.onnxa") as writer:
        for index in range(5):
            writer.add(f"w{index}", np.full((4096, 4096), index + 1, np.float32))
        writer.finish(text_model(f"g (float[1, 4096] x0) => (float[1, 4096] x5) {{ {layers} }}"))
    assert os.path.getsize(tmp_path / "m.onnxa") > 300 * MIB
    code = f"""
{MEASURE_MEMORY}
import onnx, onnxarchive, {module}
from onnxarchive import transform
function = {module}.{OPTIMIZERS[module]}
print(growth(lambda: transform(sys.argv[1], sys.argv[2], function, weights="hidden")))
"""
    printed = run_python(
        code, tmp_path / "m.onnxa", tmp_path / "out.onnxa", PYTHONWARNINGS="default"
    )
    taken = int(printed.split()[-1])
    assert taken < 100 * MIB
    with onnxarchive.open(tmp_path / "out.onnxa") as archive:
        assert "Identity" not in [node.op_type for node in archive.model.graph.node]
        assert [array[0, 0] for array in archive.tensors.values()] == [1, 2, 3, 4, 5]


# A function that finds no weights


def _quantized(model: onnx.ModelProto) -> onnx.ModelProto:
    from onnxruntime.quantization import quantize_dynamic

    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "quantized.onnx")
        quantize_dynamic(model, path)
        return onnx.load(path)


def _in_4_bits(model: onnx.ModelProto) -> onnx.ModelProto:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer = MatMulNBitsQuantizer(model)
    quantizer.process()
    return quantizer.model.model  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("quantize", "operator"), [(_quantized, "MatMulInteger"), (_in_4_bits, "MatMulNBits")]
)
def test_a_quantizer_reads_loaded_weights(
    clumsy: Path, quantize: Callable[..., onnx.ModelProto], operator: str
) -> None:
    pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with _both(clumsy, quantize, weights="loaded") as (after, _):
            assert operator in [node.op_type for node in after.model.graph.node]


def test_a_function_that_changes_nothing_is_warned_of_where_weights_are_hidden(
    clumsy: Path, path: Path
) -> None:
    def upgraded(model: onnx.ModelProto) -> None:
        model.opset_import[0].version += 1
        model.producer_name = "upgrade"

    for function in (_no_change, partial(_no_change)):
        with pytest.warns(UserWarning, match=r"clumsy\.onnxa: _no_change changed nothing"):
            transform(clumsy, clumsy, function)
    onnxarchive.save(model_of(raw_tensor("w")), path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        transform(path, path, _no_change)  # hides no weight
        described = _in_place(lambda model: setattr(model, "doc_string", "described"))
        for change in (described, _in_place(upgraded), onnx.shape_inference.infer_shapes):
            transform(clumsy, clumsy, change)


# The model that a function gets


def test_hidden_weights_are_inputs_without_data(clumsy: Path) -> None:
    seen: list[onnx.ModelProto] = []
    transform(clumsy, clumsy, _in_place(seen.append))
    (model,) = seen
    assert model.ByteSize() < 5000
    names = [value.name for value in model.graph.input]
    assert names == ["x", "condition", "a", "b", "dead_w", "else_w", "then_w"]
    assert not model.graph.initializer
    onnx.checker.check_model(model, full_check=True)


def test_tensors_that_shapes_depend_on_are_not_hidden(path: Path) -> None:
    shape = numpy_helper.from_array(np.arange(200), "shape")

    def look(model: onnx.ModelProto) -> None:
        assert [tensor.name for tensor in model.graph.initializer] == ["shape"]
        assert (numpy_helper.to_array(model.graph.initializer[0]) == np.arange(200)).all()

    out = _transformed(model_of(shape, raw_tensor("w", dims=(300,))), _in_place(look), path)
    assert out.read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("make", "weights"),
    [
        *((runnable_model, weights) for weights in HOWS),
        (full_model, "external"),
        (full_model, "loaded"),
    ],
)
def test_a_function_that_changes_nothing_gives_the_same_bytes(
    path: Path, make: Callable[[], onnx.ModelProto], weights: Weights
) -> None:
    assert _transformed(make(), _no_change, path, weights=weights).read_bytes() == path.read_bytes()


def test_hidden_initializers_of_subgraphs_come_back_in_the_main_graph(path: Path) -> None:
    onnxarchive.save(full_model(), path, convert_attribute=True)
    with _both(path, _no_change) as (after, before):
        assert set(after.tensors) == set(before.tensors)
        for name, array in before.tensors.items():
            assert array.tobytes() == after.tensors[name].tobytes()
        assert len(after.model.graph.initializer) == len(after.tensors)
        assert len(keys_of(after)) == len(keys_of(before))


def test_initializers_of_one_name_in_two_branches_are_not_mixed_up(path: Path) -> None:
    model = _clumsy_model()
    for branch in model.graph.node[6].attribute:
        branch.g.initializer[0].name = branch.g.node[0].input[1] = "w"
    out = _transformed(model, _no_change, path)
    assert onnxarchive.load(out) == model
    _require_equal_outputs(out, path)


@pytest.mark.parametrize("is_weight", [False, True])
def test_an_input_whose_doc_string_looks_like_a_mark_stays_one(path: Path, is_weight: bool) -> None:
    model = runnable_model()
    weight = model.graph.initializer[0]
    if is_weight:
        port = helper.make_tensor_value_info(weight.name, weight.data_type, weight.dims)
        model.graph.input.append(port)
    model.graph.input[-1].doc_string = "onnxarchive:layer.0/weight"
    assert onnxarchive.load(_transformed(model, _no_change, path)) == model


# Changes by a function


def _remove_dead(model: onnx.ModelProto) -> None:
    del model.graph.node[5]


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_weight_that_nothing_uses_any_more_is_left_out(path: Path, is_trained: bool) -> None:
    model = _clumsy_model()
    if is_trained:
        model.training_info.add().update_binding.add(key="dead_w", value="dead_w")
    onnxarchive.save(model, path)
    with _both(path, _in_place(_remove_dead)) as (after, before):
        assert {*before.tensors} - {*after.tensors} == (set() if is_trained else {"dead_w"})


def test_a_weight_that_nothing_used_before_is_kept(path: Path) -> None:
    onnxarchive.save(model_of(raw_tensor("w", dims=(300,))), path)
    with _both(path, _no_change) as (after, _):
        assert list(after.tensors) == ["w"]


def test_renamed_weights_are_known_by_their_marks(clumsy: Path) -> None:
    with _both(clumsy, partial(onnx.compose.add_prefix, prefix="m/")) as (after, before):
        np.testing.assert_array_equal(after.tensors["m/a"], before.tensors["a"])
        np.testing.assert_array_equal(after.tensors["m/b"], before.tensors["b"])
        assert after.model.graph.input[0].name == "m/x"
        assert all(not value.doc_string for value in after.model.graph.input)


def test_no_mark_of_a_weight_is_left_in_the_model(clumsy: Path) -> None:
    def note(model: onnx.ModelProto) -> None:
        model.graph.value_info.append(model.graph.input[2])
        model.graph.node[6].attribute[0].g.value_info.append(model.graph.input[3])

    with _both(clumsy, _in_place(note)) as (after, _):
        assert [value.name for value in after.model.graph.value_info] == ["a"]
        assert b"onnxarchive:" not in bytes(after.read("__MODEL_PROTO"))


def test_two_weights_may_change_names(clumsy: Path) -> None:
    def swap(model: onnx.ModelProto) -> None:
        one, other = model.graph.input[2:4]
        one.name, other.name = other.name, one.name

    with _both(clumsy, _in_place(swap)) as (after, before):
        np.testing.assert_array_equal(after.tensors["b"], before.tensors["a"])
        np.testing.assert_array_equal(after.tensors["a"], before.tensors["b"])


def test_an_initializer_takes_the_place_of_a_weight_whose_input_is_removed(clumsy: Path) -> None:
    new = np.ones((64, 64), np.float32)

    def put_another(model: onnx.ModelProto) -> None:
        del model.graph.input[2]
        model.graph.initializer.append(numpy_helper.from_array(new, "a"))

    with _both(clumsy, _in_place(put_another)) as (after, _):
        names = [tensor.name for tensor in after.model.graph.initializer]
        assert names == ["a", "b", "dead_w", "else_w", "then_w"]
        np.testing.assert_array_equal(after.tensors["a"], new)


@pytest.mark.parametrize("weights", HOWS)
def test_initializers_that_have_one_name_keep_it(path: Path, weights: Weights) -> None:
    model = _clumsy_model()
    model.graph.initializer.append(_weight("a", 7))
    sparse = model.graph.sparse_initializer.add(dims=[64, 64])
    sparse.values.CopyFrom(numpy_helper.from_array(np.ones(1, np.float32), "b"))
    sparse.indices.CopyFrom(numpy_helper.from_array(np.zeros(1, np.int64), "b.indices"))
    with onnxarchive.open(_transformed(model, _no_change, path, weights=weights)) as archive:
        names = [tensor.name for tensor in archive.model.graph.initializer]
        assert sorted(names)[:4] == ["a", "a", "b", "dead_w"]
        assert [tensor.values.name for tensor in archive.model.graph.sparse_initializer] == ["b"]


def test_external_weights_are_renamed_removed_copied_and_added(clumsy: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        a, b, dead = model.graph.initializer
        dead.CopyFrom(b)
        dead.name = "twice"
        a.name = "renamed"
        a.dims[:] = [32, 128]
        model.graph.initializer.append(raw_tensor("new", dims=(400,)))

    with _both(clumsy, _in_place(change), weights="external") as (after, before):
        assert list(after.tensors)[:4] == ["renamed", "b", "twice", "new"]
        renamed = before.tensors["a"].reshape(32, 128)
        np.testing.assert_array_equal(after.tensors["renamed"], renamed)
        np.testing.assert_array_equal(after.tensors["b"], before.tensors["b"])
        np.testing.assert_array_equal(after.tensors["twice"], before.tensors["b"])
        assert after.entries["new"].nbytes == 1600
        assert {name: bytes(data) for name, data in after.assets.items()} == ASSETS


@pytest.mark.parametrize("weights", HOWS)
def test_initializers_may_be_removed_and_sorted_in_place(clumsy: Path, weights: Weights) -> None:
    def change(model: onnx.ModelProto) -> None:
        names = [tensor.name for tensor in model.graph.initializer]
        if "dead_w" in names:
            del model.graph.initializer[names.index("dead_w")]
            _remove_dead(model)
        model.graph.initializer.sort(key=lambda tensor: tensor.name, reverse=True)

    with _both(clumsy, _in_place(change), weights=weights) as (after, before):
        for name in set(after.tensors) & set(before.tensors):
            np.testing.assert_array_equal(after.tensors[name], before.tensors[name])


def test_transform_may_replace_its_own_archive(clumsy: Path) -> None:
    expected = _run(clumsy)
    with onnxarchive.open(clumsy) as before:
        view = before.tensors["a"]
        transform(clumsy, clumsy, _no_change)
        assert view.tobytes() == _weight("a", 1).raw_data
    for found, wanted in zip(_run(clumsy), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_transform_has_the_options_of_save(clumsy: Path, tmp_path: Path) -> None:
    done: list[tuple[int, int]] = []
    options: dict[str, Any] = {"size_threshold": 1 << 20, "alignment": 4096}
    options |= {"assets": {"tokenizer.json": b"[]"}, "progress": lambda *it: done.append(it)}
    with _both(clumsy, _no_change, **options) as (after, _):
        names = ["assets/deep/labels.txt", "assets/tokenizer.json", "__MODEL_PROTO"]
        assert list(after.entries) == names
        assert bytes(after.assets["tokenizer.json"]) == b"[]"
        assert all(entry.data_offset % 4096 == 0 for entry in after.entries.values())
    transform(tmp_path / "out.onnxa", tmp_path / "again.onnxa", _no_change)
    with onnxarchive.open(tmp_path / "again.onnxa") as archive:
        assert archive.alignment == 4096  # the archive's
    assert done[-1][0] == done[-1][1]
    _require_equal_outputs(tmp_path / "out.onnxa", clumsy)


@pytest.mark.parametrize("is_kept", [None, False])
def test_attributes_go_back_into_the_model_when_asked(path: Path, is_kept: bool | None) -> None:
    model = model_of(raw_tensor("w", dims=(300,)))
    value = raw_tensor("value", dims=(500,))
    model.graph.node.add(op_type="Constant", output=["c"], attribute=[attribute("value", t=value)])
    out = _transformed(model, _no_change, path, convert_attribute=is_kept)
    with onnxarchive.open(out) as archive:
        assert set(keys_of(archive)) == ({"w"} if is_kept is False else {"w", "value"})
    assert normalised(onnxarchive.load(out)) == normalised(model)


# Refusals, which write nothing


def _retyped(model: onnx.ModelProto) -> None:
    for value in model.graph.input:
        value.type.tensor_type.elem_type = TensorProto.FLOAT16


def _renamed_unmarked(model: onnx.ModelProto) -> None:
    model.graph.input[2].ClearField("doc_string")
    model.graph.input[2].name = model.graph.node[0].input[1] = "other"


def _both_renamed(model: onnx.ModelProto) -> None:
    model.graph.input[2].name = model.graph.node[0].input[1] = "new"
    model.graph.initializer.append(_weight("new", 8))


NO_MODEL = "expected <lambda> to return an onnx.ModelProto, found "
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "nothing": (lambda model: None, TypeError, f"{NO_MODEL}.*None"),
    "tuple": (lambda model: (model,), TypeError, f"{NO_MODEL}.*tu"),
    "invalid": (
        lambda model: (model, False),
        ArchiveFormatError,
        "<lambda> returned False: its model is invalid",
    ),
}
LOSSES: dict[str, tuple[Callable[[onnx.ModelProto], object], str]] = {
    "another type": (_retyped, r"'a': expected FLOAT of shape \[64, 64\].*FLOAT16.*'loaded'"),
    "another shape": (
        lambda model: setattr(model.graph.input[2].type.tensor_type.shape.dim[0], "dim_value", 65),
        r"'a': expected FLOAT of shape \[64, 64\].*\[65, 64\]",
    ),
    "fewer dims": (
        lambda model: model.graph.input[2].type.tensor_type.shape.dim.pop(),
        r"'a': expected FLOAT of shape \[64, 64\].*\[64\]",
    ),
    "a new name without its mark": (
        _renamed_unmarked,
        "'a': the function returned a new input 'other'.*'external'",
    ),
    "no input": (
        lambda model: model.graph.input.pop(2),
        "'a': the function removed the input .*, although the tensor's name is still used",
    ),
    "an input and an initializer": (
        lambda model: model.graph.initializer.append(_weight("a", 8)),
        "'a': the function returned several inputs or initializers 'a' for",
    ),
    "both of a new name": (
        _both_renamed,
        "'a': the function returned several inputs or initializers 'new' for",
    ),
    "an input and a sparse tensor": (
        lambda model: model.graph.sparse_initializer.add().values.CopyFrom(_weight("a", 8)),
        "'a': the function returned several inputs or initializers 'a' for",
    ),
    "two inputs": (
        lambda model: model.graph.input.append(model.graph.input[2]),
        "'a': the function returned several inputs or initializers .*; keep one",
    ),
    "two weights of one name": (
        lambda model: setattr(model.graph.input[2], "name", "b"),
        "'b': the function returned several inputs or initializers 'b' for",
    ),
    "two initializers": (
        lambda model: model.graph.initializer.extend([_weight("new", 8), _weight("new", 9)]),
        "'new': the function returned several initializers",
    ),
}
REFUSED |= {
    kind: (_in_place(change), ArchiveFormatError, message)
    for kind, (change, message) in LOSSES.items()
}


@pytest.mark.parametrize(("function", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_a_function_that_loses_weights_is_refused(
    clumsy: Path, function: Any, kind: type[Exception], message: str
) -> None:
    with refused(clumsy, kind, message) as caught:
        transform(clumsy, clumsy, function)
    if isinstance(caught.value, onnxarchive.ArchiveError):
        assert str(clumsy) in str(caught.value)


@pytest.mark.parametrize("weights", ["external", "loaded"])
def test_a_second_initializer_of_a_name_is_refused_even_if_weights_are_not_hidden(
    clumsy: Path, weights: Weights
) -> None:
    def add_to_branch(model: onnx.ModelProto) -> None:
        model.graph.node[6].attribute[0].g.initializer.append(_weight("else_w", 8))

    with refused(
        clumsy,
        ArchiveFormatError,
        r"'else_w': the function returned several initializers .*; remove",
    ):
        transform(clumsy, clumsy, _in_place(add_to_branch), weights=weights)


def test_a_target_that_cannot_be_written_is_an_error_before_the_function_is_called(
    clumsy: Path, tmp_path: Path
) -> None:
    called: list[onnx.ModelProto] = []

    note = _in_place(called.append)
    with pytest.raises(FileNotFoundError, match=r"out\.onnxa"):
        transform(clumsy, tmp_path / "missing" / "out.onnxa", note)
    with pytest.raises(IsADirectoryError):
        transform(clumsy, tmp_path, note)
    with pytest.raises(FileNotFoundError, match=r"labels\.txt"):
        transform(clumsy, tmp_path / "o.onnxa", note, assets={"a": tmp_path / "labels.txt"})
    assert called == []
    assert os.listdir(tmp_path) == [clumsy.name]


def _point_elsewhere(model: onnx.ModelProto) -> None:
    model.graph.initializer[2].external_data[0].value = "nowhere"


def _take_a_part(model: onnx.ModelProto) -> None:
    model.graph.initializer[2].dims[0] = 32
    model.graph.initializer[2].external_data.add(key="length", value="8192")


def _set_data_of_a_wrong_location(model: onnx.ModelProto) -> None:
    _point_elsewhere(model)
    model.graph.initializer[2].raw_data = bytes(16384)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda model: setattr(model.graph.initializer[2], "raw_data", bytes(16384)),
            r"tensor 'dead_w' .*EXTERNAL, in raw_data; to store .*, clear external_data",
        ),
        (_set_data_of_a_wrong_location, r"tensor 'dead_w' .*EXTERNAL, in raw_data; to store"),
        (_point_elsewhere, r"tensor 'dead_w' .*expected a key .*found 'nowhere'"),
        (
            lambda model: model.graph.initializer[2].dims.__setitem__(0, 65),
            r"tensor 'dead_w' .* all 16384 bytes .*, found .* 16640 bytes",
        ),
        (_take_a_part, r"tensor 'dead_w' .* all 16384 bytes .*, found .* 8192 bytes"),
    ],
)
def test_an_external_tensor_must_be_one_of_the_archive(
    clumsy: Path, change: Callable[[onnx.ModelProto], object], message: str
) -> None:
    done: list[tuple[int, int]] = []
    options: dict[str, Any] = {"weights": "external", "progress": lambda *it: done.append(it)}
    with refused(clumsy, ArchiveFormatError, message):
        transform(clumsy, clumsy, _in_place(change), **options)
    assert done == []  # it is seen before other weights are written


def test_an_exception_of_the_transforming_function_is_raised_unchanged(clumsy: Path) -> None:
    with refused(clumsy, ZeroDivisionError):
        transform(clumsy, clumsy, Mock(side_effect=ZeroDivisionError))


@pytest.mark.parametrize("weights", HOWS)
@pytest.mark.parametrize("size_threshold", [1024, 1 << 20])
def test_damaged_weights_are_not_copied(
    clumsy: Path, weights: Weights, size_threshold: int
) -> None:
    flip_byte(clumsy, entry_of(clumsy, "b").data_offset + 77)
    options: dict[str, Any] = {"weights": weights, "size_threshold": size_threshold}
    with refused(clumsy, ChecksumError, r"clumsy\.onnxa: (entry|tensor) 'b'.*CRC-32"):
        transform(clumsy, clumsy.with_name("out.onnxa"), _no_change, **options)


def test_an_unknown_value_of_weights_is_refused(clumsy: Path) -> None:
    with pytest.raises(ValueError, match=r"expected one of .*hidden.* for weights, found 'none'"):
        transform(clumsy, clumsy, _no_change, weights="none")  # type: ignore[arg-type]
