"""Every model of onnx's test data is converted to an archive and back."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.backend.test
import pytest
from models import NUMBERS, attribute, model_of, node, normalised, raw_tensor, string_tensor, typed
from onnx import TensorProto, numpy_helper

import onnxarchive

DATA = Path(onnx.backend.test.__file__).parent / "data"
PATHS = sorted(DATA.rglob("*.onnx"))
NAMES = [str(path.relative_to(DATA)) for path in PATHS]
SETS = [path for path in PATHS if any(path.parent.glob("test_data_set_*/output_*.pb"))]
LIGHT = sorted((DATA / "light").glob("*.onnx"))
# Why onnxruntime does not run a model: operators of old operator sets and of training, and
# locales that are not installed.
NOT_RUN = re.compile("Could not find an implementation|ai.onnx.preview.training|locale")

every_model = pytest.mark.parametrize("path", PATHS, ids=NAMES)


def test_the_test_data_is_there() -> None:
    assert len(PATHS) >= 149
    assert len(SETS) >= 136
    assert len(LIGHT) == 9


@pytest.mark.sweep
@every_model
@pytest.mark.parametrize(
    "options", [{}, {"size_threshold": 0, "convert_attribute": True}], ids=["1024", "everything"]
)
def test_a_model_goes_through_an_archive_and_back(
    tmp_path: Path, path: Path, options: dict[str, Any]
) -> None:
    archive = tmp_path / "model.onnxa"
    onnxarchive.convert(path, archive, **options)
    assert onnxarchive.check(archive, full=True) == []
    original = onnx.load(path)
    assert normalised(onnxarchive.load(archive)) == normalised(original)

    onnxarchive.save(original, tmp_path / "saved.onnxa", **options)
    assert _tensors(tmp_path / "saved.onnxa") == _tensors(archive)

    onnxarchive.export(archive, tmp_path / "model.onnx")
    assert normalised(onnx.load(tmp_path / "model.onnx")) == normalised(original)
    onnxarchive.export(archive, tmp_path / "beside.onnx", external_data="beside.data")
    assert normalised(onnx.load(tmp_path / "beside.onnx")) == normalised(original)


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


# Run


def _values(directory: Path, kind: str) -> list[Any]:
    """Inputs or outputs of a test data set."""
    paths = [directory / f"{kind}_{i}.pb" for i in range(len(list(directory.glob(f"{kind}_*.pb"))))]
    return [numpy_helper.to_array(TensorProto.FromString(it.read_bytes())) for it in paths]


def _require_outputs(path: Path, inputs: list[Any], expected: list[Any]) -> None:
    session = _session(path)
    names = [it.name for it in session.get_inputs()]
    outputs = session.run(None, dict(zip(names, inputs, strict=False)))
    for found, wanted in zip(outputs, expected, strict=True):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        if wanted.dtype.kind in "OUS":
            assert found.tolist() == wanted.tolist()
        else:
            np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-5)


def _session(path: Path) -> Any:
    ort = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return ort.InferenceSession(os.fspath(path), options, ["CPUExecutionProvider"])


def _refusal(path: Path) -> str | None:
    """Why onnxruntime does not run a model, or None."""
    try:
        _session(path)
    except Exception as error:
        return str(error)
    return None


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


@pytest.mark.parametrize("path", SETS, ids=[str(path.parent.name) for path in SETS])
def test_onnxruntime_gives_the_expected_outputs(tmp_path: Path, path: Path) -> None:
    exported = _exported(tmp_path, path)
    refusal = _refusal(path)
    if refusal is not None:  # of the original
        assert NOT_RUN.search(refusal)
        for it in exported:
            assert NOT_RUN.search(_refusal(it) or "")
        return
    for directory in path.parent.glob("test_data_set_*"):
        inputs, expected = _values(directory, "input"), _values(directory, "output")
        try:
            _require_outputs(path, inputs, expected)
        except Exception as error:
            if "Failed to construct locale" not in str(error):
                raise
            pytest.skip("onnxruntime before 1.24 needs the locale en_US.UTF-8 for the original")
        for it in exported:
            _require_outputs(it, inputs, expected)


def test_onnxruntime_runs_most_of_the_models() -> None:
    assert sum(_refusal(path) is None for path in SETS) >= 98


@pytest.mark.large
@pytest.mark.parametrize("path", LIGHT, ids=lambda it: it.stem)
def test_onnxruntime_gives_the_expected_outputs_of_large_models(tmp_path: Path, path: Path) -> None:
    # as onnx's own runner of these tests makes the input
    shape = _session(path).get_inputs()[0].shape
    count = int(np.prod(shape))
    data = (np.arange(count).reshape(shape) / count).astype(np.float32)
    expected = TensorProto.FromString(path.with_name(f"{path.stem}_output_0.pb").read_bytes())
    single, *_ = _exported(tmp_path, path)
    _require_outputs(single, [data], [numpy_helper.to_array(expected)])


# Models that the test data lacks


def test_a_model_with_tensors_of_every_type(tmp_path: Path) -> None:
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
def test_a_model_with_initializers_in_an_if_in_a_loop_in_a_function(
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
        _require_outputs(it, [data], [expected])
