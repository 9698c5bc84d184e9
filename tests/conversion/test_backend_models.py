"""Every model of onnx's test data is converted to an archive and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.backend.test
import pytest
from models import (
    NUMBERS,
    attribute,
    model_of,
    node,
    normalised,
    raw_tensor,
    run_model,
    string_tensor,
    typed,
)
from onnx import numpy_helper

import onnxarchive

DATA = Path(onnx.backend.test.__file__).parent / "data"
PATHS = sorted(DATA.rglob("*.onnx"))
NAMES = [str(path.relative_to(DATA)) for path in PATHS]
every_model = pytest.mark.parametrize("path", PATHS, ids=NAMES)


def test_the_test_models_of_onnx_are_found() -> None:
    assert len(PATHS) >= 149


def _exported(tmp_path: Path, path: Path, **options: Any) -> list[Path]:
    """The model after its way through an archive, in one file, beside its data and unzipped."""
    onnxarchive.convert(path, tmp_path / "model.onnxa", **options)
    onnxarchive.export(tmp_path / "model.onnxa", tmp_path / "single.onnx")
    onnxarchive.export(tmp_path / "model.onnxa", tmp_path / "beside.onnx", external_data="data")
    onnxarchive.extract(tmp_path / "model.onnxa", tmp_path / "unzipped")
    return [
        tmp_path / "single.onnx",
        tmp_path / "beside.onnx",
        tmp_path / "unzipped" / "__MODEL_PROTO",
    ]


@pytest.mark.sweep
@every_model
@pytest.mark.parametrize(
    "options", [{}, {"size_threshold": 0, "convert_attribute": True}], ids=["1024", "everything"]
)
def test_a_model_converts_to_an_archive_and_back(
    tmp_path: Path, path: Path, options: dict[str, Any]
) -> None:
    archive, original = tmp_path / "model.onnxa", onnx.load(path)
    exported = _exported(tmp_path, path, **options)
    assert onnxarchive.check(archive, full=True) == []
    assert normalised(onnxarchive.load(archive)) == normalised(original)
    for it in exported:
        assert normalised(onnx.load(it)) == normalised(original)

    onnxarchive.save(original, tmp_path / "saved.onnxa", **options)
    assert _tensors(tmp_path / "saved.onnxa") == _tensors(archive)


def _tensors(path: Path) -> dict[str, tuple[int, int]]:
    with onnxarchive.open(path) as archive:
        entries = archive.entries.values()
        return {it.name: (it.nbytes, it.crc32) for it in entries if it.name != "__MODEL_PROTO"}


@every_model
def test_initializers_are_the_arrays_of_onnx(tmp_path: Path, path: Path) -> None:
    archive_path = tmp_path / "model.onnxa"
    onnxarchive.convert(path, archive_path, size_threshold=0)
    expected = {it.name: numpy_helper.to_array(it) for it in onnx.load(path).graph.initializer}
    with onnxarchive.open(archive_path) as archive:
        assert set(expected) <= set(archive.tensors)
        for name, array in expected.items():
            found = archive.tensors[name]
            assert (found.dtype, found.shape) == (array.dtype, array.shape)
            assert found.tobytes() == array.tobytes()


# Models that the test data lacks


def test_tensors_of_every_type_convert_to_an_archive_and_back(tmp_path: Path) -> None:
    model = model_of(string_tensor("STRING"))
    for name, number in NUMBERS.items():
        tensor = raw_tensor(name, number, (7, 301), seed=number)
        model.graph.initializer.append(tensor)
        model.graph.initializer.append(typed(raw_tensor(f"{name} typed", number, (601,))))
        model.graph.node.append(node(attribute("t", t=raw_tensor("", number, (601,), seed=3))))
    path = tmp_path / "original.onnx"
    path.write_bytes(model.SerializeToString())
    expected = normalised(model)
    for options in ({}, {"size_threshold": 0, "convert_attribute": True}):
        (tmp_path / str(len(options))).mkdir()
        for it in _exported(tmp_path / str(len(options)), path, **options):
            assert normalised(onnx.load(it)) == expected
        archive_path = tmp_path / str(len(options)) / "model.onnxa"
        assert onnxarchive.check(archive_path, full=True) == []
        with onnxarchive.open(archive_path) as archive:
            assert len(archive.tensors) == 2 * len(NUMBERS) + 1
            for tensor in expected.graph.initializer:
                array = archive.tensors[tensor.name]
                assert array.tobytes() == numpy_helper.to_array(tensor).tobytes() or (
                    tensor.name == "STRING"
                )


# A function that runs a Loop, in which an If adds or subtracts initializers of its own.
LOOP_IN_A_FUNCTION = """<ir_version: 10, opset_import: ["": 21, "test": 1]>
main (float[300] x) => (float[300] y) { y = test.Steps (x) }
<domain: "test", opset_import: ["": 21]>
Steps (x) => (y) {
    count = Constant <value = int64 {3}> ()
    y = Loop <body = body (int64 i, bool go_on, float[300] state)
        => (bool still, float[300] next) {
        is_not_first = Cast <to = 9> (i)
        next = If (is_not_first) <
            then_branch = then () => (float[300] then_out) { then_out = Add (state, w) },
            else_branch = else () => (float[300] else_out) { else_out = Sub (state, w) }
        >
        still = Identity (go_on)
    }> (count, , x)
}"""


def _loop_in_a_function() -> onnx.ModelProto:
    model = onnx.parser.parse_model(LOOP_IN_A_FUNCTION)
    count, loop = model.functions[0].node
    count.attribute[0].t.CopyFrom(numpy_helper.from_array(np.array(3, np.int64)))
    branches = loop.attribute[0].g.node[1].attribute
    for seed, branch in enumerate(branches, 1):
        weight = np.random.default_rng(seed).standard_normal(300, np.float32)
        branch.g.initializer.append(numpy_helper.from_array(weight, "w"))
    return model


@pytest.mark.parametrize("convert_attribute", [False, True])
def test_initializers_in_an_if_in_a_loop_in_a_function_convert_and_run(
    tmp_path: Path, convert_attribute: bool
) -> None:
    model = _loop_in_a_function()
    path = tmp_path / "original.onnx"
    onnx.save(model, path)
    single, beside, unzipped = _exported(
        tmp_path, path, size_threshold=0, convert_attribute=convert_attribute
    )
    with onnxarchive.open(tmp_path / "model.onnxa") as archive:
        keys = ["w", "w_2", "tensor", "__MODEL_PROTO"] if convert_attribute else ["__MODEL_PROTO"]
        assert sorted(archive.entries) == sorted(keys)
    assert onnxarchive.load(tmp_path / "model.onnxa") == model

    data = np.linspace(-1, 1, 300, dtype=np.float32)
    plus, minus = (np.random.default_rng(seed).standard_normal(300, np.float32) for seed in (1, 2))
    expected = data - minus + plus + plus
    runnable = [single, beside] if convert_attribute else [single, beside, unzipped]
    for it in (path, *runnable):
        (found,) = run_model(it, x=data)
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)
