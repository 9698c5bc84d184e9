"""Archives of several models: exported and extracted, each model by its id."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import onnx
import pytest
from models import (
    full_model,
    further_model,
    location,
    nested_model,
    normalised,
    raw_tensor,
    runnable_model,
)

import onnxarchive

IDS = ["", "decoder"]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """An archive of two models that share a tensor, alone in a directory."""
    return saved(tmp_path / "archive" / "m.onnxa", further_model())


def saved(path: Path, decoder: onnx.ModelProto) -> Path:
    path.parent.mkdir(exist_ok=True)
    assets = {"notes.txt": b"notes"}
    onnxarchive.save(runnable_model(), path, models={"decoder": decoder}, assets=assets)
    return path


def given(model: str) -> onnx.ModelProto:
    return further_model() if model else runnable_model()


# Export


@pytest.mark.parametrize("external_data", [None, "m.data"])
def test_models_of_every_kind_of_tensor_are_taken_apart_again(
    tmp_path: Path, external_data: str | None
) -> None:
    models = {"": full_model(), "a": nested_model(9, raw_tensor("w")), "b": full_model(301)}
    first, *others = models.values()
    onnxarchive.save(
        first,
        tmp_path / "m.onnxa",
        models={"a": others[0], "b": others[1]},
        size_threshold=0,
        convert_attribute=True,
    )
    for model, expected in models.items():
        path = tmp_path / "m.onnx"
        onnxarchive.export(tmp_path / "m.onnxa", path, model=model, external_data=external_data)
        assert normalised(onnx.load(path)) == normalised(expected)


def test_a_path_in_place_of_a_mapping_of_models_is_refused(archive: Path, tmp_path: Path) -> None:
    further: Any = str(archive)
    target = tmp_path / "new.onnxa"
    with pytest.raises(TypeError, match=r"models: expected a mapping.*got str"):
        onnxarchive.convert(archive, target, models=further)
    with pytest.raises(TypeError, match=r"models: expected a mapping.*got str"):
        onnxarchive.save(onnxarchive.load(archive), target, models=further)
    assert not target.exists()


def test_external_data_holds_the_tensors_of_the_exported_model_alone(
    archive: Path, tmp_path: Path
) -> None:
    path, progress = tmp_path / "m.onnx", []
    onnxarchive.export(
        archive,
        path,
        model="decoder",
        external_data="m.data",
        progress=lambda done, total: progress.append((done, total)),
    )
    own = {it.name: len(it.raw_data) for it in further_model().graph.initializer}
    assert progress[-1] == (sum(own.values()), sum(own.values()))
    exported = onnx.load(path, load_external_data=False).graph.initializer
    assert {it.name: location(it) for it in exported} == dict.fromkeys(own, "m.data")
    assert (tmp_path / "m.data").stat().st_size < sum(own.values()) + 4096


def test_an_exported_model_is_converted_back_to_the_same_archive(
    archive: Path, tmp_path: Path
) -> None:
    paths = {model: tmp_path / f"{model or 'default'}.onnx" for model in IDS}
    for model, path in paths.items():
        onnxarchive.export(archive, path, model=model, external_data=f"{path.stem}.data")
    onnxarchive.convert(
        paths[""],
        tmp_path / "again.onnxa",
        models={"decoder": paths["decoder"]},
        assets={"notes.txt": b"notes"},
    )
    assert (tmp_path / "again.onnxa").read_bytes() == archive.read_bytes()


# Extract


def test_every_extracted_model_loads_by_itself(archive: Path, tmp_path: Path) -> None:
    onnxarchive.extract(archive, tmp_path / "files")
    with zipfile.ZipFile(archive) as zipped:
        for name in zipped.namelist():
            assert (tmp_path / "files" / name).read_bytes() == zipped.read(name)
    for model, name in zip(IDS, ["__MODEL_PROTO", "__MODEL_PROTO_decoder"], strict=True):
        path = tmp_path / "files" / name
        assert normalised(onnx.load(path)) == given(model)
        onnx.checker.check_model(path, full_check=True)
