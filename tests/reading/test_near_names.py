"""The error of a missing name asks if a similar one was meant."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from models import runnable_model

import onnxarchive
from onnxarchive import ModelNotFoundError, TensorNotFoundError


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "m.onnxa"
    models = {"decoder": runnable_model()}
    onnxarchive.save(runnable_model(), path, models=models, assets={"labels.txt": b"cat"})
    return path


def edited(path: Path, change: Callable[[onnxarchive.Edit], object]) -> None:
    with onnxarchive.edit(path) as edit:
        change(edit)


# A call with a name that is nearly one of the archive, and this one.
CALLS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a tensor": (lambda path: onnxarchive.open(path).tensors["layer.0/wieght"], "layer.0/weight"),
    "a key": (lambda path: onnxarchive.open(path).tensor_by_key("layer_weight"), "layer_0_weight"),
    "an entry": (lambda path: onnxarchive.open(path).read("labels.txt"), "assets/labels.txt"),
    "an asset": (lambda path: onnxarchive.open(path).assets["lables.txt"], "labels.txt"),
    "a model": (lambda path: onnxarchive.open(path, model="decodr"), "decoder"),
    "a tensor of an edit": (
        lambda path: edited(path, lambda edit: edit.tensors["Layer.0/Weight"]),
        "layer.0/weight",
    ),
    "an asset of an edit": (
        lambda path: edited(path, lambda edit: edit.assets["label.txt"]),
        "labels.txt",
    ),
    "a model of an edit": (
        lambda path: edited(path, lambda edit: edit.models["decoders"]),
        "decoder",
    ),
}


@pytest.mark.parametrize(("call", "name"), CALLS.values(), ids=CALLS)
def test_an_error_asks_if_the_nearest_name_was_meant(
    archive: Path, call: Callable[[Path], object], name: str
) -> None:
    with pytest.raises((ModelNotFoundError, TensorNotFoundError)) as caught:
        call(archive)
    assert str(caught.value).endswith(f"; did you mean {name!r}?")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_name_that_is_near_to_none_gets_no_question(archive: Path) -> None:
    with onnxarchive.open(archive) as opened:
        with pytest.raises(TensorNotFoundError, match=r"there is no initializer 'q'$"):
            opened.tensors["q"]
        with pytest.raises(TensorNotFoundError, match=r"there is no initializer 7$"):
            opened.tensors[7]  # type: ignore[index]


def test_names_are_compared_only_if_the_error_is_shown(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = Mock(return_value=[])
    monkeypatch.setattr("difflib.get_close_matches", compared)
    with onnxarchive.open(archive) as opened:
        assert opened.tensors.get("layer.0/wieght") is None
        assert compared.call_count == 0
        with pytest.raises(TensorNotFoundError, match="wieght"):
            opened.tensors["layer.0/wieght"]
    assert compared.call_count == 1


def test_no_name_is_proposed_if_there_are_too_many_to_compare_quickly(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onnxarchive.errors._MAX_COMPARED", 0)
    with onnxarchive.open(archive) as opened, pytest.raises(TensorNotFoundError, match=r"wieght'$"):
        opened.tensors["layer.0/wieght"]
