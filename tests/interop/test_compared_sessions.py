"""Every model that onnx has for tests gives the same as a session of its archive.

Most of the models that test an operator take all tensors as inputs. So each is tried in several
forms, in which it holds them, and all of its tensors lie outside the model in the archive.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx.backend.test
import pytest
from compared_sessions import COMPARED, ONLY_MADE, ort, run, session_of_archive, session_of_model
from models import every_tensor, text_model
from onnx import GraphProto, ModelProto, TensorProto, helper, numpy_helper
from onnx.backend.test.case import node as operators
from onnx.defs import onnx_opset_version

import onnxarchive

pytestmark = pytest.mark.sweep

# Models with test data

DATA = Path(onnx.backend.test.__file__).parent / "data"
PATHS = sorted(DATA.rglob("*.onnx"))
EVERYTHING = {"size_threshold": 0, "convert_attribute": True}


def _feeds(path: Path, session: Any) -> list[dict[str, Any]]:
    """The inputs of each test data set; where there is none, one that is made."""
    names = [it.name for it in session.get_inputs()]
    feeds = []
    for directory in sorted(path.parent.glob("test_data_set_*")):
        files = [directory / f"input_{index}.pb" for index in range(len(names))]
        if all(map(Path.exists, files)):
            tensors = [TensorProto.FromString(file.read_bytes()) for file in files]
            feeds.append(dict(zip(names, map(numpy_helper.to_array, tensors), strict=True)))
    if not feeds and path.parent.name == "light":
        (value,) = session.get_inputs()
        count = int(np.prod(value.shape))
        feeds.append(
            {value.name: (np.arange(count, dtype=np.float32) / count).reshape(value.shape)}
        )
    return feeds


@pytest.mark.parametrize("path", PATHS, ids=lambda it: str(it.relative_to(DATA)))
@pytest.mark.parametrize("ways", [{}, EVERYTHING], ids=["1024", "everything"])
def test_a_session_of_an_archive_of_test_data_gives_the_bits_of_the_model(
    tmp_path: Path, path: Path, ways: dict[str, Any], record_property: Callable[[str, object], None]
) -> None:
    original = session_of_model(os.fspath(path))
    if original is None:
        return  # `test_onnxruntime_runs_most_models_of_test_data` counts these
    archive = tmp_path / "model.onnxa"
    onnxarchive.convert(path, archive, **ways)
    onnxarchive.link(archive, tmp_path / "model.onnx")
    assert onnxarchive.check_link(tmp_path / "model.onnx", archive) == []
    onnxarchive.export(archive, tmp_path / "exported.onnx", external_data="exported.data")
    sessions = [session_of_archive(source) for source in (archive, archive.read_bytes())]
    for name in ("model.onnx", "exported.onnx"):
        sessions.append(session_of_model(os.fspath(tmp_path / name)))
    feeds = _feeds(path, original)
    for values in feeds:
        does_run, expected = run(original, values)
        assert does_run, expected
        for session in sessions:
            assert run(session, values) == (True, expected)
    record_property(COMPARED if feeds else ONLY_MADE, 1)


def test_onnxruntime_runs_most_models_of_test_data() -> None:
    sessions = [(path, session_of_model(os.fspath(path))) for path in PATHS]
    made = [(path, session) for path, session in sessions if session is not None]
    assert len(made) >= 107
    assert sum(bool(_feeds(path, session)) for path, session in made) >= 100


# Models of operators

# Of one or more operators each. They make models, and random data for them, when first imported.
MODULES = sorted(
    it.name.removeprefix(f"{operators.__name__}.")
    for it in pkgutil.walk_packages(operators.__path__, f"{operators.__name__}.")
    if not it.ispkg and not it.name.rpartition(".")[2].startswith("_")
)
# Those of which onnxruntime runs every model in every form.
RUN_WHOLLY = {
    *("abs", "batch_normalization", "concat", "conv", "gather", "gemm", "matmul", "pad"),
    *("reshape", "resize", "scan", "softmax", "transpose", "where"),
}
# Random operators without a seed of their own take it from here when their session is made.
SEED = 1
# Smaller tensors onnxruntime is given in the model, whether the archive is a file or not.
LARGE = 1024
# The first in which an initializer need not be an input, and the last that onnxruntime 1.21 takes.
IR_VERSIONS = (4, 10)


@dataclass
class Candidate:
    """A model in one of its forms, the tensors it was given, and values of its other inputs."""

    name: str
    model: ModelProto
    tensors: list[TensorProto]
    values: dict[str, Any]


# Puts tensors into a model, instead of its inputs of the same names.
Form: TypeAlias = Callable[[Candidate], None]


def _initializers(candidate: Candidate) -> None:
    _remove_inputs(candidate)
    candidate.model.graph.initializer.extend(candidate.tensors)


def _defaults_of_inputs(candidate: Candidate) -> None:
    """As initializers that are inputs, too, and so no constants."""
    candidate.model.graph.initializer.extend(candidate.tensors)


def _constant_nodes(candidate: Candidate) -> None:
    _remove_inputs(candidate)
    graph = candidate.model.graph
    nodes = [
        *(helper.make_node("Constant", [], [it.name], value=it) for it in candidate.tensors),
        *graph.node,
    ]
    graph.ClearField("node")
    graph.node.extend(nodes)


def _initializers_of_subgraphs(candidate: Candidate) -> None:
    """All nodes and tensors are in both branches of an If, which share their names."""
    _remove_inputs(candidate)
    graph = candidate.model.graph
    branch = GraphProto(
        name="branch", node=graph.node, initializer=candidate.tensors, output=graph.output
    )
    graph.ClearField("node")
    for output in graph.output:
        output.name = f"{output.name}_of_If"
    names = [it.name for it in graph.output]
    graph.node.append(
        helper.make_node("If", ["condition"], names, then_branch=branch, else_branch=branch)
    )
    graph.input.append(helper.make_tensor_value_info("condition", TensorProto.BOOL, []))
    candidate.values["condition"] = np.array(True)
    if not any(it.domain in ("", "ai.onnx") for it in candidate.model.opset_import):
        candidate.model.opset_import.add(domain="", version=16)


def _remove_inputs(candidate: Candidate) -> None:
    names = {it.name for it in candidate.tensors}
    kept = [it for it in candidate.model.graph.input if it.name not in names]
    candidate.model.graph.ClearField("input")
    candidate.model.graph.input.extend(kept)


FORMS: dict[str, Form | None] = {
    "as it is": None,
    "initializers": _initializers,
    "defaults of inputs": _defaults_of_inputs,
    "Constant nodes": _constant_nodes,
    "initializers of subgraphs": _initializers_of_subgraphs,
}


@cache
def _cases(module: str) -> tuple[Any, ...]:
    """The test cases of a module, each with a model and values of its inputs."""
    begin = len(operators._NodeTestCases)
    state = np.random.get_state()
    np.random.seed(SEED)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of overflows and the like in what is expected
            importlib.import_module(f"{operators.__name__}.{module}")
    finally:
        np.random.set_state(state)
    return tuple(operators._NodeTestCases[begin:])


def _candidates(module: str, form: Form | None) -> Iterator[Candidate]:
    """The models of a module's test cases in a form, as far as they have tensors then."""
    for case in _cases(module):
        candidate = Candidate(case.name, ModelProto(), [], {})
        candidate.model.CopyFrom(case.model)
        ((values, _),) = case.data_sets
        for given, value in zip(case.model.graph.input, values, strict=True):
            if form is not None and given.type.HasField("tensor_type"):
                candidate.tensors.append(_tensor(given.name, value))
            else:
                candidate.values[given.name] = value
        if form is not None:
            _make_older(candidate.model)
            form(candidate)
        if candidate.tensors or any(True for _ in every_tensor(candidate.model)):
            yield candidate


