"""A further model of an archive, by its id, in runtimes and other libraries."""

from __future__ import annotations

import importlib.util
import os
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import edits
import numpy as np
import onnx
import pytest
from models import external_tensors, further_model, normalised, run_model, runnable_model
from onnx import helper, numpy_helper

import onnxarchive
from onnxarchive import ModelNotFoundError, UnsupportedFeatureError
from onnxarchive.interop import netron, run
from onnxarchive.model import model_proto

ort = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")

X = np.linspace(-1, 1, 2048, dtype=np.float32).reshape(2, 1024)
IDS = ["", "decoder"]
MIB = 1 << 20

needs_netron = pytest.mark.skipif(
    importlib.util.find_spec("netron") is None, reason="Netron is not installed"
)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """An archive of two models that share a tensor."""
    path = tmp_path / "m.onnxa"
    onnxarchive.save(
        runnable_model(), path, models={"decoder": further_model()}, assets={"a.txt": b"a"}
    )
    return path


def given(model: str) -> onnx.ModelProto:
    return further_model() if model else runnable_model()


def outputs(model: str, folder: Path) -> list[bytes]:
    """What ONNX Runtime computes of the model that was saved."""
    onnx.save(given(model), folder / "original.onnx")
    return [it.tobytes() for it in run_model(folder / "original.onnx", x=X)]


READS: list[Callable[..., object]] = [
    lambda path, **model: onnxarchive.link(path, path.parent / "m.onnx", **model),
    lambda path, **model: onnxarchive.export(path, path.parent / "m.onnx", **model),
    onnxarchive.session,
    lambda path, **model: onnxarchive.session(path.read_bytes(), **model),
    onnxarchive.session_options,
    onnxarchive.check_model,
    lambda path, **model: onnxarchive.infer_shapes(path, path.parent / "n.onnxa", **model),
    lambda path, **model: onnxarchive.transform(path, path.parent / "n", _same, **model),
    run.run,
]


@pytest.mark.parametrize("read", [*READS, pytest.param(netron.Server, marks=needs_netron)])
def test_the_error_of_an_id_that_no_model_has_lists_the_existing_ids(
    archive: Path, read: Callable[..., object]
) -> None:
    with pytest.raises(ModelNotFoundError, match="the id 'encoder', only '', 'decoder'"):
        read(archive, model="encoder")
    assert os.listdir(archive.parent) == [archive.name]


def _same(model: onnx.ModelProto) -> onnx.ModelProto:
    return model


# Links


@pytest.fixture
def links(archive: Path) -> dict[str, Path]:
    """A link of each model by id."""
    paths = {model: archive.parent / f"{model or 'default'}.onnx" for model in IDS}
    for model, path in paths.items():
        onnxarchive.link(archive, path, model=model)
    return paths


@pytest.mark.parametrize("model", IDS)
def test_a_link_of_each_model_is_read_by_other_tools(links: dict[str, Path], model: str) -> None:
    linked = onnx.load(links[model])
    assert model_proto.take_link_fingerprint(linked) is not None
    assert normalised(linked) == given(model)
    onnx.checker.check_model(links[model], full_check=True)
    (found,) = run_model(links[model], x=X)
    assert [found.tobytes()] == outputs(model, links[model].parent)
    assert onnxarchive.check_link(links[model]) == []


def test_links_of_both_models_lead_to_one_copy_of_what_they_share(links: dict[str, Path]) -> None:
    places = {
        it.name: {pair.key: pair.value for pair in it.external_data}
        for path in links.values()
        for it in onnx.load(path, load_external_data=False).graph.initializer
    }
    assert places["layer.0/weight"] == places["embedding"] != places["own"]


def test_a_further_model_that_is_added_renamed_or_changed_breaks_no_other_link(
    archive: Path, links: dict[str, Path]
) -> None:
    added = further_model()
    added.graph.initializer.append(numpy_helper.from_array(X, "new"))
    added.graph.node.append(helper.make_node("Identity", ["new"], ["n"]))
    edits.replace_model(archive, added, name="added")
    assert findings(links) == {"": [], "decoder": []}
    assert onnxarchive.load(archive, model="added") == added
    edits.rename_model(archive, "added", "aaa")
    assert findings(links) == {"": [], "decoder": []}
    edits.document(archive, model="decoder")
    found = findings(links)
    assert found[""] == []
    (message,) = found["decoder"]
    assert message.startswith("the archive has changed since it was linked")


def test_the_error_of_a_link_whose_model_is_gone_lists_the_existing_models(
    archive: Path, links: dict[str, Path]
) -> None:
    edits.rename_model(archive, "decoder", "other")
    assert findings(links) == {
        "": [],
        "decoder": ["there is no model with the id 'decoder', only '', 'other'; write a new link"],
    }


