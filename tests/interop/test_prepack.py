"""Packed weights in an archive: sessions map those of their weights, edits leave them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from commands import error_of, output_of, result_of
from compared_sessions import needs_packed_weights, ort, quiet
from edits import refused, untouched
from models import (
    break_local_header,
    entry_of,
    further_model,
    runnable_model,
    text_model,
)
from onnx import numpy_helper
from opened_files import count_opens
from processes import completed
from steps import steps

import onnxarchive
from onnxarchive.errors import ArchiveError, LockedError, UnsupportedFeatureError
from onnxarchive.interop.onnxruntime import OPTIMIZED_DATA, OPTIMIZED_NBYTES, SAVE_PACKED, machine
from onnxarchive.model.prepacked import (
    MAX_FORMS,
    MAX_INDEX_NBYTES,
    PREFIX,
    PackedSet,
    PackedWeight,
)

pytestmark = needs_packed_weights

MIB = 1 << 20
CPU = ["CPUExecutionProvider"]
X = np.linspace(-1, 1, 2048, dtype=np.float32).reshape(2, 1024)
WEIGHT = "layer.0/weight"
RUNTIMES = Path(__file__).parents[2] / "build" / "onnxruntime"  # made by .ci/run
FOLDER = f"{PREFIX}{ort.__version__}-{machine()}/"


def run(source: Any, **options: Any) -> np.ndarray:
    """The output of a session, which must raise no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session = onnxarchive.session(source, providers=CPU, **options)
    (output,) = session.run(None, {"x": X})
    return np.asarray(output)


def expected(model: onnx.ModelProto) -> np.ndarray:
    session = ort.InferenceSession(model.SerializeToString(), providers=CPU)
    return np.asarray(session.run(None, {"x": X})[0])


def asset(name: str, folder: str = FOLDER) -> str:
    """The path of a file of a set as an asset."""
    return f"{folder}{name}".removeprefix("assets/")


def files_of(weight: PackedWeight) -> list[str]:
    return [name for buffers in weight.buffers.values() for name, _ in buffers]


def index_of(path: Path) -> PackedSet:
    with onnxarchive.open(path) as archive:
        return PackedSet.of_json(bytes(archive.read(f"{FOLDER}index.json")))


def packed_entries(path: Path) -> list[str]:
    assert onnxarchive.check(path, full=True) == []
    with onnxarchive.open(path) as archive:
        return [name for name in archive.entries if name.startswith(PREFIX)]


def pairs_of(path: Path, model: str = "") -> dict[str, list[str]]:
    """The keys of the pairs about packed weights that a session gets, by tensor."""
    serialized, _ = onnxarchive.session_options(path, model=model)
    loaded = onnx.load_model_from_string(serialized)
    return {
        tensor.name: keys
        for tensor in loaded.graph.initializer
        if (keys := [it.key for it in tensor.external_data if it.key.startswith("prepacked")])
    }


def require_packed(path: Path, names: list[str], model: str = "") -> None:
    """Requires that sessions get packed weights of these tensors, and give the model's outputs."""
    assert [*pairs_of(path, model)] == names
    output = run(path, model=model)
    np.testing.assert_array_equal(output, expected(onnxarchive.load(path, model=model)))


def two_weights(seed: int) -> onnx.ModelProto:
    """A model with weights `a` and `b`, which are those of no other seed."""
    generator = np.random.default_rng(seed)
    weights = (generator.standard_normal(dims, np.float32) for dims in ((1024, 64), (64, 32)))
    return text_model(
        "two (float[2, 1024] x) => (float[2, 32] y) { z = MatMul(x, a) y = MatMul(z, b) }",
        *map(numpy_helper.from_array, weights, "ab"),
    )


@pytest.fixture
def packed(path: Path) -> Path:
    """An archive with packed weights."""
    onnxarchive.save(runnable_model(), path)
    onnxarchive.prepack(path)
    return path


# Packing


def test_packing_adds_assets_in_place_and_leaves_every_entry_where_it_is(path: Path) -> None:
    onnxarchive.save(runnable_model(), path, assets={"labels.txt": b"cat"})
    status = path.stat()
    with onnxarchive.open(path) as archive:
        before = {name: it for name, it in archive.entries.items() if not name.startswith("__")}
    onnxarchive.prepack(path)
    assert path.stat().st_ino == status.st_ino
    with onnxarchive.open(path) as archive:
        assert before.items() <= dict(archive.entries).items()
        buffers = [it for name, it in archive.entries.items() if name.startswith(FOLDER)]
    assert [it.data_offset % 256 for it in buffers] == [0] * len(buffers)
    index = index_of(path)
    assert [*index.weights[""]] == [WEIGHT]
    assert (index.onnxruntime, index.machine) == (ort.__version__, machine())
    assert {f"{FOLDER}{name}" for name in [*index.files, "index.json"]} == {*packed_entries(path)}
    assert [it.name for it in path.parent.iterdir()] == [path.name]