def _tensor(name: str, value: Any) -> TensorProto:
    tensor = TensorProto()
    is_tensor = isinstance(value, TensorProto)
    tensor.CopyFrom(value if is_tensor else numpy_helper.from_array(np.asarray(value)))
    tensor.name = name
    return tensor


def _make_older(model: ModelProto) -> None:
    """Many models are of newer versions than onnxruntime takes, and need nothing of these."""
    first, last = IR_VERSIONS
    model.ir_version = min(max(model.ir_version, first), last)
    for opset in model.opset_import:
        if opset.domain in ("", "ai.onnx"):
            opset.version = min(opset.version, _newest_opset())


@cache
def _newest_opset() -> int:
    """The newest version of ONNX's operators that onnxruntime takes."""
    for version in range(onnx_opset_version(), 0, -1):
        model = text_model("g (float[1] x) => (float[1] y) { y = Identity(x) }", opset=version)
        if session_of_model(model.SerializeToString()) is not None:
            return version
    raise AssertionError("onnxruntime takes no version of ONNX's operators")


@pytest.mark.parametrize("module", MODULES)
def test_a_session_of_an_archive_of_any_operator_gives_the_bits_of_the_model(
    path: Path, module: str, record_property: Callable[[str, object], None]
) -> None:
    compared: Counter[str] = Counter()
    only_made, differing = 0, []
    for name, form in FORMS.items():
        for it in _candidates(module, form):
            ort.set_seed(SEED)
            original = session_of_model(it.model.SerializeToString())
            if original is None:
                continue  # `test_onnxruntime_runs_most_models_of_operators` counts the others
            does_run, expected = run(original, it.values)
            if does_run:
                compared[name] += 1
            else:
                only_made += 1
            onnxarchive.save(it.model, path, size_threshold=0, convert_attribute=True)
            sources: dict[str, Any] = {"path": path}
            if any(tensor.ByteSize() >= LARGE for tensor in it.tensors):
                sources["bytes"] = path.read_bytes()
            for kind, source in sources.items():
                ort.set_seed(SEED)
                try:
                    found = run(session_of_archive(source), it.values)
                except Exception as error:
                    found = False, f"no session: {error}"
                if found != (does_run, expected):
                    what = "other bits" if found[0] else found[1]
                    differing.append(f"{it.name}, {name}, session of {kind}: {what}")
    assert differing == []
    if module in RUN_WHOLLY:
        count = len(_cases(module))
        assert compared >= Counter({name: count for name, form in FORMS.items() if form})
    record_property(COMPARED, compared.total())
    record_property(ONLY_MADE, only_made)


@pytest.mark.parametrize("form", FORMS)
def test_onnxruntime_runs_most_models_of_operators(form: str) -> None:
    """Every fourth module stands for all."""
    candidates = [it for module in MODULES[::4] for it in _candidates(module, FORMS[form])]
    sessions = [session_of_model(it.model.SerializeToString()) for it in candidates]
    made = [session is not None for session in sessions]
    assert len(candidates) >= (30 if FORMS[form] is None else 300)
    assert sum(made) >= (20 if FORMS[form] is None else 200)