@pytest.mark.parametrize("model", IDS)
def test_a_weight_that_is_changed_breaks_the_links_of_its_model_alone(
    archive: Path, links: dict[str, Path], model: str
) -> None:
    own = given(model).graph.initializer[1]
    edits.replace_tensor(archive, own.name, numpy_helper.to_array(own) + 1, model=model)
    found = findings(links)
    assert found.pop(model) != []
    assert [*found.values()] == [[]]


def test_a_link_of_one_model_is_checked_against_that_model(links: dict[str, Path]) -> None:
    model = onnx.load(links["decoder"], load_external_data=False)
    (mark,) = (it for it in model.metadata_props if it.key == model_proto.LINK_FINGERPRINT)
    assert mark.value.endswith(" decoder")
    mark.value = mark.value.removesuffix(" decoder")
    links["decoder"].write_bytes(model.SerializeToString())
    (message,) = findings(links)["decoder"]
    assert message.startswith("the archive has changed since it was linked")


def test_a_link_is_converted_to_an_archive_of_its_model(
    links: dict[str, Path], tmp_path: Path
) -> None:
    onnxarchive.convert(links[""], tmp_path / "n.onnxa", models={"decoder": links["decoder"]})
    for model in IDS:
        assert onnxarchive.load(tmp_path / "n.onnxa", model=model) == given(model)
    assert onnxarchive.diff(tmp_path / "m.onnxa", tmp_path / "n.onnxa").sections["models"] == ()


def findings(links: dict[str, Path]) -> dict[str, list[str]]:
    return {model: [it.message for it in onnxarchive.check_link(links[model])] for model in links}


# Sessions


def session_of(source: Any, **model: Any) -> list[bytes]:
    return [it.tobytes() for it in onnxarchive.session(source, **model).run(None, {"x": X})]


@pytest.mark.parametrize("model", IDS)
def test_sessions_of_each_model_compute_what_the_model_does(archive: Path, model: str) -> None:
    expected = outputs(model, archive.parent)
    assert session_of(archive, model=model) == expected
    assert session_of(archive.read_bytes(), model=model) == expected
    with onnxarchive.open(archive, model=model) as opened:
        assert session_of(opened) == session_of(opened, model=model) == expected
        for source in (archive, archive.read_bytes(), opened):
            made = ort.InferenceSession(*onnxarchive.session_options(source, model=model))
            assert [it.tobytes() for it in made.run(None, {"x": X})] == expected


def test_the_default_model_of_an_archive_opened_with_another_model_is_refused(
    archive: Path,
) -> None:
    with (
        onnxarchive.open(archive, model="decoder") as opened,
        pytest.raises(
            ValueError, match="opened with the model 'decoder', not ''; open it with model=''"
        ),
    ):
        onnxarchive.session(opened, model="")


def test_an_archive_that_was_opened_with_another_model_is_refused(archive: Path) -> None:
    with (
        onnxarchive.open(archive) as opened,
        pytest.raises(
            ValueError, match=r"the model '', not 'decoder'; open it with model='decoder'"
        ),
    ):
        onnxarchive.session(opened, model="decoder")


def test_the_model_that_a_session_gets_has_its_own_tensors_and_shares_their_pages(
    archive: Path,
) -> None:
    places = {}
    for model in IDS:
        serialized, _ = onnxarchive.session_options(archive, model=model)
        for it in onnx.ModelProto.FromString(serialized).graph.initializer:
            places[it.name] = {pair.key: pair.value for pair in it.external_data}
    assert list(places) == ["layer.0/weight", "layer.0/bias", "embedding", "own"]
    assert places["embedding"]["location"] == places["own"]["location"] == archive.name
    assert places["layer.0/weight"] == places["embedding"] != places["own"]


@pytest.mark.parametrize("model", IDS)
def test_run_runs_the_chosen_model(archive: Path, model: str) -> None:
    outcome = run.run(archive, {"x": X}, model=model)
    assert [it.tobytes() for it in outcome.outputs.values()] == outputs(model, archive.parent)


def test_an_onnx_file_has_no_further_model(tmp_path: Path) -> None:
    onnx.save(runnable_model(), tmp_path / "m.onnx")
    with pytest.raises(ModelNotFoundError, match=r"m\.onnx: only an archive has a model 'decoder'"):
        run.run(tmp_path / "m.onnx", {"x": X}, model="decoder")


