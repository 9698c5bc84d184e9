from __future__ import annotations

import gc
import inspect
import io
import os
import re
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from compared_sessions import ort, quiet
from models import (
    break_local_header,
    entry_of,
    flip_byte,
    keys_of,
    location,
    model_of,
    raw_tensor,
    run_python,
    runnable_model,
    text_model,
)
from onnx import TensorProto, helper, numpy_helper
from web_server import WebServer
from written import saved

import onnxarchive
from onnxarchive import ArchiveError, ArchiveFormatError, UnsupportedFeatureError
from onnxarchive.conversion.linked_models import with_external_data
from onnxarchive.interop.onnxruntime import OPTIMIZED_DATA, copy_options
from onnxarchive.model import model_proto
from onnxarchive.reading.archive import Archive

FOLDER = "session.model_external_initializers_file_folder_path"
PREPACKING = "session.disable_prepacking"
ADD = "add_external_initializers_from_files_in_memory"
X = np.linspace(-1, 1, 2048, dtype=np.float32).reshape(2, 1024)
CPU = ["CPUExecutionProvider"]
value = helper.make_tensor_value_info


def session(source: Any, options: Any = None, **kwargs: Any) -> Any:
    return onnxarchive.session(source, options or quiet(), CPU, enable_fallback=0, **kwargs)


def original(model: onnx.ModelProto) -> Any:
    return ort.InferenceSession(model.SerializeToString(), quiet(), CPU)


@pytest.fixture
def expected() -> bytes:
    return run(original(runnable_model()))


def run(session: Any, x: Any = X) -> bytes:
    (y,) = session.run(None, {"x": x})
    return bytes(y.tobytes())


# Making a session


def test_a_session_is_one_of_onnxruntime_and_runs_the_model(archive: Path, expected: bytes) -> None:
    made = onnxarchive.session(archive)
    assert isinstance(made, ort.InferenceSession)
    assert [it.name for it in made.get_inputs()] == ["x"]
    assert run(made) == expected
    assert run(onnxarchive.session(os.fspath(archive), None, CPU)) == expected


def test_the_path_of_a_session_is_the_archive_for_libraries_that_ask(
    archive: Path, expected: bytes
) -> None:
    # optimum makes its models of a session's `_model_path`.
    made = session(archive)
    assert made._model_path == os.path.realpath(archive)
    made.set_providers(CPU)  # makes the session again
    assert made._model_path == os.path.realpath(archive)
    assert run(made) == expected
    assert session(archive.read_bytes())._model_path is None


def test_weights_are_read_from_the_archive_itself(archive: Path) -> None:
    model, options = onnxarchive.session_options(archive)
    assert len(model) < 1000
    weight = onnx.ModelProto.FromString(model).graph.initializer[0]
    entry = entry_of(archive, "layer_0_weight")
    pairs = [archive.name, str(entry.data_offset), str(entry.nbytes)]
    assert [it.key for it in weight.external_data] == ["location", "offset", "length"]
    assert [it.value for it in weight.external_data] == pairs
    assert options.get_session_config_entry(FOLDER) == os.path.realpath(archive.parent)
    before = run(session(archive))
    flip_byte(archive, entry.data_offset + 2)
    assert run(session(archive)) != before