@pytest.mark.skipif(os.name == "nt", reason="Windows removes no mapped file")
def test_files_of_onnx_runtime_have_no_names_when_the_archive_is_edited(archive: Path) -> None:
    seen: list[list[Path]] = []

    def look(*_: int) -> None:
        seen.append(list(archive.parent.rglob(".*.tmp/*")))

    onnxarchive.prepack(archive, progress=look)
    assert seen
    assert not any(seen)


def test_packing_again_writes_nothing(packed: Path) -> None:
    with untouched(packed):
        onnxarchive.prepack(packed)


def test_weights_that_are_not_packed_are_named(path: Path) -> None:
    model = runnable_model()
    model.graph.initializer.append(numpy_helper.from_array(np.ones(500, np.float32), "unused"))
    onnxarchive.save(model, path)
    onnxarchive.prepack(path)
    assert index_of(path).unpacked == {"": ("unused",)}


def test_each_model_is_packed_or_the_one_that_is_named(path: Path) -> None:
    onnxarchive.save(further_model(), path, models={"second": further_model()})
    onnxarchive.prepack(path, model="second")
    names = ["embedding", "own"]
    assert [*index_of(path).weights] == ["second"]
    assert [*pairs_of(path, "second")] == names
    onnxarchive.prepack(path, model="")
    index = index_of(path)
    assert {id: [*it] for id, it in index.weights.items()} == {"": names, "second": names}
    assert len(index.files) == 2  # both models have the same weights
    require_packed(path, names)
    np.testing.assert_array_equal(run(path, model="second"), expected(further_model()))


def test_packing_one_model_keeps_the_packed_weights_of_others_by_whatever_id_they_had(
    path: Path,
) -> None:
    models = {"": runnable_model(), "first": two_weights(1), "second": two_weights(2)}
    onnxarchive.save(models[""], path, models={"first": models["first"], "gone": models["second"]})
    onnxarchive.prepack(path)
    with onnxarchive.open(path) as archive:
        assets = dict(archive.assets)
    swapped = {"first": models["second"], "second": models["first"]}
    onnxarchive.save(models[""], path, models=swapped, assets=assets)
    onnxarchive.prepack(path, model="second")
    assert [*index_of(path).weights] == ["", "first", "second"]
    require_packed(path, [WEIGHT])
    for id in swapped:
        require_packed(path, ["a", "b"], id)


def test_packing_one_model_again_drops_packed_weights_that_no_model_has(packed: Path) -> None:
    with onnxarchive.open(packed) as archive:
        assets = dict(archive.assets)
    onnxarchive.save(two_weights(1), packed, models={"other": two_weights(2)}, assets=assets)
    onnxarchive.prepack(packed, model="other")
    assert [*index_of(packed).weights] == ["other"]
    assert {f"{FOLDER}{name}" for name in [*index_of(packed).files, "index.json"]} == {
        *packed_entries(packed)
    }


def test_packing_opens_the_archive_as_often_for_many_models_as_for_one(tmp_path: Path) -> None:
    def packed(count: int) -> int:
        path = tmp_path / f"{count}.onnxa"
        models = {f"m{number}": further_model() for number in range(1, count)}
        onnxarchive.save(runnable_model(), path, models=models)
        opened = count_opens(path, lambda: onnxarchive.prepack(path))
        assert len(index_of(path).weights) == count
        return opened

    assert packed(5) == packed(1)


def test_sets_of_other_versions_and_machines_are_kept_and_not_used(archive: Path) -> None:
    other = PackedSet("1.40.0", "riscv64", {"": {}}, {})
    with onnxarchive.edit(archive) as edit:
        edit.assets[asset("index.json", other.folder)] = other.to_json()
    assert pairs_of(archive) == {}
    onnxarchive.prepack(archive)
    assert f"{other.folder}index.json" in packed_entries(archive)
    assert [*pairs_of(archive)] == [WEIGHT]


def test_the_set_of_another_version_is_used_if_there_is_none_of_this_one(packed: Path) -> None:
    index = index_of(packed)
    other = PackedSet("1.40.0", index.machine, index.weights, index.unpacked)
    with onnxarchive.edit(packed) as edit:
        for name in index.files:
            edit.assets[asset(name, other.folder)] = edit.assets[asset(name)]
        edit.assets[asset("index.json", other.folder)] = other.to_json()
        for name in [*index.files, "index.json"]:
            del edit.assets[asset(name)]
    require_packed(packed, [WEIGHT])