def test_the_limit_of_protobuf_applies_to_each_model_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, large, small = tmp_path / "m.onnxa", runnable_model(), further_model()
    large.doc_string = "x" * 10_000
    onnxarchive.save(large, path, models={"small": small})
    onnxarchive.save(small, tmp_path / "n.onnxa", models={"large": large})
    limit = 70_000  # between the smaller model with its weights and the larger one
    monkeypatch.setattr(model_proto, "SIZE_LIMIT", limit)
    onnxarchive.export(path, tmp_path / "small.onnx", model="small")
    with pytest.raises(UnsupportedFeatureError, match=f"less than {limit} bytes"):
        onnxarchive.export(path, tmp_path / "large.onnx")
    monkeypatch.setattr(model_proto, "SIZE_LIMIT", 5_000)
    onnxarchive.link(path, tmp_path / "small.onnx", model="small")
    with pytest.raises(UnsupportedFeatureError, match="less than 5000 bytes"):
        onnxarchive.link(tmp_path / "n.onnxa", tmp_path / "large.onnx", model="large")


# onnx and other libraries


def test_check_model_names_the_faulty_model(tmp_path: Path) -> None:
    path, faulty = tmp_path / "m.onnxa", further_model()
    faulty.graph.node[0].op_type = "NoSuchOperator"
    onnxarchive.save(runnable_model(), path, models={"decoder": faulty})
    assert onnxarchive.check_model(path, full_check=True) == []
    (finding,) = onnxarchive.check_model(path, model="decoder")
    assert finding.entry == "__MODEL_PROTO_decoder"
    assert "NoSuchOperator" in finding.message


@pytest.mark.parametrize("model", IDS)
def test_shapes_are_inferred_in_the_chosen_model_and_the_other_is_kept(
    archive: Path, path: Path, model: str
) -> None:
    inferred = onnxarchive.infer_shapes(archive, path, model=model)
    expected = onnx.shape_inference.infer_shapes(given(model))
    assert inferred.graph.value_info == expected.graph.value_info
    require_archive(path, {**{it: given(it) for it in IDS}, model: expected})


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("weights", ["hidden", "external", "loaded"])
@pytest.mark.parametrize("model", IDS)
def test_a_function_transforms_the_chosen_model_and_the_other_is_kept(
    archive: Path, path: Path, model: str, weights: Any, in_place: bool
) -> None:
    def named(model: onnx.ModelProto) -> onnx.ModelProto:
        model.doc_string = "named"
        return model

    destination = archive if in_place else path
    onnxarchive.transform(archive, destination, named, model=model, weights=weights)
    expected = {it: given(it) for it in IDS}
    expected[model].doc_string = "named"
    require_archive(destination, expected)


def test_attributes_outside_the_other_model_stay_outside(tmp_path: Path) -> None:
    decoder = further_model()
    value = numpy_helper.from_array(X, "value")
    decoder.graph.node.append(helper.make_node("Constant", [], ["constant"], value=value))
    path = tmp_path / "m.onnxa"
    onnxarchive.save(runnable_model(), path, models={"decoder": decoder}, convert_attribute=True)
    onnxarchive.transform(path, tmp_path / "n.onnxa", _same, weights="external")
    assert (tmp_path / "n.onnxa").read_bytes() == path.read_bytes()


def require_archive(path: Path, models: dict[str, onnx.ModelProto]) -> None:
    """Asserts the models of an archive, that the shared tensor is stored once, and the asset."""
    assert onnxarchive.check(path, full=True) == []
    for model, expected in models.items():
        assert onnxarchive.load(path, model=model) == expected
    with onnxarchive.open(path) as archive:
        assert list(archive.entries) == [
            "layer_0_weight",
            "own",
            "assets/a.txt",
            "__MODEL_PROTO_decoder",
            "__MODEL_PROTO",
        ]


def test_onnx_loads_the_default_model(archive: Path) -> None:
    assert onnx.load(archive) == runnable_model()


@pytest.mark.tool
def test_tensors_of_a_further_model_are_tensors_of_pytorch(archive: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    from onnxarchive.interop import torch as archived

    with onnxarchive.open(archive, model="decoder") as opened:
        found = {name: it.numpy().tobytes() for name, it in archived.tensors(opened).items()}
    assert found == {it.name: it.raw_data for it in further_model().graph.initializer}


# Netron


@needs_netron
@pytest.mark.parametrize("model", IDS)
def test_netron_gets_the_chosen_model_and_its_tensors(archive: Path, model: str) -> None:
    with (
        onnxarchive.open(archive, model=model) as opened,
        netron.Server(archive, model=model) as server,
    ):
        name = f"m.onnxa ({model})" if model else "m.onnxa"
        assert f'<meta name="name" content="{name}">'.encode() in read(server.url)
        served = onnx.ModelProto.FromString(read(server.url + "data/model.onnx"))
        assert served == opened.model
        keys = external_tensors(served)
        assert [*keys] == ([*opened.tensors.refs] if model else ["layer_0_weight"])
        for key in keys:
            assert read(f"{server.url}data/{key}") == opened.read(key)
        if not model:
            with pytest.raises(urllib.error.HTTPError, match="404") as caught:
                read(server.url + "data/own")
            caught.value.close()


def read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as response:
        data: bytes = response.read()
    return data