def test_a_session_is_made_from_a_relative_path_and_from_a_bare_name(
    archive: Path, expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(archive.parent)
    assert run(session(archive.name)) == expected
    monkeypatch.chdir(archive.parent.parent)
    assert run(session(Path(archive.parent.name) / archive.name)) == expected


@pytest.mark.parametrize("name", ["a'b.onnxa", "a#b?.onnxa", "a%20b", "-a", "model.onnx", "a\\b"])
def test_a_session_is_made_of_an_archive_whose_name_has_any_character(
    archive: Path, expected: bytes, name: str
) -> None:
    other = archive.with_name(name)
    os.rename(archive, other)
    assert run(session(other)) == expected


def test_a_session_is_made_of_an_archive_in_a_cache_of_links(
    archive: Path, tmp_path: Path, expected: bytes
) -> None:
    # as Hugging Face's: the name leads out of its directory to a file named by its content
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    os.rename(archive, blobs / "0123456789abcdef")
    link = snapshot / "model.onnxa"
    link.symlink_to(Path("../../blobs/0123456789abcdef"))
    (tmp_path / "current").symlink_to(snapshot, target_is_directory=True)
    for name in (link, tmp_path / "current" / "model.onnxa"):
        assert run(session(name)) == expected
        with onnxarchive.open(name) as opened:
            assert run(session(opened)) == expected


def test_a_session_of_an_open_archive_leaves_it_open_and_unchanged(
    archive: Path, expected: bytes
) -> None:
    onnxarchive.save(runnable_model(), archive, size_threshold=0)
    for source in (archive, archive.read_bytes()):
        with onnxarchive.open(source) as opened:
            before = opened.model.SerializeToString()
            sessions = [session(opened), session(opened)]
            onnxarchive.session_options(opened)
            assert opened.model.SerializeToString() == before
            opened.verify()
        assert [run(made) for made in sessions] == [expected] * 2


def test_an_archive_that_a_session_opens_is_freed_before_onnxruntime_begins(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # so that its memory and that of onnxruntime are not needed at once
    def open_archives() -> int:
        return sum(type(it) is Archive for it in gc.get_objects())

    def count_and_make(self: Any, *arguments: Any, **kwargs: Any) -> None:
        left.append(open_archives())
        make(self, *arguments, **kwargs)

    gc.collect()  # what other tests have left
    left = [open_archives()]
    make = ort.InferenceSession.__init__
    monkeypatch.setattr(ort.InferenceSession, "__init__", count_and_make)
    for source in (archive, archive.read_bytes()):
        onnxarchive.session(source)
    assert left == [left[0]] * 3


def test_a_session_outlives_the_name_of_its_archive(archive: Path, expected: bytes) -> None:
    made = session(archive)
    moved = archive.parent.parent / "elsewhere"
    os.rename(archive.parent, moved)
    assert run(made) == expected
    assert run(session(moved / archive.name)) == expected
    os.unlink(moved / archive.name)
    assert run(made) == expected


def test_a_session_is_made_of_an_archive_that_was_renamed_after_opening(
    archive: Path, expected: bytes
) -> None:
    if not os.path.exists("/proc/self/fd"):
        pytest.skip("/proc/self/fd tells where the file is")
    with onnxarchive.open(archive) as opened:
        elsewhere = archive.parent.rename(archive.parent.with_name("elsewhere"))
        os.rename(elsewhere / archive.name, elsewhere.with_name("other"))
        assert run(session(opened)) == expected


@pytest.fixture
def other(archive: Path) -> Path:
    """Another archive, beside `archive`."""
    onnxarchive.save(runnable_model(), archive.with_name("other"))
    return archive.with_name("other")


def test_an_open_archive_that_was_replaced_since_is_refused(archive: Path, other: Path) -> None:
    with onnxarchive.open(archive) as opened:
        os.replace(other, archive)
        for call in (session, onnxarchive.session_options):
            with pytest.raises(ArchiveError, match=r"was replaced or removed.*open it again"):
                call(opened)


def test_a_file_that_is_replaced_while_the_session_is_made_is_refused(
    archive: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = ort.InferenceSession.__init__

    def replace_and_make(self: Any, *arguments: Any, **kwargs: Any) -> None:
        os.replace(other, archive)
        make(self, *arguments, **kwargs)

    monkeypatch.setattr(ort.InferenceSession, "__init__", replace_and_make)
    with pytest.raises(ArchiveError, match="while the session was made") as caught:
        onnxarchive.session(archive)
    assert str(caught.value).startswith(f"{archive}: ")


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, io.BytesIO])
def test_a_session_is_made_of_an_archive_in_memory(
    archive: Path, expected: bytes, kind: Callable[..., Any]
) -> None:
    data = kind(archive.read_bytes())
    archive.unlink()
    made = session(data)
    assert run(made) == expected
    del data
    made.set_providers(CPU)
    assert run(made) == expected


def test_two_threads_make_sessions_at_once(archive: Path, expected: bytes) -> None:
    other = archive.with_name("other.onnxa")
    model = runnable_model()
    model.graph.initializer[1].raw_data = np.ones(16, np.float32).tobytes()
    onnxarchive.save(model, other)
    wanted = {archive: expected, other: run(original(model))}
    options, start = quiet(), threading.Barrier(4)

    def make(source: Path) -> list[bytes]:
        start.wait()
        return [run(session(source, options)) for _ in range(10)]

    with ThreadPoolExecutor(4) as executor:
        found = list(executor.map(make, (archive, other) * 2))
    assert found == [[wanted[archive]] * 10, [wanted[other]] * 10] * 2


# Tensors passed in the model


def _split(count: int) -> onnx.ModelProto:
    parts = ", ".join(f"part{index}" for index in range(count))
    text = f"g (float[{2 * count}] x) => (float[] y) {{ {parts} = Split(x, split) y = Neg(part0) }}"
    return text_model(text, numpy_helper.from_array(np.full(count, 2), "split"))


@pytest.mark.parametrize("count", [1, 127, 128, 2000])
def test_shapes_are_inferred_from_tensors_stored_outside(path: Path, count: int) -> None:
    model = _split(count)
    onnxarchive.save(model, path, size_threshold=0)
    with onnxarchive.open(path) as archive:
        assert keys_of(archive) == ["split"]
    x = np.arange(2 * count, dtype=np.float32)
    for source in (path, path.read_bytes()):
        assert run(session(source), x) == run(original(model), x)


def _everywhere() -> onnx.ModelProto:
    """Weights in the graph, in subgraphs, in attributes and in a function, one of 0 bytes."""

    def weight(seed: int, name: str = "w") -> TensorProto:
        data = np.random.default_rng(seed).standard_normal(300, np.float32)
        return numpy_helper.from_array(data, name)

    model = text_model(
        """everywhere (float[300] x) => (float[300] y) {
  constant = Constant()
  filled = ConstantOfShape(shape)
  called = test.F(x)
  summed = Sum(called, constant, w, filled)
  same = Concat<axis = 0>(summed, nothing)
  total = ReduceSum<keepdims = 0>(same)
  is_positive = Greater(total, zero)
  y = If(is_positive) <
    else_branch = e () => (float[300] e_out) { e_out = Add(summed, w_in) },
    then_branch = t () => (float[300] t_out) { t_out = Add(summed, w_in) }
  >
}
<domain: "test", opset_import: ["": 21]>
F (a) => (b) { c = Constant() b = Add(a, c) }""",
        weight(5),
        numpy_helper.from_array(np.zeros(0, np.float32), "nothing"),
        numpy_helper.from_array(np.zeros((), np.float32), "zero"),
        numpy_helper.from_array(np.array([300]), "shape"),
    )
    model.opset_import.add(domain="test", version=1)
    constant, filled, *_, choice = model.graph.node
    one = numpy_helper.from_array(np.ones(1, np.float32))
    for node, value in (
        (model.functions[0].node[0], weight(1)),
        (constant, weight(2)),
        (filled, one),
    ):
        node.attribute.append(helper.make_attribute("value", value))
    for seed, branch in enumerate(choice.attribute, 3):
        branch.g.initializer.append(weight(seed, "w_in"))
    return model


@pytest.mark.parametrize("convert_attribute", [False, True])
def test_tensors_of_every_place_may_be_stored_outside(path: Path, convert_attribute: bool) -> None:
    model = _everywhere()
    onnxarchive.save(model, path, size_threshold=0, convert_attribute=convert_attribute)
    x = np.linspace(-1, 1, 300, dtype=np.float32)
    for feed in (x, -x - 3):
        expected = run(original(model), feed)
        for source in (path, path.read_bytes()):
            assert run(session(source), feed) == expected
    prepared = onnx.ModelProto.FromString(onnxarchive.session_options(path)[0])
    outside = [it.name for it in prepared.graph.initializer if it.external_data]
    assert outside == ["w"]
    branches = prepared.graph.node[-1].attribute
    assert all(it.g.initializer[0].external_data for it in branches)
    in_function = prepared.functions[0].node[0].attribute[0].t
    assert bool(in_function.external_data) == convert_attribute != bool(in_function.raw_data)
    in_memory = onnx.ModelProto.FromString(onnxarchive.session_options(path.read_bytes())[0])
    assert bool(in_memory.graph.initializer[0].external_data) == hasattr(ort.SessionOptions, ADD)
    assert all(it.g.initializer[0].raw_data for it in in_memory.graph.node[-1].attribute)


def test_a_sparse_initializer_is_handed_over_in_the_model(path: Path) -> None:
    model = runnable_model()
    sparse = onnx.SparseTensorProto(
        values=numpy_helper.from_array(np.arange(300, dtype=np.float32), "bias"),
        indices=numpy_helper.from_array(np.arange(300)),
        dims=[2, 1024],
    )
    model.graph.sparse_initializer.append(sparse)
    model.graph.node.insert(0, helper.make_node("Add", ["x", "bias"], ["biased"]))
    model.graph.node[1].input[0] = "biased"
    onnxarchive.save(model, path, size_threshold=0, convert_attribute=True)
    with onnxarchive.open(path) as archive:
        assert len(keys_of(archive)) == 4
    assert run(session(path)) == run(original(model))


def test_a_model_that_would_take_2_gib_is_refused(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with onnxarchive.open(archive) as opened:
        nbytes = sum(entry.nbytes for entry in opened.entries.values())
        monkeypatch.setattr(model_proto, "SIZE_LIMIT", nbytes)
        with pytest.raises(UnsupportedFeatureError, match="do not read") as caught:
            with_external_data(opened, "x", lambda ref, size: False)
        assert f"found {nbytes}" in str(caught.value)
        monkeypatch.setattr(model_proto, "SIZE_LIMIT", nbytes + 1)
        assert with_external_data(opened, "x", lambda ref, size: False) == runnable_model()


def test_a_model_that_reaches_2_gib_with_its_external_data_is_refused(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = onnxarchive.session_options(archive)
    monkeypatch.setattr(model_proto, "SIZE_LIMIT", len(model))
    with pytest.raises(ArchiveFormatError, match=f"less than {len(model)} bytes"):
        onnxarchive.session(archive)
    monkeypatch.setattr(model_proto, "SIZE_LIMIT", len(model) + 1)
    assert onnxarchive.session_options(archive)[0] == model


# Options of the caller


def test_the_callers_options_are_not_changed(archive: Path, expected: bytes) -> None:
    options = quiet()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    for source in (archive, archive.read_bytes()):
        assert run(session(source, options)) == expected
        serialized, _ = onnxarchive.session_options(source, options)
    with pytest.raises(RuntimeError, match="does not have configuration"):
        options.get_session_config_entry(FOLDER)
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    if hasattr(options, ADD):  # a file that is there already cannot be added again
        weight = onnx.ModelProto.FromString(serialized).graph.initializer[0]
        getattr(options, ADD)([location(weight)], [b"1"], [1])


def test_the_callers_options_hold_for_the_session(archive: Path) -> None:
    options = quiet()
    options.logid = "whose"
    options.inter_op_num_threads = 3
    options.enable_cpu_mem_arena = False
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.add_session_config_entry("a.key.of.tomorrow", "kept")
    _, given = onnxarchive.session_options(archive, options)
    for copied in (given, session(archive, options).get_session_options()):
        assert copied is not options
        for name, _ in inspect.getmembers(options, lambda it: not callable(it)):
            if not name.startswith("_"):
                assert getattr(copied, name) == getattr(options, name), name
        assert copied.get_session_config_entry("session.disable_prepacking") == "1"
        assert copied.get_session_config_entry("a.key.of.tomorrow") == "kept"


def test_overrides_and_shared_initializers_hold_for_the_session(path: Path) -> None:
    model = runnable_model()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    onnxarchive.save(model, path)
    options = quiet()
    options.add_free_dimension_override_by_name("batch", 7)
    assert session(path, options).get_inputs()[0].shape == [7, 1024]
    options = quiet()
    shared = ort.OrtValue.ortvalue_from_numpy(np.zeros((1024, 16), np.float32))
    options.add_initializer("layer.0/weight", shared)
    bias = np.tile(np.arange(16, dtype=np.float32), (2, 1))
    assert run(session(path, options)) == bias.tobytes()


def _with_another_domain(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model, which may need custom operators for all that its domains tell."""
    model.opset_import.append(helper.make_opsetid("custom", 1))
    return model


@pytest.mark.parametrize(
    ("before", "prepack", "after"),
    [("0", None, "0"), ("1", None, "1"), ("1", True, "0"), ("0", False, "1"), ("1", False, "1")],
)
def test_prepacking_is_what_the_options_say_unless_it_is_chosen(
    archive: Path, expected: bytes, before: str, prepack: bool | None, after: str
) -> None:
    options = quiet()
    options.add_session_config_entry(PREPACKING, before)
    for source in (archive, archive.read_bytes()):
        made = session(source, options, prepack=prepack)
        _, given = onnxarchive.session_options(source, options, prepack=prepack)
        for copied in (made.get_session_options(), given):
            assert copied.get_session_config_entry(PREPACKING) == after
        np.testing.assert_allclose(
            made.run(None, {"x": X})[0].ravel(), np.frombuffer(expected, np.float32), rtol=1e-4
        )
    assert options.get_session_config_entry(PREPACKING) == before


@pytest.mark.filterwarnings("ignore::UserWarning")  # that providers in options are passed over
@pytest.mark.parametrize("why", ["profiling", "optimized", "domain", "providers"])
def test_options_that_cannot_be_copied_are_changed_temporarily(
    archive: Path, tmp_path: Path, expected: bytes, why: str
) -> None:
    options = quiet()
    if why == "profiling":
        options.enable_profiling = True
        options.profile_file_prefix = str(tmp_path / "profile")
    elif why == "optimized":
        options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
        options.add_session_config_entry(OPTIMIZED_DATA, "optimized.data")
    elif why == "domain":
        onnxarchive.save(_with_another_domain(runnable_model()), archive)
    elif not hasattr(options, "has_providers"):
        pytest.skip("this onnxruntime has no providers in options")
    else:
        options.add_provider("CPUExecutionProvider", {})
    with pytest.raises(UnsupportedFeatureError, match=r"call session_options\(path\) and"):
        onnxarchive.session_options(archive, options)
    kwargs: dict[str, Any] = {} if why == "providers" else {"providers": CPU}
    made = onnxarchive.session(archive, options, **kwargs)
    assert isinstance(made, ort.InferenceSession)
    assert run(made) == expected
    assert options.get_session_config_entry(FOLDER) == ""
    os.rename(archive.parent, archive.parent.parent / "x")
    os.rename(archive.parent.parent / "x", archive.parent)
    made.set_providers(CPU)  # which makes the session anew
    assert run(made) == expected
    assert options.get_session_config_entry(FOLDER) == ""
    assert any(tmp_path.glob("profile*")) == (why == "profiling")
    assert (tmp_path / "optimized.onnx").exists() == (why == "optimized")

    # The empty entry is none: external data is found beside the model again.
    onnxarchive.export(archive, tmp_path / "beside.onnx", external_data="beside.data")
    options.enable_profiling = False
    options.optimized_model_filepath = ""
    beside = ort.InferenceSession(os.fspath(tmp_path / "beside.onnx"), options, **kwargs)
    assert run(beside) == expected
    assert run(onnxarchive.session(archive.read_bytes(), options, **kwargs)) == expected


def test_an_optimized_model_that_refers_to_the_archive_is_warned_of(
    archive: Path, tmp_path: Path, expected: bytes
) -> None:
    def optimize(source: Any, name: str, **entries: str) -> Path:
        options = quiet()
        options.optimized_model_filepath = os.fspath(archive.with_name(name))
        for entry, value in entries.items():
            options.add_session_config_entry(entry, value)
        assert run(onnxarchive.session(source, options, providers=CPU)) == expected
        return archive.with_name(name)

    with pytest.warns(UserWarning, match=rf"referring\.onnx will refer.*'{OPTIMIZED_DATA}'"):
        referring = optimize(archive, "referring.onnx")
    complete = [
        optimize(archive, "separate.onnx", **{OPTIMIZED_DATA: "separate.data"}),
        optimize(archive, "runtime.ort"),
        optimize(archive.read_bytes(), "memory.onnx"),
    ]
    archive.unlink()
    for path in complete:
        assert run(ort.InferenceSession(os.fspath(path), quiet(), CPU)) == expected
    with pytest.raises(Exception, match=re.escape(archive.name)):
        ort.InferenceSession(os.fspath(referring), quiet(), CPU)


def test_temporarily_changed_options_get_their_own_entries_back(
    archive: Path, expected: bytes
) -> None:
    onnxarchive.save(_with_another_domain(runnable_model()), archive)
    options = quiet()
    options.add_session_config_entry(FOLDER, "/somewhere")
    for source in (archive, archive.read_bytes()):
        made = session(source, options, prepack=False)
        for _ in range(2):
            assert made.get_session_options().get_session_config_entry(PREPACKING) == "1"
            assert options.get_session_config_entry(PREPACKING) == ""
            assert options.get_session_config_entry(FOLDER) == "/somewhere"
            made.set_providers(CPU)  # makes the session anew
    assert run(session(archive, options)) == expected
    archive.write_bytes(archive.read_bytes()[:-1])
    with pytest.raises(ArchiveFormatError):
        session(archive, options)
    assert options.get_session_config_entry(FOLDER) == "/somewhere"


def test_options_that_onnxruntime_refuses_are_refused_by_it(archive: Path) -> None:
    options = quiet()
    options.add_session_config_entry("session.load_model_format", "ORT")
    with pytest.raises(Exception, match=r"(?i)flatbuffer|ort format|verif"):
        session(archive, options)
    assert options.get_session_config_entry(FOLDER) == ""


def test_arguments_after_the_options_go_to_onnxruntime(archive: Path, expected: bytes) -> None:
    made = onnxarchive.session(
        archive, quiet(), ["CPUExecutionProvider"], provider_options=[{}], disabled_optimizers=["x"]
    )
    assert made.get_providers() == CPU
    assert run(made) == expected


def test_the_model_of_an_archive_in_memory_is_passed_as_it_is(archive: Path) -> None:
    if not hasattr(ort.SessionOptions, ADD):
        pytest.skip("this onnxruntime gets all tensors in the model")
    with onnxarchive.open(archive) as opened:
        stored = bytes(opened.read("__MODEL_PROTO"))
    assert onnxarchive.session_options(archive.read_bytes())[0] == stored


def test_a_session_keeps_the_memory_of_its_archive(archive: Path, expected: bytes) -> None:
    # in a process of its own, which a read of freed memory may end
    code = """
import gc, pathlib, sys
import numpy as np, onnxarchive, onnxruntime
from onnxarchive.reading.archive import read_archive
from onnxarchive.files.file import MemoryFile
cpu = ["CPUExecutionProvider"]
x = np.linspace(-1, 1, 2048, dtype=np.float32).reshape(2, 1024)

def make(how, data):
    if how == "pieces":
        pieces = onnxarchive.session_options(data, prepack=False)
        return onnxruntime.InferenceSession(*pieces, providers=cpu)
    if how == "archive":
        with read_archive(MemoryFile(memoryview(data))) as opened:
            return onnxarchive.session(opened, providers=cpu, prepack=False)
    return onnxarchive.session(data, providers=cpu, prepack=False)

for how in ("session", "pieces", "archive", "set_providers"):
    made = make(how, bytearray(pathlib.Path(sys.argv[1]).read_bytes()))
    gc.collect()
    if how == "set_providers":
        made.set_providers(cpu)
        gc.collect()
    others = [bytearray(b"z") * (1 << 16) for _ in range(100)]  # take memory that was freed
    print(made.run(None, {"x": x})[0].tobytes().hex())
"""
    for line in run_python(code, archive).split():
        found = np.frombuffer(bytes.fromhex(line), np.float32)
        np.testing.assert_allclose(found, np.frombuffer(expected, np.float32), rtol=1e-4, atol=1e-5)


class _Data(bytearray):
    """Bytes of which one can tell when they go."""


def test_options_keep_an_archive_in_memory_as_long_as_they_live(archive: Path) -> None:
    data = _Data(archive.read_bytes())
    is_there = weakref.ref(data)
    pieces = onnxarchive.session_options(data)
    del data
    gc.collect()
    assert is_there() is not None or not hasattr(pieces[1], ADD)
    del pieces
    gc.collect()
    assert is_there() is None


# Refusals


@pytest.mark.parametrize("call", [onnxarchive.session, onnxarchive.session_options])
def test_a_broken_archive_is_refused_before_onnxruntime_sees_it(
    archive: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[Any], object]
) -> None:
    never = Mock(side_effect=AssertionError("made"))
    monkeypatch.setattr(ort.InferenceSession, "__init__", never)
    break_local_header(archive, entry_of(archive, "layer_0_weight"))
    with onnxarchive.open(archive) as closed:
        pass
    refused: list[tuple[Any, type[Exception], str]] = [
        (archive, ArchiveFormatError, rf"^{re.escape(str(archive))}: .*layer_0_weight"),
        (archive.read_bytes(), ArchiveFormatError, "layer_0_weight"),
        (archive.read_bytes() + b"x", ArchiveFormatError, "ZIP-2"),
        (b"", ArchiveFormatError, "ZIP-2"),
        (archive.with_name("missing"), FileNotFoundError, "missing"),
        (closed, ValueError, "closed"),
    ]
    for source, error, message in refused:
        with pytest.raises(error, match=message):
            call(source)


def test_a_small_tensor_that_has_changed_is_refused(path: Path) -> None:
    onnxarchive.save(_split(3), path, size_threshold=0)
    flip_byte(path, 64)
    message = rf"^{re.escape(str(path))}: entry 'split'"
    with pytest.raises(onnxarchive.ChecksumError, match=message):
        session(path)


def test_tensors_that_the_model_of_a_session_holds_are_requested_together(web: WebServer) -> None:
    vectors = (helper.make_tensor(f"v{it}", 7, (200,), range(200)) for it in range(12))
    weights = (raw_tensor(f"w{it}", dims=(25_000,)) for it in range(12))
    pairs = zip(vectors, weights, strict=True)
    web.files["/m.onnxa"] = saved(model_of(*(it for pair in pairs for it in pair)))
    onnxarchive.session_options(web.url("/m.onnxa"))
    assert len(web.requests) <= 4  # the end, the tensors of each kind


def test_a_name_that_is_not_utf_8_is_refused(archive: Path) -> None:
    other = os.fsencode(archive.parent) + b"/\xff.onnxa"
    try:
        os.rename(archive, other)
    except OSError:
        pytest.skip("the file system takes no such name")
    with pytest.raises(ValueError, match="path in UTF-8"):
        session(os.fsdecode(other))


def test_an_old_onnxruntime_is_refused(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "__version__", "1.20.1")
    with pytest.raises(UnsupportedFeatureError, match=r"1\.21 or newer.*found 1\.20\.1"):
        onnxarchive.session(archive)
    monkeypatch.setattr(ort, "__version__", "2.0.0+cuda")
    onnxarchive.session_options(archive)


def test_an_onnxruntime_that_reads_no_files_from_memory_gets_all_in_the_model(
    archive: Path, expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(ort.SessionOptions, ADD, raising=False)
    model, options = onnxarchive.session_options(archive.read_bytes())
    assert onnx.ModelProto.FromString(model) == runnable_model()
    assert run(ort.InferenceSession(model, options, CPU)) == expected
    assert run(session(archive.read_bytes())) == expected


def test_a_session_keeps_only_maps_and_lets_go_of_them(archive: Path) -> None:
    code = """
import gc, os, sys, onnxarchive, onnxruntime
from models import open_below
folder = os.path.dirname(sys.argv[1])
options = onnxruntime.SessionOptions()
options.add_session_config_entry("session.disable_prepacking", "1")
made = onnxarchive.session(sys.argv[1], options)
print(len(open_below(folder)))
del made
gc.collect()
print(len(open_below(folder)))
"""
    assert run_python(code, archive).split() == ["1", "0"]


def test_a_session_is_made_of_a_model_without_external_tensors(path: Path) -> None:
    model = text_model("g () => (float[4] y) { y = Identity(w) }", raw_tensor("w"))
    onnxarchive.save(model, path)
    for source in (path, path.read_bytes()):
        (y,) = session(source).run(None, {})
        assert y.tobytes() == raw_tensor("w").raw_data


@pytest.mark.parametrize("source", [None, 123, ["m.onnxa"]])
def test_a_source_of_another_type_is_refused(source: Any) -> None:
    with pytest.raises(
        TypeError, match="expected a path, a URL, bytes or a binary file object, found"
    ):
        onnxarchive.session(source)


@pytest.mark.parametrize("in_function", [False, True])
@pytest.mark.parametrize(
    ("domain", "op_type", "is_custom"),
    [("some.vendor", "Op", True), ("own", "g", True), ("com.microsoft", "Gelu", False)],
)
def test_options_are_changed_temporarily_if_an_operator_may_be_custom(
    domain: str, op_type: str, is_custom: bool, in_function: bool
) -> None:
    """The operator is of a domain that nobody imports."""
    model = runnable_model()
    node = helper.make_node(op_type, ["a"], ["b"], domain=domain)
    if in_function:
        opsets = [helper.make_opsetid("", 17)]
        model.functions.append(helper.make_function("own", "f", ["a"], ["b"], [node], opsets))
    else:
        model.graph.node.append(node)
    assert (copy_options(ort.SessionOptions(), model) is None) == is_custom


def test_a_session_prints_its_archive_and_model(path: Path) -> None:
    onnxarchive.save(runnable_model(), path, models={"decoder": runnable_model()})
    assert repr(onnxarchive.session(path)) == f"<onnxarchive session of {str(path)!r}>"
    printed = str(onnxarchive.session(path, model="decoder"))
    assert printed == f"<onnxarchive session of {str(path)!r}, model 'decoder'>"
    in_memory = repr(onnxarchive.session(path.read_bytes()))
    assert in_memory == "<onnxarchive session of 'archive in memory'>"
