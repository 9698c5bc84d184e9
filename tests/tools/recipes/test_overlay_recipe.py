"""The recipe of overlays: archives of what a fine-tuned model changes of a base."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from models import flip_byte, further_model, text_model
from onnx import helper, numpy_helper
from pages import needs_smaps
from processes import completed, mapped

import onnxarchive

ort: Any = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
overlay: Any = importlib.import_module("tools.recipes.overlay")

pytestmark = pytest.mark.tool

SIDE = 128  # 64 KiB in float32, the least that is left to a base
X = np.random.default_rng(7).standard_normal((4, SIDE), np.float32)
ASSETS = {"labels.txt": b"cat\n"}
NAMES = ("first", "head", "branch", "last")  # of these, only `head` is fine-tuned
TEXT = f"""
tuned (float[4, {SIDE}] x, bool b) => (float[4, {SIDE}] y) {{
  m0 = MatMul(x, first)
  m1 = MatMul(m0, head)
  m2 = If(b) <
    then_branch = then () => (float[4, {SIDE}] yes) {{ yes = MatMul(m1, branch) }},
    else_branch = otherwise () => (float[4, {SIDE}] no) {{ no = MatMul(m1, inner) }}
  >
  m3 = Add(m2, bias)
  y = MatMul(m3, last)
}}
"""


def tensor(name: str, seed: str = "", shape: tuple[int, ...] = (SIDE, SIDE)) -> onnx.TensorProto:
    array = np.random.default_rng([*f"{name}{seed}".encode()]).standard_normal(shape, np.float32)
    return numpy_helper.from_array(array / 8, name)


def model(head: str = "", **attributes: Any) -> onnx.ModelProto:
    """The base, or a model with another weight `head`."""
    made = text_model(TEXT, *(tensor(it, head if it == "head" else "") for it in NAMES), opset=17)
    made.graph.initializer.insert(1, tensor("bias", shape=(SIDE,)))
    made.graph.initializer[0].doc_string = "The first weight."
    made.graph.initializer[0].metadata_props.add(key="origin", value="base")
    branches = next(node for node in made.graph.node if node.op_type == "If")
    branches.attribute[1].g.initializer.append(tensor("inner"))
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str, str]:
    """A base, a fine-tuned archive and its overlay, in two directories."""
    for folder in ("bases", "größe/tuned"):
        (tmp_path / folder).mkdir(parents=True)
    base, tuned = tmp_path / "bases" / "base.onnxa", tmp_path / "größe" / "tuned" / "tuned.onnxa"
    onnxarchive.save(model(), base)
    onnxarchive.save(model("tuned"), tuned, assets=ASSETS)
    small = tuned.with_name("overlay.onnxa")
    assert overlay.make(str(base), str(tuned), str(small)) == 3
    return str(base), str(tuned), str(small)


def outputs(session: Any) -> list[bytes]:
    return [session.run(None, {"x": X, "b": np.array(b)})[0].tobytes() for b in (False, True)]


def index_of(path: str) -> Any:
    with onnxarchive.open(path) as archive:
        return json.loads(archive.assets["overlay.json"])


def replace_index(path: str, index: str | bytes | dict[str, Any]) -> None:
    data = json.dumps(index) if isinstance(index, dict) else index
    with onnxarchive.edit(path) as edit:
        edit.assets["overlay.json"] = data.encode() if isinstance(data, str) else data


def test_an_overlay_is_a_valid_archive_of_what_differs(files: tuple[str, str, str]) -> None:
    base, tuned, small = files
    assert onnxarchive.check(small, full=True) == []
    onnx.checker.check_model(onnxarchive.load(small), full_check=True)
    with onnxarchive.open(small) as archive:
        assert {*archive.tensors} == {"bias", "head", "inner"}
        inputs = [value.name for value in archive.model.graph.input]
        assert inputs == ["x", "b", "first", "branch", "last"]
    assert Path(small).stat().st_size < 0.5 * Path(tuned).stat().st_size
    # A session that knows nothing of overlays takes the weights of the base as inputs.
    with onnxarchive.open(base) as archive:
        given = {name: archive.tensors[name] for name in NAMES if name != "head"}
    plain = onnxarchive.session(small)
    found = [
        plain.run(None, {**given, "x": X, "b": np.array(b)})[0].tobytes() for b in (False, True)
    ]
    assert found == outputs(onnxarchive.session(tuned))


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("prepack", [True, False])
def test_a_session_of_an_overlay_gives_the_outputs_of_the_fine_tuned_model(
    files: tuple[str, str, str], *, verify: bool, prepack: bool
) -> None:
    base, tuned, small = files
    found = outputs(overlay.session(base, small, verify=verify, prepack=prepack))
    assert found == outputs(onnxarchive.session(tuned, prepack=prepack))
    assert found != outputs(onnxarchive.session(base, prepack=prepack))


def test_an_overlay_merges_to_an_equal_model(files: tuple[str, str, str]) -> None:
    base, tuned, small = files
    merged = f"{small}.merged"
    overlay.merge(base, small, merged)
    assert onnxarchive.load(merged) == onnxarchive.load(tuned)
    assert onnxarchive.check(merged, full=True) == []
    with onnxarchive.open(merged) as archive:
        assert dict(archive.assets) == ASSETS


def test_the_commands_make_and_run_and_name_another_base(
    files: tuple[str, str, str], tmp_path: Path
) -> None:
    base, tuned, small = files

    def run(*arguments: object, status: int = 0) -> subprocess.CompletedProcess[str]:
        return completed([sys.executable, overlay.__file__, *arguments], status=status)

    made = tmp_path / "made.onnxa"
    assert "3 tensors are left" in run("make", base, tuned, made).stdout
    assert made.read_bytes() == Path(small).read_bytes()
    np.savez(tmp_path / "inputs.npz", x=X, b=np.array(True))
    run("run", base, made, tmp_path / "inputs.npz", tmp_path / "outputs.npz")
    y = np.load(tmp_path / "outputs.npz")["y"]
    assert y.tobytes() == outputs(onnxarchive.session(tuned))[1]
    error = run("merge", small, made, tmp_path / "merged.onnxa", status=1).stderr
    assert error.startswith(f"{small}: is another base: ")


@needs_smaps
def test_a_session_maps_both_files_also_by_symbolic_links(
    files: tuple[str, str, str], tmp_path: Path
) -> None:
    base, tuned, small = files
    links = [tmp_path / "links" / "base.onnxa", tmp_path / "overlay.onnxa"]
    links[0].parent.mkdir()
    for link, target in zip(links, (base, small), strict=True):
        link.symlink_to(target)
    made = overlay.session(*map(str, links), prepack=False)
    assert outputs(made) == outputs(onnxarchive.session(tuned, prepack=False))
    for path in (base, small):
        sums = mapped(os.getpid(), Path(path))
        assert sums["Rss"] > 0
        assert sums["Anonymous"] == 0


def test_branches_may_have_weights_of_the_same_name(files: tuple[str, str, str]) -> None:
    base, tuned, small = files
    several = model("tuned")
    branches = next(node for node in several.graph.node if node.op_type == "If")
    yes = branches.attribute[0].g
    yes.initializer.append(tensor("inner", "other"))
    yes.node[0].input[1] = "inner"
    onnxarchive.save(several, tuned, assets={})
    overlay.make(base, tuned, small)
    overlay.merge(base, small, f"{small}.merged")
    assert onnxarchive.load(f"{small}.merged") == several
    assert outputs(overlay.session(base, small)) == outputs(onnxarchive.session(tuned))


def test_small_tensors_are_not_left_to_the_base(
    files: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, tuned, small = files
    onnxarchive.save(model(), base, size_threshold=0)
    onnxarchive.save(model("tuned"), tuned, size_threshold=0, assets={})
    assert overlay.make(base, tuned, small) == 3
    monkeypatch.setattr(overlay, "LEAST_NBYTES", 0)
    assert overlay.make(base, tuned, small) == 4
    monkeypatch.undo()
    for use in using(base, small):
        with pytest.raises(ValueError, match=r"expected tensors of 65536 bytes or more.*'bias'"):
            use()


def test_an_input_that_is_an_initializer_is_not_taken_from_the_base(
    files: tuple[str, str, str],
) -> None:
    base, _, small = files
    with onnxarchive.edit(small) as edit:
        edit.model.graph.initializer.append(tensor("first"))
    for use in using(base, small):
        with pytest.raises(ValueError, match="expected 'first' as one input that is no initial"):
            use()


def test_a_session_that_reads_no_weight_compares_the_local_headers_of_the_base(
    files: tuple[str, str, str],
) -> None:
    base, _, small = files
    content = Path(base).read_bytes()
    flip_byte(base, content.index(b"branch"))  # the first is in the local header
    with pytest.raises(onnxarchive.ArchiveFormatError, match="branch"):
        overlay.session(base, small, verify=False)


def test_initializers_of_the_same_name_are_refused(files: tuple[str, str, str]) -> None:
    base, tuned, small = files
    repeated = model("tuned")
    repeated.graph.initializer.append(tensor("last"))
    onnxarchive.save(repeated, tuned, assets={})
    with pytest.raises(ValueError, match="expected initializers of different names"):
        overlay.make(base, tuned, small)


def test_the_base_is_not_replaced(files: tuple[str, str, str], tmp_path: Path) -> None:
    base, tuned, small = files
    content = Path(base).read_bytes()
    link = tmp_path / "link.onnxa"
    link.symlink_to(base)
    for target in (base, str(link)):
        with pytest.raises(ValueError, match="is the base; choose another file"):
            overlay.make(base, tuned, target)
        with pytest.raises(ValueError, match="is the base; choose another file"):
            overlay.merge(base, small, target)
    assert Path(base).read_bytes() == content
    overlay.merge(base, small, small)
    assert onnxarchive.load(small) == onnxarchive.load(tuned)


def test_a_file_that_changes_while_the_session_is_made_is_noticed(
    files: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, _, small = files
    original = ort.InferenceSession

    def replacing(*arguments: Any) -> Any:
        onnxarchive.save(model("other"), base)
        return original(*arguments)

    monkeypatch.setattr(ort, "InferenceSession", replacing)
    with pytest.raises(ValueError, match="changed while the session was made"):
        overlay.session(base, small)


def test_a_damaged_overlay_is_not_merged(files: tuple[str, str, str]) -> None:
    base, _, small = files
    with onnxarchive.open(small) as archive:
        offset = archive.entries["head"].data_offset
    flip_byte(small, offset)
    with pytest.raises(onnxarchive.ChecksumError, match="head"):
        overlay.merge(base, small, f"{small}.merged")


def using(base: str, small: str) -> list[Callable[[], object]]:
    """What needs the tensors of a base."""
    merged = f"{small}.merged"
    return [lambda: overlay.session(base, small), lambda: overlay.merge(base, small, merged)]


def test_another_base_is_refused(files: tuple[str, str, str], tmp_path: Path) -> None:
    _, _, small = files
    other = str(tmp_path / "other.onnxa")
    changed = model()
    changed.graph.initializer[-1].CopyFrom(tensor("last", "changed"))
    onnxarchive.save(changed, other)
    for use in using(other, small):
        with pytest.raises(ValueError, match=r"other\.onnxa: is another base: .*CRC-32s"):
            use()
    with pytest.raises(ValueError, match=r"other\.onnxa: is another base: .*CRC-32s"):
        overlay.session(other, small, verify=False)
    onnxarchive.save(further_model(), other)
    for use in using(other, small):
        with pytest.raises(ValueError, match=r"other\.onnxa: is another base: it has no tensor"):
            use()
    reshaped = model()
    reshaped.graph.initializer[-1].dims[:] = [SIDE // 2, SIDE * 2]
    onnxarchive.save(reshaped, other)
    for use in using(other, small):
        with pytest.raises(ValueError, match=r"other\.onnxa: is another base: .*type or shape"):
            use()
    assert not Path(f"{small}.merged").exists()


def test_a_tensor_of_the_base_that_has_changed_is_refused(files: tuple[str, str, str]) -> None:
    base, _, small = files
    with onnxarchive.open(base) as archive:
        offset = archive.entries["branch"].data_offset
    flip_byte(base, offset)
    for use in using(base, small):
        with pytest.raises(ValueError, match=r"base\.onnxa: the tensor 'branch' has changed"):
            use()


def test_a_base_may_get_other_metadata(files: tuple[str, str, str]) -> None:
    base, tuned, small = files
    with onnxarchive.edit(base) as edit:
        edit.metadata["author"] = "Ada"
    assert outputs(overlay.session(base, small)) == outputs(onnxarchive.session(tuned))


def changed(index: Any, *path: str, **values: Any) -> dict[str, Any]:
    """A copy of an index, with other values in the object at a path."""
    copy = json.loads(json.dumps(index))
    target = copy
    for name in path:
        target = target[name]
    target.update(values)
    return dict(copy)


def test_a_hostile_index_is_refused(files: tuple[str, str, str]) -> None:
    base, _, small = files
    index = index_of(small)
    text = json.dumps(index)
    first = index["tensors"]["first"]
    shared = ("tensors", "first")
    wrong: list[tuple[str | bytes | dict[str, Any], str]] = [
        (b"\xff", "expected JSON"),
        ("[" * 100_000, "expected JSON"),
        ("[]", "expected an object of version"),
        (text.replace('"version": 1', '"version": 1, "version": 1'), "a name occurs twice"),
        (text.replace('"last": {', '"first": {'), "a name occurs twice"),
        (changed(index, path="/etc/passwd"), "expected an object of version"),
        (changed(index, version=2), "expected version 1, found 2"),
        (changed(index, version=True), "expected an object of version"),
        (changed(index, base=None), "expected an object of version"),
        (changed(index, tensors=[]), "expected an object of version"),
        (changed(index, base="0" * 64), "is another base"),
        (changed(index, "tensors", first=3), "expected an object of key"),
        (changed(index, *shared, path="base.onnxa"), "expected an object of key"),
        (changed(index, *shared, position="0"), "expected an object of key"),
        (changed(index, *shared, position=True), "expected an object of key"),
        (changed(index, *shared, position=-1), "expected different positions below 5"),
        (changed(index, *shared, position=5), "expected different positions below 5"),
        (changed(index, *shared, position=4), "expected different positions below 5"),
        (changed(index, *shared, sha256="0" * 64), "'first' has changed"),
        (changed(index, *shared, key="../first"), "has no tensor '../first'"),
        (changed(index, *shared, key="__MODEL_PROTO"), "has no tensor '__MODEL_PROTO'"),
        (changed(index, *shared, key="last"), "is another base|has changed"),
        (changed(index, "tensors", head={**first, "position": 1}), "'head' as one input"),
        (changed(index, "tensors", none={**first, "position": 1}), "'none' as one input"),
        (changed(index, "tensors", x={**first, "position": 1}), "another type or shape"),
    ]
    for replaced, message in wrong:
        replace_index(small, replaced)
        for use in using(base, small):
            with pytest.raises(ValueError, match=message):
                use()
    replace_index(small, index)
    overlay.session(base, small)
    with onnxarchive.edit(small) as edit:
        edit.model.ir_version = 3
    with pytest.raises(ValueError, match="expected an IR version of 4"):
        overlay.session(base, small)


def test_an_initializer_that_a_caller_may_override_is_not_left_to_the_base(
    files: tuple[str, str, str], tmp_path: Path
) -> None:
    base, tuned, _ = files
    small = str(tmp_path / "small.onnxa")
    overridable = model("tuned")
    overridable.graph.input.append(helper.make_tensor_value_info("last", 1, [SIDE, SIDE]))
    onnxarchive.save(overridable, tuned, assets={})
    assert overlay.make(base, tuned, small) == 2
    onnxarchive.save(model("tuned", ir_version=3), tuned, assets={})
    assert overlay.make(base, tuned, small) == 0
    overlay.merge(base, small, f"{small}.merged")
    assert onnxarchive.load(f"{small}.merged") == onnxarchive.load(tuned)


def test_a_tensor_with_the_crc_of_another_is_not_left_to_the_base(
    files: tuple[str, str, str], tmp_path: Path
) -> None:
    base, tuned, _ = files
    with onnxarchive.open(base) as archive:
        offset = archive.entries["branch"].data_offset
    flip_byte(base, offset)
    assert overlay.make(base, tuned, str(tmp_path / "small.onnxa")) == 2


def test_overlays_are_made_of_one_model_that_is_no_overlay(
    files: tuple[str, str, str], tmp_path: Path
) -> None:
    base, tuned, small = files
    target = str(tmp_path / "target.onnxa")
    with pytest.raises(ValueError, match=r"it is an overlay, with the asset overlay\.json"):
        overlay.make(base, small, target)
    with pytest.raises(ValueError, match=r"it is no overlay, since it has no asset overlay\.json"):
        overlay.session(base, tuned)
    onnxarchive.save(model("tuned"), tuned, models={"further": further_model()}, assets={})
    with pytest.raises(ValueError, match=r"expected one model, found \['', 'further'\]"):
        overlay.make(base, tuned, target)
    assert not Path(target).exists()