def test_an_older_runtime_is_refused_and_gets_no_packed_weights(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ort, "__version__", "1.31.1")
    require_packed(packed, [])
    with refused(packed, UnsupportedFeatureError, r"1\.32 or newer.*found 1\.31\.1"):
        onnxarchive.prepack(packed)


@pytest.mark.parametrize("id", ["", "bad"])
def test_a_model_that_cannot_be_loaded_leaves_the_archive_and_no_file(path: Path, id: str) -> None:
    models = {"": runnable_model(), "bad": runnable_model()}
    models[id].graph.node[0].op_type = "NoSuchOperator"
    onnxarchive.save(models.pop(""), path, models=models if id else {})
    name = " 'bad'" if id else ""
    with refused(path, ArchiveError, f"ONNX Runtime cannot load the model{name}: .*NoSuchOp"):
        onnxarchive.prepack(path)
    if id:
        onnxarchive.prepack(path, model="")
        assert [*pairs_of(path)] == [WEIGHT]


@pytest.mark.parametrize("kind", ["transposed", "float16"])
def test_weights_that_are_changed_before_they_are_packed_are_not_stored(
    path: Path, kind: str
) -> None:
    weight = numpy_helper.to_array(runnable_model().graph.initializer[0])
    if kind == "transposed":
        text = "g (float[2, 1024] x) => (float[2, 16] y) { v = Transpose(w) y = MatMul(x, v) }"
        weight = weight.T.copy()
    else:
        text = "g (float16[2, 1024] x) => (float16[2, 16] y) { y = MatMul(x, w) }"
        weight = weight.astype(np.float16)
    onnxarchive.save(text_model(text, numpy_helper.from_array(weight, "w")), path)
    with untouched(path):
        onnxarchive.prepack(path)


def test_weights_of_one_name_are_not_stored(path: Path) -> None:
    model = further_model()
    again = numpy_helper.to_array(model.graph.initializer[1]) * 2
    model.graph.initializer.append(numpy_helper.from_array(again, "own"))
    onnxarchive.save(model, path)
    onnxarchive.prepack(path)
    assert [*index_of(path).weights[""]] == ["embedding"]
    assert len(packed_entries(path)) == 2


def test_packing_costs_the_sum_and_not_the_product_of_weights_and_existing_files(
    tmp_path: Path,
) -> None:
    def work(weights: int, files: int) -> int:
        path = tmp_path / f"{weights} {files}.onnxa"
        old = {f"w{number}": PackedWeight(1, 1, {}) for number in range(weights)}
        index = PackedSet(ort.__version__, machine(), {"": {}, "other": old}, {})
        assets = {asset(f"f{number}"): b"x" for number in range(files)}
        assets[asset("index.json")] = index.to_json()
        onnxarchive.save(runnable_model(), path, assets=assets)
        return steps(lambda: onnxarchive.prepack(path))

    work(1, 1)  # imports
    assert work(1, 1) + work(90, 90) < 1.05 * (work(1, 90) + work(90, 1))


def test_an_index_that_is_too_large_to_be_read_is_replaced(packed: Path) -> None:
    index = index_of(packed)
    other = PackedSet(index.onnxruntime, index.machine, {"other": index.weights[""]}, {})
    with onnxarchive.edit(packed) as edit:
        edit.assets[asset("index.json")] = other.to_json().ljust(MAX_INDEX_NBYTES + 1)
    with pytest.warns(UserWarning, match=f"at most {MAX_INDEX_NBYTES} bytes"):
        assert pairs_of(packed) == {}
    onnxarchive.prepack(packed)
    assert index_of(packed) == index


