"""Archives of several models, compared: each model by its id."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from models import flip_byte, further_model, model_of, raw_tensor, runnable_model
from onnx import TensorProto, numpy_helper

import onnxarchive
from onnxarchive import ModelNotFoundError
from onnxarchive.comparing.diff import Difference, diff


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """An archive of two models that share a tensor."""
    return saved(tmp_path / "m.onnxa", further_model())


def saved(path: Path, decoder: onnx.ModelProto) -> Path:
    assets = {"notes.txt": b"notes"}
    onnxarchive.save(runnable_model(), path, models={"decoder": decoder}, assets=assets)
    return path


def changed(difference: Difference) -> dict[str, list[str]]:
    """The names of the changes by section."""
    return {
        section: [change.name for change in changes]
        for section, changes in difference.sections.items()
        if changes
    }


def test_archives_of_the_same_models_are_the_same(archive: Path, tmp_path: Path) -> None:
    other = saved(tmp_path / "other.onnxa", further_model())
    for full in (False, True):
        difference = diff(archive, other, full=full)
        assert difference.is_same
        sections = [*difference.sections]
        assert sections[-2:] == ["models", "assets"]
        count = (len(sections) - 2) // 2
        assert [f"decoder/{it}" for it in sections[:count]] == sections[count : 2 * count]


def test_a_change_is_found_in_its_model(archive: Path, tmp_path: Path) -> None:
    decoder = further_model()
    tensor = decoder.graph.initializer[0]
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) + 1, tensor.name))
    decoder.graph.node[1].op_type = "Abs"
    other = saved(tmp_path / "other.onnxa", decoder)
    expected = {"nodes": ["rectified"], "tensors": ["embedding"]}
    assert changed(diff(archive, other)) == {f"decoder/{it}": expected[it] for it in expected}
    assert changed(diff(archive, other, model="decoder")) == expected
    assert diff(archive, other, model="").is_same


def test_a_model_that_one_archive_lacks_is_a_change(archive: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.onnxa"
    models = {"extra": further_model()}
    onnxarchive.save(runnable_model(), other, models=models, assets={"notes.txt": b"notes"})
    difference = diff(archive, other)
    assert changed(difference) == {"models": ["decoder", "extra"]}
    removed, added = difference.sections["models"]
    assert (removed.kind, removed.before) == ("removed", "nodes: 3")
    assert (added.kind, added.after) == ("added", "nodes: 3")


def test_one_model_is_compared_without_assets(archive: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.onnxa"
    onnxarchive.save(runnable_model(), other, models={"decoder": further_model()})
    assert changed(diff(archive, other)) == {"assets": ["notes.txt"]}
    difference = diff(archive, other, model="decoder")
    assert difference.is_same
    assert "assets" not in difference.sections
    totals: list[int] = []
    diff(archive, archive, model="decoder", full=True, progress=lambda *it: totals.append(it[1]))
    assert {*totals} == {sum(len(it.raw_data) for it in further_model().graph.initializer)}


def test_full_reads_a_tensor_that_models_share_once(archive: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.onnxa"
    other.write_bytes(archive.read_bytes())
    totals: set[int] = set()
    diff(archive, other, full=True, progress=lambda done, total: totals.add(total))
    with onnxarchive.open(archive) as opened:
        stored = sum(entry.nbytes for name, entry in opened.entries.items() if "_P" not in name)
    inner = sum(
        len(it.raw_data) for it in runnable_model().graph.initializer if len(it.raw_data) < 1024
    )
    assert totals == {stored + inner}


def test_full_finds_the_model_whose_weight_was_damaged(archive: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.onnxa"
    other.write_bytes(archive.read_bytes())
    with onnxarchive.open(archive) as opened:
        offsets = {key: entry.data_offset for key, entry in opened.entries.items()}
    flip_byte(other, offsets["own"])
    assert diff(archive, other).is_same
    assert changed(diff(archive, other, full=True)) == {"decoder/tensors": ["own"]}
    flip_byte(other, offsets["layer_0_weight"])
    both = {"tensors": ["layer.0/weight"], "decoder/tensors": ["embedding", "own"]}
    assert changed(diff(archive, other, full=True)) == both


def test_an_asset_is_not_taken_for_a_tensor_of_a_model_named_like_its_first_letter(
    tmp_path: Path,
) -> None:
    paths = [tmp_path / "one.onnxa", tmp_path / "other.onnxa"]
    weight = raw_tensor("w", TensorProto.UINT8, (2000,))
    for number, path in enumerate(paths):
        assets = {"a": np.full(3, number, np.uint8).tobytes()}
        onnxarchive.save(model_of(), path, models={"a": model_of(weight)}, assets=assets)
    assert changed(diff(*paths)) == {"assets": ["a"]}


def test_a_model_that_both_archives_lack_is_refused(archive: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="the id 'x', only '', 'decoder'"):
        diff(archive, archive, model="x")
