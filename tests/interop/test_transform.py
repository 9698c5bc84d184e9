"""How `transform` shows weights to a function, and what it says if the function wanted others."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from edits import refused
from models import text_model
from onnx import TensorProto, helper, numpy_helper

import onnxarchive
from onnxarchive import ArchiveFormatError, UnsupportedFeatureError
from onnxarchive.interop.transform import Weights
from onnxarchive.model import model_proto

HOWS: tuple[Weights | None, ...] = (None, "hidden", "external", "loaded")
SEEN: tuple[Weights | None, ...] = (None, "external")
NOT_LOADED: tuple[Weights, ...] = ("hidden", "external")


def weight(name: str, value: float) -> TensorProto:
    return numpy_helper.from_array(np.full((32, 32), value, np.float32), name)


def two_products() -> onnx.ModelProto:
    return text_model(
        "g (float[N, 32] x) => (float[N, 32] y) { p = MatMul(x, a) y = MatMul(p, b) }",
        weight("a", 1),
        weight("b", 2),
    )


@pytest.fixture(name="products")
def _products(tmp_path: Path) -> Path:
    onnxarchive.save(two_products(), tmp_path / "products.onnxa")
    return tmp_path / "products.onnxa"


def renamed(model: onnx.ModelProto) -> onnx.ModelProto:
    model.graph.node[-1].name = "renamed"
    return model


def with_casts(model: onnx.ModelProto) -> onnx.ModelProto:
    """What a converter to float16 that keeps the types of inputs makes of hidden weights."""
    for index, name in enumerate(("a", "b")):
        model.graph.node[index].input[1] = f"{name}_cast"
        cast = helper.make_node("Cast", [name], [f"{name}_cast"], to=TensorProto.FLOAT)
        model.graph.node.insert(0, cast)
        model.graph.node.append(model.graph.node.pop(0))
    return model


def with_a_domain(model: onnx.ModelProto) -> onnx.ModelProto:
    """What a quantizer makes of a model in which it finds no weight."""
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return model


def with_a_producer(model: onnx.ModelProto) -> onnx.ModelProto:
    """What another quantizer makes of such a model."""
    model.producer_name = "onnx.quantize"
    return model


# The choice


def test_below_2_gib_a_function_gets_the_complete_model(products: Path, tmp_path: Path) -> None:
    models: list[onnx.ModelProto] = []

    def note(model: onnx.ModelProto) -> onnx.ModelProto:
        models.append(onnx.ModelProto.FromString(model.SerializeToString()))
        return renamed(model)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        onnxarchive.transform(products, tmp_path / "new.onnxa", note)
    assert models == [two_products()]
    assert onnxarchive.load(tmp_path / "new.onnxa") == renamed(two_products())


def test_from_2_gib_on_the_caller_has_to_choose_what_a_function_gets(
    products: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with onnxarchive.open(products) as archive:
        nbytes = sum(entry.nbytes for entry in archive.entries.values())
    target = tmp_path / "new.onnxa"
    monkeypatch.setattr(model_proto, "SIZE_LIMIT", nbytes)
    calls: list[onnx.ModelProto] = []

    def note(model: onnx.ModelProto) -> onnx.ModelProto:
        calls.append(model)
        return model

    with pytest.raises(ValueError, match=r"products\.onnxa: .*choose weights='hidden' .*external"):
        onnxarchive.transform(products, target, note)
    with pytest.raises(UnsupportedFeatureError, match=r"cannot be loaded.*'hidden' .*'external'"):
        onnxarchive.transform(products, target, note, weights="loaded")
    assert calls == []
    assert not target.exists()
    for weights in NOT_LOADED:
        onnxarchive.transform(products, target, renamed, weights=weights)
    monkeypatch.setattr(model_proto, "SIZE_LIMIT", nbytes + 1)
    onnxarchive.transform(products, target, renamed)
    assert onnxarchive.load(target) == renamed(two_products())


# Functions that want the weights


@pytest.mark.parametrize(
    ("function", "sign"),
    [
        (with_casts, "with_casts added a Cast of the weight 'a' instead of converting the weight"),
        (
            with_a_producer,
            "with_a_producer set the producer 'onnx.quantize', but changed no operator",
        ),
        (with_a_domain, "with_a_domain added the domain 'com.microsoft', but no operator"),
    ],
)
def test_a_converter_that_does_not_see_the_weights_is_warned_of_and_not_written_in_place(
    products: Path, tmp_path: Path, function: Callable[..., Any], sign: str
) -> None:
    target = tmp_path / "new.onnxa"
    message = rf"products\.onnxa: {sign}: .*, such as 'a', was hidden; use weights='loaded'"
    with pytest.warns(UserWarning, match=message):
        onnxarchive.transform(products, target, function, weights="hidden")
    assert onnxarchive.check(target, full=True) == []
    with refused(products, ArchiveFormatError, f"{sign}: .*weights='loaded'.*nothing was written"):
        onnxarchive.transform(products, products, function, weights="hidden")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for weights in SEEN:
            onnxarchive.transform(products, target, function, weights=weights)


def test_casts_of_weights_that_the_model_had_before_cause_no_warning(tmp_path: Path) -> None:
    model = with_casts(two_products())
    path = tmp_path / "m.onnxa"
    onnxarchive.save(model, path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        onnxarchive.transform(path, path, renamed, weights="hidden")


def test_a_new_domain_whose_operators_are_used_causes_no_warning(products: Path) -> None:
    def fused(model: onnx.ModelProto) -> onnx.ModelProto:
        model.graph.node[0].domain = "com.microsoft"
        return with_a_domain(model)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        onnxarchive.transform(products, products, fused, weights="hidden")


# Initializers that a branch returns


@pytest.mark.parametrize("weights", HOWS)
def test_an_initializer_that_a_branch_returns_stays_in_the_branch(
    tmp_path: Path, weights: Weights | None
) -> None:
    ort = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    value = helper.make_tensor_value_info
    branches = [
        helper.make_graph([], name, [], [value(name, TensorProto.FLOAT, [32, 32])], [it])
        for name, it in (("one", weight("one", 1)), ("two", weight("two", 2)))
    ]
    condition = helper.make_node(
        "If", ["c"], ["w"], then_branch=branches[0], else_branch=branches[1]
    )
    graph = helper.make_graph(
        [condition, helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [value("x", TensorProto.FLOAT, ["n", 32]), value("c", TensorProto.BOOL, [])],
        [value("y", TensorProto.FLOAT, ["n", 32])],
    )
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])
    path = tmp_path / "m.onnxa"
    onnxarchive.save(model, path)
    onnxarchive.transform(path, path, renamed, weights=weights)
    inputs = {"x": np.ones((1, 32), np.float32), "c": np.array(False)}
    providers = ["CPUExecutionProvider"]
    expected = ort.InferenceSession(model.SerializeToString(), providers=providers)
    session = onnxarchive.session(path, providers=providers)
    np.testing.assert_array_equal(session.run(None, inputs), expected.run(None, inputs))


# Results that are no model


def test_the_error_of_a_function_that_returns_none_says_what_to_return(products: Path) -> None:
    with refused(products, TypeError, r"found None; .*pass a function that calls it and returns"):
        onnxarchive.transform(products, products, lambda model: None)  # type: ignore[arg-type,return-value]


def test_the_error_of_an_extractor_with_hidden_weights_says_what_it_needs(
    products: Path, tmp_path: Path
) -> None:
    def extract(model: onnx.ModelProto) -> onnx.ModelProto:
        extractor = onnx.utils.Extractor(onnx.shape_inference.infer_shapes(model))
        return extractor.extract_model(["x"], ["p"])

    with refused(products, ArchiveFormatError, r"such as onnx\.utils\.Extractor, need weights='ex"):
        onnxarchive.transform(products, products, extract, weights="hidden")
    for weights in SEEN:
        onnxarchive.transform(products, tmp_path / "e.onnxa", extract, weights=weights)
        (tensor,) = onnxarchive.load(tmp_path / "e.onnxa").graph.initializer
        assert tensor.name == "a"
