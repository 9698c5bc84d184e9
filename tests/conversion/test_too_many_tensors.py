"""Models with more tensors than an archive has entries: refused with the threshold that helps."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from models import external, model_of, raw_tensor
from onnx import TensorProto

import onnxarchive
from onnxarchive import UnsupportedFeatureError
from onnxarchive.sources import source
from onnxarchive.zipformat import layout

LIMIT = 6


@pytest.fixture(name="few_entries")
def _few_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "MAX_ENTRIES", LIMIT)
    monkeypatch.setattr(source, "MAX_ENTRIES", LIMIT)


def model_with(sizes: list[int]) -> onnx.ModelProto:
    """A model with initializers of these sizes in bytes."""
    return model_of(
        *(raw_tensor(f"w{index}", TensorProto.UINT8, [size]) for index, size in enumerate(sizes))
    )


def converted(model: onnx.ModelProto, folder: Path, size_threshold: int) -> None:
    onnx.save_model(model, folder / "m.onnx")
    onnxarchive.convert(folder / "m.onnx", folder / "m.onnxa", size_threshold=size_threshold)


def saved(model: onnx.ModelProto, folder: Path, size_threshold: int) -> None:
    onnxarchive.save(model, folder / "m.onnxa", size_threshold=size_threshold)


@pytest.mark.usefixtures("few_entries")
@pytest.mark.parametrize("make", [converted, saved])
@pytest.mark.parametrize(
    ("sizes", "threshold"),
    [
        ([10, 20, 30, 40, 50, 60], 11),
        ([60, 50, 10, 40, 30, 20, 70, 80], 31),
        ([10] * 9, 11),
        ([10, 20, 20, 20, 20, 20, 20], 21),
        ([3, 4, 5, 100, 100, 100, 200, 200], 6),
    ],
)
def test_the_least_threshold_that_fits_is_named(
    make: Callable[[onnx.ModelProto, Path, int], None],
    sizes: list[int],
    threshold: int,
    tmp_path: Path,
) -> None:
    model = model_with(sizes)
    named = rf"at most {LIMIT} entries, found {len(sizes) + 1}; size_threshold={threshold} "
    for too_low in (0, threshold - 1):
        with pytest.raises(UnsupportedFeatureError, match=r"at most 6 entries") as caught:
            make(model, tmp_path, too_low)
        assert f"size_threshold={threshold} (--size-threshold {threshold})" in str(caught.value)
        assert too_low or re.search(named, str(caught.value))
        assert not (tmp_path / "m.onnxa").exists()
    make(model, tmp_path, threshold)
    assert len(onnxarchive.load(tmp_path / "m.onnxa").graph.initializer) == len(sizes)


@pytest.mark.usefixtures("few_entries")
def test_tensors_of_all_models_and_assets_count_together(tmp_path: Path) -> None:
    one, two = model_with([10, 20, 30]), model_with([15, 25])
    with pytest.raises(UnsupportedFeatureError, match=r"found 8; size_threshold=16 "):
        onnxarchive.save(
            one, tmp_path / "m.onnxa", models={"two": two}, assets={"a": b""}, size_threshold=0
        )
    assets = {str(number): b"" for number in range(LIMIT)}
    with pytest.raises(UnsupportedFeatureError, match=r"found 7; leave assets out"):
        onnxarchive.save(model_with([]), tmp_path / "m.onnxa", assets=assets)


def test_no_threshold_is_named_if_so_many_tensors_do_not_fit_into_a_model() -> None:
    sizes = [20_000] * (layout.MAX_ENTRIES + 200_000)
    with pytest.raises(UnsupportedFeatureError, match=r"no size_threshold helps, .*split the mod"):
        source.require_entry_count(sizes, 1)


@pytest.mark.large
def test_too_many_tensors_are_refused_before_their_data_is_looked_for(tmp_path: Path) -> None:
    count = layout.MAX_ENTRIES
    model = model_of(
        *(
            external(raw_tensor(f"w{number}", TensorProto.UINT8, [1]), "missing.data")
            for number in range(count)
        )
    )
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(UnsupportedFeatureError, match=f"found {count + 1}; size_threshold=2 "):
        onnxarchive.convert(tmp_path / "m.onnx", tmp_path / "m.onnxa", size_threshold=0)