@pytest.mark.parametrize(
    "obstacle", ["hard link", "symbolic link", "lock", "directory", "url", "full disk"]
)
def test_an_archive_that_cannot_be_edited_is_refused_before_anything_is_packed(
    path: Path, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    onnxarchive.save(runnable_model(), path)
    monkeypatch.setattr(ort, "InferenceSession", Mock(side_effect=AssertionError("packed")))
    target: str | Path = path
    error: type[Exception] = ValueError
    with contextlib.ExitStack() as stack:
        if obstacle == "hard link":
            os.link(path, path.with_name("other"))
        elif obstacle == "symbolic link":
            target = path.with_name("link.onnxa")
            target.symlink_to(path)
        elif obstacle == "lock":
            error = LockedError
            stack.enter_context(onnxarchive.edit(path))
        elif obstacle == "directory":
            target, error = path.parent, ArchiveError
        elif obstacle == "full disk":
            disk, error = SimpleNamespace(total=1 << 40, free=9), OSError
            monkeypatch.setattr(shutil, "disk_usage", lambda _: disk)
        else:
            target, error = "https://nowhere.invalid/m.onnxa", UnsupportedFeatureError
        with pytest.raises(error):
            onnxarchive.prepack(target, timeout=0)
    if obstacle == "hard link":
        monkeypatch.undo()
        onnxarchive.prepack(path, copy=True)
        assert [*pairs_of(path)] == [WEIGHT]
        assert len(packed_entries(path.with_name("other"))) == 0


def test_an_edit_while_weights_are_packed_is_noticed(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = ort.InferenceSession

    def edited(*arguments: Any, **options: Any) -> Any:
        session = make(*arguments, **options)
        with onnxarchive.edit(archive) as edit:
            edit.metadata["author"] = "Ada"
        return session

    monkeypatch.setattr(ort, "InferenceSession", edited)
    with pytest.raises(ArchiveError, match="edited while its weights were packed"):
        onnxarchive.prepack(archive)
    assert packed_entries(archive) == []


# Sessions


@pytest.mark.parametrize("way", ["path", "archive", "options"])
def test_every_way_to_a_session_gives_the_outputs_of_the_model(packed: Path, way: str) -> None:
    assert pairs_of(packed) == {WEIGHT: ["prepacked_0"]}
    if way == "archive":
        with onnxarchive.open(packed) as archive:
            output = run(archive)
    elif way == "options":
        session = ort.InferenceSession(*onnxarchive.session_options(packed), CPU)
        output = session.run(None, {"x": X})[0]
    else:
        output = run(packed)
    np.testing.assert_array_equal(output, expected(runnable_model()))


def test_without_prepacking_no_packed_weight_is_named(packed: Path) -> None:
    serialized, _ = onnxarchive.session_options(packed, prepack=False)
    assert b"prepacked" not in serialized
    np.testing.assert_allclose(run(packed, prepack=False), expected(runnable_model()), rtol=1e-3)


def damage(path: Path) -> None:
    """Changes bytes of the packed weight."""
    with onnxarchive.open(path) as archive:
        (name,) = (it for it in archive.entries if it.startswith(FOLDER) and "json" not in it)
        offset = archive.entries[name].data_offset
    with path.open("r+b") as file:
        file.seek(offset + 100)
        file.write(b"damaged")


def test_damaged_packed_weights_cause_a_warning_and_are_packed_again(packed: Path) -> None:
    damage(packed)
    with pytest.warns(UserWarning, match=r"\.onnxa: ONNX Runtime did not take the packed weights"):
        session = onnxarchive.session(packed, providers=CPU)
    np.testing.assert_array_equal(session.run(None, {"x": X})[0], expected(runnable_model()))
    with pytest.raises(Exception, match="do not match"):
        ort.InferenceSession(*onnxarchive.session_options(packed), CPU)
    assert onnxarchive.check(packed, full=True) != []


OTHER_RUNTIME = """
import sys
import numpy as np, onnxruntime, onnxarchive

def output(session):
    return session.run(None, {"x": np.linspace(-1, 1, 2048, dtype=np.float32).reshape(2, 1024)})[0]

path = sys.argv[1]
session = onnxarchive.session(path, providers=["CPUExecutionProvider"])
model = onnxarchive.load(path).SerializeToString()
plain = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
np.testing.assert_array_equal(output(session), output(plain))
print(onnxruntime.__version__, onnxarchive.session_options(path)[0].count(b"prepacked_"))
"""


@pytest.mark.tool
@pytest.mark.parametrize("is_damaged", [False, True], ids=["sound", "damaged"])
def test_other_versions_give_the_outputs_of_the_model(packed: Path, is_damaged: bool) -> None:
    runtimes = sorted(RUNTIMES.glob("*"))
    if not runtimes:
        pytest.skip("no other versions of ONNX Runtime are installed in build/onnxruntime")
    if is_damaged:
        damage(packed)
    for directory in runtimes:
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(directory), *sys.path])}
        command = [sys.executable, "-W", "ignore", "-c", OTHER_RUNTIME, str(packed)]
        done = completed(command, status=0, env=variables)
        version, named = done.stdout.split()
        assert version.startswith(f"{directory.name}.")
        compares = tuple(map(int, version.split(".")[:2])) >= (1, 32)
        assert int(named) == compares


def test_a_session_that_fails_without_packed_weights_fails_with_its_own_error(packed: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(Exception, match=r"(?i)provider"):
            onnxarchive.session(packed, providers=["NoProvider"], enable_fallback=0)


@pytest.mark.parametrize("matches", [False, True])
def test_packed_weights_of_other_bytes_change_no_output(packed: Path, matches: bool) -> None:
    """Also if the index claims that they are those of the new weight."""
    index = index_of(packed)
    with onnxarchive.open(packed) as archive:
        assets = dict(archive.assets)
    model = runnable_model()
    weight = numpy_helper.to_array(model.graph.initializer[0]) * 2
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(weight, WEIGHT))
    onnxarchive.save(model, packed, assets=assets)
    if matches:
        with onnxarchive.open(packed) as archive:
            (key,) = (name for name in archive.entries if not name.startswith(("assets", "__")))
            entry = archive.entries[key]
        text = json.loads(index.to_json())
        text["weights"][""][WEIGHT] |= {"crc32": entry.crc32, "nbytes": entry.nbytes}
        with onnxarchive.edit(packed) as edit:
            edit.assets[asset("index.json")] = json.dumps(text).encode()
    require_packed(packed, [WEIGHT] * matches)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"onnxruntime": 1, "machine": "MACHINE", "weights": {}, "unpacked": {}}',
        b'{"onnxruntime": "1", "machine": "m", "weights": {}, "unpacked": {}}',  # another folder
        b'{"onnxruntime": "VERSION", "machine": "MACHINE", "weights": [], "unpacked": {}}',
        b'{"onnxruntime": "VERSION", "machine": "MACHINE", "unpacked": {},'
        b' "weights": {"": {"w": {}}}}',
        b'{"onnxruntime": "VERSION", "machine": "MACHINE", "unpacked": {},'
        b' "weights": {"": {"w": {"nbytes": 1, "crc32": 1, "packed": {"a|b": [["x", 1]]}}}}}',
    ],
)
def test_an_index_that_cannot_be_read_is_named_and_not_used(packed: Path, content: bytes) -> None:
    with onnxarchive.edit(packed) as edit:
        content = content.replace(b"VERSION", ort.__version__.encode())
        edit.assets[asset("index.json")] = content.replace(b"MACHINE", machine().encode())
    with pytest.warns(UserWarning, match=r"prepacked/.*: .*its packed weights are not used"):
        session = onnxarchive.session(packed, providers=CPU)
    np.testing.assert_array_equal(session.run(None, {"x": X})[0], expected(runnable_model()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        onnxarchive.prepack(packed)
    np.testing.assert_array_equal(run(packed), expected(runnable_model()))


@pytest.mark.parametrize("change", ["missing", "shorter"])
def test_buffers_that_are_not_as_the_index_says_are_left_out(packed: Path, change: str) -> None:
    (file,) = index_of(packed).files
    with onnxarchive.edit(packed) as edit:
        if change == "missing":
            del edit.assets[asset(file)]
        else:
            edit.assets[asset(file)] = edit.assets[asset(file)][:-1]
    require_packed(packed, [])


def test_a_damaged_header_of_packed_weights_does_not_stop_sessions(path: Path) -> None:
    onnxarchive.save(further_model(), path, models={"other": runnable_model()})
    onnxarchive.prepack(path)
    (name,) = {name for it in index_of(path).weights["other"].values() for name in files_of(it)}
    break_local_header(path, entry_of(path, f"{FOLDER}{name}"))
    np.testing.assert_array_equal(run(path, model="other"), expected(runnable_model()))
    require_packed(path, ["embedding", "own"])
    assert onnxarchive.check(path, full=True) != []


def test_two_equal_weights_share_one_packed_form(path: Path) -> None:
    weight = np.random.default_rng(1).standard_normal((1024, 1024), np.float32)
    model = text_model(
        "twice (float[2, 1024] x) => (float[2, 1024] y) { z = MatMul(x, a) y = MatMul(z, b) }",
        *(numpy_helper.from_array(weight, name) for name in "ab"),
    )
    onnxarchive.save(model, path)
    onnxarchive.prepack(path)
    assert len(index_of(path).files) == 1
    require_packed(path, ["a", "b"])
    assert pairs_of(path) == {"a": ["prepacked_0"], "b": ["prepacked_0"]}


def test_weights_are_found_by_content_whichever_model_had_them(path: Path) -> None:
    models = {"first": two_weights(1), "second": two_weights(2)}
    onnxarchive.save(runnable_model(), path, models=models)
    onnxarchive.prepack(path)
    with onnxarchive.open(path) as archive:
        assets = dict(archive.assets)
    moved = {"first": two_weights(2), "other": two_weights(1), "new": two_weights(3)}
    onnxarchive.save(runnable_model(), path, models=moved, assets=assets)
    require_packed(path, [WEIGHT])
    for id, names in {"first": ["a", "b"], "other": ["a", "b"], "new": []}.items():
        require_packed(path, names, id)


def test_a_weight_that_models_use_differently_is_mapped_in_the_form_of_each(path: Path) -> None:
    """The forms have different keys; ONNX Runtime ignores those that it does not need."""
    weight = numpy_helper.from_array(
        np.random.default_rng(1).standard_normal((1024, 1024), np.float32), "w"
    )
    plain, transposed = (
        text_model(f"g (float[2, 1024] x) => (float[2, 1024] y) {{ y = {call} }}", weight)
        for call in ("MatMul(x, w)", "Gemm<transB=1>(x, w)")
    )
    onnxarchive.save(plain, path, models={"transposed": transposed})
    onnxarchive.prepack(path)
    assert len(index_of(path).files) == 2
    with onnxarchive.edit(path) as edit:
        edit.models.rename("transposed", "other")
    assert pairs_of(path) == pairs_of(path, "other") == {"w": ["prepacked_0", "prepacked_1"]}
    require_packed(path, ["w"])
    require_packed(path, ["w"], "other")


def test_forms_of_all_models_together_are_no_more_than_a_weight_may_have(path: Path) -> None:
    onnxarchive.save(runnable_model(), path)
    with onnxarchive.open(path) as archive:
        (entry,) = (it for it in archive.entries.values() if it.name == "layer_0_weight")
    weights = {}
    for model in "abc":
        names = [f"{model}{number}" for number in range(MAX_FORMS // 2)]
        forms = {name: ((name, 1),) for name in names}
        weights[model] = {WEIGHT: PackedWeight(entry.nbytes, entry.crc32, forms)}
    index = PackedSet(ort.__version__, machine(), weights, {})
    with onnxarchive.edit(path) as edit:
        edit.assets[asset("index.json")] = index.to_json()
        for name in index.files:
            edit.assets[asset(name)] = b"x"
    assert len(pairs_of(path)[WEIGHT]) == MAX_FORMS


# Edits


def test_an_edit_without_changes_leaves_a_set_of_unknown_models(packed: Path) -> None:
    other = PackedSet("1.32.0", "riscv64", {"gone": {}}, {"gone": ("w",)})
    with onnxarchive.edit(packed) as edit:
        edit.assets[asset("index.json", other.folder)] = other.to_json()
    with untouched(packed):
        with onnxarchive.edit(packed):
            pass
        onnxarchive.prepack(packed)


def add_tensor(edit: onnxarchive.Edit) -> None:
    new = numpy_helper.from_array(np.ones(1000, np.float32), "new")
    edit.model.graph.initializer.append(new)


def assign_equal_model(edit: onnxarchive.Edit) -> None:
    edit.model = runnable_model()
    edit.model.doc_string = "new"


def change_metadata(edit: onnxarchive.Edit) -> None:
    edit.metadata["author"] = "Ada"
    edit.model.graph.node[0].name = "product"


# Each with whether the weight stays as it was.
CHANGES: dict[str, tuple[Callable[[onnxarchive.Edit], object], bool]] = {
    "metadata": (change_metadata, True),
    "a tensor is added": (add_tensor, True),
    "an equal model from memory": (assign_equal_model, True),
    "a small tensor": (
        lambda edit: setattr(
            edit.model.graph.initializer[1], "raw_data", np.ones(16, np.float32).tobytes()
        ),
        True,
    ),
    "new elements": (
        lambda edit: edit.tensors.__setitem__(WEIGHT, edit.tensors[WEIGHT] * 2),
        False,
    ),
    "another model": (lambda edit: setattr(edit, "model", further_model()), False),
}
# Without `compact`, a model cannot be replaced by one that does not use its tensors.
EDITS = [(name, True) for name in CHANGES] + [
    (name, False) for name in CHANGES if name != "another model"
]


def says_unused(nbytes: int) -> Any:
    """Expects a warning about so many bytes; no warning if they are 0."""
    if not nbytes:
        return contextlib.nullcontext()
    text = f"{nbytes} bytes of packed weights stay that no model has any more; .*prepack --remove'"
    return pytest.warns(UserWarning, match=text)


@pytest.mark.parametrize(("name", "compact"), EDITS)
def test_an_edit_keeps_packed_weights_and_sessions_use_those_of_unchanged_tensors(
    packed: Path, name: str, compact: bool
) -> None:
    change, is_kept = CHANGES[name]
    before, index = packed_entries(packed), index_of(packed)
    nbytes = sum(index.files.values())
    with (
        says_unused(nbytes if compact and not is_kept else 0),
        onnxarchive.edit(packed, compact=compact) as edit,
    ):
        change(edit)
    assert (packed_entries(packed), index_of(packed)) == (before, index)
    require_packed(packed, [WEIGHT] * is_kept)


def test_after_new_elements_sessions_use_packed_weights_of_other_tensors(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = further_model()
    onnxarchive.save(model, path)
    onnxarchive.prepack(path)
    (file,) = files_of(index_of(path).weights[""]["own"])
    nbytes = index_of(path).files[file]
    new = numpy_helper.to_array(model.graph.initializer[1]) * 2
    with onnxarchive.edit(path) as edit:
        edit.tensors["own"] = new
    require_packed(path, ["embedding"])
    model.graph.initializer[1].CopyFrom(numpy_helper.from_array(new, "own"))
    np.testing.assert_array_equal(run(path), expected(model))
    (described,) = result_of(capsys, "info", path)["packed"]
    assert (described["weights"], described["unused_nbytes"]) == (1, nbytes)
    onnxarchive.prepack(path)
    (described,) = result_of(capsys, "info", path)["packed"]
    assert (described["weights"], described["unused_nbytes"]) == (2, 0)
    assert len(packed_entries(path)) == 3


@pytest.fixture
def several(path: Path) -> Path:
    """An archive of three models with packed weights, whose further models have equal names."""
    models = {"first": two_weights(1), "second": two_weights(2)}
    onnxarchive.save(runnable_model(), path, models=models)
    onnxarchive.prepack(path)
    return path


@pytest.mark.parametrize("compact", [False, True])
def test_renamed_and_swapped_models_keep_their_packed_weights(several: Path, compact: bool) -> None:
    with onnxarchive.edit(several, compact=compact) as edit:
        edit.models.rename("first", "other")
    require_packed(several, [WEIGHT])
    require_packed(several, ["a", "b"], "other")
    require_packed(several, ["a", "b"], "second")
    with onnxarchive.edit(several, compact=compact) as edit:
        edit.models.rename("second", "first")
        edit.models.rename("other", "second")
    for id, seed in {"first": 2, "second": 1}.items():
        require_packed(several, ["a", "b"], id)
        np.testing.assert_array_equal(run(several, model=id), expected(two_weights(seed)))


@pytest.mark.parametrize("compact", [False, True])
def test_an_added_model_uses_the_packed_weights_of_equal_tensors(
    several: Path, compact: bool
) -> None:
    with onnxarchive.edit(several, compact=compact) as edit:
        edit.models["copied"] = edit.models["second"]
        edit.models["same"] = two_weights(1)
        edit.models["new"] = two_weights(3)
    for id in ("first", "second", "copied", "same"):
        require_packed(several, ["a", "b"], id)
    require_packed(several, [], "new")
    require_packed(several, [WEIGHT])


def test_removing_a_model_says_how_much_of_its_packed_weights_stays(
    several: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = index_of(several)
    files = [name for it in index.weights["first"].values() for name in files_of(it)]
    nbytes = sum(index.files[name] for name in files)
    with says_unused(nbytes), onnxarchive.edit(several, compact=True) as edit:
        del edit.models["first"]
    assert index_of(several) == index
    require_packed(several, ["a", "b"], "second")
    with says_unused(nbytes), onnxarchive.edit(several, compact=True):
        pass
    (described,) = result_of(capsys, "info", several)["packed"]
    assert described["unused_nbytes"] == nbytes
    output_of(capsys, "prepack", several, "--remove")
    assert packed_entries(several) == []
    with onnxarchive.edit(several, compact=True) as edit:
        del edit.models["second"]


def test_removing_a_model_that_shares_tensors_says_which_of_its_packed_forms_stay(
    path: Path,
) -> None:
    weight = np.random.default_rng(1).standard_normal((1024, 1024), np.float32)
    models = {
        name: text_model(
            f"g (float[2, 1024] x) => (float[2, 1024] y) {{ y = {call} }}",
            numpy_helper.from_array(weight, name),
        )
        for name, call in (("w", "MatMul(x, w)"), ("v", "Gemm<transB=1>(x, v)"))
    }
    onnxarchive.save(models["w"], path, models={"second": models["v"]})
    onnxarchive.prepack(path)
    index = index_of(path)
    (file,) = files_of(index.weights["second"]["v"])
    with says_unused(index.files[file]), onnxarchive.edit(path) as edit:
        del edit.models["second"]
    require_packed(path, ["w"])


def test_removing_a_model_whose_weights_another_has_says_nothing(path: Path) -> None:
    onnxarchive.save(further_model(), path, models={"second": further_model()})
    onnxarchive.prepack(path)
    with onnxarchive.edit(path) as edit:
        del edit.models["second"]
    require_packed(path, ["embedding", "own"])


def test_only_an_edit_that_may_leave_unused_weights_reads_the_sets(packed: Path) -> None:
    with onnxarchive.edit(packed) as edit:
        edit.assets[asset("index.json")] = b"no index"
    with onnxarchive.edit(packed) as edit:
        edit.tensors[WEIGHT] = edit.tensors[WEIGHT] * 2
    with (
        pytest.warns(UserWarning, match=r"prepacked/.*: .*its packed weights are not used"),
        onnxarchive.edit(packed, compact=True),
    ):
        pass


@pytest.mark.parametrize("how", ["compact", "convert", "save"])
def test_a_rewritten_archive_keeps_aligned_packed_weights(packed: Path, how: str) -> None:
    if how == "compact":
        with onnxarchive.edit(packed, compact=True) as edit:
            edit.assets["first.txt"] = b"moves what follows"
    elif how == "convert":
        onnxarchive.convert(packed, packed.with_name("new.onnxa"))
        packed = packed.with_name("new.onnxa")
    else:
        model = pytest.importorskip("onnxarchive.ir").load(packed)
        with onnxarchive.open(packed) as archive:
            assets = dict(archive.assets)
        onnxarchive.save(model, packed, assets=assets)
    with onnxarchive.open(packed) as archive:
        buffers = [it for name, it in archive.entries.items() if name.startswith(FOLDER)]
    assert [it.data_offset % 256 for it in buffers] == [0, 0]
    require_packed(packed, [WEIGHT])


# Links, and models of ONNX Runtime


def test_a_link_names_packed_weights_if_asked(
    packed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link, plain = packed.with_name("link.onnx"), packed.with_name("plain.onnx")
    onnxarchive.link(packed, plain)
    onnxarchive.link(packed, link, prepack=True)
    assert b"prepacked" not in plain.read_bytes()
    assert b"prepacked_0" in link.read_bytes()
    assert onnxarchive.check_link(link) == onnxarchive.check_link(plain) == []
    session = ort.InferenceSession(link, providers=CPU)
    np.testing.assert_array_equal(session.run(None, {"x": X})[0], expected(runnable_model()))
    output_of(capsys, "prepack", packed, "--remove")
    assert onnxarchive.check_link(plain) == []
    (finding,) = onnxarchive.check_link(link)
    assert f"{WEIGHT}' (graph.initializer[0]): its packed weights are not at" in finding.message


def test_a_link_stays_valid_when_weights_are_packed(archive: Path, link: Path) -> None:
    onnxarchive.prepack(archive)
    assert packed_entries(archive)
    assert onnxarchive.check_link(link) == []


def test_a_model_that_onnx_runtime_saved_with_packed_weights_converts(
    tmp_path: Path, path: Path
) -> None:
    options = quiet()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    for key, value in {SAVE_PACKED: "1", OPTIMIZED_DATA: "data", OPTIMIZED_NBYTES: "1"}.items():
        options.add_session_config_entry(key, value)
    ort.InferenceSession(runnable_model().SerializeToString(), options, CPU)
    assert b"prepacked_0" in (tmp_path / "optimized.onnx").read_bytes()
    with pytest.warns(UserWarning, match=r"ONNX Runtime packed were left out.*layer\.0/weight"):
        onnxarchive.convert(tmp_path / "optimized.onnx", path)
    assert packed_entries(path) == []
    np.testing.assert_array_equal(run(path), expected(runnable_model()))


# The command line


def test_packed_weights_whose_weight_has_changed_are_not_counted(
    packed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def double(model: onnx.ModelProto) -> onnx.ModelProto:
        weight = numpy_helper.to_array(model.graph.initializer[0]) * 2
        model.graph.initializer[0].raw_data = weight.tobytes()
        return model

    onnxarchive.transform(packed, packed, double, weights="loaded")
    assert " 0 packed weights, " in output_of(capsys, "info", packed)
    assert "65,536 bytes (64.0 KiB), of packed weights that no model has any more; " in output_of(
        capsys, "info", packed
    )


def test_the_commands_say_what_is_packed(archive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "packed" not in output_of(capsys, "run", archive)
    printed = output_of(capsys, "prepack", archive)
    assert printed.startswith(f"{archive}: 1 packed weight, 65,536 bytes")
    (described,) = result_of(capsys, "info", archive)["packed"]
    assert described["machine"] == machine()
    assert described["is_usable"]
    version = f"of ONNX Runtime {ort.__version__} on {machine()}"
    assert version in output_of(capsys, "info", archive)
    assert "\npacked    1 weight\n" in output_of(capsys, "run", archive)
    assert "give --remove, for all models, or --model, not both" in error_of(
        capsys, "prepack", archive, "--remove", "--model", "other"
    )
    assert "packed" not in output_of(capsys, "run", archive, "--no-prepack")
    printed = output_of(capsys, "prepack", archive, "--remove")
    assert printed == f"{archive}: no packed weights\n"
    assert packed_entries(archive) == []
